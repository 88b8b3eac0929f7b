r"""Moments weighted by functions of the rows: what multiplication operators are made of.

In an orthonormal basis psi, the multiplication by a function f has the matrix
:math:`(\mathrm{diag}(\lambda) + r)^{-1} \mathrm E[f \psi \psi^T]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from array_api_compat import array_namespace, device

from cme_dask.errors import DataError
from cme_dask.kernels.base import check_integer
from cme_dask.kernels.discrete import Features
from cme_dask.numerics.basis import BlockSolve
from cme_dask.numerics.blocks import Moments, MomentSums
from cme_dask.numerics.moments import Function, function_values, sub_block
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip

Array = Any

_WORD = 8


class RowFunctions(Protocol):
    """Functions of the rows of one variable: a basis of a fit, or one of one's own."""

    @property
    def rank(self) -> int:
        """Number of functions m."""

    def evaluator(self, elimination: BlockSolve, like: Array) -> Callable[[Array, Array], None]:
        """What writes their values at rows (b, d) to memory of shape (m, b)."""


@dataclass(frozen=True)
class FeatureBasis:
    """A basis of functions of your own, those of a kernel of features.

    Parameters
    ----------
    kernel : Features
        Its ``features`` are the functions.
    n_columns : int
        Number of columns of the rows.

    Raises
    ------
    DataError
        If the kernel has no features, or they are not a matrix of finite numbers.
    """

    kernel: Features
    n_columns: int

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Features):
            raise DataError(f"kernel must derive from kernels.Features, got {self.kernel!r}")
        check_integer("n_columns", self.n_columns, 1)
        self(np.zeros((2, self.n_columns)))

    @property
    def rank(self) -> int:
        """Number of functions m."""
        return int(self.kernel.features(np, np.zeros((1, self.n_columns))).shape[1])

    def evaluator(self, elimination: BlockSolve, like: Array) -> Callable[[Array, Array], None]:
        """What writes the functions; nothing is solved for."""

        def write(X: Array, out: Array) -> None:
            out[...] = self(X).T

        return write

    def __call__(self, x: Array) -> Array:
        """Values at the rows of x, shape (n, m)."""
        xp = array_namespace(x)
        values = self.kernel.features(xp, x)
        if (
            values.ndim != 2
            or values.shape[0] != x.shape[0]
            or not bool(xp.all(xp.isfinite(values)))
        ):
            raise DataError(
                f"features of {self.kernel!r} at {x.shape[0]} rows must be finite numbers of shape "
                f"({x.shape[0]}, m), got an array of shape {tuple(values.shape)}"
            )
        return values


@dataclass(frozen=True, eq=False)
class WeightedSums:
    """Sums over rows; those over disjoint sets of rows add.

    Attributes
    ----------
    grams
        sum_i w_i f(z_i) a_i a_i^T of a = [N_X, N_Y, 1] and each function f, shape (q, P, P).
    weight
        sum_i w_i, shape ().
    """

    grams: Array
    weight: Array

    def __add__(self, other: "WeightedSums") -> "WeightedSums":
        """Sums over the union of two disjoint sets of rows."""
        return WeightedSums(self.grams + other.grams, self.weight + other.weight)


@dataclass(frozen=True, eq=False)
class WeightedMoments(Reduction[WeightedSums, dict[str, Moments]]):
    r"""Moments :math:`\mathrm E[f N N^T]` in given bases, for signed functions f, in one pass.

    The result holds, by the name of each function f, the blocks E[f N_a N_b^T] (``gram``,
    ``cross``) and E[f N_a] (``mean``) of the bases N of both variables.

    Parameters
    ----------
    bases
        Of x, or of x and of y: those of a fit (``basis_.newton``), or a :class:`FeatureBasis`.
    functions
        Functions of the rows by name, for each variable: from rows (n, d) to values (n,).
    """

    bases: tuple[RowFunctions, ...]
    functions: tuple[Mapping[str, Function], ...] = field(default_factory=tuple)
    name = "weighted-moments"
    kinds = (WeightedSums,)

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
        partial = _WORD * len(self.names) * self.width**2
        return Cost(
            flops=2 * len(self.names) * self.width**2 + sum(b.rank**2 for b in self.bases),
            state=3 * _WORD * self.width * sub_block(self.width) + partial,
            partial=partial,
            subject=f"rank {' + '.join(str(basis.rank) for basis in self.bases)}",
            remedies=("lower the rank of the bases",),
        )

    def start(self, like: Array) -> tuple[Array, ...]:
        """Evaluators of the bases, and the rows [N_X, N_Y, 1] of a sub-block as columns."""
        xp, length = array_namespace(like), sub_block(self.width)
        buffer = xp.ones((self.width, length), dtype=xp.float64, device=device(like))
        whole = (BlockSolve.whole(basis.rank) for basis in self.bases)
        pairs = zip(self.bases, whole, strict=True)
        return buffer, [basis.evaluator(elimination, like) for basis, elimination in pairs]

    def update(self, state: tuple[Array, ...], strip: Strip) -> WeightedSums:
        """Sums over one strip."""
        (buffer, evaluators), n = state, len(strip)
        xp = array_namespace(strip.parts[0])
        where = {"dtype": xp.float64, "device": device(strip.parts[0])}
        weights = xp.ones(n, **where) if strip.weights is None else strip.weights
        values = [
            column[:, 0] * weights
            for functions, part in zip(self.functions, strip.parts, strict=False)
            for column in function_values(part, functions)
        ]
        grams = [xp.zeros((self.width, self.width), **where) for _ in values]
        for start in range(0, n, buffer.shape[1]):
            here, low = slice(start, min(start + buffer.shape[1], n)), 0
            rows = buffer[:, : here.stop - start]
            for basis, evaluator, part in zip(self.bases, evaluators, strip.parts, strict=True):
                evaluator(part[here, :], rows[low : low + basis.rank, :])
                low += basis.rank
            for gram, value in zip(grams, values, strict=True):
                gram += (rows * value[None, here]) @ rows.T
        return WeightedSums(xp.stack(grams), xp.sum(weights))

    def finalize(self, total: WeightedSums) -> dict[str, Moments]:
        """Means by the name of each function.

        Raises
        ------
        DataError
            If all weights are zero.
        """
        weight = float(total.weight)
        if not weight > 0.0:
            raise DataError("all weights are zero: at least one row needs a positive weight")
        ranks = tuple(basis.rank for basis in self.bases)
        unknown, none = np.full((1, len(ranks)), np.nan), (np.zeros(0),) * len(ranks)
        moments = {}
        for name, gram in zip(self.names, total.grams, strict=True):
            sums = MomentSums((gram + gram.T)[None] / 2.0, unknown, np.zeros(1, int), ranks, none)
            moments[name] = Moments.of(sums, weight)
        return moments
