"""Kernel logistic regression: against a dense solution, and pass by pass."""

import warnings
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
import zarr
from conftest import write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import approx_fprime, minimize
from scipy.special import logsumexp
from test_reads import opened

from cme_dask import KernelLogisticRegression, kernels, load
from cme_dask.data.model_file import read_model
from cme_dask.errors import ConvergenceError, ConvergenceWarning, DataError, StoreError
from cme_dask.models import LogisticModel
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.logistic import LogisticProblem, LogisticSums

KERNEL = kernels.Gaussian(1.2)
N = 600


def table(n=N, seed=0, classes=3):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 2))
    score = 2 * x[:, 0] + np.sin(3 * x[:, 1]) + rng.logistic(size=n)
    labels = np.array(["low", "mid", "top"]) if classes == 3 else np.array(["no", "yes"])
    return x, labels[np.digitize(score, [-1, 1] if classes == 3 else [0])], rng.exponential(size=n)


def fitted(x, y, **parameters):
    weights = parameters.pop("weights", None)
    chosen = {"pivots": x[:25], "gradient_tol": 1e-7, **parameters}
    model = KernelLogisticRegression(KERNEL, **chosen)
    return model.fit(x, y, sample_weight=weights, scheduler="synchronous")


def dense(x, y, weights, reg, pivots):
    """The least objective over K free functions, and the probabilities there."""
    classes, codes = np.unique(y, return_inverse=True)
    rows = np.column_stack([NewtonBasis.from_points(KERNEL, pivots)(x), np.ones(len(x))])
    share = np.full(len(x), 1 / len(x)) if weights is None else weights / weights.sum()
    one_hot = np.eye(len(classes))[codes]

    def objective(flat):
        theta = flat.reshape(rows.shape[1], -1)
        scores = rows @ theta
        log = scores - logsumexp(scores, axis=1)[:, None]
        free = theta.copy()
        free[-1] = 0.0
        value = -share @ (one_hot * log).sum(axis=1) + reg / 2 * (free**2).sum()
        return value, (rows.T @ (share[:, None] * (np.exp(log) - one_hot)) + reg * free).ravel()

    start = np.zeros(rows.shape[1] * len(classes))
    found = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-9})
    scores = rows @ found.x.reshape(rows.shape[1], -1)
    return found.fun, np.exp(scores - logsumexp(scores, axis=1)[:, None])


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reg", [1e-1, 1e-3])
def test_it_is_the_dense_solution(classes, weighted, reg):
    x, y, w = table(classes=classes)
    w = w if weighted else None
    model = fitted(x, y, weights=w, reg=reg)
    value, probability = dense(x, y, w, reg, x[:25])
    assert model.solution_.objective == pytest.approx(value, abs=1e-12)
    assert np.abs(model.predict_proba(x) - probability).max() < 1e-5
    assert model.solution_.gradient_norm <= 1e-7
    assert np.abs(model.solution_.newton.sum(axis=1)).max() < 1e-10


def test_the_gradient_is_that_of_the_objective():
    x, y, w = table(60)
    codes = np.unique(y, return_inverse=True)[1]
    basis = NewtonBasis.from_points(KERNEL, x[:5])
    rows = np.column_stack([basis(x), np.ones(len(x))])
    problem = LogisticProblem(basis.factor, rows.T @ (w[:, None] * rows) / w.sum(), 3, 1e-2)
    sections = np.vstack([KERNEL(basis.points, x), np.ones(len(x))])

    def value(z):
        newton = problem.newton(z)
        sums = LogisticSums.of(sections, codes, w, problem.coefficients(newton))
        return problem.value(newton, sums)

    z = np.random.default_rng(1).standard_normal(problem.shape).ravel()
    numeric = approx_fprime(z, lambda at: value(at)[0], 1e-6)
    assert np.abs(value(z)[1] - numeric).max() < 1e-5
    # In the scaled unknowns the curvature at zero is the identity.
    step = 1e-4
    rows_of = [(value(step * e)[1] - value(-step * e)[1]) / (2 * step) for e in np.eye(z.size)[:4]]
    assert np.abs(np.array(rows_of) - np.eye(z.size)[:4]).max() < 1e-5


def test_each_gradient_is_one_pass(tmp_path):
    x, y, w = table(20_000, classes=2)
    codes = (y == "yes").astype(float)
    write_store(tmp_path / "s.zarr", x, codes, w, chunk_rows=4096)
    about = dict(zarr.open_group(tmp_path / "s.zarr", mode="r").attrs)
    described = about["cme_dask"]
    del described["checksum"]
    described["columns"]["y"]["categories"] = {"y0": ["no", "yes"]}
    zarr.open_group(tmp_path / "s.zarr", mode="r+").attrs.update({"cme_dask": described})
    store, group = opened(tmp_path / "s.zarr")
    model = KernelLogisticRegression(KERNEL, tol=1e-3).fit(group, scheduler="synchronous")
    passes = model.solution_.passes
    assert model.n_passes_ == passes + 1
    # The moments of x are made of x alone.
    assert set(store.chunks("x").values()) == {passes + 1}
    assert set(store.chunks("y").values()) == {passes}
    assert passes <= 30
    plain = KernelLogisticRegression(KERNEL, tol=1e-3, pivots=model.basis_x_.pivots)
    plain.fit(x, y, sample_weight=w, scheduler="synchronous")
    assert model.classes_.tolist() == plain.classes_.tolist() == ["no", "yes"]
    assert np.abs(model.predict_proba(x[:99]) - plain.predict_proba(x[:99])).max() < 1e-9


