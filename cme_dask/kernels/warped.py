"""Kernels of columns in other coordinates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from cme_dask.errors import DataError
from cme_dask.kernels.base import Array, Kernel, Sectioned, check_kernel
from cme_dask.kernels.coordinates import Coordinates, Pooled
from cme_dask.kernels.sections import Sections


@dataclass(frozen=True, repr=False)
class Warped(Sectioned):
    """A kernel of mapped columns, base(t(x), t(z)).

    Length scales of the base are in units of the coordinates: standard deviations.

    Parameters
    ----------
    base
        The kernel; it sees rows in the coordinates.
    coordinates
        One coordinate t_j for each column.
    """

    base: Kernel
    coordinates: Coordinates

    _precedence: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_kernel("base", self.base)
        if not isinstance(self.coordinates, Coordinates):
            raise DataError(f"coordinates must be Coordinates, got {self.coordinates!r}")

    def _sections(self, xp: Any, Z: Array) -> Sections:
        return self._mapped(xp, Z, self.base.sections)

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        return self._mapped(xp, Z, self.base.log_sections)

    def _mapped(self, xp: Any, Z: Array, prepare: Callable[[Array], Sections]) -> Sections:
        map_rows = self.coordinates.prepare(xp, Z)
        return prepare(map_rows(Z)).after(map_rows)

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return self.base.diagonal(self.coordinates(X))

    @property
    def unmapped(self) -> tuple[Any, Kernel]:
        """The coordinates and the base."""
        return self.coordinates, self.base

    def check(self, n_columns: int) -> None:
        """Raise DataError if there is not one coordinate per column, or the base does."""
        count = len(self.coordinates.columns)
        if count != n_columns:
            raise DataError(
                f"the kernel has coordinates of {count} columns but the data have {n_columns} "
                "columns: give one for each column"
            )
        self.base.check(n_columns)

    def measures(self, column: int) -> bool:
        """Whether the base does."""
        return self.base.measures(column)

    def pools(self, column: int) -> bool:
        """Whether the column's levels are pooled."""
        return isinstance(self.coordinates.columns[column], Pooled)

    @property
    def upper_bound(self) -> float | None:
        """The base's bound."""
        return self.base.upper_bound

    def __repr__(self) -> str:
        return f"{self.base._operand(1)} of {self.coordinates}"
