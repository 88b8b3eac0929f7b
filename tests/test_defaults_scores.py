"""Scores of default fits: scikit-learn's scorers, and models that predict once they are loaded."""

import dask.array as da
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    KernelLogisticRegression,
    load,
)
from cme_dask.errors import DataError
from cme_dask.metrics import crps_scorer, log_score_scorer


def rows(n=120, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 1))
    y = np.sin(2 * x[:, 0]) + (0.1 + 0.4 * (x[:, 0] > 0)) * rng.normal(size=n)
    return x, y, np.where(y > 0, "high", "low")


FITS = {
    "joint": (JointDistribution, "y"),
    "embedding": (ConditionalMeanEmbedding, "y"),
    "joint classifier": (JointClassifier, "label"),
    "embedding classifier": (EmbeddingClassifier, "label"),
    "logistic": (KernelLogisticRegression, "label"),
    "numbers as labels": (JointClassifier, "code"),
    "truths as labels": (EmbeddingClassifier, "truth"),
}


@pytest.fixture(scope="module", params=FITS)
def fitted(request, tmp_path_factory):
    x, y, label = rows()
    kind, name = FITS[request.param]
    target = {"y": y, "label": label, "code": np.digitize(y, [-0.5, 0.5]) * 10, "truth": y > 0}
    model = kind().fit(x, target[name])
    path = tmp_path_factory.mktemp("saved") / "model"
    model.save(path)
    return model, load(path), x, target[name]


def test_loaded_models_predict_and_score_as_their_estimators(fitted):
    model, loaded, x, target = fitted
    assert_array_equal(loaded.predict(x), model.predict(x))
    assert loaded.predict(x).dtype == model.predict(x).dtype
    assert loaded.score(x, target) == pytest.approx(model.score(x, target), abs=1e-12)
    w = np.linspace(1, 2, len(x))
    weighted = model.score(x, target, sample_weight=w)
    assert loaded.score(x, target, sample_weight=w) == pytest.approx(weighted, abs=1e-12)
    if hasattr(model, "predict_proba"):
        assert_array_equal(loaded.predict_proba(x), model.predict_proba(x))
        assert_array_equal(loaded.classes, model.classes_)
    else:
        with pytest.raises(DataError, match="only one column of labels"):
            loaded.predict_proba(x)
    if hasattr(model, "conditional"):
        assert_array_equal(loaded.conditional(x).weights(), model.conditional(x).weights())


QUICK = {"kernel_x": "median", "kernel_y": "median", "tol": 0.1, "residual": False}


@pytest.mark.parametrize("labels", [("down", "up"), (3, 7), (1.0, 2.0), (False, True)])
def test_accuracy_is_that_of_labels_as_users_have_them(labels, tmp_path):
    x, y, _ = rows()
    seen = np.array(labels)[(y > 0).astype(int)]
    fit = JointDistribution(**QUICK).fit(x, pd.Series(seen, name="level").astype("category"))
    fit.save(tmp_path / "m")
    model = load(tmp_path / "m")
    hits = model.predict(x) == seen.astype(str)
    w = np.linspace(1, 2, len(x))
    for given in (seen, seen[:, None], seen.tolist(), seen.astype(str), pd.DataFrame({"q": seen})):
        assert model.score(x, given) == hits.mean()
        assert model.score(x, given, w) == pytest.approx(np.average(hits, weights=w))
    partly = np.where(np.arange(len(x)) % 2 == 0, seen.astype(str), "other")
    assert model.score(x, partly) == hits[::2].mean() / 2
    with pytest.raises(DataError, match=r"column 'level' has the unknown 'other' \(120 rows\)"):
        model.score(x, np.full(len(x), "other"))
    with pytest.raises(DataError, match=r"y must have shape \(120,\), got \(119,\)"):
        model.score(x, seen[:-1])
    with pytest.raises(DataError, match=r"labels must have shape \(n,\), got \(60, 2\)"):
        model.score(x, seen.reshape(60, 2))


def test_scores_of_means_need_rows_of_the_same_shape():
    x, y, _ = rows()
    one = JointDistribution(**QUICK).fit(x, y).model_
    both = np.column_stack([y, x[:, 0]])
    two = JointDistribution(**QUICK).fit(x, both).model_
    assert one.score(x, y) == one.score(x, y[:, None]) == one.score(x, pd.Series(y))
    assert two.score(x, both) == pytest.approx(r2_score(both, two.predict(x)))
    for model, wrong in ((two, both.T), (two, y), (one, both), (one, y[None]), (one, y[:-1])):
        with pytest.raises(DataError, match="y must have shape"):
            model.score(x, wrong)


