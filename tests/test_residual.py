"""The location model: locations, the second pass, the decision, files; oracles by hand."""

import copy
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import dask.array as da
import numpy as np
import oracle_joint
import oracle_law
import pytest
from conftest import write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from test_reads import opened

from benchmarks.coverage import SCENARIOS
from cme_dask import JointDistribution, Tuning, kernels, load
from cme_dask.data.model_file import ModelState
from cme_dask.errors import ConstantColumnWarning, DataError, StoreError
from cme_dask.estimators import context as context_module
from cme_dask.estimators import locating, residual, tuned
from cme_dask.estimators.context import PivotProgress
from cme_dask.kernels.transforms import PoolRare, Scores, Standard, Transform
from cme_dask.learning.candidates import Over
from cme_dask.learning.losses import Gain, paired_gain, screened_laws
from cme_dask.learning.trees import TreeSearch
from cme_dask.metrics import crps
from cme_dask.models.joint import JointModel
from cme_dask.numerics import location as locations
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.location import RIDGES, fit_mean_function
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.trees import TreeMean
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.fit import sample_rows
from cme_dask.passes.run import run_pass
from cme_dask.passes.sources import open_sample

QUICK = Tuning(rows=500, evaluations=0, trees=())
N_FOLDS = 4
pytestmark = pytest.mark.usefixtures("least_searches")


