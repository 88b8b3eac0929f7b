"""Scores against what they are by definition: double sums, integrals, all pairs of rows."""

from functools import partial
from itertools import pairwise

import dask.array as da
import numpy as np
import pytest
import scoringrules
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import solve_joint
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.metrics import log_loss, mean_pinball_loss

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


@settings(max_examples=80)
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


# Scores of observations beside other libraries -------------------------------------------------


def random_laws(seed, n=60, size=25, d=2, *, own=False, tied=True):
    """Weights with zeros, atoms and observations, of which some are equal."""
    rng = np.random.default_rng(seed)
    shape = (n, size, d) if own else (size, d)
    points, y = rng.normal(size=shape), rng.normal(size=(n, d))
    if tied:
        points, y = points.round(1), y.round(1)
    w = rng.dirichlet(np.full(size, 0.5), n) * (rng.random((n, size)) < 0.8)
    return w / w.sum(axis=1, keepdims=True), points, y


def of_each(points, n):
    return points if points.ndim == 3 else np.broadcast_to(points, (n, *points.shape))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_crps_and_energy_score_are_those_of_scoringrules(own, tied):
    w, points, y = random_laws(0, own=own, tied=tied)
    atoms = of_each(points, len(y))
    each = [
        scoringrules.crps_ensemble(y[:, j], atoms[:, :, j], ens_w=w, backend="numpy")
        for j in range(2)
    ]
    assert np.abs(metrics.crps(w, points, y) - np.mean(each, axis=0)).max() < 1e-10
    whole = scoringrules.es_ensemble(y, atoms, ens_w=w, backend="numpy")
    assert np.abs(metrics.energy_score(w, points, y) - whole).max() < 1e-10


def test_energy_score_of_one_column_is_the_crps():
    w, points, y = random_laws(1, d=1)
    scores = metrics.energy_score(w, points[:, 0], y[:, 0])
    assert np.abs(scores - metrics.crps(w, points, y)).max() < 1e-12


def test_energy_score_of_many_atoms_is_computed_in_blocks():
    w, points, y = random_laws(2, n=4, size=700, d=3)
    gaps = np.linalg.norm(points[:, None] - points, axis=2)
    near = np.linalg.norm(points - y[:, None], axis=2)
    expected = (w * near).sum(axis=1) - 0.5 * np.einsum("bs,st,bt->b", w, gaps, w)
    assert np.abs(metrics.energy_score(w, points, y) - expected).max() < 1e-10
    own = of_each(points, 4)
    assert np.abs(metrics.energy_score(w, own, y) - expected).max() < 1e-10


def test_pinball_and_interval_scores_are_those_of_scoringrules_and_scikit_learn():
    rng = np.random.default_rng(3)
    y, levels = rng.normal(size=200).round(1), np.array([0.05, 0.3, 0.5, 0.95])
    q = np.sort(rng.normal(size=(200, 4)), axis=1).round(1)
    assert (q == y[:, None]).any()
    found = metrics.pinball(q, levels, y)
    assert np.abs(found - scoringrules.quantile_score(y[:, None], q, levels)).max() < 1e-10
    w = rng.exponential(size=200)
    for j, level in enumerate(levels):
        expected = mean_pinball_loss(y, q[:, j], alpha=level, sample_weight=w)
        assert metrics.mean(found, w)[j].value == pytest.approx(expected, abs=1e-10)
        assert np.array_equal(metrics.pinball(q[:, j], level, y), found[:, j])
    score = metrics.interval_score(q[:, 0], q[:, 3], y, 0.9)
    expected = scoringrules.interval_score(y, q[:, 0], q[:, 3], 0.1)
    assert np.abs(score - expected).max() < 1e-10
    assert np.abs(score - 20 * (found[:, 0] + found[:, 3])).max() < 1e-10
    pairs = (np.stack([a, a[::-1]], axis=1) for a in (q[:, 0], q[:, 3], y))
    assert np.array_equal(metrics.interval_score(*pairs)[:, 0], score)
    covered = metrics.coverage(q[:, 0], q[:, 3], y)
    assert covered.mean() == np.mean(
        [a <= z <= b for a, z, b in zip(q[:, 0], y, q[:, 3], strict=True)]
    )
    assert np.array_equal(metrics.width(q[:, 0], q[:, 3]), q[:, 3] - q[:, 0])


