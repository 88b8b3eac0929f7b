"""Regression trees as locations: arrays beside scikit-learn, cross-fits by hand, the choice."""

import copy
import pickle
import threading
import warnings
from contextlib import suppress
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from conftest import write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.ensemble import (
    ExtraTreesRegressor,
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.multioutput import MultiOutputRegressor
from sklearn.tree import DecisionTreeRegressor
from test_reads import opened

from cme_dask import JointDistribution, Tuning, load
from cme_dask.errors import DataError, StoreError
from cme_dask.learning import tree_fits, trees
from cme_dask.learning.tree_fits import KINDS, TrainingRows, tree_mean
from cme_dask.learning.trees import TreeSearch, cross_fitted, fitted_to_all
from cme_dask.models.joint import JointModel
from cme_dask.numerics.given_location import MixedMean
from cme_dask.numerics.scoring import column_deviations, law_error
from cme_dask.numerics.trees import Tree, TreeMean

BRIEF = {"rows": 500, "max_rank": 40, "evaluations": 0}
pytestmark = pytest.mark.usefixtures("least_searches")
BOOSTING = HistGradientBoostingRegressor(max_iter=8, min_samples_leaf=5, random_state=0)


def rows(n=300, d=3, q=1, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    y = np.stack([np.sign(x[:, j % d]) + 0.3 * rng.normal(size=n) for j in range(q)], axis=1)
    return x, y


def jump(n=600, seed=0):
    """One column, and a y that jumps twice."""
    rng = np.random.default_rng(seed)
    x = rng.random((n, 1))
    return x, 2.0 * ((x > 0.3) & (x < 0.7)) + 0.1 * rng.normal(size=(n, 1))


def training(x, y, weights=None, n_folds=10, seed=1):
    weights = np.ones(len(x)) if weights is None else weights
    folds = np.random.default_rng(seed).integers(0, n_folds, len(x))
    return TrainingRows(x, y, weights / weights.sum(), folds, n_folds, np.arange(len(x)), 0)


def weights_of(given, selected):
    """Of mean 1, to the last bit: they decide between splits that are equally good."""
    weights = given.weights[selected]
    return {"sample_weight": weights / weights.mean()}


@pytest.mark.parametrize("n", [50, 2000])
@pytest.mark.parametrize(
    ("regressor", "q"),
    [
        (DecisionTreeRegressor(random_state=0), 2),
        (RandomForestRegressor(5, random_state=0), 1),
        (ExtraTreesRegressor(5, random_state=0), 2),
        (GradientBoostingRegressor(n_estimators=5), 1),
        (BOOSTING, 1),
        (MultiOutputRegressor(BOOSTING), 2),
    ],
)
def test_arrays_predict_what_scikit_learn_does(regressor, q, n):
    x, y = rows(q=q)
    fitted = clone(regressor).fit(x, y[:, 0] if q == 1 else y)
    mean = tree_mean(fitted, (3, q), covariate=True)
    assert mean.widths == (3, q)
    mean._validate()
    asked = np.random.default_rng(2).normal(size=(n, 3))
    asked[:50] = x[:50]  # thresholds lie between rows
    expected = fitted.predict(asked).reshape(-1, q)
    np.testing.assert_allclose(mean(asked), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("q", [1, 2])
@pytest.mark.parametrize("size", [1, 7, 700, 2049])
def test_rows_have_the_same_numbers_in_blocks_of_any_size(size, q):
    """Rows have the same sums alone and among others."""
    x, y = rows(400, q=q)
    forest = ExtraTreesRegressor(60, min_samples_leaf=2, random_state=0)
    mean = tree_mean(forest.fit(x, y[:, 0] if q == 1 else y), (3, q), covariate=True)
    asked = np.random.default_rng(2).normal(size=(max(300, size), 3))
    many = np.tile(asked, (20, 1))[:5000]
    blocks = [mean.predicted(asked[start : start + size]) for start in range(0, 300, size)]
    for whole, parts in zip(mean.predicted(many), zip(*blocks, strict=True), strict=True):
        np.testing.assert_array_equal(whole[:300], np.vstack(parts)[:300])


def random_tree(rng, leaves, d, q):
    """Nodes that are split at random until there are so many leaves; thresholds repeat."""
    children, ends = [[-1, -1]], [0]
    while len(ends) < leaves:
        node = ends.pop(rng.integers(len(ends)))
        children[node] = [len(children), len(children) + 1]
        ends += children[node]
        children += [[-1, -1], [-1, -1]]
    count = len(children)
    values = rng.normal(size=(count, q))
    thresholds = rng.choice([-1.5, 0.0, 1e-9, 0.5, 0.7], count)
    return Tree(rng.integers(d, size=count), thresholds, np.array(children), values)


@settings(deadline=None, max_examples=30)
@given(
    leaves=st.lists(st.integers(1, 34), min_size=1, max_size=8),
    d=st.integers(1, 4),
    q=st.integers(1, 2),
    single=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_reach_the_leaf_that_a_loop_finds(leaves, d, q, single, seed):
    """Whether trees have so few leaves that these are found by masks, or not."""
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, count, d, q) for count in leaves]
    mean = TreeMean.of("trees", d, np.zeros(q), trees, single=single, covariate=False)
    mean._validate()
    assert (mean._masks is None) == (max(leaves) > 32)
    asked = rng.choice([-1.5, 0.0, 0.5, 0.7, 2.0, np.inf, -np.inf, np.nan], (512, d))
    asked[::2] += 1e-9 * rng.integers(-1, 2, size=(256, d))
    compared = asked.astype(np.float32) if single else asked
    expected = np.zeros((512, q))
    for tree in trees:
        for row, x in enumerate(compared):
            node = 0
            while tree.children[node, 0] >= 0:
                right = not x[tree.feature[node]] <= tree.threshold[node]
                node = tree.children[node, int(right)]
            expected[row] += tree.values[node]
    np.testing.assert_allclose(mean(asked), expected, rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(mean(asked[:5]), mean(asked)[:5])
    np.testing.assert_array_equal(mean(asked[7:8]), mean(asked)[7:8])


@pytest.mark.parametrize("leaves", [2, 12, 31])
def test_boosted_trees_have_the_same_numbers_in_blocks_of_any_size(leaves):
    """Few rows walk, more find their leaves by masks, many in several blocks."""
    x, y = rows(400, q=1)
    boosted = HistGradientBoostingRegressor(max_iter=40, max_leaf_nodes=leaves, min_samples_leaf=2)
    mean = tree_mean(boosted.fit(x, y[:, 0]), (3, 1), covariate=True)
    assert mean._masks is not None
    many = np.tile(np.random.default_rng(2).normal(size=(500, 3)), (20, 1))
    whole = mean(many)
    for size in (1, 200, 600, 5000):
        np.testing.assert_array_equal(mean(many[:size]), whole[:size])


def test_thresholds_of_a_column_that_are_more_than_a_byte_counts():
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, 8, 2, 1) for _ in range(100)]
    trees = [replace(tree, threshold=rng.normal(size=15)) for tree in trees]
    mean = TreeMean.of("trees", 2, np.zeros(1), trees, single=False, covariate=False)
    assert mean._masks.number.dtype == np.uint16
    asked = rng.normal(size=(600, 2))
    np.testing.assert_array_equal(mean(asked), np.vstack([mean(asked[:300]), mean(asked[300:])]))


def test_pickled_trees_hold_the_arrays_alone():
    x, y = rows(600)
    mean = tree_mean(clone(BOOSTING).fit(x, y[:, 0]), (3, 1), covariate=True)
    alone = len(pickle.dumps(mean))
    np.testing.assert_array_equal(mean(x[:9]), mean(x)[:9])
    assert {"_masks", "_ways"} < set(vars(mean))
    assert len(pickle.dumps(mean)) == alone
    np.testing.assert_array_equal(copy.deepcopy(mean)(x), mean(x))


@pytest.mark.parametrize(
    "children",
    [
        [[2, 3], [-1, -1], [-1, -1], [-1, -1]],  # a leaf that no row reaches
        [[1, 1], [-1, -1]],
        [[1, 2], [3, 4], [3, 4], [-1, -1], [-1, -1]],
        [[1, -1], [-1, -1]],
        [[1, 5], [-1, -1]],
    ],
)
def test_nodes_that_rows_reach_in_no_way_or_in_two_are_refused(children):
    children = np.array(children)
    count = len(children)
    tree = Tree(np.zeros(count, dtype=int), np.zeros(count), children, np.zeros((count, 1)))
    mean = TreeMean.of("trees", 1, np.zeros(1), [tree], single=False, covariate=False)
    with pytest.raises(DataError, match="its trees are no trees"):
        mean._validate()


@pytest.mark.parametrize("q", [1, 2])
@pytest.mark.parametrize("kind", [RandomForestRegressor, ExtraTreesRegressor])
def test_the_spread_of_a_forest_is_that_of_its_trees(kind, q):
    x, y = rows(q=q)
    y += 1e6
    forest = kind(7, min_samples_leaf=3, random_state=0).fit(x, y[:, 0] if q == 1 else y)
    mean = tree_mean(forest, (3, q), covariate=True)
    asked = np.random.default_rng(2).normal(size=(500, 3))
    each = np.stack([tree.predict(asked).reshape(-1, q) for tree in forest.estimators_])
    mu, covariates = mean.predicted(asked)
    assert mean.covariates == ("prediction", "spread")
    np.testing.assert_array_equal(mu, mean(asked))
    np.testing.assert_array_equal(covariates[:, :q], mu)
    np.testing.assert_allclose(covariates[:, q:], each.std(axis=0), atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e9])
