"""BLAS routines of SciPy that add in place, called without the interpreter lock.

``A @ B`` of NumPy can't add to what is there: sums of products then cost a second array as large
as the sum, which at a width of 800 leaves the cache, and one more walk through both. The routines
of :mod:`scipy.linalg.blas` can, but hold the lock, so two threads run as fast as one. SciPy offers
the same routines to Cython by address (:mod:`scipy.linalg.cython_blas`); ctypes gives the lock up.

All matrices are NumPy arrays in C order, of float64, with rows that may lie apart. BLAS counts
columns first and sees their transposes; the comments name what it sees.
"""

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.linalg import cython_blas

Array = Any


def _routine(name: str, arguments: int) -> Any:
    """The Fortran subroutine at the address that SciPy gives to Cython; takes pointers only."""
    capsule = cython_blas.__pyx_capi__[name]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    address_of = ctypes.pythonapi.PyCapsule_GetPointer
    address_of.restype = ctypes.c_void_p
    address_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)
    return kind(address_of(capsule, name_of(capsule)))


_dgemm, _dsyrk, _dtrmm = _routine("dgemm", 13), _routine("dsyrk", 10), _routine("dtrmm", 11)
_N, _T, _RIGHT, _UPPER, _LOWER = map(ctypes.c_char_p, (b"N", b"T", b"R", b"U", b"L"))


@lru_cache(maxsize=1024)
def _int(value: int) -> Any:
    return ctypes.byref(ctypes.c_int(value))


def _float(value: float) -> Any:
    return ctypes.byref(ctypes.c_double(value))


_ONE, _MINUS_ONE = _float(1.0), _float(-1.0)


def _matrix(a: Array) -> tuple[int, Any]:
    """Address and distance between the rows, after the checks that BLAS doesn't make."""
    rows, columns = a.shape
    apart, step = a.strides
    if rows <= 1 or columns == 0:  # NumPy gives such strides no meaning
        apart = columns * a.itemsize
    if columns <= 1 or rows == 0:
        step = a.itemsize
    if a.dtype != np.float64 or step != a.itemsize or apart % step or apart < columns * step:
        raise ValueError(f"rows of float64 expected, got {a.dtype} with strides {a.strides}")
    return a.__array_interface__["data"][0], _int(max(apart // step, 1))


def add_gram(out: Array, rows: Array) -> None:
    """Upper triangle of ``out += rows @ rows.T``, shapes (m, m) and (m, n)."""
    m, n = rows.shape
    (c, ldc), (a, lda) = _matrix(out), _matrix(rows)
    if out.shape != (m, m):
        raise ValueError(f"a sum of shape {(m, m)} expected, got {out.shape}")
    # The lower triangle of C^T += A A^T, with A^T the rows as BLAS sees them.
    _dsyrk(_LOWER, _T, _int(m), _int(n), _ONE, a, lda, _ONE, c, ldc)


def subtract_product(out: Array, left: Array, right: Array) -> None:
    """``out -= left @ right``, shapes (m, n), (m, k) and (k, n)."""
    (m, k), n = left.shape, right.shape[1]
    (c, ldc), (a, lda), (b, ldb) = _matrix(out), _matrix(left), _matrix(right)
    if out.shape != (m, n) or right.shape[0] != k:
        raise ValueError(f"shapes {out.shape}, {left.shape}, {right.shape} don't multiply")
    # C^T -= B^T A^T.
    _dgemm(_N, _N, _int(n), _int(m), _int(k), _MINUS_ONE, b, ldb, a, lda, _ONE, c, ldc)


def lower_product(matrix: Array, out: Array) -> None:
    """``out[...] = matrix @ out`` with lower-triangular ``matrix``, shapes (m, m) and (m, n)."""
    m, n = out.shape
    (b, ldb), (a, lda) = _matrix(out), _matrix(matrix)
    if matrix.shape != (m, m):
        raise ValueError(f"a triangle of shape {(m, m)} expected, got {matrix.shape}")
    # B^T <- B^T A^T, and A^T is an upper triangle.
    _dtrmm(_RIGHT, _UPPER, _N, _N, _int(n), _int(m), _ONE, a, lda, b, ldb)
