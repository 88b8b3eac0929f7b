"""Laws are calibrated: too wide ones become narrower by what held-out rows say, others stay."""

import itertools
import json
from dataclasses import fields, replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import legendre

from cme_dask import JointDistribution, Tuning, kernels, load, merge
from cme_dask.errors import DataError, StoreError
from cme_dask.numerics import calibration
from cme_dask.numerics.calibration import Calibration, HeldRows, Levels, learn_calibration

ALL_HELD_ROWS = True


def calibrated_by_hand(weights, means, exponents, support):
    """The formula of the docstring, one cell after the other."""
    a, b, *factors = exponents
    polynomials = [legendre(degree) for degree in range(2, 2 + len(factors))]
    found = np.zeros_like(weights)
    for i, w in enumerate(weights):
        for s in range(len(w)):
            factor = 1.0
            for j in range(means.shape[1]):
                level = w[means[:, j] < means[s, j]].sum()
                level += 0.5 * w[means[:, j] == means[s, j]].sum()
                level = min(max(level, 1e-3), 1 - 1e-3)
                factor *= (level ** a[j] * (1 - level) ** b[j]) ** support[i]
                for polynomial, c in zip(polynomials, factors, strict=True):
                    factor *= np.exp(support[i] * c[j] * polynomial(2 * level - 1))
            found[i, s] = w[s] * factor
    return found / found.sum(axis=1, keepdims=True)


def test_calibrated_weights_are_those_of_the_formula(monkeypatch):
    monkeypatch.setattr(calibration, "_AT_ONCE", 64 * 9)  # in several blocks
    rng = np.random.default_rng(0)
    means = np.column_stack([rng.normal(size=9), rng.integers(0, 3, size=9)]).astype(float)
    laws = rng.dirichlet(np.ones(9), size=600) * (rng.random((600, 9)) < 0.8)
    laws /= laws.sum(axis=1, keepdims=True)
    support = rng.random(600)
    every = np.array([[0.7, -0.2], [0.1, 0.4], [-0.5, 0.3], [0.2, 0.1], [0.6, -0.4]])
    for exponents in (every[:2], every):
        found = Calibration(exponents).weights(laws, Levels(means, [0, 1]), support)
        assert_allclose(found, calibrated_by_hand(laws, means, exponents, support), atol=1e-14)
        here = laws.copy()
        Calibration(exponents).weights(here, Levels(means, [0, 1]), support, out=here)
        assert_array_equal(here, found)
        still = Calibration(exponents).weights(laws, Levels(means, [0, 1]), np.zeros(600))
        assert_allclose(still, laws, atol=1e-15)
        none = Calibration(np.zeros_like(exponents)).weights(laws, Levels(means, []), support)
        assert_allclose(none, laws, atol=1e-15)
        again = Calibration.from_list(Calibration(exponents).to_list(), 2)
        assert_array_equal(again.exponents, exponents)
    with pytest.raises(ValueError, match="needs 2 x 2 or 5 x 2 finite exponents"):
        Calibration.from_list(every[:3].tolist(), 2)


def test_cells_far_above_those_of_a_law_have_no_mass_whatever_the_exponents():
    means = np.arange(6.0)[:, None]
    laws = np.zeros((3, 6))
    laws[[0, 1], [0, 3]] = 1.0
    laws[2, 1:3] = 0.5
    for large in (500.0, 5e4):
        found = Calibration(np.array([[large], [-large]])).weights(
            laws, Levels(means, [0]), np.ones(3)
        )
        assert_array_equal(found[:2], laws[:2])
        assert_allclose(found[2], [0, 0, 1, 0, 0, 0], atol=1e-15)


@pytest.mark.parametrize("noise", [np.random.Generator.normal, np.random.Generator.laplace])
def test_features_that_are_made_once_and_at_each_step_give_the_same_bits(noise, monkeypatch):
    folds, means = held_rows(3, noise=noise)
    found = []
    for retained in (1 << 30, 0):
        monkeypatch.setattr(calibration, "_RETAINED", retained)
        learned = learn_calibration(folds, means, [0])
        found.append((learned.calibration.to_list(), learned.gain, learned.std))
    assert found[0] == found[1]