@pytest.mark.parametrize("fitted", [JointDistribution, ConditionalMeanEmbedding])
@pytest.mark.parametrize("saved", [False, True])
def test_scores_of_means_read_tables_and_masks_as_queries_do(fitted, saved):
    x, y, _ = rows()
    both = pd.DataFrame({"a": y, "b": 10.0 + x[:, 0]})
    model = fitted(kernel_x="median", kernel_y="median").fit(x, both)
    model = model.model_ if saved else model
    expected = r2_score(both, model.predict(x))
    assert model.score(x, both[["b", "a"]]) == pytest.approx(expected)
    assert model.score(x, {"b": both["b"], "a": both["a"]}) == pytest.approx(expected)
    with pytest.raises(DataError, match=r"y lacks the columns? 'b'"):
        model.score(x, both.rename(columns={"b": "c"}))
    gone = both.copy()
    gone.iloc[7, 0] = np.nan
    masked = np.ma.array(both.to_numpy(), mask=gone.isna().to_numpy())
    for absent in (gone, gone.to_numpy(), masked):
        with pytest.raises(DataError, match=r"column 'a' has 1 \(first at row 7\)"):
            model.score(x, absent)
    with pytest.raises(DataError, match=r"column 'weights' has 1 \(first at row 3\)"):
        model.score(x, both, np.where(np.arange(len(x)) == 3, np.nan, 1.0))


def test_loaded_models_answer_dask_arrays_lazily(fitted):
    model, loaded, x, _ = fitted
    lazy = da.from_array(x, chunks=50)
    for name in ("predict", "predict_proba") if hasattr(model, "classes_") else ("predict",):
        found = getattr(loaded, name)(lazy)
        assert isinstance(found, da.Array)
        expected = getattr(model, name)(x)
        assert found.dtype == expected.dtype
        if expected.dtype.kind == "f":
            assert_allclose(found.compute(), expected, rtol=1e-9)
        else:
            assert_array_equal(found.compute(), expected)


def test_classifiers_exclude_no_label(fitted):
    model, _, x, target = fitted
    if hasattr(model, "classes_"):
        shares = model.predict_proba(x)
        assert shares.min() > 0.0
        assert_allclose(shares.sum(axis=1), 1.0)
        assert np.isfinite(log_score_scorer(model, x, target))


def test_scorers_judge_held_out_laws_in_cross_validation():
    x, y, _ = rows()
    scores = cross_val_score(JointDistribution(), x, y, cv=2, scoring=crps_scorer)
    fit = JointDistribution().fit(x[60:], y[60:])
    first = fit.conditional(x[:60])
    assert scores[0] == pytest.approx(-np.mean(first.crps(y[:60])))
    marginal = np.abs(y[:60, None] - y[60:]).mean() - np.abs(y[60:, None] - y[60:]).mean() / 2
    assert -marginal < scores[0] < 0.0
    assert log_score_scorer(fit, x[:60], y[:60]) == pytest.approx(
        np.mean(first.log_pdf(y[:60], paired=True))
    )
    w = np.arange(60.0)
    weighted = crps_scorer(fit, x[:60], y[:60], sample_weight=w)
    assert weighted == pytest.approx(-np.average(first.crps(y[:60]), weights=w))


def test_scorers_choose_parameters_through_pipelines():
    x, y, label = rows()
    quick = JointDistribution(kernel_x="median", kernel_y="median", residual=False)
    pipeline = make_pipeline(StandardScaler(), quick)
    grid = {"jointdistribution__reg": [1e-4, 10.0]}
    for scoring in (crps_scorer, log_score_scorer):
        search = GridSearchCV(pipeline, grid, cv=2, scoring=scoring).fit(x, y)
        assert search.best_params_ == {"jointdistribution__reg": 1e-4}
    law = quick.fit(x, pd.Series(label, name="level"))
    shares = np.asarray(law.conditional(x).predict_proba())
    codes = [law.model_.y.columns.categories["level"].index(each) for each in label]
    expected = np.log(shares[np.arange(len(x)), codes]).mean()
    assert log_score_scorer(law, x, label) == pytest.approx(expected)
    with pytest.raises(DataError, match=r"the label '.*est'"):
        log_score_scorer(law, x, [f"{each}est" for each in label])
    with pytest.raises(DataError, match="has no conditional laws"):
        crps_scorer(KernelLogisticRegression().fit(x, label), x, label)
    with pytest.raises(DataError, match="the label 'top'"):
        log_score_scorer(KernelLogisticRegression().fit(x, label), x, np.full(len(x), "top"))


@pytest.mark.parametrize("columns", [["y", "level"], ["level", "y"], ["level", "other"]])
def test_labels_beside_other_columns_have_no_log_score(columns):
    x, y, label = rows()
    table = pd.DataFrame({"y": y, "level": label, "other": label[::-1]})[columns]
    fit = JointDistribution(kernel_x="median", kernel_y="median").fit(x, table)
    with pytest.raises(DataError, match=r"y has labels \('level'.*score one column of labels"):
        log_score_scorer(fit, x, table)
