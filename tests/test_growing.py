"""``partial_fit``: rows are added, and the model is that of all rows, or says by how much not."""

import dask.array as da
import numpy as np
import oracle_joint as oracle
import pytest
from conftest import write_store
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from test_merge import FUNCTIONS, KERNEL, W, X, Y, assert_same_model, estimator, fitted, whole_model

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    PivotedCholesky,
    Tuning,
    kernels,
    merge,
    open_sample,
)
from cme_dask.errors import DataError, ToleranceWarning

N = len(X)
CUT = 600
ONE = {"scheduler": "synchronous"}
SHORT = kernels.Gaussian(0.7)


def grown(constraint="normalized"):
    """The first rows, then the others, with the pivots and cells of the model of all."""
    first, rest = slice(0, CUT), slice(CUT, N)
    model = estimator(constraint).partial_fit(
        X[first],
        Y[first],
        weights=W[first],
        functions=FUNCTIONS,
        like=whole_model(constraint),
        **ONE,
    )
    return model.partial_fit(X[rest], Y[rest], sample_weight=W[rest], **ONE)


@pytest.mark.parametrize("constraint", ["normalized", "none", "certified"])
def test_later_rows_make_the_model_of_all_rows(constraint):
    found, whole = grown(constraint), fitted(constraint)
    assert_same_model(found.model_, whole.model_)
    assert_array_equal(found.model_.y.cells.atoms, whole.model_.y.cells.atoms)
    assert_allclose(found.moments_.gram, whole.moments_.gram, atol=1e-9)
    assert_array_equal(found.moments_.rows, whole.moments_.rows)
    assert_allclose(found.coef_, whole.coef_, atol=1e-6)
    assert found.n_passes_ == 2
    assert found.basis_x_.trace_error == pytest.approx(whole.basis_x_.trace_error, rel=1e-10)
    assert found.report_.rows == N - CUT
    assert_allclose(found.predict(X[:9]), whole.predict(X[:9]), rtol=1e-11)
    assert_allclose(
        found.expect(FUNCTIONS["positive"], X[:9]), whole.expect("positive", X[:9]), rtol=1e-10
    )


def test_the_first_call_is_a_fit():
    first = estimator().partial_fit(X, Y, weights=W, functions=FUNCTIONS, **ONE)
    whole = fitted()
    assert_array_equal(first.model_.coef, whole.model_.coef)
    assert repr(first.get_params()) == repr(whole.get_params())


@pytest.mark.parametrize("first", ["partial_fit", "fit"])
def test_learned_kernels_take_more_rows(first):
    """The first call of partial_fit keeps the best kernels alone, and fits no location."""
    averaged, residual = (2, "auto") if first == "partial_fit" else (1, False)
    quick = Tuning(rows=200, evaluations=4, averaged=averaged)
    model = JointDistribution(tol=0.1, tuning=quick, residual=residual)
    getattr(model, first)(X[:CUT], Y[:CUT], **ONE)
    assert len(model.members_) == 1
    assert model.model_.residual is None
    before = model.model_
    model.partial_fit(X[CUT:], Y[CUT:], **ONE)
    assert model.model_.about["rows"] == N
    assert model.model_.x.basis.newton.kernel.to_dict() == before.x.basis.newton.kernel.to_dict()


def test_rows_come_from_anywhere(tmp_path):
    """A store, Dask arrays, DataFrames by name."""
    pd = pytest.importorskip("pandas")
    whole = fitted(n_folds=4)
    parts = np.split(np.arange(N), [400, 800, 1200])
    write_store(tmp_path / "s.zarr", X[parts[1]], Y[parts[1]], W[parts[1]], chunk_rows=100)
    frame = pd.DataFrame({"y1": Y[parts[3], 1], "y0": Y[parts[3], 0]})
    model = estimator(n_folds=4).partial_fit(
        X[parts[0]], Y[parts[0]], weights=W[parts[0]], functions=FUNCTIONS, like=whole.model_, **ONE
    )
    model.partial_fit(tmp_path / "s.zarr", scheduler="threads", workers=2)
    chunked = (da.from_array(a[parts[2]], chunks=77) for a in (X, Y, W))
    x, y, w = chunked
    model.partial_fit(x, y, weights=w, **ONE)
    model.partial_fit(X[parts[3]], frame, weights=W[parts[3]], **ONE)
    assert_same_model(model.model_, whole.model_)


