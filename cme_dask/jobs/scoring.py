"""How good a saved model is on the rows of a store that it has not seen."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.memory import MemoryBudget
from cme_dask.chunked.scores import Law, Prediction, ScoreReport, score_pass
from cme_dask.chunked.sources import open_sample
from cme_dask.errors import DataError
from cme_dask.jobs.compute import Compute
from cme_dask.models import JointModel, load_only
from cme_dask.models.events import Event
from cme_dask.numerics.folding import Part
from cme_dask.numerics.scoring import Estimate, Scores
from cme_dask.report.progress import ProgressLines
from cme_dask.storage.sample import Sample

Array = Any

LEVEL = 0.9
"""Probability of the intervals whose coverage is told."""


@dataclass(frozen=True, eq=False)
class Expectation:
    """E[f | x] of a model for some functions f, at rows of x."""

    model: JointModel
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
    compute: Compute,
) -> dict[str, Any]:
    """JSON form of the scores of E[f(y) | x], and of the laws, on held-out rows of a store.

    Parameters
    ----------
    model, store
        Paths or URLs.
    functions
        Columns of y that hold numbers, and events that the model was fitted with; default all.
    hold_out
        Share of the units that is held out; default the part that the fit did not see, if it
        held one out, else all rows.
    fold_by
        What the units are; default what they were in the fit.
    crps, coverage
        Also score the laws: by CRPS, and by the share of rows within their 90 % intervals.
    compute
        Where to run.

    Raises
    ------
    DataError
        On unknown functions or columns, a share out of range, a store without groups or times, or a
        model without laws.
    StoreError
        If model or store is unusable.
    """
    law = load_only(JointModel, model)
    sample = _held_out(_matching(open_sample(store), law), law, hold_out, fold_by)
    events = _events(law, functions)
    shown = tuple(functions) or (*law.y.columns.numeric, *events)
    labels = bool(law.y.columns.categories) and law.y.cells is not None
    judged = crps or coverage or labels
    laws = {"law": law_of(law, crps, coverage, labels=labels)} if judged else {}
    with ProgressLines() as progress, compute.open() as scheduler:
        budget = MemoryBudget.of(Executor.resolve(scheduler, compute.workers), compute.memory_limit)
        found = score_pass(
            sample,
            {"model": Prediction(shown, Expectation(law, shown))} if shown else {},
            budget,
            functions=events,
            laws=laws,
            progress=progress.fit,
        )
    seen = _fitted_on(law)
    return {
        "model": model,
        "store": sample.location,
        "rows": found.report.rows,
        "held_out": None if sample.part is None else str(sample.part),
        "fold_by": str(sample.folding),
        "unseen": seen is not None and sample.part == seen.other,
        "scores": {
            name: {"event": name in events, **described(scores)}
            for name, scores in found.scores.get("model", {}).items()
        },
        "labels": described_labels(found).get("law", {}),
        "crps": {name: estimate(value) for name, value in found.crps.items()}.get("law"),
        "coverage": described_coverage(found).get("law"),
        "units": law.y.columns.units,
        "seconds": found.report.seconds,
        "rows_per_second": found.report.rows_per_second,
    }


def _matching(sample: Sample, law: JointModel) -> Sample:
    """The sample with the columns of the model."""
    x, y = law.x.columns, law.y.columns
    sample = sample.select(x.names, y.names)
    for mine, theirs in zip((x, y), sample.columns, strict=True):
        for name in mine.names:
            if mine.categories.get(name) != theirs.categories.get(name):
                raise DataError(
                    f"the labels of column {name!r} have other codes in {sample.location} than in "
                    "the model: score it on the store that it was fitted on, or a part of that"
                )
    return sample


def _held_out(
    sample: Sample, law: JointModel, hold_out: float | None, fold_by: str | None
) -> Sample:
    """The rows to score on, with folds for the standard errors."""
    sample = sample.fold_by(fold_by or law.about.get("fold_by", "rows"))
    if hold_out is not None:
        return sample.split(hold_out)[1]
    if law.about.get("parts_differ"):
        raise DataError(
            "the model was made of parts of several tables, so that rows it was not fitted on "
            f"can't be told in {sample.location}: give the share that was held out (--hold-out)"
        )
    seen = _fitted_on(law)
    if seen is None:
        return sample
    rest, held_out = sample.split(seen.share, seen.folding, seen.seed)
    return rest if seen.held_out else held_out


def _fitted_on(law: JointModel) -> Part | None:
    """The part of the rows that the model was fitted on, if it was a part."""
    about = law.about.get("part")
    return None if about is None else Part.from_dict(about)


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
) -> Law:
    """The laws of a model to be scored; other parameters as of :class:`Law`.

    Raises
    ------
    DataError
        If it has none.
    """
    if model.y.cells is None:
        raise DataError("this model has no laws to score: fit it with support_size of at least 1")
    level = LEVEL if coverage else None
    size = model.y.cells.size
    return Law(model.conditional, crps, level, size, tuple(targets), edges or {}, labels)


def described_labels(found: ScoreReport) -> dict[str, dict[str, Any]]:
    """JSON form of the scores of labels of each law."""
    return {
        name: {
            column: {"accuracy": estimate(s.accuracy), "log_loss": estimate(s.log_loss)}
            for column, s in columns.items()
        }
        for name, columns in found.labels.items()
    }


def described_bins(found: ScoreReport) -> dict[str, dict[str, list[dict[str, Any]]]]:
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
        for name, targets in found.reliability.items()
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def described_coverage(found: ScoreReport) -> dict[str, dict[str, Any]]:
    """JSON form of the coverage of each law."""
    return {
        name: {"level": LEVEL, "columns": {c: estimate(v) for c, v in columns.items()}}
        for name, columns in found.coverage.items()
    }


def described(scores: Scores) -> dict[str, Any]:
    """JSON form of the scores of one target."""
    return {
        "mean": scores.mean,
        "variance": scores.variance,
        "mse": estimate(scores.mse),
        "r2": estimate(scores.r2),
    }


def estimate(found: Estimate) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {"value": _finite(found.value), "std": _finite(found.std)}
