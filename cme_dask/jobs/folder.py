"""The folder that all outputs of a job go to."""

import os
from collections.abc import Iterable
from pathlib import Path

from cme_dask.errors import DataError, ResourceError
from cme_dask.storage.atomic import check_output


def prepare_folder(folder: Path, names: Iterable[str], overwrite: bool) -> None:
    """Make the folder, or refuse it before any work.

    Parameters
    ----------
    folder
        May exist; the folder that it is in must.
    names
        Of the outputs in it.
    overwrite
        Whether outputs may replace earlier ones.

    Raises
    ------
    DataError
        If outputs exist already without ``overwrite``, or are no outputs of ours.
    ResourceError
        If the folder can't be written to.
    """
    if not folder.exists():
        check_output(folder, overwrite=False)
        folder.mkdir()
    if not folder.is_dir():
        raise DataError(f"{folder} is a file, the outputs need a folder: choose another (--out)")
    if not os.access(folder, os.W_OK):
        raise ResourceError(f"{folder} can't be written to: check its permissions")
    existing = [name for name in names if (folder / name).exists()]
    if existing and not overwrite:
        raise DataError(
            f"{folder} already holds {', '.join(existing)}: choose another folder (--out) or "
            "replace them (--overwrite)"
        )
    for name in existing:
        check_output(folder / name, overwrite=True)
