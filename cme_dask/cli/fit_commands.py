"""The commands fit, expect, features, transform, tune, merge and grow: their options."""

from pathlib import Path
from typing import Any

import click

from cme_dask.cli.app import cli
from cme_dask.cli.options import (
    Shown,
    checkpoint_options,
    chunk_option,
    compute_options,
    device_options,
    examples,
    functions_option,
    hold_out_option,
    json_option,
    out_option,
    overwrite_option,
    point_options,
    section_options,
    shard_options,
    x_option,
    y_option,
)
from cme_dask.cli.values import kernel, numbers, row_number, source
from cme_dask.config import TOL

# Joint laws and features


@cli.command(
    short_help="Fit a joint distribution in one pass, and save it.",
    epilog=examples(
        'cme-dask fit s.zarr --out m.zarr --event "PM2.5 > 75" --max-rank 300',
        "cme-dask fit s.zarr --dry-run --max-rank 300",
        "cme-dask fit s.zarr --out m.zarr --kernel median --max-rank 300",
        "cme-dask fit s.zarr --out m.zarr --kernel-x gaussian:TEMP=8,DEWP=10 --kernel-y laplace:30",
        "cme-dask fit s.zarr --out m.zarr --fold-by 7d --hold-out 0.2",
        "cme-dask fit s.zarr --out m.zarr --scheduler tcp://10.0.0.1:8786 --memory-limit 2GB",
        "cme-dask fit s.zarr --out m.zarr --location PM2.5_forecast",
        "cme-dask fit s.zarr --out m.zarr --checkpoint run",
    ),
)
@click.argument("store")
@out_option("Model to make (a folder).  [required]", required=False)
@x_option
@y_option
@section_options("FitSection", "estimator", "events", "events_x")
@click.option(
    "--kernel",
    type=kernel,
    metavar="KERNEL",
    help="Kernel of x and of y: learned, median (Gaussian by the median heuristic, many times "
    "faster), or as --kernel-x.  [default: learned]",
)
@section_options("FitSection", "kernel_x", "kernel_y")
@section_options("TuningSection", "averaged")
@section_options("FitSection", "tol", "max_rank", "reg", "reg_form", "constraint", "folds")
@section_options("FitSection", "validation", "fold_by")
@hold_out_option
@section_options("FitSection", "pivots", "span", "residual", "location")
@section_options("FitSection", "support")
@section_options("FitSection", "calibration", "conformal", "conformal_by")
@click.option(
    "--growing",
    is_flag=True,
    help="Use only the best of the learned kernels, and no residuals, so that `grow` and `merge` "
    "accept the model.",
)
@section_options("FitSection", "missing", "accuracy", "sample_size")
@section_options("FitSection", "penalty", "gamma", "gamma_ratio", "relax")
@section_options("FitSection", "batch_size", "max_iter", "learning_rate", "complexity_weight")
@section_options("FitSection", "class_weight")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only predict ranks, passes, seconds by part and peak memory, from the row sample and "
    "three strips of the pass computed on each worker; --out is not needed.",
)
@shard_options
@compute_options
@device_options
@overwrite_option
@json_option
def fit(
    store: str,
    out: Path | None,
    x: tuple[str, ...] | None,
    y: tuple[str, ...] | None,
    given: dict[str, Any],
    kernel: str | None,
    hold_out: float | None,
    growing: bool,
    dry_run: bool,
    checkpoint: Any,
    compute: Any,
    overwrite: bool,
) -> Shown:
    """Fit the joint distribution of x and y in STORE (path or URL) in one pass, and save it.

    With --estimator it is a conditional mean embedding, or a classifier of a column of labels;
    `expect` and `predict` query either.
    Kernels, length scales and ridge are learned unless they are given; `cme-dask tune` saves the
    trace of their search.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.fitting import TrainingRows, fit_and_save, plan_of_fit
    from cme_dask.cli.schema import FitSection, checked

    averaged = given.pop("averaged", None)
    kernels = ["kernel_x"] if given.get("estimator") == "multiclass" else ["kernel_x", "kernel_y"]
    options = {**(dict.fromkeys(kernels, kernel) if kernel else {}), **given}
    learned = any(options.get(key) in (None, "learned") for key in kernels)
    if averaged is not None:
        if not learned:
            raise click.UsageError("--averaged is for learned kernels: leave it or a kernel out")
        options["tuning"] = {"averaged": averaged}
    if growing:
        if averaged not in (None, 1):
            raise click.UsageError("--growing takes one kernel alone: leave --averaged out")
        if options.get("residual") is True:
            raise click.UsageError("--growing takes no residuals: leave --residual out")
        if "location" in options:
            raise click.UsageError("--growing takes no residuals: leave --location out")
        if options.get("support", "auto") != "auto":
            raise click.UsageError("--growing takes no residuals: leave --support out")
        options["residual"] = False
    section = checked(FitSection, options, "")
    rows = TrainingRows(store, x, y, hold_out)
    if dry_run:
        location, plan = plan_of_fit(rows, section, compute)
        result = {"store": location, **plan.to_dict()}
        return result, tables.plan_tables(result)
    if out is None:
        raise click.UsageError("Missing option '--out'.")
    result = fit_and_save(rows, section, compute, out, overwrite, checkpoint)
    if "complete" in result:
        return result, tables.model_tables(result)
    return result, [result["shard"]] if "shard" in result else tables.fit_tables(result)


@cli.command(
    short_help="Conditional means and probabilities of a model.",
    epilog=examples(
        'cme-dask expect m.zarr --given TEMP=20,DEWP=5 --of "PM2.5 > 75"',
        "cme-dask expect m.zarr --points weather.csv --json",
    ),
)
@click.argument("model")
@point_options
@functions_option
@click.option("--reverse", is_flag=True, help="E[f(x) | y] instead of E[f(y) | x].")
@click.option("--std/--no-std", default=True, help="Standard errors.  [default: with]")
@json_option
def expect(**options: Any) -> Shown:
    """Conditional means and probabilities E[f | x] of a saved MODEL, with standard errors.

    Joint distributions and dense embeddings answer the functions that their fit declared. Sparse
    embeddings answer any column or event, without standard errors.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.query import answer

    result = answer(**options)
    return result, tables.expectation_tables(result)


