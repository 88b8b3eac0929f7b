"""The predicted time of a pass, scaled from strips that are read and reduced as in the pass.

Every worker of the fit takes a few strips at the same time, each in one thread and through the very
reduction of the pass. So processes are timed in processes and a cluster on its workers, cores that
are shared are seen to be shared, and rows that are read ahead cost what tasks wait for them.
"""

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource
from cme_dask.numerics.reduction import Reduction, RowRange, Strip, reduce_strips
from cme_dask.passes.driver import Executor
from cme_dask.passes.run import FLOPS, Pass, extent_of

_TIMED = 3  # strips of each worker
_STRIP_SECONDS = 2.0  # of a timed strip at the cautious rate FLOPS: of longer ones a part is timed
_LEAST_ROWS = 1 << 12  # of a timed strip, unless the pass has fewer
_TASK_SECONDS = 1e-3  # that the scheduler spends on a task: 0.2 to 1 ms


@dataclass(frozen=True)
class PassCost:
    """What a pass would take, predicted from some of its strips.

    Attributes
    ----------
    rows, tasks, strips
        Of the whole pass.
    workers
        Tasks at once, at most.
    bytes_read
        Bytes of the rows, before compression, with the chunks that two tasks read.
    computing
        Seconds of the reduction.
    reading
        Seconds for which the reduction waits for rows.
    sums
        Seconds to make the partial results of the strips and to add them up.
    scheduling
        Seconds to start the workers, and to hand out the tasks.
    rates
        The times that these were scaled from: the mean over the workers.
    """

    rows: int
    tasks: int
    strips: int
    workers: int
    bytes_read: int
    computing: float
    reading: float
    sums: float
    scheduling: float
    rates: "StripTimes"

    @property
    def seconds(self) -> float:
        """Seconds of the pass."""
        return self.computing + self.reading + self.sums + self.scheduling

    @property
    def rows_per_second(self) -> float:
        """Rows per second of the pass."""
        return self.rows / self.seconds


@dataclass(frozen=True)
class StripTimes:
    """Seconds of one worker.

    Attributes
    ----------
    empty
        Of an empty strip.
    computing, reading
        For each of the timed rows, and for each byte that was read for them.
    seconds
        Of the whole trial.
    merge
        To add two partial results of tasks.
    result_bytes
        That such a result takes on its way to another process.
    """

    empty: float
    computing: float
    reading: float
    seconds: float
    merge: float = 0.0
    result_bytes: float = 0.0

    @classmethod
    def mean(cls, times: Sequence["StripTimes"]) -> "StripTimes":
        """The mean of several workers."""
        names = [field.name for field in fields(cls)]
        return cls(*(float(np.mean([getattr(t, name) for t in times])) for name in names))


def time_pass(
    sample: Sample,
    reductions: Sequence[Reduction[Any, Any]],
    runs: Sequence[RowRange],
    executor: Executor,
) -> PassCost:
    """Read and reduce three strips on each worker, and scale their times to the whole pass.

    Parameters
    ----------
    sample
        The rows. Of Dask arrays the tasks that compute them are not timed.
    reductions
        What the pass computes.
    runs
        How the pass is cut.
    executor
        Where it would run.

    Raises
    ------
    DataError
        If these strips hold unusable values.
    """
    sample = sample.for_folds(max(one.n_folds for one in reductions))
    extent = extent_of(sample, executor)
    flops = max(sum(one.cost(extent).flops for one in reductions), 1.0)
    length = min(runs[0].length, max(_LEAST_ROWS, int(_STRIP_SECONDS * FLOPS / flops)))
    shared, payloads = Pass.of(sample, reductions, executor), []
    sources = {source for one in sample.reads for source, _ in one.inputs}
    busy = min(executor.workers, len(runs))  # the other workers have no task
    for i in range(busy):
        start = runs[i * len(runs) // busy].start
        run = RowRange(start, min(start + _TIMED * length, sample.n_rows), length)
        read = sum(bytes_read(source, [run]) for source in sources)
        payloads.append((run, read, shared.given(sample, run)))
    begin = time.perf_counter()
    times = executor.run(_time_strips, payloads, _join, shared=shared, name="time-strips")
    wall = time.perf_counter() - begin
    strips = sum(run.strips for run in runs)
    read = sum(bytes_read(source, runs) for source in sources)
    mean = StripTimes.mean(times)
    return PassCost(
        rows=sample.n_rows,
        tasks=len(runs),
        strips=strips,
        workers=executor.workers,
        bytes_read=read,
        computing=busiest_rows(runs, busy) * mean.computing,
        reading=read / busy * mean.reading,
        sums=strips / busy * mean.empty,
        scheduling=max(0.0, wall - max(t.seconds for t in times)) + len(runs) * _TASK_SECONDS,
        rates=mean,
    )


def busiest_rows(runs: Sequence[RowRange], workers: int) -> int:
    """Rows of the worker that gets most, if each takes the next task when it has ended one."""
    loads = [0] * workers
    for run in runs:
        heapq.heapreplace(loads, loads[0] + run.stop - run.start)
    return max(loads)


def bytes_read(source: RowSource, runs: Sequence[RowRange]) -> int:
    """Bytes of the chunks that the tasks read, before compression."""
    chunk, n = source.chunk_rows or 1, source.shape[0]
    rows = sum(min(-(-run.stop // chunk) * chunk, n) - run.start // chunk * chunk for run in runs)
    return rows * source.row_bytes


class _Clocked:
    """Strips, and the seconds for which whoever takes them has waited."""

    def __init__(self, strips: Iterable[Strip]) -> None:
        self._strips, self.waited = strips, 0.0

    def __iter__(self) -> Iterator[Strip]:
        begin = time.perf_counter()
        for strip in self._strips:
            self.waited += time.perf_counter() - begin
            yield strip
            begin = time.perf_counter()


def _time_strips(
    shared: Pass, run: RowRange, read: int, given: tuple[RowSource, ...]
) -> tuple[StripTimes]:
    """The times of one worker, without what its first look at the rows takes."""
    begin = time.perf_counter()
    first = run._replace(stop=run.start + 1)
    (row,) = shared.strips(first, given)  # finds the way to the rows
    empty = row.only(np.zeros(len(row), dtype=bool))
    reduce_strips(shared.reductions, [empty])
    marks = [time.perf_counter()]
    reduce_strips(shared.reductions, [empty] * run.strips)
    marks.append(time.perf_counter())
    strips = _Clocked(shared.strips(run, given))
    _, partials = reduce_strips(shared.reductions, strips)
    end = time.perf_counter()
    once = (marks[1] - marks[0]) / run.strips
    computing = end - marks[1] - strips.waited - run.strips * once
    for one, partial in zip(shared.reductions, partials, strict=True):
        one.combine(partial, partial)
    merge = time.perf_counter() - end
    return (
        StripTimes(
            once,
            max(computing, 0.0) / (run.stop - run.start),
            strips.waited / read,
            end - begin,
            merge,
            pickled_bytes(partials),
        ),
    )


def pickled_bytes(value: Any) -> int:
    """Bytes that a value takes on its way to another process."""
    from distributed.protocol import serialize

    _, frames = serialize(value)
    return sum(memoryview(frame).nbytes for frame in frames)


def _join(
    shared: Any, a: tuple[StripTimes, ...], b: tuple[StripTimes, ...]
) -> tuple[StripTimes, ...]:
    return a + b
