"""What the documentation needs is public; each border speaks its own language."""

import inspect
import warnings
from pathlib import Path

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import polars as pl
import pytest
import zarr
from click.testing import CliRunner
from conftest import BRIEF, write_store

import cme_dask
from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    KernelLogisticRegression,
    Tuning,
    drift_report,
    ingest,
    kernels,
    load,
    metrics,
    open_sample,
    score,
)
from cme_dask.cli import cli
from cme_dask.errors import CmeDaskError, DataError, ResourceError, option, remedy, warn
from cme_dask.metrics import brier

N = 300


def rows(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, 1))
    return x, np.sin(x) + 0.3 * rng.normal(size=(N, 1))


@pytest.fixture(scope="module")
def fit():
    return JointDistribution(tuning=Tuning(**BRIEF)).fit(*rows(0), functions=["y0 > 0"])


# Scores in one call


def test_scores_are_those_of_the_laws(fit, tmp_path):
    x, y = rows(1)
    law = fit.conditional(x)
    table = score(fit, x, y, events=["y0 < -0.5"], level=0.8)
    assert table.rows == N
    residual = y[:, 0] - law.mean()
    assert table.r2["y0"].value == pytest.approx(1.0 - (residual**2).mean() / y.var())
    assert table.crps.value == pytest.approx(law.crps(y).mean())
    low, high = law.interval(0.8)
    inside = (low <= y[:, 0]) & (y[:, 0] <= high)
    assert table.coverage["y0"].value == pytest.approx(inside.mean())
    for found, values in (
        (table.width["y0"], metrics.width(low, high)),
        (table.interval_score["y0"], metrics.interval_score(low, high, y[:, 0], 0.8)),
        (table.pinball["y0"][0.05], metrics.pinball(law.quantile(0.05), 0.05, y[:, 0])),
    ):
        assert found.value == pytest.approx(metrics.mean(values).value)
    u = law.cdf(y[:, 0], paired=True)
    error = metrics.calibration_error(u)
    assert table.calibration_error["y0"].value == pytest.approx(error.value, abs=0.01)
    assert table.energy_score is table.log_score is None
    logs = -law.log_pdf(y, paired=True)
    asked = score(fit, x, y, levels=[0.3], log_score=True)
    assert asked.log_score.value == pytest.approx(logs.mean())
    assert list(asked.pinball["y0"]) == [0.3]
    assert "log score" in repr(asked)
    assert "pinball loss at 0.3 y0" in repr(asked)
    assert set(table.brier) == {"y0 > 0", "y0 < -0.5"}
    for text, happened in (("y0 > 0", y[:, 0] > 0), ("y0 < -0.5", y[:, 0] < -0.5)):
        expected = brier(law.probability(text), happened)
        assert table.brier[text].value == pytest.approx(expected)
        skill = 1.0 - expected / happened.astype(float).var()
        assert table.brier_skill[text].value == pytest.approx(skill)
    assert "CRPS" in repr(table)
    assert "coverage of 80% y0" in repr(table)
    # Wherever the rows are, and whatever holds the model.
    fit.save(tmp_path / "m")
    store = write_store(tmp_path / "s", x, y)
    lazily = (da.from_array(x, chunks=(70, 1)), da.from_array(y, chunks=(90, 1)))
    for model, held in ((load(tmp_path / "m"), (x, y)), (fit, (str(store),)), (fit, lazily)):
        again = score(model, *held, events=["y0 < -0.5"], level=0.8)
        assert again.crps.value == pytest.approx(table.crps.value, rel=1e-12)


def test_scores_of_held_out_parts(fit):
    x, y = rows(2)
    _, held_out = open_sample(x, y).split(0.3)
    table = score(fit, held_out)
    assert 0 < table.rows < N
    embedding = ConditionalMeanEmbedding(kernel_x="median", tol=0.1).fit(x, y)
    of_means = score(embedding, held_out)
    assert of_means.crps is None
    assert of_means.r2["y0"].value == pytest.approx(table.r2["y0"].value, abs=0.3)


