"""Pivots from a random sample of the rows, enough for the table that it was drawn from."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import numpy as np

from cme_dask.numerics.cholesky import CholeskyResult, OnPivot, PivotedRows, TracedRows

Array = Any

_ROWS_PER_PIVOT = 16
_MIN_PREFIX = 1 << 12
_GAP = 2.0  # traces on other rows and on those chosen from, beyond which more rows are needed


def prefix_rows(rank: int, size: int) -> int:
    """Rows of ``size`` from which pivot number ``rank`` is chosen, a power of two.

    16 rows for each pivot, at least 4,096: more cost time, and a greedy choice from more rows takes
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
    threads: Executor | None = None,
) -> CholeskyResult:
    """Greedy pivots on a random sample, enough for the table that it was drawn from.

    Pivots are chosen from a prefix of the sample, which grows with the rank. On these rows the
    residual trace is too small, since the pivots are some of them; so it is measured on others,
    and there it must be below ``tol`` by two standard errors, and by more if pivots are few.

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
    chosen = _Growing(kernel, points, rows, weights_of, limit, on_pivot, threads)
    if check is None:
        chosen.until(tol)
        chosen.grow(len(points))
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
            chosen.grow(2 * chosen.size)
            target = tol
        else:
            target = 0.9 * run.history[-1] * tol / bounds[-1]


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
        threads: Executor | None,
    ) -> None:
        self._points, self._rows, self._weights_of = points, rows, weights_of
        self._limit, self._on_pivot = limit, on_pivot
        self.size, self.exhausted = prefix_rows(0, len(points)), False
        first = slice(self.size)
        weights = weights_of(self.size)
        self.run = PivotedRows(kernel, points[first], rows[first], weights, threads)

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

    def until(self, target: float) -> PivotedRows:
        """Choose until the trace over the prefix is at most ``target``, or the choice ends."""
        while self.run.history[-1] > target and not self.ended:
            self.grow(
                2 * self.size
                if self.exhausted
                else prefix_rows(self.run.rank + 1, len(self._points))
            )
            most = self._limit if self.full else min(self._limit, self.size // _ROWS_PER_PIVOT)
            self.exhausted = not self.run.greedy(most)
            self.run.tell(self._on_pivot)
        return self.run
