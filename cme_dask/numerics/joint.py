"""The joint distribution from moments: its solution, means of several, its loss."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from cme_dask.constraints import Certified, Constraint, Coupling, Pointwise, parse
from cme_dask.display import brief_repr
from cme_dask.errors import DataError, option, remedy
from cme_dask.numerics.basis import Basis, LinearBasis
from cme_dask.numerics.certified import solve_certified, solve_paper_form
from cme_dask.numerics.coupling import solve_coupling
from cme_dask.numerics.moments import MeanMoments
from cme_dask.numerics.pointwise import solve_pointwise
from cme_dask.numerics.problem import NOTHING, Geometry, JointProblem, Outcome, Regularization

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
    outcome
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
    outcome: Outcome
    base: float = 1.0

    __repr__ = brief_repr

    @classmethod
    def of(cls, problem: JointProblem, coef: Array, outcome: Outcome) -> "JointSolution":
        """In the bases of the problem."""
        return cls(
            coef,
            problem.transform_x,
            problem.transform_y,
            problem.eigenvalues_x,
            problem.eigenvalues_y,
            problem.centred,
            outcome,
        )

    def shrunk(self, kept: float) -> "JointSolution":
        """With ``kept`` times its h = g - base."""
        return replace(self, coef=kept * self.coef)

    @property
    def status(self) -> str:
        """``"optimal"`` or what the solver said; ``"closed form"`` where there was none."""
        closed = self.outcome.solver == "closed form" and self.outcome.converged
        return "closed form" if closed else self.outcome.status

    @property
    def kkt_residual(self) -> float:
        """See :class:`Outcome`."""
        return self.outcome.kkt_residual

    @property
    def gap(self) -> float:
        """See :class:`Outcome`."""
        return self.outcome.gap

    @property
    def iterations(self) -> int:
        """See :class:`Outcome`."""
        return self.outcome.iterations

    def answer(self, mean: MeanMoments, given: int) -> tuple[Array, Array]:
        """Constants and slopes of E[f | z] = constant + psi(z)^T slope for the other side's f.

        Parameters
        ----------
        mean
            The moments.
        given
            Side of the condition: 0 for E[f(Y) | x], 1 for E[f(X) | y].

        Returns
        -------
        constant : (q,)
        slope : (k, q)

        Notes
        -----
        With base 1 the constant is E f and the slope H^T E[psi_Y f^T] (or H E[psi_X f^T]). With
        base 0, psi^T C^T E[b f^T] = s + psi^T C^T E[b (f - s)^T] for any shift s, since C^T c = 1.
        """
        other = 1 - given
        coef = self.coef.T if given == 0 else self.coef
        transform = (self.transform_x, self.transform_y)[other]
        slope = coef @ (transform.T @ mean.function_cross[other][other])
        if self.base == 0.0:
            return mean.shift[other], slope
        if not self.centred:  # a centred basis has mean zero: the shift drops out
            slope = slope + np.outer(coef @ (transform.T @ mean.mean[other]), mean.shift[other])
        return mean.function_mean[other], slope


@dataclass(frozen=True, eq=False)
class JointSolver:
    """From moments to the solution of the fit, under a constraint.

    Parameters
    ----------
    constraint
        What is asked of g.
    reg
        The ridge.
    geometry
        What the constraint needs to know of the basis functions.

    Raises
    ------
    DataError
        If the constraint takes a two-sided ridge only.
    """

    constraint: Constraint
    reg: Regularization
    geometry: Geometry = NOTHING

    def __post_init__(self) -> None:
        iterative = isinstance(self.constraint, (Pointwise, Coupling))
        if iterative and self.reg.form != "two-sided":
            raise DataError(
                f"the constraint {self.constraint.name!r} takes the two-sided form of the ridge "
                f"only, {option('reg_form')} is "
                f"{self.reg.form!r}"
            )

    def __call__(self, mean: MeanMoments, start: JointSolution | None = None) -> JointSolution:
        """Solve; the outcome is not checked.

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
        return _SOLVERS[self.constraint.name](self, mean, start)

    def path(self, mean: MeanMoments, regs: Sequence[Regularization]) -> Iterator[JointSolution]:
        """Solutions at one positive ridge after the other; iterations start from the last.

        Parameters
        ----------
        mean
            Moments.
        regs
            Ridges in place of the solver's own.
        """
        last: JointSolution | None = None
        problem = JointProblem.of(mean, regs[0], centred=self.centred) if self.closed else None
        for reg in regs:
            solver = replace(self, reg=reg)
            if problem is None:
                last = solver(mean, last)
            else:
                last = _closed(solver, mean, problem.ridged(reg))
            yield last

    @property
    def centred(self) -> bool:
        """Whether the problem lives in centred bases."""
        return self.constraint.name != "none"

    @property
    def closed(self) -> bool:
        """Whether the solution is closed."""
        paper = isinstance(self.constraint, Certified) and self.constraint.formulation == "paper"
        return self.constraint.name in ("none", "normalized", "certified") and not paper


def solve_joint(mean: MeanMoments, constraint: Any, reg: Regularization) -> JointSolution:
    """Minimise half of (34) under a constraint that needs nothing but moments.

    Source: joint paper, (34) and (38); (37) as printed halves Lambda + lambda I, against (34).
    """
    return JointSolver(parse(constraint), reg)(mean)


Solve = Callable[[JointSolver, MeanMoments, JointSolution | None], JointSolution]


