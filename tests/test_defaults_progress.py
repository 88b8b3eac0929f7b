"""The progress of default fits: steps k of n, a share that only grows, one time left."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import BRIEF

from cme_dask import (
    ConditionalMeanEmbedding,
    Event,
    JointDistribution,
    KernelLogisticRegression,
    PivotedCholesky,
    Tuning,
    kernels,
)
from cme_dask.cli.progress import ProgressLines
from cme_dask.errors import DataError
from cme_dask.estimators.planning import RESIDUAL_EVALUATIONS
from cme_dask.estimators.steps import LOCATION, PIVOTS, SearchTimes, StepCosts, StepReports
from cme_dask.learning.candidates import TuningProgress
from cme_dask.passes.progress import FitProgress, Step, StepBegan, pass_event


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 1))
    return x, np.sin(2.0 * x) + 0.3 * rng.normal(size=x.shape)


@pytest.fixture(scope="module")
def events(rows):
    """Those of a default fit, with the search, a location and its own search."""
    heard = []
    JointDistribution().fit(*rows, progress=heard.append)
    return heard


def is_coherent(events):
    assert all(isinstance(event, Event) for event in events)
    done = [event.done for event in events]
    assert done == sorted(done)
    assert all(0.0 <= share <= 1.0 for share in done)
    steps = [event.step for event in events]
    assert steps == sorted(steps)
    assert len({event.steps for event in events}) == 1
    assert (events[-1].done, events[-1].seconds_left) == (1.0, 0.0)


def test_progress_of_a_default_fit_is_monotone_and_names_its_steps(events):
    is_coherent(events)
    names = list(dict.fromkeys(event.name for event in events))
    assert names[:4] == ["search for kernels", "pivots", "pass over the rows", "solution"]
    assert {"location of y given x", "search for kernels of residuals"} <= set(names)
    left = [event.seconds_left for event in events[len(events) // 10 :]]
    assert all(seconds is not None and np.isfinite(seconds) for seconds in left)
    assert str(events[5]).startswith(f"step 2 of {events[0].steps}: search for kernels")


def test_scores_of_a_search_are_reported_once_they_have_a_unit(events):
    """Also of residuals, where few kernels beat independence: that has 0, the best about -2."""
    scores = [e.detail.score for e in events if isinstance(e.detail, TuningProgress)]
    settled = [score for score in scores if score is not None]
    assert len(settled) > 10
    assert all(-2.0 - 1e-9 <= score < 0.0 for score in settled)


def test_a_search_without_any_gain_reports_no_score():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 200, 1))
    heard = []
    fit = JointDistribution(residual=False, tuning=Tuning(**BRIEF))
    fit.fit(x, y, progress=heard.append)
    details = [e.detail for e in heard if isinstance(e.detail, TuningProgress)]
    assert all(d.score is None or -2.0 - 1e-9 <= d.score < 0.0 for d in details)
    assert not any("e+" in str(e) or len(str(e)) > 200 for e in heard)


@pytest.mark.parametrize(
    "estimator",
    [
        ConditionalMeanEmbedding(),
        JointDistribution(kernel_x="median", kernel_y="median", tol=1e-2),
        PivotedCholesky(kernels.Gaussian(1.0), tol=1e-2, pivots="greedy"),
        KernelLogisticRegression(tol=1e-2),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_progress_of_every_estimator(estimator, rows):
    heard = []
    x, y = rows
    label = np.where(y[:, 0] > 0, "up", "down")
    estimator.fit(x, label if isinstance(estimator, KernelLogisticRegression) else y)
    estimator.fit(
        x,
        label if isinstance(estimator, KernelLogisticRegression) else y,
        progress=heard.append,
    )
    is_coherent(heard)
    assert "pass over the rows" in {event.name for event in heard}


def test_progress_of_added_rows(rows):
    heard = []
    x, y = rows
    law = JointDistribution(kernel_x="median", kernel_y="median", tol=1e-2, residual=False)
    law.partial_fit(x, y, progress=heard.append)
    is_coherent(heard)
    heard.clear()
    law.partial_fit(x, y, progress=heard.append)
    is_coherent(heard)


def test_progress_true_says_each_step_where_nothing_can_be_overwritten(rows, capsys):
    fit = ConditionalMeanEmbedding(tol=1e-2).fit(*rows, progress=True)
    assert fit.n_passes_ >= 1
    lines = capsys.readouterr().err.splitlines()
    assert any("of 5: search for kernels" in line for line in lines)
    assert "done" in lines[-1]
    assert "100%" in lines[-1]


def test_progress_is_a_function_or_a_boolean(rows):
    with pytest.raises(DataError, match="progress must be True, False or a function"):
        JointDistribution().fit(*rows, progress="yes")


def test_progress_stops_a_fit_by_an_error_of_the_function(rows):
    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ConditionalMeanEmbedding().fit(*rows, progress=stop)


STEPS = [Step("a", "first", 10.0), Step("b", "second", 20.0), Step("c", "third", 5.0, "b", 0.5)]


def replay(steps, seconds):
    """Events of a fit whose steps take these seconds, with ten reports each."""
    now, heard = [0.0], []
    target = FitProgress(steps, heard.append, clock=lambda: now[0])
    for key, taken in seconds.items():
        begin = now[0]
        for part in range(11):
            now[0] = begin + taken * part / 10
            target(None, key, part / 10, "")
    heard.append(target.finished())
    return heard, now[0]


def within(heard, total):
    """From a third on the time left is right within a factor of 1.5."""
    later = [event for event in heard if total / 3 <= event.seconds < 0.99 * total]
    assert len(later) > 10
    for event in later:
        truth = total - event.seconds
        assert truth / 1.5 <= event.seconds_left <= 1.5 * truth


@pytest.mark.parametrize("factor", [0.1, 1.0, 7.0])
def test_progress_time_left_is_scaled_by_what_was_measured(factor):
    """Predictions that are all wrong by one factor are right from the first step on."""
    heard, total = replay(STEPS, {"a": 10 * factor, "b": 20 * factor, "c": 10 * factor})
    within(heard, total)


def test_progress_time_left_does_not_depend_on_steps_of_before():
    """A step's own rate counts as soon as it is known, and a later one of its kind follows it."""
    heard, total = replay(STEPS, {"a": 1.0, "b": 300.0, "c": 150.0})
    within(heard, total)


