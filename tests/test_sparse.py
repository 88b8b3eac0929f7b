"""Sparse embeddings: their solver against Clarabel and optimality, fits against dense forms."""

import subprocess
import sys
import warnings
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from conftest import write_store
from test_reads import opened
from test_sklearn import check_defaults

from benchmarks import sparse as bench
from benchmarks.sparse import CLARABEL, OURS, SolveSparse, conic_solver, objective, small_problem
from cme_dask import SparseEmbedding, kernels, load
from cme_dask.errors import (
    ConvergenceError,
    ConvergenceWarning,
    DataError,
    NotFittedError,
    RankWarning,
    StoreError,
)
from cme_dask.models import SparseModel
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.problem import iterate
from cme_dask.numerics.sparse import (
    PENALTIES,
    Penalty,
    SparseProblem,
    SparseSolver,
    _preconditioner,
    refitted,
    sparse_path,
)

EACH = pytest.mark.parametrize("penalty", PENALTIES)


def solved(problem, share, tol=1e-8, **options):
    gamma = share * problem.gamma_max
    return iterate(SparseSolver(problem, gamma, tol, **options), 500)[0], gamma


# The solver


@EACH
@pytest.mark.parametrize("share", [0.3, 0.03])
def test_the_minimum_is_that_of_clarabel(penalty, share):
    problem = small_problem(12, penalty)
    state, gamma = solved(problem, share, 1e-10)
    plain = conic_solver(problem, gamma)(1e-11)
    assert state.objective == pytest.approx(objective(problem, gamma, plain), rel=1e-8)
    assert state.objective <= objective(problem, gamma, plain) * (1 + 1e-10)
    assert state.objective == pytest.approx(objective(problem, gamma, state.point), rel=1e-12)
    assert np.abs(state.point - plain).max() < 1e-4 * np.abs(plain).max()
    assert ((np.abs(plain) > 1e-5 * np.abs(plain).max()) <= (state.point != 0)).all()


@EACH
def test_gaps_of_a_path_of_twenty(penalty):
    both = penalty == "rows-and-columns"
    problem = small_problem(6 if both else 20, penalty, reg=1e-5)
    assert both or max(np.linalg.cond(kernel) for kernel in problem.kernels) > 1e6
    gammas = problem.gamma_max * np.geomspace(1.001, 3e-3, 20)
    states, steps = zip(*sparse_path(problem, gammas, 1e-8, 500), strict=True)
    assert all(state.gap <= 1e-8 for state in states)
    assert max(steps) < 200
    assert np.count_nonzero(states[0].point) == 0
    # The gap is one: the dual value lies below every primal value, that of the solution, too.
    for state, gamma in zip(states[4::8], gammas[4::8], strict=True):
        best = solved(problem, gamma / problem.gamma_max, 1e-12)[0].objective
        assert state.objective * (1 - state.gap) <= best * (1 + 1e-12)


@EACH
def test_subgradients_at_twenty_solutions(penalty):
    problem = small_problem(5 if penalty == "rows-and-columns" else 10, penalty)
    gammas = problem.gamma_max * np.geomspace(0.9, 3e-3, 20)
    for gamma, (state, _) in zip(gammas, sparse_path(problem, gammas, 1e-12, 500), strict=True):
        assert state.gap <= 1e-12
        matrix, slope = state.point, problem.lift(state.residual) * 2.0 / gamma
        support = matrix != 0.0
        assert np.count_nonzero(support) > 0
        expected = np.zeros_like(matrix)
        for weight, axis in problem.penalty.terms:
            norms = np.abs(matrix)
            if axis is not None:
                norms = np.linalg.norm(matrix, axis=axis, keepdims=True)
            unit = np.divide(matrix, norms, where=norms > 0, out=np.zeros_like(matrix))
            expected += weight * unit
        largest = np.abs(expected).max()
        assert np.abs(slope - expected)[support].max() < 1e-4 * largest
        # Off the support: in the ball of the dual norm, whatever the split of the sum.
        split = tuple(2.0 / gamma / state.sigma * part for part in state.split)
        assert problem.penalty.dual_norm(slope, split) <= 1.0 + 1e-4


