"""Commands that make sample stores and tell what is in a file."""

from pathlib import Path

import click

from cme_dask.cli.app import cli
from cme_dask.cli.options import (
    SEED,
    calendar,
    chunk_option,
    columns,
    count,
    examples,
    json_option,
    log_option,
    option,
    output,
    overwrite_option,
    periodic,
    size,
    unit,
)
from cme_dask.config import SCENARIOS


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
    from cme_dask.cli import tables
    from cme_dask.cli.describe import describe
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.data.generate import write_normal3

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
    short_help="Stream tables (CSV, Parquet, NumPy, Zarr) into a sample store.",
    epilog=examples(
        "cme-dask ingest data/*.csv.gz --out s.zarr --x TEMP,DEWP --y PM2.5 --units TEMP=degC",
        "cme-dask ingest data/*.csv.gz --out s.zarr --x TEMP,hour,wd --y PM2.5 --cyclic hour=24 "
        "--categorical wd --group station --time year,month,day,hour",
    ),
)
@click.argument("files", nargs=-1, required=True)
@click.option("--out", required=True, type=output, metavar="PATH", help="Store to make (a folder).")
@click.option("--x", type=columns, required=True, help="Columns of x, such as TEMP,DEWP.")
@click.option("--y", type=columns, required=True, help="Columns of y.")
@click.option("--weights", metavar="COLUMN", help="Column of row weights.  [default: all equal]")
@click.option("--group", metavar="COLUMN", help="Column of groups that folds keep together.")
@click.option(
    "--time",
    type=columns,
    help="Column of times (ISO, UTC; or seconds), or the columns year,month,day,hour.",
)
@click.option("--categorical", type=columns, help="Columns that hold labels.")
@click.option(
    "--datetime",
    "datetimes",
    metavar="COLUMN=PART,...",
    type=calendar,
    multiple=True,
    help="Column of times to expand into hour, weekday, season; repeatable.",
)
@click.option(
    "--cyclic",
    metavar="COLUMN=PERIOD",
    type=periodic,
    multiple=True,
    help="Column of numbers that repeat, such as hour=24; repeatable.",
)
@click.option(
    "--missing",
    type=click.Choice(["drop", "error"]),
    default="drop",
    show_default=True,
    help="What to do with rows that lack a value.",
)
@click.option(
    "--null-value",
    "null_values",
    metavar="TEXT",
    multiple=True,
    help="Further text that stands for a missing value; repeatable.",
)
@click.option(
    "--units", metavar="COLUMN=UNIT", type=unit, multiple=True, help="Unit of a column; repeatable."
)
@chunk_option
@click.option(
    "--target-chunk", type=size, metavar="BYTES", help="Size of a chunk, such as 8MB, instead."
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the row sample.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted ingest.")
@click.option(
    "--storage-options",
    metavar="KEY=VALUE",
    type=option,
    multiple=True,
    help="Option of the URLs' file system, text or JSON; repeatable.",
)
@log_option
@overwrite_option
@json_option
def ingest(
    files: tuple[str, ...],
    out: Path,
    x: tuple[str, ...],
    y: tuple[str, ...],
    weights: str | None,
    group: str | None,
    time: tuple[str, ...] | None,
    categorical: tuple[str, ...] | None,
    datetimes: tuple[tuple[str, tuple[str, ...]], ...],
    cyclic: tuple[tuple[str, float], ...],
    missing: str,
    null_values: tuple[str, ...],
    units: tuple[tuple[str, str], ...],
    chunk_rows: int | None,
    target_chunk: int | None,
    seed: int,
    resume: bool,
    storage_options: tuple[tuple[str, object], ...],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Stream tables (FILES: paths, URLs or patterns) into a sample store.

    CSV, also compressed, Parquet, NumPy and Zarr; larger than memory.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.describe import describe_ingest
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.config import NULL_VALUES
    from cme_dask.data import ingest as ingestion

    with ProgressLines() as progress:
        report = ingestion.ingest(
            files,
            out,
            x=x,
            y=y,
            weights=weights,
            group=group,
            time=time or (),
            categorical=categorical or (),
            datetime=dict(datetimes),
            cyclic=dict(cyclic),
            missing=missing,
            units=dict(units),
            null_values=(*NULL_VALUES, *null_values),
            chunk_rows=chunk_rows,
            target_chunk=target_chunk,
            seed=seed,
            resume=resume,
            overwrite=overwrite,
            storage_options=dict(storage_options),
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
    from cme_dask.cli import tables
    from cme_dask.cli.describe import describe

    result = describe(path)
    kind = tables.store_tables if result["kind"] == "sample" else tables.model_tables
    tables.show(result, kind(result), as_json)


# The command that turns Zarr stores of others into sample stores


@cli.command(
    short_help="Write a Zarr store, however chunked, as a sample store.",
    epilog=examples(
        "cme-dask rechunk era5.zarr s.zarr --x t2m,d2m --y tp",
        "cme-dask rechunk s.zarr t.zarr --target-chunk 2MB",
    ),
)
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=output)
@click.option(
    "--target-chunk",
    type=size,
    metavar="BYTES",
    default="8MB",
    show_default=True,
    help="Size of a chunk of whole rows.",
)
@click.option("--x", type=columns, help="Columns of x.  [default: of the store or array x]")
@click.option("--y", type=columns, help="Columns of y.  [default: of the store or array y]")
@click.option("--weights", metavar="COLUMN", help="Column of row weights.  [default: the store's]")
@click.option("--group", metavar="COLUMN", help="Column of groups.  [default: the store's]")
@click.option("--time", type=columns, help="Column of times.  [default: the store's]")
@click.option(
    "--categorical", type=columns, help="Columns that hold labels.  [default: the store's]"
)
@click.option(
    "--missing",
    type=click.Choice(["error", "drop"]),
    default="error",
    show_default=True,
    help="What to do with rows that lack a value.",
)
@click.option("--seed", type=SEED, help="Seed of the row sample.  [default: the store's, or 0]")
@click.option("--resume", is_flag=True, help="Go on with an interrupted one.")
@click.option(
    "--storage-options",
    metavar="KEY=VALUE",
    type=option,
    multiple=True,
    help="Option of the URL's file system, text or JSON; repeatable.",
)
@log_option
@overwrite_option
@json_option
def rechunk(
    source: str,
    out: Path,
    target_chunk: int,
    x: tuple[str, ...] | None,
    y: tuple[str, ...] | None,
    weights: str | None,
    group: str | None,
    time: tuple[str, ...] | None,
    categorical: tuple[str, ...] | None,
    missing: str,
    seed: int | None,
    resume: bool,
    storage_options: tuple[tuple[str, object], ...],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the rows of IN, a Zarr store of any chunks, to the sample store OUT.

    IN is a path or URL: a sample store, an xarray dataset, or a group of arrays of rows.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.describe import describe
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.data import ingest as rechunking

    with ProgressLines() as progress:
        report = rechunking.rechunk(
            source,
            out,
            x=x,
            y=y,
            weights=weights,
            group=group,
            time=time or (),
            categorical=categorical or (),
            missing=missing,
            target_chunk=target_chunk,
            seed=seed,
            resume=resume,
            overwrite=overwrite,
            storage_options=dict(storage_options),
            progress=progress.ingest,
        )
        progress.say(f"wrote {report.rows_kept:,} rows, dropped {report.rows_dropped:,}")
    result = describe(str(out))
    tables.show(result, tables.store_tables(result), as_json)
