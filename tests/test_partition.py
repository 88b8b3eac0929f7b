"""Logarithms of kernels, partitions of unity, and models made of them."""

import array_api_strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask.data.columns import Columns
from cme_dask.data.generate import Normal3
from cme_dask.data.model_file import read_model
from cme_dask.errors import DataError, StoreError
from cme_dask.kernels import (
    Custom,
    Delta,
    Gaussian,
    Laplace,
    Linear,
    Matern,
    Polynomial,
    RationalQuadratic,
)
from cme_dask.models.answers import ConditionalExpectation
from cme_dask.models.joint import JointModel, Variable
from cme_dask.numerics.basis import LinearBasis
from cme_dask.numerics.coupling import solve_coupling
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments
from cme_dask.numerics.partition import PartitionBasis, pivot_landmarks
from cme_dask.numerics.precision import ComputeMode
from cme_dask.numerics.problem import Regularization

KERNELS = [
    Gaussian(0.7),
    Gaussian((0.5, 1.0, 2.0)),
    Laplace(0.7),
    Matern(0.7, 0.5),
    Matern(0.7, 1.5),
    Matern(0.7, 2.5),
    RationalQuadratic(0.7, 0.4),
    RationalQuadratic(0.7, 1e6),
    Gaussian(0.7) + 0.5 * Laplace(2.0),
    2.0 * Gaussian((0.3, 2.0))[0, 2] * Matern(1.0, 1.5).on(1),
    Custom("one", lambda X, Z: np.ones((len(X), len(Z))), lambda X: np.ones(len(X))),
]
LIBRARY = KERNELS[:-1]  # a user's own works where it says it does


def points(seed=0, n=40, d=3):
    X = np.random.default_rng(seed).normal(size=(n, d))
    return X, np.concatenate([X[:6], X[6:11] + 0.3])


def logarithm(kernel, X, Z):
    out = np.empty((len(Z), len(X)))
    kernel.evaluator(Z, log=True)(X, out)
    return out.T


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_logarithm_of_the_kernel(kernel):
    X, Z = points()
    np.testing.assert_allclose(logarithm(kernel, X, Z), np.log(kernel(X, Z)), rtol=0, atol=1e-13)


def test_logarithms_do_not_underflow():
    X, Z = np.array([[0.0], [1e3], [2e5]]), np.array([[0.0], [1.0]])
    r = np.abs(X - Z.T)
    s = np.sqrt(5.0) * r
    for kernel, expected in (
        (Gaussian(1.0), -(r**2) / 2),
        (Laplace(1.0), -r),
        (Matern(1.0, 2.5), np.log1p(s + s**2 / 3) - s),
        (RationalQuadratic(1.0, 2.0), -2.0 * np.log1p(r**2 / 4)),
        (Gaussian(1.0) * Laplace(1.0), -(r**2) / 2 - r),
        (Gaussian(1.0) + Gaussian(2.0), np.logaddexp(-(r**2) / 2, -(r**2) / 8)),
        (3.0 * Laplace(1.0), np.log(3.0) - r),
    ):
        np.testing.assert_allclose(logarithm(kernel, X, Z), expected, rtol=1e-14, atol=1e-14)


def test_logarithm_of_zero_is_minus_infinity():
    X = np.array([[0.0], [1.0]])
    np.testing.assert_array_equal(logarithm(Delta(), X, X), [[0.0, -np.inf], [-np.inf, 0.0]])
    np.testing.assert_array_equal(logarithm(Delta() * Gaussian(1.0), X, X)[0, 1], -np.inf)


@pytest.mark.parametrize("kernel", [*LIBRARY, Delta()], ids=repr)
def test_array_api_strict(kernel):
    X, Z = points()
    xs, zs = array_api_strict.asarray(X), array_api_strict.asarray(Z)
    out = array_api_strict.empty((len(Z), len(X)), dtype=array_api_strict.float64)
    kernel.evaluator(zs, log=True)(xs, out)
    np.testing.assert_array_equal(np.asarray(out).T, logarithm(kernel, X, Z))
    basis = PartitionBasis(kernel, Z)
    values = basis(xs)
    assert type(values) is type(xs)
    np.testing.assert_array_equal(np.asarray(values), basis(X))
    np.testing.assert_array_equal(np.asarray(basis.support(xs)), basis.support(X))


@pytest.mark.parametrize(
    "kernel", [Linear(), Polynomial(2), Gaussian(1.0) + Linear(), 2.0 * Gaussian(1.0) * Linear()[0]]
)
def test_kernels_that_can_be_negative_are_refused(kernel):
    with pytest.raises(DataError, match="can be negative, but a kernel k >= 0 was expected"):
        PartitionBasis(kernel, points()[1])


