"""``KernelBayesFilter``: filtering of hidden Markov states, learned in two passes."""

from dataclasses import replace
from typing import Any, Self, Unpack, cast

import numpy as np

from cme_dask.config import N_FOLDS, SAMPLE_SIZE, TOL
from cme_dask.data.sample import Sample
from cme_dask.data.trajectories import pairs
from cme_dask.errors import DataError
from cme_dask.estimators.base import Estimator, FittedBasis, Measured, check_number, origin
from cme_dask.estimators.context import FitContext
from cme_dask.estimators.planning import FitPlan, FurtherPass
from cme_dask.kernels import Kernel
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.learning.problems import EMBEDDING_REGS as REGS
from cme_dask.models.events import FunctionsLike
from cme_dask.models.filter import FilterModel, StateLaw
from cme_dask.models.points import FloatArray
from cme_dask.numerics.basis import Basis, LinearBasis, NewtonBasis, eigenbasis
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.crossval import joint_loss
from cme_dask.numerics.embedding import check_ridges, held_out_curve
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, MomentSums
from cme_dask.numerics.operators import joint_ratio
from cme_dask.numerics.support import SUPPORT_SIZE, make_support
from cme_dask.passes.driver import (
    MomentFitKeywords,
    MomentKeywords,
    options_of,
    with_run_options,
)
from cme_dask.passes.run import run_pass
from cme_dask.passes.sources import open_sample

Array = Any


