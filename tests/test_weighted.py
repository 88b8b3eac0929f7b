"""Weighted Gram matrices, and moments of a second sample in given bases, each in one pass."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import array_api_strict as strict
import numpy as np
import pytest
import zarr
from array_api_compat import array_namespace

from cme_dask import kernels
from cme_dask.errors import DataError
from cme_dask.kernels import Standard, Transform, TransformedKernel
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.moments import FeatureBlock, MomentReduction
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.reduction import Strip, reduce_strips
from cme_dask.numerics.weighted import WeightedMoments
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.run import run_pass
from cme_dask.passes.sources import open_sample

FUNCTIONS = ({"sign": lambda x: array_namespace(x).sign(x[:, 0])}, {"cube": lambda y: y[:, 0] ** 3})


def draw(n, seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    return X, np.sin(X[:, :1]) + 0.3 * rng.normal(size=(n, 1)), rng.exponential(size=n)


@pytest.fixture(scope="module")
def bases():
    X, Y, _ = draw(50, 0)
    warped = TransformedKernel(
        kernels.Gaussian(0.9), Transform((Standard(0.1, 2.0), Standard(0.0, 1.0)))
    )
    return NewtonBasis.from_points(warped, X[:30]), PartitionBasis(kernels.Gaussian(0.7), Y[:12])


def one_pass(sample, reduction, scheduler="threads"):
    executor = RunOptions(scheduler, 2).executor()
    (result,), report = run_pass(sample, [reduction], executor)
    assert report.rows == sample.n_rows
    return result


@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_grams_are_those_of_dense_arrays(tmp_path, bases, weighted):
    X, Y, w = draw(20_011, 1)
    stored = [
        zarr.create_array(str(tmp_path / f"{name}.zarr"), data=rows, chunks=(3000, rows.shape[1]))
        for name, rows in {"x": X, "y": Y}.items()
    ]
    sample = open_sample(*stored, weights=w if weighted else None)
    share = w / w.sum() if weighted else np.full(len(X), 1.0 / len(X))
    reduction = WeightedMoments(bases, FUNCTIONS)
    found, again = (one_pass(sample, reduction, each) for each in ("threads", "synchronous"))
    assert list(found) == ["sign", "cube"]
    N, M = bases[0](X), bases[1](Y)
    for name, f in {"sign": np.sign(X[:, 0]), "cube": Y[:, 0] ** 3}.items():
        moments, by = found[name], (share * f)[:, None]
        pairs = [
            (moments.blocks["x", "x"], (N * by).T @ N),
            (moments.blocks["y", "y"], (M * by).T @ M),
            (moments.blocks["y", "x"], (M * by).T @ N),
            (moments.means["x"], (N * by).sum(axis=0)),
        ]
        for mine, plain in pairs:
            np.testing.assert_allclose(mine, plain, rtol=0, atol=1e-13 * np.abs(plain).max())
        np.testing.assert_array_equal(moments.blocks["x", "x"], again[name].blocks["x", "x"])
        np.testing.assert_array_equal(moments.blocks["x", "x"], moments.blocks["x", "x"].T)


@pytest.mark.parametrize("weighted", [False, True])
def test_folds_are_those_of_dense_arrays(weighted):
    """Each fold, and all others, as the rows themselves give them; also on a second device."""
    X, Y, w = draw(9_013, 6)
    bases = [NewtonBasis.from_points(kernels.Gaussian(0.7), part[:9]) for part in (X, Y)]
    sample = open_sample(X, Y, weights=w if weighted else None)
    w, folds = w if weighted else np.ones(len(X)), fold_of_rows(0, len(X), 4)
    reduction = WeightedMoments(tuple(bases), FUNCTIONS, 4)
    found = one_pass(sample, reduction)
    strip = Strip(np.arange(len(X)), (X, Y), w)
    on_device = partial(strict.asarray, device=strict.Device("device1"))
    other = reduction.finalize(reduce_strips([reduction], [strip], on_device)[1][0])
    N, M = bases[0](X), bases[1](Y)
    chosen = {"all": np.full(len(X), True), "fold": folds == 2, "without": folds != 2}
    for name, f in {"sign": np.sign(X[:, 0]), "cube": Y[:, 0] ** 3}.items():
        for which, mine in chosen.items():
            share = (f * w * mine / (w * mine).sum())[:, None]
            arguments = {} if which == "all" else {which: 2}
            pairs = (M, N), (N, N), (N, np.ones((len(X), 1)))
            for sums in (found, other):
                moments = sums.means(**arguments)[name]
                values = (
                    moments.blocks["y", "x"],
                    moments.blocks["x", "x"],
                    moments.means["x"][:, None],
                )
                for value, (left, right) in zip(values, pairs, strict=True):
                    terms = abs(share * left).T @ abs(right)  # which may cancel
                    plain = (share * left).T @ right
                    np.testing.assert_allclose(value, plain, rtol=0, atol=1e-13 * terms.max())
    whole = one_pass(sample, replace(reduction, n_folds=1))
    cubes = (found["cube"].blocks["y", "y"], whole["cube"].blocks["y", "y"])
    terms = (abs(Y**3 * w[:, None] / w.sum()) * abs(M)).T @ abs(M)
    np.testing.assert_allclose(*cubes, rtol=0, atol=1e-13 * terms.max())
    with pytest.raises(DataError, match="no rows of positive weight"):
        whole.means(without=0)
    with pytest.raises(DataError, match="not both"):
        whole.means(fold=0, without=0)


def test_a_multiplication_operator_multiplies(bases):
    """(S + r)^-1 E[f N N^T] h is the projection of f h, up to the ridge."""
    X, Y, _ = draw(4000, 2)
    f = {"shifted": lambda x: 2.0 + x[:, 0]}
    (moments,) = one_pass(open_sample(X, Y), WeightedMoments(bases, (f,))).values()
    N = bases[0](X)
    h = np.random.default_rng(3).normal(size=30)
    product = np.linalg.solve(N.T @ N / len(X) + 1e-12 * np.eye(30), moments.blocks["x", "x"] @ h)
    best = np.linalg.lstsq(N, (2.0 + X[:, 0]) * (N @ h), rcond=None)[0]
    np.testing.assert_allclose(N @ product, N @ best, atol=1e-6 * np.abs(N @ best).max())


def test_the_example_of_the_page_multiplies():
    page = (Path(__file__).resolve().parents[1] / "docs" / "extending.md").read_text()
    text = page.partition("\n## Moments weighted by a function\n")[2]
    space = {"__name__": "a_users_module"}
    exec(re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1], space)
    at = space["at"]
    found = space["basis"](at) @ space["multiplication"] @ space["h"]
    expected = (1.0 + at**2) * np.exp(-((at - 0.5) ** 2) / 2)
    np.testing.assert_allclose(found, expected[:, 0], atol=1e-4)


def test_moments_of_a_second_sample_in_given_bases(bases):
    """Change of measure: the same functions over other rows."""
    X, Y, w = draw(5003, 4)
    sides = FeatureBlock(bases[0], ("a", "b")), FeatureBlock(bases[1], ("c",), FUNCTIONS[1])
    reduction = MomentReduction(sides)
    sums = one_pass(open_sample(X + 0.5, Y, weights=w), reduction)
    mean, share = sums.means(), (w / w.sum())[:, None]
    N, M = bases[0](X + 0.5), bases[1](Y)
    np.testing.assert_allclose(mean.means["x"], (share * N).sum(axis=0), rtol=1e-11)
    np.testing.assert_allclose(mean.blocks["x", "x"], (share * N).T @ N, rtol=0, atol=1e-13)
    np.testing.assert_allclose(mean.blocks["y", "x"], (share * M).T @ N, rtol=0, atol=1e-13)
    assert mean.means["f(y)"][1] == pytest.approx(float((share * Y**3).sum()), rel=1e-12)


def test_functions_are_needed_and_must_be_usable(bases):
    X, Y, _ = draw(300, 5)
    for functions in ((), ({}, {}), ({"f": np.sum}, {"f": np.sum}), ({}, {}, {"f": np.sum})):
        with pytest.raises(DataError, match="different names"):
            WeightedMoments(bases, functions)
    with pytest.raises(DataError, match="'f' must return shape"):
        one_pass(open_sample(X, Y), WeightedMoments(bases, ({"f": np.sum},)), "synchronous")
    with pytest.raises(DataError, match="all weights are zero"):
        one_pass(open_sample(X, Y, weights=np.zeros(300)), WeightedMoments(bases, FUNCTIONS))
