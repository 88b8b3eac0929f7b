"""Landmarks: which rows, and how many."""

import numpy as np
import pytest

from cme_dask import JointDistribution
from cme_dask.constraints import Coupling, Pointwise
from cme_dask.data.generate import Normal3
from cme_dask.errors import DataError
from cme_dask.kernels import Delta, Gaussian
from cme_dask.learning.landmarks import choose_landmarks, landmark_number
from cme_dask.numerics.coupling import solve_coupling
from cme_dask.numerics.folds import distinct_in_random_order, fold_of_rows
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.problem import Regularization

REG = Regularization(1e-4, 1e-4)


def rows(n=800, scenario="strong"):
    x, y = next(Normal3(scenario).batches(n, 5))
    return x, y, np.full(n, 1.0 / n)


def test_choices():
    x, y, w = rows()
    pivots = choose_landmarks(Gaussian(0.1), y, w, 12)
    assert all((y == p).all(axis=1).any() for p in pivots)
    np.testing.assert_array_equal(choose_landmarks(Gaussian(0.1), y, w, 5), pivots[:5])
    means = choose_landmarks(Gaussian(0.1), y, w, 12, "kmeans", 3)
    np.testing.assert_array_equal(means, choose_landmarks(Gaussian(0.1), y, w, 12, "kmeans", 3))
    assert means.shape == (12, 2)
    assert choose_landmarks(Gaussian(0.1), x, w, 12, "kmeans").shape == (12, 1)
    with pytest.raises(DataError, match="choice must be one of pivots, kmeans, got 'first'"):
        choose_landmarks(Gaussian(0.1), x, w, 12, "first")


def test_the_random_order_of_distinct_rows_is_of_ranks_alone():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 9, (300, 3)) + 0.0  # many ranks come in several orders
    first, which = distinct_in_random_order(rows)
    order = rows[first]
    assert len(np.unique(rows, axis=0)) == len(order)
    np.testing.assert_array_equal(order[which], rows)
    several = {
        "units": rows * [1024.0, 2.0**-20, 1e5],
        "offsets": rows + np.array([0.0, 1e6, -3.0]),
        "rows": rows[rng.permutation(300)],
        "twice": np.repeat(rows, 2, axis=0),
        "monotone": np.exp(rows),
    }
    for name, other in several.items():
        moved = {tuple(new): tuple(old) for new, old in zip(other, rows, strict=False)}
        found = other[distinct_in_random_order(other)[0]]
        if name in ("rows", "twice"):
            np.testing.assert_array_equal(found, order, err_msg=name)
        else:
            np.testing.assert_array_equal([moved[tuple(row)] for row in found], order, name)
    turned = rows[:, [2, 0, 1]]
    np.testing.assert_array_equal(turned[distinct_in_random_order(turned)[0]], order[:, [2, 0, 1]])
    # As good as random: neighbours in it are as far apart as any two rows.
    near, any_two = (
        np.abs(order - other).sum(axis=1).mean()
        for other in (np.roll(order, 1, axis=0), rng.permutation(order))
    )
    assert near == pytest.approx(any_two, rel=0.1)


@pytest.mark.parametrize("constraint", [Coupling(landmarks=9), Coupling(), Pointwise(landmarks=30)])
def test_laws_do_not_depend_on_units_and_the_order_of_columns(constraint):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(250, 2))
    y = np.sin(2 * x[:, :1]) + 0.3 * x[:, 1:] + 0.3 * rng.normal(size=(250, 1))
    at = x[:5] + 0.1

    def mean(scale=1.0, columns=(0, 1), unit=1.0):
        model = JointDistribution(
            kernel_x=Gaussian(0.6 * scale),
            kernel_y=Gaussian(0.4 * unit),
            constraint=constraint,
            residual=False,
            reg=1e-3,
            tol=0.3,
        ).fit(x[:, list(columns)] * scale, y * unit)
        return model.conditional(at[:, list(columns)] * scale).mean() / unit

    expected = mean()
    for changed in ({"scale": 1024.0}, {"unit": 2.0**-20}, {"columns": (1, 0)}):
        np.testing.assert_allclose(mean(**changed), expected, rtol=0, atol=1e-7, err_msg=changed)


@pytest.mark.parametrize("choice", ["pivots", "kmeans"])
def test_few_distinct_rows(choice):
    levels = np.repeat([[0.0], [1.0], [4.0]], 20, axis=0)
    found = choose_landmarks(Gaussian(1.0), levels, np.full(60, 1 / 60), 8, choice)
    assert sorted(found[:, 0]) == [0.0, 1.0, 4.0]


