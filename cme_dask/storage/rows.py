"""Where rows come from: anything with a shape that can be read by row ranges."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import zarr

from cme_dask.errors import StoreError
from cme_dask.storage.zarr_files import DECODE_ERRORS

Array = Any
T = TypeVar("T")


class RowSource(Protocol):
    """Rows of a two-dimensional array, read by ranges, picklable to any worker."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""

    @property
    def chunk_rows(self) -> int | None:
        """Rows per storage chunk; None if any range costs the same (memory)."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row where it lies, before compression."""

    def read(self, start: int, stop: int) -> Array:
        """Rows [start, stop) as float64, shape (stop - start, d)."""

    def pick(self, positions: tuple[int, ...]) -> "RowSource":
        """The same rows with the columns at these positions only."""


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Rows of an array in memory, the first of them with global index ``offset``."""

    array: Array
    offset: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return int(self.array.shape[0]), int(self.array.shape[1])

    @property
    def chunk_rows(self) -> int | None:
        """Any range costs the same."""
        return None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory."""
        return self.shape[1] * int(self.array.dtype.itemsize)

    def read(self, start: int, stop: int) -> Array:
        """Rows with global index in [start, stop), shape (stop - start, d)."""
        rows = self.array[start - self.offset : stop - self.offset]
        return np.ascontiguousarray(rows, dtype=np.float64)

    def pick(self, positions: tuple[int, ...]) -> "ArraySource":
        """The same rows with the columns at these positions only."""
        return ArraySource(self.array[:, list(positions)], self.offset)


@dataclass(frozen=True, eq=False)
class ZarrSource:
    """Rows of a Zarr array of one or two dimensions, optionally some of its columns.

    A chunk that does not decode is an error that names the chunk.
    """

    array: zarr.Array[Any]
    columns: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        width = self.array.shape[1] if self.array.ndim == 2 else 1
        return int(self.array.shape[0]), width if self.columns is None else len(self.columns)

    @property
    def chunk_rows(self) -> int | None:
        """Rows per chunk (per shard, if there are shards)."""
        return int((self.array.shards or self.array.chunks)[0])

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row in the store: chunks hold all columns."""
        return int(np.prod(self.array.shape[1:])) * int(self.array.dtype.itemsize)

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
        try:
            return self._select(start, stop)
        except DECODE_ERRORS as error:
            raise self._locate(start, stop, error) from error

    def pick(self, positions: tuple[int, ...]) -> "ZarrSource":
        """The same rows with the columns at these positions only; the others are left unread."""
        held = range(self.shape[1]) if self.columns is None else self.columns
        return ZarrSource(self.array, tuple(held[p] for p in positions))

    def missing_chunks(self, start: int, stop: int) -> list[str]:
        """Names of the chunks of rows [start, stop) that are not in the store."""
        names = [
            name for number in self._chunk_numbers(start, stop) for name in self._names(number)
        ]
        return [name for name in names if not zarr.core.sync.sync(self.array.store.exists(name))]

    def _select(self, start: int, stop: int) -> Array:
        if self.array.ndim == 1:
            return self.array[start:stop]
        if self.columns is None:
            return self.array[start:stop, :]
        return self.array.get_orthogonal_selection((slice(start, stop), np.array(self.columns)))

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
        rows = self.chunk_rows or 1
        for number in self._chunk_numbers(start, stop):
            low, high = max(start, number * rows), min(stop, (number + 1) * rows)
            try:
                self._select(low, high)
            except DECODE_ERRORS as cause:
                names = " or ".join(self._names(number))
                return StoreError(
                    f"chunk {names} of {self.array.store} (rows {low} to {high - 1}) is truncated "
                    f"or corrupt ({cause}): restore it from a copy or write the store again"
                )
        return StoreError(
            f"rows {start} to {stop - 1} of {self.array.store} can't be read: {error}"
        )


def read_strips(source: RowSource, start: int, stop: int, length: int) -> Iterator[Array]:
    """Consecutive strips of ``length`` rows of [start, stop), each storage chunk read once."""
    return in_strips(source.read, source.chunk_rows, start, stop, length)


def in_strips(
    read: Callable[[int, int], Array], chunk: int | None, start: int, stop: int, length: int
) -> Iterator[Array]:
    """What ``read(start, stop)`` gives, in strips of ``length`` rows.

    Reads end on the borders of chunks of ``chunk`` rows; rows of a chunk that belong to the next
    strip wait in memory.
    """
    held, held_stop = None, start
    for low in range(start, stop, length):
        high = min(low + length, stop)
        if held_stop < high:
            upto = high if chunk is None else min(stop, -(-high // chunk) * chunk)
            fresh = read(held_stop, upto)
            held = fresh if held is None or not len(held) else np.concatenate([held, fresh])
            held_stop = upto
        assert held is not None
        yield held[: high - low]
        held = held[high - low :]


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The items, each fetched by a second thread while the one before it is in use.

    So a task that computes does not wait for the store as well, at the price of one more item in
    memory.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as reader:
        end = object()
        coming = reader.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = reader.submit(next, items, end)
            yield item  # type: ignore[misc]
