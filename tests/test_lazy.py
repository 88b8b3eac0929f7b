"""Gram columns and features as lazy Dask arrays."""

import tracemalloc
from collections import Counter

import dask
import dask.array as da
import numpy as np
import oracle_joint as dense
import oracle_kernels as slow
import pandas as pd
import pytest
import xarray as xr
import zarr
from conftest import rewriting, write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_reads import opened

from cme_dask import PivotedCholesky, gram_columns, kernels, open_sample
from cme_dask.errors import DataError, NotFittedError, StoreError
from cme_dask.numerics.basis import BLOCK, in_blocks
from cme_dask.passes import lazy

GAUSSIAN = kernels.Gaussian(1.0)
N = 2500

KERNELS = {
    "gaussian": (kernels.Gaussian((0.9, 2.0)), lambda X, Z: slow.gaussian(X, Z, (0.9, 2.0))),
    "matern": (kernels.Matern(1.5, 1.5), lambda X, Z: slow.matern(X, Z, 1.5, 1.5)),
    "polynomial": (kernels.Polynomial(2, 1.0), lambda X, Z: slow.polynomial(X, Z, 2, 1.0, 1.0)),
}


@pytest.fixture(scope="module")
def table():
    return np.random.default_rng(5).normal(size=(N, 2))


def raiser(*_, **__):
    raise AssertionError("computed, where nothing should be")


def raise_if_dask_computes():
    return dask.config.set(scheduler=raiser)


def zarr_array(folder, x):
    array = zarr.create_array(str(folder / "a"), shape=x.shape, chunks=(700, 1), dtype=x.dtype)
    array[...] = x
    return str(folder / "a")


SOURCES = {
    "numpy": lambda folder, x: x,
    "pandas": lambda folder, x: pd.DataFrame(x, columns=["a", "b"]),
    "dask": lambda folder, x: da.from_array(x, chunks=(600, 1)),
    "store": lambda folder, x: write_store(folder / "s", x, x[:, 0], chunk_rows=800),
    "sample": lambda folder, x: open_sample(write_store(folder / "s", x, x[:, 0])),
    "zarr": zarr_array,
    "xarray": lambda folder, x: xr.DataArray(da.from_array(x, chunks=(600, 2)), dims=("t", "c")),
}


# Gram columns --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kind", SOURCES)
def test_gram_columns_equal_the_oracle_and_are_lazy(table, tmp_path, name, kind):
    kernel, oracle = KERNELS[name]
    source, points = SOURCES[kind](tmp_path, table), table[:7]
    with raise_if_dask_computes():
        gram = gram_columns(kernel, source, points)
    assert isinstance(gram, da.Array)
    assert (gram.shape, gram.dtype) == ((N, 7), np.float64)
    assert isinstance(gram._meta, np.ndarray)
    assert gram._meta.dtype == np.float64
    found = gram.compute(scheduler="synchronous")
    np.testing.assert_allclose(found, oracle(table, points), rtol=1e-12, atol=1e-13)
    part = gram[1000:1010, 3:5].compute(scheduler="threads")
    np.testing.assert_array_equal(part, found[1000:1010, 3:5])


def test_points_and_their_transpose_have_other_columns(table):
    points = np.random.default_rng(0).normal(size=(2, 2))
    one, two = (gram_columns(kernels.Gaussian(1.0), table, each) for each in (points, points.T))
    first, second = da.compute(one, two, scheduler="synchronous")
    np.testing.assert_array_equal(one.compute(scheduler="synchronous"), first)
    np.testing.assert_array_equal(two.compute(scheduler="synchronous"), second)
    assert abs(first - second).max() > 0.01


def test_a_folder_of_others_that_is_written_anew_has_other_names(table, tmp_path):
    """A cluster that still held its rows of before would answer with these."""
    names = []
    for rows in (table, table + 1.0):
        zarr.create_array(str(tmp_path / "x"), data=rows, chunks=(600, 2), overwrite=True)
        names.append(gram_columns(kernels.Gaussian(1.0), str(tmp_path / "x"), table[:3]).name)
        names.append(gram_columns(kernels.Gaussian(1.0), str(tmp_path / "x"), table[:3]).name)
    assert names[0] == names[1] != names[2] == names[3]