def test_trees_that_agree_have_no_spread(offset):
    x, y = rows(200)
    y = np.round(y, 2) + offset
    forest = ExtraTreesRegressor(50, random_state=0).fit(x, y[:, 0])  # each row in a leaf
    _, covariates = tree_mean(forest, (3, 1), covariate=True).predicted(x)
    assert (covariates[:, 1] == 0.0).all()


class Derived(RandomForestRegressor):
    """A forest by another name."""


def test_forests_of_other_names_have_a_spread():
    x, y = rows()
    assert tree_mean(Derived(3).fit(x, y[:, 0]), (3, 1), covariate=True).covariates[1:]


@pytest.mark.parametrize("kind", ["boosting", "shallow", "forest"])
def test_units_of_y_change_no_trees(kind):
    x, y = jump(400)
    errors = []
    for offset, unit in ((0.0, 1.0), (1e8, 1.0), (0.0, 1e-9), (0.0, 1e9)):
        found = cross_fitted(kind, training(x, offset + unit * y))
        errors.append(law_error((found.predicted - offset) / unit, y, np.full(400, 1 / 400)))
    assert errors[0] < 0.3
    for error in errors[1:]:
        assert error == pytest.approx(errors[0], rel=0.05)


def test_columns_that_do_not_vary_are_left_out_of_errors():
    x, y = rows(400)
    steps = [cross_fitted("boosting", training(x, z)).steps for z in (y, np.hstack([y, 0.0 * y]))]
    assert steps[0] == steps[1] > 1


def test_trees_are_not_tried_where_they_cannot_compare_x():
    x, y = jump(200)
    other = TreeSearch(training(1e39 * x, y), ["shallow"]).better(1.0, lambda rows: 0.0 * rows.y)
    assert other is None


