"""``PivotedCholesky`` as a transformer, and what the fit of ``JointDistribution`` promises."""

import pickle
import tracemalloc

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import oracle_joint as dense
import oracle_kernels as slow
import pandas as pd
import polars as pl
import pytest
import sklearn.exceptions
import xarray as xr
from conftest import write_store
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA, KernelPCA
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator

from cme_dask import (
    ConditionalMeanEmbedding,
    JointDistribution,
    KernelLogisticRegression,
    PivotedCholesky,
    kernels,
    load,
    open_sample,
)
from cme_dask.data.writer import writing_sample
from cme_dask.errors import DataError, NotFittedError, RankWarning, UnseenCategoryWarning
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.folds import draw, fold_of_rows

GAUSSIAN = kernels.Gaussian(1.0)
KERNELS = {
    "gaussian": (kernels.Gaussian(0.9), lambda X, Z: slow.gaussian(X, Z, 0.9)),
    "laplace": (kernels.Laplace(2.0), lambda X, Z: slow.laplace(X, Z, 2.0)),
    "matern": (kernels.Matern(1.5, 1.5), lambda X, Z: slow.matern(X, Z, 1.5, 1.5)),
    "linear": (kernels.Linear(0.5), lambda X, Z: slow.linear(X, Z, 0.5)),
    "polynomial": (kernels.Polynomial(2, 1.0), lambda X, Z: slow.polynomial(X, Z, 2, 1.0, 1.0)),
}


@pytest.fixture
def table(rng):
    return rng.normal(size=(400, 2))


def raiser(*_, **__):
    raise AssertionError("computed, where nothing should be")


# Features ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_features_equal_the_dense_oracle(name, table, rng):
    kernel, oracle = KERNELS[name]
    fit = PivotedCholesky(kernel, tol=1e-4).fit(table)
    for points in (table, 2 * rng.normal(size=(30, 2)), table[:1], table[:0]):
        expected = dense.newton(oracle, points, fit.pivots_)
        np.testing.assert_allclose(fit.transform(points), expected, atol=1e-10)
    L = fit.transform(table)
    K = oracle(table, table)
    tau = 1 - (L**2).sum() / np.trace(K)
    assert fit.trace_error_ == pytest.approx(tau, abs=1e-13)
    assert fit.trace_error_ <= 1e-4


@pytest.mark.parametrize("weighted", [False, True])
def test_spectral_features_diagonalise_the_gram_matrix(table, rng, weighted):
    w = rng.exponential(size=400) if weighted else None
    fit = PivotedCholesky(GAUSSIAN, tol=1e-6, basis="spectral").fit(table, weights=w)
    share = np.full(400, 1 / 400) if w is None else w / w.sum()
    psi = fit.transform(table)
    gram = psi.T @ (share[:, None] * psi)
    np.testing.assert_allclose(gram, np.diag(fit.eigenvalues_), atol=3e-14)
    assert (np.diff(fit.eigenvalues_) <= 0).all()
    # Orthonormal in the Hilbert space: the same inner products as the Newton features.
    newton = clone(fit).set_params(basis="newton").fit(table, weights=w).transform(table)
    np.testing.assert_allclose(psi @ psi.T, newton @ newton.T, atol=1e-13)


def rounded(power):
    return np.sqrt(power**2 + 1e-14)


@pytest.mark.parametrize("name", ["gaussian", "laplace", "matern"])
@pytest.mark.parametrize("tol", [1e-1, 1e-4])
def test_the_error_stays_below_the_power_function(name, tol, table):
    kernel, oracle = KERNELS[name]
    fit = PivotedCholesky(kernel, tol=tol).fit(table)
    newton = fit.basis_.newton
    L, K, power = fit.transform(table), oracle(table, table), newton.power(table)
    # P^2 is a difference of numbers near 1: its rounding, 1e-14, is a part of the bound.
    assert (np.abs(K - L @ L.T) <= np.outer(rounded(power), rounded(power))).all()
    np.testing.assert_allclose(power**2, 1 - (L**2).sum(axis=1), atol=1e-14)
    assert np.abs(L).max() <= newton.bound == 1.0
    one_less = NewtonBasis.from_points(kernel, fit.pivots_[:-1]).power(table)
    assert (power <= rounded(one_less)).all()
    assert power.max() < one_less.max()


