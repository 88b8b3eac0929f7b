"""A script of a user, which runs one case of the chaos test with a checkpoint.

python tests/chaos_client.py CASE STORES SCHEDULER CHECKPOINT OUT
"""

import functools
import logging
import os
import sys
import time
from pathlib import Path

from chaos_cases import fit, save
from chaos_worker import slow_strips
from distributed import Client

from cme_dask.cli.compute import CheckpointOptions
from cme_dask.data import model_file
from cme_dask.passes.checkpoint import SavedTrials
from cme_dask.passes.progress import FitProgress

SAVE, PASS, BETWEEN = "save", "pass over the rows", "between passes"


class Watch(logging.Handler):
    """Notes the phases of a client, and the trials of its searches, in files named after it."""

    def __init__(self, folder):
        super().__init__()
        self._phases, self._trials = (folder / f"{os.getpid()}.{k}" for k in ("phases", "trials"))
        self.phase, self.has_steps = "", False

    def enter(self, phase):
        """Another phase."""
        if phase != self.phase:
            self.phase = phase
            self._note(self._phases, f"{time.monotonic()} {phase}")

    def trial(self, count=1):
        """A trial was made, or as many were known."""
        self._note(self._trials, count)

    def emit(self, record):
        """Of passes without steps of a fit around them."""
        event = getattr(record, "event", "")
        if not self.has_steps and event in ("pass started", "pass ended"):
            self.enter(PASS if event == "pass started" else BETWEEN)
        if event == "trials resumed":
            self.trial(record.trials)

    @staticmethod
    def _note(path, line):
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def watch(folder):
    """Watch this process."""
    slow_strips()
    here = Watch(folder)
    log = logging.getLogger("cme_dask.run")
    log.setLevel(logging.INFO)
    log.addHandler(here)

    def after(owner, name, then):
        before = getattr(owner, name)

        @functools.wraps(before)
        def wrapped(*args, **keywords):
            result = before(*args, **keywords)
            then(*args)
            return result

        setattr(owner, name, wrapped)

    def stepped(progress, *_):
        here.has_steps = True
        here.enter(progress.event().name)

    after(FitProgress, "__call__", stepped)
    after(SavedTrials, "put", lambda *_: here.trial())
    for owner, name in ((CheckpointOptions, "save"), (model_file, "write_model")):
        before = getattr(owner, name)

        def saving(*args, before=before, **keywords):
            here.enter(SAVE)
            return before(*args, **keywords)

        setattr(owner, name, saving)
    return here


def main(case, stores, scheduler, checkpoint, out):
    """Run the case, with a client of its own on a cluster."""
    where = {"checkpoint": checkpoint, "progress": lambda event: None}  # its steps are known then
    if "://" in scheduler:
        with Client(scheduler, set_as_default=False) as client:
            result = fit(case, Path(stores), scheduler=client, **where)
    else:
        result = fit(case, Path(stores), scheduler=scheduler, workers=2, **where)
    for handler in logging.getLogger("cme_dask.run").handlers:
        if hasattr(handler, "enter"):  # who watches
            handler.enter(SAVE)
    save(result, Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
