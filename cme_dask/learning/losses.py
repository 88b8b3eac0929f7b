"""Held-out losses of kernels on rows in memory, each basis made once."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import LinAlgError

from cme_dask.kernels import Kernel
from cme_dask.kernels.lapack import pivoted_factor, solve_lower
from cme_dask.metrics import crps
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.crossval import FoldMeans, HeldFold, Losses, PairMeans
from cme_dask.numerics.measure import project
from cme_dask.numerics.moments import Moments
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.scoring import mean_and_error

# Cross-validation of many kernels on rows held in memory, each basis made once


Array = Any

_FEW_RIDGES = 4  # whose linear systems take less time than eigenbases
_LEAST_RIDGE = 1e-8  # below which the systems of singular Gram matrices are rounding
_LEAST_ROWS = 64  # that pivots of a search are chosen from
_REPAYING = 0.01  # of the CRPS: what a second pass over many rows must gain


class _Means(NamedTuple):
    """Weighted means over some rows: of N N^T, N, N t^T for the events t, and of k(z, z).

    With a first axis of folds: over each of them, or over the rows of all others.
    """

    gram: Array
    mean: Array
    events: Array
    trace: Array

    @classmethod
    def over(cls, sums: Sequence[Array], weights: Array) -> "_Means":
        """From sums over rows of these weights, shape (F,)."""
        return cls(*((each.T / weights).T for each in sums))


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
        self.others = self.shares.sum() - self.shares
        self.event_sums = np.stack([weighted[s].sum(axis=0) for s in self.slices])
        squares = weighted * self.events
        self.event_squares = np.stack([squares[s].sum(axis=0) for s in self.slices])

    def prefix(self, count: int, n_folds: int) -> "ScreenedRows":
        """The first ``count`` rows of those given, in at most so many folds."""
        weights, folds, events = (each[:count] for each in self._given)
        _, numbers = np.unique(folds, return_inverse=True)
        return ScreenedRows(weights, numbers % n_folds, events)


def pivots_of_few(
    kernel: Any, values: Array, tol: float, max_rank: int, weights: Array, per_pivot: int = 2
) -> tuple[Array, Array]:
    """Greedy pivots (joint paper, Algorithm 1) among few rows.

    These are so many times as many as there may be pivots, and at least 64. Kernels that are
    compared need bases that are alike, not the best ones, and LAPACK's factorisation with pivots
    takes a tenth of the time of the choice from all rows.

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
    per_pivot
        How many rows there are for each pivot. Of 1 all are pivots, as far as the kernel resolves
        them: losses change smoothly with it then.

    Returns
    -------
    pivots, factor
        Positions of the rows, shape (m,), and the Cholesky factor of their Gram matrix.
    """
    n = len(values)
    count = min(n, max(per_pivot * max_rank, _LEAST_ROWS))
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


_Derivatives = tuple[Array, Array, Array]
"""In the means of N N^T, of N and of N t^T over each fold: (F, m, m), (F, m) and (F, m, q)."""


def _in_sums(in_rest: Array, in_held: Array, rows: ScreenedRows) -> Array:
    """Derivatives in sums over each fold, from those in means over the others and over it."""
    of_others = (in_rest.T / rows.others).T
    return (in_held.T / rows.shares).T + (of_others.sum(axis=0) - of_others)


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
    tol, max_rank, per_pivot
        Of the pivots, see :func:`pivots_of_few`.
    """

    def __init__(
        self,
        rows: ScreenedRows,
        kernel: Any,
        values: Array,
        tol: float,
        max_rank: int,
        per_pivot: int = 2,
    ) -> None:
        self._rows, self._kernel, self._values = rows, kernel, values
        self._bases: tuple[Array, Array] | None = None
        pivots, self._factor = pivots_of_few(kernel, values, tol, max_rank, rows.weights, per_pivot)
        self._pivots = values[pivots]
        self.newton = self.at(values)
        self.rank = len(pivots)
        weighted = rows.weights[:, None] * self.newton
        right = np.column_stack([self.newton, rows.events, np.ones(len(values))])
        sums = np.stack([weighted[s].T @ right[s] for s in rows.slices])
        traces = np.add.reduceat(rows.weights * kernel.diagonal(values), rows.starts)
        m = self.rank
        of_folds = sums[..., :m], sums[..., -1], sums[..., m:-1], traces
        of_others = [each.sum(axis=0) - each for each in of_folds]
        self.held, self.rest = (
            _Means.over(of_folds, rows.shares),
            _Means.over(of_others, rows.others),
        )

    def at(self, values: Array) -> Array:
        """The Newton basis at rows of the variable, shape (q, rank)."""
        sections = self._kernel(values, self._pivots)
        return solve_lower(self._factor, sections)

    def gradient(
        self, in_rest: _Derivatives, in_held: _Derivatives, other: Array, in_cross: Array
    ) -> list[float]:
        """The gradient in the parameters of the kernel, with pivots as they are.

        Parameters
        ----------
        in_rest, in_held
            Derivatives in the means over the rows without each fold, and over its own.
        other
            The Newton basis of the other variable, M, at the rows, shape (n, k).
        in_cross
            Derivatives in the sums of N M^T over each fold, shape (F, m, k).
        """
        rows, newton = self._rows, self.newton
        gram, mean, events = (_in_sums(*each, rows) for each in zip(in_rest, in_held, strict=True))
        at_rows = np.concatenate(
            [
                rows.weights[s, None]
                * (
                    2.0 * newton[s] @ gram[f]
                    + other[s] @ in_cross[f].T
                    + rows.events[s] @ events[f].T
                    + mean[f]
                )
                for f, s in enumerate(rows.slices)
            ]
        )
        # N = K_XZ L^-T, and any L of L L^T = K_ZZ gives the same losses: dL = dK_ZZ L^-T / 2.
        in_sections = solve_lower(self._factor, at_rows, transposed=False)
        inner = solve_lower(self._factor, in_sections.T @ newton, transposed=False)
        kernel, pivots = self._kernel, self._pivots
        of_rows = kernel.weighted_gradient(self._values, pivots, in_sections)
        of_pivots = kernel.weighted_gradient(pivots, pivots, -0.25 * (inner + inner.T))
        return [one + two for one, two in zip(of_rows, of_pivots, strict=True)]

    # No cached_property: until Python 3.12 it locks out the sides that other threads make.

    @property
    def bases(self) -> tuple[Array, Array]:
        """Centred eigenbases without each fold: transforms (F, m, k), and eigenvalues (F, k)."""
        if self._bases is None:
            grams, means = self.rest.gram, self.rest.mean
            centred = np.linalg.norm(means, axis=-1) > 0.0
            if centred.all() or not centred.any():
                self._bases = eigenbasis(grams, means)
            else:  # a function more where the mean is zero: elsewhere one that is zero
                self._bases = _side_by_side(map(eigenbasis, grams, means), grams.shape)
        return self._bases


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


