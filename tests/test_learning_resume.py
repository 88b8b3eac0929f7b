"""Learning of kernels that was killed, in its steps or in the pass after, ends in the same bits."""

import subprocess
import sys

import numpy as np
import pytest

from cme_dask import MulticlassEmbedding
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample

N = 40_000
OPTIONS = {"batch_size": 100, "max_iter": 40, "max_rank": 20, "n_folds": 3, "random_state": 0}
KILLED = f"""
import os, signal, sys
from distributed import Client
from cme_dask import MulticlassEmbedding
store, folder, place, stage = sys.argv[1:]

def progress(event):
    part = event.detail
    name = getattr(part, "stage", getattr(part, "name", None))
    done = getattr(part, "rows", getattr(part, "done", 0))
    if name == stage and done >= (20 if stage == "learning" else 20_000):
        os.kill(os.getpid(), signal.SIGKILL)

scheduler = "threads" if place == "threads" else Client(place)
options = {{"workers": 2}} if place == "threads" else {{}}
estimator = MulticlassEmbedding(**{OPTIONS!r})
estimator.fit(store, scheduler=scheduler, checkpoint=folder, progress=progress, **options)
"""
pytestmark = pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 2))
    codes = (np.column_stack([x, -x.sum(1)]) + 0.7 * rng.normal(size=(N, 3))).argmax(1)
    columns = Columns.default("x", 2), Columns(("label",), {}, {"label": ("a", "b", "c")})
    path = tmp_path_factory.mktemp("learning") / "s.zarr"
    with writing_sample(path, columns, chunk_rows=4096) as writer:
        writer.append(x, codes[:, None].astype(float))
    return str(path)


@pytest.fixture(scope="module")
def whole(store):
    return MulticlassEmbedding(**OPTIONS).fit(store)


@pytest.mark.parametrize(
    ("place", "stage"),
    [
        ("cluster", "learning"),
        pytest.param("threads", "strip-moments", marks=pytest.mark.slow),
        pytest.param("threads", "learning", marks=pytest.mark.slow),
        pytest.param("cluster", "strip-moments", marks=pytest.mark.slow),
    ],
)
def test_a_killed_fit_ends_with_the_same_bits(store, whole, place, stage, tmp_path, cluster):
    folder = tmp_path / "run"
    where = "threads" if place == "threads" else cluster.scheduler.address
    arguments = [sys.executable, "-c", KILLED, store, str(folder), where, stage]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == -9, ended.stderr
    begun = sorted(path.name for path in folder.iterdir())
    assert ("pass-000" in begun) == (stage == "strip-moments"), begun
    scheduler = "threads" if place == "threads" else cluster
    steps = []
    again = MulticlassEmbedding(**OPTIONS)
    again.fit(store, scheduler=scheduler, checkpoint=folder, progress=steps.append)
    learned = [
        each.detail.done for each in steps if getattr(each.detail, "stage", "") == "learning"
    ]
    assert learned == ([30, 40] if stage == "learning" else [])
    assert (again.report_.resumed_strips > 0) == (stage == "strip-moments")
    assert again.search_.kernel == whole.search_.kernel
    assert again.search_.reg == whole.search_.reg
    assert again.reg_ == whole.reg_
    np.testing.assert_array_equal(again.search_.history, whole.search_.history)
    ours, theirs = (fit.model_.to_state().arrays for fit in (again, whole))
    assert list(ours) == list(theirs)
    for name, values in ours.items():
        assert np.asarray(values).tobytes() == np.asarray(theirs[name]).tobytes(), name
