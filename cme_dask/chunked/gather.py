"""The row sample of arrays that bring none: a declared, partial read."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.passes import BadValues, run_over_rows, strips_of
from cme_dask.chunked.plan import Run
from cme_dask.errors import DataError
from cme_dask.storage.columns import Columns
from cme_dask.storage.priority import RowSample, draw, draw_rows, merge
from cme_dask.storage.rows import ArraySource, RowSource
from cme_dask.storage.sample import Sample

Array = Any

_BLOCK = 1 << 18


def sample_rows(sample: Sample, size: int, seed: int, executor: Executor) -> tuple[RowSample, int]:
    """The priority sample, and the passes over chunked rows that it took.

    The stored one takes none, and so does one of arrays in memory. From other sources the sample
    that a store of the same rows would hold for the same seed is gathered: a pass that reads the
    chunks that hold its rows and, if there are weights, before that a pass over the weights.

    Raises
    ------
    BadValues
        If weights are negative or not finite.
    DataError
        If all weights are zero.
    """
    stored = sample.row_sample
    if stored is not None and len(stored) >= min(size, sample.n_rows):
        return stored.prefix(size), 0
    chosen, passes = choose_rows(sample, size, seed, executor)
    by_row = np.argsort(chosen.index)
    index = chosen.index[by_row]
    if all(isinstance(source, ArraySource) for source in sample.reads):
        parts = tuple(_take(source, index, 0, sample.n_rows) for source in sample.sources)
    else:
        parts = run_over_rows(sample, executor, _gather, _join, shared=index, name="gather-sample")
        passes += 1
    back = np.argsort(by_row)
    return replace(chosen, parts=tuple(part[back] for part in parts)), passes


def choose_rows(sample: Sample, size: int, seed: int, executor: Executor) -> tuple[RowSample, int]:
    """Keys, indices and weights of a priority sample without its rows, and the passes it took.

    Raises
    ------
    BadValues
        If weights are negative or not finite.
    DataError
        If all weights are zero.
    """
    weights = sample.weights
    in_memory = all(isinstance(source, ArraySource) for source in sample.reads)
    passes = 0
    if weights is None or in_memory:
        weights_of = None if weights is None else partial(_usable_weights, weights)
        chosen = draw_rows(sample.n_rows, size, seed, weights_of)
    else:
        alone = Sample((weights,), (Columns(("weights",)),))
        draw_job = partial(_draw_weighted, size=size, seed=seed)
        chosen = run_over_rows(alone, executor, draw_job, partial(_merge_two, size=size))
        passes = 1
    if not len(chosen):
        raise DataError("all weights are zero: at least one row needs a positive weight")
    return chosen, passes


def _usable_weights(source: RowSource, start: int, stop: int) -> Array:
    weights = source.read(start, stop)[:, 0]
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise BadValues(f"weights from row {start} on are not usable")
    return weights


def _draw_weighted(
    _: None, run: Run, weighted: bool, source: RowSource, *, size: int, seed: int
) -> RowSample:
    strips = []
    for start, (column,), _weights in strips_of(run, weighted, (source,)):
        held = ArraySource(column, start)
        weights = _usable_weights(held, start, start + len(column))
        strips.append(draw(start, (np.empty((len(weights), 0)),), weights, size, seed))
    return merge(strips, size)


def _merge_two(a: RowSample, b: RowSample, *, size: int) -> RowSample:
    return merge((a, b), size)


def _gather(index: Array, run: Run, weighted: bool, *sources: RowSource) -> tuple[Array, ...]:
    mine = index[np.searchsorted(index, run.start) : np.searchsorted(index, run.stop)]
    parts = sources[: len(sources) - weighted]
    return tuple(_take(source, mine, run.start, run.stop) for source in parts)


def _take(source: RowSource, rows: Array, start: int, stop: int) -> Array:
    """Rows of [start, stop) by sorted index; only the chunks that hold some are read."""
    step = source.chunk_rows or _BLOCK
    pieces = [np.empty((0, source.shape[1]))]
    for chunk in np.unique(rows // step):
        low, high = max(int(chunk) * step, start), min((int(chunk) + 1) * step, stop)
        mine = rows[np.searchsorted(rows, low) : np.searchsorted(rows, high)]
        pieces.append(source.read(low, high)[mine - low])
    return np.concatenate(pieces)


def _join(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(np.concatenate(pair) for pair in zip(a, b, strict=True))
