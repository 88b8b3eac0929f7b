"""CSV files, plain or compressed, streamed block by block into a sample store."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from cme_dask.errors import DataError
from cme_dask.storage.columns import Columns
from cme_dask.storage.csv_reader import BLOCK_BYTES, NULL_VALUES, Source, find_sources, listed
from cme_dask.storage.writer import writing_sample

__all__ = ["BLOCK_BYTES", "NULL_VALUES", "IngestProgress", "IngestReport", "ingest_csv"]

Array = Any


@dataclass(frozen=True)
class IngestProgress:
    """How far an ingestion has come: all counts are over the files so far."""

    file: str
    rows_read: int
    rows_kept: int
    files_done: int
    files_total: int


@dataclass(frozen=True)
class IngestReport:
    """What an ingestion read and kept.

    Attributes
    ----------
    files
        The files in the order in which they were read.
    rows_read, rows_kept, rows_dropped
        Numbers of rows; a dropped row lacks a value in at least one wanted column.
    missing
        Number of missing values by column, among the rows read.
    ranges
        Smallest and largest value by column, among the rows kept.
    location
        The sample store.
    """

    files: tuple[str, ...]
    rows_read: int
    rows_kept: int
    rows_dropped: int
    missing: dict[str, int]
    ranges: dict[str, tuple[float, float]]
    location: str


def ingest_csv(
    files: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    x: Sequence[str],
    y: Sequence[str],
    weights: str | None = None,
    missing: str = "drop",
    units: dict[str, str] | None = None,
    null_values: Sequence[str] = NULL_VALUES,
    chunk_rows: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[IngestProgress], None] | None = None,
) -> IngestReport:
    """Stream numeric columns of CSV files into a sample store.

    The rows keep the order of the files, sorted by name, and of the rows in them, so that the store
    does not depend on how the files were listed. A few blocks are in memory at a time.

    Parameters
    ----------
    files
        Paths, patterns or fsspec URLs of UTF-8 files with a header; ``.gz`` and the like are
        decompressed. Other columns, and the order of columns, may differ between files.
    output
        Local folder of the store; it appears when it is whole.
    x, y
        Names of the columns of x and of y.
    weights
        Name of the column of non-negative row weights.
    missing
        ``"drop"`` leaves out rows that lack a wanted value, ``"error"`` refuses them.
    units
        Units by column name, for the columns of x and y.
    null_values
        Texts that stand for a missing value, compared with the whole field.
    chunk_rows, seed, overwrite
        As in :class:`~cme_dask.storage.writer.SampleWriter`.
    progress
        Called after each block.

    Raises
    ------
    DataError
        If an argument or a file is unusable. No output is left, an earlier one stays as it was.
        Rows in messages count the header as row 1 and skip empty lines.
    ResourceError
        If the disk is full or the package for a URL's protocol is missing.
    """
    wanted = _wanted(x, y, weights)
    x_units = {name: unit for name, unit in (units or {}).items() if name in x}
    y_units = {name: unit for name, unit in (units or {}).items() if name not in x}
    columns = (Columns(tuple(x), x_units), Columns(tuple(y), y_units))
    if missing not in ("drop", "error"):
        raise DataError(f"missing must be 'drop' or 'error', got {missing!r}")
    sources = find_sources(files)
    _spare_inputs(sources, Path(output))
    for source in sources:  # a wrong name in the last file should not cost the time of all others
        source.check_header(wanted)
    tally = _Tally(wanted)
    lowest = np.full(len(wanted), -np.inf)
    lowest[len(x) + len(y) :] = 0.0
    with writing_sample(
        output,
        columns,
        weights=weights is not None,
        chunk_rows=chunk_rows,
        seed=seed,
        overwrite=overwrite,
    ) as writer:
        for done, source in enumerate(sources):
            for first_row, values in source.blocks(wanted, null_values):
                refuse = partial(_refuse, names=wanted, file=source.name, first_row=first_row)
                rows = _usable(values, lowest, missing, refuse)
                if len(rows):
                    x_rows, y_rows, w_rows = np.split(rows, [len(x), len(x) + len(y)], axis=1)
                    writer.append(x_rows, y_rows, w_rows[:, 0] if weights is not None else None)
                tally.add(values, rows)
                if progress is not None:
                    counts = (tally.rows_read, tally.rows_kept, done, len(sources))
                    progress(IngestProgress(source.name, *counts))
        tally.check_kept()
    return tally.report(tuple(source.name for source in sources), str(output))


class _Tally:
    """Counts and ranges, block by block."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._missing = np.zeros(len(names), dtype=np.int64)
        self._low = np.full(len(names), np.inf)
        self._high = np.full(len(names), -np.inf)
        self.rows_read = self.rows_kept = 0

    def add(self, values: Array, rows: Array) -> None:
        """Count a block as read and the rows of it that were kept."""
        self.rows_read += len(values)
        self.rows_kept += len(rows)
        self._missing += np.isnan(values).sum(axis=0)
        self._low = np.minimum(self._low, rows.min(axis=0, initial=np.inf))
        self._high = np.maximum(self._high, rows.max(axis=0, initial=-np.inf))

    def check_kept(self) -> None:
        """DataError if no row is left, naming the columns without any value."""
        if self.rows_kept:
            return
        bare = [n for n, m in zip(self._names, self._missing, strict=True) if m == self.rows_read]
        reason = f": {listed(bare)} has no value in any row" if bare else ""
        raise DataError(f"each of the {self.rows_read:,} rows lacks a wanted value{reason}")

    def report(self, files: tuple[str, ...], location: str) -> IngestReport:
        """The result."""
        ranges = zip(self._low.tolist(), self._high.tolist(), strict=True)
        return IngestReport(
            files=files,
            rows_read=self.rows_read,
            rows_kept=self.rows_kept,
            rows_dropped=self.rows_read - self.rows_kept,
            missing=dict(zip(self._names, self._missing.tolist(), strict=True)),
            ranges=dict(zip(self._names, ranges, strict=True)),
            location=location,
        )


