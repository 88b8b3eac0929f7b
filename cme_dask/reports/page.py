"""The page of a report of scores: its tables and sentences, and the file that holds them all."""

import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jinja2
import numpy as np
from markupsafe import Markup

import cme_dask
from cme_dask.data.atomic import disk_errors, marked_file, writing
from cme_dask.data.columns import Columns
from cme_dask.display import is_noted, number, with_error
from cme_dask.models.plots import FEW
from cme_dask.models.relevance import ColumnRelevance
from cme_dask.numerics.scoring import Estimate, Scores
from cme_dask.passes.held_out import Scoring
from cme_dask.passes.scores import LabelScores, ScoreReport
from cme_dask.reports.figures import MOST_COLUMNS, Figure
from cme_dask.reports.svg import DARKENED, LIGHT, isolated, visible

OUTPUT = marked_file("page of scores", "<!doctype html>", 'name="generator" content="cme_dask"')
"""What such a page is, among outputs."""

_OF_LABELS = (
    ("log loss", "log_loss", True),
    ("Brier score of all labels", "brier", True),
    ("accuracy", "accuracy", False),
    ("calibration error", "calibration_error", False),
)
_MANY = 60  # rows of a table that are shown
_ROUNDING = 1e-12  # relative standard errors that are rounding


@dataclass(frozen=True)
class Line:
    """A score of a model beside that of the marginal law.

    Attributes
    ----------
    score
        Its name.
    of
        The column of y or the event; empty for a score of all columns.
    value, marginal
        Of the model, and of the law that ignores x.
    compared
        Whether the quotient of both says something.
    """

    score: str
    of: str
    value: Estimate
    marginal: Estimate | None
    compared: bool = True

    @property
    def gain(self) -> str:
        """How much lower or higher than that of the marginal law, in per cent of it."""
        base = self.marginal
        if not self.compared or base is None or not base.value > 0.0:
            return ""
        share = 100.0 * (self.value.value / base.value - 1.0)
        if abs(share) < 0.5:
            return "0 %"
        return f"{abs(share):.0f} % {'lower' if share < 0.0 else 'higher'}"


