"""What is known of the rows in each cell of a support: what laws on the cells are made of."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.numerics.support import Support
from cme_dask.numerics.value_range import ValueRange

Array = Any


@dataclass(frozen=True, eq=False)
class Drawn:
    """How the atoms of cells were drawn: what cells of a union of rows are made from.

    Attributes
    ----------
    counts
        Rows of positive weight in each cell, integers of shape (S,).
    hashes
        Of the global row index of each atom, by which it was drawn, uint64 of shape (A,).
    weights
        Of the atoms, shape (A,); 0 of one that stands for a cell without rows.
    """

    counts: Array
    hashes: Array
    weights: Array


@dataclass(frozen=True, eq=False)
class Cells:
    r"""Laws P_s of the rows in the cells s = 1..S of a support.

    A conditional law is the mixture :math:`\sum_s w_s(x) P_s`. Masses, means, covariances and the
    means of declared functions are those of all rows; everything else is answered by rows that
    were kept of each cell.

    Attributes
    ----------
    support
        Which rows belong to which cell.
    masses
        Shares v of all rows in the cells, shape (S,): non-negative, sum 1.
    means
        Means of the columns in each cell, shape (S, d); the cell's point where it has no rows.
    covariances
        Covariances in each cell, shape (S, d, d); of more than 8 columns those of the kept rows.
    names
        Declared functions, q of them.
    functions
        Their means in each cell, shape (S, q).
    atoms
        Rows that were kept, cell by cell, shape (A, d); of a cell without rows its point.
    starts
        Those of cell s are ``atoms[starts[s]:starts[s + 1]]``, at least one; shape (S + 1,).
    shares
        Of the atoms in their cells, shape (A,): positive, sum 1 in each cell.
    whole
        Whether the atoms of a cell are all its rows, shape (S,).
    components
        For partitions of unity b of this variable: E[b_j 1_s] over all rows, shape (m, S),
        non-negative, rows of sum E b_j and columns of sum v_s; otherwise None.
    drawn
        How the atoms were drawn; None in models of before this was kept.
    values
        Which values the columns take, over all rows; None in models of before this was recorded.
    """

    support: Support
    masses: Array
    means: Array
    covariances: Array
    names: tuple[str, ...]
    functions: Array
    atoms: Array
    starts: Array
    shares: Array
    whole: Array
    components: Array | None = None
    drawn: Drawn | None = None
    values: ValueRange | None = None

    @property
    def range(self) -> ValueRange:
        """Which values the columns take; any, where it is not known."""
        return ValueRange.unknown(self.atoms.shape[1]) if self.values is None else self.values

    @property
    def size(self) -> int:
        """Number of cells S."""
        return self.support.size

    @property
    def cell_of_atom(self) -> Array:
        """Cell number of each atom, shape (A,)."""
        return np.repeat(np.arange(self.size), np.diff(self.starts))

    def average(self, values: Array) -> Array:
        """Means over the atoms of each cell, shape (S, q), of values at all atoms, shape (A, q)."""
        return np.asarray(np.add.reduceat(self.shares[:, None] * values, self.starts[:-1]))
