"""What happens in a run, as lines of JSON, by way of Python's own ``logging``.

The package logs under ``cme_dask``; records carry their numbers as attributes, ``event`` among
them, so that any handler can use them. This module has the handlers of the command.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cme_dask.storage.atomic import disk_errors

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
        "message": record.getMessage(),
        **own,
    }


class JsonLines(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; values that JSON does not know become texts."""
        return json.dumps(describe_record(record), default=str)


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
    with disk_errors(path):
        handler = logging.FileHandler(path, encoding="utf-8")
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
