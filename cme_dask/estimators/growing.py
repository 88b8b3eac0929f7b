"""``partial_fit`` of joint distributions: new rows, more pivots, the union."""

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from cme_dask.data.columns import Columns
from cme_dask.data.row_sample import RowSample
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, ToleranceWarning
from cme_dask.estimators.joint_fit import Fitted, Functions, JointFit, fitted_bases, origin
from cme_dask.estimators.planning import Preparation
from cme_dask.estimators.predictors import MeanRegressor, target_of, weights_of
from cme_dask.estimators.recipe import (
    FunctionsLike,
    Progress,
    Tolerance,
    by_name,
    check_accuracy,
    check_integer,
    declared,
    make_moments,
    timed_fit,
    usable_rows,
)
from cme_dask.estimators.solving import Solving
from cme_dask.estimators.steps import ProgressOption, reported
from cme_dask.learning.partition import stands_for
from cme_dask.models.events import LocalFunction
from cme_dask.models.joint import JointModel
from cme_dask.models.merging import JointSums, one_model, union, zero_filled
from cme_dask.numerics.basis import Basis, NewtonBasis, extended_basis
from cme_dask.numerics.cells import CellSpec
from cme_dask.numerics.moments import Function, MeanMoments, Moments, MomentSpec, Side
from cme_dask.numerics.precision import Arithmetic
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.passes.cluster import Scheduler
from cme_dask.passes.driver import Executor
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.run import PassReport

# The steps that add rows to a fitted joint model: their sums, more pivots, the union


Array = Any

_SAME = 1e-9  # relative difference of means of the same rows that rounding may leave
_WORSE = 2.0  # times the trace error of earlier rows, beyond which new rows are badly spanned


