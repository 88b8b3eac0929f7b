"""Partitions of unity: non-negative functions that add up to one at every point."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from array_api_compat import array_namespace, device

from cme_dask.codec import Shape
from cme_dask.display import brief_repr
from cme_dask.kernels.base import Kernel
from cme_dask.kernels.evaluator import BlockEvaluator, DerivedEvaluator, exponentiate
from cme_dask.numerics.basis import BlockSolve
from cme_dask.numerics.cholesky import pivoted_cholesky

Array = Any

_ROWS = 1024  # whose sections stay in cache


@dataclass(frozen=True, eq=False)
class PartitionBasis:
    r"""The partition of unity b(z) = softmax_i log k(z, p_i) of a kernel k > 0.

    .. math:: b_i(z) = k(z, p_i) / \sum_j k(z, p_j)

    Computed from log k, so that far from all landmarks, where k underflows, the nearest ones still
    answer; :meth:`support` tells how far that is. Where k is zero at all landmarks (a level that
    :class:`cme_dask.kernels.Delta` has not seen), all answer alike.

    Has what the pass and the models ask of :class:`cme_dask.numerics.basis.NewtonBasis`, but there
    is nothing to solve for.

    Parameters
    ----------
    kernel
        The kernel k.
    points
        Landmarks p, shape (m, d).
    rows
        Global row indices of the landmarks, shape (m,), or None if they are no rows of the data.

    Raises
    ------
    DataError
        If the kernel can be negative, or does not fit the columns.
    """

    kernel: Kernel
    points: Annotated[Array, Shape("m", "d", dtype=float)]
    rows: Annotated[Array, Shape("m")] | None = None

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        self.kernel.check(self.points.shape[1])
        self.kernel.evaluator(self.points, log=True)

    @property
    def partition(self) -> "PartitionBasis":
        """Itself."""
        return self

    @property
    def rank(self) -> int:
        """Number of landmarks m."""
        return int(self.points.shape[0])

    @property
    def parts(self) -> "tuple[PartitionBasis]":
        """Itself."""
        return (self,)

    @property
    def factor(self) -> Array:
        """The identity: no triangular factor stands between kernel sections and functions."""
        return np.eye(self.rank)

    @property
    def bound(self) -> float:
        """1, an upper bound of b everywhere."""
        return 1.0

    def evaluator(self, like: Array, solve: BlockSolve | None = None) -> BlockEvaluator:
        """The functions b for many rows.

        Parameters
        ----------
        like
            An array of the library and on the device of the rows.
        solve
            Ignored: with the identity as factor, there is nothing to solve.
        """
        xp = array_namespace(like)
        points = xp.asarray(self.points, device=device(like))
        logarithms: BlockEvaluator = self.kernel.evaluator(points, log=True)
        ops = logarithms.ops

        def normalise(out: Array) -> None:
            top = xp.max(out, axis=0, keepdims=True)
            seen = xp.isfinite(top)
            ops.subtract(out, xp.where(seen, top, 0.0), out=out)
            exponentiate(self.kernel, ops, out)
            if not bool(xp.all(seen)):
                out[...] = xp.where(seen, out, 1.0)
            ops.divide(out, xp.sum(out, axis=0, keepdims=True), out=out)

        return DerivedEvaluator(self.kernel, points, logarithms, change=normalise)

    def __call__(self, x: Array) -> Array:
        """B at the rows of x, shape (n, m): non-negative, with sum 1 to rounding."""
        return self.evaluator(x).values(x)

    def nearness(self, count: int | None = None) -> Callable[[Array], Array]:
        """:meth:`support`: landmarks have no order."""
        return self.support

    def combined(self, *slopes: Array) -> Callable[[Array], list[Array]]:
        """Functions x -> b(x)^T slope, shapes (n, q), of each of some slopes (m, q)."""

        def products(x: Array) -> list[Array]:
            values = self(x)
            return [values @ np.ascontiguousarray(slope) for slope in slopes]

        return products

    def support(self, x: Array) -> Array:
        """How near the rows of x are to the landmarks, from 0 to 1, shape (n,).

        max_i k(x, p_i) / sqrt(k(x, x) k(p_i, p_i)): 1 at a landmark, and nearly 0 where b is
        extrapolation that no data stand behind.
        """
        xp = array_namespace(x)
        points = xp.asarray(self.points, device=device(x))
        own = xp.sqrt(self.kernel.diagonal(points))
        parts = [xp.empty(0, dtype=xp.float64, device=device(x))]
        for here in _slices(x.shape[0]):
            rows = x[here, :]
            near = xp.max(self.kernel(rows, points) / own[None, :], axis=1)
            parts.append(xp.minimum(near / xp.sqrt(self.kernel.diagonal(rows)), xp.ones_like(near)))
        return xp.concat(parts)


def _slices(n: int) -> Iterator[slice]:
    for start in range(0, n, _ROWS):
        yield slice(start, min(start + _ROWS, n))


def pivot_landmarks(kernel: Any, rows: Array, weights: Array | None, count: int) -> Array:
    """Positions of the first pivots of the greedy pivoted Cholesky decomposition.

    Fewer landmarks are a prefix of more.

    Parameters
    ----------
    kernel
        The kernel.
    rows
        Rows of the row sample, shape (n, d).
    weights
        Their weights, shape (n,), or None.
    count
        How many; fewer if the rows span no more.

    Returns
    -------
    positions : (m,), m <= count
    """
    return pivoted_cholesky(kernel, rows, 0.0, count, weights=weights).pivots
