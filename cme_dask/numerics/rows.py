"""Reductions that look at single rows: unusable and missing values, ranges, nearest rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.basis import BLOCK, LinearBasis
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip

Array = Any

_WORD = 8


# Unusable values: how many each column holds, and the first row of each


@dataclass(frozen=True)
class Counts:
    """Numbers of unusable values and the first rows that hold one.

    Attributes
    ----------
    column_count, column_first
        By column of all sources.
    source_count, source_first
        By source: x, y, weights, groups and times.
    negative_count, negative_first
        Of the weights.
    missing
        Whether some of them are NaN.
    """

    column_count: Array
    column_first: Array
    source_count: Array
    source_first: Array
    negative_count: int
    negative_first: int
    missing: bool


@dataclass(frozen=True)
class BadValueCounts(Reduction[Counts, Counts]):
    """How many NaN, infinities and negative weights there are, and where the first ones are."""

    name = "count-bad-values"
    n_folds = 2  # so that the columns which define folds are read, too
    checked = False
    kinds = (Counts,)

    def update(self, state: None, strip: Strip) -> Counts:
        """Of one strip."""
        masks = [~np.isfinite(values) for values in strip.columns()]
        no_weights = np.zeros(len(strip), bool)
        negative = no_weights if strip.weights is None else strip.weights < 0
        columns = np.concatenate(masks, axis=1)

        def first(mask: Array) -> Array:
            """The first row of each column of a mask; of none, any number."""
            return strip.rows[mask.argmax(axis=0)] if len(strip) else np.zeros(mask.shape[1], int)

        return Counts(
            columns.sum(axis=0),
            first(columns),
            np.array([mask.sum() for mask in masks]),
            first(np.column_stack([mask.any(axis=1) for mask in masks])),
            int(negative.sum()),
            int(first(negative[:, None])[0]),
            any(bool(np.isnan(values).any()) for values in strip.columns()),
        )

    def combine(self, a: Counts, b: Counts) -> Counts:
        """Counts of both, and the first rows of ``a`` where it has some."""
        return Counts(
            a.column_count + b.column_count,
            np.where(a.column_count > 0, a.column_first, b.column_first),
            a.source_count + b.source_count,
            np.where(a.source_count > 0, a.source_first, b.source_first),
            a.negative_count + b.negative_count,
            a.negative_first if a.negative_count else b.negative_first,
            a.missing or b.missing,
        )


# Missing values of rows that are left out, or filled in


@dataclass(frozen=True)
class MissingValues:
    """How many values were missing in a pass that leaves such rows out.

    Attributes
    ----------
    dropped
        Rows that were left out.
    columns
        Number of missing values by column, of those columns that lack some.
    """

    dropped: int
    columns: dict[str, int]


@dataclass(frozen=True)
class MissingCounts(Reduction[Array, Array]):
    """Sum of ``strip.missing``: of the rows that were left out, and of values by column."""

    name = "missing-values"
    checked = False

    def update(self, state: None, strip: Strip) -> Array:
        """Of one strip."""
        assert strip.missing is not None
        return strip.missing


# Ranges of basis functions over all rows: what certificates may rest on


@dataclass(frozen=True, eq=False)
class BasisRanges(Reduction[tuple[Array, ...], tuple[Array, ...]]):
    """Lowest and highest values of psi over the rows of positive weight, shapes (2, k).

    Parameters
    ----------
    bases
        A basis for each variable.
    """

    bases: tuple[LinearBasis, ...]
    name = "psi-ranges"
    on_device = False

    def cost(self, extent: Extent) -> Cost:
        """A product of a block of rows with each basis."""
        ranks = [basis.rank for basis in self.bases]
        return Cost(
            flops=sum(2 * m * m for m in ranks),
            state=4 * BLOCK * max(ranks) * _WORD,
            partial=2 * sum(ranks) * _WORD,
        )

    def update(self, state: None, strip: Strip) -> tuple[Array, ...]:
        """Of one strip."""
        ranges = tuple(np.array([[np.inf], [-np.inf]]).repeat(b.rank, axis=1) for b in self.bases)
        for first in range(0, len(strip), BLOCK):
            here = slice(first, first + BLOCK)
            positive = slice(None) if strip.weights is None else strip.weights[here] > 0.0
            for bounds, basis, part in zip(ranges, self.bases, strip.parts, strict=True):
                psi = basis(part[here][positive])
                np.minimum(bounds[0], psi.min(axis=0, initial=np.inf), out=bounds[0])
                np.maximum(bounds[1], psi.max(axis=0, initial=-np.inf), out=bounds[1])
        return ranges

    def combine(self, a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        """The wider range of each function."""
        return tuple(
            np.stack([np.minimum(one[0], two[0]), np.maximum(one[1], two[1])])
            for one, two in zip(a, b, strict=True)
        )


# Rows nearest to some points: the empirical answer to compare a law with


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The k nearest rows of each point, nearest first.

    Attributes
    ----------
    distance
        Scaled Euclidean distances, shape (points, k).
    index
        Global row indices, shape (points, k).
    y
        Their rows of y, shape (points, k, d_Y).
    weights
        Their weights, shape (points, k); ones if rows have none.
    """

    distance: Array
    index: Array
    y: Array
    weights: Array

    def first(self, k: int) -> "Neighbours":
        """The first k of each point."""
        return Neighbours(
            self.distance[:, :k], self.index[:, :k], self.y[:, :k], self.weights[:, :k]
        )


