"""The picture of the study of classification: two figures by the number of rows."""

from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.models.drawing import STYLE

Result = dict[str, Any]

_LINES = {
    "self-tuned": ("#222222", "*", "-"),
    "constrained": ("#1f5fa8", "o", "-"),
    "constrained, labels only": ("#1f5fa8", "o", ":"),
    "coupling": ("#c8552b", "D", "-"),
    "certified": ("#7a5195", "^", "-"),
    "unconstrained": ("#3a8f5c", "s", "--"),
    "traditional": ("#777777", "v", "--"),
    "kernel logistic": ("#d18f00", "P", "-"),
    "truth": ("#222222", "", ":"),
}
_TITLES = {
    "deviation": "distance from the true probability",
    "perfect": "distance from perfect classification",
}


def classification_picture(result: Result, path: Path) -> None:
    """Draw mean |P - truth| and mean 1 - P(label), with 5 % to 95 % of the draws of some methods.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    scenarios = list(dict.fromkeys(cell["scenario"] for cell in result["cells"]))
    with rc_context(STYLE):
        figure = Figure(figsize=(8.4, 2.9 * len(scenarios) + 0.8), layout="constrained")
        axes = figure.subplots(len(scenarios), 2, squeeze=False, sharex=True)
        for row, name in zip(axes, scenarios, strict=True):
            cells = [cell for cell in result["cells"] if cell["scenario"] == name]
            for ax, measure in zip(row, _TITLES, strict=True):
                _panel(ax, cells, measure)
                ax.set_title(f"{name}: {_TITLES[measure]}")
        for ax in axes[-1]:
            ax.set_xlabel("training rows")
        handles, labels = axes[0, 1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
        figure.suptitle(
            "Probabilities of a label: mean absolute deviations, "
            f"{result['settings']['seeds']} draws (bands: 5 % to 95 % of them)",
            x=0.01,
            ha="left",
            fontsize=10.5,
        )
        figure.savefig(path, format="png", dpi=130)


def _panel(ax: Any, cells: list[Result], measure: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    sizes = [cell["rows"] for cell in cells]
    for model, (colour, marker, line) in _LINES.items():
        if model == "truth" and measure == "deviation":
            continue
        found = [cell["models"][model][measure] for cell in cells]
        means = [each["mean"] for each in found]
        ax.plot(
            sizes,
            means,
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=4,
            linewidth=1.2,
            label=model,
        )
        if model in ("self-tuned", "kernel logistic"):
            low, high = np.quantile([each["values"] for each in found], [0.05, 0.95], axis=1)
            ax.fill_between(sizes, low, high, color=colour, alpha=0.12, linewidth=0)
    ax.set(xscale="log", yscale="log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.5, 7.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
    ax.minorticks_off()
