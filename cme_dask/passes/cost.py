"""What a fit would cost: operations counted, and rates measured where it would run.

What a fit would cost: operations counted from n, d, ranks and arithmetic, and their seconds.

The rates that turn counts into seconds are measured, see :mod:`cme_dask.passes.cost`.

Rates of the machine that a fit would run on, measured with what its pass really does.

It takes about a second: one short task for each worker of the fit, all at once, through the same
driver. Each runs the loop of the pass on rows of the row sample, its parts alone, plain matrix
products of the same shape, and reads chunks of the rows. So processes are measured in processes
and a cluster on its workers, and how long these take to start is seen as well.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from dask.system import CPU_COUNT

from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource
from cme_dask.kernels.evaluator import BlockEvaluator
from cme_dask.numerics.basis import without_copies
from cme_dask.numerics.cells import CellSpec, StripCells, hashes_of
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.moments import MomentSpec, StripMoments, sub_block
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.passes.driver import Executor
from cme_dask.passes.plan import Run
from cme_dask.passes.sources import DaskSource, for_task

# What a fit would cost: operations counted from n, d, ranks and arithmetic, and their seconds


_TASK_SECONDS = 1e-3  # that the scheduler spends on a task: 0.2 to 1 ms


@dataclass(frozen=True)
class PassWork:
    """What one pass does, counted.

    Attributes
    ----------
    rows
        Number of rows n.
    ranks
        Numbers of pivots m, a number per variable.
    width
        Length P of an augmented row [N_X, N_Y, 1, f].
    n_folds
        Number of folds F.
    elimination_flops, update_flops
        Operations per row: solving for the Newton bases before the sums, and the rank-k update,
        P^2 (its result is symmetric).
    tasks, strips
        How the rows are cut.
    busiest
        Rows of the worker that gets most.
    bytes_read
        Bytes of the rows, before compression, with the chunks that two tasks read.
    cells
        Of the supports: each row's is found among them, and it is added to its sums.
    also
        What the same pass does for further sets of moments, those of other learned kernels.
    """

    rows: int
    ranks: tuple[int, ...]
    width: int
    n_folds: int
    elimination_flops: int
    update_flops: int
    tasks: int
    strips: int
    busiest: int
    bytes_read: int
    cells: int = 0
    also: tuple["PassWork", ...] = ()

    @classmethod
    def of(
        cls,
        sample: Sample,
        spec: MomentSpec,
        runs: list[Run],
        workers: int,
        cells: Sequence[CellSpec] = (),
        also: Sequence[MomentSpec] = (),
    ) -> "PassWork":
        """Of the moments of a sample, cut into these runs."""
        elimination = sum(side.eliminated.flops for side in spec.sides)
        return cls(
            rows=sample.n_rows,
            ranks=spec.ranks,
            width=spec.width,
            n_folds=spec.n_folds,
            elimination_flops=elimination,
            update_flops=spec.flops - elimination,
            tasks=len(runs),
            strips=sum(run.strips for run in runs),
            busiest=busiest_rows(runs, workers),
            bytes_read=sum(bytes_read(source, runs) for source in sample.reads),
            cells=sum(one.support.size for one in cells),
            also=tuple(cls.of(sample, one, runs, workers) for one in also),
        )

    @property
    def sets(self) -> tuple["PassWork", ...]:
        """The work of each set of moments."""
        return (self, *self.also)

    @property
    def flops(self) -> int:
        """Operations of the matrix products of a pass: n (P^2 + eliminations), for all sets."""
        return sum(one.rows * (one.elimination_flops + one.update_flops) for one in self.sets)

    @property
    def kernel_values(self) -> int:
        """Kernel values of a pass, n times the sum of all ranks: mostly exponentials."""
        return self.rows * sum(rank for one in self.sets for rank in one.ranks)

    @property
    def solve_flops(self) -> int:
        """Operations of the matrix products of the solution, eigenproblems aside.

        6 m^3 for each basis that is diagonalised, and for two variables 8 m_X m_Y (m_X + m_Y) for
        H and its KKT residual; all that once for the fit and once for each fold left out.
        """
        each = 6 * sum(m**3 for m in self.ranks)
        both = 8 * int(np.prod(self.ranks)) * sum(self.ranks) if len(self.ranks) == 2 else 0
        return each + self.solutions * (each + both)

    @property
    def solutions(self) -> int:
        """Problems solved for H: one, and one without each fold; none for one variable."""
        if len(self.ranks) == 1:
            return 0
        return 1 + (self.n_folds if self.n_folds > 1 else 0)


def busiest_rows(runs: list[Run], workers: int) -> int:
    """Rows of the worker that gets most, if each takes the next task when it has ended one."""
    loads = [0] * workers
    for run in runs:
        heapq.heapreplace(loads, loads[0] + run.rows)
    return max(loads)


def bytes_read(source: RowSource, runs: list[Run]) -> int:
    """Bytes of the chunks that the tasks read, before compression."""
    chunk, n = source.chunk_rows or 1, source.shape[0]
    rows = sum(min(-(-run.stop // chunk) * chunk, n) - run.start // chunk * chunk for run in runs)
    return rows * source.row_bytes


@dataclass(frozen=True)
class Rates:
    """What was measured, for all workers at once unless it says otherwise.

    Attributes
    ----------
    workers, cores
        Tasks at once, and the cores that they share.
    sections, elimination, update
        Seconds per row: kernel sections; eliminations; the rank-k update and all the rest.
    reading, reading_cores
        Seconds per row to read them, and core seconds that this takes; 0 where rows are given.
    partial
        Seconds of one worker to make a partial sum and to add it to another.
    gemm
        Operations per second of plain matrix products of the shape of the update.
    gemm_one, eigen
        The same of one worker; and its seconds for eigenvectors of order m, over m^3.
    startup
        Seconds until the workers were there: each pass in processes takes them.
    cells
        Seconds per row of the sums by cell.
    """

    workers: int
    cores: int
    sections: float
    elimination: float
    update: float
    reading: float
    reading_cores: float
    partial: float
    gemm: float
    gemm_one: float
    eigen: float
    startup: float
    cells: float = 0.0

    @property
    def computing(self) -> float:
        """Seconds per row of computing."""
        return self.sections + self.elimination + self.update + self.cells


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a pass and of the solution after it, by part.

    ``reading`` is what reading adds to computing: it runs beside it. ``limit`` is what the matrix
    products of the pass would take at the measured rate of plain ones.
    """

    sections: float
    elimination: float
    update: float
    reading: float
    sums: float
    scheduling: float
    solution: float
    limit: float
    cells: float = 0.0

    @property
    def one_pass(self) -> float:
        """The pass alone."""
        computing = self.sections + self.elimination + self.update + self.cells
        return computing + self.reading + self.sums + self.scheduling


