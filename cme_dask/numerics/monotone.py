"""Smooth increasing maps of columns, near piecewise linear ones through many knots.

Source: Fritsch and Butland (1984), A method for constructing local monotone piecewise cubic
interpolants, SIAM Journal on Scientific and Statistical Computing 5, 300.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from cme_dask.errors import DataError
from cme_dask.kernels.transforms import ColumnTransform, Scores, Standard

Array = Any

SEGMENT_ROWS = 25
"""Rows between two knots, at least: what a slope is a mean over."""

_NARROW = 1e-12  # width of a segment relative to the whole


@dataclass(frozen=True, eq=False)
class MonotoneMap:
    """A piecewise cubic, continuously differentiable map that increases strictly.

    It goes on linearly beyond the outer knots.

    Attributes
    ----------
    values, images
        The knots and what they are mapped to, both ascending, shape (k,), k >= 2.
    """

    values: Array
    images: Array

    def __call__(self, column: Array) -> Array:
        """Return the mapped column, shape (n,)."""
        i, width, t = self._place(column)
        left, right = self._slopes[i] * width, self._slopes[i + 1] * width
        rise = self.images[i + 1] - self.images[i]
        u = np.clip(t, 0.0, 1.0)
        cubic = u * (left + u * (3.0 * rise - 2.0 * left - right + u * (left + right - 2.0 * rise)))
        return np.asarray(self.images[i] + cubic + (t - u) * np.where(t < 0.0, left, right))

    def slope(self, column: Array) -> Array:
        """Return the derivative, positive, shape (n,)."""
        i, width, t = self._place(column)
        left, right = self._slopes[i], self._slopes[i + 1]
        secant = (self.images[i + 1] - self.images[i]) / width
        u = np.clip(t, 0.0, 1.0)
        bend = 2.0 * (3.0 * secant - 2.0 * left - right) + 3.0 * u * (left + right - 2.0 * secant)
        return np.asarray(left + u * bend)

    def _place(self, column: Array) -> tuple[Array, Array, Array]:
        """Segment of each number, its width, and where within it: in [0, 1], beyond at the ends."""
        i = np.searchsorted(self.values[1:-1], column)
        width = self.values[i + 1] - self.values[i]
        return i, width, (column - self.values[i]) / width

    @cached_property
    def _slopes(self) -> Array:
        """Weighted harmonic means of the secants at inner knots: cubics with these increase."""
        width = np.diff(self.values)
        secant = np.diff(self.images) / width
        left, right = width[:-1] + 2.0 * width[1:], 2.0 * width[:-1] + width[1:]
        inner = (left + right) / (left / secant[:-1] + right / secant[1:])
        return np.concatenate([secant[:1], inner, secant[-1:]])


@dataclass(frozen=True)
class MonotoneMaps:
    """A map for each column of rows (n, d)."""

    columns: tuple[MonotoneMap, ...]

    def __call__(self, rows: Array) -> Array:
        """Return the mapped rows, shape (n, d)."""
        return np.stack([column(rows[:, j]) for j, column in enumerate(self.columns)], axis=1)

    def slope(self, rows: Array) -> Array:
        """Return the derivatives of the columns' maps, shape (n, d)."""
        each = [column.slope(rows[:, j]) for j, column in enumerate(self.columns)]
        return np.stack(each, axis=1)


def smooth_map(transform: ColumnTransform, rows: int) -> MonotoneMap:
    r"""Return a map near a transform, without the kinks that its knots at single rows have.

    Normal scores are interpolated at some of their knots: about :math:`2 n^{1/3} / 3` that are
    equally far apart as scores, and have at least 25 rows between them. Densities are multiplied
    by the derivative, whose error in the mean log density is about 1 / (2 n) for each knot.

    Parameters
    ----------
    transform
        :class:`~cme_dask.kernels.Standard` or :class:`~cme_dask.kernels.Scores`.
    rows
        How many rows n the transform was made from.

    Raises
    ------
    DataError
        If levels of the column are pooled.
    """
    if isinstance(transform, Standard):
        step = max(transform.scale, abs(transform.shift))  # so that the two knots differ
        ends = np.array([-step, step])
        return MonotoneMap(transform.shift + ends, ends / transform.scale)
    if not isinstance(transform, Scores):
        raise DataError("levels have no density: only standardised columns and normal scores do")
    values, scores = np.asarray(transform.values), np.asarray(transform.scores)
    at = _thinned(values, scores, rows)
    return MonotoneMap(values[at], scores[at])


def _thinned(values: Array, scores: Array, rows: int) -> Array:
    """Positions of the knots that are kept, ascending: both ends, and inwards from these."""
    below, above = ndtr(scores), ndtr(-scores)
    least = -3.0 * ndtri(0.5 / rows) / np.cbrt(rows)
    narrow = _NARROW * values[-1] - _NARROW * values[0]

    def apart(i: int, j: int) -> bool:
        mass = below[j] - below[i] if scores[i] < 0.0 else above[i] - above[j]
        return bool(
            mass * rows >= SEGMENT_ROWS
            and scores[j] - scores[i] >= least
            and values[j] - values[i] > narrow
        )

    low, high = [0], [len(scores) - 1]
    # Outside of the extreme rows there may be a knot that ends a tail.
    if len(scores) > 3 and below[1] * rows < 0.75:
        low.append(1)
    if len(scores) > 3 and above[-2] * rows < 0.75:
        high.append(len(scores) - 2)
    for i in range(low[-1] + 1, high[-1]):
        if scores[i] < 0.0 and apart(low[-1], i):
            low.append(i)
    for i in range(high[-1] - 1, low[-1], -1):
        if scores[i] >= 0.0 and apart(i, high[-1]) and apart(low[-1], i):
            high.append(i)
    return np.array(low + high[::-1])
