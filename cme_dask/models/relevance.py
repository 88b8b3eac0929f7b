"""Length scales and relevance of the columns of a fitted model, as a table and a picture."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from cme_dask.data.columns import Columns
from cme_dask.errors import DataError, printable
from cme_dask.kernels.length_scales import WIDEST, ColumnScale
from cme_dask.models.plots import BLUE, PALETTE, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SHOWN = 8  # columns in one line of a summary
_NEAR = 1.1  # within this factor of a bound a length scale is at it


@dataclass(frozen=True)
class ColumnRelevance:
    """How finely a model looks at one column.

    Attributes
    ----------
    column : str
        Its name.
    variable : str
        ``"x"`` or ``"y"``.
    length_scale : float
        Length scale l of the best kernel in the units of the column; infinite where the column is
        ignored. In normal scores: the width, around the median, of the interval of length l. Of
        labels without a unit, see :class:`cme_dask.kernels.Categorical`.
    deviations : float
        The same in standard deviations; NaN where a given kernel doesn't standardise.
    relevance : float
        Mean of 1 / ``deviations`` over the averaged models; 0 where all of them ignore the column.
    bound : str
        ``"ignored"``; ``"at the lower bound"`` or ``"at the upper bound"`` of the search, which
        would have gone on; or empty.
    """

    column: str
    variable: str
    length_scale: float
    deviations: float
    relevance: float
    bound: str = ""


@dataclass(frozen=True, repr=False)
class LengthScales(Sequence[ColumnRelevance]):
    """Length scales of all columns, those of x first; ``length_scales["wd"]`` is that of a column.

    Attributes
    ----------
    rows : tuple of ColumnRelevance
        One for each column.
    """

    rows: tuple[ColumnRelevance, ...]

    def __getitem__(self, key: Any) -> Any:
        """A row by its place or the name of its column (that of x, if y has the same name)."""
        if isinstance(key, str):
            result = [row for row in self.rows if row.column == key]
            if not result:
                names = ", ".join(row.column for row in self.rows)
                raise DataError(f"there is no column {key!r}: the model has {names}")
            return result[0]
        return self.rows[key]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ColumnRelevance]:
        return iter(self.rows)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the columns that the model does not depend on."""
        return tuple(row.column for row in self.rows if row.bound == "ignored")

    def to_list(self) -> list[dict[str, Any]]:
        """JSON form; None for what is not finite."""
        return [
            {
                "column": row.column,
                "variable": row.variable,
                **{
                    name: value if math.isfinite(value) else None
                    for name, value in (
                        ("length_scale", row.length_scale),
                        ("deviations", row.deviations),
                        ("relevance", row.relevance),
                    )
                },
                "bound": row.bound,
            }
            for row in self.rows
        ]

    def __repr__(self) -> str:
        table = [_HEAD, *map(_cells, self.rows)]
        widths = [max(len(line[j]) for line in table) for j in range(len(_HEAD))]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in _HEAD)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row)) + "</tr>"
            for row in self.rows
        )
        return f"<table><tr>{head}</tr>{body}</table>"


_HEAD = ("column", "of", "length scale", "in deviations", "relevance", "bound")


def _cells(row: ColumnRelevance) -> tuple[str, ...]:
    numbers = (row.length_scale, row.deviations, row.relevance)
    shown = ("-" if math.isnan(v) else "ignored" if math.isinf(v) else f"{v:.3g}" for v in numbers)
    bound = "" if row.bound == "ignored" else row.bound
    return (printable(row.column), row.variable, *shown, bound)


def length_scales(sides: Sequence[tuple[str, Columns, Any]]) -> LengthScales:
    """The table of a model.

    Parameters
    ----------
    sides
        Name, columns and basis of each variable.
    """
    rows = []
    for variable, columns, basis in sides:
        parts = getattr(basis, "parts", (basis,))
        count = len(columns.names)
        members = [_scales_of(part.newton, count) for part in parts]
        for j, name in enumerate(columns.names):
            of_members = [scales[j] for scales in members]
            rows.append(_row(name, variable, of_members))
    return LengthScales(tuple(rows))


def _scales_of(newton: Any, count: int) -> tuple[ColumnScale | None, ...]:
    kernel = getattr(newton, "kernel", None)
    return (None,) * count if kernel is None else kernel.column_scales(count)


def _row(name: str, variable: str, members: Sequence[ColumnScale | None]) -> ColumnRelevance:
    best = members[0]
    if best is None:
        return ColumnRelevance(name, variable, math.nan, math.nan, math.nan)
    known = [m for m in members if m is not None]
    standardised = best.transform is not None
    each = [0.0 if m.ignored else 1.0 / m.scale for m in known]
    relevance = sum(each) / len(each) if standardised or not any(each) else math.nan
    deviations = math.inf if best.ignored else best.scale if standardised else math.nan
    # Where averaged models disagree, the column counts.
    ignored = all(m.ignored for m in known)
    bound = "ignored" if ignored else _bound(best) if standardised else ""
    return ColumnRelevance(name, variable, best.in_units, deviations, relevance, bound)


def _bound(scale: ColumnScale) -> str:
    if scale.scale <= WIDEST[0] * _NEAR:
        return "at the lower bound"
    if WIDEST[1] / _NEAR <= scale.scale and not scale.ignored:
        return "at the upper bound"
    return ""


def scales_line(scales: LengthScales) -> str | None:
    """One line of a model's summary; None where no kernel was learned."""
    shown = [row for row in scales if row.variable == "x" and not math.isnan(row.deviations)]
    if not shown:
        return None
    used = sorted((row for row in shown if row.bound != "ignored"), key=lambda r: -r.relevance)
    text = _listed(
        [
            f"{row.column} {row.length_scale:.3g}" + (f" ({row.bound})" if row.bound else "")
            for row in used
        ]
    )
    ignored = [row.column for row in shown if row.bound == "ignored"]
    return text + (f"; ignored: {_listed(ignored)}" if ignored else "")


def _listed(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return ", ".join([*texts[:_SHOWN], *more])


def plot_relevance(model: Any, *, ax: "Axes | None" = None) -> Any:
    """Draw how finely the model looks at each column: 1 / length scale, in standard deviations.

    Columns that it ignores are written as such.

    Parameters
    ----------
    model
        A fitted model.
    ax
        Axes to draw into; default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DataError
        If kernels were given, so that nothing is known of the columns' deviations.
    ResourceError
        If matplotlib is not installed.
    """
    rows = [row for row in model.length_scales if not math.isnan(row.relevance)]
    if not rows:
        raise DataError(
            "the relevance of columns is known where kernels are learned: fit without kernels"
        )
    with drawing(ax) as ax:
        at = range(len(rows))[::-1]
        colours = [BLUE if row.variable == "x" else PALETTE[1] for row in rows]
        ax.barh(at, [row.relevance for row in rows], color=colours, height=0.6)
        for place, row in zip(at, rows, strict=True):
            if row.bound:
                ax.annotate(
                    row.bound,
                    (row.relevance, place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9,
                    color="#555555",
                )
        ax.set_yticks(at, [f"{row.column} ({row.variable})" for row in rows])
        ax.set_xlabel("relevance: 1 / length scale in standard deviations")
        ax.set_title("What the model looks at")
        ax.grid(axis="y", visible=False)
    return ax
