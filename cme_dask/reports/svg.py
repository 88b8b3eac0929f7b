"""Figures of pages: Matplotlib's SVG, in the colours of the page and with its text as text.

Colours become CSS variables, so that a page which is read in the dark changes them, and every text
stays text, in the font of the page. Figures are small, so that several fit beside each other, and
one still is readable on a narrow screen.
"""

import io
import re
import unicodedata
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from markupsafe import Markup

from cme_dask.models.plots import DARK, PALETTE, STYLE, require

INK, MUTED, GRID = "#1b2733", "#556069", "#dfe3e8"
"""Text and axes, what is less important, and lines of a grid, on a light page."""

_NAMES = ("blue", "orange", "green", "purple", "ochre", "teal", "pink", "slate")
LIGHT = {
    **dict(zip(_NAMES, PALETTE, strict=True)),
    "deep": DARK,
    "ink": INK,
    "muted": MUTED,
    "grid": GRID,
}
"""The colours of a light page by the names of their CSS variables."""

DARKENED = {
    "blue": "#6fb1f2",
    "orange": "#f2946b",
    "green": "#71c993",
    "purple": "#bd98e0",
    "ochre": "#dcc05c",
    "teal": "#79c5da",
    "pink": "#e58aae",
    "slate": "#9aa5b1",
    "deep": "#d8e9fb",
    "ink": "#e6e9ed",
    "muted": "#a7b0ba",
    "grid": "#333c46",
}
"""The same on a dark page."""

SIZE = 4.4, 2.9
"""Width and height of a figure in inches; text is as large as on a page 440 pixels wide."""

LONGEST, LONGEST_IN_TEXT = 26, 60
"""Letters of a name in a figure, and in the text of a page."""

# Letters that hide or turn others, and those that XML or UTF-8 can't hold.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_COLOUR, _NUMBER = re.compile(r"#[0-9a-fA-F]{6}\b"), re.compile(r"-?\d+\.\d+")
_FAMILY, _STILL = re.compile(r"font-family:[^;]*;?\s*"), re.compile(r"rotate\(-?0 ")
_VARIABLES = {colour: name for name, colour in LIGHT.items()}
_LINK = "{http://www.w3.org/1999/xlink}href"


def visible(text: str) -> str:
    """A name or label, each letter that is unseen or turns others around replaced by a mark."""
    return _UNSEEN.sub("\ufffd", text)


def cut(text: str, longest: int) -> str:
    """A name or label in a line, of so many letters at most."""
    text = visible(text).replace("\t", " ").replace("\n", " ")
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def short(text: str, longest: int = LONGEST) -> str:
    """A name or label for a figure.

    After one that is read from right to left, what follows is read from left to right again.
    """
    text = cut(text, longest)
    turns = any(unicodedata.bidirectional(letter) in ("R", "AL", "AN") for letter in text)
    return f"{text}\u200e" if turns else text


def isolated(text: str) -> Markup:
    """A name or label for the text of a page, which does not turn around what is beside it."""
    return Markup("<bdi>{}</bdi>").format(cut(text, LONGEST_IN_TEXT))


@contextmanager
def drawing(width: float = SIZE[0], height: float = SIZE[1]) -> Iterator[Any]:
    """A figure with axes in the colours of a page; ResourceError without Matplotlib."""
    require()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    style = {
        **STYLE,
        **colours,
        "axes.edgecolor": MUTED,
        "grid.color": GRID,
        "font.size": 10,
        "axes.titlesize": 10,
        "axes.labelsize": 10,
        "legend.fontsize": 9,
        "axes.unicode_minus": True,
        "svg.fonttype": "none",
    }
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.subplots()
        yield figure


def markup(figure: Any, key: str, title: str, description: str) -> str:
    """The figure as an element of a page, with a title and a description for who doesn't see it.

    Parameters
    ----------
    figure
        Drawn within :func:`drawing`.
    key
        A word that no other figure of the page has.
    title, description
        What it shows, and what can be seen in it.
    """
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.hashsalt": key}), warnings.catch_warnings():
        # Letters that Matplotlib's own font lacks are drawn by the browser.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    root = ET.fromstring(written.getvalue())
    _simplify(root)
    box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib |= {"viewBox": box, "role": "img", "aria-labelledby": f"{key}-t {key}-d"}
    for place, (name, text) in enumerate((("title", title), ("desc", description))):
        element = ET.Element(name, id=f"{key}-{name[0]}")
        element.text = visible(text)
        root.insert(place, element)
    return ET.tostring(root, encoding="unicode")


def _simplify(root: ET.Element) -> None:
    """Take off what the page gives or nobody reads, and name the colours."""
    links = {element.get(_LINK, "").removeprefix("#") for element in root.iter()}
    for parent in list(root.iter()):
        for child in list(parent):
            unseen = child.get("style") == "fill: none"
            if unseen or child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
            child.tail = None
        if not (parent.text or "").strip():
            parent.text = None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = element.attrib
        if _LINK in attributes:
            attributes["href"] = attributes.pop(_LINK).replace("\n", "")
        if element.tag != "clipPath" and attributes.get("id") not in links:
            attributes.pop("id", None)
        if _STILL.match(attributes.get("transform", "")):
            del attributes["transform"]
        for name in ("d", "x", "y", "width", "height", "transform"):
            if name in attributes:
                places = 2 if name == "transform" else 1
                value = _NUMBER.sub(partial(_rounded, places), attributes[name])
                attributes[name] = " ".join(value.split())
        if "style" in attributes:
            style = _FAMILY.sub("", attributes["style"])
            attributes["style"] = _COLOUR.sub(_variable, style)


def _rounded(places: int, value: "re.Match[str]") -> str:
    return f"{float(value[0]):.{places}f}".removesuffix(".0")


def _variable(colour: "re.Match[str]") -> str:
    name = _VARIABLES.get(colour[0].lower())
    return colour[0] if name is None else f"var(--{name})"
