"""The steps of a fit before its pass, and the plan that stops there, with the predicted cost."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cme_dask.data.sample import Sample
from cme_dask.estimators.context import IN_ROUNDS, FitContext
from cme_dask.kernels import Kernel
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.numerics.basis import Basis, eigenbasis
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.given_location import of_both
from cme_dask.numerics.location import Residuals
from cme_dask.numerics.moments import (
    FeatureBlock,
    MomentReduction,
    MomentSets,
    MomentSums,
    strip_moments,
)
from cme_dask.numerics.precision import TRIAL_ROWS, ComputeMode
from cme_dask.numerics.reduction import Cost, Extent, MemoryPlan, Reduction
from cme_dask.passes.cost import PassCost, pickled_bytes, time_pass
from cme_dask.passes.driver import Executor
from cme_dask.passes.run import Pass, extent_of, plan_pass

RESIDUAL_FINALISTS = 3
"""Learned kernels of residuals that are compared on all rows."""

RESIDUAL_EVALUATIONS, RESIDUAL_WITHOUT_SLOPES = 6, 20
"""Trials of the search for them after its grid, at most: along gradients, and without these."""

_ORDER = 384  # of the largest eigenproblem that is timed
_PRODUCTS = 4  # of the order of a basis: 8 m_X m_Y (m_X + m_Y) operations for both

Specify = Callable[[MomentReduction], tuple[MomentReduction, ComputeMode]]
Other = tuple[Sequence[Kernel], Specify]
"""Further learned kernels, and the trial of the arithmetic for their moments."""


class FurtherPass(NamedTuple):
    """A pass that follows the one of the moments.

    Attributes
    ----------
    name
        In the parts of a plan.
    of_moments
        From the moments of x and y to its rows, and what it computes.
    """

    name: str
    of_moments: Callable[[MomentSums, Sequence[FeatureBlock]], tuple[Sample, Reduction[Any, Any]]]


@dataclass(frozen=True)
class PlannedVariable:
    """A variable of a plan: its columns, the ranks of its bases, how pivots are chosen, its kernel.

    ``ranks`` holds a number for each finalist, the best one first, and ``kernel`` is that one's.
    ``pivots`` is a mode, or ``given``. For modes that go over all rows the ranks are those of
    pivots from the row sample. ``enough`` is False where the row sample shows that these miss
    ``tol``: the fit adds pivots in rounds over all rows, and the ranks are lower bounds.
    """

    name: str
    columns: tuple[str, ...]
    ranks: tuple[int, ...]
    pivots: str
    kernel: str
    enough: bool = True

    @property
    def rank(self) -> int:
        """The rank of the best finalist."""
        return self.ranks[0]


@dataclass(frozen=True, eq=False)
class PassWorkload:
    """The pass of a plan, apart from its number of rows and from where it runs.

    Attributes
    ----------
    reductions
        What it computes.
    around
        What the client needs before and after it.
    extent
        The rows of the plan.
    row_bytes
        Bytes of a row, before compression.
    shared_bytes
        That each worker is sent once.
    """

    reductions: Sequence[Reduction[Any, Any]]
    around: Cost
    extent: Extent
    row_bytes: int
    shared_bytes: int

    def cost(self, extent: Extent) -> Cost:
        """Operations and memory over other rows."""
        return sum((one.cost(extent) for one in self.reductions), self.around)

    @property
    def sums_bytes(self) -> int:
        """Bytes of the sums over all rows."""
        return sum(one.cost(self.extent).partial for one in self.reductions)


def workload_of(
    sample: Sample, reductions: Sequence[Reduction[Any, Any]], around: Cost, executor: Executor
) -> PassWorkload:
    """The workload of these reductions of a sample."""
    sample = sample.for_folds(max(one.n_folds for one in reductions))
    shared = replace(Pass.of(sample, reductions, executor), sources=())
    return PassWorkload(
        reductions,
        around,
        extent_of(sample, executor),
        sum(source.row_bytes for source in sample.reads),
        pickled_bytes(shared),
    )


@dataclass(frozen=True)
class FitPlan:
    """What a fit would do, what it would take, and where the time would go.

    Ranks, arithmetic, tasks and strips are those of the fit: its pivots have been chosen on the row
    sample. Seconds before the pass were measured on the way; those of the pass are predicted from
    three of its strips on each worker, and those of the solution from an eigendecomposition, or,
    under a constraint that takes iterations, from a solution on the row sample. Rounds of pivots
    over all rows come on top (``in_rounds``): with ``greedy`` and ``random``, and where sampled
    pivots miss ``tol``. Where the row sample shows that already (``enough`` of a variable is
    False), ranks, passes, seconds and memory are lower bounds; other misses show in the pass.

    Attributes
    ----------
    variables
        What is known of each variable.
    arithmetic
        How the moments would be computed, in words.
    scheduler
        Kind of scheduler.
    passes
        Passes over the rows, rounds of pivots aside.
    moment_pass
        Predicted: what the pass that makes the moments takes, for all finalists together.
    sample_seconds, pivot_seconds, trial_seconds
        Measured: reading the row sample; choosing the pivots; trying the arithmetic.
    solution_seconds
        Predicted: the dense algebra after the pass.
    memory
        Predicted peak of the fit, the limit, where and in which phase it is tightest.
    finalists
        Learned kernels whose moments would be made in the pass, 1 for given kernels.
    search_seconds
        Measured: the search for kernels.
    residual
        Whether a location model is tried in one more pass: True, ``auto`` (if it may pay, which
        only the first pass tells) or False, also where the row sample advises against it.
    screening_seconds
        Measured: whether the row sample advises a location model, with a search for its
        kernels; 0 where the row sample does not decide.
    second
        The plan of its pass, where the row sample advises it.
    further_pass, further_name
        Predicted: a pass that follows the one of the moments, and what it is for: leave-one-out
        losses of ridges, moments of successive states, or ranges of basis functions. None and an
        empty text if there is none.
    location
        A given location in words, or None. The fits with and without it share the pass.
    location_seconds
        Measured: fitting a regressor that is the location.
    workload, further_workload
        The pass that makes the moments and ``further_pass``, for :func:`cme_dask.plan_cluster`.
    """

    variables: tuple[PlannedVariable, ...]
    arithmetic: str
    scheduler: str
    passes: int
    moment_pass: PassCost
    sample_seconds: float
    pivot_seconds: float
    trial_seconds: float
    solution_seconds: float
    memory: MemoryPlan
    finalists: int = 1
    search_seconds: float = 0.0
    residual: str | bool = False
    screening_seconds: float = 0.0
    second: "FitPlan | None" = None
    further_pass: PassCost | None = None
    further_name: str = ""
    location: str | None = None
    location_seconds: float = 0.0
    workload: PassWorkload | None = field(default=None, repr=False, compare=False)
    further_workload: PassWorkload | None = field(default=None, repr=False, compare=False)

    @property
    def rows(self) -> int:
        """Number of rows n."""
        return self.moment_pass.rows

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of pivots of the best finalist, a number per variable."""
        return tuple(variable.rank for variable in self.variables)

    @property
    def in_rounds(self) -> bool:
        """Whether the fit would choose pivots in rounds over all rows; their number is unknown."""
        return any(v.pivots in IN_ROUNDS or not v.enough for v in self.variables)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, in the order of the fit."""
        searched = {"search for kernels": self.search_seconds} if self.search_seconds else {}
        screened = (
            {"trial of a location model": self.screening_seconds} if self.screening_seconds else {}
        )
        further = self.further_pass
        followed = {} if further is None else {f"pass: {self.further_name}": further.seconds}
        known = "" if self.second is not None else ", at least"
        again = (
            {f"location model{known}": self.residual_seconds[0]} if self.residual is True else {}
        )
        located = {"given location": self.location_seconds} if self.location_seconds else {}
        return {
            "row sample": self.sample_seconds,
            **located,
            **searched,
            **screened,
            "choice of pivots": self.pivot_seconds,
            "trial of the arithmetic": self.trial_seconds,
            "pass: computing": self.moment_pass.computing,
            "pass: waiting for rows": self.moment_pass.reading,
            "pass: partial sums": self.moment_pass.sums,
            "pass: scheduling": self.moment_pass.scheduling,
            **followed,
            "solution": self.solution_seconds,
            **again,
        }

    @property
    def residual_seconds(self) -> tuple[float, float]:
        """What a location model would take, in seconds: a range.

        Where the row sample advises it, its pivots have been chosen as well, and both ends are what
        its pass and solution take. Else it is a shorter search on the row sample and a pass for at
        most three finalists, whose ranks only that search tells. The lower end: a pass at the
        smallest ranks of the present finalists; under ``auto`` nothing, where the first pass shows
        that it does not pay. The upper end: as long a search, and a pass at their largest ranks.
        """
        if not self.residual:
            return 0.0, 0.0
        if self.second is not None:
            known = self.second
            rest = known.seconds - known.sample_seconds - known.search_seconds
            return rest, rest
        # What a finalist takes grows about with the square of its ranks.
        squares = [
            sum(ranks) ** 2 for ranks in zip(*(v.ranks for v in self.variables), strict=True)
        ]
        again = self.pivot_seconds + self.trial_seconds + self.moment_pass.seconds
        unit = min(self.finalists, RESIDUAL_FINALISTS) * (again + self.solution_seconds)
        least, most = (unit * square / sum(squares) for square in (min(squares), max(squares)))
        return (0.0 if self.residual == "auto" else least), self.search_seconds + most

    @property
    def sums_bytes(self) -> int:
        """Bytes of the moments by fold, which the client holds while it makes a second pass."""
        return 0 if self.workload is None else self.workload.sums_bytes

    @property
    def seconds(self) -> float:
        """Predicted seconds of the fit in all, rounds of pivots aside."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "rows": self.rows,
            "variables": [asdict(v) | {"rank": v.rank} for v in self.variables],
            "arithmetic": self.arithmetic,
            "scheduler": self.scheduler,
            "passes": self.passes,
            "rounds": None if self.in_rounds else 0,
            "seconds": self.seconds,
            "parts": self.parts,
            "finalists": self.finalists,
            "pass": asdict(self.moment_pass),
            "pass_seconds": self.moment_pass.seconds,
            "pass_rows_per_second": self.moment_pass.rows_per_second,
            "further_pass": None
            if self.further_pass is None
            else {"name": self.further_name, **asdict(self.further_pass)},
            "location": self.location,
            "residual": self.residual,
            "residual_seconds": list(self.residual_seconds),
            "memory": self.memory._asdict(),
        }


