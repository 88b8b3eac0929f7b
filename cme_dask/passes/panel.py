"""The live panel: a page on the dashboard of a scheduler that shows the fits on its cluster.

All of it runs on the scheduler, and imports nothing but what a scheduler has. Fits send figures as
events, see :mod:`cme_dask.passes.publishing`; the scheduler adds what it knows by itself, which is
the memory of workers and the tasks that are run again. The page is plain HTML that asks for these
figures once a second: nothing is rendered while nobody looks, and bokeh is not needed.
"""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import SchedulerPlugin
from distributed.http.utils import RequestHandler

PANEL = "cme-dask-panel"
"""Topic of the events that fits send to the panel, and the name of its plugin."""

PAGE = "cme"
"""Path of the page, behind the prefix of the dashboard; its figures are at ``cme.json``."""

_FITS = 20  # that have ended and are still shown
_PASSES = 12  # of a fit, the latest
_CURVES = 12  # of a fit, the latest
_POINTS = 400  # of a curve; then every other one goes
_LOSSES = 2000  # of a fit, the latest
_WORKERS = 16  # that the page lists, those with the highest peak
_TEXT = 200  # letters of whatever a fit sends
_SEARCHES = "grid", "shortlist"  # first stages of searches, whose losses are on other rows
_SAMPLED = 1.0  # seconds between samples of the workers' memory

Figures = dict[str, Any]


