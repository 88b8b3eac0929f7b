"""The priority sample: a uniform sample of rows whose every prefix is one too."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cme_dask.numerics.folds import Folding, priority_keys
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip

Array = Any


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
    units
        Values of ``group`` and ``time`` at the rows, by name, shapes (k,); those that are known.
    """

    keys: Array
    index: Array
    parts: tuple[Array, ...]
    weights: Array
    complete: bool
    units: Mapping[str, Array] = field(default_factory=dict)

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
        return self._at(slice(size), self.complete and size >= len(self))

    def only(self, kept: Array) -> "RowSample":
        """The sample of a part of the rows: those of these rows that belong to it, shape (k,)."""
        return self._at(kept, self.complete)

    def folds(self, folding: Folding, n_folds: int) -> Array:
        """Fold number of each row, as passes over all rows find it, shape (k,)."""
        return folding.folds(self.index, self.units, n_folds)

    def _at(self, where: Any, complete: bool) -> "RowSample":
        return RowSample(
            self.keys[where],
            self.index[where],
            tuple(part[where] for part in self.parts),
            self.weights[where],
            complete,
            {name: values[where] for name, values in self.units.items()},
        )


def draw(
    start: int,
    parts: tuple[Array, ...],
    weights: Array | None,
    size: int,
    seed: int,
    below: float = np.inf,
    units: Mapping[str, Array] | None = None,
) -> RowSample:
    """Sample of the rows [start, start + n) given as arrays, see :func:`draw_among`."""
    rows = np.arange(start, start + len(parts[0]))
    return draw_among(rows, parts, weights, size, seed, below, units)


def draw_among(
    rows: Array,
    parts: tuple[Array, ...],
    weights: Array | None,
    size: int,
    seed: int,
    below: float = np.inf,
    units: Mapping[str, Array] | None = None,
) -> RowSample:
    """Sample of rows given as arrays.

    Parameters
    ----------
    rows
        Their global indices, shape (n,).
    parts
        Rows of x and y, shapes (n, d).
    weights
        Shape (n,), or None for equal ones.
    size, seed
        Of the sample.
    below
        Rows with keys from here on are left out.
    units
        Values of ``group`` and ``time``, shapes (n,).
    """
    keys = priority_keys(seed, rows, weights)
    retained = _smallest(keys, size, below)
    return RowSample(
        keys[retained],
        rows[retained],
        tuple(np.array(part[retained]) for part in parts),
        np.ones(len(retained)) if weights is None else np.array(weights[retained]),
        complete=bool(np.isfinite(keys).sum() == len(retained)),
        units={name: np.array(values[retained]) for name, values in (units or {}).items()},
    )


def merge(samples: Iterable[RowSample], size: int) -> RowSample:
    """Sample of the union of disjoint sets of rows, from their samples of at least ``size``."""
    several = list(samples)
    keys = np.concatenate([s.keys for s in several])
    retained = _smallest(keys, size)
    parts = zip(*(s.parts for s in several), strict=True)
    return RowSample(
        keys[retained],
        np.concatenate([s.index for s in several])[retained],
        tuple(np.concatenate(p)[retained] for p in parts),
        np.concatenate([s.weights for s in several])[retained],
        complete=len(keys) <= size and all(s.complete for s in several),
        units={
            name: np.concatenate([s.units[name] for s in several])[retained]
            for name in several[0].units
        },
    )


@dataclass(frozen=True)
class PrioritySample(Reduction[RowSample, RowSample]):
    """Keys, indices and weights of a row sample (a bottom-k sketch), without its rows.

    Parameters
    ----------
    size, seed
        Of the sample.
    bound
        Rows with keys from here on are left out.
    """

    size: int
    seed: int
    bound: float = np.inf
    name = "row-sample"
    kinds = (RowSample,)

    def cost(self, extent: Extent) -> Cost:
        """A key for each row, and two samples."""
        return Cost(flops=50, state=2 * extent.strip_rows * 8, partial=2 * 4 * self.size * 8)

    def start(self, like: Array) -> list[Array]:
        """The smallest keys of the strips so far."""
        return [np.empty(0)]

    def update(self, state: list[Array], strip: Strip) -> RowSample:
        """Of one strip, without rows that can't be in the sample of all strips so far."""
        full = len(state[0]) == self.size
        bound = min(self.bound, float(state[0].max())) if full else self.bound
        drawn = draw_among(strip.rows, (), strip.weights, self.size, self.seed, bound)
        keys = np.concatenate([state[0], drawn.keys])
        state[0] = keys if len(keys) <= self.size else np.partition(keys, self.size)[: self.size]
        return drawn

    def combine(self, a: RowSample, b: RowSample) -> RowSample:
        """Of both sets of rows."""
        return merge((a, b), self.size)


@dataclass(frozen=True)
class Rows(Reduction[tuple[Array, ...], tuple[Array, ...]]):
    """All rows of each variable that a pass reads, in their order: give it the few to be read.

    Parameters
    ----------
    count
        Their number.
    """

    count: int
    name = "gather-rows"
    checked = False

    def cost(self, extent: Extent) -> Cost:
        """The rows."""
        return Cost(retained=self.count * extent.n_columns * 8)

    def update(self, state: None, strip: Strip) -> tuple[Array, ...]:
        """The rows of one strip."""
        return strip.parts

    def combine(self, a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        """One after the other."""
        return tuple(np.concatenate(pair) for pair in zip(a, b, strict=True))


def _smallest(keys: Array, size: int, below: float = np.inf) -> Array:
    """Positions of the ``size`` smallest keys below a bound (or infinity) in ascending order."""
    candidates = np.flatnonzero(keys < below)
    if len(candidates) > size:
        candidates = candidates[np.argpartition(keys[candidates], size - 1)[:size]]
    return candidates[np.argsort(keys[candidates], kind="stable")]
