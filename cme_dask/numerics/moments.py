"""The sums of a pass over rows of which moments are made: what is summed, and how.

One rank-k update of the augmented rows ``[N_X, N_Y, 1, f]`` holds every moment there is: S_XX,
S_YY, S_YX, the means, E[psi f] and E[f f^T]. Sums add over strips, so one pass makes them all.
They are held as columns, ``[N_X, N_Y, 1, f]^T``: then each part is contiguous. Their blocks have
names in :mod:`cme_dask.numerics.blocks`.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array

from cme_dask.display import brief_repr
from cme_dask.errors import DataError, option, remedy
from cme_dask.kernels.evaluator import (
    Scratch,
    add_product,
    add_rank_update,
    cast_into,
    in_place,
    mirror_upper,
    rank_update,
    take_into,
)
from cme_dask.numerics.basis import Basis, BlockSolve, without_copies
from cme_dask.numerics.blocks import MomentSums
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip, to_host
from cme_dask.numerics.scoring import ScoringFunctions

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
    elimination: BlockSolve | None = None
    events: ScoringFunctions | None = None

    __repr__ = brief_repr

    @property
    def eliminated(self) -> BlockSolve:
        """The elimination, or the default one."""
        return self.elimination or BlockSolve.whole(self.basis.rank)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the q = d + (declared) functions."""
        return (*self.columns, *self.functions)

    @property
    def count(self) -> int:
        """Number of functions, named ones and events."""
        return len(self.names) + (0 if self.events is None else len(self.events))

    @property
    def offsets(self) -> Array:
        """The shift, or zeros, shape (q,)."""
        return np.zeros(self.count) if self.shift is None else np.asarray(self.shift)

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
            in_place(out).subtract(out, shift[:, None], out=out)

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
    def shifts(self) -> tuple[Array, ...]:
        """What is subtracted from the functions of each side, shapes (q,)."""
        return tuple(side.offsets for side in self.sides)

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

    def newton(self, moments: MomentSums) -> MomentSums:
        """Moments in the Newton bases, in place, from sums over strips.

        Of these the upper triangles count, and bases may not be solved for yet.
        """
        for gram in moments.gram:
            mirror_upper(gram)
        places = moments.positions
        for name, side in zip("xy", self.sides, strict=False):
            for gram in moments.gram if not side.eliminated.solved else ():
                side.eliminated.finish(side.basis.factor, gram[places[name]])
                side.eliminated.finish(side.basis.factor, gram.T[places[name]])
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


# Moments of one strip of rows after the other


_WORD = 8
_CACHE = 7 << 19  # bytes of augmented rows that are held at once
_LONGEST = 1 << 12  # rows of a sub-block
_BLOCKS = 16  # sub-blocks prepared at once: what is done for each takes the interpreter lock
_BESIDE = 1 << 18  # numbers beside the bases that are prepared at once, at most


