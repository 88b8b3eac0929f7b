"""``ConditionalMeanEmbedding``: the traditional embedding from one pass over rows of any number."""

import os
from dataclasses import replace
from typing import Any, Literal, Self, overload

import numpy as np

from cme_dask.config import ACCURACY, N_FOLDS, SAMPLE_SIZE
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.base import (
    Declarations,
    FittedBasis,
    MeanRegressor,
    Measured,
    check_choice,
    given_rows,
    names_of,
    origin,
)
from cme_dask.estimators.context import FitContext
from cme_dask.estimators.growing import MomentEstimator, functions_of_first_call
from cme_dask.estimators.planning import FitPlan
from cme_dask.estimators.steps import ProgressOption
from cme_dask.estimators.tuned import FOLDS
from cme_dask.kernels import Kernel
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.learning.problems import EMBEDDING_REGS as REGS
from cme_dask.learning.problems import LOSSES, SEARCH_ROWS, search_embedding
from cme_dask.models.answers import ConditionalExpectation
from cme_dask.models.assembly import held_out_table
from cme_dask.models.embedding import EmbeddedVariable, EmbeddingModel
from cme_dask.models.events import FunctionsLike, declared
from cme_dask.models.merging import FitSums
from cme_dask.models.points import FloatArray
from cme_dask.models.ridge_path import RidgePath
from cme_dask.numerics.basis import LinearBasis, eigenbasis
from cme_dask.numerics.embedding import (
    SCHEDULES,
    ConditionalEmbedding,
    EmbeddingChange,
    check_ridges,
    embedding_replicates,
    held_out_curve,
)
from cme_dask.numerics.folds import RowSample
from cme_dask.numerics.leave_one_out import leave_one_out
from cme_dask.numerics.moments import FeatureBlock, MomentReduction
from cme_dask.passes.cluster import Scheduler
from cme_dask.passes.run import RunOptions, run_pass

Array = Any
CRITERIA = tuple(LOSSES)

EXACT_ROWS = 5_000
"""Rows that an exact fit may have: it takes the cube of their number."""


