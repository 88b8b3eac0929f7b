"""Typed columns of a table, labels as codes, to the float64 rows of a sample store."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cme_dask.data.layout import Layout
from cme_dask.data.tables import Batch, Kind
from cme_dask.errors import DataError, option

# Typed columns of a table to the float64 rows of a sample store


Array = Any

_EXACT = 2.0**53  # integers up to here are exact as float64
_FIRST_DATE, _LAST_DATE = 18000101, 21991231  # as numbers; as seconds, all of them in 1970
_REMEDY = "give it as {} if it holds labels, as {} if it holds dates".format(
    option("categorical"), option("datetime")
)


@dataclass(frozen=True)
class Coded:
    """Labels as positions among the different ones, in order of occurrence; -1 where missing."""

    codes: Array
    labels: pa.StringArray


@dataclass(frozen=True)
class Decoded:
    """The kept rows of a batch.

    Attributes
    ----------
    first_row, rows_read
        Of the batch.
    kept
        Which rows are kept, shape (rows_read,).
    missing
        Rows read without a value, by column of the table.
    x, y, weights, time
        Float64 values of the kept rows, NaN where x or y is missing and that is kept; places of
        labels in x and y are not filled yet.
    group
        The groups if they are numbers.
    coded
        Labels by column of the table: their codes depend on the batches before.
    position
        Where reading resumes after the batch.
    """

    first_row: int
    rows_read: int
    kept: Array
    missing: dict[str, int]
    x: Array
    y: Array
    weights: Array | None
    time: Array | None
    group: Array | None
    coded: dict[str, Coded]
    position: dict[str, Any]

    def row(self, index: int) -> int:
        """What messages call a kept row."""
        return self.first_row + int(np.flatnonzero(self.kept)[index])


@dataclass(frozen=True)
class Decoder:
    """Turns batches of one table into float64 columns; needs no other batch.

    Parameters
    ----------
    layout
        What to take.
    missing
        ``"drop"``, ``"error"`` or ``"keep"``.
    table
        What messages call the table.
    null_values
        Labels, and texts of numbers, that mark a missing value in tables of any kind.
    """

    layout: Layout
    missing: str
    table: str
    null_values: tuple[str, ...] = ()

    def __call__(self, batch: Batch) -> Decoded:
        """The kept rows.

        Raises
        ------
        DataError
            If a value is not of its kind, or a kept one infinite, or a weight negative.
        """
        layout = self.layout
        columns = dict(zip(batch.columns.schema.names, batch.columns.columns, strict=True))
        values: dict[str, Array] = {}
        labels: dict[str, Any] = {}
        absent: dict[str, Array] = {}
        for name, kind in layout.kinds.items():
            refusal = _Refusal(self.table, name, batch.first_row)
            column = _plain(columns[name], refusal)
            if kind is Kind.CATEGORY:
                labels[name] = _without(_as_labels(column, refusal), self.null_values)
                absent[name] = np.asarray(labels[name].is_null())
            else:
                numbers = _as_numbers(column, kind, refusal)
                if marks := _numbers_in(self.null_values):
                    numbers = np.where(np.isin(numbers, marks), np.nan, numbers)
                values[name] = numbers
                absent[name] = np.isnan(values[name])
        retained = np.ones(batch.columns.num_rows, dtype=bool)
        for name, mask in absent.items():
            if self.missing != "keep" or name in layout.beside:
                retained &= ~mask
        self._check(values, absent, retained, batch.first_row)
        if not retained.all():
            values = {name: column[retained] for name, column in values.items()}
            labels = {name: column.filter(pa.array(retained)) for name, column in labels.items()}
        rows = int(retained.sum())
        return Decoded(
            first_row=batch.first_row,
            rows_read=len(retained),
            kept=retained,
            missing={name: int(mask.sum()) for name, mask in absent.items()},
            x=self._matrix("x", values, rows),
            y=self._matrix("y", values, rows),
            weights=None if layout.weights is None else values[layout.weights],
            time=self._time(values, retained, batch.first_row),
            group=self._group(values, retained, batch.first_row),
            coded={name: _coded(column) for name, column in labels.items()},
            position=batch.position,
        )

    def _check(
        self, values: dict[str, Array], absent: dict[str, Array], kept: Array, first_row: int
    ) -> None:
        if self.missing == "error":
            for name, mask in absent.items():
                _Refusal(self.table, name, first_row).of(mask, "missing")
        for name, column in values.items():
            refusal = _Refusal(self.table, name, first_row)
            refusal.of(np.isinf(column) & kept, "infinite")
            if name == self.layout.weights:
                refusal.of((column < 0.0) & kept, "negative")

    def _matrix(self, variable: str, values: dict[str, Array], rows: int) -> Array:
        matrix = np.empty((rows, len(self.layout.names(variable))))
        for place, feature in self.layout.places(variable):
            if feature.kind is not Kind.CATEGORY:
                for offset, column in enumerate(feature(values[feature.column])):
                    matrix[:, place + offset] = column
        return matrix

    def _group(self, values: dict[str, Array], kept: Array, first_row: int) -> Array | None:
        """Groups that are numbers, as they also are where the column is one of x."""
        name = self.layout.group
        if name is None or name not in values:
            return None
        bad = np.zeros(len(kept), dtype=bool)
        bad[kept] = (values[name] != np.floor(values[name])) | (np.abs(values[name]) > _EXACT)
        _Refusal(self.table, name, first_row).of(bad, "fractional (groups must be integers)")
        return values[name].astype(np.int64)

    def _time(self, values: dict[str, Array], kept: Array, first_row: int) -> Array | None:
        """Seconds since 1970-01-01 UTC of the kept rows."""
        names = self.layout.time
        if len(names) < 2:
            return values[names[0]] if names else None

        def refuse(name: str, bad: Array) -> None:
            scattered = np.zeros(len(kept), dtype=bool)
            scattered[np.flatnonzero(kept)[bad]] = True
            _Refusal(self.table, name, first_row).of(scattered, "impossible")

        return joined_time([values[name] for name in names], names, refuse)


def joined_time(
    parts: Sequence[Array], names: Sequence[str], refuse: Callable[[str, Array], None]
) -> Array:
    """Seconds since 1970-01-01 of (year, month, day, hour, minute, second), from the first 3 to 6.

    ``refuse(name, bad)`` is called with the mask of a part's values that no calendar has.
    """
    limits = ((1, 9999), (1, 12), (1, 31), (0, 23), (0, 59), (0, 60))
    for name, part, (low, high) in zip(names, parts, limits, strict=False):
        bad = (part < low) | (part > high) | ((part != np.floor(part)) & (high != 60))
        if bad.any():
            refuse(name, bad)
    year, month, day = (part.astype(np.int64) for part in parts[:3])
    months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + (day - 1)
    spilled = days.astype("datetime64[M]") != months  # such as 30 February
    if spilled.any():
        refuse(names[2], spilled)
    seconds = days.astype(np.int64) * 86_400.0
    for part, length in zip(parts[3:], (3600.0, 60.0, 1.0), strict=False):
        seconds = seconds + part * length
    return np.asarray(seconds)


@dataclass(frozen=True)
class _Refusal:
    """Says what is wrong with a column, and in which row."""

    table: str
    column: str
    first_row: int

    def of(self, bad: Array, what: str) -> None:
        """DataError if any value is bad."""
        if not bad.any():
            return
        count, row = int(bad.sum()), self.first_row + int(bad.argmax())
        values = "value" if count == 1 else "values"
        raise DataError(
            f"column {self.column!r} of {self.table} has {count:,} {what} {values} in rows "
            f"{self.first_row} to {self.first_row + len(bad) - 1}, the first in row {row}"
        )

    def error(self, complaint: str) -> DataError:
        """A sentence on the whole column."""
        return DataError(f"column {self.column!r} of {self.table} {complaint}")


def _plain(column: Any, refusal: _Refusal) -> Any:
    """A column whose nested or exotic types are refused; dictionaries of numbers are decoded."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return column if pa.types.is_string(kind.value_type) else column.dictionary_decode()
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.float64())
    if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        raise refusal.error(f"has the type {kind}: numbers, text or times were expected")
    return column


