"""Predicted and measured peak memory of fits of twelve shapes, and refusals at their limits.

Each fit runs in a process of its own. What is measured is what the prediction is about: the
high-water mark of the resident set where threads compute; with processes the largest sum over this
process and those that it started, in which pages that they share count once; on a cluster the
high-water mark of the worker that took most.
"""

import contextlib
import faulthandler
import os
import resource
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from benchmarks.cluster import running_cluster, worker_processes
from benchmarks.fits import Describe
from benchmarks.measure import Bench, Ratio, Size, Term
from benchmarks.worker import status_bytes
from cme_dask import JointDistribution, kernels
from cme_dask.cli.run_report import PeakMemory, peak_of
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.errors import ResourceError
from cme_dask.kernels.evaluator import release_memory
from cme_dask.passes.cluster import connected

Array = Any

_BATCH = 1 << 16
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
    "many rows": Shape(10**8, (3, 1), chunk=1 << 18, repeated=True, rank=20),
}
"""The shapes by name: defaults, unless a rank, folds or kernels are given."""

LIMITED = ("trees: 20,000 rows of 10 columns", "1 column, rank 20", "2,000 functions")
"""Shapes that are fitted below and above their limits as well: threads alone."""

_BELOW, _ABOVE = 0.9, 1.2  # of the smaller, and of the larger one of the two peaks
_WARM = 50_000  # rows of the fit before the one that is limited
_STACK = 1 << 20  # of threads: their stacks count against the limit as a whole
_PATIENCE = 1800.0  # seconds of a fit whose limit is enforced


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
    columns = Columns.default("x", shape.columns[0]), Columns.default("y", shape.columns[1])
    with writing_sample(path, columns, chunk_rows=shape.chunk, expected_rows=shape.rows) as writer:
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


def shape_rows(shape: Shape, path: str | None) -> Sequence[Any]:
    """The rows of a shape: in memory, as arrays, or where their store is."""
    if path is None:
        parts = zip(*shape_batches(shape, shape.rows), strict=True)
        return [np.concatenate(part) for part in parts]
    if shape.repeated:
        group = zarr.open_group(path, mode="r")
        return [group["x"], group["y"]]
    return [path]


@dataclass(frozen=True)
class ShapeFit:
    """The fit of a shape, with its predicted and its measured peak.

    Parameters
    ----------
    shape
        The fit.
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
        return partial(self._run, shape_rows(self.shape, self.path))

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
        mark = status_bytes("VmHWM") or 0
        self.peaks[self._step] = max(self.peaks.get(self._step, 0), mark)
        Path("/proc/self/clear_refs").write_text("5")


class TreePeak(PeakMemory):
    """The same, sampled as often as it can: the benchmark may cost what a fit may not."""

    _cost = 1.0


@dataclass(frozen=True)
class LimitedFit:
    """The fit of a shape in a process that gets no more memory than a limit.

    Parameters
    ----------
    shape, path
        As for :class:`ShapeFit`.
    limit
        Bytes of the resident set; what the process has reserved before without using it is added.
    announced
        Whether the fit is told, as its ``memory_limit``.
    """

    shape: Shape
    path: str | None
    limit: int
    announced: bool

    def prepare(self) -> Callable[[], Describe]:
        """The rows, or where they are, and a small fit: threads have reserved what BLAS needs."""
        threading.stack_size(_STACK)
        warnings.simplefilter("ignore")
        small = replace(self.shape, functions=0, rank=20, scale=1.0, folds=None)
        rows = [np.concatenate(part) for part in zip(*shape_batches(small, _WARM), strict=True)]
        fit_shape(small, rows, "threads", self.shape.workers)
        release_memory()
        return partial(self._run, shape_rows(self.shape, self.path))

    def _run(self, rows: Sequence[Any]) -> Describe:
        limit = self.limit + (status_bytes("VmData") or 0) - (status_bytes("VmRSS") or 0)
        # A thread of Python that finds no memory to begin with is waited for without end: such a
        # process is ended, and has failed.
        faulthandler.dump_traceback_later(_PATIENCE, exit=True)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        outcome, said = "fitted", ""
        try:
            announced = self.limit if self.announced else None
            fit_shape(self.shape, rows, "threads", self.shape.workers, memory_limit=announced)
        except ResourceError as error:
            outcome, said = "refused", str(error)
        except Exception as error:  # noqa: BLE001 - memory ends anywhere
            outcome, said = "failed", repr(error)
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        faulthandler.cancel_dump_traceback_later()
        return lambda: {"outcome": outcome, "said": said, "limit": self.limit}


def memory_case(bench: Bench, size: Size) -> None:
    """Predicted and measured peaks of all shapes, and what limits around them do to some of them.

    Shapes of more rows than the case has are cut to these. A limit below both peaks is to be
    refused, and the fit is to fail where it is only enforced; with one above both it is to be
    accepted and to end.
    """
    for name, shape in SHAPES.items():
        shape = replace(shape, rows=min(shape.rows, size.rows))
        if shape.chunk:
            shape = replace(shape, chunk=min(shape.chunk, -(-shape.rows // 2)))
        path = None
        if shape.chunk != 0:
            path = str(bench.folder / f"{name}.zarr")
            write_shape(shape, Path(path))
        key = f"memory/{name}"
        with contextlib.ExitStack() as stack:
            job = ShapeFit(shape, path)
            if shape.scheduler == "cluster":
                cluster = stack.enter_context(
                    running_cluster(
                        bench.folder / "memory", shape.workers, memory_limit=shape.memory_limit
                    )
                )
                job = ShapeFit(shape, path, cluster.address, cluster.workers)
            bench.measure({key: job}, 1)
        over, under = [Term(key, "measured")], [Term(key, "predicted")]
        bench.ratios.append(
            Ratio(key, "measured / predicted", over, under, 1.0 - _CLOSE, 1.0 + _CLOSE)
        )
        if name in LIMITED:
            _limited(bench, key, shape, path)


def _limited(bench: Bench, key: str, shape: Shape, path: str | None) -> None:
    """The same fit with less memory than it needs, with and without its knowing, and with more."""
    (run,) = bench.measurements[key].runs
    peaks = run["predicted"], run["measured"]
    below, above = int(_BELOW * min(peaks)), int(_ABOVE * max(peaks))
    for word, limit, announced, due in (
        ("below, announced", below, True, "refused"),
        ("below", below, False, "failed"),
        ("above, announced", above, True, "fitted"),
    ):
        at = f"{key}, limit {word}"
        bench.measure({at: LimitedFit(shape, path, limit, announced)}, 1, peers=(at,))
        measurement = bench.measurements[at]
        if not measurement.runs:  # its process was ended
            measurement.runs = [{"seconds": 0.0, "outcome": "failed", "said": measurement.missing}]
        measurement.runs[0] |= {"due": due, "right": float(measurement.runs[0]["outcome"] == due)}
        name = f"limit {word}: {due}"
        bench.ratios.append(Ratio(key, name, [Term(at, "right")], [Term()], at_least=1.0))
