"""The command that learns kernels and keeps the trace of the search."""

from pathlib import Path
from typing import Any

import click

from cme_dask.cli.options import (
    compute_options,
    examples,
    fold_by_option,
    hold_out_option,
    json_option,
    overwrite_option,
)
from cme_dask.cli.root import cli
from cme_dask.cli.types import columns, count, output, ridge


@cli.command(
    short_help="Learn kernels and ridge, fit, and keep the trace of the search.",
    epilog=examples(
        'cme-dask tune s.zarr --out tuned --event "PM2.5 > 75" --fold-by 7d',
        "cme-dask tune s.zarr --out tuned --criterion crps --evaluations 120",
    ),
)
@click.argument("store")
@click.option(
    "--out",
    type=output,
    required=True,
    metavar="PATH",
    help="Folder for model.zarr, tuning.json, tuning.png.",
)
@click.option("--x", type=columns, help="Columns of x to use.  [default: all]")
@click.option("--y", type=columns, help="Columns of y to use.  [default: all]")
@click.option("--event", "events", multiple=True, help='Event of y, as in "cme-dask fit".')
@click.option("--event-x", "events_x", multiple=True, help="Event of x; repeatable.")
@click.option(
    "--criterion",
    type=click.Choice(["auto", "joint+crps", "joint", "crps", "validation", "log"]),
    default="auto",
    show_default=True,
    help="What held-out rows judge by: the joint loss, the sliced CRPS, both, (41), the squared "
    "error of the events, or the log score of the law.",
)
@click.option(
    "--rows", type=count, default=4096, show_default=True, help="Rows that the search sees."
)
@click.option(
    "--evaluations",
    type=click.IntRange(0),
    help="Pairs of kernels that are tried after the grid.  [default: 40, and 5 for each column]",
)
@click.option(
    "--averaged",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Best kernels whose density ratios are averaged.",
)
@click.option(
    "--tol",
    type=float,
    help="Relative trace error, in (0, 1).  [default: 1e-5, or what the rank allows]",
)
@click.option("--max-rank", type=int, help="Most pivots per basis.  [default: 500]")
@click.option("--reg", type=ridge, help="Ridge r, or rY,rX; no unit.  [default: learned]")
@fold_by_option
@hold_out_option
@compute_options
@overwrite_option
@json_option
def tune(
    store: str,
    out: Path,
    x: tuple[str, ...] | None,
    y: tuple[str, ...] | None,
    events: tuple[str, ...],
    events_x: tuple[str, ...],
    criterion: str,
    rows: int,
    evaluations: int | None,
    averaged: int,
    tol: float | None,
    max_rank: int | None,
    reg: Any,
    fold_by: str | None,
    hold_out: float | None,
    compute: Any,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Learn coordinates, length scales and ridge for STORE (path or URL), and fit.

    Kernels are searched on the row sample by cross-validation; the best few are compared on all
    rows in one pass, and their density ratios are averaged.
    """
    from cme_dask.chunked.sources import open_sample
    from cme_dask.jobs.schema import FitSection, checked
    from cme_dask.jobs.tuning import tune as run
    from cme_dask.report import tables
    from cme_dask.report.tuning import tuning_facts, tuning_tables

    options = {
        "events": list(events),
        "events_x": list(events_x),
        "tol": tol,
        "max_rank": max_rank,
        "reg": reg,
        "fold_by": fold_by or "rows",
        "tuning": {
            "criterion": criterion,
            "rows": rows,
            "evaluations": evaluations,
            "averaged": averaged,
            "finalists": averaged + 1,
        },
    }
    section = checked(FitSection, options, "")

    def open_rows() -> Any:
        sample = open_sample(store, x_columns=x, y_columns=y)
        return sample if hold_out is None else sample.split(hold_out, section.fold_by)[0]

    result = run(open_rows, section, compute, out, overwrite)
    shown = [*tuning_tables(result), *tables.fit_tables(result), "", tuning_facts(result)]
    tables.show(result, shown, as_json)
