"""Values that columns of y can take, and the map that brings moved atoms to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Annotated, Any, NamedTuple, Self

import numpy as np

from cme_dask.codec import Shape
from cme_dask.errors import DataError
from cme_dask.numerics.cells import CellStatistics, ValueRange

Array = Any

CONTINUOUS, DISCRETE, SEMI_DISCRETE, WHOLE, LABELS = (
    "continuous",
    "discrete",
    "semi-discrete",
    "whole numbers",
    "labels",
)
"""Kinds of columns, as models name them."""

MOST_VALUES = 1000
"""Values of a column that is recognised as discrete, at most."""

UNSEEN = 0.01
"""Share of new rows with a new value of a column that is recognised as discrete, at most."""

SLACK = 1e-12
"""Relative error that is tolerated in sums of masses: they are exact to rounding only."""

SUPPORTS = ("auto", "continuous", "discrete", "bounded")
"""What users say of the values of y in a word."""

_FORMS = (
    f"one of {', '.join(SUPPORTS)}, a tuple (low, high), an array of all values, or a dict of "
    "these by column of y"
)
_ATOM_SHARE = 0.01  # of the rows hold an atom, at least
_ATOM_TIMES = 10  # times as many rows as a value that not all rows differ in holds an atom
_FEWEST = 10  # rows


# What the user says


def check_support(name: str, value: Any) -> None:
    """DataError unless the value may say which values y takes."""
    if isinstance(value, Mapping):
        for column, one in value.items():
            parse_support(f"{name}[{column!r}]", one)
    else:
        parse_support(name, value)


def says_support(value: Any) -> bool:
    """Whether the user says which values y takes."""
    return not (isinstance(value, str) and value == "auto")


def parse_support(name: str, value: Any) -> str | tuple[float, float] | Array:
    """A kind; bounds, infinite where there is none; or values, ascending."""
    if isinstance(value, str) and value in SUPPORTS:
        return value
    if isinstance(value, tuple):
        numbers = len(value) == 2 and all(
            one is None or (isinstance(one, Real) and one == one) for one in value
        )
        if numbers:
            low, high = (
                float(infinite if one is None else one)
                for one, infinite in zip(value, (-np.inf, np.inf), strict=True)
            )
            if low < high and (np.isfinite(low) or np.isfinite(high)):
                return low, high
        raise DataError(
            f"{name} as a tuple is (low, high) with low < high, None for no bound on one side, got "
            f"{value!r:.100}: a list or an array holds all values that y takes"
        )
    try:
        values = np.unique(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError):
        values = np.empty(0)
    if np.ndim(value) != 1 or not len(values) or not np.isfinite(values).all():
        raise DataError(f"{name} must be {_FORMS}, got {value!r:.100}")
    return values


# What rows tell


@dataclass(frozen=True, eq=False)
class ColumnValues:
    """The values of one column of y.

    Attributes
    ----------
    kind
        ``continuous``: any numbers. ``discrete``: those of a list. ``semi-discrete``: any numbers,
        some of which hold a share of the rows themselves. ``whole numbers``: too many for a list.
        ``labels``: no numbers.
    values
        The list, or these atoms, ascending, shape (k,).
    low, high
        Bounds that no value is beyond; infinite where there are none or none is known.
    bounds
        What ends of the range of the rows are: ``learned`` if that is decided by held-out rows,
        ``seen`` if they are bounds, ``none`` if there are no bounds; ``given`` if ``low`` and
        ``high`` are the user's, ``listed`` if the values are.
    """

    kind: str = CONTINUOUS
    values: Array = ()
    low: float = -np.inf
    high: float = np.inf
    bounds: str = "learned"


def unseen_share(counts: Array) -> float:
    """Share of new rows with a value that no row holds, from how many rows hold each (Good 1953).

    It is the share of the rows whose value no other row holds.
    """
    return float((counts == 1).sum() / counts.sum())


def recognised_values(column: Array, weights: Array) -> ColumnValues:
    """The kind of a column, from rows of it.

    It is discrete if it has at most 1,000 values, and :func:`unseen_share` of them is at most 1 %.
    Other columns are semi-discrete if a value holds at least 1 % of the rows and ten times as many
    as the median of the values does, so that readings that are rounded are no atoms.

    Parameters
    ----------
    column
        Shape (n,).
    weights
        Of the rows, shape (n,); rows without weight are left out.
    """
    seen = weights > 0.0
    values, where, counts = np.unique(column[seen], return_inverse=True, return_counts=True)
    n = len(where)
    if n < _FEWEST:
        return ColumnValues()
    if len(values) <= MOST_VALUES and unseen_share(counts) <= UNSEEN:
        return ColumnValues(DISCRETE, values)
    if (np.floor(values) == values).all():
        return ColumnValues(WHOLE)
    shares = np.bincount(where, weights[seen]) / weights[seen].sum()
    least = max(_ATOM_TIMES * float(np.median(counts)), _FEWEST)
    atoms = values[(shares >= _ATOM_SHARE) & (counts >= least)]
    return ColumnValues(SEMI_DISCRETE, atoms) if len(atoms) else ColumnValues()


# The map of moved atoms


@dataclass(frozen=True, eq=False)
class ValueMap:
    """An ascending map of each column, to values that it can take.

    Numbers are brought into a range, to whole numbers in some columns, and those within the reach
    of an atom to it.

    Attributes
    ----------
    low, high
        The range of each column, shape (q,); infinite where there is none.
    integer
        Which columns hold whole numbers, shape (q,): halves are rounded up.
    atoms
        Of all columns, ascending in each, shape (k,).
    lower, upper
        Their reaches, closed intervals that contain them and have no more than ends in common,
        shape (k,).
    starts
        The atoms of column j are ``atoms[starts[j]:starts[j + 1]]``, shape (q + 1,).
    """

    low: Annotated[Array, Shape("q", finite=False)]
    high: Annotated[Array, Shape("q", finite=False)]
    integer: Annotated[Array, Shape("q", dtype=bool)]
    atoms: Annotated[Array, Shape("k")]
    lower: Annotated[Array, Shape("k", finite=False)]
    upper: Annotated[Array, Shape("k", finite=False)]
    starts: Annotated[Array, Shape("q+1", dtype=np.int64)]

    @classmethod
    def of(
        cls,
        low: Array,
        high: Array,
        integer: Array,
        reaches: Sequence[tuple[Array, Array, Array]] | None = None,
    ) -> Self:
        """From atoms, lower and upper ends by column; default no atoms."""
        columns = [(np.empty(0),) * 3] * len(low) if reaches is None else reaches
        starts = np.cumsum([0, *(len(atoms) for atoms, *_ in columns)], dtype=np.int64)
        atoms, lower, upper = (np.concatenate(each) for each in zip(*columns, strict=True))
        return cls(low, high, integer, atoms, lower, upper, starts)

    @classmethod
    def of_range(cls, values: ValueRange) -> Self:
        """Into the range of some rows, and to whole numbers where all of them are."""
        return cls.of(values.low, values.high, values.integer)

    @classmethod
    def unknown(cls, q: int) -> Self:
        """Any number may occur in any of q columns."""
        return cls.of(np.full(q, -np.inf), np.full(q, np.inf), np.zeros(q, dtype=bool))

    def _validate(self) -> None:
        """DataError unless each column has a range and its atoms ascend."""
        starts = self.starts
        ordered = starts[0] == 0 and starts[-1] == len(self.atoms) and (np.diff(starts) >= 0).all()
        if not (ordered and (self.low <= self.high).all()):
            raise DataError("the values of y have no range")
        reached = (self.lower <= self.atoms).all() and (self.atoms <= self.upper).all()
        ascends = (
            (each[1:] > each[:-1]).all() and (upper[:-1] <= lower[1:]).all()
            for each, lower, upper in map(self.reaches, range(len(self.low)))
        )
        if not (reached and all(ascends)):
            raise DataError("the atoms of y do not ascend")

    def reaches(self, j: int) -> tuple[Array, Array, Array]:
        """Atoms of a column and their lower and upper ends, shapes (k_j,)."""
        here = slice(self.starts[j], self.starts[j + 1])
        return self.atoms[here], self.lower[here], self.upper[here]

    @property
    def range(self) -> ValueRange:
        """The range of each column, and whole numbers."""
        return ValueRange(self.low, self.high, self.integer)

    @cached_property
    def clips_alone(self) -> bool:
        """Whether the map does no more than to bring numbers into a range."""
        return not (self.integer.any() or len(self.atoms))

    def possible(self, values: Array) -> Array:
        """Values (..., q) that the columns can take, from any numbers; it ascends in each."""
        result = np.clip(values, self.low, self.high)
        if self.integer.any():
            result[..., self.integer] = np.floor(result[..., self.integer] + 0.5)
        for j in np.flatnonzero(np.diff(self.starts)).tolist():
            atoms, lower, upper = self.reaches(j)
            here = result[..., j]
            nearest = np.minimum(np.searchsorted(upper, here), len(atoms) - 1)
            within = (lower[nearest] <= here) & (here <= upper[nearest])
            result[..., j] = np.where(within, atoms[nearest], here)
        return result

    def column(self, j: int) -> "ValueMap":
        """The map of one column, for values of shape (..., 1)."""
        here = slice(j, j + 1)
        return self.of(self.low[here], self.high[here], self.integer[here], [self.reaches(j)])

    def with_column(self, j: int, other: "ValueMap") -> "ValueMap":
        """With the map of column j that the other one has."""
        reaches = [(other if i == j else self).reaches(i) for i in range(len(self.low))]
        here = np.arange(len(self.low)) == j
        low, high, integer = (
            np.where(here, getattr(other, name), getattr(self, name))
            for name in ("low", "high", "integer")
        )
        return self.of(low, high, integer, reaches)


# Reaches of atoms: half-way to their neighbours, or so that moved laws have the shares of y


class MovedAtoms(NamedTuple):
    """The mean of moved laws of one column over held-out rows.

    Attributes
    ----------
    values
        Of the atoms, ascending, shape (m,).
    cumulative
        Sums of their masses, up to 1, shape (m,).
    """

    values: Array
    cumulative: Array

    @classmethod
    def of(cls, values: Array, masses: Array) -> Self:
        """From values and masses in any order, shapes (m,)."""
        order = np.argsort(values, kind="stable")
        cumulative = np.cumsum(masses[order])
        return cls(values[order], cumulative / cumulative[-1])

    def first(self, level: float, *, beyond: bool) -> float:
        """The first value at which the sum reaches a level, or with ``beyond`` exceeds it."""
        if beyond:
            at = np.searchsorted(self.cumulative, level + SLACK, side="right")
        else:
            at = np.searchsorted(self.cumulative, level - SLACK, side="left")
        return float(self.values[min(int(at), len(self.values) - 1)])


def nearest_reaches(values: Array) -> tuple[Array, Array, Array]:
    """Values (k,) of a discrete column, each of which reaches half-way to its neighbours."""
    middle = np.nextafter(values[:-1] / 2 + values[1:] / 2, -np.inf)  # the middle goes up
    borders = np.clip(middle, values[:-1], np.nextafter(values[1:], -np.inf))
    return values, np.append(-np.inf, borders), np.append(borders, np.inf)


def matched_reaches(
    known: ColumnValues, moved: MovedAtoms, cells: CellStatistics, j: int
) -> tuple[Array, Array, Array]:
    r"""Reaches by which each value gets the share of the moved laws that it has of the rows.

    A value a reaches from the quantile of the mean moved law at the level P(Y < a) to the one at
    P(Y <= a), shares of all rows: the map matches the quantiles of both laws. But no value reaches
    beyond another one, and each keeps itself.

    Parameters
    ----------
    known
        The values, of a discrete or semi-discrete column.
    moved
        The mean of the moved laws.
    cells, j
        Statistics of y, and the column.
    """
    values = np.asarray(known.values)
    below, up_to = shares_below(cells, j, values)
    upper = np.array([moved.first(level, beyond=False) for level in up_to])
    most = np.append(np.nextafter(values[1:], -np.inf), np.inf)
    upper = np.clip(upper, values, most)
    if known.kind == DISCRETE:
        upper[-1] = np.inf
        return values, np.append(-np.inf, upper[:-1]), upper
    lower = np.array([moved.first(level, beyond=True) for level in below])
    lower = np.clip(lower, np.append(-np.inf, upper[:-1]), values)
    # No row is beyond an atom at an end of the range.
    lower[0] = -np.inf if values[0] <= cells.low[j] else lower[0]
    upper[-1] = np.inf if values[-1] >= cells.high[j] else upper[-1]
    return values, lower, upper


def shares_below(cells: CellStatistics, j: int, values: Array) -> tuple[Array, Array]:
    """P(Y_j < v) and P(Y_j <= v) of all rows, from the cells and their atoms, shapes (k,)."""
    atoms, masses = cells.atoms[:, j], cells.masses[cells.cell_of_atom] * cells.shares
    order = np.argsort(atoms, kind="stable")
    sums = np.append(0.0, np.cumsum(masses[order]))
    below, up_to = (sums[np.searchsorted(atoms[order], values, side)] for side in ("left", "right"))
    return below, up_to


def ranges_without(y: Array, values: ValueRange) -> tuple[Array, Array]:
    """Least and largest value of each column without a row, for each row, shapes (n, q).

    A row at the end of the range of all rows would find atoms that are brought into it at its own
    value, where new rows may lie beyond.
    """
    ordered = np.sort(y, axis=0)
    least, most = ordered[min(1, len(y) - 1)], ordered[max(len(y) - 2, 0)]
    low = np.where(y == values.low, np.maximum(least, values.low), values.low)
    high = np.where(y == values.high, np.minimum(most, values.high), values.high)
    return low, high
