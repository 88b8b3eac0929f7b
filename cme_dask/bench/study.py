"""The study of laws: every model on every scenario, many draws, means and standard errors."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.bench.machine import describe_machine
from cme_dask.bench.output import write_result
from cme_dask.bench.study_page import study_page
from cme_dask.bench.study_picture import study_picture
from cme_dask.chunked.blas import limit_this_process
from cme_dask.errors import DataError
from cme_dask.jobs.folder import prepare_folder
from cme_dask.report.progress import ProgressLines
from cme_dask.report.tables import grid, number

Result = dict[str, Any]
Task = tuple[str, int, int]

FIGURES = {
    "error": "error (43)",
    "crps": "CRPS",
    "minimum": "least P",
    "mass": "|E[1|x] - 1|",
    "loss": "loss",
}
DEFAULT = "self-tuned"
"""``JointDistribution().fit(x, y)``: what a user gets without arguments."""
VALIDATED = "traditional, (41)"
SCENARIO_NAMES = ("low", "medium", "high", "strong", "bimodal", "skewed")
ROWS = (200, 1000, 5000)
SEEDS = 20
OUTPUTS = ("study.json", "study.png", "study.md")
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class StudyOptions:
    """What to study.

    Attributes
    ----------
    scenarios
        Their names.
    rows
        Sizes of the training samples.
    seeds
        Draws of each.
    workers
        Processes; default one per core.
    """

    scenarios: tuple[str, ...] = SCENARIO_NAMES
    rows: tuple[int, ...] = ROWS
    seeds: int = SEEDS
    workers: int | None = None

    def __post_init__(self) -> None:
        unknown = set(self.scenarios) - set(SCENARIO_NAMES)
        if unknown:
            raise DataError(
                f"scenarios must be among {', '.join(SCENARIO_NAMES)}, got "
                f"{', '.join(sorted(unknown))}"
            )
        if min(self.rows, default=0) < 50:
            raise DataError(f"samples of at least 50 rows are needed, got {list(self.rows)}")


def run_study(
    options: StudyOptions, out: Path | None, *, overwrite: bool, progress: ProgressLines
) -> Result:
    """Judge all models; write JSON, a picture and a page into the folder ``out``, if any."""
    if out is not None:
        prepare_folder(out, OUTPUTS, overwrite)
    begin = time.time()
    tasks = [
        (name, n, seed)
        for n in sorted(options.rows, reverse=True)  # the longest first
        for name in options.scenarios
        for seed in range(options.seeds)
    ]
    found = judge_all(_judge, tasks, options.workers, progress)
    cells = [
        {
            "scenario": name,
            "rows": n,
            "models": summary([found[name, n, seed] for seed in range(options.seeds)]),
        }
        for name in options.scenarios
        for n in options.rows
    ]
    result: Result = {
        "kind": "study",
        "schema_version": SCHEMA_VERSION,
        "seconds": time.time() - begin,
        "machine": describe_machine(),
        "settings": {"seeds": options.seeds, "rows": list(options.rows), "default": DEFAULT},
        "cells": cells,
        "verdicts": _verdicts(cells),
        "files": [],
    }
    if out is not None:
        write_result(result, out, OUTPUTS[:2], study_picture, progress, {OUTPUTS[2]: study_page})
    return result


def judge_all(
    judge: Callable[[str, int, int], Result],
    tasks: Sequence[Task],
    workers: int | None,
    progress: ProgressLines,
) -> dict[Task, Result]:
    """``judge(scenario, rows, seed)`` of all tasks, each in a process of a pool.

    Parameters
    ----------
    judge
        A function that processes can import.
    tasks
        Scenario, rows and seed of each; the first ones start first.
    workers
        Processes; default one per core.
    progress
        Told of each task that has ended.
    """
    found: dict[Task, Result] = {}
    with ProcessPoolExecutor(
        workers or os.cpu_count() or 1,
        mp_context=get_context("spawn"),
        initializer=limit_this_process,
    ) as pool:
        futures = {pool.submit(judge, *task): task for task in tasks}
        for done, future in enumerate(as_completed(futures), 1):
            name, n, seed = futures[future]
            found[name, n, seed] = future.result()
            progress.say(f"{name}, {n} rows, draw {seed}: {done} of {len(tasks)}")
    return found


def _judge(name: str, n: int, seed: int) -> Result:
    from cme_dask.bench.laws import judge
    from cme_dask.bench.tuned_laws import judge_tuned

    return {**judge(name, n, seed), DEFAULT: judge_tuned(name, n, seed)}


def summary(draws: Sequence[Result]) -> Result:
    """Means, standard errors and values of each figure of each model."""
    return {
        model: {
            figure: mean_and_error([draw[model][figure] for draw in draws])
            for figure in draws[0][model]
        }
        for model in draws[0]
    }


def mean_and_error(values: Sequence[float]) -> Result:
    """JSON form of a mean over draws with its standard error, and of the values."""
    spread = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "std_error": spread, "values": list(values)}


def _verdicts(cells: Sequence[Result]) -> list[Result]:
    """Per cell: the best model by criterion (43), and how the default compares with it.

    It is within 1.1 of the best if what it has more is at most two standard errors, of differences
    paired by draws.
    """
    found = []
    for cell in cells:
        errors = {name: figures["error"] for name, figures in cell["models"].items()}
        best = min(errors, key=lambda name: float(errors[name]["mean"]))
        default, least = (np.array(errors[name]["values"]) for name in (DEFAULT, best))
        excess = mean_and_error([float(e) for e in default - 1.1 * least])
        found.append(
            {
                "scenario": cell["scenario"],
                "rows": cell["rows"],
                "best": best,
                "default_over_best": errors[DEFAULT]["mean"] / errors[best]["mean"],
                "within": excess["mean"] <= 2.0 * excess["std_error"],
                "certified_over_default": errors["certified"]["mean"] / errors[DEFAULT]["mean"],
                **_tuning(cell["models"]),
            }
        )
    return found


def _tuning(models: Result) -> Result:
    """How the self-tuned law compares with what the truth would choose, and stands noise."""
    figures = models[DEFAULT]
    mean = {name: figures[name]["mean"] for name in figures}
    return {
        "default_over_truth": mean["error"] / mean["least_error"],
        "location": mean["location"],
        "default_over_traditional": mean["error"] / models[VALIDATED]["error"]["mean"],
        "noisy_over_plain": mean["noisy_crps"] / mean["crps"],
        "never_negative": {
            name: float(np.mean(np.array(each["minimum"]["values"]) >= 0.0))
            for name, each in models.items()
        },
    }


def study_tables(result: Result) -> Iterator[Any]:
    """A table for each scenario and size, and the verdicts."""
    for cell in result["cells"]:
        rows = [
            (name, *(_cell(figure, figures[figure]) for figure in FIGURES))
            for name, figures in cell["models"].items()
        ]
        title = f"{cell['scenario']}, {cell['rows']:,} rows"
        yield grid(title, ("model", *FIGURES.values()), rows, "")
        yield ""
    rows = [
        (
            f"{verdict['scenario']}, {verdict['rows']:,} rows",
            verdict["best"],
            number(verdict["default_over_best"], 3),
            "yes" if verdict["within"] else "no",
            number(verdict["certified_over_default"], 3),
            number(verdict["default_over_truth"], 3),
            number(verdict["default_over_traditional"], 3),
            number(verdict["noisy_over_plain"], 3),
        )
        for verdict in result["verdicts"]
    ]
    head = (
        "",
        "best model",
        "default / best",
        "within",
        "certified / default",
        "default / truth's choice",
        "default / traditional",
        "CRPS with noise",
    )
    ratios = [v["default_over_truth"] for v in result["verdicts"]]
    caption = (
        f"By criterion (43), means over {result['settings']['seeds']} draws; the default is "
        f"{result['settings']['default']}. Within: at most 1.1 times the best, but for two "
        "standard errors. The truth's choice among the kernels that were tried: the default has "
        f"{np.mean(ratios):.3g} times its error on average. Traditional: tuned by (41). CRPS with "
        "six columns of noise in x over that without."
    )
    yield grid("The default law", head, rows, caption, text_columns=2)
    names = list(result["verdicts"][0]["never_negative"])
    shares = [
        (name, *(f"{100 * v['never_negative'][name]:.0f} %" for v in result["verdicts"]))
        for name in names
    ]
    at = [f"{v['scenario']}, {v['rows']:,}" for v in result["verdicts"]]
    yield grid("Draws without a negative probability", ("model", *at), shares, "")


def _cell(figure: str, found: Result) -> str:
    """Mean and standard error, short enough for a line of a hundred characters."""
    mean = short(found["mean"], 2)
    return mean if figure == "mass" else f"{mean} ± {short(found['std_error'], 1)}"


def short(value: float, digits: int) -> str:
    """A number in few characters."""
    if abs(value) >= 0.01:
        return f"{value:.{digits + 1}g}" if digits > 1 else f"{value:.1g}"
    return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+00", "")
