"""Whatever comes in wrong gets one clear sentence, on every scheduler, and leaves nothing behind.

Messages are matched because they are the product here: what was expected, what came, what to do.
"""

import json
import os
import re
import shutil
import subprocess
import warnings
from functools import partial

import dask.array as da
import numpy as np
import pandas as pd
import polars as pl
import pytest
import zarr
from conftest import rewriting, shorten_searches, write_store

import cme_dask
from cme_dask import (
    ConditionalMeanEmbedding,
    JointDistribution,
    KernelBayesFilter,
    KernelLogisticRegression,
    MulticlassEmbedding,
    PivotedCholesky,
    SparseEmbedding,
    TransferOperator,
    conditional_independence_test,
    kernels,
    open_sample,
    score,
)
from cme_dask.data.columns import Columns
from cme_dask.data.sources import ZarrSource
from cme_dask.data.writer import writing_sample
from cme_dask.errors import (
    CmeDaskError,
    ConstantColumnWarning,
    DataError,
    LengthScaleWarning,
    NotFittedError,
    RankWarning,
    ResourceError,
    StoreError,
)

N = 9000  # three strips of 4,096 rows, a task each
GAUSSIAN = kernels.Gaussian(1.0)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(N, 2))
    return x, np.sin(x[:, :1]) + 0.3 * rng.normal(size=(N, 1))


@pytest.fixture(scope="module")
def few(rows):
    return rows[0][:300], rows[1][:300]


@pytest.fixture(scope="module")
def weights():
    return np.random.default_rng(6).random(N) + 0.1


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, rows, weights):
    return write_store(tmp_path_factory.mktemp("store") / "s", *rows, weights)


@pytest.fixture
def store(tmp_path, pristine):
    return shutil.copytree(pristine, tmp_path / "s")


@pytest.fixture(scope="module")
def fitted(few):
    return joint().fit(*few, functions={"positive": positive})


@pytest.fixture(scope="module")
def saved(tmp_path_factory, fitted):
    path = tmp_path_factory.mktemp("model") / "m"
    fitted.save(path)
    return path


@pytest.fixture
def model(tmp_path, saved):
    return shutil.copytree(saved, tmp_path / "m")


def joint(**changes):
    return JointDistribution(
        **{"kernel_x": GAUSSIAN, "kernel_y": GAUSSIAN, "tol": 1e-2, "sample_size": 500} | changes
    )


def positive(y):
    return y[:, 0] > 0


def spoiled(array, cells, value=np.nan):
    array = array.copy()
    for cell in cells:
        array[cell] = value
    return array


def one_sentence(error):
    text = str(error.value)
    assert "\n" not in text
    assert 20 < len(text) < 600


class Refused:
    """``pytest.raises`` that also checks that the message is a single sentence."""

    def __init__(self, kind, match):
        self._raises = pytest.raises(kind, match=match)

    def __enter__(self):
        self._error = self._raises.__enter__()
        return self._error

    def __exit__(self, *details):
        outcome = self._raises.__exit__(*details)
        one_sentence(self._error)
        return outcome


def unknown_chunks(array):
    lazy = da.from_array(array)
    return lazy[lazy[:, 0] > 0]


# Rows that are not finite --------------------------------------------------------------------

BAD_X = [(5, 1), (4500, 1), (8800, 1), (8800, 0)]
SAID_X = r"'x0' has 1 \(first at row 8800\); column 'x1' has 3 \(first at row 5\) NaN or infinite"


def as_numpy(tmp_path, x, y):
    return x, y


def as_dask(tmp_path, x, y):
    return da.from_array(x, chunks=(1000, 2)), da.from_array(y, chunks=(700, 1))


def as_foreign_zarr(tmp_path, x, y):
    group = zarr.open_group(str(tmp_path / "foreign.zarr"), mode="w")
    return (
        group.create_array("x", data=x, chunks=(1300, 1)),
        group.create_array("y", data=y, chunks=(500, 1)),
    )


def as_store(tmp_path, x, y):
    """A store that was sound when its row sample was drawn."""
    path = write_store(tmp_path / "later", np.nan_to_num(x), np.nan_to_num(y))
    with rewriting(path) as group:
        group["x"][...], group["y"][...] = x, y
    return (path,)


KINDS = [as_numpy, as_dask, as_foreign_zarr, as_store]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sample_size", [20, N], ids=["few sampled", "all sampled"])
def test_nan_is_counted_over_all_rows(tmp_path, rows, kind, sample_size):
    x, y = spoiled(rows[0], BAD_X), rows[1]
    with Refused(DataError, SAID_X + ": drop or fill"):
        joint(sample_size=sample_size).fit(*kind(tmp_path, x, y))


@pytest.mark.parametrize("kind", KINDS)
def test_infinity_in_y_is_named(tmp_path, rows, kind):
    y = spoiled(rows[1], [(4096, 0), (8999, 0)], -np.inf)
    with Refused(DataError, r"'y0' has 2 \(first at row 4096\) infinite"):
        joint().fit(*kind(tmp_path, rows[0], y))


def test_columns_keep_their_names(rows):
    table = pd.DataFrame(spoiled(rows[0], [(7, 1)]), columns=["wind", "rain"])
    with Refused(DataError, r"column 'rain' has 1 \(first at row 7\)"):
        joint().fit(table, rows[1])


def test_masked_values_are_missing_values(few, fitted):
    masked = np.ma.masked_array(few[0], mask=np.zeros_like(few[0], dtype=bool))
    masked[11, 0] = np.ma.masked
    with Refused(DataError, r"column 'x0' has 1 \(first at row 11\)"):
        joint().fit(masked, few[1])
    for points in (masked, {"x0": masked[:, 0], "x1": masked[:, 1]}):
        with Refused(DataError, r"column 'x0' has 1 \(first at row 11\)"):
            fitted.expect("y0", points)
    lazy = da.from_array(masked, chunks=(50, 2))
    with Refused(DataError, r"column 'x0' has 1 \(first at row 11\)"):
        joint().fit(lazy, da.from_array(few[1], chunks=(50, 1)))
    weights = np.ma.masked_array(np.ones(len(masked)), mask=masked.mask[:, 0])
    with Refused(DataError, r"'weights' has 1 \(first at row 11\)"):
        joint().fit(*few, weights=da.from_array(weights, chunks=50))


@pytest.mark.parametrize("kind", [as_numpy, as_dask, as_store])
def test_pivoted_cholesky_refuses_nan(tmp_path, rows, kind):
    x = kind(tmp_path, spoiled(rows[0], BAD_X), rows[1])[0]
    with Refused(DataError, SAID_X):
        PivotedCholesky(GAUSSIAN, tol=0.1).fit(x)


