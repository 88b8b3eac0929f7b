"""Run the cases of ``python3 run bench`` and write the results into a folder."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, FULL, QUICK
from benchmarks.machine import describe_machine
from benchmarks.measure import Bench, Size
from benchmarks.report import bench_picture, measurement_line
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.progress import ProgressLines
from cme_dask.data.atomic import disk_errors, of_format, writing
from cme_dask.errors import DataError
from cme_dask.models import plots as drawing
from cme_dask.passes.driver import RunOptions

# The outputs of a bench or a study: its JSON form and its picture


Result = dict[str, Any]


def write_result(
    result: Result,
    out: Path,
    names: tuple[str, str],
    draw: Callable[[Result, Path], None],
    progress: ProgressLines,
    pages: Mapping[str, Callable[[Result], str]] | None = None,
) -> None:
    """Write the files, and their paths into the result.

    Parameters
    ----------
    result
        The JSON form.
    out
        The folder.
    names
        Of the JSON file and of the picture.
    draw
        Draws the picture, where matplotlib is installed.
    progress
        Where it is said if it is not.
    pages
        Further texts by their file names, made from the result.
    """
    json_file, picture = (out / name for name in names)
    drawn = [picture] if drawing.available() else []
    if not drawn:
        progress.say(f"no picture: {drawing.MISSING}")
    result["files"] = [
        str(path) for path in (json_file, *drawn, *(out / name for name in pages or ()))
    ]
    with writing(json_file, of_format(names[0]), overwrite=True) as aside, disk_errors(json_file):
        aside.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    for path in drawn:  # what took hours to measure is on disk, whatever becomes of pictures
        with writing(path, of_format(names[1]), overwrite=True) as aside, disk_errors(path):
            draw(result, aside)
    for name, text in (pages or {}).items():
        with writing(out / name, of_format(name), overwrite=True) as aside, disk_errors(out / name):
            aside.write_text(text(result))


# ``python3 run bench``: run the cases and write the results


OUTPUTS = ("bench.json", "bench.png")
SCHEMA_VERSION = 1

_REPEATS = {False: 3, True: 5}
_LEAST_ROWS = 1000


@dataclass(frozen=True)
class Options:
    """What to measure; None: as the cases say.

    Parameters
    ----------
    cases
        Names of cases; empty for all.
    full
        Sizes of the published figures instead of a few minutes.
    rows, ranks, tols
        Instead of the cases' own.
    repeats
        Runs of each measurement.
    workers
        Threads.
    stores
        Folder for large stores, which later runs use again; None for none.
    """

    cases: tuple[str, ...] = ()
    full: bool = False
    rows: int | None = None
    ranks: tuple[int, ...] | None = None
    tols: tuple[float, ...] | None = None
    repeats: int | None = None
    workers: int | None = None
    stores: Path | None = None

    def sizes(self) -> dict[str, Size]:
        """Size of each case that runs.

        Raises
        ------
        DataError
            On sizes that can't be measured, and on options that no chosen case takes.
        """
        preset = FULL if self.full else QUICK
        chosen = {case: preset[case] for case in preset if not self.cases or case in self.cases}
        taken = {
            "--rows": (self.rows, any(size.rows for size in chosen.values())),
            "--ranks": (self.ranks, any(size.ranks for size in chosen.values())),
            "--tols": (self.tols, any(size.tols for size in chosen.values())),
            "--dir": (self.stores, "large" in chosen),
        }
        for name, (value, is_taken) in taken.items():
            if value and not is_taken:
                raise DataError(f"no chosen case takes {name}: leave it out, or choose another")
        sizes = {}
        for case, size in chosen.items():
            size = replace(
                size,
                rows=self.rows or size.rows,
                ranks=(self.ranks or size.ranks) if size.ranks else (),
                tols=(self.tols or size.tols) if size.tols else (),
            )
            if size.rows and size.rows < _LEAST_ROWS:
                raise DataError(f"rows must be at least {_LEAST_ROWS:,}, got {size.rows:,}")
            for rank in size.ranks:
                if not 2 <= rank <= size.rows // 10:
                    raise DataError(
                        f"ranks must lie between 2 and a tenth of the {size.rows:,} rows of the "
                        f"case {case}, got {rank}"
                    )
            for tol in size.tols:
                if not 0.0 < tol < 1.0:
                    raise DataError(f"tols must lie between 0 and 1, exclusively, got {tol!r}")
            sizes[case] = size
        return sizes


def run_bench(
    options: Options, out: Path | None, *, overwrite: bool, progress: ProgressLines
) -> Result:
    """Measure, and write ``bench.json`` and ``bench.png`` into the folder ``out`` if there is one.

    Raises
    ------
    DataError
        On sizes that can't be measured, or outputs that exist without ``overwrite``.
    ResourceError
        If a measurement fails for want of memory or disk.
    """
    sizes = options.sizes()
    if out is not None:
        prepare_folder(out, OUTPUTS, overwrite)
    begin = time.time()
    workers = RunOptions("threads", options.workers).executor().workers
    repeats = options.repeats or _REPEATS[options.full]

    def callback(key: str, repeat: int, run: Result) -> None:
        progress.say(f"{key}: {measurement_line(run)} ({repeat + 1} of {repeats})")

    with tempfile.TemporaryDirectory(prefix=".cme-dask-bench-", dir=out) as folder:
        bench = Bench(Path(folder), options.stores or Path(folder), workers, repeats, callback)
        for case, size in sizes.items():
            CASES[case](bench, size)
    result = {
        "kind": "bench",
        "schema_version": SCHEMA_VERSION,
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
        "seconds": time.time() - begin,
        "machine": describe_machine(),
        "settings": {
            "workers": workers,
            "repeats": repeats,
            "sizes": {
                case: {"rows": s.rows, "ranks": list(s.ranks), "tols": list(s.tols)}
                for case, s in sizes.items()
            },
        },
        "measurements": {key: each.to_dict() for key, each in bench.measurements.items()},
        "ratios": [ratio.to_dict(bench.measurements) for ratio in bench.ratios],
        "files": [],
    }
    if out is not None:
        write_result(result, out, OUTPUTS, bench_picture, progress)
    return result
