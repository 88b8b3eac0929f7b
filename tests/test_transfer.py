"""Transfer operators: spectra of linear systems, dense forms, trajectories with gaps."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import zarr
from click.testing import CliRunner
from conftest import write_store
from scipy.linalg import eig
from scipy.signal import lfilter
from scipy.special import eval_hermitenorm, factorial
from sklearn.base import clone
from test_reads import CountingStore
from zarr.storage import LocalStore

from benchmarks import koopman
from benchmarks.__main__ import cli
from cme_dask import JointDistribution, TransferOperator, kernels, load, open_sample
from cme_dask.data.trajectories import pairs
from cme_dask.errors import DataError, StoreError
from cme_dask.numerics.folds import Folding
from cme_dask.numerics.rows import BadValueCounts
from cme_dask.passes import fit as passes_of_fits
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.run import run_pass

GAUSSIAN = kernels.Gaussian(1.5)
PIVOTS = np.linspace(-3.0, 3.0, 6)[:, None]
DECAY = np.exp(-0.25)  # theta = 1, dt = 0.25


def ornstein_uhlenbeck(n, seed=0, decay=DECAY):
    noise = np.sqrt(1.0 - decay**2) * np.random.default_rng(seed).normal(size=n)
    noise[0] /= np.sqrt(1.0 - decay**2)
    return lfilter([1.0], [1.0, -decay], noise)[:, None]


@pytest.fixture(scope="module")
def fit():
    x = ornstein_uhlenbeck(200_000)
    functions = {"square": lambda x: x[:, 0] ** 2}
    return TransferOperator(GAUSSIAN, tol=1e-6).fit(x, functions=functions)


def test_spectrum_of_the_ornstein_uhlenbeck_process(fit):
    """Eigenvalues exp(-k theta dt), eigenfunctions of Hermite."""
    assert fit.n_passes_ == 1
    assert fit.report_.rows == 199_999
    np.testing.assert_allclose(fit.eigenvalues_[:4], DECAY ** np.arange(4), atol=0.015)
    np.testing.assert_allclose(fit.eigenvalues_[4], DECAY**4, atol=0.03)
    at = np.linspace(-2.0, 2.0, 41)[:, None]
    functions = fit.model_.eigenfunctions(at, 4)
    weight = np.exp(-(at[:, 0] ** 2) / 2)
    for k in range(4):
        hermite = eval_hermitenorm(k, at[:, 0]) / np.sqrt(factorial(k))
        sign = np.sign((weight * functions[:, k]) @ hermite)
        error = np.sqrt(np.average((sign * functions[:, k] - hermite) ** 2, weights=weight))
        assert error < 0.1


def test_forecasts_of_observables(fit):
    at = np.array([[-1.0], [0.5], [1.5]])
    for h in (1, 2, 7):
        values = fit.model_.forecast(at, h, ["x0", "square"])
        expected = np.hstack([DECAY**h * at, 1.0 + DECAY ** (2 * h) * (at**2 - 1.0)])
        np.testing.assert_allclose(values, expected, atol=0.05)
    np.testing.assert_allclose(
        fit.model_.forecast(at, [7, 1], "square"),
        [fit.model_.forecast(at, h, "square") for h in (7, 1)],
    )
    np.testing.assert_array_equal(fit.predict(at), fit.model_.forecast(at))
    # By its modes, a forecast is a sum over eigenfunctions.
    model, h = fit.model_, 3
    modes = model.modes()
    terms = (model.eigenfunctions(at) * model.eigenvalues ** (h - 1)) @ modes
    by_modes = model.means + terms
    np.testing.assert_allclose(by_modes, model.forecast(at, h, model.names), atol=1e-5)


def test_columns_of_labels_have_no_forecast():
    x = ornstein_uhlenbeck(300)
    label = np.where(x[:, 0] > 0.0, "up", "down")
    frame = pd.DataFrame({"label": label, "level": x[:, 0]})
    kernel = kernels.Categorical(1.0).on(0) * kernels.Gaussian(0.7).on(1)
    fit = TransferOperator(kernel, reg=1e-3, tol=1e-2)
    model = fit.fit(frame, functions={"up": "label == 'up'"}).model_
    rows = frame[:4]
    level = model.forecast(rows, f="level")
    np.testing.assert_array_equal(fit.predict(rows), level[:, None])
    np.testing.assert_array_equal(model.forecast(rows, [1, 2])[0], level[:, None])
    assert np.ptp(model.forecast(rows, f="up")) > 0.0
    for names in ("label", ["level", "label"]):
        with pytest.raises(DataError, match="'label' holds labels, which have no mean: declare"):
            model.forecast(rows, f=names)
    only = TransferOperator(kernels.Categorical(1.0), reg=1e-3).fit(frame[["label"]])
    with pytest.raises(DataError, match="'label' holds labels, which have no mean: declare"):
        only.predict(rows)


def test_complex_eigenvalues_of_a_rotation():
    rng, turn = np.random.default_rng(1), 0.9 * np.exp(0.5j)
    noise = rng.normal(size=50_000) + 1j * rng.normal(size=50_000)
    z = lfilter([1.0], [1.0, -turn], noise) * np.sqrt((1 - 0.81) / 2)
    x = np.column_stack([z.real, z.imag])
    values = TransferOperator(kernels.Gaussian(2.0), tol=1e-4).fit(x).eigenvalues_
    np.testing.assert_allclose(values[0], 1.0, atol=0.01)
    assert min(abs(values[1:3] - turn)) < 0.02
    assert min(abs(values[1:3] - turn.conjugate())) < 0.02


def test_a_fit_equals_its_dense_form():
    x, reg = ornstein_uhlenbeck(200, 2), 1e-3
    fit = TransferOperator(kernels.Laplace(0.8), reg=reg, pivots=x).fit(x)
    assert fit.basis_.rank == 200
    before, after = x[:-1], x[1:]
    kernel = kernels.Laplace(0.8)
    W = np.linalg.inv(kernel(before, before) + len(before) * reg * np.eye(len(before)))
    at = np.linspace(-1.5, 1.5, 9)[:, None]
    mean = after.mean()
    one = kernel(at, before) @ W
    three = one @ (kernel(after, before) @ W) @ (kernel(after, before) @ W)
    for h, weights in ((1, one), (3, three)):
        np.testing.assert_allclose(
            fit.model_.forecast(at, h)[:, 0], mean + weights @ (after - mean)[:, 0], atol=1e-8
        )
    section = fit.model_.operator.domain.embed(x[:1])
    np.testing.assert_allclose(
        fit.model_.operator(section)(at)[0], one @ kernel(after, x[:1])[:, 0], atol=1e-8
    )


def test_spectrum_modes_and_reduced_rank_equal_their_dense_form():
    x, reg, kernel = ornstein_uhlenbeck(200, 2), 1e-3, kernels.Laplace(0.8)
    options = {"reg": reg, "pivots": x}
    before, after, n = x[:-1], x[1:], len(x) - 1
    gram = kernel(before, before)
    W = np.linalg.inv(gram + n * reg * np.eye(n))
    at = np.linspace(-1.5, 1.5, 9)[:, None]
    section, rest = kernel(at, before), (after - after.mean())[:, 0]
    model = TransferOperator(kernel, **options).fit(x).model_
    values, left, right = eig(W @ kernel(after, before), left=True)
    leading = np.argsort(-np.abs(values))[:3]
    np.testing.assert_allclose(model.eigenvalues[:3], values[leading], atol=1e-8)
    left, right = left[:, leading], right[:, leading]
    right /= np.sqrt(np.mean(np.abs(gram @ right) ** 2, axis=0))
    modes = left.conj().T @ W @ rest / np.sum(left.conj() * right, axis=0)
    np.testing.assert_allclose(
        model.eigenfunctions(at, 3) * model.modes(3)[:, 0], (section @ right) * modes, atol=1e-6
    )
    reduced = TransferOperator(kernel, rank=3, **options).fit(x).model_
    values, w = eig(W @ kernel(after, after) @ gram / n)
    w = w[:, np.argsort(-values.real)[:3]].real
    w /= np.sqrt(np.einsum("ij,ik,kj->j", w, gram @ np.linalg.inv(W), w) / n)
    expected = after.mean() + section @ w @ (w.T @ gram @ rest) / n
    np.testing.assert_allclose(reduced.forecast(at)[:, 0], expected, atol=1e-8)
    values = eig(w @ w.T @ gram @ kernel(after, before) / n)[0]
    values = values[np.argsort(-np.abs(values))][:3]
    np.testing.assert_allclose(reduced.eigenvalues[:3], values, atol=1e-8)


def test_reduced_rank_is_the_best_of_its_rank():
    x, reg = ornstein_uhlenbeck(3000, 3), 1e-4
    options = {"reg": reg, "tol": 1e-4}
    whole = TransferOperator(GAUSSIAN, **options).fit(x)
    fit = TransferOperator(GAUSSIAN, rank=3, **options).fit(x)
    mean = fit.moments_.means()
    S, C = mean.blocks["x", "x"], mean.blocks["x", "y"]

    def risk(matrix):
        square = matrix.T @ (S + reg * np.eye(len(S))) @ matrix
        return np.trace(square) - 2.0 * np.sum(matrix * C)

    matrix = fit.model_.matrix
    assert np.linalg.matrix_rank(matrix, tol=1e-8) == 3
    u, s, vt = np.linalg.svd(whole.model_.matrix)
    assert risk(matrix) < risk((u[:, :3] * s[:3]) @ vt[:3])
    u, s, _ = np.linalg.svd(np.linalg.cholesky(S + reg * np.eye(len(S))).T @ whole.model_.matrix)
    assert risk(matrix) == pytest.approx(risk(whole.model_.matrix) + (s[3:] ** 2).sum(), rel=1e-8)
    np.testing.assert_allclose(fit.eigenvalues_[:3], DECAY ** np.arange(3), atol=0.1)
    full = TransferOperator(GAUSSIAN, rank=10_000, **options).fit(x)
    np.testing.assert_allclose(full.model_.matrix, whole.model_.matrix, atol=1e-8)


def test_the_best_of_several_kernels_and_ridges_is_chosen_in_one_pass():
    """The kernel by held-out joint losses: dense, over all pairs of held-out rows."""
    x = koopman.logistic_map(3_000, 0)
    several = [kernels.Gaussian(scale) for scale in (1.0, 0.05, 0.2)]
    options = {"tol": 1e-6, "n_folds": 3, "random_state": 0}
    fit = TransferOperator(several, **options).fit(x)
    alone = [TransferOperator(kernel, **options).fit(x) for kernel in several]
    assert fit.n_passes_ == alone[0].n_passes_ == 1
    best = int(fit.kernel_losses_[:, 0].argmin())
    assert best == 1  # the others are smoother than the map
    assert fit.basis_.newton.kernel == several[best]
    assert (fit.reg_, fit.basis_.rank) == (alone[best].reg_, alone[best].basis_.rank)
    np.testing.assert_array_equal(fit.model_.matrix, alone[best].model_.matrix)
    np.testing.assert_array_equal(fit.path_.losses, alone[best].path_.losses)
    assert alone[0].kernel_losses_ is None
    folds = Folding().folds(np.arange(2_999), {}, 3)
    for each, (loss, error) in zip(alone, fit.kernel_losses_, strict=True):
        newton, losses = each.basis_.newton, []
        before, after = newton(x[:-1]), newton(x[1:])
        for fold in range(3):
            rest, held = folds != fold, folds == fold
            (u, c), (v, d) = (centred(rows[rest], each.reg_) for rows in (before, after))
            joint = v.T @ (after[rest].T @ before[rest] / rest.sum()) @ u
            h = (after[held] @ v) @ (d[:, None] * joint * c) @ (before[held] @ u).T
            losses.append(np.mean(h**2) - 2.0 * (np.diag(h).mean() - h.mean()))
        shares = np.bincount(folds) / len(folds)
        assert loss == pytest.approx(shares @ losses, rel=1e-6)
        spread = shares**2 @ (losses - shares @ losses) ** 2 * 3 / 2
        assert error == pytest.approx(np.sqrt(spread), rel=1e-5)
    given = TransferOperator(several[1], reg=[1e-8, 1e-2], **options).fit(x)
    assert given.reg_ in (1e-8, 1e-2)
    assert len(given.path_.losses) == 2
    plan = TransferOperator(several, **options).plan(x)
    assert (plan.passes, plan.finalists) == (1, 3)
    ranks = [variable.rank for variable in plan.variables]
    assert ranks == [alone[0].basis_.rank] * 2


def centred(rows, reg):
    """Transform to centred eigenfunctions of the rows, and 1 / (lam + reg)."""
    mean, gram = rows.mean(axis=0), rows.T @ rows / len(rows)
    complement = np.linalg.svd(mean[None])[2][1:].T
    lam, vectors = np.linalg.eigh(complement.T @ gram @ complement)
    return complement @ vectors, 1.0 / (lam + reg)


def test_other_estimators_take_one_kernel():
    x = ornstein_uhlenbeck(300)
    with pytest.raises(DataError, match="kernel_x must be a kernel of"):
        JointDistribution(kernel_x=[GAUSSIAN], kernel_y=GAUSSIAN).fit(x, x)


def test_pairs_that_lack_a_value_are_left_out():
    """As those across gaps in time are; and the rest are pairs of the same rows."""
    x = ornstein_uhlenbeck(500, 4)
    x[np.random.default_rng(5).random(500) < 0.2] = np.nan
    known = np.flatnonzero(~np.isnan(x[:, 0]))
    sample = open_sample(x).drop_missing()
    options = {"reg": 1e-3, "pivots": PIVOTS, "lag": 2, "n_folds": 2}
    fit = TransferOperator(GAUSSIAN, **options).fit(sample)
    usable = np.isin(known + 2, known)
    assert fit.report_.rows == usable.sum()
    assert fit.model_.about["missing"]["rows"] == 498 - usable.sum()
    assert "left out; values by column" in repr(fit.model_)
    newton = fit.basis_.newton
    before, after = newton(x[known[usable]]), newton(x[known[usable] + 2])
    expected = np.linalg.solve(
        before.T @ before / usable.sum() + 1e-3 * np.eye(newton.rank),
        before.T @ after / usable.sum(),
    )
    np.testing.assert_allclose(fit.model_.matrix, expected, atol=1e-8)
    with pytest.raises(
        DataError, match=r"NaN or infinite: fill .*drop_missing\(\), which leaves"
    ) as e:
        TransferOperator(GAUSSIAN, **options).fit(x)
    assert "dropna" not in str(e.value)


def test_pairs_never_cross_trajectories_or_gaps(tmp_path):
    x = ornstein_uhlenbeck(9_000, 4)
    x[4000:] += 1.0
    group = np.repeat([3, 1, 3], 3000)
    time = np.arange(9000.0) * 60.0
    time[5000:] += 600.0
    weights = np.random.default_rng(5).uniform(0.5, 1.5, 9000)
    options = {"reg": 1e-3, "pivots": PIVOTS, "lag": 2}
    beside = {"group": group, "time": time, "weights": weights}
    fit = TransferOperator(GAUSSIAN, **options).fit(x, **beside)
    valid = (group[2:] == group[:-2]) & (time[2:] - time[:-2] == 120.0)
    assert valid.sum() == 9000 - 2 - 3 * 2
    newton, share = fit.basis_.newton, weights[:-2] * valid / (weights[:-2] * valid).sum()
    before, after = newton(x[:-2]), newton(x[2:])
    expected = np.linalg.solve(
        (before * share[:, None]).T @ before + 1e-3 * np.eye(newton.rank),
        (before * share[:, None]).T @ after,
    )
    np.testing.assert_allclose(fit.model_.matrix, expected, atol=1e-8)
    # From chunked arrays the same, in processes, too.
    chunks = {
        "x": (x, 700),
        "group": (group, 1100),
        "time": (time, 500),
        "weights": (weights, 9000),
    }
    stored = {
        name: zarr.create_array(str(tmp_path / name), data=rows, chunks=(length, *rows.shape[1:]))
        for name, (rows, length) in chunks.items()
    }
    rows = stored.pop("x")
    again = TransferOperator(GAUSSIAN, **options)
    np.testing.assert_array_equal(again.fit(rows, **stored).model_.matrix, fit.model_.matrix)
    # What a task of another process holds gives the same pairs.
    sample = pairs(open_sample(x, **beside), 2)
    for source in sample.reads:
        held = source.for_task(2990, 3010)
        np.testing.assert_array_equal(held.read(2995, 3005), source.read(2995, 3005))


def test_stores_are_read_once_and_not_copied(tmp_path):
    x = ornstein_uhlenbeck(40_000, 6)
    path = write_store(tmp_path / "store.zarr", x, x, chunk_rows=3000)
    fit = TransferOperator(GAUSSIAN, reg=1e-3, tol=1e-3).fit(path)
    assert fit.n_passes_ == 1  # pivots are chosen from the row sample that the store holds
    assert fit.report_.rows == 39_999
    again = TransferOperator(GAUSSIAN, reg=1e-3, pivots=fit.basis_.pivots).fit(x)
    np.testing.assert_allclose(again.model_.matrix, fit.model_.matrix, atol=1e-9)


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory):
    """Three trajectories with gaps in a Zarr group, each array in chunks of its own."""
    path, n = tmp_path_factory.mktemp("trajectories") / "t.zarr", 40_000
    group = zarr.open_group(str(path), mode="w")
    time = np.arange(float(n))
    time[25_000:] += 7.0
    rows = {
        "x": (ornstein_uhlenbeck(n, 8), 3000),
        "group": (np.repeat([0, 1, 2, 2], n // 4), 4096),
        "time": (time, 2500),
        "weights": (np.random.default_rng(9).uniform(0.5, 1.5, n), 2000),
    }
    for name, (values, length) in rows.items():
        chunks = (length, *values.shape[1:])
        group.create_array(name, data=values, chunks=chunks)
    return path


def beside(group):
    return {name: group[name] for name in ("group", "time", "weights")}


GIVEN = {"reg": 1e-3, "pivots": PIVOTS, "time_step": 1.0}


@pytest.mark.parametrize(("lag", "workers"), [(1, 1), (500, 1), (1, 3), (9000, 1)])
def test_a_pass_over_pairs_decodes_every_chunk_once(trajectories, lag, workers):
    """For both rows of a pair, groups, times and weights; a lag above a strip is read apart."""
    store = CountingStore(LocalStore(trajectories, read_only=True))
    group = zarr.open_group(store, mode="r")
    sample = pairs(open_sample(group["x"], **beside(group)), lag, 1.0)
    store.reads.clear()
    executor = RunOptions("threads", workers).executor()
    _, report = run_pass(sample, [BadValueCounts()], executor)
    for name, chunks in (("x", 14), ("group", 10), ("time", 16), ("weights", 20)):
        counts = store.chunks(name)
        assert len(counts) == (16 if name == "weights" and lag == 9000 else chunks)
        uses = 2 if lag > 4096 and name != "weights" else 1
        edges = (report.tasks - 1) * (1 if lag == 1 else 2)  # chunks that a task and its lag end in
        assert sum(counts.values()) <= uses * (chunks + edges)
    memory = {name: array[:] for name, array in beside(group).items()}
    chunked, whole = (
        TransferOperator(GAUSSIAN, lag=lag, **GIVEN).fit(x, **others).model_.matrix
        for x, others in ((group["x"], beside(group)), (group["x"][:], memory))
    )
    np.testing.assert_array_equal(chunked, whole)


def test_processes_and_a_cluster_give_the_bits_of_threads(trajectories, cluster):
    group = zarr.open_group(str(trajectories), mode="r")
    options = {"tol": 1e-3, "rank": 4, "n_folds": 3, "random_state": 0}
    threads, *others = (
        TransferOperator(GAUSSIAN, **options).fit(
            group["x"], **beside(group), scheduler=scheduler, workers=workers
        )
        for scheduler, workers in (("threads", 2), ("processes", 2), (cluster, None))
    )
    assert threads.report_.tasks > 1
    for other in others:
        np.testing.assert_array_equal(other.model_.matrix, threads.model_.matrix)
        np.testing.assert_array_equal(other.eigenvalues_, threads.eigenvalues_)
        np.testing.assert_array_equal(other.path_.losses, threads.path_.losses)


def test_weights_and_groups_take_no_pass_of_their_own(trajectories, monkeypatch):
    """The row sample and the moments: two passes, which decode every chunk once."""
    store = CountingStore(LocalStore(trajectories, read_only=True))
    group = zarr.open_group(store, mode="r")
    options = {"reg": 1e-3, "tol": 1e-3, "time_step": 1.0}
    here = {"scheduler": "threads", "workers": 1}
    assert TransferOperator(GAUSSIAN, **options).fit(group["x"], **here).n_passes_ == 2
    store.reads.clear()
    fit = TransferOperator(GAUSSIAN, **options).fit(group["x"], **beside(group), **here)
    assert fit.n_passes_ == 2
    counts = store.chunks("x")
    assert len(counts) == 14
    assert sum(counts.values()) <= 2 * (14 + 2 * (fit.report_.tasks - 1))
    # Where the pass reads all rows, the sample is that of a pass over the weights before it.
    sample = pairs(open_sample(group["x"], **beside(group)), 1)
    executor = RunOptions("threads", 1).executor()
    whole, passes = passes_of_fits.sample_rows(sample, 5_000, 3, executor)
    monkeypatch.setattr(passes_of_fits, "_ROWS_PER_CHUNK", 10**9)
    apart, more = passes_of_fits.sample_rows(sample, 5_000, 3, executor)
    assert (passes, more) == (1, 2)
    for name in ("keys", "index", "weights", "importance"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(apart, name))
    for i in (0, 1):
        np.testing.assert_array_equal(whole.parts[i], apart.parts[i])
    fit.fit(group["x"], **beside(group), **here)
    assert fit.n_passes_ == 3


def test_weights_that_are_made_of_x_are_made_as_it_is_read(trajectories):
    store = CountingStore(LocalStore(trajectories, read_only=True))
    sample = open_sample(zarr.open_group(store, mode="r")["x"]).reweight(squares)
    executor = RunOptions("threads", 2).executor()
    store.reads.clear()
    _, report = run_pass(sample, [BadValueCounts()], executor)
    assert sum(store.chunks("x").values()) <= 14 + report.tasks - 1
    store.reads.clear()
    _, passes = passes_of_fits.sample_rows(sample, 5_000, 0, executor)
    assert passes == 1
    assert sum(store.chunks("x").values()) <= 14 + report.tasks - 1


def squares(x):
    return x[:, 0] ** 2


KILLED = """
import os, signal, sys
import numpy as np
from cme_dask import JointDistribution, TransferOperator, kernels
done = []
def progress(event):
    done.append(event.done)
    if len(done) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
