"""The live panel on the dashboard of a cluster: what it shows, also in a browser."""

import json
import os
import re
import signal
import threading
import time
import urllib.request
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from conftest import IDLE, forked_workers
from distributed import Client, LocalCluster
from panel_gate import Gate

from cme_dask import JointDistribution, kernels
from cme_dask.passes.panel import PANEL, FitFigures, LivePanel, install
from cme_dask.passes.publishing import publishing

SECONDS = 60.0  # for whatever is waited for, on however slow a machine
ROWS = 8 * 4096  # in eight tasks


def fit(x, y, client, **options):
    kernel = kernels.Gaussian(1.0)
    law = JointDistribution(kernel_x=kernel, kernel_y=kernel, tol=1e-3, reg=1e-3)
    return law.fit(x, y, scheduler=client, **options)


def figures_of(client, path="cme.json"):
    address = client.dashboard_link.rsplit("/", 1)[0]
    with urllib.request.urlopen(f"{address}/{path}", timeout=SECONDS) as answer:
        return json.loads(answer.read()) if path.endswith("json") else answer.read().decode()


# Events become figures ---------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_time_goes_on_while_a_fit_reports_nothing():
    clock = Clock()
    shown = FitFigures(clock)
    shown.update({"values": {"seconds": 10.0, "left": 20.0, "done": 0.25}})
    shown.update({"passes": [[1, {"name": "strip-moments", "rows_total": 100, "tasks": 4}]]})
    clock.now = 4.0
    shown.update({"passes": [[1, {"rows": 40, "seconds": 4.0}]], "values": {"left": 6.0}})
    clock.now = 5.0
    figures = shown.figures(1, {})
    assert (figures["seconds"], figures["left"]) == (11.0, 5.0)
    (only,) = figures["passes"]
    assert (only["rows"], only["rate"], only["seconds"], only["left"]) == (40, 10.0, 5.0, 5.0)
    shown.update({"passes": [[1, {"rows": 100, "seconds": 10.0, "ended": True}]]})
    shown.end("left")
    clock.now = 50.0
    figures = shown.figures(1, {})
    assert (figures["status"], figures["seconds"]) == ("left", 11.0 - 1.0 + 0.0)
    assert (figures["passes"][0]["seconds"], figures["passes"][0]["left"]) == (10.0, None)


def test_each_basis_has_a_curve_that_stays_short():
    shown = FitFigures(Clock())
    for variable, ranks in (("x", range(1, 2001)), ("y", (1, 2)), ("x", (1, 2, 3))):
        traces = [[variable, rank, 1.0 / rank, 1e-3] for rank in ranks]
        shown.update({"traces": traces})
    curves = shown.figures(1, {})["curves"]
    assert [(c["variable"], c["points"][-1]) for c in curves] == [
        ("x", (2000, 1 / 2000)),
        ("y", (2, 0.5)),
        ("x", (3, 1 / 3)),
    ]
    ranks = [rank for rank, _ in curves[0]["points"]]
    assert ranks[0] == 1
    assert 150 < len(ranks) <= 400
    assert ranks == sorted(set(ranks))


def test_losses_are_those_of_the_latest_search():
    shown = FitFigures(Clock())
    stages = ["grid", "grid", "refine", "grid", "columns"]
    shown.update({"losses": [[stage, float(i)] for i, stage in enumerate(stages)]})
    assert shown.figures(1, {})["losses"] == [(1, "grid", 3.0), (2, "columns", 4.0)]
    shown.update({"losses": [["shortlist", 5.0], ["shortlist", float("nan")], ["rescale", 7.0]]})
    assert shown.figures(1, {})["losses"] == [(1, "shortlist", 5.0), (3, "rescale", 7.0)]


def scheduler_of(**memory):
    """What the panel asks of a scheduler without a dashboard."""
    workers = {
        name: SimpleNamespace(address=name, metrics={"memory": value})
        for name, value in memory.items()
    }
    return SimpleNamespace(workers=workers, total_nthreads=2, http_application=SimpleNamespace())


