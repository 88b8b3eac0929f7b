"""Outputs: never in the place of what others wrote, never half there, and safe to make again."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from conftest import write_store

import cme_dask
from cme_dask import kernels, open_sample
from cme_dask.cli import cli, demo, fitting, progress, query, run_report, runner
from cme_dask.cli.options import role
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.schema import IngestSection
from cme_dask.data import atomic, model_file, writer
from cme_dask.data import ingest as ingestion
from cme_dask.data.atomic import Kind, check_apart, check_output, json_file, recover, writing
from cme_dask.errors import DataError, ResourceError, StoreError
from cme_dask.estimators.comparison import EndedRuns
from cme_dask.models.plots import picture
from cme_dask.passes import checkpoint as checkpoints
from cme_dask.passes import processes
from cme_dask.passes.checkpoint import checkpointed_run, discard, is_checkpoint

SYNCS = SPAWNS = True  # see conftest
MODEL = model_file.OUTPUT
GIVEN = ("--kernel", "gaussian:1.0", "--reg", "1e-4", "--max-rank", "8", "--residual", "no")


def contents(folder):
    return {p.relative_to(folder): p.is_file() and p.read_bytes() for p in folder.rglob("*")}


def command(*args):
    return CliRunner().invoke(cli, [str(a) for a in args])


def make(path, kind, text="ours", **options):
    """An output as small as can be, a group or a file."""
    with writing(path, kind, **options) as aside:
        if kind.name == "model":
            group = zarr.open_group(str(aside), mode="w", zarr_format=3)
            group.attrs["cme_dask"] = {"kind": "model", "text": text}
        else:
            aside.write_text(json.dumps({"cme_dask": kind.name, "text": text}))


def text_of(path):
    described = json.loads((path / "zarr.json" if path.is_dir() else path).read_text())
    return described.get("attributes", {}).get("cme_dask", described)["text"]


@pytest.fixture(autouse=True)
def interruptible():
    """Shells start processes in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["exchange", "two steps"])
def file_system(request, monkeypatch):
    """One that exchanges two paths, and one that can't and renames without a look."""
    if request.param == "two steps":
        monkeypatch.setattr(atomic, "_FLAGS", {})
    return request.param


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 1))
    folder = tmp_path_factory.mktemp("rows")
    write_store(folder / "s", x, x + rng.normal(size=x.shape), chunk_rows=1000)
    fit = command("fit", folder / "s", "--out", folder / "m", *GIVEN)
    assert fit.exit_code == 0, fit.stderr
    return folder


