"""Clusters: how they are reached, and jobs on them that survive their workers.

A job on a cluster, which survives its workers.

The whole tree is requested at once, so that a slow network costs no pause between its levels. Nodes
are held until their sum has gone into another: what was lost with a worker Dask repeats by itself,
and what ran on so many workers that died that Dask gives it up for a killer of workers is requested
again, with what hangs on it, while all other sums stay.
"""

import asyncio
import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import platform
import queue
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import dask
import psutil
from dask.delayed import Delayed
from dask.utils import parse_timedelta
from distributed import (
    CancelledError,
    Client,
    Future,
    KilledWorker,
    WorkerPlugin,
    rejoin,
    secede,
)
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError
from distributed.core import rpc
from distributed.scheduler import heartbeat_interval
from distributed.security import Security
from distributed.worker import thread_state

from cme_dask import __version__
from cme_dask.config import ENCRYPTED
from cme_dask.errors import DataError, ResourceError, remedy, warn
from cme_dask.kernels.evaluator import PROCESS, limit_this_process
from cme_dask.numerics.reduction import tree_merges
from cme_dask.passes.user_code import user_modules

_ANSWER_SECONDS = 10.0  # in which workers answer, unless they are stopped or import slowly
_SILENT_SECONDS = 5.0  # without a heartbeat, beside the pauses between heartbeats
_UNTOLD_SECONDS = 10.0  # of waiting for a first worker that need no explanation
_LOOKS = 5  # at the workers, as long as some are left out

T = TypeVar("T")


def within(seconds: float, function: Callable[[], T]) -> T:
    """What a function gives; TimeoutError after so many seconds, in which case it goes on alone."""
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:  # noqa: BLE001 - raised below
            outcome.put((None, error))

    # A daemon: the end of the process does not wait for it.
    threading.Thread(target=work, daemon=True, name="ask-cluster").start()
    try:
        value, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def run_on_workers(client: Client, function: Callable[..., T], *args: Any) -> dict[str, T]:
    """What a function gives on each worker, by address; those that die or are stopped left out.

    Raises
    ------
    ResourceError
        If no worker answers, or the scheduler is lost.
    """
    for seconds in (_ANSWER_SECONDS, _ANSWER_SECONDS, _patience()):
        described = described_workers(client)
        workers = _heard(described)
        if len(workers) < len(described):
            silent = sorted(set(described) - set(workers))
            info = {"event": "silent workers", "workers": silent}
            log.warning("no answer of %s", ", ".join(silent), extra=info)
        ask = partial(client.run, function, *args, workers=workers, on_error="ignore")
        try:
            return within(seconds, ask)
        except TimeoutError:
            continue
        except OSError as error:
            raise scheduler_lost(client, error) from error
    raise ResourceError(
        f"no worker of the cluster at {client.scheduler.address} answers: they are stopped or "
        "unreachable, restart them"
    )


