"""A job's model on rows that it has not seen, beside gradient boosting on the same columns."""

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from cme_dask.chunked.gather import sample_rows
from cme_dask.chunked.memory import MemoryBudget
from cme_dask.chunked.scores import Prediction, score_pass
from cme_dask.errors import DataError
from cme_dask.jobs.schema import EvaluateSection
from cme_dask.jobs.scoring import (
    described,
    described_bins,
    described_coverage,
    described_labels,
    estimate,
    law_of,
)
from cme_dask.models.events import Event
from cme_dask.models.joint import JointModel
from cme_dask.report.progress import ProgressLines
from cme_dask.storage.sample import Sample

Array = Any
Result = dict[str, Any]

MODEL, BOOSTING = "model", "gradient boosting"

BINS = 10
"""Bins of predictions in which it is shown what happened."""

_BIN_ROWS = 2000  # of the row sample, whose predictions tell the bins of means


@dataclass(frozen=True, eq=False)
class Boosted:
    """Means of columns and probabilities of events, from fitted gradient boosting."""

    means: tuple[HistGradientBoostingRegressor, ...]
    chances: tuple[HistGradientBoostingClassifier, ...]

    def __call__(self, x: Array) -> Array:
        """Shape (b, columns and events)."""
        means = [model.predict(x) for model in self.means]
        return np.column_stack([*means, *(m.predict_proba(x)[:, 1] for m in self.chances)])


def evaluate(
    model: JointModel,
    parts: tuple[Sample, Sample],
    events: Mapping[str, Event],
    section: EvaluateSection,
    budget: MemoryBudget,
    progress: ProgressLines,
) -> Result:
    """JSON form of the scores on held-out rows.

    Parameters
    ----------
    model
        Fitted on the first part.
    parts
        The rows of the fit, and those that were held out.
    events
        Of y, by their text.
    section
        What to compare with.
    budget
        Where to run, and the memory that is there.
    progress
        Where to tell the progress.
    """
    rest, held_out = parts
    numeric = model.y.columns.numeric
    targets = (*numeric, *events)
    predictions = {}
    boosting: Result | None = None
    if section.boosting and targets:
        fitted, boosting = boosted(rest, events, section, budget)
        progress.say(
            f"gradient boosting on {boosting['rows']:,} rows took {boosting['seconds']:.3g} s"
        )
        predictions[BOOSTING] = Prediction(targets, fitted)
    scored = bool(numeric)
    edges = bin_edges(model, rest, targets, set(events))
    laws = {MODEL: law_of(model, scored, scored, targets=targets, edges=edges, labels=True)}
    found = score_pass(
        held_out, predictions, budget, functions=events, laws=laws, progress=progress.fit
    )
    return {
        "rows": found.report.rows,
        "held_out": str(held_out.part),
        "passes": 1,
        "seconds": found.report.seconds,
        "boosting": boosting,
        "scores": {
            name: {t: {"event": t in events, **described(s)} for t, s in scores.items()}
            for name, scores in sorted(found.scores.items(), key=lambda pair: pair[0] != MODEL)
        },
        "labels": described_labels(found).get(MODEL, {}),
        "reliability": described_bins(found).get(MODEL, {}),
        "crps": {name: estimate(value) for name, value in found.crps.items()},
        "coverage": described_coverage(found),
    }


def bin_edges(
    model: JointModel, sample: Sample, targets: Sequence[str], events: Set[str]
) -> dict[str, tuple[float, ...]]:
    """Borders between bins of predictions: tenths of probabilities, deciles of predicted means.

    Deciles are those at rows of the row sample of the fit; of few distinct ones fewer.
    """
    assert sample.row_sample is not None
    columns = [target for target in targets if target not in events]
    found = dict.fromkeys(events, tuple(i / BINS for i in range(1, BINS)))
    if columns:
        points = sample.row_sample.prefix(_BIN_ROWS).parts[0]
        means = np.asarray(model.conditional(points).expect(columns))
        levels = np.arange(1, BINS) / BINS
        for name, values in zip(columns, means.T, strict=True):
            found[name] = tuple(np.unique(np.quantile(values, levels)).tolist())
    return {target: found[target] for target in targets}


def boosted(
    sample: Sample, events: Mapping[str, Event], section: EvaluateSection, budget: MemoryBudget
) -> tuple[Boosted, Result]:
    """Gradient boosting with scikit-learn's defaults, in memory, and what it took.

    Raises
    ------
    DataError
        If an event happens at all rows or at none.
    """
    begin = time.perf_counter()
    whole = replace(sample, row_sample=None)  # which is too small
    rows, passes = sample_rows(whole, section.boosting_rows, section.seed, budget.executor)
    x, y = rows.parts
    columns, of_y = sample.columns
    numbers = y[:, of_y.positions(of_y.numeric)]
    coded = [columns.names.index(name) for name in columns.categories]
    options: dict[str, Any] = {"categorical_features": coded or None, "random_state": 0}
    for name, event in events.items():
        if len(np.unique(event(y))) < 2:
            raise DataError(
                f"{name} has one outcome in all rows: there is nothing to compare, leave it out"
            )
    fitted = Boosted(
        tuple(
            HistGradientBoostingRegressor(**options).fit(x, column, rows.importance)
            for column in numbers.T
        ),
        tuple(
            HistGradientBoostingClassifier(**options).fit(x, event(y), rows.importance)
            for event in events.values()
        ),
    )
    seconds = time.perf_counter() - begin
    return fitted, {"rows": len(rows), "passes": passes, "seconds": seconds}
