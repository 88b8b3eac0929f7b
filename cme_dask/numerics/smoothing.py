"""Densities against the Lebesgue measure: each cell of a law spread out as a normal one."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.spatial import KDTree

Array = Any

_HELD = 1 << 20  # numbers at once


def bandwidths(spread: Array, rows: int) -> Array:
    r"""Silverman's rule, :math:`h_j = \sigma_j (4 / ((d + 2) n))^{1 / (d + 4)}`.

    Parameters
    ----------
    spread
        Standard deviations sigma that the density is to resolve, shape (d,).
    rows
        n.

    Notes
    -----
    Source: Silverman (1986), Density Estimation, (4.14).
    """
    d = len(spread)
    return np.asarray(spread * (4.0 / ((d + 2) * rows)) ** (1.0 / (d + 4)))


@dataclass(frozen=True, eq=False)
class Normals:
    r"""A normal density for each cell: the mean of its rows, and their covariance widened.

    .. math:: p_s = N(m_s, C_s + \mathrm{diag}(h_j^2 + (\delta_s \sigma_j)^2))

    with bandwidths h and the distance :math:`\delta_s` of m_s to the nearest other mean, in
    standard deviations :math:`\sigma`: neighbouring cells overlap, whatever their size. A mixture
    of them with the weights of a law integrates to one.

    Attributes
    ----------
    means
        m, shape (S, d).
    factors
        Cholesky factors of the covariances, shape (S, d, d).
    """

    means: Array
    factors: Array

    @classmethod
    def of(cls, means: Array, covariances: Array, masses: Array, bandwidth: Array) -> "Normals":
        """From what is known of the cells, see :class:`cme_dask.numerics.cells.Cells`.

        Parameters
        ----------
        means, covariances, masses
            Of the cells, shapes (S, d), (S, d, d), (S,).
        bandwidth
            h, positive, shape (d,).
        """
        centre = masses @ means
        spread = np.sqrt(masses @ (means - centre) ** 2)
        scale = np.where(spread > 0.0, spread, 1.0)
        gap = np.zeros(len(means))
        if len(means) > 1:
            gap = KDTree(means / scale).query(means / scale, k=2)[0][:, 1]
        widened = bandwidth**2 + (gap[:, None] * spread) ** 2
        diagonal = np.eye(means.shape[1]) * widened[:, None, :]
        return cls(means, np.linalg.cholesky(covariances + diagonal))

    def log_density(self, y: Array) -> Array:
        """Log p_s(y_j), shape (S, k), at points y (k, d)."""
        d = y.shape[1]
        found = np.empty((len(self.means), len(y)))
        logs = np.log(np.diagonal(self.factors, axis1=1, axis2=2)).sum(axis=1)
        step = max(_HELD // max(len(y) * d, 1), 1)
        for start in range(0, len(found), step):
            here = slice(start, start + step)
            gap = y[None] - self.means[here, None]
            white = np.matmul(gap, self._inverse_transposed[here])
            found[here] = -0.5 * (white * white).sum(axis=2) - logs[here, None]
        return found - 0.5 * d * np.log(2.0 * np.pi)

    @cached_property
    def _inverse_transposed(self) -> Array:
        return np.ascontiguousarray(np.swapaxes(np.linalg.inv(self.factors), 1, 2))

    def log_mixture(self, weights: Array, y: Array, paired: bool) -> Array:
        """Logarithm of the mixtures' densities, shape (b, k) of weights (b, S) and points (k, d).

        ``paired``: of mixture i at point i alone, shape (b, 1). Minus infinity where a density
        underflows.
        """
        logs = self.log_density(y)
        top = logs.max(axis=0)
        parts = np.exp(logs - top)
        sums = np.einsum("bs,sb->b", weights, parts)[:, None] if paired else weights @ parts
        with np.errstate(divide="ignore"):
            return np.log(sums) + (top[:, None] if paired else top)
