"""The kernel of a mean function: gradients of held-out errors, and what they learn."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask import JointDistribution, Tuning, kernels, load
from cme_dask.estimators import joint_fit
from cme_dask.learning import regression
from cme_dask.learning.regression import held_out_error, learn_mean
from cme_dask.learning.transforms import learn_transform

ALL_HELD_ROWS = True

QUICK = Tuning(rows=400, max_rank=30, evaluations=0, trees=())


def refits(gram, reg, targets, weights, folds):
    """Residuals of a dense fit to the rows of the other folds, for each fold."""
    result = np.empty_like(targets)
    for fold in folds:
        rest = np.ones(len(gram), dtype=bool)
        rest[fold] = False
        regularised = gram[np.ix_(rest, rest)] + np.diag(reg / weights[rest])
        result[fold] = targets[fold] - gram[fold][:, rest] @ np.linalg.solve(
            regularised, targets[rest]
        )
    return result


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    reg=st.floats(1e-4, 10.0),
    edges=st.lists(st.integers(1, 29), min_size=1, max_size=5, unique=True),
    q=st.integers(1, 3),
)
def test_held_out_errors_are_those_of_refits(seed, reg, edges, q):
    rng = np.random.default_rng(seed)
    x, targets = rng.normal(size=(30, 2)), rng.normal(size=(30, q))
    weights = rng.uniform(0.1, 1.0, 30)
    weights /= weights.sum()
    cuts = [0, *sorted(edges), 30]
    folds = [slice(*cuts[i : i + 2]) for i in range(len(cuts) - 1)]
    gram = kernels.Gaussian(1.0)(x, x)
    found = held_out_error(gram, reg, targets, weights, folds)
    expected = refits(gram, reg, targets, weights, folds)
    np.testing.assert_allclose(found.residuals, expected, rtol=0, atol=1e-9)
    assert found.error == pytest.approx(weights @ (expected**2).sum(axis=1), rel=1e-10)


def test_gradients_equal_finite_differences():
    rng = np.random.default_rng(1)
    n, reg, step = 40, 1e-2, 1e-6
    x, targets, weights = rng.normal(size=(n, 3)), rng.normal(size=(n, 2)), rng.random(n) + 0.1
    weights /= weights.sum()
    folds = [slice(0, 11), slice(11, 30), slice(30, n)]
    gram = kernels.Matern(1.0, 1.5)(x, x)
    found = held_out_error(gram, reg, targets, weights, folds)
    change = rng.normal(size=(n, n))
    change += change.T

    def slope(in_gram, in_reg):
        ends = [
            held_out_error(
                gram + sign * step * in_gram, reg + sign * step * in_reg, targets, weights, folds
            ).error
            for sign in (1.0, -1.0)
        ]
        return (ends[0] - ends[1]) / (2.0 * step)

    in_gram = found.left @ found.right.T
    assert slope(change, 0.0) == pytest.approx(float((in_gram * change).sum()), rel=1e-6)
    assert slope(0.0 * change, reg) == pytest.approx(found.in_reg * reg, rel=1e-6)
    np.testing.assert_allclose(in_gram, in_gram.T, rtol=0, atol=1e-14)


@pytest.mark.parametrize("n", [40, regression._BLOCK + 3, 2 * regression._BLOCK])
def test_gradients_come_from_the_lower_triangle(n):
    """Blocks of rows, of which the last ones may be short, give that of the whole Gram matrix."""
    rng = np.random.default_rng(n)
    x, targets, weights = rng.normal(size=(n, 2)), rng.normal(size=(n, 1)), np.full(n, 1.0 / n)
    kernel, folds = kernels.Gaussian((0.7, 1.3)), [slice(0, n // 3), slice(n // 3, n)]
    found = held_out_error(kernel(x, x), 1e-2, targets, weights, folds)
    whole = kernel.weighted_gradient(x, x, found.left @ found.right.T)
    np.testing.assert_allclose(found.in_length_scales(kernel, x), whole, rtol=1e-9)


def learned(x, y, **options):
    n = len(x)
    given = {"weights": np.full(n, 1.0 / n), "categorical": (False,) * x.shape[1]}
    given |= {"folds": np.arange(n) % 5} | options
    return learn_mean(x, y, **given)


@pytest.mark.parametrize("cores", [2, 5])
def test_any_number_of_threads_learns_the_same_bits(cores):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3 * regression._BLOCK + 7, 3))
    y = np.sin(2 * x[:, :1]) + 0.1 * rng.normal(size=(len(x), 1))
    one, several = learned(x, y), learned(x, y, cores=cores)
    assert one.kernel == several.kernel
    assert [one.reg, one.error, one.law_error] == [several.reg, several.error, several.law_error]


def test_columns_that_say_nothing_are_ignored():
    """Three of eight columns, and an interaction that no single column shows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 8))
    y = np.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.3 * rng.normal(size=(600, 1))
    found = learned(x, y)
    each = [scale.in_units for scale in found.kernel.column_scales(8)]
    assert max(each[:3]) < min(each[3:])
    noise = 0.09 / y.var()
    assert noise < found.error < 2.0 * noise


def test_a_jump_takes_a_rough_kernel_and_a_wave_a_smooth_one():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, size=(500, 1))
    noise = 0.1 * rng.normal(size=(500, 1))
    rough, smooth = learned(x, np.sign(x - 0.3) + noise), learned(x, np.sin(3 * x) + noise)
    assert rough.kernel.base.nu == 0.5
    assert getattr(smooth.kernel.base, "nu", 9.0) >= 2.5


