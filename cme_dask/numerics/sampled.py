"""Pivots from a random sample of the rows, enough for the table that it was drawn from."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.numerics.by_trace import RowsByTrace
from cme_dask.numerics.cholesky import CholeskyResult, OnPivot, PivotedRows, TracedRows

Array = Any

_COARSE = 3e-3  # tol down to which a choice by trace ends with fewer pivots
_GAP = 2.0  # traces on other rows and on those chosen from, beyond which more rows are needed


@dataclass(frozen=True)
class Choice:
    """How pivots are chosen from a sample.

    Attributes
    ----------
    rows
        What chooses.
    per_pivot, least
        From how many rows: so many for each pivot, and at least so many.
    """

    rows: type[PivotedRows]
    per_pivot: int
    least: int

    def prefix_rows(self, rank: int, size: int) -> int:
        """Rows of ``size`` from which pivot number ``rank`` is chosen, a power of two."""
        wanted = 1 << (self.per_pivot * max(rank, 1) - 1).bit_length()
        return min(size, max(self.least, wanted))


GREEDY = Choice(PivotedRows, 16, 1 << 12)
"""By residual: from more rows it takes more outliers, which tell less of the others."""

BY_TRACE = Choice(RowsByTrace, 8, 1 << 10)
"""By what the trace falls: costs the square of the rows, and half as many give the same ranks."""


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
    :mod:`cme_dask.numerics.by_trace`), as long as rows tell enough of each other for that, else by
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
    choice = BY_TRACE if tol >= _COARSE else GREEDY
    chosen = _Growing(choice, kernel, points, rows, weights_of, limit, on_pivot, threads)
    if check is None:
        chosen.until(tol)
        chosen.by_residual(len(points))
        chosen.until(tol)
        return chosen.run.result(chosen.run.history, tol, chosen.exhausted)
    others = TracedRows(kernel, check[0], np.arange(len(check[0])), check[1], threads)
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
        choice: Choice,
        kernel: Any,
        points: Array,
        rows: Array,
        weights_of: Callable[[int], Array],
        limit: int,
        on_pivot: OnPivot | None,
        threads: Executor | None,
    ) -> None:
        self._points, self._rows, self._weights_of = points, rows, weights_of
        self._choice, self._limit, self._on_pivot = choice, limit, on_pivot
        self.size, self.exhausted = choice.prefix_rows(0, len(points)), False
        first = slice(self.size)
        weights = weights_of(self.size)
        self.run = choice.rows(kernel, points[first], rows[first], weights, threads)

    @property
    def full(self) -> bool:
        """Whether the prefix holds all rows."""
        return self.size == len(self._points)

    @property
    def ended(self) -> bool:
        """Whether there can be no more pivots."""
        alone = self.exhausted and self.full and self._choice is GREEDY
        return alone or self.run.rank >= self._limit

    def grow(self, size: int) -> None:
        """Choose from a longer prefix, of at most all rows."""
        size = min(size, len(self._points))
        if size > self.size:
            self._go_on(size)

    def by_residual(self, size: int) -> None:
        """The same, and go on by residual: of so many more rows a sketch costs too much."""
        turned, self._choice = self._choice is not GREEDY, GREEDY
        size = min(max(size, self.size), len(self._points))
        if turned or size > self.size:
            self._go_on(size)

    def _go_on(self, size: int) -> None:
        weights, continued = self._weights_of(size), self._choice.rows.continued
        self.run = continued(self.run, self._points[:size], self._rows[:size], weights)
        self.size, self.exhausted = size, False

    def until(self, target: float) -> PivotedRows:
        """Choose until the trace over the prefix is at most ``target``, or the choice ends."""
        while self.run.history[-1] > target and not self.ended:
            if self.exhausted:
                self.by_residual(2 * self.size)
            self.grow(self._choice.prefix_rows(self.run.rank + 1, len(self._points)))
            most = self.size // self._choice.per_pivot
            most = self._limit if self.full else min(self._limit, most)
            self.exhausted = not self.run.greedy(most)
            self.run.tell(self._on_pivot)
        return self.run
