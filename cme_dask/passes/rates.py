"""Rates of a cluster's scheduler, client and messages, measured in seconds on this machine.

A scheduler in a process of its own meets as many stub workers as are planned, up to 400, which only
wait: its time for a task is seen at that number of workers, without their hosts. Times of scheduler
and client are those of their processors, so that other work on the machine does not count. A real
worker tells how long a task takes beside its own work, and what messages take.
"""

import contextlib
import functools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import psutil
from distributed import Client

from cme_dask.errors import DataError, ResourceError
from cme_dask.passes.cluster import ClusterRun
from cme_dask.passes.driver import task_graph

MOST_STUBS = 400
"""Stub workers that are started, at most."""

_START_SECONDS = 60.0
_STUB_LEAVES = 1500
_FEW_STUBS = 32
_LEAVES, _LEAF_SECONDS = 150, 0.01  # on a real worker
_LINKS = 40  # of a chain of tasks
_BLOB = 64 << 20
_IDLE_SECONDS = 3.0
_REPEATS = 2


@dataclass(frozen=True)
class ClusterRates:
    """Times of a cluster beside those of the tasks themselves, in seconds.

    Parameters
    ----------
    submit_seconds
        For each task, before the first one starts: the client makes the graph, the scheduler reads
        it.
    task_seconds, task_seconds_per_worker
        Of the scheduler for a task that runs: a constant, and a part for each worker.
    client_seconds
        Of the client for the news of a task.
    worker_seconds
        For which a task holds its thread beside its own work.
    latency
        Of a message, one way.
    bandwidth
        Bytes per second that a worker sends.
    worker_load
        Share of a core that a worker of one thread and its nanny take beside tasks: heartbeats,
        profile.
    """

    submit_seconds: float
    task_seconds: float
    task_seconds_per_worker: float
    client_seconds: float
    worker_seconds: float
    latency: float
    bandwidth: float
    worker_load: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, (int, float)) and value >= 0 and math.isfinite(value)):
                raise DataError(
                    f"{field.name} must be a number of at least 0, got {value!r}: measure the "
                    "rates again, or correct it"
                )
        if self.bandwidth <= 0:
            raise DataError("bandwidth must be positive, in bytes per second")
        if self.worker_load >= 1:
            raise DataError("worker_load must be below 1, a share of a core")

    def tasks_per_second(self, workers: int) -> float:
        """Tasks that the scheduler handles per second.

        Parameters
        ----------
        workers
            Workers that are connected to it.
        """
        service = self.task_seconds + self.task_seconds_per_worker * workers
        return 1.0 / service if service else math.inf

    def to_dict(self) -> dict[str, float]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def measure(cls, workers: int = MOST_STUBS) -> "ClusterRates":
        """The rates of a cluster of so many workers, measured here in about 20 seconds.

        Parameters
        ----------
        workers
            Workers that are planned. The scheduler's time for a task is measured with 32 stub
            workers and with this many, between 128 and 400, and is linear in their number.

        Raises
        ------
        ResourceError
            If scheduler or workers do not start.
        """
        return measure_rates(workers)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ClusterRates":
        """The rates of :meth:`to_dict`.

        Parameters
        ----------
        values
            Rates by name; those of earlier versions have no load of workers.

        Raises
        ------
        DataError
            If one is missing, unknown or no rate.
        """
        names = {field.name for field in fields(cls)}
        wrong = names.symmetric_difference(values)
        if wrong - ({"worker_load"} - set(values)):
            raise DataError(
                f"rates of a cluster are {', '.join(sorted(names))}; missing or unknown: "
                f"{', '.join(sorted(wrong))}"
            )
        return cls(**values)


@dataclass(frozen=True)
class _StubTimes:
    """Processor seconds for each task."""

    submit: float
    task: float
    client: float


def measure_rates(workers: int = MOST_STUBS) -> ClusterRates:
    """See :meth:`ClusterRates.measure`."""
    many = min(max(workers, 4 * _FEW_STUBS), MOST_STUBS)
    few_times, many_times = (_stub_times(count) for count in (_FEW_STUBS, many))
    slope = max(many_times.task - few_times.task, 0.0) / (many - _FEW_STUBS)
    worker_seconds, latency, bandwidth, load = _worker_times()
    return ClusterRates(
        submit_seconds=(few_times.submit + many_times.submit) / 2.0,
        task_seconds=max(few_times.task - slope * _FEW_STUBS, 1e-6),
        task_seconds_per_worker=slope,
        client_seconds=(few_times.client + many_times.client) / 2.0,
        worker_seconds=worker_seconds,
        latency=latency,
        bandwidth=bandwidth,
        worker_load=load,
    )


