"""A fit reports its ranks, by member where several are averaged, and the wall time of all of it."""

import json
import time

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import write_store

from cme_dask import JointDistribution, Tuning
from cme_dask.cli import cli
from cme_dask.cli.run_report import PeakMemory
from cme_dask.passes.driver import A_WORKER

MOST = 12


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(300, 1))
    return x, np.sin(2 * x) + 0.3 * rng.normal(size=(300, 1))


@pytest.fixture(scope="module", params=[1, 2])
def timed(request, data):
    """A fit with learned kernels, of one model or of a mean, and its wall time."""
    begin = time.perf_counter()
    fit = JointDistribution(max_rank=MOST, tuning=Tuning(averaged=request.param)).fit(*data)
    return fit, time.perf_counter() - begin


pytestmark = pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")


def test_the_reported_seconds_are_the_wall_time_of_the_fit(timed):
    fit, seconds = timed
    report = fit.report_
    assert report.seconds == pytest.approx(seconds, rel=0.05)
    assert report.rows_per_second == pytest.approx(report.rows / report.seconds)
    assert 0 < report.pass_seconds < report.seconds - fit.search_.seconds
    assert report.pass_rows_per_second == pytest.approx(report.rows / report.pass_seconds)
    assert sum(report.tenths) <= report.pass_seconds


def test_ranks_are_those_of_the_members(timed):
    fit, _ = timed
    for basis, variable in ((fit.basis_x_, fit.model_.x), (fit.basis_y_, fit.model_.y)):
        side = "xy".index(variable.columns.names[0][0])
        ranks = tuple(member.component.sides[side].basis.rank for member in fit.members_)
        assert basis.ranks == variable.ranks == ranks
        assert basis.rank == max(ranks) <= MOST
        assert len(ranks) == fit.tuning.averaged
        assert len(basis.pivots) == sum(ranks)
        low = min(ranks)
        span = f"{low}" if low == max(ranks) else f"{low} to {max(ranks)}"
        several = f"{len(ranks)} members of rank {span} each, {variable.basis.rank} functions"
        assert (several if len(ranks) > 1 else f"rank {low}") in repr(fit.model_)


def test_the_command_reports_ranks_by_member_and_both_times(data, tmp_path):
    store = write_store(tmp_path / "s.zarr", *data)
    args = ["fit", store, "--out", tmp_path / "m.zarr", "--max-rank", MOST, "--residual", "no"]
    args += ["--averaged", 2]
    begin = time.perf_counter()
    done = CliRunner().invoke(cli, [*map(str, args), "--json"], catch_exceptions=False)
    wall = time.perf_counter() - begin
    found = json.loads(done.stdout)
    assert f"fitted 300 rows in {found['seconds']:.3g} s" in done.stderr
    assert found["pass_seconds"] < found["seconds"] < wall
    assert found["rows_per_second"] == pytest.approx(300 / found["seconds"])
    for variable in found["variables"].values():
        assert variable["rank"] == max(variable["ranks"]) <= MOST
        assert len(variable["ranks"]) == 2


def test_memory_is_measured_where_it_was_predicted(cluster):
    with PeakMemory(cluster) as memory:
        states = cluster.scheduler_info(n_workers=-1)["workers"].values()
    worker, measure = memory.of(A_WORKER)
    assert worker >= min(state["metrics"]["memory"] for state in states) / 2 > 0
    assert measure == "RSS of the worker that held most"
    here, measure = memory.of("the client")
    assert here == memory.peak > 0
    assert "of this process and its children" in measure
