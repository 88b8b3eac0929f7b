"""``run_pass``: one reduction over the rows of a sample, planned, checked, reported and saved.

Whatever goes over the rows goes through here: this file cuts the rows into tasks, predicts the
memory, tells the progress, counts unusable values after a failure, and reads from and writes to
checkpoints.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from cme_dask.data.columns import negative_error, nonfinite_error
from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource
from cme_dask.errors import ShardDone, StoreError, remedy
from cme_dask.numerics.devices import Device
from cme_dask.numerics.reduction import (
    BadValues,
    Cost,
    Extent,
    Reduction,
    reduce_strips,
)
from cme_dask.numerics.resources import MemoryPlan
from cme_dask.numerics.rows import BadValueCounts, Counts
from cme_dask.passes.checkpoint import PassSums, about_run, block_rows, checkpointed_run
from cme_dask.passes.cluster import Scheduler
from cme_dask.passes.driver import Executor
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.plan import (
    Reading,
    RowRange,
    cut_for_chunks,
    empty_part,
    plan_ranges,
    strip_length,
)
from cme_dask.passes.progress import Listener, listening, pass_event

Array = Any
Result = TypeVar("Result")
Summed: TypeAlias = tuple[int, int, tuple[int, Any] | None]

FLOPS = 1.5e10
"""A cautious rate of one core, per second: it only chooses the length of tasks."""

_READ_SECONDS = 1e-8  # per value
_WRITE_RATE = 3e8  # bytes per second, as cautious as FLOPS
_UNLIMITED = 1 << 62
_HELD_BYTES = 1 << 26  # rows that a task holds at once, where it must hold them all

log = logging.getLogger("cme_dask.run")


@dataclass(frozen=True)
class PassReport:
    """Rows, times and memory of a pass.

    Attributes
    ----------
    rows, strips, tasks
        Its extent: the rows that counted (of a part those of the others do not), and how all were
        cut.
    seconds
        Wall time: of a fit that of the whole call of ``fit``, else that of the pass.
    pass_seconds
        Wall time of the pass; of a fit the one that makes the moments.
    tenths
        Seconds that each tenth of the rows took in the pass, in the order in which rows were
        finished.
    memory
        Predicted peak and limit.
    resumed_strips
        Strips of this and all earlier passes of the run that a checkpoint knew.
    """

    rows: int
    strips: int
    tasks: int
    seconds: float
    pass_seconds: float
    tenths: tuple[float, ...]
    memory: MemoryPlan = field(repr=False)
    resumed_strips: int = 0

    @property
    def rows_per_second(self) -> float:
        """Rows per second of ``seconds``."""
        return self.rows / self.seconds

    @property
    def pass_rows_per_second(self) -> float:
        """Rows per second of ``pass_seconds``."""
        return self.rows / self.pass_seconds


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run.

    Parameters
    ----------
    scheduler : str or distributed.Client, optional
        ``"threads"``, ``"processes"``, ``"synchronous"`` or the client of a cluster; default: what
        Dask is set to, else threads.
    workers : int, optional
        Tasks at once, without a cluster; default: one per core.
    memory_limit : str or int, optional
        Bytes that each place may use, such as ``"2GB"``; default: all available memory.
    progress : bool or callable, optional
        True shows a bar; a function is called with each :class:`cme_dask.Event`.
    checkpoint : path, optional
        Folder for partial results, on a filesystem that all workers share: an interrupted run
        resumes from it.
    shard : (int, int), optional
        (i, k): compute the i-th of k shares into the checkpoint, and no more.
    device : str or device, optional
        Where the reduction is computed: ``"cuda"`` or ``"cuda:1"`` for a GPU by CuPy, or a device
        of an array library that follows the array API standard, such as ``torch.device("cuda")``.
        Rows are read and checked in host memory and go to the device strip by strip; partial
        results come back once per task. Default: NumPy, in host memory.
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

    @contextlib.contextmanager
    def budget(
        self, name: str, depends_on: Mapping[str, Any], sample: Sample
    ) -> Iterator[MemoryBudget]:
        """The place of a run and its memory, with its checkpoint held meanwhile.

        Parameters
        ----------
        name
            What runs, such as the name of an estimator.
        depends_on
            Further dependencies of the results, by name.
        sample
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

        def described() -> dict[str, dict[str, str]]:
            place = {} if self.device is None else {"device": self.device}
            return about_run(name, {**depends_on, **place}, sample, {})

        with checkpointed_run(self.checkpoint, described, self.shard) as checkpoint:
            executor = Executor.resolve(self.scheduler, self.workers, checkpoint)
            if self.device is not None:
                executor = executor.on(self.device)
            yield MemoryBudget.of(executor, self.memory_limit, self.device_memory_limit)

    @contextlib.contextmanager
    def opened(
        self, name: str, depends_on: Mapping[str, Any], sample: Sample
    ) -> Iterator[tuple[MemoryBudget, Listener | None]]:
        """The same, and the callback for the progress of the only pass."""
        with self.budget(name, depends_on, sample) as budget, listening(self.progress) as listener:
            yield budget, listener


