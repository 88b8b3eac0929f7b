"""Two minutes of chaos on two workers; an hour of it: `python tests/chaos.py`."""

import logging

import numpy as np
import pytest
from chaos import STRIP_SECONDS, Strike, Undisturbed, disturbed
from chaos_cases import CASES, write_stores
from chaos_cluster import Cluster
from chaos_nursery import Nursery
from chaos_restarts import Restarts
from distributed import Client

WORKERS = 2
SEARCH, PASS = "search for kernels", "pass over the rows"
SECOND_PASS = "pass over the residuals"
pytestmark = pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    write_stores(folder)
    return folder


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as forking:
        yield forking


@pytest.fixture(scope="module")
def processes(stores, nursery):
    with Cluster(stores / "cluster", WORKERS, STRIP_SECONDS, nursery) as cluster:
        cluster.wait_for_workers()
        yield cluster


@pytest.fixture(scope="module")
def quiet():
    noise = logging.getLogger("distributed")
    level, noise.level = noise.level, logging.CRITICAL  # it tells of each kill
    yield
    noise.level = level


@pytest.fixture(scope="module")
def workers(processes, quiet):
    with Client(processes.address, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="module")
def restarts(stores, nursery):
    return Restarts(stores, nursery)


slow = pytest.mark.slow
LEARNED = [Strike("one", SEARCH), Strike("one", PASS), Strike("all", SECOND_PASS)]
BY_DEFAULT = {
    "joint, learned": LEARNED,
    "joint, certified, greedy": [Strike("all")],
    "cholesky, greedy": [Strike("one"), Strike("slow")],
    "embedding": [Strike("again")],
    "logistic": [Strike("replace")],
}
RUNS = [
    pytest.param(
        name,
        BY_DEFAULT.get(name, [Strike("one"), Strike("all")]),
        id=name,
        marks=() if name in BY_DEFAULT else slow,
    )
    for name in CASES
]
"""Every kind of pass and of strike at each run of the tests, every case at the slow ones."""


def check(case, strikes, stores, cluster, client):
    """One fit with strikes, of which some must hit a task."""
    wanted = Undisturbed.of(case, stores)
    assert {strike.phase for strike in strikes} - {None} <= {*wanted.seconds}  # all of them come
    for seed in range(3):  # a strike may come too late: then once more
        rng = np.random.default_rng(seed)
        tide = case == "joint, learned"
        outcome = disturbed(case, strikes, stores, cluster, client, wanted, rng, tide)
        assert not outcome.error
        assert not outcome.different
        # Of one task that died over more workers than Dask allows the run asks again.
        if outcome.hits and (outcome.retries or "again" not in outcome.strikes):
            return outcome
    pytest.fail("no kill landed while a task ran, or the run never asked again")


@pytest.mark.parametrize(("case", "strikes"), RUNS)
def test_fits_survive_their_workers(case, strikes, stores, processes, workers):
    outcome = check(case, strikes, stores, processes, workers)
    assert case != "joint, learned" or outcome.moves


@slow
def test_a_fit_survives_its_workers_under_nannies(stores, quiet):
    with (
        Cluster(stores / "nannies", WORKERS, STRIP_SECONDS) as cluster,
        Client(cluster.address, set_as_default=False) as client,
    ):
        check("joint, learned", LEARNED, stores, cluster, client)


@pytest.mark.parametrize(
    ("name", "place", "deaths"),
    [
        pytest.param(
            "joint, learned",
            "cluster",
            [("scheduler", SECOND_PASS)],
            id="a learned fit",
        ),
        pytest.param(
            "joint, learned",
            "cluster",
            [("client", SEARCH), ("scheduler", SECOND_PASS)],
            id="a learned fit, twice",
            marks=slow,
        ),
        pytest.param(
            "cme-dask fit, given",
            "cluster",
            [("Ctrl-C", PASS), ("client", PASS)],
            id="one after the other",
            marks=slow,
        ),
        pytest.param("cme-dask fit", "cluster", ["everything", "SIGTERM"], id="all", marks=slow),
        pytest.param("cme-dask fit", "processes", [("process", PASS)], id="pool", marks=slow),
    ],
)
def test_a_run_goes_on_after_its_client_and_scheduler(name, place, deaths, restarts, processes):
    """One run dies of each cause in turn, and goes on every time."""
    kinds = [death if isinstance(death, str) else death[0] for death in deaths]
    for seed in (5, 6, 7):  # it may come after the end, or before anything is kept: then once more
        rng = np.random.default_rng(seed)
        outcome = restarts.restarted(name, place, deaths, processes, rng)
        assert not outcome.error
        assert not outcome.different
        if outcome.deaths == kinds and (outcome.taken or outcome.trials):
            return
    pytest.fail(f"only {outcome.deaths} came in time, or nothing was taken from the checkpoint")
