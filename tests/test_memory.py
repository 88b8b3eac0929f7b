"""What a fit is predicted to need, beside what it takes."""

import gc
import json
import math
import subprocess
import sys
import tracemalloc
import warnings
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import fit_context, write_store
from distributed import Client

from benchmarks.cluster import running_cluster
from cme_dask import JointDistribution, kernels, open_sample
from cme_dask.errors import ResourceError
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, MomentSets, moment_cost
from cme_dask.numerics.reduction import Cost, Extent, RowRange, Strip, strip_length
from cme_dask.passes import driver
from cme_dask.passes.driver import Executor, task_bytes
from cme_dask.passes.observing import WantOfMemory, want_of_memory

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the high-water mark is read from /proc"
)


@pytest.fixture
def worker(tmp_path):
    """A worker of 1 GB, and the client of its cluster."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    with (
        running_cluster(folder, 1, memory_limit="1GB") as cluster,
        Client(cluster.address) as client,
    ):
        (nanny,) = cluster.workers
        yield max(psutil.Process(nanny).children(), key=lambda p: p.memory_info().rss), client


HEAD = """
import json, sys, warnings
import numpy as np
from cme_dask import JointDistribution
from cme_dask import PivotedCholesky
from cme_dask import kernels

def told(fit):
    # The system's own high-water mark: a sampled peak of so short a fit misses it under load.
    status = open("/proc/self/status").read()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    memory = fit.report_.memory
    print(json.dumps([memory.predicted, peak, memory.phase]))

"""

JOINT = """
if __name__ == "__main__":
    path, folds, rank = sys.argv[1:]
    warnings.simplefilter("ignore")
    kernel = kernels.Matern(1.0, 0.5)
    told(JointDistribution(
        kernel_x=kernel, kernel_y=kernel, tol=1e-9, max_rank=int(rank), n_folds=int(folds),
        sample_size=2048,
    ).fit(path, scheduler="threads", workers=2))
"""

FEATURES = """
if __name__ == "__main__":
    n, rank = map(int, sys.argv[1:])
    warnings.simplefilter("ignore")
    rows = np.random.default_rng(0).random((n, 3))
    told(PivotedCholesky(kernels.Gaussian(0.05), tol=1e-9, max_rank=rank).fit(
        rows, scheduler="threads", workers=2
    ))
"""

SEARCH = """
if __name__ == "__main__":
    from cme_dask import Tuning
    warnings.simplefilter("ignore")
    rows = np.random.default_rng(0).standard_normal((5000, 9))
    options = Tuning(evaluations=0)
    told(JointDistribution(tuning=options, max_rank=200, support_size=0).fit(
        rows[:, :6], rows[:, 6:] + rows[:, :3], scheduler="threads", workers=1
    ))
"""


MAPPED = """
def total(x):
    return x.sum(axis=1, keepdims=True)

if __name__ == "__main__":
    import zarr
    from types import SimpleNamespace
    from cme_dask import open_sample
    from cme_dask.numerics.rows import BadValueCounts
    from cme_dask.reductions import RunOptions, run
    rows = np.ones((1 << 15, 128))
    wide = zarr.create_array("rows.zarr", shape=(1 << 17, 128), chunks=rows.shape, dtype=float)
    for start in range(0, 1 << 17, 1 << 15):
        wide[start : start + (1 << 15)] = rows
    del rows
    sample = open_sample(wide).map(total)
    told(SimpleNamespace(report_=run(sample, BadValueCounts(), RunOptions("synchronous"))[1]))
