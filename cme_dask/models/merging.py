"""The model of a union of rows, from the sums that joint models hold."""

import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Self

import numpy as np
from scipy.linalg import solve_triangular

from cme_dask.constraints import Constraint, parse
from cme_dask.data.columns import Columns
from cme_dask.errors import DataError, StoreError, remedy
from cme_dask.models import load_only
from cme_dask.models.assembly import Component, assemble, solve_by_fold
from cme_dask.models.joint import JointModel, Variable
from cme_dask.numerics.cells import CellReduction, CellSums
from cme_dask.numerics.moments import FeatureBlock, Function, MomentSums
from cme_dask.numerics.problem import JointSolver, Regularization

# Sums over rows that a joint model is made of: out of a model, and into one


Array = Any


@dataclass(frozen=True)
class Named:
    """A declared function of a saved model, of which the name is known."""

    name: str

    def __call__(self, rows: Array) -> Array:
        """DataError: its values are not."""
        raise DataError(f"function {self.name!r} of a saved model is known by its name: give it")


@dataclass(frozen=True, eq=False)
class FitSums:
    """Sums over a set of rows, of which a model is made; those of disjoint sets add.

    Attributes
    ----------
    columns
        Of each variable.
    sides
        Bases, functions and shifts of the moments; of saved models, functions are mere names.
    moments
        By fold.
    specs, cells
        Cells of x and of y, and the sums over their rows in one fold; empty without laws.
    about
        What a model says of its fit.
    """

    columns: tuple[Columns, ...]
    sides: tuple[FeatureBlock, ...]
    moments: MomentSums
    specs: tuple[CellReduction, ...]
    cells: tuple[CellSums, ...]
    about: dict[str, Any]

    @property
    def next_row(self) -> int:
        """The number after those of these rows, which may have gaps."""
        return max(int(self.about.get("next_row", 0)), self.moments.n_rows)

    @property
    def solver(self) -> Any:
        """What turned the moments into a solution, where trials of the arithmetic need it."""
        return None


@dataclass(frozen=True, eq=False)
class JointSums(FitSums):
    """Sums over a set of rows, of which a joint model is made."""

    columns: tuple[Columns, Columns]
    sides: tuple[FeatureBlock, FeatureBlock]

    @classmethod
    def of(cls, model: JointModel) -> Self:
        """Those of a model.

        Raises
        ------
        DataError
            If the model does not hold them.
        """
        _check_adds(model)
        x, y, laws = model.x, model.y, model.y.cells is not None
        moments = model.moment_sums()
        weight = moments.means().weight
        sides = [
            _side(here, other.answers.names, shift)
            for here, other, shift in zip((x, y), (y, x), moments.shifts, strict=True)
        ]
        specs = tuple(_spec(v, side) for v, side in zip((x, y), sides, strict=True) if laws)
        cells = tuple(
            spec.sums(v.cells, weight)
            for spec, v in zip(specs, (x, y), strict=False)
            if v.cells is not None
        )
        return cls((x.columns, y.columns), (sides[0], sides[1]), moments, specs, cells, model.about)

    @property
    def weight(self) -> float:
        """Sum of the weights of the rows."""
        return float(self.moments.weights.sum())

    @property
    def merged(self) -> list[str]:
        """Digests of the sums that were added up to these, of themselves where none were.

        Raises
        ------
        StoreError
            If a file has something else in their place.
        """
        parts = self.about.get("merged")
        if parts is None:
            return [hashlib.blake2b(self.moments.gram.tobytes(), digest_size=8).hexdigest()]
        if not (isinstance(parts, list) and all(isinstance(part, str) for part in parts)):
            raise StoreError(
                "the model's list of what it was merged from is damaged: restore it or fit it again"
            )
        return parts

    @property
    def solver(self) -> JointSolver:
        """From moments to a solution, under the constraint of the fit."""
        return JointSolver(self.constraint, self.reg)

    @property
    def constraint(self) -> Constraint:
        """Of the fit."""
        return parse(self.about.get("constraint_options", self.about["constraint"]))

    @property
    def reg(self) -> Regularization:
        """The ridge of the fit."""
        (y, x), form = self.about["reg"], self.about["reg_form"]
        return Regularization.parse(y if form == "single" else (y, x), form, self.constraint)

    def solved(self, convergence: str = "raise", **info: Any) -> tuple[JointModel, Component]:
        """The model of these rows, and what it was made of.

        Parameters
        ----------
        convergence
            ``"raise"`` or ``"warn"`` where a solver misses its tolerance.
        info
            What else the model says of its fit.

        Raises
        ------
        ConvergenceError
            If a solver missed its tolerance.
        DataError
            If the constraint takes a pass over the rows.
        """
        constraint = self.constraint
        self._check_bounds(constraint)
        rows = [self._retained_rows(i) for i in (0, 1)]
        solver = self.solver.on([side.basis for side in self.sides], rows)
        component = solve_by_fold(self.moments, self.sides, solver, convergence)
        laws = [spec.statistics(sums) for spec, sums in zip(self.specs, self.cells, strict=True)]
        points = [(each.means, each.masses) for each in laws]
        # Conformity scores are those of laws of fewer rows, and of refits of these; values of y are
        # those of fewer rows.
        earlier = "conformal", "support"
        known = {key: value for key, value in self.about.items() if key not in earlier}
        metadata = known | info
        model = assemble([component], self.moments, laws, self.columns, points, metadata)
        return model, component

    def on_sides(self, sides: tuple[FeatureBlock, FeatureBlock]) -> MomentSums:
        """The moments on bases with the same pivots and with the shifts of these sides.

        N = R^-1 k(p, .) may have another factor R, whose last bits depend on the kind of processor.
        """
        changes = {
            name: solve_triangular(other.basis.factor, mine.basis.factor, lower=True)
            for name, mine, other in zip("xy", self.sides, sides, strict=True)
            if not np.array_equal(mine.basis.factor, other.basis.factor)
        }
        return self.moments.changed(changes, [side.shift for side in sides])

    def _retained_rows(self, i: int) -> Array:
        """Rows that were retained of the cells of variable ``i``, in random order."""
        if not self.cells:
            return np.empty((0, len(self.columns[i].names)))
        retained = self.cells[i].bottom
        return retained.rows[np.argsort(retained.hashes, kind="stable")]

    def _check_bounds(self, constraint: Constraint) -> None:
        if constraint.bounds == "observed":
            raise DataError(
                "bounds that are observed over all rows take a pass over them: fit with "
                + remedy(
                    "Certified(bounds='analytic') or Certified(bounds='sample')",
                    "--constraint certified,bounds=analytic or certified,bounds=sample",
                )
                + ", or fit all rows at once"
            )
        if constraint.bounds == "sample" and not self.cells:
            raise DataError(
                "bounds='sample' are taken from rows kept of the cells, and this model has none: "
                "fit with support_size of at least 1"
            )


