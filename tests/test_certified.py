"""Certified programs: closed form and the paper's own, by optimality and against a solver."""

import time

import clarabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from programs import (
    assert_no_descent,
    diagonal_problem,
    random_problem,
    sample_moments,
    solve_joint,
)
from scipy import sparse

from cme_dask.data.generate import Normal3
from cme_dask.errors import ConvergenceError, ConvergenceWarning
from cme_dask.numerics.certified import solve_certified, solve_paper_form
from cme_dask.numerics.problem import JointProblem, Regularization


def weighted(coef, plus, minus):
    return float((plus * coef.clip(min=0)).sum() + (minus * (-coef).clip(min=0)).sum())


def points_of_ball(rng, shape, plus, minus, count):
    """Feasible points: random ones, sparse ones, and vertices."""
    plus, minus = (np.broadcast_to(w, shape) for w in (plus, minus))
    for i in range(count):
        point = rng.standard_normal(shape) * (rng.random(shape) < (1.0, 0.2, 0.0)[i % 3])
        point.flat[rng.integers(point.size)] = rng.choice([-1.0, 1.0])
        yield point / max(1.0, weighted(point, plus, minus))


def by_clarabel(problem, weight_plus, weight_minus):
    """The same program as G = P - M with P, M >= 0, to a solver of another kind."""
    n = problem.linear.size
    d, a = problem.quadratic.ravel(), problem.linear.ravel()
    weights = np.concatenate([np.broadcast_to(w, n) for w in (weight_plus, weight_minus)])
    options = clarabel.DefaultSettings()
    options.verbose = False
    options.tol_gap_abs = options.tol_gap_rel = options.tol_feas = 1e-10
    found = clarabel.DefaultSolver(
        sparse.diags_array(np.r_[d, d]).tocsc(),
        np.r_[a, -a],
        sparse.vstack([weights[None], -sparse.eye_array(2 * n)]).tocsc(),
        np.r_[1.0, np.zeros(2 * n)],
        [clarabel.NonnegativeConeT(2 * n + 1)],
        options,
    ).solve()
    assert str(found.status) == "Solved"
    x = np.array(found.x)
    return (x[:n] - x[n:]).reshape(problem.linear.shape)


def optimal(problem, plus, minus, coef, t):
    """The optimality conditions, written a second time and entry by entry."""
    scale = np.abs(problem.linear).max() or 1.0
    for a, d, g, up, down in zip(
        *(np.broadcast_to(v, coef.shape).ravel() for v in (problem.linear, problem.quadratic)),
        coef.ravel(),
        *(np.broadcast_to(w, coef.shape).ravel() for w in (plus, minus)),
        strict=True,
    ):
        slope = a + d * g
        if g > 0:
            assert abs(slope + t * up) <= 1e-12 * scale
        elif g < 0:
            assert abs(slope - t * down) <= 1e-12 * scale
        else:
            assert -t * up - 1e-12 * scale <= slope <= t * down + 1e-12 * scale


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    least=st.sampled_from([1.0, 1e-3, 1e-6, 1e-12]),
    size=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]),
    kind=st.sampled_from(["one", "asymmetric", "zeros", "ties", "rank 1"]),
)
def test_optimal_by_conditions_and_directions(seed, shape, least, size, kind):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, shape, least, size)
    plus, minus = np.asarray(1.0), np.asarray(1.0)
    if kind in ("asymmetric", "zeros"):
        plus, minus = rng.exponential(size=(2, *shape))
    if kind == "zeros":
        plus, minus = plus * (rng.random(shape) < 0.5), minus * (rng.random(shape) < 0.5)
    if kind == "ties":
        signs = rng.choice([-1.0, 0.0, 1.0], shape)
        problem = diagonal_problem(size * signs, problem.quadratic)
    if kind == "rank 1":
        linear = np.outer(problem.linear[:, 0], problem.linear[0])
        problem = diagonal_problem(linear, problem.quadratic)
    coef, outcome = solve_certified(problem, plus, minus)
    assert outcome.status == "optimal"
    assert outcome.converged
    left = weighted(coef, plus, minus)
    assert left <= 1.0 + 1e-13
    free = weighted(problem.free, plus, minus)
    if free <= 1.0:
        assert_allclose(coef, problem.free, rtol=1e-14)
        t = 0.0
    else:
        assert left == pytest.approx(1.0, abs=1e-13)
        bounding = (coef != 0) & (np.where(coef > 0, plus, minus) > 0)
        weight = np.where(coef > 0, plus, minus)[bounding]
        slope = problem.linear + problem.quadratic * coef
        t = float(np.median(np.abs(slope[bounding]) / weight))
    optimal(problem, plus, minus, coef, t)
    slack = 1e-13 * max(abs(problem.objective(coef)), np.abs(problem.linear).max())
    assert_no_descent(problem, coef, points_of_ball(rng, shape, plus, minus, 12), slack)


