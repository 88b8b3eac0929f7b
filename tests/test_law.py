"""Conditional laws: against all n weights, against each other, far away, and bad questions."""

import pickle
import subprocess
import sys
import tracemalloc
import warnings
from dataclasses import replace
from types import SimpleNamespace

import dask.array as da
import dask.dataframe as dd
import numpy as np
import oracle_joint
import oracle_law as oracle
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from cme_dask import JointDistribution, kernels, load, operators
from cme_dask.errors import DataError, UnseenCategoryWarning
from cme_dask.kernels.transforms import Scores, Standard, Transform
from cme_dask.metrics import crps
from cme_dask.numerics import measure
from cme_dask.numerics.blending import share_near
from cme_dask.numerics.measure import CellLaw, first_reaching

N = 2000
LEVELS = [0.0, 0.05, 0.3, 0.5, 0.9, 1.0]
AT = np.array([[-1.5], [-0.3], [0.0], [0.4], [2.0], [40.0]])
EVENTS = {"first": "y0 <= 0.3", "between": "y1 > y0 - 0.2"}


def draw(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 1))
    y = np.column_stack([np.sin(2 * x[:, 0]), x[:, 0]]) + [0.3, 0.5] * rng.standard_normal((n, 2))
    return x, y, rng.uniform(0.2, 3.0, n)


