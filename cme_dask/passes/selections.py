"""Passes that select: the row sample, the rows nearest to points, ranges."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cme_dask.data.row_sample import PrioritySample, Rows, RowSample
from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource, take_rows
from cme_dask.errors import DataError
from cme_dask.numerics.basis import LinearBasis
from cme_dask.numerics.folds import BY_ROWS
from cme_dask.numerics.reduction import BadValues, reduce_strips
from cme_dask.numerics.rows import BasisRanges, NearestRows, Neighbours
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.plan import MAX_STRIP, Reading, RowRange, empty_part
from cme_dask.passes.run import count_bad_values, run_pass

# The row sample of arrays that bring none: a declared, partial read


Array = Any

_SPARE = 6.0  # standard deviations of the number of rows below a bound
_ENOUGH = 1 << 10  # stored rows of a part, with which no others are looked for


def sample_rows(
    sample: Sample, size: int, seed: int, budget: MemoryBudget
) -> tuple[RowSample, int]:
    """The priority sample, and the passes over chunked rows that it took.

    The stored one takes none (of a part, what it holds of it), and so does one of arrays in memory.
    From other sources the sample that a store of the same rows would hold for the same seed is
    gathered: a pass that reads the chunks that hold its rows and, if there are weights or a part
    that a column tells, before that a pass over these alone.

    Raises
    ------
    DataError
        If weights are negative, weights or times are not finite, all weights are zero, or no row
        belongs to the part.
    """
    stored, requested = sample.row_sample, min(size, sample.n_rows)
    if sample.part is not None:
        requested = min(requested, _ENOUGH)
    if stored is not None and len(stored) >= (1 if stored.complete else requested):
        return stored.prefix(size), 0
    chosen, passes = choose_rows(sample, size, seed, budget)
    by_row = np.argsort(chosen.index)
    index = chosen.index[by_row]
    columns = Sample((*sample.sources, *sample.units.values()), ())
    if all(source.in_memory for source in columns.reads):
        rows = tuple(take_rows(s, index, s.chunk_rows or MAX_STRIP) for s in columns.reads)
    else:
        rows, _ = run_pass(columns, Rows(len(index)), budget, index=index)
        passes += 1
    back = np.argsort(by_row)
    parts = tuple(part[back] for part in rows[: len(sample.sources)])
    units = [values[back, 0] for values in rows[len(sample.sources) :]]
    return replace(chosen, parts=parts, units=dict(zip(sample.units, units, strict=True))), passes


def choose_rows(
    sample: Sample, size: int, seed: int, budget: MemoryBudget
) -> tuple[RowSample, int]:
    """Keys, indices and weights of a priority sample without its rows, and the passes it took.

    Raises
    ------
    DataError
        If weights are negative, weights or times are not finite, all weights are zero, or no row
        belongs to the part.
    """
    whole, sample = sample, replace(sample.fold_by(BY_ROWS), row_sample=None)
    told_by, drawn = sample.reads[len(sample.sources) :], PrioritySample(size, seed)
    if not told_by or all(source.in_memory for source in sample.reads):
        try:
            chosen, passes = _draw_here(sample, told_by, drawn), 0
        except BadValues:
            count_bad_values(whole, budget.executor)
            raise
        if not len(chosen) and sample.weights is None:
            raise empty_part(sample)
    else:
        alone = replace(sample, sources=(), columns=())
        chosen, _ = run_pass(alone, drawn, budget, named=whole)
        passes = 1
    if not len(chosen):
        raise DataError("all weights are zero: at least one row needs a positive weight")
    return chosen, passes


def _draw_here(sample: Sample, told_by: tuple[RowSource, ...], drawn: PrioritySample) -> RowSample:
    """The sample in this process, of which only what tells weights and parts is read."""
    reading = replace(Reading.of(sample, shares_memory=True), sources=told_by, variables=0)
    rows = RowRange(0, sample.n_rows, MAX_STRIP)

    def below(bound: float) -> RowSample:
        return reduce_strips(replace(drawn, bound=bound), reading.strips(rows))[1]

    if not told_by and sample.part is None:
        # Keys of equal rows are uniform on (0, 1): nearly always this bound leaves out none of the
        # sample, and most of the other rows, which then need no sorting.
        likely = below((drawn.size + _SPARE * np.sqrt(drawn.size)) / sample.n_rows)
        if len(likely) == drawn.size:
            return likely
    return below(np.inf)


# Rows nearest to some points: the empirical answer to compare a law with


def nearest_rows(
    sample: Sample, points: Array, k: int, scale: Array, budget: MemoryBudget
) -> Neighbours:
    """The k rows nearest to each point in x, by |(x_i - point) / scale|, in one pass.

    Parameters
    ----------
    sample
        Rows of x and y.
    points
        Shape (p, d_X).
    k
        Number of rows per point, at most n.
    scale
        A length per column of x, shape (d_X,).
    budget
        Where to run, and the memory that is there.

    Notes
    -----
    Rows of weight zero, and of other parts than the one that is asked, are no neighbours: if fewer
    than k are left, all of them are returned. Ties go to the lowest row. Memory per task is one
    strip of distances, p of them.
    """
    if not 1 <= k <= sample.n_rows:
        raise DataError(f"k must lie between 1 and the number of rows {sample.n_rows}, got {k}")
    nearest = NearestRows(np.asarray(points), k, np.asarray(scale))
    neighbours, _ = run_pass(sample, nearest, budget)
    if not neighbours.distance.shape[1]:
        raise DataError("no row of positive weight is at a finite distance: correct the points")
    return neighbours


def observed_ranges(
    sample: Sample, bases: Sequence[LinearBasis], budget: MemoryBudget
) -> tuple[Array, ...]:
    """Lowest and highest values of psi over the rows of positive weight, in one pass.

    Parameters
    ----------
    sample
        The rows.
    bases
        A basis for each variable.
    budget
        Where to run, and the memory that is there.

    Returns
    -------
    ranges : for each variable, shape (2, k)
    """
    return run_pass(sample, BasisRanges(tuple(bases)), budget)[0]
