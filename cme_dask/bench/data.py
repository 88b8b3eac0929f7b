"""Rows to measure on, in memory or in a store that counts the bytes it hands out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore, WrapperStore

from cme_dask.storage.columns import Columns
from cme_dask.storage.rows import RowSource
from cme_dask.storage.sample import Sample, open_store
from cme_dask.storage.writer import writing_sample

Array = Any

_BATCH = 1 << 18


def batches(n: int, d: int, seed: int = 0) -> Iterator[tuple[Array, Array]]:
    """Rows x uniform on [0, 1]^d and y = (x + u) / 2, u uniform too, in batches."""
    for number, start in enumerate(range(0, n, _BATCH)):
        rng = np.random.default_rng([seed, number])
        x, u = rng.uniform(size=(2, min(_BATCH, n - start), d))
        yield x, (x + u) / 2


def uniform_rows(n: int, d: int, seed: int = 0) -> tuple[Array, Array]:
    """The same rows in memory, shapes (n, d)."""
    x, y = zip(*batches(n, d, seed), strict=True)
    return np.concatenate(x), np.concatenate(y)


def write_uniform(path: Path, n: int, d: int, seed: int = 0) -> None:
    """The same rows in a sample store."""
    columns = (Columns.default("x", d), Columns.default("y", d))
    with writing_sample(path, columns, expected_rows=n, seed=seed) as writer:
        for x, y in batches(n, d, seed):
            writer.append(x, y)


class CountingStore(WrapperStore[LocalStore]):
    """A store on disk that counts the bytes it hands out, as they are stored."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store)
        self.bytes_read = 0

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Value of a key; see ``zarr.abc.store.Store``."""
        value = await self._store.get(key, prototype, byte_range)
        self.bytes_read += 0 if value is None else len(value)
        return value


def open_counted(path: str) -> tuple[Sample, CountingStore]:
    """The sample of a store on disk, and the counter of what is read from it."""
    store = CountingStore(LocalStore(path, read_only=True))
    return open_store(zarr.open_group(store, mode="r"), path), store


@dataclass(frozen=True, eq=False)
class RowRange:
    """Rows [start, stop) of a source, counted from zero."""

    source: RowSource
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """(stop - start, d)."""
        return self.stop - self.start, self.source.shape[1]

    @property
    def chunk_rows(self) -> int | None:
        """Rows per chunk of the source; the range begins at a chunk."""
        return self.source.chunk_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the source."""
        return self.source.row_bytes

    def read(self, start: int, stop: int) -> Array:
        """Rows [start, stop) of the range."""
        return self.source.read(self.start + start, self.start + stop)

    def pick(self, positions: tuple[int, ...]) -> "RowRange":
        """The same rows with the columns at these positions only."""
        return RowRange(self.source.pick(positions), self.start, self.stop)


def share_of(sample: Sample, number: int, shares: int) -> Sample:
    """One of several equal shares of the rows of a stored sample, in whole chunks."""
    chunk = max(source.chunk_rows or 1 for source in sample.reads)
    chunks = -(-sample.n_rows // chunk)
    start, stop = (min(chunks * i // shares * chunk, sample.n_rows) for i in (number, number + 1))
    kept = sample.row_sample
    if kept is not None:
        here = (start <= kept.index) & (kept.index < stop)
        kept = replace(
            kept,
            keys=kept.keys[here],
            index=kept.index[here] - start,
            parts=tuple(part[here] for part in kept.parts),
            weights=kept.weights[here],
        )
    sources = tuple(RowRange(source, start, stop) for source in sample.sources)
    return replace(sample, sources=sources, row_sample=kept)


def regression_rows(n: int, d: int, seed: int) -> tuple[Array, Array, Array]:
    """Rows x uniform on [0, 1]^d, y = f(x) + noise of shape (n, 1), and the true mean f(x).

    f(x) = sin(2 pi x_1) + prod_j cos(x_j), noise normal with standard deviation 0.3.
    """
    rng = np.random.default_rng([seed, n, d])
    x = rng.uniform(size=(n, d))
    truth = np.sin(2.0 * np.pi * x[:, 0]) + np.cos(x).prod(axis=1)
    return x, (truth + 0.3 * rng.standard_normal(n))[:, None], truth
