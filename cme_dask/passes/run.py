"""``run_pass``: reductions over the rows of a sample, planned, checked, reported and saved.

Whatever goes over the rows goes through here: this file cuts the rows into tasks, predicts the
memory, tells the progress, counts unusable values after a failure, and reads from and writes to
checkpoints.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np

from cme_dask.data.columns import negative_error, nonfinite_error
from cme_dask.data.sample import Sample, no_rows
from cme_dask.data.sources import RowSource, ahead, strips_of, take_rows
from cme_dask.errors import DataError, ShardDone, StoreError, remedy
from cme_dask.numerics.devices import Device
from cme_dask.numerics.folds import Folding, Split
from cme_dask.numerics.reduction import (
    MAX_STRIP,
    BadValues,
    Cost,
    Extent,
    Filled,
    MemoryPlan,
    Reduction,
    RowRange,
    Strip,
    cut_for_chunks,
    plan_ranges,
    reduce_strips,
    strip_length,
)
from cme_dask.numerics.rows import BadValueCounts, Counts, MissingCounts, MissingValues
from cme_dask.passes.checkpoint import (
    PassSums,
    block_rows,
)
from cme_dask.passes.driver import Executor, without_limits
from cme_dask.passes.progress import Listener, pass_event
from cme_dask.passes.publishing import current

if TYPE_CHECKING:
    from cme_dask.numerics.given_location import BesideResiduals
    from cme_dask.numerics.location import Residuals

Array = Any
Summed: TypeAlias = tuple[int, int, tuple[int, tuple[Any, ...]] | None]

FLOPS = 1.5e10
"""A cautious rate of one core, per second: it only chooses the length of tasks."""

NOTHING = Cost()

_DEVICE_FLOPS = 100 * FLOPS  # likewise of a GPU
_READ_SECONDS = 1e-8  # per value
_WRITE_RATE = 3e8  # bytes per second, as cautious as FLOPS
_HELD_BYTES = 1 << 26  # rows that a task holds at once, where it must hold them all

log = logging.getLogger("cme_dask.run")


class PassReport(NamedTuple):
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
    missing
        Rows that the pass left out since they lack a value, and the missing values by column; None
        where missing values are an error.
    """

    rows: int
    strips: int
    tasks: int
    seconds: float
    pass_seconds: float
    tenths: tuple[float, ...]
    memory: MemoryPlan
    resumed_strips: int = 0
    missing: MissingValues | None = None

    @property
    def rows_per_second(self) -> float:
        """Rows per second of ``seconds``."""
        return self.rows / self.seconds

    @property
    def pass_rows_per_second(self) -> float:
        """Rows per second of ``pass_seconds``."""
        return self.rows / self.pass_seconds


