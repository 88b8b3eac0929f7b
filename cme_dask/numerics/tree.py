"""Binary trees of axis-aligned splits, walked by all rows at once."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from cme_dask.errors import DataError

Array = Any

_ROWS = 1 << 14  # walked at once: in cache, and long enough for threads not to wait for each other


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

    feature: Array
    threshold: Array
    left: Array

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
        return int(self._leaf.sum())

    @cached_property
    def depth(self) -> int:
        """Splits on the longest way to a leaf."""
        level, nodes = 0, np.zeros(1, dtype=np.int64)
        while len(nodes := nodes[~self._leaf[nodes]]):
            nodes = np.concatenate([self.left[nodes], self.left[nodes] + 1])
            level += 1
        return level

    @cached_property
    def _leaf(self) -> Array:
        return np.asarray(self.left) == np.arange(len(self.left))

    def leaves(self, rows: Array) -> Array:
        """Numbers 0..S-1 of the leaves, in the order of their nodes, of rows (n, d); shape (n,)."""
        xp, place = array_namespace(rows), device(rows)
        feature, left, leaf = (
            xp.asarray(np.asarray(a, dtype=np.int64), device=place)
            for a in (self.feature, self.left, np.cumsum(self._leaf) - 1)
        )
        threshold = xp.asarray(self.threshold, device=place)
        n, d = rows.shape
        found = xp.empty(n, dtype=xp.int64, device=place)
        for start in range(0, n, _ROWS):
            here = slice(start, min(start + _ROWS, n))
            part = rows[here, :]
            values = xp.reshape(part, (-1,))
            first = xp.arange(part.shape[0], dtype=xp.int64, device=place) * d
            node = xp.zeros(part.shape[0], dtype=xp.int64, device=place)
            for _ in range(self.depth):
                value = xp.take(values, xp.take(feature, node) + first)
                right = value > xp.take(threshold, node)
                node = xp.take(left, node)
                node += xp.astype(right, xp.int64)
            found[here] = xp.take(leaf, node)
        return found
