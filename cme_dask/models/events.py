"""Events such as ``PM2.5 > 75`` or ``station == "Dongsi"``, from text, nothing executed."""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace

from cme_dask.errors import DataError

Array = Any
Labels = Mapping[str, Sequence[str]]
"""Labels of the codes 0, 1, ... by categorical column."""

_COMPARE = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}
_SPLIT = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*")
_QUOTED = re.compile(r"\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)'")
_NUMBER = r"\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?"
_SHIFTED = re.compile(rf"(?P<column>.+?)\s*(?P<sign>[-+])\s*(?P<number>{_NUMBER})")
_FORM = 'an event reads COLUMN <= NUMBER, COLUMN > COLUMN + NUMBER or COLUMN == "LABEL"'


@dataclass(frozen=True)
class Event:
    """Indicator of ``rows[:, left] <compare> rows[:, right] + offset``; right None means zero.

    Called with rows (n, d), returns zeros and ones of shape (n,).
    """

    left: int
    compare: str
    right: int | None
    offset: float

    def __call__(self, rows: Array) -> Array:
        """Return 1 where the event holds, else 0."""
        xp = array_namespace(rows)
        bound = self.offset if self.right is None else rows[:, self.right] + self.offset
        return xp.astype(_COMPARE[self.compare](rows[:, self.left], bound), xp.float64)

    @classmethod
    def parse(cls, text: str, names: Sequence[str], labels: Labels | None = None) -> "Event":
        """From ``COLUMN <= NUMBER``, ``COLUMN < COLUMN + NUMBER`` or ``COLUMN == "LABEL"``.

        Categorical columns compare with their labels, by ``==`` and ``!=``; quotes around a label
        may be left out.

        Parameters
        ----------
        text
            The event.
        names
            Names of the columns.
        labels
            Labels of the codes 0, 1, ... by categorical column. Where there are none, they aren't
            known yet: the form is checked, and the event equals no label.

        Raises
        ------
        DataError
            If the text has another form, names an unknown column or label, or its bound is not
            finite.
        """
        parts = _SPLIT.split(text.strip(), maxsplit=1)
        if len(parts) != 3:
            raise DataError(f"{_FORM}, got {text!r}")
        left, compare, right = parts
        quoted = _QUOTED.fullmatch(right)
        known = (labels or {}).get(left)
        if known is not None:
            label = right if quoted is None else quoted["double"] or quoted["single"] or ""
            if compare not in ("==", "!="):
                raise DataError(f"{left!r} holds labels: compare it by == or != in {text!r}")
            return cls(_position(left, names), compare, None, _code(label, left, known))
        if quoted is None and _SPLIT.search(right):
            raise DataError(f"{_FORM}, got {text!r}")
        position = _position(left, names)
        if quoted is not None:
            raise DataError(f"{left!r} holds numbers, which no label fits: leave out the quotes")
        column, offset = _bound(right, names)
        if not math.isfinite(offset):
            raise DataError(f"the bound must be finite in the event {text!r}")
        other = None if column is None else _position(column, names)
        if column in (labels or {}):
            raise DataError(f"{column!r} holds labels: {left!r} can't be compared with it")
        return cls(position, compare, other, offset)


def _code(label: str, column: str, labels: Sequence[str]) -> float:
    if not labels:
        return math.nan
    if label not in labels:
        raise DataError(
            f"column {column!r} has no label {label!r}: there are {', '.join(map(repr, labels))}"
        )
    return float(labels.index(label))


def _bound(text: str, names: Sequence[str]) -> tuple[str | None, float]:
    """The column, if there is one, and the number of the right side."""
    try:
        return None, float(text)
    except ValueError:
        shifted = None if text in names else _SHIFTED.fullmatch(text)
    if shifted is None:
        return text, 0.0
    return shifted["column"], float(shifted["sign"] + shifted["number"])


def _position(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise DataError(f"unknown column {name!r} in an event: there are {', '.join(names)}")
    return names.index(name)
