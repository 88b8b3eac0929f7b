"""A fitted feature map: pivots, basis and columns, usable without data or Dask."""

from dataclasses import dataclass
from typing import Annotated, Any, cast

import numpy as np

from cme_dask.codec import Within
from cme_dask.data.columns import Columns, check_finite
from cme_dask.display import missing_lines, passes
from cme_dask.errors import DataError
from cme_dask.kernels import Kernel
from cme_dask.kernels.evaluator import BlockEvaluator
from cme_dask.models.base import Model
from cme_dask.models.points import FloatArray, is_out_of_core, lazy_answers, query_points
from cme_dask.numerics.basis import LinearBasis, NewtonBasis, in_blocks

Array = Any

BASES = ("newton", "spectral")
"""Which features: N(x), or psi(x) = V^T N(x)."""


@dataclass(frozen=True, eq=False, repr=False)
class FeatureModel(Model):
    """Feature map x -> N(x), or psi(x) = V^T N(x), with k(x, z) ~ N(x) . N(z).

    Made by :class:`cme_dask.PivotedCholesky` or :func:`cme_dask.load`; needs neither data nor
    Dask.

    Attributes
    ----------
    columns
        The columns it takes.
    basis
        Spectral basis psi with eigenvalues lam; its ``newton`` is N.
    kind
        ``"newton"`` or ``"spectral"``: which of them the features are.
    about
        What it was fitted on and how: rows, passes, tol, trace error, location.
    """

    _made_by = "PivotedCholesky or `cme-dask features`"

    columns: Columns
    basis: Annotated[LinearBasis, Within(d="columns.names")]
    kind: str
    about: dict[str, Any]

    def evaluator(self) -> BlockEvaluator:
        """The features as functions that write into given memory; use one per thread."""
        # In the order in memory that a saved model has: the last bits depend on it.
        points, factor, transform = (
            np.ascontiguousarray(array)
            for array in (self.pivots, self.basis.newton.factor, self.basis.transform.T)
        )
        newton = NewtonBasis(self.kernel, points, factor)
        functions = newton.evaluator(points)
        return functions if self.kind == "newton" else functions.rotate(transform)

    @property
    def rank(self) -> int:
        """Number of features m."""
        return self.basis.newton.rank

    @property
    def kernel(self) -> Kernel:
        """The kernel."""
        kernel: Kernel = self.basis.newton.kernel
        return kernel

    @property
    def pivots(self) -> Array:
        """Pivots, shape (m, d)."""
        return self.basis.newton.points

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features: newton0, newton1, ... or spectral0, ..."""
        return tuple(f"{self.kind}{i}" for i in range(self.rank))

    @property
    def trace_error(self) -> float:
        """Relative trace error over all rows of the fit."""
        return float(self.about["trace_error"])

    def transform(self, X: Any) -> FloatArray:
        """Features of the rows of X, shape (n, m).

        Parameters
        ----------
        X
            Rows, shape (n, d), or a table with the columns by name. A Dask array, a Zarr array or a
            store gives a Dask array; nothing is computed then.

        Raises
        ------
        DataError
            On wrong columns, NaN or infinity.
        """
        if is_out_of_core(X):
            return cast(FloatArray, lazy_answers().lazy_method(self, "transform", X, self))
        return cast(FloatArray, in_blocks(self.evaluator(), self.points(X), self.rank))

    def points(self, X: Any) -> Array:
        """Rows as float64 of shape (n, d), see ``query_points``."""
        return query_points(X, self, "X")

    def checked(self, rows: Array, first: int) -> Array:
        """Features of rows of which the first has the number ``first`` in its table.

        Raises
        ------
        DataError
            On NaN or infinity, by column and row.
        """
        check_finite(rows, self.columns.names, first)
        return in_blocks(self.evaluator(), rows, self.rank)

    def _validate(self) -> None:
        """DataError unless these are features of a known kind, as many as there are pivots."""
        if self.kind not in BASES:
            raise DataError(f"features are one of {', '.join(BASES)}, they are {self.kind!r}")
        if self.basis.rank != self.rank:
            raise DataError(f"{self.rank} features expected, got {self.basis.rank}")

    def contents(self) -> dict[str, Any]:
        """JSON form of what it takes and gives."""
        return {
            "columns": {"x": self.columns.to_dict()},
            "basis": self.kind,
            "rank": self.rank,
            "trace_error": self.trace_error,
            "kernel": repr(self.kernel),
        }

    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""
        fit = self.about
        return [
            ("columns", self.columns.listed()),
            ("features", f"{self.rank}, {self.kind} basis"),
            ("trace error", f"{self.trace_error:.2e} over all rows, tol {float(fit['tol']):g}"),
            ("kernel", repr(self.kernel)),
            ("rows", f"{int(fit['rows']):,} in {passes(fit['passes'])}"),
            *missing_lines(fit),
        ]
