"""CSV files, plain or compressed: cut into blocks of whole records, and read."""

import csv
import gzip
import io
import lzma
import os
import re
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
from fsspec.core import OpenFile

from cme_dask.data.tables import Batch, FileSource, Kind, listed
from cme_dask.errors import DataError, option, remedy

# Cut a stream of CSV bytes into blocks that hold whole records


Array = Any


class Readable(Protocol):
    """An open binary file."""

    def read(self, size: int = ..., /) -> bytes:
        """At most so many bytes, none at the end."""


@dataclass(frozen=True)
class Block:
    """Bytes [start, start + len(data)) of a stream, whole records."""

    data: memoryview
    start: int


class UnclosedQuoteError(ValueError):
    """A record goes on for a whole block or to the end of the file."""


def record_blocks(
    file: Readable, start: int, block_bytes: int, delimiter: bytes = b","
) -> Iterator[Block]:
    """The rest of a stream, which stands at byte ``start``, in blocks of at most ``block_bytes``.

    Where a block ends depends on where it starts alone, so reading may resume at any block.

    Raises
    ------
    UnclosedQuoteError
        If a record is longer than a block, or the last one ends inside quotes.
    """
    rest = b""
    while True:
        data = rest + _read(file, block_bytes - len(rest))
        if not data:
            return
        if len(data) < block_bytes:  # the last one
            if last_open(data, delimiter):
                raise UnclosedQuoteError
            yield Block(memoryview(data), start)
            return
        end = records_end(data, delimiter)
        if end == 0:
            raise UnclosedQuoteError
        yield Block(memoryview(data)[:end], start)
        start, rest = start + end, data[end:]


def _read(file: Readable, size: int) -> bytes:
    """Exactly ``size`` bytes unless the file ends; compressed and remote files may give fewer."""
    parts = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def records_end(data: bytes, delimiter: bytes = b",") -> int:
    """Where the last whole record ends; 0 if there is none."""
    newline = b"\n" if b"\n" in data else b"\r"
    starts, ends = quoted_spans(data, delimiter)
    limit = len(data)
    while (position := data.rfind(newline, 0, limit)) >= 0:
        span = int(np.searchsorted(starts, position)) - 1
        if span < 0 or ends[span] < position:
            return position + 1
        limit = int(starts[span])
    return 0


def last_open(data: bytes, delimiter: bytes = b",") -> bool:
    """Whether the last record ends inside quotes."""
    _, ends = quoted_spans(data, delimiter)
    return len(ends) > 0 and int(ends[-1]) >= len(data)


def quoted_spans(data: bytes, delimiter: bytes = b",") -> tuple[Array, Array]:
    """Positions of the opening and closing quotes of quoted fields, for whole records in ``data``.

    A quote opens a field only at its start; inside, two quotes stand for one. A field left open
    closes at ``len(data)``. A field with quotes inside may come as several adjoining spans.
    """
    if b'"' not in data:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    values = np.frombuffer(data, dtype=np.uint8)
    quotes = np.flatnonzero(values == ord('"'))
    starts, ends = quotes[::2], quotes[1::2]
    if len(ends) < len(starts):
        ends = np.append(ends, len(data))
    # Quotes open and close in turn if each opening one starts a field or doubles the one before.
    before = values[starts - 1]
    opens = (before == ord(delimiter)) | (before == ord("\n")) | (before == ord("\r"))
    opens |= starts == 0
    opens[1:] |= starts[1:] == ends[:-1] + 1
    return (starts, ends) if opens.all() else _walk(values, quotes, delimiter)


def _walk(values: Array, quotes: Array, delimiter: bytes) -> tuple[Array, Array]:
    """The same quote by quote, for data with quotes inside unquoted fields."""
    before_field = {ord(delimiter), ord("\n"), ord("\r")}
    starts: list[int] = []
    ends: list[int] = []
    end = -2  # of the last closed span
    for quote in quotes.tolist():
        if len(starts) > len(ends):
            ends.append(quote)
            end = quote
        elif quote == end + 1 or quote == 0 or int(values[quote - 1]) in before_field:
            starts.append(quote)
    if len(starts) > len(ends):
        ends.append(len(values))
    return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)


