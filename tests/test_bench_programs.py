"""The bench of certified programs: what it solves, what it tells of it, and its table."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import measure, run
from benchmarks.__main__ import cli
from benchmarks.cases import FULL, QUICK
from benchmarks.coverage import SCENARIOS
from benchmarks.measure import Size
from benchmarks.programs import CLOSED, SolveCoupling, SolveProgram
from benchmarks.worker import describe_job, make_job, measured


def again(job):
    return make_job(json.loads(json.dumps(describe_job(job))))


def solve(solver, rows=1000, ranks=(6, 12), limit=20.0):
    return measured(again(SolveProgram(solver, rows, *ranks, limit)).prepare())


def command(*args):
    result = CliRunner().invoke(cli, ["bench", *map(str, args)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_each_solver_tells_of_its_solution():
    found = {solver: solve(solver) for solver in (CLOSED, "clarabel", "osqp")}
    for solver, one in found.items():
        assert one["status"] == "optimal"
        assert one["kkt_residual"] <= (1e-10 if solver == CLOSED else 1e-6)
        assert one["ranks"] == [6, 12]
        assert one["objective"] < 0
        json.dumps(one, allow_nan=False)
    assert found[CLOSED]["unknowns"] == 5 * 11  # in the centred basis
    assert found["clarabel"]["unknowns"] == 6 * 12
    clarabel, osqp = found["clarabel"], found["osqp"]
    assert clarabel["objective"] == pytest.approx(osqp["objective"], rel=1e-6)
    assert clarabel["oracle_error"] == pytest.approx(osqp["oracle_error"], rel=1e-4)


def test_a_coupling_tells_of_its_solution():
    found = measured(again(SolveCoupling(1000, 12, 0.5, 1e-3)).prepare())
    assert found["ranks"] == [12, 12]
    assert found["unknowns"] == 144
    assert found["kkt_residual"] <= 1e-6
    assert found["objective"] < 0
    assert found["oracle_error"] < solve(CLOSED)["oracle_error"]  # which has a cap
    json.dumps(found, allow_nan=False)


def test_the_error_is_that_of_independence_at_worst():
    """Given nothing of x, E[t | x] = E t: what the certificates improve on, if only a little."""
    law = SCENARIOS["strong"]
    y, truth = law.draw(1000, 0)[1], law.truth(law.draw(2000, 1)[0])
    independent = float(((law.events(y).mean(axis=0) - truth) ** 2).sum(axis=1).mean())
    found = solve(CLOSED)["oracle_error"]
    assert 0.5 * independent < found < 1.02 * independent


def test_a_solver_out_of_time_is_a_result():
    found = solve("osqp", ranks=(10, 50), limit=1e-3)
    assert found["status"] != "optimal"
    assert found["kkt_residual"] > 1e-6
    json.dumps(found, allow_nan=False)


@pytest.fixture
def here(monkeypatch):
    """Jobs run in this process, still by way of JSON."""
    monkeypatch.setattr(
        measure, "run_fresh", lambda job: json.loads(json.dumps(measured(again(job).prepare())))
    )


def test_the_case_prints_its_table(here, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "QUICK", {"programs": Size(2000, ranks=(3, 6))})
    monkeypatch.setattr("benchmarks.cases._LARGEST_PROGRAM", 100)
    monkeypatch.setattr("benchmarks.cases._COUPLINGS", {12: 5.0})
    out = tmp_path / "out"
    code, stdout, err = command("--case", "programs", "--repeats", 2, "--out", out)
    assert code == 0, err
    for text in (
        "Certified programs",
        "45, closed form",
        "45, Clarabel",
        "45, OSQP",
        "144, coupling",
        "optimal",
    ):
        assert text in stdout
    result = json.loads((out / "bench.json").read_text())
    keys = [key.removeprefix("programs/") for key in result["measurements"]]
    assert keys == [
        "45 unknowns/closed form",
        "45 unknowns/Clarabel",
        "45 unknowns/OSQP",
        "180 unknowns/closed form",  # too large for the solvers here
        "144 unknowns/coupling, scale 1.0, reg 0.001",
        "144 unknowns/coupling, scale 1.0, reg 0.0001",
        "144 unknowns/coupling, scale 0.5, reg 0.001",
        "144 unknowns/coupling, scale 0.5, reg 0.0001",
    ]
    runs = [len(found["runs"]) for found in result["measurements"].values()]
    assert runs == [2, 2, 1, 2, 1, 1, 1, 1]
    assert (out / "bench.png").stat().st_size > 5_000
    for ratio in result["ratios"]:
        if ratio["at_most"] is not None:
            (over,) = ratio["over"]
            values = [
                one[over["quantity"]] for one in result["measurements"][over["measurement"]]["runs"]
            ]
            assert ratio["value"] == pytest.approx(np.median(values))
            assert ratio["value"] <= ratio["at_most"]


@pytest.mark.parametrize("sizes", [QUICK, FULL])
def test_the_sizes_span_what_is_claimed(sizes):
    unknowns = [5 * rank**2 for rank in sizes["programs"].ranks]
    assert unknowns[0] <= 125
    assert 200_000 in unknowns
    assert unknowns[-1] >= 10**6
