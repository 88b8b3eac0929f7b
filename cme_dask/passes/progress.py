"""The progress of a fit: its steps, a share of the whole that only grows, and the time left."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from cme_dask.display import duration
from cme_dask.errors import DataError, printable
from cme_dask.passes.notebook import CardOutput, Curve, FitCard

TOPIC = "cme-dask"
"""Topic of the events that a cluster's scheduler keeps: ``client.get_events("cme-dask")``."""

_MOST = 0.99  # until the end something remains to be done
_EVERY = 0.5  # seconds between looks at the clock
_LINES = 10.0  # seconds between lines where nothing can be overwritten


@dataclass(frozen=True)
class Event:
    """How far a fit, or a single pass over the rows, is.

    Parameters
    ----------
    step, steps : int
        Number of the step, from 1, and of all steps.
    name : str
        Name of the step, such as ``"search for kernels"``.
    done : float
        Share of the whole fit, in [0, 1]: it never falls.
    seconds : float
        Since the fit began.
    seconds_left : float or None
        Estimate for the whole fit; None while nothing is known.
    text : str
        Figures of the step, such as the rank reached or the rows per second.
    detail : object
        The report of the step itself: ``PivotProgress``, ``TuningProgress``, the event of a pass,
        or None.
    rows, rows_total : int
        Of a pass: rows that are done, and all of them; else 0.
    """

    step: int
    steps: int
    name: str
    done: float
    seconds: float
    seconds_left: float | None
    text: str
    detail: Any = field(default=None, repr=False)
    rows: int = 0
    rows_total: int = 0

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", {duration(self.seconds_left)} left"
        text = f", {self.text}" if self.text else ""
        return f"step {self.step} of {self.steps}: {self.name}{text}, {self.done:.0%}{left}"


Listener: TypeAlias = Callable[[Event], None]


def pass_event(name: str, rows: int, rows_total: int, seconds: float, resumed: int = 0) -> Event:
    """The event of a pass that has done so many rows, at least one, since it began.

    ``resumed`` of them were done before, and took no time.
    """
    read = rows - resumed
    text = f"{read / max(seconds, 1e-9):,.0f} rows/s" if read else f"{resumed:,} rows resumed"
    left = seconds * (rows_total - rows) / read if read else None
    return Event(1, 1, name, rows / rows_total, seconds, left, text, None, rows, rows_total)


@dataclass(frozen=True)
class StepBegan:
    """A step that has begun, or is so far; ``key`` is that of a :class:`Step`.

    ``without`` lists later steps that are now known not to come; ``order``, where it is known only
    now, all that come after this one.
    """

    key: str
    share: float = 0.0
    without: tuple[str, ...] = ()
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """A step of a fit.

    Attributes
    ----------
    key, name
        For the program, and for people.
    cost
        Predicted seconds; only their ratios count, as soon as a step has been measured.
    like, ratio
        The earlier step of the same kind, and the share of its time that this one is expected to
        take.
    certain
        From this share of the step on, its own rate alone tells what remains of it.
    reads
        Whether it reads rows: its time then says nothing about that of other steps.
    chance
        That the step comes at all, until :meth:`FitProgress.confirm`.
    """

    key: str
    name: str
    cost: float
    like: str | None = None
    ratio: float = 1.0
    certain: float = 0.3
    reads: bool = False
    chance: float = 1.0


