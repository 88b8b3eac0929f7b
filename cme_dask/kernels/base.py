"""The base class of kernels, and their algebra: sums, products, scalings, columns.

Operators need classes that are defined further down: they look them up when called.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from typing import Any, ClassVar, Self

from array_api_compat import array_namespace, device

from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import BlockEvaluator, DerivedEvaluator
from cme_dask.kernels.length_scales import ColumnScale

# What a kernel is, and checks of what it is made of


Array = Any

MAX_DEPTH = 100
"""How deep kernels may be nested: deeper ones in a file would exhaust the stack."""

_STEP = 1e-3  # of differences, relative to the parameter
_DIFFERENCES = ((-2, 1 / 12), (-1, -2 / 3), (1, 2 / 3), (2, -1 / 12))

KERNELS: dict[str, type["Kernel"]] = {}
"""The kernels that files may hold, by name: those of the package and those that a program defines.
"""


def real_floating(X: Array) -> Array:
    """The rows, integers as float64: differences of unsigned ones would wrap around."""
    xp = array_namespace(X)
    return X if xp.isdtype(X.dtype, "real floating") else xp.astype(X, xp.float64)


def _depth(kernel: "Kernel") -> int:
    """How many kernels lie one within the other."""
    parts = (getattr(kernel, f.name) for f in fields(kernel))
    return 1 + max((_depth(part) for part in parts if isinstance(part, Kernel)), default=0)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value.to_dict() if hasattr(value, "to_dict") else value


@dataclass(frozen=True)
class Kernel(ABC):
    """A positive semidefinite function of two rows.

    Subclasses are frozen dataclasses whose fields are JSON values or kernels. They define
    :meth:`formula` and :meth:`diagonal_formula` and, where they exist, the bound and the conditions
    on the number of columns; files find them again by the name of the class. Kernels add and
    multiply, scale by positive numbers, and ``kernel[0, 2]`` (or ``kernel.on([0, 2])``) looks at
    some columns only.
    """

    # Indexing selects columns: without this, iteration over a kernel would never end.
    __iter__: ClassVar[None] = None
    # NumPy scalars on the left leave the product to __rmul__.
    __array_ufunc__: ClassVar[None] = None
    # How tightly the repr binds: sums 0, products 1, everything else 2.
    _precedence: ClassVar[int] = 2

    fixed: ClassVar[tuple[str, ...]] = ()
    """Fields that hold numbers but are no continuous parameters."""

    signed: ClassVar[bool] = False
    """Whether values can be negative whatever the rows, so that there are no logarithms."""

    def __init_subclass__(cls, *, abstract: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if abstract or cls.__name__.startswith("_"):
            return
        other = KERNELS.get(cls.__name__)
        if other is not None and _package(other) == "cme_dask" != _package(cls):
            raise DataError(f"{cls.__name__} is the name of a kernel of cme_dask")
        KERNELS[cls.__name__] = cls

    def __call__(self, X: Array, Z: Array) -> Array:
        """Return the block k(x_i, z_j), (n, m), of rows X (n, d) and Z (m, d)."""
        return self.formula(array_namespace(X, Z), real_floating(X), real_floating(Z))

    @abstractmethod
    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return the block k(x_i, z_j), (n, m), as plain arithmetic of an array namespace.

        An autodiff namespace can trace it. Blocks are written faster by :meth:`evaluator`, and are
        the same to rounding.
        """

    @abstractmethod
    def diagonal_formula(self, xp: Any, X: Array) -> Array:
        """Return k(x_i, x_i), (n,), as plain arithmetic of an array namespace."""

    def evaluator(self, Z: Array, *, log: bool = False) -> BlockEvaluator:
        """Return the functions k(., z_j), j = 1..m, or their logarithms, for many rows.

        Parameters
        ----------
        Z
            The points z_j, shape (m, d).
        log
            Whether to take logarithms.

        Raises
        ------
        DataError
            If logarithms are requested and the kernel can be negative.
        """
        return BlockEvaluator(self, Z, log=log)

    @property
    def parameters(self) -> tuple[float, ...]:
        """The continuous parameters: length scales and the like, in the order of the fields."""
        result: list[float] = []
        for _, value in self._continuous():
            if isinstance(value, Kernel):
                result += value.parameters
            else:
                result += value if isinstance(value, tuple) else (value,)
        return tuple(result)

    def with_parameters(self, values: Sequence[Any]) -> Self:
        """Return the kernel with other continuous parameters, which may be traced ones.

        They are not checked: an autodiff namespace has no numbers yet.

        Parameters
        ----------
        values
            As many as :attr:`parameters`.

        Raises
        ------
        DataError
            If there are more or fewer.
        """
        if len(values) != len(self.parameters):
            raise DataError(f"{len(self.parameters)} parameters expected, got {len(values)}")
        changed, start = copy.copy(self), 0
        for name, value in self._continuous():
            if isinstance(value, Kernel):
                count = len(value.parameters)
                part: Any = value.with_parameters(values[start : start + count])
            elif isinstance(value, tuple):
                count = len(value)
                part = tuple(values[start + i] for i in range(count))
            else:
                count, part = 1, values[start]
            object.__setattr__(changed, name, part)
            start += count
        return changed

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        r"""Return the gradient of :math:`\sum_{ij} w_{ij} k(x_i, z_j)` in the parameters.

        Kernels of the package have it in closed form. Others take it from differences of their
        formula, of fourth order and with about eleven digits.

        Parameters
        ----------
        X, Z
            Rows, shapes (n, d) and (m, d).
        weights
            The weights w, of any sign, shape (n, m).

        Returns
        -------
        gradient : as many numbers as :attr:`parameters`
        """
        xp, X, Z = array_namespace(X, Z), real_floating(X), real_floating(Z)
        return self._differences(lambda kernel: xp.sum(weights * kernel.formula(xp, X, Z)))

    def _differences(self, function: Callable[[Self], Any]) -> list[float]:
        """The gradient of a function of the kernel in its parameters, by differences."""
        values, result = list(self.parameters), []
        for i, value in enumerate(values):
            step = _STEP * (abs(value) or 1.0)
            total = 0.0
            for multiple, factor in _DIFFERENCES:
                moved = [*values[:i], value + multiple * step, *values[i + 1 :]]
                total += factor * float(function(self.with_parameters(moved)))
            result.append(total / step)
        return result

    def _continuous(self) -> Iterator[tuple[str, Any]]:
        """Fields that hold kernels or continuous parameters, with their values."""
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is int and f.type in (float, "float"):
                value = float(value)
            numbers = value if isinstance(value, tuple) else (value,)
            if isinstance(value, Kernel) or (
                f.name not in self.fixed and all(type(one) is float for one in numbers)
            ):
                yield f.name, value

    @property
    def unmapped(self) -> "tuple[Any, Kernel]":
        """Transform t, or None, and the kernel of mapped rows: k(x, z) = base(t(x), t(z))."""
        return None, self

    def diagonal(self, X: Array) -> Array:
        """Return k(x_i, x_i), (n,), of rows X (n, d)."""
        return self.diagonal_formula(array_namespace(X), real_floating(X))

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

    def column_scales(self, n_columns: int) -> tuple[ColumnScale | None, ...]:
        """Return the length scale along each column; None for columns along which there is none."""
        return (None,) * n_columns

    @property
    def upper_bound(self) -> float | None:
        """A number that k(z, z) exceeds nowhere, or None."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the kernel as plain JSON values, to be read by :func:`from_dict`."""
        name = type(self).__name__
        if KERNELS.get(name) is not type(self):
            raise DataError(
                f"{name} is not saved by its name, which is private or another kernel's by now: "
                "rename the class"
            )
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
class Unit(Kernel, abstract=True):
    """A kernel that is 1 at equal rows and nowhere more."""

    upper_bound = 1.0

    def diagonal_formula(self, xp: Any, X: Array) -> Array:
        """Return ones."""
        return xp.ones(X.shape[0], dtype=X.dtype, device=device(X))


