"""``partial_fit``: rows are added to a fitted model, in one pass over the new rows alone."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from cme_dask.data.columns import Columns
from cme_dask.data.row_sample import RowSample
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, ToleranceWarning
from cme_dask.estimators.joint_fit import Fitted, Functions, JointRecipe, fitted_bases, origin
from cme_dask.estimators.planning import FitContext
from cme_dask.estimators.predictors import MeanRegressor, target_of, weights_of
from cme_dask.estimators.recipe import (
    FunctionsLike,
    Progress,
    Tolerance,
    by_name,
    check_accuracy,
    check_integer,
    declared,
    timed_fit,
    usable_rows,
)
from cme_dask.estimators.solving import SolveOptions
from cme_dask.estimators.steps import ProgressOption, reported
from cme_dask.learning.partition import stands_for
from cme_dask.models.embedding import EmbeddingModel
from cme_dask.models.events import LocalFunction
from cme_dask.models.features import FeatureModel
from cme_dask.models.joint import JointModel
from cme_dask.models.merging import JointSums, one_model, union
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.blocks import Moments, MomentSums
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.moments import FeatureBlock, Function, MomentReduction
from cme_dask.numerics.precision import ComputeMode
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.passes.cluster import Scheduler
from cme_dask.passes.driver import Executor
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.moments import make_moments
from cme_dask.passes.run import PassReport

Array = Any

MAX_ROW = 1 << 53
_WORSE = 2.0  # times the trace error of the earlier rows, beyond which a refit is advised


# What every ``partial_fit`` asks of new rows, and says of them


def new_rows(
    earlier: MomentSums, new: MomentSums, sides: Sequence[FeatureBlock], variables: str, tol: float
) -> dict[str, Any]:
    """How well the pivots of a fit span rows that were added to it, as JSON values.

    Parameters
    ----------
    earlier, new
        Moments of the earlier and of the new rows.
    sides
        The variables that they are moments of.
    variables
        Names of these variables, a character each.
    tol
        Trace error that the fit aimed at.

    Returns
    -------
    about : dict
        ``rows``, and ``trace_error`` by variable: that over the new rows, relative to their trace.

    Warns
    -----
    ToleranceWarning
        If it is above ``tol``, and more than twice that over the earlier rows.
    """
    if not all(isinstance(side.basis, NewtonBasis) for side in sides):
        return {"rows": new.n_rows}  # partitions of unity leave no trace
    before, now, total = (moments.means().trace_error for moments in (earlier, new, earlier + new))
    for i, variable in enumerate(variables):
        if now[i] > _WORSE * max(before[i], tol):
            warnings.warn(
                f"{variable}: trace error {now[i]:.2e} over the new rows at rank "
                f"{sides[i].basis.rank}, {total[i]:.2e} over all rows, tol is {tol:g}: the pivots, "
                "which are those of the first rows, do not span the new ones; to choose them anew, "
                "fit earlier and new rows together",
                ToleranceWarning,
                stacklevel=5,
            )
    return {"rows": new.n_rows, "trace_error": dict(zip(variables, map(float, now), strict=True))}


def first_of(sample: Sample, after: int) -> int:
    """The global index of the first new row: they are numbered after the earlier ones.

    Parts of a split are identified by the numbers that rows have in their table, and keep them.
    """
    return 0 if sample.part is not None else after


def _next_row(earlier: JointSums) -> int:
    """The number after those of the earlier rows, which may have gaps."""
    return max(int(earlier.about.get("next_row", 0)), earlier.moments.n_rows)


def check_functions(known: Mapping[str, Function], given: Mapping[str, Any]) -> None:
    """DataError if functions are given, and not by the names of the first call."""
    if given and set(given) != set(known):
        raise DataError(
            f"the model was fitted with the functions {_listed(known)}, given are "
            f"{_listed(given)}: give the same ones, or none"
        )


def on_columns(sample: Sample, columns: Sequence[Columns]) -> Sample:
    """The rows with the columns of a fit: by name, or by position where they have no names.

    Raises
    ------
    DataError
        If columns are missing, or their labels or units are other ones.
    """
    selected: list[Sequence[str] | None] = []
    for variable, result, known in zip("xy", sample.columns, columns, strict=False):
        default, ours = (
            Columns.default(variable, len(columns.names)).names for columns in (result, known)
        )
        unnamed, same = result.names == default, len(result.names) == len(known.names)
        # Default names of an array of another width mean other columns.
        named = set(known.names) <= set(result.names) and (same or known.names != ours)
        if not named and not (unnamed and same):
            raise DataError(
                f"the fit had columns {known.listed()} of {variable}, these rows have "
                f"{result.listed()}: give the same ones"
            )
        selected.append(known.names if named and result.names != known.names else None)
        for name, mine in zip(known.names, known.names if named else result.names, strict=True):
            _check_alike(name, known, mine, result)
    return replace(sample.select(*selected), columns=tuple(columns))


def _check_alike(name: str, known: Columns, mine: str, found: Columns) -> None:
    """DataError if a column has other labels than in the fit, or is in another unit."""
    if found.categories.get(mine) != known.categories.get(name):
        labels = [
            columns.labels(column) if column in columns.categories else "numbers"
            for column, columns in ((mine, found), (name, known))
        ]
        raise DataError(
            f"the labels of column {name!r} are {labels[0]}, in the fit they were {labels[1]}: "
            "code them alike"
        )
    units = found.units.get(mine), known.units.get(name)
    if all(units) and units[0] != units[1]:
        raise DataError(
            f"column {name!r} is in {units[0]}, in the fit it was in {units[1]}: convert it"
        )


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names)) or "none"


# Joint distributions: moments and sums by cell


@dataclass(frozen=True, eq=False)
class JointUpdate:
    """How rows are added to a joint model, or fitted as it was.

    Attributes
    ----------
    functions
        Declared functions of x and of y, by name.
    sample_size, seed, accuracy, convergence
        Parameters of the estimator.
    budget, progress
        Of the pass.
    """

    functions: Functions
    sample_size: int
    seed: int
    accuracy: float
    convergence: str
    budget: MemoryBudget
    progress: Progress | None

    def add(self, model: JointModel, sample: Sample) -> tuple[Fitted, Sample]:
        """The model of its own rows and of these; and these, as they were read."""
        old = self._sums(model)
        first = first_of(sample, _next_row(old))
        return self._fitted(old, sample, first, passes=int(model.about["passes"]))

    def alone(self, like: JointModel, sample: Sample, first_row: int = 0) -> tuple[Fitted, Sample]:
        """The model of these rows alone, with pivots, cells and parameters of another one."""
        return self._fitted(self._sums(like), sample, first_row, passes=None)

    def _fitted(
        self, old: JointSums, sample: Sample, first: int, passes: int | None
    ) -> tuple[Fitted, Sample]:
        """The model of the new rows; with ``passes``, those of the earlier ones, of both."""
        if len(sample.sources) != 2:
            raise DataError("a joint distribution needs rows of x and of y: give Y, or a store")
        sample = on_columns(sample, old.columns).fold_by(old.about.get("fold_by", "rows"))
        rows, sampling = usable_rows(sample, self.sample_size, self.seed, self.budget)
        new, arithmetic, report = self._measure(old, sample, rows, first)
        total = union([new] if passes is None else [old, new])
        info = new_rows(old.moments, new.moments, old.sides, "xy", float(old.about["tol"]))
        passes = (passes or 0) + sampling + 1
        with one_blas_thread():
            model, part = total.solved(self.convergence, passes=passes, new_rows=info)
            bases = fitted_bases(part)
        solved = (part.solution, part.replicates, total.moments, total.sides)
        return Fitted(model, bases, *solved, passes, arithmetic, report, [], None), sample

    def _sums(self, model: JointModel) -> JointSums:
        """Sums over the rows of the model, with the functions that are known by name there."""
        sums = JointSums.of(model)
        sides = []
        for side, columns, functions in zip(sums.sides, sums.columns, self.functions, strict=True):
            result = declared(functions, columns)
            if set(result) != set(side.functions):
                raise DataError(
                    f"the model was fitted with the functions {_listed(side.functions)}, given are "
                    f"{_listed(result)}: give the same ones"
                )
            sides.append(replace(side, functions={n: result[n] for n in side.functions}))
        specs = tuple(
            replace(spec, functions=side.functions)
            for spec, side in zip(sums.specs, sides, strict=False)
        )
        return replace(sums, sides=(sides[0], sides[1]), specs=specs)

    def _measure(
        self, sums: JointSums, sample: Sample, rows: RowSample, first: int
    ) -> tuple[JointSums, ComputeMode, PassReport]:
        """The sums over the new rows, in one pass; ``first`` is the global index of the first."""
        solving = SolveOptions(sums.constraint, sums.reg, self.convergence)
        spec = MomentReduction(sums.sides, sums.moments.n_folds)
        with one_blas_thread():
            spec, arithmetic = solving.arithmetic(
                spec, rows, sample.n_rows, self.accuracy, self.budget.executor.function_threads
            )
        specs = [
            CellReduction.of(s.support, part, *stands_for(rows, sample), s.functions, s.partition)
            for s, part in zip(sums.specs, rows.parts, strict=False)
        ]
        (moments,), cells, report = make_moments(
            replace(sample, first_row=first), [spec], self.budget, self.progress, 0, specs
        )
        metadata = {key: value for key, value in sums.about.items() if key != "parts_differ"}
        metadata |= {"arithmetic": arithmetic.name, **origin(sample)}
        metadata["next_row"] = first + sample.n_rows
        return replace(sums, moments=moments, cells=cells, about=metadata), arithmetic, report


class JointPartialFit(MeanRegressor):
    """``partial_fit`` of a joint distribution, which gives what its own fit is made of."""

    residual: str | bool
    sample_size: int
    accuracy: float
    convergence: str
    random_state: int | None
    model_: JointModel
    n_passes_: int
    search_: Any
    _functions: tuple[Mapping[str, Function], Mapping[str, Function]]

    @timed_fit
    def partial_fit(
        self,
        X: Any,
        Y: Any = None,
        *,
        y: Any = None,
        like: Any = None,
        first_row: int = 0,
        weights: Any = None,
        sample_weight: Any = None,
        functions: FunctionsLike | None = None,
        functions_x: FunctionsLike | None = None,
        scheduler: Scheduler = None,
        workers: int | None = None,
        memory_limit: str | int | None = None,
        progress: ProgressOption = None,
    ) -> Self:
        r"""Fit, or add rows to the fitted model, in one pass over the new rows alone.

        The first call is a fit; where it learns kernels, the best ones alone are kept, and there is
        no location model. Later calls keep kernels, pivots, cells, folds, constraint and ridge:
        moments and sums by cell of the new rows are added to those of the earlier ones, and the
        problem is solved again. The model is, to rounding, the one that a fit to all rows with
        these pivots and cells makes.

        Parameters
        ----------
        X, Y, y, weights, scheduler, workers, memory_limit, progress
            As in :meth:`fit`, of the new rows, which are numbered after the earlier ones: folds are
            those of one table. Weights are on the scale of the earlier ones, 1 where not given.
        like
            A fitted ``JointModel`` (or its path), on a first call: the model is one of these rows
            alone, with the pivots, cells and parameters of that one, so that :func:`merge` can add
            them.
        first_row
            With ``like``: the number that the first of these rows has in the table that all parts
            make. Then folds, and the rows kept of the cells, are those of one fit to that table.
        sample_weight
            scikit-learn's name of ``weights``.
        functions, functions_x
            As in :meth:`fit`; later calls take those of the first.

        Raises
        ------
        DataError
            As :meth:`fit`, on other columns or functions than before, or on a model that sums over
            rows don't make: a mean of several, or one with a location model.
        StoreError, ResourceError, ConvergenceError
            As :meth:`fit`.

        Warns
        -----
        ToleranceWarning
            If the trace error over the new rows is above ``tol``, and more than twice that over the
            earlier ones.

        Notes
        -----
        ``model_.about["new_rows"]`` holds how many rows the last call added, and the trace error
        that the pivots leave of them, by variable.
        """
        check_integer("first_row", first_row, 0, MAX_ROW)
        Y, weights = target_of(Y, y), weights_of(weights, sample_weight)
        budget = MemoryBudget.of(Executor.resolve(scheduler, workers), memory_limit)
        fitted = hasattr(self, "model_")
        if like is None and not fitted and not first_row:
            return self._first_fit(X, Y, weights, (functions_x, functions), budget, progress)
        if first_row and like is None:
            raise DataError(
                "first_row= belongs to like=: rows of later calls follow the earlier ones"
            )
        if like is not None and fitted:
            raise DataError(
                "like= belongs to the first call of partial_fit: make another estimator"
            )
        given = (functions_x or {}, functions or {})
        with reported(progress, budget.executor, 0, (1, 1)) as reports:
            update = JointUpdate(
                functions=self._of_first_call(given) if fitted else given,
                sample_size=self.sample_size,
                seed=self.random_state or 0,
                accuracy=check_accuracy(self.accuracy),
                convergence=self.convergence,
                budget=budget,
                progress=reports,
            )
            if like is None:
                result, _ = update.add(self.model_, self._open_more(X, Y, weights))
            else:
                sample = self._opened(X, Y, weights)
                result, sample = update.alone(one_model(like), sample, first_row)
                self.search_ = None
                self._adopt(X, Y, sample)
            self._become(result)
        return self

    def _of_first_call(self, given: Functions) -> Functions:
        """The functions of the first call; DataError if others are given by name."""
        for known, named in zip(self._functions, given, strict=True):
            check_functions(known, by_name(named))
        first, second = (
            {
                # One that is given again takes the place of what a pickle could not hold.
                name: by_name(named).get(name, function)
                if isinstance(function, LocalFunction)
                else function
                for name, function in known.items()
            }
            for known, named in zip(self._functions, given, strict=True)
        )
        return first, second

    def _first_fit(
        self,
        X: Any,
        Y: Any,
        weights: Any,
        functions: Functions,
        budget: MemoryBudget,
        progress: ProgressOption,
    ) -> Self:
        if self.residual is True:
            raise DataError(
                "a model with a location model takes no more rows, since the location depends "
                "on all of them: take residual=False or 'auto'"
            )
        sample = self._opened(X, Y, weights)
        with self._reported(progress, budget.executor, sample, residual=False) as reports:
            steps = self._steps(self._prepare(sample, budget, reports), functions)
            steps = replace(steps, tuning=replace(steps.tuning, averaged=1), residual=False)
            result = steps.run()
        self.search_ = steps.found
        self._become(result)
        self._adopt(X, Y, sample)
        return self

    def _open_more(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows of a later call."""
        return self._open(X, Y, weights)

    @abstractmethod
    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows as given, for parameters that have been checked."""

    @abstractmethod
    def _opened(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows, once the parameters have been checked."""

    @abstractmethod
    def _prepare(
        self, sample: Sample, budget: MemoryBudget, progress: Progress | None
    ) -> FitContext:
        """The row sample read."""

    @abstractmethod
    def _steps(self, ready: FitContext, functions: Functions) -> JointRecipe:
        """The steps of a fit."""

    @abstractmethod
    def _become(self, result: Fitted) -> None:
        """Take over what was fitted."""


