"""Which values the columns of a variable take: their range over all rows, and whole numbers."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

Array = Any

_FIRST = 64  # rows that tell of most columns that they don't hold whole numbers


@dataclass(frozen=True, eq=False)
class ValueRange:
    """Least and largest value of each column over rows of positive weight, and whole numbers.

    They add by taking the wider range, so that the result is the same for any order of the rows.

    Attributes
    ----------
    low, high
        Shape (d,), in the units of the columns; infinite where nothing is known, as in models of
        before ranges were recorded.
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
        found = self.clipped(values)
        if self.integer.any():
            found[..., self.integer] = np.floor(found[..., self.integer] + 0.5)
        return found

    def column(self, j: int) -> "ValueRange":
        """The range of one column, for values of shape (..., 1)."""
        return ValueRange(self.low[[j]], self.high[[j]], self.integer[[j]])
