"""Shared fixtures: stores on disk, a real cluster."""

import os

# Threads of OpenMP that wait would spin on the cores that other tests need. Set before they start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import compileall
import contextlib
import itertools
import multiprocessing.forkserver
import shutil
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers as hypothesis_providers
from threadpoolctl import threadpool_limits

IDLE = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.event-loop-monitor-interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.memory.monitor-interval": "500ms",
    "distributed.scheduler.work-stealing-interval": "1s",
    "distributed.client.heartbeat": "30s",
    "distributed.client.scheduler-info-interval": "30s",
}
"""Options of a cluster that does nothing most of the time: Dask's own take 10 % of a core."""

IMPORTED = "distributed", "pandas", "cme_dask.estimators.joint", "cme_dask.data.ingest"
"""What the process has imported that others are forked from: to import it takes seconds."""


def fork_server():
    """The context of processes that begin without imports.

    Each process of tests has one server, and whoever starts it decides what it imports: Dask would
    leave out this package.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def forked_workers(**options):
    """Clusters that start here fork their worker processes, see :func:`fork_server`."""
    fork_server()
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"} | options):
        yield


# By default examples have 200 ms each, which they exceed where other work fills the machine.
settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anywhere")
# Else it parses all modules of the package and of the tests, for constants to try: many seconds.
hypothesis_providers.is_local_module_file = lambda path: False


def pytest_configure(config):
    """Compile the package for the processes that tests start, where Python writes no bytecode."""
    if sys.dont_write_bytecode and not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).parents[1] / "cme_dask", quiet=1)


@pytest.fixture(scope="session", autouse=True)
def one_blas_thread():
    """Small matrices only get slower on several threads, of BLAS or of OpenMP."""
    import sklearn.ensemble  # noqa: F401 (only libraries that are loaded can be limited)

    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk(request):
    """Outputs are not waited for until they are on the disk, but where a module tests that."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "SYNCS", False):
            patch.setattr("cme_dask.data.atomic.os.fsync", lambda descriptor: None)
        yield


class ForkedPool(ProcessPoolExecutor):
    """Worker processes that are forked from one which has imported the package."""

    def __init__(self, workers, context, **options):
        super().__init__(workers, fork_server(), **options)


@pytest.fixture(scope="module", autouse=True)
def quick_processes(request):
    """Worker processes begin without imports, which take seconds, but where a module tests them."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "SPAWNS", False):
            patch.setattr("cme_dask.passes.processes.ProcessPoolExecutor", ForkedPool)
        yield


@pytest.fixture
def rng():
    return np.random.default_rng(20261121)


@pytest.fixture
def steps_beside():
    """Steps that another thread takes during a call: next to none if it holds the interpreter."""

    def steps(call):
        taken, ended = 0, threading.Event()

        def count():
            nonlocal taken
            while not ended.is_set():
                taken += 1
                time.sleep(0)  # hands the lock over, which Python does not do by itself here

        interval, thread = sys.getswitchinterval(), threading.Thread(target=count)
        sys.setswitchinterval(1e3)
        try:
            thread.start()
            before = taken
            call()
            return taken - before
        finally:
            ended.set()
            thread.join()
            sys.setswitchinterval(interval)

    return steps


@pytest.fixture(scope="session")
def local_cluster():
    """A real cluster, scheduler and two worker processes over TCP, which starts only once."""
    from distributed import LocalCluster

    with forked_workers(**IDLE):
        local = LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address="127.0.0.1:0",
            protocol="tcp",
        )
    with local:
        yield local


@pytest.fixture(scope="module")
def cluster(local_cluster):
    """A client of the cluster, which is what Dask uses by default while it is there."""
    from distributed import Client

    with dask.config.set(IDLE):
        client = Client(local_cluster)
    with client:
        yield client


BRIEF = {"rows": 500, "max_rank": 40, "evaluations": 6, "trees": ()}
"""A search for kernels that ends soon."""


def shorten_searches(patch, **changes):
    """Searches for kernels are brief by default, by this monkeypatch, or briefer still.

    Learned bases have at most 100 pivots, unless ``max_rank`` is given, and no trees are tried.
    """
    from cme_dask import Tuning

    names = [field.name for field in fields(Tuning)]
    defaults = dict(zip(names, Tuning.__init__.__defaults__, strict=True))
    brief = BRIEF | changes
    patch.setattr(Tuning.__init__, "__defaults__", tuple((defaults | brief).values()))
    assert Tuning() == Tuning(**brief)
    patch.setattr("cme_dask.estimators.joint_fit.MAX_RANK", 100)
    patch.setattr("cme_dask.learning.search.GRID", (0.4, 1.2, 3.2))


@pytest.fixture
def brief_search(monkeypatch):
    """Searches for kernels are brief by default: for tests of something else."""
    shorten_searches(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def few_held_rows(request):
    """Default fits have few pivots, and are judged at few rows, but where a module tests them."""
    from cme_dask.learning import tree_fits

    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "ALL_HELD_ROWS", False):
            if not getattr(request.module, "ALL_PIVOTS", False):
                patch.setattr("cme_dask.estimators.joint_fit.MAX_RANK", 150)
            for module in ("refits", "residual", "support"):
                patch.setattr(f"cme_dask.estimators.{module}.HELD_ROWS", 500)
            patch.setattr("cme_dask.estimators.multiclass._CHOICE_ROWS", 300)
            patch.setattr("cme_dask.learning.regression.ROWS", (200, 400))
            patch.setattr("cme_dask.learning.regression._STEPS", (10, 4, 4, 5))
            for name in ("_GROWTH", "_GROWTH_OF_FEW"):
                growth = getattr(tree_fits, name)
                patch.setattr(tree_fits, name, growth._replace(steps=(30, 60)))
            patch.setattr("cme_dask.learning.tree_fits._FOREST", 20)
            patch.setattr("cme_dask.learning.tree_fits._TRIAL_FOREST", 15)
        yield


@pytest.fixture(scope="module")
def least_searches(few_held_rows):
    """Searches for kernels begin at few length scales and take few steps: for modules of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cme_dask.learning.search.GRID", (0.4, 1.2))
        patch.setattr("cme_dask.learning.regression._STEPS", (3, 1, 1, 1))
        yield


