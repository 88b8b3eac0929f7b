"""Zarr groups as files of ours: a described kind, a schema version, checksummed arrays.

The group attribute ``cme_dask`` describes what is inside. It is written last, so a group without it
was never finished, and closed by a checksum of its own. What is read may come from anybody: nothing
in it is executed, and memory is taken only for what the files can hold.
"""

import errno
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec
from zarr.core.sync import sync
from zarr.storage import LocalStore

from cme_dask.data.atomic import ATTRIBUTE, path_text, recover, work_folder
from cme_dask.data.guarded import (
    MOST_BYTES,
    CheckedStore,
    GuardedStore,
    check_chunk,
    chunk_ends,
    chunk_keys,
)
from cme_dask.errors import CmeDaskError, ResourceError, StoreError, remedy

# Zarr groups as files of ours: a described kind, a schema version, checksummed arrays


Array = Any

DECODE_ERRORS = (
    *(ValueError, RuntimeError, OSError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(AssertionError, MemoryError),
)
"""What zarr, its codecs and its stores raise on bytes that don't decode."""

_CHECKSUM, _CHECKSUMS = "checksum", "chunk_checksums"
_NODES = "zarr.json", ".zarray", ".zgroup"  # descriptions of arrays and groups
_LONGEST = 200
_LARGEST = 1 << 30  # bytes of a chunk: Blosc takes 2 GB at most
_SAFE_CODECS = {  # of Zarr 2, by name; those left out run code, or are not known
    *("adler32", "astype", "bitround", "blosc", "bz2", "crc32", "crc32c", "delta"),
    *("fixedscaleoffset", "fletcher32", "gzip", "jenkins_lookup3", "lz4", "lzma", "packbits"),
    *("quantize", "shuffle", "vlen-bytes", "vlen-utf8", "zlib", "zstd"),
}


_ACCESS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE)


def check_access(error: BaseException, location: object) -> None:
    """ResourceError if reading failed for want of access, which tells nothing of what is stored."""
    if isinstance(error, OSError) and error.errno in _ACCESS:
        where = error.filename or location
        raise ResourceError(
            f"{where} can't be read: {error.strerror}; it may well be intact"
        ) from error


