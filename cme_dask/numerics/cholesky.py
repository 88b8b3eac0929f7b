"""Pivoted Cholesky decomposition of a kernel matrix that is never formed."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.numerics.pools import Pool, noise
from cme_dask.numerics.shown import brief_repr

Array = Any
OnPivot = Callable[[int, float], None]

_TAIL = 16.0  # in pivots: normal columns at tol 1e-5 came out up to 1.4 tol without it
_AT_ONCE = 96  # known pivots that new rows are brought up to date with


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
    chosen in rounds (see :mod:`cme_dask.numerics.pools`); the result is that of choosing them one
    by one.
    """
    n = len(points)
    run = PivotedRows(
        kernel,
        points,
        np.arange(n) if rows is None else np.asarray(rows),
        np.ones(n) if weights is None else np.asarray(weights),
    )
    limit = min(n, n if max_rank is None else max_rank)
    exhausted = False
    while run.rank < limit and run.history[-1] > tol and not exhausted:
        exhausted = not run.greedy(limit)
        run.tell(on_pivot, tol)
    return run.result(run.history, tol, exhausted)


class TracedRows:
    """Rows that are brought up to date with pivots, and the residual trace over them."""

    def __init__(
        self,
        kernel: Any,
        points: Array,
        rows: Array,
        share: Array,
        threads: Executor | None = None,
    ) -> None:
        self._diagonal = np.array(kernel.diagonal(points), dtype=np.float64)
        self._pool = Pool(kernel, points, rows, self._diagonal.copy(), threads=threads)
        self._threads = threads
        self._share = share
        self._trace = max(float(share @ self._diagonal), np.finfo(np.float64).tiny)
        self.history = [1.0]

    def follow(self, pivots: Array, factor: Array) -> None:
        """Take the same pivots as others did; those that came first are known already."""
        known, squares = self._pool.rank, [np.empty(0)]
        for start in range(known, len(pivots), _AT_ONCE):
            stop = min(start + _AT_ONCE, len(pivots))
            newton = factor[start:stop, :stop]
            squares.append(self._pool.append(pivots[start:stop], newton, self._share))
        if len(pivots) > known:
            self._remember(np.concatenate(squares))

    def _remember(self, squares: Array) -> None:
        """Traces after each new pivot, the last one without the rounding of the differences."""
        traces = self.history[-1] - np.cumsum(squares) / self._trace
        traces[-1] = float(self._share @ self._pool.residual) / self._trace
        # Only rounding of the differences can be below zero here: of residuals, the pool checks.
        self.history.extend(np.minimum.accumulate([self.history[-1], *traces.clip(min=0.0)])[1:])

    def upper_bounds(self, tol: float) -> Array:
        """Bounds of the trace over the table after 0, 1, ... pivots, shape (m + 1,).

        The trace over a sample of it, a ratio of means, plus two standard errors, and times
        1 + (16 / m)^2: what is left after few pivots lies in tails that a sample has few rows of.
        Infinite before the first pivot that may be enough.
        """
        rank = self._pool.rank
        bounds = np.full(rank + 1, np.inf)
        residual, square = self._pool.residual.copy(), self._share**2
        for m in range(rank, 0, -1):
            tau = self.history[m]
            if tau > tol and m < rank:
                break
            error = np.sqrt(square @ (residual - tau * self._diagonal) ** 2) / self._trace
            bounds[m] = (tau + 2 * error) * (1 + (_TAIL / m) ** 2)
            residual += self._pool.column(m - 1) ** 2
        return bounds


class PivotedRows(TracedRows):
    """Pivots so far, and the rows that they were chosen from."""

    def __init__(
        self,
        kernel: Any,
        points: Array,
        rows: Array,
        share: Array,
        threads: Executor | None = None,
    ) -> None:
        super().__init__(kernel, points, rows, share, threads)
        self._largest = float(self._diagonal.max(initial=0.0))
        self._told = 0
        self.picks = np.empty(0, dtype=np.int64)

    @property
    def rank(self) -> int:
        """Number of pivots."""
        return len(self.picks)

    @property
    def factor(self) -> Array:
        """R, lower-triangular."""
        return np.tril(self._pool.newton(self.picks))

    def _floor(self, rank: int) -> float:
        return noise(rank, self._largest)

    def greedy(self, limit: int) -> bool:
        """One round; False if no row is left above rounding."""
        best = self._pool.residual.max(initial=0.0)
        if best <= self._floor(self.rank):
            return False
        self._accept(*self._pool.step(self._floor, limit - self.rank))
        return True

    def _accept(self, picks: Array, newton: Array) -> None:
        squares = self._pool.append(self._pool.points[picks], newton, self._share)
        self._pool.settle(picks, newton)
        self.picks = np.concatenate([self.picks, picks])
        self._remember(squares)

    def continued(self, points: Array, rows: Array, share: Array) -> "PivotedRows":
        """The same pivots on more rows, of which these were the first."""
        more = PivotedRows(self._pool.kernel, points, rows, share, self._threads)
        self._hand_over(more)
        return more

    def _hand_over(self, more: "PivotedRows") -> None:
        factor = self.factor
        more.follow(more._pool.points[self.picks], factor)
        more._pool.settle(self.picks, factor)
        more.picks, more._told = self.picks, self._told

    def tell(self, on_pivot: OnPivot | None, tol: float = 0.0) -> None:
        """Report the pivots that have not been reported yet, up to the one that reaches ``tol``."""
        while on_pivot is not None and self._told < self.rank and self.history[self._told] > tol:
            self._told += 1
            on_pivot(self._told, self.history[self._told])

    def result(self, bounds: Array | list[float], tol: float, exhausted: bool) -> CholeskyResult:
        """The pivots up to the first bound that is at most tol, or all."""
        met = np.flatnonzero(np.asarray(bounds) <= tol)
        rank = int(met[0]) if len(met) else self.rank
        return CholeskyResult(
            pivots=self.picks[:rank],
            factor=self.factor[:rank, :rank],
            residual_trace=np.array(self.history[: rank + 1]),
            reached=bool(len(met)),
            exhausted=exhausted and not len(met),
        )