def spread(n, centre, seed):
    rng = np.random.default_rng(seed)
    x = centre + rng.normal(size=(n, 1))
    return x, np.sin(x) + 0.3 * rng.normal(size=(n, 1))


OLD, NEW = spread(700, 0.0, 1), spread(500, 3.5, 2)


def first_fit(**changed):
    parameters = {"kernel_x": SHORT, "kernel_y": SHORT, "tol": 1e-3, "reg": 1e-4}
    parameters |= {"support_size": 30, **changed}
    return JointDistribution(**parameters).partial_fit(*OLD, **ONE)


def dense(model, x, y):
    """E[y | x] of all rows with the pivots of a model, written down densely."""
    pivots = model.basis_x_.pivots, model.basis_y_.pivots
    rows = [np.concatenate(pair) for pair in zip(OLD, NEW, strict=True)]
    means = oracle.means(SHORT, SHORT, *rows, *pivots, None, rows[1])
    coef = oracle.coefficients(means, "normalized", (1e-4, 1e-4), "two-sided")
    return oracle.expect(oracle.newton(SHORT, x, pivots[0]), coef, means), means


def test_badly_spanned_rows_are_warned_of():
    model = first_fit()
    with pytest.warns(ToleranceWarning, match=r"x: trace error .* over the new rows.*together$"):
        model.partial_fit(*NEW, **ONE)
    told = model.model_.about["new_rows"]
    assert told["rows"] == len(NEW[0])
    left = 1.0 - (model.basis_x_.newton(NEW[0]) ** 2).sum(axis=1)
    assert told["trace_error"]["x"] == pytest.approx(left.mean(), rel=1e-9)
    expected, means = dense(model, NEW[0][:20], None)
    assert model.basis_x_.trace_error == pytest.approx(means["tau_x"], rel=1e-9)
    assert model.basis_x_.trace_error > 0.01
    assert_allclose(model.expect("y0", NEW[0][:20])[:, None], expected, rtol=1e-6)


def test_rows_of_the_same_law_are_not_warned_of():
    model = first_fit().partial_fit(*spread(500, 0.0, 9), **ONE)  # warnings are errors
    assert model.model_.about["new_rows"]["trace_error"]["x"] < 2e-3
    assert "new_rows" not in merge([model.model_]).about
    assert grown("coupling").model_.about["new_rows"] == {"rows": N - CUT}  # which leaves no trace


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"like": 3}, "first call"),
        ({"first_row": 3}, "belongs to like="),
        ({"functions": {"f": np.sum}}, "fitted with the functions none, given are 'f'"),
    ],
)
def test_unusable_calls_are_refused(given, message):
    model = first_fit()
    before = model.model_
    with pytest.raises(DataError, match=message):
        model.partial_fit(*NEW, **given, **ONE)
    assert model.model_ is before


def test_one_row_can_be_added():
    given = {"kernel": KERNEL, "pivots": X[:9], "tol": 0.5}
    model = PivotedCholesky(**given).partial_fit(X[:200], weights=W[:200], **ONE)
    model.partial_fit(X[200:201], weights=W[200:201], **ONE)
    alone = np.where(np.arange(3) == 1, W[201], 0.0)  # of three rows one counts
    model.partial_fit(X[200:203], weights=alone, **ONE)
    rows = np.r_[:202]
    whole = PivotedCholesky(**given).fit(X[rows], weights=W[rows], **ONE)
    assert model.trace_error_ == pytest.approx(whole.trace_error_, rel=1e-12)
    for few in (X[:0], X[:1]):
        with pytest.raises(DataError, match="at least 2 rows are needed"):
            PivotedCholesky(**given).partial_fit(few, **ONE)
    with pytest.raises(DataError, match="at least 1 row is needed, got 0 samples"):
        model.partial_fit(X[:0], **ONE)


