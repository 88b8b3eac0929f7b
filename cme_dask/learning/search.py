"""The search for kernels: coordinates, length scales and columns, by the losses of a problem."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np
from scipy.optimize import minimize

from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import one_blas_thread, parallel_map
from cme_dask.kernels.length_scales import IGNORED, SCALES, WIDEST
from cme_dask.learning.candidates import (
    KernelPoint,
    SearchedVariable,
    TrialMemory,
    TuningProgress,
    recalled,
)
from cme_dask.learning.losses import ScreenedRows, ScreenedSide

Array = Any

Pair = tuple[KernelPoint, KernelPoint]
"""Kernels of x and of y."""

Trial = tuple[Array, Array, int, tuple[int, int]]
"""Losses of a pair and their errors, the first of the ridges, and the ranks of both bases."""

SearchCallback = Callable[[TuningProgress], None]
"""Called with how far the search is."""

GRID = (0.2, 0.4, 0.8, 1.6, 3.2)
"""Shared length scales, in standard deviations and for one column."""

_HELD_SIDES = 16  # bases of some megabytes each: most of those of the grid
_HELD_LATER = 8  # on all rows, where few pairs are compared
_THREADS = 4  # at most: pairs of small matrices share one interpreter
_WORD = 8
_OFF = 8.0  # a column's length scale is made so much longer to see if it is needed
_DIGITS, _SCORE_DIGITS = 2, 7  # of logarithms of length scales, and of scores
_GRADIENT_DIGITS = 3  # of logarithms of length scales that follow a gradient
_APART = 0.5  # logarithms of the length scales of two finalists differ by this much at least
_NEAR = 1.1  # within this factor of a bound a length scale is at it
_LONG, _LONGER = 5.0, 6.0  # deviations, and times the shortest: a column that may not be needed
_WORSE = 2e-4  # of the score: less is no loss
_SHORTLIST = 3  # the best pairs of fewer rows: with 8 of them laws were no better on average
_MORE = 4  # times as many rows resolve length scales that fewer ones do not
_FACTORS = (0.7, 1.4)

REFINED = 24
"""Length scales that are refined by themselves, at most: others of wide tables share a factor."""

SMOOTHNESS, ROUGHER = (2.5, 1.5, 0.5), 1.35


@dataclass(frozen=True, eq=False)
class SearchProblem(ABC):
    """What a search minimises, on rows in memory.

    Attributes
    ----------
    variables
        x and y. Those with a given kernel are not searched.
    rows
        The rows by fold, with the functions that losses are made of.
    tol, max_rank
        Of the bases.
    """

    variables: tuple[SearchedVariable, SearchedVariable]
    rows: ScreenedRows
    tol: float
    max_rank: int

    per_pivot = 2
    """Rows for each pivot among which pivots are chosen."""

    relative = False
    """Whether independence scores 0, so that a score has a unit once one is better."""

    @property
    def ridge_by_ridge(self) -> bool:
        """Whether the losses for each ridge take time of their own, and have gradients."""
        return False

    rougher = False
    """Whether Matern kernels of x are compared with the best Gaussian one."""

    def smaller(self) -> "SearchProblem":
        """What is searched first, in the place of all rows: the same problem, or one on fewer."""
        return self

    @property
    @abstractmethod
    def ridges(self) -> int:
        """Number of ridges that are compared, in their order."""

    @abstractmethod
    def losses(self, x: ScreenedSide, y: ScreenedSide, among: slice) -> tuple[Array, Array]:
        """Held-out losses of a pair of bases for R of the ridges, and errors, shapes (k, R)."""

    def gradient(
        self, x: ScreenedSide, y: ScreenedSide, ridge: int, score_of: Callable[..., Array]
    ) -> list[list[float]]:
        """The gradient of the score with a ridge in the parameters of the kernels of x and of y.

        Only where ``ridge_by_ridge``; of a kernel that is given, none.
        """
        raise NotImplementedError

    def scoring(self, losses: Array, errors: Array) -> Callable[..., Array]:
        """What the k losses add up to, by those of all that was tried, shapes (k, T)."""
        return lambda loss: loss


class KernelSearch:
    """Pairs of kernels that were tried, with their losses, each made once.

    Parameters
    ----------
    problem, callback, evaluations, memory, cores
        As in :func:`search`.
    after
        A search on fewer rows: how it scored and its best ridge are those at first.
    """

    def __init__(
        self,
        problem: SearchProblem,
        callback: SearchCallback | None,
        evaluations: int,
        memory: TrialMemory | None = None,
        cores: int = 1,
        after: "KernelSearch | None" = None,
    ) -> None:
        self.problem, self._callback, self._memory = problem, callback, memory
        self.cores = min(cores, _THREADS)
        x = problem.variables[0]
        screened = 0 if x.given is not None else len(x.categorical) - len(x.constant)
        later = evaluations + (screened if screened > 1 else 0)
        self._later = {"grid": later, "columns": evaluations}
        self.stages: dict[Pair, str] = {}
        self.losses: dict[Pair, tuple[Array, Array]] = {}
        self.ridges: dict[Pair, int] = {}
        """The first ridge of the losses of a pair."""
        self._reported = 0
        self.score_of: Callable[..., Array] = lambda *losses: losses[0]
        self._near: int | None = None
        if after is not None:
            self.score_of, self._near = after.score_of, after._near
        self._sides: dict[tuple[int, KernelPoint], ScreenedSide] = {}
        self._values: dict[tuple[int, str], Array] = {}
        self._slopes: dict[tuple[Pair, str], Array] = {}
        self._ahead: dict[Pair, Trial] = {}
        self._ranks: dict[tuple[int, KernelPoint], int] = {}
        self.relevance: dict[int, float] = {}
        """What a column of x lost with a much longer length scale, where that was tried."""
        learned = all(variable.given is None for variable in problem.variables)
        most = _HELD_SIDES if after is None else _HELD_LATER
        self._most_sides = most if learned else 2  # else no pair shares a learned one

    def _side(self, i: int, point: KernelPoint) -> ScreenedSide:
        """The basis of variable ``i``; those that were used least recently are forgotten."""
        side = self._sides.pop((i, point), None)
        self._sides[i, point] = self._made((i, point)) if side is None else side
        self._forget()
        return self._sides[i, point]

    def _made(self, of: tuple[int, KernelPoint]) -> ScreenedSide:
        i, point = of
        problem, variable = self.problem, self.problem.variables[i]
        kernel, values = variable.kernels.inner(point), self._values.get((i, point.form))
        if values is None:
            values = self._values[i, point.form] = variable.values[point.form][problem.rows.order]
        options = problem.tol, problem.max_rank, problem.per_pivot
        return ScreenedSide(problem.rows, kernel, values, *options)

    def each(self, pairs: Iterable[Pair], stage: str) -> Iterator[Pair]:
        """Score pairs that do not depend on one another, several at once."""
        waiting = list(dict.fromkeys(pairs))
        for start in range(0, len(waiting), 2 * self.cores):
            some = waiting[start : start + 2 * self.cores]
            if self.cores > 1:
                self._make_ahead(some)
            for pair in some:
                self.scores(pair, stage)
                yield pair

    def _make_ahead(self, pairs: Sequence[Pair]) -> None:
        memory, sides = self._memory, self._sides
        new = [
            pair
            for pair in pairs
            if pair not in self.losses and (memory is None or memory.get(self._key(pair)) is None)
        ]
        used = list(dict.fromkeys(side for pair in new for side in enumerate(pair)))
        missing = [side for side in used if side not in sides]
        sides |= zip(missing, parallel_map(self._made, missing, self.cores), strict=True)

        def trial(pair: Pair) -> Trial:
            return self._trial(*(sides[side] for side in enumerate(pair)))

        self._ahead = dict(zip(new, parallel_map(trial, new, self.cores), strict=True))
        for side in used:
            sides[side] = sides.pop(side)
        self._forget()

    def _forget(self) -> None:
        while len(self._sides) > self._most_sides:
            self._sides.pop(next(iter(self._sides)))

    def _key(self, pair: Pair) -> tuple[Any, ...]:
        problem = self.problem
        return len(problem.rows.order), problem.max_rank, *pair

    def scores(self, pair: Pair, stage: str) -> Array:
        """The score for each ridge that was tried, from ``ridges[pair]`` on."""
        if pair not in self.losses:
            losses, errors, self.ridges[pair], ranks = recalled(
                self._memory, self._key(pair), lambda: self._losses(pair)
            )
            self.losses[pair] = losses, errors
            self._ranks |= {(i, pair[i]): ranks[i] for i in (0, 1)}
            self.stages[pair] = stage
        return self.score_of(*self.losses[pair][0])

    def _losses(self, pair: Pair) -> Trial:
        found = self._ahead.pop(pair, None)
        x, y = enumerate(pair)
        return self._trial(self._side(*x), self._side(*y)) if found is None else found

    def _trial(self, x: ScreenedSide, y: ScreenedSide) -> Trial:
        """Losses for all ridges, or for those around the best one."""
        ranks, near, count = (x.rank, y.rank), self._near, self.problem.ridges
        if near is None:
            return *self.problem.losses(x, y, slice(0, count)), 0, ranks
        low, high = max(near - 1, 0), min(near + 2, count)
        losses, errors = self.problem.losses(x, y, slice(low, high))
        while True:
            at = low + int(self.score_of(*losses).argmin())
            if at == low > 0:
                low, more = low - 1, slice(low - 1, low)
            elif at == high - 1 < count - 1:
                high, more = high + 1, slice(high, high + 1)
            else:
                return losses, errors, low, ranks
            parts = zip((losses, errors), self.problem.losses(x, y, more), strict=True)
            before = more.start == low
            losses, errors = (
                np.concatenate([new, known] if before else [known, new], axis=1)
                for known, new in parts
            )

    def ridge(self, pair: Pair) -> int:
        """The best ridge of a pair that was tried."""
        return self.ridges[pair] + int(self.score_of(*self.losses[pair][0]).argmin())

    def score(self, pair: Pair, stage: str = "") -> float:
        """The score with the best ridge."""
        return float(self.scores(pair, stage).min())

    @property
    def best(self) -> Pair:
        """The pair with the lowest score so far."""
        return min(self.stages, key=self.score)

    def slopes(self, pair: Pair, stage: str) -> Array:
        """Derivatives of the score in logarithms of the length scales of x and of y, (d,).

        Only where the problem is ``ridge_by_ridge``; the stage tells by which losses it scores.
        """
        if (pair, stage) not in self._slopes:
            key = *self._key(pair), stage
            self._slopes[pair, stage] = recalled(self._memory, key, lambda: self._gradient(pair))
        return self._slopes[pair, stage]

    def _gradient(self, pair: Pair) -> Array:
        x, y = (self._side(*side) for side in enumerate(pair))
        found = self.problem.gradient(x, y, self.ridge(pair), self.score_of)
        result = []
        for variable, point, gradient in zip(self.problem.variables, pair, found, strict=True):
            slopes, scales = np.zeros(len(point.scales)), np.array(point.scales)
            at = variable.kernels.parameters(point)
            if gradient and at:  # a kernel of constants has parameters that count for nothing
                slopes[at] = gradient * scales[at]
            result.append(slopes)
        return np.concatenate(result)

    def settle(self) -> None:
        """Score from now on by the best losses so far, and look for ridges near the best one."""
        self.score_of = self.problem.scoring(*self._tried())
        if self.problem.ridge_by_ridge:
            self._near = self.ridge(self.best)

    def _tried(self) -> tuple[Array, Array]:
        losses, errors = zip(*self.losses.values(), strict=True)
        return np.concatenate(losses, axis=1), np.concatenate(errors, axis=1)

    def report(self, stage: str, done: int, most: int) -> None:
        """Report how far the stage is, with the score of the best so far.

        It is that by the best so far, about -1 or -2 then, whatever the search goes by now; while
        none is better than independence, scores have no unit, and none is reported.
        """
        if self._callback is None:
            return
        losses, errors = self._tried()
        scores = self.problem.scoring(losses, errors)(*losses)
        at = int(scores.argmin())
        ends = np.cumsum([each.shape[1] for each, _ in self.losses.values()])
        best = list(self.losses)[int(np.searchsorted(ends, at, side="right"))]
        ranks = tuple(self._ranks[side] for side in enumerate(best))
        known = scores[at] < 0.0 or not self.problem.relative
        score = float(scores[at]) if known else None
        later = self._later.get(stage, 0)
        new = islice(self.losses.values(), self._reported, None)
        losses_of = tuple(float(loss[0].min()) for loss, _ in new)
        self._reported = len(self.losses)
        self._callback(TuningProgress(stage, done, most, score, ranks, later, losses_of))


def search_bytes(
    rows: int, columns: int, rank: int, folds: int, first: tuple[int, int], cores: int = 1
) -> int:
    """Peak of a search of rows, columns of x and y, pivots and folds, in so many threads.

    ``first`` are the rows and the rank of what is searched before all rows.
    """
    cores = min(cores, _THREADS)
    batch = 4 * cores if cores > 1 else 0  # bases of a batch of pairs

    def stage(rows: int, rank: int, sides: int) -> int:
        rank = min(rank, rows)
        # A basis at the rows, its factor, Gram matrices and transforms of all folds, their sum.
        held = rows * rank + (2 * folds + 2) * rank**2
        # What one more is made from: its sections, the elimination, weighted copies.
        made = 8 * cores * rows * rank
        return (sides + batch) * held + made

    # Columns as they are and in their coordinates, sorted, in the order of the folds.
    values = 6 * rows * columns
    few = min(rows, first[0])
    # There may be no smaller problem in the place of so few rows.
    at_first = stage(few, rank if few == rows else min(rank, first[1]), _HELD_SIDES)
    return (max(at_first, stage(rows, rank, _HELD_LATER)) + values) * _WORD


def search(
    problem: SearchProblem,
    callback: SearchCallback | None,
    *,
    evaluations: int,
    widening: int,
    finalists: int,
    memory: TrialMemory | None = None,
    cores: int = 1,
) -> tuple[KernelSearch, list[Pair]]:
    """Search coordinates and length scales by cross-validation on rows in memory.

    A grid of shared length scales for every form of coordinates; then each column of x is tried
    with a much longer one; then all are refined together between 0.05 and 50 standard deviations
    (``scipy.optimize``: L-BFGS-B along gradients, or COBYQA where a problem has none). Where the
    best ends at one of these bounds, it is refined again between 0.005 and 500. Columns with long
    scales are ignored altogether where nothing is lost by that, except for the last one of a
    variable.

    A problem with many rows is searched on fewer of them, or with bases of lower rank. In all of it
    the best candidates are compared, and of four times as many rows also those with the shortest
    scales of the grid; then the best is rescaled, where gradients are not known.

    Parameters
    ----------
    problem
        What is minimised.
    callback
        Called with how far it is, or None.
    evaluations, widening
        Trials of the refinement, and of that between wider bounds, at most.
    finalists
        How many pairs that differ are returned.
    memory
        Of trials that an earlier start of the same fit has made.
    cores
        Threads: pairs that do not depend on one another are tried at once.

    Returns
    -------
    KernelSearch, list of pairs
        All that was tried, and the best of it, best first.

    Raises
    ------
    DataError
        If fewer than two folds have rows.
    """
    if len(problem.rows.slices) < 2:
        raise DataError(
            "kernels are learned on held-out folds, and the row sample has rows of one only: give "
            "kernels, more rows or more folds"
        )
    first = problem.smaller()
    tried = KernelSearch(first, callback, evaluations, memory, cores)
    with one_blas_thread():
        pair = _screen_columns(tried, _search_grid(tried))
        _refine(tried, pair, evaluations, "refine")
        tried.settle()
        _widen(tried, widening)
        if problem.rougher:
            _roughen(tried)
        if first is not problem:
            shortlist = _simplified(tried, _finalists(tried, max(_SHORTLIST, 2 * finalists)))
            if len(problem.rows.order) >= _MORE * len(first.rows.order):
                shortlist += _shortest(tried)
            tried = KernelSearch(problem, callback, evaluations, memory, cores, tried)
            for done, _ in enumerate(tried.each(shortlist, "shortlist")):
                tried.report("shortlist", done, len(shortlist))
            tried.settle()
            if not problem.ridge_by_ridge:
                _rescale(tried)
                tried.settle()
        best = _simplified(tried, _finalists(tried, finalists))
    if memory is not None:
        memory.flush()
    return tried, best


def _search_grid(tried: KernelSearch) -> Pair:
    """The best of a grid of shared length scales: those of x with some of y, then the others."""
    xs, ys = (
        [v.start(f, s) for f in v.forms for s in (GRID if v.given is None else GRID[:1])]
        for v in tried.problem.variables
    )
    some = [y for y in ys if y.form == "given" or y in ys[1 :: len(GRID)]]
    most = len(xs) * len(some) + 2 * len(ys) + 2 * len(xs)
    done = 0

    def best_of(pairs: Iterable[Pair]) -> None:
        nonlocal done
        for _ in tried.each(pairs, "grid"):
            if done % max(1, most // 10) == 0:
                tried.report("grid", done, most)
            done += 1
        tried.settle()

    best_of(product(xs, some))
    best_of(product(_each_form(tried, 0), ys))
    best_of(product(xs, _each_form(tried, 1)))
    return tried.best


def _shortest(tried: KernelSearch) -> list[Pair]:
    """The best pair with each of the shortest scales of x, which only more rows may resolve."""
    x = tried.problem.variables[0]
    if x.given is not None:
        return []
    points = [x.start(form, scale) for form in x.forms for scale in GRID[:2]]
    each = ([pair for pair in tried.stages if pair[0] == point] for point in points)
    return [min(pairs, key=tried.score) for pairs in each]


def _each_form(tried: KernelSearch, i: int) -> list[KernelPoint]:
    """The best point of a variable for each form of coordinates."""
    best: dict[str, KernelPoint] = {}
    for pair in sorted(tried.stages, key=tried.score):
        best.setdefault(pair[i].form, pair[i])
    return list(best.values())


def _screen_columns(tried: KernelSearch, pair: Pair) -> Pair:
    """Columns of x whose length scale had better be much longer, one after the other."""
    x, y = pair
    free = x.free if len(x.free) > 1 else []
    for done, j in enumerate(free, 1):
        longer = x.scaled([_OFF if i == j else 1.0 for i in range(len(x.scales))])
        lost = tried.score((longer, y), "columns") - tried.score((x, y))
        tried.relevance[j] = lost
        if lost < 0.0:
            x = longer
        tried.report("columns", done, len(free))
    return x, y


class _Enough(Exception):
    """All evaluations of a refinement were made."""


def _refine(
    tried: KernelSearch,
    pair: Pair,
    evaluations: int,
    stage: str,
    bounds: tuple[float, float] = SCALES,
) -> None:
    """All length scales together, from a pair on; ignored columns stay ignored.

    They follow the gradient of the score, where it is known. Else, of many columns those of x that
    lost most by a longer scale, and some of y, have one each.
    """
    along = tried.problem.ridge_by_ridge
    all_scales = np.asarray(_scales(pair))
    active = np.flatnonzero(all_scales < IGNORED)
    first = np.log(np.clip(all_scales[active], *bounds))
    count = len(pair[0].scales)
    group = np.arange(len(active)) if along else _groups(tried, active, count)
    start: Array = np.bincount(group, first) / np.bincount(group) if len(active) else first
    if not len(start) or evaluations <= (1 if along else len(start) + 2):
        return
    digits = _GRADIENT_DIGITS if along else _DIGITS
    away, ends = first - start[group], np.round([np.log(end) for end in bounds], digits)
    done = 0

    def moved(logarithms: Array) -> Pair:
        # Rounded, as scores are: then a path does not follow the last bits of the rows.
        scales = all_scales.copy()
        rounded: Array = np.round(logarithms, digits)
        scales[active] = np.exp(np.clip(rounded[group] + away, *ends))
        return _with_scales(pair, scales.tolist())

    def objective(logarithms: Array) -> float:
        nonlocal done
        score = tried.score(moved(logarithms), stage)
        done += 1
        tried.report(stage, done, evaluations)
        return round(score, _SCORE_DIGITS)

    def with_slopes(logarithms: Array) -> tuple[float, Array]:
        if done == evaluations:  # within a line search, too
            raise _Enough
        score = objective(logarithms)
        return score, np.round(tried.slopes(moved(logarithms), stage)[active], _SCORE_DIGITS)

    limits = [(np.log(bounds[0]), np.log(bounds[1]))] * len(start)
    if along:
        # A line search that finds nothing better is at the noise of the choice of pivots.
        options = {"ftol": 1e-4, "gtol": 1e-3, "maxls": 8}
        with suppress(_Enough):
            minimize(
                with_slopes, start, jac=True, method="L-BFGS-B", bounds=limits, options=options
            )
    else:
        options = {"maxfev": evaluations, "initial_tr_radius": 0.5, "final_tr_radius": 0.05}
        minimize(objective, start, method="COBYQA", bounds=limits, options=options)


def _groups(tried: KernelSearch, active: Array, columns_x: int) -> Array:
    """Which of at most 24 parameters moves the length scale of each column, shape (len(active),).

    Parameters
    ----------
    tried
        Knows which columns of x matter.
    active
        The columns, those of x first.
    columns_x
        Number of columns of x.
    """
    count, n_x = len(active), int((active < columns_x).sum())
    if count <= REFINED:
        return np.arange(count)
    few = max(REFINED // 2, REFINED - n_x)  # of y, which no trial has ranked
    lost = [tried.relevance.get(j, 0.0) for j in active[:n_x].tolist()]
    ranks = np.concatenate([lost, np.where(np.arange(count - n_x) < few, np.inf, -np.inf)])
    group = np.empty(count, dtype=np.int64)
    group[np.argsort(-ranks, kind="stable")] = np.minimum(np.arange(count), REFINED - 1)
    return group


def _rescale(tried: KernelSearch) -> None:
    """All length scales of x by one factor, and of y by another one: more rows resolve more.

    Where a search follows gradients, steps on all rows made laws no better on average.
    """
    for i in (0, 1, 1, 0):
        for factor in _FACTORS:
            better = True
            while better:
                best = tried.best
                moved = [*best]
                moved[i] = best[i].scaled([factor] * len(best[i].scales))
                better = tried.score((moved[0], moved[1]), "rescale") < tried.score(best)


def _roughen(tried: KernelSearch) -> None:
    """Rougher kernels of x, whose length scales are somewhat longer."""
    (x, y), coded = tried.best, tried.problem.variables[0].categorical
    if x.smoothness is not None or all(coded[j] for j in x.free):
        return
    longer, twice = ([1.0 if each else factor for each in coded] for factor in (ROUGHER, 2.0))
    rougher = list[Pair]()
    for smoothness in SMOOTHNESS:
        x = replace(x.scaled(longer), smoothness=smoothness)
        rougher += [(x, y), (x.scaled(twice), y)]
    for _ in tried.each(rougher, "rougher"):
        pass
    tried.settle()


def _widen(tried: KernelSearch, evaluations: int) -> None:
    """Refine between wider bounds, if the best kernels lie at those of before."""
    best = tried.best
    if not _at_bounds(best):  # nor is it without some of its columns
        return
    pair = _ignoring(best, _needless_columns(tried, best))
    if _at_bounds(pair):
        _refine(tried, pair, evaluations, "widen", WIDEST)
        tried.settle()


def _at_bounds(pair: Pair) -> bool:
    """Whether a length scale has reached one of the first bounds, or nearly so."""
    low, high = SCALES
    return any(s < low * _NEAR or high / _NEAR < s < IGNORED for s in _scales(pair))


def _scales(pair: Pair) -> tuple[float, ...]:
    return (*pair[0].scales, *pair[1].scales)


def _with_scales(pair: Pair, scales: Sequence[float]) -> Pair:
    """The same coordinates with other length scales."""
    x, y = pair
    count = len(x.scales)
    return replace(x, scales=tuple(scales[:count])), replace(y, scales=tuple(scales[count:]))


def _ignoring(pair: Pair, columns: Sequence[int]) -> Pair:
    scales = enumerate(_scales(pair))
    return _with_scales(pair, [IGNORED if j in columns else scale for j, scale in scales])


def _long_columns(pair: Pair) -> list[int]:
    """Columns much longer than the shortest of their variable, longest first."""
    scales, count, result = _scales(pair), len(pair[0].scales), list[int]()
    for columns in (range(count), range(count, len(scales))):
        least = max(_LONG, _LONGER * min((scales[j] for j in columns), default=0.0))
        result += [j for j in columns if least <= scales[j] < IGNORED]
    return sorted(result, key=lambda j: -scales[j])


def _needless_columns(
    tried: KernelSearch, pair: Pair, among: Sequence[int] | None = None
) -> list[int]:
    """Long columns without which the score is no worse, by more than 0.02 % of it.

    All of them at once if that will do, else one after the other.
    """
    candidates = [j for j in _long_columns(pair) if among is None or j in among]
    if not candidates:
        return []
    score = tried.score(pair)
    allowed = score + _WORSE * abs(score)
    if tried.score(_ignoring(pair, candidates), "ignore") <= allowed:
        return candidates
    ignored: list[int] = []
    for j in candidates if len(candidates) > 1 else ():
        if tried.score(_ignoring(pair, [*ignored, j]), "ignore") <= allowed:
            ignored.append(j)
    return ignored


def _simplified(tried: KernelSearch, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs without columns that they do as well without, best first.

    Columns that the first one needs are left to the others, too.
    """
    simple: dict[Pair, None] = {}
    among: list[int] | None = None
    for pair in pairs:
        ignored = _needless_columns(tried, pair, among)
        if among is None:
            unused = [j for j, scale in enumerate(_scales(pair)) if scale >= IGNORED]
            among = [*ignored, *unused]
        simple[_ignoring(pair, ignored)] = None
    return sorted((pair for pair in tried.stages if pair in simple), key=tried.score)


def _finalists(tried: KernelSearch, count: int) -> list[Pair]:
    """The best pairs that differ."""
    chosen: list[Pair] = []
    for pair in sorted(tried.stages, key=tried.score):
        if len(chosen) == count:
            break
        if all(_apart(pair, other) for other in chosen):
            chosen.append(pair)
    return chosen


def _apart(one: Pair, two: Pair) -> bool:
    if [point.form for point in one] != [point.form for point in two]:
        return True
    # Beyond the bounds of the first search all long scales are alike.
    first, second = (np.log(np.minimum(_scales(pair), SCALES[1])) for pair in (one, two))
    return bool(np.abs(first - second).max(initial=0.0) >= _APART)
