"""Default fits on every kind of input, and everything that one may ask of them.

One table of inputs, one list of questions: no exception, no warning, and answers that agree with
each other, before and after a pickle, a saved file and a clone.
"""

import pickle

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import xarray as xr
from conftest import write_store
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    KernelBayesFilter,
    KernelLogisticRegression,
    PivotedCholesky,
    load,
    open_sample,
)
from cme_dask.errors import DataError, NotFittedError, UnseenCategoryWarning
from cme_dask.kernels import Gaussian
from cme_dask.operators import Space, change_prior

pytestmark = pytest.mark.usefixtures("least_searches")
N = 100
Q = [0.05, 0.25, 0.5, 0.75, 0.95]


def table(n=N, seed=0):
    """Numbers, truth values, integers with a type of pandas, text and categories beside y."""
    rng = np.random.default_rng(seed)
    wind, rain = rng.normal(size=n), rng.random(n) < 0.4
    place = np.array(["hill", "lake", "town"])[rng.integers(0, 3, n)]
    dust = np.sin(2 * wind) + 0.8 * rain + (place == "town") + 0.3 * rng.normal(size=n)
    return pd.DataFrame(
        {
            "wind": wind,
            "rain": rain,
            "hour": pd.array(rng.integers(0, 24, n), dtype="Int64"),
            "place": place,
            "kind": pd.Categorical(np.where(wind > 0, "up", "down")),
            "dust": dust,
            "level": np.where(dust > 0.8, "high", "low"),
        }
    )


FRAME = table()
MIXED = ["wind", "rain", "place", "kind"]
FEW = ["wind", "rain"]


def numbers():
    x = FRAME[FEW].to_numpy(np.float64)
    return x, FRAME["dust"].to_numpy()


def in_numpy(folder):
    x, y = numbers()
    return (x, y), x[:5]


def in_pandas(folder):
    return (FRAME[MIXED], FRAME["dust"]), FRAME[MIXED].iloc[:5]


def in_xarray(folder):
    x, y = numbers()
    data = xr.DataArray(x, dims=("time", "variable"), coords={"variable": FEW}, name="weather")
    return (data, xr.DataArray(y, dims="time", name="dust")), data[:5]


def in_dask_arrays(folder):
    x, y = numbers()
    return (da.from_array(x, chunks=(70, 1)), da.from_array(y, chunks=90)), x[:5]


def in_dask_frames(folder):
    lazy = dd.from_pandas(FRAME, npartitions=3)
    return (lazy[MIXED], lazy["dust"]), FRAME[MIXED].iloc[:5]


def in_polars(folder):
    frame = pl.from_pandas(FRAME)
    return (frame.select(MIXED), frame["dust"]), frame.select(MIXED)[:5]


def in_a_store(folder):
    x, y = numbers()
    path = write_store(folder / "s.zarr", x, y, chunk_rows=64, x_names=FEW, y_names=["dust"])
    return (path,), x[:5]


def of_one_column(folder):
    x, y = numbers()
    return (x[:, 0], y), x[:5, 0]


def of_twenty_columns(folder):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N, 20))
    return (x, x[:, 0] + 0.3 * rng.normal(size=N)), x[:5]


def of_two_answers(folder):
    x, _ = numbers()
    return (x[:, :1], FRAME[["dust", "level"]]), x[:5, :1]


INPUTS = {
    build.__name__: build
    for build in (
        in_numpy,
        in_pandas,
        in_xarray,
        in_dask_arrays,
        in_dask_frames,
        in_polars,
        in_a_store,
        of_one_column,
        of_twenty_columns,
        of_two_answers,
    )
}


@pytest.fixture(scope="module", params=INPUTS)
def case(request, tmp_path_factory):
    """A default fit on one kind of input, and points to ask it at."""
    folder = tmp_path_factory.mktemp(request.param)
    data, at = INPUTS[request.param](folder)
    return JointDistribution().fit(*data), data, at, folder


def values(answer):
    """Numbers, whatever they came in."""
    return np.asarray(answer.compute() if hasattr(answer, "compute") else answer)


