"""Tables and stores behind s3:// URLs, on a real server process."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import fsspec
import numpy as np
import pandas as pd
import pytest
import zarr
from click.testing import CliRunner
from conftest import write_store

from cme_dask import JointDistribution, load, open_sample
from cme_dask.cli import cli
from cme_dask.data import tables
from cme_dask.data.ingest import ingest, rechunk
from cme_dask.errors import DataError, ResourceError, StoreError
from cme_dask.kernels import Gaussian

pytest.importorskip("moto")

BUCKET = "cme-tests"
N = 2_000


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def server():
    """The URL of an S3 server of our own with one empty bucket."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **KEYS}
    ) as process:
        try:
            for _ in range(300):
                try:
                    put = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
                    urllib.request.urlopen(put, timeout=5).close()
                    break
                except OSError:
                    assert process.poll() is None, "the server ended"
                    time.sleep(0.1)
            yield url
        finally:
            process.terminate()


KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture
def options(server, monkeypatch):
    """Storage options that lead to the server."""
    for key, value in KEYS.items():
        monkeypatch.setenv(key, value)
    return {"client_kwargs": {"endpoint_url": server}}


@pytest.fixture
def upload(options):
    """Copy a file or folder to a key of the bucket; its URL."""
    files = fsspec.filesystem("s3", **options)

    def copy(path, key):
        files.put(str(path), f"{BUCKET}/{key}", recursive=path.is_dir())
        return f"s3://{BUCKET}/{key}"

    return copy


def frame():
    rng = np.random.default_rng(2)
    table = pd.DataFrame(rng.normal(size=(N, 3)), columns=["a", "b", "c"])
    table["wd"] = np.array(["N", "SSE", "W"])[rng.integers(0, 3, N)]
    return table


def columnar(path):
    group = zarr.open_group(str(path), mode="w")
    for name in "abc":
        group.create_array(name, data=frame()[name].to_numpy(), chunks=(300,))


WRITERS = {
    "t.csv": lambda path: frame().to_csv(path, index=False),
    "t.csv.gz": lambda path: frame().to_csv(path, index=False),
    "t.parquet": lambda path: frame().to_parquet(path, row_group_size=700),
    "t.npz": lambda path: np.savez(path, **{n: frame()[n].to_numpy() for n in "abc"}),
    "t.zarr": columnar,
}


def rows(path):
    group = zarr.open_group(str(path), mode="r")
    return {name: group[name][...] for name in ("x", "y", "row_sample/index", "row_sample/x")}


@pytest.mark.parametrize("name", WRITERS)
def test_tables(tmp_path, monkeypatch, options, upload, name):
    monkeypatch.setattr(tables, "BATCH_BYTES", 1 << 13)
    WRITERS[name](tmp_path / name)
    url = upload(tmp_path / name, f"tables/{name}")
    wanted = {"x": ["c", "a"], "y": ["b"], "block_bytes": 1 << 13}
    ingest([tmp_path / name], tmp_path / "expected", **wanted)
    report = ingest([url], tmp_path / "s", storage_options=options, **wanted)
    assert report.files == (url,)
    assert report.rows_kept == N
    expected = rows(tmp_path / "expected")
    for array, values in rows(tmp_path / "s").items():
        np.testing.assert_array_equal(values, expected[array])
    np.testing.assert_array_equal(expected["x"], frame()[["c", "a"]])


def test_patterns(tmp_path, options, upload):
    for part, table in enumerate((frame()[:500], frame()[500:])):
        table.to_parquet(tmp_path / f"{part}.parquet")
        upload(tmp_path / f"{part}.parquet", f"parts/{part}.parquet")
    report = ingest(
        [f"s3://{BUCKET}/parts/*.parquet"],
        tmp_path / "s",
        x=["a", "wd"],
        y=["b"],
        categorical=["wd"],
        storage_options=options,
    )
    assert report.files == tuple(f"s3://{BUCKET}/parts/{part}.parquet" for part in (0, 1))
    np.testing.assert_array_equal(rows(tmp_path / "s")["x"][:, 0], frame()["a"])
    assert report.categories == {"wd": tuple(frame()["wd"].unique())}


def test_resuming(tmp_path, monkeypatch, options, upload):
    monkeypatch.setattr("cme_dask.data.ingest.CHECKPOINT_BATCHES", 1)
    monkeypatch.setattr(tables, "BATCH_BYTES", 1 << 12)
    frame().to_parquet(tmp_path / "t.parquet")
    url = upload(tmp_path / "t.parquet", "changing/t.parquet")
    wanted = {"x": ["a"], "y": ["b"], "storage_options": options}
    ingest([url], tmp_path / "expected", **wanted)

    def stop(event):
        if event.rows_read > 1_000:
            raise KeyboardInterrupt

    for out in ("s", "t"):
        with pytest.raises(KeyboardInterrupt):
            ingest([url], tmp_path / out, progress=stop, **wanted)
    report = ingest([url], tmp_path / "s", resume=True, **wanted)
    assert 0 < report.rows_resumed < N
    expected = rows(tmp_path / "expected")
    for array, values in rows(tmp_path / "s").items():
        np.testing.assert_array_equal(values, expected[array])
    frame().assign(a=0.5).to_parquet(tmp_path / "t.parquet")
    upload(tmp_path / "t.parquet", "changing/t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet has changed since the interrupted ingest"):
        ingest([url], tmp_path / "t", resume=True, **wanted)


