"""Names, units and categories of the columns of a variable, and checks of their values."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cme_dask.errors import DataError, NonFiniteValues, StoreError, printable, remedy

Array = Any

_MANY = 40  # names, which are then not all listed


def is_dask_frame(value: Any) -> bool:
    """Whether this is a DataFrame or a Series of Dask."""
    return hasattr(value, "dask") and hasattr(value, "map_partitions")


@dataclass(frozen=True)
class Imputation:
    """What takes the place of missing values, and the columns that say where it did.

    Parameters
    ----------
    fills
        By column the number, or the code of the label, that takes the place of a missing value. The
        label is one of its own, the last of the column.
    indicators
        By column of numbers the name of its indicator, a column of the labels ``present`` and
        ``missing``. Indicators come after all columns that are given, in this order.
    """

    fills: dict[str, float]
    indicators: dict[str, str]


INDICATOR = "present", "missing"
"""Labels of indicators, in the order of their codes."""


@dataclass(frozen=True)
class Columns:
    """Names of one variable's columns, with units and, for coded ones, the names of the codes.

    Parameters
    ----------
    names
        One per column.
    units
        Units by column name.
    categories
        Labels of the codes 0, 1, ... by column name.
    imputation
        What takes the place of missing values of these columns, or None if they have none.

    Attributes
    ----------
    categorical
        Whether each column holds codes of labels.
    """

    names: tuple[str, ...]
    units: dict[str, str] = field(default_factory=dict)
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    imputation: Imputation | None = None
    categorical: tuple[bool, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        twice = sorted(name for name, count in Counter(self.names).items() if count > 1)
        if twice:
            shown = ", ".join(twice[:_MANY])
            raise DataError(f"column names must be unique, {shown} came more than once")
        unknown = sorted((set(self.units) | set(self.categories)) - set(self.names))
        if unknown:
            raise DataError(f"units or categories of unknown columns: {', '.join(unknown)}")
        coded = tuple(name in self.categories for name in self.names)
        object.__setattr__(self, "categorical", coded)

    @classmethod
    def default(cls, variable: str, count: int) -> "Columns":
        """``x0, x1, ...``: names for columns that have none."""
        return cls(tuple(f"{variable}{i}" for i in range(count)))

    def listed(self) -> str:
        """The names in a line; of many the first two and the last."""
        names = self.names if len(self.names) <= _MANY else (*self.names[:2], "...", self.names[-1])
        return printable(", ".join(names))

    @property
    def given(self) -> "Columns":
        """The columns whose values are given: without indicators, and labels of what is missing."""
        if self.imputation is None:
            return self
        names = self.names[: len(self.names) - len(self.imputation.indicators)]
        labels = {
            name: each[: int(self.imputation.fills.get(name, len(each)))]
            for name, each in self.categories.items()
            if name in names
        }
        return Columns(names, self.units, labels)

    @property
    def filled(self) -> tuple[tuple[int, int, float], ...]:
        """Of each column that is filled in: it, and the column and value that say where it was."""
        if self.imputation is None:
            return ()
        place, of = self.names.index, self.imputation.indicators
        return tuple(
            (place(name), place(of[name]), 1.0) if name in of else (place(name), place(name), value)
            for name, value in self.imputation.fills.items()
        )

    def complete(self, rows: Array) -> Array:
        """Rows of these columns, shape (n, d), with missing values filled in.

        Parameters
        ----------
        rows
            Rows of the columns that are given, shape (n, d_given), NaN where a value is missing; or
            of all columns. Where a column is not filled in, NaN stay.
        """
        if self.imputation is None:
            return rows
        result = np.empty((len(rows), len(self.names)))
        result[:, : rows.shape[1]] = rows
        if rows.shape[1] < len(self.names):
            result[:, rows.shape[1] :] = 0.0
        for (place, mark, value), fill in zip(
            self.filled, self.imputation.fills.values(), strict=True
        ):
            absent = np.isnan(result[:, place])
            result[absent, place] = fill
            result[absent, mark] = value
        return result

    @property
    def numeric(self) -> tuple[str, ...]:
        """The columns that hold numbers, which have means and quantiles."""
        return tuple(name for name in self.names if name not in self.categories)

    def labels(self, name: str) -> str:
        """The labels of a categorical column in a line; of many the first ones."""
        labels = self.categories[name]
        more = f" and {len(labels) - _MANY:,} more" if len(labels) > _MANY else ""
        return ", ".join(map(repr, labels[:_MANY])) + more

    def positions(self, requested: Sequence[str]) -> tuple[int, ...]:
        """Positions of the requested columns; DataError names the unknown ones."""
        if isinstance(requested, str):
            raise DataError(f"expected a list of column names, got the text {requested!r}")
        unknown = [name for name in requested if name not in self.names]
        if unknown:
            raise DataError(
                f"unknown column {', '.join(map(repr, unknown))}: "
                f"there are {', '.join(map(repr, self.names))}"
            )
        return tuple(self.names.index(name) for name in requested)

    def positions_of(self, expected: "Columns", name: str) -> tuple[int, ...]:
        """Positions, in this table, of the columns that a model expects.

        Columns are found by name. Those of a table that only counts them ("0", "1", ..., as pandas
        does where no names are given) are taken in their order, unless the model knows these names.

        Parameters
        ----------
        expected
            The columns of the model.
        name
            What messages call the table.

        Raises
        ------
        DataError
            If the table lacks some; the message names those it has instead.
        """
        missing = [column for column in expected.names if column not in self.names]
        if missing == list(expected.names) and self.names == counted_names(len(missing)):
            return tuple(range(len(missing)))
        if missing:
            extra = [column for column in self.names if column not in expected.names]
            others = f", and has others: {_quoted(extra)}" if extra else ""
            plural = "s" if len(missing) > 1 else ""
            raise DataError(
                f"{name} lacks the column{plural} {_quoted(missing)}{others}; expected are "
                f"{_quoted(expected.names)}"
            )
        return tuple(self.names.index(column) for column in expected.names)

    def other_unit(self, given: "Columns") -> tuple[str, str, str] | None:
        """The first column whose unit a table of the same columns has otherwise: name, both units.

        Columns go by position. One that has no unit in one of both is not compared.
        """
        for name, theirs in zip(self.names, given.names, strict=True):
            ours, unit = self.units.get(name), given.units.get(theirs)
            if ours and unit and ours != unit:
                return name, ours, unit
        return None

    def check_units(self, given: "Columns", where: str = "in the fit it was in") -> None:
        """DataError if a column is in another unit than in a table of the same columns.

        Parameters
        ----------
        given
            The columns of the table.
        where
            How the message names the unit of these columns.
        """
        found = self.other_unit(given)
        if found is not None:
            name, ours, unit = found
            raise DataError(f"column {name!r} is in {unit}, {where} {ours}: convert it")

    def only(self, requested: Sequence[str]) -> "Columns":
        """Description of the requested columns alone."""
        self.positions(requested)
        return Columns(
            tuple(requested),
            {k: v for k, v in self.units.items() if k in requested},
            {k: v for k, v in self.categories.items() if k in requested},
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        categories = {k: list(v) for k, v in self.categories.items()}
        result = {"names": list(self.names), "units": self.units, "categories": categories}
        if self.imputation is None:
            return result
        fills, indicators = self.imputation.fills, self.imputation.indicators
        return result | {"imputation": {"fills": fills, "indicators": indicators}}

    @classmethod
    def from_dict(cls, data: Any) -> "Columns":
        """Inverse of :meth:`to_dict`, for data that can't be trusted."""
        try:
            names = _texts(data["names"])
            units = {_text(k): _text(v) for k, v in data["units"].items()}
            categories = {_text(k): _texts(v) for k, v in data["categories"].items()}
            imputation = _imputation(data.get("imputation"), names, categories)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StoreError(f"the description of the columns is damaged: {error!r}") from error
        return cls(names, units, categories, imputation)


