"""The simulated cluster: closed forms, invariants, and the answers of the layers above it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask.errors import DataError
from cme_dask.passes.simulation import PassWork, SimulatedCluster, simulate_pass


@pytest.mark.parametrize(("leaves", "workers", "threads"), [(1, 1, 1), (7, 2, 1), (64, 4, 3)])
def test_without_delays_a_pass_takes_its_rounds(leaves, workers, threads):
    done = simulate_pass(PassWork([2.0] * leaves), SimulatedCluster(workers, threads))
    assert done.seconds == pytest.approx(math.ceil(leaves / (workers * threads)) * 2.0)
    assert done.tasks == 2 * leaves - 1
    assert done.scheduler_busy == 0.0
    assert done.threads_busy == pytest.approx(2.0 * leaves / done.seconds / (workers * threads))


def test_merges_take_the_time_of_threads():
    work = PassWork([1.0] * 64, merge_seconds=0.5)
    assert simulate_pass(work, SimulatedCluster(1)).seconds == pytest.approx(64 + 63 * 0.5)
    # On a thread for each leaf, all that remains are the levels of the tree.
    assert simulate_pass(work, SimulatedCluster(64)).seconds == pytest.approx(1.0 + 6 * 0.5)


@pytest.mark.parametrize("workers", [10, 1000])
def test_a_slow_scheduler_takes_its_time_for_each_task(workers):
    cluster = SimulatedCluster(workers, task_seconds=1e-3, task_seconds_per_worker=1e-6)
    done = simulate_pass(PassWork([1e-4] * 5000), cluster)
    assert cluster.service == pytest.approx(1e-3 + 1e-6 * workers)
    assert done.seconds == pytest.approx(done.tasks * cluster.service, rel=0.01)
    assert done.scheduler_busy > 0.98


def test_the_graph_is_submitted_before_the_first_task_starts():
    plain = simulate_pass(PassWork([1.0] * 8), SimulatedCluster(2))
    late = simulate_pass(PassWork([1.0] * 8), SimulatedCluster(2, submit_seconds=0.1))
    assert late.submit_seconds == pytest.approx(1.5)
    assert late.seconds == pytest.approx(plain.seconds + 1.5)


def test_a_slow_client_hears_of_each_task_before_the_sum():
    cluster = SimulatedCluster(8, client_seconds=0.1)
    done = simulate_pass(PassWork([1e-3] * 50), cluster)
    assert done.seconds == pytest.approx(99 * 0.1, rel=0.01)


def test_workers_share_the_cores_of_their_host():
    work = PassWork([1.0] * 64)

    def seconds(workers, **cores):
        return simulate_pass(work, SimulatedCluster(workers, **cores)).seconds

    two = {"workers_per_host": 4, "cores_per_host": 2}
    # Merges take places of leaves, so that the last leaves may not be shared out evenly.
    assert seconds(4, **two) == pytest.approx(32.0, rel=0.02)
    assert seconds(4, **two, full_speed=0.8) == pytest.approx(40.0, rel=0.02)
    # One busy thread is not slower; on two hosts each has its own cores.
    assert seconds(1, workers_per_host=1, cores_per_host=2, full_speed=0.8) == pytest.approx(64.0)
    # A worker is given two tasks, so that one of 2 s may be left to it when others have none.
    assert 16.0 <= seconds(8, **two) <= 18.0


def test_workers_take_a_share_of_the_cores_beside_their_tasks():
    work, load = PassWork([1.0] * 64), {"worker_load": 0.1}
    plain, loaded = (simulate_pass(work, SimulatedCluster(4, **cores)) for cores in ({}, load))
    assert loaded.seconds == pytest.approx(plain.seconds / 0.9)
    host = {"workers_per_host": 4, "cores_per_host": 2}
    shared = simulate_pass(work, SimulatedCluster(4, **host, **load))
    assert shared.seconds == pytest.approx(64 / 1.6, rel=0.02)
    # One of them finds a core for that.
    alone = SimulatedCluster(1, **(host | {"workers_per_host": 1}), **load)
    assert simulate_pass(work, alone).seconds == pytest.approx(64.0)
    with pytest.raises(DataError, match="worker_load must leave some of 2 cores"):
        SimulatedCluster(4, **host, worker_load=0.5)


def test_the_file_system_bounds_all_workers_together():
    work = PassWork([1.0] * 100, read_bytes=1e9)
    slow = simulate_pass(work, SimulatedCluster(50, file_system=1e9))
    assert slow.seconds == pytest.approx(100.0, rel=0.01)
    assert simulate_pass(work, SimulatedCluster(50, file_system=1e12)).seconds < 2.2


def test_threads_that_wait_for_rows_are_busy():
    work = PassWork([1.0] * 100, read_bytes=1e9)
    done = simulate_pass(work, SimulatedCluster(50, file_system=1e9))
    # The first 50 leaves wait for 1, 2, ..., 50 s, and the others for 50 s each, in 100 s.
    assert done.threads_busy == pytest.approx((1275 + 2500) / (50 * 100))
    host = {"workers_per_host": 2, "cores_per_host": 1}
    shared = simulate_pass(PassWork([1.0] * 64), SimulatedCluster(2, **host))
    assert shared.threads_busy > 0.95  # of 64 s, in which each works for 32 s


def test_cores_that_are_shared_do_not_slow_the_file_system():
    work = PassWork([0.1] * 100, read_bytes=1e9)
    host = {"workers_per_host": 4, "cores_per_host": 2, "full_speed": 0.8}
    done = simulate_pass(work, SimulatedCluster(8, file_system=1e9, **host))
    assert done.seconds == pytest.approx(100.0, rel=0.003)


def test_whole_seconds_may_be_integers():
    cluster = SimulatedCluster(4, stragglers=(0.5, 1.5))
    whole = simulate_pass(PassWork([0.5] * 8, merge_seconds=1), cluster)
    assert whole == simulate_pass(PassWork([0.5] * 8, merge_seconds=1.0), cluster)


def test_results_and_the_plan_are_sent():
    work = PassWork([1.0] * 8, result_bytes=1e6, plan_bytes=1e3)
    alone = simulate_pass(work, SimulatedCluster(1))
    assert alone.sent_bytes == 1e6  # to the client
    apart = simulate_pass(work, SimulatedCluster(8))
    # Each merge of two workers' results fetches one of them, and seven workers fetch the plan.
    assert apart.sent_bytes == 7e3 + 7e6 + 1e6
    slow = simulate_pass(work, SimulatedCluster(8, bandwidth=1e6))
    assert slow.seconds == pytest.approx(1.0 + 0.001 * 8 + 3 * 1.0 + 1.0, rel=0.01)


def test_stragglers_and_spread():
    work = PassWork([1.0] * 2000)
    plain = simulate_pass(work, SimulatedCluster(20))
    slow = simulate_pass(work, SimulatedCluster(20, stragglers=(0.1, 5.0)))
    assert slow.seconds == pytest.approx(1.4 * plain.seconds, rel=0.05)
    spread = simulate_pass(work, SimulatedCluster(20, spread=(0.5, 1.5)))
    assert spread.seconds == pytest.approx(plain.seconds, rel=0.05)


CLUSTERS = st.builds(
    SimulatedCluster,
    st.integers(1, 12),
    st.integers(1, 3),
    submit_seconds=st.sampled_from([0.0, 1e-3]),
    task_seconds=st.sampled_from([0.0, 1e-3, 0.1]),
    task_seconds_per_worker=st.sampled_from([0.0, 1e-3]),
    client_seconds=st.sampled_from([0.0, 0.01]),
    worker_seconds=st.sampled_from([0.0, 0.01]),
    latency=st.sampled_from([0.0, 0.05]),
    bandwidth=st.sampled_from([math.inf, 1e6]),
    file_system=st.sampled_from([math.inf, 1e6]),
    workers_per_host=st.integers(1, 4),
    cores_per_host=st.sampled_from([None, 1, 2, 8]),
    worker_load=st.sampled_from([0.0, 0.05]),
    full_speed=st.sampled_from([1.0, 0.7]),
    spread=st.sampled_from([(1.0,), (0.5, 1.5)]),
    stragglers=st.sampled_from([(0.0, 1.0), (0.2, 4.0)]),
)
WORKS = st.builds(
    PassWork,
    st.lists(st.floats(0.0, 3.0), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 1e5]),
    st.sampled_from([0.0, 1e5]),
    st.sampled_from([0.0, 1e5]),
)


@settings(max_examples=150)
@given(WORKS, CLUSTERS, st.integers(0, 3))
def test_a_pass_ends_and_is_bounded_by_its_parts(work, cluster, seed):
    done = simulate_pass(work, cluster, seed)
    assert done == simulate_pass(work, cluster, seed)
    assert 0.0 <= done.scheduler_busy <= 1.0
    assert 0.0 <= done.threads_busy <= 1.0
    assert done.tasks == work.tasks
    rest = done.seconds - done.submit_seconds
    assert rest >= done.tasks * cluster.service * (1 - 1e-9)
    assert rest >= done.tasks * cluster.client_seconds * (1 - 1e-9)
    least = min(cluster.spread) * sum(work.leaf_seconds) / cluster.workers / cluster.threads
    assert rest >= least * (1 - 1e-9) - 1e-12  # of sums with submit_seconds
    sent = work.plan_bytes * (cluster.workers - 1) + 2 * work.result_bytes * work.tasks
    assert work.result_bytes <= done.sent_bytes <= sent
    assert 1 <= done.peak_results <= work.tasks
    assert 0.0 <= done.tail_seconds <= done.seconds


@settings(max_examples=50)
@given(st.integers(1, 300), st.integers(1, 40))
def test_no_worker_waits_while_leaves_are_queued(leaves, workers):
    """All are busy until the queue is empty, when each holds two leaves at most."""
    done = simulate_pass(PassWork([1.0] * leaves), SimulatedCluster(workers))
    even = leaves / workers
    assert max(even, 1.0) <= done.seconds * (1 + 1e-12)
    assert done.seconds <= (even + 2.0) * (1 + 1e-12)


def test_seeds_differ():
    work, cluster = PassWork([1.0] * 50), SimulatedCluster(3, spread=(0.5, 1.0, 1.5))
    assert simulate_pass(work, cluster, 0).seconds != simulate_pass(work, cluster, 1).seconds


def test_a_thousand_workers_and_many_tasks():
    """10^5 tasks here; 10^6 take 10 times as long, some seconds."""
    cluster = SimulatedCluster(
        1000, task_seconds=3e-4, task_seconds_per_worker=2e-6, latency=2e-3, bandwidth=1e9
    )
    done = simulate_pass(PassWork([2.0] * 50_000, 0.01, 0.0, 3e6, 1e5), cluster)
    assert done.tasks == 99_999
    assert done.scheduler_busy > 0.99  # 1,000 tasks a second would be needed
    assert done.seconds == pytest.approx(99_999 * 2.3e-3, rel=0.05)


@pytest.mark.parametrize(
    ("work", "changed", "message"),
    [
        ({"leaf_seconds": []}, {}, "at least one leaf"),
        ({"leaf_seconds": [1.0, -1.0]}, {}, "leaf_seconds must be finite and at least 0, got -1.0"),
        ({"leaf_seconds": [1.0, math.nan]}, {}, "leaf_seconds must be finite"),
        ({"merge_seconds": math.inf}, {}, "merge_seconds must be finite"),
        ({"read_bytes": -1.0}, {}, "read_bytes must be finite"),
        ({}, {"workers": 0}, "workers must be at least 1"),
        ({}, {"threads": math.nan}, "threads must be at least 1"),
        ({}, {"latency": -1.0}, "latency must be finite and at least 0, got -1.0"),
        ({}, {"submit_seconds": math.nan}, "submit_seconds must be finite"),
        ({}, {"bandwidth": 0.0}, "bandwidth must be positive, got 0.0"),
        ({}, {"file_system": 0.0}, "file_system must be positive, got 0.0"),
        ({}, {"full_speed": 0.0}, "full_speed"),
        ({}, {"stragglers": (2.0, 1.0)}, "stragglers"),
        ({}, {"stragglers": (0.5, math.inf)}, "stragglers"),
        ({}, {"spread": ()}, "spread"),
        ({}, {"spread": (1.0, math.nan)}, "spread"),
    ],
)
def test_bad_input(work, changed, message):
    work, cluster = {"leaf_seconds": [1.0], **work}, {"workers": 1, **changed}
    with pytest.raises(DataError, match=message):
        simulate_pass(PassWork(**work), SimulatedCluster(**cluster))


def test_draws_have_the_mean_that_was_given():
    rng = np.random.default_rng(0)
    factors = tuple(rng.lognormal(-0.02, 0.2, 200))
    work = PassWork([1.0] * 4000)
    done = simulate_pass(work, SimulatedCluster(1, spread=factors))
    assert done.seconds == pytest.approx(4000 * np.mean(factors), rel=0.02)
