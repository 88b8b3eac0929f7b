"""The work of the commands that fit: laws, features, searches, more rows, merged models."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from cme_dask.cli.compute import CheckpointOptions, Compute, prepare_folder
from cme_dask.cli.describe import describe, size_on_disk
from cme_dask.cli.plots import tuning_picture
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.run_report import PeakMemory
from cme_dask.cli.schema import FitSection
from cme_dask.cli.values import support_of
from cme_dask.constraints import parse
from cme_dask.data import model_file, writer
from cme_dask.data.atomic import (
    PICTURE,
    check_output,
    disk_errors,
    json_file,
    withdraw,
    write_json,
    writing,
)
from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.display import missing_lines
from cme_dask.errors import DataError, ShardDone
from cme_dask.estimators.cholesky import PivotedCholesky
from cme_dask.estimators.classifiers import EmbeddingClassifier
from cme_dask.estimators.embedding import ConditionalMeanEmbedding
from cme_dask.estimators.joint import JointDistribution, add_rows
from cme_dask.estimators.multiclass import MulticlassEmbedding
from cme_dask.estimators.planning import FitPlan
from cme_dask.estimators.sparse import SparseEmbedding
from cme_dask.models import load_only
from cme_dask.models import plots as drawing
from cme_dask.models.events import Event
from cme_dask.models.joint import JointModel, Variable
from cme_dask.models.merging import merge
from cme_dask.numerics.reduction import MemoryPlan
from cme_dask.passes.cluster import Scheduler
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.sources import open_sample

_TIMES = (
    *("tasks", "resumed_strips", "seconds", "rows_per_second"),
    *("pass_seconds", "pass_rows_per_second"),
)
"""Figures of the report in the JSON form of a fit."""


Estimator: TypeAlias = (
    JointDistribution
    | ConditionalMeanEmbedding
    | SparseEmbedding
    | EmbeddingClassifier
    | MulticlassEmbedding
)

ESTIMATORS: dict[str, Callable[..., Estimator]] = {
    "joint": JointDistribution,
    "embedding": ConditionalMeanEmbedding,
    "sparse": SparseEmbedding,
    "classifier": EmbeddingClassifier,
    "multiclass": MulticlassEmbedding,
}
"""By their names in job files."""

CLASSIFIERS = "classifier", "multiclass"
"""Those of them that take one column of labels as y."""


# The fit that ``cme-dask fit``, ``run`` and ``demo`` share


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


def estimator_of(columns: tuple[Columns, Columns], options: FitSection) -> Estimator:
    """The estimator with these parameters for these columns of x and y.

    Raises
    ------
    DataError
        If it does not take an option, or a kernel doesn't fit its columns.
    """
    kind = ESTIMATORS[options.estimator]
    known = {"folds" if name == "n_folds" else name for name in kind().get_params()}
    given = options.model_fields_set - {"estimator", "events", "fold_by"}
    if kind is JointDistribution:
        given = given - {"events_x"}
    for name in sorted(given - known):
        takes = ", ".join(sorted(known & set(FitSection.model_fields)))
        raise DataError(f"{name}: the estimator {options.estimator} takes {takes}")
    if kind is JointDistribution and isinstance(options.reg, str):
        raise DataError(
            f"reg: the schedule {options.reg} is one of the estimators embedding and sparse; the "
            "estimator joint takes numbers"
        )
    values = {name: getattr(options, name) for name in given}
    if "folds" in values:
        values["n_folds"] = values.pop("folds")
    if "constraint" in values:
        values["constraint"] = parse(values["constraint"])
    if "support" in values:
        values["support"] = support_of(values["support"])
    if values.get("tuning") is not None:
        values["tuning"] = values["tuning"].tuning()
    kernels = dict(zip(("kernel_x", "kernel_y"), options.kernels(columns), strict=True))
    return kind(**values | {name: kernels[name] for name in given & kernels.keys()})


def _declarations(columns: tuple[Columns, Columns], options: FitSection) -> dict[str, Any]:
    """The events as ``fit`` takes them; embeddings have none of x."""
    functions_x, functions = events_of(columns, options)
    of_x = {"functions_x": functions_x} if options.estimator == "joint" else {}
    return {"functions": functions, **of_x}


def fit_sample(
    sample: Sample,
    options: FitSection,
    scheduler: Scheduler,
    compute: Compute,
    progress: ProgressLines,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 - frozen
) -> tuple[Estimator, PeakMemory]:
    """Fit, show the progress, and watch the memory."""
    columns = columns_of(sample)
    estimator = estimator_of(columns, options)
    shard: dict[str, Any] = {} if checkpoint.shard is None else {"shard": checkpoint.shard}
    with PeakMemory(scheduler) as memory:
        estimator.fit(
            sample.fold_by(options.fold_by),
            progress=progress.fit,
            checkpoint=checkpoint.folder,
            **_declarations(columns, options),
            **shard,
            **compute.place(scheduler),
        )
    report = estimator.report_
    progress.say(
        f"fitted {report.rows:,} rows in {report.seconds:.3g} s, "
        f"{report.rows_per_second:,.0f} rows/s"
    )
    for label, text in missing_lines(estimator.model_.about):
        progress.say(f"{label}: {text}")
    return estimator, memory


def describe_fit(estimator: Estimator, memory: PeakMemory, model: str) -> dict[str, Any]:
    """JSON form of a fit: of its solution, or what the model shows and how it was learned."""
    report, metadata = estimator.report_, estimator.model_.about
    if isinstance(estimator, JointDistribution):
        own = {
            "constraint": metadata["constraint"],
            "status": estimator.solution_.status,
            "kkt_residual": estimator.solution_.kkt_residual,
            "negative_mass": metadata["negative_mass"],
            "calibration": estimator.model_.answering.about.get("calibration"),
        }
    else:
        own = {"summary": estimator.model_.summary()}
        if "bound" in metadata:
            own["bound"] = metadata["bound"]
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
        **_describe_report(report, memory),
        "strips": report.strips,
        "tenths": list(report.tenths),
        "missing": metadata.get("missing"),
        "held_out": getattr(estimator.model_, "held_out", metadata["held_out"]),
        **own,
    }


def _describe_report(report: Any, memory: PeakMemory) -> dict[str, Any]:
    return {
        **{key: getattr(report, key) for key in _TIMES},
        "memory": describe_memory(report.memory, memory),
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


@dataclass(frozen=True)
class TrainingRows:
    """Rows of a store that a fit sees.

    Parameters
    ----------
    store
        Path or URL.
    x, y
        Columns to use; None for all.
    hold_out
        Share of the units of ``fold_by`` that is held out; None for none.
    """

    store: str
    x: Sequence[str] | None = None
    y: Sequence[str] | None = None
    hold_out: float | None = None

    def open(self, options: FitSection) -> Sample:
        """The rows, checked against events and kernels; DataError if they don't fit."""
        sample = open_sample(self.store, x_columns=self.x, y_columns=self.y)
        events_of(columns_of(sample), options)
        options.kernels(columns_of(sample))
        return sample if self.hold_out is None else sample.split(self.hold_out, options.fold_by)[0]