@pytest.mark.parametrize("least", [1e-2, 1e-6, 1e-12])
def test_a_million_unknowns_in_a_second(least):
    problem = random_problem(np.random.default_rng(0), (1000, 1000), least)
    begin = time.process_time()  # other work on the machine does not count
    coef, outcome = solve_certified(problem, np.asarray(1.0), np.asarray(1.0))
    assert time.process_time() - begin < 1.0
    assert outcome.kkt_residual <= 1e-13
    assert abs(outcome.gap) <= 1e-12
    assert np.abs(coef).sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_equals_clarabel_at_ten_thousand_unknowns(asymmetric):
    rng = np.random.default_rng(1)
    problem = random_problem(rng, (100, 100), 1e-3, 0.01)
    plus, minus = rng.uniform(0.2, 1.0, (2, 10_000)) if asymmetric else np.ones((2, 1))
    shaped = (w.reshape(100, 100) if asymmetric else w for w in (plus, minus))
    coef, outcome = solve_certified(problem, *shaped)
    theirs = by_clarabel(problem, plus, minus)
    value = problem.objective(coef)
    assert (coef != 0).sum() > 10
    assert value == pytest.approx(problem.objective(theirs), rel=1e-6)
    assert_allclose(coef, theirs, atol=1e-5)
    assert outcome.converged


def test_one_unknown_by_hand():
    for a, d, expected in ((-1.0, 0.5, 0.5), (1.0, 4.0, -0.25), (0.0, 1.0, 0.0)):
        problem = diagonal_problem(np.array([[a]]), np.array([[d]]))
        coef, outcome = solve_certified(problem, np.asarray(2.0), np.asarray(2.0))
        assert coef[0, 0] == expected
        assert outcome.converged


def test_nothing_to_choose():
    problem = diagonal_problem(np.zeros((3, 4)), np.ones((3, 4)))
    coef, outcome = solve_certified(problem, np.asarray(1.0), np.asarray(1.0))
    assert_array_equal(coef, 0.0)
    assert (outcome.kkt_residual, outcome.gap) == (0.0, 0.0)
    coef, outcome = solve_certified(
        diagonal_problem(np.zeros((0, 4)), np.zeros((0, 4))), np.asarray(1.0), np.asarray(1.0)
    )
    assert coef.shape == (0, 4)
    assert outcome.converged


def test_only_one_sign_is_bounded():
    """A range that ends at zero bounds one sign alone; the other one is free."""
    problem = diagonal_problem(np.array([[-9.0, 9.0]]), np.ones((1, 2)))
    coef, outcome = solve_certified(problem, np.ones((1, 2)), np.zeros((1, 2)))
    assert_allclose(coef, [[1.0, -9.0]])
    assert outcome.converged


# --- the paper's formulation ---------------------------------------------------------------------


def normal_problem(ranks, reg=1e-6, rows=2000, scales=(0.1, 0.1)):
    x, y = next(Normal3("strong").batches(rows, 0))
    mean, sides = sample_moments(x, y, *scales, ranks)
    problem = JointProblem.of(mean, Regularization(reg, reg), centred=False)
    means = problem.transform_x.T @ mean.means["x"], problem.transform_y.T @ mean.means["y"]
    return problem, means, mean, sides


def off(mean, matrix, axis):
    if not np.any(mean):
        return matrix
    unit = mean / np.linalg.norm(mean)
    along = unit @ matrix if axis == 0 else matrix @ unit
    return matrix - (np.outer(unit, along) if axis == 0 else np.outer(along, unit))


def normalized_points(rng, shape, mean_x, mean_y, kappa, count):
    for i in range(count):
        point = rng.standard_normal(shape) * (rng.random(shape) < (1.0, 0.1)[i % 2])
        point = off(mean_y, off(mean_x, point, 1), 0)
        size = kappa * np.abs(point).sum()
        yield point / size if size else point


@pytest.mark.parametrize("solver", ["clarabel", "osqp"])
@pytest.mark.parametrize("kappa", [1.0, 1.7, 1e-3])
@pytest.mark.parametrize("reg", [0.0, 1e-12, 1e-6])
def test_paper_form_is_optimal(solver, kappa, reg, rng):
    problem, (mean_x, mean_y), *_ = normal_problem((8, 20), reg)
    coef, outcome = solve_paper_form(problem, mean_x, mean_y, kappa, solver)
    assert (outcome.status, outcome.converged) == ("optimal", True)
    assert outcome.kkt_residual <= 1e-6
    assert abs(outcome.gap) <= 1e-6
    assert kappa * np.abs(coef).sum() <= 1.0 + 1e-14
    size = max(1.0, np.abs(coef).sum())
    assert np.abs(mean_y @ coef).max() <= 1e-9 * size
    assert np.abs(coef @ mean_x).max() <= 1e-9 * size
    points = normalized_points(rng, coef.shape, mean_x, mean_y, kappa, 30)
    assert_no_descent(problem, coef, points, 1e-6 * abs(problem.objective(coef)))


