"""Which rows and columns later calls take, and what a call that fails leaves as it was."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import write_store
from numpy.testing import assert_allclose, assert_array_equal
from test_growing import ONE
from test_merge import (
    FUNCTIONS,
    KERNEL,
    N,
    W,
    X,
    Y,
    assert_same_model,
    estimator,
    fitted,
    whole_model,
)

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointDistribution,
    PivotedCholesky,
    kernels,
    load,
    merge,
    open_sample,
)
from cme_dask.cli.compute import Compute
from cme_dask.cli.scoring import score_model
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.errors import DataError, StoreError, ToleranceWarning
from cme_dask.estimators import cholesky, embedding_fit

PART = {"kernel_x": KERNEL, "kernel_y": KERNEL, "tol": 0.3, "reg": 1e-3, "support_size": 20}


def small(rows=slice(0, 600), **changed):
    return JointDistribution(**{**PART, **changed}).partial_fit(X[rows], Y[rows, :1], **ONE)


def test_functions_are_those_of_the_first_call():
    given = {"functions": FUNCTIONS, "weights": W[:600]}
    model = estimator().partial_fit(X[:600], Y[:600], **given, **ONE)
    other = {"positive": lambda y: 1000.0 * FUNCTIONS["positive"](y)}
    model.partial_fit(X[600:], Y[600:], weights=W[600:], functions=other, **ONE)
    assert_allclose(model.expect("positive", X[:9]), fitted().expect("positive", X[:9]), rtol=1e-9)


def test_declared_events_of_a_model_need_not_be_given_again():
    first = JointDistribution(**PART).fit(X[:300], Y[:300, :1], functions={"high": "y0 > 1"}).model_
    more = JointDistribution(**PART).partial_fit(X[300:600], Y[300:600, :1], like=first, **ONE)
    assert more.model_.about["events"] == first.about["events"]
    both = merge([first, more.model_])
    assert both.about["events"]["y"] == {"high": "y0 > 1"}
    other = {"high": "y0 > 2"}
    with pytest.raises(DataError, match="fitted with 'high' as the event 'y0 > 1', given is anoth"):
        JointDistribution(**PART).partial_fit(
            X[300:], Y[300:, :1], like=first, functions=other, **ONE
        )
    function = {"high": lambda y: y[:, 0] > 1.0}
    with pytest.raises(DataError, match="fitted with 'high' as the event"):
        JointDistribution(**PART).partial_fit(
            X[300:], Y[300:, :1], like=first, functions=function, **ONE
        )
    renamed = replace(more.model_, about=more.model_.about | {"events": {"y": other}})
    with pytest.raises(DataError, match=r"declared event 'high' of y differs \(y0 > 1; y0 > 2\)"):
        merge([first, renamed])


def test_merged_models_name_an_event_where_all_of_them_have_its_text():
    events = {"high": "y0 > 1", "low": "y0 < 0"}
    first = JointDistribution(**PART).fit(X[:300], Y[:300, :1], functions=events).model_
    more = JointDistribution(**PART).partial_fit(X[300:600], Y[300:600, :1], like=first, **ONE)
    function = replace(more.model_, about=more.model_.about | {"events": {"y": {"low": "y0 < 0"}}})
    for models in ([first, function], [function, first]):
        assert merge(models).about["events"]["y"] == {"low": "y0 < 0"}
    about = {key: value for key, value in function.about.items() if key != "events"}
    without = replace(function, about=about)
    for models in ([first, without], [without, first]):
        assert "events" not in merge(models).about


def test_rows_after_parts_with_numbers_of_their_own_follow_the_last():
    """A model of rows 600 to 1,200 alone, then the rest: folds are those of one table."""
    like = whole_model()
    model = estimator().partial_fit(
        X[600:1200],
        Y[600:1200],
        weights=W[600:1200],
        functions=FUNCTIONS,
        like=like,
        first_row=600,
        **ONE,
    )
    model.partial_fit(X[1200:], Y[1200:], weights=W[1200:], **ONE)
    first = estimator().partial_fit(
        X[:600], Y[:600], weights=W[:600], functions=FUNCTIONS, like=like, **ONE
    )
    assert_same_model(merge([first.model_, model.model_]), like)
    # A merged model goes on where the last of its parts ended.
    parts = [first.model_, model.model_]
    assert merge(parts).about["next_row"] == merge(parts[::-1]).about["next_row"] == N


def test_a_part_is_one_of_its_table_wherever_that_is_numbered():
    sample = open_sample(X, Y, weights=W)
    train, test = sample.split(0.3)
    like = whole_model()
    model = estimator().partial_fit(train, functions=FUNCTIONS, like=like, first_row=900, **ONE)
    numbers = np.arange(N)
    kept = train.part.selects(numbers, {})
    assert_array_equal(test.part.selects(numbers, {}), ~kept)
    assert model.moments_.rows.sum() == kept.sum()
    folds = train.folding.folds(900 + numbers[kept], {}, 10)
    assert_array_equal(model.moments_.rows, np.bincount(folds, minlength=10))


def test_columns_are_taken_by_name_wherever_they_have_one(tmp_path):
    write_store(tmp_path / "s.zarr", X, Y[:, :1], chunk_rows=500)
    sample = open_sample(tmp_path / "s.zarr")
    turned = sample.select(("x1", "x0"), None)
    model = JointDistribution(**PART).partial_fit(turned, **ONE)
    before = model.expect("y0", X[:9, ::-1])
    model.partial_fit(sample, **ONE)  # the same rows again, in the order of the store
    assert_allclose(model.expect("y0", X[:9, ::-1]), before, rtol=1e-9)
    alone = JointDistribution(**PART).partial_fit(sample.select(("x1",), None), **ONE)
    before = alone.expect("y0", X[:9, 1:])
    alone.partial_fit(sample, **ONE)
    assert_allclose(alone.expect("y0", X[:9, 1:]), before, rtol=1e-9)
    with pytest.raises(DataError, match="the fit had columns x0, x1 of x"):
        JointDistribution(**PART).partial_fit(sample, **ONE).partial_fit(X[:, :1], Y[:, :1], **ONE)


def test_counted_columns_and_a_single_column_of_y_have_no_names():
    pd = pytest.importorskip("pandas")
    rest = slice(600, 1200)
    arrays = small().partial_fit(X[rest], Y[rest, :1], **ONE)
    tables = small().partial_fit(pd.DataFrame(X[rest]), pd.Series(Y[rest, 0], name="price"), **ONE)
    assert_array_equal(tables.moments_.gram, arrays.moments_.gram)
    priced = JointDistribution(**PART).partial_fit(
        X[:600], pd.Series(Y[:600, 0], name="price"), **ONE
    )
    with pytest.raises(DataError, match="the fit had columns price of y, these rows have cost"):
        priced.partial_fit(X[rest], pd.Series(Y[rest, 0], name="cost"), **ONE)
    with pytest.raises(DataError, match="the fit had columns x0, x1 of x, these rows have 0:"):
        small().partial_fit(pd.DataFrame(X[rest, :1]), Y[rest, :1], **ONE)


def test_other_units_and_labels_are_refused(tmp_path):
    for unit in ("K", "degC"):
        columns = Columns(("a", "b"), {"a": unit}), Columns(("t",))
        with writing_sample(tmp_path / unit, columns, chunk_rows=500) as writer:
            writer.append(X, Y[:, :1])
    model = JointDistribution(**PART).partial_fit(tmp_path / "K", **ONE)
    with pytest.raises(DataError, match="column 'a' is in degC, in the fit it was in K: convert"):
        model.partial_fit(tmp_path / "degC", **ONE)
    pd = pytest.importorskip("pandas")
    label = np.where(X[:, 0] > 0, "up", "down")
    delta = {**PART, "kernel_y": kernels.Delta()}
    labelled = JointDistribution(**delta).partial_fit(X, pd.Series(label, name="label"), **ONE)
    turned = np.flatnonzero(label != label[0])  # its codes begin with the other label
    order = np.concatenate([turned, np.flatnonzero(label == label[0])])
    again = JointDistribution(**delta).partial_fit(X, pd.Series(label, name="label"), **ONE)
    again.partial_fit(X[order], pd.Series(label[order], name="label"), **ONE)
    twice = JointDistribution(**delta).partial_fit(X, pd.Series(label, name="label"), **ONE)
    twice.partial_fit(X, pd.Series(label, name="label"), **ONE)
    events = ["label == 'up'", "label == 'down'"]
    found, expected = (fit.conditional(X[:9]).probability(events) for fit in (again, twice))
    assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(DataError, match=r"labels of column 'label' are .*: give rows with labels"):
        labelled.partial_fit(X, pd.Series(np.where(X[:, 0] > 0, "up", "flat"), name="label"), **ONE)
    with pytest.raises(DataError, match="labels of column 'label' are numbers, in the fit"):
        labelled.partial_fit(X, np.full(N, 7.5), **ONE)


def test_a_model_merges_once():
    model = small().model_
    with pytest.raises(DataError, match="models 1 and 2 are of the same rows"):
        merge([model, model])
    with pytest.raises(DataError, match=r"got the one path a\.model"):
        merge("a.model")


def test_a_model_merges_once_with_what_it_is_a_part_of(tmp_path):
    first = small()
    alone = [
        JointDistribution(**PART).partial_fit(X[part], Y[part, :1], like=first.model_, **ONE).model_
        for part in (slice(600, 1000), slice(1000, 1400))
    ]
    merge([first.model_, alone[0]]).save(tmp_path / "both.model")
    both, given = load(tmp_path / "both.model"), first.model_
    for models in ([given, both], [both, alone[0]], [alone[1], both, given], [both, both]):
        with pytest.raises(DataError, match="have rows of the same model in them"):
            merge(models)
    whole = merge([both, alone[1]])
    assert whole.moment_sums().n_rows == 1400
    assert whole.about["merged"] == merge([given, *alone]).about["merged"]
    grown = first.partial_fit(X[1400:], Y[1400:, :1], **ONE).model_
    with pytest.raises(DataError, match="models 2 and 3 are of the same rows"):
        merge([alone[0], grown, given])
    assert merge([alone[0], grown]).moment_sums().n_rows == 400 + 600 + N - 1400
    again = JointDistribution(**PART).partial_fit(X[:90], Y[:90, :1], like=both, **ONE).model_
    assert "merged" not in again.about
    for damaged in (5, "text", [1, 2], {}):
        both.about["merged"] = damaged
        with pytest.raises(StoreError, match="list of what it was merged from is damaged"):
            merge([given, both])


def test_parts_of_several_tables_are_not_taken_for_all_rows(tmp_path):
    write_store(tmp_path / "a.zarr", X[:900], Y[:900, :1], chunk_rows=500)
    train, _ = open_sample(tmp_path / "a.zarr").split(0.2)
    model = JointDistribution(**PART).partial_fit(train, **ONE)
    more = open_sample(X[900:], Y[900:, :1])
    alone = JointDistribution(**PART).partial_fit(more, like=model.model_, **ONE)
    for grown in (merge([model.model_, alone.model_]), model.partial_fit(more, **ONE).model_):
        assert grown.about["parts_differ"]
        grown.save(tmp_path / "m", overwrite=True)
        model_path, store = str(tmp_path / "m"), str(tmp_path / "a.zarr")
        where = {"compute": Compute("synchronous")}
        with pytest.raises(DataError, match="made of parts of several tables"):
            score_model(model_path, store, (), **where)
        found = score_model(model_path, store, (), hold_out=0.2, **where)
        assert 0 < found["rows"] < 300
    assert "parts_differ" not in alone.model_.about


def test_embeddings_know_the_rows_of_all_calls(tmp_path):
    columns = Columns(("x0", "x1")), Columns(("label",), categories={"label": ("down", "up")})
    codes, table = (X[:, :1] > 0.0).astype(float), str(tmp_path / "a.zarr")
    with writing_sample(table, columns, chunk_rows=500) as writer:
        writer.append(X[:900], codes[:900])
    train, test = open_sample(table).split(0.2)
    model = EmbeddingClassifier(kernel_x=KERNEL, tol=0.3, reg=1e-3).partial_fit(train, **ONE)
    model.partial_fit(test, **ONE)  # both sides of the split
    where, model_path = {"compute": Compute("synchronous")}, str(tmp_path / "m")
    model.model_.save(model_path)
    result = score_model(model_path, table, (), **where)
    assert (result["rows"], result["unseen"]) == (900, False)
    assert model.model_.about["next_row"] == 900
    model.partial_fit(train, **ONE)
    assert model.model_.about["parts_differ"]
    assert model.model_.about["location"].startswith(train.location)
    model.model_.save(model_path, overwrite=True)
    with pytest.raises(DataError, match="made of parts of several tables"):
        score_model(model_path, table, (), **where)


def test_unusable_rows_of_later_calls_are_told_by_their_own_numbers():
    model = small()
    bad = X[600:].copy()
    bad[7, 1] = np.nan
    with pytest.raises(DataError, match="row 7"):
        model.partial_fit(bad, Y[600:, :1], **ONE)
    with pytest.raises(DataError, match="first_row must be an integer from 0 to"):
        estimator().partial_fit(X, Y, like=whole_model(), first_row=2**63, **ONE)


class Interrupted(Exception):
    """What stands for Ctrl-C."""


def test_a_later_call_that_fails_leaves_all_as_it_was(monkeypatch):
    def interrupted(*_):
        raise Interrupted

    model = ConditionalMeanEmbedding(kernel_x=KERNEL, kernel_y=KERNEL, tol=0.3, reg=1e-3)
    model.partial_fit(X[:600], Y[:600], **ONE)
    before = dict(vars(model))
    with monkeypatch.context() as patch:
        patch.setattr(embedding_fit, "embedding_replicates", interrupted)
        with pytest.raises(Interrupted):
            model.partial_fit(X[600:], Y[600:], **ONE)
    assert vars(model).keys() == before.keys()
    assert all(vars(model)[name] is value for name, value in before.items())
    model.partial_fit(X[600:], Y[600:], **ONE)  # its rows count once
    assert model.model_.about["rows"] == N
    features = PivotedCholesky(KERNEL, tol=0.3).partial_fit(X[:600], **ONE)
    before = dict(vars(features))
    with monkeypatch.context() as patch:
        patch.setattr(cholesky, "eigenbasis", interrupted)
        with pytest.raises(Interrupted):
            features.partial_fit(X[600:], **ONE)
    assert vars(features) == before


@pytest.mark.filterwarnings("ignore:x. trace error")  # where only these rows are
def test_a_classifier_learns_its_labels_with_its_model():
    label = np.where(X[:, 0] > 0.5, "up", np.where(X[:, 1] > 0, "side", "down"))
    model = EmbeddingClassifier(kernel_x=KERNEL, tol=0.1, reg=1e-3)
    two = label != "side"
    with pytest.raises(DataError, match="NaN"):
        model.partial_fit(X * np.nan, label, classes=["up", "side", "down"], **ONE)
    model.plan(X, label, scheduler="synchronous")
    assert not hasattr(model, "classes_")
    model.partial_fit(X[two], label[two], classes=["up", "side", "down"], **ONE)
    assert list(model.classes_) == ["down", "side", "up"]
    with pytest.warns(ToleranceWarning, match="y: trace error"):
        model.partial_fit(X[~two], label[~two], **ONE)  # a label that the first rows had not
    assert model.score(X, label) > 0.85
    with pytest.raises(DataError):
        model.fit(X * np.nan, np.where(X[:, 0] > 0, "b", "a"), scheduler="synchronous")
    assert list(model.classes_) == ["down", "side", "up"]
