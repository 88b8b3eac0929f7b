"""Tables of any format, streamed batch by batch into a sample store."""

import contextlib
import dataclasses
import os
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import fsspec
from fsspec.core import has_magic, url_to_fs
from fsspec.implementations.local import LocalFileSystem

from cme_dask.config import NULL_VALUES, SAMPLE_SIZE
from cme_dask.data.atomic import check_apart, path_text
from cme_dask.data.checkpoint import ResumableOutput
from cme_dask.data.csv import in_order
from cme_dask.data.layout import Layout, make_layout
from cme_dask.data.remote import explained, is_http, whole_files_only, with_persistence
from cme_dask.data.tables import Source, address_of, listed
from cme_dask.data.typed import Decoded, Decoder, Encoder
from cme_dask.data.writer import (
    OUTPUT,
    Described,
    Roles,
    SampleWriter,
    check_chunk_rows,
    check_seed,
    chunk_rows_for,
    default_chunk_rows,
)
from cme_dask.data.zarr_reader import ZarrTableSource
from cme_dask.errors import CmeDaskError, DataError, ResourceError, option, switch


def find_sources(
    entries: Sequence[str | os.PathLike[str]],
    *,
    storage_options: Mapping[str, Any] | None = None,
    block_bytes: int | None = None,
) -> list[Source]:
    """The tables that the entries (paths, patterns, fsspec URLs) name, each once, sorted by name.

    The reader goes by the suffix: ``.parquet`` and ``.pq``, ``.npy`` and ``.npz``, a folder with
    Zarr metadata; all others are CSV, plain or compressed.

    Raises
    ------
    DataError
        If an entry names nothing, or a folder that is no Zarr store.
    ResourceError
        If the package for a URL's protocol is missing.
    """
    if isinstance(entries, str) or not entries:
        raise DataError(f"files must be a list of at least one path, got {entries!r}")
    result: dict[str, Source] = {}
    for entry in entries:
        address = path_text(entry, "a file")
        for source in _matches(address, dict(storage_options or {}), block_bytes):
            result.setdefault(source.name, source)
    return [result[name] for name in sorted(result)]


def _matches(entry: str, options: dict[str, Any], block_bytes: int | None) -> list[Source]:
    with explained(entry):
        return _found(entry, options, block_bytes)


def _found(entry: str, options: dict[str, Any], block_bytes: int | None) -> list[Source]:
    try:
        repeated = with_persistence(entry, options)
        files, path = url_to_fs(entry, **repeated)
        if is_http(path) and _holds_zarr(files, path):  # where all folders are files
            return [_folder_source(files, path, entry, options)]
        if whole_files_only(files, path):  # fetched once, into the folder of temporary files
            protocol = entry.partition(":")[0]
            files, path = url_to_fs(f"simplecache::{entry}", **{protocol: repeated})
    except ImportError as error:
        raise ResourceError(f"{entry} can't be opened: {error}") from error
    except (ValueError, TypeError) as error:
        raise DataError(f"{entry} can't be opened: {error}") from error
    if isinstance(files, LocalFileSystem):
        path = os.path.abspath(path)
    try:
        if files.isfile(path):  # first: a file's own name may contain [ or ?
            return [_file_source(files, path, block_bytes)]
        if files.isdir(path):
            return [_folder_source(files, path, entry, options)]
        if not has_magic(path):
            raise DataError(f"there is no file {entry}")
        result: list[Source] = []
        for match in files.glob(path):
            if files.isfile(match):
                result.append(_file_source(files, match, block_bytes))
            elif _holds_zarr(files, match):
                result.append(_folder_source(files, match, entry, options))
    except OSError as error:
        raise DataError(f"{entry} can't be read: {error.strerror or error}") from error
    if not result:
        raise DataError(f"no file matches {entry}")
    return result


def _file_source(files: fsspec.AbstractFileSystem, path: str, block_bytes: int | None) -> Source:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in (".parquet", ".pq"):
        from cme_dask.data.readers import ParquetSource

        return ParquetSource(files, path)
    if suffix in (".npy", ".npz"):
        from cme_dask.data.readers import NumpySource

        return NumpySource(files, path)
    from cme_dask.data.csv import BLOCK_BYTES, CsvSource

    return CsvSource(files, path, block_bytes or BLOCK_BYTES)