def _in_closed_form(
    solver: JointSolver, mean: MeanMoments, _: JointSolution | None
) -> JointSolution:
    return _closed(solver, mean, JointProblem.of(mean, solver.reg, centred=solver.centred))


def _closed(solver: JointSolver, mean: MeanMoments, problem: JointProblem) -> JointSolution:
    begin, constraint = time.perf_counter(), solver.constraint
    if isinstance(constraint, Certified):
        weights = _weights(problem, constraint.bounds, solver.geometry)
        return JointSolution.of(problem, *solve_certified(problem, *weights))
    coef = problem.free
    residual = problem.newton_residual(mean, solver.reg, coef)
    seconds = time.perf_counter() - begin
    # Without a ridge what was pruned shows in the residual, and is no failure of the solver.
    outcome = Outcome("closed form", "optimal", 0.0, residual, residual, 0.0, 0, seconds, np.inf)
    return JointSolution.of(problem, coef, outcome)


def _certified(
    solver: JointSolver, mean: MeanMoments, start: JointSolution | None
) -> JointSolution:
    if solver.closed:
        return _in_closed_form(solver, mean, start)
    assert isinstance(solver.constraint, Certified)
    kappa = _kappa(solver.geometry)
    problem = JointProblem.of(mean, solver.reg, centred=False)
    means = problem.transform_x.T @ mean.mean[0], problem.transform_y.T @ mean.mean[1]
    coef, outcome = solve_paper_form(problem, *means, kappa, solver.constraint.solver)
    return JointSolution.of(problem, coef, outcome)


def _kappa(geometry: Geometry) -> float:
    """kappa_X kappa_Y, the bound of |psi_Y psi_X|."""
    x, y = geometry.bounds
    if x is None or y is None:
        raise DataError(
            "the constraint 'certified' needs kernels that are bounded: linear and polynomial ones "
            "are not; take other kernels, or "
            + remedy(
                "cme_dask.constraints.Certified(bounds='sample')",
                "--constraint certified,bounds=sample",
            )
        )
    return x * y


def _weights(problem: JointProblem, bounds: str, geometry: Geometry) -> tuple[Array, Array]:
    """What a unit of G_ji > 0 and of G_ji < 0 can take from g, shapes (k_Y, k_X) or ().

    With psi in [a, b] and phi in [c, d], a, c <= 0 <= b, d: phi psi lies in [min(c b, d a),
    max(c a, d b)].
    """
    if bounds == "analytic":
        kappa = np.asarray(_kappa(geometry))
        return kappa, kappa
    if geometry.ranges is not None:
        x, y = geometry.ranges
    else:
        assert geometry.newton is not None
        values = (
            geometry.newton[0] @ problem.transform_x,
            geometry.newton[1] @ problem.transform_y,
        )
        x, y = (np.stack([v.min(axis=0), v.max(axis=0)]) for v in values)
    (a, b), (c, d) = (np.stack([r[0].clip(max=0.0), r[1].clip(min=0.0)]) for r in (x, y))
    lowest = np.minimum(np.outer(c, b), np.outer(d, a))
    highest = np.maximum(np.outer(c, a), np.outer(d, b))
    return -lowest, highest


def _pointwise(
    solver: JointSolver, mean: MeanMoments, start: JointSolution | None
) -> JointSolution:
    constraint, newton = solver.constraint, solver.geometry.newton
    assert isinstance(constraint, Pointwise)
    assert newton is not None
    problem = JointProblem.of(mean, solver.reg, centred=True)
    coef, outcome = solve_pointwise(
        problem,
        newton[0] @ problem.transform_x,
        newton[1] @ problem.transform_y,
        solver.reg,
        tol=constraint.tol,
        max_iterations=constraint.max_iterations,
    )
    return JointSolution.of(problem, coef, outcome)


def _coupling(solver: JointSolver, mean: MeanMoments, start: JointSolution | None) -> JointSolution:
    constraint = solver.constraint
    assert isinstance(constraint, Coupling)
    assert mean.cross is not None
    coef, outcome = solve_coupling(
        mean.gram[1],
        mean.cross,
        mean.gram[0],
        mean.mean[1],
        mean.mean[0],
        solver.reg,
        tol=constraint.tol,
        max_iterations=constraint.max_iterations,
        start=None if start is None else start.coef,
    )
    (gram_x, gram_y) = mean.gram
    return JointSolution(
        coef,
        np.eye(len(gram_x)),
        np.eye(len(gram_y)),
        np.diag(gram_x).copy(),
        np.diag(gram_y).copy(),
        centred=False,
        outcome=outcome,
        base=0.0,
    )


_SOLVERS: dict[str, Solve] = {
    "none": _in_closed_form,
    "normalized": _in_closed_form,
    "certified": _certified,
    "pointwise": _pointwise,
    "coupling": _coupling,
}

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
    def of(cls, held: MeanMoments, transform_x: Array, transform_y: Array) -> "HeldOut":
        """In the bases psi = T^T N."""
        assert held.cross is not None
        return cls(
            transform_x.T @ held.gram[0] @ transform_x,
            transform_y.T @ held.gram[1] @ transform_y,
            transform_y.T @ held.cross @ transform_x,
            transform_x.T @ held.mean[0],
            transform_y.T @ held.mean[1],
        )

    def loss(self, coef: Array) -> float:
        """The loss of H, shape (k_Y, k_X)."""
        joint = float((coef * self.cross).sum())
        product = float(self.mean_y @ coef @ self.mean_x)
        square = float(((self.gram_y @ coef @ self.gram_x) * coef).sum())
        return square - 2.0 * (joint - product)
