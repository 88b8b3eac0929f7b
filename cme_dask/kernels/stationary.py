"""Kernels with a length scale l: those of the differences (x - z) / l, and how these are formed."""

import math
from abc import abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from array_api_compat import array_namespace, device

from cme_dask.errors import DataError
from cme_dask.kernels.base import Array, Evaluated, Unit, check_number, is_a, real_floating
from cme_dask.kernels.evaluator import (
    BlockEvaluator,
    Scratch,
    exponentials,
    exponentiate,
    in_cache,
    put_columns,
    take_logarithms,
    to_numpy,
)
from cme_dask.kernels.length_scales import ColumnScale

LengthScale = float | tuple[float, ...]

_MEDIAN_ROWS = 100  # about so many have the median that all others are centred by
_EQUAL = 1e-10  # r^2 of rows that are taken for equal
_LEAST_ROOT = 1e-12  # of s, by which a slope is divided
_LOST = 1e7  # |u|^2 from which a gradient by products has lost half of its digits
_FAR = 2048.0  # |u|^2 from which rounding, 1.4 eps |u|^2, is more than 7e-13 of a kernel of 1


def _length_scale(value: Any) -> LengthScale:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)) and value:
        return tuple(check_number("length_scale", item) for item in value)
    return check_number("length_scale", value)


def _scaled_differences(X: Array, Z: Array, length_scale: LengthScale) -> list[Array]:
    """(x_j - z_j) / l_j for each column j, shapes (n, m)."""
    d = X.shape[1]
    scales = length_scale if isinstance(length_scale, tuple) else (length_scale,) * d
    return [(X[:, j : j + 1] - Z[:, j : j + 1].T) / scales[j] for j in range(d)]


def _reach(xp: Any, u: Array) -> float:
    """Length scales beyond which kernels are zero, and whose squares are finite: 1e123, or 1e15."""
    largest: float = float(xp.finfo(u.dtype).max)
    return math.pow(largest, 0.4)