def test_log_scores_are_those_of_scikit_learn_and_scipy():
    rng = np.random.default_rng(4)
    chances, codes = rng.dirichlet(np.ones(5), 300), rng.integers(0, 5, 300)
    w = rng.exponential(size=300)
    scores = metrics.log_score(chances, codes)
    expected = log_loss(codes, chances, sample_weight=w, labels=range(5))
    assert metrics.mean(scores, w).value == pytest.approx(expected, abs=1e-10)
    y = rng.normal(size=300)
    found = metrics.log_score(norm.pdf(y, 0.3, 2.0))
    assert np.abs(found + norm.logpdf(y, 0.3, 2.0)).max() < 1e-10
    assert np.abs(found - scoringrules.logs_normal(y, 0.3, 2.0)).max() < 1e-10
    assert metrics.log_score([0.0, 1.0]).tolist() == [np.inf, 0.0]
    assert metrics.log_score([0.0, 1.0], least=1e-3)[0] == -np.log(1e-3)


@pytest.mark.parametrize("own", [False, True])
def test_pit_is_the_distribution_function_with_half_of_its_step(own):
    w, points, y = random_laws(5, own=own)
    atoms, at = of_each(points, len(y)), y[:, None]
    before = np.einsum("bs,bsd->bd", w, (atoms < at).astype(float))
    upto = np.einsum("bs,bsd->bd", w, (atoms <= at).astype(float))
    assert (upto > before).any()
    assert np.abs(metrics.pit(w, points, y) - (before + upto) / 2).max() < 1e-10
    drawn = metrics.pit(w, points, y, random_state=1)
    assert ((before - 1e-12 <= drawn) & (drawn <= upto + 1e-12)).all()
    assert np.array_equal(drawn, metrics.pit(w, points, y, random_state=1))
    assert not np.array_equal(drawn, metrics.pit(w, points, y, random_state=2))
    first = metrics.pit(w, points[..., :1], y[:, 0])
    assert np.abs(first - metrics.pit(w, points, y)[:, 0]).max() < 1e-14


def test_pit_of_true_laws_of_counts_is_uniform_only_if_it_is_drawn():
    rng = np.random.default_rng(6)
    w = np.tile([0.5, 0.3, 0.2], (20_000, 1))
    y = rng.choice(3, p=w[0], size=20_000)
    drawn = metrics.calibration_error(metrics.pit(w, np.arange(3), y, random_state=0))
    assert drawn.value < 0.01
    assert metrics.calibration_error(metrics.pit(w, np.arange(3), y)).value > 0.05
    from cme_dask.numerics.row_scores import PIT_LEVELS, pit_deviations

    upto = np.cumsum(w, axis=1)[0, y]
    deviations = pit_deviations(upto - w[0, y], upto, np.array(PIT_LEVELS))
    assert np.abs(deviations.mean(axis=0)).sum() < drawn.value + 1e-3


def test_calibration_errors_by_their_definitions():
    rng = np.random.default_rng(7)
    u, w = rng.beta(2, 2, 500), rng.exponential(size=500)
    levels = np.arange(1, 20) / 20
    shares = np.array([np.average(u <= level, weights=w) for level in levels])
    found = metrics.calibration_error(u, weights=w)
    assert found.value == pytest.approx(np.abs(shares - levels).mean(), abs=1e-10)
    assert 0 < found.std < found.value
    halves = metrics.calibration_error(u, bins=2).value
    assert halves == pytest.approx(abs((u <= 0.5).mean() - 0.5), abs=1e-10)
    chances, codes = rng.dirichlet(np.ones(4), 500), rng.integers(0, 4, 500)
    top, hit = chances.max(axis=1), chances.argmax(axis=1) == codes
    expected = 0.0
    for low in np.arange(15) / 15:
        some = (low <= top) & (top < low + 1 / 15)
        if some.any():
            gap = np.average(top[some], weights=w[some]) - np.average(hit[some], weights=w[some])
            expected += w[some].sum() / w.sum() * abs(gap)
    found = metrics.calibration_error(chances, codes, weights=w)
    assert found.value == pytest.approx(expected, abs=1e-10)


