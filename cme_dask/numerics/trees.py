"""Locations that are sums of regression trees, as plain arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np

from cme_dask.codec import Later, Shape
from cme_dask.errors import DataError

Array = Any

PREDICTION, SPREAD = "prediction", "spread"
"""Covariates of laws of residuals: mu(x), and how much trees of which mu(x) is the mean differ."""

_ROWS = 1 << 14  # that go down a tree together
_ROUNDING = 4.0 * np.finfo(np.float64).eps  # of a sum, for each of its terms
_FEW = 128  # rows of a node, from which on all such nodes of a tree go on together
_TOGETHER = 4096  # rows, of fewer than which several trees are walked together
_PAIRS = 1 << 15  # of a row and a tree then, at a time
_MASKED = 32  # leaves of a tree, up to which masks of these take less time than to walk
_MANY = 256  # rows, from which on they are worth making
_COMPARED = 1 << 18  # nodes times rows at a time: they stay in cache


@dataclass(frozen=True, eq=False)
class Tree:
    """One regression tree.

    Attributes
    ----------
    feature
        Column that each node compares, shape (N,).
    threshold
        Rows go left whose value is at most this, shape (N,).
    children
        Nodes on the left and on the right, after the node itself; -1 of leaves, shape (N, 2).
    values
        Of leaves, shape (N, q).
    """

    feature: Array
    threshold: Array
    children: Array
    values: Array


@dataclass(frozen=True, eq=False)
class TreeMean:
    r"""Location :math:`\mu(x) = c + \sum_t v_t(x)`, the leaf values of regression trees.

    The nodes of all trees stand one after the other, each before its children.

    Parameters
    ----------
    name
        What learned them, for messages.
    width
        Number d of the columns of x.
    constant
        c, shape (q,).
    roots
        First node of each tree, ascending, shape (T,).
    feature, threshold, children, values
        As of :class:`Tree`, with nodes counted among all.
    single
        Whether x is rounded to float32 before it is compared, as some libraries do.
    covariate
        Whether laws of residuals are given mu(x) beside x.
    spread
        Whether they are given the standard deviation of the trees as well: of a forest, whose
        trees predict T v_t(x) each. None in files of earlier versions: no.
    """

    name: str
    width: int
    constant: Annotated[Array, Shape("q")]
    roots: Annotated[Array, Shape("T", dtype=np.int64)]
    feature: Annotated[Array, Shape("N", dtype=np.int64)]
    threshold: Annotated[Array, Shape("N")]
    children: Annotated[Array, Shape("N", 2, dtype=np.int64)]
    values: Annotated[Array, Shape("N", "q")]
    single: bool
    covariate: bool
    spread: Annotated[bool | None, Later()] = None

    @classmethod
    def of(
        cls,
        name: str,
        width: int,
        constant: Array,
        trees: Sequence[Tree],
        *,
        single: bool,
        covariate: bool,
        spread: bool = False,
    ) -> "TreeMean":
        """From trees one by one."""
        sizes = [len(tree.feature) for tree in trees]
        roots = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        children = [
            np.where(tree.children < 0, -1, tree.children + root)
            for tree, root in zip(trees, roots.tolist(), strict=False)
        ]
        return cls(
            name,
            width,
            np.asarray(constant, dtype=np.float64),
            roots[:-1],
            np.concatenate([tree.feature for tree in trees]).astype(np.int64),
            np.concatenate([tree.threshold for tree in trees]).astype(np.float64),
            np.concatenate(children).astype(np.int64),
            np.concatenate([tree.values for tree in trees]).astype(np.float64),
            single,
            covariate,
            spread,
        )

    def _validate(self) -> None:
        """DataError unless every row reaches a leaf of every tree."""
        n, nodes = len(self.feature), np.arange(len(self.feature))
        edges = np.append(self.roots, n)
        last = np.repeat(edges[1:], np.diff(edges).clip(0)) if len(self.roots) else nodes
        leaves = (self.children < 0).all(axis=1)
        inner, below = ~leaves, self.children
        numbers = (self.constant, self.threshold, self.values)
        if not (
            all(each.dtype == np.float64 for each in numbers)
            and len(self.roots)
            and self.roots[0] == 0
            and (np.diff(edges) > 0).all()
            and (below[inner] > nodes[inner, None]).all()
            and (below[inner] < last[inner, None]).all()
            and (self.feature[inner] >= 0).all()
            and (self.feature[inner] < self.width).all()
        ):
            raise DataError("its trees are no trees of the columns of x")

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers d and q of the columns of x and of y."""
        return self.width, len(self.constant)

    @property
    def covariates(self) -> tuple[str, ...]:
        """What laws of residuals are given beside x."""
        if not self.covariate:
            return ()
        return (PREDICTION, SPREAD) if self.spread else (PREDICTION,)

    def __call__(self, x: Array) -> Array:
        """Mu at the rows of x, shape (n, q)."""
        return self._sums(x)[0] + self.constant

    def predicted(self, x: Array) -> tuple[Array, Array]:
        """Mu at the rows of x, and the covariates, shape (n, C q)."""
        if SPREAD in self.covariates:
            mu, spread = self.with_spread(x)
            return mu, np.hstack([mu, spread])
        mu = self(x)
        return mu, mu[:, : len(self.covariates) * mu.shape[1]]

    def with_spread(self, x: Array) -> tuple[Array, Array]:
        r"""Mu at the rows of x, and the standard deviation of T v_t over the T trees, (n, q).

        That is :math:`\bigl(T \sum_t (v_t - a)^2 - (\sum_t v_t - T a)^2\bigr)^{1/2}` for any a.
        """
        # About the mean of all leaves, so that little is lost where y is far from 0.
        n_trees = len(self.roots)
        sums, away, squares = self._sums(x, self.values.mean(axis=0))
        squares *= n_trees
        variances = squares - away**2
        variances[variances < _ROUNDING * n_trees * squares] = 0.0  # where trees agree
        return sums + self.constant, np.sqrt(variances)

    def _sums(self, x: Array, centre: Array | None = None) -> tuple[Array, Array, Array]:
        """Sums over the trees of v_t(x), and of v_t(x) - centre and its square if that is given."""
        x, q = np.asarray(x), len(self.constant)
        sums = np.zeros((len(x), q))
        away, squares = np.zeros((2, len(x), 0 if centre is None else q))
        masks = self._masks if len(x) >= _MANY else None
        step = _ROWS if masks is None else _TOGETHER
        for start in range(0, len(x), step):
            here = slice(start, start + step)
            columns = x[here].T
            columns = np.ascontiguousarray(columns, np.float32 if self.single else np.float64)
            for leaf, rows in self._reached(columns, masks):
                values = self.values[leaf].reshape(-1, q)
                sums[here][rows] += values
                if centre is not None:
                    values = values - centre
                    away[here][rows] += values
                    squares[here][rows] += values**2
        return sums, away, squares

    def _reached(
        self, columns: Array, masks: "_LeafMasks | None"
    ) -> Iterator[tuple[Any, Array | slice]]:
        """Leaves of one tree after the other, one or one for each row, and the rows there."""
        if masks is not None:
            return ((leaves, slice(None)) for leaves in masks.leaves(columns))
        few = columns.shape[1] < _TOGETHER
        return self._in_blocks(columns) if few else self._in_turn(columns)

    @cached_property
    def _masks(self) -> "_LeafMasks | None":
        return _LeafMasks.of(self)

    def _in_turn(self, columns: Array) -> Iterator[tuple[Any, Array]]:
        """Leaves of one tree after the other, and the rows that reach them."""
        for root in self.roots.tolist():
            yield from self._leaves(root, columns)

    def _in_blocks(self, columns: Array) -> Iterator[tuple[Array, slice]]:
        """Leaves that few rows reach in one tree after the other, of several trees at once.

        Sums over the trees are made in the same order, and are the same numbers.
        """
        n = columns.shape[1]
        count = max(1, _PAIRS // max(n, 1))
        for first in range(0, len(self.roots), count):
            roots = self.roots[first : first + count]
            at, rows = np.repeat(roots, n), np.tile(np.arange(n), len(roots))
            for leaves in self._descended(at, rows, columns).reshape(len(roots), n):
                yield leaves, slice(None)

    def _leaves(self, root: int, columns: Array) -> Iterator[tuple[Any, Array]]:
        """Leaves of a tree, one or one for each row, and the rows that reach them."""
        feature, threshold = self.feature, self.threshold
        waiting, few = [(root, np.arange(columns.shape[1]))], list[tuple[int, Array]]()
        while waiting:
            node, rows = waiting.pop()
            left, right = self.children[node].tolist()
            if left < 0:
                yield node, rows
            elif len(rows) < _FEW:
                few.append((node, rows))
            else:
                low = columns[feature[node]][rows] <= threshold[node]
                waiting += [(left, rows[low]), (right, rows[~low])]
        if few:
            rows = np.concatenate([rows for _, rows in few])
            at = np.repeat([node for node, _ in few], [len(rows) for _, rows in few])
            yield self._descended(at, rows, columns), rows

    def _descended(self, at: Array, rows: Array, columns: Array) -> Array:
        """The leaves that rows reach from nodes, shape (P,)."""
        feature, threshold, children = self.feature, self.threshold, self.children
        flat, n = columns.reshape(-1), columns.shape[1]
        going = np.flatnonzero(children[at, 0] >= 0)
        while len(going):
            here = at[going]
            high = ~(flat[feature[here] * n + rows[going]] <= threshold[here])
            here = at[going] = children[here, high.astype(np.intp)]
            going = going[children[here, 0] >= 0]
        return at


@dataclass(frozen=True, eq=False)
class _LeafMasks:
    r"""Trees of few leaves as bits, by which rows find their leaves without walking.

    The leaves of a tree are numbered from the left. A node that a row passes on the right removes
    the leaves on its left, and the first one that no node removes is the row's, whether the row
    comes by these nodes or not (Lucchese et al., QuickScorer, SIGIR 2015). Here each value of x is
    first replaced by the number of thresholds below it, which mostly takes one byte.

    Attributes
    ----------
    edges
        Thresholds of each column of x, ascending.
    feature, number, removed
        Of the inner nodes of each tree: the column, the number of its threshold, and bits of the
        leaves on the left, shapes (T, M); no bits where a tree has fewer nodes.
    nodes
        Of the leaves of each tree from the left, shape (T, M + 1).
    """

    edges: list[Array]
    feature: Array
    number: Array
    removed: Array
    nodes: Array

    @classmethod
    def of(cls, trees: TreeMean) -> Self | None:
        """Those of all trees, or None if one has too many leaves."""
        feature, children, leaf = trees.feature, trees.children, trees.children[:, 0] < 0
        sizes = np.diff(np.append(trees.roots, len(leaf)))
        tree = np.repeat(np.arange(len(sizes)), sizes)
        ends, inner = np.flatnonzero(leaf), np.flatnonzero(~leaf)
        most = int(np.bincount(tree[ends]).max())
        if most > _MASKED:
            return None
        below, before = _leaves_of(trees.roots, children)
        ends = ends[np.lexsort((before[ends], tree[ends]))]
        one = np.uint64(1)
        bits = (one << below[children[inner, 0]]) - one << before[inner]
        edges, number = [], np.zeros(len(inner), dtype=np.int64)
        for j in range(trees.width):
            here = feature[inner] == j
            found, number[here] = np.unique(trees.threshold[inner[here]], return_inverse=True)
            edges.append(found)

        def by_tree(values: Array, at: Array, width: int, dtype: Any) -> Array:
            """Values of nodes, which stand tree by tree, shape (T, width)."""
            result = np.zeros((len(sizes), width), dtype=dtype)
            result[tree[at], np.arange(len(at)) - np.searchsorted(tree[at], tree[at])] = values
            return result

        # Of as few bytes as have a bit for each leaf, or count all thresholds.
        mask = np.min_scalar_type(2**most - 1)
        count = np.min_scalar_type(max(map(len, edges), default=0))
        return cls(
            edges,
            by_tree(feature[inner], inner, most - 1, np.int64),
            by_tree(number, inner, most - 1, count),
            by_tree(bits, inner, most - 1, mask),
            by_tree(ends, ends, most, np.int64),
        )

    def leaves(self, columns: Array) -> Iterator[Array]:
        """The leaves that n rows reach in one tree after the other, from columns (d, n)."""
        n, (count, width) = columns.shape[1], self.nodes.shape
        ranks = np.empty(columns.shape, dtype=self.number.dtype)
        for rank, edges, column in zip(ranks, self.edges, columns, strict=True):
            rank[:] = np.searchsorted(edges, column)
        step = max(1, _COMPARED // (n * width))
        for start in range(0, count, step):
            some = slice(start, start + step)
            removed, nodes = self.removed[some], self.nodes[some]
            at_nodes = ranks.take(self.feature[some].ravel(), axis=0)
            right = at_nodes > self.number[some].reshape(-1, 1)
            each = (right * removed.reshape(-1, 1)).reshape(*removed.shape, n)
            gone = np.bitwise_or.reduce(each, axis=1)
            # Ones up to the first bit that is 0; the last leaf is on the left of no node.
            first = np.bitwise_count(gone ^ (gone + 1)) - 1
            yield from nodes.ravel().take(first + width * np.arange(len(nodes))[:, None])


def _leaves_of(roots: Array, children: Array) -> tuple[Array, Array]:
    """How many leaves are below each node, and how many of its tree on the left of these."""
    leaf, levels, level = children[:, 0] < 0, list[Array](), roots
    while len(level):
        level = level[~leaf[level]]
        levels.append(level)
        level = children[level].reshape(-1)
    below, before = leaf.astype(np.uint64), np.zeros(len(leaf), dtype=np.uint64)
    for level in reversed(levels):
        below[level] = below[children[level]].sum(axis=1)
    for level in levels:
        left, right = children[level].T
        before[left], before[right] = before[level], before[level] + below[left]
    return below, before
