"""The last step of a fit: the frozen model, from moments and coefficients."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cme_dask.estimators.solving import Solved
from cme_dask.models.joint import Answers, JointModel, Variable
from cme_dask.numerics.basis import LinearBasis
from cme_dask.numerics.joint import JointSolution
from cme_dask.numerics.means import MeanMoments
from cme_dask.numerics.moments import Moments, Side
from cme_dask.numerics.pointwise import negative_mass
from cme_dask.numerics.validation import Replicates
from cme_dask.storage.priority import RowSample
from cme_dask.storage.sample import Sample

Array = Any

_NEGATIVE_ROWS = 1024


def assemble(
    solved: Solved,
    moments: Moments,
    sides: tuple[Side, Side],
    rows: RowSample,
    sample: Sample,
    about: dict[str, Any],
) -> JointModel:
    """The model.

    Parameters
    ----------
    solved
        The coefficients, and the refits without one fold.
    moments, sides
        Of the pass.
    rows
        The row sample, on which it is told how much mass g takes below zero.
    sample
        Whose columns they are.
    about
        What else the model says of its fit, as JSON values.
    """
    solution, replicates = solved.solution, solved.replicates
    # Partitions of unity approximate no kernel: they have no trace error.
    errors = [None if solution.base == 0.0 else error for error in solved.mean.trace_error]
    described = about | {
        "rows": moments.n_rows,
        "folds": moments.n_folds,
        "trace_error": dict(zip("xy", errors, strict=True)),
        "kkt_residual": solution.kkt_residual,
        "negative_mass": _negative_mass(solution, sides, rows.prefix(_NEGATIVE_ROWS)),
        "location": sample.location,
        "held_out": {
            given: _held_out(sides[1 - i].names, replicates[i]) for i, given in enumerate("xy")
        },
    }
    x, y = (_variable(i, sides, sample, solution, solved.mean, replicates[i]) for i in (0, 1))
    return JointModel(
        x, y, solution.coef, described, moments.to_arrays(), solution.base, sides[1].support
    )


def _negative_mass(solution: JointSolution, sides: tuple[Side, Side], rows: RowSample) -> float:
    """Mass of P_X x P_Y that g takes below zero, over pairs of these rows."""
    x = sides[0].basis(rows.parts[0]) @ solution.transform_x
    y = sides[1].basis(rows.parts[1]) @ solution.transform_y
    ratio = solution.base + x @ solution.coef.T @ y.T
    return negative_mass(ratio, rows.importance, rows.importance)


def _variable(
    given: int,
    sides: tuple[Side, Side],
    sample: Sample,
    solution: JointSolution,
    mean: MeanMoments,
    replicates: Replicates,
) -> Variable:
    transform = (solution.transform_x, solution.transform_y)[given]
    eigenvalues = (solution.eigenvalues_x, solution.eigenvalues_y)[given]
    constant, slope = solution.answer(mean, given)
    answers = Answers(
        sides[1 - given].names, constant, slope, replicates.constant, replicates.slope
    )
    return Variable(
        sample.columns[given], LinearBasis(sides[given].basis, transform, eigenvalues), answers
    )


def _held_out(names: Sequence[str], replicates: Replicates) -> dict[str, dict[str, float]]:
    """JSON table of held-out errors; empty without folds."""
    if not len(replicates.constant):
        return {}
    rows = zip(names, replicates.error, replicates.baseline, replicates.skill, strict=True)
    return {
        name: {
            "error": float(e),
            "baseline": float(b),
            "skill": float(s) if np.isfinite(s) else 0.0,
        }
        for name, e, b, s in rows
    }