@pytest.mark.parametrize("kind", [as_dask, as_store])
def test_transform_refuses_nan_when_it_reads_it(tmp_path, rows, kind):
    features = PivotedCholesky(GAUSSIAN, tol=0.1).fit(rows[0])
    lazy = features.transform(kind(tmp_path, spoiled(rows[0], BAD_X), rows[1])[0])
    with Refused(DataError, r"'x1' has 1 \(first at row 5\)"):
        lazy[:600].compute(scheduler="synchronous")
    with Refused(DataError, r"\(first at row 8800\)"):
        lazy[-1].compute(scheduler="synchronous")


def test_the_writer_refuses_nan_and_leaves_nothing(tmp_path, rows):
    with Refused(DataError, r"column 'x1' has 1 \(first at row 4500\)"):
        write_store(tmp_path / "s", spoiled(rows[0], BAD_X[1:2]), rows[1])
    assert os.listdir(tmp_path) == []


# Shapes and kinds of arrays ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x, y[:-1]), "rows differ: x has 300, y has 299; row i of each"),
        (lambda x, y: (x[:0], y[:0]), "at least 2 rows are needed, got 0"),
        (lambda x, y: (x[:1], y[:1]), "at least 2 rows are needed, got 1"),
        (lambda x, y: (x[:, :0], y), "x has no columns"),
        (lambda x, y: (x, y[:, :, None]), r"y must have shape \(n,\) or \(n, d\), got \(300, 1, 1"),
        (lambda x, y: (3.0, y), r"x must have shape .* got \(\)"),
        (lambda x, y: (None, y), "x must be a dense array of numbers .* got NoneType"),
        (lambda x, y: ({"a": 1}, y), "x must be a dense array of numbers .* got dict"),
        (lambda x, y: ([[1.0, 2.0], [3.0]], y), "x must be an array of numbers: .*inhomogeneous"),
        (lambda x, y: (x.astype(object), y), "x must be numeric, got values of type object"),
        (lambda x, y: (x, y.astype(str)), "y must be numeric, got values of type <U"),
        (lambda x, y: (x + 1j, y), "x must be numeric, got values of type complex128"),
        (lambda x, y: (x, np.zeros(300, "M8[s]")), "y must be numeric, got .* datetime64"),
        (lambda x, y: (x,), "needs rows of x and of y: give Y, or a store"),
        (lambda x, y: (unknown_chunks(x), y), "sizes of x are unknown: call compute_chunk_sizes"),
        (lambda x, y: (da.from_array(x.astype(object), chunks=9), y), "x must be numeric.* object"),
        (lambda x, y: (da.from_array(x)[:, :, None], y), r"x must have shape .* got \(300, 2, 1\)"),
        (lambda x, y: (da.from_array(x), da.from_array(y)[:-1]), "x has 300, y has 299"),
    ],
)  # fmt: skip
def test_shapes_and_kinds(few, change, message):
    with Refused(DataError, message):
        joint().fit(*change(*few))


def test_sparse_matrices_are_refused(few):
    from scipy.sparse import csr_matrix

    with Refused(DataError, "dense array of numbers .*nothing sparse.*, got csr_matrix"):
        PivotedCholesky().fit(csr_matrix(few[0]))


def test_a_dask_array_that_lies_about_its_chunks(rows):
    x, y = as_dask(None, *rows)
    liar = x.map_blocks(lambda block: block[:3], dtype=float, meta=np.empty((0, 0)))
    with Refused(DataError, r"computed shape \(\d+, 2\) for rows .* announced"):
        joint().fit(liar, y)


def test_unknown_columns(few, store):
    for source in (few, (store,)):
        with Refused(DataError, "unknown column 'q': there are 'x0', 'x1'"):
            open_sample(*source, x_columns=["x1", "q"])
        with Refused(DataError, "unknown column 'q': there are 'y0'"):
            open_sample(*source, y_columns=["q"])
    with Refused(DataError, "expected a list of column names, got the text 'x0'"):
        open_sample(*few, x_columns="x0")
    with Refused(DataError, "columns of y are requested, but there are only rows of x"):
        open_sample(few[0], y_columns=["y0"])
    with Refused(DataError, "names must be unique, x0 came more than once"):
        open_sample(*few, x_columns=["x0", "x0"])
    with Refused(DataError, "x has no columns"):
        open_sample(*few, x_columns=[])
    with Refused(DataError, "a sample holds y, weights, group and time itself"):
        joint().fit(store, few[1])


# Degenerate rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 3.0, -1e100, 1e-300])
def test_a_constant_column_is_ignored_with_a_warning(few, value):
    x, y = few
    constant = np.column_stack([x[:, 0], np.full(len(x), value)])
    median = {"kernel_x": "median", "kernel_y": "median", "tol": 0.1}
    with pytest.warns(ConstantColumnWarning, match="'x1' of x is constant .* ignores it"):
        fit = JointDistribution(**median).fit(constant, y)
    plain = JointDistribution(**median).fit(x[:, :1], y)
    np.testing.assert_allclose(fit.predict(constant[:9]), plain.predict(x[:9, :1]), rtol=1e-9)
    with pytest.warns(ConstantColumnWarning, match="'y0' of y is constant .* law is a point"):
        point = JointDistribution(**median).fit(x, np.full(len(x), value))
    np.testing.assert_allclose(point.predict(x[:4]), value)


def test_a_constant_column_with_a_kernel_works(few):
    x, y = few
    constant = np.column_stack([x, np.full(len(x), 3.0)])
    fit = joint(pivots=(constant[:40], y[:9])).fit(constant, y)
    plain = joint(pivots=(x[:40], y[:9])).fit(x, y)
    np.testing.assert_allclose(
        fit.expect("y0", constant[:20]), plain.expect("y0", x[:20]), rtol=1e-8, atol=1e-8
    )
    fit = joint().fit(x, np.full(len(x), 3.0))
    np.testing.assert_allclose(fit.expect("y0", x[:5]), 3.0, rtol=1e-14)
    np.testing.assert_allclose(fit.density_ratio(x[:5], [[3.0]]), 1.0, rtol=1e-14)


@pytest.mark.parametrize("constraint", ["none", "normalized"])
@pytest.mark.parametrize("reg", [0, 1e-6])
def test_identical_rows_are_independent(constraint, reg):
    fit = joint(constraint=constraint, reg=reg).fit(np.ones((50, 2)), np.full(50, -2.0))
    assert (fit.basis_x_.rank, fit.basis_y_.rank) == (1, 1)
    np.testing.assert_allclose(fit.density_ratio([[1.0, 1.0]], [[-2.0]]), 1.0, atol=1e-12)
    np.testing.assert_allclose(fit.expect("y0", [[1.0, 1.0], [9.0, 9.0]]), -2.0, atol=1e-12)


