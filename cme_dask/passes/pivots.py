"""Rounds of a choice of pivots over all rows: a round is a pass, for all variables at once."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from cme_dask.data.sample import Sample
from cme_dask.numerics.folds import BY_ROWS
from cme_dask.numerics.reduction import Extent
from cme_dask.numerics.resources import MemoryPlan, one_blas_thread
from cme_dask.numerics.rounds import PivotOffers, PivotState, Rule, choice_bytes, round_cost
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.run import PassProgress, extent_of, plan_pass, run_pass


def choose_in_rounds(
    sample: Sample,
    variables: Mapping[int, tuple[Rule, PivotState]],
    budget: MemoryBudget,
    progress: Callable[[PassProgress], None] | None = None,
    on_round: Callable[[int, PivotState], None] = lambda i, state: None,
) -> tuple[dict[int, PivotState], int]:
    """Let the rule of each variable take its steps until it ends.

    Parameters
    ----------
    sample
        The rows.
    variables
        By the number of a variable in the sample, how its pivots are chosen, and where that starts:
        at ``PivotState.empty(d)``, or at a state that was stored.
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
    rules = {i: rule for i, (rule, _) in variables.items()}
    states, passes = {i: state for i, (_, state) in variables.items()}, 0
    while active := [i for i in sorted(rules) if not states[i].done]:
        read = replace(  # variables that have their pivots are not read
            sample,
            sources=tuple(sample.sources[i] for i in active),
            columns=tuple(sample.columns[i] for i in active),
            row_sample=None,
            folding=BY_ROWS,
        )
        extent = extent_of(read, budget.executor)
        asked = tuple((rules[i], states[i]) for i in active)
        alone = _choice(tuple(state.rank for _, state in asked), extent)
        offers = PivotOffers(asked, extent.strips)
        result, _ = run_pass(read, offers, budget, progress, alone=alone, named=sample)
        passes += 1
        for i, offer in zip(active, result, strict=True):
            with one_blas_thread():
                states[i] = rules[i].step(states[i], offer)
            on_round(i, states[i])
    return states, passes


def predict_round(sample: Sample, ranks: tuple[int, ...], budget: MemoryBudget) -> MemoryPlan:
    """The memory that a round at these ranks would need.

    Raises
    ------
    ResourceError
        If that does not fit into the budget.
    """
    extent = extent_of(sample, budget.executor)
    return plan_pass(round_cost(ranks, extent), extent, budget, alone=_choice(ranks, extent))[1]


def _choice(ranks: tuple[int, ...], extent: Extent) -> dict[str, int]:
    """The phase after a round, in the client alone."""
    return {"the choice of pivots": choice_bytes(ranks, extent)}
