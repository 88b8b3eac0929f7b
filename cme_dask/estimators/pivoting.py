"""The step of a fit that chooses pivots: from the row sample, over all rows, or as given."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np

from cme_dask.config import PIVOTS
from cme_dask.data.columns import Columns, check_finite
from cme_dask.data.row_sample import RowSample
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, RankWarning
from cme_dask.estimators.recipe import PivotProgress, Progress, Tolerance
from cme_dask.kernels import Kernel
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.resources import one_blas_thread
from cme_dask.numerics.rounds import Greedy, PivotState, Random, Rule
from cme_dask.numerics.sampled_pivots import sampled_cholesky
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.moments import predict_moments
from cme_dask.passes.pivots import choose_in_rounds, predict_round
from cme_dask.passes.run import PassReport

log = logging.getLogger("cme_dask.run")

Array = Any

_CHECK_EVERY = 16
_TOP_UP_SPAN = 0.5
_CHECK_ROWS = 1 << 14  # rows that tell whether the pivots are enough


@dataclass(frozen=True)
class PivotRule:
    """How pivots are chosen, as the user said.

    Parameters
    ----------
    tolerance
        Relative trace error at which the choice ends, and the largest number of pivots.
    span
        For ``greedy``: 1 is exactly Algorithm 1; less takes more pivots in a round.
    seed
        For ``random``.
    """

    tolerance: Tolerance
    span: Any
    seed: int

    @property
    def tol(self) -> float:
        """Relative trace error at which the choice ends."""
        return self.tolerance.value

    @property
    def max_rank(self) -> int | None:
        """Largest number of pivots, or None."""
        return self.tolerance.max_rank

    def __post_init__(self) -> None:
        real = isinstance(self.span, Real) and not isinstance(self.span, bool)
        if not real or not 0.0 < float(self.span) <= 1.0:
            raise DataError(f"span must lie above 0 and be at most 1, got {self.span!r}")

    def rounds(self, mode: str, i: int, kernel: Kernel) -> Rule:
        """The rule of a mode that goes over all rows, for variable ``i``."""
        if mode == "greedy":
            return Greedy(kernel, self.tol, self.max_rank, float(self.span))
        return Random(kernel, self.tol, self.max_rank, (self.seed, i))

    def topping_up(self, kernel: Kernel) -> Rule:
        """The rule that goes on from sampled pivots where these are too few."""
        return Greedy(kernel, self.tol, self.max_rank, _TOP_UP_SPAN)


@dataclass(frozen=True, eq=False)
class PivotSelector:
    """How the variables of a fit get their pivots, within the memory that there is.

    Attributes
    ----------
    sample, rows
        The rows and their row sample.
    rule
        How pivots are chosen.
    wanted
        For each variable, ``sampled``, ``greedy``, ``random`` or points.
    n_folds
        Folds of the pass that follows: it must fit into memory.
    budget
        What memory there is.
    names
        What messages call the variables.
    progress
        Called after each pivot.
    """

    sample: Sample
    rows: RowSample
    rule: PivotRule
    wanted: Sequence[Any]
    n_folds: int
    budget: MemoryBudget
    names: tuple[str, ...]
    progress: Progress | None

    @property
    def sample_rows(self) -> int:
        """Rows of the row sample, if pivots are chosen from it, else 0."""
        return len(self.rows) if any(map(_is_sampled, self.wanted)) else 0

    def may_miss(self, i: int) -> bool:
        """Whether pivots of variable ``i`` are chosen without seeing all rows."""
        return _is_sampled(self.wanted[i]) and not self.rows.complete

    def covering(self, report: PassReport, ranks: tuple[int, ...]) -> PassReport:
        """The report of the moment pass, with what rounds took at these ranks if that was more."""
        ranked = [
            m for m, requested in zip(ranks, self.wanted, strict=True) if _in_rounds(requested)
        ]
        if not ranked:
            return report
        _, plan = predict_round(self.sample, tuple(ranked), self.budget)
        return replace(report, memory=report.memory.or_tighter(plan))

    def bases_of_each(
        self, finalists: Sequence[Sequence[Kernel]]
    ) -> tuple[list[list[NewtonBasis]], int]:
        """Bases of several pairs of kernels, and the passes over the rows that they took.

        Kernels that several of them share have one basis.

        Parameters
        ----------
        finalists
            The kernel of each variable, for each pair.
        """
        made: dict[tuple[int, Kernel], NewtonBasis] = {}
        passes = 0
        for kernels in finalists:
            keys = list(enumerate(kernels))
            if any(key not in made for key in keys):
                bases, in_rounds = self.bases(kernels, top_up=False)
                passes += in_rounds
                made |= dict(zip(keys, bases, strict=True))
        return [[made[key] for key in enumerate(kernels)] for kernels in finalists], passes

    def bases(
        self, kernels: Sequence[Kernel], *, top_up: bool = True
    ) -> tuple[list[NewtonBasis], int]:
        """Bases of all variables, and the passes over the rows that they took.

        Parameters
        ----------
        kernels
            The kernel of each variable.
        top_up
            Whether rounds over all rows may add to sampled pivots that are known to be too few.

        Raises
        ------
        DataError
            On unusable pivots, or a kernel that is zero.
        ResourceError
            As soon as the rank is one whose pass would not fit into memory.
        """
        bases: dict[int, NewtonBasis] = {}
        rules: dict[int, Rule] = {}
        states: dict[int, PivotState] = {}
        for i, (kernel, requested) in enumerate(zip(kernels, self.wanted, strict=True)):
            if not isinstance(requested, str):
                with one_blas_thread():
                    bases[i] = given_basis(kernel, requested, self.sample.columns[i], self.names[i])
            elif requested == "sampled":
                before = tuple(bases[j].rank for j in sorted(bases))
                with one_blas_thread():
                    bases[i], reached = self._sampled(i, kernel, before)
                if top_up and not reached and self._may_top_up(i, bases[i]):
                    rules[i] = self.rule.topping_up(kernel)
                    states[i] = PivotState.of(bases.pop(i))
            elif requested in PIVOTS:
                rules[i] = self.rule.rounds(requested, i, kernel)
                states[i] = PivotState.empty(len(self.sample.columns[i].names))
            else:
                raise DataError(
                    f"pivots must be {_listed(PIVOTS)} or given points, got {requested!r}"
                )
        result, passes = self._in_rounds(bases, rules, states)
        for i, state in result.items():
            if not state.rank:
                raise _zero_kernel(self.names[i], "row")
            if state.status == "exhausted" and not self.may_miss(i):
                self._warn_of_rank(i, state.rank, float(state.history[-1]))
            bases[i] = state.basis(kernels[i])
        return [bases[i] for i in range(len(kernels))], passes

    def topped_up(
        self, bases: Sequence[NewtonBasis], errors: Sequence[float]
    ) -> tuple[list[NewtonBasis] | None, int]:
        """Bases with more pivots where the row sample missed too much, and the passes they took.

        None if there is nothing to add.

        Parameters
        ----------
        bases
            The bases of all variables.
        errors
            Relative trace error of each basis over all rows.
        """
        rules = {
            i: self.rule.topping_up(basis.kernel)
            for i, basis in enumerate(bases)
            if errors[i] > self.rule.tol and self._may_top_up(i, basis)
        }
        states = {i: PivotState.of(bases[i]) for i in rules}
        before = {i: basis for i, basis in enumerate(bases) if i not in rules}
        result, passes = self._in_rounds(before, rules, states)
        if not any(state.rank > bases[i].rank for i, state in result.items()):
            return None, passes
        return [
            result[i].basis(basis.kernel) if i in result else basis for i, basis in enumerate(bases)
        ], passes

    def _may_top_up(self, i: int, basis: NewtonBasis) -> bool:
        most = self.rule.max_rank
        if self.sample.residuals is not None:
            return False  # they take one pass, and rounds over all rows are many
        return self.may_miss(i) and (most is None or basis.rank < most)

    def _sampled(self, i: int, kernel: Kernel, before: tuple[int, ...]) -> tuple[NewtonBasis, bool]:
        """Pivots from the row sample, and whether they are known to be enough.

        Every other row of the sample is left to tell. Halves of the sample that are drawn so are
        samples, too, with the same chances: prefixes of it were drawn first.
        """
        points, index = self.rows.parts[i], self.rows.index
        step = 1 if self.rows.complete else 2
        here = slice(1, 2 * _CHECK_ROWS, 2)
        others = (
            None
            if step == 1
            else (points[here], self.rows.prefix(2 * _CHECK_ROWS).importance[here])
        )
        points, index = points[::step], index[::step]

        def tell(rank: int, residual: float) -> None:
            if rank % _CHECK_EVERY == 0:
                self._check((*before, rank))
            self._tell(i, rank, residual)

        def weights_of(size: int) -> Array:
            return self.rows.prefix(step * size).importance[::step]

        self._check((*before, 1))
        with ThreadPoolExecutor(self.budget.executor.cores) as threads:
            result = sampled_cholesky(
                kernel,
                points,
                index,
                weights_of,
                self.rule.tol,
                self.rule.max_rank,
                check=others,
                on_pivot=tell,
                threads=threads,
            )
        if not len(result.pivots):
            raise _zero_kernel(self.names[i], "sampled row")
        if result.exhausted and self.rows.complete:
            self._warn_of_rank(i, len(result.pivots), result.residual_trace[-1])
        chosen = result.pivots
        return NewtonBasis(kernel, points[chosen], result.factor, index[chosen]), result.reached

    def _in_rounds(
        self,
        before: Mapping[int, NewtonBasis],
        rules: Mapping[int, Rule],
        states: Mapping[int, PivotState],
    ) -> tuple[dict[int, PivotState], int]:
        """Last states of the variables that have rules; the others have bases already."""
        if not rules:
            return {}, 0
        ranks = {i: basis.rank for i, basis in before.items()}

        def tell(i: int, state: PivotState) -> None:
            # Pivots beyond the measured ones may yet turn out not to be needed.
            ranks[i] = len(state.history) - 1
            self._check(tuple(ranks[j] for j in sorted(ranks)))
            self._tell(i, state.rank, float(state.history[-1]))

        return choose_in_rounds(
            self.sample, rules, states, self.budget, progress=self.progress, on_round=tell
        )

    def _check(self, ranks: tuple[int, ...]) -> None:
        width = sum(ranks) + 1 + sum(len(c.names) for c in self.sample.columns)
        predict_moments(
            self.sample, ranks, width, self.n_folds, self.budget, sample_rows=self.sample_rows
        )

    def _tell(self, i: int, rank: int, residual: float) -> None:
        info = {"event": "pivots", "variable": self.names[i], "rank": rank, "residual": residual}
        level = logging.DEBUG if rank & (rank - 1) else logging.INFO  # a line whenever it doubles
        text = "pivots of %s: rank %d, residual %.2e"
        log.log(level, text, self.names[i], rank, residual, extra=info)
        if self.progress is not None:
            self.progress(PivotProgress(self.names[i], rank, residual, self.rule.tol))

    def _warn_of_rank(self, i: int, rank: int, residual: float) -> None:
        warnings.warn(
            f"{self.names[i]}: the kernel has numerical rank {rank} on the rows, reached at trace "
            f"error {residual:.2e} before tol={self.rule.tol:g}",
            RankWarning,
            stacklevel=6,
        )


def pair_of_pivots(pivots: Any) -> tuple[Any, Any]:
    """What is wanted for x and for y.

    Raises
    ------
    DataError
        If it is neither the name of a mode nor a pair.
    """
    if isinstance(pivots, str):
        return pivots, pivots
    if not isinstance(pivots, (tuple, list)) or len(pivots) != 2:
        raise DataError(
            f"pivots must be {_listed(PIVOTS)} or a pair of arrays, got {type(pivots).__name__}"
        )
    return pivots[0], pivots[1]


def given_points(points: Any, columns: Columns, variable: str) -> Array:
    """The user's own points, shape (m, d), checked."""
    try:
        array = np.asarray(points, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"pivots of {variable} must be numeric: {error}") from error
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or array.shape[1] != len(columns.names) or not len(array):
        raise DataError(
            f"pivots of {variable} must have shape (m, {len(columns.names)}), got {array.shape}"
        )
    check_finite(array, columns.names, 0)
    return array


def given_basis(kernel: Kernel, points: Any, columns: Columns, variable: str) -> NewtonBasis:
    """Basis on the user's own pivots; a RankWarning if some of them add nothing."""
    array = given_points(points, columns, variable)
    basis = NewtonBasis.from_points(kernel, array)
    if basis.rank < len(array):
        warnings.warn(
            f"{variable}: {len(array) - basis.rank} of {len(array)} given pivots were left out, "
            "since the others span them to rounding",
            RankWarning,
            stacklevel=5,
        )
    return basis


def _in_rounds(wanted: Any) -> bool:
    return isinstance(wanted, str) and not _is_sampled(wanted)


def _is_sampled(wanted: Any) -> bool:
    return isinstance(wanted, str) and wanted == "sampled"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _zero_kernel(variable: str, where: str) -> DataError:
    return DataError(f"the kernel of {variable} is zero at every {where}: choose another")
