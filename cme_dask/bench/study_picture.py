"""The picture of a study: errors of the laws by the number of rows, a panel per scenario."""

from pathlib import Path
from typing import Any

from cme_dask.models.drawing import STYLE

Result = dict[str, Any]

_LINES = {
    "self-tuned": ("#222222", "P", "-"),
    "normalized, projected": ("#1f5fa8", "o", "-"),
    "normalized, clipped": ("#1f5fa8", "o", ":"),
    "pointwise": ("#3a8f5c", "s", "-"),
    "coupling": ("#c8552b", "D", "-"),
    "certified": ("#7a5195", "^", "-"),
    "traditional": ("#777777", "v", "--"),
}


def study_picture(result: Result, path: Path) -> None:
    """Draw criterion (43) with one standard error, on logarithmic axes.

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
    columns = min(3, len(scenarios))
    rows = -(-len(scenarios) // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(3.4 * columns, 2.7 * rows + 0.7), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
        for ax, name in zip(axes, scenarios, strict=False):
            _panel(ax, name, [cell for cell in result["cells"] if cell["scenario"] == name])
        for ax in list(axes)[len(scenarios) :]:
            ax.set_visible(False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        figure.suptitle(
            "Mean squared error (43) of conditional probabilities against the truth, "
            f"{result['settings']['seeds']} draws",
            x=0.01,
            ha="left",
            fontsize=10.5,
        )
        figure.savefig(path, format="png", dpi=130)


def _panel(ax: Any, name: str, cells: list[Result]) -> None:
    sizes = [cell["rows"] for cell in cells]
    for model, (colour, marker, line) in _LINES.items():
        errors = [cell["models"][model]["error"] for cell in cells]
        ax.errorbar(
            sizes,
            [error["mean"] for error in errors],
            [error["std_error"] for error in errors],
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=4,
            linewidth=1.2,
            label=model,
        )
    ax.set(xscale="log", yscale="log", title=name, xlabel="rows")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
    ax.minorticks_off()
