"""Zarr groups as files of ours: a described kind, a schema version, checksummed arrays.

The group attribute ``cme_dask`` describes what is inside. It is written last, so a group without it
was never finished.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from cme_dask.errors import ResourceError, StoreError
from cme_dask.storage.atomic import ATTRIBUTE, workshop_folder

Array = Any

DECODE_ERRORS = (ValueError, RuntimeError, OSError, LookupError, TypeError, AttributeError)
"""What zarr, its codecs and its stores raise on bytes that don't decode."""


def open_zarr(path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> Any:
    """The Zarr group or array at a path or fsspec URL.

    Raises
    ------
    StoreError
        If there is nothing, or nothing that Zarr can read.
    ResourceError
        If the URL's protocol needs a package that is not installed.
    """
    where = os.fspath(path)
    if "://" not in where:
        _check_finished(Path(where))
    if "://" not in where and not os.path.exists(where):
        raise StoreError(f"{where} does not exist: give the path or URL of a Zarr store")
    try:
        # Absolute, because workers of a cluster may have another working folder.
        absolute = where if "://" in where else os.path.abspath(where)
        return zarr.open(absolute, mode="r", storage_options=storage_options)
    except ImportError as error:
        raise ResourceError(f"{where} needs a package that is not installed: {error}") from error
    except DECODE_ERRORS as error:
        raise StoreError(f"{where} is no readable Zarr store: {error}") from error


def _check_finished(path: Path) -> None:
    """StoreError on a store that is being written, or that was when its writer was cut off."""
    ours = path.name.startswith(".") and path.name.endswith(".partial")
    if ours or (not path.exists() and workshop_folder(path).exists()):
        raise StoreError(
            f"{path} is unfinished: it is still being written, or that was interrupted (the same "
            "command with --resume goes on)"
        )


def read_attribute(group: zarr.Group, kind: str, version: int, location: str) -> dict[str, Any]:
    """The description of a stored ``kind``, checked for completeness and version."""
    about = group.attrs.get(ATTRIBUTE)
    if not isinstance(about, dict):
        raise StoreError(
            f"{location} is no finished {kind} of cme_dask (its group has no {ATTRIBUTE!r} "
            "attribute): it is of another kind, or its writing was cut off; write it again"
        )
    if about.get("kind") != kind:
        raise StoreError(f"{location} holds a {about.get('kind')!r}, a {kind!r} was expected")
    found = about.get("schema_version")
    if type(found) is not int or found < 1:
        raise StoreError(f"{location} has the unreadable schema version {found!r}")
    if found > version:
        raise StoreError(
            f"{location} has schema version {found}, this cme_dask reads up to {version}: "
            "install a newer cme_dask"
        )
    return about


def stored_array(group: zarr.Group, name: str, location: str) -> zarr.Array[Any]:
    """The named array of a group; StoreError if it is not there or its description is damaged."""
    array = member(group, name, location)
    if not isinstance(array, zarr.Array):
        raise StoreError(
            f"{location} lacks the array {name!r}: restore it or write the store again"
        )
    return array


def member(group: zarr.Group, name: str, location: str) -> Any:
    """The named array or group, or None; StoreError if its description is damaged."""
    try:
        return group.get(name)
    except DECODE_ERRORS as error:
        raise StoreError(
            f"the description of {name!r} in {location} is damaged ({error}): restore it from a "
            "copy or write it again"
        ) from error


def read_array(group: zarr.Group, name: str, location: str) -> Array:
    """All values of a small stored array; StoreError if a chunk is missing or does not decode."""
    array = stored_array(group, name, location)
    try:
        # All chunks are written, so a missing one is lost: it would read as zeros.
        whole = array.nchunks_initialized == array.nchunks
        values = array[...]
    except DECODE_ERRORS as error:
        raise StoreError(
            f"the array {name!r} of {location} is truncated or corrupt ({error}): restore it from "
            "a copy or write it again"
        ) from error
    if not whole:
        raise StoreError(
            f"the array {name!r} of {location} lacks a chunk: restore it from a copy or write it "
            "again"
        )
    return values


def write_array(group: zarr.Group, name: str, values: Array) -> None:
    """Store a small array in one chunk, with a checksum."""
    values = np.asarray(values)
    array = group.create_array(
        name,
        shape=values.shape,
        chunks=tuple(max(1, s) for s in values.shape),
        dtype=values.dtype,
        compressors=compressors(),
        config={"write_empty_chunks": True},
    )
    array[...] = values


def compressors() -> list[Any]:
    """LZ4 behind a byte shuffle, closed by a CRC-32C checksum."""
    return [BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec()]
