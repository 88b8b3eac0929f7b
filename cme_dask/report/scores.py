"""Scores as a table."""

from typing import Any

from rich.console import RenderableType

from cme_dask.report.tables import facts, grid, number, with_error

Result = dict[str, Any]


def score_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask score``."""
    seen = "" if result["unseen"] else ", which the fit may have seen"
    part = "all rows" if result["held_out"] is None else f"held out: {result['held_out']}"
    lines = [
        ("rows", f"{number(result['rows'])} of {result['store']}, {part}{seen}"),
        ("errors", f"jackknife over folds by {result['fold_by']}"),
    ]
    if result["crps"] is not None:
        lines.append(("CRPS", _text(result["crps"])))
    lines += coverage_lines(result["coverage"])
    for name, each in result["labels"].items():
        text = f"log loss {_text(each['log_loss'])}, accuracy {_text(each['accuracy'])}"
        lines.append((f"labels of {name}", text))
    rows = [
        (
            name,
            number(scores["mean"]),
            _text(scores["mse"]),
            _text(scores["r2"]),
            "Brier skill" if scores["event"] else "R^2",
        )
        for name, scores in result["scores"].items()
    ]
    head = ("", "mean", "mean square error", "skill", "which is")
    found = [facts(result["model"], lines)]
    return [*found, "", grid("Scores", head, rows)] if rows else found


def coverage_lines(coverage: Result | None) -> list[tuple[str, str]]:
    """A line on how many rows lie within the intervals of the laws, in per cent."""
    if coverage is None:
        return []
    each = []
    for name, found in coverage["columns"].items():
        value, std = (None if v is None else 100.0 * v for v in (found["value"], found["std"]))
        each.append(f"{name} {'none' if value is None else with_error(value, std)} %")
    return [(f"within the {100.0 * coverage['level']:g} % interval", ", ".join(each))]


def _text(estimate: Result) -> str:
    if estimate["value"] is None:
        return "none"
    return with_error(estimate["value"], estimate["std"])
