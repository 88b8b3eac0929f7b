"""Couplings, non-negative and normalized everywhere, and their solvers.

An interior point method for quadratic programs over a transport polytope.

Newton's method on the optimality conditions with X Z = mu instead of 0, mu falling to 0
(primal-dual path following: Wright, Primal-Dual Interior-Point Methods, 1997, chapter 5). Its
system

    (Q_Y . Q_X + Z / X) dX - N dy = rhs,    N^T dX = what the marginals miss,

is solved by conjugate gradients within the marginals' constraints, preconditioned by the diagonal
Z / X plus a part of that of the quadratic form (Gould, Hribar and Nocedal, SIAM J. Sci. Comput. 23,
2001): the smooth functions of few landmarks leave a few large eigenvalues beside it. It needs some
tens of steps however flat the objective is, where first-order methods need thousands.

A density ratio g = b_Y^T C b_X that is non-negative and normalized everywhere.

With partitions of unity b, C >= 0, c_Y^T C = 1^T and C c_X = 1 make g a density ratio at every
point, seen or not. ADMM alternates a division in the eigenbases with a maximum; where it is slow,
which is where the objective is flat, an interior point method goes on from there.
"""

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from cme_dask.errors import DataError
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.moments import Moments
from cme_dask.numerics.problem import Regularization, SolverInfo, iterate

# Quadratic programs over a transport polytope: scaling, optimality, rounding onto it


Array = Any

_FLOOR = 1e-8  # of |A|: of a dependence this weak, of 1e-16 in chi squared, moments tell nothing
_LOST = 1e7 * np.finfo(np.float64).eps  # of the ridge's part of a gradient: 1e-7 is rounding
_FITS = 4  # alternations of the multipliers of equalities and inequalities
_SWEEPS = 200
_EXACT = 2e-14  # relative error of the marginals, aimed at