def test_the_spread_of_a_mixture_is_that_of_its_forests():
    x, y = rows(q=2)
    made = {}
    for name, one in (
        ("boosting", MultiOutputRegressor(BOOSTING)),
        ("forest", RandomForestRegressor(5, random_state=0)),
        ("other", ExtraTreesRegressor(5, min_samples_leaf=9, random_state=0)),
    ):
        made[name] = tree_mean(clone(one).fit(x, y), (3, 2), covariate=True)
    first, second = (made[name].predicted(x)[1][:, 2:] for name in ("forest", "other"))
    for known, joined, spread in (
        ("boosting", "forest", first),
        ("forest", "boosting", first),
        ("forest", "other", 0.3 * first + 0.7 * second),
        ("boosting", "boosting", np.zeros((300, 0))),
    ):
        mixed = MixedMean(made[known], made[joined], 0.3)
        mixed._validate()
        mu, covariates = mixed.predicted(x)
        assert covariates.shape[1] == 2 * len(mixed.covariates)
        np.testing.assert_array_equal(mu, mixed(x))
        np.testing.assert_allclose(mu, 0.3 * made[known](x) + 0.7 * made[joined](x), rtol=1e-14)
        np.testing.assert_array_equal(covariates, np.hstack([mu, spread]))
    silent = replace(made["forest"], covariate=False)
    mixed = MixedMean(silent, made["forest"], 0.3)
    assert (mixed.covariates, mixed.predicted(x)[1].shape) == ((), (300, 0))
    with pytest.raises(DataError, match="says nothing of the law of residuals"):
        MixedMean(made["forest"], silent, 0.3)._validate()


def test_laws_are_given_no_spread_of_other_trees():
    x, y = rows()
    for regressor in (BOOSTING, DecisionTreeRegressor(random_state=0)):
        mean = tree_mean(clone(regressor).fit(x, y[:, 0]), (3, 1), covariate=True)
        mu, covariates = mean.predicted(x)
        np.testing.assert_array_equal(covariates, mu)
        mean = tree_mean(clone(regressor).fit(x, y[:, 0]), (3, 1), covariate=False)
        assert mean.predicted(x)[1].shape == (300, 0)
    forest = RandomForestRegressor(5, random_state=0).fit(x, y[:, 0])
    mean = tree_mean(forest, (3, 1), covariate=False)
    assert mean.covariates == ()
    assert mean.predicted(x)[1].shape == (300, 0)


def test_other_regressors_are_no_trees():
    x, y = rows()
    of_counts = HistGradientBoostingRegressor(loss="poisson", max_iter=2)
    coded = HistGradientBoostingRegressor(categorical_features=[0], max_iter=2)
    codes = np.hstack([np.arange(300)[:, None] % 3.0, x[:, 1:]])
    for fitted in (of_counts.fit(x, np.exp(y[:, 0])), coded.fit(codes, y[:, 0])):
        assert tree_mean(fitted, (3, 1), covariate=True) is None


class AfterTree(RegressorMixin, BaseEstimator):
    """A small tree, and boosting of small trees of what it leaves."""

    def __init__(self, boosting):
        self.boosting = boosting

    def fit(self, x, y, sample_weight=None):
        tree = DecisionTreeRegressor(max_leaf_nodes=4, min_samples_leaf=10)
        self.tree_ = tree.fit(x, y, sample_weight)
        boosting = clone(self.boosting).set_params(max_leaf_nodes=4)
        self.boosting_ = boosting.fit(x, y - tree.predict(x), sample_weight)
        return self

    def predict(self, x):
        return self.tree_.predict(x) + self.boosting_.predict(x)


class InUnits(RegressorMixin, BaseEstimator):
    """A forest of the columns of y in standard deviations."""

    def __init__(self, forest):
        self.forest = forest

    def fit(self, x, y, sample_weight=None):
        # To the last bit, which decides between splits that are equally good.
        self.centre_ = y.mean(axis=0)
        self.unit_ = column_deviations(y, np.full(len(y), 1.0 / len(y)))
        self.forest_ = clone(self.forest).fit(x, (y - self.centre_) / self.unit_, sample_weight)
        return self

    def predict(self, x):
        return self.centre_ + self.unit_ * self.forest_.predict(x)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["boosting", "shallow", "forest"])
def test_cross_fits_are_refits_by_hand(kind, weighted):
    x, y = rows(150, q=2)
    weights = np.random.default_rng(3).uniform(0.5, 2.0, 150) if weighted else None
    given = training(x, y, weights)
    found = cross_fitted(kind, given)
    if kind != "forest":
        made = HistGradientBoostingRegressor(
            learning_rate=0.2, max_leaf_nodes=12, max_iter=found.steps, min_samples_leaf=10
        ).set_params(early_stopping=False, random_state=0)
        made = MultiOutputRegressor(made if kind == "boosting" else AfterTree(made))
    else:
        made = InUnits(ExtraTreesRegressor(20, random_state=0))
    every = np.zeros(150, dtype=bool)
    for first in range(5):  # folds are left out in pairs
        held = np.isin(given.folds, [first, first + 5])
        more = weights_of(given, ~held) if weighted else {}
        refit = clone(made).fit(x[~held], y[~held], **more)
        np.testing.assert_allclose(found.predicted[held], refit.predict(x[held]), rtol=1e-7)
        for fold in (first, first + 5):
            np.testing.assert_array_equal(found.each[fold](x[held]), found.predicted[held])
        every |= held
    assert every.all()
    more = weights_of(given, every) if weighted else {}
    whole = clone(made).fit(x, y, **more).predict(x)
    np.testing.assert_allclose(fitted_to_all(found, given)(x), whole, rtol=1e-7)


