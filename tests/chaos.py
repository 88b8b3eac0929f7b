"""Chaos: workers, schedulers and clients die while fits run on a real cluster, and nothing is lost.

    python tests/chaos.py --runs 1000 --restarts 200 --seed 0

Each run fits an estimator, or makes a report, on a cluster of processes over TCP,
`allowed-failures` at its default, while workers are killed, stopped, cut off and replaced, in every
phase of the fit; in four of ten runs others join and leave meanwhile. Each restart kills the client
of a `cme-dask` command or script, its scheduler, or a process that it started, in every phase up to
the saving of its output, and repeats the command. Every result must be equal bit by bit to the
undisturbed one. Prints tables, and exits with 1 if a run was lost or differs.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from chaos_cases import CASES, bits, differences, fit, write_stores
from chaos_client import PASS
from chaos_cluster import TTL_SECONDS, Cluster
from chaos_nursery import Nursery
from chaos_restarts import Restart, restart_all, restart_phase_rows, restart_rows
from distributed import Client

WORKERS, STRIP_SECONDS = 3, 0.03
_PATIENCE = 120.0  # seconds after which a fit counts as lost
_POLL = 0.005
_WAIT = 0.2  # seconds before a strike, at most: less than a pass takes
_AGAIN = 5  # kills over one task, more than `allowed-failures` + 1
_LIFE = 100  # runs of a cluster
_MOST, _MOVES = 5, 8  # workers, where they join and leave, and how often in one run

STRIKES = {"one": 0.52, "all": 0.17, "again": 0.06, "slow": 0.1, "cut off": 0.03, "replace": 0.12}
"""What may happen to workers, and how often: one is killed, or all, or whoever runs a certain task;
some are stopped for a while, or for so long that the scheduler gives them up; one is lost for good
and another one joins late."""


@dataclass(frozen=True)
class Strike:
    """What happens, and when.

    Attributes
    ----------
    kind
        One of ``STRIKES``.
    phase
        Of the fit; None: as soon as tasks run.
    """

    kind: str
    phase: str | None = None

    def __str__(self):
        return self.kind


@dataclass(frozen=True)
class Kill:
    """A SIGKILL, and how far the fit was.

    Attributes
    ----------
    strike
        Kind of the strike it belonged to.
    key
        Of the task that the process died over; empty: it ran none.
    phase
        What the fit had come to.
    """

    strike: str
    key: str
    phase: str


@dataclass
class Outcome:
    """What became of one fit."""

    case: str
    strikes: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    retries: int = 0
    moves: int = 0
    error: str = ""
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def hits(self):
        """Kills that hit a running task."""
        return sum(bool(kill.key) for kill in self.kills)

    def __str__(self):
        what = self.error or ", ".join(self.different[:3]) or "same bits"
        moved = f", {self.moves} joined or left" if self.moves else ""
        return (
            f"{self.case}: {', '.join(self.strikes) or 'nothing'}; {self.hits} of "
            f"{len(self.kills)} kills in a task{moved}, {self.seconds:.1f} s: {what}"
        )


class Retries(logging.Handler):
    """Count tasks that the driver asked for again."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def emit(self, record):
        """Called with what the driver logs."""
        self.count += getattr(record, "event", "") == "retry"

    def __enter__(self):
        logging.getLogger("cme_dask.run").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("cme_dask.run").removeHandler(self)


class Fit(threading.Thread):
    """A fit where ``scheduler`` says, in a thread of its own; the main thread strikes.

    Attributes
    ----------
    phases
        All so far, and when they began.
    """

    def __init__(self, case, folder, **where):
        super().__init__(daemon=True)
        self._case, self._folder = case, folder
        self._where = {**where, "progress": self._progress}
        self.phases = {"begin": time.monotonic()}
        self.found, self.error = None, ""

    def run(self):
        """Fit, and hear of the progress."""
        try:
            self.found = bits(fit(self._case, self._folder, **self._where))
        except Exception as error:  # noqa: BLE001 - whatever it is, the run is lost
            self.error = f"{type(error).__name__}: {error}"

    @property
    def phase(self):
        """The last one."""
        return list(self.phases)[-1]

    def _progress(self, event):
        name = PASS if event.steps == 1 else event.name  # of a pass alone
        self.phases.setdefault(name, time.monotonic())


@dataclass(frozen=True)
class Undisturbed:
    """What a fit should give, and how long its phases take."""

    bits: dict
    seconds: dict[str, float]

    @classmethod
    def of(cls, case, folder):
        """From a fit on threads."""
        running = Fit(case, folder, scheduler="threads", workers=2)
        running.run()
        assert running.found is not None, f"{case}: {running.error}"
        times = [*running.phases.values(), time.monotonic()]
        each = zip(running.phases, np.diff(times).tolist(), strict=True)
        return cls(running.found, {name: s for name, s in each if name not in ("begin", "done")})