def _imputation(
    data: Any, names: Sequence[str], categories: dict[str, tuple[str, ...]]
) -> Imputation | None:
    """What takes the place of missing values; ValueError unless it fits the columns."""
    if data is None:
        return None
    fills = {_text(k): float(v) for k, v in data["fills"].items()}
    indicators = {_text(k): _text(v) for k, v in data["indicators"].items()}
    given = names[: len(names) - len(indicators)]
    numeric = [name for name in fills if name not in categories]
    fit = (
        set(fills) <= set(given)
        and list(indicators) == numeric
        and tuple(indicators.values()) == tuple(names[len(given) :])
        and all(categories.get(name) == INDICATOR for name in indicators.values())
        and all(fills[n] == len(categories[n]) - 1 for n in fills if n in categories)
        and bool(np.isfinite([*fills.values()]).all())
    )
    if not (fills and fit):
        raise ValueError("what takes the place of missing values does not fit the columns")
    return Imputation(fills, indicators)


def labels_have_no_mean(name: str, columns: Columns, *, laws: bool = True) -> DataError:
    """One sentence on a mean or quantile of a column of labels; embeddings have no laws."""
    label = next(iter(columns.categories[name]), "...")
    event = f"{name} == '{label}'"
    asked = (
        f'conditional(x).predict_proba({name!r}) or .probability("{event}")',
        f'probabilities, cme-dask predict --event "{event}"',
    )
    if not laws:
        asked = (
            f'expect("{event}", x), with the event among the functions of the fit',
            f'the event, cme-dask predict --event "{event}", if it was declared at the fit',
        )
    return DataError(
        f"column {name!r} holds labels, which have no mean or quantile: ask for {remedy(*asked)}"
    )


