"""Comparisons: equal splits, independent scores, runs that go on, and what is refused."""

import json
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scoringrules
from click.testing import CliRunner
from conftest import write_store
from scipy.stats import norm

from benchmarks import methods as study_of_methods
from benchmarks import regression, study
from benchmarks.__main__ import cli as beside
from cme_dask import compare, metrics, open_sample
from cme_dask.cli import cli
from cme_dask.cli.progress import ProgressLines
from cme_dask.errors import DataError, ResourceError
from cme_dask.estimators import comparison, peers
from cme_dask.estimators.comparison import SCORES, Splits, listed_split, summarized
from cme_dask.estimators.peers import (
    METHODS,
    Answers,
    Method,
    NormalLaw,
    QuantileLaw,
    Training,
    binned_labels,
)

PEERS = {"quantile-forest": "quantile_forest", "ngboost": "ngboost", "lightgbm": "lightgbm"}


@pytest.fixture(autouse=True)
def quick_peers(monkeypatch):
    """Few trees, few steps and few quantiles: these tests are not about how good peers are."""
    monkeypatch.setattr(peers, "TREES", 5)
    monkeypatch.setattr(peers, "_TRIAL_TREES", 3)
    monkeypatch.setattr(peers, "LEAVES", (1, 5))
    monkeypatch.setattr(peers, "STEPS", 5)
    monkeypatch.setattr(peers, "QUANTILES", (0.05, 0.5, 0.95))
    brief = partial(peers.HistGradientBoostingRegressor, max_iter=20)
    monkeypatch.setattr(peers, "HistGradientBoostingRegressor", brief)


@pytest.fixture
def table(rng):
    x = rng.normal(size=(160, 2))
    return x, x[:, 0] + 0.5 * rng.normal(size=160)


def seen_by(monkeypatch, name="seen", **options):
    """A method without a model, and the training rows of its fits."""
    fits = []

    def fit(training):
        fits.append(training)
        y = training.arrays[1]
        return Answers(lambda x: NormalLaw(np.full(len(x), y.mean()), np.full(len(x), y.std())))

    monkeypatch.setitem(METHODS, name, Method(name, "", fit, has_density=True, **options))
    return fits


# Laws of others


def test_normal_laws_equal_others_formulas(rng):
    mean, std, y = rng.normal(size=30), rng.uniform(0.1, 3.0, 30), rng.normal(size=(30, 1))
    law = NormalLaw(mean, std)
    np.testing.assert_allclose(law.crps(y), scoringrules.crps_normal(y[:, 0], mean, std), 1e-12)
    np.testing.assert_allclose(law.log_pdf(y), norm(mean, std).logpdf(y[:, 0]), rtol=1e-12)
    levels = [0.05, 0.3, 0.99]
    expected = norm(mean[:, None], std[:, None]).ppf(levels)
    np.testing.assert_allclose(law.quantile(levels), expected, rtol=1e-12)
    assert np.array_equal(law.expect(["y"]), mean[:, None])


def test_quantile_laws_interpolate_sort_and_go_on(rng):
    levels, values = np.array([0.05, 0.25, 0.5, 0.95]), rng.normal(size=(20, 4))
    law, ascending = QuantileLaw(levels, values), np.sort(values, axis=1)
    at = np.linspace(0.05, 0.95, 31)
    expected = [np.interp(at, levels, row) for row in ascending]
    np.testing.assert_allclose(law.quantile(at), expected, atol=1e-14)
    slope = (ascending[:, 1] - ascending[:, 0]) / 0.2
    np.testing.assert_allclose(law.quantile([0.0])[:, 0], ascending[:, 0] - 0.05 * slope)
    atoms = law.quantile(peers.ATOMS)
    even, y = np.full(atoms.shape, 1 / atoms.shape[1]), rng.normal(size=(20, 1))
    np.testing.assert_allclose(law.crps(y), metrics.crps(even, atoms[..., None], y), rtol=1e-12)
    np.testing.assert_allclose(law.expect(["y"])[:, 0], atoms.mean(axis=1))
    # Of many levels of a known law the score is that of the law.
    exact = QuantileLaw(np.array(peers.ATOMS), np.tile(norm.ppf(peers.ATOMS), (20, 1)))
    normal = scoringrules.crps_normal(y[:, 0], np.zeros(20), np.ones(20))
    np.testing.assert_allclose(exact.crps(y), normal, atol=2e-4)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "joint"])