@dataclass(frozen=True, eq=False)
class Growth:
    """How rows are added to a joint model.

    Attributes
    ----------
    functions
        Declared functions of x and of y, by name.
    new_pivots
        ``keep``, ``extend`` or ``reread``.
    max_rank, sample_size, seed, accuracy, convergence
        Parameters of the estimator.
    budget, progress
        Of the passes.
    """

    functions: Functions
    new_pivots: str
    max_rank: int | None
    sample_size: int
    seed: int
    accuracy: float
    convergence: str
    budget: MemoryBudget
    progress: Progress | None

    def add(
        self, model: JointModel, sample: Sample, earlier: Sample | None, passes: int
    ) -> tuple[Fitted, Sample]:
        """The model with more rows; and these, as they were read.

        Parameters
        ----------
        model
            Of the earlier rows.
        sample
            The new rows.
        earlier
            The earlier rows, for ``reread``.
        passes
            That the model took.
        """
        old = self._sums(model)
        sample, rows, took = self._opened(sample, old)
        bases = [side.basis for side in old.sides]
        if self.new_pivots != "keep":
            bases = self._more_pivots(old, sample, rows)
        more = [b.rank - s.basis.rank for b, s in zip(bases, old.sides, strict=True)]
        entries, before = old.about.get("zero_filled", []), old
        if earlier is not None and (any(more) or entries):
            before, again = self._again(old, bases, earlier)
            took, entries = took + again, []
        elif any(more):
            filled = [zero_filled(old, i, count) for i, count in enumerate(more) if count]
            before, entries = old.extended(bases), [*entries, *filled]
        wanted = replace(old, sides=_on(old.sides, bases))
        first = first_of(sample, _next_row(old))
        new, arithmetic, report = self._measure(wanted, sample, rows, first)
        total = union([before, new])
        self._warn(old, new, total)
        total.about.pop("zero_filled", None)
        told: dict[str, Any] = {"zero_filled": entries} if entries else {}
        return self._fitted(total, arithmetic, report, passes + took + 1, told), sample

    def _again(
        self, old: JointSums, bases: Sequence[Basis], earlier: Sample
    ) -> tuple[JointSums, int]:
        """The sums over the earlier rows with other bases, and the passes over them."""
        earlier, rows, passes = self._opened(earlier, old)
        wanted = replace(old, sides=_on(old.sides, bases), specs=())
        found, _, _ = self._measure(wanted, earlier, rows)
        _check_same_rows(old, found)
        return replace(found, specs=old.specs, cells=old.cells, about=old.about), passes + 1

    def alone(self, like: JointModel, sample: Sample, first_row: int) -> tuple[Fitted, Sample]:
        """The model of these rows alone, with pivots, cells and parameters of another one."""
        old = self._sums(like)
        sample, rows, took = self._opened(sample, old)
        new, arithmetic, report = self._measure(old, sample, rows, first_row)
        self._warn(old, new, new)
        return self._fitted(union([new]), arithmetic, report, took + 1, {}), sample

    def _sums(self, model: JointModel) -> JointSums:
        """Sums over the rows of the model, with the functions that are known by name there."""
        sums = JointSums.of(model)
        sides = []
        for side, columns, functions in zip(sums.sides, sums.columns, self.functions, strict=True):
            found = declared(functions, columns)
            if set(found) != set(side.functions):
                raise DataError(
                    f"the model was fitted with the functions {_listed(side.functions)}, given are "
                    f"{_listed(found)}: give the same ones"
                )
            sides.append(replace(side, functions={n: found[n] for n in side.functions}))
        specs = tuple(
            replace(spec, functions=side.functions)
            for spec, side in zip(sums.specs, sides, strict=False)
        )
        return replace(sums, sides=(sides[0], sides[1]), specs=specs)

    def _opened(self, sample: Sample, sums: JointSums) -> tuple[Sample, RowSample, int]:
        """Rows with the model's columns and folds, their row sample, and the passes it took."""
        if len(sample.sources) != 2:
            raise DataError("a joint distribution needs rows of x and of y: give Y, or a store")
        sample = on_columns(sample, sums.columns).fold_by(sums.about.get("fold_by", "rows"))
        rows, passes = usable_rows(sample, self.sample_size, self.seed, self.budget.executor)
        return sample, rows, passes

    def _more_pivots(self, sums: JointSums, sample: Sample, rows: RowSample) -> list[Basis]:
        """Bases with the pivots that these rows need beside those that there are."""
        tol, bases = float(sums.about["tol"]), []
        with one_blas_thread():
            for i, side in enumerate(sums.sides):
                if not isinstance(side.basis, NewtonBasis):
                    raise DataError(
                        "a coupling can't be given more landmarks, since each changes the "
                        "functions of all: take new_pivots='keep', or fit all rows again"
                    )
                index = rows.index + first_of(sample, _next_row(sums))
                bases.append(
                    extended_basis(
                        side.basis, rows.parts[i], index, rows.importance, tol, self.max_rank
                    )
                )
        return list(bases)

    def _measure(
        self, sums: JointSums, sample: Sample, rows: RowSample, first: int = 0
    ) -> tuple[JointSums, Arithmetic, PassReport]:
        """The sums over other rows, in one pass; ``first`` is the global index of the first."""
        solving = Solving(sums.constraint, sums.reg, self.convergence)
        spec = MomentSpec(sums.sides, sums.moments.n_folds)
        with one_blas_thread():
            spec, arithmetic = solving.arithmetic(
                spec, rows, sample.n_rows, self.accuracy, self.budget.executor.function_threads
            )
        specs = [
            CellSpec.of(s.support, part, *stands_for(rows, sample), s.functions, s.partition)
            for s, part in zip(sums.specs, rows.parts, strict=False)
        ]
        (moments,), cells, report = make_moments(
            replace(sample, first_row=first), [spec], self.budget, self.progress, 0, specs
        )
        # What these belong to is of the earlier rows alone.
        about = {k: v for k, v in sums.about.items() if k not in ("zero_filled", "parts_differ")}
        about |= {"arithmetic": arithmetic.name, **origin(sample)}
        about["next_row"] = first + sample.n_rows
        return replace(sums, moments=moments, cells=cells, about=about), arithmetic, report

    def _fitted(
        self,
        sums: JointSums,
        arithmetic: Arithmetic,
        report: PassReport,
        passes: int,
        told: dict[str, Any],
    ) -> Fitted:
        with one_blas_thread():
            model, part = sums.solved(self.convergence, passes=passes, **told)
            bases = fitted_bases(part)
        return Fitted(
            model,
            bases,
            part.solution,
            part.replicates,
            sums.moments,
            sums.sides,
            passes,
            arithmetic,
            report,
            [],
            None,
        )

    def _warn(self, old: JointSums, new: JointSums, total: JointSums) -> None:
        """Warn where new rows are spanned much worse than the earlier ones were."""
        if isinstance(old.sides[0].basis, NewtonBasis):
            tol = float(old.about["tol"])
            sums = (old, new, total)
            warn_badly_spanned([(s.moments, s.sides) for s in sums], "xy", tol)