def run_pass(
    sample: Sample,
    reductions: Sequence[Reduction[Any, Any]],
    executor: Executor,
    progress: Listener | None = None,
    *,
    around: Cost = NOTHING,
    index: Array | None = None,
    named: Sample | None = None,
) -> tuple[tuple[Any, ...], PassReport]:
    """Reductions over all rows of a sample (of a part, its rows), in one pass.

    Parameters
    ----------
    sample
        The rows.
    reductions
        What to compute; the first one names the pass. Folds, groups and times are read as the one
        with most folds needs them.
    executor
        Where to run, and the memory that is there.
    progress
        Called when a task has ended.
    around
        What the client needs before and after the pass, and holds meanwhile.
    index
        Global indices of the only rows that are read, ascending; default all rows.
    named
        The sample whose unusable values are counted where a row holds some; default this one.

    Returns
    -------
    results : the answer of each reduction
    report : PassReport

    Raises
    ------
    DataError
        On NaN, infinity or unusable weights, with the columns and the first rows; or if no row
        belongs to the part. NaN are no error where the sample leaves out rows that lack a value.
    StoreError
        On damaged chunks, or a checkpoint of another run.
    ResourceError
        If the memory does not suffice; no row has been read then.
    ShardDone
        If only a share of the tasks was to be done, and that is.
    """
    for one in reductions:
        if len(reductions) > 1 and (one.chunk_rows or one.strip_rows):
            raise DataError(f"{one.name!r} writes chunks: give it a pass of its own")
    if not sample.n_rows:
        raise empty_part(sample)
    asked, n_asked = reductions, len(reductions)
    if sample.dropping:
        reductions = [*reductions, MissingCounts()]
    name, chunk_rows = reductions[0].name, reductions[0].chunk_rows
    sample = sample.for_folds(max(one.n_folds for one in reductions))
    shared = Pass.of(sample, reductions, executor, index)
    strip_rows, on_device = reductions[0].strip_rows, shared.device is not None
    extent = extent_of(sample, executor, strip_rows, on_device=on_device)
    for one in reductions:
        around += one.cost(extent)
    runs, memory = plan_pass(around, extent, executor, chunk_rows)
    n, strips = sample.n_rows, sum(run.strips for run in runs)
    info = {"event": "pass started", "pass": name, "rows": n, "tasks": len(runs), "strips": strips}
    log.info("pass %s over %s rows", name, f"{n:,}", extra=info)
    panel = None if executor.client is None else current()
    if panel is not None:
        panel.begin_pass(name, n, len(runs))
    begin, marks = time.perf_counter(), [(0, 0.0)]  # rows that tasks wrote, seconds
    resumed = 0

    def ended(number: int, before: bool = False) -> None:
        nonlocal resumed
        first, last = runs[number].own or (runs[number].start, runs[number].stop)
        resumed += last - first if before else 0
        marks.append((marks[-1][0] + last - first, time.perf_counter() - begin))
        if panel is not None:
            panel.continue_pass(*marks[-1])
        if progress is not None:
            progress(pass_event(name, marks[-1][0], n, marks[-1][1], resumed))

    try:
        if executor.checkpoint is None:
            tasks = [(run, shared.given(sample, run)) for run in runs]
            _, _, (rows, totals) = executor.run(
                _reduce, tasks, _combine, shared=shared, name=name, on_done=ended
            )
        else:
            rows, totals = _checkpointed(executor, shared, sample, extent, runs, ended)
    except BadValues:
        count_bad_values(named or sample, executor)
        raise
    missing = missing_values(sample, totals[-1]) if sample.dropping else None
    if not rows:
        raise empty_part(sample, missing)
    seconds = time.perf_counter() - begin
    # Tasks that run side by side end side by side: one mark per round of them is smooth.
    ends, times = zip(
        marks[0], *marks[executor.workers : -1 : executor.workers], marks[-1], strict=True
    )
    edges = np.interp(np.linspace(0, n, 11), ends, times)
    info |= {"event": "pass ended", "seconds": seconds, "rows_per_second": n / seconds}
    log.info("pass %s: %.3g s", name, seconds, extra=info)
    if panel is not None:
        panel.end_pass(seconds)
    report = PassReport(
        rows=rows,
        strips=strips,
        tasks=len(runs),
        seconds=seconds,
        pass_seconds=seconds,
        tenths=tuple(np.diff(edges).tolist()),
        memory=memory,
        resumed_strips=0 if executor.checkpoint is None else executor.checkpoint.resumed_strips,
        missing=missing,
    )
    pairs = zip(asked, totals[:n_asked], strict=True)
    return tuple(one.finalize(total) for one, total in pairs), report


# What tasks do. What they give is (start, stop, summed): the number of rows in [start, stop) that
# count and their partial results, or None of rows whose block is in the checkpoint already


