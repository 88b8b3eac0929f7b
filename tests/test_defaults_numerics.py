"""Numbers at the border of float64: given pivots, outliers, weights, constant columns."""

from dataclasses import replace

import numpy as np
import oracle_kernels as oracle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.coverage import Coverage, coverage
from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    KernelLogisticRegression,
    PivotedCholesky,
    Tuning,
    kernels,
)
from cme_dask.errors import (
    ConstantColumnWarning,
    DataError,
    LengthScaleWarning,
    NumericalError,
    RankWarning,
)
from cme_dask.estimators.context import warn_of_length
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import non_negative
from cme_dask.numerics.crossval import interval_factor
from cme_dask.numerics.moments import Moments

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
    mean = Moments(1.0, {("x", "x"): np.diag([0.6, 0.5])}, {}, {"x": 1.0}, {})
    with pytest.raises(NumericalError):
        _ = mean.trace_error


KERNELS = [
    (kernels.Gaussian(0.7), lambda a, b: oracle.gaussian(a, b, 0.7)),
    (kernels.Laplace(0.7), lambda a, b: oracle.laplace(a, b, 0.7)),
    (kernels.Matern(0.7, 0.5), lambda a, b: oracle.matern(a, b, 0.7, 0.5)),
    (kernels.Matern(0.7, 2.5), lambda a, b: oracle.matern(a, b, 0.7, 2.5)),
    (kernels.RationalQuadratic(0.7, 0.4), lambda a, b: oracle.rational_quadratic(a, b, 0.7, 0.4)),
]


@settings(max_examples=60)
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


@pytest.mark.parametrize("offsets", [(2.0**30, 0.0), (0.0, 2.0**30)])
def test_default_fits_lose_no_digits_far_from_zero(offsets):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 1))
    y = np.sin(2 * x[:, 0]) + 0.2 * rng.normal(size=200)
    x, y = np.round(x * 1024) / 1024, np.round(y * 1024) / 1024  # so that the sums are exact
    plain = JointDistribution().fit(x, y)
    moved = JointDistribution().fit(x + offsets[0], y + offsets[1])
    levels, at = [0.1, 0.5, 0.9], x[:20]
    expected = plain.conditional(at).quantile(levels) + offsets[1]
    found = moved.conditional(at + offsets[0]).quantile(levels)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)  # the last digit is 2e-7


def test_default_fits_take_nearly_equal_columns_of_x():
    """The rounding that a trend in both brings is larger than the least ridge."""
    rng = np.random.default_rng(2)
    z = rng.normal(size=200)
    x = np.column_stack([z, z + 2e-4 * rng.normal(size=200)])
    y = np.sin(2 * z) + 0.2 * rng.normal(size=200)
    law = JointDistribution().fit(x, y).conditional(x)
    assert np.sqrt(np.mean((law.mean() - np.sin(2 * z)) ** 2)) < 0.15


def test_one_outlier_does_not_ruin_a_kernel_in_raw_units():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 1))
    y = np.sin(2 * x) + 0.1 * rng.normal(size=x.shape)
    x[7] = 1e9
    fit = JointDistribution(kernel_x=kernels.Gaussian(0.5), kernel_y=kernels.Gaussian(0.5))
    at = np.array([[0.75]])
    assert abs(float(fit.fit(x, y).conditional(at).mean()[0]) - 1.0) < 0.1


# Length scales, constant columns, labels, weights ------------------------------------------------


