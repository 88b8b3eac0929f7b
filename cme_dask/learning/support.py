"""Cells of a variable from the row sample: quantile bins, or boxes of a regression tree."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.cell_sums import CellSpec
from cme_dask.numerics.moments import Function
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.support import SUPPORT_SIZE, Support
from cme_dask.numerics.tree import Tree
from cme_dask.storage.priority import RowSample
from cme_dask.storage.sample import Sample

Array = Any

_GROWN = 1 << 22  # rows times squared columns that a tree sees: a second
_ROWS_PER_CELL = 8  # that it sees at least
_COVARIANCES = 1 << 21  # numbers in the covariances of all cells, at most
_FAR = 6.0  # deviations beyond which heavy tails would take the cells of all other rows
_LABELS_FIRST = 1e3  # weight of labels: that of one row in 10^5 still outweighs all else


def make_support(
    rows: Array,
    weights: Array,
    size: int = SUPPORT_SIZE,
    categorical: Sequence[bool] = (),
) -> Support:
    """Cells for the law of a variable.

    With at most ``size`` distinct rows each is a cell of its own, exactly. Otherwise, cells of
    about equal mass between quantiles of a scalar variable; and boxes, the leaves of a regression
    tree of the standardised columns on themselves, whose every split is the one that removes most
    of the squared distance between rows and the means of their cells. The mean of a cell is its
    point.

    Parameters
    ----------
    rows
        Rows of the row sample, shape (k, d).
    weights
        Their weights, shape (k,); rows without weight are left out.
    size
        Largest number of cells.
    categorical
        Which columns are codes of labels, shape (d,): no cell of several columns mixes labels,
        unless there are more combinations of them than cells.

    Raises
    ------
    DataError
        If no row has a weight, or the size is not positive.

    Notes
    -----
    An atom that holds more than two cells' mass is a cell of its own. Source of the tree: Breiman,
    Friedman, Olshen and Stone (1984), Classification and Regression Trees, section 8.3; the best
    split first, as in scikit-learn.
    """
    if size < 1:
        raise DataError(f"a support needs at least one cell, got size={size!r}")
    usable = weights > np.finfo(np.float64).tiny * weights.max(initial=0.0)
    if not usable.any():
        raise DataError("a support needs rows of positive weight")
    distinct, mass = distinct_rows(rows[usable], weights[usable])
    if rows.shape[1] == 1:
        return _bins(distinct[:, 0], mass, size)
    return _boxes(distinct, mass, size, np.array([*categorical] or [False] * rows.shape[1]))


def cell_spec(
    rows: RowSample,
    i: int,
    sample: Sample,
    size: int,
    functions: Mapping[str, Function],
    partition: PartitionBasis | None = None,
) -> CellSpec:
    """What a pass sums by cell for the laws of variable ``i``.

    Parameters
    ----------
    rows
        The row sample.
    i
        0 for x, 1 for y.
    sample
        All rows.
    size
        Largest number of cells; of more than 45 columns fewer, since each has a covariance.
    functions, partition
        Declared functions and the partition of unity of the variable.
    """
    part, columns = rows.parts[i], sample.columns[i]
    d = part.shape[1]
    size = max(min(size, _COVARIANCES // d**2), 1)
    few = part[: max(_GROWN // d**2, _ROWS_PER_CELL * size)]
    support = make_support(few, rows.importance[: len(few)], size, columns.categorical)
    return CellSpec.of(support, part, *stands_for(rows, sample), functions, partition)


def stands_for(rows: RowSample, sample: Sample) -> tuple[Array, float]:
    """How many rows each of the sample stands for, up to a factor, and about how many there are.

    That is 1 / its chance to be drawn.
    """
    n_rows = sample.n_rows * (1.0 if sample.part is None else sample.part.kept_share)
    if rows.complete:
        return np.ones(len(rows)), n_rows
    with np.errstate(all="ignore"):  # weights of any size; a rough number will do
        stands = rows.importance / rows.weights
        stands = np.nan_to_num(stands / np.median(stands), nan=1.0)
    return np.clip(stands, 1e-9, 1e9), n_rows


def distinct_rows(rows: Array, weights: Array) -> tuple[Array, Array]:
    """Distinct rows in order, and their masses, sum 1."""
    distinct, which = np.unique(rows, axis=0, return_inverse=True)
    mass = np.bincount(which.ravel(), weights)
    return distinct, mass / mass.sum()


def deviations(rows: Array, mass: Array) -> Array:
    """Standard deviations of the columns, 1 for constant ones."""
    largest = np.abs(rows).max(axis=0)
    unit = np.where(largest > 0, largest, 1.0)  # squares of the values may leave the range
    scaled = rows / unit
    deviation = unit * np.sqrt(mass @ (scaled - mass @ scaled) ** 2)
    tiny = np.finfo(np.float64).tiny
    return np.where((rows != rows[0]).any(axis=0), np.maximum(deviation, tiny), 1.0)


def _bins(values: Array, mass: Array, size: int) -> Support:
    """Intervals between quantiles; values (k,) ascend."""
    if len(values) <= size:
        number = np.arange(len(values))
    else:
        level = np.minimum((size * (np.cumsum(mass) - mass / 2)).astype(np.int64), size - 1)
        number = np.unique(level, return_inverse=True)[1]
    first = np.flatnonzero(np.diff(number, prepend=-1))
    last = np.append(first[1:], len(values)) - 1
    share = np.bincount(number, mass)
    # From the lowest value of the bin, so that the mean of equal values is that value.
    lowest = values[first]
    means = lowest + np.bincount(number, mass * (values - lowest[number])) / share
    edges = _between(values[last[:-1]], values[first[1:]])
    return Support(np.clip(means, lowest, values[last])[:, None], edges=edges)


def _between(below: Array, above: Array) -> Array:
    """Numbers t with below <= t < above, in the middle where there is one."""
    return np.clip(below / 2 + above / 2, below, np.nextafter(above, -np.inf))


def _boxes(rows: Array, mass: Array, size: int, categorical: Array) -> Support:
    """Leaves of a tree; rows (k, d) are distinct and in order.

    The tree sees the ranks of the values, which float32 holds exactly: it splits where a tree of
    the values themselves would.
    """
    from sklearn.tree import DecisionTreeRegressor  # slow to import, and scalar variables need none

    values, ranks = zip(*(np.unique(c, return_inverse=True) for c in rows.T), strict=True)
    ranks = np.stack(ranks, axis=1)
    grown = DecisionTreeRegressor(max_leaf_nodes=max(size, 2), random_state=0)
    if size == 1 or len(rows) == 1:
        tree = Tree(np.zeros(1, dtype=np.int64), np.full(1, np.inf), np.zeros(1, dtype=np.int64))
    elif len(rows) <= size:  # neither masses nor distances may keep two rows together
        tree = _raw_tree(grown.fit(ranks, ranks).tree_, values)
    else:
        targets = np.hstack(
            [
                np.clip((rows - mass @ rows) / deviations(rows, mass), -_FAR, _FAR)[
                    :, ~categorical
                ],
                *(_LABELS_FIRST * _bits(r) for r in ranks[:, categorical].T),
            ]
        )
        tree = _raw_tree(grown.fit(ranks, targets, sample_weight=mass * len(rows)).tree_, values)
    return Support(_means(rows, mass, tree.leaves(rows), tree.size), tree=tree)


def _bits(codes: Array) -> Array:
    """Binary digits of codes: of those that agree in the higher ones, the next is monotone."""
    digits = np.arange(max(int(codes.max()).bit_length(), 1))
    return ((codes[:, None] >> digits) & 1).astype(np.float64)


def _raw_tree(grown: Any, values: Sequence[Array]) -> Tree:
    """A tree of scikit-learn on ranks, breadth first and in the units of the columns."""
    feature, threshold, left = [], [], []
    nodes, free = [0], count(1)
    for number, node in enumerate(nodes):  # which grows
        child = grown.children_left[node]
        if child < 0:
            feature.append(0)
            threshold.append(np.inf)
            left.append(number)
            continue
        column = grown.feature[node]
        below = int(grown.threshold[node])
        feature.append(column)
        threshold.append(_between(values[column][below], values[column][below + 1]))
        left.append(next(free))
        next(free)
        nodes += [child, grown.children_right[node]]
    return Tree(
        np.array(feature, dtype=np.int64),
        np.array(threshold, dtype=np.float64),
        np.array(left, dtype=np.int64),
    )


def _means(rows: Array, mass: Array, cells: Array, size: int) -> Array:
    """Mean row of each cell, shape (size, d), inside it to the last bit."""
    order = np.argsort(cells, kind="stable")
    first = np.searchsorted(cells[order], np.arange(size))
    rows, mass = rows[order], mass[order]
    lowest, highest = np.minimum.reduceat(rows, first), np.maximum.reduceat(rows, first)
    share = mass / np.maximum(np.add.reduceat(mass, first), np.finfo(np.float64).tiny)[cells[order]]
    # From the lowest values, so that the mean of equal ones is that value.
    gaps = np.add.reduceat(share[:, None] * (rows - lowest[cells[order]]), first)
    return np.clip(lowest + gaps, lowest, highest)
