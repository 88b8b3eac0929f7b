import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import zarr
from click.testing import CliRunner
from conftest import shorten_searches

import cme_dask
from cme_dask import JointDistribution, load
from cme_dask.cli import cli, query
from cme_dask.data.generate import write_normal3
from cme_dask.display import with_error
from cme_dask.errors import DataError
from cme_dask.models.events import Event
from cme_dask.passes import cluster as clusters

EVENT = "y1 <= y2 - 0.2"


def run(*args):
    """In process: exit code, stdout, stderr."""
    result = CliRunner().invoke(cli, [str(a) for a in args], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def spawn(*args, **environment):
    """As a person would, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "cme_dask", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )


def as_json(*args):
    code, out, err = run(*args, "--json")
    assert code == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.fixture(scope="module", autouse=True)
def searches():
    with pytest.MonkeyPatch.context() as patch:
        shorten_searches(patch, rows=300, max_rank=25, evaluations=3)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "s.zarr"
    write_normal3(path, 20_000, chunk_rows=4096)
    return path


@pytest.fixture(scope="module")
def fitted(store):
    path = store.with_name("m.zarr")
    return path, as_json("fit", store, "--out", path, "--event", EVENT, "--event-x", "x > 0.1")


@pytest.fixture(scope="module")
def long_store(tmp_path_factory):
    """Rows that take some time to fit."""
    path = tmp_path_factory.mktemp("long") / "s.zarr"
    write_normal3(path, 4_000_000)
    return path


def assert_refused(code, *args, says):
    """Exit code, one sentence on stderr that says it, nothing on stdout."""
    found, out, err = run(*args)
    assert (found, out) == (code, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(("text", "rows"), [("3_000", 3000), ("3e3", 3000), ("3k", 3000)])
def test_sample_writes_the_rows_asked_for(tmp_path, text, rows):
    made = as_json("sample", tmp_path / "a.zarr", "--rows", text, "--seed", 3, "--scenario", "high")
    write_normal3(tmp_path / "b.zarr", rows, scenario="high", seed=3)
    one, other = (zarr.open_group(str(tmp_path / f"{n}.zarr"), mode="r") for n in "ab")
    np.testing.assert_array_equal(one["y"][...], other["y"][...])
    assert made["rows"] == rows


def test_ingest_counts_and_fits(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,w\n" + "".join(f"{i % 7},{i},1\n" for i in range(50)))
    (tmp_path / "u.csv").write_text("b,a,w\n3,,1\n4,5,1\n")
    out = tmp_path / "s.zarr"
    args = ("ingest", tmp_path / "*.csv", "--out", out, "--x", "a", "--y", "b", "--units", "a=m/s")
    made = as_json(*args)
    assert (made["rows_read"], made["rows_kept"], made["rows_dropped"]) == (52, 51, 1)
    assert made["missing"] == {"a": 1, "b": 0}
    assert made["ranges"] == {"a": [0.0, 6.0], "b": [0.0, 49.0]}
    assert as_json("info", out)["columns"]["x"]["units"] == {"a": "m/s"}
    assert_refused(2, *args, says="already exists")
    _, table, _ = run(*args, "--overwrite")
    assert "rows dropped  1" in table
    assert "a [m/s]" in table


def test_fit_gives_what_python_gives(store, fitted):
    path, result = fitted
    law = JointDistribution().fit(
        store,
        functions={EVENT: Event.parse(EVENT, ("y1", "y2"))},
        functions_x={"x > 0.1": Event.parse("x > 0.1", ("x",))},
    )
    np.testing.assert_array_equal(load(path).coef, law.coef_)
    for name, basis in (("x", law.basis_x_), ("y", law.basis_y_)):
        assert result["variables"][name]["rank"] == basis.rank
        assert result["variables"][name]["trace_error"] == basis.trace_error
    assert result["held_out"] == law.model_.about["held_out"]
    assert (result["rows"], result["passes"]) == (20_000, law.n_passes_)
    assert len(result["tenths"]) == 10
    assert result["kkt_residual"] < 1e-10
    memory = result["memory"]
    assert 50e6 < memory["measured"] < memory["limit"]
    assert memory["predicted"] > 0


def test_fit_takes_every_parameter(store, tmp_path):
    options = "--tol 1e-3 --max-rank 9 --reg 1e-4,1e-5 --constraint none --folds 3 --y y2 --x x"
    where = "--sample-size 1k --scheduler synchronous --memory-limit 4GB"
    code, out, err = run(
        "fit", store, "--out", tmp_path / "m.zarr", *options.split(), *where.split()
    )
    assert code == 0, err
    law = load(tmp_path / "m.zarr")
    assert law.about["reg"] == [1e-4, 1e-5]
    assert (law.about["constraint"], law.about["folds"]) == ("none", 3)
    assert law.function_names[0] == ("y2",)
    assert "20,000 rows" in out
    assert "fitted 20,000 rows" in err


def test_warnings_are_one_line_each(store, tmp_path):
    code, _, err = run("fit", store, "--out", tmp_path / "m.zarr", "--max-rank", 2)
    lines = err.splitlines()
    assert code == 0
    assert [line.startswith("warning: ") for line in lines].count(True) == 2
    assert sum("max_rank=2 was reached" in line for line in lines) == 2


def test_expect_is_bit_equal_to_python(fitted, tmp_path):
    path, _ = fitted
    law = load(path)
    points = np.array([[0.1], [-0.25]])
    (tmp_path / "p.csv").write_text("other,x\n1,-0.25\n")
    found = as_json("expect", path, "--given", "x=0.1", "--points", tmp_path / "p.csv")
    values, std = law.expect(["y1", "y2", EVENT], points, return_std=True)
    np.testing.assert_array_equal(found["values"], values)
    np.testing.assert_array_equal(found["std"], std)
    assert (found["points"], found["functions"]) == (points.tolist(), ["y1", "y2", EVENT])
    back = as_json("expect", path, "--given", "y2=-0.1,y1=0.2", "--reverse", "--no-std")
    np.testing.assert_array_equal(
        back["values"], law.expect(["x", "x > 0.1"], Y=np.array([[0.2, -0.1]]))
    )
    assert back["std"] is None
    _, table, _ = run("expect", path, "--given", "x=0.1", "--of", EVENT)
    assert with_error(values[0, 2], std[0, 2]) in table


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("x\n0.1\nabc\n", "row 3 of p.csv: x must be a finite number, got 'abc'"),
        ("y,x\n,\n", "row 2 of p.csv: x is missing: leave out this point, or"),
        ("x,y\n0.1,\n1e999,\n", "row 3 of p.csv: x must be a finite number, got inf"),
        ("y,z\n1,2\n", "p.csv: lacks column 'x': the model's are 'x'"),
        ("x,x\n1,2\n", "p.csv has 'x' more than once"),
        ("x,y\n1\n", "p.csv is no CSV file of points"),
        ("x\n", "p.csv holds no points"),
        ("", "p.csv: lacks column 'x'"),
    ],
)
def test_a_file_of_points_is_checked(fitted, tmp_path, monkeypatch, content, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.csv").write_text(content)
    assert_refused(2, "expect", fitted[0], "--points", "p.csv", says=says)


def test_many_points_are_read_in_no_time(fitted, tmp_path):
    """A loop over a million rows takes seconds; the columns may stand in any order."""
    points = np.random.default_rng(0).uniform(-0.1, 0.1, size=(10_000, 2))
    body = "\n".join([f"{a!r},{b!r},text" for a, b in points.tolist()] * 100)
    (tmp_path / "p.csv").write_text("\ufeffy2,y1,z\n" + body, encoding="utf-8")
    begin = time.process_time()
    found = query.read_points(tmp_path / "p.csv", ("y1", "y2"))
    assert time.process_time() - begin < 1.0
    np.testing.assert_array_equal(found, np.tile(points[:, ::-1], (100, 1)))


@pytest.mark.parametrize("bound", ["nan", "inf", "-Infinity", "1e999", "y2 + 1e999"])
def test_an_event_needs_a_finite_bound(bound):
    with pytest.raises(DataError, match="the bound must be finite"):
        Event.parse(f"y1 > {bound}", ("y1", "y2"))


@pytest.mark.parametrize("seed", [-1, 2**63, 10**23])
def test_seeds_have_a_range(tmp_path, seed):
    new = tmp_path / "s.zarr"
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n")
    assert_refused(2, "sample", new, "--rows", 9, "--seed", seed, says="'--seed'")
    ingest = ("ingest", tmp_path / "t.csv", "--out", new, "--x", "a", "--y", "b")
    assert_refused(2, *ingest, "--seed", seed, says="'--seed'")
    assert not new.exists()


def test_too_little_memory_names_every_remedy(monkeypatch, tmp_path):
    def exhausted(*_, **__):
        raise MemoryError

    monkeypatch.setattr("cme_dask.data.generate.write_normal3", exhausted)
    says = "is used up: smaller chunks, lower ranks or fewer workers need less"
    assert_refused(3, "sample", tmp_path / "s.zarr", "--rows", 9, says=says)


def test_info_tells_what_is_there(store, fitted):
    path, _ = fitted
    about = as_json("info", store)
    assert (about["rows"], about["chunks"], about["chunk_rows"]) == (20_000, 5, 4096)
    assert 400_000 < about["bytes"] < 2_000_000
    assert "20,000 in 5 chunks of 4,096" in run("info", store)[1]
    law = as_json("info", path)
    assert law["functions"] == {"x": ["y1", "y2", EVENT], "y": ["x", "x > 0.1"]}
    assert "skill" in run("info", path)[1]


def test_wrong_uses_end_with_2(store, fitted, tmp_path):
    new, (model, _) = tmp_path / "m.zarr", fitted
    fit = ("fit", store, "--out", new)
    assert_refused(2, *fit, "--x", "nix", says="unknown column 'nix'")
    assert_refused(2, *fit, "--event", "z > 1", says="unknown column 'z'")
    assert_refused(2, *fit, "--event", "nonsense", says="COLUMN")
    assert_refused(2, *fit, "--tol", 2, says="tol: must be less than 1, got 2.0")
    assert_refused(2, *fit, "--reg", "a", says="neither a number nor a pair")
    assert_refused(2, *fit, "--scheduler", "nix", says="scheduler must be")
    assert_refused(2, *fit, "--memory-limit", "nix", says="--memory-limit must be bytes")
    assert_refused(2, *fit, "--nix", says="cme fit --help")
    assert_refused(2, "fit", store, "--out", model, says="already exists")
    assert_refused(2, "fit", tmp_path / "nix.zarr", "--out", new, says="does not exist")
    assert_refused(2, "fit", model, "--out", new, says="'sample' was expected")
    assert_refused(2, "fti", says="'fit'")
    assert_refused(2, "sample", new, "--rows", "1.5", says="whole number")
    assert_refused(2, "sample", "s3://a/b", "--rows", 9, says="outputs are local paths")
    assert_refused(2, "info", tmp_path / "nix.zarr", says="does not exist")
    assert_refused(2, "expect", model, says="at least one point")
    assert_refused(2, "expect", model, "--given", "x=a", says="must be a finite number, got 'a'")
    assert_refused(2, "expect", model, "--given", "z=1", says="unknown column 'z'")
    assert_refused(2, "expect", model, "--given", "x=1", "--of", "nix", says="'nix'")
    assert_refused(2, "expect", model, "--points", tmp_path / "nix.csv", says="can't be read")
    assert not list(tmp_path.iterdir())


def test_a_store_that_was_never_finished_is_refused(store, tmp_path):
    shutil.copytree(store, tmp_path / "s.zarr")
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="r+")
    del group.attrs["cme_dask"]
    for args in (
        ("fit", tmp_path / "s.zarr", "--out", tmp_path / "m.zarr"),
        ("info", group.store.root),
    ):
        assert_refused(2, *args, says="no finished sample")


def test_an_environment_that_does_not_suffice_ends_with_3(store, tmp_path, monkeypatch):
    fit = ("fit", store, "--out", tmp_path / "m.zarr")
    assert_refused(3, *fit, "--memory-limit", "10MB", says="the limit is 9.54 MiB")
    monkeypatch.setattr(clusters, "_CONNECT_SECONDS", 1)
    assert_refused(3, *fit, "--scheduler", "tcp://127.0.0.1:1", says="no scheduler answers")
    assert not list(tmp_path.iterdir())


def test_processes_end_with_codes_and_separate_streams(store, tmp_path):
    fit = ("fit", store, "--out", tmp_path / "m.zarr", "--kernel", "median", "--tol", "0.1")
    done = spawn(*fit, "--json", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 20_000
    assert "fitted 20,000 rows" in done.stderr
    refused = spawn("info", tmp_path / "nix")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    told = spawn("info", tmp_path / "nix", CME_DASK_TRACEBACK="1")
    assert told.returncode == 2
    assert "Traceback" in told.stderr


def test_dask_cme_is_the_same_command(tmp_path):
    dask = [sys.executable, "-m", "dask", "cme"]
    shown = subprocess.run([*dask, "--help"], capture_output=True, text=True, timeout=600)
    assert shown.returncode == 0
    for command in ("sample", "ingest", "fit", "expect", "info", "run", "demo"):
        assert f"\n  {command} " in shown.stdout
    refused = subprocess.run(
        [*dask, "info", tmp_path / "nix"], capture_output=True, text=True, timeout=600
    )
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in refused.stderr


def test_queries_need_neither_dask_nor_sklearn(fitted):
    path, _ = fitted
    code = (
        "import sys\nfrom cme_dask.cli import cli\n"
        f"cli({['info', str(path)]!r}, standalone_mode=False)\n"
        f"cli({['expect', str(path), '--given', 'x=0.1']!r}, standalone_mode=False)\n"
        "heavy = {'dask', 'distributed', 'sklearn', 'matplotlib', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600, stdout=subprocess.PIPE)


@pytest.mark.parametrize("name", [None, *cli.commands])
@pytest.mark.parametrize("width", [40, 200])
def test_examples_keep_their_lines(name, width):
    """At any width of the terminal."""
    command = cli.commands[name] if name else cli
    args = [name, "--help"] if name else ["--help"]
    out = CliRunner().invoke(cli, args, terminal_width=width).stdout
    examples = [line for line in command.epilog.splitlines() if "cme-dask" in line]
    assert examples
    for line in examples:
        assert f"\n  {line}\n" in out


def test_the_commands_import_no_dask_themselves():
    """Only ``passes`` and the estimators know it."""
    package = Path(cme_dask.__file__).parent
    files = [*package.glob("cli/*.py")]
    assert len(files) > 10
    for file in files:
        found = re.findall(r"^\s*(?:from|import) (?:dask|distributed)\b", file.read_text(), re.M)
        assert not found, file


def test_help_is_light():
    code = (
        "import sys\nfrom cme_dask.cli import cli\ncli(['--help'], standalone_mode=False)\n"
        "heavy = {'numpy', 'rich', 'pydantic', 'dask'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, text=True, stdout=-1)
    assert "Examples:" in done.stdout
    assert run("--version")[1].startswith("cme-dask, version ")


def interrupt(args, ready, command=("cme_dask",)):
    """Press Ctrl-C in a terminal that runs the command, once ``ready`` returns for its process."""
    with subprocess.Popen(
        [sys.executable, "-m", *command, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has them ignore SIGINT; a terminal doesn't.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            ready(process)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal: to every process of the group
            out, err = process.communicate(timeout=600)  # of a command that does not end
        finally:
            process.kill()
    assert (process.returncode, out) == (130, ""), err
    # Lines of progress come first where the command has run for long.
    assert err.splitlines()[-1] == "error: interrupted: no output was left half-written"
    assert "Traceback" not in err


@pytest.mark.parametrize("command", [("cme_dask",), ("dask", "cme")])
def test_interrupting_leaves_nothing_half_written(tmp_path, command):
    def half_written(process):
        while not list(tmp_path.glob(".s.zarr.*.partial/output/x/c/*")):
            assert process.poll() is None
            time.sleep(0.05)

    interrupt(("sample", tmp_path / "s.zarr", "--rows", "1e8"), half_written, command)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "scheduler", ["threads", pytest.param("processes", marks=pytest.mark.slow)]
)
def test_interrupting_a_fit(long_store, tmp_path, scheduler):
    out, log = tmp_path / "out", tmp_path / "log"
    out.mkdir()
    fit = ("fit", long_store, "--out", out / "m.zarr", "--kernel", "median", "--tol", "1e-12")
    fit += ("--sample-size", 4096, "--log", log, "--scheduler", scheduler)

    def computing(process):
        """Its processes have started, and have computed for some seconds."""
        seconds, workers = 0.0, 0
        while not log.exists() or seconds < 3.0 or workers < 2 * (scheduler == "processes"):
            assert process.poll() is None
            time.sleep(0.05)
            this = psutil.Process(process.pid)
            family = [this, *this.children(recursive=True)]
            seconds = 0.0
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    seconds += sum(one.cpu_times()[:2])
            workers = len(family) - 1

    interrupt(fit, computing)
    assert not list(out.iterdir())


def test_a_cluster_gives_the_same_bits(store, fitted, local_cluster, tmp_path, monkeypatch):
    """Also where its workers are in another folder."""
    cluster = local_cluster.scheduler_address
    monkeypatch.chdir(store.parent)
    as_json(
        *("fit", store.name, "--out", tmp_path / "m.zarr"),
        *("--event", EVENT, "--event-x", "x > 0.1", "--scheduler", cluster),
    )
    one, other = load(fitted[0]), load(tmp_path / "m.zarr")
    np.testing.assert_array_equal(one.coef, other.coef)
    np.testing.assert_array_equal(one.x.answers.fold_slope, other.x.answers.fold_slope)
    assert_refused(
        *(2, "fit", store, "--out", tmp_path / "n.zarr", "--scheduler", cluster, "--workers", 2),
        says="workers is for local schedulers",
    )
