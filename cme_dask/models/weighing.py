"""From a joint model to the laws of one variable given the other."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.models.laws import Laws
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.blending import BlendedMeasure, near_data
from cme_dask.numerics.calibration import Calibration, Levels
from cme_dask.numerics.cells import Cells
from cme_dask.numerics.measures import CellMeasure, MovedMeasure
from cme_dask.numerics.projection import project
from cme_dask.numerics.stacked import StackedNewton

if TYPE_CHECKING:
    from cme_dask.models.joint import JointModel

Array = Any
Query = Callable[[Array], Array]


def laws_of(model: "JointModel", given: str) -> Laws:
    """The laws that a model answers with: moved residuals of y near the data, where it has them.

    Far from the data these are the laws without residuals, which tend to the marginal law.

    Parameters
    ----------
    model
        The model.
    given
        ``"x"`` or ``"y"``: which variable is given.

    Raises
    ------
    DataError
        If the model has no cells.
    """
    base = base_laws(model, given)
    residual = model.residual
    if given == "y" or residual is None:
        return base
    inner = base_laws(residual.model, "x")
    assert isinstance(inner.measure, CellMeasure)
    assert isinstance(base.measure, CellMeasure)
    moved = MovedMeasure(
        inner.measure.cells, inner.measure.weigh, residual, base.measure.cells.range
    )
    newton = model.x.basis.newton
    assert isinstance(newton, (NewtonBasis, StackedNewton))
    measure = BlendedMeasure(moved, base.measure, near_data(newton))
    return replace(base, measure=measure, residual_spread=inner.spread)


def base_laws(model: "JointModel", given: str) -> Laws:
    """Laws on the cells of the answered variable; other parameters as for :func:`laws_of`."""
    here, other = (model.x, model.y) if given == "x" else (model.y, model.x)
    cells = other.cells
    if cells is None:
        raise DataError(
            "this model has no cells for conditional laws: fit with support_size of at least 1"
        )
    # H goes from the functions of x to those of y.
    coef = model.coef.T if given == "x" else model.coef
    mixture = None
    if model.base == 0.0:
        weigh, mixture = _mixing(here.basis, coef, cells)
    else:
        weigh = _projecting(here.basis, coef @ other.basis(cells.support.points).T, model, cells)
        if given == "x" and model.calibration is not None:
            weigh = _calibrating(weigh, here.basis.newton.support, model.calibration, cells)
    measure = CellMeasure(cells, weigh)
    marginal = CellMeasure(cells, lambda x: np.broadcast_to(cells.masses, (len(x), cells.size)))
    return Laws(
        measure,
        marginal,
        other.columns,
        lambda values: other.points(values, "y" if given == "x" else "x"),
        {},
        int(model.about["rows"]),
        _spread(model, given, other.columns.names, cells),
        here.basis.newton.support,
        here.columns,
        mixture,
    )


def _projecting(basis: Query, right: Array, model: "JointModel", cells: Cells) -> Query:
    """w(x): the signed ratio at the points of the cells, projected onto densities."""

    def weigh(points: Array) -> Array:
        return project(model.base + basis(points) @ right, cells.masses)[0]

    return weigh


def _calibrating(weigh: Query, support: Query, calibration: Calibration, cells: Cells) -> Query:
    """The laws, calibrated as far as data stand behind them."""
    levels = Levels(cells.means, calibration.columns)
    return lambda points: calibration.weights(weigh(points), levels, support(points))


def _mixing(basis: Query, coef: Array, cells: Cells) -> tuple[Query, Query]:
    """w(x) = pi(x) mixed over the components' cells, and pi_j(x) = E[b_j] sum_i C_ji b_i(x)."""
    components = cells.components
    if components is None:
        raise DataError("this coupling counted no cells: fit it again")
    masses = components.sum(axis=1)
    shares = np.divide(
        components, masses[:, None], out=np.zeros_like(components), where=masses[:, None] > 0.0
    )

    def mixture(points: Array) -> Array:
        pi = (basis(points) @ coef) * masses
        return np.asarray(pi / pi.sum(axis=1, keepdims=True))

    def weigh(points: Array) -> Array:
        found = mixture(points) @ shares
        return np.asarray(found / found.sum(axis=1, keepdims=True))

    return weigh, mixture


def _spread(model: "JointModel", given: str, names: tuple[str, ...], cells: Cells) -> Array:
    """Standard deviations of the columns given the other variable, from held-out errors."""
    centre = cells.masses @ cells.means
    within = np.einsum("sii->si", cells.covariances)
    total = cells.masses @ ((cells.means - centre) ** 2 + within)
    held_out = model.about.get("held_out", {}).get(given, {})
    errors = np.array([held_out.get(name, {}).get("error", np.inf) for name in names])
    least = np.finfo(np.float64).eps * (centre**2 + 1.0)
    return np.sqrt(np.maximum(np.minimum(errors, total), least))