def test_steps_of_boosting_are_those_that_predict_best(monkeypatch):
    """They are made in stages, the next one where nearly all steps so far are of use."""
    made, grow = [], trees._Parts.grow

    def counted(parts, threads):
        made.append((parts._best, len(parts._curve), parts._next))
        grow(parts, threads)

    monkeypatch.setattr(trees._Parts, "grow", counted)
    monkeypatch.setattr(tree_fits, "_GROWTH_OF_FEW", tree_fits.Growth((10, 20, 40), 0.2, 12))
    x, _ = rows(400)
    noise = np.random.default_rng(0).normal(size=(400, 1))
    assert cross_fitted("boosting", training(x, noise)).steps < 8
    assert not made
    given = training(x, 10 * x[:, :1] + x[:, 1:2] ** 3)
    found = cross_fitted("boosting", given)
    assert [(reached, steps) for _, reached, steps in made] == [(10, 20), (20, 40)]
    assert all(best >= 0.8 * reached for best, reached, _ in made)
    curve = np.zeros(40)
    for first in range(5):  # folds are left out in pairs
        held = np.isin(given.folds, [first, first + 5])
        whole = HistGradientBoostingRegressor(
            learning_rate=0.2, max_leaf_nodes=12, max_iter=40, min_samples_leaf=10
        ).set_params(early_stopping=False, random_state=0)
        stages = whole.fit(given.x[~held], given.y[~held, 0]).staged_predict(given.x[held])
        curve += [((stage - given.y[held, 0]) ** 2).sum() for stage in stages]
    assert found.steps == curve.argmin() + 1


@pytest.mark.parametrize(("n", "length", "leaves"), [(1199, 0.2, 12), (1200, 0.1, 31)])
def test_trees_of_few_rows_have_few_leaves_and_long_steps(n, length, leaves):
    x, y = rows(n)
    given = training(x, y)
    every = np.ones(n, dtype=bool)
    (one,) = KINDS["boosting"](given, every)._each
    assert (one.learning_rate, one.max_leaf_nodes, one.max_iter) == (length, leaves, 30)
    (one,) = KINDS["boosting"](given, every, True)._each
    assert (one.learning_rate, one.max_leaf_nodes, one.max_iter) == (1 / 3, 12, 45)


def test_the_error_of_laws_is_that_of_a_loop():
    rng = np.random.default_rng(0)
    n = 80
    predicted, weights = rng.normal(size=(n, 2)), rng.uniform(0.5, 2.0, n)
    y = predicted + rng.normal(size=(n, 2)) * (1.0 + np.abs(predicted))
    ratios = []
    for m, column in zip(predicted.T, y.T, strict=True):
        order = np.argsort(m)
        total = 0.0
        for at, i in enumerate(order):
            first = min(max(at - 30, 0), n - 61)
            near = [k for k in order[first : first + 61] if k != i]
            atoms = m[i] + (column - m)[near]
            share = weights[near] / weights[near].sum()
            pairs = np.abs(atoms[:, None] - atoms)
            total += weights[i] * (share @ np.abs(atoms - column[i]) - 0.5 * share @ pairs @ share)
        share = weights / weights.sum()
        marginal = 0.5 * share @ np.abs(column[:, None] - column) @ share
        ratios.append(total / weights.sum() / marginal)
    assert law_error(predicted, y, weights) == pytest.approx(np.mean(ratios), rel=1e-10)
    assert law_error(predicted, np.zeros((n, 2)), weights) == 0.0


ALL = "boosting", "shallow", "forest"


@pytest.mark.parametrize(
    ("ridge", "chosen"),
    [
        (lambda rows: 2.0 * ((rows.x > 0.3) & (rows.x < 0.7)), False),  # the true mean
        (lambda rows: rows.y.mean(axis=0) + 0.0 * rows.y, True),
        (lambda rows: 2.0 * ((rows.x > 0.25) & (rows.x < 0.7)), True),
    ],
)
def test_trees_are_taken_where_they_are_clearly_better(ridge, chosen):
    found = TreeSearch(training(*jump()), ALL).better(0.5, ridge)
    assert (found is not None) == chosen


def test_trees_far_behind_on_few_rows_are_not_tried_on_more():
    def ridge(rows):
        raise AssertionError("no trees are left to be compared with")

    assert TreeSearch(training(*jump()), ALL).better(1e-3, ridge) is None
    assert TreeSearch(training(*jump(1500)), ALL).better(1e-3, ridge) is None
    assert TreeSearch(training(*jump()), ()).better(0.5, ridge) is None


@pytest.mark.parametrize("n", [600, 1500])
def test_hopeless_kinds_end_with_their_first_part(monkeypatch, n):
    """Of more than 1,000 rows that of a trial on these, else that of the race."""
    x, y = jump(n)
    given, fits = training(x, y), []
    fit = trees._Parts.fit

    def counted(parts, count, threads):
        fits.append((parts.kind, count))
        fit(parts, count, threads)

    monkeypatch.setattr(trees._Parts, "fit", counted)
    first = TreeSearch(given, ALL)._first_errors(1, trees.TrialsHere())
    assert fits == [(kind, 1) for kind in ALL]
    few = given.first(1000)
    for kind, (error, falling) in first.items():
        parts = trees._Parts(kind, few, quick=n > 1000)
        found, held = parts.whole(1), parts._held(0)
        apart = found.predicted[held], few.y[held], few.weights[held], (few.y, few.weights)
        # Of as many trees, or nearly; those of a race go on.
        assert error == pytest.approx(law_error(*apart), rel=0.02 if n > 1000 else 0.1)
        assert n < 1000 or falling == 1.0
    fits.clear()
    assert TreeSearch(given, ALL).better(0.01 * min(one for one, _ in first.values()), None) is None
    assert fits == [(kind, 1) for kind in ALL]


def line(n=600):
    """Rows that boosting comes near by more steps than its first ones, and their mean."""
    x = np.random.default_rng(0).normal(size=(n, 3))
    mean = x.sum(axis=1, keepdims=True)
    return training(x, mean + 0.1 * np.random.default_rng(1).normal(size=(n, 1))), mean


