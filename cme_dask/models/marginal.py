"""The marginal law of y of a fitted model: the baseline that scores of laws stand beside."""

from functools import cached_property
from typing import Any, cast

import numpy as np

from cme_dask.models.joint import JointModel
from cme_dask.models.law import ConditionalLaw
from cme_dask.numerics.measure import CellLaw
from cme_dask.numerics.scoring import sorted_crps

Array = Any


class MarginalLaw:
    r"""The law of Y over all rows of a fit, which ignores x.

    .. math:: Q = \sum_s v_s P_s

    on the cells of y that conditional laws have too, v their masses. It is called with rows of x,
    and then has the queries of a :class:`cme_dask.ConditionalLaw` that scores ask; they agree with
    those of a model whose density ratio is 1. Each row takes a search among the atoms, instead of a
    sum over them.

    Parameters
    ----------
    model
        A fitted joint distribution with cells.
    """

    def __init__(self, model: JointModel) -> None:
        assert model.y.cells is not None
        self.model, self.cells = model, model.y.cells

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "cells": self.cells}  # the rest is made again

    def __call__(self, x: Array) -> "MarginalAnswers":
        """The law at rows of x, shape (b, d)."""
        return MarginalAnswers(self, len(x))

    @cached_property
    def law(self) -> CellLaw:
        """The law on its cells, whose weights are the masses wherever it is asked."""
        return CellLaw(
            self.cells, lambda x: np.broadcast_to(self.cells.masses, (len(x), self.size))
        )

    @property
    def size(self) -> int:
        """Number of cells."""
        return self.cells.size

    @cached_property
    def at(self) -> Array:
        """The law at one row, for the queries of :attr:`law`."""
        return self.cells.masses[None]

    @cached_property
    def conditional(self) -> ConditionalLaw:
        """Laws of the model at no points, which know how densities are smoothed."""
        return self.model.conditional(np.empty((0, len(self.model.x.columns.names))))

    @cached_property
    def columns(self) -> dict[str, "_Column"]:
        """The atoms of each column of numbers."""
        y = self.model.y.columns
        return {name: _Column.of(self, y.names.index(name)) for name in y.numeric}


class MarginalAnswers:
    """The marginal law at b rows: each answer is the same at all of them, or one for each y.

    Parameters
    ----------
    of
        The law.
    n
        Number of rows b.
    """

    def __init__(self, of: MarginalLaw, n: int) -> None:
        self.of, self.n = of, n

    def _repeated(self, values: Array) -> Array:
        return np.broadcast_to(values, (self.n, *np.shape(values)))

    def _column(self, name: str | None) -> "_Column":
        columns = self.of.columns
        return columns[next(iter(columns)) if name is None else name]

    def crps(self, y: Array) -> Array:
        """Mean over the numeric columns of the scores at y (b, d_Y), shape (b,)."""
        columns = self.of.columns.values()
        return np.mean([column.crps(y[:, column.place]) for column in columns], axis=0)

    def quantile(self, q: Any, column: str | None = None) -> Array:
        """Quantiles of levels (k,), shape (b, k)."""
        place = self._column(column).place
        return self._repeated(self.of.law.quantile(self.of.at, np.asarray(q), [place])[0, :, 0])

    def cdf(self, t: Any, column: str | None = None, *, paired: bool = False) -> Array:
        """Distribution function at one threshold for each row, shape (b,), or at k: (b, k)."""
        values = self._column(column).below(np.asarray(t))
        return values if paired else self._repeated(values)

    def log_pdf(self, y: Any, *, paired: bool = False) -> Array:
        """Logarithm of the smoothed density at y (b, d_Y), shape (b,)."""
        assert paired
        return cast(Array, self.of.conditional._log_marginal(y, paired=True)[:, 0])

    def sample(self, size: int | None = None, *, first: int = 0) -> Array:
        """Draws of y, shape (b, size, d_Y)."""
        rng = np.random.default_rng([first, self.n])
        u = rng.random((1, self.n * (size or 1)))
        return self.of.law.draw(self.of.at, u).reshape(self.n, size or 1, -1)

    def expect(self, f: Any) -> Array:
        """Means of columns of numbers, shape (b, len(f))."""
        mean = self.of.law.mean(self.of.at)[0]
        return self._repeated(mean[[self._column(name).place for name in f]])

    def predict_proba(self, column: str | None = None) -> Array:
        """Probabilities of the labels of a column, shape (b, labels)."""
        y = self.of.model.y.columns
        name = next(iter(y.categories)) if column is None else column
        codes, j = np.arange(len(y.categories[name])), y.names.index(name)
        query = self.of.law.average(lambda rows: (rows[:, [j]] == codes).astype(np.float64))
        return self._repeated(query(self.of.at)[0])


class _Column:
    """The atoms of one column in ascending order, and sums of their masses up to each.

    Parameters
    ----------
    place
        Which column it is.
    values
        Ascending, shape (A,).
    masses
        Shape (A,), sum 1.
    """

    def __init__(self, place: int, values: Array, masses: Array) -> None:
        self.place, self.values, self.centre = place, values, masses @ values
        gaps = values - self.centre  # sums of large values would cancel
        self.sums = np.minimum(np.concatenate([[0.0], np.cumsum(masses)]), 1.0)
        self.moments = np.concatenate([[0.0], np.cumsum(masses * gaps)])
        # At the least atom E|Y - y| is the distance from the mean.
        least = float(sorted_crps(masses[None], gaps, gaps[:1])[0])
        self.half_distance = -float(gaps[0]) - least

    @classmethod
    def of(cls, marginal: MarginalLaw, place: int) -> "_Column":
        """Of the cells of a law."""
        cells = marginal.cells
        masses = cells.masses[cells.cell_of_atom] * cells.shares
        order = np.argsort(cells.atoms[:, place], kind="stable")
        return cls(place, cells.atoms[order, place], masses[order])

    def below(self, t: Array) -> Array:
        """P(Y <= t), of the shape of t."""
        return np.asarray(self.sums[np.searchsorted(self.values, t, side="right")])

    def crps(self, y: Array) -> Array:
        r"""Scores :math:`E|Y - y| - E|Y - Y'| / 2` at y (b,), by sums over the atoms up to y."""
        at, gap = np.searchsorted(self.values, y, side="right"), y - self.centre
        distance = gap * (2.0 * self.sums[at] - 1.0) - 2.0 * self.moments[at] + self.moments[-1]
        return np.asarray(distance - self.half_distance)
