"""Plans of clusters: from Python and by the command, beside what a fit itself would do."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import write_store

from cme_dask import (
    ClusterRates,
    ConditionalMeanEmbedding,
    JointDistribution,
    Tuning,
    kernels,
    plan_cluster,
)
from cme_dask.cli import cli
from cme_dask.errors import DataError, ResourceError
from cme_dask.estimators import sizing
from cme_dask.passes import rates as measuring
from cme_dask.passes.simulation import PassWork, SimulatedCluster, simulate_pass

RATES = ClusterRates(
    submit_seconds=5e-4,
    task_seconds=3e-4,
    task_seconds_per_worker=2e-6,
    client_seconds=1e-4,
    worker_seconds=2e-3,
    latency=2e-3,
    bandwidth=1e9,
    worker_load=0.05,
)


def rows(n=20_000, d=2):
    rng = np.random.default_rng(0)
    x = rng.random((n, d))
    return x, x.mean(axis=1) + 0.1 * rng.standard_normal(n)


@pytest.fixture(scope="module")
def fit_plan():
    """The plan of a fit, with fixed times of its strips: no answer depends on this machine."""
    kernel = kernels.Gaussian(0.3)
    plan = JointDistribution(kernel_x=kernel, kernel_y=kernel, max_rank=20).plan(*rows(), workers=1)
    times = {"empty": 4e-4, "computing": 2.5e-6, "reading": 6e-10, "merge": 2.5e-4}
    rates = replace(plan.moment_pass.rates, seconds=0.035, **times)
    return replace(plan, moment_pass=replace(plan.moment_pass, rates=rates))


def planned(fit_plan, workers, **options):
    given = {"rates": RATES, "spread": (0.9, 1.0, 1.1)} | options
    return plan_cluster(fit_plan, workers, **given)


def test_a_plan_is_cut_as_a_fit_would_be(fit_plan):
    plan = planned(fit_plan, 50, rows=1e9)
    extent = fit_plan.workload.extent
    assert extent.in_memory > 0
    assert plan.chunk_rows == 1 << 18
    assert plan.fit.rows == 10**9
    assert plan.simulation.tasks == 2 * plan.fit.moment_pass.tasks - 1
    assert plan.fit.moment_pass.workers == 50
    assert plan.bytes_read >= 10**9 * 3 * 8
    assert plan.memory.worker_limit >= plan.memory.worker / 0.7
    expected, least, most = plan.seconds
    assert 0 < least <= expected <= most
    assert sum(stage[0] for stage in plan.stages.values()) == pytest.approx(expected)
    assert plan.stages["solution"][0] == pytest.approx(fit_plan.solution_seconds)
    json.dumps(plan.to_dict(), allow_nan=False)


def test_its_tasks_are_those_of_the_fit(tmp_path):
    """At the rows of the plan, and as many workers as it had."""
    write_store(tmp_path / "s.zarr", *rows(), chunk_rows=1024)
    kernel = kernels.Gaussian(0.3)
    estimator = JointDistribution(kernel_x=kernel, kernel_y=kernel, max_rank=20)
    plan = estimator.plan(str(tmp_path / "s.zarr"), workers=2)
    scaled = planned(plan, 2)
    pass_, again = plan.moment_pass, scaled.fit.moment_pass
    assert (again.tasks, again.strips, again.rows) == (pass_.tasks, pass_.strips, pass_.rows)
    assert again.bytes_read == pass_.bytes_read
    assert again.computing == pytest.approx(pass_.computing, rel=0.2)  # busiest, and mean


def sharp(n):
    """Rows whose spread is far below that of y, so that fits by default learn a location."""
    rng = np.random.default_rng(0)
    x = rng.random((n, 2))
    return x, np.sin(6.0 * x[:, 0]) + x[:, 1] + 0.02 * rng.standard_normal(n)


@pytest.mark.parametrize(
    "estimator",
    [
        JointDistribution(
            sample_size=1_000,
            tuning=Tuning(rows=500, max_rank=100, evaluations=0, trees=("shallow",)),
        ),
        ConditionalMeanEmbedding(kernel_x="median", reg=(1e-4, 1e-2), validation="leave-one-out"),
    ],
)
def test_every_pass_of_a_fit_is_scaled(estimator):
    fit = estimator.plan(*sharp(2_000), workers=1)
    assert fit.passes == 2
    plan = planned(fit, 50, rows=10**9)
    other = plan.fit.further_pass or plan.fit.second.moment_pass
    for cost in (plan.fit.moment_pass, other):
        assert (cost.rows, cost.workers) == (10**9, 50)
    assert plan.bytes_read == plan.fit.moment_pass.bytes_read + other.bytes_read
    assert plan.bytes_sent > plan.simulation.sent_bytes
    stage = "location model" if plan.fit.second else "pass: leave-one-out"
    assert plan.stages[stage][0] >= other.seconds
    for name in ("row sample", "search for kernels", "solution"):
        assert plan.stages.get(name, [0.0])[0] == fit.parts.get(name, 0.0)


def test_time_falls_with_workers_until_the_scheduler_is_busy(fit_plan):
    seconds = {
        each.workers: (each.seconds, each.scheduler_busy)
        for each in planned(fit_plan, 100, rows=10**9).sweep
    }
    assert seconds[25][0] > seconds[50][0] > seconds[100][0]
    slow = ClusterRates(**{**RATES.to_dict(), "task_seconds": 0.2, "task_seconds_per_worker": 0.0})
    plan = planned(fit_plan, 100, rows=10**9, rates=slow)
    assert plan.simulation.scheduler_busy > 0.95
    assert plan.limit_workers < 100
    assert plan.tasks_per_second == pytest.approx(5.0)
    # More workers than that are no faster, and are not recommended.
    assert plan.recommended.workers * plan.recommended.threads <= 100


@pytest.mark.slow
def test_where_the_scheduler_is_the_limit_it_is_always_busy(fit_plan):
    """The closed form beside the simulation of many tasks, on both sides of the limit."""
    limit = planned(fit_plan, 100, rows=3 * 10**9).limit_workers
    below, above = (
        planned(fit_plan, workers, rows=3 * 10**9).simulation.scheduler_busy
        for workers in (limit // 2, 2 * limit)
    )
    assert below < 0.8
    assert above > 0.95


def test_options_change_what_they_name(fit_plan):
    plain = planned(fit_plan, 20, rows=10**8)
    slow = planned(fit_plan, 20, rows=10**8, read_rate=1e6)
    assert slow.stages["pass: waiting for rows"][0] > plain.stages["pass: waiting for rows"][0]
    assert slow.seconds[0] >= plain.bytes_read / 1e6 / 20
    shared = planned(fit_plan, 20, rows=10**8, file_system=1e7)
    assert shared.seconds[0] >= plain.bytes_read / 1e7
    late = planned(fit_plan, 20, rows=10**8, stragglers=(0.05, 10.0))
    assert late.simulation.seconds > plain.simulation.seconds
    threads = planned(fit_plan, 20, rows=10**8, threads_per_worker=4)
    assert threads.memory.worker > plain.memory.worker
    assert [each.threads for each in threads.layouts] == [4]
    assert {each.workers * each.threads for each in plain.layouts} == {20}
    assert plain.seconds == planned(fit_plan, 20, rows=10**8).seconds


def test_chunks_have_no_more_rows_than_there_are(fit_plan):
    long, whole = (planned(fit_plan, 4, rows=10_000, chunk_rows=c) for c in (10**7, 10_000))
    assert long.chunk_rows == 10_000
    assert long.memory == whole.memory
    assert planned(fit_plan, 4, rows=10_000).chunk_rows == 10_000


def test_stragglers_do_not_lower_the_upper_end(fit_plan):
    plain = planned(fit_plan, 20, rows=2 * 10**8)
    for stragglers in ((0.02, 1.1), (0.001, 6.0)):
        late = planned(fit_plan, 20, rows=2 * 10**8, stragglers=stragglers)
        assert late.seconds[2] >= plain.seconds[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows must be"),
        ({"rows": 1.5}, "rows must be"),
        ({"threads_per_worker": 0}, "threads_per_worker"),
        ({"read_rate": 0.0}, "read_rate"),
        ({"file_system": -1.0}, "file_system"),
        ({"stragglers": (2.0, 1.0)}, "stragglers"),
        ({"rows": np.nan}, "rows must be an integer of at least 1, got nan"),
        ({"rows": np.inf}, "rows must be an integer of at least 1, got inf"),
        ({"rows": "1e9"}, "rows must be an integer of at least 1, got '1e9'"),
        ({"workers": None}, "workers must be an integer"),
        ({"workers": True}, "workers must be an integer"),
        ({"threads_per_worker": 1.5}, "threads_per_worker must be an integer"),
        ({"chunk_rows": 0}, "chunk_rows must be an integer"),
        ({"read_rate": "1"}, "read_rate must be positive and finite, got '1'"),
        ({"memory_per_worker": 0}, "memory_per_worker must be positive"),
        ({"memory_per_worker": -5}, "memory_per_worker must be positive"),
        ({"memory_per_worker": "much"}, "memory_per_worker must be bytes or a text like"),
        ({"memory_per_worker": np.inf}, "memory_per_worker must be bytes or a text like"),
        ({"stragglers": 0.5}, "stragglers must be a share"),
        ({"spread": 1.0}, "spread must hold"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"rates": "fast"}, "rates must be cme_dask.ClusterRates"),
        ({"plan": JointDistribution()}, r"plan must be what the method plan\(\)"),
    ],
)
def test_bad_input_is_refused(fit_plan, options, message):
    given = {"plan": fit_plan, "workers": 4, "rates": RATES, "spread": (0.9, 1.1)} | options
    with pytest.raises(DataError, match=message):
        plan_cluster(**given)


def test_whole_floats_are_integers_and_memory_may_be_a_text(fit_plan):
    plan = planned(fit_plan, 4.0, rows=1e6, threads_per_worker=2.0, memory_per_worker="8GiB")
    assert plan.to_dict() == planned(fit_plan, 4, rows=10**6, threads_per_worker=2).to_dict()
    assert isinstance(plan.workers, int)


def test_workers_without_memory_are_refused(fit_plan):
    with pytest.raises(ResourceError, match="a worker would need"):
        planned(fit_plan, 4, rows=10**9, memory_per_worker=100_000_000)
    assert planned(fit_plan, 4, rows=10**9, memory_per_worker=4 << 30).workers == 4
    with pytest.raises(ResourceError, match="a worker would need"):
        planned(fit_plan, 4, rows=10**9, memory_per_worker=1)


def test_a_refusal_names_what_helps_a_worker(fit_plan):
    tight = {"rows": 10**9, "memory_per_worker": 300 << 20}
    for threads, says in ((1, "and 1 task at once"), (4, "and 4 tasks at once")):
        with pytest.raises(ResourceError, match=says) as refused:
            planned(fit_plan, 100, threads_per_worker=threads, **tight)
        message = str(refused.value)
        assert "the limit is 210.00 MiB (70% of its memory, above which it spills)" in message
        assert ("fewer than 4 threads per worker" in message) == (threads > 1)
        assert "workers or threads" not in message


def test_rates_are_checked_and_travel():
    assert ClusterRates.from_dict(json.loads(json.dumps(RATES.to_dict()))) == RATES
    assert RATES.tasks_per_second(1000) == pytest.approx(1 / 2.3e-3)
    with pytest.raises(DataError, match="missing or unknown: latency"):
        ClusterRates.from_dict({k: v for k, v in RATES.to_dict().items() if k != "latency"})
    earlier = {k: v for k, v in RATES.to_dict().items() if k != "worker_load"}
    assert ClusterRates.from_dict(earlier) == replace(RATES, worker_load=0.0)
    with pytest.raises(DataError, match="worker_load must be below 1"):
        ClusterRates.from_dict(earlier | {"worker_load": 1.5})
    with pytest.raises(DataError, match="task_seconds must be a number"):
        ClusterRates.from_dict(RATES.to_dict() | {"task_seconds": "fast"})
    with pytest.raises(DataError, match="bandwidth must be positive"):
        ClusterRates.from_dict(RATES.to_dict() | {"bandwidth": 0.0})


@pytest.mark.slow
def test_rates_are_those_of_real_processes(monkeypatch):
    """Schedulers, stub workers and a worker that run, with few tasks; their speed is not judged."""
    monkeypatch.setattr(measuring, "_STUB_LEAVES", 100)
    monkeypatch.setattr(measuring, "_FEW_STUBS", 3)
    monkeypatch.setattr(measuring, "_LEAVES", 10)
    monkeypatch.setattr(measuring, "_LINKS", 3)
    monkeypatch.setattr(measuring, "_IDLE_SECONDS", 0.5)
    rates = ClusterRates.measure(12)
    assert all(value >= 0 for value in rates.to_dict().values())
    assert rates.task_seconds > 0 < rates.submit_seconds
    # A pass of tasks that wait takes no less than they wait, on stub workers as in the simulation.
    run = measuring.run_on_stubs(5, 20, 0.05)
    done = simulate_pass(PassWork([0.05] * 20), SimulatedCluster(5))
    assert 0.2 <= done.seconds < 0.3  # merges take places of leaves
    assert run.wall >= 0.2


def command(*args):
    result = CliRunner().invoke(cli, ["plan", *map(str, args)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def rates_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sizing, "measure_spread", lambda: (0.9, 1.0, 1.1))
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"rates": RATES.to_dict()}))
    return path


def test_the_command_without_a_store(rates_file, tmp_path):
    args = ["--rows", "1e9", "--workers", 50, "--kernel", "gaussian:1", "--max-rank", 20]
    args += ["--columns", "3+2", "--rates", rates_file, "--bandwidth", "100MB"]
    code, stdout, err = command(*args, "--json")
    assert code == 0, err
    result = json.loads(stdout)
    assert (result["rows"], result["workers"], result["store"]) == (10**9, 50, None)
    assert [v["columns"] for v in result["variables"]] == [3, 2]
    assert result["rates"] == RATES.to_dict() | {"bandwidth": 1e8}
    # Its output is a file of rates.
    (tmp_path / "plan.json").write_text(stdout)
    args[args.index(rates_file)] = tmp_path / "plan.json"
    code, stdout, err = command(*args)
    assert code == 0, err
    for words in ("1,000,000,000 rows", "50 workers", "tasks/s", "in all", "recommended"):
        assert words in stdout


def test_the_command_with_a_store(rates_file, tmp_path):
    write_store(tmp_path / "s.zarr", *rows(3000))
    args = [tmp_path / "s.zarr", "--workers", 3, "--kernel", "gaussian:1", "--max-rank", 10]
    code, stdout, err = command(*args, "--rates", rates_file, "--json")
    assert code == 0, err
    result = json.loads(stdout)
    assert (result["rows"], result["passes"]) == (3000, 1)
    more = [*args, "--rows", "1e9", "--threads-per-worker", 2, "--stragglers", "0.01:5"]
    code, stdout, err = command(*more, "--rates", rates_file, "--json")
    assert code == 0, err
    assert json.loads(stdout)["pass"]["seconds"] > result["pass"]["seconds"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workers", 3], "give --rows"),
        (["--workers", 3, "--rows", "1e6", "--x", "a"], "those of a store"),
        (["--workers", 3, "--rows", "1e6", "--columns", "3"], "does not read X+Y"),
        (["--workers", 3, "--rows", "1e6", "--stragglers", "2:1"], "a share in"),
        (["--rows", "1e6"], "Missing option '--workers'"),
    ],
)
def test_the_command_refuses(args, message):
    code, _, err = command(*args)
    assert code == 2
    assert message in err


def test_files_without_rates_are_refused(tmp_path):
    for text, message in (("no", "is no JSON"), ("[]", "holds no rates"), ("{}", "missing")):
        (tmp_path / "rates.json").write_text(text)
        code, _, err = command("--workers", 3, "--rows", "1e6", "--rates", tmp_path / "rates.json")
        assert code == 2
        assert message in err
