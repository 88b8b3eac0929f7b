"""Which rows belong together: folds and hold-outs by row, by group or by blocks of time.

Rows of one station, or of one week, are alike: a model that is tried on rows whose neighbours it
has seen looks better than it is. So whole units are held out. A unit's fold, and on which side of
a split it lies, are hashes of (salt, unit): nothing is stored for the table, any strip of rows
knows its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.hashing import fold_numbers, number_hash, unit_interval

Array = Any

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_BLOCK = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(_SECONDS)})")
_PART_SALT = 3 << 62  # salts of folds and seeds of row samples are below
_MAX_SEED = 1 << 62


@dataclass(frozen=True)
class Folding:
    """How rows are put together to units.

    Parameters
    ----------
    by
        ``"rows"``: each row is a unit. ``"group"``: rows with the same group are one. ``"time"``:
        rows of the same block of time, floor(time / block), are one; blocks count from 1970-01-01
        00:00 UTC, so weeks begin on Thursdays.
    block
        Length of the blocks in seconds, for ``"time"``.
    """

    by: str = "rows"
    block: float | None = None

    def __post_init__(self) -> None:
        if self.by not in ("rows", "group", "time"):
            raise DataError(f"folds are by rows, group or time, got {self.by!r}")
        timed = self.block is not None
        if timed != (self.by == "time") or (
            self.block is not None and not 0.0 < self.block < np.inf
        ):
            raise DataError(
                "folds by time, and only these, need the length of a block as a positive number of "
                f"seconds, got {self.block!r}"
            )

    @classmethod
    def parse(cls, text: "str | Folding") -> Self:
        """From ``rows``, ``group``, or a length of time such as ``7d``, ``12h`` or ``30min``.

        Raises
        ------
        DataError
            If it is none of these.
        """
        if isinstance(text, cls):
            return text
        if text in ("rows", "group"):
            return cls(str(text))
        found = _BLOCK.fullmatch(text) if isinstance(text, str) else None
        if found is None or not float(found[1]):
            raise DataError(
                "folds are by 'rows', by 'group', or by blocks of time such as '7d', '12h' or "
                f"'30min' (units: {', '.join(_SECONDS)}), got {text!r}"
            )
        return cls("time", float(found[1]) * _SECONDS[found[2]])

    def __str__(self) -> str:
        """The text that :meth:`parse` takes."""
        if self.block is None:
            return self.by
        whole = [unit for unit, seconds in _SECONDS.items() if self.block % seconds == 0.0]
        unit = whole[-1] if whole else "s"
        # Weeks are what 7d is called by; nobody says 1w.
        unit = "d" if unit == "w" else unit
        return f"{self.block / _SECONDS[unit]!r}".removesuffix(".0") + unit

    @property
    def column(self) -> str | None:
        """The column that tells the units, ``"group"`` or ``"time"``; None for rows."""
        return None if self.by == "rows" else self.by

    def units(self, rows: Array, columns: Mapping[str, Array]) -> Array:
        """A 64-bit number for each row that is equal where the units are, shape (n,).

        Parameters
        ----------
        rows
            Global row indices, shape (n,).
        columns
            Values of the columns ``group`` and ``time`` at these rows, as float64, if needed.
        """
        if self.column is None:
            return rows.astype(np.uint64)
        values = columns[self.column]
        if self.block is not None:
            values = np.floor(values / self.block)
        # The bits of a number tell it from all others; those of -0 from 0, which they should not.
        return np.ascontiguousarray(values + 0.0).view(np.uint64)

    def folds(self, rows: Array, columns: Mapping[str, Array], n_folds: int) -> Array:
        """Fold number in ``[0, n_folds)`` of each row, as uint8; arguments as of :meth:`units`."""
        if n_folds == 1:
            return np.zeros(len(rows), dtype=np.uint8)
        return fold_numbers(self.units(rows, columns), n_folds)


BY_ROWS = Folding()


@dataclass(frozen=True)
class Part:
    """One side of a split: the units that are held out, or the rest.

    Parameters
    ----------
    folding
        What the units are.
    share
        Chance of a unit to be held out, in (0, 1).
    seed
        Equal ones give the same split; independent of folds and row samples.
    held_out
        Which side this is.
    """

    folding: Folding
    share: float
    seed: int
    held_out: bool

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, (int, float, np.floating)):
            raise DataError(f"the share held out must be a number, got {self.share!r}")
        if not 0.0 < self.share < 1.0:
            raise DataError(
                f"the share held out must lie between 0 and 1, exclusively, got {self.share!r}"
            )
        whole = isinstance(self.seed, (int, np.integer)) and not isinstance(self.seed, bool)
        if not whole or not 0 <= self.seed < _MAX_SEED:
            raise DataError(f"the seed must be an integer from 0 to 2**62 - 1, got {self.seed!r}")

    def __str__(self) -> str:
        """For messages."""
        side = f"{self.share:.3g}" if self.held_out else f"all but {self.share:.3g}"
        return f"{side} by {self.folding}"

    @property
    def kept_share(self) -> float:
        """Share of the units that belong to this side, as expected."""
        return float(self.share if self.held_out else 1.0 - self.share)

    @property
    def other(self) -> "Part":
        """The other side of the split."""
        return replace(self, held_out=not self.held_out)

    def keeps(self, rows: Array, columns: Mapping[str, Array]) -> Array:
        """Whether each row belongs to this side, shape (n,); see :meth:`Folding.units`."""
        hashes = number_hash(_PART_SALT + int(self.seed), self.folding.units(rows, columns))
        return (unit_interval(hashes) < self.share) == self.held_out

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "by": str(self.folding),
            "share": float(self.share),
            "seed": int(self.seed),
            "held_out": self.held_out,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Inverse of :meth:`to_dict`, for data that can't be trusted.

        Raises
        ------
        DataError
            If it describes no part.
        """
        try:
            folding = Folding.parse(data["by"])
            return cls(folding, data["share"], data["seed"], data["held_out"] is True)
        except (KeyError, TypeError) as error:
            raise DataError(f"the description of a part is damaged: {error!r}") from error
