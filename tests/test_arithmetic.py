"""Faster arithmetic: what it computes, and that the guard lets it run only where answers stay."""

import os
import subprocess
import sys
import threading
import time
import types
from functools import partial

import array_api_strict as strict
import numpy as np
import pytest
from conftest import pairwise
from programs import solve_joint

from cme_dask import JointDistribution, PivotedCholesky, kernels
from cme_dask.errors import DataError
from cme_dask.kernels import evaluator as into
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.numerics import precision as guard
from cme_dask.numerics.basis import BlockSolve, NewtonBasis
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments
from cme_dask.numerics.problem import Regularization

LAST = guard.ComputeMode(())


def basis_of(kernel, points, tol, max_rank=None):
    found = pivoted_cholesky(kernel, points, tol, max_rank)
    return NewtonBasis(kernel, points[found.pivots], found.factor)


def problem(d, length_scale, tol, n=6144, max_rank=450):
    """Two sides and rows; the first 2,048 rows are those of the trial."""
    rng = np.random.default_rng(d)
    X = rng.random((n, d))
    Y = np.sin(4 * X.sum(axis=1, keepdims=True)) + 0.2 * rng.standard_normal((n, 1))
    x = basis_of(kernels.Gaussian(length_scale), X, tol, max_rank)
    y = basis_of(kernels.Gaussian(0.4), Y, tol)
    sides = (
        FeatureBlock(x, tuple("abc"[:d]), {}, X.mean(axis=0)),
        FeatureBlock(y, ("y",), {"event": lambda rows: rows[:, 0] > 0.3}, np.array([0.0, 0.5])),
    )
    return MomentReduction(sides), (X, Y)


def means(spec, parts, arithmetic):
    applied = arithmetic.applied(spec)
    folds = np.zeros(len(parts[0]), dtype=np.uint8)
    return strip_moments(applied, parts, None, folds).means()


@pytest.mark.parametrize("fractions", [(), (0.5,), (0.25, 0.5, 0.75), None])
@pytest.mark.parametrize("rank", [1, 31, 33, 100])
def test_elimination_is_a_partial_solve(fractions, rank):
    """C = D N with D the diagonal blocks of R, so that finishing gives N."""
    X = np.random.default_rng(0).uniform(0, 1, (300, 3))
    basis = NewtonBasis.from_points(kernels.Matern(0.5, 1.5), X[:rank])
    R = basis.factor
    form = None if fractions is None else BlockSolve.between(R, fractions)
    newton = np.linalg.solve(R, basis.kernel(X, basis.points).T)
    out = np.empty((rank, 300))
    basis.evaluator(X, form)(X, out)
    D = np.eye(rank)
    if form is not None:
        D = np.zeros((rank, rank))
        for block in form.blocks:
            D[block, block] = R[block, block]
    assert np.abs(out - D @ newton).max() < 1e-11
    if form is not None:
        form.finish(R, out)
    assert np.abs(out - newton).max() < 1e-11
    # On another array library, as on a GPU.
    theirs = strict.zeros((rank, 300))
    basis.evaluator(strict.asarray(X), form)(strict.asarray(X), theirs)
    if form is not None:
        form.finish(R, theirs._array)
    assert np.abs(np.asarray(theirs) - newton).max() < 1e-11


def test_flops_of_an_elimination():
    assert BlockSolve((0, 64)).flops == 0
    assert BlockSolve((0, 32, 64)).flops == 2 * 32 * 32


@pairwise(
    tol=[1e-1, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10],
    rows=[(1, 0.1), (2, 0.4), (3, 0.3)],
    solver=[("normalized", 1e-6), ("none", 1e-6), ("none", 0.0)],
)
def test_what_the_guard_admits_equals_the_safe_form(tol, rows, solver):
    """Within 1e-8 on density ratios and expectations, at other rows than those of the trial."""
    (d, length_scale), (constraint, reg) = rows, solver
    spec, parts = problem(d, length_scale, tol)
    solve = partial(solve_joint, constraint=constraint, reg=Regularization(reg, reg))
    trial = tuple(part[: guard.TRIAL_ROWS] for part in parts)
    change = guard.JointChange(spec, trial, solve)(means(spec, trial, guard.SAFE))
    others = tuple(part[-256:] for part in parts)
    held_out = guard.JointChange(spec, others, solve)(means(spec, parts, guard.SAFE))
    admitted = 0
    for fractions in guard._FRACTIONS:
        arithmetic = guard.ComputeMode(fractions)
        if change(means(spec, trial, arithmetic)) <= 1e-9:
            admitted += 1
            assert held_out(means(spec, parts, arithmetic)) <= 1e-8
    if tol >= 1e-4:
        assert admitted >= 1
    if tol >= 1e-2:
        assert admitted == len(guard._FRACTIONS)


