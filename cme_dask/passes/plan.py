"""How rows are cut into strips and tasks, the tree that sums them, and how tasks read strips.

Strips are functions of n alone, tasks are aligned runs of a power of two of strips, and sums follow
the binary tree over strip numbers. So the bits of a sum don't depend on chunks, on the length of
the tasks, on workers or on the order in which they finish.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource, ahead, read_strips, take_rows
from cme_dask.errors import DataError
from cme_dask.numerics.folds import BY_ROWS, Folding, Part
from cme_dask.numerics.reduction import Strip

if TYPE_CHECKING:
    from cme_dask.numerics.location import Residuals


MIN_STRIP, MAX_STRIP = 1 << 12, 1 << 18
_STRIPS_WANTED = (64, 1 << 14), (128, MAX_STRIP)  # some so many strips, of at most so many rows
_TASKS_PER_WORKER = 8, 16  # at least, and if they are long enough
_LEAST_SECONDS, _TASK_SECONDS = 0.25, 2.0


N = TypeVar("N")


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


def tree_build(items: list[N], merge: Callable[[N, N], N]) -> N:
    """The upper part of the same tree, as calls of ``merge`` on neighbours."""
    while len(items) > 1:
        pairs = [merge(items[i], items[i + 1]) for i in range(0, len(items) - 1, 2)]
        items = pairs + items[2 * len(pairs) :]
    return items[0]


@dataclass(frozen=True)
class Tree:
    """The fixed binary tree over k leaves, as numbers: leaves are 0..k-1, and merges follow.

    Attributes
    ----------
    leaves
        k.
    merges
        The left and the right part of the nodes k, k+1, ...; the last one is the root.
    spans
        Leaves [first, last) of each node.
    """

    leaves: int
    merges: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def over(cls, leaves: int) -> Self:
        """That of :func:`tree_build`."""
        merges: list[tuple[int, int]] = []
        spans = [(i, i + 1) for i in range(leaves)]

        def merge(a: int, b: int) -> int:
            merges.append((a, b))
            spans.append((spans[a][0], spans[b][1]))
            return len(spans) - 1

        tree_build(list(range(leaves)), merge)
        return cls(leaves, tuple(merges), tuple(spans))

    @property
    def root(self) -> int:
        """The node of all leaves."""
        return len(self.spans) - 1

    def parents(self) -> dict[int, int]:
        """The merge that each node but the root goes into."""
        return {part: self.leaves + i for i, pair in enumerate(self.merges) for part in pair}

    def below(self, node: int) -> range:
        """Leaves of a node."""
        return range(*self.spans[node])


# Strips of rows as tasks read them: which rows count, their weights and folds, in one place


Array = Any


def empty_part(sample: Sample) -> DataError:
    """The error on a sample none of whose rows count."""
    if sample.part is None:
        return DataError("there are no rows: at least one is needed")
    return DataError(f"no row belongs to this part ({sample.part}): take another share or seed")


@dataclass(frozen=True)
class Reading:
    """What the sources of a task are, and which of their rows count.

    Attributes
    ----------
    variables
        How many of them, the first, are x and y.
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

    variables: int
    weighted: bool = False
    units: tuple[str, ...] = ()
    folding: Folding = BY_ROWS
    part: Part | None = None
    residuals: "Residuals | None" = None
    first_row: int = 0
    index: Array | None = None

    @classmethod
    def of(cls, sample: Sample, index: Array | None = None) -> Self:
        """How tasks read the sources ``sample.reads``."""
        return cls(
            len(sample.sources),
            sample.weights is not None,
            (*sample.units,),
            sample.folding,
            sample.part,
            sample.residuals,
            sample.first_row,
            index,
        )

    def strip(self, rows: Array, arrays: tuple[Array, ...]) -> Strip:
        """What counts of the rows with these global indices, given what all sources hold."""
        first = self.variables + self.weighted
        columns = (array[:, 0] for array in arrays[first:])
        units = dict(zip(self.units, columns, strict=True))
        weights = arrays[self.variables][:, 0] if self.weighted else None
        strip = Strip(rows, arrays[: self.variables], weights, units, self.folding)
        if self.part is not None:
            selected = self.part.keeps(rows - self.first_row, units)  # a part is one of its table
            for values in units.values():
                selected |= ~np.isfinite(values)  # of no part: selected to be refused
            strip = strip if selected.all() else strip.only(selected)
        if self.residuals is None:
            return strip
        return replace(
            strip, parts=self.residuals(strip.parts, strip.folds(self.residuals.n_folds))
        )


def strips_of(run: RowRange, reading: Reading, sources: tuple[RowSource, ...]) -> Iterator[Strip]:
    """The strips of a run, one after the other; a strip that holds nothing of the part is empty."""
    if reading.index is not None:
        rows = reading.index[slice(*np.searchsorted(reading.index, [run.start, run.stop]))]
        arrays = tuple(
            take_rows(source, rows, source.chunk_rows or MAX_STRIP, run.start, run.stop)
            for source in sources
        )
        yield reading.strip(reading.first_row + rows, arrays)
        return
    starts = range(run.start, run.stop, run.length)
    readers = [read_strips(source, run.start, run.stop, run.length) for source in sources]
    strips: Iterator[tuple[Any, ...]] = zip(starts, *readers, strict=True)
    if any(source.chunk_rows is not None for source in sources):
        strips = ahead(strips)
    for start, *values in strips:
        stop = min(start + run.length, run.stop)
        strip = reading.strip(reading.first_row + np.arange(start, stop), tuple(values))
        if run.own is not None:
            first, last = max(run.own[0], start), min(run.own[1], stop)
            strip = replace(strip, own=slice(first - start, last - start))
        yield strip
