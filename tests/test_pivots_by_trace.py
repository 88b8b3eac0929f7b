"""Pivots chosen by what they take from the trace: as written down, and fewer of them."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import oracle_pivots as slow
import pytest
from conftest import fit_context
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask import kernels, open_sample
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import (
    SKETCH,
    PivotedFactor,
    TraceGainSelector,
    pivoted_cholesky,
    prefix_rows,
    sampled_cholesky,
)

GAUSSIAN = kernels.Gaussian(0.3)


def equal(size):
    return np.full(size, 1 / size)


def signs(n):
    return 2.0 * np.random.default_rng(0).integers(0, 2, size=(n, SKETCH), dtype=np.int8) - 1.0


def by_trace(kernel, points, share, threads=None):
    rows = np.arange(len(points))
    return TraceGainSelector(PivotedFactor(kernel, points, rows, share, threads=threads))


def triangle(factor):
    """N at the pivots, which are some of the rows."""
    return np.tril(factor.newton(factor.picks))


def chosen(kernel, points, share, rank, threads=None):
    """The factor after so many pivots by trace."""
    run = by_trace(kernel, points, share, threads)
    while run.factor.rank < rank:
        assert run.advance(rank)
    return run.factor


def continued(factor, points, share):
    """The choice by trace goes on from more rows, of which those of the factor are the first."""
    more = PivotedFactor(factor.kernel, points, np.arange(len(points)), share)
    more.follow(factor, within=True)
    return TraceGainSelector(more)


LAWS = {
    "uniform": (lambda rng, n: rng.uniform(size=(n, 3)), GAUSSIAN),
    "normal": (lambda rng, n: rng.standard_normal((n, 3)), kernels.Gaussian(1.0)),
    "t": (lambda rng, n: rng.standard_t(3, (n, 2)), kernels.Matern(1.0, 1.5)),
    "clusters": (
        lambda rng, n: (
            rng.uniform(size=(20, 4))[rng.integers(20, size=n)] + 0.03 * rng.standard_normal((n, 4))
        ),
        kernels.Gaussian(0.1),
    ),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("law", LAWS)
def test_pivots_are_those_of_the_rule_on_the_whole_matrix(law, weighted, rng):
    draw, kernel = LAWS[law]
    points = draw(rng, 700)
    share = rng.exponential(size=700) if weighted else equal(700)
    run = chosen(kernel, points, share, 40)
    K, R = kernel(points, points), triangle(run)
    assert run.picks.tolist() == slow.by_trace(K, 40, share, signs(700))
    np.testing.assert_allclose(R @ R.T, K[np.ix_(run.picks, run.picks)], atol=1e-13)
    newton = NewtonBasis(kernel, points[run.picks], R)(points)
    trace = 1 - share @ (newton**2).sum(axis=1) / share.sum()
    assert run.history[-1] == pytest.approx(trace, rel=1e-9)


@settings(max_examples=10)
@given(first=st.integers(1, 40), seed=st.integers(0, 99))
def test_the_choice_goes_on_from_a_prefix_with_the_sketch_of_all_rows(first, seed):
    """What is sketched of the residual matrix is that of the matrix itself."""
    points = np.random.default_rng(seed).uniform(size=(600, 2))
    run = chosen(GAUSSIAN, points[:300], equal(300), first)
    more = continued(run, points, equal(600))
    newton = NewtonBasis(GAUSSIAN, points[run.picks], triangle(run))(points)
    S = GAUSSIAN(points, points) - newton @ newton.T
    np.testing.assert_allclose(more.sketch, signs(600).T / np.sqrt(600) @ S, atol=1e-11)
    assert more.factor.picks.tolist() == run.picks.tolist()
    assert more.advance(first + 10)
    newton = NewtonBasis(GAUSSIAN, points[more.factor.picks], triangle(more.factor))(points)
    S = GAUSSIAN(points, points) - newton @ newton.T
    np.testing.assert_allclose(more.sketch, signs(600).T / np.sqrt(600) @ S, atol=1e-11)


def test_threads_change_nothing(rng):
    points = rng.uniform(size=(2000, 3))
    alone = chosen(GAUSSIAN, points, equal(2000), 60)
    with ThreadPoolExecutor(3) as threads:
        beside = chosen(GAUSSIAN, points, equal(2000), 60, threads)
    assert alone.picks.tolist() == beside.picks.tolist()
    np.testing.assert_array_equal(triangle(alone), triangle(beside))


def test_of_equal_rows_none_is_taken_twice(rng):
    side = np.arange(7.0)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    points = np.tile(grid, (8, 1))[rng.permutation(392)]
    run = by_trace(kernels.Gaussian(1.0), points, equal(392))
    while run.advance(392):
        pass
    assert run.factor.history[-1] < 1e-14
    assert sorted(map(tuple, points[run.factor.picks])) == sorted(map(tuple, grid))


def test_rows_without_weight_are_no_pivots(rng):
    points = rng.uniform(size=(300, 2))
    points[200:] += 100.0
    share = np.where(np.arange(300) < 200, 1 / 200, 0.0)
    run = by_trace(GAUSSIAN, points, share)
    while run.factor.history[-1] > 1e-6:
        assert run.advance(300)
    assert run.factor.picks.max() < 200
    nothing = by_trace(GAUSSIAN, points[200:], np.zeros(100))
    assert not nothing.advance(10)
    assert nothing.factor.rank == 0
    assert continued(nothing.factor, points, share).advance(10)


@pytest.mark.parametrize("law", LAWS)
def test_a_sketch_takes_nearly_as_much_as_the_whole_matrix(law, rng):
    draw, kernel = LAWS[law]
    points = draw(rng, 900)
    K = kernel(points, points)
    least, greedy = slow.largest_gains(K, 50)[1], slow.greedy(K, 0.0, 50)[2][-1]
    assert least < 0.8 * greedy
    assert chosen(kernel, points, equal(900), 50).history[-1] <= (least + greedy) / 2


@pytest.mark.parametrize(
    ("law", "tol", "least"),
    [("uniform", 1e-2, 0.97), ("normal", 1e-1, 0.7), ("t", 5e-2, 0.8), ("clusters", 2e-2, 0.9)],
)
def test_fewer_pivots_are_enough(law, tol, least, rng):
    """Both choices reach the tolerance on rows that neither has seen, this one with fewer."""
    draw, kernel = LAWS[law]
    points, table = np.split(draw(rng, 20_000), [4096])
    ranks = {}
    for kind in ("trace", "residual"):
        factor = PivotedFactor(kernel, points, np.arange(4096), equal(4096))
        run = TraceGainSelector(factor) if kind == "trace" else factor
        while factor.history[-1] > tol / 2:
            assert run.advance(4096)
        newton = NewtonBasis(kernel, points[factor.picks], triangle(factor))(table)
        error = 1 - np.cumsum((newton**2).mean(axis=0))
        ranks[kind] = int(np.argmax(error <= tol)) + 1
        assert error[-1] <= tol
    assert ranks["trace"] <= least * ranks["residual"]


def test_coarse_tolerances_are_reached_by_trace_and_others_by_residual(rng):
    points = rng.uniform(size=(20_000, 3))
    for tol, by_gain in ((1e-2, True), (1e-3, False)):
        result = sampled_cholesky(GAUSSIAN, slow.row_sample(points), 0, tol)
        size = prefix_rows(len(result.pivots), 10_000, by_trace=by_gain)
        factor = PivotedFactor(GAUSSIAN, points[::2][:size], np.arange(size), equal(size))
        run = TraceGainSelector(factor) if by_gain else factor
        while factor.rank < 20:
            run.advance(20)
        assert result.reached
        assert result.pivots[:3].tolist() == (2 * factor.picks[:3]).tolist()


def test_a_longer_prefix_is_chosen_from_by_trace_as_well(rng):
    draw, kernel = LAWS["normal"]
    points = draw(rng, 20_000)
    result = sampled_cholesky(kernel, slow.row_sample(points), 0, 3e-3, 150)
    run = chosen(kernel, points[:2048:2], equal(1024), 128)  # 8 rows for each of them
    more = continued(run, points[:4096:2], equal(2048))
    while more.factor.rank < 150:
        assert more.advance(150)
    assert result.pivots.tolist() == (2 * more.factor.picks).tolist()


def test_where_rows_tell_too_little_the_choice_goes_on_by_residual(rng):
    """Half of the rows stand alone: no prefix of them tells of the others."""
    x = rng.uniform(size=(6000, 2))
    x[np.arange(6000) % 4 < 2] *= 1e4
    points, told = x[::2], []
    result = sampled_cholesky(
        GAUSSIAN, slow.row_sample(x), 0, 0.05, on_pivot=lambda rank, trace: told.append(rank)
    )
    assert not result.reached
    assert told == list(range(1, len(told) + 1))
    first = chosen(GAUSSIAN, points[:1024], equal(1024), 20)
    assert result.pivots[:20].tolist() == (2 * first.picks).tolist()
    assert len(result.pivots) <= len(pivoted_cholesky(GAUSSIAN, points, 0.05).pivots)


@pytest.mark.parametrize("n", [200, 5000])
@pytest.mark.parametrize("law", LAWS)
def test_a_whole_table_is_told_by_all_its_rows(law, n, rng):
    draw, kernel = LAWS[law]
    points, weights = draw(rng, n), rng.exponential(size=n)
    result = sampled_cholesky(kernel, slow.row_sample(points, weights, complete=True), 0, 0.05)
    newton = NewtonBasis(kernel, points[result.pivots], result.factor)(points)
    trace = 1 - weights @ (newton**2).sum(axis=1) / weights.sum()
    assert result.reached
    assert result.residual_trace[-1] == pytest.approx(trace, rel=1e-9)
    assert trace <= 0.05
    greedy = pivoted_cholesky(kernel, points, 0.05, weights=weights)
    assert len(result.pivots) <= len(greedy.pivots)


SPANNED = {
    "linear": (kernels.Linear(0.5), 3),
    "polynomial": (kernels.Polynomial(2, 1.0), 6),
    "delta": (kernels.Delta(), 9),
    "tiny": (kernels.Linear(0.0)[0], 1),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", SPANNED)
def test_kernels_of_finite_rank_are_spanned(name, known, rng):
    kernel, most = SPANNED[name]
    points = rng.integers(0, 3, size=(4000, 2)) * (1e-120 if name == "tiny" else 1.0)
    sample = slow.row_sample(points[:: 1 if known else 2], complete=not known)
    result = sampled_cholesky(kernel, sample, 0, 3e-3, max_rank=50)
    assert 1 <= len(result.pivots) <= most
    assert result.reached
    limited = sampled_cholesky(kernel, sample, 0, 3e-3, 1)
    assert len(limited.pivots) == 1


def test_memory_of_the_choice_is_predicted(rng):
    """Of rows that tell little of each other, too: they are looked at without a sketch."""
    x = rng.uniform(size=(16_384, 3))
    x[rng.random(16_384) < 0.05] *= 1e3
    sample = slow.row_sample(x)
    for kernel, tol, limit in ((GAUSSIAN, 1e-2, 250), (kernels.Gaussian(0.2), 3e-3, 600)):
        tracemalloc.start()
        result = sampled_cholesky(kernel, sample, 0, tol, limit)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        context = fit_context(open_sample(np.zeros((1 << 15, 3))), range(16_384))
        cost = context.choice_cost(len(result.pivots))
        assert peak <= cost.alone["the choice of pivots"]


@pytest.mark.parametrize("tol", [1e-2, 1e-3])
def test_other_rows_without_trace_are_no_error(tol, rng):
    """Nothing is left of them, whatever the pivots; the moments tell what the table has left."""
    points = rng.uniform(size=(6000, 2))
    points[1::2] = 0.0
    result = sampled_cholesky(kernels.Linear(), slow.row_sample(points), 0, tol)
    assert 1 <= len(result.pivots) <= 2
    assert np.isfinite(result.residual_trace).all()
