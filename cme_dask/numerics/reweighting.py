"""Joint probabilities of cells of x and of y, when rows of x come from another law."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csc_array

from cme_dask.numerics.measure import Law
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip
from cme_dask.numerics.support import Support

Array = Any
Sums = tuple[Array, Array]

_ROWS = 1 << 9  # rows whose laws are held at once
_ARRAYS = 8  # as large as a block of laws: it, its product, and what it is made from
_FLOPS = 200  # a guess per row and cell of y
_WORD = 8


@dataclass(frozen=True, eq=False)
class JointCells(Reduction[Sums, Array]):
    """Probabilities E[1_t(X) P(Y in s | X)] of cells t of x and s of y over rows x.

    Parameters
    ----------
    model
        Joint distribution, whose ``law()`` of y given x and cells of y count.
    support
        Cells of x.
    """

    model: Any
    support: Support
    name = "joint-cells"
    on_device = False

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of cells of x and of y."""
        return len(self.support.points), len(self.model.y.cells.masses)

    def cost(self, extent: Extent) -> Cost:
        """Laws of a block of rows, and the sums."""
        size, cells = self.shape
        return Cost(
            flops=_FLOPS * cells,
            state=_ROWS * _ARRAYS * max(cells, self.model.law().held) * _WORD,
            partial=size * cells * _WORD,
            subject=f"{size} cells of x and {cells} cells of y",
            remedies=("lower support_size",),
        )

    def start(self, like: Array) -> Law:
        """The law of y given x."""
        law: Law = self.model.law()
        return law

    def update(self, state: Law, strip: Strip) -> Sums:
        """Sums over one strip, and the sum of its weights."""
        total, mass = np.zeros(self.shape), np.zeros(1)
        for x, weights in self._blocks(strip):
            laws = state.on_cells(state.at(x), self.model.y.cells.support)
            places = weights, self.support.assign(x), np.arange(len(x) + 1)
            total += csc_array(places, shape=(len(total), len(x))) @ laws
            mass += weights.sum()
        return total, mass

    def _blocks(self, strip: Strip) -> Iterator[tuple[Array, Array]]:
        rows = strip.parts[0]
        weights = np.ones(len(rows)) if strip.weights is None else strip.weights
        for start in range(0, len(rows), _ROWS):
            yield rows[start : start + _ROWS], weights[start : start + _ROWS]

    def combine(self, a: Sums, b: Sums) -> Sums:
        """Sums over both."""
        return a[0] + b[0], a[1] + b[1]

    def finalize(self, total: Sums) -> Array:
        """The probabilities, shape (cells of x, cells of y)."""
        return total[0] / total[0].sum()