class Evaluated(Kernel, abstract=True):
    """A kernel whose blocks come from its evaluator, not from its formula."""

    def __call__(self, X: Array, Z: Array) -> Array:
        """Return the block k(x_i, z_j), (n, m), of rows X (n, d) and Z (m, d)."""
        xp, X, Z = array_namespace(X, Z), real_floating(X), real_floating(Z)
        dtype = xp.result_type(X, Z)
        out = xp.empty((Z.shape[0], X.shape[0]), dtype=dtype, device=device(X))
        self.evaluator(Z)(X, out)
        return out.T


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


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
    """Raise DataError if `value` isn't a kernel that another one may be made of."""
    if not isinstance(value, Kernel):
        raise DataError(f"{name} must be a kernel, got {value!r}")
    if _depth(value) > MAX_DEPTH:
        raise DataError(
            f"kernels may be nested {MAX_DEPTH} deep at most: combine many of them in pairs, such "
            "as (a + b) + (c + d)"
        )


# Kernels made of kernels


class _PairEvaluator(BlockEvaluator):
    """Two kernels, and the function that combines their blocks."""

    def __init__(self, kernel: "_Pair", Z: Array, *, log: bool) -> None:
        super().__init__(kernel, Z, log=log)
        self._both = kernel.left.evaluator(Z, log=log), kernel.right.evaluator(Z, log=log)
        self._combine = getattr(self.ops, kernel._log_function if log else kernel._function)

    def load(self, X: Array) -> None:
        """Take the rows X, shape (n, d), until the next call."""
        for evaluator in self._both:
            evaluator.load(X)

    def _fill(self, here: slice, out: Array) -> None:
        other = self.scratch.like(self.xp, out)
        left, right = self._both
        left.write(here, out)
        right.write(here, other)
        self._combine(out, other, out=out)


