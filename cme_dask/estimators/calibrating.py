"""Laws of refits without each fold, and the calibration of the laws that is learned from them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cme_dask.chunked.blas import one_blas_thread
from cme_dask.errors import DataError
from cme_dask.learning.residual import HeldLaws
from cme_dask.numerics.calibration import (
    HeldRows,
    LearnedCalibration,
    Levels,
    learn_calibration,
)
from cme_dask.numerics.means import MeanMoments
from cme_dask.numerics.validation import held_out_folds

if TYPE_CHECKING:
    from cme_dask.estimators.joint_fit import Fitted, JointFit
    from cme_dask.estimators.planning import Preparation
    from cme_dask.estimators.solving import Solving

Array = Any

CHOICES = ("auto", True, False)

HELD_ROWS = 4000
"""Rows of the row sample at which laws of refits are judged, at most."""


def calibration_choice(
    choice: Any, ready: "Preparation", solving: "Solving", support_size: int, *, learned: bool
) -> str | bool:
    """Whether laws are calibrated: ``auto``, True, or False where they can't be.

    Parameters
    ----------
    choice
        Of the estimator.
    ready, solving, support_size
        Of the fit.
    learned
        Whether kernels are learned.

    Raises
    ------
    DataError
        On another value, or where calibration is asked for and is impossible.
    """
    if not (isinstance(choice, bool) or choice == "auto"):
        raise DataError(f"calibration must be 'auto', True or False, got {choice!r}")
    obstacles = {
        f"constraint='none' or 'normalized', got {solving.constraint.name!r}": (
            solving.constraint.name not in ("none", "normalized")
        ),
        f"n_folds of at least 2, got {ready.choice.n_folds}": ready.choice.n_folds < 2,
        "laws, got support_size=0": support_size == 0,
        "a numeric column of y": all(ready.choice.sample.columns[1].categorical),
    }
    met = [needed for needed, missing in obstacles.items() if missing]
    if choice is True and met:
        raise DataError(f"calibration=True needs {met[0]}: change that, or take calibration='auto'")
    if choice is True:
        return True
    return "auto" if choice and learned and not met else False


def with_calibration(fit: "JointFit", fitted: "Fitted") -> "Fitted":
    """The fit with calibrated laws, if that is asked for and pays.

    Parameters
    ----------
    fit
        The fit that was made.
    fitted
        Its result.
    """
    sides, moments = fitted.sides, fitted.moments
    if not fit.calibration or len(held_out_folds(moments, sides)) < 2:
        return fitted
    with one_blas_thread():
        learned = _learned(fit, fitted)
    if learned is None:
        return fitted
    about = {
        "kept": fit.calibration is True or learned.pays,
        "exponents": learned.calibration.to_list(),
        "gain": learned.gain,
        "std": learned.std if np.isfinite(learned.std) else None,
        "rows": learned.rows,
    }
    described = fitted.model.about | {"calibration": about}
    return replace(fitted, model=replace(fitted.model, about=described))


def _learned(fit: "JointFit", fitted: "Fitted") -> LearnedCalibration | None:
    """The calibration; None if fewer than two folds have rows in the row sample."""
    choice, cells = fit.ready.choice, fitted.model.y.cells
    assert cells is not None
    rows = choice.rows.prefix(HELD_ROWS)
    support = fitted.model.x.basis.newton.support(rows.parts[0])
    at = cells.support.assign(rows.parts[1])
    units = choice.sample.folding.units(rows.index, rows.units)
    folds = [
        HeldRows(laws.weights, at[held], support[held], rows.importance[held], units[held])
        for laws in refitted_laws(fit, fitted)
        if len(held := laws.held)
    ]
    if len(folds) < 2:
        return None
    labels = choice.sample.columns[1].categorical
    columns = [j for j, categorical in enumerate(labels) if not categorical]
    return learn_calibration(folds, cells.means, columns)


def refitted_laws(fit: "JointFit", fitted: "Fitted") -> Iterator[HeldLaws]:
    """Laws of refits without each fold, at the rows of the fold in the row sample.

    They are calibrated as those of the model are.
    """
    choice, model = fit.ready.choice, fitted.model
    rows = choice.rows.prefix(HELD_ROWS)
    folds = rows.folds(choice.sample.folding, choice.n_folds)
    cells, masses, calibration = model.y.cells, fitted.masses, model.calibration
    assert cells is not None
    assert masses is not None
    points = cells.support.points
    members = [
        (sides, moments, reg, kept, sides[0].basis(rows.parts[0]), sides[1].basis(points))
        for sides, moments, reg, kept in averaged(fit, fitted)
    ]
    levels = None if calibration is None else Levels(cells.means, calibration.columns)
    for fold in held_out_folds(members[0][1], members[0][0]):
        held = np.flatnonzero(folds == fold)
        ratio = np.zeros((len(held), len(points)))
        for sides, moments, reg, kept, left, right in members:
            solver = replace(fit.solving, reg=reg).solver(sides, choice.rows)
            found = solver(MeanMoments.of(moments.without(fold), sides)).shrunk(kept)
            given = left[held] @ found.transform_x @ found.coef.T
            ratio += found.base + given @ (right @ found.transform_y).T
        rest = masses.sum(axis=0) - masses[fold]
        calibrated = None
        if calibration is not None and levels is not None:
            support = model.x.basis.newton.support(rows.parts[0][held])
            calibrated = partial(calibration.weights, levels=levels, support=support)
        yield HeldLaws(held, ratio / len(members), rest / rest.sum(), cells.means, calibrated)


def averaged(fit: "JointFit", fitted: "Fitted") -> list[tuple[Any, Any, Any, float]]:
    """Sides, moments, ridge and share kept of the models whose ratios are averaged."""
    if not fitted.members:
        return [(fitted.sides, fitted.moments, fit.solving.reg, 1.0)]
    return [(m.part.sides, m.moments, m.candidate.reg, m.kept) for m in fitted.members]
