"""Clusters: how they are reached, and what they must have."""

import contextlib
import importlib.util
import logging
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import dask
from distributed import Client

from cme_dask import __version__
from cme_dask.errors import ResourceError, remedy

Scheduler: TypeAlias = Any
"""A scheduler's name, a ``distributed.Client``, or None for what Dask is set to."""

_CONNECT_SECONDS = 10
_ENCRYPTED = "tls://", "wss://"
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
    encrypted = scheduler.startswith(_ENCRYPTED)
    if dask.config.get("distributed.comm.require-encryption", None) and not encrypted:
        raise ResourceError(
            f"encryption is required, but {scheduler} is not encrypted: start the scheduler and "
            "its workers with certificates, and give its tls:// address"
        )
    if encrypted:
        _check_certificates(scheduler)
    try:
        client = Client(scheduler, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ResourceError(_unreachable(scheduler, error)) from error
    # A lost scheduler is told in one sentence, not in a traceback of each attempt to reconnect.
    logger = logging.getLogger("distributed.client")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with client:
            yield client
    finally:
        logger.setLevel(level)


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
    """The sentence on a failed connection; what TLS refused is told by text, too."""
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
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def cluster_threads(client: Client) -> int:
    """Threads of all workers, which must be able to run tasks of this process.

    Raises
    ------
    ResourceError
        If there are no workers, or one lacks cme_dask, or has another version of it, another minor
        version of Python, or another major version of NumPy or Zarr.
    """
    threads = sum(client.nthreads().values())
    if threads == 0:
        raise ResourceError(
            f"the cluster at {client.scheduler.address} has no workers: start some, "
            "for example with `dask worker ADDRESS`"
        )
    check_workers(client)
    return int(threads)


def check_workers(client: Client) -> None:
    """ResourceError that names a worker which can't run tasks of this process, and why."""

    # Inside, so that it is sent as code and not by the name of a module that may not be there.
    def is_there() -> bool:
        return importlib.util.find_spec("cme_dask") is not None

    seen = client.run(is_there, on_error="ignore")  # some may die now
    lacking = [name for name, there in seen.items() if not there]
    found = client.get_versions(packages=["cme_dask", "zarr"])
    here = found["client"]["packages"]
    if lacking:
        raise ResourceError(
            f"worker {lacking[0]}{_more(lacking)} has no cme_dask: install version "
            f"{here['cme_dask'] or __version__} of it where the workers run"
        )
    others = {name: about["packages"] for name, about in found["workers"].items() if about}
    different: dict[str, str] = {}
    for name, packages in others.items():
        for package, (ours, theirs) in _differences(here, packages).items():
            different.setdefault(name, f"{package} {theirs}, this client {package} {ours}")
    if different:
        name, said = next(iter(different.items()))
        raise ResourceError(
            f"worker {name}{_more(list(different))} has {said}: install the same versions on both "
            "sides"
        )


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
