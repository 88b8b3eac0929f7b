"""Arguments of scores: numbers with one row per observation, in memory or in Dask chunks."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cme_dask.data.arrow import unmasked
from cme_dask.data.columns import check_weights
from cme_dask.errors import DataError, ZeroWeights

Array = Any

_EXACT = 1e-9  # of sums of float64
_ROUNDINGS = 64  # by which sums of shorter numbers may be wrong
_MOST = 2e-3  # of any type


def is_lazy(values: Any) -> bool:
    """Whether values lie in a Dask array, or in an object of xarray that holds one."""
    graph = getattr(values, "__dask_graph__", None)
    # Objects of xarray have the method, too: without chunks it returns nothing.
    return graph is not None and not isinstance(values, type) and graph() is not None


def numbers(name: str, values: Any) -> Array:
    """Values as float64, in memory or lazy, NaN where masked; DataError if they are no numbers."""
    if is_lazy(values):
        return values.data if type(values).__module__.split(".")[0] == "xarray" else values
    try:
        return np.asarray(unmasked(values), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: numbers expected, got {type(values).__name__}") from error


def finite(name: str, values: Any) -> Array:
    """Values in memory as float64; DataError on NaN and infinity too."""
    array = np.asarray(numbers(name, values), dtype=np.float64)
    if not np.isfinite(array).all():
        raise DataError(f"{name}: NaN or infinity")
    return array


def without_nan(name: str, values: Any) -> Array:
    """Values in memory as float64; DataError on NaN."""
    array = np.asarray(numbers(name, values), dtype=np.float64)
    if np.isnan(array).any():
        raise DataError(f"{name}: NaN")
    return array


def row_weights(weights: Any, rows: int) -> Array:
    """Weights of so many rows in memory, shape (rows,); without any, each is one.

    Raises
    ------
    DataError
        If they have another shape, are no finite numbers, or are negative or all zero.
    """
    w = np.ones(rows) if weights is None else np.asarray(numbers("weights", weights), np.float64)
    if w.shape != (rows,):
        raise DataError(f"weights have one value for each of {rows} rows, got shape {w.shape}")
    check_weights(w, 0)
    if not w.any():
        raise ZeroWeights() if rows else DataError("there are no rows to score")
    return w


def sum_tolerance(values: Any) -> float:
    """How far probabilities may miss a sum of one: by the rounding of the type they came in."""
    lazy = is_lazy(values)
    kind = np.dtype(getattr(values, "dtype", float)) if lazy else np.asarray(values).dtype
    rounding = float(np.finfo(kind).eps) if kind.kind == "f" else 0.0
    return min(max(_EXACT, _ROUNDINGS * rounding), _MOST)


def columns(values: Array) -> Array:
    """Rows of one number each as rows of one column."""
    return values[:, None] if values.ndim == 1 else values


def between_zero_and_one(name: str, values: Any) -> Array:
    """Levels in (0, 1), shape (k,) or ()."""
    levels = finite(name, values)
    if levels.ndim > 1 or not ((levels > 0.0) & (levels < 1.0)).all():
        raise DataError(f"{name} must lie between 0 and 1, exclusively, got {values}")
    return levels


def rowwise(
    function: Callable[..., Array],
    *arrays: Array,
    name: str,
    tail: Sequence[int] = (),
    numbered: bool = False,
    summed: bool = False,
) -> Array:
    """``function`` of matching rows, at once, or lazily for each chunk if an array is lazy.

    Parameters
    ----------
    function
        Takes rows (b, ...) of each array, and returns a result of shape (b,) + tail.
    arrays
        Of as many rows.
    name
        Of the tasks on the dashboard.
    tail
        Shape of the result at one row.
    numbered
        Whether the function takes the numbers of the rows as its last argument.
    summed
        Whether it returns sums over its rows, of shape (1,) + tail: these are added.
    """
    if any(map(is_lazy, arrays)):
        # By its name, as public names of the package are loaded: arrays in memory need no Dask.
        lazily = importlib.import_module("cme_dask.passes.lazy_scores").map_matching_rows
        return lazily(
            function, arrays, tuple(tail), numbered=numbered, summed=summed, name=f"score-{name}"
        )
    places = (np.arange(len(arrays[0])),) if numbered else ()
    result = function(*arrays, *places)
    return result.sum(axis=0) if summed else result
