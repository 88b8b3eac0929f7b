"""Bounded supports of laws: cells of one variable, whose masses are counted over all rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from cme_dask.errors import DataError
from cme_dask.numerics.tree import Tree

Array = Any

SUPPORT_SIZE = 1000
"""Cells of a support, at most."""


@dataclass(frozen=True, eq=False)
class Support:
    """Points y_s and the cells of the rows that they stand for.

    Intervals of a scalar variable, cut at ``edges``; otherwise boxes, the leaves of a ``tree``.

    Parameters
    ----------
    points
        y_s, distinct, shape (S, d); ascending if scalar.
    edges
        Borders of the intervals, shape (S - 1,): cell s holds edges[s - 1] < y <= edges[s].
    tree
        Cell s holds the rows of leaf s.

    Raises
    ------
    DataError
        If these don't fit together.

    Notes
    -----
    Models of before there were trees bring neither: their cells have points, but rows can't be
    assigned to them.
    """

    points: Array
    edges: Array | None = None
    tree: Tree | None = None

    def __post_init__(self) -> None:
        shape = np.shape(self.points)
        if len(shape) != 2 or 0 in shape:
            raise DataError(f"a support needs points of shape (S, d), got shape {shape}")
        if self.edges is not None and self.tree is not None:
            raise DataError("a support takes either edges or a tree")
        if self.edges is not None and (shape[1] != 1 or np.shape(self.edges) != (shape[0] - 1,)):
            raise DataError(
                f"points of shape {shape} take {shape[0] - 1} edges of a scalar variable, got "
                f"edges of shape {np.shape(self.edges)}"
            )
        if self.edges is not None and not np.all(np.diff(self.edges) > 0):
            raise DataError("the edges of a support must ascend")
        if self.tree is not None and (
            self.tree.size != shape[0] or int(np.max(self.tree.feature)) >= shape[1]
        ):
            raise DataError(
                f"points of shape {shape} take a tree of {shape[0]} leaves on {shape[1]} columns, "
                f"got {self.tree.size} leaves, and columns up to {int(np.max(self.tree.feature))}"
            )

    @property
    def size(self) -> int:
        """Number of cells S."""
        return int(self.points.shape[0])

    def assign(self, rows: Array) -> Array:
        """Cell numbers, integers of shape (n,), of rows (n, d).

        Raises
        ------
        DataError
            If the cells are known by their points alone.
        """
        if self.tree is not None:
            return self.tree.leaves(rows)
        if self.edges is None:
            raise DataError("the cells of this model are of an older version: fit it again")
        xp = array_namespace(rows)
        return xp.searchsorted(xp.asarray(self.edges, device=device(rows)), rows[:, 0])

    def to_arrays(self) -> dict[str, Array]:
        """Plain arrays to store."""
        arrays = {"points": self.points}
        if self.edges is not None:
            arrays["edges"] = self.edges
        if self.tree is not None:
            tree = self.tree
            arrays |= {"feature": tree.feature, "threshold": tree.threshold, "left": tree.left}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array]) -> "Support":
        """Inverse of :meth:`to_arrays`; raises DataError if they don't fit together."""
        tree = None
        if not arrays.keys().isdisjoint(("feature", "threshold", "left")):
            tree = Tree(arrays["feature"], arrays["threshold"], arrays["left"])
        return cls(arrays["points"], arrays.get("edges"), tree)


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
