"""Restarts of the chaos test: a client, its scheduler or a process of it dies; another goes on."""

import contextlib
import itertools
import json
import pickle
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from chaos_cases import differences, fit, state_bits, timeless, write_stores
from chaos_cluster import Cluster

from cme_dask.data.model_file import read_model
from cme_dask.numerics.reduction import strip_length

WORKERS, STRIP_SECONDS = 3, 0.03
_PATIENCE = 300.0  # seconds after which a client counts as lost
_POLL = 0.005
_GIVE_UP = 5  # runs that were lost
_PLACES = {"cluster": 0.6, "threads": 0.3, "processes": 0.1}  # which take seconds to start

_GIVEN = ("--event", "y > 0.5", "--kernel", "median", "--tol", "1e-2", "--max-rank", "60")
_GIVEN += ("--reg", "1e-4", "--calibration", "no")
_SMALL = ("--event", "y > 0.5", "--sample-size", "400", "--max-rank", "30")


@dataclass(frozen=True)
class Command:
    """A command with its options and its store; ``made`` says what it makes.

    That is a ``model`` at --out, a ``tuned`` folder there, a ``comparison``, or a ``report`` that
    it prints.
    """

    words: tuple[str, ...]
    options: tuple[str, ...]
    store: str = "numbers"
    made: str = "model"
    resumes: bool = True


COMMANDS = {
    "cme-dask fit": Command(("fit",), _SMALL),
    "cme-dask fit, jumps": Command(("fit",), _SMALL, "jumps"),
    "cme-dask tune": Command(
        ("tune",), ("--rows", "250", "--evaluations", "3", "--max-rank", "30"), made="tuned"
    ),
    "cme-dask fit, embedding": Command(("fit",), ("--estimator", "embedding", *_SMALL)),
    "cme-dask fit, sparse": Command(
        ("fit",), ("--estimator", "sparse", "--sample-size", "400", "--max-rank", "15")
    ),
    "cme-dask fit, classifier": Command(
        ("fit",), ("--estimator", "classifier", *_SMALL[2:]), "labels"
    ),
    "cme-dask fit, multiclass": Command(
        ("fit",),
        ("--estimator", "multiclass", "--max-iter", "40", "--batch-size", "100", *_SMALL[2:]),
        "labels",
    ),
    "cme-dask drift": Command(("drift", "MODEL"), (), "skewed", "report"),
    "cme-dask compare": Command(
        ("compare",),
        ("--methods", "normal", "--splits", "3", "--rows", "2000", "--threads", "1"),
        made="comparison",
        resumes=False,
    ),
    "cme-dask test": Command(("test", "independence"), ("--max-rank", "30"), made="report"),
    "cme-dask features": Command(("features",), ("--length-scale", "1", "--tol", "1e-2")),
    "cme-dask fit, given": Command(("fit",), (*_GIVEN, "--residual", "no")),
    "cme-dask fit, given, residual": Command(("fit",), (*_GIVEN, "--residual", "yes")),
}
SCRIPTS = (
    *("joint, learned", "joint, learned, trees", "joint, learned, scores"),
    *("joint classifier, learned", "logistic", "cholesky, random", "transfer", "filter"),
    "joint, certified, greedy",
)
"""Cases of which a script is the client; it goes on when it is started again."""
_LONG = ("cme-dask tune", "cme-dask fit, jumps", "cme-dask compare")
_SHORT = tuple(name for name in (*COMMANDS, *SCRIPTS) if name not in _LONG)
NAMES = (*_LONG, *_SHORT, *_SHORT, *_SHORT)
DEATHS = ("client", "Ctrl-C", "SIGTERM", "scheduler", "everything", "process")
_POSSIBLE = {"threads": DEATHS[:3], "processes": (*DEATHS[:3], "process"), "cluster": DEATHS[:5]}
_CODES = {
    "client": -signal.SIGKILL,
    "Ctrl-C": 130,
    "SIGTERM": 143,
    "scheduler": 3,
    "everything": -signal.SIGKILL,
    "process": 3,
}
_SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "client": signal.SIGKILL}


