"""Sums by cell over all rows, and a few rows of each cell, of which laws are made.

:class:`CellReduction` makes :class:`CellSums` in the pass, where the rows are, and from these
:class:`CellStatistics`. The rows of a cell that are retained are those with the smallest hashes of
their global row index: a random sample, which depends neither on chunks nor on tasks or their
order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array
from scipy.sparse import csc_array

from cme_dask.codec import Shape
from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import Scratch, in_place, take_into
from cme_dask.numerics.basis import Basis
from cme_dask.numerics.devices import device_memory
from cme_dask.numerics.folds import RowSample, value_hash
from cme_dask.numerics.moments import Function, function_values
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip
from cme_dask.numerics.support import WALK_ROWS, WALK_WORDS, Placed, Support

Array = Any

ROWS_PER_CELL = 32
"""Rows that are retained of each cell, at most."""

_WORD = 8
_CELL_FLOPS = 900  # per row, in operations of a product: its way to its cell, and its sums
_FIRST = 64  # rows that suffice to see of most columns that they don't hold whole numbers
SALT = (1 << 63) + 0x61746F6D  # "atom"
"""Of the hashes by which rows are retained: independent of folds and of row samples."""
_SIGN = np.uint64(1 << 63)
_LAST = np.uint64(np.iinfo(np.uint64).max)
_CROWD = 4  # times the retained rows of each cell wait at most before all others are dropped
_SPARE = 2  # times the retained rows of each cell are expected below its bound: few have less then
_EXACT = 8  # columns whose products are summed over all rows; of more, retained rows tell
_VALUES = 1 << 20  # numbers that are summed at once, roughly
_ROWS = 1 << 10, 1 << 16  # in rows, at least and at most: threads wait for each other on short ones
_ONE_HOT = 1 << 22  # numbers of the matrix that sums by cell on a device, at least


class Buffers(NamedTuple):
    """Where the rows of a task are: points and bounds of the cells, the way there, and memory.

    Attributes
    ----------
    points, bounds, tree
        Of the cells; on a device ``bounds`` are :func:`_comparable`, and the tree is brought there.
    values, columns, point
        Memory of all strips: that of fresh arrays comes and goes, for which threads wait.
    """

    points: Array
    bounds: Array
    tree: Placed | None
    values: Scratch
    columns: Scratch
    point: Scratch


def _comparable(hashes: Array) -> Array:
    """Signed numbers in the order of hashes: libraries for devices can't compare unsigned ones."""
    return (hashes ^ _SIGN).view(np.int64)


# Which values the columns of a variable take: their range over all rows, and whole numbers


@dataclass(frozen=True, eq=False)
class ValueRange:
    """Least and largest value of each column over rows of positive weight, and whole numbers.

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

    def ascends(self) -> bool:
        """Whether these may be ranges of columns, of whole numbers between whole numbers."""
        with np.errstate(invalid="ignore"):
            whole = (np.floor(self.low) == self.low) & (np.floor(self.high) == self.high)
        return bool((self.low <= self.high).all() and whole[self.integer].all())


# A few rows of each cell, those with the smallest hashes of their global row index


class BottomK(NamedTuple):
    """Rows with small hashes of each cell, in any order.

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

    def at(self, where: Array) -> "BottomK":
        """Those at these positions."""
        xp = array_namespace(self.cells)
        return BottomK(*(xp.take(values, where, axis=0) for values in self))

    def first(self, count: int) -> "BottomK":
        """Those with the smallest hashes, so many of each cell, in order of cell and hash."""
        xp = array_namespace(self.cells)
        order = xp.argsort(self.hashes, stable=True)
        order = xp.take(order, xp.argsort(xp.take(self.cells, order), stable=True))
        cells = xp.take(self.cells, order)
        number = xp.arange(cells.shape[0], device=device(cells))
        return self.at(order[number - xp.searchsorted(cells, cells) < count])

    @classmethod
    def of_union(cls, several: Sequence["BottomK"], counts: Sequence[Array]) -> "BottomK":
        """Rows of each cell of a union of sets of rows, drawn as they were from each set.

        Of each set those with the smallest hashes were retained. Of the union, only those are known
        to have its smallest hashes that no set dropped rows below. The result does not depend on
        the order of the sets: where hashes are equal, those of the values decide.

        Parameters
        ----------
        several
            Rows of each set.
        counts
            Rows of each set in the cells, shapes (S,).
        """
        known = np.full(len(counts[0]), _LAST)
        for retained, count in zip(several, counts, strict=True):
            dropped = np.bincount(retained.cells, minlength=len(count)) < count
            largest = np.zeros(len(count), dtype=np.uint64)
            np.maximum.at(largest, retained.cells, retained.hashes)
            known[dropped] = np.minimum(known, largest)[dropped]
        every = cls(*map(np.concatenate, zip(*several, strict=True)))
        every = every.at(np.flatnonzero(every.hashes <= known[every.cells]))
        ties = value_hash(SALT + 1, every.rows)
        return every.at(np.argsort(ties, kind="stable")).first(ROWS_PER_CELL)


