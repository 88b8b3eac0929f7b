"""The command that turns Zarr stores of others into sample stores."""

from pathlib import Path

import click

from cme_dask.cli.options import examples, json_option, log_option, overwrite_option
from cme_dask.cli.root import cli
from cme_dask.cli.types import SEED, columns, option, output, size


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
    from cme_dask.jobs.describe import describe
    from cme_dask.report import tables
    from cme_dask.report.progress import ProgressLines
    from cme_dask.storage import rechunk as rechunking

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