class ConditionalMeanEmbedding(MeanRegressor, MomentEstimator):
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
    reg : float or {"finite-rank", "slow-decay"}, optional
        Ridge r; default the one with the smallest loss on rows that the fit has not seen, from 1e-9
        to 1 and sqrt(10) apart. A name is a schedule in the number n of rows, 0.1 E k_X(X, X) times
        n^(-1/2) or (log n / n)^(2/3), with the rates of convergence of Grünewälder et al. (2012,
        section 4) for kernels of finite rank, and of eigenvalues that fall as i^-2.
    criterion : {"surrogate", "squared"}
        That loss: :math:`\mathrm E|k_Y(Y, \cdot) - \mu(X)|^2` (Grünewälder et al. 2012), or
        the squared error of y's columns and declared functions, each over its variance.
    validation : {"folds", "leave-one-out"}
        The rows that a fit has not seen: those of each fold, without another pass, or each row
        alone, in a second pass.
    method : {"pivots", "exact"}
        ``"exact"`` takes all rows, at most 5,000, as pivots: kernel ridge regression without an
        approximation but rounding.
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
    path_ : RidgePath or None
        Ridges that were compared, and their losses with standard errors; ``plot`` draws them. None
        where the ridge was given.
    losses_ : (R, 2) array
        Ridges and losses of ``path_``; no rows where the ridge was given.
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

    model_: EmbeddingModel
    _learned = ("kernel_x",)
    _kernels = {"kernel_x": "x", "kernel_y": "y"}  # noqa: RUF012 - never changed

    def __init__(
        self,
        *,
        kernel_x: Kernel | str | None = None,
        kernel_y: Kernel | str = "median",
        tol: float | None = None,
        max_rank: int | None = None,
        reg: float | str | None = None,
        criterion: str = "surrogate",
        validation: str = "folds",
        method: str = "pivots",
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
        self.validation = validation
        self.method = method
        self.pivots = pivots
        self.span = span
        self.sample_size = sample_size
        self.n_folds = n_folds
        self.accuracy = accuracy
        self.random_state = random_state

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
            Declared functions of y by name, for exact conditional expectations, events as
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
        options = RunOptions(scheduler, workers, memory_limit, progress, checkpoint)
        given = {"functions": functions}
        return self._fit(X, *given_rows(Y, y, weights, sample_weight), given, options)

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
        options = RunOptions(scheduler, workers, memory_limit, progress)
        fit = self._grow if hasattr(self, "model_") else self._fit
        given = {"functions": functions}
        return fit(X, *given_rows(Y, y, weights, sample_weight), given, options)

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

        The second pass of ``validation="leave-one-out"`` is counted, its seconds are not included.

        Parameters
        ----------
        X, Y, y, weights, functions, scheduler, workers, memory_limit, progress
            As in :meth:`fit`.
        """
        options = RunOptions(scheduler, workers, memory_limit, progress)
        return self._plan(X, *given_rows(Y, y, weights, None), {"functions": functions}, options)

    def _check(self) -> None:
        super()._check()
        check_choice("criterion", self.criterion, CRITERIA)
        check_choice("validation", self.validation, ("folds", "leave-one-out"))
        check_choice("method", self.method, ("pivots", "exact"))
        if isinstance(self.reg, str):
            if self.reg not in SCHEDULES:
                raise DataError(
                    "ridges must be non-negative numbers, or a schedule by its name "
                    f"({', '.join(SCHEDULES)}), got {self.reg!r}"
                )
        elif self.reg is not None:
            check_ridges([self.reg])
        elif self.n_folds < 2 and not self._leaves_one_out:
            raise DataError("the ridge is chosen on held-out folds: give reg, or n_folds >= 2")
        if self.method == "exact" and not (
            isinstance(self.pivots, str)
            and self.pivots == "sampled"
            and self.tol is None
            and self.max_rank is None
        ):
            raise DataError(
                "method='exact' takes all rows as pivots: give no pivots, tol or max_rank with it"
            )

    @property
    def _leaves_one_out(self) -> bool:
        return self.reg is None and self.validation == "leave-one-out"

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        sample = super()._open(X, Y, weights)
        if self.method == "exact" and sample.n_rows > EXACT_ROWS:
            raise DataError(
                f"method='exact' takes at most {EXACT_ROWS:,} rows, got {sample.n_rows:,}: take "
                "method='pivots', whose tol bounds the error"
            )
        return sample

    def _search(self, context: FitContext) -> FitContext:
        context = self._learned_kernel(context) if self._learns() else context
        if self.method == "exact":
            if not context.rows.complete:
                raise DataError(
                    f"method='exact' needs all rows in the row sample, which holds "
                    f"{len(context.rows):,} of {context.sample.n_rows:,}: raise sample_size, or "
                    "write the store again with a larger row sample"
                )
            each = zip(context.pivots, context.rows.parts, strict=True)
            given = tuple(replace(p, mode="given", points=rows) for p, rows in each)
            context = replace(context, pivots=given)
        return context

    def _learned_kernel(self, context: FitContext) -> FitContext:
        rows = context.rows.prefix(SEARCH_ROWS)
        # Only the columns and functions of this side are looked at, not its basis.
        functions = dict(context.functions[1])
        side = FeatureBlock(None, context.sample.columns[1].names, functions)  # type: ignore[arg-type]
        values = np.hstack([*side.values(rows.parts[1])])
        search = search_embedding(
            (rows.parts[0], rows.parts[1]),
            rows.importance,
            context.sample.folding.folds(rows.index, rows.units, FOLDS),
            context.kernels[1],
            context.sample.columns[0].categorical,
            values - rows.importance @ values,
            criterion=self.criterion,
            regs=self._regs,
            tol=self._tolerance.value,
            callback=context.progress,
        )
        return replace(context, kernels=[search.kernel, context.kernels[1]], search=search)

    @property
    def _regs(self) -> Array:
        learned = self.reg is None or isinstance(self.reg, str)  # a schedule needs the moments
        return check_ridges(REGS if learned else [self.reg])

    def _measure(self, context: FitContext) -> Measured:
        measured = super()._measure(context)
        if not self._leaves_one_out:
            return measured
        with one_blas_thread():
            loo = leave_one_out(measured.moments, measured.sides, self.criterion, self._regs)
        (losses,), report = run_pass(context.sample, [loo], context.executor)
        memory = measured.report.memory.or_tighter(report.memory)
        return measured._replace(
            passes=measured.passes + 1,
            report=measured.report._replace(memory=memory),
            left_out=losses,
        )

    def _planned(self, context: FitContext, *others: Any) -> FitPlan:
        plan = super()._planned(context, *others)
        return replace(plan, passes=plan.passes + int(self._leaves_one_out))

    def _path(self, measured: Measured) -> RidgePath | None:
        """Losses of the ridges that are compared."""
        if self.reg is not None:
            return None
        if measured.left_out is None:
            losses, errors = held_out_curve(measured.moments, LOSSES[self.criterion], self._regs)
        else:
            losses, errors = measured.left_out
        best = int(losses.argmin())
        return RidgePath(self._regs, losses, errors, self.validation, self.criterion, best)

    def _change(
        self, spec: MomentReduction, trial: RowSample, rows: RowSample, accuracy: float, solver: Any
    ) -> EmbeddingChange:
        # The smaller the ridge, the more the answers change.
        return EmbeddingChange(spec.features[0].basis(trial.parts[0]), float(self._regs.min()))

    def _run(self, context: FitContext, sample: Sample) -> tuple[Measured, dict[str, Any]]:
        measured, fitted = super()._run(context, sample)
        return measured, fitted | {"search_": context.search}

    def _solve(self, sample: Sample, measured: Measured) -> dict[str, Any]:
        moments, (x, y), path = measured.moments, measured.sides, self._path(measured)
        mean = moments.means()
        losses, criterion = np.empty((0, 2)), "hand"
        if path is not None:
            losses = np.column_stack([path.regs, path.losses])
            reg, criterion = float(path.regs[path.chosen]), f"{self.criterion} loss"
        elif isinstance(self.reg, str):
            criterion = f"schedule {self.reg}"
            reg = float(mean.traces["x"] * SCHEDULES[self.reg](moments.n_rows))
        else:
            reg = float(self._regs[0])
        embedding, replicates = (
            ConditionalEmbedding.of(mean, reg),
            embedding_replicates(moments, reg),
        )
        psi_x, psi_y = (
            LinearBasis(side.basis, *eigenbasis(mean.blocks[v, v]))
            for v, side in (("x", x), ("y", y))
        )
        # T is orthogonal: slopes on N_X become those on psi_X = T^T N_X.
        of_x, of_y = psi_x.transform.T, psi_y.transform.T
        answers = ConditionalExpectation(
            y.names,
            np.zeros(len(y.names)),
            of_x @ embedding.functions(mean),
            replicates.constant,
            replicates.slope,
        )
        errors = mean.trace_error
        model = EmbeddingModel(
            EmbeddedVariable(sample.columns[0], psi_x),
            EmbeddedVariable(sample.columns[1], psi_y),
            of_x @ embedding.operator(mean) @ of_y.T,
            of_x @ embedding.one(mean),
            answers,
            {
                "rows": moments.n_rows,
                "folds": moments.n_folds,
                "passes": measured.passes,
                "tol": self._tolerance.value,
                "trace_error": dict(zip("xy", map(float, errors), strict=True)),
                "reg": reg,
                "criterion": criterion,
                "losses": losses.tolist(),
                "arithmetic": measured.arithmetic.name,
                **origin(sample),
                "held_out": {"x": held_out_table(y.names, [replicates])},
            },
        )
        return {
            "model_": model,
            "basis_x_": FittedBasis(x.basis, psi_x, errors[0]),
            "basis_y_": FittedBasis(y.basis, psi_y, errors[1]),
            "reg_": reg,
            "path_": path,
            "losses_": losses,
            "replicates_": replicates,
            "moments_": moments,
            "_sides": measured.sides,
            "_functions": y.functions,
        }

    def _sums(self, functions: Declarations) -> FitSums:
        if self._leaves_one_out:
            raise DataError(
                "leave-one-out needs all rows again, so that rows cannot be added: take "
                "validation='folds', or give reg"
            )
        x, y = self._sides
        columns = self.model_.x.columns, self.model_.y.columns
        again = functions_of_first_call(self._functions, functions["functions"])
        sides = x, replace(y, functions=declared(again, columns[1]))
        return FitSums(columns, sides, self.moments_, (), (), self.model_.about)

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
        return self.model_.expect(names_of(f, self._functions), X, return_std=return_std)

    def expect_interval(
        self, f: Any = None, X: Any = None, *, level: float = 0.95
    ) -> tuple[FloatArray, FloatArray]:
        """Bounds of E[f | x], see :meth:`EmbeddingModel.expect_interval`."""
        return self.model_.expect_interval(names_of(f, self._functions), X, level=level)

    def _means(self, X: Any) -> Array:
        return self.model_.expect(None, X)