def test_progress_steps_that_are_left_out_are_done():
    heard, _ = replay([*STEPS, Step("d", "fourth", 100.0)], {"a": 10.0, "d": 100.0})
    done = [event.done for event in heard]
    assert done == sorted(done)
    assert heard[-1].done == 1.0


def test_progress_expects_no_location_where_none_is_tried(rows, monkeypatch):
    """Of y with few values: known once the search has ended, so no time is left for it."""
    left = []
    leave_out = FitProgress.leave_out
    monkeypatch.setattr(
        FitProgress, "leave_out", lambda self, keys: (left.extend(keys), leave_out(self, keys))
    )
    x, y = rows
    events = []
    law = JointDistribution(tuning=Tuning(**BRIEF)).fit(x, np.sign(y), progress=events.append)
    assert "residual" not in law.model_.about
    assert {"location", "second search", "second pass"} <= set(left)
    is_coherent(events)


def test_progress_time_left_of_a_second_pass_of_the_same_name(capsys, monkeypatch):
    clock = iter(range(0, 10000, 10))
    # Of this module alone: other threads read the clock as well.
    alone = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("cme_dask.cli.progress.time", alone)
    with ProgressLines(every=0.0) as lines:
        for done in (100, 500, 1000, 100, 500):
            lines.fit(pass_event("strip-moments", done, 1000, 1.0))
    last = capsys.readouterr().err.splitlines()[-1]
    # 400 rows in the 10 s since the second pass began: 500 more take 12.5 s.
    assert last.endswith(", 12 s left"), last