def test_no_chunk_is_read_before_and_each_once_after(table, tmp_path, monkeypatch):
    """Also where the columns are divided: their blocks share the rows."""
    monkeypatch.setattr(lazy, "_COLUMNS", 4)
    write_store(tmp_path / "s", table, table[:, 0], chunk_rows=500)
    store, group = opened(tmp_path / "s")
    gram = gram_columns(GAUSSIAN, group, table[:11])
    assert gram.chunks == ((500,) * 5, (4, 4, 3))
    assert not store.chunks("x")
    gram.sum().compute(scheduler="threads")
    assert store.chunks("x") == {f"x/c/{i}/0": 1 for i in range(5)}
    assert not store.chunks("y")


@pytest.mark.parametrize("kind", ["numpy", "dask", "store", "zarr"])
def test_every_scheduler_gives_the_same(table, tmp_path, kind, cluster):
    fit = PivotedCholesky(GAUSSIAN, tol=1e-2).fit(table)
    source = SOURCES[kind](tmp_path, table)
    arrays = [gram_columns(GAUSSIAN, source, fit.pivots_)]
    arrays += [] if kind == "numpy" else [fit.transform(source)]
    for lazily in arrays:
        expected = lazily.compute(scheduler="synchronous")
        for scheduler in ("threads", cluster, *(["processes"] if kind == "store" else [])):
            np.testing.assert_array_equal(lazily.compute(scheduler=scheduler), expected)


def test_names_of_tasks_read_well_and_constants_travel_once(table):
    fit = PivotedCholesky(GAUSSIAN, tol=1e-2).fit(table)
    source = da.from_array(table, chunks=(100, 2))
    for lazily, name in (
        (fit.transform(source), "features"),
        (fit.gram_columns(source), "gram-columns"),
    ):
        (optimised,) = dask.optimize(lazily)
        keys = list(optimised.__dask_graph__())
        names = Counter(dask.utils.key_split(key) for key in keys)
        assert names[name] == 25
        assert names[f"{name}-plan"] == 1
    assert fit.transform(source).name == fit.transform(source).name


def test_gram_columns_at_the_own_pivots(table, tmp_path):
    frame = pd.DataFrame(table, columns=["wind", "rain"])
    fit = PivotedCholesky(kernels.Gaussian((0.5, 2.0)), tol=1e-1).fit(frame)
    gram = fit.gram_columns(frame[["rain", "wind"]]).compute()
    expected = slow.gaussian(table, fit.pivots_, (0.5, 2.0))
    np.testing.assert_allclose(gram, expected, atol=1e-13)
    with pytest.raises(NotFittedError, match="call fit first"):
        PivotedCholesky().gram_columns(table)


def test_what_gram_columns_refuses(table):
    cases = [
        (("gaussian", table, table), "kernel must be one of cme_dask.kernels"),
        ((GAUSSIAN, table, table[:, :1]), r"points must have shape \(m, 2\), got \(2500, 1\)"),
        ((GAUSSIAN, table, table[:0]), r"points must have shape \(m, 2\), got \(0, 2\)"),
        ((GAUSSIAN, table, [["a", "b"]]), "points must be numeric"),
        ((GAUSSIAN, table, np.full((1, 2), np.nan)), "'x1' has 1 .first at row 0. NaN"),
        ((kernels.Gaussian((1.0, 2.0, 3.0)), table, table), "3"),
        ((GAUSSIAN, "nix.zarr", table), "nix.zarr does not exist"),
    ]
    for arguments, message in cases:
        with pytest.raises(DataError, match=message):
            gram_columns(*arguments)
    one = gram_columns(GAUSSIAN, table[:, 0], [0.0, 1.0])
    np.testing.assert_allclose(one, slow.gaussian(table[:, :1], np.array([[0.0], [1.0]]), 1.0))


# Both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "dask", "store", "zarr", "xarray"])
@pytest.mark.parametrize("what", ["gram", "features"])
def test_nan_is_named_with_column_and_row_when_computed(table, tmp_path, kind, what):
    spoiled = table.copy()
    spoiled[1777, 1] = np.nan
    if kind == "store":  # which refuses NaN when it is written
        path = SOURCES[kind](tmp_path, table)
        with rewriting(path) as group:
            group["x"][1777, 1] = np.nan
    else:
        path = SOURCES[kind](tmp_path, spoiled)
    fit = PivotedCholesky(GAUSSIAN, tol=1e-1).fit(table)
    if what == "features" and kind == "numpy":
        with pytest.raises(DataError, match=r"column 'x1' has 1 \(first at row 1777\) NaN"):
            fit.transform(path)
        return
    lazily = fit.gram_columns(path) if what == "gram" else fit.transform(path)
    with pytest.raises(DataError, match=r"column 'x?1' has 1 \(first at row 1777\) NaN"):
        lazily.compute(scheduler="threads")
    if kind != "numpy":  # of which all rows are in one block
        assert np.isfinite(lazily[:600].compute(scheduler="threads")).all()


