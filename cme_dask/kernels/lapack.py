"""Factors of matrices by LAPACK: Cholesky's, tridiagonal forms, and singular vectors.

The routines of scipy.linalg hold the interpreter lock as long as they compute, so that two threads
that factor matrices take as long as one. Those for Cholesky factors and tridiagonal forms are the
same routines, called without it, see :mod:`cme_dask.kernels.evaluator`.

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
_dsytrd = blas_routine("dsytrd", 10, cython_lapack)
_dormtr = blas_routine("dormtr", 13, cython_lapack)
_dpttrf = blas_routine("dpttrf", 4, cython_lapack)
_dpttrs = blas_routine("dpttrs", 7, cython_lapack)

_BLOCK = 64  # rows of work of a routine, for each column of its matrix


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


@dataclass(frozen=True, eq=False)
class TridiagonalForm:
    """Q and T of a symmetric matrix A = Q T Q^T, with Q orthogonal and T tridiagonal.

    Of many systems with A + reg each one takes as long as a few products by a vector. An
    eigenbasis, which does the same, takes three times as long to make.

    Attributes
    ----------
    reflectors, scales
        Householder reflections, the product of which is Q, shapes (m, m) and (m - 1,).
    diagonal, beside
        Of T, shapes (m,) and (m - 1,).
    """

    reflectors: Array
    scales: Array
    diagonal: Array
    beside: Array

    @classmethod
    def of(cls, matrix: Array) -> Self:
        """That of a matrix of which the lower triangle counts."""
        reflectors = np.array(matrix, dtype=np.float64, order="C")
        m = len(reflectors)
        scales, diagonal, beside = np.empty(max(m - 1, 0)), np.empty(m), np.empty(max(m - 1, 0))
        (a, lda), info = blas_matrix(reflectors), ctypes.c_int(0)
        work = np.empty(_BLOCK * max(m, 1))
        _dsytrd(
            LOWER_ROWS,
            as_int(m),
            a,
            lda,
            diagonal.ctypes.data,
            beside.ctypes.data,
            scales.ctypes.data,
            work.ctypes.data,
            as_int(len(work)),
            ctypes.byref(info),
        )
        return cls(reflectors, scales, diagonal, beside)

    def rotated(self, rows: Array, *, back: bool = False) -> Array:
        """Return ``rows @ Q``, shape (k, m), or ``rows @ Q^T``."""
        result = np.array(rows, dtype=np.float64, order="C")
        k, m = _rows_of(result, self.reflectors)
        (a, lda), (c, ldc) = blas_matrix(self.reflectors), blas_matrix(result)
        info, work = ctypes.c_int(0), np.empty(_BLOCK * max(k, 1))
        _dormtr(
            LEFT,
            LOWER_ROWS,
            PLAIN if back else TRANSPOSED,
            as_int(m),
            as_int(k),
            a,
            lda,
            self.scales.ctypes.data,
            c,
            ldc,
            work.ctypes.data,
            as_int(len(work)),
            ctypes.byref(info),
        )
        return result

    def solve_rotated(self, rows: Array, reg: float) -> Array:
        """Return ``rows @ (T + reg)^-1``, shape (k, m).

        Raises
        ------
        LinAlgError
            If T + reg is not positive definite as computed.
        """
        solved = np.array(rows, dtype=np.float64, order="C")
        k, m = _rows_of(solved, self.reflectors)
        (b, ldb), info = blas_matrix(solved), ctypes.c_int(0)
        d, e = self.diagonal + reg, self.beside.copy()
        _dpttrf(as_int(m), d.ctypes.data, e.ctypes.data, ctypes.byref(info))
        if info.value or not np.isfinite(d).all():
            raise LinAlgError("the matrix is not positive definite")
        _dpttrs(as_int(m), as_int(k), d.ctypes.data, e.ctypes.data, b, ldb, ctypes.byref(info))
        return solved


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