def _heard(described: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The workers whose last heartbeat is as recent as it should be."""
    newest = max((worker["last_seen"] for worker in described.values()), default=0.0)
    oldest = newest - _SILENT_SECONDS - 2.0 * heartbeat_interval(len(described))
    return [address for address, w in described.items() if w["last_seen"] >= oldest]


class OneBlasThread(WorkerPlugin):  # type: ignore[misc]
    """Limits each worker process of a cluster, once."""

    name = "cme-dask-one-blas-thread"
    idempotent = True  # registered once in the life of a cluster

    def __init__(self) -> None:
        self._client_process = PROCESS

    def setup(self, worker: Any) -> None:
        """Limit the process, unless it is the client's own, which limits itself while it waits."""
        _limit(self._client_process)


def _limit(client_process: str) -> None:
    """Limit a process, unless it is that of the client."""
    if client_process != PROCESS:
        limit_this_process()


def limit_workers(client: Client) -> None:
    """Limit all workers of a cluster, those that join later as well.

    The scheduler keeps the plugin for those that join, and sends it to each worker. It fails when
    one of them dies meanwhile, and waits for one that is stopped; the others are then asked by the
    client.

    Raises
    ------
    ResourceError
        If the scheduler is lost.
    """
    try:
        within(_ANSWER_SECONDS, partial(client.register_plugin, OneBlasThread()))
    except (OSError, RuntimeError, KeyError):
        run_on_workers(client, _limit, PROCESS)


# Modules of the user's own functions, which workers must have


def check_workers_have(client: Client, value: Any) -> None:
    """ResourceError unless all workers can import the modules that a value needs.

    A worker that can't unpack a task dies of it, and the next one, too.
    """
    names = sorted(user_modules(value))
    if not names:
        return
    missing = run_on_workers(client, _missing, names)
    lacking = {name: who for who, lost in missing.items() for name in lost}
    for name, who in lacking.items():
        raise ResourceError(
            f"the worker {who} can't import {name!r}, where functions of this run are defined: "
            "install it there, put it on PYTHONPATH, or send it with Client.upload_file"
        )


def _missing(names: list[str]) -> list[str]:
    lost = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            lost.append(name)
    return lost


# Clusters: how they are reached, and what they must have


Scheduler: TypeAlias = Any
"""A scheduler's name, a ``distributed.Client``, or None for what Dask is set to."""

_CONNECT_SECONDS = 10
_PARTS = {"cme_dask": 9, "python": 2, "numpy": 1, "zarr": 1}
"""Leading parts of the versions that must be equal: tasks are pickled, and sums are compared."""


def configured(settings: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Settings of Dask's configuration by their dotted names, for as long as a block runs."""
    context: contextlib.AbstractContextManager[Any] = dask.config.set(dict(settings))
    return context


@contextlib.contextmanager
def connected(scheduler: str | None) -> Iterator[Scheduler]:
    """A scheduler's name as it is; of a cluster's address, a client for as long as it is used.

    Certificates for ``tls://`` addresses, and whether other ones are refused, are what Dask is set
    to: ``distributed.comm.tls`` and ``distributed.comm.require-encryption``.

    Raises
    ------
    ResourceError
        If no scheduler answers at the address; if its certificate or ours is missing, unreadable or
        refused; if encryption is required and the address has none.
    """
    if scheduler is None or "://" not in scheduler:
        yield scheduler
        return
    encrypted = scheduler.startswith(ENCRYPTED)
    if dask.config.get("distributed.comm.require-encryption", None) and not encrypted:
        raise ResourceError(
            f"encryption is required, but {scheduler} is not encrypted: start the scheduler and "
            "its workers with certificates, and give its tls:// address"
        )
    if encrypted:
        _check_certificates(scheduler)
    elif dask.config.get("distributed.comm.tls.client.cert", None):
        warn(
            f"{scheduler} is not encrypted, although Dask's configuration has certificates: give "
            "its tls:// address if it has one",
            UserWarning,
        )
    try:
        within(_CONNECT_SECONDS, partial(_identity, scheduler))  # others may accept and be silent
        client = Client(scheduler, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError, RuntimeError, EOFError) as error:
        raise ResourceError(_unreachable(scheduler, error)) from error
    # A lost scheduler is reported in one sentence, not in a traceback of each attempt to reconnect.
    logger = logging.getLogger("distributed.client")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with client:
            yield client
    finally:
        logger.setLevel(level)


def _identity(address: str) -> None:
    """Ask what is at an address who it is; OSError or TypeError if that is no scheduler."""

    async def asked() -> dict[str, Any]:
        arguments = Security().get_connection_args("client")
        async with rpc(address, timeout=_CONNECT_SECONDS, connection_args=arguments) as there:
            return await there.identity()  # type: ignore[no-any-return]

    answer = asyncio.run(asked())
    if answer.get("type") != "Scheduler":
        raise TypeError(f"{address} is a {answer.get('type')}")


_FLAGS = "--tls-ca-file, --tls-cert and --tls-key"


def _check_certificates(scheduler: str) -> None:
    """ResourceError if Dask's certificates for clients are not there, or can't be read."""
    settings = {
        "--tls-ca-file": dask.config.get("distributed.comm.tls.ca-file", None),
        "--tls-cert": dask.config.get("distributed.comm.tls.client.cert", None),
    }
    missing = [option for option, value in settings.items() if not value]
    if missing:
        raise ResourceError(
            f"{scheduler} needs certificates: {remedy('', f'give {_FLAGS}, or ')}set "
            "distributed.comm.tls in Dask's configuration"
        )
    key = dask.config.get("distributed.comm.tls.client.key", None)
    try:
        context = ssl.create_default_context(cafile=settings["--tls-ca-file"])
        context.load_cert_chain(settings["--tls-cert"], key)
    except OSError as error:  # an SSLError is one
        reason = error.strerror or str(error)
        raise ResourceError(
            f"the certificates for {scheduler} can't be used ({reason}): correct "
            f"{remedy('', f'{_FLAGS}, or ')}distributed.comm.tls in Dask's configuration"
        ) from error


def _unreachable(scheduler: str, error: BaseException) -> str:
    """The sentence on a failed connection; refusals of TLS are recognised by their text, too."""
    causes = _causes(error)
    if any(isinstance(e, ssl.SSLError) or "SSL" in str(e) for e in causes):
        return (
            f"{scheduler} and this client don't trust each other: their certificates must be "
            "signed by the same authority, that of "
            + remedy("distributed.comm.tls.ca-file in Dask's configuration", "--tls-ca-file")
        )
    return (
        f"no scheduler answers at {scheduler} within {_CONNECT_SECONDS} s: start one with "
        "`dask scheduler`, or correct the address"
    )


def _causes(error: BaseException | None) -> list[BaseException]:
    values: list[BaseException] = []
    while error is not None and error not in values:
        values.append(error)
        error = error.__cause__ or error.__context__
    return values


def check_client(client: Client) -> None:
    """Refuse a client that can't run a pass.

    Raises
    ------
    DataError
        If it is asynchronous.
    ResourceError
        If it is closed.
    """
    if client.asynchronous:
        raise DataError(
            "the client is asynchronous, a fit waits for its tasks: give a Client(address) of its "
            "own, and call fit in a thread (asyncio.to_thread)"
        )
    if client.status not in ("running", "connecting"):
        raise ResourceError(
            f"the client is {client.status}: connect another one, Client(address), and keep it "
            "open while it is used"
        )


def awaited_workers(client: Client) -> Mapping[str, Mapping[str, Any]]:
    """What the scheduler knows of each worker, once there is one.

    Clusters that adapt to their tasks may begin without a worker, and so do those whose workers are
    jobs in a queue, or have just been started. Not waited for are those of a cluster of this
    process that starts none.

    Raises
    ------
    ResourceError
        If there are no workers, or the scheduler is lost.
    """
    described = described_workers(client)
    cluster = client.cluster  # None where the client knows its address alone
    starts = getattr(cluster, "worker_spec", True) or getattr(cluster, "_adaptive", None)
    if not described and starts:
        asked_for = _wait_for_a_worker(client)
        described = described_workers(client)
        del asked_for  # until here, so that an adaptive cluster does not let the worker go
    if not described:
        raise ResourceError(
            f"the cluster at {client.scheduler.address} has no workers: start some, "
            "for example with `dask worker ADDRESS`"
        )
    return described


def _wait_for_a_worker(client: Client) -> Future | None:
    """Wait until there is one, or patience ends, with a warning if that takes long.

    Returns the task that made an adaptive cluster start it.
    """
    patience, at = _patience(), client.scheduler.address
    info = {"event": "waiting for workers", "seconds": patience}
    log.warning(
        "there is no worker at %s yet: waiting up to %g s for one", at, patience, extra=info
    )
    if patience <= 0.0:  # which Dask takes for no limit
        return None
    untold = min(patience, _UNTOLD_SECONDS)
    try:
        task = client.submit(int, pure=False)  # without tasks an adaptive cluster starts none
        with contextlib.suppress(TimeoutError):
            client.wait_for_workers(1, untold)
            return task
        if untold < patience:
            warn(
                f"there has been no worker at {at} for {untold:g} s: waiting up to "
                f"{patience - untold:g} s more for one",
                RuntimeWarning,
            )
            with contextlib.suppress(TimeoutError):
                client.wait_for_workers(1, patience - untold)
        return task
    except (OSError, RuntimeError, AttributeError) as error:
        raise scheduler_lost(client, error) from error


def _patience() -> float:
    """Seconds that a run waits for a worker."""
    return float(parse_timedelta(dask.config.get("cme-dask.no-workers-timeout", _NO_WORKERS)))


def check_workers(client: Client) -> int:
    """Bytes that the largest worker holds by itself, once it has imported the package.

    Raises
    ------
    ResourceError
        If a worker lacks cme_dask, or has another version of it, another minor version of Python,
        or another major version of NumPy or Zarr.
    """
    names = [name for name in _PARTS if name != "python"]

    # Inside, so that it is sent as code and not by the name of a module that may not be there.
    def about(dask_worker: Any = None) -> tuple[dict[str, str | None], int]:
        versions: dict[str, str | None] = {"python": platform.python_version()}
        for name in names:
            if importlib.util.find_spec(name) is None:
                versions[name] = None
                continue
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:  # a folder of sources
                versions[name] = importlib.import_module(name).__version__
        if versions["cme_dask"] is not None:
            importlib.import_module("cme_dask.passes.driver")
        data = getattr(getattr(dask_worker, "data", None), "fast", None)  # which it may spill
        return versions, psutil.Process().memory_info().rss - getattr(data, "total_weight", 0)

    here, _ = about()
    answers = run_on_workers(client, about)
    lacking = [name for name, (versions, _) in answers.items() if versions["cme_dask"] is None]
    if lacking:
        raise ResourceError(
            f"worker {lacking[0]}{_more(lacking)} has no cme_dask: install version "
            f"{here['cme_dask'] or __version__} of it where the workers run"
        )
    different: dict[str, str] = {}
    for name, (versions, _) in answers.items():
        for package, (ours, theirs) in _differences(here, versions).items():
            different.setdefault(name, f"{package} {theirs}, this client {package} {ours}")
    if different:
        name, said = next(iter(different.items()))
        raise ResourceError(
            f"worker {name}{_more(list(different))} has {said}: install the same versions on both "
            "sides"
        )
    return max((resident for _, resident in answers.values()), default=0)


def _differences(
    here: Mapping[str, str | None], there: Mapping[str, str | None]
) -> dict[str, tuple[str, str]]:
    """Versions here and there of the packages in which they differ too much."""
    both = {name: (here.get(name), there.get(name)) for name in _PARTS}
    return {
        name: (ours, theirs)
        for name, (ours, theirs) in both.items()
        if ours and theirs and _leading(ours, name) != _leading(theirs, name)
    }


def _leading(version: str, name: str) -> list[str]:
    return version.split(".")[: _PARTS[name]]


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


# A job on a cluster, which survives its workers


log = logging.getLogger("cme_dask.run")


@contextlib.contextmanager
def seceded() -> Iterator[None]:
    """Give up the place of the task in which this runs, if any, for the tasks that it waits for.

    So does ``Client.compute``: a fit in a task would otherwise keep its own tasks from the worker.
    """
    in_task = getattr(thread_state, "key", None) is not None
    if in_task:
        try:
            secede()
        except (ValueError, KeyError):  # it has done so itself
            in_task = False
    try:
        yield
    finally:
        if in_task:
            rejoin()


_ATTEMPTS = 6  # of a node while no other one ends, each after `allowed-failures` + 1 dead workers
_PAUSE = 5.0  # seconds without news after which workers are looked for
_NO_WORKERS = 300.0  # seconds without any worker, by default
_LOST = (CommClosedError, CancelledError, FutureCancelledError, TimeoutError, OSError)


class ClusterRun:
    """One run of the leaves of a tree, and of the merges of what they give.

    Parameters
    ----------
    client
        The cluster.
    graph
        The tasks of nodes of the tree, from the numbers of their attempts and from what other nodes
        have given; see :func:`cme_dask.passes.driver.task_graph`.
    leaves
        Number of leaves.
    functions
        Names of the functions of leaves and of merges.
    token
        In the names of the tasks.
    on_done
        Called with the number of a leaf when it has ended.
    """

    def __init__(
        self,
        client: Client,
        graph: Callable[[Mapping[int, int], Mapping[int, Any]], list[Delayed]],
        leaves: int,
        functions: tuple[str, str],
        token: str,
        on_done: Callable[[int], None] | None,
    ) -> None:
        self._client, self._graph, self._token, self._on_done = client, graph, token, on_done
        self._functions = tuple(f"{function}-" for function in functions)
        self._leaves, self._merges = leaves, tree_merges(leaves)
        self._held: dict[int, Future] = {}
        self._attempts: dict[int, int] = {}
        self._killed: set[str] = set()
        self._failures: Counter[str] = Counter()  # since something ended
        self._told: set[int] = set()
        self._refused: OSError | None = None  # what who hears of the progress raised
        self._news: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def result(self) -> Any:
        """The sum over all leaves.

        Raises
        ------
        ResourceError
            If the scheduler is lost, no worker is left, or workers die again and again over the
            same task.
        Exception
            What a task raised.
        """
        try:
            try:
                with seceded():
                    last = self._drive()
                    if last.status == "finished":
                        return last.result()
            except _LOST as error:
                if error is self._refused:
                    raise
                raise scheduler_lost(self._client, error) from error
            return last.result()  # raises what the task raised
        except KilledWorker as error:  # the sum was lost, and again, while it was fetched
            raise _killers(str(error.task)) from error
        finally:
            with contextlib.suppress(Exception):
                self._client.cancel(list(self._held.values()))

    def wait(self) -> None:
        """Return once the sum over all leaves is on a worker, without fetching it."""
        try:
            self._drive()
        finally:
            with contextlib.suppress(Exception):
                self._client.cancel(list(self._held.values()))

    def _parts(self, node: int) -> tuple[int, ...]:
        """The two nodes that are merged into one; none of a leaf."""
        return () if node < self._leaves else self._merges[node - self._leaves]

    def _drive(self) -> Future:
        """The future of the sum over all leaves, or of a node that failed for good."""
        root = self._leaves + len(self._merges) - 1
        self._ask(range(root + 1))
        while True:
            node, attempt = self._next()
            if attempt != self._attempts[node]:
                continue  # of a future that was given up
            future = self._held.get(node)
            if future is not None and future.status == "cancelled":
                raise _cancelled(self._client)
            if future is not None and future.status == "error":
                if not isinstance(future.exception(), KilledWorker):
                    return future
                self._again(node, future)
                continue
            self._failures.clear()
            if node < self._leaves and node not in self._told:
                self._told.add(node)
                try:
                    if self._on_done is not None:
                        self._on_done(node)
                except OSError as error:  # a full disk, a closed terminal: not our scheduler
                    self._refused = error
                    raise
            if node == root and future is not None:
                return future
            for part in self._parts(node):  # they have gone into this one
                self._held.pop(part, None)

    def _next(self) -> tuple[int, int]:
        """The next node that has ended, and its attempt; ResourceError if nobody works."""
        patience, idle_since = _patience(), None
        while True:
            try:
                return self._news.get(timeout=_PAUSE)
            except queue.Empty:
                if self._client.status not in ("running", "connecting"):
                    why = f"the client is {self._client.status}"
                    raise scheduler_lost(self._client, why) from None
            if self._client.nthreads():
                idle_since = None
                continue
            now = time.monotonic()
            idle_since = now if idle_since is None else idle_since
            if now - idle_since > patience:
                raise ResourceError(
                    f"the cluster at {self._client.scheduler.address} has had no worker for "
                    f"{patience:.0f} s: start some, for example with `dask worker ADDRESS`, and "
                    "run it again"
                )

    def _again(self, node: int, future: Future) -> None:
        """Ask again for a node that hangs on a task whose workers died, and for what it lacks."""
        error = future.exception()
        task = str(error.task)
        if self._token not in task and not task.startswith(self._functions):
            # A chunk of the user's: under the same name, it has failed.
            raise _killers(task) from error
        if task not in self._killed:  # all that hang on it have the same error
            self._killed.add(task)
            name = task.split("-again")[0]
            self._failures[name] += 1
            info = {"event": "retry", "task": task, "failures": self._failures[name]}
            log.warning("%s lost its workers and is run again", task, extra=info)
            if self._failures[name] >= _ATTEMPTS:
                raise _killers(task) from error
        lacking: set[int] = set()

        def need(other: int) -> None:
            there = self._held.get(other)
            if other in lacking or (there is not None and there.status != "error"):
                return
            lacking.add(other)
            for part in self._parts(other):
                need(part)

        need(node)
        self._ask(sorted(lacking))

    def _ask(self, nodes: Sequence[int]) -> None:
        """Futures of nodes, in ascending order, whose other parts are held."""
        for node in nodes:
            self._attempts[node] = self._attempts.get(node, -1) + 1
        attempts = {node: self._attempts[node] for node in nodes}
        tasks = self._graph(attempts, self._held)
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 GiB"}):
            futures = self._client.compute(tasks)
        for node, future in zip(nodes, futures, strict=True):
            self._held[node] = future
            info = partial(self._tell, node, self._attempts[node])
            future.add_done_callback(info)

    def _tell(self, node: int, attempt: int, _: Future) -> None:
        self._news.put((node, attempt))


def described_workers(client: Client) -> Mapping[str, Mapping[str, Any]]:
    """What the scheduler knows of each worker, by address.

    Raises
    ------
    ResourceError
        If the scheduler is lost: the client then knows of no workers, not even that there are none.
    """
    workers: Mapping[str, Mapping[str, Any]] = {}
    for _ in range(_LOOKS):
        try:
            info = client.scheduler_info(n_workers=-1)
        except (OSError, RuntimeError) as error:  # the latter if the client's event loop has ended
            raise scheduler_lost(client, error) from error
        if "workers" not in info:
            raise scheduler_lost(client, f"the client is {client.status}")
        workers = info["workers"]
        if len(workers) == info["n_workers"]:
            break  # else the client's own periodic look came between, which asks for no workers
    return workers


def scheduler_lost(client: Client, why: object) -> ResourceError:
    """The error of a run whose scheduler is gone, and why it is thought to be."""
    address = "the cluster" if client.scheduler is None else client.scheduler.address
    return ResourceError(
        f"the scheduler at {address} was lost, and with it the run: start it again and repeat; a "
        f"run with a checkpoint goes on where it was ({why})"
    )


def _cancelled(client: Client) -> ResourceError:
    """The error of a run whose tasks were cancelled, by a scheduler that lives or is gone."""
    why = "its tasks were cancelled"
    try:
        if not described_workers(client):
            return scheduler_lost(client, why)
    except ResourceError as lost:
        return lost
    return ResourceError(
        "tasks of the run were cancelled, or chunks that they need: persist the arrays again, keep "
        "a reference to them until it has ended, and repeat"
    )


def _killers(task: str) -> ResourceError:
    return ResourceError(
        f"workers died again and again while they ran {task}: give them more memory, lower the "
        "ranks, or make chunks of fewer rows"
    )
