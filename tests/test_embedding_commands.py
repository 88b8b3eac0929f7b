"""Embeddings on the command line: queries, shards and ridge schedules are those of Python."""

import json

import numpy as np
import pandas as pd
import pytest
import zarr
from click.testing import CliRunner
from conftest import write_store

from cme_dask import ConditionalMeanEmbedding, SparseEmbedding, kernels, load, open_sample
from cme_dask.cli import cli
from cme_dask.errors import ShardDone

N = 4500  # two strips, one of each shard
KINDS = {"embedding": ConditionalMeanEmbedding, "sparse": SparseEmbedding}
GIVEN = {"kernel_x": kernels.Gaussian(0.7), "kernel_y": kernels.Gaussian(0.5), "max_rank": 10}
EACH = pytest.mark.parametrize("name", KINDS)
pytestmark = pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")


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


def fitted(name, data, **options):
    own = {"n_gammas": 3, "penalty": "columns"} if name == "sparse" else {}
    model = KINDS[name](**GIVEN, **({"reg": 1e-3, "n_folds": 3} | own | options))
    return model.fit(*data, functions=["y0 > 0.2"], workers=1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embeddings")
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (N, 1))
    y = np.column_stack([np.sin(2 * x[:, 0]), x[:, 0]]) + 0.3 * rng.standard_normal((N, 2))
    write_store(folder / "s.zarr", x, y, chunk_rows=900)
    fits = {name: fitted(name, (str(folder / "s.zarr"),)) for name in KINDS}
    for name, fit in fits.items():
        fit.save(folder / name)
    return folder, x, fits


@EACH
def test_points_are_answered_as_in_python(world, name):
    folder, _, fits = world
    fit, at = fits[name], np.array([[0.3], [-1.0]])
    points = ("--given", "x0=0.3", "--given", "x0=-1")
    answered = as_json("expect", folder / name, *points, "--of", "y1", "--of", "y0 > 0.2")
    np.testing.assert_array_equal(answered["values"], fit.expect(["y1", "y0 > 0.2"], at))
    if name == "embedding":
        std = fit.expect(["y1", "y0 > 0.2"], at, return_std=True)[1]
        np.testing.assert_array_equal(answered["std"], std)
    else:
        assert answered["std"] is None
    every = as_json("expect", folder / name, *points)["functions"]
    assert every == ["y0", "y1"] + ["y0 > 0.2"] * (name == "embedding")
    code, out, _ = run("expect", folder / name, *points)
    assert (code, "E[f(y) | x]" in out) == (0, True)
    answered = as_json("predict", folder / name, *points, "--event", "y0 > 0.2")
    assert answered["answers"] == ["y0 mean", "y1 mean", "P(y0 > 0.2)"]
    expected = np.column_stack([fit.predict(at), fit.expect("y0 > 0.2", at)])
    np.testing.assert_array_equal(answered["values"], expected)
    code, out, _ = run("predict", folder / name, *points)
    assert (code, "Expectations of y given x" in out) == (0, True)


@EACH
def test_stores_and_files_are_answered_as_in_python(world, name, tmp_path):
    folder, x, fits = world
    fit = fits[name]
    args = ("predict", folder / name, folder / "s.zarr", "--event", "y0 > 0.2")
    result = as_json(*args, "--out", tmp_path / "a.zarr", "--workers", 1)
    assert (result["passes"], result["rows"]) == (1, N)
    assert result["arrays"] == {"mean": [N, 2], "probability": [N, 1]}
    answers = zarr.open_group(str(tmp_path / "a.zarr"))
    np.testing.assert_allclose(answers["mean"][...], fit.predict(x), atol=1e-12)
    events = answers["probability"][...][:, 0]
    np.testing.assert_allclose(events, fit.expect("y0 > 0.2", x), atol=1e-12)
    pd.DataFrame({"x0": x[:5, 0]}).to_csv(tmp_path / "p.csv", index=False)
    written = ("--points", tmp_path / "p.csv", "--out", tmp_path / "a.csv", "--of", "mean")
    assert as_json("predict", folder / name, *written)["rows"] == 5
    table = pd.read_csv(tmp_path / "a.csv")
    assert list(table) == ["x0", "y0 mean", "y1 mean"]
    np.testing.assert_allclose(table.to_numpy()[:, 1:], fit.predict(x[:5]), atol=1e-12)


