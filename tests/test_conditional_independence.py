"""The test of independence given z: beside dense matrices, its level, passes and command."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reads import opened

import cme_dask
from cme_dask import conditional_independence_test, kernels
from cme_dask.cli import cli
from cme_dask.errors import DataError
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.independence import flip_signs, residual_inflation, residual_terms
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments

KERNEL = kernels.Gaussian(0.8)
KERNELS = {"kernel_x": KERNEL, "kernel_y": KERNEL, "kernel_z": KERNEL}
COMPLETE = {"tol": 1e-11, "max_rank": 1000, "reg": 1e-3, **KERNELS}
"""Bases of all rows, to rounding, and a ridge."""


def table(n, strength=0.0, seed=0):
    """Rows x, y and z: x and y depend on z by the same function, and on each other by strength."""
    z, a, b = np.random.default_rng(seed).normal(size=(3, n, 1))
    return np.sin(2.0 * z) + 0.5 * a, np.sin(2.0 * z) + 0.5 * (b + strength * a), z


def dense(x, y, z, w, reg):
    """Squared norm of the mean product of residuals, by Gram matrices of all rows."""
    w = w / w.sum()
    root, centre = np.sqrt(w)[:, None], np.eye(len(w)) - w
    K_x, K_y, K_z = (root * (centre @ KERNEL(v, v) @ centre.T) * root.T for v in (x, y, z))
    residual = reg * np.linalg.inv(K_z + reg * np.eye(len(w)))
    return float(((residual @ K_x @ residual.T) * (residual @ K_y @ residual.T)).sum())


# The statistic


@pytest.mark.parametrize("weighted", [False, True])
def test_the_statistic_is_that_of_dense_matrices(weighted):
    x, y, z = table(100, 0.3)
    w = np.random.default_rng(1).exponential(size=100) if weighted else np.ones(100)
    weights = w if weighted else None
    result = conditional_independence_test(x, y, z, weights=weights, **COMPLETE)
    assert result.statistic == pytest.approx(dense(x, y, z, w, 1e-3), rel=1e-8)
    assert (result.method, result.passes, result.regs) == ("bootstrap", 1, (1e-3, 1e-3))
    assert len(result.kernels) == len(result.ranks) == len(result.trace_errors) == 3


def test_the_ridge_is_that_of_the_least_variance_of_held_out_residuals():
    x, _, z = table(120)
    regs = (1e-9, 1e-4, 1.0)
    result = conditional_independence_test(x, x, z, **COMPLETE | {"reg": regs, "n_folds": 10})
    folds = fold_of_rows(0, 120, 10)
    losses = []
    for reg in regs:
        loss = 0.0
        for fold in range(10):
            train, test = folds != fold, folds == fold
            centre = np.eye(train.sum()) - 1.0 / train.sum()
            within, across = KERNEL(z[train], z[train]), KERNEL(z[test], z[train])
            gram = centre @ within @ centre
            shifted = (across - within.mean(axis=0)) @ centre
            inverse = np.linalg.inv(gram / train.sum() + reg * np.eye(train.sum()))
            share = shifted @ inverse @ centre / train.sum() + 1.0 / train.sum()
            loss += (
                KERNEL(x[test], x[test]).trace()
                - 2.0 * (share * KERNEL(x[test], x[train])).sum()
                + ((share @ KERNEL(x[train], x[train])) * share).sum()
            )
        losses.append(loss)
    assert result.regs == (regs[int(np.argmin(losses))],) * 2
    assert result.regs[0] == 1e-4


def test_the_null_law_knows_that_residuals_are_not_independent():
    x, y, z = table(80)
    blocks = tuple(
        FeatureBlock(NewtonBasis.from_points(KERNEL, rows), (name,))
        for rows, name in ((x, "x0"), (y, "y0"), (z, "z0"))
    )
    folds = fold_of_rows(0, 80, 16)
    sums = strip_moments(MomentReduction(blocks, 16), (x, y, z), None, folds)
    regs = 1e-4, 1e-2
    centre = np.eye(80) - 1.0 / 80
    gram = centre @ KERNEL(z, z) @ centre / 80
    of_y, of_x = (reg * np.linalg.inv(gram + reg * np.eye(80)) @ centre for reg in regs)
    # Of noise e, d in x and y, the variance of sum_i (M_x e)_i (M_y d)_i over that of its terms.
    ratio = ((of_x @ of_y) ** 2).sum() / (80 * (of_x**2).sum() / 80 * (of_y**2).sum() / 80)
    assert residual_inflation(sums, regs) == pytest.approx(ratio, rel=1e-6)
    assert ratio > 1.05
    terms = residual_terms(sums, regs)
    plain, inflated = (flip_signs(terms, 999, 0, inflation=ratio**k) for k in (0, 1))
    assert inflated.null_mean == pytest.approx(ratio * plain.null_mean)
    assert inflated.statistic == plain.statistic
    assert inflated.pvalue > plain.pvalue


@settings(max_examples=8)
@given(chunks=st.lists(st.integers(1, 500), min_size=3, max_size=3), seed=st.integers(0, 3))
def test_neither_chunks_nor_where_z_lies_matter(chunks, seed):
    da = pytest.importorskip("dask.array")
    x, y, z = table(600, 0.2, seed)
    options = {"sample_size": 200, "n_resamples": 99, "scheduler": "synchronous"}
    expected = conditional_independence_test(x, y, z, **options)
    lazy = [da.from_array(v, (c, 1)) for v, c in zip((x, y, z), chunks, strict=True)]
    assert tuple(conditional_independence_test(*lazy, **options)) == tuple(expected)
    both = np.hstack([x, z])
    assert tuple(conditional_independence_test(both, y, "x1", **options)) == tuple(expected)


@pytest.mark.parametrize("scheduler", ["threads", "processes"])
def test_a_store_is_read_once_on_any_scheduler(tmp_path, scheduler):
    x, y, z = table(20_000, 0.02)
    write_store(tmp_path / "s", np.hstack([x, z]), y, chunk_rows=4096)
    expected = conditional_independence_test(x, y, z, n_resamples=99)
    if scheduler == "threads":
        store, counted = opened(tmp_path / "s")
        result = conditional_independence_test(counted, Z=["x1"], n_resamples=99)
        assert {tuple(store.chunks(name).values()) for name in "xy"} == {(1,) * 5}
    else:
        result = conditional_independence_test(
            tmp_path / "s", Z=["x1"], n_resamples=99, scheduler=scheduler, workers=2
        )
    assert result.passes == 1
    # The row sample of the store is another one than that of the arrays, and so are the pivots.
    assert result.statistic == pytest.approx(expected.statistic, rel=0.1)


def test_an_interrupted_test_goes_on_where_it_was(tmp_path):
    x, y, z = table(20_000)
    options = {"scheduler": "synchronous", "sample_size": 500, "n_resamples": 99}
    expected = conditional_independence_test(x, y, z, **options)
    options["checkpoint"] = tmp_path / "run"

    def interrupt(event):
        if event.rows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conditional_independence_test(x, y, z, progress=interrupt, **options)
    with pytest.raises(DataError, match="values of z"):
        conditional_independence_test(x, y, z + 1.0, **options)
    again = conditional_independence_test(x, y, z, **options)
    assert tuple(again) == tuple(expected)
    assert again.reports[0].resumed_strips


# Level and power


@pytest.mark.slow
def test_level_and_power_where_both_depend_on_z():
    def rejected(strength, tables):
        pvalues = [
            conditional_independence_test(
                *table(200, strength, seed), n_resamples=199, scheduler="synchronous", **KERNELS
            ).pvalue
            for seed in range(tables)
        ]
        return float(np.mean(np.array(pvalues) < 0.05))

    # 40 tables: at level 0.05 more than 7 are rejected once in 1,000 times.
    assert rejected(0.0, 40) <= 7 / 40
    assert rejected(0.6, 20) > 0.8


def test_the_columns_of_z_may_be_columns_of_x_too():
    z, a, b = np.random.default_rng(0).normal(size=(3, 1500))
    x = np.column_stack([np.sin(z) + a, z])
    assert conditional_independence_test(x, z + b, z).pvalue > 0.01
    assert conditional_independence_test(x, np.sign(z) * a + b, z).pvalue < 1e-3


def test_rows_that_depend_on_each_other_are_kept_together():
    rng = np.random.default_rng(0)
    station = np.repeat(np.arange(80), 40)
    z = rng.normal(size=3200)
    x, y = (z + rng.normal(size=80)[station] + 0.1 * rng.normal(size=3200) for _ in range(2))
    sample = cme_dask.open_sample(np.column_stack([x, z]), y, group=station)
    assert conditional_independence_test(sample, Z="x1").pvalue < 0.01
    assert conditional_independence_test(sample.fold_by("group"), Z="x1").pvalue > 0.05


# Bad input, and the command


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: (x, x), "give Z, rows or the names of columns"),
        (lambda x: (x, None, x), "needs rows of x and of y"),
        (lambda x: (x, x, "x0"), "all columns of x are those of z"),
        (lambda x: (x, x, ["temperature"]), "unknown column 'temperature'"),
        (lambda x: (x, x, x[:40]), "numbers of rows differ: x has 50, y has 50, z has 40"),
        (lambda x: (x, x, np.where(x > 1.0, np.nan, x)), "column 'z0'"),
        (lambda x: (2.0 * x + 1.0, x**2 + 1e-3 * x[::-1], x), "x is a function of z"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(DataError, match=message):
        conditional_independence_test(*call(np.random.default_rng(0).normal(size=(50, 1))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reg": -1.0}, "ridges must be non-negative"),
        ({"n_folds": 5}, "6 folds .* got 5"),
        ({"kernel_z": "gaussian"}, "kernel_z must be a kernel"),
        ({"tol": 0.0}, "tol must lie between 0 and 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        conditional_independence_test(*table(50), **options)


def test_the_command_gives_what_python_gives(tmp_path):
    x, y, z = table(3000, 0.1)
    write_store(tmp_path / "s", np.hstack([x, z, -x]), y)
    words = ["test", "conditional", str(tmp_path / "s"), "--given", "x1"]
    options = ["--x", "x0", "--kernel-z", "gaussian:0.8", "--reg", "1e-3,1e-4", "--folds", "64"]
    done = CliRunner().invoke(cli, [*words, *options, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    sample = cme_dask.open_sample(tmp_path / "s", x_columns=["x0", "x1"])
    expected = conditional_independence_test(
        sample, Z=["x1"], kernel_z=KERNEL, reg=[1e-3, 1e-4], n_folds=64
    )
    assert (result["statistic"], result["pvalue"]) == tuple(expected)
    assert tuple(result["regs"]) == expected.regs
    shown = " ".join(CliRunner().invoke(cli, words).stdout.split())  # lines are wrapped
    assert "independence of x and y given x1" in shown
    assert "ridge of x" in shown
    for given_names, message in (("x0,x1,x2", "all columns of x"), ("q", "unknown column 'q'")):
        done = CliRunner().invoke(cli, [*words[:-1], given_names])
        assert (done.exit_code, message in done.stderr) == (2, True)