def test_errors_that_fall_are_measured_over_the_last_two_thirds_of_the_steps(monkeypatch):
    monkeypatch.setattr(tree_fits, "_GROWTH_OF_FEW", tree_fits.Growth((12, 60), 0.2, 12))
    given, _ = line()
    parts, errors = trees._Parts("boosting", given), []
    parts.fit(1, 1)
    held = parts._held(0)
    for steps in (4, 12):
        made = HistGradientBoostingRegressor(
            learning_rate=0.2, max_leaf_nodes=12, max_iter=steps, min_samples_leaf=10
        ).set_params(early_stopping=False, random_state=0)
        missed = made.fit(given.x[~held], given.y[~held, 0]).predict(given.x[held])
        errors.append(np.sqrt(np.mean((missed - given.y[held, 0]) ** 2)))
    assert parts.grows
    assert parts.falling == pytest.approx(errors[1] / errors[0], rel=1e-6)
    assert parts.falling < 0.7
    parts.grow(1)
    assert not parts.grows
    assert parts.falling == 1.0
    forest = trees._Parts("forest", given)
    forest.fit(1, 1)
    assert forest.grows
    assert forest.falling == 1.0


@pytest.mark.parametrize(("behind", "stages"), [(1.5, [12, 60]), (0.7, [12])])
def test_kinds_grow_as_long_as_they_may_come_near(monkeypatch, behind, stages):
    """Boosting that is behind goes on if its error may fall below that of the other location."""
    monkeypatch.setattr(tree_fits, "_GROWTH_OF_FEW", tree_fits.Growth((12, 60), 0.2, 12))
    given, _ = line()
    parts = trees._Parts("boosting", given)
    parts.fit(2, 1)
    held, predicted = parts.held_out()
    missed = predicted - given.y
    assert 1.5 * parts.falling < 0.95  # behind now, not after one more such fall
    other = given.y - behind * parts.falling * np.where(held[:, None], missed, 0.0)
    search = TreeSearch(given, ["boosting"])
    grown, grow = [12], trees._Parts.grow

    def counted(parts, threads):
        grow(parts, threads)
        grown.append(parts._reached)

    monkeypatch.setattr(trees._Parts, "grow", counted)
    monkeypatch.setattr(trees._Parts, "rounds", [2, 5])
    search._raced(["boosting"], other)
    assert grown == stages


def test_few_rows_race_in_one_round(monkeypatch):
    """Of 200 rows all parts hold out the first round's; kinds behind have the first trees only."""
    x = np.random.default_rng(0).normal(size=(200, 3))
    mean = x.sum(axis=1, keepdims=True)
    given, grown = training(x, mean + 0.1 * np.random.default_rng(1).normal(size=(200, 1))), []
    assert trees._Parts("forest", given).rounds == [5]
    monkeypatch.setattr(trees._Parts, "grow", lambda *_: grown.append(True))
    search = TreeSearch(given, ALL)
    assert search.better(100.0, lambda rows: mean) is None
    assert not grown
    assert not search._parts


def test_a_forest_races_with_its_first_trees(monkeypatch):
    """The others are fitted once it is not behind, and are those of a forest at once."""
    monkeypatch.setattr(tree_fits, "_TRIAL_FOREST", 6)
    monkeypatch.setattr(tree_fits, "_FOREST", 14)
    given = training(*jump(1000))
    search, counts = TreeSearch(given, ["forest"]), []
    raced = search._not_behind

    def counted(kinds, other):
        counts.append([len(fit._mean.roots) for fit in search._parts["forest"]._fits])
        return raced(kinds, other)

    monkeypatch.setattr(search, "_not_behind", counted)
    found = search.better(100.0, lambda rows: np.zeros_like(rows.y))
    assert len(counts) == 2
    assert {count for each in counts for count in each} == {6}
    assert [len(mean.roots) for mean in found.each] == [14] * 10
    every = trees._Parts("forest", given)
    every._reached = 14
    np.testing.assert_array_equal(every.whole(1).predicted, found.predicted)


@pytest.mark.parametrize(("n", "limit"), [(600, 1.4375), (1500, 1.15 + 0.05 * np.log2(1.5))])
def test_kinds_that_are_far_behind_do_not_race(monkeypatch, n, limit):
    """More than 1,000 rows are tried on these; of fewer only the first part is known."""
    given, found = training(*jump(n)), {}
    monkeypatch.setattr(trees, "law_error", lambda predicted, *_: float(predicted[0, 0]))
    monkeypatch.setattr(trees._Parts, "whole", lambda parts, _: found[parts.kind])
    for error in (0.99 * limit, 1.01 * limit):
        first = {"boosting": (2.0 * error, 0.5), "shallow": (9.0, 1.0), "forest": (9.0, 0.9)}
        monkeypatch.setattr(TreeSearch, "_first_errors", lambda *_, first=first: first)
        found["boosting"] = trees.CrossFit("boosting", (), np.full(given.y.shape, error), 10)
        near = TreeSearch(given, ALL)._near(1.0, 1, trees.TrialsHere())
        assert near == (["boosting"] if error < limit else [])


@pytest.mark.parametrize(
    ("error", "expected"),
    [(0.01, (False, False)), (0.6, (True, False)), (0.77, (True, False)), (0.79, (True, True))],
)
def test_first_parts_tell_whether_trees_are_compared_and_promise_to_be_better(
    monkeypatch, error, expected
):
    first = {"boosting": (1.0, 0.8), "forest": (1.2, 1.0)}
    monkeypatch.setattr(TreeSearch, "_first_errors", lambda *_: first)
    assert TreeSearch(training(*jump()), ALL).outlook(error) == expected
    monkeypatch.setattr(TreeSearch, "_first_errors", lambda *_: {})
    assert TreeSearch(training(*jump()), ALL).outlook(error) == (False, False)


@pytest.mark.parametrize("few", [True, False])
def test_boosting_on_few_numbers_is_made_in_one_thread(monkeypatch, few):
    """It holds the interpreter, and forests do not. On more numbers it has threads, too."""
    given, seen = replace(training(*jump()), threads=3), {kind: set() for kind in ALL}
    met = threading.Barrier(3)

    def counted(kind):
        made = KINDS[kind]

        class Counted(made):
            def __init__(self, *options):
                seen[kind].add(threading.get_ident())
                with suppress(threading.BrokenBarrierError):
                    if not few or kind == "forest":
                        met.wait(10.0)
                super().__init__(*options)

        return Counted

    for kind in ALL:
        monkeypatch.setitem(KINDS, kind, counted(kind))
    monkeypatch.setattr(tree_fits, "_Forest", KINDS["forest"])
    if not few:
        monkeypatch.setattr(tree_fits, "_MANY_NUMBERS", 0)
    for kind in ALL:
        met.reset()
        cross_fitted(kind, given, quick=True)  # three parts
    boosted = 1 if few else 3
    assert [len(seen[kind]) for kind in ALL] == [boosted, boosted, 3]


