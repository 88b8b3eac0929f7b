"""How a job's model did on held-out rows, beside gradient boosting: a table and a picture."""

from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.models.drawing import STYLE
from cme_dask.report.scores import coverage_lines
from cme_dask.report.tables import facts, grid, number, with_error

Result = dict[str, Any]

MODEL, BOOSTING = "model", "gradient boosting"


def evaluation_tables(result: Result) -> list[Any]:
    """Of ``jobs.evaluate``."""
    lines = [("rows", f"{number(result['rows'])}, held out: {result['held_out']}, 1 pass")]
    if MODEL in result["crps"]:
        lines.append(("CRPS", _text(result["crps"][MODEL])))
    lines += coverage_lines(result["coverage"].get(MODEL))
    boosting = result["boosting"]
    if boosting is not None:
        lines.append(
            (
                BOOSTING,
                f"scikit-learn's defaults, same columns, {number(boosting['rows'])} rows in "
                f"memory, {boosting['seconds']:.3g} s",
            )
        )
    rivals = list(result["scores"])
    rows = []
    for name, scores in result["scores"][MODEL].items():
        values = [result["scores"][rival][name]["r2"] for rival in rivals]
        row = [name, "Brier skill" if scores["event"] else "R^2", *map(_text, values)]
        if boosting is not None:
            row.append(_ratio(*(value["value"] for value in values)))
        rows.append(tuple(row))
    head = ("", "score", *rivals, *(["ratio"] if boosting is not None else []))
    caption = "Standard errors: jackknife over folds of whole units."
    return [facts("On held-out rows", lines), "", grid("", head, rows, caption, text_columns=2)]


def _ratio(model: float | None, boosting: float | None) -> str:
    known = model is not None and boosting is not None and boosting > 0.0
    return f"{model / boosting:.3f}" if known else "none"  # type: ignore[operator]


def _text(estimate: Result) -> str:
    if estimate["value"] is None:
        return "none"
    return with_error(estimate["value"], estimate["std"])


def evaluation_picture(result: Result, path: Path) -> None:
    """Skills on held-out rows, with two standard errors.

    Parameters
    ----------
    result
        The evaluation.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    scores = result["scores"]
    names = list(scores[MODEL])
    at = np.arange(len(names))[::-1]
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 1.7 + 0.6 * len(names)), layout="constrained")
        ax = figure.subplots()
        colours = {MODEL: "#1f5fa8", BOOSTING: "#9aa5b1"}
        height = 0.8 / len(scores)
        for i, (rival, colour) in enumerate((k, c) for k, c in colours.items() if k in scores):
            found = [scores[rival][name]["r2"] for name in names]
            ax.barh(
                at + 0.4 - height * (i + 0.5),
                [v["value"] or 0.0 for v in found],
                height * 0.9,
                xerr=[2.0 * (v["std"] or 0.0) for v in found],
                color=colour,
                label=rival,
                error_kw={"capsize": 2.5, "elinewidth": 1.1},
            )
        ax.set_yticks(at, [_label(name, scores[MODEL][name]["event"]) for name in names])
        ax.set_xlabel("share of the variance explained (bars: ±2 standard errors)")
        ax.set_title(f"{result['rows']:,} held-out rows: {result['held_out']}")
        ax.grid(axis="y", visible=False)
        figure.legend(loc="outside lower right", ncols=2)
        figure.savefig(path, format="png")


def _label(name: str, event: bool) -> str:
    return f"P({name} | x)" if event else f"mean {name}"
