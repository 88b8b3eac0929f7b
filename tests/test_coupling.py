"""The coupling: on the polytope, optimal by conditions that are not the solver's own."""

import clarabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import linprog

from cme_dask.data.generate import Normal3
from cme_dask.errors import DataError
from cme_dask.kernels import Gaussian
from cme_dask.numerics.coupling import round_coupling, solve_coupling
from cme_dask.numerics.partition import PartitionBasis, pivot_landmarks
from cme_dask.numerics.problem import Regularization

TOL = 1e-6


class Case:
    """Moments of two partitions b (rows sum to one), and the program written down densely."""

    def __init__(self, b_y, b_x, reg=(0.0, 0.0)):
        n = len(b_y)
        self.yy, self.yx, self.xx = b_y.T @ b_y / n, b_y.T @ b_x / n, b_x.T @ b_x / n
        self.cy, self.cx = b_y.mean(axis=0), b_x.mean(axis=0)
        self.reg = Regularization(*reg)

    def solve(self, **options):
        return solve_coupling(self.yy, self.yx, self.xx, self.cy, self.cx, self.reg, **options)

    def gradient(self, C):
        """Written with the ridge multiplied out: S_YY C S_XX - S_YX + ridge on E = C - 1."""
        E, (ry, rx) = C - 1.0, (self.reg.y, self.reg.x)
        return (
            self.yy @ C @ self.xx - self.yx + ry * (E @ self.xx) + rx * (self.yy @ E) + ry * rx * E
        )

    def objective(self, C):
        """Half of tr(C^T S_YY C S_XX) - 2 <S_YX, C> plus the ridge."""
        E, (ry, rx) = C - 1.0, (self.reg.y, self.reg.x)
        ridge = ry * (E * (E @ self.xx)).sum() + rx * (E * (self.yy @ E)).sum()
        ridge += ry * rx * (E**2).sum()
        return 0.5 * ((C * (self.yy @ C @ self.xx)).sum() + ridge) - (self.yx * C).sum()

    @property
    def equalities(self):
        """Marginals of vec(C), rows first."""
        columns = sparse.kron(self.cy[None], sparse.eye(len(self.cx)))
        rows = sparse.kron(sparse.eye(len(self.cy)), self.cx[None])
        return sparse.vstack([columns, rows]).tocsc()

    def feasible(self, C):
        assert (C >= 0.0).all()
        np.testing.assert_allclose(self.cy @ C, 1.0, rtol=0, atol=1e-12)
        np.testing.assert_allclose(C @ self.cx, 1.0, rtol=0, atol=1e-12)

    def room(self, C):
        """By how much any feasible point could be better: <gradient, C - C'> at the best vertex."""
        F = self.gradient(C)
        found = linprog(
            (F / np.outer(self.cy, self.cx)).ravel(),  # masses P = c_Y C c_X, of order one
            # Without the last equality, which the others imply but for rounding.
            A_eq=sparse.vstack(
                [
                    sparse.kron(np.ones((1, len(self.cy))), sparse.eye(len(self.cx))),
                    sparse.kron(sparse.eye(len(self.cy)), np.ones((1, len(self.cx)))),
                ]
            ).tocsr()[:-1],
            b_eq=np.concatenate([self.cx, self.cy])[:-1],
            method="highs",
        )
        assert found.status == 0, found.message
        return float((F * C).sum()) - found.fun

    def clarabel(self):
        """Lowest objective by a general solver."""
        my, mx = len(self.cy), len(self.cx)
        P = np.kron(self.yy + self.reg.y * np.eye(my), self.xx + self.reg.x * np.eye(mx))
        linear = self.gradient(np.ones((my, mx))).ravel() - P @ np.ones(my * mx)
        A = sparse.vstack([self.equalities, -sparse.eye(my * mx)]).tocsc()
        b = np.concatenate([np.ones(mx + my), np.zeros(my * mx)])
        settings_ = clarabel.DefaultSettings()
        settings_.verbose = False
        solver = clarabel.DefaultSolver(
            sparse.triu(sparse.csc_matrix(P)).tocsc(),
            linear,
            A,
            b,
            [clarabel.ZeroConeT(mx + my), clarabel.NonnegativeConeT(my * mx)],
            settings_,
        )
        C = np.array(solver.solve().x).reshape(my, mx)
        return self.objective(round_coupling(C, self.cy, self.cx))


