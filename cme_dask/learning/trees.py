"""Regression trees as locations of y given x: cross-fits, and their choice beside a ridge."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import ThreadpoolController

from cme_dask.kernels.evaluator import beside, parallel_map
from cme_dask.learning.candidates import AheadTrials, Over, TrialMemory, TrialsHere, recalled
from cme_dask.learning.tree_fits import (
    KINDS,
    PARTS,
    TrainingRows,
    in_one_thread,
    trees_bytes,
)
from cme_dask.numerics.learning_curve import scale_of_all
from cme_dask.numerics.scoring import column_deviations, law_error, law_errors, mean_and_error
from cme_dask.numerics.trees import TreeMean

Array = Any

ROWS = (1000, 8192)
"""Rows on which all kinds are tried, and on which those that may be best are."""

_TRIAL_PARTS = 3
_LATE = 0.8  # share of the steps, beyond which the best number of them may be larger
_FAR = 1.15  # times the least error on few rows: too far behind to be tried on all of these
_HOPELESS = 1.25  # times _FAR, at the rows of the first part: a kind ends there
_FARTHER = 0.05  # added to _FAR for each doubling of the rows, which trees gain more from
_PROMISING = 1.03  # times the error of the ridge, at the rows of the first part
_GAIN, _CLEAR = 0.01, 2.0  # of the error of laws, and standard errors of a difference
_RACED, _NEARLY = 200, 1.0  # rows that tell which kinds are behind, and by how many standard errors
_PER_ROUND = 2  # parts of a round after the first one


def compared_rows(rows: int) -> int:
    """On how many rows of a row sample kinds that may be best are compared."""
    return rows if rows <= 2 * ROWS[1] else ROWS[1]


class CrossFit(NamedTuple):
    """Trees fitted to all rows but a part of the folds, for each part.

    Attributes
    ----------
    kind
        Which trees.
    each
        Without the part of each fold, of F folds.
    predicted
        At the rows, from those without their fold, shape (n, q).
    steps
        Of boosting that count, or the number of a forest's trees.
    """

    kind: str
    each: tuple[TreeMean, ...]
    predicted: Array
    steps: int


class _Parts:
    """Trees of one kind, fitted without one part of the folds after the other.

    A forest is fitted with some of its trees first, which predict hardly worse than all of them.
    Boosting has the steps of its next stage where nearly all of those so far are of use.

    Parameters
    ----------
    kind
        One of ``KINDS``.
    rows
        The rows, of two folds or more.
    quick
        Whether it is a trial, of fewer parts, trees and steps.
    """

    def __init__(self, kind: str, rows: TrainingRows, *, quick: bool = False) -> None:
        self.kind, self._rows, self._quick = kind, rows, quick
        self.count, self._parts = _parts_of(rows, _TRIAL_PARTS if quick else PARTS)
        self._fits: list[Any] = []
        self._curves: list[Array] = []
        self._stages, self._by_need = KINDS[kind].stages(rows, quick), KINDS[kind].by_need
        self._reached = self._stages[0]

    @property
    def rounds(self) -> list[int]:
        """How many parts are fitted at the end of each round of a race."""
        held = np.cumsum([self._held(k).sum() for k in range(self.count)])
        first = min(int(np.searchsorted(held, _RACED)) + 1, self.count)
        return [*range(first, self.count, _PER_ROUND), self.count]

    def _held(self, part: int) -> Array:
        return self._parts[self._rows.folds] == part

    def fit(self, count: int, threads: int) -> None:
        """Fit those of the first parts that are not fitted yet, with the trees of the others."""
        rows, kind = self._rows, KINDS[self.kind]

        def fitted(k: int) -> Any:
            return kind(rows, ~self._held(k), self._quick, self._reached)

        new = range(len(self._fits), count)
        if new:
            self._fits += _at_once(fitted, new, self._threads(threads))
            self._curves += self._losses(new, threads)

    def grow(self, threads: int) -> None:
        """Give the fitted parts the trees of the next stage."""
        rows, steps = self._rows, self._next
        assert steps is not None

        def grown(k: int) -> Any:
            return self._fits[k].extended(rows, ~self._held(k), steps)

        every = range(len(self._fits))
        self._fits = _at_once(grown, every, self._threads(threads))
        self._reached = steps
        self._curves = self._losses(every, threads)

    @property
    def grows(self) -> bool:
        """Whether the trees of the next stage are of use."""
        return self._next is not None and not (self._by_need and self._best < _LATE * self._reached)

    @property
    def unsettled(self) -> bool:
        """Whether the next stage may be much better."""
        return self._by_need and self.grows

    @property
    def falling(self) -> float:
        """What more steps may leave of the error: as much as the last two thirds of them did."""
        if not self.unsettled:
            return 1.0
        return float(np.sqrt(self._curve.min() / self._curve[self._reached // 3 - 1]))

    @property
    def _next(self) -> int | None:
        return next((steps for steps in self._stages if steps > self._reached), None)

    def _threads(self, threads: int) -> int:
        return 1 if in_one_thread(self.kind, self._rows) else threads

    @property
    def _curve(self) -> Array:
        """Losses after each step, over the rows that the fitted parts hold out, shape (S,)."""
        return sum(self._curves)

    def _losses(self, parts: Sequence[int], threads: int) -> list[Array]:
        """Those over the rows of each of these parts."""
        rows = self._rows
        weights = rows.weights[:, None] / column_deviations(rows.y, rows.weights) ** 2

        def losses(k: int) -> Array:
            out = self._held(k)
            return self._fits[k].losses(rows.x[out], rows.y[out], weights[out])

        return _at_once(losses, parts, self._threads(threads))

    def _means(self) -> list[TreeMean]:
        return [fit.mean(self._rows, self._best) for fit in self._fits]

    @property
    def _best(self) -> int:
        return int(self._curve.argmin()) + 1 if self._by_need else self._reached

    def held_out(self, means: Sequence[TreeMean] | None = None) -> tuple[Array, Array]:
        """Which rows the fitted parts hold out, shape (n,), and what is predicted there.

        Predictions have shape (n, q), and are 0 at other rows.
        """
        x, parts = self._rows.x, self._parts[self._rows.folds]
        predicted = np.zeros(self._rows.y.shape)
        for k, mean in enumerate(self._means() if means is None else means):
            predicted[parts == k] = mean(x[parts == k])
        return parts < len(self._fits), predicted

    def whole(self, threads: int) -> CrossFit:
        """The cross-fit of all parts."""
        self.fit(self.count, threads)
        while self.grows:
            self.grow(threads)
        means = self._means()
        _, predicted = self.held_out(means)
        return CrossFit(self.kind, tuple(means[k] for k in self._parts), predicted, self._best)


def _parts_of(rows: TrainingRows, most: int) -> tuple[int, Array]:
    """How many parts of the folds there are, and the part of each fold, shape (F,)."""
    used = np.unique(rows.folds[rows.weights > 0.0])
    count, parts = min(most, len(used)), np.zeros(rows.n_folds, dtype=np.int64)
    parts[used] = np.arange(len(used)) % count
    return count, parts


def _at_once(work: Callable[[int], Any], parts: Sequence[int], threads: int) -> list[Any]:
    return parallel_map(partial(_alone, work), parts, threads)


def cross_fitted(kind: str, rows: TrainingRows, *, quick: bool = False) -> CrossFit:
    """Trees without each part of the folds, boosted for as many steps as predict best.

    Parameters
    ----------
    kind, rows, quick
        As of :class:`_Parts`.
    """
    return _Parts(kind, rows, quick=quick).whole(rows.threads)


def fitted_to_all(found: CrossFit, rows: TrainingRows) -> TreeMean:
    """The trees of a cross-fit, fitted to all of its rows."""
    every = np.ones(len(rows.x), dtype=bool)
    return _fitted(found, rows, every)


def residual_scale(found: CrossFit, rows: TrainingRows) -> Array:
    """Errors of :func:`fitted_to_all` over those of the cross-fit, shape (q,)."""
    _, parts = _parts_of(rows, PARTS)

    def refits(left_out: Sequence[Array]) -> list[Array]:
        def predicted(k: int) -> Array:
            return _fitted(found, rows, ~left_out[k])(rows.x[left_out[k]])

        threads = 1 if in_one_thread(found.kind, rows) else rows.threads
        return _at_once(predicted, range(len(left_out)), threads)

    groups = parts[rows.folds]
    return scale_of_all(rows.y, found.predicted, groups, rows.weights, refits, rows.units)


def _fitted(found: CrossFit, rows: TrainingRows, selected: Array) -> TreeMean:
    """The trees of a cross-fit, fitted to the selected rows with as many steps."""
    fit = _alone(lambda steps: KINDS[found.kind](rows, selected, steps=steps), found.steps)
    mean: TreeMean = fit.mean(rows, found.steps)
    return mean


class TreeSearch:
    """The trees that predict rows of other folds best, if they do so better than a ridge.

    What is compared is :func:`law_error`. Of more than 1,000 rows, 1,000 are tried first: with few
    trees, of which a third of the rows tells whether a kind is hopeless; those that are not far
    behind are fitted to 8,192, or to all rows where these are at most twice as many. Of no more
    rows all are taken at once, and the first part of the folds tells which kinds are hopeless.

    Then they race: first parts of the folds, of 200 rows or more, are fitted before the others,
    which follow two at a time. A forest races with the first of its trees, boosting in stages of
    more steps. After each stage the kinds are left out that are behind the ridge regression or the
    best kind by a standard error, even if more steps lower their errors as the last ones did.
    Of the others the best one is taken that is better than the ridge regression by 1 %, or by two
    standard errors of the difference over units of rows, by this error or by the squared one, and
    not as much worse by the other.

    Parameters
    ----------
    rows
        The rows.
    kinds
        Which are tried, of ``KINDS``.
    memory
        Of trees that an earlier start of the same fit has made.
    """

    def __init__(
        self, rows: TrainingRows, kinds: Sequence[str], memory: TrialMemory | None = None
    ) -> None:
        self._rows, self._kinds = rows, kinds
        self._memory: TrialMemory = TrialsHere() if memory is None else memory
        # What a comparison fits serves the fit as well where it takes all rows.
        self._few, self._many = rows.first(ROWS[0]), rows.first(compared_rows(len(rows.x)))
        self._parts: dict[str, _Parts] = {}
        self._trials: dict[str, _Parts] = {}

    def begin(self, error: float, threads: int, over: Callable[[], bool]) -> None:
        """Fit ahead what :meth:`better` will most likely need.

        Parameters
        ----------
        error
            What that of the ridge regression on about as many rows may be.
        threads
            Fits that run at the same time.
        over
            Whether to leave the rest to it.
        """
        with suppress(Over):
            near = self._near(error, threads, AheadTrials(self._memory, over), ahead=True)
            if near and self._memory.get(("race", *near)) is None:
                self._fit(near, 0, threads, over)

    def try_few(self, threads: int, over: Callable[[], bool]) -> None:
        """Fit the first parts on few rows, which need no error of a ridge, unless it is over."""
        with suppress(Over):
            self._first_errors(threads, AheadTrials(self._memory, over))

    def ahead_bytes(self, threads: int) -> int:
        """Peak of :meth:`begin`."""
        rows = self._many
        parts = max(1, -(-_RACED * PARTS // len(rows.x)))  # as many as hold out these rows
        return trees_bytes(len(rows.x), rows.widths, threads, min(parts, PARTS))

    def outlook(self, error: float) -> tuple[bool, bool]:
        """What the first parts tell, beside a ridge regression of this error.

        Returns
        -------
        compared : bool
            Whether some kind is fitted to more parts or rows.
        promising : bool
            Whether some kind does about as well as the ridge regression, or will with more steps:
            these take the interpreter, so that other work beside them would slow them down.
        """
        first = self._first_errors(self._rows.threads, self._memory)
        least = min((falling * reached for reached, falling in first.values()), default=math.inf)
        return len(self._not_hopeless(first, error)) > 0, least < _PROMISING * error

    def better(self, error: float, ridge: Callable[[TrainingRows], Array]) -> CrossFit | None:
        """The trees, or None.

        Parameters
        ----------
        error
            Of the ridge regression on about as many rows.
        ridge
            What it predicts for rows of other folds, shape (n, q).
        """
        rows, many, memory = self._rows, self._many, self._memory
        near = self._near(error, rows.threads, memory)
        self._only(near)
        if not near:
            return None
        ahead = partial(self.begin, error, rows.threads - 1)
        with beside(ahead) if rows.threads > 1 else nullcontext():
            other = ridge(many)
        left = recalled(memory, ("race", *near), lambda: self._raced(near, other))
        whole = [
            recalled(memory, (kind, len(many.x), False), partial(self._whole, kind))
            for kind in left
        ]
        self._parts.clear()
        for best in sorted(whole, key=lambda one: law_error(one.predicted, many.y, many.weights)):
            if is_better(best.predicted, other, many):
                if len(many.x) == len(rows.x):
                    return best
                key = best.kind, len(rows.x), False
                return recalled(memory, key, partial(cross_fitted, best.kind, rows))
        return None

    def whole(self, found: CrossFit) -> TreeMean:
        """The trees of :meth:`better`, fitted to all rows."""
        return recalled(self._memory, (found.kind, "all"), lambda: fitted_to_all(found, self._rows))

    def scale(self, found: CrossFit) -> Array:
        """Errors of :meth:`whole` over those of the trees of :meth:`better`, shape (q,)."""
        scale = recalled(
            self._memory, (found.kind, "scale"), lambda: residual_scale(found, self._rows)
        )
        self._memory.flush()
        return scale

    def _near(
        self, error: float, threads: int, memory: TrialMemory, *, ahead: bool = False
    ) -> list[str]:
        """The kinds that are not far behind on few rows.

        Those that are hopeless at the rows of their first part are fitted to no others. What is
        tried ahead is not retained in memory, where it would hang on the time there was for it.
        """
        few = self._few
        left = self._not_hopeless(self._first_errors(threads, memory), error)
        if self._few_are_all:
            return left

        def key(kind: str) -> tuple[Any, ...]:
            return kind, len(few.x), True

        def trial(kind: str) -> None:
            if memory.get(key(kind)) is None:
                parts = self._trial(kind)
                parts.fit(parts.count, threads)

        if threads > 1:
            self._each(trial, left, few, threads)
        reached = {}
        for kind in left:
            whole = partial(self._trial(kind).whole, threads)
            new = ahead and memory.get(key(kind)) is None
            found = whole() if new else recalled(memory, key(kind), whole)
            reached[kind] = law_error(found.predicted, few.y, few.weights)
        if not ahead:
            self._trials.clear()
        best = min([error, *reached.values()])
        return [kind for kind, one in reached.items() if one < self._far * best]

    def _not_hopeless(self, first: dict[str, tuple[float, float]], error: float) -> list[str]:
        """Kinds that may come near, from the errors of their first parts."""
        limit = _HOPELESS * self._far * error
        return [kind for kind, (reached, falling) in first.items() if falling * reached <= limit]

    @property
    def _far(self) -> float:
        """Errors on few rows over the least one: a kind beyond is not tried on all of these."""
        doublings = np.log2(len(self._many.x) / len(self._few.x))
        return float(_FAR + _FARTHER * doublings)

    @property
    def _few_are_all(self) -> bool:
        return len(self._few.x) == len(self._many.x)

    def _trial(self, kind: str) -> _Parts:
        if self._few_are_all:
            return self._parts.setdefault(kind, _Parts(kind, self._many))
        return self._trials.setdefault(kind, _Parts(kind, self._few, quick=True))

    def _first_errors(self, threads: int, memory: TrialMemory) -> dict[str, tuple[float, float]]:
        """Errors of all kinds where the first part of a few rows is held out, and how they fall.

        None where trees cannot be tried, and 0 where groups or times are held out: a few of them
        say little of all others.
        """
        few = self._few
        if not self._kinds or len(np.unique(few.folds[few.weights > 0.0])) < 2:
            return {}
        # As which trees compare it.
        if np.abs(self._rows.x).max(initial=0.0) > np.finfo(np.float32).max:
            return {}
        if len(np.unique(few.units)) < len(few.units):
            return dict.fromkeys(self._kinds, (0.0, 1.0))

        def key(kind: str) -> tuple[Any, ...]:
            return kind, len(few.x), "first"

        def begun(kind: str) -> None:
            if memory.get(key(kind)) is None:
                self._trial(kind).fit(1, 1)

        def first_error(kind: str) -> tuple[float, float]:
            trial = self._trial(kind)
            trial.fit(1, 1)
            held, predicted = trial.held_out()
            # Rows of the part may have the rare events, or none of them.
            every = few.y, few.weights
            error = law_error(predicted[held], few.y[held], few.weights[held], every)
            return error, trial.falling

        if threads > 1:
            self._each(begun, self._kinds, few, threads)
        return {
            kind: recalled(memory, key(kind), partial(first_error, kind)) for kind in self._kinds
        }

    def _fit(
        self,
        kinds: Sequence[str],
        number: int,
        threads: int,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fit the parts of a round for these kinds, or for some if it is over before."""

        def fit(kind: str) -> None:
            if not over():
                parts = self._parts.setdefault(kind, _Parts(kind, self._many))
                parts.fit(parts.rounds[number], threads)

        self._each(fit, kinds, self._many, threads)

    def _grow(self, kinds: Sequence[str]) -> None:
        """Give the fitted parts of these kinds the trees of their next stage."""

        def grow(kind: str) -> None:
            self._parts[kind].grow(self._many.threads)

        self._each(grow, kinds, self._many, self._many.threads)

    @staticmethod
    def _each(
        work: Callable[[str], None], kinds: Sequence[str], rows: TrainingRows, threads: int
    ) -> None:
        """Work for each kind, in threads: kinds that hold the interpreter share one."""
        together = [kind for kind in kinds if in_one_thread(kind, rows)]
        groups = [together] if together else []
        groups += [[kind] for kind in kinds if kind not in together]

        def of_group(k: int) -> None:
            for kind in groups[k]:
                work(kind)

        _at_once(of_group, range(len(groups)), threads)

    def _raced(self, kinds: Sequence[str], other: Array) -> tuple[str, ...]:
        """The kinds that are not clearly behind another location, nor behind the best of them."""
        left = tuple(kinds)
        rounds = _Parts(kinds[0], self._many).rounds
        for number, _ in enumerate(rounds[:-1] or rounds):
            self._fit(left, number, self._many.threads)
            growing = left
            while growing:
                left = self._not_behind(left, other)
                self._only(left)
                growing = tuple(kind for kind in left if self._parts[kind].unsettled)
                self._grow(growing)
            if not left:
                break
        return left

    def _only(self, kinds: Sequence[str]) -> None:
        """Hold the fitted parts of no other kinds."""
        self._parts = {kind: parts for kind, parts in self._parts.items() if kind in kinds}

    def _not_behind(self, kinds: Sequence[str], other: Array) -> tuple[str, ...]:
        """Those of the kinds that are not, at the rows that their parts so far hold out.

        Errors that more steps of boosting would lower are not behind before they have them.
        """
        rows, each = self._many, [self._parts[kind] for kind in kinds]
        held = [parts.held_out() for parts in each]
        seen, _ = held[0]
        y, share = rows.y[seen], rows.weights[seen] / rows.weights[seen].sum()
        errors = [law_errors(predicted[seen], y, share) for _, predicted in held]
        best = min(errors, key=lambda one: float(share @ one))
        before = law_errors(other[seen], y, share)
        clearness = partial(_clearness, weights=share, units=rows.units[seen])
        errors = [parts.falling * error for parts, error in zip(each, errors, strict=True)]
        return tuple(
            kind
            for kind, error in zip(kinds, errors, strict=True)
            if clearness(before - error) > -_NEARLY and clearness(error - best) < _NEARLY
        )

    def _whole(self, kind: str) -> CrossFit:
        """The cross-fit of all parts, in rounds: the first ones tell how many steps it takes."""
        count = len(_Parts(kind, self._many).rounds)
        for number in range(count):
            self._fit([kind], number, self._many.threads)
            while self._parts[kind].grows:
                self._grow([kind])
        # Popped, so that scikit-learn's trees of one kind at a time are held.
        return self._parts.pop(kind).whole(self._many.threads)