@pytest.mark.parametrize(("d", "length_scale", "tol"), [(3, 0.3, 1e-6), (1, 0.1, 1e-8)])
def test_the_guard_refuses_to_solve_last(d, length_scale, tol):
    """The trace looks right where H is not: the guard must not look at the trace."""
    spec, parts = problem(d, length_scale, tol)
    solve = partial(solve_joint, constraint="normalized", reg=Regularization(1e-6, 1e-6))
    change = guard.JointChange(spec, parts, solve)
    chosen, refused = guard.fastest_mode(spec, parts, 1e-9, change)
    assert () in [a.fractions for a in refused]
    assert chosen.fractions != ()
    last, safe = means(spec, parts, LAST), means(spec, parts, guard.SAFE)
    # Within what a bound on the trace alone would let pass: rank * est <= 0.1 tol.
    assert abs(last.trace_error[0] - safe.trace_error[0]) < 0.1 * tol
    assert change(safe)(last) > 1e-6
    # The basis alone: eigenvalues are wrong as well.
    alone = MomentReduction(spec.features[:1])
    chosen, refused = guard.fastest_mode(alone, parts[:1], 1e-4, guard.SpectrumChange(tol, 1e-4))
    assert () in [a.fractions for a in refused]
    assert chosen.fractions != ()


@pytest.mark.parametrize("accuracy", [1e-9, 1e-4, 0.0])
def test_trials_side_by_side_choose_the_same(accuracy):
    """The first that is admitted in the order of cost, though dearer ones ran meanwhile."""
    spec, parts = problem(3, 0.3, 1e-6)
    solve = partial(solve_joint, constraint="normalized", reg=Regularization(1e-6, 1e-6))
    change = guard.JointChange(spec, parts, solve)
    with one_blas_thread():
        alone = guard.fastest_mode(spec, parts, accuracy, change)
        assert guard.fastest_mode(spec, parts, accuracy, change, 3) == alone
    assert len(alone[1]) >= 1


def test_nothing_is_tried_at_accuracy_zero_and_nothing_admitted_that_fails():
    spec, parts = problem(1, 0.1, 1e-4)
    calls = []

    def never(safe):
        def change(tried):
            calls.append(1)
            return np.nan

        return change

    chosen, refused = guard.fastest_mode(spec, parts, 1e-9, never)
    assert chosen is guard.SAFE
    assert len(refused) == len(calls) >= 1


def test_float32_products_are_admitted_for_who_asks_for_less():
    spec, parts = problem(3, 0.3, 1e-4)
    solve = partial(solve_joint, constraint="normalized", reg=Regularization(1e-4, 1e-4))
    trial = tuple(part[: guard.TRIAL_ROWS] for part in parts)
    change = guard.JointChange(spec, trial, solve)
    chosen, _ = guard.fastest_mode(spec, trial, 1e-9, change)
    assert not chosen.single
    single = guard.ComputeMode(None, single=True)
    safe, found = means(spec, parts, guard.SAFE), means(spec, parts, single)
    assert 1e-9 < change(safe)(found) < 1e-3
    assert found.means["x"] == pytest.approx(safe.means["x"], rel=1e-14)  # means stay float64
    assert np.abs(found.blocks["x", "f(y)"] - safe.blocks["x", "f(y)"]).max() < 1e-15
    assert np.abs(found.blocks["x", "x"] - safe.blocks["x", "x"]).max() < 1e-6
    assert guard.fastest_mode(spec, trial, np.inf, change)[0].single  # the cheapest of all


def test_the_fit_says_how_it_computed():
    rng = np.random.default_rng(0)
    X = rng.random((1 << 17, 1))
    Y = X**2 + 0.1 * rng.standard_normal(X.shape)
    options = {
        "kernel_x": kernels.Gaussian(0.1),
        "kernel_y": kernels.Gaussian(0.3),
        "tol": 1e-5,
        "sample_size": 4096,
    }
    fast = JointDistribution(**options).fit(X, Y)
    safe = JointDistribution(**options, accuracy=0).fit(X, Y)
    assert safe.arithmetic_ is guard.SAFE
    assert fast.arithmetic_.fractions is not None
    assert fast.arithmetic_.change <= 1e-9
    assert fast.model_.about["arithmetic"] == fast.arithmetic_.name
    points, others = X[:300], Y[:300]
    assert np.abs(fast.expect(X=points) - safe.expect(X=points)).max() < 1e-8
    assert np.abs(fast.density_ratio(points, others) - safe.density_ratio(points, others)).max() < (
        1e-8
    )
    few = JointDistribution(**options).fit(X[:5000], Y[:5000])
    assert few.arithmetic_ is guard.SAFE  # a trial would cost more than it saves
    alone = PivotedCholesky(kernels.Gaussian(0.1), tol=1e-5, sample_size=4096).fit(X)
    whole = PivotedCholesky(kernels.Gaussian(0.1), tol=1e-5, sample_size=4096, accuracy=0).fit(X)
    assert alone.arithmetic_.fractions is not None
    assert alone.eigenvalues_ == pytest.approx(whole.eigenvalues_, rel=1e-5)


