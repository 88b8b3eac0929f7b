"""Scores of predictions over the rows of a sample, in one pass: of held-out rows, honest ones."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from dask.utils import format_bytes

from cme_dask.chunked.badvalues import count_bad_values
from cme_dask.chunked.memory import MemoryBudget, MemoryPlan
from cme_dask.chunked.passes import (
    PassClock,
    PassProgress,
    PassReport,
    materialised,
    plan_sample,
    run_over_rows,
)
from cme_dask.chunked.plan import Run, strip_length, tree_sum
from cme_dask.chunked.strips import BadValues, Reading, Strip, empty_part, strips_of
from cme_dask.defaults import N_FOLDS
from cme_dask.errors import DataError, ResourceError
from cme_dask.metrics import crps
from cme_dask.numerics.moments import Function, function_values
from cme_dask.numerics.scoring import Estimate, Scores, ScoreSums
from cme_dask.storage.rows import RowSource
from cme_dask.storage.sample import Sample

Array = Any
Predict = Callable[[Array], Array]

_BLOCK = 1 << 12  # rows that are predicted at once
_LAW_ROWS = 1 << 9  # rows whose laws are held at once
_LAW_ARRAYS = 8  # as large as a block of laws: it, its sums, and what the model makes them from
_PREDICT_SECONDS = 1e-5  # a guess per row and prediction: it only chooses the length of tasks
_WORD = 8


@dataclass(frozen=True, eq=False)
class Prediction:
    """What one model says of some targets.

    Parameters
    ----------
    targets
        Columns of y, or names of functions of y.
    predict
        From rows of x (b, d) to their conditional expectations, shape (b, len(targets)), or (b,) if
        there is one; probabilities of events. It is sent to the workers, so it can be pickled.
    """

    targets: tuple[str, ...]
    predict: Predict


@dataclass(frozen=True, eq=False)
class Law:
    """A conditional law of y on cells.

    Parameters
    ----------
    weights
        From rows of x (b, d) to probabilities of the cells, shape (b, S), each row of sum 1.
    points
        The cells, shape (S, d_Y).
    """

    weights: Predict
    points: Array


@dataclass(frozen=True)
class ScoreReport:
    """Scores on the rows of a sample.

    Attributes
    ----------
    scores
        By name of the prediction, then by target.
    crps
        By name of the law: continuous ranked probability score, mean over the coordinates of y.
    report
        What the pass did.
    """

    scores: dict[str, dict[str, Scores]]
    crps: dict[str, Estimate]
    report: PassReport = field(repr=False)


@dataclass(frozen=True, eq=False)
class _Plan:
    """What every task is given."""

    predictions: Mapping[str, Prediction]
    laws: Mapping[str, Law]
    functions: Mapping[str, Function]
    names: tuple[str, ...]
    n_folds: int

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Predictions and their targets, in the order of the losses."""
        return [(name, t) for name, p in self.predictions.items() for t in p.targets]

    def sums(self, strip: Strip) -> ScoreSums:
        """Of one strip."""
        folds = strip.folds(self.n_folds)
        # At least one block, even of no rows.
        starts = range(0, max(len(strip), 1), _BLOCK)
        return tree_sum(self._block(strip, folds, slice(s, s + _BLOCK)) for s in starts)

    def _block(self, strip: Strip, folds: Array, here: slice) -> ScoreSums:
        x, y = (part[here] for part in strip.parts)
        targets = np.empty((len(y), len(self.names)))
        losses = np.empty((len(y), len(self.pairs) + len(self.laws)))
        if len(y):  # functions and predictions are never asked for no rows
            targets[:] = np.concatenate([y, *function_values(y, self.functions)], axis=1)
            for i, column in enumerate(self._losses(x, y, targets)):
                losses[:, i] = column
        weights = None if strip.weights is None else strip.weights[here]
        return ScoreSums.of(targets, losses, weights, folds[here], self.n_folds)

    def _losses(self, x: Array, y: Array, targets: Array) -> Iterator[Array]:
        for name, prediction in self.predictions.items():
            wanted = [self.names.index(target) for target in prediction.targets]
            found = _predicted(name, prediction.predict, x, len(wanted))
            yield from ((found - targets[:, wanted]) ** 2).T
        for name, law in self.laws.items():
            scores = np.empty(len(x))
            for start in range(0, len(x), _LAW_ROWS):
                rows = slice(start, start + _LAW_ROWS)
                weights = _predicted(name, law.weights, x[rows], len(law.points))
                scores[rows] = crps(weights, law.points, y[rows])
            yield scores


