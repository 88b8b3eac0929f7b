"""``cme-dask predict``: points, CSV files and whole stores."""

import json
import warnings

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from click.testing import CliRunner
from conftest import write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cme_dask import JointDistribution, kernels, load, open_sample
from cme_dask.cli import cli
from cme_dask.errors import DataError, ResourceError
from cme_dask.kernels.transforms import PoolRare, Standard, Transform
from cme_dask.models.query import LawQuery
from cme_dask.passes.driver import Executor, RunOptions
from cme_dask.passes.lazy_laws import given_rows
from cme_dask.passes.write import write_answers

N = 5000
EVENTS = ("y0 > 0.5", "y1 <= y0")


def run(*args):
    result = CliRunner().invoke(cli, [str(a) for a in args], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def as_json(*args):
    code, out, err = run(*args, "--json")
    assert code == 0, err
    return json.loads(out)


def refused(*args):
    code, out, err = run(*args)
    assert (code, out) == (2, ""), err
    return " ".join(err.split())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 2))
    y = np.column_stack([np.sin(2 * x[:, 0]), x[:, 1]]) + 0.4 * rng.standard_normal((N, 2))
    write_store(folder / "s.zarr", x, y, chunk_rows=900)
    fit = JointDistribution(
        kernel_x=kernels.Gaussian(0.8),
        kernel_y=kernels.Gaussian(0.9),
        tol=0.1,
        reg=1e-4,
        support_size=100,
        residual=False,
    ).fit(str(folder / "s.zarr"))
    fit.save(folder / "m.zarr")
    return folder, x, y, fit.model_


def expected(law, levels=(0.05, 0.5, 0.95), events=EVENTS):
    return {
        "mean": law.mean(),
        "std": law.std(),
        "quantile": law.quantile(levels),
        "probability": np.stack([law.probability(event) for event in events], axis=1),
        "effective_support": law.effective_support(),
    }


def test_a_store_is_answered_row_by_row(world):
    folder, x, _, model = world
    out = folder / "a.zarr"
    events = [word for event in EVENTS for word in ("--event", event)]
    told = as_json("predict", folder / "m.zarr", folder / "s.zarr", "--out", out, *events)
    assert (told["rows"], told["passes"]) == (N, 1)
    group = zarr.open_group(str(out), mode="r")
    for name, values in expected(model.conditional(x)).items():
        assert told["arrays"][name] == list(values.shape)
        np.testing.assert_allclose(group[name][...], values, atol=1e-10)
    about = group.attrs["cme_dask"]
    assert (about["kind"], about["schema_version"], about["rows"]) == ("answers", 1, N)
    assert about["levels"] == [0.05, 0.5, 0.95]
    assert about["events"] == list(EVENTS)
    assert about["columns"]["names"] == ["y0", "y1"]
    assert (about["given"]["variable"], about["given"]["names"]) == ("x", ["x0", "x1"])
    assert xr.open_zarr(out, consolidated=False)["quantile"].dims == ("row", "level", "column")
    assert sorted(p.name for p in folder.iterdir() if "partial" in p.name) == []
    assert "already exists" in refused(
        "predict", folder / "m.zarr", folder / "s.zarr", "--out", out
    )


def test_what_is_asked_is_chosen_and_reversed(world):
    folder, _, y, model = world
    out = folder / "b.zarr"
    chosen = ("--of", "quantile", "--of", "probability", "--levels", "0.2", "--event", "x0 > 0")
    args = (folder / "m.zarr", folder / "s.zarr", "--out", out, "--reverse", *chosen)
    as_json("predict", *args, "--chunk-rows", 512)
    group = zarr.open_group(str(out), mode="r")
    assert sorted(group.array_keys()) == ["probability", "quantile"]
    assert group["quantile"].chunks == (512, 1, 2)
    law = model.conditional(Y=y)
    np.testing.assert_allclose(group["quantile"][:, 0], law.quantile(0.2), atol=1e-10)
    np.testing.assert_allclose(group["probability"][:, 0], law.probability("x0 > 0"), atol=1e-10)


@pytest.fixture(scope="module")
def reference(world, tmp_path_factory):
    return written(world, tmp_path_factory.mktemp("r") / "a", da.from_array(world[1]), "threads", 1)


