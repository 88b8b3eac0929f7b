"""Sizing of a cluster: the plan of a fit, scaled to more rows, on workers that are simulated."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cme_dask.data.store import brief
from cme_dask.data.writer import CHUNK_BYTES
from cme_dask.errors import DataError, option, remedy
from cme_dask.estimators.planning import FitPlan, PassWorkload
from cme_dask.kernels.base import check_integer, check_number
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.numerics.reduction import MAX_STRIP, RowRange, strip_length
from cme_dask.passes.cost import PassCost, StripTimes
from cme_dask.passes.driver import A_WORKER, Executor, memory_bytes, worker_base_bytes
from cme_dask.passes.rates import ClusterRates
from cme_dask.passes.run import plan_pass
from cme_dask.passes.simulation import (
    PassWork,
    SimulatedCluster,
    Simulation,
    check_spread,
    check_stragglers,
    simulate_pass,
)

SPILL = 0.7
"""Share of a worker's memory that it fills before it begins to spill, by Dask's default."""

SLOW = 0.01, 5.0
"""Share of stragglers, and how many times as long they take, at the upper end of the range."""

_AMPLE = 1 << 62  # bytes that no plan reaches
_NEAR = 1.03  # times the shortest seconds: layouts within it are equally good
_MOST_THREADS = 16
_MOST_WORKERS = 100_000  # a limit beyond it is none
_STEPS = 0.25, 0.5, 1.0, 2.0, 4.0  # numbers of workers beside the requested one
_PIECES, _PIECE = 60, 300  # of work whose durations are compared, and their order
_MEMORY_UNIT = 1 << 28


class ClusterMemory(NamedTuple):
    """Predicted peaks in bytes, and the memory limit of a worker that holds its peak unspilled."""

    worker: int
    client: int
    worker_limit: int


@dataclass(frozen=True)
class ClusterLayout:
    """Workers of a cluster, and what the pass would take on them.

    Attributes
    ----------
    workers, threads
        Worker processes, and threads of each.
    seconds
        Of the simulated pass.
    scheduler_busy
        Share of it for which the scheduler was busy.
    memory
        Predicted peak of a worker.
    """

    workers: int
    threads: int
    seconds: float
    scheduler_busy: float
    memory: int


@dataclass(frozen=True)
class ClusterPlan:
    """What a fit would take on a cluster.

    Parameters
    ----------
    fit
        The plan of the fit at these rows, whose pass is that of the cluster.
    workers, threads, chunk_rows
        Worker processes, threads of each, and rows of a chunk of the store.
    simulation
        The simulated pass.
    seconds
        Of the whole fit: expected, least and most.
    stages
        Seconds of each step of the fit: expected, least and most.
    memory
        Of a worker and of the client.
    bytes_read, bytes_sent
        By the workers from the store; between workers, and to the client.
    tasks_per_second
        Most that the scheduler handles with these workers.
    limit_workers
        Workers of so many threads that keep the scheduler busy all the time, by its measured rate:
        more are no faster. Numbers above 100,000 stand for no limit.
    sweep
        The pass on fewer and on more workers.
    layouts
        The same number of threads in fewer and in more processes.
    recommended
        The best of these.
    rates
        What the simulation was given.
    """

    fit: FitPlan
    workers: int
    threads: int
    chunk_rows: int
    simulation: Simulation
    seconds: tuple[float, float, float]
    stages: dict[str, tuple[float, float, float]]
    memory: ClusterMemory
    bytes_read: int
    bytes_sent: int
    tasks_per_second: float
    limit_workers: int
    sweep: tuple[ClusterLayout, ...]
    layouts: tuple[ClusterLayout, ...]
    recommended: ClusterLayout
    rates: ClusterRates

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "rows": self.fit.rows,
            "workers": self.workers,
            "threads_per_worker": self.threads,
            "chunk_rows": self.chunk_rows,
            "passes": self.fit.passes,
            "rounds": None if self.fit.in_rounds else 0,
            "seconds": list(self.seconds),
            "stages": {name: list(values) for name, values in self.stages.items()},
            "pass": self.simulation._asdict(),
            "memory": self.memory._asdict(),
            "bytes_read": self.bytes_read,
            "bytes_sent": self.bytes_sent,
            "tasks_per_second": self.tasks_per_second,
            "limit_workers": self.limit_workers,
            "sweep": [asdict(each) for each in self.sweep],
            "layouts": [asdict(each) for each in self.layouts],
            "recommended": asdict(self.recommended),
            "rates": self.rates.to_dict(),
        }


def plan_cluster(
    plan: FitPlan,
    workers: int,
    *,
    rows: float | None = None,
    threads_per_worker: int | None = None,
    chunk_rows: int | None = None,
    memory_per_worker: str | int | None = None,
    rates: ClusterRates | None = None,
    read_rate: float | None = None,
    file_system: float | None = None,
    spread: Sequence[float] | None = None,
    stragglers: tuple[float, float] = (0.0, 1.0),
    seed: int = 0,
) -> ClusterPlan:
    """What the fit of a plan would take on a cluster that is not there, at any number of rows.

    The plan has the times of its strips, of the search and of the solution as they were measured
    where it was made. The pass is cut for these rows and workers as a fit would cut it, and its
    graph is simulated: the scheduler, threads, transfers, and tasks that take longer than others.

    Parameters
    ----------
    plan
        Of :meth:`cme_dask.JointDistribution.plan` and the same method of other estimators, for the
        same columns and parameters: from any part of the rows that fills the row sample.
    workers
        Worker processes.
    rows
        Number of rows; default that of the plan.
    threads_per_worker
        Threads of each; default 1. The recommended layout has this number if it is given.
    chunk_rows
        Rows of a chunk of the store, of which no chunk has more than ``rows``; default that of the
        plan, or of rows in memory what ``ingest`` would choose.
    memory_per_worker
        Bytes of each worker ("8GiB"), for a refusal if these do not suffice; default any number.
    rates
        Of scheduler, client and messages; default: measured here, in about 20 seconds.
    read_rate
        Bytes per second, before compression, that one thread reads at most; default as the strips
        of the plan were read.
    file_system
        Bytes per second, before compression, that all workers together read; default no limit.
    spread
        Factors of the durations of tasks; default: measured here, in about a second.
    stragglers
        A share of tasks, and how many times as long these take.
    seed
        Of the durations.

    Returns
    -------
    ClusterPlan

    Raises
    ------
    DataError
        If an argument is of another kind, or a number out of range.
    ResourceError
        If a worker would not have enough memory, or rates can't be measured.
    """
    if not isinstance(plan, FitPlan):
        raise DataError(
            f"plan must be what the method plan() of an estimator returns, got {brief(repr(plan))}"
        )
    if plan.workload is None:
        raise DataError("this plan has no pass: give one that the method plan() of a fit returned")
    if rates is not None and not isinstance(rates, ClusterRates):
        raise DataError(f"rates must be cme_dask.ClusterRates, got {brief(repr(rates))}")
    # All are checked before rates are measured, which takes a while.
    workers = _whole("workers", workers)
    rows = plan.rows if rows is None else _whole("rows", rows)
    threads = None
    if threads_per_worker is not None:
        threads = _whole("threads_per_worker", threads_per_worker)
    if chunk_rows is None:
        chunk_rows = _chunk_rows(plan.workload)
    chunk_rows = min(_whole("chunk_rows", chunk_rows), rows)  # no task holds more rows than these
    memory = memory_bytes(memory_per_worker, "memory_per_worker")
    reading = math.inf if read_rate is None else check_number(option("read_rate"), read_rate)
    shared = math.inf
    if file_system is not None:
        shared = check_number(remedy("file_system", "--file-system-rate"), file_system)
    stragglers = check_stragglers(stragglers)
    factors = None if spread is None else check_spread(spread)
    seed = check_integer(option("seed"), seed, 0)
    sizing = PassSizing(
        plan.moment_pass.rates,
        plan.workload,
        rows,
        chunk_rows,
        ClusterRates.measure(workers) if rates is None else rates,
        reading,
        shared,
        measure_spread() if factors is None else factors,
        stragglers,
        seed,
    )
    return _plan(plan, sizing, workers, threads, memory)


def _whole(name: str, value: Any) -> int:
    """A number of at least 1 as an integer; 1e9 is one, too."""
    if isinstance(value, (float, np.floating)) and value.is_integer():
        value = int(value)
    return check_integer(option(name), value, 1)


def measure_spread() -> tuple[float, ...]:
    """Durations of equal pieces of work on one core of this machine, over their mean."""
    matrix = np.random.default_rng(0).random((_PIECE, _PIECE))
    seconds = []
    with one_blas_thread():
        for _ in range(_PIECES):
            begin = time.perf_counter()
            for _ in range(4):
                matrix @ matrix
            seconds.append(time.perf_counter() - begin)
    values: list[float] = (np.array(seconds) / np.mean(seconds)).tolist()
    return tuple(values)


def _chunk_rows(workload: PassWorkload) -> int:
    """Rows of a chunk: those of the plan, or of rows in memory what ``ingest`` would choose."""
    widest = max(workload.extent.n_columns - 1, 1)
    fitting = 1 << ((CHUNK_BYTES // (8 * widest)).bit_length() - 1)
    return workload.extent.chunk_rows or min(fitting, MAX_STRIP)


class RangedPass(NamedTuple):
    """A pass on a cluster.

    Attributes
    ----------
    simulation
        What is expected.
    costs
        Its time: expected, least and most.
    factors
        Of the durations of tasks, at the least and at the most.
    memory
        Predicted peaks.
    """

    simulation: Simulation
    costs: tuple[PassCost, ...]
    factors: tuple[float, float]
    memory: ClusterMemory


def _plan(
    fit: FitPlan,
    sizing: "PassSizing",
    workers: int,
    threads: int | None,
    memory_limit: int | None,
) -> ClusterPlan:
    """The plan of a cluster, with others beside it."""
    each = threads or 1
    fits, passes = _on_cluster(fit, sizing, workers, each, memory_limit)
    stages, seconds = _stages(fits, passes[0].factors)
    sweep = sizing.beside(sorted({(max(round(workers * s), 1), each) for s in _STEPS}))
    pairs = {(workers, each)}
    if threads is None:
        pairs |= {
            (workers // k, k)
            for k in (1, 2, 4, 8, _MOST_THREADS)
            if workers % k == 0 and workers > k
        }
    layouts = sizing.beside(sorted(pairs, reverse=True))
    best = min(layout.seconds for layout in layouts)
    good = [layout for layout in layouts if layout.seconds <= _NEAR * best]
    recommended = good[0]  # of the fewest threads in a process
    # Fewer workers, if more of them do not help.
    fewer = [one for one in sweep if one.threads == recommended.threads]
    fewer = [one for one in fewer if one.workers < recommended.workers]
    fewer = [one for one in fewer if one.seconds <= _NEAR * recommended.seconds]
    # Passes without a workload of their own read as much as the first.
    read = [one.costs[0].bytes_read for one in passes]
    return ClusterPlan(
        fit=fits[0],
        workers=workers,
        threads=each,
        chunk_rows=sizing.chunk_rows,
        simulation=passes[0].simulation,
        seconds=seconds,
        stages=stages,
        memory=ClusterMemory(
            *(max(sizes) for sizes in zip(*(p.memory for p in passes), strict=True))
        ),
        bytes_read=sum(read) + read[0] * (fit.passes - len(passes)),
        bytes_sent=int(sum(one.simulation.sent_bytes for one in passes)),
        tasks_per_second=sizing.rates.tasks_per_second(workers),
        limit_workers=sizing.limit_workers(workers, each),
        sweep=tuple(sweep),
        layouts=tuple(layouts),
        recommended=min(fewer, key=lambda one: one.workers) if fewer else recommended,
        rates=sizing.rates,
    )


def _on_cluster(
    fit: FitPlan, sizing: "PassSizing", workers: int, threads: int, memory_limit: int | None
) -> tuple[list[FitPlan], list[RangedPass]]:
    """The plan of a fit with its passes there: expected, least and most; and these passes."""
    first = sizing.ranged(workers, threads, memory_limit)
    fits = [replace(fit, scheduler="distributed", moment_pass=cost) for cost in first.costs]
    passes = [first]
    if fit.further_pass is not None and fit.further_workload is not None:
        again = sizing.of(fit.further_pass, fit.further_workload)
        passes.append(again.ranged(workers, threads, memory_limit))
        fits = [
            replace(one, further_pass=cost)
            for one, cost in zip(fits, passes[-1].costs, strict=True)
        ]
    if fit.second is not None and fit.second.workload is not None:
        again = sizing.of(fit.second.moment_pass, fit.second.workload)
        seconds, others = _on_cluster(fit.second, again, workers, threads, memory_limit)
        passes += others
        fits = [replace(one, second=second) for one, second in zip(fits, seconds, strict=True)]
    return fits, passes


def _stages(
    fits: Sequence[FitPlan], factors: Sequence[float]
) -> tuple[dict[str, tuple[float, float, float]], tuple[float, float, float]]:
    """Seconds of each step and of all: expected, least, most."""
    expected, least, most = fits
    stages = {}
    for name, value in expected.parts.items():
        low, high = (
            (least.parts[name], most.parts[name])
            if name.startswith("pass") or name.startswith("location model")
            else (value * factors[0], value * factors[1])
        )
        stages[name] = value, min(value, low), max(value, high)
    if expected.residual == "auto":
        stages["location model, if it pays"] = (0.0, 0.0, most.residual_seconds[1])
    each = np.array(list(stages.values())).sum(axis=0).tolist()
    return stages, (each[0], each[1], each[2])


@dataclass(frozen=True, eq=False)
class PassSizing:
    """A pass over so many rows, and the rates of a cluster; the cluster itself varies."""

    strip_rates: StripTimes
    workload: PassWorkload
    rows: int
    chunk_rows: int
    rates: ClusterRates
    read_rate: float = math.inf
    file_system: float = math.inf
    spread: tuple[float, ...] = (1.0,)
    stragglers: tuple[float, float] = (0.0, 1.0)
    seed: int = 0

    def of(self, measured: PassCost, workload: PassWorkload) -> "PassSizing":
        """Another pass over these rows."""
        return replace(self, strip_rates=measured.rates, workload=workload)

    def ranged(self, workers: int, threads: int, memory_limit: int | None) -> RangedPass:
        """The pass with the durations that were measured, with short ones and with long ones."""
        runs, memory = self.cut(workers, threads, memory_limit)
        work, there = self.work(runs), self.cluster(workers, threads)
        slow, fast = np.quantile(self.spread, [0.9, 0.1])
        simulations = [simulate_pass(work, there, self.seed)]
        share, times = np.maximum(self.stragglers, SLOW).tolist()
        for factor, stragglers in ((fast, (0.0, 1.0)), (slow, (share, times))):
            scaled = replace(work, leaf_seconds=(np.array(work.leaf_seconds) * factor).tolist())
            end = replace(there, spread=(1.0,), stragglers=stragglers)
            simulations.append(simulate_pass(scaled, end, self.seed))
        factors = float(fast), float(slow)
        costs = tuple(
            self.scaled(one, runs, workers * threads, factor)
            for factor, one in zip((1.0, *factors), simulations, strict=True)
        )
        return RangedPass(simulations[0], costs, factors, memory)

    def beside(self, pairs: Sequence[tuple[int, int]]) -> list[ClusterLayout]:
        """The pass on other numbers of workers and threads."""
        layouts = []
        for workers, threads in pairs:
            runs, memory = self.cut(workers, threads, None)
            one = simulate_pass(self.work(runs), self.cluster(workers, threads), self.seed)
            layouts.append(
                ClusterLayout(workers, threads, one.seconds, one.scheduler_busy, memory.worker)
            )
        return layouts

    def cut(
        self, workers: int, threads: int, memory_limit: int | None
    ) -> tuple[list[RowRange], ClusterMemory]:
        """The tasks of the pass, and the memory that it needs, by the rule of fits."""
        extent = self.workload.extent._replace(
            n_rows=self.rows,
            strip_rows=strip_length(self.rows),
            chunk_rows=self.chunk_rows,
            in_memory=0,
            materialised=False,
        )
        cost = self.workload.cost(extent)

        def predicted(worker: int, client: int) -> tuple[list[RowRange], int, str]:
            executor = Executor(
                "distributed",
                workers * threads,
                memory=client,
                worker_memory=((threads, worker),),
                worker_resident=worker_base_bytes(),
                worker_share=SPILL,
            )
            runs, plan = plan_pass(cost, extent, executor)
            return runs, plan.predicted, plan.place

        runs, worker, place = predicted(_AMPLE >> 8, _AMPLE)
        assert place == A_WORKER
        _, client, _ = predicted(_AMPLE, _AMPLE >> 8)
        if memory_limit is not None:
            predicted(max(int(SPILL * memory_limit), 1), sys.maxsize)  # raises, with what to lower
        limit = math.ceil(worker / SPILL / _MEMORY_UNIT) * _MEMORY_UNIT
        return runs, ClusterMemory(worker, client, limit)

    def bytes_read(self, runs: Sequence[RowRange]) -> int:
        """Bytes of the chunks that the tasks read, before compression."""
        return sum(self._rows_read(run) for run in runs) * self.workload.row_bytes

    def _rows_read(self, run: RowRange) -> int:
        chunk = self.chunk_rows
        return min(-(-run.stop // chunk) * chunk, self.rows) - run.start // chunk * chunk

    def work(self, runs: Sequence[RowRange]) -> PassWork:
        """The tasks of the pass with their seconds, by the measured rates."""
        rates, row_bytes = self.strip_rates, self.workload.row_bytes
        seconds = []
        for run in runs:
            size = self._rows_read(run) * row_bytes
            computing = (run.stop - run.start) * rates.computing + run.strips * rates.empty
            seconds.append(max(computing + size * rates.reading, size / self.read_rate))
        return PassWork(
            seconds,
            rates.merge,
            self.bytes_read(runs) / len(runs),
            rates.result_bytes,
            self.workload.shared_bytes,
        )

    def cluster(self, workers: int, threads: int) -> SimulatedCluster:
        """The simulated cluster."""
        rates = self.rates
        return SimulatedCluster(
            workers,
            threads,
            submit_seconds=rates.submit_seconds,
            task_seconds=rates.task_seconds,
            task_seconds_per_worker=rates.task_seconds_per_worker,
            client_seconds=rates.client_seconds,
            worker_seconds=rates.worker_seconds,
            latency=rates.latency,
            bandwidth=rates.bandwidth,
            worker_load=rates.worker_load,
            file_system=self.file_system,
            spread=self.spread,
            stragglers=self.stragglers,
        )

    def scaled(
        self, one: Simulation, runs: Sequence[RowRange], threads: int, factor: float
    ) -> PassCost:
        """The time of the pass by parts; what is no work of threads is scheduling."""
        rates, strips = self.strip_rates, sum(run.strips for run in runs)
        busy = min(threads, len(runs))
        read = self.bytes_read(runs)
        computing = self.rows * rates.computing * factor / busy
        sums = (strips * rates.empty + (len(runs) - 1) * rates.merge) * factor / busy
        reading = read * rates.reading * factor / busy
        if read / self.read_rate / busy > computing + reading + sums:
            reading = read / self.read_rate / busy - computing - sums
        reading = max(reading, read / self.file_system - computing - sums)
        return PassCost(
            rows=self.rows,
            tasks=len(runs),
            strips=strips,
            workers=threads,
            bytes_read=read,
            computing=computing,
            reading=reading,
            sums=sums,
            scheduling=max(one.seconds - computing - reading - sums, 0.0),
            rates=rates,
        )

    def limit_workers(self, workers: int, threads: int) -> int:
        """The least number of workers whose tasks take all of the scheduler's time.

        W workers of T threads end 2 W T / t tasks per second, t the seconds of a leaf and a merge,
        and each of them takes a + b W seconds of the scheduler. The leaves are shorter for more
        workers.
        """

        def share(count: int) -> float:
            runs, _ = self.cut(count, threads, None)
            work = self.work(runs[:1])
            there = self.cluster(count, threads)
            cycle = work.leaf_seconds[0] + work.merge_seconds + 2 * there.worker_seconds
            cycle /= 1.0 - there.beside / threads
            busy = min(count * threads, len(runs))
            return 2 * busy / cycle / self.rates.tasks_per_second(count)

        low, high = 0, workers
        while share(high) < 1.0:
            if high > _MOST_WORKERS:
                return high
            low, high = high, 2 * high
        while high - low > max(high // 50, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if share(middle) < 1.0 else (low, middle)
        return high
