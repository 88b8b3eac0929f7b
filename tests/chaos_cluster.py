"""A real cluster for the chaos test: a scheduler and nannies with workers, each a process."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
from chaos_worker import DELAY, FOLDER

HOST = "127.0.0.1"
TTL_SECONDS = 10
"""A worker that is silent for this long is given up by the scheduler (Dask's default: 5 min)."""


def free_port():
    with socket.socket() as s:
        s.bind((HOST, 0))
        return s.getsockname()[1]


class Cluster:
    """`dask scheduler` and `dask worker --nanny` on the loopback, as a user would start them."""

    def __init__(self, folder, workers, strip_seconds):
        self._folder, self.size, self._port = Path(folder), workers, free_port()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._environment = {
            **os.environ,
            FOLDER: str(self._folder),
            DELAY: str(strip_seconds),
            "OPENBLAS_NUM_THREADS": "1",
            "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": f"{TTL_SECONDS}s",
        }
        self._scheduler, self._nannies, self._counted = None, [], 0

    @property
    def address(self):
        """Of the scheduler."""
        return f"tcp://{HOST}:{self._port}"

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        """Start the scheduler and all workers, which wait for it."""
        self._scheduler = self._spawn("scheduler", "--port", str(self._port))
        for _ in range(self.size):
            self.join()

    def stop(self):
        """Kill whatever is left of it."""
        for process in (*self._nannies, self._scheduler):
            end(process)
        self._nannies = []
        for mark in self._folder.glob("*.task"):
            mark.unlink()

    def join(self):
        """One more worker, which is there a few seconds later."""
        preload = Path(__file__).with_name("chaos_worker.py")
        local = self._folder / "spill"
        self._nannies.append(
            self._spawn(
                *("worker", self.address, "--nworkers", "1", "--nthreads", "1", "--nanny"),
                *("--preload", str(preload), "--local-directory", str(local)),
            )
        )

    def workers(self):
        """Process of each worker that is ready, by the nanny that watches it."""
        found = {}
        for nanny in self._nannies:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(nanny.pid).children(recursive=True):
                    if self._mark(child.pid).exists():
                        found[nanny] = child
        return found

    def running(self):
        """Workers that run a task now, and its key."""
        told = {worker: self.task(worker) for worker in self.workers().values()}
        return {worker: key for worker, key in told.items() if key}

    def task(self, worker):
        """Key of the task that a worker runs, or was at when it died; empty: none."""
        with contextlib.suppress(FileNotFoundError):
            return self._mark(worker.pid).read_text(encoding="utf-8")
        return ""

    def kill(self, worker):
        """SIGKILL; the task that it hit, or nothing. Its nanny starts another one."""
        key = ""
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
            worker.wait(30)
            key = self.task(worker)
        self._mark(worker.pid).unlink(missing_ok=True)
        return key

    def replace(self, worker):
        """SIGKILL the worker and its nanny for good; another pair joins later."""
        nanny = next((n for n, found in self.workers().items() if found == worker), None)
        if nanny is None:
            return ""
        self._nannies.remove(nanny)
        nanny.kill()
        nanny.wait(30)
        key = self.kill(worker)
        self.join()
        return key

    def kill_scheduler(self):
        """SIGKILL."""
        self._scheduler.kill()
        self._scheduler.wait(30)

    def again(self):
        """All anew, after :meth:`kill_scheduler` or :meth:`stop`."""
        self.stop()
        self.start()
        self.wait_for_workers()

    def strips_counted(self):
        """How many strips tasks have read."""
        logs = self._folder.glob("*.strips")
        return sum(log.read_bytes().count(b"\n") for log in logs) - self._counted

    def strips_read(self):
        """How many strips tasks have read since this was last asked."""
        count = self.strips_counted()
        self._counted += count
        return count

    def wait_for_workers(self, seconds=180.0):
        """Return when all workers are ready."""
        until = time.monotonic() + seconds
        while len(self.workers()) < self.size:
            assert time.monotonic() < until, "the cluster's workers do not come up"
            assert self._scheduler.poll() is None, "the scheduler died"
            time.sleep(0.1)

    def _mark(self, pid):
        return self._folder / f"{pid}.task"

    def _spawn(self, *words):
        log = (self._folder / "cluster.log").open("ab")
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", "dask", *words, "--host", HOST, "--no-dashboard"],
                env=self._environment,
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )


def end(process):
    """SIGKILL a process that this one started, and its children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), process]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGCONT)
                member.kill()
    process.wait(30)