@pytest.mark.parametrize("name", KERNELS)
def test_the_basis_is_biorthogonal_at_the_pivots(name, table):
    kernel, oracle = KERNELS[name]
    basis = PivotedCholesky(kernel, tol=1e-5).fit(table).basis_.newton
    L = basis(basis.points)
    np.testing.assert_allclose(basis.biorthogonal.T @ L, np.eye(basis.rank), atol=1e-9)
    np.testing.assert_allclose(L, basis.factor, atol=1e-12)
    np.testing.assert_array_equal(np.triu(basis.factor, 1), 0.0)
    np.testing.assert_allclose(L @ L.T, oracle(basis.points, basis.points), atol=1e-12)


def gridded(rng):
    return np.stack(np.meshgrid(np.arange(8.0), np.arange(8.0)), axis=-1).reshape(-1, 2)


def duplicated(rng):
    return rng.integers(0, 4, size=(150, 2)).astype(float)


def scattered(rng):
    return rng.normal(size=(150, 2))


@pytest.mark.parametrize("rows", [scattered, gridded, duplicated])
@pytest.mark.parametrize("name", KERNELS)
def test_greedy_pivots_equal_algorithm_1(name, rows, rng):
    kernel, oracle = KERNELS[name]
    points = rows(rng)
    pivots, L = dense.pivoted_cholesky(oracle(points, points), 1e-6)
    result = pivoted_cholesky(kernel, points, 1e-6)
    assert result.pivots.tolist() == pivots
    np.testing.assert_allclose(result.factor, L[pivots], atol=1e-10)
    assert (np.diff(result.residual_trace) <= 0).all()


@pytest.mark.parametrize("rows", [gridded, duplicated])
def test_ties_go_to_the_lowest_global_row_in_any_order(rows, rng):
    """The rows of a sample come sorted by key: what counts is their number in the table."""
    points = rows(rng)
    straight = pivoted_cholesky(GAUSSIAN, points, 1e-3)
    order = rng.permutation(len(points))
    shuffled = pivoted_cholesky(GAUSSIAN, points[order], 1e-3, rows=order)
    assert order[shuffled.pivots].tolist() == straight.pivots.tolist()


def test_pivots_of_the_fit_are_greedy_on_the_row_sample(table):
    kernel = kernels.Gaussian(4.0)  # of a tolerance at which the choice is greedy few are enough
    fit = PivotedCholesky(kernel, tol=2e-3, sample_size=200, random_state=3).fit(table)
    kept = draw(np.arange(len(table)), (table,), None, 200, 3)
    rows = np.sort(kept.index[::2])  # the other half tells how many are enough
    K = slow.gaussian(table[rows], table[rows], 4.0)
    pivots, _ = dense.pivoted_cholesky(K, 1e-6)
    rank = fit.basis_.rank
    assert 1 < rank < len(pivots)
    np.testing.assert_array_equal(fit.pivots_, table[rows[pivots[:rank]]])
    np.testing.assert_array_equal(fit.basis_.newton.rows, rows[pivots[:rank]])
    assert fit.n_passes_ == 1


def test_given_pivots_are_taken_without_those_the_others_span(table):
    given = np.vstack([table[:5], table[2:3], table[5:8]])
    with pytest.warns(RankWarning, match="X: 1 of 9 given pivots were left out"):
        fit = PivotedCholesky(GAUSSIAN, pivots=given).fit(table)
    assert sorted(fit.pivots_.tolist()) == sorted(table[:8].tolist())


