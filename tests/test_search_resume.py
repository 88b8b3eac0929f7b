"""A search for kernels that was interrupted goes on: its trials are not made again."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from chaos_cases import bits, differences, state_bits, timeless
from click.testing import CliRunner
from conftest import shorten_searches

from cme_dask import ConditionalMeanEmbedding, JointDistribution, Tuning
from cme_dask.cli import fitting
from cme_dask.cli.app import cli
from cme_dask.data.columns import Columns
from cme_dask.data.model_file import read_model
from cme_dask.data.writer import writing_sample
from cme_dask.errors import ResourceError, StoreError
from cme_dask.estimators import tuned
from cme_dask.estimators.locating import LocationSearch
from cme_dask.learning import regression, trees
from cme_dask.learning.search import KernelSearch
from cme_dask.passes import checkpoint

QUICK = Tuning(rows=250, max_rank=15, evaluations=4, trees=("shallow", "forest"))
ESTIMATORS = {
    "joint": lambda: JointDistribution(
        max_rank=15, sample_size=1_200, support_size=40, n_folds=3, tuning=QUICK
    ),
    "embedding": lambda: ConditionalMeanEmbedding(max_rank=15, sample_size=250, n_folds=3),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::cme_dask.errors.RankWarning"),
    pytest.mark.usefixtures("least_searches"),  # each trial is written here
]


class Stop(BaseException):
    """A kill, as far as a fit can tell."""


class Trials:
    """Counts trials of all searches, and stops the fit in one of them."""

    def __init__(self, monkeypatch):
        self.names, self.last = [], np.inf
        for owner, name in (
            (KernelSearch, "_trial"),
            (regression._Descent, "_error"),
            (trees.TreeSearch, "_raced"),
            (trees.TreeSearch, "_whole"),
        ):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name, trial):
        def counted(*args, **options):
            if len(self.names) >= self.last:
                raise Stop
            self.names.append(name)
            return trial(*args, **options)

        return counted


@pytest.fixture(scope="module")
def rows():
    """Some whose location is one of trees."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2_000, 2))
    y = np.where(x[:, :1] > 0.3, 2.0, 0.0) + np.where(x[:, 1:] > 0.0, 1.0, 0.0)
    return x, y + 0.5 * rng.normal(size=(2_000, 1))


@pytest.fixture(scope="module")
def whole(rows):
    """Each fit, and the names of its trials."""
    found = {}
    for name, make in ESTIMATORS.items():
        with pytest.MonkeyPatch.context() as patch:
            trials = Trials(patch)
            found[name] = bits(make().fit(*rows, scheduler="synchronous")), trials.names
    return found


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(
    "at", [pytest.param(0.05, marks=pytest.mark.slow), "_error", "_raced", "_whole", "last"]
)
def test_no_trial_is_made_twice(name, at, rows, whole, monkeypatch, tmp_path):
    wanted, every = whole[name]
    if str(at)[0] == "_" and at not in every:
        assert name == "embedding"
        pytest.skip("embeddings try no trees")
    here = {"last": len(every) - 1}.get(at)
    if here is None:
        here = every.index(at) + 1 if isinstance(at, str) else int(at * len(every))
    monkeypatch.setattr(checkpoint, "_TRIALS_PER_WRITING", 0.0)  # each at once
    trials = Trials(monkeypatch)
    trials.last = here
    where = {"scheduler": "synchronous", "checkpoint": tmp_path / "run"}
    with pytest.raises(Stop):
        ESTIMATORS[name]().fit(*rows, **where)
    trials.last = np.inf
    again = ESTIMATORS[name]().fit(*rows, **where)
    assert trials.names == every
    assert differences(bits(again), wanted) == []


def test_a_fit_that_was_stopped_after_its_search_makes_no_trial(rows, whole, monkeypatch, tmp_path):
    """Also where trials wait to be written, as they do by default: the end of a search writes."""
    wanted, every = whole["joint"]
    trials = Trials(monkeypatch)
    where = {"scheduler": "synchronous", "checkpoint": tmp_path / "run"}

    def stop(event):
        if event.name == "pass over the rows":
            raise Stop

    with pytest.raises(Stop):
        ESTIMATORS["joint"]().fit(*rows, progress=stop, **where)
    assert trials.names == every
    again = ESTIMATORS["joint"]().fit(*rows, **where)
    assert trials.names == every
    assert differences(bits(again), wanted) == []


def test_trials_of_another_search_and_damaged_ones_are_refused(rows, tmp_path):
    memory = checkpoint.SavedTrials(tmp_path, 1, ())
    memory.put(("a", 1), (np.arange(3.0), 0.5))
    memory.flush()
    assert checkpoint.SavedTrials(tmp_path, 1, ()).get(("a", 1))[1] == 0.5
    assert checkpoint.SavedTrials(tmp_path, 2, ()).get(("a", 1)) is None
    (written,) = tmp_path.iterdir()
    shutil.copytree(written, tmp_path / written.name.replace("001", "002", 1))
    with pytest.raises(StoreError, match="search 1"):
        checkpoint.SavedTrials(tmp_path, 2, ())
    for file in written.rglob("*"):
        if file.is_file() and file.name != "zarr.json":
            file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(StoreError):
        checkpoint.SavedTrials(tmp_path, 1, ())


