import dataclasses
import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path

import array_api_strict
import numpy as np
import oracle_kernels as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask.errors import DataError
from cme_dask.kernels import (
    KERNELS,
    MAX_DEPTH,
    Categorical,
    Columns,
    Custom,
    Delta,
    Gaussian,
    Kernel,
    Laplace,
    Linear,
    Matern,
    Polynomial,
    Product,
    RationalQuadratic,
    Scaled,
    Standard,
    Stationary,
    Sum,
    Transform,
    TransformedKernel,
    from_dict,
)

EPS = np.finfo(float).eps


def _ones_block(X, Z):
    return np.ones((len(X), len(Z)))


def _ones_diagonal(X):
    return np.ones(len(X))


CUSTOM = Custom("ones", _ones_block, _ones_diagonal)


def cases(d):
    """Pairs of a kernel and its oracle on d columns."""
    ard = tuple(np.linspace(0.5, 2.0, d))
    for scale in (0.7, ard):
        yield Gaussian(scale), lambda X, Z, s=scale: oracle.gaussian(X, Z, s)
        yield Laplace(scale), lambda X, Z, s=scale: oracle.laplace(X, Z, s)
        for nu in (0.5, 1.5, 2.5):
            yield Matern(scale, nu), lambda X, Z, s=scale, nu=nu: oracle.matern(X, Z, s, nu)
        for alpha in (0.4, 1e6):
            yield (
                RationalQuadratic(scale, alpha),
                lambda X, Z, s=scale, a=alpha: oracle.rational_quadratic(X, Z, s, a),
            )
    yield Delta(), oracle.delta
    yield Linear(), oracle.linear
    yield Linear(2.0), lambda X, Z: oracle.linear(X, Z, 2.0)
    yield Polynomial(1), lambda X, Z: oracle.polynomial(X, Z, 1)
    yield Polynomial(3, 0.5, 0.1), lambda X, Z: oracle.polynomial(X, Z, 3, 0.5, 0.1)


CASES = [pytest.param(k, f, d, id=f"{k!r}-{d}") for d in (1, 3, 10) for k, f in cases(d)]
BOUNDED = [case for case in CASES if case.values[0].upper_bound is not None]  # not inner products
SIMPLE = [Gaussian(0.7), Laplace(0.7), Matern(0.7, 0.5), Matern(0.7, 1.5), Matern(0.7, 2.5)]
SIMPLE += [RationalQuadratic(0.7, 0.4), Delta(), Linear(1.0), Polynomial(2)]
COMPOSED = [
    Gaussian(0.7) + 0.5 * Linear(),
    (Gaussian(0.7) + Delta()) * Laplace(2.0),
    2.0 * Gaussian((0.3, 2.0))[0, 2] * Matern(1.0, 1.5).on(1),
    (Gaussian(1.0) * Delta()[1])[2, 0],
]
CATEGORICAL = [Categorical(0.7), Categorical((0.5, 1.0, 2.0)) + Gaussian(1.0)]


