"""Features from store to store: the same bits, one pass, bounded memory, whole or absent."""

import json
import os
import subprocess
import sys
from collections import Counter

import dask.array as da
import numpy as np
import oracle_kernels as slow
import pytest
import zarr
from conftest import write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_reads import opened
from zarr.storage import LocalStore

from cme_dask import JointDistribution, PivotedCholesky, kernels, open_sample
from cme_dask.cli.describe import describe
from cme_dask.data.outputs import ChunkWriter
from cme_dask.errors import DataError, ResourceError, StoreError
from cme_dask.numerics.basis import BLOCK
from cme_dask.numerics.folds import draw
from cme_dask.numerics.reduction import cut_for_chunks, plan_ranges

GAUSSIAN = kernels.Gaussian(1.0)
N = 10_001  # ten blocks, the last one short


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(11)
    x = rng.normal(size=(N, 2))
    return x, np.sin(x[:, :1]) + 0.1 * rng.normal(size=(N, 1)), rng.exponential(size=N)


@pytest.fixture(scope="module")
def fits(rows):
    """Per basis: the fitted transformer, and the features as it makes them in memory."""
    fits = {b: PivotedCholesky(GAUSSIAN, tol=1e-2, basis=b) for b in ("newton", "spectral")}
    return {b: (fit.fit(rows[0]), fit.transform(rows[0])) for b, fit in fits.items()}


@pytest.fixture(scope="module")
def store(rows, tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("source") / "s", *rows, chunk_rows=900)


def contents(path):
    """Arrays of a store, as they are on disk."""
    group = zarr.open_group(str(path), mode="r")
    return {name: group[name][...] for name in sorted(group.array_keys())}


def assert_bits(path, features, y=None, weights=None):
    expected = {"x": features, "y": y, "weights": weights}
    found = contents(path)
    assert set(found) == {name for name, values in expected.items() if values is not None}
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name])


# What is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("basis", ["newton", "spectral"])
def test_a_sample_store_of_features(rows, fits, store, tmp_path, basis):
    x, y, weights = rows
    fit, features = fits[basis]
    seen = []
    report = fit.transform_store(
        store, tmp_path / "f", scheduler="threads", workers=2, progress=seen.append
    )
    assert_bits(tmp_path / "f", features, y, weights)
    assert seen[-1].rows == seen[-1].rows_total == N
    m = len(fit.pivots_)
    assert (report.rows, report.rank, report.dtype, report.passes) == (N, m, "float64", 1)
    newton = fit.basis_.newton(x)
    np.testing.assert_allclose(features @ features.T[:, :5], newton @ newton.T[:, :5], atol=1e-12)
    np.testing.assert_allclose(
        features @ features[:9].T, slow.gaussian(x, x[:9], 1.0), atol=m * 1e-2
    )
    made, source = open_sample(tmp_path / "f"), open_sample(store)
    assert made.columns[0].names == tuple(fit.get_feature_names_out())
    assert made.columns[1] == source.columns[1]
    for name in ("keys", "index", "weights"):
        np.testing.assert_array_equal(
            getattr(made.row_sample, name), getattr(source.row_sample, name)
        )
    assert made.row_sample.complete is source.row_sample.complete is True
    np.testing.assert_array_equal(made.row_sample.parts[0], features[made.row_sample.index])
    np.testing.assert_array_equal(made.row_sample.parts[1], y[made.row_sample.index])
    about = describe(str(tmp_path / "f"))
    assert about["schema_version"] == 1  # what older versions read
    assert about["features"]["basis"] == basis
    assert about["features"]["trace_error"] == fit.trace_error_


def test_estimators_fit_on_it_as_on_arrays(rows, fits, store, tmp_path):
    fit, features = fits["spectral"]
    _, y, weights = rows
    fit.transform_store(store, tmp_path / "f")
    law = {"kernel_x": kernels.Linear(), "kernel_y": GAUSSIAN, "tol": 1e-3}
    ours = JointDistribution(**law).fit(tmp_path / "f")
    theirs = JointDistribution(**law).fit(features, y, weights=weights)
    np.testing.assert_array_equal(ours.coef_, theirs.coef_)
    np.testing.assert_array_equal(
        PivotedCholesky(kernels.Linear(), tol=1e-2).fit(tmp_path / "f").pivots_,
        PivotedCholesky(kernels.Linear(), tol=1e-2).fit(features, weights=weights).pivots_,
    )