@pytest.mark.parametrize("weighted", [False, True])
def test_each_method_predicts_laws(name, weighted, rng, brief_search):
    if name in PEERS:
        pytest.importorskip(PEERS[name])
    n = 120
    x = np.column_stack([rng.normal(size=n), np.arange(n) % 3])
    y = 3.0 * x[:, 0] + 0.1 * rng.normal(size=n)
    sample = open_sample(x, y, weights=rng.uniform(1.0, 2.0, n) if weighted else None)
    coded = replace(sample.columns[0], categories={"x1": ("a", "b", "c")})
    sample = replace(sample, columns=(coded, sample.columns[1]))
    training = comparison.training_rows(sample, n, 1, 0)
    assert training.coded == [1]
    law = METHODS[name].fit(training)(x[:50])
    quantiles = law.quantile([0.05, 0.5, 0.95])
    assert quantiles.shape == (50, 3)
    assert (np.diff(quantiles, axis=1) >= 0.0).all()
    assert law.crps(y[:50, None]).shape == (50,)
    assert law.expect(["y0"]).shape == (50, 1)
    assert hasattr(law, "log_pdf") == METHODS[name].has_density
    # Which have few steps or few rows here.
    slow = name in ("ngboost", "lightgbm", "hist-boosting", "joint-boosting")
    assert np.corrcoef(quantiles[:, 1], y[:50])[0, 1] > (0.5 if slow else 0.9)


def test_rivals_leave_out_whole_units_where_folds_do(rng, monkeypatch):
    """Residuals of rows whose neighbours were seen would be too small."""
    group = np.repeat(np.arange(40), 10)
    x = np.column_stack([group, rng.normal(size=400)])
    y = 2.0 * rng.normal(size=40)[group] + 0.2 * rng.normal(size=400)
    sample = open_sample(x, y, group=group).fold_by("group")
    training = comparison.training_rows(sample, 400, 1, 0)
    assert np.median(METHODS["normal"].fit(training)(x).std) > 1.5

    groups = []

    class Forest:
        def __init__(self, **options):
            pass

        def fit(self, x, y, sample_weight):
            groups.append(x[:, 0].tolist())

        def predict(self, x, quantiles):
            return np.zeros((len(x), len(quantiles)))

    package = SimpleNamespace(RandomForestQuantileRegressor=Forest)
    monkeypatch.setitem(sys.modules, "quantile_forest", package)
    METHODS["quantile-forest"].fit(training)
    *trials, final = groups
    assert len(final) == 400
    assert all(len(seen) == 10 * len(set(seen)) < 400 for seen in trials)
    one = comparison.training_rows(open_sample(x, y, group=0 * group).fold_by("group"), 400, 1, 0)
    assert len(set(one.folds(4))) == 4


def test_forests_choose_the_leaf_by_rows_left_out(rng, monkeypatch):
    pytest.importorskip("quantile_forest")
    leaves = []
    from quantile_forest import RandomForestQuantileRegressor as Forest

    fit = Forest.fit
    monkeypatch.setattr(
        Forest,
        "fit",
        lambda self, *a, **k: leaves.append(self.min_samples_leaf) or fit(self, *a, **k),
    )
    monkeypatch.setattr(peers, "LEAVES", (1, 20))
    x = rng.uniform(size=(300, 1))
    for y, best in ((rng.normal(size=300), 20), (np.round(8.0 * x[:, 0]), 1)):
        METHODS["quantile-forest"].fit(comparison.training_rows(open_sample(x, y), 300, 1, 0))
        assert leaves[-1] == best


# Splits


def test_scores_are_those_of_independent_formulas(table):
    x, y = table
    test = [np.arange(0, 160, 4), np.arange(1, 160, 4)]
    result = compare(x, y, methods=["normal"], test_rows=test, threads=1)
    mine = {name: each["values"] for name, each in result.methods["normal"].items()}
    for i, index in enumerate(test):
        rest, held = listed_split(open_sample(x, y), index)
        training = comparison.training_rows(rest, 1000, 1, 0)
        law = METHODS["normal"].fit(training)(x[index])
        low, middle, high = law.quantile([0.05, 0.5, 0.95]).T
        truth = y[index]
        expected = {
            "crps": scoringrules.crps_normal(truth, law.mean, law.std).mean(),
            "log_score": -norm(law.mean, law.std).logpdf(truth).mean(),
            "coverage": ((low <= truth) & (truth <= high)).mean(),
            "width": (high - low).mean(),
            "pinball": np.mean(
                [
                    np.maximum(level * (truth - q), (level - 1) * (truth - q)).mean()
                    for level, q in zip((0.05, 0.5, 0.95), (low, middle, high), strict=True)
                ]
            ),
            "rmse": np.sqrt(((law.mean - truth) ** 2).mean()),
        }
        for score, value in expected.items():
            assert mine[score][i] == pytest.approx(value, rel=1e-12), score
        assert held.n_rows == 40
    assert set(mine) == set(SCORES)


