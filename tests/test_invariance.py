"""The same rows give the same bits, however they are cut, stored, scheduled or finished."""

import hashlib
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import dask.array as da
import numpy as np
import pytest
import zarr
from conftest import shorten_searches, write_store
from distributed import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from cme_dask import ConditionalMeanEmbedding, JointDistribution, Tuning, kernels
from cme_dask.numerics.reduction import RowRange, plan_ranges, strip_length, tree_merges, tree_sum

N = 10_001  # three strips, the last one short


def table(n=N, seed=3):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 2))
    Y = np.column_stack([np.sin(X[:, 0]), X[:, 1]]) + 0.3 * rng.standard_normal((n, 2))
    return X, Y, rng.exponential(size=n)


X, Y, W = table()
PIVOTS = (X[:40], Y[:30])


def above(y):
    return (y[:, 0] > 0.3) * 1.0


def fit(*data, scheduler="synchronous", weights=None, workers=None, pivots=PIVOTS, **functions):
    model = JointDistribution(
        kernel_x=kernels.Gaussian(0.9), kernel_y=kernels.Matern(1.5, 2.5), pivots=pivots
    )
    return model.fit(
        *data,
        weights=weights,
        functions={"above": above, **functions},
        scheduler=scheduler,
        workers=workers,
    )


def bits(model):
    digest = hashlib.sha256()
    for array in (*model.moments_.to_arrays().values(), model.coef_, model.expect("above", X[:50])):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def reference():
    return {False: bits(fit(X, Y)), True: bits(fit(X, Y, weights=W))}


def test_reference_depends_on_the_rows(reference):
    other = X.copy()
    other[5000, 0] += 1e-9
    assert bits(fit(other, Y)) != reference[False]
    assert reference[False] != reference[True]


cuts = st.lists(st.integers(1, N - 1), max_size=8, unique=True).map(
    lambda edges: tuple(np.diff([0, *sorted(edges), N]).tolist())
)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    chunks=cuts,
    chunks_y=cuts,
    threads=st.integers(1, 4),
    weighted=st.booleans(),
)
def test_any_dask_chunks_and_threads(reference, chunks, chunks_y, threads, weighted):
    arrays = (da.from_array(X, chunks=(chunks, 1)), da.from_array(Y, chunks=(chunks_y, 2)))
    weights = da.from_array(W, chunks=(chunks_y,)) if weighted else None
    model = fit(*arrays, scheduler="threads", workers=threads, weights=weights)
    assert bits(model) == reference[weighted]


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(chunk_rows=st.integers(150, N + 5), threads=st.integers(1, 4), weighted=st.booleans())
def test_any_store_chunks(reference, tmp_path_factory, chunk_rows, threads, weighted):
    path = tmp_path_factory.mktemp("store") / "s.zarr"
    write_store(path, X, Y, W if weighted else None, chunk_rows=chunk_rows)
    assert bits(fit(path, scheduler="threads", workers=threads)) == reference[weighted]


def test_foreign_zarr_arrays_with_unlike_chunks(reference, tmp_path):
    x = zarr.create_array(str(tmp_path / "x"), shape=X.shape, chunks=(777, 1), dtype="f8")
    y = zarr.create_array(str(tmp_path / "y"), shape=Y.shape, chunks=(4000, 2), dtype="f8")
    x[...], y[...] = X, Y
    assert bits(fit(str(tmp_path / "x"), str(tmp_path / "y"))) == reference[False]
    assert bits(fit(x, y, scheduler="threads")) == reference[False]


def test_any_completion_order(reference):
    """Tasks that end in another order every time, by sleeping at random."""
    rng, lock, order = np.random.default_rng(0), threading.Lock(), []

    def restless(y):
        with lock:
            order.append(len(y))
            pause = rng.uniform(0, 0.02)
        time.sleep(pause)
        return np.zeros(len(y))

    seen = {
        bits_without(fit(X, Y, scheduler="threads", workers=4, late=restless)) for _ in range(5)
    }
    assert len(order) > 10
    assert seen == {bits_without(fit(X, Y, late=lambda y: np.zeros(len(y))))}


def bits_without(model):
    return hashlib.sha256(model.moments_.gram.tobytes()).hexdigest()


