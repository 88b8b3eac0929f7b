"""Non-negative by one inequality (joint paper, (20)): a weighted l1 ball, in closed form."""

import time
from typing import Any

import numpy as np

from cme_dask.numerics.outcome import Outcome
from cme_dask.numerics.problem import JointProblem

Array = Any

_TOL = 1e-10


def solve_certified(
    problem: JointProblem, weight_plus: Array, weight_minus: Array
) -> tuple[Array, Outcome]:
    r"""Minimise <A, G> + <D, G^2> / 2 subject to <w+, G+> + <w-, G-> <= 1.

    Where w+ is what a unit of G_ji > 0 can take from g, and w- of G_ji < 0, the left side bounds
    1 - g everywhere, so g >= 0. The sign of G is that of -A, the multiplier t >= 0 of the
    inequality is one number, and

    .. math:: G = -\mathrm{sign}(A) \max(|A| - t w, 0) / D.

    The left side falls in t, piecewise linearly with breaks at |A| / w: sorting them gives t.

    Parameters
    ----------
    problem
        A and D, in the centred basis; shapes (k_Y, k_X).
    weight_plus, weight_minus
        w+ and w-, non-negative, of the same shape or numbers.

    Returns
    -------
    coef : (k_Y, k_X)
    outcome : Outcome
        ``kkt_residual`` is the largest violation of stationarity, relative to max |A|, and of
        the inequality and its complementarity.
    """
    begin = time.perf_counter()
    linear, quadratic = problem.linear, problem.quadratic
    weight = np.where(linear < 0.0, weight_plus, weight_minus)
    magnitude, t = _shrunk(np.abs(linear), weight, quadratic)
    coef = np.copysign(magnitude, -linear)
    seconds = time.perf_counter() - begin
    return coef, _outcome(problem, coef, weight, t, seconds)


def _shrunk(size: Array, weight: Array, quadratic: Array) -> tuple[Array, float]:
    """|G| = max(size - t w, 0) / D and t with <w, |G|> = 1, or t = 0 if that is less without it.

    Where D is small, |G| is what remains of a cancellation: it is written with differences of
    breaks, which are positive, so that <w, |G|> = 1 holds to rounding whatever the range of D.
    """
    magnitude = size / quadratic
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        breaks = size / weight
    bounding = np.isfinite(breaks) & (weight > 0.0)
    if (weight * magnitude)[bounding].sum() <= 1.0:
        return magnitude, 0.0
    magnitude[bounding] = 0.0
    # Alone, an entry would need t = its break - D / w^2; with the others t is no less, and those
    # with smaller breaks, most of them, are zero.
    bounding[bounding] = _reaching(breaks[bounding], weight[bounding], quadratic[bounding])
    breaks, w, d = breaks[bounding], weight[bounding], quadratic[bounding]
    order = np.argsort(breaks)[::-1]
    slope = np.cumsum((w * w / d)[order])  # -d/dt of the left side below each break
    drop = -np.diff(breaks[order], append=0.0)
    left = np.cumsum(drop * slope)  # the left side at the next break, and at t = 0 at last
    last = min(int(np.searchsorted(left, 1.0)), len(left) - 1)
    pivot = breaks[order[last]]
    below = (1.0 - (left[last - 1] if last else 0.0)) / slope[last]
    magnitude[bounding] = np.maximum((breaks - pivot) + below, 0.0) * w / d
    return magnitude, max(float(pivot - below), 0.0)


def _reaching(breaks: Array, weight: Array, quadratic: Array) -> Array:
    """Entries whose breaks are not below what t is at least."""
    with np.errstate(over="ignore"):
        return breaks >= (breaks - quadratic / weight / weight).max()


def _outcome(
    problem: JointProblem, coef: Array, weight: Array, t: float, seconds: float
) -> Outcome:
    linear, quadratic = problem.linear, problem.quadratic
    scale = float(np.abs(linear).max(initial=0.0)) or 1.0
    gradient = linear + quadratic * coef
    # Stationarity: gradient = -t w sign(G) where G is not zero, and within [-t w, t w] where it is.
    active = coef != 0.0
    stationarity = np.where(
        active,
        np.abs(gradient + t * weight * np.sign(coef)),
        np.maximum(np.abs(gradient) - t * weight, 0.0),
    )
    left = float((weight * np.abs(coef)).sum())
    primal = max(left - 1.0, 0.0)
    dual = float(stationarity.max(initial=0.0)) / scale
    complementarity = t * abs(left - 1.0) / scale
    value = problem.objective(coef)
    bound = -t - float((np.maximum(np.abs(linear) - t * weight, 0.0) ** 2 / quadratic).sum()) / 2
    residual = max(primal, dual, complementarity)
    return Outcome(
        solver="closed form",
        status="optimal" if residual <= _TOL else "inaccurate",
        primal_residual=primal,
        dual_residual=dual,
        kkt_residual=residual,
        gap=(value - bound) / max(1.0, abs(value)),
        iterations=0,
        seconds=seconds,
        tol=_TOL,
    )
