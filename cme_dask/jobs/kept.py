"""The checkpoint of a command: begun, gone on with, and removed when the output is there."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from cme_dask.errors import CmeDaskError, DataError


@dataclass(frozen=True)
class Kept:
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

    def settle(self, overwrite: bool) -> None:
        """Refuse or remove what lies there, before any work is done.

        Raises
        ------
        DataError
            If options contradict each other, there is nothing to resume, or an interrupted run
            lies there and neither resuming nor overwriting was asked for.
        """
        from cme_dask.chunked.checkpoints import discard, is_checkpoint

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
        from cme_dask.chunked.checkpoints import discard, is_checkpoint

        if self.folder is not None and is_checkpoint(self.folder):
            with contextlib.suppress(CmeDaskError):  # it is somebody else's by now, or stays
                discard(self.folder)