# Estimators whose model is made of moments alone


class MomentsPartialFit(ABC):
    """An estimator that retains its moments, from which it makes its model."""

    fit: Any
    sample_size: int
    random_state: int | None
    model_: Any
    n_passes_: int
    report_: PassReport
    arithmetic_: ComputeMode
    _sides: tuple[FeatureBlock, ...]
    _moments: MomentSums

    @abstractmethod
    def _settled(
        self, spec: MomentReduction, rows: RowSample, n_rows: int, cores: int
    ) -> tuple[MomentReduction, ComputeMode]:
        """The moments with the arithmetic that the accuracy allows."""

    @property
    @abstractmethod
    def _tolerance(self) -> Tolerance:
        """The trace error that bases aim at."""

    def _add_rows(
        self,
        sample: Sample,
        budget: MemoryBudget,
        progress: ProgressOption,
        variables: str,
        solve: Callable[[], None],
    ) -> None:
        """Add the moments of new rows, in one pass over them, and solve; all of it or nothing."""
        rows, sampling = usable_rows(sample, self.sample_size, self.random_state or 0, budget)
        sides = tuple(replace(side, solve=None) for side in self._sides)
        spec = MomentReduction(sides, self._moments.n_folds)
        with one_blas_thread():
            spec, arithmetic = self._settled(
                spec, rows, sample.n_rows, budget.executor.function_threads
            )
        first = first_of(sample, self._moments.n_rows)
        columns = [len(c.names) for c in sample.columns]
        with reported(progress, budget.executor, sample.n_rows, columns) as reports:
            (new,), _, report = make_moments(
                replace(sample, first_row=first), [spec], budget, reports, 0
            )
        info = new_rows(self._moments, new, self._sides, variables, self._tolerance.value)
        before = dict(vars(self))
        self._moments, self.arithmetic_, self.report_ = self._moments + new, arithmetic, report
        self.n_passes_ += sampling + 1
        try:
            with one_blas_thread():
                solve()
            self.model_.about["new_rows"] = info
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise


