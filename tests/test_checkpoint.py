"""Checkpoints: a run that goes on ends as if it had never stopped, or one sentence says why not."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from conftest import shorten_searches, write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from zarr.storage import FsspecStore, ZipStore

from cme_dask import (
    ConditionalMeanEmbedding,
    JointDistribution,
    KernelLogisticRegression,
    PivotedCholesky,
    kernels,
    open_sample,
)
from cme_dask.cli.app import cli
from cme_dask.cli.compute import CheckpointOptions
from cme_dask.data.partials import read_partial, write_partial
from cme_dask.errors import DataError, ResourceError, ShardDone, StoreError
from cme_dask.numerics.reduction import strip_length
from cme_dask.passes.checkpoint import (
    Checkpoint,
    about_run,
    block_rows,
    checkpointed_run,
    discard,
)
from cme_dask.passes.progress import Event

# Few pivots are enough here: bits are compared.
pytestmark = [
    pytest.mark.filterwarnings("ignore::cme_dask.errors.ToleranceWarning"),
    pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning"),
]

N = 200_000  # 49 blocks of a strip


class Interrupted(Exception):
    """What stops a fit in the middle."""


def stored(path, n, chunk_rows):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(n, 2))
    y = np.sin(x[:, :1]) + 0.3 * rng.normal(size=(n, 1))
    return write_store(path, x, y, chunk_rows=chunk_rows)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("rows") / "s.zarr", N, 1 << 12)


@pytest.fixture(scope="module")
def short_store(tmp_path_factory):
    """Three blocks of 8 strips, and a strip."""
    return stored(tmp_path_factory.mktemp("rows") / "s.zarr", N // 2, 1 << 13)


def joint(**options):
    settled = {"kernel_x": kernels.Gaussian(1.0), "kernel_y": kernels.Gaussian(0.7)}
    settled |= {"max_rank": 12, "residual": False, "reg": 1e-4, "sample_size": 2000}
    return JointDistribution(**(settled | options))


def bits(estimator):
    """All bytes of a model but the number of its passes, which may be told in another place."""
    state = estimator.model_.to_state()
    return {name: np.asarray(values).tobytes() for name, values in state.arrays.items()}


def strips_done(event):
    """Number of strips of a pass that are done."""
    return -(-event.rows // strip_length(event.rows_total))


def stopping(after, name="strip-moments"):
    """A progress that stops the fit when so many strips of a pass are done."""

    def progress(event):
        part = event.detail
        if isinstance(part, Event) and part.name == name and strips_done(part) >= after:
            raise Interrupted

    return progress


def interrupted(estimator, rows, folder, after, **options):
    with pytest.raises(Interrupted):
        estimator.fit(rows, checkpoint=folder, progress=stopping(after), **options)


@pytest.fixture(scope="module")
def whole(store):
    with warnings.catch_warnings(action="ignore"):
        return bits(joint().fit(store))


@pytest.mark.parametrize("scheduler", ["threads", "processes"])
def test_a_run_that_goes_on_ends_with_the_same_bits(store, whole, tmp_path, scheduler):
    folder = tmp_path / "run"
    interrupted(joint(), store, folder, 40, scheduler=scheduler, workers=2)
    kept = list((folder / "pass-000").glob("rows-*"))
    assert kept
    # Another number of workers cuts other tasks, and the blocks stay.
    again = joint().fit(store, checkpoint=folder, scheduler="threads", workers=3)
    assert bits(again) == whole
    length, block = strip_length(N), block_rows(N, 1 << 12)
    strips = -(-N // length)
    redone = strips - again.report_.resumed_strips
    # What was done when it stopped, but for a block and the tasks in flight, is not done again.
    assert again.report_.resumed_strips > 0
    assert redone <= strips - 40 + (1 + 2) * block // length
    # All of it is there now: nothing is read.
    third = joint().fit(store, checkpoint=folder)
    assert bits(third) == whole
    assert third.report_.resumed_strips == strips


@pytest.mark.parametrize(
    "make",
    [
        lambda: joint(pivots="greedy", span=0.5, constraint="certified", max_rank=6),
        lambda: joint(pivots="random", constraint="none", residual=True, support_size=100),
        lambda: joint(constraint="coupling"),
        lambda: PivotedCholesky(kernels.Gaussian(1.0), max_rank=10),
        lambda: ConditionalMeanEmbedding(kernel_x=kernels.Gaussian(1.0), max_rank=12),
    ],
    ids=["greedy", "random with a residual", "coupling", "features", "embedding"],
)
def test_every_estimator_goes_on(short_store, tmp_path, make):
    plain, folder = make().fit(short_store), tmp_path / "run"
    # The first strips of whatever pass comes second, or of the only one.
    seen = []

    def progress(event):
        part = event.detail
        if isinstance(part, Event):
            seen.append(part.name)
            if strips_done(part) >= 20 and (len(seen) > 12 or part.name == "strip-moments"):
                raise Interrupted

    with pytest.raises(Interrupted):
        make().fit(short_store, checkpoint=folder, progress=progress)
    again = make().fit(short_store, checkpoint=folder)
    assert bits(again) == bits(plain)
    assert again.report_.resumed_strips > 0


def test_a_classifier_goes_on(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10_000, 1))  # three blocks of a strip
    label = np.where(x[:, 0] + rng.normal(size=10_000) > 0, "up", "down")

    def make():
        return KernelLogisticRegression(kernels.Gaussian(1.0), max_rank=6)

    plain = make().fit(x, label)
    again = [make().fit(x, label, checkpoint=tmp_path / "run") for _ in range(2)]
    assert bits(again[0]) == bits(again[1]) == bits(plain)


def test_shards_add_up_to_the_bits_of_one_fit(store, whole, tmp_path):
    folder = tmp_path / "run"
    for i in (2, 0, 3, 1):  # in any order, on other numbers of workers
        with pytest.raises(ShardDone, match=f"shard {i + 1} of 4 has done its share of pass-000"):
            joint().fit(store, checkpoint=folder, shard=(i, 4), workers=1 + i % 3)
    done = joint().fit(store, checkpoint=folder)
    assert bits(done) == whole
    assert done.report_.resumed_strips == -(-N // strip_length(N))
    with pytest.raises(DataError, match="a shard needs checkpoint="):
        joint().fit(store, shard=(0, 2))
    with pytest.raises(DataError, match=r"shard must be \(i, k\)"):
        joint().fit(store, checkpoint=folder, shard=(2, 2))


def test_a_cluster_keeps_and_goes_on(store, whole, tmp_path, cluster):
    folder = tmp_path / "run"
    interrupted(joint(), store, folder, 30, scheduler=cluster)
    again = joint().fit(store, checkpoint=folder, scheduler=cluster)
    assert bits(again) == whole
    assert again.report_.resumed_strips > 0


def test_workers_that_do_not_see_the_folder_are_named(cluster, tmp_path):
    kept = Checkpoint(tmp_path / "elsewhere", "run")  # made by nobody: as on another machine
    with pytest.raises(ResourceError, match=r"can't see the checkpoint folder .*elsewhere"):
        kept.check_seen(cluster)


def test_a_shard_makes_no_model(store, tmp_path):
    folder = tmp_path / "run"
    for i in (0, 1, 1):  # the last one finds all shares done
        with pytest.raises(ShardDone):
            joint().fit(store, checkpoint=folder, shard=(i, 2))
    with pytest.raises(ShardDone, match="all shares are done: run the same fit without a shard"):
        joint().fit(store, checkpoint=folder, shard=(0, 2))


BEGIN = """
import sys, time
from pathlib import Path
from cme_dask.passes.checkpoint import checkpointed_run
from cme_dask.errors import ShardDone
for turn in range(20):
    while time.time() < float(sys.argv[3]) + 0.1 * turn:
        pass
    try:
        with checkpointed_run(
            Path(sys.argv[1]) / str(turn), lambda: {"data": {"rows": "9"}}, (int(sys.argv[2]), 2)
        ) as kept:
            kept.begin("rows", "asked", 100_000, 4096)
            print(kept.run)
    except ShardDone:
        pass
