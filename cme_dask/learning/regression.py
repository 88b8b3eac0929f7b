"""The kernel of x of a mean function, learned by gradients of its held-out squared error."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import LinAlgError
from scipy.optimize import minimize

from cme_dask.display import brief_repr
from cme_dask.kernels import Kernel, Transform
from cme_dask.kernels.evaluator import one_blas_thread, parallel_map
from cme_dask.kernels.lapack import CholeskyFactor
from cme_dask.kernels.length_scales import IGNORED, SCALES
from cme_dask.learning.candidates import (
    FORMS,
    KernelPoint,
    SearchedVariable,
    TrialMemory,
    recalled,
)
from cme_dask.numerics.scoring import column_deviations, law_error

Array = Any

SMOOTHNESS = (2.5, 1.5, 0.5)
"""Matern kernels that are compared with the Gaussian one."""

ROWS = (400, 1000)
"""Rows on which all kernels are learned, and on which the best of them is learned further."""

_STARTS = (0.5, 1.5)  # shared length scales, in standard deviations and for one column
_REGS_0 = (1e-4, 1e-2)  # ridges of the starts
_ROUGHER = 1.35  # times the length scales of the last kernel, from which a rougher one starts
_LOWEST, _HIGHEST = 0.02, 1e3  # length scales
_REGS = (1e-8, 1.0)
# From the starts, of rougher kernels without and with more rows to come, and on more rows.
_STEPS = (20, 8, 4, 6)
_TREND = 1e3  # of the kernel of a trend: its ridge is as good as none
_DIGITS = 2  # of logarithms of length scales
_WORSE = 2e-4  # of the error: less is no loss
_ROUGH = 0.02  # of the logarithm of the error: a kernel that loses more to a smoother one
_FAILED = 1e3  # for the logarithm of an error that cannot be computed
_BLOCK = 256  # rows of a Gram matrix of which the lower triangle is made
_ARRAYS, _COLUMNS, _WORD = 8, 20, 8  # arrays as large as the Gram matrix, and as the rows


class HeldOutError(NamedTuple):
    """The held-out squared error of ridge regression, and its derivatives.

    Attributes
    ----------
    error
        Weighted mean of the squared errors, sum over the targets.
    left, right
        P and Q of the derivatives in the entries of the Gram matrix, P Q^T, which is symmetric;
        shapes (n, p).
    in_reg
        In the ridge.
    residuals
        Targets less what is predicted, shape (n, q).
    """

    error: float
    left: Array
    right: Array
    in_reg: float
    residuals: Array

    def in_length_scales(self, kernel: Kernel, values: Array, cores: int = 1) -> Array:
        """The gradient in those of a kernel, from the lower triangle of its Gram matrix.

        Parameters
        ----------
        kernel
            The kernel.
        values
            The n rows.
        cores
            Threads.
        """

        def of_rows(few: slice) -> list[float]:
            weights = self.left[few] @ self.right[: few.stop].T
            weights[:, : few.start] *= 2.0  # what is above the diagonal
            return kernel.weighted_gradient(values[few], values[: few.stop], weights)

        return np.sum(parallel_map(of_rows, _blocks(len(values)), cores), axis=0)


def _blocks(n: int) -> list[slice]:
    """Some rows after the other, those that the lower triangle has most of first."""
    return [slice(i, min(i + _BLOCK, n)) for i in range(0, n, _BLOCK)][::-1]


def held_out_error(
    gram: Array,
    reg: float,
    targets: Array,
    weights: Array,
    folds: Sequence[slice],
    cores: int = 1,
) -> HeldOutError:
    r"""Squared error of ridge regression at rows whose fold it has not seen, and its gradient.

    .. math:: L = \sum_B \sum_{i \in B} w_i \, |r_i|^2, \qquad
              r_B = (G_{BB})^{-1} (G T)_B, \qquad G = (K + r W^{-1})^{-1}

    with the targets T, the weights W = diag(w) and the folds B.

    Parameters
    ----------
    gram
        K, shape (n, n), of which the lower triangle counts.
    reg
        r > 0.
    targets
        T, shape (n, q).
    weights
        w > 0 of sum 1, shape (n,).
    folds
        Where the rows of each fold are.
    cores
        Threads: a fold each.

    Raises
    ------
    LinAlgError
        If K + r W^-1 is not positive definite as computed.

    Notes
    -----
    r_B are the residuals of a fit to the rows of all other folds, with the same r and W: one
    factorisation serves all of them. With s_B = 2 G_BB^-1 W_B r_B, P_B = G_{:B} s_B and
    Q_B = G_{:B} r_B the gradient in K is sum_B P_B Q_B^T - (sum_B P_B) (G T)^T, made symmetric, and
    that in r its weighted trace, sum_i dL/dK_ii / w_i.
    """
    factor = CholeskyFactor.of(gram, reg / weights)
    q, missed = targets.shape[1], np.empty_like(targets)
    alpha = factor.solve(targets.T)
    # s_B and r_B of all folds, each in rows of its own.
    apart = np.zeros((2, len(folds), q, len(gram)))

    def error_of(k: int) -> float:
        (pull, own), fold = apart[:, k], folds[k]
        block = CholeskyFactor.of(factor.inverse_at(fold))
        residuals = own[:, fold] = block.solve(alpha[:, fold])
        pull[:, fold] = block.solve(2.0 * weights[fold] * residuals)
        missed[fold] = residuals.T
        return float((residuals**2).sum(axis=0) @ weights[fold])

    error = sum(parallel_map(error_of, range(len(folds)), cores))
    product = factor.solve(apart.reshape(-1, len(gram))).T
    left, right = np.hsplit(product, 2)
    total = left.reshape(len(gram), len(folds), q).sum(axis=1)
    left, right = np.hstack([left, total]), np.hstack([right, -alpha.T])
    in_reg = float((left * right).sum(axis=1) @ (1.0 / weights))
    # Made symmetric: (P Q^T + Q P^T) / 2.
    both = np.hstack([0.5 * left, 0.5 * right]), np.hstack([right, left])
    return HeldOutError(error, *both, in_reg, missed)


@dataclass(frozen=True, eq=False)
class MeanKernel:
    """The kernel of x of a mean function of y.

    Attributes
    ----------
    kernel
        The kernel.
    transform
        The mean function is that of transform(y); None: of y.
    reg
        The ridge with it on the rows that it was learned on.
    error
        Held-out squared error there, in variances of the targets: the mean over them.
    absolute_error
        Held-out absolute error of y, in its standard deviations: the mean over its columns.
    law_error
        That of laws of y given what is predicted on held-out folds, see :func:`law_error`.
    evaluations
        Errors that were computed.
    seconds
        What it took.
    """

    kernel: Kernel
    transform: Transform | None
    reg: float
    error: float
    absolute_error: float
    law_error: float
    evaluations: int
    seconds: float

    __repr__ = brief_repr

    @property
    def figures(self) -> dict[str, Any]:
        """All but kernel and transform, which a model keeps elsewhere; plain values, for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)[2:]}


