"""The location model: a mean function of y given x, and the law of the residuals."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from cme_dask.codec import Later, Shape
from cme_dask.config import SAMPLE_SIZE
from cme_dask.errors import DataError
from cme_dask.kernels.transforms import Transform
from cme_dask.models.base import check_about
from cme_dask.numerics.given_location import ColumnMean, MixedMean, RegressorMean
from cme_dask.numerics.location import MeanFunction, beside
from cme_dask.numerics.monotone import MonotoneMaps, smooth_map
from cme_dask.numerics.trees import TreeMean
from cme_dask.numerics.values import ValueMap

if TYPE_CHECKING:
    from cme_dask.models.joint import JointModel


Array = Any


@dataclass(frozen=True, eq=False)
class LocationModel:
    r"""Y = y(mu(x) + c e): the law of e given x, moved to the location mu(x).

    The law of Y given X = x has the mass w_s(x) at T(y(mu(x) + c e_s)), where w(x) is the law of e
    given X = x on its cells s, e_s their means, and T brings numbers to values that Y can take.
    Residuals are those of locations that have not seen a part of the rows; c is how much smaller
    the errors of a location of all rows are, by the learning curve.

    Attributes
    ----------
    location
        mu(x), shape (n, d), of rows x (n, d_X), in the coordinates z of y: a ridge regression,
        trees, or the columns or the regressor that were given, or such a regressor and one of the
        first two. A regressor that is no sum of trees lives in memory alone.
    model
        Joint distribution of x and e = z(y) - mu(x); where the location has covariates, of x with
        these and e: mu(x) of a regressor, and the spread of the trees of a forest.
    values
        T of each column; None in files of earlier versions: to the range of y, and whole numbers
        where all rows hold some.
    transform
        z(y) of each column; None for z = y.
    scale
        c of each column, in (0, 1], shape (q,); None for 1.
    """

    location: MeanFunction | ColumnMean | TreeMean | MixedMean | RegressorMean
    model: "JointModel"
    values: Annotated[ValueMap | None, Later()]
    transform: Transform | None = None
    scale: Annotated[Array | None, Shape("q")] = None

    def _validate(self) -> None:
        """DataError unless the parts belong together."""
        (d, q), model, transform = self.location.widths, self.model, self.transform
        d += q * len(self.location.covariates)
        if (len(model.x.columns.names), len(model.y.columns.names)) != (d, q):
            raise DataError("its columns are not those of the model")
        if model.residual is not None or model.y.columns.categories:
            raise DataError("residuals are numbers, and have no location of their own")
        if transform is not None:
            if len(transform.columns) != q:
                raise DataError(f"a transform of {len(transform.columns)} columns for {q}")
            transform.inverse()
        location = self.location
        if isinstance(location, MixedMean) and (location.transform is None) != (transform is None):
            raise DataError("the coordinates of its location are not those of its residuals")
        if self.scale is not None and not ((self.scale > 0.0) & (self.scale <= 1.0)).all():
            raise DataError("the scale of its residuals is not between 0 and 1")
        check_about(model)

    def check_stored(self) -> None:
        """DataError if the location is a regressor, which arrays can't hold."""
        location = self.location
        given = location.given if isinstance(location, MixedMean) else location
        if isinstance(given, RegressorMean):
            raise DataError(
                f"the location of this model is a regressor ({given.name}), and saved "
                "models hold arrays alone, no pickled objects: store its predictions of rows that "
                "it was not fitted on as a column of x, and fit with the name of that column, "
                "location='prediction'"
            )

    def placed(self, x: Array) -> tuple[Array, Array]:
        """Mu at the rows of x, and what the law of e is given there."""
        mu, covariates = self.location.predicted(x)
        return mu, beside(x, covariates)

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
