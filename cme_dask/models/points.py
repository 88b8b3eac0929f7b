"""Query points and arguments of queries from arrays and tables, and answers with their labels."""

import importlib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import zarr
from numpy.typing import NDArray

from cme_dask.data.arrow import (
    arrow_column,
    arrow_table,
    coordinate_names,
    has_columns,
    holds_times,
    is_arrow,
    is_data_array,
    is_dataset,
    recorded_units,
    unmasked,
)
from cme_dask.data.columns import Columns, check_points, is_dask_frame
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, UnseenCategoryWarning, warn
from cme_dask.kernels import Kernel
from cme_dask.kernels.base import is_a
from cme_dask.numerics.basis import LinearBasis, NewtonBasis, StackedBasis

# Points that lie out of core, in Dask arrays and stores: they are answered by Dask arrays


class DaskCollection(Protocol):
    """A Dask array or DataFrame, recognised by its graph: no module of Dask is imported for it."""

    def __dask_graph__(self) -> Any:
        """Tasks."""


OutOfCore: TypeAlias = (
    str | os.PathLike[str] | Sample | zarr.Array[Any] | zarr.Group | DaskCollection
)
"""Points out of core: a Dask or Zarr array, a store by path or URL, a ``Sample``."""


def is_out_of_core(values: Any) -> bool:
    """Whether points lie in a Dask array, a Zarr array or a store, by path, URL or ``Sample``."""
    if isinstance(values, (str, zarr.Array, zarr.Group, Sample)):
        return True
    if hasattr(values, "__fspath__"):
        return True
    # Objects of xarray have the method, too: without chunks it returns nothing.
    graph = getattr(values, "__dask_graph__", None)
    return graph is not None and not isinstance(values, type) and graph() is not None


def lazy_answers() -> Any:
    """The module that makes lazy answers, which needs Dask.

    It is imported by its name when the first points out of core are given, as public names of the
    package are, so that queries in memory need no Dask.
    """
    return importlib.import_module("cme_dask.passes.lazy_laws")


# Answers with the labels of their points: pandas' index, xarray's coordinates


Array = Any
FloatArray: TypeAlias = NDArray[np.float64]
"""Answers at points; points of pandas or xarray give a Series, DataFrame or DataArray instead."""

Axis = tuple[str, Sequence[Any]]
"""Name and labels of an axis."""