def test_rows_of_x_alone_make_a_store_of_x_alone(rows, fits, tmp_path):
    fit, features = fits["newton"]
    fit.transform_store(da.from_array(rows[0], chunks=(3000, 1)), tmp_path / "f")
    assert_bits(tmp_path / "f", features)
    made = open_sample(tmp_path / "f")
    assert len(made.sources) == 1
    drawn = draw(np.arange(N), (features,), None, N, 0)
    np.testing.assert_array_equal(made.row_sample.index, drawn.index)
    np.testing.assert_array_equal(made.row_sample.parts[0], drawn.parts[0])
    assert describe(str(tmp_path / "f"))["schema_version"] == 2
    assert PivotedCholesky(kernels.Linear(), tol=0.5).fit(tmp_path / "f").report_.rows == N
    with pytest.raises(DataError, match="y"):
        JointDistribution().fit(tmp_path / "f")


def test_weights_without_a_row_sample_are_read_once_more(rows, fits, tmp_path):
    x, y, weights = (da.from_array(a, chunks=2000) for a in rows)
    fit, features = fits["newton"]
    sample = open_sample(x, y, weights=weights)
    report = fit.transform_store(sample, tmp_path / "f")
    assert report.passes == 2
    assert_bits(tmp_path / "f", features, rows[1], rows[2])
    kept = open_sample(tmp_path / "f").row_sample
    drawn = draw(np.arange(N), (features, rows[1]), rows[2], N, 0)
    np.testing.assert_array_equal(kept.keys, drawn.keys)
    np.testing.assert_array_equal(kept.parts[0], drawn.parts[0])


def test_float32_is_the_rounded_float64(rows, fits, store, tmp_path):
    fit, features = fits["newton"]
    fit.transform_store(store, tmp_path / "f", dtype=np.float32)
    small = features.astype(np.float32)
    assert_bits(tmp_path / "f", small, rows[1], rows[2])
    made = open_sample(tmp_path / "f")
    np.testing.assert_array_equal(made.sources[0].read(5, 9), small[5:9].astype(float))
    np.testing.assert_array_equal(made.row_sample.parts[0], small[made.row_sample.index])
    law = JointDistribution(kernel_x=kernels.Linear(), kernel_y=GAUSSIAN, tol=1e-2)
    assert law.fit(tmp_path / "f").report_.rows == N
    lazily = PivotedCholesky(kernels.Linear(), tol=1e-2).fit(tmp_path / "f").transform(made)
    assert lazily.dtype == np.float64


def test_columns_are_taken_by_name(rows, tmp_path):
    x, y, _ = rows
    path = write_store(tmp_path / "s", x, y, x_names=["wind", "rain"])
    fit = PivotedCholesky(GAUSSIAN, tol=1e-1).fit(open_sample(path, x_columns=["rain"]))
    fit.transform_store(path, tmp_path / "f")
    assert_bits(tmp_path / "f", fit.transform(x[:, 1:]), y)
    with pytest.raises(DataError, match="lacks the column 'rain'"):
        fit.transform_store(open_sample(path, x_columns=["wind"]), tmp_path / "g")


# The same bits -------------------------------------------------------------------------------


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    chunk_rows=st.integers(130, N + 5),
    source_rows=st.integers(130, N + 5),
    threads=st.integers(1, 4),
    basis=st.sampled_from(["newton", "spectral"]),
    kind=st.sampled_from(["store", "dask", "zarr", "numpy"]),
)
def test_any_chunks_and_threads(
    rows, fits, tmp_path_factory, chunk_rows, source_rows, threads, basis, kind
):
    folder = tmp_path_factory.mktemp("t")
    x, y, _ = rows
    if kind == "store":
        source, carried = write_store(folder / "s", x, y, chunk_rows=source_rows), y
    elif kind == "dask":
        source, carried = da.from_array(x, chunks=(source_rows, 1)), None
    elif kind == "zarr":
        source, carried = str(folder / "a"), None
        zarr.create_array(source, shape=x.shape, chunks=(source_rows, 1), dtype="f8")[...] = x
    else:
        source, carried = x, None
    fit, features = fits[basis]
    report = fit.transform_store(
        source, folder / "f", chunk_rows=chunk_rows, scheduler="threads", workers=threads
    )
    assert report.chunk_rows == chunk_rows
    assert zarr.open_group(str(folder / "f"))["x"].chunks[0] == chunk_rows
    assert_bits(folder / "f", features, carried)


