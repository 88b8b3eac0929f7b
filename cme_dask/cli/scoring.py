"""Scores of a saved model on held-out rows, beside gradient boosting."""

import math
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from cme_dask.cli.compute import Compute
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.schema import EvaluateSection
from cme_dask.config import LEVELS
from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.peers import binned_labels
from cme_dask.models import load, only
from cme_dask.models.embedding import LinearEmbedding
from cme_dask.models.events import Event
from cme_dask.models.joint import JointModel
from cme_dask.numerics.folds import RowSample, Split, relative_weights
from cme_dask.numerics.scoring import Estimate, Scores
from cme_dask.passes.driver import Executor, RunOptions
from cme_dask.passes.fit import sample_rows
from cme_dask.passes.held_out import Classifier, Scoring, classifier_of, rows_of
from cme_dask.passes.losses import Law, Prediction
from cme_dask.passes.scores import ScoreReport, score_pass
from cme_dask.reports.score import check_page, report_of

# Scores of a saved model on the rows of a store


Array = Any

LEVEL = 0.9
"""Probability of the intervals whose coverage is reported."""

OF_INTERVALS = ("coverage", "interval_mass", "width", "interval_score")
"""Their scores."""

LABEL_SCORES = "log_loss", "accuracy", "brier", "calibration_error"
"""Scores of probabilities of labels."""


@dataclass(frozen=True, eq=False)
class Expectation:
    """E[f | x] of a model for some functions f, at rows of x."""

    model: JointModel | LinearEmbedding
    names: tuple[str, ...]

    def __call__(self, x: Array) -> Array:
        """Shape (b, len(names))."""
        return self.model.expect(self.names, x)


def score_model(
    model: str,
    store: str,
    functions: Sequence[str],
    *,
    hold_out: float | None = None,
    fold_by: str | None = None,
    crps: bool = False,
    coverage: bool = False,
    every: bool = False,
    html: Path | None = None,
    overwrite: bool = False,
    compute: Compute,
) -> dict[str, Any]:
    """JSON form of the scores of the laws on held-out rows of a store, first of their means.

    Of a model without laws those of E[f(y) | x].

    Parameters
    ----------
    model, store
        Paths or URLs.
    functions
        Columns of y that hold numbers, and events that the model was fitted with; of a classifier
        any events of its labels. Default all that were declared, and each label of a classifier.
    hold_out
        Share of the units that is held out; default the part that the fit did not see, if it
        held one out, else all rows.
    fold_by
        The units; default those of the fit.
    crps, coverage
        Also score the laws: by CRPS, and by the coverage, width and score of 90 % intervals.
    every
        These, and pinball losses of quantiles, calibration errors, the energy score of several
        columns, and the log score of columns of numbers.
    html
        File of a page about the scores, all of them but the log score, which is there if it is
        asked for; default none.
    overwrite
        Whether the page may replace an existing file.
    compute
        Where to run.

    Raises
    ------
    DataError
        On unknown functions or columns, a share out of range, a store without groups or times, a
        model without laws, scores of numbers for a classifier, or a file that exists.
    ResourceError
        If a page can't be drawn, or written.
    StoreError
        If model or store is unusable.
    """
    if html is not None:
        check_page(html, overwrite)
    fitted: Any = load(model)
    classifier = classifier_of(fitted)
    if classifier is not None:
        if crps or coverage or every:
            raise DataError(
                "of a classifier labels and their events alone are scored: leave out --crps, "
                "--coverage and --all"
            )
        classifier = replace(classifier, further=tuple(functions) or classifier.further)
        sample = classifier.sample(store, None, None)
        scoring = classifier.scoring(_held_out(sample, fitted, hold_out, fold_by), LEVEL)
        shown = tuple(functions) or scoring.events
    else:
        law = only(JointModel, fitted, model)
        sample = _held_out(rows_of(law, store, None, None), fitted, hold_out, fold_by)
        events = _events(law, functions)
        shown = tuple(functions) or (*law.y.columns.numeric, *events)
        laws: dict[str, Law] = {}
        predictions: dict[str, Prediction] = {}
        if law.y.cells is not None or crps or coverage or every or html:
            labels, full = bool(law.y.columns.categories), every or bool(html)
            laws["law"] = law_of(law, crps, coverage, targets=shown, labels=labels, every=full)
            if not every:
                laws["law"] = replace(laws["law"], log_score=False)
        elif shown:
            predictions["model"] = Prediction(shown, Expectation(law, shown))
        scoring = Scoring(law, sample, law.y.columns, (*events,), predictions, laws, events, LEVEL)
    seen = _fitted_on(fitted)
    unseen = seen is not None and scoring.sample.part == seen.other
    with ProgressLines() as progress, compute.open() as scheduler:
        executor = RunOptions(scheduler, compute.workers, compute.memory_limit).executor()
        if html is None:
            result = scoring.run(executor, progress.fit)
        else:
            result = report_of(
                scoring,
                executor,
                progress.fit,
                html=html,
                name=Path(model).name,
                unseen=unseen,
                overwrite=overwrite,
            )
            progress.say(f"wrote {html}")
    sample = scoring.sample
    return {
        "model": model,
        "store": sample.location,
        "rows": result.report.rows,
        "held_out": None if sample.part is None else str(sample.part),
        "fold_by": str(sample.folding),
        "unseen": unseen,
        "html": None if html is None else str(html),
        "scores": {
            name: {"event": name in scoring.events, **described(scores)}
            for name, scores in scoring.of_targets(result).items()
            if name in shown  # a page draws more of them
        },
        "labels": described_labels(result).get("law", {}),
        "crps": {name: estimate(value) for name, value in result.crps.items()}.get("law"),
        **{name: each.get("law") for name, each in described_laws(result).items()},
        "units": sample.columns[1].units,
        "seconds": result.report.seconds,
        "rows_per_second": result.report.rows_per_second,
    }


