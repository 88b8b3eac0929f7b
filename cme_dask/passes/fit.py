"""The passes of a fit before that of its moments: its row sample, and rounds of pivots.

The row sample of arrays that bring none is a declared, partial read of the rows. A round of a
choice of pivots over all rows is a pass, for all variables at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cme_dask.data.columns import check_finite
from cme_dask.data.missing import completed, learned, marked
from cme_dask.data.sample import Sample
from cme_dask.data.sources import DerivedSource
from cme_dask.errors import DataError, ZeroWeights
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.numerics.folds import BY_ROWS, RowSample, draw, merge, uniform
from cme_dask.numerics.reduction import MAX_STRIP, Cost, Extent, Reduction, Strip
from cme_dask.numerics.rounds import PivotOffers, PivotState, Rule, choice_bytes
from cme_dask.passes.driver import Executor, in_this_process
from cme_dask.passes.progress import Listener
from cme_dask.passes.run import (
    PassReport,
    all_missing,
    count_bad_values,
    empty_part,
    extent_of,
    run_pass,
)

Array = Any

_SPARE = 6.0  # standard deviations of the number of rows below a bound
_WEIGHTS = 1e-200, 1e200
_ROWS_PER_CHUNK = 3  # of a sample, with which 95 % of the chunks hold some
_LEAST_SHARE = 1e-9  # of the stored rows that lack no value
_ENOUGH = 1 << 10  # stored rows of a part, with which no others are looked for


@dataclass(frozen=True)
class PrioritySample(Reduction[RowSample, RowSample]):
    """The rows of smallest priority key (a bottom-k sketch), with those columns that a pass reads.

    Parameters
    ----------
    size, seed
        Of the sample.
    """

    size: int
    seed: int
    name = "row-sample"
    on_device = False
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
        bound = float(state[0].max()) if len(state[0]) == self.size else np.inf
        drawn = draw(
            strip.rows, strip.parts, strip.weights, self.size, self.seed, bound, strip.units
        )
        keys = np.concatenate([state[0], drawn.keys])
        state[0] = keys if len(keys) <= self.size else np.partition(keys, self.size)[: self.size]
        return drawn

    def combine(self, a: RowSample, b: RowSample) -> RowSample:
        """Of both sets of rows."""
        return merge((a, b), self.size)


def sample_rows(
    sample: Sample, size: int, seed: int, executor: Executor, least: int = 2
) -> tuple[RowSample, int]:
    """The priority sample, and the passes over chunked rows that it took.

    The stored one takes none (of a part, what it holds of it), and so does one of arrays in memory.
    From other sources the sample that a store of the same rows would hold for the same seed is
    gathered: a pass that reads the chunks that hold its rows and, if there are weights or a part
    that a column tells, before that a pass over these alone. Where weights are made of other
    columns and nearly all chunks hold rows of the sample, one pass does both.

    Where rows that lack a value are left out, they are left out of the sample as well. It is then
    smaller: no further rows are read in their place.

    Raises
    ------
    DataError
        If there are fewer than ``least`` rows, the sample meets values that are not finite, weights
        are negative, all zero or too large for sums, or no row belongs to the part.
    """
    if sample.n_rows < least:
        noun = "sample" if sample.n_rows == 1 else "samples"
        rows_are = "1 row is" if least == 1 else f"{least} rows are"
        raise DataError(f"at least {rows_are} needed, got {sample.n_rows} {noun}")
    stored, requested = sample.row_sample, min(size, sample.n_rows)
    if sample.part is not None:
        requested = min(requested, _ENOUGH)
    drawn = 0.0 if stored is None else len(stored) / max(stored.complete_share, _LEAST_SHARE)
    if stored is not None and len(stored) and (stored.complete or drawn >= requested):
        rows, passes = stored.prefix(size), 0
    elif isinstance(sample.weights, DerivedSource) and _in_nearly_all_chunks(sample, size):
        (rows,), _ = run_pass(sample, [PrioritySample(size, seed)], executor)
        passes = 1
        if not len(rows):
            raise ZeroWeights()
    else:
        chosen, passes = choose_rows(sample, size, seed, executor)
        # Of these rows alone the sample is the same, and it holds what is read of them.
        in_memory = all(source.in_memory for source in sample.reads)
        here = in_this_process(executor) if in_memory else executor
        reductions, index = [PrioritySample(size, seed)], np.sort(chosen.index)
        (rows,), _ = run_pass(sample, reductions, here, index=index)
        share = len(rows) / len(chosen)
        rows = replace(rows, complete=chosen.complete, complete_share=share)
        passes += not in_memory
    if sample.dropping and len(rows) < least:
        raise all_missing()
    if sample.weights is not None:
        _check_weights(rows, sample, least)
    if not all(np.isfinite(part).all() for part in rows.parts):
        count_bad_values(sample, executor)
        for part, columns in zip(rows.parts, sample.columns, strict=True):
            check_finite(part, columns.names, 0)
    return rows, passes


def imputed_rows(
    sample: Sample, size: int, seed: int, executor: Executor
) -> tuple[Sample, RowSample, int]:
    """The sample with missing values of x filled in, its row sample, and the passes that took.

    What is filled in is learned from the row sample, see :func:`cme_dask.data.missing.learned`.
    Rows that lack another value than one of x are left out.

    Raises
    ------
    DataError
        As :func:`sample_rows`, or if a column of x has no value in any row.
    """
    rows, passes = sample_rows(marked(sample), size, seed, executor)
    columns, rows = learned(sample.columns[0], rows)
    return completed(sample, columns), rows, passes


def _in_nearly_all_chunks(sample: Sample, size: int) -> bool:
    """Whether nearly all chunks hold rows of the sample."""
    chunks = [s.chunk_rows for s in sample.sources if s.chunk_rows is not None]
    return bool(chunks) and min(size, sample.n_rows) * min(chunks) >= (
        _ROWS_PER_CHUNK * sample.n_rows
    )


def _check_weights(rows: RowSample, sample: Sample, least: int) -> None:
    if rows.complete and len(rows) < least:
        raise DataError(
            f"at least {least} rows of positive weight are needed, got {len(rows)} among the "
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
    # Which rows lack a value is seen when the rows are read.
    whole, sample = sample, replace(sample, folding=BY_ROWS, row_sample=None, beside=())
    part, n = sample.part, sample.n_rows
    if len(sample.reads) == len(sample.sources):
        # Nothing needs to be read: keys are hashes of the numbers of the rows.
        share = 1.0 if part is None else part.expected_share
        # Keys of equal rows are uniform on (0, 1): nearly always this bound leaves out none of the
        # sample, and most of the other rows, which then need no sorting.
        bound, index = (size + _SPARE * np.sqrt(size)) / (share * n), np.empty(0)
        while len(index) < size:
            strips = (np.arange(low, min(low + MAX_STRIP, n)) for low in range(0, n, MAX_STRIP))
            index = np.concatenate([rows[uniform(seed, rows) < bound] for rows in strips])
            if part is not None:
                index = index[part.selects(index, {})]
            if bound >= 1.0:
                break
            bound *= 2.0
        if not len(index):
            raise empty_part(sample)
        complete = bound >= 1.0 and len(index) <= size
        return replace(draw(index, (), None, size, seed), complete=complete), 0
    in_memory = all(source.in_memory for source in sample.reads)
    here = in_this_process(executor) if in_memory else executor
    alone = replace(sample, sources=(), columns=(), filled=())
    (chosen,), _ = run_pass(alone, [PrioritySample(size, seed)], here, named=whole)
    if not len(chosen):
        raise ZeroWeights()
    return chosen, int(not in_memory)


# Rounds of a choice of pivots


def choose_in_rounds(
    sample: Sample,
    variables: Mapping[int, tuple[Rule, PivotState]],
    executor: Executor,
    progress: Listener | None = None,
    on_round: Callable[[int, PivotState], None] = lambda i, state: None,
) -> tuple[dict[int, PivotState], list[PassReport]]:
    """Let the rule of each variable take its steps until it ends.

    Parameters
    ----------
    sample
        The rows.
    variables
        By the number of a variable in the sample, how its pivots are chosen, and where that starts:
        at ``PivotState.empty(d)``, or at a state that was stored.
    executor
        What memory there is.
    progress
        Called as each pass goes on.
    on_round
        Called with a variable and its state after each of its rounds.

    Returns
    -------
    states : the last state of each variable
    reports : of each round

    Raises
    ------
    DataError
        On NaN, infinity or unusable weights.
    ResourceError
        If a round would not fit into memory.
    """
    rules = {i: rule for i, (rule, _) in variables.items()}
    states = {i: state for i, (_, state) in variables.items()}
    reports: list[PassReport] = []
    while active := [i for i in sorted(rules) if not states[i].done]:
        others = (s for i, s in enumerate(sample.sources) if i not in active)
        read = replace(  # variables that have their pivots are read for missing values alone
            sample,
            sources=tuple(sample.sources[i] for i in active),
            columns=tuple(sample.columns[i] for i in active),
            row_sample=None,
            folding=sample.folding if sample.dropping else BY_ROWS,
            beside=tuple(others) if sample.dropping else (),
            filled=sample.filled if 0 in active else (),
        )
        extent = extent_of(read, executor, on_device=PivotOffers.on_device)
        asked = tuple((rules[i], states[i]) for i in active)
        ranks = tuple(state.rank for _, state in asked)
        around = Cost(alone={"the choice of pivots": choice_bytes(ranks, extent)})  # after it
        offers = PivotOffers(asked, extent.strips)
        (result,), report = run_pass(
            read, [offers], executor, progress, around=around, named=sample
        )
        reports.append(report)
        for i, offer in zip(active, result, strict=True):
            with one_blas_thread():
                states[i] = rules[i].step(states[i], offer)
            on_round(i, states[i])
    return states, reports
