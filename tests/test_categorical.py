import json
import math
from types import SimpleNamespace

import array_api_strict
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist

import cme_dask
from cme_dask import JointDistribution, PivotedCholesky, load, open_sample
from cme_dask.cli.query import answer
from cme_dask.cli.tables import expectation_tables
from cme_dask.data.columns import Columns, Imputation
from cme_dask.data.sample import Sample
from cme_dask.data.sources import ArraySource
from cme_dask.errors import DataError, UnseenCategoryWarning
from cme_dask.kernels import (
    KERNELS,
    Categorical,
    Delta,
    Gaussian,
    PoolRare,
    Standard,
    Transform,
    TransformedKernel,
    from_dict,
)
from cme_dask.learning.transforms import default_kernel, learn_transform
from cme_dask.models.events import Event
from cme_dask.models.points import query_points

EPS = np.finfo(float).eps


def slow(X, Z, scales):
    """The sum over columns, written down pair by pair."""
    return np.array(
        [
            [
                math.exp(-sum((a != b) / s**2 for a, b, s in zip(x, z, scales, strict=True)))
                for z in Z.tolist()
            ]
            for x in X.tolist()
        ]
    )


def codes(n=40, d=3, levels=5, seed=0):
    X = np.random.default_rng(seed).integers(-1, levels, size=(n, d)).astype(float)
    return X, np.concatenate([X[:9], X[9:14] + levels])  # of which some pivots share no level


def one_hot(X):
    return np.concatenate([X[:, j : j + 1] == np.unique(X[:, j]) for j in range(X.shape[1])], 1)


@pytest.mark.parametrize("d", [1, 3, 7])
def test_block_equals_oracle(d):
    X, Z = codes(d=d)
    scales = tuple(np.linspace(0.4, 2.0, d))
    for kernel, each in ((Categorical(scales), scales), (Categorical(0.7), (0.7,) * d)):
        # The exponential amplifies the rounding of its argument by the argument.
        error = 2 * EPS * (d + sum(1 / s**2 for s in each))
        np.testing.assert_allclose(kernel(X, Z), slow(X, Z, each), error, 0)
        np.testing.assert_array_equal(kernel.diagonal(X), np.ones(len(X)))
        out = np.empty((len(Z), len(X)))
        kernel.evaluator(Z, log=True)(X, out)
        np.testing.assert_allclose(out.T, np.log(slow(X, Z, each)), 0, 2 * error)


def test_is_a_gaussian_of_one_hot_codes():
    X, _ = codes()
    H = one_hot(X).astype(float)
    np.testing.assert_allclose(Categorical(0.7)(X, X), Gaussian(0.7)(H, H), 0, 40 * EPS)


def test_limits():
    X, Z = codes(d=2, levels=2)
    np.testing.assert_array_equal(Categorical(1e-200)(X, Z), Delta()(X, Z))
    np.testing.assert_array_equal(Categorical((1e-3, 0.02))(X, Z), Delta()(X, Z))
    np.testing.assert_array_equal(Categorical(1e200)(X, Z), np.ones((len(X), len(Z))))
    logarithms = np.empty((len(Z), len(X)))
    Categorical(1e-200).evaluator(Z, log=True)(X, logarithms)
    assert np.isfinite(logarithms).all()


def test_levels_are_any_numbers_and_exact():
    X = np.array([[0.1 + 0.2], [0.3], [-0.0], [0.0], [1e300], [5e-324]])
    equal = Categorical(1.0)(X, X) == 1.0
    np.testing.assert_array_equal(equal, X == X.T)
    assert equal.sum() == 8  # of 36; minus zero is zero, 0.1 + 0.2 is not 0.3


