import json
import shutil

import pytest
from click.testing import CliRunner

from cme_dask import load
from cme_dask.cli import cli
from cme_dask.jobs import demo
from cme_dask.report import plots
from cme_dask.storage.generate import write_normal3


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
    assert (out / "demo.png").stat().st_size > 20_000
    assert load(out / "model.zarr").about["rows"] == 20_000

    code, stdout, err = run("--rows", "20k", "--out", out, "--picture", tmp_path / "p.png")
    assert code == 0, err
    assert "reusing" in err
    assert (tmp_path / "p.png").exists()
    for text in ("rows/s", "peak memory", "PSS", "truth", "y1 <= y2 - 0.5", "cme-dask expect"):
        assert text in stdout


def test_another_sample_is_not_reused(tmp_path):
    out = tmp_path / "demo"
    out.mkdir()
    write_normal3(out / "normal3.zarr", 5000, scenario="strong")
    code, _, err = run("--rows", 5000, "--out", out)
    assert code == 0
    assert "generated 5,000 rows" in err


def test_a_short_disk_means_fewer_rows(tmp_path, monkeypatch):
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
def test_without_matplotlib(tmp_path, monkeypatch, wanted):
    monkeypatch.setattr(plots, "available", lambda: False)
    picture = ("--picture", tmp_path / "p.png") if wanted else ()
    code, _, err = run("--rows", 5000, "--out", tmp_path / "demo", *picture)
    assert code == (3 if wanted else 0)
    assert "install cme-dask[plot]" in err
