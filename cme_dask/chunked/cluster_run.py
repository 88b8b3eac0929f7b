"""A job on a cluster, which survives its workers.

Futures of all leaves are asked for at once, a merge when both its parts are there. Only nodes whose
sum has not gone into another yet are held. Dask repeats by itself what was lost with a worker; what
ran on so many workers that died that Dask gives it up for a killer of workers is asked for again.
"""

import contextlib
import logging
import queue
import time
from typing import Any

import dask
from distributed import CancelledError, Client, Future, KilledWorker
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError

from cme_dask.chunked.blas import OneBlasThread
from cme_dask.chunked.jobs import Job, join
from cme_dask.errors import ResourceError

log = logging.getLogger("cme_dask.run")

_ATTEMPTS = 6  # of a node while no other one ends, each after `allowed-failures` + 1 dead workers
_PAUSE = 5.0  # seconds without news after which workers are looked for
_NO_WORKERS = 300.0  # seconds without any worker, by default
_LOST = (CommClosedError, CancelledError, FutureCancelledError, TimeoutError, OSError)
_MERGES_FIRST = 10  # else they would wait for all leaves, and hold all sums


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
        self._parents = job.tree.parents()
        self._held: dict[int, Future] = {}
        self._attempts: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self._finished: set[int] = set()  # nodes whose future is held, or has gone into a sum
        self._told: set[int] = set()
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
                raise self._lost(error) from error
            return last.result()  # raises what the task raised
        finally:
            with contextlib.suppress(Exception):
                self._client.cancel(list(self._held.values()))

    def _drive(self) -> Future:
        """The future of the sum over all leaves, or of a node that failed for good."""
        root = self._job.tree.root
        self._client.register_plugin(OneBlasThread())
        self._ask_leaves(range(self._job.tree.leaves))
        while True:
            node, attempt = self._next()
            if attempt != self._attempts[node]:
                continue  # of a future that was given up
            future = self._held[node]
            if future.status == "cancelled":
                raise self._lost("its tasks were cancelled")
            if future.status == "error":
                if not isinstance(future.exception(), KilledWorker):
                    return future
                self._again(node, future)
            elif node == root:
                if root < self._job.tree.leaves:
                    self._tell(root)
                return future
            else:
                self._done(node)

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

    def _done(self, node: int) -> None:
        """A node has ended: tell it, merge it with its neighbour if that has, too."""
        if node < self._job.tree.leaves:
            self._tell(node)
        self._finished.add(node)
        self._failures.clear()
        for part in self._parts(node):  # they have gone into this one
            self._held.pop(part, None)
        parent = self._parents[node]
        if all(part in self._finished for part in self._parts(parent)):
            self._ask_merge(parent)

    def _tell(self, leaf: int) -> None:
        if leaf not in self._told:
            self._told.add(leaf)
            self._job.on_done(leaf)

    def _parts(self, node: int) -> tuple[int, ...]:
        leaves = self._job.tree.leaves
        return () if node < leaves else self._job.tree.merges[node - leaves]

    def _again(self, node: int, future: Future) -> None:
        """Ask for a node again whose workers died."""
        failures = self._failures[node] = self._failures.get(node, 0) + 1
        if failures >= _ATTEMPTS:
            raise ResourceError(
                f"workers died again and again while they ran {future.key}: give them more memory, "
                "or lower the ranks"
            ) from future.exception()
        log.warning(
            "%s lost its workers, it is run again",
            future.key,
            extra={"event": "retry", "task": str(future.key), "failures": failures},
        )
        lost = [part for part in self._parts(node) if self._held[part].status != "finished"]
        if lost:
            leaves = sorted(leaf for part in lost for leaf in self._job.tree.below(part))
            self._forget(node, leaves)
            self._ask_leaves(leaves)
        elif self._parts(node):
            self._ask_merge(node)
        else:
            self._ask_leaves([node])

    def _forget(self, node: int, leaves: list[int]) -> None:
        """Forget a node and all that was made of these leaves below it."""
        gone = set(leaves)
        for other, (first, last) in enumerate(self._job.tree.spans):
            low, high = self._job.tree.spans[node]
            if low <= first and last <= high and gone.intersection(range(first, last)):
                self._finished.discard(other)
                self._held.pop(other, None)
                if other not in gone:  # news of its former future count no more
                    self._attempts[other] = self._attempts.get(other, -1) + 1

    def _ask_leaves(self, leaves: Any) -> None:
        for leaf in leaves:
            self._attempts[leaf] = self._attempts.get(leaf, -1) + 1
        tasks = self._job.leaves({leaf: self._attempts[leaf] for leaf in leaves})
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 GiB"}):
            futures = self._client.compute(tasks)
        for leaf, future in zip(leaves, futures, strict=True):
            self._hold(leaf, future)

    def _ask_merge(self, node: int) -> None:
        self._attempts[node] = attempt = self._attempts.get(node, -1) + 1
        a, b = (self._held[part] for part in self._parts(node))
        future = self._client.submit(
            join,
            self._job.merge,
            self._job.after.get(node),
            a,
            b,
            key=self._job.key(node, attempt),
            pure=False,
            priority=_MERGES_FIRST,
        )
        self._hold(node, future)

    def _hold(self, node: int, future: Future) -> None:
        self._held[node] = future
        news, attempt = self._news, self._attempts[node]
        future.add_done_callback(lambda _: news.put((node, attempt)))

    def _lost(self, why: object) -> ResourceError:
        return ResourceError(
            f"the scheduler at {self._client.scheduler.address} was lost, and with it the run: "
            f"start it again and repeat; a run with a checkpoint goes on where it was ({why})"
        )
