r"""Errors of the sum rule and of Bayes' rules against closed forms of a linear Gaussian model.

x is standard normal, y = x + 0.5 e, and under the prior x has mean 0.5 and deviation 0.7. Errors
are squared distances of embeddings of laws, exact up to rounding: those of Gaussian laws have
closed forms, also outside the span of the pivots. Those of posterior laws are averaged over the law
of y under the prior.
"""

import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import zarr
from scipy.stats import norm
from zarr.storage import LocalStore, WrapperStore

from benchmarks.rules import NOISE, PRIOR_MEAN, PRIOR_SPREAD
from cme_dask import PivotedCholesky, kernels, open_sample, operators
from cme_dask.errors import RankWarning
from cme_dask.numerics.embedding import SCHEDULES
from cme_dask.passes.driver import RunOptions

Array = Any
Result = dict[str, Any]

LENGTH = 0.6
"""Length scale of the Gaussian kernel of x and of y."""

RULES = ("sum-rule", "capped-rank", "bayes", "kernel-bayes", "reweighting")
"""The sum rule, the same on few pivots, `operators.bayes`, `kernel_bayes` and `reweighting`."""

FEW = 16
"""Pivots of the rule of capped rank; the others have 39."""

_TOL = 1e-10  # trace error of the pivots
_LEAST = 1e-3  # as of `operators.bayes`
_NODES = 24  # of quadrature, in each direction
_STEP = 1e-20  # of complex derivatives
_BLOCK = 1 << 20
_CHUNK = 1 << 17


def reg_of(rule: str, n: int) -> float:
    """The ridge of n rows, where k(x, x) = 1: 0.1 / sqrt(n) for the sum rule, 1 / n for Bayes'.

    These are the schedules of Caponnetto and De Vito (2007), theorem 1, for eigenvalues that fall
    exponentially (b = infinity), n^(-1 / c): of the smoothest targets (c = 2), and of those about
    which nothing is known but that they lie in the space (c = 1). The expected rate is 1 / n for
    both, up to logarithms.
    """
    return SCHEDULES["finite-rank"](n) if rule in ("sum-rule", "capped-rank") else 1.0 / n


@cache
def space(few: bool = False) -> operators.Space:
    """The space of x and of y: pivots among normal quantiles, the same for all numbers of rows."""
    rows = 1.5 * norm.ppf((np.arange(2000) + 0.5) / 2000)[:, None]
    pivots = PivotedCholesky(kernels.Gaussian(LENGTH), tol=_TOL, max_rank=FEW if few else None)
    with warnings.catch_warnings(action="ignore", category=RankWarning):
        return operators.Space.of(pivots.fit(rows, scheduler="synchronous"))


@dataclass(frozen=True)
class Truth:
    """Laws N(mean, variance) with weights, which embeddings are compared with.

    Attributes
    ----------
    given
        Observations y, shape (B, 1), of posterior laws of x; none of the law of y.
    means, weights
        Shape (B,).
    variance
        Of all laws.
    """

    given: Array
    means: Array
    weights: Array
    variance: float

    @classmethod
    def of(cls, rule: str) -> "Truth":
        """The laws that a rule estimates.

        For `operators.bayes` the kernel of y stands for a point, which adds its variance to that of
        the noise.
        """
        variance_y = PRIOR_SPREAD**2 + NOISE**2
        if rule in ("sum-rule", "capped-rank"):
            return cls(np.zeros((0, 1)), np.array([PRIOR_MEAN]), np.ones(1), variance_y)
        nodes, weights = quadrature(40)
        noise = NOISE**2 + (LENGTH**2 if rule == "bayes" else 0.0)
        gain = PRIOR_SPREAD**2 / (PRIOR_SPREAD**2 + noise)
        y = np.sqrt(variance_y) * nodes
        return cls(
            PRIOR_MEAN + y[:, None], PRIOR_MEAN + gain * y, weights, (1 - gain) * PRIOR_SPREAD**2
        )

    def squared_error(self, coef: Array, basis: operators.Space) -> float:
        """Mean squared distance of embeddings, of coordinates (B, m), to those of the laws."""
        spread = LENGTH**2 + self.variance
        away = basis.basis.points[:, 0] - self.means[:, None]
        values = LENGTH / np.sqrt(spread) * np.exp(-(away**2) / (2.0 * spread))
        exact = np.linalg.solve(basis.basis.factor, values.T).T
        own = LENGTH / np.sqrt(LENGTH**2 + 2.0 * self.variance)
        return float(self.weights @ ((coef**2).sum(1) - 2.0 * (coef * exact).sum(1) + own))


