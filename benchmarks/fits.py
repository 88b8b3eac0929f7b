"""Measurements of this library in one process: whole fits, the bare pass, reading.

The bare pass: what one pass over the rows costs in plain NumPy threads, by definition.

The same pivots, the Newton bases of all variables, S = sum_i N_i N_i^T over their concatenation
(so S_XX, S_YY and S_YX), the solve first, reads included. No Dask, no folds, no functions, no
guards: what a fit takes beyond it is what the library adds.

Blocks are transposed, functions in rows and data in columns: K^T and N^T of shape (m, b). Each
thread keeps its buffers, and everything but loops over blocks is a matrix product or a ufunc that
releases the interpreter lock.
"""

import importlib
import queue
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from scipy.linalg import solve_triangular
from threadpoolctl import threadpool_limits
from zarr.storage import LocalStore, WrapperStore

from cme_dask import kernels
from cme_dask.config import N_FOLDS, SAMPLE_SIZE
from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample, open_store
from cme_dask.data.sources import RowSource
from cme_dask.data.writer import writing_sample
from cme_dask.errors import RankWarning, ToleranceWarning
from cme_dask.estimators.cholesky import PivotedCholesky
from cme_dask.estimators.context import PivotProgress
from cme_dask.estimators.embedding import ConditionalMeanEmbedding
from cme_dask.estimators.joint import JointDistribution
from cme_dask.models import load_only
from cme_dask.models.joint import JointModel
from cme_dask.passes.cluster import connected
from cme_dask.passes.sources import open_sample

# Rows to measure on, in memory or in a store that counts the bytes it hands out


Array = Any

_BATCH = 1 << 18


def batches(n: int, d: int, seed: int = 0) -> Iterator[tuple[Array, Array]]:
    """Rows x uniform on [0, 1]^d and y = (x + u) / 2, u uniform too, in batches."""
    for number, start in enumerate(range(0, n, _BATCH)):
        rng = np.random.default_rng([seed, number])
        x, u = rng.uniform(size=(2, min(_BATCH, n - start), d))
        yield x, (x + u) / 2


def uniform_rows(n: int, d: int, seed: int = 0) -> tuple[Array, Array]:
    """The same rows in memory, shapes (n, d)."""
    x, y = zip(*batches(n, d, seed), strict=True)
    return np.concatenate(x), np.concatenate(y)


def write_uniform(path: Path, n: int, d: int, seed: int = 0) -> None:
    """The same rows in a sample store."""
    columns = (Columns.default("x", d), Columns.default("y", d))
    with writing_sample(path, columns, expected_rows=n, seed=seed) as writer:
        for x, y in batches(n, d, seed):
            writer.append(x, y)


class CountingStore(WrapperStore[LocalStore]):
    """A store on disk that counts the bytes it hands out, as they are stored."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store)
        self.bytes_read = 0

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Value of a key; see ``zarr.abc.store.Store``."""
        value = await self._store.get(key, prototype, byte_range)
        self.bytes_read += 0 if value is None else len(value)
        return value


def open_counted(path: str) -> tuple[Sample, CountingStore]:
    """The sample of a store on disk, and the counter of what is read from it."""
    store = CountingStore(LocalStore(path, read_only=True))
    return open_store(zarr.open_group(store, mode="r"), path), store


@dataclass(eq=False)
class SourceRange(RowSource):
    """Rows [start, stop) of a source, counted from zero."""

    source: RowSource
    start: int
    stop: int

    def __post_init__(self) -> None:
        self.shape = self.stop - self.start, self.source.shape[1]  # it begins at a chunk
        self.row_bytes, self.chunk_rows = self.source.row_bytes, self.source.chunk_rows
        self.columns_read, self.in_memory = self.source.columns_read, self.source.in_memory

    def read(self, start: int, stop: int) -> Array:
        """Rows [start, stop) of the range."""
        return self.source.read(self.start + start, self.start + stop)

    def pick(self, positions: tuple[int, ...]) -> "SourceRange":
        """The same rows with the columns at these positions only."""
        return SourceRange(self.source.pick(positions), self.start, self.stop)

    def for_task(self, start: int, stop: int) -> "SourceRange":
        """The range of what a task holds."""
        rows = self.source.for_task(self.start + start, self.start + stop)
        return SourceRange(rows, self.start, self.stop)

    def fingerprint(self, token: Callable[[Any, str], str]) -> str:
        """Of the source and of the range."""
        return f"{self.source.fingerprint(token)} {self.start} {self.stop}"


