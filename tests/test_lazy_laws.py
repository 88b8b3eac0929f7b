"""Laws at rows out of core: the answers of the same rows in memory, whatever the chunks."""

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from conftest import write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cme_dask import JointDistribution, kernels, metrics, open_sample
from cme_dask.errors import DataError, StoreError
from cme_dask.passes.lazy import BLOCK_BYTES
from cme_dask.passes.lazy_laws import LazyLaw, lazy_law

N = 3000
OPTIONS = {
    "kernel_x": kernels.Gaussian(0.6),
    "kernel_y": kernels.Gaussian(0.7),
    "tol": 0.3,
    "reg": 1e-4,
    "residual": False,
}


def draw(n=N, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 2))
    y = np.column_stack([np.sin(2 * x[:, 0]), x[:, 1]]) + [0.3, 0.5] * rng.standard_normal((n, 2))
    return x, y


X, Y = draw()
POINTS = np.array([[0.1, 0.2], [-0.4, 0.3]])


@pytest.fixture(scope="module")
def fit():
    declared = {"square": lambda y: y[:, 0] ** 2}
    return JointDistribution(**OPTIONS).fit(X, Y, functions=declared)


QUESTIONS = {
    "mean": lambda law: law.mean(),
    "std": lambda law: law.std(),
    "var": lambda law: law.var(),
    "cov": lambda law: law.cov(),
    "corr": lambda law: law.corr(),
    "cdf": lambda law: law.cdf([-0.5, 0.3], column="y1"),
    "cdf-of-one": lambda law: law.cdf(0.3, column="y0"),
    "orthant": lambda law: law.cdf(POINTS),
    "quantile": lambda law: law.quantile([0.1, 0.5]),
    "quantile-of-one": lambda law: law.quantile(0.3, column="y0"),
    "median": lambda law: law.median(),
    "lower": lambda law: law.interval(0.8)[0],
    "upper": lambda law: law.interval(0.8, column="y1")[1],
    "probability": lambda law: law.probability("y0 > 0.2"),
    "expect": lambda law: law.expect("square"),
    "expectations": lambda law: law.expect(["y0", "square"]),
    "density-ratio": lambda law: law.density_ratio(POINTS),
    "pdf": lambda law: law.pdf(POINTS),
    "log-pdf": lambda law: law.log_pdf(POINTS),
    "draws": lambda law: law.sample(3, random_state=5),
    "draw": lambda law: law.sample(),
    "weights": lambda law: law.weights(),
    "support": lambda law: law.effective_support(),
}


@pytest.mark.parametrize("name", QUESTIONS)
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(chunk=st.integers(60, 800))
def test_lazy_answers_are_those_in_memory(fit, name, chunk):
    rows = X[:700]
    lazily = fit.conditional(da.from_array(rows, chunks=(chunk, 2)))
    assert isinstance(lazily, LazyLaw)
    assert len(lazily) == 700
    found = QUESTIONS[name](lazily)
    expected = QUESTIONS[name](fit.conditional(rows))
    assert isinstance(found, da.Array)
    assert found.shape == expected.shape
    assert all(len(parts) == 1 for parts in found.chunks[1:])
    np.testing.assert_allclose(found.compute(scheduler="threads"), expected, atol=1e-12)


def test_both_directions_and_every_source(fit, tmp_path):
    path = write_store(tmp_path / "s.zarr", X, Y, chunk_rows=700)
    expected = fit.conditional(X).median()
    array = zarr.open_group(str(path))["x"]
    for values in (str(path), path, open_sample(str(path)), array, da.from_array(X, chunks=500)):
        np.testing.assert_allclose(fit.conditional(values).median().compute(), expected)
    lazily = fit.conditional(Y=str(path))
    assert lazily.columns.names == ("x0", "x1")
    np.testing.assert_allclose(lazily.mean().compute(), fit.conditional(Y=Y).mean(), atol=1e-12)


def test_columns_of_a_store_go_by_name(fit, tmp_path):
    path = write_store(tmp_path / "s.zarr", X[:, ::-1], Y, x_names=["x1", "x0"])
    found = fit.conditional(str(path)).mean().compute()
    np.testing.assert_allclose(found, fit.conditional(X).mean(), atol=1e-12)