def test_positive_semidefinite_and_bounded():
    X, _ = codes(60)
    for kernel in (Categorical((0.3, 1.0, 5.0)), Categorical(0.5)[0, 2] * Gaussian(1.0)[1]):
        K = kernel(X, X)
        np.testing.assert_allclose(K, K.T, 0, 4 * EPS)
        assert np.linalg.eigvalsh(K).min() >= -1e-12
        assert kernel.upper_bound == 1.0 == K.max()


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(0, 10), st.data())
def test_any_blocks_give_the_same_bits(n, m, data):
    X = np.array(data.draw(st.lists(st.integers(-1, 3), min_size=2 * n, max_size=2 * n)), float)
    X = X.reshape(n, 2)
    Z = X[data.draw(st.lists(st.integers(0, n - 1), min_size=m, max_size=m))]
    kernel = Categorical((0.6, 1.3))
    whole, parts = np.empty((m, n)), np.empty((m, n))
    kernel.evaluator(Z)(X, whole)
    write, cut = kernel.evaluator(Z), data.draw(st.integers(0, n))
    for rows in (slice(0, cut), slice(cut, n)):  # columns of a block are strided memory
        write(X[rows], parts[:, rows])
    np.testing.assert_array_equal(parts, whole)
    np.testing.assert_array_equal(kernel(X, Z), whole.T)


def test_array_api_strict():
    X, Z = codes()
    kernel = Categorical((0.5, 1.0, 2.0))
    xs, zs = array_api_strict.asarray(X), array_api_strict.asarray(Z)
    block = kernel(xs, zs)
    assert type(block) is type(kernel.diagonal(xs)) is type(xs)
    np.testing.assert_array_equal(np.asarray(block), kernel(X, Z))
    single = kernel(X.astype(np.float32), Z.astype(np.float32))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, kernel(X, Z), 1e-6)


def test_files_and_repr():
    kernel = Categorical((0.5, 1.0)) * Gaussian(2.0)
    assert from_dict(json.loads(json.dumps(kernel.to_dict()))) == kernel
    assert eval(repr(kernel), dict(KERNELS)) == kernel  # noqa: S307 (our own text)
    assert repr(Categorical(0.5)) == "Categorical(length_scale=0.5)"


def test_bad_input():
    with pytest.raises(DataError, match="length_scale must be positive and finite, got 0"):
        Categorical(0.0)
    with pytest.raises(DataError, match="Categorical has 2 length scales but the data have 3"):
        Categorical((1.0, 2.0)).check(3)
    Categorical(1.0).check(3)


# Mixed tables: labels at query time.

LABELS = {"station": ("Dongsi", "Tiantan", "Gucheng"), "month": ("1", "2", "12")}
MIXED = Columns(("station", "temp", "month"), {}, LABELS)
POOLS = TransformedKernel(
    Gaussian(1.0)[1] * Categorical(1.0)[0, 2],
    Transform((PoolRare((0.0, 1.0)), Standard(0.0, 1.0), PoolRare((0.0, 1.0, 2.0)))),
)
REFUSES = Gaussian(1.0)
EXPECTED = [[1.0, 20.5, 2.0], [0.0, -3.0, 0.0]]
TABLE = {"temp": [20.5, -3], "month": [12, 1], "station": ["Tiantan", "Dongsi"], "other": [0, 0]}


def points_of(values, columns, kernel):
    """Query points of a variable with these columns and this kernel."""
    basis = SimpleNamespace(newton=SimpleNamespace(kernel=kernel))
    return query_points(values, SimpleNamespace(columns=columns, basis=basis), "X")


@pytest.mark.parametrize(
    "values",
    [
        TABLE,
        {**TABLE, "month": ["12", "1"]},
        {**TABLE, "month": np.array([12.0, 1.0])},
        {**TABLE, "station": [1, 0]},  # its labels are no numbers, so these are codes
        pd.DataFrame(TABLE),
        pd.DataFrame(TABLE).astype({"station": "category", "temp": "Float64", "month": "Int64"}),
        pd.DataFrame(TABLE).astype({"month": str}),
        [["Tiantan", 20.5, 12], ["Dongsi", -3, 1]],
        np.array([["Tiantan", 20.5, "12"], ["Dongsi", "-3", 1]], dtype=object),
        np.array([["Tiantan", "20.5", "12"], ["Dongsi", "-3", "1"]]),
        np.array(EXPECTED),
        np.array(EXPECTED, dtype=np.float32),
        [*np.array(EXPECTED)],
        [[1.0, 20.5, 12], [0.0, -3.0, 1]],
        ((1, 20.5, 12.0), (0, -3.0, 1.0)),
    ],
)
@pytest.mark.parametrize("kernel", [POOLS, REFUSES])
def test_labels_become_codes(values, kernel):
    points = points_of(values, MIXED, kernel)
    assert points.dtype == np.float64
    np.testing.assert_array_equal(points, EXPECTED)


