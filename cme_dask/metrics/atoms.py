"""Scores of laws that are given by weighted atoms, one law per observation."""

from functools import partial
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.metrics.inputs import columns, finite, numbers, rowwise, sum_tolerance
from cme_dask.numerics.folds import number_hash, uniform
from cme_dask.numerics.row_scores import energy_scores
from cme_dask.numerics.scoring import sorted_crps

Array = Any

_HELD = 1 << 16  # numbers at once: they stay in cache
_MOST_SEED = 1 << 62


def crps(weights: Any, points: Any, y: Any) -> Array:
    r"""Continuous ranked probability score of weighted atoms, lower is better.

    .. math:: \mathrm{CRPS}(F, y) = \int (F(z) - 1\{y \le z\})^2 \, dz
              = \sum_s w_s |y_s - y| - \tfrac12 \sum_{s,t} w_s w_t |y_s - y_t|

    with the distribution function F of the atoms; the mean over the coordinates of a vector y.

    Parameters
    ----------
    weights
        w, one law per row, shape (q, S), each of sum 1.
    points
        Atoms y_s, shape (S,) or (S, d); or those of each law, (q, S, d).
    y
        The observations, shape (q,) or (q, d).

    Returns
    -------
    scores : (q,), in the units of y; a Dask array if one with q rows is given

    Raises
    ------
    DataError
        If shapes don't fit, values are not finite, or weights don't add up to one.

    Notes
    -----
    Sorted atoms make the double sum a single one: F (1 - F) between neighbours. Signed weights of
    sum 1 are admitted: the score is the same integral, non-negative and zero only for the step at
    y. But F may then fall and leave [0, 1]: it is no law, and the distribution function nearest to
    it in L2 has a score that is not larger, whatever y.

    Source: Gneiting and Raftery (2007), Journal of the American Statistical Association 102, (20)
    and (21).
    """
    return _of_laws("crps", _crps, weights, points, y)


def energy_score(weights: Any, points: Any, y: Any) -> Array:
    r"""Energy score of weighted atoms at vectors y, lower is better.

    .. math:: \mathrm{ES}(F, y) = \sum_s w_s |y_s - y|_2
              - \tfrac12 \sum_{s,t} w_s w_t |y_s - y_t|_2

    It judges all columns of y jointly, and of one column it is the :func:`crps`. Columns of
    different units need to be divided by a scale of each before.

    Parameters
    ----------
    weights
        w, one law per row, shape (q, S), each of sum 1.
    points
        Atoms y_s, shape (S,) or (S, d); or those of each law, (q, S, d).
    y
        The observations, shape (q,) or (q, d).

    Returns
    -------
    scores : (q,), in the units of y; a Dask array if one with q rows is given

    Raises
    ------
    DataError
        If shapes don't fit, values are not finite, or weights don't add up to one.

    Notes
    -----
    It takes S^2 operations per row, and memory of a few S numbers beside its arguments.

    Source: Gneiting and Raftery (2007), Journal of the American Statistical Association 102, (22).
    """
    return _of_laws("energy_score", energy_scores, weights, points, y)


def pit(weights: Any, points: Any, y: Any, *, random_state: int | None = None) -> Array:
    r"""Probability integral transform F(y) of weighted atoms; uniform on [0, 1] for true laws.

    .. math:: u = F(y-) + v (F(y) - F(y-)), \quad F(y-) = \sum_{s: y_s < y} w_s, \quad
              F(y) = \sum_{s: y_s \le y} w_s

    Parameters
    ----------
    weights
        w, one law per row, non-negative, shape (q, S), each of sum 1.
    points
        Atoms y_s, shape (S,) or (S, d); or those of each law, (q, S, d).
    y
        The observations, shape (q,) or (q, d), each coordinate by itself.
    random_state
        Seed of v, a non-negative integer. By default v = 1/2, the middle of the step of F at y.

    Returns
    -------
    values : of the shape of y, in [0, 1]; a Dask array if one with q rows is given

    Raises
    ------
    DataError
        If shapes don't fit, values are not finite, weights are negative or don't add up to one, or
        the seed is no non-negative integer.

    Notes
    -----
    Where y is one of the atoms, as counts and rounded values are, the middle value is not uniform
    for true laws; with random v, uniform on (0, 1), it is. The random numbers depend on the seed
    and on the number of the row, not on chunks.

    Source: Czado, Gneiting and Held (2009), Biometrics 65, 1254, (1).
    """
    seeded = isinstance(random_state, (int, np.integer)) and 0 <= random_state < _MOST_SEED
    if random_state is not None and not seeded:
        raise DataError(f"random_state must be a non-negative integer, got {random_state!r}")
    y = numbers("points and y", y)
    tail = tuple(y.shape[1:])
    result = _of_laws("pit", partial(_pit, seed=random_state), weights, points, y, numbered=True)
    return result if tail else result[:, 0]


