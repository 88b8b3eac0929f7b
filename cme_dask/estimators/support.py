"""The values of y: what users say and rows tell of them, and how moved laws are brought there.

Laws on cells of y have their mass on rows of y. Residuals that are moved to a location do not: they
are brought to values that y can take by a :class:`ValueMap`, which held-out rows choose.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cme_dask.config import HELD_ROWS
from cme_dask.errors import DataError, option, remedy, warn
from cme_dask.estimators.context import FitContext
from cme_dask.learning.losses import Gain, HeldLaws, paired_gain
from cme_dask.metrics import crps
from cme_dask.numerics.cells import CellStatistics, ValueRange
from cme_dask.numerics.location import Residuals
from cme_dask.numerics.values import (
    CONTINUOUS,
    DISCRETE,
    LABELS,
    MOST_VALUES,
    SEMI_DISCRETE,
    UNSEEN,
    WHOLE,
    ColumnValues,
    MovedAtoms,
    ValueMap,
    matched_reaches,
    nearest_reaches,
    parse_support,
    ranges_without,
    recognised_values,
    shares_below,
    unseen_share,
)

Array = Any

_FEW_ROWS = 1000  # whose moved laws are averaged, and judged at the ends of their range
_BEYOND = 7.0  # rows expected beyond a bound, at least: none is there with a chance of e^-7
_SHOWN = 32  # values that the description of a fit lists


# Before the pass: what the user says, and what the row sample tells


def column_values(support: Any, context: FitContext) -> tuple[ColumnValues, ...]:
    """The values of each column of y, from the row sample and what the user says.

    Parameters
    ----------
    support
        As :func:`check_support` admits it.
    context
        The rows.

    Raises
    ------
    DataError
        On unknown columns, labels, or rows that hold other values.

    Warns
    -----
    UserWarning
        If a column is said to be discrete, and more than 1 % of new rows hold values that no
        sampled row holds.
    """
    columns, rows = context.sample.columns[1], context.rows
    name = remedy("support=", "--support")
    if isinstance(support, Mapping):
        columns.positions(list(support))  # names those that there are not
        labelled = [column for column in support if column in columns.categories]
        if labelled:
            raise DataError(f"{name} concerns numbers, and {labelled[0]!r} holds labels")
        given = [support.get(column, "auto") for column in columns.names]
    else:
        given = ["auto" if support is None else support] * len(columns.names)
    result = []
    for column, one, values in zip(columns.names, given, rows.parts[1].T, strict=True):
        if column in columns.categories:
            result.append(ColumnValues(LABELS))
            continue
        known = _known(parse_support(name, one), values, rows.weights)
        seen = values[rows.weights > 0.0]
        _check(known, seen, column)
        if isinstance(one, str) and one == DISCRETE:
            _warn_of_unseen(seen, column)
        result.append(known)
    return tuple(result)


def _known(given: str | tuple[float, float] | Array, column: Array, weights: Array) -> ColumnValues:
    """The values of one column, from rows of it and what the user says."""
    if isinstance(given, str):
        if given == "continuous":
            return ColumnValues(bounds="none")
        if given == "discrete":
            return ColumnValues(DISCRETE, np.unique(column[weights > 0.0]), bounds="seen")
        return replace(
            recognised_values(column, weights), bounds="seen" if given == "bounded" else "learned"
        )
    if isinstance(given, tuple):
        known = recognised_values(column, weights)
        return replace(known, low=given[0], high=given[1], bounds="given")
    return ColumnValues(DISCRETE, given, given[0], given[-1], "listed")


def _check(known: ColumnValues, values: Array, name: str) -> None:
    """DataError unless rows hold values that the user admits."""
    if known.bounds not in ("given", "listed"):
        return
    wrong = (values < known.low) | (values > known.high)
    if known.bounds == "listed":
        wrong |= ~np.isin(values, known.values)
    if wrong.any():
        examples = ", ".join(repr(v) for v in np.unique(values[wrong])[:3].tolist())
        raise DataError(
            f"{remedy('support=', '--support')} leaves out values of {name!r} that rows hold, such "
            f"as {examples}: name all that it takes, or leave support to be recognised"
        )


def _warn_of_unseen(values: Array, name: str) -> None:
    distinct, counts = np.unique(values, return_counts=True)
    share = unseen_share(counts)
    # Of whole numbers in a range that is short enough, those that no row holds are values, too.
    whole = (np.floor(distinct) == distinct).all() and np.ptp(distinct) < MOST_VALUES
    if share > UNSEEN and not whole:
        discrete = remedy("support='discrete'", "--support discrete")
        warn(
            f"about {share:.0%} of new rows hold values of {name!r} that no sampled row holds, and "
            f"by {discrete} laws do not take most of them: give a list of all values or more rows "
            f"({option('sample_size')}), or leave support to be recognised",
            UserWarning,
        )


# After the pass, which has seen all rows


def settled_values(
    known: Sequence[ColumnValues], cells: CellStatistics, names: Sequence[str]
) -> tuple[ColumnValues, ...]:
    """The same with what the pass saw of all rows: their range, and rows that cells retained.

    Whole numbers take all those between the least and the largest one, or between given bounds.

    Raises
    ------
    DataError
        If rows hold values that the user left out.
    """
    result = []
    for j, (column, name) in enumerate(zip(known, names, strict=True)):
        ends = np.array([cells.low[j], cells.high[j]])
        retained = np.unique(np.append(cells.atoms[cells.weights > 0.0, j], ends))
        _check(column, retained, name)
        if column.bounds == "seen":
            column = replace(column, low=ends[0], high=ends[1])
        if column.kind == WHOLE and not cells.integer[j]:
            column = replace(column, kind=CONTINUOUS)
        if column.kind == DISCRETE and column.bounds != "listed":
            first, last = ends
            if column.bounds == "given":  # values that no row holds may come
                first = np.ceil(column.low) if np.isfinite(column.low) else first
                last = np.floor(column.high) if np.isfinite(column.high) else last
            if cells.integer[j] and last - first < MOST_VALUES:
                values = np.arange(first, last + 1.0)
            else:
                values = np.union1d(column.values, retained)
            if column.bounds == "learned" and len(values) > MOST_VALUES:
                column = replace(column, kind=CONTINUOUS, values=())
            else:
                column = replace(column, values=values)
        result.append(column)
    return tuple(result)


def first_map(known: Sequence[ColumnValues], seen: ValueRange, *, mapped: bool) -> ValueMap:
    """The map before held-out rows say more: the nearest values of discrete columns, given bounds.

    Parameters
    ----------
    known
        The columns.
    seen
        The range of all rows.
    mapped
        Whether locations are in normal scores of y, which know no values beyond the range.
    """
    low, high, reaches = [], [], []
    for j, column in enumerate(known):
        ends = column.low, column.high
        if mapped:
            ends = max(ends[0], seen.low[j]), min(ends[1], seen.high[j])
        reach = (np.empty(0),) * 3
        if column.kind == DISCRETE:
            ends, reach = (column.values[0], column.values[-1]), nearest_reaches(column.values)
        low.append(ends[0])
        high.append(ends[1])
        reaches.append(reach)
    integer = np.array([column.kind == WHOLE for column in known])
    return ValueMap.of(
        np.where(integer, np.ceil(low), low),
        np.where(integer, np.floor(high), high),
        integer,
        reaches,
    )


# Held-out rows choose


def choose_map(
    context: FitContext,
    known: Sequence[ColumnValues],
    cells: CellStatistics,
    residuals: Residuals,
    moved: Iterable[HeldLaws],
) -> tuple[ValueMap, dict[str, Any]]:
    """The map of moved laws to values of y, and what the model says of it.

    Values of discrete and semi-discrete columns reach as far as :func:`matched_reaches` says where
    that lowers the held-out CRPS by more than one standard error; else discrete ones are the
    nearest, and semi-discrete columns are taken for continuous.

    An end of the range is a bound where moved laws expect at least 7 of 1,000 held-out rows beyond
    the range of these, though none is there, and where their CRPS is lower if they are brought
    within it, each by the range of the other rows. If the laws were right, and independent, no row
    would be there with a probability of at most :math:`e^{-7}`.

    Parameters
    ----------
    context
        The fit without the location.
    known
        The columns, as :func:`settled_values` returns them.
    cells
        Statistics of y.
    residuals
        The locations.
    moved
        Laws of the residuals of refits without each fold, iterated over as often as needed.
    """
    mapped, names = residuals.transform is not None, context.sample.columns[1].names
    result = first_map(known, cells.values, mapped=mapped)
    listed = [j for j, c in enumerate(known) if c.kind in (DISCRETE, SEMI_DISCRETE)]
    open_ = [
        j
        for j, c in enumerate(known)
        if c.bounds == "learned" and c.kind != DISCRETE and not mapped
    ]
    described = [_described(column, cells, j) for j, column in enumerate(known)]
    matched = result
    if listed:
        reaches = [result.reaches(j) for j in range(len(known))]
        means = _mean_laws(context, residuals, moved, result, listed)
        for j, mean in zip(listed, means, strict=True):
            reaches[j] = matched_reaches(known[j], mean, cells, j)
        matched = ValueMap.of(result.low, result.high, result.integer, reaches)
    gains, beyond = _gains(context, residuals, moved, (result, matched), listed, open_)
    low, high = result.low.copy(), result.high.copy()
    for (j, change), gain in gains.items():
        if change == "matched":
            described[j] |= {
                "reach": "matched" if gain.pays else described[j]["reach"],
                "gain": gain.gain,
                "std": gain.std if np.isfinite(gain.std) else None,
            }
            result = result.with_column(j, matched) if gain.pays else result
        elif gain.gain > 0.0 and beyond[j, change] >= _BEYOND:
            ends, seen = (low, cells.low) if change == "low" else (high, cells.high)
            ends[j] = seen[j]
    for j in listed:
        atoms, lower, upper = result.reaches(j)
        if len(atoms):  # what reaches to infinity is an end
            low[j] = atoms[0] if np.isneginf(lower[0]) else low[j]
            high[j] = atoms[-1] if np.isposinf(upper[-1]) else high[j]
    result = replace(result, low=low, high=high)
    for j, one in enumerate(described):
        bounds = low[j], high[j]
        if mapped:  # the range of the scores is no bound, but an end that an atom reaches is
            atoms, lower, upper = result.reaches(j)
            ends = (
                len(atoms) > 0 and np.isneginf(lower[0]),
                len(atoms) > 0 and np.isposinf(upper[-1]),
            )
            bounds = (
                bounds[0] if ends[0] else known[j].low,
                bounds[1] if ends[1] else known[j].high,
            )
        one["bounds"] = [float(end) if np.isfinite(end) else None for end in bounds]
    return result, dict(zip(names, described, strict=True))


def described_values(
    known: Sequence[ColumnValues], cells: CellStatistics, names: Sequence[str]
) -> dict[str, Any]:
    """What a model without a location says of the values of y."""
    each = [_described(column, cells, j) for j, column in enumerate(known)]
    return dict(zip(names, each, strict=True))


def _described(known: ColumnValues, cells: CellStatistics, j: int) -> dict[str, Any]:
    """JSON form of what is known of a column: its kind, values and their shares."""
    ends = known.low, known.high
    if known.kind == DISCRETE:
        ends = known.values[0], known.values[-1]
    result: dict[str, Any] = {
        "kind": known.kind,
        "bounds": [float(end) if np.isfinite(end) else None for end in ends],
        "given": known.bounds != "learned",
        "count": len(known.values),
        "reach": "nearest" if known.kind == DISCRETE else "none",
    }
    if 0 < len(known.values) <= _SHOWN:
        below, up_to = shares_below(cells, j, known.values)
        result["values"] = [float(value) for value in known.values]
        result["shares"] = np.round(up_to - below, 12).tolist()
    return result


def _mean_laws(
    context: FitContext,
    residuals: Residuals,
    moved: Iterable[HeldLaws],
    values: ValueMap,
    columns: Sequence[int],
) -> list[MovedAtoms]:
    """The mean of the moved laws at some rows, of each of these columns."""
    rows = context.rows.prefix(HELD_ROWS)
    x, share = rows.parts[0], rows.importance
    folds = rows.folds(context.sample.folding, context.n_folds)
    atoms, masses = [], []
    for laws in moved:
        few = laws.held < _FEW_ROWS
        held = laws.held[few]
        places = residuals.values(laws.atoms, x[held], folds[held])[:, :, columns]
        atoms.append(np.clip(places, values.low[columns], values.high[columns]))
        masses.append(share[held, None] * laws.weights[few])
    mass = np.concatenate(masses).ravel()
    places = np.concatenate(atoms).reshape(-1, len(columns))
    positive = mass > 0.0
    return [MovedAtoms.of(column[positive], mass[positive]) for column in places.T]


def _gains(
    context: FitContext,
    residuals: Residuals,
    moved: Iterable[HeldLaws],
    maps: tuple[ValueMap, ValueMap],
    listed: Sequence[int],
    open_: Sequence[int],
) -> tuple[dict[tuple[int, str], Gain], dict[tuple[int, str], float]]:
    """Held-out gains in CRPS by column, of matched reaches and of the low and the high end.

    Those of reaches are in the coordinates of the location, those of ends in the units of y. Beside
    them, how many units of rows the laws expect beyond these ends.
    """
    if not (listed or open_):
        return {}, {}
    rows, folding = context.rows.prefix(HELD_ROWS), context.sample.folding
    x, y = rows.parts
    folds = rows.folds(folding, context.n_folds)
    z = residuals.scores(y)
    few = (np.arange(len(y)) < _FEW_ROWS) & (rows.importance > 0.0)
    least, most = y[few].min(axis=0), y[few].max(axis=0)
    seen = ValueRange(least, most, np.zeros(len(least), dtype=bool))
    within = np.zeros((2, *y.shape))
    within[:, few] = ranges_without(y[few], seen)
    ends = {"low": (np.maximum, least, within[0]), "high": (np.minimum, most, within[1])}
    changes = [(j, "matched") for j in listed] + [(j, end) for j in open_ for end in ends]
    scores = {key: np.zeros((2, len(y))) for key in changes}
    beyond = {key: np.zeros(len(y)) for key in changes}
    for laws in moved:
        held, weights = laws.held, laws.weights
        places = residuals.values(laws.atoms, x[held], folds[held])
        if listed:
            for which, values in enumerate(maps):
                mapped = values.possible(places)
                mapped = residuals.scores(mapped.reshape(-1, y.shape[1])).reshape(mapped.shape)
                for j in listed:
                    atoms = mapped[:, :, [j]]
                    scores[j, "matched"][which, held] = crps(weights, atoms, z[held][:, [j]])
        for j in open_:
            here = few[held]
            rest, masses, atoms = held[here], weights[here], places[here][:, :, [j]]
            for end, (bring, border, borders) in ends.items():
                out = (bring(atoms, border[j]) != atoms)[:, :, 0]
                beyond[j, end][rest] = (masses * out).sum(axis=1)
                inside = bring(atoms, borders[rest, None, None, j])
                changed = ((inside != atoms)[:, :, 0] & (masses > 0.0)).any(axis=1)
                if changed.any():
                    for which, each in enumerate((atoms, inside)):
                        scores[j, end][which, rest[changed]] = crps(
                            masses[changed], each[changed], y[rest[changed]][:, [j]]
                        )
    units = folding.units(rows.index, rows.units)
    gains = {
        key: paired_gain(before, after, rows.importance, units)
        for key, (before, after) in scores.items()
    }
    # Rows of a unit are alike, and of few with large weights no more can be expected.
    share = rows.importance * few / rows.importance[few].sum()
    mass = np.bincount(np.unique(units, return_inverse=True)[1], share)
    count = 1.0 / float(mass @ mass)
    return gains, {key: count * float(share @ each) for key, each in beyond.items()}
