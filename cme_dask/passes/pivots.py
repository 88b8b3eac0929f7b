"""Rounds of a choice of pivots over all rows: a round is a pass, for all variables at once."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from cme_dask.data.sample import Sample
from cme_dask.numerics.folds import BY_ROWS
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.numerics.rounds import PivotOffers, PivotState, Rule, choice_bytes
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.progress import Listener
from cme_dask.passes.run import PassReport, extent_of, run_pass


def choose_in_rounds(
    sample: Sample,
    variables: Mapping[int, tuple[Rule, PivotState]],
    budget: MemoryBudget,
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
    budget
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
        extent = extent_of(read, budget.executor)
        asked = tuple((rules[i], states[i]) for i in active)
        ranks = tuple(state.rank for _, state in asked)
        alone = {"the choice of pivots": choice_bytes(ranks, extent)}  # after the round
        offers = PivotOffers(asked, extent.strips)
        result, report = run_pass(read, offers, budget, progress, alone=alone, named=sample)
        reports.append(report)
        for i, offer in zip(active, result, strict=True):
            with one_blas_thread():
                states[i] = rules[i].step(states[i], offer)
            on_round(i, states[i])
    return states, reports