def quadrature(count: int) -> tuple[Array, Array]:
    """Nodes and weights of the standard normal law."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return nodes, weights / weights.sum()


# What is learned from rows


class CountingStore(WrapperStore[LocalStore]):
    """A store that counts how often chunks are read."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store)
        self.reads: Counter[str] = Counter()

    async def get(self, key: str, *args: Any, **options: Any) -> Any:
        """The value of a key."""
        self.reads[key] += "/c/" in key
        return await super().get(key, *args, **options)

    def passes(self) -> float:
        """Largest number of reads of a chunk since the last call."""
        most = max(self.reads.values(), default=0)
        self.reads.clear()
        return float(most)


def judge(n: int, seed: int) -> dict[str, Result]:
    """The squared errors of all rules of one draw, from a store, with their passes over its rows.

    A rule after the first one takes its own passes and the one that makes the moments.
    """
    result, basis, options = {}, space(), RunOptions("synchronous")
    measure = partial(operators.measure, options=options)
    with tempfile.TemporaryDirectory() as folder:
        store = CountingStore(LocalStore(folder))
        x, y, z = written(store, n, seed)
        store.passes()
        P, Q = measure(open_sample(x, y), basis, basis), measure(z, basis)
        once = store.passes()

        def sum_rule(truth: Truth, reg: float) -> Array:
            return P.conditional_expectation(reg).T(Q.mean()).coef

        def capped(truth: Truth, reg: float) -> Array:
            few = space(few=True)
            E = measure(open_sample(x, y), few, few).conditional_expectation(reg)
            return E.T(measure(z, few).mean()).coef

        def bayes(truth: Truth, reg: float) -> Array:
            E = P.conditional_expectation(reg)
            posterior = operators.bayes(E, Q, open_sample(y), reg=reg, options=options)
            return posterior.T(basis.embed(truth.given)).coef

        def kernel_bayes(truth: Truth, reg: float) -> Array:
            (posterior,) = operators.kernel_bayes(
                open_sample(x, y), Q.mean(), P, reg=reg, reg_posterior=reg**2, options=options
            )
            return posterior.T(basis.embed(truth.given)).coef

        def reweighting(truth: Truth, reg: float) -> Array:
            points = normal_grid(PRIOR_MEAN, PRIOR_SPREAD)
            return operators.reweighting(P.joint_ratio(reg), *points).embed(truth.given).coef

        rules = sum_rule, capped, bayes, kernel_bayes, reweighting
        for name, rule in zip(RULES, rules, strict=True):
            truth, reg = Truth.of(name), reg_of(name, n)
            excess = truth.squared_error(rule(truth, reg), space(rule is capped))
            passes = store.passes() + (0.0 if rule is capped else once)
            result[name] = {"excess": excess, "reg": reg, "passes": passes}
    return result


def written(store: CountingStore, n: int, seed: int) -> tuple[Any, Any, Any]:
    """Stored arrays of rows x, y, and of rows z of the prior, n of each; z as a sample."""
    arrays = [
        zarr.create_array(
            store, name=name, shape=(n, 1), chunks=(min(n, _CHUNK), 1), dtype="float64"
        )
        for name in "xyz"
    ]
    for number, start in enumerate(range(0, n, _BLOCK)):
        rng = np.random.default_rng([seed, n, number])
        x, noise, z = rng.normal(size=(3, min(_BLOCK, n - start), 1))
        blocks = x, x + NOISE * noise, PRIOR_MEAN + PRIOR_SPREAD * z
        for array, block in zip(arrays, blocks, strict=True):
            array[start : start + len(block)] = block
    return arrays[0], arrays[1], open_sample(arrays[2])


# What is expected


