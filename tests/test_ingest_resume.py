"""An interrupted ingest goes on, and ends in the same bytes."""

import contextlib
import errno
import gzip
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest
import zarr
from conftest import fork_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cme_dask.data import ingest as module
from cme_dask.data.checkpoint import ResumableOutput
from cme_dask.data.ingest import ingest
from cme_dask.data.writer import OUTPUT
from cme_dask.errors import DataError, ResourceError, StoreError
from cme_dask.passes.sources import open_sample

OPTIONS = {
    "x": ["a", "wd"],
    "y": ["b"],
    "weights": "w",
    "categorical": ["wd"],
    "group": "station",
    "time": ["t"],
    "chunk_rows": 256,
}


@pytest.fixture(scope="module", autouse=True)
def many_checkpoints():
    """A checkpoint comes often, for files of few batches to have several each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHECKPOINT_BATCHES", 24)
        yield


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Three files, one compressed, and the store of an undisturbed run."""
    folder = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(4)
    for number in range(3):
        lines = ["a,b,w,wd,station,t"]
        for i in range(1_000):
            a, b, w = rng.normal(size=3).round(6)
            label = rng.choice(["N", "E", f"rare {i // 200}", ""])
            station = f"station {rng.integers(9) + number}"
            lines.append(f'{a},{b},{abs(w)},"{label}",{station},{3600 * i}')
        text = "\n".join(lines) + "\n"
        if number == 1:
            (folder / "1.csv.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"{number}.csv").write_text(text)
    ingest([folder / "*.csv*"], folder / "whole", **OPTIONS)
    return folder


def contents(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def interrupted(table, output, after, block_bytes=1_000, **options):
    """Stop after so many batches, as ctrl-C would; whether it was before the end."""

    def stop(_):
        nonlocal after
        after -= 1
        if after < 0:
            raise KeyboardInterrupt

    options = OPTIONS | {"block_bytes": block_bytes, "progress": stop} | options
    with contextlib.suppress(KeyboardInterrupt):
        ingest([table / "*.csv*"], output, **options)
        return False
    return True


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(
    stops=st.lists(st.integers(0, 80), max_size=2),
    sizes=st.lists(st.sampled_from([900, 2_000, 7_001]), min_size=3, max_size=3),
)
def test_resumed_bytes_are_the_same(tmp_path, table, stops, sizes):
    output = tmp_path / "s"
    shutil.rmtree(output, ignore_errors=True)
    for after, size in zip(stops, sizes, strict=False):
        if not interrupted(table, output, after, size, resume=True):
            break
    else:
        ingest([table / "*.csv*"], output, **OPTIONS, resume=True, block_bytes=sizes[-1])
    assert contents(output) == contents(table / "whole")
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def changed(path):
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns


def test_killed_a_dozen_times(tmp_path, table):
    context = fork_server()
    chance = random.Random(8)
    options = OPTIONS | {"resume": True, "block_bytes": 300}
    output, kills, resumed = tmp_path / "s", 0, 0
    state = tmp_path / ".s.partial" / "state.json"
    while kills < 12:
        if output.exists():  # killed, if at all, when it was published
            assert contents(output) == contents(table / "whole")
            shutil.rmtree(output)
        before = changed(state)
        process = context.Process(target=ingest, args=([table / "*.csv*"], output), kwargs=options)
        process.start()
        while chance.random() < 0.999 and changed(state) == before and process.is_alive():
            time.sleep(0.001)  # most get as far as a checkpoint, wherever a busy machine is then
        process.join(chance.uniform(0.0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode != 0
        resumed += process.exitcode != 0 and changed(state) is not None
    shutil.rmtree(output, ignore_errors=True)
    ingest([table / "*.csv*"], output, **OPTIONS, resume=True)
    assert contents(output) == contents(table / "whole")
    assert resumed > 3  # or the kills came too early to test anything
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_interrupted_work_is_not_dropped_silently(tmp_path, table):
    output = tmp_path / "s"
    assert interrupted(table, output, 50)
    with pytest.raises(
        DataError, match=r"an interrupted ingest of .* resume=True continues it, over"
    ):
        ingest([table / "*.csv*"], output, **OPTIONS)
    with pytest.raises(StoreError, match="is unfinished: it is still being written, or"):
        open_sample(output)
    for inside in ("", "store"):
        with pytest.raises(StoreError, match=r"unfinished|no finished"):
            open_sample(tmp_path / ".s.partial" / inside)
    report = ingest([table / "*.csv*"], output, **OPTIONS, overwrite=True)
    assert report.rows_resumed == 0
    assert contents(output) == contents(table / "whole")


def test_a_resumed_run_may_replace_an_output(tmp_path, table):
    output = tmp_path / "s"
    shutil.copytree(table / "whole", output)
    assert interrupted(table, output, 50, overwrite=True, chunk_rows=64)
    assert contents(output) == contents(table / "whole")  # until the new one is whole
    with pytest.raises(DataError, match="already exists"):
        ingest([table / "*.csv*"], output, **OPTIONS | {"chunk_rows": 64}, resume=True)
    options = OPTIONS | {"chunk_rows": 64, "overwrite": True, "resume": True}
    assert ingest([table / "*.csv*"], output, **options).rows_resumed > 0
    assert zarr.open_group(str(output), mode="r")["x"].chunks == (64, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"missing": "error"}, "another missing .'drop', now 'error'."),
        ({"x": ["a"], "categorical": []}, "another x "),
        ({"seed": 3}, r"another seed \(0, now 3\)"),
        ({"chunk_rows": 128}, r"another chunk_rows \(256, now 128\)"),
        ({"group": None}, "another group .'station', now None."),
        ({"units": {"a": "m"}}, "another units"),
        ({"null_values": ["x"]}, "another null_values"),
    ],
)
def test_other_arguments_are_refused(tmp_path, table, change, message):
    output = tmp_path / "s"
    assert interrupted(table, output, 50)
    with pytest.raises(DataError, match=message):
        ingest([table / "*.csv*"], output, **(OPTIONS | change), resume=True)
    ingest([table / "*.csv*"], output, **OPTIONS, resume=True)  # still possible
    assert contents(output) == contents(table / "whole")


def test_other_files_are_refused(tmp_path, table):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("0.csv", "1.csv.gz", "2.csv"):
        shutil.copy2(table / name, copy)
    output = tmp_path / "s"
    assert interrupted(copy, output, 100)
    with pytest.raises(DataError, match=r"other files .'.*2\.csv'."):
        ingest([copy / "0.csv", copy / "1.csv.gz"], output, **OPTIONS, resume=True)
    text = (copy / "0.csv").read_text()
    (copy / "0.csv").write_text(text.replace("N", "S"))
    os.utime(copy / "0.csv", ns=(1, 10**18))
    with pytest.raises(DataError, match=r"0\.csv has changed since the interrupted ingest read it"):
        ingest([copy / "*.csv*"], output, **OPTIONS, resume=True)


@pytest.mark.parametrize("damaged", ["state.json", "npz"])
def test_a_damaged_checkpoint_is_refused(tmp_path, table, damaged):
    output = tmp_path / "s"
    assert interrupted(table, output, 50)
    (path,) = (tmp_path / ".s.partial").glob(f"*{damaged}")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"is damaged .*: overwrite=True starts again"):
        ingest([table / "*.csv*"], output, **OPTIONS, resume=True)


