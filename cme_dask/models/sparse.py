"""The fitted sparse embedding, a signed measure on few points, and the path it was chosen from."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import numpy as np

from cme_dask.codec import Later, Shape
from cme_dask.data.model_file import ModelState
from cme_dask.display import brief_repr, missing_lines, passes
from cme_dask.errors import DataError
from cme_dask.models.embedding import EmbeddedVariable, LinearEmbedding
from cme_dask.models.events import Level, function_of, numeric_columns
from cme_dask.models.plots import BLUE, PALETTE, drawing
from cme_dask.models.points import (
    FloatArray,
    function_values,
    is_out_of_core,
    lazy_answers,
    name_of,
)

Array = Any
_REMAINDER = 5  # schema version of files with weights that stand for all rows
Function = str | Callable[[Array], Array]
"""A column or an event of y by its text, or a function of rows (n, d_Y)."""


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
        (16) of the paper: RKHS distance ``|E|_F`` to the dense embedding, shape (G,).
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
class SparseModel(LinearEmbedding):
    r"""Sparse conditional mean embedding: a signed measure on few points of y.

    .. math:: \mathrm E[f(Y) | x] = \sum_j (w_j(x) + (1 - \sum_l w_l(x)) v_j) f(y_j), \quad
              w_j(x) = \sum_i M_{ij} k_X(x_i, x)

    where weights v >= 0 of sum one stand for all rows: the remainder 1 - sum w is spread over them.

    Made by :class:`cme_dask.SparseEmbedding` or :func:`cme_dask.load`; needs neither data nor Dask.

    Attributes
    ----------
    x, y
        The variables; their bases are those on the retained points.
    coef
        M at the retained points, shape (k_X, k_Y).
    about
        What it was fitted on and how.
    remainder
        v, shape (k_Y,); None in files of earlier versions, whose answers lack it.
    """

    _made_by = "SparseEmbedding"

    x: EmbeddedVariable
    y: EmbeddedVariable
    coef: Annotated[Array, Shape("x.basis.newton.rank", "y.basis.newton.rank")]
    about: dict[str, Any]
    remainder: Annotated[Array | None, Shape("y.basis.newton.rank"), Later()] = None

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
            A numeric column or an event of y, a function of rows (n, d_Y) with values (n,) or
            (n, d), or several of them with values of one shape; default the numeric columns.
        X
            Points, shape (n, d_X), or a table with the columns by name. A Dask array, a Zarr array
            or a store gives Dask arrays; nothing is computed then.

        Returns
        -------
        values : (n,) for one function, (n, len(f)) for several; (n, d) and (n, len(f), d) of
            functions with d values; signed

        Raises
        ------
        DataError
            On unknown names, columns of labels, functions that fail or have values of another shape
            or no numbers, wrong columns or NaN.
        """
        if is_out_of_core(X):
            return cast(FloatArray, lazy_answers().lazy_method(self, "expect", X, self.x, f=f))
        single = isinstance(f, str) or callable(f)
        several: Any = [f] if single else numeric_columns(self.columns_y) if f is None else f
        if not isinstance(several, Iterable):
            raise DataError(f"f must be a column, an event, a function or several, got {f!r}")
        values = [
            function_values(
                function_of(each, self.columns_y), self.points_y, name_of(each), vector=True
            )
            for each in several
        ]
        if len({each.shape for each in values}) > 1:
            widths = ", ".join(str(each.shape[1:]) for each in values)
            raise DataError(
                f"functions of one call must have values of one shape, got {widths}: "
                "ask for them one by one"
            )
        none = np.zeros((len(self.points_y), 0))
        result = self._sums(X, np.stack(values, axis=1) if values else none)
        return result[:, 0] if single else result

    def weights(self, X: Any) -> FloatArray:
        """Signed weights of the points ``points_y``, shape (n, k_Y).

        Their sum is one, but for models from files of earlier versions. That of the weights without
        the remainder is :meth:`mass`.

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
        return self._sums(X, np.eye(len(self.points_y)))

    def _sums(self, X: Any, values: Array) -> FloatArray:
        """Weighted sums of values at ``points_y``, shapes (n, ...) and (k_Y, ...)."""
        mean = 0.0 if self.remainder is None else np.tensordot(self.remainder, values, 1)
        return mean + self._products(X, np.tensordot(self.coef, values - mean, 1))

    def to_state(self) -> ModelState:
        """Plain arrays and JSON values."""
        version = 1 if self.remainder is None else _REMAINDER
        state = super().to_state()
        return replace(state, schema_version=max(state.schema_version, version))

    def _features(self, points: Array) -> Array:
        return self.x.basis.newton.kernel(points, self.points_x)

    @property
    def _slope(self) -> Array:
        return self.coef @ self.y.basis.newton.factor @ self.y.basis.transform

    @property
    def _total(self) -> Array:
        return self.coef.sum(axis=1)

    def _indicators(self, count: int) -> list[Function]:
        return [Level(code) for code in range(count)]

    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""
        fit, refit = self.about, ", relaxed" if self.about["relax"] else ""
        return [
            *super().summary(),
            ("coefs", f"{np.count_nonzero(self.coef):,} not zero, penalty {fit['penalty']}{refit}"),
            ("gamma", f"{float(fit['gamma']):.2g}, by {fit['gamma_by']}"),
            ("distance", f"{float(fit['distance']):.1%} of the dense embedding's norm"),
            ("rows", f"{int(fit['rows']):,} in {passes(fit['passes'])}"),
            *missing_lines(fit),
            ("ridge", f"{self.reg:.2g}"),
        ]

    def _size(self, name: str) -> str:
        position = "xy".index(name)
        return f"{self.coef.shape[position]} of {int(self.about['candidates'][position])} points"