def softmax(logits):
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def normal(count, scale, reg, n=3000, scenario="strong"):
    """Normal columns of variance 1/25 and Gaussian partitions of them, scale in deviations."""
    x, y = next(Normal3(scenario).batches(n, 7))
    kernel = Gaussian(0.2 * scale)
    values = []
    for rows in (y, x):
        landmarks = rows[:count]  # any rows; pivots of one column are few at large scales
        values.append(PartitionBasis(kernel, landmarks)(rows))
    return Case(*values, reg=(reg, reg))


def random_case(seed, my, mx, sharp, reg, n=60):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    y = x + 0.3 * rng.normal(size=(n, 2))
    b_y, b_x = (softmax(sharp * z @ rng.normal(size=(2, m))) for z, m in ((y, my), (x, mx)))
    return Case(b_y, b_x, reg)


def check(case, C, outcome, tol=TOL):
    case.feasible(C)
    assert outcome.kkt_residual <= tol
    assert outcome.converged
    assert outcome.gap >= -1e-12
    size = np.abs(case.yx - np.outer(case.cy, case.cx)).sum()
    room = case.room(C)
    # The certificate is ours: linear programming over the polytope, not the solver's multipliers.
    assert room <= 1e-4 * size + 1e-9
    room = max(room, 0.0)
    rng, here = np.random.default_rng(0), case.objective(C)
    for _ in range(20):
        other = round_coupling(rng.exponential(size=C.shape) ** 3, case.cy, case.cx)
        for step in (1e-3, 0.1, 1.0):
            assert case.objective(C + step * (other - C)) >= here - step * room - 1e-13


