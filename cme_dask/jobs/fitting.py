"""The fit that ``cme-dask fit``, ``run`` and ``demo`` share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cme_dask.chunked.clusters import Scheduler
from cme_dask.chunked.memory import MemoryPlan
from cme_dask.constraints import parse
from cme_dask.errors import DataError, ShardDone
from cme_dask.estimators.joint import JointDistribution
from cme_dask.jobs.compute import Compute
from cme_dask.jobs.kept import Kept
from cme_dask.jobs.schema import FitSection
from cme_dask.learning.candidates import Tuning
from cme_dask.models.events import Event
from cme_dask.report.memory import PeakMemory
from cme_dask.report.progress import ProgressLines
from cme_dask.storage.atomic import check_output
from cme_dask.storage.columns import Columns
from cme_dask.storage.sample import Sample


def events_of(
    columns: tuple[Columns, Columns], options: FitSection
) -> tuple[dict[str, Event], dict[str, Event]]:
    """Functions of x and of y by the text of the event, for these columns of x and y.

    Raises
    ------
    DataError
        If an event has an unknown form, column or label.
    """
    x, y = columns
    return (
        {text: Event.parse(text, x.names, x.categories) for text in options.events_x},
        {text: Event.parse(text, y.names, y.categories) for text in options.events},
    )


def columns_of(sample: Sample) -> tuple[Columns, Columns]:
    """Columns of x and of y.

    Raises
    ------
    DataError
        If there is no y.
    """
    if len(sample.columns) != 2:
        raise DataError(f"{sample.location} holds no y: a joint distribution needs x and y")
    x, y = sample.columns
    return x, y


def estimator_of(columns: tuple[Columns, Columns], options: FitSection) -> JointDistribution:
    """Return the estimator with these parameters for these columns of x and y.

    Raises
    ------
    DataError
        If a kernel doesn't fit its columns.
    """
    kernel_x, kernel_y = options.kernels(columns)
    return JointDistribution(
        kernel_x=kernel_x,
        kernel_y=kernel_y,
        tol=options.tol,
        max_rank=options.max_rank,
        reg=options.reg,
        reg_form=options.reg_form,
        constraint=parse(options.constraint),
        pivots=options.pivots,
        span=options.span,
        accuracy=options.accuracy,
        sample_size=options.sample_size,
        n_folds=options.folds,
        residual=options.residual,
        calibration=options.calibration,
        tuning=Tuning(**options.tuning) if options.tuning else None,
    )


def fit_sample(
    sample: Sample,
    options: FitSection,
    scheduler: Scheduler,
    compute: Compute,
    progress: ProgressLines,
    kept: Kept = Kept(),  # noqa: B008 - frozen
) -> tuple[JointDistribution, PeakMemory]:
    """Fit, show the progress, and watch the memory."""
    columns = columns_of(sample)
    functions_x, functions = events_of(columns, options)
    estimator = estimator_of(columns, options)
    with PeakMemory(scheduler) as memory:
        estimator.fit(
            sample.fold_by(options.fold_by),
            functions=functions,
            functions_x=functions_x,
            scheduler=scheduler,
            workers=compute.workers,
            memory_limit=compute.memory_limit,
            progress=progress.fit,
            checkpoint=kept.folder,
            shard=kept.shard,
        )
    report = estimator.report_
    progress.say(
        f"fitted {report.rows:,} rows in {report.seconds:.3g} s, "
        f"{report.rows_per_second:,.0f} rows/s"
    )
    return estimator, memory


def describe_fit(estimator: JointDistribution, memory: PeakMemory, model: str) -> dict[str, Any]:
    """JSON form of what a fit did."""
    report, about = estimator.report_, estimator.model_.about
    bases = {"x": estimator.basis_x_, "y": estimator.basis_y_}
    variables = {"x": estimator.model_.x, "y": estimator.model_.y}
    return {
        "model": model,
        "rows": report.rows,
        "variables": {
            name: {
                "columns": list(variables[name].columns.names),
                "rank": basis.rank,
                "ranks": list(basis.ranks),
                "functions": variables[name].basis.rank,
                "trace_error": basis.trace_error,
                "kernel": repr(basis.newton.kernel),
            }
            for name, basis in bases.items()
        },
        "passes": estimator.n_passes_,
        "arithmetic": estimator.arithmetic_.name,
        "strips": report.strips,
        "tasks": report.tasks,
        "resumed_strips": report.resumed_strips,
        "seconds": report.seconds,
        "rows_per_second": report.rows_per_second,
        "pass_seconds": report.pass_seconds,
        "pass_rows_per_second": report.pass_rows_per_second,
        "tenths": list(report.tenths),
        "memory": describe_memory(report.memory, memory),
        "constraint": about["constraint"],
        "status": estimator.solution_.status,
        "kkt_residual": estimator.solution_.kkt_residual,
        "negative_mass": about["negative_mass"],
        "held_out": about["held_out"],
        "calibration": estimator.model_.answering.about.get("calibration"),
    }


def describe_memory(plan: MemoryPlan, memory: PeakMemory) -> dict[str, Any]:
    """JSON form of the predicted and the measured peak of the place that a run fills most."""
    measured, measure = memory.of(plan.place)
    return {
        "predicted": plan.predicted,
        "limit": plan.limit,
        "place": plan.place,
        "phase": plan.phase,
        "measured": measured,
        "measure": measure,
    }


def fit_and_save(
    open_rows: Callable[[], Sample],
    options: FitSection,
    compute: Compute,
    out: Path,
    overwrite: bool,
    kept: Kept = Kept(),  # noqa: B008 - frozen
) -> dict[str, Any]:
    """Fit, save the model, and describe it; an existing output is refused before any work.

    Of a shard what it has done is described, and no model is made.
    """
    check_output(out, overwrite)
    sample = open_rows()
    events_of(columns_of(sample), options)
    options.kernels(columns_of(sample))
    kept.settle(overwrite)
    with ProgressLines() as progress, compute.open() as scheduler:
        try:
            estimator, memory = fit_sample(sample, options, scheduler, compute, progress, kept)
        except ShardDone as done:
            return {"store": sample.location, "checkpoint": str(kept.folder), "shard": str(done)}
        estimator.save(out, overwrite=overwrite)
        kept.finish()
    return {"store": sample.location, **describe_fit(estimator, memory, str(out))}


def plan_of_fit(
    open_rows: Callable[[], Sample], options: FitSection, compute: Compute
) -> dict[str, Any]:
    """What :func:`fit_and_save` would do and take; nothing is written."""
    sample = open_rows()
    columns = columns_of(sample)
    functions_x, functions = events_of(columns, options)
    estimator = estimator_of(columns, options)
    with ProgressLines() as progress, compute.open() as scheduler:
        plan = estimator.plan(
            sample.fold_by(options.fold_by),
            functions=functions,
            functions_x=functions_x,
            scheduler=scheduler,
            workers=compute.workers,
            memory_limit=compute.memory_limit,
            progress=progress.fit,
        )
    return {"store": sample.location, **plan.to_dict()}
