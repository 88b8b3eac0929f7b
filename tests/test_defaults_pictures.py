"""Spectra and residual traces that a default fit draws are those of its members' kernels."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt

from cme_dask import JointDistribution, Tuning, load
from cme_dask.models.spectra import spectra

mpl.use("Agg")
N = 300


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(N, 1))
    return x, np.sin(2 * x) + 0.3 * rng.normal(size=(N, 1))


@pytest.fixture(scope="module")
def fit(data):
    return JointDistribution(tuning=Tuning(averaged=2)).fit(*data)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def members(fit):
    """Kernel and pivots of x and of y of each member."""
    sides = [fit.model_.x.basis.parts, fit.model_.y.basis.parts]
    return [[(p.newton.kernel, p.newton.points) for p in pair] for pair in zip(*sides, strict=True)]


def test_the_spectrum_drawn_is_that_of_the_kernel_matrix_of_the_best_member(fit, data):
    ax = fit.model_.plot_spectrum()
    assert len(fit.members_) > 1
    for line, rows, (kernel, pivots) in zip(ax.lines, data, members(fit)[0], strict=False):
        drawn = line.get_ydata()
        expected = np.linalg.eigvalsh(kernel(rows, rows) / N)[::-1]
        assert len(drawn) == len(pivots)
        np.testing.assert_allclose(drawn[:5], expected[:5], rtol=1e-3)


def test_the_trace_drawn_is_what_the_pivots_of_each_member_leave(fit, data):
    ax = fit.model_.plot_residual_trace()
    lines = [*ax.lines[:2], *ax.lines[2:-1]]
    best, others = lines[:2], lines[2:]
    count = len(fit.members_)
    assert len(others) == 2 * (count - 1)
    drawn = [best, *zip(others[: count - 1], others[count - 1 :], strict=True)]
    for pair, described in zip(drawn, members(fit), strict=True):
        for line, rows, (kernel, pivots) in zip(pair, data, described, strict=True):
            found = line.get_ydata()
            assert len(found) == len(pivots) + 1
            K = kernel(rows, rows)
            for j in (1, len(pivots) // 2):
                kp = kernel(rows, pivots[:j])
                left = K - kp @ np.linalg.solve(kernel(pivots[:j], pivots[:j]), kp.T)
                assert found[j] == pytest.approx(np.trace(left) / np.trace(K), rel=1e-4)


def test_the_best_member_is_named(fit):
    for ax in (fit.model_.plot_spectrum(), fit.model_.plot_residual_trace()):
        texts = [text.get_text() for text in ax.get_legend().get_texts()]
        count = len(fit.members_)
        assert texts == [f"x: x0, best of {count}", f"y: y0, best of {count}", "other members"]


def test_a_saved_model_draws_the_same(fit, tmp_path):
    fit.save(tmp_path / "m")
    for pair, again in zip(spectra(fit.model_), spectra(load(tmp_path / "m")), strict=True):
        for one, other in zip(pair, again, strict=True):
            np.testing.assert_array_equal(one.squares, other.squares)
            np.testing.assert_array_equal(one.eigenvalues, other.eigenvalues)
            assert one.trace == other.trace
