"""Pages of scores: what they hold, that they stay whole, and how a browser shows them."""

import io
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from conftest import write_store
from test_reads import opened

from cme_dask import (
    ConditionalMeanEmbedding,
    JointClassifier,
    JointDistribution,
    KernelLogisticRegression,
    kernels,
    open_sample,
    score,
    score_report,
)
from cme_dask.cli import cli
from cme_dask.errors import DataError, ResourceError
from cme_dask.models import plots
from cme_dask.models.marginal import MarginalLaw
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.losses import Law
from cme_dask.passes.scores import score_pass
from cme_dask.reports import svg

HOSTILE = (
    "<script>alert(1)</script>",
    "\"quoted\" & 'more' $x_1$",
    "\u05e9\u05dc\u05d5\u05dd \u202egnp.exe",
    "very " * 60 + "long",
)
"""Names that are markup, formulas, written from right to left, turned around, or very long."""

KERNEL = {"kernel_x": kernels.Gaussian(1.0), "kernel_y": kernels.Gaussian(1.0)}
SMALL = {"max_rank": 15, "tol": 0.3, "reg": 1e-2}
RNG = np.random.default_rng(5)
N = 600
X = RNG.normal(size=(N, 2))
Y = np.column_stack([np.sin(X[:, 0]) + 0.3 * RNG.normal(size=N), RNG.poisson(2.0, N)])
LABELS = np.where(X[:, 0] + 0.5 * RNG.normal(size=N) > 0, "<b>yes</b>", "no & never")


def table(columns, names):
    return pd.DataFrame(dict(zip(names, columns, strict=True)))


@pytest.fixture(scope="module")
def joint():
    """Two numeric columns of y, all names hostile."""
    x, y = table(X.T, HOSTILE[:2]), table(Y.T, HOSTILE[2:])
    return JointDistribution(**KERNEL, **SMALL).fit(x, y), x, y


@pytest.fixture(scope="module")
def labelled():
    """A column of numbers and a column of labels in y, and labels in x."""
    x = pd.DataFrame({"a": X[:, 0], HOSTILE[0]: np.where(X[:, 1] > 0, HOSTILE[1], HOSTILE[2])})
    y = pd.DataFrame({"number": Y[:, 0], HOSTILE[0]: LABELS})
    kernel_x = kernels.Gaussian(1.0)[0] * kernels.Categorical(1.0)[1]
    kernel_y = kernels.Gaussian(1.0)[0] * kernels.Categorical(1.0)[1]
    return JointDistribution(kernel_x=kernel_x, kernel_y=kernel_y, **SMALL).fit(x, y), x, y


@pytest.fixture(scope="module")
def single():
    """One column of y, of few figures: for tests of the file."""
    x, y = table(X.T, HOSTILE[:2]), table(Y.T[:1], HOSTILE[2:3])
    return JointDistribution(**KERNEL, **SMALL).fit(x, y), x, y


