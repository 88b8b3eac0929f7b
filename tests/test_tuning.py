"""Kernels and ridge learned from the rows."""

import shutil
import warnings
from dataclasses import replace
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from conftest import write_store
from test_reads import opened

from cme_dask import JointDistribution, Tuning, load, open_sample
from cme_dask.errors import DataError, ResourceError
from cme_dask.kernels import Gaussian, TransformedKernel
from cme_dask.kernels.length_scales import IGNORED
from cme_dask.learning import problems
from cme_dask.learning import search as search_module
from cme_dask.learning.candidates import TrialsHere
from cme_dask.learning.losses import ScreenedRows
from cme_dask.learning.problems import search_joint
from cme_dask.learning.search import (
    KernelSearch,
    SearchedVariable,
    SearchProblem,
    _groups,
    search,
)
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.problem import Regularization

QUICK = Tuning(rows=600, max_rank=40, evaluations=12, finalists=4, averaged=3, trees=())


def sample_of(n, seed=0, noise=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 1 + noise))
    y = np.sin(2 * x[:, :1]) + 0.2 * rng.standard_normal((n, 1))
    return x, y


def searched(x, y, **options):
    n = len(x)
    arguments = {"given": (None, None), "options": QUICK} | options
    coded = tuple((False,) * part.shape[1] for part in (x, y))
    given = arguments.pop("given")
    return search_joint((x, y), np.full(n, 1 / n), fold_of_rows(0, n, 5), given, coded, **arguments)


def test_the_best_beats_the_grid_and_independence():
    found = searched(*sample_of(500))
    grid = [t.score for t in found.trials if t.stage == "grid"]
    scores = [t.score for t in found.trials]
    assert min(scores) <= min(grid) < -1.0
    assert found.finalists[0].trial.score == min(scores)
    assert [c.trial.score for c in found.finalists] == sorted(
        c.trial.score for c in found.finalists
    )


def test_a_column_of_noise_gets_a_long_scale():
    x, y = sample_of(800, noise=2)
    best = searched(x, y, options=Tuning(rows=800, max_rank=60, evaluations=40)).finalists[0]
    signal, *noise = best.trial.x.scales
    assert min(noise) > 5 * signal


