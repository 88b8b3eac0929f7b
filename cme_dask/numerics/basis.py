"""Bases of the span of kernel functions, alone and side by side, evaluated on a grid of blocks.

Kernel sections solved for, wholly or in part, with matrix products alone.

The rows of K(p, .) become the Newton basis N = R^-1 K(p, .) by forward substitution in blocks of
pivots. It can also stop half way: *between* blocks each kernel section loses what the earlier
blocks explain of it, but within a block nothing is solved,

    C_b = K_b - sum_{a < b} W_ba C_a,   W_ba = R_ba R_aa^-1,   N_b = R_bb^-1 C_b,

and R_bb^-1 is applied to sums of products once, at the end of a pass. With one block, C = K and
the whole solve comes last; that halves the work and loses |R^-1|^2 in the sums, while a few blocks
lose only the square of each block's own range of residuals.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
from array_api_compat import array_namespace, device
from scipy.linalg import solve_triangular

from cme_dask.codec import Shape
from cme_dask.display import brief_repr
from cme_dask.errors import DataError
from cme_dask.kernels.base import Kernel, check_integer
from cme_dask.kernels.discrete import Features
from cme_dask.kernels.evaluator import BlockEvaluator, Scratch, Step
from cme_dask.kernels.lapack import pivoted_factor
from cme_dask.numerics.cholesky import noise, pivoted_cholesky

# Kernel sections solved for, wholly or in part, with matrix products alone


Array = Any

_BLOCK = 48  # pivots per step of a whole solve: measured, 32 to 64 differ by a few per cent


@dataclass(frozen=True)
class BlockSolve:
    """Kernel sections at m pivots, solved for between blocks of pivots only.

    Parameters
    ----------
    edges
        Borders of the blocks, from 0 to m.
    """

    edges: tuple[int, ...]

    @classmethod
    def between(cls, factor: Array, fractions: tuple[float, ...]) -> "BlockSolve":
        """Blocks cut where log R_jj has fallen by these fractions of its whole fall."""
        fall = np.minimum.accumulate(np.log(np.diag(factor)))
        levels = fall[0] + np.array(fractions) * (fall[-1] - fall[0])
        cuts = np.searchsorted(-fall, -levels, side="right")
        inner = sorted({int(c) for c in cuts if 0 < c < len(fall)})
        return cls((0, *inner, len(fall)))

    @property
    def blocks(self) -> list[slice]:
        """The blocks of pivots."""
        return [slice(a, b) for a, b in zip(self.edges[:-1], self.edges[1:], strict=True)]

    @property
    def flops(self) -> int:
        """Operations per row of the data."""
        return sum(2 * block.start * (block.stop - block.start) for block in self.blocks)

    def steps(self, factor: Array) -> list[Step]:
        """The products of the elimination, as steps of a :class:`BlockEvaluator`.

        Parameters
        ----------
        factor
            R, lower-triangular, shape (m, m).
        """
        steps: list[Step] = []
        for block in self.blocks[1:]:
            weights = np.array(factor[block, : block.start])
            for before in self.blocks:
                if before.stop <= block.start:
                    weights[:, before] = solve_triangular(
                        factor[before, before], weights[:, before].T, lower=True, trans="T"
                    ).T
            steps.append((block, slice(0, block.start), weights))
        return steps

    def finish(self, factor: Array, rows: Array) -> None:
        """Solve within the blocks, in place: what is still to do to rows of shape (m, k)."""
        for block in self.blocks:
            rows[block] = solve_triangular(factor[block, block], rows[block], lower=True)


def forward_substitution(factor: Array, edges: Sequence[int]) -> Iterator[Step]:
    """The products of a whole solve, by halves: then most of it is products of large matrices.

    Parameters
    ----------
    factor
        R, lower-triangular, shape (m, m).
    edges
        Borders of the blocks whose inverses are applied, from 0 to m.
    """
    half = (len(edges) - 1) // 2
    first, middle, last = edges[0], edges[half], edges[-1]
    if not half:  # one block
        block = slice(first, last)
        inverse = solve_triangular(factor[block, block], np.eye(last - first), lower=True)
        yield block, None, np.ascontiguousarray(inverse)
        return
    yield from forward_substitution(factor, edges[: half + 1])
    source, target = slice(first, middle), slice(middle, last)
    yield target, source, np.ascontiguousarray(factor[target, source])
    yield from forward_substitution(factor, edges[half:])


# Functions of many rows, evaluated on a fixed grid of blocks


BLOCK = 1024
"""Rows evaluated at once, counted from row 0 of the table.

