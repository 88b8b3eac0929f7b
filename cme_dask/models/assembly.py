"""The last step of a fit, and of merging: the frozen model, from moments and coefficients."""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import block_diag

from cme_dask.data.columns import Columns
from cme_dask.display import brief_repr
from cme_dask.kernels.lapack import singular_vectors
from cme_dask.models.answers import ConditionalExpectation
from cme_dask.models.events import Event
from cme_dask.models.joint import JointModel, Variable
from cme_dask.models.spectra import spectra_of
from cme_dask.numerics.basis import LinearBasis, StackedBasis
from cme_dask.numerics.cells import CellStatistics
from cme_dask.numerics.moments import FeatureBlock, Moments, MomentSums
from cme_dask.numerics.problem import JointSolution, JointSolver, Replicates, replicates

Array = Any


class Component(NamedTuple):
    """A solution that a model is made of; g is the mean over its components.

    Attributes
    ----------
    sides, mean
        Of the moments.
    solution, replicates
        Of all rows, and without one fold each: given x, and given y.
    trace_errors
        Of both bases; None for partitions of unity, which approximate no kernel.
    """

    sides: tuple[FeatureBlock, FeatureBlock]
    mean: Moments
    solution: JointSolution
    replicates: tuple[Replicates, Replicates]
    trace_errors: tuple[float | None, ...]

    def __repr__(self) -> str:
        return brief_repr(self)


def reduced(solution: JointSolution) -> JointSolution:
    """The same density ratio with H diagonal: H = U S V^T, in the bases U^T psi_Y and V^T psi_X.

    So the larger basis has no more functions than the smaller one.
    """
    u, s, vt = singular_vectors(solution.coef)
    return solution._replace(
        coef=np.diag(s),
        transform_x=solution.transform_x @ vt.T,
        transform_y=solution.transform_y @ u,
        eigenvalues_x=(vt**2) @ solution.eigenvalues_x,
        eigenvalues_y=(u**2).T @ solution.eigenvalues_y,
    )


def solve_by_fold(
    moments: MomentSums,
    sides: tuple[FeatureBlock, ...],
    solver: JointSolver,
    convergence: str,
    *,
    whole: JointSolver | None = None,
) -> Component:
    """The solution of all rows and those without one fold each, from the moments.

    Parameters
    ----------
    moments, sides
        Of the rows.
    solver
        From moments to a solution.
    convergence
        ``"raise"`` or ``"warn"`` where it misses its tolerance.
    whole
        The solver for all rows, if it is another one than that of the refits.

    Raises
    ------
    ConvergenceError
        If a solver missed its tolerance, and ``convergence`` is ``"raise"``.
    DataError
        If kernels or ridge don't fit the constraint.
    """
    mean = moments.means()
    solution = (whole or solver).solve(mean, convergence=convergence)
    refits = (  # one after the other, since each holds matrices
        (rest, held, [refit.answer(rest, given, newton=True) for given in (0, 1)])
        for rest, held in moments.split_folds()
        for refit in [solver.solve(rest, solution, convergence)]
    )
    errors = (None, None) if solution.base == 0.0 else mean.trace_error
    x, y = sides
    return Component((x, y), mean, solution, replicates(refits, moments), errors)


def assemble(
    components: Sequence[Component],
    moments: MomentSums,
    cells: Sequence[CellStatistics],
    columns: Sequence[Columns],
    points: Sequence[tuple[Array, Array]],
    metadata: dict[str, Any],
) -> JointModel:
    """The model.

    Parameters
    ----------
    components
        The solution, or several whose density ratios are averaged.
    moments
        Of the first component.
    cells
        Of x and of y; empty where there are no laws.
    columns
        Of x and of y.
    points
        Rows of x and rows of y with their weights, on which the mass of g below zero is
        measured; empty where there are none.
    metadata
        What else the model says of its fit, as JSON values.
    """
    x, y = (_variable(i, components, columns[i], cells[i] if cells else None) for i in (0, 1))
    coef = block_diag(*(component.solution.coef for component in components)) / len(components)
    base = components[0].solution.base
    errors = [
        None if None in result else max(e for e in result if e is not None)
        for result in zip(*(component.trace_errors for component in components), strict=True)
    ]
    described = metadata | {
        "rows": int(moments.rows.sum()),
        "folds": len(moments.rows),
        "trace_error": dict(zip("xy", errors, strict=True)),
        "kkt_residual": max(component.solution.info.kkt_residual for component in components),
        "negative_mass": None,
        "held_out": {
            given: held_out_table(
                components[0].sides[1 - i].names,
                [component.replicates[i] for component in components],
                columns[1 - i].categories,
            )
            for i, given in enumerate("xy")
        },
    }
    texts = {
        key: {n: f.text for n, f in side.functions.items() if isinstance(f, Event) and f.text}
        for key, side in zip("xy", components[0].sides, strict=True)
    }
    if any(texts.values()):  # else those of the metadata, as where saved models are merged
        described["events"] = texts
    if points:
        (rows_x, weights_x), (rows_y, weights_y) = points
        ratio = base + x.basis(rows_x) @ coef.T @ y.basis(rows_y).T
        # What g takes below zero, each variable's weights adding up to one.
        np.minimum(ratio, 0.0, out=ratio)
        described["negative_mass"] = abs(float(weights_x @ ratio @ weights_y))
    names = components[0].sides[1].names  # events that only a search needed come after them
    model = JointModel(x, y, coef, described, moments.to_arrays(len(names)), base)
    if len(components) == 1:
        return model
    return replace(model, spectra=spectra_of([component.mean for component in components]))


def _variable(
    given: int, components: Sequence[Component], columns: Columns, cells: CellStatistics | None
) -> Variable:
    """A variable with the answers given it: means over the components, their bases side by side."""
    names = components[0].sides[1 - given].names
    q, count = len(names), len(components)
    answers = [component.solution.answer(component.mean, given) for component in components]
    folds = [component.replicates[given] for component in components]
    bases = tuple(
        LinearBasis(
            component.sides[given].basis,
            (component.solution.transform_x, component.solution.transform_y)[given],
            (component.solution.eigenvalues_x, component.solution.eigenvalues_y)[given],
        )
        for component in components
    )
    return Variable(
        columns,
        bases[0] if count == 1 else StackedBasis(bases),
        ConditionalExpectation(
            names,  # events that only a search needed come after them
            np.mean([constant[:q] for constant, _ in answers], axis=0),
            np.concatenate([slope[:, :q] for _, slope in answers]) / count,
            np.mean([fold.constant[:, :q] for fold in folds], axis=0),
            np.concatenate([fold.slope[:, :, :q] for fold in folds], axis=1) / count,
        ),
        cells,
    )


def held_out_table(
    names: Sequence[str], folds: Sequence[Replicates], labels: Container[str] = ()
) -> dict[str, dict[str, float]]:
    """JSON table of held-out errors; empty without folds, and without the codes of labels.

    The squared error of a mean of several answers is at most the mean of theirs, which stands here.
    """
    if not len(folds[0].constant):
        return {}
    errors = np.mean([fold.error[: len(names)] for fold in folds], axis=0)
    rows = zip(names, map(float, errors), map(float, folds[0].baseline), strict=False)
    return {
        name: {"error": e, "baseline": b, "skill": 1.0 - e / b if b > 0.0 else 0.0}
        for name, e, b in rows
        if name not in labels
    }
