"""Cross-fitted locations mu(x) of y, residuals from them, and ridge regressions from moments."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Protocol, Self

import numpy as np
from scipy.linalg import LinAlgError, solve_triangular

from cme_dask.codec import Shape
from cme_dask.errors import DataError, remedy
from cme_dask.kernels.base import Kernel
from cme_dask.kernels.evaluator import parallel_map
from cme_dask.kernels.lapack import CholeskyFactor, TridiagonalForm
from cme_dask.kernels.transforms import Transform
from cme_dask.numerics.basis import Basis, eigenbasis
from cme_dask.numerics.crossval import held_out
from cme_dask.numerics.learning_curve import scale_of_all
from cme_dask.numerics.moments import Moments, MomentSums, variances
from cme_dask.numerics.scoring import mean_and_error
from cme_dask.numerics.values import ValueMap

Array = Any

RIDGES = tuple(float(r) for r in 10.0 ** np.arange(-10.0, 3.25, 0.5))
"""Ridges among which each column's is chosen; k(x, x) is about 1."""

_FEW_RIDGES = 2  # whose linear systems take less time than a tridiagonal form
_SOLVED = 1e-13  # of the trace: the least ridge that outweighs the rounding of linear systems
_COLLINEAR = 1e-8  # of a trend: directions of less of its variance are left out
_ROWS = 1 << 12  # whose kernel sections are held at once


class Location(Protocol):
    """A location mu of y given x, and what it says of the law of residuals."""

    @property
    def covariates(self) -> tuple[str, ...]:
        """What laws of residuals are given beside x, for each column of y."""

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers d and q of the columns of x and of y."""

    def __call__(self, x: Array) -> Array:
        """Mu at the rows of x (n, d), shape (n, q)."""

    def predicted(self, x: Array) -> tuple[Array, Array]:
        """Mu, shape (n, q), and the C covariates at the rows of x, shape (n, C q)."""


@dataclass(frozen=True, eq=False)
class MeanFunction:
    r"""Location of columns z given x, :math:`\mu(x) = a + k(s(x), p) B + t(x) T`.

    The trend is linear in t(x), which is x itself within a range of it and goes on constant beyond:
    where data are rare it extrapolates better than kernels do, and far away it stays bounded. So
    does s(x), which is x in columns without a range: with a small ridge, a sum of smooth kernels
    would go on like a polynomial of high degree.

    Parameters
    ----------
    kernel
        The kernel k of x.
    points
        Pivots p, shape (m, d).
    constant, coef, trend
        a, B and T, in the units of z, shapes (q,), (m, q) and (d, q).
    low, high
        The range, shapes (d,).
    """

    kernel: Kernel
    points: Annotated[Array, Shape("m", "d", dtype=float)]
    constant: Annotated[Array, Shape("q")]
    coef: Annotated[Array, Shape("m", "q")]
    trend: Annotated[Array, Shape("d", "q")]
    low: Annotated[Array, Shape("d")]
    high: Annotated[Array, Shape("d")]

    name: ClassVar[str] = "kernel ridge regression"
    covariates: ClassVar[tuple[str, ...]] = ()

    def _validate(self) -> None:
        """DataError unless the kernel fits the columns and the trend has a range."""
        self.kernel.check(self.points.shape[1])
        if not (self.low <= self.high).all():
            raise DataError("the trend has no range")

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers d and q of the columns of x and of y."""
        return len(self.low), len(self.constant)

    def clipped(self, x: Array) -> Array:
        """t(x) of rows x, shape (n, d)."""
        return np.clip(x, self.low, self.high)

    def section(self, x: Array) -> Array:
        """k(s(x), p) at rows x, shape (n, m)."""
        within = np.where(self.low < self.high, self.clipped(x), x)
        return self.kernel(within, self.points)

    def __call__(self, x: Array) -> Array:
        """Mu at the rows of x, shape (n, q)."""
        result = self.constant + self.clipped(x) @ self.trend
        for here in _slices(len(x)):
            result[here] += self.section(x[here]) @ self.coef
        return result

    def predicted(self, x: Array) -> tuple[Array, Array]:
        """Mu at the rows of x, and no covariates."""
        return without_covariates(self(x))