def test_cde_loss_is_the_integral_of_the_square_less_twice_the_density():
    rng = np.random.default_rng(8)
    grid = np.sort(rng.normal(size=9))
    y = np.append(rng.uniform(grid[0], grid[-1], 6), [grid[0], grid[-1], grid[-1] + 1.0, grid[3]])
    linear, constant = rng.random((10, 9)), rng.random((10, 8))
    found = metrics.cde_loss(linear, grid, y)
    for f, z, loss in zip(linear, y, found, strict=True):
        pieces = pairwise(grid)
        square = sum(quad(lambda t, f=f: np.interp(t, grid, f) ** 2, a, b)[0] for a, b in pieces)
        there = np.interp(z, grid, f, left=0.0, right=0.0)
        assert loss == pytest.approx(square - 2 * there, abs=1e-10)
    found = metrics.cde_loss(constant, grid, y)
    for f, z, loss in zip(constant, y, found, strict=True):
        cells = [c for c in range(8) if grid[c] <= z < grid[c + 1] or (c == 7 and z == grid[8])]
        there = f[cells[0]] if cells else 0.0
        assert loss == pytest.approx((f**2 * np.diff(grid)).sum() - 2 * there, abs=1e-10)


def test_infinite_ends_cover():
    """Conformal intervals of few rows are infinite."""
    low, high, y = np.array([-np.inf, 0.0, 0.0]), np.array([1.0, np.inf, 1.0]), np.array([0, -1, 2])
    np.testing.assert_array_equal(metrics.coverage(low, high, y), [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(metrics.width(low, high), [np.inf, np.inf, 1.0])
    scores = metrics.interval_score(*(da.from_array(v, chunks=2) for v in (low, high, y)), 0.9)
    np.testing.assert_allclose(scores, [np.inf, np.inf, 21.0])
    with pytest.raises(DataError, match="scores: NaN or infinity"):
        metrics.mean(metrics.width(low, high))
    with pytest.raises(DataError, match="width: ends: NaN"):
        metrics.width(low * np.nan, high)
    with pytest.raises(DataError, match="coverage: y: NaN or infinity"):
        metrics.coverage(low, high, np.full(3, np.inf))
    with pytest.raises(DataError, match="no number lies between inf and inf"):
        metrics.width(-low[:1], -low[:1])


def test_short_numbers_add_up_to_one_by_their_own_rounding(rng):
    shares, codes = rng.dirichlet(np.ones(10), 200), rng.integers(0, 10, 200)
    short = shares.astype(np.float32)
    assert (np.abs(short.astype(float).sum(axis=1) - 1.0) > 1e-9).any()
    points, lazy = np.arange(10.0), da.from_array(short, chunks=(90, 10))
    for score in (
        lambda p: metrics.log_score(p, codes),
        lambda p: metrics.crps(p, points, codes),
        lambda p: [metrics.calibration_error(p, codes).value],
    ):
        for probabilities in (short, lazy):
            np.testing.assert_allclose(score(probabilities), score(shares), atol=1e-4)
        for wrong in (1.001 * short, shares * (1.0 + 1e-8)):
            with pytest.raises(DataError, match="must add up to one"):
                score(wrong)
    with pytest.raises(DataError, match="add up to one"):
        metrics.log_score(np.array([[0.5, 0.53]], dtype=np.float16), np.array([0]))


def test_units_are_numbers_names_or_dates():
    rng = np.random.default_rng(9)
    week = rng.integers(0, 50, 500)
    scores = rng.normal(size=50)[week] + rng.normal(size=500)
    names = np.array([f"w{i:02d}" for i in week], dtype=object)
    dates = np.datetime64("2024-01-01", "ns") + week * np.timedelta64(7 * 86_400 * 10**9, "ns")
    expected = metrics.mean(scores, units=np.unique(week, return_inverse=True)[1])
    for units in (names, dates, 2**60 + week):
        assert metrics.mean(scores, units=units) == expected
    names[3], dates[4] = None, np.datetime64("NaT")
    for units, row in ((names, 3), (dates, 4), (np.where(week > 100, 0.0, np.nan), 0)):
        with pytest.raises(DataError, match=rf"units must name .* \(first at row {row}\)"):
            metrics.mean(scores, units=units)
    names[3] = 3.0
    with pytest.raises(DataError, match="units of several types"):
        metrics.mean(scores, units=names)
    with pytest.raises(DataError, match="units must hold integers below"):
        metrics.mean(scores, units=da.from_array(2**60 + week, chunks=100))


def test_scores_of_fits_refuse_unusable_weights(rng):
    x = rng.normal(size=(60, 1))
    label = np.where(x[:, 0] > 0.0, "up", "down")
    kernel = kernels.Gaussian(1.0)
    options = {"kernel_x": kernel, "reg": 1e-3}
    fit = cme_dask.JointDistribution(**options, kernel_y=kernel, residual=False).fit(x, x)
    classifier = cme_dask.EmbeddingClassifier(**options).fit(x, label).model_
    refused = {
        "all weights are zero": np.zeros(60),
        "weights must be non-negative, 60 are negative": -np.ones(60),
        "weights have one value for each of 60 rows, got shape": np.ones((60, 1)),
        "for each of 60 rows, got shape .5,.": np.ones(5),
        "weights. has 60 .* NaN or infinite": np.full(60, np.nan),
        "weights: numbers expected": ["a"] * 60,
    }
    scores = [
        (fit.score, x),
        (fit.model_.score, x),
        (classifier.score, label),
        (partial(metrics.crps_scorer, fit), x[:, 0]),
        (partial(metrics.log_score_scorer, fit), x[:, 0]),
    ]
    for score, y in scores:
        assert score(x, y, np.full(60, 2.0)) == pytest.approx(score(x, y), rel=1e-12)
        for message, weights in refused.items():
            with pytest.raises(DataError, match=message):
                score(x, y, weights)


def test_means_have_jackknife_errors_over_blocks_of_units():
    rng = np.random.default_rng(9)
    station = rng.integers(0, 50, 2000)
    scores, w = rng.normal(size=50)[station] + rng.normal(size=2000), rng.exponential(size=2000)
    plain, by_station = metrics.mean(scores, w), metrics.mean(scores, w, station)
    for estimate in (plain, by_station):
        assert estimate.value == pytest.approx(np.average(scores, weights=w), abs=1e-12)
    assert by_station.std > 1.5 * plain.std
    assert plain.std == pytest.approx(scores.std() / np.sqrt(1000), rel=0.6)
    names = np.array([f"s{i:02d}" for i in range(50)])[station]
    assert metrics.mean(scores, w, names).value == pytest.approx(plain.value)
    assert np.isnan(metrics.mean(scores, w, np.zeros(2000)).std)
    assert metrics.pinball(np.zeros((0, 2)), [0.1, 0.2], np.zeros(0)).shape == (0, 2)
    several = metrics.mean(np.stack([scores, 2 * scores], axis=1), w)
    assert several[0].value == pytest.approx(plain.value)
    assert several[1].value == pytest.approx(2 * plain.value)


# Scores in chunks --------------------------------------------------------------------------------


def test_chunks_give_the_same_numbers_and_stay_chunked():
    w, points, y = random_laws(10, n=100)
    rng = np.random.default_rng(10)
    chances, codes = rng.dirichlet(np.ones(4), 100), rng.integers(0, 4, 100)
    ends, density = np.sort(rng.normal(size=(100, 2)), axis=1), rng.random((100, 6))
    grid, single = np.linspace(-2, 2, 6), y[:, 0]

    def lazily(array, rows=30):
        return da.from_array(array, chunks=(rows, *[1] * (array.ndim - 1)))

    asked = [
        (lambda w, y: metrics.crps(w, points, y), (w, y)),
        (lambda w, p, y: metrics.crps(w, p, y), (w, of_each(points, 100), y)),
        (lambda w, y: metrics.energy_score(w, points, y), (w, y)),
        (lambda w, y: metrics.pit(w, points, y), (w, y)),
        (lambda w, y: metrics.pit(w, points, y, random_state=3), (w, y)),
        (lambda w, y: metrics.pit(w, points[:, 0], y, random_state=3), (w, single)),
        (metrics.log_score, (chances, codes)),
        (metrics.log_score, (chances[:, 0],)),
        (lambda q, y: metrics.pinball(q, [0.1, 0.9], y), (ends, single)),
        (lambda q, y: metrics.pinball(q, 0.1, y), (single + 0.1, single)),
        (metrics.interval_score, (ends[:, 0], ends[:, 1], single)),
        (metrics.coverage, (ends - 0.5, ends + 0.5, y)),
        (metrics.width, (ends[:, 0], ends[:, 1])),
        (lambda f, y: metrics.cde_loss(f, grid, y), (density, single)),
    ]
    for ask, arrays in asked:
        expected = ask(*arrays)
        found = ask(*map(lazily, arrays))
        assert isinstance(found, da.Array)
        assert found.shape == expected.shape
        assert len(found.chunks[0]) == 4
        np.testing.assert_allclose(found.compute(), expected, rtol=0, atol=1e-12)
        if len(arrays) > 1:  # one array in chunks is enough, and chunks may differ
            mixed = ask(lazily(arrays[0], 41), *arrays[1:])
            np.testing.assert_allclose(mixed.compute(), expected, rtol=0, atol=1e-12)
            mixed = ask(lazily(arrays[0], 41), *(lazily(a, 17) for a in arrays[1:]))
            np.testing.assert_allclose(mixed.compute(), expected, rtol=0, atol=1e-12)


def test_means_and_calibration_errors_of_chunks():
    rng = np.random.default_rng(11)
    u, w, station = rng.random(500), rng.exponential(size=500), rng.integers(0, 30, 500)
    chances, codes = rng.dirichlet(np.ones(4), 500), rng.integers(0, 4, 500)
    lazy = [da.from_array(a, chunks=90) for a in (u, w, station, codes)]
    shares = da.from_array(chances, chunks=(120, 2))
    pairs = [
        (metrics.mean(u, w, station), metrics.mean(*lazy[:3])),
        (metrics.mean(u), metrics.mean(lazy[0])),
        (metrics.mean(chances)[1], metrics.mean(shares)[1]),
        (
            metrics.calibration_error(u, weights=w, units=station),
            metrics.calibration_error(lazy[0], weights=w, units=lazy[2]),
        ),
        (metrics.calibration_error(chances, codes), metrics.calibration_error(shares, lazy[3])),
    ]
    for expected, found in pairs:
        assert found.value == pytest.approx(expected.value, abs=1e-12)
        assert found.std == pytest.approx(expected.std, abs=1e-12)
    with pytest.raises(DataError, match="chunks of known length"):
        metrics.mean(lazy[0][lazy[0] > 0.5])


def test_bad_values_in_chunks_are_refused_when_they_are_computed():
    y = np.zeros(10)
    y[7] = np.nan
    scores = metrics.pinball(np.zeros(10), 0.5, da.from_array(y, chunks=5))
    with pytest.raises(DataError, match="y: NaN or infinity"):
        scores.compute()


half = np.full((2, 2), 0.5)
zeros, ones = np.zeros(2), np.ones(2)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: metrics.energy_score(half, zeros, np.zeros(3)), "energy_score takes weights"),
        (lambda: metrics.energy_score(2 * half, zeros, zeros), "add up to one"),
        (lambda: metrics.pit([[2.0, -1.0]], zeros, [0.0]), "non-negative weights"),
        (lambda: metrics.pit(half, zeros, zeros, random_state=-1), "non-negative integer, got -1"),
        (lambda: metrics.pit(half, zeros, np.zeros((2, 2, 2))), "pit takes weights"),
        (lambda: metrics.log_score(half), "or labels too"),
        (lambda: metrics.log_score(half, [0, 2]), "integers from 0 to 1, got 2"),
        (lambda: metrics.log_score(half, [0.5, 1]), "integers from 0 to 1, got 0.5"),
        (lambda: metrics.log_score(half, [0]), "got shapes"),
        (lambda: metrics.log_score(2 * half, [0, 1]), "add up to one"),
        (lambda: metrics.log_score([-1.0]), "negative values"),
        (lambda: metrics.log_score([1.0], least=-1), "least must be"),
        (lambda: metrics.pinball(zeros, 1.0, zeros), "between 0 and 1, exclusively, got 1.0"),
        (lambda: metrics.pinball(half, [0.1, np.nan], zeros), "levels: NaN"),
        (lambda: metrics.pinball(half, [0.1], zeros), "got shapes"),
        (lambda: metrics.pinball(zeros, 0.1, [0.0, np.nan]), "y: NaN or infinity"),
        (lambda: metrics.interval_score(ones, zeros, zeros), "must not exceed upper ones, got 1"),
        (lambda: metrics.interval_score(zeros, ones, zeros, 1.5), "level must lie between"),
        (lambda: metrics.interval_score(zeros, ones, zeros, [0.5]), "level must be one number"),
        (lambda: metrics.coverage(zeros, ones, np.zeros(3)), "arrays of one shape"),
        (lambda: metrics.width(zeros, [1.0, np.nan]), "width: ends: NaN"),
        (lambda: metrics.cde_loss(half, [0.0, 0.0], zeros), "ascending order"),
        (lambda: metrics.cde_loss(half, [0.0, 1.0, 2.0, 3.0], zeros), r"densities \(n, 4\)"),
        (lambda: metrics.cde_loss(-half, [0.0, 1.0], zeros), "density: negative"),
        (lambda: metrics.calibration_error([1.2]), "between 0 and 1, got 1.2"),
        (lambda: metrics.calibration_error(half), "or labels too"),
        (lambda: metrics.calibration_error(zeros, bins=1), "bins must be"),
        (lambda: metrics.calibration_error(half, [0]), "got shapes"),
        (lambda: metrics.mean([np.nan]), "scores: NaN"),
        (lambda: metrics.mean(np.zeros((1, 1, 1))), "mean takes scores"),
        (lambda: metrics.mean(zeros, [1.0]), "one value for each of 2 rows"),
        (lambda: metrics.mean(zeros, -ones), "weights: negative"),
        (lambda: metrics.mean(zeros, zeros), "all weights are zero"),
        (lambda: metrics.mean([]), "no rows"),
    ],
)
def test_scores_of_what_does_not_fit_are_refused(ask, message):
    with pytest.raises(DataError, match=message):
        ask()


@pytest.mark.parametrize("lazy", [False, True])
def test_masked_values_are_missing(lazy):
    y = np.ma.masked_array(np.arange(8.0), mask=np.arange(8) == 3)
    y.data[3] = 1e9
    values = da.from_array(y, chunks=4) if lazy else y
    zeros, half = np.zeros(8), np.full((8, 2), 0.5)
    with pytest.raises(DataError, match="scores: NaN or infinity"):
        metrics.mean(values)
    for ask in (
        lambda: metrics.crps(half, [0.0, 1.0], values),
        lambda: metrics.pinball(zeros, 0.5, values),
        lambda: metrics.pit(half, [0.0, 1.0], values),
    ):
        with pytest.raises(DataError, match="y: NaN or infinity"):
            np.asarray(ask())
    for units in (y, np.ma.masked_array(list("abcdefgh"), mask=y.mask)):
        with pytest.raises(DataError, match=r"1 \(first at row 3\) are missing"):
            metrics.mean(zeros, units=units)


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
