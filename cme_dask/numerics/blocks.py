"""Moments with named blocks: sums over rows by fold, and the weighted means that they give.

An augmented row a = [N_X, N_Y, 1, f_X - s_X, f_Y - s_Y] holds the basis functions N of each
variable, a one, and the columns and declared functions f of each variable less a shift s. The sums
of w a a^T hold every moment there is. Where a block lies is known in this file alone: elsewhere
blocks have names, "x" and "y" for the basis functions of a variable, "f(x)" and "f(y)" for its
functions and "1" for the one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self

import numpy as np

from cme_dask.display import brief_repr
from cme_dask.numerics.cholesky import non_negative

Array = Any


@dataclass(frozen=True, eq=False)
class MomentSums:
    """Sums over rows, one slice per fold; sums over disjoint sets of rows add.

    Attributes
    ----------
    gram
        sum_i w_i a_i a_i^T of the augmented rows a = [N_X, N_Y, 1, f - shift], shape (F, P, P).
    traces
        sum_i w_i k(x_i, x_i), a column per variable, shape (F, variables).
    rows
        Number of rows, shape (F,), integers.
    ranks
        Number of basis functions of each variable, x first.
    shifts
        What is subtracted from the functions of each variable, shapes (q,).
    """

    gram: Array
    traces: Array
    rows: Array
    ranks: tuple[int, ...]
    shifts: tuple[Array, ...]

    __repr__ = brief_repr

    def __add__(self, other: "MomentSums") -> Self:
        """Sums over the union of two disjoint sets of rows."""
        pairs = zip(self._sums, other._sums, strict=True)
        return replace(self, **dict(zip(_SUMS, (a + b for a, b in pairs), strict=True)))

    def __sub__(self, other: "MomentSums") -> Self:
        """Sums over the rows of the left one that the right one, of a part of them, lacks."""
        pairs = zip(self._sums, other._sums, strict=True)
        return replace(self, **dict(zip(_SUMS, (a - b for a, b in pairs), strict=True)))

    def __iadd__(self, other: "MomentSums") -> Self:
        """The sum, in the memory of the left one."""
        for mine, theirs in zip(self._sums, other._sums, strict=True):
            mine += theirs
        return self

    @property
    def positions(self) -> dict[str, slice]:
        """Positions in an augmented row of each block by its name."""
        variables = "xy"[: len(self.ranks)]
        names = [*variables, "1", *map("f({})".format, variables)]
        edges = np.cumsum([0, *self.ranks, 1, *map(len, self.shifts)]).tolist()
        return dict(zip(names, map(slice, edges[:-1], edges[1:]), strict=True))

    @property
    def _sums(self) -> tuple[Array, ...]:
        return self.gram, self.traces, self.rows

    @property
    def n_folds(self) -> int:
        """Number of folds F."""
        return int(self.gram.shape[0])

    @property
    def n_rows(self) -> int:
        """Number of rows in all folds."""
        return int(self.rows.sum())

    @property
    def weights(self) -> Array:
        """Sum of the weights of each fold, shape (F,)."""
        one = sum(self.ranks)
        return self.gram[:, one, one]

    def only(self, folds: Array) -> Self:
        """Sums over the rows of these folds, as those of a single fold."""
        pick = np.asarray(folds)
        gram = np.zeros((1, *self.gram.shape[1:]))
        for fold in pick:  # one after the other: no copy of all of them
            gram += self.gram[fold]
        traces = self.traces[pick].sum(axis=0, keepdims=True)
        return replace(self, gram=gram, traces=traces, rows=self.rows[pick].sum(keepdims=True))

    def total(self) -> Self:
        """Sums over the rows of all folds, as those of a single fold."""
        return self.only(np.arange(self.n_folds))

    def means(self, *, fold: int | None = None, without: int | None = None) -> "Moments":
        """Weighted means over all rows, over those of one fold, or over those of all folds but one.

        Parameters
        ----------
        fold
            The only fold whose rows count.
        without
            The fold whose rows are left out.
        """
        folds = np.arange(self.n_folds) if fold is None else np.array([fold])
        return Moments.of(self.only(folds if without is None else np.delete(folds, without)))

    def changed(self, changes: Mapping[str, Array], shifts: Sequence[Array]) -> Self:
        """Sums with other bases of the same functions and with other shifts.

        The rows a become T a: basis functions N become C N, and f - s becomes f - s'.

        Parameters
        ----------
        changes
            C of the variables whose basis changes, shapes (m, m).
        shifts
            s' of each variable, shapes (q,).
        """
        gram, places = self.gram.copy(), self.positions
        for name, change in changes.items():
            gram[:, places[name]] = change @ gram[:, places[name]]
            gram[:, :, places[name]] = gram[:, :, places[name]] @ change.T
        moved = np.concatenate(self.shifts) - np.concatenate(shifts)
        one = sum(self.ranks)
        rest = slice(one + 1, None)
        gram[:, rest] += moved[:, None] * gram[:, one : one + 1]
        gram[:, :, rest] += gram[:, :, one : one + 1] * moved
        return replace(self, gram=gram, shifts=tuple(shifts))

    def with_functions(self, count: int) -> Self:
        """Sums with the first ``count`` functions of the last variable only."""
        *first, last = self.shifts
        stop = self.gram.shape[1] - len(last) + count
        return replace(self, gram=self.gram[:, :stop, :stop], shifts=(*first, last[:count]))

    def to_arrays(self) -> dict[str, Array]:
        """Plain arrays to store; of each symmetric Gram matrix the lower triangle."""
        lower = np.tril_indices(self.gram.shape[1])
        return {
            "gram": np.ascontiguousarray(self.gram[:, lower[0], lower[1]]),
            "traces": self.traces,
            "rows": self.rows,
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Array], ranks: tuple[int, ...], shifts: tuple[Array, ...]
    ) -> Self:
        """Inverse of :meth:`to_arrays`."""
        packed, width = arrays["gram"], sum(ranks) + 1 + sum(map(len, shifts))
        lower = np.tril_indices(width)
        gram = np.empty((packed.shape[0], width, width))
        gram[:, lower[0], lower[1]] = packed
        gram[:, lower[1], lower[0]] = packed
        return cls(gram, arrays["traces"], arrays["rows"], ranks, shifts)


_SUMS = "gram", "traces", "rows"


@dataclass(frozen=True, eq=False)
class Moments:
    """Weighted means over rows in the bases of the variables, block by block.

    Methods take the names of the variables, ``"x"`` and ``"y"``.

    Parameters
    ----------
    weight
        Sum of the weights.
    blocks
        E[a b^T] by the names of two blocks a and b, such as ``("y", "x")`` or ``("x", "f(y)")``;
        of functions less their shift.
    traces
        E k(z, z) of each variable.
    shifts
        What is subtracted from the functions of each variable, shapes (q,).
    """

    weight: float
    blocks: Mapping[tuple[str, str], Array]
    traces: Mapping[str, float]
    shifts: Mapping[str, Array]

    __repr__ = brief_repr

    @classmethod
    def of(cls, sums: MomentSums, weight: float | None = None) -> Self:
        """Means from sums that hold a single fold (see :meth:`MomentSums.total`).

        ``weight`` is what sums are divided by; default their own sum of weights.
        """
        weight = float(sums.weights[0]) if weight is None else weight
        variables = "xy"[: len(sums.ranks)]
        gram, places = sums.gram[0] / weight, {**sums.positions, "1": sum(sums.ranks)}
        blocks = {}
        for a, b in product(places, repeat=2):
            blocks[a, b] = gram[places[a], places[b]]
        return cls(
            weight,
            blocks,
            dict(zip(variables, map(float, sums.traces[0] / weight), strict=True)),
            dict(zip(variables, sums.shifts, strict=True)),
        )

    def gram(self, variable: str) -> Array:
        """S = E[N N^T] of the basis functions N of a variable, shape (m, m)."""
        return self.blocks[variable, variable]

    def cross(self, left: str, right: str) -> Array:
        """E[N_left N_right^T], shape (m_left, m_right)."""
        return self.blocks[left, right]

    def mean(self, variable: str) -> Array:
        """C = E N of the basis functions of a variable, shape (m,)."""
        return self.blocks[variable, "1"]

    def functions(self, variable: str, of: str) -> Array:
        """E[N (f - shift)^T] of the basis functions of one variable and the functions of one."""
        return self.blocks[variable, f"f({of})"]

    def function_mean(self, variable: str) -> Array:
        """E f of the columns and functions of a variable, shape (q,), in their units."""
        return self.shifts[variable] + self.blocks[f"f({variable})", "1"]

    def function_offset(self, variable: str) -> Array:
        """E f - shift, shape (q,)."""
        return self.function_mean(variable) - self.shifts[variable]

    def function_gram(self, left: str, right: str) -> Array:
        """E[(f_left - shift)(f_right - shift)^T], shape (q_left, q_right)."""
        return self.blocks[f"f({left})", f"f({right})"]

    @property
    def trace_error(self) -> tuple[float, ...]:
        """Relative trace error tau = trace(K - L L^T) / trace(K) of each variable, over the rows.

        Raises
        ------
        NumericalError
            If it is below zero by more than rounding.
        """
        errors = np.array([(t - float(np.trace(self.gram(v)))) / t for v, t in self.traces.items()])
        non_negative(errors, 1.0)
        return tuple(errors.tolist())

    def squared_error(
        self,
        given: str,
        of: str,
        constant: Array,
        slope: Array,
        columns: slice = slice(None),
        trend: Array | None = None,
    ) -> Array:
        r"""Mean squared error of a linear prediction of functions, without the rows.

        .. math:: \mathrm E (a + N^T B + t^T T - f)^2, \quad t = (f_1, ..., f_d)

        with the basis functions N and the first functions t of one variable, and functions f of
        another one.

        Parameters
        ----------
        given, of
            The variable that predicts, and the one that is predicted.
        constant, slope
            a and B, shapes (q,) and (m, q).
        columns
            Positions of the q predicted functions among those of the variable.
        trend
            T, shape (d, q); default none.

        Returns
        -------
        error : (q,), at least 0
        """
        offset = constant - self.shifts[of][columns]
        mean = self.function_offset(of)[columns]
        square = np.diag(self.function_gram(of, of))[columns]
        cross = self.functions(given, of)[:, columns]
        model = (slope * (self.gram(given) @ slope)).sum(axis=0)
        if trend is not None:
            d = len(trend)
            offset = offset + self.shifts[given][:d] @ trend
            mean = mean - self.function_offset(given)[:d] @ trend
            left = self.functions(given, given)[:, :d] @ trend
            right = self.function_gram(given, of)[:d, columns]
            model = model + 2 * (slope * left).sum(axis=0) - 2 * (trend * right).sum(axis=0)
            model = model + (trend * (self.function_gram(given, given)[:d, :d] @ trend)).sum(axis=0)
        model = model + 2 * offset * (self.mean(given) @ slope)
        return np.maximum(
            offset**2 + model + square - 2 * offset * mean - 2 * (slope * cross).sum(axis=0), 0.0
        )
