"""Length scales of the columns of a kernel, read from its structure."""

from dataclasses import dataclass, replace

import numpy as np

from cme_dask.kernels.base import Columns, Kernel, Product, Scaled, Sum
from cme_dask.kernels.discrete import Categorical
from cme_dask.kernels.stationary import Stationary
from cme_dask.kernels.transforms import Coordinate, Scores, Standard, Warped

SCALES = (0.05, 50.0)
"""Length scales that a search tries first, in standard deviations."""

WIDEST = (0.005, 500.0)
"""Length scales that it tries where the best kernels lie at the end of these."""

IGNORED = 1e12
"""Length scale in a search of a column that the kernel leaves out."""


@dataclass(frozen=True)
class ColumnScale:
    """Length scale of a kernel along one column.

    Attributes
    ----------
    scale
        In the units of the coordinate, or of the column where there is none; infinite for a column
        that the kernel does not see.
    coordinate
        What the column is mapped by, if it is.
    categorical
        Whether the column holds levels: then the scale has no unit.
    """

    scale: float
    coordinate: Coordinate | None = None
    categorical: bool = False

    @property
    def ignored(self) -> bool:
        """Whether the kernel does not depend on the column."""
        return self.scale >= IGNORED

    @property
    def in_units(self) -> float:
        """The length scale in the units of the column; infinite where it is ignored.

        Under normal scores t it is the width of the interval around the median that t maps to one
        of this length, t^-1(l / 2) - t^-1(-l / 2).
        """
        if self.ignored:
            return float("inf")
        if isinstance(self.coordinate, Standard):
            return self.scale * self.coordinate.scale
        if isinstance(self.coordinate, Scores):
            ends = np.asarray([-self.scale / 2, self.scale / 2])
            low, high = self.coordinate.inverse()(np, ends)
            return float(high - low)
        return self.scale


def column_scales(kernel: Kernel, n_columns: int) -> tuple[ColumnScale | None, ...]:
    """Length scale along each column; None for columns along which the kernel has none.

    Of sums and products that see a column twice the shorter scale counts.

    Parameters
    ----------
    kernel
        Of rows with ``n_columns`` columns.
    n_columns
        Their number.

    Returns
    -------
    tuple of ColumnScale or None
        One per column.
    """
    if isinstance(kernel, Warped):
        inner = column_scales(kernel.base, n_columns)
        return tuple(
            None if scale is None else replace(scale, coordinate=coordinate)
            for scale, coordinate in zip(inner, kernel.coordinates.columns, strict=True)
        )
    if isinstance(kernel, Scaled):
        return column_scales(kernel.base, n_columns)
    if isinstance(kernel, Columns):
        each = dict(
            zip(kernel.columns, column_scales(kernel.base, len(kernel.columns)), strict=True)
        )
        return tuple(each.get(j, ColumnScale(np.inf)) for j in range(n_columns))
    if isinstance(kernel, (Sum, Product)):
        pairs = zip(
            column_scales(kernel.left, n_columns),
            column_scales(kernel.right, n_columns),
            strict=True,
        )
        return tuple(
            min((s for s in pair if s is not None), key=lambda s: s.scale, default=None)
            for pair in pairs
        )
    if isinstance(kernel, Stationary):
        scales = kernel.length_scale
        each_column = scales if isinstance(scales, tuple) else (scales,) * n_columns
        coded = isinstance(kernel, Categorical)
        return tuple(ColumnScale(float(scale), categorical=coded) for scale in each_column)
    return (None,) * n_columns
