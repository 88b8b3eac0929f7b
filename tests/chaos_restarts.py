"""Restarts of the chaos test: a client or scheduler dies, and another one goes on."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from chaos_cases import differences, state_bits, write_stores
from chaos_cluster import Cluster

from cme_dask.data.model_file import read_model
from cme_dask.numerics.reduction import strip_length

N_ROWS, WORKERS, STRIP_SECONDS = 300_000, 3, 0.05
_PATIENCE = 240.0  # seconds after which a client counts as lost
_POLL = 0.02
_GIVE_UP = 5  # runs that were lost

_FIT = ("--event", "y > 0.5", "--kernel", "median", "--tol", "1e-2", "--max-rank", "60")
_FIT += ("--reg", "1e-4", "--calibration", "no")
COMMANDS = {
    "cme-dask fit": ("fit", *_FIT, "--residual", "no"),
    "cme-dask fit, residual": ("fit", *_FIT, "--residual", "yes"),
    "cme-dask features": ("features", "--length-scale", "1", "--tol", "1e-2"),
}
SCRIPTS = ("joint, certified, greedy", "cholesky, random", "embedding", "logistic")
"""Cases of which a script is the client; it goes on when it is started again."""
NAMES = (*COMMANDS, *SCRIPTS)
DEATHS = ("client", "scheduler", "everything", "Ctrl-C")
_CODES = {
    "client": -signal.SIGKILL,
    "scheduler": 3,
    "everything": -signal.SIGKILL,
    "Ctrl-C": 130,
}


@dataclass
class Restart:
    """What became of one run that was begun, ended by force, and gone on with.

    Attributes
    ----------
    name, deaths
        Whose, and what ended it, one after the other.
    again, allowed
        Strips that were read more than once; how many may be.
    taken
        Strips that the last run took from the checkpoint, as it says; of scripts nothing.
    error, different
        Why it was lost; arrays that differ.
    """

    name: str
    deaths: list[str] = field(default_factory=list)
    again: int = 0
    allowed: int = 0
    taken: int | None = None
    error: str = ""
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Lost(Exception):
    """A run did not do what it should have."""


class Restarts:
    """Runs clients on a cluster, and ends them.

    Parameters
    ----------
    folder
        To make, of the stores and for all outputs.
    """

    def __init__(self, folder):
        self._folder, self._count, self._started = Path(folder), 0, 0
        self._wanted = {}
        write_stores(self._folder, N_ROWS)

    def undisturbed(self, name, cluster):
        """Bits of the model, and the strips that its run reads."""
        if name not in self._wanted:
            out, checkpoint = self._paths()
            cluster.strips_read()
            self._finish(self._start(name, cluster, out, checkpoint, []))
            self._wanted[name] = _bits_of(out), cluster.strips_read()
        return self._wanted[name]

    def restarted(self, name, deaths, cluster, rng):
        """One run that dies so, and is gone on with."""
        begin, outcome = time.monotonic(), Restart(name)
        try:
            cluster.wait_for_workers()
            wanted, strips = self.undisturbed(name, cluster)
            self._through(outcome, deaths, strips, wanted, cluster, rng)
        except Lost as error:
            outcome.error = str(error)
            cluster.again()
        outcome.seconds = time.monotonic() - begin
        return outcome

    def _through(self, outcome, deaths, strips, wanted, cluster, rng):
        out, checkpoint = self._paths()
        cluster.strips_read()
        process, read = self._start(outcome.name, cluster, out, checkpoint, []), 0
        for number, death in enumerate(deaths):
            # A share of what is left for each death that is still to come.
            moment = rng.uniform(0.0, 0.9) * max(strips - read, 1) / (len(deaths) - number)
            if not _reached(process, cluster, moment):
                break  # it had ended before
            self._end(process, death, outcome.name, cluster)
            if out.exists():
                raise Lost("a run that was ended by force left an output")
            read += cluster.strips_read()
            outcome.deaths.append(death)
            outcome.allowed += (cluster.size + 1) * _block_strips(checkpoint)
            process = self._start(outcome.name, cluster, out, checkpoint, ["--resume"])
        outcome.taken = self._finish(process)
        outcome.again = read + cluster.strips_read() - strips
        outcome.different = differences(_bits_of(out), wanted)
        if outcome.again > outcome.allowed:
            raise Lost(f"{outcome.again} strips were read again, {outcome.allowed} may be")

    def _start(self, name, cluster, out, checkpoint, more):
        if name in COMMANDS:
            command, *options = COMMANDS[name]
            words = ["-m", "cme_dask", command, str(self._folder / "numbers.zarr"), *options]
            words += ["--out", str(out), "--scheduler", cluster.address, "--json"]
            words += ["--checkpoint", str(checkpoint), *more]
        else:
            script = str(Path(__file__).with_name("chaos_client.py"))
            words = [script, name, str(self._folder), cluster.address, str(checkpoint), str(out)]
        self._started += 1
        with self._said("out").open("w") as said, self._said("err").open("w") as errors:
            return subprocess.Popen(
                [sys.executable, *words],
                stdout=said,
                stderr=errors,
                # A shell that runs the tests in the background has them ignore SIGINT.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def _said(self, stream):
        return self._folder / f"client-{self._started}.{stream}"

    def _end(self, process, death, name, cluster):
        """End a run by force, and see that it says so in one sentence."""
        if death == "scheduler":
            cluster.kill_scheduler()
        else:
            process.send_signal(signal.SIGINT if death == "Ctrl-C" else signal.SIGKILL)
        if death == "everything":
            cluster.stop()
        code = self._wait(process)
        if name in COMMANDS and code != _CODES[death]:
            raise Lost(f"exit code {code} after {death} died: {self._last_words()}")
        if name in COMMANDS and "Traceback" in self._said("err").read_text():
            raise Lost(f"a traceback after {death} died: {self._last_words()}")
        if death in ("scheduler", "everything"):
            cluster.again()
        until = time.monotonic() + _PATIENCE
        while cluster.running():
            if time.monotonic() > until:
                raise Lost("workers run on for a client that is gone")
            time.sleep(_POLL)

    def _finish(self, process):
        """Strips that it took from the checkpoint."""
        if self._wait(process):
            raise Lost(f"exit code {process.returncode}: {self._last_words()}")
        said = self._said("out").read_text()
        return json.loads(said).get("resumed_strips") if said.strip() else None

    def _wait(self, process):
        try:
            return process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
            raise Lost(f"no end within {_PATIENCE:.0f} s") from None

    def _last_words(self):
        return self._said("err").read_text().strip().splitlines()[-1:]

    def _paths(self):
        self._count += 1
        return tuple(self._folder / f"{kind}-{self._count}" for kind in ("model", "checkpoint"))


def _reached(process, cluster, strips):
    """Wait until so many strips are read and tasks run; False if the client ended before."""
    until = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < until:
        if cluster.strips_counted() >= strips and cluster.running():
            return True
        time.sleep(_POLL)
    return False


def _bits_of(path):
    return state_bits(read_model(path))


def _block_strips(checkpoint):
    """Strips of a block of the checkpoint: of a task as well, at most."""
    told = [json.loads(path.read_text()) for path in checkpoint.glob("pass-*/pass.json")]
    return max((-(-about["block"] // strip_length(about["rows"])) for about in told), default=1)


def restart_all(restarts, seed, folder, say):
    """So many restarts in turn over all clients; returns their outcomes."""
    rng, outcomes = np.random.default_rng([seed, 1]), []
    runs = Restarts(folder / "restarts")
    with Cluster(folder / "cluster-restarts", WORKERS, STRIP_SECONDS) as cluster:
        while sum(len(o.deaths) for o in outcomes) < restarts and _lost(outcomes) < _GIVE_UP:
            name = NAMES[len(outcomes) % len(NAMES)]
            possible = DEATHS if name in COMMANDS else DEATHS[:3]
            deaths = [str(death) for death in rng.choice(possible, 1 + (rng.random() < 0.2))]
            outcome = runs.restarted(name, deaths, cluster, rng)
            outcomes.append(outcome)
            what = outcome.error or ", ".join(outcome.different[:3]) or "same bits"
            say(
                f"{len(outcomes):4} {name}: {', '.join(outcome.deaths)} died; {outcome.again} "
                f"strips read again of {outcome.allowed} allowed, {outcome.taken} taken from the "
                f"checkpoint, {outcome.seconds:.1f} s: {what}"
            )
    return outcomes


def _lost(outcomes):
    return sum(bool(outcome.error) for outcome in outcomes)


def restart_rows(outcomes):
    """What happened, by client: rows of a table under their head."""
    head = ("client", "runs", *DEATHS, "read again", "allowed", "lost", "different", "seconds")
    yield head
    for name in [*dict.fromkeys(o.name for o in outcomes), "all"]:
        of = [o for o in outcomes if name in (o.name, "all")]
        died = Counter(death for o in of for death in o.deaths)
        yield (
            name,
            len(of),
            *(died[death] for death in DEATHS),
            sum(o.again for o in of),
            sum(o.allowed for o in of),
            _lost(of),
            sum(bool(o.different) for o in of),
            f"{sum(o.seconds for o in of):.0f}",
        )
