"""A folder beside an output, from which interrupted work on it resumes.

It is hidden, named after the output, and held by one process at a time. Inside are ``store``, the
output to be, ``state.json``, written last and by an atomic rename, and the arrays that it names.
"""

import contextlib
import json
import os
import re
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from cme_dask.data.atomic import (
    Kind,
    check_output,
    disk_errors,
    locked,
    publish,
    remove,
    sync,
    work_folder,
)
from cme_dask.errors import DataError, switch, wording

Array = Any

_LOCK, _STATE, _STORE = "lock", "state.json", "store"


class ResumableOutput:
    """The folder of one output; a context manager that holds its lock.

    What lies in it is removed when the block ends without a checkpoint or :meth:`discard` was
    called, and stays otherwise.

    Parameters
    ----------
    output
        Local path of the output.
    kind
        What it is.
    overwrite
        Replace an output that is there, and drop interrupted work on it.
    resume
        Go on with interrupted work if there is any.

    Raises
    ------
    DataError
        If the output is not usable, another process writes it, or interrupted work lies there and
        neither of the two was asked for.
    """

    def __init__(
        self, output: str | os.PathLike[str], kind: Kind, *, overwrite: bool, resume: bool
    ) -> None:
        self._target, self._kind = check_output(output, kind, overwrite), kind
        self._overwrite, self._resume = overwrite, resume
        self._folder = work_folder(self._target)
        self._lock: int | None = None
        self._state: dict[str, Any] | None = None

    @property
    def store(self) -> Path:
        """Where the output is made."""
        return self._folder / _STORE

    @property
    def state(self) -> dict[str, Any] | None:
        """The state of the last checkpoint, or None."""
        return self._state

    def __enter__(self) -> Self:
        with disk_errors(self._target):
            self._check_ours()
            self._lock = locked(self._folder, self._target)
            try:
                self._state = self._found()
            except BaseException:
                self._release()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyboardInterrupt) and self._state is not None:
            error.add_note(wording(self.advice).replace("resume=True", "resume=True or --resume"))
        try:
            if self._state is None:
                self._clear()
        finally:
            self._release()

    def _check_ours(self) -> None:
        """DataError if the folder was made by something else."""
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self._folder)
            if names and _LOCK not in names:
                raise DataError(
                    f"{self._folder} is in the way and was not made by cme_dask: remove it "
                    "yourself, or choose another output"
                )

    def _found(self) -> dict[str, Any] | None:
        """The state that lies there, if it is wanted."""
        path = self._folder / _STATE
        trash = re.compile(rf"{re.escape(self._folder.name)}\.[0-9a-f]{{8}}")
        for name in filter(trash.fullmatch, os.listdir(self._folder.parent)):
            remove(self._folder.with_name(name))  # of one who was cut off while clearing up
        there = path.exists() and self.store.exists()  # or it was published just before the end
        if there and self._resume:
            try:
                return _read(path)
            except DataError:
                if not self._overwrite:
                    raise
        if there and not self._overwrite:
            raise DataError(
                f"an interrupted ingest of {self._target} lies in {self._folder}: "
                f"{switch('resume')} continues it, {switch('overwrite')} starts again"
            )
        self._empty()  # without a state nothing of it is of use
        return None

    @property
    def advice(self) -> str:
        """How to go on after an interruption."""
        how = "the same again" if self._resume else switch("resume")
        return f"what was read is kept: {how} continues"

    def restart(self) -> bool:
        """Drop the interrupted work if an output may be overwritten; whether it was dropped."""
        if self._overwrite:
            self._state = None
            self._empty()
        return self._overwrite

    def _empty(self) -> None:
        for name in os.listdir(self._folder):
            if name != _LOCK:
                remove(self._folder / name)

    def arrays(self) -> dict[str, Array]:
        """The arrays of the last checkpoint."""
        assert self._state is not None
        try:
            path = self._folder / self._state["arrays"]
            with path.open("rb") as file, np.load(file) as stored:
                return {name: stored[name] for name in stored.files}
        except (LookupError, TypeError, OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"the interrupted ingest in {self._folder} is damaged ({error}): "
                f"{switch('overwrite')} starts again"
            ) from error

    def commit(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Make a checkpoint: what the store holds now and what it does not."""
        former = self._state["arrays"] if self._state is not None else None
        name = f"state-{uuid.uuid4().hex[:8]}.npz"
        with disk_errors(self._target):
            try:
                np.savez(self._folder / name, **dict(arrays))
                sync(self._folder / name)
            except OSError:
                (self._folder / name).unlink(missing_ok=True)  # the former checkpoint holds
                raise
            draft = self._folder / f"{_STATE}.draft"
            with draft.open("w") as file:
                json.dump({**state, "arrays": name}, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._folder / _STATE)
            self._state = {**state, "arrays": name}
            if former is not None:
                (self._folder / former).unlink(missing_ok=True)

    def discard(self) -> None:
        """Forget the checkpoint: going on from it would end as it did."""
        self._state = None

    def publish(self) -> None:
        """Put the store in the place of the output, whole, and leave nothing else behind."""
        with disk_errors(self._target):
            # Two steps: the work folder must not hold what is replaced as if it were ours.
            publish(
                self.store,
                self._target,
                self._kind,
                overwrite=self._overwrite,
                exchange=False,
            )
        self._state = None

    def _clear(self) -> None:
        # Renamed first: nobody may take the lock of a folder that is half gone.
        trash = self._folder.with_name(f"{self._folder.name}.{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(OSError):
            self._folder.rename(trash)
            remove(trash)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)  # which unlocks
            self._lock = None


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except ValueError as error:
        again = f"{switch('overwrite')} starts again"
        raise DataError(f"{path} is damaged ({error}): {again}") from error
    if not isinstance(state, dict):
        raise DataError(f"{path} is damaged: {switch('overwrite')} starts again")
    return state