@dataclass(frozen=True, eq=False)
class Choices:
    """What a fit has chosen before its pass.

    Attributes
    ----------
    bases
        Of each pair of kernels, the best one first.
    specs
        The moments of each.
    location
        Moments of the kernel of x that was learned for the location, if one was.
    cells
        Whose rows the pass sums.
    arithmetic
        Of the moments of the best pair, in words.
    pivot_seconds, trial_seconds
        What the choice of pivots took, and that of the arithmetic.
    short
        Numbers of the variables to whose pivots the fit would add in rounds over all rows.
    """

    bases: Sequence[Sequence[Basis]]
    specs: Sequence[MomentReduction]
    location: MomentReduction | None
    cells: Sequence[CellReduction]
    arithmetic: str
    pivot_seconds: float
    trial_seconds: float
    short: set[int]

    @property
    def sets(self) -> MomentSets:
        """All moments together."""
        return MomentSets((*self.specs, *(() if self.location is None else (self.location,))))

    @property
    def reductions(self) -> list[Reduction[Any, Any]]:
        """What the pass computes."""
        return [self.sets, *self.cells]

    def cost(self, context: FitContext, extent: Extent) -> Cost:
        """What the pass needs, and the client around it."""
        around = context.choice_cost(max(self.sets.ranks))
        return sum((one.cost(extent) for one in self.reductions), around)


