"""The joint distribution from moments: its problem, constraints as strategies, its solution.

A :class:`Constraint` says what it needs beside the moments and minimises a :class:`JointProblem`;
:class:`JointSolution` holds the coefficients and :class:`SolverInfo` how good they are. The
constraints of the package are in :mod:`cme_dask.constraints`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from cme_dask.config import REG
from cme_dask.display import brief_repr
from cme_dask.errors import ConvergenceError, ConvergenceWarning, DataError, option, remedy, warn
from cme_dask.numerics.basis import Basis, eigenbasis
from cme_dask.numerics.moments import Moments, MomentSums, variances

# The quadratic program of the joint distribution, in bases that make it diagonal


Array = Any

REG_FORMS = ("two-sided", "single")


class Regularization(NamedTuple):
    """Ridge on H: ``two-sided`` D = (lam_Y + y)(lam_X + x)^T, ``single`` D = lam_Y lam_X^T + x.

    ``single`` is the paper's (34), where lambda is one number; ``two-sided`` damps every direction
    that either basis resolves badly.
    """

    y: float
    x: float
    form: str = "two-sided"

    @classmethod
    def parse(cls, reg: Any, form: str, constraint: "Constraint | None" = None) -> Self:
        """From ``r`` or ``(r_Y, r_X)``, in a form that a constraint takes.

        Raises
        ------
        DataError
            On anything else, on negatives, or if the constraint does not take this form.
        """
        if form not in REG_FORMS:
            raise DataError(f"reg_form must be one of {', '.join(REG_FORMS)}, got {form!r}")
        try:
            boolean = np.asarray(reg).dtype == bool
            values = np.array(np.nan) if boolean else np.asarray(reg, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.array(np.nan)
        refused = values.shape not in ((), (2,)) or not np.all(np.isfinite(values))
        if refused or np.any(values < 0):
            raise DataError(
                f"reg must be a non-negative number r or a pair (r_Y, r_X), got {reg!r}"
            )
        if form == "single" and values.shape == (2,):
            single = remedy("reg_form='single'", "--reg-form single")
            raise DataError(f"{single} takes one number for {option('reg')}, got {reg!r}")
        if constraint is not None and form not in constraint.reg_forms:
            raise DataError(
                f"the constraint {constraint.name!r} takes the "
                f"{' or '.join(constraint.reg_forms)} form of the ridge only, "
                f"{option('reg_form')} is {form!r}"
            )
        pair = np.broadcast_to(values, (2,))
        return cls(float(pair[0]), float(pair[1]), form)

    def denominator(self, lam_y: Array, lam_x: Array) -> Array:
        """D, shape (..., k_Y, k_X), of eigenvalues of shapes (..., k_Y) and (..., k_X)."""
        of_y, of_x = lam_y[..., :, None], lam_x[..., None, :]
        if self.form == "single":
            return of_y * of_x + self.x
        return (of_y + self.y) * (of_x + self.x)


@dataclass(frozen=True, eq=False)
class JointProblem:
    """Minimise <A, G> + <D, G^2> / 2, half of (34), over G: then g = 1 + psi_Y^T G psi_X.

    Attributes
    ----------
    mean, reg
        The moments and the ridge of the program.
    target
        S_YX, for uncentred bases S_YX - c_Y c_X^T, shape (m_Y, m_X).
    linear
        A = -T_Y^T target T_X, shape (k_Y, k_X).
    quadratic
        D > 0, see ``Regularization.denominator``, same shape.
    transform_x, transform_y
        T with psi = T^T N, shapes (m_X, k_X) and (m_Y, k_Y).
    eigenvalues_x, eigenvalues_y
        lam = E psi^2, shapes (k_X,) and (k_Y,).
    centred
        Whether E psi = 0: in the *centred basis*, the orthonormal complement of the means, the
        constraints c_Y^T H = 0 and H c_X = 0 of (19) hold by construction, to 1e-15.
    """

    mean: Moments
    reg: Regularization
    target: Array
    linear: Array
    quadratic: Array
    transform_x: Array
    transform_y: Array
    eigenvalues_x: Array
    eigenvalues_y: Array
    centred: bool

    base: ClassVar[float] = 1.0

    @classmethod
    def of(
        cls,
        mean: Moments,
        reg: Regularization,
        *,
        centred: bool,
        bases: Sequence[tuple[Array, Array]] | None = None,
    ) -> "JointProblem":
        """The program of these moments.

        Without a ridge, directions with lam <= eps m lam_max are rounding and are pruned.
        ``bases``: transforms and eigenvalues of x and of y, where they are known.
        """
        target = mean.blocks["y", "x"]
        if not centred:
            target = target - np.outer(mean.means["y"], mean.means["x"])
        if bases is None:
            bases = [
                eigenbasis(mean.blocks[v, v], mean.means[v] if centred else None) for v in "xy"
            ]
            if min(reg.y, reg.x) <= 0.0:
                least = [np.finfo(float).eps * len(lam) * lam.max(initial=0.0) for _, lam in bases]
                bases = [
                    (transform[:, lam > rounding], lam[lam > rounding])
                    for (transform, lam), rounding in zip(bases, least, strict=True)
                ]
        (transform_x, lam_x), (transform_y, lam_y) = bases
        return cls(
            mean,
            reg,
            target,
            -(transform_y.T @ target @ transform_x),
            reg.denominator(lam_y, lam_x),
            transform_x,
            transform_y,
            lam_x,
            lam_y,
            centred,
        )

    @property
    def free(self) -> Array:
        """The minimiser without further constraints, -A / D (38)."""
        return -self.linear / self.quadratic

    def objective(self, coef: Array) -> float:
        """<A, G> + <D, G^2> / 2."""
        return float((self.linear * coef).sum() + 0.5 * (self.quadratic * coef**2).sum())

    def newton_residual(self, coef: Array) -> float:
        """``|projected gradient|_F / |gradient at 0|_F`` in Newton coordinates.

        It does not use the eigenbases, so it also includes their error and the pruned directions.
        """
        mean, reg, newton = self.mean, self.reg, self.transform_y @ coef @ self.transform_x.T
        gram_x, gram_y = mean.blocks["x", "x"], mean.blocks["y", "y"]
        gradient = gram_y @ newton @ gram_x
        if reg.form == "single":
            gradient = gradient + reg.x * newton
        else:
            ridge = reg.x * (gram_y @ newton + reg.y * newton)
            gradient = gradient + reg.y * newton @ gram_x + ridge
        both = [gradient - self.target, self.target]
        if self.centred:  # without the components along the means
            x, y = (c / (np.linalg.norm(c) or 1.0) for c in (mean.means["x"], mean.means["y"]))
            both = [m - np.outer(m @ x, x) for m in both]
            both = [m - np.outer(y, y @ m) for m in both]
        residual, scale = (float(np.linalg.norm(m)) for m in both)
        return residual / scale if scale else 0.0


# Constraints: what they need beside the moments, and how they solve


class BasisBounds(NamedTuple):
    """Bounds of the basis functions, which a constraint may need beside the moments.

    Attributes
    ----------
    sup
        ``sup |N_i|`` of x and of y, None if infinite (``NewtonBasis.bound``).
    values
        N of x and of y at rows of the row sample or at landmarks, shapes (s, m); where needed.
    ranges
        Lowest and highest values of the centred functions of x and of y, shapes (2, k_X) and
        (2, k_Y), where a pass has observed them.
    """

    sup: tuple[float | None, float | None] = (None, None)
    values: tuple[Array, Array] | None = None
    ranges: tuple[Array, Array] | None = None


class Problem(Protocol):
    """What a constraint minimises: H in bases T_X, T_Y of g = base + (T_Y^T N_Y)^T H (T_X^T N_X).

    :class:`JointProblem` is the one of bases that diagonalise the quadratic form.
    """

    base: ClassVar[float]

    @property
    def transform_x(self) -> Array:
        """T_X, shape (m_X, k_X)."""

    @property
    def transform_y(self) -> Array:
        """T_Y, shape (m_Y, k_Y)."""

    @property
    def eigenvalues_x(self) -> Array:
        """E psi^2 of x, shape (k_X,)."""

    @property
    def eigenvalues_y(self) -> Array:
        """E psi^2 of y, shape (k_Y,)."""

    @property
    def centred(self) -> bool:
        """Whether both bases have mean zero."""


@dataclass(frozen=True)
class Constraint(ABC):
    """A condition on g = dP / d(P_X x P_Y), and how the coefficients are computed under it.

    Subclasses are frozen dataclasses whose fields are JSON values, with a ``name`` of their own and
    the method :meth:`minimize`; models record both and find the class again by its name.

    Attributes
    ----------
    name
        The name in models, job files and on the command line.
    default_reg
        The ridge, unless it is given or learned.
    reg_forms
        Forms of the ridge that the constraint takes.
    centred
        Whether the problem is in centred bases, where normalization holds by construction.
    closed
        Whether solving takes no iterations, so that trial solutions are cheap.
    linear
        Whether solutions are linear in the moments of functions: then laws can be calibrated and
        residuals can be a reference.
    averages
        Whether kernels that were learned are averaged: the search looks at such solutions.
    bounds
        Which bounds of the basis functions :meth:`minimize` gets: ``"none"``, ``"analytic"`` ones
        or, beside these, ``"sample"``, values at rows of the row sample, without which there is no
        solution, or ``"observed"``, the ranges of the centred functions over all rows, in one more
        pass.
    partition
        Whether the bases are partitions of unity. Such a constraint has the numbers of landmarks of
        x and of y, ``counts``, which are None where the held-out loss on the row sample decides,
        and a ``choice`` of landmarks, ``"pivots"`` or ``"kmeans"``.
    """

    name: ClassVar[str]
    default_reg: ClassVar[float] = REG
    reg_forms: ClassVar[tuple[str, ...]] = REG_FORMS
    centred: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    partition: ClassVar[bool] = False
    bounds = "analytic"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        name = vars(cls).get("name")
        if name is None:
            return
        other = CONSTRAINTS.get(name)
        if other is not None and _package(other) == "cme_dask" != _package(cls):
            raise DataError(f"{cls.__name__}: {name!r} is the name of a constraint of cme_dask")
        CONSTRAINTS[name] = cls

    @property
    def closed(self) -> bool:
        """Whether solving takes no iterations."""
        return False

    def bounds_of(self, bases: Sequence[Basis], rows: Sequence[Array]) -> BasisBounds:
        """Return the bounds or values of the bases that ``minimize`` gets.

        Parameters
        ----------
        bases
            Of x and of y.
        rows
            Rows of x and of y in random order, shapes (n, d).
        """
        return BasisBounds((bases[0].bound, bases[1].bound))

    def problem(self, mean: Moments, reg: Regularization) -> Problem:
        """Return the problem of these moments."""
        return JointProblem.of(mean, reg, centred=self.centred)

    @abstractmethod
    def minimize(
        self, problem: Any, bounds: BasisBounds, start: Array | None
    ) -> "tuple[Array, SolverInfo]":
        """Minimise under the constraint.

        Parameters
        ----------
        problem
            From :meth:`problem`.
        bounds
            From :meth:`bounds_of`, with the ranges if the constraint needs them.
        start
            Coefficients of a similar problem, from which iterations may start, or None.

        Returns
        -------
        coef : (k_Y, k_X)
        info : SolverInfo
            Residuals of the coefficients, measured on the returned ones.

        Raises
        ------
        DataError
            If the kernels or the ridge don't fit the constraint.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, see :func:`cme_dask.constraints.parse`."""
        return {"name": self.name, **asdict(self)}


