"""Weighted means of the moments: what every solution is made from."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.numerics.moments import Moments, Side
from cme_dask.numerics.pools import non_negative
from cme_dask.numerics.shown import brief_repr

Array = Any


@dataclass(frozen=True, eq=False)
class MeanMoments:
    """Weighted means in the Newton bases: S_XX, S_YY, S_YX, c_X, c_Y, E[N f], E f.

    Attributes
    ----------
    weight
        Sum of the weights.
    gram
        S of each side, shapes (m, m).
    cross
        S_YX = E[N_Y N_X^T], shape (m_Y, m_X); None for one side.
    mean
        c of each side, shapes (m,).
    trace
        E k(x, x) of each side.
    function_mean
        E f of each side's columns and functions, shift added back, shapes (q,).
    function_cross
        ``function_cross[s][t]`` = E[N_s (f_t - shift_t)^T], shape (m_s, q_t).
    function_gram
        E[(f - shift)(f - shift)^T] over the functions of all sides, shape (q, q).
    """

    weight: float
    gram: tuple[Array, ...]
    cross: Array | None
    mean: tuple[Array, ...]
    trace: tuple[float, ...]
    function_mean: tuple[Array, ...]
    function_cross: tuple[tuple[Array, ...], ...]
    function_gram: Array
    shift: tuple[Array, ...]

    __repr__ = brief_repr

    @property
    def trace_error(self) -> tuple[float, ...]:
        """Relative trace error tau = trace(K - L L^T) / trace(K) of each side, over the rows.

        Raises
        ------
        NumericalError
            If it is below zero by more than rounding.
        """
        errors = np.array(
            [(t - float(np.trace(s))) / t for t, s in zip(self.trace, self.gram, strict=True)]
        )
        non_negative(errors, 1.0)
        return tuple(errors.tolist())

    @classmethod
    def of(cls, moments: Moments, sides: tuple[Side, ...]) -> "MeanMoments":
        """Means of moments that hold a single fold (see :meth:`Moments.total`)."""
        ranks = [side.basis.rank for side in sides]
        counts = [side.count for side in sides]
        shifts = tuple(
            np.zeros(q) if side.shift is None else np.asarray(side.shift)
            for side, q in zip(sides, counts, strict=True)
        )
        edges = np.cumsum([0, *ranks, 1, *counts])
        basis = [slice(edges[i], edges[i + 1]) for i in range(len(sides))]
        one = int(edges[len(sides)])
        fun = [
            slice(edges[len(sides) + 1 + i], edges[len(sides) + 2 + i]) for i in range(len(sides))
        ]
        weight = float(moments.gram[0, one, one])
        gram = moments.gram[0] / weight
        return cls(
            weight=weight,
            gram=tuple(gram[b, b] for b in basis),
            cross=gram[basis[1], basis[0]] if len(sides) == 2 else None,
            mean=tuple(gram[b, one] for b in basis),
            trace=tuple(float(t) for t in moments.traces[0] / weight),
            function_mean=tuple(s + gram[f, one] for s, f in zip(shifts, fun, strict=True)),
            function_cross=tuple(tuple(gram[b, f] for f in fun) for b in basis),
            function_gram=gram[one + 1 :, one + 1 :],
            shift=shifts,
        )