@EACH
def test_a_tiny_ridge_needs_no_floor(penalty):
    problem = small_problem(10 if penalty == "rows-and-columns" else 18, penalty, reg=1e-14)
    assert max(np.linalg.cond(kernel) for kernel in problem.kernels) > 1e6
    gammas = problem.gamma_max * np.geomspace(0.5, 1e-4, 5)
    states, steps = zip(*sparse_path(problem, gammas, 1e-8, 500), strict=True)
    assert all(state.gap <= 1e-8 for state in states)
    assert max(steps) < 200


@EACH
def test_the_prox_is_optimal_and_the_dual_norm_attained(penalty):
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((9, 7)) * rng.exponential(size=(9, 1))
    norm = Penalty.of(penalty, matrix.shape)
    top = norm.dual_norm(matrix)
    for step in (0.9 * top, 0.5 * top, 0.05 * top):
        point, split = norm.prox(matrix, step)
        assert np.abs(sum(split) - (matrix - point)).max() < 1e-10
        assert norm.dual_norm(sum(split), split) <= step * (1 + 1e-10)
        assert (sum(split) * point).sum() == pytest.approx(step * norm.value(point), rel=1e-9)
        assert (matrix * point).sum() <= top * norm.value(point) * (1 + 1e-10)
    assert np.count_nonzero(norm.prox(matrix, 1.0000001 * top)[0]) == 0
    assert np.count_nonzero(norm.prox(matrix, 0.9999 * top)[0]) > 0
    assert np.count_nonzero(norm.prox(0.0 * matrix, 1e9)[0]) == 0  # without a warning
    paper = np.sqrt((point**2).sum(axis=1)[:, None] + (point**2).sum(axis=0)).sum()
    if penalty == "rows-and-columns":
        assert paper <= norm.value(point) <= np.sqrt(2.0) * paper


@pytest.mark.parametrize("axis", [0, 1])
def test_the_correction_for_groups_is_the_inverse_of_the_whole_matrix(axis):
    rng = np.random.default_rng(0)
    of_x, of_y = rng.standard_normal((5, 5)), rng.standard_normal((4, 4))
    invert, _ = _preconditioner(of_x, of_y, np.ones((5, 4)), within=False)
    parts = rng.uniform(-0.4, 0.4, (5, 4))
    matrix = np.eye(20) + np.kron(of_x @ of_x.T, of_y @ of_y.T)
    for group in np.eye(parts.shape[1 - axis]):
        own = (parts * (group if axis == 0 else group[:, None])).ravel()
        matrix -= np.outer(own, own)
    right = rng.standard_normal((5, 4))
    plain = np.linalg.solve(matrix, right.ravel()).reshape(5, 4)
    assert np.abs(invert.without(parts, axis)(right) - plain).max() < 1e-12


def test_factorized_and_iterated_systems_give_one_solution():
    problem = small_problem(12, "l1")
    pair = [solved(problem, 0.1, 1e-11, factorized=most)[0] for most in (0, 10_000)]
    assert pair[0].objective == pytest.approx(pair[1].objective, rel=1e-10)
    assert np.array_equal(pair[0].point != 0.0, pair[1].point != 0.0)


@EACH
@pytest.mark.parametrize("share", [0.3, 0.03])
def test_a_refit_has_the_least_squares_coefficients_of_its_support(penalty, share):
    problem = small_problem(12, penalty)
    state, _ = solved(problem, share)
    again = refitted(problem, state, 1e-10, 500)
    i, j = np.nonzero(state.point)
    columns = np.einsum("ka,kb->abk", problem.factor_x[i], problem.factor_y[j])
    columns = columns.reshape(problem.target.size, -1)
    plain, *_ = np.linalg.lstsq(columns, problem.target.ravel(), rcond=None)
    assert np.array_equal(again.point != 0.0, state.point != 0.0)
    assert np.abs(again.point[i, j] - plain).max() < 1e-7 * np.abs(plain).max()
    normal = np.abs(problem.lift(again.residual)[i, j]).max()
    assert normal < 1e-10 * np.abs(problem.lift(problem.target)).max()
    assert np.linalg.norm(again.residual) < np.linalg.norm(state.residual)
    assert again.gap <= 1e-8


def test_a_problem_keeps_its_solution_in_other_units():
    problem = small_problem(12, "rows")
    state, _ = solved(problem, 0.1, 1e-11)
    scaled = replace(problem, factor_x=1e3 * problem.factor_x, target=1e-4 * problem.target)
    other, _ = solved(scaled, 0.1, 1e-11)
    assert np.abs(1e7 * other.point - state.point).max() < 1e-4 * np.abs(state.point).max()


