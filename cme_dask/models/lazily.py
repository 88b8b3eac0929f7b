"""Points that lie out of core, in Dask arrays and stores: they are answered by Dask arrays."""

import importlib
import os
from typing import Any, Protocol, TypeAlias

import zarr

from cme_dask.storage.sample import Sample


class DaskCollection(Protocol):
    """A Dask array or DataFrame, told by its graph: no module of Dask is imported for it."""

    def __dask_graph__(self) -> Any:
        """Tasks."""


OutOfCore: TypeAlias = (
    str | os.PathLike[str] | Sample | zarr.Array[Any] | zarr.Group | DaskCollection
)
"""Points out of core: a Dask or Zarr array, a store by path or URL, a ``Sample``."""


def is_out_of_core(values: Any) -> bool:
    """Whether points lie in a Dask array, a Zarr array or a store, by path, URL or ``Sample``."""
    if isinstance(values, (str, zarr.Array, zarr.Group, Sample)):
        return True
    if hasattr(values, "__fspath__"):
        return True
    # Objects of xarray have the method, too: without chunks it returns nothing.
    graph = getattr(values, "__dask_graph__", None)
    return graph is not None and not isinstance(values, type) and graph() is not None


def lazy_answers() -> Any:
    """The module that makes lazy answers, which needs Dask.

    It is imported by its name when the first points out of core are given, as public names of the
    package are, so that queries in memory need no Dask.
    """
    return importlib.import_module("cme_dask.chunked.lazy_laws")
