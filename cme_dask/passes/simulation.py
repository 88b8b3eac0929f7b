"""A simulated pass: the scheduler, workers, network and file system of a cluster, event by event.

The graph is that of :func:`cme_dask.passes.driver.task_graph`: a plan that every task needs, a leaf
for each run of rows, and the merges of a binary tree. Modelled are

* the client and the scheduler, which take time for each task before the first one starts;
* the scheduler as one server with a queue, whose service time for a task grows with the number of
  workers, since all of them hold the plan on which a task depends;
* its queue of leaves (``worker-saturation``): a worker of T threads gets ceil(1.1 T) tasks, and a
  further leaf when one has ended; a merge goes to the worker that ended the later of its parts;
* threads that take tasks by priority, a merge as soon as its parts are there; on hosts with fewer
  cores than running threads, all of these are slower, and workers take some of the cores' time for
  themselves;
* transfers: the plan to each worker, and the part of a merge that lies on another worker, one after
  the other from each sender;
* a shared file system, whose bandwidth all leaves use together while they compute;
* durations that differ: each task takes its mean times a draw from a measured distribution.

Not modelled: work stealing, which does not touch queued leaves; workers that fail; spilling.

A queue of events in a heap takes some 10 microseconds for a task; simulation libraries, whose
processes are generators, take several times as long and would add nothing here.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cme_dask.errors import DataError, option
from cme_dask.numerics.reduction import tree_merges

SATURATION = 1.1
"""Tasks that a worker is given for each of its threads: Dask's ``worker-saturation``."""

_MESSAGE, _READY, _DONE, _HOST = range(4)  # kinds of events


