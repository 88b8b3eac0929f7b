"""Functions of rows as lazy Dask arrays: Gram columns and features."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask.base import tokenize
from dask.delayed import delayed

from cme_dask.data.columns import Columns, check_finite
from cme_dask.data.sources import RowSource
from cme_dask.errors import DataError
from cme_dask.kernels import Kernel
from cme_dask.models.features import FeatureModel
from cme_dask.numerics.basis import BLOCK, in_blocks
from cme_dask.passes.sources import open_sample

Array = Any
RowFunction = Callable[[Array, int], Array]

BLOCK_BYTES = 1 << 26
"""Largest block of a result, 64 MiB, if that is at least 1,024 rows."""

_COLUMNS = BLOCK_BYTES // (8 * BLOCK) // 2  # of Gram columns: so a block has 2,048 rows at least


def gram_columns(
    kernel: Kernel, X: Any, points: Any, *, storage_options: dict[str, Any] | None = None
) -> Any:
    """Gram columns k(x_i, p_j) as a lazy Dask array of shape (n, m); nothing is computed yet.

    Parameters
    ----------
    kernel
        The kernel k.
    X
        Rows x_i, shape (n, d), as in :func:`open_sample`; of a sample store, its x.
    points
        Points p_j, shape (m, d).
    storage_options
        Passed on to fsspec with URLs.

    Returns
    -------
    dask.array.Array
        float64. Row chunks are those of the source, divided where a block of columns would exceed
        64 MiB; columns are divided if there are more than 4,096. Tasks are called
        ``gram-columns``.

    Raises
    ------
    DataError
        On a kernel, columns or points that do not fit; and, when it is computed, on NaN or
        infinity, by column and row.
    StoreError
        If a store is damaged; a damaged chunk is named when it is computed.

    Notes
    -----
    Lazy arrays run under whatever scheduler computes them, and BLAS uses the threads it is set
    to: set ``OPENBLAS_NUM_THREADS=1`` (or MKL's) under the threaded scheduler.
    """
    if not isinstance(kernel, Kernel):
        raise DataError(
            f"kernel must be one of cme_dask.kernels (users' own: kernels.Custom), got {kernel!r}"
        )
    sample = open_sample(X, storage_options=storage_options)
    sample.check_whole("gram_columns")
    source, columns = sample.sources[0], sample.columns[0]
    pivots = check_points(points, columns)
    kernel.check(pivots.shape[1])
    width = min(len(pivots), _COLUMNS)
    rows = lazy_rows(source, width)
    import dask.array as da  # slow to import, and no fit needs it

    return da.concatenate(
        [
            map_rows(rows, GramColumns(kernel, part, columns), (len(part),), "gram-columns")
            for part in (pivots[i : i + width] for i in range(0, len(pivots), width))
        ],
        axis=1,
    )


def lazy_features(source: RowSource, model: FeatureModel) -> Any:
    """Features of a Zarr or Dask source as a lazy Dask array (n, m) with chunks of whole rows.

    Row chunks are those of the source, divided where a block would exceed 64 MiB.
    """
    return map_rows(lazy_rows(source, model.rank), model.checked, (model.rank,), "features")


@dataclass(frozen=True, eq=False)
class GramColumns:
    """Columns k(., p_j) at checked rows."""

    kernel: Kernel
    points: Array
    columns: Columns

    def __call__(self, rows: Array, first: int) -> Array:
        """K(rows, points), shape (b, m); ``first`` is the number of the first row."""
        check_finite(rows, self.columns.names, first)
        return in_blocks(self.kernel.evaluator(self.points), rows, len(self.points))


def check_points(points: Any, columns: Columns) -> Array:
    """Points as finite float64 of shape (m, d) for these columns.

    Raises
    ------
    DataError
        If they are not.
    """
    try:
        # In rows: tokens of Dask do not tell a matrix from its transpose, whose bytes are the same.
        array = np.asarray(points, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise DataError(f"points must be numeric: {error}") from error
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or array.shape[1] != len(columns.names) or not len(array):
        raise DataError(f"points must have shape (m, {len(columns.names)}), got {np.shape(points)}")
    check_finite(array, columns.names, 0)
    return array


def map_rows(rows: Any, function: RowFunction, shape: tuple[int, ...], name: str) -> Any:
    """``function(rows, first row)``, an array (b, ...), of every chunk of rows; not computed yet.

    Parameters
    ----------
    rows
        Dask array (n, d), float64, one chunk of columns.
    function
        Called with rows (b, d) and the global number of the first of them.
    shape
        Of the result at one row.
    name
        Of the tasks on the dashboard.
    """
    # One graph key: a factor of hundreds of MB must not travel with every task.
    shared = delayed(function, name=f"{name}-plan-{tokenize(function)}", traverse=False)
    return rows.map_blocks(
        _apply,
        function=shared,
        token=name,
        dtype=np.float64,
        chunks=(rows.chunks[0], *((length,) for length in shape)),
        drop_axis=None if shape else 1,
        new_axis=list(range(2, 1 + len(shape))) or None,
        meta=np.empty((0,) * (1 + len(shape))),
    )


def _apply(rows: Array, function: RowFunction, block_info: Any = None) -> Array:
    first = 0 if block_info is None else block_info[0]["array-location"][0][0]
    return function(rows, first)


def lazy_rows(source: RowSource, width: int) -> Any:
    """Rows of a source as a Dask array whose blocks carry ``width`` columns of a result."""
    d = source.shape[1]
    most = max(BLOCK, BLOCK_BYTES // (8 * max(width, d)) // BLOCK * BLOCK)
    if source.dask_array is not None:
        rows = source.dask_array.astype(np.float64)
        rows = rows.rechunk({1: -1})
    else:
        import dask.array as da

        chunk = source.chunk_rows or most
        rows = da.from_array(
            _Slices(source),
            chunks=(chunk, d),
            name=f"rows-{tokenize(source)}",
            meta=np.empty((0, 0)),
        )
    return rows.rechunk({0: _divided(rows.chunks[0], most)})


def _divided(chunks: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The same chunks, those above ``most`` rows divided."""
    parts: list[int] = []
    for chunk in chunks:
        parts += [most] * (chunk // most)
        if chunk % most or not chunk:
            parts.append(chunk % most)
    return tuple(parts)


@dataclass(frozen=True, eq=False)
class _Slices:
    """A source as what ``dask.array.from_array`` reads by slices: damaged chunks are named."""

    source: RowSource

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> Any:
        return np.dtype(np.float64)

    def __getitem__(self, key: tuple[slice, slice]) -> Array:
        rows, columns = key
        return self.source.read(rows.start, rows.stop)[:, columns]
