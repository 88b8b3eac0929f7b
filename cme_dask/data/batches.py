"""Mini-batches of a sample in random order, read from where the rows lie.

Blocks of consecutive rows come in random order, several of them are held in memory at once, and
their rows are shuffled. The order is a function of the seed, the epoch, the number of rows and the
chunks alone, so that learning which was interrupted goes on with the batch it had come to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from cme_dask.data.sources import RowSource, take_rows
from cme_dask.errors import DataError
from cme_dask.numerics.folds import Split

Array = Any

_BLOCK_ROWS = 1 << 12  # of rows in memory, where any range costs the same
_BLOCKS = 8  # shuffled together at least
_BATCHES = 8  # that the rows shuffled together suffice for
_POOL_BYTES = 1 << 28  # of the rows shuffled together, unless a block alone has more


@dataclass(frozen=True, eq=False)
class Batch:
    """Random rows of a sample.

    Attributes
    ----------
    parts
        Rows of x and, if there is a y, of y, shapes (b, d).
    weights
        Shape (b,); ones if rows have none.
    index
        Global row indices, shape (b,).
    number
        Of the batch in its epoch, from 0.
    """

    parts: tuple[Array, ...]
    weights: Array = field(repr=False)
    index: Array = field(repr=False)
    number: int = 0

    @property
    def x(self) -> Array:
        """Rows of x, shape (b, d_x)."""
        return self.parts[0]

    @property
    def y(self) -> Array:
        """Rows of y, shape (b, d_y)."""
        return self.parts[1]

    def __len__(self) -> int:
        """Number of rows b."""
        return len(self.index)


@dataclass(frozen=True, eq=False)
class BatchReader:
    """What batches are read from.

    Attributes
    ----------
    sources
        Rows of x and, if there is a y, of y.
    weights
        Weights of the rows, or None.
    parts
        Parts of the rows, to all of which a row of a batch belongs.
    units
        The columns by which the parts are defined, by name.
    dropping
        Whether rows that lack a value are left out.
    """

    sources: tuple[RowSource, ...]
    weights: RowSource | None
    parts: tuple[Split, ...]
    units: Mapping[str, RowSource]
    dropping: bool = False

    @classmethod
    def of(cls, sample: Any, part: Split | None = None) -> Self:
        """Of the rows of a :class:`Sample`, and of a part of them if one is given."""
        parts = tuple(each for each in (sample.part, part) if each is not None)
        units = sample.units if parts else {}
        return cls(sample.sources, sample.weights, parts, units, sample.dropping)

    @property
    def n_rows(self) -> int:
        """Number of rows, whatever parts they belong to."""
        return self.sources[0].shape[0]

    @property
    def block(self) -> int:
        """Rows that are read at once."""
        reads = (*self.sources, *([] if self.weights is None else [self.weights]))
        return max(source.chunk_rows or _BLOCK_ROWS for source in (*reads, *self.units.values()))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a batch."""
        reads = (*self.sources, *([] if self.weights is None else [self.weights]))
        return 8 * (1 + sum(source.shape[1] for source in reads))

    def together(self, size: int) -> int:
        """Blocks whose rows are shuffled together, for batches of so many rows."""
        enough = max(_BLOCKS, -(-_BATCHES * size // self.block))
        return max(1, min(enough, _POOL_BYTES // (self.block * self.row_bytes)))

    def belongs(self, index: Array) -> Array:
        """Whether rows belong to all parts, shape (k,)."""
        result = np.ones(len(index), dtype=bool)
        if self.parts:
            units = {name: take_rows(s, index, self.block)[:, 0] for name, s in self.units.items()}
            for part in self.parts:
                result &= part.selects(index, units)
        return result

    def read(self, index: Array) -> "_Rows":
        """Rows by index, in this order."""
        weights = () if self.weights is None else (self.weights,)
        by_row = np.argsort(index)
        parts = []
        for source in (*self.sources, *weights):
            values = np.empty((len(index), source.shape[1]))
            values[by_row] = take_rows(source, index[by_row], self.block)
            parts.append(values)
        return _Rows(index, tuple(parts), len(self.sources))


def batches(
    reader: BatchReader, size: int, seed: int = 0, *, epoch: int = 0, start: int = 0
) -> Iterator[Batch]:
    """See :meth:`cme_dask.data.sample.Sample.batches`."""
    numbers = {"size": size, "seed": seed, "epoch": epoch, "start": start}
    for name, value in numbers.items():
        least = int(name == "size")
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
            raise DataError(f"{name} must be an integer of at least {least}, got {value!r}")
    return _batches(reader, int(size), np.random.default_rng((seed, epoch)), int(start))


def _batches(
    reader: BatchReader, size: int, rng: np.random.Generator, start: int
) -> Iterator[Batch]:
    block, n = reader.block, reader.n_rows
    order = rng.permutation(-(-n // block))
    together = reader.together(size)
    number, held = 0, reader.read(np.empty(0, dtype=np.int64))
    for first in range(0, len(order), together):
        blocks = np.sort(order[first : first + together])
        index = np.concatenate([np.arange(b * block, min((b + 1) * block, n)) for b in blocks])
        index = index[reader.belongs(index)]
        index = index[rng.permutation(len(index))]
        fresh = None
        if reader.dropping:  # how many batches they make is only known when they are read
            fresh = reader.read(index).without_missing()
            index = fresh.index
        # Batches that were seen before need no rows, only their number.
        skipped = min(max(start - number, 0), (len(held) + len(index)) // size)
        if skipped:
            number += skipped
            drop = skipped * size - len(held)
            held = held.after(skipped * size)
            index = index[max(drop, 0) :]
            fresh = None if fresh is None else fresh.after(max(drop, 0))
        held = held.joined(reader.read(index) if fresh is None else fresh)
        last = first + together >= len(order)
        while len(held) >= size or (last and len(held)):
            if number >= start:
                yield held.batch(size, number)
            held, number = held.after(size), number + 1


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows that wait for their batch, in its order."""

    index: Array
    reads: tuple[Array, ...]
    variables: int

    def __len__(self) -> int:
        return len(self.index)

    def joined(self, other: "_Rows") -> "_Rows":
        parts = zip(self.reads, other.reads, strict=True)
        index = np.concatenate([self.index, other.index])
        return _Rows(index, tuple(np.concatenate(pair) for pair in parts), self.variables)

    def without_missing(self) -> "_Rows":
        lost = np.zeros(len(self.index), dtype=bool)
        for part in self.reads:
            lost |= np.isnan(part).any(axis=1)
        reads = tuple(part[~lost] for part in self.reads)
        return _Rows(self.index[~lost], reads, self.variables)

    def after(self, count: int) -> "_Rows":
        reads = tuple(part[count:] for part in self.reads)
        return _Rows(self.index[count:], reads, self.variables)

    def batch(self, size: int, number: int) -> Batch:
        parts = tuple(part[:size].copy() for part in self.reads)
        index = self.index[:size].copy()
        weights = parts[-1][:, 0] if len(parts) > self.variables else np.ones(len(index))
        return Batch(parts[: self.variables], weights, index, number)
