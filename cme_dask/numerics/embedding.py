"""The traditional conditional mean embedding, (42) of the joint paper, from the same moments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.crossval import held_out
from cme_dask.numerics.moments import Moments, MomentSums, variances
from cme_dask.numerics.problem import Replicates, replicates
from cme_dask.numerics.scoring import mean_and_error

Array = Any
FoldLoss = Callable[[Moments, Moments, Array], Array]
"""From means over the other folds and over one, and ridges, to losses on it."""

SCHEDULES: dict[str, Callable[[int], float]] = {
    "finite-rank": lambda n: 0.1 * float(n) ** -0.5,
    "slow-decay": lambda n: 0.1 * float(np.log(n) / n) ** (2.0 / 3.0),
}
"""Ridges r over E k(X, X) by the number n of rows, whose excess surrogate risk falls as 1 / n for
kernels of finite rank (b = infinity, c > 1), and as (log n / n)^(2/3) for eigenvalues that fall as
i^-2 (b = 2, c = 1): Grünewälder et al. (2012), corollary 4.1, with the schedules of Caponnetto and
De Vito (2007), theorem 1. Theory leaves the factor open."""

MAX_ROWS = 20_000
"""Rows that laws on single rows may have: one of them is as long as all rows."""


@dataclass(frozen=True, eq=False)
class ConditionalEmbedding:
    r"""Ridge regression on the features of x.

    .. math:: \mathrm E[f(Y) | x] = \psi_X(x)^T (\mathrm{diag}(\lambda_X) + r)^{-1}
              \mathrm E[\psi_X f(Y)]
              = \sum_i f(y_i) [(K_X + n r)^{-1} k_X(X, x)]_i

    with the kernel that the basis spans, L L^T, as K_X: the two forms are equal. Its weights are
    signed, and their sum, E[1 | x], is not one. :meth:`answers` spreads the remainder 1 - E[1 | x]
    evenly over all rows: else answers would be off by a share of f's own level.

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
    def of(cls, mean: Moments, reg: float) -> "ConditionalEmbedding":
        """From moments of x and y.

        Raises
        ------
        DataError
            If the ridge is negative or not finite.
        """
        transform, lam = eigenbasis(mean.blocks["x", "x"])
        return cls(transform, inverse_eigenvalues(lam, check_ridges([reg]))[:, 0])

    def slope(self, target: Array) -> Array:
        """(S_XX + r)^-1 E[N_X f], shape (m, q), of E[N_X f], (m, q): E[f | x] = N_X(x)^T slope."""
        return np.asarray(self.transform @ (self.shrunk[:, None] * (self.transform.T @ target)))

    def answers(self, mean: Moments) -> tuple[Array, Array]:
        """Of the columns and declared functions of y the constant, (q,), and the slopes, (m, q).

        They are ``E f + N_X(x)^T (S_XX + r)^-1 E[N_X (f - E f)]``, that is
        ``E[f | x] + (1 - E[1 | x]) E f``: a constant added to f is added to the answer.
        """
        return mean.function_means("y"), self.slope(function_moments(mean))

    def functions(self, mean: Moments) -> Array:
        """Slopes of E[f | x] of the columns and declared functions of y as printed, (m, q)."""
        constant, slope = self.answers(mean)
        return slope + np.outer(self.one(mean), constant)

    def one(self, mean: Moments) -> Array:
        """Slope of E[1 | x], shape (m,): a law would answer with one."""
        return self.slope(mean.means["x"][:, None])[:, 0]

    def operator(self, mean: Moments) -> Array:
        """C^T, slopes of N_Y, shape (m_X, m_Y): E[k_Y(y, Y) | x] = N_X(x)^T C^T N_Y(y)."""
        return self.slope(mean.blocks["y", "x"].T)

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


def surrogate_losses(moments: MomentSums, regs: Any) -> tuple[Array, Array]:
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
    losses, shares = held_out(moments, lambda rest, held: surrogate_loss(rest, held, regs))
    return np.array(losses).reshape(-1, len(regs)), shares


def held_out_curve(
    moments: MomentSums, loss: FoldLoss, values: Array, name: str = "reg"
) -> tuple[Array, Array]:
    """Means over the folds, by weight, of held-out losses, and their standard errors.

    Parameters
    ----------
    moments
        As in :func:`surrogate_losses`.
    loss
        Of one fold: :func:`surrogate_loss`, :func:`squared_loss`, or another one.
    values
        What is compared: ridges >= 0, or others, shape (R,).
    name
        The parameter whose values these are.

    Returns
    -------
    losses, errors : (R,), or as many as ``loss`` gives

    Raises
    ------
    DataError
        If fewer than two folds have rows.
    """
    losses, shares = held_out(moments, lambda rest, held: loss(rest, held, values))
    if len(losses) < 2:
        raise DataError(
            f"{name} is chosen on held-out folds, and fewer than two have rows: give one {name} "
            "and n_folds=1, or more rows"
        )
    return mean_and_error(np.stack(losses), shares)


def embedding_loss(held: Moments, embedded: Array) -> float:
    """Surrogate loss E |k_Y(y, .) - mu(x)|^2 of mu(x) = N_X(x)^T A N_Y on held-out rows.

    Parameters
    ----------
    held
        Means over these rows.
    embedded
        A, shape (m_X, m_Y).
    """
    linear = float((held.blocks["x", "y"] * embedded).sum())
    square = float(((held.blocks["x", "x"] @ embedded) * embedded).sum())
    return float(held.traces["y"]) - 2.0 * linear + square