def everything(law):
    """Answers to all questions of a law, by name."""
    found = {
        "weights": law.weights(),
        "effective_support": law.effective_support(),
        "sample": law.sample(4, random_state=3),
        "density_ratio": law.density_ratio(law.answered.cells.atoms[:3]),
    }
    for column in law.numeric:
        found |= {
            f"quantile {column}": law.quantile(Q, column),
            f"median {column}": law.median(column),
            f"cdf {column}": law.cdf(0.5, column),
            f"interval {column}": np.stack(law.interval(0.9, column)),
            f"probability {column}": law.probability(f"{column} > 0.5"),
            f"expect {column}": law.expect(column),
        }
    found |= {"mean": law.mean(), "std": law.std(), "var": law.var(), "cov": law.cov()}
    for column in law.columns.categories:
        found[f"proba {column}"] = law.predict_proba(column)
    return {name: np.asarray(answer) for name, answer in found.items()}


def test_default_fits_answer_everything_coherently(case):
    model, _, at, _ = case
    law = model.conditional(at)
    assert law.n == len(law) == 5
    found = everything(law)
    for name, answer in found.items():
        kinds = (name, answer.dtype)
        assert answer.dtype.kind == "O" or np.isfinite(answer).all(), kinds
    assert_allclose(found["weights"].sum(axis=1), 1.0, atol=1e-9)
    assert (found["weights"] >= 0.0).all()
    assert ((found["effective_support"] >= -1e-9) & (found["effective_support"] <= 1 + 1e-9)).all()
    draws = law.sample(4000, random_state=1)
    draws = np.asarray(draws).reshape(5, 4000, -1)
    for column in law.numeric:
        place = law.columns.names.index(column)
        one = np.asarray(draws[:, :, place], dtype=np.float64)
        mean = found["mean"].reshape(5, -1)[:, law.numeric.index(column)]
        std = found["std"].reshape(5, -1)[:, law.numeric.index(column)]
        assert_allclose(one.mean(axis=1), mean, atol=5 * std.max() / np.sqrt(4000))
        assert_allclose(found[f"expect {column}"], mean, atol=1e-12)
        assert (np.diff(law.quantile(Q, column), axis=1) >= 0.0).all()
        low, high = found[f"interval {column}"]
        assert (low <= high).all()
        for name in (f"probability {column}", f"cdf {column}"):
            assert ((found[name] >= 0.0) & (found[name] <= 1.0)).all()
        total = found[f"probability {column}"] + np.asarray(law.cdf(0.5, column))
        assert_allclose(total, 1.0, atol=1e-9)
    for column in law.columns.categories:
        shares = found[f"proba {column}"]
        assert_allclose(shares.sum(axis=1), 1.0, atol=1e-9)
        assert (shares >= 0.0).all()
    scores = np.asarray(law.crps(model.model_.y.cells.atoms[:5]))
    assert (scores >= 0.0).all()
    if not law.columns.categories:
        assert_allclose(
            np.exp(np.asarray(law.log_pdf(law.answered.cells.atoms[:3]))),
            np.asarray(law.pdf(law.answered.cells.atoms[:3])),
        )
        assert_allclose(values(model.predict(at)).ravel(), found["mean"].ravel(), atol=1e-12)
    back = model.conditional(Y=model.model_.y.cells.atoms[:3])
    assert_allclose(back.weights().sum(axis=1), 1.0, atol=1e-9)


def test_distribution_functions_at_quantiles_reach_their_levels(case):
    model, _, at, _ = case
    law = model.conditional(at)
    for column in law.numeric:
        quantiles = np.asarray(law.quantile(Q, column))
        for i, q in enumerate(Q):
            below = np.diag(np.asarray(law.cdf(quantiles[:, i], column)))
            assert (below >= q).all(), (column, q, below)


SAVED = {in_numpy, in_xarray, in_pandas, of_one_column, of_twenty_columns, of_two_answers}
"""Inputs whose models differ by their columns: the others' are saved as one of these."""


