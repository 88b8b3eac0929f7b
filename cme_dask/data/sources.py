"""Sources of rows: anything with a shape that can be read by row ranges."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, TypeVar

import numpy as np
import zarr
from zarr.core.sync import sync
from zarr.storage import LocalStore

from cme_dask.data.guarded import GuardedStore, check_chunk, chunk_ends, chunk_marks
from cme_dask.data.store import DECODE_ERRORS, brief, check_access, packed_bytes
from cme_dask.errors import CmeDaskError, DataError, StoreError

Array = Any
T = TypeVar("T")


class RowSource(ABC):
    """Rows of a two-dimensional array, read by ranges, picklable to any worker.

    What a pass must know of a kind of source is an attribute of it.

    Attributes
    ----------
    shape
        (n, d).
    row_bytes
        Bytes of a row where it lies, before compression.
    columns_read
        Numbers per row that are in memory while rows are read: at least the d columns.
    chunk_rows
        Rows per storage chunk; None if any range costs the same (memory).
    in_memory
        Whether the rows lie in the memory of this process.
    dask_array
        The rows as a Dask array if they are one, else None.
    """

    shape: tuple[int, int]
    row_bytes: int
    columns_read: int
    chunk_rows: int | None = None
    in_memory: bool = False
    dask_array: Any = None

    @property
    def inputs(self) -> tuple["Input", ...]:
        """The sources from which these rows are made, each with the place of the first row there.

        Where several sources are made from one, a pass reads that one once.
        """
        return ((self, 0),)

    def make(self, *rows: Array) -> Array:
        """The rows here, from those of the inputs."""
        (made,) = rows
        return made

    def held_whole(self, shares_memory: bool) -> bool:
        """Whether a task holds all its rows at once, in this process (or in another one).

        Rows of Dask arrays are computed before a task begins, another process gets copies of rows
        in memory.
        """
        return self.dask_array is not None or (self.in_memory and not shares_memory)

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Rows [start, stop) as float64, shape (stop - start, d)."""

    @abstractmethod
    def pick(self, positions: tuple[int, ...]) -> "RowSource":
        """The same rows with the columns at these positions only."""

    def map(self, function: "RowFunction", width: int) -> "RowSource":
        """The rows that a function makes of these, of so many columns, when they are read."""
        return MappedSource(self, function, width)

    def between(self, start: int, stop: int) -> "RowSource":
        """Rows [start, stop) as a source of their own, not copied."""
        return ShiftedSource(self, start, stop - start)

    def for_task(self, start: int, stop: int) -> Any:
        """Rows [start, stop) as a source that a task may hold whole."""
        return self

    def missing_chunks(self, start: int, stop: int) -> list[str]:
        """Names of the storage chunks of rows [start, stop) that are missing."""
        return []

    @abstractmethod
    def fingerprint(self, token: Callable[[Any, str], str]) -> str:
        """What tells these rows from others, from ``token(value, name)`` of what they are."""


Input = tuple[RowSource, int]
RowFunction = Callable[[Array], Array]
"""From rows of shape (b, d) to rows of shape (b, k), each made of its own row alone."""


@dataclass(eq=False)
class ArraySource(RowSource):
    """Rows of an array in memory, the first of them with global index ``offset``."""

    array: Array
    offset: int = 0
    in_memory: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        self.shape = int(self.array.shape[0]), int(self.array.shape[1])
        self.row_bytes = self.shape[1] * int(self.array.dtype.itemsize)
        self.columns_read = self.shape[1]

    def read(self, start: int, stop: int) -> Array:
        """Rows with global index in [start, stop), shape (stop - start, d)."""
        rows = self.array[start - self.offset : stop - self.offset]
        return np.ascontiguousarray(rows, dtype=np.float64)

    def pick(self, positions: tuple[int, ...]) -> "ArraySource":
        """The same rows with the columns at these positions only."""
        return ArraySource(self.array[:, list(positions)], self.offset)

    def between(self, start: int, stop: int) -> "ArraySource":
        """Rows [start, stop) as a view."""
        return ArraySource(self.array[start - self.offset : stop - self.offset])

    def for_task(self, start: int, stop: int) -> "ArraySource":
        """A copy of rows [start, stop)."""
        return ArraySource(self.read(start, stop), start)

    def fingerprint(self, token: Callable[[Any, str], str]) -> str:
        """Of all values."""
        return token(self.__dask_tokenize__(), "rows")

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        """The values, and whether columns lie together: Dask's tokens leave that out."""
        array = np.asarray(self.array)
        by_columns = 1 not in array.shape and abs(array.strides[0]) < abs(array.strides[1])
        return array, by_columns, self.offset


