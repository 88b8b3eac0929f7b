"""``partial_fit``: rows are added, and the model is that of all rows, or says by how much not."""

import dask.array as da
import numpy as np
import oracle_joint as oracle
import pytest
from conftest import write_store
from numpy.testing import assert_allclose, assert_array_equal
from test_merge import FUNCTIONS, KERNEL, W, X, Y, assert_same_model, estimator, fitted, whole_model

from cme_dask import (
    ConditionalMeanEmbedding,
    JointClassifier,
    JointDistribution,
    PivotedCholesky,
    Tuning,
    kernels,
    open_sample,
)
from cme_dask.errors import DataError, ToleranceWarning
from cme_dask.numerics.basis import NewtonBasis, extended_basis

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


def test_learned_kernels_keep_the_best_alone():
    quick = Tuning(rows=200, evaluations=4, finalists=2)
    model = JointDistribution(tol=0.1, tuning=quick).partial_fit(X[:CUT], Y[:CUT], **ONE)
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
    with pytest.warns(ToleranceWarning, match=r"x: trace error .* over the new rows.*'extend'"):
        model.partial_fit(*NEW, **ONE)
    expected, means = dense(model, NEW[0][:20], None)
    assert model.basis_x_.trace_error == pytest.approx(means["tau_x"], rel=1e-9)
    assert model.basis_x_.trace_error > 0.01
    assert_allclose(model.expect("y0", NEW[0][:20])[:, None], expected, rtol=1e-6)


def test_rows_of_the_same_law_are_not_warned_of():
    first_fit().partial_fit(*spread(500, 0.0, 9), **ONE)  # warnings are errors


def test_reread_rows_make_the_model_of_all_rows(tmp_path):
    model = first_fit()
    ranks = model.basis_x_.rank, model.basis_y_.rank
    passes = model.n_passes_
    store = write_store(tmp_path / "old.zarr", *OLD)
    model.partial_fit(*NEW, new_pivots="reread", earlier=store, **ONE)
    assert model.basis_x_.rank > ranks[0]
    assert model.n_passes_ == passes + 2
    assert model.basis_x_.trace_error < 1.2e-3
    points = np.concatenate([OLD[0][:20], NEW[0][:20]])
    expected, means = dense(model, points, None)
    assert model.basis_x_.trace_error == pytest.approx(means["tau_x"], rel=1e-6)
    assert_allclose(model.expect("y0", points)[:, None], expected, atol=1e-6)
    assert "zero_filled" not in model.model_.about
    again = first_fit().partial_fit(*NEW, new_pivots="reread", earlier=OLD, **ONE)
    assert_allclose(again.expect("y0", points), model.expect("y0", points), rtol=1e-12)
    # And it is one model with the same pivots, fitted at once.
    pivots = model.basis_x_.pivots, model.basis_y_.pivots
    rows = [np.concatenate(pair) for pair in zip(OLD, NEW, strict=True)]
    once = JointDistribution(
        kernel_x=SHORT, kernel_y=SHORT, reg=1e-4, pivots=pivots, support_size=30
    ).fit(*rows, **ONE)
    assert_allclose(once.basis_x_.rank, model.basis_x_.rank)
    mean, std = model.expect("y0", points, return_std=True)
    once_mean, once_std = once.expect("y0", points, return_std=True)
    assert_allclose(mean, once_mean, atol=1e-8)
    assert_allclose(std, once_std, atol=1e-8)