def test_pickled_saved_and_cloned_default_fits_answer_alike(case, request):
    model, _, at, folder = case
    expected = everything(model.conditional(at))
    pickled = pickle.loads(pickle.dumps(model))  # noqa: S301 - our own bytes
    others = [pickled]
    if INPUTS[request.node.callspec.params["case"]] in SAVED:
        model.save(folder / "model", overwrite=True)
        others.append(load(folder / "model"))
    for other in others:
        for name, answer in everything(other.conditional(at)).items():
            assert_array_equal(answer, expected[name], err_msg=name)
        signed = model.model_.function_names[0][:1]
        if signed[0] not in model.model_.y.columns.categories:
            assert_array_equal(
                values(other.expect(signed[0], at)), values(model.expect(signed[0], at))
            )
    assert clone(model).get_params() == model.get_params()
    assert repr(pickled) == repr(model)
    assert not hasattr(clone(model), "model_")


@pytest.fixture(scope="module")
def by_input():
    """Quick fits with the same parameters on the same rows in many forms."""
    x, y = FRAME[MIXED], FRAME["dust"]
    lazy, polars = dd.from_pandas(FRAME, npartitions=3), pl.from_pandas(FRAME)
    quick = {"kernel_x": "median", "kernel_y": "median", "reg": 1e-3, "residual": False}
    return {
        name: JointDistribution(**quick).fit(*data, scheduler="synchronous")
        for name, data in {
            "pandas": (x, y),
            "nullable": (x.convert_dtypes(), y.astype("Float64")),
            "arrow types": (x.convert_dtypes(dtype_backend="pyarrow"), y),
            "polars": (polars.select(MIXED), polars["dust"]),
            "arrow": (pa.Table.from_pandas(x), pa.chunked_array([y.to_numpy()])),
            "dask": (lazy[MIXED], lazy["dust"]),
            "unaligned dask": (lazy[MIXED].repartition(npartitions=2), lazy["dust"]),
            "text of dask": (lazy[MIXED].assign(kind=lazy["kind"].cat.as_unknown()), y),
            "columns of a table": (open_sample(polars, x_columns=MIXED, y_columns=["dust"]),),
            "columns of a dask table": (open_sample(lazy, x_columns=MIXED, y_columns=["dust"]),),
        }.items()
    }


def test_every_table_of_the_same_rows_is_the_same_fit(by_input):
    expected = by_input["pandas"].predict(FRAME[MIXED])
    for name, model in by_input.items():
        assert model.model_.x.columns.names == tuple(MIXED), name
        assert set(model.model_.x.columns.categories) == {"place", "kind"}, name
        assert_allclose(model.predict(FRAME[MIXED]), expected, rtol=1e-9, err_msg=name)


def test_points_come_in_every_table(by_input):
    model = by_input["pandas"]
    expected = np.asarray(model.conditional(FRAME[MIXED]).mean())
    shuffled = FRAME[MIXED[::-1]].iloc[::-1]  # other columns first, labels in another order
    lazy = dd.from_pandas(shuffled.reset_index(drop=True), npartitions=2)
    for points in (
        pl.from_pandas(FRAME),
        pa.Table.from_pandas(FRAME[MIXED[::-1]]),
        FRAME.convert_dtypes(dtype_backend="pyarrow"),
        {name: FRAME[name].tolist() for name in MIXED},
    ):
        assert_allclose(np.asarray(model.conditional(points).mean()), expected, rtol=1e-9)
    law = model.conditional(lazy)
    assert hasattr(law.mean(), "dask")
    assert_allclose(law.mean().compute()[::-1], expected, rtol=1e-9)
    with pytest.warns(UnseenCategoryWarning, match="column 'place' 'sea'"):
        new = model.conditional(lazy.assign(place="sea"))
    with pytest.warns(UnseenCategoryWarning):
        assert_allclose(
            new.mean().compute(), model.conditional(shuffled.assign(place="sea")).mean(), rtol=1e-9
        )


