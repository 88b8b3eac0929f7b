"""Damaged and missing things, each with the sentence and the exit code of damage.txt.

Each case is made for real and asked for by the command, whose outputs of before stay as they were.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import dask
import distributed
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from conftest import write_store

import cme_dask
from cme_dask import PivotedCholesky, kernels
from cme_dask.cli import cli
from cme_dask.data.store import sealed
from cme_dask.errors import ResourceError, StoreError

N = 9000
SENTENCES = Path(__file__).with_name("damage.txt")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
CASE = re.compile(r"^(?P<case>\S.*) \((?P<code>\d)\)\n    (?P<sentence>.+)$", re.MULTILINE)
TABLE = {
    row["case"]: (row["sentence"], int(row["code"])) for row in CASE.finditer(SENTENCES.read_text())
}


def promised(case):
    """The sentence of a case, as a pattern, and its exit code."""
    sentence, code = TABLE[case]
    return pattern(sentence), code


def pattern(sentence):
    return ".*".join(map(re.escape, sentence.split("…")))


def test_the_page_of_errors_quotes_what_is_said():
    """Each sentence of the page is that of a case, with the exit code of its section."""
    sections = re.split(r"^## .*exit code (\d)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    quoted = [
        (int(code), sentence)
        for code, text in zip(sections[::2], sections[1::2], strict=True)
        for sentence in re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)
    ]
    assert len(quoted) > 15
    for code, sentence in quoted:
        assert any(
            re.fullmatch(pattern(sentence), said) and code == expected
            for said, expected in TABLE.values()
        ), sentence


def check(case, code, text):
    """One sentence, that of the case, with its exit code."""
    pattern, expected = promised(case)
    assert code == expected, text
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, text
    assert re.fullmatch(pattern, lines[0].removeprefix("error: ")), (case, lines[0])


def run(*args):
    result = CliRunner().invoke(cli, [str(a) for a in args], catch_exceptions=False)
    return result.exit_code, result.stderr


def spawn(*args, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "cme_dask", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stderr


def contents(folder):
    return {
        p.relative_to(folder): p.is_file() and p.read_bytes()
        for p in folder.rglob("*")
        if not p.is_symlink()
    }


def fit_features(store, out, *more):
    return "features", store, "--out", out, "--tol", "0.1", *more


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage")
    x = np.random.default_rng(1).normal(size=(N, 2))
    write_store(folder / "s", x, x[:, :1] + 1.0, chunk_rows=1000)
    code, said = run(*fit_features(folder / "s", folder / "m"))
    assert code == 0, said
    return folder


@pytest.fixture
def place(tmp_path, pristine):
    """A store ``s``, a model ``m`` of it, and outputs of before, ``old`` and ``old.zarr``."""
    for name, copy in (("s", "s"), ("m", "m"), ("m", "old"), ("s", "old.zarr")):
        shutil.copytree(pristine / name, tmp_path / copy)
    return tmp_path


# Stores and models -----------------------------------------------------------------------------


def edit(path, change, *, honest=False):
    """Change a description; an honest one is one that somebody wrote so."""
    about = json.loads(path.read_text())
    change(about)
    if honest:
        described = about["attributes"]["cme_dask"]
        described.pop("checksum", None)
        about["attributes"]["cme_dask"] = sealed(described)
    path.write_text(json.dumps(about))


def truncate(file):
    file.write_bytes(file.read_bytes()[:30])


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))


def of_group(**changes):
    return lambda about: about["attributes"]["cme_dask"].update(changes)


def foreign(path):
    shutil.rmtree(path)
    zarr.open_group(str(path), mode="w").create_array("x", data=np.zeros((9, 2)))


def transpose(path):
    edit(path, lambda a: a.update(dimension_names=a["dimension_names"][::-1]))


STORES = {
    "truncated chunk": lambda s: truncate(s / "x/c/4/0"),
    "flipped bytes": lambda s: flip(s / "x/c/3/0"),
    "chunk of another place": lambda s: shutil.copy(s / "x/c/2/0", s / "x/c/5/0"),
    "missing chunk": lambda s: (s / "x/c/8/0").unlink(),
    "missing array": lambda s: shutil.rmtree(s / "y"),
    "wrong dtype": lambda s: edit(
        s / "x/zarr.json", lambda a: a.update(data_type="int64", fill_value=0)
    ),
    "wrong shape": lambda s: edit(s / "x/zarr.json", lambda a: a.update(shape=[N - 1, 2])),
    "wrong dimension order": lambda s: transpose(s / "x/zarr.json"),
    "newer schema": lambda s: edit(s / "zarr.json", of_group(schema_version=9), honest=True),
    "foreign Zarr group": foreign,
    "changed description": lambda s: edit(s / "zarr.json", of_group(seed=5)),
    "unfinished store": lambda s: edit(s / "zarr.json", lambda a: a["attributes"].clear()),
    "nothing there": shutil.rmtree,
    "link that leads out": lambda s: (
        (s / "x/c/2/0").rename(s.parent / "elsewhere"),
        (s / "x/c/2/0").symlink_to(s.parent / "elsewhere"),
    ),
}


@pytest.mark.parametrize("case", STORES)
def test_a_damaged_store(place, case):
    before = contents(place / "old")
    STORES[case](place / "s")
    check(case, *run(*fit_features(place / "s", place / "old", "--overwrite")))
    assert contents(place / "old") == before
    assert {p.name for p in place.iterdir()} <= {"s", "m", "old", "old.zarr", "elsewhere"}


MODELS = {
    "model: truncated chunk": lambda m: truncate(m / "basis_newton_factor/c/0/0"),
    "model: flipped bytes": lambda m: flip(m / "basis_newton_points/c/0/0"),
    "model: missing chunk": lambda m: (m / "basis_eigenvalues/c/0").unlink(),
    "model: missing array": lambda m: shutil.rmtree(m / "basis_newton_rows"),
    "model: wrong dtype": lambda m: edit(
        m / "basis_newton_points/zarr.json", lambda a: a.update(data_type="int64", fill_value=0)
    ),
    "model: wrong shape": lambda m: edit(
        m / "basis_newton_points/zarr.json", lambda a: a.update(shape=[2, 5])
    ),
    "model: exchanged arrays": lambda m: shutil.copy(
        m / "basis_newton_factor/c/0/0", m / "basis_transform/c/0/0"
    ),
    "model: newer schema": lambda m: edit(m / "zarr.json", of_group(schema_version=9), honest=True),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_damaged_model(place, case):
    before = contents(place / "old.zarr")
    MODELS[case](place / "m")
    asked = "transform", place / "s", "--model", place / "m", "--out", place / "old.zarr"
    check(case, *run(*asked, "--overwrite"))
    assert contents(place / "old.zarr") == before
    assert {p.name for p in place.iterdir()} == {"s", "m", "old", "old.zarr"}


def test_all_of_a_model_is_needed(place):
    """Whatever is lost of a model is missed, though a reader could do without some of it."""
    for folder in [p for p in (place / "m").iterdir() if p.is_dir()]:
        kept = folder.rename(place / "kept")
        with pytest.raises(StoreError, match=f"lacks the array '{folder.name}'"):
            cme_dask.load(place / "m")
        kept.rename(folder)


def test_an_older_schema_is_read_as_it_is(place):
    """Stores without checksums of descriptions and lists of arrays; models must have both."""
    points = np.array([[0.1, 0.2], [1.0, -1.0]])
    expected = cme_dask.load(place / "m").transform(points)

    def age(about):
        for name in ("checksum", "arrays", "row_sample"):
            about["attributes"]["cme_dask"].pop(name, None)

    for name in ("m", "s"):
        edit(place / name / "zarr.json", age)
    with pytest.raises(StoreError, match="damaged list of arrays"):
        cme_dask.load(place / "m")
    assert run(*fit_features(place / "s", place / "new"))[0] == 0
    np.testing.assert_array_equal(cme_dask.load(place / "new").transform(points), expected)


@pytest.mark.slow
def test_exit_codes_of_a_process(place):
    """The same sentences and codes from a process of its own."""
    truncate(place / "s/x/c/4/0")
    check("truncated chunk", *spawn(*fit_features(place / "s", place / "new")))
    assert not (place / "new").exists()


# Disks -----------------------------------------------------------------------------------------


@pytest.fixture
def disk(place):
    """A real file system of 256 kB, mounted in the folder."""
    folder = place / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(place, disk):
    shutil.copytree(place / "m", disk / "old")
    with pytest.raises(OSError, match="No space"):
        (disk / "filler").write_bytes(bytes(1 << 19))
    before = contents(disk)
    check("full disk", *run(*fit_features(place / "s", disk / "old", "--overwrite")))
    assert contents(disk) == before


def test_a_read_only_output(place, disk):
    shutil.copytree(place / "m", disk / "old")
    before = contents(disk)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    check("read-only output", *run(*fit_features(place / "s", disk / "old", "--overwrite")))
    assert contents(disk) == before


# Clocks ----------------------------------------------------------------------------------------


def test_a_clock_jump_changes_nothing(place, monkeypatch):
    clock, calls = time.time, iter(range(10**9))

    def jumping():
        return clock() + (-1) ** next(calls) * 1e7

    expected = contents(place / "m")
    monkeypatch.setattr(time, "time", jumping)
    report = PivotedCholesky(kernels.Gaussian(1.0), tol=0.5).fit(place / "s").report_
    assert 0 < report.seconds < 1e6
    assert run(*fit_features(place / "s", place / "new"))[0] == 0
    assert abs(time.time() - clock()) > 1e6
    chunks = [path for path, data in expected.items() if data and path.parts[-1] != "zarr.json"]
    assert chunks
    assert {p: (place / "new" / p).read_bytes() for p in chunks} == {p: expected[p] for p in chunks}


# Clusters --------------------------------------------------------------------------------------


class Process:
    """A process of Dask that is ended with the block."""

    def __init__(self, *args, python=(), cwd=None, **environment):
        self._process = subprocess.Popen(
            [sys.executable, *python, *map(str, args)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=cwd,
            env={**os.environ, **environment},
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()


def worker(address, python=("-m", "distributed.cli.dask_worker"), **environment):
    options = "--no-nanny", "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1"
    return Process(address, *options, python=python, **environment)


def started_scheduler(folder, *options, host="127.0.0.1:0"):
    file = folder / "scheduler.json"
    file.unlink(missing_ok=True)
    command = "--host", host, "--no-dashboard", "--scheduler-file", file, *options
    return Process(*command, python=("-m", "distributed.cli.dask_scheduler")), file


def address_of(file):
    for _ in range(300):
        try:
            return json.loads(file.read_text())["address"]
        except (OSError, ValueError):
            time.sleep(0.1)
    raise AssertionError("the scheduler did not start")


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    process, file = started_scheduler(tmp_path_factory.mktemp("scheduler"))
    with process:
        yield address_of(file)


def wait_for_workers(address, count):
    with distributed.Client(address, set_as_default=False) as client:
        for _ in range(300):
            if len(client.scheduler_info(n_workers=-1)["workers"]) == count:
                return
            time.sleep(0.1)
    raise AssertionError("no worker came")


def test_a_cluster_without_workers(place, scheduler):
    before = contents(place / "old")
    wait_for_workers(scheduler, 0)
    asked = fit_features(place / "s", place / "old", "--overwrite", "--scheduler", scheduler)
    with dask.config.set({"cme-dask.no-workers-timeout": 0.2}):
        code, said = run(*asked)
    check("cluster without workers", code, said)
    assert f"waiting for a worker of {scheduler}" in said
    assert contents(place / "old") == before


@pytest.mark.filterwarnings("ignore:.*Mismatched versions")
def test_a_worker_of_another_version(place, scheduler):
    before = contents(place / "old")
    metadata = place / "other" / "cme_dask-0.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cme-dask\nVersion: 0.0.1\n")
    wait_for_workers(scheduler, 0)
    with worker(scheduler, PYTHONPATH=str(place / "other")):
        wait_for_workers(scheduler, 1)
        asked = fit_features(place / "s", place / "old", "--overwrite", "--scheduler", scheduler)
        check("worker version mismatch", *run(*asked))
    assert contents(place / "old") == before


def test_a_worker_without_the_package(place, scheduler):
    before = contents(place / "old")
    # Without `site`, folders of packages are searched but what they say of others, as of one that
    # is installed from its sources, is not.
    packages = Path(distributed.__file__).parents[1]
    start = (
        f"import sys; sys.path[:0] = [{str(packages)!r}];  "
        "from distributed.cli.dask_worker import main; main()"
    )
    seen = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path[:0] = [{str(packages)!r}]; import cme_dask",
        ],
        capture_output=True,
        cwd=place,
    )
    if not seen.returncode:
        pytest.skip("cme_dask is a folder of the packages here: a worker can't be without it")
    wait_for_workers(scheduler, 0)
    with worker(scheduler, python=("-S", "-c", start), cwd=place):
        wait_for_workers(scheduler, 1)
        asked = fit_features(place / "s", place / "old", "--overwrite", "--scheduler", scheduler)
        check("worker without the package", *run(*asked))
    assert contents(place / "old") == before


def test_an_unreachable_scheduler(place, monkeypatch):
    from cme_dask.passes import cluster as clusters

    monkeypatch.setattr(clusters, "_CONNECT_SECONDS", 1)
    before = contents(place / "old")
    asked = fit_features(place / "s", place / "old", "--overwrite", "--scheduler")
    check("unreachable scheduler", *run(*asked, "tcp://127.0.0.1:9"))
    with dask.config.set({"distributed.comm.require-encryption": True}):
        check("unencrypted cluster", *run(*asked, "tcp://127.0.0.1:9"))
    check("unencrypted cluster", *run(*asked, "tcp://127.0.0.1:9", "--require-tls"))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # like a scheduler that is stopped
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        check("unreachable scheduler", *run(*asked, address))
    assert contents(place / "old") == before


def certificate(folder, name):
    """A certificate that vouches for itself, and its key."""
    key, own = folder / f"{name}.key", folder / f"{name}.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    made += ["-subj", f"/CN={name}", "-keyout", str(key), "-out", str(own)]
    subprocess.run(made, check=True, capture_output=True)
    return "--tls-ca-file", own, "--tls-cert", own, "--tls-key", key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_an_encrypted_cluster(place):
    before = contents(place / "old")
    ours, theirs = certificate(place, "ours"), certificate(place, "theirs")
    process, file = started_scheduler(place, *ours, host="tls://127.0.0.1:0")
    with process:
        address = address_of(file)
        assert address.startswith("tls://")
        options = "--no-nanny", "--nthreads", "1", "--no-dashboard"
        member = Process(address, *options, *ours, python=("-m", "distributed.cli.dask_worker"))
        asked = fit_features(place / "s", place / "old", "--overwrite", "--scheduler", address)
        with member:
            check("cluster without certificates", *run(*asked))
            check("wrong certificate", *run(*asked, *theirs))
            mixed = *ours[:4], "--tls-key", theirs[5]
            check("unusable certificate", *run(*asked, *mixed))
            assert contents(place / "old") == before
            asked = fit_features(place / "s", place / "new")
            code, said = run(*asked, "--require-tls", "--scheduler", address, *ours)
            assert code == 0, said
    assert dask.config.get("distributed.comm.tls.ca-file", None) is None
    points = np.zeros((1, 2))
    np.testing.assert_array_equal(
        cme_dask.load(place / "new").transform(points), cme_dask.load(place / "m").transform(points)
    )


# Checkpoints -----------------------------------------------------------------------------------


def fit_half(place, *more):
    asked = "fit", place / "s", "--out", place / "old", "--overwrite", "--max-rank", "8"
    asked += "--constraint", "none", "--residual", "no", "--checkpoint", place / "run"
    return run(*asked, *more)


def change_rows(place):
    shutil.rmtree(place / "s")
    x = np.random.default_rng(2).normal(size=(N, 2))
    write_store(place / "s", x, x[:, :1], chunk_rows=1000)


def lose_sums(place):
    for path in (place / "run").glob("pass-*/*"):
        if path.is_dir():
            shutil.rmtree(path)


CHECKPOINTS = {
    "changed data under a checkpoint": change_rows,
    "changed configuration": lambda place: None,
    "strip without manifest": lambda place: next((place / "run").glob("pass-*/pass.json")).unlink(),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_of_something_else(place, brief_search, case):
    before = contents(place / "old")
    code, said = fit_half(place, "--reg", "1e-3", "--shard", "1/2")
    assert code == 0, said
    CHECKPOINTS[case](place)
    reg = "1e-2" if case == "changed configuration" else "1e-3"
    check(case, *fit_half(place, "--reg", reg, "--resume"))
    assert contents(place / "old") == before


OUTPUTS = {
    "output inside an output": ("features", "s", "--out", "run/m", "--checkpoint", "run"),
    "one path for two outputs": ("features", "s", "--out", "n", "--report", "n"),
    "output in the place of an input": ("features", "s", "--out", "s", "--overwrite"),
    "output of another kind": ("features", "s", "--out", "old.zarr", "--overwrite"),
    "file of others": ("compare", "s", "--out", "thesis", "--overwrite"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_that_would_destroy(place, case):
    (place / "thesis").write_text("years of work")
    before = contents(place)
    names = {"s", "n", "run", "run/m", "old.zarr", "thesis"}
    check(case, *run(*(place / word if word in names else word for word in OUTPUTS[case])))
    assert contents(place) == before


def test_a_manifest_without_strips(place):
    kept = {"checkpoint": place / "run"}
    PivotedCholesky(kernels.Gaussian(1.0), tol=0.5).fit(place / "s", **kept)
    lose_sums(place)
    with pytest.raises(StoreError) as error:
        PivotedCholesky(kernels.Gaussian(1.0), tol=0.5).fit(place / "s", **kept)
    check("manifest without strips", 2, f"error: {error.value}")


def test_sums_of_another_run(place):
    for name in ("run", "other"):
        PivotedCholesky(kernels.Gaussian(1.0), tol=0.5).fit(place / "s", checkpoint=place / name)
    shutil.rmtree(place / "run/pass-000/total")
    shutil.copytree(place / "other/pass-000/total", place / "run/pass-000/total")
    with pytest.raises(StoreError) as error:
        PivotedCholesky(kernels.Gaussian(1.0), tol=0.5).fit(place / "s", checkpoint=place / "run")
    check("sums of another run", 2, f"error: {error.value}")


def test_every_row_of_the_table_is_tested():
    source = Path(__file__).read_text()
    assert len(TABLE) > 30
    assert [case for case in TABLE if f'"{case}"' not in source] == []
    assert issubclass(ResourceError, Exception)
