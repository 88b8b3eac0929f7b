"""The predicted memory of a pass, and the refusal of one that does not fit."""

import functools
import math
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import dask
import psutil
from dask.utils import format_bytes, parse_bytes
from distributed.system import MEMORY_LIMIT

from cme_dask.errors import DataError, ResourceError, option
from cme_dask.numerics.reduction import Cost, Extent
from cme_dask.numerics.resources import MemoryPlan
from cme_dask.passes.cluster import described_workers
from cme_dask.passes.driver import Executor
from cme_dask.passes.plan import RowRange

A_WORKER = "a worker"
"""The place of a prediction that is about a worker of a cluster."""

_WORD = 8
_HASH_WORDS = 10  # per row of a strip: its hash on the way, its fold and its cell, their order
_PROCESS = 215 << 20  # interpreter and libraries
_WORKER = 80 << 20  # of a cluster's worker: it loads fewer, and some pages it shares with others
_CHILD = 170 << 20  # of each process that is started: it shares pages of the libraries
_ROW_SAMPLE_WORDS = 4  # per row of the row sample beside its values: key, index, weight, importance
_DECODED = 10  # chunks that Zarr decodes at once


def task_bytes(
    cost: Cost, extent: Extent, run: RowRange, *, on_device: bool = False
) -> tuple[int, int]:
    """Peak of one running task in host memory, and in that of the device on which it computes.

    Where it computes are partial results, the buffers of the reduction and its rows; rows are read
    in host memory, to which the result comes at the end.
    """
    length = extent.strip_rows
    rows = _read_rows(length, extent.chunk_rows)
    if extent.selected:
        rows += length  # the rows of a strip that are selected
    if extent.materialised:
        rows += 2 * run.rows
    # The strip in use holds what the pass computes from, the rows on the way what is read for it.
    read = (rows - length) * max(extent.n_columns, extent.columns_read)
    read = (length * extent.n_columns + read + _HASH_WORDS * length) * _WORD
    partials = (1 + math.ceil(math.log2(run.strips))) * cost.partial
    # Retained rows of the run, once more while they are joined.
    retained = 2 * cost.retained * min(run.rows, extent.n_rows) // extent.n_rows
    computing = partials + cost.state + retained
    if not on_device:
        return read + computing, 0
    strips = 2 * length * extent.n_columns * _WORD  # this one, the one before on its way out
    return read + cost.partial + retained, computing + strips


def _read_rows(length: int, chunk: int) -> int:
    """Rows that reading a strip takes while the one before it is in use."""
    if not length % max(chunk, 1):
        # Two strips, and the chunks of one variable that are on the way, packed and unpacked.
        return 2 * length + min(length, _DECODED * chunk)
    if not chunk % length:
        return length + 3 * chunk  # strips are parts of a chunk; likewise
    return 3 * length + 3 * chunk  # rows of a straddled chunk are joined to those of the next


def waiting_bytes(cost: Cost, tasks: int) -> int:
    """Finished partial results that wait for their neighbour in the tree, in each process."""
    return math.ceil(math.log2(tasks)) * cost.partial + cost.retained + cost.process


def row_sample_bytes(rows: int, columns: int) -> int:
    """What a row sample takes, of so many columns of x, y and weights together."""
    return rows * (columns + _ROW_SAMPLE_WORDS) * _WORD