def test_events_of_strangers_break_nothing_and_figures_are_json():
    panel = LivePanel(scheduler_of(a=5.0, b=float("nan")), Clock())
    for msg in (None, "text", {}, {"values": {"done": 1.0}}):
        panel.log_event(PANEL, msg)
    panel.log_event("cme-dask", {"fit": "a"})
    assert panel.figures()["fits"] == []
    values = {"name": "<b>" * 1000, "done": float("nan"), "rows": True, "left": "soon"}
    panel.log_event(PANEL, {"fit": "a", "values": values, "traces": [["x", 1, float("inf"), 0.1]]})
    (only,) = json.loads(json.dumps(panel.figures(), allow_nan=False))["fits"]
    assert (only["done"], only["rows"], only["left"], only["curves"]) == (None, None, None, [])
    assert len(only["name"]) == 200
    assert [(worker["name"], worker["peak"]) for worker in only["workers"]] == [("a", 5.0)]


def test_tasks_that_are_run_again_count_for_their_fit_only():
    panel = LivePanel(scheduler_of(), Clock())
    for key in "ab":
        panel.log_event(PANEL, {"fit": key, "tokens": [f"token-{key}"]})

    def move(key, *states):
        for start, finish in pairwise(states):
            panel.transition(key, start, finish, stimulus_id="s")

    move("strip-0-token-a", "released", "waiting", "processing", "released", "waiting")
    move("strip-1-token-a", "released", "waiting", "processing", "memory", "released", "forgotten")
    move("strip-1-token-b", "processing", "memory", "released", "waiting", "processing", "memory")
    move("strip-2-token-b-again1", "released", "waiting", "processing")
    move("strip-0-other", "processing", "released", "waiting")
    move(("chunk-of-the-user", 0), "processing", "released", "waiting")
    panel.remove_worker(None, "tcp://w", stimulus_id="s")
    fits = panel.figures()["fits"]
    assert [(one["number"], one["reruns"], one["lost_workers"]) for one in fits] == [
        (2, 2, 1),
        (1, 1, 1),
    ]


def test_fits_that_ended_are_forgotten_before_those_that_run():
    panel = LivePanel(scheduler_of(), Clock())
    panel.log_event(PANEL, {"fit": "first", "values": {"client": "c"}})
    for number in range(50):
        panel.log_event(PANEL, {"fit": str(number), "values": {"status": "done"}})
    numbers = [one["number"] for one in panel.figures()["fits"]]
    assert len(numbers) <= 22
    assert numbers[0] == 51
    assert numbers[-1] == 1
    panel.remove_client(None, "c")
    assert panel.figures()["fits"][-1]["status"] == "left"


# On a cluster ------------------------------------------------------------------------------------


def test_two_fits_at_once_each_have_their_figures(cluster, rng):
    x = rng.normal(size=(ROWS, 1))
    laws, together = {}, threading.Barrier(2, timeout=SECONDS)

    def one(i):
        met = []

        def progress(event):
            if not met:
                met.append(together.wait())

        y = x + 0.3 * (i + 1)
        laws[i] = fit(x[: ROWS - i], y[: ROWS - i], cluster, progress=progress)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    shown = {int(one["rows"]): one for one in figures_of(cluster)["fits"][:2]}
    assert sorted(shown) == [ROWS - 1, ROWS]
    for i, law in laws.items():
        figures = shown[ROWS - i]
        assert (figures["status"], figures["name"]) == ("done", "JointDistribution")
        last = figures["passes"][-1]
        assert (last["rows"], last["ended"]) == (ROWS - i, True)
        assert [c["points"][-1][0] for c in figures["curves"]] == [
            law.basis_x_.rank,
            law.basis_y_.rank,
        ]
    with pytest.raises(ValueError, match="no use"), publishing(cluster, "Broken", 7):
        raise ValueError("of\n no use")
    failed = figures_of(cluster)["fits"][0]
    assert (failed["status"], failed["error"]) == ("failed", "ValueError: of no use")
    with publishing(cluster, "Two passes", 7) as panel:
        panel.memory(500, 1000)  # of a basis that was smaller then
        for predicted in (900, 300):
            panel.memory(predicted, 1000)
            panel.begin_pass("strip-moments", 7, 1)
    assert figures_of(cluster)["fits"][0]["predicted"] == 900
    with dask.config.set({"cme-dask.panel": False}), publishing(cluster, "Unseen", 7) as panel:
        assert panel is None
    with publishing(cluster, "Outer", 7) as outer, publishing(cluster, "Inner", 7) as inner:
        assert (outer is None, inner) == (False, None)


