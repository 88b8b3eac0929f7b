"""Passes on an NVIDIA GPU, by CuPy and by PyTorch, beside the same passes in NumPy.

Skipped where there is no GPU. The same code runs everywhere on a simulated device
(test_reductions.py), which can't know what a GPU's library refuses, or how much it holds.
"""

import contextlib
import importlib
import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import shorten_searches, write_store
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from test_kernels import COMPOSED, SIMPLE
from test_reductions import (
    THREADS,
    assert_same,
    finalized,
    moments_and_cells,
    rows,
    two_strips,
)

from cme_dask import (
    ConditionalMeanEmbedding,
    JointClassifier,
    JointDistribution,
    MulticlassEmbedding,
    PivotedCholesky,
    TransferOperator,
    drift_report,
    independence_test,
    kernels,
    load,
    open_sample,
)
from cme_dask.errors import ResourceError
from cme_dask.kernels import evaluator
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.devices import Device
from cme_dask.numerics.reduction import reduce_strips
from cme_dask.reductions import RunOptions, run


def available():
    """What the GPUs of this machine can be named by, as far as a library for them is here."""
    found = {}
    with contextlib.suppress(Exception):  # no library, no driver: what they raise differs
        if importlib.import_module("cupy").cuda.runtime.getDeviceCount():
            found["cupy"] = "cuda"
    with contextlib.suppress(ImportError):
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            found["torch"] = torch.device("cuda:0")
    return found


DEVICES = available()
if not DEVICES:
    pytest.skip("no GPU, or no library for one", allow_module_level=True)

SPAWNS = True  # processes that start anew: a forked one can't use the GPU of its parent
RANK = pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")


@pytest.fixture(params=list(DEVICES))
def device(request):
    return DEVICES[request.param]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    x, y, w = rows()
    return write_store(tmp_path_factory.mktemp("store") / "s", x, y - 51.0, w, chunk_rows=3000)


@pytest.mark.parametrize("single", [False, True])
def test_products_are_those_of_numpy(device, single):
    """Wide and narrow matrices, whole and as parts of longer rows."""
    rng, place = np.random.default_rng(0), Device.of(device).place
    for m, n in ((1, 1), (5, 7), (200, 3000), (333, 100)):
        held = rng.normal(size=(m, n + 3)).astype(np.float32 if single else np.float64)
        for part in (slice(None), slice(0, n)):
            rows, theirs = held[:, part], place(held)[:, part]
            out, other = (place(np.full((m, m), fill, dtype=held.dtype)) for fill in (0.0, 1.0))
            evaluator.rank_update(out, theirs)
            evaluator.add_rank_update(other, theirs, out)
            expected = np.triu(rows @ rows.T)
            close = {"rtol": 1e-4 if single else 1e-12, "atol": 1e-3 if single else 1e-11}
            for found, added in ((out, 0.0), (other, 1.0)):
                triangle = np.triu(evaluator.to_numpy(found) - added)
                assert_allclose(triangle, expected, **close)


@pytest.mark.parametrize("kernel", [*SIMPLE, *COMPOSED, kernels.Categorical(0.7)], ids=repr)
def test_kernels_and_bases_are_those_of_numpy(device, kernel):
    """Rows with duplicates, pivots among the rows, and one row far away."""
    rng, place = np.random.default_rng(0), Device.of(device).place
    X = np.round(rng.normal(size=(300, 3)), 1)
    X[7], Z = 60.0, X[:12].copy()
    block = kernel(place(X), place(Z))
    assert_allclose(evaluator.to_numpy(block), kernel(X, Z), rtol=1e-10, atol=1e-12)
    basis = NewtonBasis.from_points(kernel, Z[:9] + 0.01 * rng.normal(size=(9, 3)))
    expected = basis(X)
    theirs = evaluator.to_numpy(basis.evaluator(place(X)).values(place(X)))
    assert_allclose(theirs, expected, rtol=1e-7, atol=1e-9 * np.abs(expected).max())


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_moments_and_cells_are_those_of_numpy(device, single, weighted):
    reductions, strips, ours = two_strips(single, weighted)
    n, theirs = reduce_strips(reductions, strips, Device.of(device).place)
    assert n == 9000
    assert_same(reductions, finalized(reductions, ours), finalized(reductions, theirs), single)


def test_schedulers_and_resumed_runs_have_the_same_bits(device, store, tmp_path, cluster):
    x, y, w = rows()
    sample, reductions = open_sample(store), moments_and_cells(x, y - 51.0, w)
    ours, _ = run(sample, reductions, THREADS)
    options = RunOptions("synchronous", device=device, checkpoint=tmp_path / "c")
    first, report = run(sample, reductions, options)
    assert report.tasks > 1
    assert_same(reductions, ours, first)
    resumed, report = run(sample, reductions, options)
    assert report.resumed_strips == report.strips
    others = [RunOptions("threads", 4, device=device), RunOptions("processes", 2, device=device)]
    others.append(RunOptions(cluster, device=device))
    for other in (resumed, *(run(sample, reductions, one)[0] for one in others)):
        assert_array_equal(other[0].gram, first[0].gram)
        assert_array_equal(other[2].masses, first[2].masses)