@pytest.fixture(scope="module")
def waves():
    """Rows of x in one column and of y, for default fits that take a second."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(300, 1))
    return x, np.sin(2 * x) + 0.2 * rng.normal(size=x.shape)


def test_a_kernel_much_shorter_than_the_spacing_is_told_and_stays_quick():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 1))
    fit = JointDistribution(kernel_x=kernels.Gaussian(1e-8), kernel_y=kernels.Gaussian(0.5))
    short = pytest.warns(LengthScaleWarning, match=r"kernel_x=.*1e-08.* is too short .*'median'")
    missed = pytest.warns(RankWarning, match=r"x: trace error .* max_rank=500 \(the default\)")
    with missed, short:
        fit.fit(x, np.sin(x))
    assert fit.basis_x_.rank == 500  # the cost is that of its cube
    assert fit.basis_x_.trace_error > 0.7


def test_a_kernel_much_longer_than_the_spread_is_told(waves):
    fit = JointDistribution(kernel_x=kernels.Gaussian(1e8), kernel_y=kernels.Gaussian(0.5))
    with pytest.warns(LengthScaleWarning, match="kernel_x=.* is too long for the rows"):
        fit.fit(*waves)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("columns", [1, 3])
def test_unbounded_kernels_are_judged_by_what_they_tell_apart(scale, columns):
    """The correlations of x z in one column are 1 or -1, and yet its values differ."""
    points = scale * np.random.default_rng(0).normal(size=(100, columns))
    for kernel in (kernels.Linear(), kernels.Polynomial(2, 1.0), kernels.Polynomial(3, 0.0)):
        assert not warn_of_length(kernel, points, "kernel_x")
    with pytest.warns(LengthScaleWarning, match="too long"):
        warn_of_length(kernels.Polynomial(2, 1e15), points / scale, "kernel_x")


def test_levels_that_rows_share_are_no_short_kernel():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 30, size=(600, 1)).astype(float)
    y = x % 2 + 0.1 * rng.normal(size=x.shape)
    JointDistribution(kernel_x=kernels.Gaussian(0.01), kernel_y=kernels.Gaussian(0.5)).fit(x, y)


QUICK = Tuning(evaluations=0)
"""A search of the grid alone."""


@pytest.fixture(scope="module")
def plain(waves):
    return JointDistribution(tuning=QUICK).fit(*waves)


def test_a_constant_column_of_x_is_ignored_by_default_fits(waves, plain):
    x, y = waves
    constant = np.column_stack([x, np.full(len(x), 3.0)])
    with pytest.warns(ConstantColumnWarning, match="column 'x1' of x is constant .* ignores it"):
        fit = JointDistribution(tuning=QUICK).fit(constant, y)
    moved = constant + np.array([0.0, 1e6])  # whatever the column holds
    for table in (constant, moved):
        law, same = fit.conditional(table[:20]), plain.conditional(x[:20])
        np.testing.assert_allclose(law.mean(), same.mean(), rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(law.cdf(0.3), same.cdf(0.3), rtol=1e-6, atol=1e-8)


def test_constant_x_alone_gives_the_marginal_law(waves):
    _, y = waves
    x = np.full((len(y), 2), 3.0)
    with pytest.warns(ConstantColumnWarning, match="columns 'x0', 'x1' of x are constant"):
        fit = JointDistribution(tuning=QUICK).fit(x, y)
    law = fit.conditional(np.array([[3.0, 3.0], [9.0, 1e9]]))
    np.testing.assert_allclose(law.mean(), y.mean(), atol=1e-8)
    np.testing.assert_allclose(law.std(), y.std(), rtol=1e-6)


def test_a_constant_column_of_y_has_a_point_as_its_law(waves):
    x, y = waves
    both = np.column_stack([y, np.full(len(y), 7.0)])
    with pytest.warns(ConstantColumnWarning, match="column 'y1' of y is constant .* is a point"):
        fit = JointDistribution(tuning=QUICK).fit(x, both)
    law = fit.conditional(x[:5])
    np.testing.assert_allclose(law.mean()[:, 1], 7.0)
    np.testing.assert_allclose(law.std()[:, 1], 0.0, atol=1e-7)


@pytest.mark.parametrize(
    "estimator",
    [
        ConditionalMeanEmbedding(),
        EmbeddingClassifier(),
        JointClassifier(tuning=QUICK),
        KernelLogisticRegression(),
        PivotedCholesky(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_every_estimator_ignores_a_constant_column(waves, estimator):
    x, y = waves
    constant = np.column_stack([x, np.zeros(len(x))])
    given = y if type(estimator) is ConditionalMeanEmbedding else (y[:, 0] > 0).astype(int)
    given = () if isinstance(estimator, PivotedCholesky) else (given,)
    with pytest.warns(ConstantColumnWarning, match="'x1' of x is constant"):
        estimator.fit(constant, *given)
    if given:
        assert estimator.score(constant, *given) > 0.7
    else:
        assert estimator.trace_error_ < 1e-4


def test_labels_are_no_numbers_to_a_given_kernel(waves):
    pd = pytest.importorskip("pandas")
    x, y = waves
    table = pd.DataFrame({"lab": np.where(x[:, 0] > 0, "a", "b"), "x": x[:, 0]})
    gaussian = kernels.Gaussian(1.0)
    wrong = [gaussian, 2.0 * gaussian.on(0) * gaussian.on(1), kernels.Linear() + gaussian.on(1)]
    for kernel in wrong:
        with pytest.raises(DataError, match=r"column 'lab' holds labels.*Categorical.*\.on\(0\)"):
            JointDistribution(kernel_x=kernel, kernel_y=gaussian).fit(table, y)
    right = kernels.Categorical(1.0).on(0) * gaussian.on(1)
    fit = JointDistribution(kernel_x=right, kernel_y=gaussian).fit(table, y)
    assert np.isfinite(fit.predict(table[:5])).all()


def test_denormal_weights_and_single_rows_are_refused_by_default_fits(waves):
    with pytest.raises(DataError, match="largest weight of the sampled rows is 1e-310"):
        JointDistribution().fit(*waves, weights=np.full(300, 1e-310))
    with pytest.raises(DataError, match="at least 2 rows of positive weight are needed, got 1"):
        JointDistribution().fit(*waves, weights=np.eye(300)[3])
    median = JointDistribution(kernel_x="median", kernel_y="median")
    small = median.fit(*waves, weights=np.full(300, 1e-150)).predict(waves[0][:9])
    one = median.fit(*waves, weights=np.ones(300)).predict(waves[0][:9])
    np.testing.assert_allclose(small, one, 1e-6)


# What is printed ----------------------------------------------------------------------------------


def test_results_of_a_default_fit_are_shown_in_a_line(plain):
    shown = [plain.members_, plain.members_[0].component, plain.search_, plain.search_.finalists[0]]
    shown += [plain.basis_x_, plain.solution_, plain.moments_, plain.replicates_, plain.sides_]
    for result in shown:
        assert len(repr(result)) < 1000, type(result)
        assert "np.float64" not in repr(result)


def test_numbers_of_a_default_fit_are_rounded_where_they_are_shown(plain):
    ridges = replace(plain.model_, about=plain.model_.about | {"reg": [10.0**0.5 * 1e-4, 1e-4]})
    assert "reg (0.00032, 0.0001) (two-sided)" in repr(ridges)
    steps = replace(plain.model_, about=plain.model_.about | {"reg": [0.1 * 1e-3] * 2})
    assert "reg 0.0001 (two-sided)" in repr(steps)
    assert "in 2 passes, 10 folds" in repr(replace(steps, about=steps.about | {"passes": 2}))
    assert "in 1 pass, 10 folds" in repr(replace(steps, about=steps.about | {"passes": 1}))


# Intervals ---------------------------------------------------------------------------------------


def test_intervals_take_the_t_quantile_of_the_folds(plain, waves):
    points = waves[0][:20]
    value, std = plain.expect("y0", points, return_std=True)
    low, high = plain.expect_interval("y0", points)
    assert interval_factor(10) == pytest.approx(stats.t.ppf(0.975, 9))
    np.testing.assert_allclose(high - value, stats.t.ppf(0.975, 9) * std)
    np.testing.assert_allclose(value - low, stats.t.ppf(0.975, 9) * std)
    _, high = plain.expect_interval("y0", points, level=0.5)
    np.testing.assert_allclose(high - value, stats.t.ppf(0.75, 9) * std)
    for level in (0.0, 1.0, 95, True, "95%"):
        with pytest.raises(DataError, match="level of an interval must lie between 0 and 1"):
            plain.expect_interval("y0", points, level=level)


def test_two_standard_errors_of_ten_folds_hold_less_than_intervals_do():
    rng = np.random.default_rng(0)
    folds = rng.normal(size=(20_000, 10))  # a mean of fold means, with its jackknife
    error = np.sqrt(folds.var(axis=1, ddof=1) / 10)
    found = coverage(folds.mean(axis=1)[:, None, None], error[:, None, None], np.zeros((1, 1)), 10)
    assert found["two"] == pytest.approx(2 * stats.t.cdf(2.0, 9) - 1, abs=0.006)  # 0.923
    assert found["t"] == pytest.approx(0.95, abs=0.005)
    assert found["variance"] == pytest.approx(0.95, abs=0.005)
    assert found["bias"] < 0.03
    biased = coverage(
        folds.mean(axis=1)[:, None, None], error[:, None, None], np.full((1, 1), 1.0), 10
    )
    assert biased["t"] < 0.25
    assert biased["variance"] == found["variance"]


def test_the_bench_measures_coverage():
    found = Coverage("skewed", 200, "median", 3).prepare()()()
    assert set(found) == {"two", "t", "lowest", "variance", "bias"}
    assert 0.0 <= found["lowest"] <= found["t"] <= 1.0
    assert found["two"] <= found["t"]


def test_the_rank_of_a_kernel_that_is_too_short_is_named_where_it_ends():
    x = np.random.default_rng(0).normal(size=(5000, 2))
    features = PivotedCholesky(kernels.Gaussian(1e-5), tol=1e-3, sample_size=1500)
    with (
        pytest.warns(LengthScaleWarning, match="the rank is limited to 500"),
        pytest.warns(RankWarning, match=r"max_rank=500 \(the default\) was reached"),
    ):
        features.fit(x, workers=1)