def brief(value: object) -> str:
    """What others say or files hold, in one line that is no longer than a sentence may be."""
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def open_zarr(path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> Any:
    """The Zarr group or array at a path or fsspec URL.

    Raises
    ------
    DataError
        If it is no path.
    StoreError
        If there is nothing, or nothing that Zarr can read.
    ResourceError
        If the URL's protocol needs a package that is not installed.
    """
    where = path_text(path, "a Zarr store")
    if where.startswith("file://"):
        where = where.removeprefix("file://")
    if "://" not in where:
        _check_finished(Path(where))
    if "://" not in where and not _exists(where):
        raise StoreError(f"{where} does not exist: give the path or URL of a Zarr store")
    try:
        # Absolute, because workers of a cluster may have another working folder.
        absolute: Any = os.path.abspath(where)
        if "://" in where:
            absolute, storage_options = CheckedStore.at(where, storage_options), None
        elif os.path.isdir(where):
            absolute = GuardedStore(absolute, read_only=True)
        result = zarr.open(absolute, mode="r", storage_options=storage_options)
    except CmeDaskError:  # of a server
        raise
    except ImportError as error:
        raise ResourceError(
            f"{where} needs a package that is not installed: {brief(error)}"
        ) from error
    except DECODE_ERRORS as error:
        check_access(error, where)
        if os.path.isfile(where):
            raise StoreError(
                f"{where} is a file, a Zarr store is a folder: write tables to a store with "
                + remedy("cme_dask.ingest, or read them with pandas", "cme-dask ingest")
            ) from error
        raise StoreError(f"{where} is no readable Zarr store: {brief(error)}") from error
    if not isinstance(result, zarr.Array):
        return result
    _check_alone(where)
    return safe(result, where)


def _check_alone(where: str) -> None:
    """StoreError on an array in whose folder others lie: its description is that of another one.

    Its chunks would then be missing, which Zarr reads as zeros.
    """
    if not os.path.isdir(where):
        return
    with os.scandir(where) as entries:
        within = [each for each in entries if not each.name.isdigit() and _is_folder(each)]
    others = sorted(
        each.name
        for each in within
        if any(_exists(os.path.join(each.path, name)) for name in _NODES)
    )
    if others:
        raise StoreError(
            f"{where} is described as an array, but holds others ({brief(', '.join(others))}): "
            "restore its zarr.json from a copy"
        )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Without a further call for each chunk, of which there may be many."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _exists(path: str | os.PathLike[str]) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        check_access(error, path)
        return False
    return True


def safe(array: zarr.Array[Any], location: str) -> zarr.Array[Any]:
    """The array itself; StoreError if reading it could run code that comes with the data."""
    if array.metadata.zarr_format == 2:
        codecs = [*(array.filters or ()), *array.compressors]
        names = [getattr(codec, "codec_id", "?") for codec in codecs]
        unsafe = [name for name in names if name not in _SAFE_CODECS]
        if unsafe:
            raise StoreError(
                f"{location} uses the codec {brief(repr(unsafe[0]))}, which may run code or is not "
                "known to be safe: write it again with another one"
            )
    return array


def _check_finished(path: Path) -> None:
    """StoreError on a store that is being written, or that was when its writer was cut off."""
    if not os.path.lexists(path):
        recover(path)  # of one who was killed while replacing it
    ours = any(name.startswith(".") and name.endswith(".partial") for name in path.parts[-2:])
    if ours or (not _exists(path) and _exists(work_folder(path))):
        raise StoreError(
            f"{path} is unfinished: it is still being written, or that was interrupted "
            + remedy(
                "(cme_dask.ingest with resume=True goes on)",
                "(the same command goes on, ingest with --resume)",
            )
        )


def read_attribute(group: zarr.Group, kind: str, version: int, location: str) -> dict[str, Any]:
    """The description of a stored ``kind``, checked for completeness and version."""
    metadata = group.attrs.get(ATTRIBUTE)
    if not isinstance(metadata, dict):
        raise StoreError(
            f"{location} is no finished {kind} of cme_dask (its group has no {ATTRIBUTE!r} "
            "attribute): it is of another kind, or its writing was cut off; write it again"
        )
    if metadata.get("kind") != kind:
        raise StoreError(
            f"{location} holds a {brief(repr(metadata.get('kind')))}, a {kind!r} was expected"
        )
    result = metadata.get("schema_version")
    if type(result) is not int or result < 1:
        raise StoreError(f"{location} has the unreadable schema version {brief(repr(result))}")
    if result > version:
        raise StoreError(
            f"{location} has schema version {result}, this cme_dask reads up to {version}: "
            "install a newer cme_dask"
        )
    _check_seal(metadata, location)
    return metadata


def sealed(about: Mapping[str, Any]) -> dict[str, Any]:
    """A description with a checksum of it, which :func:`read_attribute` checks."""
    return {**about, _CHECKSUM: _checksum(about)}


def _check_seal(about: dict[str, Any], location: str) -> None:
    """StoreError if a description is not the one that was written; older ones have no checksum."""
    if _CHECKSUM not in about:
        return
    rest = {key: value for key, value in about.items() if key != _CHECKSUM}
    try:
        intact = about[_CHECKSUM] == _checksum(rest)
    except RecursionError:
        intact = False
    if not intact:
        raise StoreError(
            f"the description of {location} is damaged or was changed (its checksum differs): "
            "restore it from a copy or write it again"
        )


def _checksum(about: Mapping[str, Any]) -> str:
    # NaN and infinities become texts, as they do in Zarr's attributes.
    plain = json.loads(json.dumps(about), parse_constant=str)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def write_checksums(group: zarr.Group, arrays: Mapping[str, zarr.Array[Any]]) -> dict[str, Any]:
    """List the checksums of all chunks of arrays of equally many chunks; JSON form of the list."""
    columns = [chunk_ends(array, chunk_keys(array)) for array in arrays.values()]
    ends = np.frombuffer(b"".join(end for column in columns for end in column), "<u4")
    folder = group.create_group(_CHECKSUMS)  # apart from the rows, which others read as a table
    return {**write_array(folder, "table", ends.reshape(len(arrays), -1)), "of": list(arrays)}


def use_checksums(group: zarr.Group, written: Any, location: str) -> zarr.Group:
    """The same group, whose chunks are held against their list whenever they are read.

    Parameters
    ----------
    group
        The group, in any store.
    written
        What :func:`write_checksums` said of the list.
    location
        For messages.

    Raises
    ------
    StoreError
        If the list is damaged.
    """
    folder = member(group, _CHECKSUMS, location)
    listing = isinstance(written, dict) and isinstance(written.get("of"), list)
    if not listing or not isinstance(folder, zarr.Group):
        raise StoreError(f"{location} lists no checksums of its chunks: write it again")
    table = read_array(folder, "table", location, written)
    if table.ndim != 2 or table.dtype != np.uint32 or len(table) != len(written["of"]):
        raise StoreError(f"{location} lists no checksums of its chunks: write it again")
    prefix = f"{group.path}/" if group.path else ""
    listed = {f"{prefix}{name}": ends for name, ends in zip(written["of"], table, strict=True)}
    store: Any = group.store
    if not isinstance(store, (GuardedStore, CheckedStore)):
        local = isinstance(store, LocalStore)
        store = GuardedStore(store.root, read_only=True) if local else CheckedStore(store)
        group = zarr.open_group(store, path=group.path, mode="r")
    store.checksums = {**store.checksums, **listed}
    return group


def stored_array(group: zarr.Group, name: str, location: str) -> zarr.Array[Any]:
    """The named array of a group of ours.

    Raises
    ------
    StoreError
        If it is not there, its description is damaged, or its chunks are of another form than
        :func:`write_array` and the writers of rows give them.
    """
    array = member(group, name, location)
    if not isinstance(array, zarr.Array):
        raise StoreError(f"{location} lacks the array {name!r}: restore it or write it again")
    form = _foreign_form(array)
    if form is not None:
        raise StoreError(
            f"the array {name!r} of {location} is not as cme_dask writes arrays ({form}): restore "
            "it from a copy or write it again"
        )
    return array


def _foreign_form(array: zarr.Array[Any]) -> str | None:
    """What of an array's form is not ours, or None."""
    if array.metadata.zarr_format != 3:
        return f"Zarr version {array.metadata.zarr_format}"
    strange = [
        *array.filters,
        *(c for c in array.compressors if not isinstance(c, BloscCodec | Crc32cCodec)),
        *([] if array.shards is None else ["shards"]),
    ]
    serializer = array.serializer
    endian = getattr(serializer, "endian", None)
    if not isinstance(serializer, BytesCodec) or getattr(endian, "value", endian) == "big":
        strange.append(serializer)
    if strange:
        name = strange[0] if isinstance(strange[0], str) else type(strange[0]).__name__
        return f"{name} among its codecs"
    size, _ = packed_bytes(array)
    if min((*array.chunks, *array.shape, 0)) < 0 or 0 in array.chunks:
        return f"chunks {array.chunks} of shape {array.shape}"
    return f"chunks of {size:,} bytes" if size > MOST_BYTES else None


def member(group: zarr.Group, name: str, location: str) -> Any:
    """The named array or group, or None; StoreError if its description is damaged."""
    try:
        return group.get(name)
    except CmeDaskError:  # of a server
        raise
    except DECODE_ERRORS as error:
        check_access(error, location)
        raise StoreError(
            f"the description of {name!r} in {location} is damaged ({brief(error)}): restore it "
            "from a copy or write it again"
        ) from error


def read_array(
    group: zarr.Group, name: str, location: str, written: Mapping[str, Any] | None = None
) -> Array:
    """All values of a small stored array.

    Parameters
    ----------
    group, name, location
        The array.
    written
        What :func:`write_array` said of it; None if that is not known.

    Raises
    ------
    StoreError
        If its chunk is missing, does not decode, or is not what was written.
    """
    array = stored_array(group, name, location)
    restore = "restore it from a copy or write it again"
    if written is not None and (form := _form(array)) != {k: written.get(k) for k in form}:
        raise StoreError(
            f"the array {name!r} of {location} should be {brief(written.get('dtype'))} of shape "
            f"{brief(written.get('shape'))}, it is {form['dtype']} of shape {form['shape']}: "
            f"{restore}"
        )
    if array.nchunks > 1 and array.chunks != _cut(array.shape, array.dtype.itemsize):
        raise StoreError(
            f"the array {name!r} of {location} is cut into {array.nchunks:,} chunks, cme_dask "
            f"writes it otherwise: {restore}"
        )
    try:
        # Its chunks are always written, so a missing one is lost: it would read as zeros.
        whole = _has_chunks(array)
        values = np.asarray(array[...] if whole else None)
    except CmeDaskError:  # of a server
        raise
    except DECODE_ERRORS as error:
        check_access(error, location)
        raise StoreError(
            f"the array {name!r} of {location} is truncated or corrupt ({brief(error)}): {restore}"
        ) from error
    if not whole:
        raise StoreError(f"the array {name!r} of {location} lacks a chunk: {restore}")
    if written is not None and written.get("crc32") != _crc32(values):
        raise StoreError(
            f"the array {name!r} of {location} is not the one that was written (its checksum "
            f"differs): {restore}"
        )
    # Zarr's types equal those of NumPy, but have another text, which fingerprints contain.
    return values.view(np.dtype(values.dtype.str)) if values.dtype.kind in "biufc" else values


def packed_bytes(array: zarr.Array[Any]) -> tuple[int, bool]:
    """Bytes of the values of a chunk, and whether chunks are Blosc frames."""
    size = math.prod(array.chunks) * array.dtype.itemsize
    return size, bool(array.compressors) and isinstance(array.compressors[0], BloscCodec)


def _has_chunks(array: zarr.Array[Any]) -> bool:
    """Whether all chunks of an array that is cut along its first axis are there."""
    size, blosc = packed_bytes(array)
    if not isinstance(array.store, GuardedStore):  # not listed: few HTTP servers have lists
        return all(sync(array.store.exists(key)) for key in chunk_keys(array))
    return all(check_chunk(array.store, key, size, blosc=blosc) for key in chunk_keys(array))


def _cut(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Shape of the chunks of a small array: one, but for what is too large for Blosc."""
    least = tuple(max(1, s) for s in shape)
    if not least:
        return ()
    across = itemsize * math.prod(least[1:])
    return (min(least[0], max(1, _LARGEST // across)), *least[1:])


def write_array(group: zarr.Group, name: str, values: Array) -> dict[str, Any]:
    """Store an array that memory holds, with a checksum; JSON form of what was written."""
    values = np.asarray(values)
    array = group.create_array(
        name,
        shape=values.shape,
        chunks=_cut(values.shape, values.dtype.itemsize),
        dtype=values.dtype,
        compressors=compressors(),
        config={"write_empty_chunks": True},
    )
    array[...] = values
    return {**_form(array), "crc32": _crc32(values)}


def is_listing(value: object) -> TypeGuard[dict[str, dict[str, Any]]]:
    """Whether this is what :func:`write_array` said of arrays, by name, as far as types tell."""
    return isinstance(value, dict) and all(
        name.isidentifier() and isinstance(written, dict) for name, written in value.items()
    )


def _form(array: zarr.Array[Any]) -> dict[str, Any]:
    return {"dtype": str(array.dtype), "shape": list(array.shape)}


def _crc32(values: Array) -> str:
    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return f"{zlib.crc32(flat):08x}"


def compressors() -> list[Any]:
    """LZ4 behind a byte shuffle, closed by a CRC-32C checksum."""
    return [BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec()]