def _without(labels: Any, null_values: Sequence[str]) -> Any:
    """Labels, null in place of those that mark a missing value."""
    if not null_values:
        return labels
    texts = labels.cast(pa.string())
    marked = pc.is_in(texts, value_set=pa.array(null_values, pa.string()))
    return pc.if_else(marked, None, texts) if pc.any(marked).as_py() else labels


def _numbers_in(texts: Sequence[str]) -> list[float]:
    """The texts that are finite numbers."""
    found = []
    for text in texts:
        with contextlib.suppress(ValueError):
            found.append(float(text))
    return [number for number in found if math.isfinite(number)]


def _is_text(kind: pa.DataType) -> bool:
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(kind) for is_kind in (*texts, pa.types.is_dictionary))


def _as_numbers(column: Any, kind: Kind, refusal: _Refusal) -> Array:
    """Float64 values, NaN where missing: numbers, or for times seconds since 1970-01-01 UTC."""
    result = column.type
    if pa.types.is_timestamp(result) or pa.types.is_date(result):
        if kind is not Kind.TIME:
            raise refusal.error(f"holds times ({result}), numbers were expected: {_REMEDY}")
        return _seconds(column)
    if _is_text(result):
        if kind is not Kind.TIME:
            raise refusal.error(f"holds text, numbers were expected: {_REMEDY}")
        return _parsed_time(column, refusal)
    numeric = pa.types.is_integer(result) or pa.types.is_floating(result)
    if not (numeric or pa.types.is_boolean(result) or pa.types.is_decimal(result)):
        raise refusal.error(f"has the type {result}, numbers were expected")
    if not pa.types.is_float64(result):
        if pa.types.is_boolean(result):  # there is no cast to floats
            column = column.cast(pa.int8())
        column = column.cast(pa.float64(), safe=False)
    values = column.to_numpy(zero_copy_only=False)
    return _compact_dates(values) if kind is Kind.TIME else values


