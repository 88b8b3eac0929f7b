"""``ConditionalMeanEmbedding``: the traditional embedding from one pass over rows of any number."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, Self, overload

import numpy as np
from sklearn.base import BaseEstimator

from cme_dask.config import ACCURACY, N_FOLDS, SAMPLE_SIZE
from cme_dask.data.row_sample import RowSample
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.partial_fit import EmbeddingPartialFit
from cme_dask.estimators.pivoting import PivotRule, pair_of_pivots
from cme_dask.estimators.planning import FitContext, FitPlan, plan_fit, prepare
from cme_dask.estimators.predictors import names_of, target_of, weights_of
from cme_dask.estimators.recipe import (
    FittedBasis,
    FunctionsLike,
    NotFitted,
    Progress,
    Tolerance,
    check_accuracy,
    check_parameters,
    choose_mode,
    fit_budget,
    make_side,
    timed_fit,
    trial_rows,
)
from cme_dask.estimators.steps import ProgressOption, reported
from cme_dask.estimators.tuned import FOLDS, MAX_RANK
from cme_dask.kernels import Kernel
from cme_dask.learning.problems import EMBEDDING_REGS as REGS
from cme_dask.learning.problems import LOSSES, SEARCH_ROWS, EmbeddingSearch, search_embedding
from cme_dask.models.answers import ConditionalExpectation
from cme_dask.models.embedding import EmbeddedVariable, EmbeddingModel
from cme_dask.models.points import FloatArray
from cme_dask.models.relevance import LengthScales
from cme_dask.numerics.basis import Basis, LinearBasis, eigenbasis
from cme_dask.numerics.blocks import Moments, MomentSums
from cme_dask.numerics.crossval import Replicates
from cme_dask.numerics.embedding import (
    ConditionalEmbedding,
    EmbeddingChange,
    check_ridges,
    embedding_replicates,
    held_out_curve,
)
from cme_dask.numerics.moments import FeatureBlock, MomentReduction
from cme_dask.numerics.precision import ComputeMode
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.passes.cluster import Scheduler
from cme_dask.passes.driver import Executor
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.moments import make_moments
from cme_dask.passes.run import RunOptions
from cme_dask.passes.sources import open_sample

Array = Any
CRITERIA = tuple(LOSSES)


class ConditionalMeanEmbedding(EmbeddingPartialFit, BaseEstimator):  # type: ignore[misc]
    r"""Conditional mean embedding of Y given X (joint paper, (42)).

    .. math:: \mathrm E[f(Y) | x] = \psi_X(x)^T (\mathrm{diag}(\lambda_X) + r)^{-1}
              \mathrm E[\psi_X f(Y)]

    is kernel ridge regression of f(Y) on x in the span of m kernel functions, lambda = n r. One
    pass over the data makes the moments of x and of f, per fold; every fold and ridge of the
    cross-validation follows from them. The answers are signed, and E[1 | x] is not 1: laws come
    from :class:`JointDistribution`.

    Parameters
    ----------
    kernel_x : Kernel or "median", optional
        Kernel of x, with length scales in the units of the columns. Default: learned on the row
        sample. ``"median"``: as in :class:`JointDistribution`.
    kernel_y : Kernel or "median"
        Kernel of y: that of the surrogate loss, and of :meth:`EmbeddingModel.embedding`. It is
        never learned: longer scales always lower the loss.
    tol : float, optional
        Relative trace error that the bases aim at, in (0, 1); default 1e-5, or as near to it as
        ``max_rank`` allows.
    max_rank : int, optional
        Largest number of pivots of each basis; default 500.
    reg : float, optional
        Ridge r; default the one with the smallest held-out loss, from 1e-9 to 1 and sqrt(10) apart.
    criterion : {"surrogate", "squared"}
        Held-out loss: :math:`\mathrm E|k_Y(Y, \cdot) - \mu(X)|^2` (Grünewälder et al. 2012), or
        the squared error of y's columns and declared functions, each over its variance.
    pivots, span, sample_size, n_folds, accuracy, random_state
        As in :class:`JointDistribution`.

    Attributes
    ----------
    model_ : EmbeddingModel
        The frozen model: queries without data or Dask.
    basis_x_, basis_y_ : FittedBasis
        ``rank``, ``trace_error`` over all rows, ``pivots``.
    reg_ : float
        The ridge.
    losses_ : (R, 2) array
        Ridges that were compared, and their held-out losses; no rows where the ridge was given.
    replicates_ : Replicates
        Refits without one fold each, and their held-out errors.
    moments_ : MomentSums
        Sums over rows, per fold.
    length_scales_ : LengthScales
        For each column the length scale of the best kernel in the column's units, the same in
        standard deviations, its relevance, and whether the kernels ignore it.
    search_ : EmbeddingSearch
        The search, where the kernel was learned.
    n_passes_, arithmetic_, report_
        As in :class:`JointDistribution`.

    Examples
    --------
    >>> import numpy as np
    >>> from cme_dask import ConditionalMeanEmbedding
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(5_000, 1))
    >>> y = np.sin(x) + 0.3 * rng.normal(size=x.shape)
    >>> model = ConditionalMeanEmbedding().fit(x, y)
    >>> bool(abs(model.predict([[1.0]])[0] - np.sin(1.0)) < 0.05)
    True
    """

    def __init__(
        self,
        *,
        kernel_x: Kernel | str | None = None,
        kernel_y: Kernel | str = "median",
        tol: float | None = None,
        max_rank: int | None = None,
        reg: float | None = None,
        criterion: str = "surrogate",
        pivots: Any = "sampled",
        span: float = 1.0,
        sample_size: int = SAMPLE_SIZE,
        n_folds: int = N_FOLDS,
        accuracy: float = ACCURACY,
        random_state: int | None = None,
    ) -> None:
        self.kernel_x = kernel_x
        self.kernel_y = kernel_y
        self.tol = tol
        self.max_rank = max_rank
        self.reg = reg
        self.criterion = criterion
        self.pivots = pivots
        self.span = span
        self.sample_size = sample_size
        self.n_folds = n_folds
        self.accuracy = accuracy
        self.random_state = random_state

    @timed_fit
    def fit(
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
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Fit in one pass over the rows.

        Parameters
        ----------
        X, Y, y, weights, scheduler, workers, memory_limit, progress, checkpoint
            As in :meth:`JointDistribution.fit`.
        sample_weight
            scikit-learn's name of ``weights``.
        functions
            Functions of y by name whose conditional expectations will be asked for, events as
            texts, or a list of events, as in :meth:`JointDistribution.fit`.

        Raises
        ------
        DataError
            On unusable rows, columns, weights or parameters.
        StoreError
            On damaged stores.
        ResourceError
            If memory would not suffice; nothing has been read then but the row sample.

        Warns
        -----
        ToleranceWarning, RankWarning
            If the trace error over all rows is above ``tol``, or above 0.01 where no ``tol`` was
            given.
        """
        Y = target_of(Y, y)
        sample = self._rows(X, Y, weights_of(weights, sample_weight))
        options = RunOptions(scheduler, workers, memory_limit, progress, checkpoint)
        with (
            fit_budget(self, sample, {"functions": functions}, options) as budget,
            self._reported(progress, budget.executor, sample) as reports,
        ):
            ready = self._prepare(sample, functions, budget, reports)
            choice = ready.choice
            bases, in_rounds = choice.bases(ready.kernels)
            sides, moments = self._measure(ready, bases, functions)
            errors = moments.means().trace_error
            more, topping_up = choice.topped_up(bases, errors)
            if more is not None:
                sides, moments = self._measure(ready, more, functions)
        self.n_passes_ = ready.passes + in_rounds + 1 + topping_up + (more is not None)
        with one_blas_thread():
            self._solve(sample, sides, moments)
        for i, basis in enumerate((self.basis_x_, self.basis_y_)):
            if isinstance(choice.wanted[i], str):
                self._tolerance.warn("xy"[i], basis.rank, basis.trace_error, choice.may_miss(i))
        self._adopt(X, Y, sample)
        return self

    def plan(
        self,
        X: Any,
        Y: Any = None,
        *,
        y: Any = None,
        weights: Any = None,
        functions: FunctionsLike | None = None,
        scheduler: Scheduler = None,
        workers: int | None = None,
        memory_limit: str | int | None = None,
        progress: ProgressOption = None,
    ) -> FitPlan:
        """What :meth:`fit` would do and take, see :meth:`JointDistribution.plan`.

        Parameters
        ----------
        X, Y, y, weights, functions, scheduler, workers, memory_limit, progress
            As in :meth:`fit`.
        """
        sample = self._rows(X, target_of(Y, y), weights)
        budget = MemoryBudget.of(Executor.resolve(scheduler, workers), memory_limit)
        with self._reported(progress, budget.executor, sample) as reports:
            ready = self._prepare(sample, functions, budget, reports)
        seconds = 0.0 if self.search_ is None else self.search_.seconds
        return plan_fit(
            ready,
            lambda bases: self._specify(ready, bases, functions),
            search_seconds=seconds,
        )

    def _reported(
        self, progress: Any, executor: Executor, sample: Sample
    ) -> AbstractContextManager[Progress | None]:
        """What the parts of a fit report to."""
        columns = [len(columns.names) for columns in sample.columns]
        learned = self.kernel_x is None
        return reported(progress, executor, sample.n_rows, columns, learned=learned)

    def _rows(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The parameters checked, the rows opened."""
        check_parameters(self.tol, self.max_rank, self.n_folds, self.sample_size, self.random_state)
        check_accuracy(self.accuracy)
        if self.criterion not in CRITERIA:
            raise DataError(
                f"criterion must be one of {', '.join(CRITERIA)}, got {self.criterion!r}"
            )
        if self.reg is not None:
            check_ridges([self.reg])
        elif self.n_folds < 2:
            raise DataError("the ridge is chosen on held-out folds: give reg, or n_folds >= 2")
        sample = self._open(X, Y, weights)
        if len(sample.sources) != 2:
            raise DataError(
                f"{type(self).__name__} requires y to be passed, but the target y is None: it "
                "needs rows of x and of y: give Y, or a store"
            )
        return sample

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        return open_sample(X, Y, weights=weights)

    def _declared(self, functions: FunctionsLike | None) -> FunctionsLike | None:
        return functions

    def _prepare(
        self,
        sample: Sample,
        functions: FunctionsLike | None,
        budget: MemoryBudget,
        progress: Progress | None,
    ) -> FitContext:
        """The row sample read, the kernel learned if none was given."""
        ready = prepare(
            sample,
            {"kernel_x": self.kernel_x, "kernel_y": self.kernel_y},
            ("x", "y"),
            pair_of_pivots(self.pivots),
            PivotRule(self._tolerance, self.span, self.random_state or 0),
            n_folds=self.n_folds,
            sample_size=self.sample_size,
            budget=budget,
            progress=progress,
        )
        self.search_ = None
        if self.kernel_x is None:
            self.search_ = self._search(ready, functions)
            ready = replace(ready, kernels=[self.search_.kernel, ready.kernels[1]])
        return ready

    def _search(self, ready: FitContext, functions: FunctionsLike | None) -> EmbeddingSearch:
        choice = ready.choice
        rows = choice.rows.prefix(SEARCH_ROWS)
        # Only the columns and functions of this side are looked at, not its basis.
        declared = self._declared(functions)
        side = make_side(None, choice.sample.columns[1], declared, rows, 1)  # type: ignore[arg-type]

        return search_embedding(
            (rows.parts[0], rows.parts[1]),
            rows.importance,
            choice.sample.folding.folds(rows.index, rows.units, FOLDS),
            ready.kernels[1],
            choice.sample.columns[0].categorical,
            np.asarray(side.values(rows.parts[1])) - side.shift,
            criterion=self.criterion,
            regs=self._regs,
            tol=self._tolerance.value,
            callback=choice.progress,
        )

    @property
    def _tolerance(self) -> Tolerance:
        return Tolerance.of(self.tol, self.max_rank, MAX_RANK)

    @property
    def _regs(self) -> Array:
        return check_ridges(REGS if self.reg is None else [self.reg])

    def _specify(
        self,
        ready: FitContext,
        bases: Sequence[Basis],
        functions: FunctionsLike | None,
    ) -> tuple[MomentReduction, ComputeMode]:
        """The moments of these bases, with the arithmetic that the accuracy allows."""
        choice = ready.choice
        sample, rows = choice.sample, choice.rows
        x = make_side(bases[0], sample.columns[0], None, rows, 0)
        y = make_side(bases[1], sample.columns[1], self._declared(functions), rows, 1)
        spec = MomentReduction((x, y), choice.n_folds)
        return self._settled(spec, rows, sample.n_rows, choice.budget.executor.function_threads)

    def _settled(
        self, spec: MomentReduction, rows: RowSample, n_rows: int, cores: int
    ) -> tuple[MomentReduction, ComputeMode]:
        trial = trial_rows(rows, spec.ranks)

        def change() -> EmbeddingChange:
            # The smaller the ridge, the more the answers change.
            return EmbeddingChange(spec.features[0].basis(trial.parts[0]), float(self._regs.min()))

        return choose_mode(spec, trial, n_rows, float(self.accuracy), change, cores)

    def _measure(
        self,
        ready: FitContext,
        bases: Sequence[Basis],
        functions: FunctionsLike | None,
    ) -> tuple[tuple[FeatureBlock, FeatureBlock], MomentSums]:
        """The moment pass."""
        choice = ready.choice
        spec, self.arithmetic_ = self._specify(ready, bases, functions)
        (moments,), _, report = make_moments(
            choice.sample, [spec], choice.budget, choice.progress, choice.sample_rows
        )
        self.report_ = choice.covering(report, spec.ranks)
        x, y = spec.features
        self._functions = y.functions
        return (x, y), moments

    def _solve(
        self, sample: Sample, sides: tuple[FeatureBlock, FeatureBlock], moments: MomentSums
    ) -> None:
        """From moments to the model."""
        self._sides, self._moments, self.moments_ = sides, moments, moments
        regs = self._regs
        self.losses_ = np.empty((0, 2))
        self.reg_ = float(regs[0])
        if self.reg is None:
            losses = held_out_curve(moments, LOSSES[self.criterion], regs)
            self.losses_ = np.column_stack([regs, losses])
            self.reg_ = float(regs[losses.argmin()])
        mean = moments.means()
        spectra = [
            LinearBasis(side.basis, *eigenbasis(mean.gram(v)))
            for v, side in zip("xy", sides, strict=True)
        ]
        embedding = ConditionalEmbedding.of(mean, self.reg_)
        self.replicates_ = embedding_replicates(moments, self.reg_)
        self.basis_x_, self.basis_y_ = (
            FittedBasis(side.basis, spectral, error)
            for side, spectral, error in zip(sides, spectra, mean.trace_error, strict=True)
        )
        x, y = (
            EmbeddedVariable(columns, spectral)
            for columns, spectral in zip(sample.columns, spectra, strict=True)
        )
        # T is orthogonal: slopes on N_X become those on psi_X = T^T N_X.
        of_x, of_y = (spectral.transform.T for spectral in spectra)
        names = sides[1].names
        answers = ConditionalExpectation(
            names,
            np.zeros(len(names)),
            of_x @ embedding.functions(mean),
            self.replicates_.constant,
            self.replicates_.slope,
        )
        self.model_ = EmbeddingModel(
            x,
            y,
            of_x @ embedding.operator(mean) @ of_y.T,
            of_x @ embedding.one(mean),
            answers,
            self._about(sample, moments, mean, names),
        )

    def _about(
        self, sample: Sample, moments: MomentSums, mean: Moments, names: tuple[str, ...]
    ) -> dict[str, Any]:
        """What the model says of its fit."""
        return {
            "rows": moments.n_rows,
            "folds": moments.n_folds,
            "passes": self.n_passes_,
            "tol": self._tolerance.value,
            "trace_error": dict(zip("xy", map(float, mean.trace_error), strict=True)),
            "reg": self.reg_,
            "criterion": "hand" if self.reg is not None else f"{self.criterion} loss",
            "losses": self.losses_.tolist(),
            "arithmetic": self.arithmetic_.name,
            "location": sample.location,
            "fold_by": str(sample.folding),
            "part": None if sample.part is None else sample.part.to_dict(),
            "held_out": {"x": _held_out(names, self.replicates_)},
        }

    @overload
    def expect(
        self, f: Any = None, X: Any = None, *, return_std: Literal[False] = False
    ) -> FloatArray: ...

    @overload
    def expect(
        self, f: Any = None, X: Any = None, *, return_std: Literal[True]
    ) -> tuple[FloatArray, FloatArray]: ...

    @overload
    def expect(
        self, f: Any = None, X: Any = None, *, return_std: bool
    ) -> FloatArray | tuple[FloatArray, FloatArray]: ...

    def expect(
        self, f: Any = None, X: Any = None, *, return_std: bool = False
    ) -> FloatArray | tuple[FloatArray, FloatArray]:
        """E[f | x], see :meth:`EmbeddingModel.expect`; f may be a declared callable."""
        model = self._fitted()
        return model.expect(names_of(f, self._functions), X, return_std=return_std)

    def expect_interval(
        self, f: Any = None, X: Any = None, *, level: float = 0.95
    ) -> tuple[FloatArray, FloatArray]:
        """Bounds of E[f | x], see :meth:`EmbeddingModel.expect_interval`."""
        model = self._fitted()
        return model.expect_interval(names_of(f, self._functions), X, level=level)

    @property
    def length_scales_(self) -> LengthScales:
        """Length scale and relevance of each column, of the fitted model."""
        return self._fitted().length_scales

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the fitted model to a folder, see :meth:`EmbeddingModel.save`."""
        self._fitted().save(path, overwrite=overwrite)

    def _means(self, X: Any) -> Array:
        return self._fitted().expect(None, X)

    def _fitted(self) -> EmbeddingModel:
        if not hasattr(self, "model_"):
            raise NotFitted(f"this {type(self).__name__} is not fitted: call fit first")
        return self.model_


def _held_out(names: tuple[str, ...], found: Replicates) -> dict[str, dict[str, float]]:
    """JSON table of held-out errors; empty without folds."""
    if not len(found.constant):
        return {}
    rows = zip(names, found.error, found.baseline, strict=True)
    return {
        name: {"error": float(e), "baseline": float(b), "skill": 1.0 - float(e / b) if b else 0.0}
        for name, e, b in rows
    }
