"""Pivots chosen in memory: the exact greedy rule in batches, and enough pivots from a sample."""

from functools import partial

import numpy as np
import oracle_pivots as slow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask import kernels
from cme_dask.learning.losses import pivots_of_few
from cme_dask.numerics import cholesky
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import (
    NO_ROWS,
    PivotedFactor,
    leading,
    pivoted_cholesky,
    prefix_rows,
    sampled_cholesky,
    top_rows,
)

N = 1500
KERNELS = {
    "gaussian": kernels.Gaussian(0.3),
    "laplace": kernels.Laplace(2.0),
    "matern": kernels.Matern(0.6, 1.5),
    "rational": kernels.RationalQuadratic(0.4, 1.5),
    "delta": kernels.Delta(),
    "linear": kernels.Linear(0.5),
    "polynomial": kernels.Polynomial(3, 1.0),
    "sum": kernels.Gaussian(0.3) + 0.5 * kernels.Linear(1.0),
}
GAUSSIAN = KERNELS["gaussian"]


def scattered(rng):
    return rng.uniform(size=(N, 2))


def gridded(rng):
    side = np.arange(38.0) / 37
    return np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)


def duplicated(rng):
    return rng.integers(0, 9, size=(N, 2)) / 8.0


# Greedy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [scattered, gridded, duplicated])
@pytest.mark.parametrize("name", KERNELS)
def test_batches_choose_what_algorithm_1_chooses(name, rows, rng):
    kernel, points = KERNELS[name], rows(rng)
    K = kernel(points, points)
    pivots, L, trace = slow.greedy(K, 1e-5, 120)
    result = pivoted_cholesky(kernel, points, 1e-5, 120)
    assert result.pivots.tolist() == pivots
    np.testing.assert_allclose(result.factor, L[pivots], atol=1e-10 * np.sqrt(K.max()))
    np.testing.assert_allclose(result.residual_trace, trace, atol=1e-12)
    np.testing.assert_array_equal(np.triu(result.factor, 1), 0.0)
    inner = K[np.ix_(pivots, pivots)]
    np.testing.assert_allclose(result.factor @ result.factor.T, inner, atol=1e-13 * K.max())


@pytest.mark.parametrize("rows", [scattered, gridded, duplicated])
def test_a_pool_within_a_pool_within_a_pool(rows, rng, monkeypatch):
    """Tiny pools: every level of them, and every way of ending a round, on the same rows."""
    monkeypatch.setattr(cholesky, "_SMALL", 5)
    monkeypatch.setattr(cholesky, "_SHARE", 3)
    monkeypatch.setattr(cholesky, "BLOCK", 7)
    points = rows(rng)
    pivots, L, trace = slow.greedy(GAUSSIAN(points, points), 1e-4)
    result = pivoted_cholesky(GAUSSIAN, points, 1e-4)
    assert result.pivots.tolist() == pivots
    np.testing.assert_allclose(result.factor, L[pivots], atol=1e-10)
    np.testing.assert_allclose(result.residual_trace, trace, atol=1e-12)


def test_weights_count_in_the_trace_alone(rng):
    points, weights = scattered(rng), rng.exponential(size=N)
    pivots, _, trace = slow.greedy(GAUSSIAN(points, points), 1e-4, weights=weights)
    result = pivoted_cholesky(GAUSSIAN, points, 1e-4, weights=weights)
    assert result.pivots.tolist() == pivots
    np.testing.assert_allclose(result.residual_trace, trace, atol=1e-13)
    assert result.residual_trace[-1] <= 1e-4 < result.residual_trace[-2]


def test_ties_go_to_the_lowest_global_row_in_any_order(rng):
    points = gridded(rng)
    straight = pivoted_cholesky(GAUSSIAN, points, 1e-3)
    order = rng.permutation(len(points))
    shuffled = pivoted_cholesky(GAUSSIAN, points[order], 1e-3, rows=order)
    assert order[shuffled.pivots].tolist() == straight.pivots.tolist()


def test_every_pivot_is_told_once_and_max_rank_is_a_prefix(rng):
    points, told = scattered(rng), []
    result = pivoted_cholesky(
        GAUSSIAN, points, 1e-5, on_pivot=lambda rank, trace: told.append((rank, trace))
    )
    assert told == list(enumerate(result.residual_trace))[1:]
    for rank in (1, 17, len(told) - 1):
        fewer = pivoted_cholesky(GAUSSIAN, points, 1e-5, rank)
        assert fewer.pivots.tolist() == result.pivots[:rank].tolist()
        np.testing.assert_allclose(fewer.factor, result.factor[:rank, :rank], atol=1e-13)


def test_given_pivots_without_copies_span_what_the_points_span(rng):
    """More than one batch; copies of rows of the same batch and of earlier ones are left out."""
    points = rng.uniform(size=(600, 3))
    points[30:40] = points[10:20]
    points[300:340] = points[0:40]
    kernel = kernels.Matern(0.2, 0.5)
    basis = NewtonBasis.from_points(kernel, points)
    distinct = [i for i in range(600) if not (300 <= i < 340 or 30 <= i < 40)]
    assert sorted(basis.points.tolist()) == sorted(points[distinct].tolist())
    K = kernel(basis.points, basis.points)
    np.testing.assert_allclose(basis.factor, np.linalg.cholesky(K), atol=1e-12)


