"""Pairs of rows of trajectories, a number of steps apart: views of the same rows, not copied."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from cme_dask.data.sample import Sample
from cme_dask.data.sources import DerivedSource, Input, RowSource
from cme_dask.errors import DataError
from cme_dask.numerics.folds import check_groups

Array = Any

_FIRST_ROWS = 1 << 12  # among which the step of time is looked for
_SHARE_OF_STEP = 1e-3  # by which times may miss it


@dataclass(eq=False)
class PairWeights(DerivedSource):
    """Weights of pairs of rows: 0 where the second one does not follow the first.

    Attributes
    ----------
    group, time, weights
        Sources with one column, of the rows; or None.
    lag
        Rows from the first of a pair to the second.
    step
        Time from row to row.
    """

    group: RowSource | None
    time: RowSource | None
    weights: RowSource | None
    lag: int
    step: float

    def __post_init__(self) -> None:
        sources = self._sources
        self.shape = sources[0].shape[0] - self.lag, 1
        self.describe(sources)

    @property
    def _sources(self) -> list[RowSource]:
        return [each for each in (self.group, self.time, self.weights) if each is not None]

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Groups and times of both rows of a pair, and the weights of the first."""
        return tuple(
            (source, first + at) for each, at in self._uses for source, first in each.inputs
        )

    def make(self, *rows: Array) -> Array:
        """Weights of the pairs, shape (b, 1)."""
        left, follows = iter(rows), np.ones((len(rows[0]), 1))
        values = (each.make(*islice(left, len(each.inputs))) for each, _ in self._uses)
        if self.group is not None:
            first, second = next(values), next(values)
            check_groups(first)
            follows *= first == second
        if self.time is not None:
            first, second = next(values), next(values)
            error = np.abs(second - first - self.lag * self.step)
            follows *= error <= _SHARE_OF_STEP * self.step
        return follows if self.weights is None else follows * next(values)

    @property
    def _uses(self) -> list[Input]:
        """Of which rows there are values: of both of a pair, or of the first."""
        both = [(each, at) for each in (self.group, self.time) if each for at in (0, self.lag)]
        return both if self.weights is None else [*both, (self.weights, 0)]

    def pick(self, positions: tuple[int, ...]) -> "PairWeights":
        """Itself: there is one column."""
        return self

    def for_task(self, start: int, stop: int) -> "PairWeights":
        """The same of what the task holds."""
        held = (
            each and each.for_task(start, stop + self.lag)
            for each in (self.group, self.time, self.weights)
        )
        made: PairWeights = object.__new__(PairWeights)
        made.__dict__.update(self.__dict__)
        made.group, made.time, made.weights = held
        return made

    def fingerprint(self, token: Callable[[Any, str], str]) -> str:
        """Of the sources, the lag and the step."""
        sources = " ".join(source.fingerprint(token) for source in self._sources)
        return f"{sources} in pairs {self.lag} apart by {self.step!r}"


def pairs(sample: Sample, lag: int, step: float | None = None) -> Sample:
    """Rows (x_t, x_(t + lag)) of trajectories, views of the rows x_t of a sample.

    Rows are in the order of time within each trajectory. Pairs of rows of two groups, and, where
    the rows have times, of rows that are not ``lag`` steps apart in time, get the weight 0; so do
    pairs with a row whose group or time is missing. Of a sample that leaves out rows that lack a
    value, passes leave out the pairs with such a row; the other pairs stay ``lag`` rows apart.

    Parameters
    ----------
    sample
        Rows x; those of y are left out.
    lag
        Rows from the first of a pair to the second, at least 1.
    step
        Time from row to row, in seconds; default the median of the positive differences between
        the first rows.

    Raises
    ------
    DataError
        On a part of a sample, fewer rows than ``lag`` + 2, no positive step of time, or groups,
        times or weights in a Dask array.
    """
    sample.check_undivided("a trajectory")
    count = sample.n_rows - lag
    if count < 2:
        raise DataError(
            f"pairs of rows {lag} apart need at least {lag + 2} rows, got {sample.n_rows}"
        )
    beside = sample.group, sample.time, sample.weights
    for name, source in zip(("group", "time", "weights"), beside, strict=True):
        if source is not None and source.dask_array is not None:
            raise DataError(
                f"{name} of trajectories must not be a Dask array: give an array in memory, or a "
                "store that holds it (ingest writes one)"
            )
    if step is None and sample.time is not None:
        gaps = np.diff(sample.time.read(0, min(sample.n_rows, _FIRST_ROWS))[:, 0])
        if not (gaps > 0).any():
            raise DataError(
                "the times of the first rows do not rise, so that no step is known: sort the rows "
                "by trajectory and time, or give time_step"
            )
        step = float(np.median(gaps[gaps > 0]))
    x, rows = sample.sources[0], sample.row_sample
    if rows is not None:  # those of x stand for both variables
        inner = rows.only(rows.index < count)
        rows = replace(inner, parts=inner.parts[:1] * 2)
    weights = PairWeights(*beside, lag, step or 0.0) if any(beside) else None
    return replace(
        sample,
        sources=(x.between(0, count), x.between(lag, sample.n_rows)),
        columns=sample.columns[:1] * 2,
        weights=weights,
        row_sample=rows,
        group=sample.group and sample.group.between(0, count),
        time=sample.time and sample.time.between(0, count),
    )