def _check_adds(model: JointModel) -> None:
    """DataError unless sums over the rows are all that the model is made of."""
    if len(model.x.ranks) > 1:
        raise DataError(
            "this model is a mean of several, and cannot take more rows or be merged: "
            + remedy(
                "fit with tuning=Tuning(averaged=1), or make the first fit with partial_fit",
                "fit without --averaged, or with --growing",
            )
        )
    if model.residual is not None:
        given = model.about.get("residual", {}).get("decided") == "given"
        without = "without location=" if given else "with residual=False"
        raise DataError(
            "this model has a location model, which depends on all rows, so that "
            "residuals of different parts don't add up: fit "
            + remedy(without, "with --growing" + (" and without --location" if given else ""))
        )


def _side(here: Variable, names: Sequence[str], shift: Array) -> FeatureBlock:
    """The side of a variable, whose columns and functions have these names."""
    (basis,) = here.basis.parts
    functions: dict[str, Function] = {n: Named(n) for n in names[len(here.columns.names) :]}
    return FeatureBlock(basis.newton, here.columns.names, functions, shift)


def _spec(variable: Variable, side: FeatureBlock) -> CellReduction:
    """The cells of a variable; bounds of the rows that are kept belong to passes."""
    assert variable.cells is not None
    support, basis = variable.cells.support, side.basis
    return CellReduction(
        support,
        np.zeros(support.size, dtype=np.uint64),
        side.functions,
        basis.partition,
    )


# The model of a union of rows, from the models of its parts: moments and sums by cell add


def merge(models: Iterable[JointModel | str | os.PathLike[str]]) -> JointModel:
    """The model of all rows, from models of disjoint sets of rows with the same pivots.

    Moments and sums by cell add, so that the model is, to rounding, the one that a fit to the union
    with these pivots and cells makes: its solution under the constraint, its answers with their
    standard errors, and the masses, means and covariances of its laws. The rows retained in the
    cells are a random sample of those of the union. The model has the texts of those declared
    events whose texts all models have. No row is read.

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
        If there are none, if they differ (the difference is named), if two have rows of the same
        model in them, or if one is of a kind that does not add up: a mean of several models,
        or one with a location.
    StoreError
        If a stored one is damaged.
    ConvergenceError
        If a solver misses its tolerance.

    Notes
    -----
    Models are known again by digests of their moments, which merged and grown models hold.

    Rows of one store in several parts (``Sample.split``, or ``partial_fit``) have numbers of their
    own: then folds and retained rows are also those of one fit. Rows of different tables have the
    same numbers: folds are then other ones than if all were in one table, as good as those; rows of
    the same number are retained together or not at all. Functions are known by their names, and it
    is not known whether the same name meant the same function.

    Landmarks of ``pointwise`` beyond the pivots, and ranges of ``certified`` with
    ``bounds="sample"``, come from the rows retained in the cells, and the mass that g takes below
    zero from the means of the cells; a fit takes rows of its row sample for both.
    """
    if isinstance(models, (str, os.PathLike)):
        raise DataError(f"merging takes several models or paths, got the one path {models!s}")
    if not isinstance(models, Iterable):
        raise DataError(f"merging takes a list of models or paths, got {type(models).__name__}")
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
        about=_about_union(several),
    )


