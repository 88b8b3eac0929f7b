"""The scheduler, the output folder and the checkpoint of a command."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cme_dask.data import model_file
from cme_dask.data.atomic import (
    Kind,
    check_apart,
    check_output,
    disk_errors,
    of_format,
    recover,
)
from cme_dask.errors import CmeDaskError, DataError, ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cme_dask.data.sample import Sample
    from cme_dask.models.base import Model
    from cme_dask.passes.cluster import Scheduler


# The folder that all outputs of a job go to


def prepare_folder(
    folder: Path,
    names: Iterable[str],
    overwrite: bool,
    kinds: Mapping[str, Kind] | None = None,
    beside: Mapping[str, Path | None] | None = None,
) -> None:
    """Make the folder, or refuse it before any work.

    Parameters
    ----------
    folder
        May exist; the folder that it is in must.
    names
        Of the outputs in it.
    overwrite
        Whether outputs may replace earlier ones.
    kinds
        What the outputs are, by name; default files of the format that the name says.
    beside
        Other outputs, by what they are called, which may not lie in the place of these.

    Raises
    ------
    DataError
        If outputs exist already without ``overwrite``, or are no outputs of ours.
    ResourceError
        If the folder can't be written to.
    """
    names, kinds = tuple(names), kinds or {}
    check_apart({**{f"the output {name}": folder / name for name in names}, **(beside or {})})
    if not folder.exists():
        check_output(folder, Kind("folder", Path.is_dir), overwrite=False)
        folder.mkdir()
    if not folder.is_dir():
        raise DataError(f"{folder} is a file, the outputs need a folder: choose another (--out)")
    if not os.access(folder, os.W_OK):
        raise ResourceError(f"{folder} can't be written to: check its permissions")
    for name in names:
        recover(folder / name)
    existing = [name for name in names if os.path.lexists(folder / name)]
    if existing and not overwrite:
        raise DataError(
            f"{folder} already holds {', '.join(existing)}: choose another folder (--out) or "
            "replace them (--overwrite)"
        )
    for name in existing:
        check_output(folder / name, kinds.get(name, of_format(name)), overwrite=True)


# The checkpoint of a command: begun, resumed, and removed when the output is complete


_SAVING = "saving"  # a file in it, named after the run whose output is being written


@dataclass(frozen=True)
class CheckpointOptions:
    """Where a command saves partial sums.

    Parameters
    ----------
    folder
        Of the checkpoint, which all workers share; None for none. A run that is saved there is
        continued, else one begins.
    resume
        Says the same; only for scripts that say it.
    shard
        (i, k): compute only the i-th of k shares into it.
    """

    folder: Path | None = None
    resume: bool = False
    shard: tuple[int, int] | None = None

    def check(self) -> None:
        """Refuse options that contradict each other; DataError."""
        if self.folder is None and (self.resume or self.shard is not None):
            raise DataError("--resume and --shard need --checkpoint, the folder of the run")

    @contextlib.contextmanager
    def continued(self) -> "Iterator[None]":
        """Say, where the block is interrupted, that the same command continues it."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if self.folder is not None and not getattr(interrupt, "__notes__", ()):
                interrupt.add_note("the same command continues")  # parts with notes say where
            raise

    def run_of(
        self, command: str, depends_on: "Mapping[str, Any]", *samples: "Sample"
    ) -> str | None:
        """A fingerprint of the run, for its output; None without a checkpoint.

        Parameters
        ----------
        command
            Its name.
        depends_on
            Its options, but for where it runs.
        samples
            The rows, where there are some before the run.
        """
        from cme_dask.passes.checkpoint import about_run, token_of

        if self.folder is None:
            return None
        return token_of(about_run(f"cme-dask {command}", depends_on, *samples), command)

    def noted(self, run: str | None) -> Any:
        """The result that an earlier start of the run saved before its fit, or None."""
        from cme_dask.passes.checkpoint import noted

        return None if self.folder is None or run is None else noted(self.folder, run)

    def note(self, run: str | None, value: Any) -> None:
        """Save a result of the run before its fit, so that a later start need not compute it."""
        from cme_dask.passes.checkpoint import note

        if self.folder is not None and run is not None:
            note(self.folder, run, value)

    def has_made(self, out: Path, run: str | None) -> bool:
        """Whether a model is that of this run."""
        return run is not None and os.path.lexists(out) and model_file.run_of(out) == run

    def is_complete(self, out: Path, run: str | None) -> bool:
        """Whether this run has written its model, its only output; its checkpoint then goes."""
        if not self.has_made(out, run):
            return False
        self.finish_own(run)
        return True

    def finish_own(self, run: str | None) -> None:
        """Remove the checkpoint, unless it is one that another run began since."""
        if self.folder is not None and (self.folder / f"{_SAVING}-{run}").exists():
            self.finish()

    def write(self, model: "Model", out: Path, overwrite: bool, run: str | None) -> None:
        """Write the model of a run, which has further outputs."""
        if self.folder is not None:
            with disk_errors(self.folder):
                (self.folder / f"{_SAVING}-{run}").touch()
        model_file.write_model(out, model.to_state(), overwrite=overwrite, run=run)

    def save(self, model: "Model", out: Path, overwrite: bool, run: str | None) -> None:
        """Write the model of a run; remove the checkpoint once it is on the disk."""
        self.write(model, out, overwrite, run)
        self.finish()

    def finish(self) -> None:
        """Remove the checkpoint once the output is complete."""
        from cme_dask.passes.checkpoint import discard, is_checkpoint

        if self.folder is not None and is_checkpoint(self.folder):
            with contextlib.suppress(CmeDaskError):  # another run uses the folder by now
                discard(self.folder)


