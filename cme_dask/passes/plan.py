"""The partition of rows into strips and tasks, the tree that sums them, and the reading of strips.

Strips are functions of n alone, tasks are aligned runs of a power of two of strips, and sums follow
the binary tree over strip numbers. So the bits of a sum don't depend on chunks, on the length of
the tasks, on workers or on the order in which they finish.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource, ahead, read_strips, take_rows
from cme_dask.errors import DataError
from cme_dask.numerics.folds import Folding, Split
from cme_dask.numerics.reduction import Strip

if TYPE_CHECKING:
    from cme_dask.numerics.location import Residuals


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


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of one task: strips of ``length`` rows, the last one possibly shorter.

    ``own`` are the rows [first, last) that the task writes, where these are not all its rows.
    """

    start: int
    stop: int
    length: int
    own: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    @property
    def strips(self) -> int:
        """Number of strips."""
        return -(-self.rows // self.length)


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
        for share, chunks in ((2, 2), (1, 1)):
            if n >= share * workers * chunk_rows:
                size = max(size, _up(chunks * chunk_rows, length))
                break
        else:
            size = max(size, _up(-(-n // workers), length))
    if max_rows is not None:
        size = min(size, length << (max(max_rows // length, 1).bit_length() - 1))
    return [RowRange(start, min(start + size, n), length) for start in range(0, n, size)]


def _up(rows: int, length: int) -> int:
    """The smallest run of a power of two of strips that holds these rows."""
    return length << (-(-rows // length) - 1).bit_length()


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


# Strips of rows as tasks read them: which rows count, their weights and folds, in one place


Array = Any


def empty_part(sample: Sample) -> DataError:
    """The error on a sample none of whose rows count."""
    if sample.part is None:
        return DataError("there are no rows: at least one is needed")
    return DataError(f"no row belongs to this part ({sample.part}): take another share or seed")


@dataclass(frozen=True, eq=False)
class Reading:
    """What the sources of a pass are, and which of their rows count; all its tasks share it.

    Attributes
    ----------
    sources
        What is read; None for sources whose rows each task is given by itself.
    variables
        How many of the sources, the first, are x and y.
    weighted
        Whether weights follow.
    units
        Names of the columns that follow these: ``group``, ``time``.
    folding
        What goes into folds as a whole.
    part
        The part of the rows that counts, or None.
    residuals
        What is made of the rows of x and y, or None.
    first_row
        Global index of the first row of the sources.
    index
        The rows that are read, ascending, shape (k,); None for all.
    """

    sources: tuple[RowSource | None, ...]
    variables: int
    weighted: bool
    units: tuple[str, ...]
    folding: Folding
    part: Split | None
    residuals: "Residuals | None"
    first_row: int
    index: Array | None = None

    @classmethod
    def of(cls, sample: Sample, shares_memory: bool, index: Array | None = None) -> Self:
        """How tasks read the sources ``sample.reads``, in this process (or in another one)."""
        return cls(
            tuple(None if s.held_whole(shares_memory) else s for s in sample.reads),
            len(sample.sources),
            sample.weights is not None,
            (*sample.units,),
            sample.folding,
            sample.part,
            sample.residuals,
            sample.first_row,
            index,
        )

    def given(self, sample: Sample, rows: RowRange) -> tuple[Any, ...]:
        """The other sources, of the rows of one task."""
        each = zip(sample.reads, self.sources, strict=True)
        return tuple(s.for_task(rows.start, rows.stop) for s, shared in each if shared is None)

    def strip(self, rows: Array, arrays: tuple[Array, ...]) -> Strip:
        """What counts of the rows with these global indices, given what all sources hold."""
        first = self.variables + self.weighted
        columns = (array[:, 0] for array in arrays[first:])
        units = dict(zip(self.units, columns, strict=True))
        weights = arrays[self.variables][:, 0] if self.weighted else None
        strip = Strip(rows, arrays[: self.variables], weights, units, self.folding)
        if self.part is not None:
            selected = self.part.selects(rows - self.first_row, units)  # a part is one of its table
            for values in units.values():
                selected |= ~np.isfinite(values)  # of no part: selected to be refused
            strip = strip if selected.all() else strip.only(selected)
        if self.residuals is None:
            return strip
        return replace(
            strip, parts=self.residuals(strip.parts, strip.folds(self.residuals.n_folds))
        )

    def strips(self, rows: RowRange, given: tuple[RowSource, ...] = ()) -> Iterator[Strip]:
        """The strips of a task, one after the other; one that holds nothing of the part is empty.

        ``given`` are the sources of :meth:`given`.
        """
        own = iter(given)
        sources = [next(own) if source is None else source for source in self.sources]
        if self.index is not None:
            index = self.index[slice(*np.searchsorted(self.index, [rows.start, rows.stop]))]
            arrays = tuple(
                take_rows(source, index, source.chunk_rows or MAX_STRIP, rows.start, rows.stop)
                for source in sources
            )
            yield self.strip(self.first_row + index, arrays)
            return
        starts = range(rows.start, rows.stop, rows.length)
        readers = [read_strips(source, rows.start, rows.stop, rows.length) for source in sources]
        strips: Iterator[tuple[Any, ...]] = zip(starts, *readers, strict=True)
        if any(source.chunk_rows is not None for source in sources):
            strips = ahead(strips)
        for start, *values in strips:
            stop = min(start + rows.length, rows.stop)
            strip = self.strip(self.first_row + np.arange(start, stop), tuple(values))
            if rows.own is not None:
                first, last = max(rows.own[0], start), min(rows.own[1], stop)
                strip = replace(strip, own=slice(first - start, last - start))
            yield strip