def test_labels_are_scored_by_their_probabilities():
    rng = np.random.default_rng(4)
    x = pd.DataFrame({"x": rng.normal(size=N)})
    kind = pd.DataFrame({"kind": np.where(x["x"] + rng.normal(size=N) > 0, "warm", "cold")})
    fit = JointDistribution(kernel_x="median", tol=0.1, reg=1e-3).fit(x, kind)
    table = score(fit, x[::-1], kind[::-1])  # labels come in another order
    warm = 'kind == "warm"'
    happened = (kind["kind"] == "warm").to_numpy()
    expected = brier(fit.conditional(x.to_numpy()).probability(warm), happened)
    assert table.brier[warm].value == pytest.approx(expected)
    assert table.r2 == {}
    chances = fit.conditional(x.to_numpy()).predict_proba()
    labels = fit.model_.y.columns.categories["kind"]
    codes = np.array([labels.index(label) for label in kind["kind"]])
    found = table.labels["kind"]
    log_loss = -np.log(chances[np.arange(N), codes]).mean()
    assert found.log_loss.value == pytest.approx(log_loss, rel=1e-12)
    assert found.accuracy.value == pytest.approx((chances.argmax(axis=1) == codes).mean())
    assert "log loss kind" in repr(table)
    with pytest.raises(DataError, match="level"):
        score(fit, x, kind, level=2.0)
    with pytest.raises(DataError, match="levels of quantiles"):
        score(fit, x, kind, levels=[1.0])
    with pytest.raises(DataError, match="columns of numbers alone"):
        score(fit, x, kind, log_score=True)


@pytest.mark.parametrize("labels", [("cold", "warm"), (3, 7), (False, True)])
def test_labels_of_a_logistic_regression_are_scored(labels):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(N, 1))
    codes = (x[:, 0] + rng.normal(size=N) > 0).astype(int)
    seen = np.array(labels)[codes]
    fit = KernelLogisticRegression(tol=0.1).fit(x, seen)
    table, chances = score(fit, x, seen), fit.predict_proba(x)
    found = table.labels["y"]
    assert found.log_loss.value == pytest.approx(-np.log(chances[np.arange(N), codes]).mean())
    assert found.accuracy.value == pytest.approx((fit.predict(x) == seen).mean())
    first, second = (each.value for each in table.brier.values())
    assert first == pytest.approx(second) == pytest.approx(brier(chances[:, 1], codes == 1))
    with pytest.raises(DataError, match=r"column 'y' has the unknown 'none' \(300 rows\)"):
        score(fit, x, np.full(N, "none"))
    with pytest.raises(DataError, match=r"labels must have shape \(n,\), got \(300, 2\)"):
        score(fit, x, np.column_stack([seen, seen]))


QUICK = {"kernel_x": "median", "kernel_y": "median", "tol": 0.1, "max_rank": 15}


@pytest.mark.parametrize("labels", [("cold", "mild", "warm"), (1, 2, 3), (3, 7, 12), (False, True)])
@pytest.mark.parametrize("kind", [JointClassifier, EmbeddingClassifier])
def test_labels_of_a_classifier_are_those_it_was_fitted_on(kind, labels, tmp_path):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(N, 1))
    codes = np.digitize(x[:, 0] + 0.3 * rng.normal(size=N), [-0.5, 0.5][: len(labels) - 1])
    seen = np.array(labels)[codes]
    fit = kind(**QUICK).fit(x, seen)
    expected = (fit.predict(x) == seen).mean()
    assert expected > 0.7
    stored = zarr.create_array(str(tmp_path / "y"), data=codes if seen.dtype.kind == "U" else seen)
    lazy = da.from_array(x, chunks=(70, 1))
    for given in (
        seen,
        seen[:, None],
        seen.tolist(),
        pd.Series(seen, name="other"),
        pd.Series(seen).astype("category"),
        pd.Series(seen).convert_dtypes(),
        pl.Series(seen),
        da.from_array(seen, chunks=90),
        dd.from_pandas(pd.Series(seen), npartitions=3),
        stored,
        str(tmp_path / "y"),
    ):
        for rows in (x, lazy):
            found = score(fit, rows, given, scheduler="synchronous").labels["y"]
            assert found.accuracy.value == pytest.approx(expected)
    same = drift_report(fit, x, seen, scheduler="synchronous")
    assert same.y.pvalue > 0.9
    lacking = pd.Series(seen, dtype=object)
    lacking[7] = None
    with pytest.raises(DataError, match=r"column 'y' has 1 \(first at row 7\)"):
        score(fit, x, lacking)


