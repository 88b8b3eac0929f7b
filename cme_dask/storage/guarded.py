"""A local folder of Zarr files that may come from anybody: only its own plain files are read."""

import os
import stat
from typing import Any

from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore

MOST_BYTES = 1 << 31
"""Of a chunk as Blosc packs it, and so of any array that is one chunk."""

_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
_MOST_METADATA = 1 << 27
_OVERHEAD = 1 << 16  # of a packed chunk over its values, at most
_FRAME = 16  # bytes of the head of a Blosc frame


class GuardedStore(LocalStore):
    """A folder out of which no link leads, and in which nothing blocks or never ends."""

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The bytes of a file; OSError if it is none of the folder's own plain files."""
        check_file(str(self.root), key)
        return await super().get(key, prototype, byte_range)

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """As :meth:`get`."""
        check_file(str(self.root), key)
        return super().get_sync(key, prototype=prototype, byte_range=byte_range)


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
        about = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(about.st_mode):
        return None
    if not stat.S_ISREG(about.st_mode):
        raise OSError(f"{key} is no plain file but a device, pipe or socket")
    folder = os.path.realpath(root)
    if os.path.commonpath([folder, os.path.realpath(path)]) != folder:
        raise OSError(f"{key} leads out of the folder: copy it with its links followed (cp -rL)")
    if about.st_size > _MOST_METADATA and os.path.basename(key) in _METADATA:
        raise OSError(f"{key} is a description of {about.st_size:,} bytes")
    return about.st_size


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
        found = int.from_bytes(head[4:8], "little")
        if len(head) < _FRAME or found != values:
            raise OSError(f"{key} unpacks to {found:,} bytes, not to {values:,}")
    return True
