"""Figures of a report of scores, each from what the pass has summed or from a few rows.

Laws are drawn at a few points: along one column of x, the others as in a row in the middle of the
sample, and at rows of the sample themselves. Nothing here reads the data.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup

from cme_dask.data.columns import Columns
from cme_dask.display import number
from cme_dask.models.joint import JointModel
from cme_dask.models.plots import (
    BLUE,
    DARK,
    LEVELS,
    PALETTE,
    borders,
    densities,
    draw_fan,
    label_powers,
    legend_text,
    rounded,
)
from cme_dask.models.relevance import ColumnRelevance
from cme_dask.models.spectra import spectra
from cme_dask.numerics.scoring import Estimate
from cme_dask.passes.scores import Bin
from cme_dask.reports.svg import GRID, LONGEST, MUTED, cut, drawing, isolated, markup, short

Array = Any

MOST_COLUMNS = 4
"""Columns of y that are drawn."""

_STEPS = 41  # points along a column of numbers
_LISTED = 6  # values of other columns
_FEW_VALUES = 12  # distinct values of a column, which are then the points themselves
_ROWS = 60  # rows of the sample whose laws are drawn beside each other
_BINS = 40  # of the y of a heat map
_MOST_BARS = 14  # columns whose relevance is drawn
_MOST_BANDS = 6  # labels whose probabilities are drawn
_TAILS = 0.02  # mass of a column of x beyond each end of what is drawn
_SHARES = 0.05, 0.2  # of the rows, from which on a dot is larger
_HEAT = 0.24, 0.53, 0.83, 1.0  # of which more or less is seen on a light page and on a dark one
_CROWDED = 4  # labels beside each other, of which more are turned


@dataclass(frozen=True)
class Figure:
    """A figure of a page.

    Attributes
    ----------
    key
        A word that no other figure of the page has.
    title
        What it shows, names marked up.
    note
        How to read it, one or two sentences.
    svg
        The element of the page.
    """

    key: str
    title: Markup
    note: str
    svg: str


@dataclass(frozen=True, eq=False)
class Walk:
    """Points along one column of x, the others as in one row.

    Attributes
    ----------
    column
        Its name.
    at
        Its values, ascending, shape (p,).
    points
        Shape (p, d).
    ticks
        The labels, if the column holds labels.
    others
        The values of the others, names marked up.
    """

    column: str
    at: Array
    points: Array
    ticks: tuple[str, ...] | None
    others: Markup

    @property
    def positions(self) -> Array:
        """Where the points are drawn, shape (p,)."""
        return self.at if self.ticks is None else np.arange(float(len(self.at)))

    @property
    def is_line(self) -> bool:
        """Whether the points lie on a line; labels, and a single point, do not."""
        return self.ticks is None and len(self.at) > 1

    def named(self, place: int) -> str:
        """The value of the column at a point."""
        if self.ticks is None:
            return number(rounded(self.at[place]))
        return cut(self.ticks[place], LONGEST)


@dataclass(frozen=True, eq=False)
class Figures:
    """Figures of a model and of its scores.

    Parameters
    ----------
    model
        The fitted model.
    columns
        Of x and of y.
    rows
        A few rows of x and of y, shapes (k, d).
    relevance
        What is known of the columns of the model.
    """

    model: Any
    columns: tuple[Columns, Columns]
    rows: tuple[Array, Array]
    relevance: Sequence[ColumnRelevance]

    # Laws along a column of x

    @cached_property
    def walk(self) -> Walk:
        """Along the column of x that the model looks at most finely."""
        names, rows = self.columns[0].names, self.rows[0]
        spread = rows.std(axis=0)
        known = {each.column: each for each in self.relevance if each.variable == "x"}

        def weight(j: int) -> float:
            each = known.get(names[j])
            if spread[j] == 0.0 or each is None or not each.length_scale < math.inf:
                return 0.0
            return spread[j] / each.length_scale if math.isnan(each.relevance) else each.relevance

        return self._walk(max(range(len(names)), key=weight))

    def _walk(self, j: int) -> Walk:
        x, rows = self.columns[0], self.rows[0]
        name, ticks = x.names[j], None
        values, counts = np.unique(rows[:, j], return_counts=True)
        if name in x.categories:
            values = np.sort(values[np.argsort(-counts, kind="stable")[:_FEW_VALUES]])
            ticks = tuple(x.categories[name][int(code)] for code in values)
        elif len(values) > _FEW_VALUES:
            low, high = np.quantile(rows[:, j], [_TAILS, 1.0 - _TAILS]).tolist()
            values = np.linspace(low, high, _STEPS)
        points = np.repeat(self._middle[None], len(values), axis=0)
        points[:, j] = values
        return Walk(name, values, points, ticks, self._described(self._middle, j))

    @cached_property
    def _middle(self) -> Array:
        """The row of x nearest to the medians, labels to the most frequent ones, shape (d,)."""
        x, rows = self.columns[0], self.rows[0]
        away = np.zeros(len(rows))
        for j, coded in enumerate(x.categorical):
            if coded:
                away += rows[:, j] != np.bincount(rows[:, j].astype(np.int64)).argmax()
            else:
                away += ((rows[:, j] - np.median(rows[:, j])) / (rows[:, j].std() or 1.0)) ** 2
        return np.asarray(rows[away.argmin()])

    def _described(self, row: Array, without: int) -> Markup:
        x, parts = self.columns[0], []
        for j, (name, value) in enumerate(zip(x.names, row, strict=True)):
            if j != without:
                labels = x.categories.get(name)
                shown = isolated(labels[int(value)]) if labels else number(rounded(value))
                parts.append(Markup("{} = {}").format(isolated(name), shown))
        more = f" and {len(parts) - _LISTED} more" if len(parts) > _LISTED else ""
        return Markup(", ").join(parts[:_LISTED]) + more

    def _along(self, ax: Any) -> None:
        """Name the axis of a walk, and the places of its labels."""
        walk = self.walk
        ax.set_xlabel(_named(walk.column, self.columns[0]))
        if walk.ticks is not None:
            _label(ax, walk.positions, walk.ticks)

    def fan_along(self, column: str) -> Figure:
        """Medians and central bands of a column of y along the column of x."""
        walk, j = self.walk, self.columns[1].names.index(column)
        law = self.model.conditional(walk.points)
        bands, median = _bands(law, column)
        alone = len(self.columns[0].names) == 1
        with drawing() as figure:
            ax = figure.axes[0]
            shown = draw_fan(ax, walk.positions, bands, median, lines=walk.is_line)
            if alone and walk.is_line:  # then the rows belong to the same laws
                ax.plot(self.rows[0][:, 0], self.rows[1][:, j], "o", ms=2.5, color=PALETTE[1])
                ax.set_xlim(walk.at[0], walk.at[-1])
            self._along(ax)
            _above(ax, _named(column, self.columns[1]))
            _legend(ax, shown[::-1])
            return self._figure(
                figure,
                f"fan-{j}",
                _titled("{} along {}", column, walk.column),
                "Median and central bands of the law."
                + (" Dots are sampled rows." if alone and walk.is_line else ""),
                f"The median goes from {number(rounded(median[0]))} at {walk.named(0)} to "
                f"{number(rounded(median[-1]))} at {walk.named(-1)}; the "
                f"{100 * LEVELS[1]:g} % band is {_mean_width(bands[1])} wide on average.",
            )

    def fan_of_rows(self, column: str) -> Figure:
        """The laws at some rows, by their medians, and what was observed there."""
        j = self.columns[1].names.index(column)
        points, seen = self.rows[0][:_ROWS], self.rows[1][:_ROWS, j]
        bands, median = _bands(self.model.conditional(points), column)
        order = np.argsort(median, kind="stable")
        at, seen = np.arange(float(len(order))), seen[order]
        bands = [(level, low[order], high[order]) for level, low, high in bands]
        median = median[order]
        outside = (seen < bands[0][1]) | (seen > bands[0][2])
        with drawing() as figure:
            ax = figure.axes[0]
            for i, (_, low, high) in enumerate(bands):
                _bars(ax, at, low, high, color=BLUE, alpha=0.18 + 0.5 * i / len(bands), lw=0)
            _bars(ax, at, median, median, color=DARK, lw=1.6)
            for which, colour, size in ((~outside, DARK, 3.0), (outside, PALETTE[1], 4.0)):
                ax.plot(at[which], seen[which], "o", ms=size, color=colour, mec="none")
            ax.set_xlim(-1.0, len(at))
            ax.set_xlabel("sampled rows, by their predicted median")
            ax.grid(axis="x", visible=False)
            _above(ax, _named(column, self.columns[1]))
            widest = f"{100 * bands[0][0]:g} %"
            return self._figure(
                figure,
                f"rows-{j}",
                _titled(f"{{}} of {len(at)} rows that were scored", column),
                "Bars are the central bands of 50, 80 and 95 %, dots the observed values; those "
                f"outside the {widest} bands are larger.",
                f"{int(outside.sum())} of {len(at)} values are outside the {widest} bands.",
            )

    def heat(self, column: str) -> Figure:
        """The density of a column of y along the column of x."""
        walk, j = self.walk, self.columns[1].names.index(column)
        law = self.model.conditional(walk.points)
        edges, density, top = densities(law, column, _BINS)
        median = np.asarray(law.median(column=column))
        image = np.empty((_BINS, len(walk.at), 4))
        image[:] = _HEAT
        image[:, :, 3] = np.sqrt(np.clip(density.T / top, 0.0, 1.0))  # wide laws are seen, too
        ends = borders(walk.positions)
        unit = self.columns[1].units.get(column)
        with drawing() as figure:
            ax = figure.axes[0]
            if _even(walk.positions):
                extent = (ends[0], ends[-1], edges[0], edges[-1])
                ax.imshow(image, extent=extent, origin="lower", aspect="auto", interpolation="none")
            else:
                for k, (low, high) in enumerate(pairwise(ends)):
                    ax.imshow(
                        image[:, [k]],
                        extent=(low, high, edges[0], edges[-1]),
                        origin="lower",
                        aspect="auto",
                        interpolation="none",
                    )
            ax.plot(walk.positions, median, color=DARK, lw=1.4, label="median")
            ax.set(xlim=(ends[0], ends[-1]), ylim=(edges[0], edges[-1]))
            ax.grid(visible=False)
            self._along(ax)
            _above(ax, _named(column, self.columns[1]))
            _legend(ax, ax.lines)
            peak = number(rounded(float(density.max())))
            return self._figure(
                figure,
                f"heat-{j}",
                _titled("Density of {} along {}", column, walk.column),
                "The more colour, the denser; the full colour stands for "
                f"{number(rounded(top))}{f' per {unit}' if unit else ''}.",
                f"The density is at most {peak}, and the median goes from "
                f"{number(rounded(median[0]))} to {number(rounded(median[-1]))}.",
            )

    # Calibration

    def pit(self, column: str, shares: Sequence[Estimate]) -> Figure:
        """Histogram of the probability integral transform: bars of height 1 for true laws."""
        j, count = self.columns[1].names.index(column), len(shares)
        height = count * np.array([each.value for each in shares])
        errors = count * np.nan_to_num([each.std for each in shares])
        middle = (np.arange(count) + 0.5) / count
        with drawing() as figure:
            ax = figure.axes[0]
            _bars(ax, middle, 0.0 * height, height, width=0.9 / count, color=BLUE, alpha=0.75, lw=0)
            _errors(ax, middle, height, errors, MUTED)
            ax.axhline(1.0, color=PALETTE[1], lw=1.4, ls="--")
            ax.set(xlim=(0.0, 1.0), ylim=(0.0, max(1.5, 1.05 * (height + errors).max())))
            ax.grid(axis="x", visible=False)
            ax.set_xlabel(f"F(y | x) of {short(column)}")
            _above(ax, "density, with standard errors")
            low, high = number(rounded(height.min())), number(rounded(height.max()))
            return self._figure(
                figure,
                f"pit-{j}",
                _titled("Where {} lies within its law (PIT)", column),
                "Flat at 1 where laws are right; a valley means that they are too narrow, a hill "
                "that they are too wide, a slope that they are too low or too high.",
                f"{count} bars between {low} and {high}.",
            )

    def reliability(self, column: str, bins: Mapping[str, Sequence[Bin]]) -> Figure:
        """How often events happened where about as much was predicted: on the diagonal if right."""
        key = f"reliability-{self.columns[1].names.index(column)}"
        return self._reliability(
            key,
            _titled("Probabilities of {}", column),
            bins,
            "How often it happened where about this probability was predicted: on the diagonal "
            "where probabilities are right. Larger dots stand for more rows.",
        )

    def events(self, bins: Mapping[str, Sequence[Bin]]) -> Figure:
        """The same of the events that the model was fitted with."""
        return self._reliability(
            "events",
            Markup("Probabilities of declared events"),
            bins,
            "How often they happened where about this probability was predicted.",
        )

    def likeliest(self, column: str, bins: Sequence[Bin]) -> Figure:
        """How often the likeliest label was seen, by its probability."""
        key = f"likeliest-{self.columns[1].names.index(column)}"
        return self._reliability(
            key,
            _titled("How often the likeliest label of {} is right", column),
            {"likeliest label": bins},
            "On the diagonal where probabilities are right, below it where they are too sure.",
        )

    def _reliability(
        self, key: str, title: Markup, bins: Mapping[str, Sequence[Bin]], note: str
    ) -> Figure:
        worst, total = 0.0, 0
        with drawing() as figure:
            ax = figure.axes[0]
            ax.plot([0.0, 1.0], [0.0, 1.0], color=MUTED, lw=1.0, ls="--")
            for (name, each), colour in zip(bins.items(), PALETTE, strict=False):
                used = [b for b in each if b.share > 0.0]
                predicted = np.array([b.predicted for b in used])
                seen = np.array([b.seen.value for b in used])
                error = np.nan_to_num([b.seen.std for b in used])
                _errors(ax, predicted, seen, error, colour)
                shares = np.array([b.share for b in used])
                ax.plot(predicted, seen, lw=1.2, color=colour, label=legend_text(short(name)))
                sizes = np.digitize(shares, _SHARES)
                for k in np.unique(sizes).tolist():
                    ax.plot(
                        *(each[sizes == k] for each in (predicted, seen)),
                        "o",
                        ms=2.5 + 1.5 * k,
                        color=colour,
                        mec="none",
                    )
                away = float(shares @ np.abs(seen - predicted))
                worst, total = max(worst, away), total + len(used)
            ax.set(xlim=(0.0, 1.0), ylim=(-0.02, 1.02), xlabel="predicted probability")
            _above(ax, "observed frequency, with standard errors")
            ax.legend(loc="upper left", handlelength=1.2)
            return self._figure(
                figure,
                key,
                title,
                note,
                f"{total} points; frequencies differ from probabilities by "
                f"{number(rounded(worst))} on average, in the worst line.",
            )

    # Labels

    def labels_along(self, column: str, chances: Array) -> Figure:
        """Probabilities of labels, shape (p, K), along the column of x."""
        walk, j = self.walk, self.columns[1].names.index(column)
        labels = self.columns[1].categories[column]
        shown = np.argsort(-chances.mean(axis=0), kind="stable")[:_MOST_BANDS]
        shown = np.sort(shown)
        parts = [chances[:, k] for k in shown]
        names = [short(labels[k], 20) for k in shown]
        if len(labels) > len(shown):
            parts.append(1.0 - np.sum(parts, axis=0))
            names.append("others")
        edges = np.concatenate([np.zeros((1, len(chances))), np.cumsum(parts, axis=0)])
        with drawing() as figure:
            ax = figure.axes[0]
            at, lines = walk.positions, walk.is_line
            for k, name in enumerate(names):
                style = {"color": PALETTE[k], "alpha": 0.8, "lw": 0, "label": legend_text(name)}
                if lines:
                    ax.fill_between(at, edges[k], edges[k + 1], **style)
                else:
                    _bars(ax, at, edges[k], edges[k + 1], width=0.8, **style)
            low, high = (
                (at[0], at[-1]) if walk.ticks is None and len(at) > 1 else borders(at)[[0, -1]]
            )
            ax.set(xlim=(low, high), ylim=(0.0, 1.0))
            ax.grid(visible=False)
            self._along(ax)
            _above(ax, "probability")
            figure.legend(loc="outside lower center", ncols=2, handlelength=1.0)
            likeliest = cut(labels[int(chances.mean(axis=0).argmax())], LONGEST)
            return self._figure(
                figure,
                f"labels-{j}",
                _titled("Labels of {} along {}", column, walk.column),
                "The height of a colour is the probability of the label.",
                f"{len(names)} bands; the likeliest label on average is {likeliest}.",
            )

    def confusion(self, column: str, shares: Sequence[Sequence[float]]) -> Figure:
        """Mean probabilities of labels by the label that was seen."""
        j, labels = self.columns[1].names.index(column), self.columns[1].categories[column]
        values = np.array(shares)
        image = np.empty((*values.shape, 4))
        image[:] = _HEAT
        image[:, :, 3] = np.sqrt(np.nan_to_num(values))
        names = [short(label, 16) for label in labels]
        with drawing(height=max(2.9, 1.2 + 0.2 * len(labels))) as figure:
            ax = figure.axes[0]
            ax.imshow(image, aspect="auto", interpolation="none")
            if len(labels) <= 6:
                for (i, k), value in np.ndenumerate(values):
                    if math.isfinite(value):
                        ax.text(k, i, f"{value:.2f}", ha="center", va="center")
            ax.set_yticks(range(len(labels)), names)
            _label(ax, np.arange(float(len(labels))), names)
            ax.grid(visible=False)
            ax.set_xlabel("probability of")
            _above(ax, "label that was seen")
            mean = number(rounded(float(np.nanmean(np.diagonal(values)))))
            return self._figure(
                figure,
                f"confusion-{j}",
                _titled("Probabilities of {} by the label that was seen", column),
                "Means over the rows with each label: all colour is on the diagonal where the "
                "model is sure and right.",
                f"The label that was seen has a probability of {mean}, averaged over the labels.",
            )

    # The model

    def means(self, column: str, predicted: Array) -> Figure:
        """What was observed beside predicted means (k,), at rows of the sample."""
        j = self.columns[1].names.index(column)
        seen = self.rows[1][:, j]
        with drawing() as figure:
            ax = figure.axes[0]
            ax.axline((float(seen.mean()), float(seen.mean())), slope=1.0, color=MUTED, ls="--")
            ax.plot(predicted, seen, "o", ms=3.0, color=BLUE, mec="none", alpha=0.7)
            ax.set_xlabel(f"predicted mean of {_named(column, self.columns[1])}")
            _above(ax, "observed")
            away = number(rounded(float(np.sqrt(np.mean((seen - predicted) ** 2)))))
            return self._figure(
                figure,
                f"means-{j}",
                _titled("Means of {}", column),
                "Observed values beside predicted means, at sampled rows.",
                f"{len(seen)} rows, which lie {away} from their means (root mean square).",
            )

    def columns_figure(self) -> Figure | None:
        """The relevance of columns; None where kernels were given, so that it is not known."""
        known = [each for each in self.relevance if not math.isnan(each.relevance)]
        if not known:
            return None
        known.sort(key=lambda each: (each.variable, -each.relevance))
        shown = known[:_MOST_BARS]
        at = np.arange(float(len(shown)))[::-1]
        values = np.array([each.relevance for each in shown])
        with drawing(height=max(2.2, 0.8 + 0.2 * len(shown))) as figure:
            ax = figure.axes[0]
            for variable, colour in (("x", BLUE), ("y", PALETTE[1])):
                mine = np.array([each.variable == variable for each in shown])
                ax.barh(at[mine], values[mine], color=colour, height=0.6, lw=0)
            for place, each in zip(at, shown, strict=True):
                if each.bound == "ignored":
                    ax.annotate(
                        "ignored", (0.0, place), (4, 0), textcoords="offset points", va="center"
                    )
            ax.set_yticks(at, [f"{short(each.column, 20)} ({each.variable})" for each in shown])
            ax.set_xlabel("1 / length scale, in standard deviations")
            ax.grid(axis="y", visible=False)
            more = len(known) - len(shown)
            return self._figure(
                figure,
                "relevance",
                Markup("What the model looks at"),
                "The longer the bar, the finer the model looks at the column."
                + (f" {more} more are in the table." if more else ""),
                f"Of {len(shown)} columns, {cut(shown[int(values.argmax())].column, LONGEST)} "
                f"has the longest bar, {number(rounded(float(values.max())))}.",
            )

    def spectrum(self) -> Figure:
        """Eigenvalues of the kernels over the rows of the fit."""
        lines = dict(self._eigenvalues())
        with drawing() as figure:
            ax = figure.axes[0]
            for (name, values), colour in zip(lines.items(), PALETTE, strict=False):
                ax.plot(1 + np.arange(len(values)), values, color=colour, lw=1.6, label=name)
                if len(values) < 20:
                    ax.plot(1 + np.arange(len(values)), values, "o", ms=3, color=colour)
            ax.set(xscale="log", yscale="log", xlabel="number of the eigenvalue")
            label_powers(ax.xaxis)
            label_powers(ax.yaxis)
            _above(ax, "eigenvalue")
            ax.legend(loc="lower left")
            ends = "; ".join(
                f"{len(v)} of {name}, from {v[0]:.1e} down to {v[-1]:.1e}"
                for name, v in lines.items()
            )
            return self._figure(
                figure,
                "spectrum",
                Markup("Spectrum of the kernels"),
                "The faster it falls, the fewer functions describe the variable.",
                f"Eigenvalues in descending order: {ends}.",
            )

    def _eigenvalues(self) -> Iterator[tuple[str, Array]]:
        model = self.model
        if isinstance(model, JointModel):
            values = [(n, s.eigenvalues) for n, s in zip("xy", spectra(model)[0], strict=True)]
        else:
            x = getattr(model, "x", model)
            values = [("x", x.basis.parts[0].eigenvalues)]
        for name, each in values:
            yield name, each[each > 0.0]

    def _figure(self, figure: Any, key: str, title: Markup, note: str, description: str) -> Figure:
        return Figure(key, title, note, markup(figure, key, title.striptags(), description))


def _titled(text: str, *names: str) -> Markup:
    """A title with these names in it."""
    return Markup(text).format(*map(isolated, names))


def _named(column: str, columns: Columns) -> str:
    """A short name with its unit."""
    unit = columns.units.get(column)
    return short(column) + (f" [{short(unit, 12)}]" if unit else "")


def _bands(law: Any, column: str) -> tuple[list[tuple[float, Array, Array]], Array]:
    """Central bands from the widest on, and medians."""
    widths = sorted(LEVELS, reverse=True)
    ends = [level for width in widths for level in ((1.0 - width) / 2.0, (1.0 + width) / 2.0)]
    values = np.asarray(law.quantile([*ends, 0.5], column=column)).reshape(len(law), -1).T
    bands = [(w, values[2 * i], values[2 * i + 1]) for i, w in enumerate(widths)]
    return bands, values[-1]


def _bars(ax: Any, at: Array, low: Array, high: Array, width: float = 0.7, **style: Any) -> None:
    """Bars as one path: a page of many small ones would be long."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    left, right = at - width / 2.0, at + width / 2.0
    corners = np.stack([[left, low], [left, high], [right, high], [right, low]]).transpose(2, 0, 1)
    ax.add_patch(PathPatch(Path.make_compound_path_from_polys(corners), **style))
    ax.autoscale_view()


