"""The steps of a fit of the joint distribution, from the row sample to the calibrated model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from cme_dask.config import HELD_ROWS, MAX_RANK
from cme_dask.constraints import Normalized, parse
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, remedy
from cme_dask.estimators.base import Functions, MeanRegressor, Measured
from cme_dask.estimators.context import FitContext, Tolerance
from cme_dask.estimators.growing import different_functions, functions_of_first_call
from cme_dask.estimators.planning import FitPlan
from cme_dask.estimators.recipe import FittedBasis, declared, make_cells, make_side
from cme_dask.estimators.steps import LOCATION, PIVOTS, SEARCH, SECOND, SECOND_PASS
from cme_dask.estimators.tuned import (
    EnsembleFit,
    EnsembleMember,
    describe_search,
    search_kernels,
)
from cme_dask.kernels import Transform, TransformedKernel
from cme_dask.learning.candidates import Tuning
from cme_dask.learning.landmarks import CANDIDATES, choose_landmarks, landmark_number
from cme_dask.learning.losses import HeldLaws
from cme_dask.models.assembly import Component, assemble
from cme_dask.models.joint import JointModel
from cme_dask.models.merging import FitSums, JointSums, union
from cme_dask.numerics.basis import Basis, LinearBasis, eigenbasis
from cme_dask.numerics.calibration import HeldRows, LearnedCalibration, Levels, learn_calibration
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.crossval import held_out_folds
from cme_dask.numerics.folds import RowSample
from cme_dask.numerics.moments import FeatureBlock, Function, MomentReduction
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.precision import JointChange
from cme_dask.numerics.problem import JointSolver, Regularization, centred_bases
from cme_dask.numerics.resources import MemoryPlan, one_blas_thread, parallel_map
from cme_dask.numerics.rows import BasisRanges
from cme_dask.numerics.scoring import Mapped
from cme_dask.passes.progress import StepBegan
from cme_dask.passes.run import run_pass

Array = Any

_DISTINCT = 20  # a column of y with no more distinct values is taken for discrete
_NEGATIVE_ROWS = 1024  # at which mass below zero is summed
_LANDMARK_ROWS = 1 << 13  # of the row sample, among which landmarks are chosen


@dataclass(frozen=True, eq=False)
class FitResult:
    """What a fit of the joint distribution made; of a mean over several models, of the best one.

    Attributes
    ----------
    model, bases
        The model, and its bases with what the pass measured of them.
    component
        The solution.
    measured
        Sums over the rows.
    members
        The models whose density ratios are averaged, best first; empty of one alone.
    """

    model: JointModel
    bases: tuple[FittedBasis, FittedBasis]
    component: Component
    measured: Measured
    members: list[EnsembleMember]

    def described(self, **info: Any) -> Self:
        """With what else the model says of its fit."""
        return replace(self, model=replace(self.model, about=self.model.about | info))

    def with_memory(self, plan: MemoryPlan) -> Self:
        """With a plan of memory that may be tighter than that of the pass."""
        report = self.measured.report
        report = replace(report, memory=report.memory.or_tighter(plan))
        return replace(self, measured=replace(self.measured, report=report))


class JointFit(MeanRegressor):
    """What :class:`JointDistribution` is made of: its moments, its solution, its model."""

    _kernels = {"kernel_x": "x", "kernel_y": "y"}  # noqa: RUF012 - never changed

    _learned = ("kernel_x", "kernel_y")

    model_: JointModel
    reg: float | tuple[float, float] | None
    reg_form: str
    constraint: Any
    convergence: str
    n_folds: int
    support_size: int
    residual: str | bool
    calibration: str | bool
    tuning: Tuning | None
    _functions: tuple[Mapping[str, Function], Mapping[str, Function]]

    @property
    def _tuning(self) -> Tuning:
        return self.tuning or Tuning()

    @property
    def _tolerance(self) -> Tolerance:
        return Tolerance.of(self.tol, self.max_rank, MAX_RANK if self._learns() else None)

    # Before the pass: kernels, bases, moments

    def _search(self, context: FitContext) -> FitContext:
        constraint = parse(self.constraint)
        reg = constraint.default_reg if self.reg is None else self.reg
        solver = JointSolver(constraint, Regularization.parse(reg, self.reg_form))
        context = replace(context, solver=solver)
        if self._learns():
            x, y = (
                None if getattr(self, name) is None else kernel
                for name, kernel in zip(self._kernels, context.kernels, strict=True)
            )
            functions, learn_reg = context.functions["functions"], self.reg is None
            context = search_kernels(context, (x, y), functions, self._tuning, learn_reg)
        columns, rows = context.sample.columns[1], context.rows.parts[1]
        labels = f"numeric columns of y, got labels in {', '.join(map(repr, columns.categories))}"
        residual = self._possible(context, "residual", labels, bool(columns.categories))
        if residual == "auto" and any(len(np.unique(column)) <= _DISTINCT for column in rows.T):
            residual = False
        if not residual and context.progress is not None:
            left_out = (LOCATION, SECOND + SEARCH, *SECOND_PASS)
            context.progress(StepBegan(PIVOTS, without=left_out))
        calibration = self._possible(
            context, "calibration", "a numeric column of y", all(columns.categorical)
        )
        return replace(context, residual=residual, calibration=calibration)

    def _possible(self, context: FitContext, name: str, columns: str, unusable: bool) -> str | bool:
        """A choice of the user that only some fits can take: ``auto``, True or False.

        ``auto`` is for learned kernels: who gives them says what is to be fitted.
        """
        choice: str | bool = getattr(self, name)
        if not (isinstance(choice, bool) or choice == "auto"):
            raise DataError(f"{name} must be 'auto', True or False, got {choice!r}")
        if choice is False or (choice == "auto" and context.search is None):
            return False
        constraint, folds = context.solver.constraint, context.n_folds
        obstacles = {
            f"constraint='none' or 'normalized', got {constraint.name!r}": not constraint.linear,
            f"{remedy('n_folds', '--folds')} of at least 2, got {folds}": folds < 2,
            "laws, got support_size=0": self.support_size == 0,
            columns: unusable,
        }
        met = [needed for needed, missing in obstacles.items() if missing]
        if choice is True and met:
            needs = remedy(f"{name}=True", f"--{name} yes")
            auto = remedy(f"{name}='auto'", f"--{name} auto")
            raise DataError(f"{needs} needs {met[0]}: change that, or take {auto}")
        return False if met else choice

    def _scores(self, context: FitContext) -> Transform | None:
        """Normal scores of y whose location is fitted, where the best kernel takes them."""
        if not (context.residual and context.averages):
            return None
        best = context.search.finalists[0]
        scored = best.trial.y.form == "scores" and isinstance(best.kernel_y, TransformedKernel)
        return best.kernel_y.transform if scored else None

    def _spec(self, context: FitContext, bases: Sequence[Basis]) -> MomentReduction:
        columns, rows = context.sample.columns, context.rows
        scoring = context.search.functions if context.averages else None
        if scoring is not None and (scores := self._scores(context)) is not None:
            scoring = Mapped(scores, scoring)
        functions_x, functions = (context.functions[name] for name in ("functions_x", "functions"))
        x = make_side(bases[0], columns[0], functions_x, rows, 0)
        y = make_side(bases[1], columns[1], functions, rows, 1, scoring)
        return MomentReduction((x, y), context.n_folds)

    def _change(
        self, spec: MomentReduction, trial: RowSample, rows: RowSample, accuracy: float, solver: Any
    ) -> JointChange | None:
        if solver.constraint.partition:
            return None  # partitions of unity take no triangular solve that could be left out
        return JointChange(spec, trial.parts, trial_solver(solver, spec.features, rows))

    def _cells(self, context: FitContext, bases: Sequence[Basis] = ()) -> tuple[CellReduction, ...]:
        if self.support_size == 0:
            return ()

        def of_variable(i: int) -> CellReduction:
            functions = context.functions[("functions_x", "functions")[i]]
            return make_cells(
                context.rows,
                i,
                context.sample,
                declared(functions, context.sample.columns[i]),
                bases[i].partition if bases else None,
                size=self.support_size,
            )

        return tuple(parallel_map(of_variable, (0, 1), context.budget.executor.cores))

    def _landmarks(self, context: FitContext) -> Sequence[Basis] | None:
        coupled = context.solver.constraint.partition
        return partitions(context, self.max_rank) if coupled else None

    def _planned(self, context: FitContext, *_: Any) -> FitPlan:
        solver, search = context.solver, context.search
        finalists = search.finalists[1:] if context.averages else ()
        others = [
            (
                (one.kernel_x, one.kernel_y),
                partial(self._specify, context, solver=replace(solver, reg=one.reg)),
            )
            for one in finalists
        ]
        plan = super()._planned(context, others)
        return (
            plan if search is None else replace(plan, memory=plan.memory.or_tighter(search.memory))
        )

    # The pass, the solution, the model

    def _result(self, context: FitContext) -> FitResult:
        """The passes, and everything after them."""
        if context.averages:
            result = self._mean(context)
        else:
            result = self._single(context, self._measure(context))
        if context.calibration:
            result = with_calibration(context, result)
        return result if context.search is None else result.with_memory(context.search.memory)

    def _single(self, context: FitContext, measured: Measured) -> FitResult:
        """The solution of the moments."""
        (side_x, side_y), moments = measured.sides, measured.moments
        if context.progress is not None:
            context.progress(StepBegan("solution"))
        with one_blas_thread():
            bases = [side_x.basis, side_y.basis]
            solver = whole = context.solver.on(bases, context.rows.parts)
            if solver.constraint.bounds == "observed":
                centred = centred_bases(moments.means(), solver.reg, bases)
                x, y = run_pass(context.sample, BasisRanges(tuple(centred)), context.budget)[0]
                # Refits have other bases, whose ranges are those over the row sample.
                whole = replace(solver, bounds=solver.bounds._replace(ranges=(x, y)))
                measured = replace(measured, passes=measured.passes + 1)
            component = Component.solved(
                moments, (side_x, side_y), solver, self.convergence, whole=whole
            )
            model = self._model(context, [component], measured, solver.reg, [])
            fitted = fitted_bases(component)
        ranks = [basis.rank for basis in bases]
        self._warn_of_trace(context, list(zip(component.trace_errors, ranks, strict=True)))
        return FitResult(model, fitted, component, measured, [])

    def _mean(self, context: FitContext) -> FitResult:
        """One pass for all finalists; the mean of the best of them."""
        ensemble = EnsembleFit(
            context,
            context.solver,
            partial(self._specify, context),
            self._tuning.averaged,
            learn_reg=self.reg is None,
            top_up=self._tolerance.promised,
        )
        members, measured = ensemble.run(self._cells(context))
        best, components = members[0], [member.component for member in members]
        model = self._model(context, components, measured, best.candidate.reg, members)
        reached = [
            max((one.trace_errors[i] or 0.0, one.sides[i].basis.rank) for one in components)
            for i in (0, 1)
        ]
        self._warn_of_trace(context, reached)
        x, y = (
            FittedBasis(variable.basis.newton, variable.basis, model.about["trace_error"][name])
            for name, variable in zip("xy", (model.x, model.y), strict=True)
        )
        return FitResult(model, (x, y), best.component, measured, members)

    def _model(
        self,
        context: FitContext,
        components: Sequence[Component],
        measured: Measured,
        reg: Regularization,
        members: Sequence[EnsembleMember],
    ) -> JointModel:
        """The model, with what it says of its fit and whose rows it was fitted on."""
        sample, few = context.sample, context.rows.prefix(_NEGATIVE_ROWS)
        constraint, search = context.solver.constraint, context.search
        metadata = {
            "passes": measured.passes,
            "tol": self._tolerance.value,
            "constraint": constraint.name,
            "constraint_options": constraint.to_dict(),
            "reg": [reg.y, reg.x],
            "reg_form": reg.form,
            "arithmetic": measured.arithmetic.name,
            **({} if search is None else {"tuning": describe_search(search, members)}),
            **origin(sample),
        }
        laws = [spec.statistics(s) for spec, s in zip(measured.specs, measured.cells, strict=True)]
        points = [(rows, few.importance) for rows in few.parts]
        return assemble(components, measured.moments, laws, sample.columns, points, metadata)

    def _attributes(self, result: FitResult) -> dict[str, Any]:
        """Fitted attributes, by name."""
        component, (x, y) = result.component, result.component.sides
        return {
            "model_": result.model,
            "coef_": result.model.coef,
            "members_": result.members,
            "basis_x_": result.bases[0],
            "basis_y_": result.bases[1],
            "solution_": component.solution,
            "replicates_": component.replicates,
            "moments_": result.measured.moments,
            "sides_": component.sides,
            "_functions": (x.functions, y.functions),
        }

    # Rows that are added to a fit

    def _sums(self, functions: Functions) -> JointSums:
        names = "functions_x", "functions"
        again = [
            functions_of_first_call(known, functions[name])
            for known, name in zip(self._functions, names, strict=True)
        ]
        return sums_of(self.model_, dict(zip(names, again, strict=True)))

    def _of_both(
        self, earlier: FitSums, new: Measured, sample: Sample, *, alone: bool
    ) -> tuple[Measured, dict[str, Any]]:
        assert isinstance(earlier, JointSums)
        metadata = {key: value for key, value in earlier.about.items() if key != "parts_differ"}
        metadata |= {"arithmetic": new.arithmetic.name, **origin(sample)}
        metadata["next_row"] = sample.first_row + sample.n_rows
        added = replace(earlier, moments=new.moments, cells=new.cells, about=metadata)
        total = union([added] if alone else [earlier, added])
        passes = new.passes + (0 if alone else int(earlier.about["passes"]))
        model, component = total.solved(self.convergence, passes=passes)
        measured = replace(new, moments=total.moments, sides=total.sides, passes=passes)
        bases = fitted_bases(component)
        return measured, self._attributes(FitResult(model, bases, component, measured, []))


def sums_of(model: JointModel, functions: Functions) -> JointSums:
    """Sums over the rows of a model, with the functions that it knows by name alone."""
    sums = JointSums.of(model)
    given = [
        declared(functions[name], columns)
        for name, columns in zip(("functions_x", "functions"), sums.columns, strict=True)
    ]
    for side, known in zip(sums.sides, given, strict=True):
        if set(known) != set(side.functions):
            raise different_functions(side.functions, known)
    x, y = (
        replace(side, functions={name: known[name] for name in side.functions})
        for side, known in zip(sums.sides, given, strict=True)
    )
    specs = tuple(
        replace(spec, functions=side.functions)
        for spec, side in zip(sums.specs, (x, y), strict=False)
    )
    return replace(sums, sides=(x, y), specs=specs)


def fitted_bases(component: Component) -> tuple[FittedBasis, FittedBasis]:
    """Bases of x and of y, with what the pass measured of them."""
    sides, errors, mean = component.sides, component.trace_errors, component.mean
    x, y = (
        FittedBasis(side.basis, LinearBasis(side.basis, *eigenbasis(mean.gram(v))), error)
        for v, side, error in zip("xy", sides, errors, strict=True)
    )
    return x, y


def origin(sample: Sample) -> dict[str, Any]:
    """What a model says of the rows that it was fitted on."""
    return {
        "location": sample.location,
        "fold_by": str(sample.folding),
        "part": None if sample.part is None else sample.part.to_dict(),
    }


def trial_solver(
    solver: JointSolver, sides: Sequence[FeatureBlock], rows: RowSample
) -> JointSolver:
    """The solver for trials of the arithmetic, each of which solves several times.

    A constraint without a closed form is represented by normalization alone.
    """
    if not solver.constraint.closed:
        return JointSolver(Normalized(), solver.reg)
    return solver.on([side.basis for side in sides], rows.parts)


# Landmarks of couplings


def partitions(context: FitContext, max_rank: int | None) -> list[PartitionBasis]:
    """Partitions of unity of x and of y on landmarks from the row sample, or on given points.

    Where their number is to be chosen, the held-out loss of couplings on the row sample decides.

    Parameters
    ----------
    context
        What the fit has before its pass.
    max_rank
        Largest number that is tried.

    Raises
    ------
    DataError
        If a kernel can be negative, or pivots are to be chosen over all rows.
    """
    rows, modes = context.rows.prefix(_LANDMARK_ROWS), [each.mode for each in context.pivots]
    if any(each.in_rounds for each in context.pivots):
        raise DataError(
            "constraint='coupling' takes landmarks from the row sample or given points as pivots, "
            f"got pivots={tuple(modes)!r}"
        )
    constraint, seed = context.solver.constraint, context.seed
    counts = constraint.counts or (1, 1)
    with one_blas_thread():
        if constraint.counts is None and "sampled" in modes:
            tried = [c for c in CANDIDATES if max_rank is None or c <= max_rank] or [max_rank or 1]
            kernel_x, kernel_y = context.kernels
            result = landmark_number(
                (kernel_x, kernel_y),
                (rows.parts[0], rows.parts[1]),
                rows.importance,
                context.solver.reg,
                choice=constraint.choice,
                seed=seed,
                candidates=tried,
            )
            counts = result.count, result.count
        bases = []
        for i, (kernel, pivots) in enumerate(zip(context.kernels, context.pivots, strict=True)):
            # All given points: landmarks have cells, they need not be linearly independent.
            points = pivots.points
            if points is None:
                points = choose_landmarks(
                    kernel, rows.parts[i], rows.importance, counts[i], constraint.choice, seed
                )
            bases.append(PartitionBasis(kernel, points))
    return bases


# Laws of refits without each fold, and the calibration of the laws that is learned from them


def with_calibration(context: FitContext, result: FitResult) -> FitResult:
    """The result with calibrated laws, if that pays."""
    if len(held_out_folds(result.measured.moments)) < 2:
        return result
    with one_blas_thread():
        learned = _learned(context, result)
    if learned is None:
        return result
    info = {
        "kept": context.calibration is True or learned.pays,
        "exponents": learned.calibration.to_list(),
        "gain": learned.gain,
        "std": learned.std if np.isfinite(learned.std) else None,
        "rows": learned.rows,
    }
    return result.described(calibration=info)


def _learned(context: FitContext, result: FitResult) -> LearnedCalibration | None:
    """The calibration; None if fewer than two folds have rows in the row sample."""
    cells = result.model.y.cells
    assert cells is not None
    rows = context.rows.prefix(HELD_ROWS)
    support = result.model.x.basis.newton.support(rows.parts[0])
    at = cells.support.assign(rows.parts[1])
    units = context.sample.folding.units(rows.index, rows.units)
    folds = [
        HeldRows(laws.weights, at[held], support[held], rows.importance[held], units[held])
        for laws in refitted_laws(context, result)
        if len(held := laws.held)
    ]
    if len(folds) < 2:
        return None
    labels = context.sample.columns[1].categorical
    columns = [j for j, categorical in enumerate(labels) if not categorical]
    return learn_calibration(folds, cells.means, columns)


def refitted_laws(context: FitContext, result: FitResult) -> Iterator[HeldLaws]:
    """Laws of refits without each fold, at the rows of the fold in the row sample.

    They are calibrated as those of the model are.
    """
    model = result.model
    rows = context.rows.prefix(HELD_ROWS)
    folds = rows.folds(context.sample.folding, context.n_folds)
    cells, calibration = model.y.cells, model.calibration
    assert cells is not None
    masses, points = result.measured.cells[1].masses, cells.support.points
    members = [
        (
            moments,
            replace(context.solver, reg=reg).on([side.basis for side in sides], context.rows.parts),
            retained,
            sides[0].basis(rows.parts[0]),
            sides[1].basis(points),
        )
        for sides, moments, reg, retained in averaged(context, result)
    ]
    levels = None if calibration is None else Levels(cells.means, calibration.columns)
    for fold in held_out_folds(members[0][0]):
        held = np.flatnonzero(folds == fold)
        ratio = np.zeros((len(held), len(points)))
        for moments, of_member, retained, left, right in members:
            refit = of_member(moments.means(without=fold)).shrunk(retained)
            given = left[held] @ refit.transform_x @ refit.coef.T
            ratio += refit.base + given @ (right @ refit.transform_y).T
        rest = masses.sum(axis=0) - masses[fold]
        calibrated = None
        if calibration is not None and levels is not None:
            support = model.x.basis.newton.support(rows.parts[0][held])
            calibrated = partial(calibration.weights, levels=levels, support=support)
        yield HeldLaws(held, ratio / len(members), rest / rest.sum(), cells.means, calibrated)


def averaged(context: FitContext, result: FitResult) -> list[tuple[Any, Any, Any, float]]:
    """Sides, moments, ridge and share retained of the models whose ratios are averaged."""
    if not result.members:
        return [(result.component.sides, result.measured.moments, context.solver.reg, 1.0)]
    return [(m.component.sides, m.moments, m.candidate.reg, m.retained) for m in result.members]
