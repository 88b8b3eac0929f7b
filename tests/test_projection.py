"""The nearest law to a signed ratio: against sorting, KKT conditions and feasible directions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.laws import clip
from cme_dask.errors import DataError
from cme_dask.numerics import measure
from cme_dask.numerics.measure import project


def by_sorting(g, v):
    """The exact projection of one row: the active cells are the k largest, for one k."""
    order = np.argsort(-g, kind="stable")
    order = order[v[order] > 0]
    mass, moment = np.cumsum(v[order]), np.cumsum(v[order] * g[order])
    t = (moment - 1.0) / mass
    # The largest t is the root: too few active cells, or too many, lower it.
    best = int(np.argmax(t))
    return v * np.maximum(g - t[best], 0.0), t[best]


def ratios(rng, q, size, kind):
    """Signed ratios of mean one, and others."""
    g = rng.standard_normal((q, size))
    if kind == "fit":
        return 1.0 + 2.0 * g
    if kind == "negative":
        return -np.abs(g) - 3.0
    if kind == "ties":
        return np.round(g)
    if kind == "constant":
        return np.full((q, size), 7.0)
    return 10.0 ** rng.uniform(-3, 6, (q, size)) * np.sign(g)  # "heavy"


KINDS = st.sampled_from(["fit", "negative", "ties", "constant", "heavy"])


def masses(rng, size, zeros):
    v = rng.dirichlet(np.full(size, 0.3))
    if zeros:
        v[rng.random(size) < 0.4] = 0.0
    if not v.any():
        v[0] = 1.0
    return v / v.sum()


CASES = given(
    size=st.sampled_from([1, 2, 3, 17, 300]),
    kind=KINDS,
    zeros=st.booleans(),
    seed=st.integers(0, 10**6),
)


@settings(max_examples=150)
@CASES
def test_it_is_the_projection(size, kind, zeros, seed):
    rng = np.random.default_rng(seed)
    g, v = ratios(rng, 5, size, kind), masses(rng, size, zeros)
    w, t = project(g, v)
    scale = max(1.0, np.abs(g).max())
    assert (w >= 0).all()
    assert (w[:, v == 0] == 0).all()
    assert np.abs(w.sum(axis=1) - 1).max() <= 1e-12
    for row in range(5):
        weights, threshold = by_sorting(g[row], v)
        assert np.abs(w[row] - weights).max() <= 1e-12 * scale
        assert abs(t[row] - threshold) <= 1e-12 * scale / v[v > 0].max()


@pytest.mark.parametrize("numbers", [1, 100, 700])
def test_rows_in_several_blocks_have_the_laws_of_one(rng, monkeypatch, numbers):
    g = np.concatenate([ratios(rng, 9, 50, kind) for kind in ("fit", "ties", "heavy")])
    v = masses(rng, 50, zeros=True)
    w, t = project(g, v)
    monkeypatch.setattr(measure, "_PROJECTED", numbers)
    found, threshold = project(g, v)
    scale = np.abs(g).max(axis=1)
    assert (np.abs(found - w).max(axis=1) <= 1e-14 * scale).all()
    assert (np.abs(threshold - t) <= 1e-14 * scale / v[v > 0].max()).all()


@settings(max_examples=100)
@CASES
def test_no_feasible_direction_comes_nearer(size, kind, zeros, seed):
    rng = np.random.default_rng(seed)
    g, v = ratios(rng, 4, size, kind), masses(rng, size, zeros)
    seen = v > 0
    g, v = g[:, seen], v[seen]
    w, _ = project(g, v)
    gradient = w / v - g
    other = rng.dirichlet(np.full(len(v), 0.5), 50)  # other laws
    # The objective is convex: no slope towards another law is negative, beyond rounding.
    slopes = (gradient[:, None, :] * (other[None] - w[:, None, :])).sum(axis=2)
    assert slopes.min() >= -1e-10 * max(1.0, np.abs(gradient).max())


@settings(max_examples=150)
@CASES
def test_it_is_never_farther_from_a_density_than_the_signed_ratio(size, kind, zeros, seed):
    """At every x, for every density g0 of sum v g0 = 1; also the sharpest ones."""
    rng = np.random.default_rng(seed)
    g, v = ratios(rng, 3, size, kind), masses(rng, size, zeros)
    seen = v > 0
    g, v = g[:, seen], v[seen]
    w, _ = project(g, v)
    laws = np.concatenate([rng.dirichlet(np.full(len(v), a), 20) for a in (0.05, 1.0)])
    laws = np.concatenate([laws, np.eye(len(v))[:5]])
    for density in laws / v:
        before = np.sqrt((v * (g - density) ** 2).sum(axis=1))
        after = np.sqrt((v * (w / v - density) ** 2).sum(axis=1))
        assert (after <= before * (1 + 1e-9) + 1e-9).all()


@settings(max_examples=60)
@given(size=st.integers(1, 200), zeros=st.booleans(), seed=st.integers(0, 10**6))
def test_a_density_is_left_as_it_is(size, zeros, seed):
    rng = np.random.default_rng(seed)
    v = masses(rng, size, zeros)
    density = rng.exponential(size=(4, size))
    density /= (density @ v)[:, None]
    w, t = project(density, v)
    assert np.abs(w - v * density).max() <= 1e-13
    assert np.abs(t).max() <= 1e-9 + 1e-12 * density.max() / v[v > 0].max()


@pytest.mark.parametrize("huge", [1e6, 1e12, 1e16, 1e20, 1e200])
def test_huge_ratios_still_give_laws(huge):
    rng = np.random.default_rng(0)
    v = masses(rng, 50, zeros=True)
    for shift in (0.0, huge, -huge):
        w, t = project(shift + huge * rng.standard_normal((20, 50)), v)
        assert (w >= 0).all()
        assert np.abs(w.sum(axis=1) - 1).max() <= 1e-12
        assert np.isfinite(t).all()
    equal = project(np.full((1, 50), huge), v)[0]
    assert np.abs(equal - v).max() <= 1e-15  # ties share by their masses
    assert project(np.array([[huge]]), np.ones(1))[0] == 1.0


def test_tiny_masses_are_kept_apart_from_none():
    v = np.array([1e-14, 1 - 1e-14, 0.0])
    w, _ = project(np.array([[1e13, 0.0, 1e30]]), v)
    assert w[0] == pytest.approx([0.1, 0.9, 0.0], rel=1e-12)  # 1e-14 (1e13 + 0.9) is 0.1
    w, _ = project(np.array([[5.0, 3.0]]), np.array([1e-310, 1.0]))
    assert np.abs(w.sum() - 1) <= 1e-15


def test_rows_do_not_depend_on_each_other():
    rng = np.random.default_rng(1)
    g, v = 1 + rng.standard_normal((300, 1000)), masses(rng, 1000, zeros=False)
    whole = project(g, v)[0]
    assert np.abs(project(g[37:38], v)[0] - whole[37]).max() <= 1e-15
    assert project(np.zeros((0, 3)), np.ones(3))[0].shape == (0, 3)


def test_clipping_can_come_out_farther_and_falls_back_to_the_marginal():
    v = np.array([0.5, 0.3, 0.2])
    g = np.array([[1.5, 1.5, -1.0], [-1.0, -2.0, 0.0]])
    w = clip(g, v)
    assert w[0] == pytest.approx([0.75 / 1.2, 0.45 / 1.2, 0.0])
    assert_array_equal(w[1], v)
    density, g = np.array([0.0, 0.0, 5.0]), np.array([[-2.0, 1.0, 8.5]])
    farther = (v * (clip(g, v) / v - density) ** 2).sum()
    nearer = (v * (project(g, v)[0] / v - density) ** 2).sum()
    assert nearer <= (v * (g - density) ** 2).sum()
    assert farther > nearer
    # Positive only where there is no mass: the marginal, too.
    assert_array_equal(clip(np.array([[1.0, -1.0]]), np.array([0.0, 1.0])), [[0.0, 1.0]])


def test_what_is_unusable_is_refused():
    with pytest.raises(DataError, match="NaN or infinity"):
        project(np.array([[np.nan, 1.0]]), np.ones(2))
    with pytest.raises(DataError, match="non-negative"):
        project(np.ones((1, 2)), np.array([1.0, -1.0]))
    with pytest.raises(DataError, match="non-negative"):
        project(np.ones((1, 2)), np.zeros(2))
    with pytest.raises(DataError, match="expected, got shapes"):
        project(np.ones((1, 2)), np.ones(3))
