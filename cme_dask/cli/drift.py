"""The command drift: its options, its work and its tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cme_dask.cli.app import cli
from cme_dask.cli.options import (
    Shown,
    checkpoint_options,
    compute_options,
    examples,
    json_option,
    overwrite_option,
    section_options,
)
from cme_dask.cli.values import count, output

if TYPE_CHECKING:
    from cme_dask.cli.compute import CheckpointOptions, Compute


@cli.command(
    short_help="Compare new rows with the law that a model was fitted on.",
    epilog=examples(
        "cme-dask drift m.zarr new.zarr",
        "cme-dask drift m.zarr new.zarr --fold-by 7d --picture drift.png --json",
    ),
)
@click.argument("model")
@click.argument("store")
@section_options("FitSection", "fold_by", fold_by="as the fit did")
@click.option(
    "--method",
    type=click.Choice(["auto", "chi2", "bootstrap"]),
    default="auto",
    show_default=True,
    help="P-values by a mixture of chi-squares, or by random signs of the moments of folds, also "
    "for weighted or dependent rows; auto: bootstrap for these, else chi2.",
)
@click.option(
    "--folds",
    "n_folds",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Folds of the new rows.",
)
@click.option(
    "--resamples",
    "n_resamples",
    type=count,
    default=9999,
    help="Random signs of the bootstrap.  [default: 9999]",
)
@click.option("--picture", type=output, metavar="PATH", help="PNG file to draw.  [default: none]")
@checkpoint_options
@compute_options
@overwrite_option
@json_option
def drift(
    model: str,
    store: str,
    given: dict[str, Any],
    picture: Path | None,
    checkpoint: "CheckpointOptions",
    compute: "Compute",
    overwrite: bool,
    **options: Any,
) -> Shown:
    """Compare the rows in STORE with the law that MODEL was fitted on, in one pass over them.

    MODEL is a joint distribution or a conditional mean embedding. Tells drift of x, of y and of y
    given x apart, names the columns that moved, and compares the means of y with those that the
    model expects of the new x. STORE may hold x alone.
    """
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.data.atomic import PICTURE, check_output, disk_errors, writing
    from cme_dask.estimators.drift import drift_report
    from cme_dask.models import load
    from cme_dask.passes.sources import open_sample

    checkpoint.check()
    if picture is not None:
        check_output(picture, PICTURE, overwrite)
    law = load(model)
    fold_by = given.get("fold_by", law.about.get("fold_by", "rows"))
    sample = open_sample(store).fold_by(fold_by)
    with ProgressLines() as progress, compute.open() as scheduler:
        report = drift_report(
            law,
            sample,
            progress=progress.fit,
            checkpoint=checkpoint.folder,
            **options,
            **compute.place(scheduler),
        )
        if picture is not None:
            with writing(picture, PICTURE, overwrite=overwrite) as aside, disk_errors(picture):
                report.plot(aside)
        checkpoint.finish()
    result = {"model": model, "store": store, "fold_by": fold_by, **report.to_dict()}
    result["picture"] = None if picture is None else str(picture)
    return result, _tables(result)


def _tables(result: dict[str, Any]) -> list[Any]:
    from cme_dask.cli import tables
    from cme_dask.display import number, with_error

    rows = [f"{number(each)} rows" for each in result["rows"]]
    names = (("x", "x"), ("y", "y"), ("y_given_x", "y given x"))
    lines = [
        (
            label,
            f"p = {law['pvalue']:.3g}, distance {law['statistic']:.3g} ({law['null_mean']:.3g} "
            "expected without drift)",
        )
        for key, label in names
        if (law := result[key]) is not None
    ]
    moved = ", ".join(each["name"] for each in result["columns"] if each["moved"])
    lines += [
        ("moved", moved or "no column"),
        ("ratio of x", f"effective sample size {result['effective']:.2%} of the rows of the fit"),
        ("rows", f"{rows[0]} of the fit, {rows[1]} in one pass: {result['seconds']:.3g} s"),
        *(("note", note) for note in result["notes"]),
    ]
    every = [tables.facts(f"{result['store']} beside {result['model']}", lines)]
    every.append(
        tables.grid(
            "Columns by themselves",
            ("column", "of", "mean before", "after", "deviation before", "after", "p", "adjusted"),
            [
                (
                    each["name"],
                    each["variable"],
                    *_pairs(each["before"], each["after"]),
                    f"{each['pvalue']:.2g}",
                    f"{each['adjusted']:.2g}",
                )
                for each in result["columns"]
            ],
            "P-values of equal laws, adjusted by Holm's method for the number of columns.",
            text_columns=2,
        )
    )
    if result["expectations"]:
        every.append(
            tables.grid(
                "Means of y",
                ("column", "before", "expected", "seen", "error before", "after", "p"),
                [
                    (
                        each["name"],
                        number(each["before"]),
                        number(each["expected"]),
                        "-"
                        if each["after"] is None
                        else with_error(each["after"], each["std_error"]),
                        *_numbers(each["error_before"], each["error_after"]),
                        "-" if each["pvalue"] is None else f"{each['pvalue']:.2g}",
                    )
                    for each in result["expectations"]
                ],
                "Expected: mean of E[y | x] over the new x. Errors: root mean squares of E[y | x], "
                "held out and on the new rows. p: of an unchanged E[y | x].",
            )
        )
    return every


def _pairs(before: Any, after: Any) -> tuple[str, ...]:
    """Means, then deviations, before and after; of labels none."""
    if before is None:
        return ("-",) * 4
    return tuple(text for pair in zip(before, after, strict=True) for text in _numbers(*pair))


def _numbers(*values: float | None) -> tuple[str, ...]:
    from cme_dask.display import number

    return tuple("-" if value is None else number(value) for value in values)