class DerivedSource(RowSource):
    """Rows that are made from those of other sources, whenever they are read."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[Input, ...]:
        """Other sources, each with the place of the first row there."""

    def describe(self, sources: Sequence[RowSource]) -> None:
        """Take over what a pass must know of several sources."""
        self.row_bytes = sum(source.row_bytes for source in sources)
        self.columns_read = sum(source.columns_read for source in sources)
        chunks = [source.chunk_rows for source in sources if source.chunk_rows is not None]
        self.chunk_rows = max(chunks, default=None)
        self.in_memory = any(source.in_memory for source in sources)

    def read(self, start: int, stop: int) -> Array:
        """Rows [start, stop), made from those of the inputs."""
        return self.make(*(source.read(start + at, stop + at) for source, at in self.inputs))

    def missing_chunks(self, start: int, stop: int) -> list[str]:
        """Of the inputs."""
        each = (source.missing_chunks(start + at, stop + at) for source, at in self.inputs)
        return list(dict.fromkeys(name for names in each for name in names))


@dataclass(eq=False)
class MappedSource(DerivedSource):
    """Rows that a function makes of the rows of another source, whenever they are read.

    Attributes
    ----------
    source
        Rows of shape (n, d).
    function
        From rows of shape (b, d) to rows of shape (b, k), each made of its own row alone.
    width
        Number of columns k.
    columns
        Positions of the columns of the result that are in use; None for all.
    """

    source: RowSource
    function: RowFunction
    width: int
    columns: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        width = self.width if self.columns is None else len(self.columns)
        self.shape = self.source.shape[0], width
        self.row_bytes, self.chunk_rows = self.source.row_bytes, self.source.chunk_rows
        self.columns_read = self.source.columns_read + self.width  # those of the result as well
        self.in_memory = self.source.in_memory

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Those of the source."""
        return self.source.inputs

    def make(self, *rows: Array) -> Array:
        """What the function makes of the rows, as float64, shape (b, k).

        Raises
        ------
        DataError
            If the function returns another shape, or no numbers.
        """
        made = applied(self.function, self.source.make(*rows), self.width)
        return made if self.columns is None else made[:, list(self.columns)]

    def pick(self, positions: tuple[int, ...]) -> "MappedSource":
        """The same rows with the columns at these positions only."""
        held = range(self.width) if self.columns is None else self.columns
        return replace(self, columns=tuple(held[p] for p in positions))

    def between(self, start: int, stop: int) -> "MappedSource":
        """The same function of these rows of the source."""
        return replace(self, source=self.source.between(start, stop))

    def for_task(self, start: int, stop: int) -> "MappedSource":
        """The same function of what the task holds."""
        return replace(self, source=self.source.for_task(start, stop))

    def fingerprint(self, token: Callable[[Any, str], str]) -> str:
        """Of the source, of the function and of the columns in use."""
        of_rows, function = self.source.fingerprint(token), token(self.function, "map")
        return f"{of_rows} by {function} {self.columns or ''}".strip()


