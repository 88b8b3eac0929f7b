"""Probabilities of labels from signed estimates: nearest, clipped, positive; their entropies."""

from typing import Any

import numpy as np

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
