"""Pictures of conditional laws; matplotlib comes with the extra ``plot``."""

import contextlib
import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cme_dask.data.columns import Columns
from cme_dask.display import number
from cme_dask.errors import DataError, ResourceError

if TYPE_CHECKING:
    from cme_dask.models.law import ConditionalLaw


# How pictures are drawn; matplotlib comes with the extra ``plot``


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
    "text.parse_math": False,  # names of columns may hold a $
}
"""Matplotlib settings of all pictures."""

BLUE, DARK = "#1f5fa8", "#12365e"
PALETTE = (BLUE, "#c8552b", "#3a8f5c", "#7a4fa0", "#b08d1a", "#3b8ea5", "#a03b63", "#5b6570")

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

FEW = 3
"""Columns that are listed by name; of more, their number is."""


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


@contextlib.contextmanager
def picture(
    path: Any, width: float, height: float, *, dpi: int | None = None, **style: Any
) -> Iterator[Any]:
    """A figure of so many inches in our style, written to ``path`` as PNG unless that is None."""
    require()
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatterMathtext

    with rc_context(STYLE | style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        for ax in figure.axes:
            for axis in (ax.xaxis, ax.yaxis):
                if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
                    label_powers(axis)
        if path is not None:
            figure.savefig(path, format="png", dpi=dpi, metadata={"Software": "cme_dask"})


def rounded(value: float) -> float:
    """A number to 4 significant digits."""
    return float(f"{value:.4g}")


def label_powers(axis: Any) -> None:
    """Label the powers of ten of an axis, and if it has few of them the numbers between."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_view_interval()
    few = math.log10(high / low) < 1.5
    axis.set_major_formatter(_power)
    axis.set_minor_formatter(lambda value, _: number(rounded(value)) if few else "")
    axis.set_minor_locator(LogLocator(subs=(2.0, 5.0) if few else "auto"))


def _power(value: float, _: int) -> str:
    """A power of ten, in which Matplotlib itself would write mathematics."""
    exponent = round(math.log10(value))
    return number(10.0**exponent) if -2 < exponent < 4 else f"10{str(exponent).translate(_RAISED)}"


# Pictures of conditional laws: fans of quantiles, densities, distribution functions


Array = Any

LEVELS = (0.5, 0.8, 0.95)
"""Probabilities of the bands of a fan."""

_UNSEEN = "(unseen)"  # in place of a label that the fit has not seen
_BINS = 48  # of the y of a heat map
_STEPS = 400  # of a distribution function
_OUTER = 0.005  # mass left out on each side of an axis of y
_BRIGHTEST = 0.995  # of the densities of a heat map, which the darkest colour stands for


@dataclass(frozen=True, eq=False)
class _Axis:
    """Where the points of a law are drawn: positions in ascending order, and their labels."""

    order: Array
    at: Array
    label: str
    ticks: Sequence[str] | None = None

    @classmethod
    def of(cls, law: "ConditionalLaw", along: str | None) -> "_Axis":
        """Along a column of the given variable, by default the only one that varies, else rows."""
        if not len(law):
            raise DataError("there are no points to draw: give at least one")
        points, given = law.points, law._given_columns
        rows = np.arange(len(law))
        if given is None:
            if along is not None:
                raise DataError(
                    "laws of states and marginal laws are drawn along their rows, got "
                    f"along={along!r}: leave it out"
                )
            return cls(rows, rows, "row")
        if along is None:
            varying = np.flatnonzero((points != points[0]).any(axis=0))
            if len(varying) != 1:
                return cls(rows, rows, "row")
            along = given.names[int(varying[0])]
        values = points[:, given.positions([along])[0]]
        order = np.argsort(values, kind="stable")
        if along not in given.categories:
            return cls(order, values[order], _with_unit(along, given))
        known = dict(enumerate(given.categories[along]))
        labels = [known.get(int(code), _UNSEEN) for code in values[order]]
        return cls(order, rows, along, labels)

    def label_x(self, ax: Any) -> None:
        """Name the axis and, of labels, its places."""
        ax.set_xlabel(self.label)
        if self.ticks is not None:
            many = {"rotation": 60, "ha": "right"} if len(self.at) > 8 else {}
            ax.set_xticks(self.at, self.ticks, **many)


def plot_fan(
    law: "ConditionalLaw",
    column: str | None = None,
    *,
    levels: Sequence[float] = LEVELS,
    along: str | None = None,
    ax: Any = None,
) -> Any:
    """Draw medians and central bands of a column over the points: a fan of quantiles.

    Parameters
    ----------
    law
        The laws.
    column
        Column to draw; default the only column of numbers.
    levels
        Probabilities of the bands, in (0, 1).
    along
        Column of the given variable for the horizontal axis; default the only one that varies, else
        the number of the row. Laws of states and marginal laws are drawn along rows alone.
    ax
        Axes to draw into; default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DataError
        On levels out of range, unknown columns, or no points.
    ResourceError
        If matplotlib is not installed.
    """
    name, axis = _column(law, column), _Axis.of(law, along)
    widths = sorted({float(level) for level in levels}, reverse=True)
    if not widths or not all(0.0 < width < 1.0 for width in widths):
        raise DataError(f"levels are probabilities of bands, between 0 and 1, got {levels!r}")
    ends = np.array([[(1.0 - width) / 2.0, (1.0 + width) / 2.0] for width in widths])
    result = np.asarray(law.quantile(np.append(ends.ravel(), 0.5), column=name))
    result = result.reshape(len(law), -1)[axis.order]
    bands = [(width, result[:, 2 * i], result[:, 2 * i + 1]) for i, width in enumerate(widths)]
    with drawing(ax) as ax:
        lines = axis.ticks is None and len(law) > 1
        shown = draw_fan(ax, axis.at, bands, result[:, -1], lines=lines)
        axis.label_x(ax)
        ax.set_ylabel(_with_unit(name, law.columns))
        ax.set_title(f"Quantiles of {name}{_given(law)}")
        _legend_beside(ax, handles=shown[::-1], title="central bands")
    return ax


def draw_fan(
    ax: Any,
    at: Array,
    bands: Sequence[tuple[float, Array, Array]],
    median: Array,
    *,
    lines: bool = True,
) -> list[Any]:
    """Draw bands, their probabilities and ends from the widest on, and medians; what was drawn.

    Parameters
    ----------
    ax
        Axes.
    at
        Positions, ascending, shape (n,).
    bands
        Probability, lower and upper ends (n,) of each.
    median
        Shape (n,).
    lines
        Whether positions are points of a line; otherwise each has a bar.
    """
    shown: list[Any] = []
    # The narrowest band and the median lie on top.
    for i, (width, lower, upper) in enumerate(bands):
        shade = 0.18 + 0.5 * i / max(len(bands), 2)
        style = {"color": BLUE, "alpha": shade, "lw": 0, "label": f"{100 * width:g} %"}
        if lines:
            shown.append(ax.fill_between(at, lower, upper, **style))
        else:
            shown.append(ax.bar(at, upper - lower, 0.7, lower, **style))
    middle = {"lw": 2.0} if lines else {"lw": 0, "marker": "_", "ms": 14, "mew": 2.0}
    shown += ax.plot(at, median, color=DARK, label="median", **middle)
    if lines:
        ax.set_xlim(at[0], at[-1])
    return shown


def plot_density(
    law: "ConditionalLaw",
    column: str | None = None,
    *,
    along: str | None = None,
    bins: int = _BINS,
    ax: Any = None,
) -> Any:
    """Draw the density of a column over the points as a heat map, and its median.

    Densities are masses of bins over their widths, exactly those of the law and not smoothed.

    Parameters
    ----------
    law
        The laws.
    column
        Column to draw; default the only column of numbers.
    along
        Column of the given variable for the horizontal axis; default the only one that varies, else
        the number of the row. Laws of states and marginal laws are drawn along rows alone.
    bins
        Number of bins of the column, between its lowest and highest quantiles 0.005 and 0.995.
    ax
        Axes to draw into; default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DataError
        On unknown columns, fewer than 2 bins, or no points.
    ResourceError
        If matplotlib is not installed.
    """
    name, axis = _column(law, column), _Axis.of(law, along)
    if not isinstance(bins, (int, np.integer)) or bins < 2:
        raise DataError(f"bins must be an integer of at least 2, got {bins!r}")
    edges, density, top = densities(law, name, bins)
    density = density[axis.order]
    middle = np.asarray(law.median(column=name))[axis.order]
    unit = law.columns.units.get(name)
    with drawing(ax) as ax:
        from matplotlib.colors import PowerNorm

        filled = ax.pcolormesh(
            borders(axis.at),
            edges,
            density.T,
            cmap="GnBu",
            norm=PowerNorm(
                0.5, vmin=0.0, vmax=top
            ),  # so that wide laws are seen beside narrow ones
            rasterized=True,
        )
        scale = f"density [1/({unit})]" if unit else "density"
        ax.figure.colorbar(filled, ax=ax, label=scale, extend="max", pad=0.02)
        ax.plot(axis.at, middle, color="#222222", lw=1.2, label="median")
        axis.label_x(ax)
        ax.set_ylabel(_with_unit(name, law.columns))
        ax.set_title(f"Density of {name}{_given(law)}")
        ax.grid(visible=False)
        # Matplotlib would look for the best place among all cells of the mesh, for seconds.
        low = middle[0] < 0.5 * (edges[0] + edges[-1])
        ax.legend(loc="upper left" if low else "lower left")
    return ax


def densities(law: "ConditionalLaw", name: str, bins: int = _BINS) -> tuple[Array, Array, float]:
    """Densities of a column on even bins that hold nearly all the mass of every law.

    Returns
    -------
    edges : (bins + 1,), in the unit of the column
    density : (n, bins), masses of bins over their widths
    top : the density that the darkest colour of a heat map stands for
    """
    edges = np.linspace(*_range(law, name), bins + 1)
    below = np.asarray(law.cdf(edges, column=name)).reshape(len(law), -1)
    density = np.diff(below, axis=1) / np.diff(edges)
    return edges, density, float(np.quantile(density, _BRIGHTEST)) or float(density.max())


def plot_cdf(law: "ConditionalLaw", column: str | None = None, *, ax: Any = None) -> Any:
    """Draw the distribution functions of a column, a line for each of at most 8 points.

    Parameters
    ----------
    law
        The laws.
    column
        Column to draw; default the only column of numbers.
    ax
        Axes to draw into; default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DataError
        On unknown columns, no points or too many.
    ResourceError
        If matplotlib is not installed.
    """
    if len(law) > len(PALETTE):
        raise DataError(
            f"plot_cdf draws at most {len(PALETTE)} points, got {len(law):,}: "
            "take some of them, or plot_fan"
        )
    name, axis = _column(law, column), _Axis.of(law, None)
    low, high = _range(law, name)
    t = np.linspace(low, high, _STEPS)
    result = np.asarray(law.cdf(t, column=name)).reshape(len(law), -1)[axis.order]
    texts = axis.ticks or [f"{value:.4g}" for value in axis.at]
    with drawing(ax) as ax:
        for values, text, colour in zip(result, texts, PALETTE, strict=False):
            ax.step(t, values, where="post", color=colour, lw=1.8, label=legend_text(text))
        ax.set(xlabel=_with_unit(name, law.columns), ylim=(0.0, 1.02), xlim=(low, high))
        ax.set_ylabel(f"P({name} ≤ t)")
        ax.set_title(f"Distribution functions of {name}{_given(law)}")
        _legend_beside(ax, title=axis.label)
    return ax


def _column(law: "ConditionalLaw", column: str | None) -> str:
    """The column to draw; DataError if it is not given, or holds labels."""
    if column is None and len(law.numeric) == 1:
        return law.numeric[0]
    if column not in law.numeric:
        listed = ", ".join(map(repr, law.numeric)) or "no columns of numbers"
        problem = "name the column to draw" if column is None else f"got column {column!r}"
        raise DataError(f"{problem}: there are {listed}")
    return column


def _range(law: "ConditionalLaw", name: str) -> tuple[float, float]:
    """An axis of y that holds nearly all the mass of every law."""
    ends = np.asarray(law.quantile([_OUTER, 1.0 - _OUTER], column=name)).reshape(len(law), 2)
    low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
    room = 0.02 * (high - low) or 0.5
    return low - room, high + room


def borders(at: Array) -> Array:
    """Borders halfway between ascending positions."""
    if len(at) == 1:
        return np.array([at[0] - 0.5, at[0] + 0.5])
    middle = (at[1:] + at[:-1]) / 2.0
    return np.concatenate([[2 * at[0] - middle[0]], middle, [2 * at[-1] - middle[-1]]])


def _with_unit(name: str, columns: Columns) -> str:
    return f"{name} [{columns.units[name]}]" if name in columns.units else name


def _given(law: "ConditionalLaw") -> str:
    """What is given, of a few columns."""
    names = () if law._given_columns is None else law._given_columns.names
    return f" given {', '.join(names)}" if 0 < len(names) <= FEW else ""


def legend_text(text: str) -> str:
    """A text that legends list: Matplotlib leaves out those that begin with an underscore."""
    return f"\u200b{text}" if text.startswith("_") else text


def _legend_beside(ax: Any, *, title: str, handles: Sequence[Any] | None = None) -> None:
    """A legend that covers nothing."""
    ax.legend(
        handles=handles, title=title, alignment="left", loc="upper left", bbox_to_anchor=(1.0, 1.0)
    )