def regression_bytes(rows: int, columns: int) -> int:
    """Peak of what is learned on a row sample of so many rows and columns of x."""
    n = min(rows, ROWS[1])
    return (_ARRAYS * n**2 + _COLUMNS * n * columns) * _WORD


def learn_mean(
    x: Array,
    y: Array,
    weights: Array,
    categorical: tuple[bool, ...],
    folds: Array,
    transforms: Sequence[Transform | None] = (None,),
    memory: TrialMemory | None = None,
    cores: int = 1,
) -> MeanKernel | None:
    """Learn the kernel of x of a ridge regression of y, which stands beside a linear trend.

    On 400 rows the length scales of a Gaussian kernel and the ridge follow the gradient of the
    held-out error (L-BFGS), for each form of coordinates; from the better one, those of Matern
    kernels do, as long as a rougher one is not clearly worse. The best of these kernels goes on
    with 1,000 rows, if there are more than 400. Columns whose length scales end above 50 standard
    deviations are ignored where nothing is lost by that.

    Parameters
    ----------
    x, y
        Rows in random order, shapes (n, d) and (n, q).
    weights
        Of the rows, shape (n,).
    categorical
        Which columns of x are codes of categories.
    folds
        Fold number of each row, shape (n,).
    transforms
        The targets are the columns of transform(y) for one of them, None: those of y; that one
        whose kernel of 400 rows predicts y itself with the smallest absolute error on the 1,000.
    memory
        Of errors that an earlier start of the same fit has computed.
    cores
        Threads of each of them.

    Returns
    -------
    MeanKernel or None
        None where there is nothing to learn: rows of one fold, no column of x or none of y that
        varies, or no error that can be computed.
    """
    begin = time.perf_counter()
    some = np.flatnonzero(weights > 0.0)[: ROWS[1]]
    x, y, weights, folds = x[some], y[some], weights[some] / weights[some].sum(), folds[some]
    descent = _Descent(SearchedVariable(x, weights, categorical, None), memory, cores)
    targets = [_Targets(y, weights, transform) for transform in transforms]
    targets = [each for each in targets if each.scaled.shape[1]]
    if not (descent.free and targets and len(np.unique(folds)) > 1):
        return None

    def absolute(found: tuple[_Targets, _Stage, _Learned]) -> float:
        of, stage, (_, point, reg) = found
        reached = descent.reached(stage, point, reg)
        if reached is None:
            return math.inf
        missed = of.missed(stage.order, reached.residuals)
        return _absolute_error(missed, of.y[stage.order], stage.weights)

    more = len(some) > ROWS[0]
    with one_blas_thread():
        found, first = [], None
        for each in targets:
            stage = descent.stage(each.scaled, folds, ROWS[0])
            learned = descent.learned(stage, _STEPS[2 if more else 1], first)
            first, best = learned[0], min(learned, key=_by_error)
            if more:
                stage = descent.stage(each.scaled, folds, ROWS[1])
            found.append((each, stage, best))
        of, stage, best = found[0] if len(found) == 1 else min(found, key=absolute)
        if more:
            best = descent.moved(stage, best.point, best.reg, _STEPS[3])
        final = descent.simplified(stage, best)
    if memory is not None:
        memory.flush()
    if final is None:
        return None
    point, reached = final
    y, away = y[stage.order], of.missed(stage.order, reached.residuals)
    return MeanKernel(
        descent.variable.kernels.kernel(point),
        of.transform,
        best.reg,
        reached.error / stage.targets.shape[1],
        _absolute_error(away, y, stage.weights),
        law_error(y - away, y, stage.weights),
        descent.evaluations,
        time.perf_counter() - begin,
    )


