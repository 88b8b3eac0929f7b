"""Missing values: rows that are left out, with counts, and what the model says of them."""

import json

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import zarr
from click.testing import CliRunner
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.impute import SimpleImputer

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    MulticlassEmbedding,
    Tuning,
    ingest,
    kernels,
    load,
    merge,
    open_sample,
    score,
)
from cme_dask.cli import cli
from cme_dask.data.batches import BatchReader
from cme_dask.data.columns import Columns
from cme_dask.data.missing import learned, marked, weighted_median
from cme_dask.errors import ConstantColumnWarning, DataError, StoreError
from cme_dask.numerics.folds import RowSample, uniform
from cme_dask.passes import run as passes

N = 3000
POINTS = np.array([[0.0, 0.0], [1.0, -0.5], [-1.0, 2.0]])
GIVEN = {"kernel_x": kernels.Gaussian(1.0), "kernel_y": kernels.Gaussian(1.0), "tol": 1e-3}


@pytest.fixture(scope="module")
def table():
    """Rows with missing values in x and y, and which rows lack none."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 2))
    y = np.sin(x[:, :1]) + 0.3 * rng.normal(size=(N, 1))
    x[::7, 0] = np.nan
    x[3::50, 1] = np.nan
    y[5::11] = np.nan
    return x, y, np.isfinite(x).all(axis=1) & np.isfinite(y).all(axis=1)


@pytest.fixture(scope="module")
def pivots():
    grid = np.linspace(-2.0, 2.0, 4)
    return np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2), np.linspace(-1.5, 1.5, 5)


def counts(x, y):
    return {"x0": np.isnan(x[:, 0]).sum(), "x1": np.isnan(x[:, 1]).sum(), "y0": np.isnan(y).sum()}


def storages(x, y, folder):
    """The same rows in every kind of place, and how many passes a fit makes there."""
    group = zarr.open_group(str(folder / "arrays.zarr"), mode="w")
    for name, values, chunk in (("x", x, 700), ("y", y, 1100)):
        array = group.create_array(
            name, shape=values.shape, chunks=(chunk, values.shape[1]), dtype="f8", fill_value=np.nan
        )
        array[:] = values
    lazy = da.from_array(x, chunks=(850, 1)), da.from_array(y, chunks=(2000, 1))
    return {
        "memory": ((x, y), 1),
        "frames": ((pd.DataFrame(x, columns=["x0", "x1"]), pd.Series(y[:, 0])), 1),
        "masked": ((np.ma.masked_invalid(x), np.ma.masked_invalid(y)), 1),
        "dask": (lazy, 2),
        "zarr": ((group["x"], group["y"]), 2),
    }


def test_the_model_is_that_of_the_rows_that_lack_no_value(table, pivots):
    x, y, whole = table
    options = {**GIVEN, "pivots": pivots, "n_folds": 1}
    fit = JointDistribution(**options, missing="drop").fit(x, y)
    oracle = JointDistribution(**options).fit(x[whole], y[whole])
    assert_allclose(fit.coef_, oracle.coef_, rtol=1e-8, atol=1e-10)
    assert_allclose(fit.expect(None, POINTS), oracle.expect(None, POINTS), rtol=1e-10)
    about = fit.model_.about
    assert about["rows"] == fit.report_.rows == whole.sum()
    assert about["missing"] == {
        "policy": "drop",
        "rows": N - whole.sum(),
        "columns": counts(x, y),
        "filled": {},
    }
    assert f"{N - whole.sum():,} rows left out; values by column: x0 429" in repr(fit.model_)
    assert "missing" not in oracle.model_.about


def test_rows_keep_their_folds(table, pivots):
    """Fold by fold the moments are those of the rows without missing values."""
    x, y, whole = table
    group = np.arange(N) // 40
    options = {**GIVEN, "pivots": pivots, "n_folds": 4}
    sample = open_sample(x, y, group=group).fold_by("group")
    fit = JointDistribution(**options, missing="drop").fit(sample)
    oracle = JointDistribution(**options).fit(
        open_sample(x[whole], y[whole], group=group[whole]).fold_by("group")
    )
    assert fit.moments_.rows.tolist() == oracle.moments_.rows.tolist()
    for fold in range(4):
        mine, theirs = (f.moments_.means(without=fold).blocks["x", "y"] for f in (fit, oracle))
        assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def test_with_the_missing_rows_last_the_bits_are_the_same(table):
    """Then the rows have the same numbers, and with them the same row sample and folds."""
    x, y, whole = table
    order = np.argsort(~whole, kind="stable")
    x, y, n = x[order], y[order], int(whole.sum())
    fit = JointDistribution(**GIVEN, missing="drop").fit(x, y)
    oracle = JointDistribution(**GIVEN).fit(x[:n], y[:n])
    assert_array_equal(fit.moments_.gram, oracle.moments_.gram)
    assert_array_equal(fit.basis_x_.pivots, oracle.basis_x_.pivots)
    assert_array_equal(fit.conditional(POINTS).cdf(0.3), oracle.conditional(POINTS).cdf(0.3))


@pytest.mark.parametrize("pivoting", ["sampled", "greedy"])
def test_any_storage_gives_the_same_bits_and_no_further_pass(table, tmp_path, pivoting):
    x, y, _ = table
    options = {**GIVEN, "pivots": pivoting, "tol": 0.2, "sample_size": 2000, "span": 0.3}
    results = {}
    for name, (rows, expected) in storages(x, y, tmp_path).items():
        fit = JointDistribution(**options, missing="drop").fit(*rows)
        if pivoting == "sampled":
            assert fit.n_passes_ == expected
        results[name] = fit
    first = results.pop("memory")
    for name, fit in results.items():
        assert_array_equal(fit.moments_.gram, first.moments_.gram, err_msg=name)
        assert fit.report_.missing == first.report_.missing


def test_each_pass_leaves_the_rows_out(table, monkeypatch):
    """Rounds of pivots, moments, the second pass of residuals: all count the same rows."""
    x, y, whole = table
    rows = []
    reduce_strips = passes.reduce_strips

    def counted(reductions, strips, place=None):
        result = reduce_strips(reductions, strips, place)
        if reductions[0].name != "row-sample":
            rows.append(result[0])
        return result

    monkeypatch.setattr(passes, "reduce_strips", counted)
    options = {**GIVEN, "pivots": ("greedy", "sampled"), "tol": 0.3, "missing": "drop"}
    fit = JointDistribution(**options, residual=True).fit(x, y, scheduler="synchronous")
    assert fit.n_passes_ > 4
    assert sum(rows) == fit.n_passes_ * whole.sum()


def test_weights_groups_and_times_may_be_missing_too(table):
    x, y, whole = table
    weights, time = np.linspace(1.0, 2.0, N), np.arange(N) * 60.0
    weights[2], time[4] = np.nan, np.nan
    sample = open_sample(x, y, weights=weights, time=time).fold_by("1h")
    fit = JointDistribution(**GIVEN, missing="drop").fit(sample)
    assert fit.report_.rows == (whole & np.isfinite(weights) & np.isfinite(time)).sum()
    assert fit.report_.missing.columns == {**counts(x, y), "weights": 1, "time": 1}


def test_parts_of_a_split_leave_out_their_own(table, pivots):
    x, y, whole = table
    parts = open_sample(x, y).drop_missing().split(0.3)
    sizes = []
    for part in parts:
        fit = JointDistribution(**GIVEN, pivots=pivots).fit(part)
        sizes.append((fit.report_.rows, fit.report_.missing.dropped))
    assert np.sum(sizes, axis=0).tolist() == [whole.sum(), N - whole.sum()]
    table = score(fit, parts[0])
    assert table.rows == sizes[0][0]


def test_scores_are_those_of_the_rows_that_lack_no_value(table, pivots, tmp_path):
    x, y, whole = (values[:1500] for values in table)
    fit = JointDistribution(**GIVEN, pivots=pivots, missing="drop").fit(x, y)
    (result, oracle) = score(fit, x, y), score(fit, x[whole], y[whole])
    assert result.rows == oracle.rows == whole.sum()
    assert_allclose(result.crps.value, oracle.crps.value, rtol=1e-12)
    lazy = score(fit, da.from_array(x, chunks=(500, 2)), da.from_array(y, chunks=(500, 1)))
    assert lazy.crps.value == result.crps.value
    conformal = fit.model_.conformalized(x, y).about["conformal"]
    assert conformal == fit.model_.conformalized(x[whole], y[whole]).about["conformal"]
    fit.save(tmp_path / "m")
    assert load(tmp_path / "m").about["missing"] == fit.model_.about["missing"]


def test_rows_that_are_added_and_merged(table, pivots):
    x, y, whole = table
    half = N // 2
    options = {**GIVEN, "pivots": pivots, "n_folds": 4}
    whole_fit = JointDistribution(**options, missing="drop").fit(x, y)
    grown = JointDistribution(**options, missing="drop").partial_fit(x[:half], y[:half])
    first = grown.model_
    other = JointDistribution(**options, missing="drop").partial_fit(
        x[half:], y[half:], like=first, first_row=half
    )
    grown.partial_fit(x[half:], y[half:])
    union = merge([first, other.model_])
    for model in (grown.model_, union):
        assert model.about["missing"] == whole_fit.model_.about["missing"]
        assert model.about["rows"] == whole.sum()
        assert_allclose(model.expect(None, POINTS), whole_fit.expect(None, POINTS), rtol=1e-8)
        rows = model.moment_sums().rows
        assert rows.tolist() == whole_fit.moments_.rows.tolist()  # numbers go on after dropped rows
    embedding = {**options, "reg": 1e-3}
    fit = ConditionalMeanEmbedding(**embedding, missing="drop").fit(x, y)
    more = ConditionalMeanEmbedding(**embedding, missing="drop").partial_fit(x[:half], y[:half])
    more.partial_fit(x[half:], y[half:])
    assert more.model_.about["missing"] == fit.model_.about["missing"]
    assert more.moments_.rows.tolist() == fit.moments_.rows.tolist()


@pytest.mark.parametrize("kind", [JointClassifier, EmbeddingClassifier])
def test_labels_may_be_missing(table, pivots, kind):
    x, y, _ = table
    label = np.where(np.nan_to_num(y[:, 0]) > 0.0, "up", "down").astype(object)
    label[np.isnan(y[:, 0])] = None
    whole = np.isfinite(x).all(axis=1) & np.isfinite(y[:, 0])
    options = {"kernel_x": kernels.Gaussian(1.0), "tol": 1e-3, "n_folds": 1, "reg": 1e-3}
    options |= {"kernel_y": kernels.Delta()}
    options |= {"pivots": (pivots[0], np.arange(2.0))}
    fit = kind(**options, missing="drop").fit(x, label)
    oracle = kind(**options).fit(x[whole], label[whole])
    assert fit.classes_.tolist() == ["down", "up"]
    assert_allclose(fit.predict_proba(POINTS), oracle.predict_proba(POINTS), rtol=1e-9)
    assert fit.model_.about["missing"]["columns"]["y"] == np.isnan(y).sum()
    with pytest.raises(DataError, match="must hold labels, but 273"):
        kind(**options).fit(x, label)
    if kind is EmbeddingClassifier:
        result = score(fit, x, label)
        assert result.rows == whole.sum()


def test_plan_and_batches(table):
    x, y, whole = table
    plan = JointDistribution(**GIVEN, missing="drop").plan(x, y)
    fit = JointDistribution(**GIVEN, missing="drop").fit(x, y)
    assert plan.ranks == (fit.basis_x_.rank, fit.basis_y_.rank)
    sample = open_sample(x, y).drop_missing()
    every = list(sample.batches(500, seed=1))
    assert sorted(np.concatenate([b.index for b in every])) == np.flatnonzero(whole).tolist()
    assert {len(b) for b in every[:-1]} == {500}
    (later,) = list(sample.batches(500, seed=1, start=len(every) - 1))
    assert_array_equal(later.index, every[-1].index)
    assert BatchReader.of(sample).dropping


def test_bad_input(table):
    x, y, _ = table
    message = r"'x0' has 429 \(first at row 0\); column 'x1' has 60 .*'y0' has 273 .*missing='drop'"
    with pytest.raises(DataError, match=message):
        JointDistribution(**GIVEN).fit(x, y)
    with pytest.raises(DataError, match="missing must be one of error, drop"):
        JointDistribution(missing="ignore").fit(x, y)
    infinite = y.copy()
    infinite[1] = np.inf
    with pytest.raises(DataError, match=r"column 'y0' has 1 \(first at row 1\) infinite"):
        JointDistribution(**GIVEN, missing="drop").fit(x, infinite)
    fit = JointDistribution(**GIVEN, missing="drop").fit(x, y)
    for points in ([[np.nan, 0.0]], {"x0": [None], "x1": [0.0]}):
        with pytest.raises(DataError, match=r"column 'x0' has 1 \(first at row 0\)"):
            fit.predict(points)
    lazy = fit.predict(da.from_array(x, chunks=(500, 2)))
    with pytest.raises(DataError, match="column 'x0' has 71"):
        lazy.compute(scheduler="synchronous")
    empty = np.column_stack([x[:, 0], np.full(N, np.nan)])
    with pytest.raises(DataError, match=r"all 3,000 rows that were read lack a value .*'x1' 3,000"):
        JointDistribution(**GIVEN, missing="drop").fit(empty, y)
    with pytest.raises(DataError, match="takes all rows, this sample leaves out"):
        fit.predict(open_sample(x).drop_missing())


# Files, stores and commands

CSV = """a,wd,b,hour,w
1.0,N,0.5,1,1
,N,0.7,2,1
2.0,,0.1,,1
0.5,S,,4,1
0.1,S,0.2,5,
1.5,N,0.9,6,2
"""


@pytest.fixture
def files(tmp_path):
    rows = [line for _ in range(40) for line in CSV.splitlines()[1:]]
    noise = np.random.default_rng(0).normal(size=len(rows))
    lines = []
    for line, e in zip(rows, noise, strict=True):
        a, wd, b, hour, w = line.split(",")
        a, b = (value and f"{float(value) + e:.6f}" for value in (a, b))
        lines.append(",".join([a, wd, b, hour, w]))
    (tmp_path / "t.csv").write_text("\n".join([CSV.splitlines()[0], *lines]) + "\n")
    frame = pd.read_csv(tmp_path / "t.csv")
    frame.to_parquet(tmp_path / "t.parquet")
    return tmp_path, frame


def test_ingest_keeps_missing_values(files):
    folder, frame = files
    options = {"x": ["a", "wd", "hour"], "y": ["b"], "categorical": ["wd"], "cyclic": {"hour": 24}}
    options |= {"weights": "w", "missing": "keep", "chunk_rows": 32}
    stores = []
    for kind in ("csv", "parquet"):
        report = ingest([folder / f"t.{kind}"], folder / kind, **options)
        assert (report.rows_read, report.rows_kept) == (240, 200)  # 40 rows lack their weight
        assert report.missing == {"a": 40, "wd": 40, "hour": 40, "b": 40, "w": 40}
        stores.append(open_sample(folder / kind))
    kept = frame[frame["w"].notna()]
    for sample in stores:
        x, y = (source.read(0, 200) for source in sample.sources)
        assert_array_equal(x[:, 0], kept["a"].to_numpy())
        assert_array_equal(x[:, 1], kept["wd"].map({"N": 0.0, "S": 1.0}).to_numpy())
        assert_array_equal(np.isnan(x[:, 2]), kept["hour"].isna().to_numpy())
        assert_array_equal(y[:, 0], kept["b"].to_numpy())
    a = report.statistics["x"]["a"]
    assert a["count"] == kept["a"].count()
    assert_allclose([a["mean"], a["min"], a["max"]], kept["a"].agg(["mean", "min", "max"]))
    assert_allclose(a["std"], kept["a"].std(ddof=0))
    assert report.statistics["x"]["wd"]["counts"] == [120, 40]
    options |= {"cyclic": {}, "x": ["a", "wd"], "weights": "weights"}
    ingest([folder / "parquet"], folder / "again", **options)
    again = open_sample(folder / "again").sources[0].read(0, 200)
    assert_array_equal(again, stores[1].sources[0].read(0, 200)[:, :2])


def invoke(*arguments):
    result = CliRunner().invoke(cli, [str(each) for each in arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_commands(files):
    folder, frame = files
    store, model = folder / "s.zarr", folder / "m.zarr"
    columns = ["--x", "a,wd", "--y", "b", "--categorical", "wd"]
    code, _ = invoke("ingest", folder / "t.csv", "--out", store, *columns, "--missing", "keep")
    assert code == 0
    fit = "fit", store, "--out", model, "--kernel", "median", "--max-rank", 8, "--overwrite"
    code, text = invoke(*fit)
    assert code == 2
    assert "column 'wd' has 40 (first at row 2)" in text
    assert "--missing drop" in text
    whole = frame[["a", "wd", "b"]].notna().all(axis=1).sum()
    code, text = invoke(*fit, "--missing", "drop", "--hold-out", 0.25)
    assert code == 0
    assert "rows left out; values by column: a " in text
    code, text = invoke("info", model)
    assert "rows left out; values by column: a " in text
    fitted = load(model).about
    code, text = invoke("score", model, store, "--json")
    rows = fitted["rows"], int(text.split('"rows": ')[1].split(",")[0])
    assert sum(rows) == whole
    code, text = invoke(*fit, "--missing", "drop", "--dry-run")
    assert code == 0
    code, text = invoke("predict", model, store, "--out", folder / "answers")
    assert code == 2
    assert "column 'a' has 40" in text


# Missing values of x that are filled in


@pytest.fixture(scope="module")
def frame():
    """Columns of numbers and of labels with missing values, and the same filled in by hand."""
    rng = np.random.default_rng(1)
    x = pd.DataFrame({"a": rng.normal(size=N), "b": rng.normal(size=N)})
    x["wd"] = rng.choice(["N", "S", "E"], N)
    y = pd.Series(np.sin(x["a"]) + (x["wd"] == "N") + 0.3 * rng.normal(size=N), name="t")
    x.loc[rng.random(N) < 0.2, "a"] = np.nan
    x.loc[rng.random(N) < 0.1, "wd"] = None
    y[rng.random(N) < 0.1] = np.nan
    numbers = SimpleImputer(strategy="median", add_indicator=True).fit_transform(x[["a", "b"]])
    filled = pd.DataFrame(numbers[:, :2], columns=["a", "b"])
    labels = pd.CategoricalDtype(["N", "S", "E", "missing"])
    filled["wd"] = x["wd"].where(x["wd"].notna(), "missing").astype(labels)
    said = np.where(numbers[:, 2] == 1.0, "missing", "present")
    labels = pd.CategoricalDtype(["present", "missing"])
    filled["missingindicator_a"] = pd.Categorical(said, dtype=labels)
    labels = pd.CategoricalDtype(["N", "S", "E"])
    return x.assign(wd=x["wd"].astype(labels)), y, filled


KERNEL = kernels.Gaussian(1.0)[0, 1] * kernels.Categorical(1.0)[2]
FILLED = {"kernel_y": kernels.Gaussian(1.0), "tol": 1e-2, "sample_size": 1000}
QUESTIONS = {
    "a": [0.5, np.nan, -1.0, np.nan],
    "b": [0.0, 0.3, 0.1, -2.0],
    "wd": [*"NS", None, None],
}


@pytest.fixture(scope="module")
def imputing(frame):
    x, y, _ = frame
    return JointDistribution(kernel_x=KERNEL, **FILLED, missing="impute").fit(x, y)


def test_the_model_is_that_of_the_rows_filled_in(frame, imputing):
    """The median is that of the row sample, which holds a third of the rows here."""
    x, y, filled = frame
    (place, mark, value), (_, _, code) = imputing.columns_x.filled
    assert (place, mark, value, code) == (0, 3, 1.0, 3.0)
    median = imputing.columns_x.imputation.fills["a"]
    order = np.argsort(uniform(0, np.arange(N)))[:1000]
    assert median == x["a"].iloc[order][y.iloc[order].notna()].median()
    kernel = KERNEL[0, 1, 2] * kernels.Categorical(1.0)[3]
    by_hand = filled.assign(a=x["a"].fillna(median))
    oracle = JointDistribution(kernel_x=kernel, **FILLED, missing="drop").fit(by_hand, y)
    assert_array_equal(imputing.moments_.gram, oracle.moments_.gram)
    assert_array_equal(imputing.coef_, oracle.coef_)
    assert imputing.n_passes_ == oracle.n_passes_
    about = imputing.model_.about["missing"]
    assert about == {
        "policy": "impute",
        "rows": y.isna().sum(),
        "columns": {"a": x["a"].isna().sum(), "wd": x["wd"].isna().sum(), "t": y.isna().sum()},
        "filled": {"a": median, "wd": "missing"},
    }
    assert f"a {about['columns']['a']:,} (filled in: {median:.6g})" in repr(imputing.model_)
    assert imputing.n_features_in_ == 3
    assert imputing.feature_names_in_.tolist() == ["a", "b", "wd"]


def test_a_complete_row_sample_gives_the_medians_of_all_rows(frame):
    x, y, filled = frame
    options = {"kernel_x": "median", "kernel_y": "median", "tol": 0.1, "missing": "impute"}
    fit = ConditionalMeanEmbedding(**options).fit(x, y.fillna(0.0))
    assert fit.columns_x.imputation.fills["a"] == filled["a"][x["a"].isna()].iloc[0]
    oracle = ConditionalMeanEmbedding(**options | {"missing": "error"}).fit(filled, y.fillna(0.0))
    assert_array_equal(fit.moments_.gram, oracle.moments_.gram)
    points = pd.DataFrame(QUESTIONS)
    by_hand = pd.DataFrame(
        {**QUESTIONS, "a": points["a"].fillna(fit.columns_x.imputation.fills["a"])}
    )
    by_hand["wd"] = points["wd"].fillna("missing")
    by_hand["missingindicator_a"] = np.where(points["a"].isna(), "missing", "present")
    assert_array_equal(fit.predict(points), oracle.predict(by_hand))


def test_weighted_medians():
    rng = np.random.default_rng(0)
    for n in (1, 2, 7, 8):
        values = rng.integers(0, 5, n).astype(float)
        weights = rng.integers(1, 4, n)
        expected = np.median(np.repeat(values, weights))
        assert weighted_median(values, weights.astype(float)) == expected


@pytest.mark.parametrize("where", ["zarr", "dask", "dask frame"])
def test_rows_of_any_storage_are_filled_in_alike(frame, tmp_path, where):
    x, y, _ = frame
    codes = x.assign(wd=x["wd"].cat.codes.where(x["wd"].notna())).to_numpy(dtype=float)
    kernel = {"kernel_x": kernels.Gaussian(1.0), "missing": "impute", "tol": 0.05}
    options = {**FILLED, **kernel, "tol": 0.1}
    numbers, rows = codes[:, :2], y.to_numpy()[:, None]
    first = JointDistribution(**options).fit(numbers, rows)
    if where == "dask frame":
        parts = dd.from_pandas(x[["a", "b"]], npartitions=3), dd.from_pandas(y, npartitions=4)
    else:
        parts = storages(numbers, rows, tmp_path)[where][0]
    fit = JointDistribution(**options).fit(*parts)
    assert_array_equal(fit.moments_.gram, first.moments_.gram)
    assert fit.n_passes_ == first.n_passes_ + 1  # that of the row sample
    points = numbers[:50]
    lazy = fit.conditional(da.from_array(points, chunks=(20, 2))).mean().compute()
    assert_allclose(lazy, first.conditional(points).mean(), rtol=1e-12)


def test_a_given_kernel_has_the_length_scales_of_the_given_columns(frame):
    x, y, _ = frame
    numbers = x[["a", "b"]]
    fits = [
        JointDistribution(
            kernel_x=kernels.Gaussian(scales), **FILLED | {"tol": 0.1}, missing="impute"
        ).fit(numbers, y)
        for scales in (1.0, (1.0, 1.0))
    ]
    assert_allclose(*(fit.conditional(numbers[:9]).mean() for fit in fits), rtol=1e-10)


def test_points_may_lack_values(imputing, tmp_path):
    points = pd.DataFrame(QUESTIONS)
    expected = imputing.predict(points)
    assert np.ptp(expected) > 0.1
    columns = imputing.columns_x
    fill = columns.imputation.fills["a"]
    codes = np.array([[0.5, 0, 0, 0], [fill, 0.3, 1, 1], [-1, 0.1, 3, 0], [fill, -2, 3, 1]])
    given = np.array([[0.5, 0, 0], [np.nan, 0.3, 1], [-1, 0.1, np.nan], [np.nan, -2, np.nan]])
    masked = np.ma.masked_invalid(given)
    for alike in (QUESTIONS, codes, given, given.tolist(), masked, pa.table(points)):
        assert_array_equal(imputing.predict(alike), expected)
    imputing.save(tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.x.columns == columns
    assert_array_equal(np.ravel(loaded.conditional(points).mean()), expected)
    attributes = zarr.open_group(str(tmp_path / "m")).attrs["cme_dask"]
    assert attributes["schema_version"] == 2
    for rows in (da.from_array(given, chunks=(3, 3)), open_sample(given)):
        assert_allclose(imputing.predict(rows).compute(), expected, rtol=1e-10)
    law = loaded.conditional(Y=[[1.0]])
    assert 0.05 < law.probability("missingindicator_a == 'missing'")[0] < 0.4
    with pytest.raises(DataError, match=r"in 'a', 'wd', but column 'b' lacks 1 \(first at row 2\)"):
        imputing.predict(points.assign(b=[0.0, 1.0, np.nan, 0.0]))
    bad = imputing.predict(da.from_array(given * [[1.0, np.nan, 1.0]], chunks=(4, 3)))
    with pytest.raises(DataError, match=r"column 'b' lacks 4 \(first at row 0\)"):
        bad.compute(scheduler="synchronous")
    with pytest.raises(DataError, match=r"column 'a' has 1 .* infinite"):
        imputing.predict(points.assign(a=[np.inf, 1.0, np.nan, 0.0]))


def test_rows_that_are_left_out_already_stay_left_out(frame, imputing):
    x, y, _ = frame
    whole = x.notna().all(axis=1) & y.notna()
    sample = open_sample(x, y).drop_missing()
    assert score(imputing, sample).rows == whole.sum()
    fit = JointDistribution(kernel_x=KERNEL, **FILLED, missing="impute").fit(sample)
    assert fit.columns_x.imputation is None
    assert fit.report_.rows == whole.sum()


def test_infinite_values_of_rows_that_are_left_out_and_filled_in_are_named(frame, imputing):
    x, y, _ = frame
    whole = np.flatnonzero(x.notna().all(axis=1) & y.notna())
    bad = y.copy()
    bad.iloc[whole[3]] = np.inf
    sample = open_sample(x, bad).drop_missing()
    says = rf"has 1 \(first at row {whole[3]}\)"
    with pytest.raises(DataError, match=says):
        JointDistribution(kernel_x=KERNEL, **FILLED, missing="impute").fit(sample)
    with pytest.raises(DataError, match=says):
        score(imputing, sample)


def test_learned_kernels_and_scores_take_rows_filled_in(frame):
    x, y, _ = frame
    few = Tuning(rows=200, evaluations=1, trees=())
    x, y = x[:1500], y[:1500]
    fit = JointDistribution(missing="impute", tuning=few, max_rank=50, support_size=100).fit(x, y)
    result = score(fit, x, y)
    assert result.rows == y.notna().sum()
    assert result.r2["t"].value > 0.4
    assert np.isfinite(fit.model_.conformalized(x, y).about["conformal"]["rows"])


def test_rows_that_are_added_are_filled_in_alike(frame, imputing):
    x, y, _ = frame
    half = N // 2
    options = {"kernel_x": KERNEL, **FILLED, "missing": "impute"}
    grown = JointDistribution(**options).partial_fit(x[:half], y[:half])
    first = grown.model_
    other = JointDistribution(**options).partial_fit(x[half:], y[half:], like=first, first_row=half)
    grown.partial_fit(x[half:], y[half:])
    total = imputing.model_.about["missing"]
    for model in (grown.model_, merge([first, other.model_])):
        assert model.about["missing"] == {**total, "filled": first.about["missing"]["filled"]}
        assert model.x.columns.imputation == first.x.columns.imputation
    assert grown.n_features_in_ == other.n_features_in_ == 3
    separate = JointDistribution(**options).fit(x[half:], y[half:])
    with pytest.raises(DataError, match="what fills in missing values of x differs"):
        merge([first, separate.model_])


def test_rows_that_lack_what_the_first_call_saw_whole_are_left_out_with_a_warning(frame):
    x, y, _ = (part[:300] for part in frame)
    x, y = x[["b"]], y.fillna(0.0)
    options = {"kernel_x": kernels.Gaussian(1.0), **FILLED, "tol": 0.1, "missing": "impute"}
    fit = JointDistribution(**options).partial_fit(x[:200], y[:200])
    more = x[200:].where(np.arange(100)[:, None] % 2 > 0)
    with pytest.warns(UserWarning, match=r"value of column 'b' \(50 rows\) are left out"):
        fit.partial_fit(more, y[200:])
    assert fit.model_.about["missing"]["rows"] == 50


@pytest.mark.parametrize("kind", [EmbeddingClassifier, MulticlassEmbedding])
def test_classifiers_fill_in(frame, kind):
    x, y, _ = frame
    x, label = x[["a", "b"]], np.where(y[:] > 0.3, "up", "down").astype(object)
    label[y.isna()] = None
    options = {"reg": 1e-3, "missing": "impute", "tol": 0.05}
    options |= {"max_iter": 3, "batch_size": 100} if kind is MulticlassEmbedding else {}
    fit = kind(kernel_x=kernels.Gaussian(1.0), **options).fit(x, label)
    assert fit.model_.about["missing"]["columns"]["a"] == x["a"].isna().sum()
    shares = fit.predict_proba([[np.nan, 0.0], [2.0, 0.0]])
    assert_allclose(shares.sum(axis=1), 1.0)
    assert score(fit, x, label).rows == y.notna().sum()


def test_what_the_row_sample_lacks_is_left_out(frame):
    """Nothing is learned of values that are missing in no row of the sample."""
    x, y, _ = frame
    options = {"kernel_x": kernels.Gaussian(1.0), **FILLED, "tol": 0.1, "sample_size": 100}
    x, y = x[["a", "b"]].copy(), y.fillna(0.0)
    sampled = JointDistribution(**options, missing="impute").fit(x, y)
    rows = np.flatnonzero(uniform(0, np.arange(N)) > 0.5)[:3]  # which come late in the sample
    x.iloc[rows, 1] = np.nan
    fit = JointDistribution(**options, missing="impute").fit(x, y)
    assert fit.model_.about["missing"]["rows"] == 3
    assert fit.model_.about["missing"]["columns"]["b"] == 3
    assert fit.columns_x == sampled.columns_x


def test_bad_input_of_imputation(frame):
    x, y, _ = frame
    empty = x.assign(b=np.nan)
    with pytest.raises(DataError, match=r"column 'b' has no value in any of the .* sampled rows"):
        JointDistribution(kernel_x=KERNEL, **FILLED, missing="impute").fit(empty, y)
    infinite = x.copy()
    infinite.iloc[0, 1] = np.inf
    with pytest.raises(DataError, match=r"column 'b' has 1 \(first at row 0\) infinite"):
        JointDistribution(kernel_x=KERNEL, **FILLED, missing="impute").fit(infinite, y)
    whole = pd.DataFrame({"a": np.ones(N, dtype=int), "b": np.arange(N)})  # integers lack none
    fit = JointDistribution(kernel_x="median", kernel_y="median", tol=0.3, missing="impute")
    with pytest.warns(ConstantColumnWarning):
        fit.fit(whole, y)
    assert fit.columns_x.imputation is None
    named = pd.DataFrame({"wd": ["missing", None, "S"] * 30, "missingindicator_a": 0.0})
    named["a"] = [np.nan, 1.0] * 45
    sample = marked(open_sample(named, np.arange(90.0)))
    rows = RowSample(
        np.arange(90.0), np.arange(90), (sample.sources[0].read(0, 90),), np.ones(90), True
    )
    columns, _ = learned(open_sample(named).columns[0], rows)
    assert columns.categories["wd"] == ("missing", "S", "missing_")
    assert columns.names[-1] == "missingindicator_a_"
    described = columns.to_dict()
    assert Columns.from_dict(described) == columns
    for damage in (
        {"fills": {"wd": 0.0, "a": 1.0}},
        {"fills": {"b": 0.0}},
        {"indicators": {}},
        {"indicators": {"a": "a"}},
        {"fills": {"wd": 2.0, "a": "NaN"}},
    ):
        with pytest.raises(StoreError, match="description of the columns is damaged"):
            Columns.from_dict({**described, "imputation": {**described["imputation"], **damage}})


def test_commands_fill_in(files):
    folder, frame = files
    store, model = folder / "s.zarr", folder / "m.zarr"
    columns = ["--x", "a,wd", "--y", "b", "--categorical", "wd", "--missing", "keep"]
    invoke("ingest", folder / "t.csv", "--out", store, *columns)
    fit = "fit", store, "--out", model, "--kernel", "median", "--max-rank", 8, "--tol", 0.3
    code, text = invoke(*fit, "--missing", "impute")
    assert code == 0
    assert "40 rows left out; values by column: a 40 (filled in: " in text
    assert "b 40" in invoke("info", model)[1]
    code, text = invoke("score", model, store, "--json")
    assert '"rows": 200' in text
    code, text = invoke("expect", model, "--given", "a=,wd=", "--json")
    expected = load(model).expect("b", {"a": [None], "wd": [None]})
    result = json.loads(text)
    assert result["points"] == [[None, None]]
    assert result["values"][0][0] == expected[0]
    (folder / "p.csv").write_text("a,wd\n,N\n1.0,\n")
    code, text = invoke("predict", model, "--points", folder / "p.csv", "--json")
    assert json.loads(text)["points"] == [[None, "N"], [1.0, None]]
    assert "missing" in invoke("expect", model, "--points", folder / "p.csv")[1]
    code, text = invoke("predict", model, store, "--out", folder / "answers")
    assert code == 0
    answers = zarr.open_group(str(folder / "answers"))["mean"][:, 0]
    assert_allclose(answers, load(model).conditional(frame[["a", "wd"]]).mean().to_numpy())
    code, text = invoke("expect", model, "--given", "a=x,wd=N")
    assert code == 2
    job = f"""
title = "Missing values"
[ingest]
files = ["{folder}/t.csv"]
x = ["a", "wd"]
y = ["b"]
categorical = ["wd"]
missing = "keep"
[fit]
kernel_x = "median"
kernel_y = "median"
max_rank = 6
tol = 0.4
missing = "impute"
[evaluate]
hold_out = 0.3
"""
    (folder / "job.toml").write_text(job)
    code, text = invoke("run", folder / "job.toml", "--out", folder / "job")
    assert code == 0, text
    report = json.loads((folder / "job" / "report.json").read_text())
    assert report["fit"]["missing"]["policy"] == "impute"
    assert report["evaluation"]["rows"] + report["fit"]["rows"] == 200
