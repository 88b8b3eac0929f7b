"""Fits on a real cluster, and of rows larger than the memory of its workers.

Fits on a real cluster: scheduler and workers in processes of their own, over TCP.

The pass of a fit on two workers is held against the same pass on two threads, against two processes
that each fit half of the rows and know nothing of each other, and against itself on a slow network.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from benchmarks.fits import Describe, Fit, Rows, write_uniform
from benchmarks.measure import Bench, Ratio, Size, Term, Together
from cme_dask import kernels
from cme_dask.cli.run_report import peak_of
from cme_dask.cli.tables import format_bytes
from cme_dask.errors import ResourceError
from cme_dask.passes.cluster import connected, described_workers
from cme_dask.passes.observing import want_of_memory

# Fits on a real cluster: scheduler and workers in processes of their own, over TCP


DELAY = 0.01
"""Seconds that each message takes longer on the slow network, each way."""

_D = 3
_TOL = 1e-6  # the kernels reach the requested rank long before it
_START_SECONDS = 60.0
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs.

    Attributes
    ----------
    address
        Of its scheduler, as the client sees it.
    workers
        Process numbers of the nannies; each has a worker for its child.
    """

    address: str
    workers: tuple[int, ...]


def worker_processes(nannies: Sequence[int]) -> list[psutil.Process]:
    """The worker processes: of what a nanny has started each is the largest."""
    children = (psutil.Process(number).children() for number in nannies)
    return [max(started, key=lambda child: child.memory_info().rss) for started in children]


@contextlib.contextmanager
def running_cluster(
    folder: Path, workers: int, *, memory_limit: str = "auto", delay: float = 0.0
) -> Iterator[Cluster]:
    """A scheduler and workers of one thread each, on this machine, for as long as it is used.

    Parameters
    ----------
    folder
        Takes their logs and what workers spill.
    workers
        Number of worker processes.
    memory_limit
        Of each, as ``dask worker`` takes it.
    delay
        Seconds by which all that goes to scheduler and workers, and comes back, is late.

    Raises
    ------
    ResourceError
        If they don't start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    common = ["--no-dashboard", "--dashboard-address", ":0"]
    with contextlib.ExitStack() as stack:
        known = folder / "scheduler.json"
        known.unlink(missing_ok=True)
        scheduler = ["scheduler", "--host", _HOST, "--port", "0", "--scheduler-file", str(known)]
        processes = [stack.enter_context(_dask([*scheduler, *common], folder / "scheduler.log"))]
        _wait_until(lambda: _address_in(known) != "", processes)
        address = _address_in(known)
        places = [["--host", _HOST]] * workers
        if delay:
            # Workers are known by the ports at which they are reached: those of a proxy.
            ports = [int(address.rpartition(":")[2]), *_free_ports(workers)]
            reached = stack.enter_context(_delayed(ports, delay))
            address, *contacts = (f"tcp://{_HOST}:{port}" for port in reached)
            places = [
                ["--listen-address", f"tcp://{_HOST}:{port}", "--contact-address", contact]
                for port, contact in zip(ports[1:], contacts, strict=True)
            ]
        for i, place in enumerate(places):
            worker = ["worker", address, "--nthreads", "1", "--memory-limit", memory_limit]
            worker += [*place, "--local-directory", str(folder / f"worker-{i}"), *common]
            processes.append(stack.enter_context(_dask(worker, folder / f"worker-{i}.log")))
        with connected(address) as client:
            assert client is not None
            assert not isinstance(client, str)
            _wait_until(lambda: len(described_workers(client)) == workers, processes)
        yield Cluster(address, tuple(process.pid for process in processes[1:]))


@contextlib.contextmanager
def _dask(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of one of Dask's commands; it ends with the block."""
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *arguments], stdout=said, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _delayed(ports: list[int], seconds: float) -> Iterator[list[int]]:
    """Ports that lead to these, only later."""
    command = [sys.executable, "-m", "benchmarks.delay", str(seconds)]
    command += [f"{_HOST}:{port}" for port in ports]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        yield json.loads(process.stdout.readline())
        process.stdin.close()


