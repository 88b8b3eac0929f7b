"""Kernels of categories, of equality and of inner products, and users' own."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from array_api_compat import array_namespace, device

from cme_dask.errors import DataError
from cme_dask.kernels.base import (
    Array,
    Kernel,
    Sectioned,
    Unit,
    check_integer,
    check_number,
    negative_values,
)
from cme_dask.kernels.evaluator import Scratch, Sections, into, take_into
from cme_dask.kernels.stationary import Stationary

# The kernel of categorical columns


_MOST = 1e30  # of 1 / l^2: exp(-1e30) is zero already, and sums over columns stay finite


@dataclass(frozen=True)
class Categorical(Stationary):
    r"""The kernel of categorical columns: a Gaussian of their one-hot codes.

    .. math:: k(x, z) = \exp\Bigl(-\sum_j [x_j \ne z_j] / l_j^2\Bigr)

    One-hot codes of two different levels are at squared distance 2. As l goes to 0 the kernel
    tends to :class:`Delta`; as l grows it ignores the column.

    Parameters
    ----------
    length_scale
        l > 0, no unit: one number for all columns, or one per column.

    Notes
    -----
    Levels are any numbers; they count as equal if they are exactly so.
    """

    def measures(self, column: int) -> bool:
        """False: it asks whether values are equal."""
        return False

    # A function k(., z_j) depends on the level of z_j only. So a row of values per level is made
    # and copied to all functions of that level: on blocks of 2,048 x 200 with 4 columns of 12
    # levels this took 0.7 ms, comparing all pairs 1.9 ms, one product of one-hot codes 1.3 ms.
    def _sections(self, xp: Any, Z: Array) -> Sections:
        return self._by_level(xp, Z, 1.0, [math.exp(f) for f in self._far(Z)], "multiply")

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        return self._by_level(xp, Z, 0.0, self._far(Z), "add")

    def _far(self, Z: Array) -> list[float]:
        """Log k of two different levels, for each column."""
        each, d = self.length_scale, Z.shape[1]
        scales = each if isinstance(each, tuple) else (each,) * d
        return [-min((1.0 / scale) * (1.0 / scale), _MOST) for scale in scales]

    def _by_level(
        self, xp: Any, Z: Array, equal: float, far: list[float], combine: str
    ) -> Sections:
        levels = [xp.unique_inverse(Z[:, j]) for j in range(Z.shape[1])]
        scratch = Scratch()

        def write(X: Array, out: Array) -> None:
            place = device(out)
            same = xp.asarray(equal, dtype=out.dtype, device=place)
            for j, (values, which) in enumerate(levels):
                other = xp.asarray(far[j], dtype=out.dtype, device=place)
                rows = xp.where(values[:, None] == X[None, :, j], same, other)
                if j == 0:
                    take_into(xp, out, rows, which)
                else:
                    part = scratch.like(xp, out)
                    take_into(xp, part, rows, which)
                    into(xp, out, combine, out, part)

        return Sections.of_blocks(write)


# Kernels of equality and of inner products, and users' own


@dataclass(frozen=True)
class Delta(Unit):
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
class Linear(Sectioned):
    """The linear kernel k(x, z) = x . z + offset; it has no bound.

    Parameters
    ----------
    offset
        At least 0, in the squared units of the columns.
    """

    offset: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", check_number("offset", self.offset, zero=True))

    def measures(self, column: int) -> bool:
        """True."""
        return True

    def _sections(self, xp: Any, Z: Array) -> Sections:
        def write(X: Array, out: Array) -> None:
            into(xp, out, "matmul", Z, X.T)
            into(xp, out, "add", out, self.offset)

        return Sections.of_blocks(write)

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return xp.sum(X * X, axis=1) + self.offset

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        raise negative_values(self)


@dataclass(frozen=True)
class Polynomial(Sectioned):
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
        object.__setattr__(self, "degree", check_integer("degree", self.degree, 1))
        object.__setattr__(self, "offset", check_number("offset", self.offset, zero=True))
        object.__setattr__(self, "scale", check_number("scale", self.scale))

    def measures(self, column: int) -> bool:
        """True."""
        return True

    def _sections(self, xp: Any, Z: Array) -> Sections:
        scratch = Scratch()

        def write(X: Array, out: Array) -> None:
            base = scratch.like(xp, out)
            into(xp, base, "matmul", Z, X.T)
            into(xp, base, "multiply", base, self.scale)
            into(xp, base, "add", base, self.offset)
            out[...] = base
            for _ in range(self.degree - 1):  # a general power takes ten times as long
                into(xp, out, "multiply", out, base)

        return Sections.of_blocks(write)

    def _diagonal(self, xp: Any, X: Array) -> Array:
        return (self.scale * xp.sum(X * X, axis=1) + self.offset) ** self.degree

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        raise negative_values(self)


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