def held_rows(seed, folds=5, rows=400, width=1.5, cells=181, noise=np.random.Generator.normal):
    """Laws N(m, width) on cells where the truth is N(m, 1), or that of another noise."""
    rng = np.random.default_rng(seed)
    points = np.linspace(-9, 9, cells)
    found = []
    for _ in range(folds):
        centre = rng.normal(size=rows)
        laws = np.exp(-0.5 * ((points - centre[:, None]) / width) ** 2)
        laws /= laws.sum(axis=1, keepdims=True)
        at = np.abs(points - (centre + noise(rng, size=rows))[:, None]).argmin(axis=1)
        units = rng.integers(0, 1 << 40, size=rows).astype(np.uint64)
        found.append(HeldRows(laws, at, np.ones(rows), np.ones(rows), units))
    return found, points[:, None]


def test_cells_of_one_column_are_merged_to_few_levels(monkeypatch):
    folds, means = held_rows(5, rows=150, cells=900)
    starts = np.array([0, 3, 4, 600])
    few = folds[0].merged(starts)
    bounds = [0, 3, 4, 600, 900]
    by_hand = [folds[0].laws[:, a:b].sum(axis=1) for a, b in itertools.pairwise(bounds)]
    assert_allclose(few.laws, np.transpose(by_hand), rtol=1e-12)
    assert_array_equal(few.cells, [sum(c >= a for a in bounds[1:4]) for c in folds[0].cells])
    merged = learn_calibration(folds, means, [0])
    monkeypatch.setattr(calibration, "_CELLS", 900)
    every = learn_calibration(folds, means, [0])
    # A tilt between two levels is nearly linear.
    assert_allclose(merged.calibration.exponents, every.calibration.exponents, rtol=0.03)
    assert merged.gain == pytest.approx(every.gain, rel=0.03)
    assert merged.gain != every.gain
    # Cells in another order than that of their values are no levels one after the other.
    monkeypatch.undo()
    order = np.random.default_rng(0).permutation(900)
    place = np.argsort(order)
    mixed = [replace(f, laws=f.laws[:, order], cells=place[f.cells]) for f in folds]
    shuffled = learn_calibration(mixed, means[order], [0])
    assert_allclose(shuffled.calibration.exponents, every.calibration.exponents, rtol=1e-8)


def test_a_learned_law_has_a_cell_for_two_rows_at_most():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(260, 1))
    y = x + rng.normal(size=x.shape)
    tuning = Tuning(rows=200, max_rank=20, evaluations=0, trees=())
    learned = JointDistribution(tuning=tuning, residual=False, n_folds=3).fit(x, y).model_
    given = {"kernel_x": "median", "kernel_y": "median", "tol": 1e-2}
    assert [len(side.cells.masses) for side in (learned.x, learned.y)] == [130, 130]
    few = JointDistribution(**given).fit(x, y).model_
    assert [len(side.cells.masses) for side in (few.x, few.y)] == [260, 260]


def test_the_exponents_make_the_levels_of_held_out_rows_uniform():
    folds, means = held_rows(0)
    learned = learn_calibration(folds, means, [0])
    assert learned.pays
    assert (learned.calibration.exponents > 0.5).all()
    fresh, _ = held_rows(1)
    levels = Levels(means, [0])
    for apply, spread in ((False, (0.7, 0.85)), (True, (0.95, 1.05))):
        seen = []
        for fold in fresh:
            laws = fold.laws
            if apply:
                laws = learned.calibration.weights(laws, levels, fold.support)
            below = np.cumsum(laws, axis=1) - laws / 2
            seen.append(below[np.arange(len(laws)), fold.cells])
        assert spread[0] < np.concatenate(seen).std() * np.sqrt(12) < spread[1]