def test_single_points():
    one = {"station": "Tiantan", "temp": 20.5, "month": 12}
    for values in (one, ["Tiantan", 20.5, "12"], [1, 20.5, 12], np.array(EXPECTED[0])):
        np.testing.assert_array_equal(points_of(values, MIXED, POOLS), EXPECTED[:1])
    station = MIXED.only(["station"])
    for values in (["Tiantan", "Dongsi"], np.array([1, 0]), pd.Series(["Tiantan", "Dongsi"])):
        points = points_of(values, station, POOLS[0])
        np.testing.assert_array_equal(points, [[1.0], [0.0]])


def test_true_and_false_are_labels():
    columns = Columns(("rain",), {}, {"rain": ("false", "true")})
    points = points_of(pd.DataFrame({"rain": [True, False]}), columns, REFUSES)
    np.testing.assert_array_equal(points, [[1.0], [0.0]])
    for values in ({"rain": [np.True_, np.False_]}, pl.DataFrame({"rain": [True, False]})):
        np.testing.assert_array_equal(points_of(values, columns, REFUSES), [[1.0], [0.0]])


def typed(*values):
    return pd.Series(values).astype("category")


@pytest.mark.parametrize(
    "labels",
    [
        typed(2, 3, 1, 3),
        typed(2.0, 3.0, 1.0, 3.0),
        typed(0.5, 1e-5, 3.0, 3.0),
        typed(-2, 3, -1, 3),
        typed(2**53 + 1, 2**53, 2**53 + 2, 2**53),
        typed(True, False, True, True),
        typed(7, "007", 7, 7),
        typed(2, "other", 1, 2),
        typed("true", "True", "1.0", "1"),
    ],
    ids=lambda labels: " ".join(map(str, labels)),
)
def test_a_fit_and_a_question_read_the_same_labels(labels):
    frame = labels.to_frame("place")
    sample = open_sample(frame)
    codes = sample.sources[0].read(0, 4)
    np.testing.assert_array_equal(codes[:, 0], labels.cat.codes)
    untyped = np.array(labels.tolist(), dtype=object)
    for values in (frame, labels, labels.rename("other"), frame.astype(object), {"place": untyped}):
        points = points_of(values, sample.columns[0], REFUSES)
        np.testing.assert_array_equal(points, codes)


@pytest.mark.parametrize(
    "labels", [("1", "2", "12"), ("1.0", "2.0", "12.0"), ("1", "2", "12", "?")]
)
@pytest.mark.parametrize("numbers", [[12, 1], [12.0, 1.0]])
def test_numbers_in_columns_are_labels_where_labels_are_numbers(labels, numbers):
    columns = Columns(("month",), {}, {"month": labels})
    array = np.array(numbers)
    for values in (
        {"month": array},
        pd.Series(array, name="other"),
        pd.Series(array).convert_dtypes(),
        pl.Series("other", array),
        pl.DataFrame({"month": array}),
        pa.chunked_array([array]),
    ):
        np.testing.assert_array_equal(points_of(values, columns, REFUSES), [[2.0], [0.0]])
    with pytest.raises(DataError, match=r"column 'month' has the unknown '0' \(1 row\)"):
        points_of({"month": [0]}, columns, REFUSES)  # a code in arrays alone
    for rows in (numbers, [[number] for number in numbers], list(array)):
        np.testing.assert_array_equal(points_of(rows, columns, REFUSES), [[2.0], [0.0]])
    np.testing.assert_array_equal(points_of(array - [10, 1], columns, REFUSES), [[2.0], [0.0]])


