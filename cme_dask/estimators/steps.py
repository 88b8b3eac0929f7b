"""The steps of a fit, as its progress reports them."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from cme_dask.config import SAMPLE_SIZE
from cme_dask.estimators.joint_fit import HELD_ROWS
from cme_dask.estimators.recipe import PivotProgress, Progress, TuningProgress
from cme_dask.passes.driver import Executor
from cme_dask.passes.progress import FitProgress, Listener, Step, StepBegan, listening
from cme_dask.passes.run import PassProgress

ProgressOption: TypeAlias = bool | Listener | None
"""True to show the progress of a fit, or a function of its events."""

ROWS, SEARCH, PIVOTS, PASS, SOLUTION = "rows", "search", "pivots", "pass", "solution"
LOCATION, DECISION, ITERATIONS = "location", "decision", "iterations"
SECOND = "second "
"""Before the key of a step that is done again for the residuals of y."""

SECOND_PASS = (SECOND + PIVOTS, SECOND + PASS, SECOND + SOLUTION, DECISION)
"""What follows where the row sample advises a residual reference."""

_NAMES = {
    ROWS: "row sample",
    SEARCH: "search for kernels",
    PIVOTS: "pivots",
    PASS: "pass over the rows",
    SOLUTION: "solution",
    LOCATION: "location of y given x",
    SECOND + SEARCH: "search for kernels of residuals",
    SECOND + PIVOTS: "pivots of residuals",
    SECOND + PASS: "pass over the residuals",
    SECOND + SOLUTION: "solution for residuals",
    ITERATIONS: "passes of the iteration",
    DECISION: "comparison on held-out rows",
}
_GRID, _REFINED = 100.0, 2.0  # pairs of a grid; time of a later trial over that of a pair
_FEWER = 0.5  # finalists of the second search over those of the first
_SECOND_SEARCH = 0.7  # time of the second search over that of the first
_SECOND_RANK = 60.0  # of bases of x and of residuals, before their own are known
_FLOPS = 3.5e10  # of one core in a pass, per second
_BESIDE = 156.0  # rank whose products take as long as what a pass does beside them
_LOCATION_SECONDS = 0.4  # of a location on the row sample
_LARGE = 500.0  # rank of a basis that figures of the solution are for
_GRADIENTS = 20.0  # of an iteration, when half of it is taken to be done
_STAGES = ("grid", "columns", "refine", "widen", "ignore")


class StepReports:
    """The ``progress`` that a fit hands down: reports of its parts become events of the whole.

    Parameters
    ----------
    target
        Where reports go.
    n_rows, workers
        For the predicted seconds of the pass.
    bases
        Number of bases whose pivots are chosen.
    columns
        Of all variables: the trials of a search depend on them.
    """

    def __init__(
        self, target: FitProgress, n_rows: int, workers: int, bases: int, columns: int
    ) -> None:
        self._target, self._n_rows, self._workers = target, n_rows, workers
        self._bases, self._refinements = bases, 40 + 5 * columns
        self._prefix, self._iterations = "", 0
        self._first: list[float] = []
        self._members = 0.5  # of the solution's time; then laws are calibrated
        self._ranks: list[tuple[str, int]] = []
        self._trials = dict.fromkeys(_STAGES, 0)

    def __call__(self, detail: PivotProgress | PassProgress | TuningProgress | StepBegan) -> None:
        """Take the report of a part."""
        if isinstance(detail, StepBegan):
            self._target.leave_out(detail.without)
            if detail.key in (LOCATION, PIVOTS, SECOND + PIVOTS):
                self._prefix, self._ranks = "" if detail.key == PIVOTS else SECOND, []
                self._trials = dict.fromkeys(_STAGES, 0)
                self._target.begin(detail.key)
                return
            second = detail.key != DECISION
            share = detail.share * (self._members if detail.key == SOLUTION else 1.0)
            self._target.begin((self._prefix if second else "") + detail.key, share)
        elif isinstance(detail, TuningProgress):
            text = f"{detail.stage}: {detail.done} of {detail.most}{detail.best}"
            self._target(detail, self._prefix + SEARCH, self._searched(detail), text)
        elif isinstance(detail, PassProgress):
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
            self._target(detail, self._prefix + (PIVOTS if rounds else PASS), share, text)
        else:
            text = (
                f"{detail.variable}: rank {detail.rank}, residual trace {detail.residual_trace:.1e}"
            )
            self._target(detail, self._prefix + PIVOTS, self._chosen(detail), text)

    def _expect(self, prefix: str, specs: float, ranks: Sequence[float]) -> None:
        seconds = self._n_rows * specs * _row_flops(sum(ranks)) / _FLOPS / self._workers
        self._target.expect(prefix + PASS, seconds)
        solved = _solved(self._n_rows, specs, ranks)
        self._target.expect(prefix + SOLUTION, solved)
        self._members = _made(specs, ranks) / solved

    def _searched(self, event: TuningProgress) -> float:
        self._trials[event.stage] = event.done
        if event.stage == "refine":
            self._refinements = event.most
        grid = float(event.most) if event.stage == "grid" else _GRID
        done = self._trials["grid"] if event.stage == "grid" else grid
        later = sum(self._trials[stage] for stage in _STAGES[1:])
        return (done + _REFINED * later) / (grid + _REFINED * (self._refinements + 5))

    def _chosen(self, event: PivotProgress) -> float:
        """Share of all pivots; the pass's cost is predicted by the ranks so far."""
        last = self._ranks[-1] if self._ranks else ("", math.inf)
        if event.variable != last[0] or event.rank < last[1]:
            self._ranks.append((event.variable, event.rank))
        self._ranks[-1] = (event.variable, event.rank)
        by_variable: dict[str, list[int]] = {}
        for name, rank in self._ranks[:-1]:
            by_variable.setdefault(name, []).append(rank)
        if by_variable:
            ranks = [_typical(each) for each in by_variable.values()]
            specs = max(1.0, self._bases / 2)
            if not self._prefix:
                self._first = ranks
                self._expect("", specs, ranks)
                self._target.expect(LOCATION, _located(specs, ranks[0]))
                self._target.expect(DECISION, _decided(self._n_rows, specs, ranks))
            else:
                self._expect(SECOND, _FEWER * specs, ranks)
                if self._first:
                    change = _row_flops(sum(ranks)) / _row_flops(sum(self._first))
                    self._target.relate(SECOND + PASS, _FEWER * change)
        # The residual falls about exponentially: its logarithm is what moves evenly.
        trace = min(1.0, max(float(event.residual_trace), 1e-300))
        part = min(1.0, math.log(trace) / math.log(event.tol))
        return (len(self._ranks) - 1 + part) / max(self._bases, len(self._ranks))