@dataclass(frozen=True)
class MemoryBudget:
    """What the places of a run may use.

    Attributes
    ----------
    executor
        Where tasks run.
    client
        Bytes for this process (and, without a cluster, for the processes it starts).
    workers
        Threads of each worker of a cluster, and the bytes that it fills before it begins to spill;
        empty without one.
    device
        Bytes of the device on which tasks compute; None for any number.
    """

    executor: Executor
    client: int
    workers: tuple[tuple[int, int], ...]
    device: int | None = None

    @classmethod
    def of(
        cls, executor: Executor, limit: str | int | None, device_limit: str | int | None = None
    ) -> "MemoryBudget":
        """From what machine and workers have, and at most ``limit`` ("2GB") each.

        Of a device likewise, and at most ``device_limit``.

        Raises
        ------
        DataError
            If the limit is no positive number of bytes.
        """
        most = _bytes(limit)
        device = min(
            _bytes(device_limit, "device_memory_limit"), executor.device_memory or sys.maxsize
        )
        workers = []
        if executor.client is not None:
            described = described_workers(executor.client).values()
            workers = [(w["nthreads"], min(most, _usable(w["memory_limit"]))) for w in described]
        free = psutil.virtual_memory().available + psutil.Process().memory_info().rss
        here = int(min(most, MEMORY_LIMIT, free))
        return cls(executor, here, tuple(workers), None if device == sys.maxsize else device)

    def check_pass(
        self,
        cost: Cost,
        extent: Extent,
        runs: list[RowRange],
        alone: Mapping[str, int] | None = None,
        held: int = 0,
    ) -> MemoryPlan:
        """Predict the peak of a pass, and of what comes before and after it.

        Parameters
        ----------
        cost, extent, runs
            What its reduction takes, its rows and its tasks.
        alone
            Bytes that the client needs while no task runs, by the name of the phase.
        held
            Bytes that the client holds all the time, beside rows that were given in memory.

        Raises
        ------
        ResourceError
            If it does not fit; the message says what to lower.
        """
        longest = max(runs, key=operator.attrgetter("rows"))
        device = self.executor.device is not None
        task, on_device = task_bytes(cost, extent, longest, on_device=device)
        if self.executor.kind == "processes":  # of which each runs one task
            task += cost.process
        waiting = waiting_bytes(cost, len(runs))
        place, base = self._here, _PROCESS + extent.in_memory + held
        plans = [MemoryPlan(base + v, self.client, place, k) for k, v in (alone or {}).items()]
        if self.workers:
            plans += [
                MemoryPlan(_WORKER + threads * task + waiting, limit, A_WORKER)
                for threads, limit in self.workers
            ]
        else:
            processes = self.executor.workers if self.executor.kind == "processes" else 0
            running = processes * _CHILD + self.executor.workers * task + waiting
            plans.append(MemoryPlan(base + running, self.client, place))
        if self.device is not None:
            at_once = max((threads for threads, _ in self.workers), default=self.executor.workers)
            plans.append(MemoryPlan(at_once * on_device, self.device, "the device"))
        worst = functools.reduce(MemoryPlan.or_tighter, plans)
        if worst.predicted > worst.limit:
            raise ResourceError(_refusal(cost, extent, self.executor, worst))
        return worst

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
        plan = MemoryPlan(_PROCESS + held + need, self.client, self._here, phase)
        if plan.predicted > plan.limit:
            raise ResourceError(
                f"{plan.place} would need {format_bytes(plan.predicted)} for {phase}, the limit is "
                f"{format_bytes(plan.limit)}: {remedy}"
            )
        return plan

    @property
    def _here(self) -> str:
        return "the client" if self.workers else "this machine"


def _usable(limit: int) -> int:
    """Of a worker's memory what it fills before it begins to spill; 0: it has no limit."""
    share = dask.config.get("distributed.worker.memory.spill") or 1.0
    return int(share * (limit or MEMORY_LIMIT))


def _bytes(limit: str | int | None, name: str = "memory_limit") -> int:
    if limit is None:
        return sys.maxsize
    try:
        value = parse_bytes(limit)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{option(name)} must be bytes or a text like '2GB', got {limit!r}"
        ) from error
    if value <= 0:
        raise DataError(f"{option(name)} must be positive, got {limit!r}")
    return int(value)


def _refusal(cost: Cost, extent: Extent, executor: Executor, plan: MemoryPlan) -> str:
    remedies = list(cost.remedies)
    if executor.workers > 1:
        remedies.append(f"fewer than {executor.workers} workers or threads")
    if extent.chunk_rows > extent.strip_rows:
        columns = max(extent.n_columns, extent.columns_read)
        reading = columns * _WORD * 3 * extent.chunk_rows
        first = 0 if 2 * reading > plan.predicted else len(remedies)
        remedies.insert(
            first,
            f"chunks of fewer rows than {extent.chunk_rows:,}, which are read whole "
            "(cme-dask rechunk)",
        )
    subject = f"{cost.subject} and " if cost.subject else ""
    advice = f": {', or '.join(remedies)}" if remedies else ""
    return (
        f"{plan.place} would need {format_bytes(plan.predicted)} for {subject}"
        f"{executor.workers} tasks at once, the limit is {format_bytes(plan.limit)}{advice}"
    )
