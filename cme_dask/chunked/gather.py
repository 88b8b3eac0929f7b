"""The row sample of arrays that bring none: a declared, partial read."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.passes import run_over_rows
from cme_dask.chunked.plan import Run
from cme_dask.chunked.strips import Reading, empty_part, strips_of
from cme_dask.errors import DataError
from cme_dask.numerics.folding import BY_ROWS
from cme_dask.storage.priority import RowSample, draw_among, merge
from cme_dask.storage.rows import ArraySource, RowSource
from cme_dask.storage.sample import Sample

Array = Any

_BLOCK = 1 << 18
_SPARE = 6.0  # standard deviations of the number of rows below a bound
_ENOUGH = 1 << 10  # stored rows of a part, with which no others are looked for


def sample_rows(sample: Sample, size: int, seed: int, executor: Executor) -> tuple[RowSample, int]:
    """The priority sample, and the passes over chunked rows that it took.

    The stored one takes none (of a part, what it holds of it), and so does one of arrays in memory.
    From other sources the sample that a store of the same rows would hold for the same seed is
    gathered: a pass that reads the chunks that hold its rows and, if there are weights or a part
    that a column tells, before that a pass over these alone.

    Raises
    ------
    BadValues
        If weights are negative or not finite, or times are not finite.
    DataError
        If all weights are zero, or no row belongs to the part.
    """
    stored, wanted = sample.row_sample, min(size, sample.n_rows)
    if sample.part is not None:
        wanted = min(wanted, _ENOUGH)
    if stored is not None and len(stored) >= (1 if stored.complete else wanted):
        return stored.prefix(size), 0
    chosen, passes = choose_rows(sample, size, seed, executor)
    by_row = np.argsort(chosen.index)
    index = chosen.index[by_row]
    columns = Sample((*sample.sources, *sample.units.values()), ())
    if all(isinstance(source, ArraySource) for source in columns.reads):
        found = tuple(_take(source, index, 0, sample.n_rows) for source in columns.reads)
    else:
        found = run_over_rows(columns, executor, _gather, _join, shared=index, name="gather-sample")
        passes += 1
    back = np.argsort(by_row)
    parts = tuple(part[back] for part in found[: len(sample.sources)])
    units = [values[back, 0] for values in found[len(sample.sources) :]]
    return replace(chosen, parts=parts, units=dict(zip(sample.units, units, strict=True))), passes


def choose_rows(sample: Sample, size: int, seed: int, executor: Executor) -> tuple[RowSample, int]:
    """Keys, indices and weights of a priority sample without its rows, and the passes it took.

    Raises
    ------
    BadValues
        If weights are negative or not finite, or times are not finite.
    DataError
        If all weights are zero, or no row belongs to the part.
    """
    sample = replace(sample.fold_by(BY_ROWS), row_sample=None)
    told_by = sample.reads[len(sample.sources) :]
    job = partial(_draw, size=size, seed=seed)
    if not told_by or all(isinstance(source, ArraySource) for source in sample.reads):
        reading = replace(Reading.of(sample), variables=0)
        chosen, passes = job(None, Run(0, sample.n_rows, _BLOCK), reading, *told_by), 0
    else:
        alone = replace(sample, sources=(), columns=())
        chosen = run_over_rows(alone, executor, job, partial(_merge_two, size=size))
        passes = 1
    if not len(chosen):
        if sample.weights is None:
            raise empty_part(sample)
        raise DataError("all weights are zero: at least one row needs a positive weight")
    return chosen, passes


def _draw(
    _: None, run: Run, reading: Reading, *sources: RowSource, size: int, seed: int
) -> RowSample:
    """The sample of a run's rows, of which only what tells weights and parts is read."""
    if not sources and reading.part is None:
        # Keys of equal rows are uniform on (0, 1): nearly always this bound leaves out none of the
        # sample, and most of the other rows, which then need no sorting.
        bound = (size + _SPARE * np.sqrt(size)) / (run.stop - run.start)
        likely = _smallest(run, reading, sources, size, seed, bound)
        if len(likely) == size:
            return likely
    return _smallest(run, reading, sources, size, seed, np.inf)


def _smallest(
    run: Run, reading: Reading, sources: tuple[RowSource, ...], size: int, seed: int, bound: float
) -> RowSample:
    """The rows of a run with the smallest keys, of those below a bound."""
    best = draw_among(np.empty(0, dtype=np.int64), (), None, size, seed)
    for strip in strips_of(run, reading, sources):
        strip.check()
        # Rows that don't come before the last one of a full sample can't be in it.
        below = bound if len(best) < size else float(best.keys[-1])
        fresh = draw_among(strip.rows, (), strip.weights, size, seed, below)
        best = merge((best, fresh), size)
    return best


def _merge_two(a: RowSample, b: RowSample, *, size: int) -> RowSample:
    return merge((a, b), size)


def _gather(index: Array, run: Run, reading: Reading, *sources: RowSource) -> tuple[Array, ...]:
    mine = index[np.searchsorted(index, run.start) : np.searchsorted(index, run.stop)]
    return tuple(_take(source, mine, run.start, run.stop) for source in sources)


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