def _folder_source(
    files: fsspec.AbstractFileSystem, path: str, entry: str, options: dict[str, Any]
) -> Source:
    if not _holds_zarr(files, path):
        raise DataError(f"{entry} is a folder: name its files, such as {path}/*.csv")
    from cme_dask.data.zarr_reader import ZarrTableSource

    return ZarrTableSource(address_of(files, path), options)


def _holds_zarr(files: fsspec.AbstractFileSystem, path: str) -> bool:
    return any(files.isfile(f"{path}/{name}") for name in ("zarr.json", ".zgroup", ".zarray"))


# What an ingestion tells while it runs, and when it is done


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
        Numbers of rows; a row that is not kept lacks a value in at least one requested column.
    rows_resumed
        How many of the rows read had been read before an interruption.
    missing
        Number of missing values by requested column, among the rows read.
    statistics
        ``{"x": {column: {...}}, "y": {...}}`` by stored column, of the rows kept: count, mean, std
        (with 1/n), min, max, missing, and counts of the codes of a categorical column.
    categories
        Labels in the order of their codes by categorical column.
    origins
        The requested column that each stored column was made from.
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
        return {name: (metadata["min"], metadata["max"]) for name, metadata in both.items()}


# One ingestion, step by step, with checkpoints from which another process goes on


CHECKPOINT_SECONDS = 1.0
CHECKPOINT_BATCHES = 64


