"""Kernels of categories, of equality and of inner products, and users' own."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from array_api_compat import array_namespace, device

from cme_dask.errors import DataError
from cme_dask.kernels.base import Array, Kernel, Unit, check_integer, check_number, real_floating
from cme_dask.kernels.evaluator import BlockEvaluator, take_into
from cme_dask.kernels.stationary import LengthScaled

# The kernel of categorical columns


_MOST = 1e30  # of 1 / l^2: exp(-1e30) is zero already, and sums over columns stay finite


class _LevelEvaluator(BlockEvaluator):
    """A function k(., z_j) depends on the level of z_j only.

    So a row of values per level is made and copied to all functions of that level: on blocks of
    2,048 x 200 with 4 columns of 12 levels this took 0.7 ms, comparing all pairs 1.9 ms, one
    product of one-hot codes 1.3 ms.
    """

    def __init__(self, kernel: "Categorical", Z: Array, *, log: bool) -> None:
        super().__init__(kernel, Z, log=log)
        d, each = Z.shape[1], kernel.length_scale
        scales = each if isinstance(each, tuple) else (each,) * d
        far = [-min((1.0 / scale) * (1.0 / scale), _MOST) for scale in scales]
        self._levels = [self.xp.unique_inverse(Z[:, j]) for j in range(d)]
        self._equal, self._different = (0.0, far) if log else (1.0, [math.exp(f) for f in far])
        self._combine = self.ops.add if log else self.ops.multiply

    def _fill(self, here: slice, out: Array) -> None:
        xp, X, place = self.xp, self._rows[here, :], device(out)
        same = xp.asarray(self._equal, dtype=out.dtype, device=place)
        for j, (values, which) in enumerate(self._levels):
            other = xp.asarray(self._different[j], dtype=out.dtype, device=place)
            rows = xp.where(values[:, None] == X[None, :, j], same, other)
            if j == 0:
                take_into(xp, out, rows, which)
            else:
                part = self.scratch.like(xp, out)
                take_into(xp, part, rows, which)
                self._combine(out, part, out=out)


@dataclass(frozen=True)
class Categorical(LengthScaled):
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
        """False: values are compared for equality alone."""
        return False

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return exp of minus the sum over the columns that differ."""
        d, each = X.shape[1], self.length_scale
        total: Any = 0.0
        for j, scale in enumerate(each if isinstance(each, tuple) else (each,) * d):
            differs = xp.astype(X[:, j : j + 1] != Z[:, j : j + 1].T, X.dtype)
            total = total + differs / scale / scale
        return xp.exp(-total)

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        """Return the gradient in the length scales: dk / dl_j = 2 k [x_j != z_j] / l_j^3."""
        xp, d, each = array_namespace(X, Z), X.shape[1], self.length_scale
        weighted, result = weights * self(X, Z), []
        for j, scale in enumerate(each if isinstance(each, tuple) else (each,) * d):
            differs = xp.astype(X[:, j : j + 1] != Z[:, j : j + 1].T, X.dtype)
            result.append(2.0 * float(xp.sum(weighted * differs)) / scale / scale / scale)
        return self._in_scales(result)

    def evaluator(self, Z: Array, *, log: bool = False) -> BlockEvaluator:
        """Return the functions, from a row of values per level."""
        return _LevelEvaluator(self, Z, log=log)


# Kernels of equality and of inner products, and users' own


@dataclass(frozen=True)
class Delta(Unit):
    """The kernel of equality, for classes and other discrete values.

    k(x, z) = 1 where all columns are exactly equal, else 0.
    """

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return 1.0 where all columns are equal, else 0.0."""
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

    signed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", check_number("offset", self.offset, zero=True))

    def measures(self, column: int) -> bool:
        """True."""
        return True

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return x . z + offset."""
        return (Z @ X.T + self.offset).T

    def diagonal_formula(self, xp: Any, X: Array) -> Array:
        """Return x . x + offset."""
        return xp.sum(X * X, axis=1) + self.offset

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        """Return the gradient in the offset."""
        return [float(array_namespace(X, Z).sum(weights))]


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

    signed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "degree", check_integer("degree", self.degree, 1))
        object.__setattr__(self, "offset", check_number("offset", self.offset, zero=True))
        object.__setattr__(self, "scale", check_number("scale", self.scale))

    def measures(self, column: int) -> bool:
        """True."""
        return True

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return the power of the inner product."""
        base = self.scale * (Z @ X.T) + self.offset
        block = base
        for _ in range(self.degree - 1):  # a general power takes ten times as long
            block = block * base
        return block.T

    def diagonal_formula(self, xp: Any, X: Array) -> Array:
        """Return the power of x . x."""
        return (self.scale * xp.sum(X * X, axis=1) + self.offset) ** self.degree

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        """Return the gradients in the offset and in the scale."""
        xp, products = array_namespace(X, Z), real_floating(X) @ real_floating(Z).T
        inner = (self.scale * products + self.offset) ** (self.degree - 1)
        weighted = self.degree * weights * inner
        return [float(xp.sum(weighted)), float(xp.sum(weighted * products))]


@dataclass(frozen=True)
class Features(Kernel, abstract=True):
    """The kernel k(x, z) = phi(x) . phi(z) of functions phi of your own, for you to derive from.

    A fit with it works in the span of the functions. Where the functions themselves are the basis,
    use :class:`cme_dask.reductions.FeatureBasis`.
    """

    signed: ClassVar[bool] = True

    @abstractmethod
    def features(self, xp: Any, X: Array) -> Array:
        """Return phi(x_i), (n, m), as plain arithmetic of an array namespace."""

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return the inner products of the features."""
        values = self.features(xp, X)
        return values @ (values if X is Z else self.features(xp, Z)).T

    def feature_gradient(self, X: Array, weights: Array) -> list[float]:
        r"""Return the gradient of :math:`\sum_{ij} w_{ij} \varphi_j(x_i)` in the parameters.

        By differences of the features, with about eleven digits.

        Parameters
        ----------
        X
            Rows, shape (n, d).
        weights
            The weights w, of any sign, shape (n, m).

        Returns
        -------
        gradient : as many numbers as :attr:`parameters`
        """
        xp = array_namespace(X)
        return self._differences(lambda kernel: xp.sum(weights * kernel.features(xp, X)))

    def diagonal_formula(self, xp: Any, X: Array) -> Array:
        """Return ``|phi(x)|^2``."""
        values = self.features(xp, X)
        return xp.sum(values * values, axis=1)


@dataclass(frozen=True)
class Custom(Kernel):
    """A user's own kernel, for data in memory; saved by its name only.

    Parameters
    ----------
    name
        Its name in saved models; ``load(path, kernels={name: kernel})`` supplies it again.
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

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return the checked block."""
        return self._checked("block", self.block(X, Z), (X.shape[0], Z.shape[0]))

    def diagonal_formula(self, xp: Any, X: Array) -> Array:
        """Return the checked diagonal."""
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
