"""The step of a fit that tries a location model: a location, a second pass, a decision.

A second pass takes as long as the first one. Where the rows are many more than the row sample, the
row sample decides before the first pass whether the second one is worth it, so that the fit and its
plan know from then on how many passes there are.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cme_dask.data.row_sample import RowSample
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, remedy
from cme_dask.estimators.joint_fit import HELD_ROWS, Fitted, JointRecipe, averaged, refitted_laws
from cme_dask.estimators.planning import (
    RESIDUAL_EVALUATIONS,
    RESIDUAL_FINALISTS,
    FitContext,
    FitPlan,
)
from cme_dask.estimators.recipe import choose_kernel
from cme_dask.estimators.solving import SolveOptions
from cme_dask.estimators.steps import DECISION, LOCATION, PIVOTS, SEARCH, SECOND, SECOND_PASS
from cme_dask.estimators.tuned import search_kernels
from cme_dask.learning.candidates import Tuning
from cme_dask.learning.losses import Gain, HeldLaws, held_out_crps, paired_gain, screened_laws
from cme_dask.models.location import LocationModel
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.blocks import MomentSums
from cme_dask.numerics.cells import ValueRange
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.crossval import held_out_folds
from cme_dask.numerics.location import FittedLocation, fit_location
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.passes.progress import StepBegan

Array = Any

CHOICES = ("auto", True, False)

DISTINCT = 20
"""A column of y with no more distinct values is taken for discrete."""

_SKILL = 0.01  # share of its variance that a location must explain in some column of y
_SCREENED_ROWS = 2048
_SCREENED_RANK = 100
_LOCATION_ROWS = (
    1 << 13
)  # of the row sample, and pivots among them, for the location of a screening
_LOCATION_RANK = 200


def residual_wanted(
    wanted: Any, ready: FitContext, solving: SolveOptions, support_size: int, *, learned: bool
) -> str | bool:
    """Whether a location model is tried: ``auto``, True, or False where there can be none.

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
            not solving.constraint.linear
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


@dataclass(frozen=True, eq=False)
class Screening:
    """What the row sample says of a location model, before the first pass.

    Attributes
    ----------
    about
        The figures of the decision, as the model records them.
    second
        The fit of x and e on the row sample's location; None if it is not worth a pass.
    """

    about: dict[str, Any]
    second: JointRecipe | None


def screened_residual(fit: JointRecipe) -> Screening | None:
    """Whether a second pass is worth it, from refits on the row sample.

    None where the row sample does not decide: it holds all rows, ``residual`` is not ``"auto"``, or
    it has rows in fewer than two folds.

    Parameters
    ----------
    fit
        The fit that is about to be made.
    """
    rows = fit.ready.choice.rows
    if not fit.residual and fit.ready.choice.progress is not None:
        _report(fit, PIVOTS, (LOCATION, SECOND + SEARCH, *SECOND_PASS))
    if fit.residual != "auto" or rows.complete:
        return None
    _report(fit, LOCATION)
    with one_blas_thread():
        sides, moments = _sampled_moments(fit)
        if len(held_out_folds(moments)) < 2:
            _report(fit, PIVOTS)
            return None
        location = _location(fit, [(sides, moments)])
    metadata = _described(fit, location) | {"decided": "row sample"}
    second: JointRecipe | None = None
    if location.skill.max() >= _SKILL:
        second = _second_fit(fit, location)
        with one_blas_thread():
            gain = _screened_gain(fit, second, location)
        metadata |= _figures(gain)
        second = second if gain.is_clear else None
    _report(fit, PIVOTS, () if second else SECOND_PASS)
    return Screening(metadata, second)


