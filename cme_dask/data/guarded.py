"""Stores of Zarr that are read without trust, and hold chunks against a list of their checksums."""

import asyncio
import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import zarr
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from cme_dask.data.remote import WholeFilesOnly, explained, time_mark, with_persistence
from cme_dask.errors import without_secrets

# Chunks know their checksums, but not their place: stores of rows list the checksum of each chunk


CHECKSUM_BYTES = 4
"""Of a CRC-32C, which closes each chunk of our stores."""

Checksums: TypeAlias = Mapping[str, Any]
"""Of the chunks along the first axis of arrays, by path of the array, uint32."""

_AT_ONCE = 32  # chunks that are looked at


def check_place(
    checksums: Checksums, key: str, chunk: Buffer | None, byte_range: ByteRequest | None = None
) -> None:
    """OSError if a chunk that was read whole is not the one that was written to its place."""
    name, _, place = key.partition("/c/")
    if byte_range is not None or chunk is None or name not in checksums:
        return
    end = int.from_bytes(chunk[-CHECKSUM_BYTES:].to_bytes(), "little")
    if end != checksums[name][int(place.partition("/")[0])]:
        raise OSError("its checksum is not that of the chunk that was written here")


def chunk_ends(array: zarr.Array[Any], keys: Iterable[str]) -> list[bytes]:
    """The last bytes of chunks, which are their checksum in stores of ours.

    Parameters
    ----------
    array
        Whose store they are in.
    keys
        Of the chunks.
    """
    last = SuffixByteRequest(CHECKSUM_BYTES)

    async def end(key: str) -> bytes:
        part = await array.store.get(key, default_buffer_prototype(), last)
        return b"gone" if part is None else part.to_bytes()

    return _of_each(end, keys)


def chunk_marks(array: zarr.Array[Any], keys: Iterable[str]) -> list[bytes]:
    """What changes with the chunks of a store of others, whose last bytes are no checksum.

    Of files in a folder, or behind a URL, these are the last bytes, the size, and the time of
    change or ETag; a chunk that has neither of these is hashed.
    """
    store = array.store
    inner = store._store if isinstance(store, CheckedStore) else store
    prototype = default_buffer_prototype()

    async def mark(key: str) -> bytes:
        written = await _written(inner, key)
        request = None if written is None else SuffixByteRequest(CHECKSUM_BYTES)
        part = await store.get(key, prototype, request)
        if part is None:
            return b"gone"
        if written is None:
            return hashlib.sha256(part.to_bytes()).digest()
        return part.to_bytes() + written.encode()

    return _of_each(mark, keys)


async def _written(store: Store, key: str) -> str | None:
    """Size and time of change, or ETag, of the file of a key; None where these are not known."""
    try:
        if isinstance(store, LocalStore):
            status = os.stat(store.root / key)
            return f"{status.st_size} {status.st_mtime_ns}"
        if isinstance(store, FsspecStore):
            about = await store.fs._info(f"{store.path}/{key}" if store.path else key)
            return time_mark(about)
    except OSError:  # it is not there, as most chunks of values that are all alike
        return None
    return None


def _of_each(mark: Callable[[str], Awaitable[bytes]], keys: Iterable[str]) -> list[bytes]:
    async def marks() -> list[bytes]:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(key: str) -> bytes:
            async with gate:
                return await mark(key)

        return await asyncio.gather(*map(one, keys))

    result: list[bytes] = sync(marks())
    return result


def chunk_keys(array: zarr.Array[Any]) -> Iterator[str]:
    """Keys of all chunks of an array that is cut along its first axis."""
    prefix, rest = f"{array.path}/" if array.path else "", (0,) * (array.ndim - 1)
    encode = array.metadata.encode_chunk_key
    return (prefix + encode((i, *rest) if array.ndim else ()) for i in range(array.nchunks))


# A local folder of Zarr files that may come from anybody: only its own plain files are read


MOST_BYTES = 1 << 31
"""Of a chunk as Blosc packs it, and so of any array that is one chunk."""

_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
_MOST_METADATA = 1 << 27
_OVERHEAD = 1 << 16  # of a packed chunk over its values, at most
_FRAME = 16  # bytes of the head of a Blosc frame


