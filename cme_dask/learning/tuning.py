"""Kernels and ridge learned from the rows, by held-out losses."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import minimize

from cme_dask.chunked.blas import one_blas_thread
from cme_dask.errors import DataError
from cme_dask.kernels import Categorical, Coordinates, Gaussian, Kernel, Warped
from cme_dask.learning.coordinates import coordinates
from cme_dask.learning.screening import ScreenedRows, ScreenedSide, screened_folds
from cme_dask.numerics.crossval import HeldFold, over_folds
from cme_dask.numerics.moments import Function
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.thresholds import Judges, declared, make_thresholds

Array = Any

FORMS = ("standard", "scores")
GRID = (0.2, 0.4, 0.8, 1.6, 3.2)
"""Shared length scales, in standard deviations and for one column."""
REGS = tuple(10.0**p for p in (-7, -6, -5, -4, -3, -2, -1, 0))
"""Ridges, the same for both variables."""
CRITERIA = ("joint+crps", "joint", "crps", "validation")

_SHORTEST, _LONGEST = 0.05, 50.0  # length scales, in standard deviations
_OFF = 8.0  # a column's length scale is made so much longer to see if it is needed
_HELD_SIDES = 24  # bases of some megabytes each: those of the grid
_DIGITS, _SCORE_DIGITS = 2, 7  # of logarithms of length scales, and of scores
_APART = 0.5  # logarithms of the length scales of two finalists differ by this much at least


@dataclass(frozen=True)
class Tuning:
    """How kernels and ridge are searched.

    Parameters
    ----------
    criterion : {"joint+crps", "joint", "crps", "validation"}
        ``validation`` is (41) of the joint paper, the squared error of the declared functions of y,
        in the place of the sliced CRPS. Else held-out joint loss, sliced CRPS, or the sum of both,
        each over what the best candidate
        gains on independence.
    rows
        Rows of the row sample that the search sees.
    max_rank
        Pivots of each basis in the search.
    evaluations
        Pairs of kernels that are tried after the grid; default 40, and 5 more for each column.
    finalists
        Candidates whose moments are made of all rows.
    averaged
        Best of them whose density ratios are averaged.
    """

    criterion: str = "joint+crps"
    rows: int = 4096
    max_rank: int = 200
    evaluations: int | None = None
    finalists: int = 6
    averaged: int = 5

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise DataError(
                f"criterion must be one of {', '.join(CRITERIA)}, got {self.criterion!r}"
            )
        least = {"rows": 50, "max_rank": 2, "evaluations": 0, "finalists": 1, "averaged": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if name == "evaluations" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise DataError(f"{name} must be an integer of at least {low}, got {value!r}")


@dataclass(frozen=True)
class SidePoint:
    """Kernel of one variable: its coordinates and a length scale for each column in them.

    ``form`` is ``"given"``, without scales, for a kernel that is not learned.
    """

    form: str
    scales: tuple[float, ...] = ()

    def scaled(self, factors: Sequence[float]) -> "SidePoint":
        """With other length scales, kept within bounds."""
        scales = np.clip(np.asarray(self.scales) * factors, _SHORTEST, _LONGEST)
        return SidePoint(self.form, tuple(scales.tolist()))


@dataclass(frozen=True)
class Trial:
    """A candidate and its held-out losses.

    Attributes
    ----------
    x, y
        The kernels.
    reg
        The best ridge for them.
    joint, crps
        Held-out joint loss, and sliced CRPS over that of independence.
    score
        What was minimised: 0 for independence, about -1 or -2 for the best.
    stage
        Where it came up: ``grid``, ``columns``, ``refine``.
    """

    x: SidePoint
    y: SidePoint
    reg: float
    joint: float
    crps: float
    score: float
    stage: str


@dataclass(frozen=True)
class Score:
    """What a joint loss and a sliced CRPS (less that of independence) add up to.

    Each is taken over what the best candidate gains on independence, and weighted by the inverse
    variance of that gain over the folds: the noisier loss counts less. Independence has 0, the best
    of both -2 (-1 for a criterion that is one of them).

    Attributes
    ----------
    joint, crps
        Factors of the two.
    """

    joint: float = 1.0
    crps: float = 1.0

    def __call__(self, joint: Array, crps: Array) -> Array:
        """The score."""
        return self.joint * joint + self.crps * crps

    @classmethod
    def of(cls, criterion: str, gains: Sequence[float], errors: Sequence[float]) -> "Score":
        """From the gains of the best candidates and their standard errors: joint, CRPS."""
        # Of (41) as of the sliced CRPS, in whose place it stands, the gain is what counts.
        wanted = ["joint" in criterion, criterion != "joint"]
        # Where nothing is gained independence is best, and any unit does.
        gained = np.maximum(gains, 1e-12)
        precision = (gained / np.maximum(errors, 1e-6 * gained)) ** 2 * wanted
        factors = sum(wanted) * precision / precision.sum() / gained
        return cls(float(factors[0]), float(factors[1]))


@dataclass(frozen=True, eq=False)
class Candidate:
    """What a finalist is made of."""

    kernel_x: Kernel
    kernel_y: Kernel
    reg: Regularization
    trial: Trial


@dataclass(frozen=True, eq=False)
class Search:
    """The search and what came of it.

    Attributes
    ----------
    trials
        All candidates, in the order in which they were tried.
    finalists
        The best ones that differ, best first.
    thresholds
        The events of the sliced CRPS.
    score
        Of a joint loss and a sliced CRPS.
    seconds
        What it took.
    candidate
        What a trial is made of.
    """

    trials: tuple[Trial, ...]
    finalists: tuple[Candidate, ...]
    thresholds: Judges
    score: Score
    seconds: float
    candidate: Callable[[Trial], Candidate] = field(repr=False)


Estimated = tuple[Array, Array]
"""Means over the folds for each ridge, and their standard errors."""

Heard = Callable[[str, int, int, float], None]
"""Told the stage, the number of trials in it so far and at most, and the best score."""


@dataclass(eq=False)
class _Variable:
    """One variable of the search: its rows in each form of coordinates."""

    rows: Array
    weights: Array
    categorical: tuple[bool, ...]
    given: Kernel | None
    maps: dict[str, Coordinates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.given is None:
            for form in FORMS:
                self.maps[form] = coordinates(self.rows, self.weights, self.categorical, form)
        # Categories have no scores: with nothing else there is one form only.
        self.forms = tuple(self.maps)[: 1 if all(self.categorical) else 2] or ("given",)
        self.values = {form: np.asarray(m(self.rows)) for form, m in self.maps.items()}
        self.values["given"] = self.rows

    def start(self, form: str, scale: float) -> SidePoint:
        if form == "given":
            return SidePoint(form)
        numeric = len(self.categorical) - sum(self.categorical)
        each = [1.0 if coded else np.sqrt(numeric) for coded in self.categorical]
        return SidePoint(form, tuple(each)).scaled([scale] * len(each))

    def inner(self, point: SidePoint) -> Kernel:
        """The kernel of rows in the coordinates."""
        if point.form == "given":
            assert self.given is not None
            return self.given
        kinds = {}
        for kind, coded in ((Gaussian, False), (Categorical, True)):
            at = [j for j, c in enumerate(self.categorical) if c == coded]
            if at:
                kinds[kind] = kind(tuple(point.scales[j] for j in at)), at
        kernels = [
            kernel if len(at) == len(self.categorical) else kernel.on(at)
            for kernel, at in kinds.values()
        ]
        return kernels[0] if len(kernels) == 1 else kernels[0] * kernels[1]

    def kernel(self, point: SidePoint) -> Kernel:
        """The kernel of rows as they are."""
        inner = self.inner(point)
        return inner if point.form == "given" else Warped(inner, self.maps[point.form])


class _Searcher:
    """Losses of pairs of kernels, each made once."""

    def __init__(
        self,
        variables: tuple[_Variable, _Variable],
        rows: ScreenedRows,
        thresholds: Judges,
        regs: Sequence[Regularization],
        options: Tuning,
        tol: float,
        heard: Heard | None,
    ) -> None:
        self.variables, self._rows, self._thresholds = variables, rows, thresholds
        self.regs, self._options, self._tol, self._heard = regs, options, tol, heard
        self._sides: dict[tuple[int, SidePoint], ScreenedSide] = {}
        self._losses: dict[tuple[SidePoint, SidePoint], tuple[Estimated, Estimated]] = {}
        self._stages: dict[tuple[SidePoint, SidePoint], str] = {}
        self.score_of = Score()

    def side(self, i: int, point: SidePoint) -> ScreenedSide:
        if (i, point) not in self._sides:
            variable = self.variables[i]
            if len(self._sides) >= _HELD_SIDES:
                self._sides.pop(next(iter(self._sides)))
            values = variable.values[point.form][self._rows.order]
            self._sides[i, point] = ScreenedSide(
                self._rows, variable.inner(point), values, self._tol, self._options.max_rank
            )
        return self._sides[i, point]

    def losses(self, x: SidePoint, y: SidePoint, stage: str) -> tuple[Array, Array]:
        """Joint loss and sliced CRPS over independence's, for each ridge."""
        if (x, y) not in self._losses:
            folds = screened_folds(self._rows, self.side(0, x), self.side(1, y))
            self._losses[x, y] = estimated(folds, self.regs, self._thresholds)
            self._stages[x, y] = stage
        joint, crps = self._losses[x, y]
        return joint[0], crps[0]

    def settle(self) -> None:
        """Score from now on by the best candidates so far."""
        gains, errors = [], []
        for i in (0, 1):
            losses, spreads = (
                np.concatenate([each[i][k] for each in self._losses.values()]) for k in (0, 1)
            )
            best = int(losses.argmin())
            gains.append(-float(losses[best]))
            errors.append(float(spreads[best]))
        self.score_of = Score.of(self._options.criterion, gains, errors)

    def scores(self, x: SidePoint, y: SidePoint, stage: str) -> Array:
        return self.score_of(*self.losses(x, y, stage))

    def score(self, x: SidePoint, y: SidePoint, stage: str) -> float:
        return float(self.scores(x, y, stage).min())

    def trials(self) -> list[Trial]:
        found = []
        for (x, y), stage in self._stages.items():
            scores = self.scores(x, y, stage)
            best = int(scores.argmin())
            joint, crps = (float(each[best]) for each in self.losses(x, y, stage))
            reg, score = self.regs[best].x, float(scores[best])
            found.append(Trial(x, y, reg, joint, crps, score, stage))
        return found

    def hear(self, stage: str, done: int, most: int, best: float) -> None:
        if self._heard is not None:
            self._heard(stage, done, most, best)


