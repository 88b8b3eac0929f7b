"""The pass of a fit that makes the moments, and the memory of the steps around it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cme_dask.data.sample import Sample
from cme_dask.numerics.cells import CellReduction, CellSums
from cme_dask.numerics.cholesky import BLOCK, SKETCH, prefix_rows
from cme_dask.numerics.moments import (
    MomentReduction,
    MomentSets,
    MomentSums,
    moment_cost,
)
from cme_dask.numerics.reduction import Cost, Extent, Fused
from cme_dask.numerics.resources import MemoryPlan
from cme_dask.passes.memory import MemoryBudget, row_sample_bytes
from cme_dask.passes.plan import RowRange
from cme_dask.passes.progress import Listener
from cme_dask.passes.run import PassReport, extent_of, plan_pass, run_pass

_WORD = 8
_SOLVE_WORDS = 12  # per entry of a P x P matrix: eigenbases, and what they are made from
_TRIAL_WORDS = 11  # likewise: sums of the safe form and of the two that are tried at once


def make_moments(
    sample: Sample,
    specs: Sequence[MomentReduction],
    budget: MemoryBudget,
    progress: Listener | None,
    sample_rows: int = 0,
    cells: Sequence[CellReduction] = (),
) -> tuple[tuple[MomentSums, ...], tuple[CellSums, ...], PassReport]:
    """Sets of moments of all rows, and sums by cell, in one pass.

    Parameters
    ----------
    sample
        The rows.
    specs
        What to compute, with the same number of folds.
    budget
        Where to run, and the memory that is there.
    progress
        Called when a task has ended.
    sample_rows
        Rows of the row sample if pivots are chosen from it: that takes memory before the pass.
    cells
        Of the first variables, one after the other: the cells whose rows are summed.

    Raises
    ------
    DataError
        On NaN, infinity, unusable or all-zero weights, or functions that fail.
    StoreError
        On damaged chunks.
    ResourceError
        If the memory does not suffice; no row has been read then.
    """
    n_folds = specs[0].n_folds
    reduction = moment_reduction(specs, cells)
    extent = extent_of(sample.for_folds(n_folds), budget.executor)
    sets: Any = reduction.each[0]
    (moments, *summed), report = run_pass(
        sample,
        reduction,
        budget,
        progress,
        alone=_alone(sets.ranks, sets.width, reduction.cost(extent), extent, sample_rows),
        held=row_sample_bytes(sample_rows, extent.n_columns),
    )
    return (moments,) if len(specs) == 1 else moments, tuple(summed), report


def moment_reduction(
    specs: Sequence[MomentReduction], cells: Sequence[CellReduction] = ()
) -> Fused:
    """Sets of moments, and sums by cell of the first variables, of the same rows."""
    n_folds = specs[0].n_folds
    by_cell = [replace(each, variable=i, n_folds=n_folds) for i, each in enumerate(cells)]
    return Fused((specs[0] if len(specs) == 1 else MomentSets(tuple(specs)), *by_cell))


def predict_moments(
    sample: Sample,
    ranks: tuple[int, ...],
    width: int,
    n_folds: int,
    budget: MemoryBudget,
    *,
    sample_rows: int = 0,
    cells: Sequence[CellReduction] = (),
) -> tuple[list[RowRange], MemoryPlan]:
    """How the moment pass would be cut, and what the fit would need.

    Parameters
    ----------
    ranks, width, n_folds
        Of the moments, see :func:`cme_dask.numerics.moments.moment_cost`.
    sample, budget, sample_rows, cells
        As in :func:`make_moments`.

    Raises
    ------
    ResourceError
        If that does not fit into the budget.
    """
    extent = extent_of(sample.for_folds(n_folds), budget.executor)
    cost = moment_cost(ranks, width, n_folds, extent)
    for i, spec in enumerate(cells):
        cost += replace(spec, variable=i, n_folds=n_folds).cost(extent)
    alone = _alone(ranks, width, cost, extent, sample_rows)
    held = row_sample_bytes(sample_rows, extent.n_columns)
    return plan_pass(cost, extent, budget, alone=alone, held=held)


def _alone(
    ranks: tuple[int, ...], width: int, cost: Cost, extent: Extent, sample_rows: int
) -> dict[str, int]:
    """Bytes that the client takes before and after the pass, by phase."""
    square = width**2 * _WORD
    complete = extent.selected or sample_rows >= extent.n_rows
    return {
        "the choice of pivots": pivot_bytes(sample_rows, max(ranks), complete=complete),
        "the trial of the arithmetic": _TRIAL_WORDS * square,
        # The moments, once more packed for the model, and a fold's solution.
        "the solution": 3 * cost.partial // 2 + _SOLVE_WORDS * square,
    }


def pivot_bytes(sample_rows: int, rank: int, *, complete: bool = False) -> int:
    """Peak of a choice of ``rank`` pivots from a row sample.

    Pivots are chosen from one half of it and judged on the other half, unless it is complete.
    """

    def columns(rows: int, pivots: int) -> int:
        return rows * -(-pivots // BLOCK) * BLOCK * _WORD

    # Signs and sketch of the rows of a choice by trace, and of half as many before.
    half = sample_rows if complete else -(-sample_rows // 2)
    sketches = 3 * SKETCH * prefix_rows(rank, half, by_trace=True) * _WORD

    # L in blocks of columns, and pools in pools of an eighth of the rows each. Where a choice fails
    # on the other rows, its rows are doubled, and those of one half are held until the columns of
    # all are ready.
    if complete:
        return int(1.5 * columns(sample_rows, rank)) + sketches
    chosen = prefix_rows(rank, half, by_trace=False)
    grown = min(2 * chosen, half)
    grown_columns = int((1.5 if grown > chosen else 1.2) * columns(grown, rank))
    return columns(half, rank) + grown_columns + sketches