@cli.command(
    short_help="Fit low-rank kernel features of x, and save them.",
    epilog=examples(
        "cme-dask features s.zarr --out features.model --tol 1e-3",
        "cme-dask transform s.zarr --model features.model --out features.zarr",
    ),
)
@click.argument("store")
@out_option("Model to make (a folder).")
@x_option
@click.option(
    "--length-scale",
    type=numbers,
    metavar="NUMBER,...",
    help="Of the Gaussian kernel: one, or one per column, in its unit.  [default: by the median "
    "heuristic]",
)
@section_options("FitSection", "tol", "max_rank", tol=f"{TOL:g}", max_rank="as tol needs")
@click.option(
    "--basis",
    type=click.Choice(["newton", "spectral"]),
    default="newton",
    show_default=True,
    help="Features: Newton basis, or uncorrelated and ordered by variance.",
)
@section_options("FitSection", "sample_size")
@checkpoint_options
@compute_options
@device_options
@overwrite_option
@json_option
def features(
    length_scale: tuple[float, ...] | None,
    basis: str,
    given: dict[str, Any],
    **options: Any,
) -> Shown:
    """Fit features of x in STORE (path or URL) by pivoted Cholesky in one pass, and save them.

    Inner products of features are kernel values up to the trace error: ridge regression, PCA or
    k-means on them are those of the kernel.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.fitting import fit_features
    from cme_dask.estimators.cholesky import PivotedCholesky
    from cme_dask.kernels import Gaussian

    scales = length_scale if length_scale is None or len(length_scale) > 1 else length_scale[0]
    estimator = PivotedCholesky(None if scales is None else Gaussian(scales), basis=basis, **given)
    result = fit_features(estimator, **options)
    kind = tables.model_tables if "complete" in result else tables.feature_fit_tables
    return result, kind(result)


@cli.command(
    short_help="Write the features of a store's rows to a new store.",
    epilog=examples(
        "cme-dask transform s.zarr --model features.model --out features.zarr --dtype float32",
    ),
)
@click.argument("store")
@click.option(
    "--model",
    required=True,
    type=source,
    metavar="PATH",
    help="Model of `cme-dask features`.",
)
@out_option("Store to make (a folder).")
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
def transform(**options: Any) -> Shown:
    """Write the features of all rows in STORE (path or URL) to a new sample store.

    Its x are the features; y, weights and the row sample are the source's, so that anything that
    reads a sample store can be fitted on it. Rows stream through in one pass.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.fitting import transform_store

    result = transform_store(**options)
    return result, tables.transform_tables(result)