def test_heavy_duplicates_give_the_table_of_frequencies(rng):
    x = rng.integers(0, 3, size=5000).astype(float)
    y = (x + rng.integers(0, 2, size=5000)).astype(float)
    fit = joint(tol=1e-8, reg=0).fit(x, y)
    assert (fit.basis_x_.rank, fit.basis_y_.rank) == (3, 4)
    points_x, points_y = np.arange(3.0), np.arange(4.0)
    together = ((x[:, None] == points_x)[:, :, None] & (y[:, None] == points_y)[:, None, :]).mean(0)
    ratio = together / np.outer(together.sum(1), together.sum(0))
    # Not to the last digit: the eigenvalues of S go down to 1e-3, and D is their product.
    np.testing.assert_allclose(fit.density_ratio(points_x, points_y), ratio, atol=1e-9)


def test_rank_deficient_rows_end_cleanly(rng):
    x = np.repeat(rng.normal(size=(7, 2)), 200, axis=0)
    y = x @ [1.0, 2.0]
    for kernel in (GAUSSIAN, kernels.Linear(1.0), kernels.Polynomial(2)):
        fit = joint(kernel_x=kernel, tol=1e-15).fit(x, y)
        assert fit.basis_x_.rank <= 7
        assert np.isfinite(fit.density_ratio(x[::200], y[::200])).all()
        assert np.isfinite(fit.expect("y0", 10 * x[:5], return_std=True)).all()


def test_independent_variables_give_a_ratio_of_one(rng):
    x, y = rng.normal(size=20_000), rng.normal(size=20_000)
    g = joint(tol=1e-3, reg=1e-2).fit(x, y).density_ratio([-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0])
    # Twenty thousand rows: the sampling error of a cell is of the order 20000^(-1/2) * rank.
    assert np.abs(g - 1).max() < 0.06


@pytest.fixture(scope="module")
def plain(few):
    """Answers of a default fit in the units of the rows."""
    x, y = few
    with pytest.MonkeyPatch.context() as patch:
        shorten_searches(patch)
        return JointDistribution(tol=1e-3).fit(x, y).expect("y0", x[:9])


@pytest.mark.parametrize("scale", [1e-200, 1e-12, 1e12])
def test_units_do_not_matter(few, plain, scale, brief_search):
    x, y = few
    scaled = JointDistribution(tol=1e-3).fit(scale * x, y).expect("y0", scale * x[:9])
    np.testing.assert_allclose(scaled, plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (([1.0, 1.0], 1e-154), "column 'y0' of y vary by only .*e-15., .* units .* larger"),
        (([1.0, 1.0], 1e-305), "column 'y0' of y vary by only .*e-30., .* units .* larger"),
        (([1.0, 1e-300], 1.0), "column 'x1' of x vary by only .*e-300, .* units .* larger"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"kernel_x": GAUSSIAN, "kernel_y": GAUSSIAN}])
def test_values_whose_squares_underflow_are_refused(few, options, units, message):
    x = np.hstack([few[0], few[0][::-1]])[:, :2] * units[0]
    with Refused(DataError, message):
        JointDistribution(**options).fit(x, few[1] * units[1])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_sums_that_overflow_are_refused(few):
    with pytest.warns(LengthScaleWarning), Refused(DataError, "overflow: give columns.* smaller"):
        joint().fit(few[0], few[1] * 1e200)


# Weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-0.5, r"weights must be non-negative, 3 are negative \(first at row 7\)"),
        (np.nan, r"'weights' has 3 \(first at row 7\) NaN or infinite"),
        (np.inf, r"'weights' has 3 \(first at row 7\) infinite"),
    ],
)
@pytest.mark.parametrize("kind", ["numpy", "dask", "store"])
def test_unusable_weights_are_counted(rows, weights, store, value, message, kind):
    bad = spoiled(weights, [7, 4100, 8888], value)
    if kind == "store":  # spoiled after its row sample was drawn
        with rewriting(store) as group:
            group["weights"][...] = bad
        source, given = (store,), None
    elif kind == "dask":
        source, given = as_dask(None, *rows), da.from_array(bad, chunks=900)
    else:
        source, given = rows, bad
    with Refused(DataError, message):
        joint().fit(*source, weights=given)
    with Refused(DataError, message):
        PivotedCholesky(GAUSSIAN, tol=0.1).fit(source[0], weights=given)


def test_weights_that_are_all_zero(tmp_path, few, store):
    with Refused(DataError, "all weights are zero: at least one row needs a positive weight"):
        joint().fit(*few, weights=np.zeros(300))
    with rewriting(store) as group:
        group["weights"][...] = 0.0
    with Refused(DataError, "all weights are zero"):
        joint().fit(store)
    with Refused(DataError, "all weights are zero"):
        write_store(tmp_path / "z", *few, np.zeros(300))
    assert os.listdir(tmp_path) == ["s"]


def test_shape_of_weights(few):
    with Refused(DataError, "x has 300, y has 300, weights has 4"):
        joint().fit(*few, weights=np.ones(4))
    with Refused(DataError, "weights must have one column, got 2"):
        joint().fit(*few, weights=np.ones((300, 2)))


@pytest.mark.filterwarnings("ignore:y. 2 of 12 given pivots")
@pytest.mark.parametrize("stored", [False, True])
def test_rows_of_weight_zero_count_like_no_rows(tmp_path, rows, weights, stored):
    x, y = rows
    keep = np.arange(N) % 3 == 0
    keep[4096:8192] = False  # a whole strip without weight
    pivots = (x[:40], y[:12])
    few_weights = np.where(keep, weights, 0.0)
    source = (write_store(tmp_path / "s", x, y, few_weights),) if stored else rows
    given = None if stored else few_weights
    # One fold: folds go by row number, and dropping rows changes it.
    ours = joint(pivots=pivots, n_folds=1).fit(*source, weights=given)
    plain = joint(pivots=pivots, n_folds=1).fit(x[keep], y[keep], weights=weights[keep])
    np.testing.assert_allclose(ours.basis_x_.trace_error, plain.basis_x_.trace_error, rtol=1e-10)
    np.testing.assert_allclose(
        ours.density_ratio(x[:30], y[:30]), plain.density_ratio(x[:30], y[:30]), atol=1e-8
    )
    np.testing.assert_allclose(ours.expect("y0", x[:30]), plain.expect("y0", x[:30]), atol=1e-9)


def test_densities_do_not_change_by_rows_of_weight_zero(few):
    keep = np.arange(300) % 3 == 0
    x, y = few
    options = {"pivots": (x[:20], y[:10]), "n_folds": 1}
    ours = joint(**options).fit(x, y, weights=keep.astype(float))
    plain = joint(**options).fit(x[keep], y[keep])
    assert ours.model_.about["rows"] == plain.model_.about["rows"] == 100
    ours_log, plain_log = (fit.conditional(x[:9]).log_pdf(y[:9]) for fit in (ours, plain))
    np.testing.assert_allclose(ours_log, plain_log, atol=1e-8)
    ours.partial_fit(x[:50], y[:50], weights=np.ones(50))
    assert ours.model_.about["rows"] == 150
    assert ours.model_.about["next_row"] == 350  # rows of weight 0 have numbers too


