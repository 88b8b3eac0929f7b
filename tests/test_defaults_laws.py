"""Laws of default fits: far from the data, within what y can be, quantiles, densities, classes."""

import numpy as np
import oracle_law as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.integrate import trapezoid
from sklearn.metrics import log_loss

from cme_dask import JointClassifier, JointDistribution, Tuning, kernels, load, open_sample
from cme_dask.constraints import Coupling, Normalized, Pointwise
from cme_dask.kernels.transforms import Scores
from cme_dask.metrics import crps

QUICK = Tuning(rows=400, max_rank=50, evaluations=2)
FAR = np.array([[1e3], [-1e9]])


def default(x, y, **options):
    """A fit that learns kernels, averages two members, and tries a location."""
    model = JointDistribution(tuning=QUICK, random_state=0, **options).fit(x, y).model_
    assert model.residual is not None
    return model


@pytest.fixture(scope="module")
def located():
    """Rows of a line with noise, and the model: a location pays."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 1))
    y = 2.0 * x + 0.5 * rng.normal(size=x.shape)
    return x, y, default(x, y)


@pytest.fixture(scope="module")
def counts():
    """Counts from 0 to some tens, which get a location in normal scores or raw."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 1))
    y = rng.poisson(np.exp(1.5 + 0.9 * x)).astype(float)
    return x, y, default(x, y, residual=True)


@pytest.fixture(scope="module")
def between(located):
    """Points whose effective support is between 0 and 0.05, and laws there by hand."""
    _, _, model = located
    points = np.linspace(2.0, 9.0, 2000)[:, None]
    near = model.conditional(points).effective_support()
    at = points[(near > 1e-3) & (near < 0.045)]
    at = at[np.linspace(0, len(at) - 1, 7).astype(int)]
    t = model.conditional(at).effective_support() / 0.05
    share = (t * t * (3 - 2 * t))[:, None]
    residual, cells = model.residual, model.y.cells
    assert cells.whole.all()
    z = residual.location(at) + residual.scale * residual.model.y.cells.means[:, 0]
    moved = residual.undo(z.reshape(-1, 1)).reshape(z.shape)
    far = model.weights(at)[:, cells.cell_of_atom] * cells.shares
    masses = np.concatenate([share * residual.model.weights(at), (1 - share) * far], axis=1)
    atoms = np.concatenate([moved, np.broadcast_to(cells.atoms[:, 0], far.shape)], axis=1)
    assert ((share > 0.001) & (share < 0.999)).all()
    return model.conditional(at), masses, atoms


def test_far_from_the_data_a_law_with_a_location_is_the_marginal_law(located):
    _, y, model = located
    law = model.conditional(FAR)
    assert (law.effective_support() < 1e-12).all()
    assert_allclose(law.mean(), y.mean(), atol=1e-9)
    assert_allclose(law.std(), y.std(), rtol=1e-9)
    t = np.array([-1.0, 0.3, 2.0])
    assert_allclose(law.cdf(t), np.tile((y <= t).mean(axis=0), (2, 1)), atol=1e-9)
    levels = [0.05, 0.5, 0.95]
    expected = np.quantile(y, levels, method="inverted_cdf")
    assert_allclose(law.quantile(levels), np.tile(expected, (2, 1)), atol=1e-12)
    assert_allclose(law.density_ratio(y[:9]), 1.0, rtol=1e-6)
    assert_allclose(law.expect(lambda y: y[:, 0] ** 2), (y**2).mean(), rtol=1e-9)
    assert_allclose(law.sample(20_000).mean(axis=1), y.mean(), atol=5 * y.std() / np.sqrt(20_000))


def test_near_the_data_it_is_the_location_law_to_the_bit(located):
    x, _, model = located
    law, reference = model.conditional(x), model.residual
    size = reference.model.y.cells.size
    inside = law.effective_support() >= 0.05
    assert inside.mean() > 0.99
    assert_array_equal(law.weights()[inside][:, size:], 0.0)
    assert_array_equal(law.weights()[:, :size][inside], reference.model.weights(x)[inside])


