"""Classifiers by laws of a label, kernel logistic regression, and labels as classes."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack, cast

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from cme_dask.config import SAMPLE_SIZE
from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.errors import ConvergenceError, ConvergenceWarning, DataError, warn
from cme_dask.estimators.base import (
    Declarations,
    Estimator,
    FittedBasis,
    Measured,
    check_choice,
    check_number,
    check_tol,
    given_rows,
)
from cme_dask.estimators.cholesky import one_variable
from cme_dask.estimators.context import FitContext
from cme_dask.estimators.embedding import ConditionalMeanEmbedding
from cme_dask.estimators.joint import JointDistribution
from cme_dask.kernels import Kernel
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.models.answers import class_name, most_probable
from cme_dask.models.events import Level, by_name
from cme_dask.models.logistic import LogisticModel
from cme_dask.models.points import FloatArray, is_out_of_core
from cme_dask.models.relevance import LengthScales
from cme_dask.numerics.basis import LinearBasis, eigenbasis
from cme_dask.numerics.labels import (
    check_label_types,
    clipped_shares,
    entropy,
    missing_labels,
    nearest_shares,
)
from cme_dask.numerics.logistic import (
    LogisticGradient,
    LogisticProblem,
    LogisticSolution,
    solve_logistic,
)
from cme_dask.passes.driver import (
    FitKeywords,
    MomentKeywords,
    options_of,
    with_run_options,
)
from cme_dask.passes.run import run_pass
from cme_dask.passes.sources import coded, is_chunked, open_sample

log = logging.getLogger("cme_dask.run")

Array = Any


# Labels as classes


class LabelClassifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """A classifier by conditional probabilities of the labels of y; ``score`` is the accuracy."""

    _expected: Array | None = None  # labels given to a first call of partial_fit
    _every_label = False  # whether rows of each must be among those of a first call

    def predict_proba(self, X: Any) -> FloatArray:
        """P(Y = label | x), shape (n, K), in the order of ``classes_``: non-negative, sum 1.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name. A Dask array, a Zarr array
            or a store gives a Dask array; nothing is computed then.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        return cast(FloatArray, self.model_.predict_proba(X))

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable label at each point, shape (n,).

        Parameters
        ----------
        X
            As in :meth:`predict_proba`.
        """
        result = self.model_.predict_proba(X)
        if is_out_of_core(X):
            names = {"classes": self.classes_, "dtype": self.classes_.dtype, "drop_axis": 1}
            return cast(NDArray[Any], result.map_blocks(most_probable, token="predict", **names))
        return most_probable(result, self.classes_)

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows, with the labels as codes of a categorical column."""
        sample, self._classes = labelled_sample(
            X,
            Y,
            weights,
            self._expected,
            complete=self._every_label,
            missing=getattr(self, "missing", "error") != "error",
        )
        return sample

    def _adopt(self, X: Any, Y: Any, sample: Sample) -> None:
        """Keep the labels, too, now that the fit has ended well."""
        super()._adopt(X, Y, sample)
        self.classes_ = self._classes

    def _open_more(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows of a later call, with the codes that labels had in the first."""
        self._classes = self.classes_  # a plan, or a fit that failed, may have left others
        missing = getattr(self, "missing", "error") != "error"
        return labelled_sample(X, Y, weights, self.classes_, missing=missing)[0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = False
        tags.target_tags.single_output = True
        tags.input_tags.allow_nan = getattr(self, "missing", "error") == "impute"
        tags.regressor_tags = None
        return tags


class GrowingClassifier(LabelClassifier):
    """A classifier whose estimator takes more rows: its ``partial_fit`` knows labels."""

    @with_run_options
    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        *,
        Y: Any = None,
        classes: Any = None,
        weights: Any = None,
        sample_weight: Any = None,
        **keywords: Unpack[MomentKeywords],
    ) -> Self:
        """Fit, or add rows to the fitted model, in one pass over the new rows alone.

        As of the estimator without classes: later calls keep kernels, pivots and folds.

        Parameters
        ----------
        X, y, weights, sample_weight
            As in :meth:`fit`, of the new rows.
        Y
            Another name of ``y``.
        classes
            On the first call, all labels that may come, shape (K,); default those of its rows.
        **keywords
            As in :class:`RunOptions`.

        Raises
        ------
        DataError
            As :meth:`fit`, or on labels that are not among those.
        """
        if classes is not None and hasattr(self, "classes_"):
            if not np.array_equal(np.unique(classes), np.sort(self.classes_)):
                raise DataError("classes belong to the first call of partial_fit: leave them out")
        elif classes is not None:
            expected = np.asarray(classes)
            check_label_types(expected, "classes")
            self._expected = np.unique(expected)
        labels, weights = given_rows(y, Y, weights, sample_weight)
        try:
            super().partial_fit(
                X,
                labels,
                weights=weights,
                **keywords,
            )
        finally:
            self._expected = None
        return self


def _checked(check: Callable[[Any], Any], y: Any) -> Any:
    """Run a check of scikit-learn, and convert its ValueError to a DataError."""
    try:
        return check(y)
    except ValueError as error:
        raise DataError(f"y: {error}") from error


def labelled_sample(
    X: Any,
    y: Any,
    weights: Any,
    known: Array | None = None,
    *,
    complete: bool = False,
    missing: bool = False,
) -> tuple[Sample, Array]:
    """Rows of x and codes of labels, and the labels in the order of the codes, shape (K,).

    Parameters
    ----------
    X
        Rows of x; or a store or ``Sample`` whose y is one categorical column.
    y
        Labels, shape (n,): numbers, texts or booleans, in an array, Dask array or pandas Series.
    weights
        Of the rows.
    known
        Labels of earlier rows, if there are some: these have no others.
    complete
        Whether there must be rows of all known labels.
    missing
        Whether labels may be missing (None or NaN); their codes are NaN.

    Raises
    ------
    DataError
        If labels are missing and must not be, times, of several types, continuous, unknown, or all
        the same.
    """
    if y is None:
        return _stored_labels(open_sample(X, weights=weights))
    name = str(getattr(y, "name", None) or "y") if hasattr(y, "to_numpy") else "y"
    if is_chunked(y):
        classes, codes = coded(y, missing=missing)
    else:
        # As scikit-learn does: a column vector is taken with a warning.
        y = _checked(partial(column_or_1d, warn=True), y)
        known_rows = ~missing_labels(y)
        if not missing:
            _check_labels(y, name)
        y = y[known_rows]
        check_label_types(y, name)
        _checked(check_classification_targets, y)
        classes, found = np.unique(y, return_inverse=True)
        codes = np.full(len(known_rows), np.nan)
        codes[known_rows] = found
    if known is not None:
        _check_complete(classes, known if complete else classes)
        classes, codes = known, _recoded(classes, codes, known)
    if len(classes) < 2:
        got = f"1 class: {classes.tolist()[0]!r}" if len(classes) else "no rows"
        raise DataError(f"y must hold at least two classes, got {got}")
    sample = open_sample(X, codes, weights=weights)
    name = name if name not in sample.columns[0].names else f"{name} label"
    labels = Columns((name,), {}, {name: tuple(map(str, classes))})
    return replace(sample, columns=(sample.columns[0], labels)), classes


def _check_complete(classes: Array, known: Array) -> None:
    missing = sorted(set(known.tolist()) - set(classes.tolist()), key=str)
    if missing:
        raise DataError(
            f"the first call of partial_fit has no rows labelled {', '.join(map(repr, missing))}: "
            "pivots and cells of the labels come from its rows, so give it some of each, or take "
            "an EmbeddingClassifier, which needs none"
        )


def _recoded(classes: Array, codes: Array, known: Array) -> Array:
    """Codes in the order of the known labels, of codes in that of some of them."""
    unknown = [label for label in classes.tolist() if label not in set(known.tolist())]
    if unknown:
        raise DataError(
            f"y holds labels that the first call had not, {', '.join(map(repr, unknown))}: fit all "
            "rows again"
        )
    numbers = [known.tolist().index(label) for label in classes.tolist()]
    # Codes of chunked labels are lazy, and Dask arrays are no index.
    table = np.array(numbers, dtype=np.float64)
    if is_chunked(codes):
        return codes.map_blocks(taken, table, dtype=np.float64)
    return taken(codes, table)


def _stored_labels(sample: Sample) -> tuple[Sample, Array]:
    columns = sample.columns[-1]
    if len(sample.sources) != 2:
        raise DataError(
            "a classifier requires y to be passed, but the target y is None: give labels, or a "
            "store whose y is one categorical column"
        )
    if len(columns.names) != 1 or not columns.categories:
        result = f"y: {columns.listed()}"
        raise DataError(
            "a classifier needs y to be one categorical column (ingest with categorical=), "
            f"{sample.location} has {result}"
        )
    return sample, np.array(columns.categories[columns.names[0]], dtype=object)


def _check_labels(y: Array, name: str) -> None:
    missing = missing_labels(y)
    if missing.any():
        raise DataError(
            f"{name} must hold labels, but {missing.sum():,} (first at row {missing.argmax()}) are "
            "NaN or missing: drop these rows"
        )


def taken(codes: Array, table: Array) -> Array:
    """The entry of a table at each code, NaN where the code is; of any shape."""
    known = np.isfinite(codes)
    return np.where(known, table[np.where(known, codes, 0).astype(np.int64)], np.nan)


# ``JointClassifier`` and ``EmbeddingClassifier``: class probabilities from laws of a label


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
    pivots, span, sample_size, n_folds, support_size, accuracy, missing, tuning
        As in :class:`JointDistribution`.
    residual, location, calibration, conformal, conformal_by
        As in :class:`JointDistribution`; labels have no residuals, no levels to calibrate and no
        intervals.
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

    :math:`P(Y = c | x) = \mathrm E[1\{Y = c\} | x]` of :class:`ConditionalMeanEmbedding` is signed;
    ``predict_proba`` gives the nearest probabilities (Euclidean projection onto the simplex), which
    have the same order, mixed with one more row that is shared evenly among the labels, as in
    :class:`JointClassifier`: so they are positive.

    Parameters
    ----------
    kernel_x, kernel_y, tol, max_rank, reg, criterion, validation, method
        As in :class:`ConditionalMeanEmbedding`.
    pivots, span, sample_size, n_folds, accuracy, missing, random_state
        As in :class:`ConditionalMeanEmbedding`.

    Attributes
    ----------
    classes_ : (K,) array
        The labels, ascending; of a store in the order of its codes.
    """

    _default_criterion = "surrogate"

    def signed_proba(self, X: Any) -> FloatArray:
        """The estimates as they are, shape (n, K): they may be negative.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name.
        """
        return self.model_.expect([class_name(code) for code in range(len(self.classes_))], X)

    def clipped_proba(self, X: Any) -> FloatArray:
        r"""The positive parts of the estimates over their sum, shape (n, K).

        (6) of Hsu, Nock and Ramos (2018): :math:`\max(p_c, 0) / \sum_j \max(p_j, 0)`; 1 / K where
        no estimate is positive. The projection of :meth:`predict_proba` is nearer to the estimates.

        Parameters
        ----------
        X
            As in :meth:`predict_proba`.
        """
        return self._of_signed(clipped_shares, X)

    def entropy(self, X: Any, estimate: str = "projected") -> FloatArray:
        r"""Entropy of the label at each point, in nats, shape (n,).

        Parameters
        ----------
        X
            As in :meth:`predict_proba`.
        estimate : {"projected", "clipped", "expected"}
            :math:`-\sum_c p_c \log p_c` of the nearest probabilities, or of :meth:`clipped_proba`,
            (33) of Hsu, Nock and Ramos (2018); or the expected information (37), the sum over the
            signed estimates that are positive, which may be negative where one is above 1.

        Raises
        ------
        DataError
            As :meth:`predict_proba`, or on another estimate.
        """
        check_choice("estimate", estimate, tuple(_ENTROPIES))
        return self._of_signed(_ENTROPIES[estimate], X, drop_axis=1)

    def _of_signed(self, function: Callable[[Array], Array], X: Any, **named: Any) -> FloatArray:
        signed: Any = self.signed_proba(X)
        if is_out_of_core(X):
            return cast(FloatArray, signed.map_blocks(function, dtype=float, **named))
        return cast(FloatArray, function(signed))

    def _become(self, measured: Measured, fitted: dict[str, Any], *of_fit: Any) -> None:
        fitted["model_"].about["classes"] = plain_labels(self._classes)
        super()._become(measured, fitted, *of_fit)

    def _context(self, sample: Sample, functions: Declarations, *of_fit: Any) -> FitContext:
        indicators = {class_name(code): Level(code) for code in range(len(self._classes))}
        named = {**by_name(functions["functions"]), **indicators}
        return super()._context(sample, {"functions": named}, *of_fit)


def _projected_entropy(signed: Array) -> Array:
    return entropy(nearest_shares(signed))


def _clipped_entropy(signed: Array) -> Array:
    return entropy(clipped_shares(signed))


_ENTROPIES: dict[str, Callable[[Array], Array]] = {
    "projected": _projected_entropy,
    "clipped": _clipped_entropy,
    "expected": entropy,
}


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

    @with_run_options
    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        Y: Any = None,
        weights: Any = None,
        sample_weight: Any = None,
        **keywords: Unpack[FitKeywords],
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
        **keywords
            As in :class:`RunOptions`.

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
        options = options_of(keywords, FitKeywords)
        return self._fit(X, *given_rows(y, Y, weights, sample_weight), {}, options)

    @property
    def length_scales_(self) -> LengthScales:
        """Length scale and relevance of each column, of the fitted model."""
        scales: LengthScales = self.model_.length_scales
        return scales

    def _check(self) -> None:
        super()._check()
        check_number("max_iter", self.max_iter, 1)
        check_number("reg", self.reg, 0, whole=False)
        if not self.reg > 0.0:
            raise DataError(f"reg must be above 0, got {self.reg!r}")
        check_tol("gradient_tol", self.gradient_tol)

    def _steps(self, sample: Sample, *, plans: bool) -> dict[str, Any]:
        return {"iterates": True}

    def _context(self, sample: Sample, *of_fit: Any) -> FitContext:
        return super()._context(one_variable(sample), *of_fit)

    def _run(self, context: FitContext, sample: Sample) -> tuple[Measured, dict[str, Any]]:
        """The pass for the moments, and one for each gradient."""
        measured = self._measure(context)
        (side,), mean = measured.sides, measured.moments.means()
        newton, (error,) = side.basis, mean.trace_error
        gram = np.block(
            [[mean.blocks["x", "x"], mean.means["x"][:, None]], [mean.means["x"][None, :], 1.0]]
        )
        problem = LogisticProblem(newton.factor, gram, len(self._classes), float(self.reg))

        def gradient(a: Any) -> Any:
            reduction = LogisticGradient(newton.kernel, newton.points, a)
            return run_pass(sample, [reduction], context.executor, context.progress)[0][0]

        with one_blas_thread():
            solution = solve_logistic(
                problem,
                gradient,
                tol=self.gradient_tol,
                max_iter=self.max_iter,
            )
            spectral = LinearBasis(newton, *eigenbasis(mean.blocks["x", "x"]))
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
                "label": sample.columns[1].names[0],
                "passes": passes,
                "tol": context.pivots[0].tol,
                "trace_error": float(error),
                "reg": float(self.reg),
                "objective": solution.objective,
                "gradient_norm": solution.gradient_norm,
                "location": sample.location,
            },
        )
        context.warn_of_trace([(error, newton.rank)])
        return measured._replace(passes=passes), {
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
