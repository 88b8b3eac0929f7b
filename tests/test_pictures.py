"""Pictures of laws and bases: what is drawn is what the law answers."""

from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from cme_dask import JointDistribution, KernelBayesFilter, kernels, operators
from cme_dask.cli.plots import _probabilities
from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.data.sources import ArraySource
from cme_dask.errors import DataError, ResourceError, UnseenCategoryWarning
from cme_dask.models import plots as drawing
from cme_dask.models.spectra import spectra

mpl.use("Agg")
N = 2000
LABELS = ("a", "b", "c")


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.standard_normal(N), rng.integers(0, 3, N)])
    y = np.column_stack([np.sin(x[:, 0]) + x[:, 1], x[:, 0]]) + 0.3 * rng.standard_normal((N, 2))
    columns = (
        Columns(("wind", "kind"), {"wind": "m/s"}, {"kind": LABELS}),
        Columns(("dust", "soot"), {"dust": "ug/m3"}),
    )
    sample = Sample((ArraySource(x), ArraySource(y)), columns)
    fit = JointDistribution(kernel_x="median", kernel_y="median", tol=1e-3, residual=False)
    return fit.fit(sample).model_


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def along_wind(model, n=30):
    return model.conditional({"wind": np.linspace(1.0, -1.0, n), "kind": ["b"] * n})


def test_a_fan_holds_the_quantiles(model):
    law = along_wind(model)
    ax = law.plot_fan("dust", levels=(0.5, 0.9))
    wind = np.linspace(-1.0, 1.0, 30)
    (median,) = ax.lines
    np.testing.assert_allclose(median.get_xdata(), wind)
    np.testing.assert_allclose(median.get_ydata(), law.median("dust")[::-1])
    for band, level in zip(ax.collections, (0.9, 0.5), strict=True):
        lower, upper = law.interval(level, "dust")
        corners = {tuple(np.round(p, 9)) for p in band.get_paths()[0].vertices}
        for ends in (lower, upper):
            assert {tuple(np.round(p, 9)) for p in zip(wind, ends[::-1], strict=True)} <= corners
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("wind [m/s]", "dust [ug/m3]")
    assert "dust" in ax.get_title(loc="left")
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["median", "50 %", "90 %"]


def test_a_fan_over_labels_has_a_bar_each(model):
    law = model.conditional({"wind": [0.0] * 3, "kind": ["c", "a", "b"]})
    ax = law.plot_fan("dust", levels=[0.8])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == list(LABELS)
    lower, upper = law.interval(0.8, "dust")
    bars = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in ax.patches]
    np.testing.assert_allclose(bars, np.stack([lower, upper], axis=1)[[1, 2, 0]])


def pooled_labels():
    rng = np.random.default_rng(0)
    label = rng.choice(LABELS, 300)
    y = np.array([LABELS.index(each) for each in label]) + rng.normal(size=300)
    kernel = kernels.TransformedKernel(
        kernels.Categorical(1.0), kernels.Transform((kernels.PoolRare((0.0, 1.0)),))
    )
    given = {"kernel_x": kernel, "kernel_y": kernels.Gaussian(1.0), "reg": 1e-3}
    return JointDistribution(**given).fit(pd.DataFrame({"kind": label}), y).model_


def test_unseen_labels_are_named_so():
    with pytest.warns(UnseenCategoryWarning):
        law = pooled_labels().conditional(pd.DataFrame({"kind": ["a", "new", "c"]}))
    ticks = [text.get_text() for text in law.plot_fan().get_xticklabels()]
    assert ticks[0] == "(unseen)"
    assert set(ticks[1:]) == {"a", "c"}


