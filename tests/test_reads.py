"""Passes are counted where chunks are read: at the Zarr store."""

import threading
from collections import Counter

import dask.array as da
import numpy as np
import pytest
import zarr
from conftest import write_store
from zarr.storage import LocalStore, WrapperStore

from cme_dask import JointDistribution, PivotedCholesky, kernels
from cme_dask.data.generate import write_normal3
from cme_dask.data.sources import ahead
from cme_dask.errors import DataError, StoreError
from cme_dask.numerics.rows import NearestRows
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.run import run_pass
from cme_dask.passes.sources import open_sample

THREADS = RunOptions("threads", 2).executor()


class CountingStore(WrapperStore):
    """A store that notes every key that is read."""

    def __init__(self, store):
        super().__init__(store)
        self.reads = Counter()

    async def get(self, key, prototype, byte_range=None):
        self.reads[key] += 1
        return await self._store.get(key, prototype, byte_range)

    def chunks(self, array):
        """Number of reads of each chunk of an array."""
        prefix = f"{array}/c/"
        return {key: count for key, count in self.reads.items() if key.startswith(prefix)}


def opened(path):
    store = CountingStore(LocalStore(path, read_only=True))
    return store, zarr.open_group(store, mode="r")


@pytest.mark.slow
def test_the_demo_reads_every_chunk_once(tmp_path, brief_search):
    write_normal3(tmp_path / "n.zarr", 1_000_000)
    store, group = opened(tmp_path / "n.zarr")
    model = JointDistribution(tol=1e-3, residual=False).fit(group, scheduler="threads", workers=2)
    for name in ("x", "y"):
        counts = store.chunks(name)
        assert len(counts) == -(-group[name].shape[0] // group[name].chunks[0])
        assert set(counts.values()) == {1}
    for name in ("keys", "index", "x", "y"):
        assert set(store.chunks(f"row_sample/{name}").values()) == {1}
    assert model.n_passes_ == 1


@pytest.mark.parametrize("chunk_rows", [500, 5000, 4097, 30_000, 70_000])
def test_at_most_one_straddled_chunk_per_task(tmp_path, chunk_rows):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((70_000, 2))
    weights = rng.uniform(1, 2, size=len(x))
    write_store(tmp_path / "s.zarr", x, x[:, 0], weights, chunk_rows=chunk_rows)
    store, group = opened(tmp_path / "s.zarr")
    model = JointDistribution(
        kernel_x=kernels.Gaussian(2.0), kernel_y=kernels.Gaussian(2.0), tol=1e-1, residual=False
    ).fit(group, scheduler="threads", workers=3)
    for name in ("x", "y", "weights"):
        counts = store.chunks(name)
        assert len(counts) == -(-len(x) // chunk_rows)
        assert sum(counts.values()) <= len(counts) + model.report_.tasks - 1


def test_memory_is_refused_before_any_row_is_read(tmp_path):
    from cme_dask.errors import ResourceError

    write_normal3(tmp_path / "n.zarr", 100_000)
    store, group = opened(tmp_path / "n.zarr")
    with pytest.raises(ResourceError, match="lower max_rank"):
        JointDistribution().fit(group, memory_limit="10MB")
    assert not store.chunks("x")
    assert not store.chunks("y")


def test_pivots_are_refused_when_they_pass_what_memory_allows(tmp_path):
    """The rank that does not fit is met while pivots are chosen, not after all of them."""
    from cme_dask.errors import ResourceError

    rng = np.random.default_rng(0)
    x = rng.standard_normal((20_000, 8))
    ranks = []
    model = JointDistribution(kernel_x=kernels.Gaussian(1.0), kernel_y="median", tol=1e-4)
    with pytest.raises(ResourceError, match=r"this machine would need .* lower max_rank"):
        model.fit(
            x,
            x[:, :1],
            memory_limit="350MB",
            progress=lambda event: ranks.append(getattr(event.detail, "rank", 0)),
        )
    assert 16 <= max(ranks) < 500  # tol asks for thousands


def test_every_block_of_a_dask_array_is_computed_once_per_pass():
    """X and y are parts of one array: its blocks are made once for both, in each pass."""
    rows, seen = np.random.default_rng(0).standard_normal((400_000, 3)), Counter()

    def block(rows, block_info=None):
        seen[block_info[0]["array-location"][0][0]] += 1
        return rows

    lazy = da.from_array(rows, chunks=(65_536, 3)).map_blocks(
        block, dtype=float, meta=np.empty((0, 0))
    )
    model = JointDistribution(
        kernel_x=kernels.Gaussian(2.0), kernel_y=kernels.Gaussian(2.0), tol=1e-1
    ).fit(lazy[:, :2], lazy[:, 2:], scheduler="threads", workers=2)
    assert model.n_passes_ == 2  # the row sample was gathered
    assert len(seen) == 7
    assert set(seen.values()) == {2}


@pytest.mark.parametrize(("chunk_rows", "workers"), [(50_000, 1), (100_000, 2), (65_536, 2)])
def test_tasks_are_no_shorter_than_chunks(tmp_path, chunk_rows, workers):
    """Chunks that fit no strip are straddled, but tasks are long enough that few are."""
    x = np.random.default_rng(0).standard_normal((500_000, 1))
    write_store(tmp_path / "s.zarr", x, x, chunk_rows=chunk_rows)
    store, group = opened(tmp_path / "s.zarr")
    kernel = kernels.Gaussian(1.0)
    JointDistribution(kernel_x=kernel, kernel_y=kernel, tol=1e-1, residual=False).fit(
        group, scheduler="threads", workers=workers
    )
    counts = store.chunks("x")
    assert sum(counts.values()) <= 1.4 * len(counts)


def test_transformer_reads_x_alone_and_once(tmp_path):
    write_normal3(tmp_path / "n.zarr", 100_000)
    store, group = opened(tmp_path / "n.zarr")
    model = PivotedCholesky(tol=1e-3).fit(group)
    assert set(store.chunks("x").values()) == {1}
    assert not store.chunks("y")
    assert model.n_passes_ == 1


@pytest.mark.parametrize("positive", [None, 25_000, 150])
def test_nearest_rows_take_one_pass_and_equal_a_full_sort(tmp_path, positive):
    """Without weights, and with so many of them positive: rows of weight zero are no neighbours."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30_000, 3)).round(1), rng.standard_normal((30_000, 2))
    weights = np.ones(len(x)) if positive is None else rng.uniform(1.0, 2.0, size=len(x))
    weights[rng.permutation(len(x))[positive:] if positive else []] = 0.0
    stored = None if positive is None else weights
    write_store(tmp_path / "s.zarr", x, y, stored, chunk_rows=4096)
    store, group = opened(tmp_path / "s.zarr")
    points, scale = rng.standard_normal((4, 3)).round(1), np.array([1.0, 2.0, 0.5])
    (found,), _ = run_pass(open_sample(group), [NearestRows(points, 200, scale)], THREADS)
    for name in ("x", "y") if positive is None else ("x", "y", "weights"):
        assert set(store.chunks(name).values()) == {1}
    assert found.index.shape == found.weights.shape == (4, min(200, positive or 200))
    for i, point in enumerate(points):
        distance = np.sqrt((((x - point) / scale) ** 2).sum(axis=1))
        distance[weights == 0.0] = np.inf
        order = np.argsort(distance, kind="stable")[: found.index.shape[1]]
        assert (found.distance[i] == distance[order]).all()
        assert (found.index[i] == order).all()
        assert (found.y[i] == y[found.index[i]]).all()
        assert (found.weights[i] == weights[found.index[i]]).all()


def test_points_at_no_finite_distance_have_no_neighbours(tmp_path):
    write_store(tmp_path / "s.zarr", np.zeros((50, 2)), np.zeros((50, 1)), chunk_rows=50)
    nearest = NearestRows(np.array([[0.0, np.nan]]), 5, np.ones(2))
    with pytest.raises(DataError, match="no row of positive weight is at a finite distance"):
        run_pass(open_sample(tmp_path / "s.zarr"), [nearest], THREADS)


def test_reading_is_one_item_ahead_of_use():
    fetched = [threading.Event() for _ in range(4)]

    def items():
        for number, event in enumerate(fetched):
            event.set()
            yield number

    used = []
    for number in ahead(items()):
        used.append(number)
        if number + 1 < len(fetched):
            assert fetched[number + 1].wait(10)  # while this one is in use
            assert not any(event.is_set() for event in fetched[number + 2 :])
    assert used == [0, 1, 2, 3]


def test_what_reading_raises_comes_through():
    def items():
        yield 1
        raise StoreError("damaged")

    reading = ahead(items())
    assert next(reading) == 1
    with pytest.raises(StoreError, match="damaged"):
        next(reading)
    assert list(ahead(iter(()))) == []


def test_reading_that_was_abandoned_is_not_waited_for():
    """It may wait for the thread in which the garbage collector closes it."""
    begun, go, waited = threading.Event(), threading.Event(), []

    def items():
        yield 0
        begun.set()
        waited.append(go.wait(20))
        yield 1

    before = set(threading.enumerate())
    reading = ahead(items())
    assert next(reading) == 0
    new = set(threading.enumerate()) - before
    (thread,) = (each for each in new if each.name.startswith("read-ahead"))
    assert begun.wait(20)
    reading.close()
    assert not waited
    go.set()
    thread.join(20)
    assert not thread.is_alive()
    assert waited == [True]
