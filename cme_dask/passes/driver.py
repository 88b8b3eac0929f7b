"""The options and the place of a run: one driver for threads, processes and clusters, and memory.

This is the only file that hands work to Dask. Leaf tasks are merged pairwise along a fixed tree. On
every scheduler it is the same graph; what differs is how its progress is followed. The memory of a
pass is predicted before it begins, and a pass that does not fit is refused.
"""

import contextlib
import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, get_args
from uuid import uuid4

import dask.threaded
import numpy as np
import psutil
from dask.base import get_scheduler
from dask.callbacks import Callback
from dask.delayed import Delayed, delayed, unpack_collections
from dask.system import CPU_COUNT
from dask.utils import format_bytes, parse_bytes
from distributed import Client
from distributed.system import MEMORY_LIMIT

from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, ResourceError, option, remedy
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.numerics.devices import Device
from cme_dask.numerics.reduction import Cost, Extent, MemoryPlan, RowRange, tree_merges
from cme_dask.passes.checkpoint import Checkpoint, SavedTrials, about_run, checkpointed_run
from cme_dask.passes.cluster import (
    ClusterRun,
    Scheduler,
    awaited_workers,
    check_client,
    check_workers,
    check_workers_have,
    limit_workers,
    run_on_workers,
)
from cme_dask.passes.processes import WorkerProcesses
from cme_dask.passes.progress import Listener
from cme_dask.passes.publishing import current

A_WORKER = "a worker"
"""The place of a prediction that is about a worker of a cluster."""

