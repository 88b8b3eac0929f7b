"""The step of a fit from moments to coefficients, and landmarks of couplings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cme_dask.constraints import Constraint, LandmarkRule, Normalized
from cme_dask.data.row_sample import RowSample
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.pivoting import given_points
from cme_dask.estimators.planning import FitContext
from cme_dask.estimators.recipe import choose_mode, trial_rows
from cme_dask.learning.partition import CANDIDATES, choose_landmarks, landmark_number
from cme_dask.models.assembly import Part
from cme_dask.numerics.blocks import MomentSums
from cme_dask.numerics.joint import JointSolver
from cme_dask.numerics.moments import FeatureBlock, MomentReduction
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.precision import SAFE, ComputeMode, JointChange
from cme_dask.numerics.problem import Regularization, centred_bases
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.selections import observed_ranges

# The step of a fit from moments to coefficients, under its constraint


Array = Any

CONVERGENCE = ("raise", "warn")


@dataclass(frozen=True, eq=False)
class SolveOptions:
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

    def solver(self, sides: Sequence[FeatureBlock], rows: RowSample) -> JointSolver:
        """The solver, with what its constraint needs to know of the bases.

        Parameters
        ----------
        sides
            Of the moments.
        rows
            The row sample.
        """
        bases = [side.basis for side in sides]
        return JointSolver(self.constraint, self.reg, self.constraint.bounds_of(bases, rows.parts))

    def trial_solver(self, sides: Sequence[FeatureBlock], rows: RowSample) -> JointSolver:
        """The solver for trials of the arithmetic, each of which solves several times.

        A constraint without a closed form is represented by normalization alone.
        """
        if not self.constraint.closed:
            return JointSolver(Normalized(), self.reg)
        return self.solver(sides, rows)

    def solve(
        self,
        moments: MomentSums,
        sides: tuple[FeatureBlock, FeatureBlock],
        rows: RowSample,
        sample: Sample,
        budget: MemoryBudget,
    ) -> tuple[Part, int]:
        """Solve, with all rows and without each fold; and the passes over the rows that it took.

        Parameters
        ----------
        moments, sides
            Of the pass.
        rows
            The row sample.
        sample, budget
            The rows, and where to run a pass over them, if the constraint needs one.

        Raises
        ------
        ConvergenceError, DataError
            See :meth:`Part.solved`.
        """
        solver = self.solver(sides, rows)
        if not self.constraint.needs_ranges:
            return Part.solved(moments, sides, solver, self.convergence), 0
        mean = moments.means()
        bases = centred_bases(mean, self.reg, [side.basis for side in sides])
        x, y = observed_ranges(sample, bases, budget)
        # Refits have other bases, whose ranges are those over the row sample.
        whole = replace(solver, bounds=replace(solver.bounds, ranges=(x, y)))
        return Part.solved(moments, sides, solver, self.convergence, whole=whole), 1

    def arithmetic(
        self, spec: MomentReduction, rows: RowSample, n_rows: int, accuracy: float, cores: int
    ) -> tuple[MomentReduction, ComputeMode]:
        """The moments with the arithmetic that the accuracy allows.

        Parameters
        ----------
        spec
            What the pass will compute.
        rows
            The row sample.
        n_rows
            Rows of the pass.
        accuracy
            Of the estimator.
        cores
            See :func:`choose_mode`.
        """
        if self.constraint.landmarks_of_partition is not None:
            return spec, SAFE  # partitions of unity take no triangular solve that could be left out
        trial = trial_rows(rows, spec.ranks)

        def change() -> JointChange:
            return JointChange(spec, trial.parts, self.trial_solver(spec.features, rows))

        return choose_mode(spec, trial, n_rows, accuracy, change, cores)


# The step of a fit that chooses the landmarks of a coupling


_ROWS = 1 << 13  # of the row sample, among which landmarks are chosen


def partitions(
    ready: FitContext,
    rule: LandmarkRule,
    reg: Regularization,
    max_rank: int | None,
    seed: int,
) -> list[PartitionBasis]:
    """Partitions of unity of x and of y on landmarks from the row sample, or on given points.

    Parameters
    ----------
    ready
        The preparation of the fit.
    rule
        How many landmarks there are and what they are. Where the number is to be chosen, the
        held-out loss of couplings on the row sample decides.
    reg
        The ridge.
    max_rank
        Largest number that is tried.
    seed
        Of k-means.

    Raises
    ------
    DataError
        If a kernel can be negative, or pivots are to be chosen over all rows.
    """
    choice, rows = ready.choice, ready.choice.rows.prefix(_ROWS)
    counts = rule.counts
    if any(isinstance(requested, str) and requested != "sampled" for requested in choice.wanted):
        raise DataError(
            "constraint='coupling' takes landmarks from the row sample or given points as pivots, "
            f"got pivots={choice.wanted!r}"
        )
    if counts is None:  # of a side whose points are given it is not asked
        counts = (1, 1)
    with one_blas_thread():
        if rule.counts is None and any(isinstance(requested, str) for requested in choice.wanted):
            tried = [c for c in CANDIDATES if max_rank is None or c <= max_rank] or [max_rank or 1]
            kernel_x, kernel_y = ready.kernels
            result = landmark_number(
                (kernel_x, kernel_y),
                (rows.parts[0], rows.parts[1]),
                rows.importance,
                reg,
                choice=rule.choice,
                seed=seed,
                candidates=tried,
            )
            counts = result.count, result.count
        bases = []
        for i, (kernel, requested) in enumerate(zip(ready.kernels, choice.wanted, strict=True)):
            if isinstance(requested, str):
                points = choose_landmarks(
                    kernel, rows.parts[i], rows.importance, counts[i], rule.choice, seed
                )
            else:
                # All of them: landmarks have cells, they need not be linearly independent.
                points = given_points(requested, choice.sample.columns[i], choice.names[i])
            bases.append(PartitionBasis(kernel, points))
    return bases
