"""How much code a call passes through: files, functions, kinds of objects, frames on the stack.

The bars are what was counted last; they are lowered, or raised up to the aim beside each. A
comprehension counts as a part of the function that holds it, as it does since Python 3.12.
"""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr

import cme_dask
from cme_dask import JointDistribution, kernels

PACKAGE = str(Path(cme_dask.__file__).parent)
RANK_K_UPDATE = "add_gram"
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class Journey:
    """Counts what of the package runs between ``with`` and its end, in this thread."""

    def __init__(self):
        self.functions, self.files, self.kinds, self.frames = set(), set(), set(), 0

    def __enter__(self):
        sys.setprofile(self._called)
        return self

    def __exit__(self, *failure):
        sys.setprofile(None)

    def _called(self, frame, event, _):
        code = frame.f_code
        if event != "call":
            return
        if code.co_filename.startswith(PACKAGE):
            self.files.add(code.co_filename)
            if code.co_name not in COMPREHENSIONS:
                self.functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))
            if code.co_name == RANK_K_UPDATE:
                self.frames = max(self.frames, own_frames(frame))
        elif code.co_name != "__init__":
            return
        if code.co_name in ("__init__", "__post_init__") and code.co_argcount:
            kind = type(frame.f_locals[code.co_varnames[0]])  # also where a dataclass made it
            if kind.__module__.startswith("cme_dask"):
                self.kinds.add(kind)


def own_frames(frame):
    """Frames of the package from here down."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return count


@pytest.fixture(scope="module")
def journeys(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 2))
    y = np.sin(x[:, :1]) + 0.3 * rng.normal(size=(600, 1))
    folder = tmp_path_factory.mktemp("rows")
    stored = [
        zarr.create_array(str(folder / f"{name}.zarr"), data=rows, chunks=(200, rows.shape[1]))
        for name, rows in {"x": x, "y": y}.items()
    ]
    kernel = kernels.Gaussian(1.0)
    made = []
    with warnings.catch_warnings(action="ignore"):
        for _ in range(2):  # the first one imports
            fit = JointDistribution(kernel_x=kernel, kernel_y=kernel, reg=1e-3, max_rank=10)
            with Journey() as of_fit:
                fit.fit(*stored, scheduler="synchronous")
            with Journey() as of_quantile:
                fit.conditional(x[:5]).quantile(0.5)
            newton = fit.basis_x_.newton
            with Journey() as of_basis:
                newton(x[:5])
            evaluator = newton.evaluator(x)
            evaluator.load(x)
            out = np.empty((newton.rank, 5))
            with Journey() as of_block:
                evaluator.write(slice(0, 5), out)
            made = [of_fit, of_quantile, of_basis, of_block]
    return dict(zip(("fit", "quantile", "basis", "block"), made, strict=True))


# What is counted, the bar, and the aim.
BARS = {
    ("fit", "files"): (25, 25),
    ("fit", "functions"): (200, 200),
    ("fit", "kinds"): (30, 30),
    ("fit", "frames"): (10, 10),
    ("quantile", "files"): (8, 8),
    ("quantile", "functions"): (35, 35),
    ("basis", "functions"): (14, 20),
    ("block", "functions"): (5, 5),
}


@pytest.mark.parametrize(("call", "what"), list(BARS))
def test_a_call_passes_through_no_more_code_than_before(journeys, call, what):
    counted = getattr(journeys[call], what)
    count = counted if isinstance(counted, int) else len(counted)
    bar, aim = BARS[call, what]
    assert 0 < count <= bar, f"{call}: {count} {what}, above the bar of {bar} (the aim is {aim})"
