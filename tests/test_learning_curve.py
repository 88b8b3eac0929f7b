"""How much smaller errors get with all rows: power laws, refits by hand, and laws that use it."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.tree import DecisionTreeRegressor

from cme_dask import JointDistribution, Tuning, load
from cme_dask.errors import StoreError
from cme_dask.kernels import Gaussian
from cme_dask.learning.tree_fits import TrainingRows
from cme_dask.learning.trees import cross_fitted, fitted_to_all, residual_scale
from cme_dask.models.joint import JointModel
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.learning_curve import error_of_all, fold_pairs, scale_of_all
from cme_dask.numerics.location import fit_mean_function, scaled_residuals
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments

RNG = np.random.default_rng(0)


def test_no_two_pairs_share_a_fold():
    assert fold_pairs([0, 1]) == []
    assert fold_pairs([3, 5, 9]) == []
    assert fold_pairs([3, 5, 9, 2]) == [(3, 5), (9, 2)]
    assert fold_pairs(range(10)) == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0, 1.5])
def test_a_power_law_is_found(rate):
    """Errors that fall like n^-rate, without any noise: the ratio has no standard error."""
    base = RNG.uniform(0.5, 2.0, (40, 2))
    fewer, some = (base * seen**-rate for seen in (0.6, 0.8))
    scale = error_of_all(fewer, some, RNG.uniform(0.1, 1.0, 40), (0.6, 0.8))
    np.testing.assert_allclose(scale, np.full(2, 0.8 ** min(rate, 1.0)), rtol=1e-12)


@pytest.mark.parametrize("rows", [60, 1000])
def test_a_row_of_much_leverage_does_not_decide(rows):
    """The fit without it is wrong there by any factor, and so, or less, is the other fit."""
    rng = np.random.default_rng(rows)
    some = rng.uniform(0.9, 1.1, (rows, 3))
    fewer = 1.02 * some * rng.uniform(0.99, 1.01, (rows, 3))
    share, seen = rng.uniform(0.9, 1.1, rows), (0.8, 0.9)
    usual = error_of_all(fewer, some, share, seen)
    fewer[2] *= [1e3, 1e150, 1e9]
    some[2] *= [1.0, 1.0, 1e6]
    scale = error_of_all(fewer, some, share, seen)
    assert (np.abs(scale - usual) < 0.02).all()
    fewer[3:5], some[3:5] = 1e100, 1e50
    assert (np.abs(error_of_all(fewer, some, share, seen) - usual) < 0.03).all()


@pytest.mark.parametrize("zeros", [0.5, 0.95])
def test_errors_count_where_most_are_zero(zeros):
    rng = np.random.default_rng(0)
    some = np.where(rng.random(4000) < zeros, 0.0, 1.0)[:, None]
    found = error_of_all(1.1 * some, some, np.ones(4000), (0.8, 0.9))
    power = np.log(1 / 0.9) / np.log(0.9 / 0.8)
    assert found == pytest.approx(1.1**-power, abs=0.02)


def test_what_noise_explains_changes_nothing():
    fewer, some = RNG.exponential(size=(2, 50, 1))
    both = error_of_all(fewer, some, np.ones(50), (0.6, 0.8))
    other = error_of_all(some, fewer, np.ones(50), (0.6, 0.8))
    assert max(both[0], other[0]) == 1.0
    assert min(both[0], other[0]) > 0.75


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10.0), st.integers(1, 30))
def test_scales_are_shares_and_have_no_units(seed, unit, n):
    rng = np.random.default_rng(seed)
    fewer, some = 1.2 * rng.exponential(size=(n, 2)), rng.exponential(size=(n, 2))
    share = rng.uniform(0.1, 1.0, n)
    scale = error_of_all(fewer, some, share, (0.8, 0.9))
    assert ((scale >= 0.9) & (scale <= 1.0)).all()
    again = error_of_all(unit * fewer, unit * some, 3.0 * share, (0.8, 0.9))
    np.testing.assert_allclose(again, scale, rtol=1e-9)


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_errors_of_zero_have_no_learning_curve(rows):
    nothing = np.zeros((rows, 1))
    assert error_of_all(nothing, nothing, np.ones(rows), (0.8, 0.9)) == 1.0
    assert error_of_all(nothing + 1.0, nothing, np.ones(rows), (0.8, 0.9)) == 1.0


def test_two_folds_have_no_pairs():
    y = RNG.normal(size=(10, 1))
    folds = np.arange(10) % 2
    each = np.arange(10)
    assert scale_of_all(y, 0.0 * y, folds, np.ones(10), lambda left_out: [], each) == 1.0


def test_rows_that_are_alike_count_as_one():
    """A hundred copies of a row say as much as the row, whose weight is theirs."""
    n, copies = 60, 100
    weights, folds = RNG.uniform(0.5, 2.0, n), np.arange(n) % 6
    y, missed = np.zeros((n, 2)), RNG.exponential(size=(n, 2))
    further = 1.05 * missed * RNG.uniform(0.9, 1.1, size=(n, 2))

    def scale(repeated, units):
        every = partial(np.repeat, repeats=repeated, axis=0)

        def refits(left_out):
            return [every(further)[out] for out in left_out]

        share = every(weights) / repeated
        return scale_of_all(every(y), every(missed), every(folds), share, refits, units)

    once = scale(1, np.arange(n))
    assert (once < 1.0).all()
    np.testing.assert_allclose(scale(copies, np.repeat(np.arange(n), copies)), once)
    assert (scale(copies, np.arange(n * copies)) < once).all()  # as if all of them were new


# Locations, beside refits by hand


def by_hand(y, held_out, groups, weights, refit):
    """The scale from the groups' pairs, in loops."""
    used = sorted({g for g, w in zip(groups, weights, strict=True) if w > 0})
    pairs = [(used[2 * k], used[2 * k + 1]) for k in range(min(3, len(used) // 2))]
    fewer, some, share = [], [], []
    for pair in pairs:
        out = np.isin(groups, pair)
        fewer.append(np.abs(y - refit(~out))[out & (weights > 0)])
        some.append(np.abs(y - held_out)[out & (weights > 0)])
        share.append(weights[out & (weights > 0)])
    share = np.concatenate(share)
    each = share.sum() / weights.sum() / (2 * len(pairs))
    fewer, some, share = np.concatenate(fewer), np.concatenate(some), share / share.sum()
    scale = []
    for j in range(y.shape[1]):
        order = np.argsort(some[:, j])
        usual = some[order[np.searchsorted(np.cumsum(share[order]), 0.9)], j]
        before, after = np.minimum(fewer[:, j], 4 * usual), np.minimum(some[:, j], 4 * usual)
        ratio = (share @ before) / (share @ after)
        gap = before - ratio * after
        std = np.sqrt(len(share) / (len(share) - 1) * np.sum(share**2 * gap**2))
        gain = max(np.log(ratio - std / (share @ after)), 0.0)
        power = np.log(1 / (1 - each)) / np.log((1 - each) / (1 - 2 * each))
        scale.append(max(np.exp(-gain * power), 1 - each))
    return np.array(scale)


def smooth(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 2))
    return x, np.sin(6 * x[:, :1]) + x[:, 1:] + 0.01 * rng.normal(size=(n, 1))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["boosting", "shallow", "forest"])
def test_trees_without_pairs_of_parts_tell_the_scale(kind, weighted):
    x, y = smooth(300)
    weights = np.random.default_rng(3).integers(0, 3, 300) * 1.0 if weighted else np.ones(300)
    folds, each = fold_of_rows(0, 300, 10), np.arange(300)
    rows = TrainingRows(x, y, weights / weights.sum(), folds, 10, each, 1, threads=2)
    found = cross_fitted(kind, rows)

    def refit(selected):
        from cme_dask.learning.tree_fits import KINDS

        fit = KINDS[kind](rows, selected, steps=found.steps)
        return fit.mean(rows, found.steps)(x)

    expected = by_hand(y, found.predicted, rows.folds % 5, rows.weights, refit)
    np.testing.assert_allclose(residual_scale(found, rows), expected, rtol=1e-10)
    assert kind == "shallow" or (expected < 1.0).all()


def test_a_ridge_regression_without_pairs_of_folds_tells_the_scale():
    """From moments without pairs of folds, beside regressions on the other rows."""
    x, y = smooth(160, 1)
    y = np.hstack([y, RNG.normal(size=(160, 1))])
    weights, folds = RNG.uniform(0.5, 2.0, 160), fold_of_rows(0, 160, 8)
    sides = (
        FeatureBlock(NewtonBasis.from_points(Gaussian(0.5), x[:80]), ("a", "b")),
        FeatureBlock(NewtonBasis.from_points(Gaussian(1.0), y[:5]), ("y", "z")),
    )
    moments = strip_moments(MomentReduction(sides, 8), (x, y), weights, folds)
    columns, basis = slice(0, 2), sides[0].basis
    within = x.min(axis=0), x.max(axis=0)
    found = fit_mean_function(moments, basis, columns, within=within)
    each, share = np.arange(160), weights / weights.sum()
    residuals = scaled_residuals(found, moments, basis, columns, (x, y), folds, share, each)

    def refit(rest):
        part = strip_moments(
            MomentReduction(sides, 8), (x[rest], y[rest]), weights[rest], folds[rest]
        )
        # The ridges are those of all rows.
        means = [
            fit_mean_function(part, basis, columns, ridges=(ridge,), within=within)
            for ridge in found.ridges
        ]
        return np.column_stack([mean.residuals.location(x)[:, j] for j, mean in enumerate(means)])

    expected = by_hand(y, found.residuals.held_out(x, folds), folds, share, refit)
    np.testing.assert_allclose(residuals.scale, expected, rtol=1e-6)
    assert residuals.scale[0] < 0.99
    assert residuals.scale[1] > 0.95  # noise has no learning curve
    pair = fold_pairs(moments.held_out_folds)[1]
    left = moments.means(without=pair)
    rest = ~np.isin(folds, pair)
    np.testing.assert_allclose(left.weight, weights[rest].sum())
    np.testing.assert_allclose(left.means["x"], weights[rest] @ basis(x[rest]) / left.weight)


def test_a_regressor_without_pairs_of_folds_tells_the_scale():
    x, y = smooth(900)
    tree, folds = DecisionTreeRegressor(random_state=0), fold_of_rows(0, 900, 6)
    fit = JointDistribution(
        location=tree, kernel_x="median", kernel_y="median", tol=1e-2, n_folds=6
    ).fit(x, y)

    def refit(selected):
        return clone(tree).fit(x[selected], y[selected, 0]).predict(x)[:, None]

    held_out = np.empty_like(y)
    for fold in range(6):
        held_out[folds == fold] = refit(folds != fold)[folds == fold]
    expected = by_hand(y, held_out, folds, np.full(900, 1 / 900), refit)
    np.testing.assert_allclose(fit.model_.residual.scale, expected, rtol=1e-10)
    assert expected < 0.99


def test_the_scale_is_that_of_errors_at_new_rows():
    """On average: that of one sample is as far from it as from 1."""
    scales, ratios = [], []
    for seed in range(6):
        x, y = smooth(600, seed)
        folds, each = fold_of_rows(0, 600, 10), np.arange(600)
        rows = TrainingRows(x, y, np.full(600, 1 / 600), folds, 10, each, 1, threads=2)
        found = cross_fitted("boosting", rows)
        more, target = smooth(4000, 100 + seed)
        error = np.abs(fitted_to_all(found, rows)(more) - target).mean()
        ratios.append(error / np.abs(found.predicted - y).mean())
        scales.append(residual_scale(found, rows)[0])
    assert np.mean(ratios) < 0.93
    assert np.mean(scales) == pytest.approx(np.mean(ratios), abs=0.03)


# Laws


@pytest.fixture(scope="module")
def narrow():
    """A model of two columns of y, whose residuals are halved in the first one."""
    x, y = smooth(300)
    y = np.hstack([y, y**2 + 0.1 * RNG.normal(size=y.shape)])
    tuning = Tuning(rows=300, max_rank=40, evaluations=0, trees=())
    model = JointDistribution(tuning=tuning, residual=True, support="continuous").fit(x, y).model_
    assert model.residual.transform is None
    halved, whole = (
        replace(model, residual=replace(model.residual, scale=np.array([first, 1.0])))
        for first in (0.5, 1.0)
    )
    return halved, whole, x[:7]


def test_laws_are_narrower_around_the_same_location(narrow):
    model, other, x = narrow
    mu, inner = model.residual.location(x), model.residual.model
    e, weights = inner.y.cells.means, inner.weights(x)
    atoms = mu[:, None] + e * model.residual.scale
    law, wide = model.conditional(x), other.conditional(x)
    np.testing.assert_allclose(law.mean(), np.einsum("bs,bsd->bd", weights, atoms), rtol=1e-10)
    np.testing.assert_allclose(law.std()[:, 1], wide.std()[:, 1], rtol=1e-12)
    gap = atoms - law.mean()[:, None]
    variance = np.einsum("bs,bsd->bd", weights, gap**2)
    np.testing.assert_allclose(law.std() ** 2, variance, rtol=1e-9)
    below = (weights * (atoms[:, :, 0] <= 0.3)).sum(axis=1)
    np.testing.assert_allclose(law.cdf(0.3, "y0"), below, atol=1e-12)
    assert (law.interval(0.9, "y0")[1] < wide.interval(0.9, "y0")[1] + 1e-9).all()
    draws = law.sample(200, random_state=0)
    np.testing.assert_allclose(
        draws - mu[:, None],
        (wide.sample(200, random_state=0) - mu[:, None]) * [0.5, 1.0],
        atol=1e-9,
    )


def test_densities_are_narrower_too(narrow):
    """Around the location: p(mu + e / 2) = 2 p'(mu + e) for densities of the first column."""
    halved, whole, x = narrow
    mu = halved.residual.location(x[:1])[0]
    e = np.column_stack([np.linspace(-0.4, 0.4, 9), np.zeros(9)])
    p = halved.conditional(x[:1]).log_pdf(mu + e * [0.5, 1.0])
    q = whole.conditional(x[:1]).log_pdf(mu + e)
    np.testing.assert_allclose(p, q + np.log(2.0), rtol=0.02, atol=0.05)


def test_files_hold_the_scale(tmp_path, narrow):
    model, _, x = narrow
    model.save(tmp_path / "m")
    again = load(tmp_path / "m")
    np.testing.assert_array_equal(again.residual.scale, model.residual.scale)
    np.testing.assert_array_equal(again.conditional(x).std(), model.conditional(x).std())
    state = model.to_state()
    del state.arrays["residual_scale"]  # as in files of earlier versions
    assert JointModel.from_state(state).residual.scale is None


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ([0.0, 1.0], "damaged"),
        ([1.5, 1.0], "damaged"),
        ([-0.5, 1.0], "damaged"),
        ([1.0], "residual_scale.*shape"),
        ([np.nan, 1.0], "residual_scale.*finite"),
    ],
)
def test_damaged_scales_are_refused(narrow, scale, words):
    state = narrow[0].to_state()
    state.arrays["residual_scale"] = np.array(scale)
    with pytest.raises(StoreError, match=words):
        JointModel.from_state(state)


def test_conformal_scores_are_those_of_the_narrower_law():
    """Intervals with a guarantee are as wide as without the scale, about: scores make up for it."""
    x, y = smooth(900)
    fit = JointDistribution(
        location=DecisionTreeRegressor(random_state=0),
        kernel_x="median",
        kernel_y="median",
        tol=1e-2,
        conformal=True,
    ).fit(x, y)
    assert fit.model_.residual.scale[0] < 0.97
    more, target = smooth(3000, 5)
    law = fit.conditional(more)
    inside = []
    for conformal in (False, True):
        low, high = law.interval(0.9, conformal=conformal)
        inside.append(((target[:, 0] >= low) & (target[:, 0] <= high)).mean())
    assert inside[1] > 0.88
    assert inside[1] >= inside[0]
