"""Real passes on schedulers and workers over TCP, beside the simulation that sizes clusters.

The simulation is given the rates of one worker and microbenchmarks alone: three timed strips of the
pass, the speed of a core while all are busy, and the times of scheduler, client and messages.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.cluster import running_cluster
from benchmarks.fits import Fit, Rows, write_uniform
from benchmarks.measure import Bench, Measurement, Ratio, Size, Term
from cme_dask import JointDistribution, kernels
from cme_dask.config import N_FOLDS
from cme_dask.estimators.planning import FitPlan
from cme_dask.estimators.sizing import PassSizing
from cme_dask.passes.cluster import connected
from cme_dask.passes.rates import ClusterRates, run_on_stubs, run_waiting
from cme_dask.passes.simulation import PassWork, SimulatedCluster, simulate_pass

COMPUTING = (1, 2, 4)
"""Workers of passes that compute."""

WAITING = (1, 2, 4, 8)
"""Workers of passes whose tasks wait: more of them keep two cores busy by themselves."""

STUBS = (100, 300, 1000)
"""Workers without processes: a real scheduler at its limit."""

_D = 3
_TOL = 1e-6
_CLOSE = 0.15
_TRIALS = 3  # of the strips of the pass, which are short: their median counts
_WAIT = 0.25  # mean seconds of a leaf that waits
_PER_WORKER = 16
_STUB_WAIT = 0.1
_STUB_LEAVES = 4  # for each stub worker, at least 2,000 in all


def _compare(
    bench: Bench, real: str, simulated: Sequence[float], quantity: str = "seconds"
) -> None:
    """Add the simulated seconds of a real pass, and their ratio, which is to lie within 15 %."""
    group, _, name = real.rpartition("/")
    key = f"{real}, simulated"
    _record(bench, key, {"job": "simulation"}, simulated)
    terms = [Term(key)], [Term(real, quantity)]
    bench.ratios.append(
        Ratio(group, f"{name}, simulated / real", *terms, at_least=1 - _CLOSE, at_most=1 + _CLOSE)
    )


def _record(bench: Bench, key: str, job: Mapping[str, Any], seconds: Sequence[float]) -> None:
    bench.measurements[key] = Measurement(dict(job), [{"seconds": each} for each in seconds])
    for number, each in enumerate(seconds):
        bench.callback(key, number, {"seconds": each})


def sizing_case(bench: Bench, size: Size) -> None:
    """Passes on 1, 2 and 4 workers, on up to 8 that wait, and on stub workers, beside simulations.

    Workers share the cores of this machine, which the simulation knows. Beyond these, leaves wait
    for seconds drawn from the durations that were measured, instead of computing; and stub workers,
    hundreds in one process, show the scheduler at its limit.
    """
    rates = ClusterRates.measure()
    for rank in size.ranks:
        _computing(bench, size.rows, rank, rates)
    _waiting(bench, rates)
    _stubs(bench, rates)


def _computing(bench: Bench, rows: int, rank: int, rates: ClusterRates) -> None:
    at, store = f"sizing/rank {rank}", bench.folder / "sizing.zarr"
    write_uniform(store, rows, _D)
    kernel = kernels.Gaussian(float(rank ** (-1.0 / _D)))
    estimator = JointDistribution(
        kernel_x=kernel,
        kernel_y=kernel,
        tol=_TOL,
        max_rank=rank,
        n_folds=N_FOLDS,
        random_state=0,
    )
    cores = psutil.cpu_count() or 1
    fit = Fit(Rows(rows, _D, str(store)), "joint", kernel.to_dict(), _TOL, rank)
    simulated: dict[int, list[float]] = {workers: [] for workers in COMPUTING}
    for repeat in range(bench.repeats):
        # Rates of one worker, and the speed of a core while all are busy, of the same minute.
        alone, both = (_seconds_in_processes(estimator, store, count) for count in (1, cores))
        speed = min(alone / both, 1.0)
        plan: FitPlan | None = None
        for workers in COMPUTING:
            # One cluster at a time: idle workers keep the cores busy, too.
            with running_cluster(bench.folder / f"{rank}-{repeat}-{workers}", workers) as cluster:
                with connected(cluster.address) as client:
                    client.run(import_module, JointDistribution.__module__)
                    if plan is None:
                        tried = [
                            estimator.plan(str(store), scheduler=client) for _ in range(_TRIALS)
                        ]
                        plan = sorted(tried, key=_row_seconds)[_TRIALS // 2]
                simulated[workers].append(_simulated(plan, workers, cores, speed, rates))
                job = replace(fit, scheduler=cluster.address)
                bench.measure({f"{at}/{workers} workers": job}, repeat + 1)
    for workers, each in simulated.items():
        _compare(bench, f"{at}/{workers} workers", each, "pass_seconds")


def _row_seconds(plan: FitPlan) -> float:
    return plan.moment_pass.rates.computing


def _seconds_in_processes(estimator: JointDistribution, store: Path, count: int) -> float:
    """Seconds of a row in so many processes that compute at once."""
    plans = [
        estimator.plan(str(store), scheduler="processes", workers=count) for _ in range(_TRIALS)
    ]
    return float(np.median([_row_seconds(plan) for plan in plans]))


def _simulated(plan: FitPlan, workers: int, cores: int, speed: float, rates: ClusterRates) -> float:
    """Seconds of the pass of a plan on workers that share the cores of this machine."""
    assert plan.workload is not None
    chunk = plan.workload.extent.chunk_rows
    sizing = PassSizing(plan.moment_pass.rates, plan.workload, plan.rows, chunk, rates)
    runs, _ = sizing.cut(workers, 1, None)
    there = replace(
        sizing.cluster(workers, 1),
        workers_per_host=workers,
        cores_per_host=cores,
        full_speed=speed,
    )
    return simulate_pass(sizing.work(runs), there).seconds


def _cluster_of(rates: ClusterRates, workers: int, **changed: Any) -> SimulatedCluster:
    cluster = SimulatedCluster(
        workers,
        submit_seconds=rates.submit_seconds,
        task_seconds=rates.task_seconds,
        task_seconds_per_worker=rates.task_seconds_per_worker,
        client_seconds=rates.client_seconds,
        worker_seconds=rates.worker_seconds,
        latency=rates.latency,
        bandwidth=rates.bandwidth,
        worker_load=rates.worker_load,
    )
    return replace(cluster, **changed)


def _waiting(bench: Bench, rates: ClusterRates) -> None:
    rng = np.random.default_rng(0)
    for workers in WAITING:
        # One in a hundred takes five times as long.
        seconds = _WAIT * rng.lognormal(-0.02, 0.2, max(_PER_WORKER * workers, 64))
        seconds[rng.random(len(seconds)) < 0.01] *= 5.0
        with (
            running_cluster(bench.folder / f"{workers} waiting", workers) as cluster,
            connected(cluster.address) as client,
        ):
            run_waiting(client, [0.0] * (2 * workers))
            walls = [run_waiting(client, seconds.tolist()).wall for _ in range(bench.repeats)]
        waiting = _cluster_of(rates, workers, worker_load=0.0)  # waiting tasks need no core
        simulated = simulate_pass(PassWork(seconds.tolist()), waiting)
        key = f"sizing/waiting/{workers} workers"
        _record(bench, key, {"job": "waiting", "leaves": len(seconds)}, walls)
        _compare(bench, key, [simulated.seconds])


def _stubs(bench: Bench, rates: ClusterRates) -> None:
    """A real scheduler with hundreds of stub workers, whose tasks it hands out as fast as it can.

    Its processor seconds are compared: client and stub workers share the cores with it, and other
    work on the machine does not count.
    """
    for workers in STUBS:
        leaves = max(_STUB_LEAVES * workers, 2000)
        runs = [run_on_stubs(workers, leaves, _STUB_WAIT) for _ in range(bench.repeats)]
        cluster = _cluster_of(
            rates, workers, worker_seconds=0.0, worker_load=0.0, bandwidth=math.inf
        )
        simulated = simulate_pass(PassWork([_STUB_WAIT] * leaves), cluster)
        key = f"sizing/stubs/{workers} workers"
        busy = [run.busy[0] - run.first_busy[0] for run in runs]
        _record(bench, key, {"job": "stubs", "leaves": leaves}, [run.wall for run in runs])
        for run, seconds in zip(bench.measurements[key].runs, busy, strict=True):
            run["scheduler_seconds"] = seconds
        _record(bench, f"{key}, simulated", {"job": "simulation"}, [simulated.seconds])
        over = Term(number=simulated.tasks * cluster.service)
        bench.ratios.append(
            Ratio(
                "sizing/stubs",
                f"{workers} workers, processor seconds of the scheduler, simulated / real",
                [over],
                [Term(key, "scheduler_seconds")],
                at_least=1 - _CLOSE,
                at_most=1 + _CLOSE,
            )
        )