def test_the_exponents_are_the_maximum_and_the_gain_is_that_of_refits():
    folds, means = held_rows(2, folds=4, rows=60, cells=46)
    learned = learn_calibration(folds, means, [0])
    theta = learned.calibration.exponents.ravel()

    def gains(parts, theta):
        values = []
        for fold in parts:
            new = calibrated_by_hand(fold.laws, means, theta.reshape(2, 1), fold.support)
            at = np.arange(len(new)), fold.cells
            values.append(np.log(new[at] / fold.laws[at]))
        return np.concatenate(values)

    def objective(theta):
        return gains(folds, theta).mean() - theta @ theta / (2 * 240)

    best = objective(theta)
    for step in ([0.05, 0], [-0.05, 0], [0, 0.05], [0, -0.05], [0.05, -0.05]):
        assert objective(theta + step) < best
    apart = []
    for i, fold in enumerate(folds):
        rest = learn_calibration(folds[:i] + folds[i + 1 :], means, [0])
        apart.append(gains([fold], rest.calibration.exponents.ravel()))
    assert learned.gain == pytest.approx(np.concatenate(apart).mean(), abs=0.01)


def test_calibrated_laws_stay_what_they_are():
    """No gain is taken from luck."""
    folds, means = held_rows(3, width=1.0)
    learned = learn_calibration(folds, means, [0])
    assert not learned.pays
    assert np.abs(learned.calibration.exponents).max() < 0.2


def peaked(rng, size):
    """Narrow in the middle, with a normal law's share of large values."""
    return rng.normal(size=size) * np.where(rng.random(size) < 0.3, 1.7, 0.5)


def covered(folds, means, level, calibration=None):
    """Share of the rows in the central intervals of the laws."""
    levels, inside = Levels(means, [0]), []
    for fold in folds:
        laws = fold.laws
        if calibration is not None:
            laws = calibration.weights(laws, levels, fold.support)
        below = (np.cumsum(laws, axis=1) - laws / 2)[np.arange(len(laws)), fold.cells]
        inside.append(abs(below - 0.5) < level / 2)
    return np.concatenate(inside).mean()


def test_polynomials_narrow_the_middle_and_leave_the_ends():
    """Exponents alone would narrow the ends as well, where there are as many rows as they say."""
    folds, means = held_rows(5, rows=600, width=1.0, noise=peaked)
    fresh, _ = held_rows(6, folds=40, rows=600, width=1.0, noise=peaked)
    learned = learn_calibration(folds, means, [0])
    assert learned.pays
    assert learned.calibration.exponents.shape == (5, 1)
    simple = learn_calibration([replace(f, **first(f, 90)) for f in folds], means, [0])
    assert simple.calibration.exponents.shape == (2, 1)  # of few rows
    for level, wide in ((0.5, 0.1), (0.8, 0.04)):
        assert covered(fresh, means, level) > level + wide
        assert abs(covered(fresh, means, level, learned.calibration) - level) < 0.015


def first(fold, count):
    """The first rows of a fold."""
    return {field.name: getattr(fold, field.name)[:count] for field in fields(fold)}


def test_polynomials_are_the_maximum_and_need_a_gain():
    folds, means = held_rows(7, rows=600, width=1.0, noise=peaked)
    exponents = learn_calibration(folds, means, [0]).calibration.exponents

    def objective(theta):
        gains = []
        for fold in folds:
            new = Calibration(theta).weights(fold.laws, Levels(means, [0]), fold.support)
            at = np.arange(len(new)), fold.cells
            gains.append(np.log(new[at] / fold.laws[at]))
        return np.mean(gains) - (theta**2).sum() / (2 * 3000)

    best = objective(exponents)
    for k in range(5):
        for step in (0.03, -0.03):
            assert objective(exponents + step * np.eye(5)[:, [k]]) < best
    normal, means = held_rows(8, rows=600)
    assert learn_calibration(normal, means, [0]).calibration.exponents.shape == (2, 1)


@pytest.fixture(scope="module")
def wide():
    """A kernel of y that is far too long, so that laws are too wide; one column is a label."""
    rng = np.random.default_rng(4)
    x = rng.uniform(-2, 2, size=(6000, 1))
    y = np.sin(2 * x) + 0.3 * rng.normal(size=x.shape)
    options = {"kernel_x": kernels.Gaussian(0.7), "kernel_y": kernels.Gaussian(1.5), "reg": 1e-4}
    return x[:2000], y[:2000], x[2000:], y[2000:], options


