"""Predict what a pass needs, and refuse before running what does not fit."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import dask
import psutil
from dask.utils import format_bytes, parse_bytes
from distributed.system import MEMORY_LIMIT

from cme_dask.errors import DataError, ResourceError, option, remedy
from cme_dask.numerics.cholesky import BY_TRACE, GREEDY, SKETCH
from cme_dask.numerics.moments import most_spanned, sub_block
from cme_dask.numerics.pools import BLOCK
from cme_dask.numerics.resources import MemoryPlan
from cme_dask.passes.driver import Executor
from cme_dask.passes.plan import Run, strip_length

A_WORKER = "a worker"
"""The place of a prediction that is about a worker of a cluster."""

_WORD = 8
_HASH_WORDS = 10  # per row of a strip: its hash on the way, its fold and its cell, their order
_PROCESS = 215 << 20  # interpreter and libraries
_WORKER = 80 << 20  # of a cluster's worker: it loads fewer, and some pages it shares with others
_CHILD = 170 << 20  # of each process that is started: it shares pages of the libraries
_ROW_SAMPLE_WORDS = 4  # per row of the row sample beside its values: key, index, weight, importance
_SOLVE_WORDS = 12  # per entry of a P x P matrix: eigenbases, and what they are made from
_DECODED = 10  # chunks that Zarr decodes at once
_TRIAL_WORDS = 11  # likewise: sums of the safe form and of the two that are tried at once


@dataclass(frozen=True)
class PassShape:
    """The numbers that memory depends on.

    Attributes
    ----------
    n_rows
        Number of rows.
    n_columns
        Columns of x, y and weights together.
    chunk_rows
        Rows of the largest storage chunk; 0 for arrays in memory.
    materialised
        Whether a task holds all its rows at once (Dask arrays, copies sent to other processes).
    ranks
        Numbers of pivots, a number per side.
    width
        Length P of an augmented row.
    n_folds
        Number of folds F.
    sample_rows
        Rows of the row sample if pivots are chosen from it, else 0.
    array_bytes
        What the rows take that are in the memory of this process.
    cell_words, cell_block, kept_words
        Numbers in the sums by cell of all variables, in blocks of rows on the way there, and in
        the rows that are kept; 0 without.
    selected
        Whether only a part of the rows counts.
    """

    n_rows: int
    n_columns: int
    chunk_rows: int
    materialised: bool
    ranks: tuple[int, ...]
    width: int
    n_folds: int
    sample_rows: int = 0
    array_bytes: int = 0
    cell_words: int = 0
    cell_block: int = 0
    kept_words: int = 0
    selected: bool = False

    @property
    def partial_bytes(self) -> int:
        """One partial sum: F Gram matrices P x P, and the sums by cell."""
        return (self.n_folds * self.width**2 + self.cell_words) * _WORD

    def task_bytes(self, run: Run) -> int:
        """Peak of one running task: partial sums, a sub-block with its temporaries, rows."""
        sums = (1 + math.ceil(math.log2(run.strips))) * self.partial_bytes
        # A sub-block of P functions of each set of moments, what is on the way, and eliminations.
        block = (2 + math.ceil(len(self.ranks) / 2)) * sub_block(self.width) * self.width
        block += sum(m * m for m in self.ranks) // 2
        # Rows gathered, mapped and scaled for several sub-blocks, coordinates of each basis, and
        # functions; of several sets of moments, whose widths are unknown here, at least columns.
        beside = max(self.width - sum(self.ranks), self.n_columns)
        prepared = 2 * beside + (3 + len(self.ranks)) * self.n_columns
        block += prepared * min(most_spanned(beside), strip_length(self.n_rows))
        if self.cell_words:
            block += self.cell_block
            # Kept rows of the run, once more while they are joined.
            block += 2 * self.kept_words * min(run.rows, self.n_rows) // self.n_rows
        length = strip_length(self.n_rows)
        rows = self._read_rows(length)
        if self.selected:
            rows += length  # the rows of a strip that are kept
        if self.materialised:
            rows += 2 * run.rows
        return sums + (block + rows * self.n_columns + _HASH_WORDS * length) * _WORD

    def _read_rows(self, length: int) -> int:
        """Rows that reading a strip takes while the one before it is in use."""
        chunk = self.chunk_rows
        if not length % max(chunk, 1):
            # Two strips, and the chunks of one variable that are on the way, packed and unpacked.
            return 2 * length + min(length, _DECODED * chunk)
        if not chunk % length:
            return length + 3 * chunk  # strips are parts of a chunk; likewise
        return 3 * length + 3 * chunk  # rows of a straddled chunk are joined to those of the next

    def waiting_bytes(self, runs: int) -> int:
        """Finished partial sums that wait for their neighbour in the tree."""
        return math.ceil(math.log2(runs)) * self.partial_bytes + self.kept_words * _WORD

    def client_bytes(self) -> dict[str, int]:
        """Peak of each phase that runs in the client alone, by its name."""
        square = self.width**2 * _WORD
        # Of a part these may be all its rows.
        complete = self.selected or self.sample_rows >= self.n_rows
        return {
            "the choice of pivots": max(
                pivot_bytes(self.sample_rows, m, complete=complete) for m in self.ranks
            ),
            "the trial of the arithmetic": _TRIAL_WORDS * square,
            # The moments, once more packed for the model, and a fold's solution.
            "the solution": 3 * self.partial_bytes // 2 + _SOLVE_WORDS * square,
        }

    def held_bytes(self) -> int:
        """What this process holds all the time: rows that were given in memory, the row sample."""
        return self.array_bytes + row_sample_bytes(self.sample_rows, self.n_columns)


def row_sample_bytes(rows: int, columns: int) -> int:
    """What a row sample takes, of so many columns of x, y and weights together."""
    return rows * (columns + _ROW_SAMPLE_WORDS) * _WORD


def pivot_bytes(sample_rows: int, rank: int, *, complete: bool = False) -> int:
    """Peak of a choice of ``rank`` pivots from a row sample.

    One half of it is chosen from and the other half tells how good the choice is, unless it is
    complete.
    """

    def columns(rows: int, pivots: int) -> int:
        return rows * -(-pivots // BLOCK) * BLOCK * _WORD

    # Signs and sketch of the rows of a choice by trace, and of half as many before.
    half = sample_rows if complete else -(-sample_rows // 2)
    sketches = 3 * SKETCH * BY_TRACE.prefix_rows(rank, half) * _WORD

    # L in blocks of columns, and pools in pools of an eighth of the rows each. Where the rows tell
    # too little of the others they are doubled, and what is known of one half of them is held until
    # the columns of all are ready.
    if complete:
        return int(1.5 * columns(sample_rows, rank)) + sketches
    chosen = GREEDY.prefix_rows(rank, half)
    grown = min(2 * chosen, half)
    grown_columns = int((1.5 if grown > chosen else 1.2) * columns(grown, rank))
    return columns(half, rank) + grown_columns + sketches


@dataclass(frozen=True)
class MemoryBudget:
    """What the places of a run may use.

    Attributes
    ----------
    executor
        Where tasks run.
    client
        Bytes for this process (and, without a cluster, for the processes it starts).
    workers
        Threads of each worker of a cluster, and the bytes that it fills before it begins to spill;
        empty without one.
    """

    executor: Executor
    client: int
    workers: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, executor: Executor, limit: str | int | None) -> "MemoryBudget":
        """From what machine and workers have, and at most ``limit`` ("2GB") each.

        Raises
        ------
        DataError
            If the limit is no positive number of bytes.
        """
        most = _bytes(limit)
        workers = []
        if executor.client is not None:
            found = executor.client.scheduler_info(n_workers=-1)["workers"].values()
            workers = [(w["nthreads"], min(most, _usable(w["memory_limit"]))) for w in found]
        free = psutil.virtual_memory().available + psutil.Process().memory_info().rss
        return cls(executor, int(min(most, MEMORY_LIMIT, free)), tuple(workers))

    def check_pass(self, shape: PassShape, runs: list[Run]) -> MemoryPlan:
        """Predict the peak of a fit: of its pass, and of what comes before and after it.

        Raises
        ------
        ResourceError
            If it does not fit; the message says what to lower.
        """
        task = shape.task_bytes(max(runs, key=lambda run: run.rows))
        waiting = shape.waiting_bytes(len(runs))
        worst = self.tightest(task, waiting, shape.client_bytes(), shape.held_bytes())
        if worst.predicted > worst.limit:
            raise ResourceError(_refusal(shape, self.executor, worst))
        return worst

    def check_alone(self, phase: str, need: int, held: int, remedy: str) -> MemoryPlan:
        """Predict the peak of a step that the client takes alone.

        Parameters
        ----------
        phase
            Its name.
        need, held
            Bytes that it takes, and that the client holds anyway.
        remedy
            What to do where that does not fit.

        Raises
        ------
        ResourceError
            If it does not fit.
        """
        plan = MemoryPlan(_PROCESS + held + need, self.client, self._here, phase)
        if plan.predicted > plan.limit:
            raise ResourceError(
                f"{plan.place} would need {format_bytes(plan.predicted)} for {phase}, the limit is "
                f"{format_bytes(plan.limit)}: {remedy}"
            )
        return plan

    def tightest(
        self, task: int, waiting: int, alone: Mapping[str, int], held: int = 0
    ) -> MemoryPlan:
        """The place that a run fills most.

        Parameters
        ----------
        task
            Bytes of one running task.
        waiting
            Bytes of results that wait, per process.
        alone
            Bytes that the client needs while no task runs, by the name of the phase.
        held
            Bytes that the client holds all the time.
        """
        here, base = self._here, _PROCESS + held
        plans = [MemoryPlan(base + need, self.client, here, name) for name, need in alone.items()]
        if self.workers:
            plans += [
                MemoryPlan(_WORKER + threads * task + waiting, limit, A_WORKER)
                for threads, limit in self.workers
            ]
        else:
            processes = self.executor.workers if self.executor.kind == "processes" else 0
            running = processes * _CHILD + self.executor.workers * task + waiting
            plans.append(MemoryPlan(base + running, self.client, here))
        return max(plans, key=lambda plan: plan.predicted / plan.limit)

    @property
    def _here(self) -> str:
        return "the client" if self.workers else "this machine"


def _usable(limit: int) -> int:
    """Of a worker's memory what it fills before it begins to spill; 0: it has no limit."""
    share = dask.config.get("distributed.worker.memory.spill") or 1.0
    return int(share * (limit or MEMORY_LIMIT))


