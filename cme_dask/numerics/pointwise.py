"""Non-negative on landmarks: a projection onto a polyhedron, and its solver."""

import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from cme_dask.numerics.problem import JointProblem, Regularization, SolverInfo, iterate

# Interior point method for a projection onto a polyhedron with two-sided constraints


Array = Any

_MAX_ITERATIONS = 100
_TO_THE_BOUNDARY = 0.99  # share of the way that a step goes


class Polyhedron(Protocol):
    """Minimise |F|^2 / 2 + <B, F> subject to 1 + M_Y F M_X^T >= 0."""

    @property
    def linear(self) -> Array:
        """B, shape (k_Y, k_X)."""

    @property
    def y(self) -> Array:
        """M_Y, shape (s_Y, k_Y)."""

    @property
    def x(self) -> Array:
        """M_X, shape (s_X, k_X)."""

    def push(self, point: Array) -> Array:
        """M_Y F M_X^T."""

    def pull(self, multipliers: Array) -> Array:
        """M_Y^T U M_X."""

    def residuals(self, point: Array, multipliers: Array) -> tuple[float, float, float]:
        """What the iteration is to bring below its tolerance."""


def interior_point(
    program: Polyhedron, tol: float, max_iterations: int
) -> tuple[Array, Array, int]:
    """F, multipliers U >= 0 and the number of iterations of Mehrotra's predictor-corrector method.

    Nocedal and Wright, "Numerical optimization" (2006), algorithm 16.4. F = 0 is feasible, and so
    are all that follow: the slack Z and 1 + M F part by rounding alone. To correct that would
    divide it by Z.

    Parameters
    ----------
    program
        The program.
    tol
        Residual at which the iteration ends.
    max_iterations
        At most so many, and at most 100.
    """
    state, steps = iterate(_InteriorPoint(program, tol), min(max_iterations, _MAX_ITERATIONS))
    return state.point, state.multipliers, steps - state.stuck


@dataclass(frozen=True, eq=False)
class _Interior:
    """F, the slack Z > 0, U > 0, and whether rounding allows no other step."""

    point: Array
    slack: Array
    multipliers: Array
    stuck: bool = False


class _InteriorPoint:
    """Mehrotra's method as an :class:`Iteration`."""

    def __init__(self, program: Polyhedron, tol: float) -> None:
        self._program, self._tol = program, tol
        self._squares = _squares(program.y), _squares(program.x)

    def init(self) -> _Interior:
        program = self._program
        slack = np.ones((len(program.y), len(program.x)))
        multipliers = np.full(slack.shape, (program.linear**2).sum() / (2 * slack.size))
        return _Interior(np.zeros(program.linear.shape), slack, multipliers)

    def done(self, state: _Interior) -> bool:
        residuals = self._program.residuals(state.point, state.multipliers)
        return state.stuck or max(residuals) <= self._tol

    def step(self, state: _Interior) -> _Interior:
        slack, multipliers = state.slack, state.multipliers
        try:
            factor = _factor(self._squares[0], multipliers / slack, self._squares[1])
        except LinAlgError:  # the weights span more than rounding allows
            return replace(state, stuck=True)
        newton = _Newton(self._program, state.point, slack, multipliers, factor)
        product = slack * multipliers
        middle = float(product.mean())
        _, along, towards = newton.step(product)
        length = newton.length(along, towards)
        reached = ((slack + length * along) * (multipliers + length * towards)).mean()
        aim = middle * (float(reached) / middle) ** 3
        step, along, towards = newton.step(product + along * towards - aim)
        length = newton.length(along, towards) * _TO_THE_BOUNDARY
        return _Interior(
            state.point + length * step, slack + length * along, multipliers + length * towards
        )


@dataclass(frozen=True, eq=False)
class _Newton:
    """The optimality system, linear around a point."""

    program: Polyhedron
    point: Array
    slack: Array
    multipliers: Array
    factor: Any

    def step(self, product: Array) -> tuple[Array, Array, Array]:
        """Steps of F, Z and U to stationarity, and of Z U by -``product``."""
        dual = self.point + self.program.linear - self.program.pull(self.multipliers)
        right = -dual - self.program.pull(product / self.slack)
        step = cho_solve(self.factor, right.ravel(), check_finite=False).reshape(right.shape)
        along = self.program.push(step)
        return step, along, (-product - self.multipliers * along) / self.slack

    def length(self, along: Array, towards: Array) -> float:
        """The largest part of a step, at most 1, after which Z and U are not negative."""
        return min(_length(self.slack, along), _length(self.multipliers, towards))


def _squares(side: Array) -> Array:
    """Products of all pairs of columns, shape (s, k^2)."""
    return (side[:, :, None] * side[:, None, :]).reshape(len(side), -1)


