"""The study of truth: laws that are what they say, and distances that are what they say."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.integrate import quad
from scipy.stats import kstest, multivariate_normal, norm, poisson

from benchmarks import methods as study_of_methods
from benchmarks import study, truth
from benchmarks.__main__ import cli
from benchmarks.truth import TruthOptions, crps_of, excess_crps, kernel_log_density
from benchmarks.truths import TRUTHS
from cme_dask.errors import DataError
from cme_dask.estimators import peers

DISCRETE = ("rain", "counts")


@pytest.mark.parametrize("name", [name for name in TRUTHS if name not in DISCRETE])
def test_draws_have_the_quantiles(name):
    """The levels at which quantiles are what was drawn are uniform, by bisection."""
    law = TRUTHS[name]
    x, y = law.draw(400, 0)
    assert y.shape == (400, law.columns)
    assert np.array_equal(law.draw(400, 0)[1], y)
    assert not np.array_equal(law.draw(400, 1)[1], y)
    for j in range(law.columns):
        low, high = np.zeros((400, 1)), np.ones((400, 1))
        for _ in range(40):
            middle = 0.5 * (low + high)
            below = law.quantile(x, middle, j) < y[:, j : j + 1]
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        assert kstest(low[:, 0], "uniform").pvalue > 1e-3


@pytest.mark.parametrize("name", DISCRETE)
def test_atoms_have_their_probabilities(name):
    law, x = TRUTHS[name], np.array([[0.7]])
    levels = (np.arange(20_000)[None] + 0.5) / 20_000
    values = law.quantile(x, levels, 0)
    if name == "counts":
        rate = np.exp(0.5 + 0.8 * 0.7)
        for k in range(8):
            assert (values == k).mean() == pytest.approx(poisson.pmf(k, rate), abs=1e-4)
    else:
        dry = 1.0 / (1.0 + np.exp(0.5 + 0.7))
        assert (values == 0.0).mean() == pytest.approx(dry, abs=1e-4)
        assert values.mean() == pytest.approx((1.0 - dry) * 2.0 * np.exp(0.35), rel=2e-3)
    assert law.log_pdf is None


@pytest.mark.parametrize(
    "name", [name for name, law in TRUTHS.items() if law.log_pdf and law.columns == 1]
)
def test_densities_are_derivatives_of_levels(name):
    law = TRUTHS[name]
    x = law.draw(50, 0)[0]
    for level in (0.1, 0.45, 0.9):
        u, h = np.full((50, 1), level), 1e-6
        slope = (law.quantile(x, u + h, 0) - law.quantile(x, u - h, 0))[:, 0] / (2 * h)
        at = law.quantile(x, u, 0)
        np.testing.assert_allclose(law.log_pdf(x, at), -np.log(slope), atol=1e-6)


def test_five_columns_have_their_joint_density():
    law = TRUTHS["five"]
    x, y = law.draw(20_000, 0)
    half = np.full((len(x), 1), 0.5)
    mean = np.concatenate([law.quantile(x, half, j) for j in range(5)], axis=1)
    std = 0.3 + 0.2 * np.abs(x[:, :1])
    correlation = 0.5 + 0.5 * np.eye(5)
    for i in range(3):
        expected = multivariate_normal(mean[i], std[i] ** 2 * correlation).logpdf(y[i])
        assert law.log_pdf(x[i : i + 1], y[i : i + 1])[0] == pytest.approx(expected)
    seen = np.corrcoef(((y - mean) / std).T)
    np.testing.assert_allclose(seen, correlation, atol=0.03)


def test_excess_is_the_squared_distance_of_distribution_functions(rng):
    atoms, true = np.sort(rng.normal(size=(4, 7))), np.sort(rng.normal(size=(4, 11)))
    mine = excess_crps(atoms, true)
    for a, b, value in zip(atoms, true, mine, strict=True):
        # E|X - Y| - (E|X - X'| + E|Y - Y'|) / 2
        pairs = [np.abs(np.subtract.outer(*pair)).mean() for pair in ((a, b), (a, a), (b, b))]
        assert value == pytest.approx(pairs[0] - 0.5 * (pairs[1] + pairs[2]))
        assert crps_of(a[None])[0] == pytest.approx(0.5 * pairs[1])
    assert excess_crps(atoms, atoms) == pytest.approx(0.0)
    # Of quantiles of normal laws it is the integral.
    levels = np.array(peers.ATOMS)
    exact, _ = quad(lambda z: (norm.cdf(z) - norm.cdf(z, 0.3, 1.2)) ** 2, -9, 9)
    found = excess_crps(norm.ppf(levels)[None], norm.ppf(levels, 0.3, 1.2)[None])
    assert found[0] == pytest.approx(exact, rel=2e-3)
    assert crps_of(norm.ppf(levels)[None])[0] == pytest.approx(1 / np.sqrt(np.pi), rel=2e-3)


def test_kernel_estimates_are_means_of_kernels(rng):
    draws, y = rng.normal(size=(3, 40, 2)), rng.normal(size=(3, 2))
    mine = kernel_log_density(draws, y)
    for each, at, value in zip(draws, y, mine, strict=True):
        iqr = np.subtract(*np.quantile(each, [0.75, 0.25], axis=0))
        width = np.minimum(each.std(axis=0), iqr / 1.34) * (4 / (4 * 40)) ** (1 / 6)
        kernels = norm.pdf(at, each, width).prod(axis=1)
        assert value == pytest.approx(np.log(kernels.mean()))
    # Where most draws are equal the bandwidth is not zero, and far away the density is not, either.
    tied = np.where(np.arange(40) < 35, 0.0, np.linspace(-1, 1, 40))[None, :, None]
    width = 0.1 * tied.std() * (4 / (3 * 40)) ** 0.2
    expected = np.log(norm.pdf(0.0, tied[0], width).mean())
    assert kernel_log_density(tied, np.zeros((1, 1)))[0] == pytest.approx(expected)
    assert kernel_log_density(tied, np.full((1, 1), 1e9))[0] == truth.LEAST_LOG_DENSITY > -750.0
    many = norm.ppf((np.arange(4000) + 0.5) / 4000)[None, :, None]
    assert kernel_log_density(many, np.zeros((1, 1)))[0] == pytest.approx(norm.logpdf(0), abs=0.03)


@pytest.mark.usefixtures("quick_studies", "brief_search")
def test_the_study_of_truth_sums_up(tmp_path, monkeypatch):
    monkeypatch.setattr(study_of_methods, "judge_all", study.judge_all)
    for name, value in (("TEST_ROWS", 60), ("DENSITY_ROWS", 40), ("DRAWS", 50), ("_BLOCK", 40)):
        monkeypatch.setattr(truth, name, value)
    monkeypatch.setattr(truth, "RIVAL", "normal")
    words = ["study", "truth", "--data-set", "heteroscedastic", "--data-set", "five"]
    words += ["--rows", "100", "--seeds", "1", "--methods", "joint,normal"]
    done = CliRunner().invoke(cli, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out" / "truth.json").read_text())
    assert [cell["scenario"] for cell in result["cells"]] == ["heteroscedastic", "five"]
    for cell in result["cells"]:
        joint, normal = (cell["models"][name] for name in ("joint", "normal"))
        assert joint["crps"] == normal["crps"]
        for model in (joint, normal):
            assert 0.0 < model["excess"]["mean"] < 1.0
        gap = joint["log_score"]["mean"] - joint["kernel_log_score"]["mean"]
        verdict = cell["verdict"]
        assert verdict["gap"] == pytest.approx(gap)
        assert verdict["dense"] == (gap <= 0.1)
        assert verdict["near"] is None  # there is no aim for so few rows
        assert verdict["below_rival"] == (joint["excess"]["mean"] < normal["excess"]["mean"])
    assert "Excess over the true CRPS in %, 100 rows" in done.output
    assert "Log scores, 100 rows" in done.output
    assert (tmp_path / "out" / "truth.png").stat().st_size > 10_000


def test_what_the_study_of_truth_refuses():
    with pytest.raises(DataError, match="scenarios must be among heteroscedastic, bimodal"):
        TruthOptions(("rumour",))
    with pytest.raises(DataError, match="at least 50 rows"):
        TruthOptions(rows=(10,))
