"""Pictures; matplotlib comes with the extra ``plot``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.models.drawing import STYLE
from cme_dask.models.law import ConditionalLaw
from cme_dask.report.evaluation import half_widths

Array = Any
Result = dict[str, Any]

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
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    points = result["points"]
    names = list(points[0]["functions"])
    at = np.arange(len(points))[::-1]
    hollow = {"fmt": "o", "color": "#777777", "mfc": "white", "capsize": 2.5, "markersize": 6}
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 1.8 + 0.55 * len(points)), layout="constrained")
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
        figure.savefig(path, format="png")


def _reference(point: Result, value: Result) -> tuple[float | None, float | None]:
    """What a law is compared with, and its standard error; None where there is nothing."""
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
    """Conditional probabilities, the density ratio at one x, and laws, each with the truth.

    Parameters
    ----------
    x
        Where the curves are drawn.
    curves
        The probabilities.
    at
        The x of the ratio.
    ratio
        The ratio.
    laws
        The laws.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(11, 8.4), layout="constrained")
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
        figure.savefig(path, format="png")


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
