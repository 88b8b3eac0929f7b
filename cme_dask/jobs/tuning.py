"""What ``cme-dask tune`` does: learn kernels and ridge, and keep the trace of the search."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cme_dask.errors import DataError
from cme_dask.jobs.compute import Compute
from cme_dask.jobs.fitting import columns_of, describe_fit, events_of, fit_sample
from cme_dask.jobs.folder import prepare_folder
from cme_dask.jobs.schema import FitSection
from cme_dask.models import drawing
from cme_dask.report.progress import ProgressLines
from cme_dask.report.tuning import tuning_picture
from cme_dask.storage.atomic import disk_errors, writing
from cme_dask.storage.sample import Sample

Result = dict[str, Any]

OUTPUTS = {"model": "model.zarr", "trace": "tuning.json", "picture": "tuning.png"}


def tune(
    open_rows: Callable[[], Sample],
    options: FitSection,
    compute: Compute,
    out: Path,
    overwrite: bool,
) -> Result:
    """Learn kernels, fit, and write model, trace and picture into a folder.

    Parameters
    ----------
    open_rows
        The rows.
    options
        Of the fit; at least one kernel is to be learned.
    compute
        Where to run.
    out, overwrite
        The folder.

    Raises
    ------
    DataError
        If both kernels are given, or outputs exist.
    """
    if None not in (options.kernel_x, options.kernel_y):
        raise DataError("both kernels are given: there is nothing to tune")
    prepare_folder(out, OUTPUTS.values(), overwrite)
    paths = {key: out / name for key, name in OUTPUTS.items()}
    sample = open_rows()
    events_of(columns_of(sample), options)
    options.kernels(columns_of(sample))
    with ProgressLines() as progress, compute.open() as scheduler:
        estimator, memory = fit_sample(sample, options, scheduler, compute, progress)
        estimator.save(paths["model"], overwrite=overwrite)
        fit = describe_fit(estimator, memory, str(paths["model"]))
        tuning = estimator.model_.about["tuning"]
        result = {"store": sample.location, **fit, "tuning": tuning}
        result["outputs"] = {key: str(path) for key, path in paths.items()}
        result["outputs"]["picture"] = draw(result, paths["picture"], overwrite, progress)
    with writing(paths["trace"], overwrite=overwrite) as aside, disk_errors(paths["trace"]):
        aside.write_text(json.dumps(result, allow_nan=False, indent=1), encoding="utf-8")
    return result


def draw(result: Result, path: Path, overwrite: bool, progress: ProgressLines) -> str | None:
    """The picture of a search, where it can be drawn."""
    if not drawing.available():
        progress.say(f"no picture: {drawing.MISSING}")
        with disk_errors(path):
            path.unlink(missing_ok=True)  # an earlier run's would belie this one
        return None
    names = [name for key in "xy" for name in result["variables"][key]["columns"]]
    with writing(path, overwrite=overwrite) as aside, disk_errors(path):
        tuning_picture(result["tuning"], names, aside)
    return str(path)
