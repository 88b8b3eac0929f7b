"""Runs on a cluster that loses its workers: they go on, or one sentence says why not."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import dask
import numpy as np
import psutil
import pytest
from conftest import forked_workers
from distributed import Client, LocalCluster
from hypothesis import given
from hypothesis import strategies as st

from cme_dask import JointDistribution, PivotedCholesky, kernels
from cme_dask.errors import DataError, ResourceError
from cme_dask.numerics.reduction import Cost, Extent, plan_ranges, tree_merges, tree_sum
from cme_dask.passes.cluster import described_workers, run_on_workers
from cme_dask.passes.driver import RunOptions


@given(leaves=st.integers(1, 70))
def test_the_tree_is_the_one_that_sums_follow(leaves):
    nodes = [str(i) for i in range(leaves)]
    expected = tree_sum(nodes, lambda a, b: f"({a}+{b})")
    for a, b in tree_merges(leaves):
        nodes.append(f"({nodes[a]}+{nodes[b]})")
    assert nodes[-1] == expected


@pytest.fixture(autouse=True)
def quick():
    with forked_workers():
        yield


@pytest.fixture
def small():
    """A cluster of one worker process that is brought back when it dies, however slowly."""
    patience = {"distributed.deploy.lost-worker-timeout": "10 minutes"}
    with (
        dask.config.set(patience | {"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(
            n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0", protocol="tcp"
        ) as local,
        Client(local) as client,
    ):
        yield local, client


def slow(mark, seconds):
    Path(mark).touch()
    time.sleep(seconds)
    return {os.getpid()}


def union(shared, a, b):
    return a | b


def killer(shared, path, times):
    """A task that kills its worker so many times, and then counts itself."""
    with open(path, "a+") as file:
        file.seek(0)
        dead = len(file.read())
        if dead < times:
            file.write("x")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    return 1


def plus(shared, a, b=0):
    """The work of a leaf, and of a merge."""
    return a + b


def test_a_task_outlives_more_workers_than_dask_allows(small, tmp_path):
    _, client = small
    path = str(tmp_path / "dead")
    payloads = [(path, 0), (path, 2), (path, 0)]  # Dask gives up at the first death
    done = []
    found = (
        RunOptions(client)
        .executor()
        .run(killer, payloads, plus, shared=None, name="killer", on_done=done.append)
    )
    assert found == 3
    assert sorted(done) == [0, 1, 2]
    assert (tmp_path / "dead").read_text() == "xx"


def test_a_task_that_always_kills_is_given_up(small, tmp_path, monkeypatch):
    _, client = small
    monkeypatch.setattr("cme_dask.passes.cluster._ATTEMPTS", 1)
    with pytest.raises(ResourceError, match="died again and again while they ran killer-0"):
        RunOptions(client).executor().run(
            killer, [(str(tmp_path / "dead"), 99)], plus, shared=None, name="killer"
        )


def test_a_chunk_of_the_user_that_kills_its_workers_ends_the_run(small, tmp_path):
    """It keeps its name, and so its error, however often it is asked for."""
    _, client = small
    chunk = dask.delayed(killer)(None, str(tmp_path / "dead"), 99, dask_key_name="chunk-0")
    with pytest.raises(ResourceError, match="while they ran chunk-0: give them more memory"):
        RunOptions(client).executor().run(
            plus, [(chunk,), (chunk,)], plus, shared=1, name="read-strips"
        )


def test_what_hears_of_the_progress_is_not_the_scheduler(small):
    _, client = small

    def closed(_):
        raise BrokenPipeError("the terminal is closed")

    with pytest.raises(BrokenPipeError, match="the terminal is closed"):
        RunOptions(client).executor().run(
            plus, [(1,), (2,)], plus, shared=1, name="plus", on_done=closed
        )


def test_workers_that_die_while_they_are_prepared_are_no_lost_scheduler(small):
    """However often one hears of the plugin and doesn't answer; the next passes ask for nothing."""
    _, client = small
    prepared = client.register_plugin
    attempts = []

    def dying(plugin):
        client.wait_for_workers(1)
        (pid,) = client.run(os.getpid).values()
        os.kill(pid, signal.SIGSTOP)
        killing = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
        killing.start()
        attempts.append(pid)
        try:
            return prepared(plugin)
        finally:
            killing.join()

    client.register_plugin = dying
    executor = RunOptions(client).executor()
    for _ in range(2):
        assert executor.run(plus, [(1,), (2,)], plus, shared=None, name="plus") == 3
    assert len(attempts) == 1


def registered(dask_scheduler):
    """The plugin of a scheduler, by its identity."""
    return id(dask_scheduler.worker_plugins["cme-dask-one-blas-thread"])


def test_a_cluster_is_prepared_once(cluster):
    def fit():
        x = np.zeros((10, 1)) + np.arange(10)[:, None]
        PivotedCholesky(kernels.Gaussian(1.0), tol=0.5).fit(x, scheduler=cluster)
        return cluster.run_on_scheduler(registered)

    assert fit() == fit()


def test_a_worker_holds_what_it_was_measured_to_hold(cluster):
    executor = RunOptions(cluster).executor()
    processes = map(psutil.Process, cluster.run(os.getpid).values())
    measured = max(process.memory_info().rss for process in processes)
    assert 0.9 * measured < executor.worker_resident < 1.1 * measured + (16 << 20)
    plan = executor.check_pass(Cost(), Extent(100, 1, 100, 0), plan_ranges(100, 0, 1, 1e-6))
    assert plan.predicted > executor.worker_resident


