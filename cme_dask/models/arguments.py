"""Arguments of queries on laws: checked, and brought to one shape."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cme_dask.errors import DataError

Array = Any


def check_levels(q: Any) -> tuple[Array, bool]:
    """Levels in [0, 1], shape (k,), and whether there was a single number."""
    try:
        levels = np.asarray(q, dtype=np.float64)
    except (TypeError, ValueError):
        levels = np.array(np.nan)
    if levels.ndim > 1 or not ((levels >= 0.0) & (levels <= 1.0)).all():
        raise DataError(f"levels must be numbers from 0 to 1, got {q!r}")
    return np.atleast_1d(levels), levels.ndim == 0


def check_thresholds(t: Any, d: int, several: bool, paired: int | None) -> tuple[Array, bool]:
    """Thresholds, shape (k, d), and whether there was a single one.

    Parameters
    ----------
    t
        A number or shape (k,) for one column; of ``several`` shape (d,) or (k, d).
    d
        Number of columns.
    several
        Whether each threshold is a row of numbers.
    paired
        Number of points with one threshold each; None if each goes with all points.
    """
    try:
        values = np.asarray(t, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"thresholds must be numbers: {error}") from error
    # Shape of one threshold, and of as many as are expected.
    one = (d,) if several else ()
    single = values.ndim == len(one)
    count = values.shape[0] if values.ndim == len(one) + 1 else 1
    fits = (
        values.shape in (one, (count, *one)) if paired is None else values.shape == (paired, *one)
    )
    if not fits:
        expected = f"({d},) or (k, {d})" if several else "() or (k,)"
        if paired is not None:
            expected = f"({paired}, {d})" if several else f"({paired},)"
        raise DataError(f"thresholds must have shape {expected}, got {values.shape}")
    if np.isnan(values).any():
        raise DataError(f"thresholds must not be NaN, {int(np.isnan(values).sum())} are")
    return values.reshape(count if paired is None else paired, d), single


def function_values(
    function: Callable[[Array], Array], rows: Array, name: str, truth: bool
) -> Array:
    """Values of a user's function at rows, shape (b, 1).

    Raises
    ------
    DataError
        If it fails, or its values have another shape, are not finite, or no truth values where
        ``truth`` asks for these.
    """
    try:
        values = np.asarray(function(rows), dtype=np.float64)
    except Exception as error:
        raise DataError(f"function {name!r} failed: {type(error).__name__}: {error}") from error
    if values.shape != (len(rows),):
        raise DataError(
            f"function {name!r} must return shape ({len(rows)},) for rows of shape {rows.shape}, "
            f"it returned {values.shape}"
        )
    if not np.isfinite(values).all():
        raise DataError(
            f"function {name!r} returned {int((~np.isfinite(values)).sum())} values "
            "that are NaN or infinite"
        )
    if truth and not ((values == 0.0) | (values == 1.0)).all():
        raise DataError(f"event {name!r} must be true or false at each row: ask for expect(f)")
    return values[:, None]


def name_of(f: Any) -> str:
    """What a function is called in messages and labels."""
    return f if isinstance(f, str) else str(getattr(f, "__name__", repr(f)))
