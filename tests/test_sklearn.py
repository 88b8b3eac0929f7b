"""The estimators among scikit-learn's: its own checks, pipelines, searches, labels of any kind."""

from unittest import SkipTest

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from conftest import shorten_searches, write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import DataConversionWarning
from sklearn.exceptions import NotFittedError as SklearnNotFitted
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    KernelLogisticRegression,
    MulticlassEmbedding,
    PivotedCholesky,
    kernels,
)
from cme_dask.errors import DataError
from cme_dask.estimators.classifiers import labelled_sample

REGRESSORS = (
    JointDistribution(kernel_x="median", kernel_y="median", residual=False, n_folds=2),
    ConditionalMeanEmbedding(kernel_x="median", reg=1e-3, n_folds=2),
)
CLASSIFIERS = (
    JointClassifier(kernel_x="median", kernel_y="median", reg=1e-3, n_folds=2),
    EmbeddingClassifier(kernel_x="median", reg=1e-3, n_folds=2),
    KernelLogisticRegression(reg=1e-3, gradient_tol=1e-3),
    MulticlassEmbedding(kernel_x="median", reg=1e-3, n_folds=2, max_iter=0),
)

DEFAULTS = (
    JointDistribution,
    ConditionalMeanEmbedding,
    JointClassifier,
    EmbeddingClassifier,
    KernelLogisticRegression,
    MulticlassEmbedding,
    PivotedCholesky,
)

EXPECTED = {
    "check_n_features_in_after_fitting": "the message names the columns that are expected, not the "
    "class of the estimator: models say it, too, which have no class of scikit-learn",
    "check_dtype_object": "columns of objects are refused: numbers come as numbers, labels as text",
    "check_fit1d": "one column may come as (n,), as y may",
    "check_fit2d_predict1d": "one point of d columns may come as (d,)",
    "check_sample_weight_equivalence_on_dense_data": "folds, row sample and pivots depend "
    "on the numbers of the rows, so learned kernels are only about the same for a weight of two as "
    "for two rows",
}
LOCATED = {
    "check_fit_score_takes_y": "a default fit may have a location, to which no rows can be added: "
    "partial_fit after fit says so, and a first call of partial_fit has none"
}


def expected_failures(kind):
    found = EXPECTED | (LOCATED if kind is JointDistribution else {})
    if kind is PivotedCholesky:  # takes no weights of scikit-learn's name
        found = {n: why for n, why in found.items() if "weight" not in n}
    return found


def check_defaults(kind, left_out=()):
    """All checks of scikit-learn pass but those that are listed with a reason, and these fail."""
    expected, outcome = expected_failures(kind), {}
    with dask.config.set(scheduler="synchronous"):
        for estimator, check in estimator_checks_generator(kind()):
            name = getattr(check, "func", check).__name__
            if name in left_out:
                continue
            try:
                check(estimator)
                outcome.setdefault(name, None)
            except SkipTest:
                pass
            except Exception as error:  # noqa: BLE001 - whatever a check meets
                outcome[name] = repr(error)
    failed = {name: error for name, error in outcome.items() if error is not None}
    surprises = {name: error for name, error in failed.items() if name not in expected}
    assert not surprises
    assert failed.keys() >= expected.keys() & outcome.keys()
    assert len(outcome) - len(failed) >= 40 - len(left_out)


SLOW_CHECKS = (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    KernelLogisticRegression,
    MulticlassEmbedding,
)
QUICK_CHECKS = tuple(kind for kind in DEFAULTS if kind not in SLOW_CHECKS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("least_searches")
@pytest.mark.parametrize("kind", QUICK_CHECKS, ids=lambda kind: kind.__name__)
def test_checks_of_scikit_learn_on_defaults(kind, monkeypatch):
    """With brief searches, and without the checks of the largest tables: see the slow one."""
    shorten_searches(monkeypatch, rows=200, max_rank=15, evaluations=0)
    monkeypatch.setattr("cme_dask.learning.search.GRID", (0.4, 1.2))
    large = "check_regressors_train", "check_regressor_data_not_an_array", "check_classifiers_train"
    check_defaults(kind, large)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_all_checks_of_scikit_learn_on_defaults(kind):
    check_defaults(kind)


def table(n=300, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 2))
    y = np.sin(2 * x[:, 0]) + 0.3 * rng.standard_normal(n)
    return x, y, np.array(["low", "mid", "top"])[np.digitize(y, [-0.5, 0.5])]