def test_labels_of_x_are_learned():
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.normal(size=400), rng.integers(0, 3, 400)])
    y = (x[:, :1] * (x[:, 1:] - 1)) + 0.1 * rng.normal(size=(400, 1))
    found = learned(x, y, categorical=(False, True))
    assert found.error < 0.1
    alone = learned(x[:, 1:], x[:, 1:] % 2 + 0.1 * rng.normal(size=(400, 1)), categorical=(True,))
    assert alone.error < 0.1


def test_weights_count_as_rows():
    """Rows of weight 0 as if they were not there; others as often as they weigh, nearly."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    y = np.sin(2 * x[:, :1]) + 0.1 * rng.normal(size=(300, 1))
    folds, weights = np.arange(300) % 5, np.where(np.arange(300) < 200, 1.0, 0.0)
    without = learned(x[:200], y[:200])
    some = learned(x, np.where(weights[:, None] > 0, y, 1e9), weights=weights / 200, folds=folds)
    assert some.kernel.base == without.kernel.base
    assert some.error == pytest.approx(without.error, rel=1e-9)


def test_coordinates_of_y_are_judged_in_units_of_y():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 1))
    y = np.exp(2 * np.sin(2 * x) + 0.5 * rng.normal(size=(500, 1)))
    scores = learn_transform(y, np.full(500, 1 / 500), (False,), "scores")
    plain, mapped = learned(x, y), learned(x, y, transforms=(scores,))
    assert mapped.absolute_error < plain.absolute_error
    best = learned(x, y, transforms=(None, scores))
    assert best.transform is scores
    # It begins at the kernel for y itself, and ends near that from the starts.
    assert best.absolute_error == pytest.approx(mapped.absolute_error, rel=0.02)
    assert learned(x, np.sin(2 * x), transforms=(None, scores)).transform is None


@pytest.mark.parametrize("far", [1.0, 1e12])
def test_kernels_that_are_equally_good_are_no_failure(far):
    """Both forms of coordinates of two values; y is a function of them, to rounding."""
    x = np.repeat([[0.0], [far]], 50, axis=0)[np.random.default_rng(0).permutation(100)]
    found = learned(x, x / far)
    assert found is None or found.error < 1e-6


def test_errors_that_can_not_be_computed_are_no_failure(monkeypatch):
    def fail(*_):
        raise np.linalg.LinAlgError("not positive definite")

    monkeypatch.setattr(regression, "held_out_error", fail)
    x = np.random.default_rng(0).normal(size=(60, 1))
    assert learned(x, np.sin(x)) is None


@pytest.mark.parametrize("what", ["one fold", "constant y", "constant x"])
def test_nothing_to_learn_is_none(what):
    rng = np.random.default_rng(0)
    x, y, folds = rng.normal(size=(60, 1)), rng.normal(size=(60, 1)), np.arange(60) % 5
    if what == "one fold":
        folds = np.zeros(60, dtype=int)
    elif what == "constant y":
        y = np.ones((60, 1))
    else:
        x = np.ones((60, 1))
    assert learned(x, y, folds=folds) is None


def test_a_fit_takes_the_kernel_for_its_location(tmp_path):
    """One that joint distributions do not have; it is saved, and tells where it comes from."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, size=(500, 1))
    y = np.sign(x) + 0.1 * rng.normal(size=(500, 1))
    model = JointDistribution(tuning=QUICK, residual=True, random_state=0).fit(x, y)
    kernel = model.model_.residual.location.kernel
    assert kernel.base.nu == 0.5
    told = model.model_.about["residual"]
    assert told["search"]["error"] < 0.05
    assert told["search"].keys() == {
        "reg",
        "error",
        "absolute_error",
        "law_error",
        "evaluations",
        "seconds",
    }
    assert told["skill"][0] > 0.95
    assert model.n_passes_ == 2
    model.save(tmp_path / "m")
    again = load(tmp_path / "m")
    points = np.linspace(-2, 2, 9)[:, None]
    np.testing.assert_array_equal(
        again.conditional(points).quantile([0.1, 0.9]),
        model.conditional(points).quantile([0.1, 0.9]),
    )


@pytest.mark.parametrize(("columns", "scores"), [(1, "scores of y"), (2, None)])
def test_several_columns_are_located_as_they_are(columns, scores):
    """Normal scores, which one column of few values may have, would change their differences."""
    y = np.arange(40.0 * columns).reshape(40, columns) % 2
    kernels_of_y = SimpleNamespace(maps={"scores": "scores of y"})
    context = SimpleNamespace(
        search=SimpleNamespace(kernels=(None, kernels_of_y)), rows=SimpleNamespace(parts=(y, y))
    )
    assert joint_fit._normal_scores(context) == scores


def test_given_kernels_of_x_serve_the_location():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 1))
    y = x + 0.1 * rng.normal(size=(300, 1))
    kernel = kernels.Gaussian(1.0)
    model = JointDistribution(kernel_x=kernel, tuning=QUICK, residual=True).fit(x, y)
    assert model.model_.residual.location.kernel == kernel
    assert model.model_.about["residual"]["search"] is None


def test_the_basis_holds_what_the_ridge_keeps():
    """Far fewer functions interpolate wildly at the edge of the data."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 4))
    y = 2.0 * np.sin(1.5 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.3 * rng.normal(size=(600, 1))
    quick = Tuning(rows=400, max_rank=30, evaluations=0, trees=())
    fit = JointDistribution(residual=True, tuning=quick).fit(x, y, scheduler="synchronous")
    location, found = fit.model_.residual.location, fit.model_.about["residual"]["search"]
    kernel, points = location.kernel, location.points
    sections = kernel(points, x)
    explained = (sections * np.linalg.solve(kernel(points, points), sections)).sum()
    assert 1.0 - explained / kernel.diagonal(x).sum() < max(found["reg"], 1e-9)
    assert len(points) < len(x) / 3