@dataclass(frozen=True, eq=False)
class Pass:
    """What all tasks of a pass share: what they compute, from which sources and rows.

    Attributes
    ----------
    reductions
        What is computed.
    sources
        What is read; None for sources whose rows each task is given by itself.
    variables
        How many of the sources, the first, are x and y.
    weighted
        Whether weights follow.
    units
        Names of the columns that follow these: ``group``, ``time``.
    folding
        What goes into folds as a whole.
    part
        The part of the rows that counts, or None.
    residuals
        What is made of the rows of x and y, or None.
    first_row
        Global index of the first row of the sources.
    index
        The rows that are read, ascending, shape (k,); None for all.
    dropping
        Whether rows that lack a value are left out.
    filled
        Where missing values of x have been filled in.
    device
        Where tasks compute; None for the host.
    sums
        Partial results in a checkpoint, or None.
    """

    reductions: tuple[Reduction[Any, Any], ...]
    sources: tuple[RowSource | None, ...]
    variables: int
    weighted: bool
    units: tuple[str, ...]
    folding: Folding
    part: Split | None
    residuals: "Residuals | BesideResiduals | None"
    first_row: int
    index: Array | None = None
    dropping: bool = False
    filled: tuple[Filled, ...] = ()
    device: Device | None = None
    sums: PassSums | None = None

    @classmethod
    def of(
        cls,
        sample: Sample,
        reductions: Sequence[Reduction[Any, Any]],
        executor: Executor,
        index: Array | None = None,
    ) -> Self:
        """These reductions of the sources ``sample.reads``, where an executor runs tasks."""
        shares_memory = executor.shares_memory
        on_device = all(one.on_device for one in reductions)
        return cls(
            tuple(reductions),
            tuple(None if s.held_whole(shares_memory) else s for s in sample.reads),
            len(sample.sources),
            sample.weights is not None,
            (*sample.units,),
            sample.folding,
            sample.part,
            sample.residuals,
            sample.first_row,
            index,
            sample.dropping,
            sample.filled,
            executor.device if on_device else None,
        )

    def given(self, sample: Sample, run: RowRange) -> tuple[Any, ...]:
        """The other sources, of the rows of one task."""
        each = zip(sample.reads, self.sources, strict=True)
        return tuple(s.for_task(run.start, run.stop) for s, shared in each if shared is None)

    def strips(self, run: RowRange, given: tuple[RowSource, ...] = ()) -> Iterator[Strip]:
        """The strips of a task, one after the other; one that holds nothing of the part is empty.

        ``given`` are the sources of :meth:`given`.
        """
        own = iter(given)
        sources = [next(own) if source is None else source for source in self.sources]
        blocks: Iterator[tuple[Array, ...]]
        if self.index is not None:
            index = self.index[slice(*np.searchsorted(self.index, [run.start, run.stop]))]
            taken = (
                take_rows(source, index, source.chunk_rows or MAX_STRIP, run.start, run.stop)
                for source in sources
            )
            blocks = iter([(index, *taken)])
        else:
            borders = range(run.start, run.stop, run.length)
            rows_of = (np.arange(low, min(low + run.length, run.stop)) for low in borders)
            read = strips_of(sources, run.start, run.stop, run.length)
            blocks = ((rows, *arrays) for rows, arrays in zip(rows_of, read, strict=True))
            if any(source.chunk_rows is not None for source in sources):
                blocks = ahead(blocks)
        for rows, *arrays in blocks:
            first = self.variables + self.weighted
            beside = first + len(self.units)
            columns = (array[:, 0] for array in arrays[first:beside])
            units = dict(zip(self.units, columns, strict=True))
            weights = arrays[self.variables][:, 0] if self.weighted else None
            parts = tuple(arrays[: self.variables])
            strip = Strip(self.first_row + rows, parts, weights, units, self.folding)
            if self.part is not None:
                selected = self.part.selects(rows, units)  # a part is one of its table
                for values in units.values():
                    selected |= ~np.isfinite(values)  # of no part: selected to be refused
                if not selected.all():
                    strip = strip.only(selected)
                    arrays = [array[selected] for array in arrays]
            if self.dropping:
                strip = strip.without_missing(*arrays[beside:], filled=self.filled)
            if self.residuals is not None:
                folds = strip.folds(self.residuals.n_folds)
                strip = replace(strip, parts=self.residuals(strip.parts, folds))
            if run.own is not None:
                start, stop = int(rows[0]), int(rows[-1]) + 1
                low, high = max(run.own[0], start), min(run.own[1], stop)
                strip = replace(strip, own=slice(low - start, high - start))
            yield strip