@pytest.mark.parametrize("estimator", REGRESSORS, ids=lambda e: type(e).__name__)
def test_regressors_in_pipelines_and_searches(estimator):
    x, y, _ = table()
    with dask.config.set(scheduler="synchronous"):
        pipeline = make_pipeline(StandardScaler(), clone(estimator)).fit(x, y)
        assert pipeline.score(x, y) > 0.7
        scores = cross_val_score(clone(estimator), x, y, cv=3)
        assert scores.min() > 0.5
        name = pipeline.steps[-1][0]
        search = GridSearchCV(pipeline, {f"{name}__reg": [1e-4, 10.0]}, cv=3).fit(x, y)
    assert search.best_params_ == {f"{name}__reg": 1e-4}


@pytest.mark.parametrize("estimator", CLASSIFIERS, ids=lambda e: type(e).__name__)
def test_classifiers_in_pipelines_and_searches(estimator):
    x, _, labels = table()
    with dask.config.set(scheduler="synchronous"):
        pipeline = make_pipeline(StandardScaler(), clone(estimator)).fit(x, labels)
        assert pipeline.score(x, labels) > 0.7
        assert pipeline.classes_.tolist() == ["low", "mid", "top"]
        assert cross_val_score(clone(estimator), x, labels, cv=3).min() > 0.6
        name = pipeline.steps[-1][0]
        grid = {f"{name}__reg": [1e-2, 1e3]}
        search = GridSearchCV(pipeline, grid, cv=3, scoring="neg_log_loss").fit(x, labels)
    assert search.best_params_ == {f"{name}__reg": 1e-2}


@settings(max_examples=15)
@given(
    seed=st.integers(0, 100),
    far=st.floats(0.1, 1e6),
    estimator=st.sampled_from(CLASSIFIERS),
)
def test_probabilities_are_probabilities(seed, far, estimator):
    x, _, labels = table(120, seed)
    model = clone(estimator).fit(x, labels, scheduler="synchronous")
    points = far * np.random.default_rng(seed).standard_normal((50, 2))
    found = model.predict_proba(points)
    assert found.shape == (50, 3)
    assert (found >= 0.0).all()
    assert np.abs(found.sum(axis=1) - 1.0).max() < 1e-12
    assert model.predict(points).tolist() == model.classes_[found.argmax(axis=1)].tolist()


@pytest.mark.parametrize("estimator", CLASSIFIERS, ids=lambda e: type(e).__name__)
def test_labels_of_any_kind_are_the_same_classes(estimator, tmp_path):
    x, _, text = table()
    codes = np.unique(text, return_inverse=True)[1]
    plain = clone(estimator).fit(x, text, scheduler="synchronous").predict_proba(x)
    group = zarr.group(tmp_path / "z.zarr")
    group.create_array("y", data=codes, chunks=(70,))
    for labels, classes in (
        (codes, [0, 1, 2]),
        (codes * 10.0, [0.0, 10.0, 20.0]),
        (text.astype(object), ["low", "mid", "top"]),
        (pd.Series(text, name="size"), ["low", "mid", "top"]),
        (text.tolist(), ["low", "mid", "top"]),
        (da.from_array(text, chunks=70), ["low", "mid", "top"]),
        (da.from_array(codes[:, None], chunks=(70, 1)), [0, 1, 2]),
        (group["y"], [0, 1, 2]),
    ):
        model = clone(estimator).fit(x, labels, scheduler="synchronous")
        assert model.classes_.tolist() == classes
        assert np.abs(model.predict_proba(x) - plain).max() < 1e-12
        assert model.predict(x).dtype == model.classes_.dtype
    truths = clone(estimator).fit(x, text == "top", scheduler="synchronous")
    assert truths.predict(x).dtype == bool
    with pytest.warns(DataConversionWarning, match="column-vector"):
        clone(estimator).fit(x, text[:, None], scheduler="synchronous")