@dataclass(eq=False)
class ShiftedSource(DerivedSource):
    """Some of the rows of another source, from row ``first`` on.

    Attributes
    ----------
    source
        The other source.
    first
        Its row that is the first one here.
    count
        Number of rows.
    """

    source: RowSource
    first: int
    count: int

    def __post_init__(self) -> None:
        self.shape = self.count, self.source.shape[1]
        self.row_bytes, self.chunk_rows = self.source.row_bytes, self.source.chunk_rows
        self.columns_read, self.in_memory = self.source.columns_read, self.source.in_memory

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Those of the other source, from its row ``first`` on."""
        return tuple((source, self.first + at) for source, at in self.source.inputs)

    def make(self, *rows: Array) -> Array:
        """As the other source makes them."""
        return self.source.make(*rows)

    def pick(self, positions: tuple[int, ...]) -> "ShiftedSource":
        """The same rows with the columns at these positions only."""
        return replace(self, source=self.source.pick(positions))

    def for_task(self, start: int, stop: int) -> "ShiftedSource":
        """The same rows of what the task holds."""
        return replace(self, source=self.source.for_task(self.first + start, self.first + stop))

    def fingerprint(self, token: Callable[[Any, str], str]) -> str:
        """Of the source and of the range."""
        return f"{self.source.fingerprint(token)} from {self.first}, {self.count} rows"


@dataclass(eq=False)
class ProductSource(DerivedSource):
    """Products of the rows of two sources, entry by entry, whenever they are read.

    Attributes
    ----------
    first, second
        Sources of rows of the same shape, none of them a Dask array.
    """

    first: RowSource
    second: RowSource

    def __post_init__(self) -> None:
        self.shape = self.first.shape
        self.describe((self.first, self.second))

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Those of both sources."""
        return (*self.first.inputs, *self.second.inputs)

    def make(self, *rows: Array) -> Array:
        """The products."""
        count = len(self.first.inputs)
        return self.first.make(*rows[:count]) * self.second.make(*rows[count:])

    def pick(self, positions: tuple[int, ...]) -> "ProductSource":
        """The same rows with the columns at these positions only."""
        return ProductSource(self.first.pick(positions), self.second.pick(positions))

    def for_task(self, start: int, stop: int) -> "ProductSource":
        """The products of what the task holds."""
        return ProductSource(self.first.for_task(start, stop), self.second.for_task(start, stop))

    def fingerprint(self, token: Callable[[Any, str], str]) -> str:
        """Of both sources."""
        return f"{self.first.fingerprint(token)} times {self.second.fingerprint(token)}"


def applied(function: RowFunction, rows: Array, width: int | None = None) -> Array:
    """What a function makes of rows, as float64 of shape (b, k).

    Parameters
    ----------
    function
        See :class:`MappedSource`.
    rows
        Shape (b, d).
    width
        The expected k; None for any.

    Raises
    ------
    DataError
        If the function returns another shape, or no numbers.
    """
    name = getattr(function, "__name__", type(function).__name__)
    result = function(rows)
    try:
        values = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} maps rows to numbers, got {brief(repr(result))}") from error
    expected = f"({len(rows)}, {'k' if width is None else width})"
    if values.ndim != 2 or len(values) != len(rows) or width not in (None, values.shape[1]):
        raise DataError(
            f"{name} made shape {values.shape} of rows of shape {rows.shape}, expected {expected}: "
            "return one row for each row, as a two-dimensional array"
        )
    return np.ascontiguousarray(values)


