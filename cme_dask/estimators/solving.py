"""The step of a fit from moments to coefficients, under its constraint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.ranges import observed_ranges
from cme_dask.constraints import Certified, Constraint, Normalized, Pointwise
from cme_dask.errors import DataError
from cme_dask.numerics.basis import LinearBasis
from cme_dask.numerics.joint import Geometry, JointSolution, JointSolver
from cme_dask.numerics.means import MeanMoments
from cme_dask.numerics.moments import Moments, Side
from cme_dask.numerics.problem import JointProblem, Regularization
from cme_dask.numerics.validation import Replicates, fold_replicates
from cme_dask.storage.priority import RowSample
from cme_dask.storage.sample import Sample

Array = Any

CONVERGENCE = ("raise", "warn")
_RANGE_ROWS = 4096  # of the row sample whose functions are held at once


@dataclass(frozen=True, eq=False)
class Solved:
    """What came of it.

    Attributes
    ----------
    solution
        Of all rows.
    replicates
        Without one fold each: given x, and given y.
    mean
        The moments of all rows.
    passes
        Passes over the rows that it took.
    """

    solution: JointSolution
    replicates: tuple[Replicates, Replicates]
    mean: MeanMoments
    passes: int


@dataclass(frozen=True, eq=False)
class Solving:
    """How moments become coefficients.

    Parameters
    ----------
    constraint
        What is asked of g.
    reg
        The ridge.
    convergence
        ``"raise"`` or ``"warn"`` where a solver misses its tolerance.
    """

    constraint: Constraint
    reg: Regularization
    convergence: str

    def __post_init__(self) -> None:
        if self.convergence not in CONVERGENCE:
            raise DataError(
                f"convergence must be one of {', '.join(CONVERGENCE)}, got {self.convergence!r}"
            )
        JointSolver(self.constraint, self.reg)  # which checks that they fit together

    def solver(self, sides: Sequence[Side], rows: RowSample) -> JointSolver:
        """The solver, with what its constraint needs to know of the bases.

        Parameters
        ----------
        sides
            Of the moments.
        rows
            The row sample.
        """
        bounds = sides[0].basis.bound, sides[1].basis.bound
        newton = None
        if isinstance(self.constraint, Certified) and self.constraint.bounds != "analytic":
            few = rows.prefix(_RANGE_ROWS)
            newton = sides[0].basis(few.parts[0]), sides[1].basis(few.parts[1])
        elif isinstance(self.constraint, Pointwise):
            counts = self.constraint.counts
            newton = (
                sides[0].basis(_landmarks(sides[0], rows, 0, counts[0])),
                sides[1].basis(_landmarks(sides[1], rows, 1, counts[1])),
            )
        return JointSolver(self.constraint, self.reg, Geometry(bounds, newton))

    def trial_solver(self, sides: Sequence[Side], rows: RowSample) -> JointSolver:
        """The solver for trials of the arithmetic, each of which solves several times.

        Programs without a closed form are represented by the one without their inequalities.
        """
        solver = self.solver(sides, rows)
        return solver if solver.closed else JointSolver(Normalized(), self.reg)

    def solve(
        self,
        moments: Moments,
        sides: tuple[Side, Side],
        rows: RowSample,
        sample: Sample,
        executor: Executor,
    ) -> Solved:
        """Solve, with all rows and without each fold.

        Parameters
        ----------
        moments, sides
            Of the pass.
        rows
            The row sample.
        sample, executor
            The rows, and where to run a pass over them, if the constraint needs one.

        Raises
        ------
        ConvergenceError
            If a solver missed its tolerance, and ``convergence`` is ``"raise"``.
        DataError
            If kernels or ridge don't fit the constraint.
        """
        mean = MeanMoments.of(moments.total(), sides)
        solver, passes = self.solver(sides, rows), 0
        whole = solver
        if isinstance(self.constraint, Certified) and self.constraint.bounds == "observed":
            ranges = _observed(mean, self.reg, sides, sample, executor)
            # Refits have other bases, whose ranges the row sample tells.
            whole, passes = replace(solver, geometry=replace(solver.geometry, ranges=ranges)), 1
        solution = whole(mean)
        solution.outcome.check(self.convergence)

        def refit(rest: MeanMoments) -> JointSolution:
            found = solver(rest, solution)
            found.outcome.check(self.convergence)
            return found

        return Solved(solution, fold_replicates(moments, sides, refit), mean, passes)


def _landmarks(side: Side, rows: RowSample, i: int, count: int) -> Array:
    """The pivots, then rows of the row sample, ``count`` in all."""
    pivots = np.asarray(side.basis.points)[:count]
    return np.concatenate([pivots, rows.parts[i][: count - len(pivots)]])


def _observed(
    mean: MeanMoments,
    reg: Regularization,
    sides: tuple[Side, Side],
    sample: Sample,
    executor: Executor,
) -> tuple[Array, Array]:
    problem = JointProblem.of(mean, reg, centred=True)
    x, y = observed_ranges(
        sample,
        [
            LinearBasis(sides[0].basis, problem.transform_x, problem.eigenvalues_x),
            LinearBasis(sides[1].basis, problem.transform_y, problem.eigenvalues_y),
        ],
        executor,
    )
    return x, y