@dataclass
class Restart:
    """What became of one run that was begun, ended by force, and gone on with.

    Attributes
    ----------
    name, place, deaths, phases
        Whose, where, what ended it, one after the other, and what it was at.
    again, allowed
        Strips that were read more than once; how many may be.
    trials
        Of searches, those that the last start took from the checkpoint.
    taken
        Strips that the last start took from the checkpoint, as it says; of scripts nothing.
    error, different
        Why it was lost; arrays that differ.
    """

    name: str
    place: str = ""
    deaths: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    again: int = 0
    allowed: int = 0
    trials: int = 0
    taken: int | None = None
    error: str = ""
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self):
        what = self.error or ", ".join(self.different[:3]) or "same bits"
        died = ", ".join(f"{d} ({p})" for d, p in zip(self.deaths, self.phases, strict=True))
        return (
            f"{self.name} on {self.place}: {died or 'nothing'}; {self.again} strips again of "
            f"{self.allowed} allowed, {self.trials} trials and {self.taken} strips resumed, "
            f"{self.seconds:.1f} s: {what}"
        )


@dataclass(frozen=True)
class Whole:
    """What a client makes undisturbed.

    Attributes
    ----------
    bits, strips, trials
        Of its output; strips that it reads and trials of searches that it makes.
    seconds
        How long its phases take.
    """

    bits: dict
    strips: int
    trials: int
    seconds: dict[str, float]


class Lost(Exception):
    """A run did not do what it should have."""


