"""Processes of this machine that compute tasks, and end with the one that started them."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from cme_dask.kernels.evaluator import limit_this_process


class WorkerProcesses:
    """Processes that the first run starts and further ones use; they end with their last user.

    To start one takes longer than most passes over the rows: it has to import the package.
    """

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["WorkerProcesses"], tuple[()]]:
        return WorkerProcesses, ()  # in another process none has started

    @contextlib.contextmanager
    def started(self, workers: int) -> Iterator[ProcessPoolExecutor]:
        """The processes; after an error they end, so that nothing writes on."""
        with self._lock:
            pool = self._pool = self._pool or self._start(workers)
        try:
            yield pool
        except BaseException:
            with self._lock:
                self._pool = None
            pool.shutdown()
            raise

    def _start(self, workers: int) -> ProcessPoolExecutor:
        # Zarr's event loop does not survive a fork, and each process gets one BLAS thread.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, initializer=begin_worker)
        weakref.finalize(self, pool.shutdown)
        try:
            with _later_interrupts():
                for _ in range(workers):  # each starts a process, since none is idle yet
                    pool.submit(os.getpid)
        except BaseException:
            pool.shutdown()
            raise
        return pool


def begin_worker() -> None:
    """Prepare a worker process: one BLAS thread, and it ends with its parent, however that ends."""
    limit_this_process()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


@contextlib.contextmanager
def _later_interrupts() -> Iterator[None]:
    """Hold back Ctrl-C until the block ends; processes that are started meanwhile never hear it.

    A terminal sends it to all. It ends the run in this process, which then ends them; by themselves
    they would print their tracebacks, and could die with a lock that the others wait for.
    """
    before = signal.getsignal(signal.SIGINT)
    # Signals are set in the main thread, and not where other than Python has set them.
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
