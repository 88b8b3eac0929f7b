"""Factors of matrices by LAPACK: Cholesky's, without the interpreter lock, and singular vectors.

The routines of scipy.linalg hold the lock as long as they compute, so that two threads that factor
matrices take as long as one. Those for Cholesky factors are the same routines, called without it,
see :mod:`cme_dask.kernels.evaluator`.

Right-hand sides are rows, since LAPACK counts columns first: it sees the lower triangle of a matrix
in C order as the upper one. The requirements on matrices are those of the routines there.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from scipy.linalg import LinAlgError, cython_lapack
from scipy.linalg import svd as scipy_svd

from cme_dask.kernels.evaluator import (
    LEFT,
    LOWER_ROWS,
    ONE,
    PLAIN,
    TRANSPOSED,
    as_double,
    as_int,
    blas_matrix,
    blas_routine,
)

Array = Any

_dtrsm = blas_routine("dtrsm", 11)
_dpotrf = blas_routine("dpotrf", 5, cython_lapack)
_dpotrs = blas_routine("dpotrs", 8, cython_lapack)
_dpstrf = blas_routine("dpstrf", 9, cython_lapack)


@dataclass(frozen=True, eq=False)
class CholeskyFactor:
    """L of a symmetric positive definite matrix A = L L^T.

    Attributes
    ----------
    lower
        L, shape (m, m); above the diagonal it holds other numbers.
    """

    lower: Array

    @classmethod
    def of(cls, matrix: Array, reg: float | Array = 0.0) -> Self:
        """Factor A + diag(reg), of a matrix A of which the lower triangle counts.

        Raises
        ------
        LinAlgError
            If it is not positive definite as computed.
        """
        lower = np.array(matrix, dtype=np.float64, order="C")
        lower[np.diag_indices(len(lower))] += reg
        (a, lda), info = blas_matrix(lower), ctypes.c_int(0)
        _dpotrf(LOWER_ROWS, as_int(len(lower)), a, lda, ctypes.byref(info))
        if info.value:
            raise LinAlgError("the matrix is not positive definite")
        return cls(lower)

    def solve(self, rows: Array) -> Array:
        """Return ``rows @ A^-1``, shape (k, m)."""
        solved = np.array(rows, dtype=np.float64, order="C")
        k, m = _rows_of(solved, self.lower)
        (a, lda), (b, ldb), info = blas_matrix(self.lower), blas_matrix(solved), ctypes.c_int(0)
        _dpotrs(LOWER_ROWS, as_int(m), as_int(k), a, lda, b, ldb, ctypes.byref(info))
        return solved

    def inverse_at(self, rows: slice) -> Array:
        """Return the block of A^-1 of some rows that follow one another, shape (k, k)."""
        first, last, _ = rows.indices(len(self.lower))
        # L^-1 has zeros above its diagonal.
        unit = np.eye(last - first, len(self.lower) - first)
        solved = solve_lower(self.lower[first:, first:], unit)
        return np.asarray(solved @ solved.T)


def solve_lower(lower: Array, rows: Array, *, transposed: bool = True) -> Array:
    """Return ``rows @ L^-T`` of a triangular L, shape (k, m), or ``rows @ L^-1``.

    It is NaN if the diagonal of L has zeros.
    """
    solved = np.array(rows, dtype=np.float64, order="C")
    k, m = _rows_of(solved, lower)
    (a, lda), (b, ldb) = blas_matrix(lower), blas_matrix(solved)
    way = TRANSPOSED if transposed else PLAIN
    _dtrsm(LEFT, LOWER_ROWS, way, PLAIN, as_int(m), as_int(k), ONE, a, lda, b, ldb)
    return solved


def pivoted_factor(matrix: Array, tol: float) -> tuple[Array, Array]:
    """The Cholesky factor with complete pivoting of a positive semidefinite matrix.

    Parameters
    ----------
    matrix
        A, shape (n, n).
    tol
        The largest entry left on the diagonal at which the factorisation ends.

    Returns
    -------
    factor, order
        L, shape (n, r), and the order of the rows, shape (n,): A[order][:, order] is near L L^T.
    """
    lower = np.array(matrix, dtype=np.float64, order="C")
    n = len(lower)
    order, work = np.empty(n, dtype=np.intc), np.empty(max(2 * n, 1))
    (a, lda), rank, info = blas_matrix(lower), ctypes.c_int(0), ctypes.c_int(0)
    _dpstrf(
        LOWER_ROWS,
        as_int(n),
        a,
        lda,
        order.ctypes.data,
        ctypes.byref(rank),
        as_double(tol),
        work.ctypes.data,
        ctypes.byref(info),
    )
    return np.tril(lower[:, : rank.value]), order.astype(np.intp) - 1


def singular_vectors(matrix: Array, *, full_matrices: bool = False) -> tuple[Array, Array, Array]:
    """U, s and V^T of a matrix U diag(s) V^T, as of ``numpy.linalg.svd``.

    The fast method (``gesdd``) converges for nearly all matrices; where it does not, QR iterations
    do (``gesvd``).
    """
    try:
        return np.linalg.svd(matrix, full_matrices=full_matrices)
    except LinAlgError:
        u, s, vt = scipy_svd(matrix, full_matrices=full_matrices, lapack_driver="gesvd")
        return u, s, vt


def _rows_of(rows: Array, matrix: Array) -> tuple[int, int]:
    k, m = rows.shape
    if matrix.shape != (m, m):
        raise ValueError(f"rows of {len(matrix)} columns expected, got shape {rows.shape}")
    return k, m