@dataclass(frozen=True, eq=False)
class Labels:
    """How answers at some points are labelled.

    Attributes
    ----------
    index
        pandas' index of the points, if they came with one.
    rows
        Name and coordinates of xarray's dimension of the points, if they came with one.
    """

    index: Any = None
    rows: tuple[str, Any] | None = None

    @classmethod
    def of(cls, values: Any, rows: int, columns: Columns) -> "Labels":
        """Those of so many points of these columns as users give them; none of arrays and lists."""
        one_row = getattr(values, "ndim", 2) == 1 and len(values) != rows
        # What is not imported can't have made them.
        pandas, xarray = sys.modules.get("pandas"), sys.modules.get("xarray")
        if pandas is not None and isinstance(values, (pandas.DataFrame, pandas.Series)):
            return cls(index=[values.name] if one_row else values.index)
        if xarray is not None and isinstance(values, (xarray.DataArray, xarray.Dataset)):
            # A Dataset may hold variables of other dimensions beside the columns.
            is_table = isinstance(values, xarray.Dataset)
            own = values.get(columns.names[0], values) if is_table else values
            name = next(iter(own.dims), None)
            if name is not None and not one_row:
                return cls(rows=(str(name), values.coords.get(name)))
        return cls()

    def wrap(self, values: Array, name: str, *axes: Axis) -> FloatArray:
        """Answers with labels.

        Parameters
        ----------
        values
            Shape (n, ...), points first.
        name
            What they are.
        axes
            The axes after the first.

        Returns
        -------
        the array itself; or a Series, or a DataFrame with a level of columns for each axis; or a
        DataArray
        """
        if self.rows is not None:
            return cast(FloatArray, self._data_array(values, name, axes))
        if self.index is None:
            return cast(FloatArray, values)
        return cast(FloatArray, self._table(values, name, axes))

    def draws(self, values: Array, columns: Columns, *axes: Axis) -> FloatArray:
        """Draws: as :meth:`wrap`, with the labels of columns that hold labels instead of codes.

        pandas' answers hold categorical columns, xarray's are then arrays of objects; NumPy's hold
        the codes, which stand for ``columns.categories``.

        Parameters
        ----------
        values
            Shape (n, ...); of several columns, the last axis is theirs.
        columns
            Of the variable.
        axes
            The axes after the first.
        """
        if not columns.categories or (self.rows is None and self.index is None):
            return self.wrap(values, "sample", *axes)
        labels = [columns.categories.get(name) for name in columns.names]
        if self.rows is not None:
            drawn = values.reshape(len(values), -1, len(labels)).astype(object)
            for j, each in enumerate(labels):
                if each is not None:
                    drawn[:, :, j] = np.array(each, dtype=object)[drawn[:, :, j].astype(np.intp)]
            return self.wrap(drawn.reshape(values.shape), "sample", *axes)
        return cast(FloatArray, self._table(values, "sample", axes, labels))

    def _table(
        self,
        values: Array,
        name: str,
        axes: Sequence[Axis],
        labels: Sequence[Sequence[str] | None] = (None,),
    ) -> Any:
        """A Series or a DataFrame, its columns by turns with these labels instead of codes."""
        import pandas as pd

        flat = np.asarray(values).reshape(len(values), math.prod(np.shape(values)[1:]))
        if all(each is None for each in labels):
            table = pd.DataFrame(flat, index=self.index)
        else:
            parts: dict[int, Any] = {}
            for k, part in enumerate(flat.T):
                each = labels[k % len(labels)]
                parts[k] = (
                    part
                    if each is None
                    else pd.Categorical.from_codes(part.astype(np.int64), pd.Index(list(each)))
                )
            table = pd.DataFrame(parts, index=self.index)
        if not axes:
            return table[0].rename(name)
        names = [axis for axis, _ in axes]
        table.columns = (
            pd.Index(list(axes[0][1]), name=names[0])
            if len(axes) == 1
            else pd.MultiIndex.from_product([list(each) for _, each in axes], names=names)
        )
        return table

    def _data_array(self, values: Array, name: str, axes: Sequence[Axis]) -> Any:
        import xarray as xr

        assert self.rows is not None
        row, along = self.rows
        if row in dict(axes):
            raise DataError(
                f"the dimension {row!r} of the points is an axis of this answer, too: rename that "
                f"of the points, such as points.rename({{{row!r}: 'row'}})"
            )
        coords = {axis: list(labels) for axis, labels in axes}
        if along is not None:
            coords[row] = along.values
        return xr.DataArray(values, dims=[row, *(a for a, _ in axes)], coords=coords, name=name)


# Query points from whatever users hold


Unseen = dict[str, dict[str, int]]
"""Rows by unseen label, by column."""

UNSEEN = -1.0
"""A code that no label has."""
_MISSING = {"NoneType", "NAType", "NaTType"}  # of Python and of pandas, besides NaN
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?", re.ASCII)


class QueriedVariable(Protocol):
    """What query points are checked against."""

    @property
    def columns(self) -> Columns:
        """Columns of the points."""

    @property
    def basis(self) -> LinearBasis | StackedBasis | NewtonBasis:
        """Functions of the points: their kernel pools labels or does not."""


def gathered(values: Any) -> Any:
    """A Dask DataFrame or Series as one of pandas, computed now; other values as they are.

    NumPy would make an array of it, which has no names of columns.
    """
    return values.compute() if is_dask_frame(values) else values