@pytest.mark.parametrize("few", [True, False])
def test_kinds_that_hold_the_interpreter_share_a_thread(monkeypatch, few):
    given, seen, met = training(*jump()), {}, threading.Barrier(2 if few else 3)
    if not few:
        monkeypatch.setattr(tree_fits, "_MANY_NUMBERS", 0)

    def work(kind):
        seen[kind] = threading.get_ident()
        if not few or kind != "shallow":
            met.wait(10.0)

    TreeSearch._each(work, ALL, given, 6)
    assert len(set(seen.values())) == (2 if few else 3)
    assert (seen["boosting"] == seen["shallow"]) == few


@pytest.mark.parametrize("seed", range(2))
def test_a_first_part_without_the_rare_events_does_not_end_all_trials(seed):
    """Of few rows it may have all of them, or none, where y does not vary."""
    rng = np.random.default_rng(seed)
    x, folds = rng.normal(size=(150, 3)), rng.integers(0, 5, 150)
    y = (x[:, :1] > np.quantile(x[:, 0], 0.98)) * rng.exponential(size=(150, 1))
    given = replace(training(x, y, n_folds=5), folds=folds)
    none, every = (replace(given, folds=np.where(y[:, 0] > 0, k, folds)) for k in (1, 0))
    for rows in (given, none, every):
        # The error of a ridge that knows nothing.
        assert TreeSearch(rows, ALL)._near(1.0, 1, trees.TrialsHere())


@pytest.mark.parametrize("threads", [1, 2])
def test_two_folds_are_tried_in_two_parts(threads):
    given = training(*jump(1500), n_folds=2)
    memory = trees.TrialsHere()
    assert TreeSearch(given, ALL)._near(1.0, threads, memory)
    for kind in ALL:
        alone = cross_fitted(kind, given.first(1000), quick=True)
        np.testing.assert_array_equal(memory[kind, 1000, True].predicted, alone.predicted)


def test_folds_of_groups_leave_no_trees_out_by_their_first_part():
    """It may be that of the groups that are unlike all others."""
    x, y = jump(1500)
    given = replace(training(x, y), units=np.arange(len(x)) % 20)
    search, memory = TreeSearch(given, ALL), trees.TrialsHere()
    assert search._first_errors(1, memory) == dict.fromkeys(ALL, (0.0, 1.0))
    assert not memory
    assert search._near(1e-3, 1, memory) == []
    assert sorted(kind for kind, _, quick in memory if quick is True) == sorted(ALL)
    assert TreeSearch(given.first(1000), ALL)._near(1e-3, 1, memory) == [*ALL]


def test_kinds_clearly_behind_on_a_part_of_the_folds_are_fitted_no_further(monkeypatch):
    x, y = jump(3000)
    given, fits = training(x, y), []
    fit = trees._Parts.fit

    def counted(parts, count, threads):
        fits.append((parts.kind, parts._quick, count == parts.count))
        fit(parts, count, threads)

    monkeypatch.setattr(trees._Parts, "fit", counted)
    found = TreeSearch(given, ALL).better(1.0, lambda rows: np.zeros(rows.y.shape))
    whole = {kind for kind, quick, all_parts in fits if all_parts and not quick}
    assert found.kind in whole
    assert len(whole) < len(ALL)
    of_all = [cross_fitted(kind, given) for kind in ALL]
    errors = {one.kind: law_error(one.predicted, y, given.weights) for one in of_all}
    assert errors[found.kind] == min(errors.values())

    fits.clear()
    x = np.random.default_rng(0).normal(size=(3000, 4))
    line = x.sum(axis=1, keepdims=True)
    given = training(x, line + 0.1 * np.random.default_rng(1).normal(size=(3000, 1)))
    assert TreeSearch(given, ALL).better(1.0, lambda rows: line) is None
    raced = [all_parts for _, quick, all_parts in fits if not quick]
    assert raced == [False] * len(raced) != []


def marginal(rows):
    """What a ridge regression predicts that knows nothing."""
    return rows.y.mean(axis=0) + 0.0 * rows.y


@pytest.fixture(scope="module", params=[600, 1500])
def begun_late(request):
    """Rows, all or a part of which are tried, and the trees of a search that begins with them."""
    given = replace(training(*jump(request.param)), threads=2)
    return given, TreeSearch(given, ALL).better(1.0, marginal)


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 100])
def test_trees_that_were_fitted_ahead_are_not_fitted_again_and_change_nothing(
    monkeypatch, begun_late, steps
):
    """However much was made until it was over."""
    given, alone = begun_late
    fits, left = [], iter([False] * steps)

    def counted(kind):
        made = KINDS[kind]

        def make(rows, selected, *options):
            fits.append((kind, len(rows.x), selected.tobytes(), options))
            return made(rows, selected, *options)

        make.stages, make.by_need = made.stages, made.by_need
        return make

    for kind in ALL:
        monkeypatch.setitem(KINDS, kind, counted(kind))
    search = TreeSearch(given, ALL)
    search.begin(0.9, 1, lambda: next(left, True))
    assert (len(fits) > 0) == (steps > 0)
    found = search.better(1.0, marginal)
    assert len(set(fits)) == len(fits)
    assert (found.kind, found.steps) == (alone.kind, alone.steps)
    np.testing.assert_array_equal(found.predicted, alone.predicted)


