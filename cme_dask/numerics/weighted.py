r"""Moments weighted by functions of the rows, in given bases: those of multiplication operators.

In an orthonormal basis psi, the multiplication by a function f has the matrix
:math:`(\mathrm{diag}(\lambda) + r)^{-1} \mathrm E[f \psi \psi^T]`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from array_api_compat import array_namespace, device

from cme_dask.errors import DataError, ZeroWeights
from cme_dask.kernels.evaluator import Scratch
from cme_dask.numerics.moments import Function, Moments, MomentSums, function_values
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip, by_fold, sub_block

Array = Any
Sums = tuple[Array, Array]

_WORD = 8


class RowFunctions(Protocol):
    """Functions of the rows of one variable: a basis of a fit, or one of one's own."""

    @property
    def rank(self) -> int:
        """Number of functions m."""

    def evaluator(self, like: Array) -> Callable[[Array, Array], None]:
        """What writes their values at rows (b, d) to memory of shape (m, b)."""


@dataclass(frozen=True, eq=False)
class WeightedMeans(Mapping[str, Moments]):
    """Moments by the name of each function: of all rows, and of folds by ``means``.

    Attributes
    ----------
    names
        Names of the q functions.
    ranks
        Number of basis functions of each variable, x first.
    grams
        sum_i w_i f(z_i) a_i a_i^T of a = [N_X, N_Y, 1] by fold and function, shape (F, q, P, P).
    weights
        Sum of the weights w of each fold, shape (F,).
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    grams: Array
    weights: Array

    def __getitem__(self, name: str) -> Moments:
        """E[f a a^T] over all rows, for the function of this name."""
        if name not in self.names:
            raise KeyError(name)
        return self._mean(self.names.index(name), np.arange(len(self.weights)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def means(self, *, fold: int | None = None, without: int | None = None) -> dict[str, Moments]:
        """Weighted means over all rows, over those of one fold, or over those of all folds but one.

        Parameters
        ----------
        fold
            The only fold whose rows count.
        without
            The fold whose rows are left out.

        Raises
        ------
        DataError
            If these rows have no weight, or if both are given.
        """
        if fold is not None and without is not None:
            raise DataError("give fold= or without=, not both")
        folds = np.arange(len(self.weights)) if fold is None else np.array([fold])
        folds = folds if without is None else np.delete(folds, without)
        return {name: self._mean(i, folds) for i, name in enumerate(self.names)}

    def _mean(self, i: int, folds: Array) -> Moments:
        weight = float(self.weights[folds].sum())
        if not weight > 0.0:
            raise DataError("there are no rows of positive weight in these folds")
        gram, none = self.grams[folds, i].sum(axis=0), (np.zeros(0),) * len(self.ranks)
        unknown = np.full((1, len(self.ranks)), np.nan)
        rows = np.zeros(1, dtype=np.int64)
        sums = MomentSums((gram + gram.T)[None] / 2.0, unknown, rows, self.ranks, none)
        return sums.means(weight=weight)


@dataclass(frozen=True, eq=False)
class WeightedMoments(Reduction[Sums, WeightedMeans]):
    r"""Moments :math:`\mathrm E[f N N^T]` in given bases, for signed functions f, in one pass.

    The result holds, by the name of each function f, the ``blocks`` E[f N_a N_b^T] by the names of
    two variables and the ``means`` E[f N_a] of the bases N, over all rows. Its method
    ``means`` gives them over the rows of a fold, or over those of the others: an operator is
    cross-validated without another pass.

    Parameters
    ----------
    bases
        Of x, or of x and of y.
    functions
        Functions of the rows by name, for each variable: from rows (n, d) to values (n,).
    n_folds
        Number of folds F.

    Raises
    ------
    DataError
        If there are no functions, or two of the same name.
    """

    bases: tuple[RowFunctions, ...]
    functions: tuple[Mapping[str, Function], ...] = field(default_factory=tuple)
    n_folds: int = 1
    name = "weighted-moments"

    def __post_init__(self) -> None:
        names = [name for functions in self.functions for name in functions]
        if not names or len(set(names)) < len(names) or len(self.functions) > len(self.bases):
            raise DataError(
                "weighted moments need functions of different names, a mapping for each of the "
                f"{len(self.bases)} variables, got {', '.join(map(repr, names)) or 'none'}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions, those of x first."""
        return tuple(name for functions in self.functions for name in functions)

    @property
    def width(self) -> int:
        """P, the length of a row [N_X, N_Y, 1]."""
        return sum(basis.rank for basis in self.bases) + 1

    def cost(self, extent: Extent) -> Cost:
        """A product of P x P per function, and the solves of the bases."""
        partial = _WORD * self.n_folds * len(self.names) * self.width**2
        block = (3 * self.width + 2 * extent.n_columns + len(self.names)) * sub_block(self.width)
        return Cost(
            flops=2 * len(self.names) * self.width**2 + sum(b.rank**2 for b in self.bases),
            state=_WORD * (block + self.width**2) + partial,
            partial=partial,
            subject=f"rank {' + '.join(str(basis.rank) for basis in self.bases)}",
            remedies=("lower the rank of the bases",),
        )

    def start(self, like: Array) -> tuple[Any, ...]:
        """The rows [N_X, N_Y, 1] of a sub-block as columns, evaluators, memory for the rows."""
        xp, length = array_namespace(like), sub_block(self.width)
        buffer = xp.ones((self.width, length), dtype=xp.float64, device=device(like))
        evaluators = [basis.evaluator(like) for basis in self.bases]
        return buffer, evaluators, [Scratch() for _ in self.bases]

    def update(self, state: tuple[Any, ...], strip: Strip) -> Sums:
        """Sums over one strip: Gram matrices (F, q, P, P), and weights (F,)."""
        buffer, evaluators, taken = state
        xp, where = array_namespace(buffer), {"dtype": buffer.dtype, "device": device(buffer)}
        grams = xp.zeros((self.n_folds, len(self.names), self.width, self.width), **where)
        totals = xp.zeros(self.n_folds, **where)
        for near, weight, spans in by_fold(strip, self.n_folds, buffer.shape[1], taken):
            weight = xp.ones(near[0].shape[0], **where) if weight is None else weight
            values = [
                column[:, 0] * weight
                for functions, part in zip(self.functions, near, strict=False)
                for column in function_values(part, functions)
            ]
            rows, low = buffer[:, : near[0].shape[0]], 0
            for basis, evaluator, part in zip(self.bases, evaluators, near, strict=True):
                evaluator(part, rows[low : low + basis.rank, :])
                low += basis.rank
            for fold, own in spans:
                totals[fold] += xp.sum(weight[own])
                for i, value in enumerate(values):
                    grams[fold, i, ...] += (rows[:, own] * value[None, own]) @ rows[:, own].T
        return grams, totals

    def combine(self, a: Sums, b: Sums) -> Sums:
        """Sums over both."""
        return a[0] + b[0], a[1] + b[1]

    def finalize(self, total: Sums) -> WeightedMeans:
        """Means by the name of each function.

        Raises
        ------
        DataError
            If all weights are zero.
        """
        grams, weights = total
        if not float(weights.sum()) > 0.0:
            raise ZeroWeights()
        return WeightedMeans(self.names, tuple(basis.rank for basis in self.bases), grams, weights)