@contextlib.contextmanager
def _started(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of this interpreter, which ends with the block."""
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def _scheduler(folder: Path) -> Iterator[str]:
    """A scheduler on a free port of this machine, and its address."""
    about = folder / "scheduler.json"
    arguments = ["dask", "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    arguments += ["--dashboard-address", ":0", "--scheduler-file", str(about)]
    with _started(arguments, folder / "scheduler.log") as process:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and process.poll() is None:
            # The file is there before it is complete.
            with contextlib.suppress(OSError, ValueError, KeyError):
                yield json.loads(about.read_text())["address"]
                return
            time.sleep(0.05)
        raise ResourceError(
            f"a Dask scheduler did not start within {_START_SECONDS:g} s, which rates are measured "
            "on: give the rates of an earlier measurement"
        )


def _leaf(_: Any, seconds: float) -> None:
    time.sleep(seconds)


def _merge(_: Any, a: Any, b: Any) -> None:
    pass


class WaitingRun(NamedTuple):
    """What a run of tasks that wait took.

    Attributes
    ----------
    first, wall
        Seconds until the first leaf had ended, and until all had.
    first_busy, busy
        Processor seconds of scheduler and client, until then.
    """

    first: float
    wall: float
    first_busy: tuple[float, float]
    busy: tuple[float, float]


def run_waiting(client: Client, seconds: Sequence[float], *, fetched: bool = True) -> WaitingRun:
    """Run the graph of a pass whose leaves wait.

    Parameters
    ----------
    client
        Of a cluster that does nothing else.
    seconds
        For which each leaf waits.
    fetched
        Whether the sum comes to the client; stub workers have none.
    """
    token, marks = uuid4().hex, list[tuple[float, float, float]]()
    leaves, payloads = len(seconds), [(each,) for each in seconds]
    graph = functools.partial(task_graph, _leaf, payloads, _merge, None, "waiting", token)
    scheduler, own = client.run_on_scheduler(time.process_time), time.process_time()
    begin = time.perf_counter()

    def mark(_: int) -> None:
        if not marks:
            now = time.perf_counter() - begin
            busy = client.run_on_scheduler(time.process_time) - scheduler
            marks.append((now, busy, time.process_time() - own))

    run = ClusterRun(client, graph, leaves, (_leaf.__name__, _merge.__name__), token, mark)
    if fetched:
        run.result()
    else:
        run.wait()
    wall = time.perf_counter() - begin
    busy = client.run_on_scheduler(time.process_time) - scheduler
    return WaitingRun(marks[0][0], wall, marks[0][1:], (busy, time.process_time() - own))


def run_on_stubs(count: int, leaves: int, seconds: float) -> WaitingRun:
    """Run so many leaves on so many stub workers, each of which waits for so many seconds.

    Raises
    ------
    ResourceError
        If the workers can't register with a scheduler of this version of Dask.
    """
    with tempfile.TemporaryDirectory() as name, _scheduler(Path(name)) as address:
        log = Path(name) / "stubs.log"
        arguments = ["cme_dask.passes.stub_workers", address, str(count), str(seconds), "0", "0"]
        with _started(arguments, log) as stubs:
            if stubs.stdout is None or stubs.stdout.readline().strip() != "ready":
                said = log.read_text().strip().splitlines()[-1:]
                raise ResourceError(
                    "stub workers could not register with a scheduler of this version of Dask "
                    f"({' '.join(said)}): give the rates of an earlier measurement"
                )
            with Client(address, set_as_default=False) as client:
                run_waiting(client, [0.0] * 10, fetched=False)
                return run_waiting(client, [0.0] * leaves, fetched=False)


def _stub_times(count: int) -> _StubTimes:
    """Processor seconds of scheduler and client for each task, with so many stub workers."""
    leaves = max(_STUB_LEAVES, 3 * count)
    run = run_on_stubs(count, leaves, 0.001)
    tasks = 2 * leaves - 1
    return _StubTimes(
        sum(run.first_busy) / tasks,
        (run.busy[0] - run.first_busy[0]) / tasks,
        (run.busy[1] - run.first_busy[1]) / tasks,
    )


def _worker_times() -> tuple[float, float, float, float]:
    """Overhead of a task, latency of a message, bytes per second and load of one worker."""
    with tempfile.TemporaryDirectory() as name, _scheduler(Path(name)) as address:
        arguments = ["dask", "worker", address, "--nthreads", "1", "--no-dashboard"]
        arguments += ["--dashboard-address", ":0", "--local-directory", name]
        with (
            _started(arguments, Path(name) / "worker.log") as process,
            Client(address, set_as_default=False) as client,
        ):
            try:
                client.wait_for_workers(1, _START_SECONDS)
            except TimeoutError as error:
                raise ResourceError(
                    f"a Dask worker did not start within {_START_SECONDS:g} s, which rates are "
                    "measured on: give the rates of an earlier measurement"
                ) from error
            run_waiting(client, [0.0] * 20)
            runs = [run_waiting(client, [_LEAF_SECONDS] * _LEAVES) for _ in range(_REPEATS)]
            held = min(run.wall - run.first for run in runs) / (2 * _LEAVES - 1)
            overhead = max(held - _LEAF_SECONDS * _LEAVES / (2 * _LEAVES - 1), 0.0)
            link = min(_chain(client) for _ in range(_REPEATS))
            blob = client.submit(np.zeros, _BLOB // 8, pure=False)
            blob.result()
            seconds = min(_timed(blob.result) for _ in range(_REPEATS))
            load = _load_of(psutil.Process(process.pid))
    return overhead, max(link - overhead, 0.0) / 2.0, _BLOB / seconds, load


def _load_of(parent: psutil.Process) -> float:
    """Share of a core that an idle process and its children take."""
    processes = [parent, *parent.children(recursive=True)]

    def busy() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before, begin = busy(), time.monotonic()
    time.sleep(_IDLE_SECONDS)
    return (busy() - before) / (time.monotonic() - begin)


def _chain(client: Client) -> float:
    """Seconds of a task that waits for the one before it, with the way to the scheduler and back.

    All tasks are there before the first one starts.
    """
    begin = client.submit(time.sleep, 1.0, pure=False)
    last = begin
    for _ in range(_LINKS):
        last = client.submit(_link, last, pure=False)
    began = begin.result()
    del began
    start = time.perf_counter()
    last.result()
    return (time.perf_counter() - start) / (_LINKS + 1)


def _link(value: Any) -> Any:
    return value


def _timed(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