"""


@pytest.mark.slow
def test_shards_may_begin_at_once(tmp_path):
    """Two processes make one manifest, and one description of the pass, twenty times."""
    start = str(time.time() + 5.0)
    shards = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN, str(tmp_path), str(i), start],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in (0, 1)
    ]
    (one, errors), (two, more) = (shard.communicate() for shard in shards)
    assert (errors, more) == ("", "")
    assert one == two
    assert len(one.split()) == 20


def test_a_task_that_outlives_its_run_writes_to_no_other(tmp_path):
    """Of a client that died, one goes on; meanwhile another run has begun in the folder."""
    folder = tmp_path / "run"

    def begun():
        with checkpointed_run(folder, lambda: {"data": {"rows": "9"}}) as kept:
            return kept.begin("rows", "asked", 100_000, 4096)

    old = begun()
    old.write(0, 1000)
    discard(folder)
    new = begun()
    with pytest.raises(ResourceError, match="can't see the checkpoint folder"):
        old.write(4096, 1000)
    shutil.copytree(old.folder / old.name, tmp_path / "late", dirs_exist_ok=True)
    assert not any(new.has(start) for start in (0, 4096))
    assert new.write(0, 1) == 1


def test_a_run_that_goes_on_is_not_overwritten(tmp_path):
    folder = tmp_path / "run"
    with checkpointed_run(folder, lambda: {"data": {"rows": "9"}}):
        with pytest.raises(DataError, match="is being written by process"):
            discard(folder)
        CheckpointOptions(folder).finish()  # leaves it as well
        assert folder.exists()
    CheckpointOptions(folder).finish()
    assert not folder.exists()
    assert not list(tmp_path.iterdir())


def test_drafts_of_those_who_were_killed_are_no_hindrance(store, whole, tmp_path):
    folder = tmp_path / "run"
    interrupted(joint(), store, folder, 40)
    (folder / "pass-000" / ".pass.json.12345678").write_text("{")
    (folder / ".zarr.json.12345678").write_text("")
    (folder / "pass-001").mkdir()
    (folder / "pass-001" / ".pass.json.12345678").write_text("{")
    (folder / "pass-000" / ".rows-0-8192-a.12345678").mkdir()
    assert bits(joint().fit(store, checkpoint=folder)) == whole
    kept = sorted(path.name for path in (folder / "pass-000").iterdir())
    assert [name for name in kept if name != ".pass.json.12345678"] == ["pass.json", "total"]


def test_workers_without_a_module_are_named(store, tmp_path, monkeypatch, cluster):
    """Instead of dying of its tasks, one after the other."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "only_here.py").write_text("def up(y):\n    return y[:, 0] > 0\n")
    functions = {"up": importlib.import_module("only_here").up}
    with pytest.raises(ResourceError, match="can't import 'only_here', where functions of"):
        joint().fit(store, functions=functions, scheduler=cluster)


