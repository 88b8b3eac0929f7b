"""Operators against their dense n x n forms, as F h = sum_ij W_ij h(X_j) k(x_i, .) says."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import zarr
from conftest import write_store
from test_reads import opened

import cme_dask
from benchmarks import rules
from cme_dask import PivotedCholesky, kernels, open_sample, operators
from cme_dask.data.columns import Columns
from cme_dask.errors import DataError, StoreError
from cme_dask.models.base import MODELS
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.operators import Operator, Reciprocal, Space, measure

K, L, REG = kernels.Gaussian(0.8), kernels.Gaussian(0.6), 1e-3
RNG = np.random.default_rng(0)
N = 240
X = RNG.normal(size=(N, 2))
Y = np.sin(X[:, :1]) + 0.3 * RNG.normal(size=(N, 1))
PRIOR = 0.4 + 0.6 * RNG.normal(size=(50, 2))
AT_X, AT_Y = RNG.normal(size=(7, 2)), RNG.normal(size=(6, 1))


def complete(kernel, *rows):
    points = np.concatenate(rows)
    columns = Columns.default("z", points.shape[1])
    return Space(columns, NewtonBasis.from_points(kernel, points))


SPACE_X, SPACE_Y = complete(K, X, PRIOR), complete(L, Y)
W = np.linalg.inv(K(X, X) + N * REG * np.eye(N))
A_X, A_Y = RNG.normal(size=5), RNG.normal(size=5)


def f(x):
    return 2.0 + np.cos(x[:, 0])


def g(x):
    """An element of the RKHS of x."""
    return K(x, X[:5]) @ A_X


def h(y):
    """An element of the RKHS of y."""
    return L(y, Y[:5]) @ A_Y


def dense(values, at=AT_X):
    """F h at some points, of the values <h, X(x_j)>."""
    return K(at, X) @ W @ values


@pytest.fixture(scope="module")
def moments():
    functions = {"f": f, "1 / f": Reciprocal(f), "f^2": lambda x: f(x) ** 2}
    cubes = {"h": h}
    return measure(open_sample(X, Y), SPACE_X, SPACE_Y, functions_x=functions, functions_y=cubes)


@pytest.fixture(scope="module")
def prior():
    return measure(open_sample(PRIOR), SPACE_X)


def agrees(one, two):
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-8 * np.abs(two).max())


# Each operator equals its dense form


def test_conditional_expectation_and_its_adjoint(moments):
    E = moments.conditional_expectation(REG)
    agrees(E(h)(AT_X)[0], dense(h(Y)))
    agrees(moments.smooth("h", REG)(AT_X)[0], dense(h(Y)))
    image = E.T(SPACE_X.embed(AT_X))
    agrees(image(AT_Y), dense(L(Y, AT_Y)))
    left, right = E(h).inner(SPACE_X.interpolate(g)), SPACE_Y.interpolate(h).inner(E.T(g))
    np.testing.assert_allclose(left, right, rtol=1e-12)


def test_multiplication_and_quotient(moments):
    times, over = (moments.multiplication(name, REG) for name in ("f", "1 / f"))
    agrees(times(g)(AT_X)[0], dense(f(X) * g(X)))
    agrees(over(g)(AT_X)[0], dense(g(X) / f(X)))
    small = moments.multiplication("f", 1e-9)
    again = moments.multiplication("1 / f", 1e-9) @ small
    at = X[:30]
    np.testing.assert_allclose(again(g)(at)[0], g(at), atol=1e-3 * np.abs(g(at)).max())


def test_composition_maps_rows_as_they_are_read():
    seen = []

    def phi(x):
        seen.append(len(x))
        return np.tanh(x[:, :1] + x[:, 1:])

    space_y = complete(L, phi(X))
    seen.clear()
    C = operators.composition(open_sample(X, Y), phi, SPACE_X, space_y, reg=REG)
    assert N <= sum(seen) <= N + 3 * 64  # one pass, and the rows on which phi is tried

    def h(y):
        return L(y, phi(X[:5])) @ A_Y

    agrees(C(h)(AT_X)[0], dense(h(phi(X))))
    with pytest.raises(DataError, match=r"phi leaves the support.*pivots miss"):
        operators.composition(open_sample(X), lambda x: 20 + x[:, :1], SPACE_X, space_y)


def test_rules_of_sum_chain_and_fubini(moments, prior):
    E = moments.conditional_expectation(REG)
    marginal = E.T(prior.mean("x"))
    agrees(marginal(AT_Y)[0], dense(L(Y, AT_Y), PRIOR).mean(axis=0))
    # E h(X, Y) under the prior of x: the chain rule, by either order of integration.
    B = Operator.interpolate(lambda x, y: g(x) * h(y), SPACE_X, SPACE_Y)
    joint = E.T @ prior.covariance("x")
    expected = np.mean(g(PRIOR) * dense(h(Y), PRIOR))
    np.testing.assert_allclose(B.inner(joint), expected, rtol=1e-8)
    np.testing.assert_allclose(B.T.inner(prior.covariance("x") @ E), expected, rtol=1e-8)
    # Two conditional expectations in a chain.
    again = measure(open_sample(Y, X), SPACE_Y, SPACE_X).conditional_expectation(REG)
    W_Y = np.linalg.inv(L(Y, Y) + N * REG * np.eye(N))
    agrees((E @ again)(g)(AT_X)[0], dense(L(Y, Y) @ W_Y @ g(X)))


def test_change_of_measure(moments, prior):
    ratio = moments.density_ratio(prior, 0.05)
    gap = (K(X, PRIOR).mean(axis=1) - K(X, X).mean(axis=1)) / 0.05
    inside = np.linalg.solve(K(X, X) + N * 0.05 * np.eye(N), gap)
    own = (K(AT_X, PRIOR).mean(axis=1) - K(AT_X, X).mean(axis=1)) / 0.05
    agrees(ratio(AT_X), 1.0 + own - K(AT_X, X) @ inside)
    positive = moments.density_ratio(prior, 0.05, non_negative=True)
    again = measure(open_sample(X), SPACE_X, functions_x={"r": ratio, "r+": positive})
    for name, r in {"r": ratio(X), "r+": np.maximum(ratio(X), 0.0)}.items():
        R = again.change_of_measure(name, REG)
        agrees(R(g)(AT_X)[0], dense(r / r.mean() * g(X)))
        # E_P R g is about E_Q g.
        changed, plain = float(again.mean().inner(R(g))[0, 0]), g(X).mean()
        assert abs(changed - g(PRIOR).mean()) < 0.5 * abs(plain - g(PRIOR).mean())
    moved = PRIOR + np.array([40.0, 0.0])
    far = measure(open_sample(moved), complete(K, X, moved))
    near = measure(open_sample(X), far.spaces[0])
    with pytest.raises(DataError, match=r"effective sample size of this ratio is 0\.\d+% of"):
        near.density_ratio(far, 1e-8)
    single = {"r": lambda x: 1.0 * (x == X[0]).all(axis=1)}
    with pytest.raises(DataError, match=r"size of the ratio 'r' is 0\.42% of the rows"):
        measure(open_sample(X), SPACE_X, functions_x=single).change_of_measure("r")


def test_bayes_rule(moments, prior):
    E = moments.conditional_expectation(REG)
    numerator = dense(L(Y, Y), PRIOR)  # E[l(y_j, Y) | z_s]
    marginal = numerator.mean(axis=0)
    for least in (0.5, 0.0):
        G = operators.bayes(E, prior, open_sample(Y), reg=REG, least=least)
        inside = marginal > least * marginal.max()
        rows, values = Y[inside], g(PRIOR) @ numerator[:, inside] / len(PRIOR) / marginal[inside]
        W_Y = np.linalg.inv(L(rows, rows) + N * REG * np.eye(len(rows)))
        agrees(G(g)(AT_Y)[0], L(AT_Y, rows) @ W_Y @ values)
    assert inside.all()
    # Bayes' rule, then the marginal law of y: the prior.
    back = float(E.T(prior.mean()).inner(G(g))[0, 0])
    assert abs(back - g(PRIOR).mean()) < 0.1 * np.abs(g(PRIOR)).mean()


def test_kernel_bayes_rule_of_fukumizu(moments, prior):
    priors = operators.MeanEmbeddings(
        np.vstack([prior.mean().coef, moments.mean("x").coef]), SPACE_X
    )
    both = operators.kernel_bayes(
        open_sample(X, Y), [priors[0], priors[1]], moments, reg=REG, reg_posterior=1e-4
    )
    for G, rows in zip(both, (PRIOR, X), strict=True):
        weights = np.diag(W @ K(X, rows).mean(axis=1))
        C = weights @ L(Y, Y)
        inner = np.linalg.solve(C @ C + 1e-4 * np.eye(N), weights @ L(Y, AT_Y))
        agrees(G(g)(AT_Y)[0], (g(X) @ C @ inner))
    (same,) = operators.kernel_bayes(
        open_sample(X, Y), priors[0], moments, reg=REG, reg_posterior=1e-4
    )
    np.testing.assert_allclose(same.matrix, both[0].matrix, rtol=1e-9, atol=1e-12)


def test_positive_ratios_reweight_points(moments, prior):
    """Bayes' rule and the sum rule by non-negative weights, in n x n matrices."""

    def centred(kernel, points, rows):
        mean = kernel(points, rows).mean(axis=1), kernel(rows, rows).mean(axis=1)
        return kernel(points, rows) - np.outer(mean[0], mean[1]) / mean[1].mean()

    def ratio(x, y):
        """g(x, y), shape (number of y, number of x)."""
        of_x, of_y = (
            np.linalg.solve(centred(k, z, z) + N * REG * np.eye(N), centred(k, at, z).T)
            for k, z, at in ((K, X, x), (L, Y, y))
        )
        return 1.0 + N * of_y.T @ of_x

    H = moments.joint_ratio(REG)
    shares = RNG.uniform(size=len(PRIOR))
    posterior = operators.reweighting(H, PRIOR, shares)
    joint = shares * np.maximum(ratio(PRIOR, AT_Y), 0.0)
    expected = joint / joint.sum(axis=1, keepdims=True)
    assert (joint == 0.0).any()  # some ratios are negative
    agrees(posterior.weights(AT_Y), expected)
    agrees(posterior.embed(AT_Y)(AT_X), expected @ K(PRIOR, AT_X))
    agrees(posterior.expect(g, AT_Y), expected @ g(PRIOR))
    again = posterior.weights(AT_Y[::-1], posterior.weights(AT_Y))
    both = joint * joint[::-1] / shares
    agrees(again, both / both.sum(axis=1, keepdims=True))
    marginal = operators.reweighting(H.T, Y).weights(prior.mean())
    expected = np.maximum(ratio(PRIOR, Y).mean(axis=1), 0.0)
    agrees(marginal[0], expected / expected.sum())
    with pytest.raises(DataError, match="reg must be a positive number"):
        moments.joint_ratio(0.0)
    for weights in (np.ones(3), -np.ones(50)):
        with pytest.raises(DataError, match="weights of 50 points must be non-negative"):
            operators.reweighting(H, PRIOR, weights)
    with pytest.raises(DataError, match="all weights of the points are zero"):
        operators.reweighting(H, PRIOR, np.zeros(50))
    with pytest.raises(DataError, match="embeddings in the codomain of the ratio, but their"):
        posterior.weights(prior.mean())
    with pytest.raises(DataError, match=r"prior must have shape \(6, 50\), got \(3,\)"):
        posterior.weights(AT_Y, np.ones(3))
    for prior_weights in (-np.ones(50), np.zeros(50), np.full(50, np.nan)):
        with pytest.raises(DataError, match="prior must hold weights >= 0"):
            posterior.weights(AT_Y, prior_weights)
    agrees(posterior.weights(AT_Y, np.full(50, 7.0)), posterior.weights(AT_Y, np.ones(50)))


