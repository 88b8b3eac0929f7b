"""Kernel blocks, written into given memory block by block and solved for on the way.

Fresh memory costs page faults, several times the arithmetic of a kernel block. The array API
standard has no ``out=``, NumPy and CuPy have: this file alone knows which library can do what, and
calls BLAS routines that add in place. It also limits the threads of BLAS, and its own.
"""

import contextlib
import ctypes
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import lru_cache
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from array_api_compat import array_namespace, device, is_cupy_array, is_numpy_array, to_device
from scipy.linalg import cython_blas
from threadpoolctl import OpenBLASController, get_cached_controller, threadpool_limits

from cme_dask.errors import DataError

# Array functions that write into memory that is given


Array = Any


class _Copying:
    """A namespace whose functions take ``out=``, for libraries whose own do not."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._xp, name)

        def call(*arguments: Any, out: Array) -> None:
            out[...] = function(*arguments)

        return call


def in_place(like: Array) -> Any:
    """The namespace of an array, whose functions also take ``out=``."""
    xp = array_namespace(like)
    return xp if is_numpy_array(like) or is_cupy_array(like) else _Copying(xp)


def to_numpy(array: Array) -> Array:
    """The array in the memory of the process."""
    if is_numpy_array(array):
        return array
    if is_cupy_array(array):
        return array.get()
    info = getattr(array_namespace(array), "__array_namespace_info__", None)
    host = device(array) if info is None else info().default_device()
    return np.asarray(array if device(array) == host else to_device(array, host))


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


def rank_update(out: Array, rows: Array) -> None:
    """Upper triangle of ``out[...] = rows @ rows.T``, at the cost of one half of it.

    NumPy sees that both factors are one array and calls its BLAS's ``syrk``, without the
    interpreter lock; CuPy needs an explicit call, which leaves the lower triangle as it is.
    """
    if is_cupy_array(out):
        from cupy import cublas

        cublas.syrk("N", rows, out=out, alpha=1.0, beta=0.0, lower=False)
    else:
        in_place(out).matmul(rows, rows.T, out=out)


def add_rank_update(out: Array, rows: Array, product: Array) -> None:
    """Upper triangle of ``out += rows @ rows.T`` on a device; ``product`` is like ``out``.

    Each call of a GPU's library takes about as long to start as such a product takes: CuPy needs
    one, where the product itself is added to what is there.
    """
    if is_cupy_array(out):
        from cupy import cublas

        cublas.syrk("N", rows, out=out, alpha=1.0, beta=1.0, lower=False)
    else:
        rank_update(product, rows)
        out += product


def add_product(xp: Any, out: Array, product: Array) -> None:
    """``out += product``, of which ``product`` may be of lower precision."""
    if is_numpy_array(out) or is_cupy_array(out):
        out += product
    else:
        out += xp.astype(product, out.dtype)


_LEAST_EXPONENT = -350.0  # the square of exp(-350), 1e-304, is still a normal number
_LEAST = math.exp(_LEAST_EXPONENT)


def exponentiate(
    _: Any, ops: Any, out: Array, scratch: "Scratch | None" = None, log: bool = False
) -> None:
    """Turn exponents of at most 0, and rounding above, into ``exp(out) - 1e-152`` or 0, in place.

    Many processors take far longer for a product with a subnormal number (below 2e-308), or for
    one that is subnormal itself, as of two numbers below 1e-154. Of kernels whose length scale is
    short against the data, one value in eighty was subnormal, and a pass took eight times as long
    on an Intel processor. The subtraction changes no kernel of more than 1e-136.

    Arrays of other libraries keep smaller numbers. This is the method ``finish`` of kernels: with
    ``log`` the exponents themselves are the result.
    """
    if log:
        ops.minimum(out, 0.0, out=out)
    elif is_numpy_array(out):
        np.clip(out, _LEAST_EXPONENT, 0.0, out=out)
        np.exp(out, out=out)
        np.subtract(out, _LEAST, out=out)
    else:  # GPUs multiply all numbers alike, and each call takes time to start
        ops.minimum(out, 0.0, out=out)
        ops.exp(out, out=out)


def exponentials(xp: Any, exponents: Array) -> Array:
    """A new array of what :func:`exponentiate` gives, for exponents of at most 0."""
    return xp.exp(xp.maximum(exponents, _LEAST_EXPONENT)) - _LEAST


class Scratch:
    """Memory for results on the way, kept from call to call."""

    _held: Array = None

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


# BLAS routines of SciPy that add in place, called without the interpreter lock
#
# ``A @ B`` of NumPy can't add to what is there: sums of products then cost a second array as large
# as the sum, which at a width of 800 leaves the cache, and one more walk through both. The routines
# of scipy.linalg.blas can, but hold the lock, so two threads run as fast as one. SciPy offers the
# same routines to Cython by address (scipy.linalg.cython_blas); ctypes gives the lock up.
#
# All matrices are NumPy arrays in C order, of float64, with rows that may lie apart. BLAS counts
# columns first and sees their transposes; the comments name what it sees.


def blas_routine(name: str, arguments: int, library: Any = cython_blas) -> Any:
    """The Fortran subroutine at the address that SciPy gives to Cython; takes pointers only."""
    capsule = library.__pyx_capi__[name]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    address_of = ctypes.pythonapi.PyCapsule_GetPointer
    address_of.restype = ctypes.c_void_p
    address_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)
    return kind(address_of(capsule, name_of(capsule)))


_dgemm = blas_routine("dgemm", 13)
_dsyrk = blas_routine("dsyrk", 10)
_dtrmm = blas_routine("dtrmm", 11)
PLAIN, TRANSPOSED, LEFT, RIGHT = map(ctypes.c_char_p, (b"N", b"T", b"L", b"R"))
# The triangles as rows have them: BLAS sees their transposes.
UPPER_ROWS, LOWER_ROWS = map(ctypes.c_char_p, (b"L", b"U"))


@lru_cache(maxsize=1024)
def as_int(value: int) -> Any:
    """Return a pointer to an integer, as Fortran takes it."""
    return ctypes.byref(ctypes.c_int(value))


def as_double(value: float) -> Any:
    """Return a pointer to a float64."""
    return ctypes.byref(ctypes.c_double(value))


ONE, ZERO, _MINUS_ONE = as_double(1.0), as_double(0.0), as_double(-1.0)


def blas_matrix(a: Array) -> tuple[int, Any]:
    """Address and distance between the rows, after the checks that BLAS doesn't make."""
    rows, columns = a.shape
    apart, step = a.strides
    if rows <= 1 or columns == 0:  # NumPy gives such strides no meaning
        apart = columns * a.itemsize
    if columns <= 1 or rows == 0:
        step = a.itemsize
    if a.dtype != np.float64 or step != a.itemsize or apart % step or apart < columns * step:
        raise ValueError(f"rows of float64 expected, got {a.dtype} with strides {a.strides}")
    return a.__array_interface__["data"][0], as_int(max(apart // step, 1))


def add_gram(out: Array, rows: Array) -> None:
    """Upper triangle of ``out += rows @ rows.T``, shapes (m, m) and (m, n)."""
    m, n = rows.shape
    (c, ldc), (a, lda) = blas_matrix(out), blas_matrix(rows)
    if out.shape != (m, m):
        raise ValueError(f"a sum of shape {(m, m)} expected, got {out.shape}")
    # The lower triangle of C^T += A A^T, with A^T the rows as BLAS sees them.
    _dsyrk(UPPER_ROWS, TRANSPOSED, as_int(m), as_int(n), ONE, a, lda, ONE, c, ldc)


def subtract_product(out: Array, left: Array, right: Array) -> None:
    """``out -= left @ right``, shapes (m, n), (m, k) and (k, n)."""
    (m, k), n = left.shape, right.shape[1]
    (c, ldc), (a, lda), (b, ldb) = blas_matrix(out), blas_matrix(left), blas_matrix(right)
    if out.shape != (m, n) or right.shape[0] != k:
        raise ValueError(f"shapes {out.shape}, {left.shape}, {right.shape} don't multiply")
    # C^T -= B^T A^T.
    _dgemm(PLAIN, PLAIN, as_int(n), as_int(m), as_int(k), _MINUS_ONE, b, ldb, a, lda, ONE, c, ldc)


def lower_product(matrix: Array, out: Array) -> None:
    """``out[...] = matrix @ out`` with lower-triangular ``matrix``, shapes (m, m) and (m, n)."""
    m, n = out.shape
    (b, ldb), (a, lda) = blas_matrix(out), blas_matrix(matrix)
    if matrix.shape != (m, m):
        raise ValueError(f"a triangle of shape {(m, m)} expected, got {matrix.shape}")
    # B^T <- B^T A^T, and A^T is an upper triangle.
    _dtrmm(RIGHT, LOWER_ROWS, PLAIN, PLAIN, as_int(n), as_int(m), ONE, a, lda, b, ldb)


# One BLAS thread per worker thread, for as long as something runs
#
# The number of BLAS threads is a property of the process, and sums depend on it: so it is set once
# around everything that makes a fit's numbers, and given back when the last user has left. So is
# the time after which a thread must hand the interpreter over to one that waits for it. Threads
# that compute need it for microseconds between two calls that don't: Python's 5 ms are long then.

_SWITCH_SECONDS = 1e-3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_REUSED_BYTES = 4 << 20

_lock = threading.Lock()
_users = 0
_limits: Any = None
_switch = 0.0
PROCESS = uuid4().hex
"""Of this process and of none that it starts."""


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit this process; nested and concurrent uses share one limit.

    Any thread may set the limit, which is the process's: OpenBLAS otherwise obeys only the thread
    that has limited it first, while that one lives.
    """
    global _users, _limits, _switch
    with _lock:
        if _users == 0:
            OpenBLASController.clear_controlling_thread(force=True)
            # To look for the libraries takes 5 ms: they come with modules, and it is cached.
            _limits, _switch = get_cached_controller().limit(limits=1), sys.getswitchinterval()
            sys.setswitchinterval(min(_switch, _SWITCH_SECONDS))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                OpenBLASController.clear_controlling_thread(force=True)
                _limits.restore_original_limits()
                OpenBLASController.clear_controlling_thread(force=True)
                sys.setswitchinterval(_switch)


def blas_threads() -> int:
    """Threads that a matrix product would use now; 1 outside of the main thread.

    So tasks of Dask and threads of a server, which run beside others, do not start their own.
    """
    if threading.current_thread() is not threading.main_thread():
        return 1
    counts = (info["num_threads"] for info in get_cached_controller().info())
    return max(counts, default=1)


def limit_this_process() -> None:
    """Limit a worker process for good."""
    OpenBLASController.clear_controlling_thread(force=True)
    threadpool_limits(1)
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    reuse_memory()


def reuse_memory() -> None:
    """Let glibc reuse the memory of arrays of up to 4 MB: those of blocks, not those of strips.

    For processes of our own, workers and commands; it can't be undone. By itself glibc learns to
    reuse arrays of up to 32 MB. Strips are a few large ones, made by threads that come and go, and
    each thread's part of the heap would keep what it once held of them. Nannies of Dask set
    ``MALLOC_TRIM_THRESHOLD_``, which stops glibc from learning: then every array of more than
    128 kB is given back to the system when it goes, and its pages are zeroed when the next one
    comes, a large part of the time of a pass.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # not glibc
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_THRESHOLD, _REUSED_BYTES)
            mallopt(_M_TRIM_THRESHOLD, 2 * _REUSED_BYTES)


def release_memory() -> None:
    """Return memory that earlier steps of this process have freed to the system.

    glibc keeps the small arrays of a step, and what its threads held, for the next ones: hundreds
    of megabytes after a search and trials of trees, beside what a pass needs.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


# Threads side by side
#
# A fit runs up to as many as it has cores. Work that is not begun as a map, such as one search
# beside another, is counted as well: two searches that took all cores each would hand the
# interpreter from thread to thread at each of their many short calls, and be slower for it.

Item = TypeVar("Item")
Result = TypeVar("Result")

_working = 1  # the thread of the fit, and those that it has begun


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Count this thread, which another one has begun, among those that work."""
    with _counted(1):
        yield


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Do not count this thread while it waits for another one."""
    with _counted(-1):
        yield


@contextlib.contextmanager
def _counted(threads: int, most: int | None = None) -> Iterator[int]:
    """Count so many threads more, or as many as there may be; how many these are."""
    global _working
    with _lock:
        if most is not None:
            threads = max(min(threads, most - _working), 0)
        _working += threads
    try:
        yield threads
    finally:
        with _lock:
            _working -= threads


def parallel_map(
    function: Callable[[Item], Result], items: Sequence[Item], cores: int
) -> list[Result]:
    """``function`` of each item, in as many threads as others leave of so many cores."""
    if min(cores, len(items)) <= 1:
        return [function(item) for item in items]
    return list(parallel_each(function, items, cores))


def parallel_each(
    function: Callable[[Item], Result], items: Sequence[Item], cores: int
) -> Iterator[Result]:
    """As :func:`parallel_map`, one result after the other."""
    with _counted(min(cores, len(items)) - 1, cores) as others:
        if not others:  # the thread that asks
            yield from map(function, items)
            return
        contexts = [copy_context() for _ in items]  # such as the settings for floating-point errors
        with ThreadPoolExecutor(others + 1) as threads:
            yield from threads.map(lambda c, item: c.run(function, item), contexts, items)


QUERY_ROWS = 8192
"""Points per block of a query: memory does not grow with their number."""


def each_block(
    fill: Callable[[slice], None],
    n: int,
    rows: int | None = None,
    *,
    start: int = 0,
    threads: bool = True,
) -> None:
    """Call ``fill`` with each block of rows, in as many threads as a matrix product would use.

    Parameters
    ----------
    fill
        Takes the rows of a block. Several threads, with one thread of BLAS each, may call it at
        once, unless ``threads`` is False.
    n
        Number of rows.
    rows
        Of a block; default ``QUERY_ROWS``.
    start
        First row of the first block.
    """
    rows = QUERY_ROWS if rows is None else rows
    blocks = [slice(here, min(here + rows, n)) for here in range(start, n, rows)]
    cores = blas_threads() if threads and len(blocks) > 1 else 1
    if cores == 1:
        for block in blocks:
            fill(block)
        return
    with one_blas_thread():
        parallel_map(fill, blocks, cores)


@contextlib.contextmanager
def beside(work: Callable[[Callable[[], bool]], object]) -> Iterator[None]:
    """Work ahead in a thread while the block runs.

    Parameters
    ----------
    work
        Called with a function that is true from the end of the block on: what is not begun by then
        is left to whoever needs it.
    """
    over = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(copy_context().run, working()(work), over.is_set)
        try:
            yield
        finally:
            over.set()
            with waiting():
                wait([done])
        done.result()


# Kernel functions of rows, written block by block


Step = tuple[slice, slice | None, Array]
"""Target, source, matrix: take matrix @ source from the target, or apply it to the target."""

_ROWS = 1024  # whose functions stay in cache
_FEW = 1 << 15  # numbers whose temporaries need no fresh memory from the system


def in_cache(out: Array) -> list[slice]:
    """Slices of the rows of ``out``, each small enough that results on the way stay in cache."""
    m, n = out.shape
    step = max(_FEW // max(n, 1), 1) if is_numpy_array(out) else m
    return [slice(start, min(start + step, m)) for start in range(0, m, max(step, 1))]


class BlockEvaluator:
    """Functions k(., z_j), j = 1..m, written block by block into memory that is given.

    ``load(X)`` takes rows, shape (n, d), and does what is cheaper once for many rows than for each
    block of them. Then ``write(here, out)`` writes the functions at the rows ``X[here]`` to
    ``out``, shape (m, b): a function a row, so that several functions next to each other are
    contiguous. What depends on Z alone is computed once, and memory on the way is reused: use one
    evaluator per thread.

    This class evaluates the kernel's formula; kernels with a faster way derive from it and define
    ``_fill``, and ``load`` where rows are prepared.

    Parameters
    ----------
    kernel
        The kernel k.
    Z
        The points z_j, shape (m, d).
    log
        Whether the functions are log k(., z_j): without the underflow of a kernel far from z_j,
        -inf where k is zero.

    Attributes
    ----------
    steps
        Products with matrices on the device of Z, by which combinations of the functions are
        solved for; none at first.

    Raises
    ------
    DataError
        If the logarithm is requested and the kernel can be negative: at once for kernels that are
        known to be, for others when a value is.
    """

    def __init__(self, kernel: Any, Z: Array, *, log: bool = False) -> None:
        if log and kernel.signed:
            raise negative_values(kernel)
        self.kernel, self.points, self.log = kernel, Z, log
        self.xp, self.ops, self.scratch = array_namespace(Z), in_place(Z), Scratch()
        self.steps: Sequence[Step] = ()
        self._transform: Array | None = None
        self._in_process = is_numpy_array(Z)

    def load(self, X: Array) -> None:
        """Take the rows X, shape (n, d), until the next call."""
        self._rows = X

    def write(self, here: slice, out: Array) -> None:
        """Write the functions at the rows in this slice to ``out``, shape (m, b)."""
        self._fill(here, out)
        for target, source, matrix in self.steps:
            part = out[target, :]
            if not self._in_process:
                self._apply(part, None if source is None else out[source, :], matrix)
            elif source is None:
                lower_product(matrix, part)
            else:
                subtract_product(part, matrix, out[source, :])
        if self._transform is not None:
            values = self.scratch.like(self.xp, out)
            values[...] = out
            self.ops.matmul(self._transform, values, out=out)

    def __call__(self, X: Array, out: Array) -> None:
        """Write the functions at all rows X, shape (n, d), to ``out``, shape (m, n)."""
        self.load(X)
        self.write(slice(0, X.shape[0]), out)

    def values(self, X: Array) -> Array:
        """Return the functions at the rows X, shapes (n, d) and (n, m), in float64."""
        xp, n = array_namespace(X), X.shape[0]
        values = xp.empty((self.points.shape[0], n), dtype=xp.float64, device=device(X))
        for start in range(0, n, _ROWS):
            here = slice(start, min(start + _ROWS, n))
            self.load(X[here, :])
            self.write(slice(0, here.stop - start), values[:, here])
        return values.T

    def rotate(self, transform: Array) -> "BlockEvaluator":
        """Write ``transform @ out`` instead of what is solved for; ``transform`` is square."""
        self._transform = transform
        return self

    def _fill(self, here: slice, out: Array) -> None:
        X = self._rows[here, :]
        for few in in_cache(out):
            out[few, :] = self.kernel.formula(self.xp, X, self.points[few, :]).T
        if self.log:
            take_logarithms(self.kernel, self.xp, out)

    def _apply(self, part: Array, source: Array | None, matrix: Array) -> None:
        product = self.scratch.like(self.xp, part)
        if source is None:
            self.ops.matmul(matrix, part, out=product)
            part[...] = product
        else:
            self.ops.matmul(matrix, source, out=product)
            self.ops.subtract(part, product, out=part)


class DerivedEvaluator(BlockEvaluator):
    """Functions made of those of another evaluator: at mapped rows, or changed block by block.

    Parameters
    ----------
    kernel
        The kernel k.
    Z
        The points z_j, shape (m, d).
    base
        The other functions.
    map_rows
        The rows at which they are evaluated, from the rows x; default x itself.
    change
        What is done to each of their blocks, in place; default nothing.
    """

    def __init__(
        self,
        kernel: Any,
        Z: Array,
        base: BlockEvaluator,
        *,
        map_rows: Callable[[Array], Array] | None = None,
        change: Callable[[Array], None] | None = None,
    ) -> None:
        super().__init__(kernel, Z, log=base.log)
        self._base, self._map_rows, self._change = base, map_rows, change

    def load(self, X: Array) -> None:
        """Take the rows X, shape (n, d), until the next call."""
        self._base.load(X if self._map_rows is None else self._map_rows(X))

    def _fill(self, here: slice, out: Array) -> None:
        self._base.write(here, out)
        if self._change is not None:
            self._change(out)


def take_logarithms(kernel: Any, xp: Any, out: Array) -> None:
    """Logarithms in place, -inf where a value is zero; DataError where one is negative."""
    if bool(xp.any(out < 0.0)):
        raise negative_values(kernel)
    zero = out == 0.0
    out[...] = xp.where(zero, -xp.inf, xp.log(xp.where(zero, 1.0, out)))


def negative_values(kernel: Any) -> DataError:
    """The error for a kernel of which there is no logarithm."""
    return DataError(
        f"{kernel!r} can be negative, but a kernel k >= 0 was expected: take a Gaussian, Laplace, "
        "Matern or rational quadratic one, or sums and products of these"
    )
