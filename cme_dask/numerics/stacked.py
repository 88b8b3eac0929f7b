"""Bases of one variable side by side: for density ratios that are means of several."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from cme_dask.numerics.basis import Basis, LinearBasis
from cme_dask.numerics.joint import JointSolution
from cme_dask.numerics.shown import brief_repr

Array = Any


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

    def combined(self, *slopes: Array) -> Callable[[Array], list[Array]]:
        """Functions x -> N(x)^T slope, shapes (n, q), of slopes (m, q) on all of them."""
        edges = np.cumsum([part.rank for part in self.parts])[:-1]
        pieces = zip(*(np.split(slope, edges) for slope in slopes), strict=True)
        each = [part.combined(*some) for part, some in zip(self.parts, pieces, strict=True)]

        def sums(x: Array) -> list[Array]:
            found = zip(*(one(x) for one in each), strict=True)
            return [np.sum(values, axis=0) for values in found]

        return sums

    def support(self, x: Array) -> Array:
        """How near the rows of x are to the pivots, mean over the bases, shape (n,)."""
        return np.mean([part.support(x) for part in self.parts], axis=0)

    def __call__(self, x: Array) -> Array:
        """Values at the rows of x, shape (n, m)."""
        return np.concatenate([part(x) for part in self.parts], axis=1)


def ranks_of(newton: Basis | StackedNewton) -> tuple[int, ...]:
    """Number of pivots of each of several bases, or of the one that there is."""
    parts = newton.parts if isinstance(newton, StackedNewton) else (newton,)
    return tuple(part.rank for part in parts)


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

    def of(self, newton: Array) -> Array:
        """Functions from those below, shapes (n, m) to (n, k)."""
        pieces = np.split(newton, self._edges, axis=1)
        return np.concatenate(
            [part.of(piece) for part, piece in zip(self.parts, pieces, strict=True)], axis=1
        )

    def __call__(self, x: Array) -> Array:
        """Functions at the rows of x, shape (n, k)."""
        return np.concatenate([part(x) for part in self.parts], axis=1)

    @cached_property
    def _edges(self) -> Array:
        return np.cumsum([part.newton.rank for part in self.parts])[:-1]


def reduced(solution: JointSolution) -> JointSolution:
    """The same density ratio with H diagonal: H = U S V^T, in the bases U^T psi_Y and V^T psi_X.

    So the larger basis has no more functions than the smaller one.
    """
    u, s, vt = np.linalg.svd(solution.coef, full_matrices=False)
    return replace(
        solution,
        coef=np.diag(s),
        transform_x=solution.transform_x @ vt.T,
        transform_y=solution.transform_y @ u,
        eigenvalues_x=(vt**2) @ solution.eigenvalues_x,
        eigenvalues_y=(u**2).T @ solution.eigenvalues_y,
    )
