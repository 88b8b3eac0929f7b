"""Cross-validation of many kernels on rows held in memory, each basis made once."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular

from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.crossval import HeldFold
from cme_dask.numerics.means import MeanMoments

Array = Any


@dataclass(frozen=True, eq=False)
class _Sums:
    """Weighted sums over some rows: of N N^T, N, N t^T for the events t, and of k(z, z)."""

    gram: Array
    mean: Array
    events: Array
    trace: float

    def __sub__(self, other: "_Sums") -> "_Sums":
        return _Sums(
            self.gram - other.gram,
            self.mean - other.mean,
            self.events - other.events,
            self.trace - other.trace,
        )


class ScreenedRows:
    """Rows of a sample in the order of their folds, with the events that losses are made of.

    Parameters
    ----------
    weights
        Shape (n,).
    folds
        Fold number of each row, shape (n,).
    events
        Values of functions of y at the rows, shape (n, q).
    """

    def __init__(self, weights: Array, folds: Array, events: Array) -> None:
        self.order = np.argsort(folds, kind="stable")
        self.weights = weights[self.order]
        self.events = events[self.order]
        numbers, starts = np.unique(folds[self.order], return_index=True)
        edges = [*starts.tolist(), len(folds)]
        self.slices = [slice(edges[i], edges[i + 1]) for i in range(len(numbers))]
        weighted = self.weights[:, None] * self.events
        self.shares = np.array([self.weights[s].sum() for s in self.slices])
        self.event_sums = np.stack([weighted[s].sum(axis=0) for s in self.slices])
        squares = weighted * self.events
        self.event_squares = np.stack([squares[s].sum(axis=0) for s in self.slices])


class ScreenedSide:
    """The basis of one variable with one kernel, and what its moments tell in each fold.

    Parameters
    ----------
    rows
        The folds.
    kernel
        Of the values.
    values
        Rows of the variable in the order of the folds, shape (n, d).
    tol, max_rank
        Of the pivots.
    """

    def __init__(
        self, rows: ScreenedRows, kernel: Any, values: Array, tol: float, max_rank: int
    ) -> None:
        self._rows, self._kernel = rows, kernel
        found = pivoted_cholesky(kernel, values, tol, max_rank, weights=rows.weights)
        self._pivots, self._factor = values[found.pivots], found.factor
        self.newton = self.at(values)
        self.rank = len(found.pivots)
        weighted = rows.weights[:, None] * self.newton
        diagonal = rows.weights * kernel.diagonal(values)
        self.folds = [
            _Sums(
                weighted[s].T @ self.newton[s],
                weighted[s].sum(axis=0),
                weighted[s].T @ rows.events[s],
                float(diagonal[s].sum()),
            )
            for s in rows.slices
        ]
        self.total = _Sums(
            sum(f.gram for f in self.folds),
            sum(f.mean for f in self.folds),
            sum(f.events for f in self.folds),
            sum(f.trace for f in self.folds),
        )

    def at(self, values: Array) -> Array:
        """The Newton basis at rows of the variable, shape (q, rank)."""
        sections = self._kernel(values, self._pivots)
        return solve_triangular(self._factor, sections.T, lower=True, check_finite=False).T

    @cached_property
    def bases(self) -> list[tuple[Array, Array]]:
        """Centred eigenbases without each fold: transform and eigenvalues."""
        found = []
        for fold, share in zip(self.folds, self._rows.shares, strict=True):
            rest = self._rows.shares.sum() - share
            sums = self.total - fold
            found.append(eigenbasis(sums.gram / rest, sums.mean / rest))
        return found


def screened_folds(rows: ScreenedRows, x: ScreenedSide, y: ScreenedSide) -> list[HeldFold]:
    """Every fold held out, for this pair of bases."""
    weighted = rows.weights[:, None] * y.newton
    cross = [weighted[s].T @ x.newton[s] for s in rows.slices]
    sums = np.stack([rows.event_sums, rows.event_squares], axis=1)  # (F, 2, q)
    all_cross, all_events = sum(cross), sums.sum(axis=0)
    weight = rows.shares.sum()
    folds = []
    for i, (own, events, share) in enumerate(zip(cross, sums, rows.shares, strict=True)):
        rest = _means(
            weight - share,
            x.total - x.folds[i],
            y.total - y.folds[i],
            all_cross - own,
            all_events - events,
        )
        held = _means(share, x.folds[i], y.folds[i], own, events)
        (t_x, lam_x), (t_y, lam_y) = x.bases[i], y.bases[i]
        folds.append(HeldFold(rest, held, t_x, t_y, lam_x, lam_y))
    return folds


def _means(weight: float, x: _Sums, y: _Sums, cross: Array, events: Array) -> MeanMoments:
    mean, square = events / weight
    none_x, none_y = np.zeros((len(x.mean), 0)), np.zeros((len(y.mean), 0))
    return MeanMoments(
        weight=float(weight),
        gram=(x.gram / weight, y.gram / weight),
        cross=cross / weight,
        mean=(x.mean / weight, y.mean / weight),
        trace=(x.trace / weight, y.trace / weight),
        function_mean=(np.zeros(0), mean),
        function_cross=((none_x, x.events / weight), (none_y, y.events / weight)),
        function_gram=np.diag(square),  # of which only the diagonal is looked at
        shift=(np.zeros(0), np.zeros(len(mean))),
    )
