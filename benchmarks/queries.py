"""Queries of a saved model, timed in a process without Dask."""

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.machine import GemmRate
from benchmarks.measure import Bench, Measurement, Ratio, Size, Term
from benchmarks.small import small_rows
from cme_dask.data.generate import Normal3
from cme_dask.models import load_only
from cme_dask.models.joint import JointModel
from cme_dask.numerics.basis import BLOCK, BlockValues
from cme_dask.numerics.moments import Function

Array = Any
Result = dict[str, Any]
Describe = Callable[[], Result]

LEVELS = (0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.95)
SECONDS = 10.0
"""For the quantiles of both columns at 10^5 points, as the case is sized."""

DEFAULT_SECONDS = 2.0
"""For the quantiles of one column at 10^5 points of a default fit."""

_FIT_ROWS = 200_000
DEFAULTS = (
    ("Friedman", 2_000, 10, True),
    ("Friedman", 10_000, 10, True),
    ("sine and line, noise by x", 1_000, 8, False),
    ("jump", 1_000, 8, False),
)
"""Laws of the small fits, rows, columns of x, and whether they are fitted without a location, too.

A ridge regression is the location of the first three, trees are that of the last one.
"""

_EVENTS: dict[str, Function] = {
    "left": lambda y: y[:, 0] <= y[:, 1],
    "far": lambda y: y[:, 0] <= y[:, 1] - 0.5,
}