# What is known of the rows in each cell of a support: what laws on the cells are made of

_SUM_ERROR = 1e-9  # of shares that should add up to one


@dataclass(frozen=True, eq=False)
class CellStatistics:
    r"""Laws P_s of the rows in the cells s = 1..S of a support.

    A conditional law is the mixture :math:`\sum_s w_s(x) P_s`. Masses, means, covariances and the
    means of declared functions are those of all rows; everything else is answered by rows that
    were retained of each cell.

    Attributes
    ----------
    support
        Which rows belong to which cell.
    masses
        Shares v of all rows in the cells, shape (S,): non-negative, sum 1.
    means
        Means of the columns in each cell, shape (S, d); the cell's point where it has no rows.
    covariances
        Covariances in each cell, shape (S, d, d); of more than 8 columns those of the atoms.
    names
        Declared functions, q of them.
    functions
        Their means in each cell, shape (S, q).
    atoms
        Rows that were retained, cell by cell, shape (A, d); of a cell without rows its point.
    starts
        Those of cell s are ``atoms[starts[s]:starts[s + 1]]``, at least one; shape (S + 1,).
    shares
        Of the atoms in their cells, shape (A,): positive, sum 1 in each cell.
    whole
        Whether the atoms of a cell are all its rows, shape (S,).
    components
        For partitions of unity b of this variable: E[b_j 1_s] over all rows, shape (m, S),
        non-negative, rows of sum E b_j and columns of sum v_s; otherwise None.
    counts
        Rows of positive weight in each cell, integers of shape (S,).
    hashes
        Of the global row index of each atom, by which it was drawn, uint64 of shape (A,).
    weights
        Of the atoms, shape (A,); 0 of one that stands for a cell without rows.
    low, high, integer
        Which values the columns take over all rows, see :class:`ValueRange`.
    """

    support: Support
    masses: Annotated[Array, Shape("support.size")]
    means: Annotated[Array, Shape("support.size", "d")]
    covariances: Annotated[Array, Shape("support.size", "d", "d")]
    names: tuple[str, ...]
    functions: Annotated[Array, Shape("support.size", "names")]
    atoms: Annotated[Array, Shape("A", "d")]
    starts: Annotated[Array, Shape("support.size+1")]
    shares: Annotated[Array, Shape("A")]
    whole: Annotated[Array, Shape("support.size", dtype=bool)]
    components: Annotated[Array, Shape("m", "support.size")] | None
    counts: Annotated[Array, Shape("support.size", dtype=np.int64)]
    hashes: Annotated[Array, Shape("A", dtype=np.uint64)]
    weights: Annotated[Array, Shape("A")]
    low: Annotated[Array, Shape("d", finite=False)]
    high: Annotated[Array, Shape("d", finite=False)]
    integer: Annotated[Array, Shape("d", dtype=bool)]

    def _validate(self) -> None:
        """DataError unless all values are in their range and all shares add up."""
        starts, covariances = self.starts, self.covariances
        in_order = (
            starts.dtype.kind in "iu"
            and starts[0] == 0
            and starts[-1] == len(self.atoms)
            and bool((np.diff(starts) > 0).all())
        )
        faults = {
            "masses": bool((self.masses < 0).any()) or abs(self.masses.sum() - 1.0) > _SUM_ERROR,
            "covariances": bool((np.einsum("sii->si", covariances) < 0).any())
            or not np.array_equal(covariances, covariances.swapaxes(1, 2)),
            "starts": not in_order,
            "shares": not in_order
            or bool((self.shares <= 0).any())
            or np.abs(np.add.reduceat(self.shares, starts[:-1]) - 1.0).max() > _SUM_ERROR,
            "counts": not in_order or not self._counts_fit(),
            "components": self.components is not None
            and (
                bool((self.components < 0).any())
                or np.abs(self.components.sum(axis=0) - self.masses).max() > _SUM_ERROR
            ),
            "ranges": not self.values.ascends(),
        }
        wrong = [name for name, fault in faults.items() if fault]
        if wrong:
            raise DataError(", ".join(wrong))

    def _counts_fit(self) -> bool:
        """Whether counts and weights may be those of the atoms."""
        if (self.weights < 0).any():
            return False
        retained = np.bincount(self.cell_of_atom[self.weights > 0], minlength=self.size)
        return bool((retained <= self.counts).all())

    @property
    def size(self) -> int:
        """Number of cells S."""
        return len(self.masses)

    @property
    def values(self) -> ValueRange:
        """Which values the columns take, over all rows."""
        return ValueRange(self.low, self.high, self.integer)

    @property
    def variances(self) -> Array:
        """Of the columns over all rows, shape (d,), from those between cells and within them."""
        within = np.einsum("sii->si", self.covariances)
        centre = self.masses @ self.means
        return np.asarray(self.masses @ ((self.means - centre) ** 2 + within))

    @property
    def cell_of_atom(self) -> Array:
        """Cell number of each atom, shape (A,)."""
        return np.repeat(np.arange(len(self.masses)), np.diff(self.starts))

    def average(self, values: Array) -> Array:
        """Means over the atoms of each cell, shape (S, q), of values at all atoms, shape (A, q)."""
        return np.asarray(np.add.reduceat(self.shares[:, None] * values, self.starts[:-1]))


