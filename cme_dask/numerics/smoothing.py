"""Densities against the Lebesgue measure: laws on cells, smoothed without changing their moments.

Source of the smoothing: West (1993), Approximating posterior distributions by mixtures, Journal of
the Royal Statistical Society B 55, 409, section 2: kernel locations are drawn towards the mean.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import gammaln

Array = Any

OVERLAP = 1.5
"""Bandwidth at which neighbouring cells overlap, over n_eff^(-1/d)."""

DEGREES = 4.0
"""Degrees of freedom of the t densities that cells of one column are smoothed by."""

_HELD = 1 << 19  # numbers at once
_FARTHEST = 1e150  # standard deviations, whose square is finite
_LEAST = 1e-3  # times Silverman's bandwidth, of laws without a covariance


def silverman(d: int, rows: Any) -> Any:
    r"""Silverman's bandwidth in standard deviations, :math:`(4 / ((d + 2) n))^{1 / (d + 4)}`.

    Source: Silverman (1986), Density Estimation, (4.14).
    """
    return (4.0 / ((d + 2) * rows)) ** (1.0 / (d + 4))


@dataclass(frozen=True, eq=False)
class Smoothing:
    r"""How the laws are smoothed.

    Attributes
    ----------
    spread
        Standard deviations given x that the density is to resolve, positive, shape (d,).
    rows
        How many rows n the laws were learned from.
    bandwidth
        Standard deviations of normal noise that is added instead, positive, shape (d,).
    """

    spread: Array
    rows: int
    bandwidth: Array | None = None

    def kernels(self, weights: Array, covariances: Array) -> tuple[Array, Array]:
        r"""Shrinkage a and covariance of the kernel, shapes (b,) and (b, d, d).

        The kernel of the law at x has the covariance :math:`h(x)^2 \Sigma(x)`, and
        :math:`a^2 = 1 - h^2`. The bandwidth h is the one at which neighbouring cells overlap,
        :math:`1.5\, n_\mathrm{eff}^{-1/d}` with :math:`n_\mathrm{eff} = 1 / \sum_s w_s^2` cells;
        at least Silverman's for all rows, in units of the spread where the law is wider than that;
        at most Silverman's for as many rows as there are cells.

        Parameters
        ----------
        weights
            w, shape (b, S).
        covariances
            Sigma of the laws, shape (b, d, d).
        """
        b, d = covariances.shape[:2]
        if self.bandwidth is not None:
            return np.ones(b), np.broadcast_to(np.diag(self.bandwidth**2), (b, d, d))
        cells = 1.0 / (weights * weights).sum(axis=1)
        deviations = np.sqrt(np.einsum("bii->bi", covariances))
        # The geometric mean of ratios: of laws without a covariance the spread is the larger one.
        with np.errstate(divide="ignore"):
            wider = np.exp(np.minimum(np.log(self.spread / deviations).mean(axis=1), 0.0))
        least, most = silverman(d, self.rows) * wider, silverman(d, cells)
        h = np.minimum(np.clip(OVERLAP * cells ** (-1.0 / d), least, np.maximum(most, least)), 1.0)
        kernel = (h * h)[:, None, None] * covariances + self.floor
        return np.sqrt(1.0 - h * h), kernel

    @property
    def degrees(self) -> float | None:
        """Degrees of freedom of the kernels; None of normal ones."""
        return DEGREES if self.bandwidth is None and len(self.spread) == 1 else None

    @property
    def floor(self) -> Array:
        """Covariance that is added to every kernel, shape (d, d)."""
        least = _LEAST * silverman(len(self.spread), self.rows) * self.spread
        return np.diag(least * least)


def log_density(
    weights: Array,
    centres: Array,
    covariances: Array,
    points: Array,
    smoothing: Smoothing,
    *,
    paired: bool,
    scales: Array | None = None,
) -> Array:
    r"""Logarithm of the smoothed densities of laws on cells.

    With mean mu and covariance Sigma of the law at x,

    .. math:: p(y | x) = a^{d - 1} \sum_s w_s(x) k(y; \mu + a (m_s - \mu), a^2 C_s + h^2 \Sigma)
              + (1 - a^{d - 1}) N(y; \mu, \Sigma), \quad a^2 = 1 - h^2,

    has the mean mu and the covariance Sigma, too, and integrates to one. In one column k is
    Student's t density with four degrees of freedom, scaled to this covariance: normal tails are so
    light that a single row far out decides on mean logarithms. In several columns it is normal;
    the more there are, the wider are the gaps between the kernels, and the normal density N fills
    them. Where a bandwidth is given, normal noise of that size is added instead: a = 1, and the
    kernel is the noise's.

    Parameters
    ----------
    weights
        w, shape (b, S), non-negative with sum 1.
    centres
        m of the cells, shape (S, d), or of the cells of each law, shape (b, S, d).
    covariances
        C of the cells, shape (S, d, d).
    points
        y, shape (k, d); paired (b, d), one for each law.
    smoothing
        Spread, rows, bandwidth.
    paired
        Whether each law is evaluated at its own point alone.
    scales
        Sigma in the kernels and in the normal density, shape (b, d, d); default the covariances of
        the laws.

    Returns
    -------
    values : (b, k), or (b, 1) if paired; minus infinity where a density is below any number
    """
    (b, size), d = weights.shape, covariances.shape[1]
    result = np.empty((b, 1 if paired else len(points)))
    columns = max(_HELD // (size * d), 1)
    rows = max(_HELD // (size * d * min(columns, result.shape[1] or 1)), 1)
    for start in range(0, b, rows):
        here = slice(start, start + rows)
        mixture = _Mixture.of(
            weights[here],
            centres if centres.ndim == 2 else centres[here],
            covariances,
            smoothing,
            None if scales is None else scales[here],
        )
        if paired:
            result[here] = mixture.log_density(points[here][:, None])
            continue
        for first in range(0, len(points), columns):
            there = slice(first, first + columns)
            result[here, there] = mixture.log_density(points[None, there])
    return result


def moments(weights: Array, centres: Array, covariances: Array) -> tuple[Array, Array]:
    """Means and covariances of laws on cells, shapes (b, d) and (b, d, d); as `log_density`."""
    each = np.broadcast_to(centres, (*weights.shape, centres.shape[-1]))
    mean = np.einsum("bs,bsd->bd", weights, each)
    gap = each - mean[:, None]
    between = np.einsum("bs,bsi,bsj->bij", weights, gap, gap, optimize=True)
    return mean, between + np.tensordot(weights, covariances, 1)


@dataclass(frozen=True, eq=False)
class _Mixture:
    """Components of several laws, one after the other, and one normal density of each.

    Attributes
    ----------
    law
        Which law each component belongs to, ascending from 0 on, shape (P,).
    starts
        First component of each law, shape (b,).
    logs
        Logarithms of the components' weights, shape (P,).
    means, covariances
        Of the components, shapes (P, d) and (P, d, d).
    share
        Of the one normal density of the law, shape (b,).
    mean, covariance
        Of that density, shapes (b, d) and (b, d, d).
    degrees
        Degrees of freedom of the components; None of normal ones.
    """

    law: Array
    starts: Array
    logs: Array
    means: Array
    covariances: Array
    share: Array
    mean: Array
    covariance: Array
    degrees: float | None

    @classmethod
    def of(
        cls,
        weights: Array,
        centres: Array,
        covariances: Array,
        smoothing: Smoothing,
        scales: Array | None,
    ) -> "_Mixture":
        law, cell = np.nonzero(weights)
        mean, own = moments(weights, centres, covariances)
        scale = own if scales is None else scales
        shrinkage, kernel = smoothing.kernels(weights, scale)
        centre = centres[cell] if centres.ndim == 2 else centres[law, cell]
        return cls(
            law,
            np.searchsorted(law, np.arange(len(weights))),
            np.log(weights[law, cell]),
            mean[law] + shrinkage[law, None] * (centre - mean[law]),
            (shrinkage**2)[law, None, None] * covariances[cell] + kernel[law],
            1.0 - shrinkage ** (mean.shape[1] - 1),
            mean,
            scale + smoothing.floor,
            smoothing.degrees,
        )

    def log_density(self, points: Array) -> Array:
        """Of each law at points (1, k, d), or at its own (b, 1, d): shape (b, k)."""
        each = points if len(points) == 1 else points[self.law]
        gap = each - self.means[:, None]
        logs = self.logs[:, None] + _log_kernel(gap, self.covariances, self.degrees)
        top = np.maximum.reduceat(logs, self.starts)
        top = np.where(np.isfinite(top), top, 0.0)
        sums = np.add.reduceat(np.exp(logs - top[self.law]), self.starts)
        with np.errstate(divide="ignore"):
            result = np.log(sums) + top
            if not self.share.any():
                return result
            logs = np.log1p(-self.share)[:, None], np.log(self.share)[:, None]
        normal = _log_kernel(points - self.mean[:, None], self.covariance, None)
        return np.logaddexp(logs[0] + result, logs[1] + normal)


def _log_kernel(gap: Array, covariances: Array, degrees: float | None) -> Array:
    """Logarithms of centred t or normal densities at gaps (P, k, d), shape (P, k)."""
    white, determinant = _whitened(gap, covariances)
    d, half = gap.shape[2], 0.5 * determinant[:, None]
    if degrees is None:
        return -0.5 * (white + d * np.log(2.0 * np.pi)) - half
    power, free = 0.5 * (degrees + d), degrees - 2.0  # times which the covariance is the scale's
    unit = gammaln(power) - gammaln(0.5 * degrees) - 0.5 * d * np.log(free * np.pi)
    return unit - half - power * np.log1p(white / free)


def _whitened(gap: Array, covariances: Array) -> tuple[Array, Array]:
    """Squared Mahalanobis lengths (P, k) of gaps (P, k, d), and log determinants (P,).

    The Cholesky decompositions of many small matrices at once, entry by entry.
    """
    d = gap.shape[2]
    factor = np.zeros((d, d, len(covariances)))
    length, log = np.zeros(gap.shape[:2]), np.zeros(len(covariances))
    white = np.empty((d, *gap.shape[:2]))
    least = np.finfo(np.float64).eps
    for i in range(d):
        for j in range(i):
            entry = covariances[:, i, j] - (factor[i, :j] * factor[j, :j]).sum(axis=0)
            factor[i, j] = entry / factor[j, j]
        own = covariances[:, i, i]
        square = np.maximum(own - (factor[i, :i] ** 2).sum(axis=0), least * own)
        factor[i, i] = np.sqrt(square)
        rest = gap[:, :, i] - np.einsum("lp,lpk->pk", factor[i, :i], white[:i])
        with np.errstate(over="ignore"):
            white[i] = np.clip(rest / factor[i, i][:, None], -_FARTHEST, _FARTHEST)
        length += white[i] ** 2
        log += np.log(square)
    return length, log
