"""Values of y: recognised, said by users, and reached by moved laws; slow oracles beside them."""

import warnings

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from cme_dask import JointDistribution, kernels, load, merge
from cme_dask.cli import cli
from cme_dask.errors import DataError, StoreError
from cme_dask.estimators import residual as residual_module
from cme_dask.metrics import crps
from cme_dask.models.joint import JointModel
from cme_dask.numerics.cells import ValueRange
from cme_dask.numerics.values import (
    ColumnValues,
    MovedAtoms,
    ValueMap,
    matched_reaches,
    nearest_reaches,
    ranges_without,
    recognised_values,
)

MEDIAN = {
    "kernel_x": "median",
    "kernel_y": "median",
    "tol": 1e-2,
    "residual": True,
    "n_folds": 4,
}


def draw(kind, n=320, seed=0):
    """Rows of one column of x, and of y on values of this kind."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 1))
    y = x + 0.4 * rng.normal(size=(n, 1))
    values = {
        "normal": y,
        "rain": np.maximum(y, 0.0),
        "stars": np.clip(np.round(2 * y + 6) / 2, 1, 5),
        "counts": rng.poisson(np.exp(y)).astype(float),
        "share": rng.beta(1.2 * np.exp(x / 2), 1.2 * np.exp(-x / 2)),
    }
    return x, values[kind]


def fitted(kind, **changes):
    return JointDistribution(**MEDIAN | changes).fit(*draw(kind), scheduler="synchronous")


# What rows tell ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "kind", "values"),
    [
        (lambda r: r.normal(size=2000), "continuous", []),
        (lambda r: r.integers(3, 9, 2000) * 1.0, "discrete", [3, 4, 5, 6, 7, 8]),
        (lambda r: r.integers(0, 4, 2000) / 2, "discrete", [0, 0.5, 1, 1.5]),
        (lambda r: r.normal(size=20_000).round(1), "discrete", None),
        (lambda r: r.normal(size=300).round(2), "continuous", []),
        (lambda r: np.maximum(r.normal(size=2000), 0.0), "semi-discrete", [0]),
        (lambda r: np.clip(r.normal(size=2000), -1.0, 1.0), "semi-discrete", [-1, 1]),
        (lambda r: np.where(r.random(2000) < 0.005, 7.0, r.normal(size=2000)), "continuous", []),
        (lambda r: r.integers(0, 10**6, 2000) * 1.0, "whole numbers", []),
        (lambda r: np.ones(5), "continuous", []),
    ],
)
def test_rows_tell_the_kind(column, kind, values):
    rows = column(np.random.default_rng(0))
    known = recognised_values(rows, np.ones(len(rows)))
    assert known.kind == kind
    assert_array_equal(known.values, np.unique(rows) if values is None else values)
    # Rows without weight count for nothing.
    both = np.append(rows, np.random.default_rng(1).normal(size=3 * len(rows)))
    again = recognised_values(both, np.repeat([1.0, 0.0], [len(rows), 3 * len(rows)]))
    assert again.kind == kind


# The map -----------------------------------------------------------------------------------------


def slow_map(values, low, high, whole, reaches):
    """One number after the other, one atom after the other."""
    result = np.empty_like(values)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            value = min(max(value, low[j]), high[j])
            value = np.floor(value + 0.5) if whole[j] else value
            for atom, lower, upper in zip(*reaches[j], strict=True):
                if lower <= value <= upper:
                    value = atom
                    break
            result[i, j] = value
    return result


reach = st.lists(st.integers(-20, 20), min_size=3, max_size=12, unique=True).map(sorted)


@settings(max_examples=60)
@given(reach, st.booleans(), st.integers(0, 2**32 - 1))
def test_the_map_ascends_and_keeps_what_y_takes(numbers, discrete, seed):
    numbers = np.array(numbers[: len(numbers) // 3 * 3]) / 2.0
    if discrete:
        reaches = nearest_reaches(numbers)
    else:
        lower, atoms, upper = numbers.reshape(-1, 3).T
        reaches = atoms, lower, upper
    nothing = (np.empty(0),) * 3
    low, high, whole = np.array([-9.0, -5.0]), np.array([np.inf, 4.0]), np.array([False, True])
    both = ValueMap.of(low, high, whole, [reaches, nothing])
    both._validate()
    rows = np.sort(np.random.default_rng(seed).uniform(-15, 15, size=(40, 2)), axis=0)
    rows[::4] = np.round(rows[::4])  # also on the borders
    rows = np.sort(rows, axis=0)
    found = both.possible(rows)
    assert_array_equal(found, slow_map(rows, low, high, whole, [reaches, nothing]))
    assert (np.diff(found, axis=0) >= 0.0).all()
    inside = reaches[0][reaches[0] >= low[0]]
    assert_array_equal(both.column(0).possible(inside[:, None])[:, 0], inside)
    if discrete:
        away = np.abs(np.maximum(rows[:, :1], -9.0) - numbers)
        assert_allclose(np.abs(found[:, 0] - np.maximum(rows[:, 0], -9.0)), away.min(axis=1))


@pytest.mark.parametrize("kind", ["stars", "rain"])
def test_matched_reaches_give_each_value_its_share_of_the_rows(kind):
    rng = np.random.default_rng(3)
    _, y = draw(kind, 1500)
    cells = JointDistribution(**MEDIAN | {"residual": False}).fit(*draw(kind, 1500)).model_.y.cells
    known = recognised_values(y[:, 0], np.ones(1500))
    # Moved laws are wider than y, and to the right of it.
    values = y[:, 0] + 0.1 + 0.3 * rng.normal(size=1500)
    masses = rng.uniform(size=1500)
    masses /= masses.sum()
    reaches = matched_reaches(known, MovedAtoms.of(values, masses), cells, 0)
    ends = np.array([-np.inf]), np.array([np.inf]), np.array([False])
    placed = ValueMap.of(*ends, [reaches]).possible(values[:, None])[:, 0]
    for value in known.values:
        gap = masses[placed == value].sum() - (y == value).mean()
        assert abs(gap) <= 2 * masses.max()
    if kind == "rain":
        assert (placed >= 0.0).all()
        beyond = values > reaches[2][0]
        assert_array_equal(placed[beyond], values[beyond])


def test_no_value_reaches_beyond_another_one():
    """Where the moved laws are far to the right, the last value gets what is left."""
    y = np.repeat([0.0, 1.0, 2.0], 100)[:, None]
    cells = JointDistribution(**MEDIAN | {"residual": False}).fit(draw("normal", 300)[0], y)
    moved = MovedAtoms.of(np.linspace(3.0, 4.0, 50), np.full(50, 0.02))
    known = ColumnValues("discrete", np.array([0.0, 1.0, 2.0]))
    values, lower, upper = matched_reaches(known, moved, cells.model_.y.cells, 0)
    ValueMap.of(*(np.array([v]) for v in (0.0, 2.0, False)), [(values, lower, upper)])._validate()
    assert (lower <= values).all()
    assert (upper[:-1] < values[1:]).all()


# Fits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "rain", "stars", "share"])
def test_held_out_rows_choose_as_slow_scores_say(kind, monkeypatch):
    """Scores of every row by loops, from the laws of refits that the fit sees."""
    seen = []
    choose = residual_module.choose_map

    def recording(*arguments):
        seen.append((*arguments, *choose(*arguments)))
        return seen[-1][-2:]

    monkeypatch.setattr(residual_module, "choose_map", recording)
    model = fitted(kind).model_
    context, (known,), cells, residuals, laws, values, described = seen[0]
    x, y = context.rows.parts
    folds = context.rows.folds(context.sample.folding, 4)

    def scores(change):
        result = np.empty(len(y))
        for law in laws:
            for i, w in zip(law.held, law.weights, strict=True):
                atoms = residuals.held_out(x[[i]], folds[[i]]) + law.atoms
                result[i] = crps(w[None], change(atoms, i), y[[i]])[0]
        return result

    def paired(before, after):
        difference = before - after
        return difference.mean(), difference.std(ddof=1) / np.sqrt(len(y))

    about = model.about["support"]["y0"]
    assert about == described["y0"]
    if known.kind == "continuous":
        for end, side in (("low", 0), ("high", 1)):
            one, extreme = (np.maximum, np.minimum)[side], (np.min, np.max)[side]
            ends = [extreme(np.delete(y, i)) for i in range(len(y))]
            gain, _ = paired(
                scores(lambda atoms, i: atoms),
                scores(lambda atoms, i, one=one, ends=ends: one(atoms, ends[i])),
            )
            beyond = 0.0
            for law in laws:
                for i, w in zip(law.held, law.weights, strict=True):
                    atoms = residuals.held_out(x[[i]], folds[[i]]) + law.atoms
                    beyond += w[one(atoms, extreme(y))[:, 0] != atoms[:, 0]].sum()
            bound = gain > 0.0 and beyond >= 7.0
            assert bound == (about["bounds"][side] is not None) == (kind == "share")
            expected = getattr(cells, end)[0] if bound else (-np.inf, np.inf)[side]
            assert getattr(values, end)[0] == expected
    else:
        nothing = (np.empty(0),) * 3
        first = nearest_reaches(known.values) if kind == "stars" else nothing
        mean = MovedAtoms.of(
            np.concatenate(
                [
                    (residuals.held_out(x[law.held], folds[law.held]) + law.atoms[:, 0]).ravel()
                    for law in laws
                ]
            ),
            np.concatenate([law.weights.ravel() for law in laws]),
        )
        free = np.array([-np.inf]), np.array([np.inf]), np.array([False])
        before, after = (
            ValueMap.of(*free, [each]) for each in (first, matched_reaches(known, mean, cells, 0))
        )
        gain, std = paired(*(scores(lambda a, i, m=m: m.possible(a)) for m in (before, after)))
        # An atom at the very end of a reach may be rounded to either side of it.
        assert_allclose([about["gain"], about["std"]], [gain, std], atol=5e-6)
        assert (about["reach"] == "matched") == (gain > std)
        chosen = after if gain > std else before
        assert_allclose(values.upper, chosen.upper, atol=1e-12)


def test_moved_laws_take_values_of_y(tmp_path):
    fit = fitted("stars", conformal=True)
    law = fit.conditional(np.linspace(-2, 2, 9)[:, None])
    values = np.arange(1, 5.5, 0.5)
    assert fit.n_passes_ == 2
    assert np.isin(law.quantile([0.0, 0.3, 0.5, 1.0]), values).all()
    assert np.isin(law.sample(50, random_state=0), values).all()
    masses = law.probability([f"y0 == {v}" for v in values])
    assert_allclose(masses.sum(axis=1), 1.0, atol=1e-12)
    assert_allclose(law.mean(), masses @ values, atol=1e-12)
    assert_allclose(law.cdf(values), np.cumsum(masses, axis=1), atol=1e-11)
    assert_allclose(law.crps(np.full(9, 3.0)), crps(masses, values, np.full(9, 3.0)), atol=1e-12)
    low, _ = law.interval(0.8, conformal=True)
    assert (low <= law.median()).all()
    assert "values     y0: 9 values from 1 to 5" in repr(fit.model_)
    fit.model_.save(tmp_path / "m")
    again = load(tmp_path / "m")
    assert_array_equal(again.conditional(law.points).quantile(0.3), law.quantile(0.3))
    assert again.about["support"] == fit.model_.about["support"]
    state = fit.model_.to_state()
    assert state.schema_version == 3
    state.arrays["residual_values_lower"][1] = 9.0
    with pytest.raises(StoreError, match="atoms of y do not ascend"):
        JointModel.from_state(state)


def test_rain_has_dry_days_and_whole_numbers_between_their_ends():
    law = fitted("rain").conditional([[-1.0], [1.5]])
    dry = law.probability("y0 == 0")
    assert dry[0] > 0.9
    assert dry[1] < 0.1
    assert (law.quantile(0.0) >= 0.0).all()
    counts = fitted("counts")
    listed = counts.model_.about["support"]["y0"]
    assert listed["kind"] == "discrete"
    assert listed["values"] == list(range(int(draw("counts")[1].max()) + 1))
    more = fitted("counts", support=(0, 30)).model_.about["support"]["y0"]
    assert more["values"] == list(range(31))


# What users say ----------------------------------------------------------------------------------


def test_what_is_said_is_kept():
    x, y = draw("normal", 300)
    free, tied = (
        fitted("rain", support=support).conditional([[-1.9]]).quantile(0.01)
        for support in ("continuous", (0, None))
    )
    assert free < 0.0 <= tied
    seen = fitted("normal", support="bounded").model_
    assert (seen.residual.values.low, seen.residual.values.high) == tuple(
        f(draw("normal")[1]) for f in (np.min, np.max)
    )
    both = JointDistribution(**MEDIAN | {"support": {"y1": [0, 1, 2]}})
    both.fit(x, np.hstack([y, np.arange(300)[:, None] % 3]))
    about = both.model_.about["support"]
    assert about["y0"]["kind"] == "continuous"
    assert not about["y0"]["given"]
    assert about["y1"]["values"] == [0, 1, 2]
    assert about["y1"]["given"]
    draws = both.conditional(x[:3]).sample(20, random_state=0)[..., 1]
    assert np.isin(draws, [0, 1, 2]).all()
    # It is checked and named where no location is tried, too.
    plain = JointDistribution(**MEDIAN | {"residual": False, "support": (-9, 9)}).fit(x, y)
    assert plain.model_.about["support"]["y0"]["bounds"] == [-9, 9]
    assert "y0: continuous from -9 to 9" in repr(plain.model_)
    more = JointDistribution(kernel_x="median", kernel_y="median", tol=1e-2)
    added = more.partial_fit(x + 0.1, y, like=plain.model_, first_row=300).model_
    assert "support" not in merge([plain.model_, added]).about  # known of some rows alone


def test_labels_beside_numbers_are_described_as_such():
    pandas = pytest.importorskip("pandas")
    x, y = draw("normal", 200)
    table = pandas.DataFrame({"y": y[:, 0], "kind": np.where(x[:, 0] > 0.0, "up", "down")})
    for support in ("auto", (-9, 9)):
        fit = JointDistribution(**MEDIAN | {"residual": False, "support": support}).fit(x, table)
        about = fit.model_.about["support"]
        assert (about["kind"]["kind"], about["kind"]["given"]) == ("labels", False)
        assert about["y"]["given"] == (support != "auto")
        assert "kind: labels" not in repr(fit.model_)


@pytest.mark.parametrize(("unit", "warns"), [(0.5, True), (1.0, False), (64.0, False)])
def test_values_that_no_sampled_row_holds_are_warned_of(unit, warns):
    x, y = draw("normal", 1000)
    y = unit * np.round(100 * y / unit)
    fit = JointDistribution(**MEDIAN | {"support": "discrete", "sample_size": 200, "tol": 0.1})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.plan(x, y)
    messages = [str(one.message) for one in caught if "no sampled row" in str(one.message)]
    assert len(messages) == warns
    assert all("values of 'y0'" in text for text in messages)
    assert all("by support='discrete' laws" in text for text in messages)


@pytest.mark.parametrize(
    ("sign", "one", "two"), [(1.0, (0.0, None), (0.0, 99.0)), (-1.0, (None, 0.0), (-99.0, 0.0))]
)
def test_densities_obey_a_bound_on_one_side(sign, one, two):
    x, y = draw("rain")
    gaussian = kernels.Gaussian(1.0)
    given = {"kernel_x": gaussian, "kernel_y": gaussian, "reg": 1e-3, "location": "x0"}
    laws = [
        JointDistribution(**given, support=support).fit(x, sign * y).conditional([[-1.8], [0.5]])
        for support in (one, two)
    ]
    t = sign * np.linspace(-3.0, 4.0, 701)
    densities = [law.pdf(t[:, None]) for law in laws]
    assert_allclose(*densities, rtol=1e-12)
    # Nearly all mass is at the end of the range, as the distribution function says.
    assert densities[0][0, t * sign < -0.5].sum() * 0.01 < 1e-3
    assert_allclose(*(law.density_ratio(t[:, None]) for law in laws), rtol=1e-12)


@pytest.mark.parametrize(
    ("support", "words"),
    [
        ("discreet", "support must be one of auto, continuous, discrete, bounded"),
        ((1, 0), "low < high"),
        ((None, None), "None for no bound on one side"),
        ((0.0, 1.0, 2.0), "a list or an array holds all values"),
        ([[1.0]], "an array of all values"),
        ([np.nan], "an array of all values"),
        ({"y9": "discrete"}, "y9"),
        ({"y0": "few"}, r"support\['y0'\] must be"),
        ((0, 1), "leaves out values of 'y0' that rows hold"),
        ([0, 1], r"leaves out values of 'y0' that rows hold, such as -?\d\.\d{6}"),
    ],
)
def test_unusable_supports_are_refused(support, words):
    with pytest.raises(DataError, match=words):
        fitted("normal", support=support)


def test_rows_outside_the_row_sample_are_checked_as_well():
    x, y = draw("share", 500)
    y[-1] = 1.5
    fit = JointDistribution(**MEDIAN | {"support": (0, 1), "sample_size": 100, "random_state": 1})
    with pytest.raises(DataError, match=r"such as 1\.5"):
        fit.fit(x, y)


def test_it_needs_laws_and_all_rows_at_once():
    x, y = draw("stars", 100)
    with pytest.raises(DataError, match="needs laws"):
        JointDistribution(support="discrete", support_size=0, tol=1e-2).fit(x, y)
    with pytest.raises(DataError, match="no location= or support="):
        JointDistribution(support="discrete").partial_fit(x, y)


def test_the_range_without_a_row():
    y = np.array([[3.0, 1.0], [1.0, 1.0], [2.0, 5.0]])
    values = ValueRange(y.min(axis=0), y.max(axis=0), np.zeros(2, dtype=bool))
    low, high = ranges_without(y, values)
    for i in range(3):
        rest = np.delete(y, i, axis=0)
        assert_array_equal(low[i], rest.min(axis=0))
        assert_array_equal(high[i], rest.max(axis=0))


def test_the_command_takes_it(tmp_path):
    x, y = draw("stars", 150)
    np.savetxt(tmp_path / "t.csv", np.hstack([x, y]), delimiter=",", header="x,stars", comments="")

    def run(*arguments):
        return CliRunner().invoke(cli, [str(a) for a in arguments])

    made = run("ingest", tmp_path / "t.csv", "--out", tmp_path / "s", "--x", "x", "--y", "stars")
    assert made.exit_code == 0, made.output
    fit = ["fit", tmp_path / "s", "--residual", "yes", "--kernel", "median", "--tol", "1e-2"]
    halves = ",".join(f"{v:g}" for v in np.arange(1, 5.5, 0.5))
    fit += ["--folds", "3"]
    for i, (text, kind) in enumerate(
        [(halves, "discrete"), ('{"stars": "1:5"}', "discrete")],
    ):
        found = run(*fit, "--support", text, "--out", tmp_path / f"m{i}")
        assert found.exit_code == 0, found.output
        about = load(tmp_path / f"m{i}").about["support"]["stars"]
        assert (about["kind"], about["given"]) == (kind, True)
    shown = run("info", tmp_path / "m0")
    assert "stars: 9 values from 1 to 5" in shown.output
    for text, words in (("0:a", "does not read"), ("few", "must be one of"), ("{", "no JSON")):
        wrong = run(*fit, "--support", text, "--out", tmp_path / "n")
        assert wrong.exit_code != 0
        assert words in wrong.output
        assert not (tmp_path / "n").exists()
