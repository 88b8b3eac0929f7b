"""Jobs that hold rows out, learn their kernels, and stand beside gradient boosting."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import t as student
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from cme_dask import load, open_sample
from cme_dask.cli import cli
from cme_dask.cli.plots import half_widths
from cme_dask.cli.schema import EvaluateSection
from cme_dask.cli.scoring import boosted, boosted_labels
from cme_dask.data.columns import Columns
from cme_dask.models.events import Event
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.held_out import Classifier

JOB = """
title = "A mixed job"
[ingest]
files = ["t.csv"]
x = ["a", "hour", "kind"]
y = ["b"]
time = ["t"]
categorical = ["kind"]
cyclic = { hour = 24 }
[fit]
events = ["b > 0", "b > 99"]
fold_by = "1d"
[fit.tuning]
rows = 500
max_rank = 40
evaluations = 8
trees = []
finalists = 3
averaged = 2
[evaluate]
hold_out = 0.25
boosting = true
[report]
nearest = 30
[[report.points]]
name = "noon"
x = { a = 0.5, hour = 12, kind = "up" }
[[report.curves]]
point = "noon"
along = "hour"
low = 0
high = 24
of = "b"
event = "b > 0.5"
[[report.curves]]
point = "noon"
along = "a"
low = -1.0
high = 1.0
event = "b > 0.5"
"""


def run(*args):
    result = CliRunner().invoke(cli, [*map(str, args)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def words(folder):
    """The command of the job; repeated, it prints the report of the first run."""
    return "run", folder / "job.toml", "--out", folder / "out", "--checkpoint", folder / "run"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    rng = np.random.default_rng(0)
    n = 3000
    time = np.arange(n) * 3600
    a, hour, up = rng.standard_normal(n), time // 3600 % 24, rng.random(n) < 0.5
    signal = np.sin(2 * a) + np.cos(2 * np.pi * hour / 24) * np.where(up, 1.0, -1.0)
    b = signal + 0.5 * rng.standard_normal(n)
    kind = np.where(up, "up", "down")
    lines = zip(time, a.tolist(), hour, kind, b.tolist(), strict=True)
    text = "\n".join(f"{t},{x!r},{h},{k},{v!r}" for t, x, h, k, v in lines)
    (folder / "t.csv").write_text(f"t,a,hour,kind,b\n{text}\n")
    (folder / "job.toml").write_text(JOB)
    code, stdout, err = run(*words(folder), "--json")
    assert code == 0, err
    table = {"t": time, "a": a, "hour": hour, "kind": kind, "b": b}
    return folder, json.loads(stdout), table


def test_scores_are_those_of_the_held_out_rows(done):
    folder, result, _ = done
    found = result["evaluation"]
    rest, held = open_sample(folder / "out" / "sample.zarr").split(0.25, "1d")
    parts = [source.read(0, 3000) for source in held.sources]
    time = held.time.read(0, 3000)[:, 0]
    kept = held.part.selects(np.arange(3000), {"time": time})
    x, y = (part[kept] for part in parts)
    assert found["rows"] == kept.sum()
    assert len({*(time[kept] // 86400)} & {*(time[~kept] // 86400)}) == 0
    law = load(folder / "out" / "model.zarr").conditional(x)
    for name, values in (("b", y[:, 0]), ("b > 0", (y[:, 0] > 0).astype(float))):
        mse = ((law.expect(name) - values) ** 2).mean()
        told = found["scores"]["model"][name]
        assert told["mse"]["value"] == pytest.approx(mse)
        assert told["r2"]["value"] == pytest.approx(1 - mse / values.var())
    assert rest.part != held.part


def test_laws_are_scored_by_crps_and_coverage(done):
    folder, result, _ = done
    found = result["evaluation"]
    held = open_sample(folder / "out" / "sample.zarr").split(0.25, "1d")[1]
    x, y = (source.read(0, 3000) for source in held.sources)
    kept = held.part.selects(np.arange(3000), {"time": held.time.read(0, 3000)[:, 0]})
    law = load(folder / "out" / "model.zarr").conditional(x[kept])
    assert found["crps"]["model"]["value"] == pytest.approx(law.crps(y[kept]).mean())
    lower, upper = law.interval(0.9)
    inside = (lower <= y[kept, 0]) & (y[kept, 0] <= upper)
    coverage = found["coverage"]["model"]
    assert coverage["columns"]["b"]["value"] == pytest.approx(inside.mean())
    assert (list(coverage["columns"]), coverage["level"]) == (["b"], 0.9)
    assert 0.84 < inside.mean() < 0.96


def test_predictions_are_binned_beside_what_happened(done):
    """Ten bins of what the laws predicted, and the frequency of the event in each."""
    folder, result, _ = done
    held = open_sample(folder / "out" / "sample.zarr").split(0.25, "1d")[1]
    x, y = (source.read(0, 3000) for source in held.sources)
    time = held.time.read(0, 3000)[:, 0]
    kept = held.part.selects(np.arange(3000), {"time": time})
    law = load(folder / "out" / "model.zarr").conditional(x[kept])
    bins = result["evaluation"]["reliability"]["b > 0"]
    chance, happened = law.expect("b > 0"), y[kept, 0] > 0
    assert len(bins) == 10
    assert sum(one["share"] for one in bins) == pytest.approx(1.0)
    for i, one in enumerate(bins):
        inside = np.minimum((chance * 10).astype(int), 9) == i
        assert one["share"] == pytest.approx(inside.mean(), abs=1e-9)
        assert one["predicted"] == pytest.approx(chance[inside].mean())
        assert one["seen"]["value"] == pytest.approx(happened[inside].mean())
    means = result["evaluation"]["reliability"]["b"]
    assert (np.diff([one["predicted"] for one in means]) > 0).all()
    (point,) = result["points"]
    found = point["functions"]["b > 0"]
    (its,) = [b for b in bins if (b["low"] or 0) <= found["mean"] < (b["high"] or 1.1)]
    assert found["held_out"]["seen"] == its["seen"]


def test_curves_are_laws_along_a_column(done):
    folder, result, _ = done
    hours, slope = result["curves"]
    law = load(folder / "out" / "model.zarr")
    at = np.array(hours["at"])
    angle = 2 * np.pi * at / 24
    table = {"a": 0.5 + 0 * at, "hour_sin": np.sin(angle), "hour_cos": np.cos(angle)}
    there = law.conditional({**table, "kind": ["up"] * len(at)})
    np.testing.assert_allclose(hours["quantiles"], there.quantile(hours["levels"]), atol=1e-9)
    np.testing.assert_allclose(hours["probability"], there.probability("b > 0.5"), atol=1e-9)
    assert (at[0], at[-1]) == (0.0, 24.0)
    assert "quantiles" not in slope
    assert slope["probability"][-1] > slope["probability"][0]


def test_gradient_boosting_is_scikit_learns_own(done):
    folder, result, _ = done
    found = result["evaluation"]
    sample = open_sample(folder / "out" / "sample.zarr")
    x, y = (source.read(0, 3000) for source in sample.sources)
    _, held = sample.split(0.25, "1d")
    out = held.part.selects(np.arange(3000), {"time": held.time.read(0, 3000)[:, 0]})
    assert found["boosting"]["rows"] == (~out).sum()
    options = {"categorical_features": [3], "random_state": 0}
    mean = HistGradientBoostingRegressor(**options).fit(x[~out], y[~out, 0]).predict(x[out])
    up = y[:, 0] > 0
    chance = HistGradientBoostingClassifier(**options).fit(x[~out], up[~out])
    told = found["scores"]["gradient boosting"]
    # Rows come in another order, which changes sums in their last bits and some splits.
    wanted = ((mean - y[out, 0]) ** 2).mean()
    assert told["b"]["mse"]["value"] == pytest.approx(wanted, rel=0.1)
    brier = ((chance.predict_proba(x[out])[:, 1] - up[out]) ** 2).mean()
    assert told["b > 0"]["mse"]["value"] == pytest.approx(brier, rel=0.1)


@pytest.mark.parametrize("weighted", [False, True])
def test_boosting_takes_weights_of_mean_one(weighted):
    """With a sum of 1 the least Hessian sum of a leaf of scikit-learn would drop rare events."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(900, 1))
    y = np.column_stack([x[:, 0], (x[:, 0] > 0.97)]).astype(float)
    weights = rng.uniform(0.5, 1.5, 900) if weighted else None
    sample, section = open_sample(x, y, weights=weights), EvaluateSection(boosting=True)
    executor = RunOptions("synchronous", 1).executor()
    event = Event.parse("y1 > 0.5", ("y0", "y1"), {})
    fitted, _ = boosted(sample, {"rare": event}, section, executor)
    boosting = HistGradientBoostingClassifier(random_state=0)
    chance = boosting.fit(x, y[:, 1] > 0.5, weights).predict_proba(x)[:, 1]
    assert chance.max() > 0.9
    # Rows come in another order, which may change last bits.
    np.testing.assert_allclose(fitted(x)[:, 2], chance, atol=1e-3)

    labels = ("no", "yes")
    classifier = Classifier(None, None, Columns(("y",), categories={"y": labels}), labels)
    sample = open_sample(x, y[:, 1], weights=weights)
    law, _ = boosted_labels(sample, classifier, section, executor)
    np.testing.assert_allclose(law.conditional(x).predict_proba()[:, 1], chance, atol=1e-3)