def test_kinds_that_more_parts_show_to_be_behind_are_fitted_no_further(monkeypatch):
    """The first part alone is not clear."""
    x, y = jump(3000)
    given, fits = training(x, y), []
    fit, inner = trees._Parts.fit, TreeSearch._not_behind

    def counted(parts, count, threads):
        fits.append(count)
        fit(parts, count, threads)

    def unclear(search, kinds, other):
        first = search._parts[kinds[0]]
        return kinds if len(first._fits) == first.rounds[0] else inner(search, kinds, other)

    monkeypatch.setattr(trees._Parts, "fit", counted)
    monkeypatch.setattr(TreeSearch, "_not_behind", unclear)
    line = given.y + 1e-3
    assert TreeSearch(given, ["forest"]).better(1.0, lambda rows: line) is None
    assert trees._Parts("forest", given).rounds == [1, 3, 5]
    assert fits == [1, 3, 1, 3]  # the trial, whose first part comes first, and two rounds


def test_a_gain_in_one_of_four_units_of_rows_is_not_clear():
    rng = np.random.default_rng(0)
    y, missed = rng.normal(size=(2, 4000, 1))
    units = np.arange(4000) % 4
    better = y - missed * np.where(units == 0, 0.97, 1.004)[:, None]
    apart = training(y, y)
    assert trees.is_better(better, y - missed, apart)
    assert not trees.is_better(better, y - missed, replace(apart, units=units))
    assert trees.is_better(y - 0.995 * missed, y - missed, replace(apart, units=units))


@pytest.mark.parametrize("kind", ALL)
def test_a_cross_fit_is_the_same_each_time(kind):
    x, y = jump()
    twice = training(np.hstack([x, x]), y)  # so that either column splits as well
    first, *others = (cross_fitted(kind, twice, quick=True) for _ in range(4))
    whole, *more = (fitted_to_all(first, twice) for _ in range(3))
    for found in others:
        for one, other in zip(found.each, first.each, strict=True):
            np.testing.assert_array_equal(one.feature, other.feature)
            np.testing.assert_array_equal(one.values, other.values)
    for one in more:
        np.testing.assert_array_equal(one.feature, whole.feature)


def test_a_forest_leaves_the_filters_of_warnings_alone(monkeypatch):
    """They are those of the process, and parts of the folds are fitted in threads."""
    changed = []
    monkeypatch.setattr(warnings, "resetwarnings", lambda: changed.append(True))
    cross_fitted("forest", training(*rows(100)), quick=True)
    assert not changed


@pytest.mark.parametrize("kind", ALL)
def test_seeds_of_fits_are_larger_than_those_of_scikit_learn(kind):
    x, y = jump(200)
    large, small = (
        cross_fitted(kind, replace(training(x, y), seed=seed), quick=True)
        for seed in (2**63 - 1, 2**32 - 1)
    )
    np.testing.assert_array_equal(large.predicted, small.predicted)


# Fits with trees


def fitted(x, y, **changes):
    tuning = Tuning(**BRIEF | changes)
    return JointDistribution(tuning=tuning, random_state=0).fit(x, y, scheduler="synchronous")


def test_a_jump_takes_trees_in_one_pass_and_its_model_is_saved(tmp_path):
    x, y = jump(400)
    write_store(tmp_path / "s", x, y, chunk_rows=200)
    store, group = opened(tmp_path / "s")
    fit = JointDistribution(tuning=Tuning(**BRIEF), random_state=0).fit(
        group, scheduler="synchronous"
    )
    about = fit.model_.about["residual"]
    assert about["kept"]
    assert about["location"] in ("boosted trees", "shallow boosted trees", "randomised trees")
    assert about["location"] in repr(fit.model_)
    assert fit.n_passes_ == 1
    assert set(store.chunks("x").values()) == {1}
    assert isinstance(fit.model_.residual.location, TreeMean)
    fit.save(tmp_path / "m")
    again, asked = load(tmp_path / "m"), np.linspace(-0.5, 1.5, 40)[:, None]
    for answer in ("mean", "std", "median"):
        each = [getattr(model.conditional(asked), answer)() for model in (fit, again)]
        np.testing.assert_array_equal(*each)
    near = again.conditional([[0.28], [0.32]]).median()
    assert near[1] - near[0] > 1.5
    whole = fitted(x, y)
    np.testing.assert_allclose(
        whole.conditional(asked).mean(), again.conditional(asked).mean(), rtol=1e-6
    )
    without = fitted(x, y, trees=())
    assert without.model_.about["residual"].get("location") is None


def test_any_chunks_workers_and_scheduler_give_the_same_trees():
    x, y = jump(400)
    law = JointDistribution(tuning=Tuning(**BRIEF, trees=("shallow", "forest")), random_state=0)
    asked, answers = np.linspace(-0.5, 1.5, 40)[:, None], []
    for rows, options in (
        ((x, y), {"workers": 1}),
        ((x, y), {"workers": 3}),
        ((x, y), {"scheduler": "synchronous"}),
        ((da.from_array(x, chunks=111), da.from_array(y, chunks=77)), {"workers": 2}),
    ):
        fit = law.fit(*rows, **options)
        assert isinstance(fit.model_.residual.location, TreeMean)
        answers.append(fit.conditional(asked).quantile([0.1, 0.5, 0.9]))
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer, answers[0])


