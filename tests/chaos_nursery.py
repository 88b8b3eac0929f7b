"""Processes of the chaos test, forked from one that has imported the packages: they are soon there.

A scheduler, a worker or a client takes seconds to import what it needs, and the chaos test starts
thousands. Each is a process of its own, with the arguments of its command; only its imports are
shared. Workers that die are started again at once, as a nanny would.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from uuid import uuid4

_POLL = 0.01
_PATIENCE = 60.0
_QUIET = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "5s",
}
"""Schedulers and workers mostly wait here: to watch themselves would take most of their time."""


class Child:
    """A process of the nursery; one that is started again has another process id then."""

    def __init__(self, nursery, number):
        self._nursery, self._number = nursery, number
        self.pid, self.returncode = 0, None
        self.there = threading.Event()

    def poll(self):
        """The exit code; None while it runs."""
        return self.returncode

    def wait(self, seconds):
        """The exit code, once it has ended."""
        until = time.monotonic() + seconds
        while self.returncode is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a child", seconds)
            time.sleep(_POLL)
        return self.returncode

    def send_signal(self, number):
        """Nothing is sent to one that has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def release(self):
        """Not to be started again."""
        self._nursery.say(release=self._number)

    def end(self):
        """SIGKILL for good, also of one that is stopped."""
        self.release()
        until = time.monotonic() + _PATIENCE
        while self.returncode is None and time.monotonic() < until:
            self.kill()
            time.sleep(_POLL)


class Nursery:
    """The process that forks, for as long as a block runs."""

    def __init__(self):
        self._children, self._lock = {}, threading.Lock()

    def __enter__(self):
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads, **_QUIET},
            text=True,
        )
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()
        return self

    def __exit__(self, *_):
        for child in list(self._children.values()):
            child.end()
        self._process.stdin.close()
        self._process.wait(_PATIENCE)
        self._ear.join(_PATIENCE)
        self._process.stdout.close()

    def start(self, kind, words, *, log, errors=None, again=False, **env):
        """Start a command.

        Parameters
        ----------
        kind
            ``scheduler``, ``worker``, ``cme-dask`` or the path of a script.
        words
            Its arguments.
        log, errors
            Files for what it says; default of the latter the former.
        again
            Whether it is started again whenever it has ended.
        **env
            Variables of its environment.
        """
        number = len(self._children)
        child = self._children[number] = Child(self, number)
        job = {"kind": str(kind), "words": [*map(str, words)], "log": str(log), "env": env}
        self.say(number=number, job=job | {"errors": str(errors or log), "again": again})
        assert child.there.wait(_PATIENCE), "the nursery does not answer"
        return child

    def say(self, **message):
        """Send a message to the process."""
        with self._lock:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _listen(self):
        for line in self._process.stdout:
            told = json.loads(line)
            child = self._children[told["number"]]
            child.pid, child.returncode = told.get("pid", child.pid), told.get("code")
            child.there.set()


# The process itself


class _Born(Exception):
    """Unwinds a child out of the loop that forked it."""


class _Forking:
    """Forks children as it is told, and tells when they end."""

    def __init__(self):
        self._jobs, self._numbers = {}, {}

    def serve(self):
        """Until there is nobody to serve."""
        unread = b""
        while True:
            if select.select([0], [], [], _POLL)[0]:
                part = os.read(0, 1 << 16)
                if not part:
                    for pid in self._numbers:  # its parent is gone
                        os.kill(pid, signal.SIGKILL)
                    return
                *lines, unread = (unread + part).split(b"\n")
                for line in lines:
                    self._hear(json.loads(line))
            self._reap()

    def _hear(self, message):
        if "release" in message:
            self._jobs[message["release"]]["again"] = False
            return
        self._jobs[message["number"]] = message["job"]
        self._fork(message["number"])

    def _reap(self):
        while self._numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            number = self._numbers.pop(pid)
            if self._jobs[number]["again"]:
                self._fork(number)
            else:
                _tell(number=number, code=os.waitstatus_to_exitcode(status))

    def _fork(self, number):
        pid = os.fork()
        if not pid:
            raise _Born(self._jobs[number])
        self._numbers[pid] = number
        _tell(number=number, pid=pid)


def _tell(**message):
    os.write(1, json.dumps(message).encode() + b"\n")


def _run(job):
    """What a child does: its command, with streams and environment of its own."""
    os.environ.update(job["env"])
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["log"], append),
        (2, job["errors"], append),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for module in ("cme_dask.kernels.evaluator", "cme_dask.passes.cluster"):
        importlib.import_module(module).PROCESS = uuid4().hex  # forked, it would be its parent's
    if watched := os.environ.get("CHAOS_PHASES"):
        importlib.import_module("chaos_client").watch(Path(watched))
    kind, words = job["kind"], job["words"]
    sys.argv = [kind, *words]
    if kind in ("scheduler", "worker"):
        os.chdir(Path(job["log"]).parent)
        importlib.import_module(f"distributed.cli.dask_{kind}").main(words)
    elif kind == "cme-dask":
        importlib.import_module("cme_dask.__main__").main()
    else:
        runpy.run_path(kind, run_name="__main__")


_NEEDED = (
    *("distributed.cli.dask_scheduler", "distributed.cli.dask_worker", "cme_dask.__main__"),
    *(f"cme_dask.cli.{name}" for name in ("fitting", "drift", "compare", "hypotheses", "app")),
    *("cme_dask.cli.fit_commands", "cme_dask.estimators.comparison", "sklearn.ensemble"),
    *("sklearn.tree", "sklearn.cluster", "chaos_client", "chaos_cases", "chaos_worker"),
)


def main():
    """Serve; a child returns from here to run its command, and ends as any process does."""
    for name in _NEEDED:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all
    try:
        _Forking().serve()
    except _Born as born:
        return born.args[0]
    return None


if __name__ == "__main__" and (job := main()):
    _run(job)