def test_the_model_learns_all_kinds_of_columns(done):
    _, result, _ = done
    scores = result["evaluation"]["scores"]
    ours, theirs = (scores[name]["b"]["r2"]["value"] for name in ("model", "gradient boosting"))
    assert ours > 0.8 * theirs > 0.5
    members = result["tuning"]["members"]
    assert 1 <= len(members) <= 2
    assert len(members[0]["x"]["scales"]) == 4
    assert result["fit"]["passes"] in (1, 2)  # as residuals may pay


def test_points_take_labels_and_what_cyclic_columns_are_made_of(done):
    folder, result, table = done
    (point,) = result["points"]
    law = load(folder / "out" / "model.zarr")
    at = {"a": [0.5], "hour_sin": [np.sin(np.pi)], "hour_cos": [-1.0], "kind": ["up"]}
    assert point["functions"]["b"]["mean"] == pytest.approx(law.conditional(at).mean()[0])
    assert abs(point["functions"]["b"]["mean"] - (np.sin(1.0) - 1.0)) < 0.5
    assert (table["kind"] == "up").any()


def test_an_event_that_never_happens_is_compared_like_any_other(done):
    """Both say that it never happens; skill over a constant forecast does not exist."""
    _, result, _ = done
    for name in ("model", "gradient boosting"):
        scores = result["evaluation"]["scores"][name]["b > 99"]
        assert scores["mse"]["value"] == pytest.approx(0.0, abs=1e-12)


