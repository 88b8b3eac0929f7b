"""A few rows of each cell, those with the smallest hashes of their global row index.

That is a random sample of each cell, and it does not depend on chunks, tasks or their order.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cme_dask.numerics.hashing import number_hash, value_hash

Array = Any

KEPT = 32
"""Rows that are kept of each cell, at most."""

_SALT = (1 << 63) + 0x61746F6D  # "atom"; independent of folds and of row samples
_LAST = np.uint64(np.iinfo(np.uint64).max)
_CROWD = 4  # times KEPT rows of each cell wait at most before all but the first are dropped


def hashes_of(rows: Array) -> Array:
    """Hash of each global row index, by which rows are kept, uint64 of shape (n,)."""
    return number_hash(_SALT, rows.astype(np.uint64))


@dataclass(frozen=True, eq=False)
class Kept:
    """Rows that are kept, in any order.

    Attributes
    ----------
    cells
        Their cells, shape (k,).
    hashes
        Of their global indices, all different, uint64 of shape (k,).
    weights
        Positive, shape (k,).
    rows
        Shape (k, d).
    """

    cells: Array
    hashes: Array
    weights: Array
    rows: Array

    @classmethod
    def none(cls, d: int) -> "Kept":
        """No rows of d columns."""
        return cls(
            np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64), np.empty(0), np.empty((0, d))
        )

    @classmethod
    def every(cls, several: list["Kept"]) -> "Kept":
        """All of them, one after the other."""
        return cls(
            *(
                np.concatenate([getattr(kept, name) for kept in several])
                for name in ("cells", "hashes", "weights", "rows")
            )
        )

    @classmethod
    def joined(cls, several: list["Kept"], size: int) -> "Kept":
        """All of them; of many in cells of this number no more than what may be needed."""
        one = cls.every(several)
        return one if len(one.cells) <= _CROWD * KEPT * size else one.only_first(KEPT)

    def only_first(self, count: int) -> "Kept":
        """Those with the smallest hashes, so many of each cell, in order of cell and hash."""
        order = np.lexsort((self.hashes, self.cells))
        cells = self.cells[order]
        order = order[np.arange(len(cells)) - np.searchsorted(cells, cells) < count]
        return self.at(order)

    def at(self, where: Array) -> "Kept":
        """Those at these positions."""
        return Kept(self.cells[where], self.hashes[where], self.weights[where], self.rows[where])

    def filled(self, points: Array) -> "Kept":
        """In order of their cells; of cells of which none is kept these points, of weight 0."""
        empty = np.setdiff1d(np.arange(len(points)), self.cells)
        last = np.full(len(empty), _LAST)
        fillers = Kept(empty, last, np.zeros(len(empty)), points[empty])
        order = np.argsort(np.concatenate([self.cells, empty]), kind="stable")
        return Kept.every([self, fillers]).at(order)

    def shares(self, size: int) -> tuple[Array, Array]:
        """Starts and shares of :class:`Cells`, of rows in order of cells that all have some."""
        starts = np.searchsorted(self.cells, np.arange(size + 1))
        weights = np.where(self.weights > 0.0, self.weights, 1.0)
        largest = np.maximum.reduceat(weights, starts[:-1])  # sums of the weights may overflow
        shares = weights / np.repeat(largest, np.diff(starts))
        shares = np.maximum(shares, np.finfo(np.float64).tiny)
        shares /= np.repeat(np.add.reduceat(shares, starts[:-1]), np.diff(starts))
        return starts, shares


def kept_of_union(several: list[Kept], counts: list[Array]) -> Kept:
    """Rows of each cell of a union of sets of rows, drawn as they were from each set.

    Of each set those with the smallest hashes were kept. Of the union, only those are known to have
    its smallest hashes that no set dropped rows below. The result does not depend on the order of
    the sets: where hashes are equal, those of the values decide.

    Parameters
    ----------
    several
        Kept of each set.
    counts
        Rows of each set in the cells, shapes (S,).
    """
    known = np.full(len(counts[0]), _LAST)
    for kept, count in zip(several, counts, strict=True):
        dropped = np.bincount(kept.cells, minlength=len(count)) < count
        largest = np.zeros(len(count), dtype=np.uint64)
        np.maximum.at(largest, kept.cells, kept.hashes)
        known[dropped] = np.minimum(known, largest)[dropped]
    every = Kept.every(several)
    every = every.at(every.hashes <= known[every.cells])
    ties = value_hash(_SALT + 1, every.rows)
    return every.at(np.argsort(ties, kind="stable")).only_first(KEPT)


def sample_covariances(atoms: Array, starts: Array, shares: Array, whole: Array) -> Array:
    """Covariances (S, d, d) of the atoms of each cell; without bias where they are a sample."""
    d = atoms.shape[1]
    covariances = np.zeros((len(whole), d, d))
    for s, (first, last) in enumerate(pairwise(starts)):
        share = shares[first:last]
        away = atoms[first:last] - share @ atoms[first:last]
        unseen = 0.0 if whole[s] else share @ share
        if last - first > 1 and unseen < 1.0:
            covariances[s] = away.T @ (share[:, None] * away) / (1.0 - unseen)
    return (covariances + covariances.swapaxes(1, 2)) / 2.0
