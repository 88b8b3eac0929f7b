"""Transforms of columns learned from the row sample, and default scales."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.spatial.distance import pdist
from scipy.special import ndtri

from cme_dask.data.columns import Columns
from cme_dask.errors import DataError
from cme_dask.kernels import Categorical, Gaussian, Kernel, TransformedKernel
from cme_dask.kernels.transforms import ColumnTransform, PoolRare, Scores, Standard, Transform

# Transforms of columns, learned from the row sample


Array = Any

KNOTS = 255
"""Quantiles that a map to normal scores goes through; two more knots may end its tails."""

RARE_ROWS = 10
RARE_SHARE = 1e-3
"""A level with fewer rows of the sample, or a smaller share of them, is pooled."""

_CONSTANT = 1e-14  # range relative to the largest value
_LEAST = 1e-290  # range: one may still divide by it
_STEEPEST = 1e100  # slope of a tail relative to that of the whole map: scores stay finite
_QUARTILE = 0.6744897501960817  # of the standard normal law


def learn_transform(
    rows: Array,
    weights: Array,
    categorical: Sequence[bool],
    form: str,
    *,
    rare: int = RARE_ROWS,
) -> Transform:
    r"""Transform after which all columns have the same scale.

    Numeric columns become (x - mean) / std, or normal scores: the increasing piecewise linear map
    through the points :math:`(v, \Phi^{-1}(P(X < v) + P(X = v) / 2))` of at most 255 values v of
    the column, those nearest to equispaced scores, so that t(X) is standard normal where X is
    continuous. A value that many rows share is one knot, and its neighbours are knots too.

    Codes of categorical columns become positions among the frequent levels; rare and unknown ones
    are one level.

    Parameters
    ----------
    rows, weights
        Rows of the row sample, shape (k, d), and their weights >= 0.
    categorical
        Which columns hold codes of levels, d of them.
    form
        What becomes of numeric columns: ``"standard"`` or ``"scores"``.
    rare
        Levels with fewer rows, or less than 0.1 % of them, are pooled. Rows count by their weights.

    Raises
    ------
    DataError
        If the form is unknown or `categorical` doesn't fit the columns.

    Notes
    -----
    Between knots t differs from the mid-rank score of a sampled value by less than the scores of
    the knots around it do: 8 / 254 = 0.03 for 30,000 rows without ties. Beyond the sampled range t
    goes on with its outer slope, or with that between the quartiles if that is smaller: far away
    stays far, and finite. A constant column is shifted only.
    """
    if form not in ("standard", "scores"):
        raise DataError(f"form must be 'standard' or 'scores', got {form!r}")
    if len(categorical) != rows.shape[1]:
        raise DataError(
            f"categorical must tell of each of {rows.shape[1]} columns, got {len(categorical)}"
        )
    shares = weights / np.sum(np.sort(weights))  # sorted: the same for any order of the rows
    numeric = _standard if form == "standard" else _scores
    return Transform(
        tuple(
            _pooled(column, shares, rare) if is_coded else numeric(*_sorted(column, shares))
            for column, is_coded in zip(rows.T, categorical, strict=True)
        )
    )


def _sorted(column: Array, shares: Array) -> tuple[Array, Array]:
    """The rows that count, in an order that doesn't depend on the one they came in."""
    order = np.lexsort((shares, column))
    order = order[shares[order] > 0]
    return column[order], shares[order]


def _atoms(values: Array, shares: Array) -> tuple[Array, Array]:
    """Distinct values, ascending, and the share of each."""
    distinct, first = np.unique(values, return_index=True)
    return distinct, np.add.reduceat(shares, first)


def constant_columns(rows: Array, weights: Array, categorical: Sequence[bool]) -> list[int]:
    """Positions of the numeric columns that have one value at all rows of positive weight.

    Parameters
    ----------
    rows, weights, categorical
        As in :func:`learn_transform`.
    """
    return [
        j
        for j, (column, is_coded) in enumerate(zip(rows.T, categorical, strict=True))
        if not is_coded and _is_constant(np.sort(column[weights > 0]))
    ]


