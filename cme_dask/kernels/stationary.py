"""Kernels of the scaled differences (x - z) / l, and how these are formed."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from array_api_compat import device

from cme_dask.errors import DataError
from cme_dask.kernels.base import Array, Unit, check_number, is_a

LengthScale = float | tuple[float, ...]


def _length_scale(value: Any) -> LengthScale:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)) and value:
        return tuple(check_number("length_scale", item) for item in value)
    return check_number("length_scale", value)


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
class _Stationary(Unit):
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
        if not is_a(self.nu, Real) or self.nu not in (0.5, 1.5, 2.5):
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
        object.__setattr__(self, "alpha", check_number("alpha", self.alpha))

    def _block(self, xp: Any, X: Array, Z: Array) -> Array:
        # log1p keeps the digits that 1 + r^2 / (2 alpha) loses when alpha is large.
        factor = 0.5 / self.alpha
        logarithm = xp.log1p(
            xp.maximum(_squared_distance(xp, X, Z, self.length_scale, factor), 0.0)
        )
        logarithm *= -self.alpha
        return xp.exp(logarithm)
