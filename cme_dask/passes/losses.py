"""Losses of predictions and of laws at the rows of a sample: the reduction that sums them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.moments import Function, function_values
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip, blocks, tree_sum
from cme_dask.numerics.row_scores import (
    LABEL_BINS,
    PIT_LEVELS,
    energy_scores,
    interval_scores,
    label_deviations,
    label_places,
    log_losses,
    pinball_losses,
    pit_deviations,
)
from cme_dask.numerics.scoring import ScoreSums

Array = Any
Predict = Callable[[Array], Array]

MASS = "mass"
"""The probability of a central interval under the law."""
INTERVAL = ("coverage", MASS, "width", "interval")
"""What is summed of a central interval."""
BINNED = ("in bin", "predicted", "seen")
"""What is summed in a bin of what was predicted."""
LIKELIEST = ("likeliest in bin", "likeliest seen")
"""What is summed in a bin of the likeliest label's probability."""
MOST_LABELS = 20
"""Labels of a column whose probabilities are summed by the label that was seen."""

_BLOCK = 1 << 12  # rows that are predicted at once
_LAW_ROWS = 1 << 9  # rows whose laws are held at once
_LAW_ARRAYS = 8  # as large as a block of laws: it, its sums, and what the model makes them from
_PREDICT_FLOPS = 150_000  # a guess per row and prediction: it only chooses the length of tasks
_LAW_GUESS = 10  # predictions that a loss of a law takes as long as
_WORD = 8
_LEAST_CHANCE = 1e-15
_LEAST_LOG_DENSITY = float(np.log(np.nextafter(0.0, 1.0)))
_DRAWS = 64  # of each law, for energy scores


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
    label_bins
        Whether, with ``labels``, it is also summed how often the likeliest label is seen where its
        probability is about as high, and, of few labels, the probabilities by the label seen.
    mass
        Whether the probability of the central intervals under the law is computed, too.
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
    label_bins: bool = False
    mass: bool = False


@dataclass(frozen=True)
class Loss:
    """One of the losses of a law: its kind, its column or target, and of a bin its number."""

    law: str
    kind: str
    of: str = ""
    bin: int = 0


@dataclass(frozen=True, eq=False)
class ScoreReduction(Reduction[ScoreSums, ScoreSums]):
    """Sums of the losses of all predictions and laws."""

    predictions: Mapping[str, Prediction]
    laws: Mapping[str, Law]
    functions: Mapping[str, Function]
    names: tuple[str, ...]
    numeric: tuple[str, ...]
    labelled: Mapping[str, int]
    n_folds: int
    name = "score-rows"
    on_device = False
    kinds = (ScoreSums,)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Predictions and their targets, in the order of the losses."""
        return [(name, t) for name, p in self.predictions.items() for t in p.targets]

    @property
    def law_losses(self) -> list[Loss]:
        """What is summed of the laws, in the order of the losses."""
        losses: list[Loss] = []
        for name, law in self.laws.items():
            losses += [Loss(name, "crps")] * law.crps
            for column in self.numeric:
                if law.level is not None:
                    losses += [Loss(name, k, column) for k in INTERVAL if law.mass or k != MASS]
                losses += [Loss(name, "pinball", column, i) for i in range(len(law.levels))]
            for column in self.numeric if law.calibration else ():
                losses += [Loss(name, "pit", column, i) for i in range(len(PIT_LEVELS))]
            losses += [Loss(name, "log score")] * law.log_score
            losses += [Loss(name, "energy")] * self.scores_energy(law)
            losses += [Loss(name, "squared", target) for target in law.targets]
            for target, edges in law.edges.items():
                bins = range(len(edges) + 1)
                losses += [Loss(name, k, target, i) for k in BINNED for i in bins]
            for column in self.labelled if law.labels else ():
                losses += [Loss(name, kind, column) for kind in ("accuracy", "log", "brier")]
                bins = range(LABEL_BINS)
                losses += [Loss(name, "calibration", column, i) for i in bins]
                if law.label_bins:
                    losses += [Loss(name, k, column, i) for k in LIKELIEST for i in bins]
                    pairs = range(self.confused(column))
                    losses += [Loss(name, "confusion", column, i) for i in pairs]
        return losses

    def confused(self, column: str) -> int:
        """Pairs of labels whose probabilities are summed: none of many labels."""
        count = self.labelled[column]
        return count**2 if count <= MOST_LABELS else 0

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
            chances = np.asarray(laws.predict_proba(column), dtype=np.float64)
            codes = _codes(y[:, self.names.index(column)], chances.shape[1], column)
            yield chances.argmax(axis=1) == codes
            yield log_losses(chances, codes, _LEAST_CHANCE)
            yield (chances**2).sum(axis=1) - 2.0 * chances[np.arange(b), codes] + 1.0
            yield from label_deviations(chances, codes).T
            if law.label_bins:
                yield from label_places(chances, codes).T
                if self.confused(column):
                    seen = np.arange(chances.shape[1]) == codes[:, None]
                    yield from (seen[:, :, None] * chances[:, None]).reshape(b, -1).T

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
            if law.mass:
                before, upto = (
                    _checked_shape(name, laws.cdf(t, column=column, paired=True), (len(y),))
                    for t in (np.nextafter(lower, -np.inf), upper)
                )
                yield upto - before
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


def _codes(values: Array, count: int, column: str) -> Array:
    """Codes of so many labels as integers."""
    codes = values.astype(np.int64)
    known = (codes == values) & (codes >= 0) & (codes < count)
    if not known.all():
        raise DataError(
            f"column {column!r} has the code {values[~known][0]:g}, there are labels for 0 to "
            f"{count - 1}: give labels, or a store that has those of the model"
        )
    return codes


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