def _is_constant(values: Array) -> bool:
    least = max(_CONSTANT * np.abs(values).max(), _LEAST)
    # The difference of two values may leave the range, that of their halves can't.
    return bool(values[-1] / 2 - values[0] / 2 <= least / 2)


def _standard(values: Array, shares: Array) -> ColumnTransform:
    if _is_constant(values):
        return Standard(float(values[0]), 1.0)
    unit = np.abs(values).max()  # squares of the values may leave the range
    scaled = values / unit
    mean = shares @ scaled
    deviation = float(unit * np.sqrt(shares @ (scaled - mean) ** 2))
    return Standard(float(unit * mean), deviation or 1.0)


def _scores(values: Array, shares: Array) -> ColumnTransform:
    if _is_constant(values):
        return Standard(float(values[0]), 1.0)
    distinct, mass = _atoms(values, shares)
    scores = _mid_rank_scores(mass, len(values))
    retained = _knots(scores, mass)
    # Rounding may have made scores of tiny masses equal.
    scores, first = np.unique(scores[retained], return_index=True)
    knots, scores = _with_tails(distinct[retained][first], scores)
    return Scores(tuple(knots.tolist()), tuple(scores.tolist()))


def _mid_rank_scores(mass: Array, count: int) -> Array:
    """Normal scores of P(X < v) + P(X = v) / 2, each from the nearer tail."""
    least = 0.5 / count  # what a row of average weight has at an end: no weight goes to infinity
    below = np.maximum(np.cumsum(mass) - mass / 2, least)
    above = np.maximum(np.cumsum(mass[::-1])[::-1] - mass / 2, least)
    return np.maximum.accumulate(np.where(below < above, ndtri(below), -ndtri(above)))


def _knots(scores: Array, mass: Array) -> Array:
    """Positions of at most ``KNOTS`` values, near equispaced scores and around heavy atoms."""
    if len(scores) <= KNOTS:
        return np.arange(len(scores))
    grid = np.linspace(scores[0], scores[-1], KNOTS)
    middles = (scores[1:] + scores[:-1]) / 2
    hits = np.bincount(np.searchsorted(middles, grid), minlength=len(scores))
    # Three hits are one value: there is room for its neighbours, between which and it t jumps.
    atoms = np.flatnonzero(hits >= 3)
    ends = np.clip(np.concatenate([atoms - 1, atoms + 1]), 0, len(scores) - 1)
    return np.union1d(np.flatnonzero(hits), ends)


def _with_tails(knots: Array, scores: Array) -> tuple[Array, Array]:
    """The knots, and one more where the tail would be steeper than the middle."""
    low = max(int(np.searchsorted(scores, -_QUARTILE, side="right")) - 1, 0)
    high = min(int(np.searchsorted(scores, _QUARTILE)), len(scores) - 1)
    # Comparing rises and not slopes: the slope of a short segment may leave the range.
    central = float(scores[high] - scores[low]) / float(knots[high] - knots[low])
    whole = float(scores[-1] - scores[0]) / float(knots[-1] - knots[0])
    central = min(central, _STEEPEST * whole)
    rise, width, reach = np.diff(scores), np.diff(knots), max(knots[-1] - knots[0], 1 / central)
    before, after = rise[0] > central * width[0], rise[-1] > central * width[-1]
    if before:
        knots = np.concatenate([[knots[0] - reach], knots])
        scores = np.concatenate([[scores[0] - central * reach], scores])
    if after:
        knots = np.concatenate([knots, [knots[-1] + reach]])
        scores = np.concatenate([scores, [scores[-1] + central * reach]])
    return knots, scores


def _pooled(column: Array, shares: Array, rare: int) -> ColumnTransform:
    levels, mass = _atoms(*_sorted(column, shares))
    # Shares are sums: a level of exactly the least number of rows must not be lost to rounding.
    least = max(rare / len(column), RARE_SHARE) * (1 - 1e-9)
    return PoolRare(tuple(levels[mass >= least].tolist()))