def _check_amount(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise DataError(f"{name} must be finite and at least 0, got {value!r}")


@dataclass(frozen=True)
class PassWork:
    """The tasks of a pass, and the mean seconds of each.

    Parameters
    ----------
    leaf_seconds
        Of each leaf, in the order of the rows, with the time for which it waits for its own reads.
    merge_seconds
        Of a merge.
    read_bytes
        That each leaf takes from the shared file system.
    result_bytes
        Of a partial result.
    plan_bytes
        Of what all tasks share.
    """

    leaf_seconds: Sequence[float]
    merge_seconds: float = 0.0
    read_bytes: float = 0.0
    result_bytes: float = 0.0
    plan_bytes: float = 0.0

    @property
    def tasks(self) -> int:
        """Leaves and merges."""
        return 2 * len(self.leaf_seconds) - 1


def check_stragglers(value: Any) -> tuple[float, float]:
    """A share of leaves and the factor by which they take longer.

    Raises
    ------
    DataError
        If it is anything else.
    """
    numbers = _numbers(value)
    if len(numbers) != 2 or not (0.0 <= numbers[0] <= 1.0 and numbers[1] > 0.0):
        raise DataError(
            f"{option('stragglers')} must be a share in [0, 1] and a positive factor, got {value!r}"
        )
    return numbers[0], numbers[1]


def check_spread(value: Any) -> tuple[float, ...]:
    """Factors of durations.

    Raises
    ------
    DataError
        If there is none, or one is not positive.
    """
    numbers = _numbers(value)
    if not numbers or min(numbers) <= 0.0:
        raise DataError(f"spread must hold positive factors, at least one, got {value!r}")
    return numbers


def _numbers(value: Any) -> tuple[float, ...]:
    """Finite numbers of a sequence; none if it is anything else."""
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return ()
    if numbers.ndim != 1 or not np.isfinite(numbers).all():
        return ()
    return tuple(map(float, numbers))


@dataclass(frozen=True)
class SimulatedCluster:
    """Workers, and the times of what lies between them.

    Parameters
    ----------
    workers, threads
        Worker processes, and threads of each.
    submit_seconds
        For each task before the first one starts: the client makes the graph, the scheduler reads
        it.
    task_seconds, task_seconds_per_worker
        Service time of the scheduler for a task: a constant, and a part for each worker.
    client_seconds
        Service time of the client for the news of a task.
    worker_seconds
        For which a task holds its thread beside its own work.
    latency
        Of a message, one way, in seconds.
    bandwidth
        Of what a worker sends, in bytes per second.
    file_system
        Bytes per second that all workers together read, at most.
    workers_per_host, cores_per_host
        Workers share the cores of their host; None: a core for each thread.
    worker_load
        Share of a core that a worker process takes beside its tasks, for each of its threads.
    full_speed
        Speed of a core while all cores of its host are busy, over that of one busy core.
    spread
        Factors of durations, of which each task draws one; their mean should be 1.
    stragglers
        A share of leaves and the factor by which they take longer.
    """

    workers: int
    threads: int = 1
    submit_seconds: float = 0.0
    task_seconds: float = 0.0
    task_seconds_per_worker: float = 0.0
    client_seconds: float = 0.0
    worker_seconds: float = 0.0
    latency: float = 0.0
    bandwidth: float = math.inf
    file_system: float = math.inf
    workers_per_host: int = 1
    cores_per_host: int | None = None
    worker_load: float = 0.0
    full_speed: float = 1.0
    spread: Sequence[float] = (1.0,)
    stragglers: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        for name in ("workers", "threads", "workers_per_host"):
            if not getattr(self, name) >= 1:
                raise DataError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        for name in (
            *("submit_seconds", "task_seconds", "task_seconds_per_worker"),
            *("client_seconds", "worker_seconds", "latency"),
        ):
            _check_amount(name, getattr(self, name))
        for name in ("bandwidth", "file_system"):  # infinite where it is no limit
            if not getattr(self, name) > 0.0:
                raise DataError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not 0.0 < self.full_speed <= 1.0:
            raise DataError(f"full_speed must lie in (0, 1], got {self.full_speed!r}")
        cores = self.threads if self.cores_per_host is None else self.cores_per_host
        if not 0.0 <= self.beside < cores:
            raise DataError(
                f"worker_load must leave some of {cores} cores to tasks, got {self.worker_load!r}"
            )
        check_stragglers(self.stragglers)
        check_spread(self.spread)

    @property
    def beside(self) -> float:
        """Cores of a host that its workers take beside their tasks."""
        alone = self.cores_per_host is None
        count = 1 if alone else min(self.workers_per_host, self.workers)
        return self.worker_load * self.threads * count

    @property
    def service(self) -> float:
        """Seconds of the scheduler for a task."""
        return self.task_seconds + self.task_seconds_per_worker * self.workers


class Simulation(NamedTuple):
    """What a simulated pass took.

    Attributes
    ----------
    seconds
        From the client's call to the sum in its hands.
    submit_seconds
        Of these before the first task was handed out.
    tasks
        Leaves and merges.
    scheduler_busy
        Share of the rest for which the scheduler was busy.
    threads_busy
        Share of it for which threads held tasks, on average.
    sent_bytes
        Between workers, and to the client.
    peak_results
        Partial results that a worker held at once, at most.
    tail_seconds
        From the end of the last leaf to that of the pass.
    """

    seconds: float
    submit_seconds: float
    tasks: int
    scheduler_busy: float
    threads_busy: float
    sent_bytes: float
    peak_results: int
    tail_seconds: float


def simulate_pass(work: PassWork, cluster: SimulatedCluster, seed: int = 0) -> Simulation:
    """Simulate a pass; equal arguments give equal results.

    Parameters
    ----------
    work
        Its tasks.
    cluster
        Where it would run.
    seed
        Of the draws of durations.

    Raises
    ------
    DataError
        If there is no leaf, or a number of the work is negative or not finite.
    """
    if not len(work.leaf_seconds):
        raise DataError("a pass has at least one leaf, got none")
    for seconds in work.leaf_seconds:
        _check_amount("leaf_seconds", seconds)
    for name in ("merge_seconds", "read_bytes", "result_bytes", "plan_bytes"):
        _check_amount(name, getattr(work, name))
    return _Run(work, cluster, seed).result()


class _Host:
    """Threads that share cores: the clock ``done`` counts the seconds that each has worked."""

    def __init__(self, cores: int, beside: float, full_speed: float) -> None:
        self._cores, self._slower = cores - beside, (1.0 - full_speed) / max(cores - 1, 1)
        self.done, self.seen, self.version = 0.0, 0.0, 0
        self.running: list[tuple[float, int, int, int, float]] = []

    def advance(self, now: float) -> None:
        """Let the threads work until now."""
        self.done += (now - self.seen) * self.speed
        self.seen = now

    @property
    def speed(self) -> float:
        """Of each running thread."""
        busy = min(len(self.running), self._cores)
        each = 1.0 - self._slower * max(busy - 1, 0)
        return each * busy / max(len(self.running), 1)

    def next_end(self) -> float:
        """When the next thread has ended its task, unless another one starts."""
        return self.seen + max(self.running[0][0] - self.done, 0.0) / self.speed


class _Run:
    """The state of one simulation."""

    def __init__(self, work: PassWork, cluster: SimulatedCluster, seed: int) -> None:
        self._work, self._cluster = work, cluster
        leaves = self._leaves = len(work.leaf_seconds)
        merges = self._merges = tree_merges(leaves)
        self._parent, self._other = [-1] * work.tasks, [-1] * work.tasks
        # A merge comes before the leaves that follow its own, as Dask orders such a graph.
        self._priority: list[float] = list(map(float, range(leaves)))
        for i, (left, right) in enumerate(merges):
            node = leaves + i
            self._parent[left] = self._parent[right] = node
            self._other[left], self._other[right] = right, left
            self._priority.append(self._priority[right] + 1e-3)
        self._durations = self._drawn(seed)
        self._place = [-1] * work.tasks  # worker that holds the result; -1 before it is known
        count, threads = cluster.workers, cluster.threads
        self._free = [threads] * count
        self._slots = [math.ceil(SATURATION * threads)] * count
        self._ready: list[list[tuple[float, int]]] = [[] for _ in range(count)]
        self._sender = [0.0] * count  # when what a worker sends has left it
        self._plan_at = [math.inf] * count
        self._held, self._peak = [0] * count, 0
        self._events: list[tuple[float, int, int, int, int]] = []
        self._order, self._next_leaf = 0, 0
        self._scheduler = self._busy = self._client = self._disk = 0.0
        self._started = [0.0] * work.tasks
        self._sent, self._held_threads, self._last_leaf = 0.0, 0.0, 0.0
        self._hosts: list[_Host] = []
        cores, per_host = cluster.cores_per_host, cluster.workers_per_host
        if cores is not None:
            hosts = -(-count // per_host)
            self._hosts = [_Host(cores, cluster.beside, cluster.full_speed) for _ in range(hosts)]

    def _drawn(self, seed: int) -> list[float]:
        """Seconds that each task works, on a core of its own."""
        work, cluster = self._work, self._cluster
        rng = np.random.default_rng(seed)
        means = np.full(work.tasks, work.merge_seconds, dtype=float)
        means[: self._leaves] = work.leaf_seconds
        share, factor = cluster.stragglers
        slow = rng.random(self._leaves) < share
        means[: self._leaves][slow] *= factor
        factors = rng.choice(np.asarray(cluster.spread, dtype=float), work.tasks)
        durations = means * factors + cluster.worker_seconds
        if cluster.cores_per_host is None:  # all threads of a host are busy nearly always
            durations /= cluster.full_speed * (1.0 - cluster.beside / cluster.threads)
        values: list[float] = durations.tolist()
        return values

    def result(self) -> Simulation:
        """Run the events until the client has the sum."""
        work, cluster = self._work, self._cluster
        begin = self._scheduler = cluster.submit_seconds * work.tasks
        self._client = begin
        # One worker is given the plan with the graph; the others fetch it from this one.
        self._plan_at[0] = begin + 2.0 * cluster.latency + work.plan_bytes / cluster.bandwidth
        self._serve(self._plan_at[0] + cluster.latency)
        self._hand_out(range(cluster.workers))
        events, root = self._events, work.tasks - 1
        while events:
            now, _, kind, a, b = heapq.heappop(events)
            if kind == _DONE:
                self._end(now, a, b)
            elif kind == _READY:
                heapq.heappush(self._ready[b], (self._priority[a], a))
                if self._free[b]:
                    self._start_next(now, b)
            elif kind == _MESSAGE:
                self._finished(now, a, b)
                if a == root:
                    break
            else:
                self._end_on_host(now, a, b)
        # The sum goes to the client, which has seen the news of all tasks before.
        end = max(self._scheduler, self._client) + 3.0 * cluster.latency
        end += work.result_bytes / cluster.bandwidth
        self._sent += work.result_bytes
        rest = max(end - begin, 1e-12)
        threads = cluster.workers * cluster.threads
        return Simulation(
            seconds=end,
            submit_seconds=begin,
            tasks=work.tasks,
            scheduler_busy=min(self._busy / rest, 1.0),
            threads_busy=min(self._held_threads / (rest * threads), 1.0),
            sent_bytes=self._sent,
            peak_results=self._peak,
            tail_seconds=end - self._last_leaf,
        )

    def _push(self, when: float, kind: int, a: int, b: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, kind, a, b))

    # The scheduler: it takes messages in the order in which they come, so that all that follows
    # from one is known when it is taken, and needs no event of its own

    def _serve(self, arrival: float) -> None:
        service = self._cluster.service
        self._scheduler = max(self._scheduler, arrival) + service
        self._busy += service

    def _finished(self, now: float, task: int, worker: int) -> None:
        """The news that a worker has ended a task."""
        self._serve(now)
        self._client = max(self._client, self._scheduler) + self._cluster.client_seconds
        self._place[task] = worker
        self._slots[worker] += 1
        parent = self._parent[task]
        if parent >= 0 and self._place[self._other[task]] >= 0:
            self._assign(parent, worker)
        if self._slots[worker] > 0:
            self._hand_out((worker,))

    def _hand_out(self, workers: Sequence[int]) -> None:
        """Queued leaves to workers that have room, one each in turn."""
        while self._next_leaf < self._leaves:
            room = [worker for worker in workers if self._slots[worker] > 0]
            if not room:
                return
            for worker in room:
                if self._next_leaf < self._leaves:
                    self._assign(self._next_leaf, worker)
                    self._next_leaf += 1

    def _assign(self, task: int, worker: int) -> None:
        """Send a task to a worker; it is ready once all that it needs is there."""
        self._slots[worker] -= 1
        arrival = self._scheduler + self._cluster.latency
        ready = max(arrival, self._plan_of(worker, arrival))
        if task >= self._leaves:
            for part in self._merges[task - self._leaves]:
                if (owner := self._place[part]) != worker:
                    ready = max(ready, self._transfer(owner, arrival, self._work.result_bytes))
        self._push(ready, _READY, task, worker)

    def _plan_of(self, worker: int, arrival: float) -> float:
        """When a worker has the plan."""
        if self._plan_at[worker] == math.inf:
            self._plan_at[worker] = self._transfer(0, arrival, self._work.plan_bytes)
        return self._plan_at[worker]

    def _transfer(self, sender: int, asked: float, size: float) -> float:
        """When so many bytes of a sender, which sends one thing after the other, have come."""
        latency = self._cluster.latency
        self._sender[sender] = left = (
            max(self._sender[sender], asked + latency) + size / self._cluster.bandwidth
        )
        self._sent += size
        return left + latency

    # Workers

    def _start_next(self, now: float, worker: int) -> None:
        """Start tasks on free threads, the most urgent one first."""
        ready = self._ready[worker]
        while ready and self._free[worker]:
            _, task = heapq.heappop(ready)
            self._free[worker] -= 1
            self._started[task], duration = now, self._durations[task]
            rows_at = self._read(now, task)
            if self._hosts:
                self._start_on_host(now, task, worker, duration, rows_at)
                continue
            self._push(max(now + duration, rows_at), _DONE, task, worker)

    def _read(self, now: float, task: int) -> float:
        """When the file system has sent the rows of a leaf."""
        if task >= self._leaves or not self._work.read_bytes:
            return now
        self._disk = max(self._disk, now) + self._work.read_bytes / self._cluster.file_system
        return self._disk

    def _end(self, now: float, task: int, worker: int) -> None:
        self._free[worker] += 1
        self._held_threads += now - self._started[task]
        self._held[worker] += 1
        if task < self._leaves:
            self._last_leaf = now
        else:
            for part in self._merges[task - self._leaves]:  # they have gone into the merge
                self._held[self._place[part]] -= 1
        self._peak = max(self._peak, self._held[worker])
        self._push(now + self._cluster.latency, _MESSAGE, task, worker)
        if self._ready[worker]:
            self._start_next(now, worker)

    # Hosts whose threads share cores

    def _start_on_host(
        self, now: float, task: int, worker: int, duration: float, rows_at: float
    ) -> None:
        number = worker // self._cluster.workers_per_host
        host = self._hosts[number]
        host.advance(now)
        self._order += 1
        heapq.heappush(host.running, (host.done + duration, self._order, task, worker, rows_at))
        self._announce(host, number)

    def _announce(self, host: _Host, number: int) -> None:
        host.version += 1
        if host.running:
            self._push(host.next_end(), _HOST, number, host.version)

    def _end_on_host(self, now: float, number: int, version: int) -> None:
        host = self._hosts[number]
        if version != host.version:  # a thread has started or ended since
            return
        host.advance(now)
        _, _, task, worker, rows_at = heapq.heappop(host.running)
        self._announce(host, number)
        # The file system does not slow down with the cores, nor does waiting for it take any.
        self._push(max(now, rows_at), _DONE, task, worker)