def test_numbers_are_labels_beside_that_of_missing_values():
    columns = Columns(
        ("month",), {}, {"month": ("1", "2", "missing")}, Imputation({"month": 2.0}, {})
    )
    frame = pd.DataFrame({"month": pd.Categorical([2, None, 1])})
    np.testing.assert_array_equal(points_of(frame, columns, REFUSES), [[1.0], [2.0], [0.0]])


def test_text_is_no_column_of_numbers():
    temp = MIXED.only(["temp"])
    for values in (pl.DataFrame({"temp": ["20.5", "-3"]}), pl.Series(["20.5", "-3"])):
        np.testing.assert_array_equal(points_of(values, temp, REFUSES), [[20.5], [-3.0]])
    with pytest.raises(DataError, match="column 'temp' of X must be numeric"):
        points_of(pl.DataFrame({"temp": ["warm", "cold"]}), temp, REFUSES)


def test_a_row_of_a_table_is_one_point():
    row = pd.DataFrame(TABLE).iloc[1]
    for values in (row, row[::-1], row[["month", "temp", "station"]].rename(None)):
        np.testing.assert_array_equal(points_of(values, MIXED, POOLS), EXPECTED[1:])
    with pytest.raises(DataError, match="X lacks the column 'month'"):
        points_of(row.drop("month"), MIXED, POOLS)
    counted = pd.Series([1.0, 20.5, 12.0])  # which has no names
    np.testing.assert_array_equal(points_of(counted, MIXED, POOLS), EXPECTED[:1])


UNSEEN = {"station": ["Wuhan", "Dongsi", "Wuhan"], "temp": [0, 0, 0], "month": [2, 3, 2]}


def test_unseen_labels_are_pooled_with_one_warning():
    text = (
        "labels that the fit has not seen are answered as its pooled rare ones: "
        "column 'station' 'Wuhan' (2 rows); column 'month' '3' (1 row)"
    )
    with pytest.warns(UnseenCategoryWarning) as caught:
        points = points_of(UNSEEN, MIXED, POOLS)
    assert [str(w.message) for w in caught] == [text]
    np.testing.assert_array_equal(points, [[-1, 0, 1], [0, 0, -1], [-1, 0, 1]])
    with pytest.warns(UnseenCategoryWarning, match=r"'station' '7' \(1 row\), '0.5' \(1 row\)"):
        points = points_of([[7, 0, 0], [0.5, 0, 0]], MIXED, POOLS)
    np.testing.assert_array_equal(points[:, 0], [-1.0, -1.0])
    pooled = POOLS.transform.columns[0](np, np.array([-1.0, 2.0]))
    np.testing.assert_array_equal(pooled, [2.0, 2.0])  # as the level that was rare


def test_unseen_labels_are_refused_by_kernels_that_do_not_pool():
    message = (
        r"^column 'station' has the unknown 'Wuhan' \(2 rows\): "
        r"there are 'Dongsi', 'Tiantan', 'Gucheng'$"
    )
    half = TransformedKernel(Delta(), Transform((Standard(0.0, 1.0), *POOLS.transform.columns[1:])))
    for kernel in (REFUSES, Delta(), half, POOLS + REFUSES, 2.0 * Delta()):
        with pytest.raises(DataError, match=message):
            points_of(UNSEEN, MIXED, kernel)
    with pytest.warns(UnseenCategoryWarning):  # REFUSES sees another column
        points_of(UNSEEN, MIXED, 2.0 * (POOLS * REFUSES[1]))


