"""Tables to ingest, in whatever format: what a reader gives, and which one reads what."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, Protocol

import fsspec
import pyarrow as pa
from fsspec.core import has_magic, url_to_fs
from fsspec.implementations.local import LocalFileSystem

from cme_dask.errors import DataError, ResourceError

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
        The wanted columns, in the wanted order, in native types: numbers, booleans, text (plain or
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
        wanted: Sequence[str],
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


def find_sources(
    entries: Sequence[str | os.PathLike[str]],
    *,
    storage_options: Mapping[str, Any] | None = None,
    block_bytes: int | None = None,
) -> list[Source]:
    """The tables that the entries (paths, patterns, fsspec URLs) name, each once, sorted by name.

    The reader goes by the suffix: ``.parquet`` and ``.pq``, ``.npy`` and ``.npz``, a folder with
    Zarr metadata; all others are CSV, plain or compressed.

    Raises
    ------
    DataError
        If an entry names nothing, or a folder that is no Zarr store.
    ResourceError
        If the package for a URL's protocol is missing.
    """
    if isinstance(entries, str) or not entries:
        raise DataError(f"files must be a list of at least one path, got {entries!r}")
    found: dict[str, Source] = {}
    for entry in entries:
        for source in _matches(os.fspath(entry), dict(storage_options or {}), block_bytes):
            found.setdefault(source.name, source)
    return [found[name] for name in sorted(found)]


def _matches(entry: str, options: dict[str, Any], block_bytes: int | None) -> list[Source]:
    try:
        files, path = url_to_fs(entry, **options)
    except ImportError as error:
        raise ResourceError(f"{entry} can't be opened: {error}") from error
    except (ValueError, TypeError) as error:
        raise DataError(f"{entry} can't be opened: {error}") from error
    if isinstance(files, LocalFileSystem):
        path = os.path.abspath(path)
    try:
        if files.isfile(path):  # first: a file's own name may contain [ or ?
            return [_file_source(files, path, block_bytes)]
        if files.isdir(path):
            return [_folder_source(files, path, entry, options)]
        if not has_magic(path):
            raise DataError(f"there is no file {entry}")
        found: list[Source] = []
        for match in files.glob(path):
            if files.isfile(match):
                found.append(_file_source(files, match, block_bytes))
            elif _holds_zarr(files, match):
                found.append(_folder_source(files, match, entry, options))
    except OSError as error:
        raise DataError(f"{entry} can't be read: {error.strerror or error}") from error
    if not found:
        raise DataError(f"no file matches {entry}")
    return found


def _file_source(files: fsspec.AbstractFileSystem, path: str, block_bytes: int | None) -> Source:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in (".parquet", ".pq"):
        from cme_dask.storage.parquet_reader import ParquetSource

        return ParquetSource(files, path)
    if suffix in (".npy", ".npz"):
        from cme_dask.storage.numpy_reader import NumpySource

        return NumpySource(files, path)
    from cme_dask.storage.csv_reader import BLOCK_BYTES, CsvSource

    return CsvSource(files, path, block_bytes or BLOCK_BYTES)


def _folder_source(
    files: fsspec.AbstractFileSystem, path: str, entry: str, options: dict[str, Any]
) -> Source:
    if not _holds_zarr(files, path):
        raise DataError(f"{entry} is a folder: name its files, such as {path}/*.csv")
    from cme_dask.storage.zarr_reader import ZarrTableSource

    return ZarrTableSource(display_name(files, path), options)


def _holds_zarr(files: fsspec.AbstractFileSystem, path: str) -> bool:
    return any(files.isfile(f"{path}/{name}") for name in ("zarr.json", ".zgroup", ".zarray"))


def display_name(files: fsspec.AbstractFileSystem, path: str) -> str:
    """What messages call a file: its path, or its URL if it is remote."""
    return path if isinstance(files, LocalFileSystem) else str(files.unstrip_protocol(path))


def file_fingerprint(files: fsspec.AbstractFileSystem, path: str) -> str:
    """Size and time of change, or ETag, of one file."""
    about = files.info(path)
    marks = [about.get(key) for key in ("mtime", "ETag", "etag", "LastModified", "created")]
    changed = next((mark for mark in marks if mark is not None), "")
    return f"{about['size']} {changed}"


def rows_per_batch(row_bytes: int) -> int:
    """Rows of a batch, 8 MB in all."""
    return max(1, BATCH_BYTES // row_bytes)


def listed(names: Sequence[str]) -> str:
    """Names for a message, the first 20 of many."""
    more = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
    return ", ".join(map(repr, names[:20])) + more