@dataclass(frozen=True, eq=False)
class NearestRows(Reduction[Neighbours, Neighbours]):
    """The k rows nearest to each point in x, by |(x_i - point) / scale|; ties to the lowest row.

    Rows of weight zero are at an infinite distance: where fewer than k others are left, these are
    all that is returned.

    Parameters
    ----------
    points
        Shape (p, d_X).
    k
        Number of rows per point.
    scale
        A length per column of x, shape (d_X,).
    """

    points: Array
    k: int
    scale: Array
    name = "nearest-rows"
    on_device = False
    checked = False
    kinds = (Neighbours,)

    def cost(self, extent: Extent) -> Cost:
        """Distances of a strip, p of them, and k rows for each point."""
        points, d = self.points.shape
        return Cost(
            flops=3 * points * d,
            state=(points + 2 * d) * extent.strip_rows * _WORD,
            partial=points * self.k * (3 + extent.n_columns) * _WORD,
        )

    def update(self, state: None, strip: Strip) -> Neighbours:
        """Of one strip."""
        x, y = strip.parts
        w = np.ones(len(x)) if strip.weights is None else strip.weights
        away = np.where(w > 0.0, 0.0, np.inf)
        each = [
            away + np.sqrt((((x - point) / self.scale) ** 2).sum(axis=1)) for point in self.points
        ]
        near = [_nearest(distance, self.k) for distance in each]
        return Neighbours(
            np.stack([d[i] for d, i in zip(each, near, strict=True)]),
            np.stack([strip.rows[i] for i in near]),
            np.stack([y[i] for i in near]),
            np.stack([w[i] for i in near]),
        )

    def combine(self, a: Neighbours, b: Neighbours) -> Neighbours:
        """The k nearest of both, rows of ``a`` before those of ``b``."""
        distance = np.concatenate([a.distance, b.distance], axis=1)
        near = np.argsort(distance, axis=1, kind="stable")[:, : self.k]
        index = np.concatenate([a.index, b.index], axis=1)
        y = np.concatenate([a.y, b.y], axis=1)
        weights = np.concatenate([a.weights, b.weights], axis=1)
        return Neighbours(
            np.take_along_axis(distance, near, axis=1),
            np.take_along_axis(index, near, axis=1),
            np.take_along_axis(y, near[:, :, None], axis=1),
            np.take_along_axis(weights, near, axis=1),
        )

    def finalize(self, total: Neighbours) -> Neighbours:
        """Those at a finite distance; a DataError if there are none."""
        finite = int(np.isfinite(total.distance).all(axis=0).sum())
        if not finite:
            raise DataError("no row of positive weight is at a finite distance: correct the points")
        return total.first(finite)


def _nearest(distance: Array, k: int) -> Array:
    """Positions of the k smallest in ascending order, ties to the lowest position."""
    if len(distance) > k:
        edge = np.partition(distance, k - 1)[k - 1]
        inside = np.flatnonzero(distance < edge)
        tied = np.flatnonzero(distance == edge)[: k - len(inside)]
        candidates = np.sort(np.concatenate([inside, tied]))
    else:
        candidates = np.arange(len(distance))
    return candidates[np.argsort(distance[candidates], kind="stable")]