def steps_of(
    n_rows: int,
    columns: Sequence[int],
    workers: int,
    *,
    learned: bool,
    specs: int = 1,
    residual: bool = False,
    screened: bool = False,
    iterates: bool = False,
) -> list[Step]:
    """The steps of a fit and their predicted seconds, before anything is known.

    Parameters
    ----------
    n_rows
        Rows.
    columns
        Columns of each variable.
    workers
        Tasks that run at once.
    learned
        Whether kernels are searched.
    specs
        Number of models whose moments the pass makes.
    residual
        Whether a location of y given x is tried.
    screened
        Whether the row sample decides on that before the pass.
    iterates
        Whether the solution takes a pass for each of its gradients.
    """
    ranks = [min(450.0, 50.0 * 2.1 ** (columns[0] - 1))]
    ranks += [min(450.0, 15.0 * 6.0 ** (d - 1)) for d in columns[1:]]
    again = [_SECOND_RANK for _ in columns]
    fewer = _FEWER * specs
    seconds = {
        ROWS: 0.1 + 2e-8 * n_rows,
        SEARCH: _search_seconds(n_rows, sum(columns)),
        PIVOTS: _pivoted(n_rows, specs, ranks),
        PASS: n_rows * specs * _row_flops(sum(ranks)) / _FLOPS / workers,
        SOLUTION: _solved(n_rows, specs, ranks),
    }
    repeated = {
        SEARCH: _SECOND_SEARCH * seconds[SEARCH],
        PIVOTS: _pivoted(n_rows, fewer, again),
        PASS: n_rows * fewer * _row_flops(sum(again)) / _FLOPS / workers,
        SOLUTION: _solved(n_rows, fewer, again),
    }
    if not learned:
        del seconds[SEARCH]
    if iterates:
        seconds[ITERATIONS] = _GRADIENTS * seconds[PASS]
        del seconds[SOLUTION]
    steps = {
        key: Step(key, _NAMES[key], cost, certain=_certain(key), reads=key == PASS)
        for key, cost in seconds.items()
    }
    if not residual:
        return list(steps.values())
    ratios = {SEARCH: _SECOND_SEARCH, PASS: repeated[PASS] / seconds[PASS]}
    second = {}
    for key, cost in repeated.items():
        if key in seconds:
            like, ratio = (key, ratios[key]) if key in ratios else (None, 1.0)
            name = SECOND + key
            second[name] = Step(name, _NAMES[name], cost, like, ratio, _certain(key), key == PASS)
    location = Step(LOCATION, _NAMES[LOCATION], _located(specs, ranks[0]))
    decision = Step(DECISION, _NAMES[DECISION], _decided(n_rows, specs, ranks))
    if not screened:
        return [*steps.values(), location, *second.values(), decision]
    first = [steps.pop(key) for key in (ROWS, SEARCH) if key in steps]
    location = Step(LOCATION, _NAMES[LOCATION], _LOCATION_SECONDS)
    searched = [second.pop(SECOND + SEARCH)] if learned else []
    return [*first, location, *searched, *steps.values(), *second.values(), decision]


