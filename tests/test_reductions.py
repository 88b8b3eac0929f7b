"""A reduction of one's own, the example of docs/extending.md: on every scheduler and resumed."""

import importlib
import re
import signal
import site
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import array_api_strict as strict
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import ForkedPool, write_store
from dask.callbacks import Callback
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone

from cme_dask import ConditionalMeanEmbedding, JointDistribution, kernels, open_sample
from cme_dask.cli import cli
from cme_dask.errors import DataError, ResourceError, StoreError
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.folds import draw, fold_of_rows
from cme_dask.numerics.moments import FeatureBlock, MomentReduction
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.reduction import plan_ranges, reduce_strips, strip_length, sub_block
from cme_dask.numerics.support import make_support
from cme_dask.passes.processes import WorkerProcesses
from cme_dask.reductions import Cost, Extent, Reduction, RunOptions, Strip, run

# A client that another test has opened would be the default.
THREADS = RunOptions("threads", 2)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "extending.md"
N = 40_000  # ten strips


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The class of the page, in a module that processes can import."""
    text = PAGE.read_text().partition("\n## A reduction\n")[2]
    code = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    folder = tmp_path_factory.mktemp("module")
    (folder / "third_moments.py").write_text(code.partition("\nrng = ")[0])
    sys.path.insert(0, str(folder))
    yield importlib.import_module("third_moments").ThirdMoments
    sys.path.remove(str(folder))


def rows():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, 1)), rng.exponential(size=(N, 2)) + 50.0, rng.random(N)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "s", *rows(), chunk_rows=3000)


def naive(y, w, folds, n_folds):
    """Third central moments by fold from the definition."""
    found = []
    for fold in range(n_folds):
        part, weight = y[folds == fold], w[folds == fold]
        mean = np.average(part, axis=0, weights=weight)
        found.append(np.average((part - mean) ** 3, axis=0, weights=weight))
    return np.array(found)


def test_the_example_takes_40_lines_and_equals_the_definition(example, store):
    text = PAGE.read_text().partition("\n## A reduction\n")[2]
    code = re.search(r"@dataclass.*?\n\n\n", text, re.DOTALL)[0]
    assert len(code.strip().splitlines()) <= 40
    _, y, w = rows()
    result, report = run(open_sample(store), example(), THREADS)
    assert_allclose(result, naive(y, w, fold_of_rows(0, N, 5), 5), rtol=1e-9)
    assert report.rows == N
    result, _ = run(open_sample(store).split(0.3)[1], example(3), THREADS)
    part = open_sample(store).split(0.3)[1].part.selects(np.arange(N), {})
    assert_allclose(result, naive(y[part], w[part], fold_of_rows(0, N, 3)[part], 3), rtol=1e-9)


def test_runs_at_once_have_their_progress_each(example, store):
    """Callbacks that are registered with Dask are lost to another run in the same process."""
    counts = [[], [], []]

    def run_some(own):
        for _ in range(8):
            events = []
            where = RunOptions(scheduler="threads", workers=2, progress=events.append)
            _, report = run(open_sample(store), example(), where)
            own.append((sum(event.rows > 0 for event in events), report.tasks))

    threads = [threading.Thread(target=run_some, args=(own,)) for own in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(events >= tasks for own in counts for events, tasks in own)
    assert Callback.active == set()


def test_every_scheduler_gives_the_same_bits(example, store, cluster):
    x, y, w = rows()
    cluster.run(site.addsitedir, str(Path(sys.modules[example.__module__].__file__).parent))
    first, _ = run(open_sample(store), example(), RunOptions("synchronous"))
    for scheduler in ("threads", "processes", cluster):
        options = RunOptions(scheduler, workers=2 if isinstance(scheduler, str) else None)
        assert_array_equal(run(open_sample(store), example(), options)[0], first)
    memory = open_sample(x, y, weights=w)
    assert_array_equal(run(memory, example(), RunOptions("threads", workers=3))[0], first)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from third_moments import ThirdMoments
from cme_dask import open_sample
from cme_dask.reductions import RunOptions, run
done = []
def progress(event):
    done.append(event.done)
    if len(done) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
run(open_sample(sys.argv[2]), ThirdMoments(),
    RunOptions("synchronous", checkpoint=sys.argv[3], progress=progress))
"""


