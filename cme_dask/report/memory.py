"""Memory of processes, sampled while they work: peaks and timelines."""

import contextlib
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from cme_dask.chunked.memory import A_WORKER
from cme_dask.chunked.observing import worker_states

MEASURE = "PSS" if sys.platform == "linux" else "RSS"
"""The proportional set size: pages that several processes share count once. Elsewhere than on Linux
the resident set size."""

_PAUSE = 0.1  # seconds between samples
_MOST = 20_000  # samples that a timeline holds; then every other one goes


def bytes_of(process: psutil.Process) -> int:
    """Memory of a process, by :data:`MEASURE`; 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        if MEASURE == "PSS":
            return int(process.memory_full_info().pss)
        return int(process.memory_info().rss)
    return 0


def peak_of(process: psutil.Process) -> int:
    """Most memory that a process has held since it began, by :data:`MEASURE`; 0 if it has ended.

    Of Linux's high-water mark of the resident set, which misses no moment, what the process shares
    now is taken off as the proportional set size does.
    """
    with contextlib.suppress(psutil.Error, OSError):
        if MEASURE == "PSS":
            status = Path(f"/proc/{process.pid}/status").read_text()
            highest = 1024 * int(status.split("VmHWM:")[1].split()[0])
            now = process.memory_full_info()
            return int(highest - now.rss + now.pss)
        return int(process.memory_info().rss)
    return 0


def process_tree() -> list[psutil.Process]:
    """The tree of this process: itself and those that it started."""
    this = psutil.Process()
    with contextlib.suppress(psutil.Error):
        return [this, *this.children(recursive=True)]
    return [this]


class _Sampling(ABC):
    """Take samples in a thread; use as a context manager."""

    _cost: float  # a sample that takes t seconds is followed by a pause of at least t times this

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-samples", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            begin = time.perf_counter()
            self._sample()
            pause = max(_PAUSE, self._cost * (time.perf_counter() - begin))

    @abstractmethod
    def _sample(self) -> None:
        """Take one."""


class PeakMemory(_Sampling):
    """Peak memory of the process tree, and of the workers of a cluster; use as a context manager.

    Parameters
    ----------
    scheduler
        Where tasks run: a connected client, or the name of a local scheduler.

    Attributes
    ----------
    peak
        Largest sum seen over this process and those it started, in bytes, by :data:`MEASURE`.
    worker_peak
        Most bytes seen in one worker of the cluster: its resident set size, as it tells the
        scheduler every half second; 0 without a cluster.
    """

    _cost = 100.0

    def __init__(self, scheduler: Any = None) -> None:
        super().__init__()
        self._client = None if scheduler is None or isinstance(scheduler, str) else scheduler
        self.peak = self.worker_peak = 0

    def _sample(self) -> None:
        self.peak = max(self.peak, sum(map(bytes_of, process_tree())))
        if self._client is not None:
            workers = worker_states(self._client).values()
            self.worker_peak = max((self.worker_peak, *(state.memory for state in workers)))

    def of(self, place: str) -> tuple[int, str]:
        """Return the peak of a place of :class:`MemoryPlan`, and what was measured, in words."""
        if place == A_WORKER:
            return self.worker_peak, "RSS of the worker that held most"
        return self.peak, f"{MEASURE} of this process and its children"


class MemoryTimeline(_Sampling):
    """Memory of several processes over time; use as a context manager.

    Parameters
    ----------
    read
        Bytes now, by the name of the process.
    """

    _cost = 25.0

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        super().__init__()
        self._read, self._begin = read, time.perf_counter()
        self._times: list[float] = []
        self._values: dict[str, dict[float, int]] = {}

    def _sample(self) -> None:
        now = time.perf_counter() - self._begin
        self._times.append(now)
        for name, value in self._read().items():
            self._values.setdefault(name, {})[now] = value
        if len(self._times) > _MOST:
            self._times = self._times[::2]
            kept = set(self._times)
            self._values = {
                name: {t: v for t, v in values.items() if t in kept}
                for name, values in self._values.items()
            }

    @property
    def processes(self) -> dict[str, tuple[list[float], list[int]]]:
        """Seconds since the start, and bytes then, of each process."""
        return {name: (list(v), list(v.values())) for name, v in self._values.items()}

    @property
    def peaks(self) -> dict[str, int]:
        """Most bytes seen of each process."""
        return {name: max(values.values()) for name, values in self._values.items()}
