"""Conformal intervals cover new rows whatever the kernels, and are the same wherever they are made.

The oracle scores each row by the definition, atom by atom, from laws of refits that it makes
itself from the rows without the fold.
"""

import copy
import json
import math
from functools import partial

import dask.array as da
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from numpy.testing import assert_allclose, assert_array_equal

from cme_dask import (
    JointClassifier,
    JointDistribution,
    Tuning,
    kernels,
    load,
    merge,
    open_sample,
)
from cme_dask.cli import cli
from cme_dask.errors import DataError, StoreError, UnseenCategoryWarning
from cme_dask.models.conformal import FOLDS, SPLIT, conformalized
from cme_dask.models.joint import JointModel
from cme_dask.numerics.conformal import (
    GRID,
    ConformalScores,
    Tails,
    atom_tails,
    conformity,
    law_tails,
)
from cme_dask.numerics.folds import Folding
from cme_dask.numerics.measure import project

LEVELS = (0.0, 0.1, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)


def draw(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 1))
    return x, np.sin(2 * x) + (0.2 + 0.1 * np.abs(x)) * rng.normal(size=x.shape)


def given(length_x=0.5, length_y=0.3, **options):
    chosen = {"reg": 1e-3, "conformal": True} | options
    return JointDistribution(
        kernel_x=kernels.Gaussian(length_x), kernel_y=kernels.Gaussian(length_y), **chosen
    )


# The definition, one row and one atom at a time


def score_by_hand(atoms, masses, y, scale):
    """The least level of a central interval with y in it, or 1 and the distance to the atoms."""
    here = masses > 1e-9
    below, above = masses[atoms <= y].sum(), masses[atoms >= y].sum()
    if y > atoms[here].max():
        return 1.0 + (y - atoms[here].max()) / scale
    if y < atoms[here].min():
        return 1.0 + (atoms[here].min() - y) / scale
    return max(1.0 - 2.0 * min(below, above), 0.0)


def quantile_by_hand(scores, level):
    """The ceil((n + 1) L)-th smallest score, of the next level that is stored."""
    n = len(scores)
    stored = [each for each in GRID if each < n / (n + 1) - 1e-12] + [n / (n + 1)]
    later = [each for each in stored if each >= level - 1e-12]
    return np.sort(scores)[math.ceil((n + 1) * later[0] - 1e-9) - 1] if later else np.inf


def held_out_scores(fit, x, y):
    """Scores of all rows, each by a law that is refitted without its fold; every row is a cell."""
    model, n = fit.model_, len(x)
    folds = Folding().folds(np.arange(n), {}, fit.n_folds)
    cells, scale = model.y.cells, y.std()
    scores = np.empty(n)
    for fold in range(fit.n_folds):
        rest = folds != fold
        left, right = (v.basis.newton(part) for v, part in ((model.x, x), (model.y, y)))
        (lx, bx), (ly, by) = (centred(part[rest]) for part in (left, right))
        cross = by.T @ (right[rest].T @ left[rest] / rest.sum()) @ bx
        core = cross / np.outer(ly + fit.reg, lx + fit.reg)
        at_cells = model.y.basis.newton(cells.support.points) @ by
        ratio = 1.0 + left[~rest] @ bx @ core.T @ at_cells.T
        masses = np.bincount(cells.support.assign(y[rest]), minlength=cells.size) / rest.sum()
        laws = project(ratio, masses)[0]
        for i, law in zip(np.flatnonzero(~rest), laws, strict=True):
            scores[i] = score_by_hand(cells.means[:, 0], law, y[i, 0], scale)
    return scores


def centred(features):
    """Eigenvalues of E[N N^T] on the complement of E N, and the directions."""
    mean = features.mean(axis=0)
    complement = np.linalg.svd(mean[None])[2][1:].T
    lam, directions = np.linalg.eigh(complement.T @ (features.T @ features) @ complement)
    return lam / len(features), complement @ directions


