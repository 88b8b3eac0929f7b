"""Fast answers of laws at many points, beside dense formulas and one thread."""

import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from cme_dask import JointDistribution, kernels, load
from cme_dask.errors import DataError
from cme_dask.kernels import evaluator
from cme_dask.kernels.evaluator import blas_threads, one_blas_thread
from cme_dask.learning.candidates import Tuning
from cme_dask.models import law as law_module
from cme_dask.models.spectra import spectra
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.calibration import Levels
from cme_dask.numerics.measure import first_of_sums, first_reaching, low_rank, project
from cme_dask.numerics.scoring import running_sums

POINTS = np.random.default_rng(7).uniform(-2.5, 2.5, (1500, 2))
LEVELS = [0.0, 0.05, 0.3, 0.5, 0.9, 1.0]


@pytest.fixture(scope="module")
def averaged():
    """A calibrated mean of several models."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (400, 2))
    y = np.sin(2 * x[:, :1]) + (0.2 + 0.2 * np.abs(x[:, 1:])) * rng.standard_normal((400, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = JointDistribution(
            residual=False,
            calibration=True,
            conformal=False,
            tuning=Tuning(rows=200, averaged=2),
        ).fit(x, y)
    return fit.model_


@pytest.fixture(scope="module")
def located():
    """A model with a location."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-2, 2, (200, 2))
    y = x[:, :1] + 0.3 * rng.standard_normal((200, 1))
    options = {"kernel_x": "median", "kernel_y": "median", "max_rank": 20, "tol": 1e-2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return JointDistribution(residual=True, **options).fit(x, y).model_


def dense_weights(model, x, support):
    """Weights of the cells from all functions of the model, one law after the other."""
    ratio = 1.0 + model.x.basis(x) @ model.coef.T @ model.y.basis(model.support.points).T
    laws = np.empty_like(ratio)
    for law, g in zip(laws, ratio, strict=True):  # t is where one of its pieces meets 1
        order = np.argsort(-g)
        mass, sums = np.cumsum(model.masses[order]), np.cumsum((model.masses * g)[order])
        t = (sums - 1.0) / mass
        last = np.flatnonzero(g[order] > t)[-1]
        law[:] = model.masses * np.maximum(g - t[last], 0.0)
    exponents = model.calibration.exponents
    levels = Levels(model.y.cells.means, [0]).features(
        laws / laws.sum(axis=1, keepdims=True), len(exponents)
    )
    tilted = laws * np.exp(np.tensordot(exponents[:, 0], levels, axes=1) * support[:, None])
    return tilted / tilted.sum(axis=1, keepdims=True)


def test_weights_are_those_of_the_dense_formula(averaged):
    assert len(averaged.x.ranks) == 2
    pivots = averaged.about["calibration"]["pivots"]
    parts = averaged.x.basis.newton.parts
    spanned = [(part(POINTS)[:, :pivots] ** 2).sum(axis=1) for part in parts]
    support = np.mean(spanned, axis=0)  # these kernels are 1 at equal rows
    expected = dense_weights(averaged, POINTS, support)
    assert_allclose(averaged.conditional(POINTS).weights(), expected, atol=1e-10)


@pytest.mark.parametrize("pivots", [3, None])
def test_models_say_which_pivots_their_calibration_fades_with(averaged, pivots):
    """Those of earlier versions do not, and take all."""
    info = averaged.about["calibration"] | {"pivots": pivots}
    if pivots is None:
        del info["pivots"]
    model = replace(averaged, about=averaged.about | {"calibration": info})
    parts = model.x.basis.newton.parts
    support = np.mean([(part(POINTS)[:, :pivots] ** 2).sum(axis=1) for part in parts], axis=0)
    expected = dense_weights(model, POINTS, support)
    assert_allclose(model.conditional(POINTS).weights(), expected, atol=1e-10)
    for wrong in (0, True, 2.5, "all"):
        damaged = averaged.about | {"calibration": info | {"pivots": wrong}}
        with pytest.raises(DataError, match="calibration"):
            replace(averaged, about=damaged)._validate()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 70), empty=st.floats(0.0, 0.9))
def test_levels_are_found_in_sums_of_neighbours(seed, size, empty):
    rng = np.random.default_rng(seed)
    masses = rng.uniform(size=(4, size)) ** 8 * (rng.uniform(size=(4, size)) >= empty)
    masses[:, rng.integers(size)] += 1e-3
    masses /= masses.sum(axis=1, keepdims=True)
    sums = np.cumsum(masses, axis=1)
    levels = np.concatenate([rng.uniform(size=(4, 6)), np.tile([0.0, 1.0], (4, 1))], axis=1)
    found = first_of_sums(masses, levels)
    assert_array_equal(found, first_reaching(sums, levels))
    assert (np.take_along_axis(masses, found, axis=1) > 0.0).all()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-3, 1.0, 1e3, 1e12]))
def test_projections_meet_their_optimality_conditions(seed, scale):
    rng = np.random.default_rng(seed)
    masses = rng.uniform(size=40) * (rng.uniform(size=40) < 0.8) + 1e-9 * (np.arange(40) == 0)
    masses /= masses.sum()
    ratio = 1.0 + scale * rng.standard_normal((70, 40))
    weights, t = project(ratio, masses)
    again = ratio.copy()
    project(again, masses, out=again)
    assert_array_equal(again, weights)
    unit = np.maximum(np.abs(ratio).max(axis=1), 1.0)
    assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-14)
    excess = masses * np.maximum(ratio - t[:, None], 0.0)
    assert (np.abs(weights - excess) <= 1e-13 * unit[:, None]).all()


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_factors_of_low_rank_are_the_values(rank):
    rng = np.random.default_rng(rank)
    values = 1e3 * rng.standard_normal((6, rank)) @ rng.standard_normal((rank, 30))
    left, right = low_rank(values)
    assert left.shape == (6, rank)
    assert right.shape == (rank, 30)
    assert_allclose(left @ right, values, atol=1e-11)
    assert_allclose(left.T @ left, np.eye(rank), atol=1e-14)


