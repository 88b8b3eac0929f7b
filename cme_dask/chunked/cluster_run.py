"""A job on a cluster, which survives its workers.

The whole tree is asked for at once, so that a slow network costs no pause between its levels. Nodes
are held until their sum has gone into another: what was lost with a worker Dask repeats by itself,
and what ran on so many workers that died that Dask gives it up for a killer of workers is asked for
again, with what hangs on it, while all other sums stay.
"""

import contextlib
import logging
import queue
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import dask
from distributed import CancelledError, Client, Future, KilledWorker
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError

from cme_dask.chunked.blas import limit_workers
from cme_dask.chunked.jobs import Job
from cme_dask.errors import ResourceError

log = logging.getLogger("cme_dask.run")

_ATTEMPTS = 6  # of a node while no other one ends, each after `allowed-failures` + 1 dead workers
_PAUSE = 5.0  # seconds without news after which workers are looked for
_NO_WORKERS = 300.0  # seconds without any worker, by default
_LOST = (CommClosedError, CancelledError, FutureCancelledError, TimeoutError, OSError)


class ClusterRun:
    """One run of a job.

    Parameters
    ----------
    client
        The cluster.
    job
        What to do.
    """

    def __init__(self, client: Client, job: Job) -> None:
        self._client, self._job = client, job
        self._held: dict[int, Future] = {}
        self._attempts: dict[int, int] = {}
        self._killed: set[str] = set()
        self._failures: Counter[str] = Counter()  # since something ended
        self._told: set[int] = set()
        self._refused: OSError | None = None  # what who hears of the progress raised
        self._news: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def result(self) -> Any:
        """The sum over all leaves.

        Raises
        ------
        ResourceError
            If the scheduler is lost, no worker is left, or workers die again and again over the
            same task.
        Exception
            What a task raised.
        """
        try:
            try:
                last = self._drive()
                if last.status == "finished":
                    return last.result()
            except _LOST as error:
                if error is self._refused:
                    raise
                raise self._lost(error) from error
            return last.result()  # raises what the task raised
        except KilledWorker as error:  # the sum was lost, and again, while it was fetched
            raise _killers(str(error.task)) from error
        finally:
            with contextlib.suppress(Exception):
                self._client.cancel(list(self._held.values()))

    def _drive(self) -> Future:
        """The future of the sum over all leaves, or of a node that failed for good."""
        root, leaves = self._job.tree.root, self._job.tree.leaves
        limit_workers(self._client)
        self._ask(range(root + 1))
        while True:
            node, attempt = self._next()
            if attempt != self._attempts[node]:
                continue  # of a future that was given up
            future = self._held.get(node)
            if future is not None and future.status == "cancelled":
                raise self._lost("its tasks were cancelled")
            if future is not None and future.status == "error":
                if not isinstance(future.exception(), KilledWorker):
                    return future
                self._again(node, future)
                continue
            self._failures.clear()
            if node < leaves and node not in self._told:
                self._told.add(node)
                try:
                    self._job.on_done(node)
                except OSError as error:  # a full disk, a closed terminal: not our scheduler
                    self._refused = error
                    raise
            if node == root and future is not None:
                return future
            for part in self._parts(node):  # they have gone into this one
                self._held.pop(part, None)

    def _next(self) -> tuple[int, int]:
        """The next node that has ended, and its attempt; ResourceError if nobody works."""
        patience = dask.config.get("cme-dask.no-workers-timeout", _NO_WORKERS)
        idle_since = None
        while True:
            try:
                return self._news.get(timeout=_PAUSE)
            except queue.Empty:
                if self._client.status not in ("running", "connecting"):
                    raise self._lost(f"the client is {self._client.status}") from None
            if self._client.nthreads():
                idle_since = None
                continue
            now = time.monotonic()
            idle_since = now if idle_since is None else idle_since
            if now - idle_since > patience:
                raise ResourceError(
                    f"the cluster at {self._client.scheduler.address} has had no worker for "
                    f"{patience:.0f} s: start some, for example with `dask worker ADDRESS`, and "
                    "run it again"
                )

    def _parts(self, node: int) -> tuple[int, ...]:
        leaves = self._job.tree.leaves
        return () if node < leaves else self._job.tree.merges[node - leaves]

    def _again(self, node: int, future: Future) -> None:
        """Ask again for a node that hangs on a task whose workers died, and for what it lacks."""
        error = future.exception()
        task = str(error.task)
        if not self._job.owns(task):  # a chunk of the user's: under the same name, it has failed
            raise _killers(task) from error
        if task not in self._killed:  # all that hang on it have the same error
            self._killed.add(task)
            name = task.split("-again")[0]
            self._failures[name] += 1
            told = {"event": "retry", "task": task, "failures": self._failures[name]}
            log.warning("%s lost its workers and is run again", task, extra=told)
            if self._failures[name] >= _ATTEMPTS:
                raise _killers(task) from error
        lacking: set[int] = set()

        def need(other: int) -> None:
            there = self._held.get(other)
            if other in lacking or (there is not None and there.status != "error"):
                return
            lacking.add(other)
            for part in self._parts(other):
                need(part)

        need(node)
        self._ask(sorted(lacking))

    def _ask(self, nodes: Sequence[int]) -> None:
        """Futures of nodes, in ascending order, whose other parts are held."""
        for node in nodes:
            self._attempts[node] = self._attempts.get(node, -1) + 1
        tasks = self._job.tasks({node: self._attempts[node] for node in nodes}, self._held)
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 GiB"}):
            futures = self._client.compute(tasks)
        for node, future in zip(nodes, futures, strict=True):
            self._held[node] = future
            told = partial(self._tell, node, self._attempts[node])
            future.add_done_callback(told)

    def _tell(self, node: int, attempt: int, _: Future) -> None:
        self._news.put((node, attempt))

    def _lost(self, why: object) -> ResourceError:
        return ResourceError(
            f"the scheduler at {self._client.scheduler.address} was lost, and with it the run: "
            f"start it again and repeat; a run with a checkpoint goes on where it was ({why})"
        )


def _killers(task: str) -> ResourceError:
    return ResourceError(
        f"workers died again and again while they ran {task}: give them more memory, lower the "
        "ranks, or make chunks of fewer rows"
    )
