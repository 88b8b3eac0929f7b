"""Measurements in fresh processes, repeated in turns, and the ratios that they make.

Rivals take turns (A B A B), so that what drifts in the machine meets both.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any, TypeAlias

from benchmarks.fits import bare_flops
from benchmarks.machine import limit_seconds
from benchmarks.worker import describe_job
from cme_dask import errors
from cme_dask.errors import ResourceError

Result = dict[str, Any]
Job: TypeAlias = Any
"""One of the dataclasses that ``benchmarks.worker.JOBS`` names."""

Callback = Callable[[str, int, Result], None]


@dataclass(frozen=True)
class Together:
    """Jobs that start at the same moment, each in its own process; the last one to end counts."""

    jobs: tuple[Job, ...]


@dataclass
class Measurement:
    """A measurement, with every repeat.

    Attributes
    ----------
    job
        The job as plain values; a list of them if they ran together.
    runs
        Result of each repeat: ``seconds``, ``peak_bytes`` and figures of the job.
    missing
        Why there are no runs, if there are none.
    """

    job: Any
    runs: list[Result] = field(default_factory=list)
    missing: str | None = None

    def values(self, quantity: str) -> list[float]:
        """A quantity in each repeat."""
        return [run[quantity] for run in self.runs]

    def median(self, quantity: str = "seconds") -> float:
        """Median of a quantity over the repeats."""
        return float(median(self.values(quantity)))

    def to_dict(self) -> Result:
        """Plain values, with median, least and most seconds."""
        result: Result = {"job": self.job, "missing": self.missing, "runs": self.runs}
        if self.runs:
            seconds = self.values("seconds")
            result |= {"median": median(seconds), "least": min(seconds), "most": max(seconds)}
        return result


@dataclass(frozen=True)
class Term:
    """A factor of a ratio: the median of a quantity of a measurement, or a number."""

    measurement: str | None = None
    quantity: str = "seconds"
    number: float = 1.0

    def values(self, measurements: Mapping[str, Measurement]) -> list[float]:
        """One value per repeat; empty if it was not measured."""
        if self.measurement is None:
            return [self.number]
        return [self.number * v for v in measurements[self.measurement].values(self.quantity)]

    def to_dict(self) -> Result:
        """Plain values."""
        return {
            "measurement": self.measurement,
            "quantity": self.quantity,
            "number": self.number,
        }


@dataclass(frozen=True)
class Ratio:
    """A product of medians over a product of medians, and its aim.

    Attributes
    ----------
    group
        Case and setting, such as ``fmca/tol 1e-06``.
    name
        What it says.
    over, under
        Numerator and denominator.
    at_least, at_most
        The aim, if there is one.
    """

    group: str
    name: str
    over: Sequence[Term]
    under: Sequence[Term]
    at_least: float | None = None
    at_most: float | None = None

    def to_dict(self, measurements: Mapping[str, Measurement]) -> Result:
        """Value, its least and most over the repeats (taken in turns), and all inputs."""
        over = [term.values(measurements) for term in self.over]
        under = [term.values(measurements) for term in self.under]
        known = all(over) and all(under)
        per_repeat = list(_per_repeat(over, under)) if known else []
        return {
            "group": self.group,
            "name": self.name,
            "over": [term.to_dict() for term in self.over],
            "under": [term.to_dict() for term in self.under],
            "value": _product(map(median, over)) / _product(map(median, under)) if known else None,
            "least": min(per_repeat, default=None),
            "most": max(per_repeat, default=None),
            "at_least": self.at_least,
            "at_most": self.at_most,
        }


def _per_repeat(over: list[list[float]], under: list[list[float]]) -> Iterator[float]:
    repeats = max(map(len, over + under))
    for i in range(repeats):
        up, down = ([values[min(i, len(values) - 1)] for values in side] for side in (over, under))
        yield _product(up) / _product(down)


def _product(values: Any) -> float:
    result = 1.0
    for value in values:
        result *= value
    return result


def measure(
    jobs: Mapping[str, Job | Together],
    repeats: int,
    measurements: dict[str, Measurement],
    callback: Callback,
    *,
    peers: Container[str] = (),
) -> None:
    """Run each job ``repeats`` times, in turns, and add what they find to ``measurements``.

    Parameters
    ----------
    jobs
        By the key of their measurement.
    repeats
        Number of runs; what ``measurements`` holds already counts.
    measurements
        Takes the results.
    callback
        Called with key, number of the run and result after each.
    peers
        Keys of other packages: if their process fails, the failure is the result.

    Raises
    ------
    CmeDaskError
        What a job raised.
    ResourceError
        If its process failed.
    """
    for key, job in jobs.items():
        measurements.setdefault(key, Measurement(_described(job)))
    for repeat in range(repeats):
        for key, job in jobs.items():
            measurement = measurements[key]
            if len(measurement.runs) > repeat or measurement.missing is not None:
                continue
            try:
                run = run_fresh(job)
            except ResourceError as error:
                if key not in peers:
                    raise
                measurement.runs, measurement.missing = [], str(error)
                run = {"missing": measurement.missing}
            else:
                measurement.runs.append(run)
            callback(key, repeat, run)


def run_fresh(job: Job | Together) -> Result:
    """Run a job in a fresh process, or several at the same time in one each."""
    if not isinstance(job, Together):
        return _run_all((job,))[0]
    runs = _run_all(job.jobs)
    return {**last_of(runs), "together": runs}


def last_of(runs: Sequence[Result]) -> Result:
    """Seconds of the one that took longest, of the whole and of its pass if all report one."""
    quantities = ("seconds", "pass_seconds")
    return {
        key: max(run[key] for run in runs) for key in quantities if all(key in run for run in runs)
    }


def _described(job: Job | Together) -> Any:
    if isinstance(job, Together):
        return [describe_job(one) for one in job.jobs]
    return describe_job(job)


def _run_all(jobs: Sequence[Job]) -> list[Result]:
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_Process(job)) for job in jobs]
        for process in running:
            process.wait_until_ready()
        for process in running:
            process.go()
        return [process.result() for process in running]


class _Process:
    """A worker, from its start to its answer; it is killed if we leave early."""

    def __init__(self, job: Job) -> None:
        self._name = type(job).__name__
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed on exit)
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._send(json.dumps(describe_job(job)))

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        for stream in (self._popen.stdin, self._popen.stdout, self._errors):
            with contextlib.suppress(OSError):
                _open(stream).close()
        self._popen.wait()

    def wait_until_ready(self) -> None:
        """Until it has its rows and has warmed up."""
        line = self._receive()
        if line != "ready":
            self._raise(line)

    def go(self) -> None:
        """Start the timed work."""
        self._send("go")

    def result(self) -> Result:
        """The result of the job."""
        line = self._receive()
        message: Result = json.loads(line) if line else {"error": None}
        if "error" in message:
            self._raise(line)
        return message

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # its answer, or none, says why
            stream = _open(self._popen.stdin)
            stream.write(line + "\n")
            stream.flush()

    def _receive(self) -> str:
        return str(_open(self._popen.stdout).readline()).strip()

    def _raise(self, line: str) -> None:
        if line:
            info = json.loads(line)
            raise getattr(errors, info["error"], ResourceError)(info["message"])
        code = self._popen.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        why = said[-1] if said else f"its process ended with code {code}"
        if code == -9:
            why = "its process was killed, perhaps since memory ran out: fewer rows or lower ranks"
        raise ResourceError(f"the measurement {self._name} failed: {why}")


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


# A run of the bench: its settings, its measurements and ratios


D = 3
"""Columns of the rows of most cases."""


def spacing(rank: int, d: int) -> float:
    """A length scale near the distance of so many pivots in [0, 1]^d, so that all are reached."""
    return float(rank ** (-1.0 / d))


@dataclass(frozen=True)
class Size:
    """How large a case is: rows, and the ranks or tolerances it goes through."""

    rows: int
    ranks: tuple[int, ...] = ()
    tols: tuple[float, ...] = ()


@dataclass
class Bench:
    """The settings of a run of the bench, and its results.

    Attributes
    ----------
    folder
        For stores and pivots, removed afterwards.
    stores
        For large stores, which later runs use again.
    workers
        Threads.
    repeats
        Runs of each measurement.
    callback
        Called with each run.
    measurements, ratios
        Results, by key; keys begin with the case.
    """

    folder: Path
    stores: Path
    workers: int
    repeats: int
    callback: Callback
    measurements: dict[str, Measurement] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)

    def measure(
        self, jobs: Mapping[str, Any], repeats: int | None = None, peers: Container[str] = ()
    ) -> None:
        """Run the jobs in turns; those of peers may fail."""
        measure(jobs, repeats or self.repeats, self.measurements, self.callback, peers=peers)

    def limit(self, key: str, of: str, gemm: str, n: int) -> None:
        """Add the limit of the pass of a measured fit, from rates that took turns with it."""
        ranks = self.measurements[of].runs[0]["ranks"]
        rates = self.measurements[gemm].runs
        runs = [
            {"seconds": limit_seconds(n, D, ranks, rate["gemm_all"], rate["exp_all"])}
            for rate in rates
        ]
        job = {"job": "limit", "n": n, "d": D, "ranks": ranks, "rates": gemm}
        self.measurements[key] = Measurement(job, runs)

    def compare(
        self,
        group: str,
        name: str,
        over: str,
        under: str,
        quantity: str = "seconds",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Add the ratio of a quantity of two measurements."""
        up, down = Term(over, quantity), Term(under, quantity)
        self.ratios.append(Ratio(group, name, [up], [down], at_least, at_most))

    def bare_rate(self, group: str, bare: str, gemm: str, n: int) -> None:
        """Add the share of the rate of matrix products that a bare pass reaches."""
        ranks = self.measurements[bare].runs[0]["ranks"]
        flops = Term(number=bare_flops(n, ranks))
        under = [Term(bare), Term(gemm, "gemm_all")]
        aim = 0.5 if min(ranks) >= 200 else None
        name = "bare pass, share of the GEMM rate"
        self.ratios.append(Ratio(group, name, [flops], under, at_least=aim))
