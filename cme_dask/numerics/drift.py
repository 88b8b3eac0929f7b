r"""Drift from moments: laws before and after, columns by themselves, and y given x.

Two laws are compared by the means of their features; regressions by the residuals of both sets of
rows under one regression. All of it is linear in sums over the rows of folds, so that a model's own
moments and one pass over the new rows suffice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from scipy.linalg import solve

from cme_dask.display import brief_repr
from cme_dask.errors import DataError, remedy
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.cells import CellStatistics
from cme_dask.numerics.independence import (
    MIN_FOLDS,
    MORE_FOLDS,
    centred_spectrum,
    centred_sums,
    check_folds,
    mixture_pvalue,
    sign_flip_pvalue,
)
from cme_dask.numerics.moments import Moments, MomentSums

Array = Any

SECTIONS = 13
"""Kernel sections by which a column of numbers is compared."""

_FIT_AGAIN = f"fit again with {remedy('n_folds', '--folds')} of at least {MIN_FOLDS}"
_WIDTH = 0.15  # length scale of these, in shares of the rows
_BEYOND = 0.2  # where values outside the range of before lie, beyond 0 and 1
_KNOTS = 257
_WHITENING = 0.01  # of E |phi|^2: directions with less variance count less
_RIDGES = np.geomspace(1e-6, 10.0, 15)  # of density ratios, times E k(x, x)


class Comparison(NamedTuple):
    """A statistic of two sets of rows, and how likely it is if both have one law.

    Attributes
    ----------
    statistic
        Squared distance.
    null_mean
        Its mean if there is no drift.
    pvalue
        Probability of a statistic at least as large if there is no drift.
    """

    statistic: float
    null_mean: float
    pvalue: float


@dataclass(frozen=True, eq=False)
class FeatureSums:
    """Weighted sums by fold of the features of one variable, and of their products.

    Attributes
    ----------
    weights
        Sum of the weights of each fold, shape (F,).
    first, second
        Sums of phi and of phi phi^T, shapes (F, m) and (F, m, m).
    rows
        Number of rows; of those retained in cells the effective number (sum w)^2 / sum w^2.
    """

    weights: Array
    first: Array
    second: Array
    rows: float

    __repr__ = brief_repr

    @classmethod
    def of(
        cls, weights: Array, mean_of: Callable[[int], Moments], block: str, rows: float
    ) -> "FeatureSums":
        """Those of a block of features, from its means over each fold with rows."""
        first, second = [], []
        for fold in np.flatnonzero(weights > 0.0):
            mean, weight = mean_of(int(fold)), weights[fold]
            first.append(weight * mean.means[block])
            second.append(weight * mean.blocks[block, block])
        return cls(weights[weights > 0.0], np.stack(first), np.stack(second), rows)

    @classmethod
    def of_block(cls, sums: MomentSums, block: str) -> "FeatureSums":
        """Those of a block, such as "x", or "f(x)": columns and functions less their shift."""
        return cls.of(sums.weights, lambda fold: sums.means(fold=fold), block, sums.n_rows)

    @classmethod
    def of_cells(
        cls, cells: CellStatistics, features: Callable[[Array], Array], n_folds: int
    ) -> "FeatureSums":
        """Those of the law of cells, from the rows that were retained of each.

        They are a stratified sample, more exact than as many random rows, as which they count.
        """
        weights = cells.masses[cells.cell_of_atom] * cells.shares
        folds = (cells.hashes % np.uint64(n_folds)).astype(np.int64)
        parts = [np.flatnonzero((folds == fold) & (weights > 0.0)) for fold in range(n_folds)]
        parts = [part for part in parts if len(part)]
        values = features(cells.atoms)
        return cls(
            np.array([weights[part].sum() for part in parts]),
            np.stack([weights[part] @ values[part] for part in parts]),
            np.stack([(values[part].T * weights[part]) @ values[part] for part in parts]),
            float(weights.sum() ** 2 / (weights**2).sum()),
        )

    def only(self, place: slice) -> "FeatureSums":
        """Those of some of the features."""
        second = self.second[:, place, place]
        return FeatureSums(self.weights, self.first[:, place], second, self.rows)

    def means(self, folds: Any = slice(None)) -> tuple[Array, Array]:
        """Means of phi and of phi phi^T over the rows of all folds, or of some."""
        weight = self.weights[folds].sum()
        return self.first[folds].sum(axis=0) / weight, self.second[folds].sum(axis=0) / weight

    def splits(self) -> list[tuple[Any, Any]]:
        """Folds to fit on and those held out, for each fold; of one fold it is both."""
        every = np.arange(len(self.weights))
        if len(every) == 1:
            return [(every, every)]
        return [(np.delete(every, fold), every[fold : fold + 1]) for fold in every]


# Equal laws


def compare(
    before: FeatureSums, after: FeatureSums, method: str, n_resamples: int, seed: int
) -> Comparison:
    """The squared distance of the means of features, as the two-sample test compares laws.

    Parameters
    ----------
    before, after
        Both sets of rows.
    method
        ``"chi2"`` or ``"bootstrap"``, see :func:`cme_dask.two_sample_test`.
    n_resamples, seed
        Of the bootstrap.

    Raises
    ------
    DataError
        If one of both has fewer than six folds for the bootstrap.
    """
    (first, square_a), (second, square_b) = before.means(), after.means()
    statistic = float(((first - second) ** 2).sum())
    n = before.rows + after.rows
    share, scale = before.rows / n, before.rows * after.rows / n
    gram = share * square_a + (1.0 - share) * square_b
    mean = share * first + (1.0 - share) * second
    trace = float(np.trace(gram))
    pooled = Moments(n, {("x", "x"): gram}, {"x": mean}, {"x": trace}, {"x": np.zeros(0)})
    try:
        spectrum = centred_spectrum(pooled, "x")
    except DataError:  # it is the same at all rows of both sets
        return Comparison(statistic, 0.0, 1.0)
    if method == "bootstrap":
        counts = len(before.weights), len(after.weights)
        check_folds(*counts, advice=_FIT_AGAIN if counts[0] < MIN_FOLDS else MORE_FOLDS)
        each = [(sums.first, sums.weights) for sums in (before, after)]
        old, new = centred_sums(*((first / w.sum(), w / w.sum()) for first, w in each))
        terms = np.vstack([old, -new])
        pvalue = sign_flip_pvalue(terms, n_resamples, seed)
        return Comparison(statistic, float((terms**2).sum()), pvalue)
    expected = float(spectrum.sum()) / scale * n / (n - 1.0)
    return Comparison(statistic, expected, mixture_pvalue(scale * statistic, [spectrum], round(n)))


def adjusted(pvalues: Array) -> Array:
    """P-values of several tests by Holm's method: below a level, the chance of any error is."""
    order = np.argsort(pvalues, kind="stable")
    factors = np.arange(len(pvalues), 0, -1)
    result = np.empty(len(pvalues))
    result[order] = np.minimum(np.maximum.accumulate(pvalues[order] * factors), 1.0)
    return result