def estimated(
    folds: Sequence[HeldFold], regs: Sequence[Regularization], thresholds: Judges
) -> tuple[Estimated, Estimated]:
    """Joint loss, and sliced CRPS less that of independence, for each ridge."""
    each = [fold.losses(regs) for fold in folds]
    q = len(thresholds)  # the last of the functions
    crps = [(one.squared[:, -q:] - one.baseline[-q:]) @ thresholds.scores for one in each]
    return over_folds(folds, np.stack([one.joint for one in each])), over_folds(
        folds, np.stack(crps)
    )


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
    with a much longer one; then all are refined together (``scipy.optimize``, COBYQA).

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
    begin, options = time.perf_counter(), options or Tuning()
    if len(np.unique(folds)) < 2:
        raise DataError(
            "kernels are learned on held-out folds, and the row sample has rows of one only: give "
            "kernels, more rows or more folds"
        )
    thresholds: Judges = (
        declared(functions, parts[1], weights)
        if options.criterion == "validation"
        else make_thresholds(parts[1], weights, categorical[1], seed)
    )
    rows = ScreenedRows(weights, folds, thresholds(parts[1]))
    variables = tuple(
        _Variable(part, weights, coded, kernel)
        for part, coded, kernel in zip(parts, categorical, given, strict=True)
    )
    regs = [Regularization(r, r) for r in REGS] if reg is None else [reg]
    searcher = _Searcher(variables, rows, thresholds, regs, options, tol, heard)  # type: ignore[arg-type]
    with one_blas_thread():
        best = _grid(searcher)
        best = _columns(searcher, *best)
        columns = sum(part.shape[1] for part in parts)
        most = 40 + 5 * columns if options.evaluations is None else options.evaluations
        _refine(searcher, *best, most)
        searcher.settle()
    trials = searcher.trials()

    def candidate(trial: Trial) -> Candidate:
        x, y = searcher.variables
        ridge = Regularization(trial.reg, trial.reg) if reg is None else reg
        return Candidate(x.kernel(trial.x), y.kernel(trial.y), ridge, trial)

    finalists = tuple(map(candidate, _finalists(trials, options.finalists)))
    seconds = time.perf_counter() - begin
    score = searcher.score_of
    return Search(tuple(trials), finalists, thresholds, score, seconds, candidate)


