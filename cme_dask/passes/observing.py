"""Observation of a running cluster: memory and state of its workers, Dask's own report."""

import contextlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from distributed import Client, get_task_stream, performance_report

from cme_dask.passes.cluster import described_workers

_TOKEN = 32  # letters of the token in a task's key


@dataclass(frozen=True)
class WorkerState:
    """A worker, by its last report to the scheduler.

    Attributes
    ----------
    memory
        Resident set of its process, in bytes.
    spilled
        Bytes that it holds on disk for want of memory.
    status
        ``running``, ``paused``, ...
    """

    memory: int
    spilled: int
    status: str


def worker_states(client: Client) -> Mapping[str, WorkerState]:
    """All workers of a cluster, by address; their news are a second old at most."""
    return {
        address: WorkerState(
            int(worker["metrics"].get("memory", 0)),
            int(worker["metrics"].get("spilled_bytes", {}).get("disk", 0)),
            str(worker["status"]),
        )
        for address, worker in described_workers(client).items()
    }


@dataclass(frozen=True)
class WantOfMemory:
    """What workers did since memory ran short, from the start of their scheduler.

    Attributes
    ----------
    spilled
        Bytes that they wrote to disk, all together.
    pauses
        How often one of them stopped taking tasks.
    """

    spilled: int
    pauses: int


def want_of_memory(client: Client) -> WantOfMemory:
    """Spilling and pausing of workers, however short."""
    spilled = client.run_on_scheduler(_spilled)
    events = (event for topic in client.get_events().values() for _, event in topic)
    changes = (event for event in events if isinstance(event, Mapping))
    pauses = sum(event.get("status") == "paused" for event in changes)
    return WantOfMemory(int(spilled), pauses)


def _spilled(dask_scheduler: Any) -> float:
    """Sum of the workers' metrics ``(..., "disk-write", "bytes")``; runs on the scheduler."""
    metrics = dask_scheduler.cumulative_worker_metrics.items()
    return float(sum(v for key, v in metrics if tuple(key)[-2:] == ("disk-write", "bytes")))


@dataclass
class TaskTimes:
    """Times of the tasks of one name, all together.

    Attributes
    ----------
    tasks
        Their number.
    compute, transfer, other
        Seconds of worker threads: of their work, of waiting for data of other workers, and of the
        rest (unpacking, disk).
    """

    tasks: int = 0
    compute: float = 0.0
    transfer: float = 0.0
    other: float = 0.0


class ClusterWatch:
    """Observe a cluster during a block; use as a context manager.

    Parameters
    ----------
    client
        The cluster.
    path
        File that takes Dask's performance report (HTML).

    Attributes
    ----------
    times
        By the name of the tasks, once the block has ended.
    want
        Of memory.
    """

    def __init__(self, client: Client, path: Path) -> None:
        self._client, self._path = client, path
        self._stack = contextlib.ExitStack()
        self.times: dict[str, TaskTimes] = {}
        self.want = WantOfMemory(0, 0)

    def __enter__(self) -> "ClusterWatch":
        self._before = want_of_memory(self._client)
        self._stack.enter_context(self._client.as_current())
        if _has_bokeh():
            self._stack.enter_context(performance_report(filename=str(self._path)))
        self._stream = self._stack.enter_context(get_task_stream(self._client))
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:  # perhaps that of a lost scheduler
            with contextlib.suppress(Exception):
                self._stack.__exit__(*error)
            return
        self._stack.__exit__(*error)
        for task in self._stream.data:
            times = self.times.setdefault(_name_of(task["key"]), TaskTimes())
            times.tasks += 1
            for part in task["startstops"]:
                kind = part["action"] if part["action"] in ("compute", "transfer") else "other"
                spent = getattr(times, kind) + part["stop"] - part["start"]
                setattr(times, kind, spent)
        after = want_of_memory(self._client)
        self.want = WantOfMemory(
            after.spilled - self._before.spilled, after.pauses - self._before.pauses
        )


def _has_bokeh() -> bool:
    return importlib.util.find_spec("bokeh") is not None


def _name_of(key: Any) -> str:
    """The prefix of the key of a task: ``strip-moments`` of ``strip-moments-3-...``."""
    words = str(key).split("-")
    retained = takewhile(lambda word: not word[:1].isdigit() and len(word) < _TOKEN, words)
    return "-".join(retained) or words[0]
