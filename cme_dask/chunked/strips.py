"""Strips of rows as tasks see them: which rows are kept, their weights and folds, in one place."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from cme_dask.chunked.plan import Run
from cme_dask.errors import DataError
from cme_dask.numerics.folding import BY_ROWS, Folding, Part
from cme_dask.numerics.location import Residuals
from cme_dask.storage.rows import RowSource, ahead, read_strips
from cme_dask.storage.sample import Sample

Array = Any


class BadValues(DataError):
    """A strip met a value that is not usable; :func:`count_bad_values` finds them all."""


def empty_part(sample: Sample) -> DataError:
    """The error on a sample none of whose rows count."""
    if sample.part is None:
        return DataError("there are no rows: at least one is needed")
    return DataError(f"no row belongs to this part ({sample.part}): take another share or seed")


@dataclass(frozen=True)
class Reading:
    """What the sources of a task are, and which of their rows count.

    Attributes
    ----------
    variables
        How many of them, the first, are x and y.
    weighted
        Whether weights follow.
    units
        Names of the columns that follow these: ``group``, ``time``.
    folding
        What goes into folds as a whole.
    part
        The part of the rows that counts, or None.
    residuals
        What is made of the rows of x and y, or None.
    first_row
        Global index of the first row of the sources.
    """

    variables: int
    weighted: bool = False
    units: tuple[str, ...] = ()
    folding: Folding = BY_ROWS
    part: Part | None = None
    residuals: Residuals | None = None
    first_row: int = 0

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """How tasks read the sources ``sample.reads``."""
        return cls(
            len(sample.sources),
            sample.weights is not None,
            (*sample.units,),
            sample.folding,
            sample.part,
            sample.residuals,
            sample.first_row,
        )

    def strip(self, rows: Array, arrays: tuple[Array, ...]) -> "Strip":
        """What counts of the rows with these global indices, given what all sources hold."""
        first = self.variables + self.weighted
        columns = (array[:, 0] for array in arrays[first:])
        units = dict(zip(self.units, columns, strict=True))
        weights = arrays[self.variables][:, 0] if self.weighted else None
        strip = Strip(rows, arrays[: self.variables], weights, units, self.folding)
        if self.part is not None:
            kept = self.part.keeps(rows - self.first_row, units)  # a part is one of its table
            for values in units.values():
                kept |= ~np.isfinite(values)  # of no part: kept to be found
            strip = strip if kept.all() else strip.only(kept)
        if self.residuals is None:
            return strip
        return replace(
            strip, parts=self.residuals(strip.parts, strip.folds(self.residuals.n_folds))
        )


@dataclass(frozen=True, eq=False)
class Strip:
    """Consecutive rows that count, possibly none.

    Attributes
    ----------
    rows
        Global indices, ascending, shape (n,).
    parts
        Rows of each variable, shapes (n, d).
    weights
        Shape (n,), or None for equal ones.
    units
        Values of the columns that tell the units, by name, shapes (n,).
    folding
        What the units are.
    """

    rows: Array
    parts: tuple[Array, ...]
    weights: Array | None
    units: Mapping[str, Array]
    folding: Folding

    def __len__(self) -> int:
        """Number of rows n."""
        return len(self.rows)

    def folds(self, n_folds: int) -> Array:
        """Fold number of each row, shape (n,), uint8."""
        return self.folding.folds(self.rows, self.units, n_folds)

    def only(self, kept: Array) -> "Strip":
        """The rows at which ``kept``, shape (n,), is true."""
        return Strip(
            self.rows[kept],
            tuple(part[kept] for part in self.parts),
            None if self.weights is None else self.weights[kept],
            {name: values[kept] for name, values in self.units.items()},
            self.folding,
        )

    def columns(self) -> tuple[Array, ...]:
        """Everything that must be finite, in the order of the sources, shapes (n, d)."""
        weights = () if self.weights is None else (self.weights[:, None],)
        return *self.parts, *weights, *(values[:, None] for values in self.units.values())

    def check(self) -> None:
        """BadValues if there is NaN, infinity or an unusable weight."""
        usable = all(np.isfinite(values).all() for values in self.columns())
        if not usable or (self.weights is not None and not (self.weights >= 0).all()):
            raise BadValues(f"rows {self.rows[0]} to {self.rows[-1]} hold unusable values")


def strips_of(run: Run, reading: Reading, sources: tuple[RowSource, ...]) -> Iterator[Strip]:
    """The strips of a run, one after the other; a strip that holds nothing of the part is empty."""
    starts = range(run.start, run.stop, run.length)
    readers = [read_strips(source, run.start, run.stop, run.length) for source in sources]
    strips: Iterator[tuple[Any, ...]] = zip(starts, *readers, strict=True)
    if any(source.chunk_rows is not None for source in sources):
        strips = ahead(strips)
    for start, *arrays in strips:
        rows = reading.first_row + np.arange(start, min(start + run.length, run.stop))
        yield reading.strip(rows, tuple(arrays))
