"""Calibration of laws on cells by their own distribution functions, learned from held-out rows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.polynomial import legendre

from cme_dask.kernels.base import is_a
from cme_dask.kernels.evaluator import parallel_map
from cme_dask.numerics.scoring import mean_and_error, running_sums

Array = Any
Item = TypeVar("Item")

FoldFeatures = Iterable[tuple[slice, Array]]
"""Features of some laws of a fold after the other, shapes (terms q, b, S)."""

Features = Sequence[FoldFeatures]
"""Those of each fold."""

Group = tuple[Array, Array, Array]
"""Number of the value of each cell, cells in order of their values, and where each value begins."""

NEAR_PIVOTS = 256
"""Pivots of each basis that span the effective support of calibrations that are learned."""

_TERMS = 2, 5  # numbers of a column: without polynomials, and with those of degrees 2 to 4
_CELLS = 256  # of a law of one column, at most: so many levels tell a few numbers as well
_ENOUGH = 1500  # rows that tell three more numbers of a column
_PROMISED = 2.0  # log likelihood that each of these must promise: one in a hundred does by luck
_LEAST = 1e-3  # levels are taken from here to 1 less this: beyond, one row says too much
_ROWS = 64  # laws at once: what is made of them stays in cache
_AT_ONCE = 1 << 18  # numbers of laws that are calibrated: on fewer, threads wait for each other
_TINY = 1e-200  # a sum of masses that have not become zeros by rounding
_RETAINED = 1 << 21  # numbers in features that are made once, and not at each step
_STEPS = 25
_LAST = 1e-3  # step after which the error is about its square


@dataclass(frozen=True, eq=False)
class Calibration:
    r"""Laws whose distribution functions have been calibrated, column by column.

    The mass :math:`w_s` of the cell s of a law becomes

    .. math:: w_s' \propto w_s \prod_j \Bigl(F_j(s)^{a_j} (1 - F_j(s))^{b_j}
              \exp \sum_{k=2}^4 c_{jk} P_k(2 F_j(s) - 1)\Bigr)^e,

    where :math:`F_j(s)` is the level of the cell under the law itself: the probability of a smaller
    value of column j, and half of that of the same one, clipped to [0.001, 0.999]. Without the
    polynomials of Legendre, :math:`F_j` is followed by the distribution function of a
    Beta(1 + a_j, 1 + b_j) variable: positive exponents narrow a law that is too wide, negative ones
    widen one that is too narrow. Polynomials change its middle and leave its ends. The effective
    support e of x, from 0 to 1, lets a law far from all data stay what it is.

    Parameters
    ----------
    exponents
        a and b, and c where there are polynomials: shape (2, d) or (5, d); zeros for columns of
        labels.
    pivots
        Number of pivots of each basis that span e; None for all of them. More cost what they
        square to at each point, and tell near from far no better.

    Notes
    -----
    Averages of calibrated laws are too wide, and so are projections of signed ones, which lose the
    negative masses that made them narrow. Source: the beta-transformed linear pool of Gneiting and
    Ranjan (2013), Electronic Journal of Statistics 7, 1747; the product over columns, and the
    polynomials, are ours.
    """

    exponents: Array
    pivots: int | None = None

    @property
    def columns(self) -> list[int]:
        """Positions of the columns that are calibrated."""
        return [int(j) for j in np.flatnonzero(np.abs(self.exponents).sum(axis=0))]

    def weights(
        self, weights: Array, levels: "Levels", support: Array, out: Array | None = None
    ) -> Array:
        """Calibrated laws, shape (b, S), rows of sum 1.

        Parameters
        ----------
        weights
            Laws, shape (b, S).
        levels
            Of the columns in ``columns``.
        support
            Effective support e of each law, shape (b,).
        out
            Where the calibrated laws go, shape (b, S); it may be ``weights``. Default a new array.
        """
        out = np.empty_like(weights) if out is None else out
        exponents = self.exponents[:, self.columns]
        for here in _slices(len(weights), max(_AT_ONCE // weights.shape[1], 1)):
            tilt = levels.tilt(weights[here], exponents)
            tilt *= support[here, None]
            _tilted(weights[here], tilt, out=out[here])
        return out

    def to_list(self) -> list[list[float]]:
        """JSON form of the exponents."""
        return [[float(e) for e in row] for row in self.exponents]

    @classmethod
    def from_list(cls, values: Any, width: int, pivots: int | None = None) -> Self:
        """Inverse of :meth:`to_list`; ValueError on other than 2 or 5 x width finite numbers."""
        exponents = np.array(values, dtype=np.float64)
        shapes = [(rows, width) for rows in _TERMS]
        if exponents.shape not in shapes or not np.isfinite(exponents).all():
            raise ValueError(f"the calibration needs 2 x {width} or 5 x {width} finite exponents")
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
        self.columns = list(columns)
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

    def terms(self, theta: Array) -> int:
        """Numbers of each column, where ``theta`` has those of all."""
        return len(theta) // len(self.columns) if self.columns else _TERMS[0]

    def features(self, weights: Array, terms: int = _TERMS[0]) -> Array:
        """Logarithms of F_j and of 1 - F_j, then polynomials, shape (terms q, b, S), of laws."""
        q = len(self._groups)
        result = np.empty((terms * q, *weights.shape))
        for j, group in enumerate(self._groups):
            level = self._level(weights, group)
            below, above = _logarithms(level)
            values = [below, above]
            if terms > _TERMS[0]:
                values += _polynomials(level)
            for k, one in enumerate(values):
                result[k * q + j] = _per_cell(one, group)
        return result

    def tilt(self, weights: Array, exponents: Array) -> Array:
        """Sums of these times exponents (terms, q), shape (b, S)."""
        result: Array = None
        for j, group in enumerate(self._groups):
            level = self._level(weights, group)
            below, above = _logarithms(level)
            below *= exponents[0, j]
            above *= exponents[1, j]
            below += above
            if len(exponents) > _TERMS[0]:
                powers = legendre.leg2poly([0.0, 0.0, *exponents[2:, j]])
                level *= 2.0
                level -= 1.0
                np.multiply(level, powers[-1], out=above)
                for power in powers[-2:0:-1]:  # by Horner's rule
                    above += power
                    above *= level
                below += above
                below += powers[0]
            each = _per_cell(below, group)
            result = each if result is None else np.add(result, each, out=result)
        return np.zeros_like(weights) if result is None else result

    def _level(self, weights: Array, group: Group | None) -> Array:
        """F at each value of a column, ascending."""
        masses = weights
        if group is not None:
            _, order, starts = group
            masses = np.add.reduceat(weights[:, order], starts, axis=1)
        level = running_sums(masses, 0.5)
        return np.clip(level, _LEAST, 1.0 - _LEAST, out=level)


def _logarithms(level: Array) -> tuple[Array, Array]:
    """Logarithms of F and of 1 - F, which is not small, thus exact to rounding."""
    above = np.subtract(1.0, level)
    return np.log(level), np.log(above, out=above)


def _polynomials(level: Array) -> list[Array]:
    """Polynomials of Legendre of u = 2 F - 1."""
    u = 2.0 * level - 1.0
    squares = u * u
    return [
        1.5 * squares - 0.5,
        (2.5 * squares - 1.5) * u,
        (4.375 * squares - 3.75) * squares + 0.375,
    ]


def _per_cell(values: Array, group: Group | None) -> Array:
    """Of each cell that of its value, from those of the values of a column."""
    return values if group is None else values[:, group[0]]


class Repeated(Generic[Item]):
    """What is made anew whenever it is iterated over, for it takes much memory."""

    def __init__(self, make: Callable[[], Iterator[Item]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Item]:
        return self._make()


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

    def merged(self, starts: Array) -> "HeldRows":
        """The same rows and laws on fewer cells, each of all from one of ``starts`` to the next."""
        laws = np.add.reduceat(self.laws, starts, axis=1)
        return replace(self, laws=laws, cells=np.searchsorted(starts, self.cells, "right") - 1)


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
    folds: Sequence[HeldRows], means: Array, columns: Sequence[int], cores: int = 1
) -> LearnedCalibration:
    r"""The exponents of the largest mean log density at held-out rows, by Newton's method.

    .. math:: \frac1W \sum_i p_i \Bigl(\theta^T t(x_i, s_i) - \log \sum_s w_s(x_i)
              e^{\theta^T t(x_i, s)}\Bigr) - \frac{|\theta|^2}{2 n},

    where :math:`\theta` holds a and b, t the logarithms of F and 1 - F times the effective support,
    and :math:`s_i` is the cell of the row. It is concave; at the maximum, the mean of t at the rows
    is that under the calibrated laws. The gain is measured at exponents without the fold of a row:
    one step of Newton's method from those of all folds. Polynomials are tried where such a step
    towards them promises a log likelihood of two for each, and kept if they gain more.

    Parameters
    ----------
    folds
        At least two, with rows.
    means
        Of the cells, shape (S, d).
    columns
        Positions of the columns to calibrate.
    cores
        Threads: a fold each.
    """
    if means.shape[1] == 1 and len(means) > _CELLS and (np.diff(means[:, 0]) > 0.0).all():
        starts = np.linspace(0, len(means), _CELLS, endpoint=False).astype(np.int64)
        folds, means = [fold.merged(starts) for fold in folds], means[starts]
    levels, n = Levels(means, columns), sum(len(fold.cells) for fold in folds)
    few, many = (terms * len(columns) for terms in _TERMS)
    features = _features(folds, levels, _TERMS[0])
    simple = _learned(folds, features, levels, means, np.zeros(few), cores)
    if n < _ENOUGH or not columns:
        return simple
    start = np.zeros(many)
    start[:few] = simple.calibration.exponents[:, list(columns)].ravel()
    total = float(sum(fold.weights.sum() for fold in folds))
    features = _features(folds, levels, _TERMS[1])
    gradients, curvatures = _derivatives(folds, features, start, total, n, cores)
    gradient = gradients.sum(axis=0)
    step = np.linalg.solve(curvatures.sum(axis=0), gradient)
    if 0.5 * gradient @ step * n <= _PROMISED * (many - few):
        return simple
    start += step / max(1.0, float(np.abs(step).max()))
    other = _learned(folds, features, levels, means, start, cores)
    return max(simple, other, key=lambda one: one.gain)


def _learned(
    folds: Sequence[HeldRows],
    features: Features,
    levels: Levels,
    means: Array,
    theta: Array,
    cores: int,
) -> LearnedCalibration:
    """The calibration with as many numbers as ``theta`` has, from which the method starts."""
    n = sum(len(fold.cells) for fold in folds)
    total = float(sum(fold.weights.sum() for fold in folds))
    for _ in range(_STEPS):
        before = theta
        gradients, curvatures = _derivatives(folds, features, before, total, n, cores)
        step = np.linalg.solve(curvatures.sum(axis=0), gradients.sum(axis=0))
        # A law has few cells at its ends: a step much longer than 1 leaves what is linear here.
        theta = before + step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() <= _LAST:
            break
    values = []
    for i, fold in enumerate(folds):
        rest = np.delete(np.arange(len(folds)), i)
        apart = np.linalg.solve(curvatures[rest].sum(axis=0), gradients[rest].sum(axis=0))
        values.append(_log_gain(fold, features[i], before + apart))
    weights, units = (
        np.concatenate([getattr(fold, name) for fold in folds]) for name in ("weights", "units")
    )
    gain, std = mean_and_error(np.concatenate(values), weights, units)
    exponents = np.zeros((levels.terms(theta), means.shape[1]))
    exponents[:, levels.columns] = theta.reshape(len(exponents), -1)
    return LearnedCalibration(Calibration(exponents), float(gain), float(std), n)


def _derivatives(
    folds: Sequence[HeldRows], features: Features, theta: Array, total: float, n: int, cores: int
) -> tuple[Array, Array]:
    """Gradient and minus the Hessian of the objective, a part of it for each fold."""

    def of_fold(i: int) -> tuple[Array, Array]:
        fold = folds[i]
        gradient, curvature = np.zeros(len(theta)), np.zeros((len(theta), len(theta)))
        for here, values in features[i]:
            laws = _tilted(fold.laws[here], np.tensordot(theta, values, axes=1))[0]
            at = np.arange(len(laws)), fold.cells[here]
            weights = fold.weights[here] / total
            weighted = values * laws
            mean = weighted.sum(axis=2)
            gradient += (values[:, *at] - mean) @ weights
            weighted *= weights[:, None]
            rows = len(theta), -1
            curvature += weighted.reshape(rows) @ values.reshape(rows).T
            curvature -= (mean * weights) @ mean.T
        part = len(fold.cells) / n
        return gradient - part * theta / n, curvature + part * np.eye(len(theta)) / n

    gradients, curvatures = zip(*parallel_map(of_fold, range(len(folds)), cores), strict=True)
    return np.array(gradients), np.array(curvatures)


def _log_gain(fold: HeldRows, features: FoldFeatures, theta: Array) -> Array:
    """Logarithm of the calibrated over the given density at the rows of a fold, shape (b,)."""
    result = np.empty(len(fold.cells))
    for here, values in features:
        tilt = np.tensordot(theta, values, axes=1)
        seen = tilt[np.arange(len(tilt)), fold.cells[here]]
        result[here] = seen - _tilted(fold.laws[here], tilt)[1]
    return result


def _features(folds: Sequence[HeldRows], levels: Levels, terms: int) -> Features:
    """Features of each fold; those of few rows and cells are made once for all steps."""
    made = [Repeated(partial(_features_of, fold, levels, terms)) for fold in folds]
    numbers = terms * len(levels.columns) * sum(fold.laws.size for fold in folds)
    return [[*one] for one in made] if numbers <= _RETAINED else made


def _features_of(fold: HeldRows, levels: Levels, terms: int) -> Iterator[tuple[slice, Array]]:
    """What the exponents are factors of, at some rows of a fold after the other."""
    for here in _slices(len(fold.cells)):
        values = levels.features(fold.laws[here], terms)
        values *= fold.support[here, None]
        yield here, values


def _tilted(weights: Array, tilt: Array, out: Array | None = None) -> tuple[Array, Array]:
    """Laws w exp(tilt) over their sums, shape (b, S), and the logarithms of these, shape (b,)."""
    top = tilt.max(axis=1, keepdims=True)
    masses = _masses(weights, tilt - top)
    sums = masses.sum(axis=1, keepdims=True)
    if not (sums > _TINY).all():  # far above the others lies a cell without mass
        top = np.max(tilt, axis=1, where=weights > 0.0, initial=-np.inf, keepdims=True)
        masses = _masses(weights, np.minimum(tilt - top, 0.0))
        sums = masses.sum(axis=1, keepdims=True)
    laws = np.divide(masses, sums, out=masses if out is None else out)
    return laws, (top + np.log(sums))[:, 0]


def _masses(weights: Array, exponents: Array) -> Array:
    """Weights times exponentials, in the place of the exponents."""
    np.exp(exponents, out=exponents)
    exponents *= weights
    return exponents


def _slices(n: int, step: int = _ROWS) -> Iterator[slice]:
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
