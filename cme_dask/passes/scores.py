"""Scores of predictions over the rows of a sample, in one pass."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from cme_dask.config import N_FOLDS
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, ZeroWeights
from cme_dask.numerics.moments import Function, function_values
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip, blocks, tree_sum
from cme_dask.numerics.row_scores import (
    LABEL_BINS,
    PIT_LEVELS,
    energy_scores,
    interval_scores,
    label_deviations,
    log_losses,
    pinball_losses,
    pit_deviations,
)
from cme_dask.numerics.scoring import Estimate, Scores, ScoreSums
from cme_dask.passes.driver import Executor
from cme_dask.passes.progress import Listener
from cme_dask.passes.run import PassReport, run_pass

Array = Any
Predict = Callable[[Array], Array]

_BLOCK = 1 << 12  # rows that are predicted at once
_LAW_ROWS = 1 << 9  # rows whose laws are held at once
_LAW_ARRAYS = 8  # as large as a block of laws: it, its sums, and what the model makes them from
_PREDICT_FLOPS = 150_000  # a guess per row and prediction: it only chooses the length of tasks
_LAW_GUESS = 10  # predictions that a loss of a law takes as long as
_WORD = 8
_BINNED = ("predicted", "seen")
_LEAST_CHANCE = 1e-15
_LEAST_LOG_DENSITY = float(np.log(np.nextafter(0.0, 1.0)))
_DRAWS = 64  # of each law, for energy scores
_INTERVAL = ("coverage", "width", "interval")


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


class Scored(Protocol):
    """Queries of the laws at some rows of x: methods of a ``ConditionalLaw``."""

    def crps(self, y: Array) -> Array:
        """Continuous ranked probability score at y (b, d_Y), shape (b,)."""

    def quantile(self, q: Any, column: str | None = None) -> Array:
        """Quantiles of a column of y, shape (b, k)."""

    def cdf(self, t: Any, column: str | None = None, *, paired: bool = False) -> Array:
        """Distribution function of a column of y at one threshold for each row, shape (b,)."""

    def log_pdf(self, y: Any, *, paired: bool = False) -> Array:
        """Logarithm of the density at y (b, d_Y), shape (b,)."""

    def sample(self, size: int | None = None, *, first: int = 0) -> Array:
        """Draws of y, shape (b, size, d_Y), that depend on the numbers of the rows alone."""

    def expect(self, f: Any) -> Array:
        """Means of columns and functions of y, shape (b, len(f))."""

    def predict_proba(self, column: str | None = None) -> Array:
        """Probabilities of the labels of a column of y, shape (b, labels)."""


@dataclass(frozen=True, eq=False)
class Law:
    """Conditional laws of y.

    Parameters
    ----------
    conditional
        From rows of x (b, d) to the laws there, as ``conditional`` of a model. It is sent to the
        workers, so it can be pickled.
    crps
        Whether the continuous ranked probability score is computed.
    level
        Probability of the central intervals whose coverage, width and score are computed, in
        (0, 1); default none.
    cells
        On how many cells the laws live: memory depends on it.
    targets
        Numeric columns of y, or names of functions of y, whose means under the laws are predictions
        like those of :class:`Prediction`.
    edges
        Borders between bins of these predictions, ascending, by target: what happened where as much
        was predicted.
    labels
        Whether the probabilities of labels are scored, in each column of y that holds some.
    levels
        Levels of quantiles of each numeric column whose pinball losses are computed, in (0, 1).
    log_score
        Whether the density of y is scored; then all columns are numeric.
    calibration
        Whether the calibration error of each numeric column is computed.
    energy
        Whether the energy score of the numeric columns is estimated, if there are several.
    """

    conditional: Callable[[Array], Scored]
    crps: bool = True
    level: float | None = None
    cells: int = 1024
    targets: tuple[str, ...] = ()
    edges: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    labels: bool = False
    levels: tuple[float, ...] = ()
    log_score: bool = False
    calibration: bool = False
    energy: bool = False


@dataclass(frozen=True)
class Bin:
    """Rows for which about as much was predicted.

    Attributes
    ----------
    low, high
        The predictions were from ``low`` up to, not including, ``high``; infinite at the ends.
    share
        Of the weight of all rows.
    predicted
        Mean of the predictions; NaN in a bin without rows.
    seen
        Mean of the target, with its standard error over blocks of rows.
    """

    low: float
    high: float
    share: float
    predicted: float
    seen: Estimate


@dataclass(frozen=True)
class LabelScores:
    """Scores of the probabilities of a column of labels.

    Attributes
    ----------
    accuracy
        Share of the rows with the likeliest label.
    log_loss
        Mean of minus the logarithm of the probability of the label that was seen, in nats;
        probabilities below 1e-15 count as that.
    brier
        Mean of the squared distance between the probabilities of all labels and the label that was
        seen, from 0 to 2.
    calibration_error
        Expected calibration error of the likeliest label: the absolute difference between its
        probability and how often it is seen, in 15 bins of equal width by its probability,
        averaged over the rows. With few rows it is above 0 for true probabilities, too.
    """

    accuracy: Estimate
    log_loss: Estimate
    brier: Estimate
    calibration_error: Estimate


@dataclass(frozen=True)
class ScoreReport:
    """Scores on the rows of a sample.

    Attributes
    ----------
    scores
        By name of the prediction, then by target.
    crps
        By name of the law: continuous ranked probability score, mean over the numeric columns of y.
    coverage
        By name of the law, then by numeric column of y: share of the rows within the central
        interval, whose probability it should be.
    report
        What the pass did.
    reliability
        By name of the law, then by target: bins of what was predicted.
    labels
        By name of the law, then by column of labels.
    width, interval_score
        By name of the law, then by numeric column of y: mean width and mean interval score of the
        central intervals, in the unit of the column.
    pinball
        By name of the law, then by numeric column of y, then by level of the quantile.
    calibration_error
        By name of the law, then by numeric column of y: mean absolute difference between the
        distribution function of the probability integral transform and the uniform one, at the
        levels 0.05, 0.1, ..., 0.95. Ties are treated as if the transform were randomised.
    log_score
        By name of the law: mean of minus the logarithm of the density, in nats; densities below
        the smallest positive float64 count as that.
    energy_score
        By name of the law: energy score of the numeric columns, from 64 draws of each law, without
        bias. The noise of the draws is part of the standard error.
    """

    scores: dict[str, dict[str, Scores]]
    crps: dict[str, Estimate]
    coverage: dict[str, dict[str, Estimate]]
    report: PassReport = field(repr=False)
    reliability: dict[str, dict[str, tuple[Bin, ...]]] = field(default_factory=dict)
    labels: dict[str, dict[str, LabelScores]] = field(default_factory=dict)
    width: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    interval_score: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    pinball: dict[str, dict[str, dict[float, Estimate]]] = field(default_factory=dict)
    calibration_error: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    log_score: dict[str, Estimate] = field(default_factory=dict)
    energy_score: dict[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class _Loss:
    """One of the losses of a law: its kind, its column or target, and of a bin its number."""

    law: str
    kind: str
    of: str = ""
    bin: int = 0


@dataclass(frozen=True, eq=False)
class _ScoreReduction(Reduction[ScoreSums, ScoreSums]):
    """Sums of the losses of all predictions and laws."""

    predictions: Mapping[str, Prediction]
    laws: Mapping[str, Law]
    functions: Mapping[str, Function]
    names: tuple[str, ...]
    numeric: tuple[str, ...]
    labelled: tuple[str, ...]
    n_folds: int
    name = "score-rows"
    on_device = False
    kinds = (ScoreSums,)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Predictions and their targets, in the order of the losses."""
        return [(name, t) for name, p in self.predictions.items() for t in p.targets]

    @property
    def law_losses(self) -> list[_Loss]:
        """What is summed of the laws, in the order of the losses."""
        losses: list[_Loss] = []
        for name, law in self.laws.items():
            losses += [_Loss(name, "crps")] * law.crps
            for column in self.numeric:
                if law.level is not None:
                    losses += [_Loss(name, kind, column) for kind in _INTERVAL]
                losses += [_Loss(name, "pinball", column, i) for i in range(len(law.levels))]
            for column in self.numeric if law.calibration else ():
                losses += [_Loss(name, "pit", column, i) for i in range(len(PIT_LEVELS))]
            losses += [_Loss(name, "log score")] * law.log_score
            losses += [_Loss(name, "energy")] * self.scores_energy(law)
            losses += [_Loss(name, "squared", target) for target in law.targets]
            for target, edges in law.edges.items():
                bins = range(len(edges) + 1)
                losses += [_Loss(name, k, target, i) for k in ("in bin", *_BINNED) for i in bins]
            for column in self.labelled if law.labels else ():
                losses += [_Loss(name, kind, column) for kind in ("accuracy", "log", "brier")]
                bins = range(LABEL_BINS)
                losses += [_Loss(name, "calibration", column, i) for i in bins]
        return losses

    def scores_energy(self, law: Law) -> bool:
        """Whether there is an energy score beside the CRPS."""
        return law.energy and len(self.numeric) > 1

    def cost(self, extent: Extent) -> Cost:
        """Predictions of a block, and its laws; of what predictions take inside, nothing is known.

        Their time is a guess, too.
        """
        losses = len(self.pairs) + len(self.law_losses)
        width = 4 * (len(self.names) + losses) + 2 * self.n_folds
        cells = max((law.cells for law in self.laws.values()), default=0)
        # Levels and bins of a column are all of one query.
        queries = len({replace(loss, bin=0) for loss in self.law_losses})
        return Cost(
            flops=(len(self.predictions) + _LAW_GUESS * queries) * _PREDICT_FLOPS,
            state=(_BLOCK * width + _LAW_ARRAYS * _LAW_ROWS * cells) * _WORD,
            partial=self.n_folds * width * _WORD,
            subject=f"scores of {len(self.names)} targets and laws of {cells} cells",
            remedies=("fewer cells",) if cells else (),
        )

    def update(self, state: None, strip: Strip) -> ScoreSums:
        """Of one strip."""
        folds = strip.folds(self.n_folds)
        return tree_sum(self._block(strip, folds, here) for here in blocks(len(strip), _BLOCK))

    def _block(self, strip: Strip, folds: Array, here: slice) -> ScoreSums:
        x, y = (part[here] for part in strip.parts)
        targets = np.empty((len(y), len(self.names)))
        losses = np.empty((len(y), len(self.pairs) + len(self.law_losses)))
        if len(y):  # functions and predictions are never called without rows
            targets[:] = np.concatenate([y, *function_values(y, self.functions)], axis=1)
            for i, column in enumerate(self._losses(x, y, targets, strip.rows[here])):
                losses[:, i] = column
        weights = None if strip.weights is None else strip.weights[here]
        return ScoreSums.of(targets, losses, weights, folds[here], self.n_folds)

    def _losses(self, x: Array, y: Array, targets: Array, numbers: Array) -> Iterator[Array]:
        for name, prediction in self.predictions.items():
            columns = [self.names.index(target) for target in prediction.targets]
            values = _predicted(name, prediction.predict, x, len(columns))
            yield from ((values - targets[:, columns]) ** 2).T
        for name, law in self.laws.items():
            yield from self._law_losses(name, law, x, y, targets, numbers).T

    def _law_losses(
        self, name: str, law: Law, x: Array, y: Array, targets: Array, numbers: Array
    ) -> Array:
        """What ``law_losses`` lists of one law, shape (b, l)."""
        losses = np.empty((len(x), sum(loss.law == name for loss in self.law_losses)))
        for start in range(0, len(x), _LAW_ROWS):
            rows = slice(start, start + _LAW_ROWS)
            try:
                laws = law.conditional(x[rows])
            except DataError:
                raise
            except Exception as error:
                raise _failure(name, error) from error
            columns = self._of_laws(name, law, laws, y[rows], targets[rows], int(numbers[start]))
            for i, values in enumerate(columns):
                losses[rows, i] = values
        return losses

    def _of_laws(
        self, name: str, law: Law, laws: Scored, y: Array, targets: Array, first: int
    ) -> Iterator[Array]:
        """The losses of some rows, each of shape (b,); ``first`` is the number of the first row."""
        b = len(y)
        if law.crps:
            yield _checked_shape(name, laws.crps(y), (b,))
        for column in self.numeric:
            yield from self._of_quantiles(name, law, laws, column, y)
        for column in self.numeric if law.calibration else ():
            seen = y[:, self.names.index(column)]
            before, upto = (
                _checked_shape(name, laws.cdf(t, column=column, paired=True), (b,))
                for t in (np.nextafter(seen, -np.inf), seen)
            )
            yield from pit_deviations(before, upto, np.array(PIT_LEVELS)).T
        if law.log_score:
            logarithms = np.maximum(laws.log_pdf(y, paired=True), _LEAST_LOG_DENSITY)
            yield -_checked_shape(name, logarithms, (b,))
        if self.scores_energy(law):
            draws = laws.sample(_DRAWS, first=first)
            draws = _checked_shape(name, draws, (b, _DRAWS, y.shape[1]))
            even = np.full((b, _DRAWS), 1.0 / _DRAWS)
            pick = [self.names.index(column) for column in self.numeric]
            yield energy_scores(even, draws[:, :, pick], y[:, pick], fair=True)
        if law.targets:
            yield from self._of_targets(name, law, laws, targets)
        for column in self.labelled if law.labels else ():
            codes = y[:, self.names.index(column)].astype(np.int64)
            chances = np.asarray(laws.predict_proba(column), dtype=np.float64)
            yield chances.argmax(axis=1) == codes
            yield log_losses(chances, codes, _LEAST_CHANCE)
            yield (chances**2).sum(axis=1) - 2.0 * chances[np.arange(b), codes] + 1.0
            yield from label_deviations(chances, codes).T

    def _of_quantiles(
        self, name: str, law: Law, laws: Scored, column: str, y: Array
    ) -> Iterator[Array]:
        """The losses of the quantiles of a column, which the law is asked for at once."""
        tail = () if law.level is None else (0.5 * (1.0 - law.level), 0.5 * (1.0 + law.level))
        levels = [*tail, *law.levels]
        if not levels:
            return
        quantiles = laws.quantile(levels, column=column)
        quantiles = _checked_shape(name, quantiles, (len(y), len(levels)))
        seen = y[:, self.names.index(column)]
        if law.level is not None:
            lower, upper = quantiles[:, :2].T
            yield (lower <= seen) & (seen <= upper)
            yield upper - lower
            yield interval_scores(lower, upper, seen, law.level)
        yield from pinball_losses(quantiles[:, len(tail) :], np.array(law.levels), seen).T

    def _of_targets(self, name: str, law: Law, laws: Scored, targets: Array) -> Iterator[Array]:
        """The losses of means under the laws, and the bins of these means."""
        means = laws.expect(list(law.targets))
        means = _checked_shape(name, means, (len(targets), len(law.targets)))
        seen = targets[:, [self.names.index(target) for target in law.targets]]
        yield from ((means - seen) ** 2).T
        for target, edges in law.edges.items():
            j = law.targets.index(target)
            inside = np.searchsorted(edges, means[:, j], side="right")
            member = (inside == np.arange(len(edges) + 1)[:, None]).astype(np.float64)
            yield from (*member, *(member * means[:, j]), *(member * seen[:, j]))


