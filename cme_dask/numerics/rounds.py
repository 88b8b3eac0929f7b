"""Pivots chosen in rounds over rows that are not in memory: the rules, and a round's reduction.

In a round each strip of rows makes an offer, offers are combined, and the rule chooses among the
rows of the whole offer:

    state = PivotState.empty(d)
    while not state.done:
        offer = a pass over all rows with PivotOffers(((rule, state),), strips)
        state = rule.step(state, offer)

A state is plain arrays, so a choice of pivots can be stored after any round and taken up again.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from cme_dask.errors import option
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import (
    BLOCK,
    NO_ROWS,
    ROUNDING,
    Bound,
    PivotedFactor,
    dense_pivots,
    leading,
    noise,
    non_negative,
    top_rows,
)
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip

# How far a choice of pivots is, as plain arrays


Array = Any

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

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""
        return self.status != "running"

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

    def measured(self, offer: "Offer", tol: float) -> Self:
        """With the traces that a round has measured, and no more pivots than ``tol`` asks for.

        Where the pivots of the last round make residuals negative beyond rounding, since they
        follow others that are all but dependent, the choice ends without them.

        Raises
        ------
        NumericalError
            If the kernel isn't positive semidefinite.
        """
        if offer.least < -ROUNDING * offer.largest:
            known = len(self.history) - 1 if self.round else self.rank
            smallest = np.diag(self.factor).min(initial=np.inf) ** 2
            if not known or smallest > ROUNDING * offer.largest:
                non_negative(np.array([offer.least]), offer.largest)
            return replace(self._first(known), status="exhausted")
        if offer.trace <= 0.0:
            return replace(self, status="exhausted")
        traces = 1.0 - np.cumsum(offer.squares) / offer.trace
        if len(traces):
            traces[-1] = offer.rest / offer.trace
        history = np.minimum.accumulate([1.0, *traces.clip(min=0.0)])
        met = np.flatnonzero(history <= tol)
        if not len(met):
            return replace(self, history=history)
        m = int(met[0])
        return replace(self._first(m), history=history[: m + 1], status="tolerance")

    def _first(self, m: int) -> Self:
        """The first m pivots."""
        points, rows, factor = self.points[:m], self.rows[:m], self.factor[:m, :m]
        return replace(self, points=points, rows=rows, factor=factor)


# Rules: which rows a strip offers, and which pivots a round takes among all that were offered


_OFFERED = 32  # rows per strip
_POOL = 8192  # rows in all, beyond which more strips offer fewer
_CANDIDATES = 64  # rows of largest residual, and as many scattered ones, among which a strip pivots
_PROPOSALS = 128
_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True, eq=False)
class Offer:
    """What a round needs to know of a set of rows.

    Attributes
    ----------
    squares
        sum_i w_i N_j(x_i)^2 for each pivot j, shape (m,): they give the trace after every pivot.
    trace, rest
        sum_i w_i k(x_i, x_i), and the same of the residuals.
    largest, least
        Largest k(x_i, x_i), and the least residual: below zero by rounding alone.
    points, rows
        Some of the rows, shape (c, d), and their global indices, shape (c,).
    values
        Their residuals, or the times at which they arrive, shape (c,).
    bound
        Of the residuals of the others.
    """

    squares: Array
    trace: float
    rest: float
    largest: float
    least: float
    points: Array
    rows: Array
    values: Array
    bound: Bound

    def joined(self, other: "Offer", points: Array, rows: Array, values: Array) -> "Offer":
        """Sums over both sets of rows, with these of them."""
        return Offer(
            self.squares + other.squares,
            self.trace + other.trace,
            self.rest + other.rest,
            max(self.largest, other.largest),
            min(self.least, other.least),
            points,
            rows,
            values,
            leading(*map(np.array, zip(self.bound, other.bound, strict=True))),
        )


@dataclass(frozen=True)
class Rule(ABC):
    """A way of choosing pivots in rounds.

    Parameters
    ----------
    kernel
        The kernel k.
    tol
        Ends at the first pivot with trace(K - L L^T) <= tol trace(K) over all rows.
    max_rank
        Largest number of pivots.
    """

    kernel: Any
    tol: float
    max_rank: int | None = None

    @abstractmethod
    def offered(
        self, state: PivotState, strips: int, strip: Strip, x: Array, residual: Array
    ) -> tuple[Array, Array, Bound]:
        """Positions of the rows that a strip offers, their values, a bound of the others.

        Parameters
        ----------
        state
            Before the round.
        strips
            Number of strips of all rows.
        strip, x
            The strip, and its rows of this variable.
        residual
            k(x, x) - |N(x)|^2, shape (n,); zero for rows of weight zero.
        """

    @abstractmethod
    def combine(self, a: Offer, b: Offer) -> Offer:
        """The offer of both sets of rows."""

    @abstractmethod
    def choose(self, state: PivotState, offer: Offer, max_rank: int) -> tuple[Array, Array]:
        """Positions of the next b pivots in the offer, and N at them, shape (b, m + b)."""

    def step(self, state: PivotState, offer: Offer) -> PivotState:
        """The state after a round, given the offer of all rows."""
        state = state.measured(offer, self.tol)
        if state.done:
            return state
        max_rank = np.iinfo(np.int64).max if self.max_rank is None else self.max_rank
        picks, newton = self.choose(state, offer, max_rank)
        state = state.extended(offer.points[picks], offer.rows[picks], newton)
        ended = "running" if len(picks) else "exhausted"
        ended = "max_rank" if state.rank == max_rank else ended
        return replace(state, round=state.round + 1, status=ended)


@dataclass(frozen=True)
class Greedy(Rule):
    """Pivots of largest residual (joint paper, Algorithm 1), several in a round.

    With ``span`` 1, each pivot is provably the one that Algorithm 1 takes over all rows, ties
    within 1e-10 going to the lowest row: strips offer the rows of largest residuals, since then
    the bound of all others is lowest. With a smaller span, pivots are accepted as long as their
    residual is at least ``span`` times any outside the offer: strips offer rows that are pivoted
    among themselves, since these are far apart.

    Parameters
    ----------
    kernel, tol, max_rank
        As of every rule.
    span
        In (0, 1].
    """

    span: float = 1.0

    def offered(
        self, state: PivotState, strips: int, strip: Strip, x: Array, residual: Array
    ) -> tuple[Array, Array, Bound]:
        """Rows of largest residual, or pivots among these and scattered ones."""
        size = offered_rows(state.rank, strips)
        if self.span == 1.0:
            chosen, bound = top_rows(residual, strip.rows, size)
            chosen = chosen[residual[chosen] > 0.0]  # without rows of weight zero
            return chosen, residual[chosen], bound
        few = _candidates(residual, strip.rows, max(_CANDIDATES, size))
        points, newton = x[few], state.newton(self.kernel, x[few])
        # With nothing left but rounding, any one row is as good as another.
        left = np.maximum(residual[few], _TINY)
        largest = float(np.max(self.kernel.diagonal(x), initial=0.0))

        def next_pivot(residual: Array, panel: Array) -> int | None:
            pick, known = int(residual.argmax()), len(panel)
            if known and residual[pick] <= noise(state.rank + known, largest):
                return None
            return pick

        most = state.rank + size
        picks, _, _ = dense_pivots(self.kernel, points, newton, most, next_pivot, residual=left)
        chosen = few[np.sort(picks)]
        bound = leading(np.delete(residual, chosen), np.delete(strip.rows, chosen))
        return chosen, residual[chosen], bound

    def combine(self, a: Offer, b: Offer) -> Offer:
        """The rows of both offers."""
        pairs = ((a.points, b.points), (a.rows, b.rows), (a.values, b.values))
        return a.joined(b, *map(np.concatenate, pairs))

    def choose(self, state: PivotState, offer: Offer, max_rank: int) -> tuple[Array, Array]:
        """Greedy pivots among the rows of the offer, as long as no other row may come first."""
        candidates = PivotedFactor(
            self.kernel,
            offer.points,
            offer.rows,
            residual=offer.values.copy(),
            newton=state.newton(self.kernel, offer.points),
            scale=offer.largest,
        )
        bound = offer.bound
        if self.span < 1.0:  # any row may come before a tied one
            bound = self.span * bound[0], NO_ROWS[1]
        return candidates.greedy(max_rank, bound)


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


@dataclass(frozen=True)
class Random(Rule):
    """Accelerated randomly pivoted Cholesky (Epperly, Tropp and Webber 2024, Algorithm 2).

    Randomly pivoted Cholesky draws each pivot with probability proportional to the residuals. Here
    a round draws B rows by the residuals at its beginning, and goes through them: row i is accepted
    with probability (its residual given the pivots accepted before) / (its residual at the
    beginning). The pivots have exactly the law of drawing one at a time.

    Each of the B draws is the winner of a race: a set of rows with residual sum T arrives after an
    exponential time of rate T, so the first of several sets is one of them with probability
    proportional to T, and it does not matter in which order they are compared.

    Parameters
    ----------
    kernel, tol, max_rank
        As of every rule.
    seed
        Non-negative integers: equal ones give equal pivots, on any chunks and scheduler.
    """

    seed: tuple[int, ...] = (0,)

    def offered(
        self, state: PivotState, strips: int, strip: Strip, x: Array, residual: Array
    ) -> tuple[Array, Array, Bound]:
        """B draws with probabilities proportional to the weighted residuals, and their times."""
        size = max(_PROPOSALS, 2 * state.rank)
        # Strips are known by their first row, counted from 1: 0 is the client's.
        rng = np.random.default_rng([*self.seed, state.round, int(strip.rows[0]) + 1])
        mass = np.cumsum(residual if strip.weights is None else strip.weights * residual)
        drawn = np.searchsorted(mass, rng.random(size) * mass[-1], side="right")
        with np.errstate(divide="ignore"):
            times = rng.exponential(size=size) / mass[-1]
        return np.minimum(drawn, len(x) - 1), times, NO_ROWS

    def combine(self, a: Offer, b: Offer) -> Offer:
        """The first of each pair of draws."""
        first = a.values <= b.values
        return a.joined(
            b,
            np.where(first[:, None], a.points, b.points),
            np.where(first, a.rows, b.rows),
            np.where(first, a.values, b.values),
        )

    def choose(self, state: PivotState, offer: Offer, max_rank: int) -> tuple[Array, Array]:
        """The draws that are accepted, one after the other."""
        newton = state.newton(self.kernel, offer.points)
        rng = np.random.default_rng([*self.seed, state.round, 0])
        least = rng.random(len(offer.rows))
        draws = iter(np.flatnonzero(np.isfinite(offer.values)).tolist())

        def accepted(residual: Array, panel: Array) -> int | None:
            if not len(panel):
                np.multiply(least, residual, out=least)
            for pick in draws:
                left = residual[pick]
                if left >= least[pick] and left > noise(state.rank + len(panel), offer.largest):
                    return int(pick)
            return None

        picks, newton, _ = dense_pivots(self.kernel, offer.points, newton, max_rank, accepted)
        return picks, newton


# The reduction of a round, for all variables that are still choosing


class _Residuals:
    """Residuals of one variable at strip after strip, and their sums, in the same memory."""

    def __init__(self, rule: Rule, state: PivotState, like: Array) -> None:
        self._kernel, self._rank = rule.kernel, state.rank
        self._memory = np.empty((state.rank, ROWS))
        if state.rank:
            self._write = state.basis(rule.kernel).evaluator(like)

    def __call__(
        self, x: Array, weights: Array | None
    ) -> tuple[Array, tuple[Array, float, float, float, float]]:
        """Residuals at the rows x, shape (n,); the sums, the largest and the least of an offer.

        Rows of weight zero are no rows: their residual is zero.
        """
        weights = np.ones(len(x)) if weights is None else weights
        diagonal = np.asarray(self._kernel.diagonal(x), dtype=np.float64)
        residual, squares = diagonal.copy(), np.zeros(self._rank)
        for start in range(0, len(x) if self._rank else 0, ROWS):
            here = slice(start, min(start + ROWS, len(x)))
            newton = self._memory[:, : here.stop - start]
            self._write(x[here], newton)
            np.multiply(newton, newton, out=newton)
            residual[here] -= newton.sum(axis=0)
            squares += newton @ weights[here]
        residual = np.where(weights > 0, residual, 0.0)
        largest, least = float(diagonal.max(initial=0.0)), float(residual.min(initial=0.0))
        np.maximum(residual, 0.0, out=residual)
        trace, rest = float(weights @ diagonal), float(weights @ residual)
        return residual, (squares, trace, rest, largest, least)


@dataclass(frozen=True, eq=False)
class PivotOffers(Reduction[tuple[Offer, ...], tuple[Offer, ...]]):
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
    on_device = False
    kinds = (Offer,)

    def cost(self, extent: Extent) -> Cost:
        """See :func:`round_cost`."""
        return round_cost(tuple(state.rank for _, state in self.asked), extent)

    def start(self, like: Array) -> list[_Residuals]:
        """What makes the residuals of a strip."""
        return [_Residuals(rule, state, like) for rule, state in self.asked]

    def update(self, state: list[_Residuals], strip: Strip) -> tuple[Offer, ...]:
        """The offers of one strip; no rows offer none."""
        offers = []
        for (rule, before), residuals, x in zip(self.asked, state, strip.parts, strict=True):
            if len(strip):
                residual, sums = residuals(x, strip.weights)
                rows, values, bound = rule.offered(before, self.strips, strip, x, residual)
                offers.append(Offer(*sums, x[rows], strip.rows[rows], values, bound))
        return tuple(offers)

    def combine(self, a: tuple[Offer, ...], b: tuple[Offer, ...]) -> tuple[Offer, ...]:
        """The offers of both, one by one."""
        if not a or not b:
            return a or b
        pairs = zip(self.asked, a, b, strict=True)
        return tuple(rule.combine(mine, other) for (rule, _), mine, other in pairs)


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
    # Columns of L over the rows offered and parts of them, or the matrix of random proposals.
    pool = max(
        max(int(1.7 * extent.strips * offered_rows(m, extent.strips) * (m + BLOCK)), 12 * m * m)
        for m in ranks
    )
    return (pool + 2 * sum(m * m for m in ranks)) * _WORD
