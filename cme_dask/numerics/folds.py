"""Folds, hold-outs and the row sample: random numbers that are functions of the row alone.

They must not depend on chunks, workers or order, so each row's number is a hash of (salt, row), or
of (salt, unit): the splitmix64 generator of Steele, Lea and Flood (2014), started at the salt and
advanced by the number.

Rows of one station, or of one week, are alike: a model that is tried on rows whose neighbours it
has seen looks better than it is. So whole units are held out: folds and hold-outs go by row, by
group or by blocks of time. A unit's fold, and on which side of a split it lies, are hashes of
(salt, unit): nothing is stored for the table, any strip of rows knows its own.

The priority sample is a uniform sample of the rows whose every prefix is one, too.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from cme_dask.errors import DataError

EXACT = 2.0**53
"""From here on float64 does not tell all integers apart."""

# Random numbers that are functions of a row, or of the unit it belongs to, alone


Array = Any

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_VALUE_SALT = (1 << 63) + 0x76616C75  # "valu"
_FOLD_SALT = (1 << 63) + 0x666F6C64  # "fold"; seeds of samples are below 2**63

MAX_FOLDS = 255


def number_hash(salt: int, numbers: Array) -> Array:
    """Hash of each number, uniform on the 64-bit integers.

    Parameters
    ----------
    salt
        Distinguishes independent uses; any non-negative integer below 2**64.
    numbers
        64-bit integers without a sign, of any shape.

    Returns
    -------
    uint64 array of this shape
    """
    z = np.array([salt], dtype=np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        for step in (_GAMMA, numbers * _GAMMA, _GAMMA):
            z = z + step
            z = (z ^ (z >> np.uint64(30))) * _MIX_1
            z = (z ^ (z >> np.uint64(27))) * _MIX_2
            z = z ^ (z >> np.uint64(31))
    return z


def value_hash(salt: int, rows: Array) -> Array:
    """Hash of the values of each row (n, d), uint64 of shape (n,): equal rows have equal ones."""
    result = np.zeros(len(rows), dtype=np.uint64)
    for j, column in enumerate(np.asarray(rows, dtype=np.float64).T):
        result += number_hash(salt + j, np.ascontiguousarray(column + 0.0).view(np.uint64))
    return result


def distinct_in_random_order(rows: Array) -> tuple[Array, Array]:
    """Positions of distinct rows (k,), and for each row (n,) which of them it equals.

    The order is as good as random, and rows that come twice count as one of twice the weight. It
    depends on the ranks of the values within their columns alone: not on the order of the rows, nor
    on units and offsets, nor on the order of the columns (unless exchanging columns gives the same
    rows again).
    """
    rows = np.asarray(rows)
    _, first, which = np.unique(
        value_hash(_VALUE_SALT, rows), return_index=True, return_inverse=True
    )
    ranks = np.stack([np.unique(c, return_inverse=True)[1].ravel() for c in rows[first].T], axis=1)
    # A sum of hashes over the columns is the same for ranks (3, 5) and (5, 3). So each column gets
    # a hash of its own first, a sum over the rows; all sums are modulo 2**64.
    hashes = number_hash(_VALUE_SALT, ranks.astype(np.uint64))
    both = hashes + hashes.sum(axis=1, keepdims=True)
    columns = number_hash(_VALUE_SALT, both).sum(axis=0)
    sums = number_hash(_VALUE_SALT, hashes + columns).sum(axis=1)
    order = np.lexsort((*ranks.T, sums))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[which.ravel()]


def sklearn_seed(seed: int) -> int:
    """A seed for scikit-learn, whose generator takes none of 2**32 or more."""
    return seed % (1 << 32)


def uniform(salt: int, numbers: Array) -> Array:
    """Hash of each integer as a number strictly between 0 and 1, float64 of shape (n,)."""
    hashes = number_hash(salt, numbers.astype(np.uint64))
    return ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


# Which rows belong together: folds and hold-outs by row, by group or by blocks of time


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
        result = _BLOCK.fullmatch(text) if isinstance(text, str) else None
        if result is None or not float(result[1]):
            raise DataError(
                "folds are by 'rows', by 'group', or by blocks of time such as '7d', '12h' or "
                f"'30min' (units: {', '.join(_SECONDS)}), got {text!r}"
            )
        return cls("time", float(result[1]) * _SECONDS[result[2]])

    def __str__(self) -> str:
        """The text that :meth:`parse` takes."""
        if self.block is None:
            return self.by
        whole = [unit for unit, seconds in _SECONDS.items() if self.block % seconds == 0.0]
        unit = whole[-1] if whole else "s"
        # Weeks are what 7d is called by; nobody says 1w.
        unit = "d" if unit == "w" else unit
        return f"{self.block / _SECONDS[unit]!r}".removesuffix(".0") + unit

    def units(self, rows: Array, columns: Mapping[str, Array]) -> Array:
        """A 64-bit number for each row that is equal where the units are, shape (n,).

        Parameters
        ----------
        rows
            Global row indices, shape (n,).
        columns
            Values of the columns ``group`` and ``time`` at these rows, as float64, if needed.
        """
        if self.by == "rows":
            return rows.astype(np.uint64)
        values = columns[self.by]
        if self.block is not None:
            values = np.floor(values / self.block)
        else:
            check_groups(values)
        # The bits of a number tell it from all others; those of -0 from 0, which they should not.
        return np.ascontiguousarray(values + 0.0).view(np.uint64)

    def folds(self, rows: Array, columns: Mapping[str, Array], n_folds: int) -> Array:
        """Fold number in ``[0, n_folds)`` of each row, as uint8; arguments as of :meth:`units`.

        Raises
        ------
        DataError
            If ``n_folds`` is out of range.
        """
        if not 1 <= n_folds <= MAX_FOLDS:
            raise DataError(f"n_folds must lie between 1 and {MAX_FOLDS}, got {n_folds}")
        if n_folds == 1:
            return np.zeros(len(rows), dtype=np.uint8)
        hashes = number_hash(_FOLD_SALT, self.units(rows, columns))
        return (hashes % np.uint64(n_folds)).astype(np.uint8)


def check_groups(numbers: Array, name: str = "group") -> None:
    """DataError if numbers of groups, read as float64, may be those of several groups."""
    if (np.abs(numbers) >= EXACT).any():
        raise DataError(
            f"{name} must hold integers below 2**53: larger ones can't be told from their "
            "neighbours; number them anew, or give an array in memory (no Dask array) of texts"
        )


BY_ROWS = Folding()


def fold_of_rows(start: int, stop: int, n_folds: int) -> Array:
    """Fixed fold number in ``[0, n_folds)`` of each global row, as uint8."""
    return BY_ROWS.folds(np.arange(start, stop), {}, n_folds)


@dataclass(frozen=True)
class Split:
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
    start
        Units whose random number lies in [start, start + share) are held out: with the starts
        0, 1/K, ... and the share 1/K each unit is in one of K such parts.
    """

    folding: Folding
    share: float
    seed: int
    held_out: bool
    start: float = 0.0

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
        if not isinstance(self.start, (int, float, np.floating)) or not 0.0 <= self.start < 1.0:
            raise DataError(f"the start of a part must lie in [0, 1), got {self.start!r}")

    def __str__(self) -> str:
        """For messages."""
        place = f" from {self.start:.3g} on" if self.start else ""
        side = f"{self.share:.3g}" if self.held_out else f"all but {self.share:.3g}"
        return f"{side}{place} by {self.folding}"

    @property
    def expected_share(self) -> float:
        """Share of the units that belong to this side, as expected."""
        return float(self.share if self.held_out else 1.0 - self.share)

    @property
    def other(self) -> "Split":
        """The other side of the split."""
        return replace(self, held_out=not self.held_out)

    def selects(self, rows: Array, columns: Mapping[str, Array]) -> Array:
        """Whether each row belongs to this side, shape (n,); see :meth:`Folding.units`."""
        numbers = uniform(_PART_SALT + int(self.seed), self.folding.units(rows, columns))
        inside = (self.start <= numbers) & (numbers < self.start + self.share)
        return inside == self.held_out

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "by": str(self.folding),
            "share": float(self.share),
            "seed": int(self.seed),
            "held_out": self.held_out,
            **({"start": float(self.start)} if self.start else {}),
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
            start = data.get("start", 0.0)
            return cls(folding, data["share"], data["seed"], data["held_out"] is True, start)
        except (AttributeError, KeyError, TypeError) as error:
            raise DataError(f"the description of a part is damaged: {error!r}") from error


