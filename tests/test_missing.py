"""Missing values: rows that are left out, with counts, and what the model says of them."""

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from click.testing import CliRunner
from numpy.testing import assert_allclose, assert_array_equal

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    ingest,
    kernels,
    load,
    merge,
    open_sample,
    score,
)
from cme_dask.cli import cli
from cme_dask.data.batches import BatchReader
from cme_dask.errors import DataError
from cme_dask.passes import run as passes

N = 6000
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
    }
    assert f"{N - whole.sum():,} rows left out; values by column: x0 858" in repr(fit.model_)
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
    options |= {"pivots": (pivots[0], np.arange(2.0))}
    fit = kind(**options, missing="drop").fit(x, label)
    oracle = kind(**options).fit(x[whole], label[whole])
    assert fit.classes_.tolist() == ["down", "up"]
    assert_allclose(fit.predict_proba(POINTS), oracle.predict_proba(POINTS), rtol=1e-9)
    assert fit.model_.about["missing"]["columns"]["y"] == np.isnan(y).sum()
    with pytest.raises(DataError, match="must hold labels, but 545"):
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
    message = (
        r"'x0' has 858 \(first at row 0\); column 'x1' has 120 .*'y0' has 545 .*missing='drop'"
    )
    with pytest.raises(DataError, match=message):
        JointDistribution(**GIVEN).fit(x, y)
    with pytest.raises(DataError, match="missing must be one of error, drop"):
        JointDistribution(missing="ignore").fit(x, y)
    infinite = y.copy()
    infinite[1] = np.inf
    with pytest.raises(DataError, match=r"column 'y0' has 1 \(first at row 1\) NaN or infinite"):
        JointDistribution(**GIVEN, missing="drop").fit(x, infinite)
    fit = JointDistribution(**GIVEN, missing="drop").fit(x, y)
    for points in ([[np.nan, 0.0]], {"x0": [None], "x1": [0.0]}):
        with pytest.raises(DataError, match=r"column 'x0' has 1 \(first at row 0\)"):
            fit.predict(points)
    lazy = fit.predict(da.from_array(x, chunks=(500, 2)))
    with pytest.raises(DataError, match="column 'x0' has 72"):
        lazy.compute(scheduler="synchronous")
    empty = np.column_stack([x[:, 0], np.full(N, np.nan)])
    with pytest.raises(DataError, match=r"all 6,000 rows that were read lack a value .*'x1' 6,000"):
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
