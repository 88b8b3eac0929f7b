"""``EmbeddingEstimator``: the fit that dense and sparse conditional mean embeddings share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, Unpack

import numpy as np

from cme_dask.config import TOL
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.base import (
    Declarations,
    FittedBasis,
    MeanRegressor,
    Measured,
    check_choice,
    given_rows,
    origin,
)
from cme_dask.estimators.context import FitContext
from cme_dask.estimators.growing import MomentEstimator, functions_of_first_call
from cme_dask.estimators.planning import FitPlan
from cme_dask.estimators.tuned import FOLDS
from cme_dask.learning.candidates import KernelPoint
from cme_dask.learning.problems import EMBEDDING_REGS as REGS
from cme_dask.learning.problems import LOSSES, SEARCH_ROWS, search_embedding
from cme_dask.models.answers import ConditionalExpectation
from cme_dask.models.assembly import held_out_table
from cme_dask.models.embedding import EmbeddedVariable, EmbeddingModel
from cme_dask.models.events import FunctionsLike, declared
from cme_dask.models.merging import FitSums, origin_of_union
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
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, MomentSums
from cme_dask.passes.driver import (
    MomentKeywords,
    ShardKeywords,
    options_of,
    with_run_options,
)

Array = Any
CRITERIA = tuple(LOSSES)


class EmbeddingEstimator(MeanRegressor, MomentEstimator):
    """Ridge regression on the features of x, with the ridge of the smallest held-out loss.

    Subclasses have the parameters named here, and models that answer ``expect``.
    """

    _learned = ("kernel_x",)
    _kernels = {"kernel_x": "x", "kernel_y": "y"}  # noqa: RUF012 - never changed
    reg: float | Sequence[float] | str | None
    criterion: str | None
    _default_criterion = "squared"
    n_folds: int

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
        **keywords: Unpack[ShardKeywords],
    ) -> Self:
        """Fit in one pass over the rows.

        Parameters
        ----------
        X, Y, y, weights
            As in :meth:`JointDistribution.fit`.
        sample_weight
            scikit-learn's name of ``weights``.
        functions
            Declared functions of y by name, for exact conditional expectations, events as
            texts, or a list of events, as in :meth:`JointDistribution.fit`.
        **keywords
            As in :class:`RunOptions`.

        Raises
        ------
        DataError
            On unusable rows, columns, weights or parameters.
        StoreError
            On damaged stores.
        ResourceError
            If memory would not suffice; nothing has been read then but the row sample.
        ShardDone
            When a shard has done its share.

        Warns
        -----
        ToleranceWarning, RankWarning
            If the trace error over all rows is above ``tol``, or above 0.01 where no ``tol`` was
            given.
        """
        options = options_of(keywords, ShardKeywords)
        given = {"functions": functions}
        return self._fit(X, *given_rows(Y, y, weights, sample_weight), given, options)

    @with_run_options
    def partial_fit(
        self,
        X: Any,
        Y: Any = None,
        *,
        y: Any = None,
        weights: Any = None,
        sample_weight: Any = None,
        functions: FunctionsLike | None = None,
        **keywords: Unpack[MomentKeywords],
    ) -> Self:
        """Fit, or add rows to the fitted model, in one pass over the new rows alone.

        The first call is a fit. Later calls keep kernels, pivots and folds, and add moments; a
        ridge that is learned is chosen again, by the held-out loss over all rows. The model is, to
        rounding, the one that a fit to all rows with these kernels and pivots makes. Models do
        not hold declared functions, so that what :func:`cme_dask.load` gives takes no more rows.

        Parameters
        ----------
        X, Y, y, weights, sample_weight
            As in :meth:`fit`, of the new rows, which are numbered after the earlier ones.
        functions
            As in :meth:`fit`, on the first call; later calls take the same.
        **keywords
            As in :class:`RunOptions`.

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
        options = options_of(keywords, MomentKeywords)
        fit = self._grow if hasattr(self, "model_") else self._fit
        given = {"functions": functions}
        return fit(X, *given_rows(Y, y, weights, sample_weight), given, options)

    @with_run_options
    def plan(
        self,
        X: Any,
        Y: Any = None,
        *,
        y: Any = None,
        weights: Any = None,
        functions: FunctionsLike | None = None,
        **keywords: Unpack[MomentKeywords],
    ) -> FitPlan:
        """What :meth:`fit` would do and take, see :meth:`JointDistribution.plan`.

        Parameters
        ----------
        X, Y, y, weights, functions
            As in :meth:`fit`.
        **keywords
            As in :class:`RunOptions`.
        """
        options = options_of(keywords, MomentKeywords)
        return self._plan(X, *given_rows(Y, y, weights, None), {"functions": functions}, options)

    def _check(self) -> None:
        super()._check()
        check_choice("criterion", self._criterion, CRITERIA)
        if isinstance(self.reg, str):
            if self.reg not in SCHEDULES:
                raise DataError(
                    "ridges must be non-negative numbers, or a schedule by its name "
                    f"({', '.join(SCHEDULES)}), got {self.reg!r}"
                )
        elif not len(self._regs):
            raise DataError("reg holds no ridge: give one or more, or leave reg out")
        if self._compares and self.n_folds < 2 and not self._leaves_one_out:
            raise DataError("the ridge is chosen on held-out folds: give a ridge, or n_folds >= 2")

    @property
    def _criterion(self) -> str:
        return self._default_criterion if self.criterion is None else self.criterion

    @property
    def _compares(self) -> bool:
        """Whether the ridge is chosen among several."""
        return self.reg is None or np.ndim(self.reg) > 0

    @property
    def _leaves_one_out(self) -> bool:
        return False

    def _search(self, context: FitContext) -> FitContext:
        if not self._learns():
            return context
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
            criterion=self._criterion,
            regs=self._regs,
            tol=context.pivots[0].tol,
            callback=context.progress,
            memory=context.executor.trials((KernelPoint,)),
            cores=context.cores,
        )
        return replace(context, kernels=[search.kernel, context.kernels[1]], search=search)

    @property
    def _regs(self) -> Array:
        learned = self.reg is None or isinstance(self.reg, str)  # a schedule needs the moments
        return np.unique(check_ridges(REGS if learned else self.reg))

    def _losses(self, measured: Measured) -> tuple[Array, Array]:
        """Held-out losses of the ridges that are compared, and their standard errors."""
        return held_out_curve(measured.moments, LOSSES[self._criterion], self._regs)

    def _path(self, measured: Measured) -> RidgePath | None:
        if not self._compares:
            return None
        losses, errors = self._losses(measured)
        best = int(losses.argmin())
        validation = "leave-one-out" if self._leaves_one_out else "folds"
        return RidgePath(self._regs, losses, errors, validation, self._criterion, best)

    def _given_ridge(self, moments: MomentSums) -> float:
        """The ridge where none are compared."""
        if not isinstance(self.reg, str):
            return float(self._regs[0])
        return float(moments.means().traces["x"] * SCHEDULES[self.reg](moments.n_rows))

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
        losses = np.empty((0, 2))
        if path is not None:
            losses = np.column_stack([path.regs, path.losses])
            reg, criterion = float(path.regs[path.chosen]), f"{path.criterion} loss"
        else:
            reg = self._given_ridge(moments)
            criterion = f"schedule {self.reg}" if isinstance(self.reg, str) else "hand"
        embedding = ConditionalEmbedding.of(mean, reg)
        replicates = embedding_replicates(moments, reg)
        psi_x, psi_y = (
            LinearBasis(side.basis, *eigenbasis(mean.blocks[v, v]))
            for v, side in (("x", x), ("y", y))
        )
        # T is orthogonal: slopes on N_X become those on psi_X = T^T N_X.
        of_x, of_y = psi_x.transform.T, psi_y.transform.T
        constant, slope = embedding.answers(mean)
        answers = ConditionalExpectation(
            y.names, constant, of_x @ slope, replicates.constant, replicates.slope
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
                "tol": float(self.tol or TOL),
                "trace_error": dict(zip("xy", map(float, errors), strict=True)),
                "reg": reg,
                "criterion": criterion,
                "losses": losses.tolist(),
                "arithmetic": measured.arithmetic.name,
                **origin(sample),
                "held_out": {"x": held_out_table(y.names, [replicates])},
            },
            {
                **moments.to_arrays(len(y.names)),
                "shift_x": moments.shifts[0],
                "shift_y": moments.shifts[1][: len(y.names)],
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

    def _of_both(
        self, earlier: FitSums, new: Measured, sample: Sample, *, alone: bool
    ) -> tuple[Measured, dict[str, Any]]:
        both, fitted = super()._of_both(earlier, new, sample, alone=alone)
        about = fitted["model_"].about
        about["next_row"] = sample.first_row + sample.n_rows
        about |= origin_of_union([earlier.about, about])
        return both, fitted

    def _sums(self, functions: Declarations) -> FitSums:
        x, y = self._sides
        columns = self.model_.x.columns, self.model_.y.columns
        again = functions_of_first_call(self._functions, functions["functions"])
        sides = x, replace(y, functions=declared(again, columns[1]))
        return FitSums(columns, sides, self.moments_, (), (), self.model_.about)

    def _means(self, X: Any) -> Array:
        return self.model_.expect(None, X)
