"""A store of answers: arrays of rows that are written by many tasks, each its own chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from cme_dask.errors import ResourceError
from cme_dask.storage.atomic import ATTRIBUTE
from cme_dask.storage.feature_store import ChunkWriter
from cme_dask.storage.zarr_files import compressors

Array = Any

KIND, SCHEMA_VERSION = "answers", 1


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
        for array in self.arrays:
            missing = array.nchunks - array.nchunks_initialized
            if missing:
                raise ResourceError(
                    f"{missing:,} of {array.nchunks:,} chunks of {array.path} are missing in "
                    f"{self.folder}: all workers must see the output's folder under the same path"
                )
        group = zarr.open_group(str(self.folder), mode="r+")
        group.attrs[ATTRIBUTE] = {"kind": KIND, "schema_version": SCHEMA_VERSION, **about}