@dataclass(frozen=True, eq=False)
class TransportProblem:
    r"""Minimise <A, E> + <E, Q_Y E Q_X> / 2 over X = E + u_Y u_X^T >= 0 with fixed marginals.

    The variables are X = diag(u_Y) C diag(u_X) with u = sqrt(c): then

    .. math:: u_Y^T X = u_X^T, \qquad X u_X = u_Y,

    the same landmark mass weighs the same in every term, and Q = diag(u)^-1 (S + r) diag(u)^-1 has
    the top eigenvalue 1 at r = 0.

    Attributes
    ----------
    linear
        A, shape (m_Y, m_X).
    gram_y, gram_x
        Q, shapes (m_Y, m_Y) and (m_X, m_X).
    unit_y, unit_x
        u, unit vectors, shapes (m_Y,) and (m_X,).
    ridge
        (r_Y / c_Y)(r_X / c_X)^T, a diagonal that the quadratic form is at least.
    """

    linear: Array
    gram_y: Array
    gram_x: Array
    unit_y: Array
    unit_x: Array
    ridge: Array

    @classmethod
    def of(
        cls, gram_y: Array, cross: Array, gram_x: Array, mean_y: Array, mean_x: Array, reg: Any
    ) -> "TransportProblem":
        """From moments of partitions of unity, all means positive, and a two-sided ridge."""
        unit_y, unit_x = np.sqrt(mean_y), np.sqrt(mean_x)
        scaled_y, scaled_x = (
            (gram + r * np.eye(len(u))) / np.outer(u, u)
            for gram, u, r in ((gram_y, unit_y, reg.y), (gram_x, unit_x, reg.x))
        )
        return cls(
            (np.outer(mean_y, mean_x) - cross) / np.outer(unit_y, unit_x),
            scaled_y,
            scaled_x,
            unit_y,
            unit_x,
            np.outer(reg.y / mean_y, reg.x / mean_x),
        )

    @cached_property
    def independent(self) -> Array:
        """X = u_Y u_X^T, where C = 1."""
        return np.outer(self.unit_y, self.unit_x)

    @cached_property
    def scale(self) -> float:
        """|A|_F, or what of it may be rounding."""
        return max(float(np.linalg.norm(self.linear)), self._rounding)

    @cached_property
    def _inner_scale(self) -> float:
        """The same of the variables C."""
        inner = float(np.linalg.norm(self.linear * self.independent))
        return max(inner, self._rounding * float(self.independent.max()))

    @cached_property
    def _rounding(self) -> float:
        return max(_FLOOR, _LOST * float(np.linalg.norm(self.ridge * self.independent)))

    def curvature(self, change: Array) -> Array:
        """Q_Y E Q_X."""
        return self.gram_y @ change @ self.gram_x

    def gradient(self, x: Array) -> Array:
        """Of the objective at X."""
        return self.linear + self.curvature(x - self.independent)

    def objective(self, x: Array) -> float:
        """<A, E> + <E, Q_Y E Q_X> / 2."""
        change = x - self.independent
        return float((change * (self.linear + 0.5 * self.curvature(change))).sum())

    def marginals(self, x: Array) -> tuple[Array, Array]:
        """u_Y^T X and X u_X, shapes (m_X,) and (m_Y,)."""
        return self.unit_y @ x, x @ self.unit_x

    def normal(self, a: Array, b: Array) -> Array:
        """u_Y a^T + b u_X^T, the adjoint of :meth:`marginals`."""
        return np.outer(self.unit_y, a) + np.outer(b, self.unit_x)

    def tangent(self, matrix: Array) -> Array:
        """The part orthogonal to all :meth:`normal`."""
        a, b = self.marginals(matrix)
        return matrix - self.normal(a, b - self.unit_y * (a @ self.unit_x))

    def rounded(self, x: Array) -> Array:
        """A point of the polytope near X, see :func:`round_coupling`."""
        independent = self.independent
        c = round_coupling(x / independent, self.unit_y**2, self.unit_x**2)
        return c * independent

    def residual(self, x: Array, multiplier: Array) -> tuple[float, float, float, float]:
        """Stationarity, the largest KKT residual, duality gap and objective at a feasible X.

        With R = gradient - u_Y a^T - b u_X^T, where the multipliers a, b of the equalities are
        free, X is optimal if R >= 0 and R X = 0. What R_ji < 0 takes from the first and what
        R_ji min(C_ji, 1) takes from the second, C = 1 at independence, are measured by their
        Frobenius norms relative to that of A: of the variables X and of the variables C, the larger
        one. The gap is <R, X> after a and b have been lowered until R >= 0.

        Parameters
        ----------
        x
            The point, shape (m_Y, m_X).
        multiplier
            An estimate of R, from which a and b are fitted.
        """
        independent, change = self.independent, x - self.independent
        curvature = self.curvature(change)
        gradient = self.linear + curvature
        share = np.minimum(x / independent, 1.0)
        best = (np.inf, np.inf, multiplier)
        for _ in range(_FITS):
            reduced = self.tangent(gradient - multiplier) + multiplier
            negative = np.minimum(reduced, 0.0)
            result = [
                self._relative(part)
                for part in (negative, negative + reduced * share * (reduced > 0.0))
            ]
            if result[1] < best[1]:
                best = (result[0], result[1], reduced)
            multiplier = np.maximum(reduced, 0.0) * (share < 1e-3)
        reduced = best[2] / independent
        reduced = reduced - reduced.min(axis=0)
        reduced -= reduced.min(axis=1, keepdims=True)
        gap = float((reduced * independent * x).sum())
        objective = float((change * (self.linear + 0.5 * curvature)).sum())
        return best[0], best[1], gap, objective

    def _relative(self, part: Array) -> float:
        return max(
            float(np.linalg.norm(part)) / self.scale,
            float(np.linalg.norm(part * self.independent)) / self._inner_scale,
        )


def round_coupling(c: Array, mean_y: Array, mean_x: Array) -> Array:
    """C >= 0 with c_Y^T C = 1^T and C c_X = 1 near a given matrix.

    Source: Altschuler, Weed and Rigollet (2017), Algorithm 2, on P = diag(c_Y) C diag(c_X): rows,
    then columns that are too heavy are scaled down, and what is missing is added as an outer
    product. Its rounding errors, relative to a small mean, are then removed by alternating scalings
    of rows and columns (Sinkhorn), which keep zeros and signs.

    Parameters
    ----------
    c
        Shape (m_Y, m_X).
    mean_y, mean_x
        Positive, with sum 1.
    """
    c = np.maximum(c, 0.0)
    c *= np.minimum(1.0, 1.0 / np.maximum(c @ mean_x, np.finfo(float).tiny))[:, None]
    c *= np.minimum(1.0, 1.0 / np.maximum(mean_y @ c, np.finfo(float).tiny))
    missing_y, missing_x = (np.maximum(1.0 - sums, 0.0) for sums in (c @ mean_x, mean_y @ c))
    total = 0.5 * (float(missing_y @ mean_y) + float(missing_x @ mean_x))
    if total > 0.0:
        c += np.outer(missing_y, missing_x / total)
    for _ in range(_SWEEPS):
        c /= mean_y @ c
        rows = c @ mean_x
        if np.abs(rows - 1.0).max() <= _EXACT:
            break
        c /= rows[:, None]
    return c