def fit_and_save(
    rows: TrainingRows,
    options: FitSection,
    compute: Compute,
    out: Path,
    overwrite: bool,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 - frozen
) -> dict[str, Any]:
    """Fit, save the model, and describe it; an existing output is refused before any work.

    A shard makes no model: its description says which share it has computed. With a checkpoint, a
    model that the same run has made before is described, and nothing is done.
    """
    checkpoint.check()
    check_output(out, model_file.OUTPUT, overwrite or checkpoint.folder is not None)
    sample = rows.open(options)
    run = checkpoint.run_of("fit", {"options": options.model_dump_json()}, sample)
    if checkpoint.is_complete(out, run):
        return _complete(sample, out)
    check_output(out, model_file.OUTPUT, overwrite)
    with ProgressLines() as progress, compute.open() as scheduler:
        try:
            estimator, memory = fit_sample(
                sample, options, scheduler, compute, progress, checkpoint
            )
        except ShardDone as done:
            return {
                "store": sample.location,
                "checkpoint": str(checkpoint.folder),
                "shard": done.for_command,
            }
        checkpoint.save(estimator.model_, out, overwrite, run)
    return {"store": sample.location, **describe_fit(estimator, memory, str(out))}


def _complete(sample: Sample, out: Path) -> dict[str, Any]:
    """JSON form of an output that an earlier start of the same run has completed."""
    with ProgressLines() as progress:
        progress.say(f"{out} is complete: this run has made it before")
    return {"store": sample.location, "complete": True, **describe(str(out))}


def plan_of_fit(rows: TrainingRows, options: FitSection, compute: Compute) -> tuple[str, FitPlan]:
    """The location of the rows and the plan of :func:`fit_and_save`; nothing is written."""
    sample = rows.open(options)
    columns = columns_of(sample)
    estimator = estimator_of(columns, options)
    with ProgressLines() as progress, compute.open() as scheduler:
        plan = estimator.plan(
            sample.fold_by(options.fold_by),
            progress=progress.fit,
            **_declarations(columns, options),
            **compute.place(scheduler),
        )
    return sample.location, plan