def query_points(
    values: Any,
    variable: QueriedVariable | Columns,
    name: str,
    *,
    missing: bool = False,
    observed: bool = False,
) -> Array:
    """Query points as float64 of shape (n, d): arrays, or tables that hold the columns by name.

    Missing values of columns that the fit filled in are filled in here, too. Tables are those of
    pandas, Dask, Arrow and Polars, dicts of columns, and arrays of xarray whose columns have names.
    Of several columns, a Series of pandas is one row, by name. Labels of categorical columns become
    codes. A numeric array holds codes; in tables and in lists of rows, a number is a label where
    labels of the column are numbers, and a code elsewhere.

    Parameters
    ----------
    values
        The points.
    variable
        The variable, or a model of one: its kernel tells which columns take labels that the fit has
        not seen. Columns alone take none.
    name
        What messages call the points.
    missing
        Whether values may be missing: they are NaN.
    observed
        Whether these are values that answers are compared with: an unseen label is none of those
        that were predicted, also where the kernel pools.

    Raises
    ------
    DataError
        On a wrong number of columns, unknown columns, times, NaN or infinity, or unseen labels that
        the kernel doesn't pool.

    Warns
    -----
    UnseenCategoryWarning
        On unseen labels that the kernel pools, once for all.
    """
    columns = given = variable if isinstance(variable, Columns) else variable.columns
    if columns.imputation is not None:
        given = columns.given
    names = given.names
    parts = None
    if type(values) is not np.ndarray:
        values = gathered(unmasked(values))
        given.check_units(Columns(names, recorded_units(values, names)))
        parts = _table_columns(values, given, name)
    if parts is None:  # rows: numbers or, with labels among them, objects
        try:
            own = np.asarray(values).dtype
            numeric = not given.categories or (own.kind in "biuf" and _holds_codes(values))
            points = np.array(values, dtype=np.float64 if numeric else object)
        except (TypeError, ValueError) as error:
            raise DataError(f"{name} must be numeric: {error}") from error
        if own.kind in "mM":
            raise DataError(f"{name} must be numeric, got values of type {own}")
        shape = points.shape
        if points.ndim < 2:
            points = points.reshape(-1, 1) if len(names) == 1 else points.reshape(1, -1)
        if points.ndim == 2 and points.shape[1] == len(columns.names):  # with indicators
            given, names = columns, columns.names
        if points.ndim != 2 or points.shape[1] != len(names):
            raise DataError(
                f"{name} must have shape (n, {len(names)}) for the columns {', '.join(names)}, "
                f"got {shape}"
            )
        if not given.categories:
            if columns.imputation is not None:
                points = columns.complete(points)
            if not np.isfinite(points).all():
                check_points(points, columns, missing=missing)
            return np.ascontiguousarray(points)
        parts = list(points.T)
    points = np.empty((len(parts[0]), len(names)))
    unseen: Unseen = {}
    for j, (key, part) in enumerate(zip(names, parts, strict=True)):
        labels = columns.categories.get(key)
        if labels is None:
            points[:, j] = _numbers(part, key, name)
        else:
            points[:, j], unseen[key] = _codes(part, labels, f"column {key!r} of {name}")
    if columns.imputation is not None:
        points = columns.complete(points)
    check_points(points, columns, missing=missing)
    kernel = None
    if not (observed or isinstance(variable, Columns)):
        kernel = variable.basis.newton.kernel
    _tell(unseen, columns, kernel)
    return points


def label_codes(values: Any, columns: Columns, *, some: bool = False) -> Array:
    """Codes of observed labels of one column as users have them, shape (n,); NaN where missing.

    A number is a label where labels of the column are numbers, in arrays as well, and a code
    elsewhere.

    Parameters
    ----------
    values
        Labels, shape (n,) or (n, 1).
    columns
        The column.
    some
        Whether it is enough that some labels are known: others have the code :data:`UNSEEN`.

    Raises
    ------
    DataError
        On other shapes, or labels that the column does not have.
    """
    (key,) = columns.names
    labels = np.asarray(unmasked(values), dtype=object)
    if labels.ndim != 1 and labels.shape[1:] != (1,):
        raise DataError(f"labels must have shape (n,), got {labels.shape}")
    codes, unseen = _codes(labels.ravel(), columns.categories[key], f"column {key!r}")
    if unseen and not (some and (codes >= 0.0).any()):
        raise _unknown(key, unseen, columns)
    return codes


def _table_columns(values: Any, columns: Columns, name: str) -> Sequence[Array] | None:
    """The columns of a table, equally long, those of labels as objects; None for other values."""
    names = columns.names
    if is_arrow(values) and (has_columns(values) or len(names) == 1):
        values = _arrow_columns(values, columns, name)
    if isinstance(values, Mapping):
        positions, held = Columns(tuple(map(str, values))).positions_of(columns, name), [*values]
        parts = [
            np.atleast_1d(_cells(values[held[place]], key in columns.categories))
            for key, place in zip(names, positions, strict=True)
        ]
        if any(part.shape != parts[0].shape or part.ndim > 1 for part in parts):
            shapes = ", ".join(f"{k!r} {p.shape}" for k, p in zip(names, parts, strict=True))
            raise DataError(f"the columns of {name} must be equally long lists, got {shapes}")
        return parts
    if is_dataset(values) or is_data_array(values):
        return _array_columns(values, columns, name)
    if hasattr(values, "to_frame") and hasattr(values, "iloc"):  # a Series of pandas
        values = values.to_frame(names[0]) if len(names) == 1 else values.to_frame().T
    if hasattr(values, "columns") and hasattr(values, "to_numpy"):
        positions = Columns(tuple(map(str, values.columns))).positions_of(columns, name)
        series = [values.iloc[:, p] for p in positions]
        return [
            each.to_numpy(object, na_value=np.nan) if key in columns.categories else each
            for key, each in zip(names, series, strict=True)
        ]
    return None


