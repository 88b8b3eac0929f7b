"""Bounds of the search for kernels: widened, reported; columns that a default fit ignores."""

import json

import numpy as np
import pandas as pd
import pytest

from cme_dask import ConditionalMeanEmbedding, JointDistribution, kernels, load
from cme_dask.errors import DataError
from cme_dask.kernels.length_scales import IGNORED, SCALES
from cme_dask.learning import search
from cme_dask.learning.candidates import KernelPoint


@pytest.fixture(scope="module")
def irrelevant():
    """A default fit of y on a column in thousands and on labels that tell nothing of it."""
    rng = np.random.default_rng(0)
    n = 300
    x = pd.DataFrame({"a": 1000.0 * rng.normal(size=n), "wd": rng.choice(list("NESW"), n)})
    y = pd.DataFrame({"y": np.sin(3e-3 * x["a"]) + 0.3 * rng.normal(size=n)})
    return JointDistribution(residual=False).fit(x, y), x


def test_bounds_an_irrelevant_column_is_reported_and_truly_ignored(irrelevant):
    fit, x = irrelevant
    scales = fit.length_scales_
    assert scales.ignored == ("wd",)
    assert scales["wd"].relevance == 0.0
    assert np.isinf(scales["wd"].length_scale)
    assert scales["a"].relevance > 1.0
    assert "ignored: wd" in repr(fit.model_)
    other = x.assign(wd=np.roll(x["wd"].to_numpy(), 1))
    np.testing.assert_allclose(fit.predict(other), fit.predict(x), atol=1e-9)


def test_bounds_length_scales_are_in_the_units_of_the_columns(irrelevant):
    fit, x = irrelevant
    row = fit.length_scales_["a"]
    assert 50.0 < row.length_scale < 2000.0
    form = fit.members_[0].candidate.trial.x.form
    if form == "standard":
        assert row.length_scale == pytest.approx(row.deviations * x["a"].std(ddof=0), rel=1e-6)


def test_bounds_length_scales_come_back_from_a_saved_model(irrelevant, tmp_path):
    fit, _ = irrelevant
    fit.save(tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.length_scales == fit.length_scales_
    listed = json.loads(json.dumps(loaded.contents()["length_scales"], allow_nan=False))
    assert listed[1]["bound"] == "ignored"
    assert listed[1]["length_scale"] is None


def test_bounds_relevance_is_drawn(irrelevant):
    pytest.importorskip("matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fit, _ = irrelevant
    ax = fit.model_.plot_relevance()
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["a (x)", "wd (x)", "y (y)"]
    assert [bar.get_width() for bar in ax.patches][1] == 0.0
    pyplot.close(ax.figure)


def test_bounds_of_the_search_are_widened_where_the_best_kernel_lies_there():
    rng = np.random.default_rng(1)
    x = rng.uniform(size=(1200, 1))
    y = np.sin(200.0 * x) + 0.1 * rng.normal(size=x.shape)
    fit = ConditionalMeanEmbedding().fit(x, y)
    # A period of 2 pi / 200 is 0.11 deviations: scales from 0.05 on are too long for it.
    assert fit.length_scales_[0].deviations < SCALES[0]
    assert fit.length_scales_[0].bound == ""
    error = np.mean((np.ravel(fit.predict(x)) - np.sin(200.0 * x[:, 0])) ** 2)
    assert error < 0.05


def test_bounds_given_kernels_have_length_scales_but_no_relevance():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(200, 2))
    kernel = kernels.Gaussian((0.5, 2.0))
    fit = JointDistribution(kernel_x=kernel, kernel_y=kernels.Gaussian(1.0), tol=0.1).fit(
        x, x[:, :1]
    )
    assert [row.length_scale for row in fit.length_scales_] == [0.5, 2.0, 1.0]
    assert np.isnan(fit.length_scales_[0].relevance)
    with pytest.raises(DataError, match="kernels are learned"):
        fit.model_.plot_relevance()
    with pytest.raises(DataError, match="no column 'z'"):
        fit.length_scales_["z"]


def test_column_scales_follow_the_structure_of_a_kernel():
    labels = kernels.Categorical(2.0)
    kernel = 3.0 * (kernels.Gaussian((1.0, 4.0)).on([0, 2]) * labels.on([1]))
    assert [s.scale for s in kernel.column_scales(3)] == [1.0, 2.0, 4.0]
    both = kernels.Gaussian(0.5) + kernels.Laplace(2.0)
    assert [s.scale for s in both.column_scales(2)] == [0.5, 0.5]
    assert kernels.Delta().column_scales(2) == (None, None)
    one = kernels.Delta()[0] * kernels.Gaussian(1.0)[1]  # which does depend on the first column
    assert one.column_scales(2)[0] is None
    assert one.column_scales(2)[1].scale == 1.0
    assert not kernels.Gaussian(8.64e13).column_scales(1)[0].ignored  # a day in nanoseconds
    assert kernels.Gaussian(1.0)[0].column_scales(2)[1].ignored


def test_columns_are_ignored_only_where_the_score_is_no_worse():
    class Tried:
        def score(self, pair, stage=""):
            return -1.0 + (0.1 if pair[0].scales[1] >= IGNORED else 0.0)  # the second one is needed

    y = KernelPoint("given")
    pair = KernelPoint("standard", (0.5, 30.0, 40.0)), y
    assert search._long_columns(pair) == [2, 1]
    assert search._needless_columns(Tried(), pair) == [2]
    # Of a variable one column remains, the shortest.
    assert search._long_columns((KernelPoint("standard", (30.0,)), y)) == []
