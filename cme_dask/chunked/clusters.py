"""Clusters: how they are reached, and what they must have."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

from distributed import Client

from cme_dask.errors import ResourceError

Scheduler: TypeAlias = Any
"""A scheduler's name, a ``distributed.Client``, or None for what Dask is set to."""

_CONNECT_SECONDS = 10


@contextlib.contextmanager
def connected(scheduler: str | None) -> Iterator[Scheduler]:
    """A scheduler's name as it is; of a cluster's address, a client for as long as it is used.

    Raises
    ------
    ResourceError
        If no scheduler answers at the address.
    """
    if scheduler is None or "://" not in scheduler:
        yield scheduler
        return
    try:
        client = Client(scheduler, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"no scheduler answers at {scheduler} within {_CONNECT_SECONDS} s: start one with "
            "`dask scheduler`, or correct the address"
        ) from error
    with client:
        yield client


def cluster_threads(client: Client) -> int:
    """Threads of all workers; ResourceError if there are none."""
    threads = sum(client.nthreads().values())
    if threads == 0:
        raise ResourceError(
            f"the cluster at {client.scheduler.address} has no workers: start some, "
            "for example with `dask worker ADDRESS`"
        )
    return int(threads)
