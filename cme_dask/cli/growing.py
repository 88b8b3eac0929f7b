"""What the commands do that add rows to a saved model, or merge models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cme_dask.cli.compute import Compute
from cme_dask.cli.describe import describe
from cme_dask.cli.progress import ProgressLines
from cme_dask.config import ACCURACY, SAMPLE_SIZE
from cme_dask.data.store import check_output
from cme_dask.errors import DataError
from cme_dask.estimators.partial_fit import JointUpdate
from cme_dask.estimators.steps import reported
from cme_dask.models import load_only
from cme_dask.models.events import Event
from cme_dask.models.joint import JointModel, Variable
from cme_dask.models.merging import merge
from cme_dask.passes.driver import Executor
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.sources import open_sample

# The job that adds the rows of a store to a saved model, or fits them alone as it was


def grow_model(
    path: str,
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
    path
        The model; events that it was fitted with are known from it.
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
    check_output(out, overwrite)
    model = load_only(JointModel, path)
    sample = open_sample(store)
    with ProgressLines() as progress, compute.open() as scheduler:
        executor = Executor.resolve(scheduler, compute.workers)
        with reported(progress.fit, executor, sample.n_rows, (1, 1)) as reports:
            update = JointUpdate(
                functions=(_events(model.x, model.y), _events(model.y, model.x)),
                sample_size=SAMPLE_SIZE,
                seed=0,
                accuracy=ACCURACY,
                convergence="raise",
                budget=MemoryBudget.of(executor, compute.memory_limit),
                progress=reports,
            )
            fitted, _ = (
                update.alone(model, sample, first_row) if alone else update.add(model, sample)
            )
        fitted.model.save(out, overwrite=overwrite)
    report = fitted.report
    return {
        "model": path,
        "store": sample.location,
        "added": report.rows,
        "added_trace_error": fitted.model.about["new_rows"].get("trace_error"),
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


# The job that makes the model of all rows from models of its parts


def merge_models(models: Sequence[str], out: Path, overwrite: bool) -> dict[str, Any]:
    """Merge saved models, see :func:`cme_dask.merge`, and describe what was written.

    Parameters
    ----------
    models
        Paths or URLs, of at least two models.
    out
        Folder to write.
    overwrite
        Whether it may replace an earlier output.

    Raises
    ------
    DataError, StoreError, ResourceError
        If models are missing, damaged or different, or the output can't be written.
    """
    if len(models) < 2:
        raise DataError(f"merging takes at least two models, got {len(models)}")
    check_output(out, overwrite)
    merge(models).save(out, overwrite=overwrite)
    return {"merged": list(models), **describe(str(out))}
