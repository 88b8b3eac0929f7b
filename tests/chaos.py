"""Chaos: workers, schedulers and clients die while fits run on a real cluster, and nothing is lost.

    python tests/chaos.py --runs 200 --restarts 50 --seed 0

Each run fits an estimator on a cluster of processes over TCP, `allowed-failures` at its default,
while workers are killed, stopped, cut off, replaced. Each restart kills the client or the scheduler
of a `cme-dask` command and goes on with `--resume`. Every result must be equal bit by bit to the
undisturbed one. Prints a table, and exits with 1 if a run was lost or differs.
"""

import argparse
import contextlib
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
from chaos_cluster import TTL_SECONDS, Cluster
from chaos_restarts import restart_all, restart_rows
from distributed import Client

WORKERS, STRIP_SECONDS = 3, 0.05
_PATIENCE = 240.0  # seconds after which a fit counts as lost
_POLL = 0.01
_WAIT = 0.4  # seconds before a strike, at most: less than a pass takes
_AGAIN = 5  # kills over one task, more than `allowed-failures` + 1

STRIKES = {"one": 0.5, "all": 0.16, "again": 0.08, "slow": 0.1, "cut off": 0.04, "replace": 0.12}
"""What may happen to workers, and how often: one is killed, or all, or whoever runs a certain task;
some are stopped for a while, or for so long that the scheduler gives them up; one is lost for good
and another one joins late."""


@dataclass(frozen=True)
class Kill:
    """A SIGKILL, and how far the fit was.

    Attributes
    ----------
    strike
        Kind of the strike it belonged to.
    key
        Of the task that the process died over; empty: it ran none.
    phase, rows, rows_total
        What the fit had told last.
    """

    strike: str
    key: str
    phase: str
    rows: int
    rows_total: int