The last bits of a matrix product depend on the shapes of its factors and on a row's place in them:
on a fixed grid a row's values are the same however the table is cut. A block of some hundred
functions stays in cache.
"""


_BUFFER = 512  # numbers: less than two rows of a block, except of the last one


@contextmanager
def without_copies() -> Iterator[None]:
    """Within, NumPy's functions of broadcast arrays read their rows where they lie.

    Otherwise, where several rows fit into NumPy's buffer, they are copied there and back: blocks of
    the Laplace kernel in three columns take a third longer then, Matern blocks a tenth.
    """
    with np.errstate():  # which restores the size of the buffer
        np.setbufsize(_BUFFER)
        yield


class BlockValues:
    """Values of m functions at one block of rows after the other, in the same memory."""

    def __init__(self, evaluator: BlockEvaluator, width: int) -> None:
        self._evaluator = evaluator
        self._width, self._scratch = width, Scratch()

    @without_copies()
    def __call__(self, rows: Array) -> Array:
        """Values, shape (b, m), of at most ``BLOCK`` rows (b, d); good until the next call."""
        # The last bits of a matrix product depend on the order of its factors in memory.
        rows = np.ascontiguousarray(rows)
        values = self._scratch.shaped(np, (self._width, len(rows)), np.empty(0))
        self._evaluator(rows, values)
        return values.T


def in_blocks(evaluator: BlockEvaluator, rows: Array, width: int) -> Array:
    """Values, shape (n, m), of m functions at rows (n, d).

    Parameters
    ----------
    evaluator
        The functions.
    rows
        Rows, shape (n, d).
    width
        Number of functions m.
    """
    values, block = np.empty((len(rows), width)), BlockValues(evaluator, width)
    for start in range(0, len(rows), BLOCK):
        here = slice(start, start + BLOCK)
        values[here] = block(rows[here])
    return values


# Bases of V = span{k(., p_1), ..., k(., p_m)}: Newton, biorthogonal, spectral, centred


_LOST = 1e-10


class Functions(Protocol):
    """Functions of one variable, as models evaluate them: a basis, or several side by side."""

    @property
    def kernel(self) -> Any:
        """The kernel, of several bases that of the first."""

    @property
    def points(self) -> Array:
        """Pivots or landmarks, shape (m, d)."""

    @property
    def rank(self) -> int:
        """Their number m."""

    @property
    def parts(self) -> "tuple[Basis, ...]":
        """The bases that it is made of, or itself."""

    @property
    def partition(self) -> "Basis | None":
        """Itself if it is a partition of unity: functions >= 0 that add up to one; else None."""

    def support(self, x: Array) -> Array:
        """How near the rows of x are to the pivots or landmarks, from 0 to 1, shape (n,)."""

    def nearness(self, count: int | None = None) -> Callable[[Array], Array]:
        """From rows of x to their support by the first so many pivots of each basis, for many x."""

    def combined(self, *slopes: Array) -> Callable[[Array], list[Array]]:
        """Functions x -> N(x)^T slope, shapes (n, q), of each of some slopes (m, q).

        Made once, for many x and by any thread.
        """

    def __call__(self, x: Array) -> Array:
        """Values at the rows of x, shape (n, m)."""


class Basis(Functions, Protocol):
    """Functions of one variable, one per pivot or landmark, as passes sum them.

    See :class:`NewtonBasis` and :class:`cme_dask.numerics.partition.PartitionBasis`.
    """

    @property
    def rows(self) -> Array | None:
        """Global row indices of the points, shape (m,), or None."""

    @property
    def factor(self) -> Array:
        """The lower-triangular matrix that is solved for, shape (m, m)."""

    @property
    def bound(self) -> float | None:
        """Upper bound of each function everywhere, None if infinite."""

    def evaluator(self, like: Array, solve: BlockSolve | None = None) -> BlockEvaluator:
        """The functions for many rows of x, solved for wholly or so far."""


@dataclass(frozen=True, eq=False)
class NewtonBasis:
    """Newton basis N(z) = k(z, p) R^-T with K(p, p) = R R^T (joint paper, Theorem 5.2).

    Orthonormal in the reproducing kernel Hilbert space. L has rows N(x_i), and K - L L^T is
    positive semidefinite.

    Parameters
    ----------
    kernel
        The kernel k.
    points
        Pivots p, shape (m, d).
    factor
        R, lower-triangular, shape (m, m).
    rows
        Global row indices of the pivots, shape (m,), or None if they are no rows of the data.
    """

    kernel: Kernel
    points: Annotated[Array, Shape("m", "d", dtype=float)]
    factor: Annotated[Array, Shape("m", "m", dtype=float)]
    rows: Annotated[Array, Shape("m")] | None = None

    partition: ClassVar[None] = None
    """The functions do not add up to one."""

    __repr__ = brief_repr

    @classmethod
    def from_points(cls, kernel: Any, points: Array, max_rank: int | None = None) -> "NewtonBasis":
        """Basis on given pivots, without those that the others span to rounding.

        The pivots are eliminated greedily, the largest residual first, in whatever order they came:
        neighbouring points next to each other, as in a grid, would amplify rounding. Elimination
        ends at ``max_rank`` of them.
        """
        result = pivoted_cholesky(kernel, points, 0.0, max_rank)
        return cls(kernel, np.asarray(points)[result.pivots], result.factor)

    def on_same_pivots(self, kernel: Kernel) -> "NewtonBasis | None":
        """The basis of another kernel on these pivots; None if they are dependent by that one."""
        gram = np.asarray(kernel(self.points, self.points), dtype=np.float64)
        factor, order = pivoted_factor(gram, noise(self.rank, float(gram.diagonal().max())))
        if factor.shape[1] < self.rank:
            return None
        rows = None if self.rows is None else self.rows[order]
        return NewtonBasis(kernel, self.points[order], factor, rows)

    def _validate(self) -> None:
        """DataError unless the kernel fits the columns and the factor can be solved for."""
        self.kernel.check(self.points.shape[1])
        if not (np.diagonal(self.factor) > 0).all():
            raise DataError("the factor is singular")

    @property
    def rank(self) -> int:
        """Number of pivots m."""
        return int(self.factor.shape[0])

    @property
    def parts(self) -> "tuple[NewtonBasis]":
        """Itself."""
        return (self,)

    @property
    def newton(self) -> "NewtonBasis":
        """Itself."""
        return self

    @property
    def biorthogonal(self) -> Array:
        """U = R^-T, shape (m, m): rows of the basis B with B^T L = I (Algorithm 2) at the pivots.

        ``N(z) = k(z, p) U``; all other rows of B are zero.
        """
        return solve_triangular(self.factor, np.eye(self.rank), lower=True).T

    @property
    def bound(self) -> float | None:
        """Upper bound sqrt(sup k) of |N_i| and |psi_i| everywhere, by (28); None if infinite."""
        sup = self.kernel.upper_bound
        return None if sup is None else float(np.sqrt(sup))

    def evaluator(self, like: Array, solve: BlockSolve | None = None) -> BlockEvaluator:
        """The functions for many rows.

        Parameters
        ----------
        like
            An array of the library and on the device of the rows.
        solve
            How far the kernel functions at the pivots are solved for; None: wholly, to N.
        """
        xp, place, rank = array_namespace(like), device(like), len(self.factor)
        functions: BlockEvaluator = self.kernel.evaluator(xp.asarray(self.points, device=place))
        edges = (*range(0, rank, _BLOCK), rank)
        steps = solve.steps(self.factor) if solve else forward_substitution(self.factor, edges)
        functions.steps = [(t, s, xp.asarray(matrix, device=place)) for t, s, matrix in steps]
        return functions

    def __call__(self, x: Array) -> Array:
        """N at the rows of x, shape (n, m)."""
        return self.evaluator(x).values(x)

    def support(self, x: Array) -> Array:
        """Share |N(x)|^2 / k(x, x) of each section k(x, .) that the pivots span, shape (n,).

        1 at a pivot; nearly 0 far from all of them, where no data stand behind an answer.
        """
        return self._share(self(x), x)

    def nearness(self, count: int | None = None) -> Callable[[Array], Array]:
        """:meth:`support` by the first so many pivots, with what is solved for prepared once."""
        points, factor = self.points[:count], self.factor[:count, :count]
        steps = NewtonBasis(self.kernel, points, factor).evaluator(points).steps

        def share(x: Array) -> Array:
            functions = self.kernel.evaluator(points)  # of this thread
            functions.steps = steps
            return self._share(functions.values(x), x)

        return share

    def _share(self, newton: Array, x: Array) -> Array:
        """|N(x)|^2 / k(x, x) from N(x), shape (n,)."""
        xp, own = array_namespace(x), self.kernel.diagonal(x)
        share = xp.sum(newton * newton, axis=1) / xp.where(own > 0.0, own, 1.0)
        return xp.clip(share, 0.0, 1.0)

    def combined(self, *slopes: Array) -> Callable[[Array], list[Array]]:
        """Functions x -> N(x)^T slope = k(x, p) R^-T slope, shapes (n, q), of slopes (m, q).

        Solved for once and not at each x, unless rounding would then lose more than 1e-10 of
        |slope|, which bounds the functions over sqrt(sup k).
        """
        if not any(slope.any() for slope in slopes):
            return lambda x: [np.zeros((len(x), slope.shape[1])) for slope in slopes]
        # In one order in memory: the last bits of products depend on it, and files have one.
        slopes = tuple(map(np.ascontiguousarray, slopes))
        factor, top = np.ascontiguousarray(self.factor), self.kernel.upper_bound
        coefs = tuple(solve_triangular(factor, s, lower=True, trans=1) for s in slopes)
        rounding = np.inf if top is None else np.finfo(np.float64).eps * top
        steps: Sequence[Step] = ()
        if not all(
            (rounding * np.abs(coef).sum(axis=0) <= _LOST * np.linalg.norm(slope, axis=0)).all()
            for coef, slope in zip(coefs, slopes, strict=True)
        ):
            coefs, steps = slopes, self.evaluator(self.points).steps

        def combined(x: Array) -> list[Array]:
            functions = self.kernel.evaluator(self.points)  # of this thread
            functions.steps = steps
            result = [np.empty((len(x), coef.shape[1])) for coef in coefs]
            memory = np.empty(len(factor) * min(BLOCK, len(x)))
            for start in range(0, len(x), BLOCK):
                here = slice(start, min(start + BLOCK, len(x)))
                count = here.stop - start
                block = memory[: len(factor) * count].reshape(-1, count)
                with without_copies():
                    functions.load(np.ascontiguousarray(x[here]))
                    functions.write(slice(0, count), block)
                for coef, out in zip(coefs, result, strict=True):
                    np.matmul(block.T, coef, out=out[here])
            return result

        return combined

    def power(self, x: Array) -> Array:
        """Power function P(z) = sqrt(k(z, z) - |N(z)|^2), shape (n,): the error bound at z.

        |f(z) - (projection of f on V)(z)| <= P(z) |f|_H for every f in H (joint paper, after 5.2).
        """
        newton = self(x)
        gap = self.kernel.diagonal(x) - (newton * newton).sum(axis=1)
        return np.sqrt(np.maximum(gap, 0.0))


class _FeatureEvaluator(BlockEvaluator):
    """Features of rows, computed once for their values and for the diagonal."""

    def __init__(self, basis: "FeatureBasis", like: Array) -> None:
        xp = array_namespace(like)
        super().__init__(basis.kernel, xp.empty((basis.rank, 0), device=device(like)))
        self._basis = basis

    def load(self, X: Array) -> None:
        """Take the rows X, shape (n, d), until the next call."""
        self._rows = self._basis(X)

    def diagonal(self, X: Array) -> Array:
        """|phi|^2 at the rows that are loaded, shape (n,)."""
        return self.xp.sum(self._rows * self._rows, axis=1)

    def _fill(self, here: slice, out: Array) -> None:
        out[...] = self._rows[here, :].T


@dataclass(frozen=True)
class FeatureBasis:
    """A basis of functions of your own, those of a kernel of features.

    Parameters
    ----------
    kernel : Features
        Its ``features`` are the functions.
    n_columns : int
        Number of columns of the rows.

    Attributes
    ----------
    rank : int
        Number of functions m.

    Raises
    ------
    DataError
        If the kernel has no features, or they are not a matrix of finite numbers.
    """

    kernel: Kernel
    n_columns: int
    rank: int = field(init=False, repr=False, compare=False)

    rows: ClassVar[None] = None
    """There are no pivots."""

    partition: ClassVar[None] = None
    """The functions need not add up to one."""

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Features):
            raise DataError(f"kernel must derive from kernels.Features, got {self.kernel!r}")
        check_integer("n_columns", self.n_columns, 1)
        self.kernel.check(self.n_columns)
        with np.errstate(all="ignore"):  # only their number matters at rows that nobody gave
            values = self.kernel.features(np, np.zeros((2, self.n_columns)))
        if values.ndim != 2 or len(values) != 2:
            raise self._shapeless(2, values)
        object.__setattr__(self, "rank", int(values.shape[1]))

    @property
    def parts(self) -> "tuple[FeatureBasis]":
        """Itself."""
        return (self,)

    @property
    def points(self) -> Array:
        """No pivots, shape (0, d)."""
        return np.empty((0, self.n_columns))

    @property
    def factor(self) -> Array:
        """The identity: there is nothing to solve."""
        return np.eye(self.rank)

    @property
    def bound(self) -> None:
        """None: features have no bound that is known."""

    def evaluator(self, like: Array, solve: BlockSolve | None = None) -> BlockEvaluator:
        """The functions for many rows; see ``NewtonBasis.evaluator``."""
        return _FeatureEvaluator(self, like)

    def __call__(self, x: Array) -> Array:
        """Values at the rows of x, shape (n, m)."""
        xp = array_namespace(x)
        values = self.kernel.features(xp, x)  # type: ignore[attr-defined] # checked at once
        n = x.shape[0]
        if values.ndim != 2 or values.shape[0] != n:
            raise self._shapeless(n, values)
        finite = xp.all(xp.isfinite(values), axis=1)
        if not bool(xp.all(finite)):
            raise DataError(
                f"features of {self.kernel!r} must be finite numbers, got NaN or infinity at "
                f"{n - int(xp.sum(xp.astype(finite, xp.int64))):,} of {n:,} rows"
            )
        return values

    def _shapeless(self, n: int, values: Array) -> DataError:
        return DataError(
            f"features of {self.kernel!r} at {n:,} rows must have the shape ({n}, m), got an array "
            f"of shape {tuple(values.shape)}"
        )

    def nearness(self, count: int | None = None) -> Callable[[Array], Array]:
        """:meth:`support`: there are no pivots."""
        return self.support

    def combined(self, *slopes: Array) -> Callable[[Array], list[Array]]:
        """Functions x -> phi(x)^T slope, shapes (n, q), of each of some slopes (m, q)."""

        def products(x: Array) -> list[Array]:
            result = [np.empty((len(x), slope.shape[1])) for slope in slopes]
            for start in range(0, len(x), BLOCK):
                here = slice(start, start + BLOCK)
                values = self(x[here])
                for slope, out in zip(slopes, result, strict=True):
                    np.matmul(values, np.ascontiguousarray(slope), out=out[here])
            return result

        return products

    def support(self, x: Array) -> Array:
        """Ones, shape (n,): the features span all sections k(x, .)."""
        return np.ones(len(x))


@dataclass(frozen=True, eq=False)
class LinearBasis:
    """Functions psi(z) = T^T N(z): orthonormal in H, orthogonal in L2 with squared norms lam.

    With T = V the spectral basis (joint paper, (26)); with T = Q U the centred basis, whose
    functions also have mean zero (Q is the orthonormal complement of the means c).

    Parameters
    ----------
    newton
        The Newton basis N, or a partition of unity.
    transform
        T with orthonormal columns, shape (m, k).
    eigenvalues
        lam = E psi^2, descending, shape (k,).
    """

    newton: Basis
    transform: Annotated[Array, Shape("newton.rank", "k")]
    eigenvalues: Annotated[Array, Shape("k")]

    __repr__ = brief_repr

    @property
    def parts(self) -> "tuple[LinearBasis]":
        """Itself."""
        return (self,)

    @property
    def rank(self) -> int:
        """Number of functions k."""
        return int(self.transform.shape[1])

    @property
    def bound(self) -> float | None:
        """Upper bound of |psi_i| over all z (joint paper, after (28)); None if infinite."""
        return self.newton.bound

    def slope(self, slope: Array) -> Array:
        """Slopes on the functions below, (m, q), of slopes (k, q) on these: T slope."""
        return np.ascontiguousarray(self.transform) @ np.ascontiguousarray(slope)

    def on_pivots(self, positions: Array) -> "LinearBasis":
        """The spectral basis of the span of some pivots' kernel functions."""
        newton = self.newton
        sections = newton.factor[positions]  # k(p, .) in the Newton basis
        if len(positions):
            factor = np.linalg.cholesky(sections @ sections.T)
            sections = solve_triangular(factor, sections, lower=True)
        else:
            factor = np.zeros((0, 0))
        root = sections @ (self.transform * np.sqrt(self.eigenvalues))
        rows = None if newton.rows is None else newton.rows[positions]
        own = NewtonBasis(newton.kernel, newton.points[positions], factor, rows)
        return LinearBasis(own, *eigenbasis(root @ root.T))

    def __call__(self, x: Array) -> Array:
        """Psi at the rows of x, shape (n, k)."""
        newton = self.newton(x)
        return newton @ array_namespace(newton).asarray(self.transform)


