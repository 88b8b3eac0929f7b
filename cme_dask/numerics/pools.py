"""Pools of rows from which several pivots are chosen before the other rows are looked at again.

Greedy pivoting looks at all rows for every pivot. Here a pool of the rows with the largest
residuals is pivoted alone, as long as its choice is provably the one over all rows: residuals only
fall, so what the others had is a bound of what they have. Only then are the others brought up to
date, by matrix products.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular

from cme_dask.errors import NumericalError
from cme_dask.kernels import blas

Array = Any

ROUNDING = 1e-6
"""Share of k(x, x) down to which a residual below zero is rounding (of float32 blocks, too)."""

TIE = 1e-10
"""Residuals within this fraction of the largest count as equal; the lowest row wins."""

BLOCK = 256
"""Pivots whose columns are allocated at once."""

_SMALL = 128  # rows of a pool that is pivoted on its dense residual kernel matrix
_SHARE = 8  # a pool is this part of its rows
_ROWS = 4096  # rows brought up to date at once; of fewer, threads wait for each other
_NO_ROW = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Bound:
    """What is known of the residuals of rows outside a pool.

    Attributes
    ----------
    largest
        No residual outside is larger.
    row
        No row outside whose residual ties with ``largest`` has a lower global index.
    """

    largest: float = -np.inf
    row: int = _NO_ROW

    @classmethod
    def of(cls, residual: Array, rows: Array) -> "Bound":
        """Of rows outside with these residuals and global indices, both of shape (n,)."""
        if not len(residual):
            return cls()
        largest = float(residual.max())
        return cls(largest, int(rows[residual >= largest * (1 - TIE)].min()))

    def admits(self, residual: float, row: int) -> bool:
        """Whether a row with this residual comes before every row outside."""
        if residual * (1 - TIE) > self.largest:
            return True
        return residual >= self.largest and row < self.row

    def __or__(self, other: "Bound") -> "Bound":
        """Bound of both sets of rows outside."""
        high, low = (self, other) if self.largest >= other.largest else (other, self)
        tied = low.largest >= high.largest * (1 - TIE)
        return Bound(high.largest, min(high.row, low.row) if tied else high.row)

    def relaxed(self, span: float) -> "Bound":
        """Bound that admits any row whose residual is ``span`` of the largest outside."""
        return self if span == 1.0 else Bound(span * self.largest)


def noise(rank: int, largest: float) -> float:
    """Residual 8 eps (m + 1) max k(x, x) below which a row is rounding after m pivots."""
    return float(8 * np.finfo(np.float64).eps * (rank + 1) * largest)


def non_negative(residual: Array, scale: float) -> None:
    """Clip residuals of rows, or their means, at zero in place, where they are rounding.

    Parameters
    ----------
    residual
        k(x, x) - |N(x)|^2, shape (c,).
    scale
        Largest k(x, x), or the trace.

    Raises
    ------
    NumericalError
        If one is more than rounding below zero: K - L L^T is positive semidefinite.
    """
    least = float(residual.min(initial=0.0))
    if least < -ROUNDING * scale:
        raise NumericalError(
            f"the residual of a kernel matrix is {least / scale:.2g} of its diagonal, but can't be "
            "negative: a kernel that isn't positive semidefinite, or pivots that rounding makes "
            "dependent; check the kernel, or leave the choice of pivots to the fit"
        )
    np.maximum(residual, 0.0, out=residual)


def eliminate(
    schur: Array, residual: Array, choose: Callable[[Array, Array], int], limit: int
) -> tuple[Array, Array]:
    """Pivoted Cholesky of a small dense matrix with a rule of choice.

    Parameters
    ----------
    schur
        Residual kernel matrix of the pool, shape (c, c), and any products of it, (c, q), beside it.
    residual
        Its diagonal, shape (c,).
    choose
        ``choose(residual, panel)``: position of the next pivot given the present residuals and the
        panel so far, or -1; called once for each pivot.
    limit
        Largest number of pivots.

    Returns
    -------
    picks : (b,) positions of the pivots
    panel : (b, c + q), row j the column of L that pivot j makes, and the same products of it
    """
    residual, n = residual.copy(), len(residual)
    panel = np.empty((min(limit, n), schur.shape[1]))
    picks: list[int] = []
    while len(picks) < len(panel):
        j = len(picks)
        pick = choose(residual, panel[:j])
        if pick < 0:
            break
        root = np.sqrt(residual[pick])
        column = schur[pick] - panel[:j, pick] @ panel[:j]
        column /= root
        column[picks] = 0.0
        column[pick] = root
        panel[j] = column
        residual -= column[:n] * column[:n]
        np.maximum(residual, 0.0, out=residual)
        residual[pick] = 0.0
        picks.append(pick)
    return np.array(picks, dtype=np.int64), panel[: len(picks)]


def top_rows(residual: Array, rows: Array, size: int) -> tuple[Array, Bound]:
    """Positions of the rows with the largest residuals, sorted, and a bound of the others.

    Where more rows tie with the largest than ``size``, these are the lowest of them: greedy
    pivoting takes its next pivot from the result, always.
    """
    n = len(rows)
    if size >= n:
        return np.arange(n), Bound()
    top = np.argpartition(residual, n - size)[n - size :]
    cut = residual.max() * (1 - TIE)
    if residual[top].min() >= cut:
        tied = np.flatnonzero(residual >= cut)
        top = tied[np.argsort(rows[tied])[:size]]
    outside = np.ones(n, dtype=bool)
    outside[top] = False
    return np.sort(top), Bound.of(residual[outside], rows[outside])


class CandidateBlock:
    """Rows with their residuals and columns of L, brought up to date together.

    Parameters
    ----------
    kernel
        Callable block ``kernel(X, Z)``.
    points
        Rows, shape (c, d).
    rows
        Global row indices, shape (c,).
    residual
        k(x, x) - |N(x)|^2, shape (c,); the pool keeps and changes it.
    newton
        N at the rows, shape (c, m); default no columns.
    scale
        Largest k(x, x), by which rounding is judged; default the largest residual.
    threads
        Bring blocks of rows up to date side by side; default one after the other.
    """

    def __init__(
        self,
        kernel: Any,
        points: Array,
        rows: Array,
        residual: Array,
        newton: Array | None = None,
        threads: Executor | None = None,
        scale: float | None = None,
    ) -> None:
        self.kernel, self.points, self.rows, self.residual = kernel, points, rows, residual
        self._threads = threads
        self._scale = float(residual.max(initial=0.0)) if scale is None else scale
        # Of N^T, functions in rows: what is read and written together lies together.
        self._blocks: list[Array] = [] if newton is None else [np.ascontiguousarray(newton.T)]
        self.rank = sum(len(block) for block in self._blocks)
        self._free = 0  # functions of the last block that are not filled

    def newton(self, at: Array) -> Array:
        """N at the rows in these positions, shape (len(at), m)."""
        values, first = np.empty((self.rank, len(at))), 0
        for block in self._filled():
            last = first + len(block)
            np.take(block, at, axis=1, out=values[first:last], mode="clip")  # in place only so
            first = last
        return values.T

    def column(self, j: int) -> Array:
        """N_j at all rows, shape (c,)."""
        for block in self._filled():
            if j < len(block):
                return block[j]
            j -= len(block)
        raise IndexError(j)

    def columns(self, first: int) -> Iterator[Array]:
        """Columns of L from number ``first`` on as they lie in memory, blocks of shape (b, c)."""
        for block in self._filled():
            if first < len(block):
                yield block[max(first, 0) :]
            first -= len(block)

    def take(self, at: Array) -> "CandidateBlock":
        """The rows in these positions alone."""
        newton, scale = self.newton(at), self._scale
        return CandidateBlock(
            self.kernel, self.points[at], self.rows[at], self.residual[at], newton, scale=scale
        )

    def append(self, pivots: Array, newton: Array, share: Array | None = None) -> Array:
        """Bring all rows up to date with b more pivots.

        Parameters
        ----------
        pivots
            Points, shape (b, d).
        newton
            N at the pivots, themselves included, shape (b, m + b).
        share
            Weights, shape (c,).

        Returns
        -------
        share^T N_j^2 for each new column j, shape (b,); zeros without weights
        """
        before, own = newton[:, : self.rank], newton[:, self.rank :]
        inverse = np.ascontiguousarray(solve_triangular(own, np.eye(len(pivots)), lower=True))
        old, fresh = self._filled(), self._grow(len(pivots))

        def update(start: int) -> Array:
            here = slice(start, min(start + _ROWS, len(self.rows)))
            columns = np.empty((len(pivots), here.stop - here.start))
            self.kernel.evaluator(pivots)(self.points[here], columns)
            for block, weights in _beside(old, before.T):
                blas.subtract_product(columns, np.ascontiguousarray(weights.T), block[:, here])
            blas.lower_product(inverse, columns)
            for block, part in _beside(fresh, columns):
                block[:, here] = part
            np.multiply(columns, columns, out=columns)
            self.residual[here] -= columns.sum(axis=0)
            return np.zeros(len(pivots)) if share is None else columns @ share[here]

        starts = range(0, len(self.rows), _ROWS)
        if self._threads is None or len(starts) == 1:
            squares = sum(map(update, starts))
        else:
            squares = sum(self._threads.map(update, starts))
        non_negative(self.residual, self._scale)
        return squares

    def settle(self, picks: Array, newton: Array) -> None:
        """Make the columns exactly triangular at rows that have become pivots.

        Parameters
        ----------
        picks
            Their positions, shape (b,); their columns are the last ones.
        newton
            N at them, shape (b, m).
        """
        for block, part in _beside(self._filled(), newton.T):
            block[:, picks] = part
        self.residual[picks] = 0.0

    def advance(
        self, bound: Bound, floor: Callable[[int], float], limit: int, certain: bool = False
    ) -> tuple[Array, Array]:
        """Pivot while the choice is provably greedy over these rows and those outside.

        Parameters
        ----------
        bound
            Of the rows outside.
        floor
            Residual that counts as rounding, given the rank.
        limit
            Largest number of pivots.
        certain
            Whether the best row of the pool is known to be the best of all.

        Returns
        -------
        picks : (b,) positions of the pivots, in order
        newton : (b, m + b), N at the pivots
        """
        if len(self.rows) <= _SMALL:
            return self._advance_dense(bound, floor, limit, certain)
        picks = np.empty(0, dtype=np.int64)
        while len(picks) < limit:
            best, row = self._best()
            if best <= floor(self.rank) or not (certain or bound.admits(best, row)):
                break
            top, outside = self._top()
            pool = self.take(top)
            result, newton = pool.advance(bound | outside, floor, limit - len(picks), certain)
            if not len(result):
                break
            self.append(pool.points[result], newton)
            self.settle(top[result], newton)
            picks = np.concatenate([picks, top[result]])
            certain = False
        return picks, self.newton(picks)

    def step(self, floor: Callable[[int], float], limit: int) -> tuple[Array, Array]:
        """One round of :meth:`advance` when there are no rows outside, without the update."""
        if len(self.rows) <= _SMALL:
            return self._advance_dense(Bound(), floor, limit, True)
        top, outside = self._top()
        result, newton = self.take(top).advance(outside, floor, limit, True)
        return top[result], newton

    def _advance_dense(
        self, bound: Bound, floor: Callable[[int], float], limit: int, certain: bool
    ) -> tuple[Array, Array]:
        order = np.argsort(self.rows)  # so that the first of equals is the lowest row
        rows, newton = self.rows[order], self.newton(order)

        def choose(residual: Array, panel: Array) -> int:
            best, result = float(residual.max()), len(panel)
            pick = int((residual >= best * (1 - TIE)).argmax())
            if best <= floor(self.rank + result):
                return -1
            return pick if (certain and not result) or bound.admits(best, int(rows[pick])) else -1

        points = self.points[order]
        schur = self.kernel(points, points) - newton @ newton.T
        picks, panel = eliminate(schur, self.residual[order], choose, limit)
        return order[picks], np.concatenate([newton[picks], np.tril(panel[:, picks].T)], axis=1)

    def _best(self) -> tuple[float, int]:
        """Largest residual and the lowest row that ties with it."""
        bound = Bound.of(self.residual, self.rows)
        return bound.largest, bound.row

    def _top(self) -> tuple[Array, Bound]:
        return top_rows(self.residual, self.rows, max(_SMALL, len(self.rows) // _SHARE))

    def _filled(self) -> list[Array]:
        if not self._free:
            return list(self._blocks)
        return [*self._blocks[:-1], self._blocks[-1][: BLOCK - self._free]]

    def _grow(self, count: int) -> list[Array]:
        """Views of the next functions, in the last block and in new ones."""
        views = []
        self.rank += count
        while count:
            if not self._free:
                self._blocks.append(np.empty((BLOCK, len(self.rows))))
                self._free = BLOCK
            used = min(count, self._free)
            start = BLOCK - self._free
            views.append(self._blocks[-1][start : start + used])
            self._free -= used
            count -= used
        return views


def _beside(blocks: list[Array], functions: Array) -> Iterator[tuple[Array, Array]]:
    """Each block of functions with the rows of another array at the same places."""
    first = 0
    for block in blocks:
        last = first + len(block)
        yield block, functions[first:last]
        first = last