CONSTRAINTS: dict[str, type[Constraint]] = {}
"""Constraints by name: those of the package and those that a program has defined."""


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


# Iterations on explicit state


State = TypeVar("State")


class Iteration(Protocol[State]):
    """A method of steps from one state to the next."""

    def init(self) -> State:
        """Return the first state."""

    def step(self, state: State) -> State:
        """Return the next state."""

    def done(self, state: State) -> bool:
        """Whether this state meets the tolerance, or no step improves it."""


def iterate(method: Iteration[State], most: int) -> tuple[State, int]:
    """Return the state after the last step, and the number of steps, which is ``most`` at most."""
    state, steps = method.init(), 0
    while steps < most and not method.done(state):
        state, steps = method.step(state), steps + 1
    return state, steps


# How good a solution is, measured on what the solver returned


class SolverInfo(NamedTuple):
    """How good a solution is.

    Attributes
    ----------
    solver
        ``"closed form"``, ``"interior point"``, ``"ADMM"``, ``"Clarabel"``, ``"OSQP"``.
    status
        ``"optimal"``, or another status of the solver.
    primal_residual
        Largest violation of a constraint, absolutely.
    dual_residual
        Norm of the gradient of the Lagrangian, relative to the gradient at G = 0.
    kkt_residual
        The largest of both and of the complementarity, relative to the scale of the problem; each
        solver states it.
    gap
        ``(primal - dual objective) / max(1, |primal objective|)``.
    iterations
        Of the solver; 0 for closed forms.
    seconds
        Time that the solver took.
    tol
        The tolerance of the KKT residual.
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

    @classmethod
    def of_closed_form(cls) -> "SolverInfo":
        """Of a formula that is evaluated."""
        return cls("closed form", "optimal", 0.0, 0.0, 0.0, 0.0, 0, 0.0, np.inf)

    @property
    def converged(self) -> bool:
        """Whether the KKT residual is within the tolerance; NaN is not."""
        return self.kkt_residual <= self.tol

    def check(self, convergence: str) -> None:
        """Raise or warn where the tolerance was missed.

        Parameters
        ----------
        convergence
            ``"raise"`` or ``"warn"``.

        Raises
        ------
        ConvergenceError
            If the tolerance was missed.
        """
        if self.kkt_residual <= self.tol:
            return
        message = (
            f"{self.solver} ended with KKT residual {self.kkt_residual:.1e} after "
            f"{self.iterations} iterations ({self.status}), the tolerance is {self.tol:.1e}: allow "
            "more iterations, raise tol or reg, or lower the rank"
        )
        if convergence == "raise":
            keeps = remedy("; convergence='warn' keeps such a solution", "")
            raise ConvergenceError(message + keeps)
        warn(message, ConvergenceWarning)


# The solution: g = dP / d(P_X x P_Y) = base + psi_Y^T H psi_X


class JointSolution(NamedTuple):
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

    def __repr__(self) -> str:
        return brief_repr(self)

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

    @classmethod
    def in_newton_bases(cls, coef: Array) -> "JointSolution":
        """The closed form of a normalized density ratio with H in the Newton bases themselves."""
        transforms = (np.eye(coef.shape[1]), np.eye(coef.shape[0]))
        scales = (np.ones(coef.shape[1]), np.ones(coef.shape[0]))
        return cls(coef, *transforms, *scales, True, SolverInfo.of_closed_form())

    @property
    def newton_coef(self) -> Array:
        """H in the Newton bases of y and of x, shape (m_Y, m_X)."""
        return np.asarray(self.transform_y @ self.coef @ self.transform_x.T)

    def shrunk(self, share: float) -> "JointSolution":
        """With ``share`` times its h = g - base."""
        return self._replace(coef=share * self.coef)

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

    def answer(self, mean: Moments, given: int, *, newton: bool = False) -> tuple[Array, Array]:
        """Constants and slopes of E[f | z] = constant + psi(z)^T slope for f of the other variable.

        Parameters
        ----------
        mean
            The moments.
        given
            Number of the variable of the condition: 0 for E[f(Y) | x], 1 for E[f(X) | y].
        newton
            Whether slopes are those on the Newton basis, in the place of psi.

        Returns
        -------
        constant : (q,)
        slope : (k, q), or (m, q) on the Newton basis

        Notes
        -----
        With base 1 the constant is E f and the slope H^T E[psi_Y f^T] (or H E[psi_X f^T]). With
        base 0, psi^T C^T E[b f^T] = s + psi^T C^T E[b (f - s)^T] for any shift s, since C^T c = 1.
        """
        other = "yx"[given]
        coef = self.coef.T if given == 0 else self.coef
        transforms = self.transform_y, self.transform_x
        transform, own = transforms[given], transforms[1 - given]
        slope = coef @ (transform.T @ mean.blocks[other, f"f({other})"])
        if self.base != 0.0 and not self.centred:  # a centred basis has mean zero: no shift
            slope = slope + np.outer(coef @ (transform.T @ mean.means[other]), mean.shifts[other])
        constant = mean.shifts[other] if self.base == 0.0 else mean.function_means(other)
        return constant, own @ slope if newton else slope


# Jackknife replicates and held-out errors, from moments by fold and without another pass


Answer = tuple[Array, Array]
"""Constant and slope of E[f | z] = constant + N(z)^T slope, shapes (q,) and (m, q)."""


class Replicates(NamedTuple):
    """Answers refitted without one fold each, and their errors on that fold.

    Attributes
    ----------
    constant, slope
        E[f | z] = constant + N(z)^T slope without fold f, shapes (F, q) and (F, m, q).
    error
        Held-out mean squared error of E[f | z], mean over the folds by weight, shape (q,).
    baseline
        The same for the other folds' mean of f, shape (q,).
    """

    constant: Array
    slope: Array
    error: Array
    baseline: Array

    def __repr__(self) -> str:
        return brief_repr(self)

    @property
    def skill(self) -> Array:
        """1 - error / baseline, shape (q,): for an indicator f, the Brier skill score."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1.0 - self.error / self.baseline


