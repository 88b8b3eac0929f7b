"""Eleven conditional laws that are known: draws, exact quantiles and densities.

X is uniform but where it is said to be normal; e is standard normal.

- ``heteroscedastic``: Y = sin(2 X) + (0.1 + 0.3 |X|) e, X in (-2, 2)
- ``bimodal``, ``skewed``: those of :mod:`benchmarks.coverage`
- ``tails``: Y = 2 sin(X) + 0.5 t, X in (-2, 2), t Student's with 2 degrees of freedom
- ``rain``: Y = 0 with probability 1 / (1 + exp(0.5 + X)), else exp(X / 2) times a gamma variable of
  shape 2, X in (-2, 2)
- ``counts``: Poisson of mean exp(0.5 + 0.8 X), X in (-1, 2)
- ``bounded``: Beta(1 + exp(X), 1 + exp(-X)), X in (-2, 2)
- ``jump``: Y = 2 (X > 0.2) + 0.3 e, X in (-1, 1)
- ``friedman``: Y = 10 sin(pi X1 X2) + 20 (X3 - 1/2)^2 + 10 X4 + 5 X5 + e, ten columns in (0, 1)
- ``three-of-twenty``: Y = 2 sin(1.5 X1) + X2 X3 + 0.5 e, twenty normal columns
- ``five``: five normal Y of correlation 1/2, means sin(pi X1), X2^2, X1 X3, cos(pi X3), X2 and
  standard deviation 0.3 + 0.2 |X1|, three columns in (-1, 1)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.special import betaincinv, betaln, expit, gammaincinv, ndtr, ndtri
from scipy.stats import poisson

from benchmarks.coverage import SCENARIOS

Array = Any

_HALVINGS = 60  # of an interval: to rounding
_NORMAL = 0.5 * np.log(2.0 * np.pi)


@dataclass(frozen=True)
class Truth:
    """A law of (X, Y) whose conditional law is known.

    Attributes
    ----------
    name
        Of the law.
    draw_x
        ``draw_x(rng, n)``: rows of X, shape (n, d).
    quantile
        ``quantile(x, u, j)``: of column j of Y given X = x, at levels u (n, k), shape (n, k).
    log_pdf
        ``log_pdf(x, y)``: logarithm of the joint density at y (n, columns), shape (n,); None where
        Y has none.
    columns
        Of Y.
    correlation
        Of any two normal scores of Y given X.
    drawn
        ``drawn(n, seed)``: x and y, of a law that is drawn elsewhere.
    """

    name: str
    draw_x: Callable[[np.random.Generator, int], Array]
    quantile: Callable[[Array, Array, int], Array]
    log_pdf: Callable[[Array, Array], Array] | None = None
    columns: int = 1
    correlation: float = 0.0
    drawn: Callable[[int, int], tuple[Array, Array]] | None = None

    def draw(self, n: int, seed: int) -> tuple[Array, Array]:
        """Rows x (n, d) and y (n, columns)."""
        if self.drawn is not None:
            return self.drawn(n, seed)
        rng = np.random.default_rng([seed, *self.name.encode()])
        x = self.draw_x(rng, n)
        common, own = rng.standard_normal((n, 1)), rng.standard_normal((n, self.columns))
        scores = np.sqrt(self.correlation) * common + np.sqrt(1.0 - self.correlation) * own
        levels = ndtr(scores)
        y = [self.quantile(x, levels[:, j : j + 1], j) for j in range(self.columns)]
        return x, np.concatenate(y, axis=1)


def _uniform(low: float, high: float, d: int, rng: np.random.Generator, n: int) -> Array:
    return rng.uniform(low, high, (n, d))


def _gaussian(d: int, rng: np.random.Generator, n: int) -> Array:
    return rng.standard_normal((n, d))


def _normal(
    name: str,
    draw_x: Callable[[np.random.Generator, int], Array],
    mean: Callable[[Array], Array],
    std: Callable[[Array], Array],
    columns: int = 1,
    correlation: float = 0.0,
) -> Truth:
    """Y given x is normal, of equal correlations, with means (n, columns) and deviations (n, 1)."""
    root = np.linalg.cholesky(
        correlation + (1.0 - correlation) * np.eye(columns)
    )  # of the correlation matrix

    def quantile(x: Array, u: Array, j: int) -> Array:
        return mean(x)[:, j : j + 1] + std(x) * ndtri(u)

    def log_pdf(x: Array, y: Array) -> Array:
        z = np.linalg.solve(root, ((y - mean(x)) / std(x)).T).T
        volume = np.log(np.diag(root)).sum() + columns * np.log(std(x)[:, 0])
        return -0.5 * (z**2).sum(axis=1) - columns * _NORMAL - volume

    return Truth(name, draw_x, quantile, log_pdf, columns, correlation)


def _constant(value: float) -> Callable[[Array], Array]:
    return lambda x: np.full((len(x), 1), value)


def _bimodal() -> Truth:
    std = 0.3

    def quantile(x: Array, u: Array, j: int) -> Array:
        centre = np.abs(1.0 + x[:, :1])
        low, high = (np.full(u.shape, s) * (centre + 12.0 * std) for s in (-1.0, 1.0))
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            below = 0.5 * (ndtr((middle - centre) / std) + ndtr((middle + centre) / std)) < u
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return 0.5 * (low + high)

    def log_pdf(x: Array, y: Array) -> Array:
        squares = [((y[:, 0] + s * (1.0 + x[:, 0])) / std) ** 2 for s in (-1.0, 1.0)]
        return np.logaddexp(*(-0.5 * s for s in squares)) - np.log(2.0 * std) - _NORMAL

    draw = SCENARIOS["bimodal"].draw
    return Truth("bimodal", partial(_uniform, -2.0, 2.0, 1), quantile, log_pdf, drawn=draw)


def _skewed() -> Truth:
    def quantile(x: Array, u: Array, j: int) -> Array:
        return np.exp(0.8 * x[:, :1] + 0.5 * ndtri(u))

    def log_pdf(x: Array, y: Array) -> Array:
        z = (np.log(y[:, 0]) - 0.8 * x[:, 0]) / 0.5
        return -0.5 * z**2 - _NORMAL - np.log(0.5 * y[:, 0])

    return Truth("skewed", partial(_gaussian, 1), quantile, log_pdf, drawn=SCENARIOS["skewed"].draw)


def _tails() -> Truth:
    def quantile(x: Array, u: Array, j: int) -> Array:
        student = (2.0 * u - 1.0) / np.sqrt(2.0 * u * (1.0 - u))
        return 2.0 * np.sin(x[:, :1]) + 0.5 * student

    def log_pdf(x: Array, y: Array) -> Array:
        t = (y[:, 0] - 2.0 * np.sin(x[:, 0])) / 0.5
        return -1.5 * np.log(2.0 + t**2) - np.log(0.5)

    return Truth("tails", partial(_uniform, -2.0, 2.0, 1), quantile, log_pdf)


def _rain() -> Truth:
    def quantile(x: Array, u: Array, j: int) -> Array:
        dry = expit(-0.5 - x[:, :1])
        wet = np.maximum(u - dry, 0.0) / (1.0 - dry)
        return np.exp(0.5 * x[:, :1]) * gammaincinv(2.0, wet)

    return Truth("rain", partial(_uniform, -2.0, 2.0, 1), quantile)


def _counts() -> Truth:
    def quantile(x: Array, u: Array, j: int) -> Array:
        return poisson.ppf(u, np.exp(0.5 + 0.8 * x[:, :1])).astype(np.float64)

    return Truth("counts", partial(_uniform, -1.0, 2.0, 1), quantile)


def _bounded() -> Truth:
    def quantile(x: Array, u: Array, j: int) -> Array:
        return betaincinv(1.0 + np.exp(x[:, :1]), 1.0 + np.exp(-x[:, :1]), u)

    def log_pdf(x: Array, y: Array) -> Array:
        a, b = np.exp(x[:, 0]), np.exp(-x[:, 0])
        return a * np.log(y[:, 0]) + b * np.log1p(-y[:, 0]) - betaln(1.0 + a, 1.0 + b)

    return Truth("bounded", partial(_uniform, -2.0, 2.0, 1), quantile, log_pdf)


def _friedman(x: Array) -> Array:
    waves = 10.0 * np.sin(np.pi * x[:, 0] * x[:, 1])
    return (waves + 20.0 * (x[:, 2] - 0.5) ** 2 + 10.0 * x[:, 3] + 5.0 * x[:, 4])[:, None]


def _three_of_twenty(x: Array) -> Array:
    return (2.0 * np.sin(1.5 * x[:, 0]) + x[:, 1] * x[:, 2])[:, None]


def _five(x: Array) -> Array:
    a, b, c = x.T
    return np.column_stack([np.sin(np.pi * a), b**2, a * c, np.cos(np.pi * c), b])


TRUTHS: Mapping[str, Truth] = {
    truth.name: truth
    for truth in (
        _normal(
            "heteroscedastic",
            partial(_uniform, -2.0, 2.0, 1),
            lambda x: np.sin(2.0 * x),
            lambda x: 0.1 + 0.3 * np.abs(x),
        ),
        _bimodal(),
        _skewed(),
        _tails(),
        _rain(),
        _counts(),
        _bounded(),
        _normal(
            "jump",
            partial(_uniform, -1.0, 1.0, 1),
            lambda x: 2.0 * (x > 0.2),
            _constant(0.3),
        ),
        _normal("friedman", partial(_uniform, 0.0, 1.0, 10), _friedman, _constant(1.0)),
        _normal("three-of-twenty", partial(_gaussian, 20), _three_of_twenty, _constant(0.5)),
        _normal(
            "five",
            partial(_uniform, -1.0, 1.0, 3),
            _five,
            lambda x: 0.3 + 0.2 * np.abs(x[:, :1]),
            columns=5,
            correlation=0.5,
        ),
    )
}
"""By their names."""
