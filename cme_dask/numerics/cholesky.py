"""Pivoted Cholesky decomposition of a kernel matrix that is never formed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.numerics.pools import TIE, Pool, eliminate, noise

__all__ = ["TIE", "CholeskyResult", "pivoted_cholesky", "prefix_rows", "sampled_cholesky"]

Array = Any
OnPivot = Callable[[int, float], None]

_IN_ORDER = 256  # given pivots that are eliminated at once
_AT_ONCE = 32  # known pivots that new rows are brought up to date with
_ROWS_PER_PIVOT = 32
_MIN_PREFIX = 1 << 12
_GAP = 2.0  # traces on other rows and on those chosen from, beyond which more rows are needed


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


def pivoted_cholesky(
    kernel: Any,
    points: Array,
    tol: float,
    max_rank: int | None = None,
    *,
    rows: Array | None = None,
    order: Array | None = None,
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
    order
        Take pivots in this order instead of greedily, skipping those that the earlier ones
        already span to rounding; for pivots given by the user.
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
    run = _Run(
        kernel,
        points,
        np.arange(n) if rows is None else np.asarray(rows),
        np.ones(n) if weights is None else np.asarray(weights),
    )
    batches = iter(()) if order is None else _batches(np.asarray(order))
    limit = min(n, n if max_rank is None else max_rank)
    exhausted = False
    while run.rank < limit and run.history[-1] > tol and not exhausted:
        exhausted = not (run.greedy(limit) if order is None else run.given(batches, limit))
        run.tell(on_pivot)
    return run.result(run.history, tol, exhausted)


def prefix_rows(rank: int, size: int) -> int:
    """Rows of ``size`` from which pivot number ``rank`` is chosen, a power of two.

    32 rows for each pivot, at least 4,096: more cost time, and a greedy choice from more rows takes
    more outliers, which tell less of the others.
    """
    return min(size, max(_MIN_PREFIX, 1 << (_ROWS_PER_PIVOT * max(rank, 1) - 1).bit_length()))


def sampled_cholesky(
    kernel: Any,
    points: Array,
    rows: Array,
    weights_of: Callable[[int], Array],
    tol: float,
    max_rank: int | None = None,
    *,
    check: tuple[Array, Array] | None = None,
    on_pivot: OnPivot | None = None,
) -> CholeskyResult:
    """Greedy pivots on a random sample, enough for the table that it was drawn from.

    Pivots are chosen from a prefix of the sample, which grows with the rank. On these rows the
    residual trace is too small, since the pivots are some of them; so it is measured on others,
    and there it must be below ``tol`` by two standard errors.

    Parameters
    ----------
    kernel
        The kernel k.
    points
        Rows to choose from, shape (n, d); each prefix is a sample, too.
    rows
        Their global row indices, shape (n,).
    weights_of
        Weights of the first s rows for means over the table, shape (s,); called before the
        columns of s rows are computed.
    tol, max_rank, on_pivot
        As in :func:`pivoted_cholesky`.
    check
        Other rows, and their weights for means over the table. Default: the table has no others,
        and the trace is that over all rows given.

    Returns
    -------
    CholeskyResult
        Its ``residual_trace`` is that on the rows to choose from; ``reached`` is False, too, if
        these can't tell enough of the table.
    """
    limit = len(points) if max_rank is None else min(max_rank, len(points))
    chosen = _Growing(kernel, points, rows, weights_of, limit, on_pivot)
    if check is None:
        chosen.until(tol)
        chosen.grow(len(points))
        chosen.until(tol)
        return chosen.run.result(chosen.run.history, tol, chosen.exhausted)
    others, target = _Rows(kernel, check[0], np.arange(len(check[0])), check[1]), tol
    while True:
        run = chosen.until(target)
        others.follow(points[run.picks], run.factor)
        bounds = others.upper_bounds(tol)
        gap = others.history[-1] / max(run.history[-1], np.finfo(np.float64).tiny)
        if bounds.min() <= tol or chosen.ended or (chosen.full and gap > _GAP):
            return run.result(bounds, tol, chosen.exhausted)
        if gap > _GAP:  # more of the same rows would tell about these rows alone
            chosen.grow(2 * chosen.size)
            target = tol
        else:
            target = 0.9 * run.history[-1] * tol / bounds[-1]


class _Rows:
    """Rows that are brought up to date with pivots, and the residual trace over them."""

    def __init__(self, kernel: Any, points: Array, rows: Array, share: Array) -> None:
        self._diagonal = np.array(kernel.diagonal(points), dtype=np.float64)
        self._pool = Pool(kernel, points, rows, self._diagonal.copy())
        self._share = share
        self._trace = float(share @ self._diagonal)
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
        self.history.extend(np.minimum.accumulate([self.history[-1], *traces.clip(min=0.0)])[1:])

    def upper_bounds(self, tol: float) -> Array:
        """The trace after 0, 1, ... pivots plus two standard errors, shape (m + 1,).

        It is a ratio of means over a sample of the table. Infinite before the first pivot that
        may be enough.
        """
        rank = self._pool.rank
        bounds = np.full(rank + 1, np.inf)
        residual, square = self._pool.residual.copy(), self._share**2
        for m in range(rank, 0, -1):
            tau = self.history[m]
            if tau > tol and m < rank:
                break
            error = np.sqrt(square @ (residual - tau * self._diagonal) ** 2) / self._trace
            bounds[m] = tau + 2 * error
            residual += self._pool.column(m - 1) ** 2
        return bounds


class _Run(_Rows):
    """Pivots so far, and the rows that they were chosen from."""

    def __init__(self, kernel: Any, points: Array, rows: Array, share: Array) -> None:
        super().__init__(kernel, points, rows, share)
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

    def given(self, batches: Iterator[Array], limit: int) -> bool:
        """The next pivots in order, without those that the earlier ones span; False at the end."""
        batch = next(batches, None)
        if batch is None:
            return False
        pool = self._pool.take(batch)
        newton = pool.newton(np.arange(len(batch)))
        positions = iter(range(len(batch)))

        def choose(residual: Array, j: int) -> int:
            floor = self._floor(self.rank + j)
            return next((p for p in positions if residual[p] > floor), -1)

        schur = pool.kernel(pool.points, pool.points) - newton @ newton.T
        picks, panel = eliminate(schur, pool.residual, choose, limit - self.rank)
        own = np.tril(panel[:, picks].T)
        if len(picks):
            self._accept(batch[picks], np.concatenate([newton[picks], own], axis=1))
        return True

    def _accept(self, picks: Array, newton: Array) -> None:
        squares = self._pool.append(self._pool.points[picks], newton, self._share)
        self._pool.settle(picks, newton)
        self.picks = np.concatenate([self.picks, picks])
        self._remember(squares)

    def continued(self, points: Array, rows: Array, share: Array) -> "_Run":
        """The same pivots on more rows, of which these were the first."""
        more = _Run(self._pool.kernel, points, rows, share)
        factor = self.factor
        more.follow(points[self.picks], factor)
        more._pool.settle(self.picks, factor)
        more.picks, more._told = self.picks, self._told
        return more

    def tell(self, on_pivot: OnPivot | None) -> None:
        """Report the pivots that have not been reported yet."""
        while on_pivot is not None and self._told < self.rank:
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


class _Growing:
    """Greedy pivots from a prefix that grows with the rank."""

    def __init__(
        self,
        kernel: Any,
        points: Array,
        rows: Array,
        weights_of: Callable[[int], Array],
        limit: int,
        on_pivot: OnPivot | None,
    ) -> None:
        self._points, self._rows, self._weights_of = points, rows, weights_of
        self._limit, self._on_pivot = limit, on_pivot
        self.size, self.exhausted = prefix_rows(0, len(points)), False
        first = slice(self.size)
        self.run = _Run(kernel, points[first], rows[first], weights_of(self.size))

    @property
    def full(self) -> bool:
        """Whether the prefix holds all rows."""
        return self.size == len(self._points)

    @property
    def ended(self) -> bool:
        """Whether there can be no more pivots."""
        return self.run.rank >= self._limit or (self.exhausted and self.full)

    def grow(self, size: int) -> None:
        """Choose from a longer prefix, of at most all rows."""
        size = min(size, len(self._points))
        if size > self.size:
            weights = self._weights_of(size)
            self.run = self.run.continued(self._points[:size], self._rows[:size], weights)
            self.size, self.exhausted = size, False

    def until(self, target: float) -> _Run:
        """Choose until the trace over the prefix is at most ``target``, or the choice ends."""
        while self.run.history[-1] > target and not self.ended:
            self.grow(2 * self.size if self.exhausted else prefix_rows(self.run.rank + 1, len(self._points)))
            most = self._limit if self.full else min(self._limit, self.size // _ROWS_PER_PIVOT)
            self.exhausted = not self.run.greedy(most)
            self.run.tell(self._on_pivot)
        return self.run


def _batches(order: Array) -> Iterator[Array]:
    return (order[start : start + _IN_ORDER] for start in range(0, len(order), _IN_ORDER))
