"""CSV bytes are cut at the ends of records wherever blocks end."""

import csv
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask.data.csv import (
    UnclosedQuoteError,
    in_order,
    last_open,
    quoted_spans,
    record_blocks,
    records_end,
)

FIELDS = st.one_of(
    st.text("ab \u00e9", max_size=4),
    st.text('a",\n\r', max_size=6).map(lambda t: '"' + t.replace('"', '""') + '"'),
    st.text('ab"', max_size=4).filter(lambda t: not t.startswith('"')),  # quotes inside are literal
)
ROWS = st.lists(st.lists(FIELDS, min_size=2, max_size=3).map(",".join), min_size=1, max_size=12)


def scanned_ends(data):
    """Ends of records, byte by byte; the oracle."""
    ends, state = [], "start"
    for i, byte in enumerate(data):
        char = chr(byte)
        if state == "quoted":
            state = "closed" if char == '"' else "quoted"
        elif char == '"' and state in ("start", "closed"):
            state = "quoted"
        elif char in ",\n\r":
            state = "start"
            if char == "\n":
                ends.append(i + 1)
        else:
            state = "plain"
    return ends, state == "quoted"


@settings(max_examples=300)
@given(rows=ROWS, cut=st.integers(0, 200))
def test_records_end_equals_a_scan(rows, cut):
    data = ("\n".join(rows) + "\n").encode()[:cut]
    if b"\n" not in data:
        return
    ends, is_open = scanned_ends(data)
    assert records_end(data) == (ends[-1] if ends else 0)
    assert last_open(data) == is_open


@settings(max_examples=200)
@given(rows=ROWS, size=st.integers(1, 120))
def test_blocks_are_whole_records(rows, size):
    data = ("\n".join(rows) + "\n").encode()
    ends = scanned_ends(data)[0]
    if size < np.diff([0, *ends]).max():
        return
    stream = io.BytesIO(data)
    blocks = list(record_blocks(stream, 0, size))
    assert b"".join(bytes(block.data) for block in blocks) == data
    assert all(len(block.data) <= size for block in blocks)
    assert all(block.start + len(block.data) in ends for block in blocks)
    for block in blocks:  # reading may resume at any
        stream.seek(block.start)
        assert next(record_blocks(stream, block.start, size)) == block


@pytest.mark.parametrize("data", [b'a,b\n1,"2\n3,4\n', b'"' + b"x" * 100])
def test_a_quote_without_end_is_refused(data):
    with pytest.raises(UnclosedQuoteError):
        list(record_blocks(io.BytesIO(data), 0, 64))


def test_heavily_quoted_text_takes_the_fast_path(monkeypatch):
    def refuse(*_):
        raise AssertionError("walked quote by quote")

    monkeypatch.setattr("cme_dask.data.csv._walk", refuse)
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([['say "hi"', 'a,\n"b"', '""']] * 50)
    starts, ends = quoted_spans(text.getvalue().encode())
    assert len(starts) == len(ends) > 150


class Dribble(io.BytesIO):
    def read(self, size=-1, /):
        return super().read(min(size, 3))


def test_a_file_may_give_less_than_was_asked_for():
    data = b"1,2\n3,4\n5,6\n" * 5
    whole = [bytes(b.data) for b in record_blocks(io.BytesIO(data), 0, 16)]
    assert [bytes(b.data) for b in record_blocks(Dribble(data), 0, 16)] == whole


def test_in_order_raises_in_turn():
    def items():
        yield from range(5)
        raise ValueError("the stream broke")

    seen = []
    with pytest.raises(ValueError, match="the stream broke"):
        seen.extend(in_order(lambda i: i * i, items(), 3))
    assert seen == [0, 1, 4, 9, 16]

    def fails(i):
        return 1 // (2 - i)

    seen = []
    with pytest.raises(ZeroDivisionError):
        seen.extend(in_order(fails, items(), 4))
    assert seen == [0, 1]
