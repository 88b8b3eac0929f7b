"""Functions of rows that write block by block into memory that is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace, device

Array = Any
Write = Callable[[slice, Array], None]

_ROWS = 1024  # whose functions stay in cache


@dataclass(frozen=True, eq=False)
class Sections:
    """Functions k(., z_j), j = 1..m, or others, prepared for many rows; one per thread.

    Parameters
    ----------
    prepare
        ``prepare(X)`` of rows X, shape (n, d), does what is cheaper once for many rows than for
        each block of them, and holds some copies of these. It returns ``write(here, out)``, good
        until the next call, which writes the functions at the rows ``X[here]`` to ``out``, shape
        (m, b): a function a row, so that several functions next to each other are contiguous.
    """

    prepare: Callable[[Array], Write]

    def __call__(self, X: Array, out: Array) -> None:
        """Write the functions at all rows X, shape (n, d), to ``out``, shape (m, n)."""
        self.prepare(X)(slice(0, X.shape[0]), out)

    def values(self, X: Array, count: int) -> Array:
        """Values of so many functions at the rows X, shapes (n, d) and (n, m), in float64."""
        xp, n = array_namespace(X), X.shape[0]
        found = xp.empty((count, n), dtype=xp.float64, device=device(X))
        for start in range(0, n, _ROWS):
            here = slice(start, min(start + _ROWS, n))
            self(X[here, :], found[:, here])
        return found.T

    @classmethod
    def of_blocks(cls, write: Callable[[Array, Array], None]) -> "Sections":
        """Functions of which nothing is known but ``write(X, out)``."""
        return cls(lambda X: lambda here, out: write(X[here, :], out))

    def then(self, work: Callable[[Array], None]) -> "Sections":
        """These functions, and ``work(out)`` on each block of them."""

        def prepare(X: Array) -> Write:
            write = self.prepare(X)

            def write_more(here: slice, out: Array) -> None:
                write(here, out)
                work(out)

            return write_more

        return Sections(prepare)

    def after(self, map_rows: Callable[[Array], Array]) -> "Sections":
        """These functions of mapped rows, x -> k(t(x), z_j)."""
        return Sections(lambda X: self.prepare(map_rows(X)))
