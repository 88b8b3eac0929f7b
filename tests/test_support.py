"""Cells of a support: which row is in which, and masses counted in the pass."""

import gc
import weakref
from copy import deepcopy
from dataclasses import replace

import array_api_strict as strict
import dask.array as da
import numpy as np
import pytest
from conftest import write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from threadpoolctl import threadpool_limits

from cme_dask import JointDistribution, kernels, load, open_sample
from cme_dask.chunked.cost import PassWork
from cme_dask.chunked.driver import Executor
from cme_dask.chunked.memory import MemoryBudget, PassShape
from cme_dask.chunked.passes import moment_pass, predict_moments
from cme_dask.chunked.plan import Run
from cme_dask.errors import DataError, StoreError
from cme_dask.learning.support import make_support
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.means import MeanMoments
from cme_dask.numerics.moments import Moments, MomentSpec, Side, StripMoments
from cme_dask.numerics.support import SCORED_ROWS, Support, cell_means


def equal_weights(rows):
    return np.full(len(rows), 1 / len(rows))


def nearest(support, rows):
    """Squared distances of rows to the points, without any product."""
    gaps = (rows[:, None, :] - support.points[None]) / support.scale
    return (gaps**2).sum(axis=2)


# Cells -------------------------------------------------------------------------------------------


def test_scalar_cells_have_equal_masses_and_their_means_as_points():
    y = np.random.default_rng(0).exponential(size=(20_000, 1))
    support = make_support(y, equal_weights(y), 200)
    cells = support.assign(y)
    assert support.size == 200
    counts = np.bincount(cells, minlength=200)
    assert 99 <= counts.min() <= counts.max() <= 101
    means = np.bincount(cells, y[:, 0]) / counts
    assert np.abs(means - support.points[:, 0]).max() < 1e-13
    inside = np.concatenate([[0.0], support.edges, [np.inf]])
    assert ((inside[cells] < y[:, 0]) & (y[:, 0] <= inside[cells + 1])).all()


def test_weights_move_the_quantiles():
    rng = np.random.default_rng(1)
    y, w = rng.normal(size=(20_000, 1)), rng.exponential(size=20_000) ** 2
    w[::7] = 0.0
    support = make_support(y, w, 100)
    masses = np.bincount(support.assign(y), w) / w.sum()
    assert len(masses) == 100
    assert 0.009 < masses.min() <= masses.max() < 0.011


@pytest.mark.parametrize("d", [1, 2, 3])
def test_distinct_values_are_cells_of_their_own(d):
    rng = np.random.default_rng(d)
    values = np.unique(rng.integers(-3, 4, (60, d)) * [1e-3, 1.0, 1e4][:d], axis=0)
    rows = values[rng.integers(0, len(values), 5000)]
    support = make_support(rows, equal_weights(rows), 1000)
    present = np.unique(rows, axis=0)
    assert_array_equal(support.points, present)
    assert_array_equal(support.points[support.assign(rows)], rows)


def test_close_atoms_far_from_the_middle_are_told_apart():
    """Float32 would not: such supports are searched in float64."""
    atoms = np.array([[0.0, 0.0], [1e5, 0.0], [1e5 + 1e-2, 0.0], [1e5, 1e-2]])
    support = Support(atoms, scale=np.ones(2))
    assert not support._centred[2]
    assert_array_equal(support.assign(atoms), np.arange(4))


def test_an_atom_among_continuous_values_keeps_its_cell():
    rng = np.random.default_rng(2)
    y = np.where(rng.random(10_000) < 0.3, 0.0, rng.normal(size=10_000))[:, None]
    support = make_support(y, equal_weights(y), 100)
    cell = support.assign(np.zeros((1, 1)))[0]
    assert support.points[cell, 0] == 0.0
    assert_array_equal(support.assign(y) == cell, y[:, 0] == 0.0)


def test_all_rows_equal_is_one_cell():
    for d in (1, 2):
        rows = np.full((50, d), 3.7)
        support = make_support(rows, equal_weights(rows))
        assert_array_equal(support.points, rows[:1])
        assert_array_equal(support.assign(rows), 0)


