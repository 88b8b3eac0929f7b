"""Groups and times as users give them, as columns of numbers."""

from typing import Any

import numpy as np

from cme_dask.chunked.dask_frames import dask_series_values, is_dask_frame
from cme_dask.errors import DataError

Array = Any


def unit_values(name: str, values: Any) -> Any:
    """Groups as numbers, or times as seconds since 1970-01-01 UTC; numbers are left as they are.

    Parameters
    ----------
    name
        ``"group"``: texts become codes 0, 1, ... in the order in which they first occur.
        ``"time"``: timestamps become seconds; without a zone they are UTC.
    values
        Array-like of shape (n,): NumPy, Dask (of numbers or timestamps), Zarr, pandas or xarray.

    Raises
    ------
    DataError
        On times that are texts.
    """
    kind = getattr(getattr(values, "dtype", None), "kind", None)
    if is_dask_frame(values):
        values = dask_series_values(values)
    elif hasattr(values, "dims") and hasattr(values, "coords"):
        values = values.data
    elif hasattr(values, "to_numpy") and not hasattr(values, "dask"):
        # Timestamps with a zone are no type of NumPy: this brings them to UTC.
        values = values.to_numpy("datetime64[us]") if kind == "M" else values.to_numpy()
    elif not hasattr(values, "dtype"):
        values = np.asarray(values)
    kind = np.dtype(values.dtype).kind
    if kind == "M":
        lazy = hasattr(values, "dask")
        return values.map_blocks(_seconds, dtype=np.float64) if lazy else _seconds(values)
    if kind not in "OUST":
        return values
    if name == "time":
        raise DataError(
            "time must be timestamps or seconds since 1970-01-01, got text: convert it, for "
            "example with pandas.to_datetime"
        )
    if hasattr(values, "dask"):
        raise DataError("groups of a Dask array must be numbers: give codes of the labels")
    return _codes(np.asarray(values))


def _seconds(times: Array) -> Array:
    times = np.asarray(times).astype("datetime64[us]")
    return np.where(np.isnat(times), np.nan, times.astype(np.int64) / 1e6)


def _codes(labels: Array) -> Array:
    """Codes in order of first occurrence; NaN where there is no label."""
    missing = (labels != labels) | (labels == None)  # noqa: E711 - elementwise
    _, first, inverse = np.unique(labels.astype(str), return_index=True, return_inverse=True)
    codes = np.argsort(np.argsort(first))[inverse.ravel()]
    return np.where(missing.ravel(), np.nan, codes)
