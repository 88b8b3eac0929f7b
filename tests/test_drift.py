"""Drift reports and changed priors, beside dense forms, and fits under covariate shift."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import write_store
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.svm import SVR
from test_reads import opened

from benchmarks import drift as study
from benchmarks.__main__ import cli as beside
from cme_dask import (
    ConditionalMeanEmbedding,
    JointDistribution,
    Tuning,
    drift_report,
    kernels,
    load,
    open_sample,
    operators,
)
from cme_dask.cli import cli
from cme_dask.errors import DataError
from cme_dask.estimators import tuned
from cme_dask.numerics.drift import adjusted

HERE = {"scheduler": "synchronous"}
PLAIN = {"residual": False, "calibration": False, "tol": 1e-3}


def waves(n, seed, shift=0.0, slope=0.0, noise=0.5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    x[:, 0] += shift
    return x, np.sin(2.0 * x[:, :1]) + slope * x[:, 1:] + noise * rng.normal(size=(n, 1))


def fitted(x, y, **options):
    kernel_x, kernel_y = kernels.Gaussian(1.5), kernels.Gaussian(1.0)
    estimator = JointDistribution(kernel_x=kernel_x, kernel_y=kernel_y, **PLAIN, **options)
    return estimator.fit(x, y, **HERE)


@pytest.fixture(scope="module")
def fit():
    return fitted(*waves(600, 0))


def contents(report):
    return {key: value for key, value in report.to_dict().items() if key != "seconds"}


# Beside dense forms


def test_distances_are_those_of_the_rows(fit):
    model, (x, y), (u, v) = fit.model_, waves(600, 0), waves(350, 1, shift=0.3)
    report = drift_report(fit, u, v, **HERE)
    phi, psi = model.x.basis.newton, model.y.basis.newton
    for law, basis, before, after in ((report.x, phi, x, u), (report.y, psi, y, v)):
        distance = ((basis(before).mean(axis=0) - basis(after).mean(axis=0)) ** 2).sum()
        assert law.statistic == pytest.approx(distance, rel=1e-8)

    # Residuals of one regression on both sets of rows.
    def features(x, y):
        shift = model.moment_sums().shifts[1][:1]
        return np.hstack([phi(x), np.ones((len(x), 1))]), np.hstack([psi(y), y - shift])

    (a, f), (b, g) = features(x, y), features(u, v)
    both, target = np.vstack([a, b]) / np.sqrt(950), np.vstack([f, g]) / np.sqrt(950)
    old, new = a.T @ a / 950, b.T @ b / 950
    inverse = np.linalg.inv(both.T @ both + np.trace(both.T @ both) / 950 * np.eye(both.shape[1]))
    slope = inverse @ both.T @ target
    here, there = a.T @ (f - a @ slope) / 950, b.T @ (g - b @ slope) / 950
    harmonic = old @ inverse @ new
    lam, V = np.linalg.eigh((harmonic + harmonic.T) / 2.0)
    lam = np.maximum(lam, 0.0)
    root = (V / np.sqrt(lam + 0.01 * lam.sum())) @ V.T
    difference = root @ (old @ inverse @ there - new @ inverse @ here)
    expected = (difference[:, :-1] ** 2).sum()
    assert report.y_given_x.statistic == pytest.approx(expected, rel=1e-8)

    # The density ratio, and its effective sample size.
    ratio = report._ratio
    N = phi(x)
    gap = phi(u).mean(axis=0) - N.mean(axis=0)
    slope = np.linalg.solve(N.T @ N / 600 + ratio.reg * np.eye(N.shape[1]), gap)
    values = 1.0 + N @ slope
    assert report.effective == pytest.approx(values.mean() ** 2 / (values**2).mean(), rel=1e-8)
    np.testing.assert_allclose(report.ratio()(x), np.maximum(values, 0.0), atol=1e-8)

    # Means and deviations of the columns, the means that the model expects, and its errors.
    for column, j in zip(report.columns, (0, 1), strict=False):
        assert column.before == pytest.approx((x[:, j].mean(), x[:, j].std()), rel=1e-9)
        assert column.after == pytest.approx((u[:, j].mean(), u[:, j].std()), rel=1e-9)
    (mean,) = report.expectations
    predicted = model.expect("y0", u)
    assert mean.before == pytest.approx(y.mean(), abs=1e-10)
    assert mean.expected == pytest.approx(predicted.mean(), rel=1e-9)
    assert mean.after == pytest.approx(v.mean(), rel=1e-9)
    error = np.sqrt(((v[:, 0] - predicted) ** 2).mean())
    assert mean.error_after == pytest.approx(error, rel=1e-9)
    assert report.rows == (600, 350)


def test_drift_of_x_of_y_and_of_y_given_x_is_told_apart(fit):
    same = drift_report(fit, *waves(900, 3), **HERE)
    laws = same.x, same.y, same.y_given_x, *same.columns
    assert min(law.pvalue for law in laws) > 0.001
    assert same.effective > 0.8

    of_x = drift_report(fit, *waves(900, 4, shift=0.7), **HERE)
    assert of_x.x.pvalue < 1e-10
    assert of_x.y_given_x.pvalue > 0.01
    assert [column.name for column in of_x.columns if column.moved and column.variable == "x"] == [
        "x0"
    ]
    (mean,) = of_x.expectations
    assert abs(mean.after - mean.expected) < 4.0 * mean.std_error + 0.05

    of_y = drift_report(fit, *waves(900, 5, slope=1.0), **HERE)
    assert of_y.x.pvalue > 0.01
    assert of_y.y_given_x.pvalue < 0.01
    assert of_y.expectations[0].pvalue < 0.01
    assert of_y.expectations[0].error_after > 1.3 * of_y.expectations[0].error_before


def test_rows_without_y_say_what_they_can_not_tell(fit):
    report = drift_report(fit, waves(300, 6, shift=0.5)[0], **HERE)
    assert report.y is None
    assert report.y_given_x is None
    assert report.expectations[0].after is None
    assert "no new rows of y" in report.notes[0]


@pytest.fixture(scope="module")
def averaged():
    tuning = Tuning(evaluations=2, finalists=2, averaged=2, rows=400, max_rank=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "_NEAR", 10.0)  # the second one counts, too
        return JointDistribution(tuning=tuning).fit(*waves(600, 0), **HERE)


def test_a_mean_of_several_is_compared_by_the_moments_of_its_best_member(averaged, tmp_path):
    model, (u, v) = averaged.model_, waves(900, 7, slope=1.0)
    assert len(model.x.ranks) == 2
    sums = model.moment_sums()
    assert sums.ranks == (model.x.ranks[0], model.y.ranks[0])
    x, y = waves(600, 0)
    np.testing.assert_allclose(sums.means().function_means("y"), y.mean(axis=0), atol=1e-12)
    phi = model.x.basis.newton.parts[0]
    np.testing.assert_allclose(sums.means().means["x"], phi(x).mean(axis=0), atol=1e-10)
    same = drift_report(averaged, *waves(900, 6), **HERE)
    assert min(law.pvalue for law in (same.x, same.y, same.y_given_x)) > 0.001
    report = drift_report(averaged, u, v, **HERE)
    assert report.notes == ()
    assert report.x.pvalue > 0.01
    assert report.y_given_x.pvalue < 0.01
    averaged.save(tmp_path / "m.zarr")
    assert contents(drift_report(load(tmp_path / "m.zarr"), u, v, **HERE)) == contents(report)


def test_embeddings_are_compared_by_their_moments(fit, tmp_path):
    kernel_x, kernel_y = kernels.Gaussian(1.5), kernels.Gaussian(1.0)
    options = {"kernel_x": kernel_x, "kernel_y": kernel_y, "tol": 1e-3, "reg": 1e-3}
    embedding = ConditionalMeanEmbedding(**options).fit(*waves(600, 0), **HERE)
    new = waves(350, 1, shift=0.7)
    report, joint = (drift_report(each, *new, **HERE) for each in (embedding, fit))
    for name in ("x", "y", "y_given_x"):  # the same bases and moments
        assert getattr(report, name) == pytest.approx(getattr(joint, name), rel=1e-6)
    assert report.effective == pytest.approx(joint.effective, rel=1e-6)
    assert [column.moved for column in report.columns] == [True, False, True]
    for column, other in zip(report.columns, joint.columns, strict=True):
        assert column.before + column.after == pytest.approx(other.before + other.after)
        assert column.values == ()
    (mean,) = report.expectations
    assert mean.expected == pytest.approx(embedding.predict(new[0]).mean(), rel=1e-9)
    assert "by their means alone" in report.notes[0]
    embedding.save(tmp_path / "m.zarr")
    assert contents(drift_report(load(tmp_path / "m.zarr"), *new, **HERE)) == contents(report)
    report.plot(tmp_path / "p.png")


def test_columns_of_labels_are_compared_by_their_shares():
    rng = np.random.default_rng(0)
    pandas = pytest.importorskip("pandas")

    def table(n, share):
        kind = np.where(rng.uniform(size=n) < share, "a", "b")
        return pandas.DataFrame({"speed": rng.normal(size=n), "kind": kind})

    x = table(500, 0.3)
    fit = JointDistribution(kernel_y=kernels.Gaussian(1.0), max_rank=40, **PLAIN)
    fit.set_params(kernel_x="median").fit(x, rng.normal(size=500), **HERE)
    report = drift_report(fit, table(400, 0.6), **HERE)
    speed, kind = report.columns
    assert kind.moved
    assert not speed.moved
    assert kind.before is None
    change = dict(zip(kind.values, kind.witness, strict=True))
    assert change["a"] == pytest.approx(0.3, abs=0.12)
    assert change["b"] == pytest.approx(-change["a"])


def test_holm():
    values = adjusted(np.array([0.01, 0.04, 0.03, 0.005]))
    np.testing.assert_allclose(values, [0.03, 0.06, 0.06, 0.02])


# Where it runs


def test_chunks_schedulers_and_the_command_make_no_difference(fit, cluster, tmp_path):
    x, y = waves(5000, 8, shift=0.2)
    expected = contents(drift_report(fit, x, y, **HERE))
    write_store(tmp_path / "new.zarr", x, y, chunk_rows=371)
    store, group = opened(tmp_path / "new.zarr")
    assert contents(drift_report(fit, open_sample(group), scheduler="threads")) == expected
    assert {*store.chunks("x").values(), *store.chunks("y").values()} <= {1, 2}
    for scheduler in ("processes", cluster):
        report = drift_report(fit, tmp_path / "new.zarr", scheduler=scheduler)
        assert contents(report) == expected
    fit.save(tmp_path / "m.zarr")
    assert contents(drift_report(load(tmp_path / "m.zarr"), x, y, **HERE)) == expected

    def run(*words):
        paths = map(str, (tmp_path / "m.zarr", tmp_path / "new.zarr"))
        return CliRunner().invoke(cli, ["drift", *paths, *map(str, words)])

    done = run("--json", "--picture", tmp_path / "p.png", "--checkpoint", tmp_path / "run")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert {key: printed[key] for key in expected} == json.loads(json.dumps(expected))
    assert (tmp_path / "p.png").stat().st_size > 10_000
    text = run().stdout
    for words in ("y given x", "effective sample size", "Columns by themselves", "Means of y"):
        assert words in text


def test_dependent_or_weighted_rows_are_judged_by_the_bootstrap(fit):
    x, y = waves(600, 9)
    group = np.repeat(np.arange(60), 10)
    sample = open_sample(x, y, group=group).fold_by("group")
    assert drift_report(fit, sample, **HERE).method == "bootstrap"
    weighted = drift_report(fit, x, y, weights=np.linspace(0.5, 1.5, 600), **HERE)
    assert weighted.method == "bootstrap"
    assert weighted.x.pvalue > 0.01
    with pytest.raises(DataError, match="of weighted rows"):
        drift_report(fit, x, y, weights=np.linspace(0.5, 1.5, 600), method="chi2", **HERE)


def test_new_rows_of_few_groups_need_independence(fit):
    x, y = waves(200, 9)
    sample = open_sample(x, y, group=np.arange(200) // 40).fold_by("group")
    with pytest.raises(DataError, match="in each of the two samples, got 10 and 5: raise n_folds"):
        drift_report(fit, sample, **HERE)
    weights = np.linspace(0.5, 1.5, 600)
    rough = JointDistribution(
        kernel_x=kernels.Gaussian(1.5), kernel_y=kernels.Gaussian(1.0), n_folds=5, **PLAIN
    ).fit(*waves(600, 0), weights=weights, **HERE)
    with pytest.raises(DataError, match="got 5 and 16: fit again with n_folds of at least 6"):
        drift_report(rough, x, y, weights=weights[:200], **HERE)
    report = drift_report(fit, sample, method="chi2", **HERE)
    assert report.x.pvalue > 0.01
    assert report.y_given_x is None
    assert "y given x was not tested: the new rows lie in fewer than 6 folds" in report.notes[0]


def test_columns_of_groups_are_compared_by_folds_of_the_fit():
    """Rows that come 25 times: as independent rows nearly every column would have drifted."""

    def groups(seed):
        rng = np.random.default_rng(seed)
        x, y = (np.repeat(each, 25, axis=0) for each in waves(40, seed))
        x = x + 0.05 * rng.normal(size=x.shape)
        return open_sample(x, y, group=np.repeat(np.arange(40), 25)).fold_by("group")

    pvalues = []
    for seed in range(8):
        fit = fitted(groups(seed), None)
        report = drift_report(fit, groups(100 + seed), **HERE)
        assert "fold by groups or times: columns of numbers" in " ".join(report.notes)
        pvalues.append([column.pvalue for column in report.columns])
    assert (np.array(pvalues) < 0.05).mean() < 0.3


@pytest.mark.parametrize("constant", [0.0, 3.3, 1e7 + 0.1])
@pytest.mark.parametrize("method", ["chi2", "bootstrap"])
def test_a_column_that_does_not_vary_has_not_drifted(constant, method):
    (x, y), (u, v) = waves(300, 0), waves(300, 1)
    x[:, 1] = u[:, 1] = constant
    fit = JointDistribution(
        kernel_x=kernels.Gaussian([1.5, 1e9]), kernel_y=kernels.Gaussian(1.0), max_rank=20, **PLAIN
    ).fit(x, y, **HERE)
    report = drift_report(fit, u, v, method=method, **HERE)
    (column,) = [each for each in report.columns if each.name == "x1"]
    assert column.pvalue == 1.0
    u[:, 1] += 1.0
    (column,) = [
        each for each in drift_report(fit, u, v, method=method, **HERE).columns if each.name == "x1"
    ]
    assert column.moved


# Bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scenario", "air quality"], "needs the folder of its tables"),
        (["--data", "."], "lacks files PRSA_Data_STATION_*.csv.gz"),
    ],
)
def test_the_study_of_shift_refuses_a_folder_without_its_tables(
    tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "PRSA_Data_Shunyi_1.csv.gz").touch()  # one outside the city alone
    done = CliRunner().invoke(beside, ["study", "shift", *words, "--out", "out"])
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "out").exists()


def test_bad_input(fit):
    x, y = waves(200, 10)
    with pytest.raises(DataError, match="joint distribution, conditional mean embedding"):
        drift_report(ConditionalMeanEmbedding(kernel_x=kernels.Gaussian(1.0)), x, y)
    with pytest.raises(DataError, match="2"):
        drift_report(fit, x[:, :1], y)
    with pytest.raises(DataError, match="at least 30 rows"):
        drift_report(fit, x[:20], y[:20], **HERE)
    with pytest.raises(DataError, match="method"):
        drift_report(fit, x, y, method="permutation")
    without_rows = drift_report(fitted(x, y, support_size=0), x, y, **HERE)
    assert "by their means alone" in without_rows.notes[0]
    far = drift_report(fit, x + 5.0, y, **HERE)
    with pytest.raises(DataError, match="effective sample size"):
        far.ratio()


# Fits under covariate shift


def test_weights_of_the_ratio_make_the_fit_that_of_weighted_rows(fit):
    x, y = waves(600, 0)
    ratio = drift_report(fit, waves(500, 11, shift=0.8)[0], **HERE).ratio()
    given = open_sample(x, y, weights=ratio(x))
    options = {"kernel_x": kernels.Gaussian(1.5), "kernel_y": kernels.Gaussian(1.0), "reg": 1e-3}
    reweighted, direct, plain = (
        ConditionalMeanEmbedding(**options).fit(sample, **HERE)
        for sample in (open_sample(x, y).reweight(ratio), given, open_sample(x, y))
    )
    np.testing.assert_array_equal(reweighted.predict(x[:9]), direct.predict(x[:9]))
    assert abs(reweighted.predict(x[:9]) - plain.predict(x[:9])).max() > 1e-4
    with pytest.raises(DataError, match="has weights already"):
        given.reweight(ratio)
    with pytest.raises(DataError, match="weights are a function"):
        open_sample(x, y).reweight(lambda x: x)


# Other priors of x


@pytest.mark.parametrize("constraint", ["normalized", "coupling"])
def test_a_changed_prior_is_the_dense_bayes_rule(constraint):
    x, y = waves(300, 12)
    fit = fitted(x, y, constraint=constraint, reg=1e-3, max_rank=60)
    rng = np.random.default_rng(0)
    points, q = rng.normal(0.5, 0.7, size=(80, 2)), rng.uniform(size=80)
    q /= q.sum()
    changed = operators.change_prior(fit, points, weights=q)
    W = fit.conditional(points).weights()
    masses = q @ W
    law = changed.marginal()
    np.testing.assert_allclose(law.weights()[0], masses, atol=1e-12)
    np.testing.assert_allclose(law.mean(), q @ fit.conditional(points).mean(), rtol=1e-8)

    # The posterior of each row of the prior.
    at = y[:7]
    cells = fit.model_.y.cells.support.assign(at)
    shares = q[:, None] * W[:, cells] / masses[cells]
    posterior = changed.conditional(Y=at)
    assert (posterior.weights() >= 0.0).all()
    np.testing.assert_allclose(posterior.weights().sum(axis=1), 1.0, atol=1e-12)
    np.testing.assert_allclose(posterior.mean(), shares.T @ points, atol=1e-8)
    np.testing.assert_allclose(
        posterior.probability("x0 > 0.5"), shares.T @ (points[:, 0] > 0.5), atol=1e-8
    )
    # The mean of the posteriors is the prior.
    np.testing.assert_allclose(changed.joint.sum(axis=1), changed.prior.masses, atol=1e-14)
    np.testing.assert_allclose(changed.marginal("x").mean()[0], q @ points, atol=1e-10)
    # Marginal laws depend on no point, also where zeros are far from all rows.
    far = fitted(x + 50.0, y + 50.0, constraint=constraint, reg=1e-3, max_rank=60)
    far = operators.change_prior(far, points + 50.0)
    for marginal in (law, changed.marginal("x"), far.marginal(), far.marginal("x")):
        np.testing.assert_array_equal(marginal.effective_support(), [1.0])
    # Without a change of x, a coupling keeps the law of y.
    if constraint == "coupling":
        same = operators.change_prior(fit, x).marginal()
        np.testing.assert_allclose(same.weights()[0], fit.model_.masses, atol=1e-8)


def test_files_of_changed_priors_have_the_version_of_the_distribution():
    x, y = waves(300, 12)
    location = ExtraTreesRegressor(5, random_state=0)
    tuning = Tuning(rows=300, max_rank=20, evaluations=0, trees=())
    given = {"location": location, "residual": True, "kernel_y": "median", "tuning": tuning}
    fit = JointDistribution(**given).fit(x, y)
    assert fit.model_.to_state().schema_version == 4
    assert operators.change_prior(fit, x[:50]).to_state().schema_version == 4
    fit = JointDistribution(location=SVR(), kernel_y="median", tuning=tuning).fit(x, y)
    with pytest.raises(DataError, match="is a regressor"):
        operators.change_prior(fit, x[:50]).to_state()


def test_a_changed_prior_of_a_linear_gaussian_model(tmp_path):
    """Y = X + E: under X ~ N(1, 1/4), X given y is normal of mean 1 + (y - 1) / 2, variance 1/8."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6000, 1))
    y = x + 0.5 * rng.normal(size=x.shape)
    kernel = kernels.Gaussian(1.0)
    fit = JointDistribution(kernel_x=kernel, kernel_y=kernel, residual=True, calibration=False)
    fit.fit(x, y, **HERE)
    changed = operators.change_prior(fit, rng.normal(1.0, 0.5, size=(3000, 1)))
    law = changed.marginal()
    assert law.mean()[0] == pytest.approx(1.0, abs=0.05)
    assert law.var()[0] == pytest.approx(0.5, abs=0.08)
    at = np.array([[0.5], [1.0], [1.5]])
    posterior = changed.conditional(Y=at)
    np.testing.assert_allclose(posterior.mean(), 1.0 + (at[:, 0] - 1.0) / 2.0, atol=0.06)
    np.testing.assert_allclose(posterior.var(), 0.125, atol=0.03)
    changed.save(tmp_path / "m.zarr")
    again = load(tmp_path / "m.zarr")
    np.testing.assert_array_equal(again.conditional(Y=at).mean(), posterior.mean())
    np.testing.assert_array_equal(again.conditional(X=at).mean(), fit.conditional(at).mean())
    assert "3,000 rows" in repr(again)


