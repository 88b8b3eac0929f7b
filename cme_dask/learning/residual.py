"""Whether laws of residuals, moved to a location, are better than plain ones: held-out CRPS."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.kernels import Kernel
from cme_dask.learning.screening import ScreenedRows, ScreenedSide, screened_folds
from cme_dask.metrics import crps
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.projection import project

Array = Any
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
    r"""The gain and its standard error.

    .. math:: \bar d = \sum_i w_i d_i, \quad
              \mathrm{s.e.}^2 = \frac{U}{U - 1} \sum_u \Bigl(\sum_{i \in u} w_i (d_i - \bar d)
              \Bigr)^2

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
    difference = plain - residual
    gain = float(share @ difference)
    _, unit = np.unique(units, return_inverse=True)
    sums = np.bincount(unit, share * (difference - gain))
    count = len(sums)
    std = float(np.sqrt(count / (count - 1) * (sums @ sums))) if count > 1 else np.inf
    return Gain(float(share @ plain), float(share @ residual), gain, std, len(plain))


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
    for fold, held in zip(screened_folds(rows, x, y), rows.slices, strict=True):
        solution = fold.solution(reg)
        rest = np.ones(len(folds), dtype=bool)
        rest[held] = False
        left = x.newton[held] @ solution.transform_x @ solution.coef.T
        ratio = 1.0 + left @ (y.newton[rest] @ solution.transform_y).T
        masses = rows.weights[rest] / rows.weights[rest].sum()
        yield HeldLaws(rows.order[held], ratio, masses, parts[1][rows.order[rest]])
