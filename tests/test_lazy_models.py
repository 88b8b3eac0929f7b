"""Saved transformers: the same features without data or Dask, and from the command line."""

import copy
import os
import signal
import subprocess
import sys
import time

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from conftest import write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from test_cli import as_json, assert_refused, interrupt, run
from test_storage import mutated

from cme_dask import PivotedCholesky, kernels, load, open_sample
from cme_dask.data.generate import write_normal3
from cme_dask.data.model_file import ModelState
from cme_dask.errors import DataError, NotFittedError, StoreError
from cme_dask.models import FeatureModel, JointModel, load_only

GAUSSIAN = kernels.Gaussian((0.9, 2.0))


@pytest.fixture(scope="module")
def table():
    x = np.random.default_rng(2).normal(size=(1500, 2))
    return pd.DataFrame(x, columns=["wind", "rain"])


@pytest.fixture(scope="module", params=["newton", "spectral"])
def saved(request, table, tmp_path_factory):
    fit = PivotedCholesky(GAUSSIAN, tol=1e-2, basis=request.param).fit(table)
    path = tmp_path_factory.mktemp("m") / "m"
    fit.save(path)
    return fit, path


# Files ---------------------------------------------------------------------------------------


def test_saved_features_are_the_same_bits(saved, table):
    fit, path = saved
    expected = fit.transform(table)
    model = load(path)
    assert isinstance(model, FeatureModel)
    np.testing.assert_array_equal(model.transform(table), expected)
    np.testing.assert_array_equal(model.transform(table[["rain", "wind"]]), expected)
    np.testing.assert_array_equal(model.transform(table.to_numpy()), expected)
    assert model.names == tuple(fit.get_feature_names_out())
    assert model.trace_error == fit.trace_error_
    assert model.kernel == GAUSSIAN
    for part in ("wind, rain", f"{model.rank}, {model.kind} basis", "1,500 in 1 pass"):
        assert part in repr(model)
    assert "FeatureModel" in model._repr_html_()
    assert repr(model) == repr(fit.model_)


def test_a_loaded_estimator_is_fitted(saved, table, tmp_path):
    fit, path = saved
    again = PivotedCholesky.load(path)
    for name in ("pivots_", "eigenvalues_"):
        np.testing.assert_array_equal(getattr(again, name), getattr(fit, name))
    for name in ("trace_error_", "n_features_in_", "n_passes_"):
        assert getattr(again, name) == getattr(fit, name)
    lazily = da.from_array(table.to_numpy(), chunks=(1024, 2))
    np.testing.assert_array_equal(again.transform(lazily), fit.transform(table))
    again.transform_store(table, tmp_path / "f")
    found = zarr.open_group(str(tmp_path / "f"))["x"][...]
    np.testing.assert_array_equal(found, fit.transform(table))
    again.save(tmp_path / "again")
    np.testing.assert_array_equal(load(tmp_path / "again").transform(table), fit.transform(table))
    refitted = clone(again).fit(table)  # on the pivots that it now is given
    order = np.lexsort(refitted.pivots_.T), np.lexsort(fit.pivots_.T)
    np.testing.assert_array_equal(refitted.pivots_[order[0]], fit.pivots_[order[1]])
    ours, theirs = (np.asarray(one.transform(table)[:200]) for one in (refitted, fit))
    np.testing.assert_allclose(ours @ ours.T, theirs @ theirs.T, atol=1e-8)


def test_what_a_loaded_model_refuses(saved, table):
    model = load(saved[1])
    for points, message in (
        (table[["wind"]], "lacks the column 'rain'"),
        (table.to_numpy()[:, :1], r"X must have shape \(n, 2\)"),
        (table.assign(rain=np.nan), "'rain' has 1,500"),
        ([["a", "b"]], "X must be numeric"),
    ):
        with pytest.raises(DataError, match=message):
            model.transform(points)
    assert model.transform(table[:0]).shape == (0, model.rank)


def test_models_of_the_other_kind_are_refused(saved, tmp_path):
    from cme_dask import JointDistribution

    x = np.random.default_rng(0).normal(size=(200, 2))
    law = JointDistribution(kernel_x=GAUSSIAN, kernel_y=GAUSSIAN, tol=0.5).fit(x, x)
    law.save(tmp_path / "law")
    with pytest.raises(DataError, match="holds a JointModel, a FeatureModel was expected: save"):
        PivotedCholesky.load(tmp_path / "law")
    with pytest.raises(DataError, match="holds a FeatureModel, a JointModel was expected: save"):
        load_only(JointModel, saved[1])
    with pytest.raises(NotFittedError, match="call fit first"):
        PivotedCholesky().save(tmp_path / "m")
    with pytest.raises(DataError, match="already exists"):
        saved[0].save(saved[1])