# Work on a stream of items in threads, results in the order of the items


Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_WORKERS = 8
"""More would hold more blocks in memory than they would gain in time."""


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """``map`` in threads that runs at most ``workers`` + 1 items ahead.

    An error of an item, or of the stream itself, is raised where its result would have come.
    """
    workers = workers or min(cores(), MAX_WORKERS)
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[Result]] = deque()
        failure: Exception | None = None
        iterator = iter(items)
        try:
            while True:
                try:
                    item = next(iterator)
                except StopIteration:
                    break
                except Exception as error:  # noqa: BLE001 - raised below, in its turn
                    failure = error
                    break
                waiting.append(pool.submit(function, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
        if failure is not None:
            raise failure


# CSV files, plain or compressed: read them block by block, and say what is wrong with one


BLOCK_BYTES = 1 << 23

_HEADER_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_CONVERSION = re.compile(
    r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\w+): "
    r"invalid (?:value '(.*)'|UTF8 data)",
    re.DOTALL,
)
_RAGGED = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_TRUTH = "true", "false"
_TYPES = {Kind.NUMBER: pa.float64(), Kind.TIME: pa.string()}
_LABELS = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True)
class CsvSource(FileSource):
    """One CSV file with a header; see :class:`~cme_dask.data.tables.Source`.

    Columns that are not requested may hold anything. Rows in messages count the header as row 1 and
    skip empty lines. A position is the byte and the row at which a block starts.
    """

    block_bytes: int = BLOCK_BYTES
    damage = (*FileSource.damage, gzip.BadGzipFile, lzma.LZMAError, UnclosedQuoteError, csv.Error)

    def columns(self) -> tuple[str, ...]:
        """The names in the header."""
        return self._header()[0]

    def batches(
        self,
        requested: Sequence[str],
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
                include_columns=list(requested),
                column_types={name: _TYPES.get(kinds[name], _LABELS) for name in requested},
                null_values=list(null_values),
                strings_can_be_null=True,
            ),
        )
        with self.explained(), self._open() as file:
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
        self._check_single()
        with self.explained(), self._open() as file:
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

        with self.explained():
            names = next(filter(None, csv.reader(counted(), delimiter=self._delimiter)), None)
        if names is None:
            raise DataError(f"{self.name} is empty: expected a header and rows")
        return tuple(n.encode("latin-1").decode("utf-8", errors="replace") for n in names), used

    def _check_single(self) -> None:
        """DataError if it is a Zip file of several files: only the first one would be read."""
        if PurePosixPath(self.path).suffix.lower() != ".zip":
            return
        with (
            self.explained(),
            self.files.open(self.path, "rb") as raw,
            zipfile.ZipFile(raw) as archive,
        ):
            members = [each.filename for each in archive.infolist() if not each.is_dir()]
        # macOS puts its own attributes of a file beside it.
        members = [name for name in members if not name.startswith("__MACOSX/")]
        if len(members) > 1:
            raise DataError(
                f"{self.name} holds {len(members):,} files ({listed(members)}): unpack it, and "
                "give them by a pattern"
            )

    def _open(self) -> OpenFile:
        return OpenFile(self.files, self.path, compression="infer")

    def explanation(self, error: Exception) -> str:
        """What is wrong with its bytes."""
        if isinstance(error, UnclosedQuoteError):
            most = f"{self.block_bytes:,} bytes"
            return f"has a row longer than {most}: a quote that is never closed does this"
        if isinstance(error, csv.Error):
            return f"is no readable CSV file: {error}"
        return super().explanation(error)

    def _explanation(self, message: str, rows_before: int) -> str:
        if match := _CONVERSION.search(message):
            column, row = self.columns()[int(match[1])], rows_before + int(match[2])
            value = match[4]
            if value == "":  # Arrow shows blanks trimmed
                field = remedy("null_values=['', ' ']", "--null-value '' --null-value ' '")
                return (
                    f"column {column!r} of {self.name} must be numeric but has an empty field, or "
                    f"one of blanks alone, in row {row}: give its text to the null values, each "
                    f"blank of it, as in {field}"
                )
            if value is None or "\ufffd" in value:
                shown = "" if value is None else f" {value[:40]!r}"
                return (
                    f"column {column!r} of {self.name} has unreadable bytes{shown} in row {row}: "
                    "its bytes are not UTF-8 text: convert the file"
                )
            if value.lower() in _TRUTH:
                return (
                    f"column {column!r} of {self.name} must be numeric but has {value!r} in row "
                    f"{row}: write truth values as 1 and 0, or give the column of labels as "
                    f"{option('categorical')}"
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
