"""The command that asks conditional laws: at points, for a CSV file, or for a whole store."""

from pathlib import Path
from typing import Any

import click

from cme_dask.cli.options import (
    chunk_option,
    compute_options,
    examples,
    json_option,
    overwrite_option,
)
from cme_dask.cli.root import cli
from cme_dask.cli.types import numbers, output
from cme_dask.defaults import ANSWERS, LEVELS


@cli.command(
    short_help="Quantiles, probabilities and moments of conditional laws.",
    epilog=examples(
        'cme-dask predict m.zarr --given TEMP=20,DEWP=5 --event "PM2.5 > 75"',
        "cme-dask predict m.zarr --points weather.csv --out answers.csv",
        "cme-dask predict m.zarr s.zarr --out answers.zarr --of quantile --levels 0.1,0.5,0.9",
    ),
)
@click.argument("model")
@click.argument("store", required=False)
@click.option("--out", type=output, metavar="PATH", help="Store, or CSV file of points, to make.")
@click.option(
    "--given", multiple=True, metavar="COLUMN=VALUE,...", help="A point, such as TEMP=20,DEWP=5."
)
@click.option(
    "--points",
    type=click.Path(path_type=Path, dir_okay=False),
    help="CSV file of points with the column names in its header.",
)
@click.option(
    "--of",
    "answers",
    type=click.Choice(ANSWERS),
    multiple=True,
    help="What is asked; repeatable.  [default: all]",
)
@click.option(
    "--levels",
    type=numbers,
    default=",".join(f"{level:g}" for level in LEVELS),
    show_default=True,
    help="Levels of the quantiles, between 0 and 1.",
)
@click.option("--event", "events", multiple=True, help='Event such as "PM2.5 > 75"; repeatable.')
@click.option("--reverse", is_flag=True, help="Laws of x given y.")
@chunk_option
@compute_options
@overwrite_option
@json_option
def predict(
    model: str,
    store: str | None,
    out: Path | None,
    given: tuple[str, ...],
    points: Path | None,
    answers: tuple[str, ...],
    levels: tuple[float, ...],
    events: tuple[str, ...],
    reverse: bool,
    chunk_rows: int | None,
    compute: Any,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Ask the laws of y given x of a saved MODEL: all answers at a point are of one law.

    Of points, --given or --points, they are printed, or written to --out, a CSV file. Of the x of
    all rows in STORE (path or URL) they are written to --out, a new Zarr store, rows streaming
    through in one pass. `cme-dask expect` gives signed expectations with standard errors instead.
    """
    from cme_dask.jobs import predict as job
    from cme_dask.report import laws, tables
    from cme_dask.storage.atomic import check_output

    of_points = bool(given) or points is not None
    if (store is None) != of_points:
        raise click.UsageError("give points by --given or --points, or a STORE: one of the two")
    query = job.query_of(
        model, reverse=reverse, answers=answers or ANSWERS, levels=levels, events=events
    )
    if store is not None:
        if out is None:
            raise click.UsageError("Missing option '--out': the answers of a STORE are written.")
        result = job.predict_store(
            query, model, store, out, chunk_rows=chunk_rows, compute=compute, overwrite=overwrite
        )
        tables.show(result, laws.store_answer_tables(result), as_json)
        return
    if out is not None:
        check_output(out, overwrite)
    result = job.predict_points(query, model, given, points)
    if out is not None:
        result = job.write_points(result, out, overwrite)
        tables.show(result, laws.file_answer_tables(result), as_json)
        return
    tables.show(result, laws.answer_tables(result), as_json)
