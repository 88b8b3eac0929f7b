"""How pictures are drawn; matplotlib comes with the extra ``plot``."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from cme_dask.errors import ResourceError

MISSING = "pictures need matplotlib, install cme-dask[plot]"

STYLE = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 120,
}
"""Matplotlib settings of all pictures."""

BLUE, DARK = "#1f5fa8", "#12365e"
PALETTE = (BLUE, "#c8552b", "#3a8f5c", "#7a4fa0", "#b08d1a", "#3b8ea5", "#a03b63", "#5b6570")

FEW = 3
"""Columns whose names are told; of more their number."""


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """ResourceError if matplotlib is not installed."""
    if not available():
        raise ResourceError(MISSING)


@contextlib.contextmanager
def drawing(ax: Any) -> Iterator[Any]:
    """Axes to draw into: users' own in their style, or new ones in ours."""
    require()
    if ax is not None:
        yield ax
        return
    from matplotlib import pyplot, rc_context

    with rc_context(STYLE):
        yield pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")[1]