class EmbeddingPartialFit(MomentsPartialFit, MeanRegressor):
    """``partial_fit`` of a conditional mean embedding."""

    model_: EmbeddingModel
    _functions: Mapping[str, Function]

    @timed_fit
    def partial_fit(
        self,
        X: Any,
        Y: Any = None,
        *,
        y: Any = None,
        weights: Any = None,
        sample_weight: Any = None,
        functions: FunctionsLike | None = None,
        scheduler: Scheduler = None,
        workers: int | None = None,
        memory_limit: str | int | None = None,
        progress: ProgressOption = None,
    ) -> Self:
        """Fit, or add rows to the fitted model, in one pass over the new rows alone.

        The first call is a fit. Later calls keep kernels, pivots and folds, and add moments; a
        ridge that is learned is chosen again, by the held-out loss over all rows. The model is, to
        rounding, the one that a fit to all rows with these kernels and pivots makes. Saved models
        hold no moments, so that what :func:`cme_dask.load` gives takes no more rows.

        Parameters
        ----------
        X, Y, y, weights, sample_weight, scheduler, workers, memory_limit, progress
            As in :meth:`fit`, of the new rows, which are numbered after the earlier ones.
        functions
            As in :meth:`fit`, on the first call; later calls take the same.

        Raises
        ------
        DataError
            As :meth:`fit`, or on other columns than before.

        Warns
        -----
        ToleranceWarning
            If the trace error over the new rows is above ``tol``, and more than twice that over the
            earlier ones.
        """
        Y, weights = target_of(Y, y), weights_of(weights, sample_weight)
        if not hasattr(self, "model_"):
            fitted: Self = self.fit(
                X,
                Y,
                weights=weights,
                functions=functions,
                scheduler=scheduler,
                workers=workers,
                memory_limit=memory_limit,
                progress=progress,
            )
            return fitted
        check_functions(self._functions, by_name(functions))
        metadata = self.model_.about
        sample = self._open_more(X, Y, weights)
        if len(sample.sources) != 2:
            raise DataError("an embedding needs rows of x and of y: give Y, or a store")
        columns = (self.model_.x.columns, self.model_.y.columns)
        sample = on_columns(sample, columns).fold_by(metadata["fold_by"])
        budget = MemoryBudget.of(Executor.resolve(scheduler, workers), memory_limit)
        x, y = self._sides
        self._add_rows(
            sample, budget, progress, "xy", lambda: self._solve(sample, (x, y), self._moments)
        )
        return self

    @abstractmethod
    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows as given."""

    def _open_more(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows of a later call."""
        return self._open(X, Y, weights)

    @abstractmethod
    def _solve(
        self, sample: Sample, sides: tuple[FeatureBlock, FeatureBlock], moments: MomentSums
    ) -> None:
        """From moments to the model."""


