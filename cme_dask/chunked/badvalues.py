"""After a failure only: one more pass that counts every unusable value and names the first."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.passes import run_over_rows, strips_of
from cme_dask.chunked.plan import Run
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
        With columns, counts and first rows of NaN and infinities, or of negative weights.
    StoreError
        If the NaN stand for a chunk that is missing from the store.
    """
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
    if found.column_count.any():
        pairs = zip(found.column_count, found.column_first, strict=True)
        raise nonfinite_error(dict(zip(names, pairs, strict=True)))
    if found.negative_count:
        raise negative_error(found.negative_count, found.negative_first)


def _count(_: None, run: Run, weighted: bool, *sources: RowSource) -> _Counts:
    total: _Counts | None = None
    for start, parts, weights in strips_of(run, weighted, sources):
        everything = parts if weights is None else (*parts, weights[:, None])
        masks = [~np.isfinite(part) for part in everything]
        columns = np.concatenate(masks, axis=1)
        negative = np.zeros(1, dtype=bool) if weights is None else weights < 0
        found = _Counts(
            columns.sum(axis=0),
            start + columns.argmax(axis=0),
            np.array([mask.sum() for mask in masks]),
            np.array([start + mask.any(axis=1).argmax() for mask in masks]),
            int(negative.sum()),
            start + int(negative.argmax()),
        )
        total = found if total is None else _merge(total, found)
    assert total is not None
    return total


def _merge(a: _Counts, b: _Counts) -> _Counts:
    return _Counts(
        a.column_count + b.column_count,
        np.where(a.column_count > 0, a.column_first, b.column_first),
        a.source_count + b.source_count,
        np.where(a.source_count > 0, a.source_first, b.source_first),
        a.negative_count + b.negative_count,
        a.negative_first if a.negative_count else b.negative_first,
    )
