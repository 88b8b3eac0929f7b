"""Moments of both bases, of the columns and of declared functions, over a strip of rows.

One rank-k update of the augmented rows ``[N_X, N_Y, 1, f]`` holds every moment there is: S_XX,
S_YY, S_YX, the means, E[psi f] and E[f f^T]. Sums add over strips, so one pass makes them all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from cme_dask.errors import DataError
from cme_dask.numerics.basis import NewtonBasis

Array = Any
Function = Callable[[Array], Array]

SUB_BLOCK = 2048
"""Rows whose kernel block is held at once: it stays in cache, and chunks may be of any size."""


@dataclass(frozen=True, eq=False)
class Side:
    """One variable's part of the augmented rows.

    Parameters
    ----------
    basis
        Newton basis of the variable.
    columns
        Names of its columns, d of them: their values are functions like any other.
    functions
        Declared functions by name; each takes the rows (n, d) and returns (n,).
    shift
        A value near the mean of each column and function, shape (q,), subtracted before squaring.
    """

    basis: NewtonBasis
    columns: tuple[str, ...]
    functions: dict[str, Function] = field(default_factory=dict)
    shift: Array | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the q = d + (declared) functions."""
        return (*self.columns, *self.functions)

    def values(self, rows: Array) -> Array:
        """Columns and declared functions at the rows, shape (n, q), without the shift.

        Raises
        ------
        DataError
            If a function returns the wrong shape or a value that is not finite.
        """
        xp = array_namespace(rows)
        parts = [rows]
        for name, function in self.functions.items():
            part = _called(name, function, rows)
            if part.shape != (rows.shape[0],):
                raise DataError(
                    f"function {name!r} must return shape ({rows.shape[0]},) for rows of shape "
                    f"{tuple(rows.shape)}, it returned {tuple(part.shape)}"
                )
            if not bool(xp.all(xp.isfinite(part))):
                raise DataError(f"function {name!r} returned NaN or infinity")
            parts.append(part[:, None])
        return xp.concat(parts, axis=1)


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over rows, one slice per fold; they add, strip by strip.

    Attributes
    ----------
    gram
        sum_i w_i a_i a_i^T of the augmented rows a = [N_X, N_Y, 1, f - shift], shape (F, P, P).
    traces
        sum_i w_i k(x_i, x_i), a column per side, shape (F, sides).
    rows
        Number of rows, shape (F,), integers.
    """

    gram: Array
    traces: Array
    rows: Array

    def __add__(self, other: "Moments") -> "Moments":
        """Moments of the union of two disjoint sets of rows."""
        return Moments(
            self.gram + other.gram,
            self.traces + other.traces,
            self.rows + other.rows,
        )

    @property
    def n_folds(self) -> int:
        """Number of folds F."""
        return int(self.gram.shape[0])

    @property
    def n_rows(self) -> int:
        """Number of rows in all folds."""
        return int(self.rows.sum())

    def only(self, folds: Array) -> "Moments":
        """Sum over the given folds, as moments of a single fold."""
        pick = np.asarray(folds)
        gram = np.zeros((1, *self.gram.shape[1:]))
        for fold in pick:  # one after the other: no copy of all of them
            gram += self.gram[fold]
        return Moments(
            gram,
            self.traces[pick].sum(axis=0, keepdims=True),
            self.rows[pick].sum(keepdims=True),
        )

    def total(self) -> "Moments":
        """Sum over all folds."""
        return self.only(np.arange(self.n_folds))

    def without(self, fold: int) -> "Moments":
        """Sum over all folds but one."""
        return self.only(np.delete(np.arange(self.n_folds), fold))

    def to_arrays(self) -> dict[str, Array]:
        """Plain arrays to store; of each symmetric Gram matrix the lower triangle."""
        lower = np.tril_indices(self.gram.shape[1])
        return {
            "gram": np.ascontiguousarray(self.gram[:, lower[0], lower[1]]),
            "traces": self.traces,
            "rows": self.rows,
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array]) -> "Moments":
        """Inverse of :meth:`to_arrays`."""
        packed = arrays["gram"]
        size = int((np.sqrt(8 * packed.shape[1] + 1) - 1) // 2)
        lower = np.tril_indices(size)
        gram = np.empty((packed.shape[0], size, size))
        gram[:, lower[0], lower[1]] = packed
        gram[:, lower[1], lower[0]] = packed
        return cls(gram, arrays["traces"], arrays["rows"])


@dataclass(frozen=True, eq=False)
class MomentSpec:
    """What a pass computes: one or two sides (x first, then y) and the number of folds."""

    sides: tuple[Side, ...]
    n_folds: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of pivots, a number per side."""
        return tuple(side.basis.rank for side in self.sides)

    @property
    def width(self) -> int:
        """P, the length of an augmented row."""
        return sum(self.ranks) + 1 + sum(len(side.names) for side in self.sides)

    def strip(self, parts: tuple[Array, ...], weights: Array | None, folds: Array) -> Moments:
        """Moments of one strip of rows.

        Parameters
        ----------
        parts
            Rows of each side, shapes (n, d).
        weights
            Shape (n,), or None for ones.
        folds
            Fold number of each row, shape (n,).
        """
        xp = array_namespace(*parts)
        gram = np.zeros((self.n_folds, self.width, self.width))
        traces = np.zeros((self.n_folds, len(self.sides)))
        order = np.argsort(folds, kind="stable")
        for start in range(0, len(order), SUB_BLOCK):
            here = order[start : start + SUB_BLOCK]
            index = xp.asarray(here)
            taken = tuple(xp.take(part, index, axis=0) for part in parts)
            rows = self.augmented(taken)
            diagonals = [
                side.basis.kernel.diagonal(part)
                for side, part in zip(self.sides, taken, strict=True)
            ]
            if weights is not None:
                weight = xp.take(weights, index)
                rows *= xp.sqrt(weight)[:, None]
                diagonals = [weight * diagonal for diagonal in diagonals]
            for fold, part in _folds_within(folds[here], self.n_folds):
                block = rows[part, :]
                gram[fold] += np.asarray(block.T @ block)
                traces[fold] += [float(xp.sum(diagonal[part])) for diagonal in diagonals]
        counts = np.bincount(folds, minlength=self.n_folds).astype(np.int64)
        return Moments(gram, traces, counts)

    def augmented(self, parts: tuple[Array, ...]) -> Array:
        """Augmented rows [N_X, N_Y, 1, f_X - shift, f_Y - shift], shape (n, P)."""
        xp = array_namespace(*parts)
        pairs = list(zip(self.sides, parts, strict=True))
        newton = [side.basis(part) for side, part in pairs]
        ones = xp.ones((parts[0].shape[0], 1), dtype=xp.float64)
        values = [
            side.values(part) - (0.0 if side.shift is None else xp.asarray(side.shift))
            for side, part in pairs
        ]
        return xp.concat([*newton, ones, *values], axis=1)