def written(world, out, values, scheduler, workers, chunk_rows=None):
    close = LawQuery(world[3], ("quantile",), levels=(0.1, 0.1 + 1e-9))
    assert len(set(close.labels)) == len(close.labels)
    query = LawQuery(world[3], events=EVENTS)
    rows = given_rows(values, query.given)
    executor = RunOptions(scheduler, workers).executor()
    write_answers(rows, query, out, chunk_rows=chunk_rows, overwrite=False, executor=executor)
    group = zarr.open_group(str(out), mode="r")
    return {name: group[name][...] for name in group.array_keys()}


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(
    source=st.integers(300, N),
    target=st.integers(200, 6000),
    workers=st.integers(1, 3),
    lazily=st.booleans(),
)
def test_any_chunks_give_the_same_bits(
    world, reference, tmp_path_factory, source, target, workers, lazily
):
    folder = tmp_path_factory.mktemp("w")
    values = (
        da.from_array(world[1], chunks=(source, 2))
        if lazily
        else str(write_store(folder / "s", world[1], world[2], chunk_rows=source))
    )
    found = written(world, folder / "a", values, "threads", workers, target)
    for name, values in reference.items():
        np.testing.assert_array_equal(found[name], values)


def test_processes_and_a_failed_run_leave_whole_outputs_or_none(world, reference, tmp_path):
    found = written(world, tmp_path / "p", str(world[0] / "s.zarr"), "processes", 2)
    for name, values in reference.items():
        np.testing.assert_array_equal(found[name], values)
    x = world[1].copy()
    x[4321, 1] = np.inf
    with pytest.raises(DataError, match=r"column 'x1' has 1 \(first at row 4321\)"):
        written(world, tmp_path / "bad", da.from_array(x, chunks=(1000, 2)), "threads", 2)
    tight = Executor("threads", 2, 100 << 20)
    query = LawQuery(world[3])
    rows = given_rows(str(world[0] / "s.zarr"), query.given)
    options = {"chunk_rows": None, "overwrite": False, "executor": tight}
    with pytest.raises(ResourceError, match="answers of laws of 100 cells"):
        write_answers(rows, query, tmp_path / "bad", **options)
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_points_are_printed_or_written_beside_their_answers(world):
    folder, _, _, model = world
    points = pd.DataFrame({"note": ["a", "b"], "x1": [0.1, -1.0], "x0": [0.3, 0.2]})
    points.to_csv(folder / "p.csv", index=False)
    law = model.conditional(points[["x0", "x1"]].to_numpy())
    told = as_json("predict", folder / "m.zarr", "--points", folder / "p.csv", "--event", EVENTS[0])
    assert told["answers"][:3] == ["y0 mean", "y1 mean", "y0 std"]
    parts = expected(law, events=EVENTS[:1]).values()
    flat = np.concatenate([np.reshape(part, (2, -1)) for part in parts], axis=1)
    np.testing.assert_allclose(told["values"], flat, atol=1e-12)
    assert len(told["answers"]) == flat.shape[1]
    args = ("predict", folder / "m.zarr", "--points", folder / "p.csv", "--event", EVENTS[0])
    assert as_json(*args, "--out", folder / "a.csv")["rows"] == 2
    table = pd.read_csv(folder / "a.csv")
    assert list(table) == ["x0", "x1", *told["answers"]]
    np.testing.assert_allclose(table.to_numpy()[:, 2:], flat, atol=1e-12)
    assert "already exists" in refused(*args, "--out", folder / "a.csv")
    url = ("predict", folder / "m.zarr", "--event", EVENTS[0], "--points")
    (folder / "p q.csv").write_bytes((folder / "p.csv").read_bytes())
    for uri in ((folder / "p q.csv").as_uri(), f"file://localhost{folder / 'p.csv'}"):
        assert as_json(*url, uri)["values"] == told["values"]
    assert "a local file is expected: download it from the URL s3://p.csv" in refused(
        *url, "s3://p.csv"
    )
    code, out, _ = run(
        "predict", folder / "m.zarr", "--given", "x0=0.3,x1=0.1", "--event", EVENTS[0]
    )
    assert code == 0
    for text in ("Laws of y given x", "y0 q0.95", "P(y0 > 0.5)", "effective support"):
        assert text in out
    code, out, _ = run("predict", folder / "m.zarr", "--given", "y0=0,y1=0", "--reverse")
    assert "Laws of x given y" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give points by --given or --points, or a STORE: one of the two"),
        (("--given", "x0=1,x1=2", "STORE"), "one of the two"),
        (("STORE",), "Missing option '--out'"),
        (("--given", "x0=1,x1=2", "--workers", "2"), "--report are for a STORE"),
        (("--given", "x0=1,x1=2", "--chunk-rows", "10"), "--report are for a STORE"),
        (("--given", "x0=1,x0=3,x1=2"), "names a column twice"),
        (("--given", "x0=1"), "lacks column 'x1'"),
        (("--given", ""), "takes COLUMN=NUMBER,..."),
        (("--given", '"x0=1,x1=2'), "takes COLUMN=NUMBER,..."),
        (("--given", "x0=1,x1"), "takes COLUMN=NUMBER,..."),
        (("--given", "x0=1,x1=nan"), "x1 must be a finite number"),
        (("--given", "x0=1,x1=2", "--event", "z > 1"), "unknown column 'z' in an event"),
        (("--given", "x0=1,x1=2", "--levels", "0.5,1"), "levels of quantiles lie between"),
        (("--given", "x0=1,x1=2", "--levels", "0.5,0.5"), "levels of quantiles must differ"),
        (
            ("--given", "x0=1,x1=2", "--of", "quantile", "--event", "y0 > 1"),
            "an event is answered by its probability, the answers are quantile",
        ),
        (("--given", "x0=1,x1=2", "--of", "probability"), "probability of y0, y1 has no values"),
        (("--given", "x0=1,x1=2", "--of", "mode"), "'mode' is not one of"),
        (("--given", "x0=1,x1=2", "--interval", "1"), "probability of an interval lies between"),
        (("--given", "x0=1,x1=2", "--conformal"), "give --interval 0.9, or leave conformal out"),
        (
            ("--given", "x0=1,x1=2", "--interval", "0.9", "--conformal"),
            "no conformity scores of held-out rows",
        ),
        (("--given", "y0=1,y1=2", "--reverse", "--of", "interval", "--conformal"), "of x given y"),
    ],
)
def test_what_is_refused(world, args, message):
    folder = world[0]
    args = [folder / "s.zarr" if a == "STORE" else a for a in args]
    assert message in refused("predict", folder / "m.zarr", *args)


