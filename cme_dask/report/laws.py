"""Answers of conditional laws as tables."""

from typing import Any

from rich.console import RenderableType

from cme_dask.report.tables import (
    facts,
    format_bytes,
    grid,
    memory_line,
    number,
    pass_line,
    with_unit,
)

Result = dict[str, Any]

_WIDE = 8  # columns, which are then told below each other


def answer_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask predict`` at points: a table for each point, or one for all."""
    other = "y" if result["given"] == "x" else "x"
    title = f"Laws of {other} given {result['given']}"
    columns, answers = result["columns"], result["answers"]
    names = [with_unit(name, result["units"]) for name in columns]
    pairs = list(zip(result["points"], result["values"], strict=True))
    if len(columns) + len(answers) <= _WIDE:
        rows = [(*map(_text, point), *map(number, values)) for point, values in pairs]
        return [grid(title, [*names, *answers], rows)]
    head = [f"{i + 1}" for i in range(len(pairs))]
    lines = [(name, *(_text(point[j]) for point, _ in pairs)) for j, name in enumerate(names)]
    told = [(name, *(number(values[j]) for _, values in pairs)) for j, name in enumerate(answers)]
    return [grid(title, ["", *head], [*lines, *told])]


def file_answer_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask predict`` from CSV to CSV."""
    lines = [("rows", number(result["rows"])), ("answers", ", ".join(result["answers"]))]
    return [facts(result["out"], lines)]


def store_answer_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask predict`` on a store."""
    lines = [
        *((name, " x ".join(map(number, shape))) for name, shape in result["arrays"].items()),
        ("chunks", f"{number(result['chunk_rows'])} rows, {format_bytes(result['bytes'])} on disk"),
        ("pass", pass_line(result)),
        ("peak memory", memory_line(result["memory"])),
    ]
    return [facts(result["out"], lines)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else number(value)