def test_the_bench_measures_one_problem_by_both_solvers():
    runs = [SolveSparse(solver, "rows", 60, 8, 0.1).prepare()()() for solver in (OURS, CLARABEL)]
    assert runs[0]["unknowns"] == runs[1]["unknowns"] == 64
    assert runs[0]["objective"] == pytest.approx(runs[1]["objective"], rel=1e-8)


@pytest.mark.parametrize(("name", "form"), [(OURS, "our_solver"), (CLARABEL, "conic_solver")])
def test_the_bench_gives_both_solvers_one_tolerance_and_its_clock_begins_with_them(
    monkeypatch, name, form
):
    """The problem is in the solver's form before it runs."""
    made, tolerances = [], []
    true = getattr(bench, form)

    def watched(problem, gamma):
        made.append(gamma)
        solve = true(problem, gamma)
        return lambda tol: tolerances.append(tol) or solve(tol)

    monkeypatch.setattr(bench, form, watched)
    run = SolveSparse(name, "rows", 60, 8, 0.1).prepare()
    assert (len(made), tolerances) == (1, [])
    run()
    assert (len(made), tolerances) == (1, [bench.GAP])


# Fits


KX, KY = kernels.Gaussian(0.7), kernels.Gaussian(0.5)


def table(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (n, 1))
    return x, np.sin(2 * x) + 0.3 * rng.standard_normal((n, 1))


X, Y = table(300)


def sparse(**changed):
    given = {"kernel_x": KX, "kernel_y": KY, "max_rank": 12, "reg": 1e-3, "n_folds": 4}
    return SparseEmbedding(**(given | {"n_gammas": 6} | changed))


def fitted(penalty="rows", data=(X, Y), weights=None, scheduler="synchronous", **options):
    model = sparse(penalty=penalty, **options)
    return model.fit(*data, weights=weights, scheduler=scheduler)


@pytest.fixture(scope="module")
def by_rows():
    return fitted("rows")


@pytest.fixture(scope="module")
def by_columns():
    return fitted("columns")


@EACH
def test_on_all_rows_it_is_the_dense_problem(penalty):
    x, y = table(12, seed=3)
    kx, ky = kernels.Laplace(0.7), kernels.Laplace(0.5)
    reg = 1e-3
    every = {"kernel_x": kx, "kernel_y": ky, "pivots": (x, y), "reg": reg, "n_folds": 2}
    model = fitted(penalty, (x, y), gap=1e-5, n_gammas=3, gamma_ratio=0.05, **every)
    K, L = kx(x, x), ky(y, y)
    W = np.linalg.inv(K + len(x) * reg * np.eye(len(x)))
    path, norm = model.path_, Penalty.of(penalty, W.shape)
    order = [
        [int(np.flatnonzero((rows == point).all(axis=1))[0]) for point in basis.newton.points]
        for rows, basis in ((x, model.basis_x_), (y, model.basis_y_))
    ]
    assert path.gamma_max == pytest.approx(2 * norm.dual_norm(K @ W @ L), rel=1e-8)
    assert path.dense_distance == pytest.approx(np.sqrt(np.trace(W.T @ K @ W @ L)), rel=1e-8)
    folds = fold_of_rows(0, len(x), 2)
    for i, gamma in enumerate(path.gammas):
        M = np.zeros_like(W)
        M[np.ix_(*order)] = path.coefs[i]
        square = np.trace((M - W).T @ K @ (M - W) @ L)
        assert path.distances[i] ** 2 == pytest.approx(square, rel=1e-8)  # (16)
        assert path.objectives[i] == pytest.approx(square + gamma * norm.value(M), rel=1e-8)  # (17)
    plain, w = [], []
    for fold in range(2):
        held = folds == fold
        own = np.linalg.inv(K[~held][:, ~held] + (~held).sum() * reg * np.eye((~held).sum()))
        mu = K[held][:, ~held] @ own
        plain.append(
            np.mean(
                1
                - 2 * (mu @ L[~held])[:, held].diagonal()
                + ((mu @ L[~held][:, ~held]) * mu).sum(axis=1)
            )
        )
        w.append(held.mean())
    assert path.dense_loss == pytest.approx(np.dot(w, plain), rel=1e-8)