def choose(
    context: FitContext,
    specify: Specify,
    landmarks: Callable[[FitContext], Sequence[Basis] | None],
    cells: Callable[[Sequence[Basis]], Sequence[CellReduction]],
    others: Sequence[Other] = (),
) -> Choices:
    """Choose pivots and arithmetic as the fit would.

    Parameters
    ----------
    context
        What the fit has before its pass.
    specify
        From moments to these with the arithmetic that their trial allows.
    landmarks
        Bases that take the place of those on pivots, if there are any.
    cells
        From bases to the cells whose rows the pass sums.
    others
        Further kernels that are compared on all rows, with their ``specify``.
    """
    marks = [time.perf_counter()]
    # Rounds over all rows are what a plan must not do: the row sample tells about which rank.
    from_sample = replace(context, pivots=tuple(each.from_sample() for each in context.pivots))
    kernels = [context.kernels, *(kernels for kernels, _ in others)]
    on_landmarks = [landmarks(replace(context, kernels=pair)) for pair in kernels]
    each: Sequence[Sequence[Basis]] = [bases for bases in on_landmarks if bases is not None]
    short: set[int] = set()
    if not each:
        each, _, short = from_sample.bases_of_each(kernels)
    marks.append(time.perf_counter())
    spec, arithmetic = specify(context.moments_on(each[0]))
    also = [
        specify_other(context.moments_on(bases))[0]
        for bases, (_, specify_other) in zip(each[1:], others, strict=True)
    ]
    summed = cells(each[0])
    marks.append(time.perf_counter())
    return Choices(
        each,
        [spec, *also],
        context.moments_of_mean(),
        summed,
        arithmetic.name,
        marks[1] - marks[0] + context.made_seconds,
        marks[2] - marks[1],
        short,
    )


def trial_moments(context: FitContext, spec: MomentReduction) -> MomentSums:
    """Moments of some rows of the row sample, in one fold."""
    rows = context.rows.prefix(TRIAL_ROWS)
    return strip_moments(replace(spec, n_folds=1), rows.parts, None, np.zeros(len(rows), int))


