"""Rows in other units than those of the fit are refused wherever a table records its units."""

import numpy as np
import pytest
from click.testing import CliRunner

from cme_dask import (
    ConditionalMeanEmbedding,
    JointDistribution,
    PivotedCholesky,
    drift_report,
    kernels,
    open_sample,
    operators,
    score,
    two_sample_test,
)
from cme_dask.cli import cli
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.errors import DataError

N = 240
X = np.random.default_rng(0).normal(size=(N, 2))
Y = X[:, :1] + 0.3 * np.random.default_rng(1).normal(size=(N, 1))
KERNEL = kernels.Gaussian(1.0)
FIT = {"kernel_x": KERNEL, "kernel_y": KERNEL, "tol": 0.1, "reg": 1e-3}
JOINT = {**FIT, "n_folds": 3, "residual": False}
IN_KM = "column 'a' is in km, in the fit it was in m: convert it"
IN_DEGREES = "column 't' is in degC, in the fit it was in K: convert it"


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The same rows in m and K, in km and K, in m and degC, and without units."""
    folder = tmp_path_factory.mktemp("units")
    units = {"m": ("m", "K"), "km": ("km", "K"), "degC": ("m", "degC"), "none": None}
    for name, each in units.items():
        of_x, of_y = ({}, {}) if each is None else ({"a": each[0]}, {"t": each[1]})
        columns = Columns(("a", "b"), of_x), Columns(("t",), of_y)
        with writing_sample(folder / name, columns, chunk_rows=100) as writer:
            writer.append(X, Y)
    return {name: str(folder / name) for name in units}


@pytest.fixture(scope="module")
def fit(stores):
    return JointDistribution(**JOINT).fit(stores["m"])


def refusal(call):
    with pytest.raises(DataError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    ("ask", "others"),
    [
        (lambda fit, store: fit.conditional(store).mean(), {"km": IN_KM}),
        (lambda fit, store: fit.conditional(Y=store).mean(), {"degC": IN_DEGREES}),
        (lambda fit, store: fit.expect("t", store), {"km": IN_KM}),
        (lambda fit, store: score(fit, store), {"km": IN_KM, "degC": IN_DEGREES}),
        (lambda fit, store: drift_report(fit.model_, store), {"km": IN_KM, "degC": IN_DEGREES}),
    ],
    ids=["law", "reverse", "expect", "score", "drift"],
)
def test_stores_in_other_units_than_the_fit_are_refused(fit, stores, ask, others):
    ask(fit, stores["none"])
    for name, message in others.items():
        assert refusal(lambda name=name: ask(fit, stores[name])) == message


def test_features_embeddings_and_operators_refuse_other_units(stores, tmp_path):
    embedding = ConditionalMeanEmbedding(**FIT).fit(stores["m"])
    features = PivotedCholesky(KERNEL, tol=0.1).fit(stores["m"])
    spaces = (embedding.model_.x, embedding.model_.y)
    spaces = tuple(operators.Space(each.columns, each.basis.newton) for each in spaces)
    for ask in (
        lambda store: embedding.predict(store),
        lambda store: features.transform_store(store, tmp_path / "out", overwrite=True),
        lambda store: operators.measure(open_sample(store), *spaces),
    ):
        ask(stores["none"])
        assert refusal(lambda ask=ask: ask(stores["km"])) == IN_KM


def test_spaces_of_other_units_are_others():
    basis = PivotedCholesky(KERNEL, tol=0.1).fit(X[:, :1]).basis_.newton
    again = PivotedCholesky(KERNEL, tol=0.1).fit(X[:, :1]).basis_.newton
    metres, kilometres = Columns(("a",), {"a": "m"}), Columns(("a",), {"a": "km"})
    space = operators.Space(metres, basis)
    assert space.difference(operators.Space(metres, again)) is None
    found = space.difference(operators.Space(kilometres, again))
    assert found == "their units of a are m and km"


def test_two_samples_in_other_units_are_refused(stores):
    two_sample_test(stores["m"], stores["none"], kernel=KERNEL)
    message = refusal(lambda: two_sample_test(stores["m"], stores["km"], kernel=KERNEL))
    assert message == "column 'a' is in km, in the first sample it is in m: convert it"


def test_tables_of_pandas_record_units(fit):
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(X, columns=["a", "b"])
    t = pd.Series(Y[:, 0], name="t")
    expected = fit.conditional(table).mean()
    table.attrs["units"] = {"a": "m", "c": "s"}
    pd.testing.assert_series_equal(fit.conditional(table).mean(), expected)
    again = JointDistribution(**JOINT).fit(table, t)
    assert again.model_.x.columns.units == {"a": "m"}
    other = table.copy()
    other.attrs["units"] = {"a": "km"}
    assert refusal(lambda: fit.conditional(other)) == IN_KM
    assert refusal(lambda: again.expect("t", other)) == IN_KM
    assert refusal(lambda: score(fit, other, t)) == IN_KM
    t.attrs["units"] = "degC"
    assert refusal(lambda: score(fit, table, t)) == IN_DEGREES


def test_columns_called_like_attributes_of_tables_are_columns():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(X, columns=["a", "b"])
    named = table.rename(columns={"b": "data_vars"}).assign(attrs=1.0, dims=1.0, coords=1.0)
    named.attrs["units"] = {"a": "m"}
    pair = ["a", "data_vars"]
    sample = open_sample(named.assign(t=Y[:, 0]), x_columns=pair, y_columns=["t"])
    assert sample.columns[0].names == ("a", "data_vars")
    assert open_sample(named[pair]).columns[0].units == {"a": "m"}
    fit = JointDistribution(**JOINT).fit(named[pair], Y)
    expected = JointDistribution(**JOINT).fit(table, Y).predict(table)
    np.testing.assert_array_equal(fit.predict(named), expected)
    named.attrs["units"] = {"a": "km"}
    assert refusal(lambda: fit.predict(named)) == IN_KM
    records = np.rec.fromarrays([*X.T, X[:, 0]], names="a,data_vars,attrs")
    assert refusal(lambda: fit.predict(records)).startswith("X must be numeric")


def test_xarray_records_units(fit):
    xr = pytest.importorskip("xarray")
    arrays = {"a": ("row", X[:, 0], {"units": "km"}), "b": ("row", X[:, 1])}
    table = xr.Dataset(arrays | {"t": ("row", Y[:, 0], {"units": "K"})})
    sample = open_sample(table, x_columns=["a", "b"], y_columns=["t"])
    assert [columns.units for columns in sample.columns] == [{"a": "km"}, {"t": "K"}]
    labels = table.assign(s=("row", np.where(X[:, 0] > 0.0, "up", "down")))
    mixed = open_sample(labels, x_columns=["a", "s"], y_columns=["t"])
    assert mixed.columns[0].units == {"a": "km"}
    assert refusal(lambda: fit.conditional(table)) == IN_KM
    assert refusal(lambda: score(fit, sample)) == IN_KM
    one = JointDistribution(**JOINT).fit(table["t"], X[:, 0])
    warm = table["t"].assign_attrs(units="degC")
    message = "column 't' is in degC, in the fit it was in K: convert it"
    assert refusal(lambda: one.conditional(warm)) == message
    assert refusal(lambda: one.conditional(warm.chunk(100))) == message


def test_thresholds_in_other_units_than_the_fit_are_refused(fit, stores):
    pd, xr = pytest.importorskip("pandas"), pytest.importorskip("xarray")
    t = xr.DataArray(Y[:, 0], dims="row", attrs={"units": "degC"})
    series = pd.Series(Y[:, 0])
    series.attrs["units"] = "degC"
    for law in fit.conditional(X), fit.conditional(stores["m"]):
        expected = np.asarray(law.cdf(Y[:, 0], paired=True))
        for each in t, t.chunk(100):
            kelvin = each.assign_attrs(units="K")
            np.testing.assert_array_equal(law.cdf(kelvin, paired=True), expected)
        for each in t, t.chunk(100), series:
            assert refusal(lambda law=law, t=each: law.cdf(t, paired=True)) == IN_DEGREES
        assert refusal(lambda law=law: law.cdf(t[:3])) == IN_DEGREES
    points = pd.DataFrame(X, columns=["a", "b"])
    points.attrs["units"] = {"a": "km", "b": "s"}
    law = fit.conditional(Y=Y)
    assert refusal(lambda: law.cdf(points, paired=True)) == IN_KM
    assert refusal(lambda: law.cdf(points["a"], column="a", paired=True)) == IN_KM


def test_commands_refuse_other_units(fit, stores, tmp_path):
    fit.save(tmp_path / "model")
    for command in (
        ("predict", tmp_path / "model", stores["km"], "--out", tmp_path / "p", "--of", "mean"),
        ("score", tmp_path / "model", stores["km"]),
        ("drift", tmp_path / "model", stores["km"]),
    ):
        result = CliRunner().invoke(cli, list(map(str, command)))
        assert result.exit_code == 2
        assert IN_KM in " ".join(result.output.split())
