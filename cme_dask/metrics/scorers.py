"""Scores of estimators for scikit-learn, and the criteria of the joint paper."""

from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.metrics.inputs import row_weights
from cme_dask.metrics.predictions import mean_square
from cme_dask.numerics.row_scores import log_losses

Array = Any


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
        If the estimator has no laws, y holds labels, or weights are negative or all zero.
    """
    return -_average(np.asarray(_laws(estimator, X)[0].crps(y)), sample_weight)


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
        If the estimator has neither laws nor probabilities, a label is none of its classes, or
        weights are negative or all zero.
    """
    if hasattr(estimator, "classes_"):
        shares, classes = np.asarray(estimator.predict_proba(X)), np.asarray(estimator.classes_)
        observed = np.asarray(y).reshape(len(shares))
    else:
        law, columns = _laws(estimator, X)
        if not columns.categories:
            return _average(np.asarray(law.log_pdf(y, paired=True)), sample_weight)
        if len(columns.names) > 1:
            labelled = ", ".join(map(repr, columns.categories))
            raise DataError(
                f"y has labels ({labelled}) beside other columns, and so neither a density nor "
                "probabilities of labels alone: score one column of labels, or columns of numbers"
            )
        shares = np.asarray(law.predict_proba())
        classes = np.asarray(columns.categories[columns.names[0]])
        observed = np.asarray(y).reshape(len(shares)).astype(str)
    order = np.argsort(classes)
    place = np.minimum(np.searchsorted(classes[order], observed), len(classes) - 1)
    codes = order[place]
    if (classes[codes] != observed).any():
        unknown = observed[classes[codes] != observed].tolist()[0]
        raise DataError(f"y holds the label {unknown!r}, the classes are {classes.tolist()}")
    return -_average(log_losses(shares, codes), sample_weight)


def _average(scores: Array, weights: Any) -> float:
    return float(np.average(scores, weights=row_weights(weights, len(scores))))


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
    return mean_square("oracle_error", estimate, truth)


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
    return mean_square("validation_error", estimate, values)