def test_rules_of_a_linear_gaussian_model():
    """Noise is added to x, with a changed prior: posterior means in closed form."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40_000, 1))
    y = x + 0.5 * rng.normal(size=x.shape)
    z = 0.5 + 0.7 * rng.normal(size=x.shape)
    kernel = kernels.Gaussian(1.0)
    of_x, of_y = (Space.of(PivotedCholesky(kernel, tol=1e-7).fit(rows)) for rows in (x, y))
    P, Q = measure(open_sample(x, y), of_x, of_y), measure(open_sample(z), of_x)
    E = P.conditional_expectation(1e-6)
    at = np.array([[-0.5], [0.5], [1.0]])
    marginal = E.T(Q.mean())(at)[0]
    variance = 0.49 + 0.25 + 1.0
    closed = np.exp(-((at[:, 0] - 0.5) ** 2) / (2 * variance)) / np.sqrt(variance)
    np.testing.assert_allclose(marginal, closed, atol=0.01)
    (G,) = operators.kernel_bayes(open_sample(x, y), Q.mean(), P, reg=1e-4, reg_posterior=1e-8)
    posterior = G(lambda x: x[:, 0])(at)[0]
    np.testing.assert_allclose(posterior, 0.5 + 0.49 / 0.74 * (at[:, 0] - 0.5), atol=0.05)


def test_the_picture_of_operators_shows_each_rule_near_the_truth():
    panels = list(rules._panels(4000))
    assert len(panels) == 12
    for panel in panels:
        for curve, error in panel["errors"].items():
            if curve not in ("bayes, smoothed", "under P"):
                assert error < 0.15 * np.ptp(panel["truth"]), (panel["title"], curve)


# Adjoints, passes, and identities that hold for finite sets


def test_adjoints_of_all_operators(moments, prior):
    """<A f, g> = <f, A' g> for sections of the kernels, whose products are values."""
    ratio = moments.density_ratio(prior, 0.05, non_negative=True)
    changed = measure(open_sample(X), SPACE_X, functions_x={"r": ratio})
    E = moments.conditional_expectation(REG)
    made = [
        E,
        moments.multiplication("f", REG),
        moments.multiplication("1 / f", REG),
        moments.covariance("x", "y"),
        changed.change_of_measure("r", REG),
        operators.composition(open_sample(X), _folded, SPACE_X, SPACE_Y, reg=REG),
        operators.bayes(E, prior, open_sample(Y), reg=REG),
        *operators.kernel_bayes(open_sample(X, Y), prior.mean(), moments, reg=REG),
        moments.joint_ratio(REG),
        E.T @ prior.covariance("x"),  # the chain rule
    ]
    for A in made:
        # <A k(p, .), l(q, .)> = (A k(p, .))(q) = (A' l(q, .))(p)
        p, q = (space.basis.points[:6] for space in (A.domain, A.codomain))
        forth = A(A.domain.embed(p))(q)
        back = A.T(A.codomain.embed(q))(p)
        np.testing.assert_allclose(forth, back.T, rtol=0, atol=1e-12 * max(A.norm(), 1.0))


