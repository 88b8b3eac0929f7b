"""The job that makes the model of all rows from models of its parts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cme_dask.errors import DataError
from cme_dask.jobs.describe import describe
from cme_dask.models.merging import merge
from cme_dask.storage.atomic import check_output


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
