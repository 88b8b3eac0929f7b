"""Reductions: statistics of all rows of a sample, described apart from where and how they run.

A :class:`Reduction` turns strips of rows into partial results and combines them. It knows neither
Dask nor Zarr; :func:`cme_dask.passes.run.run_pass` cuts the rows into tasks, predicts the memory
from :class:`Cost`, checks the values, reports progress and writes checkpoints. The parts of a pass:

* ``start`` makes the buffers of one task, where the rows are (in host memory or on a device).
* ``update`` makes the partial result of one strip. Strips depend on the number of rows alone.
* ``combine`` joins two partial results along a fixed binary tree over the strips, so that the bits
  of the result depend neither on chunks nor on tasks, workers or scheduler. Within a task,
  ``accumulate`` does the same and may reuse the memory of the left operand.
* ``finish`` closes what the task holds open, such as files. Then the partial result, which is made
  of numbers, arrays, tuples, named tuples, mappings and dataclasses, comes to the host: once per
  task.
* ``finalize`` turns the combined result into the answer, in the process of the caller.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj

from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import Scratch, take_into, to_numpy
from cme_dask.numerics.folds import BY_ROWS, Folding, number_hash

Array = Any
Span = tuple[int, slice]  # a fold, and its rows
Filled = tuple[int, int, float]
"""A column of x whose missing values were filled in: it, and the column and value that say so."""
T = TypeVar("T")
Partial = TypeVar("Partial")
Result = TypeVar("Result")

MIN_STRIP, MAX_STRIP = 1 << 12, 1 << 18
_STRIPS_WANTED = (64, 1 << 14), (128, MAX_STRIP)  # some so many strips, of at most so many rows
_STRIPS_ON_DEVICE = ((8, MAX_STRIP),)  # which each takes a thousand calls, however long it is
_TASKS_PER_WORKER = 8, 16  # at least, and if they are long enough
_TASKS_ON_DEVICE = 4, 8  # likewise; the sums of each come back to the host
_LEAST_SECONDS, _TASK_SECONDS = 0.25, 2.0
_CACHE = 7 << 19  # bytes of a block that are held at once
LONGEST_BLOCK = 1 << 12  # rows of it
_LONGEST_ON_DEVICE = 1 << 18  # likewise, of a device whose memory is known


class BadValues(DataError):
    """A strip met a value that is not usable; a further pass then finds and names them all."""


@dataclass(frozen=True, eq=False)
class Strip:
    """Consecutive rows that count, possibly none.

    Attributes
    ----------
    rows
        Global indices, ascending, shape (n,).
    parts
        Rows of each variable (x, or x and y), shapes (n, d).
    weights
        Shape (n,), or None for equal ones.
    units
        Values of the columns that define groups and times, by name, shapes (n,).
    folding
        How rows are assigned to folds.
    own
        The rows that the task itself is to write, where the others are there to fill a block.
    missing
        Where rows with missing values were left out: the number of these, then the number of
        missing values in each of :meth:`columns`, integers of shape (1 + columns,).
    """

    rows: Array
    parts: tuple[Array, ...]
    weights: Array | None
    units: Mapping[str, Array] = field(default_factory=dict)
    folding: Folding = BY_ROWS
    own: slice | None = None
    missing: Array | None = None
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def folds(self, n_folds: int) -> Array:
        """Fold number of each row, shape (n,), uint8."""
        if n_folds not in self._made:
            self._made[n_folds] = self.folding.folds(self.rows, self.units, n_folds)
        return self._made[n_folds]

    def hashes(self, salt: int) -> Array:
        """Hash of the global index of each row, uint64 of shape (n,)."""
        if ("hashes", salt) not in self._made:
            self._made["hashes", salt] = number_hash(salt, self.rows.astype(np.uint64))
        return self._made["hashes", salt]

    @property
    def counted(self) -> Array | None:
        """Which rows have a positive weight, in host memory, shape (n,); None: all of them."""
        if self.weights is None:
            return None
        if "counted" not in self._made:
            self._made["counted"] = self.weights > 0.0
        return self._made["counted"]

    def only(self, selected: Array) -> "Strip":
        """The rows at which ``selected``, shape (n,), is true."""
        return Strip(
            self.rows[selected],
            tuple(part[selected] for part in self.parts),
            None if self.weights is None else self.weights[selected],
            {name: values[selected] for name, values in self.units.items()},
            self.folding,
        )

    def without_missing(self, *beside: Array, filled: Sequence[Filled] = ()) -> "Strip":
        """The rows that lack no value, with the numbers of those that did in ``missing``.

        Parameters
        ----------
        beside
            Further values of the rows, none of which may be missing either, shapes (n, k).
        filled
            Where missing values of x have been filled in: rows stay, and are counted.
        """
        absent = np.isnan(np.concatenate(self.columns(), axis=1))
        lost = absent.any(axis=1)
        for values in beside:
            lost |= np.isnan(values).any(axis=1)
        for place, mark, value in filled:
            absent[:, place] |= self.parts[0][:, mark] == value
        counts = np.array([lost.sum(), *absent.sum(axis=0)])
        return replace(self.only(~lost) if counts[0] else self, missing=counts)

    def placed(self, place: Callable[[Array], Array]) -> "Strip":
        """The same with the rows and weights where ``place`` puts them."""
        _ = self.counted  # while weights are in host memory
        weights = None if self.weights is None else place(self.weights)
        return replace(self, parts=tuple(map(place, self.parts)), weights=weights)

    def columns(self) -> tuple[Array, ...]:
        """Everything that must be finite, in the order of the sources, shapes (n, d)."""
        weights = () if self.weights is None else (self.weights[:, None],)
        return *self.parts, *weights, *(values[:, None] for values in self.units.values())


def by_fold(
    strip: Strip, n_folds: int, length: int, taken: Sequence[Scratch]
) -> Iterator[tuple[tuple[Array, ...], Array | None, list[Span]]]:
    """Rows and weights of a strip, so many at a time, and where each fold lies among them.

    Rows of a fold become neighbours: its products are then few and long.

    Parameters
    ----------
    strip, n_folds
        The rows, and the number of folds F.
    length
        Rows that come at once.
    taken
        Memory for the rows of each variable: they are good until the next ones come.
    """
    parts, weights, folds = strip.parts, strip.weights, strip.folds(n_folds)
    xp, n = array_namespace(parts[0]), len(folds)
    order = None if n_folds == 1 else np.argsort(folds, kind="stable")
    borders = np.cumsum([0, *np.bincount(folds, minlength=n_folds)])
    for start in range(0, n, length):
        here = slice(start, min(start + length, n))
        edges = (np.clip(borders, here.start, here.stop) - start).tolist()
        spans = [
            (f, slice(low, high)) for f, (low, high) in enumerate(pairwise(edges)) if low < high
        ]
        if order is None:
            near = tuple(part[here, :] for part in parts)
            yield near, None if weights is None else weights[here], spans
            continue
        index, near = xp.asarray(order[here], device=device(parts[0])), ()
        for scratch, part in zip(taken, parts, strict=True):
            near += (scratch.shaped(xp, (here.stop - start, part.shape[1]), part),)
            take_into(xp, near[-1], part, index)
        yield near, None if weights is None else xp.take(weights, index), spans


class Extent(NamedTuple):
    """Shape and layout of the rows of a pass, known before they are read.

    Attributes
    ----------
    n_rows
        Number of rows.
    n_columns
        Number of all columns of a strip: x, y, weights, groups, times, and residuals if there are.
    strip_rows
        Rows of a strip.
    chunk_rows
        Rows of the largest storage chunk; 0 for arrays in memory.
    in_memory
        Bytes of the rows that were given in the memory of this process.
    materialised
        Whether a task holds all its rows at once (Dask arrays, copies sent to other processes).
    selected
        Whether only a part of the rows counts.
    columns_read
        Numbers per row that are in memory while rows are read: of a mapped sample those that the
        function takes, and those that it makes. 0 for those of a strip.
    device_memory
        Bytes of the memory of the device that computes; 0 for the host, and where it is unknown.
    on_device
        Whether that is another device than the host.
    """

    n_rows: int
    n_columns: int
    strip_rows: int
    chunk_rows: int = 0
    in_memory: int = 0
    materialised: bool = False
    selected: bool = False
    columns_read: int = 0
    device_memory: int = 0
    on_device: bool = False

    @property
    def strips(self) -> int:
        """Number of strips."""
        return -(-self.n_rows // self.strip_rows)


@dataclass(frozen=True)
class Cost:
    """Operations and memory of a reduction; costs add.

    Parameters
    ----------
    flops
        Operations per row.
    written
        Bytes per row that are written.
    state
        Bytes of the buffers of a task, with the largest temporaries of an update.
    partial
        Bytes of one partial result.
    retained
        Bytes of rows that the partial results retain, over all rows together.
    process
        Bytes that each process takes once, however many tasks it runs.
    subject
        Subject of the memory, in messages: ``"rank 20 + 20 with 10 folds"``.
    remedies
        Remedies if the memory does not suffice, in messages: ``"lower max_rank"``.
    alone
        Bytes that the client needs while no task runs, by the name of the phase.
    held
        Bytes that the client holds all the time, beside rows that were given in memory.
    """

    flops: float = 0.0
    written: float = 0.0
    state: int = 0
    partial: int = 0
    retained: int = 0
    process: int = 0
    subject: str = ""
    remedies: tuple[str, ...] = ()
    alone: Mapping[str, int] = field(default_factory=dict)
    held: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        """The cost of both over the same rows."""
        return Cost(
            self.flops + other.flops,
            self.written + other.written,
            self.state + other.state,
            self.partial + other.partial,
            self.retained + other.retained,
            self.process + other.process,
            " and ".join(filter(None, (self.subject, other.subject))),
            tuple(dict.fromkeys((*self.remedies, *other.remedies))),
            {
                phase: self.alone.get(phase, 0) + other.alone.get(phase, 0)
                for phase in (*self.alone, *other.alone)
            },
            self.held + other.held,
        )


class MemoryPlan(NamedTuple):
    """Predicted peak in bytes, and the limit it was held against, where and when it is tightest."""

    predicted: int
    limit: int
    place: str
    phase: str = "the pass"

    def or_tighter(self, other: "MemoryPlan | None") -> "MemoryPlan":
        """The one of two that fills its place more."""
        if other is None or other.predicted * self.limit <= self.predicted * other.limit:
            return self
        return other


class Reduction(ABC, Generic[Partial, Result]):
    """A statistic of all rows, computed in one pass; users subclass it.

    Subclasses are picklable and hold no data beside their parameters. ``update`` must be
    implemented, and ``combine`` unless partial results add up with ``+``.

    Attributes
    ----------
    name : str
        The name of the pass, in progress reports, in checkpoints and on Dask's dashboard.
    n_folds : int
        Argument of ``strip.folds(n_folds)`` in ``update``; 1 without folds.
    checked : bool
        Whether rows are checked before ``update``: NaN, infinities and negative weights are then
        refused with a list of all columns that hold some.
    chunk_rows : int
        Rows of the chunks that the tasks write, each by one task; 0 if they write none.
    strip_rows : int
        Rows of a strip, where the tasks write chunks; 0 for a number that depends on the number of
        rows alone.
    kinds : tuple of types
        The dataclasses and named tuples in its partial results: a checkpoint decodes no others.
    on_device : bool
        Whether ``update`` takes arrays of any device: a pass without this stays in host memory.
    """

    name: str = "reduction"
    n_folds: int = 1
    checked: bool = True
    chunk_rows: int = 0
    strip_rows: int = 0
    kinds: tuple[type, ...] = ()
    on_device: bool = True

    def cost(self, extent: Extent) -> Cost:
        """Operations per row, bytes of the buffers and of a partial result."""
        return Cost()

    def start(self, like: Array) -> Any:
        """The buffers of one task, in the library and on the device of the rows ``like``."""
        return None

    @abstractmethod
    def update(self, state: Any, strip: Strip) -> Partial:
        """The partial result of one strip of rows, possibly of none."""

    def combine(self, a: Partial, b: Partial) -> Partial:
        """The partial result of two neighbouring sets of rows; ``a`` and ``b`` stay as they are.

        It must be associative up to rounding: it is applied along a fixed tree.
        """
        total: Partial = a + b  # type: ignore[operator]
        return total

    def accumulate(self, a: Partial, b: Partial) -> Partial:
        """The same within a task, where the memory of ``a`` may be reused."""
        return self.combine(a, b)

    def finish(self, state: Any) -> None:
        """Close the resources of the task; called after its last strip."""

    def finalize(self, total: Partial) -> Result:
        """The answer, from the partial result of all rows."""
        return total  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class OfParts(Reduction[Partial, Result]):
    """A reduction of two of the variables of the rows: where rows hold those of several fits.

    Parameters
    ----------
    reduction
        Of rows (x, y).
    first
        Position of its x among the variables; its y follows.
    """

    reduction: Reduction[Partial, Result]
    first: int

    def __post_init__(self) -> None:
        for name in ("name", "n_folds", "checked", "chunk_rows", "strip_rows", "kinds"):
            object.__setattr__(self, name, getattr(self.reduction, name))
        object.__setattr__(self, "on_device", self.reduction.on_device)

    def cost(self, extent: Extent) -> Cost:
        """Its cost, on rows of these columns."""
        return self.reduction.cost(extent)

    def start(self, like: Array) -> Any:
        """Its buffers."""
        return self.reduction.start(like)

    def update(self, state: Any, strip: Strip) -> Partial:
        """Its partial result of a strip of its variables."""
        parts = strip.parts[self.first : self.first + 2]
        return self.reduction.update(state, replace(strip, parts=parts))

    def combine(self, a: Partial, b: Partial) -> Partial:
        """As it combines them."""
        return self.reduction.combine(a, b)

    def accumulate(self, a: Partial, b: Partial) -> Partial:
        """As it accumulates them."""
        return self.reduction.accumulate(a, b)

    def finish(self, state: Any) -> None:
        """Close its resources."""
        self.reduction.finish(state)

    def finalize(self, total: Partial) -> Result:
        """Its answer."""
        return self.reduction.finalize(total)


def sub_block(width: int, memory: int = 0) -> int:
    """Rows of ``width`` numbers held at once: they stay in cache, and chunks may be of any size.

    A power of two from 2^9 to ``LONGEST_BLOCK``; on longer ones kernel and products wait for
    memory, on shorter ones for each other. On a device with so many bytes of memory each call takes
    long to start: there they may be longer, up to a share of it.
    """
    room, most = max(memory >> 10, _CACHE), _LONGEST_ON_DEVICE if memory else LONGEST_BLOCK
    return min(1 << max((room // (8 * width)).bit_length() - 1, 9), most)


# The partition of rows into strips and tasks, and the tree of tasks that sums them
#
# Strips are functions of n alone, tasks are aligned runs of a power of two of strips, and sums
# follow the binary tree over strip numbers. So the bits of a sum don't depend on chunks, on the
# length of the tasks, on workers or on the order in which they finish.


def strip_length(n: int, on_device: bool = False) -> int:
    """Rows per strip, a power of two from 2^12 to 2^18 that depends on n and on the device alone.

    What is done once per strip takes the interpreter lock, for which threads wait: of up to a
    million rows, whose pass is short, there are fewer strips; and fewer still on a device.
    """
    limits = _STRIPS_ON_DEVICE if on_device else _STRIPS_WANTED
    rows = max(min(n // count, longest) for count, longest in limits)
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
    *,
    on_device: bool = False,
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
    on_device
        Whether they are computed on a device other than the host.

    Notes
    -----
    A task takes about two seconds, or less so that every worker gets sixteen, since the last one to
    end keeps the others waiting; of short ones every worker gets eight, and a worker alone with
    rows in memory, without ``max_rows``, one. Two tasks whose border lies inside a chunk both read
    it: so, unless chunks end where tasks do, these cover four chunks where that leaves enough of
    them, and two, or at least one, where otherwise a worker would have none.
    """
    length = strip_length(n, on_device)
    counts = _TASKS_ON_DEVICE if on_device else _TASKS_PER_WORKER
    few, many = (-(-n // (tasks * workers)) for tasks in counts)
    if workers == 1 and not chunk_rows and max_rows is None:
        few = n
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


# The work of a task


def reduce_strips(
    reductions: Sequence[Reduction[Any, Any]],
    strips: Iterable[Strip],
    place: Callable[[Array], Array] | None = None,
) -> tuple[int, tuple[Any, ...]]:
    """The work of one task: how many rows its strips have, and their partial results on the host.

    Parameters
    ----------
    reductions
        What to compute, at least one.
    strips
        At least one strip of rows in host memory.
    place
        Puts an array where it is computed with; default: it stays in host memory.

    Raises
    ------
    BadValues
        If a strip holds unusable values, and one of the reductions does not admit them.
    """

    def accumulate(a: list[Any], b: list[Any]) -> list[Any]:
        return [one.accumulate(*pair) for one, *pair in zip(reductions, a, b, strict=True)]

    checked, rows = any(one.checked for one in reductions), 0
    states: list[Any] = []
    waiting: list[tuple[int, list[Any]]] = []
    for strip in strips:
        if checked:
            usable = all(np.isfinite(values).all() for values in strip.columns())
            if not usable or (strip.weights is not None and not (strip.weights >= 0).all()):
                raise BadValues(f"rows {strip.rows[0]} to {strip.rows[-1]} hold unusable values")
        rows += len(strip.rows) if strip.own is None else strip.own.stop - strip.own.start
        placed = strip if place is None else strip.placed(place)
        if not states:
            like = placed.parts[0] if placed.parts else placed.rows
            states = [one.start(like) for one in reductions]
        partials = []
        for one, state in zip(reductions, states, strict=True):
            partials.append(one.update(state, placed))
        _push(waiting, partials, accumulate)
    for one, state in zip(reductions, states, strict=True):
        one.finish(state)
    (_, totals), *others = reversed(waiting)
    for _, left in others:
        totals = accumulate(left, totals)
    return rows, tuple(totals) if place is None else to_host(tuple(totals))


def tree_sum(items: Iterable[T], add: Callable[[T, T], T] = operator.iadd) -> T:
    """Sum along the fixed binary tree over positions, holding O(log) partial sums.

    Parameters
    ----------
    items
        At least one.
    add
        Sum of two neighbours, which may reuse the memory of the left one.
    """
    waiting: list[tuple[int, T]] = []
    for item in items:
        _push(waiting, item, add)
    (_, total), *others = reversed(waiting)
    for _, left in others:
        total = add(left, total)
    return total


def _push(waiting: list[tuple[int, T]], value: T, add: Callable[[T, T], T]) -> None:
    """Add an item: of sums that wait for their neighbour, each has its level in the tree."""
    level = 0
    while waiting and waiting[-1][0] == level:
        value = add(waiting.pop()[1], value)
        level += 1
    waiting.append((level, value))


def to_host(value: Any) -> Any:
    """The same structure of tuples, named or not, lists, mappings and dataclasses, in NumPy."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, (tuple, list)):
        return getattr(value, "_make", type(value))(map(to_host, value))
    if isinstance(value, Mapping):
        return dict(zip(value, map(to_host, value.values()), strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        moved = {}
        for each in fields(value):
            before = getattr(value, each.name)
            after = to_host(before) if each.init else before
            if after is not before:
                moved[each.name] = after
        return replace(value, **moved) if moved else value
    return to_numpy(value) if is_array_api_obj(value) else value


def blocks(n: int, length: int) -> Iterator[slice]:
    """Slices of ``length`` rows of n, at least one, possibly empty."""
    return (slice(start, start + length) for start in range(0, max(n, 1), length))
