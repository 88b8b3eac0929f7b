"""CSV files, plain or compressed: find, open and read them, and say what is wrong with one."""

import contextlib
import csv
import gzip
import io
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
from fsspec.core import OpenFile, has_magic, url_to_fs
from fsspec.implementations.local import LocalFileSystem

from cme_dask.errors import DataError, ResourceError

Array = Any

BLOCK_BYTES = 1 << 21  # the reader runs up to 32 blocks ahead
NULL_VALUES = ("", "NA", "N/A", "NaN", "nan", "null", "NULL")

_CORRUPT = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zipfile.BadZipFile)
_CONVERSION = re.compile(
    r"In CSV column #(\d+): Row #(\d+): CSV conversion error to \w+: invalid value '(.*)'",
    re.DOTALL,
)
_RAGGED = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")


@dataclass(frozen=True)
class Source:
    """One CSV file."""

    files: fsspec.AbstractFileSystem
    path: str

    @property
    def name(self) -> str:
        """What messages call it: the path, or the URL if it is remote."""
        local = isinstance(self.files, LocalFileSystem)
        return self.path if local else str(self.files.unstrip_protocol(self.path))

    def check_header(self, wanted: Sequence[str]) -> None:
        """DataError unless each wanted column is there exactly once."""
        found = self._header()
        lacking = [name for name in wanted if name not in found]
        if lacking:
            hint = " (the header is not UTF-8 text)" if "\ufffd" in "".join(found) else ""
            raise DataError(
                f"{self.name} lacks column {listed(lacking)}: there are {listed(found)}{hint}"
            )
        twice = [name for name in wanted if found.count(name) > 1]
        if twice:
            raise DataError(f"the header of {self.name} has {listed(twice)} more than once")

    def blocks(
        self, wanted: Sequence[str], null_values: Sequence[str]
    ) -> Iterator[tuple[int, Array]]:
        """Pairs (first row, values) with values of shape (rows, columns), NaN where missing."""
        row = 2
        # Only without threads does the reader count the rows, for its messages.
        reading = pacsv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)
        parsing = pacsv.ParseOptions(newlines_in_values=True)
        converting = pacsv.ConvertOptions(
            include_columns=list(wanted),
            column_types=dict.fromkeys(wanted, pa.float64()),
            null_values=list(null_values),
        )
        with (
            self._explained(),
            self._open() as file,
            pacsv.open_csv(file, reading, parsing, converting) as batches,
        ):
            for batch in batches:
                columns = [column.to_numpy(zero_copy_only=False) for column in batch.columns]
                yield row, np.column_stack(columns)
                row += len(batch)
        if row == 2:
            raise DataError(f"{self.name} has a header but no rows: leave it out")

    def _header(self) -> list[str]:
        with self._explained(), self._open() as file:
            # Other columns may have any encoding, hence "replace".
            text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
            names = next(filter(None, csv.reader(text)), None)
            text.detach()
        if names is None:
            raise DataError(f"{self.name} is empty: expected a header and rows")
        return names

    def _open(self) -> OpenFile:
        return OpenFile(self.files, self.path, compression="infer")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what decompressing and parsing raise into one sentence."""
        try:
            yield
        except _CORRUPT as error:
            raise DataError(
                f"{self.name} is corrupt or cut off ({error}): fetch it again"
            ) from error
        except OSError as error:
            raise DataError(f"{self.name} can't be read: {error.strerror or error}") from error
        except (pa.ArrowException, csv.Error) as error:
            raise DataError(self._explanation(str(error))) from error

    def _explanation(self, message: str) -> str:
        if match := _CONVERSION.search(message):
            column, row, value = self._header()[int(match[1])], match[2], match[3][:40]
            if "\ufffd" in value:
                hint = "its bytes are not UTF-8 text: convert the file"
            else:
                hint = "correct it, or if it means a missing value, add it to the null values"
            return (
                f"column {column!r} of {self.name} must be numeric but has {value!r} in row {row}: "
                f"{hint}"
            )
        if match := _RAGGED.search(message):
            return f"row {match[1]} of {self.name} has {match[3]} fields, expected {match[2]}"
        if "straddl" in message:
            return (
                f"a row of {self.name} is longer than {BLOCK_BYTES:,} bytes: a quote that is never "
                "closed does this"
            )
        if "Empty CSV file" in message:
            return f"{self.name} has a header but no rows: leave it out"
        return f"{self.name} is no readable CSV file: {message}"


def find_sources(files: Sequence[str | os.PathLike[str]]) -> list[Source]:
    """The files that the entries name, each once, sorted."""
    if isinstance(files, str) or not files:
        raise DataError(f"files must be a list of at least one path, got {files!r}")
    found = {source for entry in files for source in _matches(os.fspath(entry))}
    return sorted(found, key=lambda source: source.name)


def _matches(entry: str) -> list[Source]:
    try:
        files, path = url_to_fs(entry)
    except ImportError as error:
        raise ResourceError(f"{entry} can't be opened: {error}") from error
    except ValueError as error:
        raise DataError(f"{entry} can't be opened: {error}") from error
    if isinstance(files, LocalFileSystem):
        path = os.path.abspath(path)
    if files.isfile(path):  # first: a file's own name may contain [ or ?
        return [Source(files, path)]
    if files.isdir(path):
        raise DataError(f"{entry} is a folder: name its files, such as {path}/*.csv")
    if not has_magic(path):
        raise DataError(f"there is no file {entry}")
    matches = [Source(files, match) for match in files.glob(path) if files.isfile(match)]
    if not matches:
        raise DataError(f"no file matches {entry}")
    return matches


def listed(names: Sequence[str]) -> str:
    """Names for a message, the first 20 of many."""
    more = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
    return ", ".join(map(repr, names[:20])) + more
