"""The report of a run as a folder: its passes, its memory over time, its events."""

import contextlib
import csv
import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from cme_dask.cli.progress import Remembered, handling
from cme_dask.data.atomic import Kind, check_output, disk_errors, writing
from cme_dask.errors import ResourceError
from cme_dask.models import plots as drawing
from cme_dask.models.plots import PALETTE, picture
from cme_dask.passes.driver import A_WORKER
from cme_dask.passes.observing import ClusterWatch, worker_states

if TYPE_CHECKING:
    from cme_dask.passes.cluster import Scheduler


# Memory of processes, sampled while they work: peaks and timelines


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


def peak_of(process: psutil.Process, *, shared: bool = False) -> int:
    """Most memory that a process has held since it began, by :data:`MEASURE`; 0 if it has ended.

    Of Linux's high-water mark of the resident set, which misses no moment, what the process shares
    now is taken off as the proportional set size does, unless ``shared``: Dask pauses workers by
    their resident set.
    """
    with contextlib.suppress(psutil.Error, OSError):
        if MEASURE == "PSS":
            status = Path(f"/proc/{process.pid}/status").read_text()
            highest = 1024 * int(status.split("VmHWM:")[1].split()[0])
            now = process.memory_full_info()
            return int(highest if shared else highest - now.rss + now.pss)
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
        self._take_sample()

    def _watch(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            begin = time.perf_counter()
            self._take_sample()
            pause = max(_PAUSE, self._cost * (time.perf_counter() - begin))

    def _take_sample(self) -> None:
        # Where the scheduler is lost the run itself says so; that error must not be replaced.
        with contextlib.suppress(ResourceError):
            self._sample()

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
        Most bytes seen in one worker of the cluster: its resident set size, as reported to the
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
            retained = set(self._times)
            self._values = {
                name: {t: v for t, v in values.items() if t in retained}
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


Result = dict[str, Any]

FILES = ("report.json", "memory.csv", "memory.png", "events.jsonl", "dask.html")
SCHEMA_VERSION = 1


def _is_report(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    if not names <= set(FILES):
        return False
    result = json.loads((folder / "report.json").read_text())
    return isinstance(result, dict) and result.get("kind") == "report"


REPORT = Kind("report", _is_report)

_NO_BOKEH = "Dask's performance report needs bokeh, install cme-dask[report]"
_SERIES = 10  # processes that the picture names; of more, the largest
_MEGA = 1e6


@contextlib.contextmanager
def reporting(
    folder: Path | None, scheduler: "Scheduler", *, overwrite: bool = False
) -> Iterator[None]:
    """Watch the block, and write a report of it if it succeeds.

    Parameters
    ----------
    folder
        Where; None for nowhere.
    scheduler
        Of the block; the workers of a client's cluster are watched.
    overwrite
        Whether an earlier report may be replaced.

    Raises
    ------
    DataError
        If the folder exists and is no earlier report, or may not be replaced.
    ResourceError
        If it can't be written.
    """
    if folder is None:
        yield
        return
    check_output(folder, REPORT, overwrite)
    client = None if scheduler is None or isinstance(scheduler, str) else scheduler
    begun, begin = time.time(), time.perf_counter()
    with writing(folder, REPORT, overwrite=overwrite) as aside:
        with disk_errors(folder):
            aside.mkdir()
        events = Remembered()
        memory = MemoryTimeline(_readings(client))
        with contextlib.ExitStack() as stack:
            watch = None
            if client is not None:
                watch = stack.enter_context(ClusterWatch(client, aside / "dask.html"))
            stack.enter_context(memory)
            stack.enter_context(handling(events))
            yield
        seconds = time.perf_counter() - begin
        result = {
            "kind": "report",
            "schema_version": SCHEMA_VERSION,
            "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
            "seconds": seconds,
            "scheduler": scheduler if client is None else client.scheduler.address,
            "passes": [_pass(e) for e in events.records if e["event"] == "pass ended"],
            "memory": {"measure": _measures(client), "peaks": memory.peaks},
            "cluster": None if watch is None else _cluster(watch),
        }
        with disk_errors(folder):
            _write(aside, result, memory, events)


def _readings(client: Any) -> Callable[[], Mapping[str, int]]:
    """Bytes of each process now: this one, those it started, and the workers of a cluster."""

    def read() -> dict[str, int]:
        this, *others = process_tree()
        result = {"this process": bytes_of(this)}
        if client is None:
            result |= {f"process {process.pid}": bytes_of(process) for process in others}
        else:
            result |= {name: state.memory for name, state in worker_states(client).items()}
        return result

    return read


def _measures(client: Any) -> str:
    return MEASURE if client is None else f"{MEASURE}; of workers the RSS that they report"


def _pass(event: Mapping[str, Any]) -> Result:
    keys = ("pass", "rows", "tasks", "strips", "seconds", "rows_per_second")
    return {key: event[key] for key in keys}


def _cluster(watch: ClusterWatch) -> Result:
    return {
        **asdict(watch.want),
        "tasks": {name: asdict(times) for name, times in watch.times.items()},
    }


def _write(folder: Path, result: Result, memory: MemoryTimeline, events: Remembered) -> None:
    missing = []
    with (folder / "memory.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("process", "seconds", "bytes"))
        for name, (times, values) in memory.processes.items():
            table.writerows((name, f"{t:.3f}", v) for t, v in zip(times, values, strict=True))
    lines = (json.dumps(record, default=str) + "\n" for record in events.records)
    (folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    if drawing.available():
        memory_picture(memory, result["passes"], folder / "memory.png")
    else:
        missing.append(drawing.MISSING)
    if result["cluster"] is not None and not (folder / "dask.html").exists():
        missing.append(_NO_BOKEH)
    result["missing"] = missing
    (folder / "report.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def memory_picture(memory: MemoryTimeline, passes: list[Result], path: Path) -> None:
    """Memory of each process over time.

    Parameters
    ----------
    memory
        The samples.
    passes
        What ran, for the title.
    path
        PNG file to write.
    """
    peaks = memory.peaks
    shown = sorted(peaks, key=lambda name: -peaks[name])[:_SERIES]
    with picture(path, 9, 4) as figure:
        ax = figure.subplots()
        for name, (times, values) in memory.processes.items():
            if name in shown:
                colour = PALETTE[shown.index(name) % len(PALETTE)]
                label = f"{name}: at most {peaks[name] / _MEGA:,.0f} MB"
                ax.plot(times, [v / _MEGA for v in values], color=colour, lw=1.6, label=label)
        ax.set(xlabel="seconds", ylabel="memory [MB]", ylim=(0.0, None))
        rows = sum(one["rows"] for one in passes)
        title = f"{len(passes)} passes over {rows:,} rows" if len(passes) > 1 else f"{rows:,} rows"
        left = len(peaks) - len(shown)
        ax.set_title(title + (f"; {left} smaller processes not shown" if left else ""))
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