def _holds_codes(rows: Any) -> bool:
    """Whether numbers are codes of labels, as in arrays and in lists of them."""
    if isinstance(rows, (list, tuple)):
        return any(isinstance(row, np.ndarray) for row in rows)
    return hasattr(rows, "__array__")


def _cells(values: Any, labelled: bool) -> Array:
    """A column of a dict: as objects if it holds labels, or has no type of its own."""
    own = not labelled and hasattr(values, "dtype")
    return np.array(unmasked(values), dtype=None if own else object)


def _arrow_columns(values: Any, columns: Columns, name: str) -> dict[str, Any]:
    """Those columns of a table of Arrow or Polars that the variable has, by name.

    A column alone is that of a variable of one, whatever it is called.
    """
    table = arrow_table(values, columns.names[0])
    if not has_columns(values):
        table = table.rename_columns(list(columns.names))
    result: dict[str, Any] = {}
    for place, key in enumerate(map(str, table.column_names)):
        column = table.column(place)
        if key in columns.names and key not in columns.categories:
            numbers, texts = arrow_column(column, key, name)
            result[key] = numbers if texts is None else column.to_pylist()
        else:
            result[key] = column.to_pylist() if key in columns.names else column
    return result


def _array_columns(values: Any, columns: Columns, name: str) -> Sequence[Array] | None:
    """Those columns of an array of xarray that the variable has, by name; None without names.

    Of several columns, an array of one dimension is one row.
    """
    if values.ndim not in (1, 2) or values.ndim == len(columns.names) == 1:
        return None
    names = coordinate_names(values)
    if names is None:
        return None
    positions = Columns(tuple(names)).positions_of(columns, name)
    return [np.atleast_2d(values.values)[:, place] for place in positions]


def _numbers(part: Any, key: str, name: str) -> Array:
    """A column of numbers, NaN where a value is missing."""
    if part.dtype.kind in "mM":
        raise holds_times(key, name, part.dtype)
    try:
        if hasattr(part, "to_numpy"):
            part = part.to_numpy(np.float64, na_value=np.nan)
        return np.asarray(part, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"column {key!r} of {name} must be numeric: {error}") from error


def _codes(part: Array, labels: Sequence[str], where: str) -> tuple[Array, dict[str, int]]:
    """Codes of a column's labels or codes, and the rows of each that there is no code for."""
    values = part.tolist()
    known = {label: float(code) for code, label in enumerate(labels)}
    # Numbers are codes in arrays, and where they can be no labels.
    texts = labels if part.dtype == object else ()
    numbers = {_number(text): known[text] for text in texts if _NUMBER.fullmatch(text)}
    counted = {code: code for code in known.values()}
    try:
        code_of = dict.fromkeys(values, UNSEEN)
    except TypeError as error:
        raise DataError(f"{where} must hold labels: {error}") from error
    for value in code_of:
        if type(value).__name__ in _MISSING or value != value:
            code_of[value] = np.nan
        elif is_a(value, Real) and not numbers:
            code_of[value] = counted.get(value, UNSEEN)
        else:  # 1 may be written "1" or "1.0", and True "True" or "true"
            alike = known.get(_label(value), numbers.get(value, UNSEEN))
            code_of[value] = known.get(str(value), alike)
    codes = np.fromiter(map(code_of.__getitem__, values), np.float64, len(values))
    if UNSEEN not in code_of.values():
        return codes, {}
    lost = Counter(value for value in values if code_of[value] == UNSEEN)
    return codes, {_label(value): count for value, count in lost.items()}


def _label(value: Any) -> str:
    """A value as the label that a table of text would hold."""
    if isinstance(value, (bool, np.bool_)):
        return str(value).lower()
    is_whole = isinstance(value, Integral) or (
        isinstance(value, Real) and float(value).is_integer()
    )
    return str(int(value)) if is_whole else str(value)


def _number(label: str) -> float:
    """The number that a text is, integers exactly."""
    return int(label) if label.lstrip("-").isdecimal() else float(label)


def _tell(unseen: Unseen, columns: Columns, kernel: Kernel | None) -> None:
    """Warn of unseen labels that a kernel pools, and refuse others."""
    result = {key: counts for key, counts in unseen.items() if counts}
    for key, counts in result.items():
        if kernel is None or not kernel.pools(columns.names.index(key)):
            raise _unknown(key, counts, columns)
    if result:
        each = "; ".join(f"column {key!r} {_listed(counts)}" for key, counts in result.items())
        warn(
            f"labels that the fit has not seen are answered as its pooled rare ones: {each}",
            UnseenCategoryWarning,
        )


