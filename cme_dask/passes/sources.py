"""``open_sample``: one border for stores, URLs, NumPy, Dask, pandas, Arrow and xarray."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import dask
import numpy as np
import zarr
from dask.delayed import Delayed, delayed

from cme_dask.data.arrow import (
    array_values,
    arrow_table,
    arrow_values,
    coordinate_names,
    dataset_frame,
    frame_values,
    is_arrow,
    is_data_array,
    is_dataset,
    is_number,
    named_by_text,
    recorded_units,
    series_values,
    unmasked,
)
from cme_dask.data.columns import Columns, is_dask_frame
from cme_dask.data.sample import Sample, open_store
from cme_dask.data.sources import ArraySource, RowFunction, RowSource, ZarrSource, applied
from cme_dask.data.store import open_zarr
from cme_dask.errors import DataError
from cme_dask.numerics.folds import EXACT
from cme_dask.numerics.labels import check_label_types, missing_labels

# Dask DataFrames and Series as Dask arrays of known chunks, without gathering rows


Array = Any

_MOST_LABELS = 10_000  # of one column


@dataclass(frozen=True)
class _Partition:
    """What must be known of one partition before its rows are read: rows, labels by column."""

    rows: int
    labels: dict[str, tuple[str, ...]]


def dask_frame_arrays(frames: dict[str, Any]) -> dict[str, tuple[Array, Columns]]:
    """Dask DataFrames and Series as lazy float64 arrays (n, d), with their columns.

    Lengths of partitions and labels of text columns are not known before the partitions are: they
    are counted for all frames together, in one computation that keeps no rows. Codes of labels are
    those of the categories in their order, or of text in the order of first occurrence.

    Parameters
    ----------
    frames
        By the names that messages call them.

    Raises
    ------
    DataError
        If a column holds times or other objects, or more than 10,000 labels.
    """
    names = {name: _names(name, frame) for name, frame in frames.items()}
    parts = {name: frame.to_delayed() for name, frame in frames.items()}
    described = delayed(_described)
    result = dask.compute(
        *([described(name, part, names[name]) for part in each] for name, each in parts.items())
    )
    return {
        name: _array(name, names[name], parts[name], each)
        for name, each in zip(parts, result, strict=True)
    }


def dask_series_values(series: Any) -> Array:
    """A Dask Series as a lazy array of known chunks in its own type; text as objects.

    Raises
    ------
    DataError
        If it is a DataFrame of several columns.
    """
    if series.ndim == 2:
        if len(series.columns) != 1:
            raise DataError(f"one column was expected, got {len(series.columns)}")
        series = series[series.columns[0]]
    if series.dtype.kind in "OUT" or hasattr(series.dtype, "categories"):
        series = series.astype(object)
    return series.to_dask_array(lengths=True)


def _names(name: str, frame: Any) -> tuple[str, ...]:
    if frame.ndim == 2:
        return tuple(map(str, frame.columns))
    return (f"{name}0" if frame.name is None else str(frame.name),)


def _described(name: str, part: Any, names: tuple[str, ...]) -> _Partition:
    _, columns = frame_values(name, _frame(part, names))
    return _Partition(len(part), columns.categories)


def _frame(part: Any, names: tuple[str, ...]) -> Any:
    """A partition as a DataFrame, be it one of a Series."""
    return part if part.ndim == 2 else part.to_frame(names[0])


def _array(
    name: str, names: tuple[str, ...], parts: Sequence[Delayed], described: Sequence[_Partition]
) -> tuple[Array, Columns]:
    import dask.array as da  # slow to import, and few fits need it

    categories: dict[str, tuple[str, ...]] = {}
    for part in described:
        for column, labels in part.labels.items():
            categories[column] = tuple(dict.fromkeys((*categories.get(column, ()), *labels)))
            if len(categories[column]) > _MOST_LABELS:
                raise DataError(
                    f"column {column!r} of {name} has more than {_MOST_LABELS:,} different labels: "
                    "convert it to numbers, or leave it out"
                )
    columns = Columns(names, categories=categories)
    coded = delayed(_coded)
    blocks = [
        da.from_delayed(coded(name, part, columns), (info.rows, len(names)), dtype=np.float64)
        for part, info in zip(parts, described, strict=True)
        if info.rows
    ]
    if not blocks:
        return da.zeros((0, len(names))), columns
    return da.concatenate(blocks), columns


def _coded(name: str, part: Any, columns: Columns) -> Array:
    """The values of a partition, with codes of the labels of the whole frame."""
    values, result = frame_values(name, _frame(part, columns.names))
    for column, labels in result.categories.items():
        place, whole = columns.names.index(column), columns.categories[column]
        if labels == whole[: len(labels)]:
            continue
        number = {label: float(code) for code, label in enumerate(whole)}
        table = np.array([number[label] for label in labels])
        codes = values[:, place]
        known = ~np.isnan(codes)
        codes[known] = table[codes[known].astype(np.int64)]
    return values


# Labels of a table that came by itself, in the codes of another one


def recoded(sample: Sample, columns: Sequence[Columns]) -> Sample:
    """The rows in the codes that these columns give to labels: codes go by first occurrence.

    Units of numbers are compared with theirs.

    Parameters
    ----------
    sample
        The rows, with as many columns.
    columns
        Of x, and of y where there are rows of it; they take the place of those of the sample.

    Raises
    ------
    DataError
        If a column has labels that are not among theirs, or is in another unit.
    """
    sources, rows = list(sample.sources), sample.row_sample
    parts = [] if rows is None else [part.copy() for part in rows.parts]
    for i, (given, known) in enumerate(zip(sample.columns, columns, strict=True)):
        known.check_units(given)
        for place, (mine, name) in enumerate(zip(given.names, known.names, strict=True)):
            labels, ours = given.categories.get(mine), known.categories.get(name)
            if labels is None or labels == ours:
                continue
            if ours is None or not set(labels) <= set(ours):
                there = "numbers" if ours is None else known.labels(name)
                raise DataError(
                    f"the labels of column {name!r} are {given.labels(mine)}, in the fit they were "
                    f"{there}: give rows with labels that it has seen"
                )
            table = np.array([float(ours.index(label)) for label in labels])
            sources[i] = with_codes(sources[i], place, table)
            if parts:
                parts[i] = _in_codes(parts[i], place, table)
    return replace(
        sample,
        sources=tuple(sources),
        columns=tuple(columns),
        row_sample=None if rows is None else replace(rows, parts=tuple(parts)),
    )


def with_codes(source: RowSource, place: int, table: Array) -> RowSource:
    """Rows with other codes in a column: ``table`` has the new one of each."""
    return source.map(partial(_in_codes, place=place, table=table), source.shape[1])


def _in_codes(rows: Array, place: int, table: Array) -> Array:
    rows = rows.copy()
    known = ~np.isnan(rows[:, place])
    rows[known, place] = table[rows[known, place].astype(np.int64)]
    return rows


# Groups and times as users give them, as columns of numbers


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
    elif is_data_array(values):
        values = values.data
    elif hasattr(values, "to_numpy") and not hasattr(values, "dask"):
        # Timestamps with a zone are no type of NumPy: this brings them to UTC.
        values = values.to_numpy("datetime64[us]") if kind == "M" else values.to_numpy()
    elif not hasattr(values, "dtype"):
        values = np.asarray(values)
    kind = np.dtype(values.dtype).kind
    if kind in "iu" and name == "group" and isinstance(values, np.ndarray) and len(values):
        # Read as float64, numbers that large would be those of several groups.
        large = max(abs(int(values.min())), abs(int(values.max()))) >= EXACT
        return np.unique(values, return_inverse=True)[1] if large else values
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
    labels = labels.ravel()
    labels = labels.astype(object) if labels.dtype.kind == "T" else labels
    _, first, inverse = np.unique(labels.astype(str), return_index=True, return_inverse=True)
    codes = np.argsort(np.argsort(first))[inverse]
    return np.where(missing_labels(labels), np.nan, codes)


# Labels of chunked arrays as codes, without gathering the rows


_MOST = 10_000  # classes


def is_chunked(y: Any) -> bool:
    """Whether labels lie in a Dask or Zarr array."""
    return isinstance(y, zarr.Array) or hasattr(y, "dask")


def chunked_labels(y: Any) -> Any:
    """Labels in chunks as a Dask array of shape (n,) in their own type.

    Parameters
    ----------
    y
        Dask or Zarr array of shape (n,) or (n, 1), its path or URL, or a Dask Series.

    Raises
    ------
    DataError
        If the shape is another, or this is no array.
    """
    import dask.array as da  # slow to import, and few fits need it

    y = labels = _opened(y, None)
    if is_dask_frame(y):
        labels = dask_series_values(y)
    elif isinstance(y, zarr.Array) and y.dtype.kind == "T":  # texts of any length, unknown to Dask
        labels = da.from_array(_Texts(y), y.chunks, meta=np.empty((0,) * y.ndim, dtype=object))
    elif isinstance(y, zarr.Array):
        labels = da.from_zarr(y)
    elif is_data_array(y):
        labels = y.data
    if not isinstance(labels, da.Array):
        raise DataError(f"labels must be an array, got {type(y).__name__}")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(f"labels must have shape (n,), got {labels.shape}")
    return labels


def coded(y: Any, *, missing: bool = False) -> tuple[Array, Array]:
    """The distinct labels, ascending, and the code of each row as a lazy Dask array, shape (n,).

    Parameters
    ----------
    y
        Labels, Dask or Zarr array of shape (n,) or (n, 1).
    missing
        Whether labels may be missing, None or NaN; their codes are NaN.

    Raises
    ------
    DataError
        If the shape is another, labels are no integers, texts or booleans (nor floats that are
        whole), or of several types, or there are too many.
    """
    import dask.array as da  # slow to import, and few fits need it

    labels = chunked_labels(y)
    known = labels.map_blocks(_known_labels) if missing and labels.dtype.kind in "fO" else labels
    check_label_types(np.empty(0, labels.dtype), "y")
    try:
        classes = np.asarray(da.unique(known).compute())
    except TypeError as error:
        if known.dtype.kind != "O":
            raise
        raise DataError(
            f"y must hold labels of one type, such as texts, and it holds objects: {error}; "
            "convert it, for example to text by .astype(str)"
        ) from error
    check_label_types(classes, "y", (str, bool, int, float))
    if classes.dtype.kind == "f" and not (classes == np.floor(classes)).all():
        raise DataError(f"labels must be whole numbers or texts, y holds {classes[:3].tolist()}")
    if len(classes) > _MOST:
        raise DataError(f"y has {len(classes):,} distinct labels, at most {_MOST:,} are classes")
    return classes, labels.map_blocks(_codes_labels, classes, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class _Texts:
    """A Zarr array of texts as what ``dask.array.from_array`` reads: objects."""

    array: zarr.Array[Any]
    dtype: ClassVar[Any] = np.dtype(object)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    def __getitem__(self, key: Any) -> Array:
        return np.asarray(self.array[key]).astype(object)


def _codes_labels(block: Array, classes: Array) -> Array:
    known = _is_label(block)
    codes = np.full(block.shape, np.nan)
    codes[known] = np.searchsorted(classes, block[known])
    return codes


def _known_labels(block: Array) -> Array:
    return block[_is_label(block)]


def _is_label(block: Array) -> Array:
    return ~missing_labels(np.asarray(block))


_LABELS_OR_TIMES = "OUTmM"


@dataclass(eq=False)
class DaskSource(RowSource):
    """Rows of a two-dimensional Dask array; its tasks become part of the pass.

    ``computed`` is the number of columns that its blocks take while they are computed, where these
    are more than those of the array.
    """

    array: Any
    computed: int = 0

    def __post_init__(self) -> None:
        self.shape = int(self.array.shape[0]), int(self.array.shape[1])
        self.chunk_rows = int(max(self.array.chunks[0]))
        self.row_bytes = self.shape[1] * int(self.array.dtype.itemsize)
        self.columns_read = max(self.computed, self.shape[1])
        self.dask_array = self.array

    def read(self, start: int, stop: int) -> Array:
        """Rows [start, stop) as float64, computed now."""
        return np.asarray(self.array[start:stop].compute(), dtype=np.float64)

    def pick(self, positions: tuple[int, ...]) -> "DaskSource":
        """The same rows with the columns at these positions only."""
        return DaskSource(self.array[:, list(positions)], self.columns_read)

    def between(self, start: int, stop: int) -> "DaskSource":
        """These rows of the array."""
        return DaskSource(self.array[start:stop], self.columns_read)

    def map(self, function: RowFunction, width: int) -> "DaskSource":
        """The rows that a function makes of these, block by block."""
        rows = self.array.rechunk({1: -1})
        chunks = (rows.chunks[0], (width,))
        mapped = rows.map_blocks(
            applied_to, function=function, width=width, chunks=chunks, dtype=np.float64,
            meta=np.empty((0, 0)),
        )  # fmt: skip
        return DaskSource(mapped, self.columns_read + width)

    def for_task(self, start: int, stop: int) -> Delayed:
        """Rows [start, stop) as a source in memory, once computed."""
        rows = self.array[start:stop].rechunk((stop - start, -1))
        # Not optimised: tasks, and x and y, that need the same block must name it alike.
        block = rows.to_delayed(optimize_graph=False)[0, 0]
        return delayed(_computed, pure=False)(block, start, (stop - start, self.shape[1]))

    def fingerprint(self, token: Callable[[Any, str], str]) -> str:
        """The name of the array."""
        return str(self.array.name)


def applied_to(block: Array, *, function: RowFunction, width: int) -> Array:
    """What a function makes of a block of rows, see :func:`cme_dask.data.sources.applied`."""
    return applied(function, np.asarray(block, dtype=np.float64), width)


def _computed(block: Array, start: int, shape: tuple[int, int]) -> ArraySource:
    """The block as a source; a Dask array may announce other shapes than it computes."""
    if np.shape(block) != shape:
        raise DataError(
            f"a Dask array computed shape {np.shape(block)} for rows from {start} on where it "
            f"announced {shape}: correct the chunks it declares"
        )
    return ArraySource(block, start)


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
        array of shape (n, d) or (n,), a DataFrame or Series, a Dataset, or the path or URL of a
        Zarr array. Columns of a Dataset are variables of one dimension, the same for all.
        Truth values become 0 and 1, text and categories become codes of labels. Units are read
        from ``attrs["units"]`` of xarray, and of pandas, where a DataFrame has a dict by column;
        other arrays and tables record none. Of Dask DataFrames, the lengths of partitions and the
        labels of text columns are computed now.
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
        If shapes or columns do not fit; the message states the expectation.
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
        if is_dask_frame(x):
            names = [value for value in beside.values() if isinstance(value, str)]
            x = _read_once(x, x_columns, y_columns, names)
        beside = {role: _single(x, value) for role, value in beside.items()}
        x, y = _column_arrays(x, x_columns), _column_arrays(x, y_columns)
        x_columns = y_columns = None
    variables = {"x": x} if y is None else {"x": x, "y": _opened(y, storage_options)}
    for name, requested in (("x", x_columns), ("y", y_columns)):
        # Of a Dataset first, since its other variables may have other dimensions.
        if requested is not None and is_dataset(variables.get(name)):
            variables[name] = _column_arrays(variables[name], requested)
    beside = {role: _opened(value, storage_options) for role, value in beside.items()}
    frames = {
        name: value
        for name, value in (variables | beside).items()
        if is_dask_frame(value) and not _is_time(name, value)
    }
    lazy = dask_frame_arrays(frames) if frames else {}
    named = [
        (DaskSource(lazy[name][0]), lazy[name][1]) if name in lazy else _rows(name, value)
        for name, value in variables.items()
    ]
    sample = Sample(
        tuple(s for s, _ in named),
        tuple(c for _, c in named),
        **{role: _role(role, lazy[role][0] if role in lazy else v) for role, v in beside.items()},
    )
    if x_columns is None and y_columns is None:
        return sample
    return sample.select(x_columns, y_columns)


def _read_once(frame: Any, *requested: Any) -> Any:
    """The frame's requested columns, in partitions that x and y share.

    Of two selections of columns each would be optimised, and so computed, by itself.
    """
    import dask.dataframe as dd  # slow to import, and few fits need it

    each = [[names] if isinstance(names, str) else map(str, names) for names in requested]
    present = Columns(tuple(map(str, frame.columns)))
    frame = frame.iloc[:, list(present.positions(list(dict.fromkeys(chain(*each)))))]
    return dd.from_delayed(frame.to_delayed(), meta=frame._meta, verify_meta=False)


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
    if is_data_array(value):  # its coordinates are attributes: one may be columns
        return False
    return is_dataset(value) or hasattr(value, "columns") or hasattr(value, "column_names")


def _column_arrays(table: Any, requested: Sequence[str]) -> Any:
    """The requested columns of a DataFrame or Dataset, side by side; labels may be no text."""
    if is_arrow(table):
        table = arrow_table(table, "x0")
        present = list(table.column_names)
    elif is_dataset(table):
        table = named_by_text(table)
        present = list(table.data_vars)
    else:
        present = list(table.columns)
    names = requested if isinstance(requested, str) else [str(name) for name in requested]
    positions = Columns(tuple(str(p) for p in present)).positions(names)
    if is_arrow(table):
        return table.select(list(positions))
    if not is_dataset(table):
        return table.iloc[:, list(positions)]
    dims = {table[name].dims for name in names}
    if len(dims) != 1 or len(next(iter(dims))) != 1:
        raise DataError(
            f"columns of a Dataset must share one dimension, got {sorted(map(str, dims))}: name "
            "those to use with x_columns and y_columns of open_sample"
        )
    if not all(is_number(table[name].dtype) for name in names):
        result = dataset_frame(table, list(names))
    else:
        result = table[list(names)].to_dataarray("column").transpose(..., "column")
    result.attrs["units"] = recorded_units(table, names)  # neither holds those of its columns
    return result


def _rows(name: str, value: Any) -> tuple[RowSource, Columns]:
    """Source and columns of one array-like of shape (n,) or (n, d)."""
    given, columns = value, None
    is_table = not isinstance(value, (np.ndarray, zarr.Array))
    if is_table:
        value, columns = _table_array(name, value)
    if not hasattr(value, "shape"):
        value = _as_array(name, value)
    if not hasattr(value, "dtype"):
        raise DataError(f"{name} must be an array or a table, got {type(value).__name__}")
    if len(value.shape) not in (1, 2):
        raise DataError(f"{name} must have shape (n,) or (n, d), got {tuple(value.shape)}")
    kind = np.dtype(value.dtype).kind
    if kind not in "fiub":
        reason = "Complex data not supported: " if kind == "c" else ""
        raise DataError(f"{reason}{name} must be numeric, got values of type {value.dtype}")
    source: RowSource
    if isinstance(value, zarr.Array):
        source = ZarrSource(value)
    elif hasattr(value, "dask"):
        if any(np.isnan(c) for axis in value.chunks for c in axis):
            raise DataError(
                f"the chunk sizes of {name} are unknown: call compute_chunk_sizes() on it first"
            )
        if isinstance(value._meta, np.ma.MaskedArray):
            value = value.map_blocks(unmasked, dtype=np.float64, meta=np.empty((0,) * value.ndim))
        source = DaskSource(value if value.ndim == 2 else value[:, None])
    else:
        array = _as_array(name, unmasked(value))  # a masked value is a missing one
        source = ArraySource(array if array.ndim == 2 else array[:, None])
    if columns is None:
        columns = Columns.default(name, source.shape[1])
    if is_table:
        columns = replace(columns, units=recorded_units(given, columns.names))
    return source, columns


def _table_array(name: str, value: Any) -> tuple[Any, Columns | None]:
    """The array in a table or a column of one, and what its columns are called if they are named.

    What is no table is left as it is.
    """
    if is_dataset(value):
        value = _column_arrays(value, list(map(str, value.data_vars)))
    if is_arrow(value):
        return arrow_values(name, value)
    labels: list[str] | None = None
    if is_data_array(value):
        labels = _xarray_labels(value)
        if value.ndim in (1, 2) and value.dtype.kind in _LABELS_OR_TIMES:
            return array_values(name, value, labels)
        if value.chunks is None and "chunks" in value.encoding:  # chunked on disk: lazily
            value = value.chunk()
        value = value.data
    elif hasattr(value, "columns") and hasattr(value, "to_numpy"):  # pandas DataFrame
        # Beside other numbers truth values would make a table of objects.
        truths = sum(dtype.kind == "b" for dtype in value.dtypes)
        if not all(map(is_number, value.dtypes)) or 0 < truths < len(value.dtypes):
            return frame_values(name, value)
        labels = [str(label) for label in value.columns]
        value = value.to_numpy()
    elif hasattr(value, "to_numpy") and not hasattr(value, "dask"):  # pandas Series
        if hasattr(value, "to_frame") and not is_number(value.dtype):
            return series_values(name, value)
        labels = None if getattr(value, "name", None) is None else [str(value.name)]
        value = value.to_numpy()
    return value, None if labels is None else Columns(tuple(labels))


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
    if value.ndim < 2:
        return None if value.name is None else [str(value.name)]
    return coordinate_names(value)
