"""`cme-dask fit` and job files take kernels as text; without any, kernels are learned."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import shorten_searches, write_store

from cme_dask import JointDistribution, kernels, load
from cme_dask.cli import cli
from cme_dask.kernels.text import kernel_of, read_specification

MIXED = "gaussian:a=0.8,b=30 * categorical:wind=0.7"
TABLE = """
title = "A table with labels"
[ingest]
files = ["t.csv"]
x = ["a", "wind", "b"]
y = ["c"]
categorical = ["wind"]
[fit]
tol = 1e-2
kernel_y = "median"
"""


def run(*args):
    result = CliRunner().invoke(cli, [str(a) for a in args], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def refusal(*args):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    return err


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 2)) * [1.0, 30.0]
    y = x[:, 0] + 0.3 * rng.normal(size=500)
    return write_store(tmp_path_factory.mktemp("kernels") / "s.zarr", x, y)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A folder with a job file and its table; x are numbers and labels."""
    folder = tmp_path_factory.mktemp("table")
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=300), 30 * rng.normal(size=300)
    wind = rng.choice(["N", "E", "S"], size=300)
    lines = [f"{p:.6f},{w},{q:.6f},{p + q / 30:.6f}" for p, w, q in zip(a, wind, b, strict=True)]
    (folder / "t.csv").write_text("\n".join(["a,wind,b,c", *lines]) + "\n")
    (folder / "job.toml").write_text(TABLE)
    return folder


GAUSSIAN = kernels.Gaussian((0.8, 30.0))


PRODUCT = kernels.Laplace((30.0,))[1] * kernels.Matern((1.0,), 2.5)[0]


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("gaussian:0.8,30", GAUSSIAN),
        ("gaussian: x0 = 0.8, x1=3e1", GAUSSIAN),
        ("matern32:2", kernels.Matern(2.0, 1.5)),
        ("laplace:x1=30 * matern52:x0=1", PRODUCT),
        (json.dumps(PRODUCT.to_dict()), PRODUCT),
        ("median", "median"),
        ("learned", None),
    ],
)
def test_what_a_text_stands_for(text, kernel):
    assert kernel_of(read_specification(text), ("x0", "x1")) == kernel


@pytest.mark.parametrize(("text", "kernel"), [("gaussian:0.8,30", GAUSSIAN), ("median", "median")])
def test_fit_takes_kernels_as_text(store, tmp_path, text, kernel):
    out = tmp_path / "m.zarr"
    options = ("--tol", "1e-2", "--kernel-x", text, "--kernel-y", "median")
    code, _, err = run("fit", store, "--out", out, *options)
    assert code == 0, err
    expected = JointDistribution(kernel_x=kernel, kernel_y="median", tol=1e-2).fit(store)
    model = load(out)
    assert model.x.basis.newton.kernel == expected.basis_x_.newton.kernel
    np.testing.assert_array_equal(model.coef, expected.coef_)
    assert "tuning" not in model.about


def test_one_option_gives_both_kernels(store, tmp_path):
    args = ("fit", store, "--tol", "1e-2", "--kernel", "median", "--kernel-x", "gaussian:1,30")
    code, out, err = run(*args, "--out", tmp_path / "m.zarr", "--json")
    assert code == 0, err
    found = json.loads(out)["variables"]
    assert found["x"]["kernel"] == "Gaussian(length_scale=(1.0, 30.0))"
    median = JointDistribution(kernel_x=GAUSSIAN, kernel_y="median", tol=1e-2).fit(store)
    assert found["y"]["kernel"] == repr(median.basis_y_.newton.kernel)


def test_what_is_not_given_is_learned_and_averaged(store, tmp_path, monkeypatch):
    shorten_searches(monkeypatch)
    out = tmp_path / "m.zarr"
    args = ("--kernel", "learned", "--kernel-x", "gaussian:0.8,30", "--averaged", 2)
    code, _, err = run("fit", store, "--out", out, "--max-rank", 40, "--residual", "no", *args)
    assert code == 0, err
    tuning = load(out).about["tuning"]
    assert (len(tuning["members"]), tuning["finalists"]) == (2, 2)
    assert tuning["members"][0]["kernel_x"] == GAUSSIAN.to_dict()


def test_jobs_take_the_same_text(table):
    out = table / "out"
    args = ("run", table / "job.toml", "--out", out, "--set", f'fit.kernel_x="{MIXED}"')
    code, _, err = run(*args)
    assert code == 0, err
    kernel = load(out / "model.zarr").x.basis.newton.kernel
    labels = kernels.Categorical((0.7,))[1]
    assert kernel == kernels.Gaussian((0.8, 30.0))[0, 2] * labels
    assert refusal(*args[:-1], 'fit.kernel_x="gaussian:1"', "--overwrite").startswith(
        "error: fit.kernel_x: 'gaussian:1': 'wind' has no length scale: give it one"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gausian:1", "'gausian:1' is no kernel: expected median, NAME:NUMBER such as"),
        ("gaussian", "'gaussian' is no kernel"),
        ("gaussian:0", "length scales must be positive numbers, in the units of the columns"),
        ("gaussian:1,x1=2", "name all columns of gaussian, or none"),
        ("gaussian:1,2,3", "3 length scales but the data have 2 columns"),
        ("gaussian:x0=1,x2=1", "unknown column 'x2', there are x0, x1"),
        ("gaussian:x0=1,x0=2", "column 'x0' has two length scales"),
        ("gaussian:x0=1", "'x1' has no length scale"),
        ("categorical:x0=1 * gaussian:x1=1", "column 'x0' holds numbers"),
        ("categorical:1", "no column of x0, x1 holds labels"),
        ('{"kernel": "Gaussian"', "is not JSON"),
        ('{"kernel": "Nix"}', "unknown kernel 'Nix'"),
    ],
)
def test_kernels_that_do_not_fit_are_refused_before_any_work(store, tmp_path, text, says):
    out = tmp_path / "m.zarr"
    assert says in refusal("fit", store, "--out", out, "--kernel-x", text)
    assert not out.exists()


def test_options_that_exclude_each_other_are_refused(store, tmp_path):
    args = ("fit", store, "--out", tmp_path / "m.zarr", "--averaged", 2)
    assert "--averaged is for learned kernels" in refusal(*args, "--kernel", "median")
    assert "leave --averaged out" in refusal(*args, "--growing")


def test_a_text_without_columns_sees_those_that_it_fits():
    names, labelled = ("a", "wind", "b"), {"wind"}
    text = read_specification("gaussian:0.8,30 * categorical:0.7")
    expected = kernels.Gaussian((0.8, 30.0))[0, 2] * kernels.Categorical(0.7)[1]
    assert kernel_of(text, names, labelled) == expected
