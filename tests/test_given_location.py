"""Locations that a user gives: columns of predictions and regressors, beside fits by hand."""

import copy
import pickle
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import write_store
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.cluster import KMeans
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingRegressor, IsolationForest
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV
from sklearn.multioutput import MultiOutputRegressor
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor
from test_reads import opened

from cme_dask import JointClassifier, JointDistribution, Tuning, load
from cme_dask.cli import cli
from cme_dask.errors import DataError, StoreError
from cme_dask.estimators.locating import join_location
from cme_dask.models.joint import JointModel
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.given_location import MixedMean
from cme_dask.numerics.location import MeanFunction
from cme_dask.numerics.scoring import law_error
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.fit import sample_rows
from cme_dask.passes.sources import open_sample

N_FOLDS = 4
pytestmark = pytest.mark.usefixtures("least_searches")
TREE = DecisionTreeRegressor(max_depth=4, random_state=3)
MEDIAN = {"kernel_x": "median", "kernel_y": "median", "tol": 1e-2, "n_folds": N_FOLDS}


def given(location, **changes):
    """A fit with given kernels, so that nothing is searched."""
    return JointDistribution(**MEDIAN | {"location": location} | changes)


def rows(n=400, seed=0):
    """Two columns of x and one of y, whose spread depends on the second one."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    y = np.sin(2 * x[:, :1]) + (0.1 + 0.3 * np.abs(x[:, 1:])) * rng.normal(size=(n, 1))
    return x, y


def predictions(x, y, folds, regressor=TREE, weights=None):
    """Of each row by a regressor fitted to the other folds; shape of y."""
    result = np.empty_like(y)
    for fold in np.unique(folds):
        held = folds == fold
        more = {} if weights is None else {"sample_weight": weights[~held]}
        target = y[~held, 0] if y.shape[1] == 1 else y[~held]
        fitted = clone(regressor).fit(x[~held], target, **more)
        result[held] = fitted.predict(x[held]).reshape(-1, y.shape[1])
    return result


def with_predictions():
    """Rows whose x also holds predictions of y, the third column."""
    x, y = rows()
    return np.hstack([x, predictions(x, y, fold_of_rows(0, len(x), N_FOLDS))]), y


def same_model(model, other, rtol=1e-9):
    """Two models of the same rows: coefficients, moments and cells."""
    np.testing.assert_allclose(model.coef, other.coef, rtol=rtol, atol=1e-12)
    for name, values in model.moments.items():
        np.testing.assert_allclose(values, other.moments[name], rtol=rtol, atol=1e-12)
    for mine, theirs in ((model.x, other.x), (model.y, other.y)):
        np.testing.assert_allclose(mine.cells.means, theirs.cells.means, rtol=rtol, atol=1e-12)
        np.testing.assert_array_equal(mine.cells.masses, theirs.cells.masses)


# The residuals, beside fits to residuals that are computed by hand


@pytest.mark.parametrize("kind", ["column", "regressor"])
def test_the_residual_model_is_a_fit_to_residuals_by_hand(kind):
    x, y = rows()
    made = predictions(x, y, fold_of_rows(0, len(x), N_FOLDS))
    if kind == "column":
        x, location = np.hstack([x, made]), "x2"
    else:
        location = TREE
    fit = given(location).fit(x, y)
    same_model(fit.model_.residual.model, given(None).fit(x, y - made).model_)
    same_model(fit.model_, given(None).fit(x, y).model_)
    assert fit.model_.about["residual"]["kept"]


def test_laws_are_residuals_moved_to_the_prediction():
    """Near the data, and within the range of y."""
    x, y = with_predictions()
    fit = given("x2", support="bounded").fit(x, y)
    by_hand = given(None).fit(x, y - x[:, 2:])
    law, residuals = fit.conditional(x[:50]), by_hand.conditional(x[:50])
    levels = [0.1, 0.5, 0.9]
    # Atoms are cell means, so that quantiles by hand are those of the weighted means.
    means = by_hand.model_.y.cells.means[:, 0]
    order = np.argsort(means)
    sums = np.cumsum(residuals.weights()[:, order], axis=1)
    for k, level in enumerate(levels):
        atoms = means[order][(sums >= level - 1e-12).argmax(axis=1)]
        expected = np.clip(x[:50, 2] + atoms, y.min(), y.max())
        np.testing.assert_allclose(law.quantile(levels)[:, k], expected, atol=1e-12)
    moved = np.clip(x[:50, 2:] + means, y.min(), y.max())
    np.testing.assert_allclose(law.mean(), (residuals.weights() * moved).sum(1), atol=1e-12)


def test_a_regressor_is_a_column_of_its_cross_fitted_predictions(brief_search):
    """With learned kernels, which see the predictions in both cases."""
    x, y = rows(120)
    made = predictions(x, y, fold_of_rows(0, len(x), N_FOLDS))
    one = JointDistribution(location=TREE, residual=True, n_folds=N_FOLDS).fit(x, y)
    other = JointDistribution(location="x2", n_folds=N_FOLDS).fit(np.hstack([x, made]), y)
    same_model(one.model_.residual.model, other.model_.residual.model)
    asked = np.hstack([x, clone(TREE).fit(x, y[:, 0]).predict(x)[:, None]])
    np.testing.assert_allclose(
        one.model_.law().near.mean(one.model_.law().near.at(x)),
        other.model_.law().near.mean(other.model_.law().near.at(asked)),
        atol=1e-9,
    )


def test_rows_outside_the_row_sample_have_the_regressor_of_their_fold():
    x, y = rows(3000)
    fit = given(TREE, sample_size=400, n_folds=3, tol=0.2).fit(x, y)
    few, _ = sample_rows(open_sample(x, y), 400, 0, RunOptions().executor())
    folds = fold_of_rows(0, len(x), 3)
    made = np.empty_like(y)
    for fold in range(3):
        chosen = few.index[folds[few.index] != fold]
        fitted = clone(TREE).fit(x[chosen], y[chosen, 0])
        made[folds == fold, 0] = fitted.predict(x[folds == fold])
    cells = fit.model_.residual.model.y.cells
    residuals = y - made
    np.testing.assert_allclose(cells.masses @ cells.means, residuals.mean(axis=0), atol=1e-12)
    second = cells.masses @ (cells.means[:, 0] ** 2 + cells.covariances[:, 0, 0])
    np.testing.assert_allclose(second, (residuals**2).mean(), rtol=1e-9)
    assert fit.n_passes_ == 1


SEARCH = GridSearchCV(make_pipeline(StandardScaler(), Ridge(1e-9)), {"ridge__alpha": [1e-9]}, cv=3)


@pytest.mark.parametrize(
    "location",
    [
        LinearRegression(),
        make_pipeline(StandardScaler(), LinearRegression()),
        TransformedTargetRegressor(),
        TransformedTargetRegressor(make_pipeline(StandardScaler(), LinearRegression())),
        make_pipeline(StandardScaler(), TransformedTargetRegressor(LinearRegression())),
        SEARCH,
    ],
)
def test_weights_go_to_the_regressor_through_what_holds_it(location):
    x, y = rows()
    weights = np.random.default_rng(1).uniform(0.0, 3.0, len(x))
    folds = fold_of_rows(0, len(x), N_FOLDS)
    made = predictions(x, y, folds, LinearRegression(), weights)
    fit = given(location).fit(x, y, weights=weights)
    cells = fit.model_.residual.model.y.cells
    expected = weights @ (y - made) / weights.sum()
    np.testing.assert_allclose(cells.masses @ cells.means, expected, atol=1e-10)


@pytest.mark.parametrize("location", [KNeighborsRegressor(), MultiOutputRegressor(SEARCH)])
def test_a_regressor_that_takes_no_weights_warns_where_they_differ(location):
    x, y = rows(100)
    y = np.hstack([y, y])
    weights = np.where(np.arange(100) < 90, 2.0, 0.0)
    given(location).fit(x, y, weights=weights)  # equal ones: the others are left out
    weights[0] = 1.0
    with pytest.warns(UserWarning, match=r"takes no sample_weight") as caught:
        given(location).fit(x, y, weights=weights)
    assert len(caught) == 1


def test_a_regressor_takes_the_seed_of_the_fit():
    x, y = rows(200)
    seed, tree = 2**63 - 1, DecisionTreeRegressor(max_depth=4, max_features=1)
    fit = given(tree, random_state=seed).fit(x, y)
    alone = clone(tree).set_params(random_state=seed % 2**32).fit(x, y[:, 0])
    np.testing.assert_allclose(fit.model_.residual.location(x)[:, 0], alone.predict(x))


def test_several_columns_of_y():
    x, y = rows()
    y = np.hstack([y, 3.0 + x[:, 1:] + 0.1 * y])
    folds = fold_of_rows(0, len(x), N_FOLDS)
    made = predictions(x, y, folds, LinearRegression())
    by_names = given(["x2", "x3"]).fit(np.hstack([x, made]), y)
    swapped = given(["x3", "x2"]).fit(np.hstack([x, made[:, ::-1]]), y)
    np.testing.assert_allclose(by_names.model_.residual.location(np.eye(4))[:, 1], [0, 0, 0, 1])
    np.testing.assert_allclose(
        by_names.model_.residual.model.y.cells.masses, swapped.model_.residual.model.y.cells.masses
    )
    fit = given(LinearRegression()).fit(x, y)
    same_model(fit.model_.residual.model, given(None).fit(x, y - made).model_)
    # Boosting predicts one column, so that there is a model for each.
    boosted = given(HistGradientBoostingRegressor(max_iter=3)).fit(x, y)
    alone = clone(HistGradientBoostingRegressor(max_iter=3, random_state=0)).fit(x, y[:, 1])
    location = boosted.model_.residual.location(x[:20])
    np.testing.assert_allclose(location[:, 1], alone.predict(x[:20]))


class OfAnotherPackage:
    """Least squares with the methods of a regressor, and without scikit-learn's tags."""

    def __init__(self, rows=None):
        self.rows = rows

    def get_params(self, deep=True):
        return {"rows": self.rows}

    def set_params(self, **parameters):
        vars(self).update(parameters)
        return self

    def fit(self, X, y):
        self.regressor_ = LinearRegression().fit(X[: self.rows], y[: self.rows])
        return self

    def predict(self, X):
        return self.regressor_.predict(X)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_regressor_of_another_package_needs_no_tags(columns):
    x, y = rows(200)
    y = np.hstack([y, 3.0 + x[:, 1:] + 0.1 * y])[:, :columns]
    fit, same = (given(one).fit(x, y) for one in (OfAnotherPackage(), LinearRegression()))
    same_model(fit.model_.residual.model, same.model_.residual.model)


