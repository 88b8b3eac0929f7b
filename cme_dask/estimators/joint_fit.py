"""The steps of a fit of the joint distribution, from the row sample to the calibrated model."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cme_dask.config import MAX_RANK
from cme_dask.constraints import Normalized, parse
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, ResourceError, option, remedy
from cme_dask.estimators.base import Declarations, FittedBasis, MeanRegressor, Measured, origin
from cme_dask.estimators.context import IN_ROUNDS, FitContext
from cme_dask.estimators.given_location import given_location, location_kind
from cme_dask.estimators.growing import (
    GrowingEstimator,
    different_functions,
    functions_of_first_call,
)
from cme_dask.estimators.locating import LocationSearch
from cme_dask.estimators.planning import (
    Choices,
    FitPlan,
    FurtherPass,
    plan_fit,
    trial_moments,
)
from cme_dask.estimators.refits import FitResult, with_calibration
from cme_dask.estimators.steps import LOCATION, PIVOTS, SEARCH, SECOND, SECOND_PASS
from cme_dask.estimators.support import column_values
from cme_dask.estimators.tuned import (
    FOLDS,
    EnsembleFit,
    EnsembleMember,
    FeatureMoments,
    OnLocation,
    describe_search,
    search_kernels,
)
from cme_dask.kernels import Transform
from cme_dask.kernels.evaluator import (
    one_blas_thread,
    parallel_map,
    release_memory,
)
from cme_dask.learning.candidates import Tuning
from cme_dask.learning.landmarks import CANDIDATES, check_given, choose_landmarks, landmark_number
from cme_dask.models.assembly import assemble, solve_by_fold
from cme_dask.models.conformal import check_by
from cme_dask.models.events import declared
from cme_dask.models.joint import JointModel
from cme_dask.models.merging import FitSums, JointSums, union
from cme_dask.numerics.basis import Basis, LinearBasis, eigenbasis
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.folds import Folding, RowSample
from cme_dask.numerics.moments import (
    FeatureBlock,
    Function,
    MomentReduction,
    Moments,
)
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.precision import JointChange
from cme_dask.numerics.problem import JointProblem, JointSolver, Regularization
from cme_dask.numerics.rows import BasisRanges
from cme_dask.numerics.support import make_support
from cme_dask.passes.progress import StepBegan
from cme_dask.passes.run import run_pass

Array = Any

_DISTINCT = 2  # a column of y with no more distinct values is an event, not a number
_TIES = 2  # rows that share a value of y, on average, from which on it has few of them
_NEGATIVE_ROWS = 1024  # at which mass below zero is summed
_LANDMARK_ROWS = 1 << 13  # of the row sample, among which landmarks are chosen
_COVARIANCES = 1 << 21  # numbers in the covariances of all cells, at most
_GROWN = 1 << 22  # rows times squared columns of which cells are made: a second
_ROWS_PER_PIVOT, _LEAST_RANK = 5, 30  # of learned bases: more of few rows tell no better
_ROWS_PER_CELL = 8  # of which they are made at least
_ROWS_IN_CELL, _LEAST_CELLS = 2, 100  # of learned laws: more of few rows tell no better


class JointFit(MeanRegressor, GrowingEstimator):
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
    conformal: str | bool = False
    conformal_by: str | None = None
    location: Any = None
    support: Any = None
    tuning: Tuning | None
    _functions: tuple[Mapping[str, Function], Mapping[str, Function]]

    @property
    def _tuning(self) -> Tuning:
        return self.tuning or Tuning()

    @property
    def _default_rank(self) -> int | None:
        return MAX_RANK if self._learns() else None

    # Before the pass: kernels, bases, moments

    def _search(self, context: FitContext) -> FitContext:
        if self.conformal_by is not None:
            check_by(self.conformal_by, context.sample.columns[0])
            if not self.conformal:
                raise DataError(
                    f"{remedy('conformal_by=', '--conformal-by')} needs conformity scores, got "
                    f"{remedy('conformal=False', '--conformal no')}: leave one of them out"
                )
        constraint = parse(self.constraint)
        reg = constraint.default_reg if self.reg is None else self.reg
        solver = JointSolver(constraint, Regularization.parse(reg, self.reg_form, constraint))
        context = replace(context, solver=solver)
        x, y = (
            None if getattr(self, name) is None else kernel
            for name, kernel in zip(self._kernels, context.kernels, strict=True)
        )
        if self.location is not None and self._possible(context, "residual", self.residual):
            covariate = x is None and context.pivots[0].mode != "given"
            context = replace(
                context, given=given_location(self.location, context, covariate=covariate)
            )
        # "auto" is for learned kernels: who gives them says what is to be fitted.
        undecided, given = x is None or y is None, context.given is not None
        residual, calibration, conformal = (
            choice is not False
            and (choice is True or undecided or (given and name == "residual"))
            and self._possible(context, name, choice)
            for name, choice in (
                ("residual", self.residual),
                ("calibration", self.calibration),
                ("conformal", self.conformal if self.conformal_by is None else True),
            )
        )
        # A given regressor is joined by another location, unless it is to be taken as it is.
        joins = given and residual == "auto" and location_kind(self.location) == "regressor"
        searches = residual and x is None and (joins or not given)
        location = LocationSearch(context, self._tuning.trees) if searches else None
        if undecided:
            if self.reg is not None and min(solver.reg[:2]) <= 0.0:
                raise DataError(
                    f"kernels are learned with positive ridges, got {option('reg')} {self.reg!r}: "
                    "give both kernels or a positive ridge, or leave it out"
                )
            context = search_kernels(
                _few_pivots(context),
                (x, y),
                self._tuning,
                self.reg is None,
                location,
                meanwhile=_bases_ahead,
            )
        if not residual and context.progress is not None:
            left_out = (LOCATION, SECOND + SEARCH, *SECOND_PASS)
            context.progress(StepBegan(PIVOTS, without=left_out))
        if residual and (joins or not given) and context.events is not None:
            context = replace(context, scores=_normal_scores(context))
        context = replace(
            context,
            residual=residual,
            calibration=calibration,
            conformal=conformal,
            locating=location,
        )
        if residual or self.support is not None:
            if self.support_size == 0:
                raise DataError(
                    f"{remedy('support=', '--support')} needs laws, got support_size=0: change "
                    "that, or leave the support out"
                )
            context = replace(context, values=column_values(self.support, context))
        if context.search is not None and location is None:
            release_memory()
        return context

    def _possible(self, context: FitContext, name: str, choice: str | bool) -> str | bool:
        """A choice of the user, ``auto`` or True, that only some fits can take: else False."""
        given = name == "residual" and self.location is not None
        columns, rows = context.sample.columns[1], context.rows.parts[1]
        constraint = context.solver.constraint
        folding, folds = context.sample.folding, context.n_folds
        if name == "residual":
            labels = ", ".join(map(repr, columns.categories))
            needed, unusable = f"numeric columns of y, got labels in {labels}", bool(labels)
        else:
            needed, unusable = "a numeric column of y", all(columns.categorical)
        obstacles = {
            f"constraint='none' or 'normalized', got {constraint.name!r}": not constraint.linear,
            f"{remedy('n_folds', '--folds')} of at least 2, got {folds}": folds < 2,
            "laws, got support_size=0": self.support_size == 0,
            needed: unusable,
            _two_folds(folding): len(context.rows.used_folds(folding, folds)) < 2,
        }
        if given:
            obstacles[f"{remedy('residual', '--residual')} 'auto' or True, got False"] = not choice
        met = [needed for needed, missing in obstacles.items() if missing]
        if given:
            if met:
                raise DataError(
                    f"{remedy('location=', '--location')} needs {met[0]}: change that, or leave "
                    "the location out"
                )
            return choice
        if met and name == "conformal" and self.conformal_by is not None:
            raise DataError(
                f"{remedy('conformal_by=', '--conformal-by')} needs {met[0]}: change that, or "
                "leave it out"
            )
        if choice is True and met:
            needs = remedy(f"{name}=True", f"--{name} yes")
            auto = remedy(f"{name}='auto'", f"--{name} auto")
            raise DataError(f"{needs} needs {met[0]}: change that, or take {auto}")
        if choice == "auto" and name == "residual":
            unusable = any(len(np.unique(column)) <= _DISTINCT for column in rows.T)
            return False if met or unusable else choice
        return False if met else choice

    def _change(
        self, spec: MomentReduction, trial: RowSample, rows: RowSample, accuracy: float, solver: Any
    ) -> JointChange | None:
        if solver.constraint.partition:
            return None  # partitions of unity take no triangular solve that could be left out
        return JointChange(spec, trial.parts, trial_solver(solver, spec.features, rows).solve)

    def _cells(self, context: FitContext, bases: Sequence[Basis] = ()) -> tuple[CellReduction, ...]:
        """Cells from the row sample; of more than 45 columns fewer, since each has a covariance."""
        if self.support_size == 0:
            return ()

        rows, sample = context.rows, context.sample
        n_rows = sample.expected_rows * rows.complete_share
        learned = context.search is not None and rows.complete
        most = max(len(rows) // _ROWS_IN_CELL, _LEAST_CELLS) if learned else self.support_size

        def of_variable(i: int) -> CellReduction:
            part, d = rows.parts[i], rows.parts[i].shape[1]
            size = max(min(self.support_size, most, _COVARIANCES // d**2), 1)
            few = part[: max(_GROWN // d**2, _ROWS_PER_CELL * size)]
            categorical = sample.columns[i].categorical
            support = make_support(few, rows.importance[: len(few)], size, categorical)
            partition = bases[i].partition if bases else None
            functions, n_folds = context.functions[i], context.n_folds
            return CellReduction.of(rows, i, n_rows, n_folds, support, functions, partition)

        return tuple(parallel_map(of_variable, (0, 1), context.executor.cores))

    def _landmarks(self, context: FitContext) -> Sequence[Basis] | None:
        coupled = context.solver.constraint.partition
        return partitions(context, self.max_rank) if coupled else None

    def _choices(self, context: FitContext, *_: Any) -> Choices:
        solver = context.solver
        finalists = context.search.finalists[1:] if context.averages else ()
        others = [
            (
                (one.kernel_x, one.kernel_y),
                partial(self._in_mode, context, solver=solver._replace(reg=one.reg)),
            )
            for one in finalists
        ]
        return super()._choices(context, others)

    def _planned(self, context: FitContext, *_: Any) -> FitPlan:
        return self._plan_of(context, self._choices(context))

    def _plan_of(self, context: FitContext, choices: Choices) -> FitPlan:
        """The plan of a fit that has chosen, with the memory of its search."""
        observed = context.solver.constraint.bounds == "observed" and not context.averages
        further = FurtherPass(
            "ranges of basis functions",
            lambda sums, sides: (
                context.sample,
                _basis_ranges(sums.means(), sides, context.solver.reg),
            ),
        )
        plan = plan_fit(context, choices, further if observed else None)
        if not context.solver.constraint.closed:
            plan = replace(plan, solution_seconds=_iterated_seconds(context, choices.specs[0]))
        search = context.search
        return (
            plan if search is None else replace(plan, memory=plan.memory.or_tighter(search.memory))
        )

    # The pass, the solution, the model

    def _result(
        self,
        context: FitContext,
        measured: Measured | None,
        on_location: OnLocation | None = None,
    ) -> FitResult:
        """The solution and the model from the moments.

        There are none (None) where density ratios are averaged: their kernels share a pass, and
        ``on_location`` is called with what it sums for a location before they are solved for.
        """
        solver, search, sample = context.solver, context.search, context.sample
        members: list[EnsembleMember] = []
        for_location: tuple[FeatureMoments, ...] = ()
        if measured is None:
            # One pass for all finalists, and the mean of the best of them.
            ensemble = EnsembleFit(
                context,
                solver,
                partial(self._in_mode, context),
                self._tuning.averaged,
                learn_reg=self.reg is None,
            )
            members, measured, for_location = ensemble.run(self._cells(context), on_location)
            components, reg = [each.component for each in members], members[0].candidate.reg
        else:
            reg = solver.reg
            if context.progress is not None:
                context.progress(StepBegan("solution"))
            with one_blas_thread():
                bases = [side.basis for side in measured.sides]
                solver = whole = solver.on(bases, context.rows.parts)
                if solver.constraint.bounds == "observed":
                    ranges = _basis_ranges(measured.moments.means(), measured.sides, reg)
                    ((x, y),), report = run_pass(
                        sample,
                        [ranges],
                        context.executor,
                        around=context.after_moments(measured.sides),
                    )
                    # Refits have other bases, whose ranges are those over the row sample.
                    whole = solver._replace(bounds=solver.bounds._replace(ranges=(x, y)))
                    memory = measured.report.memory.or_tighter(report.memory)
                    measured = measured._replace(
                        passes=measured.passes + 1,
                        report=measured.report._replace(memory=memory),
                    )
                components = [
                    solve_by_fold(
                        measured.moments, measured.sides, solver, self.convergence, whole=whole
                    )
                ]
        few = context.rows.prefix(_NEGATIVE_ROWS)
        metadata = {
            "passes": measured.passes,
            "tol": context.pivots[0].tol,
            "constraint": solver.constraint.name,
            "constraint_options": solver.constraint.to_dict(),
            "reg": [reg.y, reg.x],
            "reg_form": reg.form,
            "arithmetic": measured.arithmetic.name,
            **({} if search is None else {"tuning": describe_search(search, members)}),
            **origin(sample),
        }
        with one_blas_thread():
            cells = zip(measured.specs, measured.cells, strict=True)
            model = assemble(
                components,
                measured.moments,
                [spec.statistics(sums) for spec, sums in cells],
                sample.columns,
                [(rows, few.importance) for rows in few.parts],
                metadata,
            )
        reached = [
            max((each.trace_errors[i] or 0.0, each.sides[i].basis.rank) for each in components)
            for i in (0, 1)
        ]
        context.warn_of_trace(reached)
        result = FitResult(model, components[0], measured, members, {}, for_location)
        if context.calibration:
            result = with_calibration(context, result)
        return result if search is None else result.with_memory(search.memory)

    def _attributes(self, result: FitResult) -> dict[str, Any]:
        """Fitted attributes, by name."""
        component, model, errors = result.component, result.model, result.model.about["trace_error"]
        fitted: dict[str, Any] = {}
        with one_blas_thread():
            for name, variable, side in zip("xy", (model.x, model.y), component.sides, strict=True):
                basis = variable.basis
                if not result.members:  # the basis of the model may be centred
                    basis = LinearBasis(side.basis, *eigenbasis(component.mean.blocks[name, name]))
                fitted[f"basis_{name}_"] = FittedBasis(basis.newton, basis, errors[name])
        return fitted | {
            "model_": model,
            "coef_": model.coef,
            "members_": result.members,
            "solution_": component.solution,
            "replicates_": component.replicates,
            "moments_": result.measured.moments,
            "sides_": component.sides,
            "_functions": tuple(side.functions for side in component.sides),
        }

    # Rows that are added to a fit

    def _sums(self, functions: Declarations) -> JointSums:
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
        of_rows = ("parts_differ", "merged")
        metadata = {key: value for key, value in earlier.about.items() if key not in of_rows}
        metadata |= {"arithmetic": new.arithmetic.name, **origin(sample)}
        metadata["next_row"] = sample.first_row + sample.n_rows
        added = replace(earlier, moments=new.moments, cells=new.cells, about=metadata)
        total = union([added] if alone else [earlier, added])
        passes = new.passes + (0 if alone else int(earlier.about["passes"]))
        model, component = total.solved(self.convergence, passes=passes)
        measured = new._replace(moments=total.moments, sides=total.sides, passes=passes)
        return measured, self._attributes(FitResult(model, component, measured, [], {}))


def _two_folds(folding: Folding) -> str:
    """What a choice needs that is refused where all rows lie in one fold."""
    cause = ""
    if folding.by != "rows":
        cause = f", as {remedy('fold_by', '--fold-by')} {str(folding)!r} puts them together"
    return f"rows of positive weight in at least two folds, and all are in one{cause}"


def sums_of(model: JointModel, functions: Declarations) -> JointSums:
    """Sums over the rows of a model, with the functions of which it holds the names alone.

    Events need not be given, since the model holds their texts.
    """
    sums, given = JointSums.of(model), []
    names = "functions_x", "functions"
    for variable, name, columns in zip("xy", names, sums.columns, strict=True):
        texts = sums.about.get("events", {}).get(variable, {})
        known, again = declared(texts, columns), declared(functions[name], columns)
        for key, event in known.items():
            if again.get(key, event) != event:
                raise DataError(
                    f"the model was fitted with {key!r} as the event {texts[key]!r}, given is "
                    "another one: leave it out, or give it another name in a new fit"
                )
        given.append(known | again)
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


def trial_solver(
    solver: JointSolver, sides: Sequence[FeatureBlock], rows: RowSample
) -> JointSolver:
    """The solver for trials of the arithmetic, each of which solves several times.

    A constraint without a closed form is represented by normalization alone.
    """
    if not solver.constraint.closed:
        return JointSolver(Normalized(), solver.reg)
    return solver.on([side.basis for side in sides], rows.parts)


def _basis_ranges(mean: Moments, sides: Sequence[FeatureBlock], reg: Regularization) -> BasisRanges:
    """The reduction to the ranges of the centred basis functions."""
    problem = JointProblem.of(mean, reg, centred=True)
    psi_x = LinearBasis(sides[0].basis, problem.transform_x, problem.eigenvalues_x)
    psi_y = LinearBasis(sides[1].basis, problem.transform_y, problem.eigenvalues_y)
    return BasisRanges((psi_x, psi_y))


def _iterated_seconds(context: FitContext, spec: MomentReduction) -> float:
    """Seconds of the solution, and of as many as there are folds, from one on the row sample."""
    mean = trial_moments(context, spec).means()
    with one_blas_thread():
        begin = time.perf_counter()
        solver = context.solver.on([side.basis for side in spec.features], context.rows.parts)
        ready = time.perf_counter()
        solver.solve(mean)
        solved = time.perf_counter()
    solutions = 1 if spec.n_folds == 1 else 1 + spec.n_folds
    return ready - begin + solutions * (solved - ready)


def _normal_scores(context: FitContext) -> Transform | None:
    """Normal scores of y, if kernels of them are best or y has few values; else None.

    Several columns stay as they are: an error of scores moves each of them by another amount, so
    that their differences would no longer be those of rows.
    """
    search, y = context.search, context.rows.parts[1]
    if search is None or y.shape[1] > 1:
        return None
    few = any(_TIES * len(np.unique(column)) < len(column) for column in y.T)
    if few or search.finalists[0].trial.y.form == "scores":
        scores: Transform | None = search.kernels[1].maps.get("scores")
        return scores
    return None


def _few_pivots(context: FitContext) -> FitContext:
    """The context with no more pivots than so few rows tell of, where there are few."""
    if not context.rows.complete:
        return context
    most = max(len(context.rows) // _ROWS_PER_PIVOT, _LEAST_RANK)
    return replace(context, pivots=tuple(each.at_most(most) for each in context.pivots))


def _bases_ahead(context: FitContext, beside: int) -> FitContext:
    """The context with the bases of its finalists, if its row sample alone gives them.

    Parameters
    ----------
    context
        With the search for kernels.
    beside
        Bytes that are needed at the same time.
    """
    if not context.averages or any(pivots.mode != "sampled" for pivots in context.pivots):
        return context
    kernels = [(one.kernel_x, one.kernel_y) for one in context.search.finalists]
    begin = time.perf_counter()
    with suppress(ResourceError):
        alone = replace(context, progress=None, held=context.held + beside)
        made = {
            (i, kernel): basis
            for pair, bases in zip(kernels, alone.bases_of_each(kernels)[0], strict=True)
            for i, (kernel, basis) in enumerate(zip(pair, bases, strict=True))
        }
        return replace(context, made=made, made_seconds=time.perf_counter() - begin)
    return context


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
        If a kernel can be negative, pivots are to be chosen over all rows, or options ask for other
        landmarks than the pivots that are given.
    """
    rows, modes = context.rows.prefix(_LANDMARK_ROWS), [each.mode for each in context.pivots]
    categorical = tuple(columns.categorical for columns in context.sample.columns)
    if any(each.mode in IN_ROUNDS for each in context.pivots):
        raise DataError(
            "constraint='coupling' takes landmarks from the row sample or given points as pivots, "
            f"got pivots={tuple(modes)!r}"
        )
    constraint, seed = context.solver.constraint, context.seed
    check_given(constraint, [each.points for each in context.pivots], max_rank)
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
                folds=rows.folds(context.sample.folding, FOLDS),
                categorical=(categorical[0], categorical[1]),
            )
            counts = result.count, result.count
        bases = []
        for i, (kernel, pivots) in enumerate(zip(context.kernels, context.pivots, strict=True)):
            # All given points: landmarks have cells, they need not be linearly independent.
            points = pivots.points
            if points is None:
                part, weights = rows.parts[i], rows.importance
                points = choose_landmarks(
                    kernel, part, weights, counts[i], constraint.choice, seed, categorical[i]
                )
            bases.append(PartitionBasis(kernel, points))
    return bases
