"""CSV files, plain or compressed: read them block by block, and say what is wrong with one."""

import contextlib
import csv
import gzip
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv as pacsv
from fsspec.core import OpenFile

from cme_dask.errors import DataError, option
from cme_dask.storage.csv_blocks import Block, UnclosedQuoteError, record_blocks
from cme_dask.storage.in_order import in_order
from cme_dask.storage.tables import Batch, Kind, display_name, file_fingerprint

BLOCK_BYTES = 1 << 23

_HEADER_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_CORRUPT = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zipfile.BadZipFile)
_CONVERSION = re.compile(
    r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\w+): "
    r"invalid (?:value '(.*)'|UTF8 data)",
    re.DOTALL,
)
_RAGGED = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_TYPES = {Kind.NUMBER: pa.float64(), Kind.TIME: pa.string()}
_LABELS = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True)
class CsvSource:
    """One CSV file with a header; see :class:`~cme_dask.storage.tables.Source`.

    Other columns than the wanted ones may hold anything. Rows in messages count the header as row 1
    and skip empty lines. A position is the byte and the row at which a block starts.
    """

    files: fsspec.AbstractFileSystem
    path: str
    block_bytes: int = BLOCK_BYTES

    @property
    def name(self) -> str:
        """What messages call it."""
        return display_name(self.files, self.path)

    def fingerprint(self) -> str:
        """Its size and time of change."""
        with self._explained():
            return file_fingerprint(self.files, self.path)

    def columns(self) -> tuple[str, ...]:
        """The names in the header."""
        return self._header()[0]

    def batches(
        self,
        wanted: Sequence[str],
        kinds: Mapping[str, Kind],
        null_values: Sequence[str],
        position: Mapping[str, Any] | None,
    ) -> Iterator[Batch]:
        """Numbers as float64, labels dictionary-encoded, times as text."""
        header, data_start = self._header()
        start, row = (position["byte"], position["row"]) if position else (data_start, 2)
        parse = partial(
            _parse,
            names=header,
            parsing=pacsv.ParseOptions(delimiter=self._delimiter),
            converting=pacsv.ConvertOptions(
                include_columns=list(wanted),
                column_types={name: _TYPES.get(kinds[name], _LABELS) for name in wanted},
                null_values=list(null_values),
                strings_can_be_null=True,
            ),
        )
        with self._explained(), self._open() as file:
            file.seek(start)
            blocks = record_blocks(file, start, self.block_bytes, self._delimiter.encode())
            for end, parsed in in_order(parse, blocks):
                if isinstance(parsed, pa.ArrowException):
                    raise DataError(self._explanation(str(parsed), row - 1)) from parsed
                for batch in parsed:
                    following = {"byte": end, "row": row + batch.num_rows}
                    yield Batch(batch, row, following)
                    row += batch.num_rows
        if row == 2:
            raise DataError(f"{self.name} has a header but no rows: leave it out")

    @property
    def _delimiter(self) -> str:
        return "\t" if ".tsv" in PurePosixPath(self.path).suffixes else ","

    def _header(self) -> tuple[tuple[str, ...], int]:
        """The names, and the byte at which the records start."""
        with self._explained(), self._open() as file:
            head = file.read(_HEADER_BYTES)
        skipped = len(_BOM) if head.startswith(_BOM) else 0
        # One byte is one character, so that the bytes can be counted; decoded name by name.
        text = io.StringIO(head[skipped:].decode("latin-1"), newline="")
        lines = iter(text.readline, "")
        used = skipped

        def counted() -> Iterator[str]:
            nonlocal used
            for line in lines:
                used += len(line)
                yield line

        with self._explained():
            names = next(filter(None, csv.reader(counted(), delimiter=self._delimiter)), None)
        if names is None:
            raise DataError(f"{self.name} is empty: expected a header and rows")
        return tuple(n.encode("latin-1").decode("utf-8", errors="replace") for n in names), used

    def _open(self) -> OpenFile:
        return OpenFile(self.files, self.path, compression="infer")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what opening, decompressing and splitting raise into one sentence."""
        try:
            yield
        except _CORRUPT as error:
            raise DataError(
                f"{self.name} is corrupt or cut off ({error}): fetch it again"
            ) from error
        except OSError as error:
            raise DataError(f"{self.name} can't be read: {error.strerror or error}") from error
        except UnclosedQuoteError as error:
            raise DataError(
                f"a row of {self.name} is longer than {self.block_bytes:,} bytes: a quote that is "
                "never closed does this"
            ) from error
        except csv.Error as error:
            raise DataError(f"{self.name} is no readable CSV file: {error}") from error

    def _explanation(self, message: str, rows_before: int) -> str:
        if match := _CONVERSION.search(message):
            column, row = self.columns()[int(match[1])], rows_before + int(match[2])
            value = match[4]
            if value is None or "\ufffd" in value:
                shown = "" if value is None else f" {value[:40]!r}"
                return (
                    f"column {column!r} of {self.name} has unreadable bytes{shown} in row {row}: "
                    "its bytes are not UTF-8 text: convert the file"
                )
            return (
                f"column {column!r} of {self.name} must be numeric but has {value[:40]!r} in row "
                f"{row}: correct it, or if it means a missing value, add it to the null values; a "
                f"column of labels is given as {option('categorical')}, one of dates as "
                f"{option('datetime')}"
            )
        if match := _RAGGED.search(message):
            row = rows_before + int(match[1])
            return f"row {row} of {self.name} has {match[3]} fields, expected {match[2]}"
        return f"{self.name} is no readable CSV file: {message}"


def _parse(
    block: Block,
    names: Sequence[str],
    parsing: pacsv.ParseOptions,
    converting: pacsv.ConvertOptions,
) -> tuple[int, list[pa.RecordBatch] | pa.ArrowException]:
    """Where a block ends and its rows, or the error, which does not know their numbers yet."""
    end = block.start + len(block.data)
    options = pacsv.ReadOptions(
        use_threads=False,
        column_names=names,
        block_size=len(block.data) + 1,  # one block, so that no record straddles two
    )
    try:
        table = pacsv.read_csv(pa.BufferReader(block.data), options, parsing, converting)
    except pa.ArrowException as error:
        return end, error
    return end, table.combine_chunks().to_batches()