def many_columns():
    """Forty columns, of which two matter."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 40))
    return x, np.sin(2 * x[:, 7:8]) + x[:, 31:32] + 0.1 * rng.standard_normal((400, 1))


def moves_of(found):
    """Where the refinement went in logarithms of the length scales of x, and its trials."""
    refined = [t for t in found.trials if t.stage == "refine"]
    first = np.log(refined[0].x.scales)
    best = found.finalists[0].trial.x.scales
    assert sorted(np.argsort(best)[:2]) == [7, 31]
    return np.array([np.log(t.x.scales) - first for t in refined[1:]]), len(refined)


def test_length_scales_of_many_columns_follow_the_gradient():
    """Each by itself, in no more trials than for one column."""
    moves, count = moves_of(searched(*many_columns(), options=Tuning(rows=400, max_rank=60)))
    assert 3 < count <= 30
    assert np.unique(np.round(moves, 6), axis=1).shape[1] > 20


def test_without_gradients_columns_that_matter_least_share_a_factor():
    """The search costs no more than that of 24 columns."""
    found = searched(*many_columns(), options=Tuning(rows=400, max_rank=60), form="single")
    moves, count = moves_of(found)
    assert 100 < count <= 40 + 5 * 24
    # Of x 23 columns at most move by themselves, the last of the 24 is that of y.
    different = np.unique(np.round(moves, 6), axis=1).shape[1]
    assert 2 < different <= 23
    together = [j for j in range(40) if np.allclose(moves[:, j], moves[:, 0])]
    assert not {7, 31} & set(together)


def test_ridges_around_the_best_one_give_the_best_score():
    """After the grid some ridges are tried, as long as the best of them is the last."""
    x, y = sample_of(400, noise=1)
    found = {}

    def tried(problem, *args, **options):
        found["search"], best = search(problem, *args, **options)
        return found["search"], best

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problems, "search", tried)
        searched(x, y)
    search_of = found["search"]
    refined = [pair for pair, stage in search_of.stages.items() if stage == "refine"]
    assert len(refined) > 3
    problem = search_of.problem
    for pair in refined:
        few, _ = search_of.losses[pair]
        sides = [search_of._made(side) for side in enumerate(pair)]
        everything, _ = problem.losses(*sides, slice(0, problem.ridges))
        first = search_of.ridges[pair]
        assert few.shape[1] < problem.ridges == everything.shape[1]
        some = everything[:, first : first + few.shape[1]]
        np.testing.assert_allclose(few, some, rtol=1e-5, atol=1e-7)
        best = search_of.score_of(*everything).min()
        assert search_of.score(pair) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize(("n", "first"), [(450, None), (453, (453, 100)), (600, (500, 100))])
def test_a_smaller_problem_is_searched_first(n, first):
    """Fewer rows, or a lower rank; trials of both are apart."""
    memory = TrialsHere()
    searched(*sample_of(n), options=replace(QUICK, rows=2048, max_rank=200), memory=memory)
    seen = {(rows, rank) for rows, rank, *_ in memory}
    assert seen == {(n, n // 3), *([first] if first else ())}


@pytest.mark.parametrize("finalists", [1, 4])
@pytest.mark.parametrize("form", ["two-sided", "single"])
def test_few_pairs_are_compared_on_all_rows(form, finalists):
    """The best is rescaled there only where the search of fewer rows had no gradients."""
    options = Tuning(rows=600, max_rank=40, evaluations=20, finalists=finalists)
    found = searched(*sample_of(600), options=options, form=form)
    stages = [trial.stage for trial in found.trials]
    assert 1 <= stages.count("shortlist") <= max(3, 2 * finalists)
    assert ("rescale" in stages) == (form == "single")


def test_normal_scores_are_not_tried_where_they_are_nearly_linear(rng):
    normal, labels = rng.normal(size=(500, 2)), rng.integers(0, 3, size=(500, 1))
    weights = rng.uniform(0.5, 1.5, size=500)

    def forms(*columns, coded=0):
        categorical = tuple(j < coded for j in range(sum(c.shape[1] for c in columns)))
        return SearchedVariable(np.hstack(columns), weights, categorical, None).forms

    assert forms(normal) == forms(labels, normal, coded=1) == ("standard",)
    assert forms(labels, coded=1) == forms(np.zeros((500, 1)), normal) == ("standard",)
    assert forms(normal, rng.uniform(size=(500, 1))) == ("standard", "scores")
    assert forms(np.append(normal, [[0.0, 50.0]], axis=0)[1:]) == ("standard", "scores")


def test_shortest_scales_are_tried_again_where_rows_are_many_more(monkeypatch):
    tried, shortest = [], search_module._shortest
    monkeypatch.setattr(
        search_module, "_shortest", lambda search: tried.append(search) or shortest(search)
    )
    for n, more in ((1999, 0), (2000, 1)):
        searched(*sample_of(n), options=replace(QUICK, rows=2048, evaluations=0))
        assert len(tried) == more


def test_slopes_of_the_search_are_those_of_its_scores():
    """In logarithms of length scales, where pivots are all rows that may be pivots."""
    x, y = sample_of(600, noise=1)
    found = {}

    def begun(problem, *_, **__):
        found["problem"] = problem.smaller()
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problems, "search", begun)
        with pytest.raises(InterruptedError):
            searched(x, y, options=Tuning(rows=600, max_rank=100), tol=1e-14)
    problem = found["problem"]
    tried = KernelSearch(problem, None, 0)
    points = [
        variable.start("standard", scale)
        for variable, scale in zip(problem.variables, (0.4, 0.3), strict=True)
    ]
    for scale in (0.5, 1.0):
        tried.score((points[0].scaled([scale] * 2), points[1]))
    tried.settle()
    pair, step = (points[0], points[1]), 1e-4
    slopes = tried.slopes(pair, "refine")
    for j, slope in enumerate(slopes):
        ends = []
        for sign in (1.0, -1.0):
            factors = np.exp(sign * step * (np.arange(3) == j))
            moved = pair[0].scaled(factors[:2]), pair[1].scaled(factors[2:])
            tried.score(moved)
            at = tried.ridge(pair) - tried.ridges[moved]
            ends.append(tried.score_of(*tried.losses[moved][0])[at])
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3, abs=1e-4)


def test_columns_of_y_leave_parameters_to_those_of_x():
    tried = SimpleNamespace(relevance={0: 0.1, 1: 0.5, 2: -0.1})
    assert _groups(tried, np.arange(24), 3).tolist() == list(range(24))
    group = _groups(tried, np.arange(43), 3)  # 21 of 40 columns of y by themselves
    assert group[:3].tolist() == [22, 21, 23]
    assert group[3:24].tolist() == list(range(21))
    assert set(group[24:]) == {23}
    group = _groups(tried, np.arange(80), 40)
    assert group[40:52].tolist() == list(range(12))
    assert sorted(set(group.tolist())) == list(range(24))
    assert group[1] == 12


def test_skewed_columns_get_normal_scores():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1500, 1))
    y = np.exp(2.0 * x + 0.5 * rng.standard_normal((1500, 1)))
    best = searched(x, y, options=Tuning(rows=1500)).finalists[0]
    assert best.trial.y.form == "scores"


def test_finalists_differ():
    found = searched(*sample_of(500))
    assert len(found.finalists) == QUICK.finalists
    keys = {(c.trial.x, c.trial.y) for c in found.finalists}
    assert len(keys) == QUICK.finalists


def test_a_search_minimises_any_loss_of_bases():
    """Here the distance to the Gram matrix of a kernel that ignores the second column."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((80, 2))
    weights, folds = np.full(80, 1 / 80), fold_of_rows(0, 80, 4)
    variable = SearchedVariable(rows, weights, (False, False), None)
    given = SearchedVariable(rows[:, :1], weights, (False,), Gaussian(1.0))
    screened = ScreenedRows(weights, folds, np.zeros((80, 0)))
    scaled = variable.values["standard"][screened.order]
    target = Gaussian(0.7)(scaled[:, :1], scaled[:, :1])

    class Distance(SearchProblem):
        ridges = 1

        def losses(self, x, y, among):
            assert among == slice(0, 1)
            loss = np.array([[((x.newton @ x.newton.T - target) ** 2).mean()]])
            return loss, np.zeros((1, 1))

    problem, events = Distance((variable, given), screened, 1e-10, 80), []
    tried, (best,) = search(problem, events.append, evaluations=60, widening=60, finalists=1)
    assert best[0].form == "standard"
    assert best[0].scales == pytest.approx((0.7, IGNORED), rel=0.02)
    assert tried.score(best) < 1e-4
    assert [e.stage for e in events if e.stage != "refine"][-2:] == ["columns", "columns"]
    assert all(e.score >= 0.0 for e in events)