# Where a command runs, and its report


@dataclass(frozen=True)
class Compute:
    """Where a command runs.

    Parameters
    ----------
    scheduler
        ``threads``, ``processes``, ``synchronous``, the address of a cluster's scheduler, or None
        for the scheduler of Dask's configuration.
    workers
        Threads or processes, not for clusters.
    memory_limit
        Bytes that this process, or each worker of a cluster, may use.
    report
        Folder for a report of passes and of memory over time; None for none.
    overwrite
        Whether it may replace an earlier one.
    device, device_memory_limit
        Where sums are computed, such as ``cuda``, and the bytes of it that may be used; None for
        the host, and for all that it has.
    """

    scheduler: str | None = None
    workers: int | None = None
    memory_limit: str | None = None
    report: Path | None = None
    overwrite: bool = False
    device: str | None = None
    device_memory_limit: str | None = None

    def place(self, scheduler: "Scheduler") -> dict[str, Any]:
        """The arguments of ``fit`` that say where it runs, on an opened scheduler."""
        host = {
            "scheduler": scheduler,
            "workers": self.workers,
            "memory_limit": self.memory_limit,
        }
        device = {"device": self.device, "device_memory_limit": self.device_memory_limit}
        return host | {name: value for name, value in device.items() if value is not None}

    @contextlib.contextmanager
    def open(self) -> "Iterator[Scheduler]":
        """A scheduler for ``fit``: a name as it is, an address as a connected client.

        The report covers the block, and is written if that succeeds.
        """
        from cme_dask.cli.run_report import reporting
        from cme_dask.kernels.evaluator import reuse_memory
        from cme_dask.passes.cluster import connected, described_workers

        if self.workers is not None and "://" in (self.scheduler or ""):
            raise DataError("workers is for local schedulers: a cluster has its own number")
        reuse_memory()
        with (
            connected(self.scheduler) as scheduler,
            reporting(self.report, scheduler, overwrite=self.overwrite),
        ):
            client = None if scheduler is None or isinstance(scheduler, str) else scheduler
            if client is not None and not described_workers(client):
                click.echo(f"waiting for a worker of {self.scheduler}", err=True)
            yield scheduler
