"""Quadratic programs over a transport polytope: scaling, optimality, rounding onto it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

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
            found = [
                self._relative(part)
                for part in (negative, negative + reduced * share * (reduced > 0.0))
            ]
            if found[1] < best[1]:
                best = (found[0], found[1], reduced)
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
