"""Cells of a variable from the row sample: quantile bins, or k-means."""

from typing import Any

import numpy as np
from sklearn.cluster import KMeans

from cme_dask.chunked.blas import one_blas_thread
from cme_dask.errors import DataError
from cme_dask.numerics.support import SUPPORT_SIZE, Support

Array = Any

_ITERATIONS = 10  # of Lloyd: more of them take seconds and gain little
_CLUSTERED = 1 << 15  # rows that k-means sees: a thousand cells of them take a second

_SEEDS = 1 << 32  # of NumPy's older generator, which k-means takes


def make_support(rows: Array, weights: Array, size: int = SUPPORT_SIZE, seed: int = 0) -> Support:
    """Cells for the law of a variable.

    With at most ``size`` distinct rows each is a cell of its own, exactly. Otherwise, cells of
    about equal mass between quantiles of a scalar variable, each with its mean as its point; and
    the cells of k-means on standardised columns.

    Parameters
    ----------
    rows
        Rows of the row sample, in its order, shape (k, d); k-means sees the first 32,768 of them.
    weights
        Their weights, shape (k,); rows without weight are left out.
    size
        Largest number of cells.
    seed
        Of the first centres of k-means.

    Raises
    ------
    DataError
        If no row has a weight, or the size is not positive.

    Notes
    -----
    An atom that holds more than two cells' mass is a cell of its own. Source of k-means++: Arthur
    and Vassilvitskii (2007), Proceedings of SODA, 1027.
    """
    if size < 1:
        raise DataError(f"a support needs at least one cell, got size={size!r}")
    usable = weights > np.finfo(np.float64).tiny * weights.max(initial=0.0)
    if not usable.any():
        raise DataError("a support needs rows of positive weight")
    rows, weights = rows[usable], weights[usable]
    distinct, mass = _distinct(rows, weights)
    if rows.shape[1] == 1:
        return _bins(distinct[:, 0], mass, size)
    if len(distinct) > size:
        distinct, mass = _distinct(rows[:_CLUSTERED], weights[:_CLUSTERED])
    deviation = _deviations(distinct, mass)
    if len(distinct) <= size:
        return Support(distinct, scale=deviation)
    return _clusters(distinct, mass, deviation, size, seed)


def _distinct(rows: Array, weights: Array) -> tuple[Array, Array]:
    """Distinct rows in order, and their masses, sum 1."""
    distinct, which = np.unique(rows, axis=0, return_inverse=True)
    mass = np.bincount(which.ravel(), weights)
    return distinct, mass / mass.sum()


def _bins(values: Array, mass: Array, size: int) -> Support:
    """Intervals between quantiles; values (k,) ascend."""
    if len(values) <= size:
        number = np.arange(len(values))
    else:
        level = np.minimum((size * (np.cumsum(mass) - mass / 2)).astype(np.int64), size - 1)
        number = np.unique(level, return_inverse=True)[1]
    first = np.flatnonzero(np.diff(number, prepend=-1))
    last = np.append(first[1:], len(values)) - 1
    share = np.bincount(number, mass)
    # From the lowest value of the bin, so that the mean of equal values is that value.
    lowest = values[first]
    means = lowest + np.bincount(number, mass * (values - lowest[number])) / share
    below, above = values[last[:-1]], values[first[1:]]
    middle = below / 2 + above / 2
    edges = np.clip(middle, below, np.nextafter(above, -np.inf))
    return Support(np.clip(means, lowest, values[last])[:, None], edges=edges)


def _deviations(rows: Array, mass: Array) -> Array:
    """Standard deviations of the columns, 1 for constant ones."""
    largest = np.abs(rows).max(axis=0)
    unit = np.where(largest > 0, largest, 1.0)  # squares of the values may leave the range
    scaled = rows / unit
    deviation = unit * np.sqrt(mass @ (scaled - mass @ scaled) ** 2)
    tiny = np.finfo(np.float64).tiny
    return np.where((rows != rows[0]).any(axis=0), np.maximum(deviation, tiny), 1.0)


def _clusters(rows: Array, mass: Array, deviation: Array, size: int, seed: int) -> Support:
    # Several threads of k-means add up in the order in which they end: last bits would change.
    middle = mass @ rows
    means = KMeans(size, n_init=1, max_iter=_ITERATIONS, random_state=seed % _SEEDS)
    with one_blas_thread():
        means.fit((rows - middle) / deviation, sample_weight=mass)
    return Support(np.unique(means.cluster_centers_ * deviation + middle, axis=0), scale=deviation)
