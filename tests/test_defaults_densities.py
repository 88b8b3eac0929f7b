"""Densities of default fits with a location: in five columns, in normal scores, at ends of y."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.integrate import cumulative_trapezoid, trapezoid
from scipy.interpolate import PchipInterpolator
from scipy.special import logsumexp, ndtr
from scipy.stats import multivariate_normal, t

from cme_dask import JointDistribution, Tuning, kernels
from cme_dask.errors import DataError, RankWarning, ToleranceWarning
from cme_dask.kernels.transforms import PoolRare, Scores, Standard
from cme_dask.learning.transforms import learn_transform
from cme_dask.numerics.monotone import SEGMENT_ROWS, MonotoneMap, smooth_map
from cme_dask.numerics.smoothing import Smoothing, log_density

BRIEF = Tuning(rows=400, max_rank=40, evaluations=1)
ROWS = 400


def default(x, y):
    """A fit that learns kernels, averages two members, and has a location."""
    fit = JointDistribution(tuning=BRIEF, max_rank=40, residual=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        warnings.simplefilter("ignore", ToleranceWarning)
        model = fit.fit(x[:ROWS], y[:ROWS]).model_
    assert model.residual is not None
    return model


def mean_log_normal(law, y):
    """Mean logarithm of normal densities with the laws' own moments."""
    pairs = zip(y, law.mean(), law.cov(), strict=True)
    return np.mean([multivariate_normal.logpdf(*one) for one in pairs])


@pytest.fixture(scope="module", params=[0, 1])
def five(request):
    """Normal rows in five columns, and the model."""
    rng = np.random.default_rng(request.param)
    mix = np.random.default_rng(5).normal(size=(5, 5)) * 0.4 + np.eye(5)
    x = rng.normal(size=(800, 2))
    slope = np.random.default_rng(6).normal(size=(2, 5))
    y = x @ slope + 0.7 * rng.normal(size=(800, 5)) @ mix.T
    return x, y, default(x, y)


@pytest.fixture(scope="module")
def skewed():
    """Log-normal rows, and the model: in normal scores."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1200, 1))
    y = np.exp(x + 0.5 * rng.normal(size=x.shape))
    model = default(x, y)
    assert model.residual.transform is not None
    return x[ROWS:], y[ROWS:], model


@pytest.fixture(scope="module")
def line():
    """Rows of a line with noise, and a model with given kernels, whose location is raw."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 1))
    y = 2.0 * x + 0.5 * rng.normal(size=x.shape)
    kernel = kernels.Gaussian(1.0)
    fit = JointDistribution(kernel_x=kernel, kernel_y=kernel, tol=1e-2, reg=1e-3, residual=True)
    return x, y, fit.fit(x, y).model_


def test_densities_of_five_columns_with_a_location_are_as_good_as_normal_ones(five):
    """At held-out rows within the range, as elsewhere the normal densities are the worse ones."""
    x, y, model = five
    x, y, (low, high) = x[ROWS:], y[ROWS:], (y[:ROWS].min(axis=0), y[:ROWS].max(axis=0))
    inside = ((y >= low) & (y <= high)).all(axis=1)
    assert inside.sum() > 350
    law = model.conditional(x[inside])
    own = law.log_pdf(y[inside], paired=True).mean()
    assert own > mean_log_normal(law, y[inside]) - 0.1


def test_densities_in_normal_scores_are_near_the_true_ones(skewed):
    x, y, model = skewed
    truth = -0.5 * ((np.log(y) - x) / 0.5) ** 2 - np.log(0.5 * np.sqrt(2 * np.pi) * y)
    assert model.conditional(x).log_pdf(y, paired=True).mean() > truth.mean() - 0.1