class GuardedStore(LocalStore):
    """A folder out of which no link leads, and in which nothing blocks or never ends."""

    checksums: Checksums = MappingProxyType({})

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The bytes of a file; OSError if it is none of the folder's own plain files."""
        check_file(str(self.root), key)
        value = await super().get(key, prototype, byte_range)
        check_place(self.checksums, key, value, byte_range)
        return value

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """As :meth:`get`."""
        check_file(str(self.root), key)
        value = super().get_sync(key, prototype=prototype, byte_range=byte_range)
        check_place(self.checksums, key, value, byte_range)
        return value


def check_file(root: str, key: str) -> int | None:
    """Bytes of the file of this key, or None if there is none.

    Raises
    ------
    OSError
        If it is a device or a pipe, which may never end; lies outside the folder, by a link or
        ``..``; or is a description of more than 128 MB.
    """
    path = os.path.join(root, key)
    try:
        metadata = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(metadata.st_mode):
        return None
    if not stat.S_ISREG(metadata.st_mode):
        raise OSError(f"{key} is no plain file but a device, pipe or socket")
    folder = os.path.realpath(root)
    if os.path.commonpath([folder, os.path.realpath(path)]) != folder:
        raise OSError(f"{key} leads out of the folder: copy it with its links followed (cp -rL)")
    if metadata.st_size > _MOST_METADATA and os.path.basename(key) in _METADATA:
        raise OSError(f"{key} is a description of {metadata.st_size:,} bytes")
    return metadata.st_size


def check_chunk(store: Any, key: str, values: int, *, blosc: bool) -> bool:
    """Whether a chunk is there, before any memory is taken for it; other stores than folders: True.

    Parameters
    ----------
    store
        Where it lies.
    key
        Its key.
    values
        Bytes of its values.
    blosc
        Whether it is a Blosc frame, which says itself what it unpacks to.

    Raises
    ------
    OSError
        If it is longer than its values can be packed to, or unpacks to another number of bytes.
    """
    if not isinstance(store, GuardedStore):
        return True
    size = check_file(str(store.root), key)
    if size is None:
        return False
    if size > values + values // 64 + _OVERHEAD:
        raise OSError(f"{key} has {size:,} bytes for values of {values:,}")
    if blosc:
        with open(os.path.join(store.root, key), "rb") as file:
            head = file.read(_FRAME)
        result = int.from_bytes(head[4:8], "little")
        if len(head) < _FRAME or result != values:
            raise OSError(f"{key} unpacks to {result:,} bytes, not to {values:,}")
    return True


# Any other store


class CheckedStore(WrapperStore[Store]):
    """A store of any other kind, whose chunks are the ones that were written to their places.

    Parameters
    ----------
    store
        The other store.
    name
        What messages call it; default what it calls itself.
    """

    checksums: Checksums = MappingProxyType({})

    def __init__(self, store: Store, name: str | None = None) -> None:
        super().__init__(store)
        self._name = without_secrets(str(store) if name is None else name)

    @classmethod
    def at(cls, url: str, storage_options: Mapping[str, Any] | None) -> "CheckedStore":
        """The store at a URL; servers that fail for a moment are asked again."""
        options = with_persistence(url, storage_options)
        return cls(FsspecStore.from_url(url, storage_options=options, read_only=True), url)

    def _with_store(self, store: Store) -> "CheckedStore":
        return CheckedStore(store, self._name)

    def __str__(self) -> str:
        return self._name

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The value of a key.

        Raises
        ------
        OSError
            If it is another chunk than the one that was written.
        ResourceError
            If a server refuses it.
        """
        with explained(f"{self._name}/{key}"):
            try:
                value = await self._store.get(key, prototype, byte_range)
            except WholeFilesOnly:
                value = _part(await self._store.get(key, prototype), byte_range)
        check_place(self.checksums, key, value, byte_range)
        return value

    async def exists(self, key: str) -> bool:
        """Whether there is a key."""
        with explained(f"{self._name}/{key}"):
            return await self._store.exists(key)


def _part(value: Buffer | None, byte_range: ByteRequest | None) -> Buffer | None:
    if value is None or byte_range is None:
        return value
    if isinstance(byte_range, RangeByteRequest):
        return value[byte_range.start : byte_range.end]
    if isinstance(byte_range, OffsetByteRequest):
        return value[byte_range.offset :]
    return value[max(len(value) - byte_range.suffix, 0) :]
