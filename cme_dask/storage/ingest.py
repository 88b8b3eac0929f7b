"""Tables of any format, streamed batch by batch into a sample store."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cme_dask.defaults import NULL_VALUES
from cme_dask.errors import DataError, option
from cme_dask.storage.checkpoint import Workshop
from cme_dask.storage.ingest_report import IngestProgress, IngestReport
from cme_dask.storage.ingest_run import Plan, Run
from cme_dask.storage.layout import Layout, make_layout
from cme_dask.storage.tables import Source, find_sources, listed
from cme_dask.storage.writer import (
    check_chunk_rows,
    check_seed,
    chunk_rows_for,
    default_chunk_rows,
)

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
        the rows kept.
    datetime
        Columns of times to expand, each with some of ``"hour"``, ``"weekday"`` and ``"season"``:
        stored as sine and cosine, such as ``date_hour_sin`` and ``date_hour_cos``.
    cyclic
        Columns of numbers with their periods, such as ``{"month": 12}``: stored as sine and cosine.
    missing
        ``"drop"`` leaves out rows that lack a wanted value, ``"error"`` refuses them.
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
        Replace an earlier output when the new one is whole. Unless ``resume`` is given as well, an
        interrupted ingestion is dropped.
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
        checkpoint, if one was made, is kept for ``resume``. Rows in messages count the header of a
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
    sources = find_sources(files, storage_options=storage_options, block_bytes=block_bytes)
    _spare_inputs(sources, Path(output))
    for source in sources:  # a wrong name in the last file should not cost the time of all others
        _check_columns(source, layout)
    columns = layout.columns(units, {})
    rows = chunk_rows or (
        default_chunk_rows(columns, None)
        if target_chunk is None
        else chunk_rows_for(columns, target_chunk)
    )
    plan = Plan(layout, missing, tuple(null_values), rows, seed, units)
    with Workshop(output, overwrite=overwrite, resume=resume) as workshop:
        run = Run(plan, sources, workshop)
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
    if missing not in ("drop", "error"):
        raise DataError(f"missing must be 'drop' or 'error', got {missing!r}")
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
    """DataError unless each wanted column is there exactly once."""
    wanted, found = tuple(layout.kinds), source.columns()
    lacking = [name for name in wanted if name not in found]
    if lacking:
        hint = " (the header is not UTF-8 text)" if "\ufffd" in "".join(found) else ""
        raise DataError(
            f"{source.name} lacks column {listed(lacking)}: there are {listed(found)}{hint}"
        )
    twice = [name for name in wanted if found.count(name) > 1]
    if twice:
        raise DataError(f"the header of {source.name} has {listed(twice)} more than once")


def _spare_inputs(sources: Sequence[Source], output: Path) -> None:
    """Refuse an output whose overwriting would delete an input, or that lies inside one."""
    target = output.resolve()
    for source in sources:
        if "://" in source.name:
            continue
        path = Path(source.name).resolve()
        if path.is_relative_to(target):
            raise DataError(f"the output {output} would replace the input {source.name}")
        if target.is_relative_to(path):
            raise DataError(f"the output {output} lies inside the input {source.name}")