@dataclass(eq=False)
class ZarrSource(RowSource):
    """Rows of a Zarr array of one or two dimensions, optionally some of its columns.

    A chunk that does not decode is an error that names the chunk.

    Attributes
    ----------
    array
        The array.
    columns
        Positions of the columns; None for all.
    whole
        Whether all its chunks were written, so that one that is not there is lost; of others, its
        values are those of the array's fill value.
    """

    array: zarr.Array[Any]
    columns: tuple[int, ...] | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        array, columns = self.array, self.columns
        width = array.shape[1] if array.ndim == 2 else 1
        self.shape = int(array.shape[0]), width if columns is None else len(columns)
        self.chunk_rows = int((array.shards or array.chunks)[0])
        # Chunks hold whole rows of those columns that lie in them.
        self.row_bytes = int(np.prod(array.shape[1:])) * int(array.dtype.itemsize)
        self.columns_read = width
        if columns is not None and array.ndim == 2:
            step = array.chunks[1]
            starts = {column // step * step for column in columns}
            self.columns_read = sum(min(step, width - start) for start in starts)

    def read(self, start: int, stop: int) -> Array:
        """Rows [start, stop) as float64, shape (stop - start, d).

        Raises
        ------
        StoreError
            If a chunk is truncated, corrupt or missing; the message names it.
        """
        rows = np.asarray(self.stored(start, stop), dtype=np.float64)
        return rows if rows.ndim == 2 else rows[:, None]

    def stored(self, start: int, stop: int) -> Array:
        """Rows [start, stop) in the stored type and number of dimensions; errors as of `read`."""
        array = self.array
        try:
            if self.whole and array.shards is None:
                self._check_files(start, stop)
            if array.ndim == 1:
                rows = array[start:stop]
            elif self.columns is None:
                rows = array[start:stop, :]
            else:
                rows = array.get_orthogonal_selection((slice(start, stop), np.array(self.columns)))
        except CmeDaskError:  # a missing chunk, named, or one that a server refuses
            raise
        except DECODE_ERRORS as error:
            check_access(error, self.array.store)
            raise self._locate(start, stop, error) from error
        if self.whole:
            self._check_filled(start, rows)
        return rows

    def pick(self, positions: tuple[int, ...]) -> "ZarrSource":
        """The same rows with the columns at these positions only; the others are left unread."""
        held = range(self.shape[1]) if self.columns is None else self.columns
        return replace(self, columns=tuple(held[p] for p in positions))

    def missing_chunks(self, start: int, stop: int) -> list[str]:
        """Names of the chunks of rows [start, stop) that are not in the store."""
        names = [
            name for number in self._chunk_numbers(start, stop) for name in self._names(number)
        ]
        return [name for name in names if not sync(self.array.store.exists(name))]

    def fingerprint(self, token: Callable[[Any, str], str]) -> str:
        """Of every chunk: of its checksum in stores of ours, else see :func:`chunk_marks`."""
        array, rows = self.array, self.chunk_rows
        keys = (
            name
            for number in self._chunk_numbers(0, array.shape[0])
            for name in self._names(number)
        )
        digest = hashlib.sha256(repr((array.shape, str(array.dtype), rows)).encode())
        for mark in (chunk_ends if self.whole else chunk_marks)(array, keys):
            digest.update(mark)
        return f"{digest.hexdigest()[:16]} {self.columns or ''}".strip()

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        """Of a folder of others also what its chunks hold now: its description does not tell."""
        local = not self.whole and isinstance(self.array.store, LocalStore)
        marks = self.fingerprint(str) if local else ""
        return self.array, self.columns, self.whole, marks

    def check_listed(self, location: str) -> None:
        """StoreError if chunks of a local folder are missing, by a look at the names alone.

        Parameters
        ----------
        location
            Where it lies, for the message.
        """
        store = self.array.store
        if not isinstance(store, GuardedStore) or 0 in self.array.shape:
            return
        first, *_ = self._names(0)
        folder = store.root / first.rsplit("/", self.array.ndim)[0]
        count = -(-self.array.shape[0] // self.array.chunks[0])
        result = set(os.listdir(folder)) if folder.is_dir() else set()
        if len(result) < count or not {"0", str(count - 1)} <= result:
            lost = next((i for i in range(count) if str(i) not in result), 0)
            raise lost_chunk(self._names(lost)[0], location)

    def _check_filled(self, start: int, rows: Array) -> None:
        """StoreError if rows are those of a chunk that is not in the store."""
        step = self.chunk_rows or 1
        fill: Any = self.array.fill_value
        firsts = [
            max(number * step, start) for number in self._chunk_numbers(start, start + len(rows))
        ]
        if not firsts:
            return
        heads = np.asarray(rows[np.asarray(firsts, dtype=np.int64) - start])
        alike = np.isnan(heads) if heads.dtype.kind == "f" and np.isnan(fill) else heads == fill
        for first, same in zip(firsts, alike.reshape(len(firsts), -1).all(axis=1), strict=True):
            if same and (lost := self.missing_chunks(first, first + 1)):
                raise lost_chunk(lost[0], str(self.array.store))

    def _check_files(self, start: int, stop: int) -> None:
        """Errors of `check_chunk`; StoreError on a chunk that is missing from a local folder."""
        size, blosc = packed_bytes(self.array)
        for number in self._chunk_numbers(start, stop):
            for name in self._names(number):
                if not check_chunk(self.array.store, name, size, blosc=blosc):
                    raise lost_chunk(name, str(self.array.store))

    def _chunk_numbers(self, start: int, stop: int) -> range:
        rows = self.chunk_rows or 1
        return range(start // rows, -(-stop // rows))

    def _names(self, number: int) -> list[str]:
        rest = (
            range(-(-s // c))
            for s, c in zip(self.array.shape[1:], self.array.chunks[1:], strict=True)
        )
        grid = np.stack(np.meshgrid([number], *rest, indexing="ij"), axis=-1)
        encode = self.array.metadata.encode_chunk_key
        prefix = f"{self.array.path}/" if self.array.path else ""
        return [
            prefix + encode(tuple(int(i) for i in key)) for key in grid.reshape(-1, grid.shape[-1])
        ]

    def _locate(self, start: int, stop: int, error: BaseException) -> StoreError:
        """The error of rows that do not decode, with the first chunk that does not."""
        rows, numbers = self.chunk_rows or 1, self._chunk_numbers(start, stop)
        if len(numbers) == 1:
            names = " or ".join(self._names(numbers[0]))
            return StoreError(
                f"chunk {names} of {self.array.store} (rows {start} to {stop - 1}) is truncated or "
                f"corrupt ({brief(error)}): restore it from a copy or write the store again"
            )
        for number in numbers:
            try:
                self.stored(max(start, number * rows), min(stop, (number + 1) * rows))
            except StoreError as located:
                return located
        return StoreError(
            f"rows {start} to {stop - 1} of {self.array.store} can't be read: {brief(error)}"
        )


def take_rows(
    source: RowSource, index: Array, block: int, start: int = 0, stop: int | None = None
) -> Array:
    """Rows by sorted index, shape (k, d): each block that holds some is read once.

    Parameters
    ----------
    source
        The rows.
    index
        Ascending global indices, shape (k,).
    block
        Rows that are read at once, from a multiple of this number on.
    start, stop
        The rows that may be read; default all.
    """
    end = source.shape[0] if stop is None else stop
    pieces = [np.empty((0, source.shape[1]))]
    for number in np.unique(index // block):
        low, high = max(int(number) * block, start), min((int(number) + 1) * block, end)
        mine = index[np.searchsorted(index, low) : np.searchsorted(index, high)]
        pieces.append(source.read(low, high)[mine - low])
    return np.concatenate(pieces)


def lost_chunk(name: str, location: str) -> StoreError:
    """The error on a chunk that is not there."""
    return StoreError(
        f"chunk {name} of {location} is missing: restore it from a copy or write the store again"
    )


def in_strips(
    read: Callable[[int, int], Array],
    chunk: int | None,
    start: int,
    stop: int,
    length: int,
    beyond: int = 0,
) -> Iterator[Array]:
    """What ``read(start, stop)`` gives, in strips of ``length`` rows and the ``beyond`` next ones.

    Reads end on the borders of chunks of ``chunk`` rows; rows of a chunk that belong to the next
    strip wait in memory.
    """
    held, held_stop, end = None, start, stop + beyond
    for low in range(start, stop, length):
        high = min(low + length, stop)
        needed = high + beyond
        if held_stop < needed:
            upto = needed if chunk is None else min(end, -(-needed // chunk) * chunk)
            fresh = read(held_stop, upto)
            held = fresh if held is None or not len(held) else np.concatenate([held, fresh])
            held_stop = upto
        assert held is not None
        yield held[: needed - low]
        held = held[high - low :]


def strips_of(
    sources: Sequence[RowSource], start: int, stop: int, length: int
) -> Iterator[tuple[Array, ...]]:
    """Rows [start, stop) of sources, in strips of ``length`` rows.

    A source from which several are made is read once, with the rows between its first and its last
    use, unless these are more than a strip.
    """
    uses: dict[RowSource, set[int]] = defaultdict(set)
    for source, at in chain.from_iterable(source.inputs for source in sources):
        uses[source].add(at)
    readers: list[Iterator[Array]] = []
    places: dict[Input, tuple[int, int]] = {}  # the reader, and the row of its strips
    for source, rows in uses.items():
        near = max(rows) - min(rows) <= length
        for together in [rows] if near else [{at} for at in rows]:
            first = min(together)
            places |= {(source, at): (len(readers), at - first) for at in together}
            span, beyond = (first + start, first + stop), max(together) - first
            readers.append(in_strips(source.read, source.chunk_rows, *span, length, beyond))
    counts = (min(length, stop - low) for low in range(start, stop, length))
    for count, *strips in zip(counts, *readers, strict=True):
        made = []
        for one in sources:
            where = (places[each] for each in one.inputs)
            made.append(one.make(*(strips[i][row : row + count] for i, row in where)))
        yield tuple(made)


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The items, each fetched by a second thread while the one before it is in use.

    So a task that computes does not wait for the store as well, at the price of one more item in
    memory. Closing does not wait for an item that is still being fetched: after a failed task
    the garbage collector may close this generator in Zarr's own thread, which does the fetching.
    """
    reader = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    try:
        end = object()
        coming = reader.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = reader.submit(next, items, end)
            yield item  # type: ignore[misc]
    finally:
        reader.shutdown(wait=False, cancel_futures=True)