# Sums over the rows of each cell of a support, made in the pass


class CellSums(NamedTuple):
    """Sums over rows, which :meth:`CellReduction.combine` adds.

    Attributes
    ----------
    masses
        Sum of the weights of the rows of each cell by fold, shape (F, S).
    counts
        Number of rows of positive weight, integers of shape (S,).
    sums
        Weighted sums of z, z z^T (pairs of columns), functions and partition, shape (S, width).
    bottom
        Rows that are retained.
    low, high, integer
        Which values the columns take, see :class:`ValueRange`.
    """

    masses: Array
    counts: Array
    sums: Array
    bottom: BottomK
    low: Array
    high: Array
    integer: Array

    @classmethod
    def of_union(cls, several: Sequence["CellSums"]) -> "CellSums":
        """Sums over all folds of any sets of rows, whose hashes may be equal."""
        counts = [each.counts for each in several]
        return cls(
            np.sum([each.masses.sum(axis=0, keepdims=True) for each in several], axis=0),
            np.sum(counts, axis=0),
            np.sum([each.sums for each in several], axis=0),
            BottomK.of_union([each.bottom.first(ROWS_PER_CELL) for each in several], counts),
            np.min([each.low for each in several], axis=0),
            np.max([each.high for each in several], axis=0),
            np.all([each.integer for each in several], axis=0),
        )