@pytest.mark.parametrize("reg", [0.0, 1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("scale", [0.2, 0.6, 2.0])
def test_optimal_on_normal_columns(scale, reg):
    case = normal(24, scale, reg)
    check(case, *case.solve())


@pytest.mark.parametrize("reg", [0.0, 1e-6, 1e-3])
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_objective_equals_clarabel(scale, reg):
    case = normal(14, scale, reg)
    C, _ = case.solve(tol=1e-8)
    assert abs(case.objective(C) - case.clarabel()) <= 1e-6


sizes = st.integers(1, 9)


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    sizes,
    sizes,
    st.sampled_from([1e-6, 0.1, 1.0, 5.0, 30.0]),
    st.sampled_from([(0.0, 0.0), (1e-12, 1e-12), (1e-6, 1e-4), (1e-2, 0.0), (1.0, 1.0)]),
)
def test_optimal_on_random_moments(seed, my, mx, sharp, reg):
    # sharp = 1e-6: all functions nearly equal, eigenvalues of 1e-12; 30: nearly indicators.
    case = random_case(seed, my, mx, sharp, reg)
    check(case, *case.solve())


@pytest.mark.parametrize("reg", [1e-6, 1e-3])
def test_two_hundred_landmarks(reg):
    case = normal(200, 0.5, reg)
    C, outcome = case.solve()
    case.feasible(C)
    assert outcome.kkt_residual <= TOL
    rng, here = np.random.default_rng(1), case.objective(C)
    for _ in range(5):
        other = round_coupling(rng.exponential(size=C.shape) ** 4, case.cy, case.cx)
        assert case.objective(C + 1e-3 * (other - C)) >= here - 1e-9


def test_residual_is_measured_not_claimed():
    case = normal(24, 0.6, 1e-6)
    C, outcome = case.solve(max_iterations=20)
    case.feasible(C)
    assert outcome.kkt_residual > 1e-4
    assert not outcome.converged
    assert outcome.status == "inaccurate"
    best, _ = case.solve(tol=1e-8)
    assert case.objective(C) - case.objective(best) <= outcome.gap * max(1, abs(outcome.gap)) + 1e-9


def test_one_landmark():
    b = softmax(np.random.default_rng(0).normal(size=(40, 5)))
    for case in (Case(np.ones((40, 1)), b), Case(b, np.ones((40, 1))), Case(b[:, :1] * 0 + 1, b)):
        C, outcome = case.solve()
        np.testing.assert_allclose(C, 1.0, rtol=1e-13)
        assert outcome.converged


def test_equal_rows_and_independence_give_one():
    b = softmax(np.random.default_rng(0).normal(size=(1, 6)))
    C, outcome = Case(np.repeat(b, 30, axis=0), np.repeat(b, 30, axis=0)).solve()
    np.testing.assert_allclose(C, 1.0, rtol=0, atol=1e-12)
    assert outcome.converged
    b_y = softmax(np.random.default_rng(1).normal(size=(20, 4)))
    b_x = softmax(np.random.default_rng(2).normal(size=(15, 5)))
    case = Case(np.repeat(b_y, 15, axis=0), np.tile(b_x, (20, 1)))  # every pair of rows once
    C, outcome = case.solve()
    np.testing.assert_allclose(C, 1.0, rtol=0, atol=1e-12)
    assert outcome.converged


def test_identical_variables_of_classes():
    b = np.repeat(np.eye(4), [5, 10, 15, 20], axis=0)
    case = Case(b, b)
    C, outcome = case.solve(tol=1e-8)
    # The gradient is zero there: the objective sees the square of what is missing.
    np.testing.assert_allclose(C, np.diag(1 / case.cx), atol=1e-3)
    assert case.objective(C) - case.objective(np.diag(1 / case.cx)) <= 1e-8
    assert outcome.converged


def test_landmarks_without_mass():
    b_x = softmax(3 * np.random.default_rng(0).normal(size=(50, 5)))
    b_y = np.insert(softmax(b_x @ np.random.default_rng(1).normal(size=(5, 4)) * 4), 2, 0.0, axis=1)
    case = Case(b_y, b_x, (1e-4, 1e-4))
    C, outcome = case.solve()
    assert outcome.converged
    np.testing.assert_array_equal(C[2], 1.0)
    without, _ = Case(np.delete(b_y, 2, axis=1), b_x, (1e-4, 1e-4)).solve()
    # Products of other shapes round otherwise: 32 units in the last place of the largest number.
    room = 32 * np.finfo(float).eps * np.abs(without).max()
    np.testing.assert_allclose(np.delete(C, 2, axis=0), without, rtol=0, atol=room)
    tiny = np.insert(np.delete(b_y, 2, axis=1) * (1 - 1e-25), 2, 1e-25, axis=1)
    case = Case(tiny, b_x, (1e-4, 1e-4))
    C, outcome = case.solve()
    case.feasible(C)
    assert outcome.converged


def test_ridge_shrinks_to_independence():
    sizes = [np.abs(normal(20, 0.6, reg).solve()[0] - 1.0).max() for reg in (1e-4, 1e-2, 1.0, 1e4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 1e-6


def test_warm_start_over_a_path():
    cold = warm = 0
    start = None
    for reg in (1e-2, 7e-3, 5e-3, 3e-3):
        case = normal(40, 0.6, reg)
        C, outcome = case.solve()
        D, again = case.solve(start=start)
        check(case, D, again)
        assert abs(case.objective(C) - case.objective(D)) <= 1e-7
        cold, warm, start = cold + outcome.iterations, warm + again.iterations, D
    assert warm <= cold


def test_only_the_two_sided_ridge():
    case = normal(4, 1.0, 0.0)
    case.reg = Regularization(0.0, 1e-3, "single")
    with pytest.raises(DataError, match="two-sided"):
        case.solve()


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 12), st.floats(0, 12))
def test_rounding(seed, my, mx, spread):
    rng = np.random.default_rng(seed)
    cy, cx = (np.exp(spread * rng.uniform(-2, 0, size=m)) for m in (my, mx))
    cy, cx = cy / cy.sum(), cx / cx.sum()
    C = rng.normal(size=(my, mx)) * np.exp(rng.normal(size=(my, mx)))
    C = round_coupling(C, cy, cx)
    assert (C >= 0.0).all()
    np.testing.assert_allclose(cy @ C, 1.0, rtol=0, atol=1e-12)
    np.testing.assert_allclose(C @ cx, 1.0, rtol=0, atol=1e-12)
    again = round_coupling(C, cy, cx)
    np.testing.assert_allclose(cy[:, None] * again * cx, cy[:, None] * C * cx, rtol=0, atol=1e-14)


def test_pivots_as_landmarks():
    x, _ = next(Normal3("strong").batches(500, 3))
    kernel = Gaussian(0.1)
    few, many = (pivot_landmarks(kernel, x, None, count) for count in (4, 9))
    np.testing.assert_array_equal(many[:4], few)
