"""Supports of laws: a few points, and the cells of the rows that they stand for.

A scalar variable has intervals between quantiles, several columns have the leaves of a regression
tree: boxes with axis-aligned borders. Both are made from the row sample, and all rows are assigned
to their cells at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array

from cme_dask.codec import Shape
from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import add_flags, in_place, take_into

Array = Any
Level = tuple[Array, Array, Array | None]
Placed = tuple[list[list[Array]], Array]

SUPPORT_SIZE = 1000
"""Cells of a support, at most."""

WALK_ROWS = 1 << 16
"""Rows that walk down a tree at once: on few, steps are so short that threads wait."""

WALK_WORDS = 6
"""Numbers that each of them takes on the way."""

_BORDER = 1e-9  # of a cell
_DEEP = 32  # levels: of more, tables of each would be large
_FAR = 6.0  # deviations beyond which heavy tails would take the cells of all other rows
_LABELS_FIRST = 1e3  # weight of labels: that of one row in 10^5 still outweighs all else


@dataclass(frozen=True, eq=False)
class Support:
    """Points y_s and the cells of the rows that they stand for.

    Cells of a scalar variable are intervals, cut at ``thresholds``. Cells of several columns are
    the leaves of a tree, in the order of its nodes. Node 0 is the root, and children come after
    their parents: a node sends rows with z[feature] <= threshold to its ``left`` child and the
    others to the node after that. A leaf is its own left child.

    Parameters
    ----------
    points
        y_s, distinct, shape (S, d); ascending if scalar.
    thresholds
        Borders of the intervals, ascending, shape (S - 1,): cell s holds
        thresholds[s - 1] < y <= thresholds[s]. Or those of the nodes, in the units of their
        columns, shape (N,); infinite at leaves.
    features
        Column that each node looks at, integers of shape (N,), any at leaves; None of intervals.
    left
        Left child of each node, integers of shape (N,); None of intervals.

    Attributes
    ----------
    levels
        Levels of the tree, which all rows go through together. A level is the columns and the
        thresholds of its nodes, and where their left children stand in the next one: None if that
        of node i stands at 2 i. Leaves stand in all levels below.
    leaves
        Numbers of the leaves where the rows end, in the order of the last level.

    Raises
    ------
    DataError
        If these don't fit together.
    """

    points: Annotated[Array, Shape("S", "d")]
    thresholds: Annotated[Array, Shape("N", finite=False)]
    features: Annotated[Array, Shape("N")] | None = None
    left: Annotated[Array, Shape("N")] | None = None
    levels: Sequence[Level] = field(default=(), init=False, repr=False)
    leaves: Array = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        shape, thresholds = np.shape(self.points), np.asarray(self.thresholds)
        if len(shape) != 2 or 0 in shape:
            raise DataError(f"a support needs points of shape (S, d), got shape {shape}")
        if self.features is None and self.left is None:
            if shape[1] != 1 or thresholds.shape != (shape[0] - 1,):
                raise DataError(
                    f"points of shape {shape} take {shape[0] - 1} thresholds of a scalar variable, "
                    f"got thresholds of shape {thresholds.shape}"
                )
            if not (np.isfinite(thresholds).all() and np.all(np.diff(thresholds) > 0)):
                raise DataError("the thresholds of intervals must be finite and ascend")
            return
        features, left = np.asarray(self.features), np.asarray(self.left)
        if not left.size or not features.shape == thresholds.shape == left.shape == (left.size,):
            raise DataError("a tree needs a feature, a threshold and a left child of each node")
        if features.dtype.kind not in "iu" or left.dtype.kind not in "iu":
            raise DataError("features and children of a tree must be integers")
        number = np.arange(len(left))
        inner = number[left != number]
        children = np.sort(np.concatenate([left[inner], left[inner] + 1]))
        ordered = (left[inner] > inner).all() and np.array_equal(children, number[1:])
        split = np.isfinite(thresholds[inner]).all() and (features >= 0).all()
        if not (ordered and split and np.isposinf(thresholds[left == number]).all()):
            raise DataError("the nodes of a tree do not fit together")
        leaves, columns = len(left) - len(inner), int(features.max())
        if leaves != shape[0] or columns >= shape[1]:
            raise DataError(
                f"points of shape {shape} take a tree of {shape[0]} leaves on {shape[1]} columns, "
                f"got {leaves} leaves, and columns up to {columns}"
            )

        # In deep trees all nodes stand in every level.
        thresholds = thresholds.astype(np.float64)
        features, left = features.astype(np.int64), left.astype(np.int64)
        ends = np.isposinf(thresholds)
        leaf = np.cumsum(ends) - 1  # its number among the leaves
        depth, nodes = 0, np.zeros(1, dtype=np.int64)
        while len(nodes := nodes[~ends[nodes]]):
            nodes = np.concatenate([left[nodes], left[nodes] + 1])
            depth += 1
        levels: list[Level] = [(features, thresholds, left)] * depth
        if depth <= _DEEP:
            nodes = np.zeros(1, dtype=np.int64)
            for i in range(depth):
                children = np.where(ends[nodes], 1, 2)
                place = np.cumsum(children) - children
                fewer = place if ends[nodes].any() else None
                levels[i] = features[nodes], thresholds[nodes], fewer
                right = np.arange(children.sum()) - np.repeat(place, children)
                nodes = np.repeat(left[nodes], children) + right
            leaf = leaf[nodes]
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "leaves", leaf)

    @property
    def size(self) -> int:
        """Number of cells S."""
        return int(self.points.shape[0])

    def equals(self, other: "Support") -> bool:
        """Whether the other one has the same points and cells."""
        names = [one.name for one in fields(self) if one.init]
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names)

    def placed(self, like: Array) -> Placed:
        """Thresholds, or levels and leaves of the tree, in the library and on the device of rows.

        For :meth:`assign` of many rows: to bring them there takes as long as to walk them.
        """
        xp, place = array_namespace(like), device(like)
        if self.left is None:
            return [[xp.asarray(self.thresholds, device=place)]], None
        levels = [
            [None if a is None else xp.asarray(a, device=place) for a in level]
            for level in self.levels
        ]
        return levels, xp.asarray(self.leaves, device=place)

    def assign(self, rows: Array, placed: Placed | None = None) -> Array:
        """Cell numbers, integers of shape (n,), of rows (n, d); see :meth:`placed`."""
        xp, place = array_namespace(rows), device(rows)
        if placed is None and not is_numpy_array(rows):
            placed = self.placed(rows)
        if self.left is None:
            thresholds = self.thresholds if placed is None else placed[0][0][0]
            return xp.searchsorted(thresholds, rows[:, 0])
        there, ends = placed or (self.levels, self.leaves)
        (n, d), ops = rows.shape, in_place(rows)
        result = xp.empty(n, dtype=xp.int64, device=place)
        # Memory of all blocks: that of fresh arrays comes and goes, for which threads wait.
        kinds = xp.int64, xp.int64, rows.dtype, xp.float64, xp.bool
        buffers = [xp.empty(min(n, WALK_ROWS), dtype=kind, device=place) for kind in kinds]
        firsts = xp.arange(min(n, WALK_ROWS), dtype=xp.int64, device=place) * d
        for start in range(0, n, WALK_ROWS):
            here = slice(start, min(start + WALK_ROWS, n))
            block = slice(0, here.stop - start)
            values, first = xp.reshape(rows[here, :], (-1,)), firsts[block]
            node, at, value, border, right = (buffer[block] for buffer in buffers)
            node[...] = 0
            for features, thresholds, left in there:
                take_into(xp, at, features, node)
                ops.add(at, first, out=at)
                take_into(xp, value, values, at)
                take_into(xp, border, thresholds, node)
                ops.greater(value, border, out=right)
                if left is None:
                    ops.add(node, node, out=node)
                else:
                    take_into(xp, at, left, node)
                    node, at = at, node
                add_flags(xp, node, right)
            take_into(xp, result[here], ends, node)
        return result


# Made from the row sample: quantile bins, or boxes of a regression tree


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
    distinct, mass = distinct_rows(rows, weights)
    if not len(distinct):
        raise DataError("a support needs rows of positive weight")
    if rows.shape[1] > 1:
        return _boxes(distinct, mass, size, np.array([*categorical] or [False] * rows.shape[1]))

    # Intervals between quantiles.
    values = distinct[:, 0]
    if len(values) <= size:
        number = np.arange(len(values))
    else:
        # Weights that are whole numbers reach borders, which rounding may miss.
        level = size * (np.cumsum(mass) - mass / 2) + _BORDER
        level = np.minimum(level.astype(np.int64), size - 1)
        number = np.unique(level, return_inverse=True)[1]
    first = np.flatnonzero(np.diff(number, prepend=-1))
    last = np.append(first[1:], len(values)) - 1
    share = np.bincount(number, mass)
    # From the lowest value of the bin, so that the mean of equal values is that value.
    lowest = values[first]
    means = lowest + np.bincount(number, mass * (values - lowest[number])) / share
    # Borders in the middle between two bins, where there is a number between their values.
    below, above = values[last[:-1]], values[first[1:]]
    borders = np.clip(below / 2 + above / 2, below, np.nextafter(above, -np.inf))
    return Support(np.clip(means, lowest, values[last])[:, None], borders)


def distinct_rows(rows: Array, weights: Array) -> tuple[Array, Array]:
    """Distinct rows of positive weight in order, and their masses, sum 1."""
    usable = weights > np.finfo(np.float64).tiny * weights.max(initial=0.0)
    distinct, which = np.unique(rows[usable], axis=0, return_inverse=True)
    mass = np.bincount(which.ravel(), weights[usable])
    return distinct, mass / mass.sum()


def deviations(rows: Array, mass: Array) -> Array:
    """Standard deviations of the columns, 1 for constant ones."""
    largest = np.abs(rows).max(axis=0)
    unit = np.where(largest > 0, largest, 1.0)  # squares of the values may leave the range
    scaled = rows / unit
    deviation = unit * np.sqrt(mass @ (scaled - mass @ scaled) ** 2)
    tiny = np.finfo(np.float64).tiny
    return np.where((rows != rows[0]).any(axis=0), np.maximum(deviation, tiny), 1.0)


def _boxes(rows: Array, mass: Array, size: int, categorical: Array) -> Support:
    """Leaves of a tree; rows (k, d) are distinct and in order.

    The tree sees the ranks of the values, which float32 holds exactly: it splits where a tree of
    the values themselves would.
    """
    from sklearn.tree import DecisionTreeRegressor  # slow to import, and scalar variables need none

    features, left = np.zeros((2, 1), dtype=np.int64)  # a tree of one leaf
    thresholds, cells = np.full(1, np.inf), np.zeros(len(rows), dtype=np.int64)
    if min(size, len(rows)) > 1:
        values, by_column = zip(*(np.unique(c, return_inverse=True) for c in rows.T), strict=True)
        ranks = np.stack(by_column, axis=1)
        model = DecisionTreeRegressor(max_leaf_nodes=size, random_state=0)
        if len(rows) <= size:  # neither masses nor distances may keep two rows together
            model.fit(ranks, ranks)
        else:
            scaled = np.clip((rows - mass @ rows) / deviations(rows, mass), -_FAR, _FAR)
            labels = (_LABELS_FIRST * _bits(codes) for codes in ranks[:, categorical].T)
            targets = np.hstack([scaled[:, ~categorical], *labels])
            model.fit(ranks, targets, sample_weight=mass * len(rows))

        # Its nodes, numbered breadth first, so that children are neighbours.
        tree, level, levels = model.tree_, np.zeros(1, dtype=np.int64), []
        arrays = tree.children_left, tree.children_right, tree.feature
        first, second, column_of = (a.astype(np.int64) for a in arrays)
        while len(level):
            levels.append(level)
            inner = level[first[level] >= 0]
            level = np.stack([first[inner], second[inner]], axis=1).ravel()
        nodes = np.concatenate(levels)
        number, leaf = np.argsort(nodes), first[nodes] < 0
        features = np.where(leaf, 0, column_of[nodes])
        left = np.where(leaf, number[nodes], number[first[nodes]])
        # Its thresholds lie between ranks, those of the support in the middle between values.
        thresholds = np.full(len(nodes), np.inf)
        for j, column in enumerate(values):
            here = np.flatnonzero(~leaf & (features == j))
            rank = tree.threshold[nodes[here]].astype(np.int64)
            below, above = column[rank], column[rank + 1]
            thresholds[here] = np.clip(below / 2 + above / 2, below, np.nextafter(above, -np.inf))
        cells = (np.cumsum(leaf) - 1)[number[model.apply(ranks)]]

    # The mean row of each cell, inside it to the last bit.
    order = np.argsort(cells, kind="stable")
    rows, mass, cells = rows[order], mass[order], cells[order]
    first = np.searchsorted(cells, np.arange(cells[-1] + 1))
    lowest, highest = np.minimum.reduceat(rows, first), np.maximum.reduceat(rows, first)
    share = mass / np.maximum(np.add.reduceat(mass, first), np.finfo(np.float64).tiny)[cells]
    # From the lowest values, so that the mean of equal ones is that value.
    gaps = np.add.reduceat(share[:, None] * (rows - lowest[cells]), first)
    return Support(np.clip(lowest + gaps, lowest, highest), thresholds, features, left)


def _bits(codes: Array) -> Array:
    """Binary digits of codes: of those that agree in the higher ones, the next is monotone."""
    digits = np.arange(max(int(codes.max()).bit_length(), 1))
    return ((codes[:, None] >> digits) & 1).astype(np.float64)
