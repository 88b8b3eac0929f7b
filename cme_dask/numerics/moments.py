"""Moments of both bases, of the columns and of declared functions, over a strip of rows.

One rank-k update of the augmented rows ``[N_X, N_Y, 1, f]`` holds every moment there is: S_XX,
S_YY, S_YX, the means, E[psi f] and E[f f^T]. Sums add over strips, so one pass makes them all.
They are held as columns, ``[N_X, N_Y, 1, f]^T``: then each part is contiguous.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any, Self

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array

from cme_dask.errors import DataError
from cme_dask.kernels.into import (
    Scratch,
    add_rank_update,
    cast_into,
    into,
    mirror_upper,
    rank_update,
    take_into,
    to_numpy,
)
from cme_dask.numerics.basis import Basis
from cme_dask.numerics.blocks import LINE, without_copies
from cme_dask.numerics.elimination import Elimination
from cme_dask.numerics.thresholds import Judges

Array = Any
Function = Callable[[Array], Array]

_CACHE = 7 << 19  # bytes of augmented rows that are held at once
_BLOCKS = 4  # sub-blocks prepared at once: what is done for each takes the interpreter lock
_BESIDE = 1 << 18  # numbers beside the bases that are prepared at once, at most


def sub_block(width: int) -> int:
    """Rows of ``width`` numbers held at once: they stay in cache, and chunks may be of any size.

    A power of two from 2^9 to 2^12; on longer ones kernel and products wait for memory, on shorter
    ones for each other.
    """
    return 1 << min(max((_CACHE // (8 * width)).bit_length() - 1, 9), 12)


def span(width: int, beside: int) -> int:
    """Rows whose coordinates, functions and folds are prepared at once.

    Several sub-blocks, unless that is too much memory: of ``width`` numbers a row ``beside`` are
    none of the bases.
    """
    block = sub_block(width)
    return block * min(max(_BESIDE // (beside * block), 1), _BLOCKS)


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

    def strip(self, parts: tuple[Array, ...], weights: Array | None, folds: Array) -> Moments:
        """Moments of one strip of rows, see :class:`StripMoments`."""
        return self.newton(StripMoments(self, parts[0])(parts, weights, folds))

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


class StripMoments:
    """The loop over one strip after the other, with the memory that it keeps.

    Parameters
    ----------
    spec
        What to compute.
    like
        An array of the library and on the device of the rows.
    """

    def __init__(self, spec: MomentSpec, like: Array) -> None:
        self._spec = spec
        self._xp = array_namespace(like)
        self._device = device(like)
        self._block = sub_block(spec.width)
        self._span = span(spec.width, spec.beside)
        self._sections = [side.basis.sections(side.eliminated, like) for side in spec.sides]
        xp, rank = self._xp, sum(spec.ranks)
        line = self._block + (LINE if is_numpy_array(like) else 0)  # others copy what has gaps
        self._rows = self._empty((spec.width, line), xp.float64)
        if spec.single:
            self._rows32 = self._empty((rank, line), xp.float32)
            self._product32 = self._empty((rank, rank), xp.float32)
            self._rest = self._empty((spec.width - rank, spec.width), xp.float64)
        self._scratch, self._functions = Scratch(), Scratch()
        self._taken = [Scratch() for _ in spec.sides]

    @without_copies()
    def __call__(self, parts: tuple[Array, ...], weights: Array | None, folds: Array) -> Moments:
        """Sums over one strip of rows, for :meth:`MomentSpec.newton` once they have been added up.

        Parameters
        ----------
        parts
            Rows of each side, shapes (n, d).
        weights
            Shape (n,), or None for ones.
        folds
            Fold number of each row, shape (n,).
        """
        xp, spec = self._xp, self._spec
        gram = np.zeros((spec.n_folds, spec.width, spec.width))
        traces = np.zeros((spec.n_folds, len(spec.sides)))
        counts = np.bincount(folds, minlength=spec.n_folds).astype(np.int64)
        order = None if spec.n_folds == 1 else np.argsort(folds, kind="stable")
        ends = np.cumsum(counts)  # of the folds, in this order
        for start in range(0, len(folds), self._span):
            here = slice(start, min(start + self._span, len(folds)))
            edges = np.clip([0, *ends], here.start, here.stop) - start
            if order is None:
                taken = tuple(part[here, :] for part in parts)
                weight = None if weights is None else weights[here]
            else:
                index = xp.asarray(order[here], device=self._device)
                taken = tuple(map(self._take, self._taken, parts, repeat(index)))
                weight = None if weights is None else xp.take(weights, index)
            self._add_span(gram, taken, weight, edges.tolist())
            self._add_traces(traces, taken, weight, edges.tolist())
        return Moments(gram, traces, counts)

    def _add_span(
        self, gram: Array, parts: tuple[Array, ...], weights: Array | None, edges: list[int]
    ) -> None:
        """Sums over rows that lie fold by fold, with these edges."""
        xp, spec, rank = self._xp, self._spec, sum(self._spec.ranks)
        # Not kept: a bound method in its own object is a cycle, which holds the memory for long.
        update = self._single_update if spec.single else self._rank_update
        writes = [one.prepare(part) for one, part in zip(self._sections, parts, strict=True)]
        rest = self._beside(parts)
        roots = None if weights is None else xp.sqrt(weights)[None, :]
        for start in range(0, edges[-1], self._block):
            stop = min(start + self._block, edges[-1])
            here, rows, low = slice(start, stop), self._rows[:, : stop - start], 0
            for write, m in zip(writes, spec.ranks, strict=True):
                write(here, rows[low : low + m, :])
                low += m
            rows[rank:, :] = rest[:, here]
            if roots is not None:
                into(xp, rows, "multiply", rows, roots[:, here])
            for number, fold in _folds_within(edges, start, stop):
                update(gram[number], rows[:, fold])

    def _beside(self, parts: tuple[Array, ...]) -> Array:
        """Rows 1, f_X - shift, f_Y - shift, shape (P - sum m, n)."""
        shape = self._spec.beside, parts[0].shape[0]
        rows, start = self._functions.shaped(self._xp, shape, self._rows), 1
        rows[0, :] = 1.0
        for side, part in zip(self._spec.sides, parts, strict=True):
            side.write_values(part, rows[start : start + side.count, :])
            start += side.count
        return rows

    def _take(self, scratch: Scratch, part: Array, index: Array) -> Array:
        """Rows of a part at these places."""
        out = scratch.shaped(self._xp, (index.shape[0], part.shape[1]), part)
        take_into(self._xp, out, part, index)
        return out

    def _add_traces(
        self, traces: Array, parts: tuple[Array, ...], weights: Array | None, edges: list[int]
    ) -> None:
        found = list(_folds_within(edges, 0, edges[-1]))
        numbers, firsts = [number for number, _ in found], [fold.start for _, fold in found]
        for i, (side, part) in enumerate(zip(self._spec.sides, parts, strict=True)):
            diagonal = side.basis.kernel.diagonal(part)
            if weights is not None:
                diagonal = weights * diagonal
            traces[numbers, i] += np.add.reduceat(to_numpy(diagonal), firsts)

    def _rank_update(self, gram: Array, rows: Array) -> None:
        add_rank_update(self._xp, gram, rows, self._scratch)

    def _single_update(self, gram: Array, rows: Array) -> None:
        rank = self._rows32.shape[0]
        rows32 = self._rows32[:, : rows.shape[1]]
        cast_into(self._xp, rows32, rows[:rank, :])
        rank_update(self._xp, self._product32, rows32)
        into(self._xp, self._rest, "matmul", rows[rank:, :], rows.T)
        rest = to_numpy(self._rest)
        gram[:rank, :rank] += to_numpy(self._product32)
        gram[rank:, :] += rest
        gram[:rank, rank:] += rest[:, :rank].T

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._xp.empty(shape, dtype=dtype, device=self._device)


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


def _folds_within(edges: list[int], start: int, stop: int) -> Iterator[tuple[int, slice]]:
    """Each fold with rows in [start, stop), and these, counted from ``start``."""
    for fold, (low, high) in enumerate(pairwise(edges)):
        if max(low, start) < min(high, stop):
            yield fold, slice(max(low, start) - start, min(high, stop) - start)
