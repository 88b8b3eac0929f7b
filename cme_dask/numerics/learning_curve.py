"""Errors of predictions from all rows, told by those of predictions from fewer."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = Any

PAIRS = 3
"""Pairs of folds that are left out together, at most."""

_USUAL = 0.9  # share of the errors that are usual
_FAR = 4.0  # times the largest usual error: of normal errors none in 10^10 is larger


def fold_pairs(folds: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of folds of which no two share one; none of fewer than four folds.

    A fit without two of three folds has seen a third of the rows, which says little of all of them.
    """
    count = min(PAIRS, len(folds) // 2) if len(folds) > 3 else 0
    return [(folds[2 * k], folds[2 * k + 1]) for k in range(count)]


def error_of_all(fewer: Array, some: Array, share: Array, seen: tuple[float, float]) -> Array:
    r"""Errors of a fit to all rows over those of fits without some of them, shape (q,).

    Errors E are taken to fall like a power of the share r of the rows that a fit has seen:

    .. math:: c = \frac{E(1)}{E(r_1)} = \Bigl(\frac{E(r_2)}{E(r_1)}\Bigr)^{-k}, \qquad
              k = \frac{\log(1 / r_1)}{\log(r_1 / r_2)}, \qquad r_2 < r_1 < 1,

    and at most like 1 / r, so that c is at least r_1. The ratio is taken one standard error nearer
    to 1, and c is at most 1: what noise alone explains leaves the errors as they are. Errors far
    beyond most others count as the largest that are not, lest one row decides: where a row has
    more leverage than all others together, the fit without it may be wrong there by any factor.

    Parameters
    ----------
    fewer, some
        Absolute errors of fits that have seen the shares r_2 and r_1 of the rows, at rows, or on
        average over groups of rows, that neither has seen: shape (n, q).
    share
        Of the rows or groups, positive, shape (n,).
    seen
        r_2 and r_1.
    """
    least, most = seen
    if not 0.0 < least < most < 1.0 or len(share) < 2:
        return np.ones(some.shape[1])
    share = share / share.sum()
    each = [np.quantile(column, _USUAL, weights=share, method="inverted_cdf") for column in some.T]
    usual = np.array(each)
    # Where most errors are zero, none of the others is unusual.
    bound = np.where(usual > 0.0, _FAR * usual, np.inf)
    fewer, some = np.minimum(fewer, bound), np.minimum(some, bound)
    before, after = share @ fewer, share @ some
    known = (before > 0.0) & (after > 0.0)
    before, after = np.where(known, before, 1.0), np.where(known, after, 1.0)
    away = fewer - some * (before / after)
    error = np.sqrt(len(share) / (len(share) - 1) * (share**2 @ away**2))
    ratio = np.where(known, np.maximum((before - error) / after, 1.0), 1.0)
    return np.maximum(ratio ** -(np.log(1.0 / most) / np.log(most / least)), most)


def scale_of_all(
    y: Array,
    held_out: Array,
    groups: Array,
    weights: Array,
    refits: Callable[[Sequence[Array]], Sequence[Array]],
    units: Array,
) -> Array:
    """Errors of predictions from all rows over held-out ones, by :func:`error_of_all`, shape (q,).

    Parameters
    ----------
    y, held_out
        Rows, and what fits without their group predict, both of shape (n, q).
    groups, weights
        Group number of each row, and weights, shapes (n,).
    refits
        From rows that are left out, masks (n,), to what fits without them predict there.
    units
        A number for each row that tells which rows are alike, shape (n,).
    """
    used = np.unique(groups[weights > 0.0])
    pairs = fold_pairs(used.tolist())
    left_out = [np.isin(groups, pair) for pair in pairs]
    fewer = np.zeros(y.shape)
    for out, predicted in zip(left_out, refits(left_out), strict=True):
        fewer[out] = np.abs(y[out] - predicted)
    held = np.isin(groups, np.ravel(pairs)) & (weights > 0.0)
    share, (names, unit) = weights[held], np.unique(units[held], return_inverse=True)
    each = float(share.sum() / weights.sum()) / max(2 * len(pairs), 1)
    of_units = np.bincount(unit, share, len(names))

    def means(errors: Array) -> Array:
        """Over the rows of each unit, shape (U, q)."""
        sums = [np.bincount(unit, share * column, len(names)) for column in errors[held].T]
        return np.stack(sums, axis=1) / of_units[:, None]

    seen = 1.0 - 2.0 * each, 1.0 - each
    return error_of_all(means(fewer), means(np.abs(y - held_out)), of_units, seen)
