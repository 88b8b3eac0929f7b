"""g >= 0 on landmarks: optimality, a dense solver, degenerate landmarks."""

import clarabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from programs import assert_no_descent, diagonal_problem, sample_moments
from scipy import sparse

from cme_dask.data.generate import Normal3
from cme_dask.errors import ConvergenceError
from cme_dask.numerics.pointwise import solve_pointwise
from cme_dask.numerics.problem import JointProblem, Regularization

METHODS = ["interior point", "ADMM"]


def landmark_problem(ranks, landmarks, reg, *, scenario="strong", rows=1000, scales=(0.1, 0.15)):
    x, y = next(Normal3(scenario).batches(rows, 0))
    mean, sides = sample_moments(x, y, *scales, ranks)
    problem = JointProblem.of(mean, Regularization(reg, reg), centred=True)
    values_x, values_y = (
        side(np.concatenate([side.points, part])[:count]) @ transform
        for side, part, count, transform in zip(
            sides,
            (x, y),
            landmarks,
            (problem.transform_x, problem.transform_y),
            strict=True,
        )
    )
    return problem, values_x, values_y


def by_clarabel(problem, values_x, values_y):
    n = problem.linear.size
    options = clarabel.DefaultSettings()
    options.verbose = False
    options.tol_gap_abs = options.tol_gap_rel = options.tol_feas = 1e-10
    rows = np.kron(values_y, values_x)
    found = clarabel.DefaultSolver(
        sparse.diags_array(problem.quadratic.ravel()).tocsc(),
        problem.linear.ravel(),
        sparse.csc_array(-rows),
        np.ones(len(rows)),
        [clarabel.NonnegativeConeT(len(rows))],
        options,
    ).solve()
    assert str(found.status) == "Solved"
    assert n == len(found.x)
    return np.array(found.x).reshape(problem.linear.shape)


def ratio(coef, values_x, values_y):
    return 1.0 + values_y @ coef @ values_x.T


def feasible_points(rng, coef, values_x, values_y, count):
    """Random points, near and far, drawn towards zero until g >= 0."""
    for i in range(count):
        spread = 10.0 ** rng.uniform(-4, 1) * (np.abs(coef).max() or 1.0)
        point = coef * (i % 2) + spread * rng.standard_normal(coef.shape)
        yield point / (1.0 + max(0.0, -ratio(point, values_x, values_y).min()))


