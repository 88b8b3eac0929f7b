"""The traditional conditional mean embedding, (42) of the joint paper, from the same moments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.crossval import Replicates, collect, split_folds, squared_error
from cme_dask.numerics.moments import MeanMoments, Moments, Side

Array = Any
FoldLoss = Callable[[MeanMoments, MeanMoments, Array], Array]
"""From means over the other folds and over one, and ridges, to losses on it."""

MAX_ROWS = 20_000
"""Rows that laws on single rows may have: one of them is as long as all rows."""


@dataclass(frozen=True, eq=False)
class ConditionalEmbedding:
    r"""Ridge regression on the features of x.

    .. math:: \mathrm E[f(Y) | x] = \psi_X(x)^T (\mathrm{diag}(\lambda_X) + r)^{-1}
              \mathrm E[\psi_X f(Y)]
              = \sum_i f(y_i) [(K_X + n r)^{-1} k_X(X, x)]_i

    with the kernel that the basis spans, L L^T, as K_X: the two forms are equal. Its weights are
    signed, and neither they nor E[1 | x] add up to one.

    Attributes
    ----------
    transform
        T of the spectral basis psi_X = T^T N, shape (m, k).
    shrunk
        1 / (lam + r), shape (k,); without a ridge 0 where lam <= eps m lam_max is rounding.

    Notes
    -----
    Source: Song, Huang, Smola and Fukumizu (2009), Proceedings of ICML, 961; lambda = n r there.
    """

    transform: Array
    shrunk: Array

    @classmethod
    def of(cls, mean: MeanMoments, reg: float) -> "ConditionalEmbedding":
        """From moments of x and y.

        Raises
        ------
        DataError
            If the ridge is negative or not finite.
        """
        transform, lam = eigenbasis(mean.gram[0])
        return cls(transform, _shrunk(lam, check_ridges([reg]))[:, 0])

    def slope(self, target: Array) -> Array:
        """(S_XX + r)^-1 E[N_X f], shape (m, q), of E[N_X f], (m, q): E[f | x] = N_X(x)^T slope."""
        return np.asarray(self.transform @ (self.shrunk[:, None] * (self.transform.T @ target)))

    def functions(self, mean: MeanMoments) -> Array:
        """Slopes of the columns and declared functions of y, shape (m, q)."""
        return self.slope(_function_moments(mean))

    def one(self, mean: MeanMoments) -> Array:
        """Slope of E[1 | x], shape (m,): a law would answer with one."""
        return self.slope(mean.mean[0][:, None])[:, 0]

    def operator(self, mean: MeanMoments) -> Array:
        """C^T, slopes of N_Y, shape (m_X, m_Y): E[k_Y(y, Y) | x] = N_X(x)^T C^T N_Y(y)."""
        assert mean.cross is not None
        return self.slope(mean.cross.T)

    def rows(self, newton: Array, weights: Array) -> Array:
        """Slopes of the weights of rows, shape (m, n): weights(x) = N_X(x)^T slopes.

        Parameters
        ----------
        newton
            N_X at the rows of the fit, shape (n, m).
        weights
            Their weights, sum 1, shape (n,).

        Raises
        ------
        DataError
            For more than 20,000 rows.
        """
        if len(newton) > MAX_ROWS:
            raise DataError(
                f"laws on single rows are for at most {MAX_ROWS:,} rows, got {len(newton):,}: take "
                "cells of a support"
            )
        return self.slope((newton * weights[:, None]).T)

    def cells(self, newton: Array, weights: Array, cells: Array, size: int) -> Array:
        """Slopes of the weights of cells of y, shape (m, S): those of their rows added up.

        Parameters
        ----------
        newton, weights
            As for :meth:`rows`, of any number.
        cells
            Cell of y of each row, shape (n,).
        size
            Number of cells S.
        """
        target = np.zeros((newton.shape[1], size))
        np.add.at(target.T, cells, newton * weights[:, None])
        return self.slope(target)


def surrogate_losses(moments: Moments, sides: tuple[Side, Side], regs: Any) -> tuple[Array, Array]:
    r"""Held-out surrogate loss of every fold and ridge, from one set of moments.

    .. math:: \mathrm E |k_Y(y, \cdot) - C \psi_X(x)|^2
              = \mathrm E k_Y(y, y) - 2 \langle C, S_{YX} \rangle + \mathrm{tr}(C S_{XX} C^T)

    over the held-out fold, with C = S_YX (S_XX + r)^-1 of the other folds. One eigendecomposition
    per fold, then O(m^2) per ridge. It chooses the ridge and the kernel of x, never the kernel of
    y: longer scales of y lower it.

    Parameters
    ----------
    moments
        By fold.
    sides
        x and y.
    regs
        Ridges, shape (R,).

    Returns
    -------
    losses : (F, R), of the folds that can be held out
    shares : (F,), of the weight, sum 1

    Raises
    ------
    DataError
        If a ridge is negative or not finite.

    Notes
    -----
    Source: Grünewälder et al. (2012), Conditional mean embeddings as regressors, section 3.2.
    """
    regs = check_ridges(regs)
    pairs = list(split_folds(moments, sides))
    losses = [surrogate_loss(rest, held, regs) for rest, held in pairs]
    return np.array(losses).reshape(-1, len(regs)), _shares(pairs)


def held_out_curve(
    moments: Moments, sides: tuple[Side, Side], loss: FoldLoss, regs: Array
) -> Array:
    """Mean over the folds, by weight, of a held-out loss for each ridge, shape (R,).

    Parameters
    ----------
    moments, sides
        As in :func:`surrogate_losses`.
    loss
        Of one fold: :func:`surrogate_loss` or :func:`squared_loss`.
    regs
        Ridges >= 0, shape (R,).

    Raises
    ------
    DataError
        If fewer than two folds have rows.
    """
    pairs = list(split_folds(moments, sides))
    if not pairs:
        raise DataError(
            "the ridge is chosen on held-out folds, and fewer than two have rows: give reg, or "
            "more rows"
        )
    return np.asarray(_shares(pairs) @ np.stack([loss(r, h, regs) for r, h in pairs]))


def surrogate_loss(rest: MeanMoments, held: MeanMoments, regs: Array) -> Array:
    """The loss of :func:`surrogate_losses` on one fold, shape (R,).

    Parameters
    ----------
    rest, held
        Means over the rows of the other folds, and over its own.
    regs
        Ridges >= 0, shape (R,).
    """
    assert rest.cross is not None
    assert held.cross is not None
    transform, lam = eigenbasis(rest.gram[0])
    cross = rest.cross @ transform
    linear = (cross * (held.cross @ transform)).sum(axis=0)
    quadratic = (cross.T @ cross) * (transform.T @ held.gram[0] @ transform)
    shrunk = _shrunk(lam, regs)
    square = (shrunk * (quadratic @ shrunk)).sum(axis=0)
    return np.asarray(held.trace[1] - 2.0 * linear @ shrunk + square)


def squared_loss(rest: MeanMoments, held: MeanMoments, regs: Array) -> Array:
    r"""Held-out squared error of E[f | x], averaged over the functions f of y, shape (R,).

    .. math:: \frac1q \sum_j \mathrm E (f_j(Y) - \mathrm E[f_j | X])^2 / \mathrm{Var}(f_j),

    with expectation and variance over the held-out fold. Functions that don't vary are left out.

    Parameters
    ----------
    rest, held, regs
        As in :func:`surrogate_loss`.
    """
    transform, lam = eigenbasis(rest.gram[0])
    target = transform.T @ _function_moments(rest)
    none = np.zeros(target.shape[1])
    variance = squared_error(held, 0, held.function_mean[1], np.zeros((len(transform), len(none))))
    varies = variance > (1e-13 * np.abs(held.function_mean[1])) ** 2
    losses = []
    for shrunk in _shrunk(lam, regs).T:
        error = squared_error(held, 0, none, transform @ (shrunk[:, None] * target))
        losses.append((error[varies] / variance[varies]).sum() / max(varies.sum(), 1))
    return np.array(losses)


def embedding_replicates(moments: Moments, sides: tuple[Side, Side], reg: float) -> Replicates:
    """E[f | x] without one fold each, and the squared errors on that fold.

    Parameters
    ----------
    moments, sides
        As in :func:`surrogate_losses`.
    reg
        The ridge.
    """
    parts, none = [], np.zeros(sides[1].count)
    pairs = list(split_folds(moments, sides))
    for rest, held in pairs:
        slope = ConditionalEmbedding.of(rest, reg).functions(rest)
        error = squared_error(held, 0, none, slope)
        baseline = squared_error(held, 0, rest.function_mean[1], 0.0 * slope)
        parts.append((none, slope, error, baseline))
    return collect(parts, _shares(pairs), sides[0].basis.rank, len(none))


@dataclass(frozen=True, eq=False)
class EmbeddingChange:
    """Largest change of E[f | x] at trial rows, in standard deviations of f.

    Parameters
    ----------
    newton
        N_X at some of the trial rows, shape (n, m).
    reg
        The ridge.
    """

    newton: Array
    reg: float

    def __call__(self, safe: MeanMoments) -> Callable[[MeanMoments], float]:
        """The change from these moments of the trial rows to others."""
        answers = self._answers(safe)
        count = len(safe.function_mean[0])
        means = np.concatenate([safe.function_mean[1], [1.0]])
        spread = np.sqrt(np.append(np.diag(safe.function_gram)[count:], 1.0))
        scale = spread + 1e-6 * np.abs(means) + np.finfo(np.float64).tiny

        def change(tried: MeanMoments) -> float:
            if not all(np.isfinite(gram).all() for gram in tried.gram):
                return np.inf
            return float((np.abs(self._answers(tried) - answers).max(axis=0) / scale).max())

        return change

    def _answers(self, mean: MeanMoments) -> Array:
        model = ConditionalEmbedding.of(mean, self.reg)
        return self.newton @ np.column_stack([model.functions(mean), model.one(mean)])


def _function_moments(mean: MeanMoments) -> Array:
    """E[N_X f^T] of the functions of y, shape (m, q)."""
    return np.asarray(mean.function_cross[0][1] + np.outer(mean.mean[0], mean.shift[1]))


def _shares(pairs: Sequence[tuple[MeanMoments, MeanMoments]]) -> Array:
    """Shares of the weight of the held-out folds, shape (F,)."""
    weights = np.array([held.weight for _, held in pairs])
    return weights / weights.sum() if len(weights) else weights


def _shrunk(lam: Array, regs: Array) -> Array:
    """1 / (lam + r), shape (k, R)."""
    rounding = lam <= np.finfo(np.float64).eps * len(lam) * lam.max(initial=0.0)
    pruned = rounding[:, None] & (regs == 0.0)
    return np.where(pruned, 0.0, 1.0 / np.where(pruned, 1.0, lam[:, None] + regs))


def check_ridges(regs: Any) -> Array:
    """Ridges as an array, shape (R,); DataError if one is negative or no number."""
    try:
        values = np.atleast_1d(np.asarray(regs, dtype=np.float64))
    except (TypeError, ValueError):
        values = np.array([np.nan])
    if values.ndim != 1 or not (np.isfinite(values).all() and (values >= 0).all()):
        raise DataError(f"ridges must be non-negative numbers, got {regs!r}")
    return values
