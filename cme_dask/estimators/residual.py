"""The step of a fit that tries a residual reference: a location, a second pass, a decision."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cme_dask.chunked.blas import one_blas_thread
from cme_dask.chunked.progress import StepBegan
from cme_dask.errors import DataError, remedy
from cme_dask.estimators.calibrating import HELD_ROWS, averaged, refitted_laws
from cme_dask.estimators.joint_fit import Fitted, JointFit
from cme_dask.estimators.planning import RESIDUAL_FINALISTS, Preparation
from cme_dask.estimators.recipe import choose_kernel
from cme_dask.estimators.solving import Solving
from cme_dask.estimators.tuned import search_kernels
from cme_dask.learning.candidates import Tuning
from cme_dask.learning.residual import (
    Gain,
    HeldLaws,
    held_out_crps,
    paired_gain,
    screened_laws,
)
from cme_dask.models.residual import Residual
from cme_dask.numerics.location import FittedLocation, fit_location
from cme_dask.numerics.validation import held_out_folds

Array = Any

CHOICES = ("auto", True, False)

DISTINCT = 20
"""A column of y with no more distinct values is taken for discrete."""

_SKILL = 0.01  # share of its variance that a location must explain in some column of y
_SCREENED_ROWS = 2048
_SCREENED_RANK = 100
_EVALUATIONS = 20  # of the second search


def residual_wanted(
    wanted: Any, ready: Preparation, solving: Solving, support_size: int, *, learned: bool
) -> str | bool:
    """Whether a residual reference is tried: ``auto``, True, or False where there can be none.

    Parameters
    ----------
    wanted
        Of the estimator.
    ready, solving, support_size
        Of the fit.
    learned
        Whether kernels are learned: one who gives them says what is to be fitted, in one pass.

    Raises
    ------
    DataError
        On another value, or where one is asked for and there can be none.
    """
    if not (isinstance(wanted, bool) or wanted == "auto"):
        raise DataError(f"residual must be 'auto', True or False, got {wanted!r}")
    columns, y = ready.choice.sample.columns[1], ready.choice.rows.parts[1]
    obstacles = {
        f"constraint='none' or 'normalized', got {solving.constraint.name!r}": (
            solving.constraint.name not in ("none", "normalized")
        ),
        f"{remedy('n_folds', '--folds')} of at least 2, got {ready.choice.n_folds}": (
            ready.choice.n_folds < 2
        ),
        "laws, got support_size=0": support_size == 0,
        f"numeric columns of y, got labels in {', '.join(map(repr, columns.categories))}": bool(
            columns.categories
        ),
    }
    met = [needed for needed, missing in obstacles.items() if missing]
    if wanted is True and met:
        needs = remedy("residual=True", "--residual yes")
        auto = remedy("residual='auto'", "--residual auto")
        raise DataError(f"{needs} needs {met[0]}: change that, or take {auto}")
    if wanted is True:
        return True
    discrete = any(len(np.unique(column)) <= DISTINCT for column in y.T)
    return "auto" if wanted and learned and not met and not discrete else False


def with_residual(fit: JointFit, fitted: Fitted) -> Fitted:
    """The fit with a residual reference, if one is wanted and pays.

    One more pass is made, unless the location explains nothing, or refits on the row sample gain
    less than one standard error.

    Parameters
    ----------
    fit
        The fit that was made.
    fitted
        What it found.
    """
    auto = fit.residual == "auto"
    sides, moments, _, _ = averaged(fit, fitted)[0]
    if not fit.residual or (auto and not held_out_folds(moments, sides)):
        return fitted
    progress = fit.ready.choice.progress
    if progress is not None:
        progress(StepBegan("location"))
    with one_blas_thread():
        location = _location(fit, fitted)
    about: dict[str, Any] = {
        "kept": False,
        "decided": "location",
        "skill": location.skill.tolist(),
        "ridge": location.ridges.tolist(),
        "coordinates": "raw" if fit.scores is None else str(fit.scores),
    }
    if auto and location.skill.max() < _SKILL:
        return _told(fitted, about)
    second = _second_fit(fit, location)
    if auto and not fit.ready.choice.rows.complete:
        with one_blas_thread():
            gain = _screened_gain(fit, fitted, second, location)
        about |= {"decided": "row sample", **_figures(gain)}
        if not gain.pays:
            return _told(fitted, about)
    found = second.run()
    if progress is not None:
        progress(StepBegan("decision"))
    with one_blas_thread():
        gain = _final_gain(fit, fitted, second, found, location)
    kept = gain.pays or not auto
    about |= {"kept": kept, "decided": "all rows", **_figures(gain)}
    residuals = location.residuals
    reference = Residual(residuals.location, found.model, residuals.coordinates)
    return _told(fitted, about, found.passes, reference if kept else None)


def _told(
    fitted: Fitted, about: dict[str, Any], passes: int = 0, residual: Residual | None = None
) -> Fitted:
    passes += fitted.passes
    described = fitted.model.about | {"residual": about, "passes": passes}
    return replace(
        fitted,
        model=replace(fitted.model, about=described, residual=residual),
        passes=passes,
    )


def _figures(gain: Gain) -> dict[str, Any]:
    return {
        "crps": [gain.plain, gain.residual],
        "gain": gain.gain,
        "std": gain.std if np.isfinite(gain.std) else None,
        "rows": gain.rows,
    }


def _location(fit: JointFit, fitted: Fitted) -> FittedLocation:
    """The location that explains most of unseen rows, among those on the bases of the members."""
    columns = len(fitted.sides[1].columns)
    first = 0 if fit.scores is None else len(fitted.sides[1].names)
    here = slice(first, first + columns)
    x = fit.ready.choice.rows.parts[0]
    # Codes of labels have no trend: an empty range.
    labels = np.array(fit.ready.choice.sample.columns[0].categorical)
    within = np.where(labels, 0.0, x.min(axis=0)), np.where(labels, 0.0, x.max(axis=0))
    found = (
        fit_location(moments, sides, here, fit.scores, within=within)
        for sides, moments, _, _ in averaged(fit, fitted)
    )
    return max(found, key=lambda each: float(each.skill.sum()))


def _second_fit(fit: JointFit, location: FittedLocation) -> JointFit:
    """The same fit of x and e."""
    choice, solving, found = fit.ready.choice, fit.solving, None
    sample = choice.sample.with_residuals(location.residuals, choice.rows)
    assert sample.row_sample is not None
    given = [p if not isinstance(p, str) else "sampled" for p in choice.wanted]
    choice = replace(
        choice,
        sample=sample,
        rows=sample.row_sample,
        wanted=(given[0], "sampled"),
        names=("x", "the residual of y"),
    )
    kernels = list(fit.ready.kernels)
    if fit.found is None:
        kernels[1] = choose_kernel(None, choice.rows, 1, sample.columns[1], "kernel_y")
    ready = Preparation(choice, kernels, 0, 0.0)
    if fit.found is not None:
        learned = fit.found.finalists[0].trial.x.form != "given"
        found = search_kernels(
            ready,
            (None if learned else kernels[0], None),
            None,
            None if fit.learn_reg else solving.reg,
            _quick(fit.tuning),
            fit.tolerance.value,
            fit.seed,
        )
        best = found.finalists[0]
        ready = replace(ready, kernels=[best.kernel_x, best.kernel_y])
        solving = replace(solving, reg=replace(best.reg, form=solving.reg.form))
    return replace(
        fit, ready=ready, solving=solving, found=found, functions=(None, None), residual=False
    )


def _quick(tuning: Tuning) -> Tuning:
    """A shorter search: little of x is left in residuals, and their functions are not declared."""
    return replace(
        tuning,
        criterion="auto" if tuning.criterion == "validation" else tuning.criterion,
        evaluations=min(
            _EVALUATIONS, _EVALUATIONS if tuning.evaluations is None else tuning.evaluations
        ),
        finalists=min(RESIDUAL_FINALISTS, tuning.finalists),
    )


def _screened_gain(
    fit: JointFit, fitted: Fitted, second: JointFit, location: FittedLocation
) -> Gain:
    """The gain of refits on a part of the row sample."""
    rows = fit.ready.choice.rows.prefix(_SCREENED_ROWS)
    moved = second.ready.choice.rows.prefix(_SCREENED_ROWS)
    choice = fit.ready.choice
    folds = rows.folds(choice.sample.folding, choice.n_folds)
    laws = [
        screened_laws(
            (one.ready.kernels[0], one.ready.kernels[1]),
            one.solving.reg,
            (part[0], part[1]),
            rows.importance,
            folds,
            fit.tolerance.value,
            _SCREENED_RANK,
        )
        for one, part in ((fit, rows.parts), (second, moved.parts))
    ]
    return _gain(fit, fitted, location, laws[0], laws[1], _SCREENED_ROWS)


def _final_gain(
    fit: JointFit, fitted: Fitted, second: JointFit, found: Fitted, location: FittedLocation
) -> Gain:
    """The gain of refits from all rows, at rows of the row sample."""
    plain, moved = refitted_laws(fit, fitted), refitted_laws(second, found)
    return _gain(fit, fitted, location, plain, moved, HELD_ROWS)


def _gain(
    fit: JointFit,
    fitted: Fitted,
    location: FittedLocation,
    plain: Iterator[HeldLaws],
    moved: Iterator[HeldLaws],
    size: int,
) -> Gain:
    choice, residuals = fit.ready.choice, location.residuals
    rows, folding = choice.rows.prefix(size), choice.sample.folding
    x, y = rows.parts
    share = rows.importance
    # In the coordinates of the location: of raw columns with heavy tails a few rows would decide.
    z = residuals.scores(y)
    deviation = np.sqrt(share @ (z - share @ z) ** 2)
    folds = rows.folds(folding, choice.n_folds)
    cells = fitted.model.y.cells
    assert cells is not None
    values = cells.range

    def place(atoms: Array, held: Array) -> Array:
        moved = residuals.held_out(x[held], folds[held])[:, None] + atoms
        return residuals.possible(moved, values) / deviation

    def scaled(atoms: Array, held: Array) -> Array:
        return residuals.scores(atoms) / deviation

    return paired_gain(
        held_out_crps(plain, z / deviation, scaled),
        held_out_crps(moved, z / deviation, place),
        share,
        folding.units(rows.index, rows.units),
    )