def _number(value: Any) -> float | None:
    """A finite number, or None: JSON has no other ones, and events may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _text(value: Any) -> str:
    return str(value)[:_TEXT]


@dataclass
class Curve:
    """The trace error of one basis against its rank."""

    variable: str
    tol: float | None
    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, rank: float, trace: float) -> None:
        """Add a point; of many, every other one is left out."""
        self.points.append((rank, trace))
        if len(self.points) > _POINTS:
            self.points = [*self.points[:-1:2], self.points[-1]]


@dataclass
class PassFigures:
    """A pass over the rows, or another run of tasks."""

    name: str
    began: float
    rows_total: float = 0.0
    rows: float = 0.0
    tasks: float = 0.0
    seconds: float = 0.0
    ended: bool = False

    def update(self, news: Mapping[str, Any]) -> None:
        """Take over numbers that a fit sends."""
        for key in ("rows_total", "rows", "tasks", "seconds"):
            value = _number(news.get(key))
            if value is not None:
                setattr(self, key, value)
        self.ended = bool(news.get("ended", self.ended))

    def figures(self, now: float) -> Figures:
        """For the page, at this time of the clock."""
        elapsed = self.seconds if self.ended else now - self.began
        rate = self.rows / self.seconds if self.rows and self.seconds else None
        left = None
        if rate and not self.ended:
            left = max(0.0, self.rows_total / rate - elapsed)
        return {
            "name": self.name,
            "rows": self.rows,
            "rows_total": self.rows_total,
            "tasks": self.tasks,
            "seconds": elapsed,
            "rate": rate,
            "left": left,
            "ended": self.ended,
        }


_SCALARS = "rows", "step", "steps", "done", "seconds", "left", "predicted", "limit"
_TEXTS = "name", "client", "step_name", "text", "status", "error"


class FitFigures:
    """What is known of one fit."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: Figures = dict.fromkeys((*_SCALARS, *_TEXTS))
        self._values["status"] = "running"
        self._at = clock()
        self._passes: dict[int, PassFigures] = {}
        self._curves: deque[Curve] = deque(maxlen=_CURVES)
        self._losses: deque[tuple[int, str, float]] = deque(maxlen=_LOSSES)
        self._candidates = 0
        self._peaks: dict[str, float] = {}
        self.tokens: set[str] = set()
        self.reruns = self.lost_workers = 0

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        return bool(self._values["status"] == "running")

    @property
    def client(self) -> Any:
        """Who fits."""
        return self._values["client"]

    def end(self, status: str) -> None:
        """Note that it has ended, unless it has said so itself."""
        if self.running:
            self._values["seconds"] = self._seconds(self._clock() - self._at)
            self._values["status"] = status
            self._at = self._clock()

    def update(self, news: Mapping[str, Any]) -> None:
        """Take over what a fit sends."""
        self._at = self._clock()
        values = news.get("values", {})
        self._values |= {key: _number(values[key]) for key in _SCALARS if key in values}
        self._values |= {key: _text(values[key]) for key in _TEXTS if key in values}
        for number, changes in news.get("passes", ()):
            if number not in self._passes:
                self._passes[number] = PassFigures(_text(changes.get("name", "")), self._at)
                if len(self._passes) > _PASSES:
                    del self._passes[min(self._passes)]
            self._passes[number].update(changes)
        for variable, rank, trace, tol in news.get("traces", ()):
            self._trace(_text(variable), _number(rank), _number(trace), _number(tol))
        for stage, loss in news.get("losses", ()):
            self._loss(_text(stage), _number(loss))
        self.tokens |= {str(token) for token in news.get("tokens", ())}

    def _trace(
        self, variable: str, rank: float | None, trace: float | None, tol: float | None
    ) -> None:
        if rank is None or trace is None:
            return
        own = (curve for curve in reversed(self._curves) if curve.variable == variable)
        last = next(own, None)
        # A lower rank is that of the next basis: each grows from the first pivot on.
        if last is None or rank < last.points[-1][0]:
            last = Curve(variable, tol)
            self._curves.append(last)
        last.add(rank, trace)

    def _loss(self, stage: str, loss: float | None) -> None:
        before = self._losses[-1][1] if self._losses else stage
        if stage != before and stage in _SEARCHES:
            self._losses.clear()
            self._candidates = 0
        self._candidates += 1
        if loss is not None:
            self._losses.append((self._candidates, stage, loss))

    def sample(self, memory: Mapping[str, float]) -> None:
        """Take the memory of workers now, for the highest of each."""
        for name, value in memory.items():
            self._peaks[name] = max(value, self._peaks.get(name, 0.0))

    def _seconds(self, since: float) -> float:
        return (self._values["seconds"] or 0.0) + since

    def figures(self, number: int, memory: Mapping[str, float]) -> Figures:
        """For the page.

        Parameters
        ----------
        number
            Of the fit, in the order in which they began.
        memory
            Bytes of each worker now.
        """
        now = self._clock() if self.running else self._at
        since = now - self._at
        values = dict(self._values)
        if self.running:
            values["seconds"] = self._seconds(since)
            if values["left"] is not None:
                values["left"] = max(0.0, values["left"] - since)
        shown = sorted(self._peaks, key=lambda name: -self._peaks[name])[:_WORKERS]
        at_work = memory if self.running else {}
        workers = [
            {"name": name, "now": at_work.get(name), "peak": self._peaks[name]}
            for name in sorted(shown)
        ]
        return values | {
            "number": number,
            "passes": [one.figures(now) for _, one in sorted(self._passes.items())],
            "curves": [vars(curve) for curve in self._curves],
            "losses": list(self._losses),
            "workers": workers,
            "more_workers": len(self._peaks) - len(shown),
            "reruns": self.reruns,
            "lost_workers": self.lost_workers,
        }