def test_a_killed_run_resumes_with_the_same_bits(example, store, tmp_path):
    module = Path(sys.modules[example.__module__].__file__).parent
    arguments = [sys.executable, "-c", KILLED, str(module), str(store), str(tmp_path / "c")]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    options = RunOptions("threads", 2, checkpoint=tmp_path / "c")
    result, report = run(open_sample(store), example(), options)
    assert 0 < report.resumed_strips < 10
    assert_array_equal(result, run(open_sample(store), example(), THREADS)[0])
    again, report = run(open_sample(store), example(), options)
    assert report.resumed_strips == 10  # all of it
    assert_array_equal(again, result)
    with pytest.raises(StoreError, match="of another run: configuration 'reduction'"):
        run(open_sample(store), example(7), options)


def test_memory_is_predicted_and_refused(example, store):
    _, report = run(open_sample(store), example(), RunOptions("threads", 2))

    class Large(example):
        def cost(self, extent):
            return super().cost(extent) + Cost(partial=1 << 30, subject="partial results of 1 GiB")

    with pytest.raises(ResourceError, match=r"for partial results of 1 GiB and 2 tasks at once"):
        run(open_sample(store), Large(), RunOptions("threads", 2, memory_limit="1GB"))
    assert 200e6 < report.memory.predicted < 400e6


def test_samples_without_rows_are_refused(example):
    with pytest.raises(DataError, match="there are no rows"):
        run(open_sample(np.empty((0, 1)), np.empty((0, 2))), example())


def test_several_reductions_take_one_pass(example, store):
    events = []
    both = [example(3), example(5)]
    (three, five), _ = run(open_sample(store), both, replace(THREADS, progress=events.append))
    assert_array_equal(three, run(open_sample(store), example(3), THREADS)[0])
    assert_array_equal(five, run(open_sample(store), example(5), THREADS)[0])
    assert events[-1].done == 1.0
    assert {event.name for event in events} == {"third-moments"}


def test_bad_values_are_named(example):
    for sample, statistic, message in (
        (open_sample(np.ones(9)), np.sum, "must be a Reduction, got "),
        (np.ones(9), example(), "must come from open_sample, got ndarray"),
    ):
        with pytest.raises(DataError, match=message):
            run(sample, statistic, THREADS)
    with pytest.raises(DataError, match="at least one reduction"):
        run(open_sample(np.ones(9)), [], THREADS)
    x, y, w = rows()
    y[1234, 1] = np.nan
    with pytest.raises(DataError, match=r"y1.*1 .*1,?234"):
        run(open_sample(x, y, weights=w), example(), THREADS)


# Devices ------------------------------------------------------------------------------------------


class Counted:
    """How often an array of the second device is brought to the host."""

    def __init__(self, monkeypatch):
        self.transfers, move = 0, strict._array_object.Array.to_device

        def to_device(array, device, /, **options):
            self.transfers += 1
            return move(array, device, **options)

        monkeypatch.setattr(strict._array_object.Array, "to_device", to_device)


def moments_and_cells(x, y, w, single=False):
    """Moments with functions and a transform, and sums by cell of both variables."""
    functions = {"square": square}
    bases = [NewtonBasis.from_points(kernels.Gaussian(0.3), part[:9]) for part in (x, y)]
    second = FeatureBlock(bases[1], ("y0", "y1"), functions, np.full(3, 0.1))
    moments = MomentReduction((FeatureBlock(bases[0], ("x0",)), second), 4, single)
    partition = PartitionBasis(kernels.Gaussian(0.7), y[:5])
    rows = draw(np.arange(len(x)), (x, y), w, len(x), 0)
    cells = [
        CellReduction.of(rows, i, len(x), 4, make_support(part[:500], w[:500], 40), some, basis)
        for i, (part, some, basis) in enumerate(((x, {}, None), (y, functions, partition)))
    ]
    return moments, *cells


def square(y):
    return y[:, 0] ** 2


def finalized(reductions, totals):
    return [one.finalize(total) for one, total in zip(reductions, totals, strict=True)]


