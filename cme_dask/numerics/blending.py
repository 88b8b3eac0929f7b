"""Laws near the data and laws far from them, as one measure: a mixture whose shares depend on x."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cme_dask.numerics.basis import Functions
from cme_dask.numerics.measure import (
    CellLaw,
    Function,
    Query,
    Shifted,
    ShiftedLaw,
    first_true,
    reported,
    semidefinite,
)
from cme_dask.numerics.scoring import sorted_crps
from cme_dask.numerics.smoothing import Smoothing
from cme_dask.numerics.support import Support
from cme_dask.numerics.values import SLACK

Array = Any

NEAR = 0.05
"""Effective support from which on laws are those near the data alone."""

_ROUNDING = 1e-9
_PIVOTS = 64  # at once
_HELD = 1 << 21  # numbers at once, of atoms of both laws


def share_near(support: Array) -> Array:
    r"""Share of the law near the data, shape (n,), from the effective support s in [0, 1].

    .. math:: a = t^2 (3 - 2 t), \quad t = \min(s / 0.05, 1)

    It is exactly 1 from s = 0.05 on, 0 at s = 0, and rises smoothly between.
    """
    t = np.minimum(support / NEAR, 1.0)
    return np.asarray(t * t * (3.0 - 2.0 * t))


def near_data(newton: Functions) -> Callable[[Array], Array]:
    """From rows of x (b, d_X) to :func:`share_near` of their effective support, shape (b,).

    The support takes a triangular solve for each row. Most rows do without: they are so near to a
    single pivot that its kernel section alone shows that the share is 1.
    """
    parts = [
        (part.kernel, points, np.sqrt(part.kernel.diagonal(points)))
        for part in newton.parts
        for points in [np.asarray(part.points)]
    ]

    def share(x: Array) -> Array:
        least, reached, open_ = np.zeros(len(x)), np.zeros(len(x)), np.arange(len(x))
        for kernel, points, length in parts:
            highest, own = np.zeros(len(x)), np.sqrt(kernel.diagonal(x))
            for start in range(0, len(points), _PIVOTS):  # the first ones are near to most rows
                here = slice(start, start + _PIVOTS)
                norm = own[open_, None] * length[here]
                cosine = np.abs(kernel(x[open_], points[here]))
                cosine = np.divide(cosine, norm, out=np.zeros_like(norm), where=norm > 0.0)
                highest[open_] = np.maximum(highest[open_], cosine.max(axis=1))
                reached = least + (1.0 - _ROUNDING) * highest**2 / len(parts)
                open_ = open_[reached[open_] < NEAR]
                if not len(open_):
                    return np.ones(len(x))
            least = reached
        result = np.ones(len(x))
        result[open_] = share_near(newton.support(x[open_]))
        return result

    return share


class Blended(NamedTuple):
    """A blended law at rows of x.

    Attributes
    ----------
    share
        a, shape (b,).
    near
        M at all rows.
    rows, far
        Where a < 1, and C at these rows, in their order.
    """

    share: Array
    near: Shifted
    rows: Array
    far: Array

    def mixed(self, near: Array, far: Array) -> Array:
        """A near + (1 - a) far, of answers (b, ...) of M, and of C at its rows."""
        if not len(self.rows):
            return near
        share = self.share.reshape(-1, *[1] * (near.ndim - 1))
        result = share * near
        result[self.rows] += (1.0 - share[self.rows]) * far
        return np.asarray(result)


class BlendedLaw:
    r"""Laws :math:`Q_x = a(x) M_x + (1 - a(x)) C_x`, shifted residuals M and mixtures of cells C.

    Every method answers for the one measure Q. Where a is 1 it costs and gives what M does.

    Parameters
    ----------
    near
        M, the laws near the data.
    far
        C, the laws far from them, which tend to the marginal law.
    share
        From rows of x (b, d_X) to a, shape (b,), in [0, 1].
    """

    mixture: ClassVar[None] = None

    def __init__(self, near: ShiftedLaw, far: CellLaw, share: Callable[[Array], Array]) -> None:
        self.near, self.far, self.share = near, far, share
        self.size, self.held = near.size + far.size, max(near.held, far.held)

    def at(self, x: Array) -> Blended:
        """The law at rows of x."""
        share = self.share(x)
        rows = np.flatnonzero(share < 1.0)
        return Blended(share, self.near.at(x), rows, self.far.at(x[rows]))

    def weights(self, at: Blended) -> Array:
        """Weights, shape (b, S_M + S_C): of the atoms of M, then of the cells of C."""
        far = np.zeros((len(at.share), self.far.size))
        far[at.rows] = (1.0 - at.share[at.rows, None]) * at.far
        return np.concatenate([at.share[:, None] * at.near.weights, far], axis=1)

    def on_cells(self, at: Blended, support: Support) -> Array:
        """Probabilities of the cells of a support, which are those of C, shape (b, S)."""
        return at.mixed(self.near.on_cells(at.near, support), at.far)

    def mean(self, at: Blended) -> Array:
        """E[Y | x], shape (b, d)."""
        return at.mixed(self.near.mean(at.near), self.far.mean(at.far))

    def covariance(self, at: Blended) -> Array:
        """Cov[Y | x], shape (b, d, d)."""
        result = at.mixed(self.near.covariance(at.near), self.far.covariance(at.far))
        if len(at.rows):
            share = at.share[at.rows, None, None]
            gap = self.near.mean(at.near.rows(at.rows)) - self.far.mean(at.far)
            result[at.rows] += share * (1.0 - share) * gap[:, :, None] * gap[:, None, :]
        return semidefinite(result)

    def average(self, f: Function) -> Query:
        """E[f | x], shape (b, q), of functions f from rows (n, d) to (n, q)."""
        near = self.near.average(f)

        def block(at: Blended) -> Array:
            values = near(at.near)
            return at.mixed(values, self.far.average(f)(at.far)) if len(at.rows) else values

        return block

    def declared(self, name: str) -> None:
        """None: means of declared functions are not known of shifted atoms."""

    def ratio(self, y: Array) -> None:
        """None: shifted atoms have no ratio to the marginal but that of smoothed densities."""

    def below(self, at: Blended, t: Array, column: int) -> Array:
        """P(Y_j <= t | x), shape (b, k), for thresholds (k,) or (b, k)."""
        far = self.far.below(at.far, t[at.rows] if t.ndim == 2 else t, column)
        result = at.mixed(self.near.below(at.near, t, column), far)
        result[at.rows] = reported(result[at.rows])
        return result

    def orthant(self, at: Blended, t: Array, columns: list[int]) -> Array:
        """P(Y_j <= t_j for all j | x), shape (b, 1), of one t (b, len(columns)) for each x."""
        near = self.near.orthant(at.near, t, columns)
        return at.mixed(near, self.far.orthant(at.far, t[at.rows], columns))

    def quantile(self, at: Blended, levels: Array, columns: list[int]) -> Array:
        """Quantiles of columns, each by itself, shape (b, k, len(columns)), for levels (k,)."""
        result = self.near.quantile(at.near, levels, columns)
        if len(at.rows):
            share = at.share[at.rows]
            values, both = self.far.quantile(at.far, levels, columns), np.flatnonzero(share > 0.0)
            if len(both):
                shifted = at.near.rows(at.rows[both])
                inner = Blended(share[both], shifted, np.arange(len(both)), at.far[both])
                for j, column in enumerate(columns):
                    values[both, :, j] = self._quantile(inner, levels, column)
            result[at.rows] = values
        return result

    def _quantile(self, at: Blended, levels: Array, column: int) -> Array:
        """Quantiles of mixtures: the least atom of either law at which the level is reached."""
        needed = np.maximum(levels, SLACK)
        place, values = self.near.placing(column, at.near), self.far.sorted_atoms(column).values
        shape = len(at.share), len(levels)

        def reached(t: Array) -> Array:
            return self.below(at, t, column) >= needed

        counts = self.near.size, len(values)
        atom = first_true(shape, counts[0], lambda atom: reached(place(atom)))
        near = np.where(atom < counts[0], place(np.minimum(atom, counts[0] - 1)), np.inf)
        atom = first_true(shape, counts[1], lambda atom: reached(values[atom]))
        far = np.where(atom < counts[1], values[np.minimum(atom, counts[1] - 1)], np.inf)
        return np.minimum(near, far)

    def crps(self, at: Blended, y: Array, column: int) -> Array:
        """Continuous ranked probability score of a column at y (b,), shape (b,)."""
        result = self.near.crps(at.near, y, column)
        step = max(_HELD // (self.near.size + len(self.far.cells.atoms)), 1)
        for start in range(0, len(at.rows), step):
            here = slice(start, start + step)
            rows = at.rows[here]
            masses, atoms = self._merged(column, at, here)
            result[rows] = sorted_crps(masses, atoms, y[rows])
        return result

    def _merged(self, column: int, at: Blended, here: slice) -> tuple[Array, Array]:
        """Masses and values of the atoms of both laws, ascending, at some of the rows of C."""
        share = at.share[at.rows[here], None]
        masses, values = self.near.ascending(column, at.near.rows(at.rows[here]))
        cells = self.far.cells
        far = at.far[here][:, cells.cell_of_atom] * cells.shares
        masses = np.concatenate([share * masses, (1.0 - share) * far], axis=1)
        atoms = np.broadcast_to(cells.atoms[:, column], far.shape)
        values = np.concatenate([values, atoms], axis=1)
        order = np.argsort(values, axis=1, kind="stable")
        return np.take_along_axis(masses, order, 1), np.take_along_axis(values, order, 1)

    def draw(self, at: Blended, u: Array) -> Array:
        """Draws, shape (b, k, d), from numbers u (b, k) that are uniform on (0, 1)."""
        if not len(at.rows):
            return self.near.draw(at.near, u)
        share = at.share[:, None]
        # What is left of u is uniform again.
        with np.errstate(divide="ignore", invalid="ignore"):
            near, far = u / share, (u - share) / (1.0 - share)
        result = self.near.draw(at.near, np.clip(np.nan_to_num(near), 0.0, 1.0))
        beyond = self.far.draw(at.far, np.clip(np.nan_to_num(far[at.rows]), 0.0, 1.0))
        from_near = (u < share)[at.rows, :, None]
        result[at.rows] = np.where(from_near, result[at.rows], beyond)
        return result

    def log_density(
        self, smoothing: Smoothing, far: Smoothing
    ) -> Callable[[Blended, Array, bool], Array]:
        """Logarithm of the density at y, shape (b, k), see the methods of both."""
        near = self.near.log_density(smoothing)

        def block(at: Blended, y: Array, paired: bool) -> Array:
            result = near(at.near, y, paired)
            if len(at.rows):
                share = at.share[at.rows, None]
                there = y[at.rows] if paired else y
                beyond = self.far.log_density(far)(at.far, there, paired)
                with np.errstate(divide="ignore"):
                    logs = np.log(share), np.log1p(-share)
                result[at.rows] = np.logaddexp(logs[0] + result[at.rows], logs[1] + beyond)
            return result

        return block
