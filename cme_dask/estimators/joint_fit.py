"""The steps of a fit of the joint distribution, to the calibrated, frozen model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.planning import FitContext, FitPlan, plan_fit
from cme_dask.estimators.recipe import (
    FittedBasis,
    FunctionsLike,
    Tolerance,
    declared,
    make_side,
)
from cme_dask.estimators.solving import SolveOptions, partitions
from cme_dask.estimators.tuned import EnsembleMember, describe_search, tuned_members
from cme_dask.kernels import Transform, TransformedKernel
from cme_dask.learning.candidates import Search, Tuning
from cme_dask.learning.losses import HeldLaws
from cme_dask.learning.partition import cell_spec
from cme_dask.models.assembly import Part, assemble
from cme_dask.models.joint import JointModel
from cme_dask.numerics.basis import Basis, LinearBasis, eigenbasis
from cme_dask.numerics.blocks import MomentSums
from cme_dask.numerics.calibration import HeldRows, LearnedCalibration, Levels, learn_calibration
from cme_dask.numerics.cells import CellReduction, CellStatistics, CellSums
from cme_dask.numerics.crossval import Replicates, held_out_folds
from cme_dask.numerics.joint import JointSolution
from cme_dask.numerics.moments import FeatureBlock, MomentReduction
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.precision import ComputeMode
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.resources import MemoryPlan, one_blas_thread, parallel_map
from cme_dask.numerics.scoring import Mapped
from cme_dask.passes.moments import make_moments
from cme_dask.passes.progress import StepBegan
from cme_dask.passes.run import PassReport

# Laws of refits without each fold, and the calibration of the laws that is learned from them


Array = Any

CHOICES = ("auto", True, False)

HELD_ROWS = 4000
"""Rows of the row sample at which laws of refits are judged, at most."""


def calibration_choice(
    choice: Any, ready: "FitContext", solving: "SolveOptions", support_size: int, *, learned: bool
) -> str | bool:
    """Whether laws are calibrated: ``auto``, True, or False where they can't be.

    Parameters
    ----------
    choice
        Of the estimator.
    ready, solving, support_size
        Of the fit.
    learned
        Whether kernels are learned.

    Raises
    ------
    DataError
        On another value, or where calibration is asked for and is impossible.
    """
    if not (isinstance(choice, bool) or choice == "auto"):
        raise DataError(f"calibration must be 'auto', True or False, got {choice!r}")
    obstacles = {
        f"constraint='none' or 'normalized', got {solving.constraint.name!r}": (
            not solving.constraint.linear
        ),
        f"n_folds of at least 2, got {ready.choice.n_folds}": ready.choice.n_folds < 2,
        "laws, got support_size=0": support_size == 0,
        "a numeric column of y": all(ready.choice.sample.columns[1].categorical),
    }
    met = [needed for needed, missing in obstacles.items() if missing]
    if choice is True and met:
        raise DataError(f"calibration=True needs {met[0]}: change that, or take calibration='auto'")
    if choice is True:
        return True
    return "auto" if choice and learned and not met else False


def with_calibration(fit: "JointRecipe", fitted: "Fitted") -> "Fitted":
    """The fit with calibrated laws, if that is asked for and pays.

    Parameters
    ----------
    fit
        The fit that was made.
    fitted
        Its result.
    """
    if not fit.calibration or len(held_out_folds(fitted.moments)) < 2:
        return fitted
    with one_blas_thread():
        learned = _learned(fit, fitted)
    if learned is None:
        return fitted
    metadata = {
        "kept": fit.calibration is True or learned.pays,
        "exponents": learned.calibration.to_list(),
        "gain": learned.gain,
        "std": learned.std if np.isfinite(learned.std) else None,
        "rows": learned.rows,
    }
    described = fitted.model.about | {"calibration": metadata}
    return replace(fitted, model=replace(fitted.model, about=described))


def _learned(fit: "JointRecipe", fitted: "Fitted") -> LearnedCalibration | None:
    """The calibration; None if fewer than two folds have rows in the row sample."""
    choice, cells = fit.ready.choice, fitted.model.y.cells
    assert cells is not None
    rows = choice.rows.prefix(HELD_ROWS)
    support = fitted.model.x.basis.newton.support(rows.parts[0])
    at = cells.support.assign(rows.parts[1])
    units = choice.sample.folding.units(rows.index, rows.units)
    folds = [
        HeldRows(laws.weights, at[held], support[held], rows.importance[held], units[held])
        for laws in refitted_laws(fit, fitted)
        if len(held := laws.held)
    ]
    if len(folds) < 2:
        return None
    labels = choice.sample.columns[1].categorical
    columns = [j for j, categorical in enumerate(labels) if not categorical]
    return learn_calibration(folds, cells.means, columns)


def refitted_laws(fit: "JointRecipe", fitted: "Fitted") -> Iterator[HeldLaws]:
    """Laws of refits without each fold, at the rows of the fold in the row sample.

    They are calibrated as those of the model are.
    """
    choice, model = fit.ready.choice, fitted.model
    rows = choice.rows.prefix(HELD_ROWS)
    folds = rows.folds(choice.sample.folding, choice.n_folds)
    cells, masses, calibration = model.y.cells, fitted.masses, model.calibration
    assert cells is not None
    assert masses is not None
    points = cells.support.points
    members = [
        (sides, moments, reg, retained, sides[0].basis(rows.parts[0]), sides[1].basis(points))
        for sides, moments, reg, retained in averaged(fit, fitted)
    ]
    levels = None if calibration is None else Levels(cells.means, calibration.columns)
    for fold in held_out_folds(members[0][1]):
        held = np.flatnonzero(folds == fold)
        ratio = np.zeros((len(held), len(points)))
        for sides, moments, reg, retained, left, right in members:
            solver = replace(fit.solving, reg=reg).solver(sides, choice.rows)
            result = solver(moments.means(without=fold)).shrunk(retained)
            given = left[held] @ result.transform_x @ result.coef.T
            ratio += result.base + given @ (right @ result.transform_y).T
        rest = masses.sum(axis=0) - masses[fold]
        calibrated = None
        if calibration is not None and levels is not None:
            support = model.x.basis.newton.support(rows.parts[0][held])
            calibrated = partial(calibration.weights, levels=levels, support=support)
        yield HeldLaws(held, ratio / len(members), rest / rest.sum(), cells.means, calibrated)


def averaged(fit: "JointRecipe", fitted: "Fitted") -> list[tuple[Any, Any, Any, float]]:
    """Sides, moments, ridge and share kept of the models whose ratios are averaged."""
    if not fitted.members:
        return [(fitted.sides, fitted.moments, fit.solving.reg, 1.0)]
    return [(m.part.sides, m.moments, m.candidate.reg, m.kept) for m in fitted.members]


# The steps of a fit of the joint distribution, from the row sample to the frozen model


_NEGATIVE_ROWS = 1024  # that tell the mass below zero

Functions = tuple[FunctionsLike | None, FunctionsLike | None]
"""Declared functions of x and of y."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a fit found; of a mean over several models, moments and solution are the best one's.

    ``masses``: sums of the weights of the rows in the cells of y by fold, shape (F, S), if the
    model has laws.
    """

    model: JointModel
    bases: tuple[FittedBasis, FittedBasis]
    solution: JointSolution
    replicates: tuple[Replicates, Replicates]
    moments: MomentSums
    sides: tuple[FeatureBlock, FeatureBlock]
    passes: int
    arithmetic: ComputeMode
    report: PassReport
    members: list[EnsembleMember]
    masses: Array | None


@dataclass(frozen=True, eq=False)
class JointRecipe:
    """A fit whose row sample is read, and whose kernels are known.

    Attributes
    ----------
    ready
        The row sample, the kernels, how pivots are chosen.
    solving
        How moments become coefficients.
    found
        The search, where kernels were learned.
    functions
        Declared functions of x and of y.
    tuning
        How many finalists of the search are averaged.
    learn_reg
        Whether the ridge is learned.
    tolerance
        The trace error that bases aim at, within a largest rank.
    support_size, accuracy, seed
        Parameters of the estimator.
    residual
        Whether a location model is tried: ``auto``, True or False.
    calibration
        Whether laws are calibrated: ``auto``, True or False.
    """

    ready: FitContext
    solving: SolveOptions
    found: Search | None
    functions: Functions
    tuning: Tuning
    learn_reg: bool
    tolerance: Tolerance
    support_size: int
    accuracy: float
    seed: int
    residual: str | bool = False
    calibration: str | bool = False

    def run(self) -> Fitted:
        """The passes, and everything after them."""
        fitted = with_calibration(self, self._mean() if self._averages else self._single())
        memory = fitted.report.memory.or_tighter(self._searched)
        return replace(fitted, report=replace(fitted.report, memory=memory))

    def on(self, sample: Sample) -> "JointRecipe":
        """The same fit of a sample that differs in its values only."""
        assert sample.row_sample is not None
        choice = replace(self.ready.choice, sample=sample, rows=sample.row_sample)
        return replace(self, ready=replace(self.ready, choice=choice))

    def plan(self) -> FitPlan:
        """What :meth:`run` would do and take."""
        result = self.found
        plan = plan_fit(
            self.ready,
            partial(self._specify, reg=self.solving.reg),
            self._landmarks,
            others=[
                ((one.kernel_x, one.kernel_y), partial(self._specify, reg=one.reg))
                for one in (result.finalists[1:] if result is not None and self._averages else ())
            ],
            search_seconds=0.0 if result is None else result.seconds,
            residual=self.residual,
            cells=self._cells,
        )
        return replace(plan, memory=plan.memory.or_tighter(self._searched))

    @property
    def _searched(self) -> MemoryPlan | None:
        return None if self.found is None else self.found.memory

    @property
    def scores(self) -> Transform | None:
        """Normal scores of y whose location is fitted, where the best kernel takes them."""
        if not (self.residual and self._averages and self.found is not None):
            return None
        kernel = self.found.finalists[0].kernel_y
        scored = self.found.finalists[0].trial.y.form == "scores"
        return kernel.transform if scored and isinstance(kernel, TransformedKernel) else None

    @property
    def _averages(self) -> bool:
        return self.found is not None and self.solving.constraint.averages

    def _single(self) -> Fitted:
        choice, solving = self.ready.choice, self.solving
        landmarks = self._landmarks()
        if landmarks is not None:
            cells = self._cells(landmarks)
            sides, moments, summed, arithmetic, report = self._measure(landmarks, cells)
            passes = 1
        else:
            bases, in_rounds = choice.bases(self.ready.kernels)
            cells = self._cells(bases)
            sides, moments, summed, arithmetic, report = self._measure(bases, cells)
            errors = moments.means().trace_error
            more, topping_up = choice.topped_up(bases, errors)
            if more is not None:
                sides, moments, _, arithmetic, report = self._measure(more, ())
            passes = in_rounds + 1 + topping_up + (more is not None)
        if choice.progress is not None:
            choice.progress(StepBegan("solution"))
        with one_blas_thread():
            part, more_passes = solving.solve(
                moments, sides, choice.rows, choice.sample, choice.budget
            )
            passes += self.ready.passes + more_passes
            metadata = self._about(solving.reg, passes, arithmetic, [])
            laws = _laws(cells, summed)
            model = self._assembled([part], moments, laws, metadata)
            x, y = fitted_bases(part)
        for i, basis in enumerate((x, y)):
            if choice.sample.residuals is None and isinstance(choice.wanted[i], str):
                missed = choice.may_miss(i)
                self.tolerance.warn("xy"[i], basis.rank, basis.trace_error, missed)
        return Fitted(
            model,
            (x, y),
            part.solution,
            part.replicates,
            moments,
            sides,
            passes,
            arithmetic,
            report,
            [],
            _masses(summed),
        )

    def _mean(self) -> Fitted:
        """One pass for all finalists; the mean of the best of them."""
        assert self.found is not None
        choice, cells = self.ready.choice, self._cells()
        members, summed, passes, report = tuned_members(
            self.ready,
            self.found,
            self.solving,
            self._specify,
            cells,
            self.tuning.averaged,
            self.learn_reg,
            top_up=self.tolerance.promised,
        )
        best, passes = members[0], passes + self.ready.passes
        model = self._assembled(
            [member.part for member in members],
            best.moments,
            _laws(cells, summed),
            self._about(best.candidate.reg, passes, best.arithmetic, members),
        )
        if choice.sample.residuals is None:  # their bases are nobody's choice
            for i, variable in enumerate("xy"):
                if not isinstance(choice.wanted[i], str):
                    continue
                reached = [
                    (member.part.trace_errors[i] or 0.0, member.part.sides[i].basis.rank)
                    for member in members
                ]
                error, rank = max(reached)
                self.tolerance.warn(variable, rank, error, choice.may_miss(i))
        info = model.about["trace_error"].values()
        x, y = (
            FittedBasis(variable.basis.newton, variable.basis, error)
            for variable, error in zip((model.x, model.y), info, strict=True)
        )
        return Fitted(
            model,
            (x, y),
            best.part.solution,
            best.part.replicates,
            best.moments,
            best.part.sides,
            passes,
            best.arithmetic,
            report,
            members,
            _masses(summed),
        )

    def _assembled(
        self,
        parts: Sequence[Part],
        moments: MomentSums,
        laws: Sequence[CellStatistics],
        about: dict[str, Any],
    ) -> JointModel:
        """The model, which also says whose rows it was fitted on."""
        sample, few = self.ready.choice.sample, self.ready.choice.rows.prefix(_NEGATIVE_ROWS)
        points = [(rows, few.importance) for rows in few.parts]
        return assemble(parts, moments, laws, sample.columns, points, about | origin(sample))

    def _about(
        self,
        reg: Regularization,
        passes: int,
        arithmetic: ComputeMode,
        members: Sequence[EnsembleMember],
    ) -> dict[str, Any]:
        """What the model says of its fit."""
        searched = {} if self.found is None else {"tuning": describe_search(self.found, members)}
        return {
            "passes": passes,
            "tol": self.tolerance.value,
            "constraint": self.solving.constraint.name,
            "constraint_options": self.solving.constraint.to_dict(),
            "reg": [reg.y, reg.x],
            "reg_form": reg.form,
            "arithmetic": arithmetic.name,
            **searched,
        }

    def _landmarks(self) -> list[PartitionBasis] | None:
        """Partitions of unity, for a constraint on these; None for others, which have pivots."""
        rule = self.solving.constraint.landmarks_of_partition
        if rule is None:
            return None
        most = None if self.tolerance.default_rank else self.tolerance.max_rank
        return partitions(self.ready, rule, self.solving.reg, most, self.seed)

    def _cells(self, bases: Sequence[Basis] = ()) -> tuple[CellReduction, ...]:
        """Cells of x and of y on which conditional laws live, with these bases."""
        if self.support_size == 0:
            return ()
        choice = self.ready.choice

        def of_variable(i: int) -> CellReduction:
            basis = bases[i] if bases else None
            return cell_spec(
                choice.rows,
                i,
                choice.sample,
                self.support_size,
                declared(self.functions[i], choice.sample.columns[i]),
                basis if isinstance(basis, PartitionBasis) else None,
            )

        return tuple(parallel_map(of_variable, (0, 1), choice.budget.executor.cores))

    def _specify(
        self, bases: Sequence[Basis], reg: Regularization
    ) -> tuple[MomentReduction, ComputeMode]:
        """The moments of these bases, with the arithmetic that the accuracy allows."""
        choice = self.ready.choice
        spec = MomentReduction(self.sides(bases), choice.n_folds)
        solving = replace(self.solving, reg=reg)
        cores = choice.budget.executor.function_threads
        return solving.arithmetic(spec, choice.rows, choice.sample.n_rows, self.accuracy, cores)

    def sides(self, bases: Sequence[Basis]) -> tuple[FeatureBlock, FeatureBlock]:
        """Both variables on these bases, with the functions whose moments are made."""
        sample, rows = self.ready.choice.sample, self.ready.choice.rows
        judges = self.found.judges if self.found is not None and self._averages else None
        if judges is not None and self.scores is not None:
            judges = Mapped(self.scores, judges)
        x = make_side(bases[0], sample.columns[0], self.functions[0], rows, 0)
        return x, make_side(bases[1], sample.columns[1], self.functions[1], rows, 1, judges)

    def _measure(
        self, bases: Sequence[Basis], cells: Sequence[CellReduction]
    ) -> tuple[
        tuple[FeatureBlock, FeatureBlock],
        MomentSums,
        tuple[CellSums, ...],
        ComputeMode,
        PassReport,
    ]:
        """The moment pass, with sums by cell."""
        choice = self.ready.choice
        spec, arithmetic = self._specify(bases, self.solving.reg)
        (moments,), summed, report = make_moments(
            choice.sample, [spec], choice.budget, choice.progress, choice.sample_rows, cells
        )
        x, y = spec.features
        return (x, y), moments, summed, arithmetic, choice.covering(report, spec.ranks)


def fitted_bases(part: Part) -> tuple[FittedBasis, FittedBasis]:
    """Bases of x and of y, with what the pass measured of them."""
    x, y = (
        FittedBasis(side.basis, LinearBasis(side.basis, *eigenbasis(part.mean.gram(v))), error)
        for v, side, error in zip("xy", part.sides, part.trace_errors, strict=True)
    )
    return x, y


def origin(sample: Sample) -> dict[str, Any]:
    """What a model says of the rows that it was fitted on."""
    return {
        "location": sample.location,
        "fold_by": str(sample.folding),
        "part": None if sample.part is None else sample.part.to_dict(),
    }


def _laws(cells: Sequence[CellReduction], summed: Sequence[CellSums]) -> tuple[CellStatistics, ...]:
    return tuple(spec.statistics(sums) for spec, sums in zip(cells, summed, strict=True))


def _masses(summed: Sequence[CellSums]) -> Array | None:
    return summed[1].masses if summed else None
