import errno
import functools
import io
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli as study
from cme_dask import ConditionalMeanEmbedding, SparseEmbedding, kernels, load, open_sample
from cme_dask.cli import cli, plots, runner
from cme_dask.cli.schema import read_job
from cme_dask.data import model_file, writer
from cme_dask.models import plots as drawing

ROOT = Path(__file__).parents[1]
ALL_HELD_ROWS = True
AIR = Path(os.environ.get("CME_DASK_DATA", ROOT.parent / "shared" / "data")) / "air_quality"

JOB = """
title = "A small job"
[ingest]
files = ["t.csv"]
x = ["a"]
y = ["b"]
units = { a = "m/s" }
[fit]
events = ["b > 0"]
tol = 1e-3
kernel_x = "median"
kernel_y = "median"
[report]
nearest = 50
[[report.points]]
name = "zero"
x = { a = 0.0 }
"""


def run(*args):
    result = CliRunner().invoke(cli, ["run", *map(str, args)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def pictures():
    """For tests of pictures: all others draw none, which takes longer than the rest of a job."""


@pytest.fixture(autouse=True)
def pictures_for_tests_of_them(request):
    with pytest.MonkeyPatch.context() as patch:
        if "pictures" not in request.fixturenames:
            patch.setattr(drawing, "available", lambda: False)
        yield


@functools.cache
def table():
    """The rows of the job, and their file."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=3000)
    rows = np.stack([a, a + 0.5 * rng.normal(size=a.size)], axis=1)
    np.savetxt(file := io.StringIO(), rows, delimiter=",", header="a,b", comments="")
    return rows, file.getvalue()


def written_job(folder):
    rows, text = table()
    (folder / "t.csv").write_text(text)
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml", rows


@pytest.fixture
def job(tmp_path):
    return written_job(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The report of the job that nothing interrupts, and its folder."""
    path, _ = written_job(tmp_path_factory.mktemp("undisturbed"))
    out = path.with_name("whole")
    assert run(path, "--out", out)[0] == 0
    return json.loads((out / "report.json").read_text()), path.parent


def assert_refused(job, *args, says):
    out = job.with_name("refused")
    code, stdout, err = run(job, "--out", out, *args)
    assert (code, stdout) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert not out.exists()


def test_a_job_reports_the_model_beside_the_nearest_rows(job, pictures):
    path, rows = job
    out = path.with_name("out")
    code, stdout, err = run(path, "--out", out, "--json")
    assert code == 0, err
    result = json.loads(stdout)
    assert {"cme_dask": "job", **result} == json.loads((out / "report.json").read_text())
    assert sorted(p.name for p in out.iterdir()) == [
        *("model.zarr", "report.json", "report.png", "sample.zarr")
    ]
    near = rows[np.argsort(np.abs(rows[:, 0]))[:50]]
    point = result["points"][0]
    happened = (near[:, 1] > 0).astype(float)
    found = point["functions"]["b > 0"]
    assert found["nearest_mean"] == pytest.approx(happened.mean())
    assert found["nearest_std"] == pytest.approx(happened.std() / np.sqrt(50))
    assert point["farthest"] == pytest.approx(np.abs(near[:, 0]).max() / rows[:, 0].std())
    law = load(out / "model.zarr").conditional([[0.0]])
    # The job asked for several points at once, and products of other shapes round otherwise.
    rounding = {"rel": 1e-12, "abs": 1e-14}
    assert found["mean"] == pytest.approx(law.expect("b > 0")[0], **rounding)
    assert found["event"] is True
    column = point["functions"]["b"]
    assert column["interval"] == pytest.approx([end[0] for end in law.interval(0.9)], **rounding)
    assert (point["near"], found["held_out"]) == (True, None)
    assert point["effective_support"] == pytest.approx(law.effective_support()[0], **rounding)
    assert (result["fit"]["passes"], result["neighbours"]["passes"]) == (1, 1)
    assert result["fit"]["held_out"]["x"]["b > 0"]["skill"] > 0.3


def test_tables_name_points_and_units(job):
    code, out, err = run(job[0], "--out", job[0].with_name("out"), "--set", "fit.folds=1")
    assert code == 0, err
    for text in ("a [m/s]", "rows kept", "zero", "P(b > 0)", "autocorrelation", "report.json"):
        assert text in out


def test_without_matplotlib_one_line_says_what_is_missing(job, pictures, monkeypatch):
    monkeypatch.setattr(drawing, "available", lambda: False)
    out = job[0].with_name("out")
    code, _, err = run(job[0], "--out", out)
    assert code == 0
    assert "install cme-dask[plot]" in err
    assert not (out / "report.png").exists()


def test_existing_outputs_are_refused_before_any_work(job):
    path, _ = job
    out = path.with_name("out")
    out.mkdir()
    (out / "report.json").write_text("{}")
    for more, says in (((), "already holds report.json"), (("--overwrite",), "is not marked as a")):
        code, _, err = run(path, "--out", out, *more)
        assert code == 2
        assert says in err
        assert [p.name for p in out.iterdir()] == ["report.json"]
    (out / "report.json").unlink()
    for _ in range(2):
        assert run(path, "--out", out, "--overwrite")[0] == 0
    assert json.loads((out / "report.json").read_text())["title"] == "A small job"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("fit.tool=1", "fit.tool: unknown key"),
        ("fit.tol=2", "fit.tol: must be less than 1, got 2"),
        ("fit.tol=", "no TOML value"),
        ("fit.constraint=none", "no TOML value"),
        ("nonsense", "--set takes KEY=VALUE"),
        ("title.a=1", "title is no table"),
        ("fit.kernel_x={kernel='Nix'}", "fit.kernel_x: unknown kernel 'Nix'"),
        ("fit.reg='a'", "fit.reg"),
        ("fit.events=['c > 1']", "unknown column 'c'"),
        ("report.functions=['c']", "report.functions: unknown 'c'"),
        ("report.points=[{name='p', x={b=1.0}}]", "'p' must give a, it gives b"),
        ("ingest.files=['nix.csv']", "nix.csv"),
        (
            "fit.kernel_x={kernel='Gaussian', length_scale=[1.0, 2.0]}",
            "fit.kernel_x: Gaussian has 2",
        ),
        ("fit.kernel_y={kernel='Linear', columns=1}", "fit.kernel_y"),
        ("report.points=[{name='p', x={a=nan}}]", "must be a finite number, got nan"),
        ("fit.events=['b > nan']", "the bound must be finite"),
        ("report.nearest=100_001", "report.nearest: must be less than or equal to 100000"),
        ("sample={rows=9, seed=-1}", "sample.seed: must be greater than or equal to 0, got -1"),
        ("sample={rows=9, seed=9223372036854775808}", "sample.seed: must be less than"),
        ("sample={rows=9, scenario='nix'}", "sample.scenario: must be one of low, medium, high"),
        ("sample.rows=10", "exactly one of the tables [ingest] and [sample]"),
    ],
)
def test_a_bad_key_is_named(job, change, says):
    path, _ = job
    if change.startswith("ingest"):
        code, _, err = run(path, "--out", path.with_name("out"), "--set", change)
        assert (code, says in err) == (2, True)
    else:
        assert_refused(path, "--set", change, says=says)