def _held_out(sample: Sample, law: Any, hold_out: float | None, fold_by: str | None) -> Sample:
    """The rows to score on, with folds for the standard errors."""
    sample = sample.fold_by(fold_by or law.about.get("fold_by", "rows"))
    if hold_out is not None:
        return sample.split(hold_out)[1]
    if law.about.get("parts_differ"):
        raise DataError(
            "the model was made of parts of several tables, so that rows it was not fitted on "
            f"cannot be identified in {sample.location}: give the share that was held out "
            "(--hold-out)"
        )
    seen = _fitted_on(law)
    if seen is None:
        return sample
    rest, held_out = sample.split_as(seen)
    return rest if seen.held_out else held_out


def _fitted_on(law: Any) -> Split | None:
    """The part of the rows that the model was fitted on, if it was a part."""
    metadata = law.about.get("part")
    return None if metadata is None else Split.from_dict(metadata)


def _events(law: JointModel, functions: Sequence[str]) -> dict[str, Event]:
    """The model's events by their text; of functions that are none only the names are stored."""
    columns, known = law.y.columns, law.x.answers.names
    unknown = [name for name in functions if name not in known]
    if unknown:
        raise DataError(
            f"the model knows no {unknown[0]!r}: there are {', '.join(map(repr, known))}"
        )
    events = {}
    for name in functions or known:
        if name in columns.names:
            continue
        try:
            events[name] = Event.parse(name, columns.names, columns.categories)
        except DataError:
            if functions:
                raise
    return events


def law_of(
    model: JointModel,
    crps: bool = True,
    coverage: bool = True,
    *,
    targets: Sequence[str] = (),
    edges: Mapping[str, tuple[float, ...]] | None = None,
    labels: bool = False,
    every: bool = False,
) -> Law:
    """The laws of a model to be scored; other parameters as of :class:`Law`.

    ``every``: all scores that the columns of y have.

    Raises
    ------
    DataError
        If it has none.
    """
    if model.y.cells is None:
        raise DataError("this model has no laws to score: fit it with support_size of at least 1")
    numeric = bool(model.y.columns.numeric)
    return Law(
        model.conditional,
        crps or (every and numeric),
        LEVEL if coverage or every else None,
        model.y.cells.size,
        tuple(targets),
        edges or {},
        labels,
        levels=LEVELS if every else (),
        log_score=every and not model.y.columns.categories,
        calibration=every,
        energy=every,
        mass=True,
    )


def described_labels(report: ScoreReport) -> dict[str, dict[str, Any]]:
    """JSON form of the scores of labels of each law."""
    return {
        name: {
            column: {key: estimate(getattr(s, key)) for key in LABEL_SCORES}
            for column, s in columns.items()
        }
        for name, columns in report.labels.items()
    }