def _bytes(limit: str | int | None) -> int:
    if limit is None:
        return sys.maxsize
    try:
        value = parse_bytes(limit)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{option('memory_limit')} must be bytes or a text like '2GB', got {limit!r}"
        ) from error
    if value <= 0:
        raise DataError(f"{option('memory_limit')} must be positive, got {limit!r}")
    return int(value)


def _refusal(shape: PassShape, executor: Executor, plan: MemoryPlan) -> str:
    ranks = " + ".join(map(str, shape.ranks))
    remedies = [f"lower {option('max_rank')} or raise {option('tol')}"]
    if shape.n_folds > 1:
        remedies.append(
            f"{remedy('n_folds=1', '--folds 1')} (partial sums {shape.n_folds} times smaller, no "
            "standard errors)"
        )
    if executor.workers > 1:
        remedies.append(f"fewer than {executor.workers} workers or threads")
    if shape.chunk_rows > strip_length(shape.n_rows):
        reading = shape.n_columns * _WORD * 3 * shape.chunk_rows
        first = 0 if 2 * reading > plan.predicted else len(remedies)
        remedies.insert(
            first,
            f"chunks of fewer rows than {shape.chunk_rows:,}, which are read whole "
            "(cme-dask rechunk)",
        )
    return (
        f"{plan.place} would need {format_bytes(plan.predicted)} for rank {ranks} with "
        f"{shape.n_folds} folds and {executor.workers} tasks at once, the limit is "
        f"{format_bytes(plan.limit)}: {', or '.join(remedies)}"
    )