def test_a_sample_takes_no_second_y_or_weights(few):
    x, y = few
    sample = open_sample(x, y)
    for extra in ({"Y": -y}, {"weights": np.ones(300)}):
        with Refused(DataError, "a sample holds y, weights, group and time itself"):
            joint().fit(sample, **extra)
    with Refused(DataError, "a sample holds y, weights, group and time itself"):
        PivotedCholesky(GAUSSIAN, tol=0.1).fit(sample, weights=np.ones(300))


def test_one_row_of_positive_weight_is_refused(few):
    weights = (np.arange(300) == 17).astype(float)
    with Refused(DataError, "at least 2 rows of positive weight are needed, got 1 among the 300"):
        joint().fit(*few, weights=weights)


@pytest.mark.parametrize("weight", [1e-310, 1e-250, 1e250])
@pytest.mark.parametrize("kind", ["numpy", "dask", "store"])
def test_weights_of_another_world_are_refused(tmp_path, few, weight, kind):
    weights = np.full(300, weight)
    if kind == "store":
        given = (write_store(tmp_path / "s", *few, weights),), None
    elif kind == "dask":
        given = tuple(da.from_array(part, chunks=(100, -1)) for part in few), da.asarray(weights)
    else:
        given = few, weights
    with Refused(DataError, "the largest weight of the sampled rows is .* multiply all weights"):
        joint().fit(*given[0], weights=given[1])


# Parameters ----------------------------------------------------------------------------------

TOL = "tol must lie between 0 and 1, exclusively, got "
PARAMETERS = [
    *(({"tol": value}, TOL + re.escape(repr(value))) for value in (0, 1, -1, 2, "a", np.nan)),
    ({"max_rank": 0}, "max_rank must be an integer of at least 1, got 0"),
    ({"max_rank": 1.5}, "max_rank must be an integer of at least 1, got 1.5"),
    ({"max_rank": True}, "max_rank must be an integer of at least 1, got True"),
    ({"sample_size": 1}, "sample_size must be an integer from 2 to .*, got 1"),
    ({"sample_size": None}, "sample_size must be an integer from 2 to .*, got None"),
    ({"sample_size": 10**30}, "sample_size must be an integer from 2 to .*, got 1000"),
    ({"random_state": -1}, "random_state must be an integer from 0 to .*, got -1"),
    ({"random_state": "a"}, "random_state must be an integer from 0 to .*, got 'a'"),
    ({"random_state": 1 << 70}, "random_state must be an integer from 0 to .*, got 118"),
    ({"n_folds": 0}, "n_folds must be an integer from 1 to 255, got 0"),
    ({"n_folds": 300}, "n_folds must be an integer from 1 to 255, got 300"),
    ({"n_folds": None}, "n_folds must be an integer from 1 to 255, got None"),
    *(
        ({"reg": value}, "reg must be a non-negative number r or a pair .*, got ")
        for value in (-1, np.nan, np.inf, (1, 2, 3), (-1, 1), "a", Ellipsis, [[1, 2], [1]], True)
    ),
    ({"reg": (True, True)}, "reg must be a non-negative number r or a pair .*, got "),
    ({"reg": (1, 2), "reg_form": "single"}, "reg_form='single' takes one number for reg"),
    ({"reg_form": "foo"}, "reg_form must be one of two-sided, single, got 'foo'"),
    ({"constraint": "foo"}, "constraint must be one of none, .*, coupling, or .*got 'foo'"),
    ({"constraint": {"name": ["none"]}}, "constraint must be one of none, normalized"),
    ({"conformal_by": ["a"]}, r"a column of x that holds labels \(none\), got \['a'\]"),
    ({"constraint": ["none"]}, "constraint must be one of none, normalized"),
    ({"pivots": "foo"}, "pivots must be 'sampled', .*, 'random' or given points, got 'foo'"),
    ({"pivots": None}, "'greedy', 'random' or a pair of arrays, got NoneType"),
    ({"pivots": np.ones((2, 2))}, "'greedy', 'random' or a pair of arrays, got ndarray"),
    ({"pivots": (np.ones((3, 2)),)}, "pivots must be 'sampled', 'greedy', 'random' or a pair"),
    ({"pivots": (np.ones((3, 1)), [1.0])}, r"pivots of x: .* shape \(n, 2\) .*, got \(3, 1\)"),
    ({"pivots": (np.ones((0, 2)), [1.0])}, "pivots of x: there are no points"),
    ({"pivots": (np.ones((3, 2)), ["a"])}, "pivots of y: their table must be numeric"),
    ({"pivots": (np.ones((3, 2)), [np.nan])}, "pivots of y: .* column 'y0' has 1"),
    ({"kernel_x": 3}, "kernel_x must be a kernel of cme_dask.kernels .*, got 3"),
    ({"kernel_y": kernels.Gaussian}, "kernel_y must be a kernel of cme_dask.kernels .* <class"),
    ({"kernel_x": kernels.Gaussian((1, 2, 3))}, "3 length scales but the data have 2 columns"),
    ({"kernel_y": GAUSSIAN[1]}, "the kernel uses column 1 but the data have 1"),
]  # fmt: skip


def test_arguments_of_a_model(few):
    model = joint(kernel_y=kernels.Gaussian(1.0)).fit(*few).model_
    law = model.conditional(few[0][:3])
    listed, lazily = (
        score(model, *few, events=events).brier for events in (["y0 > 1"], iter(["y0 > 1"]))
    )
    assert [*listed] == [*lazily] == ["y0 > 1"]
    for wrong, message in (
        (lambda: law.quantile(0.5, column=["y0"]), "column must be the name of one column"),
        (lambda: law.crps(few[1][:3], column=0), "column must be the name of one column"),
        (lambda: law.sample(True), "size must be a non-negative integer, got True"),
        (lambda: model.conformalized(*few, by=["a"]), "a column of x that holds labels"),
        (lambda: model.conformalized(*few, weights="a"), "weights must be numbers"),
        (lambda: score(model, *few, events=[3]), "events must be a list of texts"),
        (lambda: score(model, *few, events="y0 > 1"), "events must be a list of texts"),
        (lambda: score(model, *few, events=3), "events must be a list of texts"),
    ):
        with Refused(DataError, message):
            wrong()


