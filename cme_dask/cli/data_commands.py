"""The commands sample, ingest, rechunk and info: their options."""

from itertools import chain
from pathlib import Path
from typing import Any

import click

from cme_dask.cli.app import cli
from cme_dask.cli.options import (
    Shown,
    chunk_option,
    examples,
    json_option,
    log_option,
    out_option,
    overwrite_option,
    section_options,
    source_options,
)
from cme_dask.cli.values import SEED, output, size


@cli.command(
    short_help="Write a sample of a known three-dimensional law.",
    epilog=examples(
        "cme-dask sample normal3.zarr --rows 1e7 --scenario strong",
    ),
)
@click.argument("out", type=output)
@section_options("SampleSection", "rows", "scenario", "seed")
@chunk_option
@overwrite_option
@json_option
def sample(out: Path, given: dict[str, Any], **options: Any) -> Shown:
    """Write a sample of the three-dimensional normal (x; y1, y2) to the store OUT."""
    from cme_dask.cli import tables
    from cme_dask.cli.describe import describe
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.data.generate import write_normal3

    rows = given["rows"]
    with ProgressLines() as progress:
        write_normal3(out, **given, **options, progress=progress.counter("generate", rows))
        progress.say(f"generated {rows:,} rows")
    result = describe(str(out))
    return result, tables.store_tables(result)


@cli.command(
    short_help="Stream tables (CSV, Parquet, NumPy, Zarr) into a sample store.",
    epilog=examples(
        "cme-dask ingest data/*.csv.gz --out s.zarr --x TEMP,DEWP --y PM2.5 --units TEMP=degC",
        "cme-dask ingest data/*.csv.gz --out s.zarr --x TEMP,hour,wd --y PM2.5 --cyclic hour=24 "
        "--categorical wd --group station --time year,month,day,hour",
    ),
)
@click.argument("files", nargs=-1, required=True)
@out_option("Store to make (a folder).")
@section_options("IngestSection", "x", "y", "weights", "group", "time", "categorical")
@section_options("IngestSection", "datetime", "cyclic", "missing", "null_values", "units")
@chunk_option
@click.option(
    "--target-chunk",
    type=size,
    metavar="BYTES",
    help="Size of a chunk, such as 8MB, in place of --chunk-rows.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the row sample.")
@source_options
@log_option
@overwrite_option
@json_option
def ingest(given: dict[str, Any], storage_options: Any, **options: Any) -> Shown:
    """Stream tables (FILES: paths, URLs or patterns) into a sample store.

    CSV, also compressed, Parquet, NumPy and Zarr; larger than memory.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.describe import describe_ingest
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.config import NULL_VALUES
    from cme_dask.data import ingest as ingestion

    pairs = {key: dict(given.get(key, ())) for key in ("datetime", "cyclic")}
    pairs["units"] = dict(chain(*given.get("units", ())))
    null_values = (*NULL_VALUES, *given.get("null_values", ()))
    options |= {**given, **pairs, "null_values": null_values}
    with ProgressLines() as progress:
        report = ingestion.ingest(
            options.pop("files"),
            options.pop("out"),
            **options,
            storage_options=dict(storage_options),
            progress=progress.ingest,
        )
    result = describe_ingest(report, pairs["units"])
    return result, tables.ingest_tables(result)


@cli.command(
    short_help="Describe a sample store or a model.",
    epilog=examples(
        "cme-dask info m.zarr",
    ),
)
@click.argument("path")
@json_option
def info(path: str) -> Shown:
    """Describe PATH, a sample store or a model."""
    from cme_dask.cli import tables
    from cme_dask.cli.describe import describe

    result = describe(path)
    kind = tables.store_tables if result["kind"] == "sample" else tables.model_tables
    return result, kind(result)


# The command that turns foreign Zarr stores into sample stores


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
@section_options(
    "IngestSection",
    *("x", "y", "weights", "group", "time", "categorical", "missing"),
    x="of the store or array x",
    y="of the store or array y",
    missing="error",
    **dict.fromkeys(("weights", "group", "time", "categorical"), "the store's"),
)
@click.option("--seed", type=SEED, help="Seed of the row sample.  [default: the store's, or 0]")
@source_options
@log_option
@overwrite_option
@json_option
def rechunk(
    source: str, out: Path, given: dict[str, Any], storage_options: Any, **options: Any
) -> Shown:
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
            **given,
            **options,
            storage_options=dict(storage_options),
            progress=progress.ingest,
        )
        progress.say(f"wrote {report.rows_kept:,} rows, dropped {report.rows_dropped:,}")
    result = describe(str(out))
    return result, tables.store_tables(result)