class DistanceEvaluator(BlockEvaluator):
    """Functions of the scaled rows u = (x - c) / l, with c the column medians of some of Z.

    Distances don't change with c, but their rounding does: an offset that is large against the
    spread would cancel only after it had been squared. A median stays where most rows are, however
    far away single ones lie. Equal rows give bitwise equal u.

    Smooth functions of f |v - u|^2 take it from one matrix product of augmented rows, [v, 1,
    f |v|^2] [-2 f u, f |u|^2, 1]^T. Rounding leaves about eps |u|^2, of either sign, where it is
    zero: the kernel clips. Rows whose |u|^2 is too large for that take differences of the rows as
    they came, which are exact where x is near z. Others take sums of terms, a column at a time.
    """

    def __init__(self, kernel: "Stationary | Laplace", Z: Array, *, log: bool) -> None:
        super().__init__(kernel, Z, log=log)
        xp, scale, (m, d) = self.xp, kernel.length_scale, Z.shape
        self._scales: Any = scale if isinstance(scale, tuple) else (scale,) * d
        self._scale: Any = scale
        if isinstance(scale, tuple):
            self._scale = xp.asarray(scale, dtype=Z.dtype, device=device(Z))
        few = Z[:: max(m // _MEDIAN_ROWS, 1), :]
        self.centre: Any = xp.sort(few, axis=0)[few.shape[0] // 2, :] if m else 0.0
        self._factor, self._smooth = kernel.factor, kernel.smooth
        with np.errstate(over="ignore"):
            v = (Z - self.centre) / self._scale
            squares = xp.sum(v * v, axis=1, keepdims=True)
        if m and not math.isfinite(float(xp.max(squares))):  # that they are far is all that counts
            reach = _reach(xp, v)
            v = xp.clip(v, -reach, reach)
            squares = xp.sum(v * v, axis=1, keepdims=True)
        self._v = v
        if self._smooth:
            self._v = xp.concat([v, xp.ones_like(squares), self._factor * squares], axis=1)

    def load(self, X: Array) -> None:
        """Take the rows X, shape (n, d), until the next call."""
        xp, (n, d) = self.xp, X.shape
        with np.errstate(over="ignore"):
            u = ((X - self.centre) / self._scale).T
            squares = xp.sum(u * u, axis=0)
        self._X, self._far = X, []
        if n and float(xp.max(squares)) > _FAR:
            far = squares > _FAR
            self._far = to_numpy(xp.nonzero(far)[0]).tolist()
            u, squares = xp.where(far, 0.0, u), xp.where(far, 0.0, squares)
        self._u = u
        if self._smooth:
            self._u = xp.empty((d + 2, n), dtype=u.dtype, device=device(u))
            self._u[:d, :] = u
            u = self._u[:d, :]
            self._u[d, :] = self._factor * squares
            self._u[d + 1, :] = 1.0
            self.ops.multiply(u, -2.0 * self._factor, out=u)

    def _fill(self, here: slice, out: Array) -> None:
        ops, u, v = self.ops, self._u[:, here], self._v
        far, places = self._far, []
        if far:
            far = far[bisect_left(far, here.start) : bisect_left(far, here.stop)]
            places = [i - here.start for i in far]
        if self._smooth:
            ops.matmul(v, u, out=out)
        else:
            for few in in_cache(out):
                self._add_terms(v[few, :], u, out[few, :])
        if places:
            put_columns(out, places, self._sums(far))
        self.kernel.finish(ops, out, self.scratch, self.log)

    def _add_terms(self, v: Array, u: Array, out: Array) -> None:
        """Sums of the terms of the differences of these points and rows, a column at a time."""
        ops = self.ops
        ops.subtract(v[:, :1], u[:1, :], out=out)
        self.kernel.term(ops, out)
        for j in range(1, v.shape[1]):
            part = self.scratch.like(self.xp, out)
            ops.subtract(v[:, j : j + 1], u[j : j + 1, :], out=part)
            self.kernel.term(ops, part)
            ops.add(out, part, out=out)

    def _sums(self, far: list[int]) -> Array:
        """Factor times the sums of the terms of (z - x) / l for these rows, shape (m, len(far))."""
        xp, ops, Z = self.xp, self.ops, self.points
        rows = xp.take(self._X, xp.asarray(far, device=device(self._X)), axis=0).T
        shape = Z.shape[0], len(far)
        total, part = (xp.empty(shape, dtype=Z.dtype, device=device(Z)) for _ in range(2))
        for j, scale in enumerate(self._scales):
            term = part if j else total
            with np.errstate(over="ignore"):
                ops.subtract(Z[:, j : j + 1], rows[j : j + 1, :], out=term)
                ops.divide(term, scale, out=term)
                self.kernel.term(ops, term)
                if j:
                    ops.add(total, part, out=total)
        ops.minimum(total, _reach(xp, total) ** 2, out=total)
        ops.multiply(total, self._factor, out=total)
        return total


@dataclass(frozen=True)
class LengthScaled(Unit, Evaluated, abstract=True):
    """A kernel with a length scale, 1 at equal rows.

    Parameters
    ----------
    length_scale
        l > 0 in the units of the columns: one number for all, or one per column (ARD).
    """

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

    def measures(self, column: int) -> bool:
        """True."""
        return True

    def column_scales(self, n_columns: int) -> tuple[ColumnScale | None, ...]:
        """Return the length scale along each column."""
        each = self.length_scale
        scales = each if isinstance(each, tuple) else (each,) * n_columns
        return tuple(
            ColumnScale(float(scale), categorical=not self.measures(j))
            for j, scale in enumerate(scales)
        )

    def _in_scales(self, each: list[float]) -> list[float]:
        """Derivatives in the length scales of all columns; their sum where these are one number."""
        return each if isinstance(self.length_scale, tuple) else [sum(each)]


@runtime_checkable
class HasSlope(Protocol):
    """A function of r^2 with a derivative of its own: its gradients are not differences."""

    def slope(self, xp: Any, squares: Array) -> Array:
        """Return dk / d(r^2), an array of the shape of ``squares``; any finite number at 0."""


@dataclass(frozen=True)
class Stationary(LengthScaled, abstract=True):
    """A kernel that is a function of ``r^2 = |(x - z) / l|^2``, which subclasses define.

    Where they have a ``slope`` as well, their gradients are closed forms (``HasSlope``).

    Parameters
    ----------
    length_scale
        l > 0 in the units of the columns: one number for all, or one per column (ARD).
    """

    smooth: ClassVar[bool] = True
    """Whether k is smooth in r^2 at 0: else a rounding error of r^2 there would show."""

    factor = 1.0
    """What r^2 is multiplied with before :meth:`finish`."""

    @abstractmethod
    def of_squares(self, xp: Any, squares: Array) -> Array:
        """Return k as a function of r^2, an array of any shape."""

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return k of the sum of squared differences."""
        with np.errstate(over="ignore"):
            squares = sum(u * u for u in _scaled_differences(X, Z, self.length_scale))
        return self.of_squares(xp, squares)

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        """Return the gradient in the length scales, by matrix products.

        Where k is not smooth at 0, equal rows and those that are nearly so count as equal: their
        derivatives vanish, and rounding would not.
        """
        if not isinstance(self, HasSlope):
            return super().weighted_gradient(X, Z, weights)
        xp, each = array_namespace(X, Z), self.length_scale
        X, Z = real_floating(X), real_floating(Z)
        d = X.shape[1]
        scales = xp.asarray(each if isinstance(each, tuple) else (each,) * d, dtype=X.dtype)
        centre = DistanceEvaluator(self, Z, log=False).centre
        u, v = (X - centre) / scales, (Z - centre) / scales
        squares_u, squares_v = u * u, v * v
        lengths = xp.sum(squares_u, axis=1)
        # |u|^2 + |v|^2 - 2 u^T v as one product.
        left = xp.concat([u, lengths[:, None], xp.ones_like(lengths)[:, None]], axis=1)
        ends = xp.sum(squares_v, axis=1)[:, None]
        right = xp.concat([-2.0 * v, xp.ones_like(ends), ends], axis=1).T
        (far,) = xp.nonzero(lengths > _LOST)
        totals, of_points = xp.zeros_like(centre), xp.zeros_like(ends[:, 0])
        for few in in_cache(weights):
            slopes = self._slopes(xp, left[few, :] @ right, weights[few, :])
            if far.shape[0]:
                slopes = xp.where(lengths[few, None] > _LOST, 0.0, slopes)
            of_points = of_points + xp.sum(slopes, axis=0)
            totals = totals + xp.sum(slopes, axis=1) @ squares_u[few, :]
            totals = totals - 2.0 * xp.sum(u[few, :] * (slopes @ v), axis=0)
        totals = totals + of_points @ squares_v
        if far.shape[0]:  # by differences, which do not cancel
            rows = xp.take(X, far, axis=0)

            def term(j: int) -> Array:
                return ((rows[:, j : j + 1] - Z[:, j : j + 1].T) / scales[j]) ** 2

            squares = sum(map(term, range(d)))
            slopes = self._slopes(xp, squares, xp.take(weights, far, axis=0))
            totals = totals + xp.stack([xp.sum(slopes * term(j)) for j in range(d)])
        return self._in_scales([float(one) for one in -2.0 * totals / scales])

    def _slopes(self, xp: Any, squares: Array, weights: Array) -> Array:
        """Weighted derivatives in r^2; none of rows that count as equal."""
        assert isinstance(self, HasSlope)
        slopes = weights * self.slope(xp, xp.clip(squares, 0.0))
        return slopes if self.smooth else xp.where(squares > _EQUAL, slopes, 0.0)

    def evaluator(self, Z: Array, *, log: bool = False) -> BlockEvaluator:
        """Return the functions by matrix products, or by differences where k is not smooth."""
        return DistanceEvaluator(self, Z, log=log)

    def term(self, ops: Any, values: Array) -> None:
        """Square scaled differences in place: the terms that are added over the columns."""
        ops.multiply(values, values, out=values)

    def finish(self, ops: Any, out: Array, scratch: Scratch, log: bool) -> None:
        """Turn ``factor`` r^2 into k or log k, in place; r^2 may be rounded to less than zero."""
        xp = array_namespace(out)
        ops.maximum(out, 0.0, out=out)
        for few in in_cache(out):
            out[few, :] = self.of_squares(xp, out[few, :])
        if log:
            take_logarithms(self, xp, out)


@dataclass(frozen=True)
class Gaussian(Stationary):
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
    factor = -0.5

    def of_squares(self, xp: Any, squares: Array) -> Array:
        """Return exp(-r^2 / 2)."""
        return exponentials(xp, -0.5 * squares)

    def slope(self, xp: Any, squares: Array) -> Array:
        """Return -k / 2."""
        return -0.5 * self.of_squares(xp, squares)

    # Longer |u|^2 would need no clip at 0, but leave copies of pivots more than rounding.
    finish = exponentiate

    def gradient(self, X: Array, Z: Array) -> Array:
        r"""Return the derivatives of the block with respect to the length scales.

        .. math:: \partial k / \partial l_j = k \, (x_j - z_j)^2 / l_j^3

        and their sum over the columns for one length scale.

        Parameters
        ----------
        X, Z
            Rows, shapes (n, d) and (m, d).

        Returns
        -------
        gradient : (p, n, m)
            In the order of :attr:`parameters`.
        """
        xp, scale = array_namespace(X, Z), self.length_scale
        X, Z = real_floating(X), real_floating(Z)
        block = self(X, Z)
        squares = [u * u for u in _scaled_differences(X, Z, scale)]
        if isinstance(scale, tuple):
            return xp.stack([block * s / one for s, one in zip(squares, scale, strict=True)])
        return (block * sum(squares) / scale)[None, ...]


@dataclass(frozen=True)
class Laplace(LengthScaled):
    r"""The Laplace kernel.

    .. math:: k(x, z) = \exp\Bigl(-\sum_j |x_j - z_j| / l_j\Bigr)

    It is a product over columns. Matern 1/2 has the Euclidean distance instead of the sum of
    absolute differences and doesn't change under rotations; in one column the two are equal.

    Parameters
    ----------
    length_scale
        l > 0 in the units of the columns: one number for all, or one per column (ARD).
    """

    smooth: ClassVar[bool] = False
    factor: ClassVar[float] = 1.0

    def formula(self, xp: Any, X: Array, Z: Array) -> Array:
        """Return exp of minus the sum of absolute differences."""
        with np.errstate(over="ignore"):
            distance = sum(xp.abs(u) for u in _scaled_differences(X, Z, self.length_scale))
        return exponentials(xp, -distance)

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        """Return the gradient in the length scales: ``dk / dl_j = k |x_j - z_j| / l_j^2``."""
        xp, each = array_namespace(X, Z), self.length_scale
        X, Z = real_floating(X), real_floating(Z)
        scales = each if isinstance(each, tuple) else (each,) * X.shape[1]
        weighted = weights * self(X, Z)
        terms = zip(_scaled_differences(X, Z, each), scales, strict=True)
        return self._in_scales([float(xp.sum(weighted * xp.abs(u))) / scale for u, scale in terms])

    def evaluator(self, Z: Array, *, log: bool = False) -> BlockEvaluator:
        """Return the functions by differences."""
        return DistanceEvaluator(self, Z, log=log)

    def term(self, ops: Any, values: Array) -> None:
        """Take absolute values, in place."""
        ops.abs(values, out=values)

    def finish(self, ops: Any, out: Array, scratch: Scratch, log: bool) -> None:
        """Exponentiate, in place."""
        ops.negative(out, out=out)
        exponentiate(self, ops, out, scratch, log)


@dataclass(frozen=True)
class Matern(Stationary):
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

    fixed: ClassVar[tuple[str, ...]] = ("nu",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_a(self.nu, Real) or self.nu not in (0.5, 1.5, 2.5):
            raise DataError(f"nu must be 0.5, 1.5 or 2.5, got {self.nu!r}")
        object.__setattr__(self, "nu", float(self.nu))

    @property
    def smooth(self) -> bool:  # type: ignore[override]
        """Whether nu > 1/2: of exp(-r) the root would turn an error of 1e-16 at 0 into 1e-8."""
        return self.nu > 1.0

    @property
    def factor(self) -> float:  # type: ignore[override]
        """2 nu: of r^2 it makes s^2."""
        return 2.0 * self.nu

    def of_squares(self, xp: Any, squares: Array) -> Array:
        """Return the polynomial in s = sqrt(2 nu) r times exp(-s)."""
        squares = xp.minimum(squares, _reach(xp, squares) ** 2)  # 0 times infinity is NaN
        # The root has no derivative at 0, where k has one: it is taken elsewhere.
        apart = squares > 0.0
        s = xp.where(apart, xp.sqrt(2.0 * self.nu * xp.where(apart, squares, 1.0)), 0.0)
        factor = {0.5: 1.0, 1.5: 1.0 + s, 2.5: 1.0 + s + s * s / 3.0}[self.nu]
        return factor * exponentials(xp, -s)

    def slope(self, xp: Any, squares: Array) -> Array:
        """Return -nu exp(-s) times 1 / s (s at least 1e-12), 1 or (1 + s) / 3."""
        s = xp.sqrt(2.0 * self.nu * squares)
        slope = -self.nu * exponentials(xp, -s)
        if self.nu < 1.0:
            return slope / xp.maximum(s, _LEAST_ROOT)
        return slope if self.nu < 2.0 else slope * ((1.0 + s) / 3.0)

    def finish(self, ops: Any, out: Array, scratch: Scratch, log: bool) -> None:
        """From s^2 to s and to k, in place; s^2 may be rounded to less than zero."""
        for few in in_cache(out):
            part = out[few, :]
            ops.maximum(part, 0.0, out=part)
            ops.sqrt(part, out=part)
            factor = self._factor(ops, part, scratch)
            ops.negative(part, out=part)
            exponentiate(self, ops, part, scratch, log)
            if factor is not None and log:
                ops.log1p(factor, out=factor)
                ops.add(part, factor, out=part)
            elif factor is not None:
                ops.add(factor, 1.0, out=factor)
                ops.multiply(part, factor, out=part)

    def _factor(self, ops: Any, s: Array, scratch: Scratch) -> Array | None:
        """What exp(-s) is multiplied with, less 1: nothing, s, or s + s^2 / 3 = s (1 + s / 3)."""
        if self.nu < 1.0:
            return None
        factor = scratch.like(array_namespace(s), s)
        if self.nu < 2.0:
            factor[...] = s
        else:
            ops.divide(s, 3.0, out=factor)
            ops.add(factor, 1.0, out=factor)
            ops.multiply(factor, s, out=factor)
        return factor


@dataclass(frozen=True)
class RationalQuadratic(Stationary):
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

    @property
    def factor(self) -> float:  # type: ignore[override]
        """1 / (2 alpha)."""
        return 0.5 / self.alpha

    def of_squares(self, xp: Any, squares: Array) -> Array:
        """Return (1 + r^2 / (2 alpha))^-alpha."""
        return exponentials(xp, -self.alpha * xp.log1p(squares * (0.5 / self.alpha)))

    def slope(self, xp: Any, squares: Array) -> Array:
        """Return -(1 + r^2 / (2 alpha))^(-alpha - 1) / 2."""
        exponents = -(self.alpha + 1.0) * xp.log1p(squares * (0.5 / self.alpha))
        return -0.5 * exponentials(xp, exponents)

    def weighted_gradient(self, X: Array, Z: Array, weights: Array) -> list[float]:
        """Return the gradients in the length scales and in alpha."""
        xp, X, Z = array_namespace(X, Z), real_floating(X), real_floating(Z)
        squares = sum(u * u for u in _scaled_differences(X, Z, self.length_scale))
        share = squares * (0.5 / self.alpha)
        in_alpha = self.of_squares(xp, squares) * (share / (1.0 + share) - xp.log1p(share))
        return [*super().weighted_gradient(X, Z, weights), float(xp.sum(weights * in_alpha))]

    def finish(self, ops: Any, out: Array, scratch: Scratch, log: bool) -> None:
        """Take the power, in place."""
        # log1p keeps the digits that 1 + r^2 / (2 alpha) loses when alpha is large.
        ops.maximum(out, 0.0, out=out)
        ops.log1p(out, out=out)
        ops.multiply(out, -self.alpha, out=out)
        exponentiate(self, ops, out, scratch, log)