def _folded(x):
    return np.sin(x[:, :1])


def test_one_pass_makes_all_operators_and_bayes_rules_take_one_more(tmp_path):
    write_store(tmp_path / "s", X, Y, chunk_rows=64)
    write_store(tmp_path / "prior", PRIOR, PRIOR, chunk_rows=64)
    chunks, store = opened(tmp_path / "s")
    chunks_of_prior, store_of_prior = opened(tmp_path / "prior")
    sample, rows_of_prior = open_sample(store), open_sample(store_of_prior)

    def passes():
        each = [*chunks.chunks("x").values(), *chunks.chunks("y").values()]
        assert len(set(each)) == 1
        return each[0]

    functions = {"f": f, "1 / f": Reciprocal(f)}
    moments = measure(sample, SPACE_X, SPACE_Y, functions_x=functions)
    E = moments.conditional_expectation(REG)
    moments.multiplication("f", REG), moments.multiplication("1 / f", REG)
    moments.covariance("x", "y"), moments.mean("y"), moments.risk(E)
    prior = measure(rows_of_prior, SPACE_X)
    moments.density_ratio(prior, 0.05)
    assert passes() == 1
    priors = [prior.mean(), moments.mean("x")]
    operators.kernel_bayes(sample, priors, moments, reg=REG)  # one pass for all priors
    assert passes() == 2
    assert set(chunks_of_prior.chunks("x").values()) == {1}
    operators.bayes(E, prior, open_sample(Y), reg=REG)
    assert passes() == 2
    assert set(chunks_of_prior.chunks("x").values()) == {1}
    operators.reweighting(moments.joint_ratio(REG), PRIOR).weights(AT_Y)
    fit = cme_dask.JointDistribution(kernel_x=K, kernel_y=L, reg=REG, tol=0.1, residual=False)
    operators.change_prior(fit.fit(X, Y), store_of_prior)
    assert passes() == 2
    assert set(chunks_of_prior.chunks("x").values()) == {2}  # one more
    # Of x or of y alone, the other one is not read.
    operators.composition(sample, _folded, SPACE_X, SPACE_Y, reg=REG)
    measure(open_sample(store["x"]), SPACE_X, functions_x={"f": f}).change_of_measure("f")
    assert set(chunks.chunks("x").values()) == {4}
    assert set(chunks.chunks("y").values()) == {2}
    operators.bayes(E, prior, open_sample(store["y"]), reg=REG)
    assert set(chunks.chunks("x").values()) == {4}
    assert set(chunks.chunks("y").values()) == {3}