def test_neighbours_count_by_their_weights(job):
    """As often as their rows stand in an unweighted file, and not at all with weight zero."""
    path, rows = job
    times = np.random.default_rng(1).integers(0, 4, size=len(rows))
    weighted = np.column_stack([rows, times])
    np.savetxt(path.with_name("t.csv"), weighted, delimiter=",", header="a,b,w", comments="")
    change = ("--set", 'ingest.weights="w"', "--json")
    code, out, err = run(path, "--out", path.with_name("out"), *change)
    assert code == 0, err
    positive = np.flatnonzero(times)
    near = positive[np.argsort(np.abs(rows[positive, 0]))[:50]]
    values, w = rows[near, 1], times[near]
    mean = np.average(values, weights=w)
    found = json.loads(out)["points"][0]["functions"]["b"]
    assert found["nearest_mean"] == pytest.approx(mean)
    expected = np.sqrt((w**2 * (values - mean) ** 2).sum()) / w.sum()
    assert found["nearest_std"] == pytest.approx(expected)


def test_fewer_rows_of_positive_weight_than_neighbours(job):
    path, rows = job
    weights = np.arange(len(rows)) < 30
    weighted = np.column_stack([rows, weights])
    np.savetxt(path.with_name("t.csv"), weighted, delimiter=",", header="a,b,w", comments="")
    change = ("--set", 'ingest.weights="w"', "--json")
    code, out, err = run(path, "--out", path.with_name("out"), *change)
    assert code == 0, err
    result = json.loads(out)
    assert result["neighbours"]["k"] == 30
    found = result["points"][0]["functions"]["b"]
    assert found["nearest_mean"] == pytest.approx(rows[:30, 1].mean())


