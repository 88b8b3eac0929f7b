"""``open_sample``: one border for stores, URLs, NumPy, Dask, pandas, Arrow and xarray."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from dask.delayed import Delayed, delayed

from cme_dask.chunked.dask_frames import dask_frame_arrays, is_dask_frame
from cme_dask.chunked.frames import (
    array_values,
    arrow_values,
    dataset_frame,
    frame_values,
    is_number,
    series_values,
)
from cme_dask.chunked.units import unit_values
from cme_dask.errors import DataError
from cme_dask.storage.arrow import arrow_table, is_arrow
from cme_dask.storage.columns import Columns
from cme_dask.storage.rows import ArraySource, RowSource, ZarrSource
from cme_dask.storage.sample import Sample, open_store
from cme_dask.storage.zarr_files import open_zarr

Array = Any

_LABELS_OR_TIMES = "OUTmM"


@dataclass(frozen=True, eq=False)
class DaskSource:
    """Rows of a two-dimensional Dask array; its tasks become part of the pass."""

    array: Any

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return int(self.array.shape[0]), int(self.array.shape[1])

    @property
    def chunk_rows(self) -> int | None:
        """Rows of the largest chunk."""
        return int(max(self.array.chunks[0]))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row once computed."""
        return self.shape[1] * int(self.array.dtype.itemsize)

    def read(self, start: int, stop: int) -> Array:
        """Rows [start, stop) as float64, computed now."""
        return np.asarray(self.array[start:stop].compute(), dtype=np.float64)

    def pick(self, positions: tuple[int, ...]) -> "DaskSource":
        """The same rows with the columns at these positions only."""
        return DaskSource(self.array[:, list(positions)])

    def delayed(self, start: int, stop: int) -> Delayed:
        """Rows [start, stop) as a source in memory, once computed."""
        rows = self.array[start:stop].rechunk((stop - start, -1))
        # Not optimised: tasks, and x and y, that need the same block must name it alike.
        block = rows.to_delayed(optimize_graph=False)[0, 0]
        return delayed(_computed, pure=False)(block, start, (stop - start, self.shape[1]))


def _computed(block: Array, start: int, shape: tuple[int, int]) -> ArraySource:
    """The block as a source; a Dask array may announce other shapes than it computes."""
    if np.shape(block) != shape:
        raise DataError(
            f"a Dask array computed shape {np.shape(block)} for rows from {start} on where it "
            f"announced {shape}: correct the chunks it declares"
        )
    return ArraySource(block, start)


def for_task(source: RowSource, start: int, stop: int, shares_memory: bool) -> Any:
    """What a task on rows [start, stop) is given to read from."""
    if isinstance(source, DaskSource):
        return source.delayed(start, stop)
    if isinstance(source, ArraySource) and not shares_memory:
        return ArraySource(source.read(start, stop), start)
    return source