# The search for kernels, with its trace


@cli.command(
    short_help="Learn kernels and ridge, fit, and save the trace of the search.",
    epilog=examples(
        'cme-dask tune s.zarr --out tuned --event "PM2.5 > 75" --fold-by 7d --checkpoint run',
        "cme-dask tune s.zarr --out tuned --criterion crps --evaluations 120",
    ),
)
@click.argument("store")
@out_option("Folder for model.zarr, tuning.json, tuning.png.", folder=True)
@x_option
@y_option
@section_options("FitSection", "events", "events_x")
@section_options("TuningSection", "criterion", "rows", "evaluations", "averaged")
@section_options("FitSection", "tol", "max_rank", "reg", "fold_by", max_rank="500", reg="learned")
@section_options("FitSection", "missing")
@hold_out_option
@checkpoint_options
@compute_options
@device_options
@overwrite_option
@json_option
def tune(
    store: str, x: Any, y: Any, given: dict[str, Any], hold_out: float | None, **options: Any
) -> Shown:
    """Learn transforms, length scales and ridge for STORE (path or URL), and fit.

    Kernels are searched on the row sample by cross-validation; the best one is fitted to all
    rows in one pass. With --averaged K the best K are, and their density ratios are averaged.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.fitting import TrainingRows
    from cme_dask.cli.fitting import tune as run
    from cme_dask.cli.plots import tuning_facts, tuning_tables
    from cme_dask.cli.schema import FitSection, TuningSection, checked

    search = {key: given.pop(key) for key in list(given) if key in TuningSection.model_fields}
    section = checked(FitSection, {**given, "tuning": search}, "")
    result = run(TrainingRows(store, x, y, hold_out), section, **options)
    shown = [*tuning_tables(result), *tables.fit_tables(result), "", tuning_facts(result)]
    return result, shown


# More rows: of a store, or of other models


@cli.command(
    short_help="Merge models of parts of the rows into one of all.",
    epilog=examples("cme-dask merge jan.model feb.model mar.model --out quarter.model"),
)
@click.argument("models", metavar="M1 M2...", nargs=-1, required=True)
@out_option("Model to make.")
@overwrite_option
@json_option
def merge(**options: Any) -> Shown:
    """Make the model of all rows from models M1, M2, ... of disjoint rows, without reading any.

    They must have the same columns, kernels, pivots, cells, folds, constraint and ridge, as `grow
    --alone` makes them; what differs is named.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.fitting import merge_models

    result = merge_models(**options)
    return result, tables.model_tables(result)


@cli.command(
    short_help="Add the rows of a store to a model, in one pass over them alone.",
    epilog=examples(
        "cme-dask grow jan.model feb.zarr --out both.model",
        "cme-dask grow jan.model feb.zarr --alone --out feb.model",
    ),
)
@click.argument("model")
@click.argument("store")
@out_option("Model to make.")
@click.option(
    "--alone",
    is_flag=True,
    help="Make a model of the new rows alone, with the pivots and cells of MODEL, to be merged.",
)
@click.option(
    "--first-row",
    type=row_number,
    help="With --alone: number of the first row of STORE in the table of all parts.  [default: 0]",
)
@compute_options
@overwrite_option
@json_option
def grow(alone: bool, first_row: int | None, **options: Any) -> Shown:
    """Add the rows of STORE (path or URL) to MODEL; the result is the model of all rows.

    Kernels, pivots, cells, folds, constraint, ridge and events are those of MODEL.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.fitting import grow_model

    if first_row is not None and not alone:
        raise click.UsageError("--first-row belongs to --alone: other rows follow those of MODEL")
    result = grow_model(alone=alone, first_row=first_row or 0, **options)
    return result, tables.model_tables(result)