class Tide(threading.Thread):
    """Workers join and leave at random while a fit runs, as on a cluster that adapts."""

    def __init__(self, cluster, running, client, rng):
        super().__init__(daemon=True)
        self._cluster, self._fit, self._client, self._rng = cluster, running, client, rng
        self.moves = 0

    def run(self):
        """One at a time."""
        while self._fit.is_alive() and self.moves < _MOVES:
            time.sleep(self._rng.uniform(0.1, 0.6))
            joins = self._rng.random() < 0.5
            if joins and len(self._cluster.workers()) < _MOST:
                self._cluster.join()
            elif not joins:
                self._cluster.leave(self._client)
            self.moves += 1


class Chaos:
    """Strikes at a cluster while a fit runs."""

    def __init__(self, cluster, running, seconds, rng):
        self._cluster, self._fit, self._seconds, self._rng = cluster, running, seconds, rng
        self.kills = []

    def strike(self, strike):
        """Strike in its phase, or at a moment when tasks run; False if the fit ended before."""
        phase = strike.phase
        if phase is not None and not self._wait(lambda: phase in self._fit.phases):
            return False
        if phase is None or "pass" in phase:
            if not self._running():
                return False
            time.sleep(self._rng.uniform(0.0, _WAIT))
        else:
            time.sleep(self._rng.uniform(0.0, 0.9) * self._seconds.get(phase, 0.0))
        if not self._fit.is_alive():
            return False
        getattr(self, "_" + strike.kind.replace(" ", "_"))()
        return True

    def _one(self):
        self._kill("one", self._chosen())

    def _all(self):
        for worker in self._cluster.workers().values():
            self._kill("all", worker)

    def _again(self):
        """Over one task, more often than Dask allows; asked for again, its key has a suffix."""
        self._running()
        chosen = self._chosen()
        task = self._cluster.task(chosen).partition("-again")[0] if chosen else ""

        def who():
            running = self._cluster.running().items()
            return next((w for w, key in running if key.partition("-again")[0] == task), None)

        for _ in range(_AGAIN if task else 0):
            self._kill("again", self._wait(who))

    def _slow(self):
        self._stop([self._chosen()], self._rng.uniform(0.2, 1.2))

    def _cut_off(self):
        self._stop(list(self._cluster.workers().values()), 2 * TTL_SECONDS + 1.0)

    def _replace(self):
        self._kill("replace", self._chosen(), self._cluster.replace)

    def _stop(self, workers, seconds):
        workers = [w for w in workers if w is not None]
        for worker in workers:
            _signal(worker.suspend)
        time.sleep(seconds)
        for worker in workers:
            _signal(worker.resume)

    def _running(self):
        """Workers that run a task, when there are some; nothing if the fit has ended."""
        return self._wait(self._cluster.running) or {}

    def _chosen(self):
        """One that runs a task, if any does; else any."""
        running = list(self._cluster.running()) or list(self._cluster.workers().values())
        return running[self._rng.integers(len(running))] if running else None

    def _wait(self, find):
        while self._fit.is_alive():
            found = find()
            if found:
                return found
            time.sleep(_POLL)
        return None

    def _kill(self, strike, worker, how=None):
        if worker is None:
            return
        phase = self._fit.phase
        key = (how or self._cluster.kill)(worker)
        self.kills.append(Kill(strike, key, phase))


def _signal(send):
    with contextlib.suppress(psutil.NoSuchProcess):  # its nanny may have given it up
        send()


def disturbed(case, strikes, folder, cluster, client, wanted, rng, tide=False):
    """One fit with strikes, held against what it should give.

    Parameters
    ----------
    case, folder
        What is fitted, and where the stores are.
    strikes
        One after the other.
    cluster, client
        Where it runs.
    wanted
        What it gives undisturbed.
    rng
        For the moments of the strikes.
    tide
        Whether workers join and leave meanwhile.
    """
    cluster.settle(client)
    outcome, begin = Outcome(case), time.monotonic()
    running = Fit(case, folder, scheduler=client)
    chaos = Chaos(cluster, running, wanted.seconds, rng)
    moving = Tide(cluster, running, client, np.random.default_rng(rng.integers(1 << 30)))
    with Retries() as retries:
        running.start()
        if tide:
            moving.start()
        for strike in strikes:
            if chaos.strike(strike):
                outcome.strikes.append(str(strike))
        running.join(_PATIENCE)
    if tide:
        moving.join(_PATIENCE)
    outcome.kills, outcome.retries, outcome.moves = chaos.kills, retries.count, moving.moves
    outcome.seconds = time.monotonic() - begin
    if running.is_alive():
        outcome.error = f"no end within {_PATIENCE:.0f} s"
    elif running.found is None:
        outcome.error = running.error
    else:
        outcome.different = differences(running.found, wanted.bits)
    return outcome


def drawn_strikes(rng, phases):
    """Strikes of one run, one to three, half of them while tasks run, the others in any phase."""
    kinds, shares = list(STRIKES), np.array(list(STRIKES.values()))
    first = str(rng.choice(kinds, p=shares / shares.sum()))
    if first in ("again", "cut off", "slow"):  # while tasks run
        return [Strike(first)]
    drawn = [first, *map(str, rng.choice(["one", "all"], rng.integers(0, 3)))]
    if not phases or rng.random() < 0.4:
        return [Strike(kind) for kind in drawn]
    at = sorted(rng.integers(len(phases), size=len(drawn)).tolist())
    return [Strike(kind, phases[i]) for kind, i in zip(drawn, at, strict=True)]


