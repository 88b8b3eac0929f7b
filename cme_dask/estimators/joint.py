"""``JointDistribution``: the law of (X, Y) from one pass over rows of any number."""

import copy
import time
from dataclasses import replace
from typing import Any, Literal, Self, Unpack, overload

from cme_dask.config import ACCURACY, N_FOLDS, SAMPLE_SIZE
from cme_dask.constraints import Constraint, parse
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.base import Declarations, Measured, check_number, given_rows, names_of
from cme_dask.estimators.conformal import with_conformal
from cme_dask.estimators.context import FitContext
from cme_dask.estimators.given_location import location_kind
from cme_dask.estimators.joint_fit import JointFit, sums_of
from cme_dask.estimators.planning import FitPlan
from cme_dask.estimators.residual import located_fit, located_plan, with_values
from cme_dask.estimators.tuned import importable_sides, lean_members
from cme_dask.kernels import Kernel
from cme_dask.learning.candidates import Tuning
from cme_dask.models.events import FunctionsLike, importable
from cme_dask.models.joint import JointModel
from cme_dask.models.law import ConditionalLaw
from cme_dask.models.merging import one_model
from cme_dask.models.points import FloatArray, OutOfCore
from cme_dask.numerics.support import SUPPORT_SIZE
from cme_dask.numerics.values import says_support
from cme_dask.passes.driver import (
    MomentKeywords,
    RunOptions,
    ShardKeywords,
    options_of,
    with_run_options,
)
from cme_dask.passes.lazy_laws import LazyLaw
from cme_dask.passes.run import PassReport

Array = Any

MAX_ROW = 1 << 53


def add_rows(
    model: JointModel,
    sample: Sample,
    functions: Declarations,
    options: RunOptions,
    alone_from: int | None = None,
) -> tuple[JointModel, PassReport]:
    """A model of the rows of another one and of new ones, and how the pass over these went.

    Parameters
    ----------
    model
        A saved model, or that of an estimator; it stays as it is.
    sample
        The new rows.
    functions
        Declared functions of the model, which knows their names alone.
    options
        Where to run.
    alone_from
        The number of the first new row, for a model of the new rows alone.

    Raises
    ------
    DataError, StoreError, ResourceError, ConvergenceError
        As :meth:`JointDistribution.partial_fit`.
    """
    sums = sums_of(model, functions)
    measured, fitted, _ = JointDistribution()._grown(sums, sample, options, alone_from)
    return fitted["model_"], measured.report


