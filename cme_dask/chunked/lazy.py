"""Functions of rows as lazy Dask arrays."""

from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np

from cme_dask.chunked.sources import DaskSource
from cme_dask.storage.rows import RowSource, ZarrSource

Array = Any


def map_rows(source: RowSource, function: Callable[[Array, int], Array], width: int) -> Any:
    """``function(rows, first row)``, shape (b, width), of every chunk of rows; not computed yet.

    Parameters
    ----------
    source
        Rows of a Zarr or Dask array; the result has its row chunks.
    function
        Called with rows (b, d) and the global number of the first of them.
    width
        Columns of the result.
    """
    if isinstance(source, ZarrSource):
        rows = da.from_zarr(source.array)
        rows = rows if rows.ndim == 2 else rows[:, None]
        rows = rows if source.columns is None else rows[:, list(source.columns)]
    else:
        assert isinstance(source, DaskSource)
        rows = source.array
    rows = rows.rechunk({1: -1})

    def features(block: Array, block_info: Any = None) -> Array:
        first = 0 if block_info is None else block_info[0]["array-location"][0][0]
        return function(np.asarray(block, dtype=np.float64), first)

    chunks = (rows.chunks[0], (width,))
    return rows.map_blocks(features, dtype=np.float64, chunks=chunks, meta=np.empty((0, 0)))
