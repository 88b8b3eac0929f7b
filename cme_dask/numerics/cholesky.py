"""Pivoted Cholesky decomposition of a kernel matrix that is never formed, many pivots at a time.

Greedy pivoting (joint paper, Algorithm 1) looks at the residuals of all rows for every pivot. Here
the rows of largest residual are pivoted alone, as long as the choice among them is provably the one
over all rows: residuals only fall, so what the other rows had bounds what they have. Only then are
the other rows brought up to date, by matrix products.

:class:`PivotedFactor` holds the rows, their residuals and their columns of L.
:class:`DensePivoting` pivots among a few rows by any rule. Pivots from a random sample of the rows
are in :mod:`cme_dask.numerics.sampled_pivots`, those over rows that are not in memory in
:mod:`cme_dask.numerics.rounds`.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular

from cme_dask.display import brief_repr
from cme_dask.errors import NumericalError
from cme_dask.kernels import blas

# Residuals: which are zero up to rounding, which are the largest, what bounds the others


Array = Any
OnPivot = Callable[[int, float], None]

ROUNDING = 1e-6
"""Share of k(x, x) down to which a residual below zero is rounding (of float32 blocks, too)."""

TIE = 1e-10
"""Residuals within this fraction of the largest count as equal; the lowest row wins."""

BLOCK = 256
"""Pivots whose columns are allocated at once."""

_SMALL = 128  # rows that are pivoted on their dense residual kernel matrix
_SHARE = 8  # of more rows, this part is pivoted alone
_ROWS = 4096  # rows brought up to date at once; of fewer, threads wait for each other
_AT_ONCE = 96  # pivots of another factor that rows are brought up to date with at once
_NO_ROW = np.iinfo(np.int64).max


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


@dataclass(frozen=True)
class Bound:
    """Bound of the residuals of rows that are not among the candidates.

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
        """Of rows with these residuals and global indices, both of shape (n,)."""
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
        """Bound of both sets of rows."""
        high, low = (self, other) if self.largest >= other.largest else (other, self)
        tied = low.largest >= high.largest * (1 - TIE)
        return Bound(high.largest, min(high.row, low.row) if tied else high.row)


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


# The factor of a few rows, one pivot after the other, and of many, in blocks of pivots


class DensePivoting:
    """Pivoted Cholesky of the residual kernel matrix of a few rows, which is formed.

    The caller looks at ``residual`` and chooses; :meth:`accept` brings the rows up to date.

    Parameters
    ----------
    kernel, points
        The kernel, and the rows, shape (c, d).
    newton
        N at the rows for the pivots so far, shape (c, m).
    limit
        Largest number of further pivots.
    residual
        Residuals of the rows, shape (c,); default the diagonal of the matrix.
    beside
        Products of the matrix, shape (c, q), to be brought up to date as well.

    Attributes
    ----------
    picks
        Positions of the pivots, in order.
    panel
        Shape (b, c + q): row j is the column of L that pivot j makes, and the same products of it.
    """

    def __init__(
        self,
        kernel: Any,
        points: Array,
        newton: Array,
        limit: int,
        residual: Array | None = None,
        beside: Array | None = None,
    ) -> None:
        matrix = kernel(points, points) - newton @ newton.T
        self.residual = np.array(np.diag(matrix).clip(min=0.0) if residual is None else residual)
        self._matrix = matrix if beside is None else np.concatenate([matrix, beside], axis=1)
        self._before, self.picks = newton, list[int]()
        self._memory = np.empty((min(limit, len(points)), self._matrix.shape[1]))
        self.panel = self._memory[:0]

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return len(self.picks) == len(self._memory)

    def accept(self, pick: int) -> None:
        """Take the row in this position as the next pivot."""
        panel, root = self.panel, np.sqrt(self.residual[pick])
        column = self._matrix[pick] - panel[:, pick] @ panel
        column /= root
        column[self.picks] = 0.0
        column[pick] = root
        self._memory[len(panel)] = column
        self.panel = self._memory[: len(panel) + 1]
        own = column[: len(self.residual)]
        self.residual -= own * own
        np.maximum(self.residual, 0.0, out=self.residual)
        self.residual[pick] = 0.0
        self.picks.append(pick)

    def chosen(self) -> tuple[Array, Array]:
        """Positions of the b pivots, and N at them, themselves included, shape (b, m + b)."""
        picks = np.array(self.picks, dtype=np.int64)
        own = np.tril(self.panel[:, picks].T)
        return picks, np.concatenate([self._before[picks], own], axis=1)