def score_pass(
    sample: Sample,
    predictions: Mapping[str, Prediction],
    executor: Executor,
    *,
    functions: Mapping[str, Function] | None = None,
    laws: Mapping[str, Law] | None = None,
    n_blocks: int = N_FOLDS,
    progress: Listener | None = None,
) -> ScoreReport:
    """Scores of predictions and laws over all rows of a sample (of a part), in one pass.

    Parameters
    ----------
    sample
        Rows of x and y: for honest scores, those that no model was fitted on.
    predictions
        By name, what is to be scored.
    executor
        Where to run, and the memory that is there.
    functions
        Functions of y by name, such as events; each takes rows (b, d_Y) and returns (b,).
    laws
        Laws by name.
    n_blocks
        Blocks of rows for the standard errors, by ``sample.folding``: with folds by time or
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
    (sums,), report = run_pass(sample, [plan], executor, progress)
    if not sums.weight.sum() > 0.0:
        raise ZeroWeights()
    scores: dict[str, dict[str, Scores]] = {name: {} for name in plan.predictions}
    for loss, (name, target) in enumerate(plan.pairs):
        scores[name][target] = sums.scores(plan.names.index(target), loss)
    for name, law in plan.laws.items():
        if law.targets:
            scores[name] = {}
    places = {loss: at for at, loss in enumerate(plan.law_losses, start=len(plan.pairs))}
    whole: dict[str, dict[str, Estimate]] = {kind: {} for kind in ("crps", "log score", "energy")}
    by_column: dict[str, dict[str, dict[str, Estimate]]] = {kind: {} for kind in _INTERVAL}
    pinball: dict[str, dict[str, dict[float, Estimate]]] = {}
    for of, at in places.items():
        if of.kind in whole:
            whole[of.kind][of.law] = sums.mean_loss(at)
        elif of.kind in by_column:
            by_column[of.kind].setdefault(of.law, {})[of.of] = sums.mean_loss(at)
        elif of.kind == "pinball":
            level = plan.laws[of.law].levels[of.bin]
            pinball.setdefault(of.law, {}).setdefault(of.of, {})[level] = sums.mean_loss(at)
        elif of.kind == "squared":
            scores[of.law][of.of] = sums.scores(plan.names.index(of.of), at)
    reliability = {
        name: {
            target: tuple(
                _bin(sums, [places[_Loss(name, kind, target, i)] for kind in ("in bin", *_BINNED)])(
                    *([-np.inf, *edges, np.inf][i : i + 2])
                )
                for i in range(len(edges) + 1)
            )
            for target, edges in law.edges.items()
        }
        for name, law in plan.laws.items()
        if law.edges
    }
    labels = {
        name: {column: _label_scores(sums, places, name, column) for column in plan.labelled}
        for name, law in plan.laws.items()
        if law.labels and plan.labelled
    }
    calibration = {
        name: {column: _deviation(sums, places, name, "pit", column) for column in plan.numeric}
        for name, law in plan.laws.items()
        if law.calibration and plan.numeric
    }
    return ScoreReport(
        scores,
        whole["crps"],
        by_column["coverage"],
        report,
        reliability,
        labels,
        width=by_column["width"],
        interval_score=by_column["interval"],
        pinball=pinball,
        calibration_error=calibration,
        log_score=whole["log score"],
        energy_score=whole["energy"],
    )


def _deviation(
    sums: ScoreSums, places: Mapping[_Loss, int], law: str, kind: str, column: str
) -> Estimate:
    """Sum of the absolute means of what is summed in several bins, or at several levels."""
    return sums.deviation(
        [at for of, at in places.items() if (of.law, of.kind, of.of) == (law, kind, column)]
    )


def _label_scores(
    sums: ScoreSums, places: Mapping[_Loss, int], law: str, column: str
) -> LabelScores:
    """Of the probabilities of the labels of a column."""
    accuracy, log_loss, brier = (
        sums.mean_loss(places[_Loss(law, kind, column)]) for kind in ("accuracy", "log", "brier")
    )
    calibration = _deviation(sums, places, law, "calibration", column)
    return LabelScores(accuracy, log_loss, brier, calibration)


def _bin(sums: ScoreSums, places: list[int]) -> Callable[[float, float], Bin]:
    """From the ends of a bin to it, from the places of its share, predictions and targets."""
    share, predicted, _ = (sums.mean_loss(place).value for place in places)
    seen = sums.ratio(places[2], places[0])
    mean = predicted / share if share > 0.0 else np.nan
    return lambda low, high: Bin(low, high, share, mean, seen)


def _checked(
    sample: Sample,
    predictions: Mapping[str, Prediction],
    functions: Mapping[str, Function],
    laws: Mapping[str, Law],
    n_blocks: int,
) -> _ScoreReduction:
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
        if law.level is not None and not 0.0 < law.level < 1.0:
            raise DataError(
                f"the level of the law {name!r} must lie between 0 and 1, got {law.level}"
            )
        if not all(0.0 < level < 1.0 for level in law.levels):
            raise DataError(
                f"levels of quantiles of the law {name!r} must lie between 0 and 1, got "
                f"{', '.join(map(str, law.levels))}"
            )
    labelled = tuple(sample.columns[1].categories)
    numeric = tuple(name for name in columns if name not in labelled)
    for law in laws.values():
        _check_targets(law, (*numeric, *functions))
    return _ScoreReduction(
        dict(predictions), dict(laws), dict(functions), names, numeric, labelled, n_blocks
    )


def _check_targets(law: Law, known: tuple[str, ...]) -> None:
    """DataError on targets of a law that are no numbers, or on bins of something else."""
    unknown = [target for target in law.targets if target not in known]
    if unknown:
        raise DataError(f"unknown target {unknown[0]!r}: there are {', '.join(map(repr, known))}")
    for target, edges in law.edges.items():
        if target not in law.targets or (np.diff(edges) <= 0.0).any():
            raise DataError(
                f"bins of {target!r} need one of the targets and ascending borders, got {edges}"
            )


def _predicted(name: str, predict: Predict, x: Array, width: int) -> Array:
    """What a prediction says at rows, shape (b, width)."""
    try:
        values = np.asarray(predict(x), dtype=np.float64)
    except DataError:
        raise
    except Exception as error:
        raise _failure(name, error) from error
    values = values[:, None] if values.ndim == 1 and width == 1 else values
    return _checked_shape(name, values, (len(x), width))


def _failure(name: str, error: Exception) -> DataError:
    return DataError(f"prediction {name!r} failed: {type(error).__name__}: {error}")


def _checked_shape(name: str, values: Array, shape: tuple[int, ...]) -> Array:
    """What was predicted, if it has this shape and is finite."""
    if values.shape != shape:
        raise DataError(
            f"prediction {name!r} must return shape {shape} for {shape[0]} rows, "
            f"it returned {values.shape}"
        )
    if not np.isfinite(values).all():
        raise DataError(f"prediction {name!r} returned NaN or infinity")
    return values