pivots = np.linspace(-3.0, 3.0, 6)[:, None]
TransferOperator(kernels.Gaussian(1.5), reg=1e-3, pivots=pivots, random_state=0).fit(
    sys.argv[1], scheduler="synchronous", checkpoint=sys.argv[2], progress=progress)
"""


def test_a_killed_fit_resumes_with_the_same_bits(tmp_path):
    x = ornstein_uhlenbeck(40_000, 11)
    path = write_store(tmp_path / "s", x, x, chunk_rows=4096)
    arguments = [sys.executable, "-c", KILLED, str(path), str(tmp_path / "c")]
    done = subprocess.run(arguments, capture_output=True, text=True, env=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    options = {"reg": 1e-3, "pivots": PIVOTS, "random_state": 0}
    whole, resumed = (
        TransferOperator(GAUSSIAN, **options).fit(path, checkpoint=folder)
        for folder in (None, tmp_path / "c")
    )
    assert 0 < resumed.report_.resumed_strips < 10
    np.testing.assert_array_equal(resumed.model_.matrix, whole.model_.matrix)
    with pytest.raises(StoreError, match="of another run"):
        TransferOperator(GAUSSIAN, lag=2, **options).fit(path, checkpoint=tmp_path / "c")


KILLED_BEYOND = """
import os, signal, sys
import zarr
from cme_dask import JointDistribution, TransferOperator, kernels
def progress(event):
    if event.step == 3 and event.done > 0.8:
        os.kill(os.getpid(), signal.SIGKILL)