def test_classes_of_a_store_are_the_labels_of_its_column(tmp_path):
    x, _, text = table()
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "size": text})
    from cme_dask import open_sample

    sample = open_sample(frame, x_columns=["a", "b"], y_columns=["size"])
    model = KernelLogisticRegression().fit(sample, scheduler="synchronous")
    plain = KernelLogisticRegression().fit(x, text, scheduler="synchronous")
    assert sorted(model.classes_.tolist()) == plain.classes_.tolist()
    assert (model.predict(frame[["b", "a"]]) == plain.predict(x)).mean() > 0.999
    write_store(tmp_path / "s.zarr", x, x[:, 0])
    with pytest.raises(DataError, match="one categorical column"):
        KernelLogisticRegression().fit(tmp_path / "s.zarr")
    with pytest.raises(DataError, match="one categorical column"):
        JointClassifier().fit(x)


DAYS = np.where(np.arange(300) % 2, "2020-01-01", "2021-01-01").astype("M8[D]")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.full(300, "a"), "at least two classes, got 1 class: 'a'$"),
        (np.where(np.arange(300) == 7, np.nan, np.arange(300) % 2), r"1 \(first at row 7\)"),
        (np.array([None, *["a", "b"] * 150], dtype=object)[:300], r"1 \(first at row 0\)"),
        (np.linspace(0, 1, 300), "Unknown label type"),
        (DAYS, r"holds times \(datetime64\[D\]\): convert it, .* text by \.astype\(str\)"),
        (pd.Series(DAYS, name="day"), r"day must hold labels .* holds times \(datetime64"),
        (pd.Series(DAYS).dt.tz_localize("UTC"), "holds objects of type Timestamp: convert it"),
        (DAYS - DAYS[0], r"holds times \(timedelta64"),
        (da.from_array(DAYS, chunks=100), r"holds times \(datetime64"),
        (np.array([1, "1"] * 150, dtype=object), "objects of several types, int, str: convert it"),
        (da.from_array(np.array([1, "1"] * 150, dtype=object), chunks=100), "of one type, .* text"),
        (np.array([1, 2] * 150, dtype=object), "holds objects of type int: convert it"),
        (np.array([b"a", b"b"] * 150), "holds values of type .S1: convert it"),
        (da.linspace(0.25, 1, 300, chunks=100), "labels must be whole numbers or texts"),
        (da.zeros((300, 2), chunks=100), r"labels must have shape \(n,\)"),
        (np.zeros((300, 2)), "1d array"),
    ],
)
def test_bad_labels_are_one_sentence(labels, message):
    x = table()[0]
    for estimator in CLASSIFIERS:
        with pytest.raises(ValueError, match=message):
            clone(estimator).fit(x, labels, scheduler="synchronous")


def test_objects_that_are_texts_are_labels():
    x, labels = table()[0], np.array([*map(np.str_, "ab"), "a", "b"] * 75, dtype=object)
    fit = EmbeddingClassifier(kernel_x=kernels.Gaussian(1.0), reg=1e-3, tol=1e-2)
    assert fit.fit(x, labels, scheduler="synchronous").classes_.tolist() == ["a", "b"]


def test_bad_classes_are_one_sentence():
    x, labels = table()[0], np.where(np.arange(300) % 2, "a", "b")
    for classes in (np.array(["a", "b", 1], dtype=object), np.array(DAYS[:2])):
        with pytest.raises(DataError, match="classes must hold labels that are numbers, booleans"):
            JointClassifier().partial_fit(x, labels, classes=classes)


