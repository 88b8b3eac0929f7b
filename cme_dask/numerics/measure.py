"""Laws as measures: weights by projection, weighted atoms, distribution functions and quantiles."""

from collections.abc import Callable
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy.sparse import csr_array

from cme_dask.errors import DataError
from cme_dask.kernels.lapack import singular_vectors
from cme_dask.numerics.cells import CellStatistics
from cme_dask.numerics.monotone import MonotoneMaps
from cme_dask.numerics.scoring import sorted_crps, triangle
from cme_dask.numerics.smoothing import Smoothing, log_density, moments
from cme_dask.numerics.support import Support
from cme_dask.numerics.values import SLACK, ValueMap

# From a signed density ratio on a support to a law: L2 projection


Array = Any

_PROJECTED = 1 << 18  # values of the ratio at once: on fewer, threads wait for each other
_SURPLUS = 64.0 * np.finfo(np.float64).eps  # of a sum of masses above 1, which is rounding


def project(ratio: Array, masses: Array, out: Array | None = None) -> tuple[Array, Array]:
    r"""Nearest law to the signed ratio, in L2(v), one for each row.

    The minimiser of :math:`\sum_s v_s (w_s / v_s - g_s)^2` over :math:`w \ge 0`,
    :math:`\sum_s w_s = 1` is

    .. math:: w_s = v_s \max(g_s - t, 0), \qquad \sum_s v_s \max(g_s - t, 0) = 1.

    If the true ratio g_0 is a density on the support, w / v is never farther from it than g was.

    Parameters
    ----------
    ratio
        g, shape (q, S).
    masses
        v, non-negative, shape (S,).
    out
        Where the weights go, shape (q, S); it may be the ratio. Default a new array.

    Returns
    -------
    weights : (q, S), non-negative, sum 1
    t : (q,)

    Raises
    ------
    DataError
        On NaN, infinity, negative masses, masses that are all zero, or shapes that don't fit.

    Notes
    -----
    The left side falls in t, convex and piecewise linear. Newton's method from any t is to the
    left of the root after one step and then rises to it, each step on the cells above the last t:
    it ends when a step leaves them as they are, after about ten. Source of the iteration: Michelot
    (1986), Journal of Optimization Theory and Applications 50, 195, with weights v.
    """
    ratio, masses = np.asarray(ratio, dtype=np.float64), np.asarray(masses, dtype=np.float64)
    if ratio.ndim != 2 or masses.shape != ratio.shape[1:] or not len(masses):
        raise DataError(
            f"ratio (q, S) and masses (S,) expected, got shapes {ratio.shape} and {masses.shape}"
        )
    if not (np.isfinite(masses).all() and (masses >= 0.0).all() and masses.any()):
        raise DataError("masses must be finite and non-negative, and one of them positive")
    if not np.isfinite(ratio).all():
        raise DataError("the density ratio holds NaN or infinity")
    seen: Any = np.flatnonzero(masses)
    if len(seen) == len(masses):
        seen = slice(None)  # neither copied nor scattered
    v, eps = masses[seen], np.finfo(np.float64).eps
    weights, threshold = np.empty(ratio.shape) if out is None else out, np.empty(len(ratio))
    step = max(_PROJECTED // len(v), 1)
    memory = np.empty((3, min(step, len(ratio)), len(v)))
    for start in range(0, len(ratio), step):
        here = slice(start, start + step)
        g = ratio[here, seen]
        excess, above, active = memory[:, : len(g)]
        # Left of the root, whatever the sum rounds.
        highest = g.max(axis=1)
        largest = np.maximum(highest, -g.min(axis=1))
        t = (g @ v - 1.0) / v.sum() - eps * len(v) * largest
        # The distance from t is updated: where g is huge, t itself can't tell it.
        np.subtract(g, t[:, None], out=excess)
        highest -= t
        before = np.full(len(g), -1.0)
        while True:
            np.maximum(excess, 0.0, out=above)
            with np.errstate(over="ignore"):
                surplus = above @ v - 1.0
            if (surplus <= _SURPLUS).all():
                break
            np.greater(excess, 0.0, out=active)
            mass = active @ v
            if np.array_equal(mass, before):
                break
            # The highest stays above t, even where that is all that rounding leaves.
            rise = np.clip(surplus / mass, 0.0, highest * (1.0 - 1e-15))
            excess -= rise[:, None]
            highest -= rise
            t += rise
            before = mass
        above *= v
        weights[here, seen] = np.divide(above, above.sum(axis=1, keepdims=True), out=above)
        threshold[here] = t
    weights[:, masses == 0.0] = 0.0
    return weights, threshold


def low_rank(values: Array) -> tuple[Array, Array]:
    """Factors u (k, r), with orthonormal columns, and v (r, S) whose product is the values (k, S).

    Of least rank r: each column of what is left out is shorter than the rounding of the spectral
    norm of the values, 2.2e-16 of it.
    """
    try:  # what singular_vectors tries first, in fewer steps: every law begins here
        u, scale, v = np.linalg.svd(values, full_matrices=False)
    except np.linalg.LinAlgError:
        u, scale, v = singular_vectors(values)
    v *= scale[:, None]
    left = np.sqrt(np.cumsum((v * v)[::-1], axis=0)[::-1].max(axis=1, initial=0.0))
    rank = int((left > np.finfo(np.float64).eps * scale.max(initial=0.0)).sum())
    return u[:, :rank], v[:rank]


# Distribution functions and quantiles of mixtures of weighted atoms, many mixtures at once


_HELD = 1 << 15  # numbers at once: they stay in cache
_TURNED = 1 << 18  # of which rows become columns: more are several times as slow
_BIN = 32  # atoms; the search goes over bins, then within one
_RUN = 16  # masses; the search goes over their sums, then within one


def reported(cumulative: Array) -> Array:
    """Distribution functions as they are reported, from sums of masses.

    Twice the tolerance of :func:`first_reaching` is added, so that F(F^-1(q)) >= q holds for the
    numbers that are returned: the sums behind both may be rounded differently.
    """
    return np.minimum(cumulative * (1.0 + 2.0 * SLACK), 1.0)


def first_reaching(cumulative: Array, levels: Array) -> Array:
    """Index of the first entry of each row that reaches a level.

    Parameters
    ----------
    cumulative
        Ascending in each row, from 0 to 1, shape (b, T).
    levels
        In [0, 1], shape (b, k). A level counts as reached where no more than the share ``SLACK``
        of it is missing.

    Returns
    -------
    indices : (b, k), the last one that adds something where rounding leaves a level unreached
    """
    needed, last = _needed(levels, cumulative[:, -1:]), cumulative.shape[1] - 1
    index = np.zeros(needed.shape, dtype=np.int64)
    # Entries before the first one are counted by bisection, in steps of falling powers of two.
    for bit in reversed(range(last.bit_length())):
        more = np.minimum(index + (1 << bit), last)
        missed = np.take_along_axis(cumulative, more - 1, axis=1) < needed
        index = np.where(missed, more, index)
    return index


def first_of_sums(masses: Array, levels: Array) -> Array:
    """:func:`first_reaching` of the sums of the first masses of each row, which are not all formed.

    Parameters
    ----------
    masses
        Non-negative, each row of sum 1, shape (b, S).
    levels
        In [0, 1], shape (b, k).

    Returns
    -------
    indices : (b, k)

    Notes
    -----
    A running sum waits for each addition. Sums of some neighbours, by a matrix product, do not:
    the search goes over these, and then within one.
    """
    (b, size), rows = masses.shape, np.arange(len(masses))[:, None]
    whole = size // _RUN
    sums = np.empty((b, whole + 1))
    runs = masses[:, : whole * _RUN].reshape(b, whole, _RUN)
    np.matmul(runs, np.ones(_RUN), out=sums[:, :whole])
    masses[:, whole * _RUN :].sum(axis=1, out=sums[:, whole])
    np.cumsum(sums, axis=1, out=sums)
    place = first_reaching(sums, levels)
    start = _RUN * place
    at = (start + size * rows)[:, :, None] + np.arange(_RUN)
    inside = np.take(masses.reshape(-1), at, mode="clip")
    if (place == whole).any():  # the last ones, after which come those of the next row
        inside[np.broadcast_to(start[:, :, None] + np.arange(_RUN) >= size, at.shape)] = 0.0
    return np.minimum(start + _within(sums, place, inside, levels), size - 1)


def _within(sums: Array, place: Array, masses: Array, levels: Array) -> Array:
    """Which of the masses (b, k, r) in the place where sums (b, T) reach a level reaches it."""
    before = np.take_along_axis(sums, np.maximum(place - 1, 0), axis=1)
    before = np.where(place > 0, before, 0.0)
    count = masses.shape[2]
    partial = (masses.reshape(-1, count) @ triangle(count)).reshape(masses.shape)
    partial += before[:, :, None]
    reached = partial >= _needed(levels, partial[:, :, -1])[:, :, None]
    reached &= masses > 0.0
    return reached.argmax(axis=2)  # 0 where there is none


def first_true(shape: tuple[int, ...], count: int, holds: Callable[[Array], Array]) -> Array:
    """The first of the indices 0, ..., count - 1 at which a predicate holds, else ``count``.

    Parameters
    ----------
    shape
        Of the result: so many searches are made at once, by bisection.
    count
        Number of indices.
    holds
        From indices of this shape to truth values: false up to some index, true from there on.
    """
    low, high = np.zeros(shape, dtype=np.int64), np.full(shape, count)
    for _ in range(count.bit_length()):
        middle = (low + high) // 2
        result = holds(np.minimum(middle, count - 1)) | (middle == count)
        high = np.where(result, middle, high)
        low = np.where(result, low, middle + 1)
    return high


def _needed(levels: Array, total: Array) -> Array:
    """Sums of masses at which levels count as reached; the total suffices for any level."""
    top = total * (1.0 - np.finfo(np.float64).eps)
    return np.minimum(np.maximum(levels * (1.0 - SLACK), SLACK), top)


class SortedAtoms(NamedTuple):
    """One coordinate of the atoms of cells, in ascending order.

    Mixtures are given by weights w of the cells, shape (b, S); atom a has the mass
    w[cell(a)] share(a).

    Attributes
    ----------
    values
        Ascending, shape (A,).
    cells, shares
        Of the atoms, in that order, filled up to whole bins by atoms of no mass: shape (T, 32).
    bins
        Share of each cell in each bin, sparse, shape (T, S).
    """

    values: Array
    cells: Array
    shares: Array
    bins: Any


# Laws as measures: rows of cells mixed by weights, or atoms moved along with x


At = Any
"""What a law is at some rows of x: the argument of all queries there."""
Function = Callable[[Array], Array]
Query = Callable[[At], Array]


class Located(Protocol):
    """Where the atoms of a shifted law are."""

    @property
    def scale(self) -> Array | None:
        """c, shape (d,), by which residuals are multiplied; None for 1."""

    def placed(self, x: Array) -> tuple[Array, Array]:
        """mu(x), shape (b, d), in the coordinates z, and what the law of residuals is given."""

    def forward(self, y: Array) -> Array:
        """z(y), shape (n, d)."""

    def undo(self, z: Array) -> Array:
        """y(z), shape (n, d)."""

    def undo_column(self, z: Array, column: int) -> Array:
        """y_j(z_j) of one column, for z of any shape."""

    def smoothed(self) -> MonotoneMaps | None:
        """Smooth coordinates g(y) near z(y); None if z = y."""


class Law(Protocol):
    """Conditional distributions of Y at rows of x: one probability measure for each row.

    ``at(x)`` evaluates the law at rows x (b, d_X), once for all queries there. Queries take its
    result, and their answers have the rows as the first axis. Those that return a function first
    prepare what does not depend on x; that is then evaluated block by block.
    """

    @property
    def size(self) -> int:
        """Number S of weights."""

    @property
    def held(self) -> int:
        """Numbers that a query holds for each row of x."""

    @property
    def mixture(self) -> Function | None:
        """From rows of x to weights of a coupling's components, shape (b, m); else None."""

    def at(self, x: Array) -> At:
        """The law at rows of x."""

    def weights(self, at: At) -> Array:
        """Probabilities of what the law is made of, shape (b, S)."""

    def on_cells(self, at: At, support: Support) -> Array:
        """Probabilities of the cells of y of its model, whose support this is, shape (b, S)."""

    def mean(self, at: At) -> Array:
        """E[Y | x], shape (b, d)."""

    def covariance(self, at: At) -> Array:
        """Cov[Y | x], shape (b, d, d)."""

    def average(self, f: Function) -> Query:
        """E[f | x], shape (b, q), of functions f from rows (n, d) to (n, q)."""

    def declared(self, name: str) -> Query | None:
        """E[f | x] of a declared function, shape (b, 1); None if its means are not known."""

    def below(self, at: At, t: Array, column: int) -> Array:
        """P(Y_j <= t | x), shape (b, k), for thresholds (k,) or (b, k)."""

    def orthant(self, at: At, t: Array, columns: list[int]) -> Array:
        """P(Y_j <= t_j for all j | x), shape (b, 1), of one t (b, len(columns)) for each x."""

    def quantile(self, at: At, levels: Array, columns: list[int]) -> Array:
        """Quantiles of columns, each by itself, shape (b, k, len(columns)), for levels (k,)."""

    def crps(self, at: At, y: Array, column: int) -> Array:
        """Continuous ranked probability score of a column at y (b,), shape (b,)."""

    def draw(self, at: At, u: Array) -> Array:
        """Draws, shape (b, k, d), from numbers u (b, k) that are uniform on (0, 1)."""

    def ratio(self, y: Array) -> Callable[..., Array] | None:
        """dQ_x / dP_Y at y, shape (b, k), or (b, 1) at the y with given numbers, one for each x.

        None if only smoothed densities have a ratio.
        """

    def log_density(
        self, smoothing: Smoothing, far: Smoothing
    ) -> Callable[[At, Array, bool], Array]:
        """Logarithm of the smoothed density at y, shape (b, k); ``far`` is that far from data."""


class CellLaw:
    """Laws Q_x = sum_s w_s(x) P_s, P_s the rows of cell s: at rows of x they are weights (b, S).

    Parameters
    ----------
    cells
        The cells.
    weigh
        From rows of x (b, d_X) to weights w, shape (b, S).
    mixture
        From rows of x to the weights of a coupling's components, shape (b, m).
    """

    def __init__(
        self, cells: CellStatistics, weigh: Function, mixture: Function | None = None
    ) -> None:
        self.cells, self.at, self.mixture = cells, weigh, mixture
        self.size = self.held = len(cells.masses)
        self._sorted: dict[int, SortedAtoms] = {}

    def weights(self, at: Array) -> Array:
        """The weights themselves."""
        return at

    def on_cells(self, at: Array, support: Support) -> Array:
        """The same: the cells are its own."""
        return at

    def mean(self, at: Array) -> Array:
        """E[Y | x], shape (b, d)."""
        return np.asarray(at @ self.cells.means)

    def covariance(self, at: Array) -> Array:
        """Cov[Y | x], shape (b, d, d): of the means between cells, and mean within them."""
        means = self.cells.means
        mean = at @ means
        d = means.shape[1]
        # From the centre of all: the square of a large mean would cancel.
        centre = self.cells.masses @ means
        shifted, offset = means - centre, mean - centre
        products = (shifted[:, :, None] * shifted[:, None, :] + self.cells.covariances).reshape(
            -1, d * d
        )
        second = (at @ products).reshape(-1, d, d)
        return semidefinite(second - offset[:, :, None] * offset[:, None, :])

    def declared(self, name: str) -> Query | None:
        """E[f | x] of a declared function, shape (b, 1), from all rows; None for other names."""
        if name not in self.cells.names:
            return None
        values = self.cells.functions[:, [self.cells.names.index(name)]]
        return lambda at: at @ values

    def average(self, f: Function) -> Query:
        """E[f | x], shape (b, q), of functions f from rows (n, d) to (n, q), on the atoms."""
        values = self.cells.average(f(self.cells.atoms))
        return lambda at: at @ values

    def below(self, at: Array, t: Array, column: int) -> Array:
        """P(Y_j <= t | x), shape (b, k), for thresholds (k,) or (b, k)."""
        values, cells, shares, bins = self.sorted_atoms(column)
        result: Array = np.searchsorted(values, t, side="right")
        position = np.broadcast_to(result, (len(at), result.shape[-1]))
        place, inner = np.divmod(position, _BIN)
        masses = (bins @ np.ascontiguousarray(at.T)).T
        before = np.concatenate([np.zeros((len(at), 1)), np.cumsum(masses, axis=1)], axis=1)
        rows = np.arange(len(at))[:, None]
        last = np.minimum(place, len(cells) - 1)
        masses = at[rows[:, :, None], cells[last]] * shares[last]
        counted = np.arange(_BIN) < np.where(place > last, 0, inner)[:, :, None]
        return reported(before[rows, place] + (masses * counted).sum(axis=2))

    def orthant(self, at: Array, t: Array, columns: list[int]) -> Array:
        """P(Y_j <= t_j for all j | x), shape (b, 1), of one t (b, len(columns)) for each x."""
        inside = (self.cells.atoms[:, None, columns] <= t[None]).all(axis=2).astype(np.float64)
        return np.einsum("bs,sb->b", at, self.cells.average(inside))[:, None]

    def quantile(self, at: Array, levels: Array, columns: list[int]) -> Array:
        """Smallest values v with P(Y_j <= v | x) >= level, shape (b, k, len(columns))."""
        levels = np.broadcast_to(levels, (len(at), np.shape(levels)[-1]))
        result, step = np.empty((*levels.shape, len(columns))), max(_TURNED // self.size, 1)
        each = product(enumerate(columns), range(0, len(at), step))
        for (j, column), start in each:
            values, cells, shares, bins = self.sorted_atoms(column)
            here = slice(start, start + step)
            some, needed = at[here], levels[here]
            # The bin where the sum of masses reaches the level, then the atom within it.
            sums = np.cumsum((bins @ np.ascontiguousarray(some.T)).T, axis=1)
            place = first_reaching(sums, needed)
            masses = some[np.arange(len(some))[:, None, None], cells[place]] * shares[place]
            inner = _within(sums, place, masses, needed)
            result[here, :, j] = values[np.minimum(place * _BIN + inner, len(values) - 1)]
        return result

    def crps(self, at: Array, y: Array, column: int) -> Array:
        """Continuous ranked probability score of a column at y (b,), shape (b,)."""
        ordered = self.sorted_atoms(column)
        values, count, scores = ordered.values, len(ordered.values), np.empty(len(at))
        cells, shares = ordered.cells.ravel()[:count], ordered.shares.ravel()[:count]
        step = max(_HELD // count, 1)
        for start in range(0, len(at), step):
            here = slice(start, start + step)
            masses = np.take(at[here], cells, axis=1)
            masses *= shares
            scores[here] = sorted_crps(masses, values, y[here])
        return scores

    def draw(self, at: Array, u: Array) -> Array:
        """Draws, shape (b, k, d), from numbers u (b, k) that are uniform on (0, 1)."""
        cumulative = np.cumsum(at, axis=1)
        cell = first_reaching(cumulative, u)
        rows = np.arange(len(at))[:, None]
        begin = np.where(cell > 0, cumulative[rows, cell - 1], 0.0)
        # What is left of u is uniform within the cell.
        rest = np.clip((u - begin) / at[rows, cell], 0.0, 1.0)
        starts, ends = self.cells.starts[:-1], self.cells.starts[1:] - 1
        atom = np.searchsorted(self._within, (cell + rest).ravel()).reshape(cell.shape)
        return np.asarray(self.cells.atoms[np.clip(atom, starts[cell], ends[cell])])

    def ratio(self, y: Array) -> Callable[..., Array]:
        """dQ_x / dP_Y, shape (b, k), constant on cells; 0 where there is no row."""
        cells = self.cells.support.assign(y)

        def block(at: Array, here: Array | None = None) -> Array:
            if here is None:
                result, mass = at[:, cells], self.cells.masses[cells]
            else:
                result = at[np.arange(len(at)), cells[here]][:, None]
                mass = self.cells.masses[cells[here]][:, None]
            return np.divide(result, mass, out=np.zeros_like(result), where=mass > 0.0)

        return block

    def log_density(
        self, smoothing: Smoothing, far: Smoothing | None = None
    ) -> Callable[[Array, Array, bool], Array]:
        """Logarithm of the smoothed density at y, shape (b, k), see :func:`log_density`."""
        means, covariances = self.cells.means, self.cells.covariances
        return lambda at, y, paired: log_density(
            at, means, covariances, y, smoothing, paired=paired
        )

    def sorted_atoms(self, column: int) -> SortedAtoms:
        """The atoms of all cells in ascending order of a column."""
        if column not in self._sorted:
            values = self.cells.atoms[:, column]
            order = np.argsort(values, kind="stable")
            cells = np.searchsorted(self.cells.starts, order, side="right") - 1
            shares = self.cells.shares[order]
            count = -(-len(order) // _BIN)
            bins = csr_array(
                (shares, (np.arange(len(order)) // _BIN, cells)), shape=(count, self.size)
            )
            bins.sum_duplicates()
            filled_cells, filled_shares = np.zeros(count * _BIN, np.int64), np.zeros(count * _BIN)
            filled_cells[: len(order)] = cells
            filled_shares[: len(order)] = shares
            shape = count, _BIN
            self._sorted[column] = SortedAtoms(
                values[order], filled_cells.reshape(shape), filled_shares.reshape(shape), bins
            )
        return self._sorted[column]

    @cached_property
    def _within(self) -> Array:
        """Cell number plus cumulative share of the atoms, ascending, shape (A,)."""
        shares, starts = np.cumsum(self.cells.shares), self.cells.starts
        before = np.concatenate([[0.0], shares])[starts[:-1]]
        cell = self.cells.cell_of_atom
        return np.asarray(cell + np.clip(shares - before[cell], 0.0, 1.0))


class Shifted(NamedTuple):
    """A shifted law at rows of x: weights (b, S), and the locations mu(x) (b, d)."""

    weights: Array
    location: Array

    def rows(self, which: Array) -> "Shifted":
        """The law at some of the rows."""
        return Shifted(self.weights[which], self.location[which])


class ShiftedLaw:
    """Laws on atoms near y(mu(x) + c e_s), s = 1..S, with masses w_s(x): residuals e at mu(x).

    Atoms are brought to values that the columns can take.

    Has the methods of :class:`CellLaw` that don't need rows of all cells.

    Parameters
    ----------
    cells
        CellStatistics of e; its means, times c, are the atoms.
    weigh
        From what the law of e is given to weights, shape (b, S).
    located
        mu, c and the coordinates.
    values
        Which values the columns of y can take; default any.
    """

    def __init__(
        self,
        cells: CellStatistics,
        weigh: Function,
        located: Located,
        values: ValueMap | None = None,
    ) -> None:
        self.cells, self._weigh, self._located = cells, weigh, located
        self._values = ValueMap.unknown(cells.means.shape[1]) if values is None else values
        scale = np.ones(cells.means.shape[1]) if located.scale is None else located.scale
        self._atoms, self._covariances = (
            cells.means * scale,
            cells.covariances * np.outer(scale, scale),
        )
        self._order = np.argsort(cells.means, axis=0, kind="stable")
        self._natural = np.arange(len(cells.masses))
        self.size, self.held = len(cells.masses), 4 * int(cells.means.size)

    def at(self, x: Array) -> Shifted:
        """The law at rows of x."""
        mu, given = self._located.placed(x)
        return Shifted(self._weigh(given), mu)

    def on_cells(self, at: Shifted, support: Support) -> Array:
        """Probabilities that the moved atoms lie in the cells of a support, shape (b, S)."""
        places, size = self._places(at), len(support.points)
        cells = support.assign(places.reshape(-1, places.shape[2])).reshape(at.weights.shape)
        cells = cells + size * np.arange(len(cells))[:, None]
        masses = np.bincount(cells.ravel(), at.weights.ravel(), size * len(cells))
        return masses.reshape(len(cells), size)

    def mean(self, at: Shifted) -> Array:
        """E[Y | x], shape (b, d)."""
        return np.einsum("bs,bsd->bd", at.weights, self._places(at))

    def covariance(self, at: Shifted) -> Array:
        """Cov[Y | x], shape (b, d, d)."""
        weights, places = at.weights, self._places(at)
        gap = places - np.einsum("bs,bsd->bd", weights, places)[:, None]
        return semidefinite(np.einsum("bs,bsi,bsj->bij", weights, gap, gap, optimize=True))

    def average(self, f: Function) -> Query:
        """E[f | x], shape (b, q), of functions f from rows (n, d) to (n, q)."""

        def block(at: Shifted) -> Array:
            places = self._places(at)
            values = f(places.reshape(-1, places.shape[2]))
            values = values.reshape(*places.shape[:2], values.shape[1])
            return np.einsum("bs,bsq->bq", at.weights, values)

        return block

    def below(self, at: Shifted, t: Array, column: int) -> Array:
        """P(Y_j <= t | x), shape (b, k), for thresholds (k,) or (b, k)."""
        t, place = np.broadcast_to(t, (len(at.weights), t.shape[-1])), self.placing(column, at)
        # The search is among the very numbers that quantiles return.
        position = first_true(t.shape, self.size, lambda atom: place(atom) > t)
        sums = np.cumsum(self._ordered(column, at.weights), axis=1)
        before = np.concatenate([np.zeros((len(t), 1)), sums], axis=1)
        return reported(np.take_along_axis(before, position, axis=1))

    def orthant(self, at: Shifted, t: Array, columns: list[int]) -> Array:
        """P(Y_j <= t_j for all j | x), shape (b, 1), of one t (b, len(columns)) for each x."""
        inside = (self._places(at)[:, :, columns] <= t[:, None]).all(axis=2)
        return (at.weights * inside).sum(axis=1)[:, None]

    def quantile(self, at: Shifted, levels: Array, columns: list[int]) -> Array:
        """Quantiles of columns, each by itself, shape (b, k, len(columns)), for levels (k,)."""
        levels = np.broadcast_to(levels, (len(at.weights), len(levels)))
        result = np.empty((*levels.shape, len(columns)))
        for j, column in enumerate(columns):
            atoms = first_of_sums(self._ordered(column, at.weights), levels)
            result[:, :, j] = self.placing(column, at)(atoms)
        return result

    def crps(self, at: Shifted, y: Array, column: int) -> Array:
        """Continuous ranked probability score of a column at y (b,), shape (b,)."""
        return sorted_crps(*self.ascending(column, at), y)

    def draw(self, at: Shifted, u: Array) -> Array:
        """Draws, shape (b, k, d), from numbers u (b, k) that are uniform on (0, 1)."""
        atom = first_reaching(np.cumsum(at.weights, axis=1), u)
        return self._possible(at.location[:, None] + self._atoms[atom])

    def log_density(self, smoothing: Smoothing) -> Callable[[Shifted, Array, bool], Array]:
        """Logarithm of the density at y, shape (b, k).

        It is the density of the atoms' g, smoothed, times dg / dy, with coordinates g near z that
        have no kinks: the slopes of z are as rough as the gaps between single rows. Atoms are
        brought into the range of y, but not to single values of it; the kernels are those of the
        atoms before, since a law whose atoms all lie at an end of the range has no width.
        """
        values, smooth = self._values, self._located.smoothed()
        forward: Function = (lambda y: y) if smooth is None else smooth
        low, high = (
            np.where(np.isfinite(end), forward(np.where(np.isfinite(end), end, 0.0)[None])[0], end)
            for end in (values.low, values.high)
        )

        def block(at: Shifted, y: Array, paired: bool) -> Array:
            weights, covariances = at.weights, self._covariances
            atoms = at.location[:, None] + self._atoms
            if smooth is not None:
                rows = self._located.undo(atoms.reshape(-1, atoms.shape[2]))
                atoms = smooth(rows).reshape(atoms.shape)
            inside, scales = np.clip(atoms, low, high), None
            if (inside != atoms).any():
                _, scales = moments(weights, atoms, covariances)
            result = log_density(
                weights, inside, covariances, forward(y), smoothing, paired=paired, scales=scales
            )
            if smooth is None:
                return result
            change = np.log(smooth.slope(y)).sum(axis=1)
            return result + (change[:, None] if paired else change)

        return block

    def ascending(self, column: int, at: Shifted) -> tuple[Array, Array]:
        """Masses of the atoms and their values in one column, in ascending order, shapes (b, S)."""
        every = np.broadcast_to(np.arange(self.size), at.weights.shape)
        # The coordinates of a column rise with it, so that moved atoms keep their order.
        return self._ordered(column, at.weights), self.placing(column, at)(every)

    def _ordered(self, column: int, weights: Array) -> Array:
        """Masses of the atoms in ascending order of a column, shape (b, S)."""
        order = self._order[:, column]
        # Cells of a single column are in this order already.
        return weights if np.array_equal(order, self._natural) else weights[:, order]

    def placing(self, column: int, at: Shifted) -> Function:
        """From positions in ascending order (b, k) to the atoms' values there, ascending."""
        location, values = at.location[:, [column]], self._values.column(column)
        atoms = self._atoms[self._order[:, column], column]

        def place(atom: Array) -> Array:
            y = self._located.undo_column(location + atoms[atom], column)
            return values.possible(y[..., None])[..., 0]

        return place

    def _places(self, at: Shifted) -> Array:
        """The atoms, shape (b, S, d)."""
        return self._possible(at.location[:, None] + self._atoms)

    def _possible(self, z: Array) -> Array:
        """Values that columns of y can take, for coordinates z, both of shape (b, k, d)."""
        return self._values.possible(self._located.undo(z.reshape(-1, z.shape[2])).reshape(z.shape))


def semidefinite(covariance: Array) -> Array:
    """The same matrices, symmetric to the bit, with variances that rounding can't make negative."""
    covariance = (covariance + np.swapaxes(covariance, 1, 2)) / 2
    diagonal = np.einsum("bii->bi", covariance)
    np.maximum(diagonal, 0.0, out=diagonal)
    return covariance