def test_near_rows_are_those_with_the_labels_of_the_point(job):
    """Also where they are fewer than the job asks for, or none of positive weight."""
    path, rows = job
    rows = rows[:400]
    label = np.array(["often"] * 379 + ["rare"] * 20 + ["never"])
    lines = [f"{a},{b},{s},{s != 'never':d}" for (a, b), s in zip(rows, label, strict=True)]
    path.with_name("t.csv").write_text("\n".join(["a,b,s,w", *lines]))
    points = ", ".join(f'{{name="{s}", x={{a=0.0, s="{s}"}}}}' for s in ("often", "rare", "never"))
    change = (
        *("--set", 'ingest.x=["a","s"]', "--set", 'ingest.categorical=["s"]'),
        *("--set", 'ingest.weights="w"', "--set", f"report.points=[{points}]"),
    )
    code, out, err = run(path, "--out", path.with_name("out"), *change)
    assert code == 0, err
    assert "none with its labels" in out
    often, rare, never = json.loads((path.with_name("out") / "report.json").read_text())["points"]
    assert [point["nearest_rows"] for point in (often, rare, never)] == [50, 20, 0]
    seen = rows[label == "rare"]
    mean = rare["functions"]["b"]["nearest_mean"]
    assert mean == pytest.approx(seen[:, 1].mean())
    sd = rows[:399, 0].std()
    assert rare["farthest"] == pytest.approx(np.abs(seen[:, 0]).max() / sd, rel=1e-6)
    assert f"none ({rare['farthest']:.2g} sd, 20 rows)" in out
    assert (never["near"], never["farthest"], never["functions"]["b"]["nearest_mean"]) == (
        *(False, None, None),
    )


def answer_beside_a_constant(job, value, stated):
    """What a job says of the point (0, stated), where the second column of x has one value."""
    path, rows = job
    constant = np.column_stack([rows, np.full(len(rows), value)])
    np.savetxt(path.with_name("t.csv"), constant, delimiter=",", header="a,b,c", comments="")
    code, out, err = run(
        *(path, "--out", path.with_name("out"), "--json", "--set", 'ingest.x=["a","c"]'),
        *("--set", 'fit.kernel_x={kernel="Gaussian", length_scale=1.0}'),
        *("--set", f'report.points=[{{name="p", x={{a=0.0, c={stated}}}}}]'),
    )
    assert code == 0, err
    return json.loads(out)["points"][0]


@pytest.mark.parametrize(("value", "stated"), [(0.25, 0.25), (0.1, 0.2)])
def test_a_constant_column_of_x_with_a_kernel(job, value, stated):
    """It is as far from every row; the standard deviation of 0.1, ... is not quite zero."""
    found, rows = answer_beside_a_constant(job, value, stated), job[1]
    near = rows[np.argsort(np.abs(rows[:, 0]))[:50]]
    assert found["functions"]["b"]["nearest_mean"] == pytest.approx(near[:, 1].mean())


def test_a_constant_column_far_from_a_point_is_no_other_label(job):
    found = answer_beside_a_constant(job, 1e6, 2e6)
    assert (found["nearest_rows"], found["near"]) == (50, False)
    assert found["farthest"] == pytest.approx(1e6)


def fill_the_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("where", "name"),
    [((plots, "points_picture"), "report.png"), ((Path, "write_text"), "report.json")],
)
def test_a_full_disk_is_one_sentence(job, pictures, monkeypatch, where, name):
    path, _ = job
    monkeypatch.setattr(*where, fill_the_disk)
    out = path.with_name("out")
    code, _, err = run(path, "--out", out)
    assert code == 3
    assert err.splitlines()[-1].startswith(f"error: the disk is full while writing {out / name}")
    assert not (out / name).exists()
    assert not list(out.glob(".*"))