def test_other_columns_are_refused():
    pd = pytest.importorskip("pandas")
    model = first_fit()
    with pytest.raises(DataError, match="columns x0 of x, these rows have x0, x1"):
        model.partial_fit(np.hstack([NEW[0], NEW[0]]), NEW[1], **ONE)
    with pytest.raises(DataError, match="columns x0 of x, these rows have TEMP"):
        model.partial_fit(pd.DataFrame({"TEMP": NEW[0][:, 0]}), NEW[1], **ONE)
    with pytest.raises(DataError, match="NaN"):
        model.partial_fit(np.full((5, 1), np.nan), np.zeros((5, 1)), **ONE)
    with pytest.raises(DataError, match="residual=False"):
        first_fit(residual=True)
    with pytest.raises(DataError, match="location model"):
        fitted(residual=True).partial_fit(X, Y, **ONE)


@pytest.mark.parametrize("changes", [{"location": "x0"}, {"support": (-9, 9)}, {"residual": True}])
def test_a_location_that_is_set_between_calls_is_refused(changes):
    model = first_fit().set_params(**changes)
    before = model.model_
    for other in (model, clone(model)):
        with pytest.raises(DataError, match="location model takes no more rows"):
            other.partial_fit(*NEW, **ONE)
    with pytest.raises(DataError, match="location model takes no more rows"):
        clone(model).partial_fit(*NEW, like=before, **ONE)
    assert model.model_ is before


def test_folds_by_group_stay_folds_by_group():
    rng = np.random.default_rng(8)
    group = rng.integers(0, 40, N)
    sample = [
        open_sample(X[h], Y[h], group=group[h]).fold_by("group")
        for h in (slice(0, CUT), slice(CUT, N), slice(None))
    ]
    model = fitted()
    whole = estimator().fit(sample[2], **ONE)
    model = estimator().partial_fit(sample[0], like=whole.model_, **ONE)
    plain = open_sample(X[CUT:], Y[CUT:], group=group[CUT:])  # folds as before, without asking
    model.partial_fit(plain, **ONE)
    assert_array_equal(model.moments_.rows, whole.moments_.rows)
    with pytest.raises(DataError, match="need the group"):
        model.partial_fit(X, Y, **ONE)


def test_embeddings_grow():
    given = {"kernel_x": KERNEL, "kernel_y": KERNEL, "pivots": (X[:11], Y[:8]), "tol": 0.3}
    for reg in (None, 1e-3):
        whole = ConditionalMeanEmbedding(reg=reg, **given).fit(
            X, Y, weights=W, functions=FUNCTIONS, **ONE
        )
        model = ConditionalMeanEmbedding(reg=reg, **given)
        model.partial_fit(X[:CUT], Y[:CUT], weights=W[:CUT], functions=FUNCTIONS, **ONE)
        model.partial_fit(X[CUT:], Y[CUT:], weights=W[CUT:], **ONE)
        assert model.reg_ == whole.reg_
        assert model.n_passes_ == 2
        assert model.model_.about["rows"] == N
        for a, b in zip(
            model.expect("positive", X[:20], return_std=True),
            whole.expect("positive", X[:20], return_std=True),
            strict=True,
        ):
            assert_allclose(a, b, rtol=0, atol=1e-12)
        assert_allclose(
            model.model_.embedding(X[:9], Y[:9]), whole.model_.embedding(X[:9], Y[:9]), atol=1e-12
        )
    with pytest.raises(DataError, match="fitted with the functions 'positive'"):
        model.partial_fit(X, Y, functions={"other": np.sum}, **ONE)
    with pytest.warns(ToleranceWarning, match="over the new rows"):
        model.partial_fit(X + 9, Y, **ONE)


