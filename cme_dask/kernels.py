"""Kernels: one formula each; sums, products, scalings and column subsets compose.

A kernel is a small frozen value. ``kernel(X, Z)`` is the block of all pairs, ``kernel.diagonal(X)``
its values k(x, x); both run on any array library that follows the array API standard, and neither
looks at the data for errors: data are validated where they enter, and ``kernel.check(d)`` says
whether the kernel fits d columns. ``to_dict`` and :func:`from_dict` carry kernels through files as
plain JSON values; nothing in a file is ever executed.

Blocks are the largest arrays of a pass and allocating one can cost more than filling it, so the
formulas keep as few alive as they can: in-place operators, no names for intermediate blocks.

In the docstrings n and m are numbers of rows and d the number of columns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar

from array_api_compat import array_namespace, device

from cme_dask.errors import DataError

Array = Any
LengthScale = float | tuple[float, ...]

MAX_DEPTH = 100  # of nested kernels in a file: a hostile one must not exhaust the stack


def _is(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _number(name: str, value: Any, *, zero: bool = False) -> float:
    """Return `value` as a positive finite float, or as zero if that is allowed."""
    if _is(value, Real):
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            number = math.inf
        if math.isfinite(number) and (number > 0.0 or (zero and number == 0.0)):
            return number
    raise DataError(
        f"{name} must be {'at least 0' if zero else 'positive'} and finite, got {value!r}"
    )


def _integer(name: str, value: Any, least: int) -> int:
    if _is(value, Integral) and value >= least:
        return int(value)
    raise DataError(f"{name} must be an integer of at least {least}, got {value!r}")


def _length_scale(value: Any) -> LengthScale:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)) and value:
        return tuple(_number("length_scale", item) for item in value)
    return _number("length_scale", value)


def _kernel(name: str, value: object) -> None:
    if not isinstance(value, Kernel):
        raise DataError(f"{name} must be a kernel, got {value!r}")


def _scaled(xp: Any, X: Array, Z: Array, length_scale: LengthScale) -> tuple[Array, Array]:
    """Return u = (X - c) / l and v = (Z - c) / l with c the column means of Z.

    Distances don't change with c, but their rounding does: an offset that is large against the
    spread would cancel only after it had been squared. Equal rows give bitwise equal u and v.
    """
    centre = xp.mean(Z, axis=0)
    scale: Any = length_scale
    if isinstance(length_scale, tuple):
        scale = xp.asarray(length_scale, dtype=X.dtype, device=device(X))
    return (X - centre) / scale, (Z - centre) / scale


def _squared_distance(
    xp: Any, X: Array, Z: Array, length_scale: LengthScale, factor: float
) -> Array:
    """Return factor |u - v|^2 for all pairs by one matrix product of augmented rows.

    [-2 f u, f |u|^2, 1] [v, 1, f |v|^2]^T. Rounding leaves about eps |u|^2, of either sign, where
    the distance is zero: the caller clips.
    """
    u, v = _scaled(xp, X, Z, length_scale)
    uu = factor * xp.sum(u * u, axis=1, keepdims=True)
    vv = factor * xp.sum(v * v, axis=1, keepdims=True)
    left = xp.concat([(-2.0 * factor) * u, uu, xp.ones_like(uu)], axis=1)
    right = xp.concat([v, xp.ones_like(vv), vv], axis=1)
    return xp.matmul(left, right.T)


def _differences(
    xp: Any, X: Array, Z: Array, length_scale: LengthScale, term: Callable[[Array], Array]
) -> Array:
    """Return the sum over columns j of term(u_j - v_j) for all pairs, zero at equal rows."""
    u, v = _scaled(xp, X, Z, length_scale)
    v = v.T
    total = term(u[:, :1] - v[:1, :])
    for j in range(1, X.shape[1]):
        total += term(u[:, j : j + 1] - v[j : j + 1, :])
    return total


def _square(difference: Array) -> Array:
    return difference * difference


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

    def diagonal(self, X: Array) -> Array:
        """Return k(x_i, x_i), (n,), of rows X (n, d)."""
        return self._diagonal(array_namespace(X), X)

    @abstractmethod
    def _block(self, xp: Any, X: Array, Z: Array) -> Array: ...

    @abstractmethod
    def _diagonal(self, xp: Any, X: Array) -> Array: ...

    def check(self, n_columns: int) -> None:  # noqa: B027 (most kernels fit any number)
        """Raise DataError if the kernel can't be used on `n_columns` columns."""

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

    def on(self, columns: int | Sequence[int]) -> Columns:
        """Return the kernel of these columns only."""
        return Columns(self, columns)  # type: ignore[arg-type]

    def __getitem__(self, columns: int | Sequence[int]) -> Columns:
        return self.on(columns)

    def __add__(self, other: object) -> Sum:
        return Sum(self, other) if isinstance(other, Kernel) else NotImplemented

    def __mul__(self, other: object) -> Product | Scaled:
        if isinstance(other, Kernel):
            return Product(self, other)
        return Scaled(other, self) if isinstance(other, Real) else NotImplemented  # type: ignore[arg-type]

    def __rmul__(self, other: object) -> Product | Scaled:
        return self * other

    def _operand(self, precedence: int) -> str:
        return f"({self!r})" if self._precedence < precedence else repr(self)