Pair = tuple[SidePoint, SidePoint]


def _grid(searcher: _Searcher) -> Pair:
    xs, ys = (
        [v.start(f, s) for f in v.forms for s in (GRID if v.given is None else GRID[:1])]
        for v in searcher.variables
    )
    pairs = list(product(xs, ys))
    for done, (x, y) in enumerate(pairs):
        searcher.losses(x, y, "grid")
        if done % 10 == 0:
            searcher.settle()
            searcher.hear("grid", done, len(pairs), searcher.score(x, y, "grid"))
    searcher.settle()
    return min(pairs, key=lambda pair: searcher.score(pair[0], pair[1], "grid"))


def _columns(searcher: _Searcher, x: SidePoint, y: SidePoint) -> Pair:
    """Columns of x whose length scale had better be much longer, one after the other."""
    count = len(x.scales)
    if count < 2:
        return x, y
    best = searcher.score(x, y, "columns")
    for j in range(count):
        tried = x.scaled([_OFF if i == j else 1.0 for i in range(count)])
        score = searcher.score(tried, y, "columns")
        if score < best:
            best, x = score, tried
        searcher.hear("columns", j + 1, count, best)
    return x, y


def _refine(searcher: _Searcher, x: SidePoint, y: SidePoint, evaluations: int) -> None:
    """All length scales together, from the best so far."""
    start = np.log([*x.scales, *y.scales])
    if not len(start) or evaluations <= len(start) + 2:
        return
    count = len(x.scales)
    done = 0
    best = np.inf

    def objective(logarithms: Array) -> float:
        nonlocal done, best
        # Rounded, as scores are: then a path does not follow the last bits of the rows.
        scales = np.exp(np.round(logarithms, _DIGITS))
        here = (
            SidePoint(x.form, tuple(scales[:count].tolist())),
            SidePoint(y.form, tuple(scales[count:].tolist())),
        )
        score = searcher.score(*here, "refine")
        done, best = done + 1, min(best, score)
        searcher.hear("refine", done, evaluations, best)
        return round(score, _SCORE_DIGITS)

    minimize(
        objective,
        start,
        method="COBYQA",
        bounds=[(np.log(_SHORTEST), np.log(_LONGEST))] * len(start),
        options={"maxfev": evaluations, "initial_tr_radius": 0.5, "final_tr_radius": 0.05},
    )


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
    scales = (np.log([*t.x.scales, *t.y.scales]) for t in (one, two))
    first, second = scales
    return bool(np.abs(first - second).max(initial=0.0) >= _APART)