def share_of(sample: Sample, number: int, shares: int) -> Sample:
    """One of several equal shares of the rows of a stored sample, in whole chunks."""
    chunk = max(source.chunk_rows or 1 for source in sample.reads)
    chunks = -(-sample.n_rows // chunk)
    start, stop = (min(chunks * i // shares * chunk, sample.n_rows) for i in (number, number + 1))
    retained = sample.row_sample
    if retained is not None:
        here = (start <= retained.index) & (retained.index < stop)
        retained = replace(
            retained,
            keys=retained.keys[here],
            index=retained.index[here] - start,
            parts=tuple(part[here] for part in retained.parts),
            weights=retained.weights[here],
        )
    sources = tuple(SourceRange(source, start, stop) for source in sample.sources)
    return replace(sample, sources=sources, row_sample=retained)


def regression_rows(n: int, d: int, seed: int) -> tuple[Array, Array, Array]:
    """Rows x uniform on [0, 1]^d, y = f(x) + noise of shape (n, 1), and the true mean f(x).

    f(x) = sin(2 pi x_1) + prod_j cos(x_j), noise normal with standard deviation 0.3.
    """
    rng = np.random.default_rng([seed, n, d])
    x = rng.uniform(size=(n, d))
    truth = np.sin(2.0 * np.pi * x[:, 0]) + np.cos(x).prod(axis=1)
    return x, (truth + 0.3 * rng.standard_normal(n))[:, None], truth


# The bare pass: what one pass over the rows costs in plain NumPy threads, by definition


Read = Callable[[int, int], tuple[Array, ...]]

_BLOCK = 768  # rows of the data: the best of 512 to 2,048 at ranks 100 to 800
_SOLVE = 48  # functions per step of the solve, likewise
_RUN_ROWS = 1 << 16


@dataclass(frozen=True, eq=False)
class BareBasis:
    """Gaussian Newton basis N(z) = R^-1 k(p, z) on given pivots.

    Parameters
    ----------
    points
        Pivots p, shape (m, d).
    factor
        R with K(p, p) = R R^T, lower-triangular, shape (m, m).
    length_scale
        l of k(x, z) = exp(-|x - z|^2 / (2 l^2)).
    """

    points: Array
    factor: Array
    length_scale: float

    @property
    def rank(self) -> int:
        """Number of pivots m."""
        return len(self.points)

    @cached_property
    def inverse(self) -> Array:
        """R^-1: its rows, cut at the diagonal, turn the solve into matrix products."""
        return solve_triangular(self.factor, np.eye(self.rank), lower=True)

    @cached_property
    def centre(self) -> Array:
        """Mean of the pivots: squared distances cancel less about it."""
        return self.points.mean(axis=0)

    @cached_property
    def right(self) -> Array:
        """Rows [v, 1, -|v|^2 / 2] of the scaled pivots v, shape (m, d + 2)."""
        v = (self.points - self.centre) / self.length_scale
        return np.column_stack([v, np.ones(len(v)), -0.5 * (v * v).sum(axis=1)])


def bare_pass(
    bases: Sequence[BareBasis],
    read: Read,
    n: int,
    *,
    threads: int,
    run_rows: int = _RUN_ROWS,
) -> Array:
    """S = sum_i N_i N_i^T with N_i = [N_X(x_i), N_Y(y_i), ...], shape (M, M), M = sum of ranks.

    Parameters
    ----------
    bases
        A basis per variable.
    read
        ``read(start, stop)`` gives the rows of each variable, shapes (stop - start, d).
    n
        Number of rows.
    threads
        Threads, each with one BLAS thread.
    run_rows
        Rows that a thread reads at once; storage chunks should divide it.
    """
    starts: queue.SimpleQueue[int] = queue.SimpleQueue()
    for start in range(0, n, run_rows):
        starts.put(start)

    def work(_: int) -> Array:
        sums = _Sums(bases)
        while True:
            try:
                start = starts.get_nowait()
            except queue.Empty:
                return sums.gram
            sums.add(read(start, min(start + run_rows, n)))

    with threadpool_limits(1), ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


def bare_flops(n: int, ranks: Sequence[int]) -> float:
    """Flops that the bare pass is credited with: sum of n m^2 (solves) and n M^2 (update).

    2 n m^2 for one basis; kernels are not counted.
    """
    return float(n) * (sum(m * m for m in ranks) + sum(ranks) ** 2)


class _Sums:
    """Buffers and partial sums of one thread."""

    def __init__(self, bases: Sequence[BareBasis]) -> None:
        self._bases = bases
        width = sum(basis.rank for basis in bases)
        self._newton = np.empty((width, _BLOCK))
        self._kernel = np.empty((max(basis.rank for basis in bases), _BLOCK))
        self._left = [np.ones((basis.right.shape[1], _BLOCK)) for basis in bases]
        self._product = np.empty((width, width))
        self.gram = np.zeros((width, width))

    def add(self, parts: tuple[Array, ...]) -> None:
        """Add the rows of each variable, block by block."""
        for start in range(0, len(parts[0]), _BLOCK):
            self._block(tuple(part[start : start + _BLOCK] for part in parts))

    def _block(self, parts: tuple[Array, ...]) -> None:
        b, first = len(parts[0]), 0
        for basis, left, rows in zip(self._bases, self._left, parts, strict=True):
            u = left[:-2, :b]
            np.subtract(rows.T, basis.centre[:, None], out=u)
            u /= basis.length_scale
            np.einsum("ij,ij->j", u, u, out=left[-2, :b])
            left[-2, :b] *= -0.5
            kernel = self._kernel[: basis.rank, :b]
            np.matmul(basis.right, left[:, :b], out=kernel)
            np.exp(kernel, out=kernel)
            newton = self._newton[first : first + basis.rank, :b]
            for s in range(0, basis.rank, _SOLVE):
                e = min(s + _SOLVE, basis.rank)
                np.matmul(basis.inverse[s:e, :e], kernel[:e], out=newton[s:e])
            first += basis.rank
        newton = self._newton[:, :b]
        np.matmul(newton, newton.T, out=self._product)
        self.gram += self._product


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
        The basis or bases.
    estimator
        ``cholesky`` or ``joint``.
    kernel
        Kernel of each variable, as plain values; None for learned ones.
    tol, rank, pivots
        Of the estimator; rank is its ``max_rank``. None leaves rank, and tol of a joint fit, to the
        estimator.
    scheduler, workers
        Where to run: a scheduler's name, or the address of a cluster.
    save
        File that takes pivots and factors, for the bare pass.
    device
        Where sums are computed; None for the host.
    model
        Where the fitted model is saved.
    given
        A saved model whose kernels, pivots and ridges are given, of an averaged one those of its
        best member; the kernel is None then.
    """

    rows: Rows
    estimator: str
    kernel: dict[str, Any] | None
    tol: float | None
    rank: int | None = None
    pivots: str = "sampled"
    scheduler: str = "threads"
    workers: int = 1
    save: str | None = None
    device: str | None = None
    model: str | None = None
    given: str | None = None

    def prepare(self) -> Run:
        """Rows at hand, and a small fit as warm-up."""
        warnings.simplefilter("ignore", RankWarning)
        warnings.simplefilter("ignore", ToleranceWarning)
        joint = self.estimator == "joint"
        small = uniform_rows(_WARM_ROWS, self.rows.d)[: 1 + joint]
        # The warm-up has other columns than the model.
        warm = replace(self, given=None)._estimator(_WARM_RANK, SAMPLE_SIZE)
        with connected(self.scheduler if "://" in self.scheduler else "threads") as scheduler:
            warm.fit(*small, scheduler=scheduler, workers=1, device=self.device)
        if self.scheduler != "threads" and self.rows.store is not None:
            store = self.rows.store  # counters don't travel
            return partial(self._run, lambda: (open_sample(store), None))
        return partial(self._run, self.rows.opener(1 + joint))

    def _estimator(self, max_rank: int | None, sample_size: int) -> Estimator:
        kernel = None if self.kernel is None else kernels.from_dict(self.kernel)
        if self.estimator == "cholesky":
            assert self.tol is not None
            return PivotedCholesky(
                kernel,
                tol=self.tol,
                max_rank=max_rank,
                pivots=self.pivots,
                sample_size=sample_size,
                random_state=0,
            )
        chosen: dict[str, Any] = {"kernel_x": kernel, "kernel_y": kernel, "pivots": self.pivots}
        if self.given is not None:
            model = load_only(JointModel, self.given)
            x, y = (variable.basis.parts[0].newton for variable in (model.x, model.y))
            chosen = {"kernel_x": x.kernel, "kernel_y": y.kernel, "pivots": (x.points, y.points)}
            chosen["reg"] = tuple(model.about["reg"])
        return JointDistribution(
            **chosen,
            tol=self.tol,
            max_rank=max_rank,
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
            place = {"scheduler": scheduler, "workers": self.workers, "device": self.device}
            estimator.fit(sample, **place, progress=clock)
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
            parts |= {f"factor{i}": basis.newton.factor for i, basis in enumerate(bases)}
            np.savez(self.save, **parts)
        if self.model is not None:
            estimator.save(self.model, overwrite=True)
        in_memory = self.rows.store is None
        return {
            "ranks": [basis.rank for basis in bases],
            "trace_error": max(basis.trace_error or 0.0 for basis in bases),
            "passes": estimator.n_passes_,
            "bytes_read": 0 if in_memory else counter and counter.bytes_read,
            "tasks": estimator.report_.tasks,
            "pass_seconds": estimator.report_.pass_seconds,
            "predicted_bytes": estimator.report_.memory.predicted,
            "device_bytes": None if self.device is None else _held_by_cupy(),
            # Learned kernels have pivots of residuals, too, between the passes.
            **({} if self.kernel is None else clock.parts(estimator.report_.pass_seconds)),
        }


def _held_by_cupy() -> int:
    """Bytes that CuPy has taken of a GPU: what it held at most, since it gives nothing back."""
    cupy = importlib.import_module("cupy")
    return int(cupy.get_default_memory_pool().total_bytes())


@dataclass(frozen=True)
class EmbeddingFit:
    """A whole fit of a conditional mean embedding, and its CPU time.

    Parameters
    ----------
    rows
        The rows.
    length_scale, rank
        Of the Gaussian kernels, and ``max_rank``.
    ridges, folds
        Ridges that are compared on so many folds; one is given.
    workers
        Threads.
    """

    rows: Rows
    length_scale: float
    rank: int
    ridges: int
    folds: int
    workers: int

    def prepare(self) -> Run:
        """Rows at hand, and a small fit as warm-up."""
        warnings.simplefilter("ignore", RankWarning)
        warnings.simplefilter("ignore", ToleranceWarning)
        small = open_sample(*uniform_rows(_WARM_ROWS, self.rows.d))
        self._fit(small, _WARM_RANK)
        return partial(self._run, self.rows.opener(2))

    def _fit(self, sample: Sample, rank: int) -> ConditionalMeanEmbedding:
        kernel, ridges = kernels.Gaussian(self.length_scale), np.geomspace(1e-9, 1.0, self.ridges)
        estimator = ConditionalMeanEmbedding(
            kernel_x=kernel,
            kernel_y=kernel,
            max_rank=rank,
            reg=ridges.tolist() if self.ridges > 1 else 1e-6,
            n_folds=self.folds,
            random_state=0,
        )
        return estimator.fit(sample, scheduler="threads", workers=self.workers)

    def _run(self, opener: Callable[[], tuple[Sample, CountingStore | None]]) -> Describe:
        begin = time.process_time()
        fit = self._fit(opener()[0], self.rank)
        seconds = time.process_time() - begin
        return lambda: {
            "ranks": [basis.rank for basis in (fit.basis_x_, fit.basis_y_)],
            "passes": fit.n_passes_,
            "reg": fit.reg_,
            "cpu_seconds": seconds,
            "pass_seconds": fit.report_.pass_seconds,
        }


class _Clock:
    """The parts of the time of a fit, from its events."""

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
