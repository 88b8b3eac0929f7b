"""One-line reprs of results, and sizes of bases, numbers with errors and times in words."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

# A ``repr`` that fits on a line, for results that hold arrays


_MOST = 300  # letters
_FEW = 4  # items of a sequence that are all shown
_NOTED = 0.005  # how far the mass of an interval is from its level at least, where it is told


def brief_repr(self: Any) -> str:
    """Class and fields, of arrays their shapes and of long sequences their lengths.

    The ``__repr__`` of a dataclass, or a named tuple, with arrays: their numbers are of little use
    to a reader.
    """
    names = getattr(self, "_fields", None) or [f.name for f in fields(self) if f.repr]
    shown = (f"{name}={_shown(getattr(self, name))}" for name in names)
    text = ", ".join(shown)
    if len(text) > _MOST:
        text = f"{text[: _MOST - 3]}..."
    return f"{type(self).__name__}({text})"


def passes(count: Any) -> str:
    """A number of passes in words."""
    return "1 pass" if int(count) == 1 else f"{int(count)} passes"


def missing_lines(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The line of a summary on rows that lack a value, where a fit left some out."""
    if "missing" not in about:
        return []
    missing = about["missing"]
    columns, filled = [], missing["filled"]
    for name, count in missing["columns"].items():
        fill = f" (filled in: {_shown(filled[name])})" if name in filled else ""
        columns.append(f"{name} {int(count):,}{fill}")
    rows = int(missing["rows"])
    text = f"{rows:,} row{'' if rows == 1 else 's'} left out"
    return [("missing", "; values by column: ".join(filter(None, [text, ", ".join(columns)])))]


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"<array {value.shape}>"
    if isinstance(value, (float, np.floating)):
        return f"{value:.6g}"
    if isinstance(value, np.generic):
        return repr(value.item())
    if type(value) in (list, tuple):
        if len(value) > _FEW:
            return f"<{len(value)} {_kind(value)}>"
        items = ", ".join(map(_shown, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if isinstance(value, dict):
        return f"<dict of {len(value)}>"
    return repr(value)


def _kind(values: Any) -> str:
    kinds = {type(value).__name__ for value in values}
    return f"{kinds.pop()}s" if len(kinds) == 1 else "items"


# The size of a basis in words


def rank_text(ranks: Sequence[int], functions: int) -> str:
    """Return the size of a basis in words.

    Parameters
    ----------
    ranks
        Numbers of pivots, one for each member of an averaged model.
    functions
        Number of functions of the model, all members together.
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    low, high = min(ranks), max(ranks)
    each = f"{low}" if low == high else f"{low} to {high}"
    return f"{len(ranks)} members of rank {each} each, {functions} functions"


# Numbers in tables


def number(value: float, digits: int = 4) -> str:
    """A number with 4 significant digits; integers in full, with thousands separators."""
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if 1e-4 <= abs(value) < 1e5 else f"{value:.{digits - 1}e}"


def with_error(value: float, std: float | None) -> str:
    """A value to the digits that its standard error, two digits of it, supports."""
    if std is None:
        return number(value)
    if not std > 0.0:
        return f"{number(value)} ± 0"
    places = decimals(std)
    return f"{value:.{places}f} ± {std:.{places}f}"


def decimals(std: float) -> int:
    """Decimal places that show two digits of a standard error."""
    return max(0, 1 - int(f"{std:e}".partition("e")[2])) if std > 0.0 else 4


def is_noted(mass: float, level: float) -> bool:
    """Whether the mass of intervals is told beside their coverage: it is not their level."""
    return abs(mass - level) > _NOTED


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, for people."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
