"""Moments of both bases, of the columns and of declared functions, over a strip of rows.

One rank-k update of the augmented rows ``[N_X, N_Y, 1, f]`` holds every moment there is: S_XX,
S_YY, S_YX, the means, E[psi f] and E[f f^T]. Sums add over strips, so one pass makes them all.
They are held as columns, ``[N_X, N_Y, 1, f]^T``: then each part is contiguous.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from array_api_compat import array_namespace, device

from cme_dask.errors import DataError
from cme_dask.kernels.into import (
    into,
    mirror_upper,
)
from cme_dask.numerics.basis import Basis
from cme_dask.numerics.elimination import Elimination
from cme_dask.numerics.shown import brief_repr
from cme_dask.numerics.thresholds import Judges

Array = Any
Function = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class Side:
    """One variable's part of the augmented rows.

    Parameters
    ----------
    basis
        Newton basis of the variable, or a partition of unity.
    columns
        Names of its columns, d of them: their values are functions like any other.
    functions
        Declared functions by name; each takes the rows (n, d) and returns (n,).
    shift
        A value near the mean of each column, function and event, shape (q,), subtracted before
        squaring.
    elimination
        How far the basis is solved for before its products are summed; default wholly.
    events
        Events that a tuning is judged by, after the functions and without names.
    """

    basis: Basis
    columns: tuple[str, ...]
    functions: dict[str, Function] = field(default_factory=dict)
    shift: Array | None = None
    elimination: Elimination | None = None
    events: Judges | None = None

    __repr__ = brief_repr

    @property
    def eliminated(self) -> Elimination:
        """The elimination, or the default one."""
        return self.elimination or Elimination.whole(self.basis.rank)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the q = d + (declared) functions."""
        return (*self.columns, *self.functions)

    @property
    def count(self) -> int:
        """Number of functions, named ones and events."""
        return len(self.names) + (0 if self.events is None else len(self.events))

    def values(self, rows: Array) -> Array:
        """Columns, declared functions and events at the rows, shape (n, q), without the shift.

        Raises
        ------
        DataError
            If a function returns the wrong shape or a value that is not finite.
        """
        return array_namespace(rows).concat(list(self._functions(rows)), axis=1)

    def write_values(self, rows: Array, out: Array) -> None:
        """The same less the shift, a function a row, shape (q, n)."""
        xp, start = array_namespace(rows), 0
        for part in self._functions(rows):
            out[start : start + part.shape[1], :] = part.T
            start += part.shape[1]
        if self.shift is not None:
            shift = xp.asarray(self.shift, device=device(rows))
            into(xp, out, "subtract", out, shift[:, None])

    def same_functions(self, other: "Side") -> bool:
        """Whether columns, functions, events and shift are those of another side."""
        same = self.events is other.events or self.events == other.events
        same = same and self.columns == other.columns and self.functions == other.functions
        if self.shift is None or other.shift is None:
            return same and self.shift is other.shift
        return same and np.array_equal(self.shift, other.shift)

    def _functions(self, rows: Array) -> Iterator[Array]:
        yield rows
        yield from function_values(rows, self.functions)
        if self.events is not None:
            yield self.events(rows)


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

    __repr__ = brief_repr

    def __add__(self, other: "Moments") -> "Moments":
        """Moments of the union of two disjoint sets of rows."""
        return Moments(
            self.gram + other.gram,
            self.traces + other.traces,
            self.rows + other.rows,
        )

    def __iadd__(self, other: "Moments") -> Self:
        """The same in the memory of the left one."""
        for mine, theirs in zip(self._sums, other._sums, strict=True):
            mine += theirs
        return self

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
    """What a pass computes: one or two sides (x first, then y) and the number of folds.

    ``single``: products of basis functions with each other in float32, their sums over sub-blocks
    in float64; means and functions stay float64.
    """

    sides: tuple[Side, ...]
    n_folds: int = 1
    single: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of pivots, a number per side."""
        return tuple(side.basis.rank for side in self.sides)

    @property
    def width(self) -> int:
        """P, the length of an augmented row."""
        return sum(self.ranks) + 1 + sum(side.count for side in self.sides)

    @property
    def beside(self) -> int:
        """How many of its numbers are none of the bases."""
        return self.width - sum(self.ranks)

    @property
    def flops(self) -> int:
        """Operations per row: eliminations and one rank-k update (sections aside)."""
        return self.width**2 + sum(side.eliminated.flops for side in self.sides)

    def newton(self, moments: Moments) -> Moments:
        """Moments in the Newton bases, in place, from sums over strips.

        Of these the upper triangles count, and bases may not be solved for yet.
        """
        for gram in moments.gram:
            mirror_upper(gram)
        start = 0
        for side in self.sides:
            stop = start + side.basis.rank
            for gram in moments.gram if not side.eliminated.solved else ():
                side.eliminated.finish(side.basis.factor, gram[start:stop])
                side.eliminated.finish(side.basis.factor, gram.T[start:stop])
            start = stop
        return moments


def function_values(rows: Array, functions: Mapping[str, Function]) -> Iterator[Array]:
    """Values of each function at the rows, shapes (n, 1), one after the other.

    Raises
    ------
    DataError
        If one fails, or returns the wrong shape or a value that is not finite.
    """
    xp = array_namespace(rows)
    for name, function in functions.items():
        part = _called(name, function, rows)
        if part.shape != (rows.shape[0],):
            raise DataError(
                f"function {name!r} must return shape ({rows.shape[0]},) for rows of shape "
                f"{tuple(rows.shape)}, it returned {tuple(part.shape)}"
            )
        if not bool(xp.all(xp.isfinite(part))):
            raise DataError(f"function {name!r} returned NaN or infinity")
        yield part[:, None]


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
