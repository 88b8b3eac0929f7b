"""Tries an installed cme_dask with one extra: ``python tries.py plot``, in an empty folder.

Each function uses what its extra adds, on a few hundred rows, and fails where it does not work.
"""

import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(sys.executable).parent


def command(*words):
    """Run a program of the environment, and return what it prints."""
    program = SCRIPTS / words[0]
    return subprocess.run(
        [program, *words[1:]], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def sine(n=400):
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, size=(n, 1))
    return x, np.sin(x) + 0.3 * rng.normal(size=x.shape)


def fitted():
    from cme_dask import JointDistribution, kernels

    kernel = kernels.Gaussian(0.5)
    return JointDistribution(kernel_x=kernel, kernel_y=kernel, tol=1e-2, reg=1e-3).fit(*sine())


def base():
    """Fit, ask, save and load; the command; and what is said where an extra is missing."""
    import cme_dask.errors

    assert "site-packages" in cme_dask.__file__
    fitted().save("sine.model")
    law = cme_dask.load("sine.model").conditional([[1.0]])
    assert 0.5 < law.mean()[0] < 1.1
    assert law.quantile([0.05, 0.95]).shape == (1, 2)
    assert cme_dask.__version__ in command("cme-dask", "--version")
    assert "cme" in command("dask", "--help")
    command("cme-dask", "sample", "s.zarr", "--rows", "5e3")
    command("cme-dask", "fit", "s.zarr", "--out", "s.model", "--kernel", "median", "--tol", "1e-1")
    assert "y1" in command("cme-dask", "predict", "s.model", "--given", "x=0.3")
    try:
        law.plot_density()
    except cme_dask.errors.ResourceError as error:
        assert "install cme-dask[plot]" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("Matplotlib came without its extra")


def plot():
    from cme_dask import score_report

    law = fitted()
    law.conditional([[-1.0], [0.0], [1.0]]).plot_density().figure.savefig("density.png")
    score_report(law, *sine(200), html="page.html")
    assert Path("density.png").stat().st_size > 1000
    assert "<svg" in Path("page.html").read_text()


def report():
    command("cme-dask", "sample", "s.zarr", "--rows", "5e3")
    words = "fit s.zarr --out s.model --kernel median --tol 1e-1 --report report"
    command("cme-dask", *words.split())
    assert Path("report/memory.png").stat().st_size > 1000


def notebooks():
    """A fit in a kernel, whose progress is a card, and a picture of its laws."""
    import nbformat
    from nbclient import NotebookClient

    source = """
from pathlib import Path
import numpy as np
from cme_dask import JointDistribution
x = np.linspace(-2, 2, 400)[:, None]
fit = JointDistribution(kernel_x="median", kernel_y="median", tol=1e-2)
fit.fit(x, np.sin(x), progress=True).conditional([[-1.0], [1.0]]).plot_fan();
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(notebook, kernel_name="python3").execute()
    kinds = {kind for out in notebook.cells[0].outputs for kind in out.get("data", ())}
    assert {"image/png", "text/html"} <= kinds, kinds


def xarray():
    import pandas as pd
    import xarray as xr

    x, y = sine()
    fit = type(fitted())(kernel_x="median", kernel_y="median", tol=1e-2)
    fit.fit(xr.DataArray(x, dims=("row", "column")), xr.DataArray(y, dims=("row", "column")))
    assert fit.predict(xr.DataArray(x[:3], dims=("row", "column"))).shape[0] == 3
    fit.fit(pd.DataFrame(x, columns=["a"]), pd.Series(y[:, 0], name="b"))
    mean = fit.conditional(pd.DataFrame({"a": [0.0, 1.0]}, index=["p", "q"])).mean()
    assert mean.index.tolist() == ["p", "q"]


def remote():
    import fsspec
    import s3fs

    assert isinstance(fsspec.filesystem("s3", anon=True), s3fs.S3FileSystem)


def nn():
    import numpy as np

    from cme_dask import MulticlassEmbedding, kernels

    x, y = sine()
    fit = MulticlassEmbedding(kernel_x=kernels.Network((8,)), max_iter=5, random_state=0)
    assert fit.fit(x, np.where(y[:, 0] > 0, "up", "down")).predict_proba([[1.0]]).shape == (1, 2)


def gpu():
    import cupy

    from cme_dask import JointDistribution

    law = JointDistribution(kernel_x="median", kernel_y="median", tol=1e-1)
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        sys.stdout.write("CuPy is there, a GPU is not: nothing was computed on one\n")
        return
    law.fit(*sine(), device="cuda")


def bench():
    import FMCA  # noqa: F401

    from cme_dask import compare

    methods = ["normal", "lightgbm", "ngboost", "quantile-forest"]
    x, y = sine(200)
    result = compare(x, y[:, 0], methods=methods, splits=1, threads=1)
    assert sorted(result.methods) == sorted(methods)


def docs():
    """The site, from the files of the sdist."""
    sys.stdout.write(command("python", Path("source") / "docs" / "build.py"))


def dev():
    """The linters, and a few tests, from the files of the sdist."""
    subprocess.run([SCRIPTS / "ruff", "check", "."], check=True, cwd="source")
    tests = ["tests/test_public_api.py", "tests/test_packaging.py", "tests/test_kernels.py"]
    pytest = [SCRIPTS / "python", "-m", "pytest", "-q", "-x", *tests]
    subprocess.run(pytest, check=True, cwd="source")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