_WORD = 8
_HASH_WORDS = 10  # per row of a strip: its hash on the way, its fold and its cell, their order
_PROCESS = 230 << 20  # interpreter and libraries
_FIRST_TASK = 16 << 20  # what the first task of a cluster's worker loads
_CHILD = 170 << 20  # of each process that is started: it shares pages of the libraries
_DEVICE_TASKS = 2  # at once by default: calls of a GPU's library wait for the interpreter lock
_SENT = 4  # copies of a partial result on its way: two packed ones at either end
_DECODED = 10  # chunks that Zarr decodes at once

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
    """Where tasks run, and the memory that is there.

    Attributes
    ----------
    kind
        ``"threads"``, ``"processes"``, ``"synchronous"`` or ``"distributed"``.
    workers
        Tasks that run at once.
    memory
        Bytes for this process (and, without a cluster, for the processes it starts).
    client
        The cluster, for ``"distributed"``.
    worker_memory
        Threads of each worker of a cluster, and the bytes that it fills before it begins to spill;
        empty without one.
    checkpoint
        Where passes keep what is done of them, if they do.
    processes
        Of all runs of this executor and of its copies, for ``"processes"``.
    device
        Where tasks compute, or None for the host.
    device_memory
        Bytes of the memory of the device (of workers, the smallest); 0 if it is unknown.
    device_limit
        Bytes of it that tasks may use; None for any number.
    worker_resident
        Bytes that a worker of a cluster holds without a task, as it was measured.
    worker_share
        Share of its memory at which a worker of a cluster begins to spill, for messages; 1 where
        ``worker_memory`` is no such share.
    shares_memory
        Whether tasks see the arrays of this process without a copy.
    cores
        Threads with which this process may compute by itself, between the passes.
    """

    kind: str
    workers: int
    memory: int = sys.maxsize
    client: Client | None = None
    worker_memory: tuple[tuple[int, int], ...] = ()
    checkpoint: Checkpoint | None = None
    processes: WorkerProcesses | None = field(default=None, repr=False)
    device: Device | None = None
    device_memory: int = 0
    device_limit: int | None = None
    worker_resident: int = 0
    worker_share: float = 1.0
    shares_memory: bool = field(init=False)
    cores: int = field(init=False)

    def __post_init__(self) -> None:
        shares_memory = self.kind in ("threads", "synchronous")
        object.__setattr__(self, "shares_memory", shares_memory)
        object.__setattr__(self, "cores", self.workers if shares_memory else CPU_COUNT)

    @property
    def function_threads(self) -> int:
        """Those of them that may call users' functions: in a pass they would do so as well."""
        return self.workers if self.shares_memory else 1

    def trials(self, kinds: tuple[type, ...]) -> SavedTrials | None:
        """Where the trials of the next search are saved; None without a checkpoint.

        Parameters
        ----------
        kinds
            The dataclasses and named tuples in their keys and in what they give.
        """
        return None if self.checkpoint is None else self.checkpoint.trials(kinds)

    def check_pass(self, cost: Cost, extent: Extent, runs: list[RowRange]) -> MemoryPlan:
        """Predict the peak of a pass, and of what comes before and after it.

        Parameters
        ----------
        cost, extent, runs
            What its reductions take, its rows and its tasks.

        Raises
        ------
        ResourceError
            If it does not fit; the message says what to lower.
        """
        lengths = [run.stop - run.start for run in runs]
        longest = runs[lengths.index(max(lengths))]
        task, on_device = task_bytes(cost, extent, longest, on_device=extent.on_device)
        # Finished partial results that wait for their neighbour in the tree, in each process.
        waiting = math.ceil(math.log2(len(runs))) * cost.partial + cost.retained + cost.process
        base = _PROCESS + extent.in_memory + cost.held
        place = "the client" if self.worker_memory else "this machine"
        # With the tasks that run at once; the client takes its own steps without any.
        plans = [(MemoryPlan(base + v, self.memory, place, k), 0) for k, v in cost.alone.items()]
        if self.worker_memory:
            # None waits as long as all tasks run at once; then they are sent and added.
            at_once = sum(threads for threads, _ in self.worker_memory)
            if len(runs) <= at_once:
                waiting = cost.retained + cost.process
            workers = [
                MemoryPlan(
                    self.worker_resident + max(threads * task, _SENT * cost.partial) + waiting,
                    limit,
                    A_WORKER,
                )
                for threads, limit in self.worker_memory
            ]
            plans += zip(workers, (threads for threads, _ in self.worker_memory), strict=True)
            if (panel := current()) is not None:
                panel.memory(max(p.predicted for p in workers), min(p.limit for p in workers))
        else:
            running = self.workers * task + waiting
            if self.kind == "processes":
                # One in two sends what it gives, while the others compute and one sum is made.
                sending = -(-self.workers // 2) * max(_SENT * cost.partial - task, 0)
                running += self.workers * (_CHILD + cost.process) + sending + cost.partial
            plans.append((MemoryPlan(base + running, self.memory, place), self.workers))
        if self.device_limit is not None:
            at_once = max((threads for threads, _ in self.worker_memory), default=self.workers)
            device = MemoryPlan(at_once * on_device, self.device_limit, "the device")
            plans.append((device, at_once))
        shares = [plan.predicted / plan.limit for plan, _ in plans]
        worst, tasks = plans[int(np.argmax(shares))]
        if worst.predicted > worst.limit:
            raise ResourceError(self._refusal(cost, extent, tasks, worst))
        return worst

    def _refusal(self, cost: Cost, extent: Extent, tasks: int, plan: MemoryPlan) -> str:
        """The message on a peak above its limit, while so many tasks run at once."""
        remedies = list(cost.remedies)
        if tasks > 1:
            fewer = "threads per worker" if self.worker_memory else "workers or threads"
            remedies.append(f"fewer than {tasks} {fewer}")
        if tasks and extent.chunk_rows > extent.strip_rows:
            columns = max(extent.n_columns, extent.columns_read)
            reading = columns * _WORD * 3 * extent.chunk_rows
            first = 0 if 2 * reading > plan.predicted else len(remedies)
            remedies.insert(
                first,
                f"chunks of fewer rows than {extent.chunk_rows:,}, which are read whole "
                "(cme-dask rechunk)",
            )
        running = f"{tasks} task{'s' * (tasks > 1)} at once" if tasks else plan.phase
        subject = f"{cost.subject} and " if cost.subject else ""
        limit = format_bytes(plan.limit)
        if plan.place == A_WORKER and self.worker_share < 1.0:
            limit += f" ({self.worker_share:.0%} of its memory, above which it spills)"
        advice = f": {', or '.join(remedies)}" if remedies else ""
        return (
            f"{plan.place} would need {format_bytes(plan.predicted)} for {subject}{running}, the "
            f"limit is {limit}{advice}"
        )

    def check_alone(self, phase: str, need: int, held: int, remedy: str) -> MemoryPlan:
        """Predict the peak of a step that the client takes alone.

        Parameters
        ----------
        phase
            Its name.
        need, held
            Bytes that it takes, and that the client holds anyway.
        remedy
            Remedy if that does not fit.

        Raises
        ------
        ResourceError
            If it does not fit.
        """
        place = "the client" if self.worker_memory else "this machine"
        plan = MemoryPlan(_PROCESS + held + need, self.memory, place, phase)
        if plan.predicted > plan.limit:
            raise ResourceError(
                f"{plan.place} would need {format_bytes(plan.predicted)} for {phase}, the limit is "
                f"{format_bytes(plan.limit)}: {remedy}"
            )
        return plan

    def run(
        self,
        leaf: Callable[..., Any],
        payloads: Sequence[tuple[Any, ...]],
        merge: Callable[[Any, Any, Any], Any],
        *,
        shared: Any,
        name: str,
        on_done: Callable[[int], None] | None = None,
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
        with one_blas_thread(), contextlib.ExitStack() as stack:
            token = uuid4().hex
            rest = payloads, merge, shared, name, token
            graph = functools.partial(task_graph, leaf, *rest)
            # Tasks of a cluster may share this process, too.
            if self.client is not None:
                check_workers_have(self.client, (leaf, merge, shared))
                functions = leaf.__name__, merge.__name__
                if (panel := current()) is not None:
                    panel.run(token)
                job = ClusterRun(self.client, graph, len(payloads), functions, token, on_done)
                return job.result()
            tasks, kind = graph(), self.kind
            numbers = {task.key: i for i, task in enumerate(tasks[: len(payloads)])}

            def ended(key: Any, *info: Any) -> None:
                if on_done is not None and key in numbers:
                    on_done(numbers[key])

            options: dict[str, Any] = {}
            try:
                if self.kind == "threads":
                    # Our own pool, whose end waits for its threads: nothing writes after an error.
                    threads = stack.enter_context(ThreadPoolExecutor(self.workers))
                    options = {"pool": threads, "num_workers": self.workers}
                elif self.kind == "processes":
                    processes = self.processes or WorkerProcesses()
                    pool = stack.enter_context(processes.started(self.workers))
                    if _has_delayed(payloads):
                        # Dask's 6 tasks at a time leave processes idle and run on after Ctrl-C.
                        options = {"pool": pool, "num_workers": self.workers, "chunksize": 1}
                    else:
                        # Leaves go to the processes from threads, which merge what they give: Dask
                        # would send the parts of each merge to a process, and their sum back.
                        tasks = task_graph(_sent(pool, leaf, name), *rest)
                        threads = stack.enter_context(ThreadPoolExecutor(self.workers))
                        kind, options = "threads", {"pool": threads, "num_workers": self.workers}
                # Beside those of the user, such as a bar of Dask's; registered, they would be lost
                # to another run in this process.
                callbacks = [*Callback.active, (None, None, None, ended, None)]
                return dask.compute(tasks[-1], scheduler=kind, callbacks=callbacks, **options)[0]
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


class PassKeywords(TypedDict, total=False):
    """Keywords of whatever passes over rows, as in :class:`RunOptions`."""

    scheduler: Scheduler
    workers: int | None
    memory_limit: str | int | None
    progress: bool | Listener | None


class FitKeywords(PassKeywords, total=False):
    """Keywords of runs that can be resumed."""

    checkpoint: str | os.PathLike[str] | None


class MomentKeywords(PassKeywords, total=False):
    """Keywords of passes for moments, which may be on a device."""

    device: Any
    device_memory_limit: str | int | None


class MomentFitKeywords(FitKeywords, MomentKeywords, total=False):
    """Keywords of such passes that can be resumed."""


class ShardKeywords(MomentFitKeywords, total=False):
    """Keywords of runs that can be divided into shares."""

    shard: tuple[int, int] | None


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run.

    Parameters
    ----------
    scheduler : {"threads", "processes", "synchronous"} or distributed.Client, optional
        Default: an active client, else the scheduler of Dask's configuration, else threads.
    workers : int, optional
        Number of threads or processes; default all cores, with a ``device`` two: one reads while
        the other computes. A cluster has its own.
    memory_limit : str or int, optional
        Bytes ("2GB") that this process, or each worker of a cluster, may use; default: all
        available memory.
    progress : bool or callable, optional
        True to show the steps, with the time left, as a bar in a terminal and as a line in a
        notebook; or a function that is called with each :class:`cme_dask.Event`. On a cluster, the
        events are also logged under the topic ``"cme-dask"``.
    checkpoint : path, optional
        Folder, on a filesystem that all workers share, in which partial sums are saved. After an
        interruption, the same call with the same rows, parameters and functions continues, and ends
        with the same bits.
    shard : (int, int), optional
        (i, k): compute only the i-th (from 0) of k shares of the pass into the ``checkpoint``.
        Shards may run anywhere, at any time; a run without ``shard`` adds them up.
    device : str or device, optional
        Where sums over rows are computed: ``"cuda"`` or ``"cuda:1"`` for a GPU by CuPy, or a device
        of an array library that follows the array API standard, such as ``torch.device("cuda")``.
        Rows are read and checked in host memory and go to the device strip by strip; partial
        results come back once per task. Passes other than those for moments, and everything
        between the passes, stay on the host. Default: NumPy, in host memory.
    device_memory_limit : str or int, optional
        Bytes of the device that the run may use; default: what a GPU has, else no limit.
    """

    scheduler: Scheduler = None
    workers: int | None = None
    memory_limit: str | int | None = None
    progress: bool | Listener | None = None
    checkpoint: str | os.PathLike[str] | None = None
    shard: tuple[int, int] | None = None
    device: Any = None
    device_memory_limit: str | int | None = None

    def executor(self, checkpoint: Checkpoint | None = None) -> Executor:
        """The place of a run and its memory; its passes may have a checkpoint.

        Without a scheduler it is what Dask is set to, else threads. Memory is what the machine and
        the workers of a cluster have, and at most ``memory_limit`` each; of a device likewise, and
        at most ``device_memory_limit``.

        Raises
        ------
        DataError
            If the scheduler or the device is not known, or ``workers`` or a limit is not positive.
        ResourceError
            If the cluster has no workers, they don't see the folder of the checkpoint, or this
            process, or a worker, has not got the device.
        """
        workers = self.workers
        if workers is not None:
            if not isinstance(workers, (int, np.integer)) or workers < 1:
                raise DataError(f"workers must be an integer of at least 1, got {workers!r}")
            workers = int(workers)
        scheduler = _configured() if self.scheduler is None else self.scheduler
        client = scheduler if isinstance(scheduler, Client) else None
        processes, resident = None, 0
        described: Mapping[str, Mapping[str, Any]] = {}
        if client is not None:
            check_client(client)
            described = awaited_workers(client)
            kind, workers = "distributed", sum(w["nthreads"] for w in described.values())
            resident = check_workers(client) + _FIRST_TASK
            limit_workers(client)
            if checkpoint is not None:
                checkpoint.check_seen(client)
        else:
            kind = _NAMES.get(scheduler, "") if isinstance(scheduler, str) else ""
            if not kind:
                raise DataError(
                    f"scheduler must be a distributed Client or one of {', '.join(_NAMES)}, "
                    f"got {scheduler!r}"
                )
            default = CPU_COUNT if self.device is None else min(CPU_COUNT, _DEVICE_TASKS)
            workers = workers or dask.config.get("num_workers", None) or default
            if kind == "synchronous":
                workers = 1
            elif kind == "processes":
                processes = WorkerProcesses()
        place, device_memory = None if self.device is None else Device.of(self.device), 0
        if place is not None:
            if client is None:
                device_memory = place.memory()
            else:
                check_workers_have(client, place.name)
                device_memory = min(run_on_workers(client, place.memory).values())
        most = memory_bytes(self.memory_limit, "memory_limit")
        device_limit = memory_bytes(self.device_memory_limit, "device_memory_limit")
        device_limit = min(device_limit, device_memory or sys.maxsize)
        # Of a worker's memory what it fills before it begins to spill; 0: it has no limit.
        share = dask.config.get("distributed.worker.memory.spill") or 1.0
        each = [
            (w["nthreads"], min(most, int(share * (w["memory_limit"] or MEMORY_LIMIT))))
            for w in described.values()
        ]
        free = psutil.virtual_memory().available + psutil.Process().memory_info().rss
        return Executor(
            kind,
            workers,
            int(min(most, MEMORY_LIMIT, free)),
            client,
            tuple(each),
            checkpoint,
            processes,
            place,
            device_memory,
            None if device_limit == sys.maxsize else device_limit,
            resident,
            share if all(limit < most for _, limit in each) else 1.0,
        )

    @contextlib.contextmanager
    def opened(
        self, name: str, depends_on: Mapping[str, Any], *samples: Sample
    ) -> Iterator[Executor]:
        """The place of a run and its memory, with its checkpoint held meanwhile.

        Parameters
        ----------
        name
            What runs, such as the name of an estimator.
        depends_on
            Further dependencies of the results, by name.
        samples
            The rows.

        Raises
        ------
        DataError
            On unusable options, or if another run goes on in the checkpoint.
        StoreError
            If the checkpoint is of another run; the message names what differs.
        ResourceError
            If the cluster has no workers, or they don't see the checkpoint.
        """
        if self.checkpoint is None and self.shard is None:
            yield self.executor()
            return

        def described() -> dict[str, dict[str, str]]:
            place = {} if self.device is None else {"device": self.device}
            return about_run(name, {**depends_on, **place}, *samples)

        with checkpointed_run(self.checkpoint, described, self.shard) as checkpoint:
            yield self.executor(checkpoint)


F = TypeVar("F", bound=Callable[..., Any])


def with_run_options(function: F) -> F:
    """Show the keywords that ``**keywords`` stands for, in the signature and the docstring.

    They and their types are those of the ``TypedDict`` that annotates it, their descriptions those
    of :class:`RunOptions`.
    """
    signature = inspect.signature(function)
    *others, keywords = signature.parameters.values()
    kinds = get_args(keywords.annotation)[0].__annotations__
    shown = (
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in kinds.items()
    )
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*others, *shown]
    )
    entries = re.split(r"\n(?=\w+ : )", inspect.getdoc(RunOptions) or "")
    described = "\n".join(entry for entry in entries if entry.split(" : ")[0] in kinds)
    if function.__doc__ is not None:  # Python leaves it out with -OO
        text = inspect.cleandoc(function.__doc__)
        function.__doc__ = re.sub(r"(?m)^\*\*keywords\n .*$", lambda _: described, text)
    return function


def options_of(keywords: PassKeywords, kind: type[PassKeywords]) -> RunOptions:
    """The options among keywords of this kind; TypeError on others."""
    for name in keywords:
        if name not in kind.__annotations__:
            raise TypeError(
                f"unexpected keyword argument {name!r}: this run takes "
                f"{', '.join(kind.__annotations__)}"
            )
    return RunOptions(**keywords)


def without_limits(executor: Executor) -> Executor:
    """The same for what is no step of a run: on the host, in any memory, not in checkpoints."""
    return replace(
        executor,
        memory=sys.maxsize,
        worker_memory=(),
        checkpoint=None,
        device=None,
        device_memory=0,
        device_limit=None,
    )


def in_this_process(executor: Executor) -> Executor:
    """The same without other threads and processes, for rows in memory; it has no limits."""
    here = without_limits(executor)
    return replace(here, kind="synchronous", workers=1, client=None, processes=None)


def task_graph(
    leaf: Callable[..., Any],
    payloads: Sequence[tuple[Any, ...]],
    merge: Callable[[Any, Any, Any], Any],
    shared: Any,
    name: str,
    token: str,
    attempts: Mapping[int, int] | None = None,
    there: Mapping[int, Any] = MappingProxyType({}),
) -> list[Delayed]:
    """The tasks of the nodes of the tree, each after its parts: the same on every scheduler.

    Parameters
    ----------
    leaf, payloads, merge, shared, name
        See :meth:`Executor.run`.
    token
        In the names of the tasks, and of no other job's.
    attempts
        Numbers of the nodes that are run and of the attempt; default: all nodes for the first time.
    there
        What nodes have given that are not run.
    """
    leaves, merges = len(payloads), tree_merges(len(payloads))
    attempts = attempts or dict.fromkeys(range(leaves + len(merges)), 0)
    # Under a name that has not failed yet.
    plan = f"{name}-plan-{token}-{max(attempts.values())}"
    common = delayed(shared, name=plan, traverse=False)
    call, add = (delayed(f, pure=False, traverse=False) for f in (leaf, merge))
    made: dict[int, Delayed] = {}
    for node in sorted(attempts):
        again = f"-again{attempts[node]}" if attempts[node] else ""
        if node < leaves:
            key = f"{name}-{node}-{token}{again}"
            made[node] = call(common, *payloads[node], dask_key_name=key)
        else:
            key = f"{name}-merge-{node - leaves}-{token}{again}"
            parts = (made[p] if p in made else there[p] for p in merges[node - leaves])
            made[node] = add(common, *parts, dask_key_name=key)
    return list(made.values())


def _has_delayed(payloads: Sequence[tuple[Any, ...]]) -> bool:
    """Whether Dask has something to compute before a leaf runs."""
    return any(unpack_collections(payload)[1] for payload in payloads)


def _sent(pool: ProcessPoolExecutor, leaf: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The leaf, computed by a process while the thread that asks for it waits."""

    def compute(shared: Any, *payload: Any) -> Any:
        (task,) = task_graph(leaf, [payload], leaf, shared, name, uuid4().hex)
        options = {"pool": pool, "num_workers": 1, "chunksize": 1}
        return dask.compute(task, scheduler="processes", **options)[0]

    return compute


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


# The memory of a pass, and its limits


def worker_base_bytes() -> int:
    """What a worker of a cluster holds without a task, where none can be asked."""
    return _PROCESS + _FIRST_TASK


def task_bytes(
    cost: Cost, extent: Extent, run: RowRange, *, on_device: bool = False
) -> tuple[int, int]:
    """Peak of one running task in host memory, and in that of the device on which it computes.

    Where it computes are partial results, the buffers of the reduction and its rows; rows are read
    in host memory, to which the result comes at the end.
    """
    length = extent.strip_rows
    chunk = extent.chunk_rows
    if not length % max(chunk, 1):
        # Two strips, and the chunks of one variable that are on the way, packed and unpacked.
        rows = 2 * length + min(length, _DECODED * chunk)
    elif not chunk % length:
        rows = length + 3 * chunk  # strips are parts of a chunk; likewise
    else:
        rows = 3 * length + 3 * chunk  # rows of a straddled chunk are joined to those of the next
    if extent.selected:
        rows += length  # the rows of a strip that are selected
    if extent.materialised:
        rows += 2 * (run.stop - run.start)
    # The strip in use holds what the pass computes from, the rows on the way what is read for it.
    read = (rows - length) * (extent.columns_read or extent.n_columns)
    read = (length * extent.n_columns + read + _HASH_WORDS * length) * _WORD
    partials = (1 + math.ceil(math.log2(run.strips))) * cost.partial
    # Retained rows of the run, once more while they are joined.
    retained = 2 * cost.retained * min(run.stop - run.start, extent.n_rows) // extent.n_rows
    computing = partials + cost.state + retained
    if not on_device:
        return read + computing, 0
    strips = 2 * length * extent.n_columns * _WORD  # this one, the one before on its way out
    return read + cost.partial + retained, computing + strips


def memory_bytes(limit: str | int | None, name: str) -> int:
    """Bytes of a limit that users give, such as "2GB"; of None more than any machine has."""
    if limit is None:
        return sys.maxsize
    try:
        value = parse_bytes(limit)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{option(name)} must be bytes or a text like '2GB', got {limit!r}"
        ) from error
    if value <= 0:
        raise DataError(f"{option(name)} must be positive, got {limit!r}")
    return int(value)