class JointDistribution(JointFit):
    r"""Joint distribution of X and Y relative to the product of its marginals.

    Estimates :math:`g = dP / d(P_X \otimes P_Y) = 1 + \psi_Y(y)^T H \psi_X(x)` in the span of m_X
    kernel functions k_X(., p) times m_Y functions k_Y(., q), by minimising
    :math:`|g - g_0|^2_{L^2(P_X \otimes P_Y)}` plus a ridge (joint paper, (14), (34), (38)).

    One pass over the data makes the moments of both bases; everything after it is dense algebra
    of size m. Pivots come from the row sample, unless ``pivots`` says otherwise.

    Parameters
    ----------
    kernel_x, kernel_y : Kernel or "median", optional
        Kernels, with length scales in the units of the columns. Default: learned, see
        :class:`cme_dask.Tuning`. ``"median"``: Gaussian, with length scales by the median heuristic
        on standardised columns.
    tol : float, optional
        Relative trace error tau = trace(K - L L^T) / trace(K) of the bases over all rows, in
        (0, 1). Pivots are added until it is reached, whether kernels are given or learned, and a
        warning says where it is not. Default: 1e-5 where kernels are given. Where they are
        learned, the default makes no promise: ``max_rank`` ends the bases, ``trace_error`` says
        where, and a warning comes above 0.01 only.
    max_rank : int, optional
        Largest number of pivots of each basis; default 500 where kernels are learned.
    reg : float or (float, float), optional
        Ridge r, or (r_Y, r_X); default: learned together with kernels, else 1e-6, of couplings
        1e-4.
    reg_form : {"two-sided", "single"}
        D = (lam_Y + r_Y)(lam_X + r_X)^T, or the paper's lam_Y lam_X^T + r.
    constraint : {"normalized", "none", "certified", "pointwise", "coupling"} or Constraint
        ``normalized``: E_Y g(x, Y) = 1 and E_X g(X, y) = 1 at every x and y, exactly (19).
        ``certified``: and g >= 0 everywhere, by one inequality (20); ``pointwise``: and g >= 0 on
        landmarks; ``coupling``: non-negative and normalized everywhere by construction. See
        :mod:`cme_dask.constraints` for their options.
    convergence : {"raise", "warn"}
        Whether a solver that misses its tolerance is an error or a warning.
    pivots : {"sampled", "greedy", "random"} or (array, array)
        ``sampled``: from the row sample, in no pass, by what they take from the trace or, below
        ``tol`` 3e-3, greedily; where the moment pass then measures more than ``tol``, rounds over
        all rows add what is missing. ``greedy``: largest residual over all rows (Algorithm 1), in
        rounds of one pass each. ``random``: drawn with probability proportional to the residual
        (Epperly, Tropp and Webber 2024), in fewer rounds. Or given points of x and y, shapes
        (m, d), arrays or tables that hold the columns by name: of these the pivots are all but
        those that the others span to rounding, or the ``max_rank`` that span most. A pair may also
        name a mode for each.
    span : float
        For ``greedy``, in (0, 1]: accept pivots while their residual is at least ``span`` times any
        that may be left. 1 gives exactly the pivots of Algorithm 1; 0.5 takes a quarter of the
        rounds.
    sample_size : int
        Rows of the row sample from which pivots are chosen.
    n_folds : int
        Fixed folds with separate moments, for standard errors and held-out errors; the partial
        sums grow with it. 1 switches both off.
    support_size : int
        Largest number of cells of x, and of y, on which conditional laws live; masses, means and
        covariances of them are summed over all rows in the same pass, and up to 32 rows of each
        are retained. With more than 45 columns they are fewer, and where kernels are learned, one
        for two rows at most. 0: no laws, only expectations.
    residual : {"auto", True, False}
        Location model: a location mu(x) by ridge regression, cross-fitted over the folds, and
        the joint distribution of x and e = y - mu(x) from one more pass; the conditional law of Y
        is then that of e, moved to mu(x). ``"auto"`` keeps it where its held-out CRPS is lower by
        more than one standard error, and tries it where kernels are learned, for numeric columns of
        y with more than two distinct values, under ``none`` or ``normalized``. Where the row sample
        does not hold all rows, it decides before the first pass whether there will be a second one:
        its refits have to gain two standard errors. Where regression trees (``tuning.trees``)
        predict better on the row sample, they are the location, and there is no second pass.
    location : str, sequence of str or regressor, optional
        A location mu(x) of your own in place of the ridge regression. The name of a column of x
        that holds predictions of y, made by a model that was not fitted on these rows (of several
        columns of y a name for each); or an unfitted scikit-learn regressor, which is fitted to the
        row sample and, for the residuals, to the row sample without each fold. Both models, of
        (x, y) and of (x, e), then come from one pass, and the location is kept whatever it gains,
        which ``model_.about["residual"]`` holds. Where kernels are learned and ``residual`` is
        ``"auto"``, a regressor is joined by the ridge regression or the trees that a fit without
        ``location`` would try, where laws are clearly better: mu(x) is then a mean of both.
        ``residual=True`` takes the regressor as it is.
        Laws of residuals are given the predictions as well as x, unless ``kernel_x`` is. A model
        whose location is a regressor can only be saved if that is one of scikit-learn's trees,
        forests or gradient boosting.
    support : {"auto", "continuous", "discrete", "bounded"}, (low, high), array or dict, optional
        Which values y takes, for laws that are moved to a location; other laws have their mass on
        rows of y anyway. ``"auto"``, the default, recognises discrete columns, values that hold a
        share of the rows themselves (such as 0 of rain), and bounds, by the rules of
        docs/conditional.md and where that lowers the held-out CRPS. ``"discrete"``: the values that
        the sampled and the retained rows hold; ``"bounded"``: between the least and the largest one
        of all rows; ``"continuous"``: any numbers. Or bounds, a tuple with None where there is
        none; or all values, shape (k,), others among the sampled and the retained rows being an
        error; or a dict of these by column of y. ``model_.about["support"]`` holds what the model
        knows.
    calibration : {"auto", True, False}
        Calibrate the conditional laws of numeric columns of y by the levels at which held-out rows
        lie under laws of refits without their fold (probability integral transforms), see
        :class:`cme_dask.numerics.calibration.Calibration`. ``"auto"`` does so where kernels are
        learned, under ``none`` or ``normalized``, and where the mean log density at held-out rows
        rises by more than one standard error. Signed expectations, :meth:`expect`, and laws of X
        given Y stay as they are.
    conformal : {"auto", True, False}
        Compute conformity scores of held-out rows by laws of refits without their fold, from which
        ``conditional(x).interval(level, conformal=True)`` makes intervals that cover new rows, see
        :meth:`cme_dask.ConditionalLaw.interval`. ``"auto"`` does so where kernels are learned,
        under ``none`` or ``normalized``, for numeric columns of y. No pass is added.
    conformal_by : str, optional
        A column of labels of x, such as a station: conformal intervals then cover the rows of each
        label, by their own scores, and not only all rows together. Where ``conformal`` is
        ``"auto"`` it becomes True.
    accuracy : float
        Largest change of density ratios and conditional expectations (in standard deviations)
        tolerated from faster arithmetic, as measured on the row sample before the pass; 0: solve
        first, in float64, always.
    missing : {"error", "drop", "impute"}
        What becomes of rows that lack a value (NaN, None) in a column of x or y, in the weights, or
        in the groups or times of the folds. ``"error"`` names the columns and counts. ``"drop"``
        leaves the rows out of every pass and counts them, in ``model_.about["missing"]``; rows keep
        their numbers, and so their folds. ``"impute"`` fills in missing values of x: numbers with
        the weighted median of the row sample, beside an indicator column that says so
        (``missingindicator_NAME``, with the labels ``present`` and ``missing``), and labels with
        one of their own, ``missing``; then points may lack values as well. Kernels of x that you
        give are those of the columns that you give; they are multiplied with ``Categorical(1)`` of
        the indicators. Rows that lack another value, or one of a column that lacks none in the row
        sample, are left out. No pass is added, and infinite values are always an error.
    tuning : Tuning, optional
        How kernels and ridge are searched where they are learned.
    random_state : int, optional
        Seed of the row sample of arrays (a store brings its own sample) and of random pivots;
        default 0, so that the same rows give the same fit.

    Attributes
    ----------
    model_ : JointModel
        The frozen model: queries without data or Dask.
    basis_x_, basis_y_ : FittedBasis
        ``rank``, ``trace_error`` over all rows, ``pivots``.
    coef_ : (k_Y, k_X) array
        H in the bases of the model.
    solution_ : JointSolution
        ``status``, ``kkt_residual``, ``gap``, ``iterations``.
    moments_ : MomentSums
        Sums over rows, per fold; they add.
    replicates_ : (Replicates, Replicates)
        Refits without one fold each, and their held-out errors: given x, and given y.
    n_passes_ : int
        Passes over the rows: 1 for the moments, and 1 for each round of pivots; 1 more where the
        row sample had to be gathered from a Dask or Zarr array, 2 if that has weights; where
        sampled pivots had to be topped up, the moments are made twice. And 1 for a location model
        that was tried; ``model_.about["residual"]`` holds the decision.
    arithmetic_ : ComputeMode
        How the moments were computed: ``name``, and the ``change`` that the trial measured.
    report_ : PassReport
        ``seconds`` of the fit and ``pass_seconds`` of its moment pass, rows per second, predicted
        memory.
    length_scales_ : LengthScales
        For each column the length scale of the best kernel in the column's units, the same in
        standard deviations, its relevance, and whether the kernels ignore it.
    search_ : Search
        The search, where kernels were learned: ``trials``, ``finalists``, ``seconds``.
    members_ : list of EnsembleMember
        The models whose density ratios are averaged, best first; then ``moments_``,
        ``replicates_`` and ``solution_`` are those of the best one.

    Examples
    --------
    >>> import numpy as np
    >>> from cme_dask import JointDistribution
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(20_000, 1))
    >>> y = np.sin(x) + 0.3 * rng.normal(size=x.shape)
    >>> law = JointDistribution().fit(x, y, functions={"positive": lambda y: y[:, 0] > 0})
    >>> bool(law.expect("positive", [[1.0]])[0] > 0.9)
    True
    """

    def __init__(
        self,
        *,
        kernel_x: Kernel | str | None = None,
        kernel_y: Kernel | str | None = None,
        tol: float | None = None,
        max_rank: int | None = None,
        reg: float | tuple[float, float] | None = None,
        reg_form: str = "two-sided",
        constraint: str | Constraint = "normalized",
        convergence: str = "raise",
        pivots: Any = "sampled",
        span: float = 1.0,
        sample_size: int = SAMPLE_SIZE,
        n_folds: int = N_FOLDS,
        support_size: int = SUPPORT_SIZE,
        residual: str | bool = "auto",
        calibration: str | bool = "auto",
        conformal: str | bool = "auto",
        conformal_by: str | None = None,
        location: Any = None,
        support: Any = None,
        accuracy: float = ACCURACY,
        missing: str = "error",
        tuning: Tuning | None = None,
        random_state: int | None = None,
    ) -> None:
        self.kernel_x = kernel_x
        self.kernel_y = kernel_y
        self.tol = tol
        self.max_rank = max_rank
        self.reg = reg
        self.reg_form = reg_form
        self.constraint = constraint
        self.convergence = convergence
        self.pivots = pivots
        self.span = span
        self.sample_size = sample_size
        self.n_folds = n_folds
        self.support_size = support_size
        self.residual = residual
        self.calibration = calibration
        self.conformal = conformal
        self.conformal_by = conformal_by
        self.location = location
        self.support = support
        self.accuracy = accuracy
        self.missing = missing
        self.tuning = tuning
        self.random_state = random_state

    @with_run_options
    def fit(
        self,
        X: Any,
        Y: Any = None,
        *,
        y: Any = None,
        weights: Any = None,
        sample_weight: Any = None,
        functions: FunctionsLike | None = None,
        functions_x: FunctionsLike | None = None,
        **keywords: Unpack[ShardKeywords],
    ) -> Self:
        """Fit in one pass over the rows.

        Parameters
        ----------
        X, Y
            Rows of x, shape (n, d_X), and of y, shape (n, d_Y): NumPy, Dask, Zarr, pandas or
            xarray; or X alone: a sample store by path or URL, or a ``Sample``.
        y
            scikit-learn's name of ``Y``.
        weights
            Non-negative weights of the rows, shape (n,); a store brings its own. A row of weight 2
            counts as two equal rows: with given kernels and pivots the model is the same to
            rounding, and also with landmarks of a coupling, or of pointwise constraints, that are
            chosen from a row sample of all rows. Quantities that depend on the numbers of the rows
            agree only approximately: folds, and with them standard errors, calibration and learned
            numbers of landmarks; the row sample of a larger table, and with it learned kernels and
            pivots; and locations, unless the folds are by group and equal rows share one. The
            bandwidth of densities, and the smoothing of probabilities of labels, depend on the
            number of rows of positive weight and not on the scale of the weights: a row of weight 2
            counts once there, and a row of weight 0 does not count.
        sample_weight
            scikit-learn's name of ``weights``.
        functions, functions_x
            Declared functions of y (of x) by name, for exact conditional expectations; each
            takes rows (b, d) and returns (b,). An event as text, such as ``"y0 > 1"``, may take
            the place of a function, and a list of events that of the names as well. With
            ``missing="impute"``, rows of x are those of ``columns_x``: filled in, with a
            code for each label, and with the indicator columns after those that you give.
        **keywords
            As in :class:`RunOptions`.

        Raises
        ------
        DataError
            On unusable rows, columns, weights or parameters.
        StoreError
            On damaged stores, or a checkpoint of another fit; the message names what differs.
        ResourceError
            If memory would not suffice (nothing has been read then but the row sample), or the
            cluster is lost.
        ConvergenceError
            If a solver misses its tolerance.
        ShardDone
            When a shard has done its share.

        Warns
        -----
        ToleranceWarning, RankWarning
            If the trace error over all rows is above ``tol``, or above 0.01 where kernels are
            learned and no ``tol`` was given.
        ConvergenceWarning
            If a solver misses its tolerance and ``convergence`` is ``"warn"``.
        """
        options = options_of(keywords, ShardKeywords)
        given = {"functions_x": functions_x, "functions": functions}
        return self._fit(X, *given_rows(Y, y, weights, sample_weight), given, options)

    @with_run_options
    def partial_fit(
        self,
        X: Any,
        Y: Any = None,
        *,
        y: Any = None,
        like: Any = None,
        first_row: int = 0,
        weights: Any = None,
        sample_weight: Any = None,
        functions: FunctionsLike | None = None,
        functions_x: FunctionsLike | None = None,
        **keywords: Unpack[MomentKeywords],
    ) -> Self:
        r"""Fit, or add rows to the fitted model, in one pass over the new rows alone.

        The first call is a fit; where it learns kernels, the best ones alone are used, and there is
        no location model. Later calls keep kernels, pivots, cells, folds, constraint and ridge:
        moments and sums by cell of the new rows are added to those of the earlier ones, and the
        problem is solved again. The model is, to rounding, the one that a fit to all rows with
        these pivots and cells makes.

        Parameters
        ----------
        X, Y, y, weights
            As in :meth:`fit`, of the new rows, of which one of positive weight is enough. They are
            numbered after the earlier ones: folds are those of one table. Weights are on the scale
            of the earlier ones, 1 where not given.
        like
            A fitted ``JointModel`` (or its path), on a first call: the model is one of these rows
            alone, with the pivots, cells and parameters of that one, so that :func:`merge` can add
            them.
        first_row
            With ``like``: the number that the first of these rows has in the table that all parts
            make. Then folds and the rows retained in the cells are those of one fit to that table.
        sample_weight
            scikit-learn's name of ``weights``.
        functions, functions_x
            As in :meth:`fit`; later calls take those of the first. With ``like`` the functions
            of that model must be given again, except events, whose texts it holds.
        **keywords
            As in :class:`RunOptions`.

        Raises
        ------
        DataError
            As :meth:`fit`, on other columns or functions than before, or on a model that sums over
            rows don't make: a mean of several, or one with a location model.
        StoreError, ResourceError, ConvergenceError
            As :meth:`fit`.

        Warns
        -----
        ToleranceWarning
            If the trace error over the new rows is above ``tol``, and more than twice that over the
            earlier ones.
        UserWarning
            With ``missing="impute"``, if new rows are left out since they lack values of a column
            of x that lacked none in the first call.

        Notes
        -----
        ``model_.about["new_rows"]`` holds how many rows the last call added, and the trace error
        that the pivots leave of them, by variable.
        """
        check_number("first_row", first_row, 0, MAX_ROW)
        rows = X, *given_rows(Y, y, weights, sample_weight)
        options = options_of(keywords, MomentKeywords)
        given = {"functions_x": functions_x, "functions": functions}
        fitted = hasattr(self, "model_")
        if first_row and like is None:
            raise DataError(
                "first_row= belongs to like=: rows of later calls follow the earlier ones"
            )
        if like is not None and fitted:
            raise DataError(
                "like= belongs to the first call of partial_fit: make another estimator"
            )
        said = self.support is not None and says_support(self.support)
        if self.residual is True or self.location is not None or said:
            raise DataError(
                "a model with a location model takes no more rows, since the location depends "
                "on all of them: take residual=False or 'auto', and no location= or support="
            )
        if fitted:
            return self._grow(*rows, given, options)
        self._check()
        if like is not None:
            begin, earlier = time.perf_counter(), sums_of(one_model(like), given)
            measured, result, sample = self._grown(earlier, self._open(*rows), options, first_row)
            self._become(measured, result | {"search_": None}, begin, (X, rows[1], sample))
            return self
        first = copy.copy(self)
        first.residual, first.tuning = False, replace(self._tuning, averaged=1)
        first._fit(*rows, given, options)
        self.__dict__.update(vars(first) | self.get_params(deep=False))
        return self

    @with_run_options
    def plan(
        self,
        X: Any,
        Y: Any = None,
        *,
        y: Any = None,
        weights: Any = None,
        functions: FunctionsLike | None = None,
        functions_x: FunctionsLike | None = None,
        **keywords: Unpack[MomentKeywords],
    ) -> FitPlan:
        """What :meth:`fit` would do and take: ranks, passes, seconds by part, peak memory.

        Reads the row sample, chooses pivots on it, tries the arithmetic, and times three strips of
        the pass on each worker where the fit would run; no whole pass is made, nothing stored.

        Parameters
        ----------
        X, Y, y, weights, functions, functions_x
            As in :meth:`fit`.
        **keywords
            As in :class:`RunOptions`.

        Returns
        -------
        FitPlan

        Raises
        ------
        DataError, StoreError, ResourceError
            As :meth:`fit` would before its pass.
        """
        options = options_of(keywords, MomentKeywords)
        given = {"functions_x": functions_x, "functions": functions}
        return self._plan(X, *given_rows(Y, y, weights, None), given, options)

    def _steps(self, sample: Sample, *, plans: bool) -> dict[str, Any]:
        learned = self._learns()
        averages = learned and parse(self.constraint).averages
        given = None if self.location is None else location_kind(self.location)
        located = self.residual is True or (self.residual == "auto" and learned) or given
        stored = sample.row_sample
        whole = sample.n_rows <= self.sample_size if stored is None else stored.complete
        return {
            "learned": learned,
            "specs": self._tuning.n_finalists if averages else 1,
            "residual": not plans and bool(located) and not sample.columns[1].categories,
            "screened": self.residual == "auto" and not whole,
            "given": given,
        }

    def _run(self, context: FitContext, sample: Sample) -> tuple[Measured, dict[str, Any]]:
        if context.residual:
            context, result, located = located_fit(self, context)
        else:
            result = self._result(context, None if context.averages else self._measure(context))
            located = None
            if context.values is not None:
                _, result = with_values(context, result)
        if context.conformal:
            result = with_conformal(context, result, located, self.conformal_by)
        return result.measured, self._attributes(result) | {"search_": context.search}

    def _planned(self, context: FitContext, *_: Any) -> FitPlan:
        if context.residual:
            return located_plan(self, context, super()._planned)
        return super()._planned(context)

    @overload
    def expect(
        self, f: Any = None, X: Any = None, *, Y: Any = None, return_std: Literal[False] = False
    ) -> FloatArray: ...

    @overload
    def expect(
        self, f: Any = None, X: Any = None, *, Y: Any = None, return_std: Literal[True]
    ) -> tuple[FloatArray, FloatArray]: ...

    @overload
    def expect(
        self, f: Any = None, X: Any = None, *, Y: Any = None, return_std: bool
    ) -> FloatArray | tuple[FloatArray, FloatArray]: ...

    def expect(
        self, f: Any = None, X: Any = None, *, Y: Any = None, return_std: bool = False
    ) -> FloatArray | tuple[FloatArray, FloatArray]:
        """Conditional expectations, see :meth:`JointModel.expect`; f may be a declared callable."""
        model, declared = self.model_, self._functions[1 if Y is None else 0]
        return model.expect(names_of(f, declared), X, Y=Y, return_std=return_std)

    def expect_interval(
        self, f: Any = None, X: Any = None, *, Y: Any = None, level: float = 0.95
    ) -> tuple[FloatArray, FloatArray]:
        """Bounds of conditional expectations, see :meth:`JointModel.expect_interval`."""
        model, declared = self.model_, self._functions[1 if Y is None else 0]
        return model.expect_interval(names_of(f, declared), X, Y=Y, level=level)

    def density_ratio(self, X: Any, Y: Any) -> FloatArray:
        """g(x_i, y_j), shape (n_X, n_Y), see :meth:`JointModel.density_ratio`."""
        return self.model_.density_ratio(X, Y)

    @overload
    def conditional(self, X: OutOfCore, *, Y: None = None) -> LazyLaw: ...

    @overload
    def conditional(self, X: None = None, *, Y: OutOfCore) -> LazyLaw: ...

    @overload
    def conditional(self, X: Any = None, *, Y: Any = None) -> ConditionalLaw: ...

    def conditional(self, X: Any = None, *, Y: Any = None) -> ConditionalLaw | LazyLaw:
        """The law of Y given X = x, or of X given Y = y, see :meth:`JointModel.conditional`.

        A ``ConditionalLaw``; of Dask arrays, Zarr arrays and stores (paths, URLs, ``Sample``) a
        ``LazyLaw``, whose answers are lazy Dask arrays.
        """
        model, declared = self.model_, self._functions[1 if Y is None else 0]
        # Laws on cells know the means of declared functions over all rows, which are exact.
        known = model.law(reverse=X is None).declared
        functions = {name: f for name, f in declared.items() if known(name) is None}
        law: ConditionalLaw | LazyLaw = model.conditional(X, Y=Y, functions=functions)
        return law

    def weights(self, X: Any) -> FloatArray:
        """Conditional laws on the support, shape (n, S), see :meth:`JointModel.weights`."""
        return self.model_.weights(X)

    def _means(self, X: Any) -> Array:
        model = self.model_
        signed = model.support is None  # there is no law to ask
        return model.expect(None, X) if signed else model.conditional(X).mean()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        if not hasattr(self, "model_"):
            return state
        state["_functions"] = tuple(map(importable, self._functions))
        state["sides_"] = importable_sides(self.sides_)
        state["members_"] = lean_members(self.members_)
        if len(self.members_) > 1 or (self.members_ and self.model_.residual is not None):
            # Moments by fold are many times the model, no query needs them, and no rows are added
            # to averages and locations. Others hold them, so that they can grow.
            state.pop("moments_", None)
        return state

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        """What notebooks show: the fitted model, or scikit-learn's diagram before the fit."""
        bundle: dict[str, str] = super()._repr_mimebundle_(**kwargs)
        return {**bundle, "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        return self.model_._repr_html_() if hasattr(self, "model_") else super()._repr_html_()
