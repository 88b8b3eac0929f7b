"""Sums by cell of one strip of rows after the other."""

from typing import Any

import numpy as np
from scipy.sparse import csc_array

from cme_dask.kernels.into import to_numpy
from cme_dask.numerics.cell_sums import CellSpec, CellSums
from cme_dask.numerics.kept_rows import Kept
from cme_dask.numerics.moments import function_values
from cme_dask.numerics.value_range import ValueRange

Array = Any


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
        self._spec, points = spec, spec.support.points
        block = self._block = spec.block(max(rows, 1))
        self._values = np.empty((block, spec.width))
        self._columns = np.empty((points.shape[1], block))
        self._point = np.empty(block)
        self._points = np.ascontiguousarray(points.T, dtype=np.float64)
        # Of the matrix whose products sum values by cell.
        self._ones, self._starts = np.ones(block), np.arange(block + 1, dtype=np.int32)

    def __call__(
        self, hashes: Array, part: Array, weights: Array | None, folds: Array, n_folds: int
    ) -> CellSums:
        """Sums over one strip of rows.

        Parameters
        ----------
        hashes
            Of the global indices of the rows, shape (n,); see
            :func:`cme_dask.numerics.kept_rows.hashes_of`.
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
        kept = self._kept(cells, hashes, rows, weight)
        values = ValueRange.of(rows if weight is None else rows[weight > 0.0])
        return CellSums(masses.astype(np.float64), counts, sums, kept, values)

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
        kept = Kept(
            cells[where],
            hashes[where],
            np.ones(len(where)) if weight is None else weight[where].astype(np.float64),
            rows[where].astype(np.float64),
        )
        return Kept.joined([kept], self._spec.support.size)
