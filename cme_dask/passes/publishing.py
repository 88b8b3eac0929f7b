"""Figures that a fit on a cluster sends to the live panel on the scheduler's dashboard.

Figures are gathered and sent twice a second at most, by the event loop of the client: the fit waits
for none of it but the last message. Whatever goes wrong with the panel is no concern of the fit.
"""

import asyncio
import contextlib
import importlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import dask
from distributed import Client

from cme_dask.passes.cluster import within
from cme_dask.passes.panel import PANEL
from cme_dask.passes.progress import Event

_EVERY = 0.5  # seconds between messages
_INSTALL_SECONDS = 10.0  # for which a fit waits for its panel
_LAST_SECONDS = 2.0  # for which it waits until its last message is sent

log = logging.getLogger("cme_dask.run")

_CURRENT: ContextVar["Publisher | None"] = ContextVar("cme_dask_publisher", default=None)
_INSTALLED: "WeakKeyDictionary[Client, bool]" = WeakKeyDictionary()


def current() -> "Publisher | None":
    """The publisher of the fit that runs in this thread, if it has one."""
    return _CURRENT.get()


class Publisher:
    """Sends the figures of one fit.

    Parameters
    ----------
    client
        Of the cluster.
    name
        Of the estimator.
    rows
        Of the sample.
    """

    def __init__(self, client: Client, name: str, rows: int) -> None:
        self._client, self._fit = client, uuid4().hex
        self._lock, self._sending = threading.Lock(), asyncio.Lock()
        self._sent, self._scheduled, self._passes = -math.inf, False, 0
        self._predicted = self._most = 0  # bytes, of the pass to come and of those that began
        self._news: dict[str, Any] = {}
        self._values(name=name, rows=rows, client=client.id)
        self._flush()

    # Reports

    def __call__(self, event: Event) -> None:
        """Take an event of the whole fit."""
        self._values(
            step=event.step,
            steps=event.steps,
            step_name=event.name,
            done=event.done,
            seconds=event.seconds,
            left=event.seconds_left,
            text=event.text,
        )
        self._flush()

    def trace(self, variable: str, rank: int, residual: float, tol: float) -> None:
        """Take the trace error of a basis of this rank."""
        self._append("traces", [[variable, rank, float(residual), float(tol)]])

    def losses(self, stage: str, losses: Sequence[float]) -> None:
        """Take the held-out losses of further candidates of a search."""
        self._append("losses", [[stage, float(loss)] for loss in losses])

    def memory(self, predicted: int, limit: int) -> None:
        """Take the predicted peak of a worker in the pass to come, in bytes, and its limit."""
        self._predicted = predicted
        self._values(predicted=max(predicted, self._most), limit=limit)

    def begin_pass(self, name: str, rows: int, tasks: int) -> None:
        """Take the beginning of a pass over the rows."""
        self._passes += 1
        self._most = max(self._most, self._predicted)
        self._pass(name=name, rows_total=rows, tasks=tasks)
        self._flush()

    def continue_pass(self, rows: int, seconds: float) -> None:
        """Take the rows of the pass that are done."""
        self._pass(rows=rows, seconds=seconds)
        self._flush()

    def end_pass(self, seconds: float) -> None:
        """Take the end of the pass."""
        self._pass(seconds=seconds, ended=True)
        self._flush()

    def run(self, token: str) -> None:
        """Take the token in the names of the tasks of a run, which tell retries of this fit."""
        self._append("tokens", [token])
        self._flush(urgent=True)

    def close(self, status: str, error: str = "") -> None:
        """Send what is left, and how the fit has ended."""
        self._values(status=status, error=error)
        if self._client.status == "running":
            with contextlib.suppress(Exception):  # a lost scheduler is reported by the fit
                self._client.sync(self._send, callback_timeout=_LAST_SECONDS)

    # Messages

    def _values(self, **values: Any) -> None:
        with self._lock:
            self._news.setdefault("values", {}).update(values)

    def _append(self, key: str, values: list[Any]) -> None:
        with self._lock:
            self._news.setdefault(key, []).extend(values)

    def _pass(self, **values: Any) -> None:
        with self._lock:
            passes = self._news.setdefault("passes", {})
            passes.setdefault(self._passes, {}).update(values)

    def _flush(self, urgent: bool = False) -> None:
        """Have what there is sent soon, with what comes until then; or at once."""
        with self._lock:
            if self._scheduled and not urgent:
                return
            self._scheduled = True
        with contextlib.suppress(RuntimeError):  # of a loop that is closed
            self._client.loop.add_callback(self._send if urgent else self._send_later)

    async def _send_later(self) -> None:
        await asyncio.sleep(max(0.0, self._sent + _EVERY - time.monotonic()))
        await self._send()

    async def _send(self) -> None:
        async with self._sending:  # one after the other, so that none overtakes another
            with self._lock:
                news, self._news, self._scheduled = self._news, {}, False
            if not news:
                return
            self._sent = time.monotonic()
            # MessagePack as Dask reads it has no keys that are numbers.
            passes = [[number, values] for number, values in news.pop("passes", {}).items()]
            message = {"fit": self._fit, "passes": passes, **news}
            with contextlib.suppress(Exception):  # figures that are lost are only not shown
                await self._client.scheduler.log_event(topic=PANEL, msg=message)


@contextlib.contextmanager
def publishing(client: Client | None, name: str | None, rows: int) -> Iterator[Publisher | None]:
    """The publisher of a fit while it runs; None where there is no panel.

    There is none without a cluster, inside of another fit, which shows all that it does, and where
    ``cme-dask.panel`` in Dask's configuration is false.

    Parameters
    ----------
    client
        Of the cluster, or None.
    name
        Of the estimator; None for what is no fit.
    rows
        Of the sample.
    """
    if client is None or name is None or current() is not None or not _has_panel(client):
        yield None
        return
    publisher = Publisher(client, name, rows)
    token = _CURRENT.set(publisher)
    try:
        yield publisher
    except BaseException as error:
        words = " ".join(str(error).split())
        publisher.close("failed", f"{type(error).__name__}: {words}" if words else repr(error))
        raise
    else:
        publisher.close("done")
    finally:
        _CURRENT.reset(token)


def _has_panel(client: Client) -> bool:
    """Whether the scheduler of a client serves the panel, which is installed if it is not there."""
    if not dask.config.get("cme-dask.panel", True):
        return False
    if client not in _INSTALLED:
        try:
            installed = bool(
                within(_INSTALL_SECONDS, partial(client.run_on_scheduler, _installer()))
            )
        except Exception as error:  # noqa: BLE001 - a fit does not need its panel
            log.debug("no live panel: %s", error)
            installed = False
        _INSTALLED[client] = installed
    return _INSTALLED[client]


def _installer() -> Any:
    """The function that installs the panel on a scheduler, which may lack this package."""

    # Inside, so that it is sent as code and not by the name of a module that may not be there.
    def install(dask_scheduler: Any = None) -> bool:
        try:
            panel = importlib.import_module("cme_dask.passes.panel")
        except ImportError:
            return False
        return bool(panel.install(dask_scheduler))

    return install