@dataclass(frozen=True, repr=False)
class _Pair(Evaluated, abstract=True):
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

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return the sum or product of both blocks."""
        return self._combine(self.left.formula(xp, X, Z), self.right.formula(xp, X, Z))

    def diagonal_formula(self, xp: Any, X: Array) -> Array:
        """Return the sum or product of both diagonals."""
        return self._combine(self.left.diagonal_formula(xp, X), self.right.diagonal_formula(xp, X))

    def evaluator(self, Z: Array, *, log: bool = False) -> BlockEvaluator:
        """Return the functions of both, combined."""
        return _PairEvaluator(self, Z, log=log)

    def check(self, n_columns: int) -> None:
        """Raise DataError if either kernel does."""
        self.left.check(n_columns)
        self.right.check(n_columns)

    def measures(self, column: int) -> bool:
        """Whether either kernel does."""
        return self.left.measures(column) or self.right.measures(column)

    def column_scales(self, n_columns: int) -> tuple[ColumnScale | None, ...]:
        """Return the shorter of both scales of each column, or that there is none."""
        both = self.left.column_scales(n_columns), self.right.column_scales(n_columns)
        return tuple(map(_shorter, *both))

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


def _shorter(left: ColumnScale | None, right: ColumnScale | None) -> ColumnScale | None:
    finite = [each for each in (left, right) if each is not None and not each.ignored]
    if finite:
        return min(finite, key=lambda each: each.scale)
    # A kernel without a length scale along the column may see it all the same.
    return None if left is None or right is None else left


@dataclass(frozen=True, repr=False)
class Sum(_Pair):
    """The sum of two kernels, k(x, z) = left(x, z) + right(x, z)."""

    _precedence: ClassVar[int] = 0
    _sign: ClassVar[str] = "+"
    _function: ClassVar[str] = "add"
    _log_function: ClassVar[str] = "logaddexp"

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        """Return the gradients in the parameters of both kernels."""
        return [
            *self.left.weighted_gradient(X, Z, weights),
            *self.right.weighted_gradient(X, Z, weights),
        ]

    def _combine(self, left: Any, right: Any) -> Any:
        return left + right


@dataclass(frozen=True, repr=False)
class Product(_Pair):
    """The product of two kernels, k(x, z) = left(x, z) right(x, z)."""

    _precedence: ClassVar[int] = 1
    _sign: ClassVar[str] = "*"
    _function: ClassVar[str] = "multiply"
    _log_function: ClassVar[str] = "add"

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        """Return the gradients in the parameters of both kernels."""
        return [
            *self.left.weighted_gradient(X, Z, weights * self.right(X, Z)),
            *self.right.weighted_gradient(X, Z, weights * self.left(X, Z)),
        ]

    def _combine(self, left: Any, right: Any) -> Any:
        return left * right


@dataclass(frozen=True, repr=False)
class Scaled(Evaluated):
    """A positive multiple of a kernel, scale * base(x, z)."""

    scale: float
    base: Kernel

    _precedence: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", check_number("scale", self.scale))
        check_kernel("base", self.base)

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return the scaled block."""
        return self.scale * self.base.formula(xp, X, Z)

    def diagonal_formula(self, xp: Any, X: Array) -> Array:
        """Return the scaled diagonal."""
        return self.scale * self.base.diagonal_formula(xp, X)

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        """Return the gradients in the scale and in the parameters of the base."""
        in_scale = float(array_namespace(X, Z).sum(weights * self.base(X, Z)))
        return [in_scale, *self.base.weighted_gradient(X, Z, self.scale * weights)]

    def evaluator(self, Z: Array, *, log: bool = False) -> BlockEvaluator:
        """Return the functions of the base, scaled."""
        base = self.base.evaluator(Z, log=log)
        work = base.ops.add if log else base.ops.multiply
        factor = math.log(self.scale) if log else self.scale
        return DerivedEvaluator(self, Z, base, change=lambda out: work(out, factor, out=out))

    def check(self, n_columns: int) -> None:
        """Raise DataError if the kernel does."""
        self.base.check(n_columns)

    def measures(self, column: int) -> bool:
        """Whether the kernel does."""
        return self.base.measures(column)

    def column_scales(self, n_columns: int) -> tuple[ColumnScale | None, ...]:
        """Return those of the base."""
        return self.base.column_scales(n_columns)

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
class Columns(Evaluated):
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

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return the block of these columns."""
        return self.base.formula(xp, self._take(xp, X), self._take(xp, Z))

    def diagonal_formula(self, xp: Any, X: Array) -> Array:
        """Return the diagonal of these columns."""
        return self.base.diagonal_formula(xp, self._take(xp, X))

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        """Return the gradient of the base, of these columns."""
        xp = array_namespace(X, Z)
        return self.base.weighted_gradient(self._take(xp, X), self._take(xp, Z), weights)

    def evaluator(self, Z: Array, *, log: bool = False) -> BlockEvaluator:
        """Return the functions of the base, of these columns."""
        take = partial(self._take, array_namespace(Z))
        return DerivedEvaluator(self, Z, self.base.evaluator(take(Z), log=log), map_rows=take)

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

    def column_scales(self, n_columns: int) -> tuple[ColumnScale | None, ...]:
        """Return those of the base, infinite for columns that it does not see."""
        seen = self.base.column_scales(len(self.columns))
        each = dict(zip(self.columns, seen, strict=True))
        return tuple(each.get(j, ColumnScale(math.inf)) for j in range(n_columns))

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