def test_solvers_of_the_paper_form_agree_and_the_centred_form_is_another_certificate():
    problem, means, mean, (side_x, side_y) = normal_problem((10, 40))
    reg = Regularization(1e-6, 1e-6)
    ours, outcome = solve_paper_form(problem, *means, 1.0, "clarabel")
    theirs, _ = solve_paper_form(problem, *means, 1.0, "osqp")
    values = problem.objective(ours), problem.objective(theirs)
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert outcome.iterations > 0
    centred = JointProblem.of(mean, reg, centred=True)
    closed, _ = solve_certified(centred, np.asarray(1.0), np.asarray(1.0))
    x, y = next(Normal3("strong").batches(300, 1))
    for shift in (0.0, 3.0):
        for coef, basis in ((ours, problem), (closed, centred)):
            g = (
                1.0
                + (side_y(y + shift) @ basis.transform_y)
                @ coef
                @ (side_x(x + shift) @ basis.transform_x).T
            )
            assert g.min() >= 0.0


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    least=st.sampled_from([1.0, 1e-4, 1e-12]),
    kind=st.sampled_from(["means", "no mean of x", "no means", "one mean", "independent"]),
)
def test_paper_form_in_degenerate_cases(seed, shape, least, kind):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, shape, least)
    mean_y, mean_x = (rng.uniform(-1, 1, k) / np.sqrt(k) for k in shape)
    if kind in ("no mean of x", "no means"):
        mean_x[:] = 0.0
    if kind == "no means":
        mean_y[:] = 0.0
    if kind == "one mean":
        mean_x[1:], mean_y[1:] = 0.0, 0.0
    if kind == "independent":
        problem = diagonal_problem(np.zeros(shape), problem.quadratic)
    coef, outcome = solve_paper_form(problem, mean_x, mean_y, 1.0, "clarabel")
    assert outcome.converged
    assert outcome.primal_residual <= 1e-7
    points = normalized_points(rng, shape, mean_x, mean_y, 1.0, 10)
    scale = np.abs(problem.linear).max() or 1.0
    assert_no_descent(problem, coef, points, 1e-6 * scale)
    if kind == "no means":
        closed, _ = solve_certified(problem, np.asarray(1.0), np.asarray(1.0))
        assert problem.objective(coef) == pytest.approx(problem.objective(closed), abs=1e-7)
    if kind == "independent":
        assert_allclose(coef, 0.0, atol=1e-6)


def test_equal_rows_leave_independence():
    x, y = np.full((20, 1), 0.3), np.full((20, 2), -1.0)
    mean, _ = sample_moments(x, y, 0.1, 0.1, (5, 5))
    problem = JointProblem.of(mean, Regularization(1e-6, 1e-6), centred=False)
    means = problem.transform_x.T @ mean.means["x"], problem.transform_y.T @ mean.means["y"]
    for solver in ("clarabel", "osqp"):
        coef, outcome = solve_paper_form(problem, *means, 1.0, solver)
        assert_allclose(coef, 0.0, atol=1e-9)
        assert outcome.converged
    solution = solve_joint(mean, "normalized", Regularization(1e-6, 1e-6))
    assert solution.coef.size == 0


@pytest.mark.parametrize("solver", ["clarabel", "osqp"])
def test_a_solver_out_of_time_is_told(solver):
    problem, means, *_ = normal_problem((15, 60))
    coef, outcome = solve_paper_form(problem, *means, 1.0, solver, seconds=1e-9)
    assert outcome.status != "optimal"
    assert not outcome.converged
    assert np.all(np.isfinite(coef))
    assert np.abs(coef).sum() <= 1.0 + 1e-14
    with pytest.raises(ConvergenceError, match="KKT residual"):
        outcome.check("raise")
    with pytest.warns(ConvergenceWarning, match="KKT residual"):
        outcome.check("warn")


def test_the_measure_sees_what_is_not_optimal():
    """Residuals of a shrunken optimum, and of an answer that breaks the equalities."""
    problem, means, *_ = normal_problem((8, 20))
    from cme_dask.numerics import certified as paper_form

    coef, _ = solve_paper_form(problem, *means, 1.0, "clarabel")
    none = np.zeros(coef.shape)
    _, dual, residual, gap = paper_form._measured(problem, 0.5 * coef, none, 1.0, 0.0, 0.0)
    assert min(dual, residual, gap) > 1e-3
    primal, _, residual, _ = paper_form._measured(problem, coef, none, 1.0, 0.0, 0.1)
    assert min(primal, residual) >= 0.1
