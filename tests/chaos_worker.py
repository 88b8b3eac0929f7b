"""What the workers of the chaos test load (`dask worker --preload`), and its clients.

Each worker tells in files which task it runs, so that a kill can be proven to have hit one: what a
dead process was at is what its file says. And each strip takes a little longer, as on a slow disk,
so that tasks last long enough to be hit without work for the processor.
"""

import os
import time
from pathlib import Path

from distributed.diagnostics.plugin import WorkerPlugin

import cme_dask.numerics.cells  # noqa: F401 - before the worker is there, not in its first task
from cme_dask.passes.run import Pass

FOLDER, DELAY = "CHAOS_FOLDER", "CHAOS_STRIP_SECONDS"


class Marks(WorkerPlugin):
    """Keep the key of the task that runs in a file named after the process, and its address."""

    def __init__(self, folder):
        self._mark = folder / f"{os.getpid()}.task"
        self._aside = self._mark.with_suffix(".new")

    def setup(self, worker):
        """The worker is ready."""
        self._mark.with_suffix(".address").write_text(worker.address, encoding="utf-8")
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


def slow_strips():
    """Make ``Pass.strips`` of this process take longer, and note in a file that one was read."""
    folder, seconds, read = Path(os.environ[FOLDER]), float(os.environ[DELAY]), Pass.strips
    log = folder / f"{os.getpid()}.strips"

    def strips(self, run, given=()):
        for strip in read(self, run, given):
            time.sleep(seconds)
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{strip.rows[0]}\n")
            yield strip

    Pass.strips = strips


async def dask_setup(worker):
    """Called by Dask in each worker process before it takes tasks."""
    slow_strips()
    await worker.plugin_add(plugin=Marks(Path(os.environ[FOLDER])), name="chaos-marks")