@pytest.fixture(scope="module", params=["trend", "flat"])
def located(request):
    """Rows, weights and folds; location on 12 pivots; the moments it is made of."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(600, 2))
    y = np.column_stack([np.sin(2 * x[:, 0]), 50.0 + x[:, 1] ** 2]) + 0.3 * rng.normal(
        size=(600, 2)
    )
    weights, folds = rng.uniform(0.5, 2.0, 600), rng.integers(0, N_FOLDS, 600).astype(np.uint8)
    sides = (
        FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), x[:12]), ("a", "b")),
        FeatureBlock(
            NewtonBasis.from_points(kernels.Gaussian(1.0), y[:5]),
            ("c", "d"),
            shift=np.array([0.0, 50.0]),
        ),
    )
    moments = strip_moments(MomentReduction(sides, N_FOLDS), (x, y), weights, folds)
    within = (x.min(axis=0), x.max(axis=0)) if request.param == "trend" else None
    return (
        x,
        y,
        weights,
        folds,
        fit_mean_function(moments, sides[0].basis, slice(0, 2), within=within),
    )


def dense(x, y, weights, pivots, ridge, trend=True):
    """Ridge regression on the Newton basis beside a trend in x, by its normal equations.

    The intercept, and the slopes on the basis and on x.
    """
    newton = oracle_joint.newton(kernels.Gaussian(1.0), x, pivots)
    features = np.column_stack([newton, x]) if trend else newton
    share = weights / weights.sum()
    centred = features - share @ features
    gram = centred.T @ (share[:, None] * centred)
    penalty = ridge * np.diag((np.arange(len(gram)) < len(pivots)).astype(float))
    slope = np.linalg.solve(gram + penalty, centred.T @ (share * (y - share @ y)))
    slope = np.concatenate([slope, np.zeros(len(pivots) + x.shape[1] - len(slope))])
    return share @ y - share @ features @ slope[: features.shape[1]], slope


def test_locations_are_dense_refits_with_the_simplest_good_ridge(located):
    x, y, weights, folds, found = located
    pivots, trend = x[:12], bool(found.residuals.location.trend.any())
    features = np.column_stack([oracle_joint.newton(kernels.Gaussian(1.0), x, pivots), x])
    cross_fitted = found.residuals.held_out(x, folds)
    for fold, mean in enumerate(found.residuals.each):
        held = folds == fold
        np.testing.assert_allclose(mean(x[held]), cross_fitted[held], atol=1e-12)
    share = np.array([weights[folds == f].sum() for f in range(N_FOLDS)]) / weights.sum()
    for j in range(2):
        losses = np.zeros((N_FOLDS, len(RIDGES)))
        predicted = np.empty((len(RIDGES), len(x)))
        for i, ridge in enumerate(RIDGES):
            for fold in range(N_FOLDS):
                held = folds == fold
                constant, slope = dense(x[~held], y[~held, j], weights[~held], pivots, ridge, trend)
                predicted[i, held] = constant + features[held] @ slope
                gap = (predicted[i, held] - y[held, j]) ** 2
                losses[fold, i] = weights[held] @ gap / weights[held].sum()
        away = losses - losses[:, [(share @ losses).argmin()]]
        mean = share @ away
        std = np.sqrt(N_FOLDS / (N_FOLDS - 1) * share**2 @ (away - mean) ** 2)
        good = int(np.flatnonzero(mean <= std)[-1])
        assert found.ridges[j] == RIDGES[good]
        np.testing.assert_allclose(found.error[j], share @ losses[:, good], rtol=1e-8)
        np.testing.assert_allclose(cross_fitted[:, j], predicted[good], atol=1e-8)
        constant, slope = dense(x, y[:, j], weights, pivots, RIDGES[good], trend)
        whole = constant + features @ slope
        np.testing.assert_allclose(found.residuals.location(x)[:, j], whole, atol=1e-8)
    assert (found.skill > 0.5).all()


@pytest.mark.parametrize(
    ("name", "forms", "spectra"),
    [
        ("none", N_FOLDS, 0),
        ("_FEW_RIDGES", N_FOLDS + 1, 0),  # of the folds, and of all rows
        ("_SOLVED", 0, N_FOLDS + 1),
        ("CholeskyFactor", N_FOLDS + 1, 0),
        ("solve_rotated", N_FOLDS, 2 * N_FOLDS),  # for all ridges, and for those that are taken
    ],
)
def test_systems_forms_and_eigenbases_give_the_same_location(
    located, name, forms, spectra, monkeypatch
):
    """Systems for few ridges, forms also where one fails; eigenbases for tiny ones or after it."""
    x, y, weights, folds, found = located
    fails = SimpleNamespace(of=Mock(side_effect=np.linalg.LinAlgError))
    others = {"_FEW_RIDGES": 0, "_SOLVED": 1.0, "CholeskyFactor": fails}
    if name in others:
        monkeypatch.setattr(locations, name, others[name])
    eigenbases = Mock(side_effect=locations.eigenbasis)
    monkeypatch.setattr(locations, "eigenbasis", eigenbases)
    reduced = Mock(side_effect=locations.TridiagonalForm.of)
    monkeypatch.setattr(locations.TridiagonalForm, "of", reduced)
    if name == "solve_rotated":
        monkeypatch.setattr(locations.TridiagonalForm, name, fails.of)
    sides = [
        FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), rows), names)
        for rows, names in ((x[:12], ("a", "b")), (y[:5], ("c", "d")))
    ]
    moments = strip_moments(MomentReduction(tuple(sides), N_FOLDS), (x, y), weights, folds)
    within = found.residuals.location.low, found.residuals.location.high
    again = fit_mean_function(moments, sides[0].basis, slice(0, 2), within=within)
    assert (reduced.call_count, eigenbases.call_count) == (forms, spectra)
    assert fails.of.called == (name in ("CholeskyFactor", "solve_rotated"))
    np.testing.assert_allclose(again.residuals.location(x), found.residuals.location(x), 1e-9)
    np.testing.assert_array_equal(again.ridges, found.ridges)


def test_locations_go_on_constant_beyond_the_range_of_x():
    """Columns without a range, such as codes of labels, have no trend, and go on as they are."""
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.uniform(-1, 1, 500), rng.integers(0, 3, 500)])
    y = (3.0 * x[:, 0] + 5.0 * x[:, 1])[:, None]
    sides = (
        FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), x[:6]), ("a", "label")),
        FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), y[:3]), ("c",)),
    )
    folds = (np.arange(500) % 4).astype(np.uint8)
    moments = strip_moments(MomentReduction(sides, 4), (x, y), None, folds)
    within = np.array([-1.0, 0.0]), np.array([1.0, 0.0])
    residuals = fit_mean_function(moments, sides[0].basis, slice(0, 1), within=within).residuals
    location = residuals.location
    assert abs(location.trend[0, 0]) > 1.0
    assert location.trend[1, 0] == 0.0
    far = np.array([[1e6, 1.0], [1e9, 1.0], [1.0, 1e9]])
    edge = np.array([[1.0, 1.0]])
    section = location.kernel(edge, location.points)
    flat = location.constant + section @ location.coef + location.trend[0]
    assert np.abs(section @ location.coef).max() > 1e-3
    np.testing.assert_allclose(location(far)[:2], np.tile(flat, (2, 1)), rtol=1e-12)
    np.testing.assert_allclose(location(far)[2], location.constant + location.trend[0], rtol=1e-12)
    fold = np.array([3, 3])
    np.testing.assert_allclose(
        residuals.held_out(far[:2], fold), residuals.held_out(edge, fold[:1]).repeat(2, 0)
    )


def test_rows_of_a_fold_do_not_change_their_own_location(located):
    x, y, weights, folds, _ = located
    sides = (
        FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), x[:12]), ("a", "b")),
        FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), y[:5]), ("c", "d")),
    )
    other = y + 100.0 * (folds == 2)[:, None]
    moments = strip_moments(MomentReduction(sides, N_FOLDS), (x, other), weights, folds)
    ridges = [1e-2]
    again = fit_mean_function(moments, sides[0].basis, slice(0, 2), ridges=ridges)
    moments = strip_moments(MomentReduction(sides, N_FOLDS), (x, y), weights, folds)
    before = fit_mean_function(moments, sides[0].basis, slice(0, 2), ridges=ridges)
    moved = np.abs(again.residuals.held_out(x, folds) - before.residuals.held_out(x, folds))
    assert moved[folds == 2].max() < 1e-8
    assert moved[folds != 2].min() > 1.0


@pytest.mark.parametrize("by", ["rows", "group", "part"])
def test_the_pass_sees_the_residuals_that_are_made_by_hand(tmp_path, located, by):
    """Also of rows by group, of which a part is held out; strips of any storage chunks."""
    x, y, weights, _, found = located
    groups = np.arange(600) // 7 * 1.0
    sample = open_sample(x, y, weights=weights, group=groups)
    if by != "rows":
        sample = sample.fold_by("group")
    if by == "part":
        sample, _ = sample.split(0.3)
    residuals = found.residuals
    executor = RunOptions("synchronous").executor()
    rows, _ = sample_rows(sample, 600, 0, executor)
    moved = sample.with_residuals(residuals, rows)
    index = np.sort(rows.index)
    folds = sample.folding.folds(index, {"group": groups[index]}, N_FOLDS)
    e = y[index] - residuals.held_out(x[index], folds)
    order = np.argsort(rows.index)
    np.testing.assert_allclose(moved.row_sample.parts[1][order], e, atol=1e-12)
    sides = (
        FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), x[:9]), ("a", "b")),
        FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), e[:9]), ("c", "d")),
    )
    spec = MomentReduction(sides, N_FOLDS)
    expected = strip_moments(spec, (x[index], e), weights[index], folds)
    (seen,), _ = run_pass(moved, [spec], executor)
    np.testing.assert_array_equal(seen.rows, expected.rows)
    np.testing.assert_allclose(seen.gram, expected.gram, rtol=1e-9, atol=1e-9)


def quick(**parameters):
    given = {"kernel_x": "median", "kernel_y": "median", "tol": 1e-2, "support_size": 50}
    return JointDistribution(**{**given, "residual": True, **parameters})


@pytest.fixture(scope="module")
def plain_rows():
    """Rows of three strips, and what a fit of the arrays in memory stores."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9000, 2))
    y = x[:, :1] ** 2 + rng.normal(size=(9000, 1))
    return x, y, quick(n_folds=3).fit(x, y, scheduler="synchronous").model_.to_state().arrays