group = zarr.open_group(sys.argv[1], mode="r")
beside = {name: group[name] for name in ("group", "time", "weights")}
TransferOperator(kernels.Gaussian(1.5), reg=1e-3, tol=1e-3).fit(
    group["x"], **beside, scheduler="synchronous", checkpoint=sys.argv[2], progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows_per_chunk", [3, 10**9])
def test_a_killed_fit_resumes_beyond_its_row_sample(
    trajectories, tmp_path, monkeypatch, rows_per_chunk
):
    """What follows the row sample depends on it: read from a checkpoint it is the same."""
    change = f"import cme_dask.passes.fit as p; p._ROWS_PER_CHUNK = {rows_per_chunk}\n"
    monkeypatch.setattr(passes_of_fits, "_ROWS_PER_CHUNK", rows_per_chunk)
    arguments = [sys.executable, "-c", change + KILLED_BEYOND, str(trajectories), tmp_path / "c"]
    done = subprocess.run(arguments, capture_output=True, text=True, env=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    group = zarr.open_group(str(trajectories), mode="r")
    options = {"reg": 1e-3, "tol": 1e-3}
    whole, resumed = (
        TransferOperator(GAUSSIAN, **options).fit(group["x"], **beside(group), checkpoint=folder)
        for folder in (None, tmp_path / "c")
    )
    assert resumed.report_.resumed_strips > 0
    assert resumed.n_passes_ == whole.n_passes_ == (2 if rows_per_chunk == 3 else 3)
    np.testing.assert_array_equal(resumed.model_.matrix, whole.model_.matrix)


def test_large_numbers_of_groups_are_told_apart():
    """Read as float64, neighbours among them would be one group."""
    x = np.random.default_rng(0).normal(size=(300, 1))
    small, large = np.repeat(np.arange(100), 3), np.repeat(np.arange(100) + 2**60, 3)
    weights = []
    for group in (small, large):
        sample = open_sample(x, group=group)
        weights.append(pairs(sample, 1).weights.read(0, 299))
        folds = sample.fold_by("group").folding.folds(
            np.arange(300), {"group": sample.group.read(0, 300)[:, 0]}, 10
        )
        assert len(np.unique(folds)) == 10
    np.testing.assert_array_equal(*weights)
    assert weights[0].sum() == 200
    stored = zarr.create_array({}, data=large, chunks=(100,))
    with pytest.raises(DataError, match="integers below 2"):
        pairs(open_sample(x, group=stored), 1).weights.read(0, 299)


def test_rows_without_a_group_or_time_are_gaps():
    x = ornstein_uhlenbeck(300, 10)
    time, missing = np.arange(300.0), [7, 100, 101, 299]
    time[missing] = np.nan
    group = np.where(np.isnan(time), np.nan, 1.0)
    rest = np.delete(np.arange(299), [6, 7, 99, 100, 101, 298])
    weights = np.zeros(300)
    weights[rest] = 1.0
    options = {"reg": 1e-3, "pivots": PIVOTS}
    matrices = [
        TransferOperator(GAUSSIAN, **options).fit(x, **given).model_.matrix
        for given in ({"weights": weights}, {"time": time, "group": None}, {"group": group})
    ]
    np.testing.assert_allclose(matrices[1:], [matrices[0]] * 2, rtol=1e-12)


def test_saved_models_forecast_without_data(tmp_path, fit):
    fit.save(tmp_path / "model")
    again = load(tmp_path / "model")
    at = np.array([[0.3]])
    np.testing.assert_array_equal(again.forecast(at, 4), fit.model_.forecast(at, 4))
    np.testing.assert_array_equal(again.eigenvalues, fit.eigenvalues_)
    assert "lag 1, in 1 pass" in repr(again)
    assert clone(fit).get_params() == fit.get_params()
    plan = TransferOperator(GAUSSIAN, tol=1e-3, reg=1e-3).plan(ornstein_uhlenbeck(5000))
    assert plan.passes == 1
    assert plan.rows == 4999


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"lag": 0}, {}, "lag must be an integer of at least 1"),
        ({"lag": 1.5}, {}, "lag must be an integer of at least 1"),
        ({"lag": -3}, {}, "lag must be an integer of at least 1"),
        ({"rank": 0}, {}, "rank must be an integer"),
        ({"reg": 0.0}, {}, "reg must be a positive number"),
        ({"reg": [1e-3, 0.0]}, {}, "reg must be a positive number or several"),
        ({"reg": []}, {}, "reg must be a positive number or several"),
        ({"n_folds": 1}, {}, "give reg and one kernel, or n_folds >= 2"),
        ({"kernel": [GAUSSIAN] * 2, "reg": 1e-3, "n_folds": 1}, {}, "or n_folds >= 2"),
        ({"kernel": []}, {}, "kernel holds no kernel"),
        ({"kernel": [GAUSSIAN, 2.0]}, {}, "kernel must be a kernel of cme_dask.kernels"),
        ({"pivots": "greedy"}, {}, "pivots must be 'sampled' or an array"),
        ({"time_step": -1.0}, {}, "time_step must be a number"),
        ({"lag": 300}, {}, "need at least 302 rows, got 300"),
        ({"reg": 1e-3}, {"time": np.zeros(300)}, "times of the first rows do not rise"),
        ({"reg": 1e-3}, {"group": np.arange(300)}, "no two rows of positive weight are 1 apart"),
        (
            {"reg": 1e-3, "lag": 10},
            {"group": np.arange(300) // 10},
            "no two rows of positive weight are 10 apart",
        ),
        (
            {"reg": 1e-3, "time_step": 0.5},
            {"time": np.arange(300.0)},
            "no two rows of positive weight are 1 apart",
        ),
        ({"reg": 1e-3}, {"time": np.arange(9.0)}, "the numbers of rows differ"),
    ],
)
def test_unusable_parameters_and_trajectories_are_refused(options, given, message):
    with pytest.raises(DataError, match=message):
        TransferOperator(**{"kernel": GAUSSIAN} | options).fit(ornstein_uhlenbeck(300), **given)