def test_a_location_of_moments_that_were_saved_is_that_of_the_first_start(rows, tmp_path):
    """Types of numbers that Zarr made gave it another fingerprint: its pass was refused."""
    columns = Columns(("a", "b")), Columns(("y",))
    with writing_sample(tmp_path / "s.zarr", columns, chunk_rows=1_000) as writer:
        writer.append(*rows)
    given = {"kernel_x": "median", "kernel_y": "median", "reg": 1e-4, "max_rank": 15}
    where = {"scheduler": "synchronous", "checkpoint": tmp_path / "run"}
    found = []
    for _ in range(2):
        law = JointDistribution(**given, residual=True, support_size=40, n_folds=3)
        found.append(bits(law.fit(tmp_path / "s.zarr", **where)))
    assert law.n_passes_ == 2
    assert law.report_.resumed_strips > 0
    assert differences(*found) == []


def test_tune_goes_on_and_says_when_it_is_complete(rows, monkeypatch, tmp_path):
    """Killed in the search, and when its model was there but not its trace."""
    store, out = tmp_path / "s.zarr", tmp_path / "tuned"
    columns = Columns(("a", "b")), Columns(("y",))
    with writing_sample(store, columns, chunk_rows=200) as writer:
        writer.append(*(part[:600] for part in rows))
    words = ["tune", store, "--rows", 200, "--evaluations", 0, "--max-rank", 15, "--json"]
    words += ["--averaged", 1, "--scheduler", "synchronous", "--out"]

    def run(*more):
        return CliRunner().invoke(cli, [*map(str, words), *map(str, more)])

    monkeypatch.setattr(checkpoint, "_TRIALS_PER_WRITING", 0.0)
    monkeypatch.setattr(fitting.drawing, "available", lambda: False)
    shorten_searches(monkeypatch, trees=("shallow", "forest"))
    monkeypatch.setattr("cme_dask.learning.search.GRID", (0.4, 1.2))
    with pytest.MonkeyPatch.context() as patch:
        trials = Trials(patch)
        whole = json.loads(run(tmp_path / "whole").stdout)
    with pytest.MonkeyPatch.context() as patch:
        again = Trials(patch)
        again.last = len(trials.names) // 2
        with pytest.raises(Stop):
            run(out, "--checkpoint", tmp_path / "run")
        again.last = np.inf
        patch.setattr(fitting, "write_json", lambda *_, **__: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            run(out, "--checkpoint", tmp_path / "run")
        assert again.names == trials.names
        assert (out / "model.zarr").is_dir()
    with pytest.MonkeyPatch.context() as patch:
        later = Trials(patch)
        made = run(out, "--checkpoint", tmp_path / "run")
        assert made.exit_code == 0, made.stderr
        assert later.names == []
        assert not (tmp_path / "run").exists()
        told = run(out, "--checkpoint", tmp_path / "run")
        assert json.loads(told.stdout)["complete"]
        assert "complete" in told.stderr
    assert timeless(json.loads(made.stdout)["tuning"]) == timeless(whole["tuning"])
    wanted = state_bits(read_model(tmp_path / "whole" / "model.zarr"))
    assert differences(state_bits(read_model(out / "model.zarr")), wanted) == []
    assert run(out).exit_code == 2  # without a checkpoint it is an output like any other
    other = run(out, "--checkpoint", tmp_path / "run", "--evaluations", 1)
    assert other.exit_code == 2


def test_searches_in_several_threads_try_the_same_and_go_on(tmp_path, monkeypatch):
    """Pairs are tried at once, and the location's kernel meanwhile; a stop loses no trial."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(600, 2))
    y = np.sin(2 * x[:, :1]) + 0.3 * rng.normal(size=(600, 1))
    options = {"max_rank": 15, "sample_size": 600, "support_size": 40, "n_folds": 3}
    quick = replace(QUICK, trees=())

    def fitted(**how):
        return bits(JointDistribution(**options, tuning=quick).fit(x, y, **how))

    one = fitted(scheduler="synchronous")
    with pytest.MonkeyPatch.context() as patch:
        trials = Trials(patch)
        assert not differences(fitted(scheduler="threads", workers=4), one)
    monkeypatch.setattr(checkpoint, "_TRIALS_PER_WRITING", 0.0)
    four = {"scheduler": "threads", "workers": 4, "checkpoint": tmp_path / "run"}
    with pytest.MonkeyPatch.context() as patch:
        stopped = Trials(patch)
        stopped.last = len(trials.names) // 2
        with pytest.raises(Stop):
            fitted(**four)
    with pytest.MonkeyPatch.context() as patch:
        rest = Trials(patch)
        assert not differences(fitted(**four), one)
    assert len(rest.names) < len(trials.names)
    # What was made at once but not yet written when the fit ended is made again, and no more.
    assert len(stopped.names) + len(rest.names) <= len(trials.names) + 2 * 4


@pytest.mark.parametrize(("megabytes", "at_once"), [(2_000, True), (1_000, False)])
def test_searches_are_made_one_after_the_other_where_memory_is_short(
    monkeypatch, megabytes, at_once
):
    rng = np.random.default_rng(6)
    x = rng.normal(size=(300, 2))
    y = np.sin(2 * x[:, :1]) + 0.3 * rng.normal(size=(300, 1))
    began, inner = [], tuned.beside
    monkeypatch.setattr(tuned, "search_bytes", lambda *_: 300 << 20)
    monkeypatch.setattr(LocationSearch, "needs", lambda *_: 600 << 20)
    monkeypatch.setattr(tuned, "beside", lambda *given: began.append(given) or inner(*given))
    fit = JointDistribution(max_rank=15, support_size=40, n_folds=3, tuning=QUICK)
    fit.fit(x, y, workers=2, memory_limit=f"{megabytes}MB")
    assert bool(began) == at_once
    with pytest.raises(ResourceError, match="for the search for kernels"):
        fit.fit(x, y, workers=2, memory_limit="500MB")
