"""``Space``: the functions that a basis spans, as a Hilbert space; its functions and embeddings."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import numpy as np
from scipy.linalg import solve_triangular
from scipy.spatial.distance import cdist

from cme_dask.codec import Within
from cme_dask.data.columns import Columns
from cme_dask.data.store import brief
from cme_dask.errors import DataError
from cme_dask.models.points import FloatArray, query_points
from cme_dask.numerics.basis import NewtonBasis

Array = Any

_FEW = 8  # points at which two kernels are compared


@dataclass(frozen=True, eq=False)
class Space:
    """The span of kernel functions at m pivots, a subspace of the RKHS of one variable.

    A function in it has coordinates in the Newton basis, which is orthonormal: inner products of
    functions are those of their coordinates.

    Attributes
    ----------
    columns
        Columns of the variable.
    basis
        Newton basis N on the pivots.
    """

    columns: Columns
    basis: Annotated[NewtonBasis, Within(d="columns.names")]

    @classmethod
    def of(cls, fit: Any) -> "Space":
        """The space of a fit.

        Parameters
        ----------
        fit
            A fitted :class:`cme_dask.PivotedCholesky` or its model, a variable ``x`` or ``y`` of
            the model of another fit, or a space.

        Raises
        ------
        DataError
            If it has no basis on pivots.
        """
        if isinstance(fit, Space):
            return fit
        fit = getattr(fit, "model_", fit)
        newton = getattr(getattr(fit, "basis", None), "newton", None)
        if not isinstance(newton, NewtonBasis):
            raise DataError(
                "a space needs a basis on pivots: give a fitted PivotedCholesky, or .x or .y of a "
                f"fitted model, got {brief(repr(fit))}"
            )
        return cls(fit.columns, newton)

    @property
    def rank(self) -> int:
        """Dimension m."""
        return self.basis.rank

    def __repr__(self) -> str:
        kernel = brief(repr(self.basis.kernel))
        return f"Space({self.rank} functions of {self.columns.listed()}, {kernel})"

    def __call__(self, points: Any) -> FloatArray:
        """Values N(z) of the basis at points, shape (n, m).

        Parameters
        ----------
        points
            Shape (n, d), or a table with the columns by name.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        rows = query_points(points, self, "points")
        return np.asarray(self.basis(rows))

    def function(self, coef: Any) -> "RKHSFunctions":
        """Functions by their coordinates, shape (m,) or (n, m).

        Raises
        ------
        DataError
            On another number of coordinates.
        """
        coef = np.atleast_2d(np.asarray(coef))
        if coef.ndim != 2 or coef.shape[1] != self.rank:
            raise DataError(
                f"functions of a space of {self.rank} dimensions have coordinates of shape "
                f"({self.rank},) or (n, {self.rank}), got {coef.shape}"
            )
        return RKHSFunctions(coef, self)

    def interpolate(self, f: Callable[[Array], Any]) -> "RKHSFunctions":
        """The function of the space that has the values of f at the pivots.

        Parameters
        ----------
        f
            From rows of shape (m, d) to values of shape (m,).

        Raises
        ------
        DataError
            If it returns another shape, or no finite numbers.
        """
        values = np.asarray(f(np.array(self.basis.points)), dtype=np.float64)
        if values.shape != (self.rank,) or not np.isfinite(values).all():
            raise DataError(
                f"f must return finite numbers of shape ({self.rank},) at {self.rank} pivots, it "
                f"returned an array of shape {values.shape}"
            )
        return self.function(solve_triangular(self.basis.factor, values, lower=True))

    def embed(self, points: Any, weights: Any = None) -> "MeanEmbeddings":
        """The kernel functions k(z_i, .), projected onto the space, or their weighted sum.

        Parameters
        ----------
        points
            As in a call.
        weights
            Shape (n,); with them one embedding, that of the measure with these weights.

        Raises
        ------
        DataError
            On wrong columns or NaN, or weights of another shape.
        """
        values = self(points)
        if weights is None:
            return MeanEmbeddings(values, self)
        weights = np.asarray(weights, dtype=np.float64)
        if weights.shape != (len(values),) or not np.isfinite(weights).all():
            raise DataError(
                f"weights of {len(values)} points must be finite numbers of shape "
                f"({len(values)},), got shape {weights.shape}"
            )
        return MeanEmbeddings((weights @ values)[None], self)

    def difference(self, other: "Space") -> str | None:
        """What tells another space from this one, in words; None if they are the same."""
        one, two = self.basis, other.basis
        difference = self.variable_difference(other)
        if difference is None and one is not two:
            equal = np.array_equal(one.points, two.points)
            if not (equal and np.array_equal(one.factor, two.factor)):
                return f"they have other pivots ({one.rank} and {two.rank})"
        return difference

    def variable_difference(self, other: "Space") -> str | None:
        """What tells the kernel and the columns of another space from these, or None."""
        here, there = self.columns, other.columns
        if self.basis is other.basis:
            return None
        unnamed = {Columns.default(v, len(here.names)).names for v in "xy"}
        named = not unnamed & {here.names, there.names} and here.names != there.names
        if len(here.names) != len(there.names) or named or here.categories != there.categories:
            return f"their columns are {here.listed()} and {there.listed()}"
        units = here.other_unit(there)
        if units is not None:
            return f"their units of {units[0]} are {units[1]} and {units[2]}"
        mine, theirs = self.basis, other.basis
        same = mine.kernel.to_dict() == theirs.kernel.to_dict()
        if same:  # users' own kernels are described by their name alone
            few = mine.points[:_FEW], theirs.points[:_FEW]
            same = np.array_equal(mine.kernel(*few), theirs.kernel(*few))
        if not same:
            kernels = brief(repr(mine.kernel)), brief(repr(theirs.kernel))
            return f"their kernels are {kernels[0]} and {kernels[1]}"
        return None