def test_tasks_are_named_after_the_question_and_hold_64_mib(fit):
    lazily = fit.conditional(da.zeros((10**6, 2), chunks=(500_000, 2)))
    found = lazily.weights()
    assert max(found.chunks[0]) * found.shape[1] * 8 <= BLOCK_BYTES
    names = {str(key[0] if isinstance(key, tuple) else key) for key in found.dask}
    assert any(name.startswith("law-weights-") for name in names)
    assert lazily.quantile(0.5).name.startswith("law-quantile-")
    assert lazily.mean().chunks[0] == (500_000, 500_000)


def test_processes_answer_too(fit):
    lazily = fit.conditional(da.from_array(X[:600], chunks=(300, 2))).std()
    with dask.config.set(scheduler="processes", num_workers=2):
        found = lazily.compute()
    np.testing.assert_allclose(found, fit.conditional(X[:600]).std(), atol=1e-12)


def test_bad_values_are_named_when_it_is_computed(fit):
    rows = X.copy()
    rows[2017, 1] = np.nan
    lazily = fit.conditional(da.from_array(rows, chunks=(500, 2))).mean()
    with pytest.raises(DataError, match=r"column 'x1' has 1 \(first at row 2017\)"):
        lazily.compute()


def test_wrong_questions_are_refused_before_anything_is_read(fit, tmp_path):
    lazily = fit.conditional(da.from_array(X, chunks=(500, 2)))
    for ask, message in (
        (lambda: lazily.quantile(1.5), "numbers from 0 to 1"),
        (lambda: lazily.probability("z > 1"), "'z > 1'|unknown column"),
        (lambda: lazily.cdf(0.0, column="z"), "unknown column 'z'"),
        (lambda: lazily.mixture_weights(), "coupling"),
    ):
        with pytest.raises(DataError, match=message):
            ask()
    with pytest.raises(DataError, match="has 3 columns, the model's are x0, x1"):
        fit.conditional(da.zeros((10, 3)))
    with pytest.raises(DataError, match="points of one variable"):
        lazy_law(fit.model_)
    path = write_store(tmp_path / "s.zarr", X, Y, x_names=["a", "b"])
    with pytest.raises(DataError, match="lacks the columns 'x0', 'x1', and has others: 'a', 'b'"):
        fit.conditional(str(path))
    with pytest.raises(StoreError, match="does not exist"):
        fit.conditional(str(tmp_path / "no.zarr"))
    path = write_store(tmp_path / "t.zarr", X, Y)
    with pytest.raises(DataError, match="takes all rows"):
        fit.conditional(open_sample(str(path)).split(0.5)[0])


@pytest.mark.parametrize("column", [None, "y1"])
def test_crps_is_that_of_all_atoms(fit, column):
    law, cells = fit.conditional(X[:40]), fit.model_.y.cells
    pick = [0, 1] if column is None else [1]
    masses = law.weights()[:, cells.cell_of_atom] * cells.shares
    expected = metrics.crps(masses, cells.atoms[:, pick], Y[:40][:, pick])
    np.testing.assert_allclose(law.crps(Y[:40], column), expected, rtol=1e-10)
    with pytest.raises(DataError, match="40 expected"):
        law.crps(Y[:3])


def test_moved_laws_are_lazy_too():
    fit = JointDistribution(**{**OPTIONS, "residual": True}).fit(X, Y)
    assert fit.model_.residual is not None
    lazily, expected = fit.conditional(da.from_array(X[:900], chunks=(400, 2))), X[:900]
    for name in ("mean", "quantile", "probability", "draws", "lower"):
        found = QUESTIONS[name](lazily).compute()
        np.testing.assert_allclose(found, QUESTIONS[name](fit.conditional(expected)), atol=1e-10)


def test_crps_of_moved_laws_is_that_of_their_atoms():
    fit = JointDistribution(**{**OPTIONS, "residual": True}).fit(X, Y)
    law = fit.conditional(X[:30])
    draws = np.sort(law.sample(4000)[:, :, 0], axis=1)
    even = np.full((1, 4000), 1 / 4000)
    sampled = [metrics.crps(even, d, [y])[0] for d, y in zip(draws, Y[:30, 0], strict=True)]
    # The CRPS of 4,000 draws has a standard error near 0.01 of the deviation.
    np.testing.assert_allclose(law.crps(Y[:30], "y0"), sampled, atol=0.03)