SIZES = 7, 5
TABLE = RNG.integers(1, 6, size=SIZES)  # how often each pair of x and y comes
SHIFTED = RNG.integers(1, 5, size=7)  # likewise x under another law


@pytest.fixture(scope="module")
def tables():
    """Operators of finite sets: with kernels of equality they are tables of probabilities."""
    spaces = [complete(kernels.Delta(), np.arange(float(n))[:, None]) for n in SIZES]
    x, y = (np.repeat(z.ravel(), TABLE.ravel())[:, None] * 1.0 for z in np.indices(SIZES))
    z = np.repeat(np.arange(7.0), SHIFTED)[:, None]
    functions = {
        "f": lambda x: x[:, 0] - 2.5,
        "1 / f": Reciprocal(lambda x: x[:, 0] - 2.5),
        "r": lambda x: (SHIFTED / SHIFTED.sum() * TABLE.sum() / TABLE.sum(axis=1))[
            x[:, 0].astype(int)
        ],
    }
    P = measure(open_sample(x, y), *spaces, functions_x=functions)
    Q = measure(open_sample(z), spaces[0])
    return P, Q, P.conditional_expectation(0.0), open_sample(x, y), open_sample(y)


def in_points(operator):
    """The matrix of an operator of values at points to values at points."""
    points = [
        np.arange(float(space.rank))[:, None] for space in (operator.domain, operator.codomain)
    ]
    return operator(operator.domain.embed(points[0]))(points[1]).T


