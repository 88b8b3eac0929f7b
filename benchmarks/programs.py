"""Measurements of quadratic programs in one process: certified in two forms, and couplings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.coverage import SCENARIOS
from cme_dask.constraints import Coupling
from cme_dask.kernels import Gaussian
from cme_dask.metrics import oracle_error
from cme_dask.numerics.basis import Basis, NewtonBasis
from cme_dask.numerics.certified import solve_certified, solve_paper_form
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.crossval import PairMeans
from cme_dask.numerics.moments import (
    FeatureBlock,
    Function,
    MomentReduction,
    Moments,
    strip_moments,
)
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.problem import JointProblem, JointSolution, JointSolver, Regularization

Array = Any
Result = dict[str, Any]
Describe = Callable[[], Result]
Run = Callable[[], Describe]

CLOSED = "closed form"

_SCENARIO = "strong"
_REG = 1e-6
_KAPPA = 1.0  # Gaussian kernels are at most 1, and so are the functions of their bases
_WIDTH = 1.6  # of the region that most rows lie in: eight standard deviations
_TEST_ROWS = 2000


@dataclass(frozen=True)
class SolveProgram:
    """One solve of a certified program, from moments of a small sample of a known law.

    Attributes
    ----------
    solver
        ``"closed form"`` in the centred basis, or the paper's form by ``"clarabel"`` or ``"osqp"``.
    rows
        Rows of the sample.
    rank_x, rank_y
        Numbers of pivots; the paper's form has rank_x times rank_y unknowns.
    limit
        Seconds that a quadratic programming solver may take.
    """

    solver: str
    rows: int
    rank_x: int
    rank_y: int
    limit: float

    def prepare(self) -> Run:
        """The sample, its moments, and the program in its basis."""
        law = SCENARIOS[_SCENARIO]
        x, y = law.draw(self.rows, 0)
        # Length scales near the distance of so many pivots, so that all are reached.
        scales = _WIDTH / self.rank_x, _WIDTH / np.sqrt(self.rank_y)
        bases = []
        for rows, scale, rank in zip((x, y), scales, (self.rank_x, self.rank_y), strict=True):
            kernel = Gaussian(float(scale))
            result = pivoted_cholesky(kernel, rows, 0.0, rank)
            bases.append(NewtonBasis(kernel, rows[result.pivots], result.factor))
        mean = _moments((x, y), bases)
        problem = JointProblem.of(
            mean, Regularization(_REG, _REG, "two-sided"), centred=self.solver == CLOSED
        )
        return partial(self._run, problem, mean, bases[0])

    def _run(self, problem: JointProblem, mean: Moments, basis: NewtonBasis) -> Describe:
        if self.solver == CLOSED:
            kappa = np.asarray(_KAPPA)
            coef, outcome = solve_certified(problem, kappa, kappa)
        else:
            means = problem.transform_x.T @ mean.means["x"], problem.transform_y.T @ mean.means["y"]
            coef, outcome = solve_paper_form(
                problem, *means, _KAPPA, self.solver, seconds=self.limit
            )
        solution = JointSolution.of(problem, coef, outcome)
        return partial(_describe, solution, mean, basis, problem.objective(coef))


@dataclass(frozen=True)
class SolveCoupling:
    """One solve of a coupling, from moments of a small sample of a known law.

    Attributes
    ----------
    rows
        Rows of the sample.
    landmarks
        Number of landmarks of x and of y, rows of the sample.
    scale
        Length scales in standard deviations.
    reg
        The ridge.
    """

    rows: int
    landmarks: int
    scale: float
    reg: float

    def prepare(self) -> Run:
        """The sample and its moments."""
        parts = SCENARIOS[_SCENARIO].draw(self.rows, 0)
        bases = [
            PartitionBasis(Gaussian(tuple(self.scale * part.std(axis=0))), part[: self.landmarks])
            for part in parts
        ]
        return partial(self._run, _moments(parts, bases), bases[0])

    def _run(self, mean: Moments, basis: Basis) -> Describe:
        solver = JointSolver(Coupling(), Regularization(self.reg, self.reg))
        solution = solver.solve(mean)
        loss = PairMeans.of(mean).loss(solution.coef - 1.0)
        return partial(_describe, solution, mean, basis, loss / 2.0)


def _moments(parts: tuple[Array, Array], bases: Sequence[Basis]) -> Moments:
    """Moments of all rows, with the events as functions of y."""
    law = SCENARIOS[_SCENARIO]
    functions: dict[str, Function] = {
        f"t{i}": partial(_event, i) for i in range(law.events(parts[1][:1]).shape[1])
    }
    x, y = (tuple(f"{v}{i}" for i in range(z.shape[1])) for v, z in zip("xy", parts, strict=True))
    sides = FeatureBlock(bases[0], x), FeatureBlock(bases[1], y, functions)
    moments = strip_moments(
        MomentReduction(sides), parts, None, np.zeros(len(parts[0]), dtype=np.int64)
    )
    return moments.means()


def _event(number: int, y: Array) -> Array:
    return SCENARIOS[_SCENARIO].events(y)[:, number]


def _describe(solution: JointSolution, mean: Moments, basis: Basis, objective: float) -> Result:
    """How good the solution is, as a program and as an estimate: criterion (43) on new rows."""
    law, outcome = SCENARIOS[_SCENARIO], solution.info
    test = law.draw(_TEST_ROWS, 1)[0]
    constant, slope = solution.answer(mean, 0)
    truth = law.truth(test)
    events = slice(-truth.shape[1], None)  # after the columns of y
    expected = constant[events] + basis(test) @ solution.transform_x @ slope[:, events]
    return {
        "unknowns": int(solution.coef.size),
        "ranks": [basis.rank, len(mean.means["y"])],
        "status": outcome.status,
        "iterations": outcome.iterations,
        "kkt_residual": outcome.kkt_residual,
        "gap": outcome.gap,
        "objective": objective,
        "oracle_error": oracle_error(expected, truth),
    }