def test_processes_and_clusters(rows, fits, store, tmp_path, cluster):
    fit, features = fits["newton"]
    lazily = da.from_array(rows[0], chunks=(3000, 2))
    cases = [
        ("processes", store),
        (cluster, store),
        (cluster, rows[0]),
        (cluster, lazily),
    ]
    for number, (scheduler, source) in enumerate(cases):
        out = tmp_path / str(number)
        report = fit.transform_store(source, out, scheduler=scheduler, chunk_rows=1500)
        assert_bits(out, features, *(rows[1:] if source is store else ()))
        assert report.tasks > 1


def test_a_relative_path_is_meant_here(rows, fits, cluster, tmp_path, monkeypatch):
    """Workers of a cluster have another working folder."""
    fit, features = fits["newton"]
    folders = cluster.run(os.getcwd)
    cluster.run(os.chdir, "/")
    monkeypatch.chdir(tmp_path)
    fit.transform_store(rows[0], "f.zarr", scheduler=cluster)
    assert_bits(tmp_path / "f.zarr", features)
    for worker, folder in folders.items():
        cluster.run(os.chdir, folder, workers=[worker])


@settings(max_examples=200)
@given(
    n=st.integers(1, 10**7),
    chunk_in=st.integers(0, 10**6),
    chunk_out=st.integers(1, 10**6),
    workers=st.integers(1, 64),
)
def test_pieces_have_whole_chunks_and_whole_blocks(n, chunk_in, chunk_out, workers):
    runs = cut_for_chunks(plan_ranges(n, chunk_in, workers, 1e-6), chunk_out, BLOCK)
    assert [run.own[0] for run in runs] == [0, *(run.own[1] for run in runs[:-1])]
    assert runs[-1].own[1] == n
    for run in runs:
        first, last = run.own
        assert first < last
        assert first % chunk_out == 0
        assert run.start <= first < run.start + BLOCK
        assert last <= run.stop < last + BLOCK
        assert run.start % BLOCK == 0
        assert run.stop == n or run.stop % BLOCK == 0


