"""Locations that are sums of regression trees, as plain arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np

from cme_dask.codec import Later, Shape
from cme_dask.errors import DataError

Array = Any

PREDICTION, SPREAD = "prediction", "spread"
"""Covariates of laws of residuals: mu(x), and how much trees of which mu(x) is the mean differ."""

_ROUNDING = 4.0 * np.finfo(np.float64).eps  # of a sum, for each of its terms
_TREES = 16  # whose values are added at once
_ROWS, _PAIRS = 1 << 11, 1 << 17  # that walk at once, and pairs of a row and a tree
_LEVELS = 4  # that rows go down before some of them may rest at their leaves
_MOST = 0.8  # share of the rows that go on then: if it is larger, the others go with them
_MASKED = 32  # leaves of a tree, up to which masks of these take less time than to walk
_MANY = 512  # rows, from which on they are worth making
_COMPARED = 1 << 18  # leaves times rows at once: they stay in cache


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
        children = np.concatenate([tree.children for tree in trees]).astype(np.int64)
        first = np.repeat(roots[:-1], sizes)[:, None]
        return cls(
            name,
            width,
            np.asarray(constant, dtype=np.float64),
            roots[:-1],
            np.concatenate([tree.feature for tree in trees]).astype(np.int64),
            np.concatenate([tree.threshold for tree in trees]).astype(np.float64),
            np.where(children < 0, -1, children + first),
            np.concatenate([tree.values for tree in trees]).astype(np.float64),
            single,
            covariate,
            spread,
        )

    def _validate(self) -> None:
        """DataError unless every row reaches a leaf of every tree, and no leaf in two ways."""
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
            and (np.bincount(np.append(self.roots, below[inner]), minlength=n) == 1).all()
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
        r"""Mu at the rows of x, and the covariates, shape (n, C q).

        The spread is the standard deviation of T v_t over the T trees,
        :math:`\bigl(T \sum_t (v_t - a)^2 - (\sum_t v_t - T a)^2\bigr)^{1/2}` for any a.
        """
        if SPREAD not in self.covariates:
            mu = self(x)
            return mu, mu[:, : len(self.covariates) * mu.shape[1]]
        # About the mean of all leaves, so that little is lost where y is far from 0.
        n_trees = len(self.roots)
        sums, away, squares = self._sums(x, self.values.mean(axis=0))
        squares *= n_trees
        variances = squares - away**2
        variances[variances < _ROUNDING * n_trees * squares] = 0.0  # where trees agree
        mu = sums + self.constant
        return mu, np.hstack([mu, np.sqrt(variances)])

    def _sums(self, x: Array, centre: Array | None = None) -> tuple[Array, Array, Array]:
        """Sums over the trees of v_t(x), and of v_t(x) - centre and its square if that is given."""
        x, q = np.asarray(x), len(self.constant)
        sums = np.zeros((len(x), q))
        away, squares = np.zeros((2, len(x), 0 if centre is None else q))
        masks = self._masks if len(x) >= _MANY else None
        step = _ROWS if masks is None else masks.rows
        for start in range(0, len(x), step):
            here = slice(start, start + step)
            columns = x[here].T
            columns = np.ascontiguousarray(columns, np.float32 if self.single else np.float64)
            for leaves in self._walked(columns) if masks is None else masks.leaves(columns):
                values = self.values.take(leaves, axis=0)
                sums[here] += _summed(values)
                if centre is not None:
                    values -= centre
                    away[here] += _summed(values)
                    squares[here] += _summed(np.square(values, out=values))
        return sums, away, squares

    def _walked(self, columns: Array) -> Iterator[Array]:
        """The leaves that n rows reach, from columns (d, n): 16 trees after the others, (16, n).

        Many trees are walked at once, of few rows. A row that has reached a leaf stays there while
        others go on.
        """
        children, inner = self._ways
        flat, n = columns.reshape(-1), columns.shape[1]
        column = n * self.feature  # where it begins
        count = _TREES * max(1, _PAIRS // (_TREES * n))
        for start in range(0, len(self.roots), count):
            roots = self.roots[start : start + count]
            reached = at = np.repeat(roots, n)
            rows, going = np.tile(np.arange(n), len(roots)), np.arange(len(at))
            while len(going):
                for _ in range(_LEVELS):
                    # A leaf may name any column: it has no other child than itself.
                    values = flat.take(column.take(at) + rows, mode="clip")
                    left = values <= self.threshold.take(at)
                    at = children.take(2 * at + left)
                rest = np.flatnonzero(inner.take(at))
                if len(rest) <= _MOST * len(at):
                    reached[going] = at
                    going, at, rows = going[rest], at[rest], rows[rest]
            leaves = reached.reshape(len(roots), n)
            yield from (leaves[i : i + _TREES] for i in range(0, len(leaves), _TREES))

    @cached_property
    def _ways(self) -> tuple[Array, Array]:
        """Children of the nodes, right before left, and which nodes have any.

        A leaf is its own child.
        """
        inner, nodes = self.children[:, 0] >= 0, np.arange(len(self.children))
        children = np.where(inner[:, None], self.children[:, ::-1], nodes[:, None])
        return children.reshape(-1), inner

    @cached_property
    def _masks(self) -> "_LeafMasks | None":
        return _LeafMasks.of(self)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: the tables of rows' ways are made again faster than they are sent."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


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

    @property
    def rows(self) -> int:
        """Number of rows at once."""
        return max(1, _COMPARED // (_TREES * int(self.nodes.shape[1])))

    def leaves(self, columns: Array) -> Iterator[Array]:
        """The leaves that n rows reach, from columns (d, n): 16 trees after the others, (16, n)."""
        n, (count, width) = columns.shape[1], self.nodes.shape
        ranks = np.empty(columns.shape, dtype=self.number.dtype)
        for rank, edges, column in zip(ranks, self.edges, columns, strict=True):
            rank[:] = np.searchsorted(edges, column)
        for start in range(0, count, _TREES):
            some = slice(start, start + _TREES)
            removed, nodes = self.removed[some], self.nodes[some]
            at_nodes = ranks.take(self.feature[some].ravel(), axis=0)
            right = at_nodes > self.number[some].reshape(-1, 1)
            each = (right * removed.reshape(-1, 1)).reshape(*removed.shape, n)
            gone = np.bitwise_or.reduce(each, axis=1)
            # Ones up to the first bit that is 0; the last leaf is on the left of no node.
            first = np.bitwise_count(gone ^ (gone + 1)) - 1
            yield nodes.ravel().take(first + width * np.arange(len(nodes))[:, None])


def _summed(values: Array) -> Array:
    """Sum over the first axis, one after the other: a row alone has the same sum as among others.

    NumPy adds the numbers of one contiguous axis in another order.
    """
    return values.sum(axis=0) if values[0].size > 1 else values.cumsum(axis=0)[-1]


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
