"""Moments, density ratio, expectations and constraints against the dense oracle."""

import warnings

import numpy as np
import oracle_joint as dense
import oracle_kernels as slow
from conftest import pairwise
from programs import solve_joint

from cme_dask import JointDistribution, kernels
from cme_dask.numerics.problem import Regularization

N, N_QUERY = 240, 25


def kernel_cases(d):
    """Pairs of a kernel and its oracle, with length scales that suit unit columns."""
    l = 0.8 * np.sqrt(d)  # noqa: E741
    ard = tuple(l * (1 + 0.5 * np.arange(d) / d))
    first = [0]
    return {
        "gaussian": (kernels.Gaussian(l), lambda X, Z: slow.gaussian(X, Z, l)),
        "gaussian-ard": (kernels.Gaussian(ard), lambda X, Z: slow.gaussian(X, Z, ard)),
        "laplace": (kernels.Laplace(3 * l), lambda X, Z: slow.laplace(X, Z, 3 * l)),
        "matern12": (kernels.Matern(3 * l, 0.5), lambda X, Z: slow.matern(X, Z, 3 * l, 0.5)),
        "matern32": (kernels.Matern(2 * l, 1.5), lambda X, Z: slow.matern(X, Z, 2 * l, 1.5)),
        "matern52": (kernels.Matern(2 * l, 2.5), lambda X, Z: slow.matern(X, Z, 2 * l, 2.5)),
        "rational": (
            kernels.RationalQuadratic(l, 1.5),
            lambda X, Z: slow.rational_quadratic(X, Z, l, 1.5),
        ),
        "delta": (kernels.Delta(), slow.delta),
        "linear": (kernels.Linear(0.5), lambda X, Z: slow.linear(X, Z, 0.5)),
        "polynomial": (
            kernels.Polynomial(2, 1.0, 0.5),
            lambda X, Z: slow.polynomial(X, Z, 2, 1.0, 0.5),
        ),
        "sum": (
            kernels.Gaussian(l) + 0.5 * kernels.Linear(1.0),
            lambda X, Z: slow.gaussian(X, Z, l) + 0.5 * slow.linear(X, Z, 1.0),
        ),
        "product-columns": (
            kernels.Gaussian(l) * kernels.Matern(2.0, 1.5)[0],
            lambda X, Z: slow.gaussian(X, Z, l) * slow.matern(X[:, first], Z[:, first], 2.0, 1.5),
        ),
        "custom": (
            kernels.Custom("cosine", _cosine, _cosine_diagonal),
            lambda X, Z: np.cos(X[:, :1] - Z[:, :1].T) + 1.0,
        ),
    }


def _cosine(X, Z):
    return 1.0 + np.cos(X[:, :1] - Z[:, :1].T)


def _cosine_diagonal(X):
    return np.full(len(X), 2.0)


def rows(d, discrete, seed=0):
    rng = np.random.default_rng([seed, d])
    X = rng.standard_normal((N, d))
    if discrete:  # equal rows, so that the delta kernel has something to find
        X = rng.integers(0, 3, size=(N, d)).astype(float)
        X[:, 1:] = 0.0
    Y = np.column_stack([np.sin(X[:, 0]), X[:, -1] ** 2]) + 0.5 * rng.standard_normal((N, 2))
    return X, Y


def event(y):
    return (y[:, 0] > 0.2).astype(float)


REGULARIZATIONS = [
    ((1e-6, 1e-6), "two-sided"),
    ((1e-3, 1e-5), "two-sided"),
    (1e-6, "single"),
    (0.0, "two-sided"),
]


