"""Pivots chosen by what they take from the residual trace, not by their own residual.

With K' the residual kernel matrix, pivot p takes |K'_p|^2 / K'_pp from its trace. Greedy pivoting
(joint paper, Algorithm 1) looks at K'_pp alone, and so takes rows that stand alone: in tails and
corners, where they tell of few others. At coarse tolerances a choice by the whole gain ends with
fewer pivots (A. K. Farahat, A. Ghodsi, M. S. Kamel, A novel greedy algorithm for Nystrom
approximation, AISTATS 2011). Here the norms |K'_p| are those of a sketch, in one product with K.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import numpy as np

from cme_dask.kernels import blas
from cme_dask.numerics.cholesky import PivotedRows
from cme_dask.numerics.pools import TIE, eliminate

Array = Any

SKETCH = 64
"""Random signs for each row: norms are right within a sixth or so."""

_ROWS = 512  # and as many others, whose kernel values are held at once
_CANDIDATES = 256  # rows that a round chooses from
_WORTH = 0.3  # gain, in that of the best row outside, down to which a round goes on
_LEAST = 0.1  # residual, in the mean one, below which rows are no pivots: R stays well conditioned


class RowsByTrace(PivotedRows):
    """Pivots so far, each chosen since it takes most from the trace.

    A round chooses from candidates, the best one of each of 256 groups of rows, as long as what
    one takes is at least 0.3 of what the best row outside would have taken before the round.
    """

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

    def continued(self, points: Array, rows: Array, share: Array) -> "RowsByTrace":
        """The same pivots on more rows, of which these were the first."""
        more = RowsByTrace(self._pool.kernel, points, rows, share, self._threads)
        self._hand_over(more)
        more._subtract(0)
        return more

    def _of_kernel(self) -> Array:
        """Signs^T K, shape (SKETCH, n)."""
        points, blocks = self._pool.points, list(_blocks(len(self._pool.points)))

        def of_rows(here: slice) -> Array:
            products = np.zeros((SKETCH, here.stop - here.start))
            for there in blocks:
                values = np.empty((there.stop - there.start, here.stop - here.start))
                self._pool.kernel.sections(points[there])(points[here], values)
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
