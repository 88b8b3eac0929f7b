"""Transforms of single columns, and kernels of transformed columns."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from array_api_compat import array_namespace, device

from cme_dask.errors import DataError
from cme_dask.kernels.base import (
    Array,
    Evaluated,
    Kernel,
    check_kernel,
    check_number,
    is_a,
    real_floating,
)
from cme_dask.kernels.evaluator import BlockEvaluator, DerivedEvaluator
from cme_dask.kernels.length_scales import ColumnScale

# Maps of single columns, to a common scale or to pooled levels


Map = Callable[[Array], Array]


@dataclass(frozen=True)
class ColumnTransform(ABC):
    """A map of one column, ``transform(xp, column)``, shape (n,) to (n,)."""

    # What mapped columns are called.
    _noun: ClassVar[str]

    def __call__(self, xp: Any, column: Array) -> Array:
        """Return the mapped column, shape (n,)."""
        return self.prepare(xp, column)(column)

    @abstractmethod
    def prepare(self, xp: Any, like: Array) -> Map:
        """Return the map, prepared for many columns that live where ``like`` does."""

    @abstractmethod
    def inverse(self) -> "ColumnTransform":
        """Return the map back.

        Raises
        ------
        DataError
            If several values are mapped to one.
        """

    def width(self, scale: float) -> float:
        """Return a length of the mapped column in the units of the column."""
        return scale

    @abstractmethod
    def slope(self, xp: Any, column: Array) -> Array:
        """Return dt / dx at a column, shape (n,), at knots that on the left; DataError as above."""


@dataclass(frozen=True)
class Standard(ColumnTransform):
    """A column without location and unit, (x - shift) / scale.

    Parameters
    ----------
    shift
        Finite, in the units of the column.
    scale
        Positive, in the units of the column.
    """

    shift: float
    scale: float

    _noun: ClassVar[str] = "standardised columns"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shift", _finite("shift", self.shift))
        object.__setattr__(self, "scale", check_number("scale", self.scale))

    def prepare(self, xp: Any, like: Array) -> Map:
        """Return the map."""
        return lambda column: (column - self.shift) / self.scale

    def inverse(self) -> "Standard":
        """Return the map back, scale * t + shift."""
        return Standard(-self.shift / self.scale, 1.0 / self.scale)

    def width(self, scale: float) -> float:
        """Return the length times the scale of the column."""
        return scale * self.scale

    def slope(self, xp: Any, column: Array) -> Array:
        """Return 1 / scale."""
        return xp.full_like(column, 1.0 / self.scale)


@dataclass(frozen=True)
class Scores(ColumnTransform):
    """A piecewise linear, strictly increasing map through knots (value, score).

    Beyond the outer knots it goes on with the slopes of the outer segments, so that it is
    injective and finite everywhere.

    Parameters
    ----------
    values
        At least two, ascending and distinct, in the units of the column.
    scores
        As many, ascending and distinct, no unit.
    """

    values: tuple[float, ...]
    scores: tuple[float, ...]

    _noun: ClassVar[str] = "normal scores"

    def __post_init__(self) -> None:
        for name in ("values", "scores"):
            object.__setattr__(self, name, _ascending(name, getattr(self, name)))
        if len(self.values) != len(self.scores) or len(self.values) < 2:
            raise DataError(
                "values and scores must be at least two and equally many, got "
                f"{len(self.values)} and {len(self.scores)}"
            )

    def prepare(self, xp: Any, like: Array) -> Map:
        """Return the map."""
        # In float64 whatever the column: neighbouring knots may be one number in float32. A share
        # of the segment, not a slope: the slope of a short segment may leave the range.
        values, scores, widths, rises = (
            xp.asarray(numbers, dtype=xp.float64, device=device(like))
            for numbers in _knots(self.values, self.scores)
        )
        inner = values[1:-1]
        # Rounding takes no segment but the last beyond its end: so the map ascends as computed.
        ends = xp.asarray((*self.scores[1:-1], math.inf), dtype=xp.float64, device=device(like))

        def map_column(column: Array) -> Array:
            x = xp.astype(column, xp.float64, copy=False)
            segment = xp.searchsorted(inner, x)
            share = (x - xp.take(values, segment)) / xp.take(widths, segment)
            mapped = xp.take(scores, segment) + xp.take(rises, segment) * share
            mapped = xp.minimum(mapped, xp.take(ends, segment))
            return xp.astype(mapped, column.dtype, copy=False)

        return map_column

    def inverse(self) -> "Scores":
        """Return the map back: the same knots the other way."""
        return Scores(self.scores, self.values)

    def width(self, scale: float) -> float:
        """Return the width around the median, t^-1(l / 2) - t^-1(-l / 2) for the length l."""
        low, high = self.inverse()(np, np.asarray([-scale / 2, scale / 2]))
        return float(high - low)

    def slope(self, xp: Any, column: Array) -> Array:
        """Return the slope of the segment."""
        values, _, widths, rises = (
            xp.asarray(numbers, dtype=xp.float64, device=device(column))
            for numbers in _knots(self.values, self.scores)
        )
        segment = xp.searchsorted(values[1:-1], xp.astype(column, xp.float64, copy=False))
        return xp.take(rises, segment) / xp.take(widths, segment)


@dataclass(frozen=True)
class PoolRare(ColumnTransform):
    """Codes of a categorical column, those of rare and unknown levels made one.

    A code in ``levels`` becomes its position there, any other number becomes ``len(levels)``.

    Parameters
    ----------
    levels
        The codes that are not pooled, ascending and distinct; none to pool all.
    """

    levels: tuple[float, ...]

    _noun: ClassVar[str] = "pooled levels"

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", _ascending("levels", self.levels))

    def prepare(self, xp: Any, like: Array) -> Map:
        """Return the map."""
        count = len(self.levels)
        if not count:
            return xp.zeros_like  # type: ignore[no-any-return]
        levels = xp.asarray(self.levels, dtype=xp.float64, device=device(like))

        def map_column(column: Array) -> Array:
            codes = xp.astype(column, xp.float64, copy=False)
            position = xp.searchsorted(levels, codes)
            position = xp.where(position < count, position, xp.zeros_like(position))
            known = xp.take(levels, position) == codes
            return xp.astype(xp.where(known, position, xp.full_like(position, count)), column.dtype)

        return map_column

    def inverse(self) -> "ColumnTransform":
        """Raise DataError: pooled levels can't be distinguished."""
        raise DataError("a column of pooled levels has no inverse")

    def slope(self, xp: Any, column: Array) -> Array:
        """Raise DataError: levels have no distance."""
        raise DataError("a column of pooled levels has no slope")