def plan_with_residual(fit: JointRecipe) -> FitPlan:
    """What the fit would do and take, with the second pass where the row sample advises it.

    Parameters
    ----------
    fit
        The fit to be planned.
    """
    begin = time.perf_counter()
    screening = screened_residual(fit)
    seconds = time.perf_counter() - begin
    plan = fit.plan()
    if screening is None:
        return plan
    if screening.second is None:
        return replace(plan, residual=False, screening_seconds=seconds)
    second = screening.second.plan()
    return replace(
        plan,
        residual=True,
        passes=plan.passes + 1,
        memory=plan.memory.or_tighter(second.memory),
        screening_seconds=seconds,
        second=second,
    )


def with_residual(fit: JointRecipe, fitted: Fitted, screening: Screening | None = None) -> Fitted:
    """The fit with a location model, if one is wanted and pays.

    One more pass is made, unless the location explains nothing or the screening advises against it.

    Parameters
    ----------
    fit
        The fit that was made.
    fitted
        Its result.
    screening
        What the row sample said before.
    """
    auto = fit.residual == "auto"
    _, moments, _, _ = averaged(fit, fitted)[0]
    if not fit.residual or (auto and not held_out_folds(moments)):
        return fitted
    if screening is not None and screening.second is None:
        return _told(fitted, screening.about)
    if screening is None:
        _report(fit, LOCATION)
    with one_blas_thread():
        location = _location(fit, [each[:2] for each in averaged(fit, fitted)])
    metadata = _described(fit, location)
    if auto and location.skill.max() < _SKILL:
        return _told(fitted, metadata)
    if screening is None or screening.second is None:
        second = _second_fit(fit, location)
    else:
        _report(fit, SECOND + PIVOTS)
        second = screening.second.on(_residual_sample(fit, location))
    result = second.run()
    _report(fit, DECISION)
    with one_blas_thread():
        gain = _final_gain(fit, fitted, second, result, location)
    retained = gain.pays or not auto
    metadata |= {"kept": retained, "decided": "all rows", **_figures(gain)}
    residuals = location.residuals
    reference = LocationModel(residuals.location, result.model, residuals.transform)
    memory = fitted.report.memory.or_tighter(result.report.memory)
    fitted = replace(fitted, report=replace(fitted.report, memory=memory))
    return _told(fitted, metadata, result.passes, reference if retained else None)


def _report(fit: JointRecipe, step: str, without: tuple[str, ...] = ()) -> None:
    if fit.ready.choice.progress is not None:
        fit.ready.choice.progress(StepBegan(step, without=without))


def _described(fit: JointRecipe, location: FittedLocation) -> dict[str, Any]:
    return {
        "kept": False,
        "decided": "location",
        "skill": location.skill.tolist(),
        "ridge": location.ridges.tolist(),
        "transform": "raw" if fit.scores is None else str(fit.scores),
    }


def _sampled_moments(fit: JointRecipe) -> tuple[tuple[FeatureBlock, FeatureBlock], MomentSums]:
    """Moments by fold of rows of the row sample, on a smaller basis of the best kernel of x."""
    choice = fit.ready.choice
    rows = choice.rows.prefix(_LOCATION_ROWS)
    # Of y only the functions are needed, so that one pivot is enough.
    bases = [
        _sampled_basis(kernel, rows, i, rank)
        for i, (kernel, rank) in enumerate(zip(fit.ready.kernels, (_LOCATION_RANK, 1), strict=True))
    ]
    sides = fit.sides(bases)
    folds = rows.folds(choice.sample.folding, choice.n_folds)
    spec = MomentReduction(sides, choice.n_folds)
    return sides, strip_moments(spec, rows.parts, rows.importance, folds)


def _sampled_basis(kernel: Any, rows: RowSample, i: int, rank: int) -> NewtonBasis:
    few = rows.prefix(_SCREENED_ROWS)
    points = few.parts[i]
    result = pivoted_cholesky(kernel, points, 1e-9, rank, weights=few.importance)
    return NewtonBasis(kernel, points[result.pivots], result.factor)