# Paths apart from each other -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "inputs", "folders", "says"),
    [
        (
            {"--out": "a", "--report": "./a"},
            [],
            {},
            r"--out \(a\) and --report \(./a\) are",
        ),
        ({"--out": "link", "--report": "a"}, [], {}, "are the same path"),
        ({"--out": "c/m", "--checkpoint": "c"}, [], {}, r"--out \(c/m\) lies inside --checkpoint"),
        ({"--checkpoint": "m/c", "--out": "m"}, [], {}, r"--checkpoint \(m/c\) lies inside --out"),
        ({"--out": "s"}, ["s"], {}, r"--out \(s\) would replace the input \(s\)"),
        ({"--out": "d"}, ["d/s"], {}, "which it holds"),
        ({"--out": "d"}, ["file://{here}/d/s"], {}, "which it holds"),
        ({"--out": "s/m"}, ["s"], {}, r"--out \(s/m\) lies inside the input"),
        ({"--report": "o"}, [], {"--out": "o"}, "are the same path"),
        ({"--report": "o"}, [], {"--out": "o/p"}, r"--out \(o/p\) lies inside --report"),
        ({"--report": "o/r"}, ["o/s"], {"--out": "o"}, None),
        ({"--out": "m", "--report": "mm", "--log": None}, ["s3://a/m", "ms"], {}, None),
    ],
)
def test_outputs_lie_apart(tmp_path, monkeypatch, outputs, inputs, folders, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("a")
    given = [("input", path.format(here=tmp_path)) for path in inputs]
    refused = pytest.raises(DataError, match=says) if says else contextlib.nullcontext()
    with refused:
        check_apart(outputs, given, folders)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("fit", "s", *GIVEN, "--out", "ck/m", "--checkpoint", "ck"), "lies inside --checkpoint"),
        (("fit", "s", *GIVEN, "--out", "new", "--report", "new"), "are the same path"),
        (("fit", "s", *GIVEN, "--out", "r/m", "--report", "r", "--overwrite"), "inside --report"),
        (("fit", "s", *GIVEN, "--out", "n", "--checkpoint", "s/ck"), "lies inside the input STORE"),
        (("fit", "s", *GIVEN, "--out", "n", "--log", "ck/l", "--checkpoint", "ck"), "lies inside"),
        (("tune", "s", "--out", "t", "--report", "t/model.zarr"), "are the same path"),
        (("features", "s", "--out", "s", "--overwrite"), "would replace the input STORE"),
        (
            ("transform", "s", "--model", "m", "--out", "m", "--overwrite"),
            "replace the input --mod",
        ),
        (("predict", "m", "s", "--out", "s", "--overwrite"), "would replace the input STORE"),
        (("grow", "m", "s", "--out", "m", "--overwrite"), "would replace the input MODEL"),
        (("merge", "m", "m", "--out", "m", "--overwrite"), "would replace the input"),
        (("rechunk", "s", "s", "--overwrite"), "would replace the input"),
        (
            ("ingest", "*.csv", "--out", ".", "--x", "a", "--y", "b", "--overwrite"),
            "which it holds",
        ),
        (("fit", "s", *GIVEN, "--out", "m/n"), "lies inside .*/m, a model of cme_dask"),
        (("sample", "d/model.zarr", "--rows", "9", "--overwrite"), "is a model of cme_dask"),
        (
            ("predict", "m", "--given", "x0=0", "--out", "t.csv", "--overwrite"),
            "is not marked as a",
        ),
        (("fit", "s", *GIVEN, "--out", "n", "--log", "t.csv"), "t.csv is no log of cme_dask"),
        (("demo", "--out", "d"), "holds 'model.zarr', but not normal3.zarr"),
    ],
)
def test_commands_refuse_what_would_destroy(rows, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    for name in ("ck", "d"):
        (tmp_path / name).mkdir()
    for name in ("s", "m"):
        (tmp_path / name).symlink_to(rows / name)
    (tmp_path / "d" / "model.zarr").symlink_to(rows / "m")
    (tmp_path / "t.csv").write_text("x0,y0\n1,2\n")
    before = contents(tmp_path), contents(rows)
    done = command(*words)
    assert done.exit_code == 2, done.output
    assert click.unstyle(done.stderr).startswith("error: ")
    assert re.search(says, done.stderr)
    assert (contents(tmp_path), contents(rows)) == before


def commands(group, context):
    for each in group.commands.values():
        yield from commands(each, context) if isinstance(each, click.Group) else [each]


def test_commands_say_which_paths_they_write_and_read():
    """A new path that says neither would not be held apart from the others."""
    context, seen = click.Context(cli), set()
    for each in commands(cli, context):
        for parameter in each.params:
            named = str(parameter.metavar).rstrip(".") in ("PATH", "DIR", "FILE", "STORE", "MODEL")
            if named or isinstance(parameter, click.Argument):
                assert role(parameter) is not None, (each.name, parameter.name)
                seen.add(role(parameter).__name__)
    assert seen == {"output", "output_folder", "source"}


def test_python_holds_outputs_apart(rows, tmp_path):
    fitted = cme_dask.PivotedCholesky(kernels.Gaussian(1.0), tol=0.3).fit(open_sample(rows / "s"))
    before = contents(rows)
    with pytest.raises(DataError, match="would replace the input"):
        fitted.transform_store(open_sample(rows / "s"), rows / "s", overwrite=True)
    with pytest.raises(DataError, match=r"lies inside .*s, a sample of cme_dask"):
        fitted.save(rows / "s" / "f")
    with pytest.raises(DataError, match=r"lies inside .*m, a model of cme_dask"):
        fitted.fit(open_sample(rows / "s"), checkpoint=rows / "m" / "run")
    assert contents(rows) == before
    with checkpointed_run(tmp_path / "run", lambda: {"data": {}}):
        pass
    with pytest.raises(DataError, match=r"lies inside .*run, a checkpoint of cme_dask"):
        fitted.save(tmp_path / "run" / "f")


# Only what we wrote is replaced --------------------------------------------------------------


def test_outputs_are_told_by_kind(rows, tmp_path):
    """Each kind knows its own, and takes neither another one's nor what others wrote."""
    answers = command("predict", rows / "m", rows / "s", "--out", tmp_path / "a", "--of", "mean")
    points = ("--given", "x0=0", "--out", tmp_path / "t", "--event", 'y0 > "0,5"')
    with picture(tmp_path / "p", 1, 1):
        pass
    make(tmp_path / "j", fitting.TRACE)
    make(tmp_path / "k", runner.REPORT)
    with run_report.reporting(tmp_path / "r", None):
        pass
    (tmp_path / "h").write_text('<!doctype html>\n<meta name="generator" content="cme_dask">')
    assert answers.exit_code == command("predict", rows / "m", *points[:-2]).exit_code == 0
    from cme_dask.data import outputs
    from cme_dask.reports import page

    ours = {
        rows / "s": writer.OUTPUT,
        rows / "m": MODEL,
        tmp_path / "a": outputs.OUTPUT,
        tmp_path / "t": query.TABLE,
        tmp_path / "p": atomic.PICTURE,
        tmp_path / "j": fitting.TRACE,
        tmp_path / "k": runner.REPORT,
        tmp_path / "r": run_report.REPORT,
        tmp_path / "h": page.OUTPUT,
    }
    others = tmp_path / "others"
    others.mkdir()
    (others / "thesis.docx").write_bytes(b"PK\x03\x04 cme_dask mean")
    (others / "points.csv").write_text('"x0","y0"\n1.0,2.0\n')
    (others / "page.html").write_text("<!doctype html>\n<p>About cme_dask</p>")
    (others / "some.json").write_text('{"kind": "report", "cme_dask": "job"}')
    (others / "figure.png").write_bytes(b"\x89PNG\r\n\x1a\n Software\0Matplotlib, of cme_dask")
    (others / "folder").mkdir()
    (others / "folder" / "report.json").write_text("{}")
    (others / "nowhere").symlink_to(others / "missing")
    for kind in ours.values():
        known = [path for path in (*ours, *others.iterdir()) if kind.replaceable(path)]
        assert known == [path for path, own in ours.items() if own is kind], kind.name
    (tmp_path / "empty").touch()
    (tmp_path / "empty folder").mkdir()
    assert all(MODEL.replaceable(tmp_path / name) for name in ("empty", "empty folder"))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", [MODEL, json_file("trace")], ids=lambda kind: kind.name)
def test_what_appears_meanwhile_stays(tmp_path, file_system, kind, before):
    target = tmp_path / "o"
    if before:
        make(target, kind)

    def late():
        with writing(target, kind, overwrite=before) as aside:
            if before:
                atomic.remove(target)
            target.mkdir()
            (target / "dear").write_text("years of work")
            make(aside, kind, "new")

    with pytest.raises(DataError, match="was made by something else meanwhile") as refused:
        late()
    assert (target / "dear").read_text() == "years of work"
    (spare,) = (path for path in tmp_path.iterdir() if path != target)
    assert str(spare) in str(refused.value)
    assert text_of(spare) == "new"


@pytest.mark.parametrize("kind", [MODEL, json_file("trace")], ids=lambda kind: kind.name)
def test_an_output_takes_the_place_of_its_kind(tmp_path, file_system, kind):
    for text in ("old", "new"):
        make(tmp_path / "o", kind, text, overwrite=True)
        assert text_of(tmp_path / "o") == text
        assert [path.name for path in tmp_path.iterdir()] == ["o"]


def test_checkpoints_are_removed_without_what_others_put_there(tmp_path):
    folder = tmp_path / "run"
    with checkpointed_run(folder, lambda: {"data": {}}):
        pass
    (folder / "notes.txt").write_text("dear")
    discard(folder)
    assert contents(tmp_path) == {Path("run"): False, Path("run/notes.txt"): b"dear"}
    with (
        pytest.raises(StoreError, match="is no checkpoint"),
        checkpointed_run(folder, lambda: {"data": {}}),
    ):
        pass


def test_progress_of_comparisons_replaces_no_file(tmp_path):
    (tmp_path / "thesis").write_text("dear\n")
    with pytest.raises(DataError, match="is no interrupted comparison"):
        EndedRuns(tmp_path / "thesis", {})
    assert (tmp_path / "thesis").read_text() == "dear\n"
    EndedRuns(tmp_path / "runs", {"a": 1}).add("method", 0, {"crps": 1.0})
    assert EndedRuns(tmp_path / "runs", {"a": 1}).get("method", 0) == {"crps": 1.0}
    assert {path.name for path in tmp_path.iterdir()} == {"thesis", "runs"}


# Killed at any moment ------------------------------------------------------------------------


KILLED = """
import os, signal, sys
from pathlib import Path
from cme_dask.data import atomic
target, moment = Path(sys.argv[1]), sys.argv[2]
kind = atomic.stored("model")
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if moment == "renames":
    atomic._FLAGS.clear()  # as where the file system can't exchange
    rename = os.rename
    os.rename = lambda a, b: (rename(a, b), str(b).endswith("old") and die())
if moment == "removal":
    atomic.remove = die
if moment == "ingest":
    from cme_dask.data.checkpoint import ResumableOutput
    rename = os.rename
    os.rename = lambda a, b: (rename(a, b), str(b).endswith("old") and die())
    with ResumableOutput(target, kind, overwrite=True, resume=True) as output:
        if output.state is None:
            output.store.mkdir()
            text = (target / "zarr.json").read_text().replace("ours", "new")
            (output.store / "zarr.json").write_text(text)
            output.commit({}, {})
        else:
            os.rename = rename
        output.publish()
    sys.exit()
with atomic.writing(target, kind, overwrite=True) as aside:
    aside.mkdir()
    text = '{"zarr_format": 3, "attributes": {"cme_dask": {"kind": "model", "text": "new"}}}'
    (aside / "zarr.json").write_text(text)
    if moment == "writing":
        die()
"""


def killed(target, moment):
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), moment], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("reader", ["command", "load", "info"])
def test_a_kill_between_two_renames_hides_nothing(rows, tmp_path, reader):
    target = tmp_path / "m"
    with writing(target, MODEL) as aside:
        os.system(f"cp -r {rows / 'm'} {aside}")
    killed(target, "renames")
    assert not target.exists()  # or the kill came at another moment
    if reader == "command":
        with pytest.raises(DataError, match="already exists"):
            check_output(target, MODEL, overwrite=False)
    elif reader == "load":
        cme_dask.load(target)
    else:
        assert command("info", target).exit_code == 0
    assert contents(target) == contents(rows / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_kill_while_an_ingest_is_published_hides_nothing(tmp_path):
    target = tmp_path / "s"
    make(target, MODEL)
    killed(target, "ingest")
    assert not target.exists()
    with pytest.raises(StoreError):
        cme_dask.load(target)  # which is as small as can be, but there again
    assert text_of(target) == "ours"
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), "ingest"], check=False)
    assert done.returncode == 0
    assert text_of(target) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize(("moment", "left"), [("writing", "old"), ("removal", "new")])
