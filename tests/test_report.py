"""What a run tells of itself: the report's folder, logs, lines for those who don't watch."""

import csv
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import write_store
from distributed import Client

from cme_dask import PivotedCholesky, kernels
from cme_dask.cli import cli, progress, run_report
from cme_dask.cli.progress import LOGGER, logging_to
from cme_dask.cli.run_report import FILES, MemoryTimeline, PeakMemory, reporting
from cme_dask.display import duration
from cme_dask.errors import DataError, ResourceError
from cme_dask.models import plots as drawing
from cme_dask.passes.cluster import described_workers
from cme_dask.passes.progress import pass_event
from cme_dask.passes.sources import open_sample


def command(*args):
    result = CliRunner().invoke(cli, list(map(str, args)), catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.random((20_000, 2))
    return write_store(tmp_path_factory.mktemp("report") / "s.zarr", x, x[:, :1], chunk_rows=4096)


def fitted(store, scheduler=None):
    estimator = PivotedCholesky(kernels.Gaussian(0.5), tol=1e-2)
    return estimator.fit(open_sample(store), scheduler=scheduler)


def test_a_report_of_threads(store, tmp_path):
    folder = tmp_path / "report"
    args = ("features", store, "--out", tmp_path / "f.model", "--report", folder)
    code, _, err = command(*args)
    assert code == 0, err
    assert {path.name for path in folder.iterdir()} == set(FILES) - {"dask.html"}
    result = json.loads((folder / "report.json").read_text())
    (one,) = result["passes"]
    assert (one["pass"], one["rows"]) == ("strip-moments", 20_000)
    assert one["rows_per_second"] == pytest.approx(one["rows"] / one["seconds"])
    assert 0 < one["seconds"] < result["seconds"]
    assert result["cluster"] is None
    with (folder / "memory.csv").open() as file:
        samples = list(csv.DictReader(file))
    mine = [int(s["bytes"]) for s in samples if s["process"] == "this process"]
    assert max(mine) == result["memory"]["peaks"]["this process"] > 50e6
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events if "pass" in e["event"]] == ["pass started", "pass ended"]
    assert (folder / "memory.png").stat().st_size > 5_000
    assert not list(tmp_path.glob(".*"))


def test_a_report_of_a_cluster(store, tmp_path, cluster):
    folder = tmp_path / "report"
    with reporting(folder, cluster):
        fitted(store, cluster)
    result = json.loads((folder / "report.json").read_text())
    workers = set(cluster.scheduler_info(n_workers=-1)["workers"])
    assert set(result["memory"]["peaks"]) == workers | {"this process"}
    assert (result["cluster"]["spilled"], result["cluster"]["pauses"]) == (0, 0)
    told = result["cluster"]["tasks"]["strip-moments"]
    assert told["tasks"] == result["passes"][0]["tasks"]
    assert told["compute"] > 0
    bokeh = (folder / "dask.html").exists()
    assert bokeh != any("bokeh" in why for why in result["missing"])


def test_a_lost_scheduler_is_an_error_that_measuring_does_not_hide(local_cluster, tmp_path):
    def lose(measuring):
        with Client(local_cluster, set_as_default=False) as client, measuring(client):
            assert len(described_workers(client)) > 0
            client.close()
            described_workers(client)

    for measuring in (PeakMemory, lambda client: reporting(tmp_path / "report", client)):
        with pytest.raises(ResourceError, match="was lost, and with it the run"):
            lose(measuring)
    assert not list(tmp_path.iterdir())


def test_a_report_is_whole_or_not_there(store, tmp_path, monkeypatch):
    folder = tmp_path / "report"
    with pytest.raises(ZeroDivisionError), reporting(folder, None):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with reporting(folder, None):
        fitted(store)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DataError, match="already exists"), reporting(folder, None):
        pass
    with pytest.raises(ZeroDivisionError), reporting(folder, None, overwrite=True):
        raise ZeroDivisionError
    full = OSError(28, "No space left on device")

    def fails(*_):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(run_report, "memory_picture", fails)
        with (
            pytest.raises(ResourceError, match="disk is full"),
            reporting(folder, None, overwrite=True),
        ):
            pass
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with reporting(folder, None, overwrite=True):
        pass
    assert json.loads((folder / "report.json").read_text())["passes"] == []
    assert list(tmp_path.iterdir()) == [folder]
    (folder / "mine.txt").write_text("dear")
    with (
        pytest.raises(DataError, match="cme_dask did not"),
        reporting(folder, None, overwrite=True),
    ):
        pass
    assert (folder / "mine.txt").read_text() == "dear"


