"""Transforms of columns: the maps, kernels of mapped columns, and maps learned from a sample."""

import json
import math
import pickle

import array_api_strict
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from cme_dask.errors import DataError
from cme_dask.kernels import (
    Categorical,
    Custom,
    Delta,
    Gaussian,
    Laplace,
    Linear,
    Matern,
    PoolRare,
    Scores,
    Standard,
    Transform,
    TransformedKernel,
    from_dict,
)
from cme_dask.learning.transforms import KNOTS, learn_transform

EPS = np.finfo(float).eps
quick = settings(max_examples=60)

# The maps.

THREE = Transform(
    (Standard(2.0, 0.5), Scores((-1.0, 0.0, 3.0), (-2.0, 0.5, 1.0)), PoolRare((0.0, 3.0, 7.0)))
)


def rows(n=40, seed=0):
    """Rows for ``THREE``; some twice, some beyond the knots, some of unknown levels."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.normal(size=(n, 2)) * 3, rng.choice([-1.0, 0, 3, 5, 7], n)])
    X[n // 2 : n // 2 + 3] = X[:3]
    X[3, 1], X[4, 1], X[5, 1] = -1.0, 0.0, 3.0
    return X


def slow_scores(values, scores, x):
    """The segment found by looking, and the line through its ends."""
    i = 0
    while i < len(values) - 2 and x > values[i + 1]:
        i += 1
    slope = (scores[i + 1] - scores[i]) / (values[i + 1] - values[i])
    return scores[i] + slope * (x - values[i])


def slow(X):
    scores = THREE.columns[1]
    return np.array(
        [
            [
                (a - 2.0) / 0.5,
                slow_scores(scores.values, scores.scores, b),
                {0.0: 0.0, 3.0: 1.0, 7.0: 2.0}.get(c, 3.0),
            ]
            for a, b, c in X.tolist()
        ]
    )


def test_maps_equal_oracle():
    X = rows()
    np.testing.assert_allclose(THREE(X), slow(X), 8 * EPS, 8 * EPS)
    one = THREE.columns[1](np, X[:, 1])
    np.testing.assert_array_equal(one, THREE(X)[:, 1])
    assert THREE(X[:0]).shape == (0, 3)


def test_knots_go_to_their_scores_and_tails_go_on():
    scores = THREE.columns[1]
    at = scores(np, np.array([-1.0, 0.0, 3.0, -2.0, 6.0, -1e9]))
    np.testing.assert_allclose(at[:5], [-2.0, 0.5, 1.0, -4.5, 1.5], 4 * EPS)
    assert at[5] == pytest.approx(-2.5e9)


def test_neighbouring_knots_have_no_slope_but_a_share():
    scores = Scores((0.0, 5e-324, 1.0), (-1.0, 1.0, 2.0))
    np.testing.assert_array_equal(
        scores(np, np.array([0.0, 5e-324, 0.5, 1.0])), [-1.0, 1.0, 1.5, 2.0]
    )


def test_all_levels_pooled():
    np.testing.assert_array_equal(PoolRare(())(np, np.array([0.0, 5.0, -1.0])), [0.0, 0.0, 0.0])


def test_maps_follow_the_array_api():
    X = rows()
    mapped = THREE(array_api_strict.asarray(X))
    assert type(mapped) is type(array_api_strict.asarray(X))
    np.testing.assert_array_equal(np.asarray(mapped), THREE(X))
    single = THREE(X.astype(np.float32))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, THREE(X), 1e-5, 1e-5)


# Kernels of mapped columns.

BASES = [
    Gaussian(0.7),
    Gaussian((0.5, 1.0, 2.0)),
    Laplace(1.0),
    Matern(1.0, 1.5),
    Delta(),
    Linear(1.0),
    Gaussian((0.5, 1.0))[0, 1] * Categorical(0.8)[2],
    2.0 * Gaussian(1.0)[1] + Delta()[2],
]


@pytest.mark.parametrize("base", BASES, ids=repr)
def test_warped_is_the_base_of_mapped_rows(base):
    X, Z = rows(), rows(12, seed=1)
    kernel, mapped = TransformedKernel(base, THREE), (slow(X), slow(Z))
    expected, size = base(*mapped), 1 + np.abs(mapped[0]).max() ** 2
    np.testing.assert_allclose(kernel(X, Z), expected, 0, 40 * EPS * size)
    np.testing.assert_allclose(kernel.diagonal(X), base.diagonal(mapped[0]), 40 * EPS)
    assert kernel.upper_bound == base.upper_bound
    kernel.check(3)
    K = kernel(X, X)
    assert np.linalg.eigvalsh((K + K.T) / 2).min() >= -1e-13 * np.abs(K).max() * len(X)
    strict = kernel(array_api_strict.asarray(X), array_api_strict.asarray(Z))
    # Only NumPy's arrays are zero below 1e-152.
    np.testing.assert_allclose(np.asarray(strict), kernel(X, Z), rtol=1e-15, atol=1e-152)
    assert from_dict(json.loads(json.dumps(kernel.to_dict(), allow_nan=False))) == kernel
    again = pickle.loads(pickle.dumps(kernel))  # noqa: S301 (our own bytes, as Dask sends them)
    assert again == kernel
    assert hash(again) == hash(kernel)


def test_warped_logarithms():
    X, Z = rows(), rows(12, seed=1)
    kernel = TransformedKernel(Gaussian(0.05)[0, 1] * Categorical(0.5)[2], THREE)
    logarithms = np.empty((12, 40))
    kernel.evaluator(Z, log=True)(X, logarithms)
    mapped, points = slow(X), slow(Z)
    squared = ((mapped[:, None, :2] - points[None, :, :2]) ** 2).sum(axis=-1)
    expected = -squared / 2 / 0.05**2 - 4.0 * (mapped[:, None, 2] != points[None, :, 2])
    np.testing.assert_allclose(logarithms.T, expected, 1e-12, 1e-9)
    assert expected.min() < -1e4  # where the kernel itself is zero


def test_warped_writes_any_block_with_the_same_bits():
    X, Z = rows(), rows(12, seed=1)
    whole, parts = np.empty((12, 40)), np.empty((12, 40))
    kernel = TransformedKernel(Laplace(1.0)[0, 1] * Categorical(0.5)[2], THREE)
    kernel.evaluator(Z)(X, whole)
    write = kernel.evaluator(Z)
    for part in (slice(0, 17), slice(17, 18), slice(18, 40)):
        write(X[part], parts[:, part])
    np.testing.assert_array_equal(parts, whole)


def test_warped_in_words():
    kernel = TransformedKernel(Gaussian(0.5)[0, 1] * Categorical(0.8)[2], THREE)
    text = (
        "Gaussian(length_scale=0.5)[0, 1] * Categorical(length_scale=0.8)[2] "
        "of standardised columns and normal scores and pooled levels"
    )
    assert repr(kernel) == text
    assert repr(2.0 * kernel) == f"2.0 * ({text})"
    scores = Transform((Scores((0.0, 1.0), (-1.0, 1.0)),))
    assert (
        repr(TransformedKernel(Delta() + Delta(), scores)) == "(Delta() + Delta()) of normal scores"
    )


def test_users_kernels_in_coordinates_are_supplied():
    custom = Custom("ones", lambda X, Z: np.ones((len(X), len(Z))), lambda X: np.ones(len(X)))
    kernel = TransformedKernel(custom, THREE)
    assert from_dict(kernel.to_dict(), {"ones": custom}) == kernel
    with pytest.raises(DataError, match="was not supplied"):
        from_dict(kernel.to_dict())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Standard(np.nan, 1.0), "shift must be a finite number, got nan"),
        (lambda: Standard(10**400, 1.0), "shift must be a finite number"),
        (lambda: Standard(0.0, 0.0), "scale must be positive and finite, got 0"),
        (lambda: Scores((0.0,), (0.0,)), "at least two and equally many, got 1 and 1"),
        (lambda: Scores((0.0, 1.0), (0.0, 1.0, 2.0)), "equally many, got 2 and 3"),
        (lambda: Scores((1.0, 0.0), (0.0, 1.0)), "values must be ascending and distinct"),
        (lambda: Scores((0.0, 1.0), (1.0, 1.0)), "scores must be ascending and distinct"),
        (lambda: Scores((0.0, math.inf), (0.0, 1.0)), "values must be a finite number, got inf"),
        (lambda: Scores((-1.7e308, 1.7e308), (0.0, 1.0)), "must span a finite range"),
        (lambda: Scores("01", (0.0, 1.0)), "values must be a list of numbers"),
        (lambda: PoolRare((0.0, True)), "levels must be a finite number, got True"),
        (lambda: PoolRare((1.0, 0.0)), "levels must be ascending"),
        (lambda: Transform(()), "columns must be at least one of Standard, Scores, PoolRare"),
        (lambda: Transform((Delta(),)), "columns must be at least one of"),
        (lambda: TransformedKernel(1.0, THREE), "base must be a kernel"),
        (lambda: TransformedKernel(Delta(), THREE.columns), "transform must be a Transform"),
        (
            lambda: TransformedKernel(Delta(), THREE).check(2),
            "transform of 3 columns but the data have 2",
        ),
        (lambda: TransformedKernel(Gaussian((1.0, 2.0)), THREE).check(3), "2 length scales"),
    ],
)
def test_bad_constructions(build, message):
    with pytest.raises(DataError, match=message):
        build()


@pytest.mark.parametrize(
    ("d", "message"),
    [
        (None, "described by a list of columns, got None"),
        ({"kernel": "Delta"}, "described by a list of columns"),
        ({"columns": "Standard"}, "described by a list of columns"),
        ({"columns": [], "x": 1}, "described by a list of columns"),
        ({"columns": []}, "columns must be at least one"),
        ({"columns": [1]}, "unknown transform None"),
        ({"columns": [{"transform": "ColumnTransform"}]}, "unknown transform 'ColumnTransform'"),
        ({"columns": [{"transform": ["Standard"]}]}, "unknown transform"),
        ({"columns": [{"transform": "Standard"}]}, "takes exactly the keys"),
        ({"columns": [{"transform": "PoolRare", "levels": [0], 3: 1}]}, "takes exactly the keys"),
        ({"columns": [{"transform": "PoolRare", "levels": {"a": 1}}]}, "must be a list of numbers"),
        ({"columns": [{"transform": "PoolRare", "levels": [[0.0]]}]}, "must be a finite number"),
    ],
)
def test_hostile_dicts(d, message):
    kernel = {"kernel": "TransformedKernel", "base": {"kernel": "Delta"}, "transform": d}
    with pytest.raises(DataError, match=message):
        from_dict(kernel)


# Maps learned from a sample.


def learn(column, form="scores", weights=None, categorical=False, **options):
    column = np.asarray(column, dtype=float).reshape(-1, 1)
    weights = np.ones(len(column)) if weights is None else np.asarray(weights, dtype=float)
    return learn_transform(column, weights / weights.sum(), [categorical], form, **options).columns[
        0
    ]


def mid_rank_scores(column):
    """From their definition, one value at a time."""
    column = np.asarray(column, dtype=float)
    return np.array([norm.ppf((column < v).mean() + (column == v).mean() / 2) for v in column])


LAWS = {
    "normal": lambda rng, n: 1e6 + rng.normal(size=n),
    "uniform": lambda rng, n: rng.uniform(size=n),
    "lognormal": lambda rng, n: np.exp(2 * rng.normal(size=n)),
    "cauchy": lambda rng, n: rng.standard_cauchy(size=n),
    "two clusters": lambda rng, n: rng.normal(size=n) + rng.choice([0.0, 1e4], n),
}


@pytest.mark.parametrize("law", LAWS)
def test_scores_of_continuous_columns_are_standard_normal(law):
    rng = np.random.default_rng(3)
    column, fresh = LAWS[law](rng, 30_000), LAWS[law](rng, 100_000)
    scores = learn(column)
    assert len(scores.values) <= KNOTS + 2
    mapped = scores(np, column)
    # Between knots, by no more than their distance: 8.3 / 254 for the range of 30,000 ranks.
    assert np.abs(mapped - mid_rank_scores_sorted(column)).max() <= 0.033
    # Kolmogorov and Smirnov's distance of rows that the map has not seen: 2.7 standard deviations
    # of each of both samples, and a density of 0.4 times the distance of two knots.
    order = np.sort(norm.cdf(scores(np, fresh)))
    distance = np.abs(order - (np.arange(len(order)) + 0.5) / len(order)).max()
    assert distance <= 1.6 / math.sqrt(30_000) + 1.6 / math.sqrt(100_000) + 0.4 * 0.033


def mid_rank_scores_sorted(column):
    ranks = np.empty(len(column))
    ranks[np.argsort(column)] = np.arange(len(column)) + 0.5
    return norm.ppf(ranks / len(column))


@pytest.mark.parametrize("size", [3, 100, KNOTS])
def test_few_values_are_all_knots(size):
    rng = np.random.default_rng(size)
    column = rng.choice(rng.normal(size=size), 4 * size)
    scores = learn(column)
    np.testing.assert_allclose(scores(np, column), mid_rank_scores(column), 0, 1e-12)


def test_an_atom_is_one_knot_and_its_neighbours_are_knots():
    rng = np.random.default_rng(0)
    column = np.where(rng.uniform(size=20_000) < 0.4, 0.0, rng.exponential(size=20_000))
    scores = learn(column)
    zero = (column == 0).mean()
    at = dict(zip(scores.values, scores.scores, strict=True))
    assert at[0.0] == pytest.approx(norm.ppf(zero / 2), abs=1e-12)
    smallest = column[column > 0].min()
    assert at[smallest] == pytest.approx(norm.ppf(zero + 0.5 / 20_000), abs=1e-12)
    assert np.abs(scores(np, column) - mid_rank_scores_atoms(column)).max() <= 0.033
    assert len(scores.values) <= KNOTS + 2


def mid_rank_scores_atoms(column):
    ordered = np.sort(column)
    low, high = (np.searchsorted(ordered, column, side=side) for side in ("left", "right"))
    return norm.ppf((low + high) / 2 / len(column))


columns = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, 2.0]), min_size=2, max_size=60)


@quick
@given(columns)
@example([0.0] * 6 + [1e-308] * 3 + [1.0])
@example([0.0, 1e-308])
def test_scores_are_increasing_and_finite(column):
    scores = learn(column)
    values = np.sort(np.array([*column, -1e12, 1e12]))
    mapped = scores(np, values)
    assert np.isfinite(mapped).all()
    assert (np.diff(mapped) >= -8 * EPS * np.abs(mapped[1:])).all()


@quick
@given(columns, st.randoms())
def test_order_of_the_rows_is_no_matter(column, random):
    table = np.array([column, column]).T
    weights = np.array([random.choice([0.0, 0.5, 1.0, 3.0]) for _ in column])
    weights[0] = 1.0
    order = list(range(len(column)))
    random.shuffle(order)
    for form in ("standard", "scores"):
        for coded in (False, True):
            one = learn_transform(table, weights, [coded, False], form)
            assert learn_transform(table[order], weights[order], [coded, False], form) == one


@quick
@given(columns)
def test_scores_follow_monotone_maps(column):
    """Knots move with the column and keep their scores; a falling map turns them round."""
    column = np.round(np.array(column), 3)  # so that no map below makes two values one
    assume(len(np.unique(column)) > 1)
    here = learn(column)(np, column)
    for image in (np.arcsinh(column), column / 7 + 1, np.cbrt(column)):
        np.testing.assert_allclose(learn(image)(np, image), here, 0, 1e-9)
    np.testing.assert_allclose(learn(-column)(np, -column), -here, 0, 1e-9)


def test_many_values_follow_monotone_maps():
    rng = np.random.default_rng(0)
    column = rng.normal(size=5000)
    here, there = learn(column), learn(np.exp(column))
    images = dict(zip(there.values, there.scores, strict=True))
    inner = here.values[1:-1] if len(here.values) == KNOTS + 2 else here.values
    shared = [np.exp(v) in images for v in inner]
    assert np.mean(shared) > 0.98  # but for the knots that end steep tails
    np.testing.assert_allclose(there(np, np.exp(column)), here(np, column), 0, 0.06)


@quick
@given(columns, st.integers(1, 4))
def test_weights_are_rows(column, times):
    """A row of a whole weight is as many rows, but for the ends, where the number of rows tells."""
    column = np.array(column)
    weights = 1.0 + (np.arange(len(column)) % times)
    repeated = np.repeat(column, weights.astype(int))
    one, other = learn(column, "standard", weights), learn(repeated, "standard")
    np.testing.assert_allclose([one.shift, one.scale], [other.shift, other.scale], 1e-9, 1e-9)
    one, other = learn(column, "scores", weights), learn(repeated, "scores")
    inside = np.abs(other(np, column)) < -norm.ppf(0.5 / len(column))
    difference = one(np, column) - other(np, column)
    np.testing.assert_allclose(difference[inside], 0, atol=1e-9)


@pytest.mark.parametrize("law", ["uniform", "normal", "cauchy"])
def test_tails_are_no_steeper_than_the_middle(law):
    column = LAWS[law](np.random.default_rng(0), 5000)
    scores = learn(column)
    low, high = np.quantile(column, [0.25, 0.75])
    central = 2 * norm.ppf(0.75) / (high - low)
    far = np.array([column.min(), column.max()]) + (high - low) * np.array([-1e6, 1e6])
    rise = scores(np, far) - scores(np, np.array([column.min(), column.max()]))
    assert np.isfinite(rise).all()
    assert rise[0] < 0 < rise[1]
    assert (np.abs(rise) <= 1.01 * central * np.abs(far[1] - column.max())).all()
    if law == "uniform":  # whose outer knots alone are very steep
        assert np.abs(rise) == pytest.approx([2 * norm.ppf(0.75) * 1e6] * 2, rel=0.02)


def test_standard_form():
    rng = np.random.default_rng(0)
    column, weights = 1e6 + 3 * rng.normal(size=500), rng.uniform(size=500)
    standard = learn(column, "standard", weights)
    mean = np.average(column, weights=weights)
    assert standard.shift == pytest.approx(mean, rel=1e-14)
    deviation = math.sqrt(np.average((column - mean) ** 2, weights=weights))
    assert standard.scale == pytest.approx(deviation, rel=1e-12)
    huge = learn(column * 1e300, "standard", weights)
    assert huge.scale == pytest.approx(deviation * 1e300, rel=1e-12)


@pytest.mark.parametrize("form", ["standard", "scores"])
@pytest.mark.parametrize("value", [0.0, -3.7, 1e308])
def test_constant_columns_are_shifted_only(form, value):
    assert learn([value] * 7, form) == Standard(value, 1.0)
    assert learn([value, 8.0], form, [1.0, 0.0]) == Standard(value, 1.0)  # 8 counts for nothing


@pytest.mark.parametrize("unit", [1e-200, 1e-12, 1e12, 1e200])
@pytest.mark.parametrize("form", ["standard", "scores"])
def test_units_are_no_matter(form, unit):
    column = np.random.default_rng(0).standard_cauchy(size=1000)
    expected = learn(column, form)(np, np.array([-1e6, *column, 1e6]))
    found = learn(unit * column, form)(np, unit * np.array([-1e6, *column, 1e6]))
    np.testing.assert_allclose(found, expected, 1e-12, 1e-12)


def test_two_values():
    scores = learn([0.0] * 30 + [5.0] * 10)
    assert scores.values == (0.0, 5.0)
    np.testing.assert_allclose(scores.scores, norm.ppf([0.375, 0.875]), 1e-14)


def test_extreme_weights_stay_finite():
    column = np.arange(1000.0)
    for tiny in (1e-30, 5e-324):
        weights = np.where(column % 7 == 0, 1.0, tiny)
        scores = learn(column, weights=weights)
        assert np.abs(scores(np, column)).max() < 5
        assert np.isfinite(scores(np, np.array([-1e9, *column, 1e9]))).all()


def test_rare_levels_are_pooled():
    counts = {0.0: 500, 1.0: 10, 2.0: 9, 5.0: 300}
    column = np.repeat(list(counts), list(counts.values()))
    assert learn(column, categorical=True) == PoolRare((0.0, 1.0, 5.0))
    assert learn(column, categorical=True, rare=11) == PoolRare((0.0, 5.0))
    assert learn(column, categorical=True, rare=1) == PoolRare((0.0, 1.0, 2.0, 5.0))
    assert learn(np.tile(column, 50), categorical=True, rare=1) == PoolRare((0.0, 1.0, 2.0, 5.0))
    many = np.repeat(list(counts), [50_000, 50, 40, 0])  # 0.1 % are 50.09
    assert learn(many, categorical=True) == PoolRare((0.0,))
    weights = np.where(column == 2.0, 3.0, 1.0)
    assert 2.0 in learn(column, weights=weights, categorical=True).levels


def test_bad_arguments():
    with pytest.raises(DataError, match="form must be 'standard' or 'scores', got 'ranks'"):
        learn([0.0, 1.0], "ranks")
    with pytest.raises(DataError, match="tell of each of 2 columns, got 1"):
        learn_transform(np.zeros((3, 2)), np.ones(3), [True], "scores")