@settings(max_examples=5)
@given(chunk=st.integers(100, 5000), scheduler=st.sampled_from(["threads", "synchronous"]))
def test_no_chunking_or_scheduler_changes_a_bit(plain_rows, chunk, scheduler):
    x, y, expected = plain_rows
    rows = da.from_array(x, chunks=(chunk, 2)), da.from_array(y, chunks=(chunk, 1))
    found = quick(n_folds=3).fit(*rows, scheduler=scheduler).model_.to_state().arrays
    assert found.keys() == expected.keys()
    assert any(name.startswith("residual_model_") for name in found)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_exactly_one_more_pass_reads_the_store(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 1))
    write_store(tmp_path / "s", x, np.sin(2 * x) + 0.3 * rng.normal(size=x.shape), chunk_rows=4096)
    for wanted, passes in ((True, 2), (False, 1)):
        store, group = opened(tmp_path / "s")
        fit = quick(residual=wanted).fit(group, scheduler="synchronous")
        assert fit.n_passes_ == passes == fit.model_.about["passes"]
        for name in ("x", "y"):
            assert set(store.chunks(name).values()) == {passes}
        assert set(store.chunks("row_sample/y").values()) == {1}


@pytest.mark.parametrize(
    ("name", "kept", "transform"),
    [("bimodal", False, "raw"), ("skewed", True, "normal scores")],
)
def test_it_is_kept_where_it_pays(name, kept, transform):
    x, y = SCENARIOS[name].draw(1000, 0)
    fit = JointDistribution(tuning=QUICK, random_state=0).fit(x, y, scheduler="synchronous")
    about = fit.model_.about["residual"]
    assert about["kept"] == kept == (fit.model_.residual is not None)
    assert fit.n_passes_ == 1 + kept
    assert about["transform"] == transform
    if kept:
        plain, moved = about["crps"]
        np.testing.assert_allclose(about["gain"], plain - moved, rtol=1e-9)
        assert about["gain"] > 0 < about["std"]
        assert "laws moved" in repr(fit.model_)
    else:
        assert about["decided"] == "location"


@pytest.mark.parametrize(("gain", "kept"), [(0.5, True), (-0.5, False)])
def test_a_gain_that_is_smaller_than_its_error_is_one(monkeypatch, gain, kept):
    made = Gain(1.0, 1.0 - gain, gain, 1.0, 300)
    monkeypatch.setattr(residual, "paired_gain", lambda *_: made)
    fit = JointDistribution(tuning=QUICK).fit(*smooth_rows())
    assert fit.model_.about["residual"]["kept"] == kept == (fit.model_.residual is not None)


def test_what_a_model_finds_without_it_stays_as_it_is():
    """The second pass changes nothing of the base model but its laws."""
    x, y = SCENARIOS["skewed"].draw(400, 0)
    fits = [
        JointDistribution(tuning=QUICK, residual=wanted, random_state=0).fit(x, y)
        for wanted in (True, False)
    ]
    np.testing.assert_allclose(fits[0].expect("y0", x), fits[1].expect("y0", x), atol=1e-9)
    np.testing.assert_allclose(fits[0].weights(x[:9]), fits[1].weights(x[:9]), atol=1e-9)
    given = [fit.conditional(Y=y[:5]).mean() for fit in fits]
    np.testing.assert_allclose(*given, atol=1e-9)


