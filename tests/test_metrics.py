"""Scores against what they are by definition: double sums, integrals, all pairs of rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import solve_joint
from scipy.stats import norm

import cme_dask
from cme_dask import kernels, metrics
from cme_dask.errors import DataError
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, Moments, strip_moments
from cme_dask.numerics.problem import JointSolution, Regularization

# CRPS --------------------------------------------------------------------------------------------


def by_double_sum(w, points, y):
    """Sum w |p - y| - sum sum w w |p - p| / 2, mean over the coordinates."""
    points, y = points.reshape(len(points), -1), y.reshape(len(y), -1)
    total = np.zeros(len(y))
    for p, z in zip(points.T, y.T, strict=True):
        apart = np.abs(p[:, None] - p[None])
        total += (w * np.abs(p - z[:, None])).sum(axis=1) - 0.5 * ((w @ apart) * w).sum(axis=1)
    return total / y.shape[1]


def by_integral(w, points, y):
    """The integral of (F(z) - 1{y <= z})^2 over the pieces on which it is constant."""
    result = []
    for weights, z in zip(w, y, strict=True):
        ends = np.sort(np.append(points, z))
        middle = (ends[1:] + ends[:-1]) / 2
        F = ((points[None] <= middle[:, None]) * weights).sum(axis=1)
        result.append((np.diff(ends) * (F - (z <= middle)) ** 2).sum())
    return np.array(result)


@settings(max_examples=80, deadline=None)
@given(
    q=st.integers(1, 20),
    size=st.integers(1, 200),
    d=st.integers(1, 3),
    signed=st.booleans(),
    tied=st.booleans(),
    offset=st.sampled_from([0.0, 1e6]),
    seed=st.integers(0, 10**6),
)
def test_crps_is_the_double_sum_and_the_integral(q, size, d, signed, tied, offset, seed):
    rng = np.random.default_rng(seed)
    points, y = rng.normal(size=(size, d)), rng.normal(size=(q, d))
    if tied:
        points, y = points.round(), y.round()
    points, y = points + offset, y + offset
    w = rng.dirichlet(np.full(size, 0.5), q)
    if signed and size > 1:
        move = rng.standard_normal((q, size))
        w += move - move.mean(axis=1, keepdims=True)
    found = metrics.crps(w, points, y)
    scale = np.abs(w).sum(axis=1).max() ** 2 * (1 + offset)
    assert np.abs(found - by_double_sum(w, points, y)).max() <= 1e-13 * scale
    integrals = [by_integral(w, p, z) for p, z in zip(points.T, y.T, strict=True)]
    assert np.abs(found - np.mean(integrals, axis=0)).max() <= 1e-13 * scale
    assert (found >= -1e-13 * scale).all()


def test_crps_of_one_atom_is_the_absolute_error():
    y = np.random.default_rng(0).normal(size=50)
    assert np.abs(metrics.crps(np.ones((50, 1)), [0.3], y) - np.abs(y - 0.3)).max() < 1e-15


def test_crps_of_many_atoms_approaches_that_of_the_normal_law():
    """Closed form: Gneiting and Raftery (2007), (5)."""
    atoms = norm.ppf((np.arange(4000) + 0.5) / 4000)
    y = np.array([-2.0, 0.0, 0.7])
    found = metrics.crps(np.full((3, 4000), 1 / 4000), atoms, y)
    exact = y * (2 * norm.cdf(y) - 1) + 2 * norm.pdf(y) - 1 / np.sqrt(np.pi)
    assert np.abs(found - exact).max() < 1e-3


def test_crps_prefers_the_truth():
    rng = np.random.default_rng(1)
    points, truth = rng.normal(size=30), rng.dirichlet(np.ones(30))
    other = rng.dirichlet(np.ones(30), 20)
    laws = np.concatenate([truth[None], other])
    # The expected score under the truth, exactly: over all atoms as observations.
    scores = [metrics.crps(np.tile(law, (30, 1)), points, points) @ truth for law in laws]
    assert scores[0] < min(scores[1:])


def test_the_nearest_distribution_function_scores_no_worse_than_a_signed_one():
    rng = np.random.default_rng(2)
    points = np.sort(rng.normal(size=12))
    w = rng.dirichlet(np.ones(12))
    w = w + 0.3 * (rng.permutation(w) - w) * 5
    assert (w < 0).any()
    from scipy.optimize import isotonic_regression

    F = isotonic_regression(np.cumsum(w)[:-1], weights=np.diff(points)).x.clip(0, 1)
    law = np.diff(np.concatenate([[0.0], F, [1.0]]))
    y = rng.normal(size=200) * 2
    signed, lawful = (metrics.crps(np.tile(v, (200, 1)), points, y) for v in (w, law))
    assert (lawful <= signed + 1e-14).all()
    assert (lawful < signed - 1e-4).any()


def test_crps_of_what_does_not_fit_is_refused():
    w = np.full((2, 3), 1 / 3)
    with pytest.raises(DataError, match="got shapes"):
        metrics.crps(w, np.zeros(2), np.zeros(2))
    with pytest.raises(DataError, match="got shapes"):
        metrics.crps(w, np.zeros((3, 2)), np.zeros(2))
    with pytest.raises(DataError, match="add up to one"):
        metrics.crps(2 * w, np.zeros(3), np.zeros(2))
    with pytest.raises(DataError, match="NaN"):
        metrics.crps(w, np.zeros(3), [np.nan, 0.0])
    with pytest.raises(DataError, match="numbers expected"):
        metrics.crps(w, ["a", "b", "c"], np.zeros(2))


# Criteria ----------------------------------------------------------------------------------------


def test_criteria_by_hand():
    estimate, truth = np.array([[0.1, 0.9], [0.4, 0.5]]), np.array([[0.0, 1.0], [1.0, 0.0]])
    by_hand = (0.1**2 + 0.1**2 + 0.6**2 + 0.5**2) / 2
    assert metrics.oracle_error(estimate, truth) == pytest.approx(by_hand, rel=1e-15)
    assert metrics.validation_error(estimate, truth) == pytest.approx(by_hand, rel=1e-15)
    assert metrics.brier(estimate, truth == 1.0) == pytest.approx(by_hand, rel=1e-15)
    assert metrics.brier([0.25, 0.5], [1, 0]) == pytest.approx((0.75**2 + 0.25) / 2, rel=1e-15)


def test_validation_error_is_the_oracle_error_plus_the_noise():
    rng = np.random.default_rng(3)
    p = rng.random((100_000, 1))
    events = rng.random((100_000, 1)) < p
    estimate = 0.8 * p + 0.1
    noise = (p * (1 - p)).mean()
    expected = metrics.oracle_error(estimate, p) + noise
    assert abs(metrics.validation_error(estimate, events) - expected) < 2e-3


@pytest.mark.parametrize("metric", [metrics.oracle_error, metrics.validation_error, metrics.brier])
def test_criteria_of_what_does_not_fit_are_refused(metric):
    with pytest.raises(DataError, match="one shape"):
        metric(np.zeros((2, 1)), np.zeros((3, 1)))
    with pytest.raises(DataError, match="one shape"):
        metric(np.zeros((0, 1)), np.zeros((0, 1)))
    with pytest.raises(DataError, match="NaN"):
        metric(np.full(2, np.nan), np.zeros(2))
    with pytest.raises(DataError, match="0 or 1"):
        metrics.brier(np.zeros(2), [0.5, 1.0])


def test_the_module_is_public():
    assert cme_dask.metrics is metrics
    assert "metrics" in cme_dask.__all__


# Held-out joint loss -----------------------------------------------------------------------------


def by_pairs(g, w):
    """-2 (E_P h - E_PxP h) + E_PxP h^2 of h = g - 1 at all pairs of rows, weights w of sum 1."""
    h, pairs = g - 1, np.outer(w, w)
    return -2 * (w @ np.diag(h) - (pairs * h).sum()) + (pairs * h**2).sum()


def fold_case(n=300, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    Y = X[:, :1] + 0.5 * rng.normal(size=(n, 1))
    w, folds = rng.exponential(size=n), rng.integers(0, 3, n).astype(np.uint8)
    x = FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), X[:20]), ("a", "b"))
    y = FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(0.7), Y[:15]), ("y",))
    return X, Y, w, folds, (x, y), strip_moments(MomentReduction((x, y), 4), (X, Y), w, folds)


@pytest.mark.parametrize("constraint", ["none", "normalized"])
@pytest.mark.parametrize("reg", [1e-6, (1e-2, 1e-3)])
def test_held_out_loss_is_that_over_all_pairs_of_held_out_rows(constraint, reg):
    X, Y, w, folds, sides, moments = fold_case()
    ridge = Regularization.parse(reg, "two-sided")

    def solve(mean):
        return solve_joint(mean, constraint, ridge)

    losses, shares = metrics.held_out_losses(moments, solve)
    assert len(losses) == 3  # the fold without rows has no loss
    for fold in range(3):
        mine = folds == fold
        assert shares[fold] == pytest.approx(w[mine].sum() / w.sum(), rel=1e-12)
        solution = solve(moments.means(without=fold))
        phi = sides[0].basis(X[mine]) @ solution.transform_x
        psi = sides[1].basis(Y[mine]) @ solution.transform_y
        g = 1 + psi @ solution.coef @ phi.T
        plain = by_pairs(g, w[mine] / w[mine].sum())
        assert losses[fold] == pytest.approx(plain, rel=1e-9, abs=1e-11)
        held = moments.means(fold=fold)
        assert metrics.held_out_loss(held, solution) == losses[fold]


def test_held_out_loss_with_base_zero_is_that_of_g_minus_one():
    """Features that add up to one on each side: g = b_Y^T C b_X."""
    rng = np.random.default_rng(4)
    n, sizes = 80, (5, 4)
    b_x, b_y = (rng.dirichlet(np.ones(size), n) for size in sizes)
    w = rng.dirichlet(np.ones(n))
    blocks = {
        ("x", "x"): (b_x * w[:, None]).T @ b_x,
        ("y", "y"): (b_y * w[:, None]).T @ b_y,
        ("y", "x"): (b_y * w[:, None]).T @ b_x,
    }
    held = Moments(1.0, blocks, {"x": w @ b_x, "y": w @ b_y}, {"x": 1.0, "y": 1.0}, {})
    C = rng.exponential(size=sizes[::-1])
    eyes = [np.eye(size) for size in sizes]
    lam = [np.ones(size) for size in sizes]
    for coef in (C, np.ones_like(C)):
        solution = JointSolution(coef, *eyes, *lam, centred=False, info=None, base=0.0)
        plain = by_pairs(b_y @ coef @ b_x.T, w)
        assert metrics.held_out_loss(held, solution) == pytest.approx(plain, rel=1e-11, abs=1e-14)
    assert abs(plain) < 1e-14  # C = 1 is independence, whose loss is 0


def test_held_out_loss_orders_models_as_the_truth_does():
    """It estimates |g - g0|^2 - |g0 - 1|^2: differences are those of the distance, up to noise."""
    rng = np.random.default_rng(5)
    n, rho = 100_000, 0.6
    X = rng.normal(size=(2 * n, 1))
    Y = rho * X + np.sqrt(1 - rho**2) * rng.normal(size=(2 * n, 1))
    sides = tuple(
        FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(0.8), part[:30]), (name,))
        for name, part in (("x", X), ("y", Y))
    )
    folds = np.append(np.zeros(n, np.uint8), rng.integers(1, 21, n).astype(np.uint8))
    moments = strip_moments(MomentReduction(sides, 21), (X, Y), None, folds)
    rest, *held = (moments.means(fold=fold) for fold in range(21))
    u = norm.ppf((np.arange(300) + 0.5) / 300)[:, None]
    grid = [side.basis(u) for side in sides]
    cov = np.array([[1, rho], [rho, 1]])
    inverse = np.linalg.inv(cov) - np.eye(2)
    pairs = np.stack(np.meshgrid(u[:, 0], u[:, 0]), axis=-1)
    truth = np.exp(-0.5 * np.einsum("abi,ij,abj->ab", pairs, inverse, pairs))
    truth /= np.sqrt(np.linalg.det(cov))
    distances, losses = [], []
    for reg in (1e-1, 1e-2, 1e-3):
        solution = solve_joint(rest, "normalized", Regularization.parse(reg, "two-sided"))
        g = 1 + grid[1] @ solution.transform_y @ solution.coef @ (grid[0] @ solution.transform_x).T
        distances.append(((g - truth) ** 2).mean())
        losses.append([metrics.held_out_loss(fold, solution) for fold in held])
    differences = np.diff(losses, axis=0)
    noise = differences.std(axis=1, ddof=1) / np.sqrt(20)
    found = np.abs(differences.mean(axis=1) - np.diff(distances))
    assert (found < 4 * noise + 1e-3).all()
    assert noise.max() < 0.02 < -np.diff(distances).max()
