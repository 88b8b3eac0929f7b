"""Kernels and ridge learned from the rows, by held-out losses."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import minimize

from cme_dask.chunked.blas import one_blas_thread
from cme_dask.errors import DataError
from cme_dask.kernels import Kernel
from cme_dask.kernels.length_scales import IGNORED, SCALES, WIDEST
from cme_dask.learning.bounds import at_bounds, ignored_columns, long_columns, without
from cme_dask.learning.candidates import Search, SidePoint, Trial, Tuning, candidate
from cme_dask.learning.log_score import LOG_CELLS, CelledRows
from cme_dask.learning.screening import ScreenedRows
from cme_dask.learning.searcher import Heard, SearchedVariable, Searcher
from cme_dask.learning.support import make_support
from cme_dask.numerics.moments import Function
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.thresholds import Judges, declared, make_thresholds

Array = Any

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
    heard: Heard | None = None,
) -> Search:
    """Search coordinates, length scales and ridge by cross-validation on a row sample.

    A grid of shared length scales for every form of coordinates; then each column of x is tried
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
    heard
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
    judges: Judges = (
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
    searcher = Searcher(variables, rows, judges, regs, options, tol, heard, celled)  # type: ignore[arg-type]
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


Pair = tuple[SidePoint, SidePoint]


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


def _columns(searcher: Searcher, x: SidePoint, y: SidePoint) -> Pair:
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
    x: SidePoint,
    y: SidePoint,
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


def _pair(x: SidePoint, y: SidePoint, scales: Sequence[float]) -> Pair:
    """The same coordinates with other length scales."""
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
    searcher: Searcher, trial: Trial, among: Sequence[int] | None = None
) -> tuple[tuple[float, ...], list[int]]:
    """Length scales of a trial, and the columns that it does as well without."""
    count, scales = len(trial.x.scales), (*trial.x.scales, *trial.y.scales)

    def score(changed: tuple[float, ...]) -> float:
        return searcher.score(*_pair(trial.x, trial.y, changed), "ignore")

    candidates = long_columns(scales, (slice(0, count), slice(count, None)))
    if among is not None:
        candidates = [j for j in candidates if j in among]
    return scales, ignored_columns(scales, candidates, score)


def _simplified(searcher: Searcher, trials: Sequence[Trial]) -> list[Trial]:
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
    found = [trial for trial in searcher.trials() if (trial.x, trial.y) in pairs]
    return sorted(found, key=lambda trial: trial.score)


def _finalists(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The best trials whose kernels differ."""
    chosen: list[Trial] = []
    for trial in sorted(trials, key=lambda t: t.score):
        if len(chosen) == count:
            break
        if all(_apart(trial, other) for other in chosen):
            chosen.append(trial)
    return chosen


def _apart(one: Trial, two: Trial) -> bool:
    if (one.x.form, one.y.form) != (two.x.form, two.y.form):
        return True
    # Beyond the bounds of the first search all long scales are alike.
    scales = (np.log(np.minimum([*t.x.scales, *t.y.scales], SCALES[1])) for t in (one, two))
    first, second = scales
    return bool(np.abs(first - second).max(initial=0.0) >= _APART)