def screened_folds(rows: ScreenedRows, x: ScreenedSide, y: ScreenedSide) -> FoldMeans:
    """Every fold held out, for this pair of bases."""
    own = _crossed(rows, x, y)
    rest, held = (
        PairMeans(of_x.gram, of_y.gram, (cross.T / weights).T, of_x.mean, of_y.mean)
        for of_x, of_y, cross, weights in (
            (x.rest, y.rest, own.sum(axis=0) - own, rows.others),
            (x.held, y.held, own, rows.shares),
        )
    )
    others, shares = rows.others[:, None], rows.shares[:, None]
    constant = (rows.event_sums.sum(axis=0) - rows.event_sums) / others
    mean, square = rows.event_sums / shares, rows.event_squares / shares
    return FoldMeans(rest, y.rest.events, constant, held, x.held.events, mean, square)


def screened_losses(
    rows: ScreenedRows, x: ScreenedSide, y: ScreenedSide, regs: Sequence[Regularization]
) -> Losses:
    """Losses of refits with positive ridges on the fold that they lack: arrays (F, ...).

    From eigenbases, which pairs share, for many ridges; from linear systems for a few.
    """
    folds = screened_folds(rows, x, y)
    solved = all(reg.form == "two-sided" and min(reg.x, reg.y) >= _LEAST_RIDGE for reg in regs)
    if len(regs) <= _FEW_RIDGES and solved:
        with suppress(LinAlgError):  # where the least ridge is that of rounding
            found = folds.losses(regs)
            if np.isfinite(found.joint).all() and np.isfinite(found.squared).all():
                return found
    return folds.in_eigenbases(x.bases, y.bases).losses(regs)