class Population:
    """A rule applied to the laws themselves, and its derivatives.

    Parameters
    ----------
    rule
        Its name.
    """

    def __init__(self, rule: str) -> None:
        self.rule, self.truth = rule, Truth.of(rule)
        self.space = space(rule == "capped-rank")
        x, share = normal_grid(0.0, 1.0)
        noise, others = normal_grid(0.0, NOISE)
        z, self.share_z = normal_grid(PRIOR_MEAN, PRIOR_SPREAD)
        y, self.share_y = normal_grid(0.0, np.sqrt(1.0 + NOISE**2))
        X = np.repeat(self.space(x), len(noise), axis=0)
        Y = self.space(np.add.outer(x[:, 0], noise[:, 0]).reshape(-1, 1))
        weighted = np.outer(share, others).reshape(-1, 1) * X
        self.Y, self.Z = self.space(y), self.space(z)
        self.x, self.y = share @ self.space(x), self.share_y @ self.Y
        self.xx, self.xy = weighted.T @ X, weighted.T @ Y
        self.none = np.zeros((2, self.space.rank))
        self.yy = (self.Y.T * self.share_y) @ self.Y
        self.mean, self.second = self.share_z @ self.Z, (self.Z.T * self.share_z) @ self.Z
        if rule == "kernel-bayes":
            self.xyy, self.xyx = (
                np.stack([(weighted * column[:, None]).T @ other for column in Y.T], axis=1)
                for other in (Y, X)
            )

    def learn(self, reg: float, row: Array | None = None, prior: Array | None = None) -> Array:
        """Coordinates (B, m) of the embeddings that the rule gives.

        With N at a row (x, y), shape (2, m), or at a row of the prior, shape (m,): their derivative
        in the share that this row takes of the law.
        """
        x, y = self.none if row is None else row
        z = self.none[0] if prior is None else prior
        of_row, of_prior = (0.0 if each is None else 1j * _STEP for each in (row, prior))

        def mixed(law: Array, values: Array, share: complex) -> Array:
            return law + share * (values - law)

        def of_rows(law: Array, left: Array, right: Array) -> Array:
            return mixed(law, np.outer(left, right), of_row)

        xx, xy, yy = of_rows(self.xx, x, x), of_rows(self.xy, x, y), of_rows(self.yy, y, y)
        mean = mixed(self.mean, z, of_prior)
        ridge, at = reg * np.eye(len(mean)), self.space(self.truth.given)
        if self.rule == "reweighting":
            grid, shares = normal_grid(PRIOR_MEAN, PRIOR_SPREAD)
            points = self.space(grid)
            left = _centred(yy, mixed(self.y, y, of_row), ridge)
            right = _centred(xx, mixed(self.x, x, of_row), ridge)
            ratio = 1.0 + at @ left @ xy.T @ right @ points.T
            weights = shares * np.where(ratio.real > 0.0, ratio, 0.0)
            coef = weights / weights.sum(axis=1, keepdims=True) @ points
        elif self.rule == "kernel-bayes":
            slope = np.linalg.solve(xx + ridge, mean)
            gram, cross = (
                of_rows(np.tensordot(slope, law, 1), (slope @ x) * y, other)
                for law, other in ((self.xyy, y), (self.xyx, x))
            )
            coef = at @ np.linalg.solve(gram @ gram + reg * ridge, gram @ cross)
        else:
            E = np.linalg.solve(xx + ridge, xy)
            coef = (mean @ E)[None]
            if self.rule == "bayes":
                joint = E.T @ mixed(self.second, np.outer(z, z), of_prior)
                density, here = self.Y @ coef[0], y @ coef[0]
                least = _LEAST * (self.space(self.space.basis.points) @ coef[0]).real.max()
                inside = density.real > least
                shares = self.share_y / np.where(inside, density, np.inf)
                own = y if here.real > least else 0.0 * y
                over = of_rows((self.Y.T * shares) @ self.Y, own / here if own.any() else own, y)
                seen = of_rows((self.Y.T * (self.share_y * inside)) @ self.Y, own, own)
                coef = at @ np.linalg.solve(seen + ridge, over @ joint)
        return coef if row is None and prior is None else coef.imag / _STEP

    def squared_error(self, n: int) -> float:
        r"""The squared error to first order in 1 / n: squared bias, and variance.

        .. math:: |T_r(P, Q) - T|^2 + \frac1n \mathrm E_P |\partial T_r(\delta_{xy} - P)|^2
                  + \frac1n \mathrm E_Q |\partial T_r(\delta_z - Q)|^2

        with the rule T_r of the ridge r at the laws of the rows and of the prior.
        """
        reg, (nodes, shares) = reg_of(self.rule, n), quadrature(_NODES)
        total = self.truth.squared_error(self.learn(reg), self.space)
        at_prior = self.space(PRIOR_MEAN + PRIOR_SPREAD * nodes[:, None])
        for own, share in zip(nodes, shares, strict=True):
            of_y = self.space(own + NOISE * nodes[:, None])
            of_x = self.space([[own]])[0]
            for values, other in zip(of_y, shares, strict=True):
                change = self.learn(reg, row=np.stack([of_x, values]))
                total += share * other * self.truth.weights @ (change**2).sum(axis=1) / n
        for values, share in zip(at_prior, shares, strict=True):
            change = self.learn(reg, prior=values)
            total += share * self.truth.weights @ (change**2).sum(axis=1) / n
        return float(total)


def normal_grid(mean: float, deviation: float) -> tuple[Array, Array]:
    """Points (n, 1) and shares of a normal law; sums over such grids are integrals to rounding."""
    z = np.linspace(-8.0, 8.0, 161)
    shares = norm.pdf(z)
    return mean + deviation * z[:, None], shares / shares.sum()


def _centred(gram: Array, mean: Array, ridge: Array) -> Array:
    """The inverse of a Gram matrix with a ridge, orthogonal to the means."""
    projection = np.eye(len(mean)) - np.outer(mean, mean) / (mean @ mean)
    return projection @ np.linalg.solve(projection @ gram @ projection + ridge, projection)
