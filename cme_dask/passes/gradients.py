"""The logistic loss and its gradient over all rows, in one pass."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask.utils import format_bytes

from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource
from cme_dask.errors import DataError, ResourceError
from cme_dask.numerics.logistic import LogisticSums
from cme_dask.numerics.moments import sub_block
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.plan import BadValues, Reading, Run, Strip, strip_length, strips_of, tree_sum
from cme_dask.passes.run import (
    FLOPS,
    PassClock,
    PassProgress,
    count_bad_values,
    materialised,
    plan_sample,
    run_over_rows,
)

Array = Any

_WORD = 8
_KERNEL_FLOPS = 20  # of a kernel value, in operations of a product


@dataclass(frozen=True, eq=False)
class _Plan:
    """What every task is given."""

    kernel: Any
    points: Array
    coefficients: Array

    @property
    def width(self) -> int:
        return len(self.points) + 2 * int(self.coefficients.shape[1]) + 1

    def sums(self, strip: Strip) -> LogisticSums:
        """Of one strip, in blocks that stay in cache."""
        size, classes = sub_block(self.width), self.coefficients.shape[1]
        write = self.kernel.evaluator(self.points)

        def block(here: slice) -> LogisticSums:
            x, codes = strip.parts[0][here], strip.parts[1][here, 0].astype(np.intp)
            if not ((codes >= 0) & (codes < classes)).all():
                raise DataError(f"codes of labels must be 0 to {classes - 1}: correct y")
            sections = np.ones((len(self.coefficients), len(x)))
            write(x, sections[:-1])
            weights = None if strip.weights is None else strip.weights[here]
            return LogisticSums.of(sections, codes, weights, self.coefficients)

        # At least one block, even of no rows.
        starts = range(0, max(len(strip), 1), size)
        return tree_sum(block(slice(s, s + size)) for s in starts)


def gradient_pass(
    sample: Sample,
    kernel: Any,
    points: Array,
    coefficients: Array,
    budget: MemoryBudget,
    progress: Callable[[PassProgress], None] | None = None,
) -> LogisticSums:
    """Loss and gradient of scores [k(x, p), 1] A over all rows, in one pass.

    Kernel sections are not solved for here: that needs n m^2 operations, scores and gradient of K
    classes need 4 n m K.

    Parameters
    ----------
    sample
        Rows of x, and of y as codes of classes.
    kernel, points
        k, and the pivots p, shape (m, d).
    coefficients
        A, shape (m + 1, K).
    budget
        Where to run, and the memory that is there.
    progress
        Called when a task has ended.

    Raises
    ------
    DataError
        On unusable values, or codes that no class has.
    StoreError
        On damaged chunks.
    ResourceError
        If the memory does not suffice; no row has been read then.

    Notes
    -----
    The bits do not depend on chunks, tasks or scheduler: sums follow the tree of all passes.
    """
    plan, executor = _Plan(kernel, points, coefficients), budget.executor
    sample = sample.for_folds(1)
    values = len(points) * (_KERNEL_FLOPS + 4 * coefficients.shape[1])
    runs = plan_sample(sample, executor, values / FLOPS)
    memory = _check_memory(sample, plan, runs, budget)
    clock = PassClock(runs, executor.workers, progress, "logistic-rows")
    try:
        sums: LogisticSums = run_over_rows(
            sample,
            executor,
            _gradient_strips,
            _add,
            shared=plan,
            name="logistic-rows",
            runs=runs,
            on_done=clock.done,
        )
    except BadValues:
        count_bad_values(sample, executor)
        raise
    clock.report(memory)
    return sums


def _check_memory(sample: Sample, plan: _Plan, runs: list[Run], budget: MemoryBudget) -> Any:
    """Predict the peak; ResourceError if it does not fit."""
    d = sum(source.shape[1] for source in sample.reads)
    rows = 5 * strip_length(sample.n_rows) + 2 * max(s.chunk_rows or 0 for s in sample.reads)
    if materialised(sample, budget.executor):
        rows += 2 * max(run.rows for run in runs)
    sums = plan.coefficients.size * (2 + math.ceil(math.log2(len(runs) + 1)))
    task = rows * d + 3 * sub_block(plan.width) * plan.width + sums
    found = budget.tightest(task * _WORD, sums * _WORD, {})
    if found.predicted > found.limit:
        raise ResourceError(
            f"{found.place} would need {format_bytes(found.predicted)} for {len(plan.points)} "
            f"pivots and {plan.coefficients.shape[1]} classes with {budget.executor.workers} tasks "
            f"at once, the limit is {format_bytes(found.limit)}: use fewer workers, or lower "
            "max_rank"
        )
    return found


def _gradient_strips(plan: _Plan, run: Run, reading: Reading, *sources: RowSource) -> LogisticSums:
    def each() -> Iterator[LogisticSums]:
        for strip in strips_of(run, reading, sources):
            strip.check()
            yield plan.sums(strip)

    return tree_sum(each())


def _add(a: LogisticSums, b: LogisticSums) -> LogisticSums:
    return a + b
