"""The commands predict and score: their options."""

from pathlib import Path
from typing import Any

import click

from cme_dask.cli.app import cli
from cme_dask.cli.options import (
    Shown,
    chunk_option,
    compute_options,
    examples,
    functions_option,
    hold_out_option,
    json_option,
    out_option,
    overwrite_option,
    point_options,
    section_options,
)
from cme_dask.cli.values import numbers, output
from cme_dask.config import ANSWERS, LEVELS

# The command that queries conditional laws: at points, for a CSV file, or for a whole store


@cli.command(
    short_help="Quantiles, probabilities and moments of conditional laws.",
    epilog=examples(
        'cme-dask predict m.zarr --given TEMP=20,DEWP=5 --event "PM2.5 > 75"',
        "cme-dask predict m.zarr --points weather.csv --out answers.csv",
        "cme-dask predict m.zarr s.zarr --out answers.zarr --of quantile --levels 0.1,0.5,0.9",
        "cme-dask predict m.zarr s.zarr --out answers.zarr --of mean --interval 0.9 --conformal",
    ),
)
@click.argument("model")
@click.argument("store", required=False)
@out_option("Store, or CSV file of points, to make.", required=False)
@point_options
@click.option(
    "--of",
    "answers",
    type=click.Choice(ANSWERS),
    multiple=True,
    help="Quantity to compute; repeatable.  [default: all, intervals with --interval]",
)
@click.option(
    "--levels",
    type=numbers,
    default=",".join(f"{level:g}" for level in LEVELS),
    show_default=True,
    help="Levels of the quantiles, between 0 and 1.",
)
@click.option(
    "--interval",
    type=float,
    metavar="PROBABILITY",
    help="Also the lower and upper ends of intervals of this probability.  [default: 0.9 with "
    "--of interval]",
)
@click.option(
    "--conformal",
    is_flag=True,
    help="Make the intervals from conformity scores of held-out rows, so that new rows are covered "
    "even where the laws are wrong.",
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
    interval: float | None,
    conformal: bool,
    events: tuple[str, ...],
    reverse: bool,
    chunk_rows: int | None,
    compute: Any,
    overwrite: bool,
) -> Shown:
    """Query the laws of y given x of a saved MODEL; all answers at a point belong to one law.

    For points (--given or --points) the answers are printed, or written to the CSV file --out. For
    the x of all rows in STORE (path or URL) they are written to the new Zarr store --out, in one
    pass. `cme-dask expect` gives signed expectations with standard errors instead.

    Embeddings answer mean and probability, which is a signed expectation for events of numbers.
    """
    from cme_dask.cli import query as job
    from cme_dask.cli import tables
    from cme_dask.cli.compute import Compute
    from cme_dask.data.atomic import check_output

    of_points = bool(given) or points is not None
    if (store is None) != of_points:
        raise click.UsageError("give points by --given or --points, or a STORE: one of the two")
    if of_points and (chunk_rows is not None or compute != Compute(overwrite=overwrite)):
        raise click.UsageError(
            "--chunk-rows, --scheduler, --workers, --memory-limit and --report are for a STORE: "
            "points are answered here"
        )
    query = job.query_of(
        model,
        reverse=reverse,
        answers=answers,
        levels=levels,
        events=events,
        interval=interval,
        conformal=conformal,
    )
    if store is not None:
        if out is None:
            raise click.UsageError("Missing option '--out': the answers of a STORE are written.")
        result = job.predict_store(
            query, model, store, out, chunk_rows=chunk_rows, compute=compute, overwrite=overwrite
        )
        return result, tables.store_answer_tables(result)
    if out is not None:
        check_output(out, job.TABLE, overwrite)
    result = job.predict_points(query, model, given, points)
    if out is not None:
        result = job.write_points(result, out, overwrite)
        return result, tables.file_answer_tables(result)
    return result, tables.answer_tables(result)


# The command that scores a model on rows that it has not seen


@cli.command(
    short_help="Score a model on held-out rows.",
    epilog=examples(
        "cme-dask score m.zarr s.zarr",
        "cme-dask score m.zarr s.zarr --hold-out 0.2 --fold-by 7d --crps --coverage",
        "cme-dask score m.zarr s.zarr --html scores.html",
    ),
)
@click.argument("model")
@click.argument("store")
@hold_out_option
@section_options("FitSection", "fold_by", fold_by="as the fit did")
@functions_option
@click.option(
    "--crps", is_flag=True, help="Also the continuous ranked probability score of the laws."
)
@click.option(
    "--coverage",
    is_flag=True,
    help="Also the share of rows within the 90 % intervals of the laws, and the width and the "
    "interval score of these, by column.",
)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Both, and pinball losses of quantiles, calibration errors, the energy score of several "
    "columns and the log score of densities.",
)
@click.option(
    "--html",
    type=output,
    metavar="FILE",
    help="Write a page of HTML about the scores, with figures, from the same pass; it has all "
    "scores but the log score, and that with --all.",
)
@compute_options
@overwrite_option
@json_option
def score(given: dict[str, Any], **options: Any) -> Shown:
    """Score MODEL on rows of STORE in one pass: R^2 of means, Brier skill of probabilities.

    Means and probabilities are those of the laws, which "predict" prints too; of a model without
    laws, its own estimates.

    Without --hold-out, the rows that the fit held out are scored, or all rows if it held out none.
    Standard errors are over blocks of rows that --fold-by keeps together.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.scoring import score_model

    result = score_model(**given, **options)
    return result, tables.score_tables(result)