def test_unusable_questions_are_refused(fit):
    for horizon in (0, 1.5, [1, 0], [[1]]):
        with pytest.raises(DataError, match="horizons are integers of at least 1"):
            fit.model_.forecast([[0.0]], horizon)
    with pytest.raises(DataError, match="unknown observable 'cube': there are 'x0', 'square'"):
        fit.model_.forecast([[0.0]], 1, "cube")
    dask_array = pytest.importorskip("dask.array")
    group = dask_array.from_array(np.zeros(300))
    with pytest.raises(DataError, match="group of trajectories must not be a Dask array"):
        TransferOperator(GAUSSIAN).fit(ornstein_uhlenbeck(300), group=group)
    lazy = dask_array.from_array(ornstein_uhlenbeck(300), chunks=(70, 1))
    options = {"reg": 1e-3, "pivots": PIVOTS}
    one, two = (
        TransferOperator(GAUSSIAN, **options).fit(x).model_.matrix
        for x in (lazy, ornstein_uhlenbeck(300))
    )
    np.testing.assert_array_equal(one, two)


def test_eigenvalues_of_the_noisy_logistic_map():
    """Of the finite matrix, and of the transition density on nodes of a quadrature."""
    nodes, weights = (values / 2.0 for values in np.polynomial.legendre.leggauss(400))
    nodes += 0.5
    image = 4.0 * nodes * (1.0 - nodes)
    density = np.cos(np.pi * (image[:, None] - nodes)) ** (2 * koopman.NOISE)
    density /= density[0] @ weights
    np.testing.assert_allclose(density @ weights, 1.0, rtol=1e-12)
    made = koopman.noise_functions(image) @ koopman.noise_functions(nodes).T
    np.testing.assert_allclose(made, density, atol=1e-10)
    values = np.linalg.eigvals(density * weights)
    assert koopman.distance(values, koopman.logistic_eigenvalues()[: koopman.LEADING]) < 1e-12
    assert abs(koopman.logistic_eigenvalues()[0] - 1.0) < 1e-12
    path = koopman.logistic_map(20_000, 0)[:, 0]
    noise = (path[1:] - 4.0 * path[:-1] * (1.0 - path[:-1]) + 0.5) % 1.0 - 0.5
    # cos(2 pi t) has the mean (2 N) / (2 N + 2) under this density.
    expected = koopman.NOISE / (koopman.NOISE + 1.0)
    assert np.cos(2.0 * np.pi * noise).mean() == pytest.approx(expected, abs=0.01)


