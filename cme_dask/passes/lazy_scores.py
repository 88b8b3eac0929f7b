"""Functions of matching rows of several arrays as lazy Dask arrays."""

from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

import numpy as np

from cme_dask.errors import DataError

Array = Any


def map_matching_rows(
    function: Callable[..., Array],
    arrays: Sequence[Any],
    tail: tuple[int, ...],
    *,
    numbered: bool,
    summed: bool,
    name: str,
) -> Any:
    """``function`` of the blocks of rows of some arrays; nothing is computed yet.

    Parameters
    ----------
    function
        Takes rows of all arrays, shapes (b, ...), and returns an array of shape (b,) + tail.
    arrays
        Dask arrays, and NumPy arrays that are divided like them, of as many rows.
    tail
        Shape of the result at one row.
    numbered
        Whether the function takes the numbers of the rows, shape (b,), as its last argument.
    summed
        Whether the function returns sums over its rows, shape (1,) + tail, which are added.
    name
        Of the tasks on the dashboard.

    Returns
    -------
    dask.array.Array
        Shape (n,) + tail in the chunks of rows of the arrays; summed, shape tail.

    Raises
    ------
    DataError
        If the number of rows in a chunk is unknown.
    """
    import dask.array as da  # slow to import, and no fit needs it

    parts = [da.asarray(array) for array in arrays]
    if any(np.isnan(part.shape[0]) for part in parts):
        raise DataError(
            "scores need chunks of known length: call compute_chunk_sizes() of the Dask array first"
        )
    lazy = next(p for p, array in zip(parts, arrays, strict=True) if not _in_memory(array))
    rows = lazy.chunks[0]
    if numbered:
        parts.append(da.arange(lazy.shape[0], chunks=(rows,)))
    row, letters = ascii_letters[0], list(ascii_letters[1:])
    pairs: list[Any] = []
    for part in parts:
        rest = "".join(letters.pop() for _ in part.shape[1:])
        whole = part.rechunk({0: rows} | dict.fromkeys(range(1, part.ndim), -1))
        pairs += [whole, row + rest]
    axes = {letters.pop(): length for length in tail}
    result = da.blockwise(
        function,
        row + "".join(axes),
        *pairs,
        new_axes=axes,
        adjust_chunks={row: 1} if summed else None,
        concatenate=True,
        dtype=np.float64,
        meta=np.empty((0,) * (1 + len(tail))),
        token=name,
    )
    return result.sum(axis=0) if summed else result


def _in_memory(array: Any) -> bool:
    return isinstance(array, np.ndarray)
