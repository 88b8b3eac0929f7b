"""One driver for threads, processes and clusters: the only file that hands work to Dask.

A job is a list of leaf tasks whose results are merged pairwise along a fixed tree. On every
scheduler it is the same graph; what differs is how its progress is followed.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import dask.threaded
from dask.base import get_scheduler
from dask.callbacks import Callback
from dask.system import CPU_COUNT
from distributed import Client

from cme_dask.errors import DataError, ResourceError, remedy
from cme_dask.numerics.devices import Device
from cme_dask.numerics.resources import limit_this_process, one_blas_thread
from cme_dask.passes.checkpoint import Checkpoint
from cme_dask.passes.cluster import (
    ClusterRun,
    Job,
    Scheduler,
    check_workers_have,
    cluster_threads,
    limit_workers,
)
from cme_dask.passes.plan import tree_merges

_NAMES = {  # Dask's own aliases, too
    "threads": "threads",
    "threading": "threads",
    "processes": "processes",
    "multiprocessing": "processes",
    "synchronous": "synchronous",
    "sync": "synchronous",
    "single-threaded": "synchronous",
}


@dataclass(frozen=True, eq=False)
class Executor:
    """Where tasks run.

    Attributes
    ----------
    kind
        ``"threads"``, ``"processes"``, ``"synchronous"`` or ``"distributed"``.
    workers
        Tasks that run at once.
    client
        The cluster, for ``"distributed"``.
    checkpoint
        Where passes keep what is done of them, if they do.
    processes
        Of all runs of this executor and of its copies, for ``"processes"``.
    device
        Where tasks compute, or None for the host.
    device_memory
        Bytes of the memory of the device (of workers, the smallest); 0 if it is unknown.
    """

    kind: str
    workers: int
    client: Client | None = None
    checkpoint: Checkpoint | None = None
    processes: "WorkerProcesses | None" = field(default=None, repr=False)
    device: Device | None = None
    device_memory: int = 0

    @property
    def shares_memory(self) -> bool:
        """Whether tasks see the arrays of this process without a copy."""
        return self.kind in ("threads", "synchronous")

    @property
    def cores(self) -> int:
        """Threads with which this process may compute by itself, between the passes."""
        return self.workers if self.shares_memory else CPU_COUNT

    @property
    def function_threads(self) -> int:
        """Those of them that may call users' functions: in a pass they would do so as well."""
        return self.workers if self.shares_memory else 1

    @classmethod
    def resolve(
        cls,
        scheduler: Scheduler = None,
        workers: int | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> "Executor":
        """From a scheduler's name, a Client, or whatever Dask is set to (default: threads).

        Raises
        ------
        DataError
            If the name is not known or ``workers`` is not positive.
        ResourceError
            If the cluster has no workers, or they don't see the folder of the checkpoint.
        """
        if workers is not None and (not isinstance(workers, int) or workers < 1):
            raise DataError(f"workers must be an integer of at least 1, got {workers!r}")
        if scheduler is None:
            scheduler = _configured()
        if isinstance(scheduler, Client):
            threads = cluster_threads(scheduler)
            limit_workers(scheduler)  # imports the package on the workers
            if checkpoint is not None:
                checkpoint.check_seen(scheduler)
            return cls("distributed", threads, scheduler, checkpoint)
        kind = _NAMES.get(scheduler) if isinstance(scheduler, str) else None
        if kind is None:
            raise DataError(
                f"scheduler must be a distributed Client or one of {', '.join(_NAMES)}, "
                f"got {scheduler!r}"
            )
        if kind == "synchronous":
            return cls(kind, 1, None, checkpoint)
        result = workers or dask.config.get("num_workers", None) or CPU_COUNT
        processes = WorkerProcesses() if kind == "processes" else None
        return cls(kind, result, None, checkpoint, processes)

    def on(self, device: Any) -> "Executor":
        """The same with tasks that compute on a device, see :meth:`Device.of`.

        Raises
        ------
        DataError
            If it is none.
        ResourceError
            If this process, or a worker, has not got it.
        """
        place = Device.of(device)
        if self.client is None:
            memory = place.memory()
        else:
            check_workers_have(self.client, place.name)
            memory = min(self.client.run(place.memory).values())
        return replace(self, device=place, device_memory=memory)

    def run(
        self,
        leaf: Callable[..., Any],
        payloads: Sequence[tuple[Any, ...]],
        merge: Callable[[Any, Any, Any], Any],
        *,
        shared: Any,
        name: str,
        on_done: Callable[[int], None] = lambda number: None,
    ) -> Any:
        """Merge ``leaf(shared, *payload)`` over all payloads along the fixed binary tree.

        Parameters
        ----------
        leaf
            The work of one task, a function.
        payloads
            Its arguments; Delayed ones, also those in tuples, are computed first.
        merge
            ``merge(shared, a, b)``, the result of two neighbours.
        shared
            First argument of every task, sent to each worker once.
        name
            Of the tasks on the dashboard.
        on_done
            Called with the number of a leaf when it has ended, in any order.
        """
        merges = tree_merges(len(payloads))
        job = Job(leaf, payloads, merge, shared, name, on_done, merges, uuid4().hex)
        with one_blas_thread():  # tasks of a cluster may share this process, too
            if self.client is not None:
                check_workers_have(self.client, (leaf, merge, shared))
                return ClusterRun(self.client, job).result()
            tasks = job.tasks(dict.fromkeys(range(job.root + 1), 0), {})
            numbers = {task.key: i for i, task in enumerate(tasks[: len(payloads)])}

            def ended(key: Any, *about: Any) -> None:
                if key in numbers:
                    on_done(numbers[key])

            try:
                with self._local_options() as options, Callback(posttask=ended):
                    return dask.compute(tasks[-1], scheduler=self.kind, **options)[0]
            except BrokenProcessPool as error:
                raise ResourceError(
                    "a worker process died: "
                    + remedy(
                        "a script that uses processes needs the guard `if __name__ == "
                        "'__main__':` around its work, else memory ran out",
                        "memory ran out",
                    )
                    + ", and fewer workers or lower ranks need less"
                ) from error

    @contextlib.contextmanager
    def _local_options(self) -> Iterator[dict[str, Any]]:
        if self.kind == "synchronous":
            yield {}
            return
        if self.kind == "threads":
            # A pool of our own, whose end waits for its threads: after an error nothing writes on.
            with ThreadPoolExecutor(self.workers) as threads:
                yield {"pool": threads, "num_workers": self.workers}
            return
        with (self.processes or WorkerProcesses()).started(self.workers) as pool:
            # Dask's default of 6 tasks at a time leaves processes idle and runs on after Ctrl-C.
            yield {"pool": pool, "num_workers": self.workers, "chunksize": 1}


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
        pool = ProcessPoolExecutor(workers, context, initializer=limit_this_process)
        weakref.finalize(self, pool.shutdown)
        with _deaf_to_interrupts():
            for _ in range(workers):  # each starts a process, since none is idle yet
                pool.submit(os.getpid)
        return pool


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let processes that are started meanwhile ignore Ctrl-C, which a terminal sends to all.

    It ends the run in this process, which then ends them; by themselves they would print their
    tracebacks, and could die with a lock that the others wait for.
    """
    before = signal.getsignal(signal.SIGINT)
    # Signals are set in the main thread, and not where other than Python has set them.
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _configured() -> Scheduler:
    """What ``dask.config`` or an active client says."""
    get = get_scheduler()
    owner = getattr(get, "__self__", None)
    if isinstance(owner, Client):
        return owner
    known = {
        dask.threaded.get: "threads",
        dask.multiprocessing.get: "processes",
        dask.get: "synchronous",
    }
    return known.get(get, "threads")
