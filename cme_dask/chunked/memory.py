"""Predict what a pass needs, and refuse before running what does not fit."""

import math
from dataclasses import dataclass

import psutil
from dask.utils import format_bytes, parse_bytes
from distributed.system import MEMORY_LIMIT

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.plan import Run, strip_length
from cme_dask.errors import DataError, ResourceError
from cme_dask.numerics.moments import SUB_BLOCK

_WORD = 8
_PROCESS = 300 << 20  # interpreter and libraries


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
        sums = (2 + math.ceil(math.log2(run.strips + 1))) * self.partial_bytes
        block = 3 * SUB_BLOCK * self.width * _WORD
        rows = 3 * strip_length(self.n_rows) + 2 * self.chunk_rows
        if self.materialised:
            rows += 2 * run.rows
        return sums + block + rows * self.n_columns * _WORD

    def waiting_bytes(self, runs: int) -> int:
        """Finished partial sums that wait for their neighbour in the tree."""
        return (1 + math.ceil(math.log2(runs + 1))) * self.partial_bytes

    def solve_bytes(self) -> int:
        """Small dense algebra after the pass, and the moments it starts from."""
        return 2 * self.partial_bytes + 12 * self.width**2 * _WORD


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted peak in bytes, and the limit it was held against, where it is tightest."""

    predicted: int
    limit: int
    place: str


def check_memory(
    shape: PassShape, runs: list[Run], executor: Executor, limit: str | int | None
) -> MemoryPlan:
    """Predict the peak of a pass and compare it with the limit.

    Parameters
    ----------
    shape, runs, executor
        What will run where.
    limit
        Bytes ("2GB" or a number) for this process, or for each worker of a cluster; default what
        the machine or the worker has.

    Raises
    ------
    ResourceError
        If the pass does not fit; the message says what to lower and by how much.
    """
    plans = []
    longest = max(runs, key=lambda run: run.rows)
    task, waiting = shape.task_bytes(longest), shape.waiting_bytes(len(runs))
    if executor.client is not None:
        workers = executor.client.scheduler_info(n_workers=-1)["workers"].values()
        for worker in workers:
            need = _PROCESS + worker["nthreads"] * task + waiting
            plans.append(MemoryPlan(need, worker["memory_limit"] or MEMORY_LIMIT, "a worker"))
        need = _PROCESS + shape.solve_bytes()
        plans.append(MemoryPlan(need, _available(), "the client"))
    else:
        processes = executor.workers if executor.kind == "processes" else 0
        need = (1 + processes) * _PROCESS + executor.workers * task + waiting + shape.solve_bytes()
        plans.append(MemoryPlan(need, _available(), "this machine"))
    if limit is not None:
        allowed = _bytes(limit)
        plans = [MemoryPlan(plan.predicted, min(plan.limit, allowed), plan.place) for plan in plans]
    worst = max(plans, key=lambda plan: plan.predicted / plan.limit)
    if worst.predicted > worst.limit:
        raise ResourceError(_refusal(shape, executor, worst))
    return worst


def _available() -> int:
    """What this process may still take, and what it has already."""
    free = psutil.virtual_memory().available + psutil.Process().memory_info().rss
    return int(min(MEMORY_LIMIT, free))


def _bytes(limit: str | int) -> int:
    try:
        value = parse_bytes(limit)
    except (ValueError, AttributeError) as error:
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