def test_between_all_answers_are_of_one_mixture(between):
    law, masses, atoms = between
    each = list(zip(masses, atoms, strict=True))
    mean = (masses * atoms).sum(axis=1)
    assert_allclose(law.mean(), mean, atol=1e-9)
    assert_allclose(law.var(), (masses * (atoms - mean[:, None]) ** 2).sum(axis=1), rtol=1e-9)
    t = np.array([-2.0, 0.1, 1.7, 3.0])
    below = [[w[a <= one].sum() for one in t] for w, a in each]
    assert_allclose(law.cdf(t), below, atol=1e-9)
    assert_allclose(law.cdf(t[[0, 1, 2, 3, 0, 1, 2]], paired=True)[:4], np.diagonal(below))
    assert_allclose(law.probability("y0 > 0.1"), 1 - np.array(below)[:, 1], atol=1e-9)
    levels = np.linspace(0.0, 1.0, 23)
    expected = [oracle.quantile(w[None], a, levels)[0] for w, a in each]
    assert_allclose(law.quantile(levels), expected, atol=1e-9)
    y = np.linspace(-1.0, 2.0, len(masses))
    assert_allclose(law.crps(y[:, None]), crps(masses, atoms[:, :, None], y[:, None]), rtol=1e-9)
    expected = (masses * np.abs(atoms)).sum(axis=1)
    assert_allclose(law.expect(lambda y: np.abs(y[:, 0])), expected, rtol=1e-9)
    draws = law.sample(20_000, random_state=2)
    error = 4.5 * law.std()[:, None] / np.sqrt(20_000)
    assert (np.abs(draws.mean(axis=1) - mean) < error[:, 0]).all()
    grid = np.linspace(-15, 15, 3001)
    assert_allclose(trapezoid(law.pdf(grid[:, None]), grid), 1.0, atol=1e-3)
    assert_allclose(law.weights().sum(axis=1), 1.0, atol=1e-12)


def test_laws_change_continuously_on_the_way_out(located):
    _, _, model = located
    points = np.linspace(1.5, 6.5, 10_000)[:, None]
    law = model.conditional(points)
    for answer in (law.mean(), law.std(), law.cdf(1.0)):
        assert np.abs(np.diff(answer)).max() < 0.02


def test_location_laws_stay_within_the_range_of_y():
    """The case of Beta data: half of the mass near the upper bound."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 1))
    p = 1 / (1 + np.exp(-1.5 * x))
    y = rng.beta(8 * p, 8 * (1 - p))
    law = default(x, y, residual=True).conditional(np.linspace(-4, 4, 33)[:, None])
    assert_array_equal(law.cdf(y.max()), 1.0)
    assert_array_equal(law.probability(f"y0 > {float(y.max())}"), 0.0)
    assert_array_equal(law.cdf(np.nextafter(y.min(), -1)), 0.0)
    draws = law.sample(500)
    assert draws.min() >= y.min()
    assert draws.max() <= y.max()
    assert (law.mean() <= y.max()).all()
    levels = law.quantile([0.0, 1.0])
    assert levels.min() >= y.min()
    assert levels.max() <= y.max()


def test_location_laws_of_whole_numbers_have_whole_atoms(counts, tmp_path):
    x, _, model = counts
    model.save(tmp_path / "m")
    for law in (model.conditional(x), load(tmp_path / "m").conditional(x)):
        for values in (law.sample(20), law.quantile(np.linspace(0, 1, 9)), law.median()):
            assert_array_equal(values, np.round(values))
            assert values.min() >= 0.0
        assert_array_equal(law.cdf(-1e-9), 0.0)
        assert_allclose(law.cdf([3.0, 3.9]) @ [1, -1], 0.0, atol=1e-15)
        assert_allclose(law.probability(lambda y: y[:, 0] % 1 == 0), 1.0, atol=1e-12)


def test_plain_laws_of_whole_numbers_have_whole_atoms():
    """Also where many counts share a cell, and of rows that no cell was made from."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 1))
    y = rng.poisson(np.exp(4 + x)).astype(float)
    options = {"kernel_x": "median", "kernel_y": "median", "max_rank": 30, "tol": 0.5}
    fit = JointDistribution(**options, sample_size=500, support_size=40).fit(x, y)
    law = fit.conditional(x[:50])
    for values in (law.sample(20), law.quantile(np.linspace(0, 1, 9))):
        assert np.isin(values, y).all()


@pytest.fixture(scope="module")
def kinds(located, counts):
    """A model of each kind of law."""
    x, y, model = located
    options = {"kernel_x": kernels.Gaussian(0.5), "kernel_y": kernels.Gaussian(0.5), "tol": 1e-2}
    plain, coupled = (
        JointDistribution(**options, **more).fit(x, y).model_
        for more in ({"reg": 1e-3}, {"constraint": "coupling", "max_rank": 20})
    )
    scored = default(x, np.exp(y), residual=True)
    some = {"plain": plain, "coupling": coupled, "raw": model, "scored": scored}
    return some | {"counts": counts[2]}


