"""Tables in memory: Arrow, pandas and xarray columns as NumPy columns, and back."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cme_dask.data.columns import Columns
from cme_dask.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


# NumPy columns as Arrow columns, and Arrow tables of other libraries as NumPy columns


Array = Any

_TIME_UNITS = ("s", "ms", "us", "ns")
_NUMBERS = "fiub"


def as_arrow(values: Array, column: str, table: str) -> "pa.Array":
    """One column, shape (n,), in the type of Arrow that corresponds: numbers, text or times.

    Raises
    ------
    DataError
        If its type is another one.
    """
    import pyarrow as pa  # here, for questions to a saved model need none of it

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


def _refusal(column: str, table: str, content: str) -> DataError:
    return DataError(
        f"column {column!r} of {table} holds {content}: expected numbers, text or times, leave it "
        "out or convert it"
    )


def holds_times(column: str, table: str, kind: Any) -> DataError:
    """One sentence on a column of times, which are no numbers."""
    return DataError(
        f"column {column!r} of {table} holds times ({kind}), which are no numbers: give what "
        "matters of them, such as their hour (.dt.hour), or make a store by "
        "cme_dask.ingest(..., datetime=)"
    )


def unmasked(values: Any) -> Any:
    """A masked array with NaN in place of what is masked; any other value as it is."""
    if not isinstance(values, np.ma.MaskedArray) or values.dtype.kind not in "fiubOUT":
        return values
    kind: Any = np.float64 if values.dtype.kind in _NUMBERS else object
    return np.ma.filled(values.astype(kind), np.nan)


def matrix_names(name: str, width: int) -> tuple[str, ...]:
    """``name0, name1, ...``: what the columns of a matrix are called."""
    return tuple(f"{name}{place}" for place in range(width))


def is_arrow(value: Any) -> bool:
    """Whether this is a table or a column of Arrow, Polars and the like, but none of pandas."""
    ours = any(hasattr(value, name) for name in ("iloc", "dims"))  # of pandas and xarray
    return hasattr(value, "__arrow_c_stream__") and not ours


def has_columns(value: Any) -> bool:
    """Whether this is a table, and not a column alone."""
    return hasattr(value, "columns") or hasattr(value, "column_names")


def arrow_table(value: Any, name: str) -> "pa.Table":
    """A table, by the Arrow C stream; a column becomes the only one of a table.

    Parameters
    ----------
    value
        What :func:`is_arrow` knows.
    name
        What an unnamed column is called.
    """
    import pyarrow as pa

    if has_columns(value):
        return pa.table(value)
    column = pa.chunked_array(value)
    return pa.table({str(getattr(value, "name", None) or name): column})


def arrow_column(column: Any, name: str, table: str) -> tuple[Array, tuple[str, ...] | None]:
    """Numbers as float64, NaN where missing; or codes of labels, and the labels.

    Truth values become 0 and 1. Codes are those of the categories in their order, or of text in the
    order of first occurrence.

    Raises
    ------
    DataError
        If the column holds times or other objects.
    """
    import pyarrow as pa

    kind = column.type
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan), None
    if pa.types.is_dictionary(kind):
        column = column.unify_dictionaries() if isinstance(column, pa.ChunkedArray) else column
        column = column.cast(pa.dictionary(pa.int32(), pa.large_string()))
    elif (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    ):
        column = column.cast(pa.large_string()).dictionary_encode()
    if pa.types.is_dictionary(column.type):
        whole = pa.concat_arrays(column.chunks) if column.num_chunks else column.combine_chunks()
        codes = whole.indices.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return codes, tuple(whole.dictionary.to_pylist())
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif pa.types.is_temporal(kind):
        raise holds_times(name, table, kind)
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise DataError(f"column {name!r} of {table} must be numeric or text, got type {kind}")
    values = column.cast(pa.float64(), safe=False)
    return np.asarray(values.to_numpy(), dtype=np.float64), None


# Tables in memory, of pandas, Arrow or xarray, that hold labels beside numbers


def is_number(dtype: Any) -> bool:
    """Whether a column of this type is one of plain NumPy numbers."""
    return isinstance(dtype, np.dtype) and dtype.kind in _NUMBERS


def frame_values(name: str, frame: Any) -> tuple[Array, Columns]:
    """A DataFrame as float64 of shape (n, d), NaN where a value is missing.

    Labels (text or pandas' categories) become codes 0, 1, ...: of categories in their order, of
    text in that of their first occurrence. Truth values become 0 and 1.

    Raises
    ------
    DataError
        If a column holds times or other objects.
    """
    names = tuple(str(label) for label in frame.columns)
    values = np.empty(frame.shape)
    categories: dict[str, tuple[str, ...]] = {}
    for place, column in enumerate(names):
        values[:, place], labels = _column(name, column, frame.iloc[:, place])
        if labels is not None:
            categories[column] = labels
    return values, Columns(names, categories=categories)


def _column(name: str, column: str, series: Any) -> tuple[Array, tuple[str, ...] | None]:
    """The numbers, or the codes and their labels."""
    kind = series.dtype.kind
    if hasattr(series, "cat"):
        codes, labels = series.cat.codes.to_numpy(), series.cat.categories
    elif kind in _NUMBERS:
        return series.to_numpy(np.float64, na_value=np.nan), None
    elif kind in "mM":
        raise holds_times(column, name, series.dtype)
    else:
        codes, labels = _texts(name, column, series)
    return np.where(codes < 0, np.nan, codes), tuple(str(label) for label in labels)


def _texts(name: str, column: str, series: Any) -> tuple[Array, Any]:
    try:
        codes, labels = series.factorize()
    except TypeError:  # objects that have no hash
        codes, labels = None, [None]
    if not all(isinstance(label, str) for label in labels):
        raise DataError(
            f"column {column!r} of {name} must be numeric or text, got values of type "
            f"{series.dtype}: convert it, for example with .astype(float) or .astype('category')"
        )
    return codes, labels


def arrow_values(name: str, value: Any) -> tuple[Array, Columns]:
    """As :func:`frame_values` of a table or column of Arrow, Polars and the like."""
    table = arrow_table(value, f"{name}0")
    names = tuple(map(str, table.column_names))
    values = np.empty((table.num_rows, len(names)))
    categories: dict[str, tuple[str, ...]] = {}
    for place, column in enumerate(names):
        values[:, place], labels = arrow_column(table.column(place), column, name)
        if labels is not None:
            categories[column] = labels
    return values, Columns(names, categories=categories)


def series_values(name: str, series: Any) -> tuple[Array, Columns]:
    """As :func:`frame_values` of one column, which is called ``name`` + 0 if it has no name."""
    return frame_values(name, series.to_frame(f"{name}0" if series.name is None else series.name))


def coordinate_names(array: Any) -> list[str] | None:
    """Names of the columns of an xarray DataArray: coordinates of its last dimension, or None."""
    # Asked for a dimension without coordinates, xarray would count it.
    last = array.dims[-1]
    return [str(name) for name in array.coords[last].values] if last in array.coords else None


def is_dataset(value: Any) -> bool:
    """Whether this is a Dataset of xarray.

    Attributes of its class are looked for: those of a table of pandas may be columns.
    """
    return hasattr(type(value), "data_vars")


def named_by_text(dataset: Any) -> Any:
    """A Dataset with its variables under the texts of their names, which may be numbers."""
    others = {name: str(name) for name in dataset.data_vars if not isinstance(name, str)}
    for name, text in others.items():
        if text in dataset:
            raise DataError(
                f"variables {name!r} and {text!r} of a Dataset would both be column {text!r}: "
                "rename one"
            )
    return dataset.rename(others)


def is_data_array(value: Any) -> bool:
    """Whether this is a DataArray of xarray, by the attributes of its class."""
    named = hasattr(type(value), "dims") and hasattr(type(value), "coords")
    return named and not is_dataset(value)


def recorded_units(table: Any, names: Sequence[str]) -> dict[str, str]:
    """Units by column that ``attrs["units"]`` of a table of xarray or pandas records.

    That of an array or a Series is one for all of its columns, that of a DataFrame a dict by
    column. Variables of a Dataset have their own.
    """
    attrs = getattr(table, "attrs", None)  # of arrays of records perhaps a field
    units: Any = attrs.get("units") if isinstance(attrs, Mapping) else None
    if is_dataset(table):
        units = {str(name): each.attrs.get("units") for name, each in table.data_vars.items()}
    elif isinstance(units, str):
        units = dict.fromkeys(names, units)
    if not isinstance(units, Mapping):
        return {}
    found = {name: units.get(name) for name in names}
    return {name: unit for name, unit in found.items() if isinstance(unit, str) and unit.strip()}


def array_values(name: str, array: Any, labels: list[str] | None) -> tuple[Array, Columns]:
    """As :func:`frame_values` of an xarray DataArray of one or two dimensions."""
    table = _in_memory(name, array).to_pandas()
    frame = table.to_frame() if table.ndim == 1 else table
    frame.columns = labels or [f"{name}{place}" for place in range(frame.shape[1])]
    return frame_values(name, frame)


def dataset_frame(dataset: Any, requested: list[str]) -> Any:
    """Columns of an xarray Dataset of one dimension as a DataFrame, each in its own type."""
    for name in requested:
        if not is_number(dataset[name].dtype):
            _in_memory(f"column {name!r}", dataset[name])
    return dataset[requested].to_dataframe()[requested]


def _in_memory(name: str, array: Any) -> Any:
    """DataError if labels are chunked, since they are known only once all are read."""
    if array.chunks is not None or "chunks" in array.encoding:
        raise DataError(
            f"{name} holds labels or times ({array.dtype}) that are not in memory: .load() them, "
            "or make a sample store of the table by cme_dask.ingest"
        )
    return array