def test_a_damaged_chunk_is_named(table, tmp_path):
    path = write_store(tmp_path / "s", table, table[:, 0], chunk_rows=500)
    (path / "x/c/3/0").write_bytes(b"nonsense")
    lazily = gram_columns(GAUSSIAN, path, table[:3])
    with pytest.raises(StoreError, match=r"chunk x/c/3/0 of .* \(rows 1500 to 1999\)"):
        lazily.compute(scheduler="threads")


def test_blocks_of_a_huge_chunk_stay_small(monkeypatch):
    """One Dask chunk of all rows: its features are made, and let go, block by block."""
    rows = np.random.default_rng(0).normal(size=(60_000, 2))
    fit = PivotedCholesky(GAUSSIAN, tol=1e-4).fit(rows[:2000])
    monkeypatch.setattr(lazy, "BLOCK_BYTES", 1 << 21)
    lazily = fit.transform(da.from_array(rows, chunks=-1))
    m = len(fit.pivots_)
    assert m > 70
    assert lazily.chunks[1] == (m,)
    assert max(lazily.chunks[0]) * m * 8 <= 1 << 21
    assert all(rows % BLOCK == 0 for rows in lazily.chunks[0][:-1])
    tracemalloc.start()
    total = (lazily**2).sum().compute(scheduler="synchronous")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == pytest.approx((fit.transform(rows) ** 2).sum())
    assert peak < 10 << 20 < 60_000 * m * 8 / 3


def test_numpy_features_take_little_beside_themselves():
    rows = np.random.default_rng(0).normal(size=(100_000, 2))
    fit = PivotedCholesky(GAUSSIAN, tol=1e-4).fit(rows[:2000])
    size = 8 * len(rows) * len(fit.pivots_)
    tracemalloc.start()
    fit.transform(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size + (12 << 20) < 1.3 * size


@pytest.fixture(scope="module")
def both(table):
    fits = {b: PivotedCholesky(GAUSSIAN, tol=1e-3, basis=b).fit(table) for b in BASES}
    return {b: (fit, fit.transform(table)) for b, fit in fits.items()}


BASES = ("newton", "spectral")

cuts = st.lists(st.integers(1, N - 1), max_size=8, unique=True).map(
    lambda edges: tuple(np.diff([0, *sorted(edges), N]).tolist())
)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(chunks=cuts, basis=st.sampled_from(BASES))
def test_any_chunks_give_the_features_to_rounding(table, both, chunks, basis):
    fit, expected = both[basis]
    lazily = fit.transform(da.from_array(table, chunks=(chunks, 1)))
    assert lazily.chunks[0] == chunks
    found = lazily.compute(scheduler="synchronous")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("basis", BASES)
def test_chunks_on_the_grid_give_the_same_bits(table, both, basis, monkeypatch):
    fit, expected = both[basis]
    for rows in (BLOCK, 2 * BLOCK, N):
        lazily = fit.transform(da.from_array(table, chunks=(rows, 2)))
        np.testing.assert_array_equal(lazily.compute(scheduler="threads"), expected)
    monkeypatch.setattr(lazy, "BLOCK_BYTES", 1)
    lazily = fit.transform(da.from_array(table, chunks=-1))
    assert lazily.chunks[0] == (BLOCK, BLOCK, N - 2 * BLOCK)
    np.testing.assert_array_equal(lazily.compute(scheduler="threads"), expected)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("basis", BASES)
def test_features_equal_the_dense_basis(table, name, basis):
    kernel, oracle = KERNELS[name]
    fit = PivotedCholesky(kernel, tol=1e-3, basis=basis).fit(table)
    newton = dense.newton(oracle, table, fit.pivots_)
    expected = newton if basis == "newton" else newton @ fit.basis_.spectral.transform
    lazily = fit.transform(da.from_array(table, chunks=(999, 2)))
    np.testing.assert_allclose(lazily.compute(), expected, atol=1e-9)


@pytest.mark.parametrize("n", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_blocks_cover_all_rows(n):
    rows = np.arange(3.0 * n).reshape(n, 3)
    sizes = []

    def write(part, out):
        sizes.append(len(part))
        out[0], out[1] = part.sum(axis=1), part[:, 0]

    found = in_blocks(write, rows, 2)
    np.testing.assert_array_equal(found, np.column_stack([rows.sum(axis=1), rows[:, 0]]))
    assert max(sizes, default=0) <= BLOCK
    assert sum(sizes) == n
