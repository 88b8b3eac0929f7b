"""The card that shows a fit in a notebook: what it says, and how it changes in a real kernel."""

import re
import xml.etree.ElementTree as ET

import pytest

from cme_dask.passes import progress
from cme_dask.passes.notebook import Curve, FitCard

FIT = """
import numpy as np
from cme_dask import JointDistribution, Tuning
rng = np.random.default_rng(0)
x = rng.normal(size=(300, 1))
tuning = Tuning(rows=300, max_rank=40, evaluations=6)
fit = JointDistribution(tuning=tuning)
fit.fit(x, np.sin(x) + 0.3 * rng.normal(size=x.shape), progress=True);
"""
STOPPED = """
from cme_dask.passes.progress import FitDisplay, Event
with FitDisplay() as display:
    display(Event(2, 5, "pivots <b>", 0.4, 3.0, 7.0, "rank 3"))
    raise KeyboardInterrupt
"""


def card(**changes):
    values = {"line": "all", "head": "step", "text": "", "done": 0.5, "seconds": 3.0, "left": 4.0}
    return FitCard(**values | changes)


def test_a_card_is_a_line_where_no_html_is_shown():
    assert repr(card(line="step 2 of 5: pivots")) == "step 2 of 5: pivots"


def test_a_card_is_well_formed_whatever_its_texts_hold():
    curve = Curve("loss of <x> & y", logarithmic=False)
    for x in range(5):
        curve.add(x, -float(x))
    html = card(head="<script>", text='a "quoted" & b', curves=(curve,))._repr_html_()
    root = ET.fromstring(html)
    text = "".join(root.itertext())
    assert "<script>" in text
    assert 'a "quoted" & b' in text
    assert "3 s, 4 s left" in text
    assert "width:50.0%" in html
    assert root.find(".//polyline") is not None


def test_a_curve_is_drawn_from_two_points_on():
    curve = Curve("trace error", logarithmic=True)
    assert curve.svg() == ""
    for rank, trace in ((1, 0.5), (2, 0.0), (2, float("nan")), (2, 0.1), (3, 0.01)):
        curve.add(rank, trace)
    assert curve.points == [(1, 0.5), (2, 0.1), (3, 0.01)]
    (path,) = re.findall(r'points="([^"]+)"', curve.svg())
    x, y = zip(*(map(float, pair.split(",")) for pair in path.split()), strict=True)
    assert x == (4.0, 110.0, 216.0)
    assert list(y) == sorted(y)  # down the page
    curve.add(1, 0.4)  # the next basis, of which one point is no curve
    assert curve.points == [(1, 0.5), (2, 0.1), (3, 0.01)]
    curve.add(1, 0.3)  # and another one
    curve.add(2, 0.2)
    curve.add(3, 0.1)
    assert curve.points == [(1, 0.3), (2, 0.2), (3, 0.1)]


def test_a_long_curve_keeps_its_ends():
    curve = Curve("loss", logarithmic=False)
    for x in range(1000):
        curve.add(x, 1.0)
    assert len(curve.points) <= 200
    assert (curve.points[0][0], curve.points[-1][0]) == (0, 999)
    assert "nan" not in curve.svg()  # all of one height


def test_losses_of_another_search_begin_anew():
    display = progress.FitDisplay()
    display.losses("grid", [3.0, 2.0, float("nan")])
    display.losses("grid", [1.0])
    (curve,) = display._drawn().curves
    assert curve.points == [(1, 3.0), (2, 2.0), (4, 1.0)]
    display.losses("refine", [0.5])  # one is no curve
    assert display._drawn().curves[0].points == curve.points
    display.losses("refine", [0.25])
    assert display._drawn().curves[0].points == [(1, 0.5), (2, 0.25)]


def test_the_end_of_a_single_pass_says_its_rate():
    display = progress.FitDisplay()
    assert repr(display._drawn()).startswith("starting, 0 s")
    display(progress.pass_event("scores", 100, 100, 2.0))
    shown = display._drawn()
    assert (repr(shown), shown.text) == ("done in 2 s", "50 rows/s")


@pytest.fixture(scope="module")
def outputs():
    """Of a fit and of an interrupted one in a real kernel, and all states of the first card."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(source) for source in (FIT, STOPPED)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    states = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg, cell, cell_index):
            if msg["msg_type"] in ("display_data", "update_display_data") and cell_index == 0:
                states.append(msg["content"]["data"])
            return super().process_message(msg, cell, cell_index)

    Client(
        notebook,
        kernel_name="python3",
        allow_errors=True,
        extra_arguments=["--log-level=ERROR"],
    ).execute()
    return [cell.outputs for cell in notebook.cells], states


def test_a_fit_in_a_kernel_is_one_card_that_changes(outputs):
    ((output,), _), states = outputs
    assert output["data"]["text/plain"].startswith("done in ")
    assert 'aria-valuenow="100"' in output["data"]["text/html"]
    assert "trace error of x against rank" in output["data"]["text/html"]
    assert "held-out loss of candidates" in output["data"]["text/html"]
    assert states[0]["text/plain"].startswith("starting")
    lines = [state["text/plain"] for state in states[1:-1]]
    assert all("step" in line or "starting" in line for line in lines)
    assert any(re.search(r"step \d+ of \d+: .* so far", line) for line in lines)


def test_a_fit_that_is_interrupted_says_where(outputs):
    (_, (shown, error)), _ = outputs
    assert error["output_type"] == "error"
    assert shown["data"]["text/plain"].startswith("stopped: KeyboardInterrupt, step 2 of 5: pivots")
    assert "pivots &lt;b&gt;" in shown["data"]["text/html"]
    assert "left" not in shown["data"]["text/html"].split("</span>")[0].split("<span>")[1]