def test_negative_values_of_a_users_kernel_are_refused():
    kernel = Custom("cosine", lambda X, Z: np.cos(X[:, :1] - Z[:, 0]), lambda X: np.ones(len(X)))
    with pytest.raises(DataError, match="can be negative"):
        PartitionBasis(kernel, points()[1])(10.0 * points()[0])


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_partition_equals_its_formula(kernel):
    X, Z = points(n=1300)
    basis, K = PartitionBasis(kernel, Z), kernel(X, Z)
    values = basis(X)
    np.testing.assert_allclose(values, K / K.sum(axis=1, keepdims=True), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(values.sum(axis=1), 1.0, rtol=0, atol=1e-14)
    assert basis.rank == len(Z)
    assert values.max() <= basis.bound == 1.0
    assert basis(X[:0]).shape == (0, len(Z))


@settings(max_examples=100)
@given(
    st.sampled_from([*LIBRARY, Delta()]),
    st.lists(st.floats(-1e8, 1e8), min_size=3, max_size=3),
    st.integers(1, 11),
)
def test_a_partition_everywhere(kernel, x, count):
    basis = PartitionBasis(kernel, points()[1][:count])
    values = basis(np.array([x]))
    assert (values >= 0.0).all()
    np.testing.assert_allclose(values.sum(axis=1), 1.0, rtol=0, atol=1e-14)
    assert 0.0 <= basis.support(np.array([x]))[0] <= 1.0


def test_far_away_the_nearest_landmark_answers():
    Z = np.array([[-1.0], [0.0], [2.0]])
    basis = PartitionBasis(Gaussian(1.0), Z)
    np.testing.assert_array_equal(basis(np.array([[1e3], [-1e3]])), [[0, 0, 1], [1, 0, 0]])
    np.testing.assert_array_equal(basis.support(np.array([[2.0], [1e3]])), [1.0, 0.0])
    assert 0.1 < basis.support(np.array([[3.0]]))[0] < 0.9


def test_unseen_levels_are_answered_by_all():
    basis = PartitionBasis(Delta(), np.array([[0.0], [1.0]]))
    values = basis(np.array([[1.0], [7.0]]))
    np.testing.assert_array_equal(values, [[0.0, 1.0], [0.5, 0.5]])
    np.testing.assert_array_equal(basis.support(np.array([[1.0], [7.0]])), [1.0, 0.0])


def test_support_of_kernels_without_a_constant_diagonal():
    X, Z = points()
    scaled = PartitionBasis(5.0 * Gaussian(0.7), Z).support(X)
    np.testing.assert_allclose(scaled, PartitionBasis(Gaussian(0.7), Z).support(X), rtol=1e-14)


def test_moments_need_no_elimination():
    x, y = next(Normal3("medium").batches(900, 0))
    bases = [PartitionBasis(Gaussian(0.1), rows[:5]) for rows in (x, y)]
    sides = (FeatureBlock(bases[0], ("x",)), FeatureBlock(bases[1], ("y0", "y1")))
    folds = (np.arange(len(x)) % 3).astype(np.uint8)
    b_x, b_y = (basis(rows) for basis, rows in zip(bases, (x, y), strict=True))
    spec = MomentReduction(sides, 3)
    for applied in (spec, ComputeMode(()).applied(spec), ComputeMode((0.5,)).applied(spec)):
        moments = strip_moments(applied, (x, y), None, folds)
        mean = moments.means()
        np.testing.assert_allclose(
            mean.blocks["y", "y"], b_y.T @ b_y / len(y), rtol=1e-13, atol=1e-16
        )
        np.testing.assert_allclose(
            mean.blocks["y", "x"], b_y.T @ b_x / len(y), rtol=1e-13, atol=1e-16
        )
        np.testing.assert_allclose(mean.means["x"], b_x.mean(axis=0), rtol=1e-13)
        np.testing.assert_allclose(mean.blocks["x", "x"].sum(axis=1), mean.means["x"], rtol=1e-13)


def test_landmarks_by_pivots_are_nested():
    X, _ = points(n=200)
    many = pivot_landmarks(Gaussian(0.5), X, None, 40)
    np.testing.assert_array_equal(pivot_landmarks(Gaussian(0.5), X, None, 15), many[:15])
    assert len(pivot_landmarks(Delta(), np.zeros((20, 1)), None, 5)) == 1


def coupled(count=30, n=1500):
    """A model of the coupling, and the rows that it was fitted on."""
    x, y = next(Normal3("strong").batches(n, 1))
    kernel = Gaussian(0.1)
    bases = [
        PartitionBasis(kernel, rows[pivot_landmarks(kernel, rows, None, count)], None)
        for rows in (x, y)
    ]
    sides = (
        FeatureBlock(bases[0], ("x0",), shift=np.array([0.3])),
        FeatureBlock(bases[1], ("y0", "y1")),
    )
    moments = strip_moments(MomentReduction(sides), (x, y), None, np.zeros(n, np.uint8))
    mean = moments.means()
    coef, outcome = solve_coupling(
        mean.blocks["y", "y"],
        mean.blocks["y", "x"],
        mean.blocks["x", "x"],
        mean.means["y"],
        mean.means["x"],
        Regularization(1e-5, 1e-5),
    )
    assert outcome.converged
    variables = []
    for given_, transform in ((0, coef.T), (1, coef)):
        other = 1 - given_
        size = bases[given_].rank
        slope = transform @ mean.blocks["xy"[other], f"f({'xy'[other]})"]
        none = np.zeros((0, slope.shape[1]))
        shift, slopes = mean.shifts["xy"[other]], np.zeros((0, size, slope.shape[1]))
        answers = ConditionalExpectation(sides[other].names, shift, slope, none, slopes)
        linear = LinearBasis(
            bases[given_], np.eye(size), np.diag(mean.blocks["xy"[given_], "xy"[given_]])
        )
        variables.append(Variable(Columns(sides[given_].columns), linear, answers))
    about = {
        "rows": n,
        "passes": 1,
        "folds": 1,
        "trace_error": {"x": 0.0, "y": 0.0},
        "constraint": "coupling",
        "reg": [1e-5, 1e-5],
        "reg_form": "two-sided",
        "tol": 1e-5,
    }
    model = JointModel(*variables, coef, about, moments.to_arrays(), base=0.0)
    return model, x, y


@pytest.fixture(scope="module")
def fitted():
    return coupled()


def test_a_law_everywhere(fitted):
    model, x, y = fitted
    far = 0.1 * np.array([[-1e3], [-30.0], [0.0], [30.0], [1e3], [1e6]])  # in length scales
    g = model.density_ratio(far, y)
    assert (g >= 0.0).all()
    np.testing.assert_allclose(g.mean(axis=1), 1.0, rtol=0, atol=1e-10)
    g = model.density_ratio(x, 0.1 * np.array([[1e3, -1e3], [0.0, 1e6], [0.1, 0.2]]))
    assert (g >= 0.0).all()
    np.testing.assert_allclose(g.mean(axis=0), 1.0, rtol=0, atol=1e-10)
    assert g.max() > 1.5  # it says something


def test_expectations_are_those_of_the_law(fitted):
    model, x, y = fitted
    at = np.array([[-100.0], [-0.3], [0.0], [0.2], [100.0]])
    values = model.expect(X=at)
    np.testing.assert_allclose(values, model.density_ratio(at, y) @ y / len(y), atol=1e-10)
    assert ((y.min(axis=0) <= values) & (values <= y.max(axis=0))).all()
    at = np.array([[0.1, -0.1], [50.0, 0.0]])
    values = model.expect(Y=at)
    np.testing.assert_allclose(values, model.density_ratio(x, at).T @ x / len(x), atol=1e-10)


def test_saved_and_read(fitted, tmp_path):
    model, x, y = fitted
    model.save(tmp_path / "m")
    state = read_model(tmp_path / "m")
    again = JointModel.from_state(state)
    assert again.base == 0.0
    assert isinstance(again.x.basis.newton, PartitionBasis)
    assert not any("factor" in name for name in state.arrays)
    np.testing.assert_array_equal(
        again.density_ratio(x[:9], y[:7]), model.density_ratio(x[:9], y[:7])
    )
    np.testing.assert_array_equal(again.expect(X=x[:9]), model.expect(X=x[:9]))


@pytest.mark.parametrize("base", [1.0, 0.5, "0", None])
def test_a_base_that_does_not_fit_is_refused(fitted, base):
    state = fitted[0].to_state()
    state.description["base"] = base
    with pytest.raises(StoreError, match="base"):
        JointModel.from_state(state)


@pytest.mark.parametrize("kernel", [Gaussian((1.0, 2.0, 3.0)), Gaussian(1.0).on(5)])
def test_a_kernel_of_other_columns_is_refused(fitted, kernel):
    state = fitted[0].to_state()
    state.description["x"]["basis"]["newton"]["kernel"] = kernel.to_dict()
    with pytest.raises(StoreError, match="the data have"):
        JointModel.from_state(state)


@pytest.mark.parametrize("kind", ["NewtonBasis", "LinearBasis", None, 3])
def test_an_unknown_basis_is_refused(fitted, kind):
    state = fitted[0].to_state()
    state.description["x"]["basis"]["newton"]["type"] = kind
    with pytest.raises(StoreError):
        JointModel.from_state(state)
