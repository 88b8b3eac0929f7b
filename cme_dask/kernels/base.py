"""What a kernel is, and its algebra: sums, products, scalings, columns.

What a kernel is, and checks of what it is made of.

Operators need a module that builds on this one: they import it when called.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from typing import Any, ClassVar

from array_api_compat import array_namespace, device

from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import Scratch, Sections, Write, into

# What a kernel is, and checks of what it is made of


Array = Any

KERNELS: dict[str, type["Kernel"]] = {}
"""The kernels that files may hold, by name: :mod:`cme_dask.kernels.files` lists them."""


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value.to_dict() if hasattr(value, "to_dict") else value


@dataclass(frozen=True)
class Kernel(ABC):
    """A positive semidefinite function of two rows.

    Subclasses are frozen dataclasses that define the block, the diagonal and, where they exist,
    the bound and the conditions on the number of columns. Kernels add and multiply, scale by
    positive numbers, and ``kernel[0, 2]`` (or ``kernel.on([0, 2])``) looks at some columns only.
    """

    # Indexing selects columns: without this, iteration over a kernel would never end.
    __iter__: ClassVar[None] = None
    # NumPy scalars on the left leave the product to __rmul__.
    __array_ufunc__: ClassVar[None] = None
    # How tightly the repr binds: sums 0, products 1, everything else 2.
    _precedence: ClassVar[int] = 2

    def __call__(self, X: Array, Z: Array) -> Array:
        """Return the block k(x_i, z_j), (n, m), of rows X (n, d) and Z (m, d)."""
        return self._block(array_namespace(X, Z), X, Z)

    @property
    def unmapped(self) -> "tuple[Any, Kernel]":
        """Coordinates t, or None, and the kernel of rows in them: k(x, z) = base(t(x), t(z))."""
        return None, self

    def diagonal(self, X: Array) -> Array:
        """Return k(x_i, x_i), (n,), of rows X (n, d)."""
        return self._diagonal(array_namespace(X), X)

    def sections(self, Z: Array) -> Sections:
        """Return the functions k(., z_j), j = 1..m, prepared for many rows.

        Called with rows X, shape (n, d), they write k(z_j, x_i) to memory of shape (m, n). What
        depends on Z alone is computed once, and memory on the way is kept: use one per thread.
        """
        return self._sections(array_namespace(Z), Z)

    def log_sections(self, Z: Array) -> Sections:
        """Return the functions log k(., z_j), j = 1..m, for many rows.

        As :meth:`sections`, without the underflow of a kernel far from z_j; -inf where k is zero.

        Raises
        ------
        DataError
            If the kernel can be negative: here for linear and polynomial ones, for a user's own
            when they are called.
        """
        return self._log_sections(array_namespace(Z), Z)

    @abstractmethod
    def _block(self, xp: Any, X: Array, Z: Array) -> Array: ...

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        def logarithms(out: Array) -> None:
            if bool(xp.any(out < 0.0)):
                raise negative_values(self)
            zero = out == 0.0
            out[...] = xp.where(zero, -xp.inf, xp.log(xp.where(zero, 1.0, out)))

        return self._sections(xp, Z).then(logarithms)

    def _sections(self, xp: Any, Z: Array) -> Sections:
        def write(X: Array, out: Array) -> None:
            out[...] = self._block(xp, X, Z).T

        return Sections.of_blocks(write)

    @abstractmethod
    def _diagonal(self, xp: Any, X: Array) -> Array: ...

    def check(self, n_columns: int) -> None:  # noqa: B027 (most kernels fit any number)
        """Raise DataError if the kernel can't be used on `n_columns` columns."""

    def measures(self, column: int) -> bool:
        """Whether the kernel takes values in this column as numbers, which codes of labels aren't.

        False for users' own kernels, which may know of codes.
        """
        return False

    def pools(self, column: int) -> bool:
        """Whether numbers in this column that no level has are one level to the kernel."""
        return False

    @property
    def upper_bound(self) -> float | None:
        """A number that k(z, z) exceeds nowhere, or None."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the kernel as plain JSON values, to be read by :func:`from_dict`."""
        name = type(self).__name__
        if KERNELS.get(name) is not type(self):
            raise DataError(f"{name} is not a kernel of cme_dask: wrap it in Custom to save it")
        return {"kernel": name, **{f.name: _plain(getattr(self, f.name)) for f in fields(self)}}

    def on(self, columns: int | Sequence[int]) -> "Columns":
        """Return the kernel of these columns only."""
        return Columns(self, columns)  # type: ignore[arg-type]

    def __getitem__(self, columns: int | Sequence[int]) -> "Columns":
        return self.on(columns)

    def __add__(self, other: object) -> "Sum":
        return Sum(self, other) if isinstance(other, Kernel) else NotImplemented

    def __mul__(self, other: object) -> "Product | Scaled":
        if isinstance(other, Kernel):
            return Product(self, other)
        return Scaled(other, self) if isinstance(other, Real) else NotImplemented  # type: ignore[arg-type]

    def __rmul__(self, other: object) -> "Product | Scaled":
        return self * other

    def _operand(self, precedence: int) -> str:
        return f"({self!r})" if self._precedence < precedence else repr(self)


@dataclass(frozen=True)
class Unit(Kernel):
    """A kernel that is 1 at equal rows and nowhere more."""

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return xp.ones(X.shape[0], dtype=X.dtype, device=device(X))

    @property
    def upper_bound(self) -> float:
        """1."""
        return 1.0


class Sectioned(Kernel):
    """A kernel whose one formula is that of its sections."""

    @abstractmethod
    def _sections(self, xp: Any, Z: Array) -> Sections: ...

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        dtype = xp.result_type(X, Z)
        if not xp.isdtype(dtype, "real floating"):
            dtype = xp.float64
        out = xp.empty((Z.shape[0], X.shape[0]), dtype=dtype, device=device(X))
        self._sections(xp, Z)(X, out)
        return out.T


def negative_values(kernel: Kernel) -> DataError:
    """The error for a kernel of which there is no logarithm."""
    return DataError(
        f"{kernel!r} can be negative, but a kernel k >= 0 was expected: take a Gaussian, Laplace, "
        "Matern or rational quadratic one, or sums and products of these"
    )


def is_a(value: object, kind: Any) -> bool:
    """Whether `value` is of this kind and not True or False."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_number(name: str, value: Any, *, zero: bool = False) -> float:
    """Return `value` as a positive finite float, or as zero if that is allowed."""
    if is_a(value, Real):
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            number = math.inf
        if math.isfinite(number) and (number > 0.0 or (zero and number == 0.0)):
            return number
    raise DataError(
        f"{name} must be {'at least 0' if zero else 'positive'} and finite, got {value!r}"
    )


def check_integer(name: str, value: Any, least: int) -> int:
    """Return `value` as an integer of at least `least`."""
    if is_a(value, Integral) and value >= least:
        return int(value)
    raise DataError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_kernel(name: str, value: object) -> None:
    """Raise DataError if `value` isn't a kernel."""
    if not isinstance(value, Kernel):
        raise DataError(f"{name} must be a kernel, got {value!r}")


# Kernels made of kernels


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