class FitProgress:
    """From the reports of single steps to events of the whole fit.

    Parameters
    ----------
    steps
        In their order; steps may be left out by the fit, and are then done.
    listener
        Called with each :class:`Event`.
    client
        Of the cluster, whose scheduler logs each step that begins; or None.
    clock
        Seconds.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        listener: Listener,
        client: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._steps, self._listener, self._client, self._clock = (
            list(steps),
            listener,
            client,
            clock,
        )
        self._begin = self._began = clock()
        self._at, self._share, self._from, self._done = 0, 0.0, 0.0, 0.0
        self._measured: dict[str, float] = {}
        self._costs = {step.key: step.cost for step in steps}
        self._ratios = {step.key: step.ratio for step in steps}
        self._known: dict[str, float] = {}
        self._chances = {step.key: step.chance for step in steps}
        self._text, self._log = "", -1

    def __call__(self, detail: Any, key: str, share: float, text: str) -> None:
        """Take a report: how far the step is, in [0, 1]."""
        self._enter(key, share)
        if self._steps[self._at].key == key:
            # A step that works in several rounds reports less again: it is as far as it was.
            self._share = max(self._share, min(share, 1.0))
        self._text = text
        self._listener(self.event(detail))

    def begin(self, key: str, share: float = 0.0) -> None:
        """Take a step's beginning, or how far it is without figures."""
        self(None, key, share, "")

    def expect(self, key: str, cost: float) -> None:
        """Correct the predicted seconds of a step."""
        if key in self._costs:
            self._costs[key] = cost

    def know(self, key: str, seconds: float) -> None:
        """Expect a step to take these seconds, by what was measured of its kind."""
        self._known[key] = seconds

    def leave_out(self, keys: Sequence[str]) -> None:
        """Expect that these steps do not come."""
        for key in keys:
            self._costs[key] = self._ratios[key] = self._known[key] = 0.0

    def follow(self, keys: Sequence[str]) -> None:
        """Expect these steps after the present one, in this order, and no others."""
        later = {step.key: step for step in self._steps[self._at + 1 :]}
        self._steps[self._at + 1 :] = [later[key] for key in keys if key in later]

    def confirm(self) -> None:
        """Expect all steps that are not left out to come for certain."""
        self._chances = dict.fromkeys(self._chances, 1.0)

    def relate(self, key: str, ratio: float) -> None:
        """Correct the share of an earlier step's time that a step of the same kind takes."""
        if key in self._ratios:
            self._ratios[key] = ratio

    def now(self) -> float:
        """Seconds by its clock."""
        return self._clock()

    def event(self, detail: Any = None) -> Event:
        """How far the fit is now."""
        now = self._clock()
        left = self._left(now)
        elapsed = now - self._begin
        if left is not None and elapsed + left > 0.0:
            self._done = max(self._done, min(_MOST, elapsed / (elapsed + left)))
        step = self._steps[self._at]
        return Event(
            self._at + 1, len(self._steps), step.name, self._done, elapsed, left, self._text, detail
        )

    def finished(self) -> Event:
        """The last event."""
        self._done = 1.0
        elapsed = self._clock() - self._begin
        return Event(
            len(self._steps), len(self._steps), "done", 1.0, elapsed, 0.0, f"{duration(elapsed)}"
        )

    def _enter(self, key: str, share: float) -> None:
        numbers = [i for i, step in enumerate(self._steps) if step.key == key]
        if numbers and numbers[0] > self._at:
            now = self._clock()
            here = self._steps[self._at].key
            self._measured[here] = now - self._began
            for skipped in self._steps[self._at + 1 : numbers[0]]:
                self._measured[skipped.key] = self._costs[skipped.key] = 0.0
            self._at, self._text, self._began = numbers[0], "", now
            # Where the first report comes late, what was done before it belongs to the step before.
            self._share = self._from = min(share, 1.0)
        if self._client is not None and self._log != self._at:
            self._log = self._at
            step = self._steps[self._at]
            metadata = {"step": self._at + 1, "steps": len(self._steps), "name": step.name}
            self._client.log_event(TOPIC, metadata)

    def _left(self, now: float) -> float | None:
        """Seconds: of this step by its own rate, of later ones by prediction and by what was seen.

        Predictions are scaled by what the steps so far took over what was predicted for them.
        """
        here = self._steps[self._at]
        spent = now - self._began
        telling = [step.key for step in self._steps[: self._at] if not step.reads]
        predicted = sum(self._costs[key] for key in telling)
        taken = sum(self._measured[key] for key in telling)
        scale = taken / predicted if predicted > 0.0 and taken > 0.0 else 1.0
        rest = 1.0 - self._from
        expected = max(rest * self._expected(here, scale), spent)
        if self._share > self._from:
            trust = min(1.0, (self._share - self._from) / here.certain)
            measured = spent * rest / (self._share - self._from)
            expected = trust * measured + (1.0 - trust) * expected
        elif not self._measured:
            return None
        total = predicted + self._costs[here.key]
        if total > 0.0 and not here.reads:
            scale = (taken + expected) / total
        later = self._steps[self._at + 1 :]
        now_measured = {here.key: expected, **self._measured}
        return max(0.0, expected - spent) + sum(
            self._chances[step.key] * self._expected(step, scale, now_measured) for step in later
        )

    def _expected(
        self, step: Step, scale: float, measured: dict[str, float] | None = None
    ) -> float:
        if step.key in self._known:
            return self._known[step.key]
        known = self._measured if measured is None else measured
        if step.like is not None and step.like in known:
            return self._ratios[step.key] * known[step.like]
        return scale * self._costs[step.key]


@contextlib.contextmanager
def listening(progress: Any) -> Iterator[Listener | None]:
    """What hears of events: nothing, a display of our own for True, or the user's function.

    Raises
    ------
    DataError
        If it is neither a boolean nor a function.
    """
    if progress is None or progress is False:
        yield None
    elif progress is True:
        with FitDisplay() as display:
            yield display
    elif callable(progress):
        yield progress
    else:
        raise DataError(f"progress must be True, False or a function of events, got {progress!r}")


