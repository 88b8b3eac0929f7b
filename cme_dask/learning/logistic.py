"""Kernel logistic regression solved with one pass over the rows for each gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize

from cme_dask.numerics.logistic import LogisticProblem, LogisticSums

Array = Any


@dataclass(frozen=True, eq=False)
class LogisticSolution:
    """Where the iteration ended.

    Attributes
    ----------
    newton
        Coefficients of [N, 1], shape (m + 1, K); rows of sum zero.
    objective
        J there: mean loss and penalty.
    gradient_norm
        Norm of the gradient in the scaled unknowns, in which the curvature is about the identity:
        J is about half its square above the least value.
    iterations, passes
        Steps, and gradients that were made: each is a pass over the rows.
    """

    newton: Array
    objective: float
    gradient_norm: float
    iterations: int
    passes: int


def solve_logistic(
    problem: LogisticProblem,
    sums: Callable[[Array], LogisticSums],
    *,
    tol: float,
    max_iter: int,
) -> LogisticSolution:
    """Minimise by L-BFGS in scaled unknowns (scipy), from probabilities that are all equal.

    Parameters
    ----------
    problem
        The objective.
    sums
        From coefficients of [k(., p), 1], shape (m + 1, K), to the sums over all rows.
    tol
        Norm of the gradient at which the iteration ends.
    max_iter
        Largest number of steps.

    Notes
    -----
    Source: Byrd, Lu, Nocedal and Zhu (1995), SIAM Journal on Scientific Computing 16, 1190.
    """
    unknowns = int(np.prod(problem.shape))

    def value(z: Array) -> tuple[float, Array]:
        newton = problem.newton(z)
        return problem.value(newton, sums(problem.coefficients(newton)))

    found = minimize(
        value,
        np.zeros(unknowns),
        jac=True,
        method="L-BFGS-B",
        # The largest component is at most the norm.
        options={
            "gtol": tol / np.sqrt(unknowns),
            "ftol": 0.0,
            "maxiter": max_iter,
            "maxfun": 2 * max_iter,
            "maxcor": 20,
        },
    )
    return LogisticSolution(
        problem.newton(found.x),
        float(found.fun),
        float(np.linalg.norm(found.jac)),
        int(found.nit),
        int(found.nfev),
    )