@dataclass(frozen=True, eq=False, repr=False)
class RKHSFunctions:
    """Functions of one variable, as elements of a space.

    Attributes
    ----------
    coef
        Coordinates in the Newton basis, shape (n, m).
    space
        The space.
    """

    coef: Array
    space: Space

    def __len__(self) -> int:
        """Their number n."""
        return len(self.coef)

    def __repr__(self) -> str:
        kernel = brief(repr(self.space.basis.kernel))
        return f"{type(self).__name__}({len(self)} in {self.space.rank} dimensions, {kernel})"

    def __getitem__(self, which: Any) -> Self:
        """Some of them."""
        return replace(self, coef=np.atleast_2d(self.coef[which]))

    def __call__(self, points: Any) -> FloatArray:
        """Values at points, shape (n, number of points).

        Parameters
        ----------
        points
            Shape (n, d), or a table with the columns by name.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        return np.asarray(self.coef @ self.space(points).T)

    def norm(self) -> FloatArray:
        """RKHS norms, shape (n,)."""
        return np.asarray(np.linalg.norm(self.coef, axis=1))

    def inner(self, other: "RKHSFunctions | None" = None) -> FloatArray:
        """Inner products of each with each of some others, shape (n, len(other)).

        Parameters
        ----------
        other
            Functions of the same columns, also on other pivots, with the same kernel; default
            these.

        Raises
        ------
        DataError
            If they have another kernel or other columns.
        """
        other = self._comparable(other)
        return np.asarray(self.coef @ other._coordinates_in(self.space).T.conj())

    def distance(self, other: "RKHSFunctions | None" = None) -> FloatArray:
        """RKHS distances, shape (n, len(other)); parameters as of ``inner``."""
        other = self._comparable(other)
        projected = other._coordinates_in(self.space)
        sides = [self.coef, projected]
        if any(map(np.iscomplexobj, sides)):  # SciPy measures real vectors alone
            sides = [np.hstack([each.real, each.imag]) for each in sides]
        square = cdist(*sides) ** 2
        if self.space.basis is not other.space.basis:  # what lies outside this space
            square += np.maximum(other.norm() ** 2 - (np.abs(projected) ** 2).sum(axis=1), 0.0)
        return np.asarray(np.sqrt(square))

    def _comparable(self, other: "RKHSFunctions | None") -> "RKHSFunctions":
        if other is None:
            return self
        if not isinstance(other, RKHSFunctions):
            raise DataError(
                "embeddings and functions are compared with others, as embed makes them, got "
                f"{type(other).__name__}"
            )
        if (difference := self.space.variable_difference(other.space)) is not None:
            raise DataError(
                "embeddings and functions can be compared if they have the same kernel and the "
                f"same columns, but {difference}: fit both models with these, columns in this order"
            )
        return other

    def _coordinates_in(self, space: Space) -> Array:
        """Coordinates of the projections onto another space, shape (n, m)."""
        mine = self.space.basis
        if mine is space.basis:
            return self.coef
        # <N_i, N'_j>, from N'_j = sum_l (R'^-T)_lj k(p'_l, .)
        values = solve_triangular(mine.factor, space.basis(mine.points), lower=True)
        return np.asarray(self.coef @ values)


class MeanEmbeddings(RKHSFunctions):
    r"""Embeddings :math:`\mu_i = \mathrm E[k(Y, \cdot)]` of n laws, or of measures.

    Those that ``embed`` of models makes are of the laws of Y given x_i. Inner products and
    distances compare laws: the distance of two embeddings is the maximum mean discrepancy of the
    laws that they estimate.

    Notes
    -----
    Source: Grünewälder et al. (2012), Conditional mean embeddings as regressors, section 2.
    """
