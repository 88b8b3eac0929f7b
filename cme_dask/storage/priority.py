"""The priority sample: a uniform sample of rows whose every prefix is one too."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.hashing import priority_keys

Array = Any

_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class RowSample:
    """The rows with the smallest priority keys, sorted by key.

    Any prefix is a random sample without replacement: uniform, or with probabilities
    proportional to the weights in order of drawing.

    Attributes
    ----------
    keys
        Priority keys, ascending, shape (k,).
    index
        Global row indices, shape (k,).
    parts
        Rows of x and y, shapes (k, d).
    weights
        Weights of the rows, shape (k,); ones if rows have none.
    complete
        Whether these are all rows of positive weight.
    """

    keys: Array
    index: Array
    parts: tuple[Array, ...]
    weights: Array
    complete: bool

    def __len__(self) -> int:
        """Number of rows k."""
        return len(self.keys)

    @property
    def importance(self) -> Array:
        """Weights for means over the sample that estimate weighted means over all rows.

        Horvitz-Thompson: w / P(w's row is drawn), with P = 1 - exp(-w t) and t the largest key; sum
        1, shape (k,). Of a small part of the rows all count nearly equally, since the weights are
        in the keys; of all rows each counts by its weight.
        """
        chance = 1.0 if self.complete else -np.expm1(-self.weights * self.keys[-1])
        raw = self.weights / self.weights.max() / chance  # of which the sum is finite
        return np.asarray(raw / raw.sum())

    def prefix(self, size: int) -> "RowSample":
        """The first ``size`` rows."""
        parts = tuple(part[:size] for part in self.parts)
        complete = self.complete and size >= len(self)
        return RowSample(self.keys[:size], self.index[:size], parts, self.weights[:size], complete)


def draw(
    start: int,
    parts: tuple[Array, ...],
    weights: Array | None,
    size: int,
    seed: int,
    below: float = np.inf,
) -> RowSample:
    """Sample of the rows [start, start + n) given as arrays, of those with keys below a bound."""
    keys = priority_keys(seed, start, start + len(parts[0]), weights)
    kept = _smallest(keys, size, below)
    return RowSample(
        keys[kept],
        kept + start,
        tuple(np.array(part[kept]) for part in parts),
        np.ones(len(kept)) if weights is None else np.array(weights[kept]),
        complete=bool(np.isfinite(keys).sum() <= size),
    )


def merge(samples: Iterable[RowSample], size: int) -> RowSample:
    """Sample of the union of disjoint sets of rows, from their samples of at least ``size``."""
    several = list(samples)
    keys = np.concatenate([s.keys for s in several])
    kept = _smallest(keys, size)
    parts = zip(*(s.parts for s in several), strict=True)
    return RowSample(
        keys[kept],
        np.concatenate([s.index for s in several])[kept],
        tuple(np.concatenate(p)[kept] for p in parts),
        np.concatenate([s.weights for s in several])[kept],
        complete=len(keys) <= size and all(s.complete for s in several),
    )


def draw_rows(
    n: int, size: int, seed: int, weights_of: Callable[[int, int], Array] | None = None
) -> RowSample:
    """Keys and indices of the sample of ``n`` rows, block by block; no row is read.

    ``weights_of(start, stop)`` gives the weights of a range of rows, if they have any.
    """
    if n < 1:
        raise DataError("a row sample needs rows, there are none")
    best: RowSample | None = None
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        weights = None if weights_of is None else weights_of(start, stop)
        # Rows that don't come before the last one of a full sample can't be in it.
        below = np.inf if best is None or len(best) < size else float(best.keys[-1])
        fresh = draw(start, (np.empty((stop - start, 0)),), weights, size, seed, below)
        best = fresh if best is None else merge((best, fresh), size)
    assert best is not None
    return best


def _smallest(keys: Array, size: int, below: float = np.inf) -> Array:
    """Positions of the ``size`` smallest keys below a bound (or infinity) in ascending order."""
    candidates = np.flatnonzero(keys < below)
    if len(candidates) > size:
        candidates = candidates[np.argpartition(keys[candidates], size - 1)[:size]]
    return candidates[np.argsort(keys[candidates], kind="stable")]
