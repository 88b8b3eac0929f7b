"""What laws in cells should be, cell by cell and row by row; nothing of the package is used."""

import numpy as np


def masses(cells, weights, folds, n_folds, size):
    found = np.zeros((n_folds, size))
    for cell, weight, fold in zip(cells, weights, folds, strict=True):
        found[fold, cell] += weight
    return found


def moments(rows, cells, weights, size):
    """Means and covariances of each cell; zeros where there are no rows of positive weight."""
    d = rows.shape[1]
    means, covariances = np.zeros((size, d)), np.zeros((size, d, d))
    for s in range(size):
        mine, w = rows[cells == s], weights[cells == s]
        if w.sum() > 0:
            means[s] = np.average(mine, axis=0, weights=w)
            away = mine - means[s]
            covariances[s] = (
                sum(w_i * np.outer(z, z) for w_i, z in zip(w, away, strict=True)) / w.sum()
            )
    return means, covariances


def averages(values, cells, weights, size):
    """Means of functions (n, q) in each cell; over all rows where it has none."""
    found = np.tile(np.average(values, axis=0, weights=weights), (size, 1))
    for s in range(size):
        w = weights[cells == s]
        if w.sum() > 0:
            found[s] = np.average(values[cells == s], axis=0, weights=w)
    return found


def kept(hashes, cells, weights, bounds, count, size):
    """Positions of the rows that are kept of each cell: the smallest hashes up to its bound."""
    found = []
    for s in range(size):
        able = [
            (int(h), i)
            for i, h in enumerate(hashes)
            if cells[i] == s and weights[i] > 0 and h <= bounds[s]
        ]
        found.append([i for _, i in sorted(able)[:count]])
    return found


def components(partition, cells, weights, size):
    """E[b_j 1_s]: sums over the rows, shape (m, S), of b (n, m)."""
    found = np.zeros((partition.shape[1], size))
    for b, cell, weight in zip(partition, cells, weights, strict=True):
        found[:, cell] += weight * b
    return found / weights.sum()
