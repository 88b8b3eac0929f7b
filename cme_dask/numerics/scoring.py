"""Sums from which scores follow, and the events whose Brier scores are a CRPS."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import combinations
from operator import add
from typing import Any, Self

import numpy as np
from array_api_compat import array_namespace, device

from cme_dask.errors import DataError, remedy
from cme_dask.kernels.transforms import Transform

# Sums over rows from which scores of predictions follow, and their standard errors by blocks


Array = Any

_NEIGHBOURS = 60  # rows that a law given predictions is made of
_RUN, _FEW_RUNS = 20, 64  # numbers of which sums are made by one product


def running_sums(values: Array, own: float) -> Array:
    """Sums of the first numbers of each row, of which the last counts ``own`` times; (b, S).

    A running sum waits for each addition. Those within runs of numbers, by a matrix product, do
    not: then the sums of whole runs are added.
    """
    b, size = values.shape
    if size <= _FEW_RUNS:
        return np.asarray(values @ triangle(size, own))
    runs = -(-size // _RUN)
    if size % _RUN:
        values = np.pad(values, ((0, 0), (0, runs * _RUN - size)))
    each = np.ascontiguousarray(values).reshape(-1, _RUN)
    result = (each @ triangle(_RUN, own)).reshape(b, runs, _RUN)
    whole = result[:, :, -1] + (1.0 - own) * each.reshape(result.shape)[:, :, -1]
    result += running_sums(whole, 0.0)[:, :, None]
    return result.reshape(b, runs * _RUN)[:, :size]


@lru_cache
def triangle(count: int, own: float = 1.0) -> Array:
    """Ones above the diagonal, and ``own`` on it: numbers times it are sums of the first ones."""
    return np.triu(np.ones((count, count)), 1) + own * np.eye(count)


def sorted_crps(weights: Array, atoms: Array, y: Array) -> Array:
    """CRPS of ascending atoms (S,), or (b, S), of weights (b, S) at y (b,); shape (b,).

    See :func:`cme_dask.metrics.crps`.
    """
    distance = atoms - y[:, None]
    np.abs(distance, out=distance)
    below = np.cumsum(weights[:, :-1], axis=1)
    gaps = np.broadcast_to(np.diff(atoms), below.shape)
    # Products are not kept: it is memory that takes the time.
    spread = np.einsum("bs,bs,bs->b", below, 1.0 - below, gaps)
    return np.asarray(np.einsum("bs,bs->b", weights, distance) - spread)


def column_deviations(values: Array, weights: Array) -> Array:
    """Weighted standard deviations of columns, shape (q,); infinite of those that are constant.

    Errors divided by them are 0 in constant columns.

    Parameters
    ----------
    values
        Shape (n, q).
    weights
        Of the rows, sum 1, shape (n,).
    """
    each = np.sqrt(weights @ (values - weights @ values) ** 2)
    return np.where((np.ptp(values, axis=0) > 0.0) & (each > 0.0), each, np.inf)


def mean_and_error(
    values: Array, weights: Array, units: Array | None = None
) -> tuple[Array, Array]:
    r"""A weighted mean over rows, and its standard error over units of them.

    .. math:: \bar v = \sum_i w_i v_i, \quad
              \mathrm{s.e.}^2 = \frac{U}{U - 1} \sum_u \Bigl(\sum_{i \in u} w_i (v_i - \bar v)
              \Bigr)^2

    with weights of sum 1 and U units.

    Parameters
    ----------
    values
        Of the rows, shape (n, ...).
    weights
        Of the rows, shape (n,).
    units
        A number for each row that tells which rows are alike, shape (n,); default: none are.

    Returns
    -------
    mean, error
        Shape (...); the error is infinite where there is one unit.
    """
    share = weights / weights.sum()
    mean = np.tensordot(share, values, 1)
    away = (share * (values - mean).T).T
    if units is not None:
        names, unit = np.unique(units, return_inverse=True)
        sums = np.zeros((len(names), *away.shape[1:]))
        np.add.at(sums, unit, away)
        away = sums
    count = len(away)
    if count < 2:
        return mean, np.full_like(mean, np.inf)
    return mean, np.sqrt(count / (count - 1) * (away**2).sum(axis=0))


@dataclass(frozen=True)
class Estimate:
    """A mean over held-out rows, and its standard error by the jackknife over blocks of them.

    NaN: undefined (a constant target has no R^2, fewer than two blocks no standard error).
    """

    value: float
    std: float


@dataclass(frozen=True)
class Scores:
    r"""How good predictions of one target f are on rows of weight w.

    .. math:: \mathrm{mse} = \frac{\sum_i w_i (f_i - \hat f_i)^2}{\sum_i w_i}, \qquad
              R^2 = 1 - \mathrm{mse} / \mathrm{variance}

    Of an event, whose prediction is its probability, ``mse`` is the Brier score and ``r2`` the
    Brier skill score against the frequency of the event on these very rows.

    Attributes
    ----------
    rows
        Number of rows.
    weight
        Their total weight.
    mean, variance
        Of the target over these rows, in its unit and the square of it.
    mse, r2
        The scores.
    """

    rows: int
    weight: float
    mean: float
    variance: float
    mse: Estimate
    r2: Estimate


@dataclass(frozen=True, eq=False)
class ScoreSums:
    """Weighted sums over rows, one slice per block; they add.

    Attributes
    ----------
    rows
        Number of rows, shape (F,).
    weight
        Sum of the weights, shape (F,).
    mean
        Of the targets, shape (F, t); 0 without weight.
    spread
        Sum of w (f - mean)^2, shape (F, t).
    losses
        Sums of w times each loss (squared errors, CRPS), shape (F, l).
    """

    rows: Array
    weight: Array
    mean: Array
    spread: Array
    losses: Array

    @classmethod
    def of(cls, targets: Array, losses: Array, weights: Array | None, folds: Array, n: int) -> Self:
        """Of rows with these targets (b, t), losses (b, l), weights and folds (b,), of n folds."""
        member = (folds == np.arange(n)[:, None]).astype(np.float64)
        rows = member.sum(axis=1).astype(np.int64)
        if weights is not None:
            member *= weights
        weight = member.sum(axis=1)
        mean = member @ targets / np.where(weight > 0.0, weight, 1.0)[:, None]
        spread = member @ (targets - mean[folds]) ** 2
        return cls(rows, weight, mean, spread, member @ losses)

    def __add__(self, other: "ScoreSums") -> "ScoreSums":
        """Sums over both sets of rows (Chan, Golub and LeVeque 1983: no cancellation)."""
        weight = self.weight + other.weight
        share = (other.weight / np.where(weight > 0.0, weight, 1.0))[:, None]
        away = other.mean - self.mean
        return ScoreSums(
            self.rows + other.rows,
            weight,
            self.mean + share * away,
            self.spread + other.spread + away**2 * share * self.weight[:, None],
            self.losses + other.losses,
        )

    def total(self) -> "ScoreSums":
        """All blocks as one."""
        return reduce(add, (self._block(fold) for fold in range(len(self.rows))))

    def scores(self, target: int, loss: int) -> Scores:
        """Of the predictions of a target whose squared errors are this loss."""
        total = self.total()

        def r2(sums: ScoreSums) -> float:
            spread = float(sums.spread[0, target])
            return 1.0 - float(sums.losses[0, loss]) / spread if spread > 0.0 else np.nan

        return Scores(
            rows=int(total.rows[0]),
            weight=float(total.weight[0]),
            mean=float(total.mean[0, target]),
            variance=float(total.spread[0, target] / total.weight[0]),
            mse=self.mean_loss(loss),
            r2=self._estimate(r2),
        )

    def mean_loss(self, loss: int) -> Estimate:
        """Mean of a loss over the rows."""
        return self._estimate(lambda sums: float(sums.losses[0, loss] / sums.weight[0]))

    def linear(self, factors: Mapping[int, float], constant: float) -> Estimate:
        """A constant, plus the means of losses over the rows times these factors."""
        return self._estimate(
            lambda sums: (
                constant
                + float(sum(c * sums.losses[0, i] for i, c in factors.items()) / sums.weight[0])
            )
        )

    def deviation(self, losses: Sequence[int]) -> Estimate:
        """Sum of the absolute means of several losses over the rows."""
        return self._estimate(
            lambda sums: float(np.abs(sums.losses[0, losses]).sum() / sums.weight[0])
        )

    def ratio(self, above: int, below: int) -> Estimate:
        """Sum of one loss over that of another; NaN where that is zero."""

        def quotient(sums: "ScoreSums") -> float:
            total = float(sums.losses[0, below])
            return float(sums.losses[0, above]) / total if total > 0.0 else np.nan

        return self._estimate(quotient)

    def _estimate(self, statistic: Callable[["ScoreSums"], float]) -> Estimate:
        """A statistic of all blocks, and its jackknife over those with weight."""
        used = [self._block(fold) for fold in range(len(self.weight)) if self.weight[fold] > 0.0]
        if len(used) < 2:
            return Estimate(statistic(self.total()), np.nan)
        others = (used[:i] + used[i + 1 :] for i in range(len(used)))
        each = np.array([statistic(reduce(add, rest)) for rest in others])
        spread = ((each - each.mean()) ** 2).sum() * (len(each) - 1) / len(each)
        return Estimate(statistic(self.total()), float(np.sqrt(spread)))

    def _block(self, fold: int) -> "ScoreSums":
        here = slice(fold, fold + 1)
        return ScoreSums(
            self.rows[here],
            self.weight[here],
            self.mean[here],
            self.spread[here],
            self.losses[here],
        )


# Events of one variable whose Brier scores add up to a CRPS


_LEVELS = {1: 24, 4: 12}  # thresholds of each direction, by the number of directions
_FEW_LEVELS = 8  # of each of more
_PAIRED = 3  # columns, of whose pairs sums and differences are taken
_DRAWN = 2  # directions, of more columns
_ROUNDING = 4e-15  # of a sum of a few products, over the sum of their sizes: an upper bound


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
class DeclaredFunctions:
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
    transform
        Of the columns, d of them.
    events
        The events.
    """

    transform: Transform
    events: "ScoringFunctions"

    def __len__(self) -> int:
        """Number of columns and events."""
        return len(self.transform.columns) + len(self.events)

    @property
    def scores(self) -> Array:
        """Weights as of the events, 0 for the columns."""
        return np.concatenate([np.zeros(len(self.transform.columns)), self.events.scores])

    def __call__(self, rows: Array) -> Array:
        """Values of shape (n, d + q) at rows (n, d)."""
        xp = array_namespace(rows)
        return xp.concat([self.transform(rows), self.events(rows)], axis=1)