# One pass, of any chunks and anywhere


@pytest.mark.parametrize("location", ["x2", TREE], ids=["column", "regressor"])
def test_one_pass_reads_every_chunk_once_and_chunks_change_no_bit(tmp_path, location):
    x, y = rows(9000)
    x = np.hstack([x, np.sin(2 * x[:, :1])])
    models = []
    for chunk_rows in (700, 4096):
        path = write_store(tmp_path / f"{chunk_rows}.zarr", x, y, chunk_rows=chunk_rows)
        store, group = opened(path)
        fit = given(location, support_size=200).fit(group, scheduler="synchronous")
        assert fit.n_passes_ == 1 == fit.model_.about["passes"]
        for name in ("x", "y"):
            most = 1 + (chunk_rows == 700)  # a chunk that two tasks share
            assert set(store.chunks(name).values()) <= set(range(1, most + 1))
        assert set(store.chunks("row_sample/y").values()) == {1}
        models.append(fit.model_)
    for one, other in (models, [model.residual.model for model in models]):
        np.testing.assert_array_equal(one.coef, other.coef)
        np.testing.assert_array_equal(one.moments["gram"], other.moments["gram"])


def test_the_plan_predicts_the_pass_and_its_memory():
    x, y = with_predictions()
    fit = given("x2").fit(x, y)
    plan = given("x2").plan(x, y)
    assert plan.passes == fit.n_passes_ == 1
    assert plan.memory.predicted == fit.report_.memory.predicted
    assert plan.memory.predicted > given(None).plan(x, y).memory.predicted
    assert (plan.location, plan.residual) == ("column x2", False)
    assert "given location" not in plan.parts
    regressor = given(TREE).plan(x, y)
    assert regressor.location == "DecisionTreeRegressor"
    assert regressor.parts["given location"] > 0.0
    assert regressor.memory.predicted == given(TREE).fit(x, y).report_.memory.predicted


