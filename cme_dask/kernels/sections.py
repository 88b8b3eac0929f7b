"""Functions of rows that write block by block into memory that is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

Array = Any
Block = Callable[[slice, Array], None]


@dataclass(frozen=True, eq=False)
class Sections:
    """Functions k(., z_j), j = 1..m, or others, prepared for many rows; one per thread.

    Parameters
    ----------
    prepare
        ``prepare(X)`` of rows X, shape (n, d), does what is cheaper once for many rows than for
        each block of them. It returns ``block(here, out)``, good until the next call, which writes
        the functions at the rows ``X[here]`` to ``out``, shape (m, b): a function a row, so that
        several functions next to each other are contiguous.
    """

    prepare: Callable[[Array], Block]

    def __call__(self, X: Array, out: Array) -> None:
        """Write the functions at all rows X, shape (n, d), to ``out``, shape (m, n)."""
        self.prepare(X)(slice(0, X.shape[0]), out)

    @classmethod
    def of_blocks(cls, write: Callable[[Array, Array], None]) -> Self:
        """Functions of which nothing is known but ``write(X, out)``."""
        return cls(lambda X: lambda here, out: write(X[here, :], out))

    def then(self, work: Callable[[Array], None]) -> "Sections":
        """These functions, and ``work(out)`` on each block of them."""

        def prepare(X: Array) -> Block:
            write = self.prepare(X)

            def block(here: slice, out: Array) -> None:
                write(here, out)
                work(out)

            return block

        return Sections(prepare)

    def after(self, map_rows: Callable[[Array], Array]) -> "Sections":
        """These functions of mapped rows, x -> k(t(x), z_j)."""
        return Sections(lambda X: self.prepare(map_rows(X)))