def test_scores_and_intervals_are_those_of_the_definition():
    x, y = draw(40)
    fit = given(2.0, 1.5, n_folds=5).fit(x, y)
    scores = held_out_scores(fit, x, y)
    found = fit.model_.conformal
    for level in LEVELS[:-2]:
        expected = quantile_by_hand(scores, level)
        assert found.threshold(level, "y0") == pytest.approx(expected, abs=1e-6)
    assert found.levels[-1] == pytest.approx(40 / 41)
    # The interval holds exactly the values whose own score is at most that of the level.
    new = np.linspace(-2, 2, 7)[:, None]
    law = fit.conditional(new)
    values = np.linspace(-4, 4, 801)
    for level in (0.3, 0.8, 0.95):
        lower, upper = law.interval(level, conformal=True)
        limit = found.threshold(level, "y0")
        for i, masses in enumerate(law.weights()):
            own = [
                score_by_hand(fit.model_.y.cells.means[:, 0], masses, v, y.std()) for v in values
            ]
            inside = (lower[i] <= values) & (values <= upper[i])
            assert_array_equal(inside, np.array(own) <= limit)


def test_scores_of_rows_that_are_atoms_leave_them_out():
    """With ten rows in each cell, a row finds its own value among the atoms, and does not count."""
    x, y = draw(300)
    coarse = given(support_size=30).fit(x, y).model_.conformal
    fine = given().fit(x, y).model_.conformal
    for level in (0.5, 0.8, 0.9):
        coarse_score, fine_score = (each.threshold(level, "y0") for each in (coarse, fine))
        assert coarse_score == pytest.approx(fine_score, abs=0.05)
    # The largest value lies beyond all others, as a new largest one would.
    assert coarse.scores["y0"][-1] > 1.0


def test_tails_and_scores_beyond_atoms():
    atoms = np.array([[0.0, 1.0, 2.0, 9.0]]).repeat(5, axis=0)
    weights = np.array([[0.2, 0.5, 0.3, 0.0]]).repeat(5, axis=0)
    y = np.array([-1.0, 0.0, 1.0, 1.5, 4.0])
    tails = atom_tails(atoms, weights, y)
    assert_allclose(tails.below, [0.0, 0.2, 0.7, 0.7, 1.0])
    assert_allclose(tails.above, [1.0, 1.0, 0.8, 0.3, 0.0])
    assert_allclose(conformity(tails, y, 2.0), [1.5, 0.6, 0.0, 0.4, 2.0])
    # A mixture has the nearest atom of both, but of one whose share is 0.
    other = Tails(*(np.array([v]) for v in (1.0, 0.0, 3.0, np.inf)))
    assert conformity(tails.at([4]).mixed(np.array([0.5]), other), y[4:], 1.0) == [2.0]
    assert conformity(tails.at([4]).mixed(np.array([0.0]), other), y[4:], 1.0) == [2.0]


def test_quantiles_of_scores_count_the_new_row():
    scores = np.arange(1.0, 20.0)[:, None]
    table = ConformalScores.learn(scores, np.ones(19), ["a"], [1.0])
    assert table.threshold(0.5, "a") == pytest.approx(10)
    assert table.threshold(0.9, "a") == pytest.approx(18)
    assert table.threshold(0.95, "a") == pytest.approx(19)
    assert table.threshold(0.96, "a") == np.inf
    # Between stored levels the next higher one; each of them is a quantile of its own.
    assert table.threshold(0.9001, "a") == table.threshold(0.905, "a")
    # Weights: the new row has the largest one; rows of no weight say nothing.
    heavy = ConformalScores.learn(scores, np.r_[np.ones(18), 2.0], ["a"], [1.0])
    assert heavy.levels[-1] == pytest.approx(20 / 22)
    assert heavy.threshold(0.8, "a") == pytest.approx(18)
    assert heavy.threshold(0.85, "a") == pytest.approx(19)
    again = ConformalScores.from_dict(json.loads(json.dumps(heavy.to_dict())), ["a"], {})
    assert_array_equal(again.scores["a"], heavy.scores["a"])


# Intervals of fits: given, learned and located