# One pass, one writer ------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [None, 1024, 1000])
def test_each_chunk_is_read_once_and_written_once(rows, fits, tmp_path, monkeypatch, chunk_rows):
    x, y, weights = rows
    write_store(tmp_path / "s", x, y, weights, chunk_rows=1024)
    store, group = opened(tmp_path / "s")
    written, read = Counter(), Counter()
    put, get = LocalStore.set, LocalStore.get

    async def set_(self, key, value):
        written[key] += 1
        await put(self, key, value)

    async def get_(self, key, prototype=None, byte_range=None):
        if byte_range is None:  # checksums are read alone
            read[self.root.name == "s", key] += 1
        return await get(self, key, prototype, byte_range)

    monkeypatch.setattr(LocalStore, "set", set_)
    monkeypatch.setattr(LocalStore, "get", get_)
    fit, _ = fits["newton"]
    report = fit.transform_store(
        group, tmp_path / "f", chunk_rows=chunk_rows, scheduler="threads", workers=3
    )
    for name in ("x", "y", "weights"):
        chunks = {key: count for key, count in written.items() if key.startswith(f"{name}/c/")}
        assert len(chunks) == -(-N // report.chunk_rows)
        assert set(chunks.values()) == {1}
        reads = store.chunks(name)
        assert len(reads) == -(-N // 1024)
        if chunk_rows == 1000:  # a border inside a chunk has it read by both its neighbours
            assert sum(reads.values()) <= len(reads) + report.tasks - 1
        else:
            assert set(reads.values()) == {1}
    assert report.tasks > 1
    ours = [key for (source, key) in read if not source and "/c/" in key]
    assert not ours, "a chunk of the new store was read back"


def test_progress_reaches_the_end(rows, fits, tmp_path):
    events = []
    fits["newton"][0].transform_store(
        rows[0], tmp_path / "f", chunk_rows=1000, progress=events.append, workers=2
    )
    done = [event.rows for event in events]
    assert done == sorted(done)
    assert done[-1] == events[-1].rows_total == N
    assert {event.name for event in events} == {"write-features"}


# Whole or absent -----------------------------------------------------------------------------


def spoiled(a, row):
    a = a.copy()
    a[row] = np.nan
    return a


def test_bad_values_are_named_and_nothing_is_left(rows, fits, tmp_path):
    x, y, weights = rows
    fit, _ = fits["newton"]
    cases = [
        ((spoiled(x, (7000, 1)), y, weights), r"'x1' has 1 \(first at row 7000\)"),
        ((x, spoiled(y, 9999), weights), r"'y0' has 1 \(first at row 9999\)"),
        ((x, y, spoiled(weights, 8)), r"'weights' has 1 \(first at row 8\)"),
        ((x, y, -weights), "weights must be non-negative, 10,001 are negative"),
        ((x, y, 0 * weights), "all weights are zero"),
    ]
    for (a, b, w), message in cases:
        for lazily in (False, True):
            arrays = [da.from_array(v, chunks=2500) for v in (a, b, w)] if lazily else [a, b, w]
            sample = open_sample(arrays[0], arrays[1], weights=arrays[2])
            with pytest.raises(DataError, match=message):
                fit.transform_store(sample, tmp_path / "f", scheduler="threads", workers=2)
    assert not list(tmp_path.iterdir())


def test_a_failure_midway_leaves_the_old_store(rows, fits, store, tmp_path, monkeypatch):
    fit, features = fits["newton"]
    fit.transform_store(rows[0], tmp_path / "f")
    flush, count = ChunkWriter.flush, Counter()

    def failing(self):
        count["all"] += 1
        if count["all"] == 5:
            raise OSError(28, "No space left on device")
        flush(self)

    monkeypatch.setattr(ChunkWriter, "flush", failing)
    with pytest.raises(DataError, match="already exists"):
        fit.transform_store(store, tmp_path / "f")
    for error, scheduler in ((OSError, "threads"), (OSError, "synchronous")):
        count.clear()
        with pytest.raises(error):
            fit.transform_store(
                store, tmp_path / "f", chunk_rows=500, overwrite=True, scheduler=scheduler
            )
        assert [p.name for p in tmp_path.iterdir()] == ["f"]
        assert_bits(tmp_path / "f", features)
    monkeypatch.undo()
    fit.transform_store(store, tmp_path / "f", overwrite=True)
    assert_bits(tmp_path / "f", features, *rows[1:])


def test_a_damaged_source_chunk_is_named(rows, fits, tmp_path):
    path = write_store(tmp_path / "s", *rows[:2])
    (path / "x/c/4/0").write_bytes(b"nonsense")
    fit, _ = fits["newton"]
    with pytest.raises(StoreError, match=r"chunk x/c/4/0 of .* \(rows 4\d* to 4999\)"):
        fit.transform_store(path, tmp_path / "f", scheduler="threads")
    (path / "x/c/4/0").unlink()
    with pytest.raises(StoreError, match=r"chunk x/c/4/0 of .* is missing"):
        fit.transform_store(path, tmp_path / "f", scheduler="threads")
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_folder_that_workers_do_not_see_is_refused(rows, fits, tmp_path, monkeypatch):
    """A task that outlives a failed run must not make the folder anew either."""
    from cme_dask.data.outputs import FeatureFiles

    create = FeatureFiles.create.__func__

    def elsewhere(cls, folder, *rest, **more):
        files = create(cls, folder, *rest, **more)
        folder.rename(folder.with_name("gone"))
        return files

    monkeypatch.setattr(FeatureFiles, "create", classmethod(elsewhere))
    with pytest.raises(ResourceError, match="all workers must see the output's folder"):
        fits["newton"][0].transform_store(rows[0], tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_chunks_that_are_not_there_at_the_end_are_missed(rows, fits, tmp_path, monkeypatch):
    monkeypatch.setattr(ChunkWriter, "flush", lambda self: setattr(self, "_filled", 0))
    with pytest.raises(ResourceError, match=r"3 of 3 chunks of x are missing"):
        fits["newton"][0].transform_store(
            rows[0], tmp_path / "f", chunk_rows=4000, scheduler="threads"
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"chunk_rows": 0}, DataError, "chunk_rows must be an integer from 1 to"),
        ({"dtype": "int8"}, DataError, "dtype must be one of float64, float32, got 'int8'"),
        ({"dtype": "nonsense"}, DataError, "dtype must be one of float64, float32"),
        ({"workers": 0}, DataError, "workers must be an integer"),
        ({"out": "s3://bucket/f"}, DataError, "outputs are local paths"),
        ({"out": "no/such/folder"}, DataError, "does not exist: create it first"),
        ({"X": np.zeros((5, 3))}, DataError, "X has 3 columns, the model's are x0, x1"),
        ({"X": np.zeros((0, 2))}, DataError, "X has no rows"),
        ({"memory_limit": "10MB"}, ResourceError, "lower chunk_rows, or write float32"),
    ],
)
def test_what_is_refused_before_any_row_is_read(fits, store, tmp_path, changes, error, message):
    counting, group = opened(store)
    arguments = {"X": group, "out": tmp_path / "f"} | changes
    with pytest.raises(error, match=message):
        fits["newton"][0].transform_store(**arguments)
    assert not counting.chunks("x")
    assert not list(tmp_path.iterdir())


