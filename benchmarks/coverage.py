"""The coverage of intervals, on samples whose laws are known.

Samples whose conditional laws are known: what models are judged on.

Four are the joint paper's three-dimensional normal (section 7) at correlations of (Y1, Y2), (Y1, X)
and (Y2, X); its "high" (0.7, 0.7, -0.7) is no covariance matrix. Two are not normal:

- ``bimodal``: X uniform on (-2, 2), Y = s (1 + X) + 0.3 e with s = +-1 and e standard normal;
- ``skewed``: X standard normal, Y = exp(0.8 X + 0.5 e).
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import norm

from cme_dask.data.generate import Normal3
from cme_dask.errors import RankWarning, ToleranceWarning
from cme_dask.estimators.joint import JointDistribution
from cme_dask.numerics.crossval import interval_factor

# Samples whose conditional laws are known: what models are judged on


Array = Any

_SHIFTS = (0.5, 0.6, 0.7)
_LEVELS = (-1.0, 0.0, 1.0)
_SKEWED_SPREAD = float(np.hypot(0.8, 0.5))
_QUANTILES = tuple(np.exp(_SKEWED_SPREAD * norm.ppf([0.25, 0.5, 0.9])))


@dataclass(frozen=True)
class Scenario:
    """A law of (X, Y), events of Y, and their true probabilities given X.

    Attributes
    ----------
    name
        Of the scenario.
    draw
        ``draw(n, seed)``: x and y, shapes (n, d_X) and (n, d_Y).
    events
        ``events(y)``: indicators t(y) of (40), shape (n, q); the last is the sure event.
    truth
        ``truth(x)``: E[t(Y) | X = x], shape (n, q).
    """

    name: str
    draw: Callable[[int, int], tuple[Array, Array]]
    events: Callable[[Array], Array]
    truth: Callable[[Array], Array]


def _with_certain(columns: list[Array]) -> Array:
    return np.column_stack([*columns, np.ones(len(columns[0]))]).astype(np.float64)


def _normal(name: str) -> Scenario:
    law = Normal3(name)

    def draw(n: int, seed: int) -> tuple[Array, Array]:
        return next(law.batches(n, seed))

    def events(y: Array) -> Array:
        return _with_certain([y[:, 0] <= y[:, 1] - shift for shift in _SHIFTS])

    def truth(x: Array) -> Array:
        return _with_certain([law.probability(x[:, 0], shift) for shift in _SHIFTS])

    return Scenario(name, draw, events, truth)


def _bimodal() -> Scenario:
    def draw(n: int, seed: int) -> tuple[Array, Array]:
        rng = np.random.default_rng([seed, 1])
        x = rng.uniform(-2.0, 2.0, n)
        sign = rng.choice([-1.0, 1.0], n)
        return x[:, None], (sign * (1.0 + x) + 0.3 * rng.standard_normal(n))[:, None]

    def truth(x: Array) -> Array:
        centre = 1.0 + x[:, 0]
        both = [
            0.5 * (norm.cdf((t - centre) / 0.3) + norm.cdf((t + centre) / 0.3)) for t in _LEVELS
        ]
        return _with_certain(both)

    return Scenario(
        "bimodal", draw, lambda y: _with_certain([y[:, 0] <= t for t in _LEVELS]), truth
    )


def _skewed() -> Scenario:
    def draw(n: int, seed: int) -> tuple[Array, Array]:
        rng = np.random.default_rng([seed, 2])
        x, e = rng.standard_normal((2, n))
        return x[:, None], np.exp(0.8 * x + 0.5 * e)[:, None]

    def truth(x: Array) -> Array:
        return _with_certain([norm.cdf((np.log(t) - 0.8 * x[:, 0]) / 0.5) for t in _QUANTILES])

    return Scenario(
        "skewed", draw, lambda y: _with_certain([y[:, 0] <= t for t in _QUANTILES]), truth
    )


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (*map(_normal, ("low", "medium", "high", "strong")), _bimodal(), _skewed())
}

# How often intervals around conditional expectations hold the truth, and why they miss it


LEVEL = 0.95
"""Level of the intervals."""

_POINTS = 20
_FOLDS = 10


@dataclass(frozen=True)
class Coverage:
    """Fits of independent samples of a known law, and how often their intervals are right.

    Attributes
    ----------
    scenario
        The law.
    rows
        Rows of each sample.
    kernels
        ``"learned"`` or ``"median"``.
    fits
        Number of samples.
    """

    scenario: str
    rows: int
    kernels: str
    fits: int

    def prepare(self) -> Callable[[], Callable[[], dict[str, Any]]]:
        """Nothing is made before."""
        return self._run

    def _run(self) -> Callable[[], dict[str, Any]]:
        law = SCENARIOS[self.scenario]
        x = np.sort(law.draw(4 * _POINTS, 12345)[0], axis=0)[2::4]
        truth = law.truth(x)[:, :-1]
        given = None if self.kernels == "learned" else self.kernels
        functions = {f"event{j}": partial(_event, law.events, j) for j in range(truth.shape[1])}
        values, errors = [], []
        for seed in range(self.fits):
            fit = JointDistribution(kernel_x=given, kernel_y=given, n_folds=_FOLDS, residual=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RankWarning)
                warnings.simplefilter("ignore", ToleranceWarning)
                fit.fit(*law.draw(self.rows, seed), functions=functions, scheduler="synchronous")
            value, error = fit.expect(list(functions), x, return_std=True)
            values.append(value)
            errors.append(error)
        return partial(coverage, np.array(values), np.array(errors), truth, _FOLDS)


def coverage(values: Array, errors: Array, truth: Array, folds: int) -> dict[str, Any]:
    """What share of intervals holds the truth, and what holds the mean of all estimates.

    Parameters
    ----------
    values, errors
        Estimates and standard errors of independent samples, shapes (R, n, q).
    truth
        Shape (n, q).
    folds
        Of the standard errors.

    Returns
    -------
    dict
        ``two``: coverage of the truth by 2 standard errors; ``t``: by the t quantile; ``lowest``:
        the same at the worst point; ``variance``: coverage of the mean of all estimates by the t
        quantile, which is what intervals without bias would have; ``bias``: the root mean square of
        the bias over that of the standard deviation.
    """
    factor, count = interval_factor(folds, LEVEL), len(values)
    off = np.abs(values - truth)
    hit = off <= factor * errors
    mean = values.mean(axis=0)
    # An estimate is part of the mean: its distance from it is too small by this factor.
    own = np.abs(values - mean) * np.sqrt(count / (count - 1))
    return {
        "two": float((off <= 2.0 * errors).mean()),
        "t": float(hit.mean()),
        "lowest": float(hit.mean(axis=0).min()),
        "variance": float((own <= factor * errors).mean()),
        "bias": float(np.sqrt(((mean - truth) ** 2).mean() / values.var(axis=0, ddof=1).mean())),
    }


def _event(events: Callable[[Array], Array], j: int, y: Array) -> Array:
    return events(y)[:, j]