def test_stores_and_models(tmp_path, options, upload):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 2))
    y = x[:, :1] + 0.3 * rng.normal(size=(N, 1))
    local = write_store(tmp_path / "store", x, y)
    url = upload(local, "store.zarr")
    sample = open_sample(url, storage_options=options)
    assert sample.n_rows == N
    np.testing.assert_array_equal(sample.sources[0].read(500, 1_700), x[500:1_700])
    kernels = {"kernel_x": Gaussian(1.0), "kernel_y": Gaussian(0.7), "tol": 1e-1}
    law = JointDistribution(**kernels).fit(sample)
    expected = JointDistribution(**kernels).fit(open_sample(local))
    np.testing.assert_array_equal(law.expect("y0", x[:9]), expected.expect("y0", x[:9]))
    law.save(tmp_path / "model")
    model = load(upload(tmp_path / "model", "model.zarr"), storage_options=options)
    np.testing.assert_array_equal(model.expect("y0", x[:9]), law.expect("y0", x[:9]))
    rechunk(url, tmp_path / "again", target_chunk=1 << 12, storage_options=options)
    np.testing.assert_array_equal(rows(tmp_path / "again")["x"], x)


def test_a_cut_off_store(tmp_path, options, upload):
    rng = np.random.default_rng(0)
    local = write_store(tmp_path / "store", rng.normal(size=(N, 2)), rng.normal(size=N))
    attributes = json.loads((local / "zarr.json").read_text()) | {"attributes": {}}
    (local / "zarr.json").write_text(json.dumps(attributes))
    url = upload(local, "unfinished.zarr")
    with pytest.raises(StoreError, match="no finished sample"):
        open_sample(url, storage_options=options)


def test_the_command(tmp_path, options, upload, server):
    frame().to_csv(tmp_path / "t.csv.gz", index=False)
    url = upload(tmp_path / "t.csv.gz", "command/t.csv.gz")
    line = ["ingest", url, "--out", str(tmp_path / "s"), "--x", "a", "--y", "b", "--json"]
    given = f"client_kwargs={json.dumps(options['client_kwargs'])}"
    done = CliRunner().invoke(cli, [*line, "--storage-options", given])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows_kept"] == N
    # Without the option: from fsspec's own configuration.
    shown = subprocess.run(
        [sys.executable, "-m", "cme_dask", *line, "--overwrite"],
        env={**os.environ, **KEYS, "FSSPEC_S3_ENDPOINT_URL": server},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["rows_kept"] == N


def test_bad_urls(tmp_path, options, monkeypatch):
    def refused(match, url, error=DataError):
        with pytest.raises(error, match=match) as caught:
            ingest([url], tmp_path / "s", x=["a"], y=["b"], storage_options=options)
        assert "\n" not in str(caught.value)

    refused("there is no file s3://cme-tests/nowhere.csv", f"s3://{BUCKET}/nowhere.csv")
    refused("no file matches s3://", f"s3://{BUCKET}/nowhere*.csv")
    refused("there is no file s3://no-such-bucket/t.csv", "s3://no-such-bucket/t.csv")
    with pytest.raises(StoreError, match=r"nowhere\.zarr"):
        open_sample(f"s3://{BUCKET}/nowhere.zarr", storage_options=options)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3")
    refused(r"s3://.* can't be opened: .*s3fs", f"s3://{BUCKET}/t.csv", ResourceError)
    with pytest.raises(ResourceError, match=r"needs a package that is not .*s3fs"):
        open_sample(f"s3://{BUCKET}/t.zarr", storage_options=options)


def test_credentials_that_are_missing_are_asked_for(tmp_path, monkeypatch):
    for key in KEYS:
        monkeypatch.delenv(key, raising=False)
    for key in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(key, str(tmp_path / "none"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    expected = r"s3://no-bucket/t\..* can't be read from its server \(.*\): give credentials .*"
    with pytest.raises(ResourceError, match=expected + "storage_options={'anon': True}"):
        open_sample("s3://no-bucket/t.zarr")
    out = str(tmp_path / "s")
    for command in (
        ("info", "s3://no-bucket/t.zarr"),
        ("ingest", "s3://no-bucket/t.csv", "--out", out, "--x", "a", "--y", "b"),
        ("ingest", "s3://no-bucket/t.*", "--out", out, "--x", "a", "--y", "b"),
        ("rechunk", "s3://no-bucket/t.zarr", out),
    ):
        result = CliRunner().invoke(cli, command)
        assert result.exit_code == 3
        text = " ".join(result.output.split())
        assert re.search(f"error: {expected}--storage-options anon=true", text)