def _address_in(file: Path) -> str:
    """The address in the file of a scheduler; empty until that is written."""
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads(file.read_text())["address"])
    return ""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((_HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_until(ready: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for Dask's processes; ResourceError if one of them ends, or they take too long."""
    end = time.monotonic() + _START_SECONDS
    while not ready():
        if any(process.poll() is not None for process in processes):
            raise ResourceError("a Dask process ended while it was started: see its log")
        if time.monotonic() > end:
            raise ResourceError(f"Dask did not start within {_START_SECONDS:g} s: see its log")
        time.sleep(0.05)


def cluster_case(bench: Bench, size: Size) -> None:
    """The pass on workers beside threads, beside independent processes, and on a slow network.

    What is compared is the wall time of the moment pass of a joint fit from a store, from handing
    out its tasks to the sum in the client's hands; the seconds of whole fits, which choose their
    pivots in the client alone, are shown beside it. The control is the later of two independent
    fits of half of the rows.
    """
    store = bench.folder / "uniform.zarr"
    write_uniform(store, size.rows, _D)
    rows, w = Rows(size.rows, _D, str(store)), bench.workers
    with (
        running_cluster(bench.folder / "near", w) as near,
        running_cluster(bench.folder / "far", w, delay=DELAY) as far,
    ):
        for rank in size.ranks:
            _cluster_at(bench, rows, rank, near, far)


def _cluster_at(bench: Bench, rows: Rows, rank: int, near: Cluster, far: Cluster) -> None:
    at, w = f"cluster/rank {rank}", bench.workers
    kernel = kernels.Gaussian(float(rank ** (-1.0 / _D))).to_dict()
    whole = Fit(rows, "joint", kernel, _TOL, rank, workers=w)
    halves = (replace(whole, rows=replace(rows, share=(i, w)), workers=1) for i in range(w))
    threads, apart = f"{at}/{w} threads", f"{at}/{w} processes on shares"
    cluster, late = f"{at}/{w} workers", f"{at}/{w} workers, {DELAY * 1e3:g} ms away"
    bench.measure(
        {
            threads: whole,
            cluster: replace(whole, scheduler=near.address),
            apart: Together(tuple(halves)),
            late: replace(whole, scheduler=far.address),
        }
    )

    def ratio(
        name: str,
        over: str,
        under: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        inside, whole = (
            ([Term(over, quantity)], [Term(under, quantity)])
            for quantity in ("pass_seconds", "seconds")
        )
        bench.ratios.append(Ratio(at, f"pass, {name}", *inside, at_least, at_most))
        bench.ratios.append(Ratio(at, f"whole fit, {name}", *whole))

    ratio("rows/s of workers / independent processes", apart, cluster, at_least=0.9)
    ratio("workers / threads", cluster, threads, at_most=1.1)
    ratio(f"workers {DELAY * 1e3:g} ms away / near", late, cluster, at_most=1.15)


# A fit of rows that are many times larger than the memory of the workers that read them


WORKERS, MEMORY = 2, "1GB"
"""Worker processes of one thread, and the memory of each."""

_D_LARGE = 13  # columns of x, and of y: 10^8 rows of float64 are 20.8 GB
_TOL_LARGE = 1e-6
_FREE = 1.2  # times what the rows take


@dataclass(frozen=True)
class WatchedFit:
    """A fit on a fresh cluster of this machine, and what its workers took for it.

    Parameters
    ----------
    fit
        On the cluster.
    workers
        Process numbers of the nannies.
    """

    fit: Fit
    workers: tuple[int, ...]

    def prepare(self) -> Callable[[], Describe]:
        """The fit's own preparation."""
        return partial(self._run, self.fit.prepare())

    def _run(self, run: Callable[[], Describe]) -> Describe:
        describe = run()
        peaks = [peak_of(worker, shared=True) for worker in worker_processes(self.workers)]
        with connected(self.fit.scheduler) as client:
            short = want_of_memory(client)
        result = {"worker_bytes": peaks, "worker_peak": max(peaks), **asdict(short)}
        return lambda: {**describe(), **result}


def large_case(bench: Bench, size: Size) -> None:
    """A joint fit on two workers of 1 GB: no spilling, no pause, and the memory that was predicted.

    A worker's peak is the system's high-water mark of its resident set; what was predicted is what
    the fit was held to before it began. Bytes that workers ever wrote to disk count as
    spilled, however briefly they were there.
    """
    store = _store(bench, size.rows)
    rows = Rows(size.rows, _D_LARGE, str(store))
    with running_cluster(bench.folder / "large", WORKERS, memory_limit=MEMORY) as cluster:
        for rank in size.ranks:
            at = f"large/rank {rank}"
            key = f"{at}/{WORKERS} workers of {MEMORY}"
            kernel = kernels.Gaussian(2.0 * rank ** (-1.0 / _D_LARGE)).to_dict()
            fit = Fit(rows, "joint", kernel, _TOL_LARGE, rank, scheduler=cluster.address)
            bench.measure({key: WatchedFit(fit, cluster.workers)}, 1)
            peak, predicted = Term(key, "worker_peak"), Term(key, "predicted_bytes")
            name = "memory of a worker, predicted / measured"
            bench.ratios += [
                Ratio(at, f"{name}, at least", [predicted], [peak], at_least=0.75),
                Ratio(at, f"{name}, at most", [predicted], [peak], at_most=1.25),
                Ratio(at, "bytes spilled", [Term(key, "spilled")], [Term()], at_most=0.0),
                Ratio(at, "workers paused", [Term(key, "pauses")], [Term()], at_most=0.0),
            ]


def _store(bench: Bench, rows: int) -> Path:
    """The rows, made unless they lie there from an earlier run."""
    store = bench.stores / f"uniform-{rows}-{_D_LARGE}.zarr"
    if not store.exists():
        need = _FREE * 2 * _D_LARGE * 8 * rows
        free = shutil.disk_usage(bench.stores).free
        if free < need:
            raise ResourceError(
                f"{rows:,} rows need {format_bytes(need)} of disk in {bench.stores}, where "
                f"{format_bytes(free)} are free: fewer rows (--rows), or another folder (--dir)"
            )
        write_uniform(store, rows, _D_LARGE)
    return store