def test_a_sparse_embedding_answers_events_that_no_fit_declared(world):
    folder, _, fits = world
    answered = as_json("expect", folder / "sparse", "--given", "x0=1", "--of", "y1 > y0")
    expected = fits["sparse"].expect(["y1 > y0"], [[1.0]])
    np.testing.assert_array_equal(answered["values"], expected)
    says = refused("expect", folder / "embedding", "--given", "x0=1", "--of", "y1 > y0")
    assert "was not declared" in says
    says = refused("predict", folder / "embedding", "--given", "x0=1", "--event", "y1 > y0")
    assert "was not declared" in says


def test_labels_have_the_probabilities_of_python(world, tmp_path):
    _, x, _ = world
    labels = np.where(x[:, 0] + 0.3 > 0, "up", "down")
    data = pd.DataFrame({"x0": x[:, 0]}), pd.DataFrame({"kind": pd.Categorical(labels)})
    model = SparseEmbedding(
        **GIVEN | {"kernel_y": kernels.Categorical(1.0)}, reg=1e-3, n_folds=3, n_gammas=2
    ).fit(*data)
    model.save(tmp_path / "m")
    answered = as_json("predict", tmp_path / "m", "--given", "x0=1.5")
    assert answered["answers"] == ['P(kind == "down")', 'P(kind == "up")']
    np.testing.assert_array_equal(answered["values"], model.model_.predict_proba([[1.5]]))
    event = ("--event", 'kind == "up"')
    answered = as_json("predict", tmp_path / "m", "--given", "x0=1.5", *event)
    assert answered["answers"] == ['P(kind == "up")', 'P(kind == "down")']
    assert answered["values"][0] == model.model_.predict_proba([[1.5]])[0, ::-1].tolist()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("expect", "--reverse"), "an embedding answers y given x"),
        (("predict", "--reverse"), "an embedding answers y given x"),
        (("predict", "--of", "std"), "unknown answer 'std': there are mean, probability"),
        (("predict", "--of", "quantile"), "unknown answer 'quantile': there are mean, probability"),
        (("predict", "--of", "mean", "--event", "y0 > 1"), "an event is answered by its prob"),
        (("expect", "--of", "z"), "unknown column 'z'"),
        (("predict", "--event", "z > 1"), "unknown column 'z' in an event"),
    ],
)
def test_what_embeddings_do_not_answer_is_named(world, args, message):
    command, *options = args
    given = "y0=0,y1=0" if "--reverse" in args and command == "expect" else "x0=1"
    assert message in refused(command, world[0] / "sparse", "--given", given, *options)


OWN = {"embedding": {}, "sparse": {"gamma": [0.02, 0.05]}}
OWN_FLAGS = {"embedding": (), "sparse": ("--gamma", "0.02,0.05")}
"""Two gammas of the default path, whose searches test_penalties_of_a_sparse_embedding has."""
FLAGS = ("--kernel-x", "gaussian:0.7", "--kernel-y", "gaussian:0.5", "--max-rank", "10")