@EACH
@pytest.mark.parametrize("n", [16, pytest.param(500, marks=pytest.mark.slow)])
def test_one_gamma_on_more_rows_is_the_dense_problem(penalty, n):
    x, y = table(n)
    kx, ky = kernels.Laplace(0.7), kernels.Laplace(0.5)
    K, L, reg = kx(x, x), ky(y, y), 1e-3
    W, norm = np.linalg.inv(K + n * reg * np.eye(n)), Penalty.of(penalty, (n, n))
    top = 2.0 * norm.dual_norm(K @ W @ L)
    every = {"pivots": (x, y), "tol": 1e-14, "max_rank": n, "kernel_x": kx, "kernel_y": ky}
    model = fitted(penalty, (x, y), gamma=0.3 * top, reg=reg, n_folds=1, **every)
    path, M = model.path_, np.zeros_like(W)
    order = [
        [int(np.flatnonzero((rows == point).all(axis=1))[0]) for point in basis.newton.points]
        for rows, basis in ((x, model.basis_x_), (y, model.basis_y_))
    ]
    M[np.ix_(*order)] = path.coefs[0]
    square = np.trace((M - W).T @ K @ (M - W) @ L)
    assert path.gaps[0] <= 1e-8
    assert path.gamma_max == pytest.approx(top, rel=1e-8)
    assert path.distances[0] ** 2 == pytest.approx(square, rel=1e-8)  # (16)
    whole = square + model.gamma_ * norm.value(M)
    assert path.objectives[0] == pytest.approx(whole, rel=1e-8)  # (17)


@EACH
def test_errors_fall_like_the_root_of_the_trace_error(penalty):
    """Against the dense embedding of all rows, its sparse optimum on the same candidates, too."""
    x, y = table(50, seed=2)
    reg, values = 1e-2, []
    W = np.linalg.inv(KX(x, x) + len(x) * reg * np.eye(len(x)))
    bases = [NewtonBasis.from_points(k, rows) for k, rows in ((KX, x), (KY, y))]
    dense = bases[0](x).T @ W @ bases[1](y)
    tols = 10.0 ** -np.arange(1, 9, 2)
    for tol in tols:
        own = [pivoted_cholesky(k, rows, tol) for k, rows in ((KX, x), (KY, y))]
        candidates = [rows[each.pivots] for each, rows in zip(own, (x, y), strict=True)]
        options = {"pivots": tuple(candidates), "tol": 1e-12, "max_rank": 50, "reg": reg}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = fitted(penalty, (x, y), gamma=1e-3, **options)
        errors = [max(basis.trace_error, 0.0) for basis in (model.basis_x_, model.basis_y_)]
        bound = np.sqrt(errors[0]) / reg + np.sqrt(errors[1] / reg) / 2.0
        at = [basis(points) for basis, points in zip(bases, candidates, strict=True)]
        newton = [b.newton for b in (model.basis_x_, model.basis_y_)]
        places = [basis(each.points) for basis, each in zip(bases, newton, strict=True)]
        whole = SparseProblem(*places, dense, Penalty.of(penalty, (len(at[0]), len(at[1]))))
        best = iterate(SparseSolver(whole, model.gamma_, 1e-10), 500)[0].objective
        change = abs(np.sqrt(best) - np.sqrt(model.path_.objectives[0]))
        difference = np.linalg.norm(dense - whole.embed(_coefficients(model)))
        assert difference <= bound * (1 + 1e-6) + 1e-7
        assert change <= difference + 1e-6
        values.append((max(errors), difference))
    tau, difference = np.array(values).T
    slope = np.polyfit(np.log(tau), np.log(difference), 1)[0]
    assert 0.4 < slope < 0.7


def _coefficients(model):
    """Coefficients of the dense embedding at the pivots."""
    x, y = model.dense_.x.basis, model.dense_.y.basis
    inner = x.transform @ model.dense_.operator @ y.transform.T
    inner = np.linalg.solve(x.newton.factor.T, inner)
    return np.linalg.solve(y.newton.factor.T, inner.T).T


