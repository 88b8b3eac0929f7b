"""Where a command runs, and what is told of it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cme_dask.errors import DataError

if TYPE_CHECKING:
    from cme_dask.chunked.clusters import Scheduler


@dataclass(frozen=True)
class Compute:
    """Where to run.

    Parameters
    ----------
    scheduler
        ``threads``, ``processes``, ``synchronous``, the address of a cluster's scheduler, or None
        for what Dask is set to.
    workers
        Threads or processes, not for clusters.
    memory_limit
        Bytes that this process, or each worker of a cluster, may use.
    report
        Folder that tells what was done, of memory over time among other things; None for none.
    overwrite
        Whether it may replace an earlier one.
    """

    scheduler: str | None = None
    workers: int | None = None
    memory_limit: str | None = None
    report: Path | None = None
    overwrite: bool = False

    @contextlib.contextmanager
    def open(self) -> "Iterator[Scheduler]":
        """A scheduler for ``fit``: a name as it is, an address as a connected client.

        The report is of what is done with it, and is written if that ends well.
        """
        from cme_dask.chunked.blas import reuse_memory
        from cme_dask.chunked.clusters import connected
        from cme_dask.report.run_report import reporting

        if self.workers is not None and "://" in (self.scheduler or ""):
            raise DataError("workers is for local schedulers: a cluster has its own number")
        reuse_memory()
        with (
            connected(self.scheduler) as scheduler,
            reporting(self.report, scheduler, overwrite=self.overwrite),
        ):
            yield scheduler
