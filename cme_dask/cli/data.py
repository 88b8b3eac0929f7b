"""Commands that make sample stores and tell what is in a file."""

from pathlib import Path

import click

from cme_dask.cli.options import (
    chunk_option,
    examples,
    json_option,
    overwrite_option,
)
from cme_dask.cli.root import cli
from cme_dask.cli.types import SEED, columns, count, output, unit
from cme_dask.defaults import SCENARIOS


@cli.command(
    short_help="Write a sample of a known three-dimensional law.",
    epilog=examples(
        "cme-dask sample normal3.zarr --rows 1e7 --scenario strong",
    ),
)
@click.argument("out", type=output)
@click.option("--rows", type=count, required=True, help="Rows, such as 10000000, 1e7 or 10M.")
@click.option(
    "--scenario",
    type=click.Choice(list(SCENARIOS)),
    default="medium",
    show_default=True,
    help="Correlations of y1, y2 and x.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the draws.")
@chunk_option
@overwrite_option
@json_option
def sample(
    out: Path,
    rows: int,
    scenario: str,
    seed: int,
    chunk_rows: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a sample of the three-dimensional normal (x; y1, y2) to the store OUT."""
    from cme_dask.jobs.describe import describe
    from cme_dask.report import tables
    from cme_dask.report.progress import ProgressLines
    from cme_dask.storage.generate import write_normal3

    with ProgressLines() as progress:
        write_normal3(
            out,
            rows,
            scenario=scenario,
            seed=seed,
            chunk_rows=chunk_rows,
            overwrite=overwrite,
            progress=progress.counter("generate", rows),
        )
        progress.say(f"generated {rows:,} rows")
    result = describe(str(out))
    tables.show(result, tables.store_tables(result), as_json)


@cli.command(
    short_help="Stream CSV files into a sample store.",
    epilog=examples(
        "cme-dask ingest data/*.csv.gz --out s.zarr --x TEMP,DEWP --y PM2.5 --units TEMP=degC",
    ),
)
@click.argument("files", nargs=-1, required=True)
@click.option("--out", required=True, type=output, metavar="PATH", help="Store to make (a folder).")
@click.option("--x", type=columns, required=True, help="Columns of x, such as TEMP,DEWP.")
@click.option("--y", type=columns, required=True, help="Columns of y.")
@click.option("--weights", metavar="COLUMN", help="Column of row weights.  [default: all equal]")
@click.option(
    "--missing",
    type=click.Choice(["drop", "error"]),
    default="drop",
    show_default=True,
    help="What to do with rows that lack a value.",
)
@click.option(
    "--units", metavar="COLUMN=UNIT", type=unit, multiple=True, help="Unit of a column; repeatable."
)
@chunk_option
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the row sample.")
@overwrite_option
@json_option
def ingest(
    files: tuple[str, ...],
    out: Path,
    x: tuple[str, ...],
    y: tuple[str, ...],
    weights: str | None,
    missing: str,
    units: tuple[tuple[str, str], ...],
    chunk_rows: int | None,
    seed: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Stream CSV FILES (paths, URLs or patterns; plain or compressed) into a sample store."""
    from cme_dask.jobs.describe import describe_ingest
    from cme_dask.report import tables
    from cme_dask.report.progress import ProgressLines
    from cme_dask.storage.csv_files import ingest_csv

    with ProgressLines() as progress:
        report = ingest_csv(
            files,
            out,
            x=x,
            y=y,
            weights=weights,
            missing=missing,
            units=dict(units),
            chunk_rows=chunk_rows,
            seed=seed,
            overwrite=overwrite,
            progress=progress.ingest,
        )
    result = describe_ingest(report, dict(units))
    tables.show(result, tables.ingest_tables(result), as_json)


@cli.command(
    short_help="Tell what is in a sample store or a model.",
    epilog=examples(
        "cme-dask info m.zarr",
    ),
)
@click.argument("path")
@json_option
def info(path: str, as_json: bool) -> None:
    """Tell what is in PATH, a sample store or a model."""
    from cme_dask.jobs.describe import describe
    from cme_dask.report import tables

    result = describe(path)
    kind = tables.store_tables if result["kind"] == "sample" else tables.model_tables
    tables.show(result, kind(result), as_json)
