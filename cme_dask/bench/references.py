"""Randomly pivoted Cholesky, plain and accelerated, written from the paper in plain NumPy.

Epperly, Tropp, Webber, "Embrace rejection: kernel matrix approximation by accelerated randomly
pivoted Cholesky" (2024). Both keep the factor F of K ~ F^T F, of shape (k, n), in memory.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular

Array = Any
Kernel = Callable[[Array, Array], Array]


def random_cholesky(
    kernel: Kernel, points: Array, rank: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """RPCholesky: each pivot is drawn in proportion to the residual diagonal.

    Parameters
    ----------
    kernel
        Block k(X, Z) with k(x, x) = 1.
    points
        Rows, shape (n, d).
    rank
        Number of pivots k.
    rng
        Source of the draws.

    Returns
    -------
    pivots : (k,) integers
    factor : (k, n) array F with K ~ F^T F
    """
    n = len(points)
    factor, residual = np.empty((rank, n)), np.ones(n)
    pivots = np.empty(rank, dtype=np.int64)
    for i in range(rank):
        pivot = _draws(residual, 1, rng)[0]
        row = kernel(points, points[pivot : pivot + 1])[:, 0]
        row -= factor[:i, pivot] @ factor[:i]
        row /= np.sqrt(row[pivot])
        factor[i], pivots[i] = row, pivot
        residual = np.maximum(residual - row * row, 0.0)
        residual[pivot] = 0.0
    return pivots, factor


def accelerated_cholesky(
    kernel: Kernel, points: Array, rank: int, rng: np.random.Generator, block: int | None = None
) -> tuple[Array, Array]:
    """Accelerated RPCholesky: proposals in blocks, accepted with the law of RPCholesky.

    Parameters
    ----------
    kernel, points, rank, rng
        As in :func:`random_cholesky`.
    block
        Proposals per round; default a tenth of the rank.

    Returns
    -------
    pivots, factor
        As in :func:`random_cholesky`.
    """
    n = len(points)
    block = max(1, rank // 10) if block is None else block
    factor, residual = np.empty((rank, n)), np.ones(n)
    pivots = np.empty(0, dtype=np.int64)
    while (m := len(pivots)) < rank:
        proposals = _draws(residual, block, rng)
        at = points[proposals]
        gram = kernel(at, at) - factor[:m, proposals].T @ factor[:m, proposals]
        accepted, root = reject(gram, rank - m, rng)
        new = proposals[accepted]
        rows = kernel(points[new], points) - factor[:m, new].T @ factor[:m]
        added = factor[m : m + len(new)]
        added[:] = solve_triangular(root, rows, lower=True)
        residual = np.maximum(residual - np.einsum("ij,ij->j", added, added), 0.0)
        residual[new] = 0.0
        pivots = np.concatenate([pivots, new])
    return pivots, factor


def reject(gram: Array, most: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Accept each proposal with probability (residual now) / (residual when it was proposed).

    Parameters
    ----------
    gram
        Residual kernel matrix of the proposals, shape (b, b).
    most
        Largest number to accept.
    rng
        Source of the draws.

    Returns
    -------
    accepted : positions, shape (a,)
    root : Cholesky factor of their residual matrix, lower-triangular, shape (a, a)
    """
    left, bound = gram.copy(), np.diag(gram).copy()
    columns: list[Array] = []
    accepted: list[int] = []
    for i, chance in enumerate(rng.uniform(size=len(gram)) * bound):
        if chance < left[i, i] and len(accepted) < most:
            column = left[:, i] / np.sqrt(left[i, i])
            left -= np.outer(column, column)
            columns.append(column)
            accepted.append(i)
    root = np.tril(np.array(columns).T[accepted]) if accepted else np.empty((0, 0))
    return np.array(accepted, dtype=np.int64), root


def _draws(residual: Array, count: int, rng: np.random.Generator) -> Array:
    """Independent draws in proportion to the residual diagonal."""
    sums = np.cumsum(residual)
    found = np.searchsorted(sums, sums[-1] * rng.uniform(size=count), side="right")
    return np.minimum(found, len(residual) - 1)