@dataclass(frozen=True)
class Plan:
    """All that the stored bytes depend on, beside the files."""

    layout: Layout
    missing: str
    null_values: tuple[str, ...]
    chunk_rows: int
    seed: int
    units: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON form, flat, to compare."""
        own = {key: value for key, value in dataclasses.asdict(self).items() if key != "layout"}
        layout = dataclasses.asdict(self.layout)
        return {**layout, **own, "null_values": list(self.null_values)}


class Run:
    """One ingestion, from its start or its last checkpoint."""

    def __init__(self, plan: Plan, sources: Sequence[Source], resumable: ResumableOutput) -> None:
        self._plan, self._sources, self._resumable = plan, sources, resumable
        self._encoder = Encoder(plan.layout)
        self._missing = dict.fromkeys(plan.layout.kinds, 0)
        self._rows_read = self._done = 0
        self._position: dict[str, Any] | None = None
        self._marks: list[str] = []  # fingerprints of the files begun
        resumed = None
        try:
            if resumable.state is not None:
                self._check_same(resumable.state)
                resumed = resumable.arrays()
        except DataError:
            if not resumable.restart():
                raise
        if (state := resumable.state) is not None:
            self._encoder.restore(state["encoder"])
            self._missing, self._rows_read = state["missing"], state["rows_read"]
            self._done, self._position = state["done"], state["position"]
            self._marks = state["marks"]
        self._rows_resumed = self._rows_read
        layout = plan.layout
        self._writer = SampleWriter(
            resumable.store,
            layout.columns(plan.units, {}),
            layout.weights is not None,
            plan.chunk_rows,
            SAMPLE_SIZE,
            plan.seed,
            Roles(layout.group, ",".join(layout.time) or None),
            resumed,
            admits_missing=plan.missing == "keep",
        )

    def close(self) -> None:
        """Stop writing."""
        self._writer.close()

    def _check_same(self, state: Mapping[str, Any]) -> None:
        """DataError unless the interrupted ingestion was of the same plan and files."""
        former, plan = state["plan"], _as_json(self._plan.to_dict())
        changed = [key for key in plan if former.get(key) != plan[key]]
        if changed:
            raise DataError(
                f"the interrupted ingest had another {changed[0]} ({former.get(changed[0])!r}, now "
                f"{plan[changed[0]]!r}): give what it had, or start again with "
                f"{switch('overwrite')}"
            )
        names = [source.name for source in self._sources]
        if state["files"] != names:
            other = sorted(set(state["files"]) ^ set(names))
            raise DataError(
                f"the interrupted ingest was of other files ({listed(other)}): give the same ones, "
                f"or start again with {switch('overwrite')}"
            )
        for source, mark in zip(self._sources, state["marks"], strict=False):
            if source.fingerprint() != mark:
                raise DataError(
                    f"{source.name} has changed since the interrupted ingest read it: start again "
                    f"with {switch('overwrite')}"
                )

    def read(self, progress: Callable[[IngestProgress], None] | None) -> None:
        """Read what is left, with checkpoints."""
        saved, since = clock.monotonic(), 0
        try:
            for source, decoded in self._batches():
                self._writer.append(*self._encoder.encode(decoded, source.name))
                self._rows_read += decoded.rows_read
                for name, count in decoded.missing.items():
                    self._missing[name] += count
                self._position = decoded.position
                since += 1
                if since >= CHECKPOINT_BATCHES or clock.monotonic() - saved > CHECKPOINT_SECONDS:
                    self._save()
                    saved, since = clock.monotonic(), 0
                if progress is not None:
                    counts = (self._rows_read, self._writer.n_rows, self._done, len(self._sources))
                    progress(IngestProgress(source.name, *counts))
        except CmeDaskError as error:
            if self._resumable.state is None:
                raise
            raise type(error)(f"{error} ({self._resumable.advice})") from error

    def _batches(self) -> Iterator[tuple[Source, Decoded]]:
        plan = self._plan
        kinds = plan.layout.kinds
        for source in self._sources[self._done :]:
            if len(self._marks) == self._done:
                self._marks.append(source.fingerprint())
            # Only files of text mark missing values by texts that nobody has named.
            named = tuple(text for text in plan.null_values if text not in NULL_VALUES)
            decode = Decoder(plan.layout, plan.missing, source.name, named)
            batches = source.batches(tuple(kinds), kinds, plan.null_values, self._position)
            for decoded in in_order(decode, batches):
                yield source, decoded
            self._done += 1
            self._position = None

    def _save(self) -> None:
        state = {
            "plan": self._plan.to_dict(),
            "files": [source.name for source in self._sources],
            "marks": self._marks,
            "done": self._done,
            "position": self._position,
            "rows_read": self._rows_read,
            "missing": self._missing,
            "encoder": self._encoder.state(),
        }
        self._resumable.commit(state, self._writer.state())

    def finish(self, location: str) -> IngestReport:
        """Describe the store and put it in its place."""
        layout = self._plan.layout
        origins = layout.origins
        categories = self._encoder.categories
        described = Described(
            layout.columns(self._plan.units, categories),
            {name: self._missing[origin] for name, origin in origins.items()},
            self._encoder.counts,
            self._encoder.group_labels,
        )
        try:
            self._check_kept()
            self._writer.finish(described)
        except DataError:
            self._resumable.discard()  # all is read, so to resume would not help
            raise
        self._resumable.publish()
        return IngestReport(
            files=tuple(source.name for source in self._sources),
            rows_read=self._rows_read,
            rows_kept=self._writer.n_rows,
            rows_resumed=self._rows_resumed,
            missing=dict(self._missing),
            statistics=self._writer.statistics(described),
            categories=categories,
            origins=origins,
            location=location,
        )

    def _check_kept(self) -> None:
        """DataError if no row is left, naming the columns without any value."""
        if self._writer.n_rows:
            return
        bare = [name for name, count in self._missing.items() if count == self._rows_read]
        reason = f": {listed(bare)} has no value in any row" if bare else ""
        raise DataError(f"each of the {self._rows_read:,} rows lacks a wanted value{reason}")


def _as_json(value: Any) -> Any:
    """What comes back from a JSON file: tuples as lists."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value


__all__ = ["NULL_VALUES", "IngestProgress", "IngestReport", "ingest"]


