"""The partition of rows into strips and tasks, and the tree of tasks that sums them.

Strips are functions of n alone, tasks are aligned runs of a power of two of strips, and sums follow
the binary tree over strip numbers. So the bits of a sum don't depend on chunks, on the length of
the tasks, on workers or on the order in which they finish.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from dask.delayed import Delayed, delayed

MIN_STRIP, MAX_STRIP = 1 << 12, 1 << 18
_STRIPS_WANTED = (64, 1 << 14), (128, MAX_STRIP)  # some so many strips, of at most so many rows
_TASKS_PER_WORKER = 8, 16  # at least, and if they are long enough
_LEAST_SECONDS, _TASK_SECONDS = 0.25, 2.0


def strip_length(n: int) -> int:
    """Rows per strip, a power of two from 2^12 to 2^18 that depends on n alone.

    What is done once per strip takes the interpreter lock, for which threads wait: of up to a
    million rows, whose pass is short, there are fewer strips.
    """
    rows = max(min(n // count, longest) for count, longest in _STRIPS_WANTED)
    return max(MIN_STRIP, 1 << (max(rows, 1) - 1).bit_length())


class RowRange(NamedTuple):
    """Rows [start, stop) of one task: strips of ``length`` rows, the last one possibly shorter.

    ``own`` are the rows [first, last) that the task writes, where these are not all its rows.
    """

    start: int
    stop: int
    length: int
    own: tuple[int, int] | None = None

    @property
    def strips(self) -> int:
        """Number of strips."""
        return -(-(self.stop - self.start) // self.length)


def plan_ranges(
    n: int,
    chunk_rows: int,
    workers: int,
    seconds_per_row: float,
    max_rows: int | None = None,
) -> list[RowRange]:
    """Cut n rows into tasks.

    Parameters
    ----------
    n
        Number of rows.
    chunk_rows
        Rows of the largest storage chunk; 0 for arrays in memory.
    workers
        Tasks that run at once.
    seconds_per_row
        Estimated cost.
    max_rows
        Rows that a task may hold at once; default any number.

    Notes
    -----
    A task takes about two seconds, or less so that every worker gets sixteen, since the last one to
    end keeps the others waiting; of short ones every worker gets eight. Two tasks whose border lies
    inside a chunk both read it: so, unless chunks end where tasks do, these cover four chunks where
    that leaves enough of them, and two, or at least one, where otherwise a worker would have none.
    """
    length = strip_length(n)
    few, many = (-(-n // (tasks * workers)) for tasks in _TASKS_PER_WORKER)
    fair = min(few, max(many, int(_LEAST_SECONDS / seconds_per_row)))
    rows = max(int(min(_TASK_SECONDS / seconds_per_row, fair)), min(4 * chunk_rows, fair), length)
    size = length << ((rows // length).bit_length() - 1)
    if chunk_rows and size % chunk_rows:
        chunks = min(n // (workers * chunk_rows), 2)
        least = chunks * chunk_rows or -(-n // workers)
        size = max(size, length << (-(-least // length) - 1).bit_length())
    if max_rows is not None:
        size = min(size, length << (max(max_rows // length, 1).bit_length() - 1))
    return [RowRange(start, min(start + size, n), length) for start in range(0, n, size)]


def cut_for_chunks(runs: list[RowRange], chunk_rows: int, block: int) -> list[RowRange]:
    """Tasks whose borders are those of the runs, moved up to borders of chunks to be written.

    So each chunk has one writer (zarr#3682). Rows are computed on a fixed grid of blocks: a block
    that two tasks share is computed by both, and its rows have the same bits in either.
    """
    n = runs[-1].stop
    borders = sorted({min(n, -(-run.stop // chunk_rows) * chunk_rows) for run in runs})
    return [
        RowRange(first // block * block, min(n, -(-last // block) * block), block, (first, last))
        for first, last in zip([0, *borders], borders, strict=False)
    ]


def tree_merges(leaves: int) -> list[tuple[int, int]]:
    """The upper part of the same tree: the two parts of the nodes ``leaves``, ``leaves + 1``, ...

    Nodes 0 to ``leaves - 1`` are the leaves; the last node is the root.
    """
    merges: list[tuple[int, int]] = []
    level = list(range(leaves))
    while len(level) > 1:
        pairs = list(zip(level[::2], level[1::2], strict=False))
        numbers = [leaves + len(merges) + i for i in range(len(pairs))]
        merges += pairs
        level = numbers + level[2 * len(pairs) :]
    return merges


def task_graph(
    leaf: Callable[..., Any],
    payloads: Sequence[tuple[Any, ...]],
    merge: Callable[[Any, Any, Any], Any],
    shared: Any,
    name: str,
    token: str,
    attempts: Mapping[int, int] | None = None,
    there: Mapping[int, Any] = MappingProxyType({}),
) -> list[Delayed]:
    """The tasks of the nodes of the tree, each after its parts: the same on every scheduler.

    Parameters
    ----------
    leaf, payloads, merge, shared, name
        See :meth:`cme_dask.passes.driver.Executor.run`.
    token
        In the names of the tasks, and of no other job's.
    attempts
        Numbers of the nodes that are run and of the attempt; default: all nodes for the first time.
    there
        What nodes have given that are not run.
    """
    leaves, merges = len(payloads), tree_merges(len(payloads))
    attempts = attempts or dict.fromkeys(range(leaves + len(merges)), 0)
    # Under a name that has not failed yet.
    plan = f"{name}-plan-{token}-{max(attempts.values())}"
    common = delayed(shared, name=plan, traverse=False)
    call, add = (delayed(f, pure=False, traverse=False) for f in (leaf, merge))
    made: dict[int, Delayed] = {}
    for node in sorted(attempts):
        again = f"-again{attempts[node]}" if attempts[node] else ""
        if node < leaves:
            key = f"{name}-{node}-{token}{again}"
            made[node] = call(common, *payloads[node], dask_key_name=key)
        else:
            key = f"{name}-merge-{node - leaves}-{token}{again}"
            parts = (made[p] if p in made else there[p] for p in merges[node - leaves])
            made[node] = add(common, *parts, dask_key_name=key)
    return list(made.values())