def test_functions_of_a_module_are_what_it_says(store, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module, folder = tmp_path / "thresholds.py", tmp_path / "run"
    module.write_text("def up(y):\n    return y[:, 0] > 0\n")
    functions = {"up": importlib.import_module("thresholds").up}
    here = {"functions": functions, "scheduler": "threads"}  # workers can't import it
    interrupted(joint(), store, folder, 40, **here)
    module.write_text("def up(y):\n    return y[:, 0] > 1\n")
    with pytest.raises(StoreError, match="configuration 'functions' was"):
        joint().fit(store, checkpoint=folder, **here)


HELPED = """
import held
import helpers
from cme_dask.passes.checkpoint import about_run

def scaled(y):
    def one(v):
        return helpers.scale(v)
    return one(y)

for value in (scaled, held.Held()):
    print(about_run("fit", {"functions": value}, *[])["configuration"]["functions"])
"""


@pytest.mark.slow
def test_functions_of_a_script_are_also_what_they_call(tmp_path):
    """Modules that they name or that their classes derive from, and what these import."""
    (tmp_path / "script.py").write_text(HELPED)
    (tmp_path / "factors.py").write_text("FACTOR = 1.0\n")
    (tmp_path / "held.py").write_text("from helpers import Base\n\nclass Held(Base):\n    pass\n")
    (tmp_path / "helpers.py").write_text(
        "import factors\n\ndef scale(v):\n    return v * factors.FACTOR\n\nclass Base:\n    pass\n"
    )

    def fingerprints():
        script = [sys.executable, str(tmp_path / "script.py")]
        done = subprocess.run(script, check=True, capture_output=True, text=True, env=here)
        return done.stdout.split("\n")[:2]

    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    before = fingerprints()
    assert fingerprints() == before
    for name, text in (("factors", "FACTOR = 100.0\n"), ("helpers", "import factors\n")):
        more = (tmp_path / f"{name}.py").read_text() if name == "helpers" else ""
        (tmp_path / f"{name}.py").write_text(more + text)
        after = fingerprints()
        assert all(a != b for a, b in zip(before, after, strict=True)), name
        before = after


@pytest.mark.parametrize("place", ["memory", "zip", "url"])
def test_changed_rows_of_stores_that_are_no_folder_are_seen(tmp_path, place):
    """The change is not in the last bytes of its chunk."""
    rows = np.random.default_rng(0).normal(size=(4000, 2))
    held = {}

    def array(values):
        if place == "url":
            store = FsspecStore.from_url(f"memory://{tmp_path.name}")
        elif place == "zip":
            (tmp_path / "x.zip").unlink(missing_ok=True)
            store = ZipStore(tmp_path / "x.zip", mode="w")
        else:
            store = held
        zarr.create_array(store, data=values, chunks=(2000, 2), overwrite=True)
        if place == "zip":
            store.close()
            store = ZipStore(tmp_path / "x.zip", mode="r")
        return open_sample(zarr.open_array(store, mode="r"))

    before = about_run("fit", {}, array(rows))["data"]["values of x"]
    assert about_run("fit", {}, array(rows))["data"]["values of x"] == before or place == "url"
    rows[0, 0] += 1.0
    assert about_run("fit", {}, array(rows))["data"]["values of x"] != before


def test_rows_that_lie_otherwise_in_memory_are_others(tmp_path):
    """Tokens of Dask do not tell a matrix from its transpose."""
    square = np.random.default_rng(0).normal(size=(50, 50))
    one, two = (about_run("fit", {}, open_sample(each))["data"] for each in (square, square.T))
    assert one["values of x"] != two["values of x"]
    assert about_run("fit", {}, open_sample(square.copy()))["data"] == one


def test_changed_rows_of_other_stores_are_seen(tmp_path):
    """Without checksums in the chunks: by what the filesystem says of their files."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9000, 1))
    names = {"x": tmp_path / "x.zarr", "y": tmp_path / "y.zarr"}
    for path in names.values():
        zarr.create_array(str(path), data=x, chunks=(1000, 1), compressors=None)
    rows = [zarr.open_array(str(path), mode="r") for path in names.values()]
    interrupted(joint(), rows[0], tmp_path / "run", 1, Y=rows[1])
    zarr.open_array(str(names["y"]))[1500, 0] = 7.0
    with pytest.raises(StoreError, match="data 'values of y' was"):
        joint().fit(*rows, checkpoint=tmp_path / "run")


CHANGES = {
    "tol": lambda store: (joint(tol=1e-4), store),
    "kernel_x": lambda store: (joint(kernel_x=kernels.Gaussian(1.1)), store),
    "constraint": lambda store: (joint(constraint="none"), store),
    "estimator": lambda store: (ConditionalMeanEmbedding(), store),
}


@pytest.fixture(scope="module")
def stopped(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with warnings.catch_warnings(action="ignore"):
        interrupted(joint(), store, folder, 40)
    return folder


@pytest.fixture
def begun(stopped, tmp_path):
    # Tasks that were in flight may still rename their drafts.
    drafts = shutil.ignore_patterns(".rows-*")
    return shutil.copytree(stopped, tmp_path / "run", ignore=drafts)


@pytest.mark.parametrize("name", CHANGES)
def test_another_configuration_is_refused_by_name(store, begun, name):
    estimator, rows = CHANGES[name](store)
    with pytest.raises(StoreError, match=f"another run: configuration '{name}' was .* and is"):
        estimator.fit(rows, checkpoint=begun)


def test_other_functions_are_refused_by_name(store, begun):
    with pytest.raises(StoreError, match="configuration 'functions' was"):
        joint().fit(store, checkpoint=begun, functions={"up": lambda y: y[:, 0] > 0})


def test_changed_rows_are_refused_by_name(store, begun, tmp_path):
    other = tmp_path / "changed.zarr"
    shutil.copytree(store, other)
    array = zarr.open_group(str(other))["y"]
    array[N // 2, 0] = 17.0
    with pytest.raises(StoreError, match="data 'values of y' was"):
        joint().fit(other, checkpoint=begun)
    same = tmp_path / "copy.zarr"  # the same rows in another place are the same
    shutil.copytree(store, same)
    joint().fit(same, checkpoint=begun)


def test_a_part_of_the_rows_is_another_run(store, begun):
    with pytest.raises(StoreError, match="data 'part' was"):
        joint().fit(open_sample(store).split(0.5)[0], checkpoint=begun)
    sample = open_sample(store)
    parts = [
        *(sample.split(0.2, seed=seed)[0] for seed in (0, 1)),
        *(sample.split(share)[0] for share in (0.2001, 0.2002)),
        *sample.k_fold(3)[0],
    ]
    fingerprints = {about_run("fit", {}, part)["data"]["part"] for part in parts}
    assert len(fingerprints) == len(parts)


@pytest.mark.parametrize(
    ("folder", "says"),
    [(5, "checkpoint must be a path"), ("s3://bucket/run", "is mounted"), ("file", "is none")],
)
def test_what_is_no_folder_is_refused(store, tmp_path, monkeypatch, folder, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=says):
        joint().fit(store, checkpoint=folder)


def edit(path, change):
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))


def test_other_versions_are_refused(store, begun):
    def older(manifest):
        manifest["attributes"]["cme_dask"]["about"]["version"]["cme_dask"] = "0.0.1"

    edit(begun / "zarr.json", older)
    with pytest.raises(StoreError, match=r"version 'cme_dask' was 0\.0\.1 and is"):
        joint().fit(store, checkpoint=begun)

    def newer(manifest):
        manifest["attributes"]["cme_dask"]["schema_version"] = 99

    edit(begun / "zarr.json", newer)
    with pytest.raises(StoreError, match="schema version 99"):
        joint().fit(store, checkpoint=begun)


def test_a_damaged_checkpoint_is_one_sentence(short_store, tmp_path):
    store, folder = short_store, tmp_path / "run"
    joint().fit(store, checkpoint=folder)
    hold = tmp_path / "hold"
    shutil.copytree(folder, hold)

    def fails(match, change):
        shutil.rmtree(folder)
        shutil.copytree(hold, folder)
        change()
        with pytest.raises(StoreError, match=match):
            joint().fit(store, checkpoint=folder)

    def flipped():
        chunk = max((folder / "pass-000/total").rglob("c/*"), key=lambda path: path.stat().st_size)
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 1
        chunk.write_bytes(data)

    def piped(path):
        path.unlink()
        os.mkfifo(path)

    fails("truncated or corrupt", flipped)
    fails(
        "lacks the sums of pass-000, which its manifest lists",
        lambda: shutil.rmtree(folder / "pass-000" / "total"),
    )
    fails("holds sums but not pass.json", lambda: (folder / "pass-000/pass.json").unlink())
    fails("is no checkpoint", lambda: (folder / "zarr.json").unlink())
    fails("is damaged", lambda: (folder / "zarr.json").write_text("{"))
    fails("is no plain file", lambda: piped(folder / "zarr.json"))

    def unlisted(about):
        about["attributes"]["cme_dask"]["ended"] = None

    fails("its passes are no list", lambda: edit(folder / "zarr.json", unlisted))
    fails(
        "is of another strip-moments",
        lambda: edit(folder / "pass-000/pass.json", lambda about: about.update(token="other")),
    )
    with pytest.raises(StoreError, match="is no checkpoint"):
        joint().fit(store, checkpoint=store.parent)


def test_half_written_blocks_count_for_nothing(store, whole, begun):
    block = next(begun.glob("pass-000/rows-*"))
    block.rename(block.with_name(f".{block.name}.1234abcd"))
    assert bits(joint().fit(store, checkpoint=begun)) == whole


def test_a_block_in_the_place_of_another_is_refused(store, begun):
    block, other, *_ = sorted(begun.glob("pass-000/rows-*"))
    shutil.rmtree(block)
    shutil.copytree(other, block)
    with pytest.raises(StoreError, match=r"rows-.* is that of pass-000 of run .*, rows "):
        joint().fit(store, checkpoint=begun)


def test_one_run_at_a_time(store, begun):
    def second(event):
        if isinstance(event.detail, Event):
            with pytest.raises(DataError, match="is being written by process"):
                joint().fit(store, checkpoint=begun)
            raise Interrupted

    with pytest.raises(Interrupted):
        joint().fit(store, checkpoint=begun, progress=second)


def test_the_command_keeps_resumes_and_clears_up(store, tmp_path, monkeypatch):
    shorten_searches(monkeypatch, rows=200, max_rank=15, evaluations=1)
    folder, out = tmp_path / "run", tmp_path / "m.zarr"
    command = ["fit", str(store), "--out", str(out), "--reg", "1e-4", "--max-rank", "12"]
    command += ["--constraint", "coupling", "--residual", "no", "--json"]

    def run(*more):
        return CliRunner().invoke(cli, [*command, *more])

    assert "need --checkpoint" in run("--resume").stderr
    for i in (1, 2):
        done = run("--checkpoint", str(folder), "--shard", f"{i}/2")
        assert done.exit_code == 0, done.stderr
        assert f"shard {i} of 2 has done" in json.loads(done.stdout)["shard"]
    other = run("--checkpoint", str(folder), "--tol", "0.1", "--overwrite")
    assert other.exit_code == 2
    assert "is of another run" in other.stderr
    done = run("--checkpoint", str(folder))
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["resumed_strips"] == -(-N // strip_length(N))
    assert out.exists()
    assert not folder.exists()


@dataclass(frozen=True, eq=False)
class Pair:
    left: object
    right: object


KINDS = (Pair,)
ARRAYS = hnp.arrays(
    st.sampled_from(["f8", "i8", "u8", "u1", "?", "f4"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(), inner, max_size=2)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


def alike(a, b):
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and np.shape(a) == np.shape(b) and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, Pair):
        return alike(a.left, b.left) and alike(a.right, b.right)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    return repr(a) == repr(b)


@settings(max_examples=15, derandomize=True)
@given(value=VALUES)
def test_partial_sums_come_back_as_they_went(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("partial") / "p"
    write_partial(path, value, KINDS, place="here")
    write_partial(path, "what comes second", KINDS, place="here")  # the first one wins
    found = read_partial(path, KINDS, place="here")
    shapeless = isinstance(value, np.ndarray) and not value.shape  # comes back as a scalar
    assert alike(value[()] if shapeless else value, found) or _scalars(value)


def _scalars(value):
    """Whether 0-d arrays lie inside, which come back as scalars."""
    if isinstance(value, np.ndarray):
        return not value.shape
    if isinstance(value, Pair):
        return _scalars(value.left) or _scalars(value.right)
    if isinstance(value, dict):
        return any(map(_scalars, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_scalars, value))


def test_unknown_kinds_neither_go_nor_come(tmp_path):
    with pytest.raises(TypeError, match="can't be part of a checkpoint"):
        write_partial(tmp_path / "p", replace(Pair(1, 2)), (), place="p")
    with pytest.raises(TypeError, match="make it a dataclass or a named tuple"):
        write_partial(tmp_path / "p", {1}, (set,), place="p")
    write_partial(tmp_path / "p", Pair(1, 2), KINDS, place="p")
    with pytest.raises(StoreError, match="is damaged"):
        read_partial(tmp_path / "p", (), place="p")