def test_processes(reference, tmp_path):
    write_store(tmp_path / "s.zarr", X, Y, chunk_rows=1500)
    assert bits(fit(tmp_path / "s.zarr", scheduler="processes", workers=2)) == reference[False]


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(
    chunk_rows=st.integers(501, N),
    weighted=st.booleans(),
    source=st.sampled_from(["store", "numpy", "dask"]),
)
def test_cluster(reference, cluster, tmp_path_factory, chunk_rows, weighted, source):
    weights = W if weighted else None
    if source == "store":
        path = tmp_path_factory.mktemp("store") / "s.zarr"
        write_store(path, X, Y, weights, chunk_rows=chunk_rows)
        model = fit(path, scheduler=cluster)
    elif source == "numpy":  # an active client is what Dask uses by default, hence so do we
        model = fit(X, Y, weights=weights, scheduler=None)
    else:
        lazy = [da.from_array(a, chunks=chunk_rows) for a in (X, Y)]
        model = fit(*lazy, weights=weights, scheduler=cluster)
    assert bits(model) == reference[weighted]


def test_client_in_this_process(reference):
    with Client(
        processes=False, n_workers=1, threads_per_worker=2, dashboard_address="127.0.0.1:0"
    ) as client:
        before = [pool["num_threads"] for pool in threadpool_info()]
        assert bits(fit(X, Y, scheduler=client)) == reference[False]
        assert [pool["num_threads"] for pool in threadpool_info()] == before


def test_any_number_of_blas_threads(reference):
    """Sums and factorisations depend on the number of BLAS threads: a fit sets it itself."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((9000, 3))
    y = x[:, :1] + rng.standard_normal((9000, 1))
    quick = Tuning(rows=600, max_rank=60, evaluations=2, trees=("shallow", "forest"))
    learned = JointDistribution(
        kernel_x=kernels.Gaussian(1.0), tol=4e-3, max_rank=300, tuning=quick, calibration=False
    )
    printed = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            learned.fit(x, y)
            assert learned.basis_x_.rank > 150
            made = learned.coef_.tobytes() + learned.moments_.gram.tobytes()
            printed.append((hashlib.sha256(made).hexdigest(), bits(fit(X, Y))))
    assert printed[0] == printed[1]
    assert printed[0][1] == reference[False]


@pytest.mark.slow
def test_a_choice_from_many_rows_depends_on_no_number_of_blas_threads():
    """OpenBLAS adds up 40,000 products in as many parts as it has threads."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60_000, 1))
    y = np.sin(x) + 0.3 * rng.standard_normal(x.shape)
    quick = Tuning(rows=300, max_rank=20, evaluations=0, trees=())
    options = {"max_rank": 12, "sample_size": len(x), "support_size": 30, "n_folds": 2}
    given = {"kernel_x": "median", "kernel_y": "median", "residual": True, "tol": 1e-3}
    each = (
        JointDistribution(**given, **options),
        JointDistribution(tuning=quick, **options),
        ConditionalMeanEmbedding(max_rank=12, sample_size=len(x)),
    )
    for estimator in each:
        found = []
        for threads in (1, 2, 3):
            with threadpool_limits(threads, user_api="blas"):
                state = estimator.fit(x, y, scheduler="synchronous").model_.to_state()
            found.append({name: values.tobytes() for name, values in state.arrays.items()})
        assert found[0] == found[1] == found[2]


def test_blas_threads_are_given_back():
    before = [pool["num_threads"] for pool in threadpool_info()]
    with ThreadPoolExecutor(4) as pool:
        fits = [pool.submit(fit, X, Y, scheduler="threads", workers=1) for _ in range(4)]
        digests = {bits(f.result()) for f in fits}
    assert len(digests) == 1
    assert [pool["num_threads"] for pool in threadpool_info()] == before


@pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")  # few of them are enough
def test_sampled_pivots_are_the_same_from_any_source(tmp_path, monkeypatch):
    """Stores, NumPy and Dask draw the same row sample, hence the same pivots and the same bits."""
    shorten_searches(monkeypatch, rows=300, max_rank=30, evaluations=1)
    rows = X[:5000], Y[:5000]  # two strips, the last one short
    write_store(tmp_path / "s.zarr", *rows, chunk_rows=1234)
    lazy = [da.from_array(a, chunks=3210) for a in rows]
    fits = [
        JointDistribution(tol=1e-3, max_rank=40).fit(*data, functions={"above": above})
        for data in ((tmp_path / "s.zarr",), rows, lazy)
    ]
    assert len({bits(model) for model in fits}) == 1


def test_sorted_table(tmp_path):
    """A sorted table gives the sample no bias: the trace error over all rows still holds."""
    n = 200_000
    x = np.sort(np.random.default_rng(0).uniform(0, 1, n))
    y = x + 0.1 * np.random.default_rng(1).standard_normal(n)
    write_store(tmp_path / "s.zarr", x, y, chunk_rows=20_000)
    model = JointDistribution(kernel_x=kernels.Gaussian(0.05), kernel_y="median", tol=1e-4)
    model.fit(tmp_path / "s.zarr")
    assert model.basis_x_.trace_error <= 1e-4
    pivots = np.sort(model.basis_x_.pivots[:, 0])
    assert pivots[0] < 0.02
    assert pivots[-1] > 0.98
    query = np.linspace(0.1, 0.9, 9)[:, None]
    mean, std = model.expect("y0", query, return_std=True)
    assert (np.abs(mean - query[:, 0]) < 5 * std + 1e-3).all()


