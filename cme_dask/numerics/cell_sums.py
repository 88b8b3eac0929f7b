"""Sums over the rows of each cell of a support, made in the pass: what laws are made of."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any, Self

import numpy as np

from cme_dask.numerics.cells import Cells, Drawn
from cme_dask.numerics.kept_rows import KEPT, Kept, kept_of_union, sample_covariances
from cme_dask.numerics.moments import Function
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.support import Support
from cme_dask.numerics.value_range import ValueRange

Array = Any

_SPARE = 2  # times KEPT rows of each cell are expected below its bound: few have less then
_EXACT = 8  # columns whose products are summed over all rows; of more, kept rows tell
_VALUES = 1 << 20  # numbers that are summed at once, roughly
_ROWS = 1 << 10, 1 << 16  # in rows, at least and at most: threads wait for each other on short ones
_NO_BOUND = np.iinfo(np.uint64).max


@dataclass(frozen=True, eq=False)
class CellSpec:
    """What is summed for one variable.

    Parameters
    ----------
    support
        Its cells.
    bounds
        Rows of cell s are kept if their hash is at most this, uint64 of shape (S,).
    functions
        Declared functions by name, each takes rows (n, d) and returns (n,).
    partition
        The partition of unity of this variable, if its model has one.
    """

    support: Support
    bounds: Array
    functions: Mapping[str, Function] = field(default_factory=dict)
    partition: PartitionBasis | None = None

    @classmethod
    def of(
        cls,
        support: Support,
        rows: Array,
        counts: Array,
        n_rows: float,
        functions: Mapping[str, Function],
        partition: PartitionBasis | None = None,
    ) -> Self:
        """With bounds such that about twice as many rows are kept as are needed.

        Parameters
        ----------
        support, functions, partition
            See the class.
        rows
            Rows of the row sample, shape (k, d).
        counts
            How many rows each of them stands for, up to a factor, shape (k,).
        n_rows
            Number of rows in all, roughly.
        """
        share = np.bincount(support.assign(rows), counts / counts.sum(), minlength=support.size)
        chance = _SPARE * KEPT / np.maximum(share * n_rows, _SPARE * KEPT)
        bounds = np.full(support.size, _NO_BOUND)
        some = chance < 1.0
        bounds[some] = (chance[some] * 2.0**64).astype(np.uint64)
        return cls(support, bounds, dict(functions), partition)

    @property
    def width(self) -> int:
        """Number of sums per cell, masses and counts aside: z, z z^T, functions, partition."""
        parts = 0 if self.partition is None else self.partition.rank
        return self.edges[-1] + parts

    def block(self, rows: int) -> int:
        """Rows that are summed at once, of strips of so many."""
        least, most = _ROWS
        return min(max(1 << (_VALUES // self.width).bit_length() >> 1, least), most, rows)

    def block_words(self, rows: int) -> int:
        """Numbers that this takes, and the way of the rows to their cells."""
        beside = int(self.support.points.shape[1]) + 3  # z, a column's points, ones and starts
        tree = self.support.tree
        walk = 0 if tree is None else tree.walk_words(rows)
        return self.block(rows) * (self.width + beside) + walk

    def words(self, n_folds: int) -> int:
        """Numbers in a partial sum, rows that are kept aside."""
        return self.support.size * (n_folds + 1 + self.width)

    @property
    def kept_words(self) -> int:
        """Numbers in the rows that are kept of all, as expected."""
        return self.support.size * _SPARE * KEPT * (int(self.support.points.shape[1]) + 3)

    @cached_property
    def pairs(self) -> tuple[Array, Array]:
        """Columns whose products are summed: all pairs of few columns, none of many."""
        d = self.support.points.shape[1]
        return np.triu_indices(d if d <= _EXACT else 0)

    @property
    def edges(self) -> tuple[int, int, int]:
        """Where the sums of z, of z z^T and of the functions end."""
        d, pairs = int(self.support.points.shape[1]), len(self.pairs[0])
        return d, d + pairs, d + pairs + len(self.functions)

    def cells(self, sums: "CellSums") -> Cells:
        """The laws in the cells, from the sums over all rows."""
        points, counts = self.support.points, sums.counts
        mass = sums.masses.sum(axis=0)
        away, squares, functions, parts = np.split(sums.sums, self.edges, axis=1)
        share = 1.0 / np.where(mass > 0.0, mass, 1.0)[:, None]
        away = away * share
        kept = sums.kept.only_first(KEPT)
        filled = kept.filled(points + away)
        atoms, (starts, shares) = filled.rows, filled.shares(len(points))
        whole = np.bincount(kept.cells, minlength=len(points)) == counts
        overall = functions.sum(axis=0) / mass.sum()
        return Cells(
            support=self.support,
            masses=mass / mass.sum(),
            means=points + away,
            covariances=(
                self._covariances(away, squares * share, counts)
                if squares.shape[1]
                else sample_covariances(atoms, starts, shares, whole)
            ),
            names=tuple(self.functions),
            functions=np.where(mass[:, None] > 0.0, functions * share, overall),
            atoms=atoms,
            starts=starts,
            shares=shares,
            whole=whole,
            components=None if self.partition is None else parts.T / mass.sum(),
            drawn=Drawn(counts, filled.hashes, filled.weights),
            values=sums.values,
        )

    def sums(self, cells: Cells, weight: float) -> "CellSums":
        """Inverse of :meth:`cells`, but for folds: the sums of all rows stand in one.

        Parameters
        ----------
        cells
            That tell how their atoms were drawn.
        weight
            Sum of the weights of all rows.
        """
        drawn, mass = cells.drawn, weight * cells.masses
        assert drawn is not None
        away = cells.means - self.support.points
        a, b = self.pairs
        squares = cells.covariances[:, a, b] + away[:, a] * away[:, b]
        sums = mass[:, None] * np.concatenate([away, squares, cells.functions], axis=1)
        if cells.components is not None:
            sums = np.concatenate([sums, weight * cells.components.T], axis=1)
        where = np.flatnonzero(drawn.weights > 0.0)
        kept = Kept(
            cells.cell_of_atom[where],
            drawn.hashes[where],
            drawn.weights[where],
            cells.atoms[where],
        )
        return CellSums(mass[None], drawn.counts, sums, kept, cells.range)

    def _covariances(self, away: Array, squares: Array, counts: Array) -> Array:
        """From means of z and of its products, shape (S, d, d); of a single row exactly zero."""
        a, b = self.pairs
        spread = np.where(counts[:, None] > 1, squares - away[:, a] * away[:, b], 0.0)
        spread[:, a == b] = np.maximum(spread[:, a == b], 0.0)
        covariances = np.empty((*away.shape, away.shape[1]))
        covariances[:, a, b] = covariances[:, b, a] = spread
        return covariances


@dataclass(frozen=True, eq=False)
class CellSums:
    """Sums over rows; they add, strip by strip.

    Attributes
    ----------
    masses
        Sum of the weights of the rows of each cell by fold, shape (F, S).
    counts
        Number of rows of positive weight, integers of shape (S,).
    sums
        Weighted sums of z, z z^T (pairs of columns), functions and partition, shape (S, width).
    kept
        Rows that are kept.
    values
        Which values the columns take.
    """

    masses: Array
    counts: Array
    sums: Array
    kept: Kept
    values: ValueRange

    def __add__(self, other: "CellSums") -> "CellSums":
        """Sums over the union of two disjoint sets of rows."""
        return CellSums(
            self.masses + other.masses,
            self.counts + other.counts,
            self.sums + other.sums,
            Kept.joined([self.kept, other.kept], len(self.counts)),
            self.values + other.values,
        )

    @classmethod
    def of_union(cls, several: Sequence["CellSums"]) -> "CellSums":
        """Sums over all folds of any sets of rows, whose hashes may be equal."""
        counts = [each.counts for each in several]
        return cls(
            np.sum([each.masses.sum(axis=0, keepdims=True) for each in several], axis=0),
            np.sum(counts, axis=0),
            np.sum([each.sums for each in several], axis=0),
            kept_of_union([each.kept.only_first(KEPT) for each in several], counts),
            reduce(operator.add, (each.values for each in several)),
        )

    def __iadd__(self, other: "CellSums") -> "CellSums":
        """The same, sums in the memory of the left one."""
        pairs = ((self.masses, other.masses), (self.counts, other.counts), (self.sums, other.sums))
        for mine, theirs in pairs:
            mine += theirs
        kept = Kept.joined([self.kept, other.kept], len(self.counts))
        return CellSums(self.masses, self.counts, self.sums, kept, self.values + other.values)
