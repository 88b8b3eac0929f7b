"""What constraints need to know of basis functions beside their moments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.constraints import Certified, Constraint, Pointwise
from cme_dask.numerics.basis import Basis
from cme_dask.numerics.hashing import distinct_in_random_order

Array = Any

_RANGE_ROWS = 4096  # whose functions are held at once


@dataclass(frozen=True, eq=False)
class Geometry:
    """What a constraint needs to know of the basis functions beside their moments.

    Attributes
    ----------
    bounds
        sup |N_i| of x and of y, None if infinite (:attr:`NewtonBasis.bound`).
    newton
        N of x and of y at rows of the row sample or at landmarks, shapes (s, m); where needed.
    ranges
        Lowest and highest values of the centred functions of x and of y, shapes (2, k_X) and
        (2, k_Y), where they were observed in a pass.
    """

    bounds: tuple[float | None, float | None] = (None, None)
    newton: tuple[Array, Array] | None = None
    ranges: tuple[Array, Array] | None = None

    @classmethod
    def of(
        cls, constraint: Constraint, bases: Sequence[Basis], rows: Sequence[Array]
    ) -> "Geometry":
        """What this constraint needs to know of these bases.

        Parameters
        ----------
        constraint
            What is asked of g.
        bases
            Of x and of y.
        rows
            Rows of x and of y in random order, shapes (n, d).
        """
        newton = None
        if isinstance(constraint, Certified) and constraint.bounds != "analytic":
            newton = bases[0](rows[0][:_RANGE_ROWS]), bases[1](rows[1][:_RANGE_ROWS])
        elif isinstance(constraint, Pointwise):
            landmarks = [
                _landmarks(*each) for each in zip(bases, rows, constraint.counts, strict=True)
            ]
            newton = bases[0](landmarks[0]), bases[1](landmarks[1])
        return cls((bases[0].bound, bases[1].bound), newton)


def _landmarks(basis: Basis, rows: Array, count: int) -> Array:
    """The pivots, then distinct rows, ``count`` in all."""
    pivots = np.asarray(basis.points)[:count]
    first, _ = distinct_in_random_order(rows)
    return np.concatenate([pivots, rows[first[: count - len(pivots)]]])


NOTHING = Geometry()
"""What constraints without inequalities need to know."""
