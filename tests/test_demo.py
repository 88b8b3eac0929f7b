import errno
import io
import json
import shutil
from collections import Counter

import pytest
from click.testing import CliRunner
from rich.console import Console
from zarr.storage import LocalStore

from cme_dask import load
from cme_dask.cli import cli, demo, plots, tables
from cme_dask.data.generate import write_normal3
from cme_dask.models import plots as drawing


def run(*args):
    result = CliRunner().invoke(cli, ["demo", *map(str, args)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_the_demo_finds_the_truth_and_reuses_its_store(tmp_path):
    out = tmp_path / "demo"
    code, stdout, err = run("--rows", "20k", "--out", out, "--json")
    assert code == 0, err
    assert "generated 20,000 rows" in err
    result = json.loads(stdout)
    misses = [
        abs(v["value"] - v["truth"]) / max(v["std"], 1e-3)
        for point in result["points"]
        if abs(point["x"]) < 0.3
        for v in point["functions"].values()
    ]
    assert sum(misses) / len(misses) < 2.0
    gaps = [
        abs(found - truth)
        for point in result["points"]
        for found, truth in zip(point["quantiles"], point["true_quantiles"], strict=True)
    ]
    # In a standard deviation of 0.2; the true ones are those of the normal law.
    assert max(gaps) < 0.1
    assert sum(gaps) / len(gaps) < 0.02
    middle = result["points"][3]
    assert middle["x"] == 0.0
    spread = 0.2 * (1 - 0.3**2) ** 0.5
    wanted = [-1.6448536 * spread, 0.0, 1.6448536 * spread]
    assert middle["true_quantiles"] == pytest.approx(wanted, abs=1e-7)
    assert (out / "demo.png").stat().st_size > 20_000
    assert load(out / "model.zarr").about["rows"] == 20_000

    code, stdout, err = run("--rows", "20k", "--out", out, "--picture", tmp_path / "p.png")
    assert code == 0, err
    assert "reusing" in err
    assert (tmp_path / "p.png").exists()
    for text in (
        "rows/s",
        "peak memory",
        "PSS",
        "truth",
        "y1 <= y2 - 0.5",
        "Quantiles of y1",
        "predict",
    ):
        assert text in stdout


@pytest.mark.parametrize("command", ["cme-dask", "python3 run exec -- cme-dask"])
def test_suggested_commands_begin_as_the_caller_runs_them(monkeypatch, command):
    monkeypatch.delenv("CME_DASK_COMMAND", raising=False)
    if command != "cme-dask":
        monkeypatch.setenv("CME_DASK_COMMAND", command)
    monkeypatch.setattr(tables, "fit_tables", lambda _: ())
    point = {"x": 0.0, "quantiles": [0.0] * 3, "true_quantiles": [0.0] * 3}
    value = {"value": 0.0, "std": 0.1, "truth": 0.0}
    functions = dict.fromkeys(("y1", "y2", "y1 <= y2"), value)
    result = {
        "fit": {"model": "m.zarr"},
        "points": [{**point, "functions": functions}],
        "picture": None,
        "seconds": 1.0,
    }
    *_, done = demo.demo_tables(result)
    console = Console(width=200, file=io.StringIO())
    console.print(done)
    assert f"try next  {command} info m.zarr" in console.file.getvalue()
    assert console.file.getvalue().count(f"{command} ") == 4


@pytest.fixture
def no_picture(monkeypatch):
    """For tests of something else: to draw one takes longer than all that comes before it."""
    monkeypatch.setattr(drawing, "available", lambda: False)


@pytest.fixture
def reads(monkeypatch):
    """How often each key of a finished store was read, by this process."""
    counts = Counter()
    get = LocalStore.get

    async def counting(self, key, *args, **kwargs):
        if self.root.name == "normal3.zarr":
            counts[key] += 1
        return await get(self, key, *args, **kwargs)

    monkeypatch.setattr(LocalStore, "get", counting)
    return counts


def test_every_chunk_is_read_once(tmp_path, reads, brief_search):
    """Also where the demo has to recognise the store of an earlier one."""
    out = tmp_path / "demo"
    for said in ("generated", "reusing"):
        reads.clear()
        code, _, err = run("--rows", 140_000, "--out", out, "--workers", 2)
        assert (code, said in err) == (0, True), err
        folder = out / "normal3.zarr"
        chunks = [p for p in folder.rglob("*") if p.is_file() and p.name != "zarr.json"]
        keys = {str(p.relative_to(folder)) for p in chunks}
        assert sum(key.startswith("x/") for key in keys) > 10
        assert sum(key.startswith("row_sample/") for key in keys) >= 4
        assert {key: reads[key] for key in keys} == dict.fromkeys(keys, 1)


@pytest.mark.parametrize(
    "other", [{"rows": 5000, "scenario": "strong"}, {"rows": 5000, "seed": 1}, {"rows": 5001}]
)
def test_another_sample_is_not_reused(tmp_path, other, brief_search, no_picture):
    out = tmp_path / "demo"
    out.mkdir()
    write_normal3(out / "normal3.zarr", **other)
    code, _, err = run("--rows", 5000, "--out", out)
    assert code == 0
    assert "generated 5,000 rows" in err


def test_a_short_disk_means_fewer_rows(tmp_path, monkeypatch, brief_search, no_picture):
    free = shutil.disk_usage(tmp_path)._replace(free=150_000)
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: free)
    code, stdout, err = run("--rows", "1e6", "--out", tmp_path / "demo", "--json")
    assert code == 0
    assert "room for 4,000 rows only" in err
    assert json.loads(stdout)["fit"]["rows"] == 4000
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: free._replace(free=100))
    code, _, err = run("--rows", "1e6", "--out", tmp_path / "other")
    assert (code, err.count("\n")) == (3, 1)


@pytest.mark.parametrize("wanted", [True, False])
def test_without_matplotlib(tmp_path, monkeypatch, wanted, brief_search):
    monkeypatch.setattr(drawing, "available", lambda: False)
    picture = ("--picture", tmp_path / "p.png") if wanted else ()
    code, _, err = run("--rows", 5000, "--out", tmp_path / "demo", *picture)
    assert code == (3 if wanted else 0)
    assert "install cme-dask[plot]" in err


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch, brief_search):
    def fill_the_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plots, "demo_picture", fill_the_disk)
    out = tmp_path / "demo"
    code, _, err = run("--rows", 5000, "--out", out)
    assert code == 3
    assert err.splitlines()[-1].startswith(f"error: the disk is full while writing {out}/demo.png")


def test_the_picture_of_an_earlier_demo_does_not_stay(tmp_path, monkeypatch, brief_search):
    with drawing.picture(tmp_path / "demo.png", 1, 1):
        pass
    monkeypatch.setattr(drawing, "available", lambda: False)
    write_normal3(tmp_path / "normal3.zarr", 5000, scenario="medium", seed=0)
    assert run("--rows", 5000, "--out", tmp_path)[0] == 0
    assert not (tmp_path / "demo.png").exists()
