"""Pivots from a random sample of the rows, enough for the table that it was drawn from.

Greedy pivoting takes the row of largest residual (joint paper, Algorithm 1), and so rows that stand
alone: in tails and corners, where they say little of others. :class:`TraceGainSelector` takes the
row that lowers the residual trace most. With K' the residual kernel matrix, pivot p takes
|K'_p|^2 / K'_pp from its trace. At coarse tolerances this ends with fewer pivots (A. K. Farahat,
A. Ghodsi, M. S. Kamel, A novel greedy algorithm for Nystrom approximation, AISTATS 2011). Here the
norms |K'_p| are those of a sketch, in one product with K.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.kernels import blas
from cme_dask.numerics.cholesky import (
    TIE,
    CholeskyResult,
    DensePivoting,
    OnPivot,
    PivotedFactor,
    noise,
)

# Pivots that take most from the residual trace


Array = Any

SKETCH = 64
"""Random signs for each row: norms are right within a sixth or so."""

_ROWS = 512  # and as many others, whose kernel values are held at once
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
        blocks = [slice(start, min(start + _ROWS, n)) for start in range(0, n, _ROWS)]

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
            blas.subtract_product(self.sketch, signs @ columns.T, columns)

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
        few = DensePivoting(
            factor.kernel,
            factor.points[here],
            factor.newton(here),
            max_rank - known,
            residual[here],
            beside=sketch.T,
        )
        while not few.full:
            gain = _gain(sketch, few.residual, least)
            most = gain.max()
            if not most > 0.0 or (few.picks and most < _WORTH * outside):
                break
            few.accept(int((gain >= most * (1 - TIE)).argmax()))
            sketch -= np.outer(few.panel[-1, n:], few.panel[-1, :n])
        if not few.picks:  # what is left belongs to rows without weight
            return False
        picks, newton = few.chosen()
        factor.append(factor.points[here[picks]], newton, here[picks])
        for numbers, columns in factor.columns(known):
            products = few.panel[numbers.start - known : numbers.stop - known, n:]
            blas.subtract_product(self.sketch, np.ascontiguousarray(products.T), columns)
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
_TAIL = 16.0  # in pivots: normal columns at tol 1e-5 came out up to 1.4 tol without it


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

    For ``tol`` of at least 3e-3 they are chosen by what they take from the trace, as long as rows
    tell enough of each other for that, else by residual (joint paper, Algorithm 1). They come from
    a prefix of the sample, which grows with the rank. On these rows the residual trace is too
    small, since the pivots are some of them; so it is measured on others, and there it must be
    below ``tol`` by two standard errors, and by more if pivots are few.

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
    by_trace = tol >= _COARSE
    size = prefix_rows(0, len(points), by_trace=by_trace)
    first = PivotedFactor(kernel, points[:size], rows[:size], weights_of(size), threads=threads)
    by_gain = TraceGainSelector(first) if by_trace else None
    run = _Prefix(first, by_gain, points, rows, weights_of, limit, on_pivot)
    if check is None:
        run.until(tol)
        run.extend(len(points), by_trace=False)
        history = run.until(tol).history
        return CholeskyResult.of(run.factor, history, tol, run.exhausted)
    others = PivotedFactor(kernel, check[0], np.arange(len(check[0])), check[1], threads=threads)
    target = tol
    while True:
        factor = run.until(target)
        others.follow(factor)
        bounds = _upper_bounds(others, tol)
        gap = others.history[-1] / max(factor.history[-1], np.finfo(np.float64).tiny)
        full = len(factor.rows) == len(points)
        if bounds.min() <= tol or run.ended or (full and gap > _GAP):
            return CholeskyResult.of(factor, bounds, tol, run.exhausted)
        if gap > _GAP:  # more of the same rows would tell about these rows alone
            run.extend(2 * len(factor.rows), by_trace=False)
            target = tol
        else:
            target = 0.9 * factor.history[-1] * tol / bounds[-1]


def prefix_rows(rank: int, size: int, *, by_trace: bool) -> int:
    """Rows of ``size`` from which pivot number ``rank`` is chosen, a power of two.

    From more rows, the choice by residual takes more outliers, which say less of others.
    """
    each, least = (_PER_PIVOT // 2, _LEAST_ROWS // 4) if by_trace else (_PER_PIVOT, _LEAST_ROWS)
    return min(size, max(least, 1 << (each * max(rank, 1) - 1).bit_length()))


@dataclass(eq=False)
class _Prefix:
    """The choice from the first rows, by trace or, without a selector, by residual."""

    factor: PivotedFactor
    selector: TraceGainSelector | None
    points: Array
    rows: Array
    weights_of: Callable[[int], Array]
    limit: int
    on_pivot: OnPivot | None
    exhausted: bool = False

    @property
    def ended(self) -> bool:
        """Whether there can be no more pivots."""
        whole = self.selector is None and len(self.factor.rows) == len(self.points)
        return (self.exhausted and whole) or self.factor.rank >= self.limit

    def extend(self, size: int, *, by_trace: bool) -> None:
        """Go on with the same pivots from a prefix of at least this size, or by another rule."""
        before, size = self.factor, min(max(size, len(self.factor.rows)), len(self.points))
        if size == len(before.rows) and by_trace == (self.selector is not None):
            return
        points, rows, weights = self.points[:size], self.rows[:size], self.weights_of(size)
        factor = PivotedFactor(before.kernel, points, rows, weights, threads=before.threads)
        factor.follow(before, within=True)
        self.factor, self.exhausted = factor, False
        self.selector = TraceGainSelector(factor) if by_trace else None

    def until(self, target: float) -> PivotedFactor:
        """Choose until the trace over the prefix is at most ``target``, or the choice ends."""
        while self.factor.history[-1] > target and not self.ended:
            if self.exhausted:  # of so many more rows a sketch costs too much
                self.extend(2 * len(self.factor.rows), by_trace=False)
            by_trace, known, most = self.selector is not None, self.factor.rank, self.limit
            self.extend(
                prefix_rows(known + 1, len(self.points), by_trace=by_trace), by_trace=by_trace
            )
            size = len(self.factor.rows)
            if size < len(self.points):
                most = min(most, size // (_PER_PIVOT // 2 if by_trace else _PER_PIVOT))
            self.exhausted = not (self.selector or self.factor).advance(most)
            for rank in range(known, self.factor.rank):
                if self.on_pivot is not None and self.factor.history[rank] > 0.0:
                    self.on_pivot(rank + 1, self.factor.history[rank + 1])
        return self.factor


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
