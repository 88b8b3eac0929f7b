"""The passes of a fit: rounds of a choice of pivots, and the moments; and their memory.

A round of a choice of pivots over all rows is a pass, for all variables at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cme_dask.data.sample import Sample
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.cholesky import BLOCK, SKETCH, prefix_rows
from cme_dask.numerics.folds import BY_ROWS
from cme_dask.numerics.moments import MomentReduction, MomentSets, moment_cost
from cme_dask.numerics.reduction import Cost, Reduction
from cme_dask.numerics.resources import MemoryPlan, one_blas_thread
from cme_dask.numerics.rounds import PivotOffers, PivotState, Rule, choice_bytes
from cme_dask.passes.driver import Executor
from cme_dask.passes.plan import RowRange
from cme_dask.passes.progress import Listener
from cme_dask.passes.run import (
    PassReport,
    extent_of,
    plan_pass,
    run_pass,
)

_WORD = 8
_ROW_SAMPLE_WORDS = 4  # per row of the row sample beside its values: key, index, weight, importance


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
        read = replace(  # variables that have their pivots are not read
            sample,
            sources=tuple(sample.sources[i] for i in active),
            columns=tuple(sample.columns[i] for i in active),
            row_sample=None,
            folding=BY_ROWS,
        )
        extent = extent_of(read, executor)
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


# The moments, and the memory of a choice of pivots before them


def moment_reductions(
    specs: Sequence[MomentReduction], cells: Sequence[CellReduction] = ()
) -> tuple[Reduction[Any, Any], ...]:
    """Sets of moments, and sums by cell of the first variables, of the same rows.

    The answer of the first reduction is one set of moments, or a tuple of several; those of the
    others are sums by cell.

    Parameters
    ----------
    specs
        What to compute, with the same number of folds.
    cells
        Of the first variables, one after the other: the cells whose rows are summed.
    """
    n_folds = specs[0].n_folds
    by_cell = [replace(each, variable=i, n_folds=n_folds) for i, each in enumerate(cells)]
    return specs[0] if len(specs) == 1 else MomentSets(tuple(specs)), *by_cell


def predict_moments(
    sample: Sample,
    ranks: tuple[int, ...],
    width: int,
    n_folds: int,
    executor: Executor,
    *,
    sample_rows: int = 0,
    cells: Sequence[CellReduction] = (),
) -> tuple[list[RowRange], MemoryPlan]:
    """How the moment pass would be cut, and what the fit would need.

    Parameters
    ----------
    sample, executor
        The rows; where to run, and the memory that is there.
    ranks, width, n_folds
        Of the moments, see :func:`cme_dask.numerics.moments.moment_cost`.
    sample_rows
        Rows of the row sample if pivots are chosen from it, else 0.
    cells
        As in :func:`moment_reductions`.

    Raises
    ------
    ResourceError
        If that does not fit into the memory.
    """
    sample = sample.for_folds(n_folds)
    extent = extent_of(sample, executor)
    cost = choice_cost(sample, sample_rows, max(ranks))
    cost += moment_cost(ranks, width, n_folds, extent)
    for i, spec in enumerate(cells):
        cost += replace(spec, variable=i, n_folds=n_folds).cost(extent)
    return plan_pass(cost, extent, executor)


def choice_cost(sample: Sample, sample_rows: int, rank: int) -> Cost:
    """What the client needs for a choice of ``rank`` pivots from a row sample, and to hold it."""
    complete = sample.part is not None or sample_rows >= sample.n_rows
    return Cost(
        alone={"the choice of pivots": pivot_bytes(sample_rows, rank, complete=complete)},
        held=row_sample_bytes(sample_rows, sum(source.shape[1] for source in sample.reads)),
    )


def row_sample_bytes(rows: int, columns: int) -> int:
    """What a row sample takes, of so many columns of x, y and weights together."""
    return rows * (columns + _ROW_SAMPLE_WORDS) * _WORD


def pivot_bytes(sample_rows: int, rank: int, *, complete: bool = False) -> int:
    """Peak of a choice of ``rank`` pivots from a row sample.

    Pivots are chosen from one half of it and judged on the other half, unless it is complete.
    """
    row = -(-rank // BLOCK) * BLOCK * _WORD
    # Signs and sketch of the rows of a choice by trace, and of half as many before.
    half = sample_rows if complete else -(-sample_rows // 2)
    sketches = 3 * SKETCH * prefix_rows(rank, half, by_trace=True) * _WORD

    # L in blocks of columns, and pools in pools of an eighth of the rows each. Where a choice fails
    # on the other rows, its rows are doubled, and those of one half are held until the columns of
    # all are ready.
    if complete:
        return int(1.5 * sample_rows * row) + sketches
    chosen = prefix_rows(rank, half, by_trace=False)
    grown = min(2 * chosen, half)
    grown_columns = int((1.5 if grown > chosen else 1.2) * grown * row)
    return half * row + grown_columns + sketches
