"""``score``: a fitted model on held-out rows, in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.models.embedding import EmbeddingModel
from cme_dask.models.events import Event, comparison, looks_like_event
from cme_dask.models.joint import JointModel
from cme_dask.models.logistic import LogisticModel
from cme_dask.models.points import is_out_of_core, query_points
from cme_dask.numerics.scoring import Estimate
from cme_dask.passes.cluster import Scheduler
from cme_dask.passes.driver import Executor, RunOptions
from cme_dask.passes.scores import LabelScores, Law, Prediction, score_pass
from cme_dask.passes.sources import open_sample

Array = Any


@dataclass(frozen=True)
class ScoreTable:
    """Scores of a model on rows, each a value with its standard error over blocks of rows.

    Parameters
    ----------
    rows
        Number of rows.
    level
        Probability of the intervals whose coverage is given.
    r2
        By numeric column of y: share of the variance that the conditional means explain.
    brier, brier_skill
        By event, and by label of the columns that hold labels: mean squared error of the
        probabilities, and 1 minus its quotient by that of the event's frequency on these rows.
    crps
        Continuous ranked probability score, mean over the numeric columns, in their unit; None for
        models without laws and for labels alone.
    coverage
        By numeric column: share of the rows within the central interval, which ``level`` should be.
    labels
        By column that holds labels, of laws: ``log_loss``, the mean of -log P(label | x) in nats
        (probabilities below 1e-15 count as that), and ``accuracy`` of the likeliest label.
    """

    rows: int
    level: float
    r2: dict[str, Estimate]
    brier: dict[str, Estimate]
    brier_skill: dict[str, Estimate]
    crps: Estimate | None
    coverage: dict[str, Estimate]
    labels: dict[str, LabelScores] = field(default_factory=dict)

    def lines(self) -> list[tuple[str, str, float, float]]:
        """Score, column or event, value and standard error of each line of the table."""
        result = [] if self.crps is None else [("CRPS", "", self.crps)]
        several = {
            "R^2": self.r2,
            "Brier": self.brier,
            "Brier skill": self.brier_skill,
            f"coverage of {self.level:.0%}": self.coverage,
            "log loss": {name: each.log_loss for name, each in self.labels.items()},
            "accuracy": {name: each.accuracy for name, each in self.labels.items()},
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


def score(
    model: Any,
    X: Any,
    Y: Any = None,
    *,
    weights: Any = None,
    events: Sequence[str] = (),
    level: float = 0.9,
    scheduler: Scheduler = None,
    workers: int | None = None,
    memory_limit: str | int | None = None,
) -> ScoreTable:
    """Score a fitted model on rows, in one pass.

    Means and probabilities are those of the laws ``conditional(x)``; of a conditional mean
    embedding, its expectations. Scores are honest on rows that the model was not fitted on, such
    as the second part of ``open_sample(...).split(0.2)``.

    Parameters
    ----------
    model
        A fitted estimator, or a model from :func:`cme_dask.load`, that holds laws, a conditional
        mean embedding, or a logistic regression, whose labels are scored.
    X, Y
        Rows of x and of y: arrays, tables, Dask arrays; or X alone, a sample store by path or URL,
        or a ``Sample``. Folds of a ``Sample`` are the blocks for the standard errors.
    weights
        Non-negative weights of the rows, shape (n,); a store brings its own.
    events
        Further events of y to score, such as ``"y0 > 1"``; those declared at the fit are scored
        anyway, and so are the labels of columns that hold labels.
    level
        Probability of the intervals whose coverage is scored, in (0, 1).
    scheduler, workers, memory_limit
        As in :meth:`JointDistribution.fit`.

    Returns
    -------
    ScoreTable

    Raises
    ------
    DataError
        On other columns than the model's, unusable rows, unknown events, or a model that predicts
        no y.
    ResourceError
        If the memory does not suffice.
    """
    fitted = getattr(model, "model_", model)
    executor = RunOptions(scheduler, workers, memory_limit).executor()
    if isinstance(fitted, LogisticModel):
        if events:
            raise DataError("a logistic model scores the labels alone: leave events out")
        return _score_labels(fitted, _labelled_rows(fitted, X, Y, weights), level, executor)
    if not isinstance(fitted, (JointModel, EmbeddingModel)):
        raise DataError(
            "score takes a fitted joint distribution, conditional mean embedding or logistic "
            f"regression, got {type(model).__name__}"
        )
    has_laws = isinstance(fitted, JointModel) and fitted.y.cells is not None
    if isinstance(fitted, JointModel) and not has_laws:
        raise DataError("this model has no laws to score: fit with support_size of at least 1")
    y = fitted.y.columns
    known = fitted.function_names[0] if isinstance(fitted, JointModel) else fitted.function_names
    declared = [name for name in known if name not in y.names and looks_like_event(name)]
    if not has_laws and set(events) - set(declared):
        raise DataError("a conditional mean embedding scores the events that were declared alone")
    labels = [comparison(name, label) for name in y.categories for label in y.categories[name]]
    texts = tuple(dict.fromkeys([*declared, *events, *(labels if has_laws else [])]))
    functions = {text: Event.parse(text, y.names, y.categories) for text in texts}
    laws = {}
    if isinstance(fitted, JointModel) and fitted.y.cells is not None:
        laws["law"] = Law(
            fitted.conditional,
            crps=bool(y.numeric),
            level=level,
            cells=fitted.y.cells.size,
            labels=bool(y.categories),
        )
    sample = rows_of(fitted, X, Y, weights)
    if len(sample.columns) != 2:
        raise DataError("scores need rows of x and of y: give Y, or a store that holds both")
    targets = (*y.numeric, *texts)
    result = score_pass(
        sample,
        {"model": Prediction(targets, _Predicted(fitted, y.numeric, texts))} if targets else {},
        executor,
        functions=functions,
        laws=laws,
    )
    scores = result.scores.get("model", {})
    return ScoreTable(
        result.report.rows,
        level,
        {name: scores[name].r2 for name in y.numeric},
        {text: scores[text].mse for text in texts},
        {text: scores[text].r2 for text in texts},
        result.crps.get("law"),
        result.coverage.get("law", {}),
        result.labels.get("law", {}),
    )


@dataclass(frozen=True, eq=False)
class _Labelled:
    """Probabilities of labels at rows of x (b, d), as what scores ask of laws."""

    model: LogisticModel
    x: Array

    def predict_proba(self, column: str | None = None) -> Array:
        """Shape (b, K)."""
        return self.model.predict_proba(self.x)


def _score_labels(
    model: LogisticModel, sample: Sample, level: float, executor: Executor
) -> ScoreTable:
    """Scores of class probabilities, each label an event."""
    y = sample.columns[1]
    (name,) = y.names
    texts = tuple(comparison(name, label) for label in y.categories[name])
    of_labels: Any = partial(_Labelled, model)  # which are all that is requested
    result = score_pass(
        sample,
        {"model": Prediction(texts, model.predict_proba)},
        executor,
        functions={text: Event.parse(text, y.names, y.categories) for text in texts},
        laws={"law": Law(of_labels, crps=False, cells=len(texts), labels=True)},
    )
    scores = result.scores["model"]
    return ScoreTable(
        result.report.rows,
        level,
        {},
        {text: scores[text].mse for text in texts},
        {text: scores[text].r2 for text in texts},
        None,
        {},
        result.labels["law"],
    )


def _labelled_rows(model: LogisticModel, X: Any, Y: Any, weights: Any) -> Sample:
    """The rows with the model's columns of x, and its codes of labels."""
    texts = tuple(map(str, model.labels))
    if Y is not None:
        if is_out_of_core(Y):
            raise DataError("labels in chunks are scored from a store: give labels in memory")
        if not is_out_of_core(X):
            X = query_points(X, model, "X")
        known = {label: float(code) for code, label in enumerate(model.labels)}
        labels, places = np.unique(np.asarray(Y).ravel(), return_inverse=True)
        unknown = [label for label in labels.tolist() if label not in known]
        if unknown:
            raise DataError(f"unknown label {unknown[0]!r}: the model's are {', '.join(texts)}")
        codes = np.array([known[label] for label in labels.tolist()])[places]
        y = Columns(("y",), categories={"y": texts})
        sample = open_sample(X, codes, weights=weights)
        if len(sample.columns[0].names) != len(model.columns.names):
            raise DataError(
                f"X has the columns {sample.columns[0].listed()}, the model has "
                f"{model.columns.listed()}"
            )
        return replace(sample, columns=(model.columns, y))
    sample = open_sample(X, weights=weights)
    if len(sample.columns) != 2:
        raise DataError("scores need rows of x and of y: give Y, or a store that holds both")
    y = sample.columns[1]
    if tuple(y.categories.get(name) for name in y.names) != (texts,):
        raise DataError(f"the y of {sample.location} is no column of the labels {', '.join(texts)}")
    return sample.select(model.columns.names, None)


def rows_of(model: JointModel | EmbeddingModel, X: Any, Y: Any, weights: Any) -> Sample:
    """Rows of x, or of x and y, with the columns of the model and with its codes of labels.

    Raises
    ------
    DataError
        If they have other columns, or other labels.
    """
    ours: tuple[Columns, ...] = (model.x.columns, model.y.columns)
    if not is_out_of_core(X) and not is_out_of_core(Y):
        y = None if Y is None else query_points(Y, model.y, "Y")
        sample = open_sample(query_points(X, model.x, "X"), y, weights=weights)
        return replace(sample, columns=ours[: len(sample.columns)])
    sample = open_sample(X, Y, weights=weights)
    ours = ours[: len(sample.columns)]
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
        for name, labels in theirs.categories.items():
            if mine.categories.get(name) != labels:
                raise DataError(
                    f"the labels of column {name!r} have other codes in {sample.location} than in "
                    "the model: give the store that it was fitted on, or one with its labels"
                )
    return replace(sample, columns=ours)
