"""A minute of chaos on two workers; half an hour of it: `python tests/chaos.py`."""

import logging

import numpy as np
import pytest
from chaos import STRIP_SECONDS, disturbed
from chaos_cases import CASES, bits, fit, write_stores
from chaos_cluster import Cluster
from chaos_restarts import Restarts
from distributed import Client

WORKERS = 2


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    write_stores(folder)
    return folder


@pytest.fixture(scope="module")
def processes(stores):
    with Cluster(stores / "cluster", WORKERS, STRIP_SECONDS) as cluster:
        cluster.wait_for_workers()
        yield cluster


@pytest.fixture(scope="module")
def workers(processes):
    noise = logging.getLogger("distributed")
    level, noise.level = noise.level, logging.CRITICAL  # it tells of each kill
    with Client(processes.address, set_as_default=False) as client:
        yield client
    noise.level = level


@pytest.fixture(scope="module")
def restarts(stores):
    return Restarts(stores / "restarts")


slow = pytest.mark.slow
RUNS = [
    pytest.param("joint", ["one", "one"]),
    pytest.param("joint, certified, greedy", ["all"]),
    pytest.param("joint, coupling", ["replace"]),
    pytest.param("joint, residual", ["one"], marks=slow),
    pytest.param("joint, learned", ["one"], marks=slow),
    pytest.param("cholesky, greedy", ["one", "slow"]),
    pytest.param("cholesky, random", ["one"], marks=slow),
    pytest.param("embedding", ["again"]),
    pytest.param("logistic", ["one"]),
    pytest.param("joint classifier", ["one"], marks=slow),
    pytest.param("embedding classifier", ["all"], marks=slow),
]
"""Every kind of pass and of strike at each run of the tests, every estimator at the slow ones."""


def test_every_case_is_struck():
    assert {run.values[0] for run in RUNS} == {*CASES}


@pytest.mark.parametrize(("case", "strikes"), RUNS, ids=[str(run.values[0]) for run in RUNS])
def test_fits_survive_their_workers(case, strikes, stores, processes, workers):
    wanted = bits(fit(case, stores, scheduler="threads", workers=2))
    for seed in range(3):  # a strike may come too late: then once more
        rng = np.random.default_rng(seed)
        outcome = disturbed(case, strikes, stores, processes, workers, wanted, rng)
        assert not outcome.error
        assert not outcome.different
        # Of one task that died over more workers than Dask allows the run asks again.
        if outcome.hits and (outcome.retries or "again" not in strikes):
            return
    pytest.fail("no kill landed while a task ran, or the run never asked again")


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param(["client", "Ctrl-C", "scheduler"], id="one after the other"),
        pytest.param(["everything", "client"], id="everything at once", marks=slow),
    ],
)
def test_a_run_goes_on_after_its_client_and_scheduler(deaths, restarts, processes):
    """One run dies of each cause in turn, and goes on every time."""
    for seed in (5, 6, 7):  # it may come after the end, or before anything is kept: then once more
        rng = np.random.default_rng(seed)
        outcome = restarts.restarted("cme-dask fit", deaths, processes, rng)
        assert not outcome.error
        assert not outcome.different
        if outcome.deaths == deaths and outcome.taken:
            return
    pytest.fail(f"only {outcome.deaths} came in time, or nothing was taken from the checkpoint")
