"""The steps of a fit, as its progress reports them."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from cme_dask.config import HELD_ROWS, MAX_RANK, SAMPLE_SIZE
from cme_dask.estimators.context import PivotProgress, Progress
from cme_dask.estimators.planning import RESIDUAL_EVALUATIONS, RESIDUAL_FINALISTS
from cme_dask.learning.candidates import Tuning, TuningProgress
from cme_dask.passes.driver import Executor
from cme_dask.passes.progress import (
    Event,
    FitDisplay,
    FitProgress,
    Listener,
    Step,
    StepBegan,
    listening,
)
from cme_dask.passes.publishing import Publisher, publishing

ROWS, SEARCH, PIVOTS, PASS, SOLUTION = "rows", "search", "pivots", "pass", "solution"
LOCATION, DECISION, ITERATIONS = "location", "decision", "iterations"
LEFT_OUT, GIVEN = "left out", "given location"
SECOND = "second "
"""Before the key of a step that is done again for the residuals of y."""

SECOND_PASS = (SECOND + PIVOTS, SECOND + PASS, SECOND + SOLUTION, DECISION)
"""What follows where the row sample advises a location model."""

DENSE_POWER = 2.4
"""Of the rank: the measured time of dense algebra by fold."""

_NAMES = {
    ROWS: "row sample",
    SEARCH: "search for kernels",
    PIVOTS: "pivots",
    PASS: "pass over the rows",
    SOLUTION: "solution",
    LOCATION: "location of y given x",
    GIVEN: "location by the given regressor",
    SECOND + SEARCH: "search for kernels of residuals",
    SECOND + PIVOTS: "pivots of residuals",
    SECOND + PASS: "pass over the residuals",
    SECOND + SOLUTION: "solution for residuals",
    ITERATIONS: "passes of the iteration",
    LEFT_OUT: "leave-one-out pass over the rows",
    DECISION: "comparison on held-out rows",
}
_REFINED = 3.5  # time of a later trial over that of a pair of the grid, where columns are scaled
_CONVERGED = 16  # trials after which a refinement of few length scales ends by itself
_LEARNED_RANK = 280.0  # of bases of several columns, before their own are known
_SHORT = 1.3  # ranks over those on the rows of the search, which are fewer
_SECOND_RANK = 25.0  # of bases of x and of residuals, before their own are known
_FLOPS = 4.7e10  # of one core in a pass, per second
_BESIDE = 215.0  # rank whose products take as long as what a pass does beside them
_LOCATION_SECONDS = 0.4  # of a location on the row sample
_GIVEN_SECONDS = 5.0  # of a regressor on the row sample, with its refits without each fold
_GRADIENTS = 20.0  # of an iteration, when half of it is taken to be done
_LARGE = 500.0  # of a basis, to whose cost others are compared


def dense_cost(ranks: Sequence[float]) -> float:
    """Time of dense algebra on bases of these ranks, in that of one of rank 500."""
    return float(sum((rank / _LARGE) ** DENSE_POWER for rank in ranks))


class SearchTimes:
    """How far a search for kernels is, by the time that its own trials take.

    Parameters
    ----------
    columns
        Of all variables: each has a length scale to be refined.
    refined
        Time of a trial after the grid over that of a pair of the grid, until it is measured.
    before
        Times of an earlier search, whose grid took its time in the same way: the first pairs make
        bases that later ones share.
    """

    def __init__(
        self, columns: int, refined: float = _REFINED, before: "SearchTimes | None" = None
    ) -> None:
        self._columns, self._refined = columns, refined
        self._shares: dict[int, float] = {} if before is None else before._grid_shares()
        self._spent: dict[int, float] = {}
        self._stage, self._before = "", 0
        self._begin: float | None = None
        self._since = self._last = self._pair = self._grid = 0.0

    @property
    def begun(self) -> bool:
        """Whether it has reported a trial."""
        return self._begin is not None

    @property
    def second(self) -> float:
        """Seconds expected of a search for kernels of residuals: the same grid, few trials."""
        return self._grid + (self._columns + RESIDUAL_EVALUATIONS) * self._pair

    def share(self, event: TuningProgress, now: float) -> float:
        """Share of the search's time that has passed.

        Parameters
        ----------
        event
            What the search reports.
        now
            Seconds by a clock.
        """
        if self._begin is None:
            self._begin = self._last = now
        if event.stage != self._stage:
            self._stage, self._since, self._before = event.stage, self._last, 0
            if event.stage == "grid":
                self._before = event.done
        self._last = now
        spent, done = now - self._since, event.done - self._before
        trial = spent / done if done else 0.0
        most, trials = event.most, self._refinements(event.later)
        if event.stage == "grid":
            self._spent[event.done] = spent
            if event.done in self._shares:
                left = spent * (1.0 / self._shares[event.done] - 1.0)
                trial = left / max(most - event.done, 1)
            self._grid = spent + trial * (most - event.done)
            self._pair = self._grid / most
        elif event.stage == "columns":
            trial = self._refined * self._pair
        elif event.stage == "refine":
            most = self._refinements(most)
        left = max(most - event.done, 1) * trial + trials * self._refined * self._pair
        elapsed = now - self._begin
        return elapsed / (elapsed + left) if elapsed > 0.0 else 0.0

    def _grid_shares(self) -> dict[int, float]:
        return {done: spent / self._grid for done, spent in self._spent.items() if spent > 0.0}

    def _refinements(self, most: int) -> int:
        return min(most, _CONVERGED) if self._columns <= 3 else most


Operations: TypeAlias = Callable[[Sequence[float]], float]
"""Operations per row, by the ranks of the bases."""


class StepCosts:
    """Seconds of the steps of a fit, before they are measured.

    They were measured on one core, on fits of 300 to 100,000 rows with one to six columns; what the
    machine takes for the steps before scales them.

    Parameters
    ----------
    n_rows
        Rows.
    columns
        Columns of each variable.
    workers
        Tasks that run at once.
    left_out
        Operations per row of a leave-one-out pass by the ranks of the bases, if there is one.
    """

    def __init__(
        self,
        n_rows: int,
        columns: Sequence[int],
        workers: int,
        left_out: Operations | None = None,
    ) -> None:
        self.n_rows, self._workers, self.columns = n_rows, workers, sum(columns)
        self.left_out = left_out
        # Values of y at which laws are judged, in those of one column at most.
        self._judged = sum(columns[1:]) * min(n_rows, HELD_ROWS) / HELD_ROWS
        most = min(_LEARNED_RANK, n_rows / 5.0)
        powers = [min(d - 1, 20) for d in columns]  # of hundreds of columns they would overflow
        ranks = [50.0 * 5.0 ** powers[0], *(15.0 * 8.0**power for power in powers[1:])]
        self.guessed_ranks = [min(most, rank) for rank in ranks]
        self.second_ranks = [_SECOND_RANK for _ in columns]

    def search(self) -> float:
        """Seconds of a search for kernels, on 4096 rows at most."""
        base = {1: 0.2, 2: 0.31, 3: 1.0}.get(self.columns, 2.3 + 0.55 * (self.columns - 4))
        return base * (0.8 + 1.1 * min(self.n_rows, 4096) / 4096)

    def __call__(self, specs: float, ranks: Sequence[float]) -> dict[str, float]:
        """Seconds by step, for so many sets of moments of bases of these ranks."""
        dense, share = specs * dense_cost(ranks), min(self.n_rows, SAMPLE_SIZE) / SAMPLE_SIZE
        pivots = sum(0.01 + share * rank * (1.0e-3 + 1.3e-6 * rank) for rank in ranks)
        return {
            PIVOTS: specs * pivots,
            PASS: self.n_rows * specs * _row_flops(ranks) / _FLOPS / self._workers,
            SOLUTION: self.members(specs, ranks) + 0.6 * self._judged + 0.5 * dense,
            LOCATION: specs * (0.01 + 0.25 * dense_cost(ranks[:1])),
            DECISION: 0.3 * self._judged + 0.23 * dense,
        }

    def left_out_ratio(self, ranks: Sequence[float]) -> float:
        """Time of a leave-one-out pass over that of the moments."""
        return 0.0 if self.left_out is None else self.left_out(ranks) / _row_flops(ranks)

    def members(self, specs: float, ranks: Sequence[float]) -> float:
        """Seconds from moments to members with their ridges, a part of the solution."""
        return specs * (0.006 + 0.6 * dense_cost(ranks))


def _row_flops(ranks: Sequence[float]) -> float:
    """Operations for one row and bases of these ranks; events and cells cost their own."""
    return sum(ranks) ** 2 + _BESIDE**2


def _to_come(chosen: Sequence[float], guess: float) -> float:
    """The rank of a basis that is still to be chosen: the guess, unless those chosen are lower."""
    return min(guess, (guess + _typical(chosen)) / 2.0) if chosen else guess


def _typical(ranks: Sequence[float]) -> float:
    """The rank whose dense algebra takes as long as that of these on average."""
    return float((sum(rank**DENSE_POWER for rank in ranks) / len(ranks)) ** (1.0 / DENSE_POWER))


_OPENING = LOCATION, PIVOTS, PASS, SECOND + SEARCH, SECOND + PIVOTS, SECOND + SOLUTION
"""Steps from which on reports are those of the first fit, or of the second one."""


TOGETHER = (
    SECOND + SEARCH,
    SECOND + PIVOTS,
    PIVOTS,
    PASS,
    LEFT_OUT,
    SOLUTION,
    SECOND + SOLUTION,
    DECISION,
)
"""Steps after the search of a fit whose location is known then: both fits share the pass."""


class StepReports:
    """The ``progress`` that a fit hands down: reports of its parts become events of the whole.

    Parameters
    ----------
    target
        Where reports go.
    costs
        Predicted seconds of the steps.
    specs
        Number of sets of moments; each has a basis for each variable.
    screened
        Whether the row sample gives the location.
    """

    def __init__(
        self, target: FitProgress, costs: StepCosts, specs: int, screened: bool = False
    ) -> None:
        self._target, self._costs, self._specs, self._screened = target, costs, specs, screened
        self._search, self._before = SearchTimes(costs.columns), costs.guessed_ranks
        self._prefix, self._iterations = "", 0
        self._first: list[float] = []
        self._members = 0.5  # of the solution's time; then laws are calibrated
        self._ranks: list[tuple[str, int]] = []

    def __call__(self, detail: PivotProgress | Event | TuningProgress | StepBegan) -> None:
        """Take the report of a part."""
        if isinstance(detail, StepBegan):
            self._target.leave_out(detail.without)
            if detail.order:
                self._target.follow(detail.order)
            if detail.key == PIVOTS:
                self._target.confirm()
            if detail.key in _OPENING:
                self._prefix, self._ranks = "" if detail.key in (PIVOTS, PASS) else SECOND, []
                if self._search.begun:
                    self._search = SearchTimes(self._costs.columns, 1.0, self._search)
                self._target.begin(detail.key)
                return
            second = detail.key != DECISION
            share = detail.share * (self._members if detail.key == SOLUTION else 1.0)
            self._target.begin((self._prefix if second else "") + detail.key, share)
        elif isinstance(detail, TuningProgress):
            text = f"{detail.stage}: {detail.done} of {detail.most}{detail.best}"
            share = self._search.share(detail, self._target.now())
            if not self._prefix:
                self._target.know(SECOND + SEARCH, self._search.second)
                if detail.ranks:
                    more = _SHORT if self._costs.n_rows > Tuning().rows else 1.0
                    self._guess([more * rank for rank in detail.ranks])
            self._target(detail, self._prefix + SEARCH, share, text)
        elif isinstance(detail, Event):
            rate = detail.rows / detail.seconds if detail.seconds else 0.0
            rounds = detail.name == "pivot-round"
            if detail.name == "logistic-rows":
                self._iterations += detail.rows == detail.rows_total
                part = self._iterations + detail.rows / detail.rows_total
                text = f"gradient {self._iterations + 1}, {rate:,.0f} rows/s"
                self._target(detail, ITERATIONS, part / (part + _GRADIENTS), text)
                return
            text = f"{detail.rows:,} of {detail.rows_total:,} rows, {rate:,.0f} rows/s"
            share = 0.0 if rounds else detail.rows / detail.rows_total
            key = LEFT_OUT if detail.name == "leave-one-out" else PASS
            self._target(detail, self._prefix + (PIVOTS if rounds else key), share, text)
        else:
            text = (
                f"{detail.variable}: rank {detail.rank}, residual trace {detail.residual_trace:.1e}"
            )
            self._target(detail, self._prefix + PIVOTS, self._chosen(detail), text)

    def _expect(self, specs: float, ranks: Sequence[float], *keys: str) -> None:
        """Correct what these steps, of the first or the second fit, are expected to take."""
        costs = self._costs(specs, ranks)
        for key in keys:
            self._target.expect(key, costs[key.removeprefix(SECOND)])
        self._members = self._costs.members(specs, ranks) / costs[SOLUTION]

    @property
    def _first_steps(self) -> tuple[str, ...]:
        return (PASS, SOLUTION, DECISION, *(() if self._screened else (LOCATION,)))

    def _guess(self, ranks: list[float]) -> None:
        """Ranks of the best kernels that the search has seen, on fewer rows than those to come."""
        most = min(MAX_RANK, self._costs.n_rows / 3.0)
        self._before = [min(most, rank) for rank in ranks]
        self._expect(self._specs, self._before, PIVOTS, *self._first_steps)

    def _chosen(self, event: PivotProgress) -> float:
        """Share of all pivots; the pass's cost is predicted by the ranks so far."""
        last = self._ranks[-1] if self._ranks else ("", math.inf)
        if event.variable != last[0] or event.rank < last[1]:
            self._ranks.append((event.variable, event.rank))
        self._ranks[-1] = (event.variable, event.rank)
        chosen: dict[str, list[float]] = {}
        for name, rank in self._ranks:
            chosen.setdefault(name, []).append(rank)
        if len(self._ranks) > 1:
            specs = min(RESIDUAL_FINALISTS, self._specs) if self._prefix else self._specs
            before = self._costs.second_ranks if self._prefix else self._before
            # The last one is still being chosen; of those to come only the guess is known.
            next(reversed(chosen.values())).pop()
            finished = [*chosen.values(), *([] for _ in before[len(chosen) :])]
            ranks = [
                _typical([*each, *[_to_come(each, guess)] * (specs - len(each))])
                for each, guess in zip(finished, before, strict=False)
            ]
            if not self._prefix:
                self._first = ranks
                self._target.relate(LEFT_OUT, self._costs.left_out_ratio(ranks))
                self._expect(specs, ranks, *self._first_steps)
            else:
                self._expect(specs, ranks, SECOND + PASS, SECOND + SOLUTION)
                if self._first:
                    change = specs / self._specs * _row_flops(ranks) / _row_flops(self._first)
                    self._target.relate(SECOND + PASS, change)
        # The residual falls about exponentially: its logarithm is what moves evenly.
        trace = min(1.0, max(float(event.residual_trace), 1e-300))
        part = min(1.0, math.log(trace) / math.log(event.tol))
        bases = max(self._specs * len(self._before), len(self._ranks))
        return (len(self._ranks) - 1 + part) / bases


