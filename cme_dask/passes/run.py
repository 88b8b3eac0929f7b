"""Passes over the rows: how a job runs over them, resumes, and names bad values."""

import logging
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import numpy as np

from cme_dask.data.columns import negative_error, nonfinite_error
from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource, ZarrSource
from cme_dask.errors import DataError, ShardDone, StoreError
from cme_dask.numerics.blocks import MomentSums
from cme_dask.numerics.cells import CellSpec, CellSums, StripCells, hashes_of
from cme_dask.numerics.moments import MomentSpec, StripMoments
from cme_dask.numerics.resources import MemoryPlan
from cme_dask.passes.checkpoint import KeptPass, block_rows
from cme_dask.passes.driver import Executor
from cme_dask.passes.memory import MemoryBudget, PassShape
from cme_dask.passes.observing import logged_pass
from cme_dask.passes.plan import (
    Reading,
    Run,
    Strip,
    Together,
    Tree,
    empty_part,
    plan_runs,
    strip_length,
    strips_of,
    tree_sum,
)
from cme_dask.passes.sources import DaskSource, for_task

# A pass whose sums are kept in a checkpoint: what is done is read, what is not is run


log = logging.getLogger("cme_dask.run")


@dataclass(frozen=True)
class Pass:
    """A pass over rows.

    Attributes
    ----------
    job, merge, shared
        As in :meth:`Executor.run`; the job is called with a run, how it reads, and its sources.
    reading
        How tasks read.
    runs
        Its tasks.
    given
        The sources of a run.
    name
        Of the tasks.
    """

    job: Callable[..., Any]
    merge: Callable[[Any, Any], Any]
    shared: Any
    reading: Reading
    runs: list[Run]
    given: Callable[[Run], list[Any]]
    name: str


def run_kept(
    asked: Pass, executor: Executor, n_rows: int, block: int, on_done: Callable[[int], None]
) -> Any:
    """The sum over all runs, kept in the checkpoint of the executor.

    Parameters
    ----------
    asked
        The pass.
    executor
        Where it runs.
    n_rows, block
        Number of rows, and of rows in a block.
    on_done
        See :meth:`Executor.run`.

    Raises
    ------
    StoreError
        If the checkpoint is of another run, or damaged.
    ShardDone
        If only a share was to be done, and that is.
    """
    checkpoint, runs = executor.checkpoint, asked.runs
    assert checkpoint is not None
    computed_from = (asked.job, asked.merge, asked.shared, asked.reading)
    kept = checkpoint.begin(asked.name, computed_from, n_rows, block)
    total = kept.read_total()
    if total is not None:
        checkpoint.resumed_strips += sum(run.strips for run in runs)
        for number in range(len(runs)):
            on_done(number)
        return total
    done = [kept.has(run) for run in runs]
    checkpoint.resumed_strips += sum(r.strips for r, there in zip(runs, done, strict=True) if there)
    share = list(range(len(runs)))
    if checkpoint.shard is not None and not all(done):
        share = [i for i, run in enumerate(runs) if kept.ours(run)]
        finished = all(done[i] for i in share)
        if finished:
            raise ShardDone(_waiting(checkpoint.shard, kept))
    value = executor.run(
        _Kept(asked.job, kept),
        [(runs[i], asked.reading, *(() if done[i] else asked.given(runs[i]))) for i in share],
        partial(_merge, asked.merge),
        shared=asked.shared,
        name=asked.name,
        on_done=lambda number: on_done(share[number]),
        after=_after(kept, [runs[i] for i in share]),
    )
    if len(share) < len(runs):
        raise ShardDone(_waiting(checkpoint.shard, kept))
    if checkpoint.shard is None:
        kept.end(value)
        log.info(
            "%s is kept in %s", kept.name, kept.folder, extra={"event": "kept", "pass": kept.name}
        )
    return value


def _waiting(shard: tuple[int, int] | None, kept: KeptPass) -> str:
    i, k = shard or (0, 1)
    return (
        f"shard {i + 1} of {k} has done its share of {kept.name}: when all shards have, run the "
        "same fit without a shard, which adds them up"
    )


@dataclass(frozen=True)
class _Kept:
    """The work of a task, unless the block of its rows is done: then None stands for it."""

    job: Callable[..., Any]
    kept: KeptPass

    def __call__(self, shared: Any, run: Run, *given: Any) -> Any:
        # Of a block that was done before there are no sources, whatever this worker sees.
        return None if len(given) < 2 or self.kept.has(run) else self.job(shared, run, *given)