def _factor(squares_y: Array, weights: Array, squares_x: Array) -> Any:
    """Cholesky factor of I + M^T diag(weights) M with M = M_Y (x) M_X.

    An entry is a sum over landmarks of a product of M_Y, a product of M_X and a weight.
    """
    k_y, k_x = (round(np.sqrt(squares.shape[1])) for squares in (squares_y, squares_x))
    system = (squares_y.T @ (weights @ squares_x)).reshape(k_y, k_y, k_x, k_x)
    system = system.transpose(0, 2, 1, 3).reshape(k_y * k_x, k_y * k_x)
    system.flat[:: k_y * k_x + 1] += 1.0
    return cho_factor(system, lower=True, overwrite_a=True, check_finite=False)


def _length(values: Array, step: Array) -> float:
    falling = step < 0.0
    with np.errstate(over="ignore"):
        return float(min(1.0, (-values[falling] / step[falling]).min(initial=np.inf)))


# Non-negative on landmarks (joint paper, later version): a projection onto a polyhedron


_DENSE = 6000  # unknowns up to which a system of their size is factorised
_CHECK = 25  # iterations of ADMM between residuals
_RELAXATION = 1.6
_BALANCE = 2.0  # the penalty moves when one residual is so many times the other


@dataclass(frozen=True, eq=False)
class LandmarkProgram:
    """Minimise |F|^2 / 2 + <B, F> subject to R = 1 + M_Y F M_X^T >= 0.

    The program of G with F = G sqrt(D), B = A / sqrt(D) and M = Phi / sqrt(lam + r) on each side,
    Phi the functions at the landmarks: its quadratic form is the identity.

    Attributes
    ----------
    linear
        B, shape (k_Y, k_X).
    y, x
        M_Y and M_X, shapes (s_Y, k_Y) and (s_X, k_X).
    unit
        sqrt(D), shape (k_Y, k_X).
    """

    linear: Array
    y: Array
    x: Array
    unit: Array

    @classmethod
    def of(
        cls, problem: JointProblem, values_x: Array, values_y: Array, reg: Regularization
    ) -> "LandmarkProgram":
        """Of functions at landmarks, with a two-sided ridge."""
        root_x = np.sqrt(problem.eigenvalues_x + reg.x)
        root_y = np.sqrt(problem.eigenvalues_y + reg.y)
        unit = np.outer(root_y, root_x)
        return cls(problem.linear / unit, values_y / root_y, values_x / root_x, unit)

    def ratio(self, point: Array) -> Array:
        """R at the landmarks, shape (s_Y, s_X)."""
        return 1.0 + self.push(point)

    def push(self, point: Array) -> Array:
        """M_Y F M_X^T, shape (s_Y, s_X)."""
        return self.y @ point @ self.x.T

    def pull(self, multipliers: Array) -> Array:
        """M_Y^T U M_X, shape (k_Y, k_X)."""
        return self.y.T @ multipliers @ self.x

    def feasible(self, point: Array) -> Array:
        """The point, drawn towards zero as far as R falls below zero."""
        return point / (1.0 + max(0.0, -float(self.ratio(point).min(initial=0.0))))

    def residuals(self, point: Array, multipliers: Array) -> tuple[float, float, float]:
        """Primal and dual residual and complementarity, see :func:`solve_pointwise`."""
        ratio = self.ratio(point)
        gradient = self.linear + point - self.pull(multipliers)
        scale = float(np.abs(self.linear * self.unit).max(initial=0.0)) or 1.0
        gain = float((self.linear**2).sum()) / 2 or 1.0
        gap = float(np.abs(multipliers * ratio).sum()) + float((gradient**2).sum()) / 2
        return (
            max(0.0, -float(ratio.min(initial=0.0))),
            float(np.abs(gradient * self.unit).max(initial=0.0)) / scale,
            gap / gain,
        )


