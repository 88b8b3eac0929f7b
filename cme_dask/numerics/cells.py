"""Sums by cell over all rows, and a few rows of each cell: what laws are made of.

A few rows of each cell, those with the smallest hashes of their global row index.

That is a random sample of each cell, and it does not depend on chunks, tasks or their order.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, Self

import numpy as np
from scipy.sparse import csc_array

from cme_dask.kernels.evaluator import to_numpy
from cme_dask.numerics.folds import number_hash, value_hash
from cme_dask.numerics.moments import Function, function_values
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip
from cme_dask.numerics.support import Support

# Which values the columns of a variable take: their range over all rows, and whole numbers


Array = Any

_WORD = 8
_CELL_FLOPS = 900  # per row, in operations of a product: its way to its cell, and its sums
_FIRST = 64  # rows that tell of most columns that they don't hold whole numbers


@dataclass(frozen=True, eq=False)
class ValueRange:
    """Least and largest value of each column over rows of positive weight, and whole numbers.

    They add by taking the wider range, so that the result is the same for any order of the rows.

    Attributes
    ----------
    low, high
        Shape (d,), in the units of the columns; infinite where nothing is known.
    integer
        Whether all values are whole numbers, shape (d,).
    """

    low: Array
    high: Array
    integer: Array

    @classmethod
    def of(cls, rows: Array) -> Self:
        """Of rows (n, d); of no rows the empty range, to which any other adds."""
        d = rows.shape[1]
        integer = np.ones(d, dtype=bool)
        for part in (rows[:_FIRST], rows):
            for j in np.flatnonzero(integer):
                integer[j] = bool((np.floor(part[:, j]) == part[:, j]).all())
        return cls(
            rows.min(axis=0, initial=np.inf).astype(np.float64),
            rows.max(axis=0, initial=-np.inf).astype(np.float64),
            integer,
        )

    @classmethod
    def unknown(cls, d: int) -> Self:
        """Any number may occur in any of d columns."""
        return cls(np.full(d, -np.inf), np.full(d, np.inf), np.zeros(d, dtype=bool))

    def __add__(self, other: "ValueRange") -> "ValueRange":
        """The range of both sets of rows."""
        return ValueRange(
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
            self.integer & other.integer,
        )

    def clipped(self, values: Array) -> Array:
        """Values (..., d) brought into the range."""
        return np.clip(values, self.low, self.high)

    def possible(self, values: Array) -> Array:
        """Values (..., d) brought into the range, and to the nearest whole number where all are.

        Halves are rounded up. The map ascends in each column.
        """
        result = self.clipped(values)
        if self.integer.any():
            result[..., self.integer] = np.floor(result[..., self.integer] + 0.5)
        return result

    def column(self, j: int) -> "ValueRange":
        """The range of one column, for values of shape (..., 1)."""
        return ValueRange(self.low[[j]], self.high[[j]], self.integer[[j]])


# A few rows of each cell, those with the smallest hashes of their global row index


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
                np.concatenate([getattr(retained, name) for retained in several])
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
    for retained, count in zip(several, counts, strict=True):
        dropped = np.bincount(retained.cells, minlength=len(count)) < count
        largest = np.zeros(len(count), dtype=np.uint64)
        np.maximum.at(largest, retained.cells, retained.hashes)
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


# What is known of the rows in each cell of a support: what laws on the cells are made of


@dataclass(frozen=True, eq=False)
class Drawn:
    """How the atoms of cells were drawn: what cells of a union of rows are made from.

    Attributes
    ----------
    counts
        Rows of positive weight in each cell, integers of shape (S,).
    hashes
        Of the global row index of each atom, by which it was drawn, uint64 of shape (A,).
    weights
        Of the atoms, shape (A,); 0 of one that stands for a cell without rows.
    """

    counts: Array
    hashes: Array
    weights: Array


@dataclass(frozen=True, eq=False)
class Cells:
    r"""Laws P_s of the rows in the cells s = 1..S of a support.

    A conditional law is the mixture :math:`\sum_s w_s(x) P_s`. Masses, means, covariances and the
    means of declared functions are those of all rows; everything else is answered by rows that
    were kept of each cell.

    Attributes
    ----------
    support
        Which rows belong to which cell.
    masses
        Shares v of all rows in the cells, shape (S,): non-negative, sum 1.
    means
        Means of the columns in each cell, shape (S, d); the cell's point where it has no rows.
    covariances
        Covariances in each cell, shape (S, d, d); of more than 8 columns those of the kept rows.
    names
        Declared functions, q of them.
    functions
        Their means in each cell, shape (S, q).
    atoms
        Rows that were kept, cell by cell, shape (A, d); of a cell without rows its point.
    starts
        Those of cell s are ``atoms[starts[s]:starts[s + 1]]``, at least one; shape (S + 1,).
    shares
        Of the atoms in their cells, shape (A,): positive, sum 1 in each cell.
    whole
        Whether the atoms of a cell are all its rows, shape (S,).
    components
        For partitions of unity b of this variable: E[b_j 1_s] over all rows, shape (m, S),
        non-negative, rows of sum E b_j and columns of sum v_s; otherwise None.
    drawn
        How the atoms were drawn.
    values
        Which values the columns take, over all rows.
    """

    support: Support
    masses: Array
    means: Array
    covariances: Array
    names: tuple[str, ...]
    functions: Array
    atoms: Array
    starts: Array
    shares: Array
    whole: Array
    components: Array | None
    drawn: Drawn
    values: ValueRange

    @property
    def size(self) -> int:
        """Number of cells S."""
        return self.support.size

    @property
    def cell_of_atom(self) -> Array:
        """Cell number of each atom, shape (A,)."""
        return np.repeat(np.arange(self.size), np.diff(self.starts))

    def average(self, values: Array) -> Array:
        """Means over the atoms of each cell, shape (S, q), of values at all atoms, shape (A, q)."""
        return np.asarray(np.add.reduceat(self.shares[:, None] * values, self.starts[:-1]))


# Sums over the rows of each cell of a support, made in the pass: what laws are made of


_SPARE = 2  # times KEPT rows of each cell are expected below its bound: few have less then
_EXACT = 8  # columns whose products are summed over all rows; of more, kept rows tell
_VALUES = 1 << 20  # numbers that are summed at once, roughly
_ROWS = 1 << 10, 1 << 16  # in rows, at least and at most: threads wait for each other on short ones
_NO_BOUND = np.iinfo(np.uint64).max


@dataclass(frozen=True, eq=False)
class CellSpec(Reduction["CellStatistics", "CellStatistics"]):
    """What is summed by cell for one variable, over all rows, with a few rows of each cell.

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
    variable
        Its number among the variables of the rows.
    n_folds
        Number of folds F of the rows.
    """

    support: Support
    bounds: Array
    functions: Mapping[str, Function] = field(default_factory=dict)
    partition: PartitionBasis | None = None
    variable: int = 0
    n_folds: int = 1
    name = "cell-sums"

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

    def cost(self, extent: Extent) -> Cost:
        """The way of each row to its cell, and sums of all cells."""
        return Cost(
            flops=_CELL_FLOPS,
            state=self.block_words(extent.strip_rows) * _WORD,
            partial=self.words(self.n_folds) * _WORD,
            retained=self.kept_words * _WORD,
        )

    def start(self, like: Array) -> list["StripCells"]:
        """The loop over strips, for the longest strip so far."""
        return []

    def update(self, state: list["StripCells"], strip: Strip) -> "CellStatistics":
        """Sums over one strip."""
        if not state or state[0].rows < len(strip):
            state[:] = [StripCells(self, len(strip))]
        folds, hashes = strip.folds(self.n_folds), strip.once(strip_hashes)
        part = strip.parts[self.variable]
        return state[0](hashes, part, strip.weights, folds, self.n_folds)

    def accumulate(self, a: "CellStatistics", b: "CellStatistics") -> "CellStatistics":
        """Sums over both, in the memory of ``a``."""
        a += b
        return a

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

    def cells(self, sums: "CellStatistics") -> Cells:
        """The laws in the cells, from the sums over all rows."""
        points, counts = self.support.points, sums.counts
        mass = sums.masses.sum(axis=0)
        away, squares, functions, parts = np.split(sums.sums, self.edges, axis=1)
        share = 1.0 / np.where(mass > 0.0, mass, 1.0)[:, None]
        away = away * share
        retained = sums.kept.only_first(KEPT)
        filled = retained.filled(points + away)
        atoms, (starts, shares) = filled.rows, filled.shares(len(points))
        whole = np.bincount(retained.cells, minlength=len(points)) == counts
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

    def sums(self, cells: Cells, weight: float) -> "CellStatistics":
        """Inverse of :meth:`cells`, but for folds: the sums of all rows stand in one.

        Parameters
        ----------
        cells
            That tell how their atoms were drawn.
        weight
            Sum of the weights of all rows.
        """
        drawn, mass = cells.drawn, weight * cells.masses
        away = cells.means - self.support.points
        a, b = self.pairs
        squares = cells.covariances[:, a, b] + away[:, a] * away[:, b]
        sums = mass[:, None] * np.concatenate([away, squares, cells.functions], axis=1)
        if cells.components is not None:
            sums = np.concatenate([sums, weight * cells.components.T], axis=1)
        where = np.flatnonzero(drawn.weights > 0.0)
        retained = Kept(
            cells.cell_of_atom[where],
            drawn.hashes[where],
            drawn.weights[where],
            cells.atoms[where],
        )
        return CellStatistics(mass[None], drawn.counts, sums, retained, cells.values)

    def _covariances(self, away: Array, squares: Array, counts: Array) -> Array:
        """From means of z and of its products, shape (S, d, d); of a single row exactly zero."""
        a, b = self.pairs
        spread = np.where(counts[:, None] > 1, squares - away[:, a] * away[:, b], 0.0)
        spread[:, a == b] = np.maximum(spread[:, a == b], 0.0)
        covariances = np.empty((*away.shape, away.shape[1]))
        covariances[:, a, b] = covariances[:, b, a] = spread
        return covariances


@dataclass(frozen=True, eq=False)
class CellStatistics:
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

    def __add__(self, other: "CellStatistics") -> "CellStatistics":
        """Sums over the union of two disjoint sets of rows."""
        return CellStatistics(
            self.masses + other.masses,
            self.counts + other.counts,
            self.sums + other.sums,
            Kept.joined([self.kept, other.kept], len(self.counts)),
            self.values + other.values,
        )

    @classmethod
    def of_union(cls, several: Sequence["CellStatistics"]) -> "CellStatistics":
        """Sums over all folds of any sets of rows, whose hashes may be equal."""
        counts = [each.counts for each in several]
        return cls(
            np.sum([each.masses.sum(axis=0, keepdims=True) for each in several], axis=0),
            np.sum(counts, axis=0),
            np.sum([each.sums for each in several], axis=0),
            kept_of_union([each.kept.only_first(KEPT) for each in several], counts),
            reduce(operator.add, (each.values for each in several)),
        )

    def __iadd__(self, other: "CellStatistics") -> "CellStatistics":
        """The same, sums in the memory of the left one."""
        pairs = ((self.masses, other.masses), (self.counts, other.counts), (self.sums, other.sums))
        for mine, theirs in pairs:
            mine += theirs
        retained = Kept.joined([self.kept, other.kept], len(self.counts))
        return CellStatistics(
            self.masses, self.counts, self.sums, retained, self.values + other.values
        )


# Sums by cell of one strip of rows after the other


class StripCells:
    """The loop over one strip after the other, with the memory that it keeps.

    Parameters
    ----------
    spec
        What to sum.
    rows
        Rows of a strip: memory for no more is kept, and longer ones are summed in several blocks.
    """

    def __init__(self, spec: CellSpec, rows: int) -> None:
        self._spec, self.rows, points = spec, rows, spec.support.points
        block = self._block = spec.block(max(rows, 1))
        self._values = np.empty((block, spec.width))
        self._columns = np.empty((points.shape[1], block))
        self._point = np.empty(block)
        self._points = np.ascontiguousarray(points.T, dtype=np.float64)
        # Of the matrix whose products sum values by cell.
        self._ones, self._starts = np.ones(block), np.arange(block + 1, dtype=np.int32)

    def __call__(
        self, hashes: Array, part: Array, weights: Array | None, folds: Array, n_folds: int
    ) -> CellStatistics:
        """Sums over one strip of rows.

        Parameters
        ----------
        hashes
            Of the global indices of the rows, shape (n,); see
            :func:`cme_dask.numerics.cells.hashes_of`.
        part
            The rows, shape (n, d).
        weights
            Shape (n,), or None for ones.
        folds
            Fold number of each row, shape (n,).
        n_folds
            Number of folds F.
        """
        spec, size = self._spec, self._spec.support.size
        cells = to_numpy(spec.support.assign(part))
        rows, weight = to_numpy(part), None if weights is None else to_numpy(weights)
        where = folds.astype(np.int64)
        where *= size
        where += cells
        masses = np.bincount(where, weight, n_folds * size).reshape(n_folds, size)
        if weight is None:
            counts = masses.sum(axis=0)
        else:
            counts = np.bincount(cells[weight > 0.0], minlength=size)
        sums = np.zeros((size, spec.width))
        for start in range(0, len(cells), self._block):
            here = slice(start, min(start + self._block, len(cells)))
            with np.errstate(over="ignore", invalid="ignore"):  # the moments tell of it
                values = self._summed(part[here, :], rows[here], cells[here])
                matrix = self._one_hot(cells[here], None if weight is None else weight[here])
                sums += matrix @ values
        retained = self._kept(cells, hashes, rows, weight)
        values = ValueRange.of(rows if weight is None else rows[weight > 0.0])
        return CellStatistics(masses.astype(np.float64), counts, sums, retained, values)

    def _summed(self, part: Array, rows: Array, cells: Array) -> Array:
        """What is summed, shape (n, width); z is the row from the point of its cell."""
        spec, (n, d) = self._spec, rows.shape
        values, columns, point = self._values[:n], self._columns[:, :n], self._point[:n]
        # A column at a time: loops over a few columns cost more than the arithmetic.
        for j, column in enumerate(columns):
            self._points[j].take(cells, out=point, mode="clip")
            np.subtract(rows[:, j], point, out=column)
            values[:, j] = column
        for j, (a, b) in enumerate(zip(*spec.pairs, strict=True), start=d):
            np.multiply(columns[a], columns[b], out=values[:, j])
        _, first, last = spec.edges
        for j, f in enumerate(function_values(part, spec.functions), start=first):
            values[:, j] = to_numpy(f)[:, 0]
        if spec.partition is not None:
            values[:, last:] = to_numpy(spec.partition(part))
        return values

    def _one_hot(self, cells: Array, weight: Array | None) -> Any:
        """The sparse matrix (S, n) of weights whose product with values sums these by cell."""
        n = len(cells)
        data = self._ones[:n] if weight is None else weight
        places = data, cells.astype(np.int32), self._starts[: n + 1]
        return csc_array(places, shape=(self._spec.support.size, n))

    def _kept(self, cells: Array, hashes: Array, rows: Array, weight: Array | None) -> Kept:
        below = hashes <= self._spec.bounds.take(cells)
        if weight is not None:
            below &= weight > 0.0
        where = np.flatnonzero(below)
        retained = Kept(
            cells[where],
            hashes[where],
            np.ones(len(where)) if weight is None else weight[where].astype(np.float64),
            rows[where].astype(np.float64),
        )
        return Kept.joined([retained], self._spec.support.size)


def strip_hashes(strip: Strip) -> Array:
    """:func:`hashes_of` the rows of a strip."""
    return hashes_of(strip.rows)


CellSpec.kinds = (CellStatistics, Kept, ValueRange)