def _merge(merge: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    return None if a is None or b is None else merge(a, b)


def _after(kept: KeptPass, runs: list[Run]) -> dict[int, Callable[[Any], Any]]:
    """Nodes that are blocks: their sums are written, or read where they were."""
    after: dict[int, Callable[[Any], Any]] = {}
    for node, (first, last) in enumerate(Tree.over(len(runs)).spans):
        start, stop = runs[first].start, runs[last - 1].stop
        if start % kept.block == 0 and stop == min(start + kept.block, kept.n_rows):
            after[node] = partial(_keep, kept, start)
    return after


def _keep(kept: KeptPass, row: int, value: Any) -> Any:
    return kept.write(row, value)


# Passes over the rows: how a job runs over them, and the pass that makes the moments


FLOPS = 1.5e10
"""A cautious rate of one core, per second: it only chooses the length of tasks."""

_READ_SECONDS = 1e-8  # per value
_CELL_SECONDS = 6e-8  # per row and variable whose rows are summed by cell
_HELD_BYTES = 1 << 26  # rows that a task holds at once, where it must hold them all


@dataclass(frozen=True)
class PassProgress:
    """How far a pass is."""

    name: str
    rows: int
    rows_total: int
    strips: int
    strips_total: int
    seconds: float


@dataclass(frozen=True)
class PassReport:
    """What a pass did.

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


def run_over_rows(
    sample: Sample,
    executor: Executor,
    job: Callable[..., Any],
    merge: Callable[[Any, Any], Any],
    *,
    shared: Any = None,
    name: str = "read-strips",
    runs: list[Run] | None = None,
    on_done: Callable[[int], None] = lambda number: None,
) -> Any:
    """``job(shared, run, reading, *sources)`` over all runs, merged along the fixed tree.

    Parameters
    ----------
    sample
        The rows; the job is told by a :class:`Reading` which sources are what.
    executor
        Where to run.
    job, merge, shared, name, on_done
        See :meth:`Executor.run`.
    runs
        Default: cut for a job that does little more than read.
    """
    runs = plan_sample(sample, executor, 0.0) if runs is None else runs
    reading = Reading.of(sample)

    def given(run: Run) -> list[Any]:
        return [for_task(s, run.start, run.stop, executor.shares_memory) for s in sample.reads]

    with logged_pass(name, sample.n_rows, runs):
        if executor.checkpoint is not None:
            asked = Pass(job, merge, shared, reading, runs, given, name)
            block = block_rows(sample.n_rows, _chunk_rows(sample))
            return run_kept(asked, executor, sample.n_rows, block, on_done)
        payloads = [(run, reading, *given(run)) for run in runs]
        return executor.run(job, payloads, merge, shared=shared, name=name, on_done=on_done)


def _chunk_rows(sample: Sample) -> int:
    """Rows of the largest storage chunk; 0 for arrays in memory."""
    return max(source.chunk_rows or 0 for source in sample.reads)


def plan_sample(sample: Sample, executor: Executor, seconds_per_row: float) -> list[Run]:
    """Cut the rows of a sample into tasks for a job of this cost beside reading."""
    chunk = _chunk_rows(sample)
    values = sum(source.shape[1] for source in sample.reads)
    seconds = seconds_per_row + values * _READ_SECONDS
    most = _HELD_BYTES // (8 * values) if materialised(sample, executor) else None
    if executor.checkpoint is not None:
        block = block_rows(sample.n_rows, chunk)
        most = block if most is None else min(most, block)
    return plan_runs(sample.n_rows, chunk, executor.workers, seconds, most)


def moment_pass(
    sample: Sample,
    spec: MomentSpec,
    budget: MemoryBudget,
    progress: Callable[[PassProgress], None] | None = None,
    *,
    sample_rows: int = 0,
) -> tuple[MomentSums, PassReport]:
    """All moments of a sample in one pass over its rows.

    Parameters
    ----------
    sample
        The rows.
    spec
        What to compute.
    budget
        Where to run, and the memory that is there.
    progress
        Called when a task has ended.
    sample_rows
        See :func:`predict_moments`.

    Raises
    ------
    BadValues
        On NaN, infinity or unusable weights.
    DataError
        On all-zero weights, or functions that fail.
    StoreError
        On damaged chunks.
    ResourceError
        If the memory does not suffice; no row has been read then.
    """
    (moments,), _, report = moments_together(
        sample, [spec], budget, progress, sample_rows=sample_rows
    )
    return moments, report


def moments_together(
    sample: Sample,
    specs: Sequence[MomentSpec],
    budget: MemoryBudget,
    progress: Callable[[PassProgress], None] | None = None,
    *,
    sample_rows: int = 0,
    cells: Sequence[CellSpec] = (),
) -> tuple[tuple[MomentSums, ...], tuple[CellSums, ...], PassReport]:
    """Several sets of moments of the same rows in one pass over them, and sums by cell.

    Parameters
    ----------
    specs
        What to compute, with the same number of folds.
    cells
        Of the first variables, one after the other: the cells whose rows are summed.
    sample, budget, progress, sample_rows
        As in :func:`moment_pass`, and so are the errors.
    """
    n_folds = specs[0].n_folds
    executor, sample = budget.executor, sample.for_folds(n_folds)
    runs, plan = predict_moments(
        sample,
        tuple(rank for spec in specs for rank in spec.ranks),
        together_width(specs),
        n_folds,
        budget,
        sample_rows=sample_rows,
        cells=cells,
    )
    clock = PassClock(runs, executor.workers, progress)
    found = run_over_rows(
        sample,
        executor,
        _strip_moments,
        operator.add,
        shared=(tuple(specs), tuple(cells)),
        name="strip-moments",
        runs=runs,
        on_done=clock.done,
    )
    made, summed = found.each[: len(specs)], found.each[len(specs) :]
    for moments in made:
        total = moments.total()
        if not total.n_rows:
            raise empty_part(sample)
        if not (np.isfinite(total.gram).all() and np.isfinite(total.traces).all()):
            raise DataError(
                "sums over the rows overflow: give columns, weights and functions in units that "
                "make their values smaller"
            )
        if not float(total.weights[0]) >= np.finfo(np.float64).tiny:
            raise DataError("all weights are zero: at least one row needs a positive weight")
    newton = tuple(spec.newton(moments) for spec, moments in zip(specs, made, strict=True))
    kept = executor.checkpoint
    resumed = 0 if kept is None else kept.resumed_strips
    report = replace(clock.report(plan), rows=newton[0].n_rows, resumed_strips=resumed)
    return newton, summed, report


def together_width(specs: Sequence[MomentSpec]) -> int:
    """Return the width of one set of moments that takes as much as all of these."""
    return math.isqrt(sum(spec.width**2 for spec in specs) - 1) + 1


def predict_moments(
    sample: Sample,
    ranks: tuple[int, ...],
    width: int,
    n_folds: int,
    budget: MemoryBudget,
    *,
    sample_rows: int = 0,
    cells: Sequence[CellSpec] = (),
) -> tuple[list[Run], MemoryPlan]:
    """How the moment pass would be cut, and what the fit would need.

    Parameters
    ----------
    sample
        The rows.
    ranks, width, n_folds
        Of the moments.
    budget
        Where to run, and the memory that is there.
    sample_rows
        Rows of the row sample if pivots are chosen from it: that takes memory before the pass.
    cells
        Whose rows are summed.

    Raises
    ------
    ResourceError
        If that does not fit into the budget.
    """
    sample = sample.for_folds(n_folds)
    d = sum(source.shape[1] for source in sample.reads)
    seconds = (width**2 + 2 * width * d) / FLOPS + _CELL_SECONDS * len(cells)
    runs = plan_sample(sample, budget.executor, seconds)
    shape = PassShape(
        n_rows=sample.n_rows,
        n_columns=d,
        chunk_rows=_chunk_rows(sample),
        materialised=materialised(sample, budget.executor),
        ranks=ranks,
        width=width,
        n_folds=n_folds,
        sample_rows=sample_rows,
        array_bytes=array_bytes(sample),
        cell_words=sum(spec.words(n_folds) for spec in cells),
        cell_block=sum(spec.block_words(strip_length(sample.n_rows)) for spec in cells),
        kept_words=sum(spec.kept_words for spec in cells),
        selected=sample.part is not None,
    )
    return runs, budget.check_pass(shape, runs)


def array_bytes(sample: Sample) -> int:
    """What the rows take that were given in the memory of this process."""
    return sum(s.row_bytes for s in sample.reads if s.in_memory) * sample.n_rows


def materialised(sample: Sample, executor: Executor) -> bool:
    """Whether tasks are given their rows instead of reading them strip by strip."""
    copied = not executor.shares_memory and any(s.in_memory for s in sample.reads)
    return copied or any(isinstance(s, DaskSource) for s in sample.reads)


def _strip_moments(
    shared: tuple[tuple[MomentSpec, ...], tuple[CellSpec, ...]],
    run: Run,
    reading: Reading,
    *sources: RowSource,
) -> Together:
    specs, cells = shared
    n_folds = specs[0].n_folds

    def each() -> Iterator[Together]:
        sums: StripMoments | None = None
        cell_sums = [StripCells(spec, run.length) for spec in cells]
        for strip in strips_of(run, reading, sources):
            strip.check()
            sums = sums or StripMoments(specs, strip.parts[0])
            folds = strip.folds(n_folds)
            hashes = hashes_of(strip.rows) if cells else strip.rows
            summed = (
                one(hashes, part, strip.weights, folds, n_folds)
                for one, part in zip(cell_sums, strip.parts, strict=False)
            )
            moments = sums(strip.parts, strip.weights, folds)
            yield Together((*moments, *summed))

    return tree_sum(each())


class PassClock:
    """Hear of finished tasks, tell the progress, and time the tenths."""

    def __init__(
        self,
        runs: list[Run],
        workers: int,
        progress: Callable[[PassProgress], None] | None,
        name: str = "strip-moments",
    ) -> None:
        self._runs, self._workers, self._progress, self._name = runs, workers, progress, name
        self._strips_total = sum(run.strips for run in runs)
        self._rows = self._strips = 0
        self._begin = time.perf_counter()
        self._marks = [(0, 0.0)]

    def done(self, number: int) -> None:
        """Hear of run ``number``, which has ended."""
        run = self._runs[number]
        self._rows += run.rows
        self._strips += run.strips
        seconds = time.perf_counter() - self._begin
        self._marks.append((self._rows, seconds))
        if self._progress is not None:
            self._progress(
                PassProgress(
                    name=self._name,
                    rows=self._rows,
                    rows_total=self._runs[-1].stop,
                    strips=self._strips,
                    strips_total=self._strips_total,
                    seconds=seconds,
                )
            )

    def report(self, memory: MemoryPlan) -> PassReport:
        """What the pass did."""
        # Tasks that run side by side end side by side: one mark per round of them is smooth.
        rounds = [self._marks[0], *self._marks[self._workers : -1 : self._workers], self._marks[-1]]
        rows, seconds = zip(*rounds, strict=True)
        edges = np.interp(np.linspace(0, rows[-1], 11), rows, seconds)
        spent = time.perf_counter() - self._begin
        return PassReport(
            rows=rows[-1],
            strips=self._strips,
            tasks=len(self._runs),
            seconds=spent,
            pass_seconds=spent,
            tenths=tuple(float(t) for t in np.diff(edges)),
            memory=memory,
        )


# After a failure only: one more pass that counts every unusable value and names the first


Array = Any


@dataclass(frozen=True)
class _Counts:
    """Numbers of unusable values and the first rows that hold one."""

    column_count: Array
    column_first: Array
    source_count: Array
    source_first: Array
    negative_count: int
    negative_first: int


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
    executor = replace(executor, checkpoint=None)  # what a failure leads to is no step of a run
    sample = replace(sample, first_row=0)  # rows are told as they are numbered where they came from
    found = run_over_rows(sample, executor, _count, _add_counts)
    for source, count, first in zip(
        sample.reads, found.source_count, found.source_first, strict=True
    ):
        missing = (
            source.missing_chunks(first, first + 1)
            if count and isinstance(source, ZarrSource)
            else []
        )
        if missing:
            raise StoreError(
                f"chunk {missing[0]} of {sample.location} is missing: restore it from a copy or "
                "write the store again"
            )
    names = [name for columns in sample.columns for name in columns.names]
    if sample.weights is not None:
        names.append("weights")
    names += sample.units
    if found.column_count.any():
        pairs = zip(found.column_count, found.column_first, strict=True)
        raise nonfinite_error(dict(zip(names, pairs, strict=True)))
    if found.negative_count:
        raise negative_error(found.negative_count, found.negative_first)


def _count(_: None, run: Run, reading: Reading, *sources: RowSource) -> _Counts:
    return reduce(_add_counts, map(_counts_of, strips_of(run, reading, sources)))


def _counts_of(strip: Strip) -> _Counts:
    masks = [~np.isfinite(values) for values in strip.columns()]
    negative = strip.weights < 0 if strip.weights is not None else np.zeros(len(strip), bool)
    columns = np.concatenate(masks, axis=1)

    def first(mask: Array) -> Array:
        """The first row of each column of a mask; of none, any number."""
        return strip.rows[mask.argmax(axis=0)] if len(strip) else np.zeros(mask.shape[1], np.int64)

    return _Counts(
        columns.sum(axis=0),
        first(columns),
        np.array([mask.sum() for mask in masks]),
        first(np.column_stack([mask.any(axis=1) for mask in masks])),
        int(negative.sum()),
        int(first(negative[:, None])[0]),
    )


def _add_counts(a: _Counts, b: _Counts) -> _Counts:
    return _Counts(
        a.column_count + b.column_count,
        np.where(a.column_count > 0, a.column_first, b.column_first),
        a.source_count + b.source_count,
        np.where(a.source_count > 0, a.source_first, b.source_first),
        a.negative_count + b.negative_count,
        a.negative_first if a.negative_count else b.negative_first,
    )
