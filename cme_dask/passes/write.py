"""Features and answers at all rows of a store, to a new store, in one pass."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from dask.utils import format_bytes

from cme_dask.config import SAMPLE_SIZE
from cme_dask.data.columns import Columns
from cme_dask.data.outputs import DTYPES, AnswerFiles, FeatureFiles, default_feature_chunk
from cme_dask.data.row_sample import RowSample
from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource
from cme_dask.data.store import check_output, disk_errors, writing
from cme_dask.data.writer import check_chunk_rows
from cme_dask.errors import DataError, ResourceError, option
from cme_dask.models.features import FeatureModel
from cme_dask.models.query import Query
from cme_dask.numerics.basis import BLOCK, BlockValues
from cme_dask.numerics.folds import BY_ROWS
from cme_dask.numerics.resources import MemoryPlan
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.plan import BadValues, Reading, Run, strips_of
from cme_dask.passes.run import (
    FLOPS,
    PassClock,
    PassProgress,
    PassReport,
    count_bad_values,
    materialised,
    plan_sample,
    run_over_rows,
)
from cme_dask.passes.selections import choose_rows

# Features of all rows, from store to store: one pass, out of core, one writer per chunk


Array = Any
WriteProgress = Callable[[PassProgress], None]

_WRITE_RATE = 3e8  # bytes per second, as cautious as FLOPS
_KEPT_BYTES = 1 << 25  # of the new store's row sample
_CHUNKS_HELD = 3  # of a task: the one being filled, and what its encoding takes
_BLOCKS_HELD = 4  # of m features: kernel block, basis, their temporaries
_FACTORS_HELD = 2  # m x m matrices of the basis; a task makes halves of two more
_HEAP = 96 << 20  # what the allocator keeps of freed chunks, in each process


@dataclass(frozen=True)
class FeatureReport:
    """What the writing of features did.

    Attributes
    ----------
    path
        The new store.
    rows, rank
        Shape of its x.
    dtype, chunk_rows
        Type and chunks of its x.
    passes
        Passes over the rows: one, and one over the weights if the source has weights but no row
        sample.
    tasks
        Tasks of the pass.
    seconds
        Wall time of the pass.
    memory
        Predicted peak and limit.
    """

    path: str
    rows: int
    rank: int
    dtype: str
    chunk_rows: int
    passes: int
    tasks: int
    seconds: float
    memory: MemoryPlan

    @property
    def rows_per_second(self) -> float:
        """Rows per second of wall time."""
        return self.rows / self.seconds


@dataclass(frozen=True)
class Piece(Run):
    """Rows [first, last) that one task writes, and the blocks [start, stop) that hold them."""

    first: int
    last: int


def cut_for_chunks(runs: list[Run], chunk_rows: int) -> list[Piece]:
    """Tasks whose borders are those of the runs, moved up to borders of chunks to be written.

    So each chunk has one writer (zarr#3682). Features are made on the fixed grid of blocks: a block
    that two tasks share is made by both, and its rows have the same bits in either.
    """
    n = runs[-1].stop
    borders = sorted({min(n, -(-run.stop // chunk_rows) * chunk_rows) for run in runs})
    return [
        Piece(first // BLOCK * BLOCK, min(n, -(-last // BLOCK) * BLOCK), BLOCK, first, last)
        for first, last in zip([0, *borders], borders, strict=False)
    ]


def write_features(
    sample: Sample,
    model: FeatureModel,
    out: str | os.PathLike[str],
    *,
    chunk_rows: int | None,
    dtype: Any,
    overwrite: bool,
    budget: MemoryBudget,
    progress: WriteProgress | None = None,
) -> FeatureReport:
    """Write the features of a sample's x, with its y and weights, to a new sample store.

    See :meth:`cme_dask.PivotedCholesky.transform_store`.
    """
    check_output(out, overwrite)
    sample.check_whole("writing features")
    sample = sample.fold_by(BY_ROWS)
    layout = _Layout.of(sample, model, chunk_rows, dtype)
    pieces = layout.pieces(budget)
    memory = layout.check_memory(pieces, budget)
    runs = [Run(piece.first, piece.last, BLOCK) for piece in pieces]
    executor = budget.executor
    try:
        chosen, passes = layout.choose_rows(budget)
        clock = PassClock(runs, executor.workers, progress, "write-features")
        with writing(out, overwrite=overwrite) as aside:
            with disk_errors(out):
                files = layout.create(aside)
            by_row = np.argsort(chosen.index)
            kept = run_over_rows(
                sample,
                executor,
                _write_piece,
                _join,
                shared=_Plan(model, files, layout.dtype, chosen.index[by_row]),
                name="write-features",
                runs=list(pieces),
                on_done=clock.done,
            )
            back = np.argsort(by_row)
            kept = tuple(part.astype(np.float64)[back] for part in kept)
            with disk_errors(out):
                rows = replace(chosen, parts=kept)
                files.finish(rows, layout.columns, _origin(model, sample))
    except BadValues:
        count_bad_values(sample, executor)
        raise
    done = clock.report(memory)
    return FeatureReport(
        path=str(out),
        rows=done.rows,
        rank=model.rank,
        dtype=layout.dtype.name,
        chunk_rows=layout.chunk_rows,
        passes=passes + 1,
        tasks=done.tasks,
        seconds=done.seconds,
        memory=memory,
    )


@dataclass(frozen=True, eq=False)
class _Layout:
    """What will be written, and what that costs."""

    sample: Sample
    model: FeatureModel
    chunk_rows: int
    dtype: np.dtype[Any]

    @classmethod
    def of(
        cls, sample: Sample, model: FeatureModel, chunk_rows: int | None, dtype: Any
    ) -> "_Layout":
        check_chunk_rows(chunk_rows)
        try:
            kind = np.dtype(dtype)
        except TypeError:
            kind = np.dtype(object)
        if kind.name not in DTYPES:
            raise DataError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if not sample.n_rows:
            raise DataError("X has no rows: at least one is needed")
        default = default_feature_chunk(model.rank * kind.itemsize, sample.n_rows)
        return cls(sample, model, chunk_rows or default, kind)

    @property
    def columns(self) -> tuple[Columns, ...]:
        """Columns of the new store."""
        return (Columns(self.model.names), *self.sample.columns[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of a written row."""
        others = sum(source.shape[1] for source in self.sample.reads[1:])
        return self.model.rank * self.dtype.itemsize + 8 * others

    @property
    def kept_row_bytes(self) -> int:
        """Bytes of a row of the row sample."""
        return 8 * sum(len(columns.names) for columns in self.columns)

    @property
    def kept_rows(self) -> int:
        """Rows of the new store's row sample, of the usual size unless that takes too much."""
        most = min(SAMPLE_SIZE, self.sample.n_rows)
        stored = self.sample.row_sample
        most = most if stored is None else min(most, len(stored))
        return max(1, min(most, _KEPT_BYTES // self.kept_row_bytes))

    def pieces(self, budget: MemoryBudget) -> list[Piece]:
        """The tasks."""
        m, d = self.model.rank, self.sample.sources[0].shape[1]
        seconds = 2 * m * (m + d) / FLOPS + self.row_bytes / _WRITE_RATE
        return cut_for_chunks(plan_sample(self.sample, budget.executor, seconds), self.chunk_rows)

    def check_memory(self, pieces: list[Piece], budget: MemoryBudget) -> MemoryPlan:
        """Predict the peak.

        Raises
        ------
        ResourceError
            If it does not fit.
        """
        sources, m = self.sample.reads, self.model.rank
        read = 2 * max(source.chunk_rows or 0 for source in sources) + BLOCK
        if materialised(self.sample, budget.executor):
            read += 2 * max(piece.rows for piece in pieces)
        held = min(self.chunk_rows, max(piece.rows for piece in pieces))
        task = (
            8 * read * sum(source.shape[1] for source in sources)
            + 8 * m * (_BLOCKS_HELD * BLOCK + m)
            + _CHUNKS_HELD * held * self.row_bytes
        )
        kept = 3 * self.kept_rows * self.kept_row_bytes
        process = _HEAP + _FACTORS_HELD * 8 * m * m
        if budget.executor.kind == "processes":  # of which each runs one task
            task += process
        given = sum(s.row_bytes for s in sources if s.in_memory) * self.sample.n_rows
        plan = budget.tightest(task, process + kept, {"the row sample": process + kept}, given)
        if plan.predicted > plan.limit:
            raise ResourceError(
                f"{plan.place} would need {format_bytes(plan.predicted)} to write {m} features in "
                f"chunks of {self.chunk_rows:,} rows with {budget.executor.workers} tasks at once, "
                f"the limit is {format_bytes(plan.limit)}: lower {option('chunk_rows')}, use fewer "
                "workers, or write float32"
            )
        return plan

    def choose_rows(self, budget: MemoryBudget) -> tuple[RowSample, int]:
        """Keys and indices of the new store's row sample, and the passes that took."""
        stored = self.sample.row_sample
        if stored is not None:
            return stored.prefix(self.kept_rows), 0
        return choose_rows(self.sample, self.kept_rows, 0, budget.executor)

    def create(self, folder: Path) -> FeatureFiles:
        """The empty arrays."""
        return FeatureFiles.create(
            folder,
            self.columns,
            self.sample.n_rows,
            weighted=self.sample.weights is not None,
            chunk_rows=self.chunk_rows,
            dtype=self.dtype.name,
        )


@dataclass(frozen=True, eq=False)
class _Plan:
    """What every task is given; ``index`` are the rows of the row sample, ascending."""

    model: FeatureModel
    files: FeatureFiles
    dtype: np.dtype[Any]
    index: Array

    def check_features(self, values: Array, start: int) -> None:
        """DataError if the dtype can't hold them, or they overflowed before."""
        limit = np.finfo(self.dtype).max
        if not (values.min() >= -limit and values.max() <= limit):
            raise DataError(
                f"features of rows {start} to {start + len(values) - 1} are too large for "
                f"{self.dtype.name}: write float64, or scale the kernel down"
            )


def _write_piece(
    plan: _Plan, piece: Piece, reading: Reading, *sources: RowSource
) -> tuple[Array, ...]:
    """Write a piece; return its rows of the row sample, an array per variable."""
    writers = plan.files.writers(piece.first)
    features = BlockValues(plan.model.evaluator(), plan.model.rank)
    index = plan.index[slice(*np.searchsorted(plan.index, [piece.first, piece.last]))]
    # Made at once: small arrays kept between large passing ones would leave the heap in pieces.
    kept = plan.files.empty_rows(len(index), variables=reading.variables)
    for strip in strips_of(piece, reading, sources):
        strip.check()
        start = int(strip.rows[0])
        values = features(strip.parts[0])
        plan.check_features(values, start)
        variables = (values, *strip.parts[1:])
        rows = variables if strip.weights is None else (*variables, strip.weights)
        low, high = max(start, piece.first), min(start + len(values), piece.last)
        for writer, part in zip(writers, rows, strict=True):
            writer.append(part[low - start : high - start])
        mine = slice(*np.searchsorted(index, [low, high]))
        for into, part in zip(kept, variables, strict=True):
            into[mine] = part[index[mine] - start]
    for writer in writers:
        writer.flush()
    return kept


def _join(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(np.concatenate(pair) for pair in zip(a, b, strict=True))


def _origin(model: FeatureModel, sample: Sample) -> dict[str, Any]:
    """Where the features come from, for ``cme-dask info``."""
    return {
        "basis": model.kind,
        "columns": list(model.columns.names),
        "kernel": repr(model.kernel),
        "trace_error": model.trace_error,
        "source": sample.location,
    }


# Answers of the conditional laws at all rows of a store, to a new store: one pass, out of core


_LAWS_HELD = 8  # as large as the weights of a block of laws: what they are made from
_LAW_FLOPS = 1500  # per row and cell, as cautious: weights and the search of quantiles
_WORD = 8


def write_answers(
    sample: Sample,
    query: Query,
    out: str | os.PathLike[str],
    *,
    chunk_rows: int | None,
    overwrite: bool,
    budget: MemoryBudget,
    progress: Callable[[PassProgress], None] | None = None,
) -> tuple[PassReport, int]:
    """Write the answers at all rows of a sample to a new store, whole or not at all.

    Parameters
    ----------
    sample
        Rows of the given variable alone.
    query
        What is asked.
    out
        Local folder to make.
    chunk_rows
        Rows per chunk of the new store; default a power of two, at most 32 MB of answers.
    overwrite
        Replace an existing store when the new one is whole.
    budget
        Where to run, and the memory that is there.
    progress
        Called when a task has ended.

    Returns
    -------
    report : PassReport
    chunk_rows : int

    Raises
    ------
    DataError
        On rows that are not finite, by column and row, no rows, or an output that exists.
    StoreError
        On damaged chunks of the source.
    ResourceError
        If memory or disk do not suffice.

    Notes
    -----
    Rows are asked on the fixed grid of blocks, so that the bits do not depend on chunks, tasks or
    scheduler.
    """
    check_output(out, overwrite)
    check_chunk_rows(chunk_rows)
    sample.check_whole("predict")
    if not sample.n_rows:
        raise DataError(f"{sample.location} has no rows: at least one is needed")
    width, executor = len(query.labels), budget.executor
    chunk = chunk_rows or default_feature_chunk(_WORD * width, sample.n_rows)
    model, cells = query.model, query.answered.cells.size  # type: ignore[union-attr]
    flops = _LAW_FLOPS * cells + 2 * cells * model.coef.shape[0]
    pieces = cut_for_chunks(plan_sample(sample, executor, flops / FLOPS), chunk)
    memory = _check_memory(sample, pieces, (width, cells, chunk), budget)
    clock = PassClock(
        [Run(piece.first, piece.last, BLOCK) for piece in pieces],
        executor.workers,
        progress,
        "predict-rows",
    )
    try:
        with writing(out, overwrite=overwrite) as aside:
            with disk_errors(out):
                files = AnswerFiles.create(aside, query.fields, sample.n_rows, chunk)
            run_over_rows(
                sample,
                executor,
                _write_answers,
                _nothing,
                shared=(query, files),
                name="predict-rows",
                runs=list(pieces),
                on_done=clock.done,
            )
            with disk_errors(out):
                files.finish(_described(sample, query))
    except BadValues:
        count_bad_values(sample, executor)
        raise
    return clock.report(memory), chunk


def _write_answers(
    plan: tuple[Query, AnswerFiles], piece: Piece, reading: Reading, *sources: RowSource
) -> None:
    query, files = plan
    writers = files.writers(piece.first)
    for strip in strips_of(piece, reading, sources):
        strip.check()
        start = int(strip.rows[0])
        values = query(np.ascontiguousarray(strip.parts[0]))
        mine = slice(max(piece.first - start, 0), piece.last - start)
        for writer, part in zip(writers, values, strict=True):
            writer.append(part[mine])
    for writer in writers:
        writer.flush()


def _nothing(a: None, b: None) -> None:
    return None


def _check_memory(
    sample: Sample, pieces: list[Piece], sizes: tuple[int, int, int], budget: MemoryBudget
) -> MemoryPlan:
    """Predict the peak; ResourceError if it does not fit."""
    width, cells, chunk = sizes
    d = sample.sources[0].shape[1]
    read = 2 * (sample.sources[0].chunk_rows or 0) + BLOCK
    if materialised(sample, budget.executor):
        read += 2 * max(piece.rows for piece in pieces)
    held = min(chunk, max(piece.rows for piece in pieces))
    law = BLOCK * (_LAWS_HELD * cells + 4 * width)
    task = _WORD * (read * d + law + _CHUNKS_HELD * held * width)
    if budget.executor.kind == "processes":  # of which each runs one task
        task += _HEAP
    plan = budget.tightest(task, _HEAP, {})
    if plan.predicted > plan.limit:
        raise ResourceError(
            f"{plan.place} would need {format_bytes(plan.predicted)} to write {width} answers of "
            f"laws of {cells} cells in chunks of {chunk:,} rows with {budget.executor.workers} "
            f"tasks at once, the limit is {format_bytes(plan.limit)}: lower "
            f"{option('chunk_rows')}, or use fewer workers"
        )
    return plan


def _described(sample: Sample, query: Query) -> dict[str, Any]:
    """What the arrays mean."""
    columns = query.answered.columns
    return {
        "rows": sample.n_rows,
        "given": {"variable": "y" if query.reverse else "x", **query.given.columns.to_dict()},
        "columns": columns.only(query.numeric).to_dict(),
        "levels": list(query.levels),
        "events": list(query.chances),
        "source": sample.location,
    }