def test_the_default_is_scored_as_its_own_metrics_do(table, brief_search):
    x, y = table
    result = compare(x, y, methods=["joint"], test_rows=[np.arange(40)], threads=1)
    from cme_dask import JointDistribution

    fit = JointDistribution().fit(x[40:], y[40:], scheduler="synchronous")
    law = fit.conditional(x[:40])
    crps = result.methods["joint"]["crps"]
    assert crps["mean"] == pytest.approx(np.mean(law.crps(y[:40, None])), rel=1e-9)
    assert crps["std_error"] is crps["excess_error"] is None
    logarithm = law.log_pdf(y[:40, None], paired=True)
    assert result.methods["joint"]["log_score"]["mean"] == pytest.approx(-np.mean(logarithm))
    assert "joint" in repr(result)


def test_random_splits_folds_and_groups(table, monkeypatch):
    x, y = table
    fits = seen_by(monkeypatch)
    group = np.arange(160) // 8
    compare(open_sample(x, y, group=group), methods=["seen"], folds=4, fold_by="group", threads=1)
    rows = [set(fit.rows.index.tolist()) for fit in fits]
    assert sum(160 - len(each) for each in rows) == 160  # each row is held out once
    for each in rows:
        assert all(sum(row in each for row in range(8 * g, 8 * g + 8)) in (0, 8) for g in range(20))
    fits.clear()
    for seed in (0, 1):
        compare(x, y, methods=["seen"], splits=2, hold_out=0.3, seed=seed, threads=1)
    first, second, again, other = (set(fit.rows.index.tolist()) for fit in fits)
    assert second == again != first != other
    assert 0.5 < len(first) / 160 < 0.9


def test_only_methods_that_stream_see_more_rows_than_fit_in_memory(tmp_path, table, monkeypatch):
    x, y = (np.tile(part.T, 25).T for part in table)
    store = write_store(tmp_path / "s.zarr", x, y)
    fits = seen_by(monkeypatch)
    result = compare(str(store), methods=["seen"], splits=1, rows=50, threads=2)
    (training,) = fits
    assert len(training.rows) == 50
    assert training.sample.n_rows == 4000
    assert training.sample.part is not None
    assert result.rows == 4000
    assert result.settings["most_rows"] == 50


def test_a_split_takes_a_pass_for_the_rows_in_memory_and_one_for_each_method(table, monkeypatch):
    x, y = table
    for name in ("seen", "other"):
        seen_by(monkeypatch, name)
    reads = []

    def counted(block):
        reads.append(len(block))
        return block

    chunked = da.from_array(x, chunks=(40, 2)).map_blocks(counted, meta=np.empty((0, 2)))
    compare(chunked, da.from_array(y, chunks=40), methods=["seen", "other"], splits=2, threads=1)
    assert reads == [40] * 4 * (1 + 2) * 2
    in_memory = compare(x, y, methods=["seen"], splits=2, threads=1)
    assert in_memory.methods["seen"]["crps"]["mean"] > 0.0


def test_errors_are_those_of_paired_differences():
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=(5, 2)) for name in ("a", "b")}
    values["a"][:, 0] -= 5.0
    values["b"][:, 1] = 0.9 + 0.01 * values["b"][:, 1]
    runs = {
        name: [
            {"crps": crps, "coverage": covered, "log_score": None if name == "a" else 1.0}
            for crps, covered in each
        ]
        for name, each in values.items()
    }
    result = summarized(runs)
    gaps = values["b"][:, 0] - values["a"][:, 0]
    crps = result["b"]["crps"]
    assert crps["best"] == "a"
    assert crps["excess"] == pytest.approx(gaps.mean())
    assert crps["excess_error"] == pytest.approx(gaps.std(ddof=1) / np.sqrt(5))
    assert crps["std_error"] == pytest.approx(values["b"][:, 0].std(ddof=1) / np.sqrt(5))
    assert result["a"]["coverage"]["best"] == "b"  # the nearest to the level, not the smallest
    assert "log_score" not in result["a"]
    assert "rmse" not in result["b"]


