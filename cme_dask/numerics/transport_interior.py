"""An interior point method for quadratic programs over a transport polytope.

Newton's method on the optimality conditions with X Z = mu instead of 0, mu falling to 0
(primal-dual path following: Wright, Primal-Dual Interior-Point Methods, 1997, chapter 5). Its
system

    (Q_Y . Q_X + Z / X) dX - N dy = rhs,    N^T dX = what the marginals miss,

is solved by conjugate gradients within the marginals' constraints, preconditioned by the diagonal
Z / X plus a part of that of the quadratic form (Gould, Hribar and Nocedal, SIAM J. Sci. Comput. 23,
2001): the smooth functions of few landmarks leave a few large eigenvalues beside it. It needs some
tens of steps however flat the objective is, where first-order methods need thousands.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from cme_dask.numerics.transport import TransportProblem

Array = Any

_CENTRING = 0.1  # aim at this part of mu, or at half of it after a short step
_SHORT = 0.5
_BACK = 0.995  # of the way to the boundary
_LOOSE = 0.05  # relative accuracy of the inner iteration
_DIAGONAL = 0.1  # of the diagonals of Q - u u^T in the preconditioner: 0.03 to 0.3 differ little
_SHIFT = 1e-13  # the marginals' constraints have one dependency
_INNER = 1000


@dataclass(frozen=True, eq=False)
class InteriorPoint:
    """X > 0, the multipliers Z > 0 of X >= 0, and conjugate-gradient iterations so far."""

    x: Array
    z: Array
    inner: int = 0
    step: float = 1.0

    @property
    def mu(self) -> float:
        """Mean of X Z."""
        return float((self.x * self.z).mean())

    @classmethod
    def independent(cls, problem: TransportProblem) -> "InteriorPoint":
        """C = 1, which is on the polytope, and multipliers that are as large as the gradient."""
        x = problem.independent
        mu = float(np.abs(problem.linear * x).max())
        return cls(x, mu / x)

    @classmethod
    def smoothed(cls, value: Array, penalty: float, mu: float) -> "InteriorPoint":
        """X Z = mu with X - Z / penalty = value: max(value, 0) and its multiplier, smoothed."""
        large = 0.5 * (np.abs(value) + np.sqrt(value**2 + 4.0 * mu / penalty))
        x = np.where(value > 0.0, large, mu / penalty / large)
        return cls(x, mu / x)


def interior_steps(
    problem: TransportProblem, point: InteriorPoint, tol: float
) -> Iterator[tuple[InteriorPoint, float]]:
    """Points along the path, each with its KKT residual before rounding.

    Parameters
    ----------
    problem
        The program.
    point
        Where to start.
    tol
        Relative KKT residual aimed at: the inner iteration is not driven further.
    """
    sides = ((problem.gram_y, problem.unit_y), (problem.gram_x, problem.unit_x))
    diagonals = [np.maximum(np.diag(gram) - unit**2, 0.0) for gram, unit in sides]
    floor = problem.ridge + _DIAGONAL**2 * np.outer(*diagonals)
    while True:
        dual = problem.tangent(problem.gradient(point.x) - point.z)
        share = np.minimum(point.x / problem.independent, 1.0)
        complementary = float(np.linalg.norm(point.z * share)) / problem.scale
        stationary = float(np.linalg.norm(dual)) / problem.scale
        residual = max(complementary, stationary)
        yield point, residual
        centring = _CENTRING if point.step > _SHORT else _SHORT
        aim = _LOOSE * centring * np.sqrt(point.mu * point.x.size)
        within = 0.2 * max(tol, centring * residual) * problem.scale
        target = centring * point.mu / point.x
        direction = _Direction(problem, point.z / point.x, floor)
        a, b = problem.marginals(point.x)
        missing = problem.unit_x - a, problem.unit_y - b
        dx, inner = direction.solve(target - point.z - dual, missing, aim, within)
        dz = target - point.z - direction.barrier * dx
        step = min(_longest(point.x, dx), _longest(point.z, dz))
        point = InteriorPoint(point.x + step * dx, point.z + step * dz, point.inner + inner, step)


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
