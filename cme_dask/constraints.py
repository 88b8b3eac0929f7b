"""Constraints on the density ratio g of a joint distribution, as strategies that solve for it.

``JointDistribution(constraint="certified")`` takes the defaults,
``JointDistribution(constraint=Certified(bounds="observed"))`` says more, and a frozen dataclass
derived from :class:`Constraint` is a constraint of one's own.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np

from cme_dask.config import COUPLING_REG
from cme_dask.errors import DataError, remedy
from cme_dask.numerics.basis import Basis
from cme_dask.numerics.certified import solve_certified, solve_paper_form
from cme_dask.numerics.coupling import CouplingProblem
from cme_dask.numerics.folds import distinct_in_random_order
from cme_dask.numerics.moments import Moments
from cme_dask.numerics.pointwise import solve_pointwise
from cme_dask.numerics.problem import (
    CONSTRAINTS,
    BasisBounds,
    Constraint,
    JointProblem,
    Regularization,
    SolverInfo,
)

Array = Any

BOUNDS = ("analytic", "sample", "observed")
FORMULATIONS = ("centred", "paper")
PROGRAM_SOLVERS = ("clarabel", "osqp")
LANDMARKS = ("pivots", "kmeans")

_RANGE_ROWS = 4096  # whose functions are held at once

__all__ = [
    "BasisBounds",
    "Certified",
    "Constraint",
    "Coupling",
    "JointProblem",
    "Normalized",
    "Pointwise",
    "SolverInfo",
    "Unconstrained",
    "parse",
]


class _Free(Constraint):
    """Constraints without inequalities: H = -A/D, entry by entry (joint paper, (38))."""

    linear: ClassVar[bool] = True
    bounds = "none"

    @property
    def closed(self) -> bool:
        """True."""
        return True

    def minimize(
        self, problem: JointProblem, bounds: BasisBounds, start: Array | None
    ) -> tuple[Array, SolverInfo]:
        """Return -A/D."""
        begin, coef = time.perf_counter(), -problem.linear / problem.quadratic
        residual = problem.newton_residual(coef)
        seconds = time.perf_counter() - begin
        # Without a ridge pruned directions show in the residual, which is no failure of the solver.
        return coef, SolverInfo(
            "closed form", "optimal", 0.0, residual, residual, 0.0, 0, seconds, np.inf
        )


@dataclass(frozen=True)
class Unconstrained(_Free):
    """No condition: H = -A/D, entry by entry (joint paper, (38))."""

    name: ClassVar[str] = "none"
    centred: ClassVar[bool] = False


@dataclass(frozen=True)
class Normalized(_Free):
    """E_Y g(x, Y) = 1 and E_X g(X, y) = 1 at every x and y (joint paper, (19))."""

    name: ClassVar[str] = "normalized"
    averages: ClassVar[bool] = True


@dataclass(frozen=True)
class Certified(Constraint):
    """Normalized, and g >= 0 by one inequality on the coefficients (joint paper, (20)).

    Parameters
    ----------
    bounds : {"analytic", "sample", "observed"}
        Bounds of the basis functions. ``analytic``: ``|psi| <= sqrt(sup k)``, so g >= 0 at every
        point, seen or not. ``sample``: the ranges of psi over the first 4,096 rows of the row
        sample; ``observed``: over all rows, in one more pass. These two allow more, and certify
        g >= 0 at those rows only.
    formulation : {"centred", "paper"}
        ``centred``: in the centred basis, where the solution is closed. ``paper``: (37) in the
        spectral basis, with the constraints (35), (36) as rows; another certificate, which takes a
        quadratic program.
    solver : {"clarabel", "osqp"}
        Of the paper's formulation.
    """

    bounds: str = "analytic"
    formulation: str = "centred"
    solver: str = "clarabel"
    name: ClassVar[str] = "certified"

    def __post_init__(self) -> None:
        _check_choice("bounds", self.bounds, BOUNDS)
        _check_choice("formulation", self.formulation, FORMULATIONS)
        _check_choice("solver", self.solver, PROGRAM_SOLVERS)
        if self.formulation == "paper" and self.bounds != "analytic":
            raise DataError(
                f"the paper's formulation takes analytic bounds, got bounds={self.bounds!r}"
            )

    @property
    def closed(self) -> bool:
        """Whether the formulation is the centred one."""
        return self.formulation == "centred"

    def bounds_of(self, bases: Sequence[Basis], rows: Sequence[Array]) -> BasisBounds:
        """Return suprema and, unless these are the bounds, values at the row sample."""
        sup = bases[0].bound, bases[1].bound
        if self.bounds == "analytic":
            return BasisBounds(sup)
        # With bounds that are observed, refits without a fold take those of the row sample.
        return BasisBounds(sup, (bases[0](rows[0][:_RANGE_ROWS]), bases[1](rows[1][:_RANGE_ROWS])))

    def problem(self, mean: Moments, reg: Regularization) -> JointProblem:
        """Return the problem in the centred bases, or in the spectral ones of the paper's form."""
        return JointProblem.of(mean, reg, centred=self.closed)

    def minimize(
        self, problem: JointProblem, bounds: BasisBounds, start: Array | None
    ) -> tuple[Array, SolverInfo]:
        """Minimise in closed form, or the paper's quadratic program by a solver.

        Raises
        ------
        DataError
            If the bounds are analytic and a kernel has none.
        """
        if self.closed:
            return solve_certified(problem, *self._weights(problem, bounds))
        mean_x, mean_y, kappa = problem.mean.means["x"], problem.mean.means["y"], _kappa(bounds)
        means = problem.transform_x.T @ mean_x, problem.transform_y.T @ mean_y
        return solve_paper_form(problem, *means, kappa, self.solver)

    def _weights(self, problem: JointProblem, bounds: BasisBounds) -> tuple[Array, Array]:
        """What a unit of G_ji > 0 and of G_ji < 0 can take from g, shapes (k_Y, k_X) or ().

        With psi in [a, b] and phi in [c, d], a, c <= 0 <= b, d: phi psi lies in [min(c b, d a),
        max(c a, d b)].
        """
        if self.bounds == "analytic":
            kappa = np.asarray(_kappa(bounds))
            return kappa, kappa
        x, y = bounds.ranges or _ranges(problem, bounds)
        (a, b), (c, d) = (np.stack([r[0].clip(max=0.0), r[1].clip(min=0.0)]) for r in (x, y))
        lowest = np.minimum(np.outer(c, b), np.outer(d, a))
        highest = np.maximum(np.outer(c, a), np.outer(d, b))
        return -lowest, highest