def test_overwriting_removes_the_picture_of_an_earlier_run(job, pictures, monkeypatch):
    path, _ = job
    out = path.with_name("out")
    assert run(path, "--out", out)[0] == 0
    assert (out / "report.png").exists()
    monkeypatch.setattr(drawing, "available", lambda: False)
    assert run(path, "--out", out, "--overwrite")[0] == 0
    assert not (out / "report.png").exists()


def stop(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "more"),
    [
        ((writer.SampleWriter, "finish"), ()),  # in the ingest, which continues by itself
        ((runner, "fit_sample"), ()),
        ((runner, "nearest"), ()),
        ((model_file, "write_model"), ("--overwrite",)),
        ((runner, "write_json"), ()),
    ],
)
def test_a_job_with_a_checkpoint_continues(job, undisturbed, monkeypatch, where, more):
    """One command begins, continues from wherever it was stopped, and is complete."""
    path, rows = job
    out, folder = path.with_name("out"), path.with_name("run")
    words = (path, "--out", out, "--checkpoint", folder, "--json", *more)
    if more:
        assert run(path, "--out", out, "--set", "fit.max_rank=4")[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*where, stop)
        code, _, err = run(*words)
    assert code == 130
    assert "continues" in err
    assert not (out / "report.json").exists() or more
    with pytest.MonkeyPatch.context() as patch:
        if where[0] is not writer.SampleWriter:  # the sample is there, and not made again
            patch.setattr(runner, "_make_sample", stop)
        code, stdout, err = run(*words)
    assert code == 0, err
    result = json.loads(stdout)
    assert result["ingest"]["rows_kept"] == len(rows)
    assert (result["fit"]["resumed_strips"] > 0) == (
        where[1] in ("write_model", "write_json", "nearest")
    )
    assert not folder.exists()
    report = json.loads((out / "report.json").read_text())
    assert report == {"cme_dask": "job", **result, "run": report["run"]}
    wanted, _ = undisturbed
    for key in ("points", "ingest", "evaluation"):
        timeless = ("store", "rows_resumed")
        one, two = (
            {k: v for k, v in each[key].items() if k not in timeless}
            if key == "ingest"
            else each[key]
            for each in (report, wanted)
        )
        assert one == two, key
    monkeypatch.setattr(runner, "fit_sample", stop)
    code, stdout, err = run(*words)
    assert (code, json.loads(stdout)["complete"]) == (0, True)
    assert "is complete: this run has made it before" in err


def test_a_checkpoint_is_of_one_job_and_its_files(job, monkeypatch):
    path, _ = job
    out, folder = path.with_name("out"), path.with_name("run")
    words = (path, "--out", out, "--checkpoint", folder)
    with monkeypatch.context() as patch:
        patch.setattr(model_file, "write_model", stop)
        assert run(*words)[0] == 130
    for change in (("--set", "fit.max_rank=5"), ("--out", path.with_name("other"))):
        code, _, err = run(*words, *change, "--overwrite")
        assert (code, "holds no checkpoint of this run" in err) == (2, True), err
    assert not path.with_name("other").exists()
    with path.with_name("t.csv").open("a") as file:
        file.write("0.5,0.5\n")
    code, _, err = run(*words)
    assert (code, "holds no checkpoint of this run" in err) == (2, True), err
    code, _, err = run(path, "--out", path.with_name("third"), "--checkpoint", path)
    assert (code, "job.toml" in err) == (2, True), err


def test_a_bad_file_is_named(tmp_path):
    (tmp_path / "a.toml").write_text("title = ")
    assert_refused(tmp_path / "a.toml", says="a.toml is no TOML file")
    assert_refused(tmp_path / "b.toml", says="b.toml can't be read")


GENERATED = """
title = "A generated sample"
[sample]
rows = 20_000
scenario = "strong"
[fit]
events = ["y1 <= y2"]
kernel_x = "median"
kernel_y = "median"
[report]
nearest = 100
"""