@EACH
def test_shards_add_up_to_the_bits_of_one_fit(world, name, tmp_path):
    folder, x, _ = world
    for i in (1, 0):
        with pytest.raises(ShardDone, match=f"shard {i + 1} of 2 has done its share"):
            KINDS[name](**GIVEN, **OWN[name]).fit(
                str(folder / "s.zarr"), checkpoint=tmp_path / "c", shard=(i, 2), workers=1
            )
    whole, parts = (
        KINDS[name](**GIVEN, **OWN[name]).fit(str(folder / "s.zarr"), checkpoint=c, workers=1)
        for c in (None, tmp_path / "c")
    )
    assert parts.report_.resumed_strips > 0
    assert np.array_equal(parts.predict(x), whole.predict(x))
    assert parts.reg_ == whole.reg_
    command = ("fit", folder / "s.zarr", "--out", tmp_path / "m", "--estimator", name, *FLAGS)
    command = (*command, *OWN_FLAGS[name], "--checkpoint", tmp_path / "d", "--workers", 1)
    for i in (1, 2):
        assert f"shard {i} of 2 has done" in as_json(*command, "--shard", f"{i}/2")["shard"]
    as_json(*command, "--resume")
    assert np.array_equal(load(tmp_path / "m").predict(x), whole.predict(x))


def test_leave_one_out_takes_a_round_of_shards_for_each_pass(world, tmp_path):
    folder, x, _ = world
    own = {**GIVEN, "validation": "leave-one-out"}
    for i in (0, 1, 0, 1):
        with pytest.raises(ShardDone):
            ConditionalMeanEmbedding(**own).fit(
                str(folder / "s.zarr"), checkpoint=tmp_path / "c", shard=(i, 2), workers=1
            )
    parts = ConditionalMeanEmbedding(**own).fit(
        str(folder / "s.zarr"), checkpoint=tmp_path / "c", workers=1
    )
    whole = ConditionalMeanEmbedding(**own).fit(str(folder / "s.zarr"), workers=1)
    assert np.array_equal(parts.losses_, whole.losses_)
    assert np.array_equal(parts.predict(x), whole.predict(x))


@pytest.mark.parametrize(
    "schedule", ["finite-rank", pytest.param("slow-decay", marks=pytest.mark.slow)]
)
@EACH
def test_schedules_of_the_ridge(world, name, schedule, tmp_path):
    folder, _, _ = world
    command = ("fit", folder / "s.zarr", "--out", tmp_path / "m", "--estimator", name, *FLAGS)
    as_json(*command, *OWN_FLAGS[name], "--reg", schedule, "--workers", 1)
    expected = KINDS[name](**GIVEN, **OWN[name], reg=schedule).fit(
        open_sample(str(folder / "s.zarr"))
    )
    model = load(tmp_path / "m")
    assert model.reg == expected.reg_ == expected.model_.reg
    assert np.array_equal(model.predict([[0.5]]), expected.predict([[0.5]]))


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (("--penalty", "columns"), {"penalty": "columns"}),
        (("--gamma", "0.02"), {"gamma": [0.02]}),
        (("--gamma", "0.02,0.05", "--relax", "yes"), {"gamma": [0.02, 0.05], "relax": True}),
        pytest.param(
            ("--gamma-ratio", "0.1", "--penalty", "rows"),
            {"gamma_ratio": 0.1, "penalty": "rows"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_penalties_of_a_sparse_embedding(world, options, changes, tmp_path):
    folder, _, _ = world
    command = ("fit", folder / "s.zarr", "--out", tmp_path / "m", "--estimator", "sparse", *FLAGS)
    as_json(*command, *options, "--folds", 3, "--workers", 1)
    expected = KINDS["sparse"](**GIVEN, **changes, n_folds=3).fit(
        open_sample(str(folder / "s.zarr"))
    )
    assert np.array_equal(load(tmp_path / "m").coef, expected.model_.coef)
    says = refused(*command, "--estimator", "embedding", *options, "--overwrite")
    assert "the estimator embedding takes" in says


def test_ridges_that_are_none_are_named(world, tmp_path):
    folder = world[0]
    command = ("fit", folder / "s.zarr", "--out", tmp_path / "m", *FLAGS)
    says = refused(*command, "--reg", "fast", "--estimator", "embedding")
    assert "neither a number nor a pair rY,rX nor a schedule (finite-rank, slow-decay)" in says
    says = refused(*command, "--reg", "finite-rank")
    assert "the schedule finite-rank is one of the estimators embedding and sparse" in says
