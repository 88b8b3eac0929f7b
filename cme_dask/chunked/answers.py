"""Answers of the conditional laws at all rows of a store, to a new store: one pass, out of core."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from dask.utils import format_bytes

from cme_dask.chunked.badvalues import count_bad_values
from cme_dask.chunked.features import Piece, cut_for_chunks
from cme_dask.chunked.memory import MemoryBudget, MemoryPlan
from cme_dask.chunked.passes import (
    FLOPS,
    PassClock,
    PassProgress,
    PassReport,
    materialised,
    plan_sample,
    run_over_rows,
)
from cme_dask.chunked.plan import Run
from cme_dask.chunked.strips import BadValues, Reading, strips_of
from cme_dask.errors import DataError, ResourceError, option
from cme_dask.models.query import Query
from cme_dask.numerics.blocks import BLOCK
from cme_dask.storage.answer_store import AnswerFiles
from cme_dask.storage.atomic import check_output, disk_errors, writing
from cme_dask.storage.feature_store import default_feature_chunk
from cme_dask.storage.rows import RowSource
from cme_dask.storage.sample import Sample
from cme_dask.storage.writer import check_chunk_rows

Array = Any

_CHUNKS_HELD = 3  # of a task: the one being filled, and what its encoding takes
_LAWS_HELD = 8  # as large as the weights of a block of laws: what they are made from
_LAW_FLOPS = 1500  # per row and cell, as cautious: weights and the search of quantiles
_HEAP = 96 << 20  # what the allocator keeps of freed chunks, in each process
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
                _write_piece,
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


def _write_piece(
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