def test_many_unseen_labels_are_counted():
    station = MIXED.only(["station"])
    with pytest.warns(UnseenCategoryWarning, match=r"'s9' \(1 row\) and 19,990 more$"):
        points_of([f"s{i}" for i in range(20_000)], station, POOLS[0])
    many = Columns(("s",), {}, {"s": tuple(f"s{i}" for i in range(100))})
    with pytest.raises(DataError, match=r"'s39' and 60 more$"):
        points_of(["x"], many, REFUSES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**TABLE, "station": ["Dongsi", None]}, r"column 'station' has 1 \(first at row 1\) NaN"),
        ({**TABLE, "station": ["Dongsi", math.nan]}, "column 'station' has 1"),
        (pd.DataFrame({**TABLE, "station": ["Dongsi", None]}), "column 'station' has 1"),
        ([[math.nan, 0.0, 0.0]], "column 'station' has 1"),
        ([["Dongsi", math.inf, "1"]], "column 'temp' has 1"),
        ({**TABLE, "temp": ["warm", 1]}, "column 'temp' of X must be numeric"),
        (pd.DataFrame({**TABLE, "temp": ["warm", "1"]}), "column 'temp' of X must be numeric"),
        ([["Dongsi", "warm", 1]], "column 'temp' of X must be numeric"),
        ({**TABLE, "temp": [1.0]}, r"equally long lists, got 'station' \(2,\), 'temp' \(1,\)"),
        ({**TABLE, "station": [["Dongsi"], ["Tiantan"]]}, "equally long lists"),
        ({"station": ["Dongsi"]}, "lacks the columns 'temp', 'month'"),
        ([["Dongsi", 1.0]], r"must have shape \(n, 3\) for the columns station, temp, month"),
    ],
)
def test_bad_tables(values, message):
    with pytest.raises(DataError, match=message):
        points_of(values, MIXED, POOLS)


def test_labels_are_no_lists():
    cells = np.empty(1, dtype=object)
    cells[0] = ["Dongsi"]
    with pytest.raises(DataError, match="column 'station' of X must hold labels"):
        points_of(cells, MIXED.only(["station"]), POOLS[0])


# Events on categorical columns.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('station == "Dongsi"', [1, 0, 0]),
        ("station == 'Dongsi'", [1, 0, 0]),
        ("station==Dongsi", [1, 0, 0]),
        ('station != "Gucheng"', [1, 1, 0]),
        ("month == 12", [0, 0, 1]),  # the label, not a code
        ("temp == 2", [0, 1, 0]),
        ("temp != 2", [1, 0, 1]),
        ("temp <= 2", [1, 1, 0]),
    ],
)
def test_events(text, expected):
    event = Event.parse(text, MIXED.names, MIXED.categories)
    rows = np.array([[0.0, 1.0, 0.0], [1.0, 2.0, 1.0], [2.0, 3.0, 2.0]])
    np.testing.assert_array_equal(event(rows), expected)
    np.testing.assert_array_equal(np.asarray(event(array_api_strict.asarray(rows))), expected)


def test_events_on_labels_with_signs():
    columns = {"size": ("<5", "a == b", "c")}
    for label in columns["size"]:
        event = Event.parse(f'size == "{label}"', ["size"], columns)
        code = columns["size"].index(label)
        np.testing.assert_array_equal(event(np.arange(3.0)[:, None]), np.arange(3) == code)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'station == "Wuhan"',
            "'station' has no label 'Wuhan': there are 'Dongsi', 'Tiantan', 'Gucheng'",
        ),
        ("station != Wuhan", "has no label 'Wuhan'"),
        ('station == ""', "has no label ''"),
        ('station > "Dongsi"', "'station' holds labels: compare it by == or !="),
        ("station <= 1", "'station' holds labels"),
        ("temp > station", "'station' holds labels: 'temp' can't be compared with it"),
        ('temp == "Dongsi"', "'temp' holds numbers"),
        ('wind == "N"', "unknown column 'wind'"),
        ("temp", "an event reads COLUMN <= NUMBER"),
        ("temp = 2", "an event reads COLUMN <= NUMBER"),
    ],
)
def test_bad_events(text, message):
    with pytest.raises(DataError, match=message):
        Event.parse(text, MIXED.names, MIXED.categories)


def test_labels_that_are_not_known_yet():
    event = Event.parse('station == "Dongsi"', ["station"], {"station": ()})
    np.testing.assert_array_equal(event(np.array([[0.0], [-1.0]])), [0.0, 0.0])


# Default kernels, and a fit from end to end.


def table(n=4000, seed=0):
    """Y depends on the station, whose codes have no order, and on the temperature."""
    rng = np.random.default_rng(seed)
    station = rng.choice(4, n, p=[0.4, 0.35, 0.249, 0.001])
    temp = 10 * rng.normal(size=n)
    y = np.array([2.0, -2.0, 2.0, 0.0])[station] + 0.05 * temp + 0.1 * rng.normal(size=n)
    return np.column_stack([station, temp]), y.reshape(-1, 1)


