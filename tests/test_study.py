"""The study of laws: scenarios whose truth is right, figures that mean what they say."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from conftest import few_scales

from benchmarks import laws
from benchmarks.__main__ import cli
from benchmarks.coverage import SCENARIOS
from benchmarks.laws import judge_tuned
from benchmarks.study import (
    DEFAULT,
    FIGURES,
    SCENARIO_NAMES,
    STUDY,
    StudyOptions,
    judge_all,
    origin,
    study_page,
)
from cme_dask.cli.progress import ProgressLines
from cme_dask.errors import DataError
from cme_dask.learning.search import GRID

MODELS = {
    "none",
    "none, clipped",
    "none, projected",
    "normalized",
    "normalized, clipped",
    "normalized, projected",
    "certified",
    "pointwise",
    "coupling",
    "traditional",
    "traditional, (41)",
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_truth_is_what_draws_show(name):
    """Means of the events over draws near a point, within five standard errors."""
    scenario = SCENARIOS[name]
    x, y = scenario.draw(200_000, 0)
    low, high = np.quantile(x[:, 0], [0.3, 0.32])
    near = (x[:, 0] > low) & (x[:, 0] < high)
    seen, told = scenario.events(y[near]), scenario.truth(x[near])
    error = np.sqrt(told.mean(axis=0) * (1 - told.mean(axis=0)) / near.sum()) + 1e-12
    assert (np.abs(seen.mean(axis=0) - told.mean(axis=0)) < 5 * error).all()
    assert (seen[:, -1] == 1).all()
    assert (told[:, -1] == 1).all()
    again = scenario.draw(200_000, 0)
    assert np.array_equal(again[1], y)
    assert not np.array_equal(scenario.draw(100, 1)[0], x[:100])


@pytest.fixture(scope="module")
def judged():
    """Every model on one sample, with a small grid."""
    with pytest.MonkeyPatch.context() as patch:
        few_scales(patch)
        return laws.judge("strong", 300, 0)


def test_every_model_is_judged(judged):
    assert set(judged) == MODELS
    for name, figures in judged.items():
        assert set(FIGURES) < set(figures)
        assert np.isfinite(list(figures.values())).all(), name
        assert 0 <= figures["error"] < 0.2
        assert figures["crps"] > 0
    assert judged["traditional, (41)"] != judged["traditional"]


def test_laws_are_laws_and_signed_estimates_are_not(judged):
    for name in MODELS - {"none", "normalized", "pointwise", "traditional", "traditional, (41)"}:
        assert judged[name]["minimum"] >= -1e-9, name
        assert judged[name]["mass"] < 1e-6, name
    assert judged["none"]["mass"] > 1e-6
    assert judged["normalized"]["mass"] < 1e-10
    assert judged["normalized"]["minimum"] < 0
    assert judged["traditional"]["mass"] > 1e-6


def test_projection_is_nearer_than_clipping(judged):
    for name in ("none", "normalized"):
        assert judged[f"{name}, projected"]["crps"] < judged[f"{name}, clipped"]["crps"] * 1.02


def test_the_study_sums_up(tmp_path, quick_studies, brief_search):
    options = StudyOptions(("low",), (60,), 2, 1)
    result = STUDY.run(options, tmp_path / "out", overwrite=False, progress=ProgressLines())
    assert json.loads((tmp_path / "out" / "study.json").read_text()) == result
    (cell,) = result["cells"]
    assert (cell["scenario"], cell["rows"]) == ("low", 60)
    figure = cell["models"][DEFAULT]["error"]
    assert figure["mean"] == pytest.approx(np.mean(figure["values"]))
    assert figure["std_error"] == pytest.approx(abs(np.subtract(*figure["values"])) / 2)
    (verdict,) = result["verdicts"]
    errors = {name: figures["error"]["mean"] for name, figures in cell["models"].items()}
    assert verdict["best"] == min(errors, key=errors.get)
    mean = {name: figure["mean"] for name, figure in cell["models"][DEFAULT].items()}
    assert verdict["default_over_truth"] == pytest.approx(mean["error"] / mean["least_error"])
    assert verdict["noisy_over_plain"] == pytest.approx(mean["noisy_crps"] / mean["crps"])
    assert set(verdict["never_negative"]) == set(cell["models"])
    assert verdict["never_negative"][DEFAULT] == 1.0
    assert verdict["default_over_best"] == pytest.approx(errors[DEFAULT] / min(errors.values()))
    # The page holds every model of this run, the default first, and the command that makes it.
    page = (tmp_path / "out" / "study.md").read_text()
    assert str(tmp_path / "out" / "study.md") in result["files"]
    assert "`python3 run study --scenario low --rows 60 --seeds 2 --out docs --overwrite`" in page
    head, _, default, *others = page.partition("## Error (43)")[2].split("\n\n")[1].splitlines()
    assert head == "| | low |"
    number = float(default.removeprefix("| **default** (self-tuned) | ").split(" ")[0])
    assert number == pytest.approx(1e4 * errors[DEFAULT], rel=5e-3)
    assert [line.split(" | ")[0].removeprefix("| ") for line in others] == [
        name for name in errors if name != DEFAULT
    ]
    assert f"| {100 * verdict['location']:.0f} % |" in page


def test_the_page_of_the_docs_is_that_of_its_figures():
    docs = Path(__file__).resolve().parents[1] / "docs"
    result = json.loads((docs / "study.json").read_text())
    assert (docs / "study.md").read_text() == study_page(result)


@pytest.mark.parametrize("residual", ["auto", pytest.param(False, marks=pytest.mark.slow)])
def test_the_self_tuned_law_is_a_law_and_not_far_from_the_truth(
    brief_search, monkeypatch, residual
):
    monkeypatch.setattr("cme_dask.learning.search.GRID", GRID)
    found = judge_tuned("strong", 400, 1, residual)
    assert set(FIGURES) < set(found)
    assert found["minimum"] >= 0.0
    assert found["mass"] < 1e-12
    assert found["location"] == (residual == "auto")
    # The truth chooses among the kernels of the plain law; a law with a location does better.
    low, high = ("error", "least_error") if residual else ("least_error", "error")
    assert 0.0 < found[low] <= 1.2 * found[high] < 0.02
    assert found["noisy_crps"] < 1.3 * found["crps"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scenarios": ("lowest",)}, "scenarios must be among"),
        ({"rows": (10,)}, "at least 50 rows"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(DataError, match=message):
        StudyOptions(**options)


def test_the_command_knows_its_scenarios():
    found = CliRunner().invoke(cli, ["study", "--scenario", "lowest"])
    assert found.exit_code != 0
    assert set(SCENARIO_NAMES) == set(SCENARIOS)


class Lines:
    """Progress that is a list of lines, or is interrupted at its first one."""

    def __init__(self, interrupted=False):
        self.interrupted, self.lines = interrupted, []

    def say(self, line):
        if self.interrupted:
            raise KeyboardInterrupt
        self.lines.append(line)


def quick_or_slow(name, n, seed):
    """The draws of the folder ``name``: two that end at once, one that fails, others of seconds."""
    if seed == 2:
        raise ValueError("this draw fails")
    if seed > 2:
        time.sleep(5)
        (Path(name) / str(seed)).touch()
    return {"seed": seed}


@pytest.mark.parametrize("by", [ValueError, KeyboardInterrupt])
def test_a_study_that_fails_or_is_interrupted_ends_at_once(tmp_path, by):
    """Draws that have ended are not lost, and no further one ends."""
    aside, ended = tmp_path / "draws.jsonl", tmp_path / "ended"
    ended.mkdir()
    seeds = (0, 1, 3, 4, 5) if by is KeyboardInterrupt else (0, 1, 2, 3, 4, 5)
    tasks = [(str(ended), 1, seed) for seed in seeds]
    with pytest.raises(by):
        judge_all(quick_or_slow, tasks, 2, Lines(by is KeyboardInterrupt), aside)
    assert not list(ended.iterdir())
    head, *draws = map(json.loads, aside.read_text().splitlines())
    assert head == origin(quick_or_slow)
    assert {seed for (_, _, seed), _ in draws} & {0, 1}  # whichever ends first
    progress = Lines()
    known = [task for task in tasks if list(task) in [draw[0] for draw in draws]]
    assert judge_all(quick_or_slow, known, 1, progress, aside) == {
        task: {"seed": task[2]} for task in known
    }
    assert progress.lines == [f"continuing with {len(known)} of {len(known)} draws that have ended"]


def counted_draw(name, n, seed):
    return {"of": "this version"}


@pytest.mark.parametrize("stale", ["versions", "judge", "data", None])
def test_draws_of_other_versions_judges_or_data_are_made_again(tmp_path, stale):
    aside = tmp_path / "draws.jsonl"
    head = origin(counted_draw)
    old = json.dumps([["medium", 200, 1], {"of": "another version"}])
    first = [] if stale is None else [json.dumps(head | {stale: "another"})]
    aside.write_text("\n".join([*first, old, ""]))
    progress, task = Lines(), ("medium", 200, 1)
    assert judge_all(counted_draw, [task], 1, progress, aside) == {task: {"of": "this version"}}
    assert "draws are made again" in progress.lines[0]
    lines = list(map(json.loads, aside.read_text().splitlines()))
    assert lines == [head, [list(task), {"of": "this version"}]]


ENDED = """
import os, time
from pathlib import Path
from benchmarks.study import judge_all
from cme_dask.cli.progress import ProgressLines

def judge(name, n, seed):
    Path(name).write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    judge_all(judge, [("pid", 1, 0)], 1, ProgressLines(False))
"""


@pytest.mark.slow
def test_workers_of_a_study_end_with_it(tmp_path):
    (tmp_path / "ended.py").write_text(ENDED)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    study = subprocess.Popen(
        [sys.executable, "ended.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}
    )
    try:
        told = tmp_path / "pid"
        while not (told.exists() and told.read_text()):
            assert study.poll() is None
            time.sleep(0.05)
        worker = psutil.Process(int(told.read_text()))
    finally:
        study.terminate()
        study.wait()
    worker.wait(timeout=60)