def run_pass(
    sample: Sample,
    reduction: Reduction[Any, Result],
    budget: MemoryBudget,
    progress: Listener | None = None,
    *,
    alone: Mapping[str, int] | None = None,
    held: int = 0,
    index: Array | None = None,
    named: Sample | None = None,
) -> tuple[Result, PassReport]:
    """One reduction over all rows of a sample (of a part, its rows), in one pass.

    Parameters
    ----------
    sample
        The rows.
    reduction
        What to compute.
    budget
        Where to run, and the memory that is there.
    progress
        Called when a task has ended.
    alone, held
        See :meth:`MemoryBudget.check_pass`.
    index
        Global indices of the only rows that are read, ascending; default all rows.
    named
        The sample whose unusable values are counted where a row holds some; default this one.

    Raises
    ------
    DataError
        On NaN, infinity or unusable weights, with the columns and the first rows; or if no row
        belongs to the part.
    StoreError
        On damaged chunks, or a checkpoint of another run.
    ResourceError
        If the memory does not suffice; no row has been read then.
    ShardDone
        If only a share of the tasks was to be done, and that is.
    """
    executor = budget.executor
    sample = sample.for_folds(reduction.n_folds)
    extent = extent_of(sample, executor, reduction.strip_rows)
    cost, chunk = reduction.cost(extent), reduction.chunk_rows
    runs, memory = plan_pass(cost, extent, budget, chunk, alone=alone, held=held)
    reading = Reading.of(sample, executor.shares_memory, index)
    name, n, strips = reduction.name, sample.n_rows, sum(run.strips for run in runs)
    info = {"event": "pass started", "pass": name, "rows": n, "tasks": len(runs), "strips": strips}
    log.info("pass %s over %s rows", name, f"{n:,}", extra=info)
    begin, marks = time.perf_counter(), [(0, 0, 0.0)]

    def ended(number: int) -> None:
        first, last = runs[number].own or (runs[number].start, runs[number].stop)
        rows, done = marks[-1][0] + last - first, marks[-1][1] + runs[number].strips
        marks.append((rows, done, time.perf_counter() - begin))
        if progress is not None:
            progress(pass_event(name, rows, n, marks[-1][2]))

    shared = _Shared(reduction, reading, device=executor.device)
    try:
        if executor.checkpoint is None:
            tasks = [(run, reading.given(sample, run)) for run in runs]
            _, _, (rows, total) = executor.run(
                _reduce, tasks, _combine, shared=shared, name=reduction.name, on_done=ended
            )
        else:
            rows, total = _checkpointed(executor, shared, sample, extent, runs, ended)
    except BadValues:
        count_bad_values(named or sample, executor)
        raise
    if not rows:
        raise empty_part(sample)
    report = _report(reduction.name, rows, marks, time.perf_counter() - begin, budget, memory)
    return reduction.finalize(total), report


# What tasks do. What they give is (start, stop, summed): the number of rows in [start, stop) that
# count and their partial result, or None of rows whose block is in the checkpoint already


@dataclass(frozen=True, eq=False)
class _Shared:
    """What all tasks of a pass share; ``sums`` are those in its checkpoint."""

    reduction: Reduction[Any, Any]
    reading: Reading
    sums: PassSums | None = None
    device: Device | None = None


