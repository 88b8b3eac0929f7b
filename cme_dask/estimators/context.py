"""The context of a fit: its rows, kernels and memory, and the pivots that it chooses from these."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple, Self

import numpy as np

from cme_dask.config import MAX_RANK, PIVOTS, TOL, VARIABLES
from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.data.store import brief
from cme_dask.errors import (
    ConstantColumnWarning,
    DataError,
    LengthScaleWarning,
    RankWarning,
    ToleranceWarning,
    warn,
)
from cme_dask.kernels import Categorical, Kernel, Transform
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.learning.candidates import TuningProgress
from cme_dask.learning.regression import MeanKernel
from cme_dask.learning.transforms import HEURISTIC_ROWS, constant_columns, default_kernel
from cme_dask.models.points import query_points
from cme_dask.numerics.basis import Basis, NewtonBasis
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.cholesky import (
    BLOCK,
    SKETCH,
    pivoted_cholesky,
    prefix_rows,
    sampled_cholesky,
)
from cme_dask.numerics.folds import RowSample
from cme_dask.numerics.location import Residuals
from cme_dask.numerics.moments import FeatureBlock, Function, MomentReduction, moment_cost
from cme_dask.numerics.reduction import Cost, MemoryPlan, RowRange
from cme_dask.numerics.rounds import Greedy, PivotState, Random, Rule
from cme_dask.numerics.scoring import ScoringFunctions
from cme_dask.numerics.values import ColumnValues
from cme_dask.passes.driver import Executor
from cme_dask.passes.fit import choose_in_rounds
from cme_dask.passes.progress import Event, StepBegan
from cme_dask.passes.run import PassReport, extent_of, plan_pass, run_pass

log = logging.getLogger("cme_dask.run")

Array = Any

SHORT_RANK = 500
"""Largest rank of a given kernel that is too short for the rows, unless ``max_rank`` is given."""

_MANY = 10  # names, of which no more are listed
_FEW = 20  # rows, of fewer nothing is said about a kernel
_UNRELATED, _SAME = 1e-3, 1e-10

IN_ROUNDS = ("greedy", "random")
"""Ways of choosing pivots over all rows."""

_WORD = 8
_ROW_SAMPLE_WORDS = 4  # per row of the row sample beside its values: key, index, weight, importance
_CHECK_EVERY = 16
_ROUNDING = 1e-14  # half a range relative to the largest value: less is a constant
_LEAST_RANGES = {"x": 1e-290, "y": 1e-150, "z": 1e-290}  # half of them: those of y are squared
_TOP_UP_SPAN = 0.5
_FEW_ROWS, _FEW_TOL = 2048, 1e-9  # of bases for trials on the row sample
_ONE_THREAD = 256  # rows that several threads take no less time for
_SMOOTHING, _LEAST_RANK = 1e-4, 100  # a ridge, and the rank of a location on few rows
_COARSE = 1e-2  # trace error of learned bases that is worth a warning when nobody gave a tol


@dataclass(frozen=True)
class PivotProgress:
    """How far the choice of pivots is."""

    variable: str
    rank: int
    residual_trace: float
    tol: float


Progress = Callable[[PivotProgress | Event | TuningProgress | StepBegan], None]
"""What the parts of a fit report to, see :class:`cme_dask.estimators.steps.StepReports`."""


RunPass = Callable[..., tuple[tuple[Any, ...], PassReport]]
"""Makes a pass over the rows, with the arguments of :func:`run_pass`."""


# How pivots are chosen


@dataclass(frozen=True, eq=False)
class Pivots:
    """How the pivots of one variable come about.

    Attributes
    ----------
    variable
        What messages call the variable.
    mode
        ``sampled``, ``greedy``, ``random`` or ``given``.
    tol, max_rank
        Relative trace error at which the choice ends, and the largest number of pivots, or None.
    promised
        Whether every miss of ``tol`` over all rows is worth a warning: where the user gave it, or
        nothing limits the rank. Otherwise the rank decides, and only a coarse basis is reported.
    default_rank
        Whether the user gave no ``max_rank``, for messages.
    span
        For ``greedy``: 1 is exactly Algorithm 1; less takes more pivots in a round.
    seed
        For ``random``.
    points
        Those that are given, shape (m, d).
    """

    variable: str
    mode: str
    tol: float
    max_rank: int | None
    promised: bool
    default_rank: bool
    span: float
    seed: tuple[int, int]
    points: Array = None

    @classmethod
    def of_each(
        cls,
        pivots: Any,
        variables: Sequence[str],
        columns: Sequence[Columns],
        tol: float | None,
        max_rank: int | None,
        limit: int | None,
        span: Any,
        seed: int,
    ) -> tuple[Self, ...]:
        """Those of all variables, from the parameters of an estimator.

        Parameters
        ----------
        pivots, tol, max_rank, span, seed
            As given by the user; ``tol`` and ``max_rank`` may be None.
        variables, columns
            What messages call each variable, and its columns.
        limit
            The rank that takes the place of ``max_rank``; None where ``tol`` alone decides.

        Raises
        ------
        DataError
            On unknown modes, points that don't fit to the columns, a span out of range.
        """
        real = isinstance(span, Real) and not isinstance(span, bool)
        if not real or not 0.0 < float(span) <= 1.0:
            raise DataError(f"span must lie above 0 and be at most 1, got {span!r}")
        if isinstance(pivots, str) or len(variables) == 1:
            pivots = [pivots] * len(variables)
        elif not isinstance(pivots, (tuple, list)) or len(pivots) != len(variables):
            raise DataError(
                f"pivots must be {_MODES} or a pair of arrays, got {type(pivots).__name__}"
            )
        promised = tol is not None or limit is None
        most, by_default = (max_rank, False) if max_rank is not None else (limit, True)
        tol, each = TOL if tol is None else float(tol), []
        for i, (requested, variable) in enumerate(zip(pivots, variables, strict=True)):
            mode, points = requested, None
            if not isinstance(requested, str):
                mode, points = "given", _given_points(requested, columns[i], variable)
            elif mode not in PIVOTS:
                raise DataError(f"pivots must be {_MODES} or given points, got {mode!r}")
            bounds = tol, most, promised, by_default
            each.append(cls(variable, mode, *bounds, float(span), (seed, i), points))
        return tuple(each)

    def at_most(self, rank: int) -> Self:
        """With a lower largest rank, unless the user gave one or a tolerance."""
        free = self.default_rank and not self.promised
        lower = free and self.max_rank is not None and rank < self.max_rank
        return replace(self, max_rank=rank) if lower else self

    def from_sample(self) -> Self:
        """The same, but where they would be chosen over all rows, from the row sample."""
        return replace(self, mode="sampled") if self.mode in IN_ROUNDS else self

    def rule(self, kernel: Kernel) -> Rule:
        """The rule of the rounds over all rows; for sampled pivots, of those that add to them."""
        if self.mode == "random":
            return Random(kernel, self.tol, self.max_rank, self.seed)
        span = self.span if self.mode == "greedy" else _TOP_UP_SPAN
        return Greedy(kernel, self.tol, self.max_rank, span)


_MODES = ", ".join(map(repr, PIVOTS))


def _given_points(points: Any, columns: Columns, variable: str) -> Array:
    try:
        array = query_points(points, columns, "their table")
    except DataError as error:
        raise DataError(f"pivots of {variable}: {error}") from error
    if not len(array):
        raise DataError(f"pivots of {variable}: there are no points, give at least one")
    return array


# The row sample, and the kernels that are given or chosen from it


@one_blas_thread()
def choose_kernel(kernel: Any, rows: RowSample, i: int, columns: Columns, name: str) -> Kernel:
    """The given kernel, checked against the columns of variable ``i``, or the default one.

    Raises
    ------
    DataError
        If the kernel does not fit, or a numeric column varies, but by next to nothing.
    """
    seen = rows.parts[i][rows.importance > 0.0]
    low, high = seen.min(axis=0), seen.max(axis=0)
    rounding = _ROUNDING * np.maximum(abs(low), abs(high))
    half = high / 2 - low / 2  # whole differences may leave the range
    for j in np.flatnonzero((half > rounding) & (half < _LEAST_RANGES[VARIABLES[i]])):
        if not columns.categorical[j]:
            raise DataError(
                f"values of column {columns.names[j]!r} of {VARIABLES[i]} vary by only "
                f"{2.0 * half[j]:.2g}, too little for floating-point numbers to compute with: "
                "give the column in units that make its values larger"
            )
    if kernel is None or (isinstance(kernel, str) and kernel == "median"):
        warn_of_constants(rows, i, columns, VARIABLES[i])
        few = rows.prefix(HEURISTIC_ROWS)
        return default_kernel(rows.parts[i], rows.importance, few.parts[i], few.importance, columns)
    if not isinstance(kernel, Kernel):
        raise DataError(
            f"{name} must be a kernel of cme_dask.kernels (users' own: kernels.Custom), "
            f"got {kernel!r}"
        )
    chosen = kernel if columns.imputation is None else _with_indicators(kernel, columns)
    chosen.check(len(columns.names))
    # A numeric kernel would take codes of labels as numbers.
    coded = [j for j, is_coded in enumerate(columns.categorical) if is_coded]
    wrong = [j for j in coded if chosen.measures(j)]
    if wrong:
        column = columns.names[wrong[0]]
        raise DataError(
            f"column {column!r} holds labels, whose codes {name}={brief(repr(kernel))} would take "
            f"as numbers: give kernels.Categorical(1.0).on({wrong[0]}) for it, times a numeric "
            "kernel .on(...) the other columns, or give no kernel, so that it is learned"
        )
    return chosen


def _with_indicators(kernel: Kernel, columns: Columns) -> Kernel:
    """The kernel of the columns that are given, times one of the indicators of what is missing.

    A kernel that does not fit the given columns is left as it is: it may be one of all columns.
    """
    given, count = len(columns.given.names), len(columns.names)
    try:
        kernel.check(given)
    except DataError:
        return kernel
    if given == count:
        return kernel
    both: Kernel = kernel.on([*range(given)]) * Categorical(1.0).on([*range(given, count)])
    return both


def warn_of_constants(rows: RowSample, i: int, columns: Columns, variable: str) -> None:
    """Warn of the numeric columns of variable ``i`` that have one value in all sampled rows."""
    constant = constant_columns(rows.parts[i], rows.importance, columns.categorical)
    if not constant:
        return
    one = len(constant) == 1
    names = ", ".join(repr(columns.names[j]) for j in constant[:_MANY])
    more = f" and {len(constant) - _MANY} more" if len(constant) > _MANY else ""
    fate = "the model ignores " + ("it" if one else "them")
    if variable == "y":
        fate = "its law is a point" if one else "their laws are points"
    warn(
        f"column{'' if one else 's'} {names}{more} of {variable} {'is' if one else 'are'} constant "
        f"in all {len(rows):,} sampled rows: {fate}",
        ConstantColumnWarning,
    )


def warn_of_length(kernel: Kernel, points: Array, name: str) -> bool:
    """Warn if a given kernel is too short or too long for the rows; whether it is too short.

    A kernel that is too short sees nearly no row near another one, one that is too long sees no
    difference between rows.

    Parameters
    ----------
    kernel
        A given kernel.
    points
        Random rows, shape (k, d).
    name
        Of the parameter.

    Notes
    -----
    The kernel is too short if, for nine rows of ten, no correlation |k(x, z)| / sqrt(k(x, x)
    k(z, z)) with another row is above 1e-3. It is too long if the rows differ and all values
    k(x, z) are within 1e-10 of each other, as a fraction of the largest one; values, because
    correlations of linear kernels can be 1 between rows that these kernels tell apart.
    """
    if len(points) < _FEW:
        return False
    root = np.sqrt(np.maximum(np.asarray(kernel.diagonal(points), dtype=np.float64), 0.0))
    if not root.all():
        return False
    values = np.asarray(kernel(points, points), dtype=np.float64)
    least, most = values.min(), values.max()
    same = most - least <= _SAME * max(abs(least), abs(most))
    correlations = np.abs(values)
    correlations /= root
    correlations /= root[:, None]
    np.fill_diagonal(correlations, 0.0)
    nearest = float(np.quantile(correlations.max(axis=1), 0.9))
    among = f"among {len(points):,} sampled rows"
    if nearest < _UNRELATED:
        warn(
            f"{name}={brief(repr(kernel))} is too short for the rows: {among}, nine of ten have no "
            f"other one at which the kernel is above {_UNRELATED:g}, so nothing can be learned "
            "from neighbours and every row would need a function of its own; give a length scale "
            f"of many times the distance of neighbouring rows, or {name}='median' (unless max_rank "
            f"says otherwise, the rank is limited to {SHORT_RANK})",
            LengthScaleWarning,
        )
        return True
    if same and np.ptp(points, axis=0).any():
        warn(
            f"{name}={brief(repr(kernel))} is too long for the rows: {among}, the kernel is the "
            "same for all pairs to ten digits, so the model sees no difference between them; give "
            f"a length scale in the units of the columns near their spread, or {name}='median'",
            LengthScaleWarning,
        )
    return False


# The context


class GivenLocation(NamedTuple):
    """A location that is known before the pass: one that the user gave, or trees.

    Attributes
    ----------
    residuals
        From it.
    words
        What it is, for the model and the plan.
    seconds
        What a regressor took to be fitted, else 0.
    auto
        Whether it is retained only where laws are better with it.
    """

    residuals: Residuals
    words: str
    seconds: float
    auto: bool = False


@dataclass(frozen=True, eq=False)
class FitContext:
    """What a fit has before its pass: rows, kernels, memory; and the bases that it makes of these.

    Attributes
    ----------
    sample, rows
        The rows and their row sample.
    kernels, pivots
        The kernel of each variable, and how its pivots come about.
    functions
        Declared functions of each variable, by name.
    seed
        Of everything random.
    n_folds
        Folds of the pass that follows.
    executor
        Where the fit runs, and the memory that is there.
    progress
        What the parts of the fit report to.
    passes, seconds
        Passes over the rows that the row sample took, and their time.
    candidates
        Further kernels of the only variable, to be compared with the first one.
    search
        The search for the kernels that are learned, if there are any.
    solver
        What turns moments into a solution, where trials of the arithmetic need it.
    averages
        Whether the density ratios of several learned kernels are averaged.
    events
        Events of y by which several learned kernels are compared on all rows.
    residual, calibration, conformal
        Whether a location model is tried, whether laws are calibrated, and whether conformity
        scores are computed: ``auto``, True or False.
    scores
        Normal scores of y whose location is fitted, where the best kernel takes them.
    mean
        The kernel of x that was learned for the location, if one was.
    locating
        The search for the location (``LocationSearch``), which may have begun; None once it is
        done, or if there is none.
    early_ridge
        The ridge regression on that kernel (``EarlyRidge``), where it is made before the pass.
    given
        A location that is known before the pass, or None.
    values
        The values of each column of y, where moved laws are brought to them; None elsewhere.
    run_pass
        Makes the pass of the moments: :func:`run_pass`, or what makes it together with that of
        another fit.
    imputed
        Whether missing values of x are filled in.
    held
        Bytes that the client holds of an earlier part of the fit: its sums over the rows.
    made, made_seconds
        Bases of its kernels that are there, by variable and kernel, and what they took.
    """

    sample: Sample
    rows: RowSample
    kernels: Sequence[Kernel]
    pivots: tuple[Pivots, ...]
    functions: Sequence[Mapping[str, Function]]
    seed: int
    n_folds: int
    executor: Executor
    progress: Progress | None
    passes: int
    seconds: float
    candidates: tuple[Kernel, ...] = ()
    search: Any = None
    solver: Any = None
    averages: bool = False
    events: ScoringFunctions | None = None
    residual: str | bool = False
    scores: Transform | None = None
    mean: MeanKernel | None = None
    locating: Any = None
    early_ridge: Any = None
    calibration: str | bool = False
    conformal: str | bool = False
    given: GivenLocation | None = None
    values: tuple[ColumnValues, ...] | None = None
    run_pass: RunPass = run_pass
    imputed: bool = False
    held: int = 0
    made: Mapping[tuple[int, Kernel], NewtonBasis] = field(default_factory=dict)
    made_seconds: float = 0.0

    @property
    def cores(self) -> int:
        """Threads of what the client computes on the row sample: one where its rows are few.

        Calls on small matrices are so short that threads would wait for the interpreter.
        """
        return 1 if len(self.rows) <= _ONE_THREAD else self.executor.cores

    def predict(
        self,
        ranks: tuple[int, ...],
        width: int | None = None,
        cells: Sequence[CellReduction] = (),
    ) -> tuple[list[RowRange], MemoryPlan]:
        """How the moment pass would be cut, and what the fit would need.

        Parameters
        ----------
        ranks, width
            Of the moments, see :func:`cme_dask.numerics.moments.moment_cost`; default of the width
            that of moments without functions.
        cells
            Whose rows the pass sums.

        Raises
        ------
        ResourceError
            If that does not fit into the memory.
        """
        if width is None:
            width = sum(ranks) + 1 + sum(len(columns.names) for columns in self.sample.columns)
        extent = extent_of(self.sample.for_folds(self.n_folds), self.executor)
        cost = self.choice_cost(max(ranks)) + moment_cost(ranks, width, self.n_folds, extent)
        for spec in cells:
            cost += spec.cost(extent)
        return plan_pass(cost, extent, self.executor)

    def choice_cost(self, rank: int) -> Cost:
        """What the client needs to choose ``rank`` pivots from the row sample, and to hold it.

        Pivots are chosen from one half of it and judged on the other half, unless it is complete.
        """
        n = len(self.rows)
        size = n if any(pivots.mode == "sampled" for pivots in self.pivots) else 0
        complete = self.sample.part is not None or n >= self.sample.n_rows
        row = -(-rank // BLOCK) * BLOCK * _WORD  # of L, in blocks of columns
        half = size if complete else -(-size // 2)
        # Pools are made in pools of an eighth of the rows each. Where a choice fails on the other
        # rows, its rows are doubled, and those of one half are held until the columns of all are
        # ready.
        if complete:
            columns = int(1.5 * size * row)
        else:
            chosen = prefix_rows(rank, half, by_trace=False)
            grown = min(2 * chosen, half)
            columns = half * row + int((1.5 if grown > chosen else 1.2) * grown * row)
        # Signs and sketch of the rows of a choice by trace, and of half as many before.
        sketches = 3 * SKETCH * prefix_rows(rank, half, by_trace=True) * _WORD
        width = sum(source.shape[1] for source in self.sample.reads) + _ROW_SAMPLE_WORDS
        held = n * width * _WORD + self.held
        # Rows as kernels map them: those that pivots are chosen from, and judged on.
        mapped = 2 * half * max(len(each.names) for each in self.sample.columns) * _WORD
        return Cost(alone={"the choice of pivots": columns + sketches + mapped}, held=held)

    def after_moments(self, features: tuple[FeatureBlock, ...]) -> Cost:
        """What the client holds in a pass that follows: the row sample, and moments by fold."""
        width = MomentReduction(features, self.n_folds).width
        return Cost(held=self.choice_cost(1).held + self.n_folds * width**2 * _WORD)

    def moments_on(self, bases: Sequence[Basis]) -> MomentReduction:
        """The moments of these bases and of the functions, with shifts near their means."""
        features = []
        for i, basis in enumerate(bases):
            columns, events = self.sample.columns[i].names, self.events if i == 1 else None
            block = FeatureBlock(basis, columns, dict(self.functions[i]), events=events)
            each = block.values(self.rows.parts[i])  # of thousands of functions, one at a time
            with one_blas_thread():
                shift = np.concatenate([self.rows.importance @ values for values in each])
            features.append(replace(block, shift=shift))
        return MomentReduction(tuple(features), self.n_folds)

    @property
    def location_rank(self) -> int | None:
        """Pivots of the basis that the location is fitted on, at most.

        Of few rows with a ridge that smooths, a third: more functions would be smoothed away.
        """
        pivots, mean = self.pivots[0], self.mean
        if not pivots.default_rank:
            return pivots.max_rank
        smooths = mean is not None and mean.reg >= _SMOOTHING and self.rows.complete
        return min(MAX_RANK, max(len(self.rows) // 3, _LEAST_RANK)) if smooths else MAX_RANK

    def moments_of_mean(self) -> MomentReduction | None:
        """The moments from which the location is fitted on the kernel that was learned for it.

        None where there is no such kernel, or the location is made before the pass.
        Of y only the functions are needed, so that one pivot is enough.
        """
        if self.mean is None or self.early_ridge is not None:
            return None
        with one_blas_thread():
            pivots = self.pivots[0]
            # A function that is almost free of noise takes more than a law of what is left, and
            # functions that its ridge keeps: without them it would go astray between the pivots.
            finer = replace(pivots, tol=min(pivots.tol, self.mean.reg), max_rank=self.location_rank)
            basis, _ = self._sampled(0, self.mean.kernel, (), finer)
            return self.moments_on([basis, self.basis_of_few(1, self.kernels[1], 1)])

    def basis_of_few(self, i: int, kernel: Kernel, rank: int) -> NewtonBasis:
        """A basis of variable ``i`` on at most ``rank`` of the first rows of the row sample."""
        few = self.rows.prefix(_FEW_ROWS)
        points = few.parts[i]
        result = pivoted_cholesky(kernel, points, _FEW_TOL, rank, weights=few.importance)
        return NewtonBasis(kernel, points[result.pivots], result.factor)

    @property
    def adds_rounds(self) -> bool:
        """Whether rounds over all rows add pivots where those of the row sample are too few."""
        # Residuals take one pass, and rounds over all rows are many.
        possible = not self.rows.complete and self.sample.residuals is None
        return possible and (self.pivots[0].promised or not self.averages)

    def bases_of_each(
        self, finalists: Sequence[Sequence[Kernel]]
    ) -> tuple[list[list[NewtonBasis]], list[PassReport], set[int]]:
        """Bases of several pairs of kernels, see :meth:`bases`; none is topped up.

        Kernels that several of them share have one basis. Where the rank ends the choice of pivots,
        those of the first kernel serve the others as well as their own would.

        Parameters
        ----------
        finalists
            The kernel of each variable, for each pair.
        """
        made, rounds = dict(self.made), list[PassReport]()
        short: set[int] = set()
        for kernels in finalists:
            bases, reports, missing = self.bases(kernels, top_up=False, made=made)
            rounds += reports
            short |= missing
            made |= dict(zip(enumerate(kernels), bases, strict=True))
        return [[made[key] for key in enumerate(kernels)] for kernels in finalists], rounds, short

    def bases(
        self,
        kernels: Sequence[Kernel],
        *,
        top_up: bool = True,
        made: Mapping[tuple[int, Kernel], NewtonBasis] | None = None,
    ) -> tuple[list[NewtonBasis], list[PassReport], set[int]]:
        """Bases of all variables, and the rounds over all rows that they took.

        The third result are the numbers of the variables whose pivots are known to be too few, and
        to which rounds are yet to add.

        Parameters
        ----------
        kernels
            The kernel of each variable.
        top_up
            Whether rounds over all rows add to such pivots here, if they may.
        made
            Bases that are there, by variable and kernel. Pivots of the first of each may serve
            other kernels.

        Raises
        ------
        DataError
            On a kernel that is zero.
        ResourceError
            As soon as the rank is one whose pass would not fit into memory.
        """
        short: set[int] = set()
        bases: dict[int, NewtonBasis] = {}
        remaining: dict[int, tuple[Rule, PivotState]] = {}
        made = made or {}
        for i, (pivots, kernel) in enumerate(zip(self.pivots, kernels, strict=True)):
            if (i, kernel) in made:
                bases[i] = made[i, kernel]
                continue
            if pivots.mode in IN_ROUNDS:
                columns = self.sample.columns[i].names
                remaining[i] = pivots.rule(kernel), PivotState.empty(len(columns))
                continue
            with one_blas_thread():
                if pivots.mode == "given":
                    bases[i] = self._given(i, kernel)
                    continue
                ranks = tuple(basis.rank for basis in bases.values())
                first = next((basis for (j, _), basis in made.items() if j == i), None)
                same = None if first is None else self._on_pivots_of(first, i, kernel)
                bases[i], reached = (
                    self._sampled(i, kernel, ranks) if same is None else (same, False)
                )
            if not reached and bases[i].rank != pivots.max_rank and self.adds_rounds:
                if top_up:
                    remaining[i] = pivots.rule(kernel), PivotState.of(bases.pop(i))
                else:
                    short.add(i)
        reports: list[PassReport] = []
        if remaining:
            states, reports = self._in_rounds(bases, remaining)
            for i, state in states.items():
                if not state.rank:
                    raise self._zero_kernel(i, "row")
                all_rows = self.rows.complete or self.pivots[i].mode != "sampled"
                if state.status == "exhausted" and all_rows:
                    self._warn_of_rank(i, state.rank, float(state.history[-1]))
                bases[i] = state.basis(kernels[i])
        return [bases[i] for i in range(len(kernels))], reports, short

    def topped_up(
        self, bases: Sequence[NewtonBasis], errors: Sequence[float]
    ) -> tuple[list[NewtonBasis] | None, list[PassReport]]:
        """Bases with more pivots where the row sample missed too much, and the rounds they took.

        None if there is nothing to add.

        Parameters
        ----------
        bases
            The bases of all variables.
        errors
            Relative trace error of each basis over all rows.
        """
        remaining = {
            i: (pivots.rule(basis.kernel), PivotState.of(basis))
            for i, (pivots, basis) in enumerate(zip(self.pivots, bases, strict=True))
            if pivots.mode == "sampled" and basis.rank != pivots.max_rank and errors[i] > pivots.tol
        }
        if not remaining or not self.adds_rounds:
            return None, []
        others = {i: basis for i, basis in enumerate(bases) if i not in remaining}
        states, reports = self._in_rounds(others, remaining)
        if not any(state.rank > bases[i].rank for i, state in states.items()):
            return None, reports
        more = {i: state.basis(bases[i].kernel) for i, state in states.items()}
        return [more.get(i, basis) for i, basis in enumerate(bases)], reports

    def warn_of_trace(self, reached: Sequence[tuple[float | None, int]]) -> None:
        """Warn of trace errors over all rows that miss the tolerance of pivots not given.

        Parameters
        ----------
        reached
            Of each basis its trace error, None of one that approximates no kernel, and its rank.
        """
        for pivots, (error, rank) in zip(self.pivots, reached, strict=True):
            limit = pivots.tol if pivots.promised else max(pivots.tol, _COARSE)
            given = pivots.mode == "given" or self.sample.residuals is not None
            if self.averages and (pivots.max_rank or MAX_RANK) < MAX_RANK and pivots.default_rank:
                continue  # the rows are too few for more
            if given or error is None or error <= limit:
                continue
            text = f"{pivots.variable}: trace error {error:.2e} over all rows at rank {rank}"
            if pivots.promised:
                text = f"{text}, tol is {pivots.tol:g}"
            if pivots.max_rank is not None and rank >= pivots.max_rank:
                default = " (the default)" if pivots.default_rank else ""
                remedy = "" if not pivots.default_rank and pivots.promised else ": raise max_rank"
                text = f"{text}: max_rank={pivots.max_rank}{default} was reached{remedy}"
                warn(text, RankWarning)
            elif pivots.mode == "sampled" and not self.rows.complete:
                reason = (
                    "the rows span no more than that, to rounding; raise tol"
                    if pivots.promised
                    else "pivots were chosen from the row sample alone; give tol, and rounds over "
                    "all rows add what it missed"
                )
                warn(f"{text}: {reason}", ToleranceWarning)

    def _given(self, i: int, kernel: Kernel) -> NewtonBasis:
        """Basis on given points; a RankWarning if some of them are left out."""
        pivots = self.pivots[i]
        most = None if pivots.default_rank else pivots.max_rank
        basis, count = NewtonBasis.from_points(kernel, pivots.points, most), len(pivots.points)
        if not basis.rank:
            raise self._zero_kernel(i, "given pivot")
        all_rows = any(pivots.points is part for part in self.rows.parts)  # of an exact fit
        if basis.rank < count and not all_rows:
            limit = f"max_rank={most} was reached" if basis.rank == most else ""
            warn(
                f"{pivots.variable}: {count - basis.rank} of {count} given pivots were left out, "
                f"since {limit or 'the others span them to rounding'}",
                RankWarning,
            )
        return basis

    def _sampled(
        self, i: int, kernel: Kernel, ranks: tuple[int, ...], pivots: Pivots | None = None
    ) -> tuple[NewtonBasis, bool]:
        """Pivots from the row sample, and whether they are known to be enough.

        Parameters
        ----------
        i, kernel
            The variable.
        ranks
            Of the bases that are made already.
        pivots
            How they are chosen, if it is not as those of the variable.
        """
        pivots, rows = pivots or self.pivots[i], self.rows

        def on_pivot(rank: int, residual: float) -> None:
            if rank % _CHECK_EVERY == 0:
                self.predict((*ranks, rank))
            self._report(i, rank, residual)

        self.predict((*ranks, 1))
        with ThreadPoolExecutor(self.executor.cores) as threads:
            result = sampled_cholesky(
                kernel, rows, i, pivots.tol, pivots.max_rank, on_pivot=on_pivot, threads=threads
            )
        chosen = result.pivots
        if not len(chosen):
            raise self._zero_kernel(i, "sampled row")
        if result.exhausted and rows.complete:
            self._warn_of_rank(i, len(chosen), result.residual_trace[-1])
        points, index = rows.parts[i][chosen], rows.index[chosen]
        return NewtonBasis(kernel, points, result.factor, index), result.reached

    def _on_pivots_of(self, other: NewtonBasis, i: int, kernel: Kernel) -> NewtonBasis | None:
        """The basis on the pivots of another kernel, if this one needs as many as there may be."""
        pivots = self.pivots[i]
        if pivots.mode != "sampled" or other.rank != pivots.max_rank:
            return None
        basis = other.on_same_pivots(kernel)
        if basis is None:
            return None
        few = self.rows.prefix(_FEW_ROWS)
        share, diagonal = few.importance, np.asarray(kernel.diagonal(few.parts[i]))
        left = diagonal - (basis(few.parts[i]) ** 2).sum(axis=1)
        residual = float(share @ left.clip(min=0.0)) / float(share @ diagonal)
        if residual <= pivots.tol:
            return None
        self._report(i, basis.rank, residual)
        return basis

    def _in_rounds(
        self, bases: Mapping[int, NewtonBasis], remaining: Mapping[int, tuple[Rule, PivotState]]
    ) -> tuple[dict[int, PivotState], list[PassReport]]:
        """Last states of the variables that are chosen in rounds; the others have bases."""
        ranks = {i: basis.rank for i, basis in bases.items()}

        def on_round(i: int, state: PivotState) -> None:
            # Pivots beyond the measured ones may yet turn out not to be needed.
            ranks[i] = len(state.history) - 1
            self.predict(tuple(ranks[j] for j in sorted(ranks)))
            self._report(i, state.rank, float(state.history[-1]))

        return choose_in_rounds(self.sample, remaining, self.executor, self.progress, on_round)

    def _report(self, i: int, rank: int, residual: float) -> None:
        variable = self.pivots[i].variable
        info = {"event": "pivots", "variable": variable, "rank": rank, "residual": residual}
        level = logging.DEBUG if rank & (rank - 1) else logging.INFO  # a line whenever it doubles
        text = "pivots of %s: rank %d, residual %.2e"
        log.log(level, text, variable, rank, residual, extra=info)
        if self.progress is not None:
            self.progress(PivotProgress(variable, rank, residual, self.pivots[i].tol))

    def _warn_of_rank(self, i: int, rank: int, residual: float) -> None:
        warn(
            f"{self.pivots[i].variable}: the kernel has numerical rank {rank} on the rows, reached "
            f"at trace error {residual:.2e} before tol={self.pivots[i].tol:g}",
            RankWarning,
        )

    def _zero_kernel(self, i: int, where: str) -> DataError:
        variable = self.pivots[i].variable
        return DataError(f"the kernel of {variable} is zero at every {where}: choose another")
