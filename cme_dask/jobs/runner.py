"""Run a job: get the sample, fit, save, compare with the nearest rows, report."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.nearest import Neighbours, nearest_rows
from cme_dask.chunked.sources import open_sample
from cme_dask.errors import DataError
from cme_dask.estimators.joint import JointDistribution
from cme_dask.jobs.describe import describe_ingest
from cme_dask.jobs.events import Event
from cme_dask.jobs.fitting import Compute, describe_fit, events_of, fit_sample
from cme_dask.jobs.folder import prepare_folder
from cme_dask.jobs.schema import IngestSection, Job, SampleSection
from cme_dask.report import plots
from cme_dask.report.progress import ProgressLines
from cme_dask.storage.atomic import disk_errors, writing
from cme_dask.storage.sample import Sample

Array = Any
Result = dict[str, Any]

OUTPUTS = {
    "sample": "sample.zarr",
    "model": "model.zarr",
    "report": "report.json",
    "picture": "report.png",
}


def run_job(
    job: Job,
    data: Path,
    out: Path,
    *,
    compute: Compute,
    overwrite: bool,
    progress: ProgressLines,
) -> Result:
    """Do all of a job; everything it writes goes to ``out`` under fixed names.

    Parameters
    ----------
    job
        What to do.
    data
        Folder that relative input files are relative to.
    out
        Folder of the outputs, made if missing.
    compute
        Where to run.
    overwrite
        Replace earlier outputs.
    progress
        Where to tell the progress.

    Returns
    -------
    The content of the report file.

    Raises
    ------
    DataError
        If outputs exist already, before any work, or the job does not fit its data.
    """
    begin = time.perf_counter()
    plan = _Plan.of(job)
    prepare_folder(out, OUTPUTS.values(), overwrite)
    paths = {key: out / name for key, name in OUTPUTS.items()}
    origin = _make_sample(job, data, paths["sample"], overwrite, progress)
    sample = open_sample(paths["sample"])
    with compute.open() as scheduler:
        estimator, memory = fit_sample(sample, job.fit, scheduler, compute, progress)
        fit = describe_fit(estimator, memory, str(paths["model"]))
        estimator.save(paths["model"], overwrite=overwrite)
        near = _nearest(job, plan, sample, Executor.resolve(scheduler, compute.workers))
    result = {
        "title": job.title,
        **origin,
        "fit": fit,
        **_compare(job, plan, estimator, near),
        "units": {k: v for columns in sample.columns for k, v in columns.units.items()},
        "outputs": {name: str(path) for name, path in paths.items()},
    }
    result["outputs"]["picture"] = _picture(result, paths["picture"], overwrite, progress)
    result["seconds"] = time.perf_counter() - begin
    with writing(paths["report"], overwrite=overwrite) as aside, disk_errors(paths["report"]):
        aside.write_text(json.dumps(result, allow_nan=False, indent=1), encoding="utf-8")
    return result


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
    from cme_dask.storage.csv_files import ingest_csv

    report = ingest_csv(
        [file if "://" in file else str(data / file) for file in section.files],
        path,
        x=section.x,
        y=section.y,
        weights=section.weights,
        missing=section.missing,
        units=section.units,
        overwrite=overwrite,
        progress=progress.ingest,
    )
    progress.say(f"ingested {report.rows_kept:,} of {report.rows_read:,} rows")
    return describe_ingest(report, section.units)


def _generate(
    section: SampleSection, path: Path, overwrite: bool, progress: ProgressLines
) -> Result:
    from cme_dask.storage.generate import write_normal3

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


@dataclass(frozen=True, eq=False)
class _Plan:
    """What a job wants to know, checked against its columns before any work.

    Attributes
    ----------
    columns_y
        Names of the columns of y.
    events
        Events of y by their text.
    shown
        Names of the functions to report.
    points
        The stated points, shape (p, d_X).
    """

    columns_y: Sequence[str]
    events: dict[str, Event]
    shown: list[str]
    points: Array

    @classmethod
    def of(cls, job: Job) -> "_Plan":
        """DataError on unknown columns or functions, and on kernels that don't fit."""
        x, y = _columns(job)
        for key, kernel, names in zip("xy", job.fit.kernels(), (x, y), strict=True):
            if kernel is not None:
                try:
                    kernel.check(len(names))
                except DataError as error:
                    raise DataError(f"fit.kernel_{key}: {error}") from error
        events = events_of((x, y), job.fit)[1]
        known = [*y, *events]
        shown = job.report.functions or known
        unknown = [name for name in shown if name not in known]
        if unknown:
            raise DataError(
                f"report.functions: unknown {', '.join(map(repr, unknown))}, there are "
                f"{', '.join(map(repr, known))}"
            )
        for point in job.report.points:
            if set(point.x) != set(x):
                raise DataError(
                    f"report.points: {point.name!r} must give {', '.join(x)}, "
                    f"it gives {', '.join(point.x) or 'nothing'}"
                )
        points = np.array([[point.x[name] for name in x] for point in job.report.points])
        return cls(y, events, shown, points)

    def values(self, name: str, y: Array) -> Array:
        """A function at rows of y."""
        return y[:, self.columns_y.index(name)] if name in self.columns_y else self.events[name](y)