# Default length scales, until they are learned


HEURISTIC_ROWS = 1000
"""Rows whose pairwise distances are looked at."""


def default_kernel(
    rows: Array,
    weights: Array,
    few: Array,
    few_weights: Array,
    columns: Columns,
    form: str = "standard",
) -> Kernel:
    """The kernel of :func:`median_heuristic`, times one of the categorical columns if there are.

    Then numeric columns are standardised, and rare levels are pooled. Constant columns are left
    out, unless there are no others. The arguments are those of :func:`median_heuristic`, and the
    form of numeric columns is that of :func:`learn_transform`.
    """
    if form == "standard" and not columns.categories:
        return _of_varying(rows, weights, few, few_weights)
    to_scale = learn_transform(rows, weights, columns.categorical, form)
    kernel: Kernel
    if not columns.categories:
        kernel = _of_varying(to_scale(rows), weights, to_scale(few), few_weights)
        return TransformedKernel(kernel, to_scale)
    coded = [j for j, is_coded in enumerate(columns.categorical) if is_coded]
    numeric = [j for j, is_coded in enumerate(columns.categorical) if not is_coded]
    kernel = Categorical(1.0)
    if numeric:
        scaled, few_scaled = to_scale(rows)[:, numeric], to_scale(few)[:, numeric]
        gaussian = _of_varying(scaled, weights, few_scaled, few_weights)
        kernel = gaussian.on(numeric) * kernel.on(coded)
    return TransformedKernel(kernel, to_scale)


def _of_varying(rows: Array, weights: Array, few: Array, few_weights: Array) -> Kernel:
    """The kernel of :func:`median_heuristic` on the columns that are not constant."""
    count = rows.shape[1]
    constant = constant_columns(rows, weights, (False,) * count)
    if not constant:
        return median_heuristic(rows, weights, few, few_weights)
    if len(constant) == count:
        return Gaussian(1.0)  # it is 1 at all rows, whatever its length scale
    varying = [j for j in range(count) if j not in constant]
    kernel = median_heuristic(rows[:, varying], weights, few[:, varying], few_weights)
    return kernel.on(varying)


def median_heuristic(rows: Array, weights: Array, few: Array, few_weights: Array) -> Gaussian:
    """Gaussian kernel whose length scales are the median distance of standardised rows.

    l_j = s_j median_{i < k} |(x_i - x_k) / s|, with s the columns' standard deviations, in the
    units of the columns.

    Parameters
    ----------
    rows, weights
        Rows of the row sample, shape (k, d), and their weights, sum 1: for the deviations s.
    few, few_weights
        A random part of them, for the median over its pairs.

    Notes
    -----
    Columns must not be constant: these have no scale.

    Source: Gretton et al. (2012), Journal of Machine Learning Research 13, section 8. If more than
    half of the distances are zero (duplicated rows), the median is over distinct rows.
    """
    largest = np.abs(rows).max(axis=0, initial=0.0)
    unit = np.where(largest > 0, largest, 1.0)  # squares of the values may leave the range
    scaled = rows / unit
    relative = np.sqrt(weights @ (scaled - weights @ scaled) ** 2)
    median = _median_distance(few / unit / relative, few_weights)
    if median == 0.0:
        distinct = np.unique(scaled / relative, axis=0)
        distinct = distinct[:: -(-len(distinct) // HEURISTIC_ROWS)]
        median = _median_distance(distinct, np.ones(len(distinct)))
    return Gaussian(tuple(float(s) * median for s in unit * relative))


def _median_distance(rows: Array, weights: Array) -> float:
    """Weighted lower median of the distances of pairs."""
    distances = pdist(rows)
    if np.ptp(weights) == 0.0:
        middle = (len(distances) - 1) // 2
        return float(np.partition(distances, middle)[middle])
    first, second = np.triu_indices(len(rows), 1)
    order = np.argsort(distances, kind="stable")
    mass = np.cumsum((weights[first] * weights[second])[order])
    return float(distances[order[np.searchsorted(mass, mass[-1] / 2)]])
