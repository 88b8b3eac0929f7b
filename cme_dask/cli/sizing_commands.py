"""The command plan: its options."""

from pathlib import Path
from typing import Any

import click

from cme_dask.cli.app import cli
from cme_dask.cli.options import (
    Shown,
    examples,
    json_option,
    section_options,
    x_option,
    y_option,
)
from cme_dask.cli.values import column_counts, count, kernel, size, straggling


@cli.command(
    short_help="Predict passes, time, memory and a layout of workers, for any number of rows.",
    epilog=examples(
        "cme-dask plan --rows 1e10 --workers 200 --kernel median",
        "cme-dask plan s.zarr --rows 1e10 --workers 200 --max-rank 100",
        "cme-dask plan --columns 20+2 --rows 1e9 --workers 50 --threads-per-worker 4",
        "cme-dask plan --rows 1e10 --workers 500 --rates plan.json --bandwidth 100MB",
    ),
)
@click.argument("store", required=False)
@click.option(
    "--rows",
    type=count,
    help="Rows, such as 10000000000, 1e10 or 10G.  [default: those of STORE]",
)
@click.option("--workers", type=click.IntRange(1), required=True, help="Worker processes.")
@click.option(
    "--threads-per-worker",
    type=click.IntRange(1),
    help="Threads of each.  [default: 1, and others beside it]",
)
@click.option(
    "--memory-per-worker", type=size, metavar="BYTES", help="Refuse workers for which it is small."
)
@click.option(
    "--columns",
    type=column_counts,
    metavar="X+Y",
    help="Without STORE: numbers of columns of x and of y.  [default: 10+1]",
)
@x_option
@y_option
@section_options("FitSection", "estimator", "events")
@click.option(
    "--kernel",
    type=kernel,
    metavar="KERNEL",
    help="Kernel of x and of y: learned, median, or as --kernel-x.  [default: learned]",
)
@section_options("FitSection", "kernel_x", "kernel_y", "tol")
@section_options("FitSection", "max_rank", max_rank="as of fit; without STORE 200")
@section_options("FitSection", "reg", "constraint")
@section_options("FitSection", "folds", "residual", "missing")
@click.option("--chunk-rows", type=count, help="Rows of a chunk.  [default: those of STORE]")
@click.option(
    "--rates",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Rates of scheduler, client and messages from the output of an earlier `cme-dask plan "
    "--json`.  [default: measured here, in about 20 s]",
)
@click.option("--bandwidth", type=size, metavar="BYTES", help="That a worker sends per second.")
@click.option("--latency", type=float, metavar="SECONDS", help="Of a message, one way.")
@click.option(
    "--read-rate",
    type=size,
    metavar="BYTES",
    help="That a thread reads per second at most, before compression.  [default: as measured here]",
)
@click.option(
    "--file-system-rate",
    type=size,
    metavar="BYTES",
    help="That all workers together read per second, likewise.  [default: no limit]",
)
@click.option(
    "--stragglers",
    type=straggling,
    metavar="SHARE:FACTOR",
    help="A share of tasks, and how many times as long they take, such as 0.01:5.  [default: none "
    "beyond what was measured]",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the durations.  [default: 0]")
@json_option
def plan(
    given: dict[str, Any],
    kernel: str | None,
    **options: Any,
) -> Shown:
    """Predict what a fit would take on a cluster, from rates that are measured on this machine.

    The fit is planned here, on the rows of STORE (path or URL) or on made-up ones of so many
    columns: its kernels are searched, its pivots chosen, and three strips of its pass timed. The
    pass over all rows is then simulated on the workers: the scheduler, transfers, tasks that take
    longer than others. Nothing is stored.
    """
    from cme_dask.cli.schema import FitSection, checked
    from cme_dask.cli.sizing import size_cluster, sizing_tables

    kernels = ["kernel_x"] if given.get("estimator") == "multiclass" else ["kernel_x", "kernel_y"]
    section = checked(
        FitSection, {**(dict.fromkeys(kernels, kernel) if kernel else {}), **given}, ""
    )
    result = size_cluster(section=section, **options)
    return result, sizing_tables(result)
