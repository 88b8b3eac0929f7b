"""Sparse embeddings as one process measures them: our solver, and Clarabel on the same problem."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import clarabel
import numpy as np
from scipy import sparse

from cme_dask.kernels import Gaussian
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.problem import iterate
from cme_dask.numerics.sparse import Penalty, SparseProblem, SparseSolver

Array = Any
Result = dict[str, Any]
Describe = Callable[[], Result]

OURS, CLARABEL = "cme_dask", "Clarabel"

GAP = 1e-8
"""Tolerance of both solvers."""

_REG = 1e-3


@dataclass(frozen=True)
class SolveSparse:
    """One solve of a sparse embedding.

    Attributes
    ----------
    solver
        ``"cme_dask"`` or ``"Clarabel"``.
    penalty
        One of the penalties.
    rows
        Rows of the sample.
    rank
        Candidates of x and of y at most; their product is the number of unknowns.
    share
        Gamma over gamma_max.
    """

    solver: str
    penalty: str
    rows: int
    rank: int
    share: float

    def prepare(self) -> Callable[[], Describe]:
        """The sample and its problem, in the form that the solver takes."""
        problem = small_problem(self.rows, self.penalty, self.rank)
        gamma = self.share * problem.gamma_max
        solve = our_solver if self.solver == OURS else conic_solver
        return partial(self._run, problem, gamma, solve(problem, gamma))

    def _run(
        self, problem: SparseProblem, gamma: float, solve: Callable[[float], Array]
    ) -> Describe:
        begin = time.process_time()
        matrix = solve(GAP)
        return partial(self._describe, problem, gamma, matrix, time.process_time() - begin)

    def _describe(
        self, problem: SparseProblem, gamma: float, matrix: Array, seconds: float
    ) -> Result:
        return {
            "unknowns": int(matrix.size),
            "objective": objective(problem, gamma, matrix),
            "cpu_seconds": seconds,
        }


def small_problem(
    rows: int, penalty: str, rank: int | None = None, reg: float = _REG
) -> SparseProblem:
    """The dense embedding of a sine with noise, to be made sparse; without a rank on all rows."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-3.0, 3.0, (rows, 2))
    y = np.sin(x[:, :1]) + 0.3 * rng.standard_normal((rows, 1))
    factors, places = [], []
    for values, scale in ((x, 1.0), (y, 0.3)):
        result = pivoted_cholesky(Gaussian(scale), values, 1e-12, rank)
        factors.append(result.factor)
        places.append((values, values[result.pivots], scale, result.factor))
    # Newton functions at all rows: k(x, p) R^-T.
    left, right = (
        np.linalg.solve(factor, Gaussian(scale)(points, values)).T
        for values, points, scale, factor in places
    )
    dense = np.linalg.solve(
        left.T @ left / rows + reg * np.eye(left.shape[1]), left.T @ right / rows
    )
    shape = len(factors[0]), len(factors[1])
    return SparseProblem(factors[0], factors[1], dense, Penalty.of(penalty, shape))


def objective(problem: SparseProblem, gamma: float, matrix: Array) -> float:
    """|B - L_X^T M L_Y|_F^2 + gamma Omega(M)."""
    residual = problem.target - problem.embed(matrix)
    return float((residual**2).sum()) + gamma * problem.penalty.value(matrix)


def our_solver(problem: SparseProblem, gamma: float) -> Callable[[float], Array]:
    """The solution by our solver, as a function of the duality gap."""

    def solve(gap: float) -> Array:
        return iterate(SparseSolver(problem, gamma, gap), 1_000)[0].point

    return solve


def conic_solver(problem: SparseProblem, gamma: float) -> Callable[[float], Array]:
    """The solution by Clarabel, as a function of its tolerances of gap and feasibility.

    The problem is a quadratic program over second-order cones. Each group of entries has a bound t
    of its norm, |M_g| <= t_g, which the objective counts.
    """
    shape = len(problem.factor_x), len(problem.factor_y)
    place = np.arange(shape[0] * shape[1]).reshape(shape)
    groups: list[tuple[float, Array]] = []
    for weight, axis in problem.penalty.terms:
        lines = place.reshape(-1, 1) if axis is None else place if axis == 1 else place.T
        groups += [(weight, line) for line in lines]
    n, many = place.size, len(groups)
    quadratic = sparse.block_diag(
        [2.0 * np.kron(*problem.kernels), sparse.csc_matrix((many, many))], format="csc"
    )
    linear = np.concatenate(
        [-2.0 * problem.lift(problem.target).ravel(), [gamma * weight for weight, _ in groups]]
    )
    rows: list[int] = []
    columns: list[int] = []
    at = 0
    for i, (_, line) in enumerate(groups):
        columns += [n + i, *line]
        rows += range(at, at + 1 + len(line))
        at += 1 + len(line)
    constraint = sparse.csc_matrix((-np.ones(at), (rows, columns)), shape=(at, n + many))
    upper, bounds = sparse.triu(quadratic, format="csc"), np.zeros(at)
    cones = [clarabel.SecondOrderConeT(1 + len(line)) for _, line in groups]

    def solve(tol: float) -> Array:
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = tol
        solver = clarabel.DefaultSolver(upper, linear, constraint, bounds, cones, settings)
        return np.array(solver.solve().x)[:n].reshape(shape)

    return solve
