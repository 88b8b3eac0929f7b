"""The conditional mean embedding as an estimator: against its dense form and refits by fold."""

import subprocess
import sys
from dataclasses import replace

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from conftest import write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_reads import opened

from cme_dask import ConditionalMeanEmbedding, kernels, load
from cme_dask.errors import DataError, NotFittedError, StoreError
from cme_dask.learning.problems import EMBEDDING_REGS as REGS
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.embedding import EmbeddingChange
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments

N, FOLDS = 400, 4
KX, KY = kernels.Gaussian(1.1), kernels.Gaussian(0.6)


def table(n=N, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 2))
    Y = np.sin(2 * X[:, :1]) + 0.3 * rng.standard_normal((n, 1)) + 4.0
    return X, Y, rng.exponential(size=n)


X, Y, W = table()
PIVOTS = (X[:30], np.linspace(2.5, 5.5, 10)[:, None])


def above(rows):
    return rows[:, 0] > 4.0


def fitted(*data, weights=None, scheduler="synchronous", **parameters):
    chosen = {"kernel_x": KX, "kernel_y": KY, "pivots": PIVOTS, "n_folds": FOLDS, **parameters}
    return ConditionalMeanEmbedding(**chosen).fit(
        *data, weights=weights, functions={"above": above}, scheduler=scheduler
    )


def functions(y):
    return np.column_stack([y[:, 0], y[:, 0] > 4.0])


def dense(L, at, shares, reg):
    """(K + reg W^-1)^-1 k(X, x) on the kernel that the basis spans, shape (points, rows)."""
    return np.linalg.solve(L @ L.T + reg * np.diag(1.0 / shares), L @ at.T).T


def with_all_rows(weights, shares):
    """Weights of sum one: the remainder is spread over all rows."""
    return weights + (1.0 - weights.sum(axis=1))[:, None] * shares


@pytest.mark.parametrize("reg", [1e-5, 1e-2, 1.0])
@pytest.mark.parametrize("weights", [None, W])
def test_it_is_the_dense_form_on_the_rows(reg, weights):
    model = fitted(X, Y, weights=weights, reg=reg)
    shares = np.full(N, 1 / N) if weights is None else weights / weights.sum()
    bases = [NewtonBasis.from_points(k, p) for k, p in zip((KX, KY), PIVOTS, strict=True)]
    points = np.random.default_rng(1).standard_normal((50, 2))
    plain = dense(bases[0](X), bases[0](points), shares, reg)
    found = model.expect(["y0", "above"], points)
    assert np.abs(found - with_all_rows(plain, shares) @ functions(Y)).max() < 1e-9
    assert np.abs(model.model_.mass(points) - plain.sum(axis=1)).max() < 1e-9
    spots = np.linspace(2.5, 5.5, 9)[:, None]
    embedded = plain @ bases[1](Y) @ bases[1](spots).T
    assert np.abs(model.model_.embedding(points, spots) - embedded).max() < 1e-9
    assert np.array_equal(model.predict(points)[:, 0], model.expect("y0", points))


@pytest.mark.parametrize("criterion", ["surrogate", "squared"])
@pytest.mark.parametrize("validation", ["folds", "leave-one-out"])
def test_a_constant_added_to_y_is_added_to_answers(criterion, validation):
    """Also those far from all rows, which are the mean."""
    options = {"kernel_x": KX, "criterion": criterion, "validation": validation, "tol": 1e-3}
    at = np.concatenate([X[:5], [[60.0, 0.0]]])
    answers = []
    for level in (0.0, 1000.0):
        fit = ConditionalMeanEmbedding(**options).fit(X, Y + level, weights=W)
        value, std = fit.model_.expect("y0", at, return_std=True)
        held_out = fit.model_.held_out["x"]["y0"]["error"]
        answers.append((fit.reg_, held_out, value - level, std))
        assert value[-1] == pytest.approx(np.average(Y[:, 0] + level, weights=W), rel=1e-12)
    for one, other in zip(*answers, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6)


def refits(reg, weights):
    """Squared errors, baselines and surrogate losses of refits without each fold, by rows."""
    folds = fold_of_rows(0, N, FOLDS)
    Lx, Ly = (
        NewtonBasis.from_points(k, p)(rows)
        for k, p, rows in zip((KX, KY), PIVOTS, (X, Y), strict=True)
    )
    F, found = functions(Y), []
    share = weights / weights.sum()
    spread = share @ (F - share @ F) ** 2
    for fold in range(FOLDS):
        held = folds == fold
        w, v = weights[~held] / weights[~held].sum(), weights[held] / weights[held].sum()
        plain = dense(Lx[~held], Lx[held], w, reg)
        error = v @ (with_all_rows(plain, w) @ F[~held] - F[held]) ** 2
        baseline = v @ (w @ F[~held] - F[held]) ** 2
        # |k_Y(y, .) - mu(x)|^2 with k_Y(y, y) = 1 and the rest projected on the pivots' span.
        mu = plain @ Ly[~held]
        surrogate = v @ (1.0 - 2 * (mu * Ly[held]).sum(axis=1) + (mu**2).sum(axis=1))
        found.append((weights[held].sum(), error, baseline, surrogate, (error / spread).mean()))
    share, error, baseline, surrogate, squared = (
        np.array(part) for part in zip(*found, strict=True)
    )
    share = share / share.sum()
    return share @ error, share @ baseline, share @ surrogate, share @ squared


