"""A real cluster for the chaos test: a scheduler and workers over TCP, each a process."""

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
TTL_SECONDS = 5
"""A worker that is silent for this long is given up by the scheduler (Dask's default: 5 min)."""


def free_port():
    with socket.socket() as s:
        s.bind((HOST, 0))
        return s.getsockname()[1]


class Cluster:
    """`dask scheduler` and `dask worker` on the loopback.

    Parameters
    ----------
    folder
        For its log and its marks.
    workers, strip_seconds
        How many there are as a rule, and what they take longer for a strip.
    nursery
        Forks its processes; None: they are started as a user would, with nannies.
    """

    def __init__(self, folder, workers, strip_seconds, nursery=None):
        self.folder, self.size, self._port = Path(folder), workers, free_port()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.environment = {
            FOLDER: str(self.folder),
            DELAY: str(strip_seconds),
            "OPENBLAS_NUM_THREADS": "1",
            "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": f"{TTL_SECONDS}s",
        }
        self._nursery, self._scheduler, self._slots, self._counted = nursery, None, [], 0

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
        for process in (*self._slots, self._scheduler):
            end(process)
        self._slots = []
        for mark in self.folder.glob("*.task"):
            mark.unlink()

    def join(self):
        """One more worker, which is there soon."""
        preload, local = Path(__file__).with_name("chaos_worker.py"), self.folder / "spill"
        nanny = "--nanny" if self._nursery is None else "--no-nanny"
        self._slots.append(
            self._spawn(
                *("worker", self.address, "--nworkers", "1", "--nthreads", "1", nanny),
                *("--preload", str(preload), "--local-directory", str(local)),
            )
        )

    def leave(self, client):
        """A worker leaves, when it has handed over what it holds; not the last one."""
        ready = list(self.workers().items())
        if len(ready) < 2:
            return
        slot, worker = ready[0]
        self._slots.remove(slot)
        with contextlib.suppress(FileNotFoundError, OSError, TimeoutError):
            address = self._address(worker)
            if self._nursery is not None:
                slot.release()
            client.retire_workers([address], close_workers=True)
        self._mark(worker.pid).unlink(missing_ok=True)
        end(slot)

    def settle(self, client):
        """As many workers as there are as a rule, all of which the scheduler knows."""
        while len(self._slots) < self.size:
            self.join()
        self.wait_for_workers()
        while len(self._slots) > self.size:
            self.leave(client)

        def all_known():
            known = client.run_on_scheduler(lambda dask_scheduler: [*dask_scheduler.workers])
            ready = [self._address(worker) for worker in self.workers().values()]
            return len(ready) == self.size and {*ready} <= {*known}

        self._wait_until(all_known)  # they are ready somewhat before they are registered

    def workers(self):
        """Process of each worker that is ready, by what starts it again."""
        found = {}
        for slot in list(self._slots):
            with contextlib.suppress(psutil.NoSuchProcess):
                if self._nursery is not None:
                    each = [psutil.Process(slot.pid)] if slot.returncode is None else []
                else:
                    each = psutil.Process(slot.pid).children(recursive=True)
                for process in each:
                    if self._mark(process.pid).exists():
                        found[slot] = process
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
        """SIGKILL; the task that it hit, or nothing. Another one is started in its place."""
        key = ""
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
            worker.wait(30)
            key = self.task(worker)
        self._mark(worker.pid).unlink(missing_ok=True)
        return key

    def replace(self, worker):
        """SIGKILL the worker for good; another one joins later."""
        slot = next((n for n, found in self.workers().items() if found == worker), None)
        if slot is None:
            return ""
        self._slots.remove(slot)
        if self._nursery is None:
            slot.kill()
            slot.wait(30)
        else:
            slot.release()
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
        logs = self.folder.glob("*.strips")
        return sum(log.read_bytes().count(b"\n") for log in logs) - self._counted

    def strips_read(self):
        """How many strips tasks have read since this was last asked."""
        count = self.strips_counted()
        self._counted += count
        return count

    def wait_for_workers(self):
        """Return when all workers are ready."""
        self._wait_until(lambda: len(self.workers()) >= len(self._slots))

    def _wait_until(self, done, seconds=180.0):
        until = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < until, "the cluster's workers do not come up"
            assert self._scheduler.poll() is None, "the scheduler died"
            time.sleep(0.02)

    def _address(self, worker):
        return self._mark(worker.pid).with_suffix(".address").read_text(encoding="utf-8")

    def _mark(self, pid):
        return self.folder / f"{pid}.task"

    def _spawn(self, kind, *words):
        words, log = (*words, "--host", HOST, "--no-dashboard"), self.folder / "cluster.log"
        if self._nursery is not None:
            again = kind == "worker"
            return self._nursery.start(kind, words, log=log, again=again, **self.environment)
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "dask", kind, *words],
                env={**os.environ, **self.environment},
                cwd=self.folder,
                stdout=file,
                stderr=file,
            )


def end(process):
    """SIGKILL a process that this one started, and its children."""
    if not isinstance(process, subprocess.Popen):
        process.end()
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), process]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGCONT)
                member.kill()
    process.wait(30)