def _reduce(shared: _Shared, run: RowRange, given: tuple[RowSource, ...] | None) -> Summed:
    """The work of a task; it is given None where its block was done before the pass began."""
    if given is None or (shared.sums is not None and shared.sums.has(run)):
        return _in_checkpoint(shared.sums, run.start, run.stop, None)
    place = None if shared.device is None else shared.device.place
    summed = reduce_strips(shared.reduction, shared.reading.strips(run, given), place)
    return _in_checkpoint(shared.sums, run.start, run.stop, summed)


def _combine(shared: _Shared, a: Summed, b: Summed) -> Summed:
    """The result of two neighbours."""
    summed = None
    if a[2] is not None and b[2] is not None:
        summed = a[2][0] + b[2][0], shared.reduction.combine(a[2][1], b[2][1])
    return _in_checkpoint(shared.sums, a[0], b[1], summed)


def _in_checkpoint(
    sums: PassSums | None, start: int, stop: int, summed: tuple[int, Any] | None
) -> Summed:
    """The result of these rows: if they are a block it is written, or read where it is None."""
    if sums is not None and sums.is_block(start, stop):
        summed = sums.write(start, summed)
    return start, stop, summed


def _checkpointed(
    executor: Executor,
    shared: _Shared,
    sample: Sample,
    extent: Extent,
    runs: list[RowRange],
    on_done: Callable[[int], None],
) -> tuple[int, Any]:
    """The sum over all rows of a pass whose partial results are in a checkpoint."""
    checkpoint, reduction, reading = executor.checkpoint, shared.reduction, shared.reading
    assert checkpoint is not None
    block = block_rows(extent.n_rows, extent.chunk_rows)
    computed_from = reduction, replace(reading, sources=())
    sums = checkpoint.begin(reduction.name, computed_from, extent.n_rows, block, reduction.kinds)
    total: tuple[int, Any] | None = sums.read_total()
    if total is not None:
        checkpoint.resumed_strips += sum(run.strips for run in runs)
        for number in range(len(runs)):
            on_done(number)
        return total
    done = [sums.has(run) for run in runs]
    checkpoint.resumed_strips += sum(r.strips for r, there in zip(runs, done, strict=True) if there)
    share = list(range(len(runs)))
    if checkpoint.shard is not None and not all(done):
        share = [i for i, run in enumerate(runs) if sums.ours(run)]
        if all(done[i] for i in share):
            raise ShardDone(_waiting(checkpoint.shard, sums))
    result: Summed = executor.run(
        _reduce,
        [(runs[i], None if done[i] else reading.given(sample, runs[i])) for i in share],
        _combine,
        shared=replace(shared, sums=sums),
        name=reduction.name,
        on_done=lambda number: on_done(share[number]),
    )
    summed = result[2]
    assert summed is not None
    if len(share) < len(runs):
        raise ShardDone(_waiting(checkpoint.shard, sums))
    if checkpoint.shard is None:
        sums.end(summed)
        info = {"event": "kept", "pass": sums.name}
        log.info("the result of %s is in %s", sums.name, sums.folder, extra=info)
    return summed


def _waiting(shard: tuple[int, int] | None, sums: PassSums) -> str:
    i, k = shard or (0, 1)
    return (
        f"shard {i + 1} of {k} has done its share of {sums.name}: when all shards have, "
        + remedy(
            "run the same fit without a shard",
            "repeat the command with --resume in place of --shard",
        )
        + ", which adds them up"
    )


# How a pass is cut into tasks, and the memory that it takes


def extent_of(sample: Sample, executor: Executor, strip_rows: int = 0) -> Extent:
    """Shape and layout of the rows, in strips of ``strip_rows`` or of the usual length."""
    n, reads = sample.n_rows, sample.reads
    return Extent(
        n_rows=n,
        n_columns=sum(source.shape[1] for source in reads),
        strip_rows=strip_rows or strip_length(n),
        chunk_rows=max(source.chunk_rows or 0 for source in reads),
        in_memory=n * sum(source.row_bytes for source in reads if source.in_memory),
        materialised=any(source.held_whole(executor.shares_memory) for source in reads),
        selected=sample.part is not None,
        columns_read=sum(source.columns_read for source in reads),
        device_memory=executor.device_memory,
    )


