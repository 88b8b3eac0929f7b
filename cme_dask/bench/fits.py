"""What one process measures of this library: whole fits, the bare pass, reading."""

import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cme_dask import kernels
from cme_dask.bench.bare import BareBasis, bare_pass
from cme_dask.bench.data import CountingStore, open_counted, share_of, uniform_rows
from cme_dask.chunked.clusters import connected
from cme_dask.chunked.sources import open_sample
from cme_dask.defaults import N_FOLDS, SAMPLE_SIZE
from cme_dask.errors import RankWarning, ToleranceWarning
from cme_dask.estimators.cholesky import PivotedCholesky
from cme_dask.estimators.joint import JointDistribution
from cme_dask.estimators.recipe import PivotProgress
from cme_dask.storage.sample import Sample

Array = Any
Result = dict[str, Any]
Describe = Callable[[], Result]
Run = Callable[[], Describe]
Estimator = PivotedCholesky | JointDistribution

_WARM_ROWS, _WARM_RANK = 20_000, 20
_READ_ROWS = 1 << 12


@dataclass(frozen=True)
class Rows:
    """Which rows are measured: uniform ones in memory, or a store of them.

    Parameters
    ----------
    n, d
        Numbers of rows and of columns of each variable.
    store
        Path of the store; None for memory.
    share
        (i, k): the i-th of k equal shares only.
    """

    n: int
    d: int
    store: str | None = None
    share: tuple[int, int] = (0, 1)

    def opener(self, variables: int) -> Callable[[], tuple[Sample, CountingStore | None]]:
        """Opens the rows of so many variables (x, or x and y), with the counter of bytes read.

        Rows in memory are made now; a store is opened when the opener is called.
        """
        number, shares = self.share
        if self.store is not None:
            return partial(_open_share, self.store, number, shares)
        here = slice(self.n * number // shares, self.n * (number + 1) // shares)
        parts = [part[here].copy() for part in uniform_rows(self.n, self.d)[:variables]]
        return lambda: (open_sample(*parts), None)


def _open_share(store: str, number: int, shares: int) -> tuple[Sample, CountingStore]:
    sample, counter = open_counted(store)
    return (sample if shares == 1 else share_of(sample, number, shares)), counter


@dataclass(frozen=True)
class Fit:
    """A whole ``fit``, as a user calls it.

    Parameters
    ----------
    rows
        What is fitted.
    estimator
        ``cholesky`` or ``joint``.
    kernel
        Kernel of each variable, as plain values; None for learned ones.
    tol, rank, pivots
        Of the estimator; rank is its ``max_rank``.
    scheduler, workers
        Where to run: a scheduler's name, or the address of a cluster.
    save
        File that takes pivots and factors, for the bare pass.
    """

    rows: Rows
    estimator: str
    kernel: dict[str, Any] | None
    tol: float
    rank: int | None = None
    pivots: str = "sampled"
    scheduler: str = "threads"
    workers: int = 1
    save: str | None = None

    def prepare(self) -> Run:
        """Rows at hand, and a small fit as warm-up."""
        warnings.simplefilter("ignore", RankWarning)
        warnings.simplefilter("ignore", ToleranceWarning)
        joint = self.estimator == "joint"
        small = uniform_rows(_WARM_ROWS, self.rows.d)[: 1 + joint]
        warm = self._estimator(_WARM_RANK, SAMPLE_SIZE)
        with connected(self.scheduler if "://" in self.scheduler else "threads") as scheduler:
            warm.fit(*small, scheduler=scheduler, workers=1)
        if self.scheduler != "threads" and self.rows.store is not None:
            store = self.rows.store  # counters don't travel
            return partial(self._run, lambda: (open_sample(store), None))
        return partial(self._run, self.rows.opener(1 + joint))

    def _estimator(self, max_rank: int | None, sample_size: int) -> Estimator:
        kernel = None if self.kernel is None else kernels.from_dict(self.kernel)
        if self.estimator == "cholesky":
            return PivotedCholesky(
                kernel,
                tol=self.tol,
                max_rank=max_rank,
                pivots=self.pivots,
                sample_size=sample_size,
                random_state=0,
            )
        return JointDistribution(
            kernel_x=kernel,
            kernel_y=kernel,
            tol=self.tol,
            max_rank=max_rank,
            pivots=self.pivots,
            sample_size=sample_size,
            n_folds=N_FOLDS,
            random_state=0,
        )

    def _run(self, opener: Callable[[], tuple[Sample, CountingStore | None]]) -> Describe:
        clock = _Clock()
        sample, counter = opener()
        size = SAMPLE_SIZE if sample.row_sample is None else len(sample.row_sample)
        estimator = self._estimator(self.rank, size)
        with connected(self.scheduler) as scheduler:
            estimator.fit(sample, scheduler=scheduler, workers=self.workers, progress=clock)
            clock.stop()
        return partial(self._describe, estimator, clock, counter)

    def _describe(
        self, estimator: Estimator, clock: "_Clock", counter: CountingStore | None
    ) -> Result:
        bases = (
            [estimator.basis_]
            if isinstance(estimator, PivotedCholesky)
            else [estimator.basis_x_, estimator.basis_y_]
        )
        if self.save is not None:
            parts = {f"points{i}": basis.newton.points for i, basis in enumerate(bases)}
            # Kernels are given here, so no basis is a stack of several.
            parts |= {f"factor{i}": basis.newton.factor for i, basis in enumerate(bases)}  # type: ignore[union-attr]
            np.savez(self.save, **parts)
        in_memory = self.rows.store is None
        return {
            "ranks": [basis.rank for basis in bases],
            "trace_error": max(basis.trace_error or 0.0 for basis in bases),
            "passes": estimator.n_passes_,
            "bytes_read": 0 if in_memory else counter and counter.bytes_read,
            "tasks": estimator.report_.tasks,
            "pass_seconds": estimator.report_.pass_seconds,
            "predicted_bytes": estimator.report_.memory.predicted,
            **clock.parts(estimator.report_.pass_seconds),
        }


class _Clock:
    """When a fit told of what: the parts of its time."""

    def __init__(self) -> None:
        self._begin = self._end = time.perf_counter()
        self._first_pivot: float | None = None
        self._last_pivot = self._begin

    def __call__(self, event: Any) -> None:
        if isinstance(event.detail, PivotProgress):
            self._last_pivot = time.perf_counter()
            self._first_pivot = self._first_pivot or self._last_pivot

    def stop(self) -> None:
        """The fit has ended."""
        self._end = time.perf_counter()

    def parts(self, pass_seconds: float) -> dict[str, float]:
        """Seconds until the first pivot, for the others, and of what is neither they nor the pass.

        Passes of pivoting rounds over all rows belong to the pivots.
        """
        first = self._first_pivot or self._begin
        before, pivots = first - self._begin, self._last_pivot - first
        rest = self._end - self._begin - before - pivots - pass_seconds
        return {"sample_seconds": before, "pivot_seconds": pivots, "rest_seconds": rest}


@dataclass(frozen=True)
class Bare:
    """The bare pass on the pivots that a fit saved; Gaussian kernels."""

    rows: Rows
    pivots: str
    length_scale: float
    workers: int

    def prepare(self) -> Run:
        """Rows at hand, and a small pass as warm-up."""
        with np.load(self.pivots) as saved:
            bases = [
                BareBasis(saved[f"points{i}"], saved[f"factor{i}"], self.length_scale)
                for i in range(len(saved.files) // 2)
            ]
        small = uniform_rows(_WARM_ROWS, self.rows.d)[: len(bases)]
        read = partial(_slices, small)
        bare_pass(bases, read, _WARM_ROWS, threads=self.workers, run_rows=4096)
        return partial(self._run, bases, *self.rows.opener(len(bases))())

    def _run(
        self, bases: list[BareBasis], sample: Sample, counter: CountingStore | None
    ) -> Describe:
        sources = sample.sources[: len(bases)]
        chunk = max(source.chunk_rows or _READ_ROWS for source in sources)
        opening = 0 if counter is None else counter.bytes_read
        gram = bare_pass(
            bases,
            lambda start, stop: tuple(source.read(start, stop) for source in sources),
            sample.n_rows,
            threads=self.workers,
            run_rows=chunk,
        )
        ranks = [basis.rank for basis in bases]
        squares = np.split(np.diag(gram), np.cumsum(ranks)[:-1])
        return lambda: {
            "ranks": ranks,
            "trace_error": max(1.0 - float(part.sum()) / sample.n_rows for part in squares),
            "passes": 1,
            "bytes_read": 0 if counter is None else counter.bytes_read - opening,
        }


@dataclass(frozen=True)
class StoreRead:
    """Reading a store, and nothing else, in plain threads; bytes of float64 rows per second."""

    rows: Rows
    workers: int

    def prepare(self) -> Run:
        """The store, opened."""
        return partial(self._run, self.rows.opener(2)()[0])

    def _run(self, sample: Sample) -> Describe:
        chunk = max(source.chunk_rows or _READ_ROWS for source in sample.sources)

        def read(start: int) -> int:
            stop = min(start + chunk, sample.n_rows)
            return sum(int(source.read(start, stop).nbytes) for source in sample.sources)

        begin = time.perf_counter()
        with ThreadPoolExecutor(self.workers) as pool:
            size = sum(pool.map(read, range(0, sample.n_rows, chunk)))
        seconds = time.perf_counter() - begin
        return lambda: {"read_rate": size / seconds}


def _slices(parts: tuple[Array, ...], start: int, stop: int) -> tuple[Array, ...]:
    return tuple(part[start:stop] for part in parts)
