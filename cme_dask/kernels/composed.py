"""Kernels made of kernels."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from array_api_compat import device

from cme_dask.errors import DataError
from cme_dask.kernels.base import (
    Array,
    Kernel,
    Sectioned,
    check_integer,
    check_kernel,
    check_number,
)
from cme_dask.kernels.into import Scratch, into
from cme_dask.kernels.sections import Sections, Write


def _combined(xp: Any, left: Sections, right: Sections, function: str) -> Sections:
    scratch = Scratch()

    def prepare(X: Array) -> Write:
        one, two = left.prepare(X), right.prepare(X)

        def block(here: slice, out: Array) -> None:
            other = scratch.like(xp, out)
            one(here, out)
            two(here, other)
            into(xp, out, function, out, other)

        return block

    return Sections(prepare)


@dataclass(frozen=True, repr=False)
class _Pair(Sectioned):
    left: Kernel
    right: Kernel

    _sign: ClassVar[str]
    _function: ClassVar[str]
    _log_function: ClassVar[str]

    @abstractmethod
    def _combine(self, left: Any, right: Any) -> Any: ...

    def __post_init__(self) -> None:
        check_kernel("left", self.left)
        check_kernel("right", self.right)

    def _sections(self, xp: Any, Z: Array) -> Sections:
        return _combined(xp, self.left.sections(Z), self.right.sections(Z), self._function)

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        logarithms = self.left.log_sections(Z), self.right.log_sections(Z)
        return _combined(xp, *logarithms, self._log_function)

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return self._combine(self.left.diagonal(X), self.right.diagonal(X))

    def check(self, n_columns: int) -> None:
        """Raise DataError if either kernel does."""
        self.left.check(n_columns)
        self.right.check(n_columns)

    def measures(self, column: int) -> bool:
        """Whether either kernel does."""
        return self.left.measures(column) or self.right.measures(column)

    def pools(self, column: int) -> bool:
        """Whether both kernels do."""
        return self.left.pools(column) and self.right.pools(column)

    @property
    def upper_bound(self) -> float | None:
        """The sum or product of the bounds, if both exist."""
        left, right = self.left.upper_bound, self.right.upper_bound
        return None if left is None or right is None else self._combine(left, right)

    def __repr__(self) -> str:
        right = self.right._operand(self._precedence + 1)
        return f"{self.left._operand(self._precedence)} {self._sign} {right}"


@dataclass(frozen=True, repr=False)
class Sum(_Pair):
    """The sum of two kernels, k(x, z) = left(x, z) + right(x, z)."""

    _precedence: ClassVar[int] = 0
    _sign: ClassVar[str] = "+"
    _function: ClassVar[str] = "add"
    _log_function: ClassVar[str] = "logaddexp"

    def _combine(self, left: Any, right: Any) -> Any:
        return left + right


@dataclass(frozen=True, repr=False)
class Product(_Pair):
    """The product of two kernels, k(x, z) = left(x, z) right(x, z)."""

    _precedence: ClassVar[int] = 1
    _sign: ClassVar[str] = "*"
    _function: ClassVar[str] = "multiply"
    _log_function: ClassVar[str] = "add"

    def _combine(self, left: Any, right: Any) -> Any:
        return left * right


@dataclass(frozen=True, repr=False)
class Scaled(Sectioned):
    """A positive multiple of a kernel, scale * base(x, z)."""

    scale: float
    base: Kernel

    _precedence: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", check_number("scale", self.scale))
        check_kernel("base", self.base)

    def _sections(self, xp: Any, Z: Array) -> Sections:
        return self.base.sections(Z).then(lambda out: into(xp, out, "multiply", out, self.scale))

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        shift = math.log(self.scale)
        return self.base.log_sections(Z).then(lambda out: into(xp, out, "add", out, shift))

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return self.scale * self.base.diagonal(X)

    def check(self, n_columns: int) -> None:
        """Raise DataError if the kernel does."""
        self.base.check(n_columns)

    def measures(self, column: int) -> bool:
        """Whether the kernel does."""
        return self.base.measures(column)

    def pools(self, column: int) -> bool:
        """Whether the kernel does."""
        return self.base.pools(column)

    @property
    def upper_bound(self) -> float | None:
        """The scaled bound, if it exists."""
        bound = self.base.upper_bound
        return None if bound is None else self.scale * bound

    def __repr__(self) -> str:
        return f"{self.scale!r} * {self.base._operand(2)}"


@dataclass(frozen=True, repr=False)
class Columns(Sectioned):
    """A kernel of some columns, base(x[columns], z[columns]).

    Parameters
    ----------
    base
        The kernel; it sees the chosen columns, in the order given.
    columns
        One index or several distinct ones, from 0.
    """

    base: Kernel
    columns: tuple[int, ...]

    def __post_init__(self) -> None:
        check_kernel("base", self.base)
        given: Any = self.columns
        items = given if isinstance(given, (list, tuple)) else (given,)
        columns = tuple(check_integer("a column index", item, 0) for item in items)
        if not columns or len(set(columns)) < len(columns):
            raise DataError(f"columns must be at least one and distinct, got {given!r}")
        object.__setattr__(self, "columns", columns)

    def _take(self, xp: Any, X: Array) -> Array:
        return xp.take(X, xp.asarray(self.columns, device=device(X)), axis=1)

    def _sections(self, xp: Any, Z: Array) -> Sections:
        return self.base.sections(self._take(xp, Z)).after(partial(self._take, xp))

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        return self.base.log_sections(self._take(xp, Z)).after(partial(self._take, xp))

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return self.base.diagonal(self._take(xp, X))

    def check(self, n_columns: int) -> None:
        """Raise DataError if a column is out of range or the kernel doesn't fit their number."""
        if max(self.columns) >= n_columns:
            raise DataError(
                f"the kernel uses column {max(self.columns)} but the data have {n_columns} "
                f"columns: use indices from 0 to {n_columns - 1}"
            )
        self.base.check(len(self.columns))

    def measures(self, column: int) -> bool:
        """Whether the kernel sees the column and does."""
        return column in self.columns and self.base.measures(self.columns.index(column))

    def pools(self, column: int) -> bool:
        """Whether the kernel does, or does not see the column."""
        seen = column in self.columns
        return not seen or self.base.pools(self.columns.index(column))

    @property
    def upper_bound(self) -> float | None:
        """The kernel's bound."""
        return self.base.upper_bound

    def __repr__(self) -> str:
        return f"{self.base._operand(2)}[{', '.join(map(str, self.columns))}]"