def _unknown(key: str, counts: Mapping[str, int], columns: Columns) -> DataError:
    return DataError(
        f"column {key!r} has the unknown {_listed(counts)}: there are {columns.labels(key)}"
    )


def _listed(counts: Mapping[str, int]) -> str:
    shown = [
        f"{label!r} ({count:,} row{'s' * (count > 1)})"
        for label, count in list(counts.items())[:10]
    ]
    return ", ".join(shown) + (f" and {len(counts) - 10:,} more" if len(counts) > 10 else "")


# Other arguments of queries: levels, thresholds and functions


def check_levels(q: Any) -> tuple[Array, bool]:
    """Levels in [0, 1], shape (k,), and whether there was a single number."""
    try:
        levels = np.asarray(q, dtype=np.float64)
    except (TypeError, ValueError):
        levels = np.array(np.nan)
    if levels.ndim > 1 or not ((levels >= 0.0) & (levels <= 1.0)).all():
        raise DataError(f"levels must be numbers from 0 to 1, got {q!r}")
    return np.atleast_1d(levels), levels.ndim == 0


def threshold_values(t: Any, columns: Columns) -> Array:
    """Thresholds as float64, by name where they come in a table; those of one column in shape (k,).

    Raises
    ------
    DataError
        If they are no numbers, or a table in other units than the columns.
    """
    t = gathered(unmasked(t))
    columns.check_units(Columns(columns.names, recorded_units(t, columns.names)))
    try:
        alone = len(columns.names) == 1
        parts = None if alone and getattr(t, "ndim", 2) == 1 else _table_columns(t, columns, "t")
        if parts is None:
            values = np.asarray(t, dtype=np.float64)
            return values[:, 0] if alone and values.ndim == 2 and values.shape[1] == 1 else values
        numbers = [_numbers(part, k, "t") for k, part in zip(columns.names, parts, strict=True)]
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"thresholds must be numbers: {error}") from error
    if alone:
        return numbers[0]
    rows = np.stack(numbers, axis=1)
    return rows[0] if getattr(t, "ndim", 2) == 1 else rows


def check_thresholds(t: Any, columns: Columns, paired: int | None) -> tuple[Array, bool]:
    """Thresholds, shape (k, d), and whether there was a single one.

    Parameters
    ----------
    t
        A number, shape (k,) or (k, 1) for one column; of several shape (d,) or (k, d); or a table
        with the columns by name.
    columns
        The columns.
    paired
        Number of points with one threshold each; None if each goes with all points.
    """
    values, d = threshold_values(t, columns), len(columns.names)
    # Shape of one threshold, and of as many as are expected.
    one = (d,) if d > 1 else ()
    single = values.ndim == len(one)
    count = values.shape[0] if values.ndim == len(one) + 1 else 1
    fits = (
        values.shape in (one, (count, *one)) if paired is None else values.shape == (paired, *one)
    )
    if not fits:
        expected = f"({d},) or (k, {d})" if d > 1 else "() or (k,)"
        if paired is not None:
            expected = f"({paired}, {d})" if d > 1 else f"({paired},)"
        raise DataError(f"thresholds must have shape {expected}, got {values.shape}")
    if np.isnan(values).any():
        raise DataError(f"thresholds must not be NaN, {int(np.isnan(values).sum())} are")
    return values.reshape(count if paired is None else paired, d), single


def function_values(
    function: Callable[[Array], Array],
    rows: Array,
    name: str,
    *,
    truth: bool = False,
    vector: bool = False,
) -> Array:
    """Values of a user's function at rows, shape (b,), or (b, d) where ``vector`` admits these.

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
    n = len(rows)
    if values.shape != (n,) and not (vector and values.ndim == 2 and len(values) == n):
        shapes = f"({n},) or ({n}, d)" if vector else f"({n},)"
        raise DataError(
            f"function {name!r} must return shape {shapes} for rows of shape {rows.shape}, "
            f"it returned {values.shape}"
        )
    if not np.isfinite(values).all():
        raise DataError(
            f"function {name!r} returned {int((~np.isfinite(values)).sum())} values "
            "that are NaN or infinite"
        )
    if truth and not ((values == 0.0) | (values == 1.0)).all():
        raise no_event(name)
    return values


def no_event(name: str) -> DataError:
    """The error for the probability of a function that is no event."""
    return DataError(f"event {name!r} must be true or false at each row: ask for expect(f)")


def name_of(f: Any) -> str:
    """What a function is called in messages and labels."""
    return f if isinstance(f, str) else str(getattr(f, "__name__", repr(f)))