@pytest.mark.parametrize("pays", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_table_much_larger_than_its_row_sample_is_screened_first(monkeypatch, pays):
    """No second pass is made where refits on the row sample gain nothing."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, size=(9000, 1))
    # Of two branches the middle says little, though it explains some of the variance.
    branches = rng.choice([-1.0, 1.0], size=x.shape) * (1 + x) + 0.2 * x
    y = (4 * x if pays else branches) + 0.1 * rng.normal(size=x.shape)
    sums = []
    first_pass = tuned.MomentSets
    monkeypatch.setattr(
        tuned, "MomentSets", lambda sets: sums.append(len(sets)) or first_pass(sets)
    )
    fit = JointDistribution(sample_size=1500, support_size=100, tuning=QUICK)
    plan, events = fit.plan(x, y), []
    fit.fit(x, y, progress=events.append)
    about = fit.model_.about["residual"]
    assert about["decided"] == ("all rows" if pays else "row sample")
    assert about["kept"] == pays
    assert fit.n_passes_ == 1 + pays
    # It is known before the first pass, by the plan and by the progress.
    assert plan.passes == fit.n_passes_
    # Without it, the pass makes the moments of the law alone.
    assert sums[0] == 1 + pays
    assert plan.residual is pays
    assert (plan.residual_seconds[0] > 0.0) == pays == ("location model" in plan.parts)
    assert plan.parts["trial of a location model"] > 0.0
    np.testing.assert_allclose(plan.memory.predicted, fit.report_.memory.predicted, rtol=0.05)
    names = list(dict.fromkeys(event.name for event in events))
    first = names.index("pass over the rows")
    assert names.index("search for kernels of residuals") < names.index("pivots") < first
    assert ("pass over the residuals" in names[first:]) == pays


def smooth_rows(n=300):
    rng = np.random.default_rng(2)
    x = rng.uniform(-2.0, 2.0, size=(n, 1))
    return x, np.sin(2.0 * x) + 0.2 * rng.normal(size=(n, 1))


def state_of(fit):
    state = fit.model_.to_state()
    return {name: values.tobytes() for name, values in state.arrays.items()}


@pytest.fixture(scope="module")
def found_beside():
    """What a fit stores whose second search was made beside the solution."""
    law = JointDistribution(tuning=QUICK, max_rank=30)
    return state_of(law.fit(*smooth_rows(), workers=2))


def test_the_second_search_gives_the_same_bits_beside_the_solution_and_after_it(
    monkeypatch, found_beside
):
    """Without another core, or memory for both at once, one follows the other."""
    begun = []
    make = residual._SecondAhead._make
    monkeypatch.setattr(
        residual._SecondAhead, "_make", lambda self, *of: begun.append(1) or make(self, *of)
    )
    fits, events = [], []
    for workers in (2, 1):
        reported, threads = [], set()

        def progress(event, reported=reported, threads=threads):
            reported.append(event.name)
            threads.add(threading.current_thread())

        law = JointDistribution(tuning=QUICK, max_rank=30)
        fits.append(law.fit(*smooth_rows(), workers=workers, progress=progress))
        events.append(reported)
        assert threads == {threading.main_thread()}
    monkeypatch.setattr(residual, "_beside", lambda *_: None)
    fits.append(JointDistribution(tuning=QUICK, max_rank=30).fit(*smooth_rows(), workers=2))
    assert len(begun) == 1
    assert fits[0].model_.residual is not None
    assert all(state == found_beside for state in map(state_of, fits))
    assert list(dict.fromkeys(events[0])) == list(dict.fromkeys(events[1]))
    counts = [each.count("search for kernels of residuals") for each in events]
    assert counts[0] == counts[1] > 1


def jumping_rows(n=400):
    """A location of trees."""
    rng = np.random.default_rng(3)
    x = rng.uniform(0.0, 1.0, size=(n, 4))
    return x, 2.0 * (x[:, :1] > 0.3) + 0.1 * rng.normal(size=(n, 1))


WITH_TREES = Tuning(rows=500, max_rank=40, evaluations=0, trees=("shallow",))


def outlook(monkeypatch, promising=False):
    """Trees are compared, whether they promise to be better or not."""
    monkeypatch.setattr(TreeSearch, "outlook", lambda *_: (True, promising))


@pytest.mark.parametrize("trees", [False, True])
def test_the_second_search_gives_the_same_bits_beside_trials_of_trees(monkeypatch, trees):
    """Trees that promise to be better are waited for."""
    begun, make = [], residual._SecondAhead._make
    monkeypatch.setattr(residual._SecondAhead, "_make", lambda *of: begun.append(1) or make(*of))
    rows, fits = jumping_rows() if trees else smooth_rows(), []
    for workers, promising, early in ((2, False, True), (2, True, False), (1, False, False)):
        outlook(monkeypatch, promising)
        begun.clear()
        law = JointDistribution(tuning=WITH_TREES, max_rank=30, residual=True)
        fits.append(law.fit(*rows, workers=workers))
        assert len(begun) == (workers == 2 and (early or not trees))
    assert isinstance(fits[0].model_.residual.location, TreeMean) == trees
    first, *others = map(state_of, fits)
    assert all(other == first for other in others)


def test_the_second_search_ends_where_trees_are_taken(monkeypatch):
    begun, ended, before = threading.Event(), [], set(threading.enumerate())
    search, better = residual._second_context, TreeSearch.better

    def endless(fit, context, residuals, over=None):
        if over is None:
            return search(fit, context, residuals)
        begun.set()
        for _ in range(3000):
            if over():
                ended.append(threading.current_thread())
                raise Over
            time.sleep(0.01)
        return None

    def later(*of):
        assert begun.wait(30.0)
        return better(*of)

    outlook(monkeypatch)
    monkeypatch.setattr(residual, "_second_context", endless)
    monkeypatch.setattr(TreeSearch, "better", later)
    law = JointDistribution(tuning=WITH_TREES, max_rank=30, residual=True)
    law.fit(*jumping_rows(), workers=2)
    assert len(ended) == 1
    assert ended[0] is not threading.main_thread()
    assert isinstance(law.model_.residual.location, TreeMean)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_fit_with_a_checkpoint_begins_no_search_that_it_may_not_need(
    monkeypatch, tmp_path, checkpoint
):
    """Searches have numbers there, by which another start finds them."""
    steps, make, fit = [], residual._SecondAhead._make, residual._plain_fit
    outlook(monkeypatch)
    monkeypatch.setattr(
        residual._SecondAhead, "_make", lambda *of: steps.append("search") or make(*of)
    )
    monkeypatch.setattr(residual, "_plain_fit", lambda *of: steps.append("fit") or fit(*of))
    where = {"checkpoint": tmp_path / "run"} if checkpoint else {}
    JointDistribution(tuning=WITH_TREES, max_rank=30).fit(*smooth_rows(), workers=2, **where)
    assert steps[:2] == (["fit", "search"] if checkpoint else ["search", "fit"])


def test_a_ridge_regression_before_the_pass_is_that_of_its_moments(monkeypatch):
    (x, y), fits, sets, summed = smooth_rows(), [], [], tuned.MomentSets
    outlook(monkeypatch)
    monkeypatch.setattr(tuned, "MomentSets", lambda each: sets.append(len(each)) or summed(each))
    for rows in (len(x), len(x) - 1):
        monkeypatch.setattr(locating, "_EARLY_ROWS", rows)
        fits.append(JointDistribution(tuning=WITH_TREES, max_rank=30).fit(x, y))
    # Its moments are no part of the pass; the second pass has those of the residuals alone.
    assert sets[0] == sets[2] - 1
    assert sets[1] == sets[3]
    one, two = (fit.model_.about["residual"] for fit in fits)
    assert one["ridge"] == two["ridge"]
    assert one["skill"] == pytest.approx(two["skill"], rel=1e-9)
    means = [fit.conditional(x[:50]).mean() for fit in fits]
    np.testing.assert_allclose(*means, rtol=1e-6, atol=1e-9)


def test_a_location_whose_ridge_smooths_has_a_smaller_basis(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(420, 4))
    y = x @ np.array([[1.0], [0.5], [0.2], [0.1]]) + 0.5 * rng.normal(size=(420, 1))
    fits = []
    for smoothing in (context_module._SMOOTHING, np.inf):
        monkeypatch.setattr(context_module, "_SMOOTHING", smoothing)
        fits.append(JointDistribution(tuning=QUICK, residual=True).fit(x, y))
    few, many = (len(fit.model_.residual.location.points) for fit in fits)
    assert few == 140 < many
    one, two = (fit.model_.about["residual"]["skill"] for fit in fits)
    assert one == pytest.approx(two, rel=0.01)


@pytest.mark.parametrize("workers", [1, 2])
def test_pivots_of_an_early_ridge_regression_are_reported_before_the_pass(monkeypatch, workers):
    outlook(monkeypatch)
    events = []
    law = JointDistribution(tuning=WITH_TREES, max_rank=30)
    law.fit(*smooth_rows(), workers=workers, progress=events.append)
    names = [event.name for event in events]
    reports = [event for event in events if isinstance(event.detail, PivotProgress)]
    first = [each.name for each in reports].index("pivots")
    assert "x" in reports[first].detail.variable
    assert names.index("pivots") < names.index("pass over the rows")


def test_the_plan_of_a_fit_counts_a_second_search_beside_trees(monkeypatch):
    outlook(monkeypatch)
    tuning = Tuning(rows=500, evaluations=0, trees=("shallow",))
    law, rows = JointDistribution(tuning=tuning, max_rank=30), smooth_rows()
    plan = law.plan(*rows, workers=2)
    assert plan.memory.predicted == law.fit(*rows, workers=2).report_.memory.predicted


def test_an_error_in_the_solution_ends_the_search_beside_it():
    class Enough(Exception):
        pass

    def progress(event):
        if event.name == "solution":
            raise Enough

    before = set(threading.enumerate())
    with pytest.raises(Enough):
        JointDistribution(tuning=QUICK, max_rank=30).fit(
            *smooth_rows(), workers=2, progress=progress
        )
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("error", [DataError, MemoryError])
@pytest.mark.parametrize("times", [1, 2])
def test_a_search_that_fails_beside_the_solution_is_made_after_it(
    monkeypatch, found_beside, error, times
):
    search, failures = residual.search_kernels, []

    def failing(*arguments, **keywords):
        if len(failures) < times:
            failures.append(1)
            raise error("nothing can be found")
        return search(*arguments, **keywords)

    law = JointDistribution(tuning=QUICK, max_rank=30)
    monkeypatch.setattr(residual, "search_kernels", failing)
    if times == 1:
        assert state_of(law.fit(*smooth_rows(), workers=2)) == found_beside
        assert failures == [1]
        return
    with pytest.raises(error, match="nothing can be found"):
        law.fit(*smooth_rows(), workers=2)


def test_a_search_of_residuals_without_gradients_refines_more(monkeypatch):
    """A search without derivatives needs more trials than there are length scales."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 8))
    y = x[:, :1] + (0.1 + 0.5 * (x[:, 1:2] > 0)) * rng.normal(size=(300, 1))
    found, search = [], tuned.search_joint

    def searched(*rows, **options):
        found.append(search(*rows, **options))
        return found[-1]

    monkeypatch.setattr(tuned, "search_joint", searched)
    options = {"residual": True, "calibration": False, "max_rank": 20, "support_size": 30}
    tuning = Tuning(rows=300, max_rank=20, trees=())
    JointDistribution(reg_form="single", tuning=tuning, **options).fit(x, y)
    assert len(found) == 2
    assert sum(trial.stage == "refine" for trial in found[1].trials) > 10


def test_averages_of_residuals_are_of_three_at_most():
    tuning = Tuning(rows=200, max_rank=20, evaluations=0, averaged=4, trees=())
    fit = JointDistribution(tuning=tuning, residual=True).fit(*smooth_rows())
    assert len(fit.model_.residual.model.x.ranks) <= 3


def test_kernels_that_are_given_are_what_is_fitted():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 1))
    fit = quick(residual="auto").fit(x, 3 * x + rng.normal(size=x.shape))
    assert fit.n_passes_ == 1
    assert fit.model_.residual is None