# The priority sample: a uniform sample of rows whose every prefix is one too


@dataclass(frozen=True, eq=False)
class RowSample:
    """The rows with the smallest priority keys, sorted by key.

    Any prefix is a random sample without replacement: uniform, or with probabilities
    proportional to the weights in order of drawing.

    Attributes
    ----------
    keys
        Priority keys, ascending, shape (k,).
    index
        Global row indices, shape (k,).
    parts
        Rows of x and y, shapes (k, d).
    weights
        Weights of the rows, shape (k,); ones if rows have none.
    complete
        Whether these are all rows of positive weight.
    units
        Values of ``group`` and ``time`` at the rows, by name, shapes (k,); those that are known.
    complete_share
        Share of the rows that were drawn which lack no value, where the others were left out.
    """

    keys: Array
    index: Array
    parts: tuple[Array, ...]
    weights: Array
    complete: bool
    units: Mapping[str, Array] = field(default_factory=dict)
    complete_share: float = 1.0

    def __len__(self) -> int:
        """Number of rows k."""
        return len(self.keys)

    @property
    def importance(self) -> Array:
        """Weights for means over the sample that estimate weighted means over all rows.

        Horvitz-Thompson: w / P(w's row is drawn), with P = 1 - exp(-w t) and t the largest key; sum
        1, shape (k,). Of a small part of the rows all count nearly equally, since the weights are
        in the keys; of all rows each counts by its weight.
        """
        chance = 1.0 if self.complete else -np.expm1(-self.weights * self.keys[-1])
        raw = self.weights / self.weights.max() / chance  # of which the sum is finite
        return np.asarray(raw / raw.sum())

    def prefix(self, size: int) -> "RowSample":
        """The first ``size`` rows."""
        return self if size >= len(self) else replace(self.only(slice(size)), complete=False)

    def only(self, selected: Any) -> "RowSample":
        """The sample of a part of the rows: those of these rows that belong to it, shape (k,)."""
        return replace(
            self,
            keys=self.keys[selected],
            index=self.index[selected],
            parts=tuple(part[selected] for part in self.parts),
            weights=self.weights[selected],
            units={name: values[selected] for name, values in self.units.items()},
        )

    def without_missing(self, place: int | None = None) -> "RowSample":
        """The rows that lack no value: any prefix is a random sample of such rows.

        Parameters
        ----------
        place
            The variable that may not lack one; default any, or their weight.
        """
        parts = (*self.parts, self.weights[:, None]) if place is None else (self.parts[place],)
        lost = np.zeros(len(self), dtype=bool)
        for values in parts:
            lost |= np.isnan(values).any(axis=1)
        if not lost.any():
            return self
        return replace(self.only(~lost), complete_share=self.complete_share * (1.0 - lost.mean()))

    def folds(self, folding: Folding, n_folds: int) -> Array:
        """Fold number of each row, as passes over all rows find it, shape (k,)."""
        return folding.folds(self.index, self.units, n_folds)

    def used_folds(self, folding: Folding, n_folds: int) -> Array:
        """Numbers of the folds that have rows of positive weight."""
        return np.unique(self.folds(folding, n_folds)[self.weights > 0.0])


