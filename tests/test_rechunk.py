"""Zarr stores of others, and badly chunked ones, as sample stores."""

import json
import tracemalloc

import numpy as np
import pytest
import xarray as xr
import zarr
from click.testing import CliRunner
from conftest import rewriting, write_store
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask.cli import cli
from cme_dask.data import tables
from cme_dask.data.ingest import ingest, rechunk
from cme_dask.errors import DataError, StoreError
from cme_dask.passes.sources import open_sample

N = 3_000


@pytest.fixture
def reads(monkeypatch):
    """Keys of the chunks that were read, each time."""
    keys = []
    original = zarr.storage.LocalStore.get

    async def get(self, key, prototype, byte_range=None):
        # The four bytes at the end of a chunk are its checksum.
        if ("/c/" in key or key.startswith("c/")) and byte_range is None:
            keys.append(key)
        return await original(self, key, prototype, byte_range)

    monkeypatch.setattr(zarr.storage.LocalStore, "get", get)
    return keys


def rows(rng, n=N):
    return rng.normal(size=(n, 4)), rng.normal(size=(n, 2))


def write(path, **arrays):
    group = zarr.open_group(str(path), mode="w")
    for name, (values, chunks) in arrays.items():
        group.create_array(name, data=values, chunks=chunks)
    return path


def stored(path):
    group = zarr.open_group(str(path), mode="r")
    found = dict(group.arrays()) | {f"row_sample/{n}": a for n, a in group["row_sample"].arrays()}
    return {n: (a[...], a.chunks) for n, a in found.items()}, group.attrs["cme_dask"]


def assert_same(one, other):
    (values, about), (others, about_other) = stored(one), stored(other)
    assert values.keys() == others.keys()
    for name, (array, chunks) in values.items():
        np.testing.assert_array_equal(array, others[name][0], err_msg=name)
        assert chunks == others[name][1]
    assert about == about_other


