"""A fit of rows that are many times larger than the memory of the workers that read them."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from cme_dask import kernels
from cme_dask.bench.cluster import running_cluster
from cme_dask.bench.data import write_uniform
from cme_dask.bench.fits import Describe, Fit, Rows
from cme_dask.bench.measure import Ratio, Term
from cme_dask.chunked.clusters import connected
from cme_dask.chunked.observing import want_of_memory
from cme_dask.errors import ResourceError
from cme_dask.report.memory import peak_of
from cme_dask.report.tables import format_bytes

if TYPE_CHECKING:
    from cme_dask.bench.cases import Bench, Size

WORKERS, MEMORY = 2, "1GB"
"""Worker processes of one thread, and the memory of each."""

_D = 13  # columns of x, and of y: 10^8 rows of float64 are 20.8 GB
_TOL = 1e-6
_FREE = 1.2  # times what the rows take


@dataclass(frozen=True)
class WatchedFit:
    """A fit on a fresh cluster of this machine, and what its workers took for it.

    Parameters
    ----------
    fit
        On the cluster.
    workers
        Process numbers of the nannies.
    """

    fit: Fit
    workers: tuple[int, ...]

    def prepare(self) -> Callable[[], Describe]:
        """The fit's own preparation."""
        return partial(self._run, self.fit.prepare())

    def _run(self, run: Callable[[], Describe]) -> Describe:
        describe = run()
        peaks = [peak_of(worker) for worker in self._workers()]
        with connected(self.fit.scheduler) as client:
            short = want_of_memory(client)
        found = {"worker_bytes": peaks, "worker_peak": max(peaks), **asdict(short)}
        return lambda: {**describe(), **found}

    def _workers(self) -> list[psutil.Process]:
        """The worker processes: of what a nanny has started each is the largest."""
        children = (psutil.Process(number).children() for number in self.workers)
        return [max(started, key=lambda child: child.memory_info().rss) for started in children]


def large_case(bench: "Bench", size: "Size") -> None:
    """A joint fit on two workers of 1 GB: no spilling, no pause, and the memory that was predicted.

    A worker's peak is its proportional set size at the system's high-water mark; what was predicted
    is what the fit was held to before it began. Bytes that workers ever wrote to disk count as
    spilled, however briefly they were there.
    """
    store = _store(bench, size.rows)
    rows = Rows(size.rows, _D, str(store))
    with running_cluster(bench.folder / "large", WORKERS, memory_limit=MEMORY) as cluster:
        for rank in size.ranks:
            at = f"large/rank {rank}"
            key = f"{at}/{WORKERS} workers of {MEMORY}"
            kernel = kernels.Gaussian(2.0 * rank ** (-1.0 / _D)).to_dict()
            fit = Fit(rows, "joint", kernel, _TOL, rank, scheduler=cluster.address)
            bench.measure({key: WatchedFit(fit, cluster.workers)}, 1)
            peak, predicted = Term(key, "worker_peak"), Term(key, "predicted_bytes")
            told = "memory of a worker, predicted / measured"
            bench.ratios += [
                Ratio(at, f"{told}, at least", [predicted], [peak], at_least=0.75),
                Ratio(at, f"{told}, at most", [predicted], [peak], at_most=1.25),
                Ratio(at, "bytes spilled", [Term(key, "spilled")], [Term()], at_most=0.0),
                Ratio(at, "workers paused", [Term(key, "pauses")], [Term()], at_most=0.0),
            ]


def _store(bench: "Bench", rows: int) -> Path:
    """The rows, made unless they lie there from an earlier run."""
    store = bench.stores / f"uniform-{rows}-{_D}.zarr"
    if not store.exists():
        need = _FREE * 2 * _D * 8 * rows
        free = shutil.disk_usage(bench.stores).free
        if free < need:
            raise ResourceError(
                f"{rows:,} rows need {format_bytes(need)} of disk in {bench.stores}, where "
                f"{format_bytes(free)} are free: fewer rows (--rows), or another folder (--dir)"
            )
        write_uniform(store, rows, _D)
    return store
