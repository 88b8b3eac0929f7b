"""The study of the pendulum: its dynamics, policies on a true model, every part in small."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.integrate import solve_ivp

from benchmarks import pendulum_study
from benchmarks.__main__ import cli
from benchmarks.pendulum import (
    DISCOUNT,
    advance,
    balanced,
    features,
    policy_iteration,
    returns,
    reward,
    simulate,
    transitions,
    true_outputs,
)
from benchmarks.pendulum_page import pendulum_page
from benchmarks.pendulum_study import PendulumOptions, Table, run_pendulum
from cme_dask.cli.progress import ProgressLines
from cme_dask.errors import DataError


def test_a_step_solves_the_equation_of_motion():
    for angle, speed, torque in ((3.0, 0.5, 5.0), (-0.4, 2.0, -3.0)):

        def slope(_, state, torque=torque):
            return state[1], 9.81 * np.sin(state[0]) - 0.05 * state[1] + torque

        plain = solve_ivp(slope, (0.0, 0.2), (angle, speed), rtol=1e-10, atol=1e-12).y[:, -1]
        after = advance(np.array([[angle, speed]]), np.array([torque]))
        assert np.abs(features(after) - features(plain[None])).max() < 1e-5
    assert reward(features(np.array([[0.3, 1.0]])))[0] == pytest.approx(np.exp(-0.09 - 0.2))
    x, y = transitions(50, 0)
    assert (x.shape, y.shape) == ((50, 4), (50, 3))
    assert np.abs(true_outputs(x) - y).max() < 1e-9


def test_the_policy_of_the_true_dynamics_balances():
    policy = policy_iteration(true_outputs)
    runs = simulate(policy.torques, 20)
    assert balanced(runs).all()
    assert returns(runs).mean() > 35
    # A fixed torque does not swing the pendulum up, nor does none.
    for torque in (0.0, 5.0):
        assert not balanced(simulate(lambda s, u=torque: np.full(len(s), u), 20)).any()
    # The best that there is: upright for ever.
    assert policy.values.max() < 1.000001 / (1.0 - DISCOUNT)


@pytest.fixture(scope="module")
def table():
    return Table.of(30, 0)


def test_errors_of_the_path_are_those_of_the_dense_formulas(table):
    from benchmarks.pendulum_study import _KERNELS, _REG

    K, L = (kernel(rows, rows) for kernel, rows in zip(_KERNELS, (table.x, table.y), strict=True))
    W = np.linalg.inv(K + 30 * _REG * np.eye(30))
    assert table.dense()["norm"] ** 2 == pytest.approx(np.trace(W.T @ K @ W @ L), rel=1e-6)
    assert table.dense()["library"] < 1e-8
    path = table.path("rows", 3)
    for each in path:
        assert each["gap"] <= 1e-4
        assert each["relaxed"]["distance"] <= each["penalised"]["distance"]
    # The last relaxed one, from its points and coefficients.
    fit = table.sparse("rows", relax=True, n_gammas=3, gamma_ratio=0.01, n_folds=2)
    model = fit.model_at(2)
    rows, columns = (
        [int(np.flatnonzero((rows == point).all(axis=1))[0]) for point in points]
        for rows, points in ((table.x, model.points_x), (table.y, model.points_y))
    )
    E = W.copy()
    E[np.ix_(rows, columns)] -= model.coef
    distance = np.sqrt(np.trace(E.T @ K @ E @ L) / np.trace(W.T @ K @ W @ L))
    assert path[2]["relaxed"]["distance"] == pytest.approx(distance, rel=1e-4)
    for curve in table.cholesky().values():
        assert (np.diff([each["distance"] for each in curve]) < 1e-6).all()
        assert curve[-1]["distance"] < 1e-3
    models = table.models()
    dense, size = models["dense"]
    assert size["points_x"] == 30
    assert np.abs(dense(table.x) - K @ W @ table.y).max() < 1e-9
    sizes = [models[name][1] for name in ("sparse", "sparse, not relaxed")]
    assert sizes[0] == sizes[1]
    assert sizes[0]["points_x"] <= 6


@pytest.mark.slow
def test_every_part_in_small(tmp_path):
    options = PendulumOptions((500,), 1, 30, 2, 20, ("l1",), cluster=False, workers=1)
    result = run_pendulum(options, tmp_path, overwrite=True, progress=ProgressLines())
    assert json.loads((tmp_path / "pendulum.json").read_text()) == result
    assert (tmp_path / "pendulum.md").read_text() == pendulum_page(result)
    assert "all queries are measured at 4,000 points at once" in pendulum_page(result)
    names = ["true dynamics", "dense", "sparse", "sparse, not relaxed", "incomplete Cholesky"]
    assert [policy["name"] for policy in result["policies"]] == names
    assert result["large"]["equal"] == {"two threads": True}
    fits = [*result["large"]["sizes"], *result["large"]["policies"]]
    assert [fit["passes"] for fit in fits] == [1, 1, 1]
    assert result["large"]["sizes"][0]["balanced"] >= 0


def test_queries_of_all_rows_and_of_pivots_have_equally_many_points(tmp_path, monkeypatch):
    asked = []

    def timed(outputs, inputs, *repeats):
        asked.append((len(inputs), np.shape(outputs(inputs[:2]))))
        return 1.0

    monkeypatch.setattr(pendulum_study, "_microseconds", timed)
    model = SimpleNamespace(expect=lambda columns, inputs: np.ones((len(inputs), 3)))
    large = pendulum_study.Large(tmp_path, PendulumOptions(), ProgressLines(False))
    times = large._query_times(20_500, SimpleNamespace(model_=model))
    assert asked == [(4_000, (2, 3))] * 2
    assert times["query_points"] == {"all rows": 4_000, "pivots": 4_000}


DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_page_of_the_docs_is_that_of_its_figures():
    result = json.loads((DOCS / "pendulum.json").read_text())
    assert (DOCS / "pendulum.md").read_text() == pendulum_page(result)
    assert all(result["large"]["equal"].values())


@pytest.mark.slow
def test_the_study_shows_what_the_page_says(tmp_path):
    """The figure for l1 and rows alone: the page reports how the others miss it."""
    options = PendulumOptions(penalties=("l1", "rows"))
    result = run_pendulum(options, tmp_path, overwrite=True, progress=ProgressLines())
    ratios = result["verdicts"]["distance_over_cholesky"]["l1"]
    assert max(*ratios["penalised"]["all outputs"], *ratios["relaxed"]["all outputs"]) < 1.0
    assert result["verdicts"]["met"]["sparse"] == result["settings"]["seeds"] == 5
    assert result["large"]["equal"] == {"two threads": True, "a two-worker cluster": True}


def test_bad_options():
    with pytest.raises(DataError, match="at least 200 rows"):
        PendulumOptions((10,))
    result = CliRunner().invoke(cli, ["study", "pendulum", "--scenario", "low"])
    assert result.exit_code != 0
    assert "no --scenario" in result.output