def test_a_generated_job(tmp_path):
    points = [f"[[report.points]]\nname = 'x = {x}'\nx = {{ x = {x} }}\n" for x in (-0.2, 0.0, 0.2)]
    (tmp_path / "job.toml").write_text("".join([GENERATED, *points]))
    code, out, err = run(tmp_path / "job.toml", "--out", tmp_path / "out", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert len(result["points"]) == 3
    for point in result["points"]:
        found = point["functions"]["y1"]
        assert found["mean"] == pytest.approx(0.8 * point["x"]["x"], abs=0.02)


def check_air_quality(tmp_path, rows, widest, *options):
    """Run the job; its 90 % intervals cover 88 % of held-out rows to ``widest``."""
    code, out, err = run(
        *(ROOT / "pipelines" / "air_quality.toml", "--data", AIR, "--out", tmp_path / "air"),
        *("--json", *options),
    )
    assert code == 0, err
    assert "warning" not in err
    result = json.loads(out)
    counts = [result["ingest"][f"rows_{what}"] for what in ("read", "kept", "dropped")]
    assert counts == rows
    scores = result["evaluation"]["scores"]
    for name in ("PM2.5", "PM2.5 > 75"):
        ours, theirs = (scores[of][name]["r2"]["value"] for of in ("model", "gradient boosting"))
        assert ours >= 0.8 * theirs
    # Finalists of the search, and what a location was tried on; the nearest rows, and the scores.
    assert result["fit"]["passes"] in (1, 2)
    assert result["neighbours"]["passes"] + result["evaluation"]["passes"] == 2
    for column, found in result["evaluation"]["coverage"]["model"]["columns"].items():
        assert 0.88 <= found["value"] <= widest, column
    calibration = result["fit"]["calibration"]
    assert calibration["kept"] == (calibration["gain"] > calibration["std"])
    below = scores["model"]["PM10 < PM2.5"]
    assert below["mse"]["value"] < below["variance"]
    bins = result["evaluation"]["reliability"]
    assert list(bins) == ["PM2.5", "PM10", "PM2.5 > 75", "PM10 < PM2.5"]
    for one in bins["PM2.5 > 75"]:
        assert 0.0 <= one["predicted"] <= 1.0
        assert abs(one["predicted"] - one["seen"]["value"]) < 0.06 + 3 * one["seen"]["std"]
    assert len(result["points"]) == 5
    for point in result["points"]:
        assert 0.0 <= point["functions"]["PM2.5 > 75"]["mean"] <= 1.0
        assert point["functions"]["PM2.5"]["mean"] > 0.0
    for name in ("report.png", "tuning.png", "scores.png", "reliability.png", "laws.png"):
        assert (tmp_path / "air" / name).stat().st_size > 10_000


@pytest.mark.skipif(not AIR.is_dir(), reason="the air-quality files are not here")
@pytest.mark.slow
def test_air_quality_as_it_stands(tmp_path, pictures):
    check_air_quality(tmp_path, [420_768, 409_930, 10_838], 0.92)


@pytest.mark.skipif(not AIR.is_dir(), reason="the air-quality files are not here")
def test_air_quality(tmp_path, pictures):
    """Three of twelve stations, a shorter search of lower rank, no trees, fewer rows to boost.

    Its laws are wider by half a percent of coverage.
    """
    search = "{rows=1500, max_rank=60, evaluations=10, trees=[]}"
    files = [f"PRSA_Data_{station}_*.csv.gz" for station in ("Dongsi", "Gucheng", "Dingling")]
    options = ("--set", "fit.max_rank=80", "--set", f"fit.tuning={search}")
    options += ("--set", f"ingest.files={json.dumps(files)}")
    options += ("--set", "evaluate.boosting_rows=20_000")
    check_air_quality(tmp_path, [105_192, 102_555, 2_637], 0.925, *options)


def test_a_job_that_comes_with_the_package_runs_by_name():
    pipelines = sorted((ROOT / "pipelines").glob("*.toml"))
    assert [path.name for path in pipelines] == [
        "air_quality.toml",
        "multiclass.toml",
        "pendulum.toml",
    ]
    for path in pipelines:
        assert path.resolve().parent.name == "cli"
        assert read_job(Path(path.stem)) == read_job(path)


EMBEDDING = ("--set", 'fit.estimator="embedding"', "--set", "report.points=[]")


@pytest.mark.parametrize(
    "options", [("reg='finite-rank'",), ("penalty='columns'", "gamma_ratio=0.01")]
)
def test_a_job_fits_an_embedding_and_scores_it(job, options):
    """As the estimator with the same options does, on the same rows; events are answered, too."""
    path, _ = job
    sparse = len(options) > 1
    kind = SparseEmbedding if sparse else ConditionalMeanEmbedding
    changes = [*EMBEDDING, "--set", "fit.max_rank=15", "--set", "evaluate.hold_out=0.25"]
    changes += ["--set", "fit.kernel_x='gaussian:0.5'", "--set", "fit.folds=3"]
    if sparse:
        changes += ["--set", 'fit.estimator="sparse"']
    for option in options:
        changes += ["--set", f"fit.{option}"]
    out = path.with_name("out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code, stdout, err = run(path, "--out", out, *changes, "--json")
        assert code == 0, err
        result = json.loads(stdout)
        rest, held = open_sample(out / "sample.zarr").split(0.25)
        given = {"kernel_x": kernels.Gaussian(0.5), "max_rank": 15, "tol": 1e-3, "n_folds": 3}
        own = {"penalty": "columns", "gamma_ratio": 0.01} if sparse else {"reg": "finite-rank"}
        fit = kind(**given, **own).fit(rest, functions={"b > 0": "b > 0"})
    x, y = (source.read(0, 3000) for source in held.sources)
    rows = held.part.selects(np.arange(3000), {})
    answers = fit.expect(["b", "b > 0"], x[rows])
    assert np.array_equal(load(out / "model.zarr").expect(["b", "b > 0"], x[rows]), answers)
    scores = result["evaluation"]["scores"]["model"]
    values = np.column_stack([y, y > 0])[rows]
    for name, mse in zip(("b", "b > 0"), ((values - answers) ** 2).mean(axis=0), strict=True):
        assert scores[name]["mse"]["value"] == pytest.approx(mse)
    assert result["fit"]["held_out"]["x"]["b"]["skill"] > 0.3
    assert result["fit"]["summary"] == [list(line) for line in fit.model_.summary()]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("fit.constraint='none'", "fit.constraint: the estimator embedding takes accuracy, crit"),
        ("fit.penalty='l1'", "fit.penalty: the estimator embedding takes"),
        ("fit.events_x=['a > 0']", "fit.events_x: the estimator embedding takes"),
        ("fit.estimator='forest'", "fit.estimator: must be 'joint', 'embedding', 'sparse'"),
        ("fit.reg='fast'", "fit.reg: must be a number, a pair of them or a schedule (finite-rank"),
        ("report.points=[{name='p', x={a=0.0}}]", "laws come from the estimator joint"),
    ],
)
def test_what_an_embedding_does_not_take_is_named(job, change, says):
    assert_refused(job[0], *EMBEDDING, "--set", change, says=says)


