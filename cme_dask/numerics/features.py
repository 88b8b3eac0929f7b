"""Features whose products a pass sums: basis functions, and functions of the columns."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from cme_dask.display import brief_repr
from cme_dask.errors import DataError
from cme_dask.numerics.basis import Basis, BlockSolve
from cme_dask.numerics.scoring import ScoringFunctions

Array = Any
Function = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class FeatureBlock:
    """One variable's part of the augmented rows: basis functions, and functions of its columns.

    Parameters
    ----------
    basis
        Newton basis of the variable, or a partition of unity.
    columns
        Names of its columns, d of them: their values are functions like any other.
    functions
        Declared functions by name; each takes the rows (n, d) and returns (n,).
    shift
        A value near the mean of each column, function and event, shape (q,), subtracted before
        squaring; default zeros.
    solve
        How far the basis is solved for before its products are summed; default wholly.
    events
        Events that a tuning is judged by, after the functions and without names.

    Attributes
    ----------
    names
        Names of the columns and declared functions.
    """

    basis: Basis
    columns: tuple[str, ...]
    functions: dict[str, Function] = field(default_factory=dict)
    shift: Array = None
    solve: BlockSolve | None = None
    events: ScoringFunctions | None = None
    names: tuple[str, ...] = field(init=False)

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        names = (*self.columns, *self.functions)
        count = len(names) + (0 if self.events is None else len(self.events))
        shift = np.zeros(count) if self.shift is None else np.asarray(self.shift)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "shift", shift)

    @property
    def solve_flops(self) -> int:
        """Operations per row of the data that solve for the basis."""
        return self.basis.rank**2 if self.solve is None else self.solve.flops

    def values(self, rows: Array) -> Iterator[Array]:
        """Columns, declared functions and events at the rows, without the shift.

        They come in parts of shapes (n, k), one after the other.

        Raises
        ------
        DataError
            If a function returns the wrong shape or a value that is not finite.
        """
        yield rows
        yield from function_values(rows, self.functions)
        if self.events is not None:
            yield self.events(rows)

    def same_functions(self, other: "FeatureBlock") -> bool:
        """Whether columns, functions, events and shift are those of another block."""
        same = self.events is other.events or self.events == other.events
        same = same and self.columns == other.columns and self.functions == other.functions
        return same and np.array_equal(self.shift, other.shift)


def function_values(rows: Array, functions: Mapping[str, Function]) -> Iterator[Array]:
    """Values of each function at the rows, shapes (n, 1), one after the other.

    A function gets a copy of the rows, to do with as it likes.

    Raises
    ------
    DataError
        If one fails, or returns the wrong shape or a value that is not a finite number.
    """
    xp = array_namespace(rows)
    for name, function in functions.items():
        try:
            values = xp.asarray(function(xp.asarray(rows, copy=True)))
        except Exception as error:
            raise DataError(f"function {name!r} failed: {type(error).__name__}: {error}") from error
        if not xp.isdtype(values.dtype, ("bool", "integral", "real floating")):
            raise DataError(f"function {name!r} must return numbers, it returned {values.dtype}")
        if values.shape != (rows.shape[0],):
            several = ": declare a function for each column" if values.ndim == 2 else ""
            raise DataError(
                f"function {name!r} must return shape ({rows.shape[0]},) for rows of shape "
                f"{tuple(rows.shape)}, it returned {tuple(values.shape)}{several}"
            )
        values = xp.astype(values, xp.float64)
        if not bool(xp.all(xp.isfinite(values))):
            raise DataError(f"function {name!r} returned NaN or infinity")
        yield values[:, None]