def test_arguments_of_other_estimators(few):
    x, y = few
    labels = np.where(y[:, 0] > 0.5, "a", "b")
    kernel = kernels.Gaussian((1.0, 1.0))
    sparse = SparseEmbedding(kernel_x=kernel, kernel_y=kernels.Gaussian(1.0), tol=1e-2).fit(x, y)
    assert sparse.expect([], x[:5]).shape == (5, 0)
    several = (
        sparse.expect(names, x[:5]) for names in (["y0"], np.array(["y0"]), pd.Index(["y0"]))
    )
    assert len({values.tobytes() for values in several}) == 1
    operator = TransferOperator(kernel, tol=1e-2).fit(x).model_
    logistic = partial(KernelLogisticRegression, kernel)
    for wrong, message in (
        (lambda: sparse.expect(3, x[:5]), "f must be a column, an event, .*, got 3"),
        (lambda: operator.eigenfunctions(x[:5], 1.5), "count must be an integer of at least 1"),
        (lambda: operator.modes(-1), "count must be an integer of at least 1, got -1"),
        (
            lambda: conditional_independence_test(x[:, :1], y, x[:, 1:], reg=[]),
            "reg holds no ridge",
        ),
        (
            lambda: KernelBayesFilter(kernel, kernel, reg=[]).fit(x, x),
            "reg must be a positive number or two, got",
        ),
        (
            lambda: ConditionalMeanEmbedding(kernel_x=kernel, reg=True).fit(x, y),
            "ridges must be non-negative numbers, got",
        ),
        (lambda: logistic(gradient_tol="a").fit(x, labels), "gradient_tol must lie between 0"),
        (lambda: logistic(reg=None).fit(x, labels), "reg must be a number of at least 0, got None"),
        (lambda: logistic().fit(x, y[:, 0]), "y: Unknown label type: continuous"),
        (lambda: logistic().fit(x, np.c_[labels, labels]), "y: y should be a 1d array"),
        (
            lambda: MulticlassEmbedding(shrinkage="a").fit(x, labels),
            "shrinkage must be one of True, False, got 'a'",
        ),
    ):
        with Refused(DataError, message):
            wrong()


@pytest.mark.filterwarnings("ignore:x. 2 of 3 given pivots")
@pytest.mark.parametrize(("changes", "message"), PARAMETERS, ids=lambda p: str(p)[:40])
def test_parameters(few, changes, message):
    with Refused(DataError, message):
        joint(**changes).fit(*few)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *((changes, message) for changes, message in PARAMETERS[:12]),
        ({"tol": None}, TOL + "None"),
        ({"basis": "foo"}, "basis must be one of newton, spectral, got 'foo'"),
        ({"kernel": 3}, "^kernel must be a kernel of cme_dask.kernels .*, got 3"),
        ({"kernel": kernels.Gaussian((1, 2, 3))}, "3 length scales but the data have 2 columns"),
        (
            {"pivots": "foo"},
            "pivots must be 'sampled', .*, 'random' or given points, got 'foo'",
        ),
        ({"pivots": np.ones((2, 1))}, r"pivots of X: .* shape \(n, 2\) for the .*, got \(2, 1\)"),
        ({"pivots": ["a"]}, "pivots of X: their table must be numeric"),
    ],
    ids=lambda p: str(p)[:40],
)
def test_parameters_of_pivoted_cholesky(few, changes, message):
    with Refused(DataError, message):
        PivotedCholesky(**{"kernel": GAUSSIAN} | changes).fit(few[0])


@pytest.mark.parametrize("call", ["fit", "plan", "partial_fit"])
@pytest.mark.parametrize("pivots", ["sampled", "given"])
@pytest.mark.parametrize("kind", [PivotedCholesky, JointDistribution])
def test_warnings_name_the_line_outside_the_package(few, kind, pivots, call):
    linear, copies = kernels.Linear(), np.repeat(few[0][:2], 2, axis=0)
    joint = kind is JointDistribution
    options = {"kernel_x": linear, "kernel_y": linear} if joint else {"kernel": linear}
    if pivots == "given":
        options["pivots"] = (copies, few[1][:4]) if joint else copies
    estimator, data = kind(**options, tol=1e-20), few if joint else few[:1]
    with pytest.warns(RankWarning) as issued:
        getattr(estimator, call)(*data)
    assert {warning.filename for warning in issued} == {__file__}


@pytest.mark.parametrize("n_folds", [1, 2, 255])
def test_any_number_of_folds(few, n_folds):
    fit = joint(n_folds=n_folds).fit(*few)
    assert fit.moments_.n_folds == n_folds
    assert fit.moments_.n_rows == 300


@pytest.mark.parametrize("value", [0, -1.0, np.nan, np.inf, "a", None, (1.0, 0.0), ()])
def test_length_scales(value):
    with Refused(DataError, "length_scale must be positive and finite, got "):
        kernels.Gaussian(value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": "foo"}, "a distributed Client or one of threads, .*, got 'foo'"),
        ({"scheduler": 3}, "a distributed Client or one of threads, .*, got 3"),
        ({"workers": 0}, "workers must be an integer of at least 1, got 0"),
        ({"workers": 1.5}, "workers must be an integer of at least 1, got 1.5"),
        ({"workers": "a"}, "workers must be an integer of at least 1, got 'a'"),
        ({"memory_limit": "abc"}, "memory_limit must be bytes or a text like '2GB', got 'abc'"),
        ({"memory_limit": 0}, "memory_limit must be positive, got 0"),
        ({"memory_limit": Ellipsis}, "memory_limit must be bytes or a text like '2GB'"),
    ],
    ids=str,
)
def test_where_to_run(few, changes, message):
    with Refused(DataError, message):
        joint().fit(*few, **changes)
    with Refused(DataError, message):
        PivotedCholesky(GAUSSIAN, tol=0.1).fit(few[0], **changes)


def test_a_kernel_that_vanishes_on_the_rows(few):
    with Refused(DataError, "the kernel of x is zero at every sampled row: choose another"):
        joint(kernel_x=kernels.Polynomial(2, 0.0)).fit(0 * few[0], few[1])


def test_too_little_memory_is_refused_before_any_row_is_read(pristine, monkeypatch):
    read = []
    plain = ZarrSource.read
    monkeypatch.setattr(
        ZarrSource, "read", lambda self, *span: read.append(span) or plain(self, *span)
    )
    remedies = "lower max_rank or raise tol, or n_folds=1 .*, or fewer than 2 workers"
    with Refused(ResourceError, rf"would need .* the limit is 292.97 kiB: {remedies}"):
        joint().fit(pristine, memory_limit="300kB", workers=2)
    assert read == []
    joint(sample_size=N).fit(pristine, memory_limit="3GB")
    assert len(read) > 0  # so the counter counts


# Functions -----------------------------------------------------------------------------------


def raises(y):
    raise RuntimeError("no such thing")


def fails_late(y):
    return y[:, 0] if len(y) == 500 else raises(y)  # 500: the row sample