def test_points_may_hold_names_and_labels_with_commas(tmp_path):
    rng = np.random.default_rng(1)
    X = pd.DataFrame({"flow, m3": rng.normal(size=90), "site": rng.choice(["A, B", "C"], 90)})
    quick = {"kernel_x": "median", "kernel_y": "median", "reg": 1e-3, "residual": False}
    fit = JointDistribution(**quick).fit(X, pd.Series(X["flow, m3"] + (X["site"] == "C"), name="y"))
    fit.save(tmp_path / "m")
    given = '"flow, m3=0.5","site=A, B"'
    found = as_json("predict", tmp_path / "m", "--given", given, "--of", "mean")
    point = pd.DataFrame({"flow, m3": [0.5], "site": ["A, B"]})
    np.testing.assert_allclose(found["values"], [fit.conditional(point).mean()])


@pytest.mark.parametrize("conformal", [False, True])
def test_intervals_are_those_of_the_laws(world, tmp_path, conformal):
    """At points, in a file and in a store; conformal ones of a model that has scores."""
    folder, x, y, model = world
    model = model.conformalized(x[:1000], y[:1000])
    model.save(tmp_path / "m")
    options = ("--of", "mean", "--interval", 0.8) + ("--conformal",) * conformal
    told = as_json("predict", tmp_path / "m", "--given", "x0=0.5,x1=-1", *options)
    ends = ["y0 lower", "y1 lower", "y0 upper", "y1 upper"]
    assert told["answers"] == ["y0 mean", "y1 mean", *ends]
    law = model.conditional([[0.5, -1.0]])
    expected = np.ravel(law.interval(0.8, conformal=conformal))
    np.testing.assert_allclose(told["values"][0][2:], expected, rtol=1e-12)
    (tmp_path / "points.csv").write_text("x0,x1\n0.5,-1\n")
    run("predict", tmp_path / "m", "--points", tmp_path / "points.csv", *options,
        "--out", tmp_path / "a.csv")  # fmt: skip
    table = pd.read_csv(tmp_path / "a.csv")
    np.testing.assert_allclose(table[ends].to_numpy()[0], expected, rtol=1e-9)
    run("predict", tmp_path / "m", "--points", tmp_path / "points.csv", *options, "--overwrite",
        "--out", tmp_path / "a.csv")  # fmt: skip
    out = tmp_path / "a"
    as_json("predict", tmp_path / "m", folder / "s.zarr", "--out", out, "--of", "interval",
            *("--conformal",) * conformal)  # fmt: skip
    group = zarr.open_group(str(out), mode="r")
    assert list(group.array_keys()) == ["interval"]
    both = np.stack(model.conditional(x).interval(0.9, conformal=conformal), axis=1)
    np.testing.assert_allclose(group["interval"][...], both, atol=1e-10)
    about = group.attrs["cme_dask"]
    assert (about["interval"], about["conformal"]) == (0.9, conformal)
    assert xr.open_zarr(out, consolidated=False)["interval"].dims == ("row", "end", "column")


