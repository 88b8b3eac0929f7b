"""Functions of many rows, evaluated on a fixed grid of blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cme_dask.kernels.sections import Sections

Array = Any

BLOCK = 1024
"""Rows evaluated at once, counted from row 0 of the table.

The last bits of a matrix product depend on the shapes of its factors and on a row's place in them:
on a fixed grid a row's values are the same however the table is cut. A block of some hundred
functions stays in cache.
"""

LINE = 8
"""Numbers between rows of memory, which a power of two apart meet in few places of the cache."""

_BUFFER = 512  # numbers: less than two rows of a block, except of the last one


@contextmanager
def without_copies() -> Iterator[None]:
    """Within, NumPy's functions of arrays with gaps between their rows read these where they lie.

    Otherwise, where several rows fit into NumPy's buffer, they are copied there and back, at half
    the cost of an exponential.
    """
    with np.errstate():  # which restores the size of the buffer
        np.setbufsize(_BUFFER)
        yield


class BlockValues:
    """Values of m functions at one block of rows after the other, in the same memory."""

    def __init__(self, sections: Sections, width: int) -> None:
        self._sections = sections
        self._held = np.empty((width, BLOCK + LINE))

    @without_copies()
    def __call__(self, rows: Array) -> Array:
        """Values, shape (b, m), of at most ``BLOCK`` rows (b, d); good until the next call."""
        values = self._held[:, : len(rows)]
        # The last bits of a matrix product depend on the order of its factors in memory, too.
        self._sections(np.ascontiguousarray(rows), values)
        return values.T


def in_blocks(sections: Sections, rows: Array, width: int) -> Array:
    """Values, shape (n, m), of m functions at rows (n, d).

    Parameters
    ----------
    sections
        The functions.
    rows
        Rows, shape (n, d).
    width
        Number of functions m.
    """
    values, block = np.empty((len(rows), width)), BlockValues(sections, width)
    for start in range(0, len(rows), BLOCK):
        here = slice(start, start + BLOCK)
        values[here] = block(rows[here])
    return values