def test_max_rank_limits_given_pivots(table):
    with pytest.warns(RankWarning, match="X: 7 of 10 given .* since max_rank=3 was reached"):
        fit = PivotedCholesky(GAUSSIAN, pivots=table[:10], max_rank=3).fit(table)
    first = pivoted_cholesky(GAUSSIAN, table[:10], 0.0, 3).pivots
    np.testing.assert_array_equal(fit.pivots_, table[first])


def test_given_pivots_at_which_the_kernel_is_zero_are_refused(table):
    with pytest.raises(DataError, match="kernel of X is zero at every given pivot"):
        PivotedCholesky(kernels.Linear(), pivots=np.zeros((3, 2))).fit(table)


def test_given_pivots_go_by_name_and_hold_labels_of_the_rows(table):
    frame = pd.DataFrame({"a": table[:, 0], "b": 100 + 10 * table[:, 1]})
    fit = PivotedCholesky(kernels.Gaussian((1.0, 10.0)), pivots=frame[:9]).fit(frame)
    for few in (frame[["b", "a"]][:9], pl.from_pandas(frame[:9].assign(c=0.0))):
        again = PivotedCholesky(kernels.Gaussian((1.0, 10.0)), pivots=few).fit(frame)
        np.testing.assert_array_equal(again.pivots_, fit.pivots_)
    labelled = frame.assign(b=np.where(table[:, 1] > 0, "up", "down"))
    kernel = GAUSSIAN.on([0]) * kernels.Categorical(1.0).on([1])
    few = labelled[:9]
    fit = PivotedCholesky(kernel, pivots=few).fit(labelled)
    codes = np.column_stack([few["a"], few["b"] != few["b"][0]])
    assert sorted(fit.pivots_.tolist()) == sorted(codes.tolist())
    for points, message in (
        (np.add(codes, [0.0, 7.0]), "pivots of X: column 'b' has the unknown '7"),
        (few.assign(b="flat"), "pivots of X: column 'b' has the unknown 'flat'"),
        (few[["a"]], "pivots of X: their table lacks the column 'b'"),
        (few.assign(a=np.nan), "pivots of X: values must be finite, but column 'a' has 9"),
    ):
        with pytest.raises(DataError, match=message):
            PivotedCholesky(kernel, pivots=points).fit(labelled)


def test_max_rank_warns(table):
    with pytest.warns(RankWarning, match="max_rank=4 was reached"):
        fit = PivotedCholesky(GAUSSIAN, max_rank=4).fit(table)
    assert fit.transform(table).shape == (400, 4)


# Inputs --------------------------------------------------------------------------------------


def test_dask_is_transformed_lazily_in_any_blocks(table):
    fit = PivotedCholesky(GAUSSIAN, tol=1e-3).fit(table)
    expected = fit.transform(table)
    for chunks in ((400, 2), (37, 1), ((1, 399), 2)):
        source = da.from_array(table, chunks=chunks)
        with dask.config.set(scheduler=raiser):
            lazy = fit.transform(source)
        assert lazy.chunks == (source.chunks[0], (len(fit.pivots_),))
        assert lazy.dtype == np.float64
        found = lazy.compute(scheduler="threads")
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_stores_are_transformed_lazily(table, tmp_path):
    path = write_store(tmp_path / "s", table, table[:, :1], chunk_rows=90)
    fit = PivotedCholesky(GAUSSIAN, tol=1e-3).fit(path)
    with dask.config.set(scheduler=raiser):
        lazy = fit.transform(str(path))
    assert lazy.chunks[0] == (90, 90, 90, 90, 40)
    np.testing.assert_allclose(lazy.compute(), fit.transform(table), atol=1e-13)
    one = open_sample(path, x_columns=["x1"])
    fit = PivotedCholesky(GAUSSIAN, tol=1e-3).fit(one)
    for source in (one, path):  # of the whole store it takes the column that it knows
        found = fit.transform(source).compute()
        np.testing.assert_allclose(found, fit.transform(table[:, 1]), atol=1e-13)