def score_pass(
    sample: Sample,
    predictions: Mapping[str, Prediction],
    budget: MemoryBudget,
    *,
    functions: Mapping[str, Function] | None = None,
    laws: Mapping[str, Law] | None = None,
    n_blocks: int = N_FOLDS,
    progress: Callable[[PassProgress], None] | None = None,
) -> ScoreReport:
    """Scores of predictions and laws over all rows of a sample (of a part), in one pass.

    Parameters
    ----------
    sample
        Rows of x and y: for honest scores, those that no model was fitted on.
    predictions
        By name, what is to be scored.
    budget
        Where to run, and the memory that is there.
    functions
        Functions of y by name, such as events; each takes rows (b, d_Y) and returns (b,).
    laws
        Laws by name.
    n_blocks
        Blocks of rows for the standard errors, told by ``sample.folding``: with folds by time or
        group these know that neighbours are alike.
    progress
        Called when a task has ended.

    Raises
    ------
    DataError
        On unknown targets, predictions of the wrong shape or that are not finite, unusable values,
        or a part without rows of positive weight.
    StoreError
        On damaged chunks.
    ResourceError
        If the memory does not suffice; no row has been read then.

    Notes
    -----
    The bits do not depend on chunks, tasks or scheduler: rows are predicted in blocks that depend
    on the sample alone, and sums follow the tree of all passes.
    """
    plan = _checked(sample, predictions, functions or {}, laws or {}, n_blocks)
    sample, executor = sample.for_folds(n_blocks), budget.executor
    guesses = len(plan.predictions) + len(plan.laws)
    runs = plan_sample(sample, executor, guesses * _PREDICT_SECONDS)
    memory = _check_memory(sample, plan, runs, budget)
    clock = PassClock(runs, executor.workers, progress, "score-rows")
    try:
        sums: ScoreSums = run_over_rows(
            sample,
            executor,
            _score_strips,
            _add,
            shared=plan,
            name="score-rows",
            runs=runs,
            on_done=clock.done,
        )
    except BadValues:
        count_bad_values(sample, executor)
        raise
    rows = int(sums.rows.sum())
    if not rows:
        raise empty_part(sample)
    if not sums.weight.sum() > 0.0:
        raise DataError("all weights are zero: at least one row needs a positive weight")
    scores: dict[str, dict[str, Scores]] = {name: {} for name in plan.predictions}
    for loss, (name, target) in enumerate(plan.pairs):
        scores[name][target] = sums.scores(plan.names.index(target), loss)
    first = len(plan.pairs)
    return ScoreReport(
        scores,
        {name: sums.mean_loss(first + i) for i, name in enumerate(plan.laws)},
        replace(clock.report(memory), rows=rows),
    )


def _checked(
    sample: Sample,
    predictions: Mapping[str, Prediction],
    functions: Mapping[str, Function],
    laws: Mapping[str, Law],
    n_blocks: int,
) -> _Plan:
    if len(sample.sources) != 2:
        raise DataError("scores need rows of x and of y: give y, or a store that holds both")
    if not predictions and not laws:
        raise DataError("there is nothing to score: give a prediction or a law")
    columns = sample.columns[1].names
    twice = [name for name in functions if name in columns]
    if twice:
        raise DataError(f"{twice[0]!r} is a column already: give the function another name")
    names = (*columns, *functions)
    unknown = [t for p in predictions.values() for t in p.targets if t not in names]
    if unknown:
        raise DataError(f"unknown target {unknown[0]!r}: there are {', '.join(map(repr, names))}")
    for name, law in laws.items():
        if np.ndim(law.points) != 2 or np.shape(law.points)[1] != len(columns):
            raise DataError(
                f"the points of the law {name!r} must have shape (S, {len(columns)}), "
                f"got {np.shape(law.points)}"
            )
    return _Plan(dict(predictions), dict(laws), dict(functions), names, n_blocks)


def _check_memory(sample: Sample, plan: _Plan, runs: list[Run], budget: MemoryBudget) -> MemoryPlan:
    """Predict the peak (of what predictions take inside, nothing is known)."""
    d = sum(source.shape[1] for source in sample.reads)
    length = strip_length(sample.n_rows)
    rows = 5 * length + 2 * max(source.chunk_rows or 0 for source in sample.reads)
    if materialised(sample, budget.executor):
        rows += 2 * max(run.rows for run in runs)
    width = 4 * (len(plan.names) + len(plan.pairs) + len(plan.laws)) + 2 * plan.n_folds
    cells = max((len(law.points) for law in plan.laws.values()), default=0)
    sums = plan.n_folds * width * (2 + math.ceil(math.log2(len(runs) + 1)))
    task = rows * d + _BLOCK * width + _LAW_ARRAYS * _LAW_ROWS * cells + sums
    found = budget.tightest(task * _WORD, sums * _WORD, {})
    if found.predicted > found.limit:
        raise ResourceError(
            f"{found.place} would need {format_bytes(found.predicted)} to score {len(plan.names)} "
            f"targets and laws of {cells} cells with {budget.executor.workers} tasks at once, the "
            f"limit is {format_bytes(found.limit)}: use fewer workers, or fewer cells"
        )
    return found


def _score_strips(plan: _Plan, run: Run, reading: Reading, *sources: RowSource) -> ScoreSums:
    def each() -> Iterator[ScoreSums]:
        for strip in strips_of(run, reading, sources):
            strip.check()
            yield plan.sums(strip)

    return tree_sum(each())


def _add(a: ScoreSums, b: ScoreSums) -> ScoreSums:
    return a + b


def _predicted(name: str, predict: Predict, x: Array, width: int) -> Array:
    """What a prediction says at rows, shape (b, width)."""
    try:
        found = np.asarray(predict(x), dtype=np.float64)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"prediction {name!r} failed: {type(error).__name__}: {error}") from error
    found = found[:, None] if found.ndim == 1 and width == 1 else found
    if found.shape != (len(x), width):
        raise DataError(
            f"prediction {name!r} must return shape ({len(x)}, {width}) for rows of shape "
            f"{x.shape}, it returned {found.shape}"
        )
    if not np.isfinite(found).all():
        raise DataError(f"prediction {name!r} returned NaN or infinity")
    return found
