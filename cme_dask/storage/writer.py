"""Write a sample store, batch by batch."""

import os
from pathlib import Path
from typing import Any, Self

import numpy as np
import zarr

from cme_dask.errors import DataError
from cme_dask.storage.atomic import disk_errors, writing
from cme_dask.storage.columns import Columns, check_finite, check_weights
from cme_dask.storage.priority import DEFAULT_SIZE, RowSample, draw, merge
from cme_dask.storage.sample import KIND, SCHEMA_VERSION
from cme_dask.storage.zarr_files import ATTRIBUTE, compressors, write_array

Array = Any

CHUNK_BYTES = 1 << 23


class SampleWriter:
    """Write a sample store batch by batch; use as a context manager.

    Parameters
    ----------
    path
        Local folder to make.
    columns
        Descriptions of the columns of x and y.
    weights
        Whether each batch comes with weights.
    chunk_rows
        Rows per chunk; default from a chunk size of 8 MB, a power of two up to 2^18.
    sample_size, seed
        Of the priority sample.
    overwrite
        Replace an existing store when the new one is whole.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: tuple[Columns, Columns],
        *,
        weights: bool = False,
        chunk_rows: int | None = None,
        sample_size: int = DEFAULT_SIZE,
        seed: int = 0,
        overwrite: bool = False,
    ) -> None:
        widest = max(len(c.names) for c in columns)
        self._path = Path(path)
        self._columns = columns
        self._chunk = chunk_rows or max(
            1 << 12, min(1 << 18, _power_of_two(CHUNK_BYTES // (8 * widest)))
        )
        self._size, self._seed = sample_size, seed
        self._waiting: list[tuple[Array, ...]] = []
        self._row_sample: RowSample | None = None
        self._rows = self._written = 0
        self._total_weight = 0.0
        self._has_weights = weights
        self._aside = writing(path, overwrite=overwrite)

    @property
    def n_rows(self) -> int:
        """Rows appended so far."""
        return self._rows

    def __enter__(self) -> Self:
        self._folder = self._aside.__enter__()
        with disk_errors(self._path):
            self._group = zarr.open_group(str(self._folder), mode="w", zarr_format=3)
            self._arrays = []
            names = ["x", "y", *(["weights"] if self._has_weights else [])]
            widths = [len(self._columns[0].names), len(self._columns[1].names), None]
            for name, width in zip(names, widths, strict=False):
                self._arrays.append(_create(self._group, name, width, self._chunk))
        return self

    def append(self, x: Array, y: Array, weights: Array | None = None) -> None:
        """Add rows; unusable values are refused with column, count and first row."""
        batch = [np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)]
        for part, columns in zip(batch, self._columns, strict=True):
            if part.ndim != 2 or part.shape[1] != len(columns.names):
                raise DataError(f"expected {len(columns.names)} columns, got shape {part.shape}")
            check_finite(part, columns.names, self._rows)
        if (weights is not None) != self._has_weights:
            raise DataError("weights must come with every batch or with none")
        if weights is not None:
            batch.append(np.asarray(weights, dtype=np.float64))
            check_weights(batch[2], self._rows)
            self._total_weight += float(batch[2].sum())
        if len({len(part) for part in batch}) != 1:
            raise DataError(f"the numbers of rows differ: {[len(part) for part in batch]}")
        fresh = draw(self._rows, (batch[0], batch[1]), weights, self._size, self._seed)
        both = fresh if self._row_sample is None else merge((self._row_sample, fresh), self._size)
        self._row_sample = both
        self._rows += len(batch[0])
        self._waiting.append(tuple(batch))
        self._flush(everything=False)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        if kind is None:
            try:
                self._finish()
            except BaseException as failure:
                if not self._aside.__exit__(type(failure), failure, failure.__traceback__):
                    raise
                return None
        return self._aside.__exit__(kind, error, trace)

    def _flush(self, everything: bool) -> None:
        """Write whole chunks only: one writer per chunk, each chunk once."""
        ready = self._rows - self._written
        if not everything:
            ready -= ready % self._chunk
        if ready == 0:
            return
        joined = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
        with disk_errors(self._path):
            for array, rows in zip(self._arrays, joined, strict=True):
                array.resize((self._written + ready, *array.shape[1:]))
                array[self._written :] = rows[:ready]
        self._written += ready
        self._waiting = [tuple(rows[ready:] for rows in joined)]

    def _finish(self) -> None:
        if self._rows < 2 or self._row_sample is None:
            raise DataError(f"at least 2 rows are needed, got {self._rows}: nothing was written")
        if self._has_weights and self._total_weight <= 0.0:
            raise DataError("all weights are zero: at least one row needs a positive weight")
        self._flush(everything=True)
        rows = self._group.create_group("row_sample")
        kept = self._row_sample
        pairs = {"keys": kept.keys, "index": kept.index, "x": kept.parts[0], "y": kept.parts[1]}
        for name, values in pairs.items():
            write_array(rows, name, values)
        self._group.attrs[ATTRIBUTE] = {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "rows": self._rows,
            "weights": self._has_weights,
            "seed": self._seed,
            "columns": {v: c.to_dict() for v, c in zip("xy", self._columns, strict=True)},
        }


def _create(group: zarr.Group, name: str, width: int | None, chunk: int) -> zarr.Array[Any]:
    tail = () if width is None else (width,)
    return group.create_array(
        name,
        shape=(0, *tail),
        chunks=(chunk, *tail),
        dtype="float64",
        compressors=compressors(),
        fill_value=np.nan,  # a missing chunk must not read as zeros
        dimension_names=["row"] if width is None else ["row", f"{name}_column"],
        config={"write_empty_chunks": True},
    )


def _power_of_two(value: int) -> int:
    return 1 << max(0, value.bit_length() - 1)