@dataclass(frozen=True)
class _Unit(Kernel):
    def _diagonal(self, xp: Any, X: Array) -> Array:
        return xp.ones(X.shape[0], dtype=X.dtype, device=device(X))

    @property
    def upper_bound(self) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class _Stationary(_Unit):
    # A function of the scaled differences (x - z) / l.
    length_scale: LengthScale

    def __post_init__(self) -> None:
        object.__setattr__(self, "length_scale", _length_scale(self.length_scale))

    def check(self, n_columns: int) -> None:
        """Raise DataError if there is not one length scale for each column."""
        if isinstance(self.length_scale, tuple) and len(self.length_scale) != n_columns:
            raise DataError(
                f"{type(self).__name__} has {len(self.length_scale)} length scales but the data "
                f"have {n_columns} columns: give one number, or one for each column"
            )


@dataclass(frozen=True)
class Gaussian(_Stationary):
    r"""The Gaussian kernel.

    .. math:: k(x, z) = \exp(-|x - z|^2 / (2 l^2))

    where the norm is Euclidean; with one l per column, of the columns divided by them.

    Parameters
    ----------
    length_scale
        l > 0 in the units of the columns: one number for all, or one per column (ARD).
    """

    # One matrix product, not differences. On blocks of 2,048 x 200 with one thread and memory that
    # the allocator reuses it took 0.7, 0.8, 0.9 ms for d = 1, 3, 10 (differences: 0.8, 1.8, 4.9).
    # Its error relative to k, against extended precision, stayed below 1.4 eps (1 + max |u|^2), u
    # the centred scaled rows (differences: 1.9): the exponential amplifies no error near r = 0.
    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        return xp.exp(xp.minimum(_squared_distance(xp, X, Z, self.length_scale, -0.5), 0.0))


@dataclass(frozen=True)
class Laplace(_Stationary):
    r"""The Laplace kernel.

    .. math:: k(x, z) = \exp\Bigl(-\sum_j |x_j - z_j| / l_j\Bigr)

    It is a product over columns. Matern 1/2 has the Euclidean distance instead of the sum of
    absolute differences and doesn't change under rotations; in one column the two are equal.

    Parameters
    ----------
    length_scale
        l > 0 in the units of the columns: one number for all, or one per column (ARD).
    """

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        return xp.exp(-_differences(xp, X, Z, self.length_scale, xp.abs))


@dataclass(frozen=True)
class Matern(_Stationary):
    r"""The Matern kernels of half-integer order.

    .. math::
        k(x, z) = e^{-r},\quad (1 + s) e^{-s},\quad (1 + s + s^2 / 3) e^{-s}

    for nu = 1/2, 3/2, 5/2, where :math:`r = |(x - z) / l|_2` and :math:`s = \sqrt{2 \nu} r`.

    Parameters
    ----------
    length_scale
        l > 0 in the units of the columns: one number for all, or one per column (ARD).
    nu
        Smoothness: 0.5, 1.5 or 2.5.
    """

    nu: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is(self.nu, Real) or self.nu not in (0.5, 1.5, 2.5):
            raise DataError(f"nu must be 0.5, 1.5 or 2.5, got {self.nu!r}")
        object.__setattr__(self, "nu", float(self.nu))

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        # By differences: the root would turn an error of 1e-16 at r = 0 into one of 1e-8.
        s = _differences(xp, X, Z, self.length_scale, _square)
        s *= 2.0 * self.nu
        s = xp.sqrt(s)
        decay = xp.exp(-s)
        if self.nu == 0.5:
            return decay
        return (1.0 + s) * decay if self.nu == 1.5 else (1.0 + s + s * s / 3.0) * decay