def test_ends_that_rows_cannot_tell_are_unbounded(world, tmp_path):
    """Of a level that needs more rows than have scores."""
    _, x, y, model = world
    model.conformalized(x[:20], y[:20]).save(tmp_path / "m")
    asked = (tmp_path / "m", "--given", "x0=0,x1=0", "--of", "interval", "--interval", 0.99)
    told = as_json("predict", *asked, "--conformal")
    assert told["values"] == [[None] * 4]
    assert run("predict", *asked, "--conformal")[1].count("unbounded") == 4


def test_labels_are_answered_by_their_probabilities(tmp_path):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(4000)
    kind = np.where(x + 0.5 * rng.standard_normal(4000) > 0, "up", "down")
    table = pd.DataFrame({"x": x, "kind": kind, "z": x + rng.standard_normal(4000)})
    table.to_csv(tmp_path / "t.csv", index=False)
    run(
        "ingest", tmp_path / "t.csv", "--out", tmp_path / "s.zarr", "--x", "x", "--y", "kind,z",
        "--categorical", "kind",
    )  # fmt: skip
    JointDistribution(kernel_x="median", kernel_y="median", tol=1e-2, residual=False).fit(
        str(tmp_path / "s.zarr")
    ).save(tmp_path / "m")
    told = as_json("predict", tmp_path / "m", "--given", "x=1.5", "--event", 'kind == "up"')
    assert told["answers"][:5] == ["z mean", "z std", "z q0.05", "z q0.5", "z q0.95"]
    chances = dict(zip(told["answers"], told["values"][0], strict=True))
    up, down = chances['P(kind == "up")'], chances['P(kind == "down")']
    assert up + down == pytest.approx(1.0)
    assert up > 0.9
    args = ("--given", "kind=up,z=1", "--reverse", "--of", "quantile")
    assert as_json("predict", tmp_path / "m", *args)["answers"][0] == "x q0.05"
    reversed_ = (
        "predict",
        tmp_path / "m",
        tmp_path / "s.zarr",
        "--out",
        tmp_path / "r",
        "--reverse",
    )
    assert as_json(*reversed_)["arrays"]["mean"] == [4000, 1]
    found = zarr.open_group(str(tmp_path / "r"))["mean"][...]
    sample = open_sample(str(tmp_path / "s.zarr"))
    law = load(tmp_path / "m").conditional(Y=sample.sources[1].read(0, 4000))
    np.testing.assert_allclose(found[:, 0], law.mean(), atol=1e-10)


def test_a_model_without_laws_says_so(world, tmp_path):
    _, x, y, _ = world
    gaussian = kernels.Gaussian(1.0)
    JointDistribution(
        kernel_x=gaussian, kernel_y=gaussian, tol=0.2, support_size=0, residual=False
    ).fit(x, y).save(tmp_path / "m")
    assert "support_size of at least 1" in refused(
        "predict", tmp_path / "m", "--given", "x0=1,x1=2"
    )


def test_unseen_labels_are_told_of_once(tmp_path):
    rng = np.random.default_rng(1)
    labels = rng.choice(["a", "b", "rare"], 600, p=[0.5, 0.497, 0.003])
    frame = pd.DataFrame({"place": labels, "x": rng.standard_normal(600)})
    kernel = kernels.Gaussian(1.0).on([1]) * kernels.Categorical(1.0).on([0])
    pooled = Transform((PoolRare((0.0, 1.0)), Standard(0.0, 1.0)))
    options = {
        "kernel_x": kernels.TransformedKernel(kernel, pooled),
        "kernel_y": kernels.Gaussian(1.0),
    }
    codes = pd.Categorical(labels, categories=["a", "b", "rare"])
    y = frame["x"] + (labels == "b")
    fit = JointDistribution(**options, tol=0.1, reg=1e-3, support_size=50, residual=False)
    fit.fit(frame.assign(place=codes), pd.DataFrame({"y": y})).save(tmp_path / "m")
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # what the command makes a line of each
        code, out, err = run("predict", tmp_path / "m", "--given", "place=new,x=0.3")
    assert code == 0, err
    assert err.count("warning: ") == err.count("'new' (1 row)") == 1
    assert "y mean" in out
