"""Rows of any Zarr store, however chunked, as a well-chunked sample store."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cme_dask.errors import DataError
from cme_dask.storage.ingest import IngestProgress, IngestReport, ingest
from cme_dask.storage.tables import find_sources, listed
from cme_dask.storage.zarr_reader import ZarrTableSource

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

    An :func:`~cme_dask.storage.ingest.ingest` of that one store: it reads each chunk once, in the
    order of the rows, holds at most one chunk an array beside the batches in work, makes the row
    sample and the statistics, and goes on after an interruption. See
    :class:`~cme_dask.storage.zarr_reader.ZarrTableSource` for what the columns are called.

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
        As in :func:`~cme_dask.storage.ingest.ingest`; by default a sample store's own.
    missing
        ``"error"`` refuses rows that lack a value, ``"drop"`` leaves them out.
    target_chunk
        Bytes of a chunk, rounded down to a power of two of rows.
    seed
        Of the row sample; default a sample store's own, or 0.
    resume, overwrite, storage_options, progress
        As in :func:`~cme_dask.storage.ingest.ingest`.

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
    typed = {*x, *y, group or roles.group}
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
    found = find_sources([source], storage_options=options)
    if len(found) != 1 or not isinstance(found[0], ZarrTableSource):
        raise DataError(f"{os.fspath(source)} is no Zarr store: ingest reads files of tables")
    return found[0]


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