@dataclass(frozen=True, eq=False)
class CellReduction(Reduction[CellSums, CellSums]):
    """Sums by cell of one variable over all rows, with a few rows of each cell.

    Parameters
    ----------
    support
        Its cells.
    bounds
        Rows of cell s are retained if their hash is at most this, uint64 of shape (S,).
    functions
        Declared functions by name, each takes rows (n, d) and returns (n,).
    partition
        The partition of unity of this variable, if its model has one.
    variable
        Its number among the variables of the rows.
    n_folds
        Number of folds F of the rows.

    Attributes
    ----------
    pairs
        Columns whose products are summed: all pairs of few columns, none of many.
    edges
        Where the sums of z, of z z^T, of the functions and of the partition end.
    block
        Rows that are summed at once.
    """

    support: Support
    bounds: Array
    functions: Mapping[str, Function] = field(default_factory=dict)
    partition: Basis | None = None
    variable: int = 0
    n_folds: int = 1
    pairs: tuple[Array, Array] = field(init=False, repr=False)
    edges: tuple[int, int, int, int] = field(init=False, repr=False)
    block: int = field(init=False, repr=False)
    name = "cell-sums"
    kinds = (CellSums, BottomK)

    def __post_init__(self) -> None:
        d, rank = self.support.points.shape[1], 0
        if self.partition is not None:
            rank = self.partition.rank
        pairs = np.triu_indices(d if d <= _EXACT else 0)
        lengths = d, len(pairs[0]), len(self.functions), rank
        edges = tuple(np.cumsum(lengths).tolist())
        least, most = _ROWS
        block = min(max(1 << (_VALUES // edges[-1]).bit_length() >> 1, least), most)
        for name, value in (("pairs", pairs), ("edges", edges), ("block", block)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        rows: RowSample,
        variable: int,
        n_rows: float,
        n_folds: int,
        support: Support,
        functions: Mapping[str, Function],
        partition: Basis | None = None,
    ) -> Self:
        """With bounds such that about twice as many rows are retained as are needed.

        Parameters
        ----------
        rows
            The row sample.
        n_rows
            Number of rows in all, roughly.
        variable, n_folds, support, functions, partition
            See the class.
        """
        # Each row of the sample stands for 1 / its chance to be drawn, up to a factor.
        counts = np.ones(len(rows))
        if not rows.complete:
            with np.errstate(all="ignore"):  # weights of any size; a rough number will do
                counts = rows.importance / rows.weights
                counts = np.nan_to_num(counts / np.median(counts), nan=1.0)
            counts = np.clip(counts, 1e-9, 1e9)
        size, cells = len(support.points), support.assign(rows.parts[variable])
        share = np.bincount(cells, counts / counts.sum(), minlength=size)
        chance = _SPARE * ROWS_PER_CELL / np.maximum(share * n_rows, _SPARE * ROWS_PER_CELL)
        bounds = np.full(size, _LAST)
        fewer = chance < 1.0
        bounds[fewer] = (chance[fewer] * 2.0**64).astype(np.uint64)
        return cls(support, bounds, dict(functions), partition, variable, n_folds)

    def one_hot_rows(self, memory: int) -> int:
        """Rows that are summed at once on a device with so many bytes of memory."""
        return min(max(max(_ONE_HOT, memory >> 13) // len(self.bounds), 1 << 10), self.block)

    def cost(self, extent: Extent) -> Cost:
        """The way of each row to its cell, and sums of all cells."""
        size, d = self.support.points.shape
        width, rows = self.edges[-1], extent.strip_rows
        # What is summed; z, a column's points, ones and starts; the way of the rows to their cells.
        block = min(self.block, rows) * (width + d + 3)
        walk = 0 if self.support.left is None else WALK_WORDS * min(rows, WALK_ROWS)
        if extent.device_memory:  # the matrix that sums by cell, its weights and its flags
            block += 3 * self.one_hot_rows(extent.device_memory) * (size + self.n_folds)
        partial = size * (self.n_folds + 1 + width) * _WORD
        return Cost(
            flops=_CELL_FLOPS,
            state=(block + walk) * _WORD,
            partial=partial,
            alone={"the solution": 3 * partial // 2},  # once more packed for the model
            retained=size * _SPARE * ROWS_PER_CELL * (d + 3) * _WORD,
        )

    def start(self, like: Array) -> Buffers:
        """Points and bounds of the cells where the rows are, and memory of all strips."""
        xp, place = array_namespace(like), device(like)
        points = np.ascontiguousarray(self.support.points.T, dtype=np.float64)
        bounds = self.bounds if is_numpy_array(like) else _comparable(self.bounds)
        points, bounds = (xp.asarray(a, device=place) for a in (points, bounds))
        tree = None if is_numpy_array(like) else self.support.placed(like)
        return Buffers(points, bounds, tree, Scratch(), Scratch(), Scratch())

    def update(self, state: Buffers, strip: Strip) -> CellSums:
        """Sums over one strip."""
        part, weights, folds = strip.parts[self.variable], strip.weights, strip.folds(self.n_folds)
        xp, place = array_namespace(part), device(part)
        cells = self.support.assign(part, state.tree)
        add = self._on_host if is_numpy_array(part) else self._on_device
        with np.errstate(over="ignore", invalid="ignore"):  # the moments report it
            masses, counts, sums = add(state, part, weights, folds, cells)
        hashes = strip.hashes(SALT)
        if not is_numpy_array(part):
            hashes = xp.asarray(_comparable(hashes), device=place)
        below, used = hashes <= xp.take(state.bounds, cells), part
        if weights is None:
            weights = xp.ones(part.shape[0], dtype=xp.float64, device=place)
        else:
            below, used = below & (weights > 0.0), part[weights > 0.0]
        (where,) = xp.nonzero(below)
        bottom = BottomK(cells, hashes, weights, part).at(where)

        # The range of the columns; of no rows the one that any other contains.
        n, d = used.shape
        if is_numpy_array(used):
            integer = np.ones(d, dtype=bool)
            for rows in (used[:_FIRST], used):
                for j in np.flatnonzero(integer):
                    integer[j] = bool((np.floor(rows[:, j]) == rows[:, j]).all())
        else:
            integer = xp.all(xp.floor(used) == used, axis=0)
        high = xp.full((d,), -np.inf, dtype=xp.float64, device=place)
        low = -high
        if n:
            low = xp.astype(xp.min(used, axis=0), xp.float64)
            high = xp.astype(xp.max(used, axis=0), xp.float64)
        return CellSums(masses, counts, sums, bottom, low, high, integer)

    def combine(self, a: CellSums, b: CellSums) -> CellSums:
        """Sums over the union of two disjoint sets of rows."""
        xp = array_namespace(a.sums)
        bottom = BottomK(*map(xp.concat, zip(a.bottom, b.bottom, strict=True)))
        if bottom.cells.shape[0] > _CROWD * ROWS_PER_CELL * len(self.bounds):
            bottom = bottom.first(ROWS_PER_CELL)
        return CellSums(
            a.masses + b.masses,
            a.counts + b.counts,
            a.sums + b.sums,
            bottom,
            xp.minimum(a.low, b.low),
            xp.maximum(a.high, b.high),
            a.integer & b.integer,
        )

    def _on_host(
        self, state: Buffers, part: Array, weights: Array | None, folds: Array, cells: Array
    ) -> tuple[Array, Array, Array]:
        """Masses, counts and sums, by a sparse product: it reads each value once."""
        size, n_folds, length = len(self.bounds), self.n_folds, self.block
        where = folds.astype(np.int64)
        where *= size
        where += cells
        masses = np.bincount(where, weights, n_folds * size).reshape(n_folds, size)
        if weights is None:
            counts = masses.sum(axis=0)
        else:
            counts = np.bincount(cells[weights > 0.0], minlength=size)
        sums = np.zeros((size, self.edges[-1]))
        ones = np.ones(min(length, len(cells)))
        for start in range(0, len(cells), length):
            here = slice(start, min(start + length, len(cells)))
            data = ones[: here.stop - start] if weights is None else weights[here]
            places = data, cells[here].astype(np.int32), np.arange(len(data) + 1, dtype=np.int32)
            matrix = csc_array(places, shape=(size, len(data)))
            sums += matrix @ self._write(state, part[here, :], cells[here])
        return masses.astype(np.float64), counts, sums

    def _on_device(
        self, state: Buffers, part: Array, weights: Array | None, folds: Array, cells: Array
    ) -> tuple[Array, Array, Array]:
        """The same by a dense product: a device has no other sum of fixed order."""
        xp, place = array_namespace(part), device(part)
        size, n_folds = len(self.bounds), self.n_folds
        double, of = {"dtype": xp.float64, "device": place}, xp.arange(size, device=place)
        masses, counts = xp.zeros((n_folds, size), **double), xp.zeros(size, **double)
        sums = xp.zeros((size, self.edges[-1]), **double)
        numbers = xp.arange(n_folds, device=place)
        folds = xp.asarray(folds.astype(np.int64), device=place)
        length, n = self.one_hot_rows(device_memory(part)), part.shape[0]
        for start in range(0, n, length):
            here = slice(start, min(start + length, n))
            ones = xp.astype(of[:, None] == cells[None, here], xp.float64)
            if weights is None:
                matrix, counts = ones, counts + xp.sum(ones, axis=1)
            else:
                matrix = ones * weights[None, here]
                counts = counts + ones @ xp.astype(weights[here] > 0.0, xp.float64)
            masses += xp.astype(numbers[:, None] == folds[None, here], xp.float64) @ matrix.T
            sums += matrix @ self._write(state, part[here, :], cells[here])
        return masses, xp.astype(counts, xp.int64), sums

    def _write(self, state: Buffers, part: Array, cells: Array) -> Array:
        """What is summed, shape (n, width); z is the row less the point of its cell."""
        points, memory = state.points, (state.values, state.columns, state.point)
        xp, ops, (n, d) = array_namespace(part), in_place(part), part.shape
        shapes = (n, self.edges[-1]), (d, n), (n,)
        pairs = zip(memory, shapes, strict=True)
        values, columns, point = (scratch.shaped(xp, shape, points) for scratch, shape in pairs)
        # A column at a time: loops over a few columns cost more than the arithmetic.
        for j in range(d):
            take_into(xp, point, points[j, :], cells)
            ops.subtract(part[:, j], point, out=columns[j, :])
            values[:, j] = columns[j, :]
        for j, (a, b) in enumerate(zip(*self.pairs, strict=True), start=d):
            ops.multiply(columns[int(a), :], columns[int(b), :], out=values[:, j])
        _, first, last, _ = self.edges
        for j, function in enumerate(function_values(part, self.functions), start=first):
            values[:, j] = function[:, 0]
        if self.partition is not None:
            values[:, last:] = self.partition(part)
        return values

    def statistics(self, sums: CellSums) -> CellStatistics:
        """What laws in the cells are made of, from the sums over all rows."""
        points, counts = self.support.points, sums.counts
        mass, size = sums.masses.sum(axis=0), len(points)
        away, squares, functions, parts = np.split(sums.sums, self.edges[:-1], axis=1)
        per_weight = 1.0 / np.where(mass > 0.0, mass, 1.0)[:, None]
        away, squares = away * per_weight, squares * per_weight
        retained = sums.bottom.first(ROWS_PER_CELL)
        if retained.hashes.dtype != np.uint64:  # of a device, see _comparable
            retained = retained._replace(hashes=retained.hashes.view(np.uint64) ^ _SIGN)
        whole = np.bincount(retained.cells, minlength=size) == counts

        # Cells without rows have their point as the only atom, of weight zero.
        empty = np.setdiff1d(np.arange(size), retained.cells)
        last, none = np.full(len(empty), _LAST), np.zeros(len(empty))
        fillers = BottomK(empty, last, none, (points + away)[empty])
        atoms = BottomK(*map(np.concatenate, zip(retained, fillers, strict=True)))
        atoms = atoms.at(np.argsort(atoms.cells, kind="stable"))
        starts = np.searchsorted(atoms.cells, np.arange(size + 1))

        # Shares of the atoms in their cells. Weights count as one where there is none, and sums of
        # them may overflow.
        weights = np.where(atoms.weights > 0.0, atoms.weights, 1.0)
        shares = weights / np.maximum.reduceat(weights, starts[:-1])[atoms.cells]
        shares = np.maximum(shares, np.finfo(np.float64).tiny)
        shares = shares / np.add.reduceat(shares, starts[:-1])[atoms.cells]

        if squares.shape[1]:
            a, b = self.pairs
            spread = np.where(counts[:, None] > 1, squares - away[:, a] * away[:, b], 0.0)
            spread[:, a == b] = np.maximum(spread[:, a == b], 0.0)
            covariances = np.empty((*away.shape, away.shape[1]))
            covariances[:, a, b] = covariances[:, b, a] = spread
        else:
            covariances = sample_covariances(atoms.rows, starts, shares, whole)
        overall = functions.sum(axis=0) / mass.sum()
        return CellStatistics(
            support=self.support,
            masses=mass / mass.sum(),
            means=points + away,
            covariances=covariances,
            names=tuple(self.functions),
            functions=np.where(mass[:, None] > 0.0, functions * per_weight, overall),
            atoms=atoms.rows,
            starts=starts,
            shares=shares,
            whole=whole,
            components=None if self.partition is None else parts.T / mass.sum(),
            counts=counts,
            hashes=atoms.hashes,
            weights=atoms.weights,
            low=sums.low,
            high=sums.high,
            integer=sums.integer,
        )

    def sums(self, cells: CellStatistics, weight: float) -> CellSums:
        """Inverse of :meth:`statistics`, but for folds: the sums of all rows stand in one.

        Parameters
        ----------
        cells
            The statistics.
        weight
            Sum of the weights of all rows.
        """
        mass = weight * cells.masses
        away = cells.means - self.support.points
        a, b = self.pairs
        squares = cells.covariances[:, a, b] + away[:, a] * away[:, b]
        sums = mass[:, None] * np.concatenate([away, squares, cells.functions], axis=1)
        if cells.components is not None:
            sums = np.concatenate([sums, weight * cells.components.T], axis=1)
        atoms = BottomK(cells.cell_of_atom, cells.hashes, cells.weights, cells.atoms)
        retained = atoms.at(np.flatnonzero(cells.weights > 0.0))
        values = cells.low, cells.high, cells.integer
        return CellSums(mass[None], cells.counts, sums, retained, *values)


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