# An interior point method for quadratic programs over a transport polytope


_CENTRING = 0.1  # aim at this part of mu, or at half of it after a short step
_SHORT = 0.5
_BACK = 0.995  # of the way to the boundary
_LOOSE = 0.05  # relative accuracy of the inner iteration
_DIAGONAL = 0.1  # of the diagonals of Q - u u^T in the preconditioner: 0.03 to 0.3 differ little
_SHIFT = 1e-13  # the marginals' constraints have one dependency
_INNER = 1000


@dataclass(frozen=True, eq=False)
class InteriorPoint:
    """X > 0 and the multipliers Z > 0 of X >= 0.

    ``inner`` are the conjugate-gradient iterations so far, ``step`` is the length of the last step,
    ``dual`` the gradient of the Lagrangian, ``residual`` the KKT residual before rounding.
    """

    x: Array
    z: Array
    dual: Array
    residual: float
    inner: int = 0
    step: float = 1.0
    steps: int = 0

    @property
    def mu(self) -> float:
        """Mean of X Z."""
        return float((self.x * self.z).mean())


class PathFollowing:
    """The interior point method as an :class:`Iteration`, from X and Z on.

    Parameters
    ----------
    problem
        The program.
    first
        X and Z.
    tol
        Relative KKT residual aimed at: the inner iteration is not driven further.
    within
        Residual at which the iteration ends.
    """

    def __init__(
        self, problem: TransportProblem, first: tuple[Array, Array], tol: float, within: float
    ) -> None:
        self._problem, self._first, self._tol, self._within = problem, first, tol, within
        sides = ((problem.gram_y, problem.unit_y), (problem.gram_x, problem.unit_x))
        diagonals = [np.maximum(np.diag(gram) - unit**2, 0.0) for gram, unit in sides]
        self._floor = problem.ridge + _DIAGONAL**2 * np.outer(*diagonals)

    def init(self) -> InteriorPoint:
        """Return the first point."""
        return self._at(*self._first)

    def done(self, point: InteriorPoint) -> bool:
        """Whether the residual is small enough."""
        return point.residual <= self._within

    def step(self, point: InteriorPoint) -> InteriorPoint:
        """Return the next point along the path."""
        problem = self._problem
        centring = _CENTRING if point.step > _SHORT else _SHORT
        aim = _LOOSE * centring * np.sqrt(point.mu * point.x.size)
        within = 0.2 * max(self._tol, centring * point.residual) * problem.scale
        target = centring * point.mu / point.x
        direction = _Direction(problem, point.z / point.x, self._floor)
        a, b = problem.marginals(point.x)
        missing = problem.unit_x - a, problem.unit_y - b
        dx, inner = direction.solve(target - point.z - point.dual, missing, aim, within)
        dz = target - point.z - direction.barrier * dx
        step = min(_longest(point.x, dx), _longest(point.z, dz))
        x, z = point.x + step * dx, point.z + step * dz
        return replace(self._at(x, z), inner=point.inner + inner, step=step, steps=point.steps + 1)

    def _at(self, x: Array, z: Array) -> InteriorPoint:
        problem = self._problem
        dual = problem.tangent(problem.gradient(x) - z)
        share = np.minimum(x / problem.independent, 1.0)
        complementary = float(np.linalg.norm(z * share)) / problem.scale
        stationary = float(np.linalg.norm(dual)) / problem.scale
        return InteriorPoint(x, z, dual, max(complementary, stationary))