def test_constant_columns_have_no_slopes():
    """Where all of x is constant, only the length scales of y are moved."""
    rng = np.random.default_rng(3)
    x, y = np.ones((300, 3)), rng.standard_normal((300, 2))
    found = searched(x, y)
    assert any(t.stage == "refine" for t in found.trials)
    assert all(t.x.free == [] for t in found.trials)


def test_given_kernels_and_ridge_stay():
    x, y = sample_of(400)
    kernel = Gaussian(0.7)
    found = searched(x, y, given=(kernel, None), reg=Regularization(1e-3, 1e-2))
    assert all(
        c.kernel_x == kernel and c.reg == Regularization(1e-3, 1e-2) for c in found.finalists
    )
    assert all(isinstance(c.kernel_y, TransformedKernel) for c in found.finalists)


@pytest.mark.parametrize("criterion", ["joint", "crps"])
def test_other_criteria_minimise_what_they_say(criterion):
    found = searched(*sample_of(500), options=Tuning(criterion, 500, 40, 10))
    best = min(found.trials, key=lambda t: t.score)
    assert getattr(best, criterion) == min(getattr(t, criterion) for t in found.trials)


def test_validation_is_by_declared_functions():
    x, y = sample_of(800)
    functions = {"up": lambda rows: rows[:, 0] > 0.3, "square": lambda rows: rows[:, 0] ** 2}
    options = Tuning("validation", 800, 40, 10, trees=())
    law = JointDistribution(tuning=options).fit(x, y, functions=functions)
    best = law.search_.finalists[0].trial
    assert best.crps == min(t.crps for t in law.search_.trials) < -0.5
    # Over the variance each function gains its held-out skill.
    held = law.replicates_[0]
    gained = (
        (held.baseline - held.error)[1:3] / np.array([f(y).var() for f in functions.values()])
    ).sum()
    assert gained == pytest.approx(-law.members_[0].crps, rel=0.05)
    with pytest.raises(DataError, match="declared functions of y"):
        JointDistribution(tuning=options).fit(x, y)
    with pytest.raises(DataError, match="'one' does not vary"):
        JointDistribution(tuning=options).fit(
            x, y, functions={"one": lambda rows: 1.0 + 0 * rows[:, 0]}
        )


