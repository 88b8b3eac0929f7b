"""Classifiers by laws of a label, and kernel logistic regression."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from cme_dask.config import SAMPLE_SIZE
from cme_dask.data.sample import Sample
from cme_dask.errors import ConvergenceError, ConvergenceWarning, DataError, warn
from cme_dask.estimators.base import Measured
from cme_dask.estimators.cholesky import x_alone
from cme_dask.estimators.embedding import ConditionalMeanEmbedding
from cme_dask.estimators.joint import JointDistribution
from cme_dask.estimators.pivoting import FitContext
from cme_dask.estimators.predictors import (
    GrowingClassifier,
    LabelClassifier,
    Level,
    given_rows,
)
from cme_dask.estimators.recipe import (
    FittedBasis,
    FunctionsLike,
    by_name,
    check_integer,
    make_side,
)
from cme_dask.estimators.steps import ProgressOption
from cme_dask.kernels import Kernel
from cme_dask.models.answers import class_name
from cme_dask.models.logistic import LogisticModel
from cme_dask.models.points import FloatArray
from cme_dask.models.relevance import LengthScales
from cme_dask.numerics.basis import Basis, LinearBasis, eigenbasis
from cme_dask.numerics.embedding import check_ridges
from cme_dask.numerics.logistic import (
    LogisticGradient,
    LogisticProblem,
    LogisticSolution,
    solve_logistic,
)
from cme_dask.numerics.moments import MomentReduction
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.passes.cluster import Scheduler
from cme_dask.passes.run import RunOptions, run_pass

# ``JointClassifier`` and ``EmbeddingClassifier``: class probabilities from laws of a label


Array = Any


class JointClassifier(GrowingClassifier, JointDistribution):  # type: ignore[misc]
    r"""Classifier by the conditional law of a label: non-negative probabilities with sum 1.

    A :class:`JointDistribution` whose y is one column of labels. Attributes and queries are its
    own, and the model is one of both variables: laws of X given the label are available, too.

    ``predict_proba`` is positive: with n rows and K labels it is :math:`(n p + 1 / K) / (n + 1)`,
    as if one more row had been seen, shared evenly among the labels, so that the log loss of a
    label that the law excludes is about :math:`\log (n K)` and not infinite. The law itself
    (``conditional(X).predict_proba()``) gives p, which may be exactly zero.

    Parameters
    ----------
    kernel_x, kernel_y, tol, max_rank, reg, reg_form, constraint, convergence
        As in :class:`JointDistribution`.
    pivots, span, sample_size, n_folds, support_size, residual, calibration, accuracy, tuning
        As in :class:`JointDistribution`; labels have no residuals and no levels to calibrate.
    random_state
        As in :class:`JointDistribution`.

    Attributes
    ----------
    classes_ : (K,) array
        The labels, ascending; of a store in the order of its codes.

    Examples
    --------
    >>> import numpy as np
    >>> from cme_dask import JointClassifier
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(2_000, 2))
    >>> label = np.where(x[:, 0] + 0.5 * rng.normal(size=2_000) > 0, "up", "down")
    >>> model = JointClassifier(kernel_x="median", reg=1e-3).fit(x, label)
    >>> model.predict([[2.0, 0.0], [-2.0, 0.0]]).tolist()
    ['up', 'down']
    """

    _every_label = True

    def _become(self, measured: Measured, fitted: dict[str, Any], *of_fit: Any) -> None:
        fitted["model_"].about["classes"] = plain_labels(self._classes)
        super()._become(measured, fitted, *of_fit)


class EmbeddingClassifier(GrowingClassifier, ConditionalMeanEmbedding):  # type: ignore[misc]
    r"""Classifier by the conditional mean embedding of a label.

    :math:`P(Y = c | x) = \mathrm E[1\{Y = c\} | x]` of :class:`ConditionalMeanEmbedding` is signed
    and need not add up to one; ``predict_proba`` gives the nearest probabilities (Euclidean
    projection onto the simplex), which have the same order, mixed with one more row that is shared
    evenly among the labels, as in :class:`JointClassifier`: so they are positive.

    Parameters
    ----------
    kernel_x, kernel_y, tol, max_rank, reg, criterion
        As in :class:`ConditionalMeanEmbedding`.
    pivots, span, sample_size, n_folds, accuracy, random_state
        As in :class:`ConditionalMeanEmbedding`.

    Attributes
    ----------
    classes_ : (K,) array
        The labels, ascending; of a store in the order of its codes.
    """

    def signed_proba(self, X: Any) -> FloatArray:
        """The estimates as they are, shape (n, K): they may be negative.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name.
        """
        return self.model_.expect([class_name(code) for code in range(len(self.classes_))], X)

    def _become(self, measured: Measured, fitted: dict[str, Any], *of_fit: Any) -> None:
        fitted["model_"].about["classes"] = plain_labels(self._classes)
        super()._become(measured, fitted, *of_fit)

    def _declared(self, functions: FunctionsLike | None) -> FunctionsLike | None:
        indicators = {class_name(code): Level(code) for code in range(len(self._classes))}
        return {**by_name(functions), **indicators}


def plain_labels(classes: Array) -> list[Any] | None:
    """The labels as a file may hold them in their own types; None if it may not."""
    labels = classes.tolist()
    return labels if all(isinstance(each, (str, bool, int, float)) for each in labels) else None


# ``KernelLogisticRegression``: on the basis of the pivots, with a pass for each gradient


class KernelLogisticRegression(LabelClassifier):
    r"""Multinomial kernel logistic regression in the span of m kernel functions, out of core.

    .. math:: p_c(x) = \frac{\exp(f_c(x) + b_c)}{\sum_e \exp(f_e(x) + b_e)}

    minimises :math:`\mathrm E[-\log p_Y(X)] + \frac r2 \sum_c |f_c|_{\mathcal H}^2` over f_c in the
    span of k(., p) at the pivots p. One pass over the rows makes the moments of the basis, which
    scale the unknowns; then L-BFGS takes one more pass for each gradient.

    Parameters
    ----------
    kernel : Kernel, optional
        Kernel of x; default Gaussian, length scales by the median heuristic on standardised
        columns.
    reg : float
        Ridge r > 0; for two classes lambda = r / 4 of Zhu and Hastie (2005).
    tol : float, optional
        Relative trace error that the basis aims at, in (0, 1); default 1e-5, or as near to it as
        ``max_rank`` allows.
    max_rank : int, optional
        Largest number of pivots; default 500.
    gradient_tol : float
        Norm of the gradient, in unknowns of unit curvature, at which the iteration ends.
    max_iter : int
        Largest number of steps.
    convergence : {"raise", "warn"}
        Whether a missed tolerance is an error or a warning.
    pivots, span, sample_size, random_state
        As in :class:`PivotedCholesky`.

    Attributes
    ----------
    model_ : LogisticModel
        The frozen model: probabilities without data or Dask.
    classes_ : (K,) array
        The labels, ascending; of a store in the order of its codes.
    basis_x_ : FittedBasis
        ``rank``, ``trace_error`` over all rows, ``pivots``.
    length_scales_ : LengthScales
        For each column the length scale of the best kernel in the column's units, the same in
        standard deviations, its relevance, and whether the kernels ignore it.
    solution_ : LogisticSolution
        ``objective``, ``gradient_norm``, ``iterations``, ``passes``.
    n_iter_ : int
        Steps of L-BFGS.
    n_passes_ : int
        Passes over the rows: those of :class:`PivotedCholesky`, and one for each gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from cme_dask import KernelLogisticRegression
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(2_000, 2))
    >>> label = np.where(x[:, 0] + 0.5 * rng.normal(size=2_000) > 0, "up", "down")
    >>> model = KernelLogisticRegression().fit(x, label)
    >>> model.predict([[2.0, 0.0], [-2.0, 0.0]]).tolist()
    ['up', 'down']

    Notes
    -----
    Source: Zhu and Hastie (2005), Journal of Computational and Graphical Statistics 14, 185.
    """

    _kernels = {"kernel": "X"}  # noqa: RUF012 - never changed

    def __init__(
        self,
        kernel: Kernel | None = None,
        *,
        reg: float = 1e-3,
        tol: float | None = None,
        max_rank: int | None = None,
        gradient_tol: float = 1e-5,
        max_iter: int = 200,
        convergence: str = "raise",
        pivots: Any = "sampled",
        span: float = 1.0,
        sample_size: int = SAMPLE_SIZE,
        random_state: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.reg = reg
        self.tol = tol
        self.max_rank = max_rank
        self.gradient_tol = gradient_tol
        self.max_iter = max_iter
        self.convergence = convergence
        self.pivots = pivots
        self.span = span
        self.sample_size = sample_size
        self.random_state = random_state

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        Y: Any = None,
        weights: Any = None,
        sample_weight: Any = None,
        scheduler: Scheduler = None,
        workers: int | None = None,
        memory_limit: str | int | None = None,
        progress: ProgressOption = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Fit, with one pass over the rows for each gradient.

        Parameters
        ----------
        X
            Rows of x, as in :meth:`JointDistribution.fit`; or a store whose y is one categorical
            column.
        y
            Labels, shape (n,): numbers, texts or booleans; NumPy, Dask, Zarr or pandas.
        Y
            Another name of ``y``.
        weights, sample_weight
            Non-negative weights of the rows, by either name.
        scheduler, workers, memory_limit, progress, checkpoint
            As in :meth:`JointDistribution.fit`.

        Raises
        ------
        DataError
            On unusable rows, labels or parameters.
        ConvergenceError
            If the gradient stays above ``gradient_tol``.

        Warns
        -----
        ConvergenceWarning
            The same, if ``convergence`` is ``"warn"``.
        """
        options = RunOptions(scheduler, workers, memory_limit, progress, checkpoint)
        return self._fit(X, *given_rows(y, Y, weights, sample_weight), {}, options)

    @property
    def length_scales_(self) -> LengthScales:
        """Length scale and relevance of each column, of the fitted model."""
        scales: LengthScales = self.model_.length_scales
        return scales

    def _check(self) -> None:
        super()._check()
        check_integer("max_iter", self.max_iter, 1)
        if not check_ridges([self.reg])[0] > 0.0:
            raise DataError(f"reg must be above 0, got {self.reg!r}")
        if not 0.0 < self.gradient_tol < 1.0:
            raise DataError(f"gradient_tol must lie between 0 and 1, got {self.gradient_tol!r}")

    def _steps(self, sample: Sample, *, plans: bool) -> dict[str, Any]:
        return {"iterates": True}

    def _context(self, sample: Sample, *of_fit: Any) -> FitContext:
        return super()._context(x_alone(sample), *of_fit)

    def _spec(self, context: FitContext, bases: Sequence[Basis]) -> MomentReduction:
        return MomentReduction(
            (make_side(bases[0], context.sample.columns[0], None, context.rows, 0),)
        )

    def _run(self, context: FitContext, sample: Sample) -> tuple[Measured, dict[str, Any]]:
        """The pass for the moments, and one for each gradient."""
        measured = self._measure(context)
        (side,), mean = measured.sides, measured.moments.means()
        newton, (error,) = side.basis, mean.trace_error
        gram = np.block([[mean.gram("x"), mean.mean("x")[:, None]], [mean.mean("x")[None, :], 1.0]])
        problem = LogisticProblem(newton.factor, gram, len(self._classes), float(self.reg))
        with one_blas_thread():
            solution = solve_logistic(
                problem,
                lambda a: run_pass(
                    sample,
                    LogisticGradient(newton.kernel, newton.points, a),
                    context.budget,
                    context.progress,
                )[0],
                tol=self.gradient_tol,
                max_iter=self.max_iter,
            )
            spectral = LinearBasis(newton, *eigenbasis(mean.gram("x")))
        self._check_convergence(solution)
        passes, coef = measured.passes + solution.passes, solution.newton
        model = LogisticModel(
            sample.columns[0],
            spectral,
            spectral.transform.T @ coef[:-1],
            coef[-1],
            tuple(self._classes.tolist()),
            {
                "rows": measured.moments.n_rows,
                "passes": passes,
                "tol": self._tolerance.value,
                "trace_error": float(error),
                "reg": float(self.reg),
                "objective": solution.objective,
                "gradient_norm": solution.gradient_norm,
                "location": sample.location,
            },
        )
        self._warn_of_trace(context, [(error, newton.rank)])
        return replace(measured, passes=passes), {
            "model_": model,
            "basis_x_": FittedBasis(newton, spectral, error),
            "solution_": solution,
            "n_iter_": solution.iterations,
        }

    def _check_convergence(self, result: LogisticSolution) -> None:
        if result.gradient_norm <= self.gradient_tol:
            return
        message = (
            f"the gradient has norm {result.gradient_norm:.1e} after {result.iterations} steps, "
            f"gradient_tol is {self.gradient_tol:g}: raise it, reg or max_iter"
        )
        if self.convergence == "raise":
            raise ConvergenceError(message)
        warn(message, ConvergenceWarning)