def _compact_dates(values: Array) -> Array:
    """Seconds of dates such as 20130301, where all values are ones; others are seconds already."""
    known = ~np.isnan(values)
    numbers = values[known]
    if not len(numbers) or numbers.min() < _FIRST_DATE or numbers.max() > _LAST_DATE:
        return values
    if (numbers != np.floor(numbers)).any():
        return values
    parts = numbers // 10_000, numbers // 100 % 100, numbers % 100
    impossible: list[str] = []
    seconds = joined_time(parts, ("year", "month", "day"), lambda name, _: impossible.append(name))
    if impossible:
        return values
    result = np.full(len(values), np.nan)
    result[known] = seconds
    return result


def _seconds(column: Any) -> Array:
    exact = column.cast(pa.timestamp("us", tz=getattr(column.type, "tz", None)), safe=False)
    micros = exact.cast(pa.int64())
    return micros.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) / 1e6


def _parsed_time(column: Any, refusal: _Refusal) -> Array:
    """ISO 8601 timestamps (UTC if they have no zone), or numbers of seconds, from text."""
    column = column.cast(pa.string())
    failures = []
    for target in (pa.timestamp("us"), pa.timestamp("us", tz="UTC"), pa.float64()):
        try:
            parsed = column.cast(target)
        except pa.ArrowInvalid:
            failures.append(_first_failure(column, target))
            continue
        if pa.types.is_timestamp(target):
            return _seconds(parsed)
        return _compact_dates(parsed.to_numpy(zero_copy_only=False))
    row = max(failures)  # the format that fits longest is the one that was meant
    raise refusal.error(
        f"has {column[row].as_py()[:40]!r} in row {refusal.first_row + row}: expected an ISO time "
        "such as 2013-03-01 14:00, or seconds since 1970-01-01, one form throughout"
    )


def _first_failure(column: Any, target: pa.DataType) -> int:
    """The first row that does not cast."""
    low, high = 0, len(column)  # the first `low` rows cast, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low).cast(target)
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    return low


def _as_labels(column: Any, refusal: _Refusal) -> Any:
    """Text, plain or dictionary-encoded."""
    result = column.type
    if _is_text(result) or pa.types.is_integer(result):
        return column
    if pa.types.is_boolean(result):
        return column.cast(pa.string())
    if pa.types.is_floating(result):
        column = pc.if_else(pc.is_nan(column), None, column)
        try:
            return column.cast(pa.int64())  # as integers with missing values often come
        except pa.ArrowInvalid as error:
            raise refusal.error(f"holds fractions, which can't be labels ({error})") from error
    raise refusal.error(f"has the type {result}, which can't be labels: expected text or integers")


def _coded(column: Any) -> Coded:
    """Codes by first occurrence among the rows given."""
    if column.null_count:
        known = np.asarray(column.is_valid())
        present = _coded(column.filter(pa.array(known)))
        codes = np.full(len(column), -1, dtype=np.int64)
        codes[known] = present.codes
        return Coded(codes, present.labels)
    if pa.types.is_dictionary(column.type):
        used, first = np.unique(column.indices.to_numpy(), return_index=True)
        used = used[np.argsort(first)]
        rank = np.empty(len(column.dictionary), dtype=np.int64)
        rank[used] = np.arange(len(used))
        codes = rank[column.indices.to_numpy()]
        labels = column.dictionary.take(pa.array(used)) if len(used) else column.dictionary[:0]
    else:
        encoded = column.dictionary_encode()
        codes, labels = encoded.indices.to_numpy().astype(np.int64), encoded.dictionary
    return Coded(codes, labels.cast(pa.string()))


# Codes of labels over a whole ingestion, by first occurrence


MAX_LABELS = 10_000
MAX_GROUPS = 1_000_000