def _certain(key: str) -> float:
    """See :class:`Step`: rows of a pass take the same time from the first to the last."""
    return 0.05 if key == PASS else 0.3


# Figures below are seconds of one core, measured on fits of 300 to 100,000 rows with one to six
# columns; what the machine takes for the steps before scales them.


def _search_seconds(n_rows: int, columns: int) -> float:
    """Seconds of a search for kernels, on 4096 rows at most."""
    base = 0.13 * columns**2 if columns <= 4 else 2.1 + 0.65 * (columns - 4)
    return base * (0.8 + 1.1 * min(n_rows, 4096) / 4096)


def _pivoted(n_rows: int, specs: float, ranks: Sequence[float]) -> float:
    """Seconds of the choice of pivots from the row sample."""
    share = min(n_rows, SAMPLE_SIZE) / SAMPLE_SIZE
    return specs * sum(0.01 + share * rank * (1.0e-3 + 1.3e-6 * rank) for rank in ranks)


def _row_flops(width: float) -> float:
    """Operations for one row and bases of x and y of this rank; events and cells cost their own."""
    return width**2 + _BESIDE**2


_POWER = 2.4  # of the rank: the time of its dense algebra


def _typical(ranks: Sequence[int]) -> float:
    """The rank whose dense algebra takes as long as that of these on average."""
    return float((sum(rank**_POWER for rank in ranks) / len(ranks)) ** (1.0 / _POWER))


def _dense(ranks: Sequence[float]) -> float:
    """Dense algebra of bases of these ranks by fold, in that of one basis of a large rank."""
    return float(sum((rank / _LARGE) ** _POWER for rank in ranks))


def _solved(n_rows: int, specs: float, ranks: Sequence[float]) -> float:
    """Seconds from moments to a solution with its ridges, calibrated at held-out rows."""
    judged = min(n_rows, HELD_ROWS) / HELD_ROWS
    return 0.1 + 0.7 * judged + _made(specs, ranks) + 0.4 * specs * _dense(ranks)


def _made(specs: float, ranks: Sequence[float]) -> float:
    """Seconds from moments to the members with their ridges."""
    return specs * (0.02 + 0.5 * _dense(ranks))


def _located(specs: float, rank: float) -> float:
    """Seconds of a location from the moments of all rows."""
    return specs * (0.02 + 0.25 * _dense([rank]))


def _decided(n_rows: int, specs: float, ranks: Sequence[float]) -> float:
    """Seconds of a comparison at held-out rows."""
    return 0.5 * min(n_rows, HELD_ROWS) / HELD_ROWS + specs * 0.2 * _dense(ranks)


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
    iterates: bool = False,
) -> Iterator[Progress | None]:
    """The ``progress`` to hand down in a fit, None where nobody listens.

    Parameters
    ----------
    progress
        As the user gave it: True, False, None or a function of :class:`cme_dask.Event`.
    executor
        Where the fit runs.
    n_rows, columns, learned, specs, residual, screened, iterates
        See :func:`steps_of`.

    Raises
    ------
    DataError
        If ``progress`` is something else.
    """
    with listening(progress) as listener:
        if listener is None:
            yield None
            return
        steps = steps_of(
            n_rows,
            columns,
            executor.workers,
            learned=learned,
            specs=specs,
            residual=residual,
            screened=screened,
            iterates=iterates,
        )
        target = FitProgress(steps, listener, executor.client)
        yield StepReports(target, n_rows, executor.workers, specs * len(columns), sum(columns))
        listener(target.finished())
