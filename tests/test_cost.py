"""What a fit would cost: its plan is the fit up to its pass, whose seconds are those of strips."""

import json
import os
import time
from itertools import pairwise

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from sklearn.base import clone

from cme_dask import JointDistribution, PivotedCholesky, kernels
from cme_dask.cli import cli
from cme_dask.cli.tables import plan_tables
from cme_dask.constraints import Certified, Normalized, Pointwise
from cme_dask.data.sources import ArraySource, ZarrSource
from cme_dask.errors import DataError, ResourceError
from cme_dask.numerics.basis import BlockSolve, NewtonBasis, forward_substitution
from cme_dask.numerics.moments import FeatureBlock, MomentReduction
from cme_dask.numerics.reduction import Cost, Reduction, RowRange, plan_ranges
from cme_dask.passes import cost as timing
from cme_dask.passes.cost import busiest_rows, bytes_read, time_pass
from cme_dask.passes.driver import Executor, RunOptions
from cme_dask.passes.sources import open_sample

GAUSSIAN = kernels.Gaussian(0.3)


def spec_of(rank=40, n_folds=3, between=None):
    rng = np.random.default_rng(0)
    X, Y = rng.random((300, 2)), rng.random((300, 1))
    bases = [NewtonBasis.from_points(kernels.Matern(0.5, 0.5), part[:rank]) for part in (X, Y)]
    sides = tuple(
        FeatureBlock(basis, tuple(f"{name}{i}" for i in range(part.shape[1])), solve=between)
        for basis, part, name in zip(bases, (X, Y), "xy", strict=True)
    )
    return MomentReduction(sides, n_folds), (X, Y)


def counted_flops(side):
    """Multiplications and additions of the products that a solve makes of a row."""
    factor = side.basis.factor
    if side.solve is None:
        steps = forward_substitution(factor, (0, 25, len(factor)))
    else:
        steps = side.solve.steps(factor)
    # A triangle times a part of the row, or a matrix times one.
    return sum(m.size if source is None else 2 * m.size for _, source, m in steps)


@pytest.mark.parametrize("between", [None, BlockSolve((0, 25, 40))])
def test_flops_are_those_of_the_products(between):
    spec, _ = spec_of(between=between)
    width = 40 + 40 + 1 + 3
    assert (spec.ranks, spec.width) == ((40, 40), width)
    solves = sum(map(counted_flops, spec.features))
    assert sum(side.solve_flops for side in spec.features) == solves
    # A symmetric result has half of the 2 P^2 operations of a product.
    assert spec.flops == solves + width**2


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Slow(Reduction):
    """Half a second for each strip, and a millisecond for each of its rows."""

    def __init__(self, clock):
        self.clock = clock

    def update(self, state, strip):
        self.clock.now += 0.5 + 1e-3 * len(strip)
        return len(strip)


