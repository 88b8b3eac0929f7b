"""What a fit would cost: operations counted from n, d, ranks and arithmetic, and their seconds.

The rates that turn counts into seconds are measured, see :mod:`cme_dask.chunked.rates`.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cme_dask.chunked.plan import Run
from cme_dask.numerics.cell_sums import CellSpec
from cme_dask.numerics.moments import MomentSpec
from cme_dask.storage.rows import RowSource
from cme_dask.storage.sample import Sample

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
