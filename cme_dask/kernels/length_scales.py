"""The length scale of a kernel along one column, and the ranges in which scales are searched."""

import math
from dataclasses import dataclass
from typing import Any

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
        In the units of the transform, or of the column where there is none; infinite for a column
        that the kernel does not see.
    transform
        What the column is mapped by, if it is.
    categorical
        Whether the column holds levels: then the scale has no unit.
    """

    scale: float
    transform: Any = None
    categorical: bool = False

    @property
    def ignored(self) -> bool:
        """Whether the kernel does not depend on the column."""
        mapped = self.transform is not None or self.scale == IGNORED  # not in units of a column
        return self.scale == math.inf or (mapped and self.scale >= IGNORED)

    @property
    def in_units(self) -> float:
        """The length scale in the units of the column; infinite where it is ignored."""
        if self.ignored:
            return float("inf")
        return self.scale if self.transform is None else self.transform.width(self.scale)