def replicates(
    refits: Iterable[tuple[Moments, Moments, Sequence[Answer]]], moments: MomentSums
) -> tuple[Replicates, Replicates]:
    """What refits without one fold each answer, given x and given y, and their errors there.

    E[f | z] = a + N(z)^T b is linear in N, so its squared error over the held-out fold follows from
    that fold's E[N N^T], E[N f] and E f^2: exact, and no row is read again.

    Parameters
    ----------
    refits
        For each fold the means over the others, over it, and the constant a and slope b that the
        others give: given x, and given y if that is answered as well.
    moments
        By fold.
    """
    shares = []
    parts: tuple[list[Any], list[Any]] = ([], [])
    for rest, held, answers in refits:
        shares.append(held.weight)
        for given, (constant, slope) in enumerate(answers):
            z, other = "xy"[given], "yx"[given]
            error = held.squared_error(z, other, constant, slope)
            baseline = held.squared_error(z, other, rest.function_means(other), 0.0 * slope)
            baseline[variances((rest, held), other) == 0.0] = 0.0
            parts[given].append((constant, slope, error, baseline))
    share, result = np.array(shares) / np.sum(shares), []
    for given, each in enumerate(parts):
        m, q = moments.ranks[given], len(moments.shifts[1 - given])
        if each:
            constant, slope, error, baseline = (np.stack(p) for p in zip(*each, strict=True))
            result.append(Replicates(constant, slope, share @ error, share @ baseline))
        else:
            unknown = np.full(q, np.nan)
            result.append(Replicates(np.zeros((0, q)), np.zeros((0, m, q)), unknown, unknown))
    return result[0], result[1]