def repeated(n=600, seed=0):
    """Rows of which half are there twice, with the same y, among noise."""
    rng = np.random.default_rng(seed)
    x, y = rng.random((n, 4)), rng.normal(size=(n, 1))
    x[: n // 4], y[: n // 4] = x[n // 4 : n // 2], y[n // 4 : n // 2]
    return x, y


@pytest.mark.slow
def test_laws_are_narrow_where_the_trees_of_a_forest_agree(tmp_path):
    x, y = repeated()
    given = {"location": ExtraTreesRegressor(50, random_state=0), "kernel_y": "median"}
    fit = JointDistribution(tuning=Tuning(**BRIEF), random_state=0, **given).fit(x, y)
    location = fit.model_.residual
    assert location.model.x.columns.names[4:] == ("prediction of y0", "spread of y0")
    new = np.random.default_rng(1).random((150, 4))
    spreads, widths = (
        [f(rows) for rows in (x[:150], new)]  # of rows that are there twice, and of new ones
        for f in (
            lambda rows: location.placed(rows)[1][:, 5],
            lambda rows: fit.conditional(rows).quantile([0.25, 0.75]) @ [-1.0, 1.0],
        )
    )
    assert (spreads[0] == 0.0).all()
    assert (spreads[1] > 0.1).all()
    assert widths[0].mean() < 0.7 * widths[1].mean()
    assert fit.model_.to_state().schema_version == 4  # which older versions refuse
    fit.save(tmp_path / "m")
    again = load(tmp_path / "m")
    np.testing.assert_array_equal(again.conditional(x[:40]).std(), fit.conditional(x[:40]).std())


@pytest.fixture(scope="module")
def small_forest():
    """A model whose location is a small forest that was given."""
    location = ExtraTreesRegressor(3, max_depth=3, random_state=0)
    law = JointDistribution(location=location, kernel_x="median", kernel_y="median", tol=1e-2)
    return law.fit(*jump(200)).model_


def test_files_of_earlier_versions_know_no_spread(small_forest):
    state = copy.deepcopy(small_forest.to_state())
    described = state.description["residual"]["location"]
    # Kernels that are given are those of x alone.
    assert (described["covariate"], described.pop("spread")) == (False, True)
    location = JointModel.from_state(state).residual.location
    assert location.spread is None
    assert location.covariates == ()
    described["covariate"] = described["spread"] = True  # columns that the model does not have
    with pytest.raises(StoreError, match="columns are not those of the model"):
        JointModel.from_state(state)


@pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")
def test_given_pivots_of_x_are_those_of_residuals_of_trees():
    x, y = jump(800)
    tuning = Tuning(**BRIEF | {"trees": ("forest",)})
    fit = JointDistribution(
        pivots=(x[:40], y[:5]), tuning=tuning, residual=True, random_state=0
    ).fit(x, y)
    assert isinstance(fit.model_.residual.location, TreeMean)
    assert fit.model_.residual.model.x.columns.names == ("x0",)
    near = fit.conditional([[0.28], [0.32]]).median()
    assert near[1] - near[0] > 1.5


def test_a_smooth_mean_takes_no_trees():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 1))
    fit = fitted(x, np.sin(2 * x) + 0.2 * rng.normal(size=x.shape))
    assert fit.model_.about["residual"]["kept"]
    assert not isinstance(fit.model_.residual.location, TreeMean)


def test_the_ridge_that_trees_are_compared_with_is_in_its_own_coordinates(monkeypatch):
    """Those of y whose columns are skewed, on more rows than its kernel was learned on."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1200, 2))
    y = np.exp(2.0 * np.sin(x[:, 0]) + x[:, 1] + 0.2 * rng.normal(size=1200))
    seen = {}

    def compared(search, error, ridge):
        rows = search._many
        seen["few"] = error
        seen["all"] = law_error(ridge(rows), rows.y, rows.weights)

    monkeypatch.setattr(TreeSearch, "better", compared)
    fit = JointDistribution(tuning=Tuning(rows=500, evaluations=0)).fit(x, y)
    assert fit.model_.about["residual"]["transform"] != "raw"
    assert seen["all"] < 1.1 * seen["few"]


def test_several_columns_of_y_have_trees():
    x, y = jump(400)
    fit = fitted(x, np.hstack([y, -y]), trees=("shallow", "forest"))
    assert isinstance(fit.model_.residual.location, TreeMean)
    assert fit.model_.residual.location.widths == (1, 2)


def test_names_of_trees_are_known():
    assert Tuning(trees=["forest"]).trees == ("forest",)
    for bad in (("oaks",), "forest", 3):
        with pytest.raises(DataError, match="trees must be a list"):
            Tuning(trees=bad)


@pytest.mark.parametrize(
    "change",
    [
        lambda trees: trees["children"].__setitem__((0, 0), 0),  # a circle
        lambda trees: trees["children"].__setitem__((0, 0), len(trees["feature"])),
        lambda trees: trees["children"].__setitem__((0, 0), -1),
        lambda trees: trees["feature"].__setitem__(0, 1),
        lambda trees: trees["feature"].__setitem__(0, -1),
        lambda trees: trees["roots"].__setitem__(0, 1),
        lambda trees: trees["roots"].__setitem__(-1, len(trees["feature"])),
        lambda trees: trees["values"].__setitem__(0, np.nan),
        lambda trees: trees.update(constant=trees["constant"].astype(np.int8)),
    ],
)
def test_damaged_trees_are_refused(small_forest, change):
    state = copy.deepcopy(small_forest.to_state())
    arrays = {name: np.array(values) for name, values in state.arrays.items()}
    JointModel.from_state(state)
    prefix = "residual_location_"
    trees = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
    change(trees)
    state.arrays.update(arrays | {prefix + name: values for name, values in trees.items()})
    with pytest.raises(StoreError, match=r"damaged|finite|numeric"):
        JointModel.from_state(state)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("exponent", [-400, 400])
def test_boosted_trees_have_no_units(exponent):
    """The gradients of scikit-learn's trees are numbers of single precision."""
    rng, unit = np.random.default_rng(0), 2.0**exponent
    x = rng.normal(size=(200, 2))
    y = np.column_stack([np.sign(x[:, 0]), x[:, 1] + 0.1 * rng.normal(size=200)])
    folds, each = np.arange(200) % 4, np.arange(200)
    plain, scaled = (
        cross_fitted("shallow", TrainingRows(x, y * by, np.full(200, 1 / 200), folds, 4, each, 1))
        for by in (1.0, unit)
    )
    assert scaled.steps == plain.steps
    np.testing.assert_array_equal(scaled.predicted, unit * plain.predicted)