def test_the_study_of_transfer_operators(tmp_path, monkeypatch):
    monkeypatch.setattr(koopman, "peer_installed", lambda: False)
    command = ["study", "koopman", "--rows", "200", "--rows", "5000", "--seeds", "2"]
    done = CliRunner().invoke(cli, [*command, "--out", str(tmp_path / "k"), "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert "kooplearn is not installed" in done.output
    study = json.loads((tmp_path / "k" / "koopman.json").read_text())
    for few, many in (study["cells"][:2], study["cells"][2:]):
        errors = [cell["models"]["TransferOperator"]["error"]["mean"] for cell in (few, many)]
        assert errors[1] < errors[0] < 0.3
    assert "| ornstein-uhlenbeck | 5,000 |" in (tmp_path / "k" / "koopman.md").read_text()


def test_verdicts_compare_at_the_most_rows_of_a_rival():
    def cell(rows, **errors):
        models = {
            name: {"error": {"mean": error}, "seconds": {"mean": 2.0}}
            for name, error in errors.items()
        }
        return {"scenario": "logistic-map", "rows": rows, "models": models}

    cells = [
        cell(200, TransferOperator=0.4, KernelRidge=0.6),
        cell(500, TransferOperator=0.2, KernelRidge=0.3),
        cell(9000, TransferOperator=0.05),
    ]
    (verdict,) = koopman.verdicts(cells)
    assert (verdict["rows"], verdict["most_rows"]) == (500, 9000)
    assert verdict["error_ratio"] == pytest.approx(1.5)
    assert verdict["gain"] == pytest.approx(6.0)
    assert verdict["seconds_ratio"] == 1.0