"""


def measured(tmp_path, script, *args):
    """Predicted and measured peak of a process, and the phase that was predicted to have it."""
    (tmp_path / "fit.py").write_text(HEAD + script)
    done = subprocess.run(
        [sys.executable, tmp_path / "fit.py", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("folds", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_prediction_is_near_the_measured_peak(tmp_path, folds):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60_000, 3))
    write_store(tmp_path / "s.zarr", x, x[:, :2] ** 2, chunk_rows=8192)
    predicted, peak, phase = measured(tmp_path, JOINT, tmp_path / "s.zarr", folds, 250)
    assert 0.8 <= predicted / peak <= 1.25
    assert phase == "the pass"


@pytest.mark.slow
def test_prediction_of_features_is_near_the_measured_peak(tmp_path):
    predicted, peak, phase = measured(tmp_path, FEATURES, 100_000, 500)
    assert 0.8 <= predicted / peak <= 1.25
    assert phase == "the choice of pivots"


def test_prediction_of_a_search_is_near_the_measured_peak(tmp_path):
    predicted, peak, phase = measured(tmp_path, SEARCH)
    assert 0.8 <= predicted / peak <= 1.25
    assert phase == "the search for kernels"


@pytest.mark.slow
def test_prediction_knows_the_columns_that_a_map_reads(tmp_path):
    """Chunks of 128 columns are read for one that is made of them."""
    predicted, peak, phase = measured(tmp_path, MAPPED)
    assert 0.8 <= predicted / peak <= 1.25
    assert phase == "the pass"


@pytest.mark.parametrize("rank", [pytest.param(30, marks=pytest.mark.slow), 200])
def test_prediction_of_a_worker_is_near_its_measured_peak(tmp_path, worker, rank):
    """The process is most of the one, partial sums are most of the other.

    Each has a worker of its own: what an earlier fit has left would count twice.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40_000, 6))
    write_store(tmp_path / "s.zarr", x, x[:, :4] ** 2, chunk_rows=4096)
    kernel = kernels.Matern(1.0, 0.5)
    process, client = worker
    estimator = JointDistribution(
        kernel_x=kernel, kernel_y=kernel, tol=1e-9, max_rank=rank, sample_size=2048
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory = estimator.fit(tmp_path / "s.zarr", scheduler=client).report_.memory
    assert memory.place == "a worker"
    assert memory.limit == 0.7 * 1_000_000_000  # where it would begin to spill
    # By the resident set, with what it shares: Dask itself goes by that.
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
    assert 0.8 <= memory.predicted / peak <= 1.25
    assert want_of_memory(client) == WantOfMemory(0, 0)


@pytest.mark.slow
def test_rank_two_thousand_on_a_million_rows(tmp_path):
    predicted, peak, phase = measured(tmp_path, FEATURES, 1_000_000, 2000)
    print(json.dumps({"predicted": predicted, "measured": peak, "phase": phase}))
    assert 0.8 <= predicted / peak <= 1.25


def choice_bytes(rows, rank):
    """What a choice of pivots takes from a sample of so many of more rows."""
    sample = open_sample(np.zeros((2 * rows, 1)))
    return fit_context(sample, range(rows)).choice_cost(rank).alone["the choice of pivots"]


def asked(n_rows=10**6, n_columns=3, ranks=(200,), width=204, n_folds=1, **changes):
    extent = Extent(n_rows, n_columns, strip_length(n_rows), **changes)
    return moment_cost(ranks, width, n_folds, extent), extent


def test_the_predicted_peak_is_the_largest_over_the_phases():
    executor = Executor("threads", 2, 1 << 40)
    runs = [RowRange(0, 4096, 4096)] * 100
    cost, extent = asked()
    alone = executor.check_pass(cost, extent, runs)
    assert alone.phase == "the pass"
    sampled = executor.check_pass(cost + Cost(alone={"the choice": 10**10}), extent, runs)
    assert (sampled.phase, sampled.predicted > 10**10) == ("the choice", True)
    one = executor.check_pass(*asked(n_folds=200), runs[:1])
    long = executor.check_pass(*asked(n_folds=200), [RowRange(0, 4096 * 16, 4096)])
    assert long.predicted == one.predicted + 2 * 4 * 200 * 204**2 * 8  # a tree of 16 strips a task
    held = executor.check_pass(cost + Cost(held=10**9), extent, runs)
    assert held.predicted == alone.predicted + 10**9
    ahead = executor.check_pass(*asked(chunk_rows=1), runs)
    assert ahead.predicted > alone.predicted  # the next strip is read meanwhile


def test_rows_on_the_way_have_the_columns_that_are_read():
    """Residuals are made of the rows of a strip, not of those of the chunks that are read."""
    cost, plain = asked(n_columns=4, chunk_rows=10**6, columns_read=4)
    moved = plain._replace(n_columns=9)
    run = RowRange(0, 10**6, plain.strip_rows)
    more = task_bytes(cost, moved, run)[0] - task_bytes(cost, plain, run)[0]
    assert more == 5 * plain.strip_rows * 8


def test_partial_results_wait_where_tasks_are_more_than_threads():
    executor = Executor("threads", 2, worker_memory=((1, 1 << 40), (1, 1 << 40)))
    cost, extent = asked(n_folds=10)
    runs = [RowRange(0, 4096, 4096)] * 4
    two, four = (executor.check_pass(cost, extent, runs[:k]).predicted for k in (2, 4))
    assert four - two == 2 * cost.partial
    # What is sent and added takes four of them, though a task takes fewer.
    assert two == max(task_bytes(cost, extent, runs[0])[0], 4 * cost.partial)


def test_one_process_in_two_sends_while_the_others_compute():
    cost, extent = asked(n_folds=200)
    runs = [RowRange(0, 4096, 4096)] * 8
    task = task_bytes(cost, extent, runs[0])[0]
    each = [
        Executor("processes", workers, 1 << 40).check_pass(cost, extent, runs).predicted
        for workers in (2, 4)
    ]
    sends = max(4 * cost.partial, task)
    assert each[1] - each[0] == 2 * (170 << 20) + task + sends


def test_a_fit_is_refused_where_its_pivots_do_not_fit():
    sample = open_sample(np.zeros((1 << 15, 3)))
    places = [Executor("threads", 2, 1 << size) for size in (40, 29)]
    roomy, tight = (fit_context(sample, range(1 << 15), executor=place) for place in places)
    _, plan = roomy.predict((2000,), 2004)
    assert plan.phase == "the choice of pivots"
    choice = roomy.choice_cost(2000).alone["the choice of pivots"]
    assert plan.predicted > choice > 8 * 2000 << 15
    refusal = r"this machine would need .* and the choice of pivots, the limit is .* lower max_rank"
    with pytest.raises(ResourceError, match=refusal) as refused:
        tight.predict((2000,), 2004)
    assert "workers or threads" not in str(refused.value)


def test_what_does_not_fit_into_a_worker_is_refused():
    on_cluster = Executor("threads", 2, worker_memory=((4, 200 << 20),), worker_resident=80 << 20)
    with pytest.raises(ResourceError, match="a worker would need"):
        on_cluster.check_pass(*asked(n_folds=100), [RowRange(0, 4096, 4096)])


def test_a_chunk_that_a_worker_cannot_hold_is_refused_with_the_remedy():
    executor = Executor("threads", 1, worker_memory=((1, 700_000_000),))
    rows = {"n_rows": 10**8, "n_columns": 20, "ranks": (50,), "width": 70}
    runs = [RowRange(0, 1 << 20, 1 << 18)]
    executor.check_pass(*asked(**rows, chunk_rows=1 << 16), runs)
    told = r"chunks of fewer rows than 4,194,304, which are read whole \(cme-dask rechunk\)"
    with pytest.raises(ResourceError, match=told):
        executor.check_pass(*asked(**rows, chunk_rows=1 << 22), runs)
    with pytest.raises(ResourceError, match=r"4,000,000, which are read whole"):
        executor.check_pass(*asked(**rows, chunk_rows=4_000_000), runs)


def test_pivots_need_more_for_more_rows_and_pivots():
    ranks = (1, 100, 500, 2000)
    for rows in (4096, 1 << 15):
        needs = [choice_bytes(rows, m) for m in ranks]
        assert needs == sorted(needs)
        assert all(a < choice_bytes(2 * rows, m) for a, m in zip(needs, ranks, strict=True))


@pytest.mark.parametrize("single", [False, True])
def test_a_task_leaves_no_memory_to_the_garbage_collector(single):
    """A cycle would hold the buffers of many tasks until the collector comes round."""
    rows = np.random.default_rng(0).random((100, 2))
    basis = NewtonBasis.from_points(kernels.Gaussian(0.5), rows[:10])
    gc.disable()
    try:
        reduction = MomentReduction((FeatureBlock(basis, ("a", "b")),), single=single)
        state = reduction.start(rows)
        reduction.update(state, Strip(np.arange(100), (rows,), None))
        gone = weakref.ref(state[0])
        del state
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("columns", "functions", "finalists"), [(3, 0, 1), (2, 400, 1), (100, 0, 1), (10, 0, 6)]
)
def test_what_a_pass_prepares_is_predicted(columns, functions, finalists):
    """Of few and many columns, functions and sets of moments; rows that are read stand aside."""
    n, rank = 1 << 15, 30
    rng = np.random.default_rng(0)
    parts = rng.random((n, columns)), rng.random((n, columns))
    declared = {f"f{i}": lambda x, i=i: x[:, 0] * i for i in range(functions)}
    specs = []
    for _ in range(finalists):
        x, y = (NewtonBasis.from_points(kernels.Gaussian(2.0), part[:rank]) for part in parts)
        names = tuple(f"c{j}" for j in range(columns))
        specs.append(
            MomentReduction((FeatureBlock(x, names, declared), FeatureBlock(y, names)), n_folds=10)
        )
    width = math.isqrt(sum(spec.width**2 for spec in specs)) + 1
    ranks = tuple(m for spec in specs for m in spec.ranks)
    cost, extent = asked(n_rows=10**7, n_columns=2 * columns, ranks=ranks, width=width, n_folds=10)
    folds = (np.arange(n) % 10).astype(np.uint8)
    length = strip_length(10**7)
    aside = 8 * (2 * length * 2 * columns + driver._HASH_WORDS * (length - n))
    tracemalloc.start()
    try:
        sets = MomentSets(tuple(specs))
        strip = Strip(np.arange(n), parts, None, _made={10: folds})
        moments = sets.update(sets.start(parts[0]), strip)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(moments) == finalists
    assert peak <= task_bytes(cost, extent, RowRange(0, n, n))[0] - aside
