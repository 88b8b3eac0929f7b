"""Sums over rows that a joint model is made of: out of a model, and into one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from scipy.linalg import solve_triangular

from cme_dask.constraints import Certified, Constraint, parse
from cme_dask.errors import DataError, remedy
from cme_dask.models.assembly import Part, assemble
from cme_dask.models.joint import JointModel, Variable
from cme_dask.numerics.basis import Basis, LinearBasis
from cme_dask.numerics.cell_sums import CellSpec, CellSums
from cme_dask.numerics.geometry import Geometry
from cme_dask.numerics.joint import JointSolver
from cme_dask.numerics.moments import Function, Moments, Side
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.problem import Regularization
from cme_dask.storage.columns import Columns

Array = Any


@dataclass(frozen=True)
class Named:
    """A declared function of a saved model, of which the name is known."""

    name: str

    def __call__(self, rows: Array) -> Array:
        """DataError: its values are not."""
        raise DataError(f"function {self.name!r} of a saved model is known by its name: give it")


@dataclass(frozen=True, eq=False)
class JointSums:
    """Sums over a set of rows, of which a joint model is made; those of disjoint sets add.

    Attributes
    ----------
    columns
        Of x and of y.
    sides
        Bases, functions and shifts of the moments; of saved models, functions are mere names.
    moments
        By fold.
    specs, cells
        Cells of x and of y, and the sums over their rows in one fold; empty without laws.
    about
        What a model says of its fit.
    """

    columns: tuple[Columns, Columns]
    sides: tuple[Side, Side]
    moments: Moments
    specs: tuple[CellSpec, ...]
    cells: tuple[CellSums, ...]
    about: dict[str, Any]

    @classmethod
    def of(cls, model: JointModel) -> Self:
        """Those of a model.

        Raises
        ------
        DataError
            If the model does not hold them.
        """
        _check_adds(model)
        moments = Moments.from_arrays(model.moments)
        total = moments.total().gram[0]
        start = sum(v.basis.newton.rank for v in (model.x, model.y))
        weight, sums = float(total[start, start]), total[start, start + 1 :]
        x, y, laws = model.x, model.y, model.y.cells is not None
        sides = [
            _side(here, other, model.base, mean / weight)
            for here, other, mean in (
                (x, y, sums[: len(y.answers.names)]),
                (y, x, sums[len(y.answers.names) :]),
            )
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
        one = sum(side.basis.rank for side in self.sides)
        return float(self.moments.gram[:, one, one].sum())

    @property
    def constraint(self) -> Constraint:
        """Of the fit."""
        return parse(self.about.get("constraint_options", self.about["constraint"]))

    @property
    def reg(self) -> Regularization:
        """The ridge of the fit."""
        y, x = self.about["reg"]
        return Regularization(float(y), float(x), self.about["reg_form"])

    def solved(self, convergence: str = "raise", **told: Any) -> tuple[JointModel, Part]:
        """The model of these rows, and what it was made of.

        Parameters
        ----------
        convergence
            ``"raise"`` or ``"warn"`` where a solver misses its tolerance.
        told
            What else the model says of its fit.

        Raises
        ------
        ConvergenceError
            If a solver missed its tolerance.
        DataError
            If the constraint takes a pass over the rows.
        """
        constraint = self.constraint
        if isinstance(constraint, Certified) and constraint.bounds != "analytic":
            self._check_bounds(constraint)
        bases = [side.basis for side in self.sides]
        rows = [self._kept_rows(i) for i in (0, 1)]
        solver = JointSolver(constraint, self.reg, Geometry.of(constraint, bases, rows))
        part = Part.solved(self.moments, self.sides, solver, convergence)
        laws = [spec.cells(sums) for spec, sums in zip(self.specs, self.cells, strict=True)]
        points = [(each.means, each.masses) for each in laws]
        about = self.about | told
        return assemble([part], self.moments, laws, self.columns, points, about), part

    def extended(self, bases: Sequence[Basis]) -> Self:
        """With zeros for the moments of functions that these bases have beyond the present ones.

        Their first functions are the present ones. See :func:`zero_filled`.
        """
        old = [side.basis.rank for side in self.sides]
        new = [basis.rank for basis in bases]
        rest = self.moments.gram.shape[1] - sum(old)
        where = np.concatenate(
            [
                np.arange(old[0]),
                new[0] + np.arange(old[1]),
                sum(new) + np.arange(rest),
            ]
        )
        gram = np.zeros((self.moments.n_folds, sum(new) + rest, sum(new) + rest))
        gram[:, where[:, None], where] = self.moments.gram
        x, y = (replace(s, basis=b) for s, b in zip(self.sides, bases, strict=True))
        return replace(self, sides=(x, y), moments=replace(self.moments, gram=gram))

    def on_sides(self, sides: tuple[Side, Side]) -> Moments:
        """The moments on bases with the same pivots and with the shifts of these sides.

        The rows a = [N_X, N_Y, 1, f - shift] become T a: N = R^-1 k(p, .) with another factor R,
        whose last bits depend on the kind of processor, and f - shift with another shift.
        """
        gram = self.moments.gram.copy()
        start = 0
        for mine, other in zip(self.sides, sides, strict=True):
            here = slice(start, start + mine.basis.rank)
            if not np.array_equal(mine.basis.factor, other.basis.factor):
                change = solve_triangular(other.basis.factor, mine.basis.factor, lower=True)
                gram[:, here] = change @ gram[:, here]
                gram[:, :, here] = gram[:, :, here] @ change.T
            start += mine.basis.rank
        moved = np.concatenate([s.shift for s in self.sides]) - np.concatenate(
            [s.shift for s in sides]
        )
        gram[:, start + 1 :] += moved[:, None] * gram[:, start : start + 1]
        gram[:, :, start + 1 :] += gram[:, :, start : start + 1] * moved
        return replace(self.moments, gram=gram)

    def _kept_rows(self, i: int) -> Array:
        """Rows that were kept of the cells of variable ``i``, in random order."""
        if not self.cells:
            return np.empty((0, len(self.columns[i].names)))
        kept = self.cells[i].kept
        return kept.rows[np.argsort(kept.hashes, kind="stable")]

    def _check_bounds(self, constraint: Certified) -> None:
        if constraint.bounds == "observed":
            raise DataError(
                "bounds that are observed over all rows take a pass over them: fit with "
                + remedy(
                    "Certified(bounds='analytic') or Certified(bounds='sample')",
                    "--constraint certified,bounds=analytic or certified,bounds=sample",
                )
                + ", or fit all rows at once"
            )
        if not self.cells:
            raise DataError(
                "bounds='sample' are taken from rows kept of the cells, and this model has none: "
                "fit with support_size of at least 1"
            )


def zero_filled(sums: JointSums, i: int, functions: int) -> dict[str, Any]:
    r"""What is known of moments of variable ``i`` that are filled with zeros, as JSON values.

    A new Newton function is orthogonal to the present ones in H, so that at each row its square is
    at most the residual k(z, z) - |N(z)|^2, and by Cauchy-Schwarz

    .. math:: |E[N_\mathrm{new} \psi_i]| \le \sqrt{\rho \lambda_i}, \quad
              |E[N_\mathrm{new} N_\mathrm{new}']| \le \rho, \quad
              \rho = \mathrm E[k(z, z) - |N(z)|^2]

    over the rows whose moments are filled.

    Parameters
    ----------
    sums
        Over these rows, before they are extended.
    i
        0 for x, 1 for y.
    functions
        Number of new functions.

    Returns
    -------
    about : dict
        ``variable``, ``functions``, ``rows`` and ``weight`` of these rows, ``residual`` rho in
        units of k, and ``bound`` sqrt(rho max lam) of |E[N_new psi_i]|, over these rows.
    """
    part = sums.moments.total()
    start = (0, sums.sides[0].basis.rank)[i]
    here = slice(start, start + sums.sides[i].basis.rank)
    gram = part.gram[0][here, here] / sums.weight
    residual = max(float(part.traces[0, i]) / sums.weight - float(np.trace(gram)), 0.0)
    largest = float(np.linalg.eigvalsh(gram)[-1])
    for entry in sums.about.get("zero_filled", []):  # what zeros of before may hide of lam
        if entry["variable"] == "xy"[i]:
            share = entry["weight"] / sums.weight
            largest += share * (entry["residual"] + entry["bound"])
    return {
        "variable": "xy"[i],
        "functions": functions,
        "rows": part.n_rows,
        "weight": sums.weight,
        "residual": residual,
        "bound": float(np.sqrt(residual * largest)),
    }


def _check_adds(model: JointModel) -> None:
    """DataError unless sums over the rows are all that the model is made of."""
    if not model.moments:
        raise DataError(
            "this model is a mean of several, as models with learned kernels are; sums over rows "
            "don't make it: fit with "
            + remedy(
                "kernel_x, kernel_y and reg given, such as those of the best one, "
                "members_[0].candidate",
                "--growing",
            )
        )
    if model.residual is not None:
        raise DataError(
            "this model has a residual reference, whose location depends on all rows, so that "
            "residuals of different parts don't add up: fit with "
            + remedy("residual=False", "--growing")
        )
    cells = [v.cells for v in (model.x, model.y)]
    if any(c is not None and c.drawn is None for c in cells) or (cells[0] is None) != (
        cells[1] is None
    ):
        raise DataError(
            "the cells of this model don't tell how their rows were drawn, since it was saved by "
            "an older version: fit it again"
        )


def _side(here: Variable, other: Variable, base: float, mean: Array) -> Side:
    """The side of a variable, whose functions the other one answers for.

    Constants of these answers are shift + mean, and the shift alone for partitions of unity.
    """
    assert isinstance(here.basis, LinearBasis)
    names, constant = other.answers.names, other.answers.constant
    functions: dict[str, Function] = {n: Named(n) for n in names[len(here.columns.names) :]}
    shift = constant - mean if base else constant
    return Side(here.basis.newton, here.columns.names, functions, shift)


def _spec(variable: Variable, side: Side) -> CellSpec:
    """The cells of a variable; bounds of the rows that are kept belong to passes."""
    assert variable.cells is not None
    support, basis = variable.cells.support, side.basis
    return CellSpec(
        support,
        np.zeros(support.size, dtype=np.uint64),
        side.functions,
        basis if isinstance(basis, PartitionBasis) else None,
    )
