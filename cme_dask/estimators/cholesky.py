"""``PivotedCholesky``: low-rank kernel features, fitted and transformed."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin

from cme_dask.config import SAMPLE_SIZE, TOL
from cme_dask.data.columns import Columns
from cme_dask.data.row_sample import RowSample
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.partial_fit import FeaturesPartialFit
from cme_dask.estimators.pivoting import PivotRule, PivotSelector
from cme_dask.estimators.planning import FitContext, FitPlan, plan_fit, prepare
from cme_dask.estimators.recipe import (
    FittedBasis,
    NotFitted,
    Progress,
    Tolerance,
    check_accuracy,
    check_parameters,
    check_tol,
    choose_mode,
    fit_budget,
    make_side,
    timed_fit,
    trial_rows,
)
from cme_dask.estimators.steps import ProgressOption, reported
from cme_dask.kernels import Kernel
from cme_dask.models import load_only
from cme_dask.models.features import BASES, FeatureModel
from cme_dask.numerics.basis import LinearBasis, NewtonBasis, eigenbasis
from cme_dask.numerics.blocks import Moments
from cme_dask.numerics.moments import MomentReduction
from cme_dask.numerics.precision import ComputeMode, SpectrumChange
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.passes.cluster import Scheduler
from cme_dask.passes.driver import Executor
from cme_dask.passes.lazy import gram_columns, lazy_features
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.moments import make_moments
from cme_dask.passes.run import RunOptions
from cme_dask.passes.sources import open_sample
from cme_dask.passes.write import FeatureReport, WriteProgress, write_features

# What a fitted ``PivotedCholesky`` does with rows: features, Gram columns, saving


Array = Any


class FittedFeatures(TransformerMixin):  # type: ignore[misc]
    """The half of :class:`PivotedCholesky` that follows the fit."""

    @property
    def pivots_(self) -> Array:
        """Pivots, shape (m, d)."""
        return self._fitted().pivots

    @property
    def trace_error_(self) -> float:
        """Relative trace error over all rows."""
        return self._fitted().trace_error

    @property
    def eigenvalues_(self) -> Array:
        """Eigenvalues lam of the spectral basis, descending, shape (m,)."""
        return self._fitted().basis.eigenvalues

    def transform(self, X: Any) -> Any:
        """Features of the rows of X, shape (n, m).

        A Dask array or a store gives a lazy Dask array, with its row chunks divided where a block
        of features would exceed 64 MiB; anything else a NumPy array. Columns that have names are
        taken by name.

        Parameters
        ----------
        X
            Rows, shape (n, d), as in :meth:`JointDistribution.fit`; of a sample store, its x.

        Raises
        ------
        DataError
            On a wrong number of columns, NaN or infinity (when the rows are read).
        """
        model = self._fitted()
        sample = self._rows_of(X)
        sample.check_whole("transform")
        source = sample.sources[0]
        if source.in_memory:
            return model.checked(source.read(0, sample.n_rows), 0)
        return lazy_features(source, model)

    def transform_store(
        self,
        X: Any,
        out: str | os.PathLike[str],
        *,
        chunk_rows: int | None = None,
        dtype: Any = "float64",
        overwrite: bool = False,
        scheduler: Scheduler = None,
        workers: int | None = None,
        memory_limit: str | int | None = None,
        progress: WriteProgress | None = None,
    ) -> FeatureReport:
        """Write the features of all rows of X to a sample store, out of core, in one pass.

        The store holds the features as its x (columns newton0, newton1, ... or spectral0, ...),
        and the source's y, weights and row sample: estimators fit on it, and ``open_sample`` opens
        it. It appears at ``out`` when it is whole; a run that fails or is killed leaves nothing
        there. The values are bit-equal for any chunks of X and ``out``, scheduler and number of
        workers. Workers of a cluster must see the folder of ``out``.

        Parameters
        ----------
        X
            Rows, or rows with y and weights, as in :func:`open_sample`.
        out
            Local folder to make.
        chunk_rows
            Rows per chunk of the new store. Default: a power of two, at most 32 MB of features.
        dtype
            ``"float64"``, or ``"float32"`` to halve the disk space.
        overwrite
            Replace an existing store when the new one is whole.
        scheduler, workers, memory_limit
            As in :meth:`JointDistribution.fit`.
        progress
            Called with a :class:`PassProgress` when a task has ended.

        Returns
        -------
        FeatureReport
            Rows, passes over them, seconds, predicted memory.

        Raises
        ------
        DataError
            On wrong columns, an output that exists, values that are not finite, or features too
            large for float32.
        StoreError
            On damaged chunks of the source.
        ResourceError
            If the memory does not suffice (no row has been read then), or the disk.
        """
        model = self._fitted()
        sample = self._rows_of(X)
        executor = Executor.resolve(scheduler, workers)
        budget = MemoryBudget.of(executor, memory_limit)
        return write_features(
            sample,
            model,
            out,
            chunk_rows=chunk_rows,
            dtype=dtype,
            overwrite=overwrite,
            budget=budget,
            progress=progress,
        )

    def gram_columns(self, X: Any) -> Any:
        """Columns k(x_i, p_j) at the pivots as a lazy Dask array, see :func:`gram_columns`."""
        model = self._fitted()
        return gram_columns(model.kernel, self._rows_of(X), model.pivots)

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        """Names of the features: newton0, newton1, ... or spectral0, ..."""
        return np.array(self._fitted().names, dtype=object)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the fitted features to a folder, see :meth:`FeatureModel.save`.

        ``cme_dask.load(path)`` gives a :class:`FeatureModel`, which needs no Dask;
        :meth:`PivotedCholesky.load` gives an estimator that is lazy where X is.
        """
        self._fitted().save(path, overwrite=overwrite)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        kernels: dict[str, Kernel] | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> Self:
        """A fitted estimator from what :meth:`save` wrote; its pivots are now given points.

        Parameters
        ----------
        path, kernels, storage_options
            As in :func:`cme_dask.load`.

        Raises
        ------
        StoreError
            If there is no model, or it is damaged, unfinished or of a newer version.
        DataError
            If it is a model of another type, or a user's own kernel is needed and not given.
        """
        model = load_only(FeatureModel, path, kernels=kernels, storage_options=storage_options)
        estimator = cls(
            model.kernel, tol=float(model.about["tol"]), basis=model.kind, pivots=model.pivots
        )
        estimator._adopt(model)
        return estimator

    def _adopt(self, model: FeatureModel) -> None:
        """Become fitted."""
        self.model_ = model
        self.basis_ = FittedBasis(model.basis.newton, model.basis, model.trace_error)
        self.columns_ = model.columns
        self.n_features_in_ = len(model.columns.names)
        self.n_passes_ = int(model.about["passes"])

    def _rows_of(self, X: Any) -> Sample:
        """The sample with those columns of x, by name or position, that the fit had."""
        sample = open_sample(X)
        names, result = self._fitted().columns.names, sample.columns[0].names
        named = sample.row_sample is not None or not _made_up(result)
        if named and (not _made_up(names) or set(names) <= set(result)):
            where = "X" if sample.location == "memory" else sample.location
            places = sample.columns[0].positions_of(self._fitted().columns, where)
            sample = sample.select([result[place] for place in places])
        if len(sample.columns[0].names) != len(names):
            raise DataError(
                f"X has {len(sample.columns[0].names)} columns, the fit had {len(names)}"
            )
        return sample

    def _fitted(self) -> FeatureModel:
        if not hasattr(self, "model_"):
            raise NotFitted("this PivotedCholesky is not fitted: call fit first")
        return self.model_