def plain(dask_scheduler):
    """A second plugin is not added; one without an application of HTTP gets no panel."""
    before = len(dask_scheduler.plugins)
    again = install(dask_scheduler)
    return again, len(dask_scheduler.plugins) - before


def test_the_panel_is_installed_once(cluster):
    assert cluster.run_on_scheduler(plain) == (True, 0)
    assert not install(SimpleNamespace(plugins={}))


# In a browser ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefixed():
    """A cluster of two workers whose dashboard is behind a prefix."""
    options = {"http_prefix": "/users/ada"}
    with (
        forked_workers(**IDLE),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            protocol="tcp",
            scheduler_kwargs=options,
        ) as local,
        Client(local) as client,
    ):
        yield client


def number(text):
    return float(re.search(r"[\d,.]+", text)[0].replace(",", ""))


def test_a_browser_reads_the_figures_while_a_worker_is_killed(browser, prefixed, rng, tmp_path):
    client, opened = prefixed, tmp_path / "open"
    x = np.repeat(np.arange(8), 4096)[:, None] + rng.uniform(size=(ROWS, 1))
    result, width, half = [], 400, f"{ROWS // 2:,} of {ROWS:,} rows"

    def run():
        functions = {"gated": Gate(tmp_path, free=4)}  # half of the tasks
        result.append(fit(x, x, client, functions=functions))

    fitting = threading.Thread(target=run)
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark")
    page = context.new_page()
    page.set_default_timeout(1000 * SECONDS)
    said = []
    page.on("pageerror", lambda error: said.append(str(error)))

    def read(key):
        return page.locator(f"[data-figure={key}]").first.text_content()

    fitting.start()
    try:
        while not client.run_on_scheduler(has_panel):
            assert fitting.is_alive()
            time.sleep(0.05)
        port = client.scheduler_info()["services"]["dashboard"]
        page.goto(f"http://127.0.0.1:{port}/users/ada/cme")
        # Both workers have come to rows that wait.
        rows = page.locator("[data-pass=strip-moments] .soft")
        page.wait_for_selector(f"[data-pass] .soft:has-text('{half}')")
        assert (read("status"), read("workers")) == ("running", "2 workers, 2 threads")
        assert (read("reruns"), read("lost")) == ("0", "0")
        assert 0 < number(read("done")) < 100
        (pid, *_) = client.run(os.getpid).values()
        os.kill(pid, signal.SIGKILL)
        page.wait_for_selector("[data-figure=lost]:text-is('1')")
        page.wait_for_selector("[data-figure=reruns]:not(:text-is('0'))")
        assert rows.text_content().startswith(half)
        opened.touch()
        page.wait_for_selector("[data-status=done]")
        fitting.join(SECONDS)
        (law,) = result
        assert read("done") == "100 %"
        assert rows.text_content().startswith(f"{ROWS:,} of {ROWS:,} rows")
        assert number(read("rate")) == pytest.approx(ROWS / law.report_.pass_seconds, rel=0.01)
        for i, (variable, basis) in enumerate({"x": law.basis_x_, "y": law.basis_y_}.items()):
            text = page.locator("[data-figure=trace]").nth(i).text_content()
            assert text.startswith(f"{variable}: rank {basis.rank}, trace error ")
        assert page.locator("[data-worker]").count() >= 2
        assert "Predicted peak" in read("predicted")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        links = page.locator("nav a, .about a").evaluate_all("links => links.map(a => a.href)")
        own = f"http://127.0.0.1:{port}/users/ada"
        assert f"{own}/cme" in links
        if find_spec("bokeh") is not None:
            assert {f"{own}/status", f"{own}/individual-task-stream"} <= set(links)
            with urllib.request.urlopen(f"{own}/status", timeout=SECONDS) as answer:
                assert b'<a href="cme">Cme</a>' in answer.read()
        assert said == []
    finally:
        opened.touch()
        fitting.join(SECONDS)
        context.close()


def has_panel(dask_scheduler):
    return PANEL in dask_scheduler.plugins