def test_features_grow(tmp_path):
    given = {"kernel": KERNEL, "pivots": X[:11], "basis": "spectral", "tol": 0.3}
    whole = PivotedCholesky(**given).fit(X, weights=W, **ONE)
    model = PivotedCholesky(**given).partial_fit(X[:CUT], weights=W[:CUT], **ONE)
    model.partial_fit(X[CUT:], weights=W[CUT:], **ONE)
    assert model.trace_error_ == pytest.approx(whole.trace_error_, rel=1e-12)
    assert_allclose(model.eigenvalues_, whole.eigenvalues_, rtol=1e-10)
    found, expected = model.transform(X[:20]), whole.transform(X[:20])
    assert_allclose(np.abs(found), np.abs(expected), atol=1e-9)
    assert model.n_passes_ == 2
    assert model.model_.about["rows"] == N
    model.save(tmp_path / "f.zarr")
    with pytest.raises(DataError, match="no moments"):
        PivotedCholesky.load(tmp_path / "f.zarr").partial_fit(X)
    with pytest.warns(ToleranceWarning, match="over the new rows"):
        model.partial_fit(X + 9, **ONE)


def test_classifiers_grow_with_the_labels_of_the_first_call():
    label = np.where(X[:, 0] > 0.5, "up", np.where(X[:, 1] > 0, "side", "down"))
    given = {"kernel_x": KERNEL, "kernel_y": kernels.Delta(), "reg": 1e-3, "tol": 0.1}
    model = JointClassifier(**given).partial_fit(X[:CUT], label[:CUT], **ONE)
    some = np.flatnonzero(label[CUT:] != "down") + CUT  # codes are not those of these alone
    model.partial_fit(X[some], label[some], **ONE)
    seen = np.concatenate([label[:CUT], label[some]])
    shares = [np.mean(seen == name) for name in ("down", "side", "up")]
    assert_allclose(model.model_.masses, shares)  # cells of y are its codes
    lazy = da.from_array(label[CUT:], chunks=100)
    model.partial_fit(da.from_array(X[CUT:], chunks=(100, 2)), lazy, **ONE)
    seen = np.concatenate([seen, label[CUT:]])
    shares = [np.mean(seen == name) for name in ("down", "side", "up")]
    assert_allclose(model.model_.masses, shares)
    assert list(model.classes_) == ["down", "side", "up"]
    assert model.score(X, label) > 0.85
    told = JointClassifier(**given)
    with pytest.raises(DataError, match="no rows labelled 'down': pivots and cells"):
        told.partial_fit(X[some], label[some], classes=["up", "side", "down"], **ONE)
    with pytest.raises(DataError, match="NaN"):  # the labels are not forgotten with it
        told.partial_fit(X[:CUT] * np.nan, label[:CUT], classes=["up", "side", "down"], **ONE)
    assert not hasattr(told, "classes_")
    told.partial_fit(X[:CUT], label[:CUT], classes=["up", "side", "down"], **ONE)
    assert list(told.classes_) == ["down", "side", "up"]
    with pytest.raises(DataError, match="belong to the first call of partial_fit"):
        told.partial_fit(X, label, classes=["up"], **ONE)
    with pytest.raises(DataError, match=r"labels that the first call had not, 'left'"):
        model.partial_fit(X[:9], np.array(["left"] * 9), **ONE)


@pytest.mark.parametrize("kind", [JointClassifier, EmbeddingClassifier])
def test_labels_of_a_plan_or_of_a_failed_fit_are_forgotten(kind):
    label, others = (np.where(X[:, 0] > 0.5, *names) for names in (("up", "down"), ("a", "b")))
    given = {"kernel_x": KERNEL, "kernel_y": kernels.Delta(), "reg": 1e-3, "tol": 0.1}
    model = kind(**given).partial_fit(X[:CUT], label[:CUT], **ONE)
    model.plan(X, others, **ONE)
    with pytest.raises(DataError, match="NaN"):
        model.fit(X * np.nan, others, **ONE)
    model.partial_fit(X[CUT:], label[CUT:], **ONE)
    assert model.model_.about["classes"] == ["down", "up"]
