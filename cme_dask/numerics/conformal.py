"""Conformal intervals: conformity scores of laws at rows that they have not seen, and quantiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from cme_dask.numerics.cells import CellStatistics
from cme_dask.numerics.measure import CellLaw, Law

Array = Any

GRID = np.concatenate([np.arange(1, 200) / 200, [0.996, 0.997, 0.998, 0.999, 0.9995, 0.9999]])
"""Levels at which quantiles of scores are stored; between two of them the higher one is taken."""

_END = 1e-9  # of a mass: below it, nothing of the law lies on that side
_ROUND = 1e-9  # added to quantiles of scores, so that ties and rounding are inside
_LEVEL = 1e-12  # in which two levels count as equal


# Where a law has its mass, seen from a value


class Tails(NamedTuple):
    """Masses of one column of laws on both sides of a value y of each row, and the atoms next to y.

    Attributes
    ----------
    below, above
        P(Y <= y | x) and P(Y >= y | x), shape (b,).
    previous, following
        The largest atom up to y and the smallest one from y on, shape (b,); where the law has mass
        on both sides of y, they may be infinite.
    """

    below: Array
    above: Array
    previous: Array
    following: Array

    def mixed(self, share: Array, other: "Tails") -> "Tails":
        """Of the mixtures of these laws, with these shares (b,) in (0, 1), and others."""
        return Tails(
            share * self.below + (1.0 - share) * other.below,
            share * self.above + (1.0 - share) * other.above,
            np.where(share > 0.0, np.maximum(self.previous, other.previous), other.previous),
            np.where(share > 0.0, np.minimum(self.following, other.following), other.following),
        )

    def at(self, rows: Array) -> "Tails":
        """Those of some rows."""
        return Tails(*(each[rows] for each in self))

    def replaced(self, rows: Array, other: "Tails") -> "Tails":
        """With those of other laws at some rows."""
        result = Tails(*(each.copy() for each in self))
        for mine, new in zip(result, other, strict=True):
            mine[rows] = new
        return result


def atom_tails(atoms: Array, weights: Array, y: Array) -> Tails:
    """Of laws with these atoms and weights, both of shape (b, S), at y (b,)."""
    y, some = y[:, None], weights > 0.0
    return Tails(
        (weights * (atoms <= y)).sum(axis=1),
        (weights * (atoms >= y)).sum(axis=1),
        np.where(some & (atoms < y), atoms, -np.inf).max(axis=1),
        np.where(some & (atoms > y), atoms, np.inf).min(axis=1),
    )


def cell_tails(law: CellLaw, weights: Array, rows: Array, column: int) -> Tails:
    """Of laws on cells at rows that may be atoms of their cells, each without its own row.

    Parameters
    ----------
    law
        Its cells.
    weights
        Of the cells, shape (b, S).
    rows
        Rows of y, shape (b, d).
    column
        Position of the column.

    Notes
    -----
    A row that is an atom itself would make the law look better than it is at new rows: its mass is
    left out on both sides, which errs to the safe side, since the rest is not scaled up.
    """
    y, cells = rows[:, column], law.cells
    cell = cells.support.assign(rows)
    own = weights[np.arange(len(rows)), cell] * _own_share(cells, cell, rows)
    sides = np.stack([np.nextafter(y, -np.inf), y], axis=1)
    before, upto = law.below(weights, sides, column).T
    below, above = np.maximum(upto - own, 0.0), np.maximum(1.0 - before - own, 0.0)
    previous, following = np.full(len(y), -np.inf), np.full(len(y), np.inf)
    ends = np.flatnonzero(np.minimum(below, above) <= _END)
    if len(ends):
        levels = np.stack([before[ends] - _END, upto[ends] + _END], axis=1)
        next_to = law.quantile(weights[ends], np.clip(levels, 0.0, 1.0), [column])[:, :, 0]
        previous[ends] = np.where(next_to[:, 0] < y[ends], next_to[:, 0], -np.inf)
        following[ends] = np.where(next_to[:, 1] > y[ends], next_to[:, 1], np.inf)
    return Tails(below, above, previous, following)


def law_tails(law: Law, at: Any, y: Array, column: int) -> Tails:
    """Of laws at rows that they have not seen, with the values y (b,)."""
    sides = np.stack([np.nextafter(y, -np.inf), y], axis=1)
    before, upto = law.below(at, sides, column).T
    low, high = law.quantile(at, np.array([0.0, 1.0]), [column])[:, :, 0].T
    return Tails(
        np.where(y < low, 0.0, upto),
        np.where(y > high, 0.0, 1.0 - before),
        np.minimum(high, y),
        np.maximum(low, y),
    )


def _own_share(cells: CellStatistics, cell: Array, rows: Array) -> Array:
    """Share of an atom with these values in the cells of these rows, shape (b,); 0 without one."""
    result = np.zeros(len(rows))
    starts, ends = cells.starts[cell], cells.starts[cell + 1]
    for k in range(int((ends - starts).max(initial=0))):
        atom = np.minimum(starts + k, ends - 1)
        same = (cells.atoms[atom] == rows).all(axis=1)
        result = np.maximum(result, np.where(same, cells.shares[atom], 0.0))
    return result


# Scores, and their quantiles


def conformity(tails: Tails, y: Array, scale: float) -> Array:
    r"""Conformity scores of y (b,) under laws, shape (b,): the larger, the more unusual.

    .. math:: s(x, y) = 1 - 2 \min\{P(Y \le y \mid x), P(Y \ge y \mid x)\} \in [0, 1]

    is the least level of a central interval of the law that holds y; of a y beyond all atoms of the
    law, the score is 1 plus its distance to the nearest one over ``scale``.
    """
    inside = np.clip(1.0 - 2.0 * np.minimum(tails.below, tails.above), 0.0, 1.0)
    lower = np.where(tails.below <= _END, tails.following - y, 0.0)
    upper = np.where(tails.above <= _END, y - tails.previous, 0.0)
    gap = np.maximum(np.maximum(lower, upper), 0.0)
    return np.asarray(np.where(gap > 0.0, 1.0 + gap / scale, inside))


@dataclass(frozen=True, eq=False)
class ConformalScores:
    r"""Quantiles of conformity scores, by which central intervals of laws cover new rows.

    The interval of level L at x is

    .. math:: \bigl[F_x^{-1}\bigl(\tfrac{1 - \min(s, 1)}{2}\bigr) - \max(s - 1, 0)\, c, \;
              F_x^{-1}\bigl(\tfrac{1 + \min(s, 1)}{2}\bigr) + \max(s - 1, 0)\, c\bigr]

    with the quantile s = s(L) of the scores: the values y whose own score is at most s.

    Parameters
    ----------
    levels
        Ascending, in (0, 1), shape (K,).
    scores
        Their quantiles s by the name of the column, each of shape (K,).
    scales
        The standard deviations c of the columns, by name.
    by
        The column of labels of x within which rows are compared; None where all are.
    groups
        With it: the scores of the rows of each label that has some.

    Notes
    -----
    The score within the law is that of distributional conformal prediction (Chernozhukov, Wüthrich
    and Zhu 2021, PNAS 118, e2107794118). Such intervals never leave the law's atoms, so that they
    cannot cover where these are wrong; beyond them, the score goes on as a distance, as in
    conformalized quantile regression (Romano, Patterson and Candès 2019).
    """

    levels: Array
    scores: Mapping[str, Array]
    scales: Mapping[str, float]
    by: str | None = None
    groups: Mapping[str, "ConformalScores"] = field(default_factory=dict)

    @classmethod
    def learn(
        cls, scores: Array, weights: Array, names: Sequence[str], scales: Sequence[float]
    ) -> Self:
        r"""The quantiles of scores (n, q), of rows with weights (n,), for the columns ``names``.

        .. math:: s(L) = \min\Bigl\{s: \sum_{i: s_i \le s} w_i \ge L \Bigl(\sum_i w_i +
                  \max_i w_i\Bigr)\Bigr\}

        The new row counts as one of the largest weight whose score is infinite: of equal weights
        that is the ceil((n + 1) L)-th smallest score. Levels that no finite score reaches are left
        out.
        """
        share = weights / (weights.sum() + weights.max())
        last = float(share.sum())
        quantiles = []
        levels = np.append(GRID[last - _LEVEL > GRID], last)
        for each in scores.T:
            order = np.argsort(each, kind="stable")
            reached = np.cumsum(share[order])
            place = np.searchsorted(reached, levels - _LEVEL)
            quantiles.append(each[order][np.minimum(place, len(order) - 1)] + _ROUND)
        finite = np.isfinite(quantiles).all(axis=0)
        pairs = zip(names, quantiles, strict=True)
        return cls(
            levels[finite],
            {name: values[finite] for name, values in pairs},
            dict(zip(names, map(float, scales), strict=True)),
        )

    def within(
        self, by: str, labels: Sequence[str], codes: Array, scores: Array, weights: Array
    ) -> Self:
        """With scores of the rows of each label alone: intervals cover within each of them.

        Known as Mondrian conformal prediction (Vovk, Gammerman and Shafer 2005, Algorithmic
        Learning in a Random World, section 4.5).

        Parameters
        ----------
        by, labels
            The column of x, and its labels.
        codes
            The label of each row by its position, shape (n,).
        scores, weights
            As of :meth:`learn`.
        """
        names, scales = list(self.scores), list(self.scales.values())
        groups = {
            label: self.learn(scores[here], weights[here], names, scales)
            for code, label in enumerate(labels)
            if weights[here := codes == code].any()
        }
        return replace(self, by=by, groups=groups)

    def of_label(self, label: str | None) -> "ConformalScores":
        """The scores of the rows of a label; empty, for infinite intervals, if no row has it."""
        found = None if label is None else self.groups.get(label)
        if found is not None:
            return found
        none = {name: np.empty(0) for name in self.scores}
        return ConformalScores(np.empty(0), none, self.scales)

    def threshold(self, level: float, name: str) -> float:
        """The quantile s of a level of at most 1, rounded up to one that is stored, or infinity."""
        place = int(np.searchsorted(self.levels, level - _LEVEL))
        return float(self.scores[name][place]) if place < len(self.levels) else np.inf

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        result = {
            "levels": self.levels.tolist(),
            "scores": {name: values.tolist() for name, values in self.scores.items()},
            "scales": dict(self.scales),
        }
        if self.by is None:
            return result
        groups = {label: each.to_dict() for label, each in self.groups.items()}
        return result | {"by": self.by, "groups": groups}

    @classmethod
    def from_dict(
        cls, data: Any, names: Sequence[str], labelled: Mapping[str, Sequence[str]]
    ) -> Self:
        """Inverse of :meth:`to_dict`.

        Parameters
        ----------
        data
            The JSON form.
        names
            The numeric columns of y.
        labelled
            The labels of the columns of x that hold labels.

        Raises
        ------
        ValueError, LookupError, TypeError
            Unless these are scores of such columns.
        """
        levels = np.array(data["levels"], dtype=np.float64)
        scores = {name: np.array(data["scores"][name], dtype=np.float64) for name in names}
        scales = {name: float(data["scales"][name]) for name in names}
        sound = levels.ndim == 1 and bool((np.diff(levels) > 0.0).all())
        for values in scores.values():
            sound = sound and values.shape == levels.shape and bool(np.isfinite(values).all())
            sound = sound and bool((np.diff(values) >= 0.0).all() and (values >= 0.0).all())
        if not (sound and all(0.0 < scale < np.inf for scale in scales.values())):
            raise ValueError("conformal scores ascend with their levels, and scales are positive")
        if (by := data.get("by")) is None:
            return cls(levels, scores, scales)
        groups = {label: cls.from_dict(each, names, {}) for label, each in data["groups"].items()}
        if not set(groups) <= set(labelled[by]) or any(each.by for each in groups.values()):
            raise ValueError("conformal scores are those of labels of a column of x")
        return cls(levels, scores, scales, by, groups)