def test_codes_of_lazy_labels_are_lazy():
    reads = []

    def block(values):
        reads.append(len(values))
        return values

    lazy = da.from_array(np.arange(1000) % 3, chunks=100).map_blocks(block, dtype=np.int64)
    sample, classes = labelled_sample(np.zeros((1000, 1)), lazy, None)
    seen = len(reads)
    assert classes.tolist() == [0, 1, 2]
    assert sample.columns[1].categories == {"y": ("0", "1", "2")}
    assert hasattr(sample.sources[1].array, "dask")
    assert len(reads) == seen


def test_predictions_have_the_shape_of_y(tmp_path):
    x, y, text = table()
    both = np.column_stack([y, y])
    write_store(tmp_path / "s.zarr", x, y)
    for estimator in REGRESSORS:
        for data, shape in (
            ((x, y), (300,)),
            ((x, y[:, None]), (300, 1)),
            ((x, both), (300, 2)),
            ((x, y.tolist()), (300,)),
            ((tmp_path / "s.zarr",), (300,)),
        ):
            model = clone(estimator).fit(*data, scheduler="synchronous")
            assert model.predict(x).shape == shape
        frame = pd.DataFrame(x, columns=["a", "b"])
        model = clone(estimator).fit(frame, y, scheduler="synchronous")
        assert model.feature_names_in_.tolist() == ["a", "b"]
        assert not hasattr(model.fit(x, y, scheduler="synchronous"), "feature_names_in_")
        labelled = clone(estimator).fit(x, pd.Series(text), scheduler="synchronous")
        with pytest.raises(DataError, match="holds labels, which have no mean"):
            labelled.predict(x)


def test_regressors_predict_the_mean_of_the_law():
    x, y, _ = table()
    model = clone(REGRESSORS[0]).fit(x, y, scheduler="synchronous")
    assert np.array_equal(model.predict(x), model.conditional(x).mean())
    bare = clone(REGRESSORS[0]).set_params(support_size=0).fit(x, y, scheduler="synchronous")
    assert np.array_equal(bare.predict(x), bare.expect("y0", x))


def test_weights_have_two_names():
    x, y, labels = table()
    w = np.random.default_rng(1).exponential(size=300)
    for estimator, target in (*((e, y) for e in REGRESSORS), *((e, labels) for e in CLASSIFIERS)):
        one, two, none = (
            clone(estimator).fit(x, target, scheduler="synchronous", **weights)
            for weights in ({"weights": w}, {"sample_weight": w}, {})
        )
        method = "predict_proba" if hasattr(one, "predict_proba") else "predict"
        found = [getattr(m, method)(x) for m in (one, two, none)]
        assert np.array_equal(found[0], found[1])
        assert not np.allclose(found[0], found[2])
        with pytest.raises(DataError, match="give one of them"):
            clone(estimator).fit(x, target, weights=w, sample_weight=w)


def test_unfitted_estimators_say_so():
    for estimator in (*REGRESSORS, *CLASSIFIERS):
        with pytest.raises(SklearnNotFitted, match=type(estimator).__mro__[0].__name__[:5]):
            estimator.predict([[0.0, 0.0]])


def test_signed_probabilities_become_the_nearest_ones():
    x, _, labels = table()
    model = EmbeddingClassifier(kernel_x=kernels.Gaussian(0.5), reg=1e-6)
    model.fit(x, labels, scheduler="synchronous")
    signed, found = model.signed_proba(x), model.predict_proba(x)
    assert signed.min() < 0
    found = (301 * found - 1 / 3) / 300  # without the row that is shared among the labels
    found = np.where(found < 1e-12, 0.0, found)
    rng = np.random.default_rng(0)
    other = rng.dirichlet(np.ones(3), 1000)
    for s, p in zip(signed[:50], found[:50], strict=True):
        assert ((other - s) ** 2).sum(axis=1).min() >= ((p - s) ** 2).sum() - 1e-15
        kept = p > 0
        assert (np.argsort(p[kept]) == np.argsort(s[kept])).all()