def _from_independence(problem: TransportProblem) -> tuple[Array, Array]:
    """C = 1, which is on the polytope, and multipliers that are as large as the gradient."""
    x = problem.independent
    return x, float(np.abs(problem.linear * x).max()) / x


def _smoothed(value: Array, penalty: float, mu: float) -> tuple[Array, Array]:
    """X Z = mu with X - Z / penalty = value: max(value, 0) and its multiplier, smoothed."""
    large = 0.5 * (np.abs(value) + np.sqrt(value**2 + 4.0 * mu / penalty))
    x = np.where(value > 0.0, large, mu / penalty / large)
    return x, mu / x


def _longest(value: Array, change: Array) -> float:
    steepest = float((-change / value).max())
    return min(1.0, _BACK / steepest) if steepest > 0.0 else 1.0


class _Direction:
    """The system of one step, and its preconditioner."""

    def __init__(self, problem: TransportProblem, barrier: Array, floor: Array) -> None:
        self.barrier = barrier
        self._problem = problem
        self._inverse = 1.0 / (barrier + floor)
        # N^T diag(inverse) N, scaled to unit diagonal: one dependency, shifted away.
        self._width = len(problem.unit_x)
        schur = np.zeros((self._width + len(problem.unit_y),) * 2)
        schur[: self._width, self._width :] = (self._inverse * problem.independent).T
        diagonal = np.concatenate(
            [problem.unit_y**2 @ self._inverse, self._inverse @ problem.unit_x**2]
        )
        self._root = 1.0 / np.sqrt(diagonal)
        schur *= np.outer(self._root, self._root)
        np.fill_diagonal(schur, 1.0 + _SHIFT)
        self._factor = cho_factor(schur, lower=False, overwrite_a=True, check_finite=False)

    def _multipliers(self, a: Array, b: Array) -> tuple[Array, Array]:
        both = self._root * np.concatenate([a, b])
        both = self._root * cho_solve(self._factor, both, check_finite=False)
        return both[: self._width], both[self._width :]

    def _precondition(self, residual: Array) -> tuple[Array, Array]:
        """A direction within the constraints, and the residual without its normal part."""
        normal = self._problem.normal(
            *self._multipliers(*self._problem.marginals(self._inverse * residual))
        )
        residual = residual - normal
        return self._inverse * residual, residual

    def solve(
        self, rhs: Array, missing: tuple[Array, Array], aim: float, within: float
    ) -> tuple[Array, int]:
        """DX and the number of inner iterations.

        Parameters
        ----------
        rhs
            Right-hand side.
        missing
            What dX must add to the marginals.
        aim, within
            Norms of the residual at which it ends, of the preconditioner and of Frobenius.
        """
        problem = self._problem
        dx = self._inverse * problem.normal(*self._multipliers(*missing))
        residual = rhs - self.barrier * dx - problem.curvature(dx)
        ahead, residual = self._precondition(residual)
        along, size = ahead, float((ahead * residual).sum())
        for inner in range(_INNER):
            if size <= aim**2 and float(np.linalg.norm(residual)) <= within:
                return dx, inner
            image = self.barrier * along + problem.curvature(along)
            length = size / float((along * image).sum())
            dx += length * along
            residual -= length * image
            ahead, residual = self._precondition(residual)
            before, size = size, float((ahead * residual).sum())
            along = ahead + (size / before) * along
        return dx, _INNER


# A density ratio g = b_Y^T C b_X that is non-negative and normalized everywhere


@dataclass(frozen=True, eq=False)
class CouplingProblem:
    """The problem of the partitions' own functions: g = 0 + b_Y^T C b_X."""

    mean: Moments
    reg: Regularization

    base: ClassVar[float] = 0.0
    centred: ClassVar[bool] = False

    @property
    def transform_x(self) -> Array:
        """The identity: landmarks are not rotated."""
        return np.eye(len(self.mean.blocks["x", "x"]))

    @property
    def transform_y(self) -> Array:
        """The identity."""
        return np.eye(len(self.mean.blocks["y", "y"]))

    @property
    def eigenvalues_x(self) -> Array:
        """E b^2 of x."""
        return np.diag(self.mean.blocks["x", "x"]).copy()

    @property
    def eigenvalues_y(self) -> Array:
        """E b^2 of y."""
        return np.diag(self.mean.blocks["y", "y"]).copy()

    def solve(
        self, *, tol: float, max_iterations: int, start: Array | None
    ) -> tuple[Array, SolverInfo]:
        """See ``solve_coupling``."""
        return solve_coupling(
            self.mean.blocks["y", "y"],
            self.mean.blocks["y", "x"],
            self.mean.blocks["x", "x"],
            self.mean.means["y"],
            self.mean.means["x"],
            self.reg,
            tol=tol,
            max_iterations=max_iterations,
            start=start,
        )


