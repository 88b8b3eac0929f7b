"""Fits that learn their kernels: the search, and the members whose density ratios are averaged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from cme_dask.display import brief_repr
from cme_dask.errors import ResourceError, ToleranceWarning, option, warn
from cme_dask.estimators.base import Measured
from cme_dask.estimators.context import FitContext, RunPass
from cme_dask.estimators.steps import dense_cost
from cme_dask.kernels import Kernel
from cme_dask.kernels.evaluator import (
    beside,
    one_blas_thread,
    parallel_each,
    parallel_map,
)
from cme_dask.learning.candidates import (
    AheadTrials,
    KernelChoice,
    KernelPoint,
    Score,
    Search,
    TrialMemory,
    TrialsHere,
    Tuning,
)
from cme_dask.learning.problems import FIRST, Estimated, estimated, search_joint
from cme_dask.learning.search import search_bytes
from cme_dask.models.assembly import Component, reduced
from cme_dask.models.events import importable
from cme_dask.numerics.basis import Basis, NewtonBasis
from cme_dask.numerics.cells import CellReduction, CellSums
from cme_dask.numerics.crossval import FactoredFold, HeldFold, Losses, factored_folds, held_folds
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, Moments, MomentSets, MomentSums
from cme_dask.numerics.precision import ComputeMode
from cme_dask.numerics.problem import Answer, JointSolver, Regularization, replicates
from cme_dask.numerics.reduction import MemoryPlan
from cme_dask.passes.progress import StepBegan
from cme_dask.passes.run import PassReport, extent_of, run_pass

Array = Any

FOLDS = 5
"""Folds of the search; the finalists are compared on those of the fit."""

_NEAR = 0.1  # a finalist that is worse than the best by this share of its score is left out
_NOTHING = 2.0  # standard errors of the gain on independence that may be luck
_OVERFITTED = 0.1  # held-out joint loss that no luck makes, where independence has 0
_STEP, _STEPS = float(np.sqrt(10.0)), 2  # between neighbouring ridges, and how many at most

FeatureMoments = tuple[tuple[FeatureBlock, ...], MomentSums]
"""The features of both variables, and their moments by fold."""


class MeasuredCandidate(NamedTuple):
    """A finalist of a search, its features and how they were computed, and its moments by fold."""

    candidate: KernelChoice
    spec: MomentReduction
    mode: ComputeMode
    moments: MomentSums


OnLocation = Callable[[tuple[FeatureMoments, ...], MemoryPlan], None]
"""Called with the moments for a location, and the memory of the fit that goes on meanwhile."""


class AheadSearch(Protocol):
    """A search on the row sample that may begin beside that for kernels."""

    def begin(self, threads: int, over: Callable[[], bool]) -> None:
        """Make what can be made in so many threads, as long as it is not over."""

    def needs(self, threads: int) -> int:
        """Peak of memory in bytes."""


Specify = Callable[[MomentReduction, JointSolver], tuple[MomentReduction, ComputeMode]]


@dataclass(frozen=True, eq=False)
class EnsembleMember:
    """One of the models whose density ratios are averaged.

    Attributes
    ----------
    candidate
        Its kernels and the ridge that was learned on all rows.
    component
        What the model is made of.
    moments
        By fold; None in a copy that was pickled.
    joint, crps
        Held-out joint loss, and sliced CRPS over that of independence or what is in its place,
        over all rows.
    retained
        Share of h = g - 1 that is retained, below 1 where independence may do as well.
    arithmetic
        How its moments were computed.
    refits
        h = g - 1 of refits without one fold each, in the bases N of y and of x: matrices of shape
        (m_Y, m_X) by the number of the fold.
    """

    candidate: KernelChoice
    component: Component
    moments: MomentSums
    joint: float
    crps: float
    retained: float
    arithmetic: ComputeMode
    refits: dict[int, Array] = field(default_factory=dict)

    __repr__ = brief_repr


def search_kernels(
    context: FitContext,
    given: tuple[Kernel | None, Kernel | None],
    options: Tuning,
    learn_reg: bool,
    location: AheadSearch | None = None,
    over: Callable[[], bool] | None = None,
    meanwhile: Callable[[FitContext, int], FitContext] | None = None,
) -> FitContext:
    """The context with the kernels that a search on the row sample found, and the search.

    Parameters
    ----------
    context
        The row sample, and how far bases and their rank may go.
    given
        None for each kernel that is learned.
    options
        See :func:`cme_dask.learning.problems.search_joint`.
    learn_reg
        Whether the ridge is learned, unless a constraint on a partition keeps its own.
    location
        The search for a location, which begins at the same time if there are cores and memory for
        it.
    over
        Whether the search is not needed any more: its next trial raises :class:`Over` then.
    meanwhile
        Adds to the context while the search for a location goes on in threads of its own. It is
        called with the context and the bytes that these need.

    Raises
    ------
    DataError
        As the search.
    ResourceError
        If it does not fit into memory.
    """
    rows, solver = context.rows.prefix(options.rows), context.solver
    cores, ahead, memory = _way_to_search(context, len(rows), options.max_rank, location)
    trials: TrialMemory | None = context.executor.trials((KernelPoint,))
    if over is not None:
        trials = AheadTrials(TrialsHere() if trials is None else trials, over)
    columns = context.sample.columns
    categorical = [tuple(name in c.categories for name in c.names) for c in columns]

    with nullcontext() if location is None or not ahead else beside(partial(location.begin, ahead)):
        search = search_joint(
            (rows.parts[0], rows.parts[1]),
            rows.importance,
            context.sample.folding.folds(rows.index, rows.units, FOLDS),
            (given[0], given[1]),
            (categorical[0], categorical[1]),
            functions=dict(context.functions[1]),
            reg=None if learn_reg else solver.reg,
            form=solver.reg.form,
            options=options,
            tol=context.pivots[0].tol,
            seed=context.seed,
            callback=context.progress,
            memory=trials,
            cores=cores,
        )
        best = search.finalists[0]
        if learn_reg and not solver.constraint.partition:
            solver = solver._replace(reg=best.reg)
        context = replace(
            context,
            kernels=[best.kernel_x, best.kernel_y],
            search=replace(search, memory=memory),
            solver=solver,
            averages=solver.constraint.averages,
            events=search.functions if solver.constraint.averages else None,
        )
        if location is None or not ahead or meanwhile is None:
            return context
        return meanwhile(context, location.needs(ahead))


def held_by_client(context: FitContext) -> int:
    """Bytes of the rows in memory, of the row sample, and of what else the client holds."""
    return extent_of(context.sample, context.executor).in_memory + context.choice_cost(1).held


def search_memory(context: FitContext, options: Tuning) -> MemoryPlan:
    """The memory of :func:`search_kernels`; ResourceError if there is too little."""
    rows = context.rows.prefix(options.rows)
    return _way_to_search(context, len(rows), options.max_rank, None)[2]


def _way_to_search(
    context: FitContext, rows: int, max_rank: int, location: AheadSearch | None
) -> tuple[int, int, MemoryPlan]:
    """The threads of the search, those of the search for a location beside it, and their memory.

    The result is the same in any way: the fastest one is taken that fits. ResourceError if none
    does.
    """
    columns = sum(len(each.names) for each in context.sample.columns)
    held = held_by_client(context)

    def plan(cores: int, ahead: int) -> MemoryPlan:
        searched = search_bytes(rows, columns, max_rank, FOLDS, FIRST[:2], cores)
        other = 0 if location is None else location.needs(max(ahead, 1))
        return context.executor.check_alone(
            "the search for kernels",
            searched + other if ahead else max(searched, other),
            held,
            f"search on fewer rows than {rows:,}, tuning=Tuning(rows={rows // 2}), or lower "
            "max_rank of the tuning, or give kernels",
        )

    most = context.cores
    ways = [(most - 1, most - 1), (1, 1)] if location is not None and most > 1 else []
    for cores, ahead in (*ways, (most, 0)):
        with suppress(ResourceError):
            return cores, ahead, plan(cores, ahead)
    return 1, 0, plan(1, 0)


@dataclass(frozen=True, eq=False)
class EnsembleFit:
    """From the finalists of a search to the members whose density ratios are averaged.

    Attributes
    ----------
    context
        What is known before the pass, with the search.
    solver
        From moments to coefficients; its ridge is that of the finalists where it is learned.
    specify
        From moments and their solver to these with the arithmetic that their trial allows.
    averaged
        How many are averaged at most.
    learn_reg
        Whether the ridge is learned.
    """

    context: FitContext
    solver: JointSolver
    specify: Specify
    averaged: int
    learn_reg: bool

    def run(
        self, cells: tuple[CellReduction, ...], on_location: OnLocation | None = None
    ) -> tuple[list[EnsembleMember], Measured, tuple[FeatureMoments, ...]]:
        """Moments of all finalists in one pass: the best of them, best first; and its sums.

        Last come those of the kernel of x that was learned for the location, if one was.

        Parameters
        ----------
        cells
            Whose rows are summed.
        on_location
            Called with the moments for the location, if there are any, before the members are
            solved for, and with the plan of memory.
        """
        search = self.context.search
        kernels = [(candidate.kernel_x, candidate.kernel_y) for candidate in search.finalists]
        bases, rounds, _ = self.context.bases_of_each(kernels)
        passes = self.context.passes + 1 + len(rounds)
        location = self.context.moments_of_mean()
        others = () if location is None else (location,)
        run = self.context.run_pass
        measured, sums, summed, report = self._measured(search.finalists, bases, run, cells, others)
        for_location = tuple((spec.features, each) for spec, each in zip(others, sums, strict=True))
        if on_location is not None:
            on_location(for_location, report.memory)
        members = self._members(measured)
        best = _best(members, search.score, self.averaged)
        best, more = self._topped_up(best)
        passes += more
        first = best[0]
        if not self.learn_reg and not first.retained and first.joint > _OVERFITTED:
            reg = first.candidate.reg
            warn(
                f"with the ridges {reg.y:g} and {reg.x:g} the density ratio is farther from that "
                "of held-out rows than independence is, so the model is that of independence: "
                f"raise {option('reg')}, or leave it out",
                ToleranceWarning,
            )
        sides, mode = first.component.sides, first.arithmetic
        of_best = Measured(sides, first.moments, cells, summed, mode, report, passes)
        return best, of_best, for_location

    def _measured(
        self,
        candidates: Sequence[KernelChoice],
        bases: Sequence[Sequence[Basis]],
        run: RunPass,
        cells: tuple[CellReduction, ...] = (),
        others: tuple[MomentReduction, ...] = (),
    ) -> tuple[list[MeasuredCandidate], tuple[MomentSums, ...], tuple[CellSums, ...], PassReport]:
        """The candidates with their moments, from one pass; other moments, and the sums by cell."""
        context = self.context
        specified = [
            self.specify(context.moments_on(each), self.solver._replace(reg=candidate.reg))
            for each, candidate in zip(bases, candidates, strict=True)
        ]
        specs = [spec for spec, _ in specified]
        most = max(rank for spec in specs for rank in spec.ranks)
        (moments, *summed), report = run(
            context.sample,
            [MomentSets((*specs, *others)), *cells],
            context.executor,
            context.progress,
            around=context.choice_cost(most),
        )
        each = zip(candidates, specified, moments, strict=False)
        measured = [MeasuredCandidate(one, *how, sums) for one, how, sums in each]
        return measured, moments[len(specs) :], tuple(summed), report

    def _members(self, measured: Sequence[MeasuredCandidate]) -> list[EnsembleMember]:
        """A member for each candidate."""
        members: list[EnsembleMember] = []
        shares = np.cumsum([dense_cost(each.spec.ranks) for each in measured])
        # Folds at once, as many as the plan of memory has room for.
        threads = min(self.context.cores, 2 * len(measured))
        with one_blas_thread():
            self._solved(0.0)
            for each in measured:
                members.append(self._member(each, threads))
                self._solved(float(shares[len(members) - 1] / shares[-1]))
        return members

    def _solved(self, share: float) -> None:
        if self.context.progress is not None:
            self.context.progress(StepBegan("solution", share))

    def _member(self, measured: MeasuredCandidate, threads: int) -> EnsembleMember:
        candidate, spec, mode, moments = measured
        (x, y), search = spec.features, self.context.search
        factored = candidate.reg.form == "two-sided" and min(candidate.reg[:2]) > 0.0
        folds: list[HeldFold | FactoredFold]
        folds = [*factored_folds(moments)] if factored else [*held_folds(moments)]
        reg, joint, crps = candidate.reg, candidate.trial.joint, candidate.trial.crps
        retained = 1.0
        if folds:
            weights = np.array([fold.held.weight for fold in folds])

            def losses(regs: list[Regularization]) -> tuple[Estimated, Estimated]:
                unseen = parallel_map(lambda fold: fold.losses(regs), folds, threads)
                of_folds = Losses(*map(np.stack, zip(*unseen, strict=True)))
                return estimated(of_folds, weights, search.functions)

            # Eigenbases are made once for all ridges, linear systems for each of them.
            reach = (1 if factored else _STEPS) if self.learn_reg else 0
            reg, reached = _learned_ridge(reg, losses, search.score, reach)
            joint, crps = (mean for mean, _ in reached)
            retained = _retained(reached)
        mean = moments.means()
        solver = self.solver._replace(reg=reg)
        of_bases = solver.on((x.basis, y.basis), self.context.rows.parts)
        solution = of_bases.solve(mean).shrunk(retained)
        refits: dict[int, Array] = {}

        def without(fold: HeldFold | FactoredFold) -> tuple[Array, list[Answer]]:
            refit = fold.solution(reg).shrunk(retained)
            answers = [refit.answer(fold.rest, given, newton=True) for given in (0, 1)]
            return refit.newton_coef, answers

        def refitted() -> Iterator[tuple[Moments, Moments, Sequence[Answer]]]:
            found = parallel_each(without, folds, threads)
            each = zip(moments.held_out_folds, folds, found, strict=True)
            for number, fold, (coef, answers) in each:
                refits[number] = coef
                yield fold.rest, fold.held, answers

        errors = replicates(refitted(), moments)
        component = Component((x, y), mean, reduced(solution), errors, mean.trace_error)
        candidate = replace(candidate, reg=reg)
        return EnsembleMember(candidate, component, moments, joint, crps, retained, mode, refits)

    def _topped_up(self, members: list[EnsembleMember]) -> tuple[list[EnsembleMember], int]:
        """The members, those whose bases missed ``tol`` over all rows anew; and the passes it took.

        These are rounds over all rows, and one more pass for the moments.
        Members often share a basis, which is topped up once.
        """
        made: dict[tuple[int, Kernel], NewtonBasis] = {}
        changed: dict[int, Sequence[NewtonBasis]] = {}
        passes = 0
        for k, member in enumerate(members):
            before = [_newton(side.basis) for side in member.component.sides]
            errors = [error or 0.0 for error in member.component.trace_errors]
            bases = [made.get((i, basis.kernel), basis) for i, basis in enumerate(before)]
            missed = [
                error if basis is old else 0.0  # 0: done for a member before
                for error, basis, old in zip(errors, bases, before, strict=True)
            ]
            more, rounds = self.context.topped_up(bases, missed)
            passes += len(rounds)
            bases = bases if more is None else more
            if any(basis is not old for basis, old in zip(bases, before, strict=True)):
                made |= {(i, basis.kernel): basis for i, basis in enumerate(bases)}
                changed[k] = bases
        if not changed:
            return members, passes
        candidates = [members[k].candidate for k in changed]
        measured, *_ = self._measured(candidates, list(changed.values()), run_pass)
        topped = self._members(measured)
        anew = dict(zip(changed, topped, strict=True))
        return [anew.get(k, member) for k, member in enumerate(members)], passes + 1


def _newton(basis: Basis) -> NewtonBasis:
    assert isinstance(basis, NewtonBasis)
    return basis


def _retained(losses: Sequence[tuple[float, float]]) -> float:
    """How much of h = g - 1 is retained: all of it, unless independence may do as well.

    0 up to two standard errors of what is gained on independence by either loss, 1 from three on. A
    search always finds something that gains a little where there is nothing to find.
    """
    certain = max(-mean / error if error > 0.0 else np.inf for mean, error in losses)
    return float(np.clip(certain - _NOTHING, 0.0, 1.0))


def _learned_ridge(
    start: Regularization,
    losses: Callable[[list[Regularization]], tuple[Estimated, Estimated]],
    score: Score,
    reach: int,
) -> tuple[Regularization, list[tuple[float, float]]]:
    """The best ridge near a first one, and its mean losses with their standard errors.

    Ridges of y and of x apart, unless they are a single one: so many steps around the best so far,
    as long as one of them is better and within two steps of the first one.
    """
    reached: dict[tuple[int, int], list[tuple[float, float]]] = {}
    scores: dict[tuple[int, int], float] = {}
    best = 0, 0
    while True:
        new = [at for at in _around(best, reach, start.form) if at not in scores]
        if not new:
            return _moved(start, best), reached[best]
        each = losses([_moved(start, at) for at in new])
        scores |= zip(new, score(each[0][0], each[1][0]).tolist(), strict=True)
        for k, at in enumerate(new):
            reached[at] = [(float(mean[k]), float(error[k])) for mean, error in each]
        best = min(scores, key=scores.__getitem__)


def _around(at: tuple[int, int], reach: int, form: str) -> list[tuple[int, int]]:
    """Steps of the ridges of y and of x that are so near to these, and at most two from 0."""
    near = [range(max(step - reach, -_STEPS), min(step + reach, _STEPS) + 1) for step in at]
    return [(y, x) for y, x in product(*near) if form != "single" or x == y]


def _moved(start: Regularization, steps: tuple[int, int]) -> Regularization:
    # Of a single ridge, that of both sides is about the square root.
    power = 2 if start.form == "single" else 1
    y, x = (_STEP ** (power * step) for step in steps)
    return start._replace(y=start.y * y, x=start.x * x)


def _best(members: Sequence[EnsembleMember], score: Score, count: int) -> list[EnsembleMember]:
    """The best members by their scores over all rows."""
    scores = {id(m): float(score(np.asarray(m.joint), np.asarray(m.crps))) for m in members}
    ordered = sorted(members, key=lambda m: scores[id(m)])
    least = scores[id(ordered[0])]
    near = [m for m in ordered if scores[id(m)] <= least + _NEAR * abs(least)]
    return near[:count]


def describe_search(search: Search, members: Sequence[EnsembleMember]) -> dict[str, Any]:
    """JSON form of the search and of the members."""
    return {
        "criterion": search.criterion,
        "seconds": search.seconds,
        "trials": [asdict(trial) for trial in search.trials],
        "finalists": len(search.finalists),
        "members": [
            {
                "x": asdict(m.candidate.trial.x),
                "y": asdict(m.candidate.trial.y),
                "kernel_x": m.candidate.kernel_x.to_dict(),
                "kernel_y": m.candidate.kernel_y.to_dict(),
                "ranks": [side.basis.rank for side in m.component.sides],
                "reg": [m.candidate.reg.y, m.candidate.reg.x],
                "joint": m.joint,
                "crps": m.crps,
                "retained": m.retained,
            }
            for m in members
        ],
    }


# What pickles and copies of fitted estimators hold: no rows, no sums that only a fit needs


def importable_sides(sides: tuple[FeatureBlock, FeatureBlock]) -> tuple[FeatureBlock, FeatureBlock]:
    """Sides whose declared functions are :func:`importable`."""
    x, y = (replace(side, functions=importable(side.functions)) for side in sides)
    return x, y


def lean_members(members: Sequence[EnsembleMember]) -> list[EnsembleMember]:
    """Members without their moments per fold, the largest part of an averaged fit by far."""
    return [
        replace(
            member,
            moments=None,  # type: ignore[arg-type] # documented, and no query reads them
            refits={},
            component=member.component._replace(sides=importable_sides(member.component.sides)),
        )
        for member in members
    ]