def assert_same(reductions, ours, theirs, single=False):
    """Equal results of :func:`moments_and_cells`, up to the order of the host's BLAS."""
    (ours, *here), (theirs, *there) = ours, theirs
    # Rounding is relative to the terms of a sum, whose squares are on the diagonal.
    sizes = np.sqrt(np.diagonal(ours.gram, axis1=1, axis2=2))
    rounding = (1e-5 if single else 1e-13) * sizes[:, :, None] * sizes[:, None, :]
    assert (abs(theirs.gram - ours.gram) <= rounding).all()
    assert_allclose(theirs.traces, ours.traces, rtol=1e-12)
    for one, mine, other in zip(reductions[1:], here, there, strict=True):
        assert_allclose(other.masses, mine.masses, rtol=1e-12)
        mine, other = one.statistics(mine), one.statistics(other)
        for name in ("atoms", "starts", "shares", "counts", "hashes", "whole"):
            assert_array_equal(getattr(other, name), getattr(mine, name))
        for name in ("low", "high", "integer"):
            assert_array_equal(getattr(other.values, name), getattr(mine.values, name))
        for name in ("means", "covariances", "functions", "components"):
            if getattr(mine, name) is not None:
                assert_allclose(getattr(other, name), getattr(mine, name), rtol=1e-9, atol=1e-12)


def two_strips(single, weighted):
    """Reductions, strips of 9,000 rows that nothing was made of yet, and the sums on the host."""
    x, y, w = (part[:9000] for part in rows())
    y, w[::7] = y - 51.0, 0.0
    reductions = moments_and_cells(x, y, w, single)
    strips = [
        Strip(np.arange(9000)[s], (x[s], y[s]), w[s] if weighted else None)
        for s in (slice(0, 5000), slice(5000, None))
    ]
    n, ours = reduce_strips(reductions, strips)
    assert n == 9000
    return reductions, [replace(strip, _made={}) for strip in strips], ours


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_task_runs_whole_on_a_device_and_comes_to_the_host_once(single, weighted, monkeypatch):
    """Mixing devices raises, and so does reading an array of the second one as one of NumPy."""
    reductions, strips, ours = two_strips(single, weighted)
    counted, device = Counted(monkeypatch), strict.Device("device1")
    n, theirs = reduce_strips(reductions, strips, lambda a: strict.asarray(a, device=device))
    assert n == 9000
    assert counted.transfers == 2 + 2 * 10  # each array of the sums once
    assert_same(reductions, finalized(reductions, ours), finalized(reductions, theirs), single)


def test_processes_of_tests_are_forked():
    """From a server with the package: to import it takes each process seconds."""
    with WorkerProcesses().started(1) as pool:
        assert isinstance(pool, ForkedPool)


def test_a_whole_run_computes_on_the_device_of_its_options(tmp_path, monkeypatch):
    """Each task touches host memory once; all schedulers and a resumed run have the same bits."""
    x, y, w = rows()
    write_store(tmp_path / "s", x, y - 51.0, w, chunk_rows=3000)
    sample = open_sample(tmp_path / "s")
    reductions = moments_and_cells(x, y - 51.0, w)
    ours, _ = run(sample, reductions, THREADS)
    device = strict.Device("device1")
    options = RunOptions("synchronous", device=device, checkpoint=tmp_path / "c")
    counted = Counted(monkeypatch)
    first, report = run(sample, reductions, options)
    assert report.rows == N
    assert report.tasks > 1
    assert counted.transfers == report.tasks * (2 + 2 * 10)
    assert_same(reductions, ours, first)
    resumed, report = run(sample, reductions, options)
    assert report.resumed_strips == report.strips
    others = [RunOptions(name, 2, device=device) for name in ("threads", "processes")]
    for other in (resumed, *(run(sample, reductions, one)[0] for one in others)):
        assert_array_equal(other[0].gram, first[0].gram)
        assert_array_equal(other[2].masses, first[2].masses)
    with pytest.raises(StoreError, match="of another run: configuration 'device'"):
        run(sample, reductions, replace(options, device=None))


@pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (JointDistribution, {"reg": 1e-3}),
        (JointDistribution, {"constraint": "certified", "max_rank": 10}),
        (ConditionalMeanEmbedding, {"validation": "leave-one-out"}),
        (ConditionalMeanEmbedding, {"pivots": "greedy", "reg": 1e-3}),
    ],
)
def test_a_fit_computes_on_a_device(kind, options):
    """What takes no arrays of the device is computed on the host, in passes of its own."""
    x, _, noise = (part[:3000] for part in rows())
    y, kernel = np.sin(2.0 * x[:, 0]) + noise, kernels.Gaussian(1.0)
    fit = kind(**{"kernel_x": kernel, "kernel_y": kernel, "max_rank": 20, **options})
    device = strict.Device("device1")
    expected = fit.fit(x, y, scheduler="synchronous").predict(x[:9])
    again = clone(fit).fit(x, y, scheduler="synchronous", device=device)
    np.testing.assert_allclose(again.predict(x[:9]), expected, rtol=1e-9, atol=1e-9)
    plan = fit.plan(x, y, scheduler="synchronous", device=device, device_memory_limit="1GB")
    assert plan.passes <= again.n_passes_  # which counts rounds of pivots, too