def test_zero_filled_moments_keep_within_their_bound():
    """The bound holds for every entry that is missing, and is stored with the model."""
    model = first_fit(n_folds=3)
    m = model.basis_x_.rank
    old_spectral = model.basis_x_.spectral
    model.partial_fit(*NEW, new_pivots="extend", **ONE)
    basis = model.basis_x_.newton
    assert basis.rank > m
    newton = basis(OLD[0])
    told = {entry["variable"]: entry for entry in model.model_.about["zero_filled"]}["x"]
    assert told["functions"] == basis.rank - m
    assert told["rows"] == len(OLD[0])
    residual = np.mean(1.0 - (newton[:, :m] ** 2).sum(axis=1))
    assert told["residual"] == pytest.approx(residual, rel=1e-6)
    lam = old_spectral.eigenvalues
    missing = newton[:, m:].T @ (newton[:, :m] @ old_spectral.transform) / len(newton)
    assert (np.abs(missing) <= np.sqrt(residual * lam) + 1e-15).all()
    assert np.abs(missing).max() > 1e-3 * told["bound"]  # something is missing indeed
    assert told["bound"] == pytest.approx(np.sqrt(residual * lam[0]), rel=1e-6)
    among = newton[:, m:].T @ newton[:, m:] / len(newton)
    assert np.abs(among).max() <= residual + 1e-15
    # What is there is exact: old functions over all rows, new ones over the new rows.
    gram = model.moments_.total().gram[0]
    rows = np.concatenate([OLD[0], NEW[0]])
    assert_allclose(gram[:m, :m], basis(rows)[:, :m].T @ basis(rows)[:, :m], atol=1e-8)
    new = basis(NEW[0])
    assert_allclose(gram[m : basis.rank, : basis.rank], new[:, m:].T @ new, atol=1e-8)
    # The answers are near those of the model that read the rows again.
    reread = first_fit(n_folds=3).partial_fit(*NEW, new_pivots="reread", earlier=OLD, **ONE)
    points = np.concatenate([OLD[0][:50], NEW[0][:50]])
    distance = np.abs(model.expect("y0", points) - reread.expect("y0", points))
    assert distance.max() < 0.3
    assert distance.mean() < 0.03
    # A second extension tells of both.
    model.partial_fit(*spread(300, -4.0, 3), new_pivots="extend", **ONE)
    filled = model.model_.about["zero_filled"]
    assert [entry["rows"] for entry in filled if entry["variable"] == "x"] == [700, 1200]
    # The bound of the second holds, though zeros of the first hide a part of lam.
    m, basis, old = basis.rank, model.basis_x_.newton, np.concatenate([OLD[0], NEW[0]])
    newton = basis(old)
    spectral = np.linalg.eigh(newton[:, :m].T @ newton[:, :m])[1]
    missing = newton[:, m:].T @ (newton[:, :m] @ spectral) / len(old)
    told = [entry for entry in filled if entry["variable"] == "x"][1]
    assert np.abs(missing).max() <= told["bound"]
    # Reading all rows again makes everything exact, and there is nothing more to tell.
    third = spread(300, -4.0, 3)
    earlier = [np.concatenate(rows) for rows in zip(OLD, NEW, third, strict=True)]
    model.partial_fit(*spread(200, -4.0, 4), new_pivots="reread", earlier=earlier, **ONE)
    assert "zero_filled" not in model.model_.about
    gram = model.moments_.total().gram[0]
    rows = np.concatenate([earlier[0], spread(200, -4.0, 4)[0]])
    newton = model.basis_x_.newton(rows)
    assert_allclose(gram[: basis.rank, : basis.rank], newton.T @ newton, atol=1e-8)


def test_an_extended_basis_begins_with_its_own_functions():
    old = NewtonBasis.from_points(SHORT, OLD[0][:6])
    rows = NEW[0]
    index, weights = np.arange(len(rows)), np.ones(len(rows))
    more = extended_basis(old, rows, index, weights, 1e-4)
    assert_allclose(more.factor @ more.factor.T, SHORT(more.points, more.points), atol=1e-12)
    assert_allclose(more(rows)[:, : old.rank], old(rows), atol=1e-12)
    left = 1.0 - (more(rows) ** 2).sum(axis=1)
    assert left.mean() <= 1e-4
    fewer = NewtonBasis(SHORT, more.points[:-1], more.factor[:-1, :-1])
    assert (1.0 - (fewer(rows) ** 2).sum(axis=1)).mean() > 1e-4
    # Greedy: the first new pivot is where the old basis leaves most.
    residual = 1.0 - (old(rows) ** 2).sum(axis=1)
    assert (1.0 - (old(more.points[6:7]) ** 2).sum()) >= residual.max() - 1e-9
    assert extended_basis(more, rows, index, weights, 1e-4) is more
    assert extended_basis(old, rows, index, weights, 1e-4, max_rank=8).rank == 8


def test_nothing_to_extend_is_nothing_changed():
    more = spread(400, 0.0, 5)
    kept = first_fit().partial_fit(*more, **ONE)
    extended = first_fit(tol=0.5).partial_fit(*more, new_pivots="extend", **ONE)
    assert "zero_filled" not in extended.model_.about
    assert "zero_filled" not in kept.model_.about


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"new_pivots": "more"}, "must be one of keep, extend, reread"),
        ({"new_pivots": "reread"}, "takes earlier="),
        ({"earlier": OLD}, "only that, takes earlier="),
        ({"new_pivots": "reread", "earlier": NEW}, r"500 rows of weight 500, the model had 700"),
        ({"new_pivots": "reread", "earlier": (1, 2, 3, 4)}, r"\(X, Y, weights\)"),
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
    with pytest.raises(DataError, match="coupling can't be given more landmarks"):
        grown("coupling").partial_fit(X, Y, new_pivots="extend", **ONE)
    with pytest.raises(DataError, match="residual reference"):
        fitted(residual=True).partial_fit(X, Y, **ONE)


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
    with pytest.raises(DataError, match="on the first call"):
        told.partial_fit(X, label, classes=["up"], **ONE)
    with pytest.raises(DataError, match=r"labels that the first call had not, 'left'"):
        model.partial_fit(X[:9], np.array(["left"] * 9), **ONE)