def test_columns_of_very_many_labels_are_numbers_for_boosting():
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.arange(600) % 300)
    x = pd.DataFrame({"place": codes.astype(str), "kind": (codes % 3).astype(str)})
    result = compare(x, codes / 300 + rng.normal(size=600), methods=["normal"], splits=1, threads=1)
    assert result.methods["normal"]["crps"]["mean"] > 0.0
    columns = open_sample(x, codes).columns[0]
    assert binned_labels(columns) == [columns.names.index("kind")]


# What is missing or interrupted


def absent(name):
    return replace(METHODS[name], package=("no_such_package_at_all", name))


def test_missing_packages_are_named_and_left_out(table, monkeypatch):
    monkeypatch.setitem(METHODS, "ngboost", absent("ngboost"))
    seen_by(monkeypatch)
    said = []
    result = compare(*table, methods=["ngboost", "seen"], splits=1, threads=1, progress=said.append)
    assert list(result.methods) == ["seen"]
    assert said[0] == result.missing["ngboost"]
    assert "pip install ngboost, or install cme-dask[bench]" in said[0]
    assert said[0] in repr(result)
    with pytest.raises(DataError, match="no method is left to compare: ngboost is left out"):
        compare(*table, methods=["ngboost"])


def test_the_help_says_which_methods_stream_and_names_the_extra():
    text = " ".join(CliRunner().invoke(cli, ["compare", "--help"]).output.replace("│", "").split())
    assert "all but joint and joint-boosting" in text
    assert "the extra bench installs all" in text.replace("`", "")
    assert "pip install cme-dask" not in text


def interrupted_at(monkeypatch, number):
    """The method ``seen``, whose fit of that number is interrupted, once."""
    fits = seen_by(monkeypatch)
    method = METHODS["seen"]

    def fit(training):
        answers = method.fit(training)
        if len(fits) == number:
            raise KeyboardInterrupt
        return answers

    monkeypatch.setitem(METHODS, "seen", replace(method, fit=fit))
    return fits


def test_a_comparison_knows_every_row_of_its_table():
    x = np.zeros((10_000, 1))
    digests = {comparison._digest(open_sample(x, x[:, 0]))}
    x[5000] = 1.0
    digests.add(comparison._digest(open_sample(x, x[:, 0])))
    for group in (np.arange(10_000), np.arange(10_000) // 2):
        sample = open_sample(x, x[:, 0], group=group).fold_by("group")
        digests.add(comparison._digest(sample))
    assert len(digests) == 4


def test_an_interrupted_comparison_goes_on(table, tmp_path, monkeypatch):
    fits = interrupted_at(monkeypatch, 3)
    path = tmp_path / "runs"
    options = {"methods": ["seen"], "splits": 4, "threads": 1, "checkpoint": path}
    with pytest.raises(KeyboardInterrupt):
        compare(*table, **options)
    with path.open("a") as file:
        file.write('["seen", 2, {"crps": 0.')  # a line that was cut
    with pytest.raises(DataError, match="an interrupted comparison of other rows"):
        compare(*table, **options | {"hold_out": 0.2})
    with pytest.raises(DataError, match="an interrupted comparison of other rows"):
        compare(table[0], table[1] + 1.0, **options)
    with pytest.raises(DataError, match="an interrupted comparison of other rows"):
        compare(table[0], np.append(table[1][:-1], 0.0), **options)
    result = compare(*table, **options)
    assert len(fits) == 3 + 2  # two that had ended, the interrupted one again, and the last
    compare(*table, **options)
    assert len(fits) == 5
    whole = compare(*table, **options | {"checkpoint": None})
    assert result.methods["seen"]["crps"] == whole.methods["seen"]["crps"]


def test_runs_of_other_versions_are_repeated(table, tmp_path, monkeypatch):
    fits, path = seen_by(monkeypatch), tmp_path / "runs"
    options = {"methods": ["seen"], "splits": 2, "threads": 1, "checkpoint": path}
    compare(*table, **options)
    monkeypatch.setattr(comparison, "__version__", "99.0")
    for _ in range(2):
        result = compare(*table, **options)
        assert len(fits) == 2 + 2
        assert result.settings["versions"]["cme-dask"] == "99.0"
    head, *lines = map(json.loads, path.read_text().splitlines())
    earlier = [head, *(line[:3] for line in lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in earlier))
    compare(*table, **options)  # of a file that names no versions
    assert len(fits) == 4 + 2


def test_a_method_that_fails_is_named(table, monkeypatch):
    def fit(training):
        raise ZeroDivisionError("no luck")

    monkeypatch.setitem(METHODS, "unlucky", Method("unlucky", "", fit))
    with pytest.raises(DataError, match="unlucky failed: ZeroDivisionError: no luck; leave it out"):
        compare(*table, methods=["unlucky"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["forest"]}, "unknown method 'forest': there are joint, joint-boosting"),
        ({"methods": []}, "no method is left to compare: name at least one"),
        ({"splits": 0}, "splits must be an integer of at least 1, got 0"),
        ({"rows": 0}, "rows must be an integer of at least 1, got 0"),
        ({"seed": 2**32}, "seed must be an integer from 0 to 2147483647"),
        ({"seed": True}, "seed must be an integer"),
        ({"threads": 1.5}, "threads must be an integer of at least 1, got 1.5"),
        ({"folds": 1}, "n_folds must be an integer of at least 2, got 1"),
        ({"folds": 2, "test_rows": [[1]]}, "both say what is held out"),
        ({"test_rows": []}, "test_rows holds no split"),
        ({"test_rows": [[0, 160]]}, r"different row numbers from 0 to 159, got \[0, 160\]"),
        ({"test_rows": [[3, 3]]}, "different row numbers"),
        ({"test_rows": [[0.5]]}, "different row numbers"),
        ({"test_rows": [[]]}, "different row numbers"),
        ({"test_rows": [list(range(159))]}, "leave fewer than 2 rows to fit on"),
        ({"hold_out": 1.0}, "must lie between 0 and 1"),
        ({"fold_by": "group"}, "need the group of each row"),
    ],
)
def test_bad_options(table, options, message):
    with pytest.raises(DataError, match=message):
        compare(*table, **{"methods": ["normal"], **options})


