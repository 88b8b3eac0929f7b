"""Tests of independence and of equal laws, beside dense forms, permutations and their level."""

import json

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from conftest import write_store
from scipy import stats
from test_reads import opened

from benchmarks import power
from benchmarks.__main__ import cli as beside
from cme_dask import independence_test, kernels, open_sample, two_sample_test
from cme_dask.cli import cli
from cme_dask.errors import DataError, StoreError
from cme_dask.estimators import hypotheses
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.independence import (
    centred_spectrum,
    covariance_terms,
    difference_terms,
    mixture_pvalue,
    mixture_tail,
    sign_flip_pvalue,
)
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.fit import sample_rows

KERNEL = kernels.Gaussian(0.8)
COMPLETE = {"tol": 1e-13, "max_rank": 1000}
"""A basis of all rows, to rounding."""


def hsic(x, y, w):
    """Sum of the entries of the centred and weighted Gram matrices' product."""
    centre = np.eye(len(w)) - w
    K, L = (centre @ KERNEL(z, z) @ centre.T for z in (x, y))
    return w @ (K * L) @ w


def mmd(a, b, v, w):
    signed, rows = np.concatenate([v, -w]), np.concatenate([a, b])
    return signed @ KERNEL(rows, rows) @ signed


def waves(n, strength, seed, columns=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, columns))
    return x, strength * np.sin(2.0 * x[:, :1]) + rng.normal(size=(n, 1))


def shares(w):
    return w / w.sum()


# Statistics and null laws


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", ["auto", "bootstrap"])
def test_statistics_are_those_of_dense_matrices(weighted, method):
    x, y = waves(120, 0.7, 0)
    w = np.random.default_rng(1).exponential(size=120) if weighted else np.ones(120)
    given = w if weighted else None
    result = independence_test(
        x, y, weights=given, kernel_x=KERNEL, kernel_y=KERNEL, method=method, **COMPLETE
    )
    assert result.statistic == pytest.approx(hsic(x, y, shares(w)), rel=1e-10)
    a, b, v = x[:70], x[70:] + 0.4, w[:70]
    result = two_sample_test(
        open_sample(a, weights=v if weighted else None), b, kernel=KERNEL, method=method, **COMPLETE
    )
    assert result.statistic == pytest.approx(mmd(a, b, shares(v), np.full(50, 0.02)), rel=1e-10)
    assert result.method == ("bootstrap" if weighted else method.replace("auto", "chi2"))
    assert result.rows == (70, 50)
    assert result.passes == 1
    statistic, pvalue = result
    assert (statistic, pvalue) == (result.statistic, result.pvalue)


def test_p_values_and_means_are_those_of_permutations():
    rng = np.random.default_rng(2)
    x, y = waves(100, 0.5, 3)
    result = independence_test(x, y, kernel_x=KERNEL, kernel_y=KERNEL, **COMPLETE)
    w = np.full(100, 0.01)
    permuted = np.array([hsic(x, y[rng.permutation(100)], w) for _ in range(800)])
    centre = np.eye(100) - 0.01
    traces = [np.trace(centre @ KERNEL(z, z)) for z in (x, y)]
    assert result.null_mean == pytest.approx(traces[0] * traces[1] / 100**2 / 99, rel=1e-10)
    share = (permuted >= result.statistic).mean()
    assert 0.005 < share < 0.2
    assert result.pvalue == pytest.approx(share, abs=0.02)
    by_signs = independence_test(x, y, kernel_x=KERNEL, kernel_y=KERNEL, method="bootstrap")
    assert by_signs.pvalue == pytest.approx(share, abs=0.03)