def open_sample(
    x: Any,
    y: Any = None,
    *,
    weights: Any = None,
    group: Any = None,
    time: Any = None,
    x_columns: Sequence[str] | None = None,
    y_columns: Sequence[str] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Sample:
    """Rows (x_i, y_i) wherever they lie, without reading them.

    Parameters
    ----------
    x
        A sample store (path, fsspec URL or Zarr group) that holds both variables; or a table (a
        DataFrame of pandas, Dask or Polars, an Arrow table, an xarray Dataset) from which
        ``x_columns`` and ``y_columns`` are taken; or the rows of x: NumPy, Dask, Zarr or xarray
        array of shape (n, d) or (n,), a DataFrame or Series, or the path or URL of a Zarr array.
        Truth values become 0 and 1, text and categories become codes of labels. Of Dask
        DataFrames, the lengths of partitions and the labels of text columns are computed now.
    y
        Rows of y, likewise; None for stores and tables, or for one variable alone.
    weights
        Non-negative weights of the rows, shape (n,), or a column's name if ``x`` is a table.
    group, time
        What folds and hold-outs may keep together, shape (n,), or a column's name if ``x`` is a
        table: the group of each row (numbers or texts), its time (timestamps, or seconds since
        1970-01-01 UTC). See :meth:`Sample.fold_by` and :meth:`Sample.split`.
    x_columns, y_columns
        Columns to use, by name; default all of a store's.
    storage_options
        Passed on to fsspec with URLs.

    Returns
    -------
    Sample

    Raises
    ------
    DataError
        If shapes or columns do not fit; the message says what was expected.
    StoreError
        If a store is missing, damaged, unfinished or of a newer version.
    """
    x = _opened(x, storage_options)
    beside = {"weights": weights, "group": group, "time": time}
    beside = {role: value for role, value in beside.items() if value is not None}
    if isinstance(x, (Sample, zarr.Group)) and not (y is None and not beside):
        raise DataError("a sample holds y, weights, group and time itself: give it alone")
    if isinstance(x, Sample):
        return x.select(x_columns, y_columns)
    if isinstance(x, zarr.Group):
        return open_store(x, str(x.store)).select(x_columns, y_columns)
    if y is None and _is_table(x) and y_columns is not None:
        if x_columns is None:
            raise DataError("x_columns is needed beside y_columns to divide a table")
        beside = {role: _single(x, value) for role, value in beside.items()}
        x, y = _column_arrays(x, x_columns), _column_arrays(x, y_columns)
        x_columns = y_columns = None
    variables = {"x": x} if y is None else {"x": x, "y": _opened(y, storage_options)}
    beside = {role: _opened(value, storage_options) for role, value in beside.items()}
    frames = {
        name: value
        for name, value in (variables | beside).items()
        if is_dask_frame(value) and not _is_time(name, value)
    }
    lazy = dask_frame_arrays(frames) if frames else {}
    named = [
        _described(*lazy[name]) if name in lazy else _rows(name, value)
        for name, value in variables.items()
    ]
    sample = Sample(
        tuple(s for s, _ in named),
        tuple(c for _, c in named),
        **{role: _role(role, lazy[role][0] if role in lazy else v) for role, v in beside.items()},
    )
    return sample.select(x_columns, y_columns)


def _opened(value: Any, storage_options: dict[str, Any] | None) -> Any:
    if isinstance(value, (str, os.PathLike)):
        return open_zarr(value, storage_options)
    if type(value).__name__ == "LazyFrame" and hasattr(value, "collect"):
        raise DataError(
            "a LazyFrame of Polars has no rows yet: collect() it, or write it to Parquet and give "
            "a Dask DataFrame or a sample store of that"
        )
    return value


def _is_time(role: str, series: Any) -> bool:
    return role == "time" and getattr(getattr(series, "dtype", None), "kind", None) == "M"


def _described(array: Any, columns: Columns) -> tuple[RowSource, Columns]:
    return DaskSource(array), columns


def _role(role: str, value: Any) -> Any:
    return _rows(role, value if role == "weights" else unit_values(role, value))[0]


def _single(table: Any, value: Any) -> Any:
    """The column of this name of a table; what is no name is left as it is."""
    if not isinstance(value, str):
        return value
    column = _column_arrays(table, [value])
    if is_dask_frame(column):
        return column[column.columns[0]]
    if is_arrow(column):
        return column.column(0)
    return column.iloc[:, 0] if hasattr(column, "iloc") else column[:, 0]


def _is_table(value: Any) -> bool:
    return any(hasattr(value, name) for name in ("columns", "column_names", "data_vars"))


def _column_arrays(table: Any, wanted: Sequence[str]) -> Any:
    """The wanted columns of a DataFrame or Dataset, side by side; labels may be no text."""
    if is_arrow(table):
        table = arrow_table(table, "x0")
        present = list(table.column_names)
    else:
        present = list(table.columns if hasattr(table, "columns") else table.data_vars)
    names = wanted if isinstance(wanted, str) else [str(name) for name in wanted]
    positions = Columns(tuple(str(p) for p in present)).positions(names)
    if is_arrow(table):
        return table.select(list(positions))
    if hasattr(table, "columns"):
        return table.iloc[:, list(positions)]
    dims = {table[name].dims for name in wanted}
    if len(dims) != 1 or len(next(iter(dims))) != 1:
        raise DataError(
            f"columns of a Dataset must share one dimension, got {sorted(map(str, dims))}"
        )
    if not all(is_number(table[name].dtype) for name in wanted):
        return dataset_frame(table, list(wanted))
    return table[list(wanted)].to_dataarray("column").transpose(..., "column")


def _rows(name: str, value: Any) -> tuple[RowSource, Columns]:
    """Source and column names of one array-like of shape (n,) or (n, d)."""
    labels: list[str] | None = None
    if hasattr(value, "data_vars"):
        raise DataError(
            f"{name} is an xarray Dataset: name its columns with x_columns and y_columns, or give "
            "one of its arrays"
        )
    if is_arrow(value):
        return _labelled(arrow_values(name, value))
    if hasattr(value, "columns") and hasattr(value, "to_numpy"):  # pandas DataFrame
        # Beside other numbers truth values would make a table of objects.
        truths = sum(dtype.kind == "b" for dtype in value.dtypes)
        if not all(map(is_number, value.dtypes)) or 0 < truths < len(value.dtypes):
            return _labelled(frame_values(name, value))
        labels = [str(label) for label in value.columns]
        value = value.to_numpy()
    elif hasattr(value, "dims") and hasattr(value, "coords"):  # xarray DataArray
        labels = _xarray_labels(value)
        if value.ndim in (1, 2) and value.dtype.kind in _LABELS_OR_TIMES:
            return _labelled(array_values(name, value, labels))
        value = _xarray_data(value)
    elif hasattr(value, "to_numpy") and not hasattr(value, "dask"):  # pandas Series
        if hasattr(value, "to_frame") and not is_number(value.dtype):
            return _labelled(series_values(name, value))
        labels = None if getattr(value, "name", None) is None else [str(value.name)]
        value = value.to_numpy()
    if not hasattr(value, "shape"):
        value = _as_array(name, value)
    if not hasattr(value, "dtype"):
        raise DataError(f"{name} must be an array or a table, got {type(value).__name__}")
    if len(value.shape) not in (1, 2):
        raise DataError(f"{name} must have shape (n,) or (n, d), got {tuple(value.shape)}")
    if np.dtype(value.dtype).kind == "c":
        raise DataError(
            f"Complex data not supported: {name} must be numeric, got values of type {value.dtype}"
        )
    if np.dtype(value.dtype).kind not in "fiub":
        raise DataError(f"{name} must be numeric, got values of type {value.dtype}")
    source = _source(name, value)
    return source, Columns.default(name, source.shape[1]) if labels is None else Columns(
        tuple(labels)
    )


def _labelled(coded: tuple[Array, Columns]) -> tuple[RowSource, Columns]:
    values, columns = coded
    return ArraySource(values), columns


def _source(name: str, value: Any) -> RowSource:
    if isinstance(value, zarr.Array):
        return ZarrSource(value)
    if hasattr(value, "dask"):
        if any(np.isnan(c) for axis in value.chunks for c in axis):
            raise DataError(
                f"the chunk sizes of {name} are unknown: call compute_chunk_sizes() on it first"
            )
        return DaskSource(value if value.ndim == 2 else value[:, None])
    if isinstance(value, np.ma.MaskedArray):  # a masked value is a missing one
        value = np.ma.filled(value.astype(np.float64), np.nan)
    array = _as_array(name, value)
    return ArraySource(array if array.ndim == 2 else array[:, None])


def _as_array(name: str, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} must be an array of numbers: {error}") from error
    if array.dtype == object:
        raise DataError(
            f"{name} must be a dense array of numbers (no objects, nothing sparse), "
            f"got {type(value).__name__}"
        )
    return array


def _xarray_labels(value: Any) -> list[str] | None:
    if len(value.dims) == 1:
        return None if value.name is None else [str(value.name)]
    # Asked for a dimension without coordinates, xarray would count it.
    if value.dims[1] not in value.coords:
        return None
    return [str(label) for label in value.coords[value.dims[1]].values]


def _xarray_data(value: Any) -> Any:
    """The array inside, lazily if it is chunked on disk."""
    if value.chunks is None and "chunks" in value.encoding:
        value = value.chunk()
    return value.data
