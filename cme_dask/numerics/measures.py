"""Laws as measures: rows of cells mixed by weights, or atoms moved along with x."""

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np

from cme_dask.numerics.cells import Cells
from cme_dask.numerics.quantiles import SortedAtoms, first_reaching
from cme_dask.numerics.scoring import sorted_crps
from cme_dask.numerics.smoothing import Normals

Array = Any
Function = Callable[[Array], Array]
Query = Callable[[Array], Array]


class Located(Protocol):
    """Where the atoms of a moved law are."""

    def location(self, x: Array) -> Array:
        """mu(x), shape (b, d), in the coordinates z."""

    def forward(self, y: Array) -> Array:
        """z(y), shape (n, d)."""

    def undo(self, z: Array) -> Array:
        """y(z), shape (n, d)."""

    def slope(self, y: Array) -> Array:
        """dz_j / dy_j, shape (n, d)."""


class _Last:
    """A function that remembers its last value: queries on the same rows weigh them once."""

    def __init__(self, function: Query) -> None:
        self._function = function
        self._last: tuple[Array, Array] | None = None

    def __call__(self, x: Array) -> Array:
        last = self._last
        if last is None or last[0] is not x:
            last = self._last = x, self._function(x)
        return last[1]


class _Weighed:
    """What the measures share."""

    weigh: Query

    def remembering(self) -> Self:
        """The same, with the weights of the last rows kept."""
        found = copy.copy(self)
        found.weigh = _Last(self.weigh)
        return found


class CellMeasure(_Weighed):
    """Laws Q_x = sum_s w_s(x) P_s, P_s the rows of cell s.

    Each method takes rows of x as ``weigh`` does; the others' results have them as first axis.

    Parameters
    ----------
    cells
        The cells.
    weigh
        From rows of x (b, d_X) to weights w, shape (b, S).
    """

    def __init__(self, cells: Cells, weigh: Query) -> None:
        self.cells, self.weigh = cells, weigh
        self._sorted: dict[int, SortedAtoms] = {}

    @property
    def held(self) -> int:
        """Numbers that a query holds for each row of x."""
        return self.cells.size

    def mean(self, x: Array) -> Array:
        """E[Y | x], shape (b, d)."""
        return np.asarray(self.weigh(x) @ self.cells.means)

    def covariance(self, x: Array) -> Array:
        """Cov[Y | x], shape (b, d, d): of the means between cells, and mean within them."""
        weights, means = self.weigh(x), self.cells.means
        mean = weights @ means
        d = means.shape[1]
        # From the centre of all: the square of a large mean would cancel.
        centre = self.cells.masses @ means
        shifted, offset = means - centre, mean - centre
        products = (shifted[:, :, None] * shifted[:, None, :] + self.cells.covariances).reshape(
            -1, d * d
        )
        second = (weights @ products).reshape(-1, d, d)
        return _semidefinite(second - offset[:, :, None] * offset[:, None, :])

    def declared(self, positions: list[int]) -> Query:
        """E[f | x] of declared functions, shape (b, q), from all rows."""
        values = self.cells.functions[:, positions]
        return lambda x: self.weigh(x) @ values

    def average(self, f: Function) -> Query:
        """E[f | x], shape (b, q), of functions f from rows (n, d) to (n, q), on the kept rows."""
        values = self.cells.average(f(self.cells.atoms))
        return lambda x: self.weigh(x) @ values

    def below(self, column: int) -> Callable[[Array, Array], Array]:
        """P(Y_j <= t | x), shape (b, k), for thresholds (k,) or (b, k)."""
        atoms = self._atoms(column)
        return lambda x, t: atoms.below(self.weigh(x), t)

    def orthant(self, x: Array, columns: list[int], t: Array) -> Array:
        """P(Y_j <= t_j for all j | x), shape (b, 1), of one t (b, len(columns)) for each x."""
        inside = (self.cells.atoms[:, None, columns] <= t[None]).all(axis=2).astype(np.float64)
        return np.einsum("bs,sb->b", self.weigh(x), self.cells.average(inside))[:, None]

    def quantile(self, column: int, levels: Array) -> Query:
        """Quantiles of a column, shape (b, k)."""
        atoms = self._atoms(column)
        return lambda x: atoms.quantile(self.weigh(x), levels)

    def crps(self, column: int) -> Callable[[Array, Array], Array]:
        """Continuous ranked probability score of a column at y (b,), shape (b,)."""
        atoms = self._atoms(column)
        return lambda x, y: atoms.crps(self.weigh(x), y)

    def draw(self, x: Array, u: Array) -> Array:
        """Draws, shape (b, k, d), from numbers u (b, k) that are uniform on (0, 1)."""
        weights = self.weigh(x)
        cumulative = np.cumsum(weights, axis=1)
        cell = first_reaching(cumulative, u)
        rows = np.arange(len(weights))[:, None]
        begin = np.where(cell > 0, cumulative[rows, cell - 1], 0.0)
        # What is left of u is uniform within the cell.
        rest = np.clip((u - begin) / weights[rows, cell], 0.0, 1.0)
        starts, ends = self.cells.starts[:-1], self.cells.starts[1:] - 1
        atom = np.searchsorted(self._within, (cell + rest).ravel()).reshape(cell.shape)
        return np.asarray(self.cells.atoms[np.clip(atom, starts[cell], ends[cell])])

    def ratio(self, y: Array, paired: bool) -> Query:
        """dQ_x / dP_Y, shape (b, k), constant on cells; 0 where there is no row."""
        cells = self.cells.support.assign(y)
        masses = self.cells.masses[cells]

        def block(x: Array) -> Array:
            weights = self.weigh(x)
            found = weights[np.arange(len(x)), cells][:, None] if paired else weights[:, cells]
            mass = masses[:, None] if paired else masses
            return np.divide(found, mass, out=np.zeros_like(found), where=mass > 0.0)

        return block

    def log_density(self, bandwidth: Array) -> Callable[[Array, Array, bool], Array]:
        """Logarithm of the smoothed density at y, shape (b, k), see :class:`Normals`."""
        normals = Normals.of(self.cells.means, self.cells.covariances, self.cells.masses, bandwidth)
        return lambda x, y, paired: normals.log_mixture(self.weigh(x), y, paired)

    def _atoms(self, column: int) -> SortedAtoms:
        if column not in self._sorted:
            cells = self.cells
            self._sorted[column] = SortedAtoms.of(
                cells.atoms[:, column], cells.cell_of_atom, cells.shares, cells.size
            )
        return self._sorted[column]

    @cached_property
    def _within(self) -> Array:
        """Cell number plus cumulative share of the atoms, ascending, shape (A,)."""
        shares, starts = np.cumsum(self.cells.shares), self.cells.starts
        before = np.concatenate([[0.0], shares])[starts[:-1]]
        cell = self.cells.cell_of_atom
        return np.asarray(cell + np.clip(shares - before[cell], 0.0, 1.0))