def described_bins(report: ScoreReport) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """JSON form of the bins of what each law predicted; None for the ends that are infinite."""
    return {
        name: {
            target: [
                {
                    "low": _finite(b.low),
                    "high": _finite(b.high),
                    "share": b.share,
                    "predicted": _finite(b.predicted),
                    "seen": estimate(b.seen),
                }
                for b in bins
            ]
            for target, bins in targets.items()
        }
        for name, targets in report.reliability.items()
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def described_laws(report: ScoreReport) -> dict[str, dict[str, Any]]:
    """JSON form of the scores of quantiles, intervals and densities, by score and by law."""

    def of_intervals(scores: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Any]:
        return {
            name: {"level": LEVEL, "columns": {c: estimate(v) for c, v in columns.items()}}
            for name, columns in scores.items()
        }

    return {
        "coverage": of_intervals(report.coverage),
        "interval_mass": of_intervals(report.interval_mass),
        "width": of_intervals(report.width),
        "interval_score": of_intervals(report.interval_score),
        "pinball": {
            name: {
                column: [{"level": level, **estimate(loss)} for level, loss in losses.items()]
                for column, losses in columns.items()
            }
            for name, columns in report.pinball.items()
        },
        "calibration_error": {
            name: {column: estimate(error) for column, error in columns.items()}
            for name, columns in report.calibration_error.items()
        },
        "energy_score": {name: estimate(value) for name, value in report.energy_score.items()},
        "log_score": {name: estimate(value) for name, value in report.log_score.items()},
    }


def described(scores: Scores) -> dict[str, Any]:
    """JSON form of the scores of one target."""
    return {
        "mean": scores.mean,
        "variance": scores.variance,
        "mse": estimate(scores.mse),
        "r2": estimate(scores.r2),
    }


def estimate(result: Estimate) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {"value": _finite(result.value), "std": _finite(result.std)}


# A job's model on rows that it has not seen, beside gradient boosting on the same columns


Result = dict[str, Any]

MODEL, BOOSTING = "model", "gradient boosting"

BINS = 10
"""Bins of predictions in which it is shown what happened."""

_BIN_ROWS = 2000  # of the row sample, whose predictions give the bins of means


@dataclass(frozen=True, eq=False)
class Boosted:
    """Means of columns and probabilities of events, from fitted gradient boosting."""

    means: tuple[HistGradientBoostingRegressor, ...]
    chances: tuple[ClassifierMixin, ...]

    def __call__(self, x: Array) -> Array:
        """Shape (b, columns and events)."""
        means = [model.predict(x) for model in self.means]
        return np.column_stack([*means, *(_chance(model, x) for model in self.chances)])


def _chance(model: ClassifierMixin, x: Array) -> Array:
    """Probability of True, which a model that never saw it does not list."""
    return model.predict_proba(x)[:, np.asarray(model.classes_, dtype=bool)].sum(axis=1)


def evaluate(
    model: JointModel | LinearEmbedding,
    parts: tuple[Sample, Sample],
    events: Mapping[str, Event],
    section: EvaluateSection,
    executor: Executor,
    progress: ProgressLines,
) -> Result:
    """JSON form of the scores on held-out rows.

    Parameters
    ----------
    model
        Fitted on the first part; of a joint model the laws are scored, too.
    parts
        The rows of the fit, and those that were held out.
    events
        Of y, by their text.
    section
        What to compare with.
    executor
        Where to run, and the memory that is there.
    progress
        Shows the progress.
    """
    rest, held_out = parts
    numeric = model.y.columns.numeric
    classifier = classifier_of(model)
    targets = (*numeric, *events)
    predictions = {}
    boosting: Result | None = None
    if section.boosting and targets and classifier is None:
        fitted, boosting = boosted(rest, events, section, executor)
        predictions[BOOSTING] = Prediction(targets, fitted)
    laws: dict[str, Law] = {}
    if isinstance(model, JointModel) and classifier is None:
        scored, edges = bool(numeric), bin_edges(model, rest, targets, set(events))
        laws[MODEL] = law_of(model, scored, scored, targets=targets, edges=edges, labels=True)
    elif classifier is not None:
        laws[MODEL] = classifier.law
        if section.boosting:
            laws[BOOSTING], boosting = boosted_labels(rest, classifier, section, executor)
        events = classifier.events
    else:
        predictions[MODEL] = Prediction(targets, Expectation(model, targets))
    if boosting is not None:
        progress.say(
            f"gradient boosting on {boosting['rows']:,} rows took {boosting['seconds']:.3g} s"
        )
    result = score_pass(
        held_out, predictions, executor, functions=events, laws=laws, progress=progress.fit
    )
    return {
        "rows": result.report.rows,
        "held_out": str(held_out.part),
        "passes": 1,
        "seconds": result.report.seconds,
        "boosting": boosting,
        "scores": {
            name: {t: {"event": t in events, **described(s)} for t, s in scores.items()}
            for name, scores in sorted(result.scores.items(), key=lambda pair: pair[0] != MODEL)
        },
        "labels": described_labels(result).get(MODEL, {}),
        "labels_boosting": described_labels(result).get(BOOSTING, {}),
        "reliability": described_bins(result).get(MODEL, {}),
        "crps": {name: estimate(value) for name, value in result.crps.items()},
        **{key: described_laws(result)[key] for key in OF_INTERVALS},
    }


def bin_edges(
    model: JointModel, sample: Sample, targets: Sequence[str], events: Set[str]
) -> dict[str, tuple[float, ...]]:
    """Borders between bins of predictions: tenths of probabilities, deciles of predicted means.

    Deciles are those at rows of the row sample of the fit; of few distinct ones fewer.
    """
    assert sample.row_sample is not None
    columns = [target for target in targets if target not in events]
    result = dict.fromkeys(events, tuple(i / BINS for i in range(1, BINS)))
    if columns:
        points = sample.row_sample.prefix(_BIN_ROWS).parts[0]
        means = np.asarray(model.conditional(points).expect(columns))
        levels = np.arange(1, BINS) / BINS
        for name, values in zip(columns, means.T, strict=True):
            result[name] = tuple(np.unique(np.quantile(values, levels)).tolist())
    return {target: result[target] for target in targets}


def boosted(
    sample: Sample, events: Mapping[str, Event], section: EvaluateSection, executor: Executor
) -> tuple[Boosted, Result]:
    """Gradient boosting with scikit-learn's defaults, in memory, and its time.

    An event with one outcome in all rows has that outcome with probability 1.
    """
    begin = time.perf_counter()
    rows, passes = _boosting_rows(sample, section, executor)
    (x, y), weights = rows.parts, relative_weights(rows.importance)
    columns, of_y = sample.columns
    numbers = y[:, of_y.positions(of_y.numeric)]
    options = _boosting_options(columns)

    def classifier(happens: Array) -> ClassifierMixin:
        one = len(np.unique(happens)) == 1
        chosen = DummyClassifier() if one else HistGradientBoostingClassifier(**options)
        return chosen.fit(x, happens, weights)

    fitted = Boosted(
        tuple(
            HistGradientBoostingRegressor(**options).fit(x, column, weights) for column in numbers.T
        ),
        tuple(classifier(event(y)) for event in events.values()),
    )
    seconds = time.perf_counter() - begin
    return fitted, {"rows": len(rows), "passes": passes, "seconds": seconds}


@dataclass(frozen=True, eq=False)
class BoostedLabels:
    """Probabilities of labels from fitted gradient boosting, which may not have seen all."""

    model: HistGradientBoostingClassifier
    count: int

    def predict_proba(self, x: Array) -> Array:
        """Shape (b, K)."""
        shares = np.zeros((len(x), self.count))
        shares[:, self.model.classes_.astype(np.int64)] = self.model.predict_proba(x)
        return shares


def boosted_labels(
    sample: Sample, classifier: Classifier, section: EvaluateSection, executor: Executor
) -> tuple[Law, Result]:
    """The same as :func:`boosted` of the labels of a classifier, to be scored beside it."""
    begin = time.perf_counter()
    rows, passes = _boosting_rows(sample, section, executor)
    model = HistGradientBoostingClassifier(**_boosting_options(sample.columns[0]))
    model.fit(rows.parts[0], rows.parts[1][:, 0], relative_weights(rows.importance))
    theirs = replace(classifier, model=BoostedLabels(model, len(classifier.labels)))
    seconds = time.perf_counter() - begin
    return theirs.law, {"rows": len(rows), "passes": passes, "seconds": seconds}


def _boosting_rows(
    sample: Sample, section: EvaluateSection, executor: Executor
) -> tuple[RowSample, int]:
    whole = replace(sample, row_sample=None)  # which is too small
    return sample_rows(whole, section.boosting_rows, section.seed, executor)


def _boosting_options(columns: Columns) -> dict[str, Any]:
    return {"categorical_features": binned_labels(columns) or None, "random_state": 0}