@dataclass(frozen=True, eq=False)
class Page:
    """What a page tells of scores.

    Parameters
    ----------
    scoring, result
        What was scored, and what the pass found: of the model ``"law"``, of the law that ignores x
        ``"marginal"``.
    figures
        By section.
    relevance
        Length scales of the columns.
    along
        The column of x along which laws are drawn, and the values of the others.
    name
        What the page calls the model.
    unseen
        Whether the fit has not seen these rows; None where that is not known.
    seconds
        That the figures took.
    """

    scoring: Scoring
    result: ScoreReport
    figures: Mapping[str, tuple[Figure, ...]]
    relevance: tuple[ColumnRelevance, ...]
    along: tuple[str, Markup]
    name: str
    unseen: bool | None
    seconds: float

    @property
    def columns(self) -> tuple[Columns, Columns]:
        """Of x and of y."""
        x, _ = self.scoring.sample.columns
        return x, self.scoring.y

    # Scores

    @property
    def scores(self) -> dict[str, Scores]:
        """Of means and probabilities under the laws; of a model without laws those it predicts."""
        return self.result.scores.get("law", self.scoring.of_targets(self.result))

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """All scores, those of all columns first."""
        return tuple(line for line in self._lines() if math.isfinite(line.value.value))

    def _lines(self) -> Iterator[Line]:
        result, level = self.result, f"{100.0 * self.scoring.level:g} %"
        for name, whole, compared in (
            ("CRPS", result.crps, True),
            ("energy score", result.energy_score, True),
            ("log score", result.log_score, False),  # in nats, whose zero means nothing
        ):
            if "law" in whole:
                yield Line(name, "", whole["law"], whole.get("marginal"), compared)
        for column, each in result.labels.get("law", {}).items():
            base = self._label_baseline(column)
            for name, key, compared in _OF_LABELS:
                yield Line(name, column, getattr(each, key), getattr(base, key), compared)
        scores = self.scores
        for column in self.scoring.y.numeric:
            yield Line("R²", column, scores[column].r2, Estimate(0.0, math.nan), False)
        for text in self.scoring.events:
            frequency = Estimate(scores[text].variance, math.nan)
            yield Line("Brier score", text, scores[text].mse, frequency)
        for name, several, compared in (
            (f"coverage of {level} intervals", result.coverage, False),
            (f"mass of {level} intervals", result.interval_mass, False),
            (f"width of {level} intervals", result.width, False),
            (f"interval score of {level}", result.interval_score, True),
        ):
            for column, value in several.get("law", {}).items():
                yield Line(name, column, value, several.get("marginal", {}).get(column), compared)
        for column, losses in result.pinball.get("law", {}).items():
            theirs = result.pinball.get("marginal", {}).get(column, {})
            for q, value in losses.items():
                yield Line(f"pinball loss at {q:g}", column, value, theirs.get(q))
        for column, value in result.calibration_error.get("law", {}).items():
            beside = result.calibration_error.get("marginal", {}).get(column)
            yield Line("calibration error", column, value, beside, False)

    def _label_baseline(self, column: str) -> LabelScores:
        """Of the law that ignores x; of a classifier those of the frequencies on these rows."""
        known = self.result.labels.get("marginal", {}).get(column)
        if known is not None:
            return known
        shares = np.array([self.scores[text].mean for text in self.scoring.events])
        entropy = -float(shares[shares > 0.0] @ np.log(shares[shares > 0.0]))
        values = (float(shares.max()), entropy, 1.0 - float(shares @ shares), 0.0)
        return LabelScores(*(Estimate(value, math.nan) for value in values))

    # Sentences

    @property
    def summary(self) -> Markup:
        """What the scores say, in a sentence."""
        seen = {True: " that the fit has not seen", False: " that the fit may have seen", None: ""}
        if "law" in self.result.crps:
            sentence = self._on_laws()
        elif self.result.labels.get("law"):
            sentence = self._on_labels()
        else:
            sentence = self._on_means()
        rows = f"{self.result.report.rows:,}"
        return Markup("On {} rows{}, {}.").format(rows, seen[self.unseen], sentence)

    def _on_laws(self) -> Markup:
        (line,) = (each for each in self.lines if each.score == "CRPS")
        sentence = Markup("the laws of {} given {} have a CRPS of {}").format(
            _names(self.scoring.y.numeric),
            _names(self.columns[0].given.names),
            _estimate(line.value),
        )
        if line.marginal is not None:
            sentence += f"; the law that ignores x has {_estimate(line.marginal)}"
            sentence += f" ({line.gain})" if line.gain else ""
        covered, masses = (
            [each.value for each in of_laws.get("law", {}).values()]
            for of_laws in (self.result.coverage, self.result.interval_mass)
        )
        if covered:
            sentence += (
                f"; {100.0 * self.scoring.level:g} % intervals hold {_range(covered)} % of the "
            )
            sentence += "rows"
            if any(is_noted(mass, self.scoring.level) for mass in masses):
                sentence += f" (the laws say {_range(masses)} %)"
        return sentence

    def _on_labels(self) -> Markup:
        column, scores = next(iter(self.result.labels["law"].items()))
        return Markup(
            "the likeliest of {} labels of {} is right in {} of the rows; the log loss is {} nats, "
            "that of the law that ignores x {}"
        ).format(
            len(self.scoring.y.categories[column]),
            isolated(column),
            _percent(scores.accuracy),
            _estimate(scores.log_loss),
            _estimate(self._label_baseline(column).log_loss),
        )

    def _on_means(self) -> Markup:
        each = [
            Markup("{} of the variance of {}").format(_percent(scores.r2), isolated(name))
            for name, scores in self.scores.items()
            if name in self.scoring.y.numeric
        ]
        given = _names(self.columns[0].given.names)
        return Markup("means given {} explain {}").format(given, Markup(", ").join(each))

    @property
    def left_out(self) -> str:
        """What the figures don't show."""
        count = len(self.scoring.y.names)
        if count <= MOST_COLUMNS:
            return ""
        return f"Figures show the first {MOST_COLUMNS} of {count} columns of y, the table has all."

    # Facts

    @property
    def timings(self) -> tuple[tuple[str, str], ...]:
        """Where the time went."""
        report = self.result.report
        search = (getattr(self.scoring.model, "about", {}).get("tuning") or {}).get("seconds")
        return (
            ("pass over the rows", f"{report.pass_seconds:.3g} s"),
            ("rows per second", f"{report.pass_rows_per_second:,.0f}"),
            ("figures of this page", f"{self.seconds:.2g} s"),
            *((("search for kernels at the fit", f"{search:.3g} s"),) if search else ()),
        )

    @property
    def provenance(self) -> tuple[tuple[str, str], ...]:
        """Which model, which rows, which versions, when."""
        sample, report = self.scoring.sample, self.result.report
        part = "all rows" if sample.part is None else f"held out: {sample.part}"
        drawn = self.result.rows
        return (
            ("model", self.name),
            ("rows", f"{report.rows:,} of {sample.location}, {part}"),
            ("weights", "none" if sample.weights is None else "a column of the rows"),
            ("standard errors", f"jackknife over folds by {sample.folding}"),
            ("sampled rows", "none" if drawn is None else f"{len(drawn)}, drawn in the same pass"),
            ("passes over the rows", "1"),
            ("written", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())),
            (
                "software",
                f"cme_dask {cme_dask.__version__}, NumPy {np.__version__}, "
                f"Python {platform.python_version()}",
            ),
        )

    @property
    def scales(self) -> tuple[tuple[str, ...], ...]:
        """Column, variable, length scale, relevance and bound, of the first columns."""
        return tuple(
            (
                each.column,
                each.variable,
                _scale(each.length_scale),
                "" if math.isnan(each.relevance) else number(float(f"{each.relevance:.3g}")),
                "" if each.bound == "ignored" else each.bound,
            )
            for each in self.relevance[:_MANY]
        )

    # The file

    def html(self) -> str:
        """The page."""
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("cme_dask.reports", "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        environment.filters |= {"shown": visible, "name": isolated, "estimate": _estimate}
        template = environment.get_template("scores.html")
        return template.render(page=self, light=LIGHT, dark=DARKENED)

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the page, whole or not at all."""
        text = self.html()
        with writing(path, OUTPUT, overwrite=overwrite) as aside, disk_errors(path):
            aside.write_text(text, encoding="utf-8")


def _names(names: tuple[str, ...]) -> Markup:
    """Names in a sentence; of many their number."""
    if len(names) > FEW:
        return Markup("{} columns").format(len(names))
    *first, last = map(isolated, names)
    return Markup("{} and {}").format(Markup(", ").join(first), last) if first else last


def _estimate(value: Estimate) -> str:
    """A value with its standard error, if it has one."""
    if not math.isfinite(value.value):
        return "none"
    told = value.std > _ROUNDING * abs(value.value)  # a constant has none; NaN is no number, too
    text = with_error(value.value, value.std if told else None)
    return text.replace("± ", "±\u00a0")  # a narrow table breaks the line before them


def _range(shares: Sequence[float]) -> str:
    """The least and the largest one in per cent, or both in one."""
    low, high = (f"{100.0 * end:.1f}" for end in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def _percent(value: Estimate) -> str:
    return f"{_estimate(Estimate(100.0 * value.value, 100.0 * value.std))} %"


def _scale(value: float) -> str:
    if math.isnan(value):
        return "unknown"
    return "ignored" if math.isinf(value) else number(float(f"{value:.3g}"))