def is_better(one: Array, other: Array, rows: TrainingRows) -> bool:
    """Whether its laws are better by 1 %, or it is clearly so by one error and worse by neither.

    A few rows decide on the standard error of a small gain, which laws show all the same.

    Parameters
    ----------
    one, other
        Predictions at the rows, of locations that have not seen their folds, shape (n, q).
    rows
        The rows.
    """
    y, share = rows.y, rows.weights / rows.weights.sum()
    unit = column_deviations(y, share)
    before = law_errors(other, y, share)
    laws = before - law_errors(one, y, share)
    if share @ laws > _GAIN * (share @ before):
        return True
    squares = (((y - other) / unit) ** 2 - ((y - one) / unit) ** 2).mean(axis=1)
    clear = [_clearness(gain, rows.weights, rows.units) for gain in (laws, squares)]
    return max(clear) > _CLEAR and min(clear) > -_CLEAR


def _clearness(gain: Array, weights: Array, units: Array) -> float:
    """A mean gain in its standard errors."""
    mean, error = mean_and_error(gain, weights, units)
    return float(mean / max(error, np.finfo(float).tiny))


def _alone(work: Callable[[int], Any], k: int) -> Any:
    """Work of one thread: libraries would start as many as there are cores.

    Nor does scikit-learn check parameters, which takes a tenth of a forest's time on few rows.
    """
    from sklearn import config_context

    with _openmp().limit(limits=1), config_context(skip_parameter_validation=True):
        return work(k)


@cache
def _openmp() -> ThreadpoolController:
    """The libraries that scikit-learn's trees run on; to look for them takes milliseconds."""
    import sklearn.ensemble  # noqa: F401 - loads them

    return ThreadpoolController().select(user_api="openmp")
