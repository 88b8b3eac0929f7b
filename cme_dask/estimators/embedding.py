"""``ConditionalMeanEmbedding``: the traditional embedding from one pass over rows of any number."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

from cme_dask.config import ACCURACY, N_FOLDS, SAMPLE_SIZE
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.base import Declarations, Measured, check_choice, names_of
from cme_dask.estimators.context import FitContext
from cme_dask.estimators.embedding_fit import EmbeddingEstimator
from cme_dask.estimators.planning import FitPlan, FurtherPass
from cme_dask.kernels import Kernel
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.models.embedding import EmbeddingModel
from cme_dask.models.merging import FitSums
from cme_dask.models.points import FloatArray
from cme_dask.numerics.leave_one_out import LeaveOneOut, leave_one_out, left_out_flops
from cme_dask.numerics.moments import FeatureBlock, MomentSums
from cme_dask.passes.run import run_pass

Array = Any

EXACT_ROWS = 5_000
"""Rows that an exact fit may have: it takes the cube of their number."""


class ConditionalMeanEmbedding(EmbeddingEstimator):
    r"""Conditional mean embedding of Y given X (joint paper, (42)).

    .. math:: \mathrm E[f(Y) | x] = \mathrm E f + \psi_X(x)^T (\mathrm{diag}(\lambda_X) + r)^{-1}
              \mathrm E[\psi_X (f(Y) - \mathrm E f)]

    is kernel ridge regression of f(Y) on x, about its mean, in the span of m kernel functions,
    lambda = n r. One pass over the data makes the moments of x and of f, per fold; every fold and
    ridge of the cross-validation follows from them. The answers are signed: laws come from
    :class:`JointDistribution`.

    The paper has no mean: the sum of its weights of rows, :meth:`EmbeddingModel.mass`, is not one.
    Here the remainder is spread evenly over all rows. So a constant added to y is added to
    predictions, which far from the data tend to the mean. The embedding mu(x) is the paper's.

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
    reg : float, sequence of floats or {"finite-rank", "slow-decay"}, optional
        Ridge r, or several, of which the one with the smallest loss on rows that the fit has not
        seen is taken; default 19 of them, from 1e-9 to 1 and sqrt(10) apart. A name is a schedule
        in the number n of rows, 0.1 E k_X(X, X) times n^(-1/2) or (log n / n)^(2/3), with the rates
        of convergence of Grünewälder et al. (2012, section 4) for kernels of finite rank, and of
        eigenvalues that fall as i^-2.
    criterion : {"squared", "surrogate"}, optional
        That loss: the squared error of y's columns and declared functions, each over its variance,
        or :math:`\mathrm E|k_Y(Y, \cdot) - \mu(X)|^2` (Grünewälder et al. 2012). Default: the
        squared error, and where y holds labels the other one.
    validation : {"folds", "leave-one-out"}
        The rows that a fit has not seen: those of each fold, without another pass, or each row
        alone, in a second pass.
    method : {"pivots", "exact"}
        ``"exact"`` takes all rows, at most 5,000, as pivots: kernel ridge regression without an
        approximation but rounding.
    pivots, span, sample_size, n_folds, accuracy, missing, random_state
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

    def __init__(
        self,
        *,
        kernel_x: Kernel | str | None = None,
        kernel_y: Kernel | str = "median",
        tol: float | None = None,
        max_rank: int | None = None,
        reg: float | Sequence[float] | str | None = None,
        criterion: str | None = None,
        validation: str = "folds",
        method: str = "pivots",
        pivots: Any = "sampled",
        span: float = 1.0,
        sample_size: int = SAMPLE_SIZE,
        n_folds: int = N_FOLDS,
        accuracy: float = ACCURACY,
        missing: str = "error",
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
        self.missing = missing
        self.random_state = random_state

    def _check(self) -> None:
        super()._check()
        check_choice("validation", self.validation, ("folds", "leave-one-out"))
        check_choice("method", self.method, ("pivots", "exact"))
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
        return self._compares and self.validation == "leave-one-out"

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        sample = super()._open(X, Y, weights)
        labels = any(sample.columns[1].categorical)
        self._default_criterion = "surrogate" if labels else "squared"
        if self.method == "exact" and sample.n_rows > EXACT_ROWS:
            raise DataError(
                f"method='exact' takes at most {EXACT_ROWS:,} rows, got {sample.n_rows:,}: take "
                "method='pivots', whose tol bounds the error"
            )
        return sample

    def _search(self, context: FitContext) -> FitContext:
        context = super()._search(context)
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

    def _measure(self, context: FitContext) -> Measured:
        measured = super()._measure(context)
        if not self._leaves_one_out:
            return measured
        (losses,), report = run_pass(
            context.sample,
            [self._left_out(measured.moments, measured.sides)],
            context.executor,
            context.progress,
            around=context.after_moments(measured.sides),
        )
        memory = measured.report.memory.or_tighter(report.memory)
        return measured._replace(
            passes=measured.passes + 1,
            report=measured.report._replace(memory=memory),
            left_out=losses,
        )

    def _left_out(self, moments: MomentSums, sides: Sequence[FeatureBlock]) -> LeaveOneOut:
        with one_blas_thread():
            return leave_one_out(moments, sides, self._criterion, self._regs)

    def _planned(self, context: FitContext, *_: Any) -> FitPlan:
        if not self._leaves_one_out:
            return super()._planned(context)
        further = FurtherPass(
            "leave-one-out", lambda sums, sides: (context.sample, self._left_out(sums, sides))
        )
        return super()._planned(context, further=further)

    def _steps(self, sample: Sample, *, plans: bool) -> dict[str, Any]:
        steps = super()._steps(sample, plans=plans)
        if not self._leaves_one_out or plans:
            return steps
        columns, ridges = len(sample.columns[1].names), len(self._regs)

        def flops(ranks: Sequence[float]) -> float:
            targets = ranks[1] if self._criterion == "surrogate" else columns
            return left_out_flops(ranks[0], targets, ridges)

        return steps | {"left_out": flops}

    def _losses(self, measured: Measured) -> tuple[Array, Array]:
        return super()._losses(measured) if measured.left_out is None else measured.left_out

    def _sums(self, functions: Declarations) -> FitSums:
        if self._leaves_one_out:
            raise DataError(
                "leave-one-out needs all rows again, so that rows cannot be added: take "
                "validation='folds', or give reg"
            )
        return super()._sums(functions)

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
