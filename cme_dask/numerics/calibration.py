"""Calibration of laws on cells by their own distribution functions, learned from held-out rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from cme_dask.kernels.base import is_a

Array = Any
Group = tuple[Array, Array, Array]
"""Number of the value of each cell, cells in order of their values, and where each value begins."""

NEAR_PIVOTS = 256
"""Pivots of each basis that span the effective support of calibrations that are learned."""

_LEAST = 1e-3  # levels are taken from here to 1 less this: beyond, one row says too much
_ROWS = 256  # laws at once: what is made of them stays in cache
_AT_ONCE = 64  # of those that are calibrated alone
_STEPS = 25
_CONVERGED = 1e-6


@dataclass(frozen=True, eq=False)
class Calibration:
    r"""Laws whose distribution functions have been calibrated, column by column.

    The mass :math:`w_s` of the cell s of a law becomes

    .. math:: w_s' \propto w_s \prod_j F_j(s)^{e a_j} (1 - F_j(s))^{e b_j},

    where :math:`F_j(s)` is the level of the cell under the law itself: the probability of a smaller
    value of column j, and half of that of the same one. So :math:`F_j` is followed by the
    distribution function of a Beta(1 + a_j, 1 + b_j) variable: positive exponents narrow a law
    that is too wide, negative ones widen one that is too narrow. The effective support e of x, from
    0 to 1, lets a law far from all data stay what it is.

    Parameters
    ----------
    exponents
        a and b, shape (2, d); zeros for columns of labels.
    pivots
        Number of pivots of each basis that span e; None for all of them. More cost what they
        square to at each point, and tell near from far no better.

    Notes
    -----
    Averages of calibrated laws are too wide, and so are projections of signed ones, which lose the
    negative masses that made them narrow. Source: the beta-transformed linear pool of Gneiting and
    Ranjan (2013), Electronic Journal of Statistics 7, 1747; the product over columns is ours.
    """

    exponents: Array
    pivots: int | None = None

    @property
    def columns(self) -> list[int]:
        """Positions of the columns that are calibrated."""
        return [int(j) for j in np.flatnonzero(np.abs(self.exponents).sum(axis=0))]

    def weights(self, weights: Array, levels: "Levels", support: Array) -> Array:
        """Calibrated laws, shape (b, S), rows of sum 1.

        Parameters
        ----------
        weights
            Laws, shape (b, S).
        levels
            Of the columns in ``columns``.
        support
            Effective support e of each law, shape (b,).
        """
        result = np.empty_like(weights)
        exponents = self.exponents[:, self.columns]
        for here in _slices(len(weights), _AT_ONCE):
            tilt = levels.tilt(weights[here], exponents)
            tilt *= support[here, None]
            result[here] = _tilted(weights[here], tilt)[0]
        return result

    def to_list(self) -> list[list[float]]:
        """JSON form of the exponents."""
        return [[float(e) for e in row] for row in self.exponents]

    @classmethod
    def from_list(cls, values: Any, width: int, pivots: int | None = None) -> Self:
        """Inverse of :meth:`to_list`; ValueError on anything else than 2 x width finite numbers."""
        exponents = np.array(values, dtype=np.float64)
        if exponents.shape != (2, width) or not np.isfinite(exponents).all():
            raise ValueError(f"the calibration needs 2 x {width} finite exponents")
        if not (pivots is None or (is_a(pivots, int) and pivots > 0)):
            raise ValueError(f"the calibration needs a positive number of pivots, got {pivots!r}")
        return cls(exponents, pivots)


class Levels:
    """The levels F_j(s) of the cells of laws, in some columns.

    Parameters
    ----------
    means
        Of the cells, shape (S, d).
    columns
        Positions of q columns.
    """

    def __init__(self, means: Array, columns: Sequence[int]) -> None:
        result = (np.unique(means[:, j], return_inverse=True) for j in columns)
        every = np.arange(len(means))
        # None where the cells are in the order of their values, as those of a single column are.
        self._groups = [
            None
            if np.array_equal(group, every)
            else (
                group,
                np.argsort(group, kind="stable"),
                np.searchsorted(np.sort(group), np.arange(len(values))),
            )
            for values, group in result
        ]

    def features(self, weights: Array) -> Array:
        """Logarithms of F_j and of 1 - F_j, shape (b, S, 2 q), of laws (b, S)."""
        q = len(self._groups)
        result = np.empty((*weights.shape, 2 * q))
        for j, group in enumerate(self._groups):
            below, above = self._logarithms(weights, group)
            result[:, :, j], result[:, :, q + j] = _per_cell(below, group), _per_cell(above, group)
        return result

    def tilt(self, weights: Array, exponents: Array) -> Array:
        """Sums of these logarithms times exponents (2, q), shape (b, S)."""
        result: Array = 0.0
        for j, group in enumerate(self._groups):
            below, above = self._logarithms(weights, group)
            below *= exponents[0, j]
            above *= exponents[1, j]
            below += above
            result = _per_cell(below, group) + result
        return result

    def _logarithms(self, weights: Array, group: Group | None) -> tuple[Array, Array]:
        """Logarithms of F and of 1 - F at each value of a column, ascending."""
        masses = weights
        if group is not None:
            _, order, starts = group
            masses = np.add.reduceat(weights[:, order], starts, axis=1)
        level = np.cumsum(masses, axis=1)
        level -= 0.5 * masses
        np.clip(level, _LEAST, 1.0 - _LEAST, out=level)
        below = np.log(level)
        np.subtract(1.0, level, out=level)  # not small, thus exact to rounding
        return below, np.log(level, out=level)


def _per_cell(values: Array, group: Group | None) -> Array:
    """Of each cell that of its value, from those of the values of a column."""
    return values if group is None else values[:, group[0]]


@dataclass(frozen=True, eq=False)
class HeldRows:
    """Rows of one fold and laws fitted on the others.

    Attributes
    ----------
    laws
        At these rows, shape (b, S).
    cells
        The cell that each row is in, shape (b,).
    support
        Effective support of each law, shape (b,).
    weights
        Of the rows, shape (b,).
    units
        A number for each row that tells which rows are alike, shape (b,).
    """

    laws: Array
    cells: Array
    support: Array
    weights: Array
    units: Array


@dataclass(frozen=True, eq=False)
class LearnedCalibration:
    """A calibration and what it gains.

    Attributes
    ----------
    calibration
        Of all folds.
    gain, std
        Gain in the mean log density at rows whose fold was left out, and its standard error over
        units of rows.
    rows
        How many.
    """

    calibration: Calibration
    gain: float
    std: float
    rows: int

    @property
    def pays(self) -> bool:
        """Whether the gain is more than one standard error."""
        return self.gain > self.std


def learn_calibration(
    folds: Sequence[HeldRows], means: Array, columns: Sequence[int]
) -> LearnedCalibration:
    r"""The exponents of the largest mean log density at held-out rows, by Newton's method.

    .. math:: \frac1W \sum_i p_i \Bigl(\theta^T t(x_i, s_i) - \log \sum_s w_s(x_i)
              e^{\theta^T t(x_i, s)}\Bigr) - \frac{|\theta|^2}{2 n},

    where :math:`\theta` holds a and b, t the logarithms of F and 1 - F times the effective support,
    and :math:`s_i` is the cell of the row. It is concave; at the maximum, the mean of t at the rows
    is that under the calibrated laws. The gain is measured at exponents without the fold of a row:
    one step of Newton's method from those of all folds.

    Parameters
    ----------
    folds
        At least two, with rows.
    means
        Of the cells, shape (S, d).
    columns
        Positions of the columns to calibrate.
    """
    levels, n = Levels(means, columns), sum(len(fold.cells) for fold in folds)
    total = float(sum(fold.weights.sum() for fold in folds))
    theta = np.zeros(2 * len(columns))
    for _ in range(_STEPS):
        gradients, curvatures = _derivatives(folds, levels, theta, total, n)
        step = np.linalg.solve(curvatures.sum(axis=0), gradients.sum(axis=0))
        # A law has few cells at its ends: a step much longer than 1 leaves what is linear here.
        theta = theta + step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() <= _CONVERGED:
            break
    gradients, curvatures = _derivatives(folds, levels, theta, total, n)
    values = []
    for i, fold in enumerate(folds):
        rest = np.delete(np.arange(len(folds)), i)
        apart = np.linalg.solve(curvatures[rest].sum(axis=0), gradients[rest].sum(axis=0))
        values.append(_log_gain(fold, levels, theta + apart))
    share = np.concatenate([fold.weights for fold in folds]) / total
    gained = np.concatenate(values)
    gain = float(share @ gained)
    units = np.unique(np.concatenate([fold.units for fold in folds]), return_inverse=True)[1]
    sums = np.bincount(units, share * (gained - gain))
    count = len(sums)
    std = float(np.sqrt(count / (count - 1) * (sums @ sums))) if count > 1 else np.inf
    exponents = np.zeros((2, means.shape[1]))
    exponents[:, list(columns)] = theta.reshape(2, -1)
    return LearnedCalibration(Calibration(exponents), gain, std, n)


def _derivatives(
    folds: Sequence[HeldRows], levels: Levels, theta: Array, total: float, n: int
) -> tuple[Array, Array]:
    """Gradient and minus the Hessian of the objective, a part of it for each fold."""
    gradients, curvatures = [], []
    for fold in folds:
        gradient, curvature = np.zeros(len(theta)), np.zeros((len(theta), len(theta)))
        for here, features in _features(fold, levels):
            laws = _tilted(fold.laws[here], features @ theta)[0]
            mean = (laws[:, None, :] @ features)[:, 0]
            seen = features[np.arange(len(mean)), fold.cells[here]]
            weights = fold.weights[here] / total
            gradient += weights @ (seen - mean)
            scaled = features * (laws * weights[:, None])[:, :, None]
            flat = features.reshape(-1, len(theta))
            curvature += scaled.reshape(-1, len(theta)).T @ flat
            curvature -= (mean * weights[:, None]).T @ mean
        part = len(fold.cells) / n
        gradients.append(gradient - part * theta / n)
        curvatures.append(curvature + part * np.eye(len(theta)) / n)
    return np.array(gradients), np.array(curvatures)


def _log_gain(fold: HeldRows, levels: Levels, theta: Array) -> Array:
    """Logarithm of the calibrated over the given density at the rows of a fold, shape (b,)."""
    result = np.empty(len(fold.cells))
    for here, features in _features(fold, levels):
        tilt = features @ theta
        seen = tilt[np.arange(len(tilt)), fold.cells[here]]
        result[here] = seen - _tilted(fold.laws[here], tilt)[1]
    return result


def _features(fold: HeldRows, levels: Levels) -> Iterator[tuple[slice, Array]]:
    for here in _slices(len(fold.cells)):
        yield here, levels.features(fold.laws[here]) * fold.support[here, None, None]


def _tilted(weights: Array, tilt: Array) -> tuple[Array, Array]:
    """Laws w exp(tilt) over their sums, shape (b, S), and the logarithms of these, shape (b,)."""
    top = np.max(tilt, axis=1, where=weights > 0.0, initial=-np.inf, keepdims=True)
    result = tilt - top
    np.minimum(result, 0.0, out=result)
    np.exp(result, out=result)
    result *= weights
    sums = result.sum(axis=1, keepdims=True)
    result /= sums
    return result, (top + np.log(sums))[:, 0]


def _slices(n: int, step: int = _ROWS) -> Iterator[slice]:
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