@pytest.mark.parametrize("location", ["x2", TREE], ids=["column", "regressor"])
def test_steps_are_reported_in_their_order(location, brief_search):
    x, y = (part[:120] for part in with_predictions())
    events = []
    JointDistribution(location=location, n_folds=3).fit(x, y, progress=events.append)
    names = list(dict.fromkeys(event.name for event in events))
    expected = [
        "search for kernels",
        "search for kernels of residuals",
        "pivots of residuals",
        "pivots",
        "pass over the rows",
        "solution",
        "solution for residuals",
        "comparison on held-out rows",
        "done",
    ]
    if location is TREE:
        expected = ["location by the given regressor", *expected]
    assert names == expected
    shares = [event.done for event in events]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_regressors_travel_to_the_workers_of_a_cluster(tmp_path, cluster):
    x, y = rows(9000)
    path = write_store(tmp_path / "s.zarr", x, y, chunk_rows=3000)
    here = given(TREE, support_size=100).fit(path, scheduler="synchronous")
    there = given(TREE, support_size=100).fit(path, scheduler=cluster)
    np.testing.assert_array_equal(there.model_.residual.model.coef, here.model_.residual.model.coef)


def test_a_checkpoint_knows_the_location(tmp_path):
    x, y = rows()
    boosting = HistGradientBoostingRegressor(max_iter=3)
    first = given(boosting).fit(x, y, checkpoint=tmp_path / "run")
    again = given(clone(boosting)).fit(x, y, checkpoint=tmp_path / "run")
    assert again.report_.resumed_strips > 0
    np.testing.assert_array_equal(
        again.model_.residual.model.coef, first.model_.residual.model.coef
    )
    with pytest.raises(StoreError, match="location"):
        given(HistGradientBoostingRegressor(max_iter=4)).fit(x, y, checkpoint=tmp_path / "run")


