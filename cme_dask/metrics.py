"""Proper scores of laws and of conditional expectations, and the criteria of the joint paper."""

from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.crossval import held_out_loss, held_out_losses
from cme_dask.numerics.scoring import sorted_crps

Array = Any

__all__ = [
    "brier",
    "crps",
    "crps_scorer",
    "held_out_loss",
    "held_out_losses",
    "log_score_scorer",
    "oracle_error",
    "validation_error",
]

_HELD = 1 << 16  # numbers at once: they stay in cache


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
    scores : (q,), in the units of y

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
    weights, points, y = _numbers("weights", weights), _columns(points), _columns(y)
    own = points.ndim == 3
    requested = (*weights.shape, y.shape[1])[0 if own else 1 :]
    if weights.ndim != 2 or len(weights) != len(y) or points.shape != requested:
        raise DataError(
            "crps takes weights (q, S), points (S, d) or (q, S, d) and y (q, d), got shapes "
            f"{weights.shape}, {points.shape} and {y.shape}"
        )
    size = np.maximum(np.abs(weights).sum(axis=1), 1.0)
    if (np.abs(weights.sum(axis=1) - 1.0) > 1e-9 * size).any():
        raise DataError("the weights of each row must add up to one: divide them by their sum")
    scores = np.zeros(len(y))
    step = max(_HELD // max(weights.shape[1], 1), 1)
    for j, observed in enumerate(y.T):
        atoms = points[..., j]
        order = np.argsort(atoms, axis=-1, kind="stable")
        for start in range(0, len(y), step):
            here = slice(start, start + step)
            if own:
                law = np.take_along_axis(weights[here], order[here], axis=1)
                ascending = np.take_along_axis(atoms[here], order[here], axis=1)
            else:
                law, ascending = weights[here][:, order], atoms[order]
            scores[here] += sorted_crps(law, ascending, observed[here])
    return scores / y.shape[1]


def crps_scorer(estimator: Any, X: Any, y: Any, sample_weight: Any = None) -> float:
    """Minus the mean CRPS of the conditional laws: a ``scoring`` for scikit-learn.

    ``cross_val_score(JointDistribution(), X, y, scoring=crps_scorer)`` judges whole laws, where the
    estimator's own ``score`` judges their means alone.

    Parameters
    ----------
    estimator
        A fitted estimator of laws, or a pipeline that ends in one.
    X, y
        Held-out rows, shapes (n, d_X) and (n,) or (n, d_Y); y of numbers.
    sample_weight
        Weights of the rows, shape (n,).

    Returns
    -------
    score : at most 0, higher is better, in the units of y

    Raises
    ------
    DataError
        If the estimator has no laws, or y holds labels.
    """
    return -float(np.average(np.asarray(_laws(estimator, X)[0].crps(y)), weights=sample_weight))


def log_score_scorer(estimator: Any, X: Any, y: Any, sample_weight: Any = None) -> float:
    """Mean logarithm of the density, or of the probability of the label: a ``scoring``.

    Parameters
    ----------
    estimator
        A fitted estimator of laws or of probabilities of labels, or a pipeline that ends in one.
    X, y
        Held-out rows, shapes (n, d_X) and (n,) or (n, d_Y): columns of numbers, or one of labels.
    sample_weight
        Weights of the rows, shape (n,).

    Returns
    -------
    score : higher is better; of densities it depends on the units of y

    Raises
    ------
    DataError
        If the estimator has neither laws nor probabilities, or a label is none of its classes.
    """
    if hasattr(estimator, "classes_"):
        shares, classes = np.asarray(estimator.predict_proba(X)), np.asarray(estimator.classes_)
        observed = np.asarray(y).reshape(len(shares))
    else:
        law, columns = _laws(estimator, X)
        if not columns.categories:
            logarithms = np.asarray(law.log_pdf(y, paired=True))
            return float(np.average(logarithms, weights=sample_weight))
        shares = np.asarray(law.predict_proba())
        classes = np.asarray(columns.categories[columns.names[0]])
        observed = np.asarray(y).reshape(len(shares)).astype(classes.dtype)
    order = np.argsort(classes)
    place = np.minimum(np.searchsorted(classes[order], observed), len(classes) - 1)
    codes = order[place]
    if (classes[codes] != observed).any():
        unknown = observed[classes[codes] != observed].tolist()[0]
        raise DataError(f"y holds the label {unknown!r}, the classes are {classes.tolist()}")
    with np.errstate(divide="ignore"):  # a law may exclude a label
        logarithms = np.log(shares[np.arange(len(codes)), codes])
    return float(np.average(logarithms, weights=sample_weight))


def _laws(estimator: Any, X: Any) -> tuple[Any, Any]:
    """The conditional laws at X, and the columns of y."""
    while hasattr(estimator, "steps"):
        if len(estimator.steps) > 1:
            X = estimator[:-1].transform(X)
        estimator = estimator[-1]
    if not hasattr(estimator, "conditional"):
        raise DataError(
            f"{type(estimator).__name__} has no conditional laws: score a JointDistribution"
        )
    law = estimator.conditional(X)
    return law, law.columns


def brier(probabilities: Any, events: Any) -> float:
    """Brier score: mean over rows of sum over events of (p - 1{event})^2, lower is better.

    Parameters
    ----------
    probabilities
        p, shape (n,) or (n, k).
    events
        Whether each happened, true or false or 0 or 1, of the same shape.

    Returns
    -------
    score : between 0 and k, for probabilities between 0 and 1

    Raises
    ------
    DataError
        If shapes differ, values are not finite, or events are neither 0 nor 1.

    Notes
    -----
    Of the classes of one variable it is the original score, twice that of one of two classes.
    Source: Brier (1950), Monthly Weather Review 78, (2).
    """
    happened = _numbers("events", events)
    if not np.isin(happened, (0.0, 1.0)).all():
        raise DataError("events must be true or false, or 0 or 1")
    return _mean_square("brier", probabilities, happened)


def oracle_error(estimate: Any, truth: Any) -> float:
    r"""Criterion (43) of the joint paper: the error against the true conditional expectations.

    .. math:: \frac1n \sum_i
              \bigl| \mathrm E^M[t(Y) | X = x_i] - \mathrm E[t(Y) | X = x_i] \bigr|_2^2

    Parameters
    ----------
    estimate
        Estimated expectations of the functions t, shape (n, q).
    truth
        True ones, of the same shape.

    Returns
    -------
    error

    Raises
    ------
    DataError
        If shapes differ or values are not finite.
    """
    return _mean_square("oracle_error", estimate, truth)


def validation_error(estimate: Any, values: Any) -> float:
    r"""Criterion (41) of the joint paper over n: the error against observations.

    .. math:: \frac1n \sum_i \bigl| t(y_i) - \mathrm E^M[t(Y) | X = x_i] \bigr|_2^2

    Divided by n, which (41) is not, it compares between samples of different size: it is (43) plus
    the mean conditional variance of t(Y), up to noise.

    Parameters
    ----------
    estimate
        Estimated expectations of the functions t at held-out x_i, shape (n, q).
    values
        t(y_i), of the same shape.

    Returns
    -------
    error

    Raises
    ------
    DataError
        If shapes differ or values are not finite.
    """
    return _mean_square("validation_error", estimate, values)


def _mean_square(name: str, one: Any, two: Any) -> float:
    one, two = _numbers(name, one), _numbers(name, two)
    if one.shape != two.shape or one.ndim not in (1, 2) or not len(one):
        raise DataError(
            f"{name} takes two arrays of one shape, (n,) or (n, q), got {one.shape} and {two.shape}"
        )
    return float(((one - two) ** 2).sum() / len(one))


def _columns(values: Any) -> Array:
    array = _numbers("points and y", values)
    return array[:, None] if array.ndim == 1 else array


def _numbers(name: str, values: Any) -> Array:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: numbers expected, got {type(values).__name__}") from error
    if not np.isfinite(array).all():
        raise DataError(f"{name}: NaN or infinity")
    return array
