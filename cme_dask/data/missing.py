"""Missing values of x that are filled in: learned from a row sample, applied to all rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cme_dask.data.columns import INDICATOR, Columns, Imputation
from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource
from cme_dask.errors import DataError
from cme_dask.numerics.folds import RowSample

Array = Any

_PREFIX = "missingindicator_"  # as scikit-learn calls them


@dataclass(frozen=True)
class Completion:
    """Rows of the given columns, shape (b, d), to those of all columns, filled in."""

    columns: Columns

    def __call__(self, rows: Array) -> Array:
        """See :meth:`Columns.complete`."""
        return self.columns.complete(rows)


def completed(sample: Sample, columns: Columns) -> Sample:
    """The sample with missing values of x filled in, without the rows that still lack a value.

    Parameters
    ----------
    sample
        Rows of the columns that are given.
    columns
        The columns of x, with what takes the place of missing values.

    Notes
    -----
    Rows that the sample leaves out already, see :meth:`Sample.drop_missing`, stay left out.
    """
    if columns.imputation is None:
        return sample.drop_missing()
    x, *others = sample.sources
    rows = sample.row_sample
    if rows is not None:
        rows = replace(rows, parts=(columns.complete(rows.parts[0]), *rows.parts[1:]))
    filled = replace(
        sample,
        sources=(x.map(Completion(columns), len(columns.names)), *others),
        columns=(columns, *sample.columns[1:]),
        row_sample=rows,
        beside=_beside(sample),
        filled=columns.filled,
    )
    return filled.drop_missing()


def _beside(sample: Sample) -> tuple[RowSource, ...]:
    """With x as it is given where rows that lack a value of it are left out."""
    return (*sample.beside, sample.sources[0]) if sample.dropping else sample.beside


# From rows to what takes the place of their missing values. Passes refuse or leave out rows with
# NaN: so x is read with a mark beside each column in place of these.


def marked(sample: Sample) -> Sample:
    """The sample with zeros in place of missing values of x, and a mark beside each column."""
    columns, (x, *others), rows = sample.columns[0], sample.sources, sample.row_sample
    names = columns.names
    marks: list[str] = []
    for name in names:
        marks.append(_unused(f"missing {name}", {*names, *marks}))
    if rows is not None:
        rows = replace(rows, parts=(_marked(rows.parts[0]), *rows.parts[1:]))
    beside = replace(
        sample,
        sources=(x.map(_marked, 2 * len(names)), *others),
        columns=(Columns((*names, *marks)), *sample.columns[1:]),
        row_sample=rows,
        beside=_beside(sample),
    )
    return beside.drop_missing()


def _marked(rows: Array) -> Array:
    absent = np.isnan(rows)
    return np.concatenate([np.where(absent, 0.0, rows), absent], axis=1)


def learned(columns: Columns, rows: RowSample) -> tuple[Columns, RowSample]:
    """The columns of x with what takes the place of missing values, and the rows filled in.

    Numbers are filled in with the weighted median of those that are there, and get an indicator;
    labels with one of their own. Of columns that lack no value in these rows nothing is learned.

    Parameters
    ----------
    columns
        The columns that are given.
    rows
        Rows of :func:`marked`.

    Raises
    ------
    DataError
        If a column has no value at all.
    """
    d, weights = len(columns.names), rows.importance
    absent = rows.parts[0][:, d:] > 0.0
    x = np.where(absent, np.nan, rows.parts[0][:, :d])
    bare = [name for name, each in zip(columns.names, absent.T, strict=True) if each.all()]
    if bare:
        raise DataError(
            f"column {', '.join(map(repr, bare))} has no value in any of the {len(rows):,} sampled "
            "rows: leave it out"
        )
    fills: dict[str, float] = {}
    indicators: dict[str, str] = {}
    categories = dict(columns.categories)
    taken = set(columns.names)
    for j, name in enumerate(columns.names):
        if not absent[:, j].any():
            continue
        if name in categories:
            label = _unused(INDICATOR[1], categories[name])
            fills[name] = float(len(categories[name]))
            categories[name] = (*categories[name], label)
        else:
            there = ~absent[:, j]
            fills[name] = weighted_median(x[there, j], weights[there])
            indicators[name] = _unused(f"{_PREFIX}{name}", taken)
            taken.add(indicators[name])
    if fills:
        names = (*columns.names, *indicators.values())
        categories |= dict.fromkeys(indicators.values(), INDICATOR)
        columns = Columns(names, columns.units, categories, Imputation(fills, indicators))
    return columns, replace(rows, parts=(columns.complete(x), *rows.parts[1:]))


def _unused(name: str, used: Sequence[str] | set[str]) -> str:
    return name if name not in used else _unused(f"{name}_", used)


def weighted_median(values: Array, weights: Array) -> float:
    """The median of numbers (n,) with weights; between two values their mean, as of NumPy."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weights[order])
    share /= share[-1]
    ends = np.searchsorted(share, [0.5 - 1e-12, 0.5 + 1e-12])
    low, high = values[order][np.minimum(ends, len(values) - 1)]
    return float(low + (high - low) / 2.0)