def test_columns_of_dask_frames_in_memory_are_taken_by_name():
    rng = np.random.default_rng(0)
    states = pd.DataFrame(rng.normal(size=(200, 2)), columns=["a", "b"])
    seen = (states + 0.3 * rng.normal(size=(200, 2))).set_axis(["p", "q"], axis=1)
    seen["q"] += 3.0
    kernel = Gaussian(1.0)
    quick = {"kernel_x": kernel, "kernel_y": Gaussian(2.0), "tol": 1e-2, "reg": 1e-2}
    joint = JointDistribution(**quick, residual=False).fit(states, seen)
    law, moved = joint.conditional(states[:9]), change_prior(joint, states)
    state = KernelBayesFilter(kernel, Gaussian(2.0), tol=1e-2, support_size=30).fit(states, seen)
    embedding = ConditionalMeanEmbedding(kernel_x=kernel, reg=1e-2).fit(states, seen)
    features = PivotedCholesky(kernel, tol=1e-2).fit(states)
    questions_of_y = [
        law.crps,
        law.density_ratio,
        lambda y: law.cdf(y, paired=True),
        lambda y: joint.density_ratio(states[:9], y),
        lambda y: joint.score(states[:9], y),
        lambda y: embedding.score(states[:9], y),
        lambda y: joint.model_.conformalized(states[:9], y).conditional(states).interval(0.5),
        lambda y: moved.conditional(Y=y).mean(),
        lambda y: state.smooth(y).mean(),
    ]
    questions_of_x = [
        lambda x: state.filter(seen[:1], previous=x).mean(),
        Space.of(features),
    ]
    for questions, table in ((questions_of_y, seen[:9]), (questions_of_x, states[:1])):
        other = table.assign(z=0.0)[["z", *table.columns[::-1]]]
        lazy = dd.from_pandas(other, npartitions=1)
        for question in questions:
            assert_array_equal(question(lazy), question(table))
    # Answers have the index of the rows, as those at frames of pandas.
    lazy = dd.from_pandas(seen[20:29], npartitions=2)
    assert state.filter(lazy).mean().index.tolist() == list(range(20, 29))
    assert moved.conditional(Y=lazy).mean().index.tolist() == list(range(20, 29))


def test_datasets_in_chunks_are_points_and_observations():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 120))
    columns = {"b": b, "a": a, "q": b + a, "p": a - b}
    data = xr.Dataset({name: ("time", values) for name, values in columns.items()})
    data["a"].attrs["units"] = "K"
    x, y, chunked = data[["a", "b"]], data[["p", "q"]], data.chunk(time=50)
    quick = {"kernel_x": Gaussian(1.0), "kernel_y": Gaussian(2.0), "tol": 1e-2, "reg": 1e-2}
    fit = JointDistribution(**quick, residual=False).fit(x, y)
    lazily = clone(fit).fit(chunked[["a", "b"]], chunked[["p", "q"]], scheduler="synchronous")
    assert lazily.columns_x == fit.columns_x
    assert lazily.columns_x.units == {"a": "K"}
    assert_allclose(lazily.predict(x), fit.predict(x))
    # What stands beside the columns may have another shape.
    table, memory = chunked.assign(m=(("time", "level"), np.ones((120, 2)))), fit.conditional(x)
    law = fit.conditional(table)
    assert_allclose(fit.predict(table), fit.predict(x))
    assert_allclose(law.crps(table), memory.crps(y))
    assert_allclose(law.pdf(table, paired=True), memory.pdf(y, paired=True))
    assert_allclose(law.cdf(table, paired=True), memory.cdf(y, paired=True))
    one = law.cdf(table, column="q", paired=True)
    assert_allclose(one, memory.cdf(y["q"], column="q", paired=True))
    assert_allclose(fit.conditional(Y=table).mean(), fit.conditional(Y=y).mean())
    sample = open_sample(table, x_columns=["a", "b"])
    assert_allclose(fit.conditional(sample).mean(), memory.mean())
    with pytest.raises(DataError, match="X lacks the column 'b', and has others: 'q', 'p'"):
        fit.conditional(chunked.drop_vars("b"))


def test_truth_values_stand_beside_floats_and_alone():
    quick = JointDistribution(kernel_x="median", kernel_y="median", reg=1e-3, residual=False)
    one = clone(quick).fit(FRAME[FEW], FRAME["dust"])
    two = clone(quick).fit(FRAME[FEW].astype(float), FRAME["dust"])
    assert_array_equal(one.predict(FRAME[FEW]), two.predict(FRAME[FEW].astype(float)))
    alone = clone(quick).fit(FRAME[["rain"]], FRAME["dust"])
    assert alone.model_.x.columns.categories == {}
    predicted, rain = alone.predict(FRAME[["rain"]]), FRAME["rain"].to_numpy()
    dry, wet = predicted[~rain], predicted[rain]
    assert np.ptp(dry) + np.ptp(wet) <= 1e-12 < abs(dry.mean() - wet.mean())