def test_laws_that_are_given_no_columns_are_drawn_along_rows():
    x = np.linspace(-1.0, 1.0, 200)[:, None]
    given = {"reg": 1e-3, "random_state": 0}
    gaussian = kernels.Gaussian(0.5)
    fit = KernelBayesFilter(gaussian, gaussian, tol=1e-2, support_size=50, **given).fit(x, x)
    joint = JointDistribution(kernel_x=gaussian, kernel_y=gaussian, reg=1e-3).fit(x, x**2)
    prior = operators.change_prior(joint, x[150:])
    for law in (fit.filter(x[:5]), prior.marginal(), prior.marginal("x")):
        for ax in (law.plot_fan(), law.plot_density(), law.plot_cdf()):
            assert "given" not in ax.get_title(loc="left")
        assert law.plot_fan().get_xlabel() == "row"
        assert law.plot_cdf().get_legend().get_title().get_text() == "row"
        with pytest.raises(DataError, match="along their rows, got along='x0': leave it out"):
            law.plot_fan(along="x0")
    assert "given x0" in prior.conditional(x[:1]).plot_cdf().get_title(loc="left")


def test_where_several_columns_vary_rows_are_numbered_or_one_is_named(model):
    law = model.conditional({"wind": [0.3, 0.1, 0.2], "kind": ["a", "b", "c"]})
    assert law.plot_fan("soot").get_xlabel() == "row"
    assert law.plot_fan("soot", along="wind").get_xlabel() == "wind [m/s]"


def test_legends_list_labels_that_begin_with_an_underscore(model):
    kinds = Columns(("wind", "kind"), {}, {"kind": ("_a", "b", "_c")})
    law = replace(model, x=replace(model.x, columns=kinds)).conditional(
        {"wind": [0.0] * 3, "kind": ["_a", "b", "_c"]}
    )
    curves = [
        {"at": [0.0, 1.0], "probability": [0.1, 0.2], "point": name, "along": "wind", "event": "e"}
        for name in ("_noon", "night")
    ]
    ax = plt.figure().subplots()
    _probabilities(ax, curves, {})
    for axes, names in ((law.plot_cdf("soot"), ["_a", "b", "_c"]), (ax, ["_noon", "night"])):
        texts = [text.get_text().lstrip("\u200b") for text in axes.get_legend().get_texts()]
        assert texts == names


@pytest.mark.parametrize(("sign", "place"), [(1.0, "upper left"), (-1.0, "lower left")])
def test_the_legend_of_a_density_is_away_from_the_median(sign, place):
    """It is placed by the first median: looking for a place in the mesh took seconds."""
    x = np.linspace(-1.0, 1.0, 200)[:, None]
    gaussian = kernels.Gaussian(0.5)
    fit = JointDistribution(kernel_x=gaussian, kernel_y=gaussian, reg=1e-3).fit(x, sign * x)
    ax = fit.conditional(x[::40]).plot_density(bins=10)
    assert ax.get_legend()._loc == ax.get_legend().codes[place]


def test_a_density_has_the_mass_of_the_law(model):
    law = along_wind(model, 12)
    ax = law.plot_density("dust", bins=20)
    mesh = ax.collections[0]
    edges = mesh.get_coordinates()[:, 0, 1]
    density = mesh.get_array().reshape(20, 12)
    masses = density * np.diff(edges)[:, None]
    inside = law.cdf(edges[[-1]], "dust") - law.cdf(edges[[0]], "dust")
    np.testing.assert_allclose(masses.sum(axis=0), inside[::-1, 0])
    assert (inside > 0.97).all()
    np.testing.assert_allclose(ax.lines[0].get_ydata(), law.median("dust")[::-1])


def test_distribution_functions_are_those_of_the_law(model):
    law = along_wind(model, 3)
    ax = law.plot_cdf("soot")
    for line, row in zip(ax.lines, (2, 1, 0), strict=True):
        np.testing.assert_allclose(line.get_ydata(), law.cdf(line.get_xdata(), "soot")[row])
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["-1", "0", "1"]
    with pytest.raises(DataError, match="draws at most 8 points, got 30"):
        along_wind(model).plot_cdf("soot")


