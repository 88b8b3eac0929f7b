"""The cost model: counts against what is counted otherwise, seconds right in structure."""

import json
import os
from dataclasses import replace
from itertools import pairwise

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import write_store
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask import JointDistribution, PivotedCholesky, kernels
from cme_dask.cli import cli
from cme_dask.data.sources import ArraySource, ZarrSource
from cme_dask.errors import DataError, ResourceError
from cme_dask.numerics.basis import BlockSolve, NewtonBasis
from cme_dask.numerics.moments import MomentSpec, Side
from cme_dask.passes import cost as measuring
from cme_dask.passes.cost import (
    PassWork,
    Rates,
    busiest_rows,
    bytes_read,
    predict_seconds,
    round_seconds,
)
from cme_dask.passes.driver import Executor
from cme_dask.passes.plan import Run, plan_runs
from cme_dask.passes.sources import open_sample

GAUSSIAN = kernels.Gaussian(0.3)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Rates are measured as always, in less time and less well."""
    monkeypatch.setattr(measuring, "_SHORT", 0.0)
    monkeypatch.setattr(measuring, "_LONG", 0.0)


def rates(**changes):
    values = {
        "workers": 2,
        "cores": 2,
        "sections": 1e-7,
        "elimination": 2e-7,
        "update": 3e-7,
        "reading": 1e-8,
        "reading_cores": 0.0,
        "partial": 1e-3,
        "gemm": 1e11,
        "gemm_one": 5e10,
        "eigen": 3e-10,
        "startup": 0.0,
    }
    return Rates(**values | changes)


def work(n=10**6, ranks=(50, 40), n_folds=10, workers=2):
    runs = plan_runs(n, 0, workers, 1e-6)
    width = sum(ranks) + 4
    elimination = sum(BlockSolve.whole(m).flops for m in ranks)
    return PassWork(
        rows=n,
        ranks=ranks,
        width=width,
        n_folds=n_folds,
        elimination_flops=elimination,
        update_flops=width**2,
        tasks=len(runs),
        strips=sum(run.strips for run in runs),
        busiest=busiest_rows(runs, workers),
        bytes_read=24 * n,
    )


def spec_of(rank=40, n_folds=3, between=None):
    rng = np.random.default_rng(0)
    X, Y = rng.random((300, 2)), rng.random((300, 1))
    bases = [NewtonBasis.from_points(kernels.Matern(0.5, 0.5), part[:rank]) for part in (X, Y)]
    forms = [BlockSolve.whole(b.rank) if between is None else between for b in bases]
    sides = tuple(
        Side(basis, tuple(f"{name}{i}" for i in range(part.shape[1])), elimination=form)
        for basis, form, part, name in zip(bases, forms, (X, Y), "xy", strict=True)
    )
    return MomentSpec(sides, n_folds), (X, Y)


def counted_flops(form):
    """Multiplications and additions of the products that an elimination makes of a row."""
    flops = 0
    for block in form.blocks:
        size = block.stop - block.start
        flops += 2 * size * block.start  # W_b C_before
        flops += size * size if form.solved else 0  # R_bb^-1 C_b, a triangle
    return flops


@pytest.mark.parametrize("between", [None, BlockSolve((0, 25, 40), solved=False)])
def test_flops_are_those_of_the_products(between):
    spec, parts = spec_of(between=between)
    sample = open_sample(*parts)
    runs = [Run(0, 300, 4096)]
    found = PassWork.of(sample, spec, runs, 2)
    width = 40 + 40 + 1 + 3
    assert (found.ranks, found.width) == ((40, 40), width)
    forms = [side.eliminated for side in spec.sides]
    assert found.elimination_flops == sum(counted_flops(form) for form in forms)
    # A symmetric result has half of the 2 P^2 operations of a product.
    assert found.update_flops == width**2
    assert found.flops == 300 * (found.elimination_flops + width**2) == 300 * spec.flops
    assert found.kernel_values == 300 * 80
    assert found.bytes_read == 300 * 3 * 8
    assert (found.tasks, found.strips, found.busiest) == (1, 1, 300)


def test_the_flops_of_a_whole_solve_and_update_approach_two_m_squared():
    """Beside the m^2 of the update: 2 n m^2 for one basis is what the bench counts."""
    m = 4096
    assert BlockSolve.whole(m).flops == m**2


def test_sums_by_cell_are_a_part_of_the_pass():
    bare, summed = predict_seconds(work(), rates()), predict_seconds(work(), rates(cells=1e-7))
    assert bare.cells == 0.0
    assert summed.cells == pytest.approx(work().busiest * 2 * 1e-7)
    assert summed.one_pass - bare.one_pass == pytest.approx(summed.cells)


def test_solution_flops_are_those_of_its_products():
    one = work(ranks=(30,), n_folds=1)
    assert one.solutions == 0
    assert one.solve_flops == 6 * 30**3
    two = work(ranks=(30, 30), n_folds=1)
    assert two.solutions == 1
    # 6 m^3 a basis: frame, gram, frame, and vectors; 4 products of a pair for H and its residual.
    assert two.solve_flops == 2 * 6 * 30**3 + (2 * 6 + 16) * 30**3
    folds = work(ranks=(30, 30), n_folds=10)
    assert folds.solutions == 11
    assert folds.solve_flops == 2 * 6 * 30**3 + 11 * 28 * 30**3


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(10**4, 10**8),
    ranks=st.lists(st.integers(1, 500), min_size=1, max_size=2),
    workers=st.sampled_from([1, 2, 7]),
)
def test_the_model_is_monotone_and_linear(n, ranks, workers):
    ranks = tuple(ranks)
    measured = rates(workers=workers, cores=workers)
    small = work(n, ranks, workers=workers)
    assert small.busiest * workers >= n
    seconds = predict_seconds(small, measured)
    per_row = small.busiest * workers
    # Linear in the rows of the busiest worker, each part with its own rate.
    assert seconds.sections == pytest.approx(per_row * measured.sections)
    assert seconds.elimination == pytest.approx(per_row * measured.elimination)
    assert seconds.update == pytest.approx(per_row * measured.update)
    assert seconds.limit == pytest.approx(n * (small.flops / n) / measured.gemm)
    # Twice the rows cut alike: twice the seconds of the pass; the solution does not know n.
    twice = replace(
        small,
        rows=2 * n,
        busiest=2 * small.busiest,
        tasks=2 * small.tasks,
        strips=2 * small.strips,
    )
    double = predict_seconds(twice, measured)
    assert double.sections + double.update == pytest.approx(2 * (seconds.sections + seconds.update))
    assert double.limit == pytest.approx(2 * seconds.limit)
    assert double.one_pass > seconds.one_pass
    assert double.solution == seconds.solution
    # More pivots: more of everything that depends on them.
    more = predict_seconds(work(n, tuple(m + 1 for m in ranks), workers=workers), measured)
    assert more.solution > seconds.solution
    assert more.limit > seconds.limit
    faster = predict_seconds(small, replace(measured, update=measured.update / 2))
    assert faster.one_pass < seconds.one_pass


def test_reading_runs_beside_computing_but_not_on_the_same_core():
    slow = rates(reading=5e-6)
    bound = predict_seconds(work(), slow)
    rows = work().busiest * 2
    assert bound.sections + bound.elimination + bound.update + bound.reading == pytest.approx(
        rows * 5e-6
    )
    assert predict_seconds(work(), rates()).reading == 0.0
    busy = predict_seconds(work(), rates(reading_cores=2e-7))
    assert busy.reading == pytest.approx(rows * 1e-7)  # two cores decode, besides all else
    spare = predict_seconds(work(), rates(reading_cores=2e-7, cores=4))
    assert spare.reading == 0.0


def test_a_round_costs_whole_solves():
    one = round_seconds(work(ranks=(100,)), rates())
    assert one == pytest.approx(work().busiest * 2 * (1e-7 + 100**2 / 1e11))


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.integers(1, 50), min_size=1, max_size=30), workers=st.integers(1, 8))
def test_the_busiest_worker(rows, workers):
    edges = np.cumsum([0, *rows])
    runs = [Run(int(a), int(b), 50) for a, b in pairwise(edges)]
    loads = np.zeros(workers)
    for count in rows:  # whoever is done first takes the next
        loads[loads.argmin()] += count
    assert busiest_rows(runs, workers) == loads.max()


def test_bytes_count_straddled_chunks_twice(tmp_path):
    x = np.zeros((10_000, 3))
    write_store(tmp_path / "s.zarr", x, x[:, 0], chunk_rows=3000)
    source = open_sample(tmp_path / "s.zarr").sources[0]
    assert isinstance(source, ZarrSource)
    assert bytes_read(source, [Run(0, 10_000, 4096)]) == 10_000 * 24
    # Rows 3000 to 5999 are read by both tasks.
    runs = [Run(0, 4096, 4096), Run(4096, 10_000, 4096)]
    assert bytes_read(source, runs) == 13_000 * 24
    assert bytes_read(source.pick((1,)), runs) == 13_000 * 24  # chunks hold all columns
    assert bytes_read(ArraySource(x.astype(np.float32)), runs) == 10_000 * 12


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rates_are_measured_and_add_up(tmp_path, scheduler, weighted):
    spec, (X, Y) = spec_of()
    weights = np.ones(300) if weighted else None
    sample = open_sample(X, Y, weights=weights)
    executor = Executor.resolve(scheduler, 2)
    found = measuring.measure_rates(sample, spec, (X, Y), [Run(0, 300, 4096)], executor)
    assert found.workers == executor.workers
    assert found.computing > 0.0
    for name in ("sections", "elimination", "update", "reading", "startup"):
        assert getattr(found, name) >= 0.0
    for name in ("partial", "gemm", "gemm_one", "eigen"):
        assert 0.0 < getattr(found, name) < np.inf
    assert found.gemm_one <= found.gemm


def test_rates_are_measured_on_the_workers_of_a_cluster(cluster):
    spec, (X, Y) = spec_of()
    sample = open_sample(da.from_array(X, chunks=(100, 2)), da.from_array(Y, chunks=(100, 1)))
    executor = Executor.resolve(cluster)
    found = measuring.measure_rates(sample, spec, (X, Y), [Run(0, 300, 4096)], executor)
    assert (found.workers, found.cores) == (2, 2)
    assert found.reading == 0.0  # of Dask arrays
    assert found.computing > 0.0


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
    assert (plan.rows, plan.work.n_folds) == (fit.report_.rows, 4)
    assert (plan.work.tasks, plan.work.strips) == (fit.report_.tasks, fit.report_.strips)
    assert plan.work.width == sum(plan.ranks) + 1 + 3 + 1
    memory = fit.report_.memory  # its limit is what happens to be free
    assert (plan.memory.predicted, plan.memory.phase) == (memory.predicted, memory.phase)
    assert plan.passes == fit.n_passes_ == 1
    assert plan.seconds == pytest.approx(sum(plan.parts.values()))
    assert not plan.in_rounds
    assert 0.0 < plan.seconds < 1000.0
    told = json.loads(json.dumps(plan.to_dict()))
    assert [v["rank"] for v in told["variables"]] == list(plan.ranks)
    assert told["rounds"] == 0
    assert told["flops"] == plan.work.flops


def test_a_plan_of_features_and_of_rounds():
    x, _ = rows(20_000)
    plan = PivotedCholesky(GAUSSIAN, tol=1e-3).plan(x, workers=1, scheduler="threads")
    assert plan.ranks == (PivotedCholesky(GAUSSIAN, tol=1e-3).fit(x).basis_.rank,)
    assert plan.work.solutions == 0
    greedy = PivotedCholesky(GAUSSIAN, tol=1e-3, pivots="greedy").plan(x, workers=1)
    assert greedy.in_rounds
    assert greedy.to_dict()["rounds"] is None
    assert greedy.variables[0].pivots == "greedy"
    assert greedy.round_seconds > 0.0
    given = PivotedCholesky(GAUSSIAN, pivots=x[:7]).plan(x, workers=1)
    assert (given.ranks, given.variables[0].pivots) == ((7,), "given")


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


def test_dry_run_tells_and_writes_nothing(tmp_path, monkeypatch, brief_search):
    monkeypatch.chdir(tmp_path)
    x, y = rows(20_000)
    write_store("s.zarr", x, y, chunk_rows=4096)
    options = ("--tol", "1e-3", "--event", "y0 > 0.5", "--workers", "2")
    code, out, err = run("fit", "s.zarr", "--dry-run", *options, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["rows"], told["passes"], told["rates"]["workers"]) == (20_000, 1, 2)
    assert set(told["memory"]) == {"predicted", "limit", "place", "phase"}
    assert told["seconds"] == pytest.approx(sum(told["parts"].values()))
    code, out, err = run("fit", "s.zarr", "--dry-run", *options, "--pivots", "greedy")
    assert code == 0, err
    for text in ("basis of y", "greedy pivots", "not known", "kernel sections", "in all", "limit"):
        assert text in out
    assert os.listdir() == ["s.zarr"]
    code, out, err = run("fit", "s.zarr", *options)
    assert (code, out) == (2, "")
    assert "--out" in err
