"""A job from start to end: sample, fit, save, score, compare with the nearest rows, report."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cme_dask.cli import plots
from cme_dask.cli.compute import CheckpointOptions, Compute, prepare_folder
from cme_dask.cli.describe import describe_ingest
from cme_dask.cli.fitting import describe_fit, fit_sample, result_of
from cme_dask.cli.plots import (
    curves_picture,
    evaluation_picture,
    evaluation_tables,
    reliability_picture,
    tuning_picture,
    tuning_tables,
)
from cme_dask.cli.points import Questions, along_curves, compare, nearest
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.schema import IngestSection, Job, SampleSection
from cme_dask.cli.scoring import evaluate
from cme_dask.data import model_file, writer
from cme_dask.data.atomic import PICTURE, disk_errors, json_file, withdraw, write_json, writing
from cme_dask.models import plots as drawing
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.held_out import like_fit
from cme_dask.passes.sources import open_sample

Result = dict[str, Any]

OUTPUTS = {
    "sample": "sample.zarr",
    "model": "model.zarr",
    "report": "report.json",
    "picture": "report.png",
    "search": "tuning.png",
    "scores": "scores.png",
    "reliability": "reliability.png",
    "laws": "laws.png",
}
REPORT = json_file("job")

_KINDS = {
    **{name: PICTURE for name in OUTPUTS.values() if name.endswith(".png")},
    "sample.zarr": writer.OUTPUT,
    "model.zarr": model_file.OUTPUT,
    "report.json": REPORT,
}


def run_job(
    job: Job,
    data: Path,
    out: Path,
    *,
    compute: Compute,
    overwrite: bool,
    progress: ProgressLines,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 - frozen
) -> Result:
    """Do all of a job; everything it writes goes to ``out`` under fixed names.

    With a checkpoint, the sample that an earlier start of the same run has made is used again, the
    fit continues from its partial sums, and the report of a complete run is returned as it is.

    Returns
    -------
    The content of the report file.

    Raises
    ------
    DataError
        If outputs exist already, before any work, or the job does not fit its data.
    StoreError
        If the checkpoint is damaged, or of another run.
    """
    begin = time.perf_counter()
    questions = Questions.of(job)
    checkpoint.check()
    paths = {key: out / name for key, name in OUTPUTS.items()}
    run = _run_of(job, data, out, checkpoint)
    made = result_of(paths["report"], run) if checkpoint.has_made(paths["model"], run) else None
    if made is not None:
        checkpoint.finish_own(run)
        return made
    origin = checkpoint.noted(run)
    if not paths["sample"].exists():
        origin = None
    overwrite = overwrite or origin is not None  # what lies there is of this run
    beside = {"--report": compute.report, "--checkpoint": checkpoint.folder}
    prepare_folder(out, OUTPUTS.values(), overwrite, _KINDS, beside)
    if origin is None:
        origin = _make_sample(job, data, paths["sample"], overwrite, progress)
        checkpoint.note(run, origin)
    else:
        progress.say(f"{paths['sample']} is complete: this run has made it before")
    sample = open_sample(paths["sample"])
    questions = questions.with_labels(sample, job.fit)
    held_out = None
    if job.evaluate is not None:
        held = job.evaluate
        sample, held_out = sample.split(held.hold_out, job.fit.fold_by, held.seed)
    with compute.open() as scheduler:
        estimator, memory = fit_sample(sample, job.fit, scheduler, compute, progress, checkpoint)
        model: Any = estimator.model_  # of embeddings only the scores are reported
        fit = describe_fit(estimator, memory, str(paths["model"]))
        checkpoint.write(model, paths["model"], overwrite, run)
        sample = like_fit(sample, model, model.x.columns)
        if held_out is not None:
            held_out = like_fit(held_out, model, model.x.columns)
        executor = RunOptions(scheduler, compute.workers, compute.memory_limit).executor()
        points = questions.rows(model)
        near = nearest(questions, points, job.report.nearest, sample, executor)
        scores = None
        if job.evaluate is not None and held_out is not None:
            parts = sample, held_out.fold_by(job.fit.fold_by)
            scores = evaluate(model, parts, questions.events, job.evaluate, executor, progress)
    result = {
        "title": job.title,
        **origin,
        "fit": fit,
        "tuning": model.about.get("tuning"),
        "evaluation": scores,
        "fold_by": job.fit.fold_by,
        **compare(job, questions, model, points, near, scores["reliability"] if scores else {}),
        "curves": along_curves(questions, model),
        "units": {k: v for columns in sample.columns for k, v in columns.units.items()},
        "outputs": {name: str(path) for name, path in paths.items()},
    }
    for key, path in _pictures(result, paths, overwrite, progress).items():
        result["outputs"][key] = path
    result["seconds"] = time.perf_counter() - begin
    marked = result if run is None else {**result, "run": run}
    write_json(paths["report"], REPORT, marked, overwrite=overwrite)
    checkpoint.finish()
    return result


def _run_of(job: Job, data: Path, out: Path, checkpoint: CheckpointOptions) -> str | None:
    """The fingerprint of a job on its input files; None without a checkpoint."""
    if checkpoint.folder is None:
        return None
    depends_on: dict[str, Any] = {"job": job.model_dump_json(), "out": str(out.resolve())}
    if job.ingest is not None:
        from cme_dask.data.ingest import find_sources

        sources = find_sources(_files(job.ingest, data))
        depends_on["files"] = [(source.name, source.fingerprint()) for source in sources]
    return checkpoint.run_of("run", depends_on)


def _files(section: IngestSection, data: Path) -> list[str]:
    return [file if "://" in file else str(data / file) for file in section.files]


def _make_sample(
    job: Job, data: Path, path: Path, overwrite: bool, progress: ProgressLines
) -> Result:
    if job.ingest is not None:
        return {"ingest": _ingest(job.ingest, data, path, overwrite, progress)}
    assert job.sample is not None
    return {"sample": _generate(job.sample, path, overwrite, progress)}


def _ingest(
    section: IngestSection, data: Path, path: Path, overwrite: bool, progress: ProgressLines
) -> Result:
    from cme_dask.data.ingest import ingest

    report = ingest(
        _files(section, data),
        path,
        **section.model_dump(exclude={"files"}),
        resume=True,
        overwrite=overwrite,
        progress=progress.ingest,
    )
    progress.say(f"ingested {report.rows_kept:,} of {report.rows_read:,} rows")
    return describe_ingest(report, section.units)


def _generate(
    section: SampleSection, path: Path, overwrite: bool, progress: ProgressLines
) -> Result:
    from cme_dask.data.generate import write_normal3

    write_normal3(
        path,
        section.rows,
        scenario=section.scenario,
        seed=section.seed,
        overwrite=overwrite,
        progress=progress.counter("generate", section.rows),
    )
    progress.say(f"generated {section.rows:,} rows")
    return {"store": str(path), **section.model_dump()}


def _pictures(
    result: Result, paths: dict[str, Path], overwrite: bool, progress: ProgressLines
) -> dict[str, str | None]:
    """Draw the pictures, and remove those of an earlier run, which would be wrong."""
    columns = result["fit"]["variables"]
    names = [name for key in "xy" for name in columns[key]["columns"]]
    drawings: dict[str, tuple[bool, Callable[[Path], None]]] = {
        "picture": (bool(result["points"]), partial(plots.points_picture, result)),
        "search": (
            result["tuning"] is not None,
            partial(tuning_picture, result["tuning"], names),
        ),
        "scores": (
            result["evaluation"] is not None,
            partial(evaluation_picture, result["evaluation"]),
        ),
        "reliability": (
            bool(result["evaluation"] and result["evaluation"]["reliability"]),
            partial(reliability_picture, result),
        ),
        "laws": (bool(result["curves"]), partial(curves_picture, result)),
    }
    written: dict[str, str | None] = {}
    for key, (requested, draw) in drawings.items():
        written[key] = str(paths[key]) if requested and drawing.available() else None
        if written[key] is None:
            withdraw(paths[key], PICTURE)
            continue
        with writing(paths[key], PICTURE, overwrite=overwrite) as aside, disk_errors(paths[key]):
            draw(aside)
    if not drawing.available():
        progress.say(f"no pictures: {drawing.MISSING}")
    return written


def job_tables(result: Result) -> Iterator[Any]:
    """All tables of a job's result."""
    from cme_dask.cli import tables

    if "ingest" in result:
        yield from tables.ingest_tables(result["ingest"])
        yield ""
    if result["tuning"] is not None:
        yield from tuning_tables({**result["fit"], "tuning": result["tuning"]})
    yield from tables.fit_tables(result["fit"])
    if result["evaluation"] is not None:
        yield ""
        yield from evaluation_tables(result["evaluation"])
    if result["points"]:
        yield from tables.point_tables(result)
    yield ""
    written = [path for path in result["outputs"].values() if path]
    yield tables.facts("Written", [("", path) for path in written])