def test_bad_rows(table, monkeypatch):
    x, y = table
    with pytest.raises(DataError, match="needs rows of x and of y"):
        compare(x)
    with pytest.raises(DataError, match=r"y holds 2 columns \(y0, y1\): choose one"):
        compare(x, np.column_stack([y, y]))
    with pytest.raises(DataError, match="y holds labels"):
        compare(x, pd.Series(np.where(y > 0, "up", "down"), name="side"))
    monkeypatch.setattr(comparison, "_SHARE", 0.0)
    with pytest.raises(ResourceError, match="rows selected by number are held in memory"):
        listed_split(open_sample(x, y), np.arange(3))


def test_settings_of_listed_rows_depend_on_them():
    one, two = (Splits(test_rows=[rows]).to_dict() for rows in ([1, 2], [1, 3]))
    assert one != two
    assert Splits(folds=3).to_dict() == {"fold_by": "rows", "seed": 0, "folds": 3}


# The command


@pytest.fixture
def csv(tmp_path, table):
    x, y = table
    frame = pd.DataFrame(x, columns=["TEMP", "DEWP"])
    frame["kind"], frame["target"] = np.where(np.arange(160) % 3, "a", "b"), y
    frame.to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv"


def run(*words):
    return CliRunner().invoke(cli, ["compare", *map(str, words)])


def test_the_command_compares_tables_and_writes_json(csv, tmp_path, table):
    (tmp_path / "rows.txt").write_text("3.0 4\n17 20\n")
    words = (csv, "--x", "TEMP,DEWP", "--y", "target", "--methods", "normal", "--threads", 1)
    words = (*words, "--test-rows", tmp_path / "rows.txt", "--out", tmp_path / "c.json")
    done = run(*words)
    assert done.exit_code == 0, done.output
    for word in ("target in 160 rows, one split", "CRPS", "More than the best", "Seconds", "best"):
        assert word in done.output
    stored = json.loads((tmp_path / "c.json").read_text())
    same = compare(*table, methods=["normal"], test_rows=[[3, 4, 17, 20]], threads=1)
    for score in ("crps", "log_score", "coverage", "width", "pinball", "rmse"):
        assert stored["methods"]["normal"][score] == same.methods["normal"][score]
    assert stored["settings"]["versions"]["cme-dask"]
    assert [path.name for path in tmp_path.glob("*partial*")] == []
    assert "already exists" in run(*words).output
    again = run(*words, "--overwrite", "--json")
    assert json.loads(again.stdout)["methods"]["normal"]["crps"] == same.methods["normal"]["crps"]


