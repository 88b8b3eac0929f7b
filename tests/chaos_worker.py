"""What the workers of the chaos test load (`dask worker --preload`).

Each tells in files which task it runs, so that a kill can be proven to have hit one: what a dead
process was at is what its file says. And each strip takes a little longer, as on a slow disk, so
that tasks last long enough to be hit without work for the processor.
"""

import os
import time
from pathlib import Path

from distributed.diagnostics.plugin import WorkerPlugin

import cme_dask.numerics.cells  # noqa: F401 - before the worker is there, not in its first task
from cme_dask.passes.run import Pass

FOLDER, DELAY = "CHAOS_FOLDER", "CHAOS_STRIP_SECONDS"


class Marks(WorkerPlugin):
    """Keep the key of the task that runs in a file named after the process."""

    def __init__(self, folder):
        self._mark = folder / f"{os.getpid()}.task"
        self._aside = self._mark.with_suffix(".new")

    def setup(self, worker):
        """The worker is ready."""
        self._say("")

    def transition(self, key, start, finish, **_):
        """A task begins or ends."""
        if finish == "executing":
            self._say(str(key))
        elif start == "executing":
            self._say("")

    def _say(self, key):
        self._aside.write_text(key, encoding="utf-8")
        self._aside.replace(self._mark)


def slow(read, folder, seconds):
    """``Pass.strips`` that takes longer and notes in a file that a strip was read."""
    log = folder / f"{os.getpid()}.strips"

    def strips(self, run, given=()):
        for strip in read(self, run, given):
            time.sleep(seconds)
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{strip.rows[0]}\n")
            yield strip

    return strips


async def dask_setup(worker):
    """Called by Dask in each worker process before it takes tasks."""
    folder = Path(os.environ[FOLDER])
    Pass.strips = slow(Pass.strips, folder, float(os.environ[DELAY]))
    await worker.plugin_add(plugin=Marks(folder), name="chaos-marks")