@settings(max_examples=20)
@given(
    which=st.sampled_from(["plain", "coupling", "raw", "scored", "counts"]),
    seed=st.integers(0, 2**32 - 1),
    wide=st.sampled_from([0.3, 1.0, 3.0, 8.0]),
)
def test_distribution_functions_reach_the_levels_of_quantiles(kinds, which, seed, wide):
    """F(F^-1(q)) >= q as numbers, near the data, far from them and between."""
    rng = np.random.default_rng(seed)
    law = kinds[which].conditional(wide * rng.normal(size=(40, 1)))
    levels = np.concatenate([[0.0, 0.5, 1.0], rng.random(6), rng.random(2) * 1e-9])
    quantiles = law.quantile(levels)
    for q, t in zip(levels, quantiles.T, strict=True):
        assert (law.cdf(t, paired=True) >= q).all()
        below = law.cdf(np.nextafter(t, -np.inf), paired=True)
        assert (below <= q + 1e-11).all()
    assert (np.diff(law.quantile(np.sort(levels)), axis=1) >= 0).all()


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_scores_ascend_as_numbers(seed):
    """Rounding at a knot takes no value past the next one."""
    rng = np.random.default_rng(seed)
    knots = np.sort(rng.normal(size=9)), np.sort(rng.normal(size=9))
    there = Scores(*(tuple(k) for k in knots))
    near = knots[0][:, None] * (1 + np.arange(-20, 21) * 2.0**-53)
    mapped = there(np, np.sort(near.ravel()))
    assert (np.diff(mapped) >= 0).all()


def normal_moments(law, y):
    """Mean logarithm of normal densities with the laws' own moments."""
    d = y.shape[1]
    covariance = law.cov().reshape(-1, d, d)
    white = np.linalg.solve(covariance, (y - law.mean().reshape(-1, d))[:, :, None])[:, :, 0]
    square = ((y - law.mean().reshape(-1, d)) * white).sum(axis=1)
    return -0.5 * (square + np.linalg.slogdet(covariance)[1] + d * np.log(2 * np.pi)).mean()


@pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")
@pytest.mark.parametrize("d", [1, 2, 5])
def test_densities_in_several_columns_are_as_good_as_normal_ones(d):
    """Normal data: no worse than a normal density with the moments of the law, in five columns."""
    rng = np.random.default_rng(0)
    mix = np.random.default_rng(5).normal(size=(5, 5))[:d, :d] * 0.4 + np.eye(d)
    x = rng.normal(size=(4000, 2))
    y = x @ np.random.default_rng(6).normal(size=(2, d)) + 0.7 * rng.normal(size=(4000, d)) @ mix.T
    options = {"kernel_x": kernels.Gaussian(0.8), "kernel_y": kernels.Gaussian(1.2)}
    fit = JointDistribution(**options, tol=1e-2, max_rank=150, reg=1e-4, residual=False)
    law = fit.fit(x[:3700], y[:3700]).conditional(x[3700:])
    assert law.log_pdf(y[3700:], paired=True).mean() > normal_moments(law, y[3700:]) - 0.1