def missing_values(sample: Sample, counts: Array) -> MissingValues:
    """What a pass counted, by the names of its columns."""
    names = [name for columns in sample.columns for name in columns.names]
    names += [*(["weights"] if sample.weights is not None else []), *sample.units]
    columns = {name: int(count) for name, count in zip(names, counts[1:], strict=True) if count}
    return MissingValues(int(counts[0]), columns)


def empty_part(sample: Sample, missing: MissingValues | None = None) -> DataError:
    """The error on a sample none of whose rows count."""
    if missing is not None and missing.dropped:
        return all_missing(missing)
    if sample.part is None:
        return DataError("there are no rows: at least one is needed")
    return no_rows(sample.part)


def all_missing(missing: MissingValues | None = None) -> DataError:
    """The error on a sample nearly all of whose rows lack a value."""
    counts = {} if missing is None else missing.columns
    each = ", ".join(f"{name!r} {count:,}" for name, count in counts.items())
    return DataError(
        f"{'nearly all' if missing is None else f'all {missing.dropped:,}'} rows that were read "
        f"lack a value{f' ({each})' if each else ''}: leave out the columns that are nearly always "
        "missing"
    )


def _reduce(shared: Pass, run: RowRange, given: tuple[RowSource, ...] | None) -> Summed:
    """The work of a task; it is given None where its block was done before the pass began."""
    summed, sums = None, shared.sums
    if given is not None and not (sums is not None and sums.has(run.start)):
        place = None if shared.device is None else shared.device.place
        summed = reduce_strips(shared.reductions, shared.strips(run, given), place)
    if sums is not None:
        summed = sums.settle(run.start, run.stop, summed)
    return run.start, run.stop, summed


def _combine(shared: Pass, a: Summed, b: Summed) -> Summed:
    """The result of two neighbours."""
    summed = None
    if a[2] is not None and b[2] is not None:
        pairs = zip(shared.reductions, a[2][1], b[2][1], strict=True)
        summed = a[2][0] + b[2][0], tuple(one.combine(left, right) for one, left, right in pairs)
    if shared.sums is not None:
        summed = shared.sums.settle(a[0], b[1], summed)
    return a[0], b[1], summed


def _checkpointed(
    executor: Executor,
    shared: Pass,
    sample: Sample,
    extent: Extent,
    runs: list[RowRange],
    on_done: Callable[[int, bool], None],
) -> tuple[int, Any]:
    """The sums over all rows of a pass whose partial results are in a checkpoint."""
    checkpoint, name = executor.checkpoint, shared.reductions[0].name
    assert checkpoint is not None
    block = block_rows(extent.n_rows, extent.chunk_rows, extent.on_device)
    computed_from = replace(shared, sources=(), device=None)
    kinds = tuple(dict.fromkeys(kind for one in shared.reductions for kind in one.kinds))
    sums = checkpoint.begin(name, computed_from, extent.n_rows, block, kinds)
    total: tuple[int, Any] | None = sums.read_total()
    if total is not None:
        checkpoint.resumed_strips += sum(run.strips for run in runs)
        for number in range(len(runs)):
            on_done(number, True)
        return total
    done = [sums.has(run.start) for run in runs]
    checkpoint.resumed_strips += sum(r.strips for r, there in zip(runs, done, strict=True) if there)
    share = list(range(len(runs)))
    if checkpoint.shard is not None and not all(done):
        share = [i for i, run in enumerate(runs) if sums.ours(run.start)]
        if all(done[i] for i in share):
            raise ShardDone(_waiting(checkpoint.shard, sums))
    result: Summed = executor.run(
        _reduce,
        [(runs[i], None if done[i] else shared.given(sample, runs[i])) for i in share],
        _combine,
        shared=replace(shared, sums=sums),
        name=name,
        on_done=lambda number: on_done(share[number], done[share[number]]),
    )
    summed = result[2]
    assert summed is not None
    if len(share) < len(runs):
        raise ShardDone(_waiting(checkpoint.shard, sums))
    if checkpoint.shard is None:
        sums.end(summed)
        info = {"event": "pass recorded", "pass": sums.name}
        log.info("the result of %s is in %s", sums.name, sums.folder, extra=info)
    return summed


