"""How kernels were learned: tables and a picture of the search."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.kernels.length_scales import IGNORED
from cme_dask.models.drawing import STYLE
from cme_dask.report.tables import facts, grid, number

Result = dict[str, Any]

_STAGES = {
    "grid": "#9aa5b1",
    "columns": "#c8552b",
    "refine": "#1f5fa8",
    "widen": "#3a8f5c",
    "ignore": "#7a4fa0",
}
_LOSSES = {"log": "log loss", "validation": "squared errors (41)"}  # for the sliced CRPS
_FORMS = {"standard": "standardised", "scores": "normal scores", "given": "given kernel"}


def tuning_tables(result: Result) -> list[Any]:
    """The stages of a search and the models that are averaged.

    Parameters
    ----------
    result
        With the keys ``tuning`` and ``variables``, as ``cme-dask tune`` prints it.
    """
    tuning = result["tuning"]
    trials = tuning["trials"]
    stages = []
    for stage in dict.fromkeys(trial["stage"] for trial in trials):
        scores = [trial["score"] for trial in trials if trial["stage"] == stage]
        stages.append((stage, number(len(scores)), f"{min(scores):.4f}"))
    found = [
        grid("Search", ("stage", "kernels", "best score"), stages, _caption(tuning)),
        "",
    ]
    names = [*result["variables"]["x"]["columns"], *result["variables"]["y"]["columns"]]
    head = ("column", *(f"model {i + 1}" for i in range(len(tuning["members"]))))
    scales = [_scales(member) for member in tuning["members"]]
    rows = [(name, *(each[i] for each in scales)) for i, name in enumerate(names)]
    crps = (f"{m['crps']:.4f}" for m in tuning["members"])
    extra = [
        ("coordinates of x", *(_FORMS[m["x"]["form"]] for m in tuning["members"])),
        ("coordinates of y", *(_FORMS[m["y"]["form"]] for m in tuning["members"])),
        ("ranks", *(" / ".join(map(str, m["ranks"])) for m in tuning["members"])),
        ("ridge (y, x)", *(", ".join(f"{r:.1g}" for r in m["reg"]) for m in tuning["members"])),
        ("kept of g - 1", *(f"{m['kept']:.2f}" for m in tuning["members"])),
        ("joint loss", *(f"{m['joint']:.4f}" for m in tuning["members"])),
        (_LOSSES.get(tuning.get("criterion"), "sliced CRPS"), *crps),
    ]
    caption = "Length scales in units of the coordinates; losses on held-out folds of all rows."
    if tuning["members"]:
        found += [grid("Averaged models", head, [*rows, *extra], caption), ""]
    return found


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
    """Scores of all kernels as they were tried, and the length scales of the averaged models.

    Parameters
    ----------
    tuning
        The search.
    names
        Columns of x, then of y.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    trials, members = tuning["trials"], tuning["members"]
    scores = np.array([trial["score"] for trial in trials])
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 4.4), layout="constrained")
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
        if members:
            figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=2)
        figure.savefig(path, format="png")


def _labelled(name: str, i: int, members: Sequence[Result]) -> str:
    """The name of a column, and whether the best model ignores it."""
    scales = [s for m in members[:1] for side in "xy" for s in m[side]["scales"]]
    return f"{name}\n(ignored)" if i < len(scales) and scales[i] >= IGNORED else name


def tuning_facts(result: Result) -> Any:
    """Where everything was written."""
    return facts("Written", [("", path) for path in result["outputs"].values() if path])