def test_observed_labels_that_the_fit_has_not_seen_are_refused():
    """The kernel pools rare labels that are given; an unseen one is none of those predicted."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(N, 1))
    kind = np.where(x[:, 0] + rng.normal(size=N) > 0, "warm", "cold")
    law = JointDistribution(**QUICK).fit(x, pd.DataFrame({"kind": kind}))
    assert law.model_.y.basis.newton.kernel.pools(0)
    codes = np.array([law.columns_y.categories["kind"].index(label) for label in kind])
    lazy = da.from_array(codes, chunks=100)
    named = score(law, x, pd.Series(kind)).labels["kind"].accuracy.value
    assert score(law, x, lazy).labels["kind"].accuracy.value == named
    numbered = JointClassifier(**QUICK).fit(x, codes + 1)
    kind[3:5] = "hot"
    for ask, message in (
        (lambda: score(law, x, kind), r"column 'kind' has the unknown 'hot' \(2 rows\): there are"),
        (lambda: drift_report(law, x, kind), r"column 'kind' has the unknown 'hot' \(2 rows\)"),
        (
            lambda: score(law, x, lazy - 1),
            "column 'kind' has the code -1, there are labels for 0 to",
        ),
        (lambda: score(law, x, lazy + 0.5), "column 'kind' has the code [01].5, there are labels"),
        (lambda: score(numbered, x, lazy), "column 'y' has the unknown '0'"),
    ):
        with pytest.raises(DataError, match=message):
            ask()


def test_what_cannot_be_scored(fit):
    x, y = rows(1)
    for ask, message in (
        (lambda: score(fit, x), "give Y, or a store"),
        (lambda: score(fit, x, y, events=["y7 > 0"]), "unknown column 'y7'"),
        (lambda: score(fit, x, y, level=2.0), "level"),
        (lambda: score(fit, np.hstack([x, x]), y), "must have shape"),
        (lambda: score(kernels.Gaussian(1.0), x, y), "score takes a fitted joint distribution"),
    ):
        with pytest.raises(DataError, match=message):
            ask()


# Columns, and making a store


def test_columns_are_public(fit, tmp_path):
    fit.save(tmp_path / "m")
    for model in (fit, fit.model_, load(tmp_path / "m")):
        assert model.columns_x.names == ("x0",)
        assert model.columns_y.names == model.columns_y.numeric == ("y0",)


def test_tables_are_ingested_in_python(tmp_path):
    x, y = rows(5)
    table = pd.DataFrame({"a": x[:, 0], "b": y[:, 0]})
    table.to_csv(tmp_path / "t.csv", index=False)
    report = ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"])
    sample = open_sample(tmp_path / "s")
    assert report.rows_kept == sample.n_rows == N
    assert [c.names for c in sample.columns] == [("a",), ("b",)]
    with pytest.raises(DataError, match=r"already exists: .*\(overwrite=True\)"):
        ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"])


def test_the_documentation_imports_public_names_only():
    pages = [*cme_dask_root().joinpath("docs").glob("*.md"), cme_dask_root() / "README.md"]
    internal = [
        f"{page.name}: {line}"
        for page in pages
        for line in page.read_text().splitlines()
        if line.startswith("from cme_dask.") and line.split()[1].split(".")[1] not in PUBLIC
    ]
    assert internal == []


PUBLIC = {"constraints", "errors", "kernels", "metrics", "reductions"}


def cme_dask_root():
    return Path(inspect.getfile(cme_dask)).parents[1]


# Remedies


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("s") / "s", *rows(6))


ERRORS = {
    "overwrite": (
        lambda s, t: load_and_save(s, t),
        lambda s, t: ["fit", s, "--out", t],
        "(overwrite=True)",
        "(--overwrite)",
    ),
    "memory limit": (
        lambda s, t: JointDistribution().fit(str(s), memory_limit="nix"),
        lambda s, t: ["fit", s, "--out", f"{t}2", "--memory-limit", "nix"],
        "memory_limit must be bytes",
        "--memory-limit must be bytes",
    ),
    "residual": (
        lambda s, t: JointDistribution(residual=True, constraint="coupling").fit(str(s)),
        lambda s, t: ["fit", s, "--out", f"{t}2", "--residual", "yes", "--constraint", "coupling"],
        "residual=True needs constraint",
        "--residual yes needs constraint",
    ),
    "unbounded kernels": (
        lambda s, t: JointDistribution(
            kernel_x=kernels.Linear(), kernel_y=kernels.Linear(), constraint="certified", tol=0.1
        ).fit(str(s)),
        None,
        "cme_dask.constraints.Certified(bounds='sample')",
        "--constraint certified,bounds=sample",
    ),
    "ridge": (
        lambda s, t: JointDistribution(reg=(1.0, 2.0), reg_form="single").fit(str(s)),
        lambda s, t: ["fit", s, "--out", f"{t}2", "--reg", "1,2", "--reg-form", "single"],
        "reg_form='single' takes one number for reg,",
        "--reg-form single takes one number for --reg,",
    ),
    "events": (
        lambda s, t: load(t).expect("y0 > 3", [[0.0]]),
        lambda s, t: ["expect", t, "--given", "x0=0", "--of", "y0 > 3"],
        "functions=['y0 > 3']",
        "--event 'y0 > 3'",
    ),
    "folds": (
        lambda s, t: load(t).expect("y0", [[0.0]], return_std=True),
        None,
        "fit with n_folds of at least 2",
        "fit with --folds of at least 2",
    ),
    "chunks": (
        lambda s, t: ingest(["x.csv"], t, x=["a"], y=["b"], chunk_rows=9, target_chunk=9),
        lambda s, t: [
            *("ingest", "x.csv", "--out", t, "--x", "a", "--y", "b", "--chunk-rows", 9),
            *("--target-chunk", "9"),
        ],
        "chunk_rows and target_chunk both",
        "--chunk-rows and --target-chunk both",
    ),
}


def load_and_save(store, target):
    load(target).save(target)


@pytest.fixture(scope="module")
def saved(store, tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "m"
    gaussian = kernels.Gaussian(1.0)
    given = JointDistribution(kernel_x=gaussian, kernel_y=gaussian, tol=0.1, n_folds=1, reg=1e-3)
    given.fit(str(store)).save(path)
    return path


@pytest.mark.parametrize("name", ERRORS)
def test_errors_speak_the_language_of_their_reader(name, store, saved):
    raises, command, in_python, on_command_line = ERRORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of kernels that are no good
        with pytest.raises(CmeDaskError) as caught:
            raises(store, saved)
    error = caught.value
    assert in_python in str(error)
    assert on_command_line not in str(error)
    assert on_command_line in error.for_command
    assert in_python not in error.for_command
    if command is not None:
        done = CliRunner().invoke(cli, [str(part) for part in command(store, saved)])
        assert done.exit_code in (2, 3), done.output
        assert on_command_line in done.stderr
        assert in_python not in done.stderr


def test_quoted_errors_keep_both_remedies():
    inner = DataError(f"lower {option('max_rank')}")
    with pytest.warns(UserWarning, match=r"^raise max_rank$") as caught:
        warn(f"raise {option('max_rank')}", UserWarning)
    assert caught[0].message.for_command == "raise --max-rank"
    outer = ResourceError(f"no room ({inner}), or {remedy('a()', 'b')}")
    assert str(outer) == "no room (lower max_rank), or a()"
    assert outer.for_command == "no room (lower --max-rank), or b"
    assert repr(inner) == "DataError('lower max_rank')"


@pytest.mark.parametrize(
    ("count", "code", "message"),
    [
        ("1e99", 2, "more than 2^53"),
        ("9007199254740994", 2, "more than 2^53"),
        ("1e15", 3, "rows take about 2.4e+07 GB, the disk of"),
    ],
)
def test_samples_that_no_disk_holds_are_refused(tmp_path, count, code, message):
    done = CliRunner().invoke(cli, ["sample", str(tmp_path / "s"), "--rows", count])
    assert done.exit_code == code, done.output
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
