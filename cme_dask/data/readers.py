"""NumPy and Parquet files, read by ranges of rows and batch by batch."""

import contextlib
import itertools
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cme_dask.data.arrow import as_arrow, matrix_names
from cme_dask.data.tables import Batch, FileSource, Kind, common_length, rows_per_batch
from cme_dask.errors import DataError

# NumPy files, ``.npy`` and ``.npz``: read them by ranges of rows


Array = Any
Place = Any  # of a column in a row: a position, the name of a field, or None for all of it
Read = Callable[[int], bytes]

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True)
class _Member:
    """One stored array of rows; ``file`` is its name in an archive, ``start`` its first byte."""

    name: str
    file: str | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_column: bool
    start: int

    @property
    def places(self) -> dict[str, Place]:
        """Where each column is in a row."""
        if self.dtype.names:
            return {field: field for field in self.dtype.names}
        if len(self.shape) == 1:
            return {self.name: None}
        return dict(zip(matrix_names(self.name, self.shape[1]), itertools.count(), strict=False))


@dataclass(frozen=True)
class _Strand:
    """Bytes that follow one another: rows of some columns of a member."""

    member: _Member
    offset: int
    row_bytes: int
    places: dict[str, Place]

    def split(self, data: bytes) -> dict[str, Array]:
        """The values of each column."""
        rows = np.frombuffer(data, self.member.dtype)
        if self.member.by_column or self.member.places == {self.member.name: None}:
            return dict.fromkeys(self.places, rows)
        if len(self.member.shape) == 2:
            rows = rows.reshape(-1, self.member.shape[1])
            return {name: rows[:, place] for name, place in self.places.items()}
        return {name: rows[place] for name, place in self.places.items()}


@dataclass(frozen=True)
class NumpySource(FileSource):
    """One ``.npy`` or ``.npz`` file; see :class:`~cme_dask.data.tables.Source`.

    The columns of a matrix ``a`` are ``a0, a1, ...`` (of an ``.npy`` file ``x0, x1, ...``), those
    of an array of records its fields. Of an archive, members with another number of dimensions than
    one or two are passed over. Rows in messages count from 0. A position is the number of rows
    read.
    """

    def columns(self) -> tuple[str, ...]:
        """Fields, names of the arrays of one dimension, numbered ones of those of two."""
        return tuple(name for member in self._members() for name in member.places)

    def batches(
        self,
        requested: Sequence[str],
        kinds: Mapping[str, Kind],
        null_values: Sequence[str],
        position: Mapping[str, Any] | None,
    ) -> Iterator[Batch]:
        """The stored types; NaN and NaT are missing values."""
        members = [m for m in self._members() if set(m.places) & set(requested)]
        n = common_length(self.name, {member.name: member.shape[0] for member in members})
        row = int(position["row"]) if position else 0
        strands = [strand for m in members for strand in _strands(m, requested, row)]
        step = rows_per_batch(sum(strand.row_bytes for strand in strands))
        with self.explained(), self._reads(strands) as reads:
            for low in range(row, n, step):
                count = min(step, n - low)
                columns: dict[str, Array] = {}
                for strand, read in zip(strands, reads, strict=True):
                    data = read(count * strand.row_bytes)
                    if len(data) < count * strand.row_bytes:
                        raise EOFError("its rows end early")
                    columns |= strand.split(data)
                arrays = [as_arrow(columns[name], name, self.name) for name in requested]
                batch = pa.RecordBatch.from_arrays(arrays, names=list(requested))
                yield Batch(batch, low, {"row": low + count})

    def _members(self) -> list[_Member]:
        with self.explained(), self.files.open(self.path, "rb") as raw:
            if self.path.lower().endswith(".npy"):
                members = [self._member("x", None, raw)]
            else:
                with zipfile.ZipFile(raw) as archive:
                    members = []
                    for file in archive.namelist():
                        with archive.open(file) as stream:
                            members.append(self._member(file.removesuffix(".npy"), file, stream))
        tables = [m for m in members if len(m.shape) in ((1,) if m.dtype.names else (1, 2))]
        if not tables:
            shapes = ", ".join(f"{m.name!r} of shape {m.shape}" for m in members) or "nothing"
            raise DataError(f"{self.name} holds {shapes}: expected arrays of shape (n,) or (n, d)")
        return tables

    def _member(self, name: str, file: str | None, stream: IO[bytes]) -> _Member:
        """The header of one array."""
        try:
            version = np.lib.format.read_magic(stream)
            if version not in _HEADERS:
                raise ValueError(f"its format version {version} is not supported")
            shape, by_column, dtype = _HEADERS[version](stream)
        except ValueError as error:
            raise DataError(f"{self.name} is no readable NumPy file: {error}") from error
        if dtype.hasobject:
            raise DataError(
                f"{name!r} in {self.name} holds Python objects, which are not read: save it as "
                "numbers or fixed-length text"
            )
        return _Member(name, file, dtype, shape, by_column and len(shape) == 2, stream.tell())

    @contextlib.contextmanager
    def _reads(self, strands: Sequence[_Strand]) -> Iterator[list[Read]]:
        """For each strand a function that gives its next bytes."""
        with contextlib.ExitStack() as stack:
            if strands[0].member.file is None:
                yield [self._ranges(strand.offset) for strand in strands]
                return
            raw = stack.enter_context(self.files.open(self.path, "rb"))
            archive = stack.enter_context(zipfile.ZipFile(raw))
            reads: list[Read] = []
            for strand in strands:
                assert strand.member.file is not None
                stream = stack.enter_context(archive.open(strand.member.file))
                stream.seek(strand.offset)
                reads.append(stream.read)
            yield reads

    def _ranges(self, offset: int) -> Read:
        def read(size: int) -> bytes:
            nonlocal offset
            data: bytes = self.files.cat_file(self.path, offset, offset + size)
            offset += size
            return data

        return read


