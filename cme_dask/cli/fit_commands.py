"""Commands that fit, ask, tune, and add rows to models."""

import json
from pathlib import Path
from typing import Any

import click

from cme_dask.cli.app import cli
from cme_dask.cli.options import (
    checkpoint_options,
    chunk_option,
    columns,
    compute_options,
    constraint,
    count,
    examples,
    fold_by_option,
    hold_out_option,
    json_option,
    kernel_options,
    numbers,
    output,
    overwrite_option,
    ridge,
)
from cme_dask.config import ACCURACY, COUPLING_REG, N_FOLDS, PIVOTS, SAMPLE_SIZE, TOL

# Commands that fit and ask: joint laws and features


_CHOICES = {"auto": "auto", "yes": True, "no": False}


@cli.command(
    short_help="Fit a joint distribution in one pass, and save it.",
    epilog=examples(
        'cme-dask fit s.zarr --out m.zarr --event "PM2.5 > 75" --max-rank 300',
        "cme-dask fit s.zarr --dry-run --max-rank 300",
        "cme-dask fit s.zarr --out m.zarr --kernel median --max-rank 300",
        "cme-dask fit s.zarr --out m.zarr --kernel-x gaussian:TEMP=8,DEWP=10 --kernel-y laplace:30",
        "cme-dask fit s.zarr --out m.zarr --fold-by 7d --hold-out 0.2",
        "cme-dask fit s.zarr --out m.zarr --scheduler tcp://10.0.0.1:8786 --memory-limit 2GB",
        "cme-dask fit s.zarr --out m.zarr --checkpoint run --resume",
    ),
)
@click.argument("store")
@click.option("--out", type=output, metavar="PATH", help="Model to make (a folder).  [required]")
@click.option("--x", type=columns, help="Columns of x to use.  [default: all]")
@click.option("--y", type=columns, help="Columns of y to use.  [default: all]")
@click.option(
    "--event",
    "events",
    multiple=True,
    help='Event of y, such as "PM2.5 > 75" or "y1 <= y2 - 0.5"; repeatable.',
)
@click.option("--event-x", "events_x", multiple=True, help="Event of x; repeatable.")
@kernel_options
@click.option(
    "--averaged",
    type=click.IntRange(1),
    help="Best of the learned kernels whose density ratios are averaged.  [default: 5]",
)
@click.option(
    "--tol",
    type=float,
    help="Relative trace error, in (0, 1).  [default: 1e-5, or what the rank allows]",
)
@click.option("--max-rank", type=int, help="Most pivots per basis.  [default: 500 if learned]")
@click.option(
    "--reg",
    type=ridge,
    help=f"Ridge r, or rY,rX; no unit.  [default: learned; of couplings {COUPLING_REG:g}]",
)
@click.option(
    "--reg-form",
    type=click.Choice(["two-sided", "single"]),
    default="two-sided",
    show_default=True,
    help="Form of the ridge.",
)
@click.option(
    "--constraint",
    type=constraint,
    default="normalized",
    show_default=True,
    metavar="NAME[,OPTION=VALUE...]",
    help="What is asked of densities: none, normalized, certified, pointwise or coupling; with "
    "options of cme_dask.constraints such as certified,bounds=observed or coupling,landmarks=64.",
)
@click.option(
    "--folds",
    type=int,
    default=N_FOLDS,
    show_default=True,
    help="Folds for standard errors; 1: none.",
)
@fold_by_option
@hold_out_option
@click.option(
    "--pivots",
    type=click.Choice(PIVOTS),
    default="sampled",
    show_default=True,
    help="sampled: from the row sample, in no pass of their own. greedy, random: over all rows, in "
    "rounds of one pass each.",
)
@click.option(
    "--span",
    type=float,
    default=1.0,
    show_default=True,
    help="Of greedy pivots, in (0, 1]: 1 takes the largest residuals exactly, 0.5 a quarter of the "
    "rounds.",
)
@click.option(
    "--residual",
    type=click.Choice(["auto", "yes", "no"]),
    default="auto",
    show_default=True,
    help="Laws of what a location of y leaves, moved along with it, in one more pass; auto: where "
    "held-out scores say that it pays.",
)
@click.option(
    "--calibration",
    type=click.Choice(["auto", "yes", "no"]),
    default="auto",
    show_default=True,
    help="Calibrate the laws by the levels of held-out rows under refits; auto: where kernels are "
    "learned and the held-out log density rises.",
)
@click.option(
    "--growing",
    is_flag=True,
    help="The best of learned kernels alone, and no residuals: a model that grow and merge take.",
)
@click.option(
    "--accuracy",
    type=float,
    default=ACCURACY,
    show_default=True,
    help="Change of probabilities that faster arithmetic may cause; 0: none.",
)
@click.option(
    "--sample-size",
    type=count,
    default=SAMPLE_SIZE,
    show_default=True,
    help="Rows from which pivots are chosen.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only tell ranks, passes, seconds by part and peak memory, from the row sample and rates "
    "measured in a second; --out is not needed.",
)
@checkpoint_options
@compute_options
@overwrite_option
@json_option
def fit(
    store: str,
    out: Path | None,
    x: tuple[str, ...] | None,
    y: tuple[str, ...] | None,
    events: tuple[str, ...],
    events_x: tuple[str, ...],
    kernels: dict[str, str | None],
    averaged: int | None,
    tol: float | None,
    max_rank: int | None,
    reg: Any,
    reg_form: str,
    constraint: dict[str, Any],
    folds: int,
    fold_by: str | None,
    hold_out: float | None,
    pivots: str,
    span: float,
    residual: str,
    calibration: str,
    growing: bool,
    accuracy: float,
    sample_size: int,
    dry_run: bool,
    kept: Any,
    compute: Any,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Fit the joint distribution of x and y in STORE (path or URL) in one pass, and save it.

    Kernels, length scales and ridge are learned unless they are given; `cme-dask tune` keeps the
    trace of their search.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.fitting import fit_and_save, plan_of_fit
    from cme_dask.cli.schema import FitSection, checked
    from cme_dask.passes.sources import open_sample

    options = {
        "events": list(events),
        "events_x": list(events_x),
        **kernels,
        "tol": tol,
        "max_rank": max_rank,
        "reg": reg,
        "reg_form": reg_form,
        "constraint": constraint,
        "folds": folds,
        "fold_by": fold_by or "rows",
        "pivots": pivots,
        "span": span,
        "residual": _CHOICES[residual],
        "calibration": _CHOICES[calibration],
        "accuracy": accuracy,
        "sample_size": sample_size,
    }
    if averaged is not None:
        if None not in kernels.values() and "learned" not in kernels.values():
            raise click.UsageError("--averaged is for learned kernels: leave it or a kernel out")
        options["tuning"] = {"averaged": averaged, "finalists": averaged + 1}
    if growing:
        if averaged not in (None, 1):
            raise click.UsageError("--growing takes one kernel alone: leave --averaged out")
        if residual == "yes":
            raise click.UsageError("--growing takes no residuals: leave --residual out")
        options |= {"tuning": {"averaged": 1}, "residual": False}
    section = checked(FitSection, options, "")

    def open_rows() -> Any:
        sample = open_sample(store, x_columns=x, y_columns=y)
        return sample if hold_out is None else sample.split(hold_out, section.fold_by)[0]

    if dry_run:
        result = plan_of_fit(open_rows, section, compute)
        tables.show(result, tables.plan_tables(result), as_json)
        return
    if out is None:
        raise click.UsageError("Missing option '--out'.")
    result = fit_and_save(open_rows, section, compute, out, overwrite, kept)
    if "shard" in result:
        click.echo(json.dumps(result) if as_json else result["shard"])
        return
    tables.show(result, tables.fit_tables(result), as_json)


@cli.command(
    short_help="Conditional means and probabilities of a model.",
    epilog=examples(
        'cme-dask expect m.zarr --given TEMP=20,DEWP=5 --of "PM2.5 > 75"',
        "cme-dask expect m.zarr --points weather.csv --json",
    ),
)
@click.argument("model")
@click.option(
    "--given", multiple=True, metavar="COLUMN=VALUE,...", help="A point, such as TEMP=20,DEWP=5."
)
@click.option(
    "--points",
    type=click.Path(path_type=Path, dir_okay=False),
    help="CSV file of points with the column names in its header.",
)
@click.option(
    "--of", "functions", multiple=True, help="Column or event; repeatable.  [default: all]"
)
@click.option("--reverse", is_flag=True, help="E[f(x) | y] instead of E[f(y) | x].")
@click.option("--std/--no-std", default=True, help="Standard errors.  [default: with]")
@json_option
def expect(
    model: str,
    given: tuple[str, ...],
    points: Path | None,
    functions: tuple[str, ...],
    reverse: bool,
    std: bool,
    as_json: bool,
) -> None:
    """Conditional means and probabilities E[f | x] of a saved MODEL, with standard errors."""
    from cme_dask.cli import tables
    from cme_dask.cli.query import answer

    result = answer(model, given, points, functions, reverse=reverse, std=std)
    tables.show(result, tables.expectation_tables(result), as_json)


@cli.command(
    short_help="Fit low-rank kernel features of x, and save them.",
    epilog=examples(
        "cme-dask features s.zarr --out features.model --tol 1e-3",
        "cme-dask transform s.zarr --model features.model --out features.zarr",
    ),
)
@click.argument("store")
@click.option("--out", required=True, type=output, metavar="PATH", help="Model to make (a folder).")
@click.option("--x", type=columns, help="Columns of x to use.  [default: all]")
@click.option(
    "--length-scale",
    type=numbers,
    metavar="NUMBER,...",
    help="Of the Gaussian kernel: one, or one per column, in its unit.  [default: by the median "
    "heuristic]",
)
@click.option(
    "--tol", type=float, default=TOL, show_default=True, help="Relative trace error, in (0, 1)."
)
@click.option("--max-rank", type=int, help="Most features.  [default: as tol needs]")
@click.option(
    "--basis",
    type=click.Choice(["newton", "spectral"]),
    default="newton",
    show_default=True,
    help="Features: Newton basis, or uncorrelated and ordered by variance.",
)
@click.option(
    "--sample-size",
    type=count,
    default=SAMPLE_SIZE,
    show_default=True,
    help="Rows from which pivots are chosen.",
)
@checkpoint_options
@compute_options
@overwrite_option
@json_option
def features(
    store: str,
    out: Path,
    x: tuple[str, ...] | None,
    length_scale: tuple[float, ...] | None,
    tol: float,
    max_rank: int | None,
    basis: str,
    sample_size: int,
    kept: Any,
    compute: Any,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Fit features of x in STORE (path or URL) by pivoted Cholesky in one pass, and save them.

    Inner products of features are kernel values up to the trace error: ridge regression, PCA or
    k-means on them are those of the kernel.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.fitting import fit_features
    from cme_dask.estimators.cholesky import PivotedCholesky
    from cme_dask.kernels import Gaussian

    scales = length_scale if length_scale is None or len(length_scale) > 1 else length_scale[0]
    estimator = PivotedCholesky(
        None if scales is None else Gaussian(scales),
        tol=tol,
        max_rank=max_rank,
        basis=basis,
        sample_size=sample_size,
    )
    result = fit_features(estimator, store, x, compute, out, overwrite, kept)
    tables.show(result, tables.feature_fit_tables(result), as_json)


@cli.command(
    short_help="Write the features of a store's rows to a new store.",
    epilog=examples(
        "cme-dask transform s.zarr --model features.model --out features.zarr --dtype float32",
    ),
)
@click.argument("store")
@click.option("--model", required=True, metavar="PATH", help="Model of `cme-dask features`.")
@click.option("--out", required=True, type=output, metavar="PATH", help="Store to make (a folder).")
@chunk_option
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32"]),
    default="float64",
    show_default=True,
    help="Type of the features; float32 takes half the disk space.",
)
@compute_options
@overwrite_option
@json_option
def transform(
    store: str,
    model: str,
    out: Path,
    chunk_rows: int | None,
    dtype: str,
    compute: Any,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the features of all rows in STORE (path or URL) to a new sample store.

    Its x are the features; y, weights and the row sample are the source's, so that anything that
    reads a sample store can be fitted on it. Rows stream through in one pass.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.fitting import transform_store

    result = transform_store(
        store,
        model,
        out,
        chunk_rows=chunk_rows,
        dtype=dtype,
        compute=compute,
        overwrite=overwrite,
    )
    tables.show(result, tables.transform_tables(result), as_json)


# The command that learns kernels and keeps the trace of the search


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
    from cme_dask.cli import tables
    from cme_dask.cli.fitting import tune as run
    from cme_dask.cli.plots import tuning_facts, tuning_tables
    from cme_dask.cli.schema import FitSection, checked
    from cme_dask.passes.sources import open_sample

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


# The commands that add rows to models: of a store, or of other models


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
    from cme_dask.cli import tables
    from cme_dask.cli.growing import merge_models

    result = merge_models(models, out, overwrite)
    tables.show(result, tables.model_tables(result), as_json)


@cli.command(
    short_help="Add the rows of a store to a model, in one pass over them alone.",
    epilog=examples(
        "cme-dask grow jan.model feb.zarr --out both.model",
        "cme-dask grow jan.model feb.zarr --alone --out feb.model",
    ),
)
@click.argument("model")
@click.argument("store")
@click.option("--out", type=output, required=True, metavar="PATH", help="Model to make.")
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
    alone: bool,
    first_row: int | None,
    compute: Any,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Add the rows of STORE (path or URL) to MODEL; the result is the model of all rows.

    Kernels, pivots, cells, folds, constraint, ridge and events are those of MODEL.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.growing import grow_model

    if first_row is not None and not alone:
        raise click.UsageError("--first-row belongs to --alone: other rows follow those of MODEL")
    result = grow_model(
        model,
        store,
        out,
        compute,
        alone=alone,
        first_row=first_row or 0,
        overwrite=overwrite,
    )
    tables.show(result, tables.model_tables(result), as_json)