def test_dask_frames_are_described_in_one_computation_and_stay_lazy():
    partitions = []

    def counted(part):
        partitions.append(len(part))
        return part

    lazy = dd.from_pandas(FRAME, npartitions=4).map_partitions(counted, meta=FRAME.iloc[:0])
    import dask

    with dask.config.set(scheduler="synchronous"):
        partitions.clear()
        sample = open_sample(lazy[["wind", "place"]], lazy["dust"], weights=lazy["rain"])
    assert sample.n_rows == N
    assert sum(partitions) <= 3 * N  # each of three frames once
    assert all(hasattr(source.array, "dask") for source in sample.reads)
    assert sample.columns[0].categories == {"place": tuple(FRAME["place"].unique())}


@pytest.mark.parametrize("form", ["pandas", "polars", "dask", "nullable"])
def test_missing_values_are_named_by_column_count_and_remedy(form):
    frame = FRAME[["wind", "place"]].copy()
    frame.loc[[7, 9], "wind"] = np.nan
    frame.loc[11, "place"] = None
    x = {
        "pandas": frame,
        "polars": pl.from_pandas(frame),
        "dask": dd.from_pandas(frame, npartitions=3),
        "nullable": frame.convert_dtypes(),
    }[form]
    said = r"'wind' has 2 \(first at row 7\); column 'place' has 1 \(first at row 11\).*dropna"
    for estimator in (JointDistribution(), ConditionalMeanEmbedding(), PivotedCholesky()):
        advice = r"\(\.\.\.\)\.drop_missing\(\)$"
        if hasattr(estimator, "missing"):
            advice = "fit with missing='drop' or 'impute'$"
        with pytest.raises(DataError, match=f"{said}.*, or .*{advice}"):
            estimator.fit(x, FRAME["dust"])
    with pytest.raises(DataError, match=rf"{said}.*, or fit with missing='drop' or 'impute'$"):
        JointDistribution().plan(x, FRAME["dust"])


@pytest.mark.parametrize("lazy", [False, True])
def test_advice_on_missing_values_is_given_where_it_helps(lazy):
    x, y = FRAME[FEW].to_numpy(float), FRAME[["dust"]].to_numpy(float)

    def rows(value):
        changed = np.where(np.arange(N)[:, None] == 7, value, x)
        return (da.from_array(changed, chunks=(70, 2)) if lazy else changed), y

    fit = JointDistribution(kernel_x="median", kernel_y="median", tol=0.1)
    basis = PivotedCholesky(tol=0.1)
    for estimator in (fit, clone(fit).set_params(missing="drop"), basis):
        with pytest.raises(DataError, match=r"infinite: drop these rows, or give finite values$"):
            estimator.fit(*rows(np.inf))
    with pytest.raises(DataError, match=r"NaN or infinite: .*fit with missing='drop'"):
        fit.fit(*rows(np.nan))
    # What is advised works, and transform has no such parameter.
    clone(fit).set_params(missing="drop").fit(*rows(np.nan))
    basis.fit(open_sample(rows(np.nan)[0]).drop_missing())
    with pytest.raises(DataError, match=r"row 7\) NaN or infinite: [^,]*leaves out NaN\)$"):
        np.asarray(basis.transform(rows(np.nan)[0]))
    for estimator, python, command in (
        (fit, "missing='drop'", "fit with --missing drop or --missing impute"),
        (basis, "drop_missing()", "ingest --missing drop leaves out rows that lack a value"),
    ):
        with pytest.raises(DataError) as caught:
            estimator.fit(*rows(np.nan))
        assert python in str(caught.value)
        assert command in caught.value.for_command
        assert "DataFrame" not in caught.value.for_command