COLUMN_TRANSFORMS: dict[str, type[ColumnTransform]] = {
    cls.__name__: cls for cls in (Standard, Scores, PoolRare)
}


@dataclass(frozen=True)
class Transform:
    """A map for each column of a variable; ``transform(X)`` has the shape of X (n, d).

    Parameters
    ----------
    columns
        One :class:`Standard`, :class:`Scores` or :class:`PoolRare` per column.
    """

    columns: tuple[ColumnTransform, ...]

    def __post_init__(self) -> None:
        given: Any = self.columns
        columns = tuple(given) if isinstance(given, (list, tuple)) else ()
        if not columns or not all(type(c) in COLUMN_TRANSFORMS.values() for c in columns):
            raise DataError(
                f"columns must be at least one of {', '.join(COLUMN_TRANSFORMS)}, got {given!r}"
            )
        object.__setattr__(self, "columns", columns)

    def __call__(self, X: Array) -> Array:
        """Return the mapped rows, (n, d), of rows X (n, d)."""
        return self.prepare(array_namespace(X), X)(X)

    def prepare(self, xp: Any, like: Array) -> Map:
        """Return the map of rows, prepared for many blocks that live where ``like`` does."""
        maps = [column.prepare(xp, like) for column in self.columns]

        def map_rows(X: Array) -> Array:
            # A column next to another: blocks are written faster so, and read as fast.
            return xp.stack([one(X[:, j]) for j, one in enumerate(maps)]).T

        return map_rows

    def inverse(self) -> "Transform":
        """Return the map back; raise DataError if levels of a column are pooled."""
        return Transform(tuple(column.inverse() for column in self.columns))

    def slope(self, X: Array) -> Array:
        """Return dt_j / dx_j at rows X, shape (n, d); raise DataError if levels are pooled."""
        xp = array_namespace(X)
        each = [column.slope(xp, X[:, j]) for j, column in enumerate(self.columns)]
        return xp.stack(each, axis=1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "columns": [
                {"transform": type(column).__name__}
                | {f.name: _plain(getattr(column, f.name)) for f in fields(column)}
                for column in self.columns
            ]
        }

    @classmethod
    def from_dict(cls, d: object) -> "Transform":
        """Inverse of :meth:`to_dict`, for files that can't be trusted.

        Raises
        ------
        DataError
            If a name, key, type or value is not one that ``to_dict`` writes.
        """
        columns = d.get("columns") if isinstance(d, Mapping) and set(d) == {"columns"} else None
        if not isinstance(columns, list):
            raise DataError(f"a transform must be described by a list of columns, got {d!r:.80}")
        return cls(tuple(map(_column_transform, columns)))

    def __str__(self) -> str:
        kinds = {type(column) for column in self.columns}
        return " and ".join(cls._noun for cls in COLUMN_TRANSFORMS.values() if cls in kinds)