def test_without_matplotlib_and_bokeh_the_rest_is_told(store, tmp_path, monkeypatch, cluster):
    monkeypatch.setattr(drawing, "available", lambda: False)
    monkeypatch.setattr("cme_dask.passes.observing._has_bokeh", lambda: False)
    with reporting(tmp_path / "report", cluster):
        fitted(store, cluster)
    result = json.loads((tmp_path / "report" / "report.json").read_text())
    assert ["matplotlib" in why or "bokeh" in why for why in result["missing"]] == [True, True]
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {"report.json", "memory.csv", "events.jsonl"}


def test_logs_are_lines_of_json_with_times_in_utc(store, tmp_path):
    path, before = tmp_path / "log.jsonl", (list(LOGGER.handlers), LOGGER.level)
    args = ("features", store, "--log", path, "--out")
    assert command(*args, tmp_path / "f.model")[0] == 0
    assert command(*args, tmp_path / "f.model")[0] == 2
    records = [json.loads(line) for line in path.read_text().splitlines()]
    events = [record["event"] for record in records]
    assert events[0] == "started"
    assert {"pivots", "pass started", "pass ended"} < set(events)
    assert events[-3:] == ["ended", "started", "failed"]
    assert "already exists" in records[-1]["message"]
    assert all(record["time"][-1] == "Z" for record in records)
    times = [record["time"] for record in records]
    assert times == sorted(times)
    (ended,) = (record for record in records if record["event"] == "pass ended")
    assert ended["rows"] == 20_000
    assert (LOGGER.handlers, LOGGER.level) == before
    code, _, err = command(*args[:2], "--log", tmp_path / "no" / "log", "--out", tmp_path / "g")
    assert code == 3
    assert "can't be written" in err


def test_values_that_json_does_not_know_are_texts(tmp_path):
    with logging_to(tmp_path / "log"):
        LOGGER.info("a", extra={"event": "b", "c": np.float64(1.5), "d": tmp_path})
    record = json.loads((tmp_path / "log").read_text().splitlines()[1])
    assert (record["event"], record["c"], record["d"]) == ("b", 1.5, str(tmp_path))


def event(rows, seconds):
    return pass_event("strip-moments", rows, 1000, seconds)


def test_who_does_not_watch_gets_a_line_now_and_then(capsys, monkeypatch):
    clock = iter(range(0, 1000, 10))
    # Of this module alone: other threads, such as those of a cluster, read the clock as well.
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress.ProgressLines(every=30.0) as lines:  # at 0 s, to speak at 30 s
        for rows in (100, 200, 300, 400, 500, 600):  # at 10, 20, ... s
            lines.fit(event(rows, 1.0))
    assert capsys.readouterr().err.splitlines() == [
        "pass 30 %, 300 of 1,000 rows, 300 rows/s, 70 s left",
        "pass 60 %, 600 of 1,000 rows, 600 rows/s, 40 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.2, "1 s"), (99, "99 s"), (100, "2 min"), (5900, "98 min"), (9e3, "2.5 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_timeline_keeps_few_samples_of_long_runs(monkeypatch):
    monkeypatch.setattr("cme_dask.cli.run_report._MOST", 10)
    counter = iter(range(10**6))
    timeline = MemoryTimeline(lambda: {"a": next(counter)})
    for _ in range(100):
        timeline._sample()
    times, values = timeline.processes["a"]
    assert 5 <= len(times) == len(values) <= 10
    assert times == sorted(times)
    assert values[-1] == 99 == timeline.peaks["a"]


def test_a_log_needs_no_dask(tmp_path):
    code = (
        "import sys; from pathlib import Path; from cme_dask.cli.progress import logging_to\n"
        f"with logging_to(Path({str(tmp_path / 'log')!r})): pass\n"
        "assert 'dask' not in sys.modules and 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.time() - (tmp_path / "log").stat().st_mtime < 60