def test_identities_hold_exactly_for_finite_sets(tables):
    P, Q, E, pairs, rows_y = tables
    given_x = TABLE / TABLE.sum(axis=1, keepdims=True)
    q = SHIFTED / SHIFTED.sum()
    joint = q[:, None] * given_x
    exact = {"rtol": 0, "atol": 1e-12}
    np.testing.assert_allclose(in_points(E), given_x, **exact)
    times, over = (P.multiplication(name, 0.0) for name in ("f", "1 / f"))
    np.testing.assert_allclose((over @ times).matrix, np.eye(7), **exact)
    np.testing.assert_allclose((times @ over).matrix, np.eye(7), **exact)
    # Chain rule, then the marginals: the prior and the sum rule.
    chain = in_points((E.T @ Q.covariance("x")).T)
    np.testing.assert_allclose(chain, joint, **exact)
    points = [np.arange(float(n))[:, None] for n in SIZES]
    np.testing.assert_allclose(E.T(Q.mean())(points[1])[0], joint.sum(axis=0), **exact)
    # Bayes' rule of both kinds, and then the marginal law of y: the prior.
    posterior = (joint / joint.sum(axis=0)).T
    for G in (
        operators.bayes(E, Q, rows_y, reg=0.0),
        *operators.kernel_bayes(pairs, Q.mean(), P, reg=0.0, reg_posterior=1e-16),
    ):
        np.testing.assert_allclose(in_points(G), posterior, rtol=0, atol=1e-10)
        back = G.T(E.T(Q.mean()))
        np.testing.assert_allclose(back(points[0])[0], q, rtol=0, atol=1e-10)
    # Likewise by non-negative weights, and the sum rule.
    shares, (x, y) = SHIFTED / SHIFTED.sum(), (np.arange(float(n))[:, None] for n in SIZES)
    ratio = P.joint_ratio(1e-14)
    weights = operators.reweighting(ratio, x, shares).weights(y)
    np.testing.assert_allclose(weights, posterior, rtol=0, atol=1e-10)
    plain = TABLE.sum(axis=0) / TABLE.sum()
    marginal = operators.reweighting(ratio.T, y, plain).weights(Q.mean())
    np.testing.assert_allclose(marginal[0], joint.sum(axis=0), rtol=0, atol=1e-10)
    np.testing.assert_allclose(marginal @ weights, [q], rtol=0, atol=1e-10)
    # A change of measure to Q, then averages over P: averages over Q.
    R = P.change_of_measure("r", 0.0)
    np.testing.assert_allclose(R.T(P.mean("x"))(points[0])[0], q, **exact)
    ratio = P.density_ratio(Q, 0.0)
    np.testing.assert_allclose(ratio(points[0]), q * TABLE.sum() / TABLE.sum(axis=1), **exact)


# Risks and bounds


def test_risks_are_those_of_dense_matrices(moments):
    beta = K(X, X) @ W
    E, M = moments.conditional_expectation(REG), moments.multiplication("f", REG)
    for operator, names, target in (
        (E, (), L(Y, Y)),
        (M, ("f", "f^2"), f(X)[:, None] * K(X, X) * f(X)),
    ):
        error = (np.eye(N) - beta) @ target @ (np.eye(N) - beta).T / N
        risk = moments.risk(operator, *names)
        assert risk.surrogate == pytest.approx(np.trace(error), rel=1e-8)
        assert risk.natural == pytest.approx(np.linalg.eigvalsh(error)[-1], rel=1e-8)
        assert moments.risk(1.1 * operator, *names).natural > risk.natural
    with pytest.raises(DataError, match="a risk needs an operator between the measured spaces"):
        moments.risk(M)
    with pytest.raises(DataError, match=r"unknown function '' of x"):
        moments.risk(M, "f")


