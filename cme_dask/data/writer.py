"""The writer of sample stores, batch by batch, with statistics of the columns."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from cme_dask.config import SAMPLE_SIZE
from cme_dask.data.atomic import ATTRIBUTE, disk_errors, stored, writing
from cme_dask.data.columns import Columns, check_finite, check_weights
from cme_dask.data.sample import KIND, schema_version
from cme_dask.data.store import compressors, sealed, write_array, write_checksums
from cme_dask.errors import DataError, ZeroWeights, option
from cme_dask.numerics.folds import RowSample, draw, merge

# Count, mean, standard deviation and range of columns, strip by strip


Array = Any


class Statistics:
    """Running statistics of d columns, each of the values that are not missing.

    Means and sums of squared deviations are joined strip by strip (Chan, Golub and LeVeque 1983),
    so they depend on where the strips end in the last digits only, and not at all if these are the
    same.
    """

    def __init__(self, width: int) -> None:
        self._counts = np.zeros(width)
        self._mean = np.zeros(width)
        self._squares = np.zeros(width)
        self._low = np.full(width, np.inf)
        self._high = np.full(width, -np.inf)

    def add(self, rows: Array) -> None:
        """Add a strip of rows, shape (n, d) with n > 0."""
        columns = np.ascontiguousarray(rows.T)  # sums along memory are faster, and pairwise
        absent = np.isnan(columns)
        if not absent.any():
            self._add(slice(None), columns)
            return
        for j, column in enumerate(columns):
            if not absent[j].all():
                self._add(slice(j, j + 1), column[None, ~absent[j]])

    def _add(self, here: slice, columns: Array) -> None:
        """Add values of some columns, one row for each of them."""
        n, count = columns.shape[1], self._counts[here]
        with np.errstate(over="ignore", invalid="ignore"):  # a variance may exceed the floats
            mean = columns.mean(axis=1)
            away = columns - mean[:, None]
            rest = away.mean(axis=1)  # what rounding left of the mean
            mean = mean + rest
            squares = np.einsum("ij,ij->i", away, away) - n * rest**2
            total = count + n
            step = mean - self._mean[here]
            self._mean[here] = self._mean[here] + step * (n / total)
            self._squares[here] = self._squares[here] + squares + step**2 * (count * n / total)
        self._counts[here] = total
        self._low[here] = np.minimum(self._low[here], columns.min(axis=1))
        self._high[here] = np.maximum(self._high[here], columns.max(axis=1))

    @property
    def state(self) -> Array:
        """All of it, shape (5, d); see :meth:`restore`."""
        return np.stack([self._counts, self._mean, self._squares, self._low, self._high])

    def restore(self, state: Array) -> None:
        """Inverse of :attr:`state`."""
        self._counts, self._mean, self._squares, self._low, self._high = np.array(state)

    def to_dicts(self) -> list[dict[str, float | int | None]]:
        """Per column: count, mean, std (with 1/n), min, max; None for what is no finite number."""
        with np.errstate(invalid="ignore", divide="ignore"):
            deviation = np.sqrt(np.maximum(self._squares, 0.0) / self._counts)
        mean = np.where(self._counts > 0, self._mean, np.nan)
        table = np.stack([mean, deviation, self._low, self._high], axis=1).tolist()
        return [
            {"count": int(count)}
            | {
                name: value if np.isfinite(value) else None
                for name, value in zip(("mean", "std", "min", "max"), row, strict=True)
            }
            for count, row in zip(self._counts, table, strict=True)
        ]


# Write a sample store, batch by batch


OUTPUT = stored(KIND, "sample store")
"""What a sample store is, among outputs."""

CHUNK_BYTES = 1 << 23
MAX_CHUNK_ROWS = 1 << 26

_ROLES_VERSION = 3
_NO_ROW = {"float64": np.nan, "float32": np.nan, "int64": np.iinfo(np.int64).min}


@dataclass(frozen=True)
class Roles:
    """Columns beside x, y and the weights, by the names of the columns they were made from."""

    group: str | None = None
    time: str | None = None

    def to_dict(self) -> dict[str, str]:
        """Those there are, by role."""
        both = {"group": self.group, "time": self.time}
        return {role: column for role, column in both.items() if column is not None}


@dataclass(frozen=True)
class Described:
    """What is known of the columns only when all rows are there.

    Attributes
    ----------
    columns
        Descriptions of x and y, with the labels of categorical columns.
    missing
        Rows read without a value, by column of x or y.
    counts
        Rows kept per code, by categorical column.
    group_labels
        Labels of the codes of a group column of text.
    """

    columns: tuple[Columns, Columns]
    missing: Mapping[str, int]
    counts: Mapping[str, Sequence[int]]
    group_labels: Sequence[str] | None = None


@contextlib.contextmanager
def writing_sample(
    path: str | os.PathLike[str],
    columns: tuple[Columns, Columns],
    *,
    weights: bool = False,
    chunk_rows: int | None = None,
    expected_rows: int | None = None,
    sample_size: int = SAMPLE_SIZE,
    seed: int = 0,
    overwrite: bool = False,
) -> Iterator["SampleWriter"]:
    """A writer of a new sample store; the store appears, whole, when the block ends well.

    Parameters
    ----------
    path
        Local folder to make.
    columns
        Descriptions of the columns of x and y.
    weights
        Whether each batch comes with weights.
    chunk_rows
        Rows per chunk; default a power of two from 2^12 to 2^18, at most 8 MB, so that the
        expected rows make some 64 chunks; 2^16 if their number is not known.
    expected_rows
        Number of rows to come, if it is known.
    sample_size, seed
        Of the priority sample.
    overwrite
        Replace an existing store when the new one is whole.

    Raises
    ------
    DataError
        If the output exists, or no usable rows were appended.
    ResourceError
        If the disk is full or read-only.
    """
    check_chunk_rows(chunk_rows)
    check_seed(seed)
    with writing(path, OUTPUT, overwrite=overwrite) as aside:
        chunk = chunk_rows or default_chunk_rows(columns, expected_rows)
        writer = SampleWriter(aside, columns, weights, chunk, sample_size, seed)
        with contextlib.closing(writer):
            yield writer
            writer.finish()


def check_chunk_rows(chunk_rows: int | None) -> None:
    """DataError on a number of rows that no chunk may have."""
    if chunk_rows is None:
        return
    whole = isinstance(chunk_rows, (int, np.integer)) and not isinstance(chunk_rows, bool)
    if not whole or not 1 <= chunk_rows <= MAX_CHUNK_ROWS:
        raise DataError(
            f"{option('chunk_rows')} must be an integer from 1 to {MAX_CHUNK_ROWS:,}, got "
            f"{chunk_rows!r}"
        )


def check_seed(seed: int) -> None:
    """DataError on a seed that the priority keys can't take."""
    if not 0 <= seed < 1 << 63:
        raise DataError(f"seed must lie between 0 and 2**63 - 1, got {seed}")