def ingest(
    files: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    x: Sequence[str],
    y: Sequence[str],
    weights: str | None = None,
    group: str | None = None,
    time: Sequence[str] = (),
    categorical: Sequence[str] = (),
    datetime: Mapping[str, Sequence[str]] | None = None,
    cyclic: Mapping[str, float] | None = None,
    missing: str = "drop",
    units: Mapping[str, str] | None = None,
    null_values: Sequence[str] = NULL_VALUES,
    chunk_rows: int | None = None,
    target_chunk: int | None = None,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    block_bytes: int | None = None,
    progress: Callable[[IngestProgress], None] | None = None,
) -> IngestReport:
    """Stream columns of tables into a sample store.

    The rows keep the order of the files, sorted by name, and of the rows in them, so that the store
    depends neither on how the files were listed nor on how they were read. A few blocks are in
    memory at a time. Every second or so a checkpoint is made beside the output.

    Parameters
    ----------
    files
        Paths, patterns or fsspec URLs: UTF-8 CSV files with a header, also compressed, Parquet
        files, NumPy files, Zarr stores. Other columns, and the order of columns, may differ.
    output
        Local folder of the store; it appears when it is whole.
    x, y
        Names of the columns of x and of y.
    weights
        Name of the column of non-negative row weights.
    group
        Name of a column of integers or labels, whose rows folds keep together; it may also be one
        of x or y. Integers if its first value is one, unless it is ``categorical``.
    time
        One column of times, or the columns year, month, day and possibly hour, minute, second.
        Times are ISO 8601, in UTC if they have no zone, or seconds since 1970-01-01.
    categorical
        Columns of labels (text or integers): stored as codes 0, 1, ... by first occurrence among
        the stored rows.
    datetime
        Columns of times to expand, each with some of ``"hour"``, ``"weekday"`` and ``"season"``:
        stored as sine and cosine, such as ``date_hour_sin`` and ``date_hour_cos``.
    cyclic
        Columns of numbers with their periods, such as ``{"month": 12}``: stored as sine and cosine.
    missing
        ``"drop"`` leaves out rows that lack a selected value, ``"error"`` refuses them, ``"keep"``
        stores NaN where x or y is missing, for fits with ``missing="drop"`` or ``"impute"``; rows
        that lack their weight, group or time are left out.
    units
        Units by column name, for the columns of x and y.
    null_values
        Texts that stand for a missing value, compared with the whole field.
    chunk_rows, target_chunk
        Rows, or bytes, of a chunk of the store; the bytes are rounded down to a power of two of
        rows of the wider of x and y.
    seed
        Of the row sample.
    resume
        Go on with an interrupted ingestion of the same files to the same output; the result is the
        same, byte for byte. Without one it starts from the beginning.
    overwrite
        Replace an earlier output when the new one is whole. An interrupted ingestion is dropped
        unless ``resume`` is given as well and it is of the same arguments and files.
    storage_options
        Of the URLs' fsspec file system.
    block_bytes
        CSV text to parse at a time; a row must fit.
    progress
        Called after each batch.

    Raises
    ------
    DataError
        If an argument or a file is unusable, another process writes the output, or what would be
        resumed is of other arguments or files. No output is left, an earlier one stays as it was; a
        checkpoint, if one was made, remains for ``resume``. Rows in messages count the header of a
        CSV file as row 1 and skip empty lines.
    ResourceError
        If the disk is full or the package for a URL's protocol is missing.
    """
    layout = make_layout(
        x,
        y,
        weights=weights,
        group=group,
        time=time,
        categorical=categorical,
        datetime=datetime,
        cyclic=cyclic,
    )
    _check_arguments(missing, chunk_rows, target_chunk, seed, block_bytes)
    units = dict(units or {})
    _check_units(units, layout)
    path_text(output, "the output")
    sources = find_sources(files, storage_options=storage_options, block_bytes=block_bytes)
    check_apart({"the output": output}, [("input", source.name) for source in sources])
    for source in sources:  # a wrong name in the last file should not cost the time of all others
        _check_columns(source, layout)
    columns = layout.columns(units, {})
    rows = chunk_rows or (
        default_chunk_rows(columns, None)
        if target_chunk is None
        else chunk_rows_for(columns, target_chunk)
    )
    plan = Plan(layout, missing, tuple(null_values), rows, seed, units)
    with ResumableOutput(output, OUTPUT, overwrite=overwrite, resume=resume) as resumable:
        run = Run(plan, sources, resumable)
        with contextlib.closing(run):
            run.read(progress)
            return run.finish(str(output))


def _check_arguments(
    missing: str,
    chunk_rows: int | None,
    target_chunk: int | None,
    seed: int,
    block_bytes: int | None,
) -> None:
    if missing not in ("drop", "error", "keep"):
        raise DataError(f"missing must be 'drop', 'error' or 'keep', got {missing!r}")
    check_chunk_rows(chunk_rows)
    check_seed(seed)
    if chunk_rows is not None and target_chunk is not None:
        both = f"{option('chunk_rows')} and {option('target_chunk')}"
        raise DataError(f"{both} both say how large chunks are: give one")
    for name, count in (("target_chunk", target_chunk), ("block_bytes", block_bytes)):
        if count is not None and not 1 <= count <= 1 << 31:
            raise DataError(f"{name} must lie between 1 byte and 2 GiB, got {count}")