@EACH
@pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")
def test_a_path_towards_zero_ends_at_the_dense_embedding(penalty):
    plain, relaxed = (
        fitted(penalty, n_gammas=6, gamma_ratio=1e-8, max_rank=6, n_folds=2, relax=relax)
        for relax in (False, True)
    )
    assert plain.path_.distances[-1] < 1e-6 * plain.path_.dense_distance
    assert (plain.path_.gaps <= 1e-8).all()
    assert relaxed.path_.distances[-1] < 1e-10 * relaxed.path_.dense_distance
    at = np.linspace(-1, 1, 5)[:, None]
    dense = plain.dense_.embedding(at, Y[:5])
    assert np.abs(plain.model_at(5).embedding(at, Y[:5]) - dense).max() < 1e-5
    assert np.abs(relaxed.model_at(5).embedding(at, Y[:5]) - dense).max() < 1e-9
    assert plain.path_.losses[-1] == pytest.approx(plain.path_.dense_loss, rel=1e-5)


@EACH
@pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")
def test_held_out_losses_and_the_choice(penalty):
    model = fitted(penalty, n_gammas=4, max_rank=6, gamma_ratio=0.03, n_folds=3)
    path, bases = model.path_, (model.basis_x_.newton, model.basis_y_.newton)
    factor, values = [basis.factor for basis in bases], (bases[0](X), bases[1](Y))
    folds, losses, shares = fold_of_rows(0, len(X), 3), [], []
    for fold in range(3):
        rest, held = folds != fold, folds == fold
        ridge = values[0][rest].T @ values[0][rest] / rest.sum() + 1e-3 * np.eye(len(factor[0]))
        target = np.linalg.solve(ridge, values[0][rest].T @ values[1][rest] / rest.sum())
        problem = SparseProblem(*factor, target, Penalty.of(penalty, target.shape))
        row = []
        for state, _ in sparse_path(problem, path.gammas, 1e-5, 500):
            mu = values[0][held] @ problem.embed(state.point)
            row.append(np.mean(1 - 2 * (mu * values[1][held]).sum(axis=1) + (mu**2).sum(axis=1)))
        losses.append(row)
        shares.append(held.mean())
    mean = np.dot(shares, losses)
    assert np.abs(path.losses - mean).max() < 1e-4
    best = path.losses.argmin()
    within = path.losses <= path.losses[best] + path.errors[best]
    assert path.chosen == np.flatnonzero(within)[0]
    assert model.gamma_ == path.gammas[path.chosen]
    coefs = path.coefs[path.chosen]
    assert model.sparsity_ == pytest.approx(np.mean(coefs == 0))
    assert len(model.points_x_) == coefs.any(axis=1).sum()
    assert len(model.points_y_) == coefs.any(axis=0).sum()
    assert (np.diff(path.distances) < 0).all()


@EACH
def test_relaxed_fits_are_nearer_to_the_dense_embedding(penalty, tmp_path):
    plain, relaxed = (
        fitted(penalty, relax=relax, n_gammas=3, max_rank=8, n_folds=2) for relax in (False, True)
    )
    assert relaxed.n_passes_ == 1
    nonzero = [model.path_.coefs != 0.0 for model in (plain, relaxed)]
    assert np.array_equal(*nonzero)
    assert (relaxed.path_.distances < plain.path_.distances).all()
    assert (relaxed.path_.gaps <= 1e-8).all()
    assert np.array_equal(relaxed.path_.objectives, plain.path_.objectives)
    assert relaxed.path_.losses.min() <= plain.path_.losses.min()
    factors = [basis.newton.factor for basis in (relaxed.basis_x_, relaxed.basis_y_)]
    kernels_x_y = [factor @ factor.T for factor in factors]
    target = relaxed.dense_.x.basis.transform @ relaxed.dense_.operator
    target = target @ relaxed.dense_.y.basis.transform.T
    for coef, distance in zip(relaxed.path_.coefs, relaxed.path_.distances, strict=True):
        residual = target - factors[0].T @ coef @ factors[1]
        assert distance == pytest.approx(np.linalg.norm(residual), rel=1e-8, abs=1e-12)
        normal = (factors[0] @ residual @ factors[1].T)[coef != 0.0]
        assert np.abs(normal).max() < 1e-9 * np.abs(np.prod([k.max() for k in kernels_x_y]))
    relaxed.save(tmp_path / "m.zarr")
    assert f"penalty {penalty}, relaxed" in repr(load(tmp_path / "m.zarr"))


