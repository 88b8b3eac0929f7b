"""Non-negative by one inequality: in closed form, and as the paper prints it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from cme_dask.numerics.problem import JointProblem, SolverInfo

# Non-negative by one inequality (joint paper, (20)): a weighted l1 ball, in closed form


Array = Any

_TOL = 1e-10


def solve_certified(
    problem: JointProblem, weight_plus: Array, weight_minus: Array
) -> tuple[Array, SolverInfo]:
    r"""Minimise <A, G> + <D, G^2> / 2 subject to <w+, G+> + <w-, G-> <= 1.

    Where w+ is what a unit of G_ji > 0 can take from g, and w- of G_ji < 0, the left side bounds
    1 - g everywhere, so g >= 0. The sign of G is that of -A, the multiplier t >= 0 of the
    inequality is one number, and

    .. math:: G = -\mathrm{sign}(A) \max(|A| - t w, 0) / D.

    The left side falls in t, piecewise linearly with breaks at |A| / w: sorting them gives t.

    Parameters
    ----------
    problem
        A and D, in the centred basis; shapes (k_Y, k_X).
    weight_plus, weight_minus
        w+ and w-, non-negative, of the same shape or numbers.

    Returns
    -------
    coef : (k_Y, k_X)
    info : SolverInfo
        ``kkt_residual`` is the largest violation of stationarity, relative to max |A|, and of
        the inequality and its complementarity.
    """
    begin = time.perf_counter()
    linear, quadratic = problem.linear, problem.quadratic
    weight = np.where(linear < 0.0, weight_plus, weight_minus)
    magnitude, t = _shrunk(np.abs(linear), weight, quadratic)
    coef = np.copysign(magnitude, -linear)
    seconds = time.perf_counter() - begin
    return coef, _info(problem, coef, weight, t, seconds)


def _shrunk(size: Array, weight: Array, quadratic: Array) -> tuple[Array, float]:
    """|G| = max(size - t w, 0) / D and t with <w, |G|> = 1, or t = 0 if that is less without it.

    Where D is small, |G| is what remains of a cancellation: it is written with differences of
    breaks, which are positive, so that <w, |G|> = 1 holds to rounding whatever the range of D.
    """
    magnitude = size / quadratic
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        breaks = size / weight
    bounding = np.isfinite(breaks) & (weight > 0.0)
    if (weight * magnitude)[bounding].sum() <= 1.0:
        return magnitude, 0.0
    magnitude[bounding] = 0.0
    # Alone, an entry would need t = its break - D / w^2; with the others t is no less, and those
    # with smaller breaks, most of them, are zero.
    bounding[bounding] = _reaching(breaks[bounding], weight[bounding], quadratic[bounding])
    breaks, w, d = breaks[bounding], weight[bounding], quadratic[bounding]
    order = np.argsort(breaks)[::-1]
    slope = np.cumsum((w * w / d)[order])  # -d/dt of the left side below each break
    drop = -np.diff(breaks[order], append=0.0)
    left = np.cumsum(drop * slope)  # the left side at the next break, and at t = 0 at last
    last = min(int(np.searchsorted(left, 1.0)), len(left) - 1)
    pivot = breaks[order[last]]
    below = (1.0 - (left[last - 1] if last else 0.0)) / slope[last]
    magnitude[bounding] = np.maximum((breaks - pivot) + below, 0.0) * w / d
    return magnitude, max(float(pivot - below), 0.0)


def _reaching(breaks: Array, weight: Array, quadratic: Array) -> Array:
    """Entries whose breaks are not below what t is at least."""
    with np.errstate(over="ignore"):
        return breaks >= (breaks - quadratic / weight / weight).max()


def _info(
    problem: JointProblem, coef: Array, weight: Array, t: float, seconds: float
) -> SolverInfo:
    linear, quadratic = problem.linear, problem.quadratic
    scale = float(np.abs(linear).max(initial=0.0)) or 1.0
    gradient = linear + quadratic * coef
    # Stationarity: gradient = -t w sign(G) where G is not zero, and within [-t w, t w] where it is.
    active = coef != 0.0
    stationarity = np.where(
        active,
        np.abs(gradient + t * weight * np.sign(coef)),
        np.maximum(np.abs(gradient) - t * weight, 0.0),
    )
    left = float((weight * np.abs(coef)).sum())
    primal = max(left - 1.0, 0.0)
    dual = float(stationarity.max(initial=0.0)) / scale
    complementarity = t * abs(left - 1.0) / scale
    value = problem.objective(coef)
    bound = -t - float((np.maximum(np.abs(linear) - t * weight, 0.0) ** 2 / quadratic).sum()) / 2
    residual = max(primal, dual, complementarity)
    return SolverInfo(
        solver="closed form",
        status="optimal" if residual <= _TOL else "inaccurate",
        primal_residual=primal,
        dual_residual=dual,
        kkt_residual=residual,
        gap=(value - bound) / max(1.0, abs(value)),
        iterations=0,
        seconds=seconds,
        tol=_TOL,
    )


# The certificate as the joint paper prints it, (37), by a quadratic programming solver


_TOL_PAPER_FORM = 1e-6
_EPS = 1e-9  # tolerance of the solvers
_MAX_ITERATIONS = {"Clarabel": 200, "OSQP": 50_000}


@dataclass(frozen=True, eq=False)
class Program:
    """Minimise x^T P x / 2 + q^T x with the first rows of A x zero, and the others at most b.

    Attributes
    ----------
    quadratic, linear
        P, diagonal, and q.
    rows
        A, compressed by columns.
    equalities
        Number of rows that shall be zero.
    bound
        b of the last row; all others have zero.
    """

    quadratic: Any
    linear: Array
    rows: Any
    equalities: int
    bound: float


@dataclass(frozen=True, eq=False)
class Answer:
    """What a solver says: status, x, multipliers of the rows, iterations."""

    status: str
    x: Array
    multipliers: Array
    iterations: int


def solve_paper_form(
    problem: JointProblem,
    mean_x: Array,
    mean_y: Array,
    kappa: float,
    solver: str,
    *,
    seconds: float | None = None,
) -> tuple[Array, SolverInfo]:
    r"""Minimise <A, H> + <D, H^2> / 2 subject to normalization and one inequality for g >= 0.

    .. math:: c_Y^T H = 0, \quad H c_X = 0, \quad \kappa \sum_{ji} |H_{ji}| \le 1,

    (35), (36) and (20), in the spectral basis, with |psi_Y psi_X| <= kappa. Unlike the program in
    the centred basis it has no closed form, and its optimum is another one: both certify g >= 0.
    As printed, (35) and (36) have exchanged left sides, and (37) halves D, against (34).

    The solvers take (H, T) with -T <= H <= T, kappa sum T <= 1: fewer iterations than H^+ and H^-.

    Parameters
    ----------
    problem
        A and D, in the spectral basis; shapes (k_Y, k_X).
    mean_x, mean_y
        c = E psi, shapes (k_X,) and (k_Y,).
    kappa
        Bound of |psi_Y psi_X| over all pairs of functions and points.
    solver
        ``"clarabel"`` or ``"osqp"``.
    seconds
        Limit of the solver's time.

    Returns
    -------
    H : (k_Y, k_X)
        Shrunk onto kappa sum |H| <= 1 where the solver left it outside; zero where it has none.
    info : SolverInfo
        ``kkt_residual`` is measured on H with the solver's multipliers: the largest violation of
        the constraints; of stationarity, relative to max |A|; and of complementarity, relative to
        max |A| / kappa, the most that <A, H> can be.
    """
    begin = time.perf_counter()
    shape = problem.linear.shape
    scale = (float(np.abs(problem.linear).max(initial=0.0)) or 1.0) / kappa
    # Both solvers end sooner if H, the objective and the long row have similar sizes.
    unit = 1.0 / (kappa * np.sqrt(problem.linear.size))
    normal, retained = _normalization(mean_x, mean_y)
    program = _program(problem, normal, kappa, unit, scale)
    name, run = _SOLVERS[solver]
    answer = run(program, seconds)
    coef = unit * answer.x[: problem.linear.size].reshape(shape)
    multipliers = np.zeros(sum(shape))
    multipliers[retained] = answer.multipliers[: len(retained)] * (scale / unit)
    t = max(float(answer.multipliers[-1]) * scale, 0.0)
    if not all(np.all(np.isfinite(values)) for values in (coef, multipliers, t)):
        coef, multipliers, t = np.zeros(shape), np.zeros(sum(shape)), 0.0
    coef = coef / max(1.0, kappa * float(np.abs(coef).sum()))
    spent = time.perf_counter() - begin
    slope = np.outer(mean_y, multipliers[: shape[1]]) + np.outer(multipliers[shape[1] :], mean_x)
    violation = max(
        float(np.abs(mean_y @ coef).max(initial=0.0)), float(np.abs(coef @ mean_x).max(initial=0.0))
    )
    measured = _measured(problem, coef, slope, kappa, t, violation)
    return coef, SolverInfo(
        name, answer.status, *measured, answer.iterations, spent, _TOL_PAPER_FORM
    )


def _normalization(mean_x: Array, mean_y: Array) -> tuple[Any, Array]:
    """Rows of c_Y^T H = 0 and H c_X = 0 on vec H, and which of all of them these are.

    c_Y^T H c_X = 0 follows from either: one row is redundant, and without a mean all of its rows.
    """
    k_x, k_y = len(mean_x), len(mean_y)
    rows = sparse.vstack(
        [
            sparse.kron(sparse.csr_array(mean_y[None]), sparse.eye_array(k_x)),
            sparse.kron(sparse.eye_array(k_y), sparse.csr_array(mean_x[None])),
        ],
        format="csr",
    )
    needed = np.repeat([np.any(mean_y), np.any(mean_x)], [k_x, k_y])
    if np.all(needed):
        needed[np.argmax(np.abs(mean_x))] = False
    retained = np.flatnonzero(needed)
    return rows[retained], retained


def _program(
    problem: JointProblem, normal: Any, kappa: float, unit: float, scale: float
) -> Program:
    """The program of (H, T) / unit, with the objective divided by ``scale``."""
    n = problem.linear.size
    eye, zeros = sparse.eye_array(n), np.zeros(n)
    ball = sparse.csr_array(np.full((1, n), kappa * unit))
    return Program(
        sparse.diags_array(np.r_[problem.quadratic.ravel() * (unit * unit / scale), zeros]).tocsc(),
        np.r_[problem.linear.ravel() * (unit / scale), zeros],
        sparse.block_array([[normal, None], [eye, -eye], [-eye, -eye], [None, ball]], format="csc"),
        normal.shape[0],
        1.0,
    )


def _measured(
    problem: JointProblem,
    coef: Array,
    slope: Array,
    kappa: float,
    t: float,
    violation: float,
) -> tuple[float, float, float, float]:
    """Primal, dual and KKT residuals and the gap, see :class:`SolverInfo`.

    ``slope`` is what the multipliers of the equalities add to the gradient q: stationarity is
    |q| <= t kappa, complementarity <q, H> + t kappa |H| = 0 and t (1 - kappa sum |H|) = 0.
    """
    scale = float(np.abs(problem.linear).max(initial=0.0)) or 1.0
    gradient = problem.linear + problem.quadratic * coef + slope
    left = kappa * float(np.abs(coef).sum())
    primal = max(violation, left - 1.0)
    excess = np.maximum(np.abs(gradient) - t * kappa, 0.0)
    dual = float(excess.max(initial=0.0)) / scale
    slack = np.abs(gradient * coef + t * kappa * np.abs(coef)).sum() + t * abs(1.0 - left)
    value = problem.objective(coef)
    excess = np.maximum(np.abs(problem.linear + slope) - t * kappa, 0.0)
    bound = -t - float((excess**2 / problem.quadratic).sum()) / 2
    gap = (value - bound) / max(1.0, abs(value))
    return primal, dual, max(primal, dual, float(slack) * kappa / scale), gap


def _clarabel(program: Program, seconds: float | None) -> Answer:
    import clarabel

    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = _EPS
    settings.max_iter = _MAX_ITERATIONS["Clarabel"]
    if seconds is not None:
        settings.time_limit = seconds
    bounds = np.zeros(program.rows.shape[0])
    bounds[-1] = program.bound
    equal = program.equalities
    cones = [clarabel.ZeroConeT(equal), clarabel.NonnegativeConeT(len(bounds) - equal)]
    result = clarabel.DefaultSolver(
        program.quadratic, program.linear, program.rows, bounds, cones, settings
    ).solve()
    solved = str(result.status) == "Solved"
    status = "optimal" if solved else str(result.status)
    return Answer(status, np.array(result.x), np.array(result.z), int(result.iterations))


def _osqp(program: Program, seconds: float | None) -> Answer:
    import osqp

    upper = np.zeros(program.rows.shape[0])
    upper[-1] = program.bound
    lower = np.full(len(upper), -np.inf)
    lower[: program.equalities] = 0.0
    solver = osqp.OSQP(algebra="builtin")
    solver.setup(
        P=sparse.csc_matrix(program.quadratic),
        q=program.linear,
        A=sparse.csc_matrix(program.rows),
        l=lower,
        u=upper,
        verbose=False,
        eps_abs=_EPS,
        eps_rel=_EPS,
        max_iter=_MAX_ITERATIONS["OSQP"],
        scaling=0,  # the program is scaled already, and better
        adaptive_rho=True,
        polishing=True,
        check_dualgap=False,
        time_limit=1e10 if seconds is None else seconds,
    )
    result = solver.solve(raise_error=False)
    status = "optimal" if result.info.status == "solved" else str(result.info.status)
    unknown = np.full(len(program.linear), np.nan), np.full(len(upper), np.nan)
    x, y = (
        none if values is None else np.asarray(values)
        for values, none in zip((result.x, result.y), unknown, strict=True)
    )
    return Answer(status, x, y, int(result.info.iter))


_SOLVERS: dict[str, tuple[str, Callable[[Program, float | None], Answer]]] = {
    "clarabel": ("Clarabel", _clarabel),
    "osqp": ("OSQP", _osqp),
}
