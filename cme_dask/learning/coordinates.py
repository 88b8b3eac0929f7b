"""Coordinates of columns, learned from the row sample."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import ndtri

from cme_dask.errors import DataError
from cme_dask.kernels.coordinates import Coordinate, Coordinates, Pooled, Scores, Standard

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


def coordinates(
    rows: Array,
    weights: Array,
    categorical: Sequence[bool],
    form: str,
    *,
    rare: int = RARE_ROWS,
) -> Coordinates:
    r"""Coordinates in which all columns have the same scale.

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
    return Coordinates(
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
        As in :func:`coordinates`.
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


def _standard(values: Array, shares: Array) -> Coordinate:
    if _is_constant(values):
        return Standard(float(values[0]), 1.0)
    unit = np.abs(values).max()  # squares of the values may leave the range
    scaled = values / unit
    mean = shares @ scaled
    deviation = float(unit * np.sqrt(shares @ (scaled - mean) ** 2))
    return Standard(float(unit * mean), deviation or 1.0)


def _scores(values: Array, shares: Array) -> Coordinate:
    if _is_constant(values):
        return Standard(float(values[0]), 1.0)
    distinct, mass = _atoms(values, shares)
    scores = _mid_rank_scores(mass, len(values))
    kept = _knots(scores, mass)
    # Rounding may have made scores of tiny masses equal.
    scores, first = np.unique(scores[kept], return_index=True)
    knots, scores = _with_tails(distinct[kept][first], scores)
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


def _pooled(column: Array, shares: Array, rare: int) -> Coordinate:
    levels, mass = _atoms(*_sorted(column, shares))
    # Shares are sums: a level of exactly the least number of rows must not be lost to rounding.
    least = max(rare / len(column), RARE_SHARE) * (1 - 1e-9)
    return Pooled(tuple(levels[mass >= least].tolist()))
