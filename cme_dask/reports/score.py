"""``score_report``: the scores of a model on rows as a page, from one pass over them."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from cme_dask.config import LEVELS
from cme_dask.data.atomic import check_output
from cme_dask.models.embedding import EmbeddingModel
from cme_dask.models.events import Event, comparison
from cme_dask.models.joint import JointModel
from cme_dask.models.marginal import MarginalLaw
from cme_dask.models.plots import require
from cme_dask.passes.driver import Executor, PassKeywords, options_of, with_run_options
from cme_dask.passes.held_out import ScoreTable, Scoring, scoring_of
from cme_dask.passes.progress import Listener, listening
from cme_dask.passes.scores import Bin, ScoreReport
from cme_dask.reports.figures import MOST_COLUMNS, Figure, Figures
from cme_dask.reports.page import OUTPUT, Page

SAMPLED = 256
"""Rows that a pass takes along for the figures."""

_TENTHS = tuple(k / 10 for k in range(1, 10))
_QUARTILES = 0.25, 0.5, 0.75
_MOST_EVENTS = 4  # that are drawn


@with_run_options
def score_report(
    model: Any,
    X: Any,
    Y: Any = None,
    *,
    html: str | os.PathLike[str],
    weights: Any = None,
    events: Sequence[str] = (),
    level: float = 0.9,
    levels: Sequence[float] = LEVELS,
    log_score: bool = False,
    name: str | None = None,
    overwrite: bool = False,
    **keywords: Unpack[PassKeywords],
) -> ScoreTable:
    """Score a fitted model on rows, and write a page about it, in one pass.

    The page is one file of HTML, without scripts, that asks for nothing over a network: a summary,
    the scores of :func:`cme_dask.score` beside those of the marginal law of y, which ignores x, fan
    charts, densities, histograms of the probability integral transform, reliability of
    probabilities, relevance of columns, the spectrum, timings and provenance. Figures are made of
    sums and of 256 random rows that the same pass takes along.

    Parameters
    ----------
    model, X, Y, weights, events, level, levels, log_score
        As in :func:`cme_dask.score`.
    html
        File to write.
    name
        What the page calls the model; default its class.
    overwrite
        Replace an existing file once the new one is complete.
    **keywords
        As in :class:`RunOptions`.

    Returns
    -------
    ScoreTable

    Raises
    ------
    DataError
        As in :func:`cme_dask.score`, or if the file exists and ``overwrite`` is false.
    ResourceError
        If Matplotlib is not installed, the file can't be written, or the memory does not suffice.
    """
    check_page(html, overwrite)
    options = options_of(keywords, PassKeywords)
    scoring = scoring_of(model, X, Y, weights, events, level, levels, log_score)
    with listening(options.progress) as listener:
        result = report_of(
            scoring,
            options.executor(),
            listener,
            html=html,
            name=type(model).__name__ if name is None else name,
            overwrite=overwrite,
        )
    return scoring.table(result)


def check_page(html: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse a page that can't be drawn, or written, before any work is done for it."""
    require()
    check_output(html, OUTPUT, overwrite)


def report_of(
    scoring: Scoring,
    executor: Executor,
    listener: Listener | None,
    *,
    html: str | os.PathLike[str],
    name: str,
    unseen: bool | None = None,
    overwrite: bool = False,
) -> ScoreReport:
    """Run the pass of some scores with what figures need, and write the page.

    Parameters
    ----------
    scoring
        The scores.
    executor, listener
        As of :meth:`Scoring.run`.
    html, overwrite, name
        As in :func:`score_report`.
    unseen
        Whether the fit has not seen these rows; None where that is not known.
    """
    request = Request.of(scoring)
    result = request.scoring.run(executor, listener, rows=SAMPLED)
    begin = time.perf_counter()
    draw = request.drawing(result)
    figures = request.figures(draw, result)
    page = Page(
        scoring=scoring,
        result=result,
        figures=figures,
        relevance=request.relevance,
        along=(draw.walk.column, draw.walk.others),
        name=name,
        unseen=unseen,
        seconds=time.perf_counter() - begin,
    )
    page.write(Path(html), overwrite=overwrite)
    return result