def eigenbasis(gram: Array, complement_of: Array | None = None) -> tuple[Array, Array]:
    """Transform T and eigenvalues of the basis that diagonalises E[N N^T].

    Parameters
    ----------
    gram
        E[N N^T], shape (m, m), or (..., m, m) of several.
    complement_of
        Means c = E N, shape (..., m): restrict to their orthonormal complement Q, so that E psi =
        0. All are zero, or none is.

    Returns
    -------
    transform : (..., m, k) with k = m, or m - 1 if restricted
    eigenvalues : (..., k), descending, clipped at zero
    """
    norm = np.zeros(1) if complement_of is None else np.linalg.norm(complement_of, axis=-1)
    if not norm.any():
        eigenvalues, vectors = np.linalg.eigh((gram + gram.mT) / 2)
        return vectors[..., ::-1], np.maximum(eigenvalues[..., ::-1], 0.0)
    # Q: the last m - 1 columns of the Householder reflection 1 - 2 r r^T that maps c to a multiple
    # of e_1. It is applied by vectors: two products with Q would cost as much as the eigenbasis.
    reflector = np.array(complement_of, dtype=np.float64)
    reflector[..., 0] += np.copysign(norm, reflector[..., 0])
    reflector /= np.linalg.norm(reflector, axis=-1, keepdims=True)
    image = (gram @ reflector[..., None])[..., 0]
    image -= (reflector * image).sum(axis=-1, keepdims=True) * reflector
    rest, of_image = reflector[..., 1:], image[..., 1:]
    moved = rest[..., :, None] * of_image[..., None, :]
    inner = gram[..., 1:, 1:] - 2.0 * (moved + moved.mT)
    eigenvalues, vectors = np.linalg.eigh((inner + inner.mT) / 2)
    vectors = vectors[..., ::-1]
    transform = -2.0 * reflector[..., :, None] * (rest[..., None, :] @ vectors)
    transform[..., 1:, :] += vectors
    return transform, np.maximum(eigenvalues[..., ::-1], 0.0)


