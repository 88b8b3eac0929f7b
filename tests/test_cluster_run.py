"""Runs on a cluster that loses its workers: they go on, or one sentence says why not."""

import os
import signal
import threading
import time
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster
from hypothesis import given
from hypothesis import strategies as st

from cme_dask import JointDistribution, kernels
from cme_dask.errors import ResourceError
from cme_dask.numerics.reduction import tree_merges, tree_sum
from cme_dask.passes.driver import RunOptions


@given(leaves=st.integers(1, 70))
def test_the_tree_is_the_one_that_sums_follow(leaves):
    nodes = [str(i) for i in range(leaves)]
    expected = tree_sum(nodes, lambda a, b: f"({a}+{b})")
    for a, b in tree_merges(leaves):
        nodes.append(f"({nodes[a]}+{nodes[b]})")
    assert nodes[-1] == expected


@pytest.fixture
def small():
    """A cluster of one worker process that is brought back when it dies, however slowly."""
    patience = {"distributed.deploy.lost-worker-timeout": "10 minutes"}
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0, **patience}),
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


def test_a_worker_that_dies_while_it_is_prepared_is_no_lost_scheduler(small):
    """It hears of the plugin, but doesn't answer; its successor does."""
    _, client = small
    (pid,) = client.run(os.getpid).values()
    prepared = client.register_plugin

    def dying(plugin):
        os.kill(pid, signal.SIGSTOP)
        killing = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
        killing.start()
        client.register_plugin = prepared
        try:
            return prepared(plugin)
        finally:
            killing.join()

    client.register_plugin = dying
    executor = RunOptions(client).executor()
    assert executor.run(plus, [(1,), (2,)], plus, shared=None, name="plus") == 3
    client.wait_for_workers(1)
    (pid,) = client.run(os.getpid).values()
    client.register_plugin = dying
    assert executor.run(plus, [(1,), (2,)], plus, shared=None, name="plus") == 3


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