@dataclass(frozen=True, eq=False)
class Request:
    """Scores with what the figures need beside them.

    Attributes
    ----------
    scoring
        The scores of the model, those of the marginal law, and bins of probabilities.
    thresholds
        By numeric column of y that is drawn: texts of the events that it exceeds a quartile of its
        marginal law.
    events
        The declared events that are drawn.
    """

    scoring: Scoring
    thresholds: dict[str, tuple[str, ...]]
    events: tuple[str, ...]

    @classmethod
    def of(cls, scoring: Scoring) -> "Request":
        """Of some scores."""
        law, fitted = scoring.laws.get("law"), scoring.model
        if law is None:
            return cls(scoring, {}, ())
        law = replace(law, label_bins=law.labels)
        if not isinstance(fitted, JointModel):  # of a classifier labels are all there is
            return cls(replace(scoring, laws={"law": law}), {}, ())
        y, marginal = scoring.y, MarginalLaw(fitted)
        above: dict[str, dict[str, Event]] = {
            column: _exceeding(marginal, column, y.names.index(column))
            for column in y.numeric[:MOST_COLUMNS]
        }
        every = {text: event for each in above.values() for text, event in each.items()}
        labels = {comparison(n, label) for n in y.categories for label in y.categories[n]}
        events = tuple(text for text in scoring.events if text not in labels)[:_MOST_EVENTS]
        law = replace(
            law,
            conditional=partial(
                fitted.conditional,
                functions={t: e for t, e in every.items() if t not in scoring.functions},
            )
            if every
            else law.conditional,
            targets=tuple(dict.fromkeys((*y.numeric, *scoring.events, *every))),
            edges=dict.fromkeys((*events, *every), _TENTHS),
            calibration=bool(y.numeric),
        )
        beside = replace(law, conditional=marginal, cells=1, targets=(), edges={}, label_bins=False)
        return cls(
            replace(
                scoring,
                laws={"law": law, "marginal": beside},
                functions={**every, **scoring.functions},
            ),
            {column: tuple(each) for column, each in above.items()},
            events,
        )

    @property
    def relevance(self) -> tuple[Any, ...]:
        """Length scales of the columns of the model."""
        return tuple(getattr(self.scoring.model, "length_scales", ()))

    def drawing(self, result: ScoreReport) -> Figures:
        """What draws the model at the rows that the pass has taken along."""
        assert result.rows is not None
        x, y = result.rows.parts
        columns = self.scoring.sample.columns[0], self.scoring.y
        return Figures(self.scoring.model, columns, (x, y), self.relevance)

    def figures(self, draw: Figures, result: ScoreReport) -> dict[str, tuple[Figure, ...]]:
        """The figures by section of the page."""
        scoring = self.scoring
        laws: list[Figure] = []
        calibration: list[Figure] = []
        drawn = scoring.y.names[:MOST_COLUMNS]
        for column in drawn:
            if column in scoring.y.categories:
                laws += self._of_labels(draw, column, result)
                bins = result.label_bins.get("law", {}).get(column)
                if bins:
                    calibration.append(draw.likeliest(column, bins))
            elif "law" in scoring.laws:
                laws += [draw.fan_along(column), draw.fan_of_rows(column), draw.heat(column)]
                calibration.append(draw.pit(column, result.pit["law"][column]))
                calibration.append(draw.reliability(column, self._bins(result, column)))
            else:
                laws.append(draw.means(column, self._means(column, draw.rows[0])))
        if self.events:
            seen = result.reliability["law"]
            calibration.append(draw.events({text: seen[text] for text in self.events}))
        about = [draw.columns_figure(), draw.spectrum()]
        return {
            "laws": tuple(laws),
            "calibration": tuple(calibration),
            "model": tuple(figure for figure in about if figure is not None),
        }

    def _bins(self, result: ScoreReport, column: str) -> dict[str, tuple[Bin, ...]]:
        every = result.reliability["law"]
        texts = self.thresholds[column]
        return {text.replace(f"{column} > ", "above ", 1): every[text] for text in texts}

    def _of_labels(self, draw: Figures, column: str, result: ScoreReport) -> list[Figure]:
        """Figures of the probabilities of labels, and, of few labels, of how they are confused."""
        law = self.scoring.laws["law"].conditional(draw.walk.points)
        chances = np.asarray(law.predict_proba(column))
        figures = [draw.labels_along(column, chances)]
        confusion = result.confusion.get("law", {}).get(column)
        return [*figures, draw.confusion(column, confusion)] if confusion else figures

    def _means(self, column: str, x: Any) -> Any:
        assert isinstance(self.scoring.model, EmbeddingModel)
        return np.asarray(self.scoring.model.expect([column], x))[:, 0]


def _exceeding(marginal: MarginalLaw, column: str, place: int) -> dict[str, Event]:
    """The events that a column exceeds the quartiles of its marginal law, by their texts."""
    values = np.unique(marginal(np.empty((1, 0))).quantile(_QUARTILES, column)[0]).tolist()
    texts = [f"{value:.4g}" for value in values]
    if len(set(texts)) < len(texts):  # large numbers that differ by little
        texts = list(map(repr, values))
    return {
        f"{column} > {text}": Event((">", ("column", place), ("number", value)))
        for text, value in zip(texts, values, strict=True)
    }