def test_the_command_takes_labels_parquet_and_stores(csv, tmp_path, monkeypatch):
    fits = seen_by(monkeypatch)
    frame = pd.read_csv(csv)
    frame.to_parquet(tmp_path / "t.parquet")
    common = ("--methods", "seen", "--splits", 1, "--threads", 1, "--json")
    words = ("--y", "target", "--categorical", "kind", *common)
    results = [json.loads(run(tmp_path / name, *words).stdout) for name in ("t.csv", "t.parquet")]
    assert results[0]["methods"]["seen"]["crps"] == results[1]["methods"]["seen"]["crps"]
    assert results[0]["columns"] == ["TEMP", "DEWP", "kind"]
    assert fits[0].coded == [2]
    store = write_store(tmp_path / "s.zarr", frame[["TEMP", "DEWP"]], frame["target"])
    kept = json.loads(run(store, *common).stdout)
    assert kept["methods"]["seen"]["crps"] == results[0]["methods"]["seen"]["crps"]


def test_an_interrupted_command_goes_on(csv, tmp_path, monkeypatch):
    fits = interrupted_at(monkeypatch, 2)
    out = tmp_path / "c.json"
    words = (csv, "--x", "TEMP", "--y", "target", "--methods", "seen", "--splits", 3, "--out", out)
    assert run(*words).exit_code == 130
    assert not out.exists()
    other = run(*words, "--seed", 1)
    assert other.exit_code == 2
    assert "remove the file to start again" in other.output
    assert run(*words).exit_code == 0
    assert len(fits) == 2 + 2
    assert run(*words, "--seed", 1, "--overwrite").exit_code == 0
    assert json.loads(out.read_text())["settings"]["seed"] == 1


def test_what_the_command_refuses(csv, tmp_path):
    text = csv.read_text().splitlines()
    gaps = tmp_path / "gaps.csv"
    gaps.write_text("\n".join([*text[:3], "1.0,,a,2.0", *text[3:]]))
    numbers, words = tmp_path / "n.txt", tmp_path / "w.txt"
    numbers.write_text("1 2")
    words.write_text("1 2.5")
    store = write_store(tmp_path / "s.zarr", np.arange(40.0), np.arange(40.0))
    y = ("--y", "target", "--categorical", "kind")
    for line, message in (
        ((csv,), "Missing option '--y'"),
        ((csv, "--y", "target"), "kind"),
        ((gaps, *y, "--test-rows", numbers), "1 rows lack a value"),
        ((csv, *y, "--test-rows", words), "must hold row numbers, whole ones"),
        ((store, "--categorical", "x0"), "--categorical is for tables"),
        ((store, "--null-value", "-9"), "--null-value is for tables"),
        ((csv, *y, "--missing", "keep"), "--missing keep: the methods take no missing values"),
        ((csv, *y, "--methods", "forest"), "unknown method 'forest'"),
        ((csv, *y, "--fold-by", "7d"), "need the time of each row"),
    ):
        done = run(*line)
        assert done.exit_code == 2, done.output
        assert message in done.output.replace("\n", " ")


# The study of five tables


@pytest.fixture
def data(tmp_path, table):
    folder = tmp_path / "data" / "yacht"
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", np.column_stack(table))
    (folder / "index_features.txt").write_text("0\n1\n")
    (folder / "index_target.txt").write_text("2\n")
    for split in range(2):
        np.savetxt(folder / f"index_test_{split}.txt", np.arange(split, 160, 10))
    return folder.parent