# Questions, files, parameters


@pytest.mark.parametrize("location", ["x2", TREE], ids=["column", "regressor"])
def test_lazy_questions_are_the_eager_ones(location):
    x, y = with_predictions()
    fit = given(location).fit(x, y)
    levels = [0.1, 0.9]
    lazy = fit.conditional(da.from_array(x, chunks=(150, 3))).quantile(levels)
    np.testing.assert_allclose(lazy.compute(), fit.conditional(x).quantile(levels), atol=1e-12)
    np.testing.assert_allclose(
        fit.predict(da.from_array(x, chunks=(150, 3))).compute(), fit.predict(x), atol=1e-12
    )
    inside = fit.conditional(x).interval(0.9)
    assert 0.8 < np.mean((inside[0] <= y[:, 0]) & (y[:, 0] <= inside[1])) < 1.0


def test_a_model_with_a_column_is_saved_and_one_with_a_regressor_is_not(tmp_path):
    x, y = with_predictions()
    fit = given("x2", conformal=True).fit(x, y)
    fit.save(tmp_path / "m")
    again = load(tmp_path / "m")
    assert "column x2" in repr(again)
    for level in ({}, {"conformal": True}):
        np.testing.assert_array_equal(
            again.conditional(x[:9]).interval(0.8, **level),
            fit.conditional(x[:9]).interval(0.8, **level),
        )
    fit = given(KNeighborsRegressor()).fit(x, y)
    with pytest.raises(DataError, match=r"KNeighborsRegressor.*no pickled.*location='pred"):
        fit.save(tmp_path / "n")
    assert not (tmp_path / "n").exists()
    copy = pickle.loads(pickle.dumps(fit))  # noqa: S301 - ours
    np.testing.assert_array_equal(copy.predict(x[:9]), fit.predict(x[:9]))


@pytest.fixture(scope="module")
def column_model():
    """A model of few rows whose location is a column."""
    x, y = with_predictions()
    return given("x2", support_size=20).fit(x[:60], y[:60]).model_


