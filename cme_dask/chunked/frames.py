"""Tables in memory, of pandas, Arrow or xarray, that hold labels beside numbers."""

from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.storage.arrow import arrow_column, arrow_table
from cme_dask.storage.columns import Columns

Array = Any

_NUMBERS = "fiub"


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
        raise DataError(
            f"column {column!r} of {name} holds times ({series.dtype}), which are no numbers: give "
            "what matters of them, such as their hour (.dt.hour), or make a store by "
            "cme_dask.ingest(..., datetime=)"
        )
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


def array_values(name: str, array: Any, labels: list[str] | None) -> tuple[Array, Columns]:
    """As :func:`frame_values` of an xarray DataArray of one or two dimensions."""
    table = _in_memory(name, array).to_pandas()
    frame = table.to_frame() if table.ndim == 1 else table
    frame.columns = labels or [f"{name}{place}" for place in range(frame.shape[1])]
    return frame_values(name, frame)


def dataset_frame(dataset: Any, wanted: list[str]) -> Any:
    """Columns of an xarray Dataset of one dimension as a DataFrame, each in its own type."""
    for name in wanted:
        if not is_number(dataset[name].dtype):
            _in_memory(f"column {name!r}", dataset[name])
    return dataset[wanted].to_dataframe()[wanted]


def _in_memory(name: str, array: Any) -> Any:
    """DataError if labels are chunked, since they are known only once all are read."""
    if array.chunks is not None or "chunks" in array.encoding:
        raise DataError(
            f"{name} holds labels or times ({array.dtype}) that are not in memory: .load() them, "
            "or make a sample store of the table by cme_dask.ingest"
        )
    return array