def surrogate_loss(rest: Moments, held: Moments, regs: Array) -> Array:
    """The loss of :func:`surrogate_losses` on one fold, shape (R,).

    Parameters
    ----------
    rest, held
        Means over the rows of the other folds, and over its own.
    regs
        Ridges >= 0, shape (R,).
    """
    transform, lam = eigenbasis(rest.blocks["x", "x"])
    cross = rest.blocks["y", "x"] @ transform
    linear = (cross * (held.blocks["y", "x"] @ transform)).sum(axis=0)
    quadratic = (cross.T @ cross) * (transform.T @ held.blocks["x", "x"] @ transform)
    shrunk = inverse_eigenvalues(lam, regs)
    square = (shrunk * (quadratic @ shrunk)).sum(axis=0)
    return np.asarray(held.traces["y"] - 2.0 * linear @ shrunk + square)


def squared_loss(rest: Moments, held: Moments, regs: Array) -> Array:
    r"""Held-out squared error of E[f | x], averaged over the functions f of y, shape (R,).

    .. math:: \frac1q \sum_j \mathrm E (f_j(Y) - \mathrm E[f_j | X])^2 / \mathrm{Var}(f_j),

    with the expectation over the held-out fold, and the variance over all rows: of a rare event a
    fold may have none. Functions that don't vary are left out.

    Parameters
    ----------
    rest, held, regs
        As in :func:`surrogate_loss`.
    """
    transform, lam = eigenbasis(rest.blocks["x", "x"])
    target, constant = transform.T @ function_moments(rest), rest.function_means("y")
    variance = variances((rest, held), "y")
    varies = variance > 0.0
    losses = []
    for shrunk in inverse_eigenvalues(lam, regs).T:
        error = held.squared_error("x", "y", constant, transform @ (shrunk[:, None] * target))
        losses.append((error[varies] / variance[varies]).sum() / max(varies.sum(), 1))
    return np.array(losses)


def embedding_replicates(moments: MomentSums, reg: float) -> Replicates:
    """E[f | x] without one fold each, and the squared errors on that fold.

    Parameters
    ----------
    moments
        As in :func:`surrogate_losses`.
    reg
        The ridge.
    """
    refits = (
        (rest, held, [ConditionalEmbedding.of(rest, reg).answers(rest)])
        for rest, held in moments.split_folds()
    )
    return replicates(refits, moments)[0]


def refits_at(moments: MomentSums, newton: Array, folds: Array) -> Callable[[float], Array]:
    """E[f | x] at rows, of refits without the fold of each: a function of the ridge, (n, q).

    Parameters
    ----------
    moments
        By fold, two of which have rows at least.
    newton
        N_X at the rows, shape (n, m).
    folds
        The fold of each row, shape (n,).
    """
    parts = []
    for fold in moments.held_out_folds:
        rest, here = moments.means(without=fold), np.flatnonzero(folds == fold)
        transform, lam = eigenbasis(rest.blocks["x", "x"])
        target = transform.T @ function_moments(rest)
        parts.append((here, newton[here] @ transform, lam, target, rest.function_means("y")))

    def at(reg: float) -> Array:
        result = np.zeros((len(newton), parts[0][3].shape[1]))
        for here, features, lam, target, constant in parts:
            shrunk = inverse_eigenvalues(lam, np.array([reg]))
            result[here] = constant + features @ (shrunk * target)
        return result

    return at


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

    def __call__(self, safe: Moments) -> Callable[[Moments], float]:
        """The change from these moments of the trial rows to others."""
        answers = self._answers(safe)
        means = np.append(safe.function_means("y"), 1.0)
        spread = np.sqrt(np.append(np.diag(safe.blocks["f(y)", "f(y)"]), 1.0))
        scale = spread + 1e-6 * np.abs(means) + np.finfo(np.float64).tiny

        def change(tried: Moments) -> float:
            if not all(np.isfinite(tried.blocks[v, v]).all() for v in tried.traces):
                return np.inf
            return float((np.abs(self._answers(tried) - answers).max(axis=0) / scale).max())

        return change

    def _answers(self, mean: Moments) -> Array:
        model = ConditionalEmbedding.of(mean, self.reg)
        constant, slope = model.answers(mean)
        return np.column_stack([constant + self.newton @ slope, self.newton @ model.one(mean)])


def function_moments(mean: Moments) -> Array:
    """E[N_X (f - E f)^T] of the functions of y, shape (m, q)."""
    return np.asarray(mean.blocks["x", "f(y)"] - np.outer(mean.means["x"], mean.means["f(y)"]))


def inverse_eigenvalues(lam: Array, regs: Array) -> Array:
    """1 / (lam + r), shape (k, R)."""
    rounding = lam <= np.finfo(np.float64).eps * len(lam) * lam.max(initial=0.0)
    pruned = rounding[:, None] & (regs == 0.0)
    return np.where(pruned, 0.0, 1.0 / np.where(pruned, 1.0, lam[:, None] + regs))


def check_ridges(regs: Any) -> Array:
    """Ridges as an array, shape (R,); DataError if one is negative or no number."""
    try:
        boolean = np.asarray(regs).dtype == bool
        values = np.atleast_1d(np.nan if boolean else np.asarray(regs, dtype=np.float64))
    except (TypeError, ValueError):
        values = np.array([np.nan])
    if values.ndim != 1 or not np.isfinite(values).all() or (values < 0.0).any():
        raise DataError(f"ridges must be non-negative numbers, got {regs!r}")
    return values
