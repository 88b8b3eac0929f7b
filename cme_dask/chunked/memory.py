"""Predict what a pass needs, and refuse before running what does not fit."""

import math
import sys
from dataclasses import dataclass

import psutil
from dask.utils import format_bytes, parse_bytes
from distributed.system import MEMORY_LIMIT

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.plan import Run, strip_length
from cme_dask.errors import DataError, ResourceError
from cme_dask.numerics.cholesky import BLOCK
from cme_dask.numerics.moments import SUB_BLOCK

_WORD = 8
_HASH_WORDS = 10  # per row of a strip: its hash on the way, its fold, and their order
_PROCESS = 240 << 20  # interpreter and libraries


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
    """

    n_rows: int
    n_columns: int
    chunk_rows: int
    materialised: bool
    ranks: tuple[int, ...]
    width: int
    n_folds: int

    @property
    def partial_bytes(self) -> int:
        """One partial sum: F Gram matrices P x P."""
        return self.n_folds * self.width**2 * _WORD

    def task_bytes(self, run: Run) -> int:
        """Peak of one running task: partial sums, a sub-block with its temporaries, rows."""
        sums = (2 + math.ceil(math.log2(run.strips))) * self.partial_bytes
        block = 3 * SUB_BLOCK * self.width * _WORD
        rows = 3 * strip_length(self.n_rows) + 2 * self.chunk_rows
        if self.materialised:
            rows += 2 * run.rows
        hashes = _HASH_WORDS * strip_length(self.n_rows)
        return sums + block + (rows * self.n_columns + hashes) * _WORD

    def waiting_bytes(self, runs: int) -> int:
        """Finished partial sums that wait for their neighbour in the tree."""
        return math.ceil(math.log2(runs)) * self.partial_bytes

    def solve_bytes(self) -> int:
        """Small dense algebra after the pass, and the moments it starts from."""
        return 2 * self.partial_bytes + 12 * self.width**2 * _WORD


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted peak in bytes, and the limit it was held against, where it is tightest."""

    predicted: int
    limit: int
    place: str


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
        Threads and bytes of each worker of a cluster; empty without one.
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
            workers = [(w["nthreads"], min(most, w["memory_limit"] or MEMORY_LIMIT)) for w in found]
        free = psutil.virtual_memory().available + psutil.Process().memory_info().rss
        return cls(executor, int(min(most, MEMORY_LIMIT, free)), tuple(workers))

    def check_pass(self, shape: PassShape, runs: list[Run]) -> MemoryPlan:
        """Predict the peak of a pass.

        Raises
        ------
        ResourceError
            If it does not fit; the message says what to lower.
        """
        task = shape.task_bytes(max(runs, key=lambda run: run.rows))
        waiting = shape.waiting_bytes(len(runs))
        plans = [
            MemoryPlan(_PROCESS + threads * task + waiting, limit, "a worker")
            for threads, limit in self.workers
        ]
        if plans:
            need = _PROCESS + shape.solve_bytes()
            plans.append(MemoryPlan(need, self.client, "the client"))
        else:
            processes = self.executor.workers if self.executor.kind == "processes" else 0
            running = self.executor.workers * task + waiting
            need = (1 + processes) * _PROCESS + max(running, shape.solve_bytes())
            plans.append(MemoryPlan(need, self.client, "this machine"))
        worst = max(plans, key=lambda plan: plan.predicted / plan.limit)
        if worst.predicted > worst.limit:
            raise ResourceError(_refusal(shape, self.executor, worst))
        return worst

    def check_pivots(self, rows: int, rank: int, variable: str) -> None:
        """Refuse a choice of pivots whose columns over the row sample don't fit.

        Raises
        ------
        ResourceError
            If ``rank`` columns of ``rows`` values are too much.
        """
        need = _PROCESS + rows * (rank + BLOCK) * _WORD
        if need > self.client:
            raise ResourceError(
                f"choosing {rank} pivots of {variable} from {rows:,} sampled rows would need "
                f"{format_bytes(need)}, the limit is {format_bytes(self.client)}: lower max_rank "
                "or sample_size, or raise tol"
            )


def _bytes(limit: str | int | None) -> int:
    if limit is None:
        return sys.maxsize
    try:
        value = parse_bytes(limit)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"memory_limit must be bytes or a text like '2GB', got {limit!r}"
        ) from error
    if value <= 0:
        raise DataError(f"memory_limit must be positive, got {limit!r}")
    return int(value)


def _refusal(shape: PassShape, executor: Executor, plan: MemoryPlan) -> str:
    ranks = " + ".join(map(str, shape.ranks))
    remedies = ["lower max_rank or raise tol"]
    if shape.n_folds > 1:
        remedies.append(
            f"n_folds=1 (partial sums {shape.n_folds} times smaller, no standard errors)"
        )
    if executor.workers > 1:
        remedies.append(f"fewer than {executor.workers} workers or threads")
    if shape.chunk_rows > strip_length(shape.n_rows):
        remedies.append(f"smaller chunks than {shape.chunk_rows:,} rows")
    return (
        f"{plan.place} would need {format_bytes(plan.predicted)} for rank {ranks} with "
        f"{shape.n_folds} folds and {executor.workers} tasks at once, the limit is "
        f"{format_bytes(plan.limit)}: {', or '.join(remedies)}"
    )