# Bases of one variable side by side: for density ratios that are means of several


@dataclass(frozen=True, eq=False)
class StackedNewton:
    """Newton bases of several kernels, one after the other: functions of all of them.

    Parameters
    ----------
    parts
        The bases.
    """

    parts: tuple[Basis, ...]

    __repr__ = brief_repr

    partition: ClassVar[None] = None
    """Partitions of unity are not averaged."""

    @property
    def kernel(self) -> Any:
        """The kernel of the first."""
        return self.parts[0].kernel

    @property
    def points(self) -> Array:
        """Pivots of all, shape (m, d)."""
        return np.concatenate([np.asarray(part.points) for part in self.parts])

    @property
    def rank(self) -> int:
        """Number of pivots m of all."""
        return sum(part.rank for part in self.parts)

    def nearness(self, count: int | None = None) -> Callable[[Array], Array]:
        """:meth:`support` by the first so many pivots of each, prepared for many x."""
        each = [part.nearness(count) for part in self.parts]
        return lambda x: np.mean([share(x) for share in each], axis=0)

    def combined(self, *slopes: Array) -> Callable[[Array], list[Array]]:
        """Functions x -> N(x)^T slope, shapes (n, q), of slopes (m, q) on all of them."""
        edges = np.cumsum([part.rank for part in self.parts])[:-1]
        pieces = zip(*(np.split(slope, edges) for slope in slopes), strict=True)
        each = [part.combined(*some) for part, some in zip(self.parts, pieces, strict=True)]

        def sums(x: Array) -> list[Array]:
            result = zip(*(one(x) for one in each), strict=True)
            return [np.sum(values, axis=0) for values in result]

        return sums

    def support(self, x: Array) -> Array:
        """How near the rows of x are to the pivots, mean over the bases, shape (n,)."""
        return np.mean([part.support(x) for part in self.parts], axis=0)

    def __call__(self, x: Array) -> Array:
        """Values at the rows of x, shape (n, m)."""
        return np.concatenate([part(x) for part in self.parts], axis=1)


