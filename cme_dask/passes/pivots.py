"""Rounds of a choice of pivots over all rows: a round is a pass, for all variables at once."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from dask.utils import format_bytes

from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource
from cme_dask.errors import ResourceError, option
from cme_dask.numerics.folds import BY_ROWS
from cme_dask.numerics.pools import BLOCK
from cme_dask.numerics.resources import MemoryPlan, one_blas_thread
from cme_dask.numerics.rounds import ROWS, Offer, PivotState, Rule, offered_rows
from cme_dask.passes.checkpoint import keeps
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.plan import Reading, Run, empty_part, strip_length, strips_of, tree_sum
from cme_dask.passes.run import (
    FLOPS,
    PassClock,
    PassProgress,
    materialised,
    plan_sample,
    run_over_rows,
)

_WORD = 8
_ROW_WORDS = 8  # per row of a strip: residual, diagonal, weight, index, their temporaries


@dataclass(frozen=True, eq=False)
class _Offers:
    """Offers of a set of rows, one for each variable that is still choosing; no rows offer none."""

    each: tuple[Offer, ...]

    def __add__(self, other: "_Offers") -> "_Offers":
        if not self.each or not other.each:
            return self if self.each else other
        return _Offers(tuple(a + b for a, b in zip(self.each, other.each, strict=True)))


keeps(_Offers)


@dataclass(frozen=True, eq=False)
class _Question:
    """What a round asks: rules and states of its variables, in the order of the parts."""

    asked: tuple[tuple[Rule, PivotState], ...]
    strips: int


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
        Where each starts: ``rule.init(d)``, or a state that was stored.
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
    BadValues
        On NaN, infinity or unusable weights.
    ResourceError
        If a round would not fit into memory.
    """
    now, passes = dict(states), 0
    while active := [i for i in sorted(rules) if not rules[i].terminate(now[i])]:
        offers = _ask(sample, {i: (rules[i], now[i]) for i in active}, budget, progress)
        passes += 1
        for i, offer in zip(active, offers.each, strict=True):
            with one_blas_thread():
                now[i] = rules[i].step(now[i], offer)
            on_round(i, now[i])
    return now, passes


def _ask(
    sample: Sample,
    asked: Mapping[int, tuple[Rule, PivotState]],
    budget: MemoryBudget,
    progress: Callable[[PassProgress], None] | None,
) -> _Offers:
    """One pass over the variables that are still choosing; the others are not read."""
    read = replace(
        sample,
        sources=tuple(sample.sources[i] for i in asked),
        columns=tuple(sample.columns[i] for i in asked),
        row_sample=None,
        folding=BY_ROWS,
    )
    runs, _ = predict_round(read, tuple(state.rank for _, state in asked.values()), budget)
    clock = PassClock(runs, budget.executor.workers, progress, "pivot-round")
    question = _Question(tuple(asked.values()), -(-read.n_rows // runs[0].length))
    offers: _Offers = run_over_rows(
        read,
        budget.executor,
        _strip_offers,
        _add,
        shared=question,
        name="pivot-round",
        runs=runs,
        on_done=clock.done,
    )
    if not offers.each:
        raise empty_part(sample)
    return offers


def _strip_offers(question: _Question, run: Run, reading: Reading, *sources: RowSource) -> _Offers:
    prepared = [rule.prepare(state, question.strips) for rule, state in question.asked]

    def each() -> Iterator[_Offers]:
        for strip in strips_of(run, reading, sources):
            strip.check()
            pairs = zip(prepared, strip.parts, strict=True) if len(strip) else ()
            yield _Offers(tuple(offer(strip.rows, x, strip.weights) for offer, x in pairs))

    return tree_sum(each())


def _add(a: _Offers, b: _Offers) -> _Offers:
    return a + b


def predict_round(
    sample: Sample, ranks: tuple[int, ...], budget: MemoryBudget
) -> tuple[list[Run], MemoryPlan]:
    """How a round would be cut, and what it would need.

    Raises
    ------
    ResourceError
        If that does not fit into the budget.
    """
    d = sum(source.shape[1] for source in sample.reads)
    n, rank, square = sample.n_rows, sum(ranks), sum(m * m for m in ranks)
    runs = plan_sample(sample, budget.executor, (square + 2 * rank * d) / FLOPS)
    length = strip_length(n)
    strips = -(-n // length)
    longest = max(run.rows for run in runs)
    rows = (3 if sample.part is None else 4) * length
    rows += 2 * max(source.chunk_rows or 0 for source in sample.reads)
    rows += 2 * longest if materialised(sample, budget.executor) else 0
    # The factor as it came and as it is prepared, and kernel sections with their temporaries.
    task = rows * d + _ROW_WORDS * length + 2 * square + 3 * ROWS * rank
    offered = sum(max(strips * offered_rows(m, strips), 2 * m) for m in ranks) * (d + 3)
    waiting = offered * (1 + math.ceil(math.log2(max(len(runs), 2))))
    pool = max(_pool_words(strips * offered_rows(m, strips), m) for m in ranks)
    choice = {"the choice of pivots": (pool + 2 * square) * _WORD}
    plan = budget.tightest(task * _WORD, waiting * _WORD, choice)
    if plan.predicted > plan.limit:
        raise ResourceError(
            f"{plan.place} would need {format_bytes(plan.predicted)} for a round of pivots at rank "
            f"{' + '.join(map(str, ranks))}, the limit is {format_bytes(plan.limit)}: lower "
            f"{option('max_rank')} or raise {option('tol')}, or use fewer workers"
        )
    return runs, plan


def _pool_words(rows: int, rank: int) -> int:
    """Columns of L over the pool and its parts, or the residual matrix of random proposals."""
    return max(int(1.7 * rows * (rank + BLOCK)), 12 * rank * rank)