def test_a_device_has_a_memory_of_its_own(store):
    """Sums are in the memory of the device, rows that are read in that of the host."""
    sample, device = open_sample(store), strict.Device("device1")

    class Large(Reduction):
        def cost(self, extent):
            return Cost(state=1 << 31, subject="buffers of 2 GiB", remedies=("take fewer",))

        def update(self, state, strip):
            return len(strip)

    options = RunOptions("threads", 2, memory_limit="1GB", device=device)
    assert run(sample, Large(), options)[0] == N
    with pytest.raises(
        ResourceError, match=r"the device would need 4\.0\d GiB for buffers of 2 GiB"
    ):
        run(sample, Large(), replace(options, device_memory_limit="4GiB"))
    assert run(sample, Large(), replace(options, device_memory_limit="4.1GiB"))[1].rows == N


def test_sums_by_cell_take_more_of_a_device():
    """The matrix of a row's cell is dense there: its blocks are in the prediction."""
    x, y, w = (part[:2000] for part in rows())
    cells = moments_and_cells(x, y, w)[1]
    host, small, large = (
        cells.cost(Extent(10**6, 3, 1 << 16, device_memory=memory << 30)).state
        for memory in (0, 1, 80)
    )
    size = cells.support.size
    assert small - host >= 8 * cells.one_hot_rows(1 << 30) * 2 * size
    assert large >= small
    assert cells.one_hot_rows(80 << 30) <= cells.block


def test_blocks_of_a_device_are_as_long_as_its_memory_allows():
    assert sub_block(204) == 1 << 11
    lengths = [sub_block(204, memory << 30) for memory in (1, 8, 80, 1000)]
    assert lengths == [1 << 11, 1 << 12, 1 << 15, 1 << 18]


@pytest.mark.parametrize("device", ["gpu", 3, "cuda:x", np.float64(1)])
def test_what_is_no_device_is_refused(store, example, device):
    with pytest.raises(DataError, match="or a device of an array library"):
        run(open_sample(store), example(), RunOptions("synchronous", device=device))


def test_a_device_that_is_not_there_is_named(store, example, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ResourceError, match="the device 0 of cupy can't be used here: import of"):
        run(open_sample(store), example(), RunOptions("synchronous", device="cuda"))


def test_importing_the_driver_loads_none_of_the_sums():
    code = (
        "import sys, cme_dask.passes.driver; print(*sorted(name for name in sys.modules if "
        "name.startswith(('cme_dask.numerics', 'cme_dask.models', 'cme_dask.learning'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = {name.rpartition(".")[2] for name in done.stdout.split()}
    sums = {"moments", "cells", "blocks", "logistic", "rounds", "pools", "scoring", "rows"}
    assert "folds" in loaded
    assert not loaded & sums
    assert Reduction.name == "reduction"


def test_the_place_of_a_plan_is_that_of_its_run():
    options = RunOptions("threads", 3, device=strict.Device("device1"), device_memory_limit="1MB")
    executor = options.executor()
    assert executor.device.name == strict.Device("device1")
    assert (executor.workers, executor.device_limit) == (3, 10**6)


def test_strips_and_tasks_of_a_device_are_few(store):
    """Calls of its library take as long for few rows as for many, and need the interpreter."""
    assert [strip_length(n, on_device=True) for n in (10, 10**5, 10**6, 10**9)] == [
        1 << 12,
        1 << 14,
        1 << 17,
        1 << 18,
    ]
    runs = plan_ranges(10**8, 1 << 16, 2, 1e-8, on_device=True)
    assert {run.length for run in runs} == {1 << 18}
    assert len(runs) <= 16
    executor = RunOptions("threads", device=strict.Device("device1")).executor()
    assert executor.workers == min(2, RunOptions("threads").executor().workers)


def test_a_command_names_a_gpu_that_is_not_there(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    fit = ["fit", str(store), "--out", str(tmp_path / "m"), "--scheduler", "threads"]
    for device, code, message in (
        ("cuda", 3, "the device 0 of cupy can't be used"),
        ("gpu", 2, "device must be 'cuda', 'cuda:1'"),
    ):
        result = CliRunner().invoke(cli, [*fit, "--device", device])
        assert result.exit_code == code
        assert message in result.output
        assert not (tmp_path / "m").exists()