class MovedMeasure(_Weighed):
    """Laws on the atoms y(mu(x) + e_s), s = 1..S, with masses w_s(x): residuals e moved to mu(x).

    Has the methods of :class:`CellMeasure` that don't need rows of all cells.

    Parameters
    ----------
    cells
        Cells of e; its means are the atoms.
    weigh
        From rows of x to weights, shape (b, S).
    located
        mu and the coordinates.
    """

    def __init__(self, cells: Cells, weigh: Query, located: Located) -> None:
        self.cells, self.weigh, self.located = cells, weigh, located
        self._order = np.argsort(cells.means, axis=0, kind="stable")

    @property
    def held(self) -> int:
        """Numbers that a query holds for each row of x."""
        return 4 * int(self.cells.means.size)

    def mean(self, x: Array) -> Array:
        """E[Y | x], shape (b, d)."""
        return np.einsum("bs,bsd->bd", self.weigh(x), self._places(x))

    def covariance(self, x: Array) -> Array:
        """Cov[Y | x], shape (b, d, d)."""
        weights, places = self.weigh(x), self._places(x)
        gap = places - np.einsum("bs,bsd->bd", weights, places)[:, None]
        return _semidefinite(np.einsum("bs,bsi,bsj->bij", weights, gap, gap, optimize=True))

    def average(self, f: Function) -> Query:
        """E[f | x], shape (b, q), of functions f from rows (n, d) to (n, q)."""

        def block(x: Array) -> Array:
            places = self._places(x)
            values = f(places.reshape(-1, places.shape[2]))
            values = values.reshape(*places.shape[:2], values.shape[1])
            return np.einsum("bs,bsq->bq", self.weigh(x), values)

        return block

    def below(self, column: int) -> Callable[[Array, Array], Array]:
        """P(Y_j <= t | x), shape (b, k), for thresholds (k,) or (b, k)."""
        order = self._order[:, column]
        atoms = self.cells.means[order, column]

        def block(x: Array, t: Array) -> Array:
            wanted = np.broadcast_to(t, (len(x), t.shape[-1]))
            points = np.zeros((wanted.size, self.cells.means.shape[1]))
            points[:, column] = wanted.ravel()
            z = self.located.forward(points)[:, column].reshape(wanted.shape)
            position = np.searchsorted(
                atoms, z - self.located.location(x)[:, [column]], side="right"
            )
            sums = np.cumsum(self.weigh(x)[:, order], axis=1)
            before = np.concatenate([np.zeros((len(x), 1)), sums], axis=1)
            return np.clip(before[np.arange(len(x))[:, None], position], 0.0, 1.0)

        return block

    def orthant(self, x: Array, columns: list[int], t: Array) -> Array:
        """P(Y_j <= t_j for all j | x), shape (b, 1), of one t (b, len(columns)) for each x."""
        inside = (self._places(x)[:, :, columns] <= t[:, None]).all(axis=2)
        return (self.weigh(x) * inside).sum(axis=1)[:, None]

    def quantile(self, column: int, levels: Array) -> Query:
        """Quantiles of a column, shape (b, k)."""
        order = self._order[:, column]
        atoms = self.cells.means[order, column]

        def block(x: Array) -> Array:
            sums = np.cumsum(self.weigh(x)[:, order], axis=1)
            at = first_reaching(sums, np.broadcast_to(levels, (len(x), len(levels))))
            location = self.located.location(x)
            z = np.repeat(location, len(levels), axis=0)
            z[:, column] += atoms[at].ravel()
            return self.located.undo(z)[:, column].reshape(at.shape)

        return block

    def crps(self, column: int) -> Callable[[Array, Array], Array]:
        """Continuous ranked probability score of a column at y (b,), shape (b,)."""
        order = self._order[:, column]
        # The coordinates of a column rise with it, so that moved atoms keep their order.
        return lambda x, y: sorted_crps(
            self.weigh(x)[:, order], self._places(x)[:, order, column], y
        )

    def draw(self, x: Array, u: Array) -> Array:
        """Draws, shape (b, k, d), from numbers u (b, k) that are uniform on (0, 1)."""
        at = first_reaching(np.cumsum(self.weigh(x), axis=1), u)
        z = self.located.location(x)[:, None] + self.cells.means[at]
        return self.located.undo(z.reshape(-1, z.shape[2])).reshape(z.shape)

    def log_density(self, bandwidth: Array) -> Callable[[Array, Array, bool], Array]:
        """Logarithm of the density at y, shape (b, k): of e smoothed, times dz / dy."""
        cells = self.cells
        normals = Normals.of(cells.means, cells.covariances, cells.masses, bandwidth)

        def block(x: Array, y: Array, paired: bool) -> Array:
            z, location = self.located.forward(y), self.located.location(x)
            with np.errstate(divide="ignore"):
                change = np.log(self.located.slope(y)).sum(axis=1)
            weights = self.weigh(x)
            if paired:
                found = normals.log_mixture(weights, z - location, True)
                return found + change[:, None]
            columns = [
                normals.log_mixture(weights, one - location, True)[:, 0] + c
                for one, c in zip(z, change, strict=True)
            ]
            return np.stack(columns, axis=1) if columns else np.empty((len(x), 0))

        return block

    def _places(self, x: Array) -> Array:
        """The atoms, shape (b, S, d)."""
        z = self.located.location(x)[:, None] + self.cells.means
        return self.located.undo(z.reshape(-1, z.shape[2])).reshape(z.shape)


def _semidefinite(covariance: Array) -> Array:
    """The same matrices, symmetric to the bit, with variances that rounding can't make negative."""
    covariance = (covariance + np.swapaxes(covariance, 1, 2)) / 2
    diagonal = np.einsum("bii->bi", covariance)
    np.maximum(diagonal, 0.0, out=diagonal)
    return covariance