@pytest.mark.parametrize(
    "change",
    [
        {"type": "RegressorMean", "regressor": None, "name": "a", "widths": [3, 1], "covariate": 0},
        {"columns": [3]},
        {"columns": [-1]},
        {"columns": [0, 1]},
        {"columns": ["x2"]},
        {"width": 4},
        {"type": "eval"},
    ],
)
def test_damaged_locations_in_files_are_refused(column_model, change):
    state = copy.deepcopy(column_model.to_state())
    state.description["residual"]["location"] |= change
    with pytest.raises(StoreError, match="damaged"):
        JointModel.from_state(state)


def test_it_is_a_parameter_as_scikit_learn_knows_them():
    fit = JointDistribution(location=HistGradientBoostingRegressor())
    assert fit.get_params()["location__max_iter"] == 100
    copy = clone(fit.set_params(location__max_iter=7))
    assert copy.location is not fit.location
    assert copy.location.max_iter == 7
    x, y = rows()
    model = given(TREE)
    model.fit(x, y)
    assert not hasattr(model.location, "tree_")  # the clones are fitted, never the parameter


def test_other_parameters_go_together_with_a_location():
    x, y = with_predictions()
    for changes in ({"residual": True}, {"calibration": True}, {"constraint": "none"}):
        fit = given("x2", **changes).fit(x, y)
        assert fit.model_.residual is not None
    # Integers stay what they are.
    counts = np.floor(4 * y)
    made = np.hstack([x[:, :2], predictions(x[:, :2], counts, fold_of_rows(0, len(x), N_FOLDS))])
    values = given("x2").fit(made, counts).conditional(made[:50]).quantile([0.1, 0.5, 0.9])
    np.testing.assert_array_equal(values, np.floor(values))


# What is refused


class Strange(RegressorMixin, BaseEstimator):
    """A regressor whose fit or prediction is of no use."""

    def __init__(self, how="nan"):
        self.how = how

    def fit(self, X, y):
        if self.how == "fails":
            raise RuntimeError("it went wrong")
        self.fitted_ = True
        return self

    def predict(self, X):
        if self.how == "predict":
            raise RuntimeError("it went wrong")
        if self.how == "shape":
            return np.zeros((len(X), 3))
        if self.how == "short":
            return np.zeros(len(X) - 1)
        return np.where(X[:, 0] > 1.0, np.nan, 0.0)


@pytest.mark.parametrize(
    ("location", "changes", "words"),
    [
        ("missing", {}, r"'missing' is no column of x: there are x0, x1, x2"),
        (["x0", "x2"], {}, r"names 2 columns, y has 1 \(y0\)"),
        ([], {}, r"location must be a scikit-learn regressor"),
        (7, {}, r"got 7, which lacks fit, predict, get_params, set_params"),
        (DecisionTreeRegressor, {}, r"got the class DecisionTreeRegressor: give an object"),
        (LogisticRegression(), {}, r"got the classifier LogisticRegression"),
        (KMeans(2), {}, r"got the clusterer KMeans: residuals are those of predicted numbers"),
        (GridSearchCV(KMeans(), {}), {}, r"got the clusterer GridSearchCV"),
        (IsolationForest(), {}, r"got the outlier detector IsolationForest"),
        (GaussianMixture(), {}, r"got the density estimator GaussianMixture"),
        (StandardScaler(), {}, r"lacks predict"),
        (Strange("fails"), {}, r"Strange can't be fitted to \d+ rows of x.*went wrong"),
        (Strange("predict"), {}, r"Strange fails to predict: it went wrong"),
        (Strange("shape"), {}, r"Strange predicts an array of shape \(\d+, 3\).*y has 1 column"),
        (Strange("short"), {}, r"shape \(\d+,\) at \d+ rows"),
        (Strange("nan"), {}, r"Strange predicts NaN or infinity at \d+ of \d+ rows"),
        ("x2", {"residual": False}, r"location= needs residual 'auto' or True, got False"),
        ("x2", {"constraint": "coupling"}, r"needs constraint='none' or 'normalized'"),
        ("x2", {"support_size": 0}, r"needs laws, got support_size=0"),
        ("x2", {"n_folds": 1}, r"needs n_folds of at least 2, got 1"),
        (TREE, {"n_folds": 1}, r"needs n_folds of at least 2, got 1"),
    ],
)
def test_unusable_locations_are_refused(location, changes, words):
    x, y = with_predictions()
    with pytest.raises(DataError, match=words):
        given(location, **changes).fit(x, y)