@pytest.fixture(scope="module")
def pages(joint, labelled, tmp_path_factory):
    """The pages of both, and the scores that were returned."""
    folder, made = tmp_path_factory.mktemp("pages"), {}
    for kind, (model, x, y) in (("joint", joint), ("labelled", labelled)):
        events = ["number > 0.5"] if kind == "labelled" else []
        path = folder / f"{kind}.html"
        told = score_report(model, x, y, events=events, html=path, name="<i>my</i> model")
        made[kind] = path, told, score(model, x, y, events=events)
    return made


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may do with a page, in its own words."""


class Read(HTMLParser):
    """What a page holds: its elements, the text within each kind of them, and its figures."""

    VOID: ClassVar = {"meta", "link", "br", "img"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts, self.attributes = [], [], {}, []
        self.feed(text)
        self.close()
        self.figures = [ET.fromstring(each) for each in re.findall(r"(?s)<svg.*?</svg>", text)]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag] = self.texts.get(tag, "") + data


def page_of(path):
    text = path.read_text(encoding="utf-8")
    page = Read(text)
    assert page.open == []
    assert len(text) < 300_000
    assert "script" not in page.tags
    targets = [v for _, name, v in page.attributes if name in ("src", "href", "action", "data")]
    assert all(target.startswith(("#", "data:")) for target in targets)
    assert not re.search(r"url\((?!#)|@import|https?://", text)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert ("meta", "content", POLICY) in page.attributes
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for figure in page.figures:
        labels = [figure.find(kind) for kind in ("title", "desc")]
        assert figure.get("aria-labelledby").split() == [each.get("id") for each in labels]
        assert all(each.text.strip() for each in labels)
        assert re.search(r"\d", labels[1].text)  # it tells what can be seen
        assert not any("DejaVu" in str(each.attrib) for each in figure.iter())
    return page


def assert_same(told, expected):
    """The same scores, up to rounding: sums of more losses are products of wider matrices."""
    for mine, theirs in zip(told.lines(), expected.lines(), strict=True):
        assert mine[:2] == theirs[:2]
        assert mine[2:] == pytest.approx(theirs[2:], rel=1e-9, nan_ok=True)


def scores_of(page):
    """Texts of the cells of the table of scores."""
    return " ".join(page.texts["td"].split())


def test_a_page_of_several_columns(joint, pages):
    path, told, expected = pages["joint"]
    assert_same(told, expected)
    page = page_of(path)
    assert len(page.figures) == 2 * 5 + 1  # the kernels were given: no relevance
    assert "\u202e" not in path.read_text(encoding="utf-8")
    for name in HOSTILE:
        assert svg.cut(name, svg.LONGEST_IN_TEXT) in page.texts["bdi"]
        assert svg.visible(name) in page.texts["td"]  # of the fit, at full length
    assert page.texts["h1"] == "Scores of <i>my</i> model"
    assert "i" not in page.tags
    marginal = MarginalLaw(joint[0].model_)(X).crps(Y).mean()
    assert f"a CRPS of {told.crps.value:.3f} ±" in page.texts["p"]
    assert f"the law that ignores x has {marginal:.3f} ±" in page.texts["p"]
    headings = [tag for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == "h1"
    assert headings.count("h1") == 1
    scopes = [value for tag, name, value in page.attributes if (tag, name) == ("th", "scope")]
    assert len(scopes) == page.tags.count("th")


def test_figures_show_what_the_pass_has_summed(joint, pages):
    model, x, y = joint
    page = page_of(pages["joint"][0])
    drawn = {figure.get("aria-labelledby").split("-t ")[0]: figure for figure in page.figures}
    keys = [f"{kind}-{j}" for j in range(2) for kind in ("fan", "rows", "heat", "pit")]
    assert set(keys) | {"reliability-0", "reliability-1", "spectrum"} == set(drawn)
    given = model.conditional(x)
    for j, name in enumerate(y.columns):
        before, upto = (
            np.asarray(given.cdf(t, column=name, paired=True))
            for t in (np.nextafter(y[name], -np.inf), y[name].to_numpy())
        )
        levels = np.arange(21) / 20
        jump = np.where(upto > before, upto - before, 1.0)[:, None]
        part = (levels - before[:, None]) / jump
        part = np.where((upto > before)[:, None], part, levels >= upto[:, None])
        height = 20 * np.diff(np.clip(part, 0, 1).mean(axis=0))
        told = drawn[f"pit-{j}"].find("desc").text
        low, high = (float(f"{v:.4g}") for v in (height.min(), height.max()))
        assert told.startswith("20 bars between ")
        found = [float(v) for v in re.findall(r"[\d.]+\d", told.removeprefix("20 bars"))]
        assert found == pytest.approx([low, high], abs=2e-3)


def test_the_pass_is_the_only_one(single, tmp_path):
    """Every chunk is read once, whatever is drawn, and of a part too."""
    model, x, y = single
    names = {"x_names": list(x.columns), "y_names": list(y.columns)}
    write_store(tmp_path / "s.zarr", x.to_numpy(), y.to_numpy(), chunk_rows=128, **names)
    counted, group = opened(tmp_path / "s.zarr")
    before = {name: dict(counted.chunks(name)) for name in ("x", "y")}
    held_out, seen = open_sample(group).split(0.5)[1], []
    score_report(model, held_out, html=tmp_path / "page.html", progress=seen.append)
    for name in ("x", "y"):
        reads = {k: v - before[name].get(k, 0) for k, v in counted.chunks(name).items()}
        assert len(reads) == 5
        assert set(reads.values()) == {1}
    assert seen[-1].rows == N
    page_of(tmp_path / "page.html")


def test_labels_and_numbers(pages):
    path, told, expected = pages["labelled"]
    assert_same(told, expected)
    page = page_of(path)
    assert len(page.figures) == 5 + 3 + 1 + 1
    text = scores_of(page)
    assert "number > 0.5" in text
    for label in np.unique(LABELS):
        assert any(label in "".join(figure.itertext()) for figure in page.figures)
    assert "b" not in page.tags


CLASSIFIERS = {
    "joint": lambda: JointClassifier(kernel_x=KERNEL["kernel_x"], max_rank=15, tol=0.3),
    "logistic": lambda: KernelLogisticRegression(kernel=KERNEL["kernel_x"], max_rank=15, tol=0.3),
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_page_of_a_classifier(kind, tmp_path):
    model = CLASSIFIERS[kind]().fit(X, LABELS)
    path = tmp_path / "page.html"
    told = score_report(model, X, LABELS, html=path)
    page = page_of(path)
    assert_same(told, score(model, X, LABELS))
    shown = f"{100 * next(iter(told.labels.values())).accuracy.value:.1f}"
    assert f"is right in {shown}" in page.texts["p"]
    assert len(page.figures) >= 4
    share = max(np.mean(label == LABELS) for label in np.unique(LABELS))
    digits = re.escape(f"{share - 0.005:.2f}")  # those of either way of rounding
    assert re.search(f"accuracy.*{digits}", " ".join(page.texts["tr"].split()))


def test_labels_that_begin_with_an_underscore_are_in_the_legend(tmp_path):
    labels = np.where(X[:, 0] > 0, "_up", "down")
    score_report(CLASSIFIERS["logistic"]().fit(X, labels), X, labels, html=tmp_path / "page.html")
    figures = ["".join(each.itertext()) for each in page_of(tmp_path / "page.html").figures]
    (bands,) = (text for text in figures if "2 bands" in text)
    assert bands.count("_up") > bands.count("likeliest label on average is _up")


def test_indicators_of_missing_values_are_no_columns_of_the_sentence(tmp_path):
    x = np.where(RNG.random(X.shape) < 0.2, np.nan, X)
    given = {**KERNEL, **SMALL, "residual": False, "missing": "impute"}
    model = JointDistribution(**given).fit(x, Y[:, 0])
    score_report(model, x, Y[:, 0], html=tmp_path / "page.html")
    assert "of y0 given x0 and x1 have a CRPS" in page_of(tmp_path / "page.html").texts["p"]


def test_a_page_of_a_conditional_mean_embedding(tmp_path):
    kernel = kernels.Gaussian(1.0)
    model = ConditionalMeanEmbedding(kernel_x=kernel, kernel_y=kernel, tol=0.1, reg=1e-3).fit(X, Y)
    told = score_report(model, X, Y, html=tmp_path / "page.html")
    page = page_of(tmp_path / "page.html")
    assert f"{100 * told.r2['y0'].value:.1f}"[:3] in page.texts["p"]
    assert len(page.figures) == 2 + 1


def test_of_many_columns_some_are_drawn(joint, tmp_path, monkeypatch):
    model, x, y = joint
    for module in ("score", "page"):
        monkeypatch.setattr(f"cme_dask.reports.{module}.MOST_COLUMNS", 1)
    score_report(model, x, y, html=tmp_path / "page.html")
    page = page_of(tmp_path / "page.html")
    assert len(page.figures) == 5 + 1
    assert "first 1 of 2 columns" in page.texts["p"]
    assert svg.cut(HOSTILE[3], svg.LONGEST_IN_TEXT) in scores_of(page)


# The marginal law ------------------------------------------------------------------------------


def test_the_marginal_law_is_that_of_a_model_without_dependence(joint, labelled):
    for fitted, x, y in (joint, labelled):
        model = fitted.model_
        about = {k: v for k, v in model.about.items() if k != "calibration"}
        flat = replace(model, coef=0.0 * model.coef, residual=None, about=about)
        oracle = flat.conditional(x.to_numpy() if not model.x.columns.categories else x)
        law = MarginalLaw(model)(X)
        codes = open_sample(x, y).sources[1].read(0, N) if model.y.columns.categories else None
        rows = y.to_numpy() if codes is None else codes
        assert law.crps(rows) == pytest.approx(np.asarray(oracle.crps(y)), rel=1e-9, abs=1e-12)
        for name in model.y.columns.numeric:
            column = rows[:, model.y.columns.names.index(name)]
            found = law.cdf(column, column=name, paired=True)
            expected = np.asarray(oracle.cdf(column, column=name, paired=True))
            assert found == pytest.approx(expected, abs=1e-9)
            assert law.quantile([0.1, 0.5], name) == pytest.approx(
                np.asarray(oracle.quantile([0.1, 0.5], column=name))
            )
            assert law.expect([name]) == pytest.approx(np.asarray(oracle.expect([name])))
        for name in model.y.columns.categories:
            shares = np.asarray(oracle.predict_proba(name))
            assert law.predict_proba(name) == pytest.approx(shares)
        if not model.y.columns.categories:
            densities = np.asarray(oracle.log_pdf(y, paired=True))
            assert law.log_pdf(rows, paired=True) == pytest.approx(densities, rel=1e-9)
            draws = law.sample(500)
            assert draws.shape == (N, 500, 2)
            assert draws.mean(axis=(0, 1)) == pytest.approx(Y.mean(axis=0), abs=0.02)


def test_far_from_zero_its_scores_do_not_cancel(joint):
    _, x, y = joint
    far = y + 1e9
    near, moved = (
        MarginalLaw(JointDistribution(**KERNEL, **SMALL).fit(x, each).model_) for each in (y, far)
    )
    expected = near(X).crps(y.to_numpy())
    assert moved(X).crps(far.to_numpy()) == pytest.approx(expected, abs=1e-6)


# What the pass sums for figures ----------------------------------------------------------------


def test_bins_of_labels_and_confusion_are_those_of_numpy():
    rng = np.random.default_rng(2)
    chances = rng.dirichlet([0.6, 0.8, 1.0], 5000)
    codes = (chances.cumsum(axis=1) < rng.random((5000, 1))).sum(axis=1)
    weights = rng.random(5000)

    class Shares:
        def __init__(self, shares):
            self.shares = shares

        def predict_proba(self, column=None):
            return self.shares

    law = Law(Shares, crps=False, labels=True, label_bins=True)
    sample = open_sample(chances, codes.astype(float), weights=weights)
    names = replace(sample.columns[1], categories={"y0": ("a", "b", "c")})
    sample = replace(sample, columns=(sample.columns[0], names))
    executor = RunOptions("threads", 2).executor()
    found = score_pass(sample, {}, executor, laws={"law": law}, rows=50)
    top, hit = chances.max(axis=1), chances.argmax(axis=1) == codes
    for each in found.label_bins["law"]["y0"]:
        inside = (each.low <= top) & (top < each.high)
        assert each.share == pytest.approx(weights[inside].sum() / weights.sum())
        if inside.any():
            assert each.seen.value == pytest.approx(
                np.average(hit[inside], weights=weights[inside])
            )
            assert each.predicted == pytest.approx(np.average(top[inside], weights=weights[inside]))
    for label, row in enumerate(found.confusion["law"]["y0"]):
        mine = codes == label
        assert row == pytest.approx(np.average(chances[mine], axis=0, weights=weights[mine]))
    assert len(found.rows) == 50
    assert np.isin(found.rows.index, np.arange(5000)).all()
    assert (found.rows.parts[0] == chances[found.rows.index]).all()


# The file --------------------------------------------------------------------------------------


def test_a_page_is_whole_or_not_there(single, tmp_path, monkeypatch):
    model, x, y = single
    path = tmp_path / "page.html"
    dear = '<!doctype html><meta name="generator" content="cme_dask">'
    path.write_text(dear)
    before = []
    monkeypatch.setattr("cme_dask.reports.score.report_of", lambda *a, **k: before.append(1))
    with pytest.raises(DataError, match="already exists"):
        score_report(model, x, y, html=path)
    with pytest.raises(DataError, match="does not exist"):
        score_report(model, x, y, html=tmp_path / "no" / "page.html")
    assert not before  # nothing was read
    monkeypatch.undo()
    full = OSError(28, "No space left on device")

    def fails(*_, **__):
        raise full

    monkeypatch.setattr("pathlib.Path.write_text", fails)
    with pytest.raises(ResourceError, match="disk is full"):
        score_report(model, x, y, html=path, overwrite=True)
    monkeypatch.undo()
    assert path.read_text() == dear
    assert list(tmp_path.iterdir()) == [path]


def test_without_matplotlib_one_sentence(joint, tmp_path, monkeypatch):
    model, x, y = joint
    monkeypatch.setattr(plots, "available", lambda: False)
    with pytest.raises(ResourceError, match=r"install cme-dask\[plot\]"):
        score_report(model, x, y, html=tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_the_command_writes_the_page_and_prints_the_scores(single, tmp_path):
    _, x, y = single
    store = write_store(tmp_path / "s.zarr", x, y, x_names=list(x.columns), y_names=["<img src=x>"])
    page, model = tmp_path / "page.html", tmp_path / "m.model"
    JointDistribution(**KERNEL, **SMALL).fit(open_sample(store).split(0.2)[0]).save(model)

    def run(*args):
        result = CliRunner().invoke(cli, list(map(str, args)), catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr

    code, out, err = run("score", model, store, "--html", page, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["html"] == str(page)
    assert told["unseen"]
    assert told["log_score"] is None
    assert list(told["scores"]) == ["<img src=x>"]
    read = page_of(page)
    assert "that the fit has not seen" in read.texts["p"]
    assert f"On {told['rows']:,} rows" in read.texts["p"]
    assert "img" not in read.tags
    code, _, err = run("score", model, store, "--html", page)
    assert (code, "already exists" in err, "--overwrite" in err) == (2, True, True)
    code, out, _ = run("score", model, store, "--html", page, "--all", "--overwrite")
    assert (code, "log score" in out) == (0, True)
    assert "log score" in page_of(page).texts["th"]
    assert "log score" not in read.texts["th"]
    assert {each.name for each in tmp_path.iterdir()} == {"s.zarr", "m.model", "page.html"}


# Names in figures ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*HOSTILE, "a\x00b\ud800", "$\\frac{1}$", "]]>", "\U0001f600"])
def test_names_are_texts_of_figures(name):
    with svg.drawing() as figure:
        figure.axes[0].set_xlabel(svg.short(name))
        figure.axes[0].plot([0, 1], [0, 1])
        text = svg.markup(figure, "k", name, "from 0 to 1")
    root = ET.parse(io.StringIO(text)).getroot()
    assert svg.short(name) in [each.text for each in root.iter("text")]
    assert root.find("title").text == svg.visible(name)
    assert len(svg.short(name)) <= svg.LONGEST + 1
    assert {each.tag for each in root.iter()} <= {
        *("svg", "title", "desc", "g", "path", "text", "use", "defs", "clipPath", "rect")
    }


def contrast(one, two):
    """Of two colours, by WCAG 2."""

    def luminance(colour):
        parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    ("colours", "papers"),
    [(svg.LIGHT, ("#ffffff", "#f4f6f8")), (svg.DARKENED, ("#14191f", "#1d242c"))],
)
def test_texts_and_lines_can_be_told_from_the_paper(colours, papers):
    assert svg.LIGHT.keys() == svg.DARKENED.keys()
    for paper in papers:
        for name in ("ink", "muted"):
            assert contrast(colours[name], paper) >= 4.5, name
        for name in colours.keys() - {"grid", "ink", "muted"}:
            assert contrast(colours[name], paper) >= 2.8, name


# In a browser ----------------------------------------------------------------------------------

MARKS = """() => [...document.querySelectorAll('figure')].map(figure => {
  const drawn = [...figure.querySelectorAll('svg path, svg use, svg image')].map(mark => {
    const box = mark.getBoundingClientRect(), style = getComputedStyle(mark);
    const colours = mark.tagName === 'image' ? ['image'] : [style.fill, style.stroke];
    return [box.width + box.height > 3, colours];
  });
  const texts = [...figure.querySelectorAll('svg text')];
  return {
    key: figure.id,
    colours: [...new Set(drawn.flatMap(([seen, colours]) => seen ? colours : []))],
    ink: texts.map(text => getComputedStyle(text).fill),
    smallest: Math.min(...texts.map(text => text.getBoundingClientRect().height)),
  };
})"""


def rgb(colour):
    return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("kind", ["joint", "labelled"])
def test_a_browser_shows_data_in_all_figures_and_asks_for_nothing(
    browser, pages, kind, width, scheme
):
    path = pages[kind][0]
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    page = context.new_page()
    requests, said = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.goto(path.as_uri())
    assert requests == [path.as_uri()]
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("script, img, b, i").count() == 0
    colours = svg.DARKENED if scheme == "dark" else svg.LIGHT
    data = {rgb(colours[name]) for name in colours.keys() - {"ink", "muted", "grid"}} | {"image"}
    figures = page.evaluate(MARKS)
    assert len(figures) == len(page_of(path).figures)
    for figure in figures:
        assert data & set(figure["colours"]), figure["key"]
        assert rgb(colours["ink"]) in figure["ink"], figure["key"]
        assert figure["smallest"] >= 8.0, figure["key"]
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == rgb("#14191f" if scheme == "dark" else "#ffffff")
    names = set(page.locator("bdi").all_text_contents())
    assert {svg.visible(HOSTILE[0])} <= names
    context.close()


def test_a_figure_without_data_would_be_seen(browser):
    """The test above can fail: axes, ticks and a grid have no colour of data."""
    with svg.drawing() as figure:
        empty = svg.markup(figure, "k", "nothing", "0 points")
    palette = "".join(f"--{name}: {colour};" for name, colour in svg.LIGHT.items())
    context = browser.new_context()
    page = context.new_page()
    page.set_content(f"<style>:root {{ {palette} }}</style><figure>{empty}</figure>")
    (found,) = page.evaluate(MARKS)
    assert rgb(svg.GRID) in found["colours"]
    data = {rgb(each) for name, each in svg.LIGHT.items() if name not in ("ink", "muted", "grid")}
    assert not data & set(found["colours"])
    context.close()
