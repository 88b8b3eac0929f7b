"""Write a sample store, batch by batch."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from cme_dask.defaults import SAMPLE_SIZE
from cme_dask.errors import DataError
from cme_dask.storage.atomic import ATTRIBUTE, disk_errors, writing
from cme_dask.storage.columns import Columns, check_finite, check_weights
from cme_dask.storage.priority import RowSample, draw, merge
from cme_dask.storage.sample import KIND, schema_version
from cme_dask.storage.zarr_files import compressors, write_array

Array = Any

CHUNK_BYTES = 1 << 23
MAX_CHUNK_ROWS = 1 << 26


@contextlib.contextmanager
def writing_sample(
    path: str | os.PathLike[str],
    columns: tuple[Columns, Columns],
    *,
    weights: bool = False,
    chunk_rows: int | None = None,
    expected_rows: int | None = None,
    sample_size: int = SAMPLE_SIZE,
    seed: int = 0,
    overwrite: bool = False,
) -> Iterator["SampleWriter"]:
    """A writer of a new sample store; the store appears, whole, when the block ends well.

    Parameters
    ----------
    path
        Local folder to make.
    columns
        Descriptions of the columns of x and y.
    weights
        Whether each batch comes with weights.
    chunk_rows
        Rows per chunk; default a power of two from 2^12 to 2^18, at most 8 MB, so that the
        expected rows make some 64 chunks; 2^16 if their number is not known.
    expected_rows
        Number of rows to come, if it is known.
    sample_size, seed
        Of the priority sample.
    overwrite
        Replace an existing store when the new one is whole.

    Raises
    ------
    DataError
        If the output exists, or no usable rows were appended.
    ResourceError
        If the disk is full or read-only.
    """
    check_chunk_rows(chunk_rows)
    if not 0 <= seed < 1 << 63:
        raise DataError(f"seed must lie between 0 and 2**63 - 1, got {seed}")
    with writing(path, overwrite=overwrite) as aside:
        chunk = chunk_rows or default_chunk_rows(columns, expected_rows)
        writer = SampleWriter(aside, columns, weights, chunk, sample_size, seed)
        yield writer
        writer.finish()


def check_chunk_rows(chunk_rows: int | None) -> None:
    """DataError on a number of rows that no chunk may have."""
    if chunk_rows is not None and not 1 <= chunk_rows <= MAX_CHUNK_ROWS:
        raise DataError(f"chunk_rows must lie between 1 and {MAX_CHUNK_ROWS:,}, got {chunk_rows}")


def default_chunk_rows(columns: tuple[Columns, Columns], expected_rows: int | None) -> int:
    """Rows per chunk, a power of two, so that chunks are aligned with strips."""
    widest = max(len(c.names) for c in columns)
    fitting = 1 << (max(CHUNK_BYTES // (8 * widest), 1).bit_length() - 1)
    wanted = 1 << 16 if expected_rows is None else 1 << (expected_rows // 64).bit_length()
    return max(1 << 12, min(1 << 18, fitting, wanted))


class SampleWriter:
    """Appends batches of rows to the store of :func:`writing_sample`."""

    def __init__(
        self,
        folder: Path,
        columns: tuple[Columns, Columns],
        weights: bool,
        chunk_rows: int,
        sample_size: int,
        seed: int,
    ) -> None:
        self._chunk = chunk_rows
        self._folder, self._columns, self._has_weights = folder, columns, weights
        self._size, self._seed = sample_size, seed
        self._waiting: list[tuple[Array, ...]] = []
        self._row_sample: RowSample | None = None
        self._rows = self._written = 0
        self._total_weight = 0.0
        names = {"x": len(columns[0].names), "y": len(columns[1].names)}
        widths = {**names, "weights": None} if weights else names
        with disk_errors(folder):
            self._group = zarr.open_group(str(folder), mode="w", zarr_format=3)
            self._arrays = [create_rows(self._group, n, w, self._chunk) for n, w in widths.items()]

    @property
    def n_rows(self) -> int:
        """Rows appended so far."""
        return self._rows

    def append(self, x: Array, y: Array, weights: Array | None = None) -> None:
        """Add rows; unusable values are refused with column, count and first row."""
        # Copies: the caller may use its buffers again before the rows are written.
        batch = [np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)]
        for part, columns in zip(batch, self._columns, strict=True):
            if part.ndim != 2 or part.shape[1] != len(columns.names):
                raise DataError(f"expected {len(columns.names)} columns, got shape {part.shape}")
            check_finite(part, columns.names, self._rows)
        if (weights is not None) != self._has_weights:
            raise DataError("weights must come with every batch or with none")
        if weights is not None:
            batch.append(np.array(weights, dtype=np.float64))
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

    def _flush(self, everything: bool) -> None:
        """Write whole chunks only: one writer per chunk, each chunk once."""
        ready = self._rows - self._written
        if not everything:
            ready -= ready % self._chunk
        if ready == 0:
            return
        joined = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
        with disk_errors(self._folder):
            for array, rows in zip(self._arrays, joined, strict=True):
                array.resize((self._written + ready, *array.shape[1:]))
                array[self._written :] = rows[:ready]
        self._written += ready
        self._waiting = [tuple(rows[ready:] for rows in joined)]

    def finish(self) -> None:
        """Write what waits, the row sample, and last the description."""
        if self._rows < 2 or self._row_sample is None:
            raise DataError(f"at least 2 rows are needed, got {self._rows}: nothing was written")
        if self._has_weights and self._total_weight <= 0.0:
            raise DataError("all weights are zero: at least one row needs a positive weight")
        self._flush(everything=True)
        with disk_errors(self._folder):
            finish_sample(self._group, self._arrays, self._row_sample, self._columns, self._seed)


def create_rows(
    group: zarr.Group,
    name: str,
    width: int | None,
    chunk: int,
    *,
    rows: int = 0,
    dtype: str = "float64",
) -> zarr.Array[Any]:
    """An array of rows, shape (rows, width), or (rows,) if width is None, in chunks of rows."""
    tail = () if width is None else (width,)
    return group.create_array(
        name,
        shape=(rows, *tail),
        chunks=(chunk, *tail),
        dtype=dtype,
        compressors=compressors(),
        fill_value=np.nan,  # a missing chunk must not read as zeros
        dimension_names=["row"] if width is None else ["row", f"{name}_column"],
        config={"write_empty_chunks": True},
    )


def finish_sample(
    group: zarr.Group,
    arrays: Sequence[zarr.Array[Any]],
    kept: RowSample,
    columns: tuple[Columns, ...],
    seed: int | None,
    features: dict[str, Any] | None = None,
) -> None:
    """Write the row sample and, last, the description that makes the store a finished one.

    ``arrays`` are x, then y and weights if it has them; ``features`` tells of the map that made x
    out of another store's.
    """
    folder = group.create_group("row_sample")
    parts = dict(zip("xy", kept.parts, strict=False))
    small = {"keys": kept.keys, "index": kept.index, **parts, "weights": kept.weights}
    for name, values in small.items():
        write_array(folder, name, values)
    group.attrs[ATTRIBUTE] = {
        "kind": KIND,
        "schema_version": schema_version(arrays[: len(columns)]),
        "rows": arrays[0].shape[0],
        "weights": len(arrays) > len(columns),
        "seed": seed,
        "row_sample_complete": kept.complete,
        "columns": {v: c.to_dict() for v, c in zip("xy", columns, strict=False)},
        **({} if features is None else {"features": features}),
    }