def _columns(job: Job) -> tuple[Sequence[str], Sequence[str]]:
    """Names of the columns of x and of y."""
    if job.ingest is not None:
        return job.ingest.x, job.ingest.y
    from cme_dask.storage import generate

    x, y = (columns.names for columns in generate.COLUMNS)
    return x, y


def _nearest(job: Job, plan: _Plan, sample: Sample, executor: Executor) -> Neighbours | None:
    """The rows nearest to the stated points, in standardised x; one pass."""
    if not len(plan.points):
        return None
    # Standard deviations over the row sample are precise enough to choose neighbours by. Constant
    # columns have none, though rounding may say otherwise; they are as far from every row.
    assert sample.row_sample is not None
    rows = sample.row_sample.parts[0]
    scale = np.where((rows == rows[0]).all(axis=0), 1.0, rows.std(axis=0))
    k = min(job.report.nearest, sample.n_rows)
    return nearest_rows(sample, plan.points, k, scale, executor)


def _compare(
    job: Job, plan: _Plan, estimator: JointDistribution, near: Neighbours | None
) -> Result:
    """Model and nearest rows at the stated points."""
    if near is None:
        return {"points": [], "neighbours": {"k": 0, "passes": 0}}
    if len(estimator.model_.x.answers.fold_constant) > 1:
        mean, std = estimator.expect(plan.shown, plan.points, return_std=True)
    else:
        mean, std = estimator.expect(plan.shown, plan.points), None
    rows = []
    for i, point in enumerate(job.report.points):
        functions = {
            name: {
                "mean": float(mean[i, j]),
                "std": None if std is None else float(std[i, j]),
                **_empirical(plan.values(name, near.y[i]), near.weights[i]),
            }
            for j, name in enumerate(plan.shown)
        }
        farthest = float(near.distance[i, -1])
        rows.append(
            {"name": point.name, "x": point.x, "farthest": farthest, "functions": functions}
        )
    return {"points": rows, "neighbours": {"k": near.index.shape[1], "passes": 1}}


def _empirical(values: Array, weights: Array) -> dict[str, float]:
    """Weighted mean, and its standard error sqrt(sum w^2 (v - mean)^2) / sum w."""
    share = weights / weights.max()  # squares of the weights may leave the range
    share = share / share.sum()
    mean = share @ values
    return {
        "nearest_mean": float(mean),
        "nearest_std": float(np.sqrt((share**2) @ (values - mean) ** 2)),
    }


def _picture(result: Result, path: Path, overwrite: bool, progress: ProgressLines) -> str | None:
    if result["points"] and plots.available():
        with writing(path, overwrite=overwrite) as aside, disk_errors(path):
            plots.points_picture(result, aside)
        return str(path)
    if result["points"]:
        progress.say(f"no picture: {plots.MISSING}")
    with disk_errors(path):
        path.unlink(missing_ok=True)  # an earlier run's would belie this one
    return None


def job_tables(result: Result) -> Iterator[Any]:
    """All tables of a job's result."""
    from cme_dask.report import tables

    if "ingest" in result:
        yield from tables.ingest_tables(result["ingest"])
        yield ""
    yield from tables.fit_tables(result["fit"])
    if result["points"]:
        yield from tables.point_tables(result)
    yield ""
    written = [path for path in result["outputs"].values() if path]
    yield tables.facts("Written", [("", path) for path in written])
