"""A density ratio g = b_Y^T C b_X that is non-negative and normalized everywhere.

With partitions of unity b, C >= 0, c_Y^T C = 1^T and C c_X = 1 make g a density ratio at every
point, seen or not. ADMM alternates a division in the eigenbases with a maximum; where it is slow,
which is where the objective is flat, an interior point method goes on from there.
"""

import time
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.outcome import Outcome
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.transport import TransportProblem
from cme_dask.numerics.transport_interior import InteriorPoint, interior_steps

Array = Any

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
) -> tuple[Array, Outcome]:
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
    outcome : Outcome
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
    run = _Run(problem, tol, max_iterations)
    run.solve(first)
    coef = np.ones((len(mean_y), len(mean_x)))
    coef[np.ix_(live_y, live_x)] = run.best / problem.independent
    return coef, run.outcome(coef, mean_y, mean_x, time.perf_counter() - begin)


class _Run:
    """The best feasible point so far, and how it was found."""

    def __init__(self, problem: TransportProblem, tol: float, max_iterations: int) -> None:
        self._problem, self._tol, self._left = problem, tol, max_iterations
        self._iterations, self._solver = 0, "ADMM"
        self._found = (np.inf, np.inf, np.inf, np.inf)
        self.best = problem.independent

    @property
    def _done(self) -> bool:
        return self._found[1] <= self._tol or self._iterations >= self._left

    def solve(self, first: Array) -> None:
        """ADMM, and where it is slow the interior point method."""
        problem = self._problem
        multiplier = np.maximum(problem.tangent(problem.gradient(first)), 0.0)
        multiplier[first > 1e-3 * problem.independent] = 0.0
        self._consider(first, multiplier)
        if self._done or min(first.shape) == 1:  # with one landmark C = 1 is all there is
            return
        value, penalty = self._admm(first, multiplier)
        if not self._done:
            self._solver = "interior point"
            self._interior(value, penalty)

    def _consider(self, x: Array, multiplier: Array) -> float:
        rounded = self._problem.rounded(x)
        found = self._problem.residual(rounded, multiplier)
        if found[1] < self._found[1]:
            self._found, self.best = found, rounded
        return found[1]

    def _admm(self, x: Array, multiplier: Array) -> tuple[Array, float]:
        """Douglas-Rachford splitting; returns X - Z / penalty, and the penalty."""
        problem, penalty = self._problem, _PENALTY
        (basis_y, lam_y), (basis_x, lam_x) = (
            eigenbasis(gram, unit)
            for gram, unit in (
                (problem.gram_y, problem.unit_y),
                (problem.gram_x, problem.unit_x),
            )
        )
        linear = basis_y.T @ problem.linear @ basis_x
        quadratic, independent = np.outer(lam_y, lam_x), problem.independent
        value, before = x - multiplier / penalty, self._found[1]
        while not self._done:
            for _ in range(_EVERY):
                x = np.maximum(value, 0.0)
                inner = basis_y.T @ (2.0 * x - value) @ basis_x
                inner = (penalty * inner - linear) / (quadratic + penalty)
                change = independent + basis_y @ inner @ basis_x.T - x
                value += _RELAXATION * change
            self._iterations += _EVERY
            x = np.maximum(value, 0.0)
            now = self._consider(x, penalty * (x - value))
            if self._iterations >= _LEAST and now > _WORTH * before:
                break
            before = now
        return value, penalty

    def _interior(self, value: Array, penalty: float) -> None:
        problem, tol, spent = self._problem, self._tol, self._iterations
        mu = _HANDOVER * min(self._found[1], 1.0) * problem.scale / value.size
        path = interior_steps(problem, InteriorPoint.smoothed(value, penalty, mu), 0.3 * tol)
        if next(path)[1] > 1.0:  # worse than independence
            path = interior_steps(problem, InteriorPoint.independent(problem), 0.3 * tol)
        for steps, (point, residual) in enumerate(path):
            self._iterations = spent + steps + point.inner
            last = self._iterations >= self._left or steps >= _STEPS
            if last or residual <= 2.0 * tol:
                self._consider(point.x, point.z)
            if last or self._done:
                return

    def outcome(self, coef: Array, mean_y: Array, mean_x: Array, seconds: float) -> Outcome:
        """Of the matrix that is returned."""
        dual, residual, gap, objective = self._found
        errors = (np.abs(mean_y @ coef - 1.0), np.abs(coef @ mean_x - 1.0))
        primal = max(float(error.max()) for error in errors)
        residual = max(residual, primal)
        return Outcome(
            solver=self._solver,
            status="optimal" if residual <= self._tol else "inaccurate",
            primal_residual=primal,
            dual_residual=dual,
            kkt_residual=residual,
            gap=gap / max(1.0, abs(objective)),
            iterations=self._iterations,
            seconds=seconds,
            tol=self._tol,
        )