def warn_badly_spanned(
    several: Sequence[tuple[Moments, Sequence[Side]]], variables: str, tol: float
) -> None:
    """Warn where pivots that were chosen for earlier rows leave much of the new ones.

    Parameters
    ----------
    several
        Moments and their sides: of the earlier rows, of the new ones, of all.
    variables
        What messages call the variables.
    tol
        Of the fit.
    """
    errors = [
        MeanMoments.of(moments.total(), tuple(sides)).trace_error for moments, sides in several
    ]
    for i, (before, now, total) in enumerate(zip(*errors, strict=True)):
        if now > _WORSE * max(before, tol):
            warnings.warn(
                f"{variables[i]}: trace error {now:.2e} over the new rows at rank "
                f"{several[1][1][i].basis.rank}, {total:.2e} over all rows, tol is {tol:g}: pivots "
                "of earlier rows don't span them; fit all rows again, or give a joint distribution "
                "new_pivots='extend' or 'reread'",
                ToleranceWarning,
                stacklevel=5,
            )


def first_of(sample: Sample, after: int) -> int:
    """The global index of the first new row: they are numbered after the earlier ones.

    Parts of a split are told by the numbers that rows have in their table, and keep them.
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
    wanted: list[Sequence[str] | None] = []
    for variable, found, known in zip("xy", sample.columns, columns, strict=False):
        default, ours = (
            Columns.default(variable, len(columns.names)).names for columns in (found, known)
        )
        unnamed, same = found.names == default, len(found.names) == len(known.names)
        # Default names of an array of another width mean other columns.
        named = set(known.names) <= set(found.names) and (same or known.names != ours)
        if not named and not (unnamed and same):
            raise DataError(
                f"the fit had columns {known.listed()} of {variable}, these rows have "
                f"{found.listed()}: give the same ones"
            )
        wanted.append(known.names if named and found.names != known.names else None)
        for name, mine in zip(known.names, known.names if named else found.names, strict=True):
            _check_alike(name, known, mine, found)
    return replace(sample.select(*wanted), columns=tuple(columns))


def _check_alike(name: str, known: Columns, mine: str, found: Columns) -> None:
    """DataError if a column has other labels than in the fit, or is in another unit."""
    if found.categories.get(mine) != known.categories.get(name):
        told = [
            columns.labels(column) if column in columns.categories else "numbers"
            for column, columns in ((mine, found), (name, known))
        ]
        raise DataError(
            f"the labels of column {name!r} are {told[0]}, in the fit they were {told[1]}: code "
            "them alike"
        )
    units = found.units.get(mine), known.units.get(name)
    if all(units) and units[0] != units[1]:
        raise DataError(
            f"column {name!r} is in {units[0]}, in the fit it was in {units[1]}: convert it"
        )


def _on(sides: Sequence[Side], bases: Sequence[Basis]) -> tuple[Side, Side]:
    x, y = (replace(side, basis=basis) for side, basis in zip(sides, bases, strict=True))
    return x, y


def _check_same_rows(old: JointSums, again: JointSums) -> None:
    """DataError unless these are as many rows as the model had, of the same weight."""
    near = np.isclose(old.weight, again.weight, rtol=1e-9, atol=0.0)
    if old.moments.n_rows != again.moments.n_rows or not near:
        raise DataError(
            f"earlier= holds {again.moments.n_rows:,} rows of weight {again.weight:.6g}, the model "
            f"had {old.moments.n_rows:,} of weight {old.weight:.6g}: give all rows of the earlier "
            "calls, with their weights"
        )
    means = [MeanMoments.of(sums.moments.total(), sums.sides) for sums in (old, again)]
    scale = np.sqrt(np.maximum(np.diag(means[0].function_gram), 0.0))
    one, two = (np.concatenate(mean.function_mean) for mean in means)
    names = [name for side in old.sides for name in side.names]
    differ = np.abs(one - two) > _SAME * (scale + np.abs(one))
    if differ.any():
        i = int(differ.argmax())
        raise DataError(
            f"earlier= holds other rows than the model had: the mean of {names[i]!r} is "
            f"{two[i]:.6g}, it was {one[i]:.6g}: give all rows of the earlier calls"
        )


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names)) or "none"


# ``partial_fit``: rows are added to a fitted model, in one pass over them alone


NEW_PIVOTS = ("keep", "extend", "reread")
MAX_ROW = 1 << 53


class GrowingJoint(MeanRegressor):
    """``partial_fit`` of a joint distribution, which gives what its own fit is made of."""

    max_rank: int | None
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
        new_pivots: str = "keep",
        earlier: Any = None,
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
        no residual reference. Later calls keep kernels, pivots, cells, folds, constraint and ridge:
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
        new_pivots : {"keep", "extend", "reread"}
            What to do where pivots of the earlier rows don't span the new ones. ``keep`` them, and
            warn. ``extend``: add pivots, greedily from the row sample of the new rows; what the
            moments of their functions are over the earlier rows is not known, and zeros are in
            their place, with the bound below. ``reread``: add them, and read the earlier rows once
            more; exact.
        earlier
            For ``reread``, all rows of the earlier calls: a store, a ``Sample``, or (X, Y) or
            (X, Y, weights).
        sample_weight
            scikit-learn's name of ``weights``.
        functions, functions_x
            As in :meth:`fit`; later calls take those of the first.

        Raises
        ------
        DataError
            As :meth:`fit`, on other columns or functions than before, or on a model that sums over
            rows don't make: a mean of several, or one with a residual reference.
        StoreError, ResourceError, ConvergenceError
            As :meth:`fit`.

        Warns
        -----
        ToleranceWarning
            If the trace error over the new rows is above ``tol``, and more than twice that over the
            earlier ones.

        Notes
        -----
        A new Newton function is orthogonal to the present ones in H. With the mean residual
        :math:`\rho = \mathrm E[k(z, z) - |N(z)|^2]` over the earlier rows, what is filled with
        zeros is at most

        .. math:: |\mathrm E[N_\mathrm{new} \psi_i]| \le \sqrt{\rho \lambda_i}

        there, by Cauchy-Schwarz, times their share of the weight over all rows.
        ``model_.about["zero_filled"]`` holds ``residual`` :math:`\rho` and ``bound``
        :math:`\sqrt{\rho \lambda_1}`.
        """
        check_choice(new_pivots, earlier)
        check_integer("first_row", first_row, 0, MAX_ROW)
        Y, weights = target_of(Y, y), weights_of(weights, sample_weight)
        budget = MemoryBudget.of(Executor.resolve(scheduler, workers), memory_limit)
        fitted = hasattr(self, "model_")
        if like is None and not fitted and not first_row:
            if earlier is not None:
                raise DataError("earlier= belongs to later calls of partial_fit, this is the first")
            return self._first_fit(X, Y, weights, (functions_x, functions), budget, progress)
        if first_row and like is None:
            raise DataError(
                "first_row= belongs to like=: rows of later calls follow the earlier ones"
            )
        if like is not None and (fitted or new_pivots != "keep"):
            raise DataError(
                "like= belongs to the first call of partial_fit, with new_pivots='keep': make "
                "another estimator"
            )
        with reported(progress, budget.executor, 0, (1, 1)) as reports:
            return self._grown(
                X,
                Y,
                weights,
                (functions_x, functions),
                like,
                first_row,
                new_pivots,
                earlier,
                budget,
                reports,
            )

    def _grown(
        self,
        X: Any,
        Y: Any,
        weights: Any,
        functions: tuple[FunctionsLike | None, FunctionsLike | None],
        like: Any,
        first_row: int,
        new_pivots: str,
        earlier: Any,
        budget: MemoryBudget,
        progress: Progress | None,
    ) -> Self:
        """The fitted model with new rows, or one of these alone ``like`` another."""
        fitted, given = hasattr(self, "model_"), (functions[0] or {}, functions[1] or {})
        growth = Growth(
            functions=self._of_first_call(given) if fitted else given,
            new_pivots=new_pivots,
            max_rank=self._tolerance.max_rank,
            sample_size=self.sample_size,
            seed=self.random_state or 0,
            accuracy=check_accuracy(self.accuracy),
            convergence=self.convergence,
            budget=budget,
            progress=progress,
        )
        if like is not None:
            sample = self._opened(X, Y, weights)
            found, sample = growth.alone(one_model(like), sample, first_row)
            self.search_ = None
            self._adopt(X, Y, sample)
        else:
            before = None if earlier is None else self._open_more(*rows_of(earlier))
            more = self._open_more(X, Y, weights)
            found, sample = growth.add(self.model_, more, before, self.n_passes_)
        self._become(found)
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
                "a model with a residual reference can't grow, since its location depends on all "
                "rows: take residual=False or 'auto'"
            )
        sample = self._opened(X, Y, weights)
        with self._reported(progress, budget.executor, sample, residual=False) as reports:
            steps = self._steps(self._prepare(sample, budget, reports), functions)
            steps = replace(steps, tuning=replace(steps.tuning, averaged=1), residual=False)
            found = steps.run()
        self.search_ = steps.found
        self._become(found)
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

    @property
    @abstractmethod
    def _tolerance(self) -> Tolerance:
        """The trace error that bases aim at, within a largest rank."""

    @abstractmethod
    def _prepare(
        self, sample: Sample, budget: MemoryBudget, progress: Progress | None
    ) -> Preparation:
        """The row sample read."""

    @abstractmethod
    def _steps(self, ready: Preparation, functions: Functions) -> JointFit:
        """The steps of a fit."""

    @abstractmethod
    def _become(self, found: Fitted) -> None:
        """Take over what was fitted."""


def check_choice(new_pivots: Any, earlier: Any) -> None:
    """DataError unless these two parameters of ``partial_fit`` fit together."""
    if new_pivots not in NEW_PIVOTS:
        raise DataError(f"new_pivots must be one of {', '.join(NEW_PIVOTS)}, got {new_pivots!r}")
    if (new_pivots == "reread") != (earlier is not None):
        raise DataError(
            "new_pivots='reread', and only that, takes earlier=: all rows of the earlier calls, a "
            f"store or (X, Y), got new_pivots={new_pivots!r} and earlier={type(earlier).__name__}"
        )


def rows_of(earlier: Any) -> tuple[Any, Any, Any]:
    """X, Y and weights of the earlier rows; DataError if they are something else."""
    given = earlier if isinstance(earlier, (tuple, list)) else (earlier,)
    if not 1 <= len(given) <= 3:
        raise DataError(f"earlier must be a store, (X, Y) or (X, Y, weights), got {len(given)}")
    x, y, weights = [*given, None, None][:3]
    return x, y, weights