@dataclass
class Outcome:
    """What became of one fit."""

    case: str
    strikes: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    retries: int = 0
    error: str = ""
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def hits(self):
        """Kills that hit a running task."""
        return sum(bool(kill.key) for kill in self.kills)

    def __str__(self):
        what = self.error or ", ".join(self.different[:3]) or "same bits"
        return (
            f"{self.case}: {', '.join(self.strikes) or 'nothing'}; {self.hits} of "
            f"{len(self.kills)} kills in a task, {self.seconds:.1f} s: {what}"
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
    """A fit on the cluster, in a thread of its own; the main thread strikes."""

    def __init__(self, case, folder, client):
        super().__init__(daemon=True)
        self._case, self._folder, self._client = case, folder, client
        self.phase, self.rows, self.rows_total = "", 0, 0
        self.found, self.error = None, ""

    def run(self):
        """Fit, and hear of the progress."""
        try:
            estimator = fit(
                self._case, self._folder, scheduler=self._client, progress=self._progress
            )
            self.found = bits(estimator)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run is lost
            self.error = f"{type(error).__name__}: {error}"

    def _progress(self, news):
        news = news.detail
        self.phase = getattr(news, "name", type(news).__name__)
        self.rows, self.rows_total = getattr(news, "rows", 0), getattr(news, "rows_total", 0)


class Chaos:
    """Strikes at a cluster while a fit runs."""

    def __init__(self, cluster, running, rng):
        self._cluster, self._fit, self._rng = cluster, running, rng
        self.kills = []

    def strike(self, kind):
        """Strike at a moment when tasks run; False if the fit ended before."""
        if not self._running():
            return False
        time.sleep(self._rng.uniform(0.0, _WAIT))
        if not self._running():
            return False
        getattr(self, "_" + kind.replace(" ", "_"))()
        return True

    def _one(self):
        self._kill("one", self._chosen())

    def _all(self):
        for worker in self._cluster.workers().values():
            self._kill("all", worker)

    def _again(self):
        """Over one task, more often than Dask allows; asked for again, its key has a suffix."""
        chosen = self._chosen()
        task = self._cluster.task(chosen).partition("-again")[0] if chosen else ""

        def who():
            running = self._cluster.running().items()
            return next((w for w, key in running if key.partition("-again")[0] == task), None)

        for _ in range(_AGAIN):
            self._kill("again", self._wait(who))

    def _slow(self):
        self._stop([self._chosen()], self._rng.uniform(0.3, 2.0))

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
        running = list(self._running())
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
        told = self._fit.phase, self._fit.rows, self._fit.rows_total
        key = (how or self._cluster.kill)(worker)
        self.kills.append(Kill(strike, key, *told))


def _signal(send):
    with contextlib.suppress(psutil.NoSuchProcess):  # its nanny may have given it up
        send()


def disturbed(case, strikes, folder, cluster, client, wanted, rng):
    """One fit with strikes, held against the bits that it should have."""
    cluster.wait_for_workers()
    client.wait_for_workers(cluster.size, timeout=180)
    outcome, begin = Outcome(case), time.monotonic()
    running = Fit(case, folder, client)
    chaos = Chaos(cluster, running, rng)
    with Retries() as retries:
        running.start()
        for kind in strikes:
            if chaos.strike(kind):
                outcome.strikes.append(kind)
        running.join(_PATIENCE)
    outcome.kills, outcome.retries = chaos.kills, retries.count
    outcome.seconds = time.monotonic() - begin
    if running.is_alive():
        outcome.error = f"no end within {_PATIENCE:.0f} s"
    elif running.found is None:
        outcome.error = running.error
    else:
        outcome.different = differences(running.found, wanted)
    return outcome


def drawn_strikes(rng):
    """Strikes of one run, one to three."""
    kinds, shares = list(STRIKES), np.array(list(STRIKES.values()))
    first = str(rng.choice(kinds, p=shares / shares.sum()))
    if first in ("again", "cut off"):  # long by themselves
        return [first]
    return [first, *(str(kind) for kind in rng.choice(["one", "all"], rng.integers(0, 3)))]


def run_all(runs, seed, folder, say):
    """So many fits in turn over all cases; yields their outcomes."""
    rng, names = np.random.default_rng(seed), list(CASES)
    few = names[:runs]
    wanted = {name: bits(fit(name, folder, scheduler="threads", workers=2)) for name in few}
    done = 0
    while done < runs:  # more than once where a fit does not end: it holds on to its cluster
        with (
            Cluster(folder / f"cluster-{done}", WORKERS, STRIP_SECONDS) as cluster,
            Client(cluster.address, set_as_default=False) as client,
        ):
            outcome = None
            while done < runs and (outcome is None or not outcome.error):
                name, strikes = names[done % len(names)], drawn_strikes(rng)
                outcome = disturbed(name, strikes, folder, cluster, client, wanted[name], rng)
                done += 1
                say(f"{done:4} {outcome}")
                yield outcome


def rows_of(outcomes):
    """What happened, by estimator: rows of a table under their head."""
    yield ("estimator", "runs", "kills", "in a task", "retries", "lost", "different", "seconds")
    for case in [*dict.fromkeys(o.case for o in outcomes), "all"]:
        of = [o for o in outcomes if case in (o.case, "all")]
        yield (
            case,
            len(of),
            sum(len(o.kills) for o in of),
            sum(o.hits for o in of),
            sum(o.retries for o in of),
            sum(bool(o.error) for o in of),
            sum(bool(o.different) for o in of),
            f"{sum(o.seconds for o in of):.0f}",
        )


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
    given = parser.parse_args(argv)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # it tells of each kill
    # Clients would ignore Ctrl-C where we do: in the background of a script, under nohup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, begin = Path(tempfile.mkdtemp(prefix="chaos-")), time.monotonic()
    write_stores(folder)
    runs = list(run_all(given.runs, given.seed, folder, _say))
    restarts = restart_all(given.restarts, given.seed, folder, _say)
    for rows in (rows_of(runs), restart_rows(restarts)):
        show(rows)
        print()
    for line in told_of_kills([kill for outcome in runs for kill in outcome.kills]):
        print(line)
    failed = any(outcome.error or outcome.different for outcome in (*runs, *restarts))
    end = f"FAILED, logs are in {folder}" if failed else "nothing was lost, nothing differs"
    print(f"{time.monotonic() - begin:.0f} s: {end}")
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


def told_of_kills(kills):
    """Lines about the tasks that were hit, and how far the fits were."""
    tasks = (re.split(r"-(?:merge|plan|\d+)-", kill.key)[0] or "no task" for kill in kills)
    yield "killed in: " + ", ".join(f"{name} {n}" for name, n in Counter(tasks).most_common())
    shares = [kill.rows / kill.rows_total for kill in kills if kill.rows_total]
    if shares:
        least, median, most = (f"{share:.0%}" for share in np.quantile(shares, [0, 0.5, 1]))
        yield f"rows of the pass told at kills: {least} at least, {median} median, {most} at most"


def _say(line):
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