def test_factors_are_found_where_the_fast_method_does_not_converge(rng, monkeypatch):
    values = rng.standard_normal((6, 3)) @ rng.standard_normal((3, 30))
    numpy_svd, failed = np.linalg.svd, []

    def failing(*_, **__):
        failed.append(True)
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr(np.linalg, "svd", failing)
    left, right = low_rank(values)
    assert failed
    assert left.shape == (6, 3)
    assert_allclose(left @ right, values, atol=1e-13)
    assert_allclose(numpy_svd(right)[1], numpy_svd(values)[1][:3], rtol=1e-13)


@pytest.fixture
def few_at_once(monkeypatch):
    monkeypatch.setattr(law_module, "_LEAST_ROWS", 128)
    monkeypatch.setattr(law_module, "_AT_ONCE", 1)
    return monkeypatch


@pytest.mark.parametrize(("many", "together"), [(len(POINTS) + 1, 128), (len(POINTS), 256)])
def test_threads_share_the_points(averaged, few_at_once, many, together):
    """Of many points twice as many go at once."""

    def answers(law):
        return law.quantile(LEVELS), law.mean(), law.cdf(0.1), law.weights()

    names, sizes, evaluate = set(), set(), averaged.law().at

    def watched(x):
        names.add(threading.current_thread().name)
        sizes.add(len(x))
        return evaluate(x)

    expected = answers(averaged.conditional(POINTS))
    few_at_once.setattr(law_module, "_HELD", 1 << 17)  # nothing is held for the next query
    few_at_once.setattr(averaged.law(), "at", watched)
    few_at_once.setattr(evaluator, "blas_threads", lambda: 3)
    few_at_once.setattr(law_module, "_MANY_ROWS", many)
    for answer, other in zip(answers(averaged.conditional(POINTS)), expected, strict=True):
        assert_allclose(answer, other, atol=1e-12)
    assert len(names) > 1
    assert max(sizes) == together


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 8), st.integers(1, 4), st.booleans())
@settings(max_examples=60)
def test_each_block_is_filled_once(n, rows, start, cores, threads):
    filled, fillers = np.zeros(n, dtype=int), set()

    def fill(block):
        filled[block] += 1
        assert 0 < block.stop - block.start <= rows
        fillers.add(threading.current_thread())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator, "blas_threads", lambda: cores)
        evaluator.each_block(fill, n, rows, start=start, threads=threads)
    assert_array_equal(filled, np.arange(n) >= start)
    alone = not threads or cores == 1 or n - start <= rows
    assert (fillers <= {threading.current_thread()}) == (alone or n <= start)


def test_functions_of_users_are_called_by_the_thread_that_asks(located, few_at_once):
    law = located.conditional(POINTS)
    few_at_once.setattr(evaluator, "blas_threads", lambda: 3)
    callers = []

    def square(y):
        callers.append(threading.current_thread())
        return y[:, 0] ** 2

    assert_allclose(law.expect(square), law.var() + law.mean() ** 2, atol=1e-10)
    assert len(callers) > 3
    assert set(callers) == {threading.current_thread()}


def test_saved_laws_of_residuals_have_spectra_in_the_place_of_moments(located, tmp_path):
    located.save(tmp_path / "m")
    again = load(tmp_path / "m")
    assert_array_equal(
        again.conditional(POINTS).quantile(LEVELS), located.conditional(POINTS).quantile(LEVELS)
    )
    assert_array_equal(again.moments["gram"], located.moments["gram"])
    inner = again.residual.model
    assert inner.moments["gram"].shape[0] == 0
    with pytest.raises(DataError, match="keeps no moments"):
        inner.moment_sums()
    for one, other in zip(spectra(inner), spectra(located.residual.model), strict=True):
        assert_array_equal(one[0].eigenvalues, other[0].eigenvalues)
    again.save(tmp_path / "again")
    assert load(tmp_path / "again").residual.model.moments["gram"].shape[0] == 0


def test_threads_are_those_of_blas_in_the_main_thread_alone():
    with one_blas_thread():
        assert blas_threads() == 1
    found = []
    other = threading.Thread(target=lambda: found.append(blas_threads()))
    other.start()
    other.join()
    assert found == [1]


def test_functions_that_are_zero_are_not_evaluated():
    """As those of a law that its residuals do not depend on."""

    def block(x, z):
        raise AssertionError("evaluated")

    kernel = kernels.Custom("silent", block, lambda x: np.ones(len(x)))
    silent = NewtonBasis(kernel, POINTS[:4], np.eye(4))
    (values,) = silent.combined(np.zeros((4, 3)))(POINTS)
    assert_array_equal(values, np.zeros((len(POINTS), 3)))
    with pytest.raises(AssertionError, match="evaluated"):
        silent.combined(np.ones((4, 3)))(POINTS)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(0, 5), st.one_of(st.integers(1, 90), st.integers(1270, 1300))),
    own=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_running_sums_are_those_of_the_masses(seed, shape, own):
    masses = np.random.default_rng(seed).random(shape)[:, ::-1]
    expected = np.cumsum(masses, axis=1) - (1.0 - own) * masses
    assert_allclose(running_sums(masses, own), expected, rtol=1e-13, atol=1e-13)