def test_refits_end_where_the_retained_points_span_everything():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (400, 1))
    y = np.sin(2 * x) + 0.3 * rng.normal(size=(400, 1))
    wide = {"tol": 1e-11, "reg": 1e-9, "n_gammas": 6, "n_folds": 2}
    kernel_x, kernel_y = kernels.Gaussian(1.5), kernels.Gaussian(1.0)
    given = {"kernel_x": kernel_x, "kernel_y": kernel_y, "penalty": "rows", "relax": True}
    path = SparseEmbedding(**given, **wide).fit(x, y).path_
    assert (path.gaps <= 1e-8).all()
    assert path.distances[-1] < 1e-10 * path.dense_distance
    assert np.abs(path.coefs[-1]).max() > 1e6


def test_its_model_answers_any_function(by_columns):
    model = by_columns
    at = np.linspace(-1.5, 1.5, 9)[:, None]
    plain = KX(at, model.points_x_) @ model.model_.coef
    remainder = 1.0 - plain.sum(axis=1, keepdims=True)
    weights = plain + remainder * model.model_.remainder
    assert np.abs(model.model_.weights(at) - weights).max() < 1e-12
    for f in (lambda y: np.cos(y[:, 0]), lambda y: y[:, 0] * np.abs(y[:, 0])):
        assert np.abs(model.expect(f, at) - weights @ f(model.points_y_)).max() < 1e-12
    pair = model.expect(["y0", "y0 > 0.2"], at)
    assert np.abs(pair[:, 0] - weights @ model.points_y_[:, 0]).max() < 1e-12
    assert np.abs(pair[:, 1] - weights @ (model.points_y_[:, 0] > 0.2)).max() < 1e-12
    assert np.abs(model.predict(at) - pair[:, :1]).max() < 1e-12
    assert np.abs(model.model_.mass(at) - plain.sum(axis=1)).max() < 1e-12
    embedded = plain @ KY(model.points_y_, Y[:5])
    assert np.abs(model.model_.embedding(at, Y[:5]) - embedded).max() < 1e-12
    vector = model.expect(lambda y: np.hstack([y, y**2, np.cos(y)]), at)
    assert np.abs(vector[:, 2] - weights @ np.cos(model.points_y_[:, 0])).max() < 1e-12
    several = model.expect(
        [lambda y: np.hstack([y, y**2]), lambda y: np.hstack([y, 1 + 0 * y])], at
    )
    assert several.shape == (9, 2, 2)
    assert np.abs(several[:, 0] - vector[:, :2]).max() < 1e-12
    assert np.abs(several[:, 1, 1] - weights.sum(axis=1)).max() < 1e-12
    chunks = da.from_array(at, chunks=(4, 1))
    lazy = model.expect(lambda y: np.hstack([y, y**2, np.cos(y)]), chunks)
    assert np.abs(lazy.compute(scheduler="synchronous") - vector).max() < 1e-12
    lazy = model.predict(chunks)
    assert np.abs(lazy.compute(scheduler="synchronous") - model.predict(at)).max() < 1e-12
    densest = model.model_at(5)
    assert len(densest.points_y) >= len(model.points_y_)
    near = np.abs(densest.embedding(at, Y[:5]) - model.dense_.embedding(at, Y[:5]))
    assert near.max() < 0.05


def test_the_remainder_of_the_weights_is_spread_over_all_rows(tmp_path, by_columns):
    """Far from the data the mean; a constant added to y is added to answers everywhere."""
    model = by_columns
    points, v = model.points_y_, model.model_.remainder
    # Its mean embedding is the nearest one to that of all rows, by the conditions of optimality.
    slope = KY(points, points) @ v - KY(points, Y).mean(axis=1)
    assert v.min() >= 0.0
    assert v.sum() == pytest.approx(1.0, abs=1e-12)
    assert np.ptp(slope[v > 0.0]) < 1e-6
    assert slope.min() > slope[v > 0.0].mean() - 1e-6
    assert model.predict([[1e3]])[0] == pytest.approx(v @ points[:, 0], abs=1e-12)
    assert abs(v @ points[:, 0] - Y.mean()) < 0.05 * Y.std()
    moved = fitted("columns", data=(X, Y + 1000.0))
    assert np.abs(moved.predict(X[:9]) - model.predict(X[:9]) - 1000.0).max() < 1e-6
    old = replace(model.model_, remainder=None)  # as files of earlier versions are read
    old.save(tmp_path / "m.zarr")
    again = load(tmp_path / "m.zarr")
    assert again.to_state().schema_version == 1
    plain = KX(X[:9], model.points_x_) @ old.coef @ points[:, 0]
    assert np.abs(again.predict(X[:9]) - plain).max() < 1e-12


