"""Labels of chunked arrays as codes, without gathering the rows."""

from typing import Any

import numpy as np
import zarr

from cme_dask.chunked.dask_frames import dask_series_values, is_dask_frame
from cme_dask.errors import DataError

Array = Any

_MOST = 10_000  # classes


def is_chunked(y: Any) -> bool:
    """Whether labels lie in a Dask or Zarr array."""
    return isinstance(y, zarr.Array) or hasattr(y, "dask")


def coded(y: Any) -> tuple[Array, Array]:
    """The distinct labels, ascending, and the code of each row as a lazy Dask array, shape (n,).

    Parameters
    ----------
    y
        Labels, Dask or Zarr array of shape (n,) or (n, 1).

    Raises
    ------
    DataError
        If the shape is another, labels are no integers, texts or booleans (nor floats that are
        whole), or there are too many.
    """
    import dask.array as da  # slow to import, and few fits need it

    if is_dask_frame(y):
        y = dask_series_values(y)
    labels = da.from_zarr(y) if isinstance(y, zarr.Array) else y
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(f"labels must have shape (n,), got {labels.shape}")
    classes = np.asarray(da.unique(labels).compute())
    if classes.dtype.kind == "f" and not (classes == np.floor(classes)).all():
        raise DataError(f"labels must be whole numbers or texts, y holds {classes[:3].tolist()}")
    if len(classes) > _MOST:
        raise DataError(f"y has {len(classes):,} distinct labels, at most {_MOST:,} are classes")
    return classes, labels.map_blocks(_codes, classes, dtype=np.float64)


def _codes(block: Array, classes: Array) -> Array:
    return np.searchsorted(classes, block).astype(np.float64)