def _told(
    fitted: Fitted, about: dict[str, Any], passes: int = 0, residual: LocationModel | None = None
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


def _location(
    fit: JointRecipe, candidates: list[tuple[tuple[FeatureBlock, FeatureBlock], MomentSums]]
) -> FittedLocation:
    """The location that explains most of unseen rows, among those on the bases of x given."""
    columns = len(fit.ready.choice.sample.columns[1].names)
    first = 0 if fit.scores is None else len(candidates[0][0][1].names)
    here = slice(first, first + columns)
    x = fit.ready.choice.rows.parts[0]
    # Codes of labels have no trend: an empty range.
    labels = np.array(fit.ready.choice.sample.columns[0].categorical)
    within = np.where(labels, 0.0, x.min(axis=0)), np.where(labels, 0.0, x.max(axis=0))
    result = (
        fit_location(moments, sides[0].basis, here, fit.scores, within=within)
        for sides, moments in candidates
    )
    return max(result, key=lambda each: float(each.skill.sum()))


def _residual_sample(fit: JointRecipe, location: FittedLocation) -> Sample:
    """The rows of x and e."""
    choice = fit.ready.choice
    return choice.sample.with_residuals(location.residuals, choice.rows)


def _second_fit(fit: JointRecipe, location: FittedLocation) -> JointRecipe:
    """The same fit of x and e."""
    choice, solving, result = fit.ready.choice, fit.solving, None
    sample = _residual_sample(fit, location)
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
    ready = FitContext(choice, kernels, 0, 0.0)
    if fit.found is not None:
        learned = fit.found.finalists[0].trial.x.form != "given"
        result = search_kernels(
            ready,
            (None if learned else kernels[0], None),
            None,
            None if fit.learn_reg else solving.reg,
            _quick(fit.tuning),
            fit.tolerance.value,
            fit.seed,
        )
        best = result.finalists[0]
        ready = replace(ready, kernels=[best.kernel_x, best.kernel_y])
        solving = replace(solving, reg=replace(best.reg, form=solving.reg.form))
    return replace(
        fit, ready=ready, solving=solving, found=result, functions=(None, None), residual=False
    )


def _quick(tuning: Tuning) -> Tuning:
    """A shorter search: little of x is left in residuals, and their functions are not declared."""
    return replace(
        tuning,
        criterion="auto" if tuning.criterion == "validation" else tuning.criterion,
        evaluations=min(
            RESIDUAL_EVALUATIONS,
            RESIDUAL_EVALUATIONS if tuning.evaluations is None else tuning.evaluations,
        ),
        finalists=min(RESIDUAL_FINALISTS, tuning.finalists),
    )


def _screened_gain(fit: JointRecipe, second: JointRecipe, location: FittedLocation) -> Gain:
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
    values = ValueRange.of(fit.ready.choice.rows.parts[1])
    return _gain(fit, values, location, laws[0], laws[1], _SCREENED_ROWS)


def _final_gain(
    fit: JointRecipe, fitted: Fitted, second: JointRecipe, found: Fitted, location: FittedLocation
) -> Gain:
    """The gain of refits from all rows, at rows of the row sample."""
    plain, moved = refitted_laws(fit, fitted), refitted_laws(second, found)
    cells = fitted.model.y.cells
    assert cells is not None
    return _gain(fit, cells.values, location, plain, moved, HELD_ROWS)


def _gain(
    fit: JointRecipe,
    values: ValueRange,
    location: FittedLocation,
    plain: Iterator[HeldLaws],
    moved: Iterator[HeldLaws],
    size: int,
) -> Gain:
    choice, residuals = fit.ready.choice, location.residuals
    rows, folding = choice.rows.prefix(size), choice.sample.folding
    x, y = rows.parts
    share = rows.importance
    # As the location maps it: of raw columns with heavy tails a few rows would decide.
    z = residuals.scores(y)
    deviation = np.sqrt(share @ (z - share @ z) ** 2)
    folds = rows.folds(folding, choice.n_folds)

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