def test_risks_count_what_the_space_misses():
    """Functions outside a small space are bounded as well."""
    few = complete(L, np.linspace(-1.0, 1.0, 3)[:, None])
    moments = measure(open_sample(X, Y), SPACE_X, few)
    E = moments.conditional_expectation(REG)
    in_space = few(Y)
    beta = K(X, X) @ W
    # Of A h = E P h the residual function is l(y, .) less the image of the projections.
    projected = in_space @ in_space.T
    cross = beta @ projected
    error = (L(Y, Y) - cross - cross.T + beta @ projected @ beta.T) / N
    risk = moments.risk(E)
    assert risk.surrogate == pytest.approx(np.trace(error), rel=1e-8)
    assert np.linalg.eigvalsh(error)[-1] <= risk.natural <= risk.surrogate


@pytest.mark.parametrize("seed", range(4))
def test_bounds_hold_where_the_truth_is_known(seed):
    """A chain of ten states: natural risk and sum rule against the exact conditional law."""
    rng = np.random.default_rng(seed)
    states = np.linspace(-2.0, 2.0, 10)[:, None]
    p, q = rng.dirichlet(np.full(10, 3.0), size=2)
    given_x = rng.dirichlet(np.full(10, 0.3), size=10)
    space = complete(kernels.Gaussian(0.7), states)

    def rows(law, n):
        x = rng.choice(10, size=n, p=law)
        y = (rng.random(n)[:, None] > given_x[x].cumsum(axis=1)).sum(axis=1).clip(max=9)
        return open_sample(states[x], states[y])

    E = measure(rows(p, 400), space, space).conditional_expectation(1e-3)
    held_out, prior = measure(rows(p, 4000), space, space), measure(rows(q, 300), space)
    # sup over |h| <= 1 of E_P (E[h | x] - (E h)(x))^2, exactly.
    values = space(states)
    slopes = given_x @ values - values @ E.matrix
    natural = np.linalg.eigvalsh(slopes.T @ (p[:, None] * slopes))[-1]
    risk = held_out.risk(E)
    assert natural <= risk.natural <= risk.surrogate
    truth = space.embed(states, q @ given_x)
    error = float(E.T(prior.mean()).distance(truth)[0, 0])
    bound = operators.sum_rule_bound(E, held_out, prior, float((q / p).max()))
    assert 0.0 < error <= bound
    assert bound < operators.sum_rule_bound(E, held_out, prior, 2.0 * float((q / p).max()))
    for options, message in (
        ({"largest_ratio": 0.5}, "at least 1, got 0.5"),
        ({"largest_ratio": 2.0, "confidence": 1.0}, "confidence must lie between"),
    ):
        with pytest.raises(DataError, match=message):
            operators.sum_rule_bound(E, held_out, prior, **options)


def test_the_risk_of_bayes_rule_under_a_prior_is_that_of_reweighted_rows():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(20_000, 1))
    y, z = x + 0.5 * rng.normal(size=x.shape), 0.5 + 0.7 * rng.normal(size=x.shape)
    space = Space.of(PivotedCholesky(kernels.Gaussian(0.6), tol=1e-4).fit(np.vstack([x, y])))
    half, rest = slice(0, 10_000), slice(10_000, None)
    P, Q = measure(open_sample(x[half], y[half]), space, space), measure(open_sample(z), space)
    (G,) = operators.kernel_bayes(open_sample(x[half], y[half]), Q.mean(), P, reg=1e-4)
    weights = P.density_ratio(Q, 1e-3, non_negative=True)(x[rest])
    reweighted = measure(open_sample(y[rest], x[rest], weights=weights), space, space)
    seen = z + 0.5 * rng.normal(size=z.shape)
    drawn = measure(open_sample(seen, z), space, space)
    for operator in (G, 0.5 * G):
        np.testing.assert_allclose(reweighted.risk(operator), drawn.risk(operator), rtol=0.05)
    assert drawn.risk(0.5 * G).natural > 1.1 * drawn.risk(G).natural


# The algebra


