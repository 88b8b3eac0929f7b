"""``partial_fit``: rows are added to a fitted model, in one pass over them alone."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from cme_dask.chunked.clusters import Scheduler
from cme_dask.chunked.driver import Executor
from cme_dask.chunked.memory import MemoryBudget
from cme_dask.errors import DataError
from cme_dask.estimators.arithmetic import check_accuracy
from cme_dask.estimators.growth import Growth, check_functions
from cme_dask.estimators.joint_fit import Fitted, Functions, JointFit
from cme_dask.estimators.planning import Preparation
from cme_dask.estimators.predictors import MeanRegressor, target_of, weights_of
from cme_dask.estimators.recipe import FunctionsLike, Progress, Tolerance, by_name, check_integer
from cme_dask.estimators.steps import ProgressOption, reported
from cme_dask.estimators.timing import timed_fit
from cme_dask.models.functions import LocalFunction
from cme_dask.models.joint import JointModel
from cme_dask.models.merging import one_model
from cme_dask.numerics.moments import Function
from cme_dask.storage.sample import Sample

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