def sample(d, n=40, seed=0, offset=0.0):
    """Rows with duplicates, and pivots of which some are rows."""
    X = np.random.default_rng(seed).normal(size=(n, d)) + offset
    X[n // 2 : n // 2 + 3] = X[:3]
    Z = np.concatenate([X[:9], X[9:14] + 0.3])
    return X, Z


@pytest.mark.parametrize("kernel", SIMPLE[:6], ids=repr)
def test_no_square_of_a_value_is_subnormal(kernel):
    """At any distance; many processors take far longer for products with these."""
    X = np.concatenate([np.linspace(0.0, 60.0, 4001), np.geomspace(60.0, 1e9, 2000)])[:, None]
    Z = np.array([[0.0], [0.3]])
    for values in (kernel(X, Z), kernel.formula(np, X, Z)):
        assert ((values == 0.0) | (values**2 >= np.finfo(float).tiny)).all()
        np.testing.assert_allclose(values[0, 0], 1.0, 2 * EPS)


def radius(kernel, X, Z):
    """Return max |u|^2 over scaled rows about the pivots' mean: rounding grows with it."""
    scale = np.asarray(getattr(kernel, "length_scale", 1.0))
    return max(float((((A - Z.mean(axis=0)) / scale) ** 2).sum(axis=1).max()) for A in (X, Z))


@pytest.mark.parametrize(("kernel", "slow", "d"), CASES)
def test_block_equals_oracle(kernel, slow, d):
    X, Z = sample(d)
    expected = slow(X, Z)
    # Rounding of r^2 is relative to |u|^2, or to r |u| (Laplace, Matern with nu = 1/2):
    # 20 eps (1 + max |u|^2) covers both, the exponential and the sum over columns. Inner products
    # lose eps against |x| |z|, which the same number bounds, raised to the degree.
    size = radius(kernel, X, Z) if kernel.upper_bound else float(np.abs(expected).max())
    np.testing.assert_allclose(kernel(X, Z), expected.astype(float), 0, 20 * EPS * (1 + size))
    np.testing.assert_allclose(
        kernel.diagonal(X), np.diag(slow(X, X)).astype(float), 0, 20 * EPS * (1 + size)
    )


@pytest.mark.parametrize("offset", [1e3, 1e6])
@pytest.mark.parametrize(("kernel", "slow", "d"), BOUNDED)
def test_offsets_cost_no_digits(kernel, slow, d, offset):
    # The oracle sees the same rounded rows, whose differences float64 holds exactly. So the
    # tolerance is that of the test above: an offset adds nothing to it.
    X, Z = sample(d, offset=offset)
    tolerance = 20 * EPS * (1 + radius(kernel, X, Z))
    np.testing.assert_allclose(kernel(X, Z), slow(X, Z).astype(float), 0, tolerance)


@pytest.mark.parametrize("d", [1, 3, 10])
@pytest.mark.parametrize("kernel", [Gaussian(0.7), Matern(0.7, 1.5), Matern(0.7, 2.5)], ids=repr)
def test_relative_error_of_kernels_by_products(kernel, d):
    X, Z = sample(d, 300)
    nu = getattr(kernel, "nu", None)
    expected = oracle.matern(X, Z, 0.7, nu) if nu else oracle.gaussian(X, Z, 0.7)
    error = np.abs(kernel(X, Z) / expected - 1).max()
    assert error < 20 * EPS * (1 + radius(kernel, X, Z))


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("d", [1, 3, 10])
@pytest.mark.parametrize("kernel", [Laplace(0.01), Matern(0.01, 0.5), Delta()])
def test_equal_rows_give_exactly_one(kernel, d, offset):
    X, Z = sample(d, offset=offset)
    equal = oracle.delta(X, Z) == 1.0
    assert equal.sum() >= 12
    assert (kernel(X, Z)[equal] == 1.0).all()


@pytest.mark.parametrize("kernel", SIMPLE + COMPOSED, ids=repr)
def test_symmetric_positive_semidefinite(kernel):
    X, _ = sample(3)
    K = kernel(X, X)
    size = float(np.abs(K).max())
    np.testing.assert_allclose(K, K.T, 0, 1e-13 * size)
    np.testing.assert_allclose(np.diag(K), kernel.diagonal(X), 0, 1e-13 * size)
    assert np.linalg.eigvalsh(K / size).min() >= -1e-10 * len(X)
    if kernel.upper_bound is not None:
        assert (kernel.diagonal(X) <= kernel.upper_bound).all()
        assert (kernel(X, X) <= kernel.upper_bound * (1 + 4 * EPS)).all()


@pytest.mark.parametrize("d", [1, 2, 4, 10, 100])
@pytest.mark.parametrize(
    "make",
    [Gaussian, lambda length: RationalQuadratic(length, 0.37)],
    ids=["Gaussian", "RationalQuadratic"],
)
def test_rounding_lifts_no_value_above_one(make, d):
    rng = np.random.default_rng(d)
    like = rng.random((300, 1))  # equal columns add up the most rounding
    for X in (np.tile(like, (1, d)), rng.normal(size=(300, d)), rng.standard_cauchy((300, d))):
        for length in (0.01, 0.3, 7.0):
            logs = np.empty((300, 300))
            make(length).evaluator(X, log=True)(X, logs)
            assert logs.max() <= 0.0
            assert make(length)(X, X).max() <= 1.0


def test_values_at_far_rows_do_not_depend_on_the_others():
    rng = np.random.default_rng(0)
    X, Z = rng.normal(size=(200, 3)), rng.normal(size=(20, 3))
    far = np.concatenate([X, [[1e7, -3e6, 2e6]]])  # of which rounding is large
    Z[:5] = X[:5]
    for kernel in (Gaussian(0.7), RationalQuadratic(0.7, 0.37)):
        # One product with the same places of the rows: its last bits depend on these.
        expected = kernel(np.concatenate([X, X[:1]]), Z)[:-1]
        np.testing.assert_array_equal(kernel(far, Z)[:-1], expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("far", [1e100, 1e155, 1e300])
@pytest.mark.parametrize(
    "make",
    [Gaussian, Laplace, lambda scale: RationalQuadratic(scale, 0.5)]
    + [lambda scale, nu=nu: Matern(scale, nu) for nu in (0.5, 1.5, 2.5)],
)
def test_rows_whose_squares_overflow_are_far(make, far):
    X, Z = np.array([[far, 0.0], [0.3, -far], [0.3, 0.1]]), np.array([[0.0, 0.0], [far, 0.0]])
    for scale in (0.7, (0.7, 1e5)):
        kernel, out = make(scale), np.empty((2, 3))
        kernel.evaluator(Z)(X, out)
        for values in (kernel(X, Z), out.T):
            np.testing.assert_allclose(values[2, 0], kernel(X[2:], Z[:1])[0, 0], rtol=1e-14)
            assert values[0, 1] == 1.0
            assert (values[[0, 1, 1, 2], [0, 0, 1, 1]] < 1e-90).all()


def test_far_rows_of_one_column_equal_themselves():
    X = 10.0 ** np.arange(10)[:, None]  # 10^7 lengths from their mean and more: pivots, if greedy
    assert (np.diag(Gaussian(0.7)(X, X)) == 1.0).all()


def test_matern_half_is_laplace_in_one_column_only():
    X, Z = sample(1)
    np.testing.assert_allclose(Matern(0.5, 0.5)(X, Z), Laplace(0.5)(X, Z), 1e-14)
    X, Z = sample(3)
    assert np.abs(Matern(0.5, 0.5)(X, Z) - Laplace(0.5)(X, Z)).max() > 0.01


def test_rational_quadratic_by_hand():
    X, Z = sample(3)
    squared = ((X[:, None] - Z[None]) ** 2).sum(axis=-1)
    np.testing.assert_allclose(RationalQuadratic(1.0, 1.0)(X, Z), 1 / (1 + squared / 2), 1e-13)
    np.testing.assert_allclose(RationalQuadratic(1.0, 1e14)(X, Z), Gaussian(1.0)(X, Z), 1e-11)


def test_composition_by_hand():
    X, Z = sample(3)
    g, lin = oracle.gaussian(X, Z, 0.7), oracle.linear(X, Z)
    close = {"rtol": 1e-13, "atol": 1e-13}
    np.testing.assert_allclose((Gaussian(0.7) + 0.5 * Linear())(X, Z), g + lin / 2, **close)
    np.testing.assert_allclose((Gaussian(0.7) * Linear() * 3)(X, Z), 3 * g * lin, **close)
    part = oracle.gaussian(X[:, [2, 0]], Z[:, [2, 0]], (0.3, 2.0))
    np.testing.assert_allclose(Gaussian((0.3, 2.0))[2, 0](X, Z), part, **close)
    assert Gaussian(1.0)[2, 0] == Gaussian(1.0).on([2, 0]) == Gaussian(1.0)[[2, 0]]
    assert np.float64(2.0) * Gaussian(1.0) == Gaussian(1.0) * 2 == Scaled(2.0, Gaussian(1.0))


@pytest.mark.parametrize("kernel", SIMPLE + COMPOSED, ids=repr)
def test_array_api_strict(kernel):
    X, Z = sample(3)
    xs, zs = array_api_strict.asarray(X), array_api_strict.asarray(Z)
    block, diagonal = kernel(xs, zs), kernel.diagonal(xs)
    assert type(block) is type(diagonal) is type(xs)
    np.testing.assert_array_equal(np.asarray(block), kernel(X, Z))
    np.testing.assert_array_equal(np.asarray(diagonal), kernel.diagonal(X))


@pytest.mark.parametrize("kernel", [*SIMPLE, *COMPOSED, Gaussian((1.0, 2.0, 3.0))], ids=repr)
def test_float32_stays_float32(kernel):
    X, Z = (A.astype(np.float32) for A in sample(3))
    assert kernel(X, Z).dtype == kernel.diagonal(X).dtype == np.float32


@pytest.mark.parametrize("kernel", [*SIMPLE, *COMPOSED, CUSTOM], ids=repr)
def test_pickle(kernel):
    again = pickle.loads(pickle.dumps(kernel))  # noqa: S301 (our own bytes, as Dask sends them)
    assert again == kernel
    assert hash(again) == hash(kernel)


@pytest.mark.parametrize("kernel", [*SIMPLE, *COMPOSED, CUSTOM], ids=repr)
def test_an_evaluator_writes_any_block(kernel):
    """Any slices, in any order, and of logarithms where a kernel has them."""
    X, Z = sample(3, n=400)
    wanted = [(kernel.evaluator(Z), kernel(X, Z).T)]
    if kernel.upper_bound is not None:
        with np.errstate(divide="ignore"):
            wanted.append((kernel.evaluator(Z, log=True), np.log(kernel(X, Z)).T))
    for evaluator, expected in wanted:
        evaluator.load(X[:7])
        evaluator.write(slice(2, 5), np.empty((len(Z), 3)))  # these rows are forgotten
        evaluator.load(X)
        found = np.full(expected.shape, np.nan)
        for here in (slice(130, 400), slice(0, 1), slice(1, 130)):
            evaluator.write(here, found[:, here])
        np.testing.assert_allclose(found, expected, 1e-12, 1e-14)


def test_no_rows():
    _, Z = sample(3)
    for kernel in [*SIMPLE, *COMPOSED, CUSTOM]:
        assert kernel(Z[:0], Z).shape == (0, len(Z))
        assert kernel(Z, Z[:0]).shape == (len(Z), 0)
        assert kernel.diagonal(Z[:0]).shape == (0,)


# Round trips and algebra, over generated kernels.

positive = st.floats(1e-3, 1e3)
length_scales = positive | st.lists(positive, min_size=3, max_size=3).map(tuple)
leaves = st.one_of(
    st.builds(Gaussian, length_scales),
    st.builds(Laplace, length_scales),
    st.builds(Matern, length_scales, st.sampled_from([0.5, 1.5, 2.5])),
    st.builds(RationalQuadratic, length_scales, positive),
    st.just(Delta()),
    st.builds(Linear, st.floats(0, 10)),
    st.builds(Polynomial, st.integers(1, 3), st.floats(0, 10), positive),
    st.builds(lambda j: Gaussian(1.0)[j], st.integers(0, 2)),
)
kernels = st.recursive(
    leaves,
    lambda k: (
        st.builds(Sum, k, k)
        | st.builds(Product, k, k)
        | st.builds(Scaled, positive, k)
        | st.builds(lambda a, p: Columns(a, p), k, st.permutations([0, 1, 2]))
    ),
    max_leaves=6,
)
quick = settings(max_examples=60)


@quick
@given(kernels)
def test_round_trips(kernel):
    d = kernel.to_dict()
    assert from_dict(json.loads(json.dumps(d, allow_nan=False))) == kernel
    assert eval(repr(kernel), dict(KERNELS)) == kernel  # noqa: S307 (our own text)
    kernel.check(3)


@quick
@given(kernels, kernels, positive)
def test_algebra(a, b, c):
    X, Z = sample(3, 8)
    np.testing.assert_array_equal((a + b)(X, Z), a(X, Z) + b(X, Z))
    np.testing.assert_array_equal((a * b)(X, Z), a(X, Z) * b(X, Z))
    np.testing.assert_array_equal((c * a)(X, Z), c * a(X, Z))
    np.testing.assert_array_equal((a + b)(X, Z), (b + a)(X, Z))
    np.testing.assert_array_equal(a[2, 0, 1](X, Z), a(X[:, [2, 0, 1]], Z[:, [2, 0, 1]]))
    np.testing.assert_array_equal((a * b).diagonal(X), a.diagonal(X) * b.diagonal(X))
    bounds = a.upper_bound, b.upper_bound
    if None in bounds:
        assert (a + b).upper_bound is (a * b).upper_bound is None
    else:
        assert (a + b).upper_bound == sum(bounds)
        assert (a * b).upper_bound == bounds[0] * bounds[1]
        assert (c * a)[0].upper_bound == c * bounds[0]


def test_repr():
    assert repr(Gaussian(0.3)) == "Gaussian(length_scale=0.3)"
    assert (
        repr(Gaussian(0.3) + 0.5 * Linear())
        == "Gaussian(length_scale=0.3) + 0.5 * Linear(offset=0.0)"
    )
    assert repr((Delta() + Delta()) * Delta()[0, 2]) == "(Delta() + Delta()) * Delta()[0, 2]"
    assert repr(CUSTOM) == "Custom(name='ones')"


def test_custom():
    X, Z = sample(3)
    kernel = CUSTOM + Gaussian(1.0)
    assert kernel.to_dict()["left"] == {"kernel": "Custom", "name": "ones"}
    assert from_dict(kernel.to_dict(), {"ones": CUSTOM}) == kernel
    np.testing.assert_array_equal(kernel(X, Z), 1.0 + Gaussian(1.0)(X, Z))
    with pytest.raises(DataError, match=r"'ones' is a user's own and was not supplied"):
        from_dict(kernel.to_dict(), {"other": CUSTOM})
    with pytest.raises(DataError, match="must be a kernel"):
        from_dict(CUSTOM.to_dict(), {"ones": _ones_block})


@pytest.mark.parametrize(
    ("block", "diagonal", "message"),
    [
        (lambda X, Z: np.ones((len(Z), len(X))), _ones_diagonal, r"shape \(40, 14\), got \(14, 40"),
        (lambda X, Z: 1.0, _ones_diagonal, r"shape \(40, 14\), got float"),
        (lambda X, Z: np.full((40, 14), np.nan), _ones_diagonal, "aren't finite"),
        (_ones_block, lambda X: np.ones((40, 1)), r"shape \(40,\), got \(40, 1\)"),
        (_ones_block, lambda X: np.full(40, np.inf), "aren't finite"),
    ],
)
def test_custom_returns_are_checked(block, diagonal, message):
    X, Z = sample(3)
    kernel = Custom("mine", block, diagonal)
    with pytest.raises(DataError, match=message):
        kernel.diagonal(X) + kernel(X, Z)[:, 0]


def test_private_kernels_are_not_saved():
    class _Mine(Linear):
        pass

    with pytest.raises(DataError, match="rename the class"):
        _Mine().to_dict()


@pytest.mark.parametrize("kernel", [*SIMPLE, *COMPOSED, *CATEGORICAL, CUSTOM], ids=repr)
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_evaluators_write_what_the_formula_says(kernel, offset):
    X, Z = sample(3, offset=offset)
    block, formula = kernel(X, Z), kernel.formula(np, X, Z)
    bound = kernel.upper_bound or float(np.abs(formula).max())
    np.testing.assert_allclose(block, formula, 1e-12, 1e-12 * bound)
    np.testing.assert_allclose(
        kernel.diagonal(X), np.diag(kernel.formula(np, X, X)), 1e-12, 1e-12 * bound
    )


# Derivatives with respect to the continuous parameters.

TRACED = [
    Gaussian(0.7),
    Laplace((0.5, 1.0, 2.0)) + RationalQuadratic(0.7, 0.4) + Categorical(0.7),
    Matern(0.7, 0.5) + Matern(0.7, 1.5) * Matern((0.5, 1.0, 2.0), 2.5),
    2.0 * Gaussian((0.3, 2.0))[0, 2] * Polynomial(3, 0.5, 0.1) + Linear(2.0).on(1),
    TransformedKernel(Gaussian((0.5, 1.0, 2.0)), Transform([Standard(1.0, 2.0)] * 3)),
]


def finite_differences(kernel, X, Z):
    """Derivatives of the block, by central differences of relative width 1e-5."""
    values, found = np.array(kernel.parameters), []
    for i, value in enumerate(values):
        step = 1e-5 * max(value, 1.0)
        up, down = (values + sign * step * (np.arange(len(values)) == i) for sign in (1, -1))
        blocks = [kernel.with_parameters(v).formula(np, X, Z) for v in (up, down)]
        found.append((blocks[0] - blocks[1]) / (2 * step))
    return np.reshape(found, (len(values), len(X), len(Z)))


TRACING = """
import sys
import jax, numpy as np
from test_kernels import TRACED, sample
X, Z = sample(3, 8)
weights = np.random.default_rng(1).normal(size=(len(X), len(Z)))
found = {}
with jax.enable_x64(True):
    rows, points = jax.numpy.asarray(X), jax.numpy.asarray(Z)
    for i, kernel in enumerate(TRACED):
        def weighted(values):
            traced = kernel.with_parameters(values)
            return (weights * traced.formula(jax.numpy, rows, points)).sum()
        gradient = jax.jit(jax.grad(weighted))
        found[str(i)] = np.asarray(gradient(jax.numpy.asarray(kernel.parameters)))
np.savez(sys.argv[1], **found)
"""


def test_automatic_derivatives_equal_finite_differences(tmp_path):
    """In a process of its own: JAX has threads, and other tests fork."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    run = [sys.executable, "-c", TRACING, str(tmp_path / "found.npz")]
    subprocess.run(run, check=True, cwd=Path(__file__).parent)
    X, Z = sample(3, 8)
    weights = np.random.default_rng(1).normal(size=(len(X), len(Z)))
    with np.load(tmp_path / "found.npz") as found:
        for i, kernel in enumerate(TRACED):
            expected = np.einsum("pnm,nm->p", finite_differences(kernel, X, Z), weights)
            scale = max(1.0, float(np.abs(kernel(X, Z)).max()))
            np.testing.assert_allclose(found[str(i)], expected, 1e-5, 1e-6 * scale)


@pytest.mark.parametrize("scale", [0.7, (0.5, 1.0, 2.0)])
def test_derivatives_of_the_gaussian_in_closed_form(scale):
    X, Z = sample(3)
    found = Gaussian(scale).gradient(X, Z)
    np.testing.assert_allclose(found, finite_differences(Gaussian(scale), X, Z), 1e-7, 1e-9)


@pytest.mark.parametrize(
    "kernel",
    [
        Gaussian(0.7),
        Gaussian((0.4, 1.0, 2.0)),
        Laplace(0.8),
        Laplace((0.4, 1.0, 2.0)),
        *(Matern((0.4, 1.0, 2.0), nu) for nu in (0.5, 1.5, 2.5)),
        RationalQuadratic(1.2, 0.7),
        Categorical(0.9),
        Categorical((0.4, 1.0, 2.0)),
        Linear(0.5),
        Polynomial(3, 0.4, 0.7),
        2.0 * Gaussian(0.5)[1] + Matern((1.0, 2.0), 1.5)[0, 2] * Linear(0.3),
        TransformedKernel(Gaussian((0.4, 1.0, 2.0)), Transform((Standard(0.1, 2.0),) * 3)),
        Delta(),
    ],
    ids=repr,
)
def test_weighted_gradients_in_closed_form_equal_differences_of_the_formula(kernel):
    rng = np.random.default_rng(2)
    X, Z = rng.normal(size=(7, 3)), rng.normal(size=(5, 3))
    Z[0] = X[0]
    for left, right in ((X, Z), (X, X), (np.round(X), np.round(Z))):
        weights = rng.normal(size=(len(left), len(right)))
        found = kernel.weighted_gradient(left, right, weights)
        expected = Kernel.weighted_gradient(kernel, left, right, weights)
        assert len(found) == len(kernel.parameters)
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-9)


def test_parameters_and_back():
    for kernel in TRACED:
        again = kernel.with_parameters(kernel.parameters)
        assert again == kernel
        with pytest.raises(DataError, match="parameters expected"):
            kernel.with_parameters((*kernel.parameters, 1.0))
    kernel = 2.0 * Gaussian((0.3, 4.0))[0, 2] * Matern(1.0, 1.5).on(1) + Polynomial(3, 0.5, 0.1)
    assert kernel.parameters == (2.0, 0.3, 4.0, 1.0, 0.5, 0.1)
    changed = kernel.with_parameters((3.0, 0.4, 5.0, 2.0, 0.6, 0.2))
    expected = 3.0 * Gaussian((0.4, 5.0))[0, 2] * Matern(2.0, 1.5).on(1) + Polynomial(3, 0.6, 0.2)
    assert changed == expected


BAD_NUMBERS = [-1.0, 0.0, np.inf, np.nan, True, "1", None, 10**400, 1j, [], [[1.0]], [1.0, -1.0]]


@pytest.mark.parametrize("value", [*BAD_NUMBERS, [True], {}, {"1": 1}, np.ones((2, 2)), Delta()])
@pytest.mark.parametrize(
    "build", [Gaussian, Laplace, lambda x: Matern(x, 0.5), lambda x: RationalQuadratic(x, 1.0)]
)
def test_bad_length_scales(build, value):
    with pytest.raises(DataError, match="length_scale must be positive and finite, got "):
        build(value)


@pytest.mark.parametrize("value", BAD_NUMBERS)
@pytest.mark.parametrize(
    "build",
    [
        lambda x: RationalQuadratic(1.0, x),
        lambda x: Scaled(x, Delta()),
        lambda x: Polynomial(2, 1.0, x),
        lambda x: Linear(-1.0 if x == 0.0 else x),
        lambda x: Polynomial(2, -1.0 if x == 0.0 else x),
        lambda x: Matern(1.0, x),
        lambda x: Polynomial(-2 if x == 10**400 else x),
    ],
)
def test_bad_numbers(build, value):
    with pytest.raises(DataError, match="must be"):
        build(value)


def test_message_names_the_value():
    with pytest.raises(DataError, match=r"^length_scale must be positive and finite, got -1\.0$"):
        Gaussian(-1.0)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Matern(1.0, 1.0),
        lambda: Polynomial(1.5),
        lambda: Polynomial(2.0),
        lambda: -2.0 * Delta(),
        lambda: True * Delta(),
        lambda: Sum(Delta(), 1.0),
        lambda: Product(1.0, Delta()),
        lambda: Scaled(1.0, "Delta"),
        lambda: Columns(None, (0,)),
        lambda: Delta()[-1],
        lambda: Delta()[0, 0],
        lambda: Delta()[1.0],
        lambda: Delta()[True],
        lambda: Delta()[0:2],
        lambda: Delta().on([]),
        lambda: Delta().on("01"),
        lambda: Custom("", _ones_block, _ones_diagonal),
        lambda: Custom(3, _ones_block, _ones_diagonal),
        lambda: Custom("x", None, _ones_diagonal),
        lambda: Custom("x", _ones_block, 1.0),
    ],
)
def test_bad_constructions(build):
    with pytest.raises(DataError, match="must be"):
        build()


def test_other_types_do_not_compose():
    for build in (lambda: Delta() + 1.0, lambda: Delta() * "2", lambda: list(Delta())):
        with pytest.raises(TypeError):
            build()
    with pytest.raises(TypeError):
        Kernel()


@pytest.mark.parametrize(
    ("kernel", "n_columns", "message"),
    [
        (Gaussian((1.0, 2.0)), 3, "Gaussian has 2 length scales but the data have 3 columns"),
        (Gaussian([1.0]), 2, "1 length scales"),
        (Delta()[0, 3], 3, "column 3 but the data have 3 columns: use indices from 0 to 2"),
        (Delta() + Gaussian((1.0, 2.0)), 1, "length scales"),
        (Gaussian((1.0, 2.0)) * Delta(), 1, "length scales"),
        (2.0 * Laplace((1.0, 2.0)), 1, "length scales"),
        (Gaussian((1.0, 2.0))[0], 3, "Gaussian has 2 length scales but the data have 1 columns"),
    ],
)
def test_check_refuses(kernel, n_columns, message):
    with pytest.raises(DataError, match=message):
        kernel.check(n_columns)


def test_check_accepts():
    for kernel in [*SIMPLE, *COMPOSED, CUSTOM, Gaussian((1.0, 2.0, 3.0))]:
        kernel.check(3)


def _deep(depth):
    d = {"kernel": "Delta"}
    for _ in range(depth):
        d = {"kernel": "Scaled", "scale": 1.0, "base": d}
    return d


@pytest.mark.parametrize(
    ("d", "message"),
    [
        (None, "must be described by a dict, got NoneType"),
        ([], "must be described by a dict, got list"),
        ({}, "unknown kernel None"),
        ({"kernel": "os.system"}, "unknown kernel 'os.system'"),
        ({"kernel": "Kernel"}, "unknown kernel"),
        ({"kernel": "_Pair", "left": {}, "right": {}}, "unknown kernel"),
        ({"kernel": ["Gaussian"]}, "unknown kernel"),
        ({"kernel": "Gaussian"}, "exactly the keys"),
        ({"kernel": "Gaussian", "length_scale": 1.0, "x": 1}, "exactly the keys"),
        ({"kernel": "Gaussian", "length_scale": 1.0, 3: 1}, "exactly the keys"),
        ({"kernel": "Gaussian", "length_scale": "1.0"}, "length_scale must be positive"),
        ({"kernel": "Gaussian", "length_scale": {"kernel": "Delta"}}, "length_scale must be"),
        ({"kernel": "Matern", "length_scale": 1.0, "nu": 1.0}, "nu must be"),
        ({"kernel": "Sum", "left": {"kernel": "Delta"}, "right": 1.0}, "right must be a kernel"),
        ({"kernel": "Sum", "left": [{"kernel": "Delta"}], "right": {}}, "unknown kernel"),
        ({"kernel": "Columns", "base": {"kernel": "Delta"}, "columns": "0"}, "column index"),
        ({"kernel": "Custom", "name": ["ones"]}, "was not supplied"),
        ({"kernel": "Custom", "name": "x", "block": "print"}, "exactly the keys"),
        (_deep(MAX_DEPTH + 1), "deep at most"),
    ],
)
def test_hostile_dicts(d, message):
    with pytest.raises(DataError, match=message):
        from_dict(d, {"ones": CUSTOM})


def test_deepest_dict():
    assert from_dict(_deep(MAX_DEPTH)).upper_bound == 1.0


@pytest.mark.parametrize("kernel", SIMPLE, ids=repr)
def test_integers_are_rows_like_any_other(kernel):
    rng = np.random.default_rng(7)
    whole, other = rng.integers(0, 255, size=(2, 6, 3)).astype(np.uint8)
    X, Z = whole.astype(float), other.astype(float)
    np.testing.assert_array_equal(kernel(whole, other), kernel(X, Z))
    np.testing.assert_array_equal(kernel(X, other), kernel(X, Z))
    np.testing.assert_array_equal(kernel.diagonal(whole), kernel.diagonal(X))
    weights = rng.normal(size=(6, 6))
    found = kernel.weighted_gradient(whole, other, weights)
    np.testing.assert_array_equal(found, kernel.weighted_gradient(X, Z, weights))


@pytest.mark.parametrize("far", [1e4, 1e8, 1e12])
@pytest.mark.parametrize(
    "kernel", [Gaussian((0.5, 0.7)), Matern((0.5, 0.7), 0.5), Matern((0.5, 0.7), 2.5)], ids=repr
)
def test_far_rows_cost_gradients_no_digits(kernel, far):
    rng = np.random.default_rng(3)
    X, weights = rng.normal(size=(60, 2)), rng.normal(size=(60, 60))
    X[:2] += far  # near each other, and so far away that a mean would be nowhere near the others
    expected = Kernel.weighted_gradient(kernel, X, X, weights)
    np.testing.assert_allclose(kernel.weighted_gradient(X, X, weights), expected, 1e-6, 1e-6)


def test_many_kernels_are_combined_in_pairs():
    chain = Gaussian(1.0)[0]
    for j in range(1, MAX_DEPTH - 1):
        chain = chain + Gaussian(1.0)[j]
    chain = 2.0 * chain
    assert from_dict(json.loads(json.dumps(chain.to_dict()))) == chain
    message = "nested 100 deep at most: combine many of them in pairs"
    for deeper in (lambda k: k + Gaussian(1.0), lambda k: 2.0 * k, lambda k: k[0]):
        with pytest.raises(DataError, match=message):
            deeper(chain)


@dataclasses.dataclass(frozen=True)
class _Waves(Stationary):
    power: float
    scales: tuple[float, ...]

    def of_squares(self, xp, squares):
        return xp.exp(-self.power * squares)


def test_numbers_of_own_kernels_are_parameters_however_they_are_written():
    kernel = _Waves(1, 2, (0.5, 3.0))
    assert kernel.parameters == (1.0, 2.0, 0.5, 3.0)
    assert kernel.with_parameters((1.0, 4.0, 0.5, 3.0)).power == 4.0
    described = {"kernel": "Waves", "length_scale": 1, "power": 2, "scales": [0.5, 3.0]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "Waves", _Waves)
        assert from_dict(described) == kernel
        assert from_dict(described).parameters == kernel.parameters