def test_the_algebra_is_that_of_matrices(moments, tmp_path):
    E, M = moments.conditional_expectation(REG), moments.multiplication("f", REG)
    a, b = E.matrix, M.matrix
    np.testing.assert_array_equal((M @ E).matrix, b @ a)
    np.testing.assert_array_equal((2 * M - M + M * 3).matrix, 4 * b)
    np.testing.assert_array_equal(E.T.T.matrix, a)
    assert E.norm() == pytest.approx(np.linalg.svd(a)[1][0])
    assert E.norm("hilbert-schmidt") ** 2 == pytest.approx(E.inner(E))
    s, left, right = E.svd()
    np.testing.assert_allclose(E(right).coef, s[:, None] * left.coef, atol=1e-10)
    np.testing.assert_allclose(left.inner(), np.eye(len(s)), atol=1e-10)
    values, functions = M.eig()
    assert (np.diff(np.abs(values)) <= 1e-12).all()
    np.testing.assert_allclose(M(functions).coef, values[:, None] * functions.coef, atol=1e-8)
    interpolated = SPACE_X.interpolate(g).coef
    np.testing.assert_allclose(Operator.identity(SPACE_X)(g).coef, interpolated, rtol=1e-14)
    coef = SPACE_Y.interpolate(h).coef[0]
    np.testing.assert_array_equal(E(coef), E(SPACE_Y.function(coef)).coef[0])
    E.save(tmp_path / "E")
    again = cme_dask.load(tmp_path / "E")
    np.testing.assert_array_equal((M @ again).matrix, (M @ E).matrix)
    assert "conditional expectation" in repr(again)


def test_embeddings_of_models_are_mapped():
    fit = cme_dask.ConditionalMeanEmbedding(kernel_x=K, kernel_y=L, tol=1e-3, reg=REG).fit(X, Y)
    of_x, of_y = Space.of(fit.model_.x), Space.of(fit.model_.y)
    P = measure(open_sample(X, Y), of_x, of_y)
    E = P.conditional_expectation(REG)
    agrees(E.T(of_x.embed(AT_X))(AT_Y), fit.model_.embed(AT_X)(AT_Y))
    back = measure(open_sample(Y, X), of_y, of_x).conditional_expectation(REG)
    assert back.T(fit.model_.embed(AT_X)).coef.shape == (7, of_x.rank)
    one = of_x.embed(AT_X, np.full(7, 1 / 7))
    agrees(one.coef, of_x.embed(AT_X).coef.mean(axis=0, keepdims=True))


def test_any_chunks_give_the_same_operators(tmp_path, moments):
    stores = [
        zarr.create_array(str(tmp_path / name), data=rows, chunks=(37, rows.shape[1]))
        for name, rows in {"x": X, "y": Y}.items()
    ]
    other = measure(open_sample(*stores), SPACE_X, SPACE_Y, functions_x={"f": f})
    for one, two in (
        (other.conditional_expectation(REG), moments.conditional_expectation(REG)),
        (other.multiplication("f", REG), moments.multiplication("f", REG)),
    ):
        np.testing.assert_array_equal(one.matrix, two.matrix)
    assert other.report.rows == N


# Bad input


def test_operators_of_different_spaces_are_refused(moments, prior):
    E = moments.conditional_expectation(REG)
    with pytest.raises(DataError, match="maps to the domain of A, but their columns are"):
        E @ E
    with pytest.raises(DataError, match="between the same spaces, but their columns are"):
        E + E.T
    with pytest.raises(DataError, match="maps functions of its domain"):
        E(SPACE_X.interpolate(g))
    with pytest.raises(DataError, match="eigenfunctions need an operator within"):
        E.eig()
    fewer = complete(K, X[:40])
    with pytest.raises(DataError, match=r"other pivots \(\d+ and \d+\)"):
        Operator.identity(fewer) @ E
    wider = complete(kernels.Gaussian(0.9), X)
    with pytest.raises(DataError, match=r"kernels are Gaussian\(length_scale=0\.8\) and .*0\.9\)"):
        Operator.identity(wider) @ E
    with pytest.raises(DataError, match="needs one space of x"):
        moments.density_ratio(measure(open_sample(PRIOR), fewer))
    with pytest.raises(DataError, match="coordinates of shape"):
        E(np.ones(3))
    with pytest.raises(DataError, match="operator or hilbert-schmidt"):
        E.norm("nuclear")
    with pytest.raises(TypeError):
        E @ np.eye(3)
    with pytest.raises(DataError, match="a prior belongs to the space of x"):
        operators.kernel_bayes(open_sample(X, Y), moments.mean("y"), moments)