def test_nan_is_named_by_its_column(tmp_path):
    x, y = with_predictions()
    x[7, 2] = np.nan
    with pytest.raises(DataError, match=r"'?x2'?.*1.*row 7"):
        given("x2").fit(x, y)
    x, y = rows(9000)
    x[8001, 1] = np.nan  # beyond the row sample, in the pass alone
    with pytest.raises(DataError, match=r"x1.*8001|8,001"):
        given(TREE, sample_size=200).fit(da.from_array(x, chunks=(3000, 2)), y)
    # The rows where x is finite, and the regressor's values are not, are beyond the row sample too.
    x = np.where(x > 0.9, 0.9, np.nan_to_num(x))
    x[8500, 0] = 2.0
    with pytest.raises(DataError, match="Strange predicts NaN"):
        given(Strange("nan"), sample_size=200).fit(da.from_array(x, chunks=(3000, 2)), y)


def test_labels_and_growing_have_no_location():
    x, y = with_predictions()
    with pytest.raises(DataError, match="numeric columns of y"):
        JointClassifier(**MEDIAN, location="x2").fit(x, np.where(y[:, 0] > 0, "a", "b"))
    with pytest.raises(DataError, match="takes no more rows"):
        given("x2").partial_fit(x, y)
    fit = given("x2").fit(x, y)
    with pytest.raises(DataError, match=r"takes no more rows.*no location="):
        fit.partial_fit(x, y)
    with pytest.raises(DataError, match=r"don't add up: fit without location=$"):
        fit.set_params(location=None).partial_fit(x, y)