def test_a_search_that_does_not_fit_is_refused_before_it_begins():
    x, y = sample_of(5000)
    heard = []
    for step in ("fit", "plan"):
        needed = getattr(JointDistribution(), step)
        with pytest.raises(
            ResourceError, match=r"for the search for kernels, .*Tuning\(rows=1024\)"
        ):
            needed(x, y, memory_limit="250MB", progress=heard.append)
    assert not heard
    quick = JointDistribution(tuning=QUICK)
    plan = quick.plan(x, y, memory_limit="480MB")
    assert plan.memory.predicted < 480e6
    given = JointDistribution(kernel_x=Gaussian(0.5), kernel_y=Gaussian(0.5), tol=1e-3)
    given.fit(x, y, memory_limit="480MB")


def test_the_search_is_part_of_the_predicted_peak():
    x, y = sample_of(2000)
    options = Tuning(rows=2000, max_rank=200, evaluations=0)
    law = JointDistribution(tuning=options, residual=False)
    plan = law.plan(x, y)
    memory = law.fit(x, y).report_.memory
    assert memory.phase == plan.memory.phase == "the search for kernels"
    assert memory.predicted == plan.memory.predicted > 24 * 2000 * 200 * 8


def test_independence_is_found_to_be_best():
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, 2000, 1))
    options = Tuning(rows=2000, max_rank=100, evaluations=10)
    model = JointDistribution(tuning=options, residual=False).fit(x, y)
    ratio = model.density_ratio(x[:50], y[:50])
    assert np.abs(ratio - 1).max() < 0.35


def test_rows_of_one_fold_are_refused():
    x, y = sample_of(20)
    with pytest.raises(DataError, match="kernels are learned on held-out folds"):
        search_joint((x, y), np.full(20, 0.05), np.zeros(20), (None, None), ((False,), (False,)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criterion": "likelihood"}, "criterion must be one of auto, joint"),
        ({"rows": 10}, "rows must be an integer of at least 50"),
        ({"finalists": 0}, "finalists must be an integer of at least 1"),
        ({"averaged": True}, "averaged must be an integer"),
        ({"averaged": 3, "finalists": 2}, "averaged must be at most finalists, got 3 of 2"),
    ],
)
def test_unusable_options_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        Tuning(**options)


def test_an_estimator_refuses_what_is_no_tuning():
    with pytest.raises(DataError, match="tuning must be a cme_dask"):
        JointDistribution(tuning={"rows": 100}).fit(*sample_of(100))


# The estimator -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted():
    x, y = sample_of(1500)
    functions = {"up": lambda rows: rows[:, 0] > 0}
    return x, y, JointDistribution(tuning=QUICK).fit(x, y, functions=functions)