@pytest.mark.parametrize("accuracy", [-1e-9, np.nan, np.inf, "high", True])
def test_bad_accuracies(accuracy):
    with pytest.raises(DataError, match="accuracy must be a number of at least 0"):
        JointDistribution(accuracy=accuracy).fit(np.ones((5, 1)), np.ones((5, 1)))
    with pytest.raises(DataError, match="accuracy must be a number of at least 0"):
        PivotedCholesky(accuracy=accuracy).fit(np.ones((5, 1)))


@pytest.mark.parametrize("xp", [np, strict])
def test_results_go_into_the_memory_that_is_given(xp):
    a = xp.reshape(xp.arange(12.0), (3, 4))
    out = xp.empty((3, 3))
    into.in_place(out).matmul(a, a.T, out=out)
    assert np.array_equal(np.asarray(out), np.asarray(a) @ np.asarray(a).T)
    other = xp.empty((3, 3))
    into.rank_update(other, a)
    assert np.array_equal(np.asarray(other), np.asarray(out))
    single = xp.empty((3, 4), dtype=xp.float32)
    into.cast_into(xp, single, a)
    assert single.dtype == xp.float32
    scratch = into.Scratch()
    first = scratch.like(xp, out)
    assert first.shape == out.shape
    assert scratch.like(xp, a).shape == (3, 4)


@pytest.mark.parametrize("apart", [0, 3])
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 1, 1), (5, 3, 7), (60, 40, 90), (4, 0, 5), (3, 2, 0)]
)
def test_sums_in_place(m, k, n, apart):
    """BLAS by address equals NumPy, on rows that lie apart as well."""
    rng = np.random.default_rng(0)
    held = rng.random((m, n + apart))
    out, left, right = held[:, :n], rng.random((m, k)), rng.random((k, n + apart))[:, :n]
    kept, expected = held[:, n:].copy(), out - left @ right
    into.subtract_product(out, left, right)
    assert np.allclose(out, expected, rtol=1e-14, atol=1e-15)
    triangle = np.tril(rng.random((m, m)))
    expected = triangle @ out
    into.lower_product(triangle, out)
    assert np.allclose(out, expected, rtol=1e-14, atol=1e-15)
    assert np.array_equal(held[:, n:], kept)
    gram = rng.random((m, m))
    expected = np.triu(gram + out @ out.T) + np.tril(gram, -1)
    into.add_gram(gram, out)
    assert np.allclose(gram, expected, rtol=1e-14, atol=1e-15)


def test_matrices_that_blas_would_misread_are_refused():
    good = np.ones((4, 4))
    for bad in (
        np.ones((4, 4), order="F"),
        np.ones((4, 4), dtype=np.float32),
        np.ones((4, 8))[:, ::2],
    ):
        for arguments in ((bad, good, good), (good, bad, good), (good, good, bad)):
            with pytest.raises(ValueError, match="rows of float64 expected"):
                into.subtract_product(*arguments)
    with pytest.raises(ValueError, match="don't multiply"):
        into.subtract_product(good, np.ones((4, 3)), good)
    with pytest.raises(ValueError, match="a sum of shape"):
        into.add_gram(np.ones((3, 3)), good)
    with pytest.raises(ValueError, match="a triangle of shape"):
        into.lower_product(np.ones((3, 3)), good)


def test_the_interpreter_is_free_while_blas_runs(steps_beside):
    gram, rows = np.zeros((1500, 1500)), np.ones((1500, 4000))
    assert steps_beside(lambda: into.add_gram(gram, rows)) > 100
    assert steps_beside(lambda: sum(range(2_000_000))) < 100  # as a call that holds the lock


def test_a_process_is_limited_to_one_blas_thread():
    """Whatever it has loaded before: a library that is loaded later would not be limited."""
    code = """
from cme_dask.kernels.evaluator import limit_this_process
limit_this_process()
import numpy, scipy.linalg, cme_dask.kernels.evaluator
from threadpoolctl import threadpool_info
print(sorted({i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1]"


def test_libraries_are_looked_for_again_only_once_modules_have_come():
    """Here scikit-learn brings OpenMP; the limit before it knew the BLAS of NumPy and SciPy."""
    code = """
