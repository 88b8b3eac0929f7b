"""Stores of features and of answers, written by many tasks, each its own chunks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from cme_dask.data.atomic import ATTRIBUTE, disk_errors, stored
from cme_dask.data.columns import Columns
from cme_dask.data.store import compressors
from cme_dask.data.writer import create_rows, finish_sample
from cme_dask.errors import ResourceError
from cme_dask.numerics.folds import RowSample

# A sample store of features, written by many tasks, each its own chunks


Array = Any

CHUNK_BYTES = 1 << 25
"""Largest default chunk of features."""

DTYPES = ("float64", "float32")

_SHARED = "all workers must see the output's folder under the same path"


def default_feature_chunk(row_bytes: int, rows: int) -> int:
    """Rows per chunk, a power of two from 2^10 to 2^18: at most 32 MB, some 64 chunks if small."""
    fitting = 1 << (max(CHUNK_BYTES // row_bytes, 1).bit_length() - 1)
    requested = max(1 << 12, 1 << (rows // 64).bit_length())
    return max(1 << 10, min(1 << 18, fitting, requested))


def check_written(arrays: Sequence[zarr.Array[Any]], folder: Path) -> None:
    """ResourceError if a chunk of an array is missing from the folder that the tasks wrote to."""
    for array in arrays:
        missing = array.nchunks - array.nchunks_initialized
        if missing:
            raise ResourceError(
                f"{missing:,} of {array.nchunks:,} chunks of {array.path} are missing in {folder}: "
                f"{_SHARED}"
            )


@dataclass(frozen=True, eq=False)
class FeatureFiles:
    """The arrays of an unfinished store: x, then y and weights if it has them."""

    folder: Path
    arrays: tuple[zarr.Array[Any], ...]

    @classmethod
    def create(
        cls,
        folder: Path,
        columns: tuple[Columns, ...],
        rows: int,
        *,
        weighted: bool,
        chunk_rows: int,
        dtype: str,
    ) -> "FeatureFiles":
        """Empty arrays of this many rows; only x has the dtype, the others are float64."""
        group = zarr.open_group(str(folder.absolute()), mode="w", zarr_format=3)
        arrays = [
            create_rows(
                group,
                name,
                len(described.names),
                chunk_rows,
                rows=rows,
                dtype=dtype if name == "x" else "float64",
            )
            for name, described in zip("xy", columns, strict=False)
        ]
        if weighted:
            arrays.append(create_rows(group, "weights", None, chunk_rows, rows=rows))
        return cls(folder.absolute(), tuple(arrays))

    def writers(self, start: int) -> list["ChunkWriter"]:
        """A writer of each array from row ``start`` on, a border of chunks."""
        return [ChunkWriter(self.folder, array, start) for array in self.arrays]

    def empty_rows(self, count: int, variables: int) -> tuple[Array, ...]:
        """Memory for rows of the first arrays, in their types."""
        return tuple(
            np.empty((count, *array.shape[1:]), array.dtype) for array in self.arrays[:variables]
        )

    def finish(
        self, row_sample: RowSample, columns: tuple[Columns, ...], features: dict[str, Any]
    ) -> None:
        """Check that all chunks are there; write the row sample and the description.

        Raises
        ------
        ResourceError
            If a chunk is missing.
        """
        check_written(self.arrays, self.folder)
        group = zarr.open_group(str(self.folder), mode="r+")
        arrays = {array.basename: array for array in self.arrays}
        finish_sample(group, arrays, row_sample, columns, None, features=features)


class ChunkWriter:
    """Appends rows to an array and writes each chunk once, whole."""

    def __init__(self, folder: Path, array: zarr.Array[Any], start: int) -> None:
        self._folder, self._array, self._row = folder, array, start
        rows = min(array.chunks[0], array.shape[0] - start)
        self._buffer = np.empty((rows, *array.shape[1:]), dtype=array.dtype)
        self._filled = 0

    def append(self, rows: Array) -> None:
        """Add rows."""
        while len(rows):
            room = len(self._buffer) - self._filled
            part, rows = rows[:room], rows[room:]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if self._filled == len(self._buffer):
                self.flush()

    def flush(self) -> None:
        """Write what waits; the last chunk of the array may be shorter.

        Raises
        ------
        ResourceError
            If the folder is not there, or its disk is full.
        """
        if not self._filled:
            return
        # Without this a task that outlives a failed run would make its folder anew.
        if not os.path.isdir(self._folder):
            raise ResourceError(f"the folder {self._folder} is not there: {_SHARED}")
        stop = self._row + self._filled
        with disk_errors(self._folder):
            self._array[self._row : stop] = self._buffer[: self._filled]
        self._row, self._filled = stop, 0


# A store of answers: arrays of rows that are written by many tasks, each its own chunks


KIND, SCHEMA_VERSION = "answers", 1

OUTPUT = stored(KIND, "store of answers")
"""What such a store is, among outputs."""


@dataclass(frozen=True)
class AnswerArray:
    """One array of answers, shape (n, ...).

    Attributes
    ----------
    name
        Of the array.
    dims, shape
        Names and lengths of the dimensions after the rows.
    labels
        Names of the values of a row, in C order.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class AnswerFiles:
    """The arrays of an unfinished store of answers."""

    folder: Path
    arrays: tuple[zarr.Array[Any], ...]

    @classmethod
    def create(
        cls, folder: Path, fields: Sequence[AnswerArray], rows: int, chunk_rows: int
    ) -> "AnswerFiles":
        """Empty float64 arrays of this many rows, in chunks of whole rows."""
        group = zarr.open_group(str(folder.absolute()), mode="w", zarr_format=3)
        arrays = [
            group.create_array(
                field.name,
                shape=(rows, *field.shape),
                chunks=(chunk_rows, *field.shape),
                dtype="float64",
                compressors=compressors(),
                fill_value=np.nan,  # a missing chunk must not read as zeros
                dimension_names=["row", *field.dims],
                config={"write_empty_chunks": True},
            )
            for field in fields
        ]
        return cls(folder.absolute(), tuple(arrays))

    def writers(self, start: int) -> list[ChunkWriter]:
        """A writer of each array from row ``start`` on, a border of chunks."""
        return [ChunkWriter(self.folder, array, start) for array in self.arrays]

    def finish(self, about: dict[str, Any]) -> None:
        """Check that all chunks are there; write the description that makes the store whole.

        Raises
        ------
        ResourceError
            If a chunk is missing.
        """
        check_written(self.arrays, self.folder)
        group = zarr.open_group(str(self.folder), mode="r+")
        group.attrs[ATTRIBUTE] = {"kind": KIND, "schema_version": SCHEMA_VERSION, **about}
