"""A card in a notebook that shows how far a fit is, and changes in its place: HTML, and a line.

The card is an output like any other: front ends update it while the fit runs, files keep its last
state, and where no HTML is shown it is the line. It needs no widgets and no scripts.
"""

import contextvars
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from cme_dask.display import duration

_COLOUR = "#2f6fb3"  # readable on a light and on a dark ground
_WIDE, _HIGH, _MARGIN = 220, 64, 4  # pixels of a curve
_MOST = 200  # points of a curve, beyond which every other one is left out

Point = tuple[float, float]


@dataclass
class Curve:
    """Figures that come in while a fit runs.

    Attributes
    ----------
    name
        What is drawn.
    logarithmic
        Whether the vertical axis is.
    points
        Ascending in the horizontal coordinate.
    """

    name: str
    logarithmic: bool
    points: list[Point] = field(default_factory=list)
    _next: list[Point] = field(default_factory=list, init=False, repr=False)

    def add(self, x: float, y: float) -> None:
        """Add a point, if it can be drawn; a lower x begins another curve.

        One point is no curve yet: that of before stays until there are two.
        """
        if not math.isfinite(y) or (self.logarithmic and y <= 0.0):
            return
        if self.points and x <= (self._next or self.points)[-1][0]:
            self._next = [(x, y)]
        elif self._next:
            self.points, self._next = [*self._next, (x, y)], []
        else:
            self.points.append((x, y))
        if len(self.points) > _MOST:
            self.points = [*self.points[:-1:2], self.points[-1]]

    def svg(self) -> str:
        """The curve, with its last value in words; nothing of less than two points."""
        if len(self.points) < 2:
            return ""
        heights = [math.log10(y) if self.logarithmic else y for _, y in self.points]
        across = _scaled([x for x, _ in self.points], _MARGIN, _WIDE - _MARGIN)
        down = _scaled(heights, _HIGH - _MARGIN, _MARGIN)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
        label = escape(f"{self.name}: {self.points[-1][1]:.3g}")
        return (
            f'<div style="margin:0.4em 0 0">{label}<br/>'
            f'<svg role="img" aria-label="{label}" width="{_WIDE}" height="{_HIGH}" '
            f'viewBox="0 0 {_WIDE} {_HIGH}"><polyline fill="none" stroke="{_COLOUR}" '
            f'stroke-width="1.5" points="{path}"/></svg></div>'
        )


def _scaled(values: Sequence[float], low: float, high: float) -> list[float]:
    """Values such that their least one is ``low`` and their largest ``high``."""
    least, most = min(values), max(values)
    width = (most - least) or 1.0
    return [low + (high - low) * (value - least) / width for value in values]


@dataclass(frozen=True)
class FitCard:
    """A state of a fit, for IPython's display.

    Attributes
    ----------
    line
        All of it in words.
    head
        The step, or how the fit ended.
    text
        Figures of the step.
    done
        Share of the whole fit, in [0, 1].
    seconds, left
        Since the fit began, and those that remain; None where nothing is known, or nothing is left.
    curves
        Drawn below, those that have points.
    """

    line: str
    head: str
    text: str
    done: float
    seconds: float
    left: float | None
    curves: tuple[Curve, ...] = ()

    def __repr__(self) -> str:
        return self.line

    def _repr_html_(self) -> str:
        clock = duration(self.seconds)
        if self.left is not None:
            clock += f", {duration(self.left)} left"
        curves = "".join(curve.svg() for curve in self.curves)
        return (
            '<div style="max-width:40em;line-height:1.5">'
            '<div style="display:flex;justify-content:space-between;gap:2em">'
            f"<b>{escape(self.head)}</b><span>{clock}</span></div>"
            f'<div role="progressbar" aria-valuenow="{100 * self.done:.0f}" '
            'style="height:0.5em;border-radius:0.25em;background:#8886">'
            f'<div style="width:{100 * self.done:.1f}%;height:100%;border-radius:0.25em;'
            f'background:{_COLOUR}"></div></div>'
            f"<div>{escape(self.text)}</div>"
            f'<div style="display:flex;flex-wrap:wrap;gap:0 1.5em;font-size:smaller">{curves}</div>'
            "</div>"
        )


class CardOutput:
    """The place of a card among the outputs of the cell that runs.

    Parameters
    ----------
    card
        Shown at first.
    """

    def __init__(self, card: FitCard) -> None:
        from IPython.display import display  # part of every kernel that calls this

        self._handle: Any = display(card, display_id=True)
        # Which cell it is, kernels know by the context: other threads draw as well.
        self._context = contextvars.copy_context()

    def update(self, card: FitCard) -> None:
        """Show another card in its place; from one thread at a time."""
        if self._handle is not None:
            self._context.run(self._handle.update, card)