def twos(X):
    return 2 * np.ones(len(X))


def cosine(X, Z):
    return np.cos(X[:, :1] - Z[:, 0]) + np.cos(X[:, 1:] - Z[:, 1])


def test_custom_kernels_come_from_the_caller(table, tmp_path):
    kernel = kernels.Custom("cosine", cosine, twos)
    fit = PivotedCholesky(kernel, tol=1e-3).fit(table)
    fit.save(tmp_path / "m")
    with pytest.raises(DataError, match="'cosine' is a user's own and was not supplied"):
        load(tmp_path / "m")
    again = PivotedCholesky.load(tmp_path / "m", kernels={"cosine": kernel})
    np.testing.assert_array_equal(again.transform(table), fit.transform(table))


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_hostile_descriptions_give_clear_errors(saved, data):
    state = saved[0].model_.to_state()
    hostile = ModelState(state.type, mutated(data, copy.deepcopy(state.description)), state.arrays)
    try:
        with np.errstate(all="ignore"):
            model = FeatureModel.from_state(hostile)
            repr(model), model._repr_html_()
            model.transform(np.zeros((2, len(model.columns.names))))
    except DataError:
        pass


@pytest.mark.parametrize("name", ["newton_points", "newton_factor", "transform", "eigenvalues"])
def test_hostile_arrays_give_clear_errors(saved, name):
    state, name = saved[0].model_.to_state(), f"basis_{name}"
    for change in (lambda a: a[:-1], lambda a: a[..., :-1], lambda a: a.astype(str)):
        arrays = state.arrays | {name: change(state.arrays[name])}
        with pytest.raises(StoreError, match="model's array"):
            FeatureModel.from_state(ModelState(state.type, state.description, arrays))
    missing = {key: value for key, value in state.arrays.items() if key != name}
    with pytest.raises(StoreError, match="model lacks the array"):
        FeatureModel.from_state(ModelState(state.type, state.description, missing))


