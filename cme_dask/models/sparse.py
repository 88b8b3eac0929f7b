"""The fitted sparse embedding, a signed measure on few points, and the path it was chosen from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import numpy as np

from cme_dask.codec import Shape
from cme_dask.data.columns import labels_have_no_mean
from cme_dask.display import brief_repr, passes
from cme_dask.errors import DataError
from cme_dask.models.answers import PairModel, nearest_shares
from cme_dask.models.embedding import EmbeddedVariable
from cme_dask.models.events import Event, looks_like_event
from cme_dask.models.mean_embeddings import MeanEmbeddings
from cme_dask.models.plots import BLUE, PALETTE, drawing
from cme_dask.models.points import FloatArray, is_out_of_core, lazy_answers, query_points

Array = Any
Function = str | Callable[[Array], Array]
"""A column or an event of y by its text, or a function of rows (n, d_Y)."""

_QUERY_ROWS = 4096


@dataclass(frozen=True, eq=False)
class SparsePath:
    """Sparse embeddings from the largest gamma down, and the errors of each.

    Attributes
    ----------
    penalty
        Its name.
    relax
        Whether the coefficients are solved again without it, on the support that it chose.
    gammas
        Descending, shape (G,).
    gamma_max
        The smallest gamma at which all coefficients are zero.
    coefs
        M, shape (G, n_X, n_Y), on all candidate points.
    distances
        (16) of the paper: RKHS distance |E|_F to the dense embedding, shape (G,).
    objectives
        (17): its square, plus gamma times the penalty, shape (G,); with ``relax`` that of the
        solutions that chose the support.
    gaps, steps
        Relative duality gap and number of steps of the solver, shapes (G,); with ``relax`` the
        larger one of that gap and the distance of the squared ``distances`` from their minimum.
    losses, errors
        Held-out surrogate loss, mean over the folds, and its standard error, shapes (G,); NaN
        without folds.
    dense_distance, dense_loss
        RKHS norm of the dense embedding, which is its distance from zero, and its held-out loss.
    chosen
        Position of the gamma that was chosen.
    """

    penalty: str
    relax: bool
    gammas: Array
    gamma_max: float
    coefs: Array
    distances: Array
    objectives: Array
    gaps: Array
    steps: Array
    losses: Array
    errors: Array
    dense_distance: float
    dense_loss: float
    chosen: int

    __repr__ = brief_repr

    @property
    def counts(self) -> Array:
        """Numbers of nonzero coefficients, and of their points of x and y, shape (G, 3)."""
        nonzero = self.coefs != 0.0
        points_x, points_y = nonzero.any(axis=2), nonzero.any(axis=1)
        parts = nonzero.sum(axis=(1, 2)), points_x.sum(axis=1), points_y.sum(axis=1)
        return np.stack(parts, axis=1)

    def plot(self, *, ax: Any = None) -> Any:
        """Draw the distance to the dense embedding, and the held-out loss, against the sparsity.

        Parameters
        ----------
        ax
            Axes to draw into; default those of a new figure. The loss has an axis of its own.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ResourceError
            If matplotlib is not installed.
        """
        share = 100.0 * self.counts[:, 0] / self.coefs[0].size
        with drawing(ax) as ax:
            ax.plot(share, self.distances / self.dense_distance, "o-", color=BLUE, ms=3)
            ax.set_xlabel("coefficients that are not zero (%)")
            ax.set_ylabel("relative distance to the dense embedding", color=BLUE)
            ax.axvline(share[self.chosen], color="#888888", lw=0.8, ls="--")
            refit = ", relaxed" if self.relax else ""
            ax.set_title(f"Sparse embedding, penalty {self.penalty}{refit}")
            if np.isfinite(self.losses).all():
                loss, colour = ax.twinx(), PALETTE[1]
                loss.errorbar(share, self.losses, self.errors, fmt="s-", color=colour, ms=3, lw=0.8)
                loss.axhline(self.dense_loss, color=colour, lw=0.8, ls=":")
                loss.set_ylabel("held-out loss (dotted: dense)", color=colour)
                loss.grid(visible=False)
        return ax


@dataclass(frozen=True, eq=False, repr=False)
class SparseModel(PairModel):
    r"""Sparse conditional mean embedding: a signed measure on few points of y.

    .. math:: \mathrm E[f(Y) | x] = \sum_j w_j(x) f(y_j), \quad
              w_j(x) = \sum_i M_{ij} k_X(x_i, x)

    Made by :class:`cme_dask.SparseEmbedding` or :func:`cme_dask.load`; needs neither data nor Dask.

    Attributes
    ----------
    x, y
        The variables; their bases are those on the retained points.
    coef
        M at the retained points, shape (k_X, k_Y).
    about
        What it was fitted on and how.
    """

    _made_by = "SparseEmbedding"

    x: EmbeddedVariable
    y: EmbeddedVariable
    coef: Annotated[Array, Shape("x.basis.newton.rank", "y.basis.newton.rank")]
    about: dict[str, Any]

    @property
    def points_x(self) -> Array:
        """Retained points of x, shape (k_X, d_X)."""
        return self.x.basis.newton.points

    @property
    def points_y(self) -> Array:
        """Retained points of y, shape (k_Y, d_Y): what the measures live on."""
        return self.y.basis.newton.points

    def expect(self, f: Function | Sequence[Function] | None = None, X: Any = None) -> FloatArray:
        """E[f(Y) | X = x] of any functions: none has to be declared at the fit.

        Parameters
        ----------
        f
            A numeric column or an event of y, a function of rows (n, d_Y) with values (n,), or
            several of them; default the numeric columns.
        X
            Points, shape (n, d_X), or a table with the columns by name. A Dask array, a Zarr array
            or a store gives Dask arrays; nothing is computed then.

        Returns
        -------
        values : (n,) for one function, (n, len(f)) for several; signed

        Raises
        ------
        DataError
            On unknown names, columns of labels, functions with values of another shape, wrong
            columns or NaN.
        """
        single = isinstance(f, str) or callable(f)
        several: Any = [f] if single else self.columns_y.numeric if f is None else f
        if f is None and not several:
            raise labels_have_no_mean(self.columns_y.names[0], self.columns_y)
        if is_out_of_core(X):
            return cast(FloatArray, lazy_answers().lazy_method(self, "expect", X, self.x, f=f))
        values = [self._values(one) for one in several]
        result = self._products(X, self.coef @ np.stack(values, axis=1))
        return result[:, 0] if single else result

    def weights(self, X: Any) -> FloatArray:
        """Signed weights w(x) of the points ``points_y``, shape (n, k_Y).

        Parameters
        ----------
        X
            As in :meth:`expect`.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        if is_out_of_core(X):
            return cast(FloatArray, lazy_answers().lazy_method(self, "weights", X, self.x))
        return self._products(X, self.coef)

    def mass(self, X: Any) -> FloatArray:
        """E[1 | x], the sum of the weights, shape (n,); parameters and errors as of ``weights``."""
        return cast(FloatArray, self.weights(X).sum(axis=1))

    def embedding(self, X: Any, Y: Any) -> FloatArray:
        """The embedding mu(x_i) at y_j, E[k_Y(y_j, Y) | X = x_i], shape (n_X, n_Y).

        Parameters
        ----------
        X, Y
            Points, shapes (n_X, d_X) and (n_Y, d_Y), or tables with the columns by name; X as in
            :meth:`expect`.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        if is_out_of_core(X):
            return cast(FloatArray, lazy_answers().lazy_method(self, "embedding", X, self.x, Y=Y))
        values = self.y.basis.newton.kernel(self.points_y, query_points(Y, self.y, "Y"))
        return self._products(X, self.coef @ values)

    def embed(self, X: Any) -> MeanEmbeddings:
        """The embeddings mu(x_i), see :meth:`EmbeddingModel.embed`; parameters and errors alike."""
        basis = self.y.basis
        coef = self.coef @ basis.newton.factor @ basis.transform
        return MeanEmbeddings(self._products(X, coef), basis, self.y.columns)

    def _values(self, f: Function) -> Array:
        """Values of a function at the points of y, shape (k_Y,)."""
        columns, points = self.columns_y, self.points_y
        if callable(f):
            values = np.asarray(f(points), dtype=np.float64)
            if values.shape != (len(points),):
                raise DataError(f"functions of rows (n, d) give values (n,), got {values.shape}")
            return values
        if f in columns.categories:
            raise labels_have_no_mean(f, columns)
        if f in columns.names:
            return points[:, columns.names.index(f)]
        if not (isinstance(f, str) and looks_like_event(f)):
            raise DataError(
                f"{f!r} is no column, event or function of y: there are {columns.listed()}"
            )
        return Event.parse(f, columns.names, columns.categories)(points)

    def _products(self, X: Any, right: Array) -> FloatArray:
        """k_X(x, points) right, shape (n, q)."""
        points, kernel = query_points(X, self.x, "X"), self.x.basis.newton.kernel
        result = np.zeros((len(points), right.shape[1]))
        for start in range(0, len(points) if len(right) else 0, _QUERY_ROWS):
            here = slice(start, start + _QUERY_ROWS)
            result[here] = kernel(points[here], self.points_x) @ right
        return result

    def _means(self, X: Any) -> Array:
        return self.expect(None, X)

    def _shares(self, X: Any) -> Array:
        (labels,) = self.columns_y.categories.values()
        if is_out_of_core(X):
            return lazy_answers().lazy_method(self, "_shares", X, self.x)
        indicators = (self.points_y[:, :1] == np.arange(len(labels))).astype(np.float64)
        return nearest_shares(self._products(X, self.coef @ indicators))

    def contents(self) -> dict[str, Any]:
        """Columns and numbers of points, for JSON."""
        return {
            "columns": {"x": self.columns_x.to_dict(), "y": self.columns_y.to_dict()},
            "points": {"x": len(self.points_x), "y": len(self.points_y)},
        }

    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""
        fit, sides = self.about, {"x": self.x, "y": self.y}
        candidates = zip(sides.items(), fit["candidates"], strict=True)
        refit = ", relaxed" if fit["relax"] else ""
        lines = [
            (
                name,
                f"{', '.join(v.columns.names)}: {v.basis.newton.rank} of {int(most)} points, "
                f"{v.basis.newton.kernel!r}",
            )
            for (name, v), most in candidates
        ]
        return [
            *lines,
            ("coefs", f"{np.count_nonzero(self.coef):,} not zero, penalty {fit['penalty']}{refit}"),
            ("gamma", f"{float(fit['gamma']):.2g}, by {fit['gamma_by']}"),
            ("distance", f"{float(fit['distance']):.1%} of the dense embedding's norm"),
            ("rows", f"{int(fit['rows']):,} in {passes(fit['passes'])}"),
            ("ridge", f"{float(fit['reg']):.2g}"),
        ]
