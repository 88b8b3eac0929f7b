"""The row sample of arrays that bring none: a declared, partial read of the rows."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cme_dask.data.columns import check_finite
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.numerics.folds import BY_ROWS, RowSample, draw_among, merge
from cme_dask.numerics.reduction import BadValues, Cost, Extent, Reduction, Strip, reduce_strips
from cme_dask.passes.driver import Executor
from cme_dask.passes.plan import MAX_STRIP, RowRange
from cme_dask.passes.run import Pass, count_bad_values, empty_part, run_pass

Array = Any

_SPARE = 6.0  # standard deviations of the number of rows below a bound
_WEIGHTS = 1e-200, 1e200
_ENOUGH = 1 << 10  # stored rows of a part, with which no others are looked for


@dataclass(frozen=True)
class PrioritySample(Reduction[RowSample, RowSample]):
    """The rows of smallest priority key (a bottom-k sketch), with those columns that a pass reads.

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
    n_folds = 2  # so that groups and times are read, which belong to the sample
    kinds = (RowSample,)

    def cost(self, extent: Extent) -> Cost:
        """A key for each row, two samples, and the rows themselves."""
        state, partial = 2 * extent.strip_rows * 8, 2 * 4 * self.size * 8
        retained = self.size * extent.n_columns * 8
        return Cost(flops=50, state=state, partial=partial, retained=retained)

    def start(self, like: Array) -> list[Array]:
        """The smallest keys of the strips so far."""
        return [np.empty(0)]

    def update(self, state: list[Array], strip: Strip) -> RowSample:
        """Of one strip, without rows that can't be in the sample of all strips so far."""
        full = len(state[0]) == self.size
        bound = min(self.bound, float(state[0].max())) if full else self.bound
        drawn = draw_among(
            strip.rows, strip.parts, strip.weights, self.size, self.seed, bound, strip.units
        )
        keys = np.concatenate([state[0], drawn.keys])
        state[0] = keys if len(keys) <= self.size else np.partition(keys, self.size)[: self.size]
        return drawn

    def combine(self, a: RowSample, b: RowSample) -> RowSample:
        """Of both sets of rows."""
        return merge((a, b), self.size)


def sample_rows(sample: Sample, size: int, seed: int, executor: Executor) -> tuple[RowSample, int]:
    """The priority sample, and the passes over chunked rows that it took.

    The stored one takes none (of a part, what it holds of it), and so does one of arrays in memory.
    From other sources the sample that a store of the same rows would hold for the same seed is
    gathered: a pass that reads the chunks that hold its rows and, if there are weights or a part
    that a column tells, before that a pass over these alone.

    Raises
    ------
    DataError
        If there are fewer than two rows, the sample meets values that are not finite, weights are
        negative, all zero or too large for sums, or no row belongs to the part.
    """
    if sample.n_rows < 2:
        noun = "sample" if sample.n_rows == 1 else "samples"
        raise DataError(f"at least 2 rows are needed, got {sample.n_rows} {noun}")
    stored, requested = sample.row_sample, min(size, sample.n_rows)
    if sample.part is not None:
        requested = min(requested, _ENOUGH)
    if stored is not None and len(stored) >= (1 if stored.complete else requested):
        rows, passes = stored.prefix(size), 0
    else:
        chosen, passes = choose_rows(sample, size, seed, executor)
        # Of these rows alone the sample is the same, and it holds what is read of them.
        gather, index = PrioritySample(size, seed), np.sort(chosen.index)
        if all(source.in_memory for source in sample.reads):
            here = replace(Pass.of(sample, [gather], executor, index), sources=sample.reads)
            rows = _drawn(here, sample, executor)
        else:
            (rows,), _ = run_pass(sample, [gather], executor, index=index)
            passes += 1
        rows = replace(rows, complete=chosen.complete)
    if sample.weights is not None:
        _check_weights(rows, sample)
    if not all(np.isfinite(part).all() for part in rows.parts):
        count_bad_values(sample, executor)
        for part, columns in zip(rows.parts, sample.columns, strict=True):
            check_finite(part, columns.names, 0)
    return rows, passes


def _check_weights(rows: RowSample, sample: Sample) -> None:
    if rows.complete and len(rows) < 2:
        raise DataError(
            f"at least 2 rows of positive weight are needed, got {len(rows)} among the "
            f"{sample.n_rows:,} rows: check the column of weights"
        )
    largest = float(rows.weights.max(initial=0.0))
    if not _WEIGHTS[0] <= largest <= _WEIGHTS[1]:
        low, high = _WEIGHTS
        raise DataError(
            f"the largest weight of the sampled rows is {largest:g}, outside {low:g} to {high:g}, "
            "where sums keep their digits: multiply all weights by one number, since only their "
            "ratios count"
        )


def choose_rows(sample: Sample, size: int, seed: int, executor: Executor) -> tuple[RowSample, int]:
    """Keys, indices and weights of a priority sample without its rows, and the passes it took.

    Raises
    ------
    DataError
        If weights are negative, weights or times are not finite, all weights are zero, or no row
        belongs to the part.
    """
    whole, sample = sample, replace(sample, folding=BY_ROWS, row_sample=None)
    criteria, reduction = sample.reads[len(sample.sources) :], PrioritySample(size, seed)
    if criteria and not all(source.in_memory for source in sample.reads):
        alone = replace(sample, sources=(), columns=())
        (chosen,), _ = run_pass(alone, [reduction], executor, named=whole)
        passes = 1
    else:
        bounds, passes = [np.inf], 0
        if not criteria and sample.part is None:
            # Keys of equal rows are uniform on (0, 1): nearly always this bound leaves out none of
            # the sample, and most of the other rows, which then need no sorting.
            bounds.insert(0, (size + _SPARE * np.sqrt(size)) / sample.n_rows)
        for bound in bounds:
            draw = Pass.of(sample, [replace(reduction, bound=bound)], executor)
            chosen = _drawn(replace(draw, sources=criteria, variables=0), whole, executor)
            if len(chosen) == size:
                break
        if not len(chosen) and sample.weights is None:
            raise empty_part(sample)
    if not len(chosen):
        raise DataError("all weights are zero: at least one row needs a positive weight")
    return chosen, passes


def _drawn(here: Pass, sample: Sample, executor: Executor) -> RowSample:
    """The sample of a pass in this process."""
    strips = here.strips(RowRange(0, sample.n_rows, MAX_STRIP))
    try:
        _, (drawn,) = reduce_strips(here.reductions, strips)
    except BadValues:
        count_bad_values(sample, executor)
        raise
    result: RowSample = drawn
    return result