def _absolute_error(missed: Array, y: Array, weights: Array) -> float:
    """Mean absolute error in standard deviations, mean over the columns that vary."""
    unit = column_deviations(y, weights)
    return float(((weights @ np.abs(missed)) / unit)[np.isfinite(unit)].mean())


class _Targets:
    """What a regression predicts: columns of y, or of transform(y), in standard deviations.

    Parameters
    ----------
    y, weights, transform
        As in :func:`learn_mean`.

    Attributes
    ----------
    scaled
        The targets: those columns that vary.
    """

    def __init__(self, y: Array, weights: Array, transform: Transform | None) -> None:
        self.y, self.transform = y, transform
        self._values = y if transform is None else transform(y)
        spread = column_deviations(self._values, weights)
        self._varying = np.isfinite(spread)
        self._unit = spread[self._varying]
        self.scaled = (self._values - weights @ self._values)[:, self._varying] / self._unit

    def missed(self, order: Array, residuals: Array) -> Array:
        """What is missed of y at rows in this order, from residuals of the targets."""
        predicted = self._values[order]
        predicted[:, self._varying] -= residuals * self._unit
        if self.transform is not None:
            predicted = self.transform.inverse()(predicted)
        missed: Array = self.y[order] - predicted
        return missed


class _Stage(NamedTuple):
    """Some rows in the order of their folds; no other stage of the descent has its number."""

    number: int
    order: Array
    weights: Array
    folds: list[slice]
    targets: Array
    values: dict[str, Array]
    trend: Array