def test_one_pass_reads_every_chunk_once(tmp_path):
    x, y = table(20_000)
    write_store(tmp_path / "s.zarr", x, y, np.ones(len(x)), chunk_rows=4096)
    store, group = opened(tmp_path / "s.zarr")
    model = fitted(data=(group,))
    assert model.n_passes_ == 1
    assert len(model.path_.gammas) == 6
    assert np.isfinite(model.path_.losses).all()
    assert set(store.chunks("x").values()) == set(store.chunks("y").values()) == {1}


def test_chunks_schedulers_and_checkpoints_give_the_same_bits(tmp_path):
    x, y = table(9000)
    plain = fitted("l1", (x, y), n_gammas=3)
    cut = [da.from_array(a, chunks=(1700, 1)) for a in (x, y)]
    for other in (
        fitted("l1", cut, scheduler="threads", n_gammas=3),
        sparse(n_gammas=3).fit(x, y, checkpoint=tmp_path / "c"),
    ):
        assert np.array_equal(other.path_.coefs, plain.path_.coefs)
        assert np.array_equal(other.path_.losses, plain.path_.losses)


def test_processes_and_a_cluster_give_the_bits_of_threads(cluster, tmp_path):
    x, y = table(9000)
    write_store(tmp_path / "s.zarr", x, y, np.ones(len(x)), chunk_rows=2048)
    given = {"kernel_x": KX, "kernel_y": KY, "reg": 1e-3, "max_rank": 12, "n_folds": 3}
    threads, *others = (
        SparseEmbedding(penalty="rows", n_gammas=3, relax=True, **given).fit(
            str(tmp_path / "s.zarr"), scheduler=scheduler, workers=workers
        )
        for scheduler, workers in (("threads", 2), ("processes", 2), (cluster, None))
    )
    for other in others:
        assert np.array_equal(other.path_.coefs, threads.path_.coefs)
        assert np.array_equal(other.path_.losses, threads.path_.losses)
        assert np.array_equal(other.predict(X), threads.predict(X))


def test_saved_models_answer_alike_without_dask(tmp_path, by_columns):
    model = by_columns
    model.save(tmp_path / "m.zarr")
    result = load(tmp_path / "m.zarr")
    assert np.array_equal(result.expect(np.ravel, X[:5]), model.expect(np.ravel, X[:5]))
    assert repr(result) == repr(model.model_)
    code = (
        "import sys, cme_dask\n"
        f"model = cme_dask.load({str(tmp_path / 'm.zarr')!r})\n"
        "model.expect(lambda y: y[:, 0] ** 2, [[0.0]])\n"
        "assert not {'dask', 'distributed', 'sklearn', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    state = model.model_.to_state()
    broken = replace(state, arrays=state.arrays | {"coef": state.arrays["coef"][:, 1:]})
    with pytest.raises(StoreError, match="fit it again"):
        SparseModel.from_state(broken)


def test_rows_are_added_by_their_moments():
    plain = fitted(data=(X, Y), pivots=(X[:9], Y[:9]))
    both = sparse(penalty="rows", pivots=(X[:9], Y[:9]))
    for part in (slice(0, 200), slice(200, None)):
        both.partial_fit(X[part], Y[part], scheduler="synchronous")
    assert np.abs(both.path_.distances - plain.path_.distances).max() < 1e-6
    assert both.model_.about["rows"] == len(X)


def test_targets_of_changing_width_are_refused():
    model = fitted(n_gammas=2, n_folds=2)
    with pytest.raises(DataError, match=r"the fit had columns y0 of y, these rows have y0, y1"):
        model.partial_fit(X, np.hstack([Y, Y]), scheduler="synchronous")


def test_at_gamma_max_no_point_is_left(tmp_path, by_rows):
    top = by_rows.path_.gamma_max
    model = fitted(gamma=top)
    assert (model.sparsity_, len(model.points_x_), len(model.points_y_)) == (1.0, 0, 0)
    model.save(tmp_path / "m.zarr")
    assert np.array_equal(load(tmp_path / "m.zarr").predict(X[:3]), np.zeros(3))


def test_labels_have_probabilities():
    labels = np.where(Y[:, 0] > 0, "up", "down")
    import pandas as pd

    data = pd.DataFrame({"x": X[:, 0]}), pd.DataFrame({"y": pd.Categorical(labels)})
    model = fitted(data=data, kernel_y=kernels.Categorical(1.0)).model_
    shares = model.predict_proba(data[0][:6])
    assert np.abs(shares.sum(axis=1) - 1).max() < 1e-12
    assert np.mean(model.predict(data[0]) == labels) > 0.75


def test_pictures_of_a_path(by_rows):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for model in (by_rows, fitted(n_folds=1, gamma=1e-3)):
        ax = model.path_.plot()
        assert len(ax.lines[0].get_xdata()) == len(model.path_.gammas)
        pyplot.close(ax.figure)


@pytest.mark.filterwarnings("ignore")
def test_checks_of_scikit_learn():
    def small():
        own = {"kernel_x": "median", "max_rank": 6, "reg": 1e-2, "n_folds": 2}
        return SparseEmbedding(penalty="rows", n_gammas=2, **own)

    check_defaults(small, ("check_regressors_train", "check_regressor_data_not_an_array"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"penalty": "l2"}, "penalty must be one of l1, rows, columns, rows-and-columns, got 'l2'"),
        ({"gamma": 0.0}, r"gamma must lie in \(0, gamma_max\], got 0.0"),
        ({"gamma": "small"}, r"gamma must lie in \(0, gamma_max\], got 'small'"),
        ({"gamma": [1e-3, np.nan]}, r"gamma must lie in \(0, gamma_max\]"),
        ({"gamma": 1e6}, r"gamma must lie in \(0, [0-9.]+\], got 1000000.0"),
        ({"relax": "yes"}, "relax must be one of False, True, got 'yes'"),
        ({"n_gammas": 0}, "n_gammas must be an integer"),
        ({"max_iter": 0}, "max_iter must be an integer"),
        ({"gap": 0.0}, "gap must lie between 0 and 1"),
        ({"gamma_ratio": 1.0}, "gamma_ratio must lie between 0 and 1"),
        ({"convergence": "hope"}, "convergence must be one of raise, warn, got 'hope'"),
        ({"n_folds": 1}, "give one gamma, or n_folds >= 2"),
    ],
)
def test_bad_parameters_are_one_sentence(options, message):
    with pytest.raises(DataError, match=message):
        fitted(**options)


