"""Choices of pivots written down a second time, one pivot after the other on full matrices.

Nothing of them is shared with the package.
"""

import itertools

import numpy as np

from cme_dask.numerics.folds import RowSample


def row_sample(points, weights=None, *, complete=False):
    """The rows as a row sample in their order."""
    n = len(points)
    keys, weights = np.arange(1, n + 1) * 1e-12, np.ones(n) if weights is None else weights
    return RowSample(keys, np.arange(n), (points,), weights, complete)


def greedy(K, tol, max_rank=None, weights=None):
    """Algorithm 1 of the joint paper; ties within 1e-10 of the largest to the lowest index.

    Returns the pivots, L, and the relative residual trace after 0, 1, ... of them.
    """
    share = np.ones(len(K)) if weights is None else weights
    d = np.diag(K).astype(float).copy()
    total, largest = share @ d, d.max()
    L, pivots, trace = np.zeros((len(K), 0)), [], [1.0]
    while trace[-1] > tol and len(pivots) < (max_rank or len(K)):
        if d.max() <= 8 * np.finfo(float).eps * (len(pivots) + 1) * largest:
            break
        j = int(np.flatnonzero(d >= d.max() * (1 - 1e-10))[0])
        column = (K[:, j] - L @ L[j]) / np.sqrt(d[j])
        L, d = np.column_stack([L, column]), np.maximum(d - column**2, 0)
        d[j] = 0.0
        pivots.append(j)
        trace.append(share @ d / total)
    return pivots, L, np.array(trace)


def by_trace(K, count, share, signs, candidates=256, worth=0.3, least=0.1):
    """Pivots that take most from the trace, as sketched, with the residual matrix itself.

    Row i is in group i mod 256; a round goes on while the best of the groups' best rows takes at
    least 0.3 of what the best other row would have taken when it began. ``signs`` has a row for
    each of K.
    """
    S, pivots = K.copy(), []

    def gains():
        residual = np.diag(S)
        norms = ((S @ (signs * np.sqrt(share)[:, None])) ** 2).sum(axis=1)
        return np.where(residual > bar, norms / np.maximum(residual, bar), 0.0)

    while len(pivots) < count:
        bar = least * share @ np.diag(S) / share.sum()
        gain = gains()
        best = [max(range(g, len(K), candidates), key=lambda i: gain[i]) for g in range(candidates)]
        outside = np.delete(gain, best).max(initial=0.0)
        first = True
        while len(pivots) < count:
            gain = gains()
            j = max(sorted(best), key=lambda i: gain[i])
            if not first and gain[j] < worth * outside:
                break
            S = S - np.outer(S[:, j], S[j]) / S[j, j]
            S[j] = S[:, j] = 0.0
            pivots.append(j)
            first = False
    return pivots


def largest_gains(K, count):
    """Pivots that take most from the trace, without a sketch (Farahat et al. 2011)."""
    S, pivots = K.copy(), []
    for _ in range(count):
        residual = np.diag(S)
        norms = (S**2).sum(axis=1)
        some = residual > 0.1 * residual.mean()
        j = int(np.argmax(np.where(some, norms / np.where(some, residual, 1.0), 0.0)))
        S = S - np.outer(S[:, j], S[j]) / S[j, j]
        pivots.append(j)
    return pivots, np.trace(S) / np.trace(K)


def randomly(K, rank, rng, weights=None):
    """Randomly pivoted Cholesky (Chen, Epperly, Tropp and Webber 2025, Algorithm 1)."""
    share = np.ones(len(K)) if weights is None else weights
    d, L, pivots = np.diag(K).astype(float).copy(), np.zeros((len(K), 0)), []
    total = share @ d
    for _ in range(rank):
        j = int(rng.choice(len(K), p=share * d / (share @ d)))
        column = (K[:, j] - L @ L[j]) / np.sqrt(d[j])
        L, d = np.column_stack([L, column]), np.maximum(d - column**2, 0)
        d[j] = 0.0
        pivots.append(j)
    return pivots, share @ d / total


def law_of_random_pivots(K, rank, weights=None):
    """Probability of every sequence of pivots, by enumeration."""
    share = np.ones(len(K)) if weights is None else weights
    law = {}
    for sequence in itertools.permutations(range(len(K)), rank):
        S, p = K.copy(), 1.0
        for j in sequence:
            mass = share * np.diag(S).clip(min=0.0)
            p *= mass[j] / mass.sum()
            S = S - np.outer(S[:, j], S[j]) / S[j, j]
        law[sequence] = p
    return law
