"""Learning a kernel and a ridge of classes by the Rademacher bound of Hsu, Nock and Ramos (2018).

The objective (12) of rows, its gradient, and Algorithm 1: steps on mini-batches with early stopping
by the log loss of rows held out. The objective is one: at parameters learned with it, it bounds
nothing.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, eigh

from cme_dask.display import brief_repr
from cme_dask.errors import DataError
from cme_dask.kernels import Kernel
from cme_dask.learning.autodiff import optax_update
from cme_dask.learning.candidates import TuningProgress
from cme_dask.numerics.labels import learn_label_calibration, nearest_shares, positive
from cme_dask.numerics.reduction import MemoryPlan

log = logging.getLogger("cme_dask.run")

Array = Any

OPTIMIZERS = ("adam", "gradient")

_DECAYS, _TINY = (0.9, 0.999), 1e-8  # of Adam, as by its authors
_RANGE = 14.0  # logarithms move by as much at most: a factor of a million
_HALVINGS = 20  # in a row, after which learning fails
_SHARES = (0.0, 1.0 / 3.0, 2.0 / 3.0, 1.0)  # of the way to the learned parameters
_BETTER = 1e-4  # by which the held-out loss must fall, relative to it, to count as lower


# The objective and its gradient


class LabelledRows(NamedTuple):
    """Rows with labels.

    Attributes
    ----------
    x
        Shape (n, d).
    codes
        Labels as whole numbers from 0 on, shape (n,).
    weights
        Non-negative, shape (n,).
    """

    x: Array
    codes: Array
    weights: Array

    def shared(self, count: int) -> tuple["LabelledRows", "LabelledRows"]:
        """The first ``count`` rows, and the others."""
        first, rest = (LabelledRows(*(v[at] for v in self)) for at in np.s_[:count, count:])
        return first, rest


class Bound(NamedTuple):
    """The objective of rows, and its derivatives.

    Attributes
    ----------
    objective
        q = loss + multiplier r, (12), or (13) with rows for validation.
    loss
        The mean of (7).
    complexity
        r of (11).
    gradient
        In the parameters of the kernel, and last in the ridge.
    """

    objective: float
    loss: float
    complexity: float
    gradient: Array


def bound(
    kernel: Kernel,
    reg: float,
    rows: LabelledRows,
    labels: int,
    *,
    multiplier: float,
    epsilon: float,
    validation: LabelledRows | None = None,
) -> Bound:
    r"""The objective (12) and its gradient.

    .. math:: q = \sum_i v_i \bigl(-\log [f_{y_i}(x_i)]_\epsilon^1\bigr)
              + \tau \sqrt{\operatorname{tr}(V^T K V) \max_i k(x_i, x_i)}

    where :math:`f(x) = V^T k(X, x)` and :math:`V = S (S K S + r)^{-1} S Y`, with one column of Y
    for each label and S the roots of the weights w, which have sum 1: for equal weights
    :math:`V = (K + n r)^{-1} Y`.

    Parameters
    ----------
    kernel, reg
        The kernel, and the ridge r = lambda.
    rows
        The rows that f is trained on.
    labels
        Their number K.
    multiplier
        tau.
    epsilon
        Of the clipped logarithm (7), in (0, 1).
    validation
        Rows of the loss, with weights v, (13); default those of the training.

    Raises
    ------
    LinAlgError
        If the regularised Gram matrix is not positive definite as computed.

    Notes
    -----
    With U = A^-1 S K(X, X_v) D, D the derivatives of the loss in f, and T = A^-1 S K V, where
    A = S K S + r and S Z = V, the gradient of the loss in K(X_v, X) is D V^T, that in K is
    -S U V^T, and in r it is -<U, Z>; those of tr(V^T K V) are V V^T - 2 S T V^T and -2 <T, Z>.
    Source: Hsu, Nock and Ramos (2018), ECML PKDD, Algorithm 1. The radius max k(x, x) of stationary
    kernels is their value at 0; for kernels without a bound it is the largest one of these rows.
    """
    x, held = rows.x, rows if validation is None else validation
    root = np.sqrt(rows.weights / rows.weights.sum())[:, None]
    gram = np.asarray(kernel(x, x))
    regularised = root * gram * root.T
    regularised[np.diag_indices(len(x))] += reg
    factor = cho_factor(regularised, lower=True, overwrite_a=True)
    z = cho_solve(factor, root * np.eye(labels)[rows.codes])
    v = root * z
    fitted = gram @ v
    cross, values = gram, fitted
    if validation is not None:
        cross = np.asarray(kernel(held.x, x))
        values = cross @ v
    loss, slope = clipped_loss(values, held, epsilon)
    diagonal = np.asarray(kernel.diagonal(x))
    widest = int(diagonal.argmax())
    radius, square = float(diagonal[widest]), float((v * fitted).sum())
    complexity = math.sqrt(radius * max(square, 0.0))
    # Half of tau r over each of its two factors, which are squared.
    by_square, by_radius = (
        0.5 * multiplier * complexity / each if each > 0.0 else 0.0 for each in (square, radius)
    )
    u = cho_solve(factor, root * (cross.T @ slope))
    t = cho_solve(factor, root * fitted)
    in_gram = by_square * v - root * (u + 2.0 * by_square * t)
    in_reg = -float(((u + 2.0 * by_square * t) * z).sum())
    if validation is None:
        in_kernel = np.array(kernel.weighted_gradient(x, x, (in_gram + slope) @ v.T))
    else:
        in_kernel = np.array(kernel.weighted_gradient(x, x, in_gram @ v.T))
        in_kernel += kernel.weighted_gradient(held.x, x, slope @ v.T)
    point = x[widest : widest + 1]
    in_kernel += kernel.weighted_gradient(point, point, np.array([[by_radius]]))
    return Bound(loss + multiplier * complexity, loss, complexity, np.append(in_kernel, in_reg))


def clipped_loss(values: Array, rows: LabelledRows, epsilon: float) -> tuple[float, Array]:
    """The mean of (7) at values f(x) of all labels, shape (n, K), and its slope in them."""
    here, share = np.arange(len(values)), rows.weights / rows.weights.sum()
    own = values[here, rows.codes]
    slope = np.zeros_like(values)
    inside = (own > epsilon) & (own < 1.0)
    slope[here, rows.codes] = np.where(inside, -share / np.where(inside, own, 1.0), 0.0)
    return float(share @ -np.log(np.clip(own, epsilon, 1.0))), slope


def held_out_loss(
    kernel: Kernel, reg: float, rows: LabelledRows, held: LabelledRows, labels: int
) -> float:
    """Log loss of the positive probabilities at rows held out, of a fit to others."""
    root = np.sqrt(rows.weights / rows.weights.sum())[:, None]
    regularised = root * np.asarray(kernel(rows.x, rows.x)) * root.T
    regularised[np.diag_indices(len(rows.x))] += reg
    try:
        factor = cho_factor(regularised, lower=True, overwrite_a=True)
    except (LinAlgError, ValueError):
        return math.inf
    v = root * cho_solve(factor, root * np.eye(labels)[rows.codes])
    signed = np.asarray(kernel(held.x, rows.x)) @ v
    if not np.isfinite(signed).all():
        return math.inf
    shares = positive(nearest_shares(signed), len(rows.x))[np.arange(len(held.x)), held.codes]
    return float(held.weights / held.weights.sum() @ -np.log(shares))


class Shrunk(NamedTuple):
    """A kernel on the way from one to another, and what it is worth.

    Attributes
    ----------
    share
        Of the way.
    kernel, reg
        The kernel, and its best ridge.
    loss
        Log loss of calibrated leave-one-out estimates.
    """

    share: float
    kernel: Kernel
    reg: float
    loss: float


def shrunk(first: Kernel, learned: Kernel, rows: LabelledRows, labels: int, regs: Array) -> Shrunk:
    """The best of some kernels between two with the same parameters, in their logarithms.

    Steps on many length scales fit noise where rows are few: between the first kernel and the
    learned one lies one that is better than both.

    Parameters
    ----------
    first, learned
        The kernels.
    rows
        Rows of the leave-one-out estimates, which take the cube of their number.
    labels
        Number of labels.
    regs
        Ridges of which each kernel takes its best.
    """
    values, ends = np.array(first.parameters), np.array(learned.parameters)
    moved = (values > 0.0) & (ends != values)
    result = []
    for share in _SHARES if moved.any() else (1.0,):
        between = ends.copy()
        between[moved] = values[moved] ** (1.0 - share) * ends[moved] ** share
        kernel = learned if share == 1.0 else first.with_parameters(between.tolist())
        losses = left_out_losses(kernel, rows, labels, regs)
        best = int(losses.argmin())
        result.append(Shrunk(share, kernel, float(regs[best]), float(losses[best])))
    return min(result, key=lambda each: each.loss)


def left_out_losses(kernel: Kernel, rows: LabelledRows, labels: int, regs: Array) -> Array:
    """By ridge the log loss of calibrated estimates at rows whose fit has not seen them.

    Parameters
    ----------
    kernel, rows, labels, regs
        As of :func:`shrunk`.
    """
    weights = rows.weights / rows.weights.sum()
    root, targets = np.sqrt(weights)[:, None], np.eye(labels)[rows.codes]
    gram = root * np.asarray(kernel(rows.x, rows.x)) * root.T
    if not np.isfinite(gram).all():
        return np.full(len(regs), math.inf)
    lam, vectors = eigh(gram, overwrite_a=True)
    projected, squares = vectors.T @ (root * targets), vectors**2
    losses = []
    for reg in regs:
        inverse = 1.0 / (np.maximum(lam, 0.0) + reg)
        # (G S Y)_i / G_ii are the residuals of S Y without row i, with G = (S K S + r)^-1.
        residuals = (vectors @ (inverse[:, None] * projected)) / (squares @ inverse)[:, None]
        _, each = learn_label_calibration(targets - residuals / root, rows.codes, weights)
        losses.append(float(weights @ each))
    return np.array(losses)


# Algorithm 1


@dataclass(frozen=True)
class BoundOptions:
    """How a kernel is learned by the bound.

    Attributes
    ----------
    multiplier
        tau, or None for 4 e over the root of the number of rows of a batch that f is trained on.
    epsilon
        Of the clipped logarithm.
    validation
        Share of each batch on which the loss is taken, (13); 0 for all of it, (12).
    optimizer, rate
        ``adam`` or ``gradient``, and the length of its steps; or an optimiser of optax, and the
        factor of its steps.
    steps
        The largest number of steps.
    patience, every
        Learning ends when the held-out loss has not fallen at so many evaluations, one at each of
        these steps.
    learn_reg
        Whether the ridge is learned.
    """

    multiplier: float | None
    epsilon: float
    validation: float
    optimizer: Any
    rate: float
    steps: int
    patience: int
    every: int
    learn_reg: bool


@dataclass(frozen=True, eq=False)
class LearningState:
    """Where learning has come to: all that later steps depend on.

    Attributes
    ----------
    vector
        What is learned, see :class:`Coordinates`, shape (p,).
    before
        The same before the last step.
    moment, square
        Moving averages of the gradient and of its square, shape (p,).
    leaves
        The state of an optimiser of optax.
    rate
        Length of the steps, which is halved after a gradient that is not finite.
    step, averaged
        Steps so far, and gradients in the averages.
    epoch, batch
        The epoch, and the number of the next batch in it.
    halved, failed
        How often the step was halved, altogether and in a row.
    best, best_loss, stale
        The parameters with the lowest held-out loss, that loss, and evaluations since.
    history
        By step: the step, objective, loss, complexity, and the held-out loss or NaN, shape (k, 5).
    """

    vector: Array
    before: Array
    moment: Array
    square: Array
    rate: float
    leaves: tuple[Array, ...] = ()
    step: int = 0
    averaged: int = 0
    epoch: int = 0
    batch: int = 0
    halved: int = 0
    failed: int = 0
    best: Array = None
    best_loss: float = math.inf
    stale: int = 0
    history: Array = field(default_factory=lambda: np.empty((0, 5)))

    @classmethod
    def start(cls, vector: Array, rate: float) -> "LearningState":
        """Before the first step."""
        zero = np.zeros(len(vector))
        return cls(vector, vector, zero, zero, rate)

    def stepped(self, gradient: Array, optimizer: Any) -> "LearningState":
        """After a step along a gradient in the vector.

        Adam in its ten lines: SciPy has no optimiser of noisy gradients.
        """
        count, moment, square = self.averaged + 1, self.moment, self.square
        leaves = self.leaves
        if not isinstance(optimizer, str):
            update, leaves = optax_update(optimizer, leaves, gradient, self.vector)
            gradient = -update
        elif optimizer == "adam":
            moment = _DECAYS[0] * self.moment + (1.0 - _DECAYS[0]) * gradient
            square = _DECAYS[1] * self.square + (1.0 - _DECAYS[1]) * gradient**2
            unbiased = [
                average / (1.0 - decay**count)
                for average, decay in zip((moment, square), _DECAYS, strict=True)
            ]
            gradient = unbiased[0] / (np.sqrt(unbiased[1]) + _TINY)
        return replace(
            self,
            vector=self.vector - self.rate * gradient,
            before=self.vector,
            moment=moment,
            square=square,
            leaves=leaves,
            averaged=count,
            failed=0,
        )

    def halved_step(self) -> "LearningState":
        """Half-way back to where the last step began, with steps of half the length."""
        return replace(
            self,
            vector=0.5 * (self.vector + self.before),
            rate=0.5 * self.rate,
            halved=self.halved + 1,
            failed=self.failed + 1,
        )


@dataclass(frozen=True, eq=False)
class BoundLearning:
    """What was learned.

    Attributes
    ----------
    kernel, reg
        The kernel, and the ridge.
    loss
        Log loss on the rows held out; NaN without any.
    steps
        Steps that were made.
    halved
        Of these, those with a gradient that was not finite.
    history
        By step: the step, the objective (12) or (13) on its batch, its loss, its complexity r, and
        the held-out loss where it was computed, else NaN. Shape (k, 5).
    seconds
        What it took.
    share
        Of the way from the first parameters to the learned ones, in logarithms.
    memory
        Predicted peak of learning, where a fit learned.
    """

    kernel: Kernel
    reg: float
    loss: float
    steps: int
    halved: int
    history: Array
    seconds: float
    share: float = 1.0
    memory: MemoryPlan | None = None

    __repr__ = brief_repr


class Coordinates(Protocol):
    """Kernels and ridges as a vector that steps may change at will.

    Attributes
    ----------
    start
        The vector with which learning begins, shape (p,).
    reach
        How far each coordinate may move, shape (p,) or one number.
    """

    start: Array
    reach: Any

    def at(self, vector: Array) -> tuple[Kernel, float]:
        """The kernel and the ridge."""

    def bound(
        self, vector: Array, rows: LabelledRows, step: int, **options: Any
    ) -> tuple[Bound, Array]:
        """The objective of rows at a step, and its gradient in the vector; options of ``bound``."""


class KernelCoordinates:
    """Logarithms of the positive parameters of a kernel and, if it is learned, of the ridge.

    Parameters that are 0 stay so.
    """

    reach = _RANGE

    def __init__(self, kernel: Kernel, reg: float, *, learn_reg: bool) -> None:
        self.kernel, self._values = kernel, np.append(kernel.parameters, reg)
        self._free = self._values > 0.0
        self._free[-1] = learn_reg
        self.start = np.log(self._values[self._free])

    def at(self, vector: Array) -> tuple[Kernel, float]:
        """The kernel and the ridge."""
        values = self._values.copy()
        values[self._free] = np.exp(vector)
        return self.kernel.with_parameters(values[:-1].tolist()), float(values[-1])

    def bound(
        self, vector: Array, rows: LabelledRows, step: int, **options: Any
    ) -> tuple[Bound, Array]:
        """The objective, and its gradient in the logarithms."""
        kernel, reg = self.at(vector)
        result = self._bound(kernel, reg, rows, options)
        return result, (result.gradient * np.append(kernel.parameters, reg))[self._free]

    def _bound(
        self, kernel: Kernel, reg: float, rows: LabelledRows, options: dict[str, Any]
    ) -> Bound:
        return bound(kernel, reg, rows, **options)


Batches = Callable[[int, int], Iterator[tuple[int, LabelledRows]]]
"""Batches of an epoch from a number on, each with its number."""

Evaluate = Callable[[Kernel, float], float]
"""The held-out loss of a kernel and a ridge."""


def learn_by_bound(
    kernel: Kernel,
    reg: float,
    labels: int,
    batches: Batches,
    options: BoundOptions,
    *,
    held_out: Evaluate | None = None,
    state: LearningState | None = None,
    save: Callable[[LearningState], None] | None = None,
    callback: Callable[[TuningProgress], None] | None = None,
    coordinates: Callable[..., Coordinates] = KernelCoordinates,
) -> BoundLearning:
    """Algorithm 1: steps on batches, in coordinates of the kernel and of the ridge.

    Parameters
    ----------
    kernel, reg
        Where learning begins.
    labels
        Number of labels.
    batches
        Mini-batches, the same ones at each call.
    options
        See :class:`BoundOptions`.
    held_out
        The held-out loss, or None to take all steps and the last parameters.
    state
        Where an interrupted run had come to.
    save
        Called with the state at every evaluation.
    callback
        Called with how far it is.
    coordinates
        The coordinates of a kernel and a ridge.

    Raises
    ------
    DataError
        If gradients stay infinite or NaN.
    """
    begin, points = time.perf_counter(), coordinates(kernel, reg, learn_reg=options.learn_reg)
    start = points.start
    if state is None:
        state = LearningState.start(start, options.rate)
        if held_out is not None:
            state = replace(state, best=start, best_loss=held_out(*points.at(start)))
    while len(start) and state.step < options.steps and state.stale < options.patience:
        before = state.step
        for number, rows in batches(state.epoch, state.batch):
            state = _step(replace(state, batch=number + 1), rows, labels, points, options)
            low, high = start - points.reach, start + points.reach
            state = replace(state, vector=np.clip(state.vector, low, high))
            if state.step % options.every == 0 or state.step == options.steps:
                if held_out is not None:
                    state = _evaluated(state, held_out(*points.at(state.vector)))
                if save is not None:
                    save(state)
                if callback is not None:
                    score = state.best_loss if held_out is not None else None
                    losses = () if held_out is None else (float(state.history[-1, -1]),)
                    callback(
                        TuningProgress("learning", state.step, options.steps, score, losses=losses)
                    )
            if state.step == options.steps or state.stale >= options.patience:
                break
        else:
            if state.step == before and state.batch == 0:
                raise DataError("there are no rows to learn the kernel from: give more rows")
            state = replace(state, epoch=state.epoch + 1, batch=0)
    best = state.vector if state.best is None else state.best
    loss = state.best_loss if held_out is not None else math.nan
    seconds = time.perf_counter() - begin
    return BoundLearning(*points.at(best), loss, state.step, state.halved, state.history, seconds)


def _step(
    state: LearningState,
    rows: LabelledRows,
    labels: int,
    points: Coordinates,
    options: BoundOptions,
) -> LearningState:
    """The state after the step of a batch."""
    validation, train = None, rows
    if options.validation:
        count = min(max(round(options.validation * len(rows.x)), 1), len(rows.x) - 1)
        validation, train = rows.shared(count)
    tau = options.multiplier
    tau = 4.0 * math.e / math.sqrt(len(train.x)) if tau is None else tau
    numbers, state = (math.nan,) * 3, replace(state, step=state.step + 1)
    try:
        with np.errstate(all="ignore"):  # what is not finite is dealt with here
            result, gradient = points.bound(
                state.vector,
                train,
                state.step,
                labels=labels,
                multiplier=tau,
                epsilon=options.epsilon,
                validation=validation,
            )
        numbers = result[:3]
        usable = bool(np.isfinite(gradient).all() and np.isfinite(numbers).all())
    except DataError:  # such as that JAX is not installed
        raise
    except (LinAlgError, ValueError):  # a factorisation that failed, or of what is not finite
        usable = False
    if usable:
        state = state.stepped(gradient, options.optimizer)
    else:
        state = state.halved_step()
        log.warning(
            "learning by the bound: the gradient of step %d is not finite, so the step before it "
            "is halved, and steps have the length %.2g from now on",
            state.step,
            state.rate,
        )
        if state.failed >= _HALVINGS:
            kernel, reg = points.at(state.vector)
            raise DataError(
                f"the gradient of the bound was not finite {_HALVINGS} times in a row, at "
                f"{kernel!r} and reg={reg:.2g}: give another kernel to begin with, or a larger reg"
            )
    line = np.array([[state.step, *numbers, math.nan]])
    return replace(state, history=np.concatenate([state.history, line]))


def _evaluated(state: LearningState, loss: float) -> LearningState:
    """The state with a held-out loss."""
    history = state.history.copy()
    history[-1, -1] = loss
    better = loss < state.best_loss
    if np.isfinite(state.best_loss):
        better = loss < state.best_loss - _BETTER * abs(state.best_loss)
    if better:
        return replace(state, best=state.vector, best_loss=loss, stale=0, history=history)
    return replace(state, stale=state.stale + 1, history=history)
