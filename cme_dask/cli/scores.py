"""The command that tells how good a model is on rows it has not seen."""

from typing import Any

import click

from cme_dask.cli.options import (
    compute_options,
    examples,
    fold_by_option,
    hold_out_option,
    json_option,
)
from cme_dask.cli.root import cli


@cli.command(
    short_help="Score a model on held-out rows.",
    epilog=examples(
        "cme-dask score m.zarr s.zarr",
        "cme-dask score m.zarr s.zarr --hold-out 0.2 --fold-by 7d --crps --coverage",
    ),
)
@click.argument("model")
@click.argument("store")
@hold_out_option
@fold_by_option
@click.option(
    "--of", "functions", multiple=True, help="Column or event; repeatable.  [default: all]"
)
@click.option(
    "--crps", is_flag=True, help="Also the continuous ranked probability score of the laws."
)
@click.option(
    "--coverage",
    is_flag=True,
    help="Also the share of rows within the 90 % intervals of the laws, by column.",
)
@compute_options
@json_option
def score(
    model: str,
    store: str,
    hold_out: float | None,
    fold_by: str | None,
    functions: tuple[str, ...],
    crps: bool,
    coverage: bool,
    compute: Any,
    as_json: bool,
) -> None:
    """Score MODEL on rows of STORE in one pass: R^2 of means, Brier skill of probabilities.

    Without --hold-out these are the rows that the fit held out; of a fit on all rows, all rows.
    Standard errors come from blocks of rows that --fold-by keeps together.
    """
    from cme_dask.jobs.scoring import score_model
    from cme_dask.report import scores, tables

    result = score_model(
        model,
        store,
        functions,
        hold_out=hold_out,
        fold_by=fold_by,
        crps=crps,
        coverage=coverage,
        compute=compute,
    )
    tables.show(result, scores.score_tables(result), as_json)
