"""Cells of laws and landmarks of partitions, chosen from the row sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from cme_dask.constraints import LANDMARKS, Coupling
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.numerics.basis import Basis
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.crossval import held_out_losses
from cme_dask.numerics.folds import RowSample, distinct_in_random_order, fold_of_rows
from cme_dask.numerics.moments import FeatureBlock, Function, MomentReduction, strip_moments
from cme_dask.numerics.partition import PartitionBasis, pivot_landmarks
from cme_dask.numerics.problem import JointSolver, Regularization
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.numerics.support import SUPPORT_SIZE, Support, Tree

# Cells of a variable from the row sample: quantile bins, or boxes of a regression tree


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
    partition: Basis | None = None,
) -> CellReduction:
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
    return CellReduction.of(support, part, *stands_for(rows, sample), functions, partition)


def stands_for(rows: RowSample, sample: Sample) -> tuple[Array, float]:
    """How many rows each of the sample stands for, up to a factor, and about how many there are.

    That is 1 / its chance to be drawn.
    """
    n_rows = sample.n_rows * (1.0 if sample.part is None else sample.part.expected_share)
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


# Landmarks of the partitions of unity: which rows, and how many


CANDIDATES = (8, 16, 32, 64, 128, 256)
"""Numbers of landmarks that are tried."""

_ITERATIONS = 10  # of Lloyd: more of them take seconds and gain little
_CLUSTERED = 1 << 15  # rows that k-means sees: a thousand clusters of them take a second
_SEEDS = 1 << 32  # of NumPy's older generator, which k-means takes

_FOLDS = 5
_TOL = 1e-4  # of the solutions that are compared: their losses differ by far more


def choose_landmarks(
    kernel: Any, rows: Array, weights: Array, count: int, choice: str = "pivots", seed: int = 0
) -> Array:
    """Landmarks of one variable from the row sample.

    Parameters
    ----------
    kernel
        The kernel.
    rows
        Rows of the row sample, shape (n, d).
    weights
        Their weights, shape (n,).
    count
        How many; fewer if there are not so many distinct rows, or the kernel can't tell them apart.
    choice
        ``"pivots"``: greedy pivoted Cholesky, of which fewer are a prefix of more. ``"kmeans"``:
        centres of k-means on standardised columns, means of quantile bins for a scalar variable.
    seed
        Of k-means.

    Returns
    -------
    points : (m, d), m <= count

    Raises
    ------
    DataError
        On an unknown choice.
    """
    if choice not in LANDMARKS:
        raise DataError(f"choice must be one of {', '.join(LANDMARKS)}, got {choice!r}")
    if choice == "kmeans":
        if rows.shape[1] == 1:
            return make_support(rows, weights, count).points
        return _centres(rows[:_CLUSTERED], weights[:_CLUSTERED], count, seed)
    first, which = distinct_in_random_order(rows)
    distinct = np.asarray(rows)[first]
    return distinct[pivot_landmarks(kernel, distinct, np.bincount(which, weights), count)]


def _centres(rows: Array, weights: Array, count: int, seed: int) -> Array:
    """Centres of k-means on standardised columns, or all distinct rows if they are no more.

    Source of k-means++: Arthur and Vassilvitskii (2007), Proceedings of SODA, 1027.
    """
    usable = weights > np.finfo(np.float64).tiny * weights.max(initial=0.0)
    distinct, mass = distinct_rows(rows[usable], weights[usable])
    if len(distinct) <= count:
        return distinct
    middle, scale = mass @ distinct, deviations(distinct, mass)
    from sklearn.cluster import KMeans  # which takes longer to import than most fits need

    means = KMeans(count, n_init=1, max_iter=_ITERATIONS, random_state=seed % _SEEDS)
    # Several threads of k-means add up in the order in which they end: last bits would change.
    with one_blas_thread():
        means.fit((distinct - middle) / scale, sample_weight=mass)
    return np.asarray(np.unique(means.cluster_centers_ * scale + middle, axis=0))


@dataclass(frozen=True)
class LandmarkChoice:
    """The number of landmarks, and what it was chosen by.

    Attributes
    ----------
    count
        Of x and of y.
    candidates
        Numbers that were tried, in order: the last one may not have been an improvement.
    losses
        Held-out joint loss of each, mean over the folds by weight; 0 is independence.
    errors
        Standard error of what each improves on the best before.
    """

    count: int
    candidates: tuple[int, ...]
    losses: tuple[float, ...]
    errors: tuple[float, ...]


def landmark_number(
    kernels: tuple[Any, Any],
    parts: tuple[Array, Array],
    weights: Array,
    reg: Regularization,
    *,
    choice: str = "pivots",
    seed: int = 0,
    candidates: Sequence[int] = CANDIDATES,
) -> LandmarkChoice:
    """Choose the number of landmarks by the held-out joint loss of the coupling.

    Numbers are tried in ascending order, on folds of the row sample, until one does not improve
    by a standard error of its paired differences over the folds, or there are no more landmarks.

    Parameters
    ----------
    kernels
        Of x and of y.
    parts
        Rows of the row sample, of x and of y, shapes (n, d).
    weights
        Their weights, shape (n,).
    reg
        The ridge.
    choice, seed
        See :func:`choose_landmarks`.
    candidates
        Numbers to try.

    Raises
    ------
    DataError
        If a kernel can be negative, or there are fewer rows than folds.
    """
    n = len(weights)
    if n < _FOLDS:
        raise DataError(
            f"to choose the number of landmarks takes {_FOLDS} rows, got {n}: give landmarks"
        )
    folds = fold_of_rows(0, n, _FOLDS)
    candidates = sorted(set(candidates))
    points = _Nested(kernels, parts, weights, candidates[-1], choice, seed)
    tried: list[int] = []
    losses: list[Array] = []
    errors: list[float] = []
    best = 0
    for number in candidates:
        if tried and points.exhausted(tried[-1]):
            break
        x, y = (
            FeatureBlock(PartitionBasis(kernel, points(i, number)), _names(parts[i]))
            for i, kernel in enumerate(kernels)
        )
        with one_blas_thread():
            loss, share = _fold_losses((x, y), parts, weights, folds, reg)
        gain = losses[best] - loss if losses else -loss
        mean = float(share @ gain)
        error = float(np.sqrt((share**2 @ (gain - mean) ** 2) * len(share) / (len(share) - 1)))
        tried.append(number)
        losses.append(loss)
        errors.append(error)
        if len(losses) > 1:
            if mean <= error:
                break
            best = len(losses) - 1
    return LandmarkChoice(
        tried[best], tuple(tried), tuple(float(share @ loss) for loss in losses), tuple(errors)
    )


def _names(part: Array) -> tuple[str, ...]:
    return tuple(map(str, range(part.shape[1])))


class _Nested:
    """Landmarks of both variables for every number; of pivots one run holds them all."""

    def __init__(
        self,
        kernels: tuple[Any, Any],
        parts: tuple[Array, Array],
        weights: Array,
        most: int,
        choice: str,
        seed: int,
    ) -> None:
        self._arguments = (kernels, parts, weights, choice, seed)
        self._all = [self._choose(i, most) for i in (0, 1)]

    def _choose(self, i: int, count: int) -> Array:
        kernels, parts, weights, choice, seed = self._arguments
        return choose_landmarks(kernels[i], parts[i], weights, count, choice, seed)

    def __call__(self, i: int, count: int) -> Array:
        if count >= len(self._all[i]) or self._arguments[3] == "pivots":
            return self._all[i][:count]
        return self._choose(i, count)

    def exhausted(self, count: int) -> bool:
        """Whether more landmarks than these there are none, of either variable."""
        return all(count >= len(points) for points in self._all)


def _fold_losses(
    sides: tuple[FeatureBlock, FeatureBlock],
    parts: tuple[Array, Array],
    weights: Array,
    folds: Array,
    reg: Regularization,
) -> tuple[Array, Array]:
    """Held-out loss on each fold that has rows, and the folds' shares of the weight."""
    moments = strip_moments(MomentReduction(sides, _FOLDS), parts, weights, folds)
    losses, shares = held_out_losses(moments, JointSolver(Coupling(tol=_TOL), reg))
    if not len(losses):
        raise DataError("all weight is on one fold of the row sample: give the number of landmarks")
    return losses, shares
