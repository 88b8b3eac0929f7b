"""Labels are no numbers: no query of a default fit averages their codes, draws are labels."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from cme_dask import JointDistribution, load
from cme_dask.errors import DataError

N = 300
REMEDY = r"column 'kind' holds labels, which have no mean or quantile: ask for conditional\(x\)"


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    x = rng.normal(size=N)
    kind = np.where(x + 0.5 * rng.normal(size=N) > 0, "warm", "cold")
    return pd.DataFrame({"x": x, "size": x + 0.3 * rng.normal(size=N), "kind": kind})


@pytest.fixture(scope="module")
def fit(table):
    return JointDistribution().fit(table[["x"]], table[["size", "kind"]])


@pytest.fixture(scope="module")
def points(table):
    return table[["x"]].iloc[:5].set_index(pd.Index(list("abcde"), name="place"))


def test_codes_are_not_averaged(fit, points):
    for ask in (
        lambda: fit.expect("kind", points),
        lambda: fit.expect(["size", "kind"], points, return_std=True),
        lambda: fit.model_.expect("kind", points),
        lambda: fit.conditional(points).expect("kind"),
        lambda: fit.conditional(points).expect(["size", "kind"]),
        lambda: fit.conditional(points).quantile(0.5, column="kind"),
        lambda: fit.conditional(points).cdf(0.5, column="kind"),
        lambda: fit.conditional(points).interval(column="kind"),
        lambda: fit.conditional(points).crps(points.assign(size=0.0, kind="cold"), column="kind"),
    ):
        with pytest.raises(DataError, match=REMEDY):
            ask()


def test_columns_of_numbers_are_the_default(fit, points):
    assert fit.expect(None, points).shape == (5, 1)
    np.testing.assert_array_equal(fit.expect(None, points), fit.expect(["size"], points))
    law = fit.conditional(points)
    for answer in (law.mean(), law.std(), law.median(), law.interval()[0]):
        assert answer.shape == (5,)
    both = law.probability(["kind == warm", "kind in ('warm', 'cold')", "kind == warm or size > 0"])
    assert list(both.columns) == [
        "kind == warm",
        "kind in ('warm', 'cold')",
        "kind == warm or size > 0",
    ]
    np.testing.assert_allclose(both["kind in ('warm', 'cold')"], 1.0, atol=1e-12)
    assert (both["kind == warm or size > 0"] >= both["kind == warm"]).all()


def test_all_columns_hold_labels(table):
    fit = JointDistribution(kernel_x="median", tol=0.1).fit(table[["x"]], table[["kind"]])
    for ask in (lambda: fit.expect(None, [[0.0]]), lambda: fit.conditional([[0.0]]).mean()):
        with pytest.raises(DataError, match=REMEDY):
            ask()
    drawn = fit.conditional(table[["x"]].iloc[:4]).sample()
    assert isinstance(drawn, pd.Series)
    assert list(drawn.cat.categories) == list(fit.model_.y.columns.categories["kind"])


def test_pandas_draws_hold_labels(fit, points):
    codes = fit.conditional(points.to_numpy()).sample(3, random_state=4)
    labels = np.array(fit.model_.y.columns.categories["kind"])
    one = fit.conditional(points).sample(random_state=4)
    assert list(one.columns) == ["size", "kind"]
    assert one.index.equals(points.index)
    assert one["size"].dtype == np.float64
    assert set(one["kind"]) <= {"warm", "cold"}
    np.testing.assert_array_equal(one["kind"].to_numpy(str), labels[codes[:, 0, 1].astype(int)])
    several = fit.conditional(points).sample(3, random_state=4)
    for k in range(3):
        np.testing.assert_array_equal(several[(k, "size")], codes[:, k, 0])
        np.testing.assert_array_equal(
            several[(k, "kind")].to_numpy(str), labels[codes[:, k, 1].astype(int)]
        )


def test_xarray_draws_hold_labels(fit, points):
    codes = fit.conditional(points.to_numpy()).sample(2, random_state=1)
    coords = {"place": points.index.to_numpy(), "column": ["x"]}
    data = xr.DataArray(points.to_numpy(), dims=["place", "column"], coords=coords)
    drawn = fit.conditional(data).sample(2, random_state=1)
    labels = np.array(fit.model_.y.columns.categories["kind"])
    assert drawn.dims == ("place", "draw", "variable")
    np.testing.assert_array_equal(
        drawn.sel(variable="kind").astype(str), labels[codes[..., 1].astype(int)]
    )
    np.testing.assert_array_equal(drawn.sel(variable="size").astype(float), codes[..., 0])


def test_x_given_labels_draws_labels_of_x(table, tmp_path):
    fit = JointDistribution(kernel_x="median", kernel_y="median", tol=0.1, reg=1e-3).fit(
        table[["size", "kind"]], table[["x"]]
    )
    fit.save(tmp_path / "m")
    for model in (fit, load(tmp_path / "m")):
        given = table[["x"]].iloc[:6]
        drawn = model.conditional(Y=given).sample(random_state=2)
        assert set(drawn["kind"]) <= {"warm", "cold"}
        with pytest.raises(DataError, match="column 'kind' holds labels"):
            model.expect("kind", Y=given)