def _check_units(units: dict[str, str], layout: Layout) -> None:
    unknown = sorted(set(units) - {*layout.names("x"), *layout.names("y")})
    if unknown:
        raise DataError(f"units or categories of unknown columns: {', '.join(unknown)}")


def _check_columns(source: Source, layout: Layout) -> None:
    """DataError unless each requested column is there exactly once."""
    requested, result = tuple(layout.kinds), source.columns()
    lacking = [name for name in requested if name not in result]
    if lacking:
        hint = " (the header is not UTF-8 text)" if "\ufffd" in "".join(result) else ""
        raise DataError(
            f"{source.name} lacks column {listed(lacking)}: there are {listed(result)}{hint}"
        )
    twice = [name for name in requested if result.count(name) > 1]
    if twice:
        raise DataError(f"the header of {source.name} has {listed(twice)} more than once")


# Rows of any Zarr store, however chunked, as a well-chunked sample store


TARGET_BYTES = 8_000_000


def rechunk(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    x: Sequence[str] | None = None,
    y: Sequence[str] | None = None,
    weights: str | None = None,
    group: str | None = None,
    time: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: str = "error",
    target_chunk: int = TARGET_BYTES,
    seed: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[IngestProgress], None] | None = None,
) -> IngestReport:
    """Write the rows of a Zarr store to a sample store with chunks of whole rows.

    An :func:`~cme_dask.data.ingest.ingest` of that one store: it reads each chunk once, in the
    order of the rows, holds at most one chunk an array beside the batches in work, makes the row
    sample and the statistics, and goes on after an interruption. See
    :class:`~cme_dask.data.zarr_reader.ZarrTableSource` for what the columns are called.

    Parameters
    ----------
    source
        Path or fsspec URL: one of our sample stores, an xarray dataset with one dimension of rows,
        or a group of arrays of shape (n,) or (n, d), in any numeric type and any chunks.
    output
        Local folder of the store; it appears when it is whole.
    x, y
        Names of columns. By default those of a sample store, with its weights, group, time,
        labels, units and seed; of another group the columns of its arrays ``x`` and ``y``.
    weights, group, time, categorical
        As in :func:`~cme_dask.data.ingest.ingest`; by default a sample store's own.
    missing
        ``"error"`` refuses rows that lack a value, ``"drop"`` leaves them out, ``"keep"`` keeps
        them, see :func:`~cme_dask.data.ingest.ingest`.
    target_chunk
        Bytes of a chunk, rounded down to a power of two of rows.
    seed
        Of the row sample; default a sample store's own, or 0.
    resume, overwrite, storage_options, progress
        As in :func:`~cme_dask.data.ingest.ingest`.

    Raises
    ------
    DataError
        If an argument or the store is unusable. An earlier output stays as it was.
    StoreError
        If a chunk of the store is truncated or corrupt.
    ResourceError
        If the disk is full or the package for a URL's protocol is missing.
    """
    table = _the_store(source, storage_options)
    roles = table.roles()
    x, y = (_wanted(name, n, getattr(roles, name), table) for name, n in (("x", x), ("y", y)))
    typed = [*x, *y, group or roles.group]
    return ingest(
        [source],
        output,
        x=x,
        y=y,
        weights=weights or roles.weights,
        group=group or roles.group,
        time=time or roles.time,
        categorical=categorical or tuple(n for n in roles.categorical if n in typed),
        units={name: unit for name, unit in roles.units.items() if name in {*x, *y}},
        missing=missing,
        target_chunk=target_chunk,
        seed=roles.seed if seed is None else seed,
        resume=resume,
        overwrite=overwrite,
        storage_options=storage_options,
        progress=progress,
    )


def _the_store(
    source: str | os.PathLike[str], options: Mapping[str, Any] | None
) -> ZarrTableSource:
    result = find_sources([source], storage_options=options)
    if len(result) != 1 or not isinstance(result[0], ZarrTableSource):
        raise DataError(f"{os.fspath(source)} is no Zarr store: ingest reads files of tables")
    return result[0]


def _wanted(
    variable: str, given: Sequence[str] | None, stored: Sequence[str], table: ZarrTableSource
) -> Sequence[str]:
    """The columns of x or y, given or the store's own."""
    if given is None and not stored:
        raise DataError(
            f"{table.name} has no array {variable!r}: name the columns of {variable} (--{variable})"
            f", there are {listed(table.columns())}"
        )
    return stored if given is None else given
