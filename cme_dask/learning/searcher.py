"""The rows of a search, and the losses of pairs of kernels on them, each made once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cme_dask.kernels import Coordinates, Kernel
from cme_dask.kernels.length_scales import IGNORED
from cme_dask.learning.candidates import Score, SidePoint, Trial, Tuning, VariableKernels
from cme_dask.learning.coordinates import constant_columns, coordinates
from cme_dask.learning.log_score import CelledRows, log_loss
from cme_dask.learning.screening import ScreenedRows, ScreenedSide, screened_folds
from cme_dask.numerics.crossval import HeldFold, over_folds
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.thresholds import Judges

Array = Any

FORMS = ("standard", "scores")
_HELD_SIDES = 24  # bases of some megabytes each: those of the grid
_WORD = 8

Estimated = tuple[Array, Array]
"""Means over the folds for each ridge, and their standard errors."""

Heard = Callable[[str, int, int, float | None], None]
"""Called with the stage, its trials so far and at most, and the best score or None."""


@dataclass(eq=False)
class SearchedVariable:
    """One variable of the search: its rows in each form of coordinates."""

    rows: Array
    weights: Array
    categorical: tuple[bool, ...]
    given: Kernel | None
    maps: dict[str, Coordinates] = field(default_factory=dict)
    constant: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.given is None:
            for form in FORMS:
                self.maps[form] = coordinates(self.rows, self.weights, self.categorical, form)
            self.constant = tuple(constant_columns(self.rows, self.weights, self.categorical))
        # Categories have no scores: with nothing else there is one form only.
        self.forms = tuple(self.maps)[: 1 if all(self.categorical) else 2] or ("given",)
        self.values = {form: self.at(self.rows, form) for form in (*self.maps, "given")}

    def at(self, rows: Array, form: str) -> Array:
        """Other rows in these coordinates."""
        return rows if form == "given" else np.asarray(self.maps[form](rows))

    def start(self, form: str, scale: float) -> SidePoint:
        """One length scale for all varying numeric columns, larger the more there are."""
        if form == "given":
            return SidePoint(form)
        numeric = len(self.categorical) - sum(self.categorical) - len(self.constant)
        each = [
            IGNORED if j in self.constant else 1.0 if coded else float(np.sqrt(numeric))
            for j, coded in enumerate(self.categorical)
        ]
        return SidePoint(form, tuple(each)).scaled([scale] * len(each))

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
        judges: Judges,
        regs: Sequence[Regularization],
        options: Tuning,
        tol: float,
        heard: Heard | None,
        celled: CelledRows | None = None,
    ) -> None:
        self.variables, self._rows, self._judges, self._celled = variables, rows, judges, celled
        self.regs, self._options, self._tol, self._heard = regs, options, tol, heard
        self._sides: dict[tuple[int, SidePoint], ScreenedSide] = {}
        self._losses: dict[tuple[SidePoint, SidePoint], tuple[Estimated, Estimated]] = {}
        self._stages: dict[tuple[SidePoint, SidePoint], str] = {}
        self.score_of = Score()

    def side(self, i: int, point: SidePoint) -> ScreenedSide:
        """The basis of variable ``i``; those that were made first are forgotten first."""
        if (i, point) not in self._sides:
            variable = self.variables[i]
            if len(self._sides) >= _HELD_SIDES:
                self._sides.pop(next(iter(self._sides)))
            values = variable.values[point.form][self._rows.order]
            self._sides[i, point] = ScreenedSide(
                self._rows, variable.kernels.inner(point), values, self._tol, self._options.max_rank
            )
        return self._sides[i, point]

    def losses(self, x: SidePoint, y: SidePoint, stage: str) -> tuple[Array, Array]:
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
        least = float(score(losses[0][0], losses[1][0]).min())
        return score, least if least < 0.0 else None

    def scores(self, x: SidePoint, y: SidePoint, stage: str) -> Array:
        """The score for each ridge."""
        return self.score_of(*self.losses(x, y, stage))

    def score(self, x: SidePoint, y: SidePoint, stage: str) -> float:
        """The score with the best ridge."""
        return float(self.scores(x, y, stage).min())

    def trials(self) -> list[Trial]:
        """All pairs that were tried, in that order, by the last scores."""
        found = []
        for (x, y), stage in self._stages.items():
            scores = self.scores(x, y, stage)
            best = int(scores.argmin())
            joint, crps = (float(each[best]) for each in self.losses(x, y, stage))
            reg, score = self.regs[best].x, float(scores[best])
            found.append(Trial(x, y, reg, joint, crps, score, stage))
        return found

    def hear(self, stage: str, done: int, most: int) -> None:
        """Report how far the stage is, with the score of the best candidate so far.

        It is that by the best so far, about -1 or -2 then, whatever the search goes by now; while
        none is better than independence, scores have no unit, and none is reported.
        """
        if self._heard is not None:
            self._heard(stage, done, most, self._settled()[1])


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
    # Columns as they are and in their coordinates, sorted, in the order of the folds.
    values = 6 * rows * columns
    return (_HELD_SIDES * held + made + values) * _WORD


def estimated(
    folds: Sequence[HeldFold], regs: Sequence[Regularization], judges: Judges
) -> tuple[Estimated, Estimated]:
    """Joint loss, and sliced CRPS less that of independence, for each ridge."""
    each = [fold.losses(regs) for fold in folds]
    q = len(judges)  # the last of the functions
    crps = [(one.squared[:, -q:] - one.baseline[-q:]) @ judges.scores for one in each]
    return over_folds(folds, np.stack([one.joint for one in each])), over_folds(
        folds, np.stack(crps)
    )