class Residuals(ABC):
    """What a pass makes of (x, y): (x, z - mu(x)), with the location that has not seen the fold.

    Where the location has covariates for the laws of residuals, they are columns of x as well.

    Attributes
    ----------
    location
        Of all rows: it answers queries.
    n_folds
        Number of folds F.
    transform
        z = transform(y); None for z = y.
    scale
        Errors of the location of all rows over those of the others, shape (q,); None for 1.
    """

    location: Any
    transform: Transform | None
    scale: Array | None

    @property
    @abstractmethod
    def n_folds(self) -> int:
        """Number of folds F."""

    @abstractmethod
    def held_out(self, x: Array, folds: Array) -> Array:
        """Mu at the rows of x, shape (n, q), each from all folds but its own, ``folds`` (n,)."""

    def predicted(self, x: Array, folds: Array) -> tuple[Array, Array]:
        """Mu as in :meth:`held_out`, and the covariates of the same location, shape (n, C q)."""
        return without_covariates(self.held_out(x, folds))

    @property
    def added(self) -> int:
        """Columns that a row gains."""
        return len(self.location.covariates) * int(self.location.widths[1])

    def scores(self, y: Array) -> Array:
        """Columns z of the rows y, both of shape (n, q)."""
        return y if self.transform is None else self.transform(y)

    def possible(self, z: Array, values: ValueMap) -> Array:
        """Coordinates z (..., q), brought to those of values that the columns of y can take."""
        if values.clips_alone:
            return np.clip(z, *self.scores(np.stack([values.low, values.high])))
        rows = z.reshape(-1, z.shape[-1])
        return self.scores(values.possible(self.undo(rows))).reshape(z.shape)

    def undo(self, z: Array) -> Array:
        """Rows y with the coordinates z, both of shape (n, q)."""
        return z if self.transform is None else self.transform.inverse()(z)

    def values(self, e: Array, x: Array, folds: Array) -> Array:
        """Rows y that residuals e would belong to at these rows, shape (n, S, q).

        Parameters
        ----------
        e
            Residuals, shape (S, q).
        x, folds
            Rows and the fold of each, shapes (n, d) and (n,): their location has not seen it.
        """
        z = self.held_out(x, folds)[:, None, :] + e
        return self.undo(z.reshape(-1, z.shape[2])).reshape(z.shape)

    def __call__(self, parts: tuple[Array, ...], folds: Array) -> tuple[Array, ...]:
        """Rows (x, e) of rows (x, y), in the folds (n,); x with the covariates."""
        x, y = parts
        mu, covariates = self.predicted(x, folds)
        return beside(x, covariates), self.scores(y) - mu


def without_covariates(mu: Array) -> tuple[Array, Array]:
    """Predictions (n, q), and no columns of covariates."""
    return mu, mu[:, :0]


def beside(x: Array, covariates: Array) -> Array:
    """What laws of residuals are given: rows of x, with the covariates of a location, if any."""
    return np.hstack([x, covariates]) if covariates.shape[1] else x


@dataclass(frozen=True, eq=False)
class RidgeResiduals(Residuals):
    """Residuals from a ridge regression and its refits without each fold.

    Parameters
    ----------
    location
        Of all rows.
    constants, coefs, trends
        Those without each fold, shapes (F, q), (F, m, q) and (F, d, q); of a fold without weight
        those of all.
    transform
        z = transform(y); None for z = y.
    scale
        As of :class:`Residuals`.
    """

    location: MeanFunction
    constants: Array
    coefs: Array
    trends: Array
    transform: Transform | None = None
    scale: Array | None = None

    @property
    def n_folds(self) -> int:
        """Number of folds F."""
        return len(self.constants)

    @property
    def each(self) -> tuple[MeanFunction, ...]:
        """The locations without each fold."""
        slopes = zip(self.constants, self.coefs, self.trends, strict=True)
        return tuple(
            replace(self.location, constant=constant, coef=coef, trend=trend)
            for constant, coef, trend in slopes
        )

    def held_out(self, x: Array, folds: Array) -> Array:
        """Mu at the rows of x, shape (n, q), each from all folds but its own, ``folds`` (n,)."""
        n_folds, q = self.constants.shape
        coefs, trends = (
            slopes.transpose(1, 0, 2).reshape(-1, n_folds * q)
            for slopes in (self.coefs, self.trends)
        )
        result = np.empty((len(x), q))
        for here in _slices(len(x)):
            section = self.location.section(x[here])
            # The locations of all folds cost less than to sort the rows by fold.
            each = section @ coefs + self.location.clipped(x[here]) @ trends
            each = each.reshape(-1, n_folds, q)
            fold = folds[here]
            result[here] = self.constants[fold] + each[np.arange(len(fold)), fold]
        return result


