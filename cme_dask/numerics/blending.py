"""Weights of laws from density ratios: projection, and blending far from data."""

import copy
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.joint import StackedNewton
from cme_dask.numerics.measure import (
    SLACK,
    CellMeasure,
    Function,
    Query,
    Remembered,
    ShiftedMeasure,
    first_true,
    reported,
    semidefinite,
)
from cme_dask.numerics.scoring import sorted_crps
from cme_dask.numerics.smoothing import Smoothing

# From a signed density ratio on a support to a law: L2 projection, and clipping to compare


Array = Any

_HELD = 1 << 16  # values of the ratio at once: with what is made of them they stay in cache


def project(ratio: Array, masses: Array) -> tuple[Array, Array]:
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
    ratio, masses = _checked(ratio, masses)
    seen = np.flatnonzero(masses)
    weights, threshold = np.zeros(ratio.shape), np.empty(len(ratio))
    step = max(_HELD // len(seen), 1)
    for start in range(0, len(ratio), step):
        here = slice(start, start + step)
        above, threshold[here] = _above(ratio[here, seen], masses[seen])
        weights[here, seen] = _as_law(above, masses[seen])
    return weights, threshold


def clip(ratio: Array, masses: Array) -> Array:
    """Clip and renormalise: v max(g, 0) over its sum, and v where nothing is positive.

    For comparison only: unlike the projection, it can be farther from the truth than g was.

    Parameters
    ----------
    ratio, masses
        g and v, shapes (q, S) and (S,).

    Returns
    -------
    weights : (q, S), non-negative, sum 1

    Raises
    ------
    DataError
        As for :func:`project`.
    """
    ratio, masses = _checked(ratio, masses)
    above = np.maximum(ratio, 0.0)
    above[~(above[:, masses > 0] > 0).any(axis=1)] = 1.0
    return _as_law(above, masses)


def _above(ratio: Array, masses: Array) -> tuple[Array, Array]:
    """max(g - t, 0) and t, shapes (q, S) and (q,); all masses are positive."""
    total = masses.sum()
    largest = np.abs(ratio).max(axis=1)
    # Left of the root, whatever the sum rounds.
    t = (ratio @ masses - 1.0) / total - np.finfo(np.float64).eps * len(masses) * largest
    # What is kept is the distance from t: where g is huge, t itself can't tell it.
    excess = ratio - t[:, None]
    highest = excess.max(axis=1)
    above, active = np.empty_like(excess), np.empty_like(excess)
    counted = np.stack([masses, np.ones(len(masses))], axis=1)
    before = np.full(len(ratio), -1.0)
    while True:
        np.maximum(excess, 0.0, out=above)
        np.greater(excess, 0.0, out=active)
        mass, count = (active @ counted).T
        if np.array_equal(count, before):
            return above, t
        with np.errstate(over="ignore"):
            step = (above @ masses - 1.0) / mass
        # The highest stays above t, even where that is all that rounding leaves.
        step = np.clip(step, 0.0, highest * (1.0 - 1e-15))
        excess -= step[:, None]
        highest -= step
        t += step
        before = count


def _as_law(above: Array, masses: Array) -> Array:
    above = above * masses
    return np.asarray(above / above.sum(axis=1, keepdims=True))


def _checked(ratio: Any, masses: Any) -> tuple[Array, Array]:
    ratio, masses = np.asarray(ratio, dtype=np.float64), np.asarray(masses, dtype=np.float64)
    if ratio.ndim != 2 or masses.shape != ratio.shape[1:] or not len(masses):
        raise DataError(
            f"ratio (q, S) and masses (S,) expected, got shapes {ratio.shape} and {masses.shape}"
        )
    if not (np.isfinite(masses).all() and (masses >= 0.0).all() and masses.any()):
        raise DataError("masses must be finite and non-negative, and one of them positive")
    if not np.isfinite(ratio).all():
        raise DataError("the density ratio holds NaN or infinity")
    return ratio, masses


# Laws near the data and laws far from them, as one measure: a mixture whose shares depend on x


NEAR = 0.05
"""Effective support from which on laws are those near the data alone."""

_ROUNDING = 1e-9
_HELD_BLENDING = 1 << 21  # numbers at once, of atoms of both laws


def share_near(support: Array) -> Array:
    r"""Share of the law near the data, shape (n,), from the effective support s in [0, 1].

    .. math:: a = t^2 (3 - 2 t), \quad t = \min(s / 0.05, 1)

    It is exactly 1 from s = 0.05 on, 0 at s = 0, and rises smoothly between.
    """
    t = np.minimum(support / NEAR, 1.0)
    return np.asarray(t * t * (3.0 - 2.0 * t))


def near_data(newton: NewtonBasis | StackedNewton) -> Query:
    """From rows of x (b, d_X) to :func:`share_near` of their effective support, shape (b,).

    The support takes a triangular solve for each row. Most rows do without: they are so near to a
    single pivot that its kernel section alone shows that the share is 1.
    """
    parts = newton.parts

    def share(x: Array) -> Array:
        least, open_ = np.zeros(len(x)), np.arange(len(x))
        for part in parts:
            points, kernel = np.asarray(part.points), part.kernel
            own = np.sqrt(kernel.diagonal(x[open_]))[:, None] * np.sqrt(kernel.diagonal(points))
            cosine = np.abs(kernel(x[open_], points))
            cosine = np.divide(cosine, own, out=np.zeros_like(own), where=own > 0.0)
            least[open_] += (1.0 - _ROUNDING) * cosine.max(axis=1) ** 2 / len(parts)
            open_ = open_[least[open_] < NEAR]
            if not len(open_):
                return np.ones(len(x))
        result = np.ones(len(x))
        result[open_] = share_near(newton.support(x[open_]))
        return result

    return share


class BlendedMeasure:
    r"""Laws :math:`Q_x = a(x) M_x + (1 - a(x)) C_x`, moved residuals M and mixtures of cells C.

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

    def __init__(self, near: ShiftedMeasure, far: CellMeasure, share: Query) -> None:
        self.near, self.far, self.share = near, far, share

    def remembering(self) -> Self:
        """The same, with the weights of the last rows kept."""
        result = copy.copy(self)
        result.near, result.far = self.near.remembering(), self.far.remembering()
        result.share = Remembered(self.share)
        return result

    @property
    def held(self) -> int:
        """Numbers that a query holds for each row of x."""
        return max(self.near.held, self.far.held)

    @property
    def size(self) -> int:
        """Number of cells of both."""
        return self.near.cells.size + self.far.cells.size

    def weigh(self, x: Array) -> Array:
        """Weights, shape (b, S_M + S_C): of the atoms of M, then of the cells of C."""
        share = self.share(x)[:, None]
        near, far = share * self.near.weigh(x), np.zeros((len(x), self.far.cells.size))
        some = np.flatnonzero(share[:, 0] < 1.0)
        if len(some):
            far[some] = (1.0 - share[some]) * self.far.weigh(x[some])
        return np.concatenate([near, far], axis=1)

    def mean(self, x: Array) -> Array:
        """E[Y | x], shape (b, d)."""
        return self._mixed(x, lambda x, _: self.near.mean(x), lambda x, _: self.far.mean(x))

    def covariance(self, x: Array) -> Array:
        """Cov[Y | x], shape (b, d, d)."""

        def moments(measure: ShiftedMeasure | CellMeasure, x: Array) -> Array:
            mean = measure.mean(x)
            return np.concatenate([measure.covariance(x), mean[:, None]], axis=1)

        result = self._mixed(
            x, lambda x, _: moments(self.near, x), lambda x, _: moments(self.far, x)
        )
        share = self.share(x)
        between, both = np.zeros(result[:, :-1].shape), (share > 0.0) & (share < 1.0)
        if both.any():
            gap = self.near.mean(x[both]) - self.far.mean(x[both])
            part = (share * (1.0 - share))[both, None, None]
            between[both] = part * gap[:, :, None] * gap[:, None, :]
        return semidefinite(result[:, :-1] + between)

    def average(self, f: Function) -> Query:
        """E[f | x], shape (b, q), of functions f from rows (n, d) to (n, q)."""
        near = self.near.average(f)
        return lambda x: self._mixed(x, lambda x, _: near(x), lambda x, _: self.far.average(f)(x))

    def declared(self, name: str) -> None:
        """None: means of declared functions are not known of moved atoms."""

    def ratio(self, y: Array) -> None:
        """None: moved atoms have no ratio to the marginal but that of smoothed densities."""

    def below(self, column: int) -> Callable[[Array, Array], Array]:
        """P(Y_j <= t | x), shape (b, k), for thresholds (k,) or (b, k)."""
        near, far = self.near.below(column), self.far.below(column)

        def block(x: Array, t: Array) -> Array:
            def part(query: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
                return lambda x, at: query(x, t[at] if t.ndim == 2 else t)

            return self._mixed(x, part(near), part(far), reported)

        return block

    def orthant(self, x: Array, columns: list[int], t: Array) -> Array:
        """P(Y_j <= t_j for all j | x), shape (b, 1), of one t (b, len(columns)) for each x."""
        return self._mixed(
            x,
            lambda x, at: self.near.orthant(x, columns, t[at]),
            lambda x, at: self.far.orthant(x, columns, t[at]),
        )

    def quantile(self, column: int, levels: Array) -> Query:
        """Quantiles of a column, shape (b, k)."""
        near, far = self.near.quantile(column, levels), self.far.quantile(column, levels)

        def block(x: Array) -> Array:
            share = self.share(x)
            if (share == 1.0).all():
                return near(x)
            result = np.empty((len(x), len(levels)))
            for query, where in (
                (near, share == 1.0),
                (far, share == 0.0),
                (lambda x: self._quantile(column, levels, x), (share > 0.0) & (share < 1.0)),
            ):
                if where.any():
                    result[where] = query(x[where])
            return result

        return block

    def _quantile(self, column: int, levels: Array, x: Array) -> Array:
        """Quantiles of mixtures: the least atom of either law at which the level is reached."""
        below, needed = self.below(column), np.maximum(levels, SLACK)
        place, values = self.near.placing(column, x), self.far.sorted_atoms(column).values
        shape = len(x), len(levels)

        def reached(t: Array) -> Array:
            return below(x, t) >= needed

        counts = self.near.cells.size, len(values)
        at = first_true(shape, counts[0], lambda at: reached(place(at)))
        near = np.where(at < counts[0], place(np.minimum(at, counts[0] - 1)), np.inf)
        at = first_true(shape, counts[1], lambda at: reached(values[at]))
        far = np.where(at < counts[1], values[np.minimum(at, counts[1] - 1)], np.inf)
        return np.minimum(near, far)

    def crps(self, column: int) -> Callable[[Array, Array], Array]:
        """Continuous ranked probability score of a column at y (b,), shape (b,)."""
        near = self.near.crps(column)

        def block(x: Array, y: Array) -> Array:
            share = self.share(x)
            if (share == 1.0).all():
                return near(x, y)
            result, some = np.empty(len(x)), np.flatnonzero(share < 1.0)
            if len(some) < len(x):
                result[share == 1.0] = near(x[share == 1.0], y[share == 1.0])
            step = max(_HELD_BLENDING // (self.near.cells.size + len(self.far.cells.atoms)), 1)
            for start in range(0, len(some), step):
                at = some[start : start + step]
                masses, atoms = self._merged(column, x[at], share[at, None])
                result[at] = sorted_crps(masses, atoms, y[at])
            return result

        return block

    def _merged(self, column: int, x: Array, share: Array) -> tuple[Array, Array]:
        """Masses and values of the atoms of both laws, ascending, shapes (b, S_M + A)."""
        masses, values = self.near.ascending(column, x)
        cells = self.far.cells
        far = self.far.weigh(x)[:, cells.cell_of_atom] * cells.shares
        masses = np.concatenate([share * masses, (1.0 - share) * far], axis=1)
        atoms = np.broadcast_to(cells.atoms[:, column], far.shape)
        values = np.concatenate([values, atoms], axis=1)
        order = np.argsort(values, axis=1, kind="stable")
        return np.take_along_axis(masses, order, 1), np.take_along_axis(values, order, 1)

    def draw(self, x: Array, u: Array) -> Array:
        """Draws, shape (b, k, d), from numbers u (b, k) that are uniform on (0, 1)."""
        share = self.share(x)[:, None]
        if (share == 1.0).all():
            return self.near.draw(x, u)
        # What is left of u is uniform again.
        with np.errstate(divide="ignore", invalid="ignore"):
            near, far = u / share, (u - share) / (1.0 - share)
        return np.where(
            (u < share)[:, :, None],
            self.near.draw(x, np.clip(np.nan_to_num(near), 0.0, 1.0)),
            self.far.draw(x, np.clip(np.nan_to_num(far), 0.0, 1.0)),
        )

    def log_density(
        self, smoothing: Smoothing, far: Smoothing
    ) -> Callable[[Array, Array, bool], Array]:
        """Logarithm of the density at y, shape (b, k), see the measures of both."""
        near = self.near.log_density(smoothing)

        def block(x: Array, y: Array, paired: bool) -> Array:
            share = self.share(x)
            if (share == 1.0).all():
                return near(x, y, paired)
            beyond = self.far.log_density(far)
            with np.errstate(divide="ignore"):
                logs = np.log(share)[:, None], np.log1p(-share)[:, None]
            return np.logaddexp(logs[0] + near(x, y, paired), logs[1] + beyond(x, y, paired))

        return block

    def _mixed(
        self,
        x: Array,
        near: Callable[[Array, Array], Array],
        far: Callable[[Array, Array], Array],
        finish: Query = lambda values: values,
    ) -> Array:
        """Mixed answers (b, ...), each law's from the rows of x that it has a share of.

        ``near`` and ``far`` take rows of x and their positions; ``finish`` is applied where both
        have a share.
        """
        share = self.share(x)
        if (share == 1.0).all():
            return near(x, np.arange(len(x)))
        result: Array = None
        for query, part in ((near, share), (far, 1.0 - share)):
            at = np.flatnonzero(part > 0.0)
            if len(at):
                values = query(x[at], at)
                if result is None:
                    result = np.zeros((len(x), *values.shape[1:]))
                result[at] += part[at].reshape(-1, *[1] * (values.ndim - 1)) * values
        both = (share > 0.0) & (share < 1.0)
        result[both] = finish(result[both])
        return result