class LivePanel(SchedulerPlugin):  # type: ignore[misc]
    """Collects the figures of all fits on a cluster, and serves the page that shows them.

    Parameters
    ----------
    scheduler
        Of the cluster.
    clock
        Seconds.
    """

    name = PANEL

    def __init__(self, scheduler: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._fits: dict[str, tuple[int, FitFigures]] = {}
        self._begun = 0
        self._lost: set[str] = set()
        self._sampled = -math.inf

    # What comes in

    def log_event(self, topic: str, msg: Any) -> None:
        """Take what a fit sends."""
        if topic != PANEL or not isinstance(msg, Mapping) or "fit" not in msg:
            return
        key = str(msg["fit"])
        if key not in self._fits:
            self._begun += 1
            self._fits[key] = self._begun, FitFigures(self._clock)
            self._sampled = -math.inf  # of this fit there is no sample yet
            self._forget()
        self._fits[key][1].update(msg)
        self._sample()

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Count tasks that are run again, because their worker or what they gave was lost."""
        if finish == "released":
            if start in ("processing", "memory") and self._fit_of(key) is not None:
                self._lost.add(key)
        elif finish == "forgotten":
            self._lost.discard(key)
        elif start == "released" and finish == "waiting":
            # A task that was given up comes back under a name of its own.
            again = key in self._lost or (isinstance(key, str) and "-again" in key)
            fit = self._fit_of(key) if again else None
            if fit is not None:
                fit.reruns += 1
            self._lost.discard(key)

    def remove_worker(
        self, scheduler: Any, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Count workers that leave during a fit."""
        for fit in self._running():
            fit.lost_workers += 1

    def remove_client(self, scheduler: Any, client: str) -> None:
        """End the fits of a client that leaves without a word."""
        for fit in self._running():
            if fit.client == client:
                fit.end("left")

    def _running(self) -> Iterable[FitFigures]:
        return [fit for _, fit in self._fits.values() if fit.running]

    def _fit_of(self, key: Any) -> FitFigures | None:
        """The fit of a task, whose name holds the token of a run."""
        if isinstance(key, str):
            for fit in self._running():
                if any(token in key for token in fit.tokens):
                    return fit
        return None

    def _forget(self) -> None:
        ended = [key for key, (_, fit) in self._fits.items() if not fit.running]
        for key in ended[:-_FITS]:
            del self._fits[key]

    def _sample(self) -> None:
        now = self._clock()
        if now - self._sampled < _SAMPLED:
            return
        self._sampled, memory = now, self._memory()
        for fit in self._running():
            fit.sample(memory)

    def _memory(self) -> dict[str, float]:
        """Bytes of each worker, by its last heartbeat."""
        workers = self._scheduler.workers.values()
        each = ((_text(ws.address), _number(ws.metrics.get("memory"))) for ws in workers)
        return {name: memory for name, memory in each if memory is not None}

    # What is shown

    def figures(self) -> Figures:
        """All that the page shows: the fits, latest first, and where the menu leads."""
        self._sample()
        memory = self._memory()
        pages, stream = _dashboard(self._scheduler)
        return {
            "fits": [fit.figures(number, memory) for number, fit in reversed(self._fits.values())],
            "workers": len(self._scheduler.workers),
            "threads": self._scheduler.total_nthreads,
            "pages": [page for page in pages if page != PAGE],
            "stream": stream,
        }


def _dashboard(scheduler: Any) -> tuple[list[str], str | None]:
    """The menu of Dask's own pages, and the page of the task stream: none without bokeh.

    The list of the menu is Dask's own, so that it may be added to. It is no public part of Dask:
    a version that lacks it has a panel without a menu entry.
    """
    module = sys.modules.get("distributed.dashboard.scheduler")
    paths: set[str] = set()
    for application in getattr(scheduler.http_application, "applications", ()):
        paths |= set(getattr(application, "app_paths", ()))
    if module is None or "/status" not in paths:
        return [], None
    variables = getattr(module, "template_variables", None)
    pages = variables(scheduler).get("pages") if callable(variables) else None
    stream = "individual-task-stream"
    return pages if isinstance(pages, list) else [], stream if f"/{stream}" in paths else None


class _Page(RequestHandler):  # type: ignore[misc]
    """The page; it is the same for all schedulers and fits."""

    def get(self) -> None:
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.write((Path(__file__).parent / "panel.html").read_bytes())


class _FiguresOfFits(RequestHandler):  # type: ignore[misc]
    """The figures, as JSON."""

    def get(self) -> None:
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.write(json.dumps(self.server.plugins[PANEL].figures(), allow_nan=False))


def install(scheduler: Any) -> bool:
    """Serve the panel of a scheduler, once; whether it is there.

    The routes match behind any prefix, as Dask's own are behind that of ``--dashboard-prefix``, and
    the page asks for everything relative to itself, so that it also works behind a proxy.
    """
    if PANEL in scheduler.plugins:
        return True
    application = getattr(scheduler, "http_application", None)
    if application is None:
        return False
    scheduler.add_plugin(LivePanel(scheduler), name=PANEL)
    shared = {"dask_server": scheduler}
    prefix = r"(?:/[^/]+)*/"
    routes = [(f"{prefix}{PAGE}", _Page, shared), (f"{prefix}{PAGE}.json", _FiguresOfFits, shared)]
    application.add_handlers(r".*", routes)
    pages, _ = _dashboard(scheduler)
    if pages and PAGE not in pages:
        pages.append(PAGE)
    return True