def predict_seconds(work: PassWork, rates: Rates) -> PassSeconds:
    """Seconds of a pass: the longer of reading and computing, and what the sums take.

    With W workers, the busiest of which has b rows, the pass lasts as long as b W rows do when all
    are busy. Reading runs beside the computing, but decoding chunks takes time of the same cores.
    """
    rows = work.busiest * rates.workers
    computing = rates.computing
    cores = min(rates.workers, rates.cores)
    shared = (computing * cores + rates.reading_cores) / rates.cores
    reading = max(rates.reading, computing, shared) - computing
    return PassSeconds(
        sections=rows * rates.sections,
        elimination=rows * rates.elimination,
        update=rows * rates.update,
        reading=rows * reading,
        sums=(work.strips + work.tasks - 2) * rates.partial / rates.workers,
        scheduling=rates.startup + work.tasks * _TASK_SECONDS,
        solution=solution_seconds(work, rates),
        limit=work.flops / rates.gemm,
        cells=rows * rates.cells,
    )


def solution_seconds(work: PassWork, rates: Rates) -> float:
    """Seconds of the dense algebra after a pass, on one thread."""
    cubes = sum((1 + one.solutions) * sum(m**3 for m in one.ranks) for one in work.sets)
    # Sums of all folds but one, for each fold, and the copy that the model keeps.
    folds = (work.solutions + 6) * rates.partial
    products = sum(one.solve_flops for one in work.sets)
    return products / rates.gemm_one + cubes * rates.eigen + folds


