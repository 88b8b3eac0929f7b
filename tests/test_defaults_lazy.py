"""Dask arrays in, Dask arrays out: all queries of default fits, their types, one task a chunk."""

import inspect
import typing

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from conftest import BRIEF, write_store

import cme_dask
from cme_dask import (
    ConditionalLaw,
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    KernelLogisticRegression,
    LazyLaw,
    PivotedCholesky,
    Tuning,
    load,
)
from cme_dask import models as models_
from cme_dask.errors import DataError

N, CHUNK = 300, 90


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(N, 1))
    y = np.sin(x[:, 0]) + 0.3 * rng.normal(size=N)
    label = np.where(x[:, 0] + 0.5 * rng.normal(size=N) > 0, "up", "down")
    return x, y, label


@pytest.fixture(scope="module")
def fits(rows):
    x, y, label = rows
    tuning = Tuning(**BRIEF)
    return {
        "joint": JointDistribution(tuning=tuning).fit(x, y, functions=["y0 > 0"]),
        "embedding": ConditionalMeanEmbedding().fit(x, y, functions=["y0 > 0"]),
        "joint classes": JointClassifier(tuning=tuning).fit(x, label),
        "embedded classes": EmbeddingClassifier().fit(x, label),
        "logistic": KernelLogisticRegression().fit(x, label),
        "features": PivotedCholesky().fit(x),
    }


