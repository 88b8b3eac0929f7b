"""Default length scales, until they are learned."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.spatial.distance import pdist

from cme_dask.errors import DataError
from cme_dask.kernels import Gaussian

Array = Any

_ROWS = 1000


def median_heuristic(rows: Array, names: Sequence[str]) -> Gaussian:
    """Gaussian kernel whose length scales are the median distance of standardised rows.

    l_j = s_j median_{i < k} |(x_i - x_k) / s|, with s the columns' standard deviations, in the
    units of the columns; over the first 1,000 rows of the row sample.

    Parameters
    ----------
    rows
        Rows of the row sample, shape (k, d).
    names
        Names of the columns, for messages.

    Raises
    ------
    DataError
        If a column is constant.

    Notes
    -----
    Source: Gretton et al. (2012), Journal of Machine Learning Research 13, section 8. If more than
    half of the distances are zero (duplicated rows), the median is over distinct rows.
    """
    largest = np.abs(rows).max(axis=0, initial=0.0)
    unit = np.where(largest > 0, largest, 1.0)  # squares of the values may leave the range
    relative = (rows / unit).std(axis=0)
    constant = relative <= 1e-14
    if constant.any():
        which = int(np.flatnonzero(constant)[0])
        raise DataError(
            f"column {names[which]!r} is constant ({rows[0, which]:g}) in all sampled rows, so it "
            "has no length scale: leave the column out, or give a kernel"
        )
    spread = unit * relative
    distances = pdist((rows[:_ROWS] / unit) / relative)
    median = float(np.median(distances))
    if median == 0.0:
        distinct = np.unique(rows, axis=0)
        distinct = distinct[:: -(-len(distinct) // _ROWS)]
        median = float(np.median(pdist((distinct / unit) / relative)))
    return Gaussian(tuple(float(s) * median for s in spread))
