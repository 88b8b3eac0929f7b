"""Stores that are no local folder: their chunks are held against the list of their checksums."""

from types import MappingProxyType
from typing import Any

import zarr
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, WrapperStore

from cme_dask.data.store import Checksums, GuardedStore, check_place


class CheckedStore(WrapperStore[Store]):
    """Another store, whose chunks are the ones that were written to their places."""

    checksums: Checksums = MappingProxyType({})

    def __str__(self) -> str:
        return str(self._store)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The value of a key; OSError if it is another chunk than the one that was written."""
        value = await self._store.get(key, prototype, byte_range)
        check_place(self.checksums, key, value, byte_range)
        return value


def checked(group: zarr.Group) -> zarr.Group:
    """The same group in a store that holds chunks against their checksums."""
    store: Any = group.store
    if isinstance(store, (GuardedStore, CheckedStore)):
        return group
    local = isinstance(store, LocalStore)
    wrapped = GuardedStore(store.root, read_only=True) if local else CheckedStore(store)
    return zarr.open_group(wrapped, path=group.path, mode="r")
