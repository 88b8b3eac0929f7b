"""The bare pass: what one pass over the rows costs in plain NumPy threads, by definition.

The same pivots, the Newton bases of all variables, S = sum_i N_i N_i^T over their concatenation
(so S_XX, S_YY and S_YX), the solve first, reads included. No Dask, no folds, no functions, no
guards: what a fit takes beyond it is what the library adds.

Blocks are transposed, functions in rows and data in columns: K^T and N^T of shape (m, b). Each
thread keeps its buffers, and everything but loops over blocks is a matrix product or a ufunc that
releases the interpreter lock.
"""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular
from threadpoolctl import threadpool_limits

Array = Any
Read = Callable[[int, int], tuple[Array, ...]]

_BLOCK = 768  # rows of the data: the best of 512 to 2,048 at ranks 100 to 800
_SOLVE = 48  # functions per step of the solve, likewise
_RUN_ROWS = 1 << 16


@dataclass(frozen=True, eq=False)
class BareBasis:
    """Gaussian Newton basis N(z) = R^-1 k(p, z) on given pivots.

    Parameters
    ----------
    points
        Pivots p, shape (m, d).
    factor
        R with K(p, p) = R R^T, lower-triangular, shape (m, m).
    length_scale
        l of k(x, z) = exp(-|x - z|^2 / (2 l^2)).
    """

    points: Array
    factor: Array
    length_scale: float

    @property
    def rank(self) -> int:
        """Number of pivots m."""
        return len(self.points)

    @cached_property
    def inverse(self) -> Array:
        """R^-1: its rows, cut at the diagonal, turn the solve into matrix products."""
        return solve_triangular(self.factor, np.eye(self.rank), lower=True)

    @cached_property
    def centre(self) -> Array:
        """Mean of the pivots: squared distances cancel less about it."""
        return self.points.mean(axis=0)

    @cached_property
    def right(self) -> Array:
        """Rows [v, 1, -|v|^2 / 2] of the scaled pivots v, shape (m, d + 2)."""
        v = (self.points - self.centre) / self.length_scale
        return np.column_stack([v, np.ones(len(v)), -0.5 * (v * v).sum(axis=1)])


def bare_pass(
    bases: Sequence[BareBasis],
    read: Read,
    n: int,
    *,
    threads: int,
    run_rows: int = _RUN_ROWS,
) -> Array:
    """S = sum_i N_i N_i^T with N_i = [N_X(x_i), N_Y(y_i), ...], shape (M, M), M = sum of ranks.

    Parameters
    ----------
    bases
        A basis per variable.
    read
        ``read(start, stop)`` gives the rows of each variable, shapes (stop - start, d).
    n
        Number of rows.
    threads
        Threads, each with one BLAS thread.
    run_rows
        Rows that a thread reads at once; storage chunks should divide it.
    """
    starts: queue.SimpleQueue[int] = queue.SimpleQueue()
    for start in range(0, n, run_rows):
        starts.put(start)

    def work(_: int) -> Array:
        sums = _Sums(bases)
        while True:
            try:
                start = starts.get_nowait()
            except queue.Empty:
                return sums.gram
            sums.add(read(start, min(start + run_rows, n)))

    with threadpool_limits(1), ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


def bare_flops(n: int, ranks: Sequence[int]) -> float:
    """Flops that the bare pass is credited with: sum of n m^2 (solves) and n M^2 (update).

    2 n m^2 for one basis; kernels are not counted.
    """
    return float(n) * (sum(m * m for m in ranks) + sum(ranks) ** 2)


class _Sums:
    """Buffers and partial sums of one thread."""

    def __init__(self, bases: Sequence[BareBasis]) -> None:
        self._bases = bases
        width = sum(basis.rank for basis in bases)
        self._newton = np.empty((width, _BLOCK))
        self._kernel = np.empty((max(basis.rank for basis in bases), _BLOCK))
        self._left = [np.ones((basis.right.shape[1], _BLOCK)) for basis in bases]
        self._product = np.empty((width, width))
        self.gram = np.zeros((width, width))

    def add(self, parts: tuple[Array, ...]) -> None:
        """Add the rows of each variable, block by block."""
        for start in range(0, len(parts[0]), _BLOCK):
            self._block(tuple(part[start : start + _BLOCK] for part in parts))

    def _block(self, parts: tuple[Array, ...]) -> None:
        b, first = len(parts[0]), 0
        for basis, left, rows in zip(self._bases, self._left, parts, strict=True):
            u = left[:-2, :b]
            np.subtract(rows.T, basis.centre[:, None], out=u)
            u /= basis.length_scale
            np.einsum("ij,ij->j", u, u, out=left[-2, :b])
            left[-2, :b] *= -0.5
            kernel = self._kernel[: basis.rank, :b]
            np.matmul(basis.right, left[:, :b], out=kernel)
            np.exp(kernel, out=kernel)
            newton = self._newton[first : first + basis.rank, :b]
            for s in range(0, basis.rank, _SOLVE):
                e = min(s + _SOLVE, basis.rank)
                np.matmul(basis.inverse[s:e, :e], kernel[:e], out=newton[s:e])
            first += basis.rank
        newton = self._newton[:, :b]
        np.matmul(newton, newton.T, out=self._product)
        self.gram += self._product