def test_vector_cells_are_those_of_voronoi_and_better_than_random_points():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(4000, 3)) * [1e-3, 1.0, 1e3] + [0.0, 1e4, -1e6]
    support = make_support(rows, equal_weights(rows), 100)
    assert support.size == 100
    assert support._centred[2]  # searched in float32
    distance = nearest(support, rows)
    chosen = distance[np.arange(len(rows)), support.assign(rows)]
    assert (chosen <= distance.min(axis=1) + 1e-4).all()
    assert (support.assign(rows) == distance.argmin(axis=1)).mean() > 0.999
    random = nearest(replace(support, points=rows[:100]), rows).min(axis=1)
    assert chosen.mean() < 0.7 * random.mean()


@settings(max_examples=60, deadline=None)
@given(
    d=st.integers(1, 3),
    n=st.integers(1, 300),
    size=st.integers(1, 50),
    levels=st.sampled_from([1, 2, 5, 10**6]),
    scale=st.sampled_from([1e-150, 1e-8, 1.0, 1e8, 1e150]),
    seed=st.integers(0, 10**6),
)
def test_every_row_has_a_cell_and_every_point_its_own(d, n, size, levels, scale, seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(-levels, levels + 1, (n, d)) * scale
    support = make_support(rows, rng.exponential(size=n), size, seed)
    assert 1 <= support.size <= size
    assert len(np.unique(support.points, axis=0)) == support.size
    assert_array_equal(support.assign(support.points), np.arange(support.size))
    assert_array_equal(np.unique(support.assign(rows)), np.arange(support.size))
    fresh = rng.standard_normal((20, d)) * scale * levels * 1e3
    assert set(support.assign(fresh)) <= set(range(support.size))


def test_the_same_rows_give_the_same_cells_on_any_number_of_threads():
    rows = np.random.default_rng(4).normal(size=(3000, 2))
    first = make_support(rows, equal_weights(rows), 150, 5)
    with threadpool_limits(4):
        again = make_support(rows, equal_weights(rows), 150, 5)
    assert_array_equal(first.points, again.points)
    other = make_support(rows, equal_weights(rows), 150, 2**63 - 1)
    assert not np.array_equal(first.points, other.points)


def test_rows_far_from_all_points_have_a_cell():
    support = Support(np.random.default_rng(0).normal(size=(40, 2)), scale=np.ones(2))
    rows = np.array([[1e300, 0.0], [-1e300, 1e300], [1e30, -1e-30]])
    assert set(support.assign(rows)) <= set(range(40))
    assert support.assign(rows[:1])[0] == support.points[:, 0].argmax()


def test_weights_of_any_size():
    rows = np.arange(40.0)[:, None] * np.ones(2)
    w = 10.0 ** np.linspace(-320, 300, 40)
    for part in (rows, rows[:, :1]):
        for size in (5, 100):
            support = make_support(part, w, size)
            assert np.isfinite(support.points).all()
            assert_array_equal(support.points[-1], part[-1])


@pytest.mark.parametrize("d", [1, 2])
def test_another_array_library_finds_the_same_cells(d):
    rows = np.random.default_rng(5).normal(size=(1000, d))
    support = make_support(rows, equal_weights(rows), 60)
    theirs = support.assign(strict.asarray(rows))
    assert_array_equal(np.asarray(theirs), support.assign(rows))


@pytest.mark.parametrize("d", [1, 2])
def test_a_support_travels_as_arrays(d):
    rows = np.random.default_rng(6).normal(size=(500, d))
    support = make_support(rows, equal_weights(rows), 30)
    back = Support.from_arrays(support.to_arrays())
    assert_array_equal(back.assign(rows), support.assign(rows))
    assert_array_equal(back.points, support.points)


def test_means_over_cells_keep_events_that_cut_through_them():
    rng = np.random.default_rng(7)
    rows, w = rng.normal(size=(2000, 2)), rng.exponential(size=2000)
    w /= w.sum()
    support = make_support(rows, w, 30)
    cells = support.assign(rows)
    events = np.stack([rows[:, 0] > 0.1, rows[:, 1] > rows[:, 0]], axis=1).astype(float)
    means = cell_means(events, cells, w, 32)
    for s in range(30):
        mine = cells == s
        plain = np.average(events[mine], axis=0, weights=w[mine])
        assert np.abs(means[s] - plain).max() < 1e-12
    assert np.abs(means[30:] - w @ events).max() < 1e-12
    masses = np.bincount(cells, w, minlength=32)
    assert np.abs(masses @ means - w @ events).max() < 1e-12


def test_what_fits_together_badly_is_refused():
    points, w = np.zeros((2, 1)), np.ones(1)
    with pytest.raises(DataError, match="either edges or a scale"):
        Support(points)
    with pytest.raises(DataError, match="either edges or a scale"):
        Support(points, edges=np.zeros(1), scale=np.ones(1))
    with pytest.raises(DataError, match=r"take 1 edges .* shape \(2,\)"):
        Support(points, edges=np.zeros(2))
    with pytest.raises(DataError, match="ascend"):
        Support(np.zeros((3, 1)), edges=np.zeros(2))
    with pytest.raises(DataError, match="positive"):
        Support(points, scale=np.zeros(1))
    with pytest.raises(DataError, match=r"shape \(S, d\)"):
        Support(np.zeros((0, 1)), edges=np.zeros(0))
    with pytest.raises(DataError, match="at least one cell"):
        make_support(np.ones((1, 1)), w, 0)
    with pytest.raises(DataError, match="positive weight"):
        make_support(np.ones((1, 1)), 0 * w)


# Masses ------------------------------------------------------------------------------------------


def case(n=3000, d=2, seed=0):
    rng = np.random.default_rng(seed)
    X, Y = rng.normal(size=(n, 2)), rng.normal(size=(n, d))
    supports = [make_support(part, equal_weights(part), 40) for part in (X, Y)]
    sides = tuple(
        Side(
            NewtonBasis.from_points(kernels.Gaussian(1.0), part[:15]),
            tuple(f"{name}{i}" for i in range(part.shape[1])),
            support=support,
        )
        for name, part, support in zip("xy", (X, Y), supports, strict=True)
    )
    return X, Y, rng.exponential(size=n), rng.integers(0, 4, n).astype(np.uint8), sides


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("which", ["x", "y", "xy"])
def test_masses_are_the_weights_of_the_rows_of_each_cell_and_fold(which, d, weighted):
    X, Y, w, folds, sides = case(d=d)
    sides = tuple(
        side if name in which else replace(side, support=None)
        for side, name in zip(sides, "xy", strict=True)
    )
    spec = MomentSpec(sides, 5)  # the last fold stays empty
    moments = spec.strip((X, Y), w if weighted else None, folds)
    assert moments.masses.shape == (5, sum(spec.cells))
    weights = w if weighted else np.ones(len(X))
    start = 0
    for part, side in zip((X, Y), sides, strict=True):
        if side.support is None:
            continue
        cells, stop = side.support.assign(part), start + side.cells
        for fold in range(5):
            mine = folds == fold
            plain = np.bincount(cells[mine], weights[mine], minlength=side.cells)
            assert np.abs(moments.masses[fold, start:stop] - plain).max() < 1e-11
        start = stop
    mean = MeanMoments.of(moments.total(), sides)
    assert [len(v) for v in mean.masses] == [side.cells for side in sides]
    for v in mean.masses:
        assert not len(v) or abs(v.sum() - 1) < 1e-15


def test_masses_add_and_travel_as_arrays():
    X, Y, w, folds, sides = case()
    spec = MomentSpec(sides, 4)
    whole = spec.strip((X, Y), w, folds)
    halves = [spec.strip((X[s], Y[s]), w[s], folds[s]) for s in (slice(0, 900), slice(900, None))]
    total = halves[0] + halves[1]
    assert np.abs(total.masses - whole.masses).max() < 1e-11
    halves[0] += halves[1]
    assert_array_equal(halves[0].masses, total.masses)
    assert np.allclose((total.only([1, 2]) + total.only([0, 3])).masses, total.total().masses)
    back = Moments.from_arrays(total.to_arrays())
    assert_array_equal(back.masses, total.masses)
    other = spec.strip((strict.asarray(X), strict.asarray(Y)), strict.asarray(w), folds)
    assert np.abs(other.masses - whole.masses).max() < 1e-11


def test_without_supports_nothing_changes():
    X, Y, w, folds, sides = case()
    bare = tuple(replace(side, support=None) for side in sides)
    one, two = (MomentSpec(s, 4).strip((X, Y), w, folds) for s in (sides, bare))
    for name in ("gram", "traces", "rows"):
        assert_array_equal(getattr(one, name), getattr(two, name))
    assert two.masses.shape == (4, 0)
    assert set(two.to_arrays()) == {"gram", "traces", "rows"}
    assert Moments.from_arrays(two.to_arrays()).masses.shape == (4, 0)
    assert [len(v) for v in MeanMoments.of(two.total(), bare).masses] == [0, 0]


def passed(sample, sides, workers=2):
    budget = MemoryBudget.of(Executor.resolve("threads", workers), None)
    return moment_pass(sample, MomentSpec(sides, 5), budget)[0]


def test_masses_of_a_pass_are_the_same_bits_however_the_rows_are_cut(tmp_path):
    X, Y, w, _, sides = case(20_000)
    first = passed(open_sample(X, Y, weights=w), sides)
    cells = sides[1].support.assign(Y)
    plain = np.bincount(cells, w, minlength=sides[1].cells)
    total = first.masses.sum(axis=0)
    assert np.abs(total[sides[0].cells :] - plain).max() < 1e-10
    store = write_store(tmp_path / "s", X, Y, w, chunk_rows=777)
    chunked = (da.from_array(part, chunks=(1234, -1)) for part in (X, Y))
    others = [
        passed(open_sample(store), sides, 1),
        passed(open_sample(*chunked, weights=da.from_array(w, chunks=999)), sides, 3),
    ]
    for other in others:
        assert_array_equal(other.masses, first.masses)
        assert_array_equal(other.gram, first.gram)


@pytest.mark.parametrize("d", [1, 2])
def test_a_strip_leaves_no_memory_to_the_garbage_collector(d):
    X, Y, _, folds, sides = case(500, d)
    gc.disable()
    try:
        loop = StripMoments(MomentSpec(sides, 4), X)
        loop((X, Y), None, folds)
        gone = weakref.ref(loop)
        del loop
        assert gone() is None
    finally:
        gc.enable()
    back = deepcopy(sides[1].support)  # by what pickles it for other processes
    assert_array_equal(back.assign(Y), sides[1].support.assign(Y))


def test_memory_and_cost_know_the_cells():
    values = {
        "n_rows": 10**6,
        "n_columns": 3,
        "chunk_rows": 0,
        "materialised": False,
        "ranks": (20, 20),
        "width": 44,
        "n_folds": 10,
    }
    without, with_cells = PassShape(**values), PassShape(**values, cells=1000)
    assert with_cells.partial_bytes - without.partial_bytes == 10 * 1000 * 8
    run = [Run(0, 4096, 4096)]
    assert (
        with_cells.task_bytes(run[0]) - without.task_bytes(run[0]) == (10 + SCORED_ROWS) * 1000 * 8
    )
    X, Y, _, _, sides = case(1000)
    sample, spec = open_sample(X, Y), MomentSpec(sides, 3)
    assert PassWork.of(sample, spec, run, 2).cells == sum(spec.cells) == 80
    budget = MemoryBudget(Executor("threads", 2), 1 << 40, ())
    plans = [
        predict_moments(sample, spec.ranks, spec.width, 3, budget, cells=cells)[1].predicted
        for cells in (0, 10**6)
    ]
    assert plans[1] - plans[0] > 3 * 8 * 10**6


def test_a_saved_model_keeps_masses_and_does_without(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 1))
    kernel = kernels.Gaussian(1.0)
    fit = JointDistribution(kernel_x=kernel, kernel_y=kernel, tol=0.1, n_folds=2).fit(x, x)
    bare = {k: v for k, v in fit.model_.moments.items() if k != "masses"}
    cells = fit.model_.support.size
    without = replace(fit.model_, moments=bare, support=None)
    for name, model in (("with", fit.model_), ("without", without)):
        model.save(tmp_path / name)
        back = load(tmp_path / name)
        assert set(back.moments) == set(model.moments)
        assert len(Moments.from_arrays(back.moments).masses) == 2
        assert (back.support is None) == (name == "without")
    assert_array_equal(load(tmp_path / "with").masses, fit.model_.masses)
    damaged = {
        "folds": np.ones((3, cells)),
        "cells": np.ones((2, cells + 1)),
        "negative": -np.ones((2, cells)),
    }
    for name, masses in damaged.items():
        replace(fit.model_, moments={**bare, "masses": masses}).save(tmp_path / name)
        with pytest.raises(StoreError, match="masses"):
            load(tmp_path / name)
    replace(fit.model_, moments=bare).save(tmp_path / "no masses")
    with pytest.raises(StoreError, match="moments_masses"):
        load(tmp_path / "no masses")
