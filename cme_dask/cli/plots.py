"""Pictures of jobs: laws along columns, held-out scores, searches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.cli.tables import (
    coverage_lines,
    facts,
    grid,
    label_lines,
    with_unit,
)
from cme_dask.config import N_FOLDS
from cme_dask.display import number, with_error
from cme_dask.kernels.length_scales import IGNORED
from cme_dask.models.law import ConditionalLaw
from cme_dask.models.plots import PALETTE, draw_fan, legend_text, picture
from cme_dask.numerics.crossval import interval_factor

# Picture of a job's laws along columns: fans of quantiles, and probabilities of events


Result = dict[str, Any]


def curves_picture(result: Result, path: Path) -> None:
    """A panel for each curve of a fan, and one for each event with all its curves."""
    units = result["units"]
    fans = [curve for curve in result["curves"] if curve["of"] is not None]
    events = [curve for curve in result["curves"] if curve["event"] is not None]
    panels = len(fans) + len({(c["event"], c["along"]) for c in events})
    columns = min(panels, 2)
    rows = -(-panels // columns)
    with picture(path, 5.6 * columns, 3.6 * rows) as figure:
        axes = list(np.ravel(figure.subplots(rows, columns, squeeze=False)))
        for ax, curve in zip(axes, fans, strict=False):
            _fan(ax, curve, units)
        handles, labels = axes[0].get_legend_handles_labels()
        left = {(c["event"], c["along"]): [] for c in events}  # type: ignore[var-annotated]
        for curve in events:
            left[curve["event"], curve["along"]].append(curve)
        for ax, curves in zip(axes[len(fans) :], left.values(), strict=False):
            _probabilities(ax, curves, units)
        for ax in axes[panels:]:
            ax.set_visible(False)
        if fans:
            figure.legend(
                handles[::-1], labels[::-1], loc="outside lower center", ncols=len(labels)
            )
        figure.suptitle(result["title"], x=0.01, ha="left")


def _fan(ax: Any, curve: Result, units: dict[str, str]) -> None:
    levels, quantiles = np.array(curve["levels"]), np.array(curve["quantiles"])
    half = len(levels) // 2
    bands = [
        (levels[-1 - i] - levels[i], quantiles[:, i], quantiles[:, -1 - i]) for i in range(half)
    ]
    draw_fan(ax, np.array(curve["at"]), bands, quantiles[:, half])
    ax.set(xlabel=with_unit(curve["along"], units), ylabel=with_unit(curve["of"], units))
    ax.set_ylim(bottom=min(0.0, float(quantiles.min())))
    ax.set_title(curve["point"])


def _probabilities(ax: Any, curves: list[Result], units: dict[str, str]) -> None:
    for curve, colour in zip(curves, PALETTE, strict=False):
        text = legend_text(curve["point"])
        ax.plot(curve["at"], curve["probability"], color=colour, lw=2.0, label=text)
    ax.set(xlabel=with_unit(curves[0]["along"], units), ylim=(0.0, 1.0))
    ax.set_ylabel(f"P({curves[0]['event']} | x)")
    ax.set_title(f"Probability of {curves[0]['event']}")
    ax.legend(loc="best", fontsize=9)


# How a job's model did on held-out rows, beside gradient boosting: a table and a picture


Array = Any

MODEL, BOOSTING = "model", "gradient boosting"


def evaluation_tables(result: Result) -> list[Any]:
    """Of ``jobs.evaluate``."""
    lines = [("rows", f"{number(result['rows'])}, held out: {result['held_out']}, 1 pass")]
    if MODEL in result["crps"]:
        lines.append(("CRPS", _text(result["crps"][MODEL])))
    lines += coverage_lines(result["coverage"].get(MODEL), result["interval_mass"].get(MODEL))
    boosting = result["boosting"]
    if boosting is not None:
        lines.append(
            (
                BOOSTING,
                f"scikit-learn's defaults, same columns, {number(boosting['rows'])} rows in "
                f"memory, {boosting['seconds']:.3g} s",
            )
        )
    lines += label_lines(result["labels"])
    lines += label_lines(result["labels_boosting"], f", {BOOSTING}")
    rivals = list(result["scores"])
    rows = []
    for name, scores in result["scores"][MODEL].items():
        values = [result["scores"][rival][name]["r2"] for rival in rivals]
        base = scores["variance"]
        row = [
            name,
            "Brier score" if scores["event"] else "squared error",
            _text(scores["mse"]),
            number(base),
            "Brier skill" if scores["event"] else "R^2",
            *map(_text, values),
        ]
        if boosting is not None:
            row.append(_ratio(*(value["value"] for value in values)))
        rows.append(tuple(row))
    head = (
        *("", "error", "of the model", "unconditional", "skill", *rivals),
        *(["ratio"] if boosting is not None else []),
    )
    caption = (
        "Predictions are conditional means and probabilities. Unconditional: the mean of the "
        "held-out rows for all of them. Standard errors: jackknife over blocks of whole units."
    )
    found = [facts("On held-out rows", lines)]
    if rows:
        found += ["", grid("", head, rows, caption, text_columns=2)]
    for name, bins in result["reliability"].items():
        found += ["", _reliability_table(name, bins, result["scores"][MODEL][name]["event"])]
    return found


def _reliability_table(name: str, bins: list[Result], event: bool) -> Any:
    rows = []
    for one in bins:
        low, high = one["low"], one["high"]
        if one["predicted"] is None:
            continue
        if event:
            borders = f"{low or 0.0:.1f} to {1.0 if high is None else high:.1f}"
        else:
            borders = " ".join(
                text
                for text in (
                    "" if low is None else f"from {number(low, 3)}",
                    "" if high is None else f"to {number(high, 3)}",
                )
                if text
            )
        predicted = f"{one['predicted']:.3f}" if event else number(one["predicted"])
        rows.append((borders, f"{100 * one['share']:.1f} %", predicted, _text(one["seen"])))
    what = f"P({name})" if event else f"mean {name}"
    caption = "Mean prediction and mean outcome of the held-out rows in each bin."
    head = ("predicted", "rows", "mean prediction", "frequency" if event else "mean")
    return grid(f"Reliability of {what}", head, rows, caption)


def _ratio(model: float | None, boosting: float | None) -> str:
    known = model is not None and boosting is not None and boosting > 0.0
    return f"{model / boosting:.3f}" if known else "none"  # type: ignore[operator]


def _text(estimate: Result) -> str:
    if estimate["value"] is None:
        return "none"
    return with_error(estimate["value"], estimate["std"])


def half_widths(errors: Sequence[float | None]) -> Array:
    """Half the widths of 95 % intervals from standard errors over blocks of rows; 0 without one.

    By the t quantile, see :func:`cme_dask.numerics.crossval.interval_factor`.
    """
    return interval_factor(N_FOLDS) * np.array([error or 0.0 for error in errors])


def evaluation_picture(result: Result, path: Path) -> None:
    """Skills on held-out rows, with 95 % intervals."""
    scores = result["scores"]
    names = list(scores[MODEL])
    at = np.arange(len(names))[::-1]
    with picture(path, 8, 1.7 + 0.6 * len(names)) as figure:
        ax = figure.subplots()
        colours = {MODEL: "#1f5fa8", BOOSTING: "#9aa5b1"}
        height = 0.8 / len(scores)
        for i, (rival, colour) in enumerate((k, c) for k, c in colours.items() if k in scores):
            values = [scores[rival][name]["r2"] for name in names]
            ax.barh(
                at + 0.4 - height * (i + 0.5),
                [v["value"] or 0.0 for v in values],
                height * 0.9,
                xerr=half_widths([v["std"] for v in values]),
                color=colour,
                label=rival,
                error_kw={"capsize": 2.5, "elinewidth": 1.1},
            )
        ax.set_yticks(at, [_label(name, scores[MODEL][name]["event"]) for name in names])
        ax.set_xlabel("share of the variance explained (bars: 95 % intervals)")
        ax.set_title(f"{result['rows']:,} held-out rows: {result['held_out']}")
        ax.grid(axis="y", visible=False)
        figure.legend(loc="outside lower right", ncols=2)


def reliability_picture(result: Result, path: Path) -> None:
    """Outcomes at held-out rows against predictions, a panel for each function."""
    evaluation, units = result["evaluation"], result["units"]
    names = list(evaluation["reliability"])
    columns = min(len(names), 2)
    lines = -(-len(names) // columns)
    with picture(path, 5.0 * columns, 4.4 * lines) as figure:
        axes = list(np.ravel(figure.subplots(lines, columns, squeeze=False)))
        for ax, name in zip(axes, names, strict=False):
            bins = [b for b in evaluation["reliability"][name] if b["seen"]["value"] is not None]
            event = evaluation["scores"][MODEL][name]["event"]
            predicted = np.array([b["predicted"] for b in bins])
            seen = np.array([b["seen"]["value"] for b in bins])
            errors = half_widths([b["seen"]["std"] for b in bins])
            # Of a rare event the upper bins are empty: the axes end above the highest one.
            largest = max(predicted.max(), (seen + errors).max())
            tenth = np.ceil(10.0 * largest) / 10.0
            top = np.clip(tenth, 0.1, 1.0) if event else 1.05 * largest
            ends = (0.0, top)
            low = min(ends[0], predicted.min(), seen.min())
            ax.plot((low, ends[1]), (low, ends[1]), color="#777777", lw=1.0, ls="--")
            ax.errorbar(
                predicted, seen, yerr=errors, fmt="o-", color="#1f5fa8", capsize=2.5, ms=5, lw=1.2
            )
            for x, y, b in zip(predicted, seen, bins, strict=True):
                ax.annotate(
                    f"{100 * b['share']:.0f} %" if b["share"] >= 0.005 else "< 1 %",
                    (x, y),
                    xytext=(7, -11),
                    textcoords="offset points",
                    fontsize=8,
                    color="#555555",
                )
            if event:
                ax.set(xlim=(-0.02 * top, 1.02 * top), ylim=(-0.02 * top, 1.02 * top))
            what = "probability" if event else "mean"
            ax.set(xlabel=f"{what} predicted", ylabel="frequency seen" if event else "mean seen")
            unit = units.get(name)
            ax.set_title(f"P({name} | x)" if event else f"{name} [{unit}]" if unit else name)
        for ax in axes[len(names) :]:
            ax.set_visible(False)
        figure.suptitle(
            f"{evaluation['rows']:,} held-out rows in bins of predictions\n"
            "(their share; bars: 95 % intervals)",
            x=0.01,
            ha="left",
        )


def _label(name: str, event: bool) -> str:
    return f"P({name} | x)" if event else f"mean {name}"


# Pictures; matplotlib comes with the extra ``plot``


_MODEL, _TRUTH = "#1f5fa8", "#222222"
_EVENTS = ("#1f5fa8", "#c8552b", "#3a8f5c", "#7a4fa0")
_DASHED: dict[str, Any] = {"color": _TRUTH, "lw": 1.1, "ls": (0, (4, 3))}
_LEVELS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, eq=False)
class Curve:
    """A conditional probability along x: estimate, 95 % interval and truth, shapes (n,)."""

    name: str
    value: Array
    lower: Array
    upper: Array
    truth: Array


@dataclass(frozen=True, eq=False)
class RatioGrid:
    """The density ratio on a square grid of y1 (columns) and y2 (rows), shapes (k, k).

    Attributes
    ----------
    axis
        Values of y1 and of y2, shape (k,).
    value, truth
        Estimate and truth.
    inside
        Where to draw it.
    """

    axis: Array
    value: Array
    truth: Array
    inside: Array


def points_picture(result: Result, path: Path) -> None:
    """Laws at a job's stated points beside what happened where as much was predicted.

    A panel for each function: of a column the mean and the central interval of the law, of an event
    its probability. Hollow marks are held-out rows in the same bin of predictions, or, of a job
    that holds none out, the nearest rows where these are near.
    """
    points = result["points"]
    names = list(points[0]["functions"])
    at = np.arange(len(points))[::-1]
    hollow = {"fmt": "o", "color": "#777777", "mfc": "white", "capsize": 2.5, "markersize": 6}
    with picture(path, 11, 1.8 + 0.55 * len(points)) as figure:
        axes = np.atleast_1d(figure.subplots(1, len(names), sharey=True))
        for ax, name in zip(axes, names, strict=True):
            values = [point["functions"][name] for point in points]
            event = values[0]["event"]
            means = np.array([v["mean"] for v in values])
            ends = np.array([v["interval"] or [v["mean"]] * 2 for v in values])
            ax.errorbar(
                means,
                at + 0.12,
                xerr=np.abs(ends - means[:, None]).T,
                fmt="o",
                color=_MODEL,
                capsize=2.5 if not event else 0.0,
                markersize=6,
                label=f"law: mean and {100 * result['level']:g} % interval, or probability",
            )
            seen = [_reference(point, v) for point, v in zip(points, values, strict=True)]
            shown = [i for i, (value, _) in enumerate(seen) if value is not None]
            ax.errorbar(
                [seen[i][0] for i in shown],
                at[shown] - 0.12,
                xerr=half_widths([seen[i][1] for i in shown]),
                label=_reference_label(result),
                **hollow,
            )
            unit = result["units"].get(name)
            ax.set_title(f"P({name} | x)" if event else name)
            ax.set_xlabel("probability" if event else f"{name} [{unit}]" if unit else name)
            if event:
                ax.set_xlim(-0.02, 1.02)
            else:
                ax.set_xlim(left=min(0.0, ax.get_xlim()[0]))
            ax.grid(axis="y", visible=False)
            ax.tick_params(axis="y", length=0)
        axes[0].set_yticks(at, [point["name"] for point in points])
        axes[0].set_ylim(-0.5, len(points) - 0.5)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower right", ncols=2)
        figure.suptitle(result["title"], x=0.01, ha="left")


def _reference(point: Result, value: Result) -> tuple[float | None, float | None]:
    """The reference of a law and its standard error, or None."""
    if value["held_out"] is not None:
        return value["held_out"]["seen"]["value"], value["held_out"]["seen"]["std"]
    return (value["nearest_mean"], value["nearest_std"]) if point["near"] else (None, None)


def _reference_label(result: Result) -> str:
    if result["evaluation"] is not None:
        return "mean of held-out rows in the same bin of predictions, 95 % interval"
    return f"nearest {result['neighbours']['k']:,} rows, where near, 95 % interval"


@dataclass(frozen=True, eq=False)
class DemoLaws:
    """Laws of y1 given x, and the truth.

    Attributes
    ----------
    rows
        Number of rows of the sample.
    along, at
        Laws at many x, and at a few.
    true_quantile, true_cdf
        From x, and a level or thresholds, to the truth.
    """

    rows: int
    along: ConditionalLaw
    at: ConditionalLaw
    true_quantile: Callable[[Array, float], Array]
    true_cdf: Callable[[float, Array], Array]


def demo_picture(
    x: Array, curves: Sequence[Curve], at: float, ratio: RatioGrid, laws: DemoLaws, path: Path
) -> None:
    """Conditional probabilities, the density ratio at one x, and laws, each with the truth."""
    with picture(path, 11, 8.4) as figure:
        ((first, second), (third, fourth)) = figure.subplots(2, 2, width_ratios=[1.1, 1.0])
        for color, curve in zip(_EVENTS, curves, strict=False):
            first.fill_between(x, curve.lower, curve.upper, color=color, alpha=0.3, lw=0)
            first.plot(x, curve.value, color=color, lw=2.4, label=f"P({curve.name} | x)")
            first.plot(x, curve.truth, **_DASHED)
        first.plot([], [], **_DASHED, label="truth")
        first.set(xlabel="x", ylabel="conditional probability", xlim=(x[0], x[-1]))
        first.set_ylim(bottom=min(0.0, first.get_ylim()[0]))
        first.set_title(f"Learned from {laws.rows:,} rows (bands: 95 % intervals)")
        first.legend(loc="upper left")
        _ratio_panel(figure, second, ratio, at)
        _fan_panel(third, x, laws)
        _cdf_panel(fourth, laws)


def _fan_panel(ax: Any, x: Array, laws: DemoLaws) -> None:
    laws.along.plot_fan("y1", levels=(0.5, 0.9), ax=ax)
    for level in (0.05, 0.25, 0.5, 0.75, 0.95):
        ax.plot(x, laws.true_quantile(x, level), **_DASHED)
    ax.legend(loc="upper right", ncols=3)


def _cdf_panel(ax: Any, laws: DemoLaws) -> None:
    laws.at.plot_cdf("y1", ax=ax)
    low, high = ax.get_xlim()
    t = np.linspace(low, high, 400)
    for point in laws.at.points[:, 0]:
        ax.plot(t, laws.true_cdf(point, t), **_DASHED)
    ax.legend(loc="upper left", title="x", alignment="left")


def _ratio_panel(figure: Any, ax: Any, grid: RatioGrid, at: float) -> None:
    top = float(np.ceil(grid.truth[grid.inside].max()))
    seen = np.where(grid.inside, grid.value, np.nan)
    true = np.where(grid.inside, grid.truth, np.nan)
    filled = ax.contourf(
        grid.axis, grid.axis, seen, levels=np.linspace(0.0, top, 25), cmap="GnBu", extend="both"
    )
    lines = ax.contour(
        grid.axis, grid.axis, true, levels=_LEVELS, colors=_TRUTH, linewidths=1.1, linestyles="--"
    )
    ax.clabel(lines, fmt="%g", fontsize=9)
    ax.set(xlabel="y1", ylabel="y2", aspect="equal")
    ax.set_title(f"Density ratio g({at:g}, y), central 99 % of y")
    figure.colorbar(filled, ax=ax, shrink=0.9, ticks=np.arange(0.0, top + 1.0), label="g")


# How kernels were learned: tables and a picture of the search


_STAGES = {
    "grid": "#9aa5b1",
    "columns": "#c8552b",
    "refine": "#1f5fa8",
    "widen": "#3a8f5c",
    "rougher": "#b08d1a",
    "shortlist": "#3b8ea5",
    "rescale": "#a03b63",
    "ignore": "#7a4fa0",
}
_LOSSES = {"validation": "squared errors (41)"}  # for the sliced CRPS
_FORMS = {"standard": "standardised", "scores": "normal scores", "given": "given kernel"}


def tuning_tables(result: Result) -> list[Any]:
    """The stages of a search, and the best model or those that are averaged."""
    tuning = result["tuning"]
    trials = tuning["trials"]
    stages = []
    for stage in dict.fromkeys(trial["stage"] for trial in trials):
        scores = [trial["score"] for trial in trials if trial["stage"] == stage]
        stages.append((stage, number(len(scores)), f"{min(scores):.4f}"))
    values = [
        grid("Search", ("stage", "kernels", "best score"), stages, _caption(tuning)),
        "",
    ]
    names = [*result["variables"]["x"]["columns"], *result["variables"]["y"]["columns"]]
    several = len(tuning["members"]) > 1
    models = (f"model {i + 1}" if several else "" for i in range(len(tuning["members"])))
    head = ("column", *models)
    scales = [_scales(member) for member in tuning["members"]]
    rows = [(name, *(each[i] for each in scales)) for i, name in enumerate(names)]
    crps = (f"{m['crps']:.4f}" for m in tuning["members"])
    extra = [
        ("coordinates of x", *(_FORMS[m["x"]["form"]] for m in tuning["members"])),
        ("coordinates of y", *(_FORMS[m["y"]["form"]] for m in tuning["members"])),
        ("ranks", *(" / ".join(map(str, m["ranks"])) for m in tuning["members"])),
        ("ridge (y, x)", *(", ".join(f"{r:.1g}" for r in m["reg"]) for m in tuning["members"])),
        ("retained of g - 1", *(f"{m['retained']:.2f}" for m in tuning["members"])),
        ("joint loss", *(f"{m['joint']:.4f}" for m in tuning["members"])),
        (_LOSSES.get(tuning.get("criterion"), "sliced CRPS"), *crps),
    ]
    caption = "Length scales in units of the coordinates; losses on held-out folds of all rows."
    if tuning["members"]:
        title = "Averaged models" if several else "Best model"
        values += [grid(title, head, [*rows, *extra], caption), ""]
    return values


def _caption(tuning: Result) -> str:
    return (
        f"{tuning['seconds']:.1f} s. Score: losses on held-out folds of the row sample, over what "
        "the best gain on independence, which has 0."
    )


def _scales(member: Result) -> list[str]:
    return [
        "-" if not member[side]["scales"] else "ignored" if scale >= IGNORED else f"{scale:.3g}"
        for side in "xy"
        for scale in member[side]["scales"] or [0.0]
    ]


def tuning_picture(tuning: Result, names: Sequence[str], path: Path) -> None:
    """Scores of all kernels as they were tried, and the length scales of the models."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    trials, members = tuning["trials"], tuning["members"]
    scores = np.array([trial["score"] for trial in trials])
    with picture(path, 10, 4.4) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.2, 1.0])
        for stage, color in _STAGES.items():
            tried = [i for i, trial in enumerate(trials) if trial["stage"] == stage]
            if tried:
                shown = np.minimum(scores[tried], 0.2)
                left.plot(tried, shown, "o", ms=4, color=color, label=stage)
        left.plot(np.minimum.accumulate(scores), color="#222222", lw=1.4, label="best so far")
        left.axhline(0.0, color="#777777", lw=1.0, ls="--")
        left.annotate(
            "independence",
            (0.99, 0.0),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=9,
        )
        left.set(xlabel="kernel tried", ylabel="score (lower is better)")
        left.set_title(f"{len(trials)} pairs of kernels in {tuning['seconds']:.1f} s")
        left.legend(loc="upper right", bbox_to_anchor=(1.0, 0.94))
        at = np.arange(len(names))[::-1]
        for i, member in enumerate(members):
            scales = [*member["x"]["scales"], *member["y"]["scales"]]
            if len(scales) == len(names):
                scales = [np.nan if scale >= IGNORED else scale for scale in scales]
                first = {"color": _STAGES["refine"], "label": "best model", "zorder": 3}
                other = {"color": "#9aa5b1", "label": "others" if i == 1 else None}
                right.plot(scales, at, "o", ms=6, **(first if i == 0 else other))
        right.set_xscale("log")
        right.xaxis.set_major_formatter(ScalarFormatter())
        right.xaxis.set_minor_formatter(NullFormatter())
        right.set_yticks(at, [_labelled(name, i, members) for i, name in enumerate(names)])
        right.set_xlabel("length scale in its coordinates")
        right.set_title("Columns, the more telling the shorter")
        if len(members) > 1:
            figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=2)


def _labelled(name: str, i: int, members: Sequence[Result]) -> str:
    """The name of a column, and whether the best model ignores it."""
    scales = [s for m in members[:1] for side in "xy" for s in m[side]["scales"]]
    return f"{name}\n(ignored)" if i < len(scales) and scales[i] >= IGNORED else name


def tuning_facts(result: Result) -> Any:
    """Where everything was written."""
    return facts("Written", [("", path) for path in result["outputs"].values() if path])
