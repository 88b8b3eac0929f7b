"""Cross-validation from moments against refits from rows, fold by fold and ridge by ridge."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.linalg import LinAlgError

from cme_dask.kernels import Gaussian, Linear, Matern
from cme_dask.learning import losses
from cme_dask.learning.losses import (
    ScreenedRows,
    ScreenedSide,
    pivots_of_few,
    screened_folds,
    screened_gradient,
    screened_losses,
    screened_means,
)
from cme_dask.numerics import crossval
from cme_dask.numerics.basis import NewtonBasis, eigenbasis
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.crossval import HeldFold, factored_folds, held_folds, over_folds
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.scoring import make_thresholds

REGS = [Regularization(y, x) for y, x in ((1e-6, 1e-6), (1e-3, 1e-2), (1.0, 0.1))]


def rows_of(n, seed, weighted):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 2))
    y = np.column_stack([np.sin(2 * x[:, 0]), x[:, 1]]) + 0.3 * rng.standard_normal((n, 2))
    weights = rng.uniform(0.1, 2.0, n) if weighted else np.ones(n)
    return x, y, weights, rng.integers(0, 4, n)


def sides_of(x, y, weights):
    kernels = Gaussian((0.8, 1.1)), Matern(1.0, nu=2.5)
    events = make_thresholds(y, weights / weights.sum(), (False, False))
    sides = []
    for kernel, part, names in zip(kernels, (x, y), ("ab", "cd"), strict=True):
        found = pivoted_cholesky(kernel, part, 1e-4, 40)
        basis = NewtonBasis(kernel, part[found.pivots], found.factor)
        sides.append(FeatureBlock(basis, tuple(names)))
    x_side, y_side = sides
    functions = {"up": lambda rows: rows[:, 0] > 0.2}
    y_side = FeatureBlock(
        y_side.basis, y_side.columns, functions, np.full(3 + len(events), 0.4), None, events
    )
    return (x_side, y_side), events


def cross_validate(folds, regs=REGS):
    """Mean losses over the folds, by weight: joint, of functions, and of their means."""
    parts = zip(*(fold.losses(regs) for fold in folds), strict=True)
    weights = np.array([fold.held.weight for fold in folds])
    return [over_folds(weights, np.stack(part))[0] for part in parts]


def refit(sides, x, y, weights, out, reg):
    """Losses on the rows ``out`` of a dense refit on all others, normalized, same pivots."""
    rest, held = weights * ~out, weights * out
    rest, held = rest / rest.sum(), held / held.sum()
    spaces = []
    for side, part, r in zip(sides, (x, y), (reg.x, reg.y), strict=True):
        newton = side.basis(part)
        frame = np.linalg.svd((rest @ newton)[None, :])[2][1:].T
        inner = newton @ frame
        lam, vectors = np.linalg.eigh(inner.T @ (rest[:, None] * inner))
        spaces.append((inner @ vectors, lam + r))
    (psi_x, d_x), (psi_y, d_y) = spaces
    coef = (psi_y.T @ (rest[:, None] * psi_x)) / np.outer(d_y, d_x)
    h = psi_y @ coef @ psi_x.T  # at all pairs (y_j, x_i)
    joint = held @ ((h * h) @ held) - 2 * (held @ np.diag(h) - held @ (h @ held))
    values = np.hstack([*sides[1].values(y)])
    answers = rest @ values + psi_x @ (coef.T @ (psi_y.T @ (rest[:, None] * values)))
    return joint, held @ (values - answers) ** 2


@pytest.mark.parametrize("weighted", [False, True])
def test_moments_give_what_refits_give(weighted):
    x, y, weights, folds = rows_of(300, 0, weighted)
    sides, _ = sides_of(x, y, weights)
    moments = strip_moments(MomentReduction(sides, 4), (x, y), weights if weighted else None, folds)
    each = list(held_folds(moments))
    assert len(each) == 4
    joint, squared = np.zeros((4, len(REGS))), []
    for number, fold in enumerate(each):
        found = fold.losses(REGS)
        wanted = [refit(sides, x, y, weights, folds == number, reg) for reg in REGS]
        np.testing.assert_allclose(found.joint, [w[0] for w in wanted], rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(found.squared, [w[1] for w in wanted], rtol=1e-8, atol=1e-8)
        joint[number] = found.joint
        squared.append(found.squared)
    share = np.bincount(folds, weights) / weights.sum()
    mean_joint, mean_squared, _ = cross_validate(each)
    np.testing.assert_allclose(mean_joint, share @ joint)
    np.testing.assert_allclose(mean_squared, np.tensordot(share, squared, 1))


@pytest.mark.parametrize("small", [0, 256])
@pytest.mark.parametrize("weighted", [False, True])
def test_cholesky_factors_give_what_eigenbases_give(weighted, small, monkeypatch):
    monkeypatch.setattr(crossval, "_SMALL", small)
    x, y, weights, folds = rows_of(300, 0, weighted)
    sides, _ = sides_of(x, y, weights)
    moments = strip_moments(MomentReduction(sides, 4), (x, y), weights if weighted else None, folds)
    each = zip(held_folds(moments), factored_folds(moments), strict=True)
    for of_bases, of_factors in each:
        wanted, found = of_bases.losses(REGS), of_factors.losses(REGS)
        np.testing.assert_allclose(found.joint, wanted.joint, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(found.squared, wanted.squared, rtol=1e-7, atol=1e-8)
        np.testing.assert_array_equal(found.baseline, wanted.baseline)
        for reg in REGS:
            h, k = (fold.solution(reg).newton_coef for fold in (of_bases, of_factors))
            np.testing.assert_allclose(k, h, rtol=1e-6, atol=1e-6 * np.abs(h).max())


@pytest.mark.parametrize("regs", [REGS, [*REGS, *REGS], [REGS[0]._replace(form="single")]])
@pytest.mark.parametrize("at_once", [1, 1 << 15])
def test_screening_gives_the_same_losses(at_once, regs, monkeypatch):
    """Few ridges by factors, many by eigenbases, and some folds at once, as caches hold them."""
    monkeypatch.setattr(crossval, "_AT_ONCE", at_once)
    x, y, weights, folds = rows_of(250, 2, True)
    weights /= weights.sum()
    sides, events = sides_of(x, y, weights)
    rows = ScreenedRows(weights, folds, events(y))
    screened = [
        ScreenedSide(rows, side.basis.kernel, part[rows.order], 1e-4, 40)
        for side, part in zip(sides, (x, y), strict=True)
    ]
    reached = screened_losses(rows, *screened, regs)
    joint, squared, baseline = (over_folds(rows.shares, part)[0] for part in reached)
    bases = []
    for side, part in zip(sides, (x, y), strict=True):
        kept = part[rows.order]
        pivots, factor = pivots_of_few(side.basis.kernel, kept, 1e-4, 40, rows.weights)
        bases.append(NewtonBasis(side.basis.kernel, kept[pivots], factor))
    pair = (FeatureBlock(bases[0], ("a", "b")), FeatureBlock(bases[1], ("c", "d"), events=events))
    moments = strip_moments(MomentReduction(pair, 4), (x, y), weights, folds)
    expected = cross_validate(list(held_folds(moments)), regs)
    q = len(events)
    np.testing.assert_allclose(joint, expected[0], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(squared, expected[1][:, -q:], rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(baseline, expected[2][-q:], rtol=1e-10)


def test_screening_takes_folds_without_which_the_mean_is_zero():
    rng = np.random.default_rng(5)
    half = rng.integers(1, 9, 30).astype(float)
    # Without the first fold values cancel to the bit, and no function of mean zero is lost.
    x = np.concatenate([[1.0, 2.0, 3.0], np.column_stack([half, -half]).ravel()])[:, None]
    folds = np.concatenate([[0, 0, 0], np.repeat(np.arange(30) % 3 + 1, 2)])
    y = x**2 + x + rng.standard_normal(x.shape)
    weights = np.full(len(x), 1 / 64)
    events = make_thresholds(y, weights, (False,))
    rows = ScreenedRows(weights, folds, events(y))
    screened = [
        ScreenedSide(rows, kernel, part[rows.order], 1e-9, 20)
        for kernel, part in ((Linear(), x), (Gaussian(3.0), y))
    ]
    few = screened_losses(rows, *screened, REGS)
    many = screened_losses(rows, *screened, [*REGS, *REGS])
    for i, (rest, held) in enumerate(screened_means(rows, *screened)):
        bases = [eigenbasis(rest.blocks[v, v], rest.means[v]) for v in "xy"]
        assert bases[0][0].shape[1] == (1 if i == 0 else 0)
        expected = HeldFold(rest, held, bases).losses(REGS)
        for found, wanted in zip(few, expected, strict=True):
            np.testing.assert_allclose(found[i], wanted, rtol=1e-7, atol=1e-9)
        expected = HeldFold(rest, held, bases).losses([*REGS, *REGS])
        for found, wanted in zip(many, expected, strict=True):
            np.testing.assert_allclose(found[i], wanted, rtol=1e-9, atol=1e-12)


def test_a_ridge_below_rounding_is_left_to_eigenbases(monkeypatch):
    """Where a matrix has no Cholesky factor as computed."""
    x, y, weights, folds = rows_of(200, 3, False)
    rows = ScreenedRows(weights / weights.sum(), folds, y > 0.0)
    sides = [
        ScreenedSide(rows, Gaussian(scale), part[rows.order], 1e-12, 60)
        for scale, part in ((2.0, x), (1.5, y))
    ]

    def fail(*_):
        raise LinAlgError

    wanted = screened_losses(rows, *sides, REGS)
    monkeypatch.setattr(crossval, "Smoother", fail)
    for found, expected in zip(screened_losses(rows, *sides, REGS), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("reg", [1e-14, 1e-10])
def test_tiny_ridges_of_singular_matrices_are_left_to_eigenbases(reg):
    """More pivots than other rows: what is 1 / reg there cancels to rounding alone."""
    x, y, weights, folds = rows_of(30, 3, False)
    rows = ScreenedRows(weights / weights.sum(), folds, y > 0.0)
    sides = [
        ScreenedSide(rows, Gaussian(0.5), part[rows.order], 1e-12, 30, per_pivot=1)
        for part in (x, y)
    ]
    regs = [Regularization(reg, reg)]
    wanted = screened_folds(rows, *sides).in_eigenbases(*(side.bases for side in sides))
    for found, expected in zip(
        screened_losses(rows, *sides, regs), wanted.losses(regs), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("per_pivot", [1, 2])
@pytest.mark.parametrize("small", [0, 256])
def test_gradients_of_scores_equal_finite_differences(small, per_pivot, monkeypatch):
    """In every length scale of x and of y, with pivots that stay."""
    monkeypatch.setattr(crossval, "_SMALL", small)
    x, y, weights, folds = rows_of(120, 5, True)
    events = make_thresholds(y, weights / weights.sum(), (False, False))
    rows = ScreenedRows(weights / weights.sum(), folds, events(y))
    parts, reg = (x[rows.order], y[rows.order]), Regularization(1e-3, 3e-3)
    first = np.array([0.8, 1.1, 0.6, 0.9])

    def sides(scales):
        each = Matern(tuple(scales[:2]), nu=2.5), Gaussian(tuple(scales[2:]))
        return tuple(
            ScreenedSide(rows, kernel, part, 1e-4, 30, per_pivot)
            for kernel, part in zip(each, parts, strict=True)
        )

    found = [
        pivots_of_few(side._kernel, part, 1e-4, 30, rows.weights, per_pivot)[0]
        for side, part in zip(sides(first), parts, strict=True)
    ]

    def same_pivots(kernel, values, *_):
        pivots = found[0] if values is parts[0] else found[1]
        return pivots, np.linalg.cholesky(np.asarray(kernel(values[pivots], values[pivots])))

    monkeypatch.setattr(losses, "pivots_of_few", same_pivots)
    of_joint, of_events = 0.7, 1.3 * events.scores

    def score(scales):
        reached = screened_losses(rows, *sides(scales), [reg])
        gained = reached.squared[:, 0] - reached.baseline
        share = rows.shares / rows.shares.sum()
        return share @ (of_joint * reached.joint[:, 0] + gained @ of_events)

    factors, step = (of_joint, of_events), 1e-5
    slopes = screened_gradient(rows, sides(first), reg, factors, (True, True))
    expected = [(score(first + e) - score(first - e)) / (2 * step) for e in step * np.eye(4)]
    np.testing.assert_allclose(np.concatenate(slopes), expected, rtol=1e-6, atol=1e-8)
    none, of_y = screened_gradient(rows, sides(first), reg, factors, (False, True))
    assert none == []
    np.testing.assert_array_equal(of_y, slopes[1])


def test_thresholds_of_a_scalar_add_up_to_its_crps():
    rng = np.random.default_rng(3)
    y = np.sort(rng.standard_normal((4000, 1)), axis=0)
    events = make_thresholds(y, np.full(4000, 1 / 4000), (False,))
    assert np.isneginf(events.low).all()
    # The forecast N(0, 1) for its own draws: CRPS over deviations is 1 / sqrt(pi).
    from scipy.stats import norm

    probabilities = norm.cdf(events.high / events.directions[0, 0])
    score = ((events(y) - probabilities) ** 2).mean(axis=0) @ events.scores
    wanted, _ = quad(lambda t: norm.cdf(t) * (1 - norm.cdf(t)), -2.05, 2.05)
    assert score == pytest.approx(wanted, rel=0.03)


def test_levels_of_a_category_are_its_events():
    codes = np.array([0, 1, 1, 2, 2, 2.0])[:, None]
    events = make_thresholds(codes, np.full(6, 1 / 6), (True,))
    np.testing.assert_array_equal(events(codes), np.eye(3)[codes[:, 0].astype(int)])


def test_directions_of_several_columns_are_axes_sums_and_differences():
    rng = np.random.default_rng(4)
    y = rng.standard_normal((500, 2)) * (3.0, 0.01)
    events = make_thresholds(y, np.full(500, 1 / 500), (False, False))
    np.testing.assert_allclose((y @ events.directions[:2].T).std(axis=0), 1.0)
    wanted = np.array([[1, 1], [1, -1]]) / np.sqrt(2) / y.std(axis=0)
    np.testing.assert_allclose(events.directions[2:], wanted)
    assert len(events) <= 48


PLANE = np.random.default_rng(5).standard_normal((400, 2)) * (3.0, 0.01)
SHARE = np.random.default_rng(6).random(400)
TENTHS = np.round(100 * SHARE) / 10
WHOLE = np.random.default_rng(7).integers(0, 4, (400, 2))


@pytest.mark.parametrize(
    ("y", "some"),
    [
        (PLANE, True),
        (PLANE + 1e9, True),
        (WHOLE * (1, 7) + 1e12, True),
        (np.column_stack([SHARE, 1 - SHARE]), True),
        (np.column_stack([TENTHS, 10 - TENTHS]), True),
        (np.column_stack([TENTHS, TENTHS]), True),
        (np.column_stack([TENTHS, 32 + 1.8 * TENTHS]), True),
        (np.ones((400, 2)), False),
    ],
)
def test_rounding_of_sums_does_not_decide_events(y, some):
    """Row by row they are what they are at once, and next to the rows, too."""
    events = make_thresholds(y, np.full(400, 1 / 400), (False, False))
    sums = np.count_nonzero(events.directions, axis=1)[events.which] > 1
    assert some == sums.any()
    assert not sums.all()
    found = events(y)[:, sums]
    for i in range(400):
        np.testing.assert_array_equal(events(y[i : i + 1])[0, sums], found[i])
    for towards in (-np.inf, np.inf):
        np.testing.assert_array_equal(events(np.nextafter(y, towards))[:, sums], found)