def _called(name: str, function: Function, rows: Array) -> Array:
    """Values of a user's function, which gets a copy of the rows to do with as it likes."""
    xp = array_namespace(rows)
    try:
        values = xp.asarray(function(xp.asarray(rows, copy=True)))
    except Exception as error:
        raise DataError(f"function {name!r} failed: {type(error).__name__}: {error}") from error
    if not xp.isdtype(values.dtype, ("bool", "integral", "real floating")):
        raise DataError(f"function {name!r} must return numbers, it returned {values.dtype}")
    return xp.astype(values, xp.float64)


def _folds_within(sorted_folds: Array, n_folds: int) -> Iterator[tuple[int, slice]]:
    """Each fold that occurs, with the slice of its rows."""
    edges = np.searchsorted(sorted_folds, np.arange(n_folds + 1))
    for fold in range(n_folds):
        if edges[fold] < edges[fold + 1]:
            yield fold, slice(int(edges[fold]), int(edges[fold + 1]))


@dataclass(frozen=True, eq=False)
class MeanMoments:
    """Weighted means in the Newton bases: S_XX, S_YY, S_YX, c_X, c_Y, E[N f], E f.

    Attributes
    ----------
    weight
        Sum of the weights.
    gram
        S of each side, shapes (m, m).
    cross
        S_YX = E[N_Y N_X^T], shape (m_Y, m_X); None for one side.
    mean
        c of each side, shapes (m,).
    trace
        E k(x, x) of each side.
    function_mean
        E f of each side's columns and functions, shift added back, shapes (q,).
    function_cross
        ``function_cross[s][t]`` = E[N_s (f_t - shift_t)^T], shape (m_s, q_t).
    function_gram
        E[(f - shift)(f - shift)^T] over the functions of all sides, shape (q, q).
    """

    weight: float
    gram: tuple[Array, ...]
    cross: Array | None
    mean: tuple[Array, ...]
    trace: tuple[float, ...]
    function_mean: tuple[Array, ...]
    function_cross: tuple[tuple[Array, ...], ...]
    function_gram: Array
    shift: tuple[Array, ...]

    @property
    def trace_error(self) -> tuple[float, ...]:
        """Relative trace error tau = trace(K - L L^T) / trace(K) of each side, over the rows."""
        pairs = zip(self.trace, self.gram, strict=True)
        return tuple(max(t - float(np.trace(s)), 0.0) / t for t, s in pairs)

    @classmethod
    def of(cls, moments: Moments, sides: tuple[Side, ...]) -> "MeanMoments":
        """Means of moments that hold a single fold (see :meth:`Moments.total`)."""
        ranks = [side.basis.rank for side in sides]
        counts = [len(side.names) for side in sides]
        shifts = tuple(
            np.zeros(q) if side.shift is None else np.asarray(side.shift)
            for side, q in zip(sides, counts, strict=True)
        )
        edges = np.cumsum([0, *ranks, 1, *counts])
        basis = [slice(edges[i], edges[i + 1]) for i in range(len(sides))]
        one = int(edges[len(sides)])
        fun = [
            slice(edges[len(sides) + 1 + i], edges[len(sides) + 2 + i]) for i in range(len(sides))
        ]
        weight = float(moments.gram[0, one, one])
        gram = moments.gram[0] / weight
        return cls(
            weight=weight,
            gram=tuple(gram[b, b] for b in basis),
            cross=gram[basis[1], basis[0]] if len(sides) == 2 else None,
            mean=tuple(gram[b, one] for b in basis),
            trace=tuple(float(t) for t in moments.traces[0] / weight),
            function_mean=tuple(s + gram[f, one] for s, f in zip(shifts, fun, strict=True)),
            function_cross=tuple(tuple(gram[b, f] for f in fun) for b in basis),
            function_gram=gram[one + 1 :, one + 1 :],
            shift=shifts,
        )
