"""Moments of strips: against plain sums, in folds, and on another array library."""

from dataclasses import replace

import array_api_strict as strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask import kernels
from cme_dask.kernels import Scores, Standard, Transform, TransformedKernel
from cme_dask.numerics.basis import LinearBasis, NewtonBasis, eigenbasis
from cme_dask.numerics.moments import (
    FeatureBlock,
    MomentReduction,
    MomentSets,
    MomentSums,
    strip_moments,
)
from cme_dask.numerics.reduction import Strip


def spec_of(X, Y, n_folds):
    sides = (
        FeatureBlock(
            NewtonBasis.from_points(kernels.Matern(1.5, 1.5), X[:70]),
            ("a", "b"),
            {},
            X.mean(axis=0),
        ),
        FeatureBlock(
            NewtonBasis.from_points(kernels.Matern(2.0, 1.5), Y[:5]),
            ("c",),
            {"square": lambda y: y[:, 0] ** 2},
            np.array([0.1, 1.0]),
        ),
    )
    return MomentReduction(sides, n_folds)


def summed(reduction, parts, weights, folds):
    """Partial results of one strip in these folds."""
    strip = Strip(np.arange(len(folds)), parts, weights, _made={reduction.n_folds: folds})
    return reduction.update(reduction.start(parts[0]), strip)


def rows(n, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 2))
    return X, np.sin(X[:, :1]) + 0.5, rng.exponential(size=n), rng.integers(0, 4, n)


@pytest.mark.parametrize("weighted", [False, True])
def test_sets_that_share_their_rows_are_what_each_is_alone(weighted):
    """Coordinates, functions and shifts that are equal for some of the sets only."""
    X, Y, w, folds = rows(5000)
    spec = spec_of(X, Y, 4)
    scores = Scores(np.sort(X[:9, 0]).tolist(), np.linspace(-1.5, 1.5, 9).tolist())
    warped = [
        TransformedKernel(kernels.Gaussian(length), Transform((scores, Standard(0.5, shift))))
        for length, shift in ((1.0, 2.0), (0.7, 2.0), (1.0, 3.0))
    ]
    x, y = spec.features
    sides = [replace(x, basis=NewtonBasis.from_points(kernel, X[:40])) for kernel in warped]
    specs = [spec, *(replace(spec, features=(side, y)) for side in sides)]
    specs.append(replace(spec, features=(sides[0], replace(y, shift=np.zeros(2)))))
    given = (X, Y), w if weighted else None, folds.astype(np.uint8)
    together = summed(MomentSets(tuple(specs)), *given)
    for one, sums in zip(specs, together, strict=True):
        alone, shared = strip_moments(one, *given), one.newton(sums)
        for name in ("gram", "traces", "rows"):
            np.testing.assert_array_equal(getattr(shared, name), getattr(alone, name))
        newton = one.features[0].basis(X)  # which maps the rows itself
        weights = given[1] if weighted else np.ones(len(X))
        plain = (newton * weights[:, None]).T @ newton
        m = newton.shape[1]
        np.testing.assert_allclose(shared.gram.sum(axis=0)[:m, :m], plain, atol=1e-9)


@settings(max_examples=15)
@given(n=st.sampled_from([71, 500, 4096, 4097, 5000, 49152, 49153, 90000]), weighted=st.booleans())
def test_strip_equals_plain_sums_in_every_fold(n, weighted):
    X, Y, w, folds = rows(n)
    w[::7] = 0.0
    spec = spec_of(X, Y, 5)  # the last fold stays empty
    moments = strip_moments(spec, (X, Y), w if weighted else None, folds.astype(np.uint8))
    augmented = np.column_stack(
        [
            spec.features[0].basis(X),
            spec.features[1].basis(Y),
            np.ones(n),
            X - spec.features[0].shift,
            Y - 0.1,
            Y**2 - 1.0,
        ]
    )
    weights = w if weighted else np.ones(n)
    for fold in range(5):
        mine = folds == fold
        plain = (augmented[mine] * weights[mine, None]).T @ augmented[mine]
        assert np.abs(moments.gram[fold] - plain).max() <= 1e-12 * max(1.0, np.abs(plain).max())
        assert moments.rows[fold] == (weights[mine] > 0.0).sum()
        assert moments.traces[fold] == pytest.approx([weights[mine].sum()] * 2, rel=1e-12)


def test_numpy_reads_blocks_where_they_lie():
    """Else it copies rows with gaps between them into its buffer and back."""
    X, Y, _, folds = rows(2000)
    sizes = []
    functions = {"size": lambda y: sizes.append(np.getbufsize()) or y[:, 0]}
    spec = spec_of(X, Y, 4)
    sides = spec.features[0], replace(spec.features[1], functions=functions)
    before = np.getbufsize()
    strip_moments(replace(spec, features=sides), (X, Y), None, folds.astype(np.uint8))
    assert sizes
    assert max(sizes) < 2 * len(X)
    assert np.getbufsize() == before


