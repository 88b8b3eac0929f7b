"""The traditional conditional mean embedding, (42) of the joint paper, from the same moments."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.means import MeanMoments
from cme_dask.numerics.moments import Moments, Side
from cme_dask.numerics.validation import split_folds

Array = Any

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
        return cls(transform, _shrunk(lam, _ridges([reg]))[:, 0])

    def slope(self, target: Array) -> Array:
        """(S_XX + r)^-1 E[N_X f], shape (m, q), of E[N_X f], (m, q): E[f | x] = N_X(x)^T slope."""
        return np.asarray(self.transform @ (self.shrunk[:, None] * (self.transform.T @ target)))

    def functions(self, mean: MeanMoments) -> Array:
        """Slopes of the columns and declared functions of y, shape (m, q)."""
        return self.slope(mean.function_cross[0][1] + np.outer(mean.mean[0], mean.shift[1]))

    def one(self, mean: MeanMoments) -> Array:
        """Slope of E[1 | x], shape (m,): a law would answer with one."""
        return self.slope(mean.mean[0][:, None])[:, 0]

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
    regs = _ridges(regs)
    losses, weights = [], []
    for rest, held in split_folds(moments, sides):
        assert rest.cross is not None
        assert held.cross is not None
        transform, lam = eigenbasis(rest.gram[0])
        cross = rest.cross @ transform
        linear = (cross * (held.cross @ transform)).sum(axis=0)
        quadratic = (cross.T @ cross) * (transform.T @ held.gram[0] @ transform)
        shrunk = _shrunk(lam, regs)
        square = (shrunk * (quadratic @ shrunk)).sum(axis=0)
        losses.append(held.trace[1] - 2.0 * linear @ shrunk + square)
        weights.append(held.weight)
    shares = np.array(weights)
    return np.array(losses).reshape(-1, len(regs)), shares / shares.sum()


def _shrunk(lam: Array, regs: Array) -> Array:
    """1 / (lam + r), shape (k, R)."""
    rounding = lam <= np.finfo(np.float64).eps * len(lam) * lam.max(initial=0.0)
    pruned = rounding[:, None] & (regs == 0.0)
    return np.where(pruned, 0.0, 1.0 / np.where(pruned, 1.0, lam[:, None] + regs))


def _ridges(regs: Any) -> Array:
    try:
        values = np.atleast_1d(np.asarray(regs, dtype=np.float64))
    except (TypeError, ValueError):
        values = np.array([np.nan])
    if values.ndim != 1 or not (np.isfinite(values).all() and (values >= 0).all()):
        raise DataError(f"ridges must be non-negative numbers, got {regs!r}")
    return values
