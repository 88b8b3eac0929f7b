"""The commands that add rows to models: of a store, or of other models."""

from pathlib import Path
from typing import Any

import click

from cme_dask.cli.options import compute_options, examples, json_option, overwrite_option
from cme_dask.cli.root import cli
from cme_dask.cli.types import count, output

NEW_PIVOTS = ("keep", "extend", "reread")


@cli.command(
    short_help="Merge models of parts of the rows into one of all.",
    epilog=examples("cme-dask merge jan.model feb.model mar.model --out quarter.model"),
)
@click.argument("models", metavar="M1 M2...", nargs=-1, required=True)
@click.option("--out", type=output, required=True, metavar="PATH", help="Model to make.")
@overwrite_option
@json_option
def merge(models: tuple[str, ...], out: Path, overwrite: bool, as_json: bool) -> None:
    """Make the model of all rows from models M1, M2, ... of disjoint rows, without reading any.

    They must have the same columns, kernels, pivots, cells, folds, constraint and ridge, as `grow
    --alone` makes them; what differs is named.
    """
    from cme_dask.jobs.merge import merge_models
    from cme_dask.report import tables

    result = merge_models(models, out, overwrite)
    tables.show(result, tables.model_tables(result), as_json)


@cli.command(
    short_help="Add the rows of a store to a model, in one pass over them alone.",
    epilog=examples(
        "cme-dask grow jan.model feb.zarr --out both.model",
        "cme-dask grow jan.model feb.zarr --out both.model --new-pivots reread --earlier jan.zarr",
        "cme-dask grow jan.model feb.zarr --alone --out feb.model",
    ),
)
@click.argument("model")
@click.argument("store")
@click.option("--out", type=output, required=True, metavar="PATH", help="Model to make.")
@click.option(
    "--new-pivots",
    type=click.Choice(NEW_PIVOTS),
    default="keep",
    show_default=True,
    help="Where pivots don't span the new rows: keep them; extend them, with zeros for what is not "
    "known of earlier rows, and a bound; or extend them and reread the --earlier rows.",
)
@click.option("--earlier", metavar="STORE", help="All rows that MODEL was fitted on.")
@click.option("--max-rank", type=int, help="Most pivots per basis, with new ones.  [default: 500]")
@click.option(
    "--alone",
    is_flag=True,
    help="A model of these rows alone, with pivots and cells of MODEL, to be merged.",
)
@click.option(
    "--first-row",
    type=count,
    help="With --alone, number of the first row in the table that all parts make.  [default: 0]",
)
@compute_options
@overwrite_option
@json_option
def grow(
    model: str,
    store: str,
    out: Path,
    new_pivots: str,
    earlier: str | None,
    max_rank: int | None,
    alone: bool,
    first_row: int | None,
    compute: Any,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Add the rows of STORE (path or URL) to MODEL; the result is the model of all rows.

    Kernels, pivots, cells, folds, constraint, ridge and events are those of MODEL.
    """
    from cme_dask.jobs.grow import grow_model
    from cme_dask.report import tables

    if (new_pivots == "reread") != (earlier is not None):
        raise click.UsageError("--new-pivots reread, and only that, takes --earlier STORE")
    if alone and new_pivots != "keep":
        raise click.UsageError("--alone keeps the pivots: leave --new-pivots out")
    if first_row is not None and not alone:
        raise click.UsageError("--first-row belongs to --alone: other rows follow those of MODEL")
    if max_rank is not None and new_pivots == "keep":
        raise click.UsageError("--max-rank belongs to --new-pivots extend or reread")
    result = grow_model(
        model,
        store,
        out,
        compute,
        new_pivots=new_pivots,
        earlier=earlier,
        max_rank=max_rank,
        alone=alone,
        first_row=first_row or 0,
        overwrite=overwrite,
    )
    tables.show(result, tables.model_tables(result), as_json)