def _strands(member: _Member, requested: Sequence[str], row: int) -> list[_Strand]:
    """What to read of a member from a row on."""
    places = {name: place for name, place in member.places.items() if name in requested}
    size, n = member.dtype.itemsize, member.shape[0]
    if member.by_column:
        return [
            _Strand(member, member.start + (place * n + row) * size, size, {name: place})
            for name, place in places.items()
        ]
    row_bytes = size * (member.shape[1] if len(member.shape) == 2 else 1)
    return [_Strand(member, member.start + row * row_bytes, row_bytes, places)]


# Parquet files: read them batch by batch, however large their row groups are


_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class ParquetSource(FileSource):
    """One Parquet file; see :class:`~cme_dask.data.tables.Source`.

    Pages are read through buffers of 1 MB a column, so memory depends on the batch and not on the
    row group. Rows in messages count from 0. A position is the number of rows read.
    """

    damage = (pa.ArrowException,)

    def columns(self) -> tuple[str, ...]:
        """The names of the columns; of a nested one that of the whole."""
        with self.explained(), self._open() as file:
            return tuple(file.schema_arrow.names)

    def batches(
        self,
        requested: Sequence[str],
        kinds: Mapping[str, Kind],
        null_values: Sequence[str],
        position: Mapping[str, Any] | None,
    ) -> Iterator[Batch]:
        """The stored types; text that is requested as labels dictionary-encoded."""
        labels = [name for name in requested if kinds[name] is Kind.CATEGORY]
        row = int(position["row"]) if position else 0
        with self.explained(), self._open(labels) as file:
            if file.metadata.num_rows == 0:
                raise DataError(f"{self.name} has columns but no rows: leave it out")
            first, skip = _row_group(file.metadata, row)
            for batch in file.iter_batches(
                rows_per_batch(8 * len(requested)),
                row_groups=range(first, file.num_row_groups),
                columns=list(requested),
                use_threads=False,  # the batches before this one are being converted meanwhile
            ):
                rest = batch.slice(min(skip, batch.num_rows)).select(list(requested))
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

    def explanation(self, error: Exception) -> str:
        """Arrow raises plain OSErrors, without a number, on bytes that don't decode."""
        line = str(error).split("\n", 1)[0]
        if isinstance(error, pa.ArrowException):
            damage = "is no readable Parquet file, it is corrupt or cut off"
            return f"{damage} ({line}): write or fetch it again"
        reason = getattr(error, "strerror", None)
        return f"can't be read: {reason or f'it is corrupt or cut off ({line})'}"


def _row_group(about: pq.FileMetaData, row: int) -> tuple[int, int]:
    """The row group that holds a row, and how many of its rows come before that."""
    for group in range(about.num_row_groups):
        count = about.row_group(group).num_rows
        if row < count:
            return group, row
        row -= count
    return about.num_row_groups, 0