def test_the_mean_of_the_members_is_the_model(fitted):
    x, y, law = fitted
    assert 1 < len(law.members_) <= 3
    ratios, answers = [], []
    for member in law.members_:
        part = member.component
        psi_x = part.sides[0].basis(x[:9]) @ part.solution.transform_x
        psi_y = part.sides[1].basis(y[:7]) @ part.solution.transform_y
        ratios.append(1.0 + psi_x @ part.solution.coef.T @ psi_y.T)
        constant, slope = part.solution.answer(part.mean, 0)
        answers.append((constant + psi_x @ slope)[:, :2])
    np.testing.assert_allclose(law.density_ratio(x[:9], y[:7]), np.mean(ratios, axis=0), atol=1e-10)
    wanted = np.mean(answers, axis=0)
    np.testing.assert_allclose(law.expect(["y0", "up"], x[:9]), wanted, atol=1e-10)


def test_a_member_is_the_fit_with_its_kernels_and_ridge(fitted):
    x, y, law = fitted
    member = law.members_[0]
    chosen = member.candidate
    alone = JointDistribution(
        kernel_x=chosen.kernel_x,
        kernel_y=chosen.kernel_y,
        reg=(chosen.reg.y, chosen.reg.x),
        max_rank=500,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone.fit(x, y)
    part = member.component
    psi_x = part.sides[0].basis(x[:9]) @ part.solution.transform_x
    psi_y = part.sides[1].basis(y[:7]) @ part.solution.transform_y
    ratio = 1.0 + psi_x @ part.solution.coef.T @ psi_y.T
    np.testing.assert_allclose(alone.density_ratio(x[:9], y[:7]), ratio, atol=1e-7)


def test_it_learns_the_law(fitted):
    _, _, law = fitted
    at = np.linspace(-1.5, 1.5, 13)[:, None]
    assert np.abs(law.expect("y0", at) - np.sin(2 * at[:, 0])).max() < 0.15
    weights = law.weights(at)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-12)


def test_standard_errors_and_held_out_errors_are_there(fitted):
    x, _, law = fitted
    _, std = law.expect("up", x[:20], return_std=True)
    assert (std > 0).all()
    assert std.max() < 0.5
    held = law.model_.about["held_out"]["x"]
    assert set(held) == {"y0", "up"}
    assert 0.8 < held["y0"]["skill"] < 1.0