def test_landmarks_have_labels_of_rows():
    rng = np.random.default_rng(0)
    codes, w = rng.integers(0, 5, 400).astype(float), np.full(400, 1 / 400)
    z = np.column_stack([rng.normal(size=400), codes])
    found = choose_landmarks(Gaussian(1.0), z, w, 24, "kmeans", categorical=(False, True))
    assert len(found) > 5
    assert set(found[:, 1]) <= set(codes)
    few = choose_landmarks(Gaussian(1.0), codes[:, None], w, 3, "kmeans", categorical=(True,))
    assert set(few[:, 0]) <= set(codes)


def test_the_number_of_landmarks_is_chosen_on_whole_groups():
    rng = np.random.default_rng(1)
    station = np.repeat(np.arange(40), 20)  # twenty rows of each, nearly the same
    x, y = (rng.normal(size=(40, 1))[station] + 1e-3 * rng.normal(size=(800, 1)) for _ in "xy")
    w, kernel = np.full(800, 1 / 800), Gaussian(0.3)
    both = [(kernel, kernel), (x, y), w, REG]
    by_row = landmark_number(*both, candidates=(2, 8, 32))
    by_station = landmark_number(*both, candidates=(2, 8, 32), folds=station % 5)
    assert by_row.count == 32
    assert by_station.count == 2
    assert min(by_station.losses) > -0.05  # there is nothing to find


def dense_losses(x, y, points_x, points_y, kernel, weights):
    """Held-out losses written with all pairs of rows: -2 (E_P h - E_PxP h) + E_PxP h^2."""
    folds = fold_of_rows(0, len(x), 5)
    losses, masses = [], []
    for fold in range(5):
        rest, held = folds != fold, folds == fold
        b = []
        for z, p in ((x, points_x), (y, points_y)):
            K = kernel(z, p)
            b.append(K / K.sum(axis=1, keepdims=True))
        w, v = weights[rest] / weights[rest].sum(), weights[held] / weights[held].sum()
        bx, by = b[0][rest], b[1][rest]
        C, _ = solve_coupling(
            (by.T * w) @ by, (by.T * w) @ bx, (bx.T * w) @ bx, w @ by, w @ bx, REG, tol=1e-4
        )
        h = b[1][held] @ C @ b[0][held].T - 1.0
        product = np.outer(v, v)
        losses.append(-2 * (v @ np.diag(h) - (product * h).sum()) + (product * h**2).sum())
        masses.append(weights[held].sum())
    return np.array(losses), np.array(masses) / np.sum(masses)


def test_number_and_its_losses():
    x, y, w = rows()
    w = w * np.random.default_rng(0).uniform(0.5, 2.0, len(w))
    kernel = Gaussian(0.12)
    found = landmark_number((kernel, kernel), (x, y), w, REG, candidates=(32, 2, 8))
    assert found.candidates == (2, 8, 32)[: len(found.candidates)]
    assert found.count in found.candidates
    for count, loss in zip(found.candidates, found.losses, strict=True):
        points = [choose_landmarks(kernel, z, w, count) for z in (x, y)]
        expected, share = dense_losses(x, y, *points, kernel, w)
        assert loss == pytest.approx(share @ expected, abs=1e-5)
    assert found.count > 2  # two functions a side can't tell much of strong dependence
    assert found.losses[found.candidates.index(found.count)] < 0.0


def test_stops_where_nothing_is_gained():
    x, y, w = rows(400)
    y = np.random.default_rng(0).permutation(y)  # independent
    found = landmark_number((Gaussian(0.2),) * 2, (x, y), w, Regularization(1e-2, 1e-2))
    assert found.count == 8
    assert found.candidates == (8, 16)


def test_ends_with_the_landmarks():
    level = np.repeat([[0.0], [1.0], [2.0]], 40, axis=0)
    w = np.full(120, 1 / 120)
    found = landmark_number((Delta(), Delta()), (level, level), w, REG)
    assert found.candidates == (8,)
    assert found.losses[0] == pytest.approx(-2.0, abs=0.2)  # three classes: 1 - E g = -2
    assert PartitionBasis(Delta(), choose_landmarks(Delta(), level, w, found.count)).rank == 3


def test_too_few_rows():
    with pytest.raises(DataError, match="takes 5 rows, got 3"):
        landmark_number((Delta(), Delta()), (np.eye(3), np.eye(3)), np.ones(3) / 3, REG)
