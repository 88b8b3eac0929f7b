"""Conditional expectations of a saved model at points given as text; needs no Dask."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.models import load

Array = Any


def answer(
    model: str,
    given: Sequence[str],
    points: Path | None,
    functions: Sequence[str],
    *,
    reverse: bool = False,
    std: bool = True,
) -> dict[str, Any]:
    """JSON form of E[f(y) | x], or E[f(x) | y], at some points.

    Parameters
    ----------
    model
        Path or URL.
    given
        Points as ``COLUMN=NUMBER,...``.
    points
        CSV file of further points.
    functions
        Columns or events; default all.
    reverse
        E[f(x) | y].
    std
        With standard errors, if the model has folds.

    Raises
    ------
    DataError
        On unknown names, missing columns, or values that are no numbers.
    StoreError
        If the model is unusable.
    """
    if not given and points is None:
        raise DataError("give at least one point: --given COLUMN=NUMBER,... or --points FILE.csv")
    law = load(model)
    key, variable, other = ("y", law.y, law.x) if reverse else ("x", law.x, law.y)
    names = variable.columns.names
    rows = [_parse(text, names) for text in given]
    if points is not None:
        rows += _read(points, names)
    array = np.array(rows)
    shown = list(functions) or list(variable.answers.names)
    where = {"Y": array} if reverse else {"X": array}
    with_std = std and len(variable.answers.fold_constant) > 1
    found = law.expect(shown, where.get("X"), Y=where.get("Y"), return_std=with_std)
    values, errors = found if with_std else (found, None)
    return {
        "model": model,
        "given": key,
        "columns": list(names),
        "points": array.tolist(),
        "functions": shown,
        "values": values.tolist(),
        "std": None if errors is None else errors.tolist(),
        "units": variable.columns.units | other.columns.units,
    }


def _parse(text: str, names: Sequence[str]) -> list[float]:
    """A point from ``COLUMN=NUMBER,...``."""
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not equals for _, equals, _ in pairs):
        raise DataError(f"--given takes COLUMN=NUMBER,..., got {text!r}")
    values = {name.strip(): value for name, _, value in pairs}
    _check(list(values), names, f"--given {text!r}")
    return [_number(values[name], name, f"--given {text!r}") for name in names]


def _read(path: Path, names: Sequence[str]) -> list[list[float]]:
    """Points from a CSV file; further columns are left unread."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            header = list(table.fieldnames or [])
            _check([name for name in header if name in names], names, str(path))
            rows = [
                [_number(row[name], name, f"line {table.line_num} of {path}") for name in names]
                for row in table
            ]
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is no CSV file: {error}") from error
    if not rows:
        raise DataError(f"{path} holds no points")
    return rows


def _check(found: Sequence[str], names: Sequence[str], place: str) -> None:
    unknown = [name for name in found if name not in names]
    lacking = [name for name in names if name not in found]
    for problem, which in (("unknown", unknown), ("lacks", lacking)):
        if which:
            raise DataError(
                f"{place}: {problem} column {', '.join(map(repr, which))}: "
                f"the model's are {', '.join(map(repr, names))}"
            )


def _number(text: str | None, name: str, place: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = np.nan
    if not np.isfinite(value):
        raise DataError(f"{place}: {name} must be a finite number, got {text!r}")
    return value