def test_two_samples_are_rows_with_a_label():
    """The covariance of features and a label is q (1 - q) times the difference of means."""
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(90, 2)), rng.normal(0.3, 1.0, size=(60, 2))
    rows, label = np.vstack([a, b]), np.repeat([0.0, 1.0], [90, 60])
    both = two_sample_test(a, b, kernel=KERNEL, **COMPLETE)
    one = independence_test(rows, label, kernel_x=KERNEL, kernel_y=kernels.Linear(), **COMPLETE)
    assert one.statistic == pytest.approx((0.4 * 0.6) ** 2 * both.statistic, rel=1e-10)
    assert one.pvalue == pytest.approx(both.pvalue, rel=0.02)
    assert both.pvalue < 0.05


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 100, 3000])
def test_tails_of_equal_weights_are_those_of_chi_squares(freedom):
    for tail in (1 - 1e-6, 0.99, 0.5, 0.05, 1e-3, 1e-10, 1e-100):
        value = stats.chi2.isf(tail, freedom)
        result = mixture_tail(np.full(freedom, 0.3), 0.3 * value)
        assert result == pytest.approx(tail, rel=1e-9)


def test_tails_of_a_mixture():
    """Pairs of equal weights are exponential variables, whose sum has a closed form."""
    pairs = 0.5 ** np.arange(6)
    rates = 1.0 / (2.0 * pairs)
    others = [np.delete(rates, i) for i in range(6)]
    factors = np.array([np.prod(o / (o - r)) for o, r in zip(others, rates, strict=True)])
    for value in (0.1, 2.0, 6.0, 20.0, 80.0):
        expected = factors @ np.exp(-rates * value)
        result = mixture_tail(np.repeat(pairs, 2), value)
        assert result == pytest.approx(expected, rel=1e-9, abs=1e-14)
    weights = np.outer(np.arange(1.0, 61.0) ** -2, np.arange(1.0, 61.0) ** -2).ravel()
    draws = np.random.default_rng(0).chisquare(1, size=(4000, len(weights))) @ weights
    for value in np.quantile(draws, [0.1, 0.5, 0.95]):
        assert mixture_tail(weights, value) == pytest.approx((draws > value).mean(), abs=0.025)
    assert mixture_tail(weights, -1.0) == 1.0


# Level and power


def null_sums(seed, n=60, columns=1, n_folds=12, strength=0.0, used=None):
    """Moments of a small table in the basis of a fixed grid, with rows in some of the folds."""
    x, y = waves(n, strength, seed, columns)
    blocks = (FeatureBlock(GRIDS[columns], tuple(f"x{i}" for i in range(columns))),)
    blocks += (FeatureBlock(GRIDS[1], ("y0",)),)
    folds = (np.arange(n) % (used or n_folds)).astype(np.uint8)
    return strip_moments(MomentReduction(blocks, n_folds), (x, y), None, folds)


GRIDS = {
    1: NewtonBasis.from_points(KERNEL, np.linspace(-3, 3, 13)[:, None]),
    3: NewtonBasis.from_points(KERNEL, np.random.default_rng(9).normal(size=(40, 3))),
}


def independence_pvalues(seed, **options):
    sums = null_sums(seed, **options)
    mean, terms = sums.means(), covariance_terms(sums)
    statistic = sums.n_rows * (terms.sum(axis=0) ** 2).sum()
    spectra = [centred_spectrum(mean, variable) for variable in "xy"]
    return mixture_pvalue(statistic, spectra, sums.n_rows), sign_flip_pvalue(terms, 0, 0)


def two_sample_pvalues(seed, **options):
    first = null_sums(2 * seed, **options)
    second = null_sums(2 * seed + 1, **options | {"n": 40})
    terms = difference_terms(first, second)
    statistic = 60 * 40 / 100 * (terms.sum(axis=0) ** 2).sum()
    spectra = [centred_spectrum((first + second).means(), "x")]
    return mixture_pvalue(statistic, spectra, 100), sign_flip_pvalue(terms, 0, 0)