@pytest.fixture(scope="module")
def wide():
    """A fit of 400 rows of two columns, one of which is a whole number."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(400, 2))
    y = np.column_stack([x[:, 0] + 0.3 * rng.normal(size=400), rng.poisson(2, size=400)])
    return x, y, given(1.0, 1.0).fit(x, y)


def test_intervals_are_nested_in_the_level(wide):
    x, _, fit = wide
    law = fit.conditional(x[:50])
    before = None
    for level in np.linspace(0.0, 1.0, 41):
        lower, upper = law.interval(level, conformal=True)
        assert lower.shape == upper.shape == (50, 2)
        assert (lower <= upper).all()
        if before is not None:
            assert (lower <= before[0]).all()
            assert (upper >= before[1]).all()
        before = lower, upper
    assert np.isinf(before[0]).all()  # no row tells where all values are
    one = law.interval(0.8, column="y1", conformal=True)
    assert_array_equal(one, np.stack(law.interval(0.8, conformal=True))[:, :, 1])


def test_answers_carry_the_labels_of_the_points(wide):
    import pandas as pd

    x, _, fit = wide
    points = pd.DataFrame(x[:5], columns=["x0", "x1"], index=list("abcde"))
    lower, _ = fit.conditional(points).interval(0.8, conformal=True)
    assert list(lower.index) == list("abcde")
    assert list(lower.columns) == ["y0", "y1"]
    one, _ = fit.conditional(points).interval(0.8, "y1", conformal=True)
    assert one.name == "y1"


def test_the_fit_says_what_it_computed_and_changes_nothing_else(wide):
    x, y, fit = wide
    about = fit.model_.about["conformal"]
    assert about["rows"] == 400
    assert about["folds"] == fit.n_folds
    assert about["guarantee"] == FOLDS
    assert set(about["scores"]) == {"y0", "y1"}
    assert len(about["levels"]) <= len(GRID) + 1
    plain = given(1.0, 1.0, conformal=False).fit(x, y)
    assert "conformal" not in plain.model_.about
    assert fit.n_passes_ == plain.n_passes_ == 1
    for ask in (lambda f: f.conditional(x[:9]).interval(0.9), lambda f: f.expect(None, x[:9])):
        assert_array_equal(np.stack(ask(fit)), np.stack(ask(plain)))


@pytest.mark.parametrize("located", [False, True])
def test_learned_and_located_fits_cover(located, brief_search):
    x, y = draw(900)
    options = {"scheduler": "synchronous"}
    fit = JointDistribution(residual=located, random_state=1).fit(x, y, **options)
    without = JointDistribution(residual=located, conformal=False, random_state=1)
    without.fit(x, y, **options)
    assert fit.n_passes_ == without.n_passes_ == 1 + located
    assert (fit.model_.residual is not None) == located
    x_new, y_new = draw(3000, seed=1)
    law = fit.conditional(x_new)
    for level in (0.5, 0.8, 0.95):
        lower, upper = law.interval(level, conformal=True)
        covered = ((lower <= y_new[:, 0]) & (y_new[:, 0] <= upper)).mean()
        # Of 900 scores the quantile itself has a standard error.
        assert abs(covered - level) < 3 * math.sqrt(level * (1 - level) * (1 / 900 + 1 / 3000))


def test_located_scores_far_from_the_data_are_those_of_the_blended_law(brief_search):
    """A law that both components make: its scores are those of the law that queries ask."""
    x, y = draw(300)
    x[::10] += 30.0 * np.arange(1, 31)[:, None]  # far from each other, and from all else
    fit = JointDistribution(kernel_x=kernels.Gaussian(0.3), residual=True, conformal=True)
    fit.fit(x, y, scheduler="synchronous")
    table = fit.model_.conformal
    assert fit.model_.about["conformal"]["rows"] == 300
    assert np.isfinite(table.scores["y0"]).all()
    lower, upper = fit.conditional([[1e6]]).interval(0.9, conformal=True)
    assert lower < upper


# The same wherever it is made


@pytest.fixture(scope="module")
def located(tmp_path_factory):
    x, y = draw(300)
    kernel = kernels.Gaussian(0.5)
    options = {"kernel_x": kernel, "kernel_y": kernel, "residual": True, "conformal": True}
    fit = JointDistribution(**options).fit(x, y)
    path = tmp_path_factory.mktemp("models") / "model"
    fit.model_.save(path)
    return x, y, options, fit, path


def test_saved_copied_and_lazy_laws_answer_the_same(located):
    import dask.array as da

    x, _, _, fit, path = located
    expected = np.stack(fit.conditional(x[:40]).interval(0.9, conformal=True))
    for model in (load(path), copy.deepcopy(fit.model_)):
        assert_array_equal(
            np.stack(model.conditional(x[:40]).interval(0.9, conformal=True)), expected
        )
    lazy = fit.conditional(da.from_array(x[:40], chunks=(7, 1)))
    found = [each.compute() for each in lazy.interval(0.9, conformal=True)]
    assert_allclose(np.stack(found), expected, rtol=1e-12)
    with pytest.raises(DataError, match="levels must be"):
        lazy.interval(1.5, conformal=True)


def test_chunks_and_schedulers_change_no_score(located):
    import dask.array as da

    x, y, options, fit, _ = located
    for rows, scheduler in ((37, "threads"), (300, "synchronous")):
        parts = [da.from_array(part, chunks=(rows, 1)) for part in (x, y)]
        again = JointDistribution(**options).fit(*parts, scheduler=scheduler, workers=2)
        assert again.model_.about["conformal"] == fit.model_.about["conformal"]


def test_a_damaged_table_is_reported(located, tmp_path):
    *_, fit, _ = located
    for change in (
        {"levels": [0.5, 0.4]},
        {"scores": {}},
        {"scores": {"y0": [1.0]}},
        {"scales": {"y0": 0.0}},
        {"levels": "none"},
    ):
        state = fit.model_.to_state()
        about = json.loads(json.dumps(state.description["about"]))
        about["conformal"] |= change
        state.description["about"] = about
        with pytest.raises(StoreError, match="scores of its fit"):
            type(fit.model_).from_state(state)


# Weights


def test_weights_are_those_of_the_scores():
    x, y = draw(200)
    weights = np.random.default_rng(3).uniform(0.0, 2.0, 200)
    weights[:20] = 0.0
    fit = given().fit(x, y, weights=weights)
    assert fit.model_.about["conformal"]["rows"] == 180
    largest = weights.max() / weights.sum()
    assert fit.model_.conformal.levels[-1] == pytest.approx(1.0 / (1.0 + largest))
    equal = given().fit(x, y, weights=np.full(200, 3.0)).model_.conformal
    plain = given().fit(x, y).model_.conformal
    assert_allclose(equal.scores["y0"], plain.scores["y0"], rtol=1e-6)


# Scores of rows that the fit has not seen


def test_rows_that_the_fit_has_not_seen_give_scores_to_any_model():
    x, y = draw(300)
    new_x, new_y = draw(500, seed=1)
    fit = given(conformal=False, n_folds=1).fit(x, y)
    model = fit.model_.conformalized(new_x, new_y)
    assert model.about["conformal"]["guarantee"] == SPLIT
    lower, upper = model.conditional(new_x).interval(0.9, conformal=True)
    inside = ((lower <= new_y[:, 0]) & (new_y[:, 0] <= upper)).sum()
    assert inside == math.ceil(501 * 0.9)  # the share of these very rows, by definition
    assert "conformal" not in fit.model_.about
    # The score of a value is the least level at which it is inside.
    law = model.law()
    at = law.at(new_x[:50])
    scores = conformity(law_tails(law, at, new_y[:50, 0], 0), new_y[:50, 0], 1.0)
    ends = np.clip(np.stack([1 - scores, 1 + scores]) / 2, 0, 1)
    for i in np.flatnonzero(scores < 1):
        inner = law.quantile(law.at(new_x[[i]]), ends[:, i] + [-1e-9, 1e-9], [0])[0, :, 0]
        assert inner[0] <= new_y[i, 0] <= inner[1]
    weighted = fit.model_.conformalized(new_x, new_y, np.r_[np.zeros(499), 1.0])
    assert weighted.about["conformal"]["rows"] == 1
    for weights, match in (([1.0], "as many rows"), (np.full(500, -1.0), "non-negative")):
        with pytest.raises(DataError, match=match):
            conformalized(fit.model_, new_x, new_y, weights)
    with pytest.raises(DataError, match="as many rows"):
        fit.model_.conformalized(new_x, new_y[:-1])


# Errors


def test_models_without_scores_say_what_to_do(wide):
    x, y, fit = wide
    for options in ({"n_folds": 1}, {}):
        plain = given(1.0, 1.0, conformal="auto", **options).fit(x, y)
        with pytest.raises(DataError, match=r"conformal=True.*model\.conformalized"):
            plain.conditional(x[:3]).interval(0.9, conformal=True)
    with pytest.raises(DataError, match="conformal=True needs n_folds"):
        given(1.0, 1.0, n_folds=1).fit(x, y)
    with pytest.raises(DataError, match="conformal=True needs constraint"):
        given(1.0, 1.0, constraint="coupling").fit(x, y)
    with pytest.raises(DataError, match="conformal must be"):
        given(conformal="yes").fit(x, y)
    with pytest.raises(DataError, match="one level"):
        fit.conditional(x[:3]).interval(np.array([0.5, 0.9]), conformal=True)
    with pytest.raises(DataError, match="y given x"):
        fit.conditional(Y=y[:3]).interval(0.9, conformal=True)


def test_models_of_an_older_format_load_and_have_no_scores(wide, tmp_path):
    x, _, fit = wide
    state = fit.model_.to_state()
    state.description["about"] = {
        key: value for key, value in state.description["about"].items() if key != "conformal"
    }
    model = type(fit.model_).from_state(state)
    assert_array_equal(model.conditional(x[:3]).interval(), fit.conditional(x[:3]).interval())
    with pytest.raises(DataError, match="no conformity scores"):
        model.conditional(x[:3]).interval(0.9, conformal=True)


def test_grown_and_merged_models_have_no_scores():
    x, y = draw(200)
    fit = given(residual=False).fit(x[:100], y[:100])
    rest = given(residual=False).partial_fit(x[100:], y[100:], like=fit.model_)
    assert "conformal" not in rest.model_.about
    assert merge([fit.model_, rest.model_]).conformal is None
    fit.partial_fit(x[100:], y[100:])
    assert fit.model_.conformal is None


def test_labels_have_no_scores():
    x, y = draw(120)
    labels = np.where(y[:, 0] > 0, "high", "low")
    model = JointClassifier(kernel_x=kernels.Gaussian(1.0)).fit(x, labels).model_
    assert model.conformal is None
    with pytest.raises(DataError, match="high"):
        model.conformalized(x, labels)


def test_folds_by_group_are_those_of_the_scores():
    x, y = draw(240)
    group = np.arange(240) // 24
    fit = given().fit(open_sample(x, y, group=group).fold_by("group"))
    assert fit.model_.about["conformal"]["fold_by"] == "group"
    assert fit.model_.about["conformal"]["rows"] == 240


# Coverage

CASES = {
    "good": (0.5, 0.3, 1e-3),
    "interpolates": (0.01, 0.3, 1e-6),
    "knows nothing of y": (0.5, 50.0, 1e-6),
    "knows nothing of x": (100.0, 0.5, 1e-4),
    "absurd": (0.02, 0.02, 1e-6),
}


def coverages(case, fits, levels, split=False, n=60, seed=0):
    """Share of simulated fits whose interval at one new x covers y, by level."""
    length_x, length_y, reg = CASES[case]
    covered = np.zeros(len(levels))
    for number in range(fits):
        x, y = draw(n + 1, seed=(seed, number))
        fit = given(length_x, length_y, reg=reg, conformal=not split)
        rows = slice(n // 2 if split else n)
        model = fit.fit(x[rows], y[rows], scheduler="synchronous").model_
        if split:
            model = model.conformalized(x[n // 2 : n], y[n // 2 : n])
        law = model.conditional(x[n:])
        for k, level in enumerate(levels):
            lower, upper = law.interval(level, conformal=True)
            covered[k] += lower[0] <= y[n, 0] <= upper[0]
    return covered / fits


@pytest.mark.parametrize(
    ("case", "split"), [("good", False), ("interpolates", False), ("absurd", True)]
)
def test_intervals_cover(case, split):
    """50 fits each: within three standard errors; the slow study has the figures."""
    levels = (0.8, 0.9)
    for level, covered in zip(levels, coverages(case, 50, levels, split, seed=1), strict=True):
        assert covered >= level - 3 * math.sqrt(level * (1 - level) / 50)


STUDY = [(case, False) for case in CASES if case != "absurd"] + [("absurd", True)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "split"), STUDY)
def test_intervals_cover_in_a_thousand_fits(case, split):
    levels = (0.8, 0.9, 0.95)
    found = coverages(case, 1000, levels, split)
    print(case, "unseen rows" if split else "folds", dict(zip(levels, found, strict=True)))
    for level, covered in zip(levels, found, strict=True):
        assert covered >= level - math.sqrt(level * (1 - level) / 1000)


@pytest.mark.slow
def test_scores_of_folds_miss_the_level_where_more_rows_make_laws_worse():
    """The known limit of scores of folds: laws of 54 rows are better than those of all 60.

    With kernels this short in x and in y, laws have their mass at single neighbours. The coverage
    of 1,000 fits was 0.766, 0.866 and 0.930, below the bound of a standard error that
    other kernels and unseen rows keep; this only guards against a larger loss.
    """
    levels = (0.8, 0.9, 0.95)
    found = coverages("absurd", 1000, levels)
    for level, covered in zip(levels, found, strict=True):
        assert covered >= level - 0.05


# Within the labels of a column of x

SPREAD = {"calm": 0.1, "rough": 1.0}


def stations(n, seed=0):
    """Rows whose spread depends on a label."""
    rng = np.random.default_rng(seed)
    x = pd.DataFrame({"time": rng.uniform(-2, 2, n), "station": rng.choice([*SPREAD], n)})
    y = np.sin(2 * x[["time"]].to_numpy()) + (
        x["station"].map(SPREAD).to_numpy() * rng.normal(size=n)
    ).reshape(-1, 1)
    return x, y


def blind(**options):
    """A fit whose kernel does not see the labels."""
    kernel_x = kernels.Columns(kernels.Gaussian(0.5), [0])
    return JointDistribution(
        kernel_x=kernel_x, kernel_y=kernels.Gaussian(0.3), reg=1e-3, residual=False, **options
    )


def covered_by_label(model, x, y):
    lower, upper = model.conditional(x).interval(0.9, conformal=True)
    inside = (lower <= y[:, 0]) & (y[:, 0] <= upper)
    return {label: inside[x["station"] == label].mean() for label in SPREAD}


def test_scores_within_labels_are_those_of_their_rows_alone():
    x, y = stations(600)
    fit = blind(conformal_by="station").fit(x, y)
    every = blind(conformal=True).fit(x, y).model_.conformal
    scores = fit.model_.conformal
    assert_array_equal(scores.scores["y0"], every.scores["y0"])  # of all rows: as without labels
    assert (scores.by, set(scores.groups)) == ("station", set(SPREAD))
    new_x, new_y = stations(500, seed=1)
    split = fit.model_.conformalized(new_x, new_y, by="station")
    for label in SPREAD:
        rows = (new_x["station"] == label).to_numpy()
        alone = fit.model_.conformalized(new_x[rows], new_y[rows])
        of_label = split.conformal.of_label(label)
        assert_array_equal(of_label.levels, alone.conformal.levels)
        assert_allclose(of_label.scores["y0"], alone.conformal.scores["y0"])
        mixed = split.conditional(new_x).interval(0.8, conformal=True)
        expected = alone.conditional(new_x[rows]).interval(0.8, conformal=True)
        assert_allclose(np.stack(mixed)[:, rows], np.stack(expected))


def test_rows_of_each_label_are_covered():
    x, y = stations(1500)
    new = stations(3000, seed=2)
    together = covered_by_label(blind(conformal=True).fit(x, y).model_, *new)
    assert together["calm"] > 0.95
    assert together["rough"] < 0.87
    model = blind(conformal_by="station").fit(x, y).model_
    for share in covered_by_label(model, *new).values():
        assert abs(share - 0.9) < 0.03
    assert covered_by_label(load_again(model), *new) == covered_by_label(model, *new)


def load_again(model):
    return type(model).from_state(copy.deepcopy(model.to_state()))


def test_labels_of_few_rows_tell_few_levels():
    x, y = stations(300)
    fit = blind(conformal=True).fit(x, y)
    rough = (x["station"] == "rough").to_numpy()
    few = np.r_[np.flatnonzero(rough)[:3], np.flatnonzero(~rough)]
    model = fit.model_.conformalized(x.iloc[few], y[few], by="station")
    at = pd.DataFrame({"time": [0.0, 0.0], "station": ["rough", "calm"]})
    for level, told in ((0.75, [True, True]), (0.8, [False, True])):
        lower, upper = model.conditional(at).interval(level, conformal=True)
        assert_array_equal(np.isfinite(lower) & np.isfinite(upper), told)
    calm = fit.model_.conformalized(x[~rough], y[~rough], by="station")  # and no row of the other
    lower, upper = calm.conditional(at).interval(0.1, conformal=True)
    assert_array_equal(np.isfinite([lower, upper]), [[False, True]] * 2)
    assert calm.conditional(at[:0]).interval(0.1, conformal=True)[0].shape == (0,)


def test_labels_that_the_fit_has_not_seen_have_no_scores():
    x, y = stations(300)
    fit = JointDistribution(
        tuning=Tuning(rows=300, max_rank=20, evaluations=0, trees=()),
        residual=False,
        conformal_by="station",
    ).fit(x, y)
    at = pd.DataFrame({"time": [0.0, 0.0], "station": ["calm", "elsewhere"]})
    with pytest.warns(UnseenCategoryWarning):
        law = fit.conditional(at)
    ends = law.interval(0.8, conformal=True)
    assert_array_equal(np.isfinite(ends), [[True, False]] * 2)


def test_labels_of_no_weight_have_no_scores():
    x, y = stations(300)
    weights = (x["station"] == "calm").to_numpy().astype(float)
    model = blind(conformal_by="station").fit(x, y, weights=weights).model_
    assert set(model.conformal.groups) == {"calm"}


def test_scores_within_labels_are_the_same_out_of_core(tmp_path):
    x, y = stations(400)
    model = blind(conformal_by="station").fit(x, y).model_
    coded = model.x.columns
    codes = x["station"].map({label: k for k, label in enumerate(coded.categories["station"])})
    rows = np.column_stack([x["time"], codes])
    lazy = model.conditional(da.from_array(rows, chunks=(70, 2))).interval(0.9, conformal=True)
    ends = model.conditional(x).interval(0.9, conformal=True)
    assert_allclose(np.stack([each.compute() for each in lazy]), np.stack(ends))
    lower, _ = model.conditional(x).interval(0.9, "y0", conformal=True)
    assert_array_equal(lower, ends[0])


def test_labels_that_cannot_be_are_refused():
    x, y = stations(120)
    fit = blind(conformal=True).fit(x, y)
    for by in ("time", "nothing", "y0"):
        with pytest.raises(DataError, match=rf"column of x that holds labels \('station'\).*{by}"):
            blind(conformal_by=by).fit(x, y)
        with pytest.raises(DataError, match="holds labels"):
            fit.model_.conformalized(x, y, by=by)
    with pytest.raises(DataError, match="conformal_by= needs conformity scores"):
        blind(conformal_by="station", conformal=False).fit(x, y)
    with pytest.raises(DataError, match="conformal_by= needs n_folds"):
        blind(conformal_by="station", n_folds=1).fit(x, y)


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.update(by="time"),
        lambda table: table["groups"].update(unknown=table["groups"]["calm"]),
        lambda table: table["groups"]["calm"]["levels"].reverse(),
        lambda table: table["groups"]["calm"].update(by="station"),
        lambda table: table.update(groups=[]),
        lambda table: table.pop("groups"),
    ],
)
def test_damaged_scores_of_labels_are_reported(damage):
    x, y = stations(120)
    state = copy.deepcopy(blind(conformal_by="station").fit(x, y).model_.to_state())
    damage(state.description["about"]["conformal"])
    with pytest.raises(StoreError):
        JointModel.from_state(state)


def test_the_command_scores_within_labels(tmp_path):
    x, y = stations(200)
    x.assign(y=y[:, 0]).to_csv(tmp_path / "rows.csv", index=False)
    command = partial(CliRunner().invoke, cli, catch_exceptions=False)
    store, made = str(tmp_path / "s.zarr"), str(tmp_path / "m.zarr")
    columns = ("--x", "time,station", "--y", "y", "--categorical", "station")
    told = command(["ingest", str(tmp_path / "rows.csv"), "--out", store, *columns])
    assert told.exit_code == 0, told.output
    told = command(["fit", store, "--out", made, "--kernel", "median", "--conformal-by", "station"])
    assert told.exit_code == 0, told.output
    assert set(load(made).conformal.groups) == set(SPREAD)
    told = command(["fit", store, "--out", made + "2", "--kernel", "median", "--conformal-by", "t"])
    assert told.exit_code == 2
    assert "column of x that holds labels" in told.output
