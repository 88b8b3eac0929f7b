"""``partial_fit`` of estimators whose model is made of moments alone."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from cme_dask.data.row_sample import RowSample
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.growing import check_functions, first_of, on_columns, warn_badly_spanned
from cme_dask.estimators.predictors import MeanRegressor, target_of, weights_of
from cme_dask.estimators.recipe import (
    FunctionsLike,
    Tolerance,
    by_name,
    make_moments,
    timed_fit,
    usable_rows,
)
from cme_dask.estimators.steps import ProgressOption, reported
from cme_dask.models.embedding import EmbeddingModel
from cme_dask.models.features import FeatureModel
from cme_dask.numerics.moments import Function, MeanMoments, Moments, MomentSpec, Side
from cme_dask.numerics.precision import Arithmetic
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.passes.cluster import Scheduler
from cme_dask.passes.driver import Executor
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.run import PassReport

Sides = tuple[Side, ...]


@dataclass(frozen=True, eq=False)
class _Grown:
    """Moments of all rows, and how those of the new ones were made."""

    moments: Moments
    arithmetic: Arithmetic
    report: PassReport
    passes: int


class GrowingMoments(ABC):
    """An estimator that keeps its moments, and makes its model of them."""

    fit: Any
    tol: float | None
    sample_size: int
    random_state: int | None
    n_passes_: int
    report_: PassReport
    arithmetic_: Arithmetic
    _sides: Sides
    _moments: Moments

    @abstractmethod
    def _settled(
        self, spec: MomentSpec, rows: RowSample, n_rows: int, cores: int
    ) -> tuple[MomentSpec, Arithmetic]:
        """The moments with the arithmetic that the accuracy allows."""

    @property
    @abstractmethod
    def _tolerance(self) -> Tolerance:
        """The trace error that bases aim at."""

    def _more(
        self, sample: Sample, budget: MemoryBudget, progress: ProgressOption, variables: str
    ) -> "_Grown":
        """The moments with those of new rows, in one pass over them; nothing is changed yet."""
        rows, passes = usable_rows(
            sample, self.sample_size, self.random_state or 0, budget.executor
        )
        sides = tuple(replace(side, elimination=None) for side in self._sides)
        spec = MomentSpec(sides, self._moments.n_folds)
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
        total = self._moments + new
        several = [(moments, self._sides) for moments in (self._moments, new, total)]
        warn_badly_spanned(several, variables, self._tolerance.value)
        return _Grown(total, arithmetic, report, self.n_passes_ + passes + 1)

    def _become(self, grown: "_Grown", solve: Callable[[], None]) -> None:
        """Solve, and take over what has grown; what fails on the way leaves all as it was."""
        before = dict(vars(self))
        self._moments, self.arithmetic_ = grown.moments, grown.arithmetic
        self.report_, self.n_passes_ = grown.report, grown.passes
        try:
            with one_blas_thread():
                solve()
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise


class GrowingEmbedding(GrowingMoments, MeanRegressor):
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
        hold no moments: what :func:`cme_dask.load` gives can't grow.

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
        about = self.model_.about
        sample = self._open_more(X, Y, weights)
        if len(sample.sources) != 2:
            raise DataError("an embedding needs rows of x and of y: give Y, or a store")
        columns = (self.model_.x.columns, self.model_.y.columns)
        sample = on_columns(sample, columns).fold_by(about["fold_by"])
        budget = MemoryBudget.of(Executor.resolve(scheduler, workers), memory_limit)
        grown, (x, y) = self._more(sample, budget, progress, "xy"), self._sides
        self._become(grown, lambda: self._solve(sample, (x, y), grown.moments))
        return self

    @abstractmethod
    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows as given."""

    def _open_more(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows of a later call."""
        return self._open(X, Y, weights)

    @abstractmethod
    def _solve(self, sample: Sample, sides: tuple[Side, Side], moments: Moments) -> None:
        """From moments to the model."""


class GrowingFeatures(GrowingMoments):
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
        moments: what :meth:`load` gives can't grow.

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
        grown = self._more(sample, budget, progress, "x")
        mean = MeanMoments.of(grown.moments.total(), self._sides)
        self._become(grown, lambda: self._model_of(sample, mean, grown.passes))
        return self

    @abstractmethod
    def _opened(self, X: Any, weights: Any) -> Sample:
        """The rows of x, once the parameters have been checked."""

    @abstractmethod
    def _model_of(self, sample: Sample, mean: MeanMoments, passes: int) -> None:
        """From moments to the model."""