def steps_of(
    costs: StepCosts,
    *,
    learned: bool,
    specs: int = 1,
    residual: bool = False,
    screened: bool = False,
    given: str | None = None,
    iterates: bool = False,
) -> list[Step]:
    """The steps of a fit and their predicted seconds, before anything is known."""
    first = costs(specs, costs.guessed_ranks)
    again = costs(min(RESIDUAL_FINALISTS, specs), costs.second_ranks)
    end = ITERATIONS if iterates else SOLUTION
    searches, second_passes = [SEARCH] * learned, [LEFT_OUT] * (costs.left_out is not None)
    keys = [ROWS, *searches, PIVOTS, PASS, *second_passes, end]
    ratio = costs.left_out_ratio(costs.guessed_ranks)
    seconds = first | {
        LEFT_OUT: ratio * first[PASS],
        ROWS: 0.1 + 2e-8 * costs.n_rows,
        SEARCH: costs.search(),
        ITERATIONS: _GRADIENTS * first[PASS],
    }

    def step(key: str, cost: float) -> Step:
        # Rows of a pass take the same time from the first to the last.
        reads = key in (PASS, LEFT_OUT)
        return Step(key, _NAMES[key], cost, certain=0.05 if reads else 0.3, reads=reads)

    steps = {key: step(key, seconds[key]) for key in keys}
    if LEFT_OUT in steps:
        steps[LEFT_OUT] = replace(steps[LEFT_OUT], like=PASS, ratio=ratio)
    if not residual:
        return list(steps.values())
    second = {
        key: replace(step(key, (seconds | again)[key]), key=SECOND + key, name=_NAMES[SECOND + key])
        for key in keys
        if SECOND + key in _NAMES
    }
    second[PASS] = replace(second[PASS], like=PASS, ratio=again[PASS] / first[PASS])
    location = Step(LOCATION, _NAMES[LOCATION], _LOCATION_SECONDS if screened else first[LOCATION])
    decision = Step(DECISION, _NAMES[DECISION], first[DECISION])
    if given is not None:
        fitted = [Step(GIVEN, _NAMES[GIVEN], _GIVEN_SECONDS)] if given == "regressor" else []
        order = (steps.pop(ROWS), *fitted, *(s.pop(SEARCH) for s in (steps, second) if learned))
        both = (s.pop(PIVOTS) for s in (second, steps))
        del second[PASS]  # the rows are read once for both
        return [*order, *both, *steps.values(), *second.values(), decision]
    if not screened:
        return [*steps.values(), location, *second.values(), decision]
    before = [steps.pop(key) for key in (ROWS, SEARCH) if key in steps]
    searched = [second.pop(SEARCH)] if learned else []
    # Until the row sample has decided, half of a second pass is least wrong in either case.
    possible = [replace(each, chance=0.5) for each in (*second.values(), decision)]
    return [*before, location, *searched, *steps.values(), *possible]