class KernelBayesFilter(Estimator):
    r"""Filtering and smoothing of a hidden Markov state, learned where states are known.

    .. math:: p(x_t | y_{1:t}) \propto p(y_t | x_t) \int p(x_t | x_{t-1}) \,
              p(x_{t-1} | y_{1:t-1}) \, dx_{t-1}

    with densities relative to the stationary law of the states, of x_t given x_{t-1} and of y_t
    given x_t: least-squares density ratios 1 + N(b)^T H N(a) in the Newton bases, of which one pass
    each makes the moments, whatever the number of rows. The sum rule and Bayes' rule act on
    non-negative weights of cells of the state; see :class:`FilterModel` for what a step takes.

    Parameters
    ----------
    kernel_x, kernel_y : Kernel or "median"
        Kernels of the states and of the observations.
    reg : float or (float, float), optional
        Ridges of the transition and of the observation; default those with the smallest loss on
        held-out folds, of next states and of observations.
    support_size : int
        Cells of the state, at most.
    time_step : float, optional
        As in :class:`TransferOperator`.
    tol, max_rank, sample_size, n_folds, random_state
        As in :class:`JointDistribution`.
    pivots : {"sampled", "greedy", "random"} or pair of arrays
        As in :class:`JointDistribution`, of states and of observations.

    Attributes
    ----------
    model_ : FilterModel
        The frozen model: filters without data or Dask.
    basis_x_, basis_y_ : FittedBasis
        Of states and of observations.
    reg_ : (float, float)
        Ridges of the transition and of the observation.
    losses_ : dict
        Held-out losses of all ridges by name, ``"transition"`` and ``"observation"``; None where
        they were given.
    n_features_in_ : int
        Number of columns of the states.
    n_passes_, arithmetic_, report_
        As in :class:`JointDistribution`.

    Notes
    -----
    Source: Fukumizu, Song and Gretton (2013), JMLR 14, 3753, for the filter from sum rule and
    Bayes' rule. Their posterior embeddings have signed weights and a system is solved at each step;
    here densities take the place of reweighted covariances, and their positive part is a law.

    Examples
    --------
    >>> import numpy as np
    >>> from cme_dask import KernelBayesFilter, kernels
    >>> rng = np.random.default_rng(0)
    >>> x = np.zeros((5000, 1))
    >>> for t in range(1, len(x)):
    ...     x[t] = 0.9 * x[t - 1] + 0.44 * rng.normal(size=1)
    >>> y = x + 0.5 * rng.normal(size=x.shape)
    >>> model = KernelBayesFilter(kernels.Gaussian(1.0), kernels.Gaussian(1.0)).fit(x, y)
    >>> law = model.filter(y[:100])
    >>> bool(np.mean((law.mean() - x[:100, 0]) ** 2) < np.mean((y[:100] - x[:100]) ** 2))
    True
    """

    model_: FilterModel
    _kernels = {"kernel_x": "x", "kernel_y": "y"}  # noqa: RUF012 - never changed
    _successive = True
    span = 1.0

    def __init__(
        self,
        kernel_x: Kernel | str = "median",
        kernel_y: Kernel | str = "median",
        *,
        reg: Any = None,
        support_size: int = SUPPORT_SIZE,
        time_step: float | None = None,
        tol: float | None = None,
        max_rank: int | None = None,
        pivots: Any = "sampled",
        sample_size: int = SAMPLE_SIZE,
        n_folds: int = N_FOLDS,
        random_state: int | None = None,
    ) -> None:
        self.kernel_x = kernel_x
        self.kernel_y = kernel_y
        self.reg = reg
        self.support_size = support_size
        self.time_step = time_step
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
        Y: Any = None,
        *,
        group: Any = None,
        time: Any = None,
        weights: Any = None,
        functions: FunctionsLike | None = None,
        **keywords: Unpack[MomentFitKeywords],
    ) -> Self:
        """Fit in two passes: over pairs of state and observation, and over pairs of states.

        Two more where pivots from the row sample miss ``tol`` over all rows.

        Parameters
        ----------
        X
            States in the order of time, shape (n, d), one trajectory after the other; or a store of
            states x and observations y, whose groups and times count. Missing values are an error;
            of ``open_sample(...).drop_missing()``, pairs that lack a value are left out: a state
            and its observation, or two states.
        Y
            Observations, shape (n, d_Y).
        group, time, weights
            As in :meth:`TransferOperator.fit`.
        functions
            Functions of the state by name, whose expectations come from all rows; as in
            :meth:`JointDistribution.fit`.
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
        return self._fit(X, (Y, group, time), weights, {"functions_x": functions}, options)

    @with_run_options
    def plan(
        self,
        X: Any,
        Y: Any = None,
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
        X, Y, group, time, weights, functions
            As in :meth:`fit`.
        **keywords
            As in :class:`RunOptions`.
        """
        options = options_of(keywords, MomentKeywords)
        return self._plan(X, (Y, group, time), weights, {"functions_x": functions}, options)

    def filter(self, Y: Any, *, group: Any = None, previous: Any = None) -> StateLaw:
        """The law of the state at each row of observations, see :meth:`FilterModel.filter`.

        Parameters
        ----------
        Y, group, previous
            As there.
        """
        return self.model_.filter(Y, group=group, previous=previous)

    def smooth(self, Y: Any, *, group: Any = None, previous: Any = None) -> StateLaw:
        """The law of the state given all observations, see :meth:`FilterModel.smooth`.

        Parameters
        ----------
        Y, group, previous
            As there.
        """
        return self.model_.smooth(Y, group=group, previous=previous)

    def predict(self, Y: Any, group: Any = None) -> FloatArray:
        """Means of the filtered states, shape (n,), or (n, d) of several columns.

        Parameters
        ----------
        Y, group
            As in :meth:`FilterModel.filter`.
        """
        return self.filter(Y, group=group).mean()

    def score(self, Y: Any, group: Any = None) -> float:
        """Mean log likelihood of observations given those before, see :meth:`FilterModel.score`.

        Parameters
        ----------
        Y, group
            As there.
        """
        return self.model_.score(Y, group)

    def _check(self) -> None:
        super()._check()
        check_number("support_size", self.support_size, 1)
        if self.time_step is not None:
            check_number("time_step", self.time_step, np.finfo(np.float64).tiny, whole=False)
        if self.reg is None and self.n_folds < 2:
            raise DataError("ridges are chosen on held-out folds: give reg, or n_folds >= 2")
        if self.reg is not None:
            regs = check_ridges(self.reg)
            if not 1 <= len(regs) <= 2 or not (regs > 0.0).all():
                raise DataError(f"reg must be a positive number or two, got {self.reg!r}")

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        observations, group, time = Y
        sample = open_sample(X, observations, weights=weights, group=group, time=time)
        if len(sample.sources) < 2:
            raise DataError("a filter is learned from states and observations: give Y")
        return sample

    def _cells(self, context: FitContext, bases: Any = ()) -> tuple[CellReduction, ...]:
        rows, sample = context.rows, context.sample
        support = make_support(
            rows.parts[0], rows.importance, self.support_size, sample.columns[0].categorical
        )
        made = CellReduction.of(
            rows, 0, sample.n_rows, context.n_folds, support, context.functions[0]
        )
        return (made,)

    def _planned(self, context: FitContext, *_: Any) -> FitPlan:
        successive = pairs(context.sample, 1, self.time_step)
        further = FurtherPass(
            "successive states",
            lambda sums, sides: (successive, _transitions(sides[0].basis, context)),
        )
        return super()._planned(context, further=further)

    def _run(self, context: FitContext, sample: Sample) -> tuple[Measured, dict[str, Any]]:
        successive = pairs(sample, 1, self.time_step)  # first: it checks the times
        measured = self._measure(context)
        moving = _transitions(measured.sides[0].basis, context)
        (transitions,), _ = run_pass(successive, [moving], context.executor, context.progress)
        measured = measured._replace(passes=measured.passes + 1)
        with one_blas_thread():
            fitted = self._solve(sample, measured, transitions)
        bases = fitted["basis_x_"], fitted["basis_y_"]
        context.warn_of_trace([(basis.trace_error, basis.rank) for basis in bases])
        return measured, fitted

    def _solve(self, sample: Sample, measured: Measured, transitions: MomentSums) -> dict[str, Any]:
        x, y = measured.sides
        mean = measured.moments.means()
        given = [None] * 2 if self.reg is None else np.broadcast_to(check_ridges(self.reg), 2)
        names, matrices, regs = ("transition", "observation"), [], {}
        losses: dict[str, Array] = {}
        for name, sums, reg in zip(names, (transitions, measured.moments), given, strict=True):
            if reg is None:
                losses[name], _ = held_out_curve(sums, joint_loss, np.array(REGS))
                reg = REGS[int(losses[name].argmin())]
            regs[name] = float(reg)
            matrices.append(joint_ratio(sums.means(), regs[name]))
        about = {
            "rows": measured.moments.n_rows,
            "folds": measured.moments.n_folds,
            "passes": measured.passes,
            "tol": float(self.tol or TOL),
            "reg": regs,
            **origin(sample),
        }
        model = FilterModel(
            sample.columns[0],
            sample.columns[1],
            cast(NewtonBasis, x.basis),
            cast(NewtonBasis, y.basis),
            matrices[0],
            matrices[1],
            measured.specs[0].statistics(measured.cells[0]),
            about,
        )
        fitted = {
            f"basis_{v}_": FittedBasis(
                side.basis, LinearBasis(side.basis, *eigenbasis(mean.blocks[v, v])), error
            )
            for v, side, error in zip("xy", (x, y), mean.trace_error, strict=True)
        }
        return fitted | {
            "model_": model,
            "reg_": tuple(regs.values()),
            "losses_": losses or None,
        }


def _transitions(basis: Basis, context: FitContext) -> MomentReduction:
    """The moments of states and next states."""
    block = FeatureBlock(basis, context.sample.columns[0].names)
    return MomentReduction((block, replace(block)), context.n_folds)
