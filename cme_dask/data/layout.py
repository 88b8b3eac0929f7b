"""The layout of a sample store: its columns, and the columns of the table that they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cme_dask.data.columns import Columns
from cme_dask.data.tables import Kind, listed
from cme_dask.errors import DataError

Array = Any

DAY = 86_400.0
YEAR_DAYS = 365.2425
CALENDAR = ("hour", "weekday", "season")


class Feature(Protocol):
    """How one column of a table becomes columns of x or y."""

    @property
    def column(self) -> str:
        """The column of the table."""

    @property
    def kind(self) -> Kind:
        """What it holds."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the store."""

    def __call__(self, values: Array) -> tuple[Array, ...]:
        """The stored columns from the column's float64 values (numbers, codes, seconds)."""


@dataclass(frozen=True)
class Plain:
    """A number, or the code of a label, as it is."""

    column: str
    kind: Kind = Kind.NUMBER

    @property
    def names(self) -> tuple[str, ...]:
        """The column's own name."""
        return (self.column,)

    def __call__(self, values: Array) -> tuple[Array, ...]:
        """The values."""
        return (values,)


@dataclass(frozen=True)
class Cyclic:
    """A number of known period p, as sin(2 pi v / p) and cos(2 pi v / p)."""

    column: str
    period: float
    kind: Kind = Kind.NUMBER

    def __post_init__(self) -> None:
        if not (np.isfinite(self.period) and self.period > 0.0):
            raise DataError(f"the period of {self.column!r} must be positive, got {self.period}")

    @property
    def names(self) -> tuple[str, ...]:
        """``<column>_sin`` and ``<column>_cos``."""
        return f"{self.column}_sin", f"{self.column}_cos"

    def __call__(self, values: Array) -> tuple[Array, ...]:
        """Sine and cosine."""
        return _circle(values / self.period)


