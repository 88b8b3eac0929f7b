"""The fitted transfer operator: spectrum, modes and forecasts of a dynamical system."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, cast

import numpy as np

from cme_dask.codec import Shape, Within
from cme_dask.data.columns import Columns
from cme_dask.display import missing_lines, passes
from cme_dask.errors import DataError
from cme_dask.kernels.base import check_integer
from cme_dask.models.base import Model
from cme_dask.models.events import comparison
from cme_dask.models.operators import Operator
from cme_dask.models.points import FloatArray, query_points
from cme_dask.models.spaces import Space
from cme_dask.numerics.basis import LinearBasis

Array = Any


@dataclass(frozen=True, eq=False, repr=False)
class TransferModel(Model):
    r"""Transfer operator (K h)(x) = E[h(x_(t + lag)) | x_t = x] of a Markov process.

    Made by :class:`cme_dask.TransferOperator` or :func:`cme_dask.load`; needs neither data nor
    Dask.

    Attributes
    ----------
    columns
        Columns of the states x.
    basis
        Spectral basis of the states; its ``newton`` is N.
    matrix
        K in the Newton basis, shape (m, m).
    names
        The q observables that forecasts know: columns, and functions declared at the fit.
    means
        Their means, shape (q,).
    slope
        One-step forecasts: E[f | x] = mean + N(x)^T slope, shape (m, q).
    about
        What it was fitted on and how.
    """

    _made_by = "TransferOperator"

    columns: Columns
    basis: Annotated[LinearBasis, Within(d="columns.names")]
    matrix: Annotated[Array, Shape("basis.newton.rank", "basis.newton.rank")]
    names: tuple[str, ...]
    means: Annotated[Array, Shape("names")]
    slope: Annotated[Array, Shape("basis.newton.rank", "names")]
    about: dict[str, Any]

    @property
    def operator(self) -> Operator:
        """K as an operator, to be composed with others."""
        space = Space.of(self)
        return Operator(space, space, self.matrix, {"kind": "transfer operator"})

    @property
    def eigenvalues(self) -> Array:
        """Eigenvalues of K by descending modulus, shape (m,); complex unless all are real.

        That of the constant function is 1, up to errors of estimation.
        """
        return self._spectrum[0]

    def eigenfunctions(self, X: Any, count: int | None = None) -> Array:
        """The leading eigenfunctions at points, shape (n, count), of mean square 1 over the rows.

        Parameters
        ----------
        X
            Points, shape (n, d), or a table with the columns by name.
        count
            Number of eigenfunctions; default all.

        Raises
        ------
        DataError
            On wrong columns or NaN, or a number below 1.
        """
        count = None if count is None else check_integer("count", count, 1)
        newton = self.basis.newton(query_points(X, self, "X"))
        return np.asarray(newton @ self._spectrum[1][:, :count])

    def modes(self, count: int | None = None) -> Array:
        r"""The parts of the observables along the leading eigenfunctions, shape (count, q).

        .. math:: \mathrm E[f(x_{t + h}) | x_t = x]
                  = \mathrm E f + \sum_i \lambda_i^{h - 1} \varphi_i(x) \, \mathrm{modes}_i

        for h lags, with all eigenvalues lambda and eigenfunctions phi.

        Parameters
        ----------
        count
            Number of eigenfunctions; default all.

        Raises
        ------
        DataError
            On a number below 1.
        """
        count = None if count is None else check_integer("count", count, 1)
        return np.asarray(np.linalg.lstsq(self._spectrum[1], self.slope)[0][:count])

    def forecast(
        self, X: Any, horizon: int | Sequence[int] = 1, f: str | Sequence[str] | None = None
    ) -> FloatArray:
        """E[f(x_(t + h lag)) | x_t = x] of observables f at horizons h.

        Parameters
        ----------
        X
            Points x, shape (n, d), or a table with the columns by name.
        horizon
            Number of lags h >= 1, or several.
        f
            Column of numbers or declared function, or several; default the columns of numbers.

        Returns
        -------
        values : (n,) for one name, (n, q) for several; of several horizons (number, n, ...)

        Raises
        ------
        DataError
            On unknown names, columns of labels, horizons below 1, wrong columns or NaN.
        """
        horizons = np.atleast_1d(np.asarray(horizon))
        if horizons.ndim != 1 or horizons.dtype.kind not in "iu" or not (horizons >= 1).all():
            raise DataError(f"horizons are integers of at least 1, got {horizon!r}")
        columns = self.columns
        if f is None:
            asked = columns.numeric or columns.names
        else:
            asked = (f,) if isinstance(f, str) else tuple(f)
        for name in asked:
            if name in columns.categories:
                event = comparison(name, next(iter(columns.categories[name]), "..."))
                raise DataError(
                    f"column {name!r} holds labels, which have no mean: declare events at the fit, "
                    f"functions=[{event!r}], and ask for them by name"
                )
        unknown = [name for name in asked if name not in self.names]
        if unknown:
            raise DataError(
                f"unknown observable {unknown[0]!r}: there are {', '.join(map(repr, self.names))}; "
                "declare others at the fit as functions="
            )
        places = [self.names.index(name) for name in asked]
        newton = self.basis.newton(query_points(X, self, "X"))
        slope, step, made = self.slope[:, places], 1, {}
        for ahead in sorted(set(horizons.tolist())):
            slope = np.linalg.matrix_power(self.matrix, ahead - step) @ slope
            made[ahead], step = self.means[places] + newton @ slope, ahead
        values = np.stack([made[ahead] for ahead in horizons.tolist()])
        values = values[..., 0] if isinstance(f, str) else values
        return cast(FloatArray, values if np.ndim(horizon) else values[0])

    def contents(self) -> dict[str, Any]:
        """JSON form of the columns and observables."""
        return {
            "columns": {"x": self.columns.to_dict()},
            "observables": list(self.names),
            "lag": self.about["lag"],
            "rank": self.basis.rank,
        }

    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""
        fit = self.about
        leading = ", ".join(f"{value:.4g}" for value in self.eigenvalues[:4])
        return [
            ("states", self.columns.listed()),
            ("observables", ", ".join(self.names)),
            ("eigenvalues", f"{leading}, ..."),
            ("basis", f"rank {self.basis.rank}, {self.basis.newton.kernel!r}"),
            ("ridge", f"{float(fit['reg']):.3g}, by {fit['criterion']}"),
            ("pairs", f"{int(fit['rows']):,}, lag {int(fit['lag'])}, in {passes(fit['passes'])}"),
            *missing_lines(fit),
        ]

    @cached_property
    def _spectrum(self) -> tuple[Array, Array]:
        """Eigenvalues, and coordinates of eigenfunctions of mean square 1, shape (m, m)."""
        values, functions = self.operator.eig()
        vectors = functions.coef.T
        square = self.basis.eigenvalues @ np.abs(self.basis.transform.T @ vectors) ** 2
        return values, vectors / np.sqrt(np.maximum(square, np.finfo(np.float64).tiny))