import threadpoolctl
from cme_dask.kernels import evaluator
from threadpoolctl import ThreadpoolController

def threads(api):
    libraries = ThreadpoolController().info()  # not counted: of the name as it was
    return {i["num_threads"] for i in libraries if i["user_api"] == api}

looked = []
class Counting(ThreadpoolController):
    def __init__(self):
        looked.append(1)
        super().__init__()

threadpoolctl.ThreadpoolController = Counting
for _ in range(3):
    with evaluator.one_blas_thread():
        print(threads("blas"), threads("openmp"))
import sklearn.ensemble
with evaluator.one_blas_thread():
    print(threads("blas"), threads("openmp"))
print(threads("blas"), threads("openmp"), len(looked))
"""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines() == ["{1} set()"] * 3 + ["{1} {1}", "{2} {2} 2"]


def test_threads_limit_the_process_in_turns_and_together():
    """OpenBLAS would obey the first thread alone, while it lives."""
    code = """
import threading
from cme_dask.kernels.evaluator import one_blas_thread
from threadpoolctl import threadpool_info

def threads():
    return {i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"}

def use(entered, leave, seen):
    with one_blas_thread():
        seen.append(threads())
        entered.set()
        leave.wait()

with one_blas_thread():
    seen = [threads()]
events = [(threading.Event(), threading.Event()) for _ in range(2)]
users = [threading.Thread(target=use, args=(*pair, seen)) for pair in events]
for user, (entered, _) in zip(users, events):
    user.start()
    entered.wait()
for user, (_, leave) in zip(users, events):
    leave.set()  # the one that came first leaves first
    user.join()
print(seen, threads())
"""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[{1}, {1}, {1}] {2}"


def test_maps_take_the_threads_that_others_leave():
    def alone(cores):
        names = into.parallel_map(lambda _: threading.current_thread().name, range(4), cores)
        return set(names) == {threading.current_thread().name}

    seen, first = {}, threading.Event()

    def work(over):
        seen["beside"] = [alone(2), alone(3)]
        first.set()
        while not over() or into._working > 1:  # until the other thread waits for this one
            time.sleep(0.001)
        seen["waited for"] = [alone(1), alone(2)]

    assert [alone(1), alone(2)] == [True, False]
    with into.beside(work):
        first.wait()
        assert [alone(2), alone(3)] == [True, False]
        with pytest.raises(ZeroDivisionError):
            into.parallel_map(lambda i: 1 // i, range(3), 3)
    assert seen == {"beside": [True, False], "waited for": [True, False]}
    assert into._working == 1


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is told")
def test_a_worker_reuses_the_memory_of_blocks_and_gives_back_that_of_strips():
    """As a nanny starts it: pages of 2 MB are zeroed once, 24 MB don't stay with their thread."""
    code = """
import os, resource, threading
import numpy, psutil
from cme_dask.kernels.evaluator import limit_this_process
limit_this_process()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def block():
    numpy.ones(2 << 17)
block()
before = faults()
for _ in range(50):
    block()
pages = faults() - before
def strips(start):
    start.wait()
    held = [numpy.ones(24 << 17)]
    for _ in range(3):
        held = [numpy.ones(24 << 17), held[0]]
start = threading.Barrier(4)
threads = [threading.Thread(target=strips, args=(start,)) for _ in range(4)]
before = psutil.Process().memory_info().rss
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(pages * os.sysconf("SC_PAGESIZE") >> 20, psutil.Process().memory_info().rss - before >> 20)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    )
    zeroed, stayed = map(int, done.stdout.split())
    assert zeroed <= 10  # of 100 MB
    assert stayed <= 10  # of 200 MB


def test_cupy_is_told_that_both_factors_are_one(monkeypatch):
    """No GPU here: a stand-in for CuPy's syrk, which writes one triangle only, shows the calls."""

    def syrk(trans, a, out, alpha, beta, lower):
        assert (trans, alpha, lower) == ("N", 1.0, False)
        upper = ~np.tri(len(out), k=-1, dtype=bool)
        out[upper] = (a @ a.T + (beta * out if beta else 0.0))[upper]

    cupy = types.ModuleType("cupy")
    cupy.cublas = types.SimpleNamespace(syrk=syrk)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(into, "is_cupy_array", lambda out: True)
    rows = np.random.default_rng(0).random((5, 7))
    out = np.full((5, 5), np.nan)
    into.rank_update(out, rows)
    assert np.allclose(np.triu(out), np.triu(rows @ rows.T), rtol=1e-15)
    into.add_rank_update(out, rows, np.full((5, 5), np.nan))
    assert np.allclose(np.triu(out), 2.0 * np.triu(rows @ rows.T), rtol=1e-15)