@pytest.fixture(scope="module")
def saved(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "m.zarr"
    fitted[2].save(path)
    return path


def test_a_saved_mean_answers_alike(fitted, saved):
    x, y, law = fitted
    again = load(saved)
    np.testing.assert_array_equal(
        again.density_ratio(x[:5], y[:5]), law.density_ratio(x[:5], y[:5])
    )
    for one, two in zip(
        again.expect(None, x[:5], return_std=True),
        law.expect(None, x[:5], return_std=True),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(again.weights(x[:3]), law.weights(x[:3]))
    assert "and 2 more" in repr(again)


def test_damaged_stacks_are_refused(saved, tmp_path):
    from cme_dask.errors import StoreError

    shutil.copytree(saved, tmp_path / "m.zarr")
    group = zarr.open_group(tmp_path / "m.zarr", mode="r+")
    key = next(iter(group.attrs))
    document = dict(group.attrs[key])
    document["description"]["x"]["basis"]["parts"] = []
    del document["checksum"]
    group.attrs[key] = document
    with pytest.raises(StoreError, match=r"x_basis is damaged .a stacked basis needs parts"):
        load(tmp_path / "m.zarr")


def test_any_workers_chunks_and_scheduler_give_the_same(fitted):
    x, y, law = fitted
    wanted = law.density_ratio(x[:5], y[:5])
    functions = {"up": lambda rows: rows[:, 0] > 0}
    for rows, options in (
        ((da.from_array(x, chunks=701), da.from_array(y, chunks=333)), {"workers": 3}),
        ((x, y), {"scheduler": "synchronous"}),
    ):
        again = JointDistribution(tuning=QUICK).fit(*rows, functions=functions, **options)
        np.testing.assert_array_equal(again.density_ratio(x[:5], y[:5]), wanted)


def test_the_rows_are_read_once(tmp_path):
    x, y = sample_of(20_000)
    write_store(tmp_path / "s.zarr", x, y, chunk_rows=4096)
    store, group = opened(tmp_path / "s.zarr")
    law = JointDistribution(tuning=QUICK, residual=False).fit(group, workers=2)
    assert law.n_passes_ == 1
    for name in ("x", "y", "row_sample/x", "row_sample/y"):
        assert set(store.chunks(name).values()) == {1}


@pytest.mark.parametrize("constraint", ["none", "certified", "coupling"])
def test_other_constraints_take_the_best_kernels(constraint):
    x, y = sample_of(600)
    law = JointDistribution(constraint=constraint, tuning=QUICK, tol=1e-3).fit(x, y)
    assert law.search_ is not None
    assert law.basis_x_.newton.kernel == law.search_.finalists[0].kernel_x
    assert abs(law.expect("y0", [[0.8]])[0]) < 1.2


def test_the_median_heuristic_is_still_there():
    x, y = sample_of(500)
    law = JointDistribution(kernel_x="median", kernel_y="median", tol=1e-3).fit(x, y)
    assert law.search_ is None
    assert isinstance(law.basis_x_.newton.kernel, Gaussian)


def test_progress_tells_of_the_search():
    from cme_dask.learning.candidates import TuningProgress

    heard = []
    x, y = sample_of(500)
    JointDistribution(tuning=QUICK, residual=False).fit(x, y, progress=heard.append)
    parts = [event.detail for event in heard]
    stages = [part.stage for part in parts if isinstance(part, TuningProgress)]
    assert {"grid", "refine"} <= set(stages)


def test_passes_of_pivots_over_all_rows_are_counted():
    x, y = sample_of(1500)
    options = Tuning(rows=400, max_rank=20, evaluations=0, finalists=2, averaged=1, trees=())
    law = JointDistribution(tuning=options, pivots="greedy", span=0.5, tol=1e-2).fit(x, y)
    assert law.n_passes_ > 2
    plain = JointDistribution(tuning=options, tol=1e-2, residual=False).fit(x, y)
    assert plain.n_passes_ == 1


def test_one_given_kernel_serves_both_variables_apart():
    x, y = sample_of(600)
    kernel = Gaussian(0.7)
    law = JointDistribution(kernel_x=kernel, tuning=QUICK, residual=False).fit(x, y)
    for member in law.members_:
        first, second = member.component.sides
        assert np.isin(first.basis.points[:, 0], x[:, 0]).all()
        assert np.isin(second.basis.points[:, 0], y[:, 0]).all()


def test_labels_of_x_and_y_are_learned():
    rng = np.random.default_rng(5)
    kind = rng.integers(0, 3, 2000)
    seen = np.where(rng.random(2000) < 0.8, kind, rng.integers(0, 3, 2000))
    table = pd.DataFrame(
        {"a": rng.standard_normal(2000), "kind": pd.Categorical.from_codes(kind, list("uvw"))}
    )
    target = pd.DataFrame({"seen": pd.Categorical.from_codes(seen, list("uvw"))})
    functions = {"is u": lambda rows: rows[:, 0] == 0}
    law = JointDistribution(tuning=QUICK).fit(table, target, functions=functions)
    found = law.expect("is u", {"a": [0.0, 0.0], "kind": ["u", "v"]})
    np.testing.assert_allclose(found, [0.867, 0.067], atol=0.06)


def test_folds_by_group_serve_the_search():
    x, y = sample_of(900)
    group = np.arange(900) // 100
    sample = open_sample(x, y, group=group).fold_by("group")
    law = JointDistribution(tuning=QUICK, residual=False).fit(sample)
    assert law.model_.about["fold_by"] == "group"
    two = open_sample(x, y, group=np.zeros(900)).fold_by("group")
    with pytest.raises(DataError, match="rows of one only"):
        JointDistribution(tuning=QUICK).fit(two)


def test_the_plan_counts_the_finalists():
    x, y = sample_of(3000)
    plan = JointDistribution(tuning=QUICK).plan(x, y)
    assert plan.finalists == QUICK.finalists
    assert plan.parts["search for kernels"] == plan.search_seconds > 0
    assert plan.to_dict()["finalists"] == QUICK.finalists
    alone = JointDistribution(kernel_x=Gaussian(0.5), kernel_y=Gaussian(0.5), tol=1e-3).plan(x, y)
    assert alone.finalists == 1
    assert "search for kernels" not in alone.parts