@dataclass(frozen=True)
class Calendar:
    """A time as points on the circles of its day, week and year.

    ``hour`` is the time of day (24 h), ``weekday`` the whole day of the week (7 d), ``season`` the
    time since new year (365.2425 d), all in UTC.
    """

    column: str
    parts: tuple[str, ...]
    kind: Kind = Kind.TIME

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in CALENDAR]
        if unknown or not self.parts or len(set(self.parts)) < len(self.parts):
            raise DataError(
                f"datetime of {self.column!r} must name some of {', '.join(CALENDAR)}, each once, "
                f"got {', '.join(self.parts) or 'nothing'}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """``<column>_<part>_sin`` and ``<column>_<part>_cos`` of each part."""
        return tuple(f"{self.column}_{part}_{of}" for part in self.parts for of in ("sin", "cos"))

    def __call__(self, values: Array) -> tuple[Array, ...]:
        """Sines and cosines from seconds since 1970-01-01."""
        turns = {"hour": _of_day, "weekday": _of_week, "season": _of_year}
        return tuple(part for name in self.parts for part in _circle(turns[name](values)))


def _circle(turns: Array) -> tuple[Array, Array]:
    return np.sin(2.0 * np.pi * turns), np.cos(2.0 * np.pi * turns)


def _of_day(seconds: Array) -> Array:
    return seconds % DAY / DAY


def _of_week(seconds: Array) -> Array:
    return (seconds // DAY + 3.0) % 7.0 / 7.0  # 1970-01-01 was a Thursday; Monday is 0


def _of_year(seconds: Array) -> Array:
    with np.errstate(invalid="ignore"):  # a missing time stays one
        new_year = np.floor(seconds).astype("datetime64[s]").astype("datetime64[Y]")
    start = new_year.astype("datetime64[s]").astype(np.int64)
    return (seconds - start) / DAY / YEAR_DAYS


@dataclass(frozen=True)
class Layout:
    """What to take from each table.

    Attributes
    ----------
    x, y
        Features in the order of the stored columns.
    weights, group
        Columns of row weights and of groups, if there are any.
    time
        The column of times, or the columns year, month, day, hour, ... to join; may be empty.
    group_is_labels
        Whether the groups are labels even if they look like integers.
    kinds
        What each wanted column holds, in the order in which they are read.
    """

    x: tuple[Feature, ...]
    y: tuple[Feature, ...]
    weights: str | None
    group: str | None
    time: tuple[str, ...]
    group_is_labels: bool
    kinds: dict[str, Kind]

    def names(self, variable: str) -> tuple[str, ...]:
        """Names of the stored columns of ``"x"`` or ``"y"``."""
        features: tuple[Feature, ...] = getattr(self, variable)
        return tuple(name for feature in features for name in feature.names)

    def places(self, variable: str) -> list[tuple[int, Feature]]:
        """Features of ``"x"`` or ``"y"`` with the position of their first stored column."""
        features: tuple[Feature, ...] = getattr(self, variable)
        ends = np.cumsum([len(feature.names) for feature in features]).tolist()
        return list(zip([0, *ends[:-1]], features, strict=True))

    def columns(
        self, units: Mapping[str, str], categories: Mapping[str, Sequence[str]]
    ) -> tuple[Columns, Columns]:
        """Descriptions of the stored columns of x and y."""
        described = []
        for variable in ("x", "y"):
            names = self.names(variable)
            labels = {n: tuple(categories[n]) for n in names if n in categories}
            described.append(Columns(names, {n: u for n, u in units.items() if n in names}, labels))
        return described[0], described[1]

    @property
    def beside(self) -> frozenset[str]:
        """Columns of the table of weights, groups and times."""
        single = [name for name in (self.weights, self.group) if name is not None]
        return frozenset((*single, *self.time))

    @property
    def categorical(self) -> tuple[str, ...]:
        """Columns of x and y that hold labels."""
        return tuple(f.column for f in (*self.x, *self.y) if f.kind is Kind.CATEGORY)

    @property
    def origins(self) -> dict[str, str]:
        """The column of the table by stored column of x and y."""
        return {name: f.column for f in (*self.x, *self.y) for name in f.names}


def make_layout(
    x: Sequence[str],
    y: Sequence[str],
    *,
    weights: str | None = None,
    group: str | None = None,
    time: Sequence[str] = (),
    categorical: Sequence[str] = (),
    datetime: Mapping[str, Sequence[str]] | None = None,
    cyclic: Mapping[str, float] | None = None,
) -> Layout:
    """The layout that the arguments of :func:`~cme_dask.data.ingest.ingest` ask for.

    Raises
    ------
    DataError
        If a column has two types or two of the roles x, y, weights, or an option names a column
        that is not wanted.
    """
    datetime, cyclic = dict(datetime or {}), dict(cyclic or {})
    for role, names in (("x", x), ("y", y), ("time", time), ("categorical", categorical)):
        if isinstance(names, str):  # it would pass as a sequence of letters
            raise DataError(f"{role} must be a list of column names, got the text {names!r}")
    for role, given in (("weights", weights), ("group", group)):
        if not (given is None or isinstance(given, str)):
            raise DataError(f"{role} must be the name of one column, got {given!r}")
    for role, names in (("x", x), ("y", y)):
        if not names:
            raise DataError(f"{role} needs at least one column")
    modelled = [*x, *y]
    _check_once([*modelled, *([] if weights is None else [weights])])
    typed = [*categorical, *datetime, *cyclic]
    twice = [name for name in dict.fromkeys(typed) if typed.count(name) > 1]
    if twice:
        raise DataError(f"column {listed(twice)} has two types: give it one of them")
    spare = [n for n in typed if n not in modelled and not (n == group and n in categorical)]
    if spare:
        raise DataError(f"column {listed(spare)} has a type but is in neither x nor y")
    if len(time) == 2 or len(time) > 6:
        raise DataError(
            f"time must be one column, or year, month, day and possibly hour, minute, second, got "
            f"{listed(time)}"
        )

    def feature(name: str) -> Feature:
        if name in datetime:
            return Calendar(name, tuple(datetime[name]))
        if name in cyclic:
            return Cyclic(name, float(cyclic[name]))
        return Plain(name, Kind.CATEGORY if name in categorical else Kind.NUMBER)

    features = {name: feature(name) for name in modelled}
    kinds = {name: feature.kind for name, feature in features.items()}
    if weights is not None:
        kinds[weights] = Kind.NUMBER
    for name in time:
        kinds.setdefault(name, Kind.TIME if len(time) == 1 else Kind.NUMBER)
    if group is not None:
        kinds.setdefault(group, Kind.CATEGORY)
    layout = Layout(
        tuple(features[n] for n in x),
        tuple(features[n] for n in y),
        weights,
        group,
        tuple(time),
        group in categorical,
        kinds,
    )
    _check_kinds(layout)
    return layout


def _check_once(names: Sequence[str]) -> None:
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise DataError(f"column {listed(twice)} is wanted twice: x, y and weights must differ")


def _check_kinds(layout: Layout) -> None:
    numeric = [*([layout.weights] if layout.weights else []), *layout.time]
    labels = [n for n in numeric if layout.kinds[n] is Kind.CATEGORY]
    if labels:
        raise DataError(f"column {listed(labels)} can't be categorical and weights or time")
    if layout.group is not None and layout.kinds[layout.group] is Kind.TIME:
        raise DataError(
            f"group {layout.group!r} is a time: group by another column, and keep it as time"
        )
    if len(layout.time) > 1:
        moments = [n for n in layout.time if layout.kinds[n] is Kind.TIME]
        if moments:
            raise DataError(f"column {listed(moments)} is a time by itself: give it alone as time")
    stored = [*layout.names("x"), *layout.names("y")]
    twice = [name for name in dict.fromkeys(stored) if stored.count(name) > 1]
    if twice:
        raise DataError(f"two columns would be stored as {listed(twice)}: rename one of them")
