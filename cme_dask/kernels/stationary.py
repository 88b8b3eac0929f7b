"""Kernels of the scaled differences (x - z) / l, and how these are formed."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from array_api_compat import device

from cme_dask.errors import DataError
from cme_dask.kernels.base import Array, Sectioned, Unit, check_number, is_a
from cme_dask.kernels.evaluator import (
    Scratch,
    Sections,
    Write,
    clip_above,
    into,
    put_columns,
    to_numpy,
)

LengthScale = float | tuple[float, ...]
Term = Callable[[Any, Array], None]

_CACHED = 7 << 14  # numbers that stay in the cache of a core from one function to the next
_FAR = 2048.0  # |u|^2 from which rounding, 1.4 eps |u|^2, is more than 7e-13 of a kernel of 1


def _length_scale(value: Any) -> LengthScale:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)) and value:
        return tuple(check_number("length_scale", item) for item in value)
    return check_number("length_scale", value)


class _Scaler:
    """The map of rows x to u = (x - c) / l, with c the column medians of Z.

    Distances don't change with c, but their rounding does: an offset that is large against the
    spread would cancel only after it had been squared. A median stays where most rows are, however
    far away single ones lie. Equal rows give bitwise equal u.
    """

    def __init__(self, xp: Any, Z: Array, length_scale: LengthScale) -> None:
        each = isinstance(length_scale, tuple)
        self._xp, self._Z = xp, Z
        self._scales: Any = length_scale if each else (length_scale,) * Z.shape[1]
        self._scale: Any = length_scale
        if each:
            self._scale = xp.asarray(length_scale, dtype=Z.dtype, device=device(Z))
        m = Z.shape[0]
        self._centre = xp.sort(Z, axis=0)[m // 2, :] if m else 0.0

    def __call__(self, rows: Array) -> Array:
        """Scaled rows u, shape (n, d)."""
        return (rows - self._centre) / self._scale

    def far(self, squares: Array) -> list[int]:
        """Positions of the rows whose |u|^2 is so large that its rounding shows in the kernel."""
        if not squares.shape[0] or float(self._xp.max(squares)) <= _FAR:
            return []
        (positions,) = self._xp.nonzero(squares > _FAR)
        return to_numpy(positions).tolist()  # type: ignore[no-any-return]

    def sums(self, X: Array, which: list[int], term: Term, points: slice = slice(None)) -> Array:
        """Sums over columns of term((z - x) / l) for some points and rows, shape (m, len(which)).

        By differences of the rows as they came, which are exact where x is near z.
        """
        xp, Z = self._xp, self._Z[points, :]
        near = xp.take(X, xp.asarray(which, device=device(X)), axis=0).T
        total = None
        for j, scale in enumerate(self._scales):
            part = (Z[:, j : j + 1] - near[j : j + 1, :]) / scale
            term(xp, part)
            total = part if total is None else total + part
        return total


def _within(which: list[int], here: slice) -> tuple[int, int]:
    """The range of the sorted positions that lie in a slice of the rows."""
    return bisect_left(which, here.start), bisect_left(which, here.stop)


def _of_squared_distances(
    xp: Any, Z: Array, length_scale: LengthScale, factor: float, function: Term
) -> Sections:
    """Return the sections of a function of factor |v - u|^2, which works in place.

    The distances come from one matrix product of augmented rows, [v, 1, f |v|^2] [-2 f u,
    f |u|^2, 1]^T. Rounding leaves about eps |u|^2, of either sign, where they are zero: the
    function clips. Rows whose |u|^2 is too large for that take differences instead. The function
    meets a few sections at a time, while they are in the cache of a core.
    """
    scaled, d, scratch = _Scaler(xp, Z, length_scale), Z.shape[1], Scratch()
    v = scaled(Z)
    vv = factor * xp.sum(v * v, axis=1, keepdims=True)
    points = xp.concat([v, xp.ones_like(vv), vv], axis=1)

    def prepare(X: Array) -> Write:
        whole = scaled(X).T
        rows = scratch.shaped(xp, (d + 2, X.shape[0]), whole)
        u = rows[:d, :]
        u[...] = whole
        squares = xp.sum(u * u, axis=0)
        far = scaled.far(squares)
        rows[d, :] = factor * squares
        rows[d + 1, :] = 1.0
        into(xp, u, "multiply", u, -2.0 * factor)

        def block(here: slice, out: Array) -> None:
            (m, n), near = out.shape, rows[:, here]
            step = math.ceil(m / max(math.ceil(m * n / _CACHED), 1)) or 1
            first, last = _within(far, here)
            places = [i - here.start for i in far[first:last]]
            for start in range(0, m, step):
                few = slice(start, start + step)
                part = out[few, :]
                into(xp, part, "matmul", points[few, :], near)
                if places:
                    put_columns(
                        part, places, factor * scaled.sums(X, far[first:last], _square, few)
                    )
                function(xp, part)

        return block

    return Sections(prepare)


def _differences(xp: Any, Z: Array, length_scale: LengthScale, term: Term) -> Sections:
    """Return the sections of the sum over columns j of term(v_j - u_j), zero at equal rows."""
    scaled = _Scaler(xp, Z, length_scale)
    v, scratch = scaled(Z), Scratch()

    def prepare(X: Array) -> Write:
        u = scaled(X).T
        far = scaled.far(xp.sum(u * u, axis=0))

        def block(here: slice, out: Array) -> None:
            into(xp, out, "subtract", v[:, :1], u[:1, here])
            term(xp, out)
            for j in range(1, u.shape[0]):
                part = scratch.like(xp, out)
                into(xp, part, "subtract", v[:, j : j + 1], u[j : j + 1, here])
                term(xp, part)
                into(xp, out, "add", out, part)
            first, last = _within(far, here)
            if first < last:
                places = [i - here.start for i in far[first:last]]
                put_columns(out, places, scaled.sums(X, far[first:last], term))

        return block

    return Sections(prepare)


# Longer |u|^2 would do without a look, but leave copies of pivots more than rounding.
def _clip(xp: Any, values: Array) -> None:
    clip_above(xp, values, 0.0)


def _decay(xp: Any, values: Array) -> None:
    _clip(xp, values)
    into(xp, values, "exp", values)


def _square(xp: Any, values: Array) -> None:
    into(xp, values, "multiply", values, values)


def _absolute(xp: Any, values: Array) -> None:
    into(xp, values, "abs", values)


@dataclass(frozen=True)
class Stationary(Unit, Sectioned):
    """A kernel of the scaled differences (x - z) / l."""

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
    def _sections(self, xp: Any, Z: Array) -> Sections:
        return _of_squared_distances(xp, Z, self.length_scale, -0.5, _decay)

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        return _of_squared_distances(xp, Z, self.length_scale, -0.5, _clip)


@dataclass(frozen=True)
class Laplace(Stationary):
    r"""The Laplace kernel.

    .. math:: k(x, z) = \exp\Bigl(-\sum_j |x_j - z_j| / l_j\Bigr)

    It is a product over columns. Matern 1/2 has the Euclidean distance instead of the sum of
    absolute differences and doesn't change under rotations; in one column the two are equal.

    Parameters
    ----------
    length_scale
        l > 0 in the units of the columns: one number for all, or one per column (ARD).
    """

    def _sections(self, xp: Any, Z: Array) -> Sections:
        return self._log_sections(xp, Z).then(lambda out: into(xp, out, "exp", out))

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        distance = _differences(xp, Z, self.length_scale, _absolute)
        return distance.then(lambda out: into(xp, out, "negative", out))


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_a(self.nu, Real) or self.nu not in (0.5, 1.5, 2.5):
            raise DataError(f"nu must be 0.5, 1.5 or 2.5, got {self.nu!r}")
        object.__setattr__(self, "nu", float(self.nu))

    def _sections(self, xp: Any, Z: Array) -> Sections:
        held = Scratch()

        def decay(out: Array) -> None:
            factor = self._factor(xp, out, held)
            into(xp, out, "negative", out)
            into(xp, out, "exp", out)
            if factor is not None:
                into(xp, factor, "add", factor, 1.0)
                into(xp, out, "multiply", out, factor)

        return self._radius(xp, Z).then(decay)

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        held = Scratch()

        def log_decay(out: Array) -> None:
            factor = self._factor(xp, out, held)
            into(xp, out, "negative", out)
            if factor is not None:
                into(xp, factor, "log1p", factor)
                into(xp, out, "add", out, factor)

        return self._radius(xp, Z).then(log_decay)

    def _radius(self, xp: Any, Z: Array) -> Sections:
        """S = sqrt(2 nu) r."""
        # By differences: the root would turn an error of 1e-16 at r = 0 into one of 1e-8.
        squared = _differences(xp, Z, self.length_scale, _square)

        def root(out: Array) -> None:
            into(xp, out, "multiply", out, 2.0 * self.nu)
            into(xp, out, "sqrt", out)

        return squared.then(root)

    def _factor(self, xp: Any, s: Array, held: Scratch) -> Array | None:
        """What exp(-s) is multiplied with, less 1: nothing, s, or s + s^2 / 3 = s (1 + s / 3)."""
        if self.nu < 1.0:
            return None
        factor = held.like(xp, s)
        if self.nu < 2.0:
            factor[...] = s
        else:
            into(xp, factor, "divide", s, 3.0)
            into(xp, factor, "add", factor, 1.0)
            into(xp, factor, "multiply", factor, s)
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

    def _sections(self, xp: Any, Z: Array) -> Sections:
        return _of_squared_distances(xp, Z, self.length_scale, 0.5 / self.alpha, self._power)

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        return _of_squared_distances(xp, Z, self.length_scale, 0.5 / self.alpha, self._log_power)

    def _power(self, xp: Any, values: Array) -> None:
        self._log_power(xp, values)
        into(xp, values, "exp", values)

    def _log_power(self, xp: Any, values: Array) -> None:
        # log1p keeps the digits that 1 + r^2 / (2 alpha) loses when alpha is large.
        into(xp, values, "maximum", values, 0.0)
        into(xp, values, "log1p", values)
        into(xp, values, "multiply", values, -self.alpha)