@dataclass(frozen=True, eq=False)
class FittedMeanFunction:
    """Locations and how good they are.

    Attributes
    ----------
    residuals
        The locations.
    ridges
        The ridge of each column, shape (q,).
    errors
        Held-out squared error of each fold that can be held out, by column, shape (F', q).
    share
        Of these folds, shape (F',).
    baseline
        Held-out squared error of the mean of each column, shape (q,).
    """

    residuals: RidgeResiduals
    ridges: Array
    errors: Array
    share: Array
    baseline: Array

    @property
    def error(self) -> Array:
        """Held-out squared error of each column, shape (q,)."""
        return np.asarray(self.share @ self.errors)

    @property
    def skill(self) -> Array:
        """1 - error / baseline, shape (q,), 0 of columns that do not vary."""
        varies = self.baseline > 0.0
        return np.where(varies, 1.0 - self.error / np.where(varies, self.baseline, 1.0), 0.0)


@dataclass(frozen=True, eq=False)
class _Fitted:
    """Functions a + N(x)^T B + t(x)^T T of x for each column z; several stand one after another."""

    constant: Array
    slope: Array
    trend: Array

    def error(self, held: Moments, columns: slice) -> Array:
        """E (a + N^T B + t^T T - z)^2 over other rows, shape (..., q)."""
        return held.squared_error("x", "y", self.constant, self.slope, columns, self.trend)


@dataclass(frozen=True, eq=False)
class _Ridge:
    r"""Ridge regression on centred features N of x beside a trend in t, which is not penalised.

    .. math:: B = (S_{NN} - S_{Nt} S_{tt}^+ S_{tN} + r)^{-1} (S_{Nz} - S_{Nt} S_{tt}^+ S_{tz}),
              \quad T = S_{tt}^+ (S_{tz} - S_{tN} B), \quad a = E z - c^T B - E t^T T

    with centred S. Without a trend, T = 0.
    """

    gram: Array
    target: Array
    cross: tuple[Array, Array, Array]
    mean: tuple[Array, Array, Array]

    @classmethod
    def of(cls, mean: Moments, columns: slice, trend: Array) -> Self:
        """From means over rows; ``trend`` tells which columns of x are in t, shape (d,)."""
        c, d = mean.means["x"], len(trend)
        t, f = mean.function_means("x")[:d], mean.function_means("y")[columns]
        away_t, away_z = mean.means["f(x)"][:d], mean.means["f(y)"][columns]
        gram = mean.blocks["x", "x"] - np.outer(c, c)
        target = mean.blocks["x", "f(y)"][:, columns] - np.outer(c, away_z)
        n_t = mean.blocks["x", "f(x)"][:, :d] - np.outer(c, away_t)
        t_z = mean.blocks["f(x)", "f(y)"][:d, columns] - np.outer(away_t, away_z)
        gram_t = mean.blocks["f(x)", "f(x)"][:d, :d] - np.outer(away_t, away_t)
        # A column that differs in rows of one fold alone is constant without that fold.
        inverse = _inverse(gram_t, trend & (variances([mean], "x")[:d] > 0.0))
        part = n_t @ inverse
        return cls(gram - part @ n_t.T, target - part @ t_z, (inverse, n_t, t_z), (f, c, t))

    @property
    def flat(self) -> _Fitted:
        """The means."""
        _, n_t, t_z = self.cross
        return _Fitted(self.mean[0], np.zeros((len(n_t), t_z.shape[1])), np.zeros(t_z.shape))

    def fitted(self, slope: Array) -> _Fitted:
        """The functions of a solution B, shape (m, q), or of several, (..., m, q)."""
        inverse, n_t, t_z = self.cross
        trend = inverse @ (t_z - n_t.T @ slope)
        f, c, t = self.mean
        return _Fitted(f - c @ slope - t @ trend, slope, trend)

    def solve(self, ridges: Array) -> _Fitted:
        """The functions for one ridge of each column, shape (q,).

        One or two ridges have a linear system each: at m = 500 a tridiagonal form takes as long as
        two or three.
        """
        distinct = np.unique(ridges)
        if len(distinct) <= _FEW_RIDGES and self.outweighed(distinct[0]):
            slope = np.empty_like(self.target)
            with suppress(LinAlgError):
                for ridge in distinct:
                    these = ridges == ridge
                    factor = CholeskyFactor.of(self.gram, float(ridge))
                    slope[:, these] = factor.solve(self.target[:, these].T).T
                return self.fitted(slope)
        return self.path(distinct[0]).solve(ridges)

    def outweighed(self, least: float) -> bool:
        """Whether ridges of at least this outweigh the rounding of the Gram matrix."""
        return bool(least > _SOLVED * np.trace(self.gram))

    def path(self, least: float) -> "_Path":
        """What solves for many ridges of at least this, where one more costs little."""
        return _Tridiagonal.of(self) if self.outweighed(least) else _Spectrum.of(self)