class FeaturesPartialFit(MomentsPartialFit):
    """``partial_fit`` of kernel features."""

    model_: FeatureModel

    @timed_fit
    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        *,
        Y: Any = None,
        weights: Any = None,
        scheduler: Scheduler = None,
        workers: int | None = None,
        memory_limit: str | int | None = None,
        progress: ProgressOption = None,
    ) -> Self:
        """Fit, or add rows to what was fitted, in one pass over the new rows alone.

        The first call is a fit. Later calls keep the pivots, and so the Newton features; the trace
        error and the spectral basis are, to rounding, those over all rows. Saved features hold no
        moments, so that what :meth:`load` gives takes no more rows.

        Parameters
        ----------
        X, weights, scheduler, workers, memory_limit, progress
            As in :meth:`fit`, of the new rows.
        y, Y
            Ignored.

        Raises
        ------
        DataError
            As :meth:`fit`, or on other columns than before.

        Warns
        -----
        ToleranceWarning
            If the trace error over the new rows is above ``tol``, and more than twice that over the
            earlier ones.
        """
        if not hasattr(self, "model_"):
            fitted: Self = self.fit(
                X,
                weights=weights,
                scheduler=scheduler,
                workers=workers,
                memory_limit=memory_limit,
                progress=progress,
            )
            return fitted
        if not hasattr(self, "_moments"):
            raise DataError(
                "these features were loaded, and their file holds no moments, without which no "
                "rows can be added: fit them again"
            )
        sample = on_columns(self._opened(X, weights), (self.model_.columns,))
        budget = MemoryBudget.of(Executor.resolve(scheduler, workers), memory_limit)

        def solve() -> None:
            mean = self._moments.means()
            self._model_of(sample, mean, self.n_passes_)

        self._add_rows(sample, budget, progress, "x", solve)
        return self

    @abstractmethod
    def _opened(self, X: Any, weights: Any) -> Sample:
        """The rows of x, once the parameters have been checked."""

    @abstractmethod
    def _model_of(self, sample: Sample, mean: Moments, passes: int) -> None:
        """From moments to the model."""
