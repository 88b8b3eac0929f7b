"""Pivoted Cholesky decomposition of a kernel matrix that is never formed, many pivots at a time.

Greedy pivoting (joint paper, Algorithm 1) looks at the residuals of all rows for every pivot. Here
the rows of largest residual are pivoted alone, as long as the choice among them is provably the one
over all rows: residuals only fall, so what the other rows had bounds what they have. Only then are
the other rows brought up to date, by matrix products.

:class:`PivotedFactor` holds the rows, their residuals and their columns of L.
:func:`dense_pivots` chooses among a few rows by any rule.

Greedy pivots are rows that stand alone: in tails and corners, where they say little of others.
:class:`TraceGainSelector` takes the row that lowers the residual trace most. With K' the residual
kernel matrix, pivot p takes |K'_p|^2 / K'_pp from its trace. At coarse tolerances this ends with
fewer pivots (A. K. Farahat, A. Ghodsi, M. S. Kamel, A novel greedy algorithm for Nystrom
approximation, AISTATS 2011). Here the norms |K'_p| are those of a sketch, in one product with K.

:func:`pivoted_cholesky` chooses from rows in memory, :func:`sampled_cholesky` from a random sample,
until it is enough for the table that the sample was drawn from. Pivots over rows that are not in
memory are in :mod:`cme_dask.numerics.rounds`.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from cme_dask.display import brief_repr
from cme_dask.errors import NumericalError
from cme_dask.kernels.evaluator import lower_product, subtract_product
from cme_dask.numerics.folds import RowSample

# Residuals: which are zero up to rounding, which are the largest, what bounds the others


Array = Any
OnPivot = Callable[[int, float], None]
Bound = tuple[float, int]
"""The largest residual of other rows, and the lowest of those that tie with it."""

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

NO_ROWS: Bound = (-np.inf, np.iinfo(np.int64).max)
"""The bound where there are no other rows."""


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


def leading(residual: Array, rows: Array) -> Bound:
    """The largest residual, and the lowest row, by global index, of those that tie with it."""
    if not len(residual):
        return NO_ROWS
    largest = float(residual.max())
    return largest, int(rows[residual >= largest * (1 - TIE)].min())


def top_rows(
    residual: Array, rows: Array, size: int, bound: Bound = NO_ROWS
) -> tuple[Array, Bound]:
    """Positions of the rows with the largest residuals, sorted, and a bound of the others.

    Where more rows tie with the largest than ``size``, these are the lowest of them: greedy
    pivoting takes its next pivot from the result, always. ``bound`` is that of further rows.
    """
    n = len(rows)
    if size >= n:
        return np.arange(n), bound
    top = np.argpartition(residual, n - size)[n - size :]
    cut = residual.max() * (1 - TIE)
    if residual[top].min() >= cut:
        tied = np.flatnonzero(residual >= cut)
        top = tied[np.argsort(rows[tied])[:size]]
    outside = np.ones(n, dtype=bool)
    outside[top] = False
    largest, row = bound
    return np.sort(top), leading(
        np.append(residual[outside], largest), np.append(rows[outside], row)
    )


# The factor of a few rows, one pivot after the other, and of many, in blocks of pivots


def dense_pivots(
    kernel: Any,
    points: Array,
    newton: Array,
    max_rank: int,
    choose: Callable[[Array, Array], int | None],
    *,
    residual: Array | None = None,
    beside: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Pivoted Cholesky of the residual kernel matrix of a few rows, which is formed.

    Parameters
    ----------
    kernel, points
        The kernel, and the rows, shape (c, d).
    newton
        N at the rows for the pivots so far, shape (c, m).
    max_rank
        Largest number of pivots, with these.
    choose
        From the residuals of the rows, shape (c,), and the panel so far to the position of the
        next pivot; None ends the choice.
    residual
        Residuals of the rows, shape (c,); default the diagonal of the matrix.
    beside
        Products of the matrix, shape (c, q), to be brought up to date as well.

    Returns
    -------
    picks : (b,) positions of the pivots, in order
    newton : (b, m + b), N at them, themselves included
    panel : (b, c + q); row j is the column of L that pivot j makes, and the same products of it
    """
    matrix = kernel(points, points) - newton @ newton.T
    residual = np.array(np.diag(matrix).clip(min=0.0) if residual is None else residual)
    if beside is not None:
        matrix = np.concatenate([matrix, beside], axis=1)
    picks = list[int]()
    memory = np.empty((min(max_rank - newton.shape[1], len(points)), matrix.shape[1]))
    while len(picks) < len(memory):
        panel = memory[: len(picks)]
        pick = choose(residual, panel)
        if pick is None:
            break
        root = np.sqrt(residual[pick])
        column = matrix[pick] - panel[:, pick] @ panel
        column /= root
        column[picks] = 0.0
        column[pick] = root
        memory[len(picks)] = column
        own = column[: len(points)]
        residual -= own * own
        np.maximum(residual, 0.0, out=residual)
        residual[pick] = 0.0
        picks.append(pick)
    at, panel = np.array(picks, dtype=np.int64), memory[: len(picks)]
    return at, np.concatenate([newton[at], np.tril(panel[:, at].T)], axis=1), panel


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
                subtract_product(values, left, block[:, here])
            lower_product(inverse, values)
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
        newton = np.tril(other.newton(other.picks))
        for start in range(self.rank, other.rank, _AT_ONCE):
            here = slice(start, min(start + _AT_ONCE, other.rank))
            picks = other.picks[here]
            self.append(other.points[picks], newton[here, : here.stop], picks if within else None)

    def advance(self, max_rank: int, bound: Bound = NO_ROWS, *, certain: bool = True) -> bool:
        """Take the pivots of :meth:`greedy` that are known before the rows are brought up to date.

        Returns
        -------
        bool
            False if there are none.
        """
        if len(self.rows) > _SMALL:
            size = max(_SMALL, len(self.rows) // _SHARE)
            top, bound = top_rows(self.residual, self.rows, size, bound)
            few = PivotedFactor(
                self.kernel,
                self.points[top],
                self.rows[top],
                residual=self.residual[top],
                newton=self.newton(top),
                scale=self.scale,
            )
            picks, newton = few.greedy(max_rank, bound, certain=certain)
            picks = top[picks]
        else:
            picks, newton = self.greedy(max_rank, bound, certain=certain)
        if len(picks):
            self.append(self.points[picks], newton, picks)
        return len(picks) > 0

    def greedy(self, max_rank: int, bound: Bound, *, certain: bool = True) -> tuple[Array, Array]:
        """Pivots of Algorithm 1 as long as no row outside may come first.

        Parameters
        ----------
        max_rank
            Largest number of pivots, with those so far.
        bound
            Of rows outside, from which Algorithm 1 chooses as well.
        certain
            Whether the best one of these rows is known to be the best of all.

        Returns
        -------
        picks : (b,) positions of the pivots, in order; none if only rounding is left
        newton : (b, m + b), N at them, themselves included
        """
        outside, lowest = bound
        if len(self.rows) > _SMALL:
            while (
                self.rank < max_rank
                and (certain or self.residual.max() >= outside)
                and self.advance(max_rank, bound, certain=certain)
            ):
                certain = False
            return self.picks, self.newton(self.picks)

        # So few rows need not be brought up to date.
        order = np.argsort(self.rows)  # so that the first of equals is the lowest row
        rows = self.rows[order]

        def choose(residual: Array, panel: Array) -> int | None:
            best = float(residual.max())
            pick = int((residual >= best * (1 - TIE)).argmax())
            if best <= noise(self.rank + len(panel), self.scale):
                return None
            first = best * (1 - TIE) > outside or (best >= outside and rows[pick] < lowest)
            return pick if first or (certain and not len(panel)) else None

        picks, newton, _ = dense_pivots(
            self.kernel,
            self.points[order],
            self.newton(order),
            max_rank,
            choose,
            residual=self.residual[order],
        )
        return order[picks], newton


# Greedy pivots from rows in memory


class CholeskyResult(NamedTuple):
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

    def __repr__(self) -> str:
        return brief_repr(self)

    @classmethod
    def of(
        cls,
        factor: PivotedFactor,
        traces: Array | list[float],
        tol: float,
        exhausted: bool,
        step: int = 1,
    ) -> "CholeskyResult":
        """The pivots up to the first of these traces that is at most tol, or all.

        The rows of the factor are every ``step``-th of those that were given.
        """
        met = np.flatnonzero(np.asarray(traces) <= tol)
        rank = int(met[0]) if len(met) else factor.rank
        return cls(
            pivots=step * factor.picks[:rank],
            factor=np.tril(factor.newton(factor.picks))[:rank, :rank],
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


# Pivots that take most from the residual trace

SKETCH = 64
"""Random signs for each row: norms are right within a sixth or so."""

_SKETCHED = 512  # and as many others, whose kernel values are held at once
_CANDIDATES = 256  # rows that a round by trace chooses from
_WORTH = 0.3  # gain, in that of the best row outside, down to which a round goes on
_LEAST = 0.1  # residual, in the mean one, below which rows are no pivots: R stays well conditioned


class TraceGainSelector:
    """Pivots each chosen because it takes most from the trace.

    A round chooses from candidates, the best one of each of 256 groups of rows, as long as what
    one takes is at least 0.3 of what the best row outside would have taken before the round. It
    costs the square of the rows, and half as many as by residual give the same ranks.

    Parameters
    ----------
    factor
        The rows, with weights, and the pivots so far.
    """

    def __init__(self, factor: PivotedFactor) -> None:
        self.factor = factor
        n = len(factor.rows)
        bits = np.random.default_rng(0).integers(0, 2, size=(n, SKETCH), dtype=np.int8)
        root = np.sqrt(factor.weights) / (factor.trace or 1.0)  # so that no square underflows
        signs = np.where(np.ascontiguousarray(bits.T), root, -root)
        blocks = [slice(start, min(start + _SKETCHED, n)) for start in range(0, n, _SKETCHED)]

        def of_rows(here: slice) -> Array:
            products = np.zeros((SKETCH, here.stop - here.start))
            for there in blocks:
                values = np.empty((there.stop - there.start, here.stop - here.start))
                factor.kernel.evaluator(factor.points[there])(factor.points[here], values)
                products += signs[:, there] @ values
            return products

        mapped = map if factor.threads is None else factor.threads.map
        # Signs^T (K - L L^T), shape (SKETCH, n).
        self.sketch = np.concatenate(list(mapped(of_rows, blocks)), axis=1)
        for _, columns in factor.columns():
            subtract_product(self.sketch, signs @ columns.T, columns)

    def advance(self, max_rank: int) -> bool:
        """Take the pivots of one round; False if no row is left above rounding."""
        factor, residual, known = self.factor, self.factor.residual, self.factor.rank
        mass = float(factor.weights.sum())
        mean = float(factor.weights @ residual) / mass if mass else 0.0
        least = max(noise(known, factor.scale), _LEAST * mean)
        if not mean > 0.0 or residual.max() <= least:
            return False
        here, outside = _candidates(_gain(self.sketch, residual, least), factor.rows)
        sketch, n = self.sketch[:, here].copy(), len(here)

        def choose(residual: Array, panel: Array) -> int | None:
            nonlocal sketch
            if len(panel):
                sketch -= np.outer(panel[-1, n:], panel[-1, :n])
            gain = _gain(sketch, residual, least)
            most = gain.max()
            if not most > 0.0 or (len(panel) and most < _WORTH * outside):
                return None
            return int((gain >= most * (1 - TIE)).argmax())

        picks, newton, panel = dense_pivots(
            factor.kernel,
            factor.points[here],
            factor.newton(here),
            max_rank,
            choose,
            residual=residual[here],
            beside=sketch.T,
        )
        if not len(picks):  # what is left belongs to rows without weight
            return False
        factor.append(factor.points[here[picks]], newton, here[picks])
        for numbers, columns in factor.columns(known):
            products = panel[numbers.start - known : numbers.stop - known, n:]
            subtract_product(self.sketch, np.ascontiguousarray(products.T), columns)
        return True


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


# The choice from a prefix of the sample that grows with the rank, until it is enough for the table


_COARSE = 3e-3  # tol down to which a choice by trace ends with fewer pivots
_GAP = 2.0  # traces on other rows and on those chosen from, beyond which more rows are needed
_PER_PIVOT = 16  # rows of the prefix, by residual; half as many by trace
_LEAST_ROWS = 1 << 12  # likewise, a quarter by trace
_CHECK_ROWS = 1 << 14  # rows that tell whether the pivots are enough
_TAIL = 16.0  # in pivots: normal columns at tol 1e-5 came out up to 1.4 tol without it


def sampled_cholesky(
    kernel: Any,
    sample: RowSample,
    variable: int,
    tol: float,
    max_rank: int | None = None,
    *,
    on_pivot: OnPivot | None = None,
    threads: Executor | None = None,
) -> CholeskyResult:
    """Pivots from a random sample, enough for the table that it was drawn from.

    For ``tol`` of at least 3e-3 they are chosen by what they take from the trace, as long as rows
    tell enough of each other for that, else by residual (joint paper, Algorithm 1). They come from
    a prefix of the sample, which grows with the rank. On these rows the residual trace is too
    small, since the pivots are some of them. So, unless the sample is the whole table, they are
    every other row of it, and the trace is measured on the others. There it must be below ``tol``
    by two standard errors, and by more if pivots are few.

    Parameters
    ----------
    kernel
        The kernel k.
    sample, variable
        The row sample, and the number of the variable in it.
    tol, max_rank, on_pivot
        As in :func:`pivoted_cholesky`.
    threads
        Where blocks of rows are brought up to date; default one after the other.

    Returns
    -------
    CholeskyResult
        Its ``pivots`` are positions in the sample. Its ``residual_trace`` is that on the rows to
        choose from; ``reached`` is False, too, if these can't tell enough of the table.
    """
    # Halves of a sample that are made so are samples, too, with the same chances: prefixes of it
    # were drawn first.
    step = 1 if sample.complete else 2
    points, rows = sample.parts[variable][::step], sample.index[::step]
    n, others = len(points), None
    # Rows are mapped once, and not again for each block of pivots.
    transform, base = kernel.unmapped
    if not sample.complete:
        first = sample.prefix(2 * _CHECK_ROWS)
        check = first.parts[variable][1::2]
        check = check if transform is None else transform(check)
        numbers, weights = np.arange(len(check)), first.importance[1::2]
        others = PivotedFactor(base, check, numbers, weights, threads=threads)
    limit = n if max_rank is None else min(max_rank, n)
    by_trace = tol >= _COARSE
    size, target = prefix_rows(0, n, by_trace=by_trace), tol
    factor: PivotedFactor | None = None
    selector: TraceGainSelector | None = None
    exhausted = False
    while True:
        # Of a longer prefix, or by another rule, the choice goes on with the same pivots.
        if factor is None or len(factor.rows) != size or by_trace != (selector is not None):
            weights = sample.prefix(step * size).importance[::step]
            some = points[:size] if transform is None else transform(points[:size])
            longer = PivotedFactor(base, some, rows[:size], weights, threads=threads)
            if factor is not None:
                longer.follow(factor, within=True)
            factor, selector, exhausted = longer, None, False  # no memory of those before
            if by_trace:
                selector = TraceGainSelector(factor)

        known, whole = factor.rank, size == n and not by_trace
        ended = known >= limit or (exhausted and whole)
        if factor.history[-1] > target and not ended:
            by_trace = by_trace and not exhausted  # of many more rows a sketch costs too much
            least = min(2 * size, n) if exhausted else size
            least = max(least, prefix_rows(known + 1, n, by_trace=by_trace))
            if exhausted or least > size:
                size = least
                continue
            each = _PER_PIVOT // 2 if by_trace else _PER_PIVOT
            most = min(limit, size // each) if size < n else limit
            exhausted = not (selector or factor).advance(most)
            for rank in range(known, factor.rank):
                if on_pivot is not None and factor.history[rank] > 0.0:
                    on_pivot(rank + 1, factor.history[rank + 1])
        elif others is None:  # the trace of a whole table is that of all its rows
            if whole:
                return CholeskyResult.of(factor, factor.history, tol, exhausted)
            size, by_trace = n, False
        else:
            others.follow(factor)
            bounds = _upper_bounds(others, tol)
            gap = others.history[-1] / max(factor.history[-1], np.finfo(np.float64).tiny)
            if bounds.min() <= tol or ended or (size == n and gap > _GAP):
                return CholeskyResult.of(factor, bounds, tol, exhausted, step)
            if gap > _GAP:  # more of the same rows would tell of these rows alone
                size, by_trace, target = min(2 * size, n), False, tol
            else:
                target = 0.9 * factor.history[-1] * tol / bounds[-1]


def prefix_rows(rank: int, size: int, *, by_trace: bool) -> int:
    """Rows of ``size`` from which pivot number ``rank`` is chosen, a power of two.

    From more rows, the choice by residual takes more outliers, which say less of others.
    """
    each, least = (_PER_PIVOT // 2, _LEAST_ROWS // 4) if by_trace else (_PER_PIVOT, _LEAST_ROWS)
    return min(size, max(least, 1 << (each * max(rank, 1) - 1).bit_length()))


def _upper_bounds(others: PivotedFactor, tol: float) -> Array:
    """Bounds of the trace over the table after 0, 1, ... pivots, shape (m + 1,).

    The trace over a sample of it, a ratio of means, plus two standard errors, and times
    1 + (16 / m)^2: what is left after few pivots lies in tails that a sample has few rows of.
    Infinite before the first pivot that may be enough.
    """
    rank, trace = others.rank, max(others.trace, np.finfo(np.float64).tiny)
    bounds = np.full(rank + 1, np.inf)
    diagonal = np.asarray(others.kernel.diagonal(others.points), dtype=np.float64)
    residual, square = others.residual.copy(), others.weights**2
    columns = [column for _, block in others.columns() for column in block]
    for m in range(rank, 0, -1):
        tau = others.history[m]
        if tau > tol and m < rank:
            break
        error = np.sqrt(square @ (residual - tau * diagonal) ** 2) / trace
        bounds[m] = (tau + 2 * error) * (1 + (_TAIL / m) ** 2)
        residual += columns[m - 1] ** 2
    return bounds
