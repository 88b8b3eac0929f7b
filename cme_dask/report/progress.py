"""How far a command is, for people, on stderr."""

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from cme_dask.chunked.passes import PassProgress
    from cme_dask.estimators.recipe import PivotProgress, TuningProgress
    from cme_dask.storage.ingest import IngestProgress


class ProgressLines:
    """One line per step of a command; use as a context manager.

    A terminal sees bars. Anything else, such as the log of a cluster's job, sees what :meth:`say`
    is given, and a line now and then.

    Parameters
    ----------
    every
        Seconds between these lines.
    """

    def __init__(self, every: float = 30.0) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._every = every
        self._first: dict[str, tuple[float, float]] = {}  # when each was heard of, how far it was
        self._next = time.monotonic() + every
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, markup=False, soft_wrap=True)

    def fit(self, event: "PivotProgress | PassProgress | TuningProgress") -> None:
        """Show the progress of a fit; the ``progress`` of an estimator's ``fit``."""
        from cme_dask.chunked.passes import PassProgress
        from cme_dask.estimators.recipe import TuningProgress

        if isinstance(event, TuningProgress):
            text = f"{event.done} of {event.most} kernels, best score {event.score:.3f}"
            self._show(f"tuning, {event.stage}", min(1.0, event.done / event.most), text)
            return
        if isinstance(event, PassProgress):
            rate = event.rows / event.seconds if event.seconds else 0.0
            text = f"strip {event.strips:,} of {event.strips_total:,}, {rate:,.0f} rows/s"
            self._show("pass", event.rows / event.rows_total, text)
            return
        text = f"rank {event.rank}, residual trace {event.residual_trace:.1e} (tol {event.tol:g})"
        # The residual falls about exponentially: its logarithm is what moves evenly.
        done = math.log(min(1.0, max(event.residual_trace, 1e-300))) / math.log(event.tol)
        self._show(f"pivots of {event.variable}", min(1.0, done), text)

    def ingest(self, event: "IngestProgress") -> None:
        """Show the progress of an ingestion."""
        text = f"file {event.files_done + 1} of {event.files_total}, {event.rows_read:,} rows"
        self._show("ingest", event.files_done / event.files_total, text)

    def counter(self, label: str, total: int) -> Callable[[int], None]:
        """A callback that shows how many rows of ``total`` are done."""
        return lambda rows: self._show(label, rows / total, f"{rows:,} of {total:,} rows")

    def _show(self, label: str, done: float, text: str) -> None:
        if not self._console.is_terminal:
            self._now_and_then(label, done, text)
            return
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=1.0, text=text)
        self._bars.update(self._tasks[label], completed=done, text=text)

    def _now_and_then(self, label: str, done: float, text: str) -> None:
        now = time.monotonic()
        begun, before = self._first.setdefault(label, (now, done))
        if now < self._next:
            return
        self._next = now + self._every
        left = ""
        if done > before:
            left = f", {_duration((now - begun) * (1.0 - done) / (done - before))} left"
        self.say(f"{label} {done:.0%}, {text}{left}".replace("%", " %", 1))


def _duration(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