class Restarts:
    """Runs clients, and ends them.

    Parameters
    ----------
    folder
        For all outputs, and of the stores, which are written where they are missing.
    nursery
        Forks the clients.
    """

    def __init__(self, folder, nursery):
        self._folder, self._nursery = Path(folder), nursery
        self._count = self._started = 0
        self._wanted = {}
        if not (self._folder / "numbers.zarr").exists():
            write_stores(self._folder)

    def undisturbed(self, name, cluster):
        """What a client makes on threads."""
        if name not in self._wanted:
            out, checkpoint = self._paths()
            cluster.strips_read()
            begin = time.monotonic()
            process = self._start(name, "threads", cluster, out, checkpoint)
            self._finish(process)
            phases = [("begin", begin), *self._phases(process), ("end", time.monotonic())]
            pairs = itertools.pairwise(phases)
            seconds = {phase: after - at for (phase, at), (_, after) in pairs if phase != "done"}
            of = cluster.strips_read(), self._trials(process)
            self._wanted[name] = Whole(self._bits_of(name, out), *of, seconds)
        return self._wanted[name]

    def restarted(self, name, place, deaths, cluster, rng):
        """One run that dies so in phases drawn at random, and is gone on with.

        Parameters
        ----------
        name, place
            One of ``NAMES``; ``cluster``, ``threads`` or ``processes``.
        deaths
            Kinds, or pairs of a kind and a phase.
        cluster
            Where it runs, unless that is elsewhere.
        rng
            For the phases and the moments in them.
        """
        begin, outcome = time.monotonic(), Restart(name, place)
        try:
            cluster.wait_for_workers()
            self._through(outcome, deaths, self.undisturbed(name, cluster), cluster, rng)
        except Lost as error:
            outcome.error = str(error)
            cluster.again()
        outcome.seconds = time.monotonic() - begin
        return outcome

    def _through(self, outcome, deaths, wanted, cluster, rng):
        out, checkpoint = self._paths()
        name, place = outcome.name, outcome.place
        cluster.strips_read()
        process = self._start(name, place, cluster, out, checkpoint)
        for death in deaths:
            kind, phase = (death, None) if isinstance(death, str) else death
            phase = phase or str(rng.choice(list(wanted.seconds)))
            moment = rng.uniform(0.0, 0.9) * wanted.seconds[phase]
            if not self._reached(process, phase, moment):
                break  # it had ended before
            self._end(process, kind, name, cluster)
            if process.returncode == 0:
                break
            if out.exists() and COMMANDS.get(name, Command((), ())).made != "tuned":
                self._check(name, out, wanted)
            outcome.deaths.append(kind)
            outcome.phases.append(([p for p, _ in self._phases(process)] or ["begin"])[-1])
            if checkpoint.exists():
                outcome.allowed += (cluster.size + 1) * _block_strips(checkpoint)
            else:  # none was begun, or all is done but the report was not printed
                outcome.allowed += wanted.strips
            process = self._start(name, place, cluster, out, checkpoint)
        outcome.taken = self._finish(process)
        outcome.trials = self._resumed(checkpoint, process)
        read = cluster.strips_read()
        if place != "processes":  # whose strips are not counted
            outcome.again = max(read - wanted.strips, 0)
        outcome.different = differences(self._bits_of(name, out), wanted.bits)
        resumes = name not in COMMANDS or COMMANDS[name].resumes
        if resumes and outcome.again > outcome.allowed:
            raise Lost(f"{outcome.again} strips were read again, {outcome.allowed} may be")
        made = self._trials(process)
        if made not in (0, wanted.trials):  # 0: the output was there, or it learns nothing
            raise Lost(f"{made} trials were made or resumed, {wanted.trials} make the search")

    def _check(self, name, out, wanted):
        """An output that is there is whole."""
        different = differences(self._bits_of(name, out), wanted.bits)
        if different:
            raise Lost(f"a run that was ended by force left another output ({different[:3]})")

    def _start(self, name, place, cluster, out, checkpoint):
        where = cluster.address if place == "cluster" else place
        if name in COMMANDS:
            command = COMMANDS[name]
            model = str(self._drift_model()) if "MODEL" in command.words else ""
            words = [model if word == "MODEL" else word for word in command.words]
            words += [str(self._folder / f"{command.store}.zarr"), *command.options, "--json"]
            if command.made != "report":
                words += ["--out", str(out)]
            if command.resumes:
                words += ["--scheduler", where, "--checkpoint", str(checkpoint)]
                words += ["--workers", "2"] if place != "cluster" else []
            kind = "cme-dask"
        else:
            kind = str(Path(__file__).with_name("chaos_client.py"))
            words = [name, self._folder, where, checkpoint, out]
        self._started += 1
        return self._nursery.start(
            kind,
            words,
            log=self._said("out"),
            errors=self._said("err"),
            CHAOS_PHASES=str(self._folder),
            **cluster.environment,
        )

    def _drift_model(self):
        path = self._folder / "drift.model"
        if not path.exists():
            fit("joint", self._folder, scheduler="synchronous").save(path)
        return path

    def _said(self, stream):
        return self._folder / f"client-{self._started}.{stream}"

    def _phases(self, process):
        """Those of a client so far, and when they began."""
        with contextlib.suppress(FileNotFoundError):
            text = (self._folder / f"{process.pid}.phases").read_text(encoding="utf-8")
            lines = [line.partition(" ") for line in text.splitlines()]
            return [(phase, float(at)) for at, _, phase in lines if phase]
        return []

    def _trials(self, process):
        """Those that a client made or took from its checkpoint."""
        with contextlib.suppress(FileNotFoundError):
            text = (self._folder / f"{process.pid}.trials").read_text(encoding="utf-8")
            return sum(map(int, text.split()))
        return 0

    def _resumed(self, checkpoint, process):
        with contextlib.suppress(FileNotFoundError):
            text = (self._folder / f"{process.pid}.trials").read_text(encoding="utf-8")
            return sum(count for count in map(int, text.split()) if count > 1)
        return 0

    def _reached(self, process, phase, seconds):
        """Wait until a phase has gone on for so long; False if the client ended before."""
        until, reached = time.monotonic() + _PATIENCE, None
        while process.poll() is None and time.monotonic() < until:
            if reached is None and (phase == "begin" or phase in dict(self._phases(process))):
                reached = time.monotonic()
            if reached is not None and time.monotonic() - reached >= seconds:
                return process.poll() is None
            time.sleep(_POLL)
        return False

    def _end(self, process, death, name, cluster):
        """End a run by force, and see that it says so in one sentence."""
        if death == "scheduler":
            cluster.kill_scheduler()
        elif death == "process":
            _kill_a_child(process)
        else:
            process.send_signal(_SIGNALS.get(death, signal.SIGKILL))
        if death == "everything":
            cluster.stop()
        code = self._wait(process)
        # 0: it had done all. By the signal itself: Python was ending, and shells say 130 as well.
        allowed = _CODES[death], 0, -_SIGNALS.get(death, 0)
        if name in COMMANDS and code not in allowed:
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
        return json.loads(said).get("resumed_strips") if said.startswith("{") else None

    def _wait(self, process):
        try:
            return process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.end()
            raise Lost(f"no end within {_PATIENCE:.0f} s: {self._last_words()}") from None

    def _last_words(self):
        return self._said("err").read_text().strip().splitlines()[-1:]

    def _paths(self):
        self._count += 1
        return tuple(self._folder / f"{kind}-{self._count}" for kind in ("model", "checkpoint"))

    def _bits_of(self, name, out):
        """What a client made, or printed last."""
        made = COMMANDS[name].made if name in COMMANDS else "script"
        if made == "report":
            return _flat_json(json.loads(self._said("out").read_text()))
        if made == "comparison":
            return _flat_json(json.loads(out.read_text()))
        if made == "script" and out.is_file():
            return pickle.loads(out.read_bytes())  # noqa: S301 - of chaos_client.py
        return state_bits(read_model(out / "model.zarr" if made == "tuned" else out))


