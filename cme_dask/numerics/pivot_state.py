"""How far a choice of pivots is, as plain arrays, and what a round measures of it."""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.elimination import Elimination
from cme_dask.numerics.pools import noise, non_negative

Array = Any

STATUS = ("running", "tolerance", "max_rank", "exhausted")

ROWS = 1024
"""Rows whose columns are held at once: they stay in cache."""


@dataclass(frozen=True, eq=False)
class PivotState:
    """Pivots chosen so far, and what the rounds have measured of them.

    Attributes
    ----------
    points
        Pivots p, shape (m, d).
    rows
        Their global row indices, shape (m,).
    factor
        R, lower-triangular with K(p, p) = R R^T, shape (m, m).
    history
        Relative residual trace over all rows after 0, 1, ... pivots, as far as a round has
        measured it: those of the last round are measured in the next one.
    round
        Number of rounds.
    status
        ``running``, or why the choice ended: ``tolerance``, ``max_rank``, or ``exhausted`` (the
        rows span no more, to rounding).
    """

    points: Array
    rows: Array
    factor: Array
    history: Array
    round: int = 0
    status: str = "running"

    @classmethod
    def empty(cls, n_columns: int) -> Self:
        """No pivots yet, for rows of this many columns."""
        no_rows = np.empty(0, dtype=np.int64)
        return cls(np.empty((0, n_columns)), no_rows, np.empty((0, 0)), np.ones(1))

    @classmethod
    def of(cls, basis: NewtonBasis) -> Self:
        """Rounds go on from a basis on rows of the data."""
        return cls(basis.points, np.asarray(basis.rows), basis.factor, np.ones(1))

    @property
    def rank(self) -> int:
        """Number of pivots m."""
        return len(self.points)

    def basis(self, kernel: Any) -> NewtonBasis:
        """Newton basis on the pivots."""
        return NewtonBasis(kernel, self.points, self.factor, self.rows)

    def newton(self, kernel: Any, x: Array) -> Array:
        """N at the rows of x, shape (n, m), for m = 0 too."""
        return self.basis(kernel)(x) if self.rank else np.empty((len(x), 0))

    def extended(self, points: Array, rows: Array, newton: Array) -> Self:
        """With b more pivots; ``newton`` is N at them, themselves included, (b, m + b)."""
        m, b = self.rank, len(points)
        factor = np.zeros((m + b, m + b))
        factor[:m, :m] = self.factor
        factor[m:] = newton
        return replace(
            self,
            points=np.concatenate([self.points, points]),
            rows=np.concatenate([self.rows, rows]),
            factor=factor,
        )

    def measured(self, found: "Measured", tol: float) -> Self:
        """With the traces that a round has measured, and no more pivots than ``tol`` asks for."""
        if found.trace <= 0.0:
            return replace(self, status="exhausted")
        traces = 1.0 - np.cumsum(found.squares) / found.trace
        if len(traces):
            traces[-1] = found.rest / found.trace
        history = np.minimum.accumulate([1.0, *traces.clip(min=0.0)])
        met = np.flatnonzero(history <= tol)
        if not len(met):
            return replace(self, history=history)
        m = int(met[0])
        return replace(
            self,
            points=self.points[:m],
            rows=self.rows[:m],
            factor=self.factor[:m, :m],
            history=history[: m + 1],
            status="tolerance",
        )

    def to_arrays(self) -> dict[str, Array]:
        """Plain arrays to store."""
        return {
            "points": self.points,
            "rows": self.rows,
            "factor": self.factor,
            "history": self.history,
            "round": np.array(self.round),
            "status": np.array(STATUS.index(self.status)),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array]) -> Self:
        """Inverse of :meth:`to_arrays`."""
        return cls(
            points=np.asarray(arrays["points"]),
            rows=np.asarray(arrays["rows"]),
            factor=np.asarray(arrays["factor"]),
            history=np.asarray(arrays["history"]),
            round=int(arrays["round"]),
            status=STATUS[int(arrays["status"])],
        )


@dataclass(frozen=True, eq=False)
class Measured:
    """Sums over rows that tell the residual trace after every pivot; they add.

    Attributes
    ----------
    squares
        sum_i w_i N_j(x_i)^2 for each pivot j, shape (m,).
    trace, rest
        sum_i w_i k(x_i, x_i), and the same of the residuals.
    largest
        Largest k(x_i, x_i).
    """

    squares: Array
    trace: float
    rest: float
    largest: float

    def __add__(self, other: Self) -> "Measured":
        """Sums over both sets of rows."""
        return Measured(
            self.squares + other.squares,
            self.trace + other.trace,
            self.rest + other.rest,
            max(self.largest, other.largest),
        )

    def floor(self, rank: int) -> float:
        """Residual that is rounding after ``rank`` pivots."""
        return noise(rank, self.largest)


class Residuals:
    """Residuals k(x, x) - |N(x)|^2 at many strips of rows, prepared once.

    Parameters
    ----------
    basis
        Newton basis on the pivots so far.
    """

    def __init__(self, basis: NewtonBasis) -> None:
        self._basis = basis
        self._memory = np.empty((basis.rank, ROWS))
        self._write: Any = None

    def __call__(self, x: Array, weights: Array | None) -> tuple[Array, Measured]:
        """Residuals at the rows x, shape (n,), and their sums.

        Rows of weight zero are no rows: their residual is zero.
        """
        if self._write is None and self._basis.rank:
            self._write = self._basis.sections(Elimination.whole(self._basis.rank), x)
        weights = np.ones(len(x)) if weights is None else weights
        diagonal = np.asarray(self._basis.kernel.diagonal(x), dtype=np.float64)
        residual, squares = diagonal.copy(), np.zeros(self._basis.rank)
        for start in range(0, len(x) if self._basis.rank else 0, ROWS):
            here = slice(start, min(start + ROWS, len(x)))
            newton = self._memory[:, : here.stop - start]
            self._write(x[here], newton)
            np.multiply(newton, newton, out=newton)
            residual[here] -= newton.sum(axis=0)
            squares += newton @ weights[here]
        residual = np.where(weights > 0, residual, 0.0)
        non_negative(residual, float(diagonal.max(initial=0.0)))
        return residual, Measured(
            squares,
            float(weights @ diagonal),
            float(weights @ residual),
            float(diagonal.max(initial=0.0)),
        )