ScoringFunctions = Thresholds | DeclaredFunctions | Mapped
"""Functions of y whose held-out squared errors, weighted by ``scores``, judge a candidate."""


def declared(functions: Mapping[str, Any] | None, rows: Array, weights: Array) -> DeclaredFunctions:
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
    result = DeclaredFunctions(tuple(functions.values()), np.ones(len(functions)))
    values = result(rows)
    variance = weights @ (values - weights @ values) ** 2
    least = (1e-13 * np.abs(values).max(axis=0)) ** 2  # rounding of a constant
    for name, spread, rounding in zip(functions, variance, least, strict=True):
        if not (np.isfinite(spread) and spread > rounding):
            raise DataError(f"function {name!r} does not vary over the sampled rows: leave it out")
    return DeclaredFunctions(result.functions, 1.0 / variance)


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
        along = rows @ axis
        above = _quantiles(along, weights, levels)
        # Each threshold stands for what is nearest to it; the outer ones for as much as inside.
        width = np.gradient(above) if len(above) > 1 else np.ones(1)
        if np.count_nonzero(axis) > 1:
            middle = _gaps(along, _ROUNDING * (np.abs(rows) @ np.abs(axis)).max())
            number: Array = np.searchsorted(middle, above)
            inside = number < len(middle)
            width, above = width[inside], middle[number[inside]]
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
    Columns that do not vary are left out beside others that do.
    """
    if not numeric:
        return []
    deviation = column_deviations(rows[:, numeric], weights)
    varying = np.isfinite(deviation)
    if varying.any():
        numeric, deviation = np.array(numeric)[varying].tolist(), deviation[varying]
    else:
        deviation = np.ones(len(numeric))
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
    whole[:, numeric] = axes / deviation
    return list(whole)


def _quantiles(values: Array, weights: Array, count: int) -> Array:
    """Distinct values near the levels (i + 1/2) / count; the largest value says nothing."""
    order = np.argsort(values, kind="stable")
    mass = np.cumsum(weights[order])
    at = np.searchsorted(mass, (np.arange(count) + 0.5) / count * mass[-1])
    result = np.unique(values[order][np.minimum(at, len(values) - 1)])
    return result[:-1] if len(result) > 1 and result[-1] == values.max() else result


def _gaps(values: Array, rounding: float) -> Array:
    """Middles between values that differ by more than rounding, ascending.

    A sum of several columns is rounded, differently in blocks of other sizes: at a threshold that
    is the sum of a row, rounding would decide on which side of it the row lies. Sums that all rows
    share but for rounding, as of shares, have no threshold.
    """
    distinct = np.unique(values)
    wide = np.diff(distinct) > rounding
    return 0.5 * (distinct[:-1][wide] + distinct[1:][wide])


def law_errors(
    predicted: Array, y: Array, weights: Array, among: tuple[Array, Array] | None = None
) -> Array:
    r"""CRPS of the law of each row given nothing but predictions, over that of the marginal law.

    The law at a row is that of its prediction and the residuals of the rows whose predictions are
    nearest, the row itself left out: a prediction may be biased or uncertain in some places more
    than in others, as what is learned of residuals later will make up for.

    Parameters
    ----------
    predicted, y
        Shape (n, q).
    weights
        Shape (n,), at least 0.
    among
        More rows of y and their weights, of which these are some: where their marginal law is the
        wider one, it counts.

    Returns
    -------
    array, shape (n,)
        Mean over the columns that vary; 0 if none does.
    """
    result = []
    for j, (m, column) in enumerate(zip(predicted.T, y.T, strict=True)):
        marginal = _marginal(column, weights)
        if among is not None:
            marginal = max(marginal, _marginal(among[0][:, j], among[1]))
        if marginal == 0.0:
            continue
        order = np.argsort(m, kind="stable")
        e, w = (column - m)[order], weights[order]
        n = len(e)
        size = min(_NEIGHBOURS, n - 1)
        first = np.clip(np.arange(n) - size // 2, 0, n - size - 1)
        at = first[:, None] + np.arange(size + 1)
        own = at == np.arange(n)[:, None]
        atoms, mass = e[at], np.where(own, 0.0, w[at])
        mass /= np.maximum(mass.sum(axis=1, keepdims=True), np.finfo(float).tiny)
        away = np.einsum("ij,ij->i", mass, np.abs(atoms - e[:, None]))
        crps = np.empty(n)
        crps[order] = (away - _half_difference(atoms, mass)) / marginal
        result.append(crps)
    return np.mean(result, axis=0) if result else np.zeros(len(y))


def law_error(
    predicted: Array, y: Array, weights: Array, among: tuple[Array, Array] | None = None
) -> float:
    """The weighted mean of :func:`law_errors`."""
    return float(weights @ law_errors(predicted, y, weights, among) / weights.sum())


def _marginal(column: Array, weights: Array) -> float:
    """E |y - y'| / 2 of values with these weights."""
    if np.ptp(column) == 0.0:
        return 0.0
    return float(_half_difference(column[None], weights[None] / weights.sum())[0])


def _half_difference(atoms: Array, mass: Array) -> Array:
    """E |e - e'| / 2 of laws with these atoms, both of shape (n, S), shape (n,)."""
    order = np.argsort(atoms, axis=1, kind="stable")
    share = np.cumsum(np.take_along_axis(mass, order, 1), axis=1)[:, :-1]
    steps = np.diff(np.take_along_axis(atoms, order, 1), axis=1)
    return np.einsum("ij,ij->i", share * (1.0 - share), steps)
