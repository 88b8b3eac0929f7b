"""Pivoted Cholesky of rows in memory: greedy, by trace, from a row sample.

Pivots chosen by what they take from the residual trace, not by their own residual.

With K' the residual kernel matrix, pivot p takes |K'_p|^2 / K'_pp from its trace. Greedy pivoting
(joint paper, Algorithm 1) looks at K'_pp alone, and so takes rows that stand alone: in tails and
corners, where they tell of few others. At coarse tolerances a choice by the whole gain ends with
fewer pivots (A. K. Farahat, A. Ghodsi, M. S. Kamel, A novel greedy algorithm for Nystrom
approximation, AISTATS 2011). Here the norms |K'_p| are those of a sketch, in one product with K.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cme_dask.display import brief_repr
from cme_dask.kernels import blas
from cme_dask.numerics.pools import TIE, CandidateBlock, eliminate, noise

# Pivoted Cholesky decomposition of a kernel matrix that is never formed


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
    run = ResidualSelector(
        kernel,
        points,
        np.arange(n) if rows is None else np.asarray(rows),
        np.ones(n) if weights is None else np.asarray(weights),
    )
    limit = min(n, n if max_rank is None else max_rank)
    exhausted = False
    while run.rank < limit and run.history[-1] > tol and not exhausted:
        exhausted = not run.greedy(limit)
        run.report(on_pivot, tol)
    return run.result(run.history, tol, exhausted)


class ResidualSelector:
    """Pivots chosen from rows by their residuals, and the residual trace over these rows.

    Rows can also take the pivots that others chose (:meth:`follow`), to measure the trace.

    Parameters
    ----------
    kernel
        The kernel.
    points, rows
        Rows, shape (n, d), and their global indices, shape (n,).
    share
        Weights of the rows in the trace, shape (n,).
    threads
        Where blocks of rows are brought up to date; default one after the other.
    """

    per_pivot: ClassVar[int] = 16
    """From how many rows to choose: so many for each pivot."""

    least: ClassVar[int] = 1 << 12
    """And at least so many. From more rows this takes more outliers, which tell less of others."""

    def __init__(
        self,
        kernel: Any,
        points: Array,
        rows: Array,
        share: Array,
        threads: Executor | None = None,
    ) -> None:
        self._diagonal = np.array(kernel.diagonal(points), dtype=np.float64)
        self._largest = float(self._diagonal.max(initial=0.0))
        self._pool = CandidateBlock(kernel, points, rows, self._diagonal.copy(), threads=threads)
        self._threads = threads
        self._share = share
        self._trace = max(float(share @ self._diagonal), np.finfo(np.float64).tiny)
        self._reported = 0
        self.history = [1.0]
        self.picks = np.empty(0, dtype=np.int64)

    @classmethod
    def prefix_rows(cls, rank: int, size: int) -> int:
        """Rows of ``size`` from which pivot number ``rank`` is chosen, a power of two."""
        enough = 1 << (cls.per_pivot * max(rank, 1) - 1).bit_length()
        return min(size, max(cls.least, enough))

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

    def continued(
        self, kind: "type[ResidualSelector]", points: Array, rows: Array, share: Array
    ) -> "ResidualSelector":
        """The same pivots on more rows, of which these were the first; others of this kind."""
        more, factor = kind(self._pool.kernel, points, rows, share, self._threads), self.factor
        more.follow(more._pool.points[self.picks], factor)
        more._pool.settle(self.picks, factor)
        more.picks, more._reported = self.picks, self._reported
        more._subtract(0)
        return more

    def _subtract(self, first: int) -> None:
        """Bring what a rule knows beside the residuals up to date with columns of L."""

    def report(self, on_pivot: OnPivot | None, tol: float = 0.0) -> None:
        """Report the pivots that have not been reported yet, up to the one that reaches ``tol``."""
        while (
            on_pivot is not None
            and self._reported < self.rank
            and self.history[self._reported] > tol
        ):
            self._reported += 1
            on_pivot(self._reported, self.history[self._reported])

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


# Pivots chosen by what they take from the residual trace, not by their own residual


SKETCH = 64
"""Random signs for each row: norms are right within a sixth or so."""

_ROWS = 512  # and as many others, whose kernel values are held at once
_CANDIDATES = 256  # rows that a round chooses from
_WORTH = 0.3  # gain, in that of the best row outside, down to which a round goes on
_LEAST = 0.1  # residual, in the mean one, below which rows are no pivots: R stays well conditioned


class TraceGainSelector(ResidualSelector):
    """Pivots each chosen because it takes most from the trace.

    A round chooses from candidates, the best one of each of 256 groups of rows, as long as what
    one takes is at least 0.3 of what the best row outside would have taken before the round. It
    costs the square of the rows, and half as many as by residual give the same ranks.
    """

    per_pivot: ClassVar[int] = 8
    least: ClassVar[int] = 1 << 10

    def __init__(
        self,
        kernel: Any,
        points: Array,
        rows: Array,
        share: Array,
        threads: Executor | None = None,
    ) -> None:
        super().__init__(kernel, points, rows, share, threads)
        bits = np.random.default_rng(0).integers(0, 2, size=(len(rows), SKETCH), dtype=np.int8)
        size = float(share @ self._diagonal) or 1.0  # so that no square underflows
        root = np.sqrt(share) / size
        self._signs = np.where(np.ascontiguousarray(bits.T), root, -root)
        self._sketch = self._of_kernel()

    def greedy(self, limit: int) -> bool:
        """One round; False if no row is left above rounding."""
        residual, mass = self._pool.residual, float(self._share.sum())
        mean = float(self._share @ residual) / mass if mass else 0.0
        least = max(self._floor(self.rank), _LEAST * mean)
        if not mean > 0.0 or residual.max() <= least:
            return False
        gain = _gain(self._sketch, residual, least)
        here, outside = _candidates(gain, self._pool.rows)
        pool, sketch, known = self._pool.take(here), self._sketch[:, here].copy(), self.rank
        n = len(here)

        def choose(residual: Array, panel: Array) -> int:
            if len(panel):
                np.subtract(sketch, np.outer(panel[-1, n:], panel[-1, :n]), out=sketch)
            gain = _gain(sketch, residual, least)
            most = gain.max()
            enough = most > 0.0 and (not len(panel) or most >= _WORTH * outside)
            return int((gain >= most * (1 - TIE)).argmax()) if enough else -1

        newton = pool.newton(np.arange(n))
        schur = pool.kernel(pool.points, pool.points) - newton @ newton.T
        picks, panel = eliminate(
            np.concatenate([schur, sketch.T], axis=1), pool.residual, choose, limit - known
        )
        if not len(picks):  # what is left belongs to rows without weight
            return False
        own = np.tril(panel[:, picks].T)
        self._accept(here[picks], np.concatenate([newton[picks], own], axis=1))
        self._subtract(known, panel[:, n:].T)
        return True

    def _of_kernel(self) -> Array:
        """Signs^T K, shape (SKETCH, n)."""
        points, blocks = self._pool.points, list(_blocks(len(self._pool.points)))

        def of_rows(here: slice) -> Array:
            products = np.zeros((SKETCH, here.stop - here.start))
            for there in blocks:
                values = np.empty((there.stop - there.start, here.stop - here.start))
                self._pool.kernel.evaluator(points[there])(points[here], values)
                products += self._signs[:, there] @ values
            return products

        mapped = map if self._threads is None else self._threads.map
        return np.concatenate(list(mapped(of_rows, blocks)), axis=1)

    def _subtract(self, first: int, products: Array | None = None) -> None:
        """Take from the sketch what the columns of L from ``first`` on explain.

        ``products`` of the columns with the signs, shape (SKETCH, b), if they are known.
        """
        for columns in self._pool.columns(first):
            if products is None:
                of_these = self._signs @ columns.T
            else:
                of_these, products = np.split(products, [len(columns)], axis=1)
            blas.subtract_product(self._sketch, np.ascontiguousarray(of_these), columns)


def _blocks(n: int) -> Iterator[slice]:
    return (slice(start, min(start + _ROWS, n)) for start in range(0, n, _ROWS))


def _gain(sketch: Array, residual: Array, least: float) -> Array:
    """What rows take from the trace, shape (n,); 0 where the residual is too small to tell."""
    norms = np.einsum("ij,ij->j", sketch, sketch)
    return np.where(residual > least, norms / np.maximum(residual, least), 0.0)


def _candidates(gain: Array, rows: Array) -> tuple[Array, float]:
    """Positions of the best row of each group, by global index, and the best gain of the others.

    Rows i, i + 256, ... are a group; ties go to the lowest row.
    """
    groups = min(_CANDIDATES, len(gain))
    shape = -(-len(gain) // groups), groups
    gains, numbers = np.full(shape, -1.0), np.full(shape, np.iinfo(np.int64).max)
    gains.flat[: len(gain)], numbers.flat[: len(gain)] = gain, rows
    tied = gains >= gains.max(axis=0) * (1 - TIE)
    lowest = np.where(tied, numbers, np.iinfo(np.int64).max).argmin(axis=0)
    best = lowest * groups + np.arange(groups)
    best = best[gain[best] > 0.0]
    others = gain.copy()
    others[best] = 0.0
    return best[np.argsort(rows[best])], float(others.max())


# Pivots from a random sample of the rows, enough for the table that it was drawn from


_COARSE = 3e-3  # tol down to which a choice by trace ends with fewer pivots
_GAP = 2.0  # traces on other rows and on those chosen from, beyond which more rows are needed


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
    threads: Executor | None = None,
) -> CholeskyResult:
    """Pivots from a random sample, enough for the table that it was drawn from.

    For ``tol`` of at least 3e-3 they are chosen by what they take from the trace (see
    :mod:`cme_dask.numerics.cholesky`), as long as rows tell enough of each other for that, else by
    residual (joint paper, Algorithm 1). They come from a prefix of the sample, which grows with the
    rank. On these rows the residual trace is too small, since the pivots are some of them; so it is
    measured on others, and there it must be below ``tol`` by two standard errors, and by more if
    pivots are few.

    Parameters
    ----------
    kernel
        The kernel k.
    points
        Rows to choose from, shape (n, d); each prefix is a sample, too.
    rows
        Their global row indices, shape (n,).
    weights_of
        Weights of the first s rows for means over the table, shape (s,).
    tol, max_rank, on_pivot
        As in :func:`pivoted_cholesky`.
    check
        Other rows, and their weights for means over the table. Default: the table has no others,
        and the trace is that over all rows given.
    threads
        Where blocks of rows are brought up to date; default one after the other.

    Returns
    -------
    CholeskyResult
        Its ``residual_trace`` is that on the rows to choose from; ``reached`` is False, too, if
        these can't tell enough of the table.
    """
    limit = len(points) if max_rank is None else min(max_rank, len(points))
    kind = TraceGainSelector if tol >= _COARSE else ResidualSelector
    chosen = _Growing(kind, kernel, points, rows, weights_of, limit, on_pivot, threads)
    if check is None:
        chosen.until(tol)
        chosen.by_residual(len(points))
        chosen.until(tol)
        return chosen.run.result(chosen.run.history, tol, chosen.exhausted)
    others = ResidualSelector(kernel, check[0], np.arange(len(check[0])), check[1], threads)
    target = tol
    while True:
        run = chosen.until(target)
        others.follow(points[run.picks], run.factor)
        bounds = others.upper_bounds(tol)
        gap = others.history[-1] / max(run.history[-1], np.finfo(np.float64).tiny)
        if bounds.min() <= tol or chosen.ended or (chosen.full and gap > _GAP):
            return run.result(bounds, tol, chosen.exhausted)
        if gap > _GAP:  # more of the same rows would tell about these rows alone
            chosen.by_residual(2 * chosen.size)
            target = tol
        else:
            target = 0.9 * run.history[-1] * tol / bounds[-1]


class _Growing:
    """Pivots from a prefix that grows with the rank."""

    def __init__(
        self,
        kind: type[ResidualSelector],
        kernel: Any,
        points: Array,
        rows: Array,
        weights_of: Callable[[int], Array],
        limit: int,
        on_pivot: OnPivot | None,
        threads: Executor | None,
    ) -> None:
        self._points, self._rows, self._weights_of = points, rows, weights_of
        self._kind, self._limit, self._on_pivot = kind, limit, on_pivot
        self.size, self.exhausted = kind.prefix_rows(0, len(points)), False
        first = slice(self.size)
        weights = weights_of(self.size)
        self.run = kind(kernel, points[first], rows[first], weights, threads)

    @property
    def full(self) -> bool:
        """Whether the prefix holds all rows."""
        return self.size == len(self._points)

    @property
    def ended(self) -> bool:
        """Whether there can be no more pivots."""
        alone = self.exhausted and self.full and self._kind is ResidualSelector
        return alone or self.run.rank >= self._limit

    def grow(self, size: int) -> None:
        """Choose from a longer prefix, of at most all rows."""
        size = min(size, len(self._points))
        if size > self.size:
            self._go_on(size)

    def by_residual(self, size: int) -> None:
        """The same, and go on by residual: of so many more rows a sketch costs too much."""
        turned, self._kind = self._kind is not ResidualSelector, ResidualSelector
        size = min(max(size, self.size), len(self._points))
        if turned or size > self.size:
            self._go_on(size)

    def _go_on(self, size: int) -> None:
        points, rows, weights = self._points[:size], self._rows[:size], self._weights_of(size)
        self.run = self.run.continued(self._kind, points, rows, weights)
        self.size, self.exhausted = size, False

    def until(self, target: float) -> ResidualSelector:
        """Choose until the trace over the prefix is at most ``target``, or the choice ends."""
        while self.run.history[-1] > target and not self.ended:
            if self.exhausted:
                self.by_residual(2 * self.size)
            self.grow(self._kind.prefix_rows(self.run.rank + 1, len(self._points)))
            most = self.size // self._kind.per_pivot
            most = self._limit if self.full else min(self._limit, most)
            self.exhausted = not self.run.greedy(most)
            self.run.report(self._on_pivot)
        return self.run
