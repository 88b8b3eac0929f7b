"""The joint distribution from moments: its solution, means of several, its loss."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from cme_dask.display import brief_repr
from cme_dask.errors import DataError, option
from cme_dask.numerics.basis import Basis, Functions, LinearBasis
from cme_dask.numerics.blocks import Moments
from cme_dask.numerics.problem import (
    NO_BOUNDS,
    BasisBounds,
    Constraint,
    Problem,
    Regularization,
    SolverInfo,
)

# Joint distribution g = dP / d(P_X x P_Y) = 1 + psi_Y^T H psi_X from moments


Array = Any


@dataclass(frozen=True, eq=False)
class JointSolution:
    """H in bases that diagonalise the quadratic form: g = base + (T_Y^T N_Y)^T coef (T_X^T N_X).

    Attributes
    ----------
    coef
        H ("none"), G (in centred bases) or C ("coupling"), shape (k_Y, k_X).
    transform_x, transform_y
        T, shapes (m_X, k_X) and (m_Y, k_Y).
    eigenvalues_x, eigenvalues_y
        lam, shapes (k_X,) and (k_Y,).
    centred
        True if both bases have mean zero.
    info
        How good the solution is.
    base
        1, or 0 for ``coupling``, where the features add up to one.
    """

    coef: Array
    transform_x: Array
    transform_y: Array
    eigenvalues_x: Array
    eigenvalues_y: Array
    centred: bool
    info: SolverInfo
    base: float = 1.0

    __repr__ = brief_repr

    @classmethod
    def of(cls, problem: Problem, coef: Array, info: SolverInfo) -> "JointSolution":
        """In the bases of the problem."""
        return cls(
            coef,
            problem.transform_x,
            problem.transform_y,
            problem.eigenvalues_x,
            problem.eigenvalues_y,
            problem.centred,
            info,
            problem.base,
        )

    def shrunk(self, share: float) -> "JointSolution":
        """With ``share`` times its h = g - base."""
        return replace(self, coef=share * self.coef)

    @property
    def status(self) -> str:
        """``"optimal"`` or another status of the solver; ``"closed form"`` without one."""
        closed = self.info.solver == "closed form" and self.info.converged
        return "closed form" if closed else self.info.status

    @property
    def kkt_residual(self) -> float:
        """See :class:`SolverInfo`."""
        return self.info.kkt_residual

    @property
    def gap(self) -> float:
        """See :class:`SolverInfo`."""
        return self.info.gap

    @property
    def iterations(self) -> int:
        """See :class:`SolverInfo`."""
        return self.info.iterations

    def answer(self, mean: Moments, given: int) -> tuple[Array, Array]:
        """Constants and slopes of E[f | z] = constant + psi(z)^T slope for f of the other variable.

        Parameters
        ----------
        mean
            The moments.
        given
            Number of the variable of the condition: 0 for E[f(Y) | x], 1 for E[f(X) | y].

        Returns
        -------
        constant : (q,)
        slope : (k, q)

        Notes
        -----
        With base 1 the constant is E f and the slope H^T E[psi_Y f^T] (or H E[psi_X f^T]). With
        base 0, psi^T C^T E[b f^T] = s + psi^T C^T E[b (f - s)^T] for any shift s, since C^T c = 1.
        """
        other = "yx"[given]
        coef = self.coef.T if given == 0 else self.coef
        transform = self.transform_y if given == 0 else self.transform_x
        slope = coef @ (transform.T @ mean.functions(other, other))
        if self.base == 0.0:
            return mean.shifts[other], slope
        if not self.centred:  # a centred basis has mean zero: the shift drops out
            slope = slope + np.outer(coef @ (transform.T @ mean.mean(other)), mean.shifts[other])
        return mean.function_mean(other), slope


@dataclass(frozen=True, eq=False)
class JointSolver:
    """From moments to the solution of the fit, under a constraint.

    Parameters
    ----------
    constraint
        The condition on g.
    reg
        The ridge.
    bounds
        What the constraint needs to know of the basis functions.

    Raises
    ------
    DataError
        If the constraint does not take this form of the ridge.
    """

    constraint: Constraint
    reg: Regularization
    bounds: BasisBounds = NO_BOUNDS

    def __post_init__(self) -> None:
        if self.reg.form not in self.constraint.reg_forms:
            raise DataError(
                f"the constraint {self.constraint.name!r} takes the "
                f"{' or '.join(self.constraint.reg_forms)} form of the ridge only, "
                f"{option('reg_form')} is {self.reg.form!r}"
            )

    def on(self, bases: Sequence[Basis], rows: Sequence[Array]) -> "JointSolver":
        """The solver for bases of x and of y, with what the constraint needs to know of them.

        Parameters
        ----------
        bases
            Of the moments.
        rows
            Random rows of x and of y.
        """
        return replace(self, bounds=self.constraint.bounds_of(bases, rows))

    def __call__(self, mean: Moments, start: JointSolution | None = None) -> JointSolution:
        """Solve; the info is not checked.

        Parameters
        ----------
        mean
            Moments.
        start
            A solution of a similar problem, from which iterations start.

        Raises
        ------
        DataError
            If the kernels or the ridge don't fit the constraint.
        """
        problem = self.constraint.problem(mean, self.reg)
        first = None if start is None else start.coef
        return JointSolution.of(problem, *self.constraint.minimize(problem, self.bounds, first))

    def path(self, mean: Moments, regs: Sequence[Regularization]) -> Iterator[JointSolution]:
        """Solutions at one positive ridge after the other; iterations start from the last.

        Parameters
        ----------
        mean
            Moments.
        regs
            Ridges in place of the solver's own.
        """
        problem, coef = self.constraint.problem(mean, regs[0]), None
        for reg in regs:
            problem = problem.ridged(reg)
            coef, info = self.constraint.minimize(problem, self.bounds, coef)
            yield JointSolution.of(problem, coef, info)


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


# The joint loss on rows that a fit has not seen, from their moments


@dataclass(frozen=True, eq=False)
class HeldOut:
    r"""Moments of held-out rows in the bases of a solution: then a loss is two small products.

    .. math:: -2 (E_P h - E_{P_X \otimes P_Y} h) + E_{P_X \otimes P_Y} h^2,
              \quad h = g - 1 = \psi_Y^T H \psi_X

    estimates |g - g_0|^2 in L2(P_X x P_Y) up to a constant that no model changes: it is comparable
    across kernels and constraints, and 0 for independence.

    Attributes
    ----------
    gram_x, gram_y, cross
        E[psi psi^T] of x and of y, and E[psi_Y psi_X^T].
    mean_x, mean_y
        E psi.
    """

    gram_x: Array
    gram_y: Array
    cross: Array
    mean_x: Array
    mean_y: Array

    @classmethod
    def of(cls, held: Moments, transform_x: Array, transform_y: Array) -> "HeldOut":
        """In the bases psi = T^T N."""
        return cls(
            transform_x.T @ held.gram("x") @ transform_x,
            transform_y.T @ held.gram("y") @ transform_y,
            transform_y.T @ held.cross("y", "x") @ transform_x,
            transform_x.T @ held.mean("x"),
            transform_y.T @ held.mean("y"),
        )

    def loss(self, coef: Array) -> float:
        """The loss of H, shape (k_Y, k_X)."""
        joint = float((coef * self.cross).sum())
        product = float(self.mean_y @ coef @ self.mean_x)
        square = float(((self.gram_y @ coef @ self.gram_x) * coef).sum())
        return square - 2.0 * (joint - product)