def ranks_of(newton: Functions) -> tuple[int, ...]:
    """Number of pivots of each of several bases, or of the one that there is."""
    return tuple(part.rank for part in newton.parts)


@dataclass(frozen=True, eq=False)
class StackedBasis:
    """Linear bases of several kernels, one after the other.

    Parameters
    ----------
    parts
        The bases, at least one.
    """

    parts: tuple[LinearBasis, ...]

    __repr__ = brief_repr

    def _validate(self) -> None:
        """DataError if there are none."""
        if not self.parts:
            raise DataError("a stacked basis needs parts")

    @property
    def newton(self) -> StackedNewton:
        """The bases below."""
        return StackedNewton(tuple(part.newton for part in self.parts))

    @property
    def rank(self) -> int:
        """Number of functions k of all."""
        return sum(part.rank for part in self.parts)

    @property
    def bound(self) -> float | None:
        """Upper bound of each function everywhere; None if infinite."""
        bounds = [part.bound for part in self.parts]
        return None if None in bounds else max(b for b in bounds if b is not None)

    @property
    def eigenvalues(self) -> Array:
        """E psi^2, shape (k,)."""
        return np.concatenate([part.eigenvalues for part in self.parts])

    def slope(self, slope: Array) -> Array:
        """Slopes on the functions below, (m, q), of slopes (k, q) on these."""
        edges = np.cumsum([part.rank for part in self.parts])[:-1]
        pairs = zip(self.parts, np.split(slope, edges), strict=True)
        return np.concatenate([part.slope(piece) for part, piece in pairs])

    def __call__(self, x: Array) -> Array:
        """Functions at the rows of x, shape (n, k)."""
        return np.concatenate([part(x) for part in self.parts], axis=1)