def test_priors_from_stores_and_moved_residuals(tmp_path):
    x, y = waves(400, 13)
    fit = JointDistribution(
        kernel_x=kernels.Gaussian(1.5),
        kernel_y=kernels.Gaussian(1.0),
        residual=True,
        calibration=False,
        tol=1e-3,
    ).fit(x, y, **HERE)
    prior = waves(500, 14, shift=0.5)
    write_store(tmp_path / "prior.zarr", *prior, chunk_rows=37)
    from_rows, from_store = (
        operators.change_prior(fit, rows) for rows in (prior[0], tmp_path / "prior.zarr")
    )
    np.testing.assert_array_equal(from_rows.joint, from_store.joint)
    expected = fit.conditional(prior[0]).mean().mean()
    assert from_rows.marginal().mean()[0] == pytest.approx(expected, abs=0.05)
    with pytest.raises(DataError, match="fitted joint distribution"):
        operators.change_prior(prior, prior[0])
    with pytest.raises(DataError, match="one variable"):
        from_rows.conditional()
    with pytest.raises(DataError, match="variable must be"):
        from_rows.marginal("z")


# The study


@pytest.mark.usefixtures("quick_studies")
def test_the_study_of_drift(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "TABLES", 3)
    words = ["study", "drift", "--rows", "400", "--seeds", "1", "--out", str(tmp_path / "drift")]
    for name in ("no drift", "change of y given x"):
        words += ["--scenario", name]
    result = CliRunner().invoke(beside, words)
    assert result.exit_code == 0, result.output
    same, changed = json.loads((tmp_path / "drift" / "drift.json").read_text())["verdicts"]
    assert same["y_given_x"] < 0.5 < changed["y_given_x"]
    assert "Of 3 tables" in result.output
    assert (tmp_path / "drift" / "drift.png").stat().st_size > 10_000