def test_columns_with_names_are_taken_by_name(table):
    frame = pd.DataFrame(table, columns=["wind", "rain"])
    fit = PivotedCholesky(kernels.Gaussian((0.5, 2.0)), tol=1e-2).fit(frame)
    expected = fit.transform(table)
    np.testing.assert_array_equal(fit.transform(frame), expected)
    np.testing.assert_array_equal(fit.transform(frame[["rain", "wind"]]), expected)
    np.testing.assert_array_equal(fit.transform(frame.assign(snow=0.0)), expected)
    data = xr.DataArray(table[:, ::-1], dims=("t", "c"), coords={"c": ["rain", "wind"]})
    np.testing.assert_array_equal(fit.transform(data), expected)
    with pytest.raises(DataError, match="lacks the column 'rain', and has others: 'snow'"):
        fit.transform(frame.rename(columns={"rain": "snow"}))


def test_made_up_names_are_names_where_a_table_has_only_some_of_them(table):
    frame = pd.DataFrame(np.hstack([table, table[:, :1]]), columns=["x0", "x1", "x2"])
    fit = PivotedCholesky(GAUSSIAN, tol=0.2).fit(frame[["x0", "x1"]])
    with pytest.raises(DataError, match="X lacks the column 'x0', and has others: 'x2'"):
        fit.transform(frame[["x1", "x2"]])
    counted = pd.DataFrame(table)  # 0 and 1 are no names
    np.testing.assert_array_equal(fit.transform(counted), fit.transform(table))


def test_labels_are_those_of_the_fit(table, tmp_path):
    """Another table counts its labels in another order."""
    frame = pd.DataFrame({"a": table[:, 0], "label": np.array(["u", "v", "w"])[np.arange(400) % 3]})
    kernel = kernels.Gaussian(1.0).on([0]) * kernels.Categorical(1.0).on([1])
    fit = PivotedCholesky(kernel, tol=0.05).fit(frame)
    expected, turned = fit.transform(frame)[::-1], frame[::-1]
    grams = fit.gram_columns(frame).compute()[::-1]
    lazy = dd.from_pandas(turned.reset_index(drop=True), npartitions=3)
    ordered = turned.assign(label=pd.Categorical(turned["label"], ["w", "v", "u"]))
    for rows in (turned, ordered, pl.from_pandas(turned), lazy, turned.assign(more=0.0)):
        found = np.asarray(fit.transform(rows))
        np.testing.assert_allclose(found, expected, atol=1e-13)
        np.testing.assert_allclose(fit.gram_columns(rows).compute(), grams, atol=1e-13)
    store = labelled_store(tmp_path, turned)
    np.testing.assert_allclose(fit.transform(store).compute(), expected, atol=1e-13)
    fit.transform_store(store, tmp_path / "features.zarr")
    features = open_sample(tmp_path / "features.zarr")
    np.testing.assert_allclose(features.sources[0].read(0, 400), expected, atol=1e-13)
    index = features.row_sample.index
    np.testing.assert_allclose(features.row_sample.parts[0], expected[index], atol=1e-13)
    with pytest.raises(DataError, match="column 'label' has the unknown 'z': there are 'u', 'v'"):
        fit.transform(frame.assign(label="z"))
    with pytest.raises(DataError, match="column 'a' holds labels in X and numbers in the model"):
        fit.transform(frame.assign(a="1.5"))


def labelled_store(folder, frame):
    """A store of the rows, whose labels are counted by itself."""
    sample = open_sample(frame, frame[["a"]])
    with writing_sample(folder / "rows.zarr", sample.columns, chunk_rows=90) as writer:
        writer.append(*(source.read(0, len(frame)) for source in sample.sources))
    return folder / "rows.zarr"