def run_all(runs, seed, folder, nursery):
    """So many fits in turn over all cases; yields their outcomes."""
    rng, names, wanted = np.random.default_rng(seed), list(CASES), {}
    done = 0
    while done < runs:  # more than once where a fit does not end: it holds on to its cluster
        with (
            Cluster(folder / f"cluster-{done}", WORKERS, STRIP_SECONDS, nursery) as cluster,
            Client(cluster.address, set_as_default=False) as client,
        ):
            outcome, until = None, min(done + _LIFE, runs)
            while done < until and (outcome is None or not outcome.error):
                name = names[done % len(names)]
                if name not in wanted:
                    wanted[name] = Undisturbed.of(name, folder)
                strikes = drawn_strikes(rng, list(wanted[name].seconds))
                tide = bool(rng.random() < 0.4)
                of = cluster, client, wanted[name], rng, tide
                outcome = disturbed(name, strikes, folder, *of)
                done += 1
                yield outcome


def rows_of(outcomes):
    """What happened, by case: rows of a table under their head."""
    yield (
        *("case", "runs", "kills", "in a task", "moves", "retries", "lost", "different"),
        "seconds",
    )
    for case in [*dict.fromkeys(o.case for o in outcomes), "all"]:
        of = [o for o in outcomes if case in (o.case, "all")]
        yield (
            case,
            len(of),
            sum(len(o.kills) for o in of),
            sum(o.hits for o in of),
            sum(o.moves for o in of),
            sum(o.retries for o in of),
            sum(bool(o.error) for o in of),
            sum(bool(o.different) for o in of),
            f"{sum(o.seconds for o in of):.0f}",
        )


def phase_rows(outcomes):
    """Kills of workers by the phase of the fit: rows of a table under their head."""
    kills = [kill for outcome in outcomes for kill in outcome.kills]
    yield ("phase", *STRIKES, "kills of workers", "in a task")
    for phase in dict.fromkeys(kill.phase for kill in kills):
        of = [kill for kill in kills if kill.phase == phase]
        by = Counter(kill.strike for kill in of)
        yield (phase, *(by[each] for each in STRIKES), len(of), sum(bool(k.key) for k in of))


def show(rows):
    """Print a table whose first column is text."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        right = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join((first.ljust(widths[0]), *right)))


def main(argv=None):
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="fits with worker failures")
    parser.add_argument("--restarts", type=int, default=50, help="clients and schedulers killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="file to which outcomes are added as they come")
    parser.add_argument("--show", type=Path, nargs="+", help="only print the tables of such files")
    given = parser.parse_args(argv)
    if given.show:
        return report([outcome for path in given.show for outcome in recorded(path)])
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # it tells of each kill
    # Clients would ignore Ctrl-C where we do: in the background of a script, under nohup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, begin, outcomes = Path(tempfile.mkdtemp(prefix="chaos-")), time.monotonic(), []
    write_stores(folder)
    with contextlib.suppress(KeyboardInterrupt), Nursery() as nursery:  # what is done is shown
        where = given.seed, folder, nursery
        each = run_all(given.runs, *where), restart_all(given.restarts, *where)
        for number, outcome in enumerate(itertools.chain(*each), 1):
            print(f"{number:4} {outcome}", file=sys.stderr, flush=True)
            outcomes.append(outcome)
            if given.record:
                with given.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    failed = report(outcomes)
    print(f"{time.monotonic() - begin:.0f} s" + (f", logs are in {folder}" if failed else ""))
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


def report(outcomes):
    """Print the tables of runs and restarts; 1 if one was lost or differs, else 0."""
    runs = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
    restarts = [outcome for outcome in outcomes if isinstance(outcome, Restart)]
    tables = rows_of(runs), phase_rows(runs), restart_rows(restarts), restart_phase_rows(restarts)
    for rows in tables:
        show(rows)
        print()
    for line in told_of_kills([kill for outcome in runs for kill in outcome.kills]):
        print(line)
    failed = any(outcome.error or outcome.different for outcome in outcomes)
    print("FAILED" if failed else "nothing was lost, nothing differs")
    return int(failed)


def recorded(path):
    """The outcomes in a file."""
    for line in path.read_text(encoding="utf-8").splitlines():
        about = json.loads(line)
        if "place" in about:
            yield Restart(**about)
        else:
            yield Outcome(**{**about, "kills": [Kill(**kill) for kill in about["kills"]]})


def told_of_kills(kills):
    """A line about the tasks that were hit."""
    tasks = (re.split(r"-(?:merge|plan|\d+)-", kill.key)[0] or "no task" for kill in kills)
    yield "killed in: " + ", ".join(f"{name} {n}" for name, n in Counter(tasks).most_common())


if __name__ == "__main__":
    sys.exit(main())
