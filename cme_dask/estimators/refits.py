"""The result of a fit of the joint distribution, and the laws of its refits without each fold.

From these laws, at held-out rows, the calibration is learned, and the decision on a location, the
values of y, and conformity scores are taken.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from cme_dask.config import HELD_ROWS
from cme_dask.estimators.base import Measured
from cme_dask.estimators.context import FitContext
from cme_dask.estimators.tuned import EnsembleMember, FeatureMoments
from cme_dask.kernels.evaluator import one_blas_thread, parallel_each, parallel_map
from cme_dask.learning.losses import HeldLaws
from cme_dask.models.assembly import Component
from cme_dask.models.joint import JointModel
from cme_dask.numerics.calibration import (
    NEAR_PIVOTS,
    HeldRows,
    LearnedCalibration,
    Levels,
    Repeated,
    learn_calibration,
)
from cme_dask.numerics.measure import project
from cme_dask.numerics.moments import FeatureBlock, MomentSums
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.reduction import MemoryPlan

Array = Any

Averaged = tuple[tuple[FeatureBlock, ...], MomentSums, Regularization, Callable[[int], Array]]
"""Sides, moments, ridge, and h = g - 1 of the refit without a fold, in the bases N of y and x."""

_CALIBRATED_ROWS = 2000  # from which the few numbers of a calibration are learned
_RETAINED, _WORD = 1 << 26, 8  # bytes of the laws of a fit, at most, and of a number


class FitResult(NamedTuple):
    """What a fit of the joint distribution made; of a mean over several models, of the best one.

    Attributes
    ----------
    model
        The model.
    component
        The solution.
    measured
        Sums over the rows.
    members
        The models whose density ratios are averaged, best first; empty of one alone.
    laws
        Those that :func:`refitted_laws` has made, calibrated or not.
    for_location
        Features and moments of a kernel of x that was learned for the location, where one was.
    """

    model: JointModel
    component: Component
    measured: Measured
    members: list[EnsembleMember]
    laws: dict[bool, list[HeldLaws]]
    for_location: tuple[FeatureMoments, ...] = ()

    def described(self, **info: Any) -> Self:
        """With what else the model says of its fit."""
        return self._replace(model=replace(self.model, about=self.model.about | info))

    @property
    def held_bytes(self) -> int:
        """Bytes of the sums over rows that it holds, moments by fold, refits and cells; of laws."""
        moments = [member.moments for member in self.members] or [self.measured.moments]
        moments += [sums for _, sums in self.for_location]
        refits = (refit for member in self.members for refit in member.refits.values())
        cells = (sums.sums for sums in self.measured.cells)
        laws = (one.weights for each in self.laws.values() for one in each)
        arrays = (*(sums.gram for sums in moments), *refits, *cells, *laws)
        return sum(array.nbytes for array in arrays)

    def with_memory(self, plan: MemoryPlan) -> Self:
        """With a plan of memory that may be tighter than that of the pass."""
        report = self.measured.report
        report = report._replace(memory=report.memory.or_tighter(plan))
        return self._replace(measured=self.measured._replace(report=report))


def with_calibration(context: FitContext, result: FitResult) -> FitResult:
    """The result with calibrated laws, if that pays."""
    if len(result.measured.moments.held_out_folds) < 2:
        return result
    with one_blas_thread():
        learned = _learned(context, result)
    if learned is None:
        return result
    info = {
        "kept": context.calibration is True or learned.pays,
        "exponents": learned.calibration.to_list(),
        "pivots": NEAR_PIVOTS,
        "gain": learned.gain,
        "std": learned.std if np.isfinite(learned.std) else None,
        "rows": learned.rows,
    }
    return result.described(calibration=info)


def _learned(context: FitContext, result: FitResult) -> LearnedCalibration | None:
    """The calibration; None if fewer than two folds have rows in the row sample."""
    cells = result.model.y.cells
    assert cells is not None
    rows = context.rows.prefix(min(HELD_ROWS, _CALIBRATED_ROWS))
    support = result.model.x.basis.newton.nearness(NEAR_PIVOTS)(rows.parts[0])
    at = cells.support.assign(rows.parts[1])
    units = context.sample.folding.units(rows.index, rows.units)
    folds = [
        HeldRows(laws.weights[few], at[held], support[held], rows.importance[held], units[held])
        for laws in refitted_laws(context, result)
        if len(held := laws.held[few := laws.held < len(rows)])
    ]
    if len(folds) < 2:
        return None
    labels = context.sample.columns[1].categorical
    columns = [j for j, categorical in enumerate(labels) if not categorical]
    return learn_calibration(folds, cells.means, columns, context.cores)


def laws_bytes(rows: int, support_size: int) -> int:
    """Bytes that :func:`refitted_laws` retains, where the row sample has so many rows."""
    size = min(rows, HELD_ROWS) * support_size * _WORD
    return size if size <= _RETAINED else 0


def refitted_laws(context: FitContext, result: FitResult) -> Iterable[HeldLaws]:
    """Laws of refits without each fold, at the rows of the fold in the row sample.

    They are calibrated as those of the model are. They are made once, or, of many cells, fold by
    fold whenever they are needed.
    """
    calibrated, made = result.model.calibration is not None, result.laws
    if not laws_bytes(len(context.rows), result.measured.cells[1].masses.shape[1]):
        return Repeated(partial(_refitted_laws, context, result, 1))
    if calibrated not in made:
        made[calibrated] = list(_refitted_laws(context, result, context.cores))
        if calibrated:
            made.pop(False, None)
    return made[calibrated]


def _refitted_laws(context: FitContext, result: FitResult, cores: int) -> Iterator[HeldLaws]:
    plain = result.laws.get(False) or _projected_laws(context, result, cores)
    calibration, cells = result.model.calibration, result.model.y.cells
    if calibration is None:
        yield from plain
        return
    assert cells is not None
    levels = Levels(cells.means, calibration.columns)
    near = result.model.x.basis.newton.nearness(calibration.pivots)
    support = near(context.rows.prefix(HELD_ROWS).parts[0])

    def calibrated(one: HeldLaws) -> HeldLaws:
        return replace(one, weights=calibration.weights(one.weights, levels, support[one.held]))

    yield from map(calibrated, plain) if cores == 1 else parallel_each(calibrated, [*plain], cores)


def _projected_laws(context: FitContext, result: FitResult, cores: int) -> Iterator[HeldLaws]:
    """Those laws without a calibration, of a fold in each of so many threads."""
    rows, cells = context.rows.prefix(HELD_ROWS), result.model.y.cells
    folds = rows.folds(context.sample.folding, context.n_folds)
    assert cells is not None
    means, points, masses = cells.means, cells.support.points, result.measured.cells[1].masses
    each = averaged(context, result)

    def at_rows_and_points(of: Averaged) -> tuple[Array, Array]:
        (x, y), *_ = of
        return x.basis(rows.parts[0]), y.basis(points)

    values = parallel_map(at_rows_and_points, each, cores)

    def of_fold(fold: int) -> HeldLaws:
        held = np.flatnonzero(folds == fold)
        ratio = np.ones((len(held), len(points)))
        for (*_, refitted), (at_x, at_y) in zip(each, values, strict=True):
            ratio += (at_x[held] @ refitted(fold).T) @ at_y.T / len(each)
        rest = masses.sum(axis=0) - masses[fold]
        laws, _ = project(ratio, rest / rest.sum())
        return HeldLaws(held, laws, means)

    return parallel_each(of_fold, each[0][1].held_out_folds, cores)


def averaged(context: FitContext, result: FitResult) -> list[Averaged]:
    """The models whose ratios are averaged, and their refits."""
    if result.members:
        return [
            (m.component.sides, m.moments, m.candidate.reg, m.refits.__getitem__)
            for m in result.members
        ]
    sides, moments = result.component.sides, result.measured.moments
    solver = context.solver.on([side.basis for side in sides], context.rows.parts)

    def refitted(fold: int) -> Array:
        return solver.solve(moments.means(without=fold)).newton_coef

    return [(sides, moments, context.solver.reg, refitted)]
