"""Passes that select: the row sample, the rows nearest to points, ranges."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cme_dask.data.row_sample import RowSample, draw_among, merge
from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource, take_rows
from cme_dask.errors import DataError
from cme_dask.numerics.basis import BLOCK, LinearBasis
from cme_dask.numerics.folds import BY_ROWS
from cme_dask.passes.checkpoint import keeps
from cme_dask.passes.driver import Executor
from cme_dask.passes.plan import Reading, Run, empty_part, strips_of
from cme_dask.passes.run import run_over_rows

# The row sample of arrays that bring none: a declared, partial read


Array = Any

_BLOCK = 1 << 18
_SPARE = 6.0  # standard deviations of the number of rows below a bound
_ENOUGH = 1 << 10  # stored rows of a part, with which no others are looked for


def sample_rows(sample: Sample, size: int, seed: int, executor: Executor) -> tuple[RowSample, int]:
    """The priority sample, and the passes over chunked rows that it took.

    The stored one takes none (of a part, what it holds of it), and so does one of arrays in memory.
    From other sources the sample that a store of the same rows would hold for the same seed is
    gathered: a pass that reads the chunks that hold its rows and, if there are weights or a part
    that a column tells, before that a pass over these alone.

    Raises
    ------
    BadValues
        If weights are negative or not finite, or times are not finite.
    DataError
        If all weights are zero, or no row belongs to the part.
    """
    stored, wanted = sample.row_sample, min(size, sample.n_rows)
    if sample.part is not None:
        wanted = min(wanted, _ENOUGH)
    if stored is not None and len(stored) >= (1 if stored.complete else wanted):
        return stored.prefix(size), 0
    chosen, passes = choose_rows(sample, size, seed, executor)
    by_row = np.argsort(chosen.index)
    index = chosen.index[by_row]
    columns = Sample((*sample.sources, *sample.units.values()), ())
    if all(source.in_memory for source in columns.reads):
        found = tuple(
            take_rows(source, index, source.chunk_rows or _BLOCK) for source in columns.reads
        )
    else:
        found = run_over_rows(columns, executor, _gather, _join, shared=index, name="gather-sample")
        passes += 1
    back = np.argsort(by_row)
    parts = tuple(part[back] for part in found[: len(sample.sources)])
    units = [values[back, 0] for values in found[len(sample.sources) :]]
    return replace(chosen, parts=parts, units=dict(zip(sample.units, units, strict=True))), passes


def choose_rows(sample: Sample, size: int, seed: int, executor: Executor) -> tuple[RowSample, int]:
    """Keys, indices and weights of a priority sample without its rows, and the passes it took.

    Raises
    ------
    BadValues
        If weights are negative or not finite, or times are not finite.
    DataError
        If all weights are zero, or no row belongs to the part.
    """
    sample = replace(sample.fold_by(BY_ROWS), row_sample=None)
    told_by = sample.reads[len(sample.sources) :]
    job = partial(_draw, size=size, seed=seed)
    if not told_by or all(source.in_memory for source in sample.reads):
        reading = replace(Reading.of(sample), variables=0)
        chosen, passes = job(None, Run(0, sample.n_rows, _BLOCK), reading, *told_by), 0
    else:
        alone = replace(sample, sources=(), columns=())
        chosen = run_over_rows(alone, executor, job, partial(_merge_two, size=size))
        passes = 1
    if not len(chosen):
        if sample.weights is None:
            raise empty_part(sample)
        raise DataError("all weights are zero: at least one row needs a positive weight")
    return chosen, passes


def _draw(
    _: None, run: Run, reading: Reading, *sources: RowSource, size: int, seed: int
) -> RowSample:
    """The sample of a run's rows, of which only what tells weights and parts is read."""
    if not sources and reading.part is None:
        # Keys of equal rows are uniform on (0, 1): nearly always this bound leaves out none of the
        # sample, and most of the other rows, which then need no sorting.
        bound = (size + _SPARE * np.sqrt(size)) / (run.stop - run.start)
        likely = _smallest(run, reading, sources, size, seed, bound)
        if len(likely) == size:
            return likely
    return _smallest(run, reading, sources, size, seed, np.inf)


def _smallest(
    run: Run, reading: Reading, sources: tuple[RowSource, ...], size: int, seed: int, bound: float
) -> RowSample:
    """The rows of a run with the smallest keys, of those below a bound."""
    best = draw_among(np.empty(0, dtype=np.int64), (), None, size, seed)
    for strip in strips_of(run, reading, sources):
        strip.check()
        # Rows that don't come before the last one of a full sample can't be in it.
        below = bound if len(best) < size else float(best.keys[-1])
        fresh = draw_among(strip.rows, (), strip.weights, size, seed, below)
        best = merge((best, fresh), size)
    return best


def _merge_two(a: RowSample, b: RowSample, *, size: int) -> RowSample:
    return merge((a, b), size)


def _gather(index: Array, run: Run, reading: Reading, *sources: RowSource) -> tuple[Array, ...]:
    mine = index[np.searchsorted(index, run.start) : np.searchsorted(index, run.stop)]
    return tuple(take_rows(s, mine, s.chunk_rows or _BLOCK, run.start, run.stop) for s in sources)


def _join(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(np.concatenate(pair) for pair in zip(a, b, strict=True))


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
        near = [_nearest_positions(distance, k) for distance in each]
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


def _nearest_positions(distance: Array, k: int) -> Array:
    """Positions of the k smallest in ascending order, ties to the lowest position."""
    if len(distance) > k:
        edge = np.partition(distance, k - 1)[k - 1]
        inside = np.flatnonzero(distance < edge)
        tied = np.flatnonzero(distance == edge)[: k - len(inside)]
        candidates = np.sort(np.concatenate([inside, tied]))
    else:
        candidates = np.arange(len(distance))
    return candidates[np.argsort(distance[candidates], kind="stable")]


# Ranges of basis functions over all rows, in one pass: what certificates may rest on


def observed_ranges(
    sample: Sample, bases: Sequence[LinearBasis], executor: Executor
) -> tuple[Array, ...]:
    """Lowest and highest values of psi over the rows of positive weight, in one pass.

    Parameters
    ----------
    sample
        The rows.
    bases
        A basis for each variable.
    executor
        Where to run.

    Returns
    -------
    ranges : for each variable, shape (2, k)
    """
    job = partial(_ranges_of_run, bases=tuple(bases))
    found: tuple[Array, ...] = run_over_rows(
        sample.fold_by(BY_ROWS), executor, job, _wider, name="psi-ranges"
    )
    return found


def _ranges_of_run(
    _: None, run: Run, reading: Reading, *sources: RowSource, bases: tuple[LinearBasis, ...]
) -> tuple[Array, ...]:
    ranges = tuple(np.array([[np.inf], [-np.inf]]).repeat(basis.rank, axis=1) for basis in bases)
    for strip in strips_of(run, reading, sources):
        strip.check()
        for first in range(0, len(strip), BLOCK):
            here = slice(first, first + BLOCK)
            kept = slice(None) if strip.weights is None else strip.weights[here] > 0.0
            for held, basis, part in zip(ranges, bases, strip.parts, strict=True):
                psi = basis(part[here][kept])
                np.minimum(held[0], psi.min(axis=0, initial=np.inf), out=held[0])
                np.maximum(held[1], psi.max(axis=0, initial=-np.inf), out=held[1])
    return ranges


def _wider(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    pairs = zip(a, b, strict=True)
    return tuple(
        np.stack([np.minimum(one[0], two[0]), np.maximum(one[1], two[1])]) for one, two in pairs
    )
