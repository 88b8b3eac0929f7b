"""Where a command runs, where its outputs go, and its checkpoint."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cme_dask.data.store import check_output
from cme_dask.errors import CmeDaskError, DataError, ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cme_dask.passes.cluster import Scheduler


# The folder that all outputs of a job go to


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


# The checkpoint of a command: begun, gone on with, and removed when the output is there


@dataclass(frozen=True)
class CheckpointOptions:
    """Where a command keeps what is done.

    Parameters
    ----------
    folder
        The checkpoint's, which all workers share; None for none.
    resume
        Whether to go on with what lies there.
    shard
        (i, k): do the i-th of k shares into it, and no more.
    """

    folder: Path | None = None
    resume: bool = False
    shard: tuple[int, int] | None = None

    def prepare(self, overwrite: bool) -> None:
        """Refuse or remove what lies there, before any work is done.

        Raises
        ------
        DataError
            If options contradict each other, there is nothing to resume, or an interrupted run
            lies there and neither resuming nor overwriting was asked for.
        """
        from cme_dask.passes.checkpoint import discard, is_checkpoint

        if self.folder is None:
            if self.resume or self.shard is not None:
                raise DataError("--resume and --shard need --checkpoint, the folder of the run")
            return
        there = self.folder.is_dir() and is_checkpoint(self.folder)
        if self.resume or self.shard is not None:
            if self.resume and not there:
                raise DataError(
                    f"{self.folder} holds no checkpoint to resume: leave out --resume to begin"
                )
        elif there and overwrite:
            discard(self.folder)
        elif there:
            raise DataError(
                f"an interrupted run lies in {self.folder}: --resume continues it, --overwrite "
                "starts again"
            )

    def finish(self) -> None:
        """Remove the checkpoint: the output is there."""
        from cme_dask.passes.checkpoint import discard, is_checkpoint

        if self.folder is not None and is_checkpoint(self.folder):
            with contextlib.suppress(CmeDaskError):  # it is somebody else's by now, or stays
                discard(self.folder)


# Where a command runs, and its report


@dataclass(frozen=True)
class Compute:
    """Where to run.

    Parameters
    ----------
    scheduler
        ``threads``, ``processes``, ``synchronous``, the address of a cluster's scheduler, or None
        for what Dask is set to.
    workers
        Threads or processes, not for clusters.
    memory_limit
        Bytes that this process, or each worker of a cluster, may use.
    report
        Folder that tells what was done, of memory over time among other things; None for none.
    overwrite
        Whether it may replace an earlier one.
    """

    scheduler: str | None = None
    workers: int | None = None
    memory_limit: str | None = None
    report: Path | None = None
    overwrite: bool = False

    @contextlib.contextmanager
    def open(self) -> "Iterator[Scheduler]":
        """A scheduler for ``fit``: a name as it is, an address as a connected client.

        The report is of what is done with it, and is written if that ends well.
        """
        from cme_dask.cli.run_report import reporting
        from cme_dask.numerics.resources import reuse_memory
        from cme_dask.passes.cluster import connected

        if self.workers is not None and "://" in (self.scheduler or ""):
            raise DataError("workers is for local schedulers: a cluster has its own number")
        reuse_memory()
        with (
            connected(self.scheduler) as scheduler,
            reporting(self.report, scheduler, overwrite=self.overwrite),
        ):
            yield scheduler