class _Path(Protocol):
    """Ridge regression for many ridges."""

    ridge: _Ridge

    def solve(self, ridges: Array) -> _Fitted:
        """The functions for one ridge of each column, shape (q,), or for several, (..., q)."""
        ...


@dataclass(frozen=True, eq=False)
class _Tridiagonal(_Path):
    """By the tridiagonal form of the Gram matrix."""

    ridge: _Ridge
    form: TridiagonalForm
    target: Array

    @classmethod
    def of(cls, ridge: _Ridge) -> Self:
        """By one reduction of the Gram matrix."""
        form = TridiagonalForm.of(ridge.gram)
        return cls(ridge, form, form.rotated(ridge.target.T))

    def solve(self, ridges: Array) -> _Fitted:
        """See :class:`_Path`."""
        q, m = self.target.shape
        each = np.broadcast_to(ridges, (*ridges.shape[:-1], q))
        slope = np.empty((*each.shape, m))
        for ridge in np.unique(each):
            here = each == ridge
            try:
                solved = self.form.solve_rotated(self.target, float(ridge))
            except LinAlgError:  # where columns nearly agree, rounding may exceed the ridge
                return _Spectrum.of(self.ridge).solve(ridges)
            slope[here] = np.broadcast_to(solved, slope.shape)[here]
        slope = self.form.rotated(slope.reshape(-1, m), back=True).reshape(slope.shape)
        return self.ridge.fitted(np.moveaxis(slope, -1, -2))


@dataclass(frozen=True, eq=False)
class _Spectrum(_Path):
    """By the eigenbasis of the Gram matrix, whose eigenvalues are not negative as computed."""

    ridge: _Ridge
    transform: Array
    eigenvalues: Array
    target: Array

    @classmethod
    def of(cls, ridge: _Ridge) -> Self:
        """By one eigendecomposition."""
        transform, eigenvalues = eigenbasis(ridge.gram)
        return cls(ridge, transform, eigenvalues, transform.T @ ridge.target)

    def solve(self, ridges: Array) -> _Fitted:
        """See :class:`_Path`."""
        smoothed = self.target / (self.eigenvalues[:, None] + ridges[..., None, :])
        slope = np.moveaxis(np.tensordot(self.transform, smoothed, (1, -2)), 0, -2)
        return self.ridge.fitted(slope)


def _inverse(gram: Array, which: Array) -> Array:
    """Pseudoinverse of the rows and columns that count, zeros elsewhere, shape (d, d)."""
    scale = np.where(which, 1.0 / np.sqrt(np.where(which, np.diagonal(gram), 1.0)), 0.0)
    scaled = scale[:, None] * gram * scale
    return np.asarray(
        scale[:, None] * np.linalg.pinv(scaled, rcond=_COLLINEAR, hermitian=True) * scale
    )