def test_tables_that_are_no_numbers_are_refused_in_one_sentence():
    y = FRAME["dust"]
    times = pl.DataFrame({"t": pd.date_range("2020", periods=N)})
    for x, said in (
        (times, "column 't' of x holds times"),
        (dd.from_pandas(times.to_pandas(), npartitions=2), "column 't' of x holds times"),
        (pl.DataFrame({"l": [[1]] * N}), "column 'l' of x must be numeric or text"),
        (pl.DataFrame({"a": y}).lazy(), "collect"),
        (dd.from_pandas(pd.DataFrame({"a": y}).iloc[:-1], npartitions=2), "numbers of rows differ"),
    ):
        with pytest.raises(DataError, match=said):
            JointDistribution().fit(x, y)


def test_a_dask_frame_is_computed_once_to_open_it_and_once_per_pass():
    computed = []

    def part(i):
        computed.append(i)
        return FRAME.iloc[50 * i : 50 * (i + 1)]

    frame = dd.from_map(part, [0, 1], meta=FRAME.iloc[:0])
    computed.clear()
    sample = open_sample(frame, x_columns=["wind", "place"], y_columns=["dust"], weights="hour")
    assert sorted(computed) == [0, 1]
    computed.clear()
    fit = JointDistribution(kernel_x="median", kernel_y="median", reg=1e-2, tol=0.1)
    fit.fit(sample, scheduler="synchronous")
    assert sorted(computed) == sorted([0, 1] * fit.n_passes_)
    with pytest.raises(DataError, match="unknown column 'nix': there are 'wind', 'rain'"):
        open_sample(frame, x_columns=["nix"], y_columns=["dust"])


ESTIMATORS = (
    JointDistribution,
    ConditionalMeanEmbedding,
    JointClassifier,
    EmbeddingClassifier,
    KernelLogisticRegression,
    PivotedCholesky,
)


@pytest.mark.parametrize("kind", ESTIMATORS, ids=lambda kind: kind.__name__)
def test_y_has_two_names(kind):
    x, target = FRAME[["wind"]], FRAME["level" if "ssi" in kind.__name__ else "dust"]
    quick = {"reg": 1e-2} if kind is not PivotedCholesky else {}
    names = kind().get_params()
    quick |= {name: "median" for name in ("kernel_x", "kernel_y") if name in names}
    ask = "transform" if kind is PivotedCholesky else "predict"
    one, two, three = (
        getattr(kind(**quick).fit(*args, **given), ask)(x)
        for args, given in (((x, target), {}), ((x,), {"y": target}), ((x,), {"Y": target}))
    )
    assert_array_equal(one, two)
    assert_array_equal(one, three)
    if kind is not PivotedCholesky:
        with pytest.raises(DataError, match="two names of the same argument"):
            kind(**quick).fit(x, Y=target, y=target)
    if hasattr(kind, "partial_fit"):
        kind(**quick).partial_fit(x, y=target)
    if hasattr(kind, "plan") and kind is not PivotedCholesky:
        kind(**quick).plan(x, y=target)


NO_QUERIES = {"fit", "partial_fit", "plan", "fit_transform", "load"}


def queries(kind):
    """Public methods of an estimator that ask the fitted model something."""
    from sklearn.base import BaseEstimator, TransformerMixin

    general = {name for base in (BaseEstimator, TransformerMixin) for name in dir(base)}
    named = {name for name in dir(kind) if not name.startswith("_")}
    return sorted(n for n in named - general - NO_QUERIES if callable(getattr(kind, n)))


@pytest.mark.parametrize("kind", ESTIMATORS, ids=lambda kind: kind.__name__)
def test_every_query_of_an_unfitted_estimator_says_so(kind):
    x, y = np.zeros((3, 1)), np.array([0.0, 1.0, 1.0])
    asked = {
        "expect": ("y0", x),
        "density_ratio": (x, x),
        "score": (x, y),
        "save": ("nowhere",),
        "transform_store": (x, "nowhere"),
        "get_feature_names_out": (),
    }
    names = queries(kind)
    assert names
    for name in names:
        if "request" in name or name.startswith("set_"):
            continue
        for points in (x, da.zeros((3, 1))) if name not in asked else (x,):
            with pytest.raises(NotFittedError, match=f"this {kind.__name__} is not fitted"):
                getattr(kind(), name)(*asked.get(name, (points,)))


