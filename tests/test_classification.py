"""The study of classification: truth that is right, methods that are alike where they must be."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import few_scales
from scipy.special import expit

from benchmarks import classifiers
from benchmarks.__main__ import cli
from benchmarks.classification import (
    FIGURES,
    JUDGED,
    LAWS,
    STUDY,
    ClassificationOptions,
    _verdict,
    classification_tables,
)
from benchmarks.classifiers import METHODS, TRUTH, Draw, Training
from cme_dask.cli.progress import ProgressLines
from cme_dask.errors import DataError


@pytest.mark.parametrize("scenario", ["medium", "strong", "high"])
def test_truth_is_what_draws_show(scenario):
    """Shares of the label in bins of the true probability, within five standard errors."""
    draw = Draw.of(scenario, 200_000, 0)
    assert np.abs(draw.x.std(axis=0) - 1).max() < 0.02
    bins = np.digitize(draw.truth, np.linspace(0.05, 0.95, 7))
    for b in range(8):
        here = bins == b
        error = np.sqrt((draw.truth[here] * (1 - draw.truth[here])).sum()) / here.sum()
        assert abs(draw.labels[here].mean() - draw.truth[here].mean()) < 5 * error
    assert not np.array_equal(Draw.of(scenario, 100, 1).x, draw.x[:100])


@pytest.fixture(scope="module")
def training():
    return Training(Draw.of("strong", 150, 0))


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        few_scales(patch)
        yield


def test_cells_end_at_zero_and_hold_all_rows(training):
    points, masses = training.cells(labels=False)
    assert masses.sum() == pytest.approx(1.0, abs=1e-12)
    assert masses[points > 0].sum() == pytest.approx(training.draw.labels.mean(), abs=1e-12)
    assert training.cells(labels=True)[1].tolist() == pytest.approx(
        [1 - training.draw.labels.mean(), training.draw.labels.mean()]
    )


def test_kernel_logistic_minimises_the_paper_s_objective(training, small):
    """Mean log(1 + exp(-y f)) + lambda |f|^2, lambda = r / 4, with an intercept that is free."""
    rows, labels = training.rows(0), training.draw.labels
    sign = np.where(labels, 1.0, -1.0)
    for number, predict in enumerate(METHODS["kernel logistic"](training)):
        reg = (1e-3, 1e-1)[number % 2]
        odds, N = predict.odds, predict.basis(rows)

        def objective(o, N=N, reg=reg):
            f = N @ o[:-1] + o[-1]
            return np.logaddexp(0, -sign * f).mean() + reg / 4 * (o[:-1] ** 2).sum()

        least = objective(odds)
        rng = np.random.default_rng(0)
        for _ in range(50):
            other = odds + 0.05 * rng.standard_normal(len(odds))
            assert objective(other) > least
        assert np.allclose(predict(rows), expit(N @ odds[:-1] + odds[-1]))


def test_laws_are_laws_and_signed_estimates_are_not(training, small):
    at = Draw.of("strong", 500, 9).x
    for name in ("constrained", "constrained, labels only", "certified", "coupling"):
        for predict in METHODS[name](training):
            found = predict(at)
            assert found.min() > -1e-9, name
            assert found.max() < 1 + 1e-9, name
    for name in ("unconstrained", "traditional"):
        assert min(predict(at).min() for predict in METHODS[name](training)) < -1e-3


@pytest.fixture(scope="module")
def result(small):
    figures = classifiers.judge("strong", 100, 0), classifiers.judge("strong", 100, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "benchmarks.study.judge_all",
            lambda judge, tasks, *others: {task: figures[task[2]] for task in tasks},
        )
        with ProgressLines() as progress:
            options = ClassificationOptions(("strong",), (100, 200), 2)
            yield STUDY.run(options, None, overwrite=False, progress=progress)


def test_every_method_is_judged(result):
    models = result["cells"][0]["models"]
    assert set(models) == {TRUTH, *METHODS}
    for name, figures in models.items():
        assert set(figures) == set(FIGURES)
        assert all(np.isfinite(f["values"]).all() for f in figures.values()), name
    assert models[TRUTH]["deviation"]["mean"] == 0.0
    assert models["constrained"]["deviation"]["mean"] < 0.15
    assert models["traditional"]["outside"]["mean"] > 0.0
    assert models["constrained"]["outside"]["mean"] == 0.0
    # Among proper scores the truth is best but for chance.
    least = min(each["loss"]["mean"] for each in models.values())
    assert models[TRUTH]["loss"]["mean"] < least + 0.02
    text = "\n".join(str(part) for part in classification_tables(result))
    assert text
    json.dumps(result, allow_nan=False)


def test_verdicts_pair_the_draws():
    def figures(values):
        return {f: {"mean": float(np.mean(values)), "values": values} for f in FIGURES}

    models = {TRUTH: figures([0.0, 0.0, 0.0]), "other": figures([1.0, 2.0, 3.0])}
    for law, values in zip(LAWS, ([1.1, 2.1, 3.1], [1.1, 1.8, 3.3]), strict=True):
        models[law] = figures(values)
    verdict = _verdict({"scenario": "s", "rows": 100, "models": models})
    for figure in JUDGED:
        assert verdict[figure]["best"] == "other"
        assert verdict[figure]["over_best"][LAWS[0]] == pytest.approx(1.05)
        assert verdict[figure]["tied"] == {LAWS[0]: False, LAWS[1]: True}


def test_the_study_runs_by_one_command(tmp_path, monkeypatch, result):
    seen = {(n, s) for n in (100, 200) for s in (0, 1)}

    def judged(judge, tasks, *others):
        assert {(n, seed) for _, n, seed in tasks} == seen
        models = result["cells"][0]["models"]
        return {
            task: {
                m: {f: v["values"][task[2]] for f, v in each.items()} for m, each in models.items()
            }
            for task in tasks
        }

    monkeypatch.setattr("benchmarks.study.judge_all", judged)
    out = ("--out", str(tmp_path / "out"))
    args = ["study", "classification", "--scenario", "strong", "--rows", "100", "--rows", "200"]
    done = CliRunner().invoke(cli, [*args, "--seeds", "2", *out, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out" / "classification.json").read_text())
    assert found["verdicts"] == result["verdicts"]
    assert (tmp_path / "out" / "classification.png").stat().st_size > 10_000
    again = CliRunner().invoke(cli, [*args, *out])
    assert again.exit_code == 2


def test_bad_options():
    with pytest.raises(DataError, match="scenarios must be among"):
        ClassificationOptions(("bimodal",))
    with pytest.raises(DataError, match="at least 50 rows"):
        ClassificationOptions(("medium",), (10,))