def test_rows_that_span_no_more_end_the_choice():
    points = np.repeat(np.arange(5.0), 100)[:, None]
    result = pivoted_cholesky(kernels.Gaussian(1.0), points, 0.0)
    assert len(result.pivots) == 5
    assert result.exhausted
    assert result.residual_trace[-1] < 1e-15
    none = pivoted_cholesky(kernels.Linear(), np.zeros((9, 2)), 1e-3)
    assert none.exhausted
    assert len(none.pivots) == 0


@pytest.mark.parametrize("length", [0.1, 0.01])
def test_copies_of_rows_many_lengths_from_their_mean_are_no_pivots(length, rng):
    points = np.repeat(rng.normal(size=(15, 1)), 2, axis=0)  # of one column, distances cancel
    kernel = kernels.Gaussian(length)
    assert len(pivoted_cholesky(kernel, points, 0.0).pivots) == 15
    assert NewtonBasis.from_points(kernel, points).rank == 15


@settings(max_examples=60)
@given(
    values=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    size=st.integers(1, 40),
    wobble=st.sampled_from([0.0, 1e-12, 1e-9]),
)
def test_the_top_rows_hold_the_next_pivot_and_the_bound_holds(values, size, wobble):
    residual = np.array(values) * (1.0 + wobble * np.arange(len(values)))
    rows = np.random.default_rng(size).permutation(len(values))
    top, bound = top_rows(residual, rows, size)
    tied = np.flatnonzero(residual >= residual.max() * (1 - 1e-10))
    assert tied[rows[tied].argmin()] in top
    outside = np.setdiff1d(np.arange(len(values)), top)
    largest, row = bound
    for i in top:
        first = residual[i] * (1 - 1e-10) > largest
        if first or (residual[i] >= largest and rows[i] < row):
            for o in outside:  # no row outside is larger, nor ties from below
                assert residual[o] <= residual[i]
                assert residual[o] < residual[i] * (1 - 1e-10) or rows[o] > rows[i]
    assert largest == (residual[outside].max() if len(outside) else -np.inf)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 99)), min_size=1, max_size=9))
def test_bounds_of_parts_are_no_looser_than_they_may_be(pairs):
    residual, rows = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    joined = NO_ROWS
    for i in range(len(pairs)):
        alone = leading(residual[i : i + 1], rows[i : i + 1])
        joined = leading(*map(np.array, zip(joined, alone, strict=True)))
    whole = leading(residual, rows)
    assert joined[0] == whole[0]
    assert joined[1] <= whole[1]


def test_a_pool_stops_where_rows_outside_may_come_first(rng):
    points = scattered(rng)
    pool = PivotedFactor(GAUSSIAN, points, np.arange(N))
    picks, newton = pool.greedy(N, (0.5, 0))
    pivots, L, _ = slow.greedy(GAUSSIAN(points, points), 1e-9, len(picks) + 1)
    assert picks.tolist() == pivots[:-1]
    np.testing.assert_allclose(newton, L[picks][:, :-1], atol=1e-12)
    left = 1 - (L[:, :-1] ** 2).sum(axis=1)
    assert left.max() <= 0.5 < (left + L[:, -2] ** 2).max()
    np.testing.assert_allclose(pool.residual, left, atol=1e-12)


# Samples -------------------------------------------------------------------------------------


def trace_error(kernel, pivots, factor, rows, weights=None):
    """Relative residual trace over any rows."""
    newton = NewtonBasis(kernel, pivots, factor)(rows)
    diagonal = kernel.diagonal(rows)
    left = diagonal - (newton**2).sum(axis=1)
    return np.average(left, weights=weights) / np.average(diagonal, weights=weights)


def test_sampled_pivots_are_greedy_on_a_prefix(rng):
    points = rng.uniform(size=(10_000, 2))
    result = sampled_cholesky(GAUSSIAN, slow.row_sample(points), 0, 1e-3)
    on_prefix = pivoted_cholesky(GAUSSIAN, points[:8192:2], 1e-5)
    rank = len(result.pivots)
    assert 10 < rank < 128
    assert result.reached
    assert result.pivots.tolist() == (2 * on_prefix.pivots[:rank]).tolist()
    assert trace_error(GAUSSIAN, points[result.pivots], result.factor, points[1::2]) <= 1e-3