def test_functions_see_several_sub_blocks_at_once():
    """Calls take the interpreter lock, so there are few; no row is missing or comes twice."""
    X, Y, _, folds = rows(100_000)
    seen = []

    def square(y):
        seen.append(y[:, 0])
        return y[:, 0] ** 2

    spec = spec_of(X, Y, 5)
    spec.features[1].functions["square"] = square
    strip_moments(spec, (X, Y), None, folds.astype(np.uint8))
    assert len(seen) == -(-100_000 // spec.start(X)[0].span) == 3
    assert np.array_equal(np.sort(np.concatenate(seen)), np.sort(Y[:, 0]))


@pytest.mark.parametrize("weighted", [False, True])
def test_another_array_library_gives_the_same(weighted):
    """The code path of GPU arrays: only the array API standard is used."""
    X, Y, w, folds = rows(50_000)  # of which 49,152 are prepared at once
    spec = spec_of(X, Y, 4)
    folds = folds.astype(np.uint8)
    ours = strip_moments(spec, (X, Y), w if weighted else None, folds)
    theirs = strip_moments(
        spec, (strict.asarray(X), strict.asarray(Y)), strict.asarray(w) if weighted else None, folds
    )
    assert np.allclose(ours.gram, theirs.gram, rtol=0, atol=2e-15 * ours.gram.max())
    assert np.allclose(ours.traces, theirs.traces, rtol=1e-13)


def test_moments_add_and_travel_as_arrays():
    X, Y, w, folds = rows(2000)
    spec = spec_of(X, Y, 4)
    folds = folds.astype(np.uint8)
    whole = strip_moments(spec, (X, Y), w, folds)
    halves = [
        strip_moments(spec, (X[s], Y[s]), w[s], folds[s]) for s in (slice(0, 900), slice(900, None))
    ]
    total = halves[0] + halves[1]
    assert np.allclose(total.gram, whole.gram, rtol=1e-12, atol=1e-10)
    assert (total.rows == whole.rows).all()
    back = MomentSums.from_arrays(total.to_arrays(), total.ranks, total.shifts)
    for name in ("gram", "traces", "rows"):
        assert (getattr(back, name) == getattr(total, name)).all()
    rest = total - halves[0]
    assert np.allclose(rest.gram, halves[1].gram, rtol=1e-12, atol=1e-10)
    assert rest.n_rows == len(X) - 900


def test_means_of_columns_and_functions():
    X, Y, w, folds = rows(2000)
    spec = spec_of(X, Y, 4)
    mean = strip_moments(spec, (X, Y), w, folds.astype(np.uint8)).means()
    assert mean.function_means("x") == pytest.approx(np.average(X, axis=0, weights=w), rel=1e-12)
    expected = [np.average(Y[:, 0], weights=w), np.average(Y[:, 0] ** 2, weights=w)]
    assert mean.function_means("y") == pytest.approx(expected, rel=1e-12)
    centred = Y[:, 0] - 0.1
    assert mean.blocks["f(y)", "f(y)"][0, 0] == pytest.approx(
        np.average(centred**2, weights=w), rel=1e-12
    )


def dense(spec, X, Y, w):
    """Values of each block at the rows, and means of products of two of them."""
    x, y = spec.features
    values = {
        "x": x.basis(X),
        "y": y.basis(Y),
        "1": np.ones((len(X), 1)),
        "f(x)": np.hstack([*x.values(X)]) - x.shift,
        "f(y)": np.hstack([*y.values(Y)]) - y.shift,
    }
    share = w / w.sum()
    return values, lambda a, b: (values[a] * share[:, None]).T @ values[b]


@pytest.mark.parametrize(("fold", "without"), [(None, None), (2, None), (None, 1)])
def test_named_blocks_are_means_over_the_rows(fold, without):
    X, Y, w, folds = rows(1500)
    spec = spec_of(X, Y, 4)
    sums = strip_moments(spec, (X, Y), w, folds.astype(np.uint8))
    mine = (np.full(len(X), True) if fold is None else folds == fold) & (folds != without)
    moments = sums.means(fold=fold, without=without)
    _, plain = dense(spec, X[mine], Y[mine], w[mine])
    assert moments.weight == pytest.approx(w[mine].sum(), rel=1e-12)
    for v, other in (("x", "y"), ("y", "x")):
        f, g = f"f({v})", f"f({other})"
        pairs = [
            (moments.blocks[v, v], plain(v, v)),
            (moments.blocks[v, other], plain(v, other)),
            (moments.means[v], plain(v, "1")[:, 0]),
            (moments.blocks[v, f], plain(v, f)),
            (moments.blocks[v, g], plain(v, g)),
            (moments.blocks[f, g], plain(f, g)),
            (moments.means[f], plain(f, "1")[:, 0]),
        ]
        for found, expected in pairs:
            np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_squared_errors_are_those_of_the_rows():
    """Linear in the basis of x and in its first columns, for some functions of y and for all."""
    X, Y, w, folds = rows(1500)
    spec = spec_of(X, Y, 1)
    moments = strip_moments(spec, (X, Y), w, np.zeros_like(folds, dtype=np.uint8)).means()
    rng = np.random.default_rng(3)
    constant, slope, trend = (rng.normal(size=s) for s in (2, (70, 2), (1, 2)))
    plain = constant + spec.features[0].basis(X) @ slope
    functions = np.hstack([*spec.features[1].values(Y)])
    for here in (slice(0, 2), slice(1, 2)):
        for added in (None, trend[:, here]):
            residual = plain[:, here] - functions[:, here]
            residual = residual if added is None else residual + X[:, :1] @ added
            found = moments.squared_error("x", "y", constant[here], slope[:, here], here, added)
            np.testing.assert_allclose(found, np.average(residual**2, 0, w), rtol=1e-10)


def test_sums_change_their_basis_their_shifts_and_their_functions():
    X, Y, w, folds = rows(1500)
    spec = spec_of(X, Y, 4)
    folds = folds.astype(np.uint8)
    sums = strip_moments(spec, (X, Y), w, folds)
    rng = np.random.default_rng(5)
    change, shifts = rng.normal(size=(5, 5)), [rng.normal(size=2), rng.normal(size=2)]
    changed = sums.changed({"y": change}, shifts)
    values, _ = dense(spec, X, Y, w)
    x, y = spec.features
    augmented = np.hstack(
        [values["x"], values["y"] @ change.T, values["1"]]
        + [
            np.hstack([*s.values(part)]) - shift
            for s, part, shift in zip((x, y), (X, Y), shifts, strict=True)
        ]
    )
    scale = np.abs(changed.gram).max()
    for fold in range(4):
        mine = folds == fold
        plain = (augmented[mine] * w[mine, None]).T @ augmented[mine]
        np.testing.assert_allclose(changed.gram[fold], plain, atol=1e-11 * scale)
    fewer = MomentSums.from_arrays(changed.to_arrays(1), changed.ranks, (shifts[0], shifts[1][:1]))
    mean = fewer.means().function_means("y")
    np.testing.assert_array_equal(mean, changed.means().function_means("y")[:1])


def test_newton_basis_by_blocks_equals_one_solve():
    """Ranks around the block length of the triangular solve."""
    X = np.random.default_rng(1).uniform(0, 1, (400, 3))
    for m in (1, 63, 64, 65, 200):
        basis = NewtonBasis.from_points(kernels.Matern(0.5, 1.5), X[:m])
        assert basis.rank == m
        whole = np.linalg.solve(basis.factor, basis.kernel(X, basis.points).T).T
        assert np.abs(basis(X) - whole).max() < 1e-12
        gram = basis.factor @ basis.factor.T
        assert np.abs(gram - basis.kernel(basis.points, basis.points)).max() < 1e-13
        B = basis.biorthogonal  # Algorithm 2: B^T L = I at the pivots
        assert np.abs(B.T @ basis.factor - np.eye(m)).max() < 1e-9


def test_spectral_and_centred_bases_diagonalise():
    X, _, w, _ = rows(1500)
    newton = NewtonBasis.from_points(kernels.Gaussian(0.8), X[:50])
    N, p = newton(X), w / w.sum()
    gram, mean = (N * p[:, None]).T @ N, p @ N
    spectral = LinearBasis(newton, *eigenbasis(gram))
    psi = spectral(X)
    assert np.abs((psi * p[:, None]).T @ psi - np.diag(spectral.eigenvalues)).max() < 1e-14
    assert np.abs(spectral.transform.T @ spectral.transform - np.eye(50)).max() < 1e-13
    assert (np.diff(spectral.eigenvalues) <= 0).all()
    assert np.abs(psi).max() <= spectral.bound + 1e-12
    centred = LinearBasis(newton, *eigenbasis(gram, mean))
    psi = centred(X)
    assert centred.rank == newton.rank - 1
    assert np.abs(p @ psi).max() < 1e-14
    assert np.abs((psi * p[:, None]).T @ psi - np.diag(centred.eigenvalues)).max() < 1e-14