def coverage(model, x, y):
    lower, upper = model.conditional(x).interval(0.9)
    return ((lower <= y[:, 0]) & (y[:, 0] <= upper)).mean()


@pytest.mark.slow
def test_intervals_of_a_model_of_little_resolution_cover_what_they_say(wide):
    x, y, x_new, y_new, options = wide
    plain = JointDistribution(**options).fit(x, y)
    model = JointDistribution(**options, calibration=True).fit(x, y)
    assert coverage(plain, x_new, y_new) > 0.93
    assert 0.88 < coverage(model, x_new, y_new) < 0.92
    better = (plain.conditional(x_new).crps(y_new) - model.conditional(x_new).crps(y_new)).mean()
    assert better > 0
    about = model.model_.about["calibration"]
    assert about["kept"]
    assert about["gain"] > about["std"] > 0
    # What is exact over all rows stays as it is.
    assert_array_equal(plain.expect("y0", x_new[:9]), model.expect("y0", x_new[:9]))


def test_one_model_one_law_after_saving_and_growing(wide, tmp_path):
    x, y, x_new, _, options = wide
    model = JointDistribution(**options, calibration=True).fit(x[:1000], y[:1000])
    law = model.conditional(x_new[:50])
    weights = law.weights()
    assert_allclose(model.weights(x_new[:50]), weights, atol=1e-15)
    assert_allclose(law.mean(), weights @ model.model_.y.cells.means[:, 0], atol=1e-12)
    model.save(tmp_path / "m")
    again = load(tmp_path / "m")
    assert_array_equal(again.conditional(x_new[:50]).weights(), weights)
    assert "calibrated" in repr(again)
    exponents = model.model_.calibration.exponents
    model.partial_fit(x[1000:], y[1000:])
    assert_array_equal(model.model_.calibration.exponents, exponents)
    other = JointDistribution(**options).partial_fit(x[1000:], y[1000:], like=again, first_row=1000)
    both = merge([again, other.model_])
    assert_array_equal(both.calibration.exponents, exponents)
    plain = JointDistribution(**options, pivots=(again.x.basis.newton.points,) * 2)
    assert plain.fit(x[1000:], y[1000:]).model_.calibration is None


def test_far_from_the_data_a_calibrated_law_is_the_marginal_one(wide):
    x, y, _, _, options = wide
    model = JointDistribution(**options, calibration=True).fit(x, y)
    law = model.conditional([[1e3]])
    assert law.effective_support()[0] < 1e-12
    assert_allclose(law.weights()[0], model.model_.masses, atol=1e-12)


def test_a_default_fit_says_what_calibration_gained():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(300, 1))
    y = x + rng.normal(size=x.shape)
    model = JointDistribution().fit(x, y)
    about = model.model_.about["calibration"]
    assert about["kept"] == (about["gain"] > about["std"])
    assert about["rows"] == 300
    assert model.model_.calibration is None or about["kept"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"calibration": "maybe"}, "calibration must be one of auto, True, False"),
        ({"calibration": True, "n_folds": 1}, "n_folds of at least 2, got 1"),
        ({"calibration": True, "support_size": 0}, "support_size=0"),
        ({"calibration": True, "constraint": "coupling"}, "got 'coupling'"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(options, says):
    x = np.random.default_rng(6).normal(size=(60, 1))
    with pytest.raises(DataError, match=says):
        JointDistribution(kernel_x="median", kernel_y="median", **options).fit(x, x)


def test_a_damaged_calibration_is_refused(wide, tmp_path):
    x, y, _, _, options = wide
    JointDistribution(**options, calibration=True).fit(x[:300], y[:300]).save(tmp_path / "m")
    path = next(p for p in (tmp_path / "m").rglob("zarr.json") if "exponents" in p.read_text())
    about = json.loads(path.read_text())

    def damage(node):
        for key, value in node.items():
            if key == "exponents":
                node[key] = [[1.0], ["a"]]
            elif isinstance(value, dict):
                damage(value)

    damage(about)
    path.write_text(json.dumps(about))
    with pytest.raises(StoreError):
        load(tmp_path / "m")