def test_distances_of_complex_functions_are_those_of_their_coordinates():
    x = np.random.default_rng(0).normal(size=(200, 1))
    spaces = [
        operators.Space.of(PivotedCholesky(kernels.Gaussian(1.0), tol=tol).fit(x))
        for tol in (1e-3, 1e-2)
    ]
    rng = np.random.default_rng(1)
    real = spaces[0].function(rng.normal(size=(2, spaces[0].rank)))
    turned = spaces[0].function(real.coef * (0.6 + 0.8j))
    expected = np.linalg.norm(real.coef[:, None] - turned.coef, axis=2)
    np.testing.assert_allclose(real.distance(turned), expected, rtol=1e-12)
    np.testing.assert_allclose(turned.distance(real), expected.T, rtol=1e-12)
    # A common factor of modulus one is no distance, also where the pivots are others.
    other = spaces[1].function(rng.normal(size=(3, spaces[1].rank)))
    both = spaces[1].function(other.coef * (0.6 + 0.8j))
    np.testing.assert_allclose(turned.distance(both), real.distance(other), rtol=1e-9)


def test_columns_are_taken_by_name_and_labels_are_checked():
    x = pd.DataFrame({"a": X[:, 0], "b": X[:, 1]})
    space = Space.of(PivotedCholesky(K, tol=1e-2).fit(x))
    there, swapped = (measure(open_sample(each), space) for each in (x, x[["b", "a"]]))
    agrees(swapped.mean().coef, there.mean().coef)
    with pytest.raises(DataError, match="the fit had columns a, b of x"):
        measure(open_sample(x.rename(columns={"b": "c"})), space)


def test_functions_have_names_of_their_own():
    """A column of the same name would be taken in their place."""
    sample, spaces = open_sample(X, Y), [PivotedCholesky(K, tol=1e-2).fit(X), SPACE_Y]
    for functions, other in (
        ({"functions_x": {"x1": f}}, "a column"),
        ({"functions_x": {"f": f}, "functions_y": {"f": h}}, "a function of the other variable"),
    ):
        with pytest.raises(DataError, match=f"has the name of {other}"):
            measure(sample, *spaces, **functions)
    both = measure(sample, spaces[0], PivotedCholesky(L, tol=1e-2).fit(Y))
    with pytest.raises(DataError, match="'x0' is a column of x and one of y"):
        both.smooth("x0")


def test_unusable_functions_and_rows_are_refused(moments):
    vanishing = {"1 / x": Reciprocal(lambda x: np.where(x[:, 0] > 0.3, x[:, 0], 1e-12))}
    with pytest.raises(DataError, match=r"divides by f = 1e-12 at the row \[-?\d"):
        measure(open_sample(X), SPACE_X, functions_x=vanishing)
    with pytest.raises(DataError, match="unknown function 'k' of x: declared are 'f'"):
        moments.multiplication("k")
    with pytest.raises(DataError, match="unknown function 'k': there are"):
        moments.smooth("k")
    with pytest.raises(DataError, match="non-negative"):
        moments.conditional_expectation(-1.0)
    with pytest.raises(DataError, match="no variable 'y' was measured, only x"):
        measure(open_sample(X), SPACE_X).conditional_expectation()
    with pytest.raises(DataError, match="the fit had columns z0 of x, these rows have x0, x1"):
        measure(open_sample(X), SPACE_Y)
    with pytest.raises(DataError, match="only rows of x"):
        measure(open_sample(X), SPACE_X, SPACE_Y)
    with pytest.raises(DataError, match="functions of y need"):
        measure(open_sample(X), SPACE_X, functions_y={"h": h})
    for sample in (X, None):
        with pytest.raises(DataError, match="must come from open_sample"):
            measure(sample, SPACE_X)
    with pytest.raises(DataError, match="a space needs a basis"):
        measure(open_sample(X), K)
    with pytest.raises(DataError, match="must return finite numbers"):
        SPACE_X.interpolate(lambda x: x)
    with pytest.raises(DataError, match="weights of 7 points"):
        SPACE_X.embed(AT_X, np.ones(3))
    with pytest.raises(DataError, match="must return finite numbers"):
        Operator.interpolate(lambda x, y: 1.0, SPACE_X, SPACE_Y)
    E = moments.conditional_expectation(REG)
    away = measure(open_sample(PRIOR + 60.0), SPACE_X)
    with pytest.raises(DataError, match="positive at no pivot"):
        operators.bayes(E, away, open_sample(Y))


def test_a_damaged_file_is_refused(moments):
    state = moments.conditional_expectation(REG).to_state()
    arrays = state.arrays | {"matrix": state.arrays["matrix"][:, 1:]}
    with pytest.raises(StoreError, match=re.escape("array 'matrix' should be")):
        MODELS["Operator"].from_state(replace(state, arrays=arrays))
