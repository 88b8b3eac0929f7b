"""Sums over rows from which scores of predictions follow, and their standard errors by blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Self

import numpy as np

Array = Any


def sorted_crps(weights: Array, atoms: Array, y: Array) -> Array:
    """CRPS of ascending atoms (S,), or (b, S), of weights (b, S) at y (b,); shape (b,).

    See :func:`cme_dask.metrics.crps`.
    """
    distance = atoms - y[:, None]
    np.abs(distance, out=distance)
    below = np.cumsum(weights[:, :-1], axis=1)
    gaps = np.broadcast_to(np.diff(atoms), below.shape)
    # Products are not kept: it is memory that takes the time.
    spread = np.einsum("bs,bs,bs->b", below, 1.0 - below, gaps)
    return np.asarray(np.einsum("bs,bs->b", weights, distance) - spread)


@dataclass(frozen=True)
class Estimate:
    """A mean over held-out rows, and its standard error by the jackknife over blocks of them.

    NaN: undefined (a constant target has no R^2, fewer than two blocks no standard error).
    """

    value: float
    std: float


@dataclass(frozen=True)
class Scores:
    r"""How good predictions of one target f are on rows of weight w.

    .. math:: \mathrm{mse} = \frac{\sum_i w_i (f_i - \hat f_i)^2}{\sum_i w_i}, \qquad
              R^2 = 1 - \mathrm{mse} / \mathrm{variance}

    Of an event, whose prediction is its probability, ``mse`` is the Brier score and ``r2`` the
    Brier skill score against the frequency of the event on these very rows.

    Attributes
    ----------
    rows
        Number of rows.
    weight
        Their total weight.
    mean, variance
        Of the target over these rows, in its unit and the square of it.
    mse, r2
        The scores.
    """

    rows: int
    weight: float
    mean: float
    variance: float
    mse: Estimate
    r2: Estimate


@dataclass(frozen=True, eq=False)
class ScoreSums:
    """Weighted sums over rows, one slice per block; they add.

    Attributes
    ----------
    rows
        Number of rows, shape (F,).
    weight
        Sum of the weights, shape (F,).
    mean
        Of the targets, shape (F, t); 0 without weight.
    spread
        Sum of w (f - mean)^2, shape (F, t).
    losses
        Sums of w times each loss (squared errors, CRPS), shape (F, l).
    """

    rows: Array
    weight: Array
    mean: Array
    spread: Array
    losses: Array

    @classmethod
    def of(cls, targets: Array, losses: Array, weights: Array | None, folds: Array, n: int) -> Self:
        """Of rows with these targets (b, t), losses (b, l), weights and folds (b,), of n folds."""
        member = (folds == np.arange(n)[:, None]).astype(np.float64)
        rows = member.sum(axis=1).astype(np.int64)
        if weights is not None:
            member *= weights
        weight = member.sum(axis=1)
        mean = member @ targets / np.where(weight > 0.0, weight, 1.0)[:, None]
        spread = member @ (targets - mean[folds]) ** 2
        return cls(rows, weight, mean, spread, member @ losses)

    def __add__(self, other: "ScoreSums") -> "ScoreSums":
        """Sums over both sets of rows (Chan, Golub and LeVeque 1983: no cancellation)."""
        weight = self.weight + other.weight
        share = (other.weight / np.where(weight > 0.0, weight, 1.0))[:, None]
        away = other.mean - self.mean
        return ScoreSums(
            self.rows + other.rows,
            weight,
            self.mean + share * away,
            self.spread + other.spread + away**2 * share * self.weight[:, None],
            self.losses + other.losses,
        )

    def total(self) -> "ScoreSums":
        """All blocks as one."""
        return reduce(add, (self._block(fold) for fold in range(len(self.rows))))

    def scores(self, target: int, loss: int) -> Scores:
        """Of the predictions of a target whose squared errors are this loss."""
        total = self.total()

        def r2(sums: ScoreSums) -> float:
            spread = float(sums.spread[0, target])
            return 1.0 - float(sums.losses[0, loss]) / spread if spread > 0.0 else np.nan

        return Scores(
            rows=int(total.rows[0]),
            weight=float(total.weight[0]),
            mean=float(total.mean[0, target]),
            variance=float(total.spread[0, target] / total.weight[0]),
            mse=self.mean_loss(loss),
            r2=self._estimate(r2),
        )

    def mean_loss(self, loss: int) -> Estimate:
        """Mean of a loss over the rows."""
        return self._estimate(lambda sums: float(sums.losses[0, loss] / sums.weight[0]))

    def ratio(self, above: int, below: int) -> Estimate:
        """Sum of one loss over that of another; NaN where that is zero."""

        def quotient(sums: "ScoreSums") -> float:
            total = float(sums.losses[0, below])
            return float(sums.losses[0, above]) / total if total > 0.0 else np.nan

        return self._estimate(quotient)

    def _estimate(self, statistic: Callable[["ScoreSums"], float]) -> Estimate:
        """A statistic of all blocks, and its jackknife over those with weight."""
        used = [self._block(fold) for fold in range(len(self.weight)) if self.weight[fold] > 0.0]
        if len(used) < 2:
            return Estimate(statistic(self.total()), np.nan)
        others = (used[:i] + used[i + 1 :] for i in range(len(used)))
        each = np.array([statistic(reduce(add, rest)) for rest in others])
        spread = ((each - each.mean()) ** 2).sum() * (len(each) - 1) / len(each)
        return Estimate(statistic(self.total()), float(np.sqrt(spread)))

    def _block(self, fold: int) -> "ScoreSums":
        here = slice(fold, fold + 1)
        return ScoreSums(
            self.rows[here],
            self.weight[here],
            self.mean[here],
            self.spread[here],
            self.losses[here],
        )