def screened_gradient(
    rows: ScreenedRows,
    sides: tuple[ScreenedSide, ScreenedSide],
    reg: Regularization,
    factors: tuple[float, Array],
    learned: tuple[bool, bool],
) -> list[list[float]]:
    """The gradient of a score in the parameters of the kernels of x and of y.

    Parameters
    ----------
    rows, sides
        As in :func:`screened_folds`.
    reg
        A positive two-sided ridge.
    factors
        The score is the first of them times the joint loss plus the others, shape (q,), times the
        squared errors of the events; of each the mean over the folds.
    learned
        Which kernels are learned: those of others have no gradient.
    """
    x, y = sides
    folds = screened_folds(rows, x, y)
    share, (of_joint, of_events) = rows.shares / rows.shares.sum(), factors
    found = folds.gradient(reg, of_joint * share, share[:, None] * of_events)
    in_cross = _in_sums(found.rest.cross, found.held.cross, rows)
    (rest, held), none = (found.rest, found.held), np.zeros_like
    of_x = rest.gram_x, rest.mean_x, none(found.of_x)
    of_y = rest.gram_y, rest.mean_y, found.target
    result: list[list[float]] = [[], []]
    if learned[0]:
        in_x = held.gram_x, held.mean_x, found.of_x
        result[0] = x.gradient(of_x, in_x, y.newton, in_cross.mT)
    if learned[1]:
        in_y = held.gram_y, held.mean_y, none(found.target)
        result[1] = y.gradient(of_y, in_y, x.newton, in_cross)
    return result


def screened_means(
    rows: ScreenedRows, x: ScreenedSide, y: ScreenedSide
) -> Iterator[tuple[Moments, Moments]]:
    """Means over the rows without each fold, and over its own, for this pair of bases."""
    own = _crossed(rows, x, y)
    events = np.stack([rows.event_sums, rows.event_squares], axis=1)  # (F, 2, q)
    rest = _means(rows.others, x.rest, y.rest, own.sum(axis=0) - own, events.sum(axis=0) - events)
    return zip(rest, _means(rows.shares, x.held, y.held, own, events), strict=True)


def _means(weights: Array, x: _Means, y: _Means, cross: Array, events: Array) -> Iterator[Moments]:
    """Means of each fold, from sums of the pair, all with a first axis of folds."""
    each = zip(zip(*x, strict=True), zip(*y, strict=True), strict=True)
    for weight, of_sides, of_pair, sums in zip(weights.tolist(), each, cross, events, strict=True):
        of_x, of_y = (_Means(*of_side) for of_side in of_sides)
        mean, square = sums / weight
        blocks = {
            ("x", "x"): of_x.gram,
            ("y", "y"): of_y.gram,
            ("y", "x"): of_pair / weight,
            ("x", "f(y)"): of_x.events,
            ("y", "f(y)"): of_y.events,
            ("f(y)", "f(y)"): np.diag(square),  # only whose diagonal is read
        }
        traces = {"x": float(of_x.trace), "y": float(of_y.trace)}
        means = {"x": of_x.mean, "y": of_y.mean, "f(y)": mean}
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
    weights
        The laws on the atoms, shape (b, S).
    atoms
        What the laws put mass on, shape (S, d).
    """

    held: Array
    weights: Array
    atoms: Array


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
    def repays_a_pass(self) -> bool:
        """Whether it is worth a second pass over many rows.

        It is more than two standard errors, and more than 1 % of the CRPS: the pass doubles the
        time of a fit, and with more rows plain laws come nearer to the moved ones.
        """
        return self.gain > max(2.0 * self.std, _REPAYING * self.plain)


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
        laws, _ = project(ratio, masses)
        yield HeldLaws(rows.order[held], laws, parts[1][rows.order[rest]])
