"""The log score of projected laws at rows that they were fitted without, in cells of y."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cme_dask.numerics.crossval import HeldFold, over_folds
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.projection import project
from cme_dask.numerics.support import Support

Array = Any

LOG_CELLS = 100
"""Cells of y in which the log score of a search is taken, at most."""


@dataclass(frozen=True, eq=False)
class CelledRows:
    """Rows that are judged by the log score, fold by fold.

    Parameters
    ----------
    support
        The S cells of y.
    rows
        y of the rows, shape (n, d).
    weights
        Of the rows, shape (n,).
    held
        What selects the rows of each fold.
    """

    support: Support
    rows: Array
    weights: Array
    held: Sequence[Array | slice]

    @cached_property
    def cells(self) -> Array:
        """The cell of each row, shape (n,)."""
        return self.support.assign(self.rows)

    def score(self, fold: int, ratio: Array) -> float:
        r"""Mean log score of the laws at the rows of one fold.

        .. math:: \sum_i p_i \log\Bigl((1 - \epsilon) \frac{w_s(x_i)}{v_s} + \epsilon\Bigr), \quad
                  y_i \in s, \quad \epsilon = 1 / m,

        with w the projection of the ratio and v the masses of the cells among the m rows of the
        other folds: a law of which a share of 1 / m is the marginal, so that the logarithm is
        finite. Independence has 0, and so does a row in a cell that the others have no rows in.

        Parameters
        ----------
        fold
            Which of ``held``, b rows.
        ratio
            Signed density ratio at these rows and the points of the support, shape (b, S), fitted
            on the other folds.
        """
        held = self.held[fold]
        rest = np.ones(len(self.cells), dtype=bool)
        rest[held] = False
        at, weights = self.cells[held], self.weights[held]
        if not len(at) or not rest.any():
            return 0.0  # there is nothing to judge, or nothing to judge by
        masses = np.bincount(self.cells[rest], self.weights[rest], len(self.support.points))
        masses = masses / masses.sum()
        laws = project(ratio, masses)[0][np.arange(len(at)), at]
        density = np.divide(laws, masses[at], out=np.ones(len(at)), where=masses[at] > 0.0)
        floor = 1.0 / np.count_nonzero(rest)
        return float(weights @ np.log((1.0 - floor) * density + floor) / weights.sum())


def log_loss(
    folds: Sequence[HeldFold],
    regs: Sequence[Regularization],
    rows: CelledRows,
    newton_x: Array,
    newton_y: Array,
) -> tuple[Array, Array]:
    """Minus the held-out log score for each ridge, and its standard error over the folds.

    Parameters
    ----------
    folds
        Each fold held out.
    regs
        Positive ridges.
    rows
        Rows to judge by, with as many folds.
    newton_x, newton_y
        Newton bases of x at the rows and of y at the points of the support, shapes (n, m_X) and
        (S, m_Y).
    """
    losses = np.empty((len(folds), len(regs)))
    for i, (fold, held) in enumerate(zip(folds, rows.held, strict=True)):
        problem = fold.problem(regs[0])
        psi_x, psi_y = newton_x[held] @ fold.transform_x, newton_y @ fold.transform_y
        for j, reg in enumerate(regs):
            slope = problem.ridged(reg).free.T @ psi_y.T
            losses[i, j] = -rows.score(i, 1.0 + psi_x @ slope)
    return over_folds(folds, losses)