@pytest.mark.parametrize("chunk_rows", [0, 3000])
def test_seconds_of_the_pass_are_those_of_its_strips(tmp_path, monkeypatch, chunk_rows):
    """Rows, strips and bytes each count with the time that they take, whatever else takes time."""
    clock = Clock()
    x = np.zeros((50_000, 2))
    if chunk_rows:
        write_store(tmp_path / "s.zarr", x, x[:, 0], chunk_rows=chunk_rows)
    sample = open_sample(tmp_path / "s.zarr" if chunk_rows else x)
    strips = timing.Pass.strips

    def slowly(reading, run, given):
        clock.now += 100.0 if run.stop - run.start == 1 else 0.0  # the way to the first row
        for strip in strips(reading, run, given):
            clock.now += 2e-6 * 24 * len(strip) if run.stop - run.start > 1 else 0.0
            yield strip

    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing.Pass, "strips", slowly)
    runs = plan_ranges(50_000, chunk_rows, 1, 1e-3)
    executor = RunOptions("synchronous").executor()
    cost = time_pass(sample, [Slow(clock)], runs, executor)
    count = -(-50_000 // 4096)
    assert (cost.rows, cost.strips, cost.tasks, cost.workers) == (50_000, count, len(runs), 1)
    assert cost.computing == pytest.approx(50.0)
    assert cost.sums == pytest.approx(0.5 * count)
    row_bytes = sum(source.row_bytes for source in sample.reads)
    timed = -(-3 * 4096 // chunk_rows) * chunk_rows if chunk_rows else 3 * 4096
    waited = 3 * 4096 * 24 * 2e-6  # while so many bytes came
    assert cost.reading == pytest.approx(waited * cost.bytes_read / timed / row_bytes, rel=0.05)
    assert cost.scheduling == pytest.approx(1e-3 * len(runs), abs=1e-9)
    assert cost.seconds == pytest.approx(
        cost.computing + cost.reading + cost.sums + cost.scheduling
    )
    assert cost.rows_per_second == pytest.approx(50_000 / cost.seconds)


def test_workers_without_a_task_count_for_nothing(monkeypatch):
    starts = []

    class Starts(Reduction):
        def update(self, state, strip):
            starts.extend(strip.rows[:1])
            return 0

    x = np.zeros((9000, 1))
    runs = plan_ranges(len(x), 0, 1, 1.0, 4096)
    times = [time_pass(open_sample(x), [Starts()], runs, Executor("threads", 64))]
    assert {0, 4096, 8192} <= set(starts)
    monkeypatch.setattr(timing, "_time_strips", lambda *_: (timing.StripTimes(1.0, 1.0, 1.0, 0.0),))
    times += [time_pass(open_sample(x), [Starts()], runs, Executor("threads", k)) for k in (64, 3)]
    assert times[1].sums == times[2].sums == 1.0
    assert times[1].reading == times[2].reading


def test_of_strips_that_would_take_long_a_part_is_timed():
    seen = []

    class Rows(Reduction):
        def __init__(self, flops):
            self.flops = flops

        def cost(self, extent):
            return Cost(flops=self.flops)

        def update(self, state, strip):
            seen.append(len(strip))
            return 0

    x = np.zeros((300_000, 1))
    runs = plan_ranges(len(x), 0, 1, 1.0)
    executor = RunOptions("synchronous").executor()
    assert runs[0].length == 8192
    time_pass(open_sample(x), [Rows(1.0)], runs, executor)
    assert [rows for rows in seen if rows] == [8192] * 3
    seen.clear()
    time_pass(open_sample(x), [Rows(1e9)], runs, executor)
    assert [rows for rows in seen if rows] == [4096] * 3


@pytest.mark.parametrize(
    ("scheduler", "weighted"),
    [("threads", True), ("synchronous", False), ("processes", False)],
)
def test_strips_of_moments_are_timed_on_all_workers(scheduler, weighted):
    spec, (X, Y) = spec_of()
    X, Y = np.tile(X, (30, 1)), np.tile(Y, (30, 1))
    sample = open_sample(X, Y, weights=np.ones(len(X)) if weighted else None)
    executor = RunOptions(scheduler, 2).executor()
    runs = plan_ranges(len(X), 0, 2, 1e-6)
    cost = time_pass(sample, [spec], runs, executor)
    assert cost.workers == executor.workers
    assert cost.rows == len(X)
    for name in ("computing", "reading", "sums", "scheduling"):
        assert 0.0 <= getattr(cost, name) < 1000.0
    assert cost.sums > 0.0


def test_strips_are_timed_on_the_workers_of_a_cluster(cluster):
    spec, (X, Y) = spec_of()
    sample = open_sample(da.from_array(X, chunks=(100, 2)), da.from_array(Y, chunks=(100, 1)))
    executor = RunOptions(cluster).executor()
    cost = time_pass(sample, [spec], [RowRange(0, 300, 4096)], executor)
    assert cost.workers == 2
    assert 0.0 < cost.seconds < 1000.0


@settings(max_examples=50)
@given(rows=st.lists(st.integers(1, 50), min_size=1, max_size=30), workers=st.integers(1, 8))
def test_the_busiest_worker(rows, workers):
    edges = np.cumsum([0, *rows])
    runs = [RowRange(int(a), int(b), 50) for a, b in pairwise(edges)]
    loads = np.zeros(workers)
    for count in rows:  # whoever is done first takes the next
        loads[loads.argmin()] += count
    assert busiest_rows(runs, workers) == loads.max()


def test_bytes_count_straddled_chunks_twice(tmp_path):
    x = np.zeros((10_000, 3))
    write_store(tmp_path / "s.zarr", x, x[:, 0], chunk_rows=3000)
    source = open_sample(tmp_path / "s.zarr").sources[0]
    assert isinstance(source, ZarrSource)
    assert bytes_read(source, [RowRange(0, 10_000, 4096)]) == 10_000 * 24
    # Rows 3000 to 5999 are read by both tasks.
    runs = [RowRange(0, 4096, 4096), RowRange(4096, 10_000, 4096)]
    assert bytes_read(source, runs) == 13_000 * 24
    assert bytes_read(source.pick((1,)), runs) == 13_000 * 24  # chunks hold all columns
    assert bytes_read(ArraySource(x.astype(np.float32)), runs) == 10_000 * 12


def rows(n=140_000):
    rng = np.random.default_rng(0)
    x = rng.random((n, 2))
    return x, x[:, :1] + 0.1 * rng.standard_normal((n, 1))


def test_a_plan_is_the_fit_up_to_its_pass():
    x, y = rows()
    estimator = JointDistribution(
        kernel_x=GAUSSIAN, kernel_y=GAUSSIAN, tol=1e-3, n_folds=4, sample_size=4096
    )
    options = {"functions": {"high": lambda y: y[:, 0] > 0.5}, "workers": 2}
    plan = estimator.plan(x, y, scheduler="threads", **options)
    assert not [name for name in vars(estimator) if name.endswith("_")]
    fit = estimator.fit(x, y, scheduler="threads", **options)
    assert plan.ranks == (fit.basis_x_.rank, fit.basis_y_.rank)
    assert plan.arithmetic == fit.arithmetic_.name
    made = plan.moment_pass
    assert (made.rows, made.tasks, made.strips) == (140_000, fit.report_.tasks, fit.report_.strips)
    memory = fit.report_.memory  # its limit is what happens to be free
    assert (plan.memory.predicted, plan.memory.phase) == (memory.predicted, memory.phase)
    assert plan.passes == fit.n_passes_ == 1
    assert plan.seconds == pytest.approx(sum(plan.parts.values()))
    assert not plan.in_rounds
    assert 0.0 < plan.seconds < 1000.0
    told = json.loads(json.dumps(plan.to_dict()))
    assert [v["rank"] for v in told["variables"]] == list(plan.ranks)
    assert told["rounds"] == 0
    assert told["pass_seconds"] == plan.moment_pass.seconds
    # Of the same strips, scaled: whatever the machine does meanwhile, the order is right.
    assert plan.moment_pass.seconds < 20 * fit.report_.pass_seconds + 1.0
    assert fit.report_.pass_seconds < 20 * plan.moment_pass.seconds + 1.0


def test_a_plan_of_features_and_of_rounds():
    x, _ = rows(20_000)
    plan = PivotedCholesky(GAUSSIAN, tol=1e-3).plan(x, workers=1, scheduler="threads")
    assert plan.ranks == (PivotedCholesky(GAUSSIAN, tol=1e-3).fit(x).basis_.rank,)
    greedy = PivotedCholesky(GAUSSIAN, tol=1e-3, pivots="greedy").plan(x, workers=1)
    assert greedy.in_rounds
    assert greedy.to_dict()["rounds"] is None
    assert greedy.variables[0].pivots == "greedy"
    given = PivotedCholesky(GAUSSIAN, pivots=x[:7]).plan(x, workers=1)
    assert (given.ranks, given.variables[0].pivots) == ((7,), "given")


def test_a_plan_says_that_the_row_sample_has_too_few_pivots():
    x, _ = rows(600)
    estimator = PivotedCholesky(kernels.Gaussian(1.0), tol=1e-6, sample_size=30)
    plan = estimator.plan(x, workers=1)
    (variable,) = plan.variables
    assert not variable.enough
    assert plan.in_rounds
    assert plan.to_dict()["rounds"] is None
    console = Console(width=400, record=True)
    for table in plan_tables(json.loads(json.dumps(plan.to_dict())) | {"store": "s.zarr"}):
        console.print(table)
    assert "lower bounds" in console.export_text()
    fit = estimator.fit(x, workers=1)
    assert fit.basis_.rank > plan.ranks[0]
    assert fit.n_passes_ > plan.passes
    # No round adds to what max_rank ends, nor to pivots from a sample that holds all rows.
    limited = PivotedCholesky(kernels.Gaussian(1.0), tol=1e-6, sample_size=30, max_rank=8)
    complete = PivotedCholesky(kernels.Gaussian(1.0), tol=1e-6)
    for other in (limited, complete):
        assert not other.plan(x, workers=1).in_rounds


def test_a_plan_has_the_pass_that_observes_bounds():
    x, y = rows(600)
    estimator = JointDistribution(
        kernel_x=GAUSSIAN, kernel_y=GAUSSIAN, tol=0.05, constraint=Certified(bounds="observed")
    )
    plan = estimator.plan(da.from_array(x, chunks=(200, 2)), y, workers=1)
    fit = estimator.fit(da.from_array(x, chunks=(200, 2)), y, workers=1)
    assert plan.passes == fit.n_passes_
    assert plan.further_pass.rows == 600
    assert plan.parts["pass: ranges of basis functions"] == plan.further_pass.seconds > 0.0
    # What the process holds already is part of both, and changes from one to the other.
    assert plan.memory.predicted == pytest.approx(fit.report_.memory.predicted, rel=0.05)
    sampled = clone(estimator).set_params(constraint=Certified(bounds="sample"))
    assert sampled.plan(x, y, workers=1).further_pass is None


def test_seconds_of_iterated_solutions_are_those_of_one_on_the_row_sample(monkeypatch):
    x, y = rows(600)
    estimator = JointDistribution(
        kernel_x=GAUSSIAN, kernel_y=GAUSSIAN, max_rank=15, n_folds=3, constraint=Pointwise(20)
    )

    def slowly(_, problem, bounds, start):
        time.sleep(0.05)
        return Normalized().minimize(problem, bounds, start)

    monkeypatch.setattr(Pointwise, "minimize", slowly)
    seconds = estimator.plan(x, y, workers=1).solution_seconds
    assert 4 * 0.05 <= seconds < 10.0


def test_a_plan_refuses_what_the_fit_would():
    x, y = rows(5000)
    with pytest.raises(ResourceError, match="lower max_rank"):
        JointDistribution().plan(x, y, memory_limit="10MB")
    with pytest.raises(DataError, match="pivots must be 'sampled'"):
        JointDistribution(pivots="nonsense").plan(x, y)
    with pytest.raises(DataError, match="give Y"):
        JointDistribution().plan(x)


def run(*args):
    result = CliRunner().invoke(cli, [*map(str, args)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_dry_run_of_an_embedding_has_its_leave_one_out_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = rows(3000)
    write_store(tmp_path / "s.zarr", x, y)
    given = ("--kernel", "median", "--max-rank", 5, "--workers", 1)
    embedding = ("--estimator", "embedding", "--validation", "leave-one-out", *given)
    code, out, err = run("fit", "s.zarr", *embedding, "--dry-run", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["passes"] == 2
    assert (plan["further_pass"]["name"], plan["further_pass"]["rows"]) == ("leave-one-out", 3000)
    assert plan["parts"]["pass: leave-one-out"] > 0.0
    code, out, err = run("fit", "s.zarr", *embedding, "--dry-run")
    assert code == 0, err
    assert "pass: leave-one-out" in out
    code, out, err = run("fit", "s.zarr", *embedding, "--out", "m.zarr", "--json")
    assert code == 0, err
    assert json.loads(out)["passes"] == 2
    code, _, err = run("fit", "s.zarr", *given, "--validation", "folds", "--dry-run")
    assert (code, "validation: the estimator joint takes" in err) == (2, True)


def test_dry_run_tells_and_writes_nothing(tmp_path, monkeypatch, brief_search):
    monkeypatch.chdir(tmp_path)
    x, y = rows(20_000)
    write_store("s.zarr", x, y, chunk_rows=4096)
    options = ("--tol", "1e-3", "--event", "y0 > 0.5", "--workers", "2")
    code, out, err = run("fit", "s.zarr", "--dry-run", *options, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["rows"], told["passes"], told["pass"]["workers"]) == (20_000, 1, 2)
    assert set(told["memory"]) == {"predicted", "limit", "place", "phase"}
    assert told["seconds"] == pytest.approx(sum(told["parts"].values()))
    code, out, err = run("fit", "s.zarr", "--dry-run", *options, "--pivots", "greedy")
    assert code == 0, err
    for text in ("basis of y", "greedy pivots", "not known", "pass: computing", "in all", "rows/s"):
        assert text in out
    assert os.listdir() == ["s.zarr"]
    code, out, err = run("fit", "s.zarr", *options)
    assert (code, out) == (2, "")
    assert "--out" in err
