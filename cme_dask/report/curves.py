"""Picture of a job's laws along columns: fans of quantiles, and probabilities of events."""

from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.models.drawing import PALETTE, STYLE
from cme_dask.models.pictures import draw_fan
from cme_dask.report.tables import with_unit

Result = dict[str, Any]


def curves_picture(result: Result, path: Path) -> None:
    """A panel for each curve of a fan, and one for each event with all its curves.

    Parameters
    ----------
    result
        Of a job.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    units = result["units"]
    fans = [curve for curve in result["curves"] if curve["of"] is not None]
    events = [curve for curve in result["curves"] if curve["event"] is not None]
    panels = len(fans) + len({(c["event"], c["along"]) for c in events})
    columns = min(panels, 2)
    rows = -(-panels // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(5.6 * columns, 3.6 * rows), layout="constrained")
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
        figure.savefig(path, format="png")


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
        ax.plot(curve["at"], curve["probability"], color=colour, lw=2.0, label=curve["point"])
    ax.set(xlabel=with_unit(curves[0]["along"], units), ylim=(0.0, 1.0))
    ax.set_ylabel(f"P({curves[0]['event']} | x)")
    ax.set_title(f"Probability of {curves[0]['event']}")
    ax.legend(loc="best", fontsize=9)
