"""``ReweightedModel``: a joint distribution with another law of x, by non-negative weights."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import numpy as np

from cme_dask.codec import Shape, Within
from cme_dask.data.columns import Columns
from cme_dask.data.model_file import ModelState
from cme_dask.errors import DataError
from cme_dask.models.base import Model
from cme_dask.models.events import FunctionsLike
from cme_dask.models.joint import JointModel, Variable
from cme_dask.models.law import ConditionalLaw
from cme_dask.models.points import FloatArray, Labels, gathered, query_points
from cme_dask.numerics.cells import CellStatistics
from cme_dask.numerics.measure import CellLaw, Law

Array = Any

_SUM_ERROR = 1e-9  # of probabilities that should add up to one


class _JointLaw:
    """What laws ask of a model with other marginals or conditionals than a joint distribution."""

    x: Variable
    y: Variable
    about: dict[str, Any]

    @property
    def answering(self) -> "_JointLaw":
        return self


@dataclass(frozen=True, eq=False, repr=False)
class ReweightedModel(Model, _JointLaw):
    r"""The joint law Q(dx) P(dy | x): the laws of y given x of a model, and a prior Q of x.

    .. math:: \pi_{ts} = \mathrm E_Q[1_t(X) \, P(Y \in s \mid X)]

    on the cells t of the prior and s of y. All of it is non-negative and adds up to one, so that
    the law of y and the laws of x given y (Bayes' rule) are probability measures, and the mean of
    the posteriors under the law of y is the prior. Made by :func:`cme_dask.operators.change_prior`.

    Attributes
    ----------
    model
        The joint distribution.
    prior
        Cells of the prior: up to 1,000 distinct rows are a cell each.
    joint
        The probabilities pi, shape (cells of the prior, cells of y).
    about
        What it was made of: rows of the prior.

    Notes
    -----
    Source: Grünewälder, Gretton and Shawe-Taylor (2013), Smooth operators, sections 3.1 and 4.2,
    where the same rules are signed operators.
    """

    _made_by = "cme_dask.operators.change_prior"

    model: JointModel
    prior: Annotated[
        CellStatistics, Within(d="model.x.columns.names", m="model.x.basis.newton.rank")
    ]
    joint: Annotated[Array, Shape("prior.support.size", "model.y.cells.support.size")]
    about: dict[str, Any]

    def _validate(self) -> None:
        """DataError unless the probabilities are those of the prior."""
        off = np.abs(self.joint.sum(axis=1) - self.prior.masses).max()
        if (self.joint < 0.0).any() or off > _SUM_ERROR:
            raise DataError("the joint probabilities do not fit the prior")

    def to_state(self) -> ModelState:
        """Plain arrays and JSON values, of the version of the joint distribution's own.

        Raises
        ------
        DataError
            If its location is a regressor.
        """
        version = self.model.to_state().schema_version
        state = super().to_state()
        return replace(state, schema_version=max(state.schema_version, version))

    @property
    def x(self) -> Variable:  # type: ignore[override]
        """The variable x, with the cells of the prior."""
        return replace(self.model.x, cells=self.prior)

    @property
    def y(self) -> Variable:  # type: ignore[override]
        """The variable y of the model."""
        return self.model.y

    @property
    def columns_x(self) -> Columns:
        """Columns of x."""
        return self.model.columns_x

    @property
    def columns_y(self) -> Columns:
        """Columns of y."""
        return self.model.columns_y

    def marginal(
        self, variable: str = "y", *, functions: FunctionsLike | None = None
    ) -> ConditionalLaw:
        """The law of y under the prior (the prior predictive law), or the prior itself.

        Parameters
        ----------
        variable
            ``"y"``, or ``"x"`` for the prior.
        functions
            As in :meth:`conditional`.

        Returns
        -------
        law : ConditionalLaw
            At one point, whose value does not matter.

        Raises
        ------
        DataError
            On another variable.
        """
        if variable not in ("x", "y"):
            raise DataError(f"variable must be 'x' or 'y', got {variable!r}")
        reverse = variable == "x"
        given = self.y if reverse else self.x
        points = np.zeros((1, len(given.columns.names)))
        return _MarginalLaw(
            _Marginal(self),  # type: ignore[arg-type]
            reverse,
            points,
            Labels(),
            functions,
        )

    def conditional(
        self, X: Any = None, *, Y: Any = None, functions: FunctionsLike | None = None
    ) -> ConditionalLaw:
        """The posterior law of X given Y = y, or the law of Y given X = x, which has no prior.

        Parameters
        ----------
        X, Y
            Points of one variable, in memory: shape (n, d), or a table with the columns by name.
        functions
            Functions of the answered variable by name, or a list of events, for later queries by
            name. They take the place of functions of the fit that have their names.

        Raises
        ------
        DataError
            On wrong columns or NaN; and, of a posterior, if y lies in a cell that has no
            probability under the prior.
        """
        if (X is None) == (Y is None):
            raise DataError("conditional takes points of one variable: X=... or Y=...")
        if Y is None:
            return cast(ConditionalLaw, self.model.conditional(X, functions=functions))
        Y = gathered(Y)
        points = query_points(Y, self.y, "Y")
        return ConditionalLaw(
            self,  # type: ignore[arg-type]
            True,
            points,
            Labels.of(Y, len(points), self.y.columns),
            functions,
        )

    def law(self, reverse: bool = False) -> Law:
        """The posterior law of X given Y = y with ``reverse``, else that of Y given X = x."""
        if not reverse:
            return self.model.law()
        cells = self.y.cells
        assert cells is not None  # change_prior refuses models without
        columns = np.ascontiguousarray(self.joint.T)
        masses = columns.sum(axis=1)

        def weigh(y: Array) -> Array:
            here = cells.support.assign(y)
            mass = masses[here]
            if not (mass > 0.0).all():
                row = y[int(mass.argmin())].tolist()
                raise DataError(
                    f"y = {row} has no probability under this prior: no row of the prior has a law "
                    "of y with mass in its cell"
                )
            return columns[here] / mass[:, None]

        return CellLaw(self.prior, weigh)

    def contents(self) -> dict[str, Any]:
        """JSON form of the columns that queries accept."""
        return {"columns": {"x": self.columns_x.to_dict(), "y": self.columns_y.to_dict()}}

    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""
        return [
            ("prior", f"{self.about['prior_rows']:,} rows in {len(self.prior.masses)} cells"),
            *self.model.summary(),
        ]


class _MarginalLaw(ConditionalLaw):
    """A law at one point, whose value does not matter."""

    _given_columns = None

    def effective_support(self) -> FloatArray:
        """1, shape (1,): the law depends on no point that could be far from the data."""
        return np.ones(self.n)


@dataclass(frozen=True, eq=False)
class _Marginal(_JointLaw):
    """The marginals of a reweighted model as laws that do not depend on the other variable."""

    reweighted: ReweightedModel

    @property
    def x(self) -> Variable:  # type: ignore[override]
        return self.reweighted.x

    @property
    def y(self) -> Variable:  # type: ignore[override]
        return self.reweighted.y

    @property
    def about(self) -> dict[str, Any]:  # type: ignore[override]
        return self.reweighted.about

    def law(self, reverse: bool = False) -> Law:
        cells = (self.x if reverse else self.y).cells
        weights = self.reweighted.joint.sum(axis=1 if reverse else 0)
        assert cells is not None  # change_prior refuses models without
        return CellLaw(cells, lambda points: np.tile(weights / weights.sum(), (len(points), 1)))
