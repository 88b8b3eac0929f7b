"""The picture of a bench: seconds of everything measured, a panel per case."""

from itertools import groupby
from pathlib import Path
from typing import Any

from cme_dask.bench.programs import CLOSED
from cme_dask.models.drawing import STYLE
from cme_dask.report.tables import number

Result = dict[str, Any]
Row = tuple[str, Result]

_TITLES = {
    "fmca": "Pivoted Cholesky of {rows} rows, equal trace error",
    "pass": "Joint distribution of {rows} stored rows",
    "random": "Random pivots, {rows} rows",
    "ridge": "Conditional mean, {rows} rows",
    "sweep": "One thing changed at a time, around {rows} rows",
    "ingest": "CSV file of {rows} rows into a store",
    "tuning": "Learned kernels, {rows} rows",
    "coverage": "Intervals, {rows} rows",
    "queries": "Questions at {rows} points",
    "cluster": "Joint fit of {rows} stored rows on a cluster",
    "large": "{rows} rows on workers of 1 GB",
    "programs": "Programs of a sample of {rows} rows",
}
_OURS, _BARE, _LIMIT, _OTHERS = "#1f5fa8", "#3a8f5c", "#222222", "#c8552b"
_LEGEND = (
    (_OURS, "o", "cme_dask, whole fit"),
    (_BARE, "D", "bare pass"),
    (_LIMIT, "|", "limits: arithmetic at the measured rates, reading"),
    (_OTHERS, "s", "others"),
)
_LINE = 0.27  # inches per row
_PANEL = 0.95  # and for what is around them
_WIDE = 10.0  # inches that hold the whole legend in one line


def bench_picture(result: Result, path: Path) -> None:
    """Draw medians, from least to most, on logarithmic axes.

    Parameters
    ----------
    result
        JSON form of a bench.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = _panels(result)
    columns: list[list[str]] = [[], []]
    heights = [0.0, 0.0]
    for case, rows in panels.items():
        shorter = heights.index(min(heights))
        columns[shorter].append(case)
        heights[shorter] += _LINE * len(rows) + _PANEL
    columns = [cases for cases in columns if cases]
    with rc_context(STYLE):
        figure = Figure(
            figsize=(6.4 * max(len(columns), 1), max(heights) + 0.8), layout="constrained"
        )
        figure.suptitle(_heading(result), x=0.01, ha="left", fontsize=10.5)
        parts = figure.subfigures(1, max(len(columns), 1), squeeze=False)[0]
        for part, cases in zip(parts, columns, strict=False):
            room = [_LINE * len(panels[case]) + _PANEL for case in cases]
            room.append(max(max(heights) - sum(room), 1e-3))  # so that rows are equally high
            *axes, rest = part.subplots(len(room), 1, height_ratios=room)
            rest.set_axis_off()
            for ax, case in zip(axes, cases, strict=True):
                _panel(ax, panels[case], _ratios(result, case))
                rows = result["settings"]["sizes"][case]["rows"]
                ax.set_title(_TITLES[case].format(rows=number(rows)))
        _legend(figure)
        figure.savefig(path, format="png")


def _heading(result: Result) -> str:
    machine, settings = result["machine"], result["settings"]
    return (
        f"{machine['processor']}, {settings['workers']} threads; seconds, median of "
        f"{settings['repeats']} (line: least to most)"
    )


def _panels(result: Result) -> dict[str, list[Row]]:
    """Per case, rows from top to bottom; a setting that several rows share has a row of its own."""
    timed = [
        (key, found)
        for key, found in result["measurements"].items()
        if found["runs"] and not key.startswith("machine/") and "gemm_all" not in found["runs"][0]
    ]
    panels: dict[str, list[Row]] = {}
    for case, group in groupby(timed, lambda item: item[0].split("/")[0]):
        rows: list[Row] = []
        setting = None
        for key, found in group:
            _, here, *who = key.split("/", 2)
            if who and here != setting:
                setting = here
                rows.append((here, {}))
            rows.append((who[0] if who else here, found))
        panels[case] = rows
    return panels


def _ratios(result: Result, case: str) -> dict[str, str]:
    """The first ratio of each setting of a case."""
    texts: dict[str, str] = {}
    for ratio in result["ratios"]:
        here, _, setting = ratio["group"].partition("/")
        if here == case and ratio["value"] is not None:
            texts.setdefault(setting, f"{ratio['name']} = {ratio['value']:.3g}")
    return texts


def _panel(ax: Any, rows: list[Row], ratios: dict[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for i, (label, found) in enumerate(rows):
        if not found:
            at = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 9}
            ax.annotate(ratios.get(label, ""), (0.01, i), fontweight="bold", **at)
            continue
        color, marker = _look(label, found)
        ax.plot([found["least"], found["most"]], [i, i], color=color, lw=2.0, alpha=0.5)
        size = 11 if marker == "|" else 6
        ax.plot(found["median"], i, marker, color=color, markersize=size, markeredgewidth=1.6)
        ax.annotate(
            f"{found['median']:.3g}",
            (found["most"], i),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color="#444444",
        )
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    low, high = (
        f(found[k] for _, found in rows if found) for f, k in ((min, "least"), (max, "most"))
    )
    ax.set_xlim(min(low, high / 9) / 1.5, high * 2.5)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_yticks(range(len(rows)), [label for label, _ in rows])
    for tick, (_, found) in zip(ax.get_yticklabels(), rows, strict=True):
        if not found:
            tick.set_fontweight("bold")
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", which="major")


def _look(label: str, found: Result) -> tuple[str, str]:
    """Colour and marker of a row."""
    if label in ("limit", "reading alone"):
        return _LIMIT, "|"
    if label == "bare pass":
        return _BARE, "D"
    job = found["job"]
    kinds = {one["job"] for one in (job if isinstance(job, list) else [job])}
    ours = (
        kinds <= {"Fit"}
        or kinds == {"SolveCoupling"}
        or (kinds == {"ConditionalMean"} and job["method"] == "ours")
        or (kinds == {"SolveProgram"} and job["solver"] == CLOSED)
    )
    return (_OURS, "o") if ours else (_OTHERS, "s")


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=color, marker=marker, ls="", markeredgewidth=1.6, label=label)
        for color, marker, label in _LEGEND
    ]
    columns = len(handles) if figure.get_figwidth() > _WIDE else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
