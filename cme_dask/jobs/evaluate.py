"""A job's model on rows that it has not seen, beside gradient boosting on the same columns."""

import time
from collections.abc import Mapping
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
    Expectation,
    described,
    described_coverage,
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
    targets = (*model.y.columns.numeric, *events)
    predictions = {MODEL: Prediction(targets, Expectation(model, targets))}
    boosting: Result | None = None
    if section.boosting:
        fitted, boosting = boosted(rest, events, section, budget)
        progress.say(
            f"gradient boosting on {boosting['rows']:,} rows took {boosting['seconds']:.3g} s"
        )
        predictions[BOOSTING] = Prediction(targets, fitted)
    laws = {MODEL: law_of(model)} if model.y.columns.numeric and model.y.cells is not None else {}
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
            for name, scores in found.scores.items()
        },
        "crps": {name: estimate(value) for name, value in found.crps.items()},
        "coverage": described_coverage(found),
    }


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