def test_the_command_takes_a_column(tmp_path):
    x, y = with_predictions()
    path = str(write_store(tmp_path / "s.zarr", x, y))
    options = ["--location", "x2", "--kernel", "median", "--tol", "1e-2", "--folds", str(N_FOLDS)]
    plan = CliRunner().invoke(cli, ["fit", path, *options, "--dry-run"])
    assert "from column x2, in the same pass" in " ".join(plan.output.split())
    out = tmp_path / "m"
    done = CliRunner().invoke(cli, ["fit", path, *options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    np.testing.assert_array_equal(load(out).predict(x[:9]), given("x2").fit(path).predict(x[:9]))
    grown = CliRunner().invoke(cli, ["fit", path, *options, "--growing", "--out", str(out)])
    assert "leave --location out" in grown.output
    wrong = CliRunner().invoke(cli, ["fit", path, "--location", "a", "--out", str(tmp_path / "n")])
    assert "'a' is no column of x" in " ".join(wrong.output.split())


# A regressor that trees join


TREES = Tuning(rows=300, max_rank=40, evaluations=0)
FEW = DecisionTreeRegressor(max_leaf_nodes=8, random_state=0)


def steps(n=400, seed=1):
    """A jump that few leaves miss."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 4, size=(n, 2))
    return x, np.floor(3 * x[:, :1]) + 0.1 * rng.normal(size=(n, 1))


@pytest.fixture(scope="module")
def joined():
    """A tree of few leaves, joined by others, and the errors by which their share was chosen."""
    seen = []

    def recorded(values, target, weights):
        seen.append((values, law_error(values, target, weights)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cme_dask.estimators.locating.law_error", recorded)
        fit = JointDistribution(location=FEW, tuning=TREES, n_folds=N_FOLDS).fit(*steps())
    return fit, seen


def test_trees_join_a_regressor_that_predicts_worse(joined):
    fit, _ = joined
    location, (x, y) = fit.model_.residual.location, steps()
    assert isinstance(location, MixedMean)
    words = fit.model_.about["residual"]["location"]
    share = location.share
    assert words.startswith(f"{share:.0%} DecisionTreeRegressor, {1 - share:.0%} ")
    assert words in repr(fit.model_)
    assert 0.1 <= share < 0.5
    alone = clone(FEW).fit(x, y[:, 0]).predict(x)[:, None]
    np.testing.assert_allclose(location.given(x), alone)
    both = share * alone + (1 - share) * location.other(x)
    np.testing.assert_allclose(location(x), both, rtol=1e-12)
    more, target = steps(2000, 5)
    errors = [np.abs(mean(more) - target).mean() for mean in (location, location.given)]
    assert errors[0] < 0.6 * errors[1]
    assert 0.0 < fit.model_.residual.scale[0] <= 1.0


def test_the_share_is_the_best_for_laws_at_rows_that_neither_has_seen(joined):
    fit, seen = joined
    x, y = steps()
    assert len(seen) == 10
    best = int(np.argmin([error for _, error in seen]))
    assert fit.model_.residual.location.share == pytest.approx((best + 1) / 10)
    # The last one is the given regressor alone, without each row's own fold; rows are shuffled.
    made = predictions(x, y, fold_of_rows(0, len(x), N_FOLDS), FEW)
    np.testing.assert_allclose(np.sort(seen[-1][0], axis=0), np.sort(made, axis=0))


def test_a_mixed_location_is_saved_where_both_are_trees(tmp_path, joined):
    fit, _ = joined
    fit.save(tmp_path / "m")
    again, asked = load(tmp_path / "m"), steps(50, 3)[0]
    for answer in ("mean", "std", "median"):
        each = [getattr(model.conditional(asked), answer)() for model in (fit, again)]
        np.testing.assert_array_equal(*each)
    x, y = steps()
    shallow = replace(TREES, trees=("shallow",))
    linear = JointDistribution(location=LinearRegression(), tuning=shallow).fit(x, y)
    assert isinstance(linear.model_.residual.location, MixedMean)
    with pytest.raises(DataError, match=r"LinearRegression.*no pickled"):
        linear.save(tmp_path / "n")


@pytest.mark.parametrize(
    "change", [{"share": 0.0}, {"share": 1.5}, {"share": "a"}, {"other": None}, {"given": 3}]
)
def test_damaged_mixed_locations_are_refused(joined, change):
    state = joined[0].model_.to_state()
    state.description["residual"]["location"] |= change
    with pytest.raises(StoreError, match="damaged"):
        JointModel.from_state(state)


def test_locations_of_other_columns_do_not_mix(joined):
    state = joined[0].model_.to_state()
    state.description["residual"]["location"]["other"]["width"] = 3
    with pytest.raises(StoreError, match="damaged"):
        JointModel.from_state(state)


@pytest.mark.parametrize("why", ["as it is", "kernels given", "better", "column"])
def test_a_regressor_stays_alone(why):
    x, y = steps(300)
    location, changes = FEW, {"tuning": TREES}
    if why == "as it is":
        changes["residual"] = True
    if why == "kernels given":
        changes = {"kernel_x": "median", "kernel_y": "median", "tol": 1e-2}
    if why == "better":
        y = x @ [[1.0], [2.0]] + 0.01 * np.random.default_rng(0).normal(size=y.shape)
        location = LinearRegression()
    if why == "column":
        x, location = np.hstack([x, y + 1.0]), "x2"
    fit = JointDistribution(location=location, n_folds=N_FOLDS, **changes).fit(x, y)
    assert not isinstance(fit.model_.residual.location, MixedMean)
    words = "column x2" if why == "column" else type(location).__name__
    assert fit.model_.about["residual"]["location"] == words


# A regressor that a ridge regression joins


SMOOTH = replace(TREES, trees=())


def skewed(n=400, seed=2, q=1):
    """A smooth function, whose exponential has errors that grow with it; the second column not."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 2))
    log = 2.0 * np.sin(x[:, :1]) + x[:, 1:] + 0.2 * rng.normal(size=(n, 1))
    return x, np.hstack([np.exp(log), log + 0.1 * rng.normal(size=(n, 1))][:q])


@pytest.fixture(scope="module", params=[1, 2], ids=["scores", "columns"])
def beside_ridge(request):
    """A tree of few leaves, joined by a ridge regression; one column of y is located in scores."""
    x, y = skewed(q=request.param)
    fit = JointDistribution(location=FEW, tuning=SMOOTH, n_folds=N_FOLDS)
    contexts = []

    def recorded(*args):
        contexts.append(join_location(*args))
        return contexts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cme_dask.estimators.locating.join_location", recorded)
        return fit.fit(x, y), x, y, contexts[0].given.residuals


def test_a_ridge_regression_joins_a_regressor_in_its_coordinates(beside_ridge):
    fit, x, y, _ = beside_ridge
    moved, about = fit.model_.residual, fit.model_.about["residual"]
    location, share = moved.location, moved.location.share
    assert isinstance(location.other, MeanFunction)
    assert about["location"] == (
        f"{share:.0%} DecisionTreeRegressor, {1 - share:.0%} kernel ridge regression"
    )
    assert 0.1 <= share < 0.5
    one_column = y.shape[1] == 1
    assert (location.transform is None, about["transform"] == "raw") == (not one_column,) * 2
    alone = clone(FEW).fit(x, y).predict(x).reshape(y.shape)
    np.testing.assert_allclose(location.given(x), alone)
    both = share * moved.forward(alone) + (1 - share) * location.other(x)
    np.testing.assert_allclose(location(x), both, rtol=1e-12)
    np.testing.assert_array_equal(moved.placed(x)[0], location(x))
    np.testing.assert_array_equal(moved.placed(x)[1], np.hstack([x, location(x)]))
    assert fit.n_passes_ == 1


def test_laws_of_a_regressor_that_a_ridge_regression_joins_are_better(beside_ridge):
    fit, x, y, _ = beside_ridge
    alone = JointDistribution(location=FEW, residual=True, tuning=SMOOTH, n_folds=N_FOLDS)
    asked, target = skewed(1500, 7, y.shape[1])
    joined, single = (
        each.conditional(asked).crps(target).mean() for each in (fit, alone.fit(x, y))
    )
    assert joined < 0.97 * single


def test_a_location_that_a_ridge_regression_joins_is_saved(tmp_path, beside_ridge):
    fit, *_ = beside_ridge
    fit.save(tmp_path / "m")
    again, asked = load(tmp_path / "m"), skewed(50, 3)[0]
    assert fit.model_.to_state().schema_version == 6
    for answer in ("mean", "std", "median"):
        each = [getattr(model.conditional(asked), answer)() for model in (fit, again)]
        np.testing.assert_array_equal(*each)


@pytest.mark.parametrize("beside_ridge", [1], indirect=True)
def test_the_plan_names_what_joins_a_regressor(beside_ridge):
    fit, x, y, _ = beside_ridge
    plan = JointDistribution(location=FEW, tuning=SMOOTH, n_folds=N_FOLDS).plan(x, y)
    assert plan.location == fit.model_.about["residual"]["location"]
    assert plan.passes == fit.n_passes_ == 1
    assert plan.parts["given location"] > 0.0


@pytest.mark.parametrize("beside_ridge", [1], indirect=True)
def test_a_mixture_has_the_coordinates_of_its_residuals(beside_ridge):
    state = beside_ridge[0].model_.to_state()
    state.description["residual"]["location"]["transform"] = None
    with pytest.raises(StoreError, match=r"damaged.*coordinates"):
        JointModel.from_state(state)


@pytest.mark.parametrize("beside_ridge", [1], indirect=True)
def test_a_ridge_regression_joins_in_rows_without_a_fold_of_theirs(beside_ridge):
    """Each mixture is that of parts which have not seen the fold."""
    fit, x, y, residuals = beside_ridge
    folds = fold_of_rows(0, len(x), N_FOLDS)
    made = predictions(x, y, folds, FEW)
    share = residuals.location.share
    coefs = [each.other.coef for each in residuals.each]
    assert all(np.abs(coef - residuals.location.other.coef).max() > 0.0 for coef in coefs)
    ridge = np.empty_like(y)
    for fold, each in enumerate(residuals.each):
        ridge[folds == fold] = each.other(x[folds == fold])
    expected = share * residuals.scores(made) + (1 - share) * ridge
    np.testing.assert_allclose(residuals.held_out(x, folds), expected, rtol=1e-10)
    cells = fit.model_.residual.model.y.cells
    errors = residuals.scores(y) - expected
    np.testing.assert_allclose(cells.masses @ cells.means, errors.mean(axis=0), atol=1e-10)
