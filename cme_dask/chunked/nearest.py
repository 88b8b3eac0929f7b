"""Rows nearest to some points: the empirical answer to compare a law with."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cme_dask.chunked.checkpoints import keeps
from cme_dask.chunked.driver import Executor
from cme_dask.chunked.passes import run_over_rows
from cme_dask.chunked.plan import Run
from cme_dask.chunked.strips import Reading, empty_part, strips_of
from cme_dask.errors import DataError
from cme_dask.numerics.folding import BY_ROWS
from cme_dask.storage.rows import RowSource
from cme_dask.storage.sample import Sample

Array = Any


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


keeps(Neighbours)


def nearest_rows(
    sample: Sample, points: Array, k: int, scale: Array, executor: Executor
) -> Neighbours:
    """The k rows nearest to each point in x, by |(x_i - point) / scale|, in one pass.

    Parameters
    ----------
    sample
        Rows of x and y.
    points
        Shape (p, d_X).
    k
        Number of rows per point, at most n.
    scale
        A length per column of x, shape (d_X,).
    executor
        Where to run.

    Notes
    -----
    Rows of weight zero, and of other parts than the one that is asked, are no neighbours: if fewer
    than k are left, all of them are returned. Ties go to the lowest row. Memory per task is one
    strip of distances, p of them.
    """
    if not 1 <= k <= sample.n_rows:
        raise DataError(f"k must lie between 1 and the number of rows {sample.n_rows}, got {k}")
    job = partial(_nearest_of_run, points=np.asarray(points), k=k, scale=np.asarray(scale))
    rows = sample.fold_by(BY_ROWS)
    found: Neighbours = run_over_rows(rows, executor, job, partial(_closer, k=k))
    if not found.distance.size and sample.part is not None:
        raise empty_part(sample)
    within = int(np.isfinite(found.distance).all(axis=0).sum())
    if within == 0:
        raise DataError("no row of positive weight is at a finite distance: correct the points")
    return Neighbours(
        found.distance[:, :within],
        found.index[:, :within],
        found.y[:, :within],
        found.weights[:, :within],
    )


def _nearest_of_run(
    _: None, run: Run, reading: Reading, *sources: RowSource, points: Array, k: int, scale: Array
) -> Neighbours:
    best: Neighbours | None = None
    for strip in strips_of(run, reading, sources):
        x, y = strip.parts
        w = np.ones(len(x)) if strip.weights is None else strip.weights
        away = np.where(w > 0.0, 0.0, np.inf)
        each = [away + np.sqrt((((x - point) / scale) ** 2).sum(axis=1)) for point in points]
        near = [_smallest(distance, k) for distance in each]
        found = Neighbours(
            np.stack([d[i] for d, i in zip(each, near, strict=True)]),
            np.stack([strip.rows[i] for i in near]),
            np.stack([y[i] for i in near]),
            np.stack([w[i] for i in near]),
        )
        best = found if best is None else _closer(best, found, k=k)
    assert best is not None
    return best


def _closer(a: Neighbours, b: Neighbours, *, k: int) -> Neighbours:
    """The k nearest of two, rows of ``a`` before those of ``b``."""
    distance = np.concatenate([a.distance, b.distance], axis=1)
    near = np.argsort(distance, axis=1, kind="stable")[:, :k]
    index = np.concatenate([a.index, b.index], axis=1)
    y = np.concatenate([a.y, b.y], axis=1)
    weights = np.concatenate([a.weights, b.weights], axis=1)
    return Neighbours(
        np.take_along_axis(distance, near, axis=1),
        np.take_along_axis(index, near, axis=1),
        np.take_along_axis(y, near[:, :, None], axis=1),
        np.take_along_axis(weights, near, axis=1),
    )


def _smallest(distance: Array, k: int) -> Array:
    """Positions of the k smallest in ascending order, ties to the lowest position."""
    if len(distance) > k:
        edge = np.partition(distance, k - 1)[k - 1]
        inside = np.flatnonzero(distance < edge)
        tied = np.flatnonzero(distance == edge)[: k - len(inside)]
        candidates = np.sort(np.concatenate([inside, tied]))
    else:
        candidates = np.arange(len(distance))
    return candidates[np.argsort(distance[candidates], kind="stable")]