def test_columns_of_zeros_count_nothing_in_the_decision():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(150, 1))
    y = np.sin(2 * x) + 0.4 * rng.normal(size=(150, 1))
    options = {"kernel_x": "median", "kernel_y": "median", "tol": 1e-2, "residual": True}
    with pytest.warns(ConstantColumnWarning):
        both = JointDistribution(**options).fit(x, np.hstack([y, 0.0 * y])).model_
    assert np.isfinite(both.about["residual"]["crps"]).all()
    assert both.about["residual"]["gain"] > 0.0


def test_figures_of_the_decision_are_those_of_refits_by_hand():
    """Single rows as cells; dense refits without each fold, with the same pivots."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(150, 1))
    y = np.column_stack([np.sin(2 * x[:, 0]), x[:, 0]]) + 0.4 * rng.normal(size=(150, 2))
    fit = JointDistribution(
        kernel_x=kernels.Gaussian(1.0),
        kernel_y=kernels.Gaussian(2.0),
        tol=1e-2,
        reg=(1e-3, 1e-2),
        n_folds=3,
        residual=True,
        support="bounded",
    ).fit(x, y, scheduler="synchronous")
    folds = open_sample(x, y).folding.folds(np.arange(150), {}, 3)
    model, inner = fit.model_, fit.model_.residual.model
    deviation = y.std(axis=0)
    side = NewtonBasis(model.x.basis.newton.kernel, model.x.basis.newton.points, np.eye(1))
    held_out = np.empty_like(y)
    ridges = model.about["residual"]["ridge"]
    low, high = x.min(axis=0), x.max(axis=0)
    for fold in range(3):
        held = folds == fold
        newton = oracle_joint.newton(side.kernel, x[held], side.points)
        for j, ridge in enumerate(ridges):
            constant, slope = dense(
                x[~held], y[~held, j], np.ones((~held).sum()), side.points, ridge
            )
            features = np.column_stack([newton, np.clip(x[held], low, high)])
            held_out[held, j] = constant + features @ slope
    e = y - held_out
    plain, moved = np.empty(150), np.empty(150)
    for fold in range(3):
        held = folds == fold
        for one, values, scores in ((model, y, plain), (inner, e, moved)):
            bases = one.x.basis.newton, one.y.basis.newton
            means = oracle_joint.means(
                bases[0].kernel,
                bases[1].kernel,
                x[~held],
                values[~held],
                bases[0].points,
                bases[1].points,
            )
            h = oracle_joint.coefficients(means, "normalized", (1e-3, 1e-2), "two-sided")
            left, right = (
                oracle_joint.newton(b.kernel, z, b.points)
                for b, z in zip(bases, (x[held], values[~held]), strict=True)
            )
            weights = nearest_laws(oracle_joint.density_ratio(left, right, h))
            for i, w in zip(np.flatnonzero(held), weights, strict=True):
                atoms = values[~held] + (0.0 if one is model else held_out[i])
                atoms = np.clip(atoms, y.min(axis=0), y.max(axis=0))  # what y can be
                scores[i] = slow_crps(w, atoms / deviation, y[i] / deviation)
    about = model.about["residual"]
    np.testing.assert_allclose(about["crps"], [plain.mean(), moved.mean()], rtol=1e-6)
    difference = plain - moved
    np.testing.assert_allclose(about["gain"], difference.mean(), atol=1e-7)
    np.testing.assert_allclose(about["std"], difference.std(ddof=1) / np.sqrt(150), rtol=1e-4)


def nearest_laws(ratio):
    """Projection of each row onto laws on equal masses: threshold by bisection."""
    laws = []
    for row in ratio:
        low, high = row.min() - 2.0, row.max()
        for _ in range(200):
            t = (low + high) / 2
            low, high = (t, high) if np.maximum(row - t, 0).mean() > 1 else (low, t)
        laws.append(np.maximum(row - low, 0) / len(row))
    return [law / law.sum() for law in laws]


def slow_crps(w, atoms, y):
    """By its double sum, mean over the columns."""
    pairs = np.abs(atoms[:, None] - atoms[None])
    each = w @ np.abs(atoms - y) - 0.5 * np.einsum("s,t,std->d", w, w, pairs)
    return each.mean()


def test_crps_takes_atoms_of_each_law():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(30), size=20)
    atoms, y = rng.normal(size=(20, 30, 2)), rng.normal(size=(20, 2))
    expected = [slow_crps(*each) for each in zip(weights, atoms, y, strict=True)]
    np.testing.assert_allclose(crps(weights, atoms, y), expected, rtol=1e-12)
    with pytest.raises(DataError, match="crps takes weights"):
        crps(weights, atoms[:19], y)


def test_screened_laws_are_refits_on_the_other_rows():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(120, 1))
    y = x + 0.5 * rng.normal(size=x.shape)
    folds = rng.integers(0, 3, 120)
    kernel, reg = kernels.Gaussian(1.0), Regularization(1e-3, 1e-2)
    order = np.argsort(folds, kind="stable")
    few = order[np.linspace(0, 119, 64).astype(int)]
    pivots = [
        z[few][oracle_joint.pivoted_cholesky(kernel(z[few], z[few]), 1e-9, 5)[0]] for z in (x, y)
    ]
    weights = np.full(120, 1 / 120)
    seen = []
    for law in screened_laws((kernel, kernel), reg, (x, y), weights, folds, 1e-9, 5):
        assert len(set(folds[law.held])) == 1
        rest = order[np.isin(order, law.held, invert=True)]
        np.testing.assert_array_equal(law.atoms, y[rest])
        means = oracle_joint.means(kernel, kernel, x[rest], y[rest], *pivots)
        h = oracle_joint.coefficients(means, "normalized", (1e-3, 1e-2), "two-sided")
        left = oracle_joint.newton(kernel, x[law.held], pivots[0])
        right = oracle_joint.newton(kernel, y[rest], pivots[1])
        ratio, masses = (
            oracle_joint.density_ratio(left, right, h),
            np.full(len(rest), 1 / len(rest)),
        )
        np.testing.assert_allclose(law.weights, oracle_law.project(ratio, masses), atol=1e-8)
        seen.extend(law.held)
    assert sorted(seen) == list(range(120))


def test_standard_errors_know_units():
    rng = np.random.default_rng(0)
    plain, moved = rng.normal(size=(2, 400))
    units = np.arange(400)
    found = paired_gain(plain, moved, np.ones(400), units)
    np.testing.assert_allclose(found.std, (plain - moved).std(ddof=1) / 20, rtol=1e-12)
    # Rows that come four times are one: the same error as without the copies.
    four = paired_gain(
        *(np.repeat(v, 4) for v in (plain, moved)), np.ones(1600), np.repeat(units, 4)
    )
    np.testing.assert_allclose(four.std, found.std, rtol=1e-12)
    assert not paired_gain(plain, plain, np.ones(400), units).pays
    assert not paired_gain(plain, moved, np.ones(400), 0 * units).pays
    # A second pass takes two standard errors, and 1 % of the CRPS.
    for errors, std, pays, repays in (
        (0.5, 0.1, False, False),
        (1.5, 0.1, True, False),
        (2.5, 0.1, True, True),
        (9.0, 0.001, True, False),
        (11.0, 0.001, True, True),
    ):
        gain = Gain(1.0, 1.0 - errors * std, errors * std, std, 400)
        assert (gain.pays, gain.repays_a_pass) == (pays, repays)


@settings(max_examples=50)
@given(st.data())
def test_transforms_have_inverses_and_slopes(data):
    numbers = st.lists(st.integers(-1000, 1000), min_size=2, max_size=9, unique=True).map(sorted)
    values = np.array(data.draw(numbers)) / 7.0
    scores = (
        np.sort(
            data.draw(
                st.lists(
                    st.integers(-300, 300), min_size=len(values), max_size=len(values), unique=True
                )
            )
        )
        / 100.0
    )
    shift, scale = data.draw(st.floats(-1e3, 1e3)), data.draw(st.floats(1e-3, 1e3))
    there = Transform((Scores(tuple(values), tuple(scores)), Standard(shift, scale)))
    rows = np.random.default_rng(0).uniform(-300, 300, size=(50, 2))
    back = there.inverse()(there(rows))
    np.testing.assert_allclose(back, rows, atol=1e-6)
    step = 1e-6
    inside = np.abs(rows[:, :1] - values).min(axis=1) > 2 * step  # off the knots
    numeric = (there(rows + step) - there(rows - step)) / (2 * step)
    np.testing.assert_allclose(there.slope(rows)[inside], numeric[inside], rtol=1e-4, atol=1e-6)


def test_pooled_levels_have_no_inverse():
    pooled = Transform((PoolRare((0.0, 1.0)),))
    with pytest.raises(DataError, match="no inverse"):
        pooled.inverse()
    with pytest.raises(DataError, match="no slope"):
        pooled.slope(np.zeros((2, 1)))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"residual": "yes"}, "residual must be one of auto, True, False, got 'yes'"),
        ({"residual": 1}, "residual must be one of auto, True, False, got 1"),
        ({"constraint": "coupling"}, "residual=True needs constraint='none' or 'normalized'"),
        ({"n_folds": 1}, "residual=True needs n_folds of at least 2, got 1"),
        ({"support_size": 0}, "residual=True needs laws, got support_size=0"),
    ],
)
def test_what_it_needs_is_told(parameters, message):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 1))
    with pytest.raises(DataError, match=message):
        quick(**parameters).fit(x, x + rng.normal(size=x.shape))


@pytest.mark.parametrize("how", ["fit", "plan"])
@pytest.mark.parametrize(
    "choice",
    [
        {"residual": True},
        {"calibration": True},
        {"conformal": True},
        {"conformal_by": "station"},
        {"location": "x"},
        {"location": LinearRegression()},
    ],
    ids=str,
)
def test_choices_that_need_held_out_rows_are_refused_where_one_fold_has_all(choice, how):
    pandas = pytest.importorskip("pandas")
    x = np.random.default_rng(0).normal(size=(60, 1))
    table, zero = pandas.DataFrame({"x": x[:, 0], "station": ["a", "b"] * 30}), np.zeros(60)
    fit = JointDistribution(kernel_x="median", kernel_y="median", tol=0.1, n_folds=2, **choice)
    name = next(iter(choice)).replace("_", ".")
    for by, column in (("group", {"group": zero}), ("7d", {"time": zero})):
        rows = open_sample(table, x, **column).fold_by(by)
        with pytest.raises(DataError, match=rf"{name}.* needs .*two folds.*fold_by '{by}'"):
            getattr(fit, how)(rows)
    folds = open_sample(table, x).folding.folds(np.arange(60), {}, 2)
    with pytest.raises(DataError, match=rf"{name}.* needs .*two folds, and all are in one: "):
        getattr(fit, how)(table, x, weights=(folds == 1) * 1.0)


def test_labels_have_no_location():
    pandas = pytest.importorskip("pandas")
    x = np.random.default_rng(0).normal(size=(200, 1))
    y = pandas.DataFrame({"kind": np.where(x[:, 0] > 0, "up", "down")})
    with pytest.raises(DataError, match=r"needs numeric columns of y, got labels in 'kind'"):
        quick().fit(x, y)
    assert quick(residual="auto").fit(x, y).model_.residual is None


@pytest.mark.parametrize("how", ["two values", "one fold of weight"])
def test_auto_leaves_alone_what_it_can_not_judge(how):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 1))
    y, weights = x + rng.normal(size=x.shape), None
    if how == "two values":
        y = (y > 0.0) * 1.0
    else:
        folds = open_sample(x, y).folding.folds(np.arange(300), {}, 2)
        weights = (folds == 1) * 1.0
    parameters = {"kernel_x": None, "kernel_y": None, "tuning": QUICK, "n_folds": 2}
    fit = quick(residual="auto", **parameters).fit(x, y, weights=weights)
    assert fit.n_passes_ == 1
    assert "residual" not in fit.model_.about


@pytest.fixture(scope="module")
def kept():
    """A model with a reference in normal scores, and one in raw units."""
    x, y = SCENARIOS["skewed"].draw(400, 0)
    scored = JointDistribution(tuning=QUICK, residual=True, random_state=0).fit(x, y).model_
    raw = quick(support="bounded").fit(x, y).model_
    assert scored.residual.transform is not None
    assert raw.residual.transform is None
    return scored, raw


@pytest.mark.parametrize("which", [0, 1])
def test_files_bring_everything_back(tmp_path, kept, which):
    model = kept[which]
    model.save(tmp_path / "m")
    back = load(tmp_path / "m")
    x = np.linspace(-6, 6, 40)[:, None]
    np.testing.assert_array_equal(back.residual.location(x), model.residual.location(x))
    for asked in ("mean", "std", "median"):
        answers = [getattr(m.conditional(x), asked)() for m in (model, back)]
        np.testing.assert_array_equal(*answers)
    y = np.linspace(0.1, 9, 20)[:, None]
    np.testing.assert_allclose(model.residual.undo(model.residual.forward(y)), y, rtol=1e-12)
    assert repr(back) == repr(model)


def test_files_hold_the_texts_of_declared_events(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 1))
    y = np.sin(2.0 * x) + 0.1 * rng.normal(size=x.shape)
    given = {"kernel_x": kernels.Gaussian(1.0), "kernel_y": kernels.Gaussian(1.0), "tol": 1e-2}
    functions = {"high": "y0 > 0.5", "square": lambda rows: rows[:, 0] ** 2}
    fit = JointDistribution(**given, residual=True).fit(x, y, functions=functions)
    assert fit.model_.about["events"] == {"x": {}, "y": {"high": "y0 > 0.5"}}
    fit.save(tmp_path / "m")
    law, saved = fit.conditional(x[:5]), load(tmp_path / "m")
    back = saved.conditional(x[:5])
    for query in ("expect", "probability"):
        chance = getattr(law, query)("high")
        np.testing.assert_array_equal(getattr(back, query)("high"), chance)
    np.testing.assert_array_equal(law.probability("y0 > 0.5"), chance)
    assert chance.max() > 0.0
    with pytest.raises(DataError, match=r"need the declared function 'square' itself.*give it"):
        back.expect("square")
    again = saved.conditional(x[:5], functions={"square": functions["square"]})
    np.testing.assert_array_equal(again.expect("square"), law.expect("square"))
    state = fit.model_.to_state()
    state.description["about"]["events"]["y"]["high"] = 3
    with pytest.raises(StoreError, match="events"):
        JointModel.from_state(state)


def test_files_of_earlier_versions_name_no_kind_of_location_and_no_values(tmp_path):
    x, y = SCENARIOS["skewed"].draw(300, 0)
    model = quick(support="bounded").fit(x, y).model_
    state = model.to_state()
    described = state.description["residual"]
    assert described["location"].pop("type") == "MeanFunction"
    del described["values"]
    back = JointModel.from_state(state)
    assert back.residual.values is None
    asked = np.linspace(-3, 3, 20)[:, None]
    for answer in ("mean", "std", "median"):
        each = [getattr(m.conditional(asked), answer)() for m in (model, back)]
        np.testing.assert_array_equal(*each)


def test_laws_are_atoms_moved_to_the_location(kept):
    for model in kept:
        x = np.linspace(-2, 2, 7)[:, None]
        reference = model.residual
        weights = reference.model.weights(x)
        z = reference.location(x)[:, None] + reference.model.y.cells.means
        atoms = reference.undo(z.reshape(-1, 1)).reshape(7, -1)
        y = SCENARIOS["skewed"].draw(400, 0)[1]
        atoms = np.clip(atoms, y.min(), y.max())  # what y can be
        law = model.conditional(x)
        np.testing.assert_allclose(law.mean(), (weights * atoms).sum(axis=1), rtol=1e-10)
        below = (weights * (atoms <= 1.5)).sum(axis=1)
        np.testing.assert_allclose(law.cdf(1.5), below, atol=1e-12)


DAMAGE = {
    "no description": lambda about, arrays: about.update(residual=3),
    "no kernel": lambda about, arrays: about["residual"]["location"].pop("kernel"),
    "another kernel": lambda about, arrays: about["residual"]["location"].update(
        kernel=kernels.Gaussian((1.0, 2.0)).to_dict()
    ),
    "no model": lambda about, arrays: about["residual"].update(model=None),
    "nested": lambda about, arrays: about["residual"]["model"].update(residual={}),
    "transform": lambda about, arrays: about["residual"].update(transform={"columns": 3}),
    "pooled": lambda about, arrays: about["residual"].update(
        transform=Transform((PoolRare((0.0,)),)).to_dict()
    ),
    "two transforms": lambda about, arrays: about["residual"].update(
        transform=Transform((Standard(0.0, 1.0),) * 2).to_dict()
    ),
    "missing points": lambda about, arrays: arrays.pop("residual_location_points"),
    "wide constant": lambda about, arrays: arrays.update(residual_location_constant=np.zeros(2)),
    "short coef": lambda about, arrays: arrays.update(residual_location_coef=np.zeros((1, 1))),
    "nan": lambda about, arrays: arrays["residual_location_coef"].fill(np.nan),
    "no inner coef": lambda about, arrays: arrays.pop("residual_model_coef"),
    "no rows": lambda about, arrays: about["residual"]["model"]["about"].pop("rows"),
    "negative rows": lambda about, arrays: about["residual"]["model"]["about"].update(rows=-1),
    "no errors": lambda about, arrays: about["about"].update(held_out={"x": None}),
    "texts as errors": lambda about, arrays: about["residual"]["model"]["about"].update(
        held_out={"x": {"y0": {"error": "0.5"}}}
    ),
    "calibration": lambda about, arrays: about["about"].update(
        calibration={"kept": True, "exponents": [1.0]}
    ),
    "other columns": lambda about, arrays: about["residual"]["model"].update(
        y=about["y"] | {"columns": {"names": ["a"], "categories": {"a": ["u"]}}}
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(kept, damage):
    state = kept[0].to_state()
    about, arrays = copy.deepcopy(state.description), copy.deepcopy(state.arrays)
    JointModel.from_state(ModelState(state.type, copy.deepcopy(about), dict(arrays)))
    DAMAGE[damage](about, arrays)
    with pytest.raises((StoreError, DataError)) as told:
        JointModel.from_state(ModelState(state.type, about, arrays))
    assert len(str(told.value)) > 30


def test_a_column_that_is_constant_without_one_fold_has_no_trend_there():
    """Rounding is no trend: one row that differs would decide about all others."""
    n = 1700
    x, rare = np.random.default_rng(n).normal(size=n), np.zeros(n)
    rare[566] = 1.0
    y = 3 * np.sin(2 * x)[:, None] + 0.3 * np.random.default_rng(n + 1).normal(size=(n, 1))
    options = {"kernel_y": kernels.Gaussian(0.5), "tol": 1e-4, "reg": 1e-5, "residual": True}
    skills = []
    for rows, scale in ((x[:, None], 0.7), (np.column_stack([x, rare]), (0.7, 1.0))):
        fit = JointDistribution(kernel_x=kernels.Gaussian(scale), **options).fit(rows, y)
        skills.append(fit.model_.about["residual"]["skill"][0])
    assert skills[1] == pytest.approx(skills[0], abs=5e-3)


@pytest.mark.parametrize("constant", [101.325, 1e5 / 3, 273.15])
def test_constant_columns_of_y_have_no_skill(constant):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(600, 2))
    y = np.column_stack([np.full(600, constant), np.sin(x[:, 0]) + 0.3 * rng.normal(size=600)])
    folds = rng.integers(0, N_FOLDS, 600).astype(np.uint8)
    for scale in (0.7, 1.5, 5.0):
        sides = (
            FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(scale), x[:30]), ("a", "b")),
            FeatureBlock(
                NewtonBasis.from_points(kernels.Gaussian(1.0), y[:1]),
                ("c", "d"),
                shift=y.mean(axis=0),
            ),
        )
        moments = strip_moments(MomentReduction(sides, N_FOLDS), (x, y), np.ones(600), folds)
        skill = fit_mean_function(moments, sides[0].basis, slice(0, 2)).skill
        assert skill[0] == 0.0
        assert skill[1] > 0.4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unit", [1e-100, 1e100])
def test_ridges_have_no_units(unit):
    x = np.random.default_rng(0).normal(size=(200, 1))
    y = np.sin(2.0 * x) + 0.5 * np.random.default_rng(1).normal(size=(200, 1))
    folds = np.arange(200) % 5

    def chosen(y):
        sides = (
            FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(0.5), x[:40]), ("x",)),
            FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), y[:1]), ("y",)),
        )
        moments = strip_moments(MomentReduction(sides, 5), (x, y), np.ones(200), folds)
        return fit_mean_function(moments, sides[0].basis, slice(0, 1)).ridges

    np.testing.assert_array_equal(chosen(unit * y), chosen(y))