@pairwise(
    name=list(kernel_cases(1)),
    d=[1, 3, 10],
    tol=[1e-2, 1e-4, 1e-6],
    weighted=[False, True],
)
def test_everything_against_the_oracle(name, d, tol, weighted):
    kernel, slow_kernel = kernel_cases(d)[name]
    X, Y = rows(d, name == "delta")
    weights = np.random.default_rng(1).exponential(size=N) if weighted else None
    kernel_y, slow_y = kernels.Gaussian(1.1), lambda A, B: slow.gaussian(A, B, 1.1)
    fit = JointDistribution(kernel_x=kernel, kernel_y=kernel_y, tol=tol, n_folds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank-deficient kernels say so
        fit.fit(X, Y, weights=weights, functions={"event": event}, scheduler="synchronous")
    px, py = fit.basis_x_.pivots, fit.basis_y_.pivots
    f = np.column_stack([Y, event(Y)])
    m = dense.means(slow_kernel, slow_y, X, Y, px, py, weights, f)
    sides = fit.sides_
    mean = fit.moments_.means()

    def close(ours, theirs, tolerance):
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs)

    close(mean.blocks["x", "x"], m["xx"], 1e-12)
    close(mean.blocks["y", "y"], m["yy"], 1e-12)
    close(mean.blocks["y", "x"], m["yx"], 1e-12)
    close(mean.means["x"], m["cx"], 1e-12)
    close(mean.means["y"], m["cy"], 1e-12)
    close(mean.function_means("y"), m["f"], 1e-12)
    assert abs(fit.basis_x_.trace_error - m["tau_x"]) <= 1e-12
    assert abs(fit.basis_y_.trace_error - m["tau_y"]) <= 1e-12

    Xq, Yq = X[:N_QUERY] + 0.0, Y[N_QUERY : 2 * N_QUERY]
    Nx, Ny = sides[0].basis(Xq), sides[1].basis(Yq)
    Mx, My = dense.newton(slow_kernel, Xq, px), dense.newton(slow_y, Yq, py)
    for constraint in ("none", "normalized"):
        for reg, form in REGULARIZATIONS:
            parsed = Regularization.parse(reg, form)
            solution = solve_joint(mean, constraint, parsed)
            pair = (parsed.y, parsed.x) if form == "two-sided" else parsed.x
            H = dense.coefficients(m, constraint, pair, form)
            g = dense.density_ratio(Mx, My, H)
            ours = 1 + (Nx @ solution.transform_x) @ solution.coef.T @ (
                solution.transform_y.T @ Ny.T
            )
            assert np.abs(ours - g).max() <= 1e-8 * np.abs(g).max()
            constant, slope = solution.answer(mean, 0)
            expected = dense.expect(Mx, H, m)
            got = constant + (Nx @ solution.transform_x) @ slope
            assert np.abs(got - expected).max() <= 1e-8 * np.abs(expected).max()
            if constraint == "normalized":
                full = solution.transform_y @ solution.coef @ solution.transform_x.T
                cx, cy = mean.means["x"], mean.means["y"]
                assert (np.abs(cy @ full) <= 1e-12 * (np.abs(cy) @ np.abs(full))).all()
                assert (np.abs(full @ cx) <= 1e-12 * (np.abs(full) @ np.abs(cx))).all()


@pairwise(
    regularization=REGULARIZATIONS,
    constraint=["none", "normalized"],
    weighted=[False, True],
)
def test_public_answers_on_many_strips_and_folds(constraint, regularization, weighted):
    """The path that users take: three strips, ten folds, both directions, columns with offsets."""
    n, rng, (reg, form) = 9001, np.random.default_rng(5), regularization
    X = rng.standard_normal((n, 2)) + np.array([3.0, -500.0])
    Y = np.column_stack([np.sin(X[:, 0]), X[:, 1]]) + 0.5 * rng.standard_normal((n, 2))
    weights = rng.exponential(size=n) if weighted else None
    px, py = X[:30], Y[:25]
    slow_x = lambda A, B: slow.gaussian(A, B, 0.9)  # noqa: E731
    slow_y = lambda A, B: slow.matern(A, B, 2.0, 1.5)  # noqa: E731
    fit = JointDistribution(
        kernel_x=kernels.Gaussian(0.9),
        kernel_y=kernels.Matern(2.0, 1.5),
        pivots=(px, py),
        constraint=constraint,
        reg=reg,
        reg_form=form,
    ).fit(X, Y, weights=weights, functions={"event": event}, scheduler="threads", workers=2)
    f = np.column_stack([Y, event(Y)])
    m = dense.means(slow_x, slow_y, X, Y, px, py, weights, f)
    parsed = Regularization.parse(reg, form)
    H = dense.coefficients(
        m, constraint, (parsed.y, parsed.x) if form == "two-sided" else parsed.x, form
    )
    Nx, Ny = dense.newton(slow_x, X[:50], px), dense.newton(slow_y, Y[50:90], py)
    g = dense.density_ratio(Nx, Ny, H)
    assert np.abs(fit.density_ratio(X[:50], Y[50:90]) - g).max() <= 1e-8 * np.abs(g).max()
    expected = dense.expect(Nx, H, m)
    got = fit.expect(["y0", "y1", "event"], X[:50])
    assert (np.abs(got - expected) <= 1e-8 * np.abs(expected).max(axis=0)).all()
    back = dense.means(slow_x, slow_y, X, Y, px, py, weights, X)
    reverse = back["f"] + Ny @ H @ back["xf"]
    got = fit.expect(["x0", "x1"], Y=Y[50:90])
    assert (np.abs(got - reverse) <= 1e-8 * np.abs(reverse).max(axis=0)).all()
