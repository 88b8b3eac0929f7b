"""Tables to ingest: the protocol of their readers, and the reader of each format."""

import contextlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from cme_dask.data.remote import explained as server_explained
from cme_dask.data.remote import time_mark
from cme_dask.errors import DataError, without_secrets

BATCH_BYTES = 1 << 23


class Kind(StrEnum):
    """What the values of a column are taken for."""

    NUMBER = "number"
    CATEGORY = "category"
    TIME = "time"


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of a table.

    Attributes
    ----------
    columns
        The requested columns in their order, in native types: numbers, booleans, text (plain or
        dictionary-encoded), timestamps; null where a value is missing.
    first_row
        What messages call the first of these rows.
    position
        Where reading resumes after this batch; JSON that only the reader understands.
    """

    columns: pa.RecordBatch
    first_row: int
    position: dict[str, Any]


class Source(Protocol):
    """One table, read in order and in bounded memory."""

    @property
    def name(self) -> str:
        """What messages call it: the path, or the URL if it is remote."""

    def columns(self) -> tuple[str, ...]:
        """The names of its columns, as they are, so possibly repeated."""

    def batches(
        self,
        requested: Sequence[str],
        kinds: Mapping[str, Kind],
        null_values: Sequence[str],
        position: Mapping[str, Any] | None,
    ) -> Iterator[Batch]:
        """Batches from a position on, or from the start.

        ``kinds`` tells a reader of text what each column holds; readers of typed formats give what
        is there. ``null_values`` are the texts that stand for a missing value.

        Raises
        ------
        DataError
            If the table is damaged or a value is not of its kind, naming table, column and row.
        """

    def fingerprint(self) -> str:
        """Changes when the table does: its size and time of change, or its ETag."""


def address_of(files: fsspec.AbstractFileSystem, path: str) -> str:
    """The path of a file, or its URL if it is remote, with the passwords in it."""
    return path if isinstance(files, LocalFileSystem) else str(files.unstrip_protocol(path))


@dataclass(frozen=True)
class FileSource:
    """A table in one file; base of its readers.

    Attributes
    ----------
    files, path
        The file system, and the place of the file in it.
    damage
        What reading raises on a file that is corrupt or cut off.
    """

    files: fsspec.AbstractFileSystem
    path: str
    damage: ClassVar[tuple[type[Exception], ...]] = (EOFError, zlib.error, zipfile.BadZipFile)

    @property
    def name(self) -> str:
        """What messages call it."""
        return without_secrets(address_of(self.files, self.path))

    def fingerprint(self) -> str:
        """Its size and time of change, or its ETag."""
        with self.explained():
            metadata = self.files.info(self.path)
        return time_mark(metadata) or f"{metadata['size']} "

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn what opening and decoding raise into a DataError of one sentence."""
        expected: tuple[type[Exception], ...] = (OSError, *self.damage)
        try:
            with server_explained(self.name):
                yield
        except expected as error:
            raise DataError(f"{self.name} {self.explanation(error)}") from error

    def explanation(self, error: Exception) -> str:
        """The sentence on an error, after the name of the file."""
        if isinstance(error, self.damage):
            return f"is corrupt or cut off ({error}): write or fetch it again"
        return f"can't be read: {getattr(error, 'strerror', None) or error}"


def common_length(name: str, lengths: Mapping[str, int]) -> int:
    """The number of rows that the arrays of a table share.

    Parameters
    ----------
    name
        Of the table.
    lengths
        Rows of its arrays, by name.

    Raises
    ------
    DataError
        If they differ, or there are none.
    """
    if len(set(lengths.values())) != 1:
        info = ", ".join(f"{array!r} has {count:,}" for array, count in lengths.items())
        raise DataError(f"the arrays of {name} must have equally many rows, but {info}")
    (n,) = set(lengths.values())
    if n == 0:
        raise DataError(f"{name} has columns but no rows: leave it out")
    return n


def rows_per_batch(row_bytes: int) -> int:
    """Rows of a batch, 8 MB in all."""
    return max(1, BATCH_BYTES // row_bytes)


def listed(names: Sequence[str]) -> str:
    """Names for a message, the first 20 of many."""
    more = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
    return ", ".join(map(repr, names[:20])) + more
