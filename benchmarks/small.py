"""Whole fits without arguments of small tables, and the seconds that are aimed at."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import Bench, Ratio, Size, Term
from benchmarks.truths import TRUTHS

Array = Any
Describe = Callable[[], dict[str, Any]]

SECONDS = {(1_000, 8): 2.0, (10_000, 10): 8.0}
"""Aimed at, by rows and columns of x."""

_MORE = 10  # times the rows, with ten columns
_FIRST = 300  # rows of a fit before, by which modules are loaded


def _sine(x: Array) -> Array:
    return np.sin(x[:, 0]) + 0.5 * x[:, 1]


LAWS: dict[str, Callable[[Array, Array], Array]] = {
    "sine and line": lambda x, e: _sine(x) + 0.3 * e,
    "sine and line, noise by x": lambda x, e: _sine(x) + 0.3 * (1.0 + x[:, 2] ** 2) * e,
    "sine and product, noise by x": lambda x, e: (
        np.sin(2.0 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * np.exp(0.3 * x[:, 3]) * e
    ),
    "line": lambda x, e: x @ np.linspace(1.0, 0.1, x.shape[1]) + 0.5 * e,
    "jump": lambda x, e: np.where(x[:, 0] > 0.3, 1.0, -1.0) + 0.3 * e,
}
"""y from normal columns x and normal noise e."""


def small_rows(law: str, rows: int, columns: int, draw: int = 0) -> tuple[Array, Array]:
    """Rows x (n, d) and y (n, 1) of one of these laws, or of Friedman's."""
    if law == "Friedman":
        x, y = TRUTHS["friedman"].draw(rows, draw)
        return x[:, :columns], y
    rng = np.random.default_rng([rows, columns, draw])
    x, e = rng.standard_normal((rows, columns)), rng.standard_normal(rows)
    return x, LAWS[law](x, e)[:, None]


@dataclass(frozen=True)
class SmallFit:
    """A fit without arguments, in a process that has made one before.

    Parameters
    ----------
    law
        One of ``LAWS``, or ``"Friedman"``.
    rows, columns
        Of the table, and of x.
    workers
        Threads.
    """

    law: str
    rows: int
    columns: int
    workers: int

    def prepare(self) -> Callable[[], Describe]:
        """Draw the rows, and fit some of them, so that all modules are loaded."""
        from cme_dask import JointDistribution

        x, y = small_rows(self.law, self.rows, self.columns)

        def fitted(rows: int) -> JointDistribution:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                law = JointDistribution()
                return law.fit(x[:rows], y[:rows], scheduler="threads", workers=self.workers)

        fitted(_FIRST)

        def run() -> Describe:
            begin = time.process_time()
            law = fitted(self.rows)
            seconds = time.process_time() - begin
            return partial(
                dict,
                cpu_seconds=seconds,
                passes=law.n_passes_,
                residual=law.model_.about["residual"]["kept"],
                location=law.model_.about["residual"].get("location", "ridge regression"),
                ranks=[side.basis.rank for side in law.sides_],
            )

        return run


def small_case(bench: Bench, size: Size) -> None:
    """Fits of tables of eight columns, and of ten times as many rows of ten columns."""
    tables = [(law, size.rows, 8) for law in (*LAWS, "Friedman")]
    tables.append(("Friedman", _MORE * size.rows, 10))
    jobs = {
        f"small/{rows:,} rows, {columns} + 1 columns/{law}": SmallFit(
            law, rows, columns, bench.workers
        )
        for law, rows, columns in tables
    }
    bench.measure(jobs)
    for key, job in jobs.items():
        at, law = key.rsplit("/", 1)
        ratio = Ratio(
            at,
            f"{law}, seconds",
            [Term(key)],
            [Term()],
            at_most=SECONDS.get((job.rows, job.columns)),
        )
        bench.ratios.append(ratio)