def round_seconds(work: PassWork, rates: Rates) -> float:
    """Seconds of one round of pivots over all rows at these ranks: sections, and whole solves."""
    rows = work.busiest * rates.workers
    flops = sum(m * m for m in work.ranks)
    computing = rates.sections + flops / rates.gemm
    return rates.startup + rows * max(computing, rates.reading)


# Rates of the machine that a fit would run on, measured with what its pass really does


Array = Any

_RANGES = 16  # of rows that a worker may read
_READ_SECONDS = 1.0  # and how long

_SHORT, _LONG = 0.08, 0.4  # seconds of a measurement: of a part, of the whole loop
_LEAST = 5  # calls whose median is taken
_SHORT_STRIP = 1 << 12  # rows whose folds come in short pieces: that costs, and must be seen
_LONG_STRIP = 1 << 16  # rows that are summed by cell
_EIGEN = 384  # largest order of the eigenproblem that is timed


@dataclass(frozen=True, eq=False)
class _Probe:
    """What every measuring task is given; ``sharing`` of them run in a process at once."""

    specs: tuple[MomentSpec, ...]
    cells: tuple[CellSpec, ...]
    parts: tuple[Array, ...]
    weighted: bool
    strip: int
    sharing: int


@dataclass(frozen=True)
class _Found:
    """What one worker measured: seconds per row when all are busy, and its own rates."""

    sections: float
    written: float
    whole: float
    cells: float
    reading: float
    reading_cores: float
    partial: float
    gemm: float
    seconds: float