_NO_MASS = 1e-15  # landmarks with less have no row near: C = 1 there
_RELAXATION = 1.6
_EVERY = 20  # iterations of ADMM between looks at the residual
_WORTH = 0.25  # ADMM goes on while every _EVERY iterations lower the residual by this factor
_LEAST = 60
_PENALTY = 0.1
_STEPS = 200  # of the interior point method
_HANDOVER = 10.0  # of the residual: mu of the interior point method at its start


def solve_coupling(
    gram_y: Array,
    cross: Array,
    gram_x: Array,
    mean_y: Array,
    mean_x: Array,
    reg: Regularization,
    *,
    tol: float = 1e-6,
    max_iterations: int = 20_000,
    start: Array | None = None,
) -> tuple[Array, SolverInfo]:
    r"""Fit C of g(x, y) = b_Y(y)^T C b_X(x), a transport plan between landmarks.

    .. math::
        \min_C \; \tfrac12 \langle E, (S_{YY} + r_Y) E (S_{XX} + r_X) \rangle
        - \langle S_{YX} - c_Y c_X^T, E \rangle, \quad E = C - 1 1^T,

    subject to C >= 0, c_Y^T C = 1^T, C c_X = 1. Without the ridge this is half of E_PxP g^2 -
    2 E_P g up to a constant, since S 1 = c for a partition of unity; the ridge shrinks to
    independence.

    Parameters
    ----------
    gram_y, cross, gram_x
        S_YY, S_YX, S_XX of the partitions, shapes (m_Y, m_Y), (m_Y, m_X), (m_X, m_X).
    mean_y, mean_x
        c, shapes (m_Y,) and (m_X,). Landmarks without mass get C = 1.
    reg
        The two-sided ridge.
    tol
        Relative KKT residual at which the iteration ends, see :meth:`TransportProblem.residual`.
    max_iterations
        At most so many, of ADMM and of the conjugate gradients together.
    start
        C of a similar problem.

    Returns
    -------
    coef : (m_Y, m_X)
        C >= 0; marginals exact to 1e-12.
    info : SolverInfo
        Measured on ``coef``. ``primal_residual`` is the largest violation of a marginal.

    Raises
    ------
    DataError
        If ``reg`` is not two-sided.
    """
    if reg.form != "two-sided":
        raise DataError(f"the coupling takes a two-sided ridge, got {reg.form!r}")
    begin = time.perf_counter()
    live_y, live_x = (mean > _NO_MASS for mean in (mean_y, mean_x))
    problem = TransportProblem.of(
        gram_y[np.ix_(live_y, live_y)],
        cross[np.ix_(live_y, live_x)],
        gram_x[np.ix_(live_x, live_x)],
        mean_y[live_y],
        mean_x[live_x],
        reg,
    )
    first = problem.independent
    if start is not None:
        first = problem.rounded(start[np.ix_(live_y, live_x)] * first)
    multiplier = np.maximum(problem.tangent(problem.gradient(first)), 0.0)
    multiplier[first > 1e-3 * problem.independent] = 0.0
    state = _Feasible(problem.independent).or_better(problem, first, multiplier)
    solver, iterations = "ADMM", 0
    if state.residual > tol and min(first.shape) > 1:  # with one landmark C = 1 is all there is
        splitting = _Splitting(problem, tol, first - multiplier / _PENALTY, state)
        split, rounds = iterate(splitting, -(-max_iterations // _EVERY))
        state, iterations = split.best, rounds * _EVERY
        if state.residual > tol and iterations < max_iterations:
            solver = "interior point"
            state, iterations = _interior(problem, split, tol, iterations, max_iterations)
    coef = np.ones((len(mean_y), len(mean_x)))
    coef[np.ix_(live_y, live_x)] = state.x / problem.independent
    errors = (np.abs(mean_y @ coef - 1.0), np.abs(coef @ mean_x - 1.0))
    primal = max(float(error.max()) for error in errors)
    residual = max(state.residual, primal)
    return coef, SolverInfo(
        solver=solver,
        status="optimal" if residual <= tol else "inaccurate",
        primal_residual=primal,
        dual_residual=state.stationarity,
        kkt_residual=residual,
        gap=state.gap / max(1.0, abs(state.objective)),
        iterations=iterations,
        seconds=time.perf_counter() - begin,
        tol=tol,
    )


@dataclass(frozen=True, eq=False)
class _Feasible:
    """The best point of the polytope so far, as :meth:`TransportProblem.residual` measures it."""

    x: Array
    stationarity: float = np.inf
    residual: float = np.inf
    gap: float = np.inf
    objective: float = np.inf

    def or_better(self, problem: TransportProblem, x: Array, multiplier: Array) -> "_Feasible":
        """Return the better of itself and the point near X."""
        other = _Feasible.near(problem, x, multiplier)
        return other if other.residual < self.residual else self

    @classmethod
    def near(cls, problem: TransportProblem, x: Array, multiplier: Array) -> "_Feasible":
        """The point near X."""
        rounded = problem.rounded(x)
        return cls(rounded, *problem.residual(rounded, multiplier))


@dataclass(frozen=True, eq=False)
class _Split:
    """X - Z / penalty; the best point; residuals of the last two rounds; the rounds so far."""

    value: Array
    best: _Feasible
    last: float
    before: float
    rounds: int = 0


class _Splitting:
    """Douglas-Rachford splitting as an :class:`Iteration`, whose steps are rounds of several."""

    def __init__(
        self, problem: TransportProblem, tol: float, value: Array, best: _Feasible
    ) -> None:
        self._problem, self._tol = problem, tol
        self._value, self._best = value, best
        (self._basis_y, lam_y), (self._basis_x, lam_x) = (
            eigenbasis(gram, unit)
            for gram, unit in (
                (problem.gram_y, problem.unit_y),
                (problem.gram_x, problem.unit_x),
            )
        )
        self._linear = self._basis_y.T @ problem.linear @ self._basis_x
        self._quadratic = np.outer(lam_y, lam_x)

    def init(self) -> _Split:
        return _Split(self._value, self._best, self._best.residual, np.inf)

    def done(self, state: _Split) -> bool:
        slow = state.rounds * _EVERY >= _LEAST and state.last > _WORTH * state.before
        return state.best.residual <= self._tol or slow

    def step(self, state: _Split) -> _Split:
        problem, basis_y, basis_x = self._problem, self._basis_y, self._basis_x
        value = state.value.copy()
        for _ in range(_EVERY):
            x = np.maximum(value, 0.0)
            inner = basis_y.T @ (2.0 * x - value) @ basis_x
            inner = (_PENALTY * inner - self._linear) / (self._quadratic + _PENALTY)
            change = problem.independent + basis_y @ inner @ basis_x.T - x
            value += _RELAXATION * change
        x = np.maximum(value, 0.0)
        now = _Feasible.near(problem, x, _PENALTY * (x - value))
        best = now if now.residual < state.best.residual else state.best
        return _Split(value, best, now.residual, state.last, state.rounds + 1)


def _interior(
    problem: TransportProblem, split: _Split, tol: float, spent: int, most: int
) -> tuple[_Feasible, int]:
    """The best point of the interior point method after the splitting, and all iterations."""
    best, aim = split.best, 0.3 * tol
    mu = _HANDOVER * min(best.residual, 1.0) * problem.scale / split.value.size
    path = PathFollowing(problem, _smoothed(split.value, _PENALTY, mu), aim, 2.0 * tol)
    point, first = path.init(), 1
    if point.residual > 1.0:  # worse than independence
        path = PathFollowing(problem, _from_independence(problem), aim, 2.0 * tol)
        point, first = path.init(), 0
    else:
        point = path.step(point)
    while True:
        steps = point.steps - first
        iterations = spent + steps + point.inner
        last = iterations >= most or steps >= _STEPS
        if last or path.done(point):
            best = best.or_better(problem, point.x, point.z)
        if last or best.residual <= tol:
            return best, iterations
        point = path.step(point)