def test_features_need_neither_dask_nor_sklearn(saved):
    code = f"""
import sys
import cme_dask
model = cme_dask.load({str(saved[1])!r})
print(float(model.transform([[0.5, -0.25]])[0, 1]).hex())
heavy = {{"dask", "distributed", "sklearn", "pandas", "xarray"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = float.fromhex(done.stdout)
    assert found == pytest.approx(saved[0].transform([[0.5, -0.25]])[0, 1], abs=1e-14)


# The command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "s.zarr"
    write_normal3(path, 20_000, chunk_rows=4096)
    return path


@pytest.fixture(scope="module")
def model(store):
    path = store.with_name("m.zarr")
    options = ("--tol", 1e-3, "--basis", "spectral", "--length-scale", 0.2)
    return path, as_json("features", store, "--out", path, *options)


def test_features_and_transform_give_what_python_gives(store, model, tmp_path, brief_search):
    path, told = model
    fit = PivotedCholesky(kernels.Gaussian(0.2), tol=1e-3, basis="spectral").fit(store)
    assert (told["rows"], told["rank"], told["passes"]) == (20_000, len(fit.pivots_), 1)
    assert told["trace_error"] == fit.trace_error_
    assert told["memory"]["predicted"] > 0
    out = tmp_path / "f.zarr"
    where = ("--chunk-rows", "5k", "--dtype", "float32", "--scheduler", "processes")
    done = as_json("transform", store, "--model", path, "--out", out, *where, "--workers", 2)
    assert (done["rows"], done["rank"], done["dtype"]) == (20_000, fit.model_.rank, "float32")
    assert (done["chunk_rows"], done["passes"], done["basis"]) == (5000, 1, "spectral")
    assert done["bytes"] > 20_000 * 3 * 4
    x = open_sample(store).sources[0].read(0, 20_000)
    found = zarr.open_group(str(out))["x"][...]
    np.testing.assert_array_equal(found, fit.transform(x).astype(np.float32))
    model_of_features = as_json(
        "fit", out, "--out", tmp_path / "law", "--tol", 1e-2, "--kernel", "median"
    )
    assert model_of_features["rows"] == 20_000


def test_tables_and_info_tell_what_it_is(store, model, tmp_path):
    path, told = model
    out = tmp_path / "f.zarr"
    code, table, lines = run("transform", store, "--model", path, "--out", out)
    assert code == 0, lines
    assert f"20,000 x {told['rank']} float64 in chunks of" in table
    assert "transformed 20,000 rows" in lines
    info = as_json("info", path)
    assert (info["type"], info["rank"], info["basis"]) == ("FeatureModel", told["rank"], "spectral")
    assert f"{told['rank']}, spectral basis" in run("info", path)[1]
    about = as_json("info", out)
    assert about["features"]["columns"] == ["x"]
    assert about["features"]["trace_error"] == told["trace_error"]
    shown = run("info", out)[1]
    assert "features of x of" in shown
    assert "spectral basis, Gaussian(length_scale=0.2)" in " ".join(shown.split())
    _, table, _ = run("features", store, "--out", tmp_path / "n", "--max-rank", 3)
    assert "3, newton basis" in table


def test_many_columns_are_not_all_listed(store, tmp_path):
    x = np.random.default_rng(0).normal(size=(500, 60))
    path = write_store(tmp_path / "s", x, x[:, 0])
    shown = run("info", path)[1]
    assert "x0, x1, ..., x59" in shown
    assert "x30" not in shown
    assert "x0, x1, ..., x59" in repr(open_sample(path))


def test_wrong_uses_end_with_2_or_3(store, model, tmp_path):
    path, _ = model
    new = tmp_path / "f.zarr"
    transform = ("transform", store, "--model", path, "--out", new)
    assert_refused(2, *transform[:-1], store, says="would replace the input STORE")
    assert_refused(2, *transform, "--dtype", "int8", says="'int8' is not one of")
    assert_refused(
        2, *transform, "--chunk-rows", 2**40, says="--chunk-rows must be an integer from 1 to"
    )
    assert_refused(3, *transform, "--memory-limit", "10MB", says="lower --chunk-rows")
    assert_refused(2, "transform", store, "--model", store, "--out", new, says="'model' was")
    assert_refused(2, "transform", path, "--model", path, "--out", new, says="'sample' was")
    assert_refused(2, "expect", path, "--given", "x=0.1", says="a JointModel was expected")
    features = ("features", store, "--out", new)
    assert_refused(2, *features, "--x", "nix", says="unknown column 'nix'")
    assert_refused(2, *features, "--tol", 2, says="tol must lie between 0 and 1")
    assert_refused(2, *features, "--length-scale", "a", says="does not read NUMBER")
    assert_refused(2, *features, "--length-scale", "-1", says="length_scale")
    assert_refused(3, *features, "--memory-limit", "10MB", says="lower --max-rank")
    assert not list(tmp_path.iterdir())
    PivotedCholesky.load(path).transform_store(np.zeros((9, 1)), new)
    assert_refused(2, "fit", new, "--out", tmp_path / "m", says="holds no y")


def test_a_damaged_origin_is_a_sentence(store, model, tmp_path):
    run("transform", store, "--model", model[0], "--out", tmp_path / "f")
    group = zarr.open_group(str(tmp_path / "f"), mode="r+")
    about = group.attrs["cme_dask"]
    del about["checksum"]
    group.attrs["cme_dask"] = about | {"features": {"basis": 3}}
    assert_refused(2, "info", tmp_path / "f", says="the origin of")


@pytest.fixture(scope="module")
def long_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "s.zarr"
    write_normal3(path, 3_000_000)
    return path


def half_written(process, folder):
    """The command has begun to write."""
    while not list(folder.glob(".f.zarr.*.partial/output/x/c/*")):
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.parametrize(
    "scheduler", ["threads", pytest.param("processes", marks=pytest.mark.slow)]
)
def test_interrupting_leaves_nothing(long_store, model, tmp_path, scheduler):
    args = ("transform", long_store, "--model", model[0], "--out", tmp_path / "f.zarr")
    interrupt((*args, "--scheduler", scheduler), lambda process: half_written(process, tmp_path))
    assert not list(tmp_path.iterdir())


def test_killing_leaves_nothing_at_the_output(long_store, model, tmp_path):
    out = tmp_path / "f.zarr"
    args = ["transform", long_store, "--model", model[0], "--out", out]
    process = subprocess.Popen(
        [sys.executable, "-m", "cme_dask", *map(str, args)], start_new_session=True
    )
    try:
        half_written(process, tmp_path)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not out.exists()
    (aside,) = tmp_path.iterdir()
    with pytest.raises(StoreError, match="is unfinished"):
        open_sample(aside / "output")