def measure_rates(
    sample: Sample,
    spec: MomentSpec,
    parts: tuple[Array, ...],
    runs: list[Run],
    executor: Executor,
    cells: Sequence[CellSpec] = (),
    also: Sequence[MomentSpec] = (),
) -> Rates:
    """Rates of the moment pass, measured on all workers at once.

    Parameters
    ----------
    sample
        The rows; some chunks of them are read by each worker. Of Dask arrays none are: what
        their tasks cost is not known before.
    spec
        What the pass computes.
    parts
        Rows of the row sample, shapes (k, d).
    runs
        How the pass is cut.
    executor
        Where it runs.
    cells
        Whose rows it sums.
    also
        Further sets of moments that the same pass computes: rates per row are of all together.
    """
    workers, client = executor.workers, executor.client
    sharing = workers if executor.shares_memory else 1
    if client is not None:
        sharing = max(client.nthreads().values())
    specs = (spec, *also)
    probe = _Probe(specs, tuple(cells), parts, sample.weights is not None, runs[0].length, sharing)
    payloads = [_payload(sample, runs[i * len(runs) // workers], executor) for i in range(workers)]
    begin = time.perf_counter()
    result: tuple[_Found, ...] = executor.run(
        _measure, payloads, _join, shared=probe, name="measure-rates"
    )
    wall = time.perf_counter() - begin
    whole = _together([one.whole for one in result])
    written = min(_together([one.written for one in result]), whole)
    sections = min(_together([one.sections for one in result]), written)
    return Rates(
        workers=workers,
        cores=CPU_COUNT if client is None else workers,
        sections=sections,
        elimination=written - sections,
        update=whole - written,
        reading=float(np.mean([one.reading for one in result])) / workers,
        reading_cores=float(np.mean([one.reading_cores for one in result])),
        partial=float(np.mean([one.partial for one in result])),
        gemm=sum(one.gemm for one in result),
        gemm_one=max(one.gemm for one in result),
        eigen=_eigen_seconds(specs),
        startup=max(0.0, wall - max(one.seconds for one in result)),
        cells=_together([one.cells for one in result]) if cells else 0.0,
    )


def _together(seconds: list[float]) -> float:
    """Seconds per row of all workers, from those of each while all are busy."""
    return 1.0 / sum(1.0 / each for each in seconds)


def _payload(sample: Sample, run: Run, executor: Executor) -> tuple[Any, ...]:
    """Ranges of rows that a worker reads, the first one to warm up, and their sources."""
    if any(isinstance(source, DaskSource) for source in sample.reads):
        return ((),)
    chunk = max((source.chunk_rows or 1) for source in sample.reads)
    step = -(-run.length // chunk) * chunk
    first = run.start // chunk * chunk
    edges = [min(first + i * step, sample.n_rows) for i in range(_RANGES + 1)]
    ranges = tuple((a, b) for a, b in pairwise(edges) if a < b)
    local = executor.shares_memory
    return ranges, *(for_task(s, edges[0], edges[-1], local) for s in sample.reads)


def _join(probe: _Probe, a: tuple[_Found, ...], b: tuple[_Found, ...]) -> tuple[_Found, ...]:
    return a + b


def _measure(
    probe: _Probe, ranges: tuple[tuple[int, int], ...], *sources: RowSource
) -> tuple[_Found, ...]:
    """All rates of one worker."""
    begin = time.perf_counter()
    reading, reading_cores = _reading_seconds(ranges, sources, probe.sharing)
    sections, written = _block_seconds(probe)
    partial, empty = _partial_seconds(probe.specs)
    return (
        _Found(
            sections=sections,
            written=written,
            whole=_loop_seconds(probe, empty),
            cells=_cell_seconds(probe) if probe.cells else 0.0,
            reading=reading,
            reading_cores=reading_cores,
            partial=partial,
            gemm=_gemm_rate(max(probe.specs, key=lambda spec: spec.width)),
            seconds=time.perf_counter() - begin,
        ),
    )


def _reading_seconds(
    ranges: tuple[tuple[int, int], ...], sources: tuple[RowSource, ...], sharing: int
) -> tuple[float, float]:
    """Seconds and core seconds per row, the first range apart, for about a second.

    One chunk alone would tell how long it takes to find, not how fast many are read.
    """
    rows, begin, cpu = 0, time.perf_counter(), time.process_time()
    for number, (start, stop) in enumerate(ranges):
        if number == 1:  # the first has found the way
            rows, begin, cpu = 0, time.perf_counter(), time.process_time()
        for source in sources:
            source.read(start, stop)
        rows += stop - start
        if number and time.perf_counter() - begin > _READ_SECONDS:
            break
    if not rows:
        return 0.0, 0.0
    seconds = (time.perf_counter() - begin) / rows
    return seconds, min((time.process_time() - cpu) / rows / sharing, CPU_COUNT * seconds)


def _block_seconds(probe: _Probe) -> tuple[float, float]:
    """Seconds per row of kernel sections alone, and of whole Newton functions, for all sets."""
    sections = written = 0.0
    spent = _SHORT / len(probe.specs)
    for spec in probe.specs:
        block = sub_block(spec.width)
        parts = tuple(_tiled(part, block) for part in probe.parts)
        outs = [np.empty((rank, block)) for rank in spec.ranks]
        sections += _repeated(_sections(spec, parts, outs), spent) / block
        written += _repeated(_written(spec, parts, outs), spent) / block
    return sections, written


def _sections(spec: MomentSpec, parts: tuple[Array, ...], outs: list[Array]) -> Callable[[], None]:
    functions = [side.basis.kernel.evaluator(side.basis.points) for side in spec.sides]
    return _write(functions, parts, outs)


def _written(spec: MomentSpec, parts: tuple[Array, ...], outs: list[Array]) -> Callable[[], None]:
    functions = [side.basis.evaluator(side.eliminated, parts[0]) for side in spec.sides]
    return _write(functions, parts, outs)


def _write(
    functions: list[BlockEvaluator], parts: tuple[Array, ...], outs: list[Array]
) -> Callable[[], None]:
    """Write one sub-block of rows, which are prepared now, as in the pass for several."""
    for one, part in zip(functions, parts, strict=True):
        one.load(part)

    @without_copies()
    def work() -> None:
        for one, out in zip(functions, outs, strict=True):
            one.write(slice(0, out.shape[1]), out)

    return work


def _loop_seconds(probe: _Probe, empty: float) -> float:
    """Seconds per row of the loop of the pass, without what each call of it takes (``empty``)."""
    loop = StripMoments(probe.specs, probe.parts[0])
    block = max(sub_block(spec.width) for spec in probe.specs)

    def seconds(rows: int, spent: float) -> float:
        parts = tuple(_tiled(part, rows) for part in probe.parts)
        weights = np.ones(rows) if probe.weighted else None
        folds = fold_of_rows(0, rows, probe.specs[0].n_folds)

        def strip() -> None:
            for part in parts:
                np.isfinite(part).all()
            loop(parts, weights, folds)

        return _repeated(strip, spent)

    # So short that the median is over several strips.
    requested = int(_LONG / _LEAST * block / seconds(block, 0.0)) // block * block
    rows = min(max(requested, _SHORT_STRIP), probe.strip)
    return max(seconds(rows, _LONG) - empty, 1e-12) / rows


def _cell_seconds(probe: _Probe) -> float:
    """Seconds per row of the sums by cell."""
    n_folds = probe.specs[0].n_folds
    rows = min(_LONG_STRIP, probe.strip)
    parts = tuple(_tiled(part, rows) for part in probe.parts)
    weights = np.ones(rows) if probe.weighted else None
    folds = fold_of_rows(0, rows, n_folds)
    loops = [StripCells(cells, rows) for cells in probe.cells]

    def strip() -> None:
        hashes = hashes_of(np.arange(rows))
        for loop, part in zip(loops, parts, strict=False):
            loop(hashes, part, weights, folds, n_folds)

    return _repeated(strip, _SHORT) / rows


def _partial_seconds(specs: Sequence[MomentSpec]) -> tuple[float, float]:
    """Seconds to make partial sums of all sets and to add them to others; and to make them."""
    shape = (specs[0].n_folds, sum(spec.width**2 for spec in specs))
    total = np.zeros(shape)

    def make() -> None:
        np.zeros(shape).fill(1.0)  # zeros alone would not touch the memory

    def add() -> None:
        np.add(total, 1.0, out=total)

    made = _repeated(make, _SHORT / 2)
    return made + _repeated(add, _SHORT / 2), made


def _gemm_rate(spec: MomentSpec) -> float:
    """Operations per second of one worker in products of shapes (P, b) and (b, P)."""
    block = sub_block(spec.width)
    left = np.ones((spec.width, block))
    right = np.ones((block, spec.width))
    out = np.empty((spec.width, spec.width))
    flops = 2.0 * spec.width**2 * block
    return flops / _repeated(lambda: np.matmul(left, right, out=out), _SHORT)


def _eigen_seconds(specs: Sequence[MomentSpec]) -> float:
    """Seconds of an eigendecomposition over the cube of its order, on one thread."""
    factor = max((side.basis.factor for spec in specs for side in spec.sides), key=len)
    part = np.array(factor[:_EIGEN, :_EIGEN])
    gram = part @ part.T
    with one_blas_thread():
        return _repeated(lambda: np.linalg.eigh(gram), _SHORT) / len(gram) ** 3


def _tiled(rows: Array, count: int) -> Array:
    """So many rows, the given ones again and again."""
    return np.resize(rows, (count, rows.shape[1]))


def _repeated(work: Callable[[], Any], seconds: float) -> float:
    """Seconds of a call: the median over so many seconds, after one call that warms up.

    Where ``seconds`` allows for it, of at least a few calls: what else the machine does for a
    moment doesn't count.
    """
    work()
    calls: list[float] = []
    begin = last = time.perf_counter()
    while True:
        work()
        now = time.perf_counter()
        calls.append(now - last)
        last = now
        if now - begin >= seconds and (len(calls) >= _LEAST or not seconds):
            return float(np.median(calls))
