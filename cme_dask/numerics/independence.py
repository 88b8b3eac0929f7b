r"""Tests of independence and of equal laws from moments: statistics, null laws and sign flips.

In orthonormal bases the covariance operator of x and y is the matrix
:math:`C = \mathrm E[N_Y N_X^T] - c_Y c_X^T`, and the distance of two laws is that of their means
of N. Over n independent rows the squared norm of such a matrix, n |C|^2, has under the null
hypothesis the law of a weighted sum of chi-squares, whose weights are eigenvalues of *centred*
covariances: with those of uncentred ones a test never rejects. Given z, residuals of regressions
on it take the place of N_Y and N_X.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq

from cme_dask.errors import DataError, remedy
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.embedding import inverse_eigenvalues
from cme_dask.numerics.moments import Moments, MomentSums

Array = Any

MIN_FOLDS = 6
"""Folds with rows that sign flips need: the smallest p-value of F folds is 2^(1 - F)."""

MORE_FOLDS = f"raise {remedy('n_folds', '--folds')}"
_EXACT_FOLDS = 14  # of so many all sign flips are enumerated
_FUNCTION_OF_Z = 1e-8  # of its variance: less than that is left of a function of z
_SMALLEST_SPREAD = 0.1  # of a null law, over that of the mixture of estimated eigenvalues
_LUMPED = 1e-9  # of the third cumulant, in that of one chi-square for the smallest weights
_DIGITS = 1e-10  # relative change at which nodes of the integral are no longer doubled
_MOST_NODES = 1 << 12
_NODES_AT_ONCE = 1 << 20  # numbers
_REACH = 6.0  # of the contour: sinh(6) = 200 standard deviations


# The null law: a weighted sum of chi-squares


def mixture_tail(weights: Array, value: float) -> float:
    r"""Probability that a weighted sum of chi-squares is above a value.

    .. math:: P\Big(\sum_i w_i Z_i^2 > q\Big), \quad Z_i \sim N(0, 1) \text{ independent}

    Parameters
    ----------
    weights
        w >= 0, shape (m,), at least one of them positive.
    value
        q.

    Notes
    -----
    Inverts the moment generating function with K(s) = -1/2 sum log(1 - 2 s w) along a parabola
    through the saddle point of exp(K(s) - s q) / s (Rice, 1980, SIAM Journal on Scientific and
    Statistical Computing 1, 438): the integrand has no oscillation to cancel, so that far tails
    have a relative error near rounding too. Many tiny weights are one chi-square with
    their mean and variance.
    """
    if value <= 0.0:
        return 1.0
    weights = np.sort(weights[weights > 0.0])[::-1]
    top = weights[0]
    scales, freedom = _lumped(weights / top)
    q, mean = value / top, freedom @ scales
    above = q >= mean

    def slope(s: float) -> float:
        return float(freedom @ (scales / (1.0 - 2.0 * s * scales)) - q - 1.0 / s)

    if above:
        spread = np.sqrt(freedom @ scales**2)
        saddle = brentq(slope, 0.1 / (q + spread), 0.5 - 1e-3 / q, rtol=1e-6)
    else:
        saddle = brentq(slope, -(freedom.sum() / 2.0 + 2.0) / q, -1e-9 / q, rtol=1e-6)
    shrunk = scales / (1.0 - 2.0 * saddle * scales)
    second, third = 2.0 * freedom @ shrunk**2, 8.0 * freedom @ shrunk**3
    width, bend = 1.0 / np.sqrt(second + saddle**-2), third / (6.0 * second)

    def exponent(s: Array) -> Array:
        step = max(_NODES_AT_ONCE // len(scales), 1)
        parts = (s[i : i + step, None] for i in range(0, len(s), step))
        logs = [np.log(1.0 - 2.0 * part * scales) @ freedom for part in parts]
        return -0.5 * np.concatenate(logs) - s * q - np.log(s if above else -s)

    height = exponent(np.array([saddle], dtype=np.complex128))[0].real

    def on_contour(t: Array) -> Array:
        u = width * np.sinh(t)
        values = np.exp(exponent(saddle + 1j * u + bend * u**2) - height)
        return (values * (1.0 - 2j * bend * u)).real * width * np.cosh(t)

    # The trapezoidal rule, with twice as many nodes until it does not change.
    nodes = 32
    grid = np.linspace(0.0, _REACH, nodes + 1)
    total = on_contour(grid)
    integral = (total.sum() - total[0] / 2.0) * _REACH / nodes
    while nodes < _MOST_NODES:
        between = np.linspace(0.0, _REACH, 2 * nodes + 1)[1::2]
        last, nodes = integral, 2 * nodes
        integral = last / 2.0 + on_contour(between).sum() * _REACH / nodes
        if abs(integral - last) <= _DIGITS * abs(integral):
            break
    share = float(np.exp(height) * integral / np.pi)
    return min(max(share if above else 1.0 - share, 0.0), 1.0)


def _lumped(weights: Array) -> tuple[Array, Array]:
    """Weights and degrees of freedom of chi-squares, the smallest weights (descending) in one."""
    cubes = np.cumsum(weights[::-1] ** 3)[::-1]
    first = int(np.searchsorted(-cubes, -_LUMPED * cubes[0]))
    if len(weights) - first < 2:
        return weights, np.ones(len(weights))
    total, squares = weights[first:].sum(), (weights[first:] ** 2).sum()
    freedom = np.append(np.ones(first), total**2 / squares)
    return np.append(weights[:first], squares / total), freedom


def centred_spectrum(mean: Moments, variable: str) -> Array:
    """Eigenvalues >= 0 of the centred covariance S - c c^T of a variable's features, shape (m,).

    Raises
    ------
    DataError
        If the features do not vary.
    """
    c = mean.means[variable]
    gram = mean.blocks[variable, variable]
    spectrum = np.linalg.eigvalsh(gram - np.outer(c, c))
    if spectrum[-1] <= np.finfo(np.float64).eps * len(c) * np.trace(gram):
        raise DataError(
            f"{variable} does not vary: its kernel is the same for all rows, so that nothing can "
            "be tested"
        )
    return np.maximum(spectrum, 0.0)


def null_law(spectra: Sequence[Array], n_rows: int) -> tuple[Array, float]:
    r"""Weights of the mixture of chi-squares that n |C|^2 follows, and its corrected spread.

    Parameters
    ----------
    spectra
        Eigenvalues of the centred covariance of each variable: the weights are their products. Of
        two samples those of all rows.
    n_rows
        n.

    Returns
    -------
    weights : (m,)
        Their sum is the mean of n |C|^2 over all permutations of the rows of one variable.
    spread
        Standard deviation over that of this mixture.

    Notes
    -----
    Sample eigenvalues scatter more than true ones: tr(S^2) is too large by about tr(S)^2 / (n - 1),
    which of few rows in many columns would make tests conservative.
    """
    weights, square = np.ones(1), 1.0
    for spectrum in spectra:
        weights = np.outer(weights, spectrum).ravel()
        square *= 1.0 - spectrum.sum() ** 2 / ((n_rows - 1) * (spectrum @ spectrum))
    spread = max(float(np.sqrt(max(square, 0.0))), _SMALLEST_SPREAD)
    return weights * (n_rows / (n_rows - 1)), spread


def mixture_pvalue(statistic: float, spectra: Sequence[Array], n_rows: int) -> float:
    """Probability that n |C|^2 under the null hypothesis is above its value, see `null_law`."""
    weights, spread = null_law(spectra, n_rows)
    mean = float(weights.sum())
    return mixture_tail(weights, mean + (statistic - mean) / spread)


class NullComparison(NamedTuple):
    """A squared distance, its p-value, and its mean under the null hypothesis."""

    statistic: float
    pvalue: float
    null_mean: float


def compare_by_spectrum(*sums: MomentSums) -> NullComparison:
    """Independence of x and y of one sample, or equality of two laws of x, by chi-squares.

    Parameters
    ----------
    sums
        Moments of x and y, or those of x of two samples in the same basis.
    """
    counts = [each.n_rows for each in sums]
    n = sum(counts)
    if len(sums) == 1:
        mean, scale = sums[0].means(), float(n)
        difference = mean.blocks["y", "x"] - np.outer(mean.means["y"], mean.means["x"])
        spectra = [centred_spectrum(mean, variable) for variable in "xy"]
    else:
        first, second = (each.means().means["x"] for each in sums)
        difference, scale = first - second, counts[0] * counts[1] / n
        spectra = [centred_spectrum((sums[0] + sums[1]).means(), "x")]
    statistic, (weights, _) = float((difference**2).sum()), null_law(spectra, n)
    pvalue = mixture_pvalue(scale * statistic, spectra, n)
    return NullComparison(statistic, pvalue, float(weights.sum()) / scale)


def compare_by_signs(*sums: MomentSums, n_resamples: int, seed: int) -> NullComparison:
    """The same by random signs of the terms of folds; parameters as of `sign_flip_pvalue`."""
    if len(sums) == 1:
        for variable in "xy":
            centred_spectrum(sums[0].means(), variable)
        return flip_signs(covariance_terms(*sums), n_resamples, seed)
    centred_spectrum((sums[0] + sums[1]).means(), "x")
    return flip_signs(difference_terms(*sums), n_resamples, seed)


def flip_signs(
    terms: Array, n_resamples: int, seed: int, *, inflation: float = 1.0
) -> NullComparison:
    """The squared norm of a sum of terms of folds; parameters as of `sign_flip_pvalue`."""
    pvalue = sign_flip_pvalue(terms, n_resamples, seed, inflation=inflation)
    mean = inflation * float((terms**2).sum())
    return NullComparison(float((terms.sum(axis=0) ** 2).sum()), pvalue, mean)


# Terms of folds, whose signs the wild bootstrap flips


def covariance_terms(moments: MomentSums) -> Array:
    """Centred sums over each fold whose sum is C, the covariance of N_Y and N_X: (F, m_Y m_X).

    Folds without rows are left out.
    """
    total, shares = moments.means(), moments.weights / moments.weights.sum()
    terms = []
    for fold, share in enumerate(shares):
        part = moments.means(fold=fold, weight=total.weight)
        term = part.blocks["y", "x"] - np.outer(total.means["y"], part.means["x"])
        term += np.outer(share * total.means["y"] - part.means["y"], total.means["x"])
        terms.append(term.ravel())
    return np.stack(terms)[shares > 0.0]


@dataclass(frozen=True, eq=False)
class Residuals:
    r"""Residuals of the features of a variable on z, as a matrix on rows (N, N_Z, 1).

    .. math:: R = N - c - \Sigma_{NZ} (\Sigma_{ZZ} + r)^{-1} (N_Z - c_Z)

    with the covariances :math:`\Sigma` and means c of the rows of a regression.

    Parameters
    ----------
    mean
        Moments over these rows.
    variable
        ``"x"`` or ``"y"``.
    """

    mean: Moments
    variable: str

    @cached_property
    def _regression(self) -> tuple[Array, Array, Array]:
        """Eigenvectors and eigenvalues of the covariance of N_Z, and that of N with these."""
        blocks, c, c_z = self.mean.blocks, self.mean.means[self.variable], self.mean.means["z"]
        vectors, lam = eigenbasis(blocks["z", "z"] - np.outer(c_z, c_z))
        return vectors, lam, (blocks[self.variable, "z"] - np.outer(c, c_z)) @ vectors

    def kept(self, reg: float) -> Array:
        """Shares of the values along each direction of the rows that residuals keep, (m_Z + 1,)."""
        lam = self._regression[1]
        return np.append(1.0 - lam * inverse_eigenvalues(lam, np.array([reg]))[:, 0], 0.0)

    def at(self, reg: float) -> Array:
        """The matrix at a ridge, shape (m, m + m_Z + 1)."""
        vectors, lam, cross = self._regression
        slope = (cross * inverse_eigenvalues(lam, np.array([reg]))[:, 0]) @ vectors.T
        constant = self.mean.means[self.variable] - slope @ self.mean.means["z"]
        return np.hstack([np.eye(len(slope)), -slope, -constant[:, None]])


def _products(part: Moments, share: float, first: str, second: str) -> Array:
    """Products of the rows (N, N_Z, 1) of two variables, from their moments."""
    blocks, means = part.blocks, part.means
    return np.block(
        [
            [blocks[first, second], blocks[first, "z"], means[first][:, None]],
            [blocks["z", second], blocks["z", "z"], means["z"][:, None]],
            [means[second][None, :], means["z"][None, :], np.full((1, 1), share)],
        ]
    )


def residual_ridges(moments: MomentSums, regs: Sequence[float]) -> tuple[float, float]:
    """Ridges of the regressions of y and x on z with the least variance of held-out residuals.

    Parameters
    ----------
    moments
        Of x, y and z by fold, not more than a few of which are worth their time.
    regs
        Ridges to choose among.
    """
    losses = np.zeros((2, len(regs)))
    for rest, held in moments.split_folds():
        for i, variable in enumerate("yx"):
            residuals, products = Residuals(rest, variable), _products(held, 1.0, *2 * variable)
            for j, reg in enumerate(regs):
                matrix = residuals.at(reg)
                losses[i, j] += held.weight * float(((matrix @ products) * matrix).sum())
    y, x = losses.argmin(axis=1)
    return float(regs[y]), float(regs[x])


def residual_terms(moments: MomentSums, regs: tuple[float, float]) -> Array:
    r"""Sums over each fold whose sum is the covariance of residuals of y and x: (F, m_Y m_X).

    .. math:: \mathrm E[R_Y R_X^T], \quad R_Y = N_Y - \hat{\mathrm E}[N_Y | z], \quad
              R_X = N_X - \hat{\mathrm E}[N_X | z]

    Folds without rows are left out.

    Parameters
    ----------
    moments
        Of x, y and z by fold.
    regs
        Ridges of the regressions of y and of x.
    """
    total, shares = moments.means(), moments.weights / moments.weights.sum()
    y, x = (Residuals(total, v).at(reg) for v, reg in zip("yx", regs, strict=True))
    terms = []
    for fold in np.flatnonzero(shares > 0.0):
        part = moments.means(fold=int(fold), weight=total.weight)
        terms.append((y @ _products(part, float(shares[fold]), "y", "x") @ x.T).ravel())
    return np.stack(terms)


def check_residuals(moments: MomentSums, regs: tuple[float, float]) -> None:
    """DataError if x or y does not vary, or is a function of z: nothing is left to be tested.

    Parameters
    ----------
    moments, regs
        As of :func:`residual_terms`.
    """
    total = moments.means()
    for variable, reg in zip("yx", regs, strict=True):
        varies = float(centred_spectrum(total, variable).sum())
        matrix, products = Residuals(total, variable).at(reg), _products(total, 1.0, *2 * variable)
        if float(((matrix @ products) * matrix).sum()) < _FUNCTION_OF_Z * varies:
            raise DataError(
                f"{variable} is a function of z, as far as its basis tells: given z nothing of it "
                "is left to be tested"
            )


def residual_inflation(moments: MomentSums, regs: tuple[float, float]) -> float:
    r"""Variance of the sum of products of residuals over the sum of the variances of its terms.

    .. math:: \frac{n - \mathrm{tr}(1 - M_X^2 M_Y^2)}
              {n (1 - \mathrm{tr}(1 - M_X^2) / n) (1 - \mathrm{tr}(1 - M_Y^2) / n)}

    with the matrices M that make residuals of values at n rows, of noise that is independent of z.
    It is above 1, by about the degrees of freedom of a regression over n: residuals at different
    rows are not independent. Random signs know the terms alone.

    Parameters
    ----------
    moments, regs
        As of :func:`residual_terms`.
    """
    total, n = moments.means(), moments.n_rows
    y, x = (Residuals(total, v).kept(reg) ** 2 for v, reg in zip("yx", regs, strict=True))
    of_both, of_y, of_x = (1.0 - (1.0 - squares).sum() / n for squares in (x * y, y, x))
    return max(1.0, of_both / (of_y * of_x)) if min(of_both, of_y, of_x) > 0.0 else 1.0


def check_folds(*counts: int, advice: str = MORE_FOLDS) -> None:
    """DataError unless each sample has rows in so many folds that signs of their sums may flip."""
    if min(counts) < MIN_FOLDS:
        of_each = " in each of the two samples" if len(counts) > 1 else ""
        raise DataError(
            f"the bootstrap needs at least {MIN_FOLDS} folds with rows{of_each}, got "
            f"{' and '.join(map(str, counts))}: {advice}, or give more rows, groups or blocks of "
            "time"
        )


def centred_sums(*samples: tuple[Array, Array]) -> list[Array]:
    r"""Sums over the folds of two samples less those of their centre, shapes (F, m).

    .. math:: S_f - p_f \, c, \quad c = \frac{v_B \, m_A + v_A \, m_B}{v_A + v_B}, \quad
              v = \frac{F}{F - 1} \sum_f |S_f - p_f m|^2

    The centre is the mean of both means m by their precision, as the F folds with rows tell it. At
    another one, such as the middle of both means, terms of the more exact sample would share the
    error of the other one's mean, and would not be independent.

    Parameters
    ----------
    samples
        Of each sample the sums S over each fold divided by the weight of the sample, shape (F, m),
        and the share p of each fold in this weight, shape (F,).
    """
    means = [sums.sum(axis=0) for sums, _ in samples]
    variances = []
    for (sums, shares), mean in zip(samples, means, strict=True):
        folds = int(np.count_nonzero(shares > 0.0))
        spread = float(((sums - np.outer(shares, mean)) ** 2).sum())
        variances.append(spread * folds / (folds - 1))
    share = variances[1] / sum(variances) if sum(variances) > 0.0 else 0.5
    centre = share * means[0] + (1.0 - share) * means[1]
    return [sums - np.outer(shares, centre) for sums, shares in samples]


def difference_terms(a: MomentSums, b: MomentSums) -> Array:
    """Centred sums over each fold whose sum is E_A N - E_B N, shape (F, m).

    Folds without rows are left out.

    Raises
    ------
    DataError
        If one of the samples has rows in fewer than six folds.
    """
    check_folds(*(int(np.count_nonzero(each.weights > 0.0)) for each in (a, b)))
    samples = []
    for sums in (a, b):
        weight = sums.means().weight
        means = [sums.means(fold=fold, weight=weight).means["x"] for fold in range(sums.n_folds)]
        samples.append((np.stack(means), sums.weights / weight))
    first, second = centred_sums(*samples)
    terms = first - second
    return terms[a.weights + b.weights > 0.0]


def sign_flip_pvalue(terms: Array, n_resamples: int, seed: int, *, inflation: float = 1.0) -> float:
    r"""P-value of the squared norm of a sum of terms that are independent and symmetric around 0.

    .. math:: P\Big(\Big|\sum_f \epsilon_f G_f\Big|^2 \geq \Big|\sum_f G_f\Big|^2\Big), \quad
              \epsilon_f = \pm 1

    Up to 14 terms all signs count; of more, random ones and those of the data (Phipson and Smyth,
    2010). The level is exact, whatever the covariance of the terms: rows of a fold may depend on
    each other. Where a few folds carry most of the weight, as with weights of heavy tails, sums of
    terms are far from symmetric, and true hypotheses are rejected more often than the level says.

    Parameters
    ----------
    terms
        G, shape (F, m).
    n_resamples, seed
        Number of random signs, and their seed.
    inflation
        What the squared norms of sums with other signs are multiplied with, of terms that are not
        quite independent.

    Raises
    ------
    DataError
        If there are fewer than six terms.
    """
    gram, count = terms @ terms.T, len(terms)
    check_folds(count)
    if count <= _EXACT_FOLDS:
        signs = np.array([(1.0, *rest) for rest in product((1.0, -1.0), repeat=count - 1)])
    else:
        drawn = np.random.default_rng(seed).integers(0, 2, size=(n_resamples, count))
        signs = np.vstack([np.ones(count), 2.0 * drawn - 1.0])
    norms = ((signs @ gram) * signs).sum(axis=1)
    norms[1:] *= inflation
    return float((norms >= norms[0] * (1.0 - 1e-12)).mean())
