"""The model of a union of rows, from the models of its parts: moments and sums by cell add."""

import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from cme_dask.errors import DataError, remedy
from cme_dask.models import load_only
from cme_dask.models.joint import JointModel
from cme_dask.models.sums import JointSums
from cme_dask.numerics.cell_sums import CellSums

Array = Any


def merge(models: Iterable[JointModel | str | os.PathLike[str]]) -> JointModel:
    """The model of all rows, from models of disjoint sets of rows with the same pivots.

    Moments and sums by cell add, so that the model is, to rounding, the one that a fit to the union
    with these pivots and cells makes: its solution under the constraint, its answers with their
    standard errors, and the masses, means and covariances of its laws. Rows that were kept of the
    cells are a random sample of the union's. No row is read.

    Parameters
    ----------
    models
        Fitted joint models, or their paths: of the same columns, kernels, pivots, declared
        functions, folds, cells, constraint and ridge. :meth:`JointDistribution.partial_fit` with
        ``like=`` makes such models of other rows.

    Returns
    -------
    JointModel

    Raises
    ------
    DataError
        If there are none, if they differ (the difference is named), or if one is of a kind that
        does not add up: a mean of several models (learned kernels), or one with a residual
        reference.
    StoreError
        If a stored one is damaged.
    ConvergenceError
        If a solver misses its tolerance.

    Notes
    -----
    Rows of one store in several parts (``Sample.split``, or ``partial_fit``) have numbers of their
    own: then folds, and the rows kept, are also those of one fit. Rows of different tables have the
    same numbers: folds are then other ones than if all were in one table, as good as those; rows of
    the same number are kept together or not at all. Functions are known by their names, and it is
    not known whether the same name meant the same function.

    Landmarks of ``pointwise`` beyond the pivots, and ranges of ``certified`` with
    ``bounds="sample"``, come from rows kept of the cells, and the mass that g takes below zero is
    told at the means of the cells; a fit takes rows of its row sample for both.
    """
    if isinstance(models, (str, os.PathLike)):
        raise DataError(f"merging takes several models or paths, got the one path {models!s}")
    several = [JointSums.of(one_model(model)) for model in models]
    total = union(several)
    _check_distinct(several)
    return total.solved()[0]


def union(several: Sequence[JointSums]) -> JointSums:
    """Sums over the union of disjoint sets of rows.

    Parameters
    ----------
    several
        Sums over each.

    Raises
    ------
    DataError
        If there are none, or they are sums of different functions, folds or cells.
    """
    if not several:
        raise DataError("merging takes at least one model, got none")
    first = several[0]
    for number, other in enumerate(several[1:], start=2):
        difference = _difference(first, other)
        if difference is not None:
            raise DataError(
                f"model {number} can't be merged with the first one, {difference}: fit it with "
                "the pivots, cells and parameters of the first, "
                + remedy(
                    "JointDistribution().partial_fit(X, Y, like=first)",
                    "cme-dask grow FIRST STORE --alone",
                )
            )
    weights = [each.weight for each in several]
    sides = tuple(
        replace(side, shift=np.average([s.sides[i].shift for s in several], 0, weights))
        for i, side in enumerate(first.sides)
    )
    moments = reduce(operator.add, (each.on_sides((sides[0], sides[1])) for each in several))
    cells = tuple(
        CellSums.of_union([each.cells[i] for each in several]) for i in range(len(first.cells))
    )
    return replace(
        first,
        sides=(sides[0], sides[1]),
        moments=moments,
        cells=cells,
        about=_about_union([each.about for each in several]),
    )


def _check_distinct(several: Sequence[JointSums]) -> None:
    """DataError if a model is given twice: its rows would count twice."""
    seen: dict[bytes, int] = {}
    for number, sums in enumerate(several, start=1):
        earlier = seen.setdefault(sums.moments.gram.tobytes(), number)
        if earlier != number:
            raise DataError(
                f"models {earlier} and {number} are of the same rows, which would count twice: "
                "give each once"
            )


def one_model(given: Any) -> JointModel:
    """The model that was given, or the one in the file."""
    model = load_only(JointModel, given) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(model, JointModel):
        raise DataError(
            f"merging takes joint models (the model_ of a JointDistribution) or their paths, got "
            f"{type(model).__name__}"
        )
    return model


def _difference(a: JointSums, b: JointSums) -> str | None:
    """The first thing in which two models differ; None if they can be merged."""
    for i, name in enumerate("xy"):
        mine, other = a.sides[i].basis, b.sides[i].basis
        if a.columns[i].to_dict() != b.columns[i].to_dict():
            return f"columns of {name} differ ({a.columns[i].listed()}; {b.columns[i].listed()})"
        if a.sides[i].names != b.sides[i].names:
            return (
                f"declared functions of {name} differ ({_listed(a.sides[i].functions)}; "
                f"{_listed(b.sides[i].functions)})"
            )
        if type(mine) is not type(other) or mine.kernel.to_dict() != other.kernel.to_dict():
            return f"kernels of {name} differ ({mine.kernel!r}; {other.kernel!r})"
        if not np.array_equal(mine.points, other.points):
            return f"pivots of {name} differ ({mine.rank} and {other.rank} of them)"
    parameters: dict[str, Callable[[JointSums], Any]] = {
        "constraints": lambda s: s.constraint,
        "ridges": lambda s: s.reg,
        "numbers of folds": lambda s: s.moments.n_folds,
        "calibrations": lambda s: s.about.get("calibration", {}).get("exponents"),
        "what folds are by": lambda s: s.about.get("fold_by", "rows"),
    }
    for what, of in parameters.items():
        if of(a) != of(b):
            return f"{what} differ ({of(a)}; {of(b)})"
    for name, one, two in zip("xy", a.specs, b.specs, strict=False):
        if not _same_arrays(one.support.to_arrays(), two.support.to_arrays()):
            return f"cells of {name} differ ({one.support.size} and {two.support.size} of them)"
    if len(a.specs) != len(b.specs):
        return "only one of them has cells"
    return None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _same_arrays(a: dict[str, Array], b: dict[str, Array]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def _about_union(several: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the model of the union says of its fit."""
    first = {key: value for key, value in several[0].items() if key not in ("tuning", "residual")}
    parts = [about.get("part") for about in several]
    places = dict.fromkeys(str(about.get("location", "unknown")) for about in several)
    ends = [about["next_row"] for about in several if "next_row" in about]
    # The same part of several tables stays one; the two sides of a split make the whole.
    alike = all(part == parts[0] for part in parts)
    sides = all(parts) and len({_split_of(part) for part in parts if part}) == 1
    differ = any(about.get("parts_differ") for about in several) or not (alike or sides)
    filled = [entry for about in several for entry in about.get("zero_filled", [])]
    return {
        **first,
        "passes": max(int(about["passes"]) for about in several),
        "tol": max(float(about["tol"]) for about in several),
        "arithmetic": ", ".join(sorted({str(about.get("arithmetic")) for about in several})),
        "location": "; ".join(places),
        **({"next_row": max(ends)} if ends else {}),
        "part": parts[0] if alike else None,
        **({"parts_differ": True} if differ else {}),
        **({"zero_filled": filled} if filled else {}),
    }


def _split_of(part: dict[str, Any]) -> tuple[Any, ...]:
    """The split that a part is a side of."""
    return tuple(value for name, value in sorted(part.items()) if name != "held_out")
