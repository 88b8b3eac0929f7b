"""NumPy columns as Arrow columns."""

from typing import Any

import numpy as np
import pyarrow as pa

from cme_dask.errors import DataError

Array = Any

_TIME_UNITS = ("s", "ms", "us", "ns")


def as_arrow(values: Array, column: str, table: str) -> pa.Array:
    """One column, shape (n,), in the type of Arrow that corresponds: numbers, text or times.

    Raises
    ------
    DataError
        If its type is another one.
    """
    kind = values.dtype.kind
    if kind in "biuf":
        wide = values.dtype.itemsize > 8  # Arrow has no longer floats, and neither has a store
        return pa.array(values.astype("f8" if wide else values.dtype.newbyteorder("="), copy=False))
    if kind == "M":
        unit, _ = np.datetime_data(values.dtype)
        return pa.array(values.astype(f"M8[{unit if unit in _TIME_UNITS else 's'}]", copy=False))
    if kind in "UTO":
        try:
            return pa.array(values, pa.string(), from_pandas=True)
        except (pa.ArrowException, TypeError) as error:
            raise _refusal(column, table, "objects that are no text") from error
    raise _refusal(column, table, f"values of type {values.dtype}")


def _refusal(column: str, table: str, found: str) -> DataError:
    return DataError(
        f"column {column!r} of {table} holds {found}: expected numbers, text or times, leave it "
        "out or convert it"
    )


def matrix_names(name: str, width: int) -> tuple[str, ...]:
    """``name0, name1, ...``: what the columns of a matrix are called."""
    return tuple(f"{name}{place}" for place in range(width))
