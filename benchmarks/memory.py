"""Predicted and measured peak memory of fits of twelve shapes, and refusals at their limits.

Each fit runs in a process of its own. What is measured is what the prediction is about: the system's
high-water mark of the resident set where threads compute; with processes the largest sum over this
process and those that it started, in which pages that they share count once; on a cluster the
high-water mark of the worker that took most.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zarr

from benchmarks.cluster import WORKERS, Cluster, running_cluster
from benchmarks.fits import Describe
from benchmarks.measure import Bench, Ratio, Size, Term
from cme_dask import JointDistribution, kernels
from cme_dask.cli.run_report import bytes_of, peak_of, process_tree
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.passes.cluster import connected

Array = Any

_BATCH = 1 << 16
_PAUSE = 0.02  # seconds between samples of the memory of several processes
_DISTINCT = 8  # chunks of a repeated table that differ
_CLOSE = 0.25


@dataclass(frozen=True)
class Shape:
    """A fit: its rows, what is asked of it, and where it runs.

    Attributes
    ----------
    rows, columns
        Numbers of rows, and of columns of x and of y.
    functions
        Functions of y that are declared.
    chunk
        Rows of a chunk; None for the default, 0 for rows in memory.
    repeated
        Whether the chunks of plain Zarr arrays repeat a few distinct ones, so that the table takes
        no disk.
    rank
        ``max_rank``; None for the default.
    folds
        ``n_folds``; None for the default.
    scale
        Length scale of given Matern kernels; None where kernels are learned.
    scheduler, workers
        Where it runs: ``threads``, ``processes`` or ``cluster``, and how many of them.
    memory_limit
        Of each worker of a cluster.
    """

    rows: int
    columns: tuple[int, int]
    functions: int = 0
    chunk: int | None = None
    repeated: bool = False
    rank: int | None = None
    folds: int | None = None
    scale: float | None = None
    scheduler: str = "threads"
    workers: int = 2
    memory_limit: str = "4GB"


SHAPES = {
    "1,000 rows in memory": Shape(1000, (3, 1), chunk=0),
    "trees: 20,000 rows of 10 columns": Shape(20_000, (10, 1), chunk=0),
    "1 column, rank 20": Shape(10**6, (1, 1), rank=20),
    "100 columns": Shape(10**5, (97, 3)),
    "400 columns": Shape(30_000, (395, 5)),
    "10 functions": Shape(2 * 10**5, (3, 2), functions=10, scheduler="processes"),
    "2,000 functions": Shape(10**5, (3, 2), functions=2000, rank=50, scale=1.0),
    "rank 400 + 400": Shape(
        2 * 10**5, (3, 2), rank=400, scale=0.5, scheduler="processes", workers=2
    ),
    "rank 2,000": Shape(10**5, (3, 3), rank=2000, folds=2, scale=0.5),
    "chunks of 500 rows": Shape(10**5, (6, 2), chunk=500, scheduler="processes", workers=4),
    "chunks of 2,000,000 rows": Shape(4 * 10**6, (6, 2), chunk=2 * 10**6, scheduler="cluster"),
    "10^8 rows": Shape(10**8, (3, 1), chunk=1 << 18, repeated=True),
}
"""The shapes by name: defaults, unless a rank, folds or kernels are given."""


def shape_batches(shape: Shape, rows: int) -> Iterator[tuple[Array, Array]]:
    """Rows x normal, and y: a sine of the first column of x, with a jump, and noise."""
    d, q = shape.columns
    for number, start in enumerate(range(0, rows, _BATCH)):
        rng = np.random.default_rng([number, d])
        x = rng.standard_normal((min(_BATCH, rows - start), d))
        mean = np.sin(3.0 * x[:, :1]) + 2.0 * (x[:, -1:] > 0.5)
        yield x, mean + 0.5 * rng.standard_normal((len(x), q))


def write_shape(shape: Shape, path: Path) -> None:
    """The rows of a shape into a store, or into arrays whose chunks repeat."""
    if shape.repeated:
        _write_repeated(shape, path)
        return
    columns = tuple(map(Columns.default, "xy", shape.columns))
    with writing_sample(
        path, columns, chunk_rows=shape.chunk, expected_rows=shape.rows
    ) as writer:
        for x, y in shape_batches(shape, shape.rows):
            writer.append(x, y)


def _write_repeated(shape: Shape, path: Path) -> None:
    """Arrays x and y: a few chunks, and links to these in the place of all others."""
    group, chunk = zarr.open_group(str(path), mode="w"), shape.chunk
    assert chunk
    distinct = min(_DISTINCT, shape.rows // chunk)
    parts = zip(*shape_batches(shape, distinct * chunk), strict=True)
    for name, part in zip("xy", map(np.concatenate, parts), strict=True):
        size = shape.rows, part.shape[1]
        array = group.create_array(
            name, shape=size, chunks=(chunk, size[1]), dtype=float, compressors=None
        )
        array[: len(part)] = part
        folder = path / name / "c"
        for number in range(distinct, -(-shape.rows // chunk)):
            (folder / str(number)).mkdir()
            os.link(folder / str(number % distinct) / "0", folder / str(number) / "0")


@dataclass(frozen=True)
class ShapeFit:
    """The fit of a shape, with its predicted and its measured peak.

    Parameters
    ----------
    shape
        The name of the shape.
    path
        Its store, or its arrays; None for rows in memory.
    address, workers
        Of the scheduler of a cluster, and process numbers of its nannies.
    """

    shape: Shape
    path: str | None
    address: str = ""
    workers: tuple[int, ...] = ()

    def prepare(self) -> Callable[[], Describe]:
        """The rows, or where they are."""
        if self.path is None:
            parts = zip(*shape_batches(self.shape, self.shape.rows), strict=True)
            rows: Sequence[Any] = [np.concatenate(part) for part in parts]
        elif self.shape.repeated:
            group = zarr.open_group(self.path, mode="r")
            rows = [group["x"], group["y"]]
        else:
            rows = [self.path]
        return partial(self._run, rows)

    def _run(self, rows: Sequence[Any]) -> Describe:
        warnings.simplefilter("ignore")
        shape = self.shape
        marks = PhaseMarks()
        with TreePeak() as tree:
            if shape.scheduler == "cluster":
                with connected(self.address) as client:
                    fit = fit_shape(shape, rows, client, None, marks)
            else:
                fit = fit_shape(shape, rows, shape.scheduler, shape.workers, marks)
        marks.end()
        memory = fit.report_.memory
        measured = max(marks.peaks.values())
        if shape.scheduler == "processes":
            measured = tree.peak
        elif memory.place == "a worker":
            measured = max(peak_of(each, shared=True) for each in worker_processes(self.workers))
        return lambda: {
            "predicted": memory.predicted,
            "measured": measured,
            "place": memory.place,
            "phase": memory.phase,
            "ranks": [basis.rank for basis in (fit.basis_x_, fit.basis_y_)],
            "steps": marks.peaks,
        }


@dataclass(frozen=True)
class Below:
    """Whether the first column of y lies below a level: a function that any process can import."""

    level: float

    def __call__(self, y: Array) -> Array:
        """Values at rows (b, d), shape (b,)."""
        return (y[:, 0] <= self.level).astype(float)


def fit_shape(
    shape: Shape,
    rows: Sequence[Any],
    scheduler: Any,
    workers: int | None,
    progress: Any = None,
    memory_limit: int | None = None,
) -> JointDistribution:
    """The fit of a shape."""
    given: dict[str, Any] = {"max_rank": shape.rank}
    if shape.scale is not None:
        kernel = kernels.Matern(shape.scale, 0.5)
        given |= {"kernel_x": kernel, "kernel_y": kernel, "tol": 1e-9}
    if shape.folds is not None:
        given |= {"n_folds": shape.folds}
    levels = np.linspace(-2.0, 2.0, shape.functions).tolist()
    functions = {f"below {number}": Below(level) for number, level in enumerate(levels)}
    return JointDistribution(random_state=0, **given).fit(
        *rows,
        functions=functions or None,
        scheduler=scheduler,
        workers=workers,
        progress=progress,
        memory_limit=memory_limit,
    )


class PhaseMarks:
    """High-water marks of this process by the step of a fit; a listener of its progress."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._step = "row sample"

    def __call__(self, event: Any) -> None:
        """Close the marks of the step before where another one has begun."""
        if event.name != self._step:
            self.end()
            self._step = event.name

    def end(self) -> None:
        """Take the mark of the step that ends, and let it start anew."""
        with Path("/proc/self/status").open() as lines:
            (line,) = (line for line in lines if line.startswith("VmHWM:"))
        mark = 1024 * int(line.split()[1])
        self.peaks[self._step] = max(self.peaks.get(self._step, 0), mark)
        Path("/proc/self/clear_refs").write_text("5")


class TreePeak:
    """The largest sum over this process and those that it started; a context manager."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "TreePeak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_PAUSE):
            self.peak = max(self.peak, sum(map(bytes_of, process_tree())))


def worker_processes(nannies: Sequence[int]) -> list[psutil.Process]:
    """The worker processes: of what a nanny has started each is the largest."""
    children = (psutil.Process(number).children() for number in nannies)
    return [max(started, key=lambda child: child.memory_info().rss) for started in children]