def _waiting(shard: tuple[int, int] | None, sums: PassSums) -> str:
    i, k = shard or (0, 1)
    return (
        f"shard {i + 1} of {k} has done its share of {sums.name}: when all shards have, "
        + remedy(
            "run the same fit without a shard",
            "repeat the command without --shard",
        )
        + ", which adds them up"
    )


# How a pass is cut into tasks, and the memory that it takes


def extent_of(
    sample: Sample, executor: Executor, strip_rows: int = 0, *, on_device: bool | None = None
) -> Extent:
    """Shape and layout of the rows, in strips of ``strip_rows`` or of the usual length.

    They go to the device of the executor, unless ``on_device`` says that they don't.
    """
    on_device = executor.device is not None if on_device is None else on_device
    n, reads = sample.n_rows, sample.reads
    added = 0 if sample.residuals is None else sample.residuals.added
    return Extent(
        n_rows=n,
        n_columns=sum(source.shape[1] for source in reads) + added,
        strip_rows=strip_rows or strip_length(n, on_device),
        chunk_rows=max(source.chunk_rows or 0 for source in reads),
        in_memory=n * sum(source.row_bytes for source in reads if source.in_memory),
        materialised=any(source.held_whole(executor.shares_memory) for source in reads),
        selected=sample.part is not None or sample.dropping,
        columns_read=sum(source.columns_read for source in reads),
        on_device=on_device,
        device_memory=executor.device_memory if on_device else 0,
    )


def plan_pass(
    cost: Cost,
    extent: Extent,
    executor: Executor,
    chunk_rows: int = 0,
) -> tuple[list[RowRange], MemoryPlan]:
    """How a pass would be cut, and what it would need.

    Parameters
    ----------
    cost
        Of its reductions, and of what is around it.
    extent
        Its rows.
    executor
        Where to run, and the memory that is there.
    chunk_rows
        Rows of the chunks that the tasks write; 0 if they write none.

    Raises
    ------
    ResourceError
        If that does not fit into the memory.
    """
    d = max(extent.n_columns, extent.columns_read)
    flops = _DEVICE_FLOPS if extent.on_device else FLOPS
    seconds = cost.flops / flops + cost.written / _WRITE_RATE + d * _READ_SECONDS
    most = _HELD_BYTES // (8 * d) if extent.materialised else None
    if executor.checkpoint is not None:
        block = block_rows(extent.n_rows, extent.chunk_rows, extent.on_device)
        most = block if most is None else min(most, block)
    runs = plan_ranges(
        extent.n_rows,
        extent.chunk_rows,
        executor.workers,
        seconds,
        most,
        on_device=extent.on_device,
    )
    if chunk_rows:
        runs = cut_for_chunks(runs, chunk_rows, extent.strip_rows)
    return runs, executor.check_pass(cost, extent, runs)


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
    sample = replace(sample, first_row=0)  # messages number the rows as their source does
    counts: Counts
    (counts,), _ = run_pass(sample, [BadValueCounts()], without_limits(executor))
    counted = sample.reads[: len(counts.source_count)]  # those beside only say what is left out
    for source, count, first in zip(counted, counts.source_count, counts.source_first, strict=True):
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
        raise nonfinite_error(dict(zip(names, pairs, strict=True)), missing=counts.missing)
    if counts.negative_count:
        raise negative_error(counts.negative_count, counts.negative_first)