def test_the_prefix_grows_with_the_rank(rng):
    kernel, points = kernels.Gaussian(0.08), rng.uniform(size=(40_000, 2))
    result = sampled_cholesky(kernel, slow.row_sample(points), 0, 1e-4)
    rank, basis = len(result.pivots), NewtonBasis(kernel, points[result.pivots], result.factor)
    assert 256 < rank < 512
    assert prefix_rows(rank, len(points), by_trace=False) == 8192
    assert prefix_rows(10**6, 5000, by_trace=False) == 5000
    # What was found on the shorter prefix goes on, exactly, on the longer one.
    points = points[::2]
    left = 1 - (basis(points[:8192]) ** 2).sum(axis=1)
    assert result.residual_trace[-1] == pytest.approx(left.mean(), rel=1e-9)
    assert result.pivots[:256].max() < 2 * 4096
    np.testing.assert_allclose(
        result.factor @ result.factor.T, kernel(basis.points, basis.points), atol=1e-13
    )
    ending = slow.greedy(_residual_kernel(kernel, points[:8192], basis, 256), 0.0, 5)[0]
    assert (result.pivots[256:261] // 2).tolist() == ending


def _residual_kernel(kernel, points, basis, rank):
    """What is left of the kernel after some pivots, where anything worth choosing is left."""
    newton = basis(points)[:, :rank]
    left = 1 - (newton**2).sum(axis=1)
    few = left >= 0.1 * left.max()
    K = np.zeros((len(points), len(points)))
    here = np.ix_(few, few)
    K[here] = kernel(points[few], points[few]) - newton[few] @ newton[few].T
    return K


@pytest.mark.parametrize("n", [300, 5000])
def test_a_whole_table_needs_no_margin(rng, n):
    points = rng.uniform(size=(n, 2))
    weights = rng.exponential(size=n)
    table = slow.row_sample(points, weights, complete=True)
    result = sampled_cholesky(GAUSSIAN, table, 0, 1e-3)
    tau = trace_error(GAUSSIAN, points[result.pivots], result.factor, points, weights)
    assert result.residual_trace[-1] == pytest.approx(tau, rel=1e-9)
    assert result.residual_trace[-1] <= 1e-3 < result.residual_trace[-2]


@pytest.mark.parametrize("law", ["uniform", "lognormal"])
@pytest.mark.parametrize("kernel", [kernels.Gaussian(0.3), kernels.Matern(1.0, 1.5)], ids=repr)
def test_the_margin_holds_for_the_table_and_is_not_wasteful(kernel, law):
    """Over samples of a table: hardly above tol in any of them, and never far below it."""
    rng, tol, errors, reached = np.random.default_rng(0), 1e-2, [], []
    draw = {"uniform": rng.uniform, "lognormal": partial(rng.lognormal, 0.0, 0.5)}[law]
    table = draw(size=(20_000, 2))
    for _ in range(12):
        points = draw(size=(16_384, 2))
        result = sampled_cholesky(kernel, slow.row_sample(points), 0, tol)
        errors.append(trace_error(kernel, points[result.pivots], result.factor, table) / tol)
        reached.append(result.reached)
    if law == "uniform":
        assert all(reached)
    errors = np.array(errors)[reached]
    assert len(errors) > 6
    assert errors.min() > 0.4  # the margin for few pivots is one or two of them
    assert errors.max() < 1.1
    assert np.sum(errors > 1.0) <= 2


def test_rows_that_tell_nothing_of_others_are_not_fitted_in_vain(rng):
    """Every other row stands alone: pivots of these rows leave as many on others as before."""
    x = rng.uniform(size=(8000, 2))
    x[np.arange(8000) % 4 < 2] *= 1e4
    result = sampled_cholesky(GAUSSIAN, slow.row_sample(x), 0, 0.05)
    assert not result.reached
    assert not result.exhausted
    assert result.residual_trace[-1] <= 0.05
    assert (result.residual_trace <= 0.05).sum() <= len(x) // 16  # no more than one round
    limited = sampled_cholesky(GAUSSIAN, slow.row_sample(x), 0, 0.05, 20)
    assert len(limited.pivots) == 20
    assert not limited.reached


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("tol", "max_rank"), [(1e-3, 60), (1e-12, 20), (1e-12, 60)])
def test_pivots_of_a_search_are_greedy_on_some_rows(rng, tol, max_rank, weighted):
    points = rng.normal(size=(300, 2))
    weights = rng.uniform(0.5, 2.0, 300) if weighted else np.ones(300)
    pivots, factor = pivots_of_few(kernels.Gaussian(1.0), points, tol, max_rank, weights)
    some = np.linspace(0, 299, max(64, 2 * max_rank)).astype(int)
    expected = pivoted_cholesky(
        kernels.Gaussian(1.0), points[some], tol, max_rank, weights=weights[some]
    )
    np.testing.assert_array_equal(pivots, some[expected.pivots])
    np.testing.assert_allclose(factor, expected.factor, atol=1e-9)


def test_pivots_of_a_search_leave_out_copies_and_rows_of_no_weight(rng):
    points = np.repeat(rng.normal(size=(5, 1)), 20, axis=0)
    weights = np.where(points[:, 0] == points[0, 0], 0.0, 1.0)
    pivots, factor = pivots_of_few(kernels.Gaussian(1.0), points, 1e-12, 50, weights)
    assert len(pivots) == len(factor) == 4
    assert (weights[pivots] > 0.0).all()