FUNCTIONS = {
    "raises": (raises, "function 'f' failed: RuntimeError: no such thing"),
    "fails late": (fails_late, "function 'f' failed: RuntimeError: no such thing"),
    "wrong column": (lambda y: y[:, 3], "function 'f' failed: IndexError: "),
    "two columns": (lambda y: np.hstack([y, y]), r"must return shape \(500,\) .* \(500, 2\)"),
    "scalar": (lambda y: 1.0, r"must return shape \(500,\) .* it returned \(\)"),
    "nan": (lambda y: y[:, 0] * np.nan, "function 'f' returned NaN or infinity"),
    "text": (lambda y: np.array(["a"] * len(y)), "must return numbers, it returned <U1"),
    "complex": (lambda y: y[:, 0] + 1j, "must return numbers, it returned complex128"),
    "nothing": (lambda y: None, "must return numbers, it returned object"),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions_that_fail(rows, case):
    function, message = FUNCTIONS[case]
    with Refused(DataError, message):
        joint().fit(*rows, functions={"f": function})
    with Refused(DataError, message):
        joint().fit(rows[1], rows[0], functions_x={"f": function})


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"y0": positive}, "'y0' is a column already: give the function another name"),
        ({3: positive}, "functions maps names to callables, got 3"),
        ({"f": 3}, "functions maps names to callables, got 'f': 3"),
        ([positive], "functions maps names to callables, got"),
        (positive, "functions maps names to callables, got"),
    ],
)
def test_functions_that_are_none(few, functions, message):
    with Refused(DataError, message):
        joint().fit(*few, functions=functions)


def test_functions_may_spoil_their_argument(few):
    def vandal(y):
        y *= 0.0
        return y[:, 0]

    x, y = few[0].copy(), few[1].copy()
    fit = joint().fit(x, y, functions={"zero": vandal, "positive": positive})
    np.testing.assert_array_equal(y, few[1])
    plain = joint().fit(*few, functions={"positive": positive})
    names = ["y0", "positive"]
    # One function more changes the shapes of products, and with them the last bits.
    np.testing.assert_allclose(fit.expect(names, x[:5]), plain.expect(names, x[:5]), rtol=1e-11)


# Queries -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("q", [[0.0, 0.0]]), "unknown column 'q': there are 'y0', 'positive'"),
        ((["y0", "q"], [[0.0, 0.0]]), "unknown column 'q'"),
        ((len, [[0.0, 0.0]]), "declare a function at the fit, .* known here: y0, positive"),
        ((["y0", len], [[0.0, 0.0]]), "declare a function at the fit"),
        ((3, [[0.0, 0.0]]), "declare a function at the fit"),
        (("y0", None), "points of one variable: X=... or Y=..."),
        (("y0", [[0.0]]), r"X must have shape \(n, 2\) for the columns x0, x1, got \(1, 1\)"),
        (("y0", 3.0), r"X must have shape \(n, 2\)"),
        (("y0", np.zeros((2, 2, 2))), r"X must have shape \(n, 2\) .* got \(2, 2, 2\)"),
        (("y0", [[0.0, np.nan], [np.inf, np.nan]]), r"'x0' has 1 \(first at row 1\); .*'x1' has 2"),
        (("y0", "abc"), "abc does not exist: give the path or URL"),
        (("y0", [["a", "b"]]), "X must be numeric"),
        (("y0", [[1.0, 2.0], [3.0]]), "X must be numeric"),
        (("y0", pd.DataFrame({"x0": [1.0], "z": [2.0]})), "lacks the column 'x1', and has others"),
        (("y0", pd.DataFrame({"x0": [1.0], "x1": ["b"]})), "X must be numeric"),
    ],
)  # fmt: skip
def test_queries(fitted, args, message):
    for model in (fitted, fitted.model_):
        with Refused(DataError, message):
            model.expect(*args)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            lambda t: pd.DataFrame({"x0": t, "x1": 0.0}),
            r"column 'x0' of X holds times \(datetime64",
        ),
        (lambda t: pd.DataFrame({"x0": t.tz_localize("UTC"), "x1": 0.0}), "holds times .*UTC"),
        (lambda t: pd.DataFrame({"x0": t - t[0], "x1": 0.0}), r"holds times \(timedelta64"),
        (lambda t: {"x0": t.to_numpy("M8[ns]"), "x1": [0.0, 0.0]}, "column 'x0' of X holds times"),
        (lambda t: pl.DataFrame({"x0": t, "x1": [0.0, 0.0]}), "column 'x0' of X holds times"),
        (lambda t: np.stack([t, t], axis=1), "X must be numeric, got values of type datetime64"),
    ],
)
def test_times_are_no_numbers(fitted, points, message):
    with Refused(DataError, message):
        fitted.expect("y0", points(pd.date_range("2020", periods=2)))


def test_queries_of_both_variables(fitted, few):
    with Refused(DataError, "points of one variable"):
        fitted.expect("y0", few[0][:1], Y=few[1][:1])
    with Refused(DataError, "unknown column 'positive': there are 'x0', 'x1'"):
        fitted.expect("positive", Y=few[1][:1])
    with Refused(DataError, r"Y must have shape \(n, 1\) for the columns y0, got \(2, 2\)"):
        fitted.density_ratio(few[0][:1], few[0][:2])


def test_standard_errors_need_folds(few):
    with Refused(DataError, "standard errors need folds: fit with n_folds of at least 2"):
        joint(n_folds=1).fit(*few).expect("y0", few[0][:1], return_std=True)


def test_queries_before_the_fit(tmp_path, few):
    queries = [
        lambda: joint().expect("y0", few[0]),
        lambda: joint().density_ratio(*few),
        lambda: joint().save(tmp_path / "m"),
        lambda: PivotedCholesky().transform(few[0]),
        lambda: PivotedCholesky().pivots_,
        lambda: PivotedCholesky().get_feature_names_out(),
    ]
    for query in queries:
        with Refused(NotFittedError, "is not fitted: call fit first"):
            query()
    assert os.listdir(tmp_path) == []


def test_a_failed_fit_leaves_the_estimator_unfitted(few):
    fit = joint()
    with pytest.raises(DataError):
        fit.fit(few[0], few[1][:-1])
    with pytest.raises(NotFittedError):
        fit.expect("y0", few[0])


def test_transform_checks_its_columns(few):
    features = PivotedCholesky(GAUSSIAN, tol=0.1).fit(few[0])
    with Refused(DataError, "X has 1 columns, the model.s are x0, x1"):
        features.transform(few[0][:, :1])
    with Refused(DataError, r"'x1' has 1 \(first at row 1\)"):
        features.transform(spoiled(few[0], [(1, 1)]))


# Damaged stores ------------------------------------------------------------------------------


def edit(path, change):
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))


def described(change):
    """A description that says something else, as if it had been written so: without its seal."""

    def damage(path):
        def unsealed(about):
            change(about["attributes"]["cme_dask"])
            about["attributes"]["cme_dask"].pop("checksum")

        edit(path / "zarr.json", unsealed)

    return damage


