"""A few rows of each cell, those with the smallest hashes of their global row index.

That is a random sample of each cell, and it does not depend on chunks, tasks or their order.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cme_dask.numerics.hashing import number_hash

Array = Any

KEPT = 32
"""Rows that are kept of each cell, at most."""

_SALT = (1 << 63) + 0x61746F6D  # "atom"; independent of folds and of row samples
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
    def joined(cls, several: list["Kept"], size: int) -> "Kept":
        """All of them; of many in cells of this number no more than what may be needed."""
        one = cls(
            *(
                np.concatenate([getattr(kept, name) for kept in several])
                for name in ("cells", "hashes", "weights", "rows")
            )
        )
        return one if len(one.cells) <= _CROWD * KEPT * size else one.only_first(KEPT)

    def only_first(self, count: int) -> "Kept":
        """Those with the smallest hashes, so many of each cell, in order of cell and hash."""
        order = np.lexsort((self.hashes, self.cells))
        cells = self.cells[order]
        order = order[np.arange(len(cells)) - np.searchsorted(cells, cells) < count]
        return Kept(self.cells[order], self.hashes[order], self.weights[order], self.rows[order])

    def atoms(self, points: Array) -> tuple[Array, Array, Array]:
        """Atoms, starts and shares of :class:`Cells`; of cells of which none is kept these points.

        The rows are in order of their cells.
        """
        empty = np.setdiff1d(np.arange(len(points)), self.cells)
        cells = np.concatenate([self.cells, empty])
        order = np.argsort(cells, kind="stable")
        starts = np.searchsorted(cells[order], np.arange(len(points) + 1))
        weights = np.concatenate([self.weights, np.ones(len(empty))])[order]
        largest = np.maximum.reduceat(weights, starts[:-1])  # sums of the weights may overflow
        shares = weights / np.repeat(largest, np.diff(starts))
        shares = np.maximum(shares, np.finfo(np.float64).tiny)
        shares /= np.repeat(np.add.reduceat(shares, starts[:-1]), np.diff(starts))
        return np.concatenate([self.rows, points[empty]])[order], starts, shares


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
