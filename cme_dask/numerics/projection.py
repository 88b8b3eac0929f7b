"""From a signed density ratio on a support to a law: L2 projection, and clipping to compare."""

from typing import Any

import numpy as np

from cme_dask.errors import DataError

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
