"""Kernels and ridge learned from the rows, by held-out losses."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import minimize

from cme_dask.errors import DataError
from cme_dask.kernels import Kernel, Transform
from cme_dask.kernels.length_scales import IGNORED, SCALES, WIDEST
from cme_dask.learning.candidates import (
    KernelPoint,
    Score,
    Search,
    TrialResult,
    Tuning,
    VariableKernels,
    at_bounds,
    candidate,
    ignored_columns,
    long_columns,
    without,
)
from cme_dask.learning.losses import (
    LOG_CELLS,
    CelledRows,
    ScreenedRows,
    ScreenedSide,
    log_loss,
    screened_folds,
)
from cme_dask.learning.partition import make_support
from cme_dask.learning.transforms import constant_columns, learn_transform
from cme_dask.numerics.crossval import HeldFold, over_folds
from cme_dask.numerics.moments import Function
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.numerics.scoring import ScoringFunctions, declared, make_thresholds

# The rows of a search, and the losses of pairs of kernels on them, each made once


Array = Any

FORMS = ("standard", "scores")
_HELD_SIDES = 24  # bases of some megabytes each: those of the grid
_WORD = 8

Estimated = tuple[Array, Array]
"""Means over the folds for each ridge, and their standard errors."""

SearchCallback = Callable[[str, int, int, float | None, tuple[int, ...]], None]
"""Called with the stage, its trials so far and at most, the best score or None, and its ranks."""


@dataclass(eq=False)
class SearchedVariable:
    """One variable of the search: its rows in each form of transform."""

    rows: Array
    weights: Array
    categorical: tuple[bool, ...]
    given: Kernel | None
    maps: dict[str, Transform] = field(default_factory=dict)
    constant: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.given is None:
            for form in FORMS:
                self.maps[form] = learn_transform(self.rows, self.weights, self.categorical, form)
            self.constant = tuple(constant_columns(self.rows, self.weights, self.categorical))
        # Categories have no scores: with nothing else there is one form only.
        self.forms = tuple(self.maps)[: 1 if all(self.categorical) else 2] or ("given",)
        self.values = {form: self.at(self.rows, form) for form in (*self.maps, "given")}

    def at(self, rows: Array, form: str) -> Array:
        """Other rows, mapped alike."""
        return rows if form == "given" else np.asarray(self.maps[form](rows))

    def start(self, form: str, scale: float) -> KernelPoint:
        """One length scale for all varying numeric columns, larger the more there are."""
        if form == "given":
            return KernelPoint(form)
        numeric = len(self.categorical) - sum(self.categorical) - len(self.constant)
        each = [
            IGNORED if j in self.constant else 1.0 if coded else float(np.sqrt(numeric))
            for j, coded in enumerate(self.categorical)
        ]
        return KernelPoint(form, tuple(each)).scaled([scale] * len(each))

    @property
    def kernels(self) -> VariableKernels:
        """What makes kernels of points, without the rows."""
        return VariableKernels(self.categorical, self.given, self.maps)


class Searcher:
    """Losses of pairs of kernels, each made once."""

    def __init__(
        self,
        variables: tuple[SearchedVariable, SearchedVariable],
        rows: ScreenedRows,
        judges: ScoringFunctions,
        regs: Sequence[Regularization],
        options: Tuning,
        tol: float,
        callback: SearchCallback | None,
        celled: CelledRows | None = None,
    ) -> None:
        self.variables, self._rows, self._judges, self._celled = variables, rows, judges, celled
        self.regs, self._options, self._tol, self._heard = regs, options, tol, callback
        self._sides: dict[tuple[int, KernelPoint], ScreenedSide] = {}
        self._losses: dict[tuple[KernelPoint, KernelPoint], tuple[Estimated, Estimated]] = {}
        self._stages: dict[tuple[KernelPoint, KernelPoint], str] = {}
        self._ranks: dict[tuple[int, KernelPoint], int] = {}
        self._best: tuple[KernelPoint, KernelPoint] | None = None
        self.score_of = Score()

    def side(self, i: int, point: KernelPoint) -> ScreenedSide:
        """The basis of variable ``i``; those that were made first are forgotten first."""
        if (i, point) not in self._sides:
            variable = self.variables[i]
            if len(self._sides) >= _HELD_SIDES:
                self._sides.pop(next(iter(self._sides)))
            values = variable.values[point.form][self._rows.order]
            self._sides[i, point] = ScreenedSide(
                self._rows, variable.kernels.inner(point), values, self._tol, self._options.max_rank
            )
            self._ranks[i, point] = self._sides[i, point].rank
        return self._sides[i, point]

    def losses(self, x: KernelPoint, y: KernelPoint, stage: str) -> tuple[Array, Array]:
        """Joint loss, and sliced CRPS over independence's or log loss, for each ridge."""
        if (x, y) not in self._losses:
            sides = self.side(0, x), self.side(1, y)
            folds = screened_folds(self._rows, *sides)
            joint, second = estimated(folds, self.regs, self._judges)
            if self._celled is not None:
                points = self.variables[1].at(self._celled.support.points, y.form)
                bases = sides[0].newton, sides[1].at(points)
                second = log_loss(folds, self.regs, self._celled, *bases)
            self._losses[x, y] = joint, second
            self._stages[x, y] = stage
        joint, crps = self._losses[x, y]
        return joint[0], crps[0]

    def settle(self) -> None:
        """Score from now on by the best candidates so far."""
        self.score_of, _ = self._settled()

    def _settled(self) -> tuple[Score, float | None]:
        """The score by the best candidates so far, and theirs; None if independence is better."""
        losses = [
            [np.concatenate([each[i][k] for each in self._losses.values()]) for k in (0, 1)]
            for i in (0, 1)
        ]
        best = [int(values.argmin()) for values, _ in losses]
        gains = [-float(values[at]) for (values, _), at in zip(losses, best, strict=True)]
        errors = [float(spreads[at]) for (_, spreads), at in zip(losses, best, strict=True)]
        score = Score.of(self._options.criterion, gains, errors)
        scores = score(losses[0][0], losses[1][0])
        at = int(scores.argmin())
        self._best = list(self._losses)[at // len(self.regs)]
        least = float(scores[at])
        return score, least if least < 0.0 else None

    def scores(self, x: KernelPoint, y: KernelPoint, stage: str) -> Array:
        """The score for each ridge."""
        return self.score_of(*self.losses(x, y, stage))

    def score(self, x: KernelPoint, y: KernelPoint, stage: str) -> float:
        """The score with the best ridge."""
        return float(self.scores(x, y, stage).min())

    def trials(self) -> list[TrialResult]:
        """All pairs that were tried, in that order, by the last scores."""
        result = []
        for (x, y), stage in self._stages.items():
            scores = self.scores(x, y, stage)
            best = int(scores.argmin())
            joint, crps = (float(each[best]) for each in self.losses(x, y, stage))
            reg, score = self.regs[best].x, float(scores[best])
            result.append(TrialResult(x, y, reg, joint, crps, score, stage))
        return result

    def hear(self, stage: str, done: int, most: int) -> None:
        """Report how far the stage is, with the score of the best candidate so far.

        It is that by the best so far, about -1 or -2 then, whatever the search goes by now; while
        none is better than independence, scores have no unit, and none is reported.
        """
        if self._heard is not None:
            score = self._settled()[1]
            best = self._best or ()
            ranks = tuple(self._ranks[i, point] for i, point in enumerate(best))
            self._heard(stage, done, most, score, ranks)


def search_bytes(rows: int, columns: int, rank: int, folds: int) -> int:
    """Peak of a search.

    Parameters
    ----------
    rows, columns
        Rows that it sees, and columns of x and y.
    rank
        Largest number of pivots of a basis.
    folds
        Folds F.
    """
    rank = min(rank, rows)
    # A basis at the rows, its factor, Gram matrices and transforms of all folds, their sum.
    held = rows * rank + (2 * folds + 2) * rank**2
    # What one more is made from: its sections, the elimination, weighted copies.
    made = 8 * rows * rank
    # Columns as they are and mapped, sorted, in the order of the folds.
    values = 6 * rows * columns
    return (_HELD_SIDES * held + made + values) * _WORD


def estimated(
    folds: Sequence[HeldFold], regs: Sequence[Regularization], judges: ScoringFunctions
) -> tuple[Estimated, Estimated]:
    """Joint loss, and sliced CRPS less that of independence, for each ridge."""
    each = [fold.losses(regs) for fold in folds]
    q = len(judges)  # the last of the functions
    crps = [(one.squared[:, -q:] - one.baseline[-q:]) @ judges.scores for one in each]
    return over_folds(folds, np.stack([one.joint for one in each])), over_folds(
        folds, np.stack(crps)
    )


GRID = (0.2, 0.4, 0.8, 1.6, 3.2)
"""Shared length scales, in standard deviations and for one column."""
REGS = tuple(10.0**p for p in (-7, -6, -5, -4, -3, -2, -1, 0))
"""Ridges, the same for both variables."""

_OFF = 8.0  # a column's length scale is made so much longer to see if it is needed
_DIGITS, _SCORE_DIGITS = 2, 7  # of logarithms of length scales, and of scores
_APART = 0.5  # logarithms of the length scales of two finalists differ by this much at least


def search(
    parts: tuple[Array, Array],
    weights: Array,
    folds: Array,
    given: tuple[Kernel | None, Kernel | None],
    categorical: tuple[tuple[bool, ...], tuple[bool, ...]],
    *,
    functions: Mapping[str, Function] | None = None,
    reg: Regularization | None = None,
    options: Tuning | None = None,
    tol: float = 1e-5,
    seed: int = 0,
    callback: SearchCallback | None = None,
) -> Search:
    """Search transforms, length scales and ridge by cross-validation on a row sample.

    A grid of shared length scales for every form of transform; then each column of x is tried
    with a much longer one; then all are refined together (``scipy.optimize``, COBYQA) between 0.05
    and 50 standard deviations. Where the best ends at one of these bounds, it is refined again
    between 0.005 and 500. Columns with long scales are ignored altogether where nothing is lost by
    that, except for the last one of a variable.

    Parameters
    ----------
    parts
        Rows of x and y of the row sample, shapes (n, d).
    weights
        Of the rows, sum 1, shape (n,).
    folds
        Fold number of each row, shape (n,).
    given
        Kernels that are not learned, None for those that are.
    categorical
        Which columns are codes of categories, for each variable.
    functions
        Declared functions of y by name, for ``criterion="validation"``.
    reg
        The ridge, if it is not learned.
    options
        How to search.
    tol
        Relative trace error that the bases aim at.
    seed
        Of the directions of the sliced CRPS.
    callback
        Told how far it is.

    Raises
    ------
    DataError
        If fewer than two folds have rows, or functions that are needed are missing.
    """
    begin, options = time.perf_counter(), (options or Tuning()).settled(parts[1].shape[1])
    if len(np.unique(folds)) < 2:
        raise DataError(
            "kernels are learned on held-out folds, and the row sample has rows of one only: give "
            "kernels, more rows or more folds"
        )
    judges: ScoringFunctions = (
        declared(functions, parts[1], weights)
        if options.criterion == "validation"
        else make_thresholds(parts[1], weights, categorical[1], seed)
    )
    rows = ScreenedRows(weights, folds, judges(parts[1]))
    support = celled = None
    if options.criterion == "log":
        support = make_support(parts[1], weights, LOG_CELLS, categorical[1])
        celled = CelledRows(support, parts[1][rows.order], rows.weights, rows.slices)
    variables = tuple(
        SearchedVariable(part, weights, coded, kernel)
        for part, coded, kernel in zip(parts, categorical, given, strict=True)
    )
    regs = [Regularization(r, r) for r in REGS] if reg is None else [reg]
    searcher = Searcher(variables, rows, judges, regs, options, tol, callback, celled)  # type: ignore[arg-type]
    with one_blas_thread():
        best = _grid(searcher)
        best = _columns(searcher, *best)
        columns = sum(part.shape[1] for part in parts)
        most = 40 + 5 * columns if options.evaluations is None else options.evaluations
        _refine(searcher, *best, most, "refine")
        searcher.settle()
        _widen(searcher, most // 2)
        best_trials = _simplified(searcher, _finalists(searcher.trials(), options.finalists))
    trials = searcher.trials()

    kernels = variables[0].kernels, variables[1].kernels
    finalists = tuple(candidate(kernels, reg, trial) for trial in best_trials)
    seconds = time.perf_counter() - begin
    score = searcher.score_of
    return Search(
        tuple(trials),
        finalists,
        judges,
        score,
        seconds,
        kernels,
        reg,
        criterion=options.criterion,
        rows=len(folds),
        support=support,
    )


Pair = tuple[KernelPoint, KernelPoint]


def _grid(searcher: Searcher) -> Pair:
    xs, ys = (
        [v.start(f, s) for f in v.forms for s in (GRID if v.given is None else GRID[:1])]
        for v in searcher.variables
    )
    pairs = list(product(xs, ys))
    for done, (x, y) in enumerate(pairs):
        searcher.losses(x, y, "grid")
        if done % 10 == 0:
            searcher.settle()
            searcher.hear("grid", done, len(pairs))
    searcher.settle()
    return min(pairs, key=lambda pair: searcher.score(pair[0], pair[1], "grid"))


def _columns(searcher: Searcher, x: KernelPoint, y: KernelPoint) -> Pair:
    """Columns of x whose length scale had better be much longer, one after the other."""
    count = len(x.free)
    if count < 2:
        return x, y
    best = searcher.score(x, y, "columns")
    for done, j in enumerate(x.free, 1):
        tried = x.scaled([_OFF if i == j else 1.0 for i in range(len(x.scales))])
        score = searcher.score(tried, y, "columns")
        if score < best:
            best, x = score, tried
        searcher.hear("columns", done, count)
    return x, y


def _refine(
    searcher: Searcher,
    x: KernelPoint,
    y: KernelPoint,
    evaluations: int,
    stage: str,
    bounds: tuple[float, float] = SCALES,
) -> None:
    """All length scales together, from the best so far; ignored columns stay ignored."""
    all_scales = np.asarray([*x.scales, *y.scales])
    active = all_scales < IGNORED
    start = np.log(np.clip(all_scales[active], *bounds))
    if not len(start) or evaluations <= len(start) + 2:
        return
    done = 0

    def objective(logarithms: Array) -> float:
        nonlocal done
        # Rounded, as scores are: then a path does not follow the last bits of the rows.
        scales = all_scales.copy()
        scales[active] = np.exp(np.round(logarithms, _DIGITS))
        score = searcher.score(*_pair(x, y, scales.tolist()), stage)
        done += 1
        searcher.hear(stage, done, evaluations)
        return round(score, _SCORE_DIGITS)

    minimize(
        objective,
        start,
        method="COBYQA",
        bounds=[(np.log(bounds[0]), np.log(bounds[1]))] * len(start),
        options={"maxfev": evaluations, "initial_tr_radius": 0.5, "final_tr_radius": 0.05},
    )


def _pair(x: KernelPoint, y: KernelPoint, scales: Sequence[float]) -> Pair:
    """The same transform with other length scales."""
    count = len(x.scales)
    return replace(x, scales=tuple(scales[:count])), replace(y, scales=tuple(scales[count:]))


def _widen(searcher: Searcher, evaluations: int) -> None:
    """Refine between wider bounds, if the best kernels lie at those of before."""
    trial = min(searcher.trials(), key=lambda t: t.score)
    scales, ignored = _ignored(searcher, trial)
    if not at_bounds(without(scales, ignored)):
        return
    x, y = _pair(trial.x, trial.y, without(scales, ignored))
    _refine(searcher, x, y, evaluations, "widen", WIDEST)
    searcher.settle()


def _ignored(
    searcher: Searcher, trial: TrialResult, among: Sequence[int] | None = None
) -> tuple[tuple[float, ...], list[int]]:
    """Length scales of a trial, and the columns that it does as well without."""
    count, scales = len(trial.x.scales), (*trial.x.scales, *trial.y.scales)

    def score(changed: tuple[float, ...]) -> float:
        return searcher.score(*_pair(trial.x, trial.y, changed), "ignore")

    candidates = long_columns(scales, (slice(0, count), slice(count, None)))
    if among is not None:
        candidates = [j for j in candidates if j in among]
    return scales, ignored_columns(scales, candidates, score)


def _simplified(searcher: Searcher, trials: Sequence[TrialResult]) -> list[TrialResult]:
    """The trials without columns that they do as well without, best first.

    Columns that the first one needs are left to the others, too.
    """
    pairs: dict[Pair, None] = {}
    among: list[int] | None = None
    for trial in trials:
        scales, ignored = _ignored(searcher, trial, among)
        if among is None:
            unused = [j for j, scale in enumerate(scales) if scale >= IGNORED]
            among = [*ignored, *unused]
        pairs[_pair(trial.x, trial.y, without(scales, ignored))] = None
    result = [trial for trial in searcher.trials() if (trial.x, trial.y) in pairs]
    return sorted(result, key=lambda trial: trial.score)


def _finalists(trials: Sequence[TrialResult], count: int) -> list[TrialResult]:
    """The best trials whose kernels differ."""
    chosen: list[TrialResult] = []
    for trial in sorted(trials, key=lambda t: t.score):
        if len(chosen) == count:
            break
        if all(_apart(trial, other) for other in chosen):
            chosen.append(trial)
    return chosen


def _apart(one: TrialResult, two: TrialResult) -> bool:
    if (one.x.form, one.y.form) != (two.x.form, two.y.form):
        return True
    # Beyond the bounds of the first search all long scales are alike.
    scales = (np.log(np.minimum([*t.x.scales, *t.y.scales], SCALES[1])) for t in (one, two))
    first, second = scales
    return bool(np.abs(first - second).max(initial=0.0) >= _APART)
