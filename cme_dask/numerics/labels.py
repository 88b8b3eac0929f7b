"""Probabilities of labels from signed estimates: nearest, clipped, positive, calibrated."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from scipy.optimize import minimize

from cme_dask.errors import DataError
from cme_dask.numerics.measure import project

Array = Any


def positive(probabilities: Array, rows: float) -> Array:
    """(n p + 1 / K) / (n + 1) of probabilities p, shape (b, K), from n rows.

    As if one more row had been seen, shared evenly among the labels: no label is excluded, and the
    log loss of one that the law excludes is about log(n K).
    """
    labels = probabilities.shape[1]
    return (rows * probabilities + 1.0 / labels) / (rows + 1.0)


def nearest_shares(signed: Array) -> Array:
    """The probabilities (b, K) nearest to signed estimates of them, which have the same order."""
    return np.asarray(project(signed, np.ones(signed.shape[1]))[0])


def clipped_shares(signed: Array) -> Array:
    r"""Signed estimates over the sum of their positive parts, (6): :math:`p_c^+ / \sum_j p_j^+`.

    Parameters
    ----------
    signed
        Estimates, shape (b, K).

    Returns
    -------
    shares : (b, K)
        Equal ones in a row without a positive estimate.
    """
    clipped = np.maximum(signed, 0.0)
    total = clipped.sum(axis=1, keepdims=True)
    some = total > 0.0
    return np.where(some, clipped / np.where(some, total, 1.0), 1.0 / signed.shape[1])


def entropy(shares: Array) -> Array:
    r"""Entropy in nats, (33): :math:`-\sum_c p_c \log p_c`, shape (b,), where 0 log 0 is 0.

    Parameters
    ----------
    shares
        Shape (b, K). Of signed estimates the terms that are not positive are left out, which makes
        the sum the expected information (37): the embedding of :math:`u_x(c) = -\log p_c`, with 0
        in the place of logarithms that do not exist.
    """
    some = shares > 0.0
    return -np.where(some, shares * np.log(np.where(some, shares, 1.0)), 0.0).sum(axis=1)


# Calibrated probabilities, learned from estimates at rows that a fit has not seen


_FLOOR = 0.01
"""Least probability of a label before calibration: below, estimates are noise."""
_START, _MOST, _STEPS = (4.0, 0.0), 1e3, 100
_SHRINKAGE = 0.01


@dataclass(frozen=True)
class LabelCalibration:
    r"""Probabilities that follow from signed estimates f of them, in the same order.

    .. math:: p_c \propto e^{a f_c} (\tilde f_c)^b, \qquad a, b \ge 0,

    with :math:`\tilde f` the nearest probabilities, at least 0.01. For a = 0 and b = 1 these are
    the nearest probabilities themselves, for b = 0 the estimates are scores of a multinomial
    logistic model: those of classes that can be told apart rise to 1 and no further, so that they
    say less than is known.

    Attributes
    ----------
    scale, power
        a and b.
    """

    scale: float
    power: float

    def __call__(self, signed: Array) -> Array:
        """Probabilities (b, K) from estimates (b, K)."""
        return np.exp(_logarithms(_label_features(signed) @ np.array([self.scale, self.power])))

    @classmethod
    def from_list(cls, values: Any) -> Self:
        """From a and b; ValueError on anything else than two finite numbers, 0 at least."""
        exponents = np.array(values, dtype=np.float64)
        if exponents.shape != (2,) or not np.isfinite(exponents).all() or exponents.min() < 0.0:
            raise ValueError("the calibration needs two finite exponents of at least 0")
        return cls(*map(float, exponents))


def learn_label_calibration(
    signed: Array, codes: Array, weights: Array
) -> tuple[LabelCalibration, Array]:
    r"""The calibration of the smallest mean of :math:`-\log p_y`, which is convex in a and b.

    Parameters
    ----------
    signed
        Estimates at rows that their fit has not seen, shape (n, K).
    codes
        The labels of these rows as whole numbers from 0 on, shape (n,).
    weights
        Of the rows, shape (n,).

    Returns
    -------
    calibration : LabelCalibration
    losses : (n,)
        The values of -log p_y.

    Notes
    -----
    :math:`0.01 ((a - 4)^2 + b^2) / n` is added to the mean, so that a stays finite for classes
    without an error.
    """
    features, rows = _label_features(signed), np.arange(len(codes))
    share, start = weights / weights.sum(), np.array(_START)
    own = features[rows, codes]

    def objective(at: Array) -> tuple[float, Array]:
        logarithms = _logarithms(features @ at)
        mean = (np.exp(logarithms)[:, :, None] * features).sum(axis=1)
        penalty = _SHRINKAGE / len(codes) * (at - start)
        value = -share @ logarithms[rows, codes] + 0.5 * penalty @ (at - start)
        return float(value), share @ (mean - own) + penalty

    result = minimize(
        objective,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, _MOST)] * 2,
        options={"maxiter": _STEPS},
    )
    losses = -_logarithms(features @ result.x)[rows, codes]
    return LabelCalibration(*map(float, result.x)), losses


def _label_features(signed: Array) -> Array:
    """Estimates, and logarithms of the nearest probabilities, shape (b, K, 2)."""
    return np.stack([signed, np.log(np.maximum(nearest_shares(signed), _FLOOR))], axis=-1)


def _logarithms(scores: Array) -> Array:
    """Of the probabilities that are proportional to exp(scores), shape (b, K)."""
    scores = scores - scores.max(axis=1, keepdims=True)
    return np.asarray(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)))


def missing_labels(labels: Array) -> Array:
    """Which labels are None, NaN or what stands for them in pandas, shape (n,)."""
    if labels.dtype.kind not in "fO":
        return np.zeros(len(labels), dtype=bool)
    none = "NoneType", "NAType", "NaTType"
    return np.array([type(v).__name__ in none or v != v for v in labels.tolist()], dtype=bool)


def check_label_types(labels: Array, name: str, plain: tuple[type, ...] = (str,)) -> None:
    """DataError unless labels are numbers, booleans or texts, as they stay when a model is saved.

    Parameters
    ----------
    labels
        Labels, shape (n,); of objects none is missing.
    name
        What messages call them.
    plain
        Types that objects may have, all the same one.
    """
    dtype = labels.dtype
    content = f"values of type {dtype}" if dtype.kind in "SV" or dtype.char == "g" else ""
    if dtype.kind in "mM":
        content = f"times ({dtype})"
    elif dtype.kind == "O":
        of_text = (str(label) if isinstance(label, str) else label for label in labels.tolist())
        types = sorted({type(label).__name__ for label in of_text})  # NumPy's texts are texts
        if len(types) > 1:
            content = f"objects of several types, {', '.join(types)}"
        elif not all(isinstance(label, plain) for label in labels.tolist()):
            content = f"objects of type {types[0]}"
    if content:
        raise DataError(
            f"{name} must hold labels that are numbers, booleans or texts, all of one type, and it "
            f"holds {content}: convert it, for example to text by .astype(str)"
        )