@pytest.mark.parametrize("criterion", ["surrogate", "squared"])
def test_losses_and_held_out_errors_are_those_of_refits(criterion):
    model = fitted(X, Y, weights=W, criterion=criterion)
    regs, losses = model.losses_.T
    assert regs.tolist() == list(REGS)
    for i in (6, 10, 14, 18):
        plain = refits(regs[i], W)[2 if criterion == "surrogate" else 3]
        assert losses[i] == pytest.approx(plain, rel=1e-7)
    assert model.reg_ == regs[losses.argmin()]
    assert REGS[0] < model.reg_ < REGS[-1]
    error, baseline, *_ = refits(model.reg_, W)
    told = model.model_.about["held_out"]["x"]
    for name, e, b in zip(("y0", "above"), error, baseline, strict=True):
        assert told[name]["error"] == pytest.approx(e, rel=1e-7)
        assert told[name]["baseline"] == pytest.approx(b, rel=1e-7)


def test_standard_errors_are_those_of_the_jackknife():
    model = fitted(X, Y, reg=1e-3)
    folds = fold_of_rows(0, N, FOLDS)
    each = np.stack(
        [
            fitted(X[folds != f], Y[folds != f], reg=1e-3).expect("above", X[:9])
            for f in range(FOLDS)
        ]
    )
    spread = (FOLDS - 1) / FOLDS * ((each - each.mean(axis=0)) ** 2).sum(axis=0)
    values, std = model.expect("above", X[:9], return_std=True)
    assert np.abs(values - model.expect(above, X[:9])).max() < 1e-11
    assert np.abs(std - np.sqrt(spread)).max() < 1e-9


def test_one_pass_reads_every_chunk_once(tmp_path):
    x, y, w = table(20_000)
    write_store(tmp_path / "s.zarr", x, y, w, chunk_rows=4096)
    store, group = opened(tmp_path / "s.zarr")
    model = ConditionalMeanEmbedding(kernel_x=KX, tol=1e-3).fit(group, scheduler="synchronous")
    assert model.n_passes_ == 1
    assert set(store.chunks("x").values()) == set(store.chunks("y").values()) == {1}


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(chunks=st.integers(50, 9000), scheduler=st.sampled_from(["threads", "synchronous"]))
def test_any_chunks_and_scheduler_give_the_same_bits(chunks, scheduler):
    x, y, w = table(9000)
    plain = fitted(x, y, weights=w)
    cut = [da.from_array(a, chunks=(chunks, *a.shape[1:])) for a in (x, y, w)]
    found = fitted(cut[0], cut[1], weights=cut[2], scheduler=scheduler)
    assert found.reg_ == plain.reg_
    for name in ("operator", "total"):
        assert np.array_equal(getattr(found.model_, name), getattr(plain.model_, name))
    assert np.array_equal(found.expect("above", x[:20]), plain.expect("above", x[:20]))


def test_tables_arrays_and_stores_are_the_same_rows(tmp_path):
    plain = fitted(X, Y)
    write_store(tmp_path / "s.zarr", X, Y, x_names=("a", "b"), y_names=("c",), chunk_rows=90)
    group = zarr.group(tmp_path / "raw.zarr")
    for name, values in (("x", X), ("y", Y)):
        group.create_array(name, data=values, chunks=(90, values.shape[1]))
    for data in (
        (str(tmp_path / "s.zarr"),),
        (group["x"], group["y"]),
        (pd.DataFrame(X, columns=["a", "b"]), pd.DataFrame(Y, columns=["c"])),
    ):
        found = fitted(*data)
        assert np.array_equal(found.model_.operator, plain.model_.operator)
    table = pd.DataFrame({"b": X[:5, 1], "a": X[:5, 0]})
    assert np.array_equal(found.predict(table), plain.predict(X[:5]))


@pytest.mark.parametrize("criterion", ["surrogate", "squared"])
def test_learned_kernels_leave_noise_out(criterion):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((700, 3))
    y = np.sin(2 * x[:, 0]) + 0.2 * rng.standard_normal(700)
    model = ConditionalMeanEmbedding(criterion=criterion).fit(x, y, scheduler="synchronous")
    at = rng.standard_normal((500, 3))
    error = np.sqrt(np.mean((model.predict(at) - np.sin(2 * at[:, 0])) ** 2))
    median = ConditionalMeanEmbedding(kernel_x="median").fit(x, y, scheduler="synchronous")
    assert error < 0.1
    assert error < 0.7 * np.sqrt(np.mean((median.predict(at) - np.sin(2 * at[:, 0])) ** 2))
    relevance = [row.relevance for row in model.length_scales_ if row.variable == "x"]
    assert max(relevance[1:]) < relevance[0] / 4
    # The kernel of y is never learned, since longer scales always win.
    assert model.basis_y_.newton.kernel == median.basis_y_.newton.kernel