COLUMNS = (
    Columns(("station", "temp"), {}, {"station": ("a", "b", "c", "rare")}),
    Columns(("y",)),
)


def sample_of(x, y):
    return Sample((ArraySource(x), ArraySource(y)), COLUMNS)


def test_default_kernel():
    x, _ = table()
    weights = np.full(len(x), 1 / len(x))
    few = x[:1000], weights[:1000]
    kernel = default_kernel(x, weights, *few, COLUMNS[0])
    median = np.quantile(pdist(x[:1000, 1:] / x[:, 1].std()), 0.5, method="lower")
    assert kernel.base == Gaussian(kernel.base.left.base.length_scale)[1] * Categorical(1.0)[0]
    assert kernel.base.left.base.length_scale == pytest.approx((median,), rel=1e-9)
    rare = (x[:, 0] == 3).sum()
    assert 0 < rare < 10
    assert kernel.transform.columns[0] == PoolRare((0.0, 1.0, 2.0))
    assert kernel.transform.columns[1].scale == pytest.approx(x[:, 1].std())
    plain = default_kernel(x, weights, *few, Columns(("station", "temp")))
    assert isinstance(plain, Gaussian)
    coded = default_kernel(x[:, :1], weights, few[0][:, :1], few[1], COLUMNS[0].only(["station"]))
    assert coded == TransformedKernel(Categorical(1.0), Transform((PoolRare((0.0, 1.0, 2.0)),)))
    coded.check(1)
    x[:, 1] = 3.0
    constant = default_kernel(x, weights, x[:10], weights[:10], COLUMNS[0])
    assert constant.base == Gaussian(1.0)[1] * Categorical(1.0)[0]


def mixed_kernel(x, form="standard"):
    to_scale = learn_transform(x, np.full(len(x), 1 / len(x)), COLUMNS[0].categorical, form)
    return TransformedKernel(Gaussian(1.0)[1] * Categorical(0.5)[0], to_scale)


@pytest.mark.parametrize("form", ["standard", "scores"])
def test_a_mixed_table_from_end_to_end(tmp_path, form):
    x, y = table()
    kernel_x = mixed_kernel(x, form)
    kernel_y = TransformedKernel(Gaussian(0.3), learn_transform(y, np.ones(len(y)), [False], form))
    fit = JointDistribution(kernel_x=kernel_x, kernel_y=kernel_y, tol=1e-4, reg=1e-4)
    fit.fit(sample_of(x, y))
    fit.save(tmp_path / "m")
    model = load(tmp_path / "m")
    assert model.x.basis.newton.kernel == kernel_x
    assert "of pooled levels" in repr(model) or "and pooled levels" in repr(model)

    stations = pd.DataFrame({"station": ["a", "b", "c"], "temp": [0.0, 10.0, -10.0]})
    values = model.expect("y", stations)
    np.testing.assert_allclose(values, [2.0, -1.5, 1.5], 0, 0.15)
    np.testing.assert_array_equal(fit.expect("y", stations), values)
    np.testing.assert_array_equal(model.expect("y", [[0, 0], [1, 10], [2, -10]]), values)
    weighted = model.weights(stations)
    np.testing.assert_allclose(weighted @ model.support.points[:, 0], values, 0, 0.15)
    np.testing.assert_allclose(weighted.sum(axis=1), 1.0)
    with pytest.warns(UnseenCategoryWarning, match="column 'station' 'new'"):
        unseen = model.expect("y", {"station": ["new"], "temp": [5.0]})
    np.testing.assert_array_equal(unseen, model.expect("y", {"station": ["rare"], "temp": [5.0]}))
    far = model.expect("y", {"station": ["a", "a"], "temp": [1e9, -1e9]})
    assert np.isfinite(far).all()
    coarse = model.expect("temp", Y=[[2.0]])
    assert np.isfinite(coarse).all()
    with pytest.raises(DataError, match="column 'station' holds labels"):
        model.expect("station", Y=[[2.0]])