def truncate(name):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:60])


def flip(name):
    def damage(path):
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 4
        (path / name).write_bytes(bytes(data))

    return damage


def delete(name):
    return lambda path: (
        shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()
    )


def overwrite(name, text):
    return lambda path: (path / name).write_text(text)


STORES = {
    "truncated x": (truncate("x/c/4/0"), r"chunk x/c/4/0 of .*truncated or corrupt.*: restore it"),
    "truncated y": (truncate("y/c/8/0"), "chunk y/c/8/0 of .*truncated or corrupt"),
    "truncated weights": (truncate("weights/c/0"), "chunk weights/c/0 of .*truncated or corrupt"),
    "emptied chunk": (overwrite("x/c/0/0", ""), "chunk x/c/0/0 of .*truncated or corrupt"),
    "flipped bit": (flip("x/c/3/0"), "chunk x/c/3/0 of .*truncated or corrupt.*checksum"),
    "lost chunk of x": (delete("x/c/8/0"), "chunk x/c/8/0 of .* is missing: restore it"),
    "lost chunk of weights": (delete("weights/c/2"), "chunk weights/c/2 of .* is missing"),
    "lost x": (delete("x"), "lacks the array 'x': restore it"),
    "lost weights": (delete("weights"), "lacks the array 'weights'"),
    "lost description of y": (delete("y/zarr.json"), "lacks the array 'y'"),
    "garbled array": (overwrite("x/zarr.json", "{nope"), "description of 'x' in .* is damaged"),
    "emptied array": (overwrite("x/zarr.json", "{}"), "description of 'x' in .* is damaged"),
    "lost row sample": (delete("row_sample"), "holds no row sample: write it again"),
    "lost sample keys": (delete("row_sample/keys"), "lacks the array 'keys'"),
    "lost sample chunk": (delete("row_sample/x/c/0/0"), "array 'x' of .* lacks a chunk"),
    "lost sample index": (delete("row_sample/index/c/0"), "array 'index' of .* lacks a chunk"),
    "truncated sample": (truncate("row_sample/y/c/0/0"), "array 'y' of .* truncated or corrupt"),
    "short sample": (
        lambda path: edit(path / "row_sample/keys/zarr.json", lambda j: j.update(shape=[3])),
        "'keys' of .* should be float64 of shape .9000., it is float64 of shape .3.: restore it",
    ),
    "narrow sample": (
        lambda path: edit(path / "row_sample/x/zarr.json", lambda j: j.update(shape=[N, 1])),
        "'x' of .* should be float64 of shape .9000, 2., it is float64 of shape .9000, 1.",
    ),
    "half-written": (
        lambda path: edit(path / "zarr.json", lambda j: j["attributes"].clear()),
        "no finished sample of cme_dask .* cut off; write it again",
    ),
    "newer": (
        described(lambda a: a.update(schema_version=4)),
        "has schema version 4, this cme_dask reads up to 3: install a newer cme_dask",
    ),
    "version text": (described(lambda a: a.update(schema_version="1")), "schema version '1'"),
    "version true": (described(lambda a: a.update(schema_version=True)), "schema version True"),
    "other kind": (described(lambda a: a.update(kind="q")), "holds a 'q', a 'sample' was expected"),
    "no weights word": (described(lambda a: a.pop("weights")), "not say whether it has weights"),
    "rows": (described(lambda a: a.update(rows=8999)), "has 9000 rows, its description says 8999"),
    "no columns": (described(lambda a: a.pop("columns")), "describes no columns"),
    "columns": (described(lambda a: a["columns"]["x"].pop("units")), "description of the columns"),
    "names": (described(lambda a: a["columns"]["x"].update(names=["a"])), "its .* names 1"),
    "more rows": (
        lambda path: edit(path / "x/zarr.json", lambda j: j.update(shape=[N + 1, 2])),
        "'x' of .* has 9001 rows, its description says 9000",
    ),
    "int rows": (
        lambda p: edit(p / "x/zarr.json", lambda j: j.update(data_type="int64", fill_value=0)),
        "'x' of .* should be float64 rows, it is int64",
    ),
    "unknown codec": (
        lambda path: edit(path / "x/zarr.json", lambda j: j.update(codecs=[{"name": "nope"}])),
        "description of 'x' in .* is damaged",
    ),
    "garbled": (overwrite("zarr.json", "{nope"), "is no readable Zarr store"),
    "emptied": (overwrite("zarr.json", ""), "is no readable Zarr store"),
    "a list": (overwrite("zarr.json", "[]"), "is no readable Zarr store"),
    "nested": (overwrite("zarr.json", "[" * 100_000), "is no readable Zarr store"),
    "binary": (lambda p: (p / "zarr.json").write_bytes(b"\xff\0\1"), "is no readable Zarr store"),
    "lost": (delete("zarr.json"), "is no readable Zarr store"),
}  # fmt: skip


@pytest.mark.parametrize("case", STORES)
def test_damaged_store(store, case):
    damage, message = STORES[case]
    damage(store)
    with Refused(StoreError, message):
        joint().fit(store)
    if case != "truncated y":  # which this one does not read
        with Refused(StoreError, message):
            PivotedCholesky(GAUSSIAN, tol=0.1).fit(store)


MODELS = {
    **{
        f"{how.__name__} {name}": (how(name), message)
        for how, message in (
            (truncate, "array '.*' of .* truncated or corrupt .*: restore it"),
            (flip, "array '.*' of .* truncated or corrupt"),
            (delete, "array '.*' of .* lacks a chunk: restore it"),
        )
        for name in (
            "coef/c/0/0",
            "x_basis_newton_points/c/0/0",
            "y_basis_newton_factor/c/0/0",
            "moments_gram/c/0/0",
        )
    },
    "lost coef": (delete("coef"), "lacks the array 'coef': restore it or write it again"),
    "lost moments": (delete("moments_rows"), "lacks the array 'moments_rows'"),
    "garbled array": (
        overwrite("coef/zarr.json", "{nope"),
        "description of 'coef' in .* is damaged",
    ),
    "half-written": (STORES["half-written"][0], "no finished model of cme_dask .* write it again"),
    "newer": (
        described(lambda a: a.update(schema_version=7)),
        "has schema version 7, this cme_dask reads up to 6: install a newer cme_dask",
    ),
    "no type": (described(lambda a: a.pop("type")), "has a damaged description"),
    "other type": (
        described(lambda a: a.update(type="Q")),
        "holds a 'Q'; known are EmbeddingModel, ",
    ),
    "no fit": (described(lambda a: a["description"].pop("about")), "lacks 'about'"),
    "no kernel": (
        described(lambda a: a["description"]["x"]["basis"]["newton"].pop("kernel")),
        "x_basis_newton is damaged",
    ),
    "garbled": (overwrite("zarr.json", "{nope"), "is no readable Zarr store"),
    "lost": (delete("zarr.json"), "is no readable Zarr store"),
}