def _crps(weights: Array, points: Array, y: Array) -> Array:
    scores = np.zeros(len(y))
    step = max(_HELD // max(weights.shape[1], 1), 1)
    for j, observed in enumerate(y.T):
        atoms = points[..., j]
        order = np.argsort(atoms, axis=-1, kind="stable")
        for start in range(0, len(y), step):
            here = slice(start, start + step)
            if points.ndim == 3:
                law = np.take_along_axis(weights[here], order[here], axis=1)
                ascending = np.take_along_axis(atoms[here], order[here], axis=1)
            else:
                law, ascending = weights[here][:, order], atoms[order]
            scores[here] += sorted_crps(law, ascending, observed[here])
    return scores / y.shape[1]


def _pit(weights: Array, points: Array, y: Array, rows: Array, seed: int | None) -> Array:
    if (weights < 0.0).any():
        raise DataError("pit takes non-negative weights, those of a law")
    result = np.full(y.shape, 0.5)
    if seed is not None:
        start = number_hash(int(seed), rows.astype(np.uint64))
        for j in range(y.shape[1]):
            result[:, j] = uniform(_MOST_SEED, start + np.uint64(j))
    step = max(_HELD // max(weights.shape[1], 1), 1)
    for j, observed in enumerate(y.T):
        for start in range(0, len(y), step):
            here = slice(start, start + step)
            atoms = points[here, :, j] if points.ndim == 3 else points[:, j]
            at = observed[here, None]
            before = np.einsum("bs,bs->b", weights[here], atoms < at)
            step_of_y = np.einsum("bs,bs->b", weights[here], atoms == at)
            result[here, j] = before + result[here, j] * step_of_y
    return np.clip(result, 0.0, 1.0)


def _of_laws(
    name: str, score: Any, weights: Any, points: Any, y: Any, *, numbered: bool = False
) -> Array:
    """Of checked laws: the score takes weights (b, S), points (S, d) or (b, S, d) and y (b, d)."""
    weights, tolerance = numbers("weights", weights), sum_tolerance(weights)
    check = partial(_checked, score, tolerance)
    points, y = (columns(numbers("points and y", values)) for values in (points, y))
    own = points.ndim == 3
    fits = weights.ndim == 2 and y.ndim == 2 and len(weights) == len(y)
    if not fits or points.shape != (*weights.shape, y.shape[1])[0 if own else 1 :]:
        raise DataError(
            f"{name} takes weights (q, S), points (S, d) or (q, S, d) and y (q, d), got shapes "
            f"{weights.shape}, {points.shape} and {y.shape}"
        )
    tail = (y.shape[1],) if numbered else ()
    block: Any
    arrays: tuple[Array, ...]
    if own:
        block, arrays = check, (weights, points, y)
    else:
        shared = finite("points and y", points)
        block, arrays = partial(_checked_shared, check, shared), (weights, y)
    return rowwise(block, *arrays, name=name, tail=tail, numbered=numbered)


def _checked(
    score: Any, tolerance: float, weights: Array, points: Array, y: Array, *rows: Array
) -> Array:
    weights = finite("weights", weights)
    points, y = (finite("points and y", values) for values in (points, y))
    size = np.maximum(np.abs(weights).sum(axis=1), 1.0)
    if (np.abs(weights.sum(axis=1) - 1.0) > tolerance * size).any():
        raise DataError("the weights of each row must add up to one: divide them by their sum")
    return score(weights, points, y, *rows)


def _checked_shared(check: Any, points: Array, weights: Array, y: Array, *rows: Array) -> Array:
    return check(weights, points, y, *rows)