def plan_pass(
    cost: Cost,
    extent: Extent,
    budget: MemoryBudget,
    chunk_rows: int = 0,
    *,
    alone: Mapping[str, int] | None = None,
    held: int = 0,
) -> tuple[list[RowRange], MemoryPlan]:
    """How a pass would be cut, and what it would need.

    Parameters
    ----------
    cost
        Of its reduction.
    extent
        Its rows.
    budget
        Where to run, and the memory that is there.
    chunk_rows
        Rows of the chunks that the tasks write; 0 if they write none.
    alone, held
        See :meth:`MemoryBudget.check_pass`.

    Raises
    ------
    ResourceError
        If that does not fit into the budget.
    """
    executor, d = budget.executor, max(extent.n_columns, extent.columns_read)
    seconds = cost.flops / FLOPS + cost.written / _WRITE_RATE + d * _READ_SECONDS
    most = _HELD_BYTES // (8 * d) if extent.materialised else None
    if executor.checkpoint is not None:
        block = block_rows(extent.n_rows, extent.chunk_rows)
        most = block if most is None else min(most, block)
    runs = plan_ranges(extent.n_rows, extent.chunk_rows, executor.workers, seconds, most)
    if chunk_rows:
        runs = cut_for_chunks(runs, chunk_rows, extent.strip_rows)
    return runs, budget.check_pass(cost, extent, runs, alone, held)


def _report(
    name: str,
    rows: int,
    marks: list[tuple[int, int, float]],
    seconds: float,
    budget: MemoryBudget,
    memory: MemoryPlan,
) -> PassReport:
    """The report of a pass, from the rows, strips and seconds at the end of each task; logged.

    ``rows`` are those that counted.
    """
    workers, checkpoint = budget.executor.workers, budget.executor.checkpoint
    # Tasks that run side by side end side by side: one mark per round of them is smooth.
    ends, strips, times = zip(marks[0], *marks[workers:-1:workers], marks[-1], strict=True)
    edges = np.interp(np.linspace(0, ends[-1], 11), ends, times)
    figures = {
        "pass": name,
        "rows": ends[-1],
        "tasks": len(marks) - 1,
        "strips": strips[-1],
        "seconds": seconds,
        "rows_per_second": ends[-1] / seconds,
    }
    log.info("pass %s: %.3g s", name, seconds, extra={"event": "pass ended", **figures})
    return PassReport(
        rows=rows,
        strips=strips[-1],
        tasks=len(marks) - 1,
        seconds=seconds,
        pass_seconds=seconds,
        tenths=tuple(np.diff(edges).tolist()),
        memory=memory,
        resumed_strips=0 if checkpoint is None else checkpoint.resumed_strips,
    )


# After a failure only: one more pass that counts every unusable value and names the first


def count_bad_values(sample: Sample, executor: Executor) -> None:
    """Raise the error that names every column with unusable values; return if there is none.

    Raises
    ------
    DataError
        With columns, counts and first rows of NaN and infinities, or of negative weights. Of a part
        only its rows count; a row whose time or group is unusable may belong to any.
    StoreError
        If the NaN stand for a chunk that is missing from the store.
    """
    # What a failure leads to is no step of a run.
    executor = replace(executor, checkpoint=None, device=None, device_memory=0)
    sample = replace(sample, first_row=0)  # messages number the rows as their source does
    unlimited = MemoryBudget(executor, _UNLIMITED, ())
    counts: Counts = run_pass(sample, BadValueCounts(), unlimited)[0]
    for source, count, first in zip(
        sample.reads, counts.source_count, counts.source_first, strict=True
    ):
        missing = source.missing_chunks(first, first + 1) if count else []
        if missing:
            raise StoreError(
                f"chunk {missing[0]} of {sample.location} is missing: restore it from a copy or "
                "write the store again"
            )
    names = [name for columns in sample.columns for name in columns.names]
    if sample.weights is not None:
        names.append("weights")
    names += sample.units
    if counts.column_count.any():
        pairs = zip(counts.column_count, counts.column_first, strict=True)
        raise nonfinite_error(dict(zip(names, pairs, strict=True)))
    if counts.negative_count:
        raise negative_error(counts.negative_count, counts.negative_first)