def few_scales(patch):
    """Grids of a few length scales for the studies, by this monkeypatch."""
    from benchmarks import classifiers, laws

    patch.setattr(laws, "SCALES", (0.35, 1.0))
    patch.setattr(laws, "COUPLING_SCALES", (0.2, 0.6))
    patch.setattr(laws, "COUPLING_REGS", laws.COUPLING_REGS[:2])
    patch.setattr(classifiers, "SCALES", (0.6, 1.8))
    patch.setattr(classifiers, "SCALES_Y", (0.6,))
    patch.setattr(classifiers, "REGS", (1e-3, 1e-1))
    patch.setattr(classifiers, "COUPLING_SCALES", (0.6,))
    patch.setattr(classifiers, "COUPLING_SCALES_Y", (0.6,))
    patch.setattr(classifiers, "COUPLING_REGS", (1e-1,))


@pytest.fixture
def quick_studies(monkeypatch):
    """Studies of few length scales that judge in this process, not in some of their own."""
    few_scales(monkeypatch)
    monkeypatch.setattr(
        "benchmarks.study.judge_all",
        lambda judge, tasks, *others: {task: judge(*task) for task in tasks},
    )


def fit_context(sample, rows, *, n_folds=1, executor=None):
    """What a fit has before its pass whose pivots are chosen from these rows of a row sample."""
    from cme_dask.estimators.context import FitContext, Pivots

    count = len(sample.columns)
    chosen = "sampled", 1e-3, None, True, True, 1.0
    pivots = tuple(Pivots(name, *chosen, (0, i)) for i, name in enumerate("xy"))
    return FitContext(
        sample,
        rows,
        kernels=(),
        pivots=pivots[:count],
        functions=[{}] * count,
        seed=0,
        n_folds=n_folds,
        executor=executor,
        progress=None,
        passes=0,
        seconds=0.0,
    )


def write_store(path, x, y, weights=None, *, chunk_rows=1000, x_names=None, y_names=None, seed=0):
    """Rows to a sample store on disk."""
    from cme_dask.data.columns import Columns
    from cme_dask.data.writer import writing_sample

    x, y = (a if a.ndim == 2 else a[:, None] for a in (np.asarray(x), np.asarray(y)))
    columns = (
        Columns(tuple(x_names)) if x_names else Columns.default("x", x.shape[1]),
        Columns(tuple(y_names)) if y_names else Columns.default("y", y.shape[1]),
    )
    with writing_sample(
        path, columns, weights=weights is not None, chunk_rows=chunk_rows, seed=seed
    ) as writer:
        for start in range(0, len(x), 700):  # batches that fit no chunk
            rows = slice(start, start + 700)
            writer.append(x[rows], y[rows], None if weights is None else weights[rows])
    return path


@contextlib.contextmanager
def rewriting(path):
    """The group of a store whose rows are changed in place, as if it had held them before."""
    from cme_dask.data.store import sealed, write_checksums

    group = zarr.open_group(str(path), mode="r+")
    yield group
    about = dict(group.attrs["cme_dask"])
    arrays = {name: group[name] for name in about["chunk_checksums"]["of"]}
    del about["checksum"], group["chunk_checksums"]
    group.attrs["cme_dask"] = sealed(about | {"chunk_checksums": write_checksums(group, arrays)})


def pairwise(**axes):
    """Parametrise by few cases in which any two values of two axes meet; the rest are slow.

    ``pytest -m slow`` completes the product.
    """
    names = tuple(axes)
    products = list(itertools.product(*(range(len(values)) for values in axes.values())))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in products}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(products, key=lambda case: len(pairs[case] & missing))
        chosen.add(best)
        missing -= pairs[best]
    cases = [
        pytest.param(
            *(values[i] for values, i in zip(axes.values(), case, strict=True)),
            marks=() if case in chosen else pytest.mark.slow,
        )
        for case in products
    ]
    return pytest.mark.parametrize(names, cases)


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="session")
def browser():
    """Chromium as it is installed, without a head."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=list(QUIET))
        yield opened
        opened.close()