def test_sparse_options_are_refused_elsewhere(job):
    assert_refused(job[0], "--set", "fit.relax=true", says="fit.relax: the estimator joint takes")


def test_the_pendulum(tmp_path):
    """From the file that one command of the study writes to the scores of a sparse embedding."""
    data, out = tmp_path / "data", tmp_path / "out"
    written = CliRunner().invoke(study, f"study pendulum --transitions {data} --rows 2000".split())
    assert written.exit_code == 0, written.output
    again = CliRunner().invoke(study, f"study pendulum --transitions {data}".split())
    assert "already holds transitions.parquet" in str(again.output) + str(again.exception)
    options = ("--set", "fit.max_rank=50", "--set", "fit.n_gammas=3", "--set", "fit.folds=2")
    path = ROOT / "pipelines" / "pendulum.toml"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code, stdout, err = run(path, "--data", data, "--out", out, *options, "--json")
    assert code == 0, err
    result = json.loads(stdout)
    assert result["ingest"]["rows_kept"] == 2000
    scores = result["evaluation"]["scores"]["model"]
    assert list(scores) == ["sin'", "cos'", "omega'"]
    assert min(each["r2"]["value"] for each in scores.values()) > 0.9
    model = load(out / "model.zarr")
    assert len(model.points_x) < 50
    assert model.about["relax"] is True
