"""What an ingestion tells while it runs, and when it is done."""

from dataclasses import dataclass
from typing import Any


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
    rows_read, rows_kept
        Numbers of rows; a row that is not kept lacks a value in at least one wanted column.
    rows_resumed
        How many of the rows read had been read before an interruption.
    missing
        Number of missing values by wanted column, among the rows read.
    statistics
        ``{"x": {column: {...}}, "y": {...}}`` by stored column, of the rows kept: count, mean, std
        (with 1/n), min, max, missing, and counts of the codes of a categorical column.
    categories
        Labels in the order of their codes by categorical column.
    origins
        The wanted column that each stored column was made from.
    location
        The sample store.
    """

    files: tuple[str, ...]
    rows_read: int
    rows_kept: int
    rows_resumed: int
    missing: dict[str, int]
    statistics: dict[str, dict[str, dict[str, Any]]]
    categories: dict[str, tuple[str, ...]]
    origins: dict[str, str]
    location: str

    @property
    def rows_dropped(self) -> int:
        """Number of rows that were left out."""
        return self.rows_read - self.rows_kept

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest kept value by stored column."""
        both = {**self.statistics["x"], **self.statistics["y"]}
        return {name: (about["min"], about["max"]) for name, about in both.items()}