def _check_distinct(several: Sequence[JointSums]) -> None:
    """DataError if two models have a part in common: its rows would count twice."""
    seen: dict[str, int] = {}
    for number, sums in enumerate(several, start=1):
        shared = [seen[part] for part in sums.merged if part in seen]
        if shared:
            raise DataError(
                f"models {shared[0]} and {number} are of the same rows, or have rows of the same "
                "model in them, which would count twice: give each once"
            )
        seen |= dict.fromkeys(sums.merged, number)


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
        if a.columns[i].imputation != b.columns[i].imputation:
            return f"what fills in missing values of {name} differs"
        if a.columns[i].to_dict() != b.columns[i].to_dict():
            return f"columns of {name} differ ({a.columns[i].listed()}; {b.columns[i].listed()})"
        if a.sides[i].names != b.sides[i].names:
            return (
                f"declared functions of {name} differ ({_listed(a.sides[i].functions)}; "
                f"{_listed(b.sides[i].functions)})"
            )
        one, two = (s.about.get("events", {}).get(name, {}) for s in (a, b))
        other_texts = [n for n in one if n in two and one[n] != two[n]]
        if other_texts:
            n = other_texts[0]
            return f"the declared event {n!r} of {name} differs ({one[n]}; {two[n]})"
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
        if not one.support.equals(two.support):
            return f"cells of {name} differ ({one.support.size} and {two.support.size} of them)"
    if len(a.specs) != len(b.specs):
        return "only one of them has cells"
    return None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _about_union(several: Sequence[JointSums]) -> dict[str, Any]:
    """What the model of the union says of its fit."""
    own = ("tuning", "residual", "new_rows", "missing", "events", "merged")
    described = [each.about for each in several]
    first = {key: value for key, value in described[0].items() if key not in own}
    missing = [metadata["missing"] for metadata in described if "missing" in metadata]
    events = _shared_events([metadata.get("events", {}) for metadata in described])
    merged = {"merged": [part for each in several for part in each.merged]}
    return {
        **first,
        "passes": max(int(metadata["passes"]) for metadata in described),
        "tol": max(float(metadata["tol"]) for metadata in described),
        "arithmetic": ", ".join(
            sorted({str(metadata.get("arithmetic")) for metadata in described})
        ),
        **origin_of_union(described),
        **(merged if len(several) > 1 else {}),
        **({"missing": added_missing(missing)} if missing else {}),
        **({"events": events} if any(events.values()) else {}),
    }


def _shared_events(several: Sequence[dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    """Texts of declared events by variable and name, of the names that have one in every model.

    A function without a text is one of Python, which may be another than the event of its name.
    """
    texts = [{variable: events.get(variable, {}) for variable in "xy"} for events in several]
    return {
        variable: {
            name: text
            for name, text in own.items()
            if all(name in each[variable] for each in texts)
        }
        for variable, own in texts[0].items()
    }


def origin_of_union(several: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Where the rows of the union come from, which part of their table they are, and the next."""
    parts = [metadata.get("part") for metadata in several]
    places = dict.fromkeys(str(metadata.get("location", "unknown")) for metadata in several)
    ends = [metadata["next_row"] for metadata in several if "next_row" in metadata]
    # The same part of several tables stays one; the two sides of a split make the whole.
    alike = all(part == parts[0] for part in parts)
    sides = all(parts) and len({_split_of(part) for part in parts if part}) == 1
    differ = any(metadata.get("parts_differ") for metadata in several) or not (alike or sides)
    return {
        "location": "; ".join(places),
        **({"next_row": max(ends)} if ends else {}),
        "part": parts[0] if alike else None,
        **({"parts_differ": True} if differ else {}),
    }


def added_missing(several: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What fits of disjoint rows say of their missing values, added up."""
    columns: dict[str, int] = {}
    for each in several:
        for name, count in each["columns"].items():
            columns[name] = columns.get(name, 0) + int(count)
    rows = sum(int(each["rows"]) for each in several)
    return {**several[0], "rows": rows, "columns": columns}


def _split_of(part: dict[str, Any]) -> tuple[Any, ...]:
    """The split that a part is a side of."""
    return tuple(value for name, value in sorted(part.items()) if name != "held_out")