def test_no_kernel_means_no_order_of_codes():
    x, y = table()
    fit = PivotedCholesky(tol=1e-2).fit(sample_of(x, y))
    assert isinstance(fit.model_.kernel, TransformedKernel)
    swapped = x.copy()
    swapped[:, 0] = np.array([2.0, 0.0, 1.0, 3.0])[x[:, 0].astype(int)]
    other = PivotedCholesky(tol=1e-2).fit(sample_of(swapped, y))
    # Only the places of the levels differ, which the kernel does not see.
    np.testing.assert_allclose(other.transform(swapped[:50]), fit.transform(x[:50]), 0, 1e-9)


def test_the_command_takes_labels(tmp_path):
    x, y = table()
    event = Event.parse('station != "b"', COLUMNS[0].names, COLUMNS[0].categories)
    fit = JointDistribution(kernel_y=Gaussian(0.5), kernel_x=mixed_kernel(x), tol=1e-3, reg=1e-3)
    fit.fit(sample_of(x, y), functions_x={'station != "b"': event}).save(tmp_path / "m")
    (tmp_path / "p.csv").write_text("temp,station\n3,b\n")
    found = answer(
        str(tmp_path / "m"), ["station=a, temp=-1", "temp=2,station=c"], tmp_path / "p.csv", ["y"]
    )
    assert found["points"] == [["a", -1.0], ["c", 2.0], ["b", 3.0]]
    expected = fit.expect(["y"], [[0, -1], [2, 2], [1, 3]])
    np.testing.assert_array_equal(found["values"], expected)
    assert json.loads(json.dumps(found)) == found
    expectation_tables(found)
    back = answer(str(tmp_path / "m"), ["y=2"], None, ['station != "b"'], reverse=True)
    assert back["values"][0][0] == pytest.approx(1.0, abs=0.1)
    (tmp_path / "p.csv").write_text("temp,station\nwarm,b\n")
    with pytest.raises(DataError, match="temp must be a finite number, got 'warm'"):
        answer(str(tmp_path / "m"), [], tmp_path / "p.csv", [])


def test_stores_that_give_labels_other_codes_are_answered_alike(tmp_path):
    """Codes go by first occurrence: the rows of the second store are those of the first, turned."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=300), "wd": rng.choice(["N", "S", "E"], 300)})
    frame["y"] = np.sin(frame["a"]) + (frame["wd"] == "S") + 0.1 * rng.normal(size=300)
    frame["level"] = np.where(frame["y"] > 0.5, "high", "low")
    turned = frame.iloc[np.argsort(frame["wd"] != frame["wd"].iloc[-1], kind="stable")[::-1]]
    turned = turned.iloc[np.argsort(turned["level"] == frame["level"].iloc[0], kind="stable")]
    columns = {"x": ["a", "wd"], "y": ["y", "level"], "categorical": ["wd", "level"]}
    stores = []
    for name, rows in (("one", frame), ("two", turned)):
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
        cme_dask.ingest([tmp_path / f"{name}.csv"], tmp_path / name, **columns)
        stores.append(cme_dask.open_sample(tmp_path / name))
    one, two = (store.columns for store in stores)
    assert one[0].categories != two[0].categories
    assert one[1].categories != two[1].categories
    fit = JointDistribution(kernel_x="median", kernel_y="median", max_rank=60, tol=1e-3).fit(
        stores[0]
    )
    scores = [cme_dask.score(fit, store) for store in stores]
    assert scores[1].crps.value == pytest.approx(scores[0].crps.value, rel=1e-9)
    assert scores[1].labels["level"].accuracy.value == scores[0].labels["level"].accuracy.value
    drift = cme_dask.drift_report(fit, stores[1])
    assert max(column.pvalue for column in drift.columns) == pytest.approx(1.0)
    found = fit.expect("y", stores[1]).compute(scheduler="synchronous")
    np.testing.assert_allclose(found, fit.expect("y", turned[["a", "wd"]]), rtol=1e-10)
