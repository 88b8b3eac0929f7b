"""The priority sample: a uniform sample of rows whose every prefix is one too."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.hashing import priority_keys

Array = Any

DEFAULT_SIZE = 1 << 15
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class RowSample:
    """The rows with the smallest priority keys, sorted by key.

    Any prefix is a random sample without replacement: uniform, or with probabilities
    proportional to the weights in order of drawing. Its rows count equally.

    Attributes
    ----------
    keys
        Priority keys, ascending, shape (k,).
    index
        Global row indices, shape (k,).
    parts
        Rows of x and y, shapes (k, d).
    """

    keys: Array
    index: Array
    parts: tuple[Array, ...]

    def __len__(self) -> int:
        """Number of rows k."""
        return len(self.keys)

    def prefix(self, size: int) -> "RowSample":
        """The first ``size`` rows."""
        parts = tuple(part[:size] for part in self.parts)
        return RowSample(self.keys[:size], self.index[:size], parts)


def draw(
    start: int, parts: tuple[Array, ...], weights: Array | None, size: int, seed: int
) -> RowSample:
    """Sample of the rows [start, start + n) given as arrays."""
    keys = priority_keys(seed, start, start + len(parts[0]), weights)
    kept = _smallest(keys, size)
    return RowSample(keys[kept], kept + start, tuple(np.array(part[kept]) for part in parts))


def merge(samples: Iterable[RowSample], size: int) -> RowSample:
    """Sample of the union of disjoint sets of rows, from their samples of at least ``size``."""
    several = list(samples)
    keys = np.concatenate([s.keys for s in several])
    kept = _smallest(keys, size)
    index = np.concatenate([s.index for s in several])
    parts = zip(*(s.parts for s in several), strict=True)
    return RowSample(keys[kept], index[kept], tuple(np.concatenate(p)[kept] for p in parts))


def draw_rows(n: int, size: int, seed: int) -> RowSample:
    """The unweighted sample of ``n`` rows, keys and indices only: no row is read."""
    best: RowSample | None = None
    for start in range(0, n, _BLOCK):
        nothing = (np.empty((min(_BLOCK, n - start), 0)),)
        fresh = draw(start, nothing, None, size, seed)
        best = fresh if best is None else merge((best, fresh), size)
    if best is None:
        raise DataError("a row sample needs rows, there are none")
    return best


def _smallest(keys: Array, size: int) -> Array:
    """Positions of the ``size`` smallest finite keys in ascending order."""
    candidates = np.flatnonzero(np.isfinite(keys))
    if len(candidates) > size:
        candidates = candidates[np.argpartition(keys[candidates], size - 1)[:size]]
    return candidates[np.argsort(keys[candidates], kind="stable")]