def test_saved_models_answer_alike_without_dask(tmp_path):
    model = fitted(X, Y)
    model.save(tmp_path / "m.zarr")
    found = load(tmp_path / "m.zarr")
    assert np.array_equal(found.expect(None, X[:5]), model.expect(None, X[:5]))
    for one, two in zip(
        found.expect("above", X[:5], return_std=True),
        model.expect("above", X[:5], return_std=True),
        strict=True,
    ):
        assert np.array_equal(one, two)
    assert np.array_equal(found.embedding(X[:3], Y[:2]), model.model_.embedding(X[:3], Y[:2]))
    assert repr(found) == repr(model.model_)
    code = (
        "import sys, cme_dask\n"
        f"cme_dask.load({str(tmp_path / 'm.zarr')!r}).expect('above', [[0.0, 0.0]])\n"
        "assert not {'dask', 'distributed', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("name", ["operator", "total", "answers_slope", "answers_fold_slope"])
@pytest.mark.parametrize("damage", ["missing", "shape", "nan"])
def test_damaged_arrays_are_store_errors(name, damage):
    from cme_dask.models import EmbeddingModel

    state = fitted(X, Y).model_.to_state()
    arrays = dict(state.arrays)
    values = arrays.pop(name)
    if damage == "shape":
        arrays[name] = values[..., :-1]
    elif damage == "nan":
        arrays[name] = np.full_like(values, np.nan)
    with pytest.raises(StoreError, match="fit it again"):
        EmbeddingModel.from_state(replace(state, arrays=arrays))


def test_damaged_descriptions_are_store_errors(tmp_path):
    state = fitted(X, Y).model_.to_state()
    from cme_dask.models import EmbeddingModel

    for damage in (
        {"answers": None},
        {"answers": {"names": ["z", "above"]}},
        {"answers": {"names": ["y0", "y0"]}},
        {"about": {}},
        {"x": {}},
    ):
        broken = type(state)(state.type, {**state.description, **damage}, state.arrays)
        with pytest.raises(StoreError):
            EmbeddingModel.from_state(broken)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"criterion": "best"}, "criterion must be one of surrogate, squared, got 'best'"),
        ({"reg": -1.0}, "ridges must be non-negative numbers"),
        ({"reg": "big"}, "ridges must be non-negative numbers"),
        ({"n_folds": 1}, "give a ridge, or n_folds"),
        ({"kernel_x": "wide"}, "kernel_x must be a kernel"),
        ({"tol": 2.0}, "tol must lie between"),
        ({"accuracy": -1.0}, "accuracy must be"),
        ({"max_rank": 0}, "max_rank must be an integer"),
    ],
)
def test_bad_parameters_are_one_sentence(parameters, message):
    with pytest.raises(DataError, match=message):
        fitted(X, Y, **parameters)


def test_bad_rows_and_questions_are_one_sentence():
    with pytest.raises(DataError, match="give Y, or a store"):
        ConditionalMeanEmbedding().fit(X)
    with pytest.raises(NotFittedError, match="ConditionalMeanEmbedding is not fitted"):
        ConditionalMeanEmbedding().predict(X)
    with pytest.raises(DataError, match="column 'x1' has 1 "):
        fitted(np.where(np.arange(2 * N).reshape(N, 2) == 7, np.nan, X), Y)
    with pytest.raises(DataError, match="fewer than two have rows"):
        fitted(X, Y, weights=(fold_of_rows(0, N, FOLDS) == 1) * 1.0)
    model = fitted(X, Y, n_folds=1, reg=1e-3)
    with pytest.raises(DataError, match="n_folds of at least 2"):
        model.expect("above", X, return_std=True)
    with pytest.raises(DataError, match="unknown column 'below'"):
        model.expect("below", X)
    with pytest.raises(DataError, match="must have shape"):
        model.predict(X[:, :1])


def test_plan_tells_ranks_and_passes():
    plan = ConditionalMeanEmbedding(kernel_x=KX, kernel_y=KY, pivots=PIVOTS).plan(
        X, Y, scheduler="synchronous"
    )
    assert plan.ranks == (30, 10)
    assert plan.passes == 1


def test_the_trial_sees_what_changes_the_answers():
    sides = (
        FeatureBlock(NewtonBasis.from_points(KX, X[:30]), ("a", "b")),
        FeatureBlock(NewtonBasis.from_points(KY, PIVOTS[1]), ("c",), {"above": above}),
    )
    moments = strip_moments(MomentReduction(sides), (X, Y), None, np.zeros(N, dtype=np.uint8))
    mean = moments.means()
    change = EmbeddingChange(sides[0].basis(X[:50]), 1e-4)(mean)
    assert change(mean) == 0.0
    blocks = {**mean.blocks, ("x", "x"): mean.blocks["x", "x"] + 1e-6 * np.eye(30)}
    shaken = replace(mean, blocks=blocks)
    assert 1e-6 < change(shaken) < 0.1