def shown_on(panel: Publisher | FitDisplay) -> Listener:
    """The listener that sends events, and what they tell of bases and candidates, to a panel."""

    def listener(event: Event) -> None:
        detail = event.detail
        if isinstance(detail, PivotProgress):
            panel.trace(detail.variable, detail.rank, detail.residual_trace, detail.tol)
        elif isinstance(detail, TuningProgress):
            panel.losses(detail.stage, detail.losses)
        panel(event)

    return listener


@contextlib.contextmanager
def reported(
    progress: Any,
    executor: Executor,
    n_rows: int,
    columns: Sequence[int],
    *,
    learned: bool = False,
    specs: int = 1,
    residual: bool = False,
    screened: bool = False,
    given: str | None = None,
    iterates: bool = False,
    left_out: Operations | None = None,
    name: str | None = None,
) -> Iterator[Progress | None]:
    """The ``progress`` to hand down in a fit, None where nobody listens.

    On a cluster the live panel listens, too.

    Parameters
    ----------
    progress
        As the user gave it: True, False, None or a function of :class:`cme_dask.Event`.
    executor
        Where the fit runs.
    n_rows, columns
        Rows, and the columns of each variable.
    learned
        Whether kernels are searched.
    specs
        Number of models whose moments the pass makes.
    residual
        Whether a location of y given x is tried.
    screened
        Whether the row sample decides on that before the pass.
    given
        ``column`` or ``regressor``, if the location is given; both fits then share the pass.
    iterates
        Whether the solution takes a pass for each of its gradients.
    left_out
        Operations per row of a leave-one-out pass by the ranks of the bases, if there is one.
    name
        Of the estimator, for the panel; None for what is no fit.

    Raises
    ------
    DataError
        If ``progress`` is something else.
    """
    with listening(progress) as listener, publishing(executor.client, name, n_rows) as panel:
        shown = shown_on(listener) if isinstance(listener, FitDisplay) else listener
        both = (shown, None if panel is None else shown_on(panel))
        listeners = [one for one in both if one is not None]
        if not listeners:
            yield None
            return
        costs = StepCosts(n_rows, columns, executor.workers, left_out)
        steps = steps_of(
            costs,
            learned=learned,
            specs=specs,
            residual=residual,
            screened=screened,
            given=given,
            iterates=iterates,
        )

        def each(event: Event) -> None:
            for one in listeners:
                one(event)

        # The panel has events of its own.
        target = FitProgress(steps, each, None if listener is None else executor.client)
        yield StepReports(target, costs, specs, screened)
        each(target.finished())