def fit_mean_function(
    moments: MomentSums,
    basis: Basis,
    columns: slice,
    transform: Transform | None = None,
    ridges: Iterable[float] = RIDGES,
    *,
    within: tuple[Array, Array] | None = None,
    cores: int = 1,
) -> FittedMeanFunction:
    """Locations of functions of y given x, without each fold and of all rows.

    The ridge of each column is the largest one whose squared error on the held-out folds is within
    one standard error of the least: every ridge from one tridiagonal form of each fold's Gram
    matrix, or from an eigenbasis where the smallest ridges are within its rounding.

    Parameters
    ----------
    moments
        By fold.
    basis
        Of x, on which to regress.
    columns
        Positions of the functions z among those of y.
    transform
        z = transform(y); None if they are the columns of y.
    ridges
        Positive numbers.
    within
        Least and largest x of the trend, shapes (d,); a column where they are equal has none.
        Default no trends.
    cores
        Threads: a fold each.

    Raises
    ------
    DataError
        If fewer than two folds have weight.

    Notes
    -----
    Equal to refits on the rows of the other folds, with the same pivots.
    """
    grid = np.sort(np.array(tuple(ridges)))
    held = moments.held_out_folds
    if not held:
        raise DataError(
            "locations are cross-fitted, and fewer than two folds have rows of positive weight: "
            f"give more rows or folds, or fit with {remedy('residual=False', '--residual no')}"
        )
    d = basis.points.shape[1]
    low, high = (np.zeros(d), np.zeros(d)) if within is None else within

    def refit(rest: Moments, own: Moments) -> tuple[_Path, Array, Array]:
        fit = _Ridge.of(rest, columns, low < high).path(grid[0])
        flat = fit.ridge.flat.error(own, columns)
        return fit, fit.solve(grid[:, None]).error(own, columns), flat

    refits, share = held_out(moments, refit, cores)
    fits, errors, baselines = zip(*refits, strict=True)
    chosen = _simplest(np.array(errors), share)
    ridge = grid[chosen]
    mean = moments.means()
    whole = _Ridge.of(mean, columns, low < high).solve(ridge)
    varies = variances([mean], "y")[columns] > 0.0
    location = MeanFunction(
        basis.kernel,
        basis.points,
        whole.constant,
        _sections(basis, whole.slope),
        whole.trend,
        low,
        high,
    )
    constants = np.tile(location.constant, (moments.n_folds, 1))
    coefs = np.tile(location.coef, (moments.n_folds, 1, 1))
    trends = np.tile(location.trend, (moments.n_folds, 1, 1))
    for fold, fit in zip(held, fits, strict=True):
        result = fit.solve(ridge)
        constants[fold], trends[fold] = result.constant, result.trend
        coefs[fold] = _sections(basis, result.slope)
    return FittedMeanFunction(
        RidgeResiduals(location, constants, coefs, trends, transform),
        ridge,
        np.take_along_axis(np.array(errors), chosen[None, None, :], axis=1)[:, 0],
        share,
        np.where(varies, share @ np.array(baselines), 0.0),
    )


def scaled_residuals(
    fitted: FittedMeanFunction,
    moments: MomentSums,
    basis: Basis,
    columns: slice,
    rows: tuple[Array, Array],
    folds: Array,
    weights: Array,
    units: Array,
    *,
    cores: int = 1,
) -> RidgeResiduals:
    """Its residuals, with their scale, from refits that leave out pairs of folds.

    Parameters
    ----------
    fitted
        The location.
    moments, basis, columns, cores
        As in :func:`fit_mean_function`.
    rows
        Rows of x and of y among those of the moments, shapes (n, d) and (n, q). Errors are compared
        there row by row: of squared errors by fold, which moments give too, one row of much
        leverage may be all.
    folds, weights, units
        As the groups, weights and units of :func:`scale_of_all`.
    """
    residuals, (x, y) = fitted.residuals, rows
    location = residuals.location
    trend = location.low < location.high

    def refits(left_out: Sequence[Array]) -> list[Array]:
        def predicted(out: Array) -> Array:
            pair = tuple(np.unique(folds[out]).tolist())
            refit = _Ridge.of(moments.means(without=pair), columns, trend).solve(fitted.ridges)
            mean = replace(
                location,
                constant=refit.constant,
                coef=_sections(basis, refit.slope),
                trend=refit.trend,
            )
            return mean(x[out])

        return parallel_map(predicted, left_out, cores)

    held, z = residuals.held_out(x, folds), residuals.scores(y)
    scale = scale_of_all(z, held, folds, weights, refits, units)
    return replace(residuals, scale=scale)


def _simplest(errors: Array, share: Array) -> Array:
    """Positions of the largest ridges that are as good as the best, shape (q,).

    As good: within one standard error of the paired difference over the folds. What a smaller ridge
    seems to gain there is mostly noise, which would be extrapolated where data are rare.

    Parameters
    ----------
    errors
        By fold, ridge (ascending) and column, shape (F, R, q).
    share
        Of the folds, shape (F,).
    """
    total = np.tensordot(share, errors, 1)
    largest = total.max(axis=0)
    errors = errors / np.where(largest > 0.0, largest, 1.0)  # their squares may leave the range
    best = total.argmin(axis=0)
    least = np.take_along_axis(errors, best[None, None, :], axis=1)
    mean, std = mean_and_error(errors - least, share)
    good = mean <= std
    return np.asarray(good.shape[0] - 1 - good[::-1].argmax(axis=0))


def _sections(basis: Basis, slope: Array) -> Array:
    """The coefficients of k(x, p) that those of N = k(x, p) R^-T are."""
    return np.asarray(solve_triangular(basis.factor, slope, lower=True, trans="T"))


def _slices(n: int) -> Iterable[slice]:
    return (slice(start, start + _ROWS) for start in range(0, n, _ROWS))