def test_what_killed_writers_leave_is_cleared_away(tmp_path, moment, left):
    target = tmp_path / "o"
    make(target, MODEL, "old")
    killed(target, moment)
    assert text_of(target) == left
    assert len(list(tmp_path.iterdir())) == 2
    make(target, MODEL, "newer", overwrite=True)
    assert text_of(target) == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def test_only_dead_writers_of_ours_are_cleared_away(tmp_path):
    target, kind = tmp_path / "o", json_file("trace")
    foreign = tmp_path / ".o.0123abcd.partial"
    foreign.mkdir()
    (foreign / "lock").touch()
    (foreign / "thesis.docx").touch()
    other_name = tmp_path / ".o.zarr.0123abcd.partial"
    other_name.mkdir()
    (other_name / "lock").touch()
    elsewhere = tmp_path / ".o.ffffffff.partial"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("process 1 on elsewhere")
    with writing(target, kind) as aside:
        make(target, kind, "of another writer")  # which looks for dead ones, and finds none
        assert aside.parent.exists()
        target.unlink()
        make(aside, kind)
    assert {foreign, other_name, elsewhere, target} == set(tmp_path.iterdir())
    begin = time.time() - 2 * 86_400
    for path in (elsewhere / "lock", elsewhere):
        os.utime(path, (begin, begin))
    recover(target)
    assert {foreign, other_name, target} == set(tmp_path.iterdir())