def test_shuffled_storage(tmp_path):
    """Another order of the rows is another order of summation: equal to rounding."""
    order = np.random.default_rng(0).permutation(N)
    write_store(tmp_path / "s.zarr", X[order], Y[order], chunk_rows=999)
    ours, theirs = fit(tmp_path / "s.zarr"), fit(X, Y)
    gram, other = (each.moments_.gram.sum(axis=0) for each in (ours, theirs))
    assert np.linalg.norm(gram - other) <= 1e-13 * np.linalg.norm(other)
    assert np.abs(ours.expect("above", X[:99]) - theirs.expect("above", X[:99])).max() < 1e-9


def test_duplicated_table_equals_weights_of_two(tmp_path):
    some = slice(0, 3000)
    twice = (np.concatenate([X, X[some]]), np.concatenate([Y, Y[some]]))
    weights = np.ones(N)
    weights[some] = 2.0
    write_store(tmp_path / "s.zarr", *twice, chunk_rows=4321)
    ours, theirs = fit(tmp_path / "s.zarr"), fit(X, Y, weights=weights)
    query = X[:99]
    assert np.abs(ours.expect("above", query) - theirs.expect("above", query)).max() < 1e-9
    assert np.abs(ours.density_ratio(query, Y[:99]) - theirs.density_ratio(query, Y[:99])).max() < (
        1e-8
    )


def test_chosen_kernels_and_pivots_see_the_weights():
    """With everything left to the fit, too, rows of weight two count like two rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3000, 1))
    y = x + 0.5 * rng.standard_normal((3000, 1))
    weights = np.where(y[:, 0] > 1, 9.0, 1.0)
    repeat = np.repeat(np.arange(3000), weights.astype(int))
    options = {"kernel_x": "median", "kernel_y": "median", "tol": 1e-4}
    ours, theirs = (
        JointDistribution(**options).fit(x, y, weights=weights),
        JointDistribution(**options).fit(x[repeat], y[repeat]),
    )
    for a, b in ((ours.basis_x_, theirs.basis_x_), (ours.basis_y_, theirs.basis_y_)):
        (mine,), (other,) = a.newton.kernel.length_scale, b.newton.kernel.length_scale
        assert abs(mine / other - 1) < 0.1
    query = np.linspace(-1, 1, 5)[:, None]
    assert np.abs(ours.expect("y0", query) - theirs.expect("y0", query)).max() < 0.02


def test_weights_count_up_to_a_factor():
    ours, theirs = fit(X, Y, weights=W), fit(X, Y, weights=1000.0 * W)
    assert np.abs(ours.expect("above", X[:99]) - theirs.expect("above", X[:99])).max() < 1e-10


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=70), power=st.integers(0, 5))
def test_tree_sum_does_not_see_the_length_of_runs(values, power):
    size = 1 << power
    runs = [tree_sum(values[i : i + size]) for i in range(0, len(values), size)]
    nodes = list(runs)
    for a, b in tree_merges(len(runs)):
        nodes.append(nodes[a] + nodes[b])
    assert nodes[-1] == tree_sum(values)


@given(
    n=st.integers(2, 10**9),
    chunk=st.integers(0, 10**7),
    workers=st.integers(1, 512),
    seconds=st.floats(1e-9, 1e-3),
)
def test_runs_cover_the_rows_with_few_tasks(n, chunk, workers, seconds):
    runs = plan_ranges(n, chunk, workers, seconds)
    length = strip_length(n)
    assert runs[0].start == 0
    assert runs[-1].stop == n
    assert all(a.stop == b.start for a, b in itertools.pairwise(runs))
    size = runs[0].stop - runs[0].start if len(runs) > 1 else length
    assert size % length == 0
    assert (size // length) & (size // length - 1) == 0
    assert all(isinstance(run, RowRange) and run.start % size == 0 for run in runs)
    # Runs are powers of two of strips: at most half of the workers are left without a task.
    assert 2 * len(runs) * max(-(-n // workers), length) >= n
    if len(runs) > 1:  # and there are few of them
        assert 2 * size >= min(int(2 / seconds), n // (16 * workers))


def test_strip_length_depends_on_n_alone():
    assert [strip_length(n) for n in (2, 10**5, 10**6, 3 * 10**6, 10**7, 10**8, 10**9)] == [
        *(1 << 12, 1 << 12, 1 << 14, 1 << 15),
        *(1 << 17, 1 << 18, 1 << 18),
    ]
