"""The row sample of arrays that bring none: a declared, partial read of the rows."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource, take_rows
from cme_dask.errors import DataError
from cme_dask.numerics.folds import BY_ROWS, RowSample, draw_among, merge
from cme_dask.numerics.reduction import BadValues, Cost, Extent, Reduction, Strip, reduce_strips
from cme_dask.passes.driver import Executor
from cme_dask.passes.plan import MAX_STRIP, RowRange
from cme_dask.passes.run import Pass, count_bad_values, empty_part, run_pass

Array = Any

_SPARE = 6.0  # standard deviations of the number of rows below a bound
_ENOUGH = 1 << 10  # stored rows of a part, with which no others are looked for


@dataclass(frozen=True)
class PrioritySample(Reduction[RowSample, RowSample]):
    """Keys, indices and weights of a row sample (a bottom-k sketch), without its rows.

    Parameters
    ----------
    size, seed
        Of the sample.
    bound
        Rows with keys from here on are left out.
    """

    size: int
    seed: int
    bound: float = np.inf
    name = "row-sample"
    kinds = (RowSample,)

    def cost(self, extent: Extent) -> Cost:
        """A key for each row, and two samples."""
        return Cost(flops=50, state=2 * extent.strip_rows * 8, partial=2 * 4 * self.size * 8)

    def start(self, like: Array) -> list[Array]:
        """The smallest keys of the strips so far."""
        return [np.empty(0)]

    def update(self, state: list[Array], strip: Strip) -> RowSample:
        """Of one strip, without rows that can't be in the sample of all strips so far."""
        full = len(state[0]) == self.size
        bound = min(self.bound, float(state[0].max())) if full else self.bound
        drawn = draw_among(strip.rows, (), strip.weights, self.size, self.seed, bound)
        keys = np.concatenate([state[0], drawn.keys])
        state[0] = keys if len(keys) <= self.size else np.partition(keys, self.size)[: self.size]
        return drawn

    def combine(self, a: RowSample, b: RowSample) -> RowSample:
        """Of both sets of rows."""
        return merge((a, b), self.size)


@dataclass(frozen=True)
class Rows(Reduction[tuple[Array, ...], tuple[Array, ...]]):
    """All rows of each variable that a pass reads, in their order: give it the few to be read.

    Parameters
    ----------
    count
        Their number.
    """

    count: int
    name = "gather-rows"
    checked = False

    def cost(self, extent: Extent) -> Cost:
        """The rows."""
        return Cost(retained=self.count * extent.n_columns * 8)

    def update(self, state: None, strip: Strip) -> tuple[Array, ...]:
        """The rows of one strip."""
        return strip.parts

    def combine(self, a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        """One after the other."""
        return tuple(np.concatenate(pair) for pair in zip(a, b, strict=True))


def sample_rows(sample: Sample, size: int, seed: int, executor: Executor) -> tuple[RowSample, int]:
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
    chosen, passes = choose_rows(sample, size, seed, executor)
    by_row = np.argsort(chosen.index)
    index = chosen.index[by_row]
    columns = Sample((*sample.sources, *sample.units.values()), ())
    if all(source.in_memory for source in columns.reads):
        rows = tuple(take_rows(s, index, s.chunk_rows or MAX_STRIP) for s in columns.reads)
    else:
        (rows,), _ = run_pass(columns, [Rows(len(index))], executor, index=index)
        passes += 1
    back = np.argsort(by_row)
    parts = tuple(part[back] for part in rows[: len(sample.sources)])
    units = [values[back, 0] for values in rows[len(sample.sources) :]]
    return replace(chosen, parts=parts, units=dict(zip(sample.units, units, strict=True))), passes


def choose_rows(sample: Sample, size: int, seed: int, executor: Executor) -> tuple[RowSample, int]:
    """Keys, indices and weights of a priority sample without its rows, and the passes it took.

    Raises
    ------
    DataError
        If weights are negative, weights or times are not finite, all weights are zero, or no row
        belongs to the part.
    """
    whole, sample = sample, replace(sample, folding=BY_ROWS, row_sample=None)
    criteria, drawn = sample.reads[len(sample.sources) :], PrioritySample(size, seed)
    if not criteria or all(source.in_memory for source in sample.reads):
        try:
            chosen, passes = _draw_here(sample, criteria, drawn, executor), 0
        except BadValues:
            count_bad_values(whole, executor)
            raise
        if not len(chosen) and sample.weights is None:
            raise empty_part(sample)
    else:
        alone = replace(sample, sources=(), columns=())
        (chosen,), _ = run_pass(alone, [drawn], executor, named=whole)
        passes = 1
    if not len(chosen):
        raise DataError("all weights are zero: at least one row needs a positive weight")
    return chosen, passes


def _draw_here(
    sample: Sample, criteria: tuple[RowSource, ...], drawn: PrioritySample, executor: Executor
) -> RowSample:
    """The sample in this process, which reads only weights and the columns that define parts."""
    reading = replace(Pass.of(sample, [drawn], executor), sources=criteria, variables=0)
    rows, size, bounds = RowRange(0, sample.n_rows, MAX_STRIP), drawn.size, [np.inf]
    if not criteria and sample.part is None:
        # Keys of equal rows are uniform on (0, 1): nearly always this bound leaves out none of the
        # sample, and most of the other rows, which then need no sorting.
        bounds.insert(0, (size + _SPARE * np.sqrt(size)) / sample.n_rows)
    for bound in bounds:
        chosen: RowSample
        _, (chosen,) = reduce_strips([replace(drawn, bound=bound)], reading.strips(rows))
        if len(chosen) == size:
            break
    return chosen
