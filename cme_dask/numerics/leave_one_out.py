"""Leave-one-out losses of conditional mean embeddings, for all ridges in one pass over the rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.numerics.basis import Basis, eigenbasis
from cme_dask.numerics.embedding import function_moments, inverse_eigenvalues
from cme_dask.numerics.moments import FeatureBlock, MomentSums, variances
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip, blocks

Array = Any
Targets = Callable[[Array], tuple[Array, Array]]
"""From rows of y to what is regressed on x, shape (n, q), and a constant loss, shape (n,)."""

_WORD = 8
_BLOCK = 4096


def left_out_flops(rank: float, targets: float, ridges: int) -> float:
    """Operations per row: both bases, psi_X, and the residuals of each ridge."""
    return 3.0 * rank**2 + targets**2 + 2.0 * ridges * rank * targets


@dataclass(frozen=True, eq=False)
class KernelSections:
    """k_Y(y, .) in an orthonormal basis, and its squared norm outside the span of the basis."""

    basis: Basis

    def __call__(self, y: Array) -> tuple[Array, Array]:
        """Values of the basis, and the rest of k_Y(y, y)."""
        values = self.basis(y)
        return values, np.asarray(self.basis.kernel.diagonal(y)) - (values**2).sum(axis=1)


@dataclass(frozen=True, eq=False)
class ScaledFunctions:
    """The columns and functions of y less their means, times factors, shapes (q,)."""

    block: FeatureBlock
    means: Array
    factors: Array

    def __call__(self, y: Array) -> tuple[Array, Array]:
        """Scaled values, and no constant."""
        centred = np.hstack([*self.block.values(y)]) - self.means
        return centred * self.factors, np.zeros(len(y))


@dataclass(frozen=True, eq=False)
class LeaveOneOut(Reduction[Array, tuple[Array, Array]]):
    r"""Mean leave-one-out loss of a ridge regression on x for each ridge, and its standard error.

    .. math:: \sum_i p_i \frac{|F(y_i) - C_r \psi_X(x_i)|^2}{(1 - h_i)^2}, \quad
              C_r = \mathrm E[F \psi_X^T] (\mathrm{diag}(\lambda) + r)^{-1}, \quad
              h_i = p_i \psi_X(x_i)^T (\mathrm{diag}(\lambda) + r)^{-1} \psi_X(x_i)

    where p_i is the share of row i of the weight. Each term is the loss at row i of the fit without
    row i, with the same bases and the same penalty n r |C|^2 on the sum of squares. The result has
    shapes (R,) and (R,).

    Functions F less their means have another mean without row i. The residual F(y_i) - C psi(x_i)
    then grows by ``F(y_i) (1 - m_i) p_i / (1 - p_i)``, m_i the fitted E[1 | x_i].

    Parameters
    ----------
    basis
        N_X of the fit.
    transform, eigenvalues
        psi_X = T^T N_X, shape (m, k), and lambda, shape (k,).
    targets
        F, with a constant that is added to the loss.
    operator
        E[psi_X F^T], shape (k, q).
    regs
        Ridges, shape (R,).
    weight
        Sum of the weights of all rows.
    one
        E[psi_X], shape (k,), where F is less its means; else None.

    Notes
    -----
    Source: Grünewälder et al. (2012), section 3.2, by the shortcut of ridge regression. The loss is
    infinite if the regression has no unique solution without some row.
    """

    basis: Basis
    transform: Array
    eigenvalues: Array
    targets: Targets
    operator: Array
    regs: Array
    weight: float
    one: Array | None = None
    name = "leave-one-out"
    on_device = False

    def cost(self, extent: Extent) -> Cost:
        """Both bases, and the residuals of each ridge."""
        (m, k), q, ridges = self.transform.shape, self.operator.shape[1], len(self.regs)
        return Cost(
            flops=left_out_flops(m, q, ridges),
            state=_BLOCK * (m + 2 * (k + q + extent.n_columns + ridges)) * _WORD,
            partial=4 * ridges * _WORD,
            process=2 * (m * m + m * k + k * q + q * q) * _WORD,
            subject=f"leave-one-out at rank {m} + {q}",
            remedies=("lower max_rank",),
        )

    def update(self, state: None, strip: Strip) -> Array:
        """Sums of p loss, (p loss)^2, p^2 loss and p^2, shape (4, R)."""
        inverses = inverse_eigenvalues(self.eigenvalues, self.regs)
        sums = np.zeros((4, len(self.regs)))
        for here in blocks(len(strip), _BLOCK):
            x, y = (part[here] for part in strip.parts)
            share = np.full(len(x), 1.0 / self.weight)
            if strip.weights is not None:
                positive = strip.weights[here] > 0.0
                x, y, share = x[positive], y[positive], strip.weights[here][positive] / self.weight
            psi = self.basis(x) @ self.transform
            target, constant = self.targets(y)
            others = np.divide(share, 1.0 - share, out=np.zeros(len(share)), where=share < 1.0)
            rests = 1.0 - share[:, None] * (psi**2 @ inverses)
            for sum_, inverse, rest in zip(sums.T, inverses.T, rests.T, strict=True):
                residual = psi @ (inverse[:, None] * self.operator)
                residual -= target
                if self.one is not None:
                    lacking = 1.0 - psi @ (inverse * self.one)
                    residual -= (lacking * others)[:, None] * target
                square = np.einsum("ij,ij->i", residual, residual)
                loss = np.full(len(x), np.inf)
                np.divide(square, rest**2, out=loss, where=rest > 0.0)
                term = share * (loss + constant)
                sum_ += term.sum(), term @ term, share @ term, share @ share
        return sums

    def finalize(self, total: Array) -> tuple[Array, Array]:
        """The mean of the losses, and its standard error, infinite where the mean is."""
        mean, squares, product, shares = total
        finite = np.isfinite(mean)
        loss = np.where(finite, mean, 0.0)
        variance = np.where(finite, squares, 0.0) - 2.0 * loss * np.where(finite, product, 0.0)
        error = np.sqrt(np.maximum(variance + loss**2 * shares, 0.0))
        return mean, np.where(finite, error, np.inf)


def leave_one_out(
    moments: MomentSums, sides: Sequence[FeatureBlock], criterion: str, regs: Array
) -> LeaveOneOut:
    """The reduction of a fit.

    Parameters
    ----------
    moments, sides
        Of x and y.
    criterion
        ``"surrogate"``: F(y) = k_Y(y, .); ``"squared"``: the columns and functions of y that vary,
        over their standard deviations and the root of their number.
    regs
        Ridges >= 0, shape (R,).
    """
    (x, y), mean = sides, moments.means()
    transform, eigenvalues = eigenbasis(mean.blocks["x", "x"])
    targets: Targets
    one = None
    if criterion == "surrogate":
        targets, cross = KernelSections(y.basis), mean.blocks["y", "x"].T
    else:
        variance = variances([mean], "y")
        varies = variance > 0.0
        count = max(int(varies.sum()), 1)
        factors = np.where(varies, 1.0 / np.sqrt(count * np.where(varies, variance, 1.0)), 0.0)
        targets = ScaledFunctions(y, mean.function_means("y"), factors)
        cross, one = function_moments(mean) * factors, transform.T @ mean.means["x"]
    cross = transform.T @ cross
    return LeaveOneOut(x.basis, transform, eigenvalues, targets, cross, regs, mean.weight, one)
