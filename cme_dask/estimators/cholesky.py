"""``PivotedCholesky``: low-rank kernel features for anyone's kernel PCA, ridge or clustering."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator

from cme_dask.chunked.blas import one_blas_thread
from cme_dask.chunked.clusters import Scheduler
from cme_dask.chunked.driver import Executor
from cme_dask.chunked.memory import MemoryBudget
from cme_dask.chunked.sources import open_sample
from cme_dask.defaults import SAMPLE_SIZE, TOL
from cme_dask.errors import DataError
from cme_dask.estimators.arithmetic import check_accuracy, settle_arithmetic, trial_rows
from cme_dask.estimators.features import FittedFeatures, x_alone
from cme_dask.estimators.growing_moments import GrowingFeatures
from cme_dask.estimators.keeping import kept_fit
from cme_dask.estimators.pivoting import PivotChoice, PivotRule
from cme_dask.estimators.planning import FitPlan, Preparation, plan_fit, prepare
from cme_dask.estimators.recipe import (
    Progress,
    Tolerance,
    check_parameters,
    check_tol,
    make_moments,
    make_side,
)
from cme_dask.estimators.steps import ProgressOption, reported
from cme_dask.estimators.timing import timed_fit
from cme_dask.kernels import Kernel
from cme_dask.models.features import BASES, FeatureModel
from cme_dask.numerics.basis import LinearBasis, NewtonBasis, eigenbasis
from cme_dask.numerics.guard import Arithmetic, SpectrumChange
from cme_dask.numerics.means import MeanMoments
from cme_dask.numerics.moments import MomentSpec
from cme_dask.storage.priority import RowSample
from cme_dask.storage.sample import Sample


class PivotedCholesky(GrowingFeatures, FittedFeatures, BaseEstimator):  # type: ignore[misc]
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
        with kept_fit(self, sample, {}, checkpoint) as kept:
            executor = Executor.resolve(scheduler, workers, kept)
            columns = [len(sample.columns[0].names)]
            with reported(progress, executor, sample.n_rows, columns) as reports:
                ready = self._prepare(sample, MemoryBudget.of(executor, memory_limit), reports)
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

    def _model_of(self, sample: Sample, mean: MeanMoments, passes: int) -> None:
        """From moments to the model."""
        (side,) = self._sides
        with one_blas_thread():
            spectral = LinearBasis(side.basis, *eigenbasis(mean.gram[0]))
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
    ) -> Preparation:
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
        self, choice: PivotChoice, bases: Sequence[NewtonBasis]
    ) -> tuple[MomentSpec, Arithmetic]:
        """The moments of the basis, with the arithmetic that the accuracy allows."""
        sample, rows = choice.sample, choice.rows
        spec = MomentSpec((make_side(bases[0], sample.columns[0], None, rows, 0),))
        return self._settled(spec, rows, sample.n_rows, choice.budget.executor.function_threads)

    def _settled(
        self, spec: MomentSpec, rows: RowSample, n_rows: int, cores: int
    ) -> tuple[MomentSpec, Arithmetic]:
        trial, accuracy = trial_rows(rows, spec.ranks), self._accuracy(n_rows)
        change = SpectrumChange(self._tolerance.value, accuracy)
        return settle_arithmetic(spec, trial, n_rows, accuracy, change, cores)

    def _accuracy(self, n_rows: int) -> float:
        """The accuracy that was asked for, or a tenth of an eigenvalue's sampling error."""
        if self.accuracy is None:
            return 0.1 * float(np.sqrt(2.0 / n_rows))
        return check_accuracy(self.accuracy)

    def _measure(self, choice: PivotChoice, bases: Sequence[NewtonBasis]) -> MeanMoments:
        """The moment pass."""
        spec, self.arithmetic_ = self._specify(choice, bases)
        (moments,), _, report = make_moments(
            choice.sample, [spec], choice.budget, choice.progress, choice.sample_rows
        )
        self.report_ = choice.covering(report, spec.ranks)
        self._sides, self._moments = spec.sides, moments
        return MeanMoments.of(moments.total(), spec.sides)
