"""One BLAS thread per worker thread, for as long as something runs.

The number of BLAS threads is a property of the process, and sums depend on it: so it is set once
around everything that makes a fit's numbers, and given back when the last user has left.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from distributed import WorkerPlugin
from threadpoolctl import threadpool_limits

import cme_dask.kernels.blas  # noqa: F401 - only a library that is loaded can be limited

_lock = threading.Lock()
_users = 0
_limits: Any = None
_process = uuid4().hex


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit this process; nested and concurrent uses share one limit."""
    global _users, _limits
    with _lock:
        if _users == 0:
            _limits = threadpool_limits(1)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _limits.restore_original_limits()


def limit_this_process() -> None:
    """Limit a worker process for good."""
    threadpool_limits(1)


class OneBlasThread(WorkerPlugin):  # type: ignore[misc]
    """Limits each worker process of a cluster, once."""

    name = "cme-dask-one-blas-thread"

    def __init__(self) -> None:
        self._client_process = _process

    def setup(self, worker: Any) -> None:
        """Limit the process, unless it is the client's own, which limits itself while it waits."""
        if self._client_process != _process:
            limit_this_process()