def test_fits_may_be_tasks_on_all_threads_of_a_cluster(cluster):
    def fit_in_a_task(seed):
        x = np.random.default_rng(seed).normal(size=(5000, 1))
        return PivotedCholesky(kernels.Gaussian(1.0), tol=0.5).fit(x).report_.rows

    futures = cluster.map(fit_in_a_task, range(3), pure=False)  # of one-thread workers there are 2
    try:
        assert cluster.gather(futures, direct=True) == [5000] * 3
    finally:
        cluster.cancel(futures)


def test_a_stopped_worker_does_not_block_the_start(cluster, monkeypatch):
    monkeypatch.setattr("cme_dask.passes.cluster._ANSWER_SECONDS", 1.5)
    monkeypatch.setattr("cme_dask.passes.cluster._SILENT_SECONDS", 0.0)
    pid, other = cluster.run(os.getpid).values()
    os.kill(pid, signal.SIGSTOP)
    going_on = threading.Timer(60.0, os.kill, (pid, signal.SIGCONT))
    going_on.start()
    try:
        assert list(run_on_workers(cluster, os.getpid).values()) == [other]
        assert RunOptions(cluster).executor().workers == 2
        assert going_on.is_alive()
    finally:
        going_on.cancel()
        os.kill(pid, signal.SIGCONT)


def test_an_adaptive_cluster_may_begin_without_workers():
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address="127.0.0.1:0") as local,
        Client(local, set_as_default=False) as client,
    ):
        with pytest.raises(ResourceError, match="has no workers: start some"):
            RunOptions(client).executor()
        local.adapt(minimum=0, maximum=1, interval="50ms")
        assert RunOptions(client).executor().workers == 1


def test_a_cluster_that_is_known_by_its_address_may_get_its_workers_later():
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address="127.0.0.1:0") as local,
        Client(local.scheduler_address, set_as_default=False) as client,
    ):
        for patience in (0, 0.2, "200ms"):
            with (
                dask.config.set({"cme-dask.no-workers-timeout": patience}),
                pytest.raises(ResourceError, match="has no workers: start some"),
            ):
                RunOptions(client).executor()
        later = threading.Timer(0.5, local.scale, (1,))
        later.start()
        assert RunOptions(client).executor().workers == 1
        later.join()


def test_who_waits_long_for_a_worker_is_told(monkeypatch):
    monkeypatch.setattr("cme_dask.passes.cluster._UNTOLD_SECONDS", 0.1)
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address="127.0.0.1:0") as local,
        Client(local.scheduler_address, set_as_default=False) as client,
        dask.config.set({"cme-dask.no-workers-timeout": 0.3}),
        pytest.warns(RuntimeWarning, match=r"no worker at tcp.* for 0.1 s: .* 0.2 s more"),
        pytest.raises(ResourceError, match="has no workers"),
    ):
        RunOptions(client).executor()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_scheduler_may_be_lost_while_workers_are_waited_for(caplog):
    local = LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address="127.0.0.1:0")
    with Client(local.scheduler_address, set_as_default=False, timeout="2s") as client:
        ending = threading.Timer(0.5, local.close)
        ending.start()
        with pytest.raises(ResourceError, match=r"the scheduler at .* was lost"):
            RunOptions(client).executor()
        ending.join()
    assert "waiting up to 300 s" in caplog.text


def test_looks_of_the_client_itself_hide_no_workers():
    """It asks for no workers every two seconds, and its answer may be the one that is seen."""

    class Client:
        seen = iter([{}, {"tcp://a": {}}])

        def scheduler_info(self, n_workers):
            return {"workers": next(self.seen), "n_workers": 1}

    assert described_workers(Client()) == {"tcp://a": {}}


def test_clients_that_can_not_wait_are_refused(cluster):
    async def executor():
        async with Client(cluster.scheduler.address, asynchronous=True) as client:
            RunOptions(client).executor()

    with pytest.raises(DataError, match=r"the client is asynchronous, .* give a Client\(address\)"):
        asyncio.run(executor())
    with Client(cluster.scheduler.address, set_as_default=False) as client:
        pass
    with pytest.raises(ResourceError, match="the client is closed: connect another one"):
        RunOptions(client).executor()


ORPHANS = """
import os, time
from cme_dask.passes.driver import WorkerProcesses
with WorkerProcesses().started(1) as pool:
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


def test_processes_end_with_a_killed_client():
    command = [sys.executable, "-c", ORPHANS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
        child = psutil.Process(int(client.stdout.readline()))
        client.kill()
    child.wait(30)  # TimeoutExpired if it goes on


def test_without_any_worker_a_run_ends_with_a_sentence(small, tmp_path, monkeypatch):
    """Its workers leave once its tasks run."""
    local, client = small
    executor = RunOptions(client).executor()
    begun = tmp_path / "begun"
    monkeypatch.setattr("cme_dask.passes.cluster._PAUSE", 0.2)

    def leave():
        while not begun.exists():
            time.sleep(0.05)
        local.scale(0)

    threading.Thread(target=leave, daemon=True).start()
    with (
        dask.config.set({"cme-dask.no-workers-timeout": 0.5}),
        pytest.raises(ResourceError, match="has had no worker for 0 s: start some"),
    ):
        executor.run(slow, [(3.0,), (3.0,)], union, shared=str(begun), name="slow")


def test_what_a_task_raises_comes_back_as_it_is(small):
    _, client = small
    x = np.ones((6000, 1))
    x[4321] = np.nan
    with pytest.raises(ValueError, match=r"x0.*1 .*4,?321"):
        JointDistribution(kernel_x=kernels.Gaussian(1.0), kernel_y=kernels.Gaussian(1.0)).fit(
            x, x[::-1].copy(), scheduler=client
        )