def fitted(x, y, weights=None, **options):
    options = {
        "kernel_x": kernels.Gaussian(0.5),
        "kernel_y": kernels.Gaussian(0.6),
        "max_rank": 40,
        "tol": 1e-3,
        "reg": 1e-4,
        "residual": False,
        **options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return JointDistribution(**options).fit(
            x, y, weights=weights, functions={"square": lambda y: y[:, 0] ** 2}
        )


def ratio_by_hand(model, x, y, weights, at, points, reg=1e-4):
    """G at (at, points) of the normalized model, densely."""
    pivots = [np.asarray(v.basis.newton.points) for v in (model.x, model.y)]
    k = kernels.Gaussian(0.5), kernels.Gaussian(0.6)
    m = oracle_joint.means(*k, x, y, *pivots, weights=weights)
    coefficients = oracle_joint.coefficients(m, "normalized", (reg, reg), "two-sided")
    newton = [oracle_joint.newton(f, z, p) for f, z, p in zip(k, (at, points), pivots, strict=True)]
    return 1.0 + newton[0] @ coefficients.T @ newton[1].T


@pytest.fixture(scope="module", params=["equal", "weighted"])
def case(request):
    """A law, and all n weights of the oracle at the same points."""
    x, y, weights = draw(N)
    given = None if request.param == "equal" else weights
    weights = np.ones(N) if given is None else weights
    model = fitted(x, y, given).model_
    support = model.y.cells.support
    cells = support.assign(y)
    ratio = ratio_by_hand(model, x, y, given, AT, support.points)
    v = oracle.masses_of(cells, weights, support.size)
    W = oracle.row_weights(oracle.project(ratio, v), cells, weights)
    return model.conditional(AT), W, y, weights


def test_moments(case):
    law, W, y, _ = case
    assert_allclose(law.mean(), oracle.mean(W, y), atol=1e-9)
    assert_allclose(law.cov(), oracle.cov(W, y), atol=1e-9)
    assert_allclose(law.var(), np.einsum("nii->ni", oracle.cov(W, y)), atol=1e-9)
    assert_allclose(law.std() ** 2, law.var(), atol=1e-12)
    c = oracle.cov(W, y)
    expected = c[:, 0, 1] / np.sqrt(c[:, 0, 0] * c[:, 1, 1])
    assert_allclose(law.corr()[:, 0, 1], expected, atol=1e-8)
    assert_array_equal(np.einsum("nii->ni", law.corr()), 1.0)


def test_expectations(case):
    law, W, y, _ = case
    assert_allclose(law.expect("square"), oracle.expect(W, y[:, 0] ** 2), atol=1e-9)
    assert_allclose(law.expect("y1"), oracle.expect(W, y[:, 1]), atol=1e-9)
    several = law.expect(["y0", lambda y: np.abs(y[:, 1]), EVENTS["between"]])
    values = [y[:, 0], np.abs(y[:, 1]), y[:, 1] > y[:, 0] - 0.2]
    assert_allclose(several, np.stack([oracle.expect(W, v) for v in values], axis=1), atol=1e-9)
    found = law.probability(EVENTS["first"])
    assert_allclose(found, oracle.expect(W, y[:, 0] <= 0.3), atol=1e-9)
    assert_allclose(law.probability(lambda y: y[:, 0] <= 0.3), found, atol=1e-12)


def test_distribution_functions_and_quantiles(case):
    law, W, y, _ = case
    t = np.array([-2.0, -0.5, y[7, 0], 0.1, 5.0])  # one of them is a row: <= counts it
    for j, name in enumerate(law.columns.names):
        assert_allclose(law.cdf(t, name), oracle.cdf(W, y[:, j], t), atol=1e-9)
        assert_array_equal(law.cdf(t[1], name), law.cdf(t, name)[:, 1])
        own = np.linspace(-1, 1, len(AT))
        expected = oracle.cdf(W, y[:, j], own)
        assert_allclose(law.cdf(own, name, paired=True), np.diagonal(expected), atol=1e-9)
        assert_allclose(law.quantile(LEVELS, name), oracle.quantile(W, y[:, j], LEVELS), atol=1e-9)
    assert_array_equal(law.quantile(LEVELS)[:, :, 1], law.quantile(LEVELS, "y1"))
    assert_array_equal(law.quantile(0.3), law.quantile([0.3])[:, 0])
    assert_array_equal(law.median(), law.quantile(0.5))
    low, high = law.interval(0.8)
    assert_array_equal(np.stack([low, high], axis=1), law.quantile([0.1, 0.9]))
    points = y[:4] + 0.1
    assert_allclose(law.cdf(points), oracle.orthant(W, y, points), atol=1e-9)
    assert_allclose(law.cdf(points[0]), oracle.orthant(W, y, points)[:, 0], atol=1e-9)
    paired = law.cdf(y[: len(AT)], paired=True)
    assert_allclose(paired, np.diagonal(oracle.orthant(W, y, y[: len(AT)])), atol=1e-9)


def test_density_ratio(case):
    law, W, y, weights = case
    # Averages of weights over the rows of a cell are those of the law, relative to the marginal's.
    rows = np.arange(0, N, 17)
    expected = W[:, rows] / (weights[rows] / weights.sum())
    assert_allclose(law.density_ratio(y[rows]), expected, atol=1e-7)
    paired = law.density_ratio(y[rows[: len(AT)]], paired=True)
    assert_allclose(paired, np.diagonal(expected[:, : len(AT)]), atol=1e-7)


def test_densities_integrate_to_one_and_have_the_moments_of_the_law():
    x, y, _ = draw(N)
    law = fitted(x, y, support_size=150).conditional(AT)
    side = [np.linspace(-3, 3, 61), np.linspace(-7, 7, 71)]
    grid = np.stack(np.meshgrid(*side, indexing="ij"), axis=-1).reshape(-1, 2)
    cell = (side[0][1] - side[0][0]) * (side[1][1] - side[1][0])
    density = law.pdf(grid)
    assert_allclose(density.sum(axis=1) * cell, 1.0, atol=2e-3)
    assert_allclose(density @ grid * cell, law.mean(), atol=5e-3)
    assert_allclose(np.exp(law.log_pdf(grid[:50])), density[:, :50], rtol=1e-12)
    own = law.pdf(y[: len(AT)], paired=True)
    assert_allclose(own, np.diagonal(law.pdf(y[: len(AT)])), rtol=1e-10)
    wide = law.pdf(grid, bandwidth=[1.0, 1.0])
    assert wide.max() < density.max()
    assert_allclose(wide.sum(axis=1) * cell, 1.0, atol=2e-2)


def test_draws_follow_the_distribution_function(case):
    law = case[0]
    draws = law.sample(100_000, random_state=3)
    assert draws.shape == (len(AT), 100_000, 2)
    for j, name in enumerate(law.columns.names):
        for i in range(len(AT)):
            # Discrete laws have smaller distances than continuous ones: this is the 1e-6 quantile.
            values, counts = np.unique(draws[i, :, j], return_counts=True)
            gap = np.abs(np.cumsum(counts) / 100_000 - law.cdf(values, name)[i]).max()
            assert gap < stats.kstwobign.isf(1e-6) / np.sqrt(100_000)
    # Four standard errors of the mean.
    assert (np.abs(draws.mean(axis=1) - law.mean()) < 4.5 * law.std() / np.sqrt(100_000)).all()
    assert_allclose(np.cov(draws[1].T), law.cov()[1], atol=0.02)
    assert_array_equal(law.sample(5, random_state=3), draws[:, :5])
    assert_array_equal(law.sample(5, random_state=3, first=np.int64(0)), draws[:, :5])
    assert not np.array_equal(law.sample(5, random_state=4), draws[:, :5])
    assert_array_equal(law.sample(random_state=3), draws[:, 0])


def test_the_other_direction(case):
    _, _, y, weights = case
    x, _, _ = draw(N)
    model = fitted(x, y, None if (weights == 1).all() else weights).model_
    support = model.x.cells.support
    cells, at = support.assign(x), y[:5]
    ratio = ratio_by_hand(
        model, x, y, None if (weights == 1).all() else weights, support.points, at
    ).T
    v = oracle.masses_of(cells, weights, support.size)
    W = oracle.row_weights(oracle.project(ratio, v), cells, weights)
    reverse = model.conditional(Y=at)
    assert reverse.columns.names == ("x0",)
    assert_allclose(reverse.mean(), oracle.mean(W, x)[:, 0], atol=1e-9)
    assert_allclose(reverse.cdf([-0.5, 0.2]), oracle.cdf(W, x[:, 0], [-0.5, 0.2]), atol=1e-9)
    assert_allclose(reverse.quantile(LEVELS), oracle.quantile(W, x[:, 0], LEVELS), atol=1e-9)
    assert reverse.sample(7).shape == (5, 7)
    assert reverse.cov().shape == (5, 1, 1)


def test_couplings_are_mixtures_over_all_rows():
    x, y, weights = draw(N)
    options = {"constraint": "coupling", "max_rank": 25, "kernel_x": kernels.Gaussian(0.4)}
    model = fitted(x, y, weights, **options).model_
    law = model.conditional(AT)
    w = weights / weights.sum()
    b = model.y.basis(y)
    pi = (w @ b) * (model.x.basis(AT) @ model.coef.T)
    assert_allclose(law.mixture_weights(), pi, atol=1e-12)
    assert (law.mixture_weights() >= 0).all()
    support = model.y.cells.support
    cells = support.assign(y)
    weights_of_cells = oracle.coupled(pi, b, cells, weights, support.size)
    W = oracle.row_weights(weights_of_cells, cells, weights)
    assert_allclose(law.weights(), weights_of_cells, atol=1e-12)
    assert_allclose(law.mean(), oracle.mean(W, y), atol=1e-9)
    assert_allclose(law.cov(), oracle.cov(W, y), atol=1e-9)
    assert_allclose(law.quantile(LEVELS, "y0"), oracle.quantile(W, y[:, 0], LEVELS), atol=1e-9)
    # Within cells b varies little: the exact means of the mixture are near.
    exact = pi @ ((w[:, None] * b).T @ y / (w @ b)[:, None])
    assert_allclose(law.mean(), exact, atol=2e-2)
    # Far away the nearest landmark answers, and says so.
    far = model.conditional([[40.0], [1e6]])
    assert_allclose(far.mixture_weights()[0], far.mixture_weights()[1], atol=1e-9)
    assert (far.effective_support() < 1e-6).all()
    reverse = model.conditional(Y=y[:4])
    assert_allclose(reverse.weights().sum(axis=1), 1.0, atol=1e-12)
    with pytest.raises(DataError, match="only laws of a coupling"):
        fitted(x, y).conditional(AT).mixture_weights()


@pytest.mark.parametrize("constraint", ["none", "normalized", "certified", "coupling"])
def test_laws_are_laws_everywhere(constraint):
    x, y, _ = draw(4000)
    law = fitted(x, y, constraint=constraint, support_size=200).model_
    rng = np.random.default_rng(5)
    scale = 10.0 ** rng.uniform(-2, 6, (10_000, 1))
    points = rng.standard_normal((10_000, 1)) * np.where(rng.random((10_000, 1)) < 0.7, 1, scale)
    asked = law.conditional(points)
    weights = asked.weights()
    assert weights.min() >= 0.0
    assert np.abs(weights.sum(axis=1) - 1.0).max() <= 1e-12
    covariance = asked.cov()
    assert np.linalg.eigvalsh(covariance).min() >= -1e-14 * np.abs(covariance).max()
    quantiles = asked.quantile(np.linspace(0, 1, 9), "y0")
    assert (np.diff(quantiles, axis=1) >= 0.0).all()
    assert np.isfinite(quantiles).all()
    below = asked.cdf([-1.0, 0.0, 0.7], "y1")
    assert below.min() >= 0.0
    assert below.max() <= 1.0
    assert (np.diff(below, axis=1) >= 0.0).all()
    near = asked.effective_support()
    assert near.min() >= 0.0
    assert near.max() <= 1.0
    assert near[np.abs(points[:, 0]) > 100].max() < 1e-6


def test_far_from_all_data_the_law_is_the_marginal():
    x, y, weights = draw(N)
    law = fitted(x, y, weights).conditional([[50.0], [-1e9], [1e155], [-1e300]])
    w = weights / weights.sum()
    assert_allclose(law.mean(), np.tile(w @ y, (4, 1)), atol=1e-9)
    assert_allclose(law.cdf(0.1, "y0"), (w * (y[:, 0] <= 0.1)).sum(), atol=1e-9)
    assert_allclose(law.density_ratio(y[:20]), 1.0, atol=1e-9)


def test_rows_that_were_kept_stand_for_all_within_the_stated_error():
    """With more rows than are kept, answers from kept rows differ by their sampling error."""
    x, y, _ = draw(120_000)
    model = fitted(x, y, support_size=200).model_
    cells = model.y.cells
    assert not cells.whole.all()
    assert np.diff(cells.starts).max() == 32
    law, W = model.conditional(AT), model.conditional(AT).weights()
    of_row = cells.support.assign(y)
    for t in (-0.4, 0.0, 0.5):
        counts = np.bincount(of_row, y[:, 0] <= t, minlength=200) / np.bincount(of_row)
        exact = W @ counts
        error = np.sqrt(W**2 @ (counts * (1 - counts)) / 32)
        assert (np.abs(law.cdf(t, "y0") - exact) <= 5 * error + 1e-9).all()
    # Declared functions, means and covariances don't depend on what was kept.
    means = np.array([np.bincount(of_row, c, minlength=200) for c in y.T]).T
    assert_allclose(law.mean(), W @ (means / np.bincount(of_row)[:, None]), atol=1e-9)
    square = np.bincount(of_row, y[:, 0] ** 2, minlength=200) / np.bincount(of_row)
    assert_allclose(law.expect("square"), W @ square, atol=1e-9)


def test_labels_of_y():
    """Mixed and categorical y: probabilities of labels, and no mean of codes."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-2, 2, (3000, 1))
    high = rng.random(3000) < 1 / (1 + np.exp(-3 * x[:, 0]))
    frame = pd.DataFrame(
        {"level": np.where(high, "high", "low"), "size": np.where(high, 3.0, 1.0) + 0.1 * x[:, 0]}
    )
    options = {"kernel_x": "median", "kernel_y": "median", "max_rank": 60}
    model = fitted_frame(x, frame, **options)
    law = model.conditional([[-1.5], [0.0], [1.5]])
    assert law.numeric == ("size",)
    proba = law.predict_proba()
    assert_allclose(proba.sum(axis=1), 1.0, atol=1e-14)
    labels = law.columns.categories["level"]
    assert_allclose(proba[:, labels.index("high")], law.probability('level == "high"'), atol=1e-12)
    assert_allclose(proba[:, labels.index("high")], [0.011, 0.5, 0.989], atol=0.05)
    assert law.mean().shape == (3,)
    assert_allclose(law.mean(), 1 + 2 * proba[:, labels.index("high")], atol=0.3)
    assert law.sample(4).shape == (3, 4, 2)
    for ask in (lambda: law.quantile(0.5, "level"), lambda: law.cdf(1.0, "level")):
        with pytest.raises(DataError, match="holds labels"):
            ask()
    with pytest.raises(DataError, match="no density against the Lebesgue measure"):
        law.pdf(frame[:2])
    assert_array_equal(law.cdf(2.0), law.cdf(2.0, "size"))
    assert law.density_ratio(frame[:5]).shape == (3, 5)
    only = fitted_frame(x, frame[["level"]], **options).conditional([[0.3]])
    with pytest.raises(DataError, match="no mean or quantile"):
        only.mean()


def fitted_frame(x, frame, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return JointDistribution(**options).fit(x, frame).model_


def test_labelled_points_give_labelled_answers():
    x, y, _ = draw(N)
    frame = pd.DataFrame(y, columns=["speed", "height"])
    model = fitted_frame(
        pd.DataFrame(x, columns=["time"]), frame, kernel_x="median", kernel_y="median", max_rank=30
    )
    points = pd.DataFrame({"time": AT[:4, 0]}, index=list("abcd"))
    plain = model.conditional(AT[:4])
    law = model.conditional(points)
    assert list(law.mean().columns) == ["speed", "height"]
    assert list(law.mean().index) == list("abcd")
    assert_array_equal(law.mean().to_numpy(), plain.mean())
    assert law.quantile(0.5)["height"].tolist() == plain.quantile(0.5, "height").tolist()
    table = law.quantile([0.1, 0.9])
    assert table[(0.9, "speed")].tolist() == plain.quantile(0.9, "speed").tolist()
    assert law.cov()[("speed", "height")].tolist() == plain.cov()[:, 0, 1].tolist()
    assert isinstance(law.probability("speed > 0"), pd.Series)
    assert law.expect(["speed", "speed > 0"]).columns.tolist() == ["speed", "speed > 0"]
    array = xr.DataArray(AT[:4], dims=["place", "column"], coords={"place": [10, 20, 30, 40]})
    labelled = model.conditional(array).quantile([0.1, 0.9])
    assert labelled.dims == ("place", "quantile", "variable")
    assert labelled.sel(place=30, quantile=0.9, variable="speed") == table[(0.9, "speed")].iloc[2]


def test_a_saved_model_answers_alike_without_dask(tmp_path):
    x, y, _ = draw(N)
    estimator = fitted(x, y)
    estimator.save(tmp_path / "m")
    law = load(tmp_path / "m").conditional(AT)
    mine = estimator.conditional(AT)
    assert_array_equal(law.quantile(LEVELS), mine.quantile(LEVELS))
    assert_array_equal(law.cov(), mine.cov())
    assert_array_equal(law.expect("square"), mine.expect("square"))
    with pytest.raises(DataError, match="give the function itself"):
        law.expect("cube")
    code = (
        "import sys, numpy as np, cme_dask\n"
        f"law = cme_dask.load({str(tmp_path / 'm')!r}).conditional(np.zeros((3, 1)))\n"
        "law.quantile([0.1, 0.9]), law.sample(4), law.pdf([[0.0, 0.0]]), law.cdf([0.0, 0.0])\n"
        "bad = {'dask', 'distributed', 'sklearn', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_answers_do_not_depend_on_the_number_of_points():
    x, y, _ = draw(N)
    model = fitted(x, y, support_size=100).model_
    many = np.linspace(-2, 2, 9001)[:, None]
    law, some = model.conditional(many), model.conditional(many[8000:8003])
    for ask in (
        lambda law: law.mean(),
        lambda law: law.quantile([0.1, 0.5]),
        lambda law: law.cdf([[0.0, 0.1]]),
        lambda law: law.pdf(y[:3]),
    ):
        assert_allclose(ask(law)[8000:8003], ask(some), rtol=1e-9, atol=1e-12)
    assert_array_equal(law.sample(3)[8000:8003], some.sample(3, first=8000))
    none = model.conditional(np.empty((0, 1)))
    assert none.mean().shape == (0, 2)
    assert none.quantile([0.1, 0.2]).shape == (0, 2, 2)
    assert none.cdf(0.0, "y0").shape == (0,)
    assert none.sample(3).shape == (0, 3, 2)


def small(**options):
    """A model of 300 rows and two columns y0 and y1, with the declared function ``square``."""
    x, y, _ = draw(300)
    return fitted(x, y, support_size=50, **options).model_, y


def test_thresholds_of_several_columns_go_by_name():
    model, y = small()
    law = model.conditional(AT[:2])
    points = pd.DataFrame(y[:2] + np.array([0.0, 0.5]), columns=["y0", "y1"])
    expected = law.cdf(points.to_numpy())
    turned = points[["y1", "y0"]].assign(station="a")
    array = xr.DataArray(
        turned[["y1", "y0"]].to_numpy(float), dims=("k", "c"), coords={"c": ["y1", "y0"]}
    )
    for table in (points, turned, array, turned.to_dict("list")):
        assert_array_equal(law.cdf(table), expected)
        assert_allclose(law.cdf(table, paired=True), np.diagonal(expected), rtol=1e-14)
    np.testing.assert_allclose(law.cdf(turned.iloc[0]), expected[:, 0], rtol=1e-15)
    lazily = model.conditional(da.from_array(AT[:2]))
    for table in (turned, da.from_array(points.to_numpy()), dd.from_pandas(turned, npartitions=1)):
        assert_allclose(lazily.cdf(table, paired=True), np.diagonal(expected), rtol=1e-14)
    with pytest.raises(DataError, match="t lacks the column 'y1', and has others: 'z'"):
        law.cdf(points.rename(columns={"y1": "z"}))
    with pytest.raises(DataError, match="thresholds must not be NaN, 1 are"):
        law.cdf(np.ma.array(points.to_numpy(), mask=[[True, False], [False, False]]))


def test_thresholds_of_one_column_may_be_a_table_of_one():
    x, y, _ = draw(300)
    model = fitted(x, y[:, :1], support_size=50).model_
    law, t = model.conditional(AT[:2]), y[:2, 0]
    expected = law.cdf(t)
    named = pd.DataFrame({"other": [9.0, 9.0], "y0": t})
    array = xr.DataArray(t[:, None], dims=("k", "c"), coords={"c": ["y0"]})
    for table in (t[:, None], named, named[["y0"]], named["y0"], array, {"y0": t}, list(t)):
        assert_array_equal(law.cdf(table), expected)
        assert_array_equal(law.cdf(table, paired=True), np.diagonal(expected))
    lazily = model.conditional(da.from_array(AT[:2]))
    for table in (t[:, None], named, dd.from_pandas(named, npartitions=1)):
        assert_array_equal(lazily.cdf(table, paired=True), np.diagonal(expected))
    with pytest.raises(DataError, match="t lacks the column 'y0', and has others: 'other'"):
        law.cdf(named[["other"]])
    with pytest.raises(DataError, match=r"thresholds must have shape \(\) or \(k,\), got \(2, 3\)"):
        law.cdf(np.zeros((2, 3)))


def test_a_bandwidth_also_applies_far_from_the_data():
    x, y, _ = draw(300)
    kernel = kernels.Gaussian(0.5)
    given = {"kernel_x": kernel, "kernel_y": kernel, "reg": 1e-3, "support_size": 50}
    model = JointDistribution(**given, location="x0").fit(x, y[:, :1]).model_
    law = model.conditional([[0.0], [50.0]])
    assert law.effective_support()[1] == 0.0
    t = np.linspace(-40.0, 40.0, 4001)
    for bandwidth in (0.1, 5.0):
        density = law.pdf(t[:, None], bandwidth=bandwidth)
        mean = density @ t * 0.02
        variance = density @ t**2 * 0.02 - mean**2
        within = [model.residual.model.y.cells, model.y.cells]  # of which the cells are points
        least = law.var() - [cells.covariances.max() for cells in within]
        assert (variance >= least + bandwidth**2 - 1e-6).all()
        assert (variance <= law.var() + bandwidth**2 + 0.1).all()


def test_dicts_that_only_count_their_columns_go_by_position():
    model, y = small()
    law = model.conditional({"0": AT[:2, 0]})
    assert_array_equal(law.mean(), model.conditional(AT[:2]).mean())
    assert_array_equal(law.pdf({0: y[:3, 0], 1: y[:3, 1]}), law.pdf(y[:3]))


def test_answers_of_xarray_have_their_own_dimensions():
    model, y = small()
    for dimension, ask in (
        ("point", lambda law: law.pdf(y[:3])),
        ("variable", lambda law: law.mean()),
        ("quantile", lambda law: law.quantile([0.1, 0.9])),
        ("event", lambda law: law.probability(["y0 > 0"])),
        ("draw", lambda law: law.sample(2)),
        ("threshold", lambda law: law.cdf([0.1, 0.2], "y0")),
    ):
        points = xr.DataArray(AT[:2], dims=(dimension, "column"), coords={"column": ["x0"]})
        with pytest.raises(DataError, match=f"the dimension '{dimension}' of the points is"):
            ask(model.conditional(points))
        renamed = model.conditional(points.rename({dimension: "row"}))
        assert ask(renamed).dims[:2] == ("row", dimension)
    table = xr.Dataset(
        {"grid": ("lat", np.arange(4.0)), "x0": ("time", AT[:2, 0])},
        coords={"lat": np.arange(4), "time": [5, 7]},
    )
    answer = model.conditional(table).mean()
    assert answer.dims == ("time", "variable")
    assert answer.time.values.tolist() == [5, 7]


def test_densities_have_their_names():
    model, y = small()
    law = model.conditional(pd.DataFrame({"x0": AT[:2, 0]}))
    for name in ("pdf", "log_pdf", "density_ratio"):
        assert getattr(law, name)(y[:2], paired=True).name == name
    array = xr.DataArray(AT[:2], dims=("row", "column"), coords={"column": ["x0"]})
    assert model.conditional(array).pdf(y[:3]).name == "pdf"


def cube(y):
    return y[:, 0] ** 3


def test_functions_of_a_question_take_the_place_of_those_of_the_fit():
    model, y = small()
    expected = model.conditional(AT).expect(cube)
    own = model.conditional(AT, functions={"square": cube})
    assert_array_equal(own.expect("square"), expected)
    assert_array_equal(own.expect(["square"])[:, 0], expected)
    again = pickle.loads(pickle.dumps(own))  # noqa: S301
    assert_array_equal(again.expect("square"), expected)
    lazily = model.conditional(da.from_array(AT), functions={"square": cube})
    assert_allclose(lazily.expect("square"), expected, atol=1e-12)
    prior = operators.change_prior(model, draw(50)[0])
    assert prior.marginal(functions={"square": cube}).expect("square") != pytest.approx(
        prior.marginal().expect("square")
    )
    for texts in (["y0 > 0.1"], {"y0 > 0.1": "y0 > 0.1"}):
        law = model.conditional(AT, functions=texts)
        assert_array_equal(law.probability("y0 > 0.1"), model.conditional(AT).expect("y0 > 0.1"))
    assert_array_equal(
        model.conditional(AT, functions={"high": "y0 > 0.1"}).probability("high"),
        model.conditional(AT).probability("y0 > 0.1"),
    )
    for ask in (model.conditional, prior.conditional):
        for points in (AT[:1], da.from_array(AT[:1])):
            with pytest.raises(DataError, match="'y1' is a column already"):
                ask(points, functions={"y1": cube})
    with pytest.raises(DataError, match="'x0' is a column already"):
        prior.conditional(Y=y[:1], functions={"x0": cube})
    with pytest.raises(DataError, match="functions maps names to callables"):
        model.conditional(AT, functions={"high": 3.0})


def test_declared_functions_of_a_fit_are_means_over_all_rows():
    x, y, _ = draw(300)
    fit = fitted(x, y, support_size=5)  # of whose cells not all rows are retained
    expected = fit.model_.conditional(AT).expect("square")
    assert_array_equal(fit.conditional(AT).expect("square"), expected)
    again = pickle.loads(pickle.dumps(fit))  # noqa: S301
    assert_array_equal(again.conditional(AT).expect("square"), expected)
    assert not np.array_equal(fit.conditional(AT).expect(lambda y: y[:, 0] ** 2), expected)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda law: law.quantile(1.2), "levels must be numbers from 0 to 1, got 1.2"),
        (lambda law: law.quantile([0.5, np.nan]), "levels must be numbers from 0 to 1"),
        (lambda law: law.quantile("a"), "levels must be numbers"),
        (lambda law: law.interval(1.5), "levels must be"),
        (lambda law: law.interval([0.5, 0.9]), "an interval has one level"),
        (lambda law: law.probability("square"), "must be true or false at each row"),
        (lambda law: law.quantile(0.5, "z"), "unknown column 'z'"),
        (lambda law: law.cdf(0.0), r"thresholds must have shape \(2,\) or \(k, 2\), got \(\)"),
        (lambda law: law.cdf([np.nan], "y0"), "must not be NaN, 1 are"),
        (lambda law: law.cdf([1.0, 2.0], "y0", paired=True), r"shape \(6,\), got \(2,\)"),
        (lambda law: law.probability("y0 ~ 3"), "neither one of"),
        (lambda law: law.probability("z > 3"), "unknown column 'z'"),
        (lambda law: law.probability(lambda y: y[:, 0]), "must be true or false at each row"),
        (lambda law: law.expect(lambda y: y), r"must return shape \(\d+,\) for rows of shape"),
        (lambda law: law.expect(lambda y: 1 / 0), "failed: ZeroDivisionError"),
        (lambda law: law.expect(lambda y: y[:, 0] * np.nan), "NaN or infinite"),
        (lambda law: law.expect(3), "expect takes names"),
        (lambda law: law.sample(-1), "size must be a non-negative integer"),
        (lambda law: law.sample(2, random_state=-1), "random_state must be"),
        (lambda law: law.pdf([[0.0, np.nan]]), "column 'y1' has 1"),
        (lambda law: law.pdf([[0.0]]), r"shape \(n, 2\)"),
        (lambda law: law.pdf([[0.0, 0.0]], bandwidth=0.0), "bandwidth must be"),
        (lambda law: law.density_ratio([[0.0, 0.0]], paired=True), "one for each x: 6 expected"),
        (lambda law: law.predict_proba(), "needs one column of labels, there are 0"),
        (lambda law: law.predict_proba("y0"), "holds numbers"),
    ],
)
def test_bad_questions(case, ask, message):
    with pytest.raises(DataError, match=message):
        ask(case[0])


def test_densities_have_no_unit():
    x, y, _ = draw(300)
    plain, small = (fitted(x, unit * y, kernel_y="median") for unit in (1.0, 1e-13))
    expected = plain.conditional(x[:3]).pdf(y[:20])
    assert_allclose(1e-26 * small.conditional(x[:3]).pdf(1e-13 * y[:20]), expected, rtol=1e-3)


@pytest.mark.parametrize("residual", [False, True])
def test_densities_do_not_depend_on_where_zero_is(residual):
    """Seconds since 1970, of values that both places hold exactly."""
    x, y, _ = draw(300)
    y = np.round(y * 2.0**20) / 2.0**20
    points = np.concatenate([y[:20], y[:1] + 3.0])
    plain, moved = (
        fitted(x, y + at, kernel_y="median", residual=residual).conditional(x[:3]).pdf(points + at)
        for at in (0.0, 2.0**30)
    )
    assert_allclose(moved, plain, rtol=1e-4)


def test_bad_points():
    x, y, _ = draw(300)
    estimator = fitted(x, y)
    with pytest.raises(DataError, match="column 'x0' has 1"):
        estimator.conditional([[np.nan]])
    with pytest.raises(DataError, match="points of one variable"):
        estimator.conditional()
    with pytest.raises(DataError, match="points of one variable"):
        estimator.conditional(x, Y=y)
    bare = fitted(x, y, support_size=0)
    with pytest.raises(DataError, match="support_size of at least 1"):
        bare.conditional(x)


def test_unseen_labels_of_x_are_answered_with_a_notice():
    rng = np.random.default_rng(0)
    station = rng.choice(["a", "b", "rare"], 2000, p=[0.5, 0.498, 0.002])
    y = rng.standard_normal(2000) + (station == "b")
    estimator = JointDistribution(kernel_y="median", max_rank=40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator.fit(pd.DataFrame({"station": station}), y)
        pools = estimator.model_.x.basis.newton.kernel.pools(0)
    assert pools
    with pytest.warns(UnseenCategoryWarning, match="'new'"):
        law = estimator.conditional(pd.DataFrame({"station": ["new", "a"]}))
    assert np.isfinite(law.quantile([0.1, 0.9]).to_numpy()).all()


@st.composite
def mixtures(draw_):
    """Weights of cells and atoms in them, with ties and cells of no weight.

    Cells are sets of values or, as those of a single column, intervals one after the other.
    """
    rng = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    size, per = draw_(st.integers(1, 60)), draw_(st.integers(1, 50))
    cells = np.sort(np.concatenate([np.arange(size), rng.integers(0, size, size * per)]))
    values = rng.standard_normal(len(cells))
    if draw_(st.booleans()):
        values = np.round(values)
    if draw_(st.booleans()):
        values = cells + 0.4 * np.tanh(values)
    shares = rng.uniform(0.1, 1.0, len(cells))
    shares /= np.bincount(cells, shares)[cells]
    weights = rng.uniform(size=(4, size)) * (rng.random((4, size)) < 0.7)
    weights[:, 0] += 0.1
    return values, cells, shares, weights / weights.sum(axis=1, keepdims=True)


@settings(max_examples=60)
@given(mixtures(), st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_sorted_atoms(mixture, levels):
    values, cells, shares, weights = mixture
    starts = np.searchsorted(cells, np.arange(weights.shape[1] + 1))
    masses = np.full(weights.shape[1], 1.0 / weights.shape[1])
    statistics = SimpleNamespace(atoms=values[:, None], starts=starts, shares=shares, masses=masses)
    law = CellLaw(statistics, weigh=None)
    W = weights[:, cells] * shares
    t = np.array([values[0], values.min() - 1, values.max(), 0.3])
    assert_allclose(law.below(weights, t, 0), oracle.cdf(W, values, t), atol=1e-12)
    each = np.tile(t, (len(W), 1))
    assert_array_equal(law.below(weights, each, 0), law.below(weights, t, 0))
    found = law.quantile(weights, np.array(levels), [0])[:, :, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_TURNED", 1)  # a row at a time
        again = law.quantile(weights, np.array(levels), [0, 0])
    assert_array_equal(again, np.stack([found, found], axis=2))
    assert np.isin(found, values).all()
    # A level within rounding of a jump may fall on either side of it.
    below = oracle.cdf(W, values, np.unique(found))
    order = np.searchsorted(np.unique(found), found)
    reached = np.take_along_axis(below, order, axis=1)
    assert (reached >= np.array(levels) - 1e-11).all()
    for w, row in zip(W, found, strict=True):
        for value, level in zip(row, levels, strict=True):
            assert w[values < value].sum() <= level + 1e-11 or value == values[w > 0].min()
    y = np.array([values[0] + 0.1, values.max() + 1.0, 0.0, values.min()])
    assert_allclose(law.crps(weights, y, 0), crps(W, values, y), atol=1e-12)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_first_reaching(seed, size):
    rng = np.random.default_rng(seed)
    masses = rng.uniform(size=(5, size)) * (rng.random((5, size)) < 0.6)
    masses[:, -1] += 0.01
    sums = np.cumsum(masses / masses.sum(axis=1, keepdims=True), axis=1)
    levels = rng.random((5, 7))
    pairs = zip(sums, levels, strict=True)
    expected = [[np.flatnonzero(s >= q - 1e-12)[0] for q in row] for s, row in pairs]
    assert_array_equal(first_reaching(sums, levels), expected)


@pytest.fixture(scope="module", params=["plain", "scores"])
def moved(request):
    """A law on moved residuals; its masses (q, S), and its atoms by hand (q, S, d)."""
    x, y, _ = draw(N)
    model = fitted(x, y, residual=True, support_size=120, support="bounded").model_
    residual = model.residual
    assert residual is not None
    if request.param == "scores":  # other coordinates: what is located are scores of y
        knots = tuple(np.linspace(-8.0, 8.0, 9))
        curved = Scores(knots, tuple(np.sinh(np.linspace(-2.0, 2.0, 9))))
        residual = replace(residual, transform=Transform((curved, Standard(0.5, 2.0))))
        model = replace(model, residual=residual)
    at = AT[:5]
    z = residual.location(at)[:, None] + residual.scale * residual.model.y.cells.means
    if request.param == "scores":
        places = np.stack(
            [np.interp(z[..., 0], curved.scores, curved.values), z[..., 1] * 2 + 0.5], axis=-1
        )
    else:
        places = z
    places = np.clip(places, y.min(axis=0), y.max(axis=0))  # what y can be
    law = model.conditional(at, functions={"square": lambda y: y[:, 0] ** 2})
    return law, residual.model.conditional(at).weights(), places


def test_moved_laws_are_atoms_at_their_places(moved):
    law, masses, places = moved
    each = list(zip(masses, places, strict=True))
    one = [np.array([w]) for w in masses]

    def by_hand(function, *arguments):
        found = [function(w, *(a(p) for a in arguments)) for w, p in zip(one, places, strict=True)]
        return np.concatenate(found)

    assert_allclose(law.mean(), by_hand(oracle.mean, lambda p: p), atol=1e-9)
    assert_allclose(law.cov(), by_hand(oracle.cov, lambda p: p), atol=1e-9)
    for j, name in enumerate(law.columns.names):
        levels = lambda p: LEVELS  # noqa: E731
        expected = by_hand(oracle.quantile, lambda p, j=j: p[:, j], levels)
        assert_allclose(law.quantile(LEVELS, name), expected, atol=1e-9)
        t = np.array([-1.01, 0.013, 0.7])
        expected = by_hand(oracle.cdf, lambda p, j=j: p[:, j], lambda p, t=t: t)
        assert_allclose(law.cdf(t, name), expected, atol=1e-9)
        own = np.linspace(-1.01, 1.02, 5)
        expected = [(w * (p[:, j] <= o)).sum() for (w, p), o in zip(each, own, strict=True)]
        assert_allclose(law.cdf(own, name, paired=True), expected, atol=1e-9)
    points = np.array([[0.1, 0.2], [1.0, 3.0]])
    expected = by_hand(oracle.orthant, lambda p: p, lambda p: points)
    assert_allclose(law.cdf(points), expected, atol=1e-9)
    assert_allclose(law.cdf(np.tile(points[0], (5, 1)), paired=True), expected[:, 0], atol=1e-9)
    event = [(w * (p[:, 0] < p[:, 1])).sum() for w, p in each]
    assert_allclose(law.probability("y0 < y1"), event, atol=1e-9)
    assert_allclose(law.expect("square"), [(w * p[:, 0] ** 2).sum() for w, p in each], atol=1e-9)


def test_moved_laws_draw_and_have_densities(moved):
    law, masses, places = moved
    draws = law.sample(20_000, random_state=1)
    for i in range(len(masses)):
        # Every draw is an atom, as often as its mass says: four standard errors and one draw.
        distance = np.abs(draws[i][:300, None] - places[i][None]).max(axis=2).min(axis=1)
        assert distance.max() < 1e-9
    assert (np.abs(draws.mean(axis=1) - law.mean()) < 4.5 * law.std() / np.sqrt(20_000)).all()
    side = [np.linspace(-12, 12, 97), np.linspace(-9, 9, 61)]
    grid = np.stack(np.meshgrid(*side, indexing="ij"), axis=-1).reshape(-1, 2)
    cell = (side[0][1] - side[0][0]) * (side[1][1] - side[1][0])
    density = law.pdf(grid, bandwidth=0.3)
    assert_allclose(density.sum(axis=1) * cell, 1.0, atol=0.02)
    paired = law.pdf(grid[:5], paired=True, bandwidth=0.3)
    assert_allclose(paired, np.diagonal(density[:, :5]), rtol=1e-9)
    ratio = law.density_ratio(grid[::400])
    assert np.isfinite(ratio).all()
    assert (ratio >= 0.0).all()
    # Cells of y itself take part only far from the data.
    weights = law.weights()
    assert_allclose(weights[:, : masses.shape[1]], masses, atol=1e-12)
    assert_array_equal(weights[:, masses.shape[1] :], 0.0)


def test_laws_between_near_and_far_are_mixtures_of_both(moved):
    model = moved[0].model
    line = np.linspace(-60.0, 60.0, 4001)[:, None]
    support = model.conditional(line).effective_support()
    between = np.flatnonzero((support > 0.002) & (support < 0.045))
    x = np.concatenate([AT[:2], line[between[:: max(len(between) // 4, 1)]]])
    share, law = share_near(model.conditional(x).effective_support()), model.conditional(x)
    assert (share[:2] == 1.0).all()
    assert ((share[2:] > 0.0) & (share[2:] < 1.0)).sum() >= 3
    located, cells = model.residual, model.y.cells
    z = located.location(x)[:, None] + located.scale * located.model.y.cells.means
    near = model.residual.values.possible(located.undo(z.reshape(-1, 2))).reshape(z.shape)
    masses = located.model.conditional(x).weights(), model.weights(x)
    far = masses[1][:, cells.cell_of_atom] * cells.shares
    weights = np.concatenate([share[:, None] * masses[0], (1.0 - share)[:, None] * far], axis=1)
    atoms = np.concatenate([near, np.tile(cells.atoms, (len(x), 1, 1))], axis=1)
    mixed = share[:, None] * masses[0], (1.0 - share)[:, None] * masses[1]
    assert_allclose(law.weights(), np.concatenate(mixed, axis=1), atol=1e-12)
    # Means and covariances of cells are those of all their rows, not of their atoms.
    means, part = cells.means, share[:, None]
    expected = (1.0 - part) * (masses[1] @ means)
    expected += part * np.einsum("bs,bsi->bi", masses[0], near)
    assert_allclose(law.mean(), expected, atol=1e-9)
    products = means[:, :, None] * means[:, None, :] + cells.covariances
    square = (1.0 - part[:, None]) * np.einsum("bs,sij->bij", masses[1], products)
    square += part[:, None] * np.einsum("bs,bsi,bsj->bij", masses[0], near, near)
    mean = law.mean()
    assert_allclose(law.cov(), square - mean[:, :, None] * mean[:, None, :], atol=1e-8)
    for j, name in enumerate(law.columns.names):
        for i, (w, a) in enumerate(zip(weights, atoms[:, :, j], strict=True)):
            below = [w[a <= t].sum() for t in (-1.01, 0.013, 0.7)]
            assert_allclose(law.cdf([-1.01, 0.013, 0.7], name)[i], below, atol=1e-9)
            order = np.argsort(a, kind="stable")
            sums = np.cumsum(w[order])
            levels = np.array([0.05, 0.3, 0.5, 0.9])
            expected = a[order][np.searchsorted(sums, levels - 1e-12)]
            assert_allclose(law.quantile(levels, name)[i], expected, atol=1e-9)
            score = w @ np.abs(a - 0.1) - 0.5 * w @ np.abs(a[:, None] - a) @ w
            observed = np.full((len(x), 2), 0.1)
            assert_allclose(law.crps(observed, name)[i], score, atol=1e-9)
    expected = (weights * atoms[:, :, 0] ** 2).sum(axis=1)
    assert_allclose(model.conditional(x).expect(lambda y: y[:, 0] ** 2), expected, atol=1e-9)
    draws = law.sample(4000, random_state=1)
    error = np.abs(draws.mean(axis=1) - (weights[:, :, None] * atoms).sum(axis=1))
    assert (error < 4.5 * draws.std(axis=1) / np.sqrt(4000)).all()


def test_a_moved_law_is_normalized_everywhere(moved):
    law, _, _ = moved
    rng = np.random.default_rng(0)
    points = rng.standard_normal((9_000, 1)) * 10.0 ** rng.uniform(-2, 4, (9_000, 1))
    asked = law.model.conditional(points)
    assert np.abs(asked.weights().sum(axis=1) - 1.0).max() <= 1e-12
    assert (np.diff(asked.quantile(np.linspace(0, 1, 9), "y0"), axis=1) >= 0.0).all()
    covariance = asked.cov()
    assert np.linalg.eigvalsh(covariance).min() >= -1e-13 * np.abs(covariance).max()
    below = asked.cdf([-1.0, 0.0], "y1")
    assert ((below >= 0.0) & (below <= 1.0)).all()


def test_memory_does_not_grow_with_the_number_of_points():
    x, y, _ = draw(N)
    model = fitted(x, y, support_size=200).model_

    def peak(points):
        law = model.conditional(points)
        law.quantile([0.1, 0.5], "y0")  # what is prepared once
        tracemalloc.start()
        answers = law.quantile([0.1, 0.5], "y0")
        held = tracemalloc.get_traced_memory()[1] - answers.nbytes
        tracemalloc.stop()
        return held

    few, many = (np.linspace(-2, 2, n)[:, None] for n in (9_000, 45_000))
    assert peak(many) < 1.1 * peak(few)