@pytest.fixture(scope="module")
def models(fits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, fit in fits.items():
        fit.save(folder / name)
    return {name: load(folder / name) for name in fits}


@pytest.fixture
def lazy(rows):
    """Rows that know whether they have been computed."""
    x, _, _ = rows
    return da.from_array(x, chunks=(CHUNK, 1))


QUERIES = {
    "joint": {
        "predict": lambda m, x: m.predict(x),
        "expect": lambda m, x: m.expect(["y0", "y0 > 0"], x),
        "expect with std": lambda m, x: m.expect("y0 > 0", x, return_std=True)[1],
        "density_ratio": lambda m, x: m.density_ratio(x, [[0.1], [0.7]]),
        "weights": lambda m, x: m.weights(x),
        "conditional": lambda m, x: m.conditional(x).quantile([0.1, 0.9]),
    },
    "embedding": {
        "predict": lambda m, x: m.predict(x),
        "expect": lambda m, x: m.expect("y0 > 0", x),
        "mass": lambda m, x: m.mass(x),
        "embedding": lambda m, x: m.embedding(x, [[0.1], [0.7]]),
    },
    **{
        name: {
            "predict_proba": lambda m, x: m.predict_proba(x),
            "predict": lambda m, x: m.predict(x),
        }
        for name in ("joint classes", "embedded classes", "logistic")
    },
    "features": {"transform": lambda m, x: m.transform(x)},
}
KINDS = {
    "joint": (JointDistribution, models_.JointModel),
    "embedding": (ConditionalMeanEmbedding, models_.EmbeddingModel),
    "joint classes": (JointClassifier, models_.JointModel),
    "embedded classes": (EmbeddingClassifier, models_.EmbeddingModel),
    "logistic": (KernelLogisticRegression, models_.LogisticModel),
    "features": (PivotedCholesky, models_.FeatureModel),
}
CASES = [
    pytest.param(name, query, saved, id=f"{KINDS[name][saved].__name__}-{query}")
    for name, queries in QUERIES.items()
    for query in queries
    for saved in (0, 1)
    if hasattr(KINDS[name][saved], query.split()[0])
]


@pytest.mark.parametrize(("name", "query", "saved"), CASES)
def test_answers_to_dask_arrays_are_lazy(fits, models, rows, lazy, name, query, saved):
    ask, which = QUERIES[name][query], models if saved else fits
    expected = ask(which[name], rows[0])

    def refuse(dsk, keys, **kwargs):
        raise AssertionError("computed")

    with dask.config.set(scheduler=refuse):
        found = ask(which[name], lazy)
        assert isinstance(found, da.Array)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert found.chunks[0] == lazy.chunks[0]
        assert set(map(len, found.chunks[1:])) <= {1}
    done = found.compute(scheduler="synchronous")
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(done, expected, 1e-10, 1e-12)
    else:
        np.testing.assert_array_equal(done, expected)


def test_a_chunk_of_answers_is_one_task(fits, lazy):
    for found in (fits["joint"].expect("y0", lazy), fits["joint"].predict(lazy)):
        (optimised,) = dask.optimize(found)
        layers = [k for k in optimised.__dask_graph__() if isinstance(k, tuple)]
        assert len(layers) <= 2 * len(lazy.chunks[0])  # the rows, and what is made of them


def test_points_of_stores_are_lazy(fits, rows, tmp_path):
    x, y, _ = rows
    store = write_store(tmp_path / "s", x, y, chunk_rows=100)
    for points in (store, str(store), cme_dask.open_sample(store)):
        found = fits["joint"].predict(points)
        assert isinstance(found, da.Array)
        np.testing.assert_allclose(found.compute(), fits["joint"].predict(x), 1e-10)


def test_wrong_questions_are_refused_at_once(fits, lazy):
    for ask, message in (
        (lambda: fits["joint"].expect("y7", lazy), "unknown column 'y7'"),
        (lambda: fits["joint"].expect("y0 > 7", lazy), "not declared"),
        (lambda: fits["joint"].predict(da.zeros((9, 2))), "has 2 columns, the model's are x0"),
        (lambda: fits["joint"].conditional(lazy).crps(np.zeros((5, 1))), "300 expected, got 5"),
        (lambda: fits["joint"].conditional(lazy).cdf(np.zeros((N, 3)), paired=True), "shape"),
    ):
        with pytest.raises(DataError, match=message):
            ask()
    bad = lazy.map_blocks(lambda block: np.where(block > 1, np.nan, block), dtype=float)
    with pytest.raises(DataError, match="column 'x0' has"):
        fits["joint"].predict(bad).compute(scheduler="synchronous")


# Laws


PAIRED = {
    "crps": lambda law, y: law.crps(y),
    "crps of a column": lambda law, y: law.crps(y, column="y0"),
    "density_ratio": lambda law, y: law.density_ratio(y, paired=True),
    "pdf": lambda law, y: law.pdf(y, paired=True),
    "log_pdf": lambda law, y: law.log_pdf(y, paired=True, bandwidth=0.2),
    "cdf": lambda law, y: law.cdf(y[:, 0], paired=True),
    "cdf of a column": lambda law, y: law.cdf(y[:, 0], column="y0", paired=True),
}


@pytest.mark.parametrize("name", PAIRED)
def test_laws_meet_observed_rows_lazily(fits, rows, lazy, name):
    x, y, _ = rows
    expected = PAIRED[name](fits["joint"].conditional(x), y[:, None])
    law = fits["joint"].conditional(lazy)
    stored = zarr.create_array({}, data=y[:, None], chunks=(70, 1))
    for observed in (y[:, None], da.from_array(y[:, None], chunks=(70, 1)), stored):
        if name.startswith("cdf") and observed is stored:  # which can't be sliced lazily
            column = None if name == "cdf" else "y0"
            found = law.cdf(stored, column=column, paired=True)
        else:
            found = PAIRED[name](law, observed)
        assert isinstance(found, da.Array)
        np.testing.assert_allclose(found.compute(scheduler="synchronous"), expected, 1e-10, 1e-12)


def test_lazy_laws_take_lists_of_events(fits, rows, lazy):
    texts = ["0 < y0 < 0.5", "not y0 > 0"]
    found = fits["joint"].conditional(lazy).probability(texts)
    expected = fits["joint"].conditional(rows[0]).probability(texts)
    np.testing.assert_allclose(found.compute(), expected, 1e-10, 1e-12)


def public(kind):
    members = {name: value for name, value in inspect.getmembers(kind) if name[0] != "_"}
    return {name: value for name, value in members.items() if not name.startswith("plot_")}


def test_lazy_laws_have_every_query_of_laws():
    """But for plots, which would gather the rows."""
    known, lazily = public(ConditionalLaw), public(LazyLaw)
    assert set(known) == set(lazily) - {"functions", "model", "reverse", "source"}
    for name, method in known.items():
        if inspect.isfunction(method):
            arguments = inspect.signature(method).parameters
            assert list(arguments) == list(inspect.signature(lazily[name]).parameters), name
            for key, argument in arguments.items():
                mine = inspect.signature(lazily[name]).parameters[key]
                assert (argument.default, argument.kind) == (mine.default, mine.kind), name


# Types


TYPED = {
    cme_dask.JointDistribution: {
        *("predict", "expect", "conditional", "density_ratio", "weights"),
    },
    cme_dask.ConditionalMeanEmbedding: {"predict", "expect"},
    cme_dask.JointClassifier: {"predict", "predict_proba", "conditional"},
    cme_dask.EmbeddingClassifier: {
        *("predict", "predict_proba", "signed_proba", "clipped_proba", "entropy"),
    },
    cme_dask.KernelLogisticRegression: {"predict", "predict_proba"},
    models_.JointModel: {"expect", "conditional", "density_ratio", "weights"},
    models_.EmbeddingModel: {"expect", "mass", "embedding"},
    models_.LogisticModel: {"predict_proba"},
    models_.FeatureModel: {"transform"},
    ConditionalLaw: {name for name in public(ConditionalLaw) if name not in ("columns", "numeric")},
    LazyLaw: {*public(ConditionalLaw)} - {"columns", "numeric", "n"},
}


@pytest.mark.parametrize("kind", TYPED, ids=lambda kind: kind.__name__)
def test_queries_have_types(kind):
    for name in TYPED[kind]:
        member = inspect.getattr_static(kind, name)
        function = member.fget if isinstance(member, property) else member
        returned = typing.get_type_hints(function, localns={"da": da})["return"]
        parts = typing.get_args(returned) if typing.get_origin(returned) is tuple else (returned,)
        assert typing.Any not in parts, f"{kind.__name__}.{name}"
