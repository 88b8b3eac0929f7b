"""Cells of a support: which row is in which."""

import pickle
from copy import deepcopy
from unittest.mock import patch

import array_api_strict as strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from sklearn.cluster import KMeans

from cme_dask.errors import DataError
from cme_dask.numerics import support as tree_module
from cme_dask.numerics.support import Support, make_support


def equal_weights(rows):
    return np.full(len(rows), 1 / len(rows))


def walked(support, row):
    """Cell of one row, node by node."""
    leaves = [i for i, left in enumerate(support.left) if left == i]
    node = 0
    while support.left[node] != node:
        node = support.left[node] + (row[support.features[node]] > support.thresholds[node])
    return leaves.index(node)


def distortion(rows, cells):
    """Mean squared distance from the means of the cells."""
    sums = sum(len(rows[cells == s]) * rows[cells == s].var(axis=0).sum() for s in np.unique(cells))
    return sums / len(rows)


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
    inside = np.concatenate([[0.0], support.thresholds, [np.inf]])
    assert ((inside[cells] < y[:, 0]) & (y[:, 0] <= inside[cells + 1])).all()


def test_whole_weights_are_repeated_rows():
    """Borders of cells of equal masses are then often at a row, where rounding decides."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        rows, times = rng.normal(size=(300, 1)), rng.integers(0, 4, 300)
        weighted = make_support(rows, times / times.sum(), 20)
        repeated = np.repeat(rows, times, axis=0)
        plain = make_support(repeated, np.full(len(repeated), 1.0 / len(repeated)), 20)
        np.testing.assert_allclose(weighted.thresholds, plain.thresholds, rtol=1e-12)


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
    assert_array_equal(np.unique(support.points, axis=0), present)
    assert support.size == len(present)
    assert_array_equal(support.points[support.assign(rows)], rows)


def test_close_atoms_far_from_the_middle_are_told_apart():
    """Float32 would not, and squared distances would lose them."""
    atoms = np.array([[0.0, 0.0], [1e9, 0.0], [1e9 + 1e-6, 0.0], [1e9, 1e-6], [1e9, 2e-6]])
    rows = np.repeat(atoms, 20, axis=0)
    for size in (5, 50):
        support = make_support(rows, equal_weights(rows), size)
        assert_array_equal(support.points[support.assign(atoms)], atoms)


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


def test_vector_cells_are_the_boxes_of_the_tree():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(4000, 3)) * [1e-3, 1.0, 1e3] + [0.0, 1e4, -1e6]
    support = make_support(rows, equal_weights(rows), 100)
    assert support.size == 100
    cells = support.assign(rows)
    assert_array_equal(cells[:500], [walked(support, row) for row in rows[:500]])
    means = np.stack([rows[cells == s].mean(axis=0) for s in range(100)])
    assert (np.abs(means - support.points) < 1e-12 * np.abs(means)).all()
    assert len(support.levels) <= 12


@pytest.mark.parametrize("d", [2, 3])
def test_boxes_are_nearly_as_good_as_k_means(d):
    rng = np.random.default_rng(d)
    rows, unseen = rng.normal(size=(8000, d)), rng.normal(size=(20_000, d))
    support = make_support(rows, equal_weights(rows), 300)
    centres = KMeans(300, n_init=1, max_iter=10, random_state=0).fit(rows)
    ratio = distortion(unseen, support.assign(unseen)) / distortion(unseen, centres.predict(unseen))
    assert ratio < 1.25


def test_no_cell_mixes_labels():
    rng = np.random.default_rng(8)
    rare = (rng.random(20_000) < 5e-4).astype(float)
    rows = np.column_stack([rng.integers(0, 5, 20_000), 1e3 * rng.normal(size=20_000), rare])
    support = make_support(rows, equal_weights(rows), 60, (True, False, True))
    cells = support.assign(rows)
    combination = 2 * rows[:, 0] + rows[:, 2]
    for s in range(support.size):
        assert len(np.unique(combination[cells == s])) == 1
    mixed = make_support(rows, equal_weights(rows), 60).assign(rows)
    assert any(len(np.unique(combination[mixed == s])) > 1 for s in range(60))
    few = make_support(rows, equal_weights(rows), 4, (True, False, True))
    assert few.size == 4  # more combinations than cells


@settings(max_examples=60)
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
    support = make_support(rows, rng.exponential(size=n), size)
    assert 1 <= support.size <= size
    assert len(np.unique(support.points, axis=0)) == support.size
    assert_array_equal(support.assign(support.points), np.arange(support.size))
    assert_array_equal(np.unique(support.assign(rows)), np.arange(support.size))
    if size >= len(np.unique(rows, axis=0)):
        assert_array_equal(support.points[support.assign(rows)], rows)
    fresh = rng.standard_normal((20, d)) * scale * levels * 1e3
    assert set(support.assign(fresh)) <= set(range(support.size))


def test_the_same_rows_give_the_same_cells_in_any_order():
    rng = np.random.default_rng(4)
    rows, order = rng.normal(size=(3000, 2)), rng.permutation(3000)
    first = make_support(rows, equal_weights(rows), 150)
    again = make_support(rows[order], equal_weights(rows), 150)
    assert_array_equal(first.points, again.points)
    assert_array_equal(first.thresholds, again.thresholds)


def test_rows_far_from_all_points_have_a_cell():
    rows = np.random.default_rng(0).normal(size=(40, 2))
    support = make_support(rows, equal_weights(rows), 30)
    far = np.array([[1e300, 0.0], [-1e300, 1e300], [np.inf, -1e-30]])
    assert set(support.assign(far)) <= set(range(30))
    assert support.assign(far[:1])[0] == support.assign([1e3, 0.0] * np.ones((1, 2)))[0]


def test_weights_of_any_size():
    rows = np.arange(40.0)[:, None] * np.ones(2)
    w = 10.0 ** np.linspace(-320, 300, 40)
    for part in (rows, rows[:, :1]):
        for size in (5, 100):
            support = make_support(part, w, size)
            assert np.isfinite(support.points).all()
            assert_array_equal(support.points[support.assign(part[-1:])], part[-1:])


@pytest.mark.parametrize("d", [1, 2])
def test_another_array_library_finds_the_same_cells(d):
    rows = np.random.default_rng(5).normal(size=(1000, d))
    support = make_support(rows, equal_weights(rows), 60)
    theirs = support.assign(strict.asarray(rows))
    assert_array_equal(np.asarray(theirs), support.assign(rows))


def stump(points=((0.0, 0.0), (1.0, 0.0)), **changes):
    """One split of two columns."""
    arrays = {
        "thresholds": np.array([0.5, np.inf, np.inf]),
        "features": np.zeros(3, dtype=np.int64),
        "left": np.array([1, 1, 2]),
    }
    changed = {name: values and np.asarray(values) for name, values in changes.items()}
    return Support(np.array(points), **arrays | changed)


def test_what_fits_together_badly_is_refused():
    w = np.ones(1)
    with pytest.raises(DataError, match=r"take 1 thresholds .* shape \(2,\)"):
        Support(np.zeros((2, 1)), np.zeros(2))
    for thresholds in ([0.0, 0.0], [np.nan, 1.0], [0.0, np.inf]):
        with pytest.raises(DataError, match="ascend"):
            Support(np.zeros((3, 1)), np.array(thresholds))
    with pytest.raises(DataError, match="thresholds of a scalar variable"):
        Support(np.zeros((2, 2)), np.zeros(1))
    with pytest.raises(DataError, match="take a tree of 3 leaves on 2 columns, got 2 leaves"):
        stump(np.zeros((3, 2)))
    with pytest.raises(DataError, match="columns up to 2"):
        stump(features=[2, 0, 0])
    with pytest.raises(DataError, match=r"shape \(S, d\)"):
        Support(np.zeros((0, 1)), np.zeros(0))
    with pytest.raises(DataError, match="at least one cell"):
        make_support(np.ones((1, 1)), w, 0)
    with pytest.raises(DataError, match="positive weight"):
        make_support(np.ones((1, 1)), 0 * w)


@pytest.mark.parametrize(
    "changes",
    [
        {"left": [1, 1]},
        {"left": None},
        {"features": None},
        {"left": [0.0, 1.0, 2.0]},
        {"left": [1, 1, 1]},
        {"left": [2, 1, 2]},
        {"left": [1, 0, 2]},
        {"left": [-3, 1, 2]},
        {"left": [0, 1, 2]},
        {"left": [10**9, 1, 2]},
        {"thresholds": [np.nan, np.inf, np.inf]},
        {"thresholds": [np.inf, np.inf, np.inf]},
        {"thresholds": [0.5, 0.5, np.inf]},
        {"features": [-1, 0, 0]},
        {"left": (), "features": (), "thresholds": ()},
    ],
)
def test_what_is_no_tree_is_refused(changes):
    assert_array_equal(stump().assign(np.array([[0.5, 0.0], [0.6, 0.0], [np.nan, 0.0]])), [0, 1, 0])
    with pytest.raises(DataError, match="tree"):
        stump(**changes)


@settings(max_examples=40)
@given(n=st.integers(1, 60), size=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_all_rows_at_once_and_one_by_one_find_the_same_leaves(n, size, seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(-3, 4, (n, 3)) * 0.1
    support = make_support(rows, rng.exponential(size=n), size)
    fresh = rng.integers(-4, 5, (30, 3)) * 0.1
    fresh[3, 1] = np.nan
    expected = [walked(support, row) for row in fresh]
    for block, deep in ((1 << 16, 32), (7, 32), (7, 0)):
        with (
            patch.object(tree_module, "WALK_ROWS", block),
            patch.object(tree_module, "_DEEP", deep),
        ):
            again = deepcopy(support)  # without what is cached
            assert_array_equal(again.assign(fresh), expected)
            assert_array_equal(again.assign(np.asfortranarray(fresh)[::-1]), expected[::-1])


def test_what_a_tree_keeps_does_not_travel_and_grows_with_its_nodes():
    """A file may hold a tree of one leaf in each of many levels."""
    count = 2000
    left = np.arange(2 * count + 1)
    inner = np.array([0, *range(1, 2 * count - 1, 2)])
    left[inner] = [*inner[1:], 2 * count - 1]
    threshold = np.full(2 * count + 1, np.inf)
    threshold[inner] = -np.arange(count)
    features, points = np.zeros(2 * count + 1, dtype=np.int64), np.zeros((count + 1, 1))
    tree = Support(points, threshold, features, left)
    before = len(pickle.dumps(tree))
    rows = np.array([[1.0], [-500.5], [-1e9]])
    assert_array_equal(tree.assign(rows), [walked(tree, row) for row in rows])
    assert len({id(array) for level in tree.levels for array in level}) == 3
    assert len(pickle.dumps(tree)) == before


@pytest.mark.parametrize("deep", [39, 40])
@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_leaves_of_any_depth_are_found_block_by_block(block, deep, monkeypatch):
    """Every split of this tree has one leaf, so that most leaves stand in many levels.

    Its depth is 40: with 39 it is walked by its nodes, with 40 by its levels.
    """
    monkeypatch.setattr(tree_module, "WALK_ROWS", block)
    monkeypatch.setattr(tree_module, "_DEEP", deep)
    rows = np.stack([2.0 ** np.arange(40), np.zeros(40)], axis=1)
    left, threshold = np.arange(81), np.full(81, np.inf)
    inner = np.array([0, *range(1, 79, 2)])  # whose right children are leaves
    left[inner] = [*inner[1:], 79]
    threshold[inner] = 0.75 * 2.0 ** np.arange(39, -1, -1)
    tree = Support(np.zeros((41, 2)), threshold, np.zeros(81, dtype=np.int64), left)
    assert len(tree.levels) == 40
    found = tree.assign(rows)
    assert_array_equal(found, [walked(tree, row) for row in rows])
    assert len(set(found)) == 40
    assert_array_equal(tree.assign(rows.astype(np.float32)), found)
    assert_array_equal(tree.assign(rows[::-1]), found[::-1])