class PivotedFactor:
    """Rows with their residuals and columns of L, brought up to date together.

    Parameters
    ----------
    kernel
        The kernel.
    points, rows
        Rows, shape (c, d), and their global indices, shape (c,).
    weights
        Of the rows in the trace, shape (c,); without them no trace is measured.
    residual
        k(x, x) - |N(x)|^2, shape (c,), to be changed in place; default: no pivots yet.
    newton
        N at the rows, shape (c, m); default no columns.
    scale
        Largest k(x, x), by which rounding is judged; default the largest residual.
    threads
        Where blocks of rows are brought up to date; default one after the other.

    Attributes
    ----------
    picks
        Positions of those pivots that are among the rows, in order.
    history
        Residual trace over the rows, relative to the first, after 0, 1, ... pivots.
    """

    def __init__(
        self,
        kernel: Any,
        points: Array,
        rows: Array,
        weights: Array | None = None,
        *,
        residual: Array | None = None,
        newton: Array | None = None,
        scale: float | None = None,
        threads: Executor | None = None,
    ) -> None:
        self.kernel, self.points, self.rows = kernel, points, rows
        self.weights: Array = weights
        self.threads = threads
        own = np.array(kernel.diagonal(points), dtype=np.float64) if residual is None else residual
        self.residual = own
        self.scale = float(own.max(initial=0.0)) if scale is None else scale
        self.trace = 0.0 if weights is None else float(weights @ own)
        self.history = [1.0]
        self.picks = np.empty(0, dtype=np.int64)
        # Of N^T, functions in rows: what is read and written together lies together.
        self._blocks: list[Array] = [] if newton is None else [np.ascontiguousarray(newton.T)]
        self.rank = sum(map(len, self._blocks))

    def columns(self, first: int = 0) -> Iterator[tuple[slice, Array]]:
        """Columns of L from number ``first`` on, as they lie in memory: numbers and (b, c) rows."""
        start = 0
        for block in self._blocks:
            begin, stop = max(first, start), min(start + len(block), self.rank)
            if begin < stop:
                yield slice(begin, stop), block[begin - start : stop - start]
            start += len(block)

    def newton(self, at: Array) -> Array:
        """N at the rows in these positions, shape (len(at), m)."""
        values = np.empty((self.rank, len(at)))
        for here, block in self.columns():
            np.take(block, at, axis=1, out=values[here], mode="clip")  # only so it is in place
        return values.T

    @property
    def triangle(self) -> Array:
        """R, N at the pivots among the rows, lower-triangular if all pivots are."""
        return np.tril(self.newton(self.picks))

    def take(self, at: Array) -> "PivotedFactor":
        """The rows in these positions alone, without weights."""
        return PivotedFactor(
            self.kernel,
            self.points[at],
            self.rows[at],
            residual=self.residual[at],
            newton=self.newton(at),
            scale=self.scale,
        )

    def append(self, pivots: Array, newton: Array, picks: Array | None = None) -> None:
        """Bring all rows up to date with b more pivots.

        Parameters
        ----------
        pivots
            Points, shape (b, d).
        newton
            N at the pivots, themselves included, shape (b, m + b).
        picks
            Their positions, if they are some of the rows.
        """
        known, count = self.rank, len(pivots)
        before, own = newton[:, :known], newton[:, known:]
        inverse = np.ascontiguousarray(solve_triangular(own, np.eye(count), lower=True))
        old = list(self.columns())
        self.rank += count
        while sum(map(len, self._blocks)) < self.rank:
            self._blocks.append(np.empty((BLOCK, len(self.rows))))
        fresh = list(self.columns(known))

        def update(start: int) -> Array:
            here = slice(start, min(start + _ROWS, len(self.rows)))
            values = np.empty((count, here.stop - here.start))
            self.kernel.evaluator(pivots)(self.points[here], values)
            for numbers, block in old:
                left = np.ascontiguousarray(before[:, numbers])
                blas.subtract_product(values, left, block[:, here])
            blas.lower_product(inverse, values)
            for numbers, block in fresh:
                block[:, here] = values[numbers.start - known : numbers.stop - known]
            np.multiply(values, values, out=values)
            self.residual[here] -= values.sum(axis=0)
            return None if self.weights is None else values @ self.weights[here]

        starts = range(0, len(self.rows), _ROWS)
        mapped = map if self.threads is None or len(starts) == 1 else self.threads.map
        squares = list(mapped(update, starts))
        non_negative(self.residual, self.scale)
        if picks is not None:
            self.picks = np.concatenate([self.picks, picks])
            self.residual[picks] = 0.0
            for numbers, block in self.columns():  # exactly triangular at the pivots
                block[:, picks] = newton.T[numbers]
        if self.weights is not None:
            whole = max(self.trace, np.finfo(np.float64).tiny)
            traces = self.history[-1] - np.cumsum(sum(squares)) / whole
            traces[-1] = float(self.weights @ self.residual) / whole  # without their rounding
            # Only rounding of the differences can be below zero here.
            falling = np.minimum.accumulate([self.history[-1], *traces.clip(min=0.0)])
            self.history.extend(falling[1:])

    def follow(self, other: "PivotedFactor", *, within: bool = False) -> None:
        """Take the further pivots of another factor, which chose all of its pivots itself.

        ``within``: its rows are the first ones of these.
        """
        newton = other.triangle
        for start in range(self.rank, other.rank, _AT_ONCE):
            here = slice(start, min(start + _AT_ONCE, other.rank))
            picks = other.picks[here]
            self.append(other.points[picks], newton[here, : here.stop], picks if within else None)

    def advance(self, max_rank: int) -> bool:
        """Take the pivots of one round of Algorithm 1; False if only rounding is left."""
        picks, newton = self._next_pivots(max_rank - self.rank, Bound(), certain=True)
        if len(picks):
            self.append(self.points[picks], newton, picks)
        return len(picks) > 0

    def greedy(self, limit: int, bound: Bound, *, certain: bool = True) -> tuple[Array, Array]:
        """Pivots of Algorithm 1 as long as no row outside may come first.

        Parameters
        ----------
        limit
            Largest number of them.
        bound
            Of rows outside, from which Algorithm 1 chooses as well.
        certain
            Whether the best one of these rows is known to be the best of all.

        Returns
        -------
        picks : (b,) positions of the pivots, in order; none if only rounding is left
        newton : (b, m + b), N at them, themselves included
        """
        if len(self.rows) <= _SMALL:  # no need to bring them up to date
            return self._next_pivots(limit, bound, certain)
        while len(self.picks) < limit:
            best = Bound.of(self.residual, self.rows)
            if not (certain or bound.admits(best.largest, best.row)):
                break
            picks, newton = self._next_pivots(limit - len(self.picks), bound, certain)
            if not len(picks):
                break
            self.append(self.points[picks], newton, picks)
            certain = False
        return self.picks, self.newton(self.picks)

    def _next_pivots(self, limit: int, bound: Bound, certain: bool) -> tuple[Array, Array]:
        """Those of :meth:`greedy` that are known without bringing the rows up to date."""
        if len(self.rows) > _SMALL:
            size = max(_SMALL, len(self.rows) // _SHARE)
            top, outside = top_rows(self.residual, self.rows, size)
            picks, newton = self.take(top).greedy(limit, bound | outside, certain=certain)
            return top[picks], newton
        order = np.argsort(self.rows)  # so that the first of equals is the lowest row
        rows, points, residual = self.rows[order], self.points[order], self.residual[order]
        few = DensePivoting(self.kernel, points, self.newton(order), limit, residual)
        while not few.full:
            best = float(few.residual.max())
            pick = int((few.residual >= best * (1 - TIE)).argmax())
            if best <= noise(self.rank + len(few.picks), self.scale):
                break
            if not certain and not bound.admits(best, int(rows[pick])):
                break
            few.accept(pick)
            certain = False
        picks, newton = few.chosen()
        return order[picks], newton


# Greedy pivots from rows in memory


@dataclass(frozen=True, eq=False)
class CholeskyResult:
    """K ~ L L^T after m pivots (joint paper, Algorithm 1).

    Attributes
    ----------
    pivots
        Positions of the pivots in the rows that were given, shape (m,), in order of choice.
    factor
        R = L[pivots], lower-triangular with K(p, p) = R R^T, shape (m, m).
    residual_trace
        trace(K - L L^T) / trace(K) after 0, 1, ..., m pivots, shape (m + 1,).
    reached
        True if the tolerance was met.
    exhausted
        True if the residual fell to rounding before that: the rows span no more.
    """

    pivots: Array
    factor: Array
    residual_trace: Array
    reached: bool
    exhausted: bool

    __repr__ = brief_repr

    @classmethod
    def of(
        cls, factor: PivotedFactor, traces: Array | list[float], tol: float, exhausted: bool
    ) -> "CholeskyResult":
        """The pivots up to the first of these traces that is at most tol, or all."""
        met = np.flatnonzero(np.asarray(traces) <= tol)
        rank = int(met[0]) if len(met) else factor.rank
        return cls(
            pivots=factor.picks[:rank],
            factor=factor.triangle[:rank, :rank],
            residual_trace=np.array(factor.history[: rank + 1]),
            reached=bool(len(met)),
            exhausted=exhausted and not len(met),
        )


def pivoted_cholesky(
    kernel: Any,
    points: Array,
    tol: float,
    max_rank: int | None = None,
    *,
    rows: Array | None = None,
    weights: Array | None = None,
    on_pivot: OnPivot | None = None,
) -> CholeskyResult:
    """Greedy pivoted Cholesky (joint paper, Algorithm 1) on rows held in memory.

    Parameters
    ----------
    kernel
        The kernel k.
    points
        Rows, shape (n, d).
    tol
        Stop when trace(K - L L^T) <= tol trace(K).
    max_rank
        Largest number of pivots; default n.
    rows
        Global row index of each point: ties go to the lowest. Default ``arange(n)``.
    weights
        Weights of the rows in the trace, shape (n,); default equal.
    on_pivot
        Called with the rank and the relative residual trace for each pivot.

    Notes
    -----
    O(n m) memory, O(n m^2) flops. A pivot whose residual is below ``8 eps (m + 1) max k(x, x)``
    is rounding noise, so rank-deficient input (duplicates, linear kernels) ends there. Pivots are
    chosen many at a time; the result is that of choosing them one by one.
    """
    n = len(points)
    factor = PivotedFactor(
        kernel,
        points,
        np.arange(n) if rows is None else np.asarray(rows),
        np.ones(n) if weights is None else np.asarray(weights),
    )
    limit = min(n, n if max_rank is None else max_rank)
    exhausted = False
    while factor.rank < limit and factor.history[-1] > tol and not exhausted:
        known = factor.rank
        exhausted = not factor.advance(limit)
        for rank in range(known, factor.rank):
            if on_pivot is not None and factor.history[rank] > tol:
                on_pivot(rank + 1, factor.history[rank + 1])
    return CholeskyResult.of(factor, factor.history, tol, exhausted)
