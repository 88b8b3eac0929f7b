"""Held-out losses of kernels on rows in memory, each basis made once."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cme_dask.kernels import Kernel
from cme_dask.kernels.lapack import pivoted_factor, solve_lower
from cme_dask.metrics import crps
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.crossval import HeldFold, HeldFolds
from cme_dask.numerics.measure import project
from cme_dask.numerics.moments import Moments
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.scoring import mean_and_error

# Cross-validation of many kernels on rows held in memory, each basis made once


Array = Any

_LEAST_ROWS = 64  # that pivots of a search are chosen from


class _Sums(NamedTuple):
    """Weighted sums over some rows: of N N^T, N, N t^T for the events t, and of k(z, z).

    With a first axis of folds, or over the rows of all.
    """

    gram: Array
    mean: Array
    events: Array
    trace: Array

    def without(self, folds: "_Sums") -> "_Sums":
        """Those over the rows of all, without each fold."""
        return _Sums(*(of_all - each for of_all, each in zip(self, folds, strict=True)))


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
        self._given = weights, folds, events
        self.order = np.argsort(folds, kind="stable")
        self.weights = weights[self.order]
        self.events = events[self.order]
        numbers, starts = np.unique(folds[self.order], return_index=True)
        self.starts, edges = starts, [*starts.tolist(), len(folds)]
        self.slices = [slice(edges[i], edges[i + 1]) for i in range(len(numbers))]
        weighted = self.weights[:, None] * self.events
        self.shares = np.array([self.weights[s].sum() for s in self.slices])
        self.event_sums = np.stack([weighted[s].sum(axis=0) for s in self.slices])
        squares = weighted * self.events
        self.event_squares = np.stack([squares[s].sum(axis=0) for s in self.slices])

    def prefix(self, count: int, n_folds: int) -> "ScreenedRows":
        """The first ``count`` rows of those given, in at most so many folds."""
        weights, folds, events = (each[:count] for each in self._given)
        _, numbers = np.unique(folds, return_inverse=True)
        return ScreenedRows(weights, numbers % n_folds, events)


def pivots_of_few(
    kernel: Any, values: Array, tol: float, max_rank: int, weights: Array
) -> tuple[Array, Array]:
    """Greedy pivots (joint paper, Algorithm 1) among few rows.

    These are twice as many as there may be pivots, and at least 64. Kernels that are compared need
    bases that are alike, not the best ones, and LAPACK's factorisation with pivots takes a tenth of
    the time of the choice from all rows.

    Parameters
    ----------
    kernel
        The kernel.
    values
        Rows, shape (n, d).
    tol, max_rank
        Of the pivots; ``tol`` on those rows.
    weights
        Of the rows, shape (n,): the trace is weighted, pivots are those of largest residual.

    Returns
    -------
    pivots, factor
        Positions of the rows, shape (m,), and the Cholesky factor of their Gram matrix.
    """
    n = len(values)
    count = min(n, max(2 * max_rank, _LEAST_ROWS))
    few = np.unique(np.linspace(0, n - 1, count).astype(np.intp))
    few = few[weights[few] > 0.0]
    gram = np.asarray(kernel(values[few], values[few]), dtype=np.float64)
    largest = float(gram.diagonal().max())
    noise = 8.0 * np.finfo(np.float64).eps * (len(few) + 1) * largest
    share, diagonal = weights[few], gram.diagonal()
    trace = share @ diagonal
    # The trace that is left is at most its largest entry times the sum of the weights.
    enough = tol * float(trace) / float(share.sum())
    factor, order = pivoted_factor(gram, max(noise, enough))
    left = trace - np.cumsum(share[order] @ factor**2)
    met = np.flatnonzero(left <= tol * trace)
    rank = factor.shape[1]
    rank = min(rank, max_rank, met[0] + 1 if len(met) else rank)
    return few[order[:rank]], factor[:rank, :rank]


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
        self._bases: tuple[Array, Array] | None = None
        self._held: tuple[Array, Array] | None = None
        pivots, self._factor = pivots_of_few(kernel, values, tol, max_rank, rows.weights)
        self._pivots = values[pivots]
        self.newton = self.at(values)
        self.rank = len(pivots)
        weighted = rows.weights[:, None] * self.newton
        right = np.column_stack([self.newton, rows.events, np.ones(len(values))])
        sums = np.stack([weighted[s].T @ right[s] for s in rows.slices])
        traces = np.add.reduceat(rows.weights * kernel.diagonal(values), rows.starts)
        m = self.rank
        self.folds = _Sums(sums[..., :m], sums[..., -1], sums[..., m:-1], traces)
        self.total = _Sums(*(each.sum(axis=0) for each in self.folds))

    def at(self, values: Array) -> Array:
        """The Newton basis at rows of the variable, shape (q, rank)."""
        sections = self._kernel(values, self._pivots)
        return solve_lower(self._factor, sections)

    # No cached_property: until Python 3.12 it locks out the sides that other threads make.

    @property
    def bases(self) -> tuple[Array, Array]:
        """Centred eigenbases without each fold: transforms (F, m, k), and eigenvalues (F, k)."""
        if self._bases is None:
            rest = self.total.without(self.folds)
            weight = self._rows.shares.sum() - self._rows.shares
            means = rest.mean / weight[:, None]
            grams = rest.gram / weight[:, None, None]
            centred = np.linalg.norm(means, axis=-1) > 0.0
            if centred.all() or not centred.any():
                self._bases = eigenbasis(grams, means)
            else:  # a function more where the mean is zero: elsewhere one that is zero
                self._bases = _side_by_side(map(eigenbasis, grams, means), grams.shape)
        return self._bases

    @property
    def held(self) -> tuple[Array, Array]:
        """Means over each fold in these bases: of products of two functions, and of functions."""
        if self._held is None:
            transform, _ = self.bases
            share = self._rows.shares[:, None]
            gram = transform.mT @ self.folds.gram @ transform / share[..., None]
            self._held = gram, _times(transform, self.folds.mean) / share
        return self._held


def _times(transforms: Array, vectors: Array) -> Array:
    """T^T c of each fold."""
    product: Array = (transforms.mT @ vectors[..., None])[..., 0]
    return product


def _side_by_side(
    bases: Iterable[tuple[Array, Array]], shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """Bases of different numbers of functions, filled up by functions that are zero."""
    transforms, eigenvalues = np.zeros(shape), np.zeros(shape[:2])
    for i, (transform, lam) in enumerate(bases):
        transforms[i, :, : len(lam)], eigenvalues[i, : len(lam)] = transform, lam
    return transforms, eigenvalues


def _crossed(rows: ScreenedRows, x: ScreenedSide, y: ScreenedSide) -> Array:
    """Weighted sums of N_Y N_X^T over each fold, shape (F, m_Y, m_X)."""
    weighted = rows.weights[:, None] * y.newton
    return np.stack([weighted[s].T @ x.newton[s] for s in rows.slices])


def screened_folds(rows: ScreenedRows, x: ScreenedSide, y: ScreenedSide) -> HeldFolds:
    """Every fold held out, for this pair of bases."""
    (transform_x, lam_x), (transform_y, lam_y) = x.bases, y.bases
    share = rows.shares[:, None, None]
    weight = rows.shares.sum() - share
    own = _crossed(rows, x, y)
    rest, held = (
        transform_y.mT @ each @ transform_x
        for each in ((own.sum(axis=0) - own) / weight, own / share)
    )
    (gram_x, mean_x), (gram_y, mean_y) = x.held, y.held
    return HeldFolds(
        lam_x,
        lam_y,
        rest,
        transform_y.mT @ ((y.total.events - y.folds.events) / weight),
        (rows.event_sums.sum(axis=0) - rows.event_sums) / weight[:, 0],
        gram_x,
        gram_y,
        held,
        mean_x,
        mean_y,
        transform_x.mT @ (x.folds.events / share),
        rows.event_sums / rows.shares[:, None],
        rows.event_squares / rows.shares[:, None],
    )


def screened_means(
    rows: ScreenedRows, x: ScreenedSide, y: ScreenedSide
) -> Iterator[tuple[Moments, Moments]]:
    """Means over the rows without each fold, and over its own, for this pair of bases."""
    own = _crossed(rows, x, y)
    events = np.stack([rows.event_sums, rows.event_squares], axis=1)  # (F, 2, q)
    rest = _means(
        rows.shares.sum() - rows.shares,
        x.total.without(x.folds),
        y.total.without(y.folds),
        own.sum(axis=0) - own,
        events.sum(axis=0) - events,
    )
    return zip(rest, _means(rows.shares, x.folds, y.folds, own, events), strict=True)


def _means(weights: Array, x: _Sums, y: _Sums, cross: Array, events: Array) -> Iterator[Moments]:
    """Means of each fold from weighted sums, all with a first axis of folds."""
    each = zip(zip(*x, strict=True), zip(*y, strict=True), strict=True)
    for weight, of_sides, of_pair, sums in zip(weights.tolist(), each, cross, events, strict=True):
        of_x, of_y = (_Sums(*of_side) for of_side in of_sides)
        mean, square = sums / weight
        blocks = {
            ("x", "x"): of_x.gram / weight,
            ("y", "y"): of_y.gram / weight,
            ("y", "x"): of_pair / weight,
            ("x", "f(y)"): of_x.events / weight,
            ("y", "f(y)"): of_y.events / weight,
            ("f(y)", "f(y)"): np.diag(square),  # only whose diagonal is read
        }
        traces = {"x": float(of_x.trace) / weight, "y": float(of_y.trace) / weight}
        means = {"x": of_x.mean / weight, "y": of_y.mean / weight, "f(y)": mean}
        yield Moments(weight, blocks, means, traces, {"y": np.zeros(len(mean))})


# Whether laws of residuals, moved to a location, are better than plain ones: held-out CRPS


Place = Callable[[Array, Array], Array]


@dataclass(frozen=True, eq=False)
class HeldLaws:
    """Laws at the rows of one fold, fitted on the others.

    Attributes
    ----------
    held
        Positions of the rows of the fold, b of them.
    ratio
        The signed density ratio at these rows and the cells, shape (b, S).
    masses
        Of the cells among the rows of the other folds, sum 1, shape (S,).
    atoms
        What the laws put mass on, shape (S, d).
    calibrated
        From the projected laws (b, S) to calibrated ones; None where they are not.
    """

    held: Array
    ratio: Array
    masses: Array
    atoms: Array
    calibrated: Callable[[Array], Array] | None = None

    @property
    def weights(self) -> Array:
        """The laws, shape (b, S): the projected ratio, calibrated."""
        laws = project(self.ratio, self.masses)[0]
        return laws if self.calibrated is None else self.calibrated(laws)


@dataclass(frozen=True)
class Gain:
    """Held-out CRPS of plain laws less that of moved residuals, at the same rows.

    Attributes
    ----------
    plain, residual
        Their means, in standard deviations of y.
    gain, std
        Mean of the difference and its standard error over units of rows.
    rows
        How many.
    """

    plain: float
    residual: float
    gain: float
    std: float
    rows: int

    @property
    def pays(self) -> bool:
        """Whether the gain is more than one standard error."""
        return self.gain > self.std

    @property
    def is_clear(self) -> bool:
        """Whether the gain is more than two standard errors: worth a second pass over many rows."""
        return self.gain > 2.0 * self.std


def held_out_crps(laws: Iterable[HeldLaws], y: Array, place: Place | None = None) -> Array:
    """CRPS of every row by the laws of its fold, mean over the columns, shape (n,).

    Parameters
    ----------
    laws
        Of all folds.
    y
        The rows, shape (n, d), in the units in which columns are averaged.
    place
        From atoms (S, d) and the positions of b rows to the atoms of each row in the units of y,
        shape (b, S, d); default the atoms.
    """
    scores = np.full(len(y), np.nan)
    for fold in laws:
        atoms = fold.atoms if place is None else place(fold.atoms, fold.held)
        scores[fold.held] = crps(fold.weights, atoms, y[fold.held])
    return scores


def paired_gain(plain: Array, residual: Array, weights: Array, units: Array) -> Gain:
    """The gain and its standard error, :func:`mean_and_error`.

    Parameters
    ----------
    plain, residual
        Scores of the same rows, shape (n,).
    weights
        Of the rows, shape (n,).
    units
        A number for each row that tells which rows are alike, shape (n,).
    """
    share = weights / weights.sum()
    gain, std = mean_and_error(plain - residual, weights, units)
    means = float(share @ plain), float(share @ residual)
    return Gain(*means, float(gain), float(std), len(plain))


def screened_laws(
    kernels: tuple[Kernel, Kernel],
    reg: Regularization,
    parts: tuple[Array, Array],
    weights: Array,
    folds: Array,
    tol: float,
    max_rank: int,
) -> Iterator[HeldLaws]:
    """Laws on the rows of the other folds, refitted for each fold on rows in memory, normalized.

    Parameters
    ----------
    kernels, reg
        Of x and of the variable whose laws they are, and the ridge.
    parts
        Rows of both, shapes (n, d).
    weights, folds
        Of the rows, shape (n,).
    tol, max_rank
        Of the bases.
    """
    rows = ScreenedRows(weights, folds, np.zeros((len(folds), 0)))
    x, y = (
        ScreenedSide(rows, kernel, part[rows.order], tol, max_rank)
        for kernel, part in zip(kernels, parts, strict=True)
    )
    of_x, of_y = (zip(*side.bases, strict=True) for side in (x, y))
    each = zip(screened_means(rows, x, y), of_x, of_y, rows.slices, strict=True)
    for means, *bases, held in each:
        solution = HeldFold(*means, bases).solution(reg)
        rest = np.ones(len(folds), dtype=bool)
        rest[held] = False
        left = x.newton[held] @ solution.transform_x @ solution.coef.T
        ratio = 1.0 + left @ (y.newton[rest] @ solution.transform_y).T
        masses = rows.weights[rest] / rows.weights[rest].sum()
        yield HeldLaws(rows.order[held], ratio, masses, parts[1][rows.order[rest]])