def plan_fit(context: FitContext, choices: Choices, further: FurtherPass | None = None) -> FitPlan:
    """The plan of a fit that has chosen its pivots and its arithmetic.

    Parameters
    ----------
    context
        What the fit has before its pass.
    choices
        What it has chosen.
    further
        A pass that follows, here after the moments of some rows.

    Raises
    ------
    ResourceError
        If the fit would not fit into memory.
    """
    sample, executor = context.sample, context.executor
    spec, sets = choices.specs[0], choices.sets
    runs, memory = context.predict(sets.ranks, sets.width, choices.cells)
    with one_blas_thread():
        solution_seconds = _solution_seconds(choices.specs)
    moment_pass = time_pass(sample, choices.reductions, runs, executor)
    further_pass = further_workload = None
    if further is not None:
        other, reduction = further.of_moments(trial_moments(context, spec), spec.features)
        extent = extent_of(other, executor)
        around = context.after_moments(spec.features)
        runs, needed = plan_pass(reduction.cost(extent) + around, extent, executor)
        memory = memory.or_tighter(needed)
        further_pass = time_pass(other, [reduction], runs, executor)
        further_workload = workload_of(other, [reduction], around, executor)
    return FitPlan(
        variables=tuple(
            PlannedVariable(
                pivots.variable,
                columns.names,
                tuple(basis.rank for basis in bases),
                pivots.mode,
                repr(bases[0].kernel),
                i not in choices.short,
            )
            for i, (pivots, columns, bases) in enumerate(
                zip(context.pivots, sample.columns, zip(*choices.bases, strict=True), strict=True)
            )
        ),
        arithmetic=choices.arithmetic,
        scheduler=executor.kind,
        passes=context.passes + 1 + (context.residual is True) + (further is not None),
        moment_pass=moment_pass,
        sample_seconds=context.seconds,
        pivot_seconds=choices.pivot_seconds,
        trial_seconds=choices.trial_seconds,
        solution_seconds=solution_seconds,
        memory=memory,
        finalists=len(choices.specs),
        search_seconds=_searched(context),
        residual=context.residual,
        further_pass=further_pass,
        further_name="" if further is None else further.name,
        workload=workload_of(
            sample, choices.reductions, context.choice_cost(max(sets.ranks)), executor
        ),
        further_workload=further_workload,
    )


def with_residuals(
    plan: FitPlan,
    plain: tuple[FitContext, Choices],
    moved: tuple[FitContext, Choices],
    residuals: Residuals,
) -> FitPlan:
    """The plan of a fit that shares its pass with one to residuals from a given location.

    Parameters
    ----------
    plan
        Of the first fit alone.
    plain, moved
        What both fits have before the pass, and what they have chosen.
    residuals
        What the second one is fitted to.

    Raises
    ------
    ResourceError
        If both together would not fit into memory.
    """
    (context, choices), (second, others) = plain, moved
    sample = context.sample.beside_residuals(residuals)
    extent = extent_of(sample, context.executor)
    cost = choices.cost(context, extent) + others.cost(second, extent)
    runs, memory = plan_pass(cost, extent, context.executor)
    reductions = of_both(choices.reductions, others.reductions)
    around = context.choice_cost(max(choices.sets.ranks))
    around += second.choice_cost(max(others.sets.ranks))
    with one_blas_thread():
        solution_seconds = _solution_seconds(others.specs)
    return replace(
        plan,
        passes=context.passes + 1,
        moment_pass=time_pass(sample, reductions, runs, context.executor),
        memory=plan.memory.or_tighter(memory),
        pivot_seconds=plan.pivot_seconds + others.pivot_seconds,
        trial_seconds=plan.trial_seconds + others.trial_seconds,
        solution_seconds=plan.solution_seconds + solution_seconds,
        search_seconds=plan.search_seconds + _searched(second),
        finalists=plan.finalists + len(others.specs),
        residual=False,
        workload=workload_of(sample, reductions, around, context.executor),
    )


def _searched(context: FitContext) -> float:
    return 0.0 if context.search is None else float(context.search.seconds)


def _solution_seconds(specs: Sequence[MomentReduction]) -> float:
    """Seconds from moments to solutions, with one for each fold left out.

    Timed are an eigenbasis and as many products as a solution takes for it, at an order that takes
    no time to speak of: more grow with the cube.
    """
    cubes = sum(
        rank**3 * (1 if len(one.ranks) == 1 or one.n_folds == 1 else 1 + one.n_folds)
        for one in specs
        for rank in one.ranks
    )
    factor = max((side.basis.factor for one in specs for side in one.features), key=len)
    gram = factor[:_ORDER, :_ORDER] @ factor[:_ORDER, :_ORDER].T
    begin = time.perf_counter()
    eigenbasis(gram, gram[0])
    for _ in range(_PRODUCTS):
        gram @ gram
    return (time.perf_counter() - begin) * cubes / len(gram) ** 3
