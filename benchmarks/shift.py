"""The study of covariate shift: fits on reweighted rows beside fits on rows as they are."""

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import csv

from benchmarks.study import Study, StudyOptions
from cme_dask import (
    ConditionalMeanEmbedding,
    JointDistribution,
    drift_report,
    kernels,
    open_sample,
)
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.tables import grid
from cme_dask.errors import DataError
from cme_dask.models.plots import BLUE, PALETTE, picture

Array = Any
Result = dict[str, Any]

SYNTHETIC = "simple model", "flexible model", "far"
AIR = "air quality"
SCENARIOS = (*SYNTHETIC, AIR)

_HERE: dict[str, Any] = {"scheduler": "synchronous"}
_Y = kernels.Gaussian(1.0)
_ASKED = ("Changping", "Dingling", "Huairou", "Shunyi")
"""Stations outside the city, whose PM2.5 is predicted; the other eight are in the city."""
_AIR = ("TEMP", "PRES", "DEWP", "WSPM")


@dataclass(frozen=True)
class ShiftOptions(StudyOptions):
    """What to study; ``data`` is the folder of the air-quality table, without which it is left out.

    Attributes
    ----------
    data
        Folder of files ``PRSA_Data_STATION_*.csv.gz``.
    """

    scenarios: tuple[str, ...] = SCENARIOS
    rows: tuple[int, ...] = (200, 1000, 4000)
    data: Path | None = None
    known = SCENARIOS

    def __post_init__(self) -> None:
        super().__post_init__()
        if AIR not in self.scenarios:
            return
        if self.data is None and set(self.scenarios) == {AIR}:
            raise DataError(f"the scenario {AIR} needs the folder of its tables: give it by --data")
        if self.data is not None:
            asked = {_station(path) in _ASKED for path in _files(self.data)}
            if asked != {False, True}:
                raise DataError(
                    f"{self.data} lacks files PRSA_Data_STATION_*.csv.gz of stations in the city "
                    f"or outside it ({', '.join(_ASKED)}): give their folder by --data"
                )


@dataclass(frozen=True)
class _Judge:
    """Judges one draw, in a process of its own."""

    data: Path | None

    @property
    def files(self) -> list[Path]:
        """The tables that it reads."""
        return [] if self.data is None else _files(self.data)

    def __call__(self, name: str, n: int, seed: int) -> dict[str, Result]:
        rng = np.random.default_rng([seed, n])
        if name == AIR:
            assert self.data is not None
            (x, y), (u, v) = _air(self.data, n, rng)
            return _errors(x, y, u, u, v, kernels.Gaussian(2.5), kernels.Gaussian(2.5), 1e-2)
        centre, width = (2.2, 0.3) if name == "far" else (1.0, 0.4)
        x, u = rng.normal(size=(n, 1)), rng.normal(centre, width, size=(n, 1))
        y = np.sin(2.0 * x) + 0.3 * rng.normal(size=x.shape)
        true = np.exp(x[:, 0] ** 2 / 2.0 - ((x[:, 0] - centre) / width) ** 2 / 2.0) / width
        simple = kernels.Gaussian(0.5) if name != "simple model" else kernels.Gaussian(20.0)
        at = rng.normal(centre, width, size=(2000, 1))
        return _errors(x, y, u, at, np.sin(2.0 * at), simple, _Y, 1e-5, true)


def _errors(
    x: Array,
    y: Array,
    new: Array,
    at: Array,
    seen: Array,
    kernel: kernels.Kernel,
    kernel_of_ratio: kernels.Kernel,
    tol: float,
    true: Array | None = None,
) -> dict[str, Result]:
    """Root mean squared errors at new rows (at, seen), by weights of the rows."""
    sample = open_sample(x, y)
    reference = JointDistribution(
        kernel_x=kernel_of_ratio, kernel_y=_Y, tol=tol, residual=False, calibration=False
    )
    report = drift_report(reference.fit(x, y, **_HERE), new, **_HERE)
    samples = {"unweighted": sample, "reweighted": sample}
    refused = 0.0
    try:
        samples["reweighted"] = sample.reweight(report.ratio())
    except DataError:
        refused = 1.0
    if true is not None:
        samples["true ratio"] = open_sample(x, y, weights=true)
    result = {}
    for name, rows in samples.items():
        fit = ConditionalMeanEmbedding(
            kernel_x=kernel, kernel_y=_Y, tol=tol, criterion="surrogate"
        ).fit(rows, **_HERE)
        error = np.sqrt(((fit.predict(at).reshape(seen.shape) - seen) ** 2).mean())
        result[name] = {"error": float(error)}
    result["reweighted"] |= {"effective": report.effective, "refused": refused}
    return result


def _files(data: Path) -> list[Path]:
    """The tables of the stations."""
    return sorted(data.glob("PRSA_Data_*_*.csv.gz"))