def test_densities_show_two_branches():
    """In one column a density resolves what a normal one can't."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (4000, 1))
    sign = rng.choice([-1.0, 1.0], x.shape)
    y = sign * (1 + x) + 0.3 * rng.normal(size=x.shape)
    options = {"kernel_x": kernels.Gaussian(0.5), "kernel_y": kernels.Gaussian(0.5)}
    fit = JointDistribution(**options, tol=1e-3, reg=1e-4, residual=False).fit(x, y)
    law = fit.conditional([[1.5]])
    middle, top = law.pdf([[0.0], [2.5]])[0]
    assert top > 0.4  # 0.66
    assert middle < 0.02
    own = fit.conditional(x[:500]).log_pdf(y[:500], paired=True).mean()
    truth = np.logaddexp(
        *(-0.5 * ((y - s * (1 + x)) / 0.3) ** 2 - np.log(0.3 * np.sqrt(2 * np.pi)) for s in (-1, 1))
    )[:500].mean() - np.log(2)
    assert own > truth - 0.15


@pytest.mark.parametrize("d", [1, 2])
def test_densities_keep_the_moments_of_the_law(d):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1500, 1))
    y = np.hstack([np.sin(2 * x), x])[:, :d] + 0.4 * rng.normal(size=(1500, d))
    options = {"kernel_x": kernels.Gaussian(0.5), "kernel_y": kernels.Gaussian(0.6)}
    fit = JointDistribution(**options, tol=1e-2, reg=1e-3, support_size=100, residual=False)
    law = fit.fit(x, y).conditional([[-1.0], [0.5]])
    # In one column tails have powers of y.
    side = np.sinh(np.linspace(-12, 12, 20_001)) if d == 1 else np.linspace(-6, 6, 161)
    grid = np.stack(np.meshgrid(*[side] * d, indexing="ij"), axis=-1).reshape(-1, d)
    steps = np.gradient(side)
    density = law.pdf(grid) * (steps if d == 1 else steps[0] ** d)
    assert_allclose(density.sum(axis=1), 1.0, atol=1e-6)
    mean = density @ grid
    assert_allclose(mean, law.mean().reshape(2, d), atol=1e-6)
    gap = grid[None] - mean[:, None]
    covariance = np.einsum("bs,bsi,bsj->bij", density, gap, gap)
    assert_allclose(covariance, law.cov(), rtol=2e-3)


def test_joint_classifiers_exclude_no_label():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 1))
    label = np.where(x[:, 0] > 0.0, "up", "down")
    label[:3] = "rare"
    model = JointClassifier(kernel_x=kernels.Gaussian(0.5), tol=1e-4, reg=1e-5).fit(x, label)
    found = model.predict_proba(np.linspace(-40, 40, 200)[:, None])
    assert (found > 0.0).all()
    assert_allclose(found.sum(axis=1), 1.0, atol=1e-12)
    law = model.conditional(x).predict_proba()
    assert law.min() == 0.0
    assert_allclose(model.predict_proba(x), (600 * law + 1 / 3) / 601, atol=1e-14)
    assert np.isfinite(log_loss(label, model.predict_proba(x)))
    assert -np.log(model.predict_proba(x)).max() < np.log(3 * 601) + 1e-9


@pytest.fixture(scope="module")
def twice():
    """Rows of which some weigh two, the same rows with these doubled, and a group for each row."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 1))
    y = np.sin(2 * x) + 0.3 * rng.normal(size=x.shape)
    again = np.concatenate([np.arange(300), np.arange(100)])
    weights = np.ones(300)
    weights[:100] = 2.0
    one = open_sample(x, y, weights=weights, group=np.arange(300.0))
    return one, open_sample(x[again], y[again], group=again.astype(float))


@pytest.mark.parametrize(
    "constraint",
    [Coupling(12), Coupling(12, choice="kmeans"), Pointwise(40), Normalized()],
    ids=["coupling", "k-means", "pointwise", "normalized"],
)
def test_weight_two_is_two_rows(twice, constraint):
    options = {"kernel_x": kernels.Gaussian(0.5), "kernel_y": kernels.Gaussian(0.5), "reg": 1e-3}
    if constraint.name in ("pointwise", "normalized"):
        options["pivots"] = tuple(np.linspace(-2, 2, 9)[:, None] for _ in "xy")
    at = np.linspace(-2, 2, 9)[:, None]
    a, b = (JointDistribution(**options, constraint=constraint).fit(rows) for rows in twice)
    assert_allclose(a.density_ratio(at, at), b.density_ratio(at, at), atol=1e-9)
    laws = a.conditional(at), b.conditional(at)
    assert_allclose(laws[0].mean(), laws[1].mean(), atol=1e-9)
    assert_array_equal(*(law.quantile([0.1, 0.5, 0.9]) for law in laws))
    proba = [law.probability("y0 > 0.2") for law in laws]
    assert_allclose(*proba, atol=1e-9)


def test_weight_two_is_two_rows_for_locations_in_folds_by_group(twice):
    """Two copies of a row share its fold; the kernel of residuals is a median over pairs."""
    options = {"kernel_x": kernels.Gaussian(0.5), "kernel_y": kernels.Gaussian(0.5), "reg": 1e-3}
    options["pivots"] = tuple(np.linspace(-2, 2, 9)[:, None] for _ in "xy")
    a, b = (
        JointDistribution(**options, residual=True).fit(rows.fold_by("group")).model_
        for rows in twice
    )
    at = np.linspace(-2, 2, 9)[:, None]
    assert_allclose(a.residual.location(at), b.residual.location(at), atol=1e-7)
    laws = a.conditional(at), b.conditional(at)
    assert_allclose(laws[0].mean(), laws[1].mean(), atol=1e-4)
    assert_allclose(*(law.cdf([-0.5, 0.0, 0.4]) for law in laws), atol=5e-3)