def sub_block(width: int) -> int:
    """Rows of ``width`` numbers held at once: they stay in cache, and chunks may be of any size.

    A power of two from 2^9 to ``_LONGEST``; on longer ones kernel and products wait for memory, on
    shorter ones for each other.
    """
    return min(1 << max((_CACHE // (8 * width)).bit_length() - 1, 9), _LONGEST)


def span(width: int, beside: int) -> int:
    """Rows whose coordinates, functions and folds are prepared at once.

    Several sub-blocks, unless that is too much memory: of ``width`` numbers a row ``beside`` are
    none of the bases.
    """
    block = sub_block(width)
    return block * min(max(_BESIDE // (beside * block), 1), _BLOCKS)


def most_spanned(beside: int) -> int:
    """The most that ``span`` is at any width."""
    return min(max(_BESIDE // beside, _LONGEST), _BLOCKS * _LONGEST)


def strip_moments(
    spec: MomentSpec, parts: tuple[Array, ...], weights: Array | None, folds: Array
) -> MomentSums:
    """Moments of one strip of rows alone, see :class:`StripMoments`."""
    (moments,) = StripMoments([spec], parts[0])(parts, weights, folds)
    return spec.newton(to_host(moments))


class StripMoments:
    """The loop over one strip after the other, with the memory that it keeps.

    Several sets of moments share what is done to the rows before their kernels: their order by
    folds, their coordinates, and the values of equal functions.

    Parameters
    ----------
    specs
        What to compute, with the same number of folds.
    like
        An array of the library and on the device of the rows.
    """

    def __init__(self, specs: Sequence[MomentSpec], like: Array) -> None:
        self._xp, self._device = array_namespace(like), device(like)
        self._n_folds = specs[0].n_folds
        self._span = min(span(spec.width, spec.beside) for spec in specs)
        self._maps = [
            {c: c and c.prepare(self._xp, like) for c in (one.basis.coordinates for one in sides)}
            for sides in zip(*(spec.sides for spec in specs), strict=True)
        ]
        self._functions: list[tuple[MomentSpec, Scratch]] = []  # sets with functions of their own
        self._sums = [_BlockSums(spec, like) for spec in specs]
        self._of_functions = [self._shared(spec) for spec in specs]
        self._taken = [Scratch() for _ in specs[0].sides]

    def _shared(self, spec: MomentSpec) -> int:
        """The number of the functions that are those of this set."""
        for number, (other, _) in enumerate(self._functions):
            if all(map(Side.same_functions, other.sides, spec.sides)):
                return number
        self._functions.append((spec, Scratch()))
        return len(self._functions) - 1

    @without_copies()
    def __call__(
        self, parts: tuple[Array, ...], weights: Array | None, folds: Array
    ) -> tuple[MomentSums, ...]:
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
        xp, n_folds = self._xp, self._n_folds
        counts = np.bincount(folds, minlength=n_folds).astype(np.int64)
        made = tuple(one.zeros(counts.copy()) for one in self._sums)
        order = None if n_folds == 1 else np.argsort(folds, kind="stable")
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
            self._add_span(made, taken, weight, edges.tolist())
        return made

    def _add_span(
        self,
        made: tuple[MomentSums, ...],
        parts: tuple[Array, ...],
        weights: Array | None,
        edges: list[int],
    ) -> None:
        """Sums over rows that lie fold by fold, with these edges."""
        mapped = [
            {c: part if map_rows is None else map_rows(part) for c, map_rows in maps.items()}
            for part, maps in zip(parts, self._maps, strict=True)
        ]
        roots = None if weights is None else self._xp.sqrt(weights)[None, :]
        values = [self._values(spec, held, parts) for spec, held in self._functions]
        for one, moments, number in zip(self._sums, made, self._of_functions, strict=True):
            rows = one.in_coordinates(mapped)
            one.add(moments.gram, rows, values[number], roots, edges)
            one.add_traces(moments.traces, rows, weights, edges)

    def _values(self, spec: MomentSpec, held: Scratch, parts: tuple[Array, ...]) -> Array:
        """The rows 1, f_X - shift, f_Y - shift, shape (P - sum m, n), good until the next call."""
        xp = self._xp
        like = xp.empty(0, dtype=xp.float64, device=self._device)
        rows, start = held.shaped(xp, (spec.beside, parts[0].shape[0]), like), 1
        rows[0, :] = 1.0
        for side, part in zip(spec.sides, parts, strict=True):
            side.write_values(part, rows[start : start + side.count, :])
            start += side.count
        return rows

    def _take(self, scratch: Scratch, part: Array, index: Array) -> Array:
        """Rows of a part at these places."""
        out = scratch.shaped(self._xp, (index.shape[0], part.shape[1]), part)
        take_into(self._xp, out, part, index)
        return out


class _BlockSums:
    """One set of moments: the augmented rows of a sub-block, and their products."""

    def __init__(self, spec: MomentSpec, like: Array) -> None:
        self._spec = spec
        self._xp, self._device = array_namespace(like), device(like)
        self._block, self._ops = sub_block(spec.width), in_place(like)
        self._bases = [side.basis.in_coordinates() for side in spec.sides]
        self._evaluators = [
            basis.evaluator(side.eliminated, like)
            for side, basis in zip(spec.sides, self._bases, strict=True)
        ]
        xp, rank = self._xp, sum(spec.ranks)
        self._rows = self._empty((spec.width, self._block), xp.float64)
        if spec.single:
            self._rows32 = self._empty((rank, self._block), xp.float32)
            self._product32 = self._empty((rank, rank), xp.float32)
            self._rest = self._empty((spec.width - rank, spec.width), xp.float64)
        self._scratch = Scratch()

    def zeros(self, counts: Array) -> MomentSums:
        """Sums over no rows, to which those of so many rows of each fold will be added."""
        spec, xp = self._spec, self._xp
        of, f = {"dtype": xp.float64, "device": self._device}, spec.n_folds
        gram = xp.zeros((f, spec.width, spec.width), **of)
        traces = xp.zeros((f, len(spec.sides)), **of)
        return MomentSums(gram, traces, counts, spec.ranks, spec.shifts)

    def in_coordinates(self, mapped: Sequence[Mapping[Any, Array]]) -> tuple[Array, ...]:
        """The rows of each side in the coordinates of its basis."""
        return tuple(
            rows[side.basis.coordinates]
            for side, rows in zip(self._spec.sides, mapped, strict=True)
        )

    def add(
        self,
        gram: Array,
        parts: tuple[Array, ...],
        functions: Array,
        roots: Array | None,
        edges: list[int],
    ) -> None:
        """Add the products of rows that lie fold by fold, with these edges."""
        spec, rank = self._spec, sum(self._spec.ranks)
        # Not kept: a bound method in its own object is a cycle, which holds the memory for long.
        update = self._single_update if spec.single else self._rank_update
        for one, part in zip(self._evaluators, parts, strict=True):
            one.load(part)
        for start in range(0, edges[-1], self._block):
            stop = min(start + self._block, edges[-1])
            here, rows, low = slice(start, stop), self._rows[:, : stop - start], 0
            for one, m in zip(self._evaluators, spec.ranks, strict=True):
                one.write(here, rows[low : low + m, :])
                low += m
            rows[rank:, :] = functions[:, here]
            if roots is not None:
                self._ops.multiply(rows, roots[:, here], out=rows)
            for number, fold in _folds_within(edges, start, stop):
                update(gram[number, ...], rows[:, fold])

    def add_traces(
        self, traces: Array, parts: tuple[Array, ...], weights: Array | None, edges: list[int]
    ) -> None:
        """Add the sums of k(z, z)."""
        result = list(_folds_within(edges, 0, edges[-1]))
        numbers, firsts = [number for number, _ in result], [fold.start for _, fold in result]
        for i, (basis, part) in enumerate(zip(self._bases, parts, strict=True)):
            diagonal = basis.kernel.diagonal(part)
            if weights is not None:
                diagonal = weights * diagonal
            if is_numpy_array(diagonal):
                traces[numbers, i] += np.add.reduceat(diagonal, firsts)
                continue
            for number, fold in result:
                traces[number, i] += self._xp.sum(diagonal[fold])

    def _rank_update(self, gram: Array, rows: Array) -> None:
        add_rank_update(self._xp, gram, rows, self._scratch)

    def _single_update(self, gram: Array, rows: Array) -> None:
        rank = self._rows32.shape[0]
        rows32 = self._rows32[:, : rows.shape[1]]
        cast_into(self._xp, rows32, rows[:rank, :])
        rank_update(self._xp, self._product32, rows32)
        rest = self._rest
        self._ops.matmul(rows[rank:, :], rows.T, out=rest)
        add_product(self._xp, gram[:rank, :rank], self._product32)
        gram[rank:, :] += rest
        gram[:rank, rank:] += rest[:, :rank].T

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._xp.empty(shape, dtype=dtype, device=self._device)


def _folds_within(edges: list[int], start: int, stop: int) -> Iterator[tuple[int, slice]]:
    """Each fold with rows in [start, stop), and these, counted from ``start``."""
    for fold, (low, high) in enumerate(pairwise(edges)):
        if max(low, start) < min(high, stop):
            yield fold, slice(max(low, start) - start, min(high, stop) - start)


# The reduction: the moments of all rows


Sums = tuple[MomentSums, ...]


@dataclass(frozen=True, eq=False)
class MomentReduction(Reduction[Sums, Sums]):
    """One or several sets of moments of the same rows.

    Parameters
    ----------
    specs
        What to compute, with the same number of folds.
    """

    specs: tuple[MomentSpec, ...]
    name = "strip-moments"
    kinds = (MomentSums,)

    @property
    def n_folds(self) -> int:  # type: ignore[override]
        """Number of folds F."""
        return self.specs[0].n_folds

    def cost(self, extent: Extent) -> Cost:
        """See :func:`moment_cost`."""
        return moment_cost(joint_ranks(self.specs), joint_width(self.specs), self.n_folds, extent)

    def start(self, like: Array) -> StripMoments:
        """The loop over strips, with its buffers where the rows are."""
        return StripMoments(self.specs, like)

    def update(self, state: StripMoments, strip: Strip) -> Sums:
        """Sums over one strip."""
        return state(strip.parts, strip.weights, strip.folds(self.n_folds))

    def combine(self, a: Sums, b: Sums) -> Sums:
        """Sums over both."""
        return tuple(map(operator.add, a, b))

    def accumulate(self, a: Sums, b: Sums) -> Sums:
        """The same in the memory of ``a``."""
        return tuple(map(operator.iadd, a, b))

    def finalize(self, total: Sums) -> Sums:
        """Moments in the Newton bases.

        Raises
        ------
        DataError
            If the sums overflow, or all weights are zero.
        """
        for spec, moments in zip(self.specs, total, strict=True):
            whole = moments.total()
            if not (np.isfinite(whole.gram).all() and np.isfinite(moments.traces).all()):
                raise DataError(
                    "sums over the rows overflow: give columns, weights and functions in units "
                    "that make their values smaller"
                )
            if not float(whole.weights[0]) >= np.finfo(np.float64).tiny:
                raise DataError("all weights are zero: at least one row needs a positive weight")
            spec.newton(moments)
        return total


def joint_ranks(specs: Sequence[MomentSpec]) -> tuple[int, ...]:
    """Numbers of pivots, a number per side of each set."""
    return sum((spec.ranks for spec in specs), ())


def joint_width(specs: Sequence[MomentSpec]) -> int:
    """The width of one set of moments that takes as much as all of these."""
    return math.isqrt(sum(spec.width**2 for spec in specs) - 1) + 1


def moment_cost(ranks: tuple[int, ...], width: int, n_folds: int, extent: Extent) -> Cost:
    """What moments of these ranks and of this width P take, F Gram matrices P x P.

    Parameters
    ----------
    ranks
        Numbers of pivots, a number per side of each set.
    width
        Of the augmented rows; of several sets that of :func:`joint_width`.
    n_folds
        Number of folds F.
    extent
        The rows.
    """
    d = extent.n_columns
    # A sub-block of P functions of each set of moments, what is on the way, and eliminations.
    block = (2 + -(-len(ranks) // 2)) * sub_block(width) * width + sum(m * m for m in ranks) // 2
    # Rows gathered, mapped and scaled for several sub-blocks, coordinates of each basis, and
    # functions; of several sets of moments, whose widths are unknown here, at least columns.
    beside = max(width - sum(ranks), d)
    prepared = 2 * beside + (3 + len(ranks)) * d
    block += prepared * min(most_spanned(beside), extent.strip_rows)
    remedies = [f"lower {option('max_rank')} or raise {option('tol')}"]
    if n_folds > 1:
        remedies.append(
            f"{remedy('n_folds=1', '--folds 1')} (partial sums {n_folds} times smaller, no "
            "standard errors)"
        )
    return Cost(
        flops=width**2 + 2 * width * d,
        state=block * _WORD,
        partial=n_folds * width**2 * _WORD,
        subject=f"rank {' + '.join(map(str, ranks))} with {n_folds} folds",
        remedies=tuple(remedies),
    )