def test_the_output_is_on_the_disk_before_its_checkpoint_goes(rows, tmp_path, monkeypatch):
    happened = []
    fsync, rename, leave = os.fsync, atomic._rename, checkpoints.discard

    def synced(descriptor):
        happened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(atomic, "_rename", lambda *a: (happened.append("rename"), rename(*a)))
    monkeypatch.setattr(checkpoints, "discard", lambda f: (happened.append("discard"), leave(f)))
    words = ("fit", rows / "s", *GIVEN, "--out", tmp_path / "m", "--checkpoint", tmp_path / "run")
    done = command(*words)
    assert done.exit_code == 0, done.output
    made = happened[: happened.index("rename")]
    inside = {Path(p.partition("/output/")[2] or ".") for p in made if "/output" in p}
    assert inside == {Path("."), *contents(tmp_path / "m")}
    assert str(tmp_path) in happened[happened.index("rename") : happened.index("discard")]


# The same command again ----------------------------------------------------------------------


@pytest.mark.parametrize("more", [("--overwrite",), ("--resume",)])
def test_one_command_begins_continues_and_is_complete(rows, tmp_path, more):
    out, folder = tmp_path / "m", tmp_path / "run"
    words = ("fit", rows / "s", *GIVEN, "--out", out, "--checkpoint", folder, "--json")
    if "--overwrite" in more:
        make(out, MODEL)
    else:  # the first start is not told of any run
        begun = command(*words, "--shard", "1/2")
        assert begun.exit_code == 0, begun.output
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_file, "write_model", interrupt)
        assert command(*words, *more).exit_code == 130
    assert is_checkpoint(folder)
    again = command(*words, *more)
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["resumed_strips"] > 0
    assert not folder.exists()
    before, run = contents(out), model_file.run_of(out)
    for mark in (run, "0"):  # of one who was killed before it was removed, and of another run
        with checkpointed_run(folder, lambda: {}):
            (folder / f"saving-{mark}").touch()
        once_more = command(*words, *more)
        assert once_more.exit_code == 0, once_more.output
        assert json.loads(once_more.stdout)["complete"]
        assert "is complete: this run has made it before" in once_more.stderr
        assert contents(out) == before
        assert folder.exists() == (mark == "0")
    discard(folder)
    assert not list(tmp_path.glob("run*"))
    other = command(*words, "--reg", "1e-2", *more)
    assert other.exit_code == 0 if "--overwrite" in more else "already exists" in other.stderr


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_job_continues_its_ingest(tmp_path, monkeypatch):
    table = "a,b,c\n" + "".join(f"{i},{i % 7},{-i}\n" for i in range(400))
    (tmp_path / "t.csv").write_text(table)
    monkeypatch.setattr(ingestion, "CHECKPOINT_BATCHES", 1)

    def ingest(path, overwrite=False, stop=None, y="b"):
        with ProgressLines() as lines:
            if stop:
                monkeypatch.setattr(lines, "ingest", lambda event: event.rows_read and stop())
            section = IngestSection(files=["t.csv"], x=["a"], y=[y], null_values=[])
            return runner._ingest(section, tmp_path, path, overwrite, lines)

    with pytest.raises(KeyboardInterrupt) as stopped:
        ingest(tmp_path / "s", stop=interrupt)
    assert stopped.value.__notes__ == ["what was read is kept: the same again continues"]
    with pytest.raises(DataError, match="had another y") as other:
        ingest(tmp_path / "s", y="c")
    assert "start again with --overwrite" in other.value.for_command
    assert ingest(tmp_path / "s")["rows_resumed"] == 400
    with pytest.raises(KeyboardInterrupt):
        ingest(tmp_path / "s", stop=interrupt, overwrite=True)
    assert ingest(tmp_path / "s", y="c", overwrite=True)["rows_resumed"] == 0
    assert not list(tmp_path.glob(".s*"))


# Signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_signals_say_where_to_continue(rows, tmp_path, monkeypatch, number, code, word):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    folder = tmp_path / "run"
    monkeypatch.setattr(progress.ProgressLines, "fit", lambda *_: os.kill(os.getpid(), number))
    done = command(
        *("fit", rows / "s", *GIVEN, "--out", tmp_path / "m", "--checkpoint", folder),
        *("--scheduler", "synchronous"),
    )
    assert done.exit_code == code, done.output
    assert done.stderr.splitlines()[-1] == (
        f"error: {word}: no output was left half-written; what was computed is in {folder}, the "
        "same call or command continues"
    )
    assert list(tmp_path.iterdir()) == [folder]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_signals_count_while_an_object_is_deleted(rows, tmp_path, monkeypatch, number, code, word):
    """From there Python lets no exception out."""

    class Deleted:
        def __del__(self):
            os.kill(os.getpid(), number)
            for _ in range(1000):  # until the handler runs
                pass

    def fit(*_):
        Deleted()
        time.sleep(300.0)

    hook, begin = sys.unraisablehook, time.monotonic()
    monkeypatch.setattr(progress.ProgressLines, "fit", fit)
    done = command("fit", rows / "s", *GIVEN, "--out", tmp_path / "m", "--scheduler", "synchronous")
    assert done.exit_code == code, done.output
    assert done.stderr.splitlines()[-1] == f"error: {word}: no output was left half-written"
    assert sys.unraisablehook is hook
    assert time.monotonic() - begin < 300.0  # the wait itself is interrupted