@dataclass(frozen=True)
class RationalQuadratic(_Stationary):
    r"""The rational quadratic kernel, a mixture of Gaussians of all length scales.

    .. math:: k(x, z) = (1 + r^2 / (2 \alpha))^{-\alpha}

    where :math:`r = |(x - z) / l|_2`; it tends to the Gaussian kernel as alpha grows.

    Parameters
    ----------
    length_scale
        l > 0 in the units of the columns: one number for all, or one per column (ARD).
    alpha
        alpha > 0, no unit: the smaller, the heavier the tail.
    """

    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "alpha", _number("alpha", self.alpha))

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        # log1p keeps the digits that 1 + r^2 / (2 alpha) loses when alpha is large.
        factor = 0.5 / self.alpha
        logarithm = xp.log1p(
            xp.maximum(_squared_distance(xp, X, Z, self.length_scale, factor), 0.0)
        )
        logarithm *= -self.alpha
        return xp.exp(logarithm)


@dataclass(frozen=True)
class Delta(_Unit):
    """The kernel of equality, for classes and other discrete values.

    k(x, z) = 1 where all columns are exactly equal, else 0.
    """

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        zt = Z.T
        equal = X[:, :1] == zt[:1, :]
        for j in range(1, X.shape[1]):
            equal &= X[:, j : j + 1] == zt[j : j + 1, :]
        return xp.astype(equal, X.dtype)


@dataclass(frozen=True)
class Linear(Kernel):
    """The linear kernel k(x, z) = x . z + offset; it has no bound.

    Parameters
    ----------
    offset
        At least 0, in the squared units of the columns.
    """

    offset: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", _number("offset", self.offset, zero=True))

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        return xp.matmul(X, Z.T) + self.offset

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return xp.sum(X * X, axis=1) + self.offset


@dataclass(frozen=True)
class Polynomial(Kernel):
    """The polynomial kernel k(x, z) = (scale x . z + offset)^degree; it has no bound.

    Parameters
    ----------
    degree
        An integer, at least 1.
    offset
        At least 0, no unit.
    scale
        Positive, in the inverse squared units of the columns.
    """

    degree: int
    offset: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "degree", _integer("degree", self.degree, 1))
        object.__setattr__(self, "offset", _number("offset", self.offset, zero=True))
        object.__setattr__(self, "scale", _number("scale", self.scale))

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        product = xp.matmul(X, Z.T)
        product *= self.scale
        product += self.offset
        return product**self.degree

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return (self.scale * xp.sum(X * X, axis=1) + self.offset) ** self.degree


@dataclass(frozen=True)
class Custom(Kernel):
    """A user's own kernel, for data in memory; saved by its name only.

    Parameters
    ----------
    name
        What a saved model calls it; ``load(path, kernels={name: kernel})`` supplies it again.
    block
        ``block(X, Z)`` returns k(x_i, z_j), (n, m). It must be positive semidefinite, which is
        not checked; shapes and finite values are, at each call (DataError).
    diagonal_of
        ``diagonal_of(X)`` returns k(x_i, x_i), (n,).
    """

    name: str
    block: Callable[[Array, Array], Array] = field(repr=False)
    diagonal_of: Callable[[Array], Array] = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise DataError(f"name must be a non-empty string, got {self.name!r}")
        for role in ("block", "diagonal_of"):
            if not callable(getattr(self, role)):
                raise DataError(f"{role} must be callable, got {getattr(self, role)!r}")

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        return self._checked("block", self.block(X, Z), (X.shape[0], Z.shape[0]))

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return self._checked("diagonal_of", self.diagonal_of(X), (X.shape[0],))

    def to_dict(self) -> dict[str, Any]:
        """Return the kernel's name: functions are not saved."""
        return {"kernel": "Custom", "name": self.name}

    def _checked(self, role: str, values: Array, shape: tuple[int, ...]) -> Array:
        received = getattr(values, "shape", None)
        if received is None or tuple(received) != shape:
            raise DataError(
                f"{role} of the kernel {self.name!r} must return an array of shape {shape}, "
                f"got {type(values).__name__ if received is None else tuple(received)}"
            )
        xp = array_namespace(values)
        if not bool(xp.all(xp.isfinite(values))):
            raise DataError(
                f"{role} of the kernel {self.name!r} returned values that aren't finite"
            )
        return values


@dataclass(frozen=True, repr=False)
class _Pair(Kernel):
    left: Kernel
    right: Kernel

    _sign: ClassVar[str]

    @abstractmethod
    def _combine(self, left: Any, right: Any) -> Any: ...

    def __post_init__(self) -> None:
        _kernel("left", self.left)
        _kernel("right", self.right)

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        return self._combine(self.left(X, Z), self.right(X, Z))

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return self._combine(self.left.diagonal(X), self.right.diagonal(X))

    def check(self, n_columns: int) -> None:
        """Raise DataError if either kernel does."""
        self.left.check(n_columns)
        self.right.check(n_columns)

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

    def _combine(self, left: Any, right: Any) -> Any:
        return left + right