def _column_transform(d: object) -> ColumnTransform:
    given = dict(d) if isinstance(d, Mapping) else {}
    name = given.pop("transform", None)
    cls = COLUMN_TRANSFORMS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise DataError(
            f"unknown transform {name!r}: expected one of {', '.join(COLUMN_TRANSFORMS)}"
        )
    expected = {f.name for f in fields(cls)}
    if set(given) != expected:
        raise DataError(
            f"{name} takes exactly the keys {sorted(expected)}, got {sorted(map(str, given))}"
        )
    return cls(**given)


def _finite(name: str, value: Any) -> float:
    # Of the thousands of knots nearly all are floats; whether others are numbers takes longer.
    if (type(value) is float or is_a(value, Real)) and abs(value) <= sys.float_info.max:
        return float(value)
    raise DataError(f"{name} must be a finite number, got {value!r}")


def _ascending(name: str, values: Any) -> tuple[float, ...]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        raise DataError(f"{name} must be a list of numbers, got {values!r}")
    numbers = tuple(_finite(name, value) for value in values)
    if any(a >= b for a, b in pairwise(numbers)):
        raise DataError(f"{name} must be ascending and distinct, got {values!r:.80}")
    if numbers and not math.isfinite(numbers[-1] - numbers[0]):
        raise DataError(f"{name} must span a finite range, got {numbers[0]!r} to {numbers[-1]!r}")
    return numbers


@lru_cache(maxsize=64)
def _knots(values: tuple[float, ...], scores: tuple[float, ...]) -> tuple[Array, ...]:
    """Values and scores, and their steps from one to the next, made once for many blocks."""
    return np.array(values), np.array(scores), np.diff(values), np.diff(scores)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# Kernels of mapped columns


@dataclass(frozen=True, repr=False)
class TransformedKernel(Evaluated):
    """A kernel of mapped columns, base(t(x), t(z)).

    Length scales of the base are in units of the mapped columns: standard deviations.

    Parameters
    ----------
    base
        The kernel; it sees mapped rows.
    transform
        One map t_j for each column.
    """

    base: Kernel
    transform: Transform

    _precedence: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_kernel("base", self.base)
        if not isinstance(self.transform, Transform):
            raise DataError(f"transform must be a Transform, got {self.transform!r}")

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return the block of the mapped rows."""
        map_rows = self.transform.prepare(xp, Z)
        return self.base.formula(xp, map_rows(X), map_rows(Z))

    def diagonal_formula(self, xp: Any, X: Array) -> Array:
        """Return the diagonal of the mapped rows."""
        return self.base.diagonal_formula(xp, self.transform.prepare(xp, X)(X))

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        """Return the gradient of the base, of mapped rows."""
        X, Z = real_floating(X), real_floating(Z)
        map_rows = self.transform.prepare(array_namespace(Z), Z)
        return self.base.weighted_gradient(map_rows(X), map_rows(Z), weights)

    def evaluator(self, Z: Array, *, log: bool = False) -> BlockEvaluator:
        """Return the functions of the base, of mapped rows."""
        map_rows = self.transform.prepare(array_namespace(Z), Z)
        base = self.base.evaluator(map_rows(Z), log=log)
        return DerivedEvaluator(self, Z, base, map_rows=map_rows)

    @property
    def unmapped(self) -> tuple[Any, Kernel]:
        """The transform and the base."""
        return self.transform, self.base

    def column_scales(self, n_columns: int) -> tuple[ColumnScale | None, ...]:
        """Return those of the base, with the maps of the columns."""
        pairs = zip(self.base.column_scales(n_columns), self.transform.columns, strict=True)
        return tuple(scale and replace(scale, transform=transform) for scale, transform in pairs)

    def check(self, n_columns: int) -> None:
        """Raise DataError if there is not one map per column, or the base does."""
        count = len(self.transform.columns)
        if count != n_columns:
            raise DataError(
                f"the kernel has a transform of {count} columns but the data have {n_columns} "
                "columns: give one for each column"
            )
        self.base.check(n_columns)

    def measures(self, column: int) -> bool:
        """Whether the base does."""
        return self.base.measures(column)

    def pools(self, column: int) -> bool:
        """Whether the column's levels are pooled."""
        return isinstance(self.transform.columns[column], PoolRare)

    @property
    def upper_bound(self) -> float | None:
        """The base's bound."""
        return self.base.upper_bound

    def __repr__(self) -> str:
        return f"{self.base._operand(1)} of {self.transform}"