def test_densities_in_normal_scores_are_continuous_and_integrate_to_one(skewed):
    law = skewed[2].conditional([[-1.0], [0.0], [1.5]])
    grid = np.sinh(np.linspace(-3.0, 5.0, 5001))
    density = law.pdf(grid[:, None])
    assert_allclose(trapezoid(density, grid), 1.0, atol=1e-5)
    assert np.abs(np.diff(density)).max() < 0.05 * density.max()
    # Medians and quartiles are those of the law, up to what smoothing moves.
    cumulative = cumulative_trapezoid(density, grid, initial=0.0)
    levels = np.array([0.25, 0.5, 0.75])
    found = [np.interp(levels, each, grid) for each in cumulative]
    assert (np.abs(found - law.quantile(levels)) < 0.25 * law.std()[:, None]).all()


def test_laws_at_the_end_of_the_range_have_a_density_beyond_it():
    """All atoms are at the greatest y there: the law has no width, its density has one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 2))
    y = x.sum(axis=1, keepdims=True) + 0.1 * rng.normal(size=(ROWS, 1))
    kernel = kernels.Gaussian(3.0)
    options = {"tol": 1e-3, "reg": 1e-3, "residual": True, "support": "bounded"}
    fit = JointDistribution(kernel_x=kernel, kernel_y=kernel, **options)
    top = y.max()
    law = fit.fit(x, y).conditional([x.max(axis=0)])
    assert law.effective_support() >= 0.05
    assert law.std() < 1e-6
    assert law.log_pdf([[top + 0.2]])[0, 0] > -30.0
    grid = np.linspace(top - 2.0, top + 2.0, 20_001)
    assert_allclose(trapezoid(law.pdf(grid[:, None]), grid), 1.0, atol=1e-6)


def test_raw_densities_with_a_location_keep_the_moments_of_the_law(line):
    law = line[2].conditional([[-0.5], [0.3]])
    at = np.linspace(-12.0, 12.0, 20_001)
    grid, weights = np.sinh(at), np.cosh(at) * (at[1] - at[0])  # tails have powers of y
    density = law.pdf(grid[:, None]) * weights
    mean = density @ grid
    assert_allclose(density.sum(axis=1), 1.0, atol=1e-9)
    assert_allclose(mean, law.mean(), atol=1e-9)
    square = np.einsum("bk,bk->b", density, (grid - mean[:, None]) ** 2)
    assert_allclose(square, law.var(), rtol=1e-5)


def log_kernel(points, mean, covariance):
    """Normal, but in one column Student's t with this variance."""
    if len(mean) > 1:
        return multivariate_normal.logpdf(points, mean, covariance)
    scale = np.sqrt(covariance[0, 0] / t(4).var())
    return t.logpdf(points[:, 0], 4, mean[0], scale)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("d", [1, 2, 5])
def test_smoothed_densities_equal_the_dense_mixture(d, scaled):
    rng = np.random.default_rng(d)
    weights = rng.dirichlet(np.ones(30), 4)
    weights[:, 3:9] = 0.0
    weights /= weights.sum(axis=1, keepdims=True)
    centres = rng.normal(size=(4, 30, d))
    covariances = np.array([a @ a.T for a in 0.1 * rng.normal(size=(30, d, d))])
    scales = np.array([a @ a.T + np.eye(d) for a in rng.normal(size=(4, d, d))])
    points = rng.normal(size=(4, d))
    smoothing = Smoothing(np.ones(d), 500)
    given = scales if scaled else None
    whole = log_density(
        weights, centres, covariances, points, smoothing, paired=False, scales=given
    )
    own = log_density(weights, centres, covariances, points, smoothing, paired=True, scales=given)
    assert_allclose(own[:, 0], np.diagonal(whole), rtol=1e-12)
    for w, m, scale, found in zip(weights, centres, scales, whole, strict=True):
        mean = w @ m
        if not scaled:
            scale = np.einsum("s,si,sj->ij", w, m - mean, m - mean)
            scale = scale + np.tensordot(w, covariances, 1)
        a, kernel = smoothing.kernels(w[None], scale[None])
        parts = [
            np.log(w[s] * a[0] ** (d - 1))
            + log_kernel(
                points, mean + a[0] * (m[s] - mean), a[0] ** 2 * covariances[s] + kernel[0]
            )
            for s in np.flatnonzero(w)
        ]
        if d > 1:
            normal = multivariate_normal.logpdf(points, mean, scale)
            parts.append(np.log1p(-(a[0] ** (d - 1))) + normal)
        assert_allclose(found, logsumexp(parts, axis=0), rtol=1e-6)


