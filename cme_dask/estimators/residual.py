"""The step of a fit that tries a location model: a location, a second pass, a decision.

A second pass takes as long as the first one. Where the rows are many more than the row sample, the
row sample decides before the first pass whether the second one is worth it, so that the fit and its
plan know from then on how many passes there are.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import Any, NamedTuple, Self

import numpy as np

from cme_dask.config import HELD_ROWS
from cme_dask.data.sample import Sample
from cme_dask.errors import CmeDaskError, ResourceError
from cme_dask.estimators.conformal import LocatedFit
from cme_dask.estimators.context import FitContext, GivenLocation, Progress, choose_kernel
from cme_dask.estimators.joint_fit import JointFit
from cme_dask.estimators.locating import (
    regression,
    sampled_moments,
    with_location,
    with_scale,
)
from cme_dask.estimators.planning import (
    RESIDUAL_EVALUATIONS,
    RESIDUAL_FINALISTS,
    RESIDUAL_WITHOUT_SLOPES,
    FitPlan,
    with_residuals,
)
from cme_dask.estimators.refits import FitResult, averaged, laws_bytes, refitted_laws
from cme_dask.estimators.steps import (
    DECISION,
    LOCATION,
    PIVOTS,
    SEARCH,
    SECOND,
    SECOND_PASS,
    SOLUTION,
    TOGETHER,
)
from cme_dask.estimators.support import (
    choose_map,
    described_values,
    first_map,
    settled_values,
)
from cme_dask.estimators.tuned import (
    FeatureMoments,
    OnLocation,
    held_by_client,
    search_kernels,
    search_memory,
)
from cme_dask.kernels import Transform
from cme_dask.kernels.evaluator import one_blas_thread, parallel_map, waiting, working
from cme_dask.learning.candidates import Over, Tuning
from cme_dask.learning.losses import (
    Gain,
    HeldLaws,
    Place,
    held_out_crps,
    paired_gain,
    screened_laws,
)
from cme_dask.models.location import LocationModel
from cme_dask.numerics.cells import ValueRange
from cme_dask.numerics.given_location import of_both
from cme_dask.numerics.location import FittedMeanFunction, Residuals
from cme_dask.numerics.reduction import Cost, MemoryPlan, Reduction
from cme_dask.numerics.scoring import column_deviations
from cme_dask.numerics.values import ValueMap
from cme_dask.passes.driver import Executor
from cme_dask.passes.progress import StepBegan
from cme_dask.passes.run import PassReport, run_pass

Array = Any

_SKILL = 0.01  # share of its variance that a location must explain in some column of y
_SCREENED_ROWS = 2048
_SCREENED_RANK = 100


@dataclass(frozen=True, eq=False)
class Screening:
    """What the row sample says of a location model, before the first pass.

    Attributes
    ----------
    metadata
        The figures of the decision, as the model records them.
    second
        The fit of x and e on the row sample's location; None if it is not worth a pass.
    """

    metadata: dict[str, Any]
    second: FitContext | None


def _screened(fit: JointFit, context: FitContext) -> Screening | None:
    """Whether a second pass is worth it, from refits on the row sample.

    None where the row sample does not decide: it holds all rows, ``residual`` is not ``"auto"``, or
    it has rows in fewer than two folds.

    Parameters
    ----------
    fit, context
        The fit that will be made.
    """
    rows = context.rows
    if context.residual != "auto" or rows.complete:
        return None
    _report(context, LOCATION)
    with one_blas_thread():
        sides, moments = sampled_moments(context)
        if len(moments.held_out_folds) < 2:
            _report(context, PIVOTS)
            return None
        location, _ = regression(context, [(sides, moments)])
    metadata = _described(context, location) | {"decided": "row sample"}
    second: FitContext | None = None
    if location.skill.max() >= _SKILL:
        second = _second_context(fit, context, location.residuals)
        with one_blas_thread():
            gain = _screened_gain(context, second, location.residuals)
        metadata |= _figures(gain)
        second = second if gain.repays_a_pass else None
    _report(context, PIVOTS, () if second else SECOND_PASS)
    return Screening(metadata, second)


def _of_pass(context: FitContext, screening: Screening | None) -> FitContext:
    """The context of the first pass, which makes moments for a location only if one is tried."""
    left_out = screening is not None and screening.second is None
    return replace(context, mean=None, early_ridge=None) if left_out else context


def located_plan(
    fit: JointFit, context: FitContext, planned: Callable[[FitContext], FitPlan]
) -> FitPlan:
    """What the fit would do and take, with the second pass where the row sample advises it.

    Parameters
    ----------
    fit, context
        The fit to be planned.
    planned
        Plans one of its passes.
    """
    early: list[tuple[FitContext, MemoryPlan]] = []
    context = with_location(context, lambda *of: early.append(of))
    if context.given is not None:
        return _given_plan(fit, context, context.given)
    begin = time.perf_counter()
    screening = _screened(fit, context)
    seconds = time.perf_counter() - begin
    context = _of_pass(context, screening)
    plan = planned(context)
    if screening is None:
        # The second search is made beside the trials of trees, or else beside the solution.
        other = early[0] if early else (context, plan.memory)
        alone = None if context.mean is None else _beside(*other)
        if alone is None:
            return plan
        with suppress(ResourceError):
            memory = search_memory(alone, _quick(fit))
            plan = replace(plan, memory=plan.memory.or_tighter(memory))
        return plan
    if screening.second is None:
        return replace(plan, residual=False, screening_seconds=seconds)
    laws = laws_bytes(len(context.rows), fit.support_size)
    second = planned(replace(screening.second, held=plan.sums_bytes + laws))
    return replace(
        plan,
        residual=True,
        passes=plan.passes + 1,
        memory=plan.memory.or_tighter(second.memory),
        screening_seconds=seconds,
        second=second,
    )


def located_fit(
    fit: JointFit, context: FitContext
) -> tuple[FitContext, FitResult, LocatedFit | None]:
    """The context with its location, and the result of a fit.

    The result has a location model if that pays; what that was made of comes last. One more pass is
    made, unless the location explains nothing or the row sample advises against it.
    """
    with _SecondAhead(fit) as ahead:
        context = with_location(context, ahead.begin_early)
        if context.given is None:
            return context, *_ridge_fit(fit, context, ahead)
    return context, *_given_fit(fit, context, context.given)


def _ridge_fit(
    fit: JointFit, context: FitContext, ahead: "_SecondAhead"
) -> tuple[FitResult, LocatedFit | None]:
    """The result of a fit that tries a ridge regression as location."""
    screening = _screened(fit, context)
    context = _of_pass(context, screening)
    begin = None if screening is not None else partial(ahead.begin, context)
    ahead.wait()
    if context.early_ridge is not None and context.progress is not None:
        for event in (StepBegan(PIVOTS), *context.early_ridge.reports):
            context.progress(event)
    context, result = with_values(context, _plain_fit(fit, context, begin))
    auto, each = context.residual == "auto", averaged(context, result)
    if auto and not each[0][1].held_out_folds:
        return result, None
    if screening is not None and screening.second is None:
        return result.described(residual=screening.metadata), None
    if screening is None:
        _report(context, LOCATION)
    made = ahead.result(context)
    if made is not None:
        location = made.location
    elif context.early_ridge is not None:
        location = context.early_ridge()
    else:
        of_members = [(sides, moments) for sides, moments, _, _ in each]
        location = _scaled_location(context, result.for_location or of_members)
    metadata = _described(context, location)
    if auto and location.skill.max() < _SKILL:
        return result.described(residual=metadata), None
    context = replace(context, held=result.held_bytes)
    if made is not None and made.second is not None:
        second = replace(made.second, progress=context.progress, held=context.held)
    elif screening is None or screening.second is None:
        second = _second_context(fit, context, location.residuals)
    else:
        _report(context, SECOND + PIVOTS)
        again = _of_residuals(context, location.residuals)
        second = replace(screening.second, sample=again.sample, rows=again.rows, held=context.held)
    of_residuals = _plain_fit(fit, second)
    _report(context, DECISION)
    located, gain, values = _decided(context, result, second, of_residuals, location.residuals)
    metadata |= {"kept": gain.gain > 0.0 or not auto, "decided": "all rows", **_figures(gain)}
    passes = result.measured.passes + of_residuals.measured.passes
    return _with_located_model(result.described(support=values), located, metadata, passes)


@one_blas_thread()
def _scaled_location(
    context: FitContext, candidates: Sequence[FeatureMoments]
) -> FittedMeanFunction:
    """The best location on these moments, with the scale of its residuals."""
    return with_scale(context, *regression(context, candidates))


def _given_plan(fit: JointFit, context: FitContext, given: GivenLocation) -> FitPlan:
    """The plan of :func:`_given_fit`."""
    second = _second_context(fit, context, given.residuals)
    plain, moved = (context, fit._choices(context)), (second, fit._choices(second))
    plan = with_residuals(fit._plan_of(*plain), plain, moved, given.residuals)
    if second.search is not None:
        plan = replace(plan, memory=plan.memory.or_tighter(second.search.memory))
    return replace(plan, location=given.words, location_seconds=given.seconds)


def _given_fit(
    fit: JointFit, context: FitContext, given: GivenLocation
) -> tuple[FitResult, LocatedFit | None]:
    """The result of a fit with a given location: both fits share the pass over the rows.

    The fit without the location answers what is not asked of laws, such as ``expect``, and laws
    far from the data.
    """
    residuals = given.residuals
    if given.auto and context.progress is not None:
        context.progress(StepBegan(SEARCH, 1.0, order=TOGETHER))
    _report(context, SECOND + SEARCH)
    second = _second_context(fit, context, residuals)
    _report(context, SECOND + PIVOTS)
    results: list[FitResult] = []

    def together(
        _: Sample,
        moved: Sequence[Reduction[Any, Any]],
        executor: Executor,
        progress: Progress | None,
        *,
        around: Cost,
    ) -> tuple[tuple[Any, ...], PassReport]:
        """The pass of the fit to residuals, within which the plain fit is made."""
        retained: list[tuple[Any, ...]] = []

        def both(
            sample: Sample, plain: Sequence[Reduction[Any, Any]], *_: Any, around: Cost
        ) -> tuple[tuple[Any, ...], PassReport]:
            answers, report = run_pass(
                sample.beside_residuals(residuals),
                of_both(plain, moved),
                executor,
                progress,
                around=around + around_moved,
                named=sample,
            )
            retained.append(answers[len(plain) :])
            return answers[: len(plain)], report

        around_moved = around
        _report(context, PIVOTS)
        results.append(_plain_fit(fit, replace(context, run_pass=both)))
        _report(context, SECOND + SOLUTION)
        return retained[0], results[0].measured.report

    of_residuals = _plain_fit(fit, replace(second, run_pass=together))
    context, result = with_values(context, results[0])
    _report(context, DECISION)
    located, gain, values = _decided(context, result, second, of_residuals, residuals)
    metadata = {
        "kept": gain.gain > 0.0 or not (given.auto and context.residual == "auto"),
        "decided": "all rows" if given.auto else "given",
        "location": given.words,
        "transform": _coordinates(residuals.transform),
        **_figures(gain),
    }
    result = result.described(support=values)
    return _with_located_model(result, located, metadata, result.measured.passes)


def with_values(context: FitContext, result: FitResult) -> tuple[FitContext, FitResult]:
    """The fit with the values of y that the pass settled, which the model names.

    Raises
    ------
    DataError
        If rows hold values that the user left out.
    """
    cells, columns = result.model.y.cells, context.sample.columns[1]
    assert cells is not None
    assert context.values is not None
    values = settled_values(context.values, cells, columns.names)
    described = described_values(values, cells, columns.names)
    return replace(context, values=values), result.described(support=described)


def _with_located_model(
    result: FitResult, located: LocatedFit, metadata: dict[str, Any], passes: int
) -> tuple[FitResult, LocatedFit | None]:
    """The result with its decision on a location model, and the model if it is kept."""
    _, of_residuals, residuals, values = located
    result = result.with_memory(of_residuals.measured.report.memory)
    result = result.described(residual=metadata, passes=passes)
    model = LocationModel(
        residuals.location, of_residuals.model, values, residuals.transform, residuals.scale
    )
    metadata["scale"] = None if residuals.scale is None else residuals.scale.tolist()
    retained = metadata["kept"]
    result = result._replace(
        model=replace(result.model, residual=model if retained else None),
        measured=result.measured._replace(passes=passes),
    )
    return result, located if retained else None


def _plain_fit(
    fit: JointFit, context: FitContext, on_location: OnLocation | None = None
) -> FitResult:
    """The result of a fit without a location model."""
    return fit._result(context, None if context.averages else fit._measure(context), on_location)


class _Second(NamedTuple):
    """A location, and the fit of x and e; None if the location explains too little."""

    location: FittedMeanFunction
    second: FitContext | None


class _SecondAhead:
    """The location and the second search, in a thread of their own.

    Where the ridge regression is made before the pass, they run beside the trials of trees; else
    beside the solution of the first fit and its calibration, when the moments of the pass are
    there. Without cores or memory for both at once, one follows the other. If the search fails, it
    is made again after the solution, and raises its error there.
    """

    def __init__(self, fit: JointFit) -> None:
        self._fit, self._over = fit, Event()
        self._thread = ThreadPoolExecutor(1)
        self._events = SimpleQueue[Any]()  # for the thread of the fit, when it is their turn
        self._begun: Future[_Second] | None = None

    def begin_early(self, context: FitContext, memory: MemoryPlan) -> None:
        """Begin with the early ridge regression, beside trials of trees with this plan of memory.

        With a checkpoint nothing begins early: it numbers the searches that a fit needs.
        """
        if context.early_ridge is not None and context.executor.checkpoint is None:
            self._begin(context, context.early_ridge, memory)

    def begin(
        self, context: FitContext, for_location: tuple[FeatureMoments, ...], memory: MemoryPlan
    ) -> None:
        """Begin beside a solution with this plan of memory, unless it has begun early.

        Parameters
        ----------
        context
            Of the fit.
        for_location
            The moments for a location; empty where there is an early ridge regression.
        memory
            Of the pass and of the solution.
        """
        if context.early_ridge is not None:
            self._begin(context, context.early_ridge, memory)
        elif for_location and all(sums.held_out_folds for _, sums in for_location):
            location = partial(_scaled_location, context, for_location)
            self._begin(context, location, memory)

    def _begin(
        self, context: FitContext, location: Callable[[], FittedMeanFunction], memory: MemoryPlan
    ) -> None:
        alone = None if self._begun else _beside(context, memory)
        if alone is not None:
            alone = replace(alone, progress=self._events.put)
            run = copy_context().run
            self._begun = self._thread.submit(run, self._make, alone, location)
            self._begun.add_done_callback(lambda _: self._events.put(None))

    @working()
    def _make(self, context: FitContext, location: Callable[[], FittedMeanFunction]) -> _Second:
        found = location()
        if self._over.is_set():
            raise Over
        if context.residual == "auto" and found.skill.max() < _SKILL:
            return _Second(found, None)
        residuals, over = found.residuals, self._over.is_set
        return _Second(found, _second_context(self._fit, context, residuals, over))

    def wait(self) -> None:
        """Wait for an early search, which the plan of the pass does not count."""
        if self._begun is not None:
            with waiting():
                wait([self._begun])

    def result(self, context: FitContext) -> _Second | None:
        """The location and the second fit, or None if there are none."""
        if self._begun is None:
            return None
        with waiting():
            for event in iter(self._events.get, None):
                if context.progress is not None:
                    context.progress(event)
        with suppress(CmeDaskError, MemoryError):
            return self._begun.result()
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.shutdown(cancel_futures=True)


def _beside(context: FitContext, memory: MemoryPlan) -> FitContext | None:
    """The context of a second search beside other work; None without cores and memory for both.

    Where workers have memory of their own, that of the client is not known to suffice.

    Parameters
    ----------
    context
        Of the first fit.
    memory
        Predicted peak of the other work.
    """
    if context.cores == 1 or context.executor.worker_memory:
        return None
    if context.search is not None:
        memory = memory.or_tighter(context.search.memory)
    held = held_by_client(context)
    try:
        counted = context.executor.check_alone("the second search", 0, held, "").predicted
    except ResourceError:
        return None
    return replace(context, held=context.held + max(memory.predicted - counted, 0))


def _report(context: FitContext, step: str, without: tuple[str, ...] = ()) -> None:
    if context.progress is not None:
        context.progress(StepBegan(step, without=without))


def _described(context: FitContext, location: FittedMeanFunction) -> dict[str, Any]:
    return {
        "kept": False,
        "decided": "location",
        "skill": location.skill.tolist(),
        "ridge": location.ridges.tolist(),
        "search": None if context.mean is None else context.mean.figures,
        "transform": _coordinates(context.scores),
    }


def _coordinates(transform: Transform | None) -> str:
    """Those in which y is located, in words."""
    return "raw" if transform is None else str(transform)


def _figures(gain: Gain) -> dict[str, Any]:
    return {
        "crps": [gain.plain, gain.residual],
        "gain": gain.gain,
        "std": gain.std if np.isfinite(gain.std) else None,
        "rows": gain.rows,
    }


def _of_residuals(context: FitContext, residuals: Residuals) -> FitContext:
    """The same rows of x and e, whose pivots come from the row sample unless those of x are given.

    No functions are declared, and nothing is searched or tried.
    """
    sample = context.sample.with_residuals(residuals, context.rows)
    assert sample.row_sample is not None
    x, y = context.pivots
    residual = replace(y, variable="the residual of y", mode="sampled", points=None)
    return replace(
        context,
        sample=sample,
        rows=sample.row_sample,
        pivots=(x.from_sample(), residual),
        functions=({}, {}),
        passes=0,
        seconds=0.0,
        search=None,
        averages=False,
        events=None,
        residual=False,
        scores=None,
        mean=None,
        early_ridge=None,
        given=None,
        values=None,
        made={},
        made_seconds=0.0,
    )


@one_blas_thread()
def _second_context(
    fit: JointFit,
    context: FitContext,
    residuals: Residuals,
    over: Callable[[], bool] | None = None,
) -> FitContext:
    """The same fit of x and e; ``over`` as of :func:`search_kernels`."""
    second, kernels = _of_residuals(context, residuals), list(context.kernels)
    if context.search is None:
        kernels[1] = choose_kernel(None, second.rows, 1, second.sample.columns[1], "kernel_y")
        return replace(second, kernels=kernels)
    learned = context.search.finalists[0].trial.x.form != "given"
    given = None if learned else kernels[0], None
    second = replace(second, kernels=kernels)
    learn_reg = fit.reg is None
    return search_kernels(second, given, _quick(fit), learn_reg, over=over)


def _quick(fit: JointFit) -> Tuning:
    """A shorter search: little of x is left in residuals, and their functions are not declared."""
    tuning, along = fit._tuning, fit.reg_form == "two-sided"
    most = RESIDUAL_EVALUATIONS if along else RESIDUAL_WITHOUT_SLOPES
    finalists = min(RESIDUAL_FINALISTS, tuning.n_finalists)
    return replace(
        tuning,
        criterion="auto" if tuning.criterion == "validation" else tuning.criterion,
        evaluations=most if tuning.evaluations is None else min(most, tuning.evaluations),
        finalists=finalists,
        averaged=min(tuning.averaged, finalists),
    )


def _screened_gain(context: FitContext, second: FitContext, residuals: Residuals) -> Gain:
    """The gain of refits on a part of the row sample."""
    rows = context.rows.prefix(_SCREENED_ROWS)
    moved = second.rows.prefix(_SCREENED_ROWS)
    folds = rows.folds(context.sample.folding, context.n_folds)
    laws = [
        screened_laws(
            (each.kernels[0], each.kernels[1]),
            each.solver.reg,
            (part[0], part[1]),
            rows.importance,
            folds,
            context.pivots[0].tol,
            _SCREENED_RANK,
        )
        for each, part in ((context, rows.parts), (second, moved.parts))
    ]
    y = context.rows.parts[1]
    seen = ValueRange(y.min(axis=0), y.max(axis=0), (np.floor(y) == y).all(axis=0))
    assert context.values is not None
    values = first_map(context.values, seen, mapped=residuals.transform is not None)
    return _gain(context, values, residuals, laws[0], laws[1], _SCREENED_ROWS)


def _decided(
    context: FitContext,
    result: FitResult,
    second: FitContext,
    of_residuals: FitResult,
    residuals: Residuals,
) -> tuple[LocatedFit, Gain, dict[str, Any]]:
    """Moved laws on values of y, their gain, and what the model says of these values.

    Refits from all rows are judged at rows of the row sample.
    """
    cells = result.model.y.cells
    assert cells is not None
    assert context.values is not None

    with one_blas_thread():
        # Both of them at once: each is made in one thread.
        fits = (context, result), (second, of_residuals)
        plain, moved = parallel_map(lambda of: refitted_laws(*of), fits, context.cores)
        values, described = choose_map(context, context.values, cells, residuals, moved)
        gain = _gain(context, values, residuals, plain, moved, HELD_ROWS)
    return LocatedFit(second, of_residuals, residuals, values), gain, described


def _gain(
    context: FitContext,
    values: ValueMap,
    residuals: Residuals,
    plain: Iterable[HeldLaws],
    moved: Iterable[HeldLaws],
    size: int,
) -> Gain:
    rows, folding = context.rows.prefix(size), context.sample.folding
    x, y = rows.parts
    share = rows.importance
    # As the location maps it: of raw columns with heavy tails a few rows would decide.
    z = residuals.scores(y)
    deviation = column_deviations(z, share)
    folds = rows.folds(folding, context.n_folds)

    def place(atoms: Array, held: Array) -> Array:
        moved = residuals.held_out(x[held], folds[held])[:, None] + atoms
        return residuals.possible(moved, values) / deviation

    def scaled(atoms: Array, held: Array) -> Array:
        return residuals.scores(atoms) / deviation

    def scores(of: tuple[Iterable[HeldLaws], Place]) -> Array:
        laws, atoms = of
        return held_out_crps(laws, z / deviation, atoms)

    both = [(plain, scaled), (moved, place)]
    of_plain, of_moved = parallel_map(scores, both, context.cores)
    return paired_gain(of_plain, of_moved, share, folding.units(rows.index, rows.units))
