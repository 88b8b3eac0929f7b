"""Default length scales, until they are learned."""

from typing import Any

import numpy as np
from scipy.spatial.distance import pdist

from cme_dask.kernels import Categorical, Gaussian, Kernel, Warped
from cme_dask.learning.coordinates import constant_columns, coordinates
from cme_dask.storage.columns import Columns

Array = Any

HEURISTIC_ROWS = 1000
"""Rows whose pairwise distances are looked at."""


def default_kernel(
    rows: Array, weights: Array, few: Array, few_weights: Array, columns: Columns
) -> Kernel:
    """The kernel of :func:`median_heuristic`, times one of the categorical columns if there are.

    Then numeric columns are standardised, and rare levels are pooled. Constant columns are left
    out, unless there are no others. The arguments are those of :func:`median_heuristic`.
    """
    if not columns.categories:
        return _of_varying(rows, weights, few, few_weights)
    to_scale = coordinates(rows, weights, columns.categorical, "standard")
    coded = [j for j, is_coded in enumerate(columns.categorical) if is_coded]
    numeric = [j for j, is_coded in enumerate(columns.categorical) if not is_coded]
    kernel: Kernel = Categorical(1.0)
    if numeric:
        scaled, few_scaled = to_scale(rows)[:, numeric], to_scale(few)[:, numeric]
        gaussian = _of_varying(scaled, weights, few_scaled, few_weights)
        kernel = gaussian.on(numeric) * kernel.on(coded)
    return Warped(kernel, to_scale)


def _of_varying(rows: Array, weights: Array, few: Array, few_weights: Array) -> Kernel:
    """The kernel of :func:`median_heuristic` on the columns that are not constant."""
    count = rows.shape[1]
    constant = constant_columns(rows, weights, (False,) * count)
    if not constant:
        return median_heuristic(rows, weights, few, few_weights)
    if len(constant) == count:
        return Gaussian(1.0)  # it is 1 at all rows, whatever its length scale
    varying = [j for j in range(count) if j not in constant]
    kernel = median_heuristic(rows[:, varying], weights, few[:, varying], few_weights)
    return kernel.on(varying)


def median_heuristic(rows: Array, weights: Array, few: Array, few_weights: Array) -> Gaussian:
    """Gaussian kernel whose length scales are the median distance of standardised rows.

    l_j = s_j median_{i < k} |(x_i - x_k) / s|, with s the columns' standard deviations, in the
    units of the columns.

    Parameters
    ----------
    rows, weights
        Rows of the row sample, shape (k, d), and their weights, sum 1: for the deviations s.
    few, few_weights
        A random part of them, for the median over its pairs.

    Notes
    -----
    Columns must not be constant: these have no scale.

    Source: Gretton et al. (2012), Journal of Machine Learning Research 13, section 8. If more than
    half of the distances are zero (duplicated rows), the median is over distinct rows.
    """
    largest = np.abs(rows).max(axis=0, initial=0.0)
    unit = np.where(largest > 0, largest, 1.0)  # squares of the values may leave the range
    scaled = rows / unit
    relative = np.sqrt(weights @ (scaled - weights @ scaled) ** 2)
    median = _median_distance(few / unit / relative, few_weights)
    if median == 0.0:
        distinct = np.unique(scaled / relative, axis=0)
        distinct = distinct[:: -(-len(distinct) // HEURISTIC_ROWS)]
        median = _median_distance(distinct, np.ones(len(distinct)))
    return Gaussian(tuple(float(s) * median for s in unit * relative))


def _median_distance(rows: Array, weights: Array) -> float:
    """Weighted lower median of the distances of pairs."""
    distances = pdist(rows)
    first, second = np.triu_indices(len(rows), 1)
    order = np.argsort(distances, kind="stable")
    mass = np.cumsum((weights[first] * weights[second])[order])
    return float(distances[order[np.searchsorted(mass, mass[-1] / 2)]])