EARLY = """
import importlib.abc, os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Presses(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Presses())
module = sys.argv[1:]
sys.argv[1:] = ["fit", "--help"]
runpy.run_module("cme_dask", run_name="__main__") if module[1] == "module" else (
    __import__("cme_dask.__main__", fromlist=["main"]).main())
"""


@pytest.mark.parametrize(
    ("moment", "door"), [("click", "module"), ("click", "script"), ("pydantic", "module")]
)
def test_an_early_interrupt_shows_no_traceback(moment, door):
    early = EARLY.replace("name == sys.argv[1]", f"name == {moment!r}")
    done = subprocess.run(
        [sys.executable, "-c", early, moment, door], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted: no output was left half-written\n"


def test_an_interrupt_while_processes_start_comes_later():
    reached = []

    def starting():
        with processes._later_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # where it would be raised
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            reached.append(signal.SIGINT in blocked)  # what processes inherit

    with pytest.raises(KeyboardInterrupt):
        starting()
    assert reached == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_processes_that_were_starting_end(monkeypatch):
    submit = processes.ProcessPoolExecutor.submit

    def interrupted(pool, function):
        os.kill(os.getpid(), signal.SIGINT)
        return submit(pool, function)

    monkeypatch.setattr(processes.ProcessPoolExecutor, "submit", interrupted)
    before = set(multiprocessing.active_children())  # those of a cluster of other tests
    with pytest.raises(KeyboardInterrupt), processes.WorkerProcesses().started(1):
        raise AssertionError("the interrupt was lost")
    assert not set(multiprocessing.active_children()) - before


# Access is not damage ------------------------------------------------------------------------


@contextlib.contextmanager
def without_rights():
    """As a user who owns nothing, where the tests run as one who may read all."""
    if os.geteuid():
        yield
        return
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_missing_rights_are_no_damage(rows):
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        here.chmod(0o755)
        for name in ("m", "s"):
            os.system(f"cp -r {rows / name} {here / name}; chmod -R a+rX {here / name}")
        array = next(path for path in (here / "m").rglob("c") if path.is_dir())
        chunk = here / "s" / "x" / "c" / "0" / "0"
        cases = [
            (here / "m" / "zarr.json", lambda: cme_dask.load(here / "m")),
            (array, lambda: cme_dask.load(here / "m")),
            (here / "s" / "x" / "zarr.json", lambda: open_sample(here / "s")),
            (chunk, lambda: open_sample(here / "s").sources[0].read(0, 10)),
            (here, lambda: open_sample(here / "s")),
        ]
        for path, read in cases:
            read()
            path.chmod(0)
            with without_rights(), pytest.raises(ResourceError, match="Permission denied") as said:
                read()
            assert "corrupt" not in str(said.value)
            assert "does not exist" not in str(said.value)
            path.chmod(0o755)


def test_kinds_that_can_not_be_read_are_not_replaced(tmp_path):
    assert not Kind("thing", interrupt_not).replaceable(tmp_path / "missing")
    assert demo._KINDS["demo.png"] is atomic.PICTURE


def interrupt_not(path):
    raise OSError(path)
