"""Interior point method for a projection onto a polyhedron with two-sided constraints."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve

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
    squares = _squares(program.y), _squares(program.x)
    point = np.zeros(program.linear.shape)
    slack = np.ones((len(program.y), len(program.x)))
    multipliers = np.full(slack.shape, (program.linear**2).sum() / (2 * slack.size))
    iteration = 0
    while iteration < min(max_iterations, _MAX_ITERATIONS):
        if max(program.residuals(point, multipliers)) <= tol:
            break
        try:
            factor = _factor(squares[0], multipliers / slack, squares[1])
        except LinAlgError:  # the weights span more than rounding allows: as near as it gets
            break
        newton = _Newton(program, point, slack, multipliers, factor)
        product = slack * multipliers
        middle = float(product.mean())
        _, along, towards = newton.step(product)
        length = newton.length(along, towards)
        reached = ((slack + length * along) * (multipliers + length * towards)).mean()
        aim = middle * (float(reached) / middle) ** 3
        step, along, towards = newton.step(product + along * towards - aim)
        length = newton.length(along, towards) * _TO_THE_BOUNDARY
        point, slack = point + length * step, slack + length * along
        multipliers = multipliers + length * towards
        iteration += 1
    return point, multipliers, iteration


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