def test_one_writer_at_a_time(tmp_path, table):
    output = tmp_path / "s"
    with ResumableOutput(output, OUTPUT, overwrite=False, resume=False):
        with pytest.raises(DataError, match=rf"being written by process {os.getpid()} on \w+"):
            ingest([table / "*.csv*"], output, **OPTIONS)
        ingest([table / "0.csv"], tmp_path / "other", **OPTIONS)
    ingest([table / "*.csv*"], output, **OPTIONS)  # the lock is gone with its holder


def test_a_lock_of_a_dead_process_is_no_lock(tmp_path, table):
    folder = tmp_path / ".s.partial"
    folder.mkdir()
    (folder / "lock").write_text("process 1 on elsewhere")
    ingest([table / "*.csv*"], tmp_path / "s", **OPTIONS)
    assert contents(tmp_path / "s") == contents(table / "whole")


@pytest.mark.parametrize("full_after", [3, 15, 30])
def test_a_full_disk_keeps_the_checkpoint(tmp_path, table, monkeypatch, full_after):
    written, write = 0, zarr.Array.__setitem__

    def setitem(array, selection, value):
        nonlocal written
        written += 1
        if written > full_after:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(array, selection, value)

    output = tmp_path / "s"
    monkeypatch.setattr(zarr.Array, "__setitem__", setitem)
    with pytest.raises(ResourceError, match="the disk is full while writing") as caught:
        ingest([table / "*.csv*"], output, **OPTIONS, block_bytes=1_000)
    monkeypatch.undo()
    kept = (tmp_path / ".s.partial").exists()
    assert kept == ("resume=True continues" in str(caught.value)) == (full_after > 3)
    assert ingest([table / "*.csv*"], output, **OPTIONS, resume=True).rows_resumed > 0 or not kept
    assert contents(output) == contents(table / "whole")


def test_a_full_disk_while_a_checkpoint_is_made(tmp_path, table, monkeypatch):
    saves, savez = 0, np.savez

    def full(file, **arrays):
        nonlocal saves
        saves += 1
        if saves == 3:
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        savez(file, **arrays)

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(ResourceError, match=r"disk is full .*resume=True continues"):
        ingest([table / "*.csv*"], tmp_path / "s", **OPTIONS, block_bytes=1_000)
    assert len(list((tmp_path / ".s.partial").glob("*.npz"))) == 1
    ingest([table / "*.csv*"], tmp_path / "s", **OPTIONS, resume=True)
    assert contents(tmp_path / "s") == contents(table / "whole")


def test_cut_off_at_the_very_end(tmp_path, table, monkeypatch):
    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "CHECKPOINT_BATCHES", 5)
    monkeypatch.setattr(ResumableOutput, "publish", dies)
    with pytest.raises(KeyboardInterrupt):
        ingest([table / "*.csv*"], tmp_path / "s", **OPTIONS, block_bytes=5_000)
    monkeypatch.undo()
    ingest([table / "*.csv*"], tmp_path / "s", **OPTIONS, resume=True)
    assert contents(tmp_path / "s") == contents(table / "whole")


def test_cut_off_between_publishing_and_clearing_up(tmp_path, table, monkeypatch):
    def dies(*_):
        raise KeyboardInterrupt

    output = tmp_path / "s"
    assert interrupted(table, output, 50)
    monkeypatch.setattr(ResumableOutput, "_clear", dies)
    with pytest.raises(KeyboardInterrupt):
        ingest([table / "*.csv*"], output, **OPTIONS, resume=True)
    monkeypatch.undo()
    (tmp_path / ".s.partial.0123abcd").mkdir()  # what a killed clearing up leaves
    assert contents(output) == contents(table / "whole")
    ingest([table / "*.csv*"], output, **OPTIONS, resume=True, overwrite=True)
    assert contents(output) == contents(table / "whole")
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
