"""The location of y given x that a fit tries: a ridge regression, or regression trees.

Both are compared on the row sample, before the pass: a ridge regression on a kernel that is learned
for it, whose coefficients come from the moments of all rows, and trees, which are learned on the
row sample alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from cme_dask.config import MAX_RANK
from cme_dask.estimators.context import FitContext, GivenLocation
from cme_dask.estimators.given_location import digest_of
from cme_dask.estimators.tuned import FOLDS, FeatureMoments
from cme_dask.kernels import Transform
from cme_dask.kernels.evaluator import beside, one_blas_thread, release_memory, waiting
from cme_dask.learning.candidates import (
    AheadTrials,
    KernelPoint,
    Over,
    TrialMemory,
    TrialsHere,
)
from cme_dask.learning.regression import ROWS as REGRESSION_ROWS
from cme_dask.learning.regression import MeanKernel, learn_mean, regression_bytes
from cme_dask.learning.tree_fits import KINDS, TrainingRows, trees_bytes
from cme_dask.learning.trees import CrossFit, TreeSearch, is_better
from cme_dask.numerics.folds import RowSample
from cme_dask.numerics.given_location import MixedMean, RegressorResiduals
from cme_dask.numerics.location import (
    FittedMeanFunction,
    RidgeResiduals,
    fit_mean_function,
    scaled_residuals,
)
from cme_dask.numerics.moments import MomentReduction, strip_moments
from cme_dask.numerics.reduction import MemoryPlan
from cme_dask.numerics.scoring import Mapped, law_error
from cme_dask.numerics.trees import TreeMean
from cme_dask.passes.run import extent_of

Array = Any

_ROWS = 1 << 13  # of the row sample, for the ridge regression before the pass, and its pivots
_EARLY_ROWS = 1 << 13  # of a table whose ridge regression is made before the pass, at most
_LEAST_ROWS = 100  # that trees are learned on
# A table of fewer rows learns the kernel on 850 of them: the time grows with the cube of the rows.
_MANY, _OF_FEW = 1200, 850
_SHARES = tuple(k / 10 for k in range(1, 11))  # of a given regressor beside another location


class LocationSearch:
    """The search for a ridge regression of y on a kernel of x, or for trees, on the row sample.

    Neither depends on the search for the kernels of laws, beside which it may begin.

    Parameters
    ----------
    context
        The row sample; trials are found again in its checkpoint.
    kinds
        Trees that are tried.
    """

    def __init__(self, context: FitContext, kinds: Sequence[str]) -> None:
        many = len(context.rows) >= _MANY
        self._rows = context.rows.prefix(max(REGRESSION_ROWS) if many else _OF_FEW)
        self._categorical = context.sample.columns[0].categorical
        folding = context.sample.folding
        self._folds = folding.folds(self._rows.index, self._rows.units, FOLDS)
        self._memory: TrialMemory = context.executor.trials((KernelPoint,)) or TrialsHere()
        self.trees, self._cores = tree_search(context, kinds), context.cores
        self._begun: MeanKernel | None = None
        self._seconds, self._threads = 0.0, 0

    @one_blas_thread()
    def begin(self, threads: int, over: Callable[[], bool]) -> None:
        """Make ahead what can be, as long as it is not over."""
        begin, self._threads = time.perf_counter(), threads
        with suppress(Over):
            self._begun = self._learned((None,), AheadTrials(self._memory, over), threads)
        self._seconds = time.perf_counter() - begin
        if self._begun is not None:
            self._begin_trees(over)

    def _begin_trees(self, over: Callable[[], bool]) -> None:
        if self.trees is None:
            return
        if self._begun is None:  # which of them are not far behind is not known
            self.trees.try_few(self._threads, over)
        else:
            self.trees.begin(self._begun.law_error, self._threads, over)

    def needs(self, threads: int) -> int:
        """Peak of :meth:`begin` in bytes."""
        of_mean = regression_bytes(len(self._rows), len(self._categorical))
        return of_mean + (0 if self.trees is None else self.trees.ahead_bytes(threads))

    def mean(self, scores: Transform | None) -> MeanKernel | None:
        """The kernel for y or for normal scores of it, see :func:`with_location`."""
        if self._begun is not None and scores is None:
            return self._begun
        with beside(self._begin_trees) if self._threads else nullcontext():
            transforms = (None,) if scores is None else (None, scores)
            mean = self._learned(transforms, self._memory, self._cores)
        return None if mean is None else replace(mean, seconds=mean.seconds + self._seconds)

    def _learned(
        self, transforms: Sequence[Transform | None], memory: TrialMemory, cores: int
    ) -> MeanKernel | None:
        (x, y), weights = self._rows.parts, self._rows.importance
        return learn_mean(x, y, weights, self._categorical, self._folds, transforms, memory, cores)


Ahead = Callable[[FitContext, MemoryPlan], None]
"""Begins the second search, beside trials of trees with this plan of memory."""


def with_location(context: FitContext, ahead: Ahead | None = None) -> FitContext:
    """The context with the location that its search finds, if it has one.

    Parameters
    ----------
    context
        With the search for the other kernels.
    ahead
        Called before trees are compared with a ridge regression that seems to be better.
    """
    search = context.locating
    if search is not None:
        context = replace(context, locating=None)
        if context.given is None:
            context = _searched(context, search, ahead)
        else:
            context = join_location(context, search)
        release_memory()
    return measuring_scores(context)


@one_blas_thread()
def _searched(
    context: FitContext, search: LocationSearch, ahead: Ahead | None = None
) -> FitContext:
    """The context with the location of y that is tried.

    It is a kernel of x that was learned for a ridge regression, and the coordinates of y: normal
    scores of it, if there are any, and they predict y itself with the smaller absolute error. Or it
    is trees, as a location that is known before the pass.
    """
    mean = search.mean(context.scores)
    context = replace(context, mean=mean, scores=None if mean is None else mean.transform)
    if mean is None:
        return context
    trees, memory = search.trees, context.search.memory
    if trees is None:
        return context
    needed = _memory_of_trees(context)
    context = replace(context, search=replace(context.search, memory=memory.or_tighter(needed)))
    compared, promising = trees.outlook(mean.law_error)
    few = context.rows.complete and len(context.rows) <= _EARLY_ROWS
    if few and compared and context.averages and (context.location_rank or np.inf) <= MAX_RANK:
        context = replace(context, early_ridge=EarlyRidge(context))
        if ahead is not None and not promising:
            ahead(measuring_scores(context), needed)
    ridge = partial(_ridge_predictions, context)
    found = _better_trees(context, trees, mean.law_error, ridge)
    if found is not None:
        return replace(context, given=found, mean=None, scores=None, early_ridge=None)
    if context.early_ridge is not None:
        context.early_ridge()  # its moments are not held through the pass
    return context


class EarlyRidge:
    """The ridge regression on a row sample that holds all rows, made before the pass.

    Each part is made once, by the first thread that needs it.

    Parameters
    ----------
    context
        With the kernel of x.

    Attributes
    ----------
    reports
        Of its pivots, for the progress of the fit when that comes to pivots.
    """

    def __init__(self, context: FitContext) -> None:
        self.reports: list[Any] = []
        self._context = replace(measuring_scores(context), progress=self.reports.append)
        self._locks = Lock(), Lock()
        self._moments: FeatureMoments | None = None
        self._first: FittedMeanFunction | None = None
        self._scaled: FittedMeanFunction | None = None

    def __call__(self) -> FittedMeanFunction:
        """With the scale of its residuals."""
        first = self.first()
        with _in_turn(self._locks[1]):
            if self._scaled is None:
                assert self._moments is not None
                self._scaled = with_scale(self._context, first, self._moments)
                self._moments = None
            return self._scaled

    def first(self) -> FittedMeanFunction:
        """Without that scale."""
        with _in_turn(self._locks[0]):
            if self._first is None:
                spec = self._context.moments_of_mean()
                assert spec is not None
                moments = _summed(self._context, spec, self._context.rows)
                self._first, self._moments = regression(self._context, [moments])
            return self._first


@contextmanager
def _in_turn(lock: Lock) -> Iterator[None]:
    """One thread at a time, with one BLAS thread; waiting threads are not counted."""
    with waiting():
        lock.acquire()
    try:
        with one_blas_thread():
            yield
    finally:
        lock.release()


@one_blas_thread()
def join_location(context: FitContext, search: LocationSearch) -> FitContext:
    """The context whose given regressor is joined by the location that a fit would try by itself.

    The location is then a mean of both, of which laws that know nothing but the prediction are best
    at held-out rows, if it is clearly better there than the regressor alone. Its scale is the mean
    of theirs.

    Parameters
    ----------
    context
        With the given location, and the search for kernels.
    search
        That for the other location, which may have begun.
    """
    given, rows = context.given, training_rows(context)
    assert given is not None
    one = given.residuals
    tried = _searched(replace(context, given=None), search)
    context = replace(context, search=tried.search, scores=None)
    other = _known_location(tried)
    if other is None:
        return context
    added = other.residuals
    assert isinstance(one, RegressorResiduals)
    assert isinstance(added, RegressorResiduals | RidgeResiduals)
    predicted = one.held_out(rows.x, rows.folds)
    z, moved = added.held_out(rows.x, rows.folds), added.scores(predicted)
    each = [added.undo(s * moved + (1.0 - s) * z) for s in _SHARES]
    errors = [law_error(mixture, rows.y, rows.weights) for mixture in each]
    best = int(np.argmin(errors))
    if not is_better(each[best], predicted, rows):
        return context
    share = _SHARES[best]
    assert one.scale is not None
    assert added.scale is not None

    def mixed(mine: Any, its: Any) -> MixedMean:
        return MixedMean(mine, its, share, added.transform)

    residuals = RegressorResiduals(
        mixed(one.location, added.location),
        tuple(map(mixed, one.each, added.each)),
        one.token + digest_of([z]),
        added.transform,
        share * one.scale + (1.0 - share) * added.scale,
    )
    words = f"{share:.0%} {given.words}, {1.0 - share:.0%} {other.words}"
    seconds = given.seconds + other.seconds
    return replace(context, given=GivenLocation(residuals, words, seconds))


def _known_location(context: FitContext) -> GivenLocation | None:
    """The location that was found; a ridge regression is that of the row sample."""
    if context.given is not None or context.mean is None:
        return context.given
    begin = time.perf_counter()
    if context.early_ridge is not None:
        ridge = context.early_ridge().residuals
    else:
        sampled = sampled_moments(measuring_scores(context))
        if len(sampled[1].held_out_folds) < 2:
            return None
        ridge = with_scale(context, *regression(context, [sampled])).residuals
    seconds = context.mean.seconds + time.perf_counter() - begin
    return GivenLocation(ridge, ridge.location.name, seconds)


def training_rows(context: FitContext) -> TrainingRows:
    """The row sample, as locations are learned on it."""
    sample, rows = context.sample, context.rows
    x, y = rows.parts
    return TrainingRows(
        x,
        y,
        rows.importance,
        rows.folds(sample.folding, context.n_folds),
        context.n_folds,
        sample.folding.units(rows.index, rows.units),
        context.seed,
        context.cores,
        covariate=context.pivots[0].mode != "given",
    )


def tree_search(context: FitContext, kinds: Sequence[str]) -> TreeSearch | None:
    """The search for trees on the row sample; None if none are tried, or the rows are too few."""
    if not kinds or len(context.rows) < _LEAST_ROWS:
        return None
    trials = context.executor.trials((CrossFit, TreeMean))
    return TreeSearch(training_rows(context), kinds, trials)


def _memory_of_trees(context: FitContext) -> MemoryPlan:
    """Predicted peak of the trials of trees; ResourceError if there is too little memory."""
    sample, rows, executor = context.sample, context.rows, context.executor
    x, y = rows.parts
    return executor.check_alone(
        "the trial of trees",
        trees_bytes(len(rows), (x.shape[1], y.shape[1]), context.cores),
        extent_of(sample, executor).in_memory + context.choice_cost(1).held,
        "fewer rows of the row sample (sample_size), or no trees, tuning=Tuning(trees=())",
    )


def _better_trees(
    context: FitContext,
    search: TreeSearch,
    error: float,
    other: Callable[[TrainingRows], Array],
) -> GivenLocation | None:
    """The trees, if they predict better than another location.

    Parameters
    ----------
    context
        With the search for kernels.
    search
        That for trees.
    error, other
        Of the other location, as of :meth:`TreeSearch.better`.
    """
    begin = time.perf_counter()
    found = search.better(error, other)
    if found is None:
        return None
    whole, scale = search.whole(found), search.scale(found)
    digest = digest_of([found.predicted, whole(context.rows.parts[0][:_ROWS])])
    residuals = RegressorResiduals(whole, found.each, digest, scale=scale)
    seconds = time.perf_counter() - begin
    return GivenLocation(residuals, KINDS[found.kind].words, seconds, auto=True)


def _ridge_predictions(context: FitContext, rows: TrainingRows) -> Array:
    """What the ridge regression predicts at these rows, those of other folds."""
    if context.early_ridge is not None:
        residuals = context.early_ridge.first().residuals
    else:
        measured = measuring_scores(context)
        with one_blas_thread():
            sampled = sampled_moments(measured, context.rows.prefix(len(rows.x)))
            residuals = regression(context, [sampled])[0].residuals
    z = residuals.held_out(rows.x, rows.folds)
    return z if context.scores is None else context.scores.inverse()(z)


def measuring_scores(context: FitContext) -> FitContext:
    """The context whose moments hold the coordinates in which y is located, beside the events."""
    if context.scores is None or context.events is None:
        return context
    return replace(context, events=Mapped(context.scores, context.events))


def sampled_moments(context: FitContext, rows: RowSample | None = None) -> FeatureMoments:
    """Moments by fold of rows of the row sample, on a basis of few of them for the kernel of x."""
    # Of y only the functions are needed, so that one pivot is enough.
    kernels = (
        context.kernels[0] if context.mean is None else context.mean.kernel,
        context.kernels[1],
    )
    ranks = min(context.location_rank or MAX_RANK, MAX_RANK), 1
    each = zip(kernels, ranks, strict=True)
    bases = [context.basis_of_few(i, kernel, rank) for i, (kernel, rank) in enumerate(each)]
    rows = context.rows.prefix(_ROWS) if rows is None else rows
    return _summed(context, context.moments_on(bases), rows)


def _summed(context: FitContext, spec: MomentReduction, rows: RowSample) -> FeatureMoments:
    """The features, and their moments over rows of the row sample."""
    folds = rows.folds(context.sample.folding, context.n_folds)
    return spec.features, strip_moments(spec, rows.parts, rows.importance, folds)


def regression(
    context: FitContext, candidates: Sequence[FeatureMoments]
) -> tuple[FittedMeanFunction, FeatureMoments]:
    """The location that explains most of unseen rows, among those on the bases of x given.

    It comes with the moments that it was made of.
    """
    x = context.rows.parts[0]
    # Codes of labels have no trend: an empty range.
    labels = np.array(context.sample.columns[0].categorical)
    within = np.where(labels, 0.0, x.min(axis=0)), np.where(labels, 0.0, x.max(axis=0))
    here, cores = _located_columns(context, candidates[0]), context.cores
    locations = [
        fit_mean_function(moments, sides[0].basis, here, context.scores, within=within, cores=cores)
        for sides, moments in candidates
    ]
    best = max(range(len(locations)), key=lambda k: float(locations[k].skill.sum()))
    return locations[best], candidates[best]


def with_scale(
    context: FitContext, location: FittedMeanFunction, of: FeatureMoments
) -> FittedMeanFunction:
    """The location with the scale of its residuals, from its moments."""
    (sides, moments), rows = of, context.rows.prefix(_ROWS)
    folding = context.sample.folding
    residuals = scaled_residuals(
        location,
        moments,
        sides[0].basis,
        _located_columns(context, of),
        (rows.parts[0], rows.parts[1]),
        rows.folds(folding, context.n_folds),
        rows.importance,
        folding.units(rows.index, rows.units),
        cores=context.cores,
    )
    return replace(location, residuals=residuals)


def _located_columns(context: FitContext, moments: FeatureMoments) -> slice:
    """Where the functions of y that are located are among those of the moments."""
    first = 0 if context.scores is None else len(moments[0][1].names)
    return slice(first, first + len(context.sample.columns[1].names))
