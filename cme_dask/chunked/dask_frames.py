"""Dask DataFrames and Series as Dask arrays of known chunks, without gathering rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dask
import numpy as np
from dask.delayed import Delayed, delayed

from cme_dask.chunked.frames import frame_values
from cme_dask.errors import DataError
from cme_dask.storage.columns import Columns

Array = Any

_MOST_LABELS = 10_000  # of one column


def is_dask_frame(value: Any) -> bool:
    """Whether this is a DataFrame or a Series of Dask."""
    return hasattr(value, "dask") and hasattr(value, "map_partitions")


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
    found = dask.compute(
        *([described(name, part, names[name]) for part in each] for name, each in parts.items())
    )
    return {
        name: _array(name, names[name], parts[name], each)
        for name, each in zip(parts, found, strict=True)
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
    name: str, names: tuple[str, ...], parts: Sequence[Delayed], found: Sequence[_Partition]
) -> tuple[Array, Columns]:
    import dask.array as da  # slow to import, and few fits need it

    categories: dict[str, tuple[str, ...]] = {}
    for part in found:
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
        for part, info in zip(parts, found, strict=True)
        if info.rows
    ]
    if not blocks:
        return da.zeros((0, len(names))), columns
    return da.concatenate(blocks), columns


def _coded(name: str, part: Any, columns: Columns) -> Array:
    """The values of a partition, with codes of the labels of the whole frame."""
    values, found = frame_values(name, _frame(part, columns.names))
    for column, labels in found.categories.items():
        place, whole = columns.names.index(column), columns.categories[column]
        if labels == whole[: len(labels)]:
            continue
        number = {label: float(code) for code, label in enumerate(whole)}
        table = np.array([number[label] for label in labels])
        codes = values[:, place]
        known = ~np.isnan(codes)
        codes[known] = table[codes[known].astype(np.int64)]
    return values