def test_features_too_large_for_float32_are_refused(tmp_path):
    x = 1e4 * np.random.default_rng(0).normal(size=(50, 1))
    fit = PivotedCholesky(kernels.Polynomial(12, 1.0), tol=0.5).fit(x)
    fit.transform_store(x, tmp_path / "f")
    with pytest.raises(DataError, match="features of rows 0 to 49 are too large for float32"):
        fit.transform_store(x, tmp_path / "g", dtype="float32")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_the_row_sample_of_wide_features_is_cut(rows, fits, store, tmp_path, monkeypatch):
    from cme_dask.passes import write as module

    fit, features = fits["newton"]
    monkeypatch.setattr(module, "_KEPT_BYTES", 100 * 8 * (features.shape[1] + 1))
    fit.transform_store(store, tmp_path / "f")
    kept = open_sample(tmp_path / "f").row_sample
    whole = open_sample(store).row_sample
    assert len(kept) == 100
    assert not kept.complete
    np.testing.assert_array_equal(kept.index, whole.index[:100])
    assert PivotedCholesky(kernels.Linear(), tol=0.1).fit(tmp_path / "f").n_passes_ == 3


# Memory --------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, warnings
from cme_dask import PivotedCholesky

if __name__ == "__main__":
    model, source, out = sys.argv[1:]
    fit = PivotedCholesky.load(model)
    report = fit.transform_store(source, out, scheduler="threads", workers=2)
    status = open("/proc/self/status").read()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    print(json.dumps([report.memory.predicted, peak, report.rows * report.rank * 8]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read from /proc")
def test_prediction_bounds_the_measured_peak(tmp_path):
    """Of an output that is larger than the memory it took.

    The prediction is that of tasks whose peaks meet, and of an allocator that keeps what they
    freed; how far both happen is a matter of chance.
    """
    x = np.random.default_rng(0).uniform(size=(180_000, 3))
    write_store(tmp_path / "s", x, x[:, :1], chunk_rows=16_384)
    given = x[:400]
    PivotedCholesky(kernels.Matern(0.1, 0.5), pivots=given).fit(x[:1000]).save(tmp_path / "m")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *(str(tmp_path / name) for name in ("script.py", "m", "s", "f"))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    predicted, measured, written = json.loads(done.stdout)
    assert 0.9 * measured <= predicted <= 2.0 * measured
    assert written > measured