def test_a_column_that_points_lack_is_named_with_those_they_have():
    quick = {"kernel_x": "median", "kernel_y": "median", "reg": 1e-3, "residual": False}
    model = JointDistribution(**quick).fit(FRAME[FEW], FRAME["dust"])
    said = "X lacks the column 'rain', and has others: 'dust'; expected are 'wind', 'rain'"
    for points in (
        FRAME[["wind", "dust"]],
        pl.from_pandas(FRAME[["wind", "dust"]]),
        dd.from_pandas(FRAME[["wind", "dust"]], npartitions=2),
        {"wind": [0.0], "dust": [1.0]},
    ):
        with pytest.raises(DataError, match=said):
            model.conditional(points)


UNNAMED = {
    "DataArray": lambda points: xr.DataArray(points, dims=("time", "column")),
    "lazy DataArray": lambda points: xr.DataArray(da.from_array(points), dims=("time", "column")),
    "frame": pd.DataFrame,
    "lazy frame": lambda points: dd.from_pandas(pd.DataFrame(points), npartitions=1),
}


@pytest.mark.parametrize("kind", UNNAMED)
def test_points_whose_columns_have_no_names_are_taken_by_position(kind):
    points = np.array([[0.3, 1.0], [-1.0, 0.0]])
    given, named = UNNAMED[kind](points), FRAME[FEW].astype(float)
    for x in (named, named.to_numpy()):
        features = PivotedCholesky(tol=0.1).fit(x)
        assert_array_equal(features.transform(given), features.transform(points))
        quick = {"kernel_x": "median", "kernel_y": "median", "reg": 1e-3, "residual": False}
        model = JointDistribution(**quick).fit(x, FRAME["dust"].to_numpy())
        assert_array_equal(model.expect("y0", given), model.expect("y0", points))
        assert_array_equal(model.conditional(given).std(), model.conditional(points).std())
        with pytest.raises(DataError, match=r"lacks the columns|must have shape|has 1 columns"):
            model.conditional(UNNAMED[kind](points[:, :1]))


def test_arrays_and_rows_whose_columns_have_names_are_taken_by_name():
    quick = {"kernel_x": "median", "kernel_y": "median", "reg": 1e-3, "residual": False}
    frame = FRAME[FEW].astype(float)
    model = JointDistribution(**quick).fit(frame, FRAME["dust"])
    array = xr.DataArray(frame[FEW[::-1]], dims=("time", "column"), coords={"column": FEW[::-1]})
    expected = model.conditional(frame[:5]).std()
    assert_array_equal(model.conditional(array[:5]).std(), expected)
    expected = model.conditional(frame[3:4]).std()
    with pytest.raises(DataError, match="X lacks the column 'rain', and has others: 'snow'"):
        model.conditional(array.assign_coords(column=["snow", "wind"]))
    one = model.conditional(frame.iloc[3][::-1])
    assert_array_equal(one.std().to_numpy(), expected)
    assert list(one.std().index) == [3]
    assert one.quantile(Q).shape == (1, 5)
    assert_array_equal(model.conditional(array[3]).std(), expected)
    assert_array_equal(model.predict(array[3]), model.predict(frame[3:4]))


def test_a_data_array_without_coordinates_has_the_default_names():
    x = xr.DataArray(FRAME[FEW].to_numpy(float), dims=("time", "column"))
    assert open_sample(x, FRAME["dust"]).columns[0].names == ("x0", "x1")


@pytest.mark.parametrize("lazy", [False, True])
def test_coordinates_of_a_data_array_may_be_called_columns(lazy):
    numbers = FRAME[FEW].to_numpy(float)
    array = da.from_array(numbers, chunks=(70, 1)) if lazy else numbers
    x = xr.DataArray(array, dims=("row", "columns"), coords={"columns": FEW})
    sample = open_sample(x, x[:, :1], x_columns=FEW[::-1])
    assert [columns.names for columns in sample.columns] == [tuple(FEW[::-1]), tuple(FEW[:1])]
    fit = JointDistribution(kernel_x="median", kernel_y="median", tol=0.1).fit(x, numbers[:, :1])
    expected = fit.predict(numbers[:5])
    np.testing.assert_allclose(fit.predict(x[:5, ::-1]), expected)
    with pytest.raises(DataError, match="there are only rows of x: give y"):
        open_sample(x, x_columns=FEW[:1], y_columns=FEW[1:])
