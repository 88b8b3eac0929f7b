"""``TransferOperator``: the Koopman operator of trajectories of any length, from one pass."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack

import numpy as np

from cme_dask.config import N_FOLDS, SAMPLE_SIZE, TOL
from cme_dask.data.sample import Sample
from cme_dask.data.trajectories import pairs
from cme_dask.errors import DataError, ZeroWeights
from cme_dask.estimators.base import (
    Estimator,
    FittedBasis,
    Measured,
    check_number,
    origin,
)
from cme_dask.estimators.cholesky import one_variable
from cme_dask.estimators.context import FitContext
from cme_dask.estimators.planning import FitPlan
from cme_dask.kernels import Kernel
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.learning.problems import EMBEDDING_REGS as REGS
from cme_dask.models.events import FunctionsLike
from cme_dask.models.points import FloatArray
from cme_dask.models.ridge_path import RidgePath
from cme_dask.models.transfer import TransferModel
from cme_dask.numerics.basis import Basis, LinearBasis, eigenbasis
from cme_dask.numerics.crossval import joint_loss
from cme_dask.numerics.embedding import (
    ConditionalEmbedding,
    check_ridges,
    held_out_curve,
    surrogate_loss,
)
from cme_dask.numerics.moments import MomentSets, MomentSums
from cme_dask.numerics.operators import reduced_rank
from cme_dask.numerics.precision import SAFE
from cme_dask.passes.driver import (
    MomentFitKeywords,
    MomentKeywords,
    options_of,
    with_run_options,
)
from cme_dask.passes.run import run_pass
from cme_dask.passes.sources import open_sample

Array = Any


class TransferOperator(Estimator):
    r"""Transfer (Koopman) operator of a Markov process, learned from trajectories.

    .. math:: (K h)(x) = \mathrm E[h(x_{t + \mathrm{lag}}) | x_t = x], \qquad
              K = (S_{00} + r)^{-1} S_{01}

    with the moments of pairs of rows in the Newton basis: the conditional expectation of the next
    state. Its adjoint is the Perron-Frobenius operator. Pairs are views of the rows where they lie;
    one pass makes the moments, whatever the length of the trajectories.

    Parameters
    ----------
    kernel : Kernel, "median", or list of kernels
        Kernel of the states. The moments of several kernels are made in the same pass, and the one
        with the smallest held-out joint loss is taken: the squared error of the transition density,
        which compares kernels (the VAMP-E score of Wu and Noé 2020).
    lag : int
        Rows from a state to the next one.
    time_step : float, optional
        Where the rows have times: seconds from row to row; pairs further or less apart are left
        out. Default: the median of the first ones.
    rank : int, optional
        Rank of the operator: reduced-rank regression. Default: that of the basis.
    reg : float or sequence of floats, optional
        Ridge r, or several, of which the one with the smallest surrogate loss on held-out folds is
        taken, :math:`\mathrm E|k(x_{t + \mathrm{lag}}, \cdot) - \mu(x_t)|^2`; default 19 of them,
        from 1e-9 to 1. The bias of a given ridge does not fall with the number of rows.
    tol, max_rank, sample_size, n_folds, random_state
        As in :class:`JointDistribution`.
    pivots : "sampled" or array
        Pivots from the row sample, or given ones, shape (m, d).

    Attributes
    ----------
    model_ : TransferModel
        The frozen model: queries without data or Dask.
    basis_ : FittedBasis
        ``rank``, ``trace_error`` over all rows, ``pivots``.
    eigenvalues_ : (m,) array
        Eigenvalues by descending modulus.
    reg_ : float
        The ridge.
    path_ : RidgePath or None
        Ridges that were compared; None where the ridge was given.
    kernel_losses_ : (K, 2) array or None
        Held-out joint losses of the kernels that were compared, and their standard errors; None
        where one kernel was given.
    moments_ : MomentSums
        Sums over the pairs, per fold.
    n_features_in_ : int
        Number of columns d.
    n_passes_, arithmetic_, report_
        As in :class:`JointDistribution`.

    Notes
    -----
    Source: Smooth operators, section 3.2, for the conditional expectation; Kostic et al. (2022),
    Learning dynamical systems via Koopman operator regression in reproducing kernel Hilbert spaces,
    for the reduced rank.

    Examples
    --------
    >>> import numpy as np
    >>> from cme_dask import TransferOperator, kernels
    >>> rng = np.random.default_rng(0)
    >>> x = np.zeros(20_000)
    >>> for t in range(1, len(x)):
    ...     x[t] = 0.8 * x[t - 1] + 0.6 * rng.normal()
    >>> fit = TransferOperator(kernels.Gaussian(1.5), reg=1e-5).fit(x[:, None])
    >>> bool(abs(fit.eigenvalues_[1] - 0.8) < 0.03)
    True
    """

    model_: TransferModel
    _kernels = {"kernel": "x"}  # noqa: RUF012 - never changed
    _bases = ("basis_",)
    _several = True
    _successive = True
    span = 1.0

    def __init__(
        self,
        kernel: Kernel | str | Sequence[Kernel | str] = "median",
        *,
        lag: int = 1,
        time_step: float | None = None,
        rank: int | None = None,
        reg: float | Sequence[float] | None = None,
        tol: float | None = None,
        max_rank: int | None = None,
        pivots: Any = "sampled",
        sample_size: int = SAMPLE_SIZE,
        n_folds: int = N_FOLDS,
        random_state: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.lag = lag
        self.time_step = time_step
        self.rank = rank
        self.reg = reg
        self.tol = tol
        self.max_rank = max_rank
        self.pivots = pivots
        self.sample_size = sample_size
        self.n_folds = n_folds
        self.random_state = random_state

    @with_run_options
    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        group: Any = None,
        time: Any = None,
        weights: Any = None,
        functions: FunctionsLike | None = None,
        **keywords: Unpack[MomentFitKeywords],
    ) -> Self:
        """Fit in one pass over the pairs of rows.

        Parameters
        ----------
        X
            States in the order of time, shape (n, d), one trajectory after the other; or a store,
            whose groups and times count. Missing values are an error; of
            ``open_sample(...).drop_missing()``, pairs with a row that lacks one are left out.
        y
            Ignored.
        group
            The trajectory of each row, shape (n,): no pair has rows of two of them.
        time
            The time of each row, shape (n,): pairs across a gap are left out. Rows whose time or
            group is missing are gaps.
        weights
            Of the rows, which are those of the pairs that begin with them.
        functions
            Observables by name, to be forecast; as in :meth:`JointDistribution.fit`.
        **keywords
            As in :class:`RunOptions`.

        Raises
        ------
        DataError
            On unusable rows, columns, weights or parameters, or if no pair is left.
        StoreError
            On damaged stores.
        ResourceError
            If memory would not suffice.

        Warns
        -----
        ToleranceWarning, RankWarning
            As :meth:`JointDistribution.fit`.
        """
        options = options_of(keywords, MomentFitKeywords)
        try:
            return self._fit(X, (group, time), weights, {"functions": functions}, options)
        except ZeroWeights as error:
            raise DataError(
                f"no two rows of positive weight are {self.lag} apart in one trajectory: rows lie "
                "in the order of time, one trajectory after the other, with steps of time_step"
            ) from error

    @with_run_options
    def plan(
        self,
        X: Any,
        *,
        group: Any = None,
        time: Any = None,
        weights: Any = None,
        functions: FunctionsLike | None = None,
        **keywords: Unpack[MomentKeywords],
    ) -> FitPlan:
        """What :meth:`fit` would do and take, see :meth:`JointDistribution.plan`.

        Parameters
        ----------
        X, group, time, weights, functions
            As in :meth:`fit`.
        **keywords
            As in :class:`RunOptions`.
        """
        options = options_of(keywords, MomentKeywords)
        return self._plan(X, (group, time), weights, {"functions": functions}, options)

    def predict(self, X: Any) -> FloatArray:
        """The forecast of the columns of numbers one lag ahead, E[x_{t + lag} | x_t].

        Parameters
        ----------
        X
            Points, shape (n, d), or a table with the columns by name.

        Returns
        -------
        array of shape (n, number of columns of numbers)
        """
        return self.model_.forecast(X)

    @property
    def eigenvalues_(self) -> Array:
        """Eigenvalues by descending modulus, shape (m,)."""
        return self.model_.eigenvalues

    def _check(self) -> None:
        super()._check()
        check_number("lag", self.lag, 1)
        if self.rank is not None:
            check_number("rank", self.rank, 1)
        if self.time_step is not None:
            check_number("time_step", self.time_step, np.finfo(np.float64).tiny, whole=False)
        if not len(self._regs) or not (self._regs > 0.0).all():
            raise DataError(f"reg must be a positive number or several, got {self.reg!r}")
        several = isinstance(self.kernel, (list, tuple))
        if several and not self.kernel:
            raise DataError("kernel holds no kernel: give one or more, or kernel='median'")
        if self.n_folds < 2 and (self._compares or several):
            raise DataError(
                "ridges and kernels are compared on held-out folds: give reg and one kernel, or "
                "n_folds >= 2"
            )
        if isinstance(self.pivots, str) and self.pivots != "sampled":
            raise DataError(
                f"pivots must be 'sampled' or an array of points, got {self.pivots!r}: rounds over "
                "all rows are made by PivotedCholesky, whose pivots_ can be given"
            )

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        group, time = Y
        sample = one_variable(open_sample(X, weights=weights, group=group, time=time))
        return pairs(sample, self.lag, self.time_step)

    def _search(self, context: FitContext) -> FitContext:
        (kernel,), (chosen,) = context.kernels, context.pivots
        return replace(context, kernels=[kernel, kernel], pivots=(chosen, chosen))

    def _landmarks(self, context: FitContext) -> list[Basis]:
        """One basis for both rows of a pair."""
        (basis,), *_ = _first(context).bases(context.kernels[:1], top_up=False)
        return [basis, basis]

    def _run(self, context: FitContext, sample: Sample) -> tuple[Measured, dict[str, Any]]:
        compared = len(context.candidates) > 0
        measured, losses = self._compare(context) if compared else (self._measure(context), None)
        with one_blas_thread():
            fitted = self._solve(sample, measured) | {"kernel_losses_": losses}
        basis = fitted["basis_"]
        _first(context).warn_of_trace([(basis.trace_error, basis.rank)])
        return measured, fitted

    def _planned(self, context: FitContext, *_: Any) -> FitPlan:
        specify = partial(self._in_mode, context)
        others = [([kernel, kernel], specify) for kernel in context.candidates]
        return super()._planned(context, others)

    def _compare(self, context: FitContext) -> tuple[Measured, Array]:
        """Moments of all kernels in one pass: those of the best, and the losses of all, (K, 2)."""
        kernels = context.kernels[0], *context.candidates
        bases = [self._landmarks(replace(context, kernels=[kernel] * 2)) for kernel in kernels]
        sets = MomentSets(tuple(context.moments_on(each) for each in bases))
        (sums,), report = run_pass(
            context.sample,
            [sets],
            context.executor,
            context.progress,
            around=context.choice_cost(max(sets.ranks)),
        )
        losses = []
        with one_blas_thread():
            for moments in sums:
                reg, _ = self._ridge(moments)
                losses.append(np.ravel(held_out_curve(moments, joint_loss, np.array([reg]))))
        best = int(np.argmin(losses, axis=0)[0])
        sides, passes = sets.each[best].features, context.passes + 1
        return Measured(sides, sums[best], (), (), SAFE, report, passes), np.array(losses)

    @property
    def _regs(self) -> Array:
        return np.unique(check_ridges(REGS if self.reg is None else self.reg))

    @property
    def _compares(self) -> bool:
        """Whether the ridge is chosen among several."""
        return self.reg is None or np.ndim(self.reg) > 0

    def _ridge(self, moments: MomentSums) -> tuple[float, RidgePath | None]:
        """The ridge, and those among which it was chosen."""
        regs = self._regs
        if not self._compares:
            return float(regs[0]), None
        losses, errors = held_out_curve(moments, surrogate_loss, regs)
        best = int(losses.argmin())
        return float(regs[best]), RidgePath(regs, losses, errors, "folds", "surrogate", best)

    def _solve(self, sample: Sample, measured: Measured) -> dict[str, Any]:
        moments, (x, y) = measured.moments, measured.sides
        mean, (reg, path) = moments.means(), self._ridge(moments)
        embedding = ConditionalEmbedding.of(mean, reg)
        matrix, (averages, slope) = embedding.operator(mean), embedding.answers(mean)
        if self.rank is not None:
            projection = reduced_rank(mean, reg, self.rank)
            matrix, slope = projection @ matrix, projection @ slope
        spectral = LinearBasis(x.basis, *eigenbasis(mean.blocks["x", "x"]))
        error = float(mean.trace_error[0])
        about = {
            "rows": moments.n_rows,
            "folds": moments.n_folds,
            "passes": measured.passes,
            "tol": float(self.tol or TOL),
            "trace_error": error,
            "reg": reg,
            "criterion": "hand" if path is None else "surrogate loss",
            "lag": int(self.lag),
            "operator_rank": self.rank,
            **origin(sample),
        }
        model = TransferModel(sample.columns[0], spectral, matrix, y.names, averages, slope, about)
        return {
            "model_": model,
            "basis_": FittedBasis(x.basis, spectral, error),
            "reg_": reg,
            "path_": path,
            "moments_": moments,
        }


def _first(context: FitContext) -> FitContext:
    """The context of the first row of a pair alone."""
    return replace(context, kernels=context.kernels[:1], pivots=context.pivots[:1])