class _Left(ProgressColumn):
    """Time left, counted down between events."""

    max_refresh = 0.2

    def render(self, task: Task) -> Text:
        left, callback = task.fields.get("left"), task.fields.get("updated", 0.0)
        if left is None or task.finished:
            return Text("")
        return Text(f"{duration(max(0.0, left - (time.monotonic() - callback)))} left")


def bars(console: Console, *, transient: bool) -> Progress:
    """Bars for a terminal: one for a whole fit, whose description is the step."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        _Left(),
        console=console,
        transient=transient,
        disable=not console.is_terminal or console.is_jupyter,
    )


def update_bar(shown: Progress, task: TaskID, event: Event) -> None:
    """Show an event."""
    shown.update(
        task,
        description=f"step {event.step} of {event.steps}: {event.name}",
        completed=event.done,
        text=event.text,
        left=event.seconds_left,
        updated=time.monotonic(),
    )


class FitDisplay:
    """Events for people: a bar in a terminal, a card that changes in a notebook, else lines.

    Use as a context manager. Where nothing is reported the clock goes on, twice a second.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = bars(self._console, transient=False)
        self._task: TaskID | None = None
        self._event: Event | None = None
        self._heard = self._begin = time.monotonic()
        self._spoken, self._step = 0.0, 0
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._card: CardOutput | None = None
        self._curves: dict[str, Curve] = {}
        self._stage, self._losses = "", list[float]()
        self._ticking = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "FitDisplay":
        if _in_notebook():
            self._card = CardOutput(self._drawn())
            self._ticking.start()
        elif self._console.is_terminal:
            self._bars.start()
            self._task = self._bars.add_task("starting", total=1.0, text="")
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._stop.set()
        if self._card is not None:
            self._ticking.join()
            self._card.update(self._drawn("" if kind is None else f"stopped: {kind.__name__}"))
        self._bars.stop()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        with self._lock:
            self._event, self._heard = event, time.monotonic()
            if self._task is not None:
                update_bar(self._bars, self._task, event)
            elif self._card is None:
                self._now_and_then(event)

    def trace(self, variable: str, rank: int, residual: float, tol: float) -> None:
        """Take the trace error of a basis of this rank."""
        with self._lock:
            name = f"trace error of {variable} against rank"
            self._curves.setdefault(name, Curve(name, logarithmic=True)).add(rank, residual)

    def losses(self, stage: str, losses: Sequence[float]) -> None:
        """Take the held-out losses of further candidates of a search."""
        with self._lock:
            if stage != self._stage:
                self._stage, self._losses = stage, []
            self._losses += map(float, losses)
            if len(self._losses) < 2:  # no curve yet: that of the stage before stays
                return
            curve = Curve("held-out loss of candidates", logarithmic=False)
            for number, loss in enumerate(self._losses, 1):
                curve.add(number, loss)
            self._curves[curve.name] = curve

    def _now_and_then(self, event: Event) -> None:
        now = time.monotonic()
        if event.step != self._step or now - self._spoken >= _LINES or event.done == 1.0:
            self._step, self._spoken = event.step, now
            self._console.print(printable(str(event)), markup=False, soft_wrap=True)

    def _tick(self) -> None:
        while not self._stop.wait(_EVERY):
            if self._card is not None:
                self._card.update(self._drawn())

    def _drawn(self, stopped: str = "") -> FitCard:
        """What a notebook shows now: the clock goes on where the step has nothing to report."""
        with self._lock:
            now, event = time.monotonic(), self._event
            seconds = now - self._begin
            curves = tuple(replace(each, points=[*each.points]) for each in self._curves.values())
            if event is None:
                head = stopped or "starting"
                return FitCard(f"{head}, {duration(seconds)}", head, "", 0.0, seconds, None, curves)
            if event.done == 1.0:
                text = "" if event.name == "done" else event.text  # of a fit that is its time
                line = f"done in {duration(event.seconds)}"
                return FitCard(line, "done", text, 1.0, event.seconds, None, curves)
            left = event.seconds_left
            left = None if left is None else max(0.0, left - (now - self._heard))
            line = f"{replace(event, seconds_left=left)}, {duration(seconds)} so far"
            head = f"step {event.step} of {event.steps}: {event.name}"
            if stopped:
                line, head, left = f"{stopped}, {line}", f"{stopped}, {head}", None
            return FitCard(line, head, event.text, event.done, seconds, left, curves)


def _in_notebook() -> bool:
    """Whether this is a kernel of Jupyter, where output is shown as it is written."""
    return "ipykernel" in sys.modules and type(sys.stdout).__module__.startswith("ipykernel")