SHAPES = {
    "columns": ((N, 1), (N, 1)),
    "tiny": ((60, 4), (30, 2)),
    "blocks": ((700, 3), (40, 1)),
    "one": ((N, 4), (N, 2)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_chunks_give_one_store_and_each_is_read_once(tmp_path, rng, reads, monkeypatch, shape):
    monkeypatch.setattr(tables, "BATCH_BYTES", 1 << 14)
    x, y = rows(rng)
    write_store(tmp_path / "expected", x, y)
    x_chunks, y_chunks = SHAPES[shape]
    write(tmp_path / "z", x=(x, x_chunks), y=(y, y_chunks))
    reads.clear()
    report = rechunk(tmp_path / "z", tmp_path / "s", target_chunk=64 * 4 * 8)
    inputs = [key for key in reads if not key.startswith("row_sample")]
    n_chunks = sum(
        -(-a.shape[0] // c[0]) * -(-a.shape[1] // c[1]) for a, c in ((x, x_chunks), (y, y_chunks))
    )
    assert len(inputs) == len(set(inputs)) == n_chunks
    assert report.rows_kept == N
    values, about = stored(tmp_path / "s")
    expected, about_expected = stored(tmp_path / "expected")
    for name, (array, _) in expected.items():
        np.testing.assert_array_equal(values[name][0], array, err_msg=name)
    assert values["x"][1] == (64, 4)
    assert values["y"][1] == (64, 2)
    for variable, table in (("x", x), ("y", y)):
        told = about["statistics"][variable]
        np.testing.assert_allclose([c["mean"] for c in told.values()], table.mean(0), atol=1e-13)
        np.testing.assert_allclose([c["std"] for c in told.values()], table.std(0), rtol=1e-12)
    assert about["columns"] == about_expected["columns"]


@settings(max_examples=10)
@given(
    x_chunks=st.tuples(st.integers(1, 90), st.integers(1, 3)),
    y_chunk=st.integers(1, 90),
    batch=st.integers(16, 3_000),
    dtype=st.sampled_from(["f8", "f4", "i2", ">f8"]),
)
def test_the_store_depends_on_the_rows_alone(tmp_path_factory, x_chunks, y_chunk, batch, dtype):
    folder = tmp_path_factory.mktemp("r")
    x = np.random.default_rng(0).integers(-99, 99, (70, 3))
    write(folder / "z", x=(x.astype(dtype), x_chunks), y=(x[:, 0].astype("i8"), (y_chunk,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "BATCH_BYTES", batch)
        rechunk(folder / "z", folder / "s", target_chunk=1_000)
    values, _ = stored(folder / "s")
    np.testing.assert_array_equal(values["x"][0], x)
    np.testing.assert_array_equal(values["y"][0][:, 0], x[:, 0])
    assert values["x"][1] == (32, 3)
    kept = values["row_sample/index"][0]
    np.testing.assert_array_equal(values["row_sample/x"][0], x[kept])


def full_table(folder, n=N):
    """A CSV with all roles, ingested."""
    rng = np.random.default_rng(5)
    labels = np.array(["N", "SSE", "W"])[rng.integers(0, 3, n)]
    lines = [
        f"{a},{b},{wd},{w},{hour},{2013 + i // 900}"
        for i, (a, b, wd, w, hour) in enumerate(
            zip(rng.normal(size=n), rng.random(n), labels, rng.random(n), range(n), strict=True)
        )
    ]
    (folder / "t.csv").write_text("\n".join(["a,b,wd,w,seconds,year", *lines]) + "\n")
    ingest(
        [folder / "t.csv"],
        folder / "first",
        x=["a", "wd"],
        y=["b"],
        weights="w",
        group="year",
        time=["seconds"],
        categorical=["wd"],
        units={"a": "K"},
        chunk_rows=50,
        seed=7,
    )
    return folder / "first"


def test_a_sample_store_keeps_all_it_has(tmp_path):
    first = full_table(tmp_path)
    rechunk(first, tmp_path / "second", target_chunk=1 << 14)
    rechunk(tmp_path / "second", tmp_path / "third", target_chunk=50 * 16 + 300)
    values, about = stored(tmp_path / "second")
    expected, about_expected = stored(first)
    assert values["x"][1] == (1024, 2)
    for name, (array, _) in expected.items():
        np.testing.assert_array_equal(values[name][0], array, err_msg=name)
    same = ("columns", "roles", "weights", "seed", "rows", "schema_version")
    assert {key: about[key] for key in same} == {key: about_expected[key] for key in same}
    for column, told in about_expected["statistics"]["x"].items():
        assert about["statistics"]["x"][column]["count"] == told["count"]
        assert about["statistics"]["x"][column].get("counts") == told.get("counts")
    assert about["columns"]["x"]["units"] == {"a": "K"}
    assert about["roles"] == {"group": "year", "time": "seconds"}
    values, _ = stored(tmp_path / "third")
    np.testing.assert_array_equal(values["x"][0], expected["x"][0])


@pytest.mark.parametrize("labels", [["01", "1", "02"], ["01", "A", "02"]])
def test_groups_of_labels_stay_labels(tmp_path, labels):
    """Taken for integers, 01 and 1 would be one group, and A would be refused."""
    rows = "".join(f"{label},{i}.5,1\n" for i, label in enumerate([*labels, *labels]))
    (tmp_path / "t.csv").write_text(f"st,a,b\n{rows}")
    ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"], group="st", categorical=["st"])
    rechunk(tmp_path / "s", tmp_path / "t")
    (one, about_one), (two, about_two) = stored(tmp_path / "s"), stored(tmp_path / "t")
    np.testing.assert_array_equal(one["group"][0], two["group"][0])
    assert about_one["group_labels"] == about_two["group_labels"] == labels


def test_chosen_columns_of_a_sample_store(tmp_path):
    first = full_table(tmp_path)
    rechunk(first, tmp_path / "s", x=["b", "seconds"], y=["wd"], group="wd", seed=1)
    sample = open_sample(tmp_path / "s")
    expected, _ = stored(first)
    values, about = stored(tmp_path / "s")
    assert sample.columns[0].names == ("b", "seconds")
    assert set(sample.columns[1].categories["wd"]) == {"N", "SSE", "W"}
    np.testing.assert_array_equal(values["x"][0][:, 1], expected["time"][0])
    np.testing.assert_array_equal(values["y"][0][:, 0], expected["x"][0][:, 1])
    np.testing.assert_array_equal(values["group"][0], expected["x"][0][:, 1])
    assert about["seed"] == 1


def test_a_dataset_of_xarray(tmp_path, rng, monkeypatch):
    x, y = rows(rng)
    data = xr.Dataset(
        {"wind": ("t", x[:, 0]), "rain": ("t", y[:, 0].astype("f4"))},
        coords={"t": np.datetime64("2020-01-01", "ns") + np.arange(N) * np.timedelta64(1, "h")},
    )
    encoding = {"wind": {"chunks": (70,)}, "t": {"chunks": (N,)}}
    data.to_zarr(tmp_path / "z", encoding=encoding, consolidated=False)
    rechunk(tmp_path / "z", tmp_path / "s", x=["wind"], y=["rain"], time=["t"])
    sample = open_sample(tmp_path / "s")
    np.testing.assert_array_equal(sample.sources[0].read(0, N)[:, 0], x[:, 0])
    np.testing.assert_array_equal(sample.sources[1].read(0, N)[:, 0], y[:, 0].astype("f4"))
    hours = np.diff(sample.time.read(0, N)[:, 0])
    np.testing.assert_array_equal(hours, 3600.0)


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Of whole rows a few batches; of chunks that are columns these, joined, and each as it comes.

    Zarr decodes as many chunks at once as its configuration says: with one, the peak does not
    depend on how its threads run.
    """
    monkeypatch.setattr(tables, "BATCH_BYTES", 1 << 17)
    # As of many more rows than are kept in memory as a sample.
    monkeypatch.setattr("cme_dask.data.ingest.SAMPLE_SIZE", 1 << 11)
    peaks = {}
    for n in (15_000, 60_000):
        values = np.random.default_rng(0).normal(size=(n, 8))
        for name, chunks in (("rows", (2_000, 8)), ("columns", (n, 1))):
            write(tmp_path / f"{name}{n}", x=(values, chunks), y=(values[:, 0], (2_000,)))
            tracemalloc.start()
            try:
                with zarr.config.set({"async.concurrency": 1}):
                    rechunk(tmp_path / f"{name}{n}", tmp_path / f"{n}{name}", target_chunk=1 << 17)
                peaks[name, n] = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
    more = 45_000 * 8 * 8  # bytes of the further rows of x
    assert peaks["rows", 60_000] < peaks["rows", 15_000] + 0.1 * more
    # One of eight columns, as stored and as decoded.
    assert peaks["columns", 60_000] < peaks["columns", 15_000] + 1.25 * more


def test_an_interrupted_one_goes_on(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(tables, "BATCH_BYTES", 1 << 12)
    monkeypatch.setattr("cme_dask.data.ingest.CHECKPOINT_BATCHES", 3)
    x, y = rows(rng)
    write(tmp_path / "z", x=(x, (100, 2)), y=(y, (70, 1)))
    rechunk(tmp_path / "z", tmp_path / "expected")

    def stop(event):
        if event.rows_read > 1_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rechunk(tmp_path / "z", tmp_path / "s", progress=stop)
    assert not (tmp_path / "s").exists()
    with pytest.raises(DataError, match="resume=True continues"):
        rechunk(tmp_path / "z", tmp_path / "s")
    report = rechunk(tmp_path / "z", tmp_path / "s", resume=True)
    assert 0 < report.rows_resumed < N
    assert_same(tmp_path / "s", tmp_path / "expected")
    with pytest.raises(KeyboardInterrupt):
        rechunk(tmp_path / "z", tmp_path / "t", progress=stop)
    zarr.open_group(str(tmp_path / "z"))["x"][2_900] = 1.0
    with pytest.raises(DataError, match="z has changed since the interrupted"):
        rechunk(tmp_path / "z", tmp_path / "t", resume=True)


def test_bad_input(tmp_path, rng):
    x, y = rows(rng, 100)
    z = write(tmp_path / "z", a=(x, (9, 4)), y=(y, (9, 2)))

    def refused(match, source=z, error=DataError, **options):
        with pytest.raises(error, match=match):
            rechunk(source, tmp_path / "out", **options)
        assert not list(tmp_path.glob("out"))
        assert not list(tmp_path.glob(".*"))

    refused("z has no array 'x': name the columns of x .* there are 'a0', 'a1', 'a2', 'a3', 'y0'")
    refused("z lacks column 'b'", x=["b"])
    refused("column 'y0' is wanted twice", x=["y0"])
    refused("x must be a list", x="a0")
    refused("target_chunk must lie between", x=["a0"], target_chunk=0)
    refused("there is no file .*nowhere", tmp_path / "nowhere")
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    refused("t.csv is no Zarr store: ingest reads", tmp_path / "t.csv")
    zarr.open_group(str(z))["a"][17, 1] = np.nan
    refused("column 'a1' .* 1 missing value .* first in row 17", x=["a0", "a1"])
    report = rechunk(z, tmp_path / "dropped", x=["a0", "a1"], missing="drop")
    assert report.rows_kept == 99
    ours = write_store(tmp_path / "ours", x, y, chunk_rows=10)
    (ours / "x" / "c" / "3" / "0").unlink()
    refused("column 'x0' .* 10 missing values .* first in row 30", ours)
    (ours / "x" / "c" / "3" / "0").write_bytes(b"broken")
    refused("chunk x/c/3/0 .* truncated or corrupt", ours, StoreError)
    (ours / "zarr.json").write_text(
        json.dumps(json.loads((ours / "zarr.json").read_text()) | {"attributes": {"cme_dask": 1}})
    )
    refused("ours is no finished sample", ours, StoreError)


def test_codes_without_a_label(tmp_path):
    first = full_table(tmp_path)
    with rewriting(first) as group:
        group["x"][70, 1] = 3.0
    with pytest.raises(StoreError, match=r"column 'wd' of .*first has the code 3.0, .* 0 to 2"):
        rechunk(first, tmp_path / "out")


def test_output_is_atomic_and_apart(tmp_path, rng):
    x, y = rows(rng, 100)
    z = write(tmp_path / "z", x=(x, (9, 4)), y=(y, (9, 2)))
    with pytest.raises(DataError, match="lies inside the input"):
        rechunk(z, z / "s")
    ours = write_store(tmp_path / "ours", x, y)
    with pytest.raises(DataError, match="would replace the input"):
        rechunk(ours, ours, overwrite=True)
    with pytest.raises(DataError, match="already exists"):
        rechunk(z, ours)
    rechunk(z, ours, overwrite=True, target_chunk=1 << 9)
    assert stored(ours)[0]["x"][1] == (16, 4)


def test_the_command(tmp_path, rng):
    x, y = rows(rng)
    z = write(tmp_path / "z", x=(x, (90, 4)), v=(y, (90, 2)), w=(np.ones(N), (90,)))
    run = CliRunner().invoke
    arguments = ["rechunk", str(z), str(tmp_path / "s"), "--target-chunk", "8KiB"]
    failed = run(cli, arguments)
    assert failed.exit_code == 2
    assert "has no array 'y'" in failed.output
    done = run(cli, [*arguments, "--y", "v1", "--weights", "w", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["rows"], found["chunk_rows"], found["weights"]) == (N, 256, True)
    assert found["columns"]["x"]["names"] == ["x0", "x1", "x2", "x3"]
    assert found["columns"]["y"]["names"] == ["v1"]
    shown = run(cli, [*arguments, "--y", "v1", "--overwrite"])
    assert shown.exit_code == 0, shown.output
    assert "v1" in shown.stdout