# Columns by themselves


@dataclass(frozen=True, eq=False)
class ColumnSections:
    r"""Functions of each column alone, by whose means its law before is compared with that after.

    For columns of numbers kernel sections :math:`\exp(-(F(z) - t)^2 / (2 \cdot 0.15^2))` at 13
    levels t, with the distribution function F of before; for columns of labels their indicators.

    Attributes
    ----------
    values, levels
        Of each column, values z in ascending order and F there; of columns of labels their codes.
    labelled
        Whether a column holds labels.
    """

    values: tuple[Array, ...]
    levels: tuple[Array, ...]
    labelled: tuple[bool, ...]

    __repr__ = brief_repr

    @classmethod
    def of(cls, cells: CellStatistics, labels: Sequence[int]) -> "ColumnSections":
        """Those of the law of cells; of columns of labels their number, of others 0."""
        weights = cells.masses[cells.cell_of_atom] * cells.shares
        values, levels = [], []
        for column, count in zip(cells.atoms.T, labels, strict=True):
            if count:
                values.append(np.arange(float(count)))
                levels.append(values[-1])
                continue
            distinct, places = np.unique(column, return_inverse=True)
            mass = np.bincount(places, weights)
            middle = (np.cumsum(mass) - mass / 2.0) / mass.sum()
            few = np.unique(np.linspace(0, len(distinct) - 1, _KNOTS).astype(np.int64))
            if len(distinct) > _KNOTS:  # evenly in the shares of the rows
                few = np.searchsorted(middle, np.linspace(middle[0], middle[-1], _KNOTS))
                few = np.unique(few)
            values.append(distinct[few])
            levels.append(middle[few])
        return cls(tuple(values), tuple(levels), tuple(map(bool, labels)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of functions of each column."""
        pairs = zip(self.values, self.labelled, strict=True)
        return tuple(len(values) if label else SECTIONS for values, label in pairs)

    @property
    def places(self) -> list[slice]:
        """Where the functions of each column are."""
        edges = np.cumsum([0, *self.sizes]).tolist()
        return list(map(slice, edges[:-1], edges[1:]))

    def centres(self, column: int) -> Array:
        """The values of a column at which its sections are centred, or its codes."""
        if self.labelled[column]:
            return self.values[column]
        levels = np.linspace(0.0, 1.0, SECTIONS)
        return np.interp(levels, self.levels[column], self.values[column])

    def __call__(self, rows: Array) -> Array:
        """Values at rows (n, d), shape (n, sum of sizes)."""
        rows, parts, centres = np.asarray(rows), [], np.linspace(0.0, 1.0, SECTIONS)
        for column, values, levels, label in zip(
            rows.T, self.values, self.levels, self.labelled, strict=True
        ):
            if label:
                parts.append((column[:, None] == values).astype(np.float64))
                continue
            beyond = {"left": -_BEYOND, "right": 1.0 + _BEYOND}
            level = np.interp(column, values, levels, **beyond)
            parts.append(np.exp(-0.5 * ((level[:, None] - centres) / _WIDTH) ** 2))
        return np.concatenate(parts, axis=1)


@dataclass(frozen=True, eq=False)
class RowValues:
    """Functions of rows as features of a reduction, such as sections and predictions together.

    Attributes
    ----------
    functions
        From rows (n, d) to values (n, k).
    rank
        Number of all values.
    """

    functions: tuple[Callable[[Array], Array], ...]
    rank: int

    def evaluator(self, like: Array) -> Callable[[Array, Array], None]:
        """What writes the values."""

        def write(rows: Array, out: Array) -> None:
            top, xp = 0, array_namespace(rows)
            for function in self.functions:
                values = xp.asarray(function(rows))
                out[top : top + values.shape[1], :] = values.T
                top += values.shape[1]

        return write


# Y given x


def conditional_terms(before: MomentSums, after: MomentSums, columns: int) -> Array:
    r"""Terms whose sum shows whether y given x has changed, shape (terms, m_X + 1, m_Y + columns).

    .. math:: (H + \rho)^{-1/2} \big(S_P S^{-1} \mathrm E_Q[\phi e^T]
              - S_Q S^{-1} \mathrm E_P[\phi e^T]\big), \quad \phi = (N_X, 1), \quad
              S = S_P + S_Q + r, \quad H = (S_P S^{-1} S_Q + S_Q S^{-1} S_P) / 2, \quad
              r = \mathrm{tr}(S_P + S_Q) / n, \quad \rho = \mathrm{tr}(H) / 100

    with sums over both sets of rows in the place of the moments S_P and S_Q of phi, divided by the
    number n of all rows, and residuals e of the basis functions and columns of y under one
    regression on phi, that of all rows together. But for the ridge r, the bracket is H times the
    difference of the regressions on each set alone: their harmonic mean H gives no weight to
    directions in which one of both sets has no rows, so that no row counts more than once where x
    has shifted. The root lets all directions with much weight count alike, not the mean of e above
    all (Harchaoui, Bach and Moulines, 2008).

    Parameters
    ----------
    before, after
        Sums over both sets of rows, by fold, in the same bases and with the same shifts.
    columns
        Number of the columns of y, first among its functions.
    """
    n, parts = before.n_rows + after.n_rows, []
    for sums in (before, after):
        weights = sums.weights / sums.weights.sum() * sums.n_rows / n
        grams, crosses = [], []
        for fold in np.flatnonzero(weights > 0.0):
            mean = sums.means(fold=int(fold))
            means = np.concatenate([mean.means["y"], mean.means["f(y)"][:columns]])
            c = mean.means["x"]
            cross = np.hstack([mean.blocks["x", "y"], mean.blocks["x", "f(y)"][:, :columns]])
            gram = np.block([[mean.blocks["x", "x"], c[:, None]], [c, np.ones(1)]])
            grams.append(weights[fold] * gram)
            crosses.append(weights[fold] * np.vstack([cross, means]))
        parts.append((grams, crosses))
    old, new = (np.sum(grams, axis=0) for grams, _ in parts)
    cross = sum(np.sum(crosses, axis=0) for _, crosses in parts)
    whole = old + new
    whole[np.diag_indices(len(whole))] += np.trace(whole) / n
    slope = solve(whole, cross, assume_a="pos")
    of_old, of_new = (solve(whole, gram, assume_a="pos").T for gram in (old, new))
    vectors, lam = eigenbasis(of_old @ new)  # of the symmetric part
    root = (vectors / np.sqrt(lam + _WHITENING * lam.sum())) @ vectors.T
    terms = []
    for (grams, crosses), change in zip(parts, (-root @ of_new, root @ of_old), strict=True):
        terms += [change @ (c - g @ slope) for g, c in zip(grams, crosses, strict=True)]
    return np.stack(terms)


# The density ratio


class RatioFit(NamedTuple):
    """A density ratio 1 + N(x)^T slope of the rows after to those before.

    Attributes
    ----------
    slope
        Shape (m,).
    reg
        Ridge, by the least-squares loss on held-out folds.
    mean
        E r over the rows before: 1, less where rows after lie outside the basis.
    effective
        Effective sample size (E r)^2 / E r^2, as a share of the rows before.
    """

    slope: Array
    reg: float
    mean: float
    effective: float


def fit_ratio(before: FeatureSums, after: FeatureSums) -> RatioFit:
    """The density ratio by least squares (uLSIF), with its ridge by cross-validation.

    The loss is E_P r^2 / 2 - E_Q r on pairs of held-out folds of both sets of rows.

    Notes
    -----
    Source: Kanamori, Hido and Sugiyama (2009), JMLR 10, 1391.
    """
    ridges = _RIDGES * float(np.trace(before.means()[1]))
    losses = np.zeros(len(ridges))
    for (rest_p, held_p), (rest_q, held_q) in zip(before.splits(), after.splits(), strict=False):
        mean, gram = before.means(rest_p)
        transform, lam = eigenbasis(gram)
        gap = transform.T @ (after.means(rest_q)[0] - mean)
        own, square = before.means(held_p)
        target = after.means(held_q)[0]
        slopes = transform @ (gap[:, None] / (lam[:, None] + ridges))
        losses += 0.5 * (slopes * (square @ slopes)).sum(axis=0) + slopes.T @ (own - target)
    reg = float(ridges[losses.argmin()])
    mean, gram = before.means()
    transform, lam = eigenbasis(gram)
    slope = transform @ ((transform.T @ (after.means()[0] - mean)) / (lam + reg))
    first = 1.0 + float(slope @ mean)
    second = 1.0 + 2.0 * float(slope @ mean) + float(slope @ gram @ slope)
    effective = first * first / second if second > 0.0 else 0.0
    return RatioFit(slope, reg, first, effective)