def test_pictures_are_written(done):
    folder, result, _ = done
    for name in ("report.png", "tuning.png", "scores.png", "reliability.png", "laws.png"):
        assert (folder / "out" / name).read_bytes()[:4] == b"\x89PNG"
    assert {"search", "scores", "picture", "laws"} < set(result["outputs"])


def test_the_tables_are_printed(done):
    folder, _, _ = done
    code, stdout, err = run(*words(folder))
    assert code == 0, err
    assert "is complete: this run has made it before" in err
    for text in (
        "Search",
        "Averaged models",
        "On held-out rows",
        "Folds are by 1d",
        "Brier skill",
        "Reliability of P(b > 0)",
        "gradient boosting",
    ):
        assert text in stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('report.points=[{name="p",x={a=0.0,hour=3}}]', "'p' must give a, hour, kind"),
        ('report.points=[{name="noon",x={a=0.0,hour=3,kind="left"}}]', "left"),
        ("evaluate.hold_out=1.0", "evaluate.hold_out"),
        ('report.curves=[{point="p",along="a",low=0,high=1,of="b"}]', "unknown point 'p'"),
        ('report.curves=[{point="noon",along="kind",low=0,high=1,of="b"}]', "a, hour"),
        ('report.curves=[{point="noon",along="a",low=0,high=1,of="a"}]', "'a' is no column of y"),
        ('report.curves=[{point="noon",along="a",low=0,high=1,event="c>1"}]', "unknown column"),
        ('report.curves=[{point="noon",along="a",low=1,high=1,of="b"}]', "low must be below high"),
        ('report.curves=[{point="noon",along="a",low=0,high=1}]', "give of, a column of y"),
        ("fit.tuning={rows=100,steps=3}", "takes criterion"),
    ],
)
def test_what_does_not_fit_is_refused(done, change, message):
    folder, _, _ = done
    code, _, err = run("run", folder / "job.toml", "--out", folder / "no", "--set", change)
    assert code == 2
    assert message in err


def test_tune_writes_model_trace_and_picture(done, tmp_path, brief_search):
    folder, _, _ = done
    arguments = [
        "tune", folder / "out" / "sample.zarr", "--out", tmp_path / "tuned", "--rows", 300,
        "--evaluations", 8, "--averaged", 2, "--max-rank", 40, "--event", "b > 0",
        "--fold-by", "1d",
    ]  # fmt: skip
    code, stdout, err = run(*arguments, "--json")
    assert code == 0, err
    result = json.loads(stdout)
    written = json.loads((tmp_path / "tuned" / "tuning.json").read_text())
    assert {"cme_dask": "search for kernels", **result} == written
    stages = {t["stage"] for t in result["tuning"]["trials"]}
    assert stages - {"widen", "ignore", "rougher"} == {"grid", "columns", "refine"}
    assert load(tmp_path / "tuned" / "model.zarr").expect(
        "b > 0", {"a": [0.0], "hour_sin": [0.0], "hour_cos": [1.0], "kind": ["up"]}
    ).shape == (1,)
    assert (tmp_path / "tuned" / "tuning.png").exists()
    code, stdout, err = run(*arguments)
    assert code == 2
    fewer = ("--rows", 200, "--evaluations", 1, "--max-rank", 20)
    code, stdout, err = run(*arguments, *fewer, "--overwrite")
    assert code == 0
    assert "Averaged models" in stdout


def test_bars_are_intervals_by_the_t_quantile_of_the_blocks():
    """Of ten blocks: two standard errors on each side would hold 92 %."""
    widths = half_widths([0.5, None])
    np.testing.assert_allclose(widths, [0.5 * student.ppf(0.975, 9), 0.0], rtol=1e-12)
