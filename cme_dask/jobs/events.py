"""Events such as ``PM2.5 > 75`` or ``y1 <= y2 - 0.5``, from text, without executing anything."""

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace

from cme_dask.errors import DataError

Array = Any

_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_SPLIT = re.compile(r"\s*(<=|>=|<|>)\s*")
_NUMBER = r"\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?"
_SHIFTED = re.compile(rf"(?P<column>.+?)\s*(?P<sign>[-+])\s*(?P<number>{_NUMBER})")


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
    def parse(cls, text: str, names: Sequence[str]) -> "Event":
        """From ``COLUMN <= NUMBER``, ``COLUMN > COLUMN`` or ``COLUMN < COLUMN + NUMBER``.

        Raises
        ------
        DataError
            If the text has another form, names an unknown column, or its bound is not finite.
        """
        parts = _SPLIT.split(text.strip())
        if len(parts) != 3:
            raise DataError(
                f"an event reads COLUMN <= NUMBER or COLUMN > COLUMN + NUMBER, got {text!r}"
            )
        left, compare, right = parts
        column, offset = _bound(right, names)
        if not math.isfinite(offset):
            raise DataError(f"the bound must be finite in the event {text!r}")
        other = None if column is None else _position(column, names)
        return cls(_position(left, names), compare, other, offset)


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
