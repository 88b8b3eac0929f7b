"""Classifiers on the command line: fits, probabilities, scores and shards are those of Python."""

import json

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from sklearn.metrics import log_loss

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    KernelLogisticRegression,
    MulticlassEmbedding,
    kernels,
    load,
    open_sample,
    score,
)
from cme_dask.cli import cli
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.errors import DataError, ShardDone

N = 5000  # two strips, one of each shard
NAMES = ("east", "north", "west")
KINDS = {
    "classifier": (EmbeddingClassifier, {"kernel_x": "median", "kernel_y": "median", "reg": 1e-4}),
    "multiclass": (MulticlassEmbedding, {"batch_size": 100, "max_iter": 5}),
}
FLAGS = {
    "classifier": ("--kernel", "median", "--reg", "1e-4"),
    "multiclass": ("--batch-size", 100, "--max-iter", 5),
}
COMMON = {"max_rank": 20, "n_folds": 2}
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


def estimator(name):
    kind, options = KINDS[name]
    return kind(**COMMON, **options)


def command(name, store, out, *more):
    flags = ("--max-rank", 20, "--folds", 2, "--workers", 1, *FLAGS[name], *more)
    return ("fit", store, "--out", out, "--estimator", name, *flags)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifiers")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 2))
    scores = np.column_stack([x[:, 0], x[:, 1], -x.sum(1)])
    codes = (scores + 0.7 * rng.normal(size=scores.shape)).argmax(1)
    columns = Columns(("a", "b")), Columns(("wind",), {}, {"wind": NAMES})
    with writing_sample(folder / "s.zarr", columns, chunk_rows=1000) as writer:
        writer.append(x, codes[:, None].astype(float))
    return folder / "s.zarr", x, codes


