"""Moments of features over all rows: the reduction that sums them, and their named blocks.

An augmented row a = [N_X, N_Y, 1, f_X - s_X, f_Y - s_Y] holds the basis functions N of each
variable, a one, and the columns and declared functions f of each variable less a shift s. One
rank-k update of the augmented rows gives the sums of w a a^T, which hold every moment there is:
S_XX, S_YY, S_YX, the means, E[psi f] and E[f f^T]. Sums add over strips, so one pass makes them
all. The rows are held as columns, ``[N_X, N_Y, 1, f]^T``: then each part is contiguous.

Where a block of the sums lies is known in this file alone: elsewhere blocks have names, "x" and "y"
for the basis functions of a variable, "f(x)" and "f(y)" for its functions.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Self

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array

from cme_dask.config import VARIABLES
from cme_dask.display import brief_repr
from cme_dask.errors import DataError, ZeroWeights, option, remedy
from cme_dask.kernels.evaluator import (
    Scratch,
    add_gram,
    add_product,
    add_rank_update,
    cast_into,
    in_place,
    rank_update,
)
from cme_dask.numerics.basis import Basis, BlockSolve, without_copies
from cme_dask.numerics.cholesky import non_negative
from cme_dask.numerics.devices import device_memory
from cme_dask.numerics.reduction import (
    LONGEST_BLOCK,
    Cost,
    Extent,
    Reduction,
    Result,
    Span,
    Strip,
    by_fold,
    sub_block,
    to_host,
)
from cme_dask.numerics.scoring import ScoringFunctions

Array = Any
Function = Callable[[Array], Array]

_LOWER_RANK = f"lower {option('max_rank')} or raise {option('tol')}"
_ONE_FOLD = remedy("n_folds=1", "--folds 1")
_WORD = 8
_SOLVE_WORDS = 12  # per entry of a P x P matrix: eigenbases, and what they are made from
_TRIAL_WORDS = 11  # likewise: sums of the safe form and of the two that are tried at once
_BLOCKS = 16  # sub-blocks prepared at once: what is done for each takes the interpreter lock
_BESIDE = 1 << 18  # numbers beside the bases that are prepared at once, at most


# Sums over rows by fold, and the weighted means that they give


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
        Number of rows of positive weight, shape (F,), integers.
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
    def _sums(self) -> tuple[Array, ...]:
        return self.gram, self.traces, self.rows

    @property
    def n_folds(self) -> int:
        """Number of folds F."""
        return len(self.gram)

    @property
    def n_rows(self) -> int:
        """Number of rows of positive weight in all folds."""
        return int(self.rows.sum())

    @property
    def weights(self) -> Array:
        """Sum of the weights of each fold, shape (F,)."""
        one = sum(self.ranks)
        return self.gram[:, one, one]

    def means(
        self,
        *,
        fold: int | None = None,
        without: int | tuple[int, ...] | None = None,
        weight: float | None = None,
    ) -> "Moments":
        """Weighted means over all rows, over those of one fold, or of all folds but some.

        Parameters
        ----------
        fold
            The only fold whose rows count.
        without
            The fold, or folds, whose rows are left out.
        weight
            What the sums are divided by, default the sum of the weights of the rows.
        """
        left = without if isinstance(without, tuple) else (without,)
        folds = [f for f in range(len(self.gram)) if f not in left and fold in (None, f)]
        gram = np.zeros(self.gram.shape[1:])
        for each in folds:  # one after the other: no copy of all of them
            gram += self.gram[each]
        one, variables = sum(self.ranks), VARIABLES[: len(self.ranks)]
        weight = float(gram[one, one]) if weight is None else weight
        gram /= weight
        traces = (self.traces[folds].sum(axis=0) / weight).tolist()
        # Blocks of an augmented row.
        functions = [f"f({variable})" for variable in variables]
        edges = np.cumsum([0, *self.ranks, 1, *map(len, self.shifts)]).tolist()
        names = [*variables, "1", *functions]
        places = dict(zip(names, map(slice, edges[:-1], edges[1:]), strict=True))
        del places["1"]
        return Moments(
            weight,
            {(a, b): gram[places[a], places[b]] for a, b in product(places, repeat=2)},
            {name: gram[place, one] for name, place in places.items()},
            dict(zip(variables, traces, strict=True)),
            dict(zip(variables, self.shifts, strict=True)),
        )

    @property
    def held_out_folds(self) -> list[int]:
        """Folds with some of the weight, of which there must be two: else none."""
        weights = self.weights
        usable = [f for f in range(len(weights)) if 0.0 < weights[f] < weights.sum()]
        return usable if len(usable) > 1 else []

    def split_folds(self) -> Iterator[tuple["Moments", "Moments"]]:
        """For each fold the means over the rows of the others, and over its own.

        Folds without rows, and folds that hold all the weight, are left out.
        """
        for fold in self.held_out_folds:
            yield self.means(without=fold), self.means(fold=fold)

    def coarser(self, n_folds: int) -> Self:
        """The same sums in at most so many folds, each of several of these."""
        if self.n_folds <= n_folds:
            return self
        gram, traces, rows = (
            np.stack([each[f::n_folds].sum(axis=0) for f in range(n_folds)]) for each in self._sums
        )
        return replace(self, gram=gram, traces=traces, rows=rows)

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
        gram, one, stop = self.gram.copy(), sum(self.ranks), 0
        for name, rank in zip(VARIABLES, self.ranks, strict=False):
            here = slice(stop, stop := stop + rank)
            if name in changes:
                gram[:, here] = changes[name] @ gram[:, here]
                gram[:, :, here] = gram[:, :, here] @ changes[name].T
        moved = np.concatenate(self.shifts) - np.concatenate(shifts)
        rest = slice(one + 1, None)
        gram[:, rest] += moved[:, None] * gram[:, one : one + 1]
        gram[:, :, rest] += gram[:, :, one : one + 1] * moved
        return replace(self, gram=gram, shifts=tuple(shifts))

    def to_arrays(self, functions: int | None = None) -> dict[str, Array]:
        """Plain arrays to store; of each symmetric Gram matrix the lower triangle.

        With ``functions``, of the last variable only the first so many.
        """
        width = self.gram.shape[1]
        if functions is not None:
            width += functions - len(self.shifts[-1])
        lower = np.tril_indices(width)
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

    Parameters
    ----------
    weight
        Sum of the weights.
    blocks
        E[a b^T] by the names of two blocks a and b, such as ``("x", "x")`` for the Gram matrix S
        of the basis functions of x, ``("y", "x")`` or ``("x", "f(y)")``; of functions less their
        shift.
    means
        E a of each block: ``"x"`` for C = E N of the basis functions N of x, ``"f(y)"`` for
        E f - s of the columns and functions of y less their shift. The difference is small where
        the shift is near the mean, and would lose its digits if s were added.
    traces
        E k(z, z) of each variable.
    shifts
        What is subtracted from the functions of each variable, shapes (q,).
    """

    weight: float
    blocks: Mapping[tuple[str, str], Array]
    means: Mapping[str, Array]
    traces: Mapping[str, float]
    shifts: Mapping[str, Array]

    __repr__ = brief_repr

    def function_means(self, variable: str) -> Array:
        """E f of the columns and functions of a variable, in their units, shape (q,)."""
        return self.shifts[variable] + self.means[f"f({variable})"]

    @property
    def trace_error(self) -> tuple[float, ...]:
        """Relative trace error tau = trace(K - L L^T) / trace(K) of each variable, over the rows.

        Raises
        ------
        NumericalError
            If it is below zero by more than rounding.
        """
        errors = np.array(
            [(t - float(np.trace(self.blocks[v, v]))) / t for v, t in self.traces.items()]
        )
        non_negative(errors, 1.0)
        return tuple(errors.tolist())

    def projected(self, variable: str, slope: Array) -> "Moments":
        """Means with functions N^T B in the place of the basis N of a variable, B of shape (m, k).

        They have what :meth:`squared_error` reads given this variable.
        """
        functions = [name for name in self.means if name.startswith("f(")]
        blocks = dict(self.blocks) | {
            (variable, name): slope.T @ self.blocks[variable, name]
            for name in functions
            if (variable, name) in self.blocks
        }
        blocks[variable, variable] = slope.T @ self.blocks[variable, variable] @ slope
        means = dict(self.means) | {variable: slope.T @ self.means[variable]}
        return replace(self, blocks=blocks, means=means)

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
            a and B, shapes (q,) and (m, q), or (..., q) and (..., m, q) of several predictions.
        columns
            Positions of the q predicted functions among those of the variable.
        trend
            T, shape (d, q) or (..., d, q); default none.

        Returns
        -------
        error : (q,), or (..., q), at least 0
        """
        f_given, f_of = f"f({given})", f"f({of})"
        offset = constant - self.shifts[of][columns]
        mean = self.means[f_of][columns]
        square = np.diag(self.blocks[f_of, f_of])[columns]
        cross, more = self.blocks[given, f_of][:, columns], 0.0
        if trend is not None:
            d = trend.shape[-2]
            offset = offset + self.shifts[given][:d] @ trend
            mean = mean - self.means[f_given][:d] @ trend
            cross = cross - self.blocks[given, f_given][:, :d] @ trend
            right = self.blocks[f_given, f_of][:d, columns]
            more = (trend * (self.blocks[f_given, f_given][:d, :d] @ trend - 2 * right)).sum(
                axis=-2
            )
        gram, centre = self.blocks[given, given], self.means[given]
        return squared_error(offset, slope, gram, centre, cross, mean, square + more)


def squared_error(
    offset: Array,
    slope: Array,
    gram: Array,
    centre: Array,
    cross: Array,
    mean: Array,
    square: Array,
) -> Array:
    r"""Mean squared error of linear predictions of functions, from means over rows.

    .. math:: \mathrm E (a + N^T B - f)^2 = a^2 + \mathrm E f^2 - 2 a \, \mathrm E f
              + \langle B, \, \mathrm E[N N^T] B
              + 2 \, \mathrm E N \, a^T - 2 \, \mathrm E[N f^T] \rangle

    for each of q functions, where the product is a sum over the m basis functions.

    Parameters
    ----------
    offset, slope
        a and B, shapes (..., q) and (..., m, q).
    gram, centre
        E[N N^T] and E N, shapes (..., m, m) and (..., m).
    cross, mean, square
        E[N f^T], E f and E f^2, shapes (..., m, q), (..., q) and (..., q).

    Returns
    -------
    error : (..., q), at least 0
    """
    of_slope = gram @ slope + 2.0 * (centre[..., None] * offset[..., None, :] - cross)
    error = offset**2 - 2.0 * offset * mean + square + (slope * of_slope).sum(axis=-2)
    return np.maximum(error, 0.0)


_CONSTANT = 1e-12  # of what cancels in a variance: below that it is rounding
_ROUNDING = 1e-13  # of a mean: smaller deviations are those of the values themselves


def variances(parts: Sequence[Moments], variable: str) -> Array:
    """Variance of the functions of a variable, shape (q,); 0 of those that do not vary.

    Parameters
    ----------
    parts
        Means over rows; the variance is that over the rows of all of them.
    variable
        The variable.
    """
    f = f"f({variable})"
    shares = np.array([part.weight for part in parts]) / sum(part.weight for part in parts)
    means = shares @ [part.function_means(variable) for part in parts]
    away = shares @ [part.means[f] for part in parts]
    square = shares @ [np.diagonal(part.blocks[f, f]) for part in parts]
    variance = square - away**2
    varies = variance > np.maximum(_CONSTANT * square, (_ROUNDING * means) ** 2)
    return np.where(varies, variance, 0.0)


# What is summed: one block of features for each variable


@dataclass(frozen=True, eq=False)
class FeatureBlock:
    """One variable's part of the augmented rows: basis functions, and functions of its columns.

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
        squaring; default zeros.
    solve
        How far the basis is solved for before its products are summed; default wholly.
    events
        Events that a tuning is judged by, after the functions and without names.

    Attributes
    ----------
    names
        Names of the columns and declared functions.
    """

    basis: Basis
    columns: tuple[str, ...]
    functions: dict[str, Function] = field(default_factory=dict)
    shift: Array = None
    solve: BlockSolve | None = None
    events: ScoringFunctions | None = None
    names: tuple[str, ...] = field(init=False)

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        names = (*self.columns, *self.functions)
        count = len(names) + (0 if self.events is None else len(self.events))
        shift = np.zeros(count) if self.shift is None else np.asarray(self.shift)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "shift", shift)

    @property
    def solve_flops(self) -> int:
        """Operations per row of the data that solve for the basis."""
        return self.basis.rank**2 if self.solve is None else self.solve.flops

    def values(self, rows: Array) -> Iterator[Array]:
        """Columns, declared functions and events at the rows, without the shift.

        They come in parts of shapes (n, k), one after the other.

        Raises
        ------
        DataError
            If a function returns the wrong shape or a value that is not finite.
        """
        yield rows
        yield from function_values(rows, self.functions)
        if self.events is not None:
            yield self.events(rows)

    def same_functions(self, other: "FeatureBlock") -> bool:
        """Whether columns, functions, events and shift are those of another block."""
        same = self.events is other.events or self.events == other.events
        same = same and self.columns == other.columns and self.functions == other.functions
        return same and np.array_equal(self.shift, other.shift)


def function_values(rows: Array, functions: Mapping[str, Function]) -> Iterator[Array]:
    """Values of each function at the rows, shapes (n, 1), one after the other.

    A function gets a copy of the rows, to do with as it likes.

    Raises
    ------
    DataError
        If one fails, or returns the wrong shape or a value that is not a finite number.
    """
    xp = array_namespace(rows)
    for name, function in functions.items():
        try:
            values = xp.asarray(function(xp.asarray(rows, copy=True)))
        except Exception as error:
            raise DataError(f"function {name!r} failed: {type(error).__name__}: {error}") from error
        if not xp.isdtype(values.dtype, ("bool", "integral", "real floating")):
            raise DataError(f"function {name!r} must return numbers, it returned {values.dtype}")
        if values.shape != (rows.shape[0],):
            several = ": declare a function for each column" if values.ndim == 2 else ""
            raise DataError(
                f"function {name!r} must return shape ({rows.shape[0]},) for rows of shape "
                f"{tuple(rows.shape)}, it returned {tuple(values.shape)}{several}"
            )
        values = xp.astype(values, xp.float64)
        if not bool(xp.all(xp.isfinite(values))):
            raise DataError(f"function {name!r} returned NaN or infinity")
        yield values[:, None]


# The reduction: sets of moments of the same rows, summed in one loop


class ProductSums(Reduction[tuple[MomentSums, ...], Result]):
    """Sums over rows of the products of all features, by fold, for one set of moments or several.

    Attributes
    ----------
    ranks
        Numbers of pivots, a number per variable of each set.
    width
        P, the length of an augmented row; of several sets that of one that takes as much.
    """

    ranks: tuple[int, ...]
    width: int
    name = "strip-moments"
    kinds = (MomentSums,)

    def cost(self, extent: Extent) -> Cost:
        """See :func:`moment_cost`."""
        return moment_cost(self.ranks, self.width, self.n_folds, extent)

    @without_copies()
    def update(self, state: "list[MomentState]", strip: Strip) -> tuple[MomentSums, ...]:
        """Sums over one strip, for :meth:`MomentReduction.newton` once they are added up."""
        like = strip.parts[0]
        folds = strip.folds(self.n_folds)
        if strip.weights is not None:
            folds = folds[strip.counted]
        counts = np.bincount(folds, minlength=self.n_folds)
        xp, ops = array_namespace(like), in_place(like)
        sums, double = [], {"dtype": xp.float64, "device": device(like)}
        for one in state:
            gram = xp.zeros((self.n_folds, one.width, one.width), **double)
            traces = xp.zeros((self.n_folds, len(one.ranks)), **double)
            shifts = tuple(block.shift for block in one.features)
            sums.append(MomentSums(gram, traces, counts.astype(np.int64), one.ranks, shifts))
        length, taken = min(one.span for one in state), state[0].taken
        for near, weight, spans in by_fold(strip, self.n_folds, length, taken):
            roots = None if weight is None else xp.sqrt(weight)[None, :]
            mapped: dict[Any, Array] = {}
            for one, total in zip(state, sums, strict=True):
                # What is one call for each column, function or fold is done for several sub-blocks.
                one.load(near, weight, spans, total.traces, mapped)
                # A sub-block stays in cache from its kernel functions to its products.
                for start in range(0, near[0].shape[0], one.block):
                    here = slice(start, min(start + one.block, near[0].shape[0]))
                    rows, top = one.rows[:, : here.stop - start], 0
                    for evaluator, rank in zip(one.evaluators, one.ranks, strict=True):
                        evaluator.write(here, rows[top : top + rank, :])
                        top += rank
                    rows[top:, :] = one.functions[:, here]
                    if roots is not None:
                        ops.multiply(rows, roots[:, here], out=rows)
                    for fold, span in spans:
                        own = slice(max(span.start - start, 0), min(span.stop, here.stop) - start)
                        if own.start >= own.stop:
                            continue
                        gram = total.gram[fold, ...]
                        if one.single:
                            one.add_in_single(gram, rows[:, own])
                        elif one.on_host:
                            add_gram(gram, rows[:, own])
                        else:
                            add_rank_update(gram, rows[:, own], one.product)
        return tuple(sums)

    def combine(
        self, a: tuple[MomentSums, ...], b: tuple[MomentSums, ...]
    ) -> tuple[MomentSums, ...]:
        """Sums over both."""
        return tuple(map(operator.add, a, b))

    def accumulate(
        self, a: tuple[MomentSums, ...], b: tuple[MomentSums, ...]
    ) -> tuple[MomentSums, ...]:
        """The same in the memory of ``a``."""
        return tuple(map(operator.iadd, a, b))


@dataclass(frozen=True, eq=False)
class MomentReduction(ProductSums[MomentSums]):
    """One set of moments.

    Parameters
    ----------
    features
        Blocks of the variables: of x first, then of y, then of z.
    n_folds
        Number of folds F.
    single
        Whether products of basis functions with each other are made in float32, with their sums
        over sub-blocks in float64; means and functions stay float64.
    """

    features: tuple[FeatureBlock, ...]
    n_folds: int = 1
    single: bool = False

    def __post_init__(self) -> None:
        ranks = tuple(block.basis.rank for block in self.features)
        width = sum(ranks) + 1 + sum(len(block.shift) for block in self.features)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "width", width)

    @property
    def flops(self) -> int:
        """Operations per row: solves and one rank-k update (kernel functions aside)."""
        return self.width**2 + sum(block.solve_flops for block in self.features)

    def start(self, like: Array) -> "list[MomentState]":
        """The buffers, where the rows are."""
        return [MomentState(self, like)]

    def finalize(self, total: tuple[MomentSums, ...]) -> MomentSums:
        """Moments in the Newton bases.

        Raises
        ------
        DataError
            If the sums overflow, or all weights are zero.
        """
        (sums,) = total
        gram, one = sums.gram.sum(axis=0), sum(self.ranks)
        if not (np.isfinite(gram).all() and np.isfinite(sums.traces).all()):
            raise DataError(
                "sums over the rows overflow: give columns, weights and functions in units "
                "that make their values smaller"
            )
        if not float(gram[one, one]) >= np.finfo(np.float64).tiny:
            raise ZeroWeights()
        return self.newton(sums)

    def newton(self, sums: MomentSums) -> MomentSums:
        """Moments in the Newton bases, in place, from sums over strips.

        Of these the upper triangles count, and bases may not be solved for yet.
        """
        for gram in sums.gram:
            for i in range(1, len(gram)):
                gram[i, :i] = gram[:i, i]
            stop = 0
            for block in self.features:
                start, stop = stop, stop + block.basis.rank
                if block.solve is not None:
                    block.solve.finish(block.basis.factor, gram[start:stop])
                    block.solve.finish(block.basis.factor, gram.T[start:stop])
        return sums


@dataclass(frozen=True, eq=False)
class MomentSets(ProductSums[tuple[MomentSums, ...]]):
    """Several sets of moments of the same rows, which share what is done before their kernels.

    That is the order of the rows by fold, their coordinates, and the values of equal functions.

    Parameters
    ----------
    each
        What to compute, with the same number of folds.
    """

    each: tuple[MomentReduction, ...]

    def __post_init__(self) -> None:
        widths = sum(one.width**2 for one in self.each)
        object.__setattr__(self, "n_folds", self.each[0].n_folds)
        object.__setattr__(self, "ranks", sum((one.ranks for one in self.each), ()))
        object.__setattr__(self, "width", math.isqrt(widths - 1) + 1)

    def start(self, like: Array) -> "list[MomentState]":
        """The buffers of each; equal functions have one."""
        states: list[MomentState] = []
        for one in self.each:
            state = MomentState(one, like)
            for other in states:
                equal = all(map(FeatureBlock.same_functions, other.features, state.features))
                if equal and other.equal is None:
                    state.equal = other
            states.append(state)
        return states

    def finalize(self, total: tuple[MomentSums, ...]) -> tuple[MomentSums, ...]:
        """Moments of each in the Newton bases; errors as of :class:`MomentReduction`."""
        return tuple(one.finalize((sums,)) for one, sums in zip(self.each, total, strict=True))


class MomentState:
    """What a task keeps for one set of moments: evaluators, and memory for a sub-block of rows.

    Parameters
    ----------
    reduction
        What is summed.
    like
        An array of the library and on the device of the rows.

    Attributes
    ----------
    block, span
        Rows of a sub-block, and those whose coordinates, functions and folds are prepared at once:
        several sub-blocks, unless that is too much memory.
    equal
        The state of another set of the same rows whose functions are those of this one, if any.
    functions
        Rows 1, f_X - shift, f_Y - shift at the rows that are loaded, shape (P - sum m, n).
    """

    equal: "MomentState | None" = None
    functions: Array = None

    def __init__(self, reduction: MomentReduction, like: Array) -> None:
        xp, features = array_namespace(like), reduction.features
        memory = 0 if is_numpy_array(like) else device_memory(like)
        double = {"dtype": xp.float64, "device": device(like)}
        self.xp, self.features = xp, features
        self.ranks, self.rank, self.width = reduction.ranks, sum(reduction.ranks), reduction.width
        self.block, beside = sub_block(self.width, memory), self.width - self.rank
        self.span = self.block * min(max(_BESIDE // (beside * self.block), 1), _BLOCKS)
        # Kernels get rows that are mapped already: sets with the same transform share these.
        self.transforms: list[Any] = []
        self.bases: list[Any] = []
        for one in features:
            basis: Any = one.basis
            transform, kernel = basis.kernel.unmapped
            if transform is not None:
                basis = replace(basis, kernel=kernel, points=transform(basis.points))
            self.transforms.append(transform)
            self.bases.append(basis)
        self.maps = [t and t.prepare(xp, like) for t in self.transforms]
        self.evaluators = [
            basis.evaluator(like, one.solve)
            for basis, one in zip(self.bases, features, strict=True)
        ]
        self.shifts = [xp.asarray(one.shift, device=device(like))[:, None] for one in features]
        # Memory of all strips: fresh memory costs page faults, more than what is computed in it.
        self.taken, self.held = [Scratch() for _ in features], Scratch()
        self.rows = xp.empty((self.width, self.block), **double)
        self.single, self.on_host = reduction.single, is_numpy_array(like)
        if self.single:
            single = {"dtype": xp.float32, "device": device(like)}
            self.rows32 = xp.empty((self.rank, self.block), **single)
            self.product32 = xp.zeros((self.rank, self.rank), **single)
            self.rest = xp.empty((self.width - self.rank, self.width), **double)
        elif not self.on_host:
            self.product = xp.empty((self.width, self.width), **double)

    def load(
        self,
        parts: tuple[Array, ...],
        weights: Array | None,
        spans: list[Span],
        traces: Array,
        mapped: dict[Any, Array],
    ) -> None:
        """Take rows until the next call, and add the sums of w k(z, z) over those of each fold.

        Parameters
        ----------
        parts, weights, spans
            Rows of each variable, shapes (n, d), their weights, and where each fold lies.
        traces
            To which the sums are added, shape (F, variables).
        mapped
            The rows by variable and transform, for all sets.
        """
        folds, firsts = [fold for fold, _ in spans], [own.start for _, own in spans]
        for i, (transform, to_coordinates) in enumerate(
            zip(self.transforms, self.maps, strict=True)
        ):
            key = i, transform
            if key not in mapped:
                mapped[key] = parts[i] if to_coordinates is None else to_coordinates(parts[i])
            self.evaluators[i].load(mapped[key])
            evaluator, kernel = self.evaluators[i], self.bases[i].kernel
            # Features have been computed for both.
            diagonal = getattr(evaluator, "diagonal", kernel.diagonal)(mapped[key])
            if weights is not None:
                diagonal = weights * diagonal
            if self.on_host:
                traces[folds, i] += np.add.reduceat(diagonal, firsts)
                continue
            for fold, own in spans:
                traces[fold, i] += self.xp.sum(diagonal[own])
        if self.equal is not None:
            self.functions = self.equal.functions
            return
        shape = self.width - self.rank, parts[0].shape[0]
        out, stop = self.held.shaped(self.xp, shape, self.rows), 1
        out[0, :] = 1.0
        for one, part, shift in zip(self.features, parts, self.shifts, strict=True):
            start = stop
            for values in one.values(part):
                out[stop : stop + values.shape[1], :] = values.T
                stop += values.shape[1]
            in_place(out).subtract(out[start:stop, :], shift, out=out[start:stop, :])
        self.functions = out

    def add_in_single(self, gram: Array, rows: Array) -> None:
        """Add the products of rows, those of the basis functions with each other in float32."""
        rank, rows32 = self.rank, self.rows32[:, : rows.shape[1]]
        cast_into(self.xp, rows32, rows[:rank, :])
        rank_update(self.product32, rows32)
        in_place(rows).matmul(rows[rank:, :], rows.T, out=self.rest)
        add_product(self.xp, gram[:rank, :rank], self.product32)
        gram[rank:, :] += self.rest
        gram[:rank, rank:] += self.rest[:, :rank].T


def strip_moments(
    reduction: MomentReduction, parts: tuple[Array, ...], weights: Array | None, folds: Array
) -> MomentSums:
    """Moments of rows in the memory of the process, as one strip in these folds."""
    strip = Strip(np.arange(len(folds)), parts, weights, _made={reduction.n_folds: folds})
    (sums,) = reduction.update(reduction.start(parts[0]), strip)
    return reduction.newton(to_host(sums))


# The memory that it takes


def moment_cost(ranks: tuple[int, ...], width: int, n_folds: int, extent: Extent) -> Cost:
    """What moments of these ranks and of this width P take, F Gram matrices P x P.

    Parameters
    ----------
    ranks
        Numbers of pivots, a number per variable of each set.
    width
        Of the augmented rows; of several sets that of :class:`MomentSets`.
    n_folds
        Number of folds F.
    extent
        The rows.
    """
    d = extent.n_columns
    # A sub-block of P functions of each set of moments, what is on the way, and eliminations.
    length = sub_block(width, extent.device_memory)
    block = (2 + -(-len(ranks) // 2)) * length * width + sum(m * m for m in ranks) // 2
    # Rows gathered, mapped and scaled for several sub-blocks, coordinates of each basis, and
    # functions; of several sets of moments, whose widths are unknown here, at least columns.
    beside = max(width - sum(ranks), d)
    prepared = 2 * beside + (3 + len(ranks)) * d
    at_once = min(max(_BESIDE // beside, LONGEST_BLOCK), _BLOCKS * LONGEST_BLOCK)  # of any width
    most = max(length, at_once)
    block += prepared * min(most, extent.strip_rows)
    remedies = [_LOWER_RANK]
    if n_folds > 1:
        remedies.append(f"{_ONE_FOLD} (partial sums {n_folds} times smaller, no standard errors)")
    partial = n_folds * width**2 * _WORD
    return Cost(
        flops=width**2 + 2 * width * d,
        state=block * _WORD,
        partial=partial,
        alone={
            "the trial of the arithmetic": _TRIAL_WORDS * width**2 * _WORD,
            # The moments, once more packed for the model, and a fold's solution.
            "the solution": 3 * partial // 2 + _SOLVE_WORDS * width**2 * _WORD,
        },
        subject=f"rank {' + '.join(map(str, ranks))} with {n_folds} folds",
        remedies=tuple(remedies),
    )
