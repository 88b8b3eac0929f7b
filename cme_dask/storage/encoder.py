"""Codes of labels over a whole ingestion, by first occurrence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from cme_dask.errors import DataError, option
from cme_dask.storage.layout import Layout
from cme_dask.storage.tables import Kind
from cme_dask.storage.typed import Coded, Decoded

Array = Any

MAX_LABELS = 10_000
MAX_GROUPS = 1_000_000


@dataclass
class _Labels:
    """The labels of one column, in order of occurrence, and how many rows have each."""

    codes: dict[str, int] = field(default_factory=dict)
    counts: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def encode(self, coded: Coded) -> Array:
        """Codes of a batch's rows; new labels get the next ones."""
        table = np.array(
            [self.codes.setdefault(label, len(self.codes)) for label in coded.labels.to_pylist()],
            dtype=np.int64,
        )
        codes = table[coded.codes]
        counts = np.bincount(codes, minlength=len(self.codes))
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
                    matrix[:, place] = codes[feature.column]
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