@pytest.mark.parametrize("case", MODELS)
def test_damaged_model(model, case):
    damage, message = MODELS[case]
    cme_dask.load(model)
    damage(model)
    with Refused(StoreError, message):
        cme_dask.load(model)


def test_things_that_are_no_store(tmp_path, store, model, few):
    (tmp_path / "plain").mkdir()
    (tmp_path / "file").write_text("no store")
    zarr.open_group(str(tmp_path / "foreign"), mode="w").create_array("x", data=few[0])
    cases = [
        (tmp_path / "nowhere", "nowhere does not exist: give the path or URL"),
        (tmp_path / "plain", "plain is no readable Zarr store"),
        (tmp_path / "file", "file is a file, a Zarr store is a folder: .*cme_dask.ingest"),
        (tmp_path / "foreign", "foreign is no finished .* of another kind"),
        ("nope://a/b", "nope://a/b is no readable Zarr store: Protocol not known"),
        ("memory://nothing/here", "memory://nothing/here is no readable Zarr store"),
    ]
    for path, message in cases:
        for read in (joint().fit, cme_dask.load):
            with Refused(StoreError, message):
                read(path)
    with Refused(StoreError, "holds a 'model', a 'sample' was expected"):
        joint().fit(model)
    with Refused(StoreError, "holds a 'sample', a 'model' was expected"):
        cme_dask.load(store)
    with Refused(StoreError, "is a single array, a model was expected"):
        cme_dask.load(tmp_path / "foreign" / "x")


# Outputs -------------------------------------------------------------------------------------


def contents(folder):
    return {p.relative_to(folder): p.is_file() and p.read_bytes() for p in folder.rglob("*")}


def test_outputs_that_can_not_be_written(tmp_path, fitted, few, model):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "precious").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path)
    cases = [
        (model, False, "m already exists: choose another path or overwrite it"),
        (tmp_path / "plain", True, "plain is a folder that cme_dask did not write"),
        (tmp_path / "link", False, "link already exists"),
        (tmp_path / "no" / "folder", False, "the folder .*no of the output does not exist"),
        ("memory://m", False, "outputs are local paths, got the URL memory://m"),
    ]
    columns = (Columns(("a", "b")), Columns(("c",)))
    for path, again, message in cases:
        with Refused(DataError, message):
            fitted.save(path, overwrite=again)
        with Refused(DataError, message), writing_sample(path, columns, overwrite=again):
            raise AssertionError("the output must be refused before any work is done")
    with Refused(ResourceError, "can't be written: File name too long"):
        fitted.save(tmp_path / ("a" * 300))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("path", [None, 3, ""], ids=repr)
def test_what_is_no_path(tmp_path, path, fitted):
    (tmp_path / "in.csv").write_text("a,b\n1,2\n3,4\n")
    calls = (
        fitted.save,
        fitted.model_.save,
        cme_dask.load,
        lambda path: cme_dask.ingest([path], tmp_path / "out.zarr", x=["a"], y=["b"]),
        lambda path: cme_dask.ingest([tmp_path / "in.csv"], path, x=["a"], y=["b"]),
    )
    for call in calls:
        with pytest.raises(DataError, match="must be a path"):
            call(path)


def test_a_foreign_zarr_store_is_not_overwritten(tmp_path, fitted, few):
    zarr.open_group(str(tmp_path / "z"), mode="w").create_array("x", data=few[0])
    before = contents(tmp_path)
    with Refused(DataError, "folder that cme_dask did not write"):
        fitted.save(tmp_path / "z", overwrite=True)
    assert contents(tmp_path) == before


@pytest.fixture
def tiny_disk(tmp_path):
    """A real file system of 384 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=384k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_nothing_behind(tiny_disk, rows, few):
    with Refused(ResourceError, "the disk is full while writing .*: free some space"):
        write_store(tiny_disk / "s", *rows)
    assert os.listdir(tiny_disk) == []
    small = write_store(tiny_disk / "s", *few)
    before = contents(tiny_disk)
    with (
        Refused(ResourceError, "the disk is full"),
        writing_sample(small, open_sample(small).columns, overwrite=True) as writer,
    ):
        writer.append(*rows)
    assert contents(tiny_disk) == before  # the earlier store, as it was
    small = joint(n_folds=1, tol=0.1, support_size=0).fit(*few)
    filler = tiny_disk / "filler"
    with filler.open("wb") as file:
        try:
            file.write(bytes(1 << 19))
        except OSError:
            assert file.tell() > 0
    before = sorted(os.listdir(tiny_disk))
    with Refused(ResourceError, "the disk is full while writing .*m: free some space"):
        small.save(tiny_disk / "m")
    assert sorted(os.listdir(tiny_disk)) == before
    filler.unlink()
    small.save(tiny_disk / "m")
    np.testing.assert_array_equal(
        cme_dask.load(tiny_disk / "m").expect("y0", few[0][:9]), small.expect("y0", few[0][:9])
    )


# Errors from other processes -----------------------------------------------------------------


def assert_arrives(rows, store, **where):
    """NaN, a truncated chunk and a function that fails in a task arrive as our own errors."""
    with Refused(DataError, SAID_X):
        joint().fit(spoiled(rows[0], BAD_X), rows[1], **where)
    with Refused(DataError, "function 'f' failed: RuntimeError: no such thing"):
        joint().fit(*rows, functions={"f": fails_late}, **where)
    truncate("x/c/4/0")(store)
    with Refused(StoreError, "chunk x/c/4/0 of .*truncated or corrupt"):
        joint().fit(store, **where)


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_errors_arrive_from_threads(rows, store, scheduler):
    assert_arrives(rows, store, scheduler=scheduler)


def test_errors_arrive_from_processes(rows, store):
    assert_arrives(rows, store, scheduler="processes", workers=1)


def test_errors_arrive_from_a_cluster(rows, store, cluster):
    assert_arrives(rows, store, scheduler=cluster)


def test_keywords_that_a_run_does_not_take_are_refused():
    with pytest.raises(TypeError, match="'workrs': this run takes scheduler, workers, memory_limi"):
        PivotedCholesky().fit(np.ones((3, 1)), workrs=2)
    with pytest.raises(TypeError, match=r"keyword argument 'checkpoint'.*, progress, device"):
        PivotedCholesky().partial_fit(np.ones((3, 1)), checkpoint="c")


def test_every_error_is_one_of_ours():
    for kind in (DataError, StoreError, NotFittedError, ResourceError):
        assert issubclass(kind, CmeDaskError)
    assert issubclass(StoreError, DataError)
    assert issubclass(DataError, ValueError)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(StoreError("text")) == "text"