def relative_weights(weights: Array) -> Array | None:
    """Weights (k,) of mean 1, as scikit-learn's learners take them; None for equal ones.

    Their thresholds, such as the least sum of second derivatives in a leaf of a tree, are those of
    rows that count 1.
    """
    return None if np.ptp(weights) == 0.0 else weights / weights.mean()


def draw(
    rows: Array,
    parts: tuple[Array, ...],
    weights: Array | None,
    size: int,
    seed: int,
    below: float = np.inf,
    units: Mapping[str, Array] | None = None,
) -> RowSample:
    """Sample of rows given as arrays: those with the smallest priority keys.

    The key of a row is its hash u in (0, 1); ``-log(u) / w`` with weights (Efraimidis and Spirakis,
    2006), so that rows of the sample count equally. Rows of weight zero get an infinite key.

    Parameters
    ----------
    rows
        Their global indices, shape (n,).
    parts
        Rows of x and y, shapes (n, d).
    weights
        Shape (n,), or None for equal ones.
    size, seed
        Of the sample.
    below
        Rows with keys from here on are left out.
    units
        Values of ``group`` and ``time``, shapes (n,).
    """
    keys = uniform(seed, rows)
    if weights is not None:
        with np.errstate(divide="ignore", over="ignore"):
            keys = np.minimum(-np.log(keys) / weights, np.finfo(np.float64).max)
        # Only a weight of zero excludes a row, however small the others are.
        keys = np.where(weights > 0, keys, np.inf)
    retained = np.flatnonzero(keys < below)
    if len(retained) > size:
        retained = retained[np.argpartition(keys[retained], size - 1)[:size]]
    retained = retained[np.argsort(keys[retained], kind="stable")]
    return RowSample(
        keys[retained],
        rows[retained],
        tuple(np.array(part[retained]) for part in parts),
        np.ones(len(retained)) if weights is None else np.array(weights[retained]),
        complete=bool(np.isfinite(keys).sum() == len(retained)),
        units={name: np.array(values[retained]) for name, values in (units or {}).items()},
    )


def merge(samples: Iterable[RowSample], size: int) -> RowSample:
    """Sample of the union of disjoint sets of rows, from their samples of at least ``size``."""
    several = list(samples)
    keys = np.concatenate([s.keys for s in several])
    retained = np.argsort(keys, kind="stable")[:size]
    parts = zip(*(s.parts for s in several), strict=True)
    return RowSample(
        keys[retained],
        np.concatenate([s.index for s in several])[retained],
        tuple(np.concatenate(p)[retained] for p in parts),
        np.concatenate([s.weights for s in several])[retained],
        complete=len(keys) <= size and all(s.complete for s in several),
        units={
            name: np.concatenate([s.units[name] for s in several])[retained]
            for name in several[0].units
        },
    )
