"""After a failure only: one more pass that counts every unusable value and names the first."""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.passes import run_over_rows
from cme_dask.chunked.plan import Run
from cme_dask.chunked.strips import Reading, Strip, strips_of
from cme_dask.errors import StoreError
from cme_dask.storage.columns import negative_error, nonfinite_error
from cme_dask.storage.rows import RowSource, ZarrSource
from cme_dask.storage.sample import Sample

Array = Any


@dataclass(frozen=True)
class _Counts:
    """Numbers of unusable values and the first rows that hold one."""

    column_count: Array
    column_first: Array
    source_count: Array
    source_first: Array
    negative_count: int
    negative_first: int


def count_bad_values(sample: Sample, executor: Executor) -> None:
    """Raise the error that names every column with unusable values; return if there is none.

    Raises
    ------
    DataError
        With columns, counts and first rows of NaN and infinities, or of negative weights. Of a part
        only its rows count; a row whose time or group is unusable may belong to any.
    StoreError
        If the NaN stand for a chunk that is missing from the store.
    """
    executor = replace(executor, checkpoint=None)  # what a failure leads to is no step of a run
    sample = replace(sample, first_row=0)  # rows are told as they are numbered where they came from
    found = run_over_rows(sample, executor, _count, _merge)
    for source, count, first in zip(
        sample.reads, found.source_count, found.source_first, strict=True
    ):
        missing = (
            source.missing_chunks(first, first + 1)
            if count and isinstance(source, ZarrSource)
            else []
        )
        if missing:
            raise StoreError(
                f"chunk {missing[0]} of {sample.location} is missing: restore it from a copy or "
                "write the store again"
            )
    names = [name for columns in sample.columns for name in columns.names]
    if sample.weights is not None:
        names.append("weights")
    names += sample.units
    if found.column_count.any():
        pairs = zip(found.column_count, found.column_first, strict=True)
        raise nonfinite_error(dict(zip(names, pairs, strict=True)))
    if found.negative_count:
        raise negative_error(found.negative_count, found.negative_first)


def _count(_: None, run: Run, reading: Reading, *sources: RowSource) -> _Counts:
    return reduce(_merge, map(_counts_of, strips_of(run, reading, sources)))


def _counts_of(strip: Strip) -> _Counts:
    masks = [~np.isfinite(values) for values in strip.columns()]
    negative = strip.weights < 0 if strip.weights is not None else np.zeros(len(strip), bool)
    columns = np.concatenate(masks, axis=1)

    def first(mask: Array) -> Array:
        """The first row of each column of a mask; of none, any number."""
        return strip.rows[mask.argmax(axis=0)] if len(strip) else np.zeros(mask.shape[1], np.int64)

    return _Counts(
        columns.sum(axis=0),
        first(columns),
        np.array([mask.sum() for mask in masks]),
        first(np.column_stack([mask.any(axis=1) for mask in masks])),
        int(negative.sum()),
        int(first(negative[:, None])[0]),
    )


def _merge(a: _Counts, b: _Counts) -> _Counts:
    return _Counts(
        a.column_count + b.column_count,
        np.where(a.column_count > 0, a.column_first, b.column_first),
        a.source_count + b.source_count,
        np.where(a.source_count > 0, a.source_first, b.source_first),
        a.negative_count + b.negative_count,
        a.negative_first if a.negative_count else b.negative_first,
    )