@settings(max_examples=6)
@given(chunks=st.integers(100, 9000), scheduler=st.sampled_from(["threads", "synchronous"]))
def test_any_chunks_and_scheduler_give_the_same_bits(chunks, scheduler):
    x, y, _ = table(9000)
    plain = KernelLogisticRegression(KERNEL, pivots=x[:15], gradient_tol=1e-3)
    plain.fit(x, y, scheduler="synchronous")
    cut = KernelLogisticRegression(KERNEL, pivots=x[:15], gradient_tol=1e-3).fit(
        da.from_array(x, chunks=(chunks, 2)), da.from_array(y, chunks=chunks), scheduler=scheduler
    )
    assert np.array_equal(cut.solution_.newton, plain.solution_.newton)
    assert cut.classes_.tolist() == plain.classes_.tolist()


def test_saved_models_answer_alike(tmp_path):
    for number, y in enumerate((table()[1], np.arange(N) % 3, np.arange(N) % 2 == 0)):
        model = fitted(table()[0], y, gradient_tol=1e-4)
        path = tmp_path / f"{number}.zarr"
        model.save(path)
        found = load(path)
        assert found.labels == tuple(np.unique(y).tolist())
        assert np.array_equal(found.predict_proba(table()[0]), model.predict_proba(table()[0]))
        assert "gradient" in repr(found)
    state = read_model(path)
    spoiled = np.full_like(state.arrays["coef"], np.nan)
    with pytest.raises(StoreError, match="'coef' holds values that are not finite"):
        LogisticModel.from_state(replace(state, arrays=state.arrays | {"coef": spoiled}))
    odd = state.description | {"labels": [0, []]}
    with pytest.raises(StoreError, match="the labels are not all numbers, texts or booleans"):
        LogisticModel.from_state(replace(state, description=odd))
    zarr.open_group(path, mode="r+")["coef"][...] = np.nan
    with pytest.raises(StoreError, match=r"'coef' of .* is not the one that was written"):
        load(path)


def test_the_accuracy_is_that_of_labels_as_users_have_them():
    x, y, weights = table(classes=2)
    model = fitted(x, y == "yes").model_
    hits = model.predict(x) == (y == "yes")
    for seen in (y == "yes", (y == "yes")[:, None], (y == "yes").astype(str)):
        assert model.score(x, seen) == hits.mean()
    assert model.score(x, y == "yes", weights) == pytest.approx(np.average(hits, weights=weights))
    numbers = fitted(x, np.where(y == "yes", 7, 3)).model_
    assert numbers.score(x, np.where(y == "yes", "7", "3")) == hits.mean()
    assert 0.0 < numbers.score(x, np.where(np.arange(N) < 300, "none", "7")) < 0.5
    with pytest.raises(DataError, match=r"column 'y' has the unknown 'nonsense' \(600 rows\)"):
        model.score(x, np.full(N, "nonsense"))
    with pytest.raises(DataError, match=r"labels must have shape \(n,\), got \(300, 2\)"):
        model.score(x, (y == "yes").reshape(300, 2))
    with pytest.raises(DataError, match=r"y must have shape \(600,\), got \(599,\)"):
        model.score(x, y[1:] == "yes")


def test_missed_tolerances_are_told():
    x, y, _ = table()
    with pytest.raises(ConvergenceError, match="gradient_tol is 1e-12"):
        fitted(x, y, gradient_tol=1e-12, max_iter=3)
    with pytest.warns(ConvergenceWarning, match="after 3 steps"):
        model = fitted(x, y, gradient_tol=1e-12, max_iter=3, convergence="warn")
    assert model.n_iter_ == 3
    assert model.solution_.gradient_norm > 1e-12


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"reg": 0.0}, "reg must be above 0"),
        ({"gradient_tol": 1.5}, "gradient_tol must lie"),
        ({"max_iter": 0}, "max_iter must be an integer"),
        ({"convergence": "hope"}, "convergence must be one of raise, warn"),
        ({"tol": 0.0}, "tol must lie"),
    ],
)
def test_bad_parameters_are_one_sentence(parameters, message):
    x, y, _ = table()
    with pytest.raises(DataError, match=message):
        fitted(x, y, **parameters)


def test_far_away_and_separated_classes_stay_finite():
    x = np.concatenate([np.full((50, 1), -1.0), np.full((50, 1), 1.0)])
    x = x + 0.01 * np.arange(100)[:, None] / 100
    y = np.repeat([0, 1], 50)
    model = KernelLogisticRegression(kernels.Gaussian(0.3), reg=1e-6).fit(
        x, y, scheduler="synchronous"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probability = model.predict_proba([[-1.0], [1.0], [1e6]])
    assert np.isfinite(probability).all()
    assert np.abs(probability.sum(axis=1) - 1).max() < 1e-12
    assert probability[0, 0] > 0.99
    assert probability[1, 1] > 0.99
    assert abs(probability[2, 0] - 0.5) < 0.1