def _wanted(x: Sequence[str], y: Sequence[str], weights: str | None) -> list[str]:
    for variable, names in (("x", x), ("y", y)):
        if isinstance(names, str):  # it would pass as a sequence of letters
            raise DataError(f"{variable} must be a list of column names, got the text {names!r}")
        if not names:
            raise DataError(f"{variable} needs at least one column")
    wanted = [*x, *y, *([] if weights is None else [weights])]
    twice = [name for name in dict.fromkeys(wanted) if wanted.count(name) > 1]
    if twice:
        raise DataError(f"column {listed(twice)} is wanted twice: x, y and weights must differ")
    return wanted


def _spare_inputs(sources: Sequence[Source], output: Path) -> None:
    """Refuse an output whose overwriting would delete an input."""
    target = output.resolve()
    for source in sources:
        local = isinstance(source.files, LocalFileSystem)
        if local and Path(source.path).resolve().is_relative_to(target):
            raise DataError(f"the output {output} would replace the input {source.name}")


def _usable(
    values: Array, lowest: Array, missing: str, refuse: Callable[[Array, str], None]
) -> Array:
    """The rows without a missing value, shape (rows, columns)."""
    lacking = np.isnan(values)
    if missing == "error":
        refuse(lacking, "missing")
    complete = ~lacking.any(axis=1)
    refuse(np.isinf(values) & complete[:, None], "infinite")
    refuse((values < lowest) & complete[:, None], "negative")
    return values if complete.all() else values[complete]


def _refuse(bad: Array, kind: str, *, names: Sequence[str], file: str, first_row: int) -> None:
    """DataError on the first column with a bad value."""
    hit = bad.any(axis=0)
    if not hit.any():
        return
    column = int(hit.argmax())
    count, row = int(bad[:, column].sum()), first_row + int(bad[:, column].argmax())
    values = "value" if count == 1 else "values"
    raise DataError(
        f"column {names[column]!r} of {file} has {count:,} {kind} {values} in rows {first_row} to "
        f"{first_row + len(bad) - 1}, the first in row {row}"
    )