# From moments to the solution


class JointSolver(NamedTuple):
    """From moments to the solution of the fit, under a constraint.

    Attributes
    ----------
    constraint
        The condition on g.
    reg
        The ridge.
    bounds
        What the constraint needs to know of the basis functions.
    """

    constraint: Constraint
    reg: Regularization
    bounds: BasisBounds = BasisBounds()

    def on(self, bases: Sequence[Basis], rows: Sequence[Array]) -> "JointSolver":
        """The solver for bases of x and of y, with what the constraint needs to know of them.

        Parameters
        ----------
        bases
            Of the moments.
        rows
            Random rows of x and of y.
        """
        if self.constraint.bounds == "none":
            return self
        return self._replace(bounds=self.constraint.bounds_of(bases, rows))

    def solve(
        self, mean: Moments, start: JointSolution | None = None, convergence: str | None = None
    ) -> JointSolution:
        """Solve, and check the tolerance where ``convergence`` says what a miss means.

        Parameters
        ----------
        mean
            Moments.
        start
            A solution of a similar problem, from which iterations start.
        convergence
            ``"raise"`` or ``"warn"`` where the solution misses its tolerance; default neither.

        Raises
        ------
        ConvergenceError
            If the solution missed its tolerance, and ``convergence`` is ``"raise"``.
        DataError
            If the kernels or the ridge don't fit the constraint.
        """
        problem = self.constraint.problem(mean, self.reg)
        first = None if start is None else start.coef
        coef, info = self.constraint.minimize(problem, self.bounds, first)
        if convergence is not None:
            info.check(convergence)
        return JointSolution.of(problem, coef, info)
