"""Supports of laws: binary trees of axis-aligned splits, and their cells."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from array_api_compat import array_namespace, device

from cme_dask.codec import Shape
from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import add_flags, in_place, take_into

# Binary trees of axis-aligned splits, walked by all rows at once


Array = Any
Level = tuple[Array, Array, Array | None]

_ROWS = 1 << 16  # walked at once: steps on few are so short that threads wait for each other
_DEEP = 32  # levels: of more, tables of each would be large


@dataclass(frozen=True, eq=False)
class Tree:
    """A partition of space into boxes, by a tree whose nodes come after their parents.

    Node 0 is the root. A node with children sends rows with z[feature] <= threshold to its left
    child and the others to the node after that; a leaf is its own left child, and sends all there.

    Parameters
    ----------
    feature
        Column that a node looks at, integers of shape (N,); any at leaves.
    threshold
        In the unit of the column, float64 of shape (N,); infinite at leaves.
    left
        Left child, integers of shape (N,).

    Raises
    ------
    DataError
        If this is no such tree.
    """

    feature: Annotated[Array, Shape("N")]
    threshold: Annotated[Array, Shape("N", finite=False)]
    left: Annotated[Array, Shape("N")]

    def __post_init__(self) -> None:
        feature, threshold, left = (
            np.asarray(a) for a in (self.feature, self.threshold, self.left)
        )
        size = len(left)
        if not size or feature.shape != (size,) or threshold.shape != (size,):
            raise DataError("a tree needs a feature, a threshold and a left child of each node")
        if feature.dtype.kind not in "iu" or left.dtype.kind not in "iu":
            raise DataError("features and children of a tree must be integers")
        number = np.arange(size)
        inner = number[left != number]
        children = np.sort(np.concatenate([left[inner], left[inner] + 1]))
        ordered = (left[inner] > inner).all() and np.array_equal(children, number[1:])
        split = np.isfinite(threshold[inner]).all() and (feature >= 0).all()
        if not (ordered and split and np.isposinf(threshold[left == number]).all()):
            raise DataError("the nodes of a tree do not fit together")

    @property
    def size(self) -> int:
        """Number of leaves S."""
        return int(np.isposinf(self.threshold).sum())

    @cached_property
    def depth(self) -> int:
        """Splits on the longest way to a leaf."""
        level, nodes, inner = 0, np.zeros(1, dtype=np.int64), np.isfinite(self.threshold)
        while len(nodes := nodes[inner[nodes]]):
            nodes = np.concatenate([self.left[nodes], self.left[nodes] + 1])
            level += 1
        return level

    def walk_words(self, rows: int) -> int:
        """Numbers that the walk of so many rows keeps on the way."""
        return 6 * min(rows, _ROWS)

    def __getstate__(self) -> dict[str, Array]:
        return {one.name: getattr(self, one.name) for one in fields(self)}  # not what is cached

    @cached_property
    def _levels(self) -> tuple[tuple[Level, ...], Array]:
        """Levels, which all rows go through together, and the leaves where they end, in order.

        A level is the columns and the thresholds of its nodes, and where their left children stand
        in the next one: None if that of node i stands at 2 i. Leaves stand in all levels below.
        In deep trees all nodes stand in every level.
        """
        feature, left = (np.asarray(a, dtype=np.int64) for a in (self.feature, self.left))
        threshold = np.asarray(self.threshold, dtype=np.float64)
        leaf = np.cumsum(np.isposinf(threshold)) - 1  # its number among the leaves
        if self.depth > _DEEP:
            return ((feature, threshold, left),) * self.depth, leaf
        levels: list[Level] = []
        nodes = np.zeros(1, dtype=np.int64)
        for _ in range(self.depth):
            ends = np.isposinf(threshold[nodes])
            children = np.where(ends, 1, 2)
            place = np.cumsum(children) - children
            levels.append((feature[nodes], threshold[nodes], place if ends.any() else None))
            right = np.arange(children.sum()) - np.repeat(place, children)
            nodes = np.repeat(left[nodes], children) + right
        return tuple(levels), leaf[nodes]

    def leaves(self, rows: Array) -> Array:
        """Numbers 0..S-1 of the leaves, in the order of their nodes, of rows (n, d); shape (n,)."""
        xp, place = array_namespace(rows), device(rows)
        levels, leaf = self._levels
        there = [
            [None if a is None else xp.asarray(a, device=place) for a in level] for level in levels
        ]
        ends = xp.asarray(leaf, device=place)
        (n, d), ops = rows.shape, in_place(rows)
        result = xp.empty(n, dtype=xp.int64, device=place)
        # Memory of all blocks: that of fresh arrays comes and goes, for which threads wait.
        kinds = xp.int64, xp.int64, rows.dtype, xp.float64, xp.bool
        retained = [xp.empty(min(n, _ROWS), dtype=kind, device=place) for kind in kinds]
        firsts = xp.arange(min(n, _ROWS), dtype=xp.int64, device=place) * d
        for start in range(0, n, _ROWS):
            here = slice(start, min(start + _ROWS, n))
            block = slice(0, here.stop - start)
            values, first = xp.reshape(rows[here, :], (-1,)), firsts[block]
            node, at, value, border, right = (array[block] for array in retained)
            node[...] = 0
            for feature, threshold, left in there:
                take_into(xp, at, feature, node)
                ops.add(at, first, out=at)
                take_into(xp, value, values, at)
                take_into(xp, border, threshold, node)
                ops.greater(value, border, out=right)
                if left is None:
                    ops.add(node, node, out=node)
                else:
                    take_into(xp, at, left, node)
                    node, at = at, node
                add_flags(xp, node, right)
            take_into(xp, result[here], ends, node)
        return result


# Bounded supports of laws: cells of one variable, whose masses are counted over all rows


SUPPORT_SIZE = 1000
"""Cells of a support, at most."""


@dataclass(frozen=True, eq=False)
class Support:
    """Points y_s and the cells of the rows that they stand for.

    Intervals of a scalar variable, cut at ``edges``; otherwise boxes, the leaves of a ``tree``.

    Parameters
    ----------
    points
        y_s, distinct, shape (S, d); ascending if scalar.
    edges
        Borders of the intervals, shape (S - 1,): cell s holds edges[s - 1] < y <= edges[s].
    tree
        Cell s holds the rows of leaf s.

    Raises
    ------
    DataError
        If these don't fit together.
    """

    points: Annotated[Array, Shape("S", "d")]
    edges: Annotated[Array, Shape("E")] | None = None
    tree: Tree | None = None

    def __post_init__(self) -> None:
        shape = np.shape(self.points)
        if len(shape) != 2 or 0 in shape:
            raise DataError(f"a support needs points of shape (S, d), got shape {shape}")
        if (self.edges is None) == (self.tree is None):
            raise DataError("a support takes either edges or a tree")
        if self.edges is not None and (shape[1] != 1 or np.shape(self.edges) != (shape[0] - 1,)):
            raise DataError(
                f"points of shape {shape} take {shape[0] - 1} edges of a scalar variable, got "
                f"edges of shape {np.shape(self.edges)}"
            )
        if self.edges is not None and not np.all(np.diff(self.edges) > 0):
            raise DataError("the edges of a support must ascend")
        if self.tree is not None and (
            self.tree.size != shape[0] or int(np.max(self.tree.feature)) >= shape[1]
        ):
            raise DataError(
                f"points of shape {shape} take a tree of {shape[0]} leaves on {shape[1]} columns, "
                f"got {self.tree.size} leaves, and columns up to {int(np.max(self.tree.feature))}"
            )

    @property
    def size(self) -> int:
        """Number of cells S."""
        return int(self.points.shape[0])

    def equals(self, other: "Support") -> bool:
        """Whether the other one has the same points and cells."""
        mine, theirs = (
            [s.points, s.edges, *(getattr(s.tree, f.name, None) for f in fields(Tree))]
            for s in (self, other)
        )
        return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def assign(self, rows: Array) -> Array:
        """Cell numbers, integers of shape (n,), of rows (n, d)."""
        if self.tree is not None:
            return self.tree.leaves(rows)
        xp = array_namespace(rows)
        return xp.searchsorted(xp.asarray(self.edges, device=device(rows)), rows[:, 0])


def cell_means(values: Array, cells: Array, weights: Array, size: int) -> Array:
    """Means of functions over the rows of each cell, shape (size, q).

    Expectations under a law on the cells that use these, and not the values at the points, do not
    have the error of events that cut through cells.

    Parameters
    ----------
    values
        Of the functions at rows, shape (n, q).
    cells
        Cell of each row, shape (n,).
    weights
        Of the rows, shape (n,).
    size
        Number of cells; those without rows get the mean over all rows.
    """
    masses = np.bincount(cells, weights, minlength=size)
    sums = np.stack([np.bincount(cells, weights * f, minlength=size) for f in values.T], axis=1)
    overall = np.broadcast_to(weights @ values / weights.sum(), sums.shape)
    return np.divide(sums, masses[:, None], out=overall.copy(), where=masses[:, None] > 0)
