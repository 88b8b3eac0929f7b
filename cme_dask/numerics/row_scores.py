"""Scores of predictions, row by row: one formula each for metrics and for passes."""

from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

Array = Any

_HELD = 1 << 18  # numbers at once

PIT_LEVELS = tuple(k / 20 for k in range(1, 20))
"""Levels at which distributions of probability integral transforms are compared to uniform."""

LABEL_BINS = 15
"""Bins of the likeliest label's probability."""


def log_losses(chances: Array, codes: Array, least: float = 0.0) -> Array:
    """Minus the logarithms of the probabilities (b, K) of labels (b,); shape (b,).

    See :func:`cme_dask.metrics.log_score`.
    """
    own = chances[np.arange(len(codes)), codes]
    with np.errstate(divide="ignore"):  # a law may exclude a label
        return np.asarray(-np.log(np.maximum(own, least)))


def pinball_losses(quantiles: Array, levels: Array, y: Array) -> Array:
    """Losses of quantiles (b, k) of these levels (k,) at y (b,); shape (b, k).

    See :func:`cme_dask.metrics.pinball`.
    """
    gap = y[:, None] - quantiles
    return np.asarray(gap * (levels - (gap < 0.0)))


def interval_scores(lower: Array, upper: Array, y: Array, level: float) -> Array:
    """Scores of central intervals of this probability; all of one shape.

    See :func:`cme_dask.metrics.interval_score`.
    """
    outside = np.maximum(lower - y, 0.0) + np.maximum(y - upper, 0.0)
    return np.asarray(upper - lower + 2.0 / (1.0 - level) * outside)


def pit_deviations(before: Array, upto: Array, levels: Array) -> Array:
    r"""How far the distribution of a probability integral transform is from uniform.

    .. math:: P(F(y-) + V (F(y) - F(y-)) \le u) - u

    at levels u (k,), for V uniform on (0, 1). With ``before`` = F(y-) and ``upto`` = F(y), shapes
    (b,), no random number is drawn: the mean over rows of true laws is 0, with ties too. Shape
    (b, k), over k: absolute values of means add up to the calibration error.

    Source: Czado, Gneiting and Held (2009), Biometrics 65, 1254, (2) and (3).
    """
    jump = (upto - before)[:, None]
    rise = levels - before[:, None]
    steps = np.where(rise >= jump, 1.0, 0.0)
    part = np.divide(rise, jump, out=steps, where=jump > 0.0)
    return np.asarray((np.clip(part, 0.0, 1.0) - levels) / len(levels))


def label_places(chances: Array, codes: Array, bins: int = LABEL_BINS) -> Array:
    """Whether the likeliest label's probability is in a bin, and the label seen; (b, 2 bins)."""
    member = _bins_of(chances, bins) == np.arange(bins)
    hits = chances.argmax(axis=1) == codes
    return np.concatenate([member, member & hits[:, None]], axis=1)


def _bins_of(chances: Array, bins: int) -> Array:
    """The bin of the likeliest label's probability, shape (b, 1)."""
    top = chances.max(axis=1, keepdims=True)
    return np.minimum((top * bins).astype(np.int64), bins - 1)


def label_deviations(chances: Array, codes: Array, bins: int = LABEL_BINS) -> Array:
    """Probability of the likeliest label minus whether it was seen, in its bin; shape (b, bins).

    Absolute values of means over rows add up to the expected calibration error.
    """
    top, hits = chances.max(axis=1), chances.argmax(axis=1) == codes
    return np.asarray((_bins_of(chances, bins) == np.arange(bins)) * (top - hits)[:, None])


def energy_scores(weights: Array, points: Array, y: Array, *, fair: bool = False) -> Array:
    """Energy scores at y (b, d) of atoms (S, d), or (b, S, d), of weights (b, S); shape (b,).

    See :func:`cme_dask.metrics.energy_score`. ``fair``: the atoms are independent draws from a
    law, whose score is estimated without bias; the mean distance of draws then leaves out pairs of
    a draw with itself.
    """
    scores = np.empty(len(y))
    if points.ndim == 2:
        spread = np.zeros(len(y))
        size = len(points)
        step = max(_HELD // max(size, 1), 1)
        # Distances between atoms serve all rows: blocks of them come first.
        for start in range(0, size, step):
            some = slice(start, start + step)
            apart = cdist(points, points[some])
            spread += np.einsum("bs,bs->b", weights @ apart, weights[:, some])
        for start in range(0, len(y), step):
            here = slice(start, start + step)
            scores[here] = np.einsum("bs,bs->b", weights[here], cdist(y[here], points))
    else:
        spread = np.empty(len(y))
        for i, (w, atoms) in enumerate(zip(weights, points, strict=True)):
            step = max(_HELD // max(len(atoms), 1), 1)
            scores[i] = w @ cdist(atoms, y[[i]])[:, 0]
            spread[i] = sum(
                w @ cdist(atoms, atoms[start : start + step]) @ w[start : start + step]
                for start in range(0, len(atoms), step)
            )
    if fair:
        spread = spread / (1.0 - np.einsum("bs,bs->b", weights, weights))
    return np.asarray(scores - 0.5 * spread)


def density_losses(density: Array, grid: Array, y: Array) -> Array:
    """Losses at y (b,) of densities on an ascending grid (G,); shape (b,).

    Densities (b, G) are linear between the points of the grid, those of shape (b, G - 1) constant.
    See :func:`cme_dask.metrics.cde_loss`.
    """
    steps = np.diff(grid)
    inside = (grid[0] <= y) & (y <= grid[-1])
    cell = np.clip(np.searchsorted(grid, y, side="right") - 1, 0, len(steps) - 1)
    rows = np.arange(len(y))
    if density.shape[1] == len(steps):
        square = density**2 @ steps
        there = density[rows, cell]
    else:
        left, right = density[:, :-1], density[:, 1:]
        square = (left**2 + left * right + right**2) @ (steps / 3.0)  # exact for linear pieces
        share = (y - grid[cell]) / steps[cell]
        there = (1.0 - share) * density[rows, cell] + share * density[rows, cell + 1]
    return np.asarray(square - 2.0 * np.where(inside, there, 0.0))