def test_the_candidates_are_at_most_a_hundred_unless_max_rank_is_given():
    rows = np.random.default_rng(1).normal(size=(150, 2))
    given = {"kernel_x": kernels.Gaussian(0.1), "kernel_y": kernels.Gaussian(1.0), "gamma": 1e-3}
    with pytest.warns(RankWarning, match=r"max_rank=100 \(the default\) was reached"):
        model = SparseEmbedding(**given, reg=1e-2, n_folds=1).fit(rows, rows[:, 0], workers=1)
    assert model.basis_x_.rank == 100


def test_a_path_that_misses_its_gap_says_so():
    with pytest.raises(ConvergenceError, match=r"relative duality gap .* after max_iter=2 steps"):
        fitted(max_iter=2)
    with pytest.warns(ConvergenceWarning, match="the requested gap is 1.0e-08"):
        model = fitted(max_iter=2, convergence="warn", gamma=1e-3)
    assert model.path_.gaps[0] > 1e-8


def test_bad_questions_are_one_sentence(by_rows):
    with pytest.raises(NotFittedError, match="SparseEmbedding is not fitted"):
        SparseEmbedding().predict(X)
    model = by_rows
    with pytest.raises(DataError, match="unknown column 'z': there are y0"):
        model.expect("z", X)
    with pytest.raises(DataError, match=r"must return shape \(\d+,\) or \(\d+, d\)"):
        model.expect(lambda y: y[:-1], X)
    with pytest.raises(DataError, match="values that are NaN"):
        model.expect(lambda y: y[:, 0] * np.nan, X)
    with pytest.raises(DataError, match="expect takes columns, events and functions of rows"):
        model.expect([1.0], X)
    pair = [lambda y: np.hstack([y, y]), lambda y: np.hstack([y, y, y])]
    with pytest.raises(DataError, match=r"must have values of one shape, got \(2,\), \(3,\)"):
        model.expect(pair, X)
    with pytest.raises(DataError, match="must have shape"):
        model.predict(np.zeros((3, 2)))
    with pytest.raises(DataError, match="position must be an integer from 0 to 5"):
        model.model_at(6)