def default_chunk_rows(columns: tuple[Columns, Columns], expected_rows: int | None) -> int:
    """Rows per chunk, a power of two, so that chunks are aligned with strips."""
    fitting = chunk_rows_for(columns, CHUNK_BYTES)
    requested = 1 << 16 if expected_rows is None else 1 << (expected_rows // 64).bit_length()
    return max(1 << 12, min(1 << 18, fitting, requested))


def chunk_rows_for(columns: tuple[Columns, Columns], target_bytes: int) -> int:
    """The most rows, a power of two, whose chunks of x and of y have at most the target size."""
    widest = max(len(c.names) for c in columns)
    rows = 1 << (max(target_bytes // (8 * widest), 1).bit_length() - 1)
    return min(rows, MAX_CHUNK_ROWS)


class SampleWriter:
    """Appends batches of rows to a sample store in a folder; see :func:`writing_sample`.

    With ``resumed``, what :meth:`state` gave, it goes on where that writer was: rows that were
    written after it are written again. Where missing values are admitted, x and y may hold NaN.
    """

    def __init__(
        self,
        folder: Path,
        columns: tuple[Columns, Columns],
        weights: bool,
        chunk_rows: int,
        sample_size: int,
        seed: int,
        roles: Roles | None = None,
        resumed: Mapping[str, Array] | None = None,
        *,
        admits_missing: bool = False,
    ) -> None:
        self._chunk, self._admits_missing = chunk_rows, admits_missing
        self._folder, self._columns, self._has_weights = folder, columns, weights
        self._roles = roles or Roles()
        self._size, self._seed = sample_size, seed
        self._waiting: list[tuple[Array, ...]] = []
        self._row_sample: RowSample | None = None
        self._rows = self._written = 0
        self._thread = ThreadPoolExecutor(1, "write")
        self._writing: Future[None] | None = None
        self._total_weight = 0.0
        self._statistics = Statistics(sum(len(c.names) for c in columns))
        widths = {"x": len(columns[0].names), "y": len(columns[1].names)}
        single = ["weights"] if weights else []
        self._names = [*widths, *single, *self._roles.to_dict()]
        with disk_errors(folder):
            if resumed is not None:
                for cut_off in folder.rglob("*.partial"):  # what zarr renames once it is written
                    cut_off.unlink()
                self._group = zarr.open_group(str(folder), mode="r+", zarr_format=3)
                self._restore(resumed)
                return  # the arrays are there
            self._group = zarr.open_group(str(folder), mode="w", zarr_format=3)
            self._arrays = [
                create_rows(self._group, n, widths.get(n), self._chunk, dtype=_dtype(n))
                for n in self._names
            ]

    @property
    def n_rows(self) -> int:
        """Rows appended so far."""
        return self._rows

    def append(
        self,
        x: Array,
        y: Array,
        weights: Array | None = None,
        group: Array | None = None,
        time: Array | None = None,
    ) -> None:
        """Add rows; unusable values are refused with column, count and first row."""
        given = {"x": x, "y": y, "weights": weights, "group": group, "time": time}
        if (weights is not None) != self._has_weights:
            raise DataError("weights must come with every batch or with none")
        if [name for name, values in given.items() if values is not None] != self._names:
            raise DataError("group and time must come with every batch or with none")
        # Copies: the caller may use its buffers again before the rows are written.
        batch = {n: np.array(given[n], dtype=_dtype(n)) for n in self._names}
        for name, columns in zip("xy", self._columns, strict=True):
            part = batch[name]
            if part.ndim != 2 or part.shape[1] != len(columns.names):
                raise DataError(f"expected {len(columns.names)} columns, got shape {part.shape}")
            check_finite(part, columns.names, self._rows, missing=self._admits_missing)
        if "weights" in batch:
            check_weights(batch["weights"], self._rows)
        if "time" in batch:
            check_finite(batch["time"][:, None], ("time",), self._rows)
        if len({len(part) for part in batch.values()}) != 1:
            raise DataError(f"the numbers of rows differ: {[len(p) for p in batch.values()]}")
        self._draw(batch)
        self._rows += len(batch["x"])
        self._waiting.append(tuple(batch.values()))
        self._flush(everything=False)

    def _draw(self, batch: dict[str, Array]) -> None:
        """Keep the rows with the smallest keys."""
        best = self._row_sample
        parts = (batch["x"], batch["y"])
        units = {role: batch[role] for role in self._roles.to_dict()}
        # Rows that don't come before the last one of a full sample can't be in it.
        full = best is not None and len(best) == self._size and not best.complete
        below = float(best.keys[-1]) if best is not None and full else np.inf
        weights = batch.get("weights")
        rows = np.arange(self._rows, self._rows + len(parts[0]))
        fresh = draw(rows, parts, weights, self._size, self._seed, below, units)
        self._row_sample = fresh if best is None else merge((best, fresh), self._size)

    def _flush(self, everything: bool) -> None:
        """Write whole chunks only: one writer per chunk, each chunk once."""
        ready = sum(len(parts[0]) for parts in self._waiting)
        if not everything:
            ready -= ready % self._chunk
        if ready == 0:
            return
        joined = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
        self._waiting = [tuple(rows[ready:] for rows in joined)]
        self._settle()
        self._writing = self._thread.submit(self._write, [rows[:ready] for rows in joined])

    def _settle(self) -> None:
        """Wait until what was handed to the thread is written; raise what it raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait for the thread, whatever becomes of its rows."""
        self._thread.shutdown()

    def _write(self, joined: Sequence[Array]) -> None:
        """Write whole chunks, or the rest."""
        ready = len(joined[0])
        with disk_errors(self._folder):
            for array, rows in zip(self._arrays, joined, strict=True):
                array.resize((self._written + ready, *array.shape[1:]))
                array[self._written :] = rows
        for start in range(0, ready, self._chunk):
            here = slice(start, min(start + self._chunk, ready))
            self._statistics.add(np.concatenate([joined[0][here], joined[1][here]], axis=1))
            if self._has_weights:
                self._total_weight += float(joined[2][here].sum())
        self._written += ready

    def finish(self, described: Described | None = None) -> None:
        """Write what waits, the row sample, and last the description."""
        if self._rows < 2 or self._row_sample is None:
            raise DataError(f"at least 2 rows are needed, got {self._rows}: nothing was written")
        self._flush(everything=True)
        self._settle()
        if self._has_weights and self._total_weight <= 0.0:
            raise ZeroWeights()
        described = described or Described(self._columns, {}, {})
        with disk_errors(self._folder):
            finish_sample(
                self._group,
                dict(zip(self._names, self._arrays, strict=True)),
                self._row_sample,
                described.columns,
                self._seed,
                roles=self._roles,
                group_labels=described.group_labels,
                statistics=self.statistics(described),
            )

    def statistics(self, described: Described) -> dict[str, dict[str, dict[str, Any]]]:
        """Of the rows kept, by variable and column: of all of them once the store is finished."""
        result = iter(self._statistics.to_dicts())
        by_variable: dict[str, dict[str, dict[str, Any]]] = {}
        for variable, columns in zip("xy", described.columns, strict=True):
            by_variable[variable] = {}
            for name in columns.names:
                metadata: dict[str, Any] = {
                    **next(result),
                    "missing": described.missing.get(name, 0),
                }
                if name in described.counts:
                    metadata["counts"] = [int(count) for count in described.counts[name]]
                by_variable[variable][name] = metadata
        return by_variable

    def state(self) -> dict[str, Array]:
        """Arrays from which :class:`SampleWriter` resumes: what is not in the store yet."""
        self._settle()
        arrays: dict[str, Array] = {
            "counts": np.array([self._rows, self._written]),
            "total_weight": np.array(self._total_weight),
            "statistics": self._statistics.state,
        }
        if self._waiting:
            joined = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
            arrays |= {f"waiting_{n}": a for n, a in zip(self._names, joined, strict=True)}
        if (retained := self._row_sample) is not None:
            parts = {**dict(zip("xy", retained.parts, strict=True)), **retained.units}
            arrays |= {f"sample_{name}": part for name, part in parts.items()}
            arrays |= {"sample_keys": retained.keys, "sample_index": retained.index}
            arrays |= {
                "sample_weights": retained.weights,
                "sample_complete": np.array(retained.complete),
            }
        return arrays

    def _restore(self, state: Mapping[str, Array]) -> None:
        self._rows, self._written = (int(count) for count in state["counts"])
        self._total_weight = float(state["total_weight"])
        self._statistics.restore(state["statistics"])
        if "waiting_x" in state:
            self._waiting = [tuple(state[f"waiting_{n}"] for n in self._names)]
        if "sample_keys" in state:
            self._row_sample = RowSample(
                state["sample_keys"],
                state["sample_index"],
                (state["sample_x"], state["sample_y"]),
                state["sample_weights"],
                bool(state["sample_complete"]),
                {role: state[f"sample_{role}"] for role in self._roles.to_dict()},
            )
        for name in ("row_sample", "chunk_checksums"):
            if name in self._group:  # the writer was cut off while it finished
                del self._group[name]
        self._group.attrs.put({})
        self._arrays = [self._group[name] for name in self._names]  # type: ignore[misc]
        for array in self._arrays:
            array.resize((self._written, *array.shape[1:]))


def _dtype(name: str) -> str:
    return "int64" if name == "group" else "float64"


def create_rows(
    group: zarr.Group,
    name: str,
    width: int | None,
    chunk: int,
    *,
    rows: int = 0,
    dtype: str = "float64",
) -> zarr.Array[Any]:
    """An array of rows, shape (rows, width), or (rows,) if width is None, in chunks of rows."""
    tail = () if width is None else (width,)
    return group.create_array(
        name,
        shape=(rows, *tail),
        chunks=(chunk, *tail),
        dtype=dtype,
        compressors=compressors(),
        fill_value=_NO_ROW[dtype],  # a missing chunk must not read as zeros
        dimension_names=["row"] if width is None else ["row", f"{name}_column"],
        config={"write_empty_chunks": True},
    )


def finish_sample(
    group: zarr.Group,
    arrays: Mapping[str, zarr.Array[Any]],
    row_sample: RowSample,
    columns: tuple[Columns, ...],
    seed: int | None,
    *,
    features: dict[str, Any] | None = None,
    roles: Roles | None = None,
    group_labels: Sequence[str] | None = None,
    statistics: dict[str, Any] | None = None,
) -> None:
    """Write the row sample and, last, the description that makes the store a finished one.

    Parameters
    ----------
    group
        The store.
    arrays
        Its arrays of rows by name: x, possibly y, weights, group, time.
    row_sample
        The row sample, of the same columns.
    columns
        Descriptions of x and possibly y.
    seed
        Of the row sample.
    features
        The map that made x out of another store's.
    roles, group_labels
        What group and time were made from.
    statistics
        By variable and column.
    """
    folder = group.create_group("row_sample")
    parts = dict(zip("xy", row_sample.parts, strict=False))
    small = {
        "keys": row_sample.keys,
        "index": row_sample.index,
        **parts,
        "weights": row_sample.weights,
        **({} if roles is None else {role: row_sample.units[role] for role in roles.to_dict()}),
    }
    written = {name: write_array(folder, name, values) for name, values in small.items()}
    named = {} if roles is None else roles.to_dict()
    variables = [arrays[variable] for variable, _ in zip("xy", columns, strict=False)]
    checksums = write_checksums(group, arrays)
    optional = {
        "features": features,
        "roles": named or None,
        "group_labels": None if group_labels is None else list(group_labels),
        "statistics": statistics,
    }
    group.attrs[ATTRIBUTE] = sealed(
        {
            "kind": KIND,
            "schema_version": _ROLES_VERSION if named else schema_version(variables),
            "rows": arrays["x"].shape[0],
            "weights": "weights" in arrays,
            "seed": seed,
            "row_sample_complete": row_sample.complete,
            "row_sample": written,
            "chunk_checksums": checksums,
            "columns": {v: c.to_dict() for v, c in zip("xy", columns, strict=False)},
            **{key: value for key, value in optional.items() if value is not None},
        }
    )
