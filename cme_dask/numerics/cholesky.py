"""Pivoted Cholesky decomposition of a kernel matrix that is never formed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any

TIE = 1e-10
"""Residuals within this fraction of the largest count as equal; the lowest row wins."""


BLOCK = 256
"""Pivots whose columns are allocated at once."""


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
    exhausted
        True if the residual fell to rounding before the tolerance was met: the rows span no more.
    """

    pivots: Array
    factor: Array
    residual_trace: Array
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
    on_pivot: Callable[[int, float], None] | None = None,
) -> CholeskyResult:
    """Greedy pivoted Cholesky (joint paper, Algorithm 1) on rows held in memory.

    Parameters
    ----------
    kernel
        Callable block ``kernel(X, Z)`` with ``diagonal(X)``.
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
        Called with the rank and the relative residual trace after each pivot.

    Notes
    -----
    O(n m) memory, O(n m^2) flops. A pivot whose residual is below ``8 eps (m + 1) max k(x, x)``
    is rounding noise, so rank-deficient input (duplicates, linear kernels) ends there.
    """
    n = points.shape[0]
    limit = n if max_rank is None else min(max_rank, n)
    if order is not None:
        limit = min(limit, len(order))
    rows = np.arange(n) if rows is None else np.asarray(rows)
    residual = np.array(kernel.diagonal(points), dtype=np.float64)
    share = np.ones(n) if weights is None else np.asarray(weights)
    trace, largest = share @ residual, residual.max(initial=0.0)
    blocks: list[Array] = []  # of L^T, so that one pivot is one contiguous row
    pivots: list[int] = []
    history = [1.0]
    queue = iter(()) if order is None else iter(order)
    exhausted = False
    while len(pivots) < limit and history[-1] > tol:
        m = len(pivots)
        floor = 8 * np.finfo(np.float64).eps * (m + 1) * largest
        if order is None:
            best = residual.max()
            tied = np.flatnonzero(residual >= best * (1 - TIE))
            pivot = int(tied[np.argmin(rows[tied])]) if best > floor else -1
        else:
            pivot = next((int(p) for p in queue if residual[p] > floor), -1)
        if pivot < 0:
            exhausted = True
            break
        if m == BLOCK * len(blocks):
            blocks.append(np.empty((min(BLOCK, limit - m), n)))
        column = np.array(kernel(points, points[pivot : pivot + 1])[:, 0], dtype=np.float64)
        for i, block in enumerate(blocks):
            filled = block[: m - i * BLOCK]
            column -= filled[:, pivot] @ filled
        column /= np.sqrt(residual[pivot])
        column[pivots] = 0.0
        column[pivot] = np.sqrt(residual[pivot])
        blocks[-1][m % BLOCK] = column
        residual = np.maximum(residual - column * column, 0.0)
        residual[pivot] = 0.0
        pivots.append(pivot)
        history.append(float(share @ residual / trace))
        if on_pivot is not None:
            on_pivot(len(pivots), history[-1])
    chosen = np.array(pivots, dtype=np.int64)
    rows_of_pivots = [block[:, chosen] for block in blocks] or [np.empty((0, 0))]
    factor = np.tril(np.concatenate(rows_of_pivots)[: len(pivots)].T)
    return CholeskyResult(chosen, factor, np.array(history), exhausted)