def save_model(path: str, rank: int) -> None:
    """Fit a three-dimensional normal sample with two events, and save it."""
    from cme_dask.estimators.joint import JointDistribution

    x, y = next(Normal3("medium").batches(_FIT_ROWS, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at the ranks of the case, tol is missed or reached
        fitted = JointDistribution(
            kernel_x="median", kernel_y="median", tol=1e-9, max_rank=rank
        ).fit(x, y, functions=_EVENTS)
    fitted.save(path, overwrite=True)


def query_points(rows: int) -> Array:
    """Points of x as in the sample, shape (rows, 1)."""
    return 0.25 * np.random.default_rng(1).standard_normal((rows, 1))


@dataclass(frozen=True)
class Expectations:
    """Signed expectations of two columns and two events.

    Parameters
    ----------
    model
        Path of the saved model.
    rows
        Points of x.
    """

    model: str
    rows: int

    def prepare(self) -> Callable[[], Describe]:
        """Load the model and make the points."""
        law, points = load_only(JointModel, self.model), query_points(self.rows)
        names = ["y0", "y1", *_EVENTS]

        def run() -> Describe:
            law.expect(names, points)
            return partial(_described, law)

        return run


@dataclass(frozen=True)
class KernelBlocks:
    """Only the kernel blocks of these points, and a matrix product with four columns.

    Parameters
    ----------
    model, rows
        As for :class:`Expectations`.
    """

    model: str
    rows: int

    def prepare(self) -> Callable[[], Describe]:
        """Load the model and make the points."""
        law, points = load_only(JointModel, self.model), query_points(self.rows)
        newton = law.x.basis.newton
        coef = np.random.default_rng(0).standard_normal((newton.rank, 4))
        functions, result = newton.kernel.evaluator(newton.points), np.empty((self.rows, 4))

        def run() -> Describe:
            values = BlockValues(functions, newton.rank)
            for start in range(0, self.rows, BLOCK):
                here = slice(start, start + BLOCK)
                np.matmul(values(points[here]), coef, out=result[here])
            return partial(_described, law)

        return run


@dataclass(frozen=True)
class Quantiles:
    """Nine quantiles of one column of y or of both.

    Parameters
    ----------
    model, rows
        As for :class:`Expectations`.
    column
        Which column; None for both.
    """

    model: str
    rows: int
    column: str | None = None

    def prepare(self) -> Callable[[], Describe]:
        """Load the model and make the points."""
        law, points = load_only(JointModel, self.model), query_points(self.rows)

        def run() -> Describe:
            law.conditional(points).quantile(LEVELS, self.column)
            return partial(_described, law)

        return run


def save_default(path: str, law: str, rows: int, columns: int, residual: bool | str) -> None:
    """Fit a small table without further arguments, and save the model."""
    from cme_dask.estimators.joint import JointDistribution

    x, y = small_rows(law, rows, columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        JointDistribution(residual=residual).fit(x, y).save(path, overwrite=True)


@dataclass(frozen=True)
class DefaultQuantiles:
    """Nine quantiles of y at points of x as in a small table.

    Parameters
    ----------
    model
        Path of the saved model.
    law, columns
        Of the table, see :func:`benchmarks.small.small_rows`.
    rows
        Points of x.
    """

    model: str
    law: str
    columns: int
    rows: int

    def prepare(self) -> Callable[[], Describe]:
        """Load the model, make the points, and answer a few, so that the law is made."""
        law = load_only(JointModel, self.model)
        points, _ = small_rows(self.law, self.rows, self.columns, 1)
        law.conditional(points[:10]).quantile(LEVELS)
        answering = law.answering
        used = answering.coef.any()  # else the law is the same for all x
        shape = {
            "pivots": sum(answering.x.ranks) if used else 0,
            "functions": answering.x.basis.rank if used else 0,
            "cells": len(answering.masses),
            "columns": self.columns,
        }

        def run() -> Describe:
            begin = time.process_time()
            law.conditional(points).quantile(LEVELS)
            return partial(dict, cpu_seconds=time.process_time() - begin, **shape)

        return run


def answer_limit(run: Result, rate: Result, rows: int) -> float:
    """Seconds of the products and exponentials of density ratios on the cells, at these rates."""
    m, k, cells, d = (run[name] for name in ("pivots", "functions", "cells", "columns"))
    flops = 2.0 * m * (d + 2) + 2.0 * m * k + 2.0 * k * cells
    return float(rows * (flops / rate["gemm_all"] + m / rate["exp_all"]))


def _described(law: JointModel) -> Result:
    return {
        "ranks": [law.x.basis.newton.rank, law.y.basis.newton.rank],
        "dask_imported": "dask" in sys.modules,
    }


def queries_case(bench: Bench, size: Size) -> None:
    """Questions to saved models: expectations beside their kernel blocks, and quantiles."""
    for rank in size.ranks:
        path = str(bench.folder / f"model-{rank}.zarr")
        save_model(path, rank)
        at, fewer = f"queries/rank {rank}", size.rows // 10
        expect, blocks = f"{at}/expect", f"{at}/kernel blocks and product"
        one, both = f"{at}/quantiles", f"{at}/quantiles, two columns"
        jobs: dict[str, Any] = {
            expect: Expectations(path, size.rows),
            blocks: KernelBlocks(path, size.rows),
            one: Quantiles(path, fewer, "y0"),
            both: Quantiles(path, fewer),
        }
        bench.measure(jobs)
        bench.compare(at, "expect / kernel blocks and product", expect, blocks, at_most=1.5)
        name = f"9 quantiles at {fewer:,} points, seconds"
        bench.ratios.append(Ratio(at, name, [Term(one)], [Term()], at_most=SECONDS))
    _default_fits(bench, size.rows // 10)


def _default_fits(bench: Bench, points: int) -> None:
    """Quantiles of default fits, with a location and without, beside the rates of the machine."""
    for law, rows, columns, plain in DEFAULTS:
        for kind in ("location", "plain") if plain else ("location",):
            path = str(bench.folder / f"default-{kind}-{law}-{rows}.zarr")
            save_default(path, law, rows, columns, "auto" if kind == "location" else False)
            at = f"queries/default {kind}, {law}, {rows:,}"
            one, gemm, limit = f"{at}/quantiles", f"{at}/gemm", f"{at}/limit"
            quantiles = DefaultQuantiles(path, law, columns, points)
            bench.measure({gemm: GemmRate(bench.workers), one: quantiles})
            pairs = zip(bench.measurements[one].runs, bench.measurements[gemm].runs, strict=True)
            limits = [{"seconds": answer_limit(*pair, points)} for pair in pairs]
            if all(each["seconds"] for each in limits):
                job = {"job": "answer limit", "rates": gemm}
                bench.measurements[limit] = Measurement(job, limits)
                bench.compare(at, "quantiles / products and exponentials", one, limit)
            for quantity, aim in (("seconds", DEFAULT_SECONDS), ("cpu_seconds", None)):
                name = f"9 quantiles at {points:,} points, {quantity.replace('_', ' ')}"
                ratio = Ratio(at, name, [Term(one, quantity)], [Term()], at_most=aim)
                bench.ratios.append(ratio)