def _made_up(names: tuple[str, ...]) -> bool:
    """Whether these are the names that arrays without names get: such columns go by position."""
    return names == Columns.default("x", len(names)).names


def x_alone(sample: Sample) -> Sample:
    """The same rows without y."""
    if len(sample.sources) == 1:
        return sample
    rows = sample.row_sample
    alone = None if rows is None else replace(rows, parts=rows.parts[:1])
    return replace(sample, sources=sample.sources[:1], columns=sample.columns[:1], row_sample=alone)


# ``PivotedCholesky``: low-rank kernel features for anyone's kernel PCA, ridge or clustering


class PivotedCholesky(FeaturesPartialFit, FittedFeatures, BaseEstimator):  # type: ignore[misc]
    """Low-rank kernel features by pivoted Cholesky, K ~ L L^T, from data of any size.

    Row i of L is N(x_i), the Newton basis at x_i (joint paper, section 5): inner products of
    features are kernel values up to the power function, k(x, z) = N(x) . N(z) + error, with
    |error| <= P(x) P(z). One pass over the data measures the trace error and makes the spectral
    basis; transforming is lazy for Dask arrays and stores, and ``transform_store`` writes the
    features of any number of rows to a new store.

    Parameters
    ----------
    kernel : Kernel, optional
        Default: Gaussian, length scales by the median heuristic on standardised columns.
    tol : float
        Relative trace error aimed at, in (0, 1).
    max_rank : int, optional
        Largest number of pivots.
    basis : {"newton", "spectral"}
        Features: N(x), or psi(x) = V^T N(x), uncorrelated, ordered by descending lam = E psi^2.
    pivots : {"sampled", "greedy", "random"} or array
        As in :class:`JointDistribution`, or given points, shape (m, d).
    span : float
        For ``greedy``, in (0, 1], as in :class:`JointDistribution`.
    sample_size : int
        Rows of the row sample from which pivots are chosen.
    accuracy : float, optional
        Faster arithmetic is used as far as it changes eigenvalues by this fraction at most, and
        the trace error by a thousandth of ``tol``, as tried on the row sample before the pass; 0:
        solve first, in float64, always. Default: a tenth of sqrt(2 / n), the uncertainty of an
        eigenvalue that n rows tell.
    random_state : int, optional
        Seed of the row sample of arrays and of random pivots; default 0.

    Attributes
    ----------
    model_ : FeatureModel
        The fitted features: small, and usable without Dask; what ``save`` writes.
    basis_ : FittedBasis
        ``rank``, ``trace_error`` over all rows, ``pivots``.
    pivots_ : (m, d) array
        The pivots.
    eigenvalues_ : (m,) array
        lam of the spectral basis.
    trace_error_ : float
        Relative trace error over all rows.
    n_features_in_ : int
        Number of columns d.
    n_passes_ : int
        Passes over the rows, as in :class:`JointDistribution`.
    arithmetic_ : Arithmetic
        How the moments were computed: ``name``, and the ``change`` that the trial measured.
    report_ : PassReport
        Time and rows per second of the pass.
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        *,
        tol: float = TOL,
        max_rank: int | None = None,
        basis: str = "newton",
        pivots: Any = "sampled",
        span: float = 1.0,
        sample_size: int = SAMPLE_SIZE,
        accuracy: float | None = None,
        random_state: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.tol = tol
        self.max_rank = max_rank
        self.basis = basis
        self.pivots = pivots
        self.span = span
        self.sample_size = sample_size
        self.accuracy = accuracy
        self.random_state = random_state

    @timed_fit
    def fit(
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
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Choose pivots, and measure them in a pass over the rows.

        Parameters
        ----------
        X
            Rows, shape (n, d), as in :meth:`JointDistribution.fit`; of a sample store, its x.
        y, Y
            Ignored.
        weights, scheduler, workers, memory_limit, progress, checkpoint
            As in :meth:`JointDistribution.fit`.
        """
        sample = self._opened(X, weights)
        options = RunOptions(scheduler, workers, memory_limit, progress, checkpoint)
        with fit_budget(self, sample, {}, options) as budget:
            columns = [len(sample.columns[0].names)]
            with reported(progress, budget.executor, sample.n_rows, columns) as reports:
                ready = self._prepare(sample, budget, reports)
                choice = ready.choice
                bases, in_rounds = choice.bases(ready.kernels)
                mean = self._measure(choice, bases)
                more, topping_up = choice.topped_up(bases, mean.trace_error)
                if more is not None:
                    bases = more
                    mean = self._measure(choice, bases)
        passes = ready.passes + in_rounds + 1 + topping_up + (more is not None)
        self._model_of(sample, mean, passes)
        if isinstance(self.pivots, str):
            missed = choice.may_miss(0)
            self._tolerance.warn("X", self.basis_.rank, self.trace_error_, missed)
        return self

    def _model_of(self, sample: Sample, mean: Moments, passes: int) -> None:
        """From moments to the model."""
        (side,) = self._sides
        with one_blas_thread():
            spectral = LinearBasis(side.basis, *eigenbasis(mean.gram("x")))
        fit = {
            "rows": self._moments.n_rows,
            "passes": passes,
            "tol": self._tolerance.value,
            "trace_error": float(mean.trace_error[0]),
            "location": sample.location,
        }
        self._adopt(FeatureModel(sample.columns[0], spectral, self.basis, fit))

    def plan(
        self,
        X: Any,
        *,
        weights: Any = None,
        scheduler: Scheduler = None,
        workers: int | None = None,
        memory_limit: str | int | None = None,
        progress: ProgressOption = None,
    ) -> FitPlan:
        """What :meth:`fit` would do and take, see :meth:`JointDistribution.plan`.

        Parameters
        ----------
        X, weights, scheduler, workers, memory_limit, progress
            As in :meth:`fit`.
        """
        budget = MemoryBudget.of(Executor.resolve(scheduler, workers), memory_limit)
        sample = self._opened(X, weights)
        columns = [len(sample.columns[0].names)]
        with reported(progress, budget.executor, sample.n_rows, columns) as reports:
            ready = self._prepare(sample, budget, reports)
        return plan_fit(ready, partial(self._specify, ready.choice))

    @property
    def _tolerance(self) -> Tolerance:
        return Tolerance.of(self.tol, self.max_rank, None)

    def _opened(self, X: Any, weights: Any) -> Sample:
        """The rows of x, for parameters that have been checked."""
        check_tol(self.tol)  # None is no default here
        check_parameters(self.tol, self.max_rank, 1, self.sample_size, self.random_state)
        self._accuracy(1)
        if self.basis not in BASES:
            raise DataError(f"basis must be one of {', '.join(BASES)}, got {self.basis!r}")
        return x_alone(open_sample(X, weights=weights))

    def _prepare(
        self, sample: Sample, budget: MemoryBudget, progress: Progress | None
    ) -> FitContext:
        """The row sample read."""
        return prepare(
            sample,
            {"kernel": self.kernel},
            ("X",),
            (self.pivots,),
            PivotRule(self._tolerance, self.span, self.random_state or 0),
            n_folds=1,
            sample_size=self.sample_size,
            budget=budget,
            progress=progress,
        )

    def _specify(
        self, choice: PivotSelector, bases: Sequence[NewtonBasis]
    ) -> tuple[MomentReduction, ComputeMode]:
        """The moments of the basis, with the arithmetic that the accuracy allows."""
        sample, rows = choice.sample, choice.rows
        spec = MomentReduction((make_side(bases[0], sample.columns[0], None, rows, 0),))
        return self._settled(spec, rows, sample.n_rows, choice.budget.executor.function_threads)

    def _settled(
        self, spec: MomentReduction, rows: RowSample, n_rows: int, cores: int
    ) -> tuple[MomentReduction, ComputeMode]:
        trial, accuracy = trial_rows(rows, spec.ranks), self._accuracy(n_rows)
        change = partial(SpectrumChange, self._tolerance.value, accuracy)
        return choose_mode(spec, trial, n_rows, accuracy, change, cores)

    def _accuracy(self, n_rows: int) -> float:
        """The accuracy that was asked for, or a tenth of an eigenvalue's sampling error."""
        if self.accuracy is None:
            return 0.1 * float(np.sqrt(2.0 / n_rows))
        return check_accuracy(self.accuracy)

    def _measure(self, choice: PivotSelector, bases: Sequence[NewtonBasis]) -> Moments:
        """The moment pass."""
        spec, self.arithmetic_ = self._specify(choice, bases)
        (moments,), _, report = make_moments(
            choice.sample, [spec], choice.budget, choice.progress, choice.sample_rows
        )
        self.report_ = choice.covering(report, spec.ranks)
        self._sides, self._moments = spec.features, moments
        return moments.means()