def solve_pointwise(
    problem: JointProblem,
    values_x: Array,
    values_y: Array,
    reg: Regularization,
    *,
    tol: float,
    max_iterations: int,
    method: str | None = None,
) -> tuple[Array, SolverInfo]:
    r"""Minimise <A, G> + <D, G^2> / 2 subject to g >= 0 on landmarks of x times landmarks of y.

    .. math:: 1 + \Phi_Y G \Phi_X^T \ge 0, \quad D = (\lambda_Y + r_Y)(\lambda_X + r_X)^T.

    Each step of ADMM is a division in bases that diagonalise diag(lam + r) and Phi^T Phi at once,
    and a maximum. It is sublinear where about as many landmarks are active as there are unknowns,
    so programs of up to 6,000 unknowns go to an interior point method. Says nothing of g between
    the landmarks.

    Parameters
    ----------
    problem
        A and D, in the centred basis; shapes (k_Y, k_X).
    values_x, values_y
        Phi: the centred functions at the landmarks, shapes (s_X, k_X) and (s_Y, k_Y).
    reg
        The ridge in D, two-sided.
    tol
        KKT residual at which the iteration ends.
    max_iterations
        At most so many.
    method
        ``"ADMM"`` or ``"interior point"``; None: by the number of unknowns.

    Returns
    -------
    coef : (k_Y, k_X)
        Shrunk towards zero by what g falls below zero on the landmarks.
    info : SolverInfo
        With multipliers U >= 0: ``primal_residual`` is max(-g, 0) on the landmarks,
        ``dual_residual`` max |E| / max |A| with E = A + D G - Phi_Y^T U Phi_X, complementarity
        (<U, g> + <E, E / D> / 2) / (<A, A / D> / 2): the duality gap against what the program
        without landmarks gains. Status ``"optimal"`` or ``"iterations"``.
    """
    begin = time.perf_counter()
    program = LandmarkProgram.of(problem, values_x, values_y, reg)
    if method is None:
        method = "interior point" if problem.linear.size <= _DENSE else "ADMM"
    if program.ratio(-program.linear).min(initial=0.0) >= 0.0:
        method, iterations = "closed form", 0
        point, multipliers = -program.linear, np.zeros((len(values_y), len(values_x)))
    elif method == "interior point":
        point, multipliers, iterations = interior_point(program, tol, max_iterations)
    else:
        point, multipliers, iterations = _admm(program, tol, max_iterations)
    point = program.feasible(point)
    coef = point / program.unit
    seconds = time.perf_counter() - begin
    primal, dual, slack = program.residuals(point, multipliers)
    residual = max(primal, dual, slack)
    value = float((program.linear * point).sum() + 0.5 * (point**2).sum())
    bound = -0.5 * float(((program.linear - program.pull(multipliers)) ** 2).sum())
    return coef, SolverInfo(
        solver=method,
        status="optimal" if residual <= tol else "iterations",
        primal_residual=primal,
        dual_residual=dual,
        kkt_residual=residual,
        gap=(value - bound + float(multipliers.sum())) / max(1.0, abs(value)),
        iterations=iterations,
        seconds=seconds,
        tol=tol,
    )


def _admm(program: LandmarkProgram, tol: float, max_iterations: int) -> tuple[Array, Array, int]:
    """F, U and the number of iterations of ADMM, see :class:`_Splitting`."""
    method = _Splitting(program, tol)
    state, steps = iterate(method, max_iterations)
    return method.point(state), -state.penalty * state.scaled, steps


@dataclass(frozen=True, eq=False)
class _Split:
    """F in the eigenbases, Z >= 0, U / -penalty, and the residual when it was computed last."""

    point: Array
    split: Array
    scaled: Array
    penalty: float
    steps: int = 0
    residual: float = np.inf


class _Splitting:
    """ADMM with over-relaxation on R = Z, Z >= 0, as an :class:`Iteration`.

    Boyd et al., "Distributed optimization and statistical learning via ADMM" (2011), sections 3.1
    and 3.4; the penalty balances the relative residuals.
    """

    def __init__(self, program: LandmarkProgram, tol: float) -> None:
        self._program, self._tol = program, tol
        (squares_y, self._turn_y), (squares_x, self._turn_x) = (
            np.linalg.eigh(side.T @ side) for side in (program.y, program.x)
        )
        self._squares = np.outer(squares_y.clip(min=0.0), squares_x.clip(min=0.0))
        self._left, self._right = program.y @ self._turn_y, program.x @ self._turn_x
        self._linear = self._turn_y.T @ program.linear @ self._turn_x

    def init(self) -> _Split:
        linear, penalty = self._linear, 1.0 / (float(np.median(self._squares)) or 1.0)
        split = np.maximum(1.0 - self._left @ linear @ self._right.T, 0.0)
        return _Split(-linear, split, np.zeros_like(split), penalty)

    def done(self, state: _Split) -> bool:
        return state.residual <= self._tol

    def point(self, state: _Split) -> Array:
        """F, shape (k_Y, k_X)."""
        return self._turn_y @ state.point @ self._turn_x.T

    def step(self, state: _Split) -> _Split:
        left, right, penalty, last = self._left, self._right, state.penalty, state.split
        pull = left.T @ (last - 1.0 - state.scaled) @ right
        point = (penalty * pull - self._linear) / (1.0 + penalty * self._squares)
        ratio = 1.0 + left @ point @ right.T
        relaxed = _RELAXATION * ratio + (1.0 - _RELAXATION) * last
        split = np.maximum(relaxed + state.scaled, 0.0)
        scaled = state.scaled + relaxed - split
        state = _Split(point, split, scaled, penalty, state.steps + 1, state.residual)
        if state.steps % _CHECK:
            return state
        feasible = self._program.feasible(self.point(state))
        state = replace(state, residual=max(self._program.residuals(feasible, -penalty * scaled)))
        if self.done(state):
            return state
        primal = np.linalg.norm(ratio - split) / max(np.linalg.norm(ratio), np.linalg.norm(split))
        dual = penalty * np.linalg.norm(left.T @ (split - last) @ right)
        dual /= max(np.linalg.norm(self._linear), np.linalg.norm(point))
        balance = float(np.sqrt(primal / dual)) if primal * dual > 0.0 else 1.0
        if 1.0 / _BALANCE <= balance <= _BALANCE:
            return state
        balance = min(max(balance, 0.2), 5.0)
        return replace(state, penalty=penalty * balance, scaled=scaled / balance)
