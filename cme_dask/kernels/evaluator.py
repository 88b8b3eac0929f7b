"""Kernel blocks written into memory that is given, block by block.

Array functions that write into memory that is given: the one file that knows where that is so.

Fresh memory costs page faults, several times the arithmetic of a kernel block. The array API
standard has no ``out=``, NumPy and CuPy have: there results are written in place, elsewhere they
are computed and copied.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_cupy_array, is_numpy_array

from cme_dask.kernels import blas

# Array functions that write into memory that is given: the one file that knows where that is so


Array = Any


def into(xp: Any, out: Array, function: str, *arguments: Any) -> None:
    """``out[...] = xp.function(*arguments)``, without other memory where the library can."""
    # Most are NumPy's, and questions take the interpreter lock, for which threads wait.
    if type(out) is np.ndarray or is_numpy_array(out) or is_cupy_array(out):
        getattr(xp, function)(*arguments, out=out)
    else:
        out[...] = getattr(xp, function)(*arguments)


def clip_above(xp: Any, out: Array, bound: float) -> None:
    """``out[...] = minimum(out, bound)``; on a CPU, to look costs a fifth of writing."""
    if not is_numpy_array(out) or np.maximum.reduce(out, axis=None, initial=bound) > bound:
        into(xp, out, "minimum", out, bound)


def to_numpy(array: Array) -> Array:
    """The array in the memory of the process."""
    return array.get() if is_cupy_array(array) else np.asarray(array)


def cast_into(xp: Any, out: Array, values: Array) -> None:
    """``out[...] = values`` in the type of ``out``."""
    if is_numpy_array(out) or is_cupy_array(out):
        out[...] = values
    else:
        out[...] = xp.astype(values, out.dtype)


def add_flags(xp: Any, out: Array, flags: Array) -> None:
    """``out[...] += flags``, which are true or false."""
    if is_numpy_array(out) or is_cupy_array(out):
        xp.add(out, flags, out=out)
    else:
        out[...] = out + xp.astype(flags, out.dtype)


def take_into(xp: Any, out: Array, rows: Array, which: Array) -> None:
    """``out[...] = rows[which, ...]``, for numbers that are there: NumPy does not look."""
    if is_numpy_array(out):
        np.take(rows, which, axis=0, out=out, mode="clip")  # "raise" would go through a buffer
    else:
        out[...] = xp.take(rows, which, axis=0)


def put_columns(out: Array, which: list[int], values: Array) -> None:
    """``out[:, which] = values``, for columns of a matrix in these positions."""
    if is_numpy_array(out) or is_cupy_array(out):
        out[:, which] = values
    else:
        for j, position in enumerate(which):
            out[:, position] = values[:, j]


def subtract_product(xp: Any, out: Array, left: Array, right: Array, scratch: "Scratch") -> None:
    """``out[...] -= left @ right``."""
    if is_numpy_array(out):
        blas.subtract_product(out, left, right)
    else:
        part = scratch.like(xp, out)
        into(xp, part, "matmul", left, right)
        into(xp, out, "subtract", out, part)


def lower_product(xp: Any, matrix: Array, out: Array, scratch: "Scratch") -> None:
    """``out[...] = matrix @ out`` with a lower-triangular matrix."""
    if is_numpy_array(out):
        blas.lower_product(matrix, out)
    else:
        part = scratch.like(xp, out)
        into(xp, part, "matmul", matrix, out)
        out[...] = part


def rank_update(xp: Any, out: Array, rows: Array) -> None:
    """``out[...] = rows @ rows.T``, at the cost of one half of it.

    NumPy sees that both factors are one array and calls its BLAS's ``syrk``, without the
    interpreter lock; CuPy must be told.
    """
    if is_cupy_array(out):
        from cupy import cublas

        # BLAS counts columns first, so a C-ordered matrix is its transpose there.
        cublas.syrk("N", rows, out=out, alpha=1.0, beta=0.0, lower=True)
        lower = xp.tril(out)
        out[...] = lower + xp.tril(out, k=-1).T
    else:
        into(xp, out, "matmul", rows, rows.T)


def add_rank_update(xp: Any, out: Array, rows: Array, scratch: "Scratch") -> None:
    """Upper triangle of ``out += rows @ rows.T``; ``out`` is in the memory of the process."""
    if is_numpy_array(rows):
        blas.add_gram(out, rows)
    else:
        product = scratch.shaped(xp, out.shape, rows)
        rank_update(xp, product, rows)
        out += to_numpy(product)


def mirror_upper(out: Array) -> None:
    """Copy the upper triangle of a square NumPy matrix to the lower one."""
    for i in range(1, len(out)):
        out[i, :i] = out[:i, i]


class Scratch:
    """Memory for results on the way, kept from call to call."""

    def __init__(self) -> None:
        self._held: Array = None

    def like(self, xp: Any, out: Array) -> Array:
        """An array of the shape, type and place of ``out``; its values are anything."""
        return self.shaped(xp, out.shape, out)

    def shaped(self, xp: Any, shape: tuple[int, ...], like: Array) -> Array:
        """An array of this shape, of the type and place of ``like``."""
        size = math.prod(shape)
        held = self._held
        if held is None or held.shape[0] < size or held.dtype != like.dtype:
            held = self._held = xp.empty(size, dtype=like.dtype, device=device(like))
        return xp.reshape(held[:size], shape)


# Functions of rows that write block by block into memory that is given


Write = Callable[[slice, Array], None]

_ROWS = 1024  # whose functions stay in cache


@dataclass(frozen=True, eq=False)
class Sections:
    """Functions k(., z_j), j = 1..m, or others, prepared for many rows; one per thread.

    Parameters
    ----------
    prepare
        ``prepare(X)`` of rows X, shape (n, d), does what is cheaper once for many rows than for
        each block of them, and holds some copies of these. It returns ``write(here, out)``, good
        until the next call, which writes the functions at the rows ``X[here]`` to ``out``, shape
        (m, b): a function a row, so that several functions next to each other are contiguous.
    """

    prepare: Callable[[Array], Write]

    def __call__(self, X: Array, out: Array) -> None:
        """Write the functions at all rows X, shape (n, d), to ``out``, shape (m, n)."""
        self.prepare(X)(slice(0, X.shape[0]), out)

    def values(self, X: Array, count: int) -> Array:
        """Values of so many functions at the rows X, shapes (n, d) and (n, m), in float64."""
        xp, n = array_namespace(X), X.shape[0]
        found = xp.empty((count, n), dtype=xp.float64, device=device(X))
        for start in range(0, n, _ROWS):
            here = slice(start, min(start + _ROWS, n))
            self(X[here, :], found[:, here])
        return found.T

    @classmethod
    def of_blocks(cls, write: Callable[[Array, Array], None]) -> "Sections":
        """Functions of which nothing is known but ``write(X, out)``."""
        return cls(lambda X: lambda here, out: write(X[here, :], out))

    def then(self, work: Callable[[Array], None]) -> "Sections":
        """These functions, and ``work(out)`` on each block of them."""

        def prepare(X: Array) -> Write:
            write = self.prepare(X)

            def write_more(here: slice, out: Array) -> None:
                write(here, out)
                work(out)

            return write_more

        return Sections(prepare)

    def after(self, map_rows: Callable[[Array], Array]) -> "Sections":
        """These functions of mapped rows, x -> k(t(x), z_j)."""
        return Sections(lambda X: self.prepare(map_rows(X)))