def _errors(ax: Any, at: Array, middle: Array, error: Array, colour: str) -> None:
    """A standard error up and down from each point, as one line with gaps."""
    gaps = np.full(len(at), np.nan)
    ends = np.stack([middle - error, middle + error, gaps], axis=1).ravel()
    ax.plot(np.repeat(at, 3), ends, color=colour, lw=1.0)


def _above(ax: Any, text: str) -> None:
    """Name the vertical axis above it, where it is read without turning the head."""
    ax.set_title(text, loc="left", color=MUTED)


def _legend(ax: Any, handles: Sequence[Any]) -> None:
    ax.figure.legend(
        handles=handles, loc="outside lower center", ncols=4, handlelength=1.2, edgecolor=GRID
    )


def _label(ax: Any, at: Array, names: Sequence[str]) -> None:
    """Labels at places of the horizontal axis, turned if there are many or long ones."""
    crowded = len(names) > _CROWDED or sum(map(len, names)) > 40
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    ax.set_xticks(at, [short(name, 16) for name in names], **turned)


def _even(at: Array) -> bool:
    return bool(np.allclose(np.diff(at), np.diff(at)[:1]))


def _mean_width(band: tuple[float, Array, Array]) -> str:
    return number(rounded(float(np.mean(band[2] - band[1]))))
