"""Query points from whatever users hold."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from cme_dask.errors import DataError, UnseenCategoryWarning
from cme_dask.kernels import Kernel
from cme_dask.kernels.base import is_a
from cme_dask.storage.arrow import arrow_column, arrow_table, is_arrow
from cme_dask.storage.columns import Columns, check_finite

Array = Any
Unseen = dict[str, dict[str, int]]
"""Rows by unseen label, by column."""

UNSEEN = -1.0
"""A code that no label has."""
_MISSING = {"NoneType", "NAType", "NaTType"}  # of Python and of pandas, besides NaN


def query_points(values: Any, columns: Columns, name: str, kernel: Kernel) -> Array:
    """Query points as float64 of shape (n, d): arrays, or tables that hold the columns by name.

    Tables are pandas ones and dicts of columns. Labels of categorical columns become codes. A
    numeric array holds codes; in tables, and in rows with text, a number is a label where all
    labels of the column are integers, and a code elsewhere.

    Parameters
    ----------
    values
        The points.
    columns
        Of the variable.
    name
        What messages call the points.
    kernel
        Of the variable: it tells which columns take labels that the fit has not seen.

    Raises
    ------
    DataError
        On a wrong number of columns, unknown columns, NaN or infinity, or unseen labels that the
        kernel doesn't pool.

    Warns
    -----
    UnseenCategoryWarning
        On unseen labels that the kernel pools, once for all.
    """
    names = columns.names
    parts = _parts(values, columns, name)
    points = np.empty((len(parts[0]), len(names)))
    unseen: Unseen = {}
    for j, (key, part) in enumerate(zip(names, parts, strict=True)):
        labels = columns.categories.get(key)
        if labels is None:
            points[:, j] = _numbers(part, f"column {key!r} of {name}")
        else:
            points[:, j], unseen[key] = _codes(part, labels, f"column {key!r} of {name}")
    check_finite(points, names, 0)
    _tell(unseen, columns, kernel)
    return points


def _parts(values: Any, columns: Columns, name: str) -> Sequence[Array]:
    """The columns, equally long; those of labels as objects unless the values are an array."""
    names = columns.names
    if is_arrow(values) and (hasattr(values, "columns") or hasattr(values, "column_names")):
        values = _arrow_columns(values, columns)
    if isinstance(values, Mapping):
        Columns(tuple(map(str, values))).positions_of(columns, name)
        parts = [np.atleast_1d(np.array(values[key], dtype=object)) for key in names]
        if any(part.shape != parts[0].shape or part.ndim > 1 for part in parts):
            shapes = ", ".join(f"{k!r} {p.shape}" for k, p in zip(names, parts, strict=True))
            raise DataError(f"the columns of {name} must be equally long lists, got {shapes}")
        return parts
    if hasattr(values, "columns") and hasattr(values, "to_numpy"):
        positions = Columns(tuple(map(str, values.columns))).positions_of(columns, name)
        table = [values.iloc[:, p] for p in positions]
        return [
            column.to_numpy(dtype=object, na_value=np.nan)
            if key in columns.categories or not isinstance(column.dtype, np.dtype)
            else column
            for key, column in zip(names, table, strict=True)
        ]
    return list(_rows(values, columns, name).T)


def _arrow_columns(values: Any, columns: Columns) -> dict[str, Any]:
    """Those columns of a table of Arrow or Polars that the variable has, by name."""
    table = arrow_table(values, columns.names[0])
    found: dict[str, Any] = {}
    for place, key in enumerate(map(str, table.column_names)):
        column = table.column(place)
        if key in columns.categories:
            found[key] = column.to_pylist()
        else:
            found[key] = arrow_column(column, key, "X")[0] if key in columns.names else column
    return found


def _rows(values: Any, columns: Columns, name: str) -> Array:
    """Rows of shape (n, d): numbers or, with labels among them, objects."""
    names = columns.names
    try:
        numeric = not columns.categories or np.asarray(values).dtype.kind in "biuf"
        points = np.array(values, dtype=np.float64 if numeric else object)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} must be numeric: {error}") from error
    shape = points.shape
    if points.ndim < 2:
        points = points.reshape(-1, 1) if len(names) == 1 else points.reshape(1, -1)
    if points.ndim != 2 or points.shape[1] != len(names):
        raise DataError(
            f"{name} must have shape (n, {len(names)}) for the columns {', '.join(names)}, "
            f"got {shape}"
        )
    return points


def _numbers(part: Any, where: str) -> Array:
    try:
        return np.asarray(part, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} must be numeric: {error}") from error


def _codes(part: Array, labels: Sequence[str], where: str) -> tuple[Array, dict[str, int]]:
    """Codes of a column's labels or codes, and the rows of each that there is no code for."""
    written = part.dtype == object
    values = part.tolist()
    known = {label: float(code) for code, label in enumerate(labels)}
    of_numbers = written and all(label.lstrip("-").isdecimal() for label in labels)
    try:
        code_of = dict.fromkeys(values, UNSEEN)
    except TypeError as error:
        raise DataError(f"{where} must hold labels: {error}") from error
    for value in code_of:
        if type(value).__name__ in _MISSING or value != value:
            code_of[value] = np.nan
        elif of_numbers or not is_a(value, Real):
            code_of[value] = known.get(_label(value), UNSEEN)
        else:
            code = float(value)
            is_code = code.is_integer() and 0 <= code < len(labels)
            code_of[value] = code if is_code else UNSEEN
    codes = np.fromiter(map(code_of.__getitem__, values), np.float64, len(values))
    if UNSEEN not in code_of.values():
        return codes, {}
    lost = Counter(value for value in values if code_of[value] == UNSEEN)
    return codes, {_label(value): count for value, count in lost.items()}


def _label(value: Any) -> str:
    """A value as the label that a table of text would hold."""
    if isinstance(value, bool):
        return str(value).lower()
    is_whole = isinstance(value, Real) and float(value).is_integer()
    return f"{float(value):.0f}" if is_whole else str(value)


def _tell(unseen: Unseen, columns: Columns, kernel: Kernel) -> None:
    """Warn of unseen labels that are pooled, and refuse others."""
    found = {key: counts for key, counts in unseen.items() if counts}
    for key, counts in found.items():
        if not kernel.pools(columns.names.index(key)):
            raise DataError(
                f"column {key!r} has the unknown {_listed(counts)}: there are {columns.labels(key)}"
            )
    if found:
        each = "; ".join(f"column {key!r} {_listed(counts)}" for key, counts in found.items())
        warnings.warn(
            f"labels that the fit has not seen are answered as its pooled rare ones: {each}",
            UnseenCategoryWarning,
            stacklevel=5,
        )


def _listed(counts: Mapping[str, int]) -> str:
    shown = [
        f"{label!r} ({count:,} row{'s' * (count > 1)})"
        for label, count in list(counts.items())[:10]
    ]
    return ", ".join(shown) + (f" and {len(counts) - 10:,} more" if len(counts) > 10 else "")
