"""Factors by LAPACK's routines: equal to NumPy, beside threads, and where one fails by another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import LinAlgError, lapack

from cme_dask.kernels.lapack import (
    CholeskyFactor,
    TridiagonalForm,
    pivoted_factor,
    singular_vectors,
    solve_lower,
)


def matrix_of(m, seed, rank=None):
    root = np.random.default_rng(seed).standard_normal((m, m if rank is None else rank))
    return root @ root.T


@settings(deadline=None, max_examples=40)
@given(
    m=st.integers(1, 40),
    k=st.integers(0, 7),
    order=st.sampled_from("CF"),
    seed=st.integers(0),
    data=st.data(),
)
def test_factors_solve_and_invert_as_numpy_does(m, k, order, seed, data):
    rng = np.random.default_rng(seed)
    reg = rng.uniform(0.5, 1.0, m)
    whole = matrix_of(m, seed) + np.diag(reg)
    matrix = np.array(whole - np.diag(reg), order=order)
    matrix[np.triu_indices(m, 1)] = np.nan  # what lies above the diagonal does not count
    before, rows = matrix.copy(), np.array(rng.standard_normal((k, m)), order=order)
    factor = CholeskyFactor.of(matrix, reg)
    np.testing.assert_array_equal(matrix, before)
    lower = np.tril(factor.lower)
    np.testing.assert_allclose(lower @ lower.T, whole, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(factor.solve(rows) @ whole, rows, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(solve_lower(factor.lower, rows) @ lower.T, rows, atol=1e-10)
    back = solve_lower(factor.lower, rows, transposed=False)
    np.testing.assert_allclose(back @ lower, rows, atol=1e-10)
    first = data.draw(st.integers(0, m - 1))
    some = slice(first, data.draw(st.integers(first + 1, m)))
    block = factor.inverse_at(some)
    np.testing.assert_allclose(block, np.linalg.inv(whole)[some, some], rtol=1e-8, atol=1e-8)
    np.testing.assert_array_equal(factor.lower, CholeskyFactor.of(matrix, reg).lower)


@pytest.mark.parametrize(("m", "rank"), [(1, 1), (30, 30), (60, 7), (200, 100)])
def test_pivoted_factors_are_those_of_scipy(m, rank):
    matrix = matrix_of(m, 1, rank)
    tol = 1e-10 * np.abs(matrix).max()
    factor, order = pivoted_factor(matrix, tol)
    _, expected, count, _ = lapack.dpstrf(matrix, lower=1, tol=tol)
    assert factor.shape == (m, rank) == (m, count)
    np.testing.assert_array_equal(order, expected - 1)
    np.testing.assert_allclose(factor @ factor.T, matrix[order][:, order], atol=10 * tol)


def test_matrices_without_a_factor_are_refused():
    with pytest.raises(LinAlgError, match="not positive definite"):
        CholeskyFactor.of(-np.eye(3))
    factor = CholeskyFactor.of(np.eye(3))
    for work in (factor.solve, lambda rows: solve_lower(factor.lower, rows)):
        with pytest.raises(ValueError, match="rows of 3 columns expected"):
            work(np.ones((2, 4)))


@settings(deadline=None, max_examples=40)
@given(
    m=st.integers(1, 40),
    k=st.integers(0, 7),
    order=st.sampled_from("CF"),
    reg=st.sampled_from([1e-8, 0.3, 1e5]),
    seed=st.integers(0),
)
def test_tridiagonal_forms_solve_as_numpy_does(m, k, order, reg, seed):
    whole = matrix_of(m, seed)
    matrix = np.array(whole, order=order)
    matrix[np.triu_indices(m, 1)] = np.nan
    before = matrix.copy()
    rows = np.array(np.random.default_rng(seed).standard_normal((k, m)), order=order)
    form = TridiagonalForm.of(matrix)
    np.testing.assert_array_equal(matrix, before)
    t = np.diag(form.diagonal) + np.diag(form.beside, 1) + np.diag(form.beside, -1)
    q = form.rotated(np.eye(m))
    np.testing.assert_allclose(q @ q.T, np.eye(m), atol=1e-12)
    np.testing.assert_allclose(q @ t @ q.T, whole, rtol=1e-12, atol=1e-12 * np.trace(whole))
    rotated = form.rotated(rows)
    np.testing.assert_allclose(rotated, rows @ q, atol=1e-12)
    np.testing.assert_allclose(form.rotated(rotated, back=True), rows, atol=1e-12)
    solved = form.rotated(form.solve_rotated(rotated, reg), back=True)
    residual = solved @ (whole + reg * np.eye(m)) - rows
    scale = 1.0 + np.abs(solved).max(initial=0.0) * np.trace(whole)
    np.testing.assert_allclose(residual, 0.0, atol=1e-13 * scale)


@pytest.mark.parametrize("matrix", [-np.eye(3), np.full((3, 3), np.nan)])
def test_tridiagonal_forms_that_are_not_positive_are_not_solved(matrix):
    form = TridiagonalForm.of(matrix)
    with pytest.raises(LinAlgError, match="not positive definite"):
        form.solve_rotated(np.ones((1, 3)), 1e-3)
    for work in (form.rotated, lambda rows: form.solve_rotated(rows, 2.0)):
        with pytest.raises(ValueError, match="rows of 3 columns expected"):
            work(np.ones((2, 4)))


@pytest.mark.parametrize(
    "name", ["factor", "inverse", "solve", "triangle", "pivoted", "tridiagonal", "rotated"]
)
def test_the_interpreter_is_free_while_lapack_runs(name, steps_beside):
    matrix = matrix_of(1200, 0) + 1200.0 * np.eye(1200)
    factor, rows = CholeskyFactor.of(matrix), np.ones((3000, 1200))
    form = TridiagonalForm.of(matrix)
    call = {
        "factor": lambda: CholeskyFactor.of(matrix),
        "inverse": lambda: factor.inverse_at(slice(0, 1200)),
        "solve": lambda: factor.solve(rows),
        "triangle": lambda: solve_lower(factor.lower, rows),
        "pivoted": lambda: pivoted_factor(matrix, 0.0),
        "tridiagonal": lambda: TridiagonalForm.of(matrix),
        "rotated": lambda: form.rotated(rows),
    }[name]
    assert steps_beside(call) > 100


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (4, 4), (0, 3)])
@pytest.mark.parametrize("full_matrices", [False, True])
def test_singular_vectors_where_the_fast_method_does_not_converge(
    shape, full_matrices, rng, monkeypatch
):
    """As it did not for a density ratio of 59 functions at 60 values of y."""
    matrix = rng.standard_normal(shape)
    expected = np.linalg.svd(matrix, full_matrices=full_matrices)
    for one, other in zip(
        singular_vectors(matrix, full_matrices=full_matrices), expected, strict=True
    ):
        np.testing.assert_array_equal(one, other)

    def failing(*_, **__):
        raise LinAlgError("SVD did not converge")

    monkeypatch.setattr(np.linalg, "svd", failing)
    u, s, vt = singular_vectors(matrix, full_matrices=full_matrices)
    assert (u.shape, vt.shape) == (expected[0].shape, expected[2].shape)
    np.testing.assert_allclose(s, expected[1], rtol=1e-13)
    np.testing.assert_allclose((u[:, : len(s)] * s) @ vt[: len(s)], matrix, atol=1e-13)