def _flat_json(values):
    values.pop("out", None)
    return {"report": json.dumps(timeless(values), sort_keys=True)}


def _kill_a_child(process):
    """SIGKILL one of the processes that a client started, as soon as there is one."""
    until = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children()
            workers = [c for c in children if any("spawn_main" in w for w in c.cmdline())]
            if workers:
                workers[-1].kill()
                return
        time.sleep(_POLL)


def _block_strips(checkpoint):
    """Strips of a block of the checkpoint: of a task as well, at most."""
    told = [json.loads(path.read_text()) for path in checkpoint.glob("pass-*/pass.json")]
    return max((-(-about["block"] // strip_length(about["rows"])) for about in told), default=1)


def restart_all(restarts, seed, folder, nursery):
    """So many restarts in turn over all clients; yields their outcomes."""
    if not restarts:
        return
    rng, deaths, lost = np.random.default_rng([seed, 1]), 0, 0
    runs = Restarts(folder / "restarts", nursery)
    with Cluster(folder / "cluster-restarts", WORKERS, STRIP_SECONDS, nursery) as cluster:
        for name in itertools.islice(itertools.cycle(NAMES), 13 * seed % len(NAMES), None):
            if deaths >= restarts or lost >= _GIVE_UP:
                return
            place = str(rng.choice(list(_PLACES), p=list(_PLACES.values())))
            if name in COMMANDS and not COMMANDS[name].resumes:
                place = "threads"
            kinds = [str(d) for d in rng.choice(_POSSIBLE[place], 1 + (rng.random() < 0.25))]
            outcome = runs.restarted(name, place, kinds, cluster, rng)
            deaths, lost = deaths + len(outcome.deaths), lost + bool(outcome.error)
            yield outcome


def restart_rows(outcomes):
    """What happened, by client: rows of a table under their head."""
    yield (
        *("client", "runs", *DEATHS, "strips again", "allowed", "trials resumed", "lost"),
        *("different", "seconds"),
    )
    for name in [*dict.fromkeys(o.name for o in outcomes), "all"]:
        of = [o for o in outcomes if name in (o.name, "all")]
        died = Counter(death for o in of for death in o.deaths)
        yield (
            name,
            len(of),
            *(died[death] for death in DEATHS),
            sum(o.again for o in of),
            sum(o.allowed for o in of),
            sum(o.trials for o in of),
            sum(bool(o.error) for o in of),
            sum(bool(o.different) for o in of),
            f"{sum(o.seconds for o in of):.0f}",
        )


def restart_phase_rows(outcomes):
    """Deaths by the phase of the client: rows of a table under their head."""
    pairs = [pair for o in outcomes for pair in zip(o.phases, o.deaths, strict=True)]
    yield ("phase", *DEATHS, "all")
    for phase in dict.fromkeys(phase for phase, _ in pairs):
        died = Counter(death for at, death in pairs if at == phase)
        yield (phase, *(died[death] for death in DEATHS), sum(died.values()))