@pytest.mark.parametrize("reg", [0.0, 1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("scenario", ["low", "medium", "strong"])
def test_equals_clarabel(reg, scenario, rng):
    problem, *values = landmark_problem((7, 12), (15, 25), reg, scenario=scenario)
    coef, outcome = solve_pointwise(
        problem, *values, Regularization(reg, reg), tol=1e-8, max_iterations=100
    )
    assert outcome.converged
    assert ratio(coef, *values).min() >= -1e-12
    value = problem.objective(coef)
    assert value == pytest.approx(problem.objective(by_clarabel(problem, *values)), rel=1e-6)
    assert 0.0 <= outcome.gap + 1e-12 <= 1e-6
    points = feasible_points(rng, coef, *values, 40)
    assert_no_descent(problem, coef, points, 1e-7 * abs(value))


def test_admm_reaches_the_same_point():
    problem, *values = landmark_problem((5, 8), (10, 12), 1e-3)
    reg = Regularization(1e-3, 1e-3)
    interior, _ = solve_pointwise(problem, *values, reg, tol=1e-9, max_iterations=100)
    coef, outcome = solve_pointwise(
        problem, *values, reg, tol=1e-6, max_iterations=50_000, method="ADMM"
    )
    assert (outcome.status, outcome.solver, outcome.converged) == ("optimal", "ADMM", True)
    assert outcome.iterations > 25
    assert problem.objective(coef) == pytest.approx(problem.objective(interior), rel=1e-6)
    assert ratio(coef, *values).min() >= -1e-12


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    landmarks=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    least=st.sampled_from([1.0, 1e-4, 1e-12]),
    reg=st.sampled_from([0.0, 1e-6, 1.0]),
    kind=st.sampled_from(["any", "equal landmarks", "rank 1", "independent", "null landmarks"]),
)
def test_optimal_in_degenerate_cases(seed, ranks, landmarks, least, reg, kind):
    """More functions than landmarks and fewer, landmarks that repeat or see nothing."""
    rng = np.random.default_rng(seed)
    lam_y, lam_x = (np.sort(least ** rng.uniform(0, 1, k))[::-1] for k in ranks[::-1])
    two_sided = Regularization(reg, reg)
    # Values of functions whose mean squares are lam, and A as of a dependent sample.
    values_x, values_y = (
        rng.standard_normal((s, len(lam))) * np.sqrt(lam)
        for s, lam in zip(landmarks, (lam_x, lam_y), strict=True)
    )
    linear = rng.standard_normal(ranks[::-1]) * np.sqrt(np.outer(lam_y, lam_x))
    if kind == "equal landmarks":
        values_x[:] = values_x[0]
    if kind == "rank 1":
        linear = np.outer(linear[:, 0], linear[0])
    if kind == "independent":
        linear[:] = 0.0
    if kind == "null landmarks":
        values_y[:] = 0.0
    problem = JointProblem(
        None,
        two_sided,
        -linear,
        linear,
        two_sided.denominator(lam_y, lam_x),
        np.eye(ranks[0]),
        np.eye(ranks[1]),
        lam_x,
        lam_y,
        True,
    )
    coef, outcome = solve_pointwise(
        problem, values_x, values_y, two_sided, tol=1e-7, max_iterations=100
    )
    assert outcome.converged
    assert ratio(coef, values_x, values_y).min() >= -1e-12
    if kind in ("independent", "null landmarks"):
        assert outcome.solver == "closed form"
        assert_allclose(coef, problem.free, rtol=1e-12)
    points = feasible_points(rng, coef, values_x, values_y, 10)
    scale = max(abs(problem.objective(coef)), np.abs(linear).max())
    assert_no_descent(problem, coef, points, 1e-6 * scale)


def test_typical_sizes_converge():
    problem, *values = landmark_problem((30, 60), (100, 200), 1e-6, rows=2000)
    assert problem.linear.size > 1000
    coef, outcome = solve_pointwise(
        problem, *values, Regularization(1e-6, 1e-6), tol=1e-6, max_iterations=20_000
    )
    assert (outcome.solver, outcome.converged) == ("interior point", True)
    assert ratio(coef, *values).min() >= -1e-12
    assert ratio(problem.free, *values).min() < -0.1


def test_no_functions_left():
    problem = diagonal_problem(np.zeros((0, 3)), np.zeros((0, 3)))
    coef, outcome = solve_pointwise(
        problem,
        np.ones((4, 3)),
        np.zeros((2, 0)),
        Regularization(0.0, 0.0),
        tol=1e-6,
        max_iterations=10,
    )
    assert coef.shape == (0, 3)
    assert outcome.converged


@pytest.mark.parametrize("method", METHODS)
def test_too_few_iterations_are_told(method):
    problem, *values = landmark_problem((7, 12), (15, 25), 1e-6)
    coef, outcome = solve_pointwise(
        problem, *values, Regularization(1e-6, 1e-6), tol=1e-6, max_iterations=3, method=method
    )
    assert (outcome.status, outcome.iterations, outcome.converged) == ("iterations", 3, False)
    assert ratio(coef, *values).min() >= -1e-12  # what is returned is feasible all the same
    with pytest.raises(ConvergenceError, match="KKT residual"):
        outcome.check("raise")


def test_the_measure_sees_what_is_not_optimal():
    problem, *values = landmark_problem((7, 12), (15, 25), 1e-6)
    from cme_dask.numerics.pointwise import LandmarkProgram

    program = LandmarkProgram.of(problem, *values, Regularization(1e-6, 1e-6))
    none = np.zeros((25, 15))
    primal, dual, slack = program.residuals(problem.free * program.unit, none)
    assert primal == pytest.approx(-ratio(problem.free, *values).min())
    assert dual <= 1e-12
    assert slack <= 1e-12
    _, dual, slack = program.residuals(0.0 * problem.free, none + 1.0)
    expected = problem.linear - values[1].T @ (none + 1.0) @ values[0]
    scale = np.abs(problem.linear).max()
    assert dual == pytest.approx(np.abs(expected).max() / scale)
    gap = none.size + (expected**2 / problem.quadratic).sum() / 2
    gain = (problem.linear**2 / problem.quadratic).sum() / 2
    assert slack == pytest.approx(gap / gain)
