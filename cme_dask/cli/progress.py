"""The progress of a command: bars and lines on stderr, and a log of JSON lines.

What happens in a run, as lines of JSON, by way of Python's own ``logging``.

The package logs under ``cme_dask``; records carry their numbers as attributes, ``event`` among
them, so that any handler can use them. This module has the handlers of the command.
"""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click
from rich.console import Console
from rich.progress import TaskID

from cme_dask.data.atomic import disk_errors
from cme_dask.display import duration
from cme_dask.errors import DataError, printable, without_secrets
from cme_dask.passes.progress import Event, Listener, bars, update_bar

if TYPE_CHECKING:
    from cme_dask.data.ingest import IngestProgress


# What happens in a run, as lines of JSON, by way of Python's own ``logging``


_HEAD = 1 << 12  # bytes

LOGGER = logging.getLogger("cme_dask")

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def describe_record(record: logging.LogRecord) -> dict[str, Any]:
    """A record as plain values: time (UTC), level, event, message, and its own numbers."""
    own = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
    time = datetime.fromtimestamp(record.created, UTC)
    return {
        "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "event": own.pop("event", "message"),
        "message": without_secrets(record.getMessage()),
        **own,
    }


class JsonLines(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; values that JSON does not know become texts."""
        return json.dumps(describe_record(record), default=str)


class LogFile(logging.FileHandler):
    """A file that takes records for as long as its disk does; what they tell of goes on without."""

    _failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one."""
        if not self._failed:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Give up, and warn of it."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._failed = True
        click.echo(
            f"warning: the log {self.baseFilename} can't be written ({error.strerror or error}): "
            "it ends here, the run goes on",
            err=True,
        )

    def close(self) -> None:
        """Close the file, also where it can't take the rest."""
        with contextlib.suppress(OSError):
            super().close()


class Remembered(logging.Handler):
    """Keeps records.

    Attributes
    ----------
    records
        All of them, as plain values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.records.append(describe_record(record))


@contextlib.contextmanager
def handling(handler: logging.Handler) -> Iterator[None]:
    """Give all that the package logs to a handler meanwhile."""
    level = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        handler.close()


@contextlib.contextmanager
def logging_to(path: Path | None) -> Iterator[None]:
    """Append what happens to a file as lines of JSON, its end or failure last.

    Parameters
    ----------
    path
        The file; None for none.

    Raises
    ------
    ResourceError
        If it can't be written to.
    """
    if path is None:
        yield
        return
    _check_log(path)
    with disk_errors(path):
        handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(JsonLines())
    with handling(handler):
        LOGGER.info("started", extra={"event": "started"})
        try:
            yield
        except BaseException as error:
            what = {"event": "failed", "error": type(error).__name__}
            LOGGER.error(str(error) or type(error).__name__, extra=what)
            raise
        LOGGER.info("ended", extra={"event": "ended"})


def _check_log(path: Path) -> None:
    """DataError if lines would be appended to a file that holds others."""
    with disk_errors(path):
        if not path.is_file() or not path.stat().st_size:
            return
        with path.open("rb") as file:
            head = file.read(_HEAD).partition(b"\n")[0]
    if not (head.startswith(b'{"time": ') and b'"event": ' in head):
        raise DataError(f"{path} is no log of cme_dask: choose another file (--log)")


# How far a command is, for people, on stderr


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
        # When each began to be shown, how far it was then, and how far it was last.
        self._first: dict[str, tuple[float, float, float]] = {}
        self._next = time.monotonic() + every
        self._bars = bars(self._console, transient=True)
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
        self._console.print(printable(without_secrets(line)), markup=False, soft_wrap=True)

    def fit(self, event: Event) -> None:
        """Show the progress of a fit or of a single pass: the ``progress`` of what makes it."""
        if not event.rows_total:
            self._whole(event)
            return
        text = f"{event.rows:,} of {event.rows_total:,} rows, {event.text}"
        self._show("pass", event.done, text)

    def _whole(self, event: Event) -> None:
        """Show how far a fit is: one bar, whose share never falls, with one time left."""
        if self._console.is_terminal:
            if "fit" not in self._tasks:
                self._tasks["fit"] = self._bars.add_task("fit", total=1.0, text="")
            update_bar(self._bars, self._tasks["fit"], event)
            return
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every
            self.say(str(event).replace("%", " %"))

    def ingest(self, event: "IngestProgress") -> None:
        """Show the progress of an ingestion."""
        text = f"file {event.files_done + 1} of {event.files_total}, {event.rows_read:,} rows"
        self._show("ingest", event.files_done / event.files_total, text)

    def counter(self, label: str, total: int) -> Callable[[int], None]:
        """A callback that shows how many rows of ``total`` are done."""
        return lambda rows: self._show(label, rows / total, f"{rows:,} of {total:,} rows")

    def rows_of(self, label: str) -> Listener:
        """A callback that shows how many rows of a pass are done."""
        return lambda event: self.counter(label, event.rows_total)(event.rows)

    def _show(self, label: str, done: float, text: str) -> None:
        if not self._console.is_terminal:
            self._now_and_then(label, done, text)
            return
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=1.0, text=text)
        now = time.monotonic()
        left = self._left(label, done, now)
        self._bars.update(self._tasks[label], completed=done, text=text, left=left, heard=now)

    def _left(self, label: str, done: float, now: float) -> float | None:
        """Seconds at the rate since the first report of this pass."""
        begun, before, last = self._first.get(label, (now, done, done))
        if done < last:  # another pass of that name
            begun, before = now, done
        self._first[label] = begun, before, done
        return (now - begun) * (1.0 - done) / (done - before) if done > before else None

    def _now_and_then(self, label: str, done: float, text: str) -> None:
        now = time.monotonic()
        seconds = self._left(label, done, now)
        if now < self._next:
            return
        self._next = now + self._every
        left = "" if seconds is None else f", {duration(seconds)} left"
        self.say(f"{label} {done:.0%}, {text}{left}".replace("%", " %", 1))
