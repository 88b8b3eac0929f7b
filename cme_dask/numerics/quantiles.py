"""Distribution functions and quantiles of mixtures of weighted atoms, many mixtures at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from cme_dask.numerics.scoring import sorted_crps

Array = Any

_HELD = 1 << 15  # numbers at once: they stay in cache
_BIN = 32  # atoms; the search goes over bins, then within one
SLACK = 1e-12
"""Relative error that is tolerated in sums of masses: they are exact to rounding only."""


def reported(cumulative: Array) -> Array:
    """Distribution functions as they are reported, from sums of masses.

    Twice the tolerance of :func:`first_reaching` is added, so that F(F^-1(q)) >= q holds for the
    numbers that are returned: the sums behind both may be rounded differently.
    """
    return np.minimum(cumulative * (1.0 + 2.0 * SLACK), 1.0)


def first_reaching(cumulative: Array, levels: Array) -> Array:
    """Index of the first entry of each row that reaches a level.

    Parameters
    ----------
    cumulative
        Ascending in each row, from 0 to 1, shape (b, T).
    levels
        In [0, 1], shape (b, k). A level counts as reached where no more than the share ``SLACK``
        of it is missing.

    Returns
    -------
    indices : (b, k), the last one that adds something where rounding leaves a level unreached
    """
    needed = _needed(levels, cumulative[:, -1:])
    return first_true(
        needed.shape,
        cumulative.shape[1] - 1,
        lambda at: np.take_along_axis(cumulative, at, axis=1) >= needed,
    )


def first_true(shape: tuple[int, ...], count: int, holds: Callable[[Array], Array]) -> Array:
    """The first of the indices 0, ..., count - 1 at which a predicate holds, else ``count``.

    Parameters
    ----------
    shape
        Of the result: so many searches are made at once, by bisection.
    count
        Number of indices.
    holds
        From indices of this shape to truth values: false up to some index, true from there on.
    """
    low, high = np.zeros(shape, dtype=np.int64), np.full(shape, count)
    for _ in range(count.bit_length()):
        middle = (low + high) // 2
        found = holds(np.minimum(middle, count - 1)) | (middle == count)
        high = np.where(found, middle, high)
        low = np.where(found, low, middle + 1)
    return high


def _needed(levels: Array, total: Array) -> Array:
    """Sums of masses at which levels count as reached; the total suffices for any level."""
    top = total * (1.0 - np.finfo(np.float64).eps)
    return np.minimum(np.maximum(levels * (1.0 - SLACK), SLACK), top)


@dataclass(frozen=True, eq=False)
class SortedAtoms:
    """One coordinate of the atoms of cells, in ascending order.

    Mixtures are given by weights w of the cells, shape (b, S); atom a has the mass
    w[cell(a)] share(a).

    Attributes
    ----------
    values
        Ascending, shape (A,).
    cells, shares
        Of the atoms, in that order, filled up to whole bins by atoms of no mass: shape (T, 32).
    bins
        Share of each cell in each bin, sparse, shape (T, S).
    """

    values: Array
    cells: Array
    shares: Array
    bins: Any

    @classmethod
    def of(cls, values: Array, cells: Array, shares: Array, size: int) -> "SortedAtoms":
        """From values, cells and shares of atoms in any order, shapes (A,), of ``size`` cells."""
        order = np.argsort(values, kind="stable")
        count = -(-len(order) // _BIN)
        bin_of = np.arange(len(order)) // _BIN
        filled_cells, filled_shares = np.zeros(count * _BIN, np.int64), np.zeros(count * _BIN)
        filled_cells[: len(order)] = cells[order]
        filled_shares[: len(order)] = shares[order]
        bins = csr_array((shares[order], (bin_of, cells[order])), shape=(count, size))
        bins.sum_duplicates()
        return cls(
            np.asarray(values[order]),
            filled_cells.reshape(count, _BIN),
            filled_shares.reshape(count, _BIN),
            bins,
        )

    def below(self, weights: Array, t: Array) -> Array:
        """P(value <= t) of each mixture, shape (b, k), for thresholds (k,) or (b, k)."""
        found: Array = np.searchsorted(self.values, t, side="right")
        position = np.broadcast_to(found, (len(weights), found.shape[-1]))
        at, inner = np.divmod(position, _BIN)
        before = np.concatenate([np.zeros((len(weights), 1)), self._cumulative(weights)], axis=1)
        rows = np.arange(len(weights))[:, None]
        last = np.minimum(at, len(self.cells) - 1)
        counted = np.arange(_BIN) < np.where(at > last, 0, inner)[:, :, None]
        within = (self._masses(weights, last) * counted).sum(axis=2)
        return reported(before[rows, at] + within)

    def quantile(self, weights: Array, levels: Array) -> Array:
        """Smallest value v with P(value <= v) >= level, shape (b, k), for levels (k,) or (b, k)."""
        levels = np.broadcast_to(levels, (len(weights), np.shape(levels)[-1]))
        cumulative = self._cumulative(weights)
        at = first_reaching(cumulative, levels)
        rows = np.arange(len(weights))[:, None]
        before = np.where(at > 0, cumulative[rows, at - 1], 0.0)
        masses = self._masses(weights, at)
        within = before[:, :, None] + np.cumsum(masses, axis=2)
        needed = _needed(levels, within[:, :, -1])
        reached = (within >= needed[:, :, None]) & (masses > 0.0)
        inner = np.where(reached.any(axis=2), reached.argmax(axis=2), 0)
        return np.asarray(self.values[np.minimum(at * _BIN + inner, len(self.values) - 1)])

    def crps(self, weights: Array, y: Array) -> Array:
        """Continuous ranked probability score of each mixture at y (b,), shape (b,)."""
        count, scores = len(self.values), np.empty(len(weights))
        cells, shares = self.cells.ravel()[:count], self.shares.ravel()[:count]
        step = max(_HELD // count, 1)
        for start in range(0, len(weights), step):
            here = slice(start, start + step)
            masses = np.take(weights[here], cells, axis=1)
            masses *= shares
            scores[here] = sorted_crps(masses, self.values, y[here])
        return scores

    def _cumulative(self, weights: Array) -> Array:
        """Mass up to the end of each bin, shape (b, T)."""
        return np.cumsum((self.bins @ np.ascontiguousarray(weights.T)).T, axis=1)

    def _masses(self, weights: Array, bins: Array) -> Array:
        """Masses of the atoms in some bins, shape (b, k, 32), of bins (b, k)."""
        rows = np.arange(len(weights))[:, None, None]
        return weights[rows, self.cells[bins]] * self.shares[bins]
