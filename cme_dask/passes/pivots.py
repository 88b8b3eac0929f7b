"""Rounds of a choice of pivots over all rows: a round is a pass, for all variables at once."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cme_dask.data.sample import Sample
from cme_dask.numerics.folds import BY_ROWS
from cme_dask.numerics.reduction import Extent
from cme_dask.numerics.resources import MemoryPlan, one_blas_thread
from cme_dask.numerics.rounds import PivotOffers, PivotState, Rule, choice_bytes, round_cost
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.plan import RowRange
from cme_dask.passes.run import PassProgress, extent_of, plan_pass, run_pass


def choose_in_rounds(
    sample: Sample,
    rules: Mapping[int, Rule],
    states: Mapping[int, PivotState],
    budget: MemoryBudget,
    *,
    progress: Callable[[PassProgress], None] | None = None,
    on_round: Callable[[int, PivotState], None] = lambda i, state: None,
) -> tuple[dict[int, PivotState], int]:
    """Let each rule take its steps until it ends.

    Parameters
    ----------
    sample
        The rows.
    rules
        For each variable, by its number in the sample, how its pivots are chosen.
    states
        Where each starts: ``PivotState.empty(d)``, or a state that was stored.
    budget
        What memory there is.
    progress
        Called as each pass goes on.
    on_round
        Called with a variable and its state after each of its rounds.

    Returns
    -------
    states : the last state of each variable
    passes : number of passes over the rows

    Raises
    ------
    DataError
        On NaN, infinity or unusable weights.
    ResourceError
        If a round would not fit into memory.
    """
    now, passes = dict(states), 0
    while active := [i for i in sorted(rules) if not now[i].done]:
        offers = _ask(sample, {i: (rules[i], now[i]) for i in active}, budget, progress)
        passes += 1
        for i, offer in zip(active, offers, strict=True):
            with one_blas_thread():
                now[i] = rules[i].step(now[i], offer)
            on_round(i, now[i])
    return now, passes


def _ask(
    sample: Sample,
    asked: Mapping[int, tuple[Rule, PivotState]],
    budget: MemoryBudget,
    progress: Callable[[PassProgress], None] | None,
) -> tuple[Any, ...]:
    """One pass over the variables that are still choosing; the others are not read."""
    read = replace(
        sample,
        sources=tuple(sample.sources[i] for i in asked),
        columns=tuple(sample.columns[i] for i in asked),
        row_sample=None,
        folding=BY_ROWS,
    )
    extent = extent_of(read, budget.executor)
    offers = PivotOffers(tuple(asked.values()), extent.strips)
    ranks = tuple(state.rank for _, state in asked.values())
    return run_pass(
        read,
        offers,
        budget,
        progress,
        alone=_choice(ranks, extent),
        named=sample,
    )[0]


def predict_round(
    sample: Sample, ranks: tuple[int, ...], budget: MemoryBudget
) -> tuple[list[RowRange], MemoryPlan]:
    """How a round would be cut, and what it would need.

    Raises
    ------
    ResourceError
        If that does not fit into the budget.
    """
    extent = extent_of(sample, budget.executor)
    return plan_pass(round_cost(ranks, extent), extent, budget, alone=_choice(ranks, extent))


def _choice(ranks: tuple[int, ...], extent: Extent) -> dict[str, int]:
    """The phase after a round, in the client alone."""
    return {"the choice of pivots": choice_bytes(ranks, extent)}
