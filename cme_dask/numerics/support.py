"""Bounded supports of laws: cells of one variable, whose masses are counted over all rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from scipy.spatial import KDTree

from cme_dask.errors import DataError
from cme_dask.kernels.into import Scratch, cast_into, into, to_numpy

Array = Any
Assign = Callable[[Array], Array]

SUPPORT_SIZE = 1000
"""Cells of a support, at most."""

SCORED_ROWS = 512
"""Rows whose scores are held at once; of fewer, threads wait for each other."""

_SINGLE = 1e-5  # least squared gap, over the largest squared centre, a hundred times the rounding
_FAR = 1e18  # where float32 still multiplies


@dataclass(frozen=True, eq=False)
class Support:
    """Points y_s and the cells of the rows that they stand for.

    Intervals of a scalar variable, cut at ``edges``; otherwise Voronoi cells, in columns divided by
    ``scale``.

    Parameters
    ----------
    points
        y_s, distinct, shape (S, d); ascending if scalar.
    edges
        Borders of the intervals, shape (S - 1,): cell s holds edges[s - 1] < y <= edges[s].
    scale
        Positive, shape (d,): cell s holds the rows with the smallest |(y - y_s) / scale|.

    Raises
    ------
    DataError
        If these don't fit together.
    """

    points: Array
    edges: Array | None = None
    scale: Array | None = None

    def __post_init__(self) -> None:
        shape = np.shape(self.points)
        if len(shape) != 2 or 0 in shape:
            raise DataError(f"a support needs points of shape (S, d), got shape {shape}")
        if (self.edges is None) == (self.scale is None):
            raise DataError("a support takes either edges or a scale")
        if self.edges is not None and (shape[1] != 1 or np.shape(self.edges) != (shape[0] - 1,)):
            raise DataError(
                f"points of shape {shape} take {shape[0] - 1} edges of a scalar variable, got "
                f"edges of shape {np.shape(self.edges)}"
            )
        if self.edges is not None and np.any(np.diff(self.edges) <= 0):
            raise DataError("the edges of a support must ascend")
        if self.scale is not None and (
            np.shape(self.scale) != shape[1:] or not np.all(np.asarray(self.scale) > 0)
        ):
            raise DataError(f"scale must be positive, of shape {shape[1:]}, got {self.scale!r}")

    @property
    def size(self) -> int:
        """Number of cells S."""
        return int(self.points.shape[0])

    def assigner(self, like: Array) -> Assign:
        """``assign(rows)``: cell numbers (n,) of rows (n, d), with memory that it keeps.

        Parameters
        ----------
        like
            An array of the library and on the device of the rows.
        """
        return self._intervals(like) if self.scale is None else self._nearest(like)

    def assign(self, rows: Array) -> Array:
        """Cell numbers, integers of shape (n,), of rows (n, d)."""
        return self.assigner(rows)(rows)

    def _intervals(self, like: Array) -> Assign:
        xp = array_namespace(like)
        edges = xp.asarray(self.edges, device=device(like))
        return lambda rows: xp.searchsorted(edges, rows[:, 0])

    def _nearest(self, like: Array) -> Assign:
        """Largest <z, c_s> - |c_s|^2 / 2, which is where |z - c_s| is smallest.

        One matrix product of the rows [z, 1], in float32 where that tells the points apart.
        """
        xp, here = array_namespace(like), device(like)
        size, d = self.points.shape
        middle, centres, single = self._centred
        augmented = np.vstack([centres.T, -0.5 * (centres * centres).sum(axis=1)])
        real = xp.float32 if single else xp.float64
        right = xp.astype(xp.asarray(augmented, device=here), real)
        offset, scale = middle.tolist(), np.asarray(self.scale, dtype=np.float64).tolist()
        scores = xp.empty((SCORED_ROWS, size), dtype=real, device=here)
        wide, narrow = Scratch(), Scratch()

        def assign(rows: Array) -> Array:
            # A column at a time: loops over a few columns cost more than the arithmetic.
            n = rows.shape[0]
            column = wide.shaped(xp, (n,), rows)
            left = narrow.shaped(xp, (d + 1, n), right)
            for j in range(d):
                into(xp, column, "subtract", rows[:, j], offset[j])
                into(xp, column, "divide", column, scale[j])
                into(xp, column, "minimum", column, _FAR)
                into(xp, column, "maximum", column, -_FAR)
                cast_into(xp, left[j, :], column)
            left[d, :] = 1.0
            cells = xp.empty(n, dtype=xp.int64, device=here)
            for start in range(0, n, SCORED_ROWS):
                stop = min(start + SCORED_ROWS, n)
                part = scores[: stop - start, :]
                into(xp, part, "matmul", left[:, start:stop].T, right)
                cells[start:stop] = xp.argmax(part, axis=1)
            return cells

        return assign

    @cached_property
    def _centred(self) -> tuple[Array, Array, bool]:
        """Middle, scaled centres, and whether float32 tells every centre from its neighbours.

        Products of large offsets would cancel: rows and centres are taken from the middle.
        """
        middle = self.points.mean(axis=0)
        centres = (self.points - middle) / self.scale
        if len(centres) == 1:
            return middle, centres, True
        gap = KDTree(centres).query(centres, k=2)[0][:, 1]
        size = np.abs(centres).max()
        return middle, centres, bool(gap.min() ** 2 > _SINGLE * size**2)

    def to_arrays(self) -> dict[str, Array]:
        """Plain arrays to store."""
        cut = {"edges": self.edges} if self.scale is None else {"scale": self.scale}
        return {"points": self.points, **cut}

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array]) -> "Support":
        """Inverse of :meth:`to_arrays`; raises DataError if they don't fit together."""
        return cls(arrays["points"], arrays.get("edges"), arrays.get("scale"))


def count_masses(cells: Array, weights: Array | None, size: int) -> Array:
    """Sum of the weights of the rows in each cell, shape (size,), in the memory of the process."""
    summed = None if weights is None else to_numpy(weights)
    return np.bincount(to_numpy(cells), summed, minlength=size).astype(np.float64)


def cell_means(values: Array, cells: Array, weights: Array, size: int) -> Array:
    """Means of functions over the rows of each cell, shape (size, q).

    Expectations under a law on the cells that use these, and not the values at the points, do not
    have the error of events that cut through cells.

    Parameters
    ----------
    values
        Of the functions at rows, shape (n, q).
    cells
        Cell of each row, shape (n,).
    weights
        Of the rows, shape (n,).
    size
        Number of cells; those without rows get the mean over all rows.
    """
    masses = np.bincount(cells, weights, minlength=size)
    sums = np.stack([np.bincount(cells, weights * f, minlength=size) for f in values.T], axis=1)
    overall = np.broadcast_to(weights @ values / weights.sum(), sums.shape)
    return np.divide(sums, masses[:, None], out=overall.copy(), where=masses[:, None] > 0)
