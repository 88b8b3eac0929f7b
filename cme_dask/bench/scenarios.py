r"""Samples whose conditional laws are known: what models are judged on.

Four are the joint paper's three-dimensional normal (section 7) at correlations of (Y1, Y2), (Y1, X)
and (Y2, X); its "high" (0.7, 0.7, -0.7) is no covariance matrix. Two are not normal:

- ``bimodal``: X uniform on (-2, 2), Y = s (1 + X) + 0.3 e with s = +-1 and e standard normal;
- ``skewed``: X standard normal, Y = exp(0.8 X + 0.5 e).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm

from cme_dask.storage.generate import Normal3

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