@dataclass(frozen=True, repr=False)
class Product(_Pair):
    """The product of two kernels, k(x, z) = left(x, z) right(x, z)."""

    _precedence: ClassVar[int] = 1
    _sign: ClassVar[str] = "*"

    def _combine(self, left: Any, right: Any) -> Any:
        return left * right


@dataclass(frozen=True, repr=False)
class Scaled(Kernel):
    """A positive multiple of a kernel, scale * base(x, z)."""

    scale: float
    base: Kernel

    _precedence: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", _number("scale", self.scale))
        _kernel("base", self.base)

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        return self.scale * self.base(X, Z)

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return self.scale * self.base.diagonal(X)

    def check(self, n_columns: int) -> None:
        """Raise DataError if the kernel does."""
        self.base.check(n_columns)

    @property
    def upper_bound(self) -> float | None:
        """The scaled bound, if it exists."""
        bound = self.base.upper_bound
        return None if bound is None else self.scale * bound

    def __repr__(self) -> str:
        return f"{self.scale!r} * {self.base._operand(2)}"


@dataclass(frozen=True, repr=False)
class Columns(Kernel):
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
        _kernel("base", self.base)
        given: Any = self.columns
        items = given if isinstance(given, (list, tuple)) else (given,)
        columns = tuple(_integer("a column index", item, 0) for item in items)
        if not columns or len(set(columns)) < len(columns):
            raise DataError(f"columns must be at least one and distinct, got {given!r}")
        object.__setattr__(self, "columns", columns)

    def _take(self, xp: Any, X: Array) -> Array:
        return xp.take(X, xp.asarray(self.columns, device=device(X)), axis=1)

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        return self.base(self._take(xp, X), self._take(xp, Z))

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

    @property
    def upper_bound(self) -> float | None:
        """The kernel's bound."""
        return self.base.upper_bound

    def __repr__(self) -> str:
        return f"{self.base._operand(2)}[{', '.join(map(str, self.columns))}]"


KERNELS: dict[str, type[Kernel]] = {
    cls.__name__: cls
    for cls in (
        *(Gaussian, Laplace, Matern, RationalQuadratic, Delta, Linear, Polynomial),
        *(Custom, Sum, Product, Scaled, Columns),
    )
}


def _plain(value: Any) -> Any:
    if isinstance(value, Kernel):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def from_dict(d: Mapping[str, Any], custom: Mapping[str, Kernel] | None = None) -> Kernel:
    """Return the kernel that :meth:`Kernel.to_dict` described.

    Parameters
    ----------
    d
        The description: plain JSON values, which may come from an untrusted file.
    custom
        The user's own kernels by name.

    Raises
    ------
    DataError
        If a name, key, type or value is not one that ``to_dict`` writes, or a kernel of the
        user's own is missing from `custom`.
    """
    return _build(d, custom or {}, 0)


def _build(d: object, custom: Mapping[str, Kernel], depth: int) -> Kernel:
    if depth > MAX_DEPTH:
        raise DataError(f"a kernel may be nested {MAX_DEPTH} deep at most")
    if not isinstance(d, Mapping):
        raise DataError(f"a kernel must be described by a dict, got {type(d).__name__}")
    name, given = d.get("kernel"), {key: value for key, value in d.items() if key != "kernel"}
    cls = KERNELS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise DataError(f"unknown kernel {name!r}: expected one of {', '.join(KERNELS)}")
    expected = {"name"} if cls is Custom else {f.name for f in fields(cls)}
    if set(given) != expected:
        raise DataError(
            f"{name} takes exactly the keys {sorted(expected)}, got {sorted(map(str, given))}"
        )
    if cls is Custom:
        return _supplied(given["name"], custom)
    return cls(
        **{
            key: _build(value, custom, depth + 1) if isinstance(value, Mapping) else value
            for key, value in given.items()
        }
    )


def _supplied(name: object, custom: Mapping[str, Kernel]) -> Kernel:
    kernel = custom.get(name) if isinstance(name, str) else None
    if kernel is None:
        raise DataError(
            f"the kernel {name!r} is a user's own and was not supplied: "
            f"pass kernels={{{name!r}: kernel}}"
        )
    _kernel(f"kernels[{name!r}]", kernel)
    return kernel
