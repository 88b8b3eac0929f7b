"""Numbers at the border of float64: given pivots, outliers, weights, constant columns."""

import numpy as np
import oracle_kernels as oracle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cme_dask import JointDistribution, PivotedCholesky, kernels
from cme_dask.errors import NumericalError
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.means import MeanMoments
from cme_dask.numerics.pools import non_negative

GRID = np.linspace(-3.0, 3.0, 40)[:, None]
X = np.random.default_rng(0).normal(size=(1000, 1))


def orders():
    """The same pivots in several orders, and twice."""
    rng = np.random.default_rng(1)
    yield "ascending", GRID
    yield "descending", GRID[::-1]
    yield "random", rng.permutation(GRID)
    yield "twice", np.repeat(GRID, 2, axis=0)
    yield "from the middle", GRID[np.argsort(np.abs(GRID[:, 0]), kind="stable")]


@pytest.mark.parametrize("pivots", [pytest.param(p, id=name) for name, p in orders()])
def test_given_pivots_span_the_same_in_any_order(pivots):
    kernel = kernels.Gaussian(1.0)
    K = kernel(X, X)
    basis = NewtonBasis.from_points(kernel, pivots)
    L = basis(X)
    residual = K - L @ L.T
    # The oracle: what the best functions of the span leave, by an eigendecomposition.
    values, vectors = np.linalg.eigh(kernel(GRID, GRID))
    kept = values > 1e-13 * values.max()
    R = kernel(X, GRID) @ vectors[:, kept] / np.sqrt(values[kept])
    inside = np.abs(X[:, 0]) <= 3.0  # of rows beyond the grid, the span's last functions tell
    exact = (K - R @ R.T)[np.ix_(inside, inside)]
    assert np.abs(residual[np.ix_(inside, inside)] - exact).max() < 1e-7
    assert np.abs(residual).max() < 1e-3
    assert np.linalg.eigvalsh(residual).min() > -1e-8 * len(X)
    assert (L * L).sum(axis=1).max() <= 1.0 + 1e-8


def test_given_pivots_in_grid_order_have_an_honest_trace_error():
    with pytest.warns(UserWarning, match="given pivots were left out"):
        fit = PivotedCholesky(kernels.Gaussian(1.0), pivots=GRID).fit(X)
    L = fit.transform(X)
    expected = 1.0 - (np.asarray(L) ** 2).sum() / len(X)
    assert abs(fit.trace_error_ - expected) < 1e-9
    assert 0.0 <= fit.trace_error_ < 1e-6


def test_a_trace_error_below_zero_is_an_error_and_not_zero():
    with pytest.raises(NumericalError, match="can't be negative"):
        non_negative(np.array([0.1, -0.072]), 1.0)
    rounding = np.array([0.1, -1e-12])
    non_negative(rounding, 1.0)
    assert rounding.tolist() == [0.1, 0.0]
    mean = MeanMoments(
        1.0, (np.diag([0.6, 0.5]),), None, (np.zeros(2),), (1.0,), (), (), np.empty((0, 0)), ()
    )
    with pytest.raises(NumericalError):
        _ = mean.trace_error


KERNELS = [
    (kernels.Gaussian(0.7), lambda a, b: oracle.gaussian(a, b, 0.7)),
    (kernels.Laplace(0.7), lambda a, b: oracle.laplace(a, b, 0.7)),
    (kernels.Matern(0.7, 0.5), lambda a, b: oracle.matern(a, b, 0.7, 0.5)),
    (kernels.Matern(0.7, 2.5), lambda a, b: oracle.matern(a, b, 0.7, 2.5)),
    (kernels.RationalQuadratic(0.7, 0.4), lambda a, b: oracle.rational_quadratic(a, b, 0.7, 0.4)),
]


@settings(max_examples=60, deadline=None)
@given(
    case=st.integers(0, len(KERNELS) - 1),
    d=st.integers(1, 4),
    exponent=st.floats(0.0, 12.0),
    outliers=st.integers(0, 9),
    far=st.booleans(),
    seed=st.integers(0, 99),
)
@example(case=0, d=1, exponent=9.0, outliers=1, far=False, seed=0)
@example(case=0, d=3, exponent=12.0, outliers=5, far=True, seed=0)
def test_outliers_and_offsets_cost_no_digits_of_a_kernel(case, d, exponent, outliers, far, seed):
    kernel, slow = KERNELS[case]
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(60, d))
    A[:outliers, rng.integers(d)] += 10.0**exponent
    if far:
        A += 10.0 ** rng.uniform(0, 12)
    A[50:] = A[:10]
    Z = np.concatenate([A[:20], A[30:35]])
    values = kernel(A, Z)
    assert np.abs(values - slow(A, Z).astype(float)).max() <= 2e-12
    assert values.max() <= 1.0


def test_one_outlier_does_not_ruin_a_kernel_in_raw_units():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 1))
    y = np.sin(2 * x) + 0.1 * rng.normal(size=x.shape)
    x[7] = 1e9
    fit = JointDistribution(kernel_x=kernels.Gaussian(0.5), kernel_y=kernels.Gaussian(0.5))
    at = np.array([[0.75]])
    assert abs(float(fit.fit(x, y).conditional(at).mean()[0]) - 1.0) < 0.1