def sine(n=6000):
    rng = np.random.default_rng(3)
    x = rng.uniform(-3.0, 3.0, size=(n, 2))
    return x, np.sin(x[:, :1]) + 0.2 * (1.5 + np.cos(x[:, 1:])) * rng.normal(size=(n, 1))


def labels(x):
    return np.where(x[:, 0] > 1.0, "far", np.where(x[:, 1] > 0.0, "up", "down"))


FITS = {
    "joint": (JointDistribution(random_state=0), "y"),
    "joint-median": (JointDistribution(kernel_x="median", kernel_y="median", tol=1e-3), "y"),
    "certified": (
        JointDistribution(
            kernel_x="median", kernel_y="median", constraint="certified", max_rank=10
        ),
        "y",
    ),
    "embedding": (ConditionalMeanEmbedding(random_state=0), "y"),
    "leave-one-out": (
        ConditionalMeanEmbedding(
            kernel_x="median", kernel_y="median", validation="leave-one-out", max_rank=50
        ),
        "y",
    ),
    "classifier": (JointClassifier(random_state=0), "labels"),
    "multiclass": (MulticlassEmbedding(random_state=0), "labels"),
}


@RANK
@pytest.mark.parametrize("name", FITS)
def test_fits_answer_as_those_of_the_host(name, device, tmp_path, monkeypatch):
    """Kernels and folds are those of the host: only sums over rows are computed elsewhere."""
    shorten_searches(monkeypatch)
    fit, target = FITS[name]
    x, y = sine()
    y = y if target == "y" else labels(x)
    place = {"scheduler": "threads", "workers": 2}
    host = clone(fit).fit(x, y, **place)
    here = clone(fit).fit(x, y, device=device, **place)
    here.save(tmp_path / "m")
    ask = "predict" if target == "y" else "predict_proba"
    models = host, here, load(tmp_path / "m")
    expected, *others = (np.ravel(getattr(model, ask)(x[:50])) for model in models)
    for answers in others:
        assert_allclose(answers, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    if hasattr(fit, "conditional") and target == "y":
        law, theirs = (one.conditional(x[:50]) for one in (host, here))
        levels = [0.1, 0.5, 0.9]
        assert_allclose(theirs.quantile(levels), law.quantile(levels), rtol=1e-3, atol=1e-3)


@RANK
def test_other_methods_answer_as_those_of_the_host(device):
    x, y = sine()
    on_host = {"scheduler": "threads", "workers": 2}
    both = on_host, on_host | {"device": device}
    basis, operator = PivotedCholesky(kernels.Gaussian(1.0), max_rank=30), TransferOperator()
    one, other = (clone(basis).fit(x, **place).transform(x[:50]) for place in both)
    assert_allclose(other, one, rtol=1e-9, atol=1e-9)
    one, other = (clone(operator).fit(np.sin(x), **place).eigenvalues_ for place in both)
    assert_allclose(np.sort(abs(other)), np.sort(abs(one)), rtol=1e-5, atol=1e-7)
    one, other = (independence_test(x, y, random_state=0, **place) for place in both)
    assert other.pvalue == pytest.approx(one.pvalue, abs=1e-6)
    kernel = {"kernel_x": "median", "kernel_y": "median", "tol": 1e-3}
    laws = (JointDistribution(**kernel).fit(x, y, **place).model_ for place in both)
    one, other = (drift_report(law, x, y + 0.1, random_state=0, **on_host) for law in laws)
    assert other.y_given_x.statistic == pytest.approx(one.y_given_x.statistic, rel=1e-3)


def test_memory_of_the_device_is_predicted_and_refused(store):
    """What CuPy's pool has taken in the end is what it held at most."""
    if "cupy" not in DEVICES:
        pytest.skip("only CuPy counts what it holds")
    pool = importlib.import_module("cupy").get_default_memory_pool()
    x, y, w = rows()
    sample, reductions = open_sample(store), moments_and_cells(x, y - 51.0, w)
    pool.free_all_blocks()
    options = RunOptions("threads", 2, device="cuda")
    run(sample, reductions, options)
    held = pool.total_bytes()
    with pytest.raises(ResourceError, match="the device would need") as refused:
        run(sample, reductions, replace(options, device_memory_limit=held // 4))
    predicted = float(re.search(r"need ([0-9.]+) MiB", str(refused.value))[1]) * 2**20
    assert held <= predicted
    run(sample, reductions, replace(options, device_memory_limit=int(1.01 * predicted)))


def test_a_gpu_that_is_not_there_is_named(store):
    x, y, w = rows()
    with pytest.raises(ResourceError, match="the device 63 of cupy can't be used here"):
        run(
            open_sample(store),
            moments_and_cells(x, y - 51.0, w),
            RunOptions("synchronous", device="cuda:63"),
        )
