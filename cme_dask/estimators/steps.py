"""The steps of a fit, as its progress reports them."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.passes import FLOPS, PassProgress
from cme_dask.chunked.progress import FitProgress, Listener, Step, StepBegan, listening
from cme_dask.estimators.recipe import PivotProgress, Progress, TuningProgress

ProgressOption: TypeAlias = bool | Listener | None
"""True to show the progress of a fit, or a function of its events."""

ROWS, SEARCH, PIVOTS, PASS, SOLUTION = "rows", "search", "pivots", "pass", "solution"
LOCATION, DECISION, ITERATIONS = "location", "decision", "iterations"
SECOND = "second "
"""Before the key of a step that is done again for the residuals of y."""

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
_SECOND = {SEARCH: 0.7, PIVOTS: 0.3, PASS: 0.2, SOLUTION: 0.3}
_BESIDE = 200.0  # rank whose products take as long as what a pass does beside them
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
        self._width = 0.0
        self._ranks: list[tuple[str, int]] = []
        self._trials = dict.fromkeys(_STAGES, 0)

    def __call__(self, detail: PivotProgress | PassProgress | TuningProgress | StepBegan) -> None:
        """Take the report of a part."""
        if isinstance(detail, StepBegan):
            if detail.key == LOCATION:
                self._target.begin(LOCATION)
                self._prefix, self._ranks = SECOND, []
                self._trials = dict.fromkeys(_STAGES, 0)
                return
            second = detail.key != DECISION
            self._target.begin((self._prefix if second else "") + detail.key, detail.share)
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
            width = sum(sum(ranks) / len(ranks) for ranks in by_variable.values())
            specs = max(1.0, self._bases / 2)
            if not self._prefix:
                self._width = width
                seconds = self._n_rows * specs * _row_flops(width) / FLOPS / self._workers
                self._target.expect(PASS, seconds)
                self._target.expect(SOLUTION, specs * _solution_seconds(width))
            elif self._width:
                rows = _row_flops(width) / _row_flops(self._width)
                solved = _solution_seconds(width) / _solution_seconds(self._width)
                self._target.relate(SECOND + PASS, _FEWER * rows)
                self._target.relate(SECOND + SOLUTION, _FEWER * solved)
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
    iterates
        Whether the solution takes a pass for each of its gradients.
    """
    ranks = [min(450.0, 60.0 * 3.0 ** (d - 1)) for d in columns]
    few = min(n_rows, 4096) / 4096
    # Figures of one core: of fits with one and three columns of x.
    seconds = {
        ROWS: 0.1 + 2e-8 * n_rows,
        SEARCH: 0.3 * few * sum(columns) ** 2,
        PIVOTS: specs * sum(0.03 + 0.65 * (rank / 450.0) ** 2 for rank in ranks),
        PASS: n_rows * specs * _row_flops(sum(ranks)) / FLOPS / workers,
        SOLUTION: specs * _solution_seconds(sum(ranks)),
    }
    if not learned:
        del seconds[SEARCH]
    if iterates:
        seconds[ITERATIONS] = _GRADIENTS * seconds[PASS]
        del seconds[SOLUTION]
    steps = [Step(key, _NAMES[key], cost) for key, cost in seconds.items()]
    if not residual:
        return steps
    second = [
        Step(SECOND + key, _NAMES[SECOND + key], _SECOND[key] * cost, key, _SECOND[key])
        for key, cost in seconds.items()
        if key != ROWS
    ]
    solution = seconds[SOLUTION]
    location = Step(LOCATION, _NAMES[LOCATION], 0.25 * solution, SOLUTION, 0.25)
    decision = Step(DECISION, _NAMES[DECISION], 0.4 * solution, SOLUTION, 0.4)
    return [*steps, location, *second, decision]


def _row_flops(width: float) -> float:
    """Operations for one row and bases of x and y of this rank; events and cells cost their own."""
    return width**2 + _BESIDE**2


def _solution_seconds(width: float) -> float:
    """Seconds from moments to a solution with its ridges, for bases of x and y of this rank."""
    return 0.12 + 1.05 * (width / 510.0) ** 2


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
    iterates: bool = False,
) -> Iterator[Progress | None]:
    """The ``progress`` to hand down in a fit, None where nobody listens.

    Parameters
    ----------
    progress
        As the user gave it: True, False, None or a function of :class:`cme_dask.Event`.
    executor
        Where the fit runs.
    n_rows, columns, learned, specs, residual, iterates
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
            iterates=iterates,
        )
        target = FitProgress(steps, listener, executor.client)
        yield StepReports(target, n_rows, executor.workers, specs * len(columns), sum(columns))
        listener(target.finished())
