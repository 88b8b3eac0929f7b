"""``score``: a fitted model on held-out rows, in one pass."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np

from cme_dask.config import LEVELS
from cme_dask.data.columns import Columns
from cme_dask.data.missing import completed
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, remedy
from cme_dask.models.answers import event_shares
from cme_dask.models.embedding import EmbeddingModel
from cme_dask.models.events import Event, comparison, looks_like_event
from cme_dask.models.joint import JointModel
from cme_dask.models.logistic import LogisticModel
from cme_dask.models.points import (
    QueriedVariable,
    check_levels,
    is_out_of_core,
    label_codes,
    query_points,
)
from cme_dask.numerics.moments import Function
from cme_dask.numerics.scoring import Estimate, Scores
from cme_dask.passes.driver import Executor, PassKeywords, options_of, with_run_options
from cme_dask.passes.losses import Law, Prediction
from cme_dask.passes.progress import Listener, listening
from cme_dask.passes.scores import LabelScores, ScoreReport, score_pass
from cme_dask.passes.sources import chunked_labels, open_sample, recoded

Array = Any


@dataclass(frozen=True)
class ScoreTable:
    """Scores of a model on rows, each a value with its standard error over blocks of rows.

    Parameters
    ----------
    rows
        Number of rows.
    level
        Probability of the intervals whose coverage, width and score are given.
    r2
        By numeric column of y: share of the variance that the conditional means explain.
    brier, brier_skill
        By event, and by label of the columns that hold labels: mean squared error of the
        probabilities, and 1 minus its quotient by that of the event's frequency on these rows.
    crps
        Continuous ranked probability score, mean over the numeric columns, in their unit; None for
        models without laws and for labels alone.
    coverage
        By numeric column: share of the rows within the central interval, whose mass it should be.
    interval_mass
        By numeric column: mean probability that the laws give to their central intervals: the
        level, and more where y takes few values.
    labels
        By column that holds labels, of laws and classifiers: ``log_loss``, the mean of
        -log P(label | x) in nats (probabilities below 1e-15 count as that), ``accuracy`` of the
        likeliest label, ``brier``, the squared error of the probabilities of all labels, and
        ``calibration_error``, expected over 15 bins of the likeliest label's probability.
    width, interval_score
        By numeric column: mean width of the central intervals, and their mean interval score, see
        :func:`cme_dask.metrics.interval_score`; in the unit of the column.
    pinball
        By numeric column, then by level: mean pinball loss of the quantile of this level.
    calibration_error
        By numeric column: mean absolute difference between the distribution function of the
        probability integral transform and the uniform one, at the levels 0.05, 0.1, ..., 0.95. Ties
        are treated as if the transform were randomised.
    energy_score
        Of the numeric columns jointly, from 64 draws of each law, whose noise is part of the
        standard error; None if there are fewer than two. Columns count by their own units.
    log_score
        Mean of minus the logarithm of the joint density of y, in nats, if it was asked for;
        densities below the smallest positive float64 count as that.
    """

    rows: int
    level: float
    r2: dict[str, Estimate]
    brier: dict[str, Estimate]
    brier_skill: dict[str, Estimate]
    crps: Estimate | None
    coverage: dict[str, Estimate]
    labels: dict[str, LabelScores] = field(default_factory=dict)
    interval_mass: dict[str, Estimate] = field(default_factory=dict)
    width: dict[str, Estimate] = field(default_factory=dict)
    interval_score: dict[str, Estimate] = field(default_factory=dict)
    pinball: dict[str, dict[float, Estimate]] = field(default_factory=dict)
    calibration_error: dict[str, Estimate] = field(default_factory=dict)
    energy_score: Estimate | None = None
    log_score: Estimate | None = None

    def lines(self) -> list[tuple[str, str, float, float]]:
        """Score, column or event, value and standard error of each line of the table."""
        whole = {
            "CRPS": self.crps,
            "energy score": self.energy_score,
            "log score": self.log_score,
        }
        result = [(score, "", each) for score, each in whole.items() if each is not None]
        levels = sorted({level for losses in self.pinball.values() for level in losses})
        several = {
            "R^2": self.r2,
            "Brier": self.brier,
            "Brier skill": self.brier_skill,
            f"coverage of {self.level:.0%}": self.coverage,
            f"mass of {self.level:.0%}": self.interval_mass,
            f"width of {self.level:.0%}": self.width,
            f"interval score of {self.level:.0%}": self.interval_score,
        }
        for level in levels:
            losses = {name: each[level] for name, each in self.pinball.items()}
            several[f"pinball loss at {level:g}"] = losses
        several |= {
            "log loss": {name: each.log_loss for name, each in self.labels.items()},
            "accuracy": {name: each.accuracy for name, each in self.labels.items()},
            "Brier, all labels": {name: each.brier for name, each in self.labels.items()},
            "calibration error": self.calibration_error
            | {name: each.calibration_error for name, each in self.labels.items()},
        }
        result += [(score, name, e) for score, each in several.items() for name, e in each.items()]
        return [(score, name, each.value, each.std) for score, name, each in result]

    def __repr__(self) -> str:
        width = max(len(f"{score} {name}") for score, name, _, _ in self.lines())
        body = "\n".join(
            f"  {f'{score} {name}':<{width}}  {value:.4g} +- {std:.2g}"
            for score, name, value, std in self.lines()
        )
        return f"scores on {self.rows:,} rows\n{body}"


@dataclass(frozen=True, eq=False)
class _Predicted:
    """Means of columns and probabilities of events, at rows of x."""

    model: JointModel | EmbeddingModel
    columns: tuple[str, ...]
    events: tuple[str, ...]

    def __call__(self, x: Array) -> Array:
        if isinstance(self.model, EmbeddingModel):
            return self.model.expect([*self.columns, *self.events], x)
        law = self.model.conditional(x)
        return np.column_stack([law.expect(list(self.columns)), law.probability(list(self.events))])


@dataclass(frozen=True, eq=False)
class Scoring:
    """A model, the rows that it is scored on, and the scores, before any row is read.

    Attributes
    ----------
    model
        The fitted model.
    sample
        Rows of x and y.
    y
        Columns of y.
    events
        Events of y whose probabilities are scored, among the functions.
    predictions, laws, functions
        As of :func:`score_pass`.
    level
        Probability of the intervals.
    """

    model: Any
    sample: Sample
    y: Columns
    events: tuple[str, ...]
    predictions: Mapping[str, Prediction]
    laws: Mapping[str, Law]
    functions: Mapping[str, Function]
    level: float

    def run(
        self, executor: Executor, listener: Listener | None = None, rows: int = 0
    ) -> ScoreReport:
        """The scores, in one pass, and so many of the rows."""
        return score_pass(
            self.sample,
            self.predictions,
            executor,
            functions=self.functions,
            laws=self.laws,
            rows=rows,
            progress=listener,
        )

    def table(self, result: ScoreReport) -> ScoreTable:
        """The scores that a pass found."""
        scores = self.of_targets(result)
        return ScoreTable(
            result.report.rows,
            self.level,
            {name: scores[name].r2 for name in self.y.numeric},
            {text: scores[text].mse for text in self.events},
            {text: scores[text].r2 for text in self.events},
            result.crps.get("law"),
            result.coverage.get("law", {}),
            result.labels.get("law", {}),
            width=result.width.get("law", {}),
            interval_mass=result.interval_mass.get("law", {}),
            interval_score=result.interval_score.get("law", {}),
            pinball=result.pinball.get("law", {}),
            calibration_error=result.calibration_error.get("law", {}),
            energy_score=result.energy_score.get("law"),
            log_score=result.log_score.get("law"),
        )

    def of_targets(self, result: ScoreReport) -> dict[str, Scores]:
        """Those of means of columns and of probabilities of events."""
        return result.scores.get("model", result.scores.get("law", {}))


@with_run_options
def score(
    model: Any,
    X: Any,
    Y: Any = None,
    *,
    weights: Any = None,
    events: Sequence[str] = (),
    level: float = 0.9,
    levels: Sequence[float] = LEVELS,
    log_score: bool = False,
    **keywords: Unpack[PassKeywords],
) -> ScoreTable:
    """Score a fitted model on rows, in one pass.

    Means and probabilities are those of the laws ``conditional(x)``; of a conditional mean
    embedding, its expectations. Scores are honest on rows that the model was not fitted on, such
    as the second part of ``open_sample(...).split(0.2)``.

    Parameters
    ----------
    model
        A fitted estimator, or a model from :func:`cme_dask.load`, that holds laws or a conditional
        mean embedding; of classifiers the probabilities of labels are scored, those of
        ``predict_proba``, and sums of them as those of events. Rows that lack a value are left out,
        or filled in, if the fit did so.
    X, Y
        Rows of x and of y: arrays, tables, Dask arrays; or X alone, a sample store by path or URL,
        or a ``Sample``. The y of a classifier are labels, as it was fitted on. Folds of a
        ``Sample`` are the blocks for the standard errors.
    weights
        Non-negative weights of the rows, shape (n,); a store brings its own.
    events
        Further events of y to score, such as ``"y0 > 1"``; those declared at the fit are scored
        anyway, and so are the labels of columns that hold labels.
    level
        Probability of the intervals whose coverage, width and score are computed, in (0, 1).
    levels
        Levels of the quantiles whose pinball losses are computed, in (0, 1).
    log_score
        Whether the density of y is scored, too: it can take longer than all other
        scores together.
    **keywords
        As in :class:`RunOptions`.

    Returns
    -------
    ScoreTable

    Raises
    ------
    DataError
        On other columns than the model's, unusable rows, unknown events, a model that predicts no
        y, levels outside (0, 1), or a log score where there is no density.
    ResourceError
        If the memory does not suffice.
    """
    options = options_of(keywords, PassKeywords)
    executor = options.executor()
    scoring = scoring_of(model, X, Y, weights, events, level, levels, log_score)
    with listening(options.progress) as listener:
        return scoring.table(scoring.run(executor, listener))


def scoring_of(
    model: Any,
    X: Any,
    Y: Any,
    weights: Any,
    events: Sequence[str],
    level: float,
    levels: Sequence[float],
    log_score: bool,
) -> Scoring:
    """What :func:`score` does with these arguments; it raises the same errors."""
    fitted = getattr(model, "model_", model)
    listed = isinstance(events, Iterable) and not isinstance(events, str)
    if listed:
        events = tuple(events)  # of an iterator once
    if not listed or not all(isinstance(event, str) for event in events):
        raise DataError(f"events must be a list of texts such as ['y > 1'], got {events!r}")
    (found, *_), single = check_levels(level)
    if not single or not 0.0 < found < 1.0:
        raise DataError(f"level must be a number between 0 and 1, got {level!r}")
    level, levels = float(found), check_levels(levels)[0].tolist()
    classifier = classifier_of(fitted)
    if classifier is not None:
        if log_score:
            raise DataError("a classifier has no density to score: leave log_score out")
        classifier = replace(classifier, further=(*classifier.further, *events))
        return classifier.scoring(classifier.sample(X, Y, weights), level)
    if not isinstance(fitted, (JointModel, EmbeddingModel)):
        raise DataError(
            "score takes a fitted joint distribution, conditional mean embedding or classifier, "
            f"got {type(model).__name__}"
        )
    has_laws = isinstance(fitted, JointModel) and fitted.y.cells is not None
    if isinstance(fitted, JointModel) and not has_laws:
        raise DataError("this model has no laws to score: fit with support_size of at least 1")
    y = fitted.y.columns
    declared = _declared_events(fitted)
    if not has_laws and set(events) - set(declared):
        raise DataError("a conditional mean embedding scores the events that were declared alone")
    labels = [comparison(name, label) for name in y.categories for label in y.categories[name]]
    texts = tuple(dict.fromkeys([*declared, *events, *(labels if has_laws else [])]))
    functions = {text: Event.parse(text, y.names, y.categories) for text in texts}
    if log_score and (y.categories or not has_laws):
        raise DataError("log_score needs laws of columns of numbers alone: leave it out")
    laws = {}
    if isinstance(fitted, JointModel) and fitted.y.cells is not None:
        laws["law"] = Law(
            fitted.conditional,
            crps=bool(y.numeric),
            level=level,
            cells=fitted.y.cells.size,
            labels=bool(y.categories),
            levels=tuple(levels),
            log_score=log_score,
            calibration=True,
            energy=True,
            mass=True,
        )
    sample = rows_of(fitted, X, Y, weights)
    if len(sample.columns) != 2:
        raise DataError("scores need rows of x and of y: give Y, or a store that holds both")
    targets = (*y.numeric, *texts)
    prediction = Prediction(targets, _Predicted(fitted, y.numeric, texts))
    predictions = {"model": prediction} if targets else {}
    return Scoring(fitted, sample, y, texts, predictions, laws, functions, level)


@dataclass(frozen=True, eq=False)
class Classifier:
    """Probabilities of the labels of one column of y, as what scores ask of models of laws.

    Attributes
    ----------
    model
        Has ``predict_proba`` of rows of x (b, d), shape (b, K).
    variable
        x, with its columns and basis.
    y
        The column of labels.
    labels
        The labels in their own types, in the order of the probabilities.
    further
        Texts of other events of the column that are scored.
    cells
        Cells of the laws that the probabilities are made of.
    """

    model: Any
    variable: QueriedVariable
    y: Columns
    labels: tuple[Any, ...]
    further: tuple[str, ...] = ()
    cells: int = 0

    @property
    def events(self) -> dict[str, Event]:
        """Further events, and each label as one, by their texts."""
        (name,) = self.y.names
        each = (comparison(name, label) for label in self.y.categories[name])
        texts = dict.fromkeys((*self.further, *each))
        return {text: Event.parse(text, self.y.names, self.y.categories) for text in texts}

    @property
    def law(self) -> Law:
        """What is scored of it."""
        return Law(
            self._at,
            crps=False,
            cells=max(self.cells, len(self.labels)),
            targets=tuple(self.events),
            labels=True,
        )

    def scoring(self, sample: Sample, level: float) -> Scoring:
        """The scores of its probabilities on the rows of :meth:`sample`: labels are events, too."""
        events = self.events
        return Scoring(self.model, sample, self.y, (*events,), {}, {"law": self.law}, events, level)

    def _at(self, x: Array) -> Any:
        return _Labelled(np.asarray(self.model.predict_proba(x)), self.events)

    def sample(self, X: Any, Y: Any, weights: Any) -> Sample:
        """Rows with the columns of x, and the codes of the labels.

        Raises
        ------
        DataError
            On other columns or labels.
        """
        sample = _labelled_rows(self.model, self.variable, self.y, X, Y, weights)
        if len(sample.columns) != 2:
            raise DataError("scores need rows of x and of y: give Y, or a store of both")
        return sample


@dataclass(frozen=True, eq=False)
class _Labelled:
    """Probabilities of labels at rows, and of events of their column."""

    shares: Array
    events: Mapping[str, Event]

    def predict_proba(self, column: str | None = None) -> Array:
        """Shape (b, K)."""
        return self.shares

    def expect(self, f: Any) -> Array:
        """Of events, shape (b, len(f))."""
        return event_shares([self.events[text] for text in f], self.shares)


def classifier_of(model: Any) -> Classifier | None:
    """The classifier that a model is; None if it is none."""
    if isinstance(model, LogisticModel):
        return Classifier(model, model, model.columns_y, model.labels)
    if isinstance(model, (JointModel, EmbeddingModel)) and model.classifies:
        labels = tuple(model.classes.tolist())
        cells = model.y.cells.size if isinstance(model, JointModel) and model.y.cells else 0
        declared = _declared_events(model)
        return Classifier(model, model.x, model.columns_y, labels, declared, cells)
    return None


def _declared_events(model: JointModel | EmbeddingModel) -> tuple[str, ...]:
    """Texts of the events of y that were declared at the fit."""
    known = model.function_names[0] if isinstance(model, JointModel) else model.function_names
    names = model.columns_y.names
    return tuple(name for name in known if name not in names and looks_like_event(name))


def rows_of(model: JointModel | EmbeddingModel, X: Any, Y: Any, weights: Any) -> Sample:
    """Rows of x, or of x and y, with the columns of the model and with its codes of labels.

    Raises
    ------
    DataError
        If they have other columns, or other labels.
    """
    if "classes" in model.about:
        return _labelled_rows(model, model.x, model.y.columns, X, Y, weights)
    if Y is not None and not is_out_of_core(Y):
        missing = "missing" in model.about
        Y = query_points(Y, model.y, "Y", missing=missing, observed=True)
    return _rows(model, model.x, model.y.columns, X, Y, weights)


def _labelled_rows(
    model: Any, variable: QueriedVariable, y: Columns, X: Any, Y: Any, weights: Any
) -> Sample:
    """Rows of x, or of x and y, with the codes that a classifier gives to labels."""
    if Y is not None:
        return _rows(model, variable, y, X, _known_codes(Y, y), weights)
    if not is_out_of_core(X):
        return _rows(model, variable, y, X, None, weights)
    sample = open_sample(X, weights=weights)
    if len(sample.columns) == 2:
        given = sample.columns[1]
        if len(given.names) == 1:  # there is but one, whatever its name
            y = Columns(given.names, categories={given.names[0]: y.categories[y.names[0]]})
        if y.names[0] not in given.categories:
            raise DataError(
                f"a classifier is scored on the labels of one column, {sample.location} has y: "
                f"{given.listed()}; give the labels as Y, or ingest them with "
                + remedy("categorical=", "--categorical")
            )
    return _rows(model, variable, y, sample, None, None)


def _known_codes(Y: Any, y: Columns) -> Array:
    """The code of each label of a classifier's y, shape (n,); lazily where labels are chunked."""
    if not is_out_of_core(Y):
        return label_codes(Y, y)
    return chunked_labels(Y).map_blocks(label_codes, y, dtype=np.float64)


def _rows(
    model: Any, variable: QueriedVariable, y: Columns, X: Any, Y: Any, weights: Any
) -> Sample:
    """Rows of x as of a variable, and those of y beside them, which have their codes already."""
    x = variable.columns.given
    if not is_out_of_core(X):
        missing = "missing" in model.about
        X, x = query_points(X, variable, "X", missing=missing), variable.columns
    sample = open_sample(X, Y, weights=weights)
    ours = (x, y)[: len(sample.columns)]
    named = [
        None if columns.names == Columns.default(key, len(columns.names)).names else each.names
        for key, columns, each in zip("xy", sample.columns, ours, strict=False)
    ]
    sample = sample.select(*named)
    for mine, theirs in zip(ours, sample.columns, strict=True):
        if len(mine.names) != len(theirs.names):
            raise DataError(
                f"{sample.location} has the columns {theirs.listed()}, the model has "
                f"{mine.listed()}"
            )
    return like_fit(recoded(sample, ours), model, variable.columns)


def like_fit(sample: Sample, model: Any, columns: Columns) -> Sample:
    """The sample with missing values of x filled in and rows left out, as the fit of a model did.

    ``columns`` are those of the model's x.
    """
    return completed(sample, columns) if "missing" in model.about else sample
