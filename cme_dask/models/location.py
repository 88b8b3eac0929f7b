"""The location model: a mean function of y given x, and the law of the residuals."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cme_dask import kernels
from cme_dask.config import SAMPLE_SIZE
from cme_dask.data.model_file import ModelState
from cme_dask.errors import DataError, StoreError
from cme_dask.kernels.transforms import Transform
from cme_dask.models.base import Custom
from cme_dask.numerics.location import MeanFunction
from cme_dask.numerics.monotone import MonotoneMaps, smooth_map

if TYPE_CHECKING:
    from cme_dask.models.joint import JointModel


Array = Any

_PREFIX, _MODEL = "residual_", "residual_model_"


@dataclass(frozen=True, eq=False)
class LocationModel:
    r"""Y = y(mu(x) + e): the law of e given x, moved to the location mu(x).

    The law of Y given X = x has the mass w_s(x) at the value nearest to y(mu(x) + e_s) that Y can
    take, where w(x) is the law of e given X = x on its cells s and e_s their means.

    Attributes
    ----------
    location
        mu(x), shape (n, d), of rows x (n, d_X), in the coordinates z of y.
    model
        Joint distribution of x and e = z(y) - mu(x).
    transform
        z(y) of each column; None for z = y.
    """

    location: MeanFunction
    model: "JointModel"
    transform: Transform | None = None

    def forward(self, y: Array) -> Array:
        """Coordinates z of the rows y, both of shape (n, d)."""
        return y if self.transform is None else self.transform(y)

    def undo(self, z: Array) -> Array:
        """Rows y with these coordinates z, both of shape (n, d)."""
        return z if self.transform is None else self.transform.inverse()(z)

    def undo_column(self, z: Array, column: int) -> Array:
        """Values of one column of y with these coordinates z, both of any one shape."""
        if self.transform is None:
            return z
        back = self.transform.columns[column].inverse()
        return back(np, np.ravel(z)).reshape(np.shape(z))

    def smoothed(self) -> MonotoneMaps | None:
        """Smooth coordinates g(y) near z(y), see :func:`smooth_map`; None for z = y."""
        if self.transform is None:
            return None
        rows = min(int(self.model.about["rows"]), SAMPLE_SIZE)  # the knots are those of a sample
        return MonotoneMaps(tuple(smooth_map(c, rows) for c in self.transform.columns))


def residual_arrays(residual: LocationModel) -> dict[str, Array]:
    """Arrays of a location model in the state of its base model."""
    location = residual.location
    return {
        f"{_PREFIX}points": location.points,
        f"{_PREFIX}constant": location.constant,
        f"{_PREFIX}coef": location.coef,
        f"{_PREFIX}trend": location.trend,
        f"{_PREFIX}low": location.low,
        f"{_PREFIX}high": location.high,
        **{f"{_MODEL}{name}": a for name, a in residual.model.to_state().arrays.items()},
    }


def residual_description(residual: LocationModel) -> dict[str, Any]:
    """JSON description that belongs to :func:`residual_arrays`."""
    transform = residual.transform
    return {
        "kernel": residual.location.kernel.to_dict(),
        "transform": None if transform is None else transform.to_dict(),
        "model": residual.model.to_state().about,
    }


def read_residual(
    state: ModelState,
    widths: tuple[int, int],
    read: Callable[[ModelState, Custom], "JointModel"],
    custom: Custom = None,
) -> LocationModel | None:
    """Inverse of both, for files that can't be trusted; None if there is none.

    Parameters
    ----------
    state
        Of the base model.
    widths
        Numbers of columns of its x and y.
    read
        From the state of the model of (x, e) to it.
    custom
        Users' own kernels by name.

    Raises
    ------
    StoreError
        If arrays or description are damaged.
    DataError
        If a user's own kernel is needed and not in ``custom``.
    """
    metadata = state.about.get("residual")
    if metadata is None:
        return None
    try:
        described, kernel, given = metadata["model"], metadata["kernel"], metadata["transform"]
        if described.get("residual") is not None:
            raise TypeError("a location model has none itself")
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"the location model is damaged: {error!r}") from error
    points, constant, coef, trend, low, high = (
        state.array(f"{_PREFIX}{name}", shape)
        for name, shape in {
            "points": (None, widths[0]),
            "constant": (widths[1],),
            "coef": (None, widths[1]),
            "trend": widths,
            "low": (widths[0],),
            "high": (widths[0],),
        }.items()
    )
    if not (low <= high).all():
        raise StoreError("the location model has a trend of no range: restore it or fit it again")
    if len(points) != len(coef):
        raise StoreError(
            f"the location model has {len(points)} points and {len(coef)} coefficients:"
            " restore it or fit it again"
        )
    arrays = {
        name.removeprefix(_MODEL): values
        for name, values in state.arrays.items()
        if name.startswith(_MODEL)
    }
    model = read(ModelState(state.type, described, arrays), custom)
    result = tuple(len(v.columns.names) for v in (model.x, model.y))
    if result != widths or model.y.columns.categories:
        raise StoreError(
            "the columns of the location model are not those of the model: restore it "
            "or fit it again"
        )
    location = MeanFunction(
        _kernel(kernel, widths[0], custom), points, constant, coef, trend, low, high
    )
    return LocationModel(location, model, None if given is None else _transform(given, widths[1]))


def _kernel(described: Any, width: int, custom: Custom) -> kernels.Kernel:
    kernel = kernels.from_dict(described, custom)
    kernel.check(width)
    return kernel


def _transform(described: Any, width: int) -> Transform:
    try:
        transform = Transform.from_dict(described)
        transform.inverse()
    except DataError as error:
        raise StoreError(f"the location model's transform is damaged: {error}") from error
    if len(transform.columns) != width:
        raise StoreError(
            f"the location model has a transform of {len(transform.columns)} columns "
            f"for {width}: restore it or fit it again"
        )
    return transform
