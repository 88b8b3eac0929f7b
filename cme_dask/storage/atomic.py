"""Write aside, rename last: an output is either whole or absent."""

import contextlib
import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from cme_dask.errors import DataError, ResourceError, switch

ATTRIBUTE = "cme_dask"
"""Attribute of a Zarr group that describes what is inside; written last."""


def check_room(path: str | os.PathLike[str], size: int, what: str) -> None:
    """ResourceError unless the disk of an output has room for it.

    Parameters
    ----------
    path
        The output.
    size
        Bytes that it takes.
    what
        What takes them, for the message.
    """
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ResourceError(
            f"{what} take about {size / 1e9:,.3g} GB, the disk of {folder} has "
            f"{free / 1e9:,.3g} GB free: ask for fewer rows, or choose another path"
        )


def check_output(path: str | os.PathLike[str], overwrite: bool) -> Path:
    """Refuse an output before any work is done for it.

    Raises
    ------
    DataError
        If the path is a URL, exists without ``overwrite``, or its folder is missing.
    ResourceError
        If its folder can't be written to.
    """
    if "://" in str(path):
        raise DataError(f"outputs are local paths, got the URL {path}: write here and upload it")
    target = Path(path)
    with disk_errors(target):
        there, folder = os.path.lexists(target), target.is_dir()
    if folder and overwrite and not _is_ours(target):
        raise DataError(
            f"{target} is a folder that cme_dask did not write: it will not be overwritten; choose "
            "another path, or remove it yourself"
        )
    if there and not overwrite:
        raise DataError(
            f"{target} already exists: choose another path or overwrite it ({switch('overwrite')})"
        )
    parent = target.absolute().parent
    if not parent.is_dir():
        raise DataError(f"the folder {parent} of the output does not exist: create it first")
    if not os.access(parent, os.W_OK):
        raise ResourceError(f"the folder {parent} can't be written to: check its permissions")
    return target


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """A side path to write to; it takes the place of ``path`` when the block ends well.

    On any error the side path is removed and an earlier output stays as it was.
    """
    target = check_output(path, overwrite)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield aside
        with disk_errors(target):
            publish(aside, target)
    finally:
        _remove(aside)


def workshop_folder(target: Path) -> Path:
    """Where work on an output goes on that may be resumed, beside it."""
    return target.with_name(f".{target.name}.partial")


@contextlib.contextmanager
def disk_errors(target: object) -> Iterator[None]:
    """Turn a full or read-only disk into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk is full while writing {target}: free some space and run it again; "
                "nothing was left half-written"
            ) from error
        raise ResourceError(f"{target} can't be written: {error.strerror or error}") from error


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a finished store of ours, by the attribute that is written last."""
    try:
        described = json.loads((folder / "zarr.json").read_text())["attributes"]
        return ATTRIBUTE in described
    except (OSError, ValueError, KeyError, TypeError):
        return False


def publish(aside: Path, target: Path) -> None:
    """Put a whole output in its place; an earlier one is there until then."""
    if not os.path.lexists(target):  # a link that leads nowhere is there, too
        aside.rename(target)
        return
    old = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.old")
    target.rename(old)
    try:
        aside.rename(target)
    except OSError:
        old.rename(target)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    """Remove a path; threads that wrote when we were interrupted may still add to it."""
    for pause in (0.0, 0.1, 0.3, 1.0):
        time.sleep(pause)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if not path.exists():
            return