@pytest.mark.parametrize("columns", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pvalues", [independence_pvalues, two_sample_pvalues])
def test_p_values_are_uniform_under_the_null_hypothesis(pvalues, columns):
    tables = 200
    drawn = np.array([pvalues(seed, columns=columns) for seed in range(tables)])
    for method in drawn.T:
        level = (method < 0.05).mean()
        assert level == pytest.approx(0.05, abs=3.0 * np.sqrt(0.05 * 0.95 / tables))
        assert stats.kstest(method, "uniform").pvalue > 1e-3


@pytest.mark.slow
def test_a_small_sample_of_few_folds_keeps_its_level():
    """Terms of a large sample must not share the error of the small one's mean."""
    tables, pvalues = 300, []
    for seed in range(tables):
        first = null_sums(2 * seed, n=600, columns=3, n_folds=60)
        second = null_sums(2 * seed + 1, n=60, columns=3, n_folds=60, used=6)
        pvalues.append(sign_flip_pvalue(difference_terms(first, second), 399, 0))
    level = (np.array(pvalues) < 0.05).mean()
    assert level < 0.05 + 3.0 * np.sqrt(0.05 * 0.95 / tables)
    few = null_sums(1, n=120, n_folds=60, used=5)
    for pair in ((null_sums(0, n_folds=60), few), (few, null_sums(0, n_folds=60))):
        with pytest.raises(DataError, match="6 folds with rows in each of the two samples, got"):
            difference_terms(*pair)


def test_power_rises_with_dependence():
    rejected = [
        [np.array(independence_pvalues(seed, strength=strength)) < 0.05 for seed in range(60)]
        for strength in (0.0, 0.5, 1.0)
    ]
    weak, middle, strong = np.mean(rejected, axis=1)
    assert (weak < 0.15).all()
    assert (middle > weak + 0.1).all()
    assert (strong > middle + 0.1).all()


def test_signs_of_groups_hold_where_rows_are_not_independent():
    """Rows that come eight times: as independent rows nearly every table would be significant."""
    alone, grouped = [], []
    for seed in range(12):
        x, y = (np.repeat(z, 8, axis=0) for z in waves(60, 0.0, seed))
        group = np.repeat(np.arange(60), 8)
        options = {"kernel_x": KERNEL, "kernel_y": KERNEL, "n_folds": 14}
        alone.append(independence_test(x, y, **options).pvalue)
        sample = open_sample(x, y, group=group).fold_by("group")
        result = independence_test(sample, **options)
        assert result.method == "bootstrap"
        grouped.append(result.pvalue)
    assert np.mean(np.array(alone) < 0.05) > 0.7
    assert np.mean(np.array(grouped) < 0.05) < 0.3


def test_pivots_are_drawn_from_both_samples_by_their_sizes():
    """Else a small sample would have many pivots, at which its kernel functions are complete."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1200, 1))
    a, b = (
        sample_rows(open_sample(part), 300, 0, RunOptions("synchronous").executor())[0]
        for part in (rows[:200], rows[200:])
    )
    drawn = [hypotheses._both(a, b, (200, 1000), 300, seed) for seed in range(20)]
    shares = [np.isin(each.parts[0], rows[:200]).mean() for each in drawn]
    assert np.mean(shares) == pytest.approx(1 / 6, abs=0.02)
    assert all(len(each) == 300 and len(set(each.index)) == 300 for each in drawn)
    whole = hypotheses._both(a, b, (200, 1000), 4000, 0)
    assert np.isin(rows[:200], whole.parts[0]).all()


# Passes


def test_chunks_and_schedulers_do_not_matter(tmp_path):
    x, y = waves(9000, 0.1, 5)
    results = {"chi2": set(), "bootstrap": set()}
    for chunk_rows, scheduler in ((700, "synchronous"), (5000, "threads"), (9000, "processes")):
        path = tmp_path / f"{chunk_rows}.zarr"
        write_store(path, x, y, chunk_rows=chunk_rows)
        options = {"scheduler": scheduler, "sample_size": 500, "n_folds": 16}
        results["bootstrap"].add(
            tuple(two_sample_test(path, x[:4000] + 0.01, method="bootstrap", **options))
        )
        if scheduler != "processes":  # which take seconds to start
            results["chi2"].add(tuple(independence_test(path, method="chi2", **options)))
    assert list(map(len, results.values())) == [1, 1]


def test_each_row_of_both_samples_is_read_once(tmp_path):
    x, y = waves(20_000, 0.2, 6)
    stores = []
    for name, rows in (("a", slice(12_000)), ("b", slice(12_000, None))):
        write_store(tmp_path / name, x[rows], y[rows], chunk_rows=4096)
        stores.append(opened(tmp_path / name))
    (first, a), (second, b) = stores
    result = independence_test(a, sample_size=1000)
    assert result.passes == 1
    for name in ("x", "y"):
        assert set(first.chunks(name).values()) == {1}
    two_sample_test(a, b, variable="y", sample_size=1000)
    assert set(first.chunks("y").values()) == {2}
    assert set(second.chunks("y").values()) == {1}
    assert not second.chunks("x")


def test_an_interrupted_test_goes_on_where_it_was(tmp_path):
    a, b = (waves(n, 0.0, seed)[0] for n, seed in ((20_000, 10), (9000, 11)))
    options = {"scheduler": "synchronous", "sample_size": 500}
    expected = two_sample_test(a, b, **options)
    options["checkpoint"] = tmp_path / "run"

    def interrupt(event):
        if event.rows_total == 9000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two_sample_test(a, b, progress=interrupt, **options)
    with pytest.raises(StoreError, match="values of x of sample 2"):
        two_sample_test(a, b + 1.0, **options)
    again = two_sample_test(a, b, **options)
    assert tuple(again) == tuple(expected)
    assert again.reports[0].resumed_strips == 5
    write_store(tmp_path / "s", a, a)
    words = ["independence", str(tmp_path / "s"), "--checkpoint", str(tmp_path / "cli")]
    done = CliRunner().invoke(cli, ["test", *words])
    assert done.exit_code == 0
    assert not (tmp_path / "cli").exists()


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: independence_test(x), "needs rows of x and of y"),
        (lambda x: independence_test(x[:1], x[:1]), "at least 2 rows are needed, got 1"),
        (lambda x: two_sample_test(x, x[:1]), "at least 2 rows are needed, got 1"),
        (lambda x: two_sample_test(x, np.hstack([x, x])), "different columns, x0 and x0, x1"),
        (lambda x: two_sample_test(x, x, variable="y"), "there are only rows of x"),
        (lambda x: two_sample_test(x, np.where(x > 1.0, np.nan, x)), "NaN"),
        (lambda x: independence_test(x, np.where(x > 1.0, np.inf, x)), "inf"),
        (lambda x: independence_test(x, x, method="bootstrap", n_folds=5), "6 folds .* got 5"),
        (lambda x: independence_test(x, x, weights=np.ones(50), method="chi2"), "of weighted rows"),
        (lambda x: independence_test(x, np.ones(50), kernel_y=KERNEL), "y does not vary"),
        (
            lambda x: independence_test(
                np.full(50, 3.3), x, kernel_x=KERNEL, weights=np.linspace(1.0, 2.0, 50)
            ),
            "x does not vary",
        ),
        (lambda x: independence_test(x, x, method="permutation"), "method must be one of"),
        (lambda x: independence_test(x, x, tol=0.0), "tol must lie between 0 and 1"),
        (lambda x: independence_test(x, x, n_resamples=0), "n_resamples must be an integer"),
        (lambda x: independence_test(x, x, kernel_x="gaussian"), "kernel_x must be a kernel"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(DataError, match=message):
        call(np.random.default_rng(0).normal(size=(50, 1)))


def test_samples_may_number_labels_in_another_order_and_lack_some():
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)

    def table(labels):
        return pd.DataFrame({"wind": rng.choice(labels, 60), "speed": rng.normal(size=60)})

    def numbered(frame, labels):
        return frame.assign(wind=pd.Categorical(frame["wind"], categories=labels))

    a, b = table(["N", "S"]), table(["S", "E"])
    every = ["E", "N", "S"]
    for method in ("chi2", "bootstrap"):
        expected = two_sample_test(numbered(a, every), numbered(b, every), method=method)
        given = two_sample_test(numbered(a, ["S", "N"]), numbered(b, ["E", "S"]), method=method)
        assert tuple(given) == pytest.approx(tuple(expected))
        assert expected.pvalue < 1e-3
    with pytest.raises(DataError, match="'wind' holds labels in the first sample alone"):
        two_sample_test(a, b.assign(wind=1.0))
    for method in ("chi2", "bootstrap"):
        same = two_sample_test(a, a[["speed", "wind"]], method=method)
        assert tuple(same) == pytest.approx((0.0, 1.0), abs=1e-15)


# The command


def test_the_command_gives_what_python_gives(tmp_path):
    x, y = waves(3000, 0.2, 7)
    write_store(tmp_path / "a", x, y)
    write_store(tmp_path / "b", x[:1000] + 0.05, y[:1000])

    def printed(*words):
        done = CliRunner().invoke(cli, ["test", *map(str, words)])
        assert done.exit_code == 0, done.output
        return done.stdout

    a, b = tmp_path / "a", tmp_path / "b"
    result = json.loads(printed("independence", a, "--kernel-y", "gaussian:0.8", "--json"))
    expected = independence_test(a, kernel_y=KERNEL)
    assert (result["statistic"], result["pvalue"]) == tuple(expected)
    assert result["ranks"] == list(expected.ranks)
    words = ("two-sample", a, b, "--y", "y0", "--method", "bootstrap", "--folds", 20, "--json")
    expected = two_sample_test(a, b, variable="y", method="bootstrap", n_folds=20)
    result = json.loads(printed(*words))
    assert (result["statistic"], result["pvalue"]) == tuple(expected)
    assert "expected under the null hypothesis" in printed("independence", a)
    for words, message in (
        (("two-sample", a, b, "--x", "x0", "--y", "y0"), "one of the two"),
        (("independence", a, "--kernel-x", "learned"), "tests learn no kernels"),
        (("independence", a, "--method", "bootstrap", "--folds", "3"), "raise --folds"),
        (("two-sample", a, tmp_path / "c"), "does not exist"),
    ):
        done = CliRunner().invoke(cli, ["test", *map(str, words)])
        assert done.exit_code == 2
        assert message in done.stderr


def test_weights_of_a_zarr_store_make_the_bootstrap_the_method(tmp_path):
    x, y = waves(2000, 0.0, 8)
    weights = np.random.default_rng(0).uniform(size=2000)
    write_store(tmp_path / "s", x, y, weights)
    result = independence_test(zarr.open_group(tmp_path / "s", mode="r"))
    assert result.method == "bootstrap"
    assert result.pvalue > 0.01


def test_the_study_of_power_computes_what_the_tests_do():
    x, y = waves(300, 0.2, 4)
    given = {"kernel_x": power.KERNEL, "kernel_y": power.KERNEL, "n_resamples": power.RESAMPLES}
    pvalues = power.pvalues([x, y], [(x, y)], all_pairs=True)
    for method in ("chi2", "bootstrap"):
        expected = independence_test(x, y, method=method, **given).pvalue
        assert pvalues[method] == pytest.approx(expected, rel=0.02, abs=0.005)
    expected = independence_test(x, y, **given, **COMPLETE).pvalue
    assert pvalues["all pairs"] == pytest.approx(expected, rel=1e-4)
    halves = [(x[:150],), (x[150:],)]
    expected = two_sample_test(x[:150], x[150:], kernel=power.KERNEL).pvalue
    assert power.pvalues([x], halves, all_pairs=False)["chi2"] == pytest.approx(expected, rel=0.02)


@pytest.mark.usefixtures("quick_studies")
def test_the_study_of_power(tmp_path, monkeypatch):
    monkeypatch.setattr(power, "TABLES", 8)
    monkeypatch.setattr(power, "EFFECTS", (0.0, 12.0))
    command = ["study", "power", "--rows", "60", "--seeds", "1", "--out", str(tmp_path / "power")]
    result = CliRunner().invoke(beside, command)
    assert result.exit_code == 0, result.output
    study = json.loads((tmp_path / "power" / "power.json").read_text())
    assert [verdict["scenario"] for verdict in study["verdicts"]] == list(power.SCENARIOS)
    for cell in study["cells"]:
        assert list(cell["models"]) == list(power.SCENARIOS[cell["scenario"]])
        for shares in cell["models"].values():
            assert shares["0"]["mean"] < 0.5 < shares["12"]["mean"]
    assert abs(study["verdicts"][0]["lost_power"]) < 0.2
    assert "Of 8 tables" in result.output
