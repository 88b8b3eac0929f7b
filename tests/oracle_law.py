"""Conditional laws written down a second time: all n weights are held, without importing cme_dask.

``cells`` tells the cell of each row; the weight of a cell is shared among its rows by theirs.
"""

import numpy as np


def project(ratio, masses):
    """Weights v max(g - t, 0) of sum 1, t by bisection, one row after the other."""
    laws = []
    for g in ratio:
        low, high = g.min() - 2.0 / masses[masses > 0].min(), g.max()
        for _ in range(200):
            t = (low + high) / 2
            low, high = (t, high) if masses @ np.maximum(g - t, 0) > 1 else (low, t)
        w = masses * np.maximum(g - low, 0)
        laws.append(w / w.sum())
    return np.array(laws)


def masses_of(cells, weights, size):
    return np.array([weights[cells == s].sum() for s in range(size)]) / weights.sum()


def row_weights(cell_weights, cells, weights):
    """Weights of all rows, shape (q, n), of those of the cells, (q, S)."""
    out = np.zeros((len(cell_weights), len(cells)))
    for s in range(cell_weights.shape[1]):
        here = cells == s
        if here.any():
            out[:, here] = cell_weights[:, [s]] * (weights[here] / weights[here].sum())
    return out


def coupled(pi, b, cells, weights, size):
    """Weights of the cells of mixtures pi (q, m) of P_Y reweighted by b_j / E b_j."""
    w = weights / weights.sum()
    parts = np.array(
        [[(w * b[:, j])[cells == s].sum() for s in range(size)] for j in range(b.shape[1])]
    )
    return pi @ (parts / parts.sum(axis=1, keepdims=True))


def mean(W, rows):
    return np.array([sum(wi * yi for wi, yi in zip(w, rows, strict=True)) for w in W])


def cov(W, rows):
    found = []
    for w, m in zip(W, mean(W, rows), strict=True):
        gap = rows - m
        found.append((w[:, None] * gap).T @ gap)
    return np.array(found)


def expect(W, values):
    return np.array([np.sum(w * values) for w in W])


def cdf(W, column, t):
    return np.array([[w[column <= one].sum() for one in t] for w in W])


def orthant(W, rows, t):
    return np.array([[w[(rows <= one).all(axis=1)].sum() for one in t] for w in W])


def quantile(W, column, levels):
    """Smallest value whose cumulative weight reaches the level, up to 1e-12 of mass."""
    order = np.argsort(column, kind="stable")
    found = []
    for w in W:
        sums = np.cumsum(w[order])
        found.append(
            [
                column[order][
                    np.flatnonzero(sums >= min(max(q - 1e-12, 1e-12), sums[-1] - 1e-13))[0]
                ]
                for q in levels
            ]
        )
    return np.array(found)
