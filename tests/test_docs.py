"""Every command and every Python block of the README and the docs is run."""

import contextlib
import gzip
import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import BRIEF, forked_workers, shorten_searches

from benchmarks import CASE_NAMES
from benchmarks.__main__ import cli as beside
from cme_dask import ClusterRates
from cme_dask.cli import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(console|python|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

BRIEFER = {"rows": 300, "max_rank": 25, "evaluations": 3}
"""Searches that end sooner still: that they end well is tested elsewhere."""

BRIEF_TOML = ", ".join(f"{k}={v}" for k, v in (BRIEF | BRIEFER | {"trees": []}).items()).join("{}")

OF_JOBS = [
    "--set", f"fit.tuning={BRIEF_TOML}",
    "--set", "fit.max_rank=50",
    "--set", "evaluate.boosting_rows=400",
]  # fmt: skip

CUT = {
    "pipelines/air_quality.toml": OF_JOBS,
    "job.toml": [*OF_JOBS, "--set", "evaluate.boosting=false"],
    "pipelines/pendulum.toml": ["--set", "fit.max_rank=25", "--set", "fit.folds=2"],
    "compare": ["--methods", "normal", "--splits", "1", "--rows", "300", "--threads", "1"],
    "plan": ["--rates", "rates.json", "--max-rank", "30", "--rows", "1e8", "--workers", "20"],
    "sample": ["--rows", "6e3"],
    "--seeds": ["--seeds", "1"],
    "tune": ["--rows", "300", "--evaluations", "3", "--averaged", "1", "--max-rank", "25"],
    "sparse": ["--max-rank", "10"],
    "multiclass": ["--max-rank", "40", "--max-iter", "20"],
}  # fmt: skip
"""What is added to commands that ask for much, by one of their words."""

FEWER = {
    "200_000": "20_000",
    "100_000": "20_000",
    "workers=200, rows=1e10": "workers=20, rows=1e8",
    "Regressor(max_iter=30)": "Regressor(max_iter=5)",
}
"""Sizes in Python blocks, which run as they stand otherwise."""

PORT = "8786"
"""The port of a scheduler in the docs, Dask's own; tests take a free one."""

RATES = {
    **{"submit_seconds": 5e-4, "task_seconds": 3e-4, "task_seconds_per_worker": 2e-6},
    **{"client_seconds": 1e-4, "worker_seconds": 2e-3, "latency": 2e-3, "bandwidth": 1e9},
}
"""Rates of a cluster, which would be measured for a plan."""

BESIDE = ("python3 run bench", "python3 run study")
"""Commands of the benchmarks, which run in this process as those of the package do."""


@pytest.fixture
def folder(tmp_path):
    """A user's folder: the project's pipelines, and small files of weather stations."""
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    (tmp_path / "stations").mkdir()
    (tmp_path / "rates.json").write_text(json.dumps(RATES))
    rng = np.random.default_rng(0)
    for station in ("Dongsi", "Dingling", "Gucheng"):
        n = 1900
        date = np.datetime64("2013-03-01T00") + np.arange(n) * np.timedelta64(1, "h")
        day = date.astype("datetime64[D]")
        month = day.astype("datetime64[M]")
        year = day.astype("datetime64[Y]")
        temp = 14 + 11 * rng.standard_normal(n)
        dewp = temp - 12 + 6 * rng.standard_normal(n)
        pm = np.exp(4 + 0.5 * rng.standard_normal(n) + 0.03 * dewp)
        columns = {
            "year": year.astype(int) + 1970,
            "month": (month - year).astype(int) + 1,
            "day": (day - month).astype(int) + 1,
            "hour": np.arange(n) % 24,
            "TEMP": temp.round(2),
            "DEWP": dewp.round(2),
            "PRES": (1011 + 10 * rng.standard_normal(n)).round(2),
            "RAIN": rng.exponential(0.1, n).round(2),
            "WSPM": rng.exponential(1.7, n).round(2),
            "wd": rng.choice(["NE", "NW", "ENE", "SSW", "SW"], n),
            "station": np.full(n, station),
            "PM2.5": pm.round(2),
            "PM10": (pm * np.exp(0.3 + 0.2 * rng.standard_normal(n))).round(2),
        }
        rows = zip(*(values.tolist() for values in columns.values()), strict=True)
        text = ",".join(columns) + "\n" + "\n".join(",".join(map(str, row)) for row in rows) + "\n"
        path = tmp_path / "stations" / f"PRSA_Data_{station}_20130301-20170228.csv.gz"
        path.write_bytes(gzip.compress(text.encode()))
    return tmp_path


def commands(block):
    """Commands of a console block, without prompts and comments."""
    lines = [line[2:].split("  #")[0].strip() for line in block.splitlines() if line[:2] == "$ "]
    # One runs this test, the other needs a network: see the test of the installation below.
    ours = ("test", "demo", "slow", "docs", "notebooks")
    skipped = (*(f"python3 run {name}" for name in ours), "pip install")
    return [line for line in lines if not line.startswith(skipped)]


def words(line):
    """Words of a plain command of the project as the shell makes them, None of any other line."""
    line = line.removeprefix("python3 run ") if line.startswith(BESIDE) else line
    tokens = shlex.shlex(line, posix=True, punctuation_chars=True)
    tokens.whitespace_split = True
    name, *rest = tokens
    ours = name in ("cme-dask", "bench", "study")
    if not ours or any(set(word) <= set("();<>|&") for word in rest):
        return None
    split = ["bash", "-c", f"printf '%s\\0' {line}"]
    done = subprocess.run(split, check=True, capture_output=True, text=True)
    found = done.stdout.split("\0")[:-1]
    return found[1:] if name == "cme-dask" else found


def run_line(line):
    """Exit code and output; commands of this package in this process, to start no other."""
    if (args := words(line)) is None:
        done = subprocess.run(
            ["bash", "-c", line], env=scripts(), stderr=subprocess.STDOUT, stdout=-1, text=True
        )
        return done.returncode, done.stdout
    assert "sample" not in args or "--rows" in args  # which is cut, but must be given
    args += [more for word in args for more in CUT.get(word, [])]
    commands = beside if line.startswith(BESIDE) else cli
    done = CliRunner().invoke(commands, args, catch_exceptions=False)
    return done.exit_code, done.output


def scripts():
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.filterwarnings("default")  # as for a user
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_page(page, folder, quick_studies, monkeypatch):
    """As it stands, but for searches and studies, which are cut short, rates, and the port."""
    monkeypatch.chdir(folder)
    shorten_searches(monkeypatch, **BRIEFER)
    if page.name == "jobs.md":  # whose jobs would draw what the one of the README draws
        monkeypatch.setattr("cme_dask.models.plots.available", lambda: False)
    measured = ClusterRates.from_dict(RATES)
    monkeypatch.setattr(ClusterRates, "measure", lambda *_, **__: measured)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for kind, block in BLOCK.findall(page.read_text().replace(f":{PORT}", f":{port}")):
        block = block.replace(f"--port {PORT}", f"--port {port}")
        if kind == "toml":  # of the page on jobs
            (folder / "job.toml").write_text(block)
            continue
        if kind == "python":
            for large, small in FEWER.items():
                block = block.replace(large, small)
            (folder / "block.py").write_text(block)
            # JAX, on which optax stands, has threads, and other tests fork.
            if "import jax" in block or "import optax" in block:
                subprocess.run([sys.executable, "block.py"], check=True)
                continue
            # Its worker processes would import for seconds.
            with forked_workers() if "LocalCluster" in block else contextlib.nullcontext():
                runpy.run_path(str(folder / "block.py"), run_name="__main__")
            continue
        for line in commands(block):
            code, output = run_line(line)
            assert code == 0, f"{line}\n{output}"


def test_lines_are_run_as_by_a_shell(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert words('cme-dask fit "a b" --event "y1 <= y2" x.*') == [
        *("fit", "a b", "--event", "y1 <= y2", "x.*")
    ]
    found = words("cme-dask ingest stations/*Dong*.gz --set rows=[1]")
    assert found[1] == "stations/PRSA_Data_Dongsi_20130301-20170228.csv.gz"
    assert words("cme-dask info s.zarr > out") is words("dask scheduler") is None
    assert run_line("cme-dask info nix.zarr")[0] == 2
    assert run_line("false")[0] == 1
    code, output = run_line("cme-dask --version | cat")  # as it was installed
    assert (code, output.startswith("cme-dask, version ")) == (0, True)


def anchors(path):
    """Names by which links reach the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            target, _, anchor = link.partition("#")
            if "://" not in link:
                path = page.parent / target if target else page
                assert path.exists(), f"{page.name}: {link}"
                assert not anchor or anchor in anchors(path), f"{page.name}: {link}"


def test_sizes_that_are_cut_occur_in_a_page():
    text = "".join(page.read_text() for page in PAGES)
    assert [size for size in FEWER if size not in text] == []


def test_commands_within_sentences_can_be_parsed():
    """Those of benchmarks take hours: their cases and options are checked without a run."""
    lines = [
        line
        for page in PAGES
        for line in re.findall(
            r"`(python3 run (?:bench|study)[^`…]*|cme-dask [^`…]*)`", page.read_text()
        )
    ]
    assert len(lines) > 20
    for line in lines:
        name, *rest = shlex.split(line.removeprefix("python3 run ").removeprefix("cme-dask "))
        command = (beside if line.startswith(BESIDE) else cli).commands[name]
        known = {option for each in command.params for option in each.opts}
        assert {word for word in rest if word.startswith("--")} - {"--help"} <= known, line
        if name == "bench" and "--case" in rest:
            assert rest[rest.index("--case") + 1] in CASE_NAMES, line


def test_readme_names_both_commands():
    text = (ROOT / "README.md").read_text()
    assert "$ python3 run demo" in text
    assert "$ python3 run test" in text


def test_readme_installs_this_project_with_extras_that_it_has():
    """What pip is given: the project's own repository or folder, and names of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Changelog"].partition("/blob/")[0]
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^\$ pip install (.*?)(?:  #.*)?$", text, re.MULTILINE)
    assert len(lines) == 2
    extras = ",".join(sorted(project["optional-dependencies"].keys() & {"plot", "xarray"}))
    assert shlex.split(lines[0]) == [f"{project['name']}[{extras}] @ git+{repository}"]
    assert shlex.split(lines[1]) == [f".[{extras}]"]
    assert text.index("$ pip install") < text.index("$ python3 run demo")
    for extra in re.findall(r"`([a-z]+)` adds", text):
        assert extra in project["optional-dependencies"]


def test_readme_begins_with_a_table_and_the_default():
    """The first Python block: DataFrames in, no arguments, labelled answers out."""
    blocks = [b for kind, b in BLOCK.findall((ROOT / "README.md").read_text()) if kind == "python"]
    assert "pd.DataFrame" in blocks[0]
    assert "JointDistribution().fit(X, Y)" in blocks[0]
    space = {}
    exec(blocks[0], space)
    given = space["given"]
    assert given.mean().index.tolist() == [0, 1]
    assert given.mean().name == "load"
    mean, above = given.mean().to_numpy(), given.probability("load > 60").to_numpy()
    np.testing.assert_allclose(mean, [75, 42], atol=2)  # what the text below it says
    assert above[0] > 0.95
    assert above[1] < 0.01
