"""Resources of a process: BLAS threads, calls in parallel, predicted memory.

One BLAS thread per worker thread, for as long as something runs.

The number of BLAS threads is a property of the process, and sums depend on it: so it is set once
around everything that makes a fit's numbers, and given back when the last user has left.

So is the time after which a thread must hand the interpreter over to one that waits for it. Threads
that compute need it for microseconds between two calls that don't: Python's 5 ms are long then.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from threadpoolctl import OpenBLASController, get_cached_controller, threadpool_limits

import cme_dask.kernels.evaluator  # noqa: F401 - only a library that is loaded can be limited

# One BLAS thread per worker thread, for as long as something runs


_SWITCH_SECONDS = 1e-3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_REUSED_BYTES = 4 << 20

_lock = threading.Lock()
_users = 0
_limits: Any = None
_switch = 0.0
_process = uuid4().hex


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


# A few calls at once, in threads


Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(
    function: Callable[[Item], Result], items: Sequence[Item], cores: int
) -> list[Result]:
    """``function`` of each item in so many threads; with one core in the thread that asks."""
    if min(cores, len(items)) <= 1:
        return [function(item) for item in items]
    contexts = [copy_context() for _ in items]  # such as the settings for floating-point errors
    with ThreadPoolExecutor(cores) as threads:
        return list(threads.map(lambda c, item: c.run(function, item), contexts, items))


class MemoryPlan(NamedTuple):
    """Predicted peak in bytes, and the limit it was held against, where and when it is tightest."""

    predicted: int
    limit: int
    place: str
    phase: str = "the pass"

    def or_tighter(self, other: "MemoryPlan | None") -> "MemoryPlan":
        """The one of two that fills its place more."""
        if other is None or other.predicted * self.limit <= self.predicted * other.limit:
            return self
        return other
