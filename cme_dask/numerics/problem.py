"""The quadratic program of the joint distribution, and what solvers report."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cme_dask.constraints import Certified, Constraint, Pointwise
from cme_dask.errors import ConvergenceError, ConvergenceWarning, DataError, option, remedy
from cme_dask.numerics.basis import Basis, eigenbasis
from cme_dask.numerics.folds import distinct_in_random_order
from cme_dask.numerics.moments import MeanMoments

# The quadratic program of the joint distribution, in bases that make it diagonal


Array = Any

REG_FORMS = ("two-sided", "single")


@dataclass(frozen=True)
class Regularization:
    """Ridge on H: ``two-sided`` D = (lam_Y + y)(lam_X + x)^T, ``single`` D = lam_Y lam_X^T + x.

    ``single`` is the paper's (34), where lambda is one number; ``two-sided`` damps every direction
    that either basis resolves badly.
    """

    y: float
    x: float
    form: str = "two-sided"

    @classmethod
    def parse(cls, reg: Any, form: str) -> "Regularization":
        """From ``r`` or ``(r_Y, r_X)``; raises DataError on anything else or on negatives."""
        if form not in REG_FORMS:
            raise DataError(f"reg_form must be one of {', '.join(REG_FORMS)}, got {form!r}")
        try:
            values = np.asarray(reg, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.array(np.nan)
        if values.shape not in ((), (2,)) or not np.all(np.isfinite(values)) or np.any(values < 0):
            raise DataError(
                f"reg must be a non-negative number r or a pair (r_Y, r_X), got {reg!r}"
            )
        if form == "single" and values.shape == (2,):
            single = remedy("reg_form='single'", "--reg-form single")
            raise DataError(f"{single} takes one number for {option('reg')}, got {reg!r}")
        pair = np.broadcast_to(values, (2,))
        return cls(float(pair[0]), float(pair[1]), form)

    def denominator(self, lam_y: Array, lam_x: Array) -> Array:
        """D, shape (len(lam_y), len(lam_x))."""
        if self.form == "single":
            return np.outer(lam_y, lam_x) + self.x
        return np.outer(lam_y + self.y, lam_x + self.x)

    def quadratic(self, gram_y: Array, coef: Array, gram_x: Array) -> Array:
        """The gradient of the quadratic term at ``coef`` in Newton coordinates."""
        if self.form == "single":
            return gram_y @ coef @ gram_x + self.x * coef
        return (
            gram_y @ coef @ gram_x
            + self.y * coef @ gram_x
            + self.x * (gram_y @ coef + self.y * coef)
        )


@dataclass(frozen=True, eq=False)
class JointProblem:
    """Minimise <A, G> + <D, G^2> / 2, half of (34), over G: then g = 1 + psi_Y^T G psi_X.

    Attributes
    ----------
    linear
        A = -T_Y^T S_YX T_X (for uncentred bases of S_YX - c_Y c_X^T), shape (k_Y, k_X).
    quadratic
        D > 0, see :meth:`Regularization.denominator`, same shape.
    transform_x, transform_y
        T with psi = T^T N, shapes (m_X, k_X) and (m_Y, k_Y).
    eigenvalues_x, eigenvalues_y
        lam = E psi^2, shapes (k_X,) and (k_Y,).
    centred
        Whether E psi = 0: in the *centred basis*, the orthonormal complement of the means, the
        constraints c_Y^T H = 0 and H c_X = 0 of (19) hold by construction, to 1e-15.
    """

    linear: Array
    quadratic: Array
    transform_x: Array
    transform_y: Array
    eigenvalues_x: Array
    eigenvalues_y: Array
    centred: bool

    @classmethod
    def of(cls, mean: MeanMoments, reg: Regularization, *, centred: bool) -> "JointProblem":
        """The program of these moments.

        Without a ridge, directions with lam <= eps m lam_max are rounding and are pruned.
        """
        (gram_x, gram_y), (mean_x, mean_y) = mean.gram, mean.mean
        transform_x, lam_x = _pruned(*eigenbasis(gram_x, mean_x if centred else None), reg)
        transform_y, lam_y = _pruned(*eigenbasis(gram_y, mean_y if centred else None), reg)
        return cls(
            -(transform_y.T @ _target(mean, centred) @ transform_x),
            reg.denominator(lam_y, lam_x),
            transform_x,
            transform_y,
            lam_x,
            lam_y,
            centred,
        )

    def ridged(self, reg: Regularization) -> "JointProblem":
        """The same program with another positive ridge: the eigenbases stay."""
        return replace(self, quadratic=reg.denominator(self.eigenvalues_y, self.eigenvalues_x))

    @property
    def free(self) -> Array:
        """The minimiser without further constraints, -A / D (38)."""
        return -self.linear / self.quadratic

    def objective(self, coef: Array) -> float:
        """<A, G> + <D, G^2> / 2."""
        return float((self.linear * coef).sum() + 0.5 * (self.quadratic * coef**2).sum())

    def newton_residual(self, mean: MeanMoments, reg: Regularization, coef: Array) -> float:
        """|projected gradient|_F / |gradient at 0|_F in Newton coordinates.

        It does not use the eigenbases, so it also sees their error and what was pruned.
        """
        centres = mean.mean if self.centred else (None, None)
        target = _target(mean, self.centred)
        newton = self.transform_y @ coef @ self.transform_x.T
        gradient = reg.quadratic(mean.gram[1], newton, mean.gram[0]) - target
        both = [_off(centres[1], _off(centres[0], m, 1), 0) for m in (gradient, target)]
        residual, scale = (float(np.linalg.norm(m)) for m in both)
        return residual / scale if scale else 0.0


def _target(mean: MeanMoments, centred: bool) -> Array:
    assert mean.cross is not None
    return mean.cross if centred else mean.cross - np.outer(mean.mean[1], mean.mean[0])


def _pruned(transform: Array, lam: Array, reg: Regularization) -> tuple[Array, Array]:
    if min(reg.y, reg.x) > 0.0:
        return transform, lam
    keep = lam > np.finfo(np.float64).eps * len(lam) * lam.max(initial=0.0)
    return transform[:, keep], lam[keep]


def _off(centre: Array | None, matrix: Array, axis: int) -> Array:
    """Remove the component along ``centre`` from the given axis."""
    if centre is None or not np.any(centre):
        return matrix
    unit = centre / np.linalg.norm(centre)
    if axis == 0:
        return matrix - np.outer(unit, unit @ matrix)
    return matrix - np.outer(matrix @ unit, unit)


# What constraints need to know of basis functions beside their moments


_RANGE_ROWS = 4096  # whose functions are held at once


@dataclass(frozen=True, eq=False)
class Geometry:
    """What a constraint needs to know of the basis functions beside their moments.

    Attributes
    ----------
    bounds
        sup |N_i| of x and of y, None if infinite (:attr:`NewtonBasis.bound`).
    newton
        N of x and of y at rows of the row sample or at landmarks, shapes (s, m); where needed.
    ranges
        Lowest and highest values of the centred functions of x and of y, shapes (2, k_X) and
        (2, k_Y), where they were observed in a pass.
    """

    bounds: tuple[float | None, float | None] = (None, None)
    newton: tuple[Array, Array] | None = None
    ranges: tuple[Array, Array] | None = None

    @classmethod
    def of(
        cls, constraint: Constraint, bases: Sequence[Basis], rows: Sequence[Array]
    ) -> "Geometry":
        """What this constraint needs to know of these bases.

        Parameters
        ----------
        constraint
            What is asked of g.
        bases
            Of x and of y.
        rows
            Rows of x and of y in random order, shapes (n, d).
        """
        newton = None
        if isinstance(constraint, Certified) and constraint.bounds != "analytic":
            newton = bases[0](rows[0][:_RANGE_ROWS]), bases[1](rows[1][:_RANGE_ROWS])
        elif isinstance(constraint, Pointwise):
            landmarks = [
                _landmarks(*each) for each in zip(bases, rows, constraint.counts, strict=True)
            ]
            newton = bases[0](landmarks[0]), bases[1](landmarks[1])
        return cls((bases[0].bound, bases[1].bound), newton)


def _landmarks(basis: Basis, rows: Array, count: int) -> Array:
    """The pivots, then distinct rows, ``count`` in all."""
    pivots = np.asarray(basis.points)[:count]
    first, _ = distinct_in_random_order(rows)
    return np.concatenate([pivots, rows[first[: count - len(pivots)]]])


NOTHING = Geometry()
"""What constraints without inequalities need to know."""

# What a solver found, measured on what it returned and never taken from its own word


@dataclass(frozen=True)
class Outcome:
    """How good a solution is.

    Attributes
    ----------
    solver
        ``"closed form"``, ``"interior point"``, ``"ADMM"``, ``"Clarabel"``, ``"OSQP"``.
    status
        ``"optimal"``, or what the solver said instead.
    primal_residual
        Largest violation of a constraint, absolutely.
    dual_residual
        |gradient of the Lagrangian|, relative to the gradient at G = 0.
    kkt_residual
        The largest of both and of the complementarity, relative to what the problem can gain; each
        solver says how.
    gap
        (primal - dual objective) / max(1, |primal objective|).
    iterations
        Of the solver; 0 for closed forms.
    seconds
        Time that the solver took.
    tol
        The KKT residual that was asked for.
    """

    solver: str
    status: str
    primal_residual: float
    dual_residual: float
    kkt_residual: float
    gap: float
    iterations: int
    seconds: float
    tol: float

    @property
    def converged(self) -> bool:
        """Whether the KKT residual is what was asked for; NaN is not."""
        return self.kkt_residual <= self.tol

    def check(self, convergence: str) -> None:
        """Let nothing pass that is worse than it looks.

        Parameters
        ----------
        convergence
            ``"raise"`` or ``"warn"``.

        Raises
        ------
        ConvergenceError
            If the tolerance was missed.
        """
        if self.converged:
            return
        message = (
            f"{self.solver} ended with KKT residual {self.kkt_residual:.1e} after "
            f"{self.iterations} iterations ({self.status}), {self.tol:.1e} was asked for: allow "
            "more iterations, raise tol or reg, or lower the rank"
        )
        if convergence == "raise":
            keeps = remedy("; convergence='warn' keeps such a solution", "")
            raise ConvergenceError(message + keeps)
        warnings.warn(message, ConvergenceWarning, stacklevel=3)