def test_own_axes_are_drawn_into(model):
    ax = plt.subplots()[1]
    law = along_wind(model, 4)
    for plot in (law.plot_fan, law.plot_density, law.plot_cdf):
        assert plot("dust", ax=ax) is ax
    assert model.plot_spectrum(ax=ax) is ax
    assert model.plot_residual_trace(ax=ax) is ax


def test_spectrum_and_residual_trace(model):
    ax = model.plot_spectrum()
    ((x, y),) = spectra(model)
    for line, side, found in zip(ax.lines, (model.x, model.y), (x, y), strict=True):
        eigenvalues = line.get_ydata()
        assert len(eigenvalues) == side.basis.newton.rank
        assert eigenvalues.sum() / found.trace == pytest.approx(1 - found.residual_trace[-1])
    ax = model.plot_residual_trace()
    for line, name, side in zip(ax.lines, "xy", (model.x, model.y), strict=True):
        found = line.get_ydata()
        assert len(found) == side.basis.newton.rank + 1
        assert found[0] == 1.0
        assert (np.diff(found) <= 0).all()
        assert found[-1] == pytest.approx(model.about["trace_error"][name], abs=1e-12)


def test_the_residual_trace_is_that_of_the_kernel_matrix():
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((300, 1)), rng.standard_normal((300, 2))
    kernel = kernels.Gaussian(0.8)
    options = {"kernel_x": kernel, "kernel_y": kernel, "tol": 1e-2, "residual": False}
    model = JointDistribution(**options).fit(x, y).model_
    found = spectra(model)[0][1].residual_trace
    pivots = np.asarray(model.y.basis.newton.points)
    K = kernel(y, y)
    for j in (1, 5, len(pivots)):
        kp = kernel(y, pivots[:j])
        left = K - kp @ np.linalg.solve(kernel(pivots[:j], pivots[:j]), kp.T)
        assert found[j] == pytest.approx(np.trace(left) / np.trace(K), rel=1e-8)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda law: law.plot_fan(), "name the column to draw: there are 'dust', 'soot'"),
        (lambda law: law.plot_cdf("wind"), "got column 'wind': there are 'dust', 'soot'"),
        (lambda law: law.plot_fan("dust", levels=[1.0]), "levels are probabilities of bands"),
        (lambda law: law.plot_fan("dust", along="rain"), "unknown column 'rain'"),
        (lambda law: law.plot_density("dust", bins=1), "bins must be an integer of at least 2"),
    ],
)
def test_what_cannot_be_drawn(model, ask, message):
    with pytest.raises(DataError, match=message):
        ask(along_wind(model, 3))
    assert not plt.get_fignums()


def test_nothing_is_drawn_of_no_points_or_without_matplotlib(model, monkeypatch):
    with pytest.raises(DataError, match="no points to draw"):
        model.conditional(np.empty((0, 2))).plot_fan("dust")
    monkeypatch.setattr(drawing, "available", lambda: False)
    with pytest.raises(ResourceError, match="install cme-dask"):
        model.plot_spectrum()


def test_partitions_have_no_residual_trace():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((400, 1))
    fit = JointDistribution(kernel_x="median", kernel_y="median", constraint="coupling")
    model = fit.fit(x, x + 0.3 * rng.standard_normal((400, 1))).model_
    assert model.plot_spectrum().lines
    with pytest.raises(DataError, match="partitions of unity"):
        model.plot_residual_trace()


def test_names_are_no_mathematics(tmp_path):
    name = r"$\bad{$ 5%"
    with drawing.picture(tmp_path / "p.png", 4.0, 3.0) as figure:
        ax = figure.subplots()
        ax.loglog([1e-6, 1e6], [1.0, 100.0], label=name)
        ax.set(title=name, xlabel=name)
        twin = ax.twiny()
        twin.set_xticks([0.0, 1.0], [name, name])
        ax.legend()
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert name in {label.get_text() for label in twin.get_xticklabels()}
    assert "10⁻⁶" in {label.get_text() for label in ax.get_xticklabels()}
