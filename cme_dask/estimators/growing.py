"""Checks of new rows in ``partial_fit``, and its report of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, ToleranceWarning, warn
from cme_dask.models.events import FunctionsLike, LocalFunction, by_name
from cme_dask.models.merging import FitSums
from cme_dask.numerics.moments import Function, MomentSums

_WORSE = 2.0  # times the trace error of the earlier rows, beyond which a refit is advised


def new_rows(earlier: FitSums, new: MomentSums) -> dict[str, Any]:
    """How well the pivots of a fit span rows that were added to it, as JSON values.

    Parameters
    ----------
    earlier
        Sums over the earlier rows.
    new
        Moments of the new ones.

    Returns
    -------
    info : dict
        ``rows``, and ``trace_error`` by variable: that over the new rows, relative to their trace.

    Warns
    -----
    ToleranceWarning
        If it is above ``tol``, and more than twice that over the earlier rows.
    """
    if any(side.basis.partition is not None for side in earlier.sides):
        return {"rows": new.n_rows}  # partitions of unity leave no trace
    tol, sums = float(earlier.about["tol"]), (earlier.moments, new, earlier.moments + new)
    before, now, total = (moments.means().trace_error for moments in sums)
    for i, (variable, side) in enumerate(zip("xy", earlier.sides, strict=False)):
        if now[i] > _WORSE * max(before[i], tol):
            warn(
                f"{variable}: trace error {now[i]:.2e} over the new rows at rank "
                f"{side.basis.rank}, {total[i]:.2e} over all rows, tol is {tol:g}: the pivots, "
                "which are those of the first rows, do not span the new ones; to choose them anew, "
                "fit earlier and new rows together",
                ToleranceWarning,
            )
    errors = {v: float(error) for v, error in zip("xy", now, strict=False)}
    return {"rows": new.n_rows, "trace_error": errors}


def functions_of_first_call(
    known: Mapping[str, Function], given: FunctionsLike | None
) -> dict[str, Function]:
    """The functions of the first call; DataError if others are given by name.

    One that is given again takes the place of what a pickle could not hold.
    """
    named = by_name(given)
    check_same_names(known, named)
    return {
        name: named.get(name, function) if isinstance(function, LocalFunction) else function  # type: ignore[misc] # text is parsed later
        for name, function in known.items()
    }


def check_same_names(known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """DataError if functions are given, and not by the names of the first call."""
    if given and set(given) != set(known):
        raise different_functions(known, given)


def different_functions(known: Mapping[str, Any], given: Mapping[str, Any]) -> DataError:
    """Other functions than those of the fit."""
    names, others = (", ".join(map(repr, each)) or "none" for each in (known, given))
    return DataError(
        f"the model was fitted with the functions {names}, given are {others}: give the same "
        "ones, or none"
    )


def on_columns(sample: Sample, columns: Sequence[Columns]) -> Sample:
    """The rows with the columns of a fit: by name, or by position where they have no names.

    Raises
    ------
    DataError
        If columns are missing, or their labels or units are other ones.
    """
    selected: list[Sequence[str] | None] = []
    for variable, result, known in zip("xy", sample.columns, columns, strict=False):
        default, ours = (
            Columns.default(variable, len(columns.names)).names for columns in (result, known)
        )
        unnamed, same = result.names == default, len(result.names) == len(known.names)
        # Default names of an array of another width mean other columns.
        named = set(known.names) <= set(result.names) and (same or known.names != ours)
        if not named and not (unnamed and same):
            raise DataError(
                f"the fit had columns {known.listed()} of {variable}, these rows have "
                f"{result.listed()}: give the same ones"
            )
        selected.append(known.names if named and result.names != known.names else None)
        for name, mine in zip(known.names, known.names if named else result.names, strict=True):
            _check_alike(name, known, mine, result)
    return replace(sample.select(*selected), columns=tuple(columns))


def _check_alike(name: str, known: Columns, mine: str, given: Columns) -> None:
    """DataError if a column has other labels than in the fit, or is in another unit."""
    if given.categories.get(mine) != known.categories.get(name):
        labels = [
            columns.labels(column) if column in columns.categories else "numbers"
            for column, columns in ((mine, given), (name, known))
        ]
        raise DataError(
            f"the labels of column {name!r} are {labels[0]}, in the fit they were {labels[1]}: "
            "code them alike"
        )
    units = given.units.get(mine), known.units.get(name)
    if all(units) and units[0] != units[1]:
        raise DataError(
            f"column {name!r} is in {units[0]}, in the fit it was in {units[1]}: convert it"
        )