# ``cme-dask features`` and ``cme-dask transform``


Result = dict[str, Any]


def fit_features(
    estimator: PivotedCholesky,
    store: str,
    x: Sequence[str] | None,
    compute: Compute,
    out: Path,
    overwrite: bool,
    checkpoint: CheckpointOptions,
) -> Result:
    """Fit features of the x of a store, save them, and describe the fit."""
    checkpoint.check()
    check_output(out, model_file.OUTPUT, overwrite or checkpoint.folder is not None)
    sample = open_sample(store, x_columns=x)
    run = checkpoint.run_of("features", estimator.get_params(), sample)
    if checkpoint.is_complete(out, run):
        return _complete(sample, out)
    check_output(out, model_file.OUTPUT, overwrite)
    with ProgressLines() as progress, compute.open() as scheduler:
        with PeakMemory(scheduler) as memory:
            estimator.fit(
                sample,
                progress=progress.fit,
                checkpoint=checkpoint.folder,
                **compute.place(scheduler),
            )
        checkpoint.save(estimator.model_, out, overwrite, run)
        report = estimator.report_
        progress.say(f"fitted {report.rows:,} rows in {report.seconds:.3g} s")
    model = estimator.model_
    return {
        "store": store,
        "model": str(out),
        "rows": report.rows,
        "columns": list(model.columns.names),
        "basis": model.kind,
        "rank": model.rank,
        "trace_error": model.trace_error,
        "kernel": repr(model.kernel),
        "passes": estimator.n_passes_,
        **_describe_report(report, memory),
    }


def transform_store(
    store: str,
    model: str,
    out: Path,
    *,
    chunk_rows: int | None,
    dtype: str,
    compute: Compute,
    overwrite: bool,
) -> Result:
    """Write the features of the rows of a store to a new store, and describe the result."""
    check_output(out, writer.OUTPUT, overwrite)
    features = PivotedCholesky.load(model)
    with ProgressLines() as progress, compute.open() as scheduler, PeakMemory(scheduler) as memory:
        report = features.transform_store(
            store,
            out,
            chunk_rows=chunk_rows,
            dtype=dtype,
            overwrite=overwrite,
            progress=progress.rows_of("transform"),
            **compute.place(scheduler),
        )
        progress.say(
            f"transformed {report.rows:,} rows in {report.seconds:.3g} s, "
            f"{report.rows_per_second:,.0f} rows/s"
        )
    return {
        "store": store,
        "model": model,
        "out": str(out),
        "rows": report.rows,
        "rank": report.rank,
        "basis": features.model_.kind,
        "dtype": report.dtype,
        "chunk_rows": report.chunk_rows,
        "bytes": size_on_disk(out),
        "passes": report.passes,
        "tasks": report.tasks,
        "seconds": report.seconds,
        "rows_per_second": report.rows_per_second,
        "memory": describe_memory(report.memory, memory),
    }


# ``cme-dask tune``: kernels, ridge and the trace of their search


OUTPUTS = {"model": "model.zarr", "trace": "tuning.json", "picture": "tuning.png"}
TRACE = json_file("search for kernels")

_KINDS = {"model.zarr": model_file.OUTPUT, "tuning.json": TRACE, "tuning.png": PICTURE}


def tune(
    rows: TrainingRows,
    options: FitSection,
    compute: Compute,
    out: Path,
    overwrite: bool,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 - frozen
) -> Result:
    """Learn kernels, fit, and write model, trace and picture into a folder.

    With a checkpoint, outputs that an earlier start of the same run has made are described, or
    replaced where it did not come to the last of them.

    Raises
    ------
    DataError
        If both kernels are given, or outputs exist.
    """
    if None not in (options.kernel_x, options.kernel_y):
        raise DataError("both kernels are given: there is nothing to tune")
    checkpoint.check()
    paths = {key: out / name for key, name in OUTPUTS.items()}
    sample = rows.open(options)
    run = checkpoint.run_of("tune", {"options": options.model_dump_json()}, sample)
    if checkpoint.has_made(paths["model"], run):
        if (made := result_of(paths["trace"], run)) is not None:
            checkpoint.finish_own(run)
            return made
        overwrite = True
    beside = {"--report": compute.report, "--checkpoint": checkpoint.folder}
    prepare_folder(out, OUTPUTS.values(), overwrite, _KINDS, beside)
    with ProgressLines() as progress, compute.open() as scheduler:
        estimator, memory = fit_sample(sample, options, scheduler, compute, progress, checkpoint)
        checkpoint.write(estimator.model_, paths["model"], overwrite, run)
        fit = describe_fit(estimator, memory, str(paths["model"]))
        tuning = estimator.model_.about["tuning"]
        result = {"store": sample.location, **fit, "tuning": tuning}
        result["outputs"] = {key: str(path) for key, path in paths.items()}
        result["outputs"]["picture"] = draw(result, paths["picture"], overwrite, progress)
    made = result if run is None else {**result, "run": run}
    write_json(paths["trace"], TRACE, made, overwrite=overwrite)
    checkpoint.finish()
    return result


