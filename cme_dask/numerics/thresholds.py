"""Events of one variable whose Brier scores add up to a CRPS."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from cme_dask.errors import DataError, remedy
from cme_dask.kernels.coordinates import Coordinates

Array = Any

_LEVELS = {1: 24, 4: 12}  # thresholds of each direction, by the number of directions
_FEW_LEVELS = 8  # of each of more
_PAIRED = 3  # columns, of whose pairs sums and differences are taken
_DRAWN = 2  # directions, of more columns


@dataclass(frozen=True, eq=False)
class Thresholds:
    r"""Indicators of low < <u, y> <= high: thresholds along directions, and levels of categories.

    .. math:: \sum_q v_q \mathrm E(1\{l_q < \langle u_q, y \rangle \le h_q\} - P_q(x))^2

    is the CRPS of <u, Y>, integrated between neighbouring thresholds and averaged over the
    directions u (a *sliced* CRPS); for a category the Brier score of its levels.

    Parameters
    ----------
    directions
        Distinct u, shape (r, d), in units of 1 / y.
    which
        The direction of each event, shape (q,).
    low, high
        Borders of each event, shape (q,).
    scores
        v, the weight of each event's Brier score, shape (q,).
    """

    directions: Array
    which: Array
    low: Array
    high: Array
    scores: Array

    def __len__(self) -> int:
        """Number of events q."""
        return len(self.which)

    def __call__(self, rows: Array) -> Array:
        """Indicators, zeros and ones of shape (n, q), at rows (n, d)."""
        xp, here = array_namespace(rows), device(rows)
        directions, which, low, high = (
            xp.asarray(a, device=here) for a in (self.directions, self.which, self.low, self.high)
        )
        along = xp.take(rows @ directions.T, which, axis=1)
        return xp.astype((along > low) & (along <= high), xp.float64)


@dataclass(frozen=True, eq=False)
class Declared:
    """Functions of users in the place of events, each squared error over the function's variance.

    Parameters
    ----------
    functions
        Each takes rows (n, d) and returns (n,).
    scores
        The weight of each squared error, shape (q,).
    """

    functions: tuple[Callable[[Array], Array], ...]
    scores: Array

    def __len__(self) -> int:
        """Number of functions q."""
        return len(self.functions)

    def __call__(self, rows: Array) -> Array:
        """Values of shape (n, q) at rows (n, d)."""
        xp = array_namespace(rows)
        return xp.stack([xp.astype(f(rows), xp.float64) for f in self.functions], axis=1)


@dataclass(frozen=True, eq=False)
class Mapped:
    """Coordinates of the columns before the events: they are measured beside these, and no judges.

    Parameters
    ----------
    coordinates
        Of the columns, d of them.
    events
        The events.
    """

    coordinates: Coordinates
    events: "Judges"

    def __len__(self) -> int:
        """Number of columns and events."""
        return len(self.coordinates.columns) + len(self.events)

    @property
    def scores(self) -> Array:
        """Weights as of the events, 0 for the columns."""
        return np.concatenate([np.zeros(len(self.coordinates.columns)), self.events.scores])

    def __call__(self, rows: Array) -> Array:
        """Values of shape (n, d + q) at rows (n, d)."""
        xp = array_namespace(rows)
        return xp.concat([self.coordinates(rows), self.events(rows)], axis=1)


Judges = Thresholds | Declared | Mapped
"""Functions of y whose held-out squared errors, weighted by ``scores``, judge a candidate."""


def declared(functions: Mapping[str, Any] | None, rows: Array, weights: Array) -> Declared:
    """Users' functions as judges.

    Parameters
    ----------
    functions
        By name.
    rows, weights
        A sample of the variable, shape (n, d), and the weights of the rows, sum 1.

    Raises
    ------
    DataError
        If there are none, or one is not finite or does not vary.
    """
    if not functions:
        raise DataError(
            "the criterion 'validation' scores declared functions of y: give "
            + remedy("functions=, such as ['y0 > 0']", "some by --event")
        )
    found = Declared(tuple(functions.values()), np.ones(len(functions)))
    values = found(rows)
    variance = weights @ (values - weights @ values) ** 2
    least = (1e-13 * np.abs(values).max(axis=0)) ** 2  # rounding of a constant
    for name, spread, rounding in zip(functions, variance, least, strict=True):
        if not (np.isfinite(spread) and spread > rounding):
            raise DataError(f"function {name!r} does not vary over the sampled rows: leave it out")
    return Declared(found.functions, 1.0 / variance)


def make_thresholds(
    rows: Array, weights: Array, categorical: tuple[bool, ...], seed: int = 0
) -> Thresholds:
    """Thresholds at quantiles of a sample.

    Parameters
    ----------
    rows
        Sample of the variable, shape (n, d).
    weights
        Of the rows, sum 1, shape (n,).
    categorical
        Which columns are codes of categories.
    seed
        Of the directions that are no axis.
    """
    numeric = [j for j, coded in enumerate(categorical) if not coded]
    directions: list[Array] = []
    which: list[Array] = []
    low: list[Array] = []
    high: list[Array] = []
    scores: list[Array] = []

    def add(direction: Array, below: Array, above: Array, share: Array) -> None:
        which.append(np.full(len(above), len(directions)))
        directions.append(direction)
        low.append(below)
        high.append(above)
        scores.append(share)

    axes = _directions(rows, weights, numeric, seed)
    for axis in axes:
        levels = _LEVELS.get(len(axes), _FEW_LEVELS)
        above = _quantiles(rows @ axis, weights, levels)
        # Each threshold stands for what is nearest to it; the outer ones for as much as inside.
        width = np.gradient(above) if len(above) > 1 else np.ones(1)
        add(axis, np.full(len(above), -np.inf), above, width / len(axes))
    for j in np.flatnonzero(categorical):
        codes = np.unique(rows[:, j])
        add(np.eye(len(categorical))[j], codes - 0.5, codes + 0.5, np.ones(len(codes)))
    return Thresholds(
        np.stack(directions), *(np.concatenate(parts) for parts in (which, low, high, scores))
    )


def _directions(rows: Array, weights: Array, numeric: list[int], seed: int) -> list[Array]:
    """The axes of the numeric columns and directions between them, over the deviations.

    Sums and differences of pairs, which is what events compare; of many columns random ones.
    """
    if not numeric:
        return []
    values = rows[:, numeric]
    deviation = np.sqrt(weights @ (values - weights @ values) ** 2)
    axes = np.eye(len(numeric))
    if len(numeric) > _PAIRED:
        between = np.random.default_rng(seed).standard_normal((_DRAWN, len(numeric)))
    else:
        pairs = combinations(axes, 2)
        between = np.array([a + sign * b for a, b in pairs for sign in (1.0, -1.0)])
    if len(numeric) > 1:
        between /= np.linalg.norm(between, axis=1, keepdims=True)
        axes = np.vstack([axes, between])
    whole = np.zeros((len(axes), rows.shape[1]))
    whole[:, numeric] = axes / np.where(deviation > 0, deviation, 1.0)
    return list(whole)


def _quantiles(values: Array, weights: Array, count: int) -> Array:
    """Distinct values near the levels (i + 1/2) / count; the largest value says nothing."""
    order = np.argsort(values, kind="stable")
    mass = np.cumsum(weights[order])
    at = np.searchsorted(mass, (np.arange(count) + 0.5) / count * mass[-1])
    found = np.unique(values[order][np.minimum(at, len(values) - 1)])
    return found[:-1] if len(found) > 1 and found[-1] == values.max() else found
