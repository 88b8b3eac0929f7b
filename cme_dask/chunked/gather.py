"""The row sample of arrays that bring none: a declared, partial read."""

from functools import partial
from typing import Any

import numpy as np

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.passes import BadValues, run_over_rows, strips_of
from cme_dask.chunked.plan import Run
from cme_dask.errors import DataError
from cme_dask.storage.columns import Columns
from cme_dask.storage.priority import RowSample, draw, draw_rows, merge
from cme_dask.storage.rows import RowSource
from cme_dask.storage.sample import Sample

Array = Any


def sample_rows(sample: Sample, size: int, seed: int, executor: Executor) -> RowSample:
    """The priority sample: the stored one, or one gathered from the rows.

    A gathered sample is the one that a store of the same rows would hold for the same seed. It
    reads the chunks that hold its rows and, if there are weights, before that all weights.

    Raises
    ------
    BadValues
        If weights are negative or not finite.
    DataError
        If all weights are zero.
    """
    stored = sample.row_sample
    if stored is not None and len(stored) >= min(size, sample.n_rows):
        return stored.prefix(size)
    if sample.weights is None:
        chosen = draw_rows(sample.n_rows, size, seed)
    else:
        alone = Sample((sample.weights,), (Columns(("weights",)),))
        draw_job = partial(_draw_weighted, size=size, seed=seed)
        chosen = run_over_rows(alone, executor, draw_job, partial(_merge_two, size=size))
    if not len(chosen):
        raise DataError("all weights are zero: at least one row needs a positive weight")
    by_row = np.argsort(chosen.index)
    gather_job = partial(_gather, index=chosen.index[by_row])
    parts = run_over_rows(sample, executor, gather_job, _join)
    back = np.argsort(by_row)
    return RowSample(chosen.keys, chosen.index, tuple(part[back] for part in parts))


def _draw_weighted(
    _: None, run: Run, weighted: bool, source: RowSource, *, size: int, seed: int
) -> RowSample:
    strips = []
    for start, (column,), _weights in strips_of(run, weighted, (source,)):
        weights = column[:, 0]
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise BadValues(f"weights from row {start} on are not usable")
        strips.append(draw(start, (np.empty((len(weights), 0)),), weights, size, seed))
    return merge(strips, size)


def _merge_two(a: RowSample, b: RowSample, *, size: int) -> RowSample:
    return merge((a, b), size)


def _gather(
    _: None, run: Run, weighted: bool, *sources: RowSource, index: Array
) -> tuple[Array, ...]:
    mine = index[np.searchsorted(index, run.start) : np.searchsorted(index, run.stop)]
    return tuple(_take(source, mine, run) for source in sources[: len(sources) - weighted])


def _take(source: RowSource, rows: Array, run: Run) -> Array:
    """Rows by sorted index; of chunked sources only the chunks that hold some."""
    step = source.chunk_rows or run.length
    pieces = [np.empty((0, source.shape[1]))]
    for chunk in np.unique(rows // step):
        low, high = max(int(chunk) * step, run.start), min((int(chunk) + 1) * step, run.stop)
        mine = rows[np.searchsorted(rows, low) : np.searchsorted(rows, high)]
        pieces.append(source.read(low, high)[mine - low])
    return np.concatenate(pieces)


def _join(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(np.concatenate(pair) for pair in zip(a, b, strict=True))
