"""Rules that choose pivots in rounds over rows that are not in memory, and the rounds' reduction.

A round asks each strip of rows for an offer, adds the offers, and takes a step:

    state = rule.init(d)
    while not rule.terminate(state):
        offer = rule.prepare(state, strips)
        state = rule.step(state, sum(offer(start, x, weights) for each strip))

A state is plain arrays, so a choice of pivots can be stored after any round and taken up again.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np

from cme_dask.errors import option
from cme_dask.numerics.basis import BlockSolve, NewtonBasis
from cme_dask.numerics.pools import (
    BLOCK,
    Bound,
    CandidateBlock,
    eliminate,
    noise,
    non_negative,
    top_rows,
)
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip

# How far a choice of pivots is, as plain arrays, and what a round measures of it


Array = Any

STATUS = ("running", "tolerance", "max_rank", "exhausted")

_WORD = 8
_ROW_WORDS = 8  # per row of a strip: residual, diagonal, weight, index, their temporaries

ROWS = 1024
"""Rows whose columns are held at once: they stay in cache."""


@dataclass(frozen=True, eq=False)
class PivotState:
    """Pivots chosen so far, and what the rounds have measured of them.

    Attributes
    ----------
    points
        Pivots p, shape (m, d).
    rows
        Their global row indices, shape (m,).
    factor
        R, lower-triangular with K(p, p) = R R^T, shape (m, m).
    history
        Relative residual trace over all rows after 0, 1, ... pivots, as far as a round has
        measured it: those of the last round are measured in the next one.
    round
        Number of rounds.
    status
        ``running``, or why the choice ended: ``tolerance``, ``max_rank``, or ``exhausted`` (the
        rows span no more, to rounding).
    """

    points: Array
    rows: Array
    factor: Array
    history: Array
    round: int = 0
    status: str = "running"

    @classmethod
    def empty(cls, n_columns: int) -> Self:
        """No pivots yet, for rows of this many columns."""
        no_rows = np.empty(0, dtype=np.int64)
        return cls(np.empty((0, n_columns)), no_rows, np.empty((0, 0)), np.ones(1))

    @classmethod
    def of(cls, basis: NewtonBasis) -> Self:
        """Rounds go on from a basis on rows of the data."""
        return cls(basis.points, np.asarray(basis.rows), basis.factor, np.ones(1))

    @property
    def rank(self) -> int:
        """Number of pivots m."""
        return len(self.points)

    def basis(self, kernel: Any) -> NewtonBasis:
        """Newton basis on the pivots."""
        return NewtonBasis(kernel, self.points, self.factor, self.rows)

    def newton(self, kernel: Any, x: Array) -> Array:
        """N at the rows of x, shape (n, m), for m = 0 too."""
        return self.basis(kernel)(x) if self.rank else np.empty((len(x), 0))

    def extended(self, points: Array, rows: Array, newton: Array) -> Self:
        """With b more pivots; ``newton`` is N at them, themselves included, (b, m + b)."""
        m, b = self.rank, len(points)
        factor = np.zeros((m + b, m + b))
        factor[:m, :m] = self.factor
        factor[m:] = newton
        return replace(
            self,
            points=np.concatenate([self.points, points]),
            rows=np.concatenate([self.rows, rows]),
            factor=factor,
        )

    def measured(self, found: "Measured", tol: float) -> Self:
        """With the traces that a round has measured, and no more pivots than ``tol`` asks for."""
        if found.trace <= 0.0:
            return replace(self, status="exhausted")
        traces = 1.0 - np.cumsum(found.squares) / found.trace
        if len(traces):
            traces[-1] = found.rest / found.trace
        history = np.minimum.accumulate([1.0, *traces.clip(min=0.0)])
        met = np.flatnonzero(history <= tol)
        if not len(met):
            return replace(self, history=history)
        m = int(met[0])
        return replace(
            self,
            points=self.points[:m],
            rows=self.rows[:m],
            factor=self.factor[:m, :m],
            history=history[: m + 1],
            status="tolerance",
        )

    def to_arrays(self) -> dict[str, Array]:
        """Plain arrays to store."""
        return {
            "points": self.points,
            "rows": self.rows,
            "factor": self.factor,
            "history": self.history,
            "round": np.array(self.round),
            "status": np.array(STATUS.index(self.status)),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array]) -> Self:
        """Inverse of :meth:`to_arrays`."""
        return cls(
            points=np.asarray(arrays["points"]),
            rows=np.asarray(arrays["rows"]),
            factor=np.asarray(arrays["factor"]),
            history=np.asarray(arrays["history"]),
            round=int(arrays["round"]),
            status=STATUS[int(arrays["status"])],
        )


@dataclass(frozen=True, eq=False)
class Measured:
    """Sums over rows that tell the residual trace after every pivot; they add.

    Attributes
    ----------
    squares
        sum_i w_i N_j(x_i)^2 for each pivot j, shape (m,).
    trace, rest
        sum_i w_i k(x_i, x_i), and the same of the residuals.
    largest
        Largest k(x_i, x_i).
    """

    squares: Array
    trace: float
    rest: float
    largest: float

    def __add__(self, other: Self) -> "Measured":
        """Sums over both sets of rows."""
        return Measured(
            self.squares + other.squares,
            self.trace + other.trace,
            self.rest + other.rest,
            max(self.largest, other.largest),
        )

    def floor(self, rank: int) -> float:
        """Residual that is rounding after ``rank`` pivots."""
        return noise(rank, self.largest)


class Residuals:
    """Residuals k(x, x) - |N(x)|^2 at many strips of rows, prepared once.

    Parameters
    ----------
    basis
        Newton basis on the pivots so far.
    """

    def __init__(self, basis: NewtonBasis) -> None:
        self._basis = basis
        self._memory = np.empty((basis.rank, ROWS))
        self._write: Any = None

    def __call__(self, x: Array, weights: Array | None) -> tuple[Array, Measured]:
        """Residuals at the rows x, shape (n,), and their sums.

        Rows of weight zero are no rows: their residual is zero.
        """
        if self._write is None and self._basis.rank:
            self._write = self._basis.evaluator(BlockSolve.whole(self._basis.rank), x)
        weights = np.ones(len(x)) if weights is None else weights
        diagonal = np.asarray(self._basis.kernel.diagonal(x), dtype=np.float64)
        residual, squares = diagonal.copy(), np.zeros(self._basis.rank)
        for start in range(0, len(x) if self._basis.rank else 0, ROWS):
            here = slice(start, min(start + ROWS, len(x)))
            newton = self._memory[:, : here.stop - start]
            self._write(x[here], newton)
            np.multiply(newton, newton, out=newton)
            residual[here] -= newton.sum(axis=0)
            squares += newton @ weights[here]
        residual = np.where(weights > 0, residual, 0.0)
        non_negative(residual, float(diagonal.max(initial=0.0)))
        return residual, Measured(
            squares,
            float(weights @ diagonal),
            float(weights @ residual),
            float(diagonal.max(initial=0.0)),
        )


# Rules that choose pivots in rounds over rows that are not in memory


_OFFERED = 32  # rows per strip
_POOL = 8192  # rows in all, beyond which more strips offer fewer
_CANDIDATES = 64  # rows of largest residual, and as many scattered ones, among which a strip pivots
_PROPOSALS = 128
_TINY = np.finfo(np.float64).tiny


class Offer(Protocol):
    """What a round needs to know of a set of rows; offers of disjoint sets add."""

    measured: Measured

    def __add__(self, other: Any, /) -> Self:
        """Offer of both sets."""


class Rule(Protocol):
    """A way of choosing pivots."""

    def init(self, n_columns: int) -> PivotState:
        """The state before the first round, for rows of this many columns."""

    def terminate(self, state: PivotState) -> bool:
        """Whether there is nothing left to do."""

    def prepare(self, state: PivotState, strips: int) -> Callable[[int, Array, Array | None], Any]:
        """``offer(start, x, weights)`` of a strip of rows from global row ``start`` on."""

    def step(self, state: PivotState, offer: Any) -> PivotState:
        """The state after a round, given the sum of all offers."""


@dataclass(frozen=True)
class _Rounds:
    kernel: Any
    tol: float
    max_rank: int | None = None

    def init(self, n_columns: int) -> PivotState:
        """The state before the first round, for rows of this many columns."""
        return PivotState.empty(n_columns)

    def terminate(self, state: PivotState) -> bool:
        """Whether there is nothing left to do."""
        return state.status != "running"

    def _limit(self, state: PivotState) -> int:
        """Pivots that may still be chosen."""
        return np.iinfo(np.int64).max if self.max_rank is None else self.max_rank - state.rank

    def _accepted(self, state: PivotState, points: Array, rows: Array, newton: Array) -> PivotState:
        state = replace(state.extended(points, rows, newton), round=state.round + 1)
        if not len(points):
            return replace(state, status="exhausted")
        return replace(state, status="max_rank") if not self._limit(state) else state


@dataclass(frozen=True, eq=False)
class GreedyOffer:
    """A pool of rows with their residuals, and a bound of those outside it."""

    measured: Measured
    points: Array
    rows: Array
    residual: Array
    bound: Bound

    def __add__(self, other: "GreedyOffer") -> "GreedyOffer":
        """Offer of both sets of rows."""
        return GreedyOffer(
            self.measured + other.measured,
            np.concatenate([self.points, other.points]),
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.residual, other.residual]),
            self.bound | other.bound,
        )


@dataclass(frozen=True)
class Greedy(_Rounds):
    """Pivots of largest residual (joint paper, Algorithm 1), several in a round.

    With ``span`` 1, each pivot is provably the one that Algorithm 1 takes over all rows, ties
    within 1e-10 going to the lowest row: strips offer the rows of largest residuals, since then
    the bound of all others is lowest. With a smaller span, pivots are accepted as long as their
    residual is at least ``span`` times any outside the pool: strips offer rows that are pivoted
    among themselves, since these are far apart.

    Parameters
    ----------
    kernel
        The kernel k.
    tol
        Ends at the first pivot with trace(K - L L^T) <= tol trace(K) over all rows.
    max_rank
        Largest number of pivots.
    span
        In (0, 1].
    """

    span: float = 1.0

    def prepare(
        self, state: PivotState, strips: int
    ) -> Callable[[Array, Array, Array | None], GreedyOffer]:
        """``offer(rows, x, weights)`` of a strip of rows with these global indices, ascending."""
        residuals = Residuals(state.basis(self.kernel))
        size = offered_rows(state.rank, strips)

        def offer(rows: Array, x: Array, weights: Array | None) -> GreedyOffer:
            residual, measured = residuals(x, weights)
            if self.span == 1.0:
                chosen, bound = top_rows(residual, rows, size)
            else:
                few = _candidates(residual, rows, max(_CANDIDATES, size))
                chosen = few[self._spread(state, x[few], residual[few], size, measured)]
                bound = Bound.of(np.delete(residual, chosen), np.delete(rows, chosen))
            return GreedyOffer(measured, x[chosen], rows[chosen], residual[chosen], bound)

        return offer

    def _spread(
        self, state: PivotState, x: Array, residual: Array, size: int, measured: Measured
    ) -> Array:
        """Positions of greedy pivots among these rows alone, at least one."""
        newton = state.newton(self.kernel, x)

        def choose(left: Array, panel: Array) -> int:
            pick, result = int(left.argmax()), len(panel)
            return pick if not result or left[pick] > measured.floor(state.rank + result) else -1

        schur = self.kernel(x, x) - newton @ newton.T
        # With nothing left but rounding, any one row tells as much as another.
        return np.sort(eliminate(schur, np.maximum(residual, _TINY), choose, size)[0])

    def step(self, state: PivotState, offer: GreedyOffer) -> PivotState:
        """The state after a round, given the sum of all offers."""
        state = state.measured(offer.measured, self.tol)
        if self.terminate(state):
            return state
        kernel, points = self.kernel, offer.points
        newton, largest = state.newton(kernel, points), offer.measured.largest
        residual = offer.residual.copy()
        pool = CandidateBlock(kernel, points, offer.rows, residual, newton, scale=largest)
        floor, bound = offer.measured.floor, offer.bound.relaxed(self.span)
        if offer.residual.max() <= floor(state.rank):
            picks, newton = np.empty(0, dtype=np.int64), np.empty((0, state.rank))
        else:
            picks, newton = pool.advance(bound, floor, self._limit(state), certain=True)
        return self._accepted(state, points[picks], offer.rows[picks], newton)


def offered_rows(rank: int, strips: int) -> int:
    """Rows that a strip offers: at most 32, or more if the rank is high and the strips are few."""
    most = max(_OFFERED, 4 * rank // strips)
    return min(most, max(max(_POOL, 4 * rank) // strips, 1))


def _candidates(residual: Array, rows: Array, count: int) -> Array:
    """Positions of the largest residuals: overall, and in each of ``count`` parts of a strip.

    The first find what lies together in the table, the second what is far apart in space.
    """
    parts = np.array_split(np.arange(len(residual)), min(count, len(residual)))
    spread = [part[residual[part].argmax()] for part in parts]
    return np.union1d(top_rows(residual, rows, count)[0], spread)


@dataclass(frozen=True, eq=False)
class RandomOffer:
    """Independent draws of rows with probabilities proportional to their weighted residuals.

    Each slot holds the winner of a race: a set of rows with residual sum T arrives after an
    exponential time of rate T, so the first of several sets is one of them with probability
    proportional to T, and it does not matter in which order they are compared.

    Attributes
    ----------
    times
        Arrival times, shape (B,).
    points, rows
        The rows drawn, shapes (B, d) and (B,).
    """

    measured: Measured
    times: Array
    points: Array
    rows: Array

    def __add__(self, other: "RandomOffer") -> "RandomOffer":
        """Draws from both sets of rows."""
        first = self.times <= other.times
        return RandomOffer(
            self.measured + other.measured,
            np.where(first, self.times, other.times),
            np.where(first[:, None], self.points, other.points),
            np.where(first, self.rows, other.rows),
        )


@dataclass(frozen=True)
class Random(_Rounds):
    """Accelerated randomly pivoted Cholesky (Epperly, Tropp and Webber 2024, Algorithm 2).

    Randomly pivoted Cholesky draws each pivot with probability proportional to the residuals. Here
    a round draws B rows by the residuals at its beginning, and goes through them: row i is accepted
    with probability (its residual given the pivots accepted before) / (its residual at the
    beginning). The pivots have exactly the law of drawing one at a time.

    Parameters
    ----------
    kernel
        The kernel k.
    tol
        Ends at the first pivot with trace(K - L L^T) <= tol trace(K) over all rows.
    max_rank
        Largest number of pivots.
    seed
        Non-negative integers: equal ones give equal pivots, on any chunks and scheduler.
    """

    seed: tuple[int, ...] = (0,)

    def prepare(
        self, state: PivotState, strips: int
    ) -> Callable[[Array, Array, Array | None], RandomOffer]:
        """``offer(rows, x, weights)`` of a strip of rows with these global indices, ascending."""
        residuals = Residuals(state.basis(self.kernel))
        size = max(_PROPOSALS, 2 * state.rank)

        def offer(rows: Array, x: Array, weights: Array | None) -> RandomOffer:
            residual, measured = residuals(x, weights)
            # Strips are known by their first row, counted from 1: 0 is the client's.
            rng = np.random.default_rng([*self.seed, state.round, int(rows[0]) + 1])
            mass = np.cumsum(residual if weights is None else weights * residual)
            drawn = np.searchsorted(mass, rng.random(size) * mass[-1], side="right")
            drawn = np.minimum(drawn, len(x) - 1)
            with np.errstate(divide="ignore"):
                times = rng.exponential(size=size) / mass[-1]
            return RandomOffer(measured, times, x[drawn], rows[drawn])

        return offer

    def step(self, state: PivotState, offer: RandomOffer) -> PivotState:
        """The state after a round, given the sum of all offers."""
        state = state.measured(offer.measured, self.tol)
        if self.terminate(state):
            return state
        kernel, points = self.kernel, offer.points
        newton = state.newton(kernel, points)
        schur = kernel(points, points) - newton @ newton.T
        before = np.where(np.isfinite(offer.times), np.diag(schur), 0.0).clip(min=0.0)
        rng = np.random.default_rng([*self.seed, state.round, 0])
        least = rng.random(len(points)) * before
        next_one = 0

        def choose(residual: Array, panel: Array) -> int:
            nonlocal next_one
            floor = offer.measured.floor(state.rank + len(panel))
            accepted = (residual >= least) & (residual > floor)
            accepted[:next_one] = False
            pick = int(accepted.argmax())
            next_one = pick + 1
            return pick if accepted[pick] else -1

        picks, panel = eliminate(schur, before, choose, self._limit(state))
        newton = np.concatenate([newton[picks], np.tril(panel[:, picks].T)], axis=1)
        return self._accepted(state, points[picks], offer.rows[picks], newton)


@dataclass(frozen=True, eq=False)
class PivotOffers(Reduction[tuple[Any, ...], tuple[Any, ...]]):
    """What all rows offer in a round, for each variable that is still choosing.

    Parameters
    ----------
    asked
        Rules and states of these variables, in the order of the sources.
    strips
        Number of strips of all rows.
    """

    asked: tuple[tuple[Rule, PivotState], ...]
    strips: int
    name = "pivot-round"
    kinds = (GreedyOffer, RandomOffer, Measured, Bound)

    def cost(self, extent: Extent) -> Cost:
        """See :func:`round_cost`."""
        return round_cost(tuple(state.rank for _, state in self.asked), extent)

    def start(self, like: Array) -> list[Callable[..., Any]]:
        """What makes the offers of a strip."""
        return [rule.prepare(state, self.strips) for rule, state in self.asked]

    def update(self, state: list[Callable[..., Any]], strip: Strip) -> tuple[Any, ...]:
        """The offers of one strip; no rows offer none."""
        if not len(strip):
            return ()
        pairs = zip(state, strip.parts, strict=True)
        return tuple(offer(strip.rows, x, strip.weights) for offer, x in pairs)

    def combine(self, a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
        """The offers of both, one by one."""
        return tuple(map(operator.add, a, b)) if a and b else a or b


def round_cost(ranks: tuple[int, ...], extent: Extent) -> Cost:
    """What a round at these ranks takes."""
    d, strips, square = extent.n_columns, extent.strips, sum(m * m for m in ranks)
    # The factor as it came and as it is prepared, and kernel sections with their temporaries.
    state = _ROW_WORDS * extent.strip_rows + 2 * square + 3 * ROWS * sum(ranks)
    offered = [max(offered_rows(m, strips), -(-2 * m // strips)) for m in ranks]
    return Cost(
        flops=square + 2 * sum(ranks) * d,
        state=state * _WORD,
        partial=sum(max(offered_rows(m, strips), 2 * m) for m in ranks) * (d + 3) * _WORD,
        retained=2 * strips * sum(offered) * (d + 3) * _WORD,
        subject=f"a round of pivots at rank {' + '.join(map(str, ranks))}",
        remedies=(f"lower {option('max_rank')} or raise {option('tol')}",),
    )


def choice_bytes(ranks: tuple[int, ...], extent: Extent) -> int:
    """What the choice among all offers takes."""
    # Columns of L over the pool and its parts, or the residual matrix of random proposals.
    pool = max(
        max(int(1.7 * extent.strips * offered_rows(m, extent.strips) * (m + BLOCK)), 12 * m * m)
        for m in ranks
    )
    return (pool + 2 * sum(m * m for m in ranks)) * _WORD
