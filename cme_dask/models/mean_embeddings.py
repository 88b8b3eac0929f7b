"""``MeanEmbeddings``: embeddings of conditional laws at given points, as elements of an RKHS."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular
from scipy.spatial.distance import cdist

from cme_dask.data.columns import Columns
from cme_dask.data.store import brief
from cme_dask.errors import DataError
from cme_dask.models.points import FloatArray, query_points
from cme_dask.numerics.basis import LinearBasis

Array = Any

_FEW = 8  # points at which the kernels of two models are compared


@dataclass(frozen=True, eq=False, repr=False)
class MeanEmbeddings:
    r"""Embeddings :math:`\mu(x_i) = \mathrm E[k_Y(Y, \cdot) | X = x_i]` at n points.

    They are elements of the reproducing kernel Hilbert space of y. Their inner products and
    distances compare conditional laws: the distance of two embeddings is the maximum mean
    discrepancy of the laws that they estimate. Made by ``embed`` of models.

    Attributes
    ----------
    coef
        :math:`\mu(x_i) = \sum_j` ``coef[i, j]`` :math:`\psi_j` with orthonormal functions, shape
        (n, k).
    basis
        The functions psi of y.
    columns
        Columns of y.

    Notes
    -----
    Source: Grünewälder et al. (2012), Conditional mean embeddings as regressors, section 2.
    """

    coef: FloatArray
    basis: LinearBasis
    columns: Columns

    def __len__(self) -> int:
        """Number of points x."""
        return len(self.coef)

    def __repr__(self) -> str:
        kernel = brief(repr(self.basis.newton.kernel))
        return f"MeanEmbeddings({len(self)} points, {self.basis.rank} functions, {kernel})"

    def __getitem__(self, points: Any) -> "MeanEmbeddings":
        """Those of some of the points."""
        return MeanEmbeddings(np.atleast_2d(self.coef[points]), self.basis, self.columns)

    def __call__(self, Y: Any) -> FloatArray:
        """Values mu(x_i)(y_j), shape (n, len(Y)).

        Parameters
        ----------
        Y
            Points of y, shape (n_Y, d_Y), or a table with the columns by name.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        points = query_points(Y, self, "Y")
        return np.asarray(self.coef @ self.basis(points).T)

    def norm(self) -> FloatArray:
        """RKHS norms |mu(x_i)|, shape (n,)."""
        return np.asarray(np.linalg.norm(self.coef, axis=1))

    def inner(self, other: "MeanEmbeddings | None" = None) -> FloatArray:
        """Inner products <mu(x_i), nu(z_j)>, shape (n, len(other)).

        Parameters
        ----------
        other
            Embeddings nu, also of another model with the same kernel of y; default these.

        Raises
        ------
        DataError
            If they have another kernel or other columns of y.
        """
        other = self._comparable(other)
        return np.asarray(self.coef @ other._coefficients_in(self.basis).T)

    def distance(self, other: "MeanEmbeddings | None" = None) -> FloatArray:
        """RKHS distances |mu(x_i) - nu(z_j)|, shape (n, len(other)); parameters as of ``inner``."""
        other = self._comparable(other)
        projected = other._coefficients_in(self.basis)
        square = cdist(self.coef, projected) ** 2
        if other.basis is not self.basis:  # what nu has outside the span of psi
            square += np.maximum(other.norm() ** 2 - (projected**2).sum(axis=1), 0.0)
        return np.asarray(np.sqrt(square))

    def _comparable(self, other: "MeanEmbeddings | None") -> "MeanEmbeddings":
        if other is None:
            return self
        if not isinstance(other, MeanEmbeddings):
            raise DataError(
                "embeddings are compared with others, as embed makes them, got "
                f"{type(other).__name__}"
            )
        here, there = self.columns, other.columns
        default = Columns.default("y", len(here.names)).names
        named = default not in (here.names, there.names) and here.names != there.names
        if len(here.names) != len(there.names) or named or here.categories != there.categories:
            raise DataError(
                "embeddings can be compared if they have the same columns of y, got "
                f"{here.listed()} and {there.listed()}: fit both models with the same columns in "
                "the same order"
            )
        mine, theirs = self.basis.newton, other.basis.newton
        kernels = mine.kernel, theirs.kernel
        same = kernels[0].to_dict() == kernels[1].to_dict()
        if same:  # users' own kernels are described by their name alone
            values = [kernel(mine.points[:_FEW], theirs.points[:_FEW]) for kernel in kernels]
            same = np.array_equal(*values)
        if not same:
            raise DataError(
                "embeddings can be compared if they have the same kernel of y, got "
                f"{brief(repr(kernels[0]))} and {brief(repr(kernels[1]))}: fit both models with "
                "one kernel_y"
            )
        return other

    def _coefficients_in(self, basis: LinearBasis) -> Array:
        """Coefficients of the projections onto the span of another basis, shape (n, k)."""
        if basis is self.basis:
            return self.coef
        mine = self.basis.newton
        # <psi_i, psi'_j>, from psi'_j = sum_l (R^-T T)_lj k(p_l, .)
        values = solve_triangular(mine.factor, basis(mine.points), lower=True)
        return np.asarray(self.coef @ self.basis.transform.T @ values)
