"""Stores and tables behind http:// URLs: passwords, servers that fail, and those without Range."""

import functools
import pickle
import threading
from collections import Counter
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from conftest import write_store

from cme_dask import PivotedCholesky, load, open_sample
from cme_dask.cli import cli
from cme_dask.data import remote
from cme_dask.data.ingest import ingest
from cme_dask.errors import DataError, ResourceError
from cme_dask.kernels import Gaussian

pytest.importorskip("aiohttp")

N = 3000
X = np.random.default_rng(0).normal(size=(N, 2))


class Handler(SimpleHTTPRequestHandler):
    """Whole files only, as Python's own server; some of which it refuses a number of times."""

    busy: ClassVar = Counter()

    def do_GET(self):
        if self.busy[self.path] > 0:
            self.busy[self.path] -= 1
            self.send_error(503)
        else:
            super().do_GET()

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        """Readers may hang up."""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The URL of a server of our own, with a password."""
    folder = tmp_path_factory.mktemp("http")
    write_store(folder / "s", X, X[:, :1], chunk_rows=1000)
    table = pd.DataFrame(X, columns=["x0", "x1"])
    table.to_csv(folder / "t.csv", index=False)
    table.to_parquet(folder / "t.parquet")
    np.save(folder / "t.npy", X)
    with Server(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://me:hunter2@127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(remote, "_PAUSES", (0.01, 0.01))
    monkeypatch.setattr(Handler, "busy", Counter())


def run(*args):
    done = CliRunner().invoke(cli, [str(arg) for arg in args])
    return done.exit_code, done.stdout + done.stderr


def test_passwords_are_neither_saved_nor_printed(url, tmp_path):
    secret, shown = f"{url}/s", f"{url}/s".replace("me:hunter2", "***")
    kernel = "--tol", "0.5", "--length-scale", "1"
    for code, *args in (
        (0, "features", secret, "--out", tmp_path / "m", *kernel),
        (0, "transform", secret, "--model", tmp_path / "m", "--out", tmp_path / "f"),
        (0, "info", tmp_path / "m"),
        (0, "info", secret, "--json"),
        (0, "rechunk", secret, tmp_path / "r", "--log", tmp_path / "log"),
        (2, "info", f"{url}/nix?token=hunter2"),
        (2, "fit", secret, "--out", tmp_path / "n", "--x", "nix", "--log", tmp_path / "log"),
        (2, "ingest", f"{url}/nix.csv", "--out", tmp_path / "n", "--x", "a", "--y", "b"),
    ):
        found, text = run(*args)
        assert (found, "hunter2" in text) == (code, False), text
    assert load(tmp_path / "m").about["location"] == shown
    assert open_sample(secret).location == shown
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in path.read_bytes() for path in files)
    assert str(DataError("https://h/x?X-Amz-Signature=hunter2&a=1")) == (
        "https://h/x?X-Amz-Signature=***&a=1"
    )


def test_a_server_that_fails_for_a_moment_is_asked_again(url, tmp_path):
    Handler.busy.update({"/s/zarr.json": 1, "/s/x/c/1/0": 2, "/t.csv": 2})
    sample = pickle.loads(pickle.dumps(open_sample(f"{url}/s")))  # noqa: S301 - as for a worker
    fit = PivotedCholesky(Gaussian(1.0), tol=0.5).fit(sample)
    expected = PivotedCholesky(Gaussian(1.0), tol=0.5).fit(X)
    np.testing.assert_array_equal(fit.transform(X[:9]), expected.transform(X[:9]))
    assert ingest([f"{url}/t.csv"], tmp_path / "t", x=["x0"], y=["x1"]).rows_kept == N
    assert not Handler.busy.total()


def test_a_server_that_fails_is_one_sentence(url):
    sample = open_sample(f"{url}/s")
    Handler.busy.update({"/s/x/c/1/0": 99})
    sentence = r"\*\*\*@.*/s/x/c/1/0 can't be read from its server \(HTTP 503 .*\): check the"
    with pytest.raises(ResourceError, match=sentence):
        PivotedCholesky(Gaussian(1.0), tol=0.5).fit(sample)


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.npy"])
def test_servers_may_know_whole_files_only(url, tmp_path, name):
    ingest([f"{url}/{name}"], tmp_path / "s", x=["x0"], y=["x1"])
    rows = [source.read(0, N) for source in open_sample(tmp_path / "s").sources]
    np.testing.assert_allclose(np.hstack(rows), X, rtol=1e-15)


def test_the_fingerprint_of_a_store_needs_no_parts_of_files(url, tmp_path):
    fit = PivotedCholesky(Gaussian(1.0), tol=0.5)
    fit.fit(f"{url}/s", checkpoint=tmp_path / "run")
    fit.fit(f"{url}/s", checkpoint=tmp_path / "run")
    assert fit.report_.resumed_strips > 0
