"""Parquet files: read them batch by batch, however large their row groups are."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from cme_dask.errors import DataError
from cme_dask.storage.tables import (
    Batch,
    Kind,
    display_name,
    file_fingerprint,
    rows_per_batch,
)

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class ParquetSource:
    """One Parquet file; see :class:`~cme_dask.storage.tables.Source`.

    Pages are read through buffers of 1 MB a column, so memory depends on the batch and not on the
    row group. Rows in messages count from 0. A position is the number of rows read.
    """

    files: fsspec.AbstractFileSystem
    path: str

    @property
    def name(self) -> str:
        """What messages call it."""
        return display_name(self.files, self.path)

    def fingerprint(self) -> str:
        """Its size and time of change, or its ETag."""
        with self._explained():
            return file_fingerprint(self.files, self.path)

    def columns(self) -> tuple[str, ...]:
        """The names of the columns; of a nested one that of the whole."""
        with self._explained(), self._open() as file:
            return tuple(file.schema_arrow.names)

    def batches(
        self,
        wanted: Sequence[str],
        kinds: Mapping[str, Kind],
        null_values: Sequence[str],
        position: Mapping[str, Any] | None,
    ) -> Iterator[Batch]:
        """The stored types; text that is wanted as labels dictionary-encoded."""
        labels = [name for name in wanted if kinds[name] is Kind.CATEGORY]
        row = int(position["row"]) if position else 0
        with self._explained(), self._open(labels) as file:
            if file.metadata.num_rows == 0:
                raise DataError(f"{self.name} has columns but no rows: leave it out")
            first, skip = _row_group(file.metadata, row)
            for batch in file.iter_batches(
                rows_per_batch(8 * len(wanted)),
                row_groups=range(first, file.num_row_groups),
                columns=list(wanted),
                use_threads=False,  # the batches before this one are being converted meanwhile
            ):
                rest = batch.slice(min(skip, batch.num_rows)).select(list(wanted))
                skip -= batch.num_rows - rest.num_rows
                if rest.num_rows:
                    rest.validate(full=True)
                    yield Batch(rest, row, {"row": row + rest.num_rows})
                    row += rest.num_rows

    @contextlib.contextmanager
    def _open(self, labels: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
        with (
            self.files.open(self.path, "rb") as raw,
            pq.ParquetFile(
                raw, read_dictionary=list(labels), buffer_size=_BUFFER_BYTES, pre_buffer=False
            ) as file,
        ):
            yield file

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what opening and decoding raise into one sentence."""
        try:
            yield
        except pa.ArrowException as error:
            raise DataError(
                f"{self.name} is no readable Parquet file, it is corrupt or cut off "
                f"({_one_line(error)}): write or fetch it again"
            ) from error
        except OSError as error:
            # Arrow raises plain OSErrors, without a number, on bytes that don't decode.
            reason = error.strerror or f"it is corrupt or cut off ({_one_line(error)})"
            raise DataError(f"{self.name} can't be read: {reason}") from error


def _row_group(about: pq.FileMetaData, row: int) -> tuple[int, int]:
    """The row group that holds a row, and how many of its rows come before that."""
    for group in range(about.num_row_groups):
        count = about.row_group(group).num_rows
        if row < count:
            return group, row
        row -= count
    return about.num_row_groups, 0


def _one_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