def _log_error(stage: _Stage, found: HeldOutError) -> float:
    """The logarithm of the mean over the targets."""
    return math.log(found.error / stage.targets.shape[1])


class _Learned(NamedTuple):
    """The logarithm of an error, and where it is reached."""

    error: float
    point: KernelPoint
    reg: float


def _by_error(learned: _Learned) -> float:
    return learned.error


class _Descent:
    """Logarithms of length scales and of the ridge, moved along gradients of logarithms of errors.

    Parameters
    ----------
    variable
        Rows of x. Constant columns stay ignored.
    memory
        Of errors and gradients.
    cores
        Threads of each of them on many rows.
    """

    def __init__(
        self, variable: SearchedVariable, memory: TrialMemory | None = None, cores: int = 1
    ) -> None:
        self.variable, self.evaluations, self._memory = variable, 0, memory
        self._cores = cores
        self._stages = 0
        coded = np.array(variable.categorical)
        free = [j for j in range(len(coded)) if j not in variable.constant]
        # As the parameters of a kernel have them: numeric columns first.
        self.free = sorted(free, key=lambda j: bool(coded[j]))
        self._kernels = variable.kernels

    def stage(self, targets: Array, folds: Array, count: int) -> _Stage:
        """The first ``count`` rows."""
        order = np.argsort(folds[:count], kind="stable")
        weights = self.variable.weights[order] / self.variable.weights[order].sum()
        _, starts = np.unique(folds[order], return_index=True)
        edges = [*starts.tolist(), len(order)]
        slices = [slice(*edges[i : i + 2]) for i in range(len(starts))]
        values = {form: each[order] for form, each in self.variable.values.items()}
        t = values[FORMS[0]][:, [not coded for coded in self.variable.categorical]]
        trend = _TREND * (1.0 + t @ t.T)
        self._stages += 1
        return _Stage(self._stages, order, weights, slices, targets[order], values, trend)

    def learned(self, stage: _Stage, steps: int, near: _Learned | None = None) -> list[_Learned]:
        """A Gaussian kernel, then rougher ones, in so many steps each, if they are hardly worse.

        The first one is moved from near another one of similar targets, or from the best of some
        starts for each form of coordinates.
        """
        found = [] if near is None else [self.moved(stage, near.point, near.reg, _STEPS[0])]
        for form in self.variable.forms if near is None else ():
            starts = [(self.variable.start(form, s), reg) for s, reg in product(_STARTS, _REGS_0)]
            start = min(starts, key=lambda at: self.error(stage, *at)[0])
            found.append(self.moved(stage, *start, _STEPS[0]))
        last = min(found, key=_by_error)
        learned = [last]
        categorical = self.variable.categorical
        rougher = [1.0 if coded else _ROUGHER for coded in categorical]
        for smoothness in () if all(categorical) else SMOOTHNESS:
            point = replace(last.point.scaled(rougher), smoothness=smoothness)
            before, last = last.error, self.moved(stage, point, last.reg, steps)
            learned.append(last)
            if last.error > before + _ROUGH:
                break
        return learned

    def reached(self, stage: _Stage, point: KernelPoint, reg: float) -> HeldOutError | None:
        """The error and the residuals; None if it cannot be computed."""
        self.evaluations += 1
        return self._evaluated(stage, point, reg)

    def _evaluated(self, stage: _Stage, point: KernelPoint, reg: float) -> HeldOutError | None:
        values, kernel = stage.values[point.form], self._kernels.inner(point)
        gram, cores = np.zeros_like(stage.trend), self._threads(stage)

        def make(few: slice) -> None:
            rest = slice(0, few.stop)
            gram[few, rest] = kernel(values[few], values[rest])
            gram[few, rest] += stage.trend[few, rest]

        parallel_map(make, _blocks(len(values)), cores)
        with suppress(LinAlgError):
            found = held_out_error(gram, reg, stage.targets, stage.weights, stage.folds, cores)
            return found if 0.0 < found.error < math.inf else None
        return None

    def _threads(self, stage: _Stage) -> int:
        """Few rows take less time than threads take to begin."""
        return self._cores if len(stage.order) > 2 * _BLOCK else 1

    def error(self, stage: _Stage, point: KernelPoint, reg: float) -> tuple[float, Array]:
        """The logarithm of the error, and its gradient in the logarithms."""
        self.evaluations += 1  # also those that an earlier start has made: a model names them
        key = stage.number, point, reg
        return recalled(self._memory, key, lambda: self._error(stage, point, reg))

    def _error(self, stage: _Stage, point: KernelPoint, reg: float) -> tuple[float, Array]:
        failed, found = (_FAILED, np.zeros(len(self.free) + 1)), self._evaluated(stage, point, reg)
        if found is None:
            return failed
        slopes, scales, values = np.zeros(len(point.scales)), point.scales, stage.values[point.form]
        slopes[self._kernels.parameters(point)] = found.in_length_scales(
            self._kernels.inner(point), values, self._threads(stage)
        )
        gradient = np.append((slopes * scales)[self.free], found.in_reg * reg) / found.error
        if not np.isfinite(gradient).all():
            return failed
        return _log_error(stage, found), gradient

    def moved(self, stage: _Stage, point: KernelPoint, reg: float, steps: int) -> _Learned:
        """After some steps from a point on."""

        def at(vector: Array) -> tuple[KernelPoint, float]:
            scales = np.array(point.scales)
            scales[self.free] = np.exp(vector[:-1])
            return replace(point, scales=tuple(scales.tolist())), float(np.exp(vector[-1]))

        scales = np.clip(np.array(point.scales)[self.free], _LOWEST, _HIGHEST)
        bounds = [(_LOWEST, _HIGHEST)] * len(self.free) + [_REGS]
        found = minimize(
            lambda vector: self.error(stage, *at(vector)),
            np.log(np.append(scales, np.clip(reg, *_REGS))),
            jac=True,
            method="L-BFGS-B",
            bounds=np.log(bounds),
            options={"maxiter": steps, "maxfun": 2 * steps, "ftol": 1e-4, "gtol": 1e-3},
        )
        return _Learned(float(found.fun), *at(found.x))

    def rounded(self, point: KernelPoint) -> KernelPoint:
        """With rounded scales, on which the last bits of the rows have no influence."""
        scales = [
            scale if scale >= IGNORED else math.exp(round(math.log(scale), _DIGITS))
            for scale in point.scales
        ]
        return replace(point, scales=tuple(scales))

    def simplified(
        self, stage: _Stage, learned: _Learned
    ) -> tuple[KernelPoint, HeldOutError] | None:
        """Without the columns of long scales, if nothing is lost by that; one column stays.

        None if no error can be computed.
        """
        error, point, reg = learned
        point = self.rounded(point)
        long = [j for j in self.free if SCALES[1] <= point.scales[j] < IGNORED]
        if long and len(long) < len(point.free):
            scales = [IGNORED if j in long else scale for j, scale in enumerate(point.scales)]
            simple = replace(point, scales=tuple(scales))
            found = self.reached(stage, simple, reg)
            if found is not None and _log_error(stage, found) <= error + _WORSE:
                return simple, found
        full = self.reached(stage, point, reg)
        return None if full is None else (point, full)
