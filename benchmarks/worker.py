"""One measurement in a process of its own: ``python -m benchmarks.worker``.

A line of JSON names the job on stdin; the process prepares, says "ready" on stdout, waits for
another line, runs the job once, and prints one line of JSON. So several can start together.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, get_type_hints

from cme_dask.errors import CmeDaskError

JOBS = {
    "ArrowRead": "benchmarks.ingest",
    "Bare": "benchmarks.fits",
    "ConditionalMean": "benchmarks.peers",
    "DefaultQuantiles": "benchmarks.queries",
    "EmbeddingFit": "benchmarks.fits",
    "Expectations": "benchmarks.queries",
    "Fit": "benchmarks.fits",
    "Fmca": "benchmarks.peers",
    "Ingest": "benchmarks.ingest",
    "GpuRates": "benchmarks.device",
    "GemmRate": "benchmarks.machine",
    "KernelBlocks": "benchmarks.queries",
    "LimitedFit": "benchmarks.memory",
    "MachineRates": "benchmarks.machine",
    "Quantiles": "benchmarks.queries",
    "Reference": "benchmarks.peers",
    "BoostingFit": "benchmarks.classes",
    "MulticlassFit": "benchmarks.classes",
    "Coverage": "benchmarks.coverage",
    "SmallFit": "benchmarks.small",
    "ShapeFit": "benchmarks.memory",
    "SolveCoupling": "benchmarks.programs",
    "SolveProgram": "benchmarks.programs",
    "SolveSparse": "benchmarks.sparse",
    "StoreRead": "benchmarks.fits",
    "WatchedFit": "benchmarks.cluster",
}
"""Where each job lives: only its own module is imported."""


def describe_job(job: Any) -> dict[str, Any]:
    """A job as plain values; :func:`make_job` reads them."""
    return {"job": type(job).__name__, **dataclasses.asdict(job)}


def make_job(described: dict[str, Any]) -> Any:
    """The job that :func:`describe_job` described."""
    name = described["job"]
    kind = getattr(importlib.import_module(JOBS[name]), name)
    values = {key: value for key, value in described.items() if key != "job"}
    return _made(kind, values)


def _made(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass from plain values, the dataclasses in it, too."""
    hints = get_type_hints(kind)
    inner = {
        key: _made(hints[key], value) if dataclasses.is_dataclass(hints[key]) else value
        for key, value in values.items()
    }
    return kind(**inner)


def measured(run: Any) -> dict[str, Any]:
    """Seconds and memory of a prepared job, and what it says about itself afterwards.

    ``peak_bytes`` is the high-water mark of the process while the job ran, ``base_bytes`` what it
    held before, its rows among it; None where the system does not tell.
    """
    base = status_bytes("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the mark starts anew
    begin = time.perf_counter()
    describe = run()
    seconds = time.perf_counter() - begin
    peak = status_bytes("VmHWM")
    return {"seconds": seconds, "peak_bytes": peak, "base_bytes": base, **describe()}


def status_bytes(name: str) -> int | None:
    """An entry of the status of this process in bytes; None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    result = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return next((1024 * int(kibibytes) for kibibytes in result), None)


def main() -> None:
    """Prepare, wait, run, print; libraries that print do so to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        run = make_job(json.loads(sys.stdin.readline())).prepare()
        print("ready", file=answers)
        if sys.stdin.readline():  # nothing comes if the parent has gone
            print(json.dumps(measured(run)), file=answers)
    except CmeDaskError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), file=answers)
        sys.exit(1)


if __name__ == "__main__":
    main()