@pytest.fixture(scope="module")
def models(world, tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("models"), {}
    for name in KINDS:
        fit = as_json(*command(name, world[0], folder / name, "--hold-out", 0.2))
        sample = open_sample(str(world[0])).split(0.2)[0]
        made[name] = folder / name, fit, estimator(name).fit(sample, workers=1)
    return made


@EACH
def test_the_model_of_the_command_is_that_of_python(world, models, name):
    path, described, expected = models[name]
    x = world[1][:50]
    model = load(path)
    np.testing.assert_array_equal(model.predict_proba(x), expected.predict_proba(x))
    assert described["passes"] == expected.n_passes_ == 1
    assert described["rows"] == expected.report_.rows
    if name == "multiclass":
        assert described["bound"]["steps"] == expected.n_iter_
    answered = as_json("predict", path, "--given", "a=1,b=0")
    assert answered["answers"] == [f'P(wind == "{label}")' for label in NAMES]
    np.testing.assert_array_equal(answered["values"], expected.predict_proba([[1.0, 0.0]]))


@EACH
def test_scores_are_those_of_scikit_learn(world, models, name):
    path, _, expected = models[name]
    result = as_json("score", path, world[0])
    assert result["unseen"]
    held_out = open_sample(str(world[0])).split(0.2)[1]
    batch = next(held_out.batches(N))
    truth, shares = batch.y[:, 0].astype(int), expected.predict_proba(batch.x)
    assert result["rows"] == len(truth) < N
    labels = result["labels"]["wind"]
    hits = shares.argmax(1) == truth
    top, bins = shares.max(1), np.minimum((15 * shares.max(1)).astype(int), 14)
    by_hand = {
        "log_loss": log_loss(truth, shares),
        "accuracy": hits.mean(),
        "brier": ((shares - np.eye(3)[truth]) ** 2).sum(1).mean(),
        "calibration_error": sum(abs((top - hits)[bins == i].sum()) for i in range(15)) / len(top),
    }
    assert list(labels) == list(by_hand)
    for key, value in by_hand.items():
        assert labels[key]["value"] == pytest.approx(value, rel=1e-12)
        assert labels[key]["std"] > 0.0
    one = result["scores"]['wind == "north"']
    assert one["mse"]["value"] == pytest.approx(((shares[:, 1] - (truth == 1)) ** 2).mean())
    table = score(expected, held_out)
    assert table.labels["wind"].calibration_error.value == labels["calibration_error"]["value"]
    assert "calibration error wind" in repr(table)
    arrays = score(expected, batch.x, np.array(NAMES)[truth])
    assert arrays.labels["wind"].log_loss.value == pytest.approx(by_hand["log_loss"])
    shown = run("score", path, world[0])[1]
    assert "calibration error" in " ".join(shown.split())
    for flag in ("--crps", "--coverage", "--all"):
        assert "labels and their events alone are" in refused("score", path, world[0], flag)


@EACH
def test_shards_add_up_to_the_bits_of_one_fit(world, name, tmp_path):
    store, x, _ = world
    for i in (1, 0):
        with pytest.raises(ShardDone, match=f"shard {i + 1} of 2 has done its share"):
            estimator(name).fit(str(store), checkpoint=tmp_path / "c", shard=(i, 2), workers=1)
    whole, parts = (
        estimator(name).fit(str(store), checkpoint=c, workers=1) for c in (None, tmp_path / "c")
    )
    assert parts.report_.resumed_strips > 0
    np.testing.assert_array_equal(parts.predict_proba(x), whole.predict_proba(x))
    # Kernels that were learned had the bits of one fit above.
    given = {"kernel_x": kernels.Gaussian(1.0)} if name == "multiclass" else {}
    more = ("--kernel-x", "gaussian:1.0") if given else ()
    if given:
        whole = estimator(name).set_params(**given).fit(str(store), workers=1)
    flags = command(name, store, tmp_path / "m", "--checkpoint", tmp_path / "d", *more)
    for i in (1, 2):
        assert f"shard {i} of 2 has done" in as_json(*flags, "--shard", f"{i}/2")["shard"]
    as_json(*flags, "--resume")
    np.testing.assert_array_equal(load(tmp_path / "m").predict_proba(x), whole.predict_proba(x))


def test_weights_of_labels_and_options_of_others(world, tmp_path):
    store, x, _ = world
    options = command("multiclass", store, tmp_path / "m", "--class-weight", "east=2,west=0.5")
    as_json(*options)
    fit = estimator("multiclass").set_params(class_weight={"east": 2.0, "west": 0.5})
    fit.fit(str(store), workers=1)
    np.testing.assert_array_equal(
        load(tmp_path / "m").predict_proba(x[:9]), fit.predict_proba(x[:9])
    )
    says = refused(*command("multiclass", store, tmp_path / "n", "--class-weight", "east"))
    assert "neither balanced nor LABEL=NUMBER" in says
    says = refused(*command("multiclass", store, tmp_path / "n", "--kernel-y", "median"))
    assert "kernel_y: the estimator multiclass takes" in says
    says = refused(*command("classifier", store, tmp_path / "n", "--max-iter", 3))
    assert "max_iter: the estimator classifier takes" in says


def test_the_plan_holds_the_learning_steps(world):
    plan = as_json("fit", world[0], "--dry-run", "--estimator", "multiclass", "--max-iter", 20)
    assert plan["parts"]["search for kernels"] > 0.0
    assert plan["passes"] == 1


JOB = """
title = "Wind"

[ingest]
files = ["wind.csv"]
x = ["a", "b"]
y = ["wind"]
categorical = ["wind"]

[fit]
estimator = "multiclass"
batch_size = 100
max_iter = 20
max_rank = 20
folds = 3
class_weight = { east = 2.0 }

[evaluate]
hold_out = 0.25
boosting = true
"""


def test_a_job_scores_the_labels_beside_boosting(world, tmp_path):
    _, x, codes = world
    lines = [f"{a},{b},{NAMES[c]}" for (a, b), c in zip(x[:3000], codes, strict=False)]
    (tmp_path / "wind.csv").write_text("a,b,wind\n" + "\n".join(lines))
    (tmp_path / "job.toml").write_text(JOB)
    options = ("--data", tmp_path, "--out", tmp_path / "out", "--checkpoint", tmp_path / "run")
    result = as_json("run", tmp_path / "job.toml", *options)
    scores, boosting = (result["evaluation"][k]["wind"] for k in ("labels", "labels_boosting"))
    assert 0.3 < scores["log_loss"]["value"] < 0.8 * np.log(3)
    assert boosting["accuracy"]["value"] > 0.6
    shown = run("run", tmp_path / "job.toml", *options)[1]  # of the same run, which is complete
    assert "labels of wind, gradient boosting" in " ".join(shown.split())


def test_stores_may_number_labels_in_another_order_than_the_fit(tmp_path):
    """And lack labels: scores are those of the labels themselves; unknown labels are refused."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    labels = np.array(NAMES)[np.clip(np.round(x[:, 0]) + 1, 0, 2).astype(int)]
    order = {"west": 0, "north": 1, "east": 2}

    def stored(name, rows, codes):
        columns = Columns(("a", "b")), Columns(("wind",), {}, {"wind": tuple(codes)})
        with writing_sample(tmp_path / name, columns) as writer:
            writer.append(x[rows], np.array([[codes[e]] for e in labels[rows]], dtype=float))
        return tmp_path / name

    kernel = kernels.Gaussian(1.0)
    options = {"kernel_x": kernel, "tol": 0.1, "n_folds": 2}
    table = pd.DataFrame(x, columns=["a", "b"]), pd.Series(labels, name="wind")
    some = np.flatnonzero(labels != "north")
    every = stored("every", np.arange(300), order)
    few = stored("few", some, {"west": 0, "east": 1})
    new = stored("new", some, {"west": 0, "south": 1, "east": 2})
    numbers = open_sample(x, x[:, 0])
    for fit in (
        JointClassifier(**options, reg=1e-3),
        EmbeddingClassifier(**options, reg=1e-3),
        MulticlassEmbedding(**options, max_iter=2, batch_size=100),
        KernelLogisticRegression(kernel, tol=0.1, max_iter=5, gradient_tol=0.1),
    ):
        fit.fit(*table)
        expected = score(fit, *table)
        assert list(expected.labels) == ["wind"]
        assert score(fit, str(every)).lines() == expected.lines()
        assert fit.score(*table) == expected.labels["wind"].accuracy.value
        among = score(fit, *(each.iloc[some] for each in table))
        np.testing.assert_equal(score(fit, str(few)).lines(), among.lines())
        with pytest.raises(DataError, match=r"'wind' are .*south.*, in the fit they were .*: give"):
            score(fit, str(new))
        with pytest.raises(DataError, match=r"scored on the labels of one column.*; give"):
            score(fit, numbers)


@pytest.mark.parametrize("kind", [JointClassifier, EmbeddingClassifier])
def test_labels_and_their_events_have_the_probabilities_of_predict_proba(kind, tmp_path):
    """In scores, answers of the command and expectations, whether declared at the fit or not."""
    rng = np.random.default_rng(0)
    x, codes = rng.normal(size=(300, 2)), rng.choice(3, 300, p=[0.6, 0.3, 0.1])
    x += codes[:, None]
    labels = pd.Series(np.array(NAMES)[codes], name="wind")
    fit = kind(kernel_x=kernels.Gaussian(1.0), tol=0.1, n_folds=2, reg=1e-3)
    fit.fit(x, labels, functions=["wind != 'east'"])
    fit.save(tmp_path / "m")
    shares, some = fit.predict_proba(x), "wind in ('east', 'west')"
    scores = score(fit, x, labels, events=[some])
    assert scores.labels["wind"].log_loss.value == pytest.approx(log_loss(labels, shares))
    expected = {"wind != 'east'": shares[:, 1:].sum(axis=1), some: shares[:, [0, 2]].sum(axis=1)}
    expected |= {f'wind == "{name}"': shares[:, code] for code, name in enumerate(NAMES)}
    happened = [labels != "east", labels.isin(["east", "west"]), *(labels == n for n in NAMES)]
    assert list(scores.brier) == list(expected)
    for (event, p), seen in zip(expected.items(), happened, strict=True):
        assert scores.brier[event].value == pytest.approx(np.mean((p - seen) ** 2))
    given = ("--given", "x0=0.5,x1=1")
    events = [part for event in ("wind == 'north'", some) for part in ("--event", event)]
    result = as_json("predict", tmp_path / "m", *given, *events, "--of", "probability")
    (values,), (one,) = result["values"], fit.predict_proba([[0.5, 1.0]])
    assert values == pytest.approx([one[1], one[0] + one[2], *one], abs=1e-12)
    columns = Columns(("x0", "x1")), Columns(("wind",), {}, {"wind": NAMES})
    with writing_sample(tmp_path / "s", columns) as writer:
        writer.append(x, codes[:, None].astype(float))
    asked = "score", tmp_path / "m", tmp_path / "s"
    assert set(as_json(*asked)["scores"]) == {*expected} - {some}
    several = [some, "wind != 'east'"]
    result = as_json(*asked, *(part for event in several for part in ("--of", event)))
    assert list(result["scores"]) == several
    assert "wind" in result["labels"]
    for event in several:
        mse = result["scores"][event]["mse"]["value"]
        assert mse == pytest.approx(scores.brier[event].value)
    assert "'wind'" in refused(*asked, "--of", "wind")
    assert "labels and their events alone" in refused(*asked, "--all")
    if kind is EmbeddingClassifier:
        model = fit.model_
        north = model.expect("class 1", x)
        np.testing.assert_array_equal(model.expect("wind == 'north'", x), north)
        result = as_json("expect", tmp_path / "m", *given)
        each = ["wind != 'east'", *(f'wind == "{name}"' for name in NAMES)]
        assert result["functions"] == each
        assert result["values"][0] == pytest.approx(model.expect(each, [[0.5, 1.0]])[0])
        with pytest.raises(DataError, match="or fit a JointDistribution with laws"):
            model.expect(some, x)


def test_remedies_for_embeddings_name_no_law_of_theirs(world, tmp_path):
    x = world[1][:200]
    fit = ConditionalMeanEmbedding(kernel_x=kernels.Gaussian(1.0), tol=0.1, n_folds=2, reg=1e-3)
    fit.fit(x, x[:, 0]).save(tmp_path / "m")
    message = refused("predict", tmp_path / "m", "--given", "x0=0,x1=0", "--event", "y0 > 0")
    assert "fit with --event 'y0 > 0', or fit with --estimator joint" in message
    assert "cme-dask predict" not in message
    labels = pd.DataFrame({"wind": np.array(NAMES)[world[2][:200]], "speed": x[:, 0]})
    fit.fit(x, labels)
    for ask in (lambda: fit.expect("wind", x), lambda: fit.model_.predict(x)):
        with pytest.raises(DataError, match="ask for expect") as error:
            ask()
        assert "conditional(" not in str(error.value)


def test_remedies_for_joint_distributions_without_laws_name_no_law_of_theirs(world):
    x, codes = world[1][:200], world[2][:200]
    options = {"kernel_x": kernels.Gaussian(1.0), "kernel_y": "median", "tol": 0.1, "n_folds": 2}
    numbers = pd.DataFrame({"speed": x[:, 0], "height": x[:, 1]})
    mixed = numbers[["speed"]].assign(wind=np.array(NAMES)[codes])
    for size, shown in ((0, False), (20, True)):
        fit = JointDistribution(**options, reg=1e-3, support_size=size, residual=False)
        for y in (mixed, numbers):
            model = fit.fit(x, y).model_
            asks = [lambda m=model: m.predict_proba(x)]
            if y is mixed:
                asks += [lambda m=model: m.predict(x), lambda m=model: m.expect("wind", x)]
            for ask in asks:
                with pytest.raises(DataError, match="ask for") as error:
                    ask()
                assert ("conditional(x)" in str(error.value)) is shown
                assert ("predict, or" in str(error.value)) is (y is numbers)
                assert shown or "expect(" in str(error.value)


def test_a_logistic_regression_is_asked_in_python(world, tmp_path):
    x, codes = world[1][:200], world[2][:200]
    fit = KernelLogisticRegression(kernels.Gaussian(1.0), tol=0.1, max_iter=5, gradient_tol=0.1)
    fit.fit(x, codes).save(tmp_path / "m")
    for command in ("predict", "expect"):
        message = refused(command, tmp_path / "m", "--given", "x0=0,x1=0")
        assert "ask this model in Python" in message
        assert "JointDistribution" not in message