@dataclass
class _Labels:
    """The labels of one column, in order of occurrence, and how many rows have each."""

    codes: dict[str, int] = field(default_factory=dict)
    counts: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def encode(self, coded: Coded) -> Array:
        """Codes of a batch's rows, -1 where missing; new labels get the next ones."""
        labels = coded.labels.to_pylist()
        found = [self.codes.setdefault(label, len(self.codes)) for label in labels]
        table = np.array([*found, -1], dtype=np.int64)  # -1 of what is missing points to the end
        codes = table[coded.codes]
        counts = np.bincount(codes[codes >= 0], minlength=len(self.codes))
        counts[: len(self.counts)] += self.counts
        self.counts = counts
        return codes


class Encoder:
    """Fills in the codes of labels batch by batch, in the order of the rows."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._labels = {name: _Labels() for name in layout.categorical}
        self._groups = _Labels()
        shared = layout.group is not None and layout.group in self._labels
        if shared and layout.group is not None:
            self._groups = self._labels[layout.group]
        self._group_is_integer: bool | None = False if layout.group_is_labels else None

    def encode(self, decoded: Decoded, table: str) -> tuple[Array | None, ...]:
        """The rows (x, y, weights, group, time) of a batch of a table.

        Raises
        ------
        DataError
            If a column has too many different labels, or groups are integers first and then text.
        """
        codes = {name: self._encode(name, decoded, table) for name in self._labels}
        for variable, matrix in (("x", decoded.x), ("y", decoded.y)):
            for place, feature in self._layout.places(variable):
                if feature.kind is Kind.CATEGORY:
                    found = codes[feature.column]
                    matrix[:, place] = np.where(found < 0, np.nan, found)
        group = self._group(decoded, codes, table)
        return decoded.x, decoded.y, decoded.weights, group, decoded.time

    def _encode(self, name: str, decoded: Decoded, table: str) -> Array:
        codes = self._labels[name].encode(decoded.coded[name])
        _check_count(name, table, len(self._labels[name].codes), MAX_LABELS)
        return codes

    def _group(self, decoded: Decoded, codes: dict[str, Array], table: str) -> Array | None:
        name = self._layout.group
        if name is None or decoded.group is not None:
            return decoded.group
        if name in codes:
            return codes[name]
        coded = decoded.coded[name]
        if self._group_is_integer is None and len(coded.labels):
            self._group_is_integer = _integers(coded.labels[:1]) is not None
        if self._group_is_integer:
            return self._integer_groups(name, decoded, table)
        groups = self._groups.encode(coded)
        _check_count(name, table, len(self._groups.codes), MAX_GROUPS)
        return groups

    def _integer_groups(self, name: str, decoded: Decoded, table: str) -> Array:
        coded = decoded.coded[name]
        values = _integers(coded.labels)
        if values is None:
            labels = coded.labels.to_pylist()
            bad = next(i for i in range(len(labels)) if _integers(coded.labels[i : i + 1]) is None)
            row = decoded.row(int((coded.codes == bad).argmax()))
            raise DataError(
                f"column {name!r} of {table} has {labels[bad][:40]!r} in row {row}, while the "
                f"first group was an integer: add the column to {option('categorical')} if it "
                "holds labels"
            )
        return values[coded.codes]

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """Labels in the order of their codes, by column of x and y."""
        return {name: tuple(labels.codes) for name, labels in self._labels.items()}

    @property
    def counts(self) -> dict[str, list[int]]:
        """Rows per code, by column of x and y."""
        return {name: labels.counts.tolist() for name, labels in self._labels.items()}

    @property
    def group_labels(self) -> Sequence[str] | None:
        """Labels in the order of the groups' codes, or None if groups are integers or absent."""
        return list(self._groups.codes) or None

    def state(self) -> dict[str, Any]:
        """JSON from which :meth:`restore` goes on."""
        tables = {name: [list(t.codes), t.counts.tolist()] for name, t in self._labels.items()}
        return {
            "labels": tables,
            "groups": [list(self._groups.codes), self._groups.counts.tolist()],
            "group_is_integer": self._group_is_integer,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state`."""
        for labels, (names, counts) in (
            (self._groups, state["groups"]),
            *((self._labels[name], pair) for name, pair in state["labels"].items()),
        ):
            labels.codes = {label: code for code, label in enumerate(names)}
            labels.counts = np.array(counts, dtype=np.int64)
        self._group_is_integer = state["group_is_integer"]


def _integers(labels: pa.StringArray) -> Array | None:
    """The labels as int64, or None if one is no integer."""
    try:
        return labels.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        return None


def _check_count(name: str, table: str, count: int, limit: int) -> None:
    if count > limit:
        raise DataError(
            f"column {name!r} has more than {limit:,} different labels up to {table}: it looks "
            "like free text or an identifier, leave it out"
        )