def _station(path: Path) -> str:
    """The name of the station, by that of its table."""
    return path.name.split("_")[2]


@lru_cache(maxsize=1)
def _tables(data: Path) -> tuple[Array, Array]:
    """Rows (x, y) of the eight stations and of the four, standardised by those of the eight."""
    parts: list[list[Array]] = [[], []]
    for path in _files(data):
        with gzip.open(path) as file:
            options = csv.ConvertOptions(null_values=["NA"], strings_can_be_null=True)
            table = csv.read_csv(file, convert_options=options).to_pandas()
        angle = 2.0 * np.pi * table["hour"].to_numpy() / 24.0
        numbers = table[[*_AIR, "PM2.5"]].to_numpy(dtype=np.float64, copy=True)
        numbers[:, -1] = np.log(np.maximum(numbers[:, -1], 1.0))
        rows = np.column_stack([numbers[:, :-1], np.sin(angle), np.cos(angle), numbers[:, -1]])
        parts[_station(path) in _ASKED].append(rows[np.isfinite(rows).all(axis=1)])
    eight, four = (np.concatenate(part) for part in parts)
    mean, std = eight.mean(axis=0), eight.std(axis=0)
    return (eight - mean) / std, (four - mean) / std


def _air(data: Path, n: int, rng: np.random.Generator) -> list[tuple[Array, Array]]:
    """Random rows of the eight stations, and as many of the four."""
    draws = [table[rng.choice(len(table), n, replace=False)] for table in _tables(data)]
    return [(rows[:, :-1], rows[:, -1:]) for rows in draws]


def verdicts(cells: Sequence[Result]) -> list[Result]:
    """Of each cell the error of reweighted fits over that of unweighted ones."""
    return [
        {
            "scenario": cell["scenario"],
            "rows": cell["rows"],
            "ratio": cell["models"]["reweighted"]["error"]["mean"]
            / cell["models"]["unweighted"]["error"]["mean"],
        }
        for cell in cells
    ]


def shift_tables(result: Result) -> Iterator[Any]:
    """Errors with and without weights."""
    rows = []
    for cell in result["cells"]:
        models = cell["models"]
        errors = [
            f"{models[name]['error']['mean']:.3f} ± {models[name]['error']['std_error']:.3f}"
            if name in models
            else "-"
            for name in ("unweighted", "reweighted", "true ratio")
        ]
        shares = (f"{models['reweighted'][key]['mean']:.0%}" for key in ("effective", "refused"))
        rows.append((cell["scenario"], f"{cell['rows']:,}", *errors, *shares))
    head = ("shift", "rows", "unweighted", "reweighted", "true ratio", "effective", "refused")
    yield grid(
        "Root mean squared error of E[y | x] under the new law of x",
        head,
        rows,
        f"Means over {result['settings']['seeds']} draws and standard errors. Where the ratio is "
        "refused, the fit is the unweighted one.",
    )


def shift_picture(result: Result, path: Path) -> None:
    """Draw errors against the number of rows.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    names = list(dict.fromkeys(cell["scenario"] for cell in result["cells"]))
    with picture(path, 3.0 * len(names), 3.0, dpi=130) as figure:
        axes = figure.subplots(1, len(names), squeeze=False)[0]
        for ax, name in zip(axes, names, strict=True):
            cells = [cell for cell in result["cells"] if cell["scenario"] == name]
            colours = (BLUE, *PALETTE[1:])
            for colour, model in zip(colours, cells[0]["models"], strict=False):
                errors = [cell["models"][model]["error"] for cell in cells]
                ax.errorbar(
                    [cell["rows"] for cell in cells],
                    [error["mean"] for error in errors],
                    [error["std_error"] for error in errors],
                    fmt="o-",
                    ms=4,
                    color=colour,
                    label=model,
                )
            ax.set(title=name, xscale="log", xlabel="rows")
            sizes = [cell["rows"] for cell in cells]
            ax.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
            ax.minorticks_off()
            ax.set_ylim(bottom=0.0)
        axes[0].set_ylabel("error of E[y | x]")
        axes[0].legend(fontsize=8.5)


class ShiftStudy(Study):
    """The study, whose draws of the air-quality table need its folder."""

    def run(
        self, options: Any, out: Path | None, *, overwrite: bool, progress: ProgressLines
    ) -> Result:
        """Without a folder of the table, the study of the other scenarios."""
        if options.data is None and AIR in options.scenarios:
            progress.say("no air-quality table: give its folder by --data")
            rest = tuple(name for name in options.scenarios if name != AIR)
            options = replace(options, scenarios=rest)
        study = replace(self, judge=_Judge(options.data))
        return super(ShiftStudy, study).run(options, out, overwrite=overwrite, progress=progress)


STUDY = ShiftStudy("shift", ShiftOptions, _Judge(None), verdicts, shift_picture, shift_tables)