@pytest.mark.usefixtures("quick_studies")
def test_the_study_of_regression_sums_up(data, tmp_path, monkeypatch):
    monkeypatch.setattr(study_of_methods, "judge_all", study.judge_all)
    seen_by(monkeypatch, "joint")
    mean_by(monkeypatch, "normal", 2.0)
    mean_by(monkeypatch, "joint-boosting")
    words = ["study", "regression", "--data", data, "--data-set", "yacht", "--splits", "2"]
    words += ["--methods", "joint,joint-boosting,normal", "--out", tmp_path / "out"]
    done = CliRunner().invoke(beside, list(map(str, words)))
    assert done.exit_code == 0, done.output
    assert "published, NGBoost" in done.output
    result = json.loads((tmp_path / "out" / "regression.json").read_text())
    (cell,) = result["cells"]
    x, y = np.loadtxt(data / "yacht" / "data.txt")[:, :2], table_target(data)
    same = compare(
        x, y, methods=["normal"], test_rows=[np.arange(s, 160, 10) for s in range(2)], threads=1
    )
    assert cell["models"]["normal"]["crps"]["values"] == same.methods["normal"]["crps"]["values"]
    verdict = cell["verdict"]
    gaps = np.subtract(*(cell["models"][m]["crps"]["values"] for m in ("joint", "normal")))
    means = {name: each["crps"]["mean"] for name, each in cell["models"].items()}
    assert verdict["rival"] == "normal" != min(means, key=means.get)
    assert verdict["excess"] == pytest.approx(gaps.mean())
    assert verdict["as_good"] == (gaps.mean() <= gaps.std(ddof=1) / np.sqrt(2))
    assert (tmp_path / "out" / "regression.png").stat().st_size > 10_000
    assert not list((tmp_path / "out").glob("*.jsonl"))


def mean_by(monkeypatch, name, scale=1.0):
    """A method whose normal law has the mean of least squares, and its spread times a scale."""

    def fit(training):
        x, y, _ = training.arrays
        slope = np.linalg.lstsq(x, y)[0]
        std = scale * (y - x @ slope).std()
        return Answers(lambda x: NormalLaw(x @ slope, np.full(len(x), std)))

    monkeypatch.setitem(METHODS, name, Method(name, "", fit, has_density=True))


def table_target(data):
    return np.loadtxt(data / "yacht" / "data.txt")[:, 2]


def test_a_study_of_methods_goes_on_after_those_that_have_ended(data, tmp_path):
    """By the file of an earlier run, whose last line was cut; here all had ended."""
    out = tmp_path / "out"
    out.mkdir()
    options = regression.RegressionOptions(data, ("yacht",), 2, ("normal",), 1)
    scores = dict.fromkeys(SCORES, 1.0)
    lines = [json.dumps([["yacht/normal", 160, k], {**scores, "crps": 7.0 + k}]) for k in (0, 1)]
    head = json.dumps(study.origin(options.judge()))
    (out / "regression-draws.jsonl").write_text("\n".join([head, *lines, lines[0][:20]]))
    result = regression.STUDY.run(options, out, overwrite=False, progress=ProgressLines())
    assert result["cells"][0]["models"]["normal"]["crps"]["values"] == [7.0, 8.0]
    assert result["machine"]["cores"] > 0
    assert not (out / "regression-draws.jsonl").exists()


def test_the_draws_of_a_study_depend_on_its_tables(data):
    judge = regression.RegressionOptions(data, ("yacht",), 2, ("normal",), 1).judge()
    before = study.origin(judge)
    (data / "yacht" / "notes.md").write_text("not read")
    assert study.origin(judge) == before
    (data / "yacht" / "index_test_1.txt").write_text("3\n")
    assert study.origin(judge) != before


def test_what_the_study_of_regression_refuses(data):
    with pytest.raises(DataError, match="give the folder"):
        regression.RegressionOptions()
    with pytest.raises(DataError, match=r"index_test_19.txt is missing"):
        regression.RegressionOptions(data, ("yacht",))
    with pytest.raises(DataError, match="scenarios must be among"):
        regression.RegressionOptions(data, ("boat",))
    for words, message in (
        (["regression", "--rows", "100"], "takes its tables as they are"),
        (["laws", "--methods", "joint"], "--methods is for"),
        (["truth", "--splits", "2"], "--splits is for"),
        (["pendulum", "--transitions", "t", "--methods", "joint"], "--transitions is for pendulum"),
        (["pendulum", "--transitions", "t", "--splits", "2"], "--transitions is for pendulum"),
        (["pendulum", "--transitions", "t", "--data", "."], "--transitions is for pendulum"),
    ):
        done = CliRunner().invoke(beside, ["study", *words])
        assert done.exit_code == 2
        assert message in done.output


def test_training_rows_are_plain_values(table):
    training = comparison.training_rows(open_sample(*table), 50, 1, 0)
    assert isinstance(training, Training)
    x, y, weights = training.arrays
    assert (x.shape, y.shape, weights) == ((50, 2), (50,), None)