def test_unseen_labels_are_pooled_rare_ones(table):
    label = np.array(["u", "v"])[np.arange(400) % 2]
    label[:9] = ["p", "q", "r"] * 3
    frame = pd.DataFrame({"a": table[:, 0], "label": label})
    fit = PivotedCholesky(tol=0.05).fit(frame)
    with pytest.warns(UnseenCategoryWarning, match="column 'label' 'z'"):
        found = fit.transform(frame.assign(label="z"))
    np.testing.assert_allclose(found, fit.transform(frame.assign(label="p")), atol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
def test_other_numbers_are_converted(table, dtype):
    rows = (10 * table).astype(dtype)
    fit = PivotedCholesky(kernels.Gaussian(5.0), tol=1e-2).fit(rows)
    plain = PivotedCholesky(kernels.Gaussian(5.0), tol=1e-2).fit(rows.astype(float))
    np.testing.assert_array_equal(fit.transform(rows), plain.transform(rows.astype(float)))


# Among scikit-learn's ------------------------------------------------------------------------


def test_clone_and_parameters(table):
    estimator = PivotedCholesky(GAUSSIAN, tol=0.3, basis="spectral", max_rank=70)
    copy = clone(estimator)
    assert copy.get_params() == estimator.get_params()
    assert copy.set_params(tol=0.1).tol == 0.1
    law = JointDistribution(kernel_x=GAUSSIAN, reg=(1e-3, 1e-2), n_folds=3)
    assert clone(law).get_params() == law.get_params()
    fitted = estimator.fit(table)
    assert not hasattr(clone(fitted), "basis_")
    again = pickle.loads(pickle.dumps(fitted))  # noqa: S301
    np.testing.assert_array_equal(again.transform(table), fitted.transform(table))


def test_names_of_features(table):
    for basis in ("newton", "spectral"):
        fit = PivotedCholesky(GAUSSIAN, tol=0.3, basis=basis).fit(table)
        names = fit.get_feature_names_out()
        assert names.tolist() == [f"{basis}{i}" for i in range(fit.transform(table).shape[1])]
        frame = fit.set_output(transform="pandas").transform(pd.DataFrame(table))
        assert list(frame.columns) == names.tolist()


def test_ridge_on_features_is_kernel_ridge(table, rng):
    y = np.sin(table[:, 0]) + 0.1 * rng.normal(size=400)
    model = make_pipeline(
        PivotedCholesky(GAUSSIAN, tol=1e-10), Ridge(alpha=0.5, fit_intercept=False)
    ).fit(table, y)
    K = slow.gaussian(table, table, 1.0).astype(float)
    expected = K @ np.linalg.solve(K + 0.5 * np.eye(400), y)
    np.testing.assert_allclose(model.predict(table), expected, atol=1e-6)


def test_pca_of_features_is_kernel_pca(table):
    """Eigenvalues of the centred kernel matrix: PCA centres the features, KernelPCA the matrix.

    PCA divides by n - 1, KernelPCA does not divide. The factor differs from the matrix by the trace
    error, tol n, which bounds the difference of each eigenvalue (Weyl).
    """
    features = PivotedCholesky(GAUSSIAN, tol=1e-8).fit_transform(table)
    ours = PCA(6, svd_solver="full").fit(features).explained_variance_ * 399
    theirs = KernelPCA(6, kernel="rbf", gamma=0.5, eigen_solver="dense").fit(table).eigenvalues_
    np.testing.assert_allclose(ours, theirs, atol=1e-8 * 400)


def test_kmeans_on_features_separates_rings(rng):
    angle, radius = rng.uniform(0, 2 * np.pi, 300), np.repeat([0.3, 3.0], 150)
    rings = radius[:, None] * np.column_stack([np.cos(angle), np.sin(angle)])
    groups = make_pipeline(
        PivotedCholesky(kernels.Gaussian(1.0), tol=1e-3), KMeans(4, n_init=5, random_state=0)
    ).fit_predict(rings)
    assert not set(groups[:150]) & set(groups[150:])


WORDING = "the error is raised; its words differ from those that scikit-learn searches for"
EXPECTED_FAILURES = {
    "check_n_features_in_after_fitting": WORDING,
    "check_fit2d_predict1d": WORDING,
    "check_dtype_object": "object arrays are refused: their conversion would hide text and None",
    "check_fit1d": "shape (n,) is one column, here as in open_sample",
}


def checks():
    estimator = PivotedCholesky(tol=1e-2, max_rank=20)
    for each, check in estimator_checks_generator(estimator):
        if getattr(check, "func", check).__name__ == "check_array_api_input":
            continue  # it needs SciPy's array API, switched on before SciPy is imported
        yield pytest.param(each, check, id=getattr(check, "func", check).__name__)


@pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_checks_of_scikit_learn(estimator, check):
    name = getattr(check, "func", check).__name__
    if name in EXPECTED_FAILURES:
        with pytest.raises((AssertionError, ValueError)):
            check(estimator)
    else:
        check(estimator)


# JointDistribution ---------------------------------------------------------------------------


def sine(rng, n):
    x = rng.normal(size=(n, 1))
    return x, np.sin(x) + 0.3 * rng.normal(size=(n, 1))


def positive(y):
    return (y[:, 0] > 0).astype(float)


def test_no_arguments_give_a_good_model(rng):
    x, y = sine(rng, 20_000)
    law = JointDistribution().fit(x, y, functions={"positive": positive})
    assert law.n_passes_ == 1 + (law.model_.about["residual"]["decided"] == "all rows")
    points = np.linspace(-2, 2, 41)
    assert np.abs(law.expect("y0", points) - np.sin(points)).max() < 0.1
    from scipy.stats import norm

    truth = norm.cdf(np.sin(points) / 0.3)
    assert np.abs(law.expect("positive", points) - truth).max() < 0.1


def test_repr_before_and_after_the_fit(rng):
    law = JointDistribution(kernel_x=GAUSSIAN, kernel_y=GAUSSIAN, tol=1e-2)
    assert "JointDistribution" in repr(law)
    assert "JointDistribution" in law._repr_html_()
    x, y = sine(rng, 300)
    names = ["<script>alert(1)</script>"]
    law.fit(pd.DataFrame(x, columns=names), y)
    assert "kernel_x=Gaussian(length_scale=1.0)" in repr(law)
    html = law._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    text = repr(law.model_)
    for part in ("rank", "trace error", "300 in 1 pass, 10 folds", "normalized", "E[. | x]"):
        assert part in text


@pytest.fixture(scope="module")
def folded():
    """A weighted fit with folds, its rows, and its Newton features."""
    rng = np.random.default_rng(8)
    x, y = sine(rng, 5000)
    y = np.hstack([y, 5.0 + x * y])
    w = rng.exponential(size=5000)
    functions, functions_x = {"positive": positive}, {"square": lambda x: x[:, 0] ** 2}
    pivots = (np.linspace(-2, 2, 9), rng.normal((0, 5), 1, size=(12, 2)))
    return x, y, w, pivots, {"functions": functions, "functions_x": functions_x}


def joint(constraint, pivots, reg=1e-4, **changes):
    return JointDistribution(
        kernel_x=kernels.Matern(1.0, 2.5),
        kernel_y=kernels.Matern(2.0, 2.5),
        constraint=constraint,
        pivots=pivots,
        reg=reg,
        **changes,
    )


def brute(constraint, folded, n_folds):
    """One refit for each fold without its rows."""
    x, y, w, pivots, functions = folded
    folds = fold_of_rows(0, len(x), n_folds)
    for fold in range(n_folds):
        rest = folds != fold
        fit = joint(constraint, pivots, n_folds=1).fit(
            x[rest], y[rest], weights=w[rest], **functions
        )
        yield folds == fold, fit


@pytest.mark.parametrize("constraint", ["none", "normalized"])
def test_standard_errors_equal_refits_without_each_fold(constraint, folded):
    x, y, w, pivots, functions = folded
    law = joint(constraint, pivots, n_folds=4).fit(x, y, weights=w, **functions)
    refits = [fit for _, fit in brute(constraint, folded, 4)]
    for names, points in (
        (["y0", "y1", "positive"], {"X": np.linspace(-3, 3, 9)}),
        (["x0", "square"], {"Y": y[:9]}),
    ):
        values, std = law.expect(names, **points, return_std=True)
        each = np.stack([fit.expect(names, **points) for fit in refits])
        expected = np.sqrt(3 / 4 * ((each - each.mean(axis=0)) ** 2).sum(axis=0))
        np.testing.assert_allclose(std, expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(values, law.expect(names, **points), rtol=1e-14)
        assert (std > 0).all()


@pytest.mark.parametrize("constraint", ["none", "normalized"])
def test_held_out_errors_equal_refits_and_their_rows(constraint, folded):
    x, y, w, pivots, functions = folded
    law = joint(constraint, pivots, n_folds=4).fit(x, y, weights=w, **functions)
    targets = (np.column_stack([y, positive(y)]), np.column_stack([x, x[:, 0] ** 2]))
    names = (["y0", "y1", "positive"], ["x0", "square"])
    error, baseline, total = [0.0, 0.0], [0.0, 0.0], w.sum()
    for held, fit in brute(constraint, folded, 4):
        share = w[held] / total
        rest = w[~held] / w[~held].sum()
        for given, points in ((0, {"X": x[held]}), (1, {"Y": y[held]})):
            f = targets[given]
            error[given] += share @ (fit.expect(names[given], **points) - f[held]) ** 2
            baseline[given] += share @ (rest @ f[~held] - f[held]) ** 2
    for given in (0, 1):
        found = law.replicates_[given]
        np.testing.assert_allclose(found.error, error[given], rtol=1e-9)
        np.testing.assert_allclose(found.baseline, baseline[given], rtol=1e-9)
        np.testing.assert_allclose(found.skill, 1 - error[given] / baseline[given], atol=1e-9)
    about = law.model_.about["held_out"]["x"]["positive"]
    assert about["error"] == pytest.approx(error[0][2], rel=1e-9)


@pytest.mark.parametrize("constraint", ["none", "normalized"])
def test_the_other_direction_is_the_swapped_fit(constraint, folded):
    x, y, w, pivots, functions = folded
    law = joint(constraint, pivots, reg=(1e-3, 1e-5)).fit(x, y, weights=w, **functions)
    swapped = joint(constraint, pivots[::-1], reg=(1e-5, 1e-3))
    swapped.set_params(kernel_x=law.kernel_y, kernel_y=law.kernel_x)
    swapped.fit(
        y, x, weights=w, functions=functions["functions_x"], functions_x=functions["functions"]
    )
    values, std = law.expect(["x0", "square"], Y=y[:50], return_std=True)
    # The swapped fit calls what was x now y.
    other, other_std = swapped.expect(["y0", "square"], X=y[:50], return_std=True)
    np.testing.assert_allclose(values, other, atol=1e-9)
    np.testing.assert_allclose(std, other_std, atol=1e-9)
    g = law.density_ratio(x[:20], y[:30])
    np.testing.assert_allclose(swapped.density_ratio(y[:30], x[:20]).T, g, atol=1e-9)


def test_tables_with_permuted_columns(rng):
    x = pd.DataFrame(rng.normal(size=(300, 3)), columns=["a", "b", "c"])
    y = x["a"] + 0.1 * rng.normal(size=300)
    law = JointDistribution(
        kernel_x=kernels.Gaussian((1.0, 3.0, 9.0)), kernel_y=GAUSSIAN, tol=1e-2
    ).fit(x, y.rename("sum"))
    expected = law.expect("sum", x.to_numpy()[:9])
    np.testing.assert_array_equal(law.expect("sum", x[:9]), expected)
    np.testing.assert_array_equal(law.expect("sum", x[["c", "a", "b"]][:9]), expected)
    table = x.assign(sum=y)[["sum", "c", "b", "a"]]
    sample = open_sample(table, x_columns=["a", "b", "c"], y_columns=["sum"])
    shuffled = clone(law).fit(sample)
    np.testing.assert_array_equal(shuffled.expect("sum", x[:9]), expected)


def test_xarray_dataset(rng):
    x, y = rng.normal(size=(2, 300))
    data = xr.Dataset({"wind": ("t", x), "power": ("t", x + y), "w": ("t", np.abs(y))})
    for source in (data, data.chunk(t=77)):
        sample = open_sample(source, x_columns=["wind"], y_columns=["power"], weights="w")
        law = JointDistribution(kernel_x=GAUSSIAN, kernel_y=GAUSSIAN, tol=1e-2).fit(sample)
        plain = JointDistribution(kernel_x=GAUSSIAN, kernel_y=GAUSSIAN, tol=1e-2)
        plain.fit(x, x + y, weights=np.abs(y))
        np.testing.assert_array_equal(law.expect("power", [0.5]), plain.expect("y0", [0.5]))


def test_memory_of_a_query_does_not_grow_with_the_points(rng, tmp_path, monkeypatch):
    monkeypatch.setattr("cme_dask.kernels.evaluator.blas_threads", lambda: 1)  # each holds a block
    x, y = sine(rng, 2000)
    law = JointDistribution(kernel_x=kernels.Laplace(0.5), kernel_y=GAUSSIAN, tol=1e-2).fit(x, y)
    law.save(tmp_path / "m")
    model = load(tmp_path / "m")
    assert model.x.basis.newton.rank > 30

    def peak(n):
        points = np.linspace(-2, 2, n)[:, None]
        model.expect("y0", points[:1], return_std=True)
        tracemalloc.start()
        model.expect("y0", points, return_std=True)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    # 16 bytes of answer a point, and the check for NaN; a row of features would be 240 or more.
    assert peak(48_000) - peak(16_000) < 32_000 * 64


def test_one_block_and_many_agree(rng, monkeypatch):
    x, y = sine(rng, 500)
    pair = {"kernel_x": GAUSSIAN, "kernel_y": GAUSSIAN, "tol": 1e-2}
    law, embedded = JointDistribution(**pair).fit(x, y), ConditionalMeanEmbedding(**pair).fit(x, y)
    logistic = KernelLogisticRegression(GAUSSIAN, tol=1e-2).fit(x, y[:, 0] > 0)

    def answers():
        values = law.expect("y0", x, return_std=True)
        ratio, means = law.density_ratio(x, y[:7]), embedded.model_.embedding(x, y[:7])
        return *values, ratio, means, logistic.predict_proba(x)

    whole = answers()
    monkeypatch.setattr("cme_dask.kernels.evaluator.QUERY_ROWS", 33)
    monkeypatch.setattr("cme_dask.kernels.evaluator.blas_threads", lambda: 3)
    for part, other in zip(answers(), whole, strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-9, atol=1e-10)


def test_tables_with_integer_labels(rng, brief_search):
    x, y = sine(rng, 500)
    table = pd.DataFrame(np.column_stack([x, y]))
    sample = open_sample(table, x_columns=[0], y_columns=["1"])
    assert [columns.names for columns in sample.columns] == [("0",), ("1",)]
    fit = JointDistribution(tol=1e-2).fit(sample)
    ours = fit.expect("1", table[[0]].head())
    np.testing.assert_array_equal(ours, fit.expect("1", x[:5]))


def test_notebooks_show_the_fitted_model(rng, brief_search):
    model = JointDistribution(tol=1e-2)
    assert "JointModel" not in model._repr_mimebundle_()["text/html"]
    model.fit(*sine(rng, 500))
    assert "JointModel" in model._repr_mimebundle_()["text/html"]


def test_unfitted_estimators_raise_scikit_learns_error_too():
    unfitted = PivotedCholesky()
    for call in (lambda: JointDistribution().expect("y0", [[0.0]]), lambda: unfitted.pivots_):
        with pytest.raises(NotFittedError):
            call()
        with pytest.raises(sklearn.exceptions.NotFittedError):
            call()
