"""The traditional embedding: against its dense form on rows, and refits without each fold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask import kernels
from cme_dask.errors import DataError
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.embedding import MAX_ROWS, ConditionalEmbedding, surrogate_losses
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments


def case(n=200, n_folds=4, seed=0, duplicated=False):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    if duplicated:
        X = X[rng.integers(0, 3, n)]
    Y = np.sin(X[:, :1]) + 0.3 * rng.normal(size=(n, 1)) + 5.0
    w = rng.exponential(size=n)
    folds = rng.integers(0, n_folds - 1, n).astype(np.uint8)  # the last one stays empty
    x = FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.2), X[:25]), ("a", "b"))
    y = FeatureBlock(
        NewtonBasis.from_points(kernels.Gaussian(0.5), Y[:20]),
        ("y",),
        {"event": lambda rows: rows[:, 0] > 5},
        np.array([5.0, 0.4]),
    )
    moments = strip_moments(MomentReduction((x, y), n_folds), (X, Y), w, folds)
    return X, Y, w, folds, (x, y), moments


def functions(Y):
    return np.column_stack([Y[:, 0], Y[:, 0] > 5])


@settings(max_examples=30)
@given(
    reg=st.sampled_from([1e-9, 1e-4, 1e-2, 1.0, 100.0]),
    duplicated=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_is_the_dense_form_on_the_rows(reg, duplicated, seed):
    """f(Y)^T M k_X(X, x) with M = (K_X + n reg)^-1 of the kernel that the basis spans."""
    X, Y, w, _, sides, moments = case(seed=seed, duplicated=duplicated)
    p = w / w.sum()
    mean = moments.means()
    model = ConditionalEmbedding.of(mean, reg)
    L = sides[0].basis(X)
    at = sides[0].basis(np.random.default_rng(seed + 1).normal(size=(30, 2)))
    # Weighted rows: (K + reg W^-1)^-1, which is (K + n reg)^-1 for w = 1 / n.
    dense = np.linalg.solve(L @ L.T + reg * np.diag(1 / p), L @ at.T).T
    accuracy = 1e-13 + 1e-15 / reg
    weights = at @ model.rows(L, p)
    assert np.abs(weights - dense).max() <= accuracy * np.abs(dense).max() + 1e-15
    constant, slope = model.answers(mean)
    remainder = 1.0 - dense.sum(axis=1, keepdims=True)  # spread over all rows
    for found, plain in (
        (constant + at @ slope, dense @ functions(Y) + remainder * (p @ functions(Y))),
        (at @ model.one(mean), dense.sum(axis=1)),
    ):
        assert np.abs(found - plain).max() <= accuracy * max(1.0, np.abs(dense).sum(axis=1).max())


def test_equal_weights_give_the_formula_as_printed():
    X, Y, _, folds, sides, _ = case()
    n, reg = len(X), 1e-3
    moments = strip_moments(MomentReduction(sides, 4), (X, Y), None, folds)
    mean = moments.means()
    model = ConditionalEmbedding.of(mean, reg)
    L, at = sides[0].basis(X), sides[0].basis(X[:10] + 0.1)
    M = np.linalg.inv(L @ L.T + n * reg * np.eye(n))
    weights = (M @ (L @ at.T)).T
    plain = weights @ functions(Y) + (1.0 - weights.sum(axis=1))[:, None] * functions(Y).mean(
        axis=0
    )
    constant, slope = model.answers(mean)
    assert np.abs(constant + at @ slope - plain).max() < 1e-9


def test_weights_of_cells_are_those_of_their_rows_added_up():
    X, _, w, _, sides, moments = case()
    p = w / w.sum()
    model = ConditionalEmbedding.of(moments.means(), 1e-3)
    L = sides[0].basis(X)
    cells = np.random.default_rng(1).integers(0, 7, len(X))
    each, together = model.rows(L, p), model.cells(L, p, cells, 9)
    plain = np.stack([each[:, cells == s].sum(axis=1) for s in range(9)], axis=1)
    assert np.abs(together - plain).max() < 1e-11
    assert not together[:, 7:].any()


def test_without_a_ridge_directions_that_are_rounding_are_left_out():
    X, Y, _, _, sides, moments = case(duplicated=True)
    mean = moments.means()
    model = ConditionalEmbedding.of(mean, 0.0)
    assert np.count_nonzero(model.shrunk) == 3
    # Three distinct rows: the answers there are their own means.
    w = case(duplicated=True)[2]
    constant, slope = model.answers(mean)
    found = constant + sides[0].basis(X) @ slope
    for row in np.unique(X, axis=0):
        mine = (row == X).all(axis=1)
        plain = np.average(functions(Y)[mine], axis=0, weights=w[mine])
        assert np.abs(found[mine] - plain).max() < 1e-9


def test_the_ridge_that_vanishes_and_the_one_that_swallows_all():
    _, _, _, _, sides, moments = case()
    mean = moments.means()
    at = sides[0].basis(case()[0])
    assert np.abs(at @ ConditionalEmbedding.of(mean, 1e9).answers(mean)[1]).max() < 1e-7
    near, far = (at @ ConditionalEmbedding.of(mean, reg).one(mean) for reg in (1e-8, 1e-1))
    assert np.abs(near - 1).mean() < 0.03
    assert 0.1 < np.abs(far - 1).mean() < 1.0  # it is no law


@pytest.mark.parametrize("duplicated", [False, True])
def test_surrogate_losses_are_those_of_refits_on_rows(duplicated):
    X, Y, w, folds, sides, moments = case(duplicated=duplicated)
    regs = np.array([1e-6, 1e-3, 1e-1, 10.0])
    losses, shares = surrogate_losses(moments, regs)
    assert losses.shape == (3, 4)
    N, M = sides[0].basis(X), sides[1].basis(Y)
    diagonal = np.ones(len(Y))  # k_Y(y, y) of the kernel itself, not of its projection
    for fold in range(3):
        held, rest = folds == fold, folds != fold
        assert shares[fold] == pytest.approx(w[held].sum() / w.sum(), rel=1e-12)
        p, q = w[rest] / w[rest].sum(), w[held] / w[held].sum()
        for i, reg in enumerate(regs):
            S = (N[rest] * p[:, None]).T @ N[rest]
            C = ((M[rest] * p[:, None]).T @ N[rest]) @ np.linalg.inv(S + reg * np.eye(len(S)))
            predicted = N[held] @ C.T
            plain = diagonal[held] - 2 * (M[held] * predicted).sum(axis=1)
            plain = q @ (plain + (predicted**2).sum(axis=1))
            assert losses[fold, i] == pytest.approx(plain, rel=1e-9)


def test_surrogate_losses_without_a_ridge_are_finite():
    _, _, _, _, _, moments = case(duplicated=True)
    losses, _ = surrogate_losses(moments, [0.0, 1e-9])
    assert losses[:, 0] == pytest.approx(losses[:, 1], rel=1e-4)


def test_one_fold_has_nothing_to_hold_out():
    *_, moments = case(n_folds=2)
    losses, shares = surrogate_losses(moments, [1.0, 2.0])
    assert losses.shape == (0, 2)
    assert shares.shape == (0,)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, "a", [[1.0]]])
def test_ridges_that_are_none_are_refused(bad):
    _, _, _, _, _, moments = case()
    mean = moments.means()
    with pytest.raises(DataError, match="ridges must be"):
        ConditionalEmbedding.of(mean, bad)
    with pytest.raises(DataError, match="ridges must be"):
        surrogate_losses(moments, bad)


def test_laws_on_too_many_rows_are_refused():
    _, _, _, _, _, moments = case()
    model = ConditionalEmbedding.of(moments.means(), 1.0)
    rows = np.zeros((MAX_ROWS + 1, 25))
    with pytest.raises(DataError, match="cells of a support"):
        model.rows(rows, np.zeros(len(rows)))