def test_a_row_far_out_costs_no_more_than_a_power(line):
    law = line[2].conditional([[0.0]])
    near, far = (law.log_pdf([[value * float(law.std()[0])]])[0, 0] for value in (10.0, 100.0))
    assert -20.0 < near < -8.0
    assert_allclose(far - near, -5.0 * np.log(10.0), atol=0.5)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_monotone_maps_increase_and_have_the_slope_that_they_tell(seed):
    rng = np.random.default_rng(seed)
    values, images = (np.sort(rng.normal(size=7) * 10.0 ** rng.integers(-2, 3)) for _ in "vi")
    there = MonotoneMap(values, images)
    assert_allclose(there(values), images, rtol=1e-12, atol=1e-12 * np.ptp(images))
    grid = np.sort(rng.uniform(*(values[[0, -1]] + np.ptp(values) * np.array([-1, 1])), 2000))
    mapped, slope = there(grid), there.slope(grid)
    assert (np.diff(mapped) > 0).all()
    assert (slope > 0).all()
    inner = (grid > values[1]) & (grid < values[-2])
    reference = PchipInterpolator(values, images)
    scale = np.ptp(images) / np.ptp(values)
    assert_allclose(mapped[inner], reference(grid[inner]), atol=1e-9 * np.ptp(images))
    assert_allclose(slope[inner], reference(grid[inner], 1), rtol=1e-6, atol=1e-6 * scale)
    ends = (images[[1, -1]] - images[[0, -2]]) / (values[[1, -1]] - values[[0, -2]])
    assert_allclose(slope[grid < values[0]], ends[0], rtol=1e-12)
    assert_allclose(slope[grid > values[-1]], ends[1], rtol=1e-12)


@pytest.mark.parametrize("n", [300, 3000])
def test_smooth_maps_have_few_knots_with_rows_between_them(n):
    rng = np.random.default_rng(0)
    rows = np.exp(rng.normal(size=(n, 1)))
    (there,) = learn_transform(rows, np.ones(n), [False], "scores").columns
    smooth = smooth_map(there, n)
    assert np.cbrt(n) / 2 < len(smooth.values) < np.cbrt(n)
    assert set(smooth.values) <= set(there.values)
    assert_array_equal(smooth.values[[0, -1]], np.array(there.values)[[0, -1]])
    # The outer knots end the tails; the next ones are the extreme rows.
    assert_array_equal(smooth.values[1], rows.min())
    between = np.histogram(rows, smooth.values)[0]
    assert (between[0], between[1:-1].min() >= SEGMENT_ROWS - 1) == (0, True)
    assert np.abs(ndtr(smooth(rows[:, 0])) - ndtr(there(np, rows[:, 0]))).max() < 0.05


def test_smooth_maps_of_standardised_columns_are_these():
    column = np.linspace(-3.0, 3.0, 7)
    for shift, scale in ((0.0, 2.0), (5.0, 0.1), (-1e6, 1.0)):
        smooth, there = smooth_map(Standard(shift, scale), 100), Standard(shift, scale)
        assert_allclose(smooth(column + shift), there(np, column + shift), atol=1e-8)
        assert_allclose(smooth.slope(column + shift), 1 / scale, rtol=1e-9)
    assert len(smooth_map(Scores((0.0, 1.0), (-1.0, 2.0)), 10).values) == 2
    with pytest.raises(DataError, match="levels have no density"):
        smooth_map(PoolRare((0.0, 1.0)), 10)
