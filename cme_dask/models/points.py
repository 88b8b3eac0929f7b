"""Query points from whatever users hold."""

from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.storage.columns import Columns, check_finite

Array = Any


def query_points(values: Any, columns: Columns, name: str) -> Array:
    """Query points as float64 of shape (n, d): arrays, or tables that hold the columns by name.

    Raises
    ------
    DataError
        On a wrong number of columns, unknown columns, NaN or infinity.
    """
    names = columns.names
    if hasattr(values, "columns") and hasattr(values, "to_numpy"):
        positions = Columns(tuple(map(str, values.columns))).positions(names)
        values = values.iloc[:, list(positions)].to_numpy()
    try:
        points = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} must be numeric: {error}") from error
    if points.ndim < 2:
        points = points.reshape(-1, 1) if len(names) == 1 else points.reshape(1, -1)
    if points.ndim != 2 or points.shape[1] != len(names):
        raise DataError(
            f"{name} must have shape (n, {len(names)}) for the columns {', '.join(names)}, "
            f"got {np.shape(values)}"
        )
    check_finite(points, names, 0)
    return points
