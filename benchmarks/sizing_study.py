"""The study of sizing: simulated seconds of a pass against workers, and where its limit lies."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fits import uniform_rows
from benchmarks.machine import describe_machine
from benchmarks.run import write_result
from cme_dask import ClusterRates, JointDistribution, kernels
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.tables import grid
from cme_dask.display import number
from cme_dask.estimators.sizing import PassSizing, measure_spread
from cme_dask.models.plots import BLUE, PALETTE, picture
from cme_dask.passes.simulation import simulate_pass

Result = dict[str, Any]

OUTPUTS = ("sizing.json", "sizing.png")
SCHEMA_VERSION = 1
ROWS = (10**8, 10**10)
WORKERS = (1, 2, 5, 10, 20, 50, 100, 200, 300, 500, 700, 1000, 1400, 2000)
RANK, COLUMNS = 100, 3
"""Of the bases of x and of y: the fit of docs/performance.md."""

_SAMPLE = 1 << 17  # rows on which the fit is planned
_CHUNK = 1 << 18


def run_sizing(
    rows: Sequence[int], out: Path | None, *, overwrite: bool, progress: ProgressLines
) -> Result:
    """Plan a fit, measure the rates of a cluster, simulate its passes; write JSON and a picture."""
    if out is not None:
        prepare_folder(out, OUTPUTS, overwrite)
    begin = time.time()
    kernel = kernels.Gaussian(float(RANK ** (-1.0 / COLUMNS)))
    fit = JointDistribution(kernel_x=kernel, kernel_y=kernel, max_rank=RANK, tol=1e-6)
    plan = fit.plan(*uniform_rows(_SAMPLE, COLUMNS))
    assert plan.workload is not None
    progress.say("measuring schedulers with stub workers")
    rates, spread = ClusterRates.measure(), measure_spread()
    curves = []
    for n in rows:
        strip_rates = plan.moment_pass.rates
        sizing = PassSizing(strip_rates, plan.workload, n, _CHUNK, rates, spread=spread)
        points = []
        for workers in WORKERS:
            runs, _ = sizing.cut(workers, 1, None)
            done = simulate_pass(sizing.work(runs), sizing.cluster(workers, 1))
            # Rows in parallel alone, and the least that client and scheduler take.
            work = sum(sizing.work(runs).leaf_seconds) / workers
            serial = done.tasks * (rates.submit_seconds + 1.0 / rates.tasks_per_second(workers))
            points.append({"workers": workers, "work": work, "serial": serial, **done._asdict()})
        progress.say(f"{n:,} rows")
        curves.append({"rows": n, "points": points})
    result: Result = {
        "kind": "sizing",
        "schema_version": SCHEMA_VERSION,
        "seconds": time.time() - begin,
        "machine": describe_machine(),
        "settings": {"rank": RANK, "columns": COLUMNS, "rows": list(rows)},
        "ranks": list(plan.ranks),
        "row_seconds": plan.moment_pass.rates.computing,
        "rates": rates.to_dict(),
        "curves": curves,
        "files": [],
    }
    if out is not None:
        write_result(result, out, OUTPUTS, sizing_picture, progress)
    return result


def sizing_tables(result: Result) -> Iterator[Any]:
    """Seconds of each number of workers."""
    for curve in result["curves"]:
        rows = [
            (
                number(point["workers"]),
                f"{point['seconds']:.3g}",
                f"{point['work']:.3g}",
                f"{point['serial']:.3g}",
                f"{point['scheduler_busy']:.0%}",
                number(point["tasks"]),
            )
            for point in curve["points"]
        ]
        head = ("workers", "seconds", "computing", "serial", "scheduler busy", "tasks")
        yield grid(f"{number(curve['rows'])} rows, simulated", head, rows)


def _power(count: int) -> str:
    """Powers of ten as such, other numbers in full."""
    exponent = str(count).count("0")
    if count != 10**exponent:
        return f"{count:,}"
    return "10" + str(exponent).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def sizing_picture(result: Result, path: Path) -> None:
    """Draw seconds against workers, with both limits."""
    with picture(path, 6.8, 4.4) as figure:
        ax = figure.subplots()
        for color, curve in zip((BLUE, *PALETTE[1:]), result["curves"], strict=False):
            points = curve["points"]
            workers = np.array([point["workers"] for point in points])
            seconds, work, serial = (
                np.array([point[name] for point in points])
                for name in ("seconds", "work", "serial")
            )
            label = f"{_power(curve['rows'])} rows"
            ax.loglog(workers, seconds, "o-", ms=4, color=color, label=f"{label}, simulated")
            ax.loglog(
                workers,
                work,
                ":",
                lw=1.2,
                color=color,
                label="its computing, shared by the workers",
            )
            ax.loglog(
                workers, serial, "--", lw=1.2, color=color, label="client and scheduler alone"
            )
        ax.set_xlabel("workers of one thread")
        ax.set_ylabel("seconds of the pass")
        ax.legend(fontsize=8)
