"""Features and answers at all rows of a store, to a new store, in one pass."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.config import SAMPLE_SIZE
from cme_dask.data.atomic import check_apart, check_output, disk_errors, writing
from cme_dask.data.columns import Columns
from cme_dask.data.outputs import (
    DTYPES,
    AnswerFiles,
    ChunkWriter,
    FeatureFiles,
    default_feature_chunk,
)
from cme_dask.data.outputs import OUTPUT as ANSWERS
from cme_dask.data.sample import Sample
from cme_dask.data.writer import OUTPUT as SAMPLE
from cme_dask.data.writer import check_chunk_rows
from cme_dask.errors import DataError, option
from cme_dask.models.features import FeatureModel
from cme_dask.models.query import Query
from cme_dask.numerics.basis import BLOCK, BlockValues
from cme_dask.numerics.folds import BY_ROWS, RowSample
from cme_dask.numerics.reduction import Cost, Extent, MemoryPlan, Reduction, Strip
from cme_dask.passes.driver import Executor
from cme_dask.passes.fit import choose_rows
from cme_dask.passes.progress import Listener
from cme_dask.passes.run import PassReport, extent_of, plan_pass, run_pass

# Features of all rows, from store to store: one pass, out of core, one writer per chunk


Array = Any

_WORD = 8
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


def write_features(
    sample: Sample,
    model: FeatureModel,
    out: str | os.PathLike[str],
    *,
    chunk_rows: int | None,
    dtype: Any,
    overwrite: bool,
    executor: Executor,
    progress: Listener | None = None,
) -> FeatureReport:
    """Write the features of a sample's x, with its y and weights, to a new sample store.

    See :meth:`cme_dask.PivotedCholesky.transform_store`.
    """
    check_output(out, SAMPLE, overwrite)
    check_apart({"the output": out}, [("input", sample.location)])
    sample.check_whole("writing features")
    sample = sample.fold_by(BY_ROWS)
    layout = _Layout.of(sample, model, chunk_rows, dtype)
    writer = layout.writer()
    kept_bytes = layout.kept_rows * layout.kept_row_bytes
    extent = extent_of(sample, executor, BLOCK, on_device=False)
    cost = writer.cost(extent)
    around = Cost(alone={"the row sample": cost.process + 3 * kept_bytes})
    plan_pass(cost + around, extent, executor, writer.chunk_rows)  # before any row is read
    chosen, passes = layout.choose_rows(executor)
    by_row = np.argsort(chosen.index)
    with writing(out, SAMPLE, overwrite=overwrite) as aside:
        with disk_errors(out):
            files = layout.create(aside)
        writer = replace(writer, files=files, index=chosen.index[by_row])
        (rows,), report = run_pass(sample, [writer], executor, progress, around=around)
        back = np.argsort(by_row)
        parts = tuple(part.astype(np.float64)[back] for part in rows)
        with disk_errors(out):
            files.finish(replace(chosen, parts=parts), layout.columns, _origin(model, sample))
    return FeatureReport(
        path=str(out),
        rows=report.rows,
        rank=model.rank,
        dtype=layout.dtype.name,
        chunk_rows=layout.chunk_rows,
        passes=passes + 1,
        tasks=report.tasks,
        seconds=report.seconds,
        memory=report.memory,
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

    def writer(self) -> "FeatureWriter":
        """What will write them, before files and the row sample are there."""
        return FeatureWriter(
            self.model, self.dtype, self.row_bytes, self.kept_rows, self.chunk_rows
        )

    def choose_rows(self, executor: Executor) -> tuple[RowSample, int]:
        """Keys and indices of the new store's row sample, and the passes that took."""
        stored = self.sample.row_sample
        if stored is not None:
            return stored.prefix(self.kept_rows), 0
        return choose_rows(self.sample, self.kept_rows, 0, executor)

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
class FeatureWriter(Reduction[tuple[Array, ...], tuple[Array, ...]]):
    """Writes the features of all rows, and returns those of the row sample.

    Parameters
    ----------
    model
        Whose features.
    dtype
        Type of the new x.
    row_bytes
        Bytes of a written row.
    sampled
        Number of rows of the row sample.
    chunk_rows
        Rows per chunk of the new store.
    files
        The store.
    index
        The rows of the row sample, ascending.
    """

    model: FeatureModel
    dtype: np.dtype[Any]
    row_bytes: int
    sampled: int
    chunk_rows: int = 0
    files: FeatureFiles | None = None
    index: Array = ()
    name = "write-features"
    on_device = False
    strip_rows = BLOCK

    def cost(self, extent: Extent) -> Cost:
        """A block of features, and the chunks that are being filled."""
        m, d = self.model.rank, extent.n_columns
        held = min(self.chunk_rows, extent.n_rows)
        return Cost(
            flops=2 * m * (m + d),
            written=self.row_bytes,
            state=_WORD * m * (_BLOCKS_HELD * BLOCK + m) + _CHUNKS_HELD * held * self.row_bytes,
            retained=2 * self.sampled * _WORD * (m + d),
            process=_HEAP + _FACTORS_HELD * _WORD * m * m,
            subject=f"{m} features in chunks of {self.chunk_rows:,} rows",
            remedies=(f"lower {option('chunk_rows')}", "write float32"),
        )

    def start(self, like: Array) -> "_Writing":
        """The basis, and no file yet."""
        return _Writing(BlockValues(self.model.evaluator(), self.model.rank))

    def update(self, state: "_Writing", strip: Strip) -> tuple[Array, ...]:
        """Write a block; return its rows of the row sample, an array per variable."""
        assert self.files is not None
        start = int(strip.rows[0])
        values = state.values(strip.parts[0])
        self._check(values, start)
        variables = (values, *strip.parts[1:])
        state.write(
            self.files, strip, variables if strip.weights is None else (*variables, strip.weights)
        )
        own = strip.own or slice(0, len(strip))
        mine = self.index[
            slice(*np.searchsorted(self.index, [start + own.start, start + own.stop]))
        ]
        rows = self.files.empty_rows(len(mine), variables=len(variables))
        for row, part in zip(rows, variables, strict=True):
            row[:] = part[mine - start]
        return rows

    def combine(self, a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        """Rows one after the other."""
        return tuple(np.concatenate(pair) for pair in zip(a, b, strict=True))

    def finish(self, state: "_Writing") -> None:
        """Write the last chunks."""
        state.flush()

    def _check(self, values: Array, start: int) -> None:
        """DataError if the dtype can't hold them, or they overflowed before."""
        limit = np.finfo(self.dtype).max
        if not (values.min() >= -limit and values.max() <= limit):
            raise DataError(
                f"features of rows {start} to {start + len(values) - 1} are too large for "
                f"{self.dtype.name}: write float64, or scale the kernel down"
            )


@dataclass(eq=False)
class _Writing:
    """What a task that writes holds: the values of a block, and its files once it has rows."""

    values: Callable[[Array], Array]
    writers: Sequence[ChunkWriter] = ()

    def write(
        self, files: FeatureFiles | AnswerFiles, strip: Strip, arrays: Sequence[Array]
    ) -> None:
        """Append the task's own rows of a strip."""
        own = strip.own or slice(0, len(strip))
        self.writers = self.writers or files.writers(int(strip.rows[own.start]))
        for writer, rows in zip(self.writers, arrays, strict=True):
            writer.append(rows[own])

    def flush(self) -> None:
        """Write the last chunks."""
        for writer in self.writers:
            writer.flush()


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


def write_answers(
    sample: Sample,
    query: Query,
    out: str | os.PathLike[str],
    *,
    chunk_rows: int | None,
    overwrite: bool,
    executor: Executor,
    progress: Listener | None = None,
) -> tuple[PassReport, int]:
    """Write the answers at all rows of a sample to a new store, whole or not at all.

    Parameters
    ----------
    sample
        Rows of the given variable alone.
    query
        The query.
    out
        Local folder to make.
    chunk_rows
        Rows per chunk of the new store; default a power of two, at most 32 MB of answers.
    overwrite
        Replace an existing store when the new one is whole.
    executor
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
    Rows are evaluated on the fixed grid of blocks, so that the bits depend neither on chunks nor on
    tasks and scheduler.
    """
    check_output(out, ANSWERS, overwrite)
    check_apart({"the output": out}, [("input", sample.location)])
    check_chunk_rows(chunk_rows)
    sample.check_whole("predict")
    if not sample.n_rows:
        raise DataError(f"{sample.location} has no rows: at least one is needed")
    width = len(query.labels)
    chunk = chunk_rows or default_feature_chunk(_WORD * width, sample.n_rows)
    writer = AnswerWriter(query, chunk)
    extent = extent_of(sample, executor, BLOCK, on_device=False)
    plan_pass(writer.cost(extent), extent, executor, chunk)  # before anything is written
    with writing(out, ANSWERS, overwrite=overwrite) as aside:
        with disk_errors(out):
            files = AnswerFiles.create(aside, query.fields, sample.n_rows, chunk)
        _, report = run_pass(sample, [replace(writer, files=files)], executor, progress)
        with disk_errors(out):
            files.finish(_described(sample, query))
    return report, chunk


@dataclass(frozen=True, eq=False)
class AnswerWriter(Reduction[None, None]):
    """Writes the answers at all rows.

    Parameters
    ----------
    query
        The query.
    chunk_rows
        Rows per chunk of the new store.
    files
        The store.
    """

    query: Query
    chunk_rows: int
    files: AnswerFiles | None = None
    name = "predict-rows"
    on_device = False
    strip_rows = BLOCK

    def cost(self, extent: Extent) -> Cost:
        """The answers of a block, and the chunks that are being filled."""
        width, size = len(self.query.labels), self.query.size
        held = min(self.chunk_rows, extent.n_rows)
        return Cost(
            flops=_LAW_FLOPS * size + 2 * size * self.query.rank,
            state=_WORD * (BLOCK * (_LAWS_HELD * size + 4 * width) + _CHUNKS_HELD * held * width),
            process=_HEAP,
            subject=f"{width} answers of {self.query.subject} of {size} {self.query.parts} in "
            f"chunks of {self.chunk_rows:,} rows",
            remedies=(f"lower {option('chunk_rows')}",),
        )

    def start(self, like: Array) -> _Writing:
        """No file yet."""
        return _Writing(self.query)

    def update(self, state: _Writing, strip: Strip) -> None:
        """Write the answers of a block."""
        assert self.files is not None
        state.write(self.files, strip, state.values(np.ascontiguousarray(strip.parts[0])))

    def combine(self, a: None, b: None) -> None:
        """Nothing of nothing."""

    def finish(self, state: _Writing) -> None:
        """Write the last chunks."""
        state.flush()


def _described(sample: Sample, query: Query) -> dict[str, Any]:
    """What the arrays mean."""
    columns = query.answered.columns
    return {
        "rows": sample.n_rows,
        "given": {"variable": "y" if query.reverse else "x", **query.given.columns.to_dict()},
        "columns": columns.only(query.numeric).to_dict(),
        "levels": list(query.levels),
        "interval": query.interval,
        "conformal": query.conformal,
        "events": list(query.chances),
        "source": sample.location,
    }