def result_of(written: Path, run: str | None) -> Result | None:
    """What the trace or report of this run says; None if it is of another one, or none is there."""
    try:
        made = json.loads(written.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(made, dict) or made.get("run") != run:
        return None
    with ProgressLines() as progress:
        progress.say(f"{written.parent} is complete: this run has made it before")
    return {**made, "complete": True}


def draw(result: Result, path: Path, overwrite: bool, progress: ProgressLines) -> str | None:
    """The picture of a search, where it can be drawn."""
    if not drawing.available():
        progress.say(f"no picture: {drawing.MISSING}")
        withdraw(path, PICTURE)  # that of an earlier run would be wrong
        return None
    names = [name for key in "xy" for name in result["variables"][key]["columns"]]
    with writing(path, PICTURE, overwrite=overwrite) as aside, disk_errors(path):
        tuning_picture(result["tuning"], names, aside)
    return str(path)


# ``cme-dask grow``: the rows of a store, added to a saved model or fitted with its pivots


def grow_model(
    model: str,
    store: str,
    out: Path,
    compute: Compute,
    *,
    alone: bool = False,
    first_row: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Add the rows of a store to a model, see :meth:`JointDistribution.partial_fit`.

    Parameters
    ----------
    model
        Path or URL; its events are those of the new rows.
    store
        The new rows.
    out
        Folder to write.
    compute
        Where to run.
    alone
        A model of the new rows alone, for merging, with the pivots and cells of the other.
    first_row
        With ``alone``, the number of the first row in the table that all parts make.
    overwrite
        Whether ``out`` may replace an earlier output.

    Raises
    ------
    DataError, StoreError, ResourceError, ConvergenceError
        As ``partial_fit``; and if the model has functions other than events.
    """
    check_output(out, model_file.OUTPUT, overwrite)
    earlier = load_only(JointModel, model)
    sample = open_sample(store)
    with ProgressLines() as progress, compute.open() as scheduler:
        functions = {
            "functions_x": _events(earlier.x, earlier.y),
            "functions": _events(earlier.y, earlier.x),
        }
        options = RunOptions(scheduler, compute.workers, compute.memory_limit, progress.fit)
        alone_from = first_row if alone else None
        result, report = add_rows(earlier, sample, functions, options, alone_from)
    result.save(out, overwrite=overwrite)
    return {
        "model": model,
        "store": sample.location,
        "added": report.rows,
        "added_trace_error": result.about["new_rows"].get("trace_error"),
        "seconds": report.seconds,
        "rows_per_second": report.rows_per_second,
        **describe(str(out)),
    }


def _events(here: Variable, other: Variable) -> dict[str, Event]:
    """The functions of a variable, which the other one answers for, from their names."""
    columns = here.columns
    names = other.answers.names[len(columns.names) :]
    try:
        return {name: Event.parse(name, columns.names, columns.categories) for name in names}
    except DataError as error:
        raise DataError(
            f"the model was fitted with functions that are no events ({error}): add rows in "
            "Python, JointDistribution().partial_fit(..., like=model, functions=...), and merge"
        ) from error


# ``cme-dask merge``: the model of all rows from models of its parts


def merge_models(models: Sequence[str], out: Path, overwrite: bool) -> dict[str, Any]:
    """Merge saved models, see :func:`cme_dask.merge`, and describe the result.

    Raises
    ------
    DataError, StoreError, ResourceError
        If models are missing, damaged or different, or the output can't be written.
    """
    if len(models) < 2:
        raise DataError(f"merging takes at least two models, got {len(models)}")
    check_output(out, model_file.OUTPUT, overwrite)
    merge(models).save(out, overwrite=overwrite)
    return {"merged": list(models), **describe(str(out))}