def _kappa(bounds: BasisBounds) -> float:
    """kappa_X kappa_Y, the bound of |psi_Y psi_X|."""
    x, y = bounds.sup
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


def _values(problem: JointProblem, bounds: BasisBounds) -> tuple[Array, Array]:
    """Functions of the problem at the rows or landmarks of the bounds, of x and of y."""
    assert bounds.values is not None
    x, y = bounds.values
    return x @ problem.transform_x, y @ problem.transform_y


def _ranges(problem: JointProblem, bounds: BasisBounds) -> tuple[Array, Array]:
    x, y = (np.stack([v.min(axis=0), v.max(axis=0)]) for v in _values(problem, bounds))
    return x, y


@dataclass(frozen=True)
class Pointwise(Constraint):
    """Normalized, and g >= 0 on landmarks x_s times landmarks y_t (joint paper, later version).

    Parameters
    ----------
    landmarks : int or (int, int)
        Their number, of x and y: the pivots first, then distinct rows of the row sample.
    tol : float
        Relative residual at which the iteration ends.
    max_iterations : int
        At most so many.
    """

    landmarks: int | tuple[int, int] = 200
    tol: float = 1e-6
    max_iterations: int = 20_000
    name: ClassVar[str] = "pointwise"
    reg_forms: ClassVar[tuple[str, ...]] = ("two-sided",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "landmarks", _one_or_pair("landmarks", self.landmarks))
        _check_iteration(self.tol, self.max_iterations)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of landmarks of x and of y."""
        return _check_pair("landmarks", self.landmarks)

    def bounds_of(self, bases: Sequence[Basis], rows: Sequence[Array]) -> BasisBounds:
        """Return the functions at the landmarks."""
        x, y = (
            basis(_landmarks(basis, part, count))
            for basis, part, count in zip(bases, rows, self.counts, strict=True)
        )
        return BasisBounds((bases[0].bound, bases[1].bound), (x, y))

    def minimize(
        self, problem: JointProblem, bounds: BasisBounds, start: Array | None
    ) -> tuple[Array, SolverInfo]:
        """Minimise by an interior point method or ADMM."""
        values_x, values_y = _values(problem, bounds)
        options: Any = {"tol": self.tol, "max_iterations": self.max_iterations}
        return solve_pointwise(problem, values_x, values_y, problem.reg, **options)


def _landmarks(basis: Basis, rows: Array, count: int) -> Array:
    """The pivots, then distinct rows, ``count`` in all."""
    pivots = np.asarray(basis.points)[:count]
    first, _ = distinct_in_random_order(rows)
    return np.concatenate([pivots, rows[first[: count - len(pivots)]]])


@dataclass(frozen=True)
class Coupling(Constraint):
    """Non-negative and normalized everywhere: g = b_Y^T C b_X with partitions of unity b.

    b(x) is the softmax of log k(x, p) over landmarks p, C >= 0, c_Y^T C = 1^T, C c_X = 1 with c the
    means of b.

    Parameters
    ----------
    landmarks : int, (int, int) or None
        Their number, of x and y; None: chosen by the held-out loss on the row sample. Pivots that
        are given to the estimator are the landmarks, and no other number goes with them.
    choice : {"pivots", "kmeans"}
        Landmarks are pivots, or centres of k-means on the row sample.
    tol : float
        Relative KKT residual at which the iteration ends.
    max_iterations : int
        At most so many.
    """

    landmarks: int | tuple[int, int] | None = None
    choice: str = "pivots"
    tol: float = 1e-6
    max_iterations: int = 20_000
    name: ClassVar[str] = "coupling"
    partition: ClassVar[bool] = True
    default_reg: ClassVar[float] = COUPLING_REG
    reg_forms: ClassVar[tuple[str, ...]] = ("two-sided",)

    def __post_init__(self) -> None:
        if self.landmarks is not None:
            object.__setattr__(self, "landmarks", _one_or_pair("landmarks", self.landmarks))
        _check_choice("choice", self.choice, LANDMARKS)
        _check_iteration(self.tol, self.max_iterations)

    @property
    def counts(self) -> tuple[int, int] | None:
        """Numbers of landmarks of x and of y, if they were given."""
        return None if self.landmarks is None else _check_pair("landmarks", self.landmarks)

    def problem(self, mean: Moments, reg: Regularization) -> CouplingProblem:
        """Return the problem of the partitions' own functions."""
        return CouplingProblem(mean, reg)

    def minimize(
        self, problem: CouplingProblem, bounds: BasisBounds, start: Array | None
    ) -> tuple[Array, SolverInfo]:
        """Minimise by ADMM and, where that is slow, an interior point method."""
        return problem.solve(tol=self.tol, max_iterations=self.max_iterations, start=start)


