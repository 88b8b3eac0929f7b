"""Cut a stream of CSV bytes into blocks that hold whole records."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

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
