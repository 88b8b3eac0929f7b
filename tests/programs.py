"""Problems for the tests of the quadratic programs, and the descent that no optimum has."""

import numpy as np

from cme_dask import constraints, kernels
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.moments import Moments
from cme_dask.numerics.problem import JointProblem, JointSolver


def solve_joint(mean, constraint, reg):
    """The solution under a constraint that needs nothing but moments."""
    return JointSolver(constraints.parse(constraint), reg).solve(mean)


def diagonal_problem(linear, quadratic):
    """A program of nothing but A and D: without moments and ridge."""
    k_y, k_x = linear.shape
    return JointProblem(
        None,
        None,
        -linear,
        linear,
        quadratic,
        np.eye(k_x),
        np.eye(k_y),
        np.ones(k_x),
        np.ones(k_y),
        True,
    )


def random_problem(rng, shape, least, size=1.0):
    """Eigenvalues from 1 down to ``least`` on each side, A as of a sample: of the order sqrt(D)."""
    lam_y, lam_x = (np.sort(least ** rng.uniform(0, 1, k))[::-1] for k in shape)
    quadratic = np.outer(lam_y, lam_x)
    return diagonal_problem(size * rng.standard_normal(shape) * np.sqrt(quadratic), quadratic)


def sample_moments(x, y, scale_x, scale_y, ranks):
    """Moments of a sample held in memory with Gaussian kernels, and the Newton bases."""
    sides = []
    for rows, scale, rank in ((x, scale_x, ranks[0]), (y, scale_y, ranks[1])):
        kernel = kernels.Gaussian(scale)
        found = pivoted_cholesky(kernel, rows, 0.0, rank)
        sides.append(NewtonBasis(kernel, rows[found.pivots], found.factor))
    newton_x, newton_y = (side(rows) for side, rows in zip(sides, (x, y), strict=True))
    n = len(x)
    blocks = {
        ("x", "x"): newton_x.T @ newton_x / n,
        ("y", "y"): newton_y.T @ newton_y / n,
        ("y", "x"): newton_y.T @ newton_x / n,
    }
    means = {"x": newton_x.mean(axis=0), "y": newton_y.mean(axis=0)}
    return Moments(float(n), blocks, means, {"x": 1.0, "y": 1.0}, {}), sides


def assert_no_descent(problem, coef, feasible, slack):
    """The objective does not fall towards any of these feasible points, but for ``slack``.

    Its change is written without the objective itself, whose rounding would hide small steps.
    """
    gradient = problem.linear + problem.quadratic * coef
    for point in feasible:
        for step in (1e-6, 1e-3, 0.1, 1.0):
            move = step * (point - coef)
            change = (gradient * move).sum() + 0.5 * (problem.quadratic * move**2).sum()
            assert change >= -slack * step