def parse(constraint: Any) -> Constraint:
    """Return a constraint from itself, its name, or its JSON form.

    Names are those of the package and of constraints that the program has defined.

    Raises
    ------
    DataError
        On anything else.
    """
    if isinstance(constraint, Constraint):
        return constraint
    if isinstance(constraint, str) and constraint in CONSTRAINTS:
        return CONSTRAINTS[constraint]()
    named = constraint.get("name") if isinstance(constraint, Mapping) else None
    if isinstance(named, str) and named in CONSTRAINTS:
        values = {key: value for key, value in constraint.items() if key != "name"}
        try:
            return CONSTRAINTS[named](**values)
        except TypeError as error:
            raise DataError(f"constraint {named!r}: {error}") from error
    raise DataError(
        f"constraint must be one of {', '.join(CONSTRAINTS)}, or made by cme_dask.constraints, got "
        f"{constraint!r}"
    )


def _check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise DataError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def _check_pair(name: str, value: Any) -> tuple[int, int]:
    pair = (value, value) if _is_count(value) else value
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(_is_count, pair)):
        raise DataError(f"{name} must be a positive integer, or one for x and one for y: {value!r}")
    return int(pair[0]), int(pair[1])


def _one_or_pair(name: str, value: Any) -> int | tuple[int, int]:
    """The same number or pair; files hold a pair as a list."""
    pair = _check_pair(name, value)
    return pair if isinstance(value, (tuple, list)) else pair[0]


def _check_iteration(tol: Any, max_iterations: Any) -> None:
    if isinstance(tol, bool) or not isinstance(tol, Real) or not 0.0 < float(tol) < 1.0:
        raise DataError(f"tol must lie between 0 and 1, exclusively, got {tol!r}")
    if not _is_count(max_iterations):
        raise DataError(f"max_iterations must be a positive integer, got {max_iterations!r}")