def counted_names(count: int) -> tuple[str, ...]:
    """The names ``0, 1, ...`` that pandas gives to columns without names."""
    return tuple(map(str, range(count)))


def _quoted(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MANY:,} more" if len(names) > _MANY else ""
    return ", ".join(map(repr, names[:_MANY])) + more


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"expected a list of texts, got {type(values).__name__}")
    return tuple(map(_text, values))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def check_finite(
    values: Array, names: Sequence[str], first_row: int, *, missing: bool = False
) -> None:
    """DataError naming each column with NaN or infinity, how many, and the first row.

    With ``missing``, NaN are missing values, which are no error.
    """
    bad = np.isinf(values) if missing else ~np.isfinite(values)
    if not bad.any():
        return
    counts = bad.sum(axis=0)
    firsts = first_row + bad.argmax(axis=0)
    each = dict(zip(names, zip(counts, firsts, strict=True), strict=True))
    raise nonfinite_error(each, missing=not missing and bool(np.isnan(values).any()))


def check_points(
    rows: Array, columns: Columns, first_row: int = 0, *, missing: bool = False
) -> None:
    """DataError on values of points that are missing and not filled in, or infinite.

    Parameters
    ----------
    rows
        Rows of the columns, filled in, shape (n, d).
    first_row
        Number of the first of them.
    missing
        Whether values may be missing.
    """
    if np.isfinite(rows).all():
        return
    if columns.imputation is not None and not missing:
        absent = np.isnan(rows)
        counts = {
            name: (int(each.sum()), first_row + int(each.argmax()))
            for name, each in zip(columns.names, absent.T, strict=True)
            if each.any()
        }
        if counts:
            each = "; ".join(
                f"column {name!r} lacks {count:,} (first at row {row})"
                for name, (count, row) in counts.items()
            )
            fills = _quoted(list(columns.imputation.fills))
            raise DataError(
                f"missing values are filled in where the fit saw some, in {fills}, but {each}: "
                "drop these points, or fit rows that lack these values as well"
            )
    check_finite(rows, columns.names, first_row, missing=missing)


def nonfinite_error(counts: dict[str, tuple[int, int]], *, missing: bool) -> NonFiniteValues:
    """One sentence on non-finite values: ``{column: (count, first row)}``.

    With ``missing`` some of them are NaN.
    """
    parts = [
        f"column {name!r} has {int(count):,} (first at row {int(row)})"
        for name, (count, row) in counts.items()
        if count
    ]
    each_way = (
        " (.dropna() of a DataFrame leaves out NaN)",
        " (ingest --missing drop leaves out rows that lack a value)",
    )
    what, advice = (
        ("NaN or infinite", f"drop or fill these rows{remedy(*each_way)}")
        if missing
        else ("infinite", "drop these rows, or give finite values")
    )
    statement = f"values must be finite, but {'; '.join(parts)} {what}"
    return NonFiniteValues(f"{statement}: {advice}", missing, statement)


def negative_error(count: int, first_row: int) -> DataError:
    """One sentence on negative weights."""
    return DataError(
        f"weights must be non-negative, {count:,} are negative (first at row {first_row})"
    )


def check_weights(weights: Array, first_row: int) -> None:
    """DataError on negative or non-finite weights, with the count and the first row."""
    check_finite(weights.reshape(-1, 1), ("weights",), first_row)
    negative = weights < 0
    if negative.any():
        raise negative_error(int(negative.sum()), first_row + int(negative.argmax()))