def test_progress_is_known_to_the_scheduler_of_a_cluster(rows):
    from distributed import Client

    with Client(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as c:
        law = JointDistribution(kernel_x="median", kernel_y="median", tol=1e-2)
        law.fit(*rows, scheduler=c, progress=lambda event: None)
        names = [about["name"] for _, about in c.get_events("cme-dask")]
    assert names[-2:] == ["pass over the rows", "solution"]


def searched(times, stages, now=0.0):
    """Shares of a search that reports these numbers of trials, each of these seconds."""
    shares = []
    for stage, done, most, seconds in stages:
        now += seconds
        later = {"grid": 75, "columns": 70}.get(stage, 0)
        share = times.share(TuningProgress(stage, done, most, None, later=later), now)
        shares.append((now, share))
    return shares


GRID_OF_TEN = [("grid", done, 100, 0.0 if done == 0 else 1.0) for done in range(0, 100, 10)]


def test_progress_of_a_search_follows_the_time_of_its_own_trials():
    """Later trials are slower than pairs of the grid: their time is known once some are done."""
    times = SearchTimes(5)
    stages = [*GRID_OF_TEN, ("columns", 5, 5, 1.0)]
    stages += [("refine", done, 70, 0.5) for done in range(1, 71)]
    shares = searched(times, stages)
    total = shares[-1][0]
    for now, share in shares:
        if total / 3 <= now < 0.99 * total:
            assert abs((1.0 - share) / share * now - (total - now)) < 0.05 * total + 1e-9
    assert times.second == pytest.approx(10.0 + (5 + RESIDUAL_EVALUATIONS) * 0.1, rel=0.1)


def test_progress_of_a_second_search_follows_the_grid_of_the_first():
    """The first pairs make bases that later ones share: they are slower in either search."""
    slow = [(stage, done, most, 5.0 if done == 10 else s) for stage, done, most, s in GRID_OF_TEN]
    first = SearchTimes(2)
    searched(first, [*slow, ("refine", 1, 50, 1.0)])
    again = SearchTimes(2, 1.0, first)
    (now, share), *_ = searched(again, slow)[1:]
    alone = searched(SearchTimes(2, 1.0), slow)[1][1]
    truth = now / (14.0 + (2 + RESIDUAL_EVALUATIONS) * 0.14)  # and trials like pairs of the grid
    assert abs(share - truth) < 0.05 < abs(alone - truth)


def test_steps_between_two_searches_forget_no_times_of_the_first():
    now = iter(np.arange(1.0, 100.0))
    target = Mock(now=lambda: next(now))
    reports = StepReports(target, StepCosts(100, (1, 1), 1), 1)
    for stage, done, most, _ in GRID_OF_TEN:
        reports(TuningProgress(stage, done, most, None))
    reports(StepBegan(PIVOTS))
    after_one = reports._search._shares
    reports(StepBegan(LOCATION))
    assert reports._search._shares == after_one != {}


def test_progress_expects_what_was_measured_of_its_kind_whatever_the_scale():
    """Seconds that are known are not scaled, and no step that was left out comes back."""
    now, heard = [0.0], []
    steps = [Step("a", "first", 1.0), Step("b", "second", 0.7), Step("c", "third", 1.0)]
    target = FitProgress(steps, heard.append, clock=lambda: now[0])
    target.begin("a")
    target.know("b", 7.0)
    now[0] = 10.0  # ten times slower than predicted
    target.begin("b")
    assert heard[-1].seconds_left == pytest.approx(7.0 + 10.0)
    target.leave_out(["b"])
    assert heard[-1].seconds_left > target.event().seconds_left == pytest.approx(10.0)


def test_progress_expects_half_of_a_pass_that_may_not_come():
    """Until that is decided: then all of it, or nothing."""
    now, heard = [0.0], []
    steps = [Step("a", "first", 10.0), Step("b", "second", 30.0, chance=0.5)]
    target = FitProgress(steps, heard.append, clock=lambda: now[0])
    now[0] = 5.0
    target(None, "a", 0.5, "")
    assert heard[-1].seconds_left == pytest.approx(5.0 + 15.0)
    target.confirm()
    assert target.event().seconds_left == pytest.approx(5.0 + 30.0)
    target.leave_out(["b"])
    assert target.event().seconds_left == pytest.approx(5.0)


def test_rows_of_an_earlier_start_count_for_the_share_and_not_for_the_rate():
    event = pass_event("strip-moments", 600, 1000, 2.0, resumed=400)
    assert event.done == 0.6
    assert event.text == "100 rows/s"
    assert event.seconds_left == pytest.approx(4.0)
    event = pass_event("strip-moments", 400, 1000, 2.0, resumed=400)
    assert event.seconds_left is None
    assert str(event).endswith("400 rows resumed, 40%")
