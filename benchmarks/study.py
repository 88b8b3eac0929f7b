"""The study of laws: every model on every scenario, its page and its picture."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import as_completed
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.coverage import SCENARIOS
from benchmarks.machine import describe_machine
from benchmarks.run import write_result
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.tables import grid
from cme_dask.display import number
from cme_dask.errors import DataError
from cme_dask.models.plots import picture
from cme_dask.passes.processes import WorkerProcesses

# The page of a study in Markdown: every number in it comes from one run


Result = dict[str, Any]

_LABELS = {"self-tuned": "**default** (self-tuned)"}
_SCALE = 1e4  # of the errors (43), so that they have few zeros


def study_page(result: Result) -> str:
    """The tables of a study, its picture and the command that made both, as Markdown.

    Parameters
    ----------
    result
        JSON form of a study, whose picture is ``study.png`` in the same folder.
    """
    return "\n".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    cells, seeds = result["cells"], result["settings"]["seeds"]
    machine = result["machine"]
    scenarios = list(dict.fromkeys(cell["scenario"] for cell in cells))
    sizes = sorted({cell["rows"] for cell in cells}, reverse=True)
    chosen = [] if set(scenarios) == set(SCENARIOS) else [f"--scenario {s}" for s in scenarios]
    chosen += [f"--rows {n}" for n in sorted(sizes)]
    command = " ".join(["python3 run study", *chosen, f"--seeds {seeds}"])
    yield "# The study of laws in numbers"
    yield ""
    yield (
        f"This page, its picture and `study.json` beside it are the output of one run, `{command} "
        f"--out docs --overwrite`, which took {result['seconds'] / 60:.0f} minutes on "
        f"{machine['cores']} cores ({machine['processor']}). Figures are means over {seeds} draws "
        "and their standard errors. [Laws](laws.md) describes the scenarios, the models and the "
        "measures, and says which constraint to choose."
    )
    yield ""
    yield "![Mean squared error of conditional probabilities by scenario and rows](study.png)"
    largest = [cell for cell in cells if cell["rows"] == sizes[0]]
    yield from _error_table(largest)
    yield from _model_table(cells, sizes)
    yield from _verdict_table(result["verdicts"])


def _error_table(cells: Sequence[Result]) -> Iterator[str]:
    """A row for each model, a column for each scenario."""
    yield from _table_head(
        f"Error (43) times 10^4, {cells[0]['rows']:,} rows", [cell["scenario"] for cell in cells]
    )
    for name in _model_names(cells):
        errors = (cell["models"][name]["error"] for cell in cells)
        yield _table_row(
            _LABELS.get(name, name),
            *(
                f"{_plain(_SCALE * e['mean'], 3)} ± {_plain(_SCALE * e['std_error'], 2)}"
                for e in errors
            ),
        )


def _model_table(cells: Sequence[Result], sizes: Sequence[int]) -> Iterator[str]:
    """A row for each model, over all scenarios."""
    yield from _table_head(
        "Over all scenarios", [*(f"error, {n:,} rows" for n in sizes), "CRPS", "least probability"]
    )
    for name in _model_names(cells):
        ratios = [_over_default(cells, name, "error", n) for n in sizes]
        ratios.append(_over_default(cells, name, "crps", sizes[0]))
        least = min(min(cell["models"][name]["minimum"]["values"]) for cell in cells)
        yield _table_row(
            _LABELS.get(name, name), *(f"{ratio:.2f}" for ratio in ratios), f"{least:.1g}"
        )
    yield ""
    yield (
        "Errors (43) and CRPS are divided by those of the default, as geometric means over the "
        f"scenarios; the CRPS is that of {sizes[0]:,} rows. The last column is the least "
        "probability in any draw."
    )


def _over_default(cells: Sequence[Result], name: str, figure: str, rows: int) -> float:
    ratios = [
        cell["models"][name][figure]["mean"] / cell["models"][DEFAULT][figure]["mean"]
        for cell in cells
        if cell["rows"] == rows
    ]
    return float(np.exp(np.mean(np.log(ratios))))


def _model_names(cells: Sequence[Result]) -> list[str]:
    """Names of the models, the default first."""
    return sorted(cells[0]["models"], key=lambda name: name not in _LABELS)


def _table_head(title: str, columns: Sequence[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "", _table_row("", *columns))
    yield "|---" * (1 + len(columns)) + "|"


def _table_row(*texts: str) -> str:
    return f"| {' | '.join(texts)} |".replace("|  |", "| |")


def _verdict_table(verdicts: Sequence[Result]) -> Iterator[str]:
    sizes = sorted({verdict["rows"] for verdict in verdicts})
    head = ["best model", "default / best", "within", "default / truth's choice"]
    head += ["default / traditional, (41)", "noise", "location"]
    title = f"The default beside the other models, {', '.join(f'{n:,}' for n in sizes)} rows"
    yield from _table_head(title, head)
    for scenario in dict.fromkeys(verdict["scenario"] for verdict in verdicts):
        cells = [verdict for verdict in verdicts if verdict["scenario"] == scenario]
        cells.sort(key=lambda verdict: int(verdict["rows"]))
        yield _table_row(
            scenario,
            "; ".join("default" if c["best"] == DEFAULT else c["best"] for c in cells),
            ", ".join(f"{c['default_over_best']:.2f}" for c in cells),
            ", ".join("yes" if c["within"] else "no" for c in cells),
            ", ".join(f"{c['default_over_truth']:.2f}" for c in cells),
            ", ".join(f"{c['default_over_traditional']:.2f}" for c in cells),
            ", ".join(f"{c['noisy_over_plain']:.3f}" for c in cells),
            ", ".join(f"{100 * c['location']:.0f} %" for c in cells),
        )
    yield ""
    yield (
        "Ratios of errors (43). *Within*: the error of the default is at most 1.1 times that of "
        "the best model, or the difference is below two standard errors of paired draws. *Truth's "
        "choice*: the kernels that the truth would have chosen among those of the search, without "
        f"the step for residuals; the geometric mean of the ratios is {_over_truth(verdicts):.2f}. "
        "*Noise*: the CRPS with six columns of noise added to x, divided by the CRPS without them. "
        "*Location*: the share of draws in which the default used laws of residuals."
    )
    yield ""


def _over_truth(verdicts: Sequence[Result]) -> float:
    """Geometric mean of errors of the default over those of the truth's choice."""
    return float(np.exp(np.mean(np.log([verdict["default_over_truth"] for verdict in verdicts]))))


def _plain(value: float, digits: int) -> str:
    """A number with so many significant digits, without an exponent."""
    if value == 0.0:
        return "0"
    places = max(0, digits - 1 - int(np.floor(np.log10(abs(value)))))
    return f"{value:.{places}f}"


# The picture of a study: errors of the laws by the number of rows, a panel per scenario


_LINES = {
    "self-tuned": ("#222222", "P", "-"),
    "normalized, projected": ("#1f5fa8", "o", "-"),
    "normalized, clipped": ("#1f5fa8", "o", ":"),
    "pointwise": ("#3a8f5c", "s", "-"),
    "coupling": ("#c8552b", "D", "-"),
    "certified": ("#7a5195", "^", "-"),
    "traditional": ("#777777", "v", "--"),
}


def study_picture(result: Result, path: Path) -> None:
    """Draw criterion (43) with one standard error, on logarithmic axes.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    scenarios = list(dict.fromkeys(cell["scenario"] for cell in result["cells"]))
    columns = min(3, len(scenarios))
    rows = -(-len(scenarios) // columns)
    with picture(path, 3.4 * columns, 2.7 * rows + 0.7, dpi=130) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
        for ax, name in zip(axes, scenarios, strict=False):
            _panel(ax, name, [cell for cell in result["cells"] if cell["scenario"] == name])
        for ax in list(axes)[len(scenarios) :]:
            ax.set_visible(False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        figure.suptitle(
            "Mean squared error (43) of conditional probabilities against the truth, "
            f"{result['settings']['seeds']} draws",
            x=0.01,
            ha="left",
            fontsize=10.5,
        )


def _panel(ax: Any, name: str, cells: list[Result]) -> None:
    sizes = [cell["rows"] for cell in cells]
    for model, (colour, marker, line) in _LINES.items():
        errors = [cell["models"][model]["error"] for cell in cells]
        ax.errorbar(
            sizes,
            [error["mean"] for error in errors],
            [error["std_error"] for error in errors],
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=4,
            linewidth=1.2,
            label=model,
        )
    ax.set(xscale="log", yscale="log", title=name, xlabel="rows")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
    ax.minorticks_off()


# The study of laws: every model on every scenario, many draws, means and standard errors


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
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class StudyOptions:
    """What to study.

    Attributes
    ----------
    scenarios
        Their names, of ``known``.
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
    known: ClassVar[tuple[str, ...]] = SCENARIO_NAMES

    def __post_init__(self) -> None:
        unknown = sorted(set(self.scenarios) - set(self.known))
        if unknown:
            raise DataError(
                f"scenarios must be among {', '.join(self.known)}, got {', '.join(unknown)}"
            )
        if min(self.rows, default=0) < 50:
            raise DataError(f"samples of at least 50 rows are needed, got {list(self.rows)}")


@dataclass(frozen=True)
class Study:
    """A study: draws of each scenario and size are judged, and summarized as tables and a picture.

    Attributes
    ----------
    name
        Of its files, ``{name}.json``, ``{name}.png`` and, with a page, ``{name}.md``.
    options
        What can be chosen.
    judge
        Figures of each model on one draw: a function of scenario, rows and seed that processes can
        import.
    verdicts
        What follows from the summaries of all scenarios and sizes.
    picture, tables, page
        Made from the JSON form.
    settings
        Makes further entries of the settings in the JSON form.
    remark
        What is said before it begins.
    """

    name: str
    options: type[StudyOptions]
    judge: Callable[[str, int, int], Result]
    verdicts: Callable[[Sequence[Result]], list[Result]]
    picture: Callable[[Result, Path], None]
    tables: Callable[[Result], Iterable[Any]]
    page: Callable[[Result], str] | None = None
    settings: Callable[[], Mapping[str, Any]] = dict
    remark: str | None = None

    def run(
        self, options: Any, out: Path | None, *, overwrite: bool, progress: ProgressLines
    ) -> Result:
        """The JSON form; its files are written into the folder ``out``, if any.

        With a folder, an interrupted study goes on after the draws that have ended.
        """
        files = f"{self.name}.json", f"{self.name}.png"
        pages = {} if self.page is None else {f"{self.name}.md": self.page}
        if out is not None:
            prepare_folder(out, (*files, *pages), overwrite)
        if self.remark is not None:
            progress.say(self.remark)
        begin = time.time()
        tasks = [
            (name, n, seed)
            for n in sorted(options.rows, reverse=True)  # the longest first
            for name in options.scenarios
            for seed in range(options.seeds)
        ]
        aside = None if out is None else out / f"{self.name}-draws.jsonl"
        values = judge_all(self.judge, tasks, options.workers, progress, aside)
        if aside is not None:
            aside.unlink(missing_ok=True)
        cells = [
            {
                "scenario": name,
                "rows": n,
                "models": summary([values[name, n, seed] for seed in range(options.seeds)]),
            }
            for name in options.scenarios
            for n in options.rows
        ]
        result: Result = {
            "kind": self.name,
            "schema_version": SCHEMA_VERSION,
            "seconds": time.time() - begin,
            "machine": describe_machine(),
            "settings": {"seeds": options.seeds, "rows": list(options.rows), **self.settings()},
            "cells": cells,
            "verdicts": self.verdicts(cells),
            "files": [],
        }
        if out is not None:
            write_result(result, out, files, self.picture, progress, pages)
        return result


def judge_all(
    judge: Callable[[str, int, int], Result],
    tasks: Sequence[Task],
    workers: int | None,
    progress: ProgressLines,
    aside: Path | None = None,
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
        Prints a line for each task that has ended.
    aside
        File that a line is added to for each task that has ended; these are not run again, unless
        the line was written by other versions, another judge or of other data.

    After an error or Ctrl-C the processes end at once. What tasks that had ended have returned is
    in the file.
    """
    result = {} if aside is None else _ended(aside, origin(judge), set(tasks), progress)
    tasks = [task for task in tasks if task not in result]
    if not tasks:
        return result

    def record(task: Task, value: Result) -> None:
        result[task] = value
        if aside is not None:
            with aside.open("a") as lines:
                lines.write(json.dumps([task, value]) + "\n")

    others = set(active_children())
    processes = min(workers or os.cpu_count() or 1, len(tasks))
    with WorkerProcesses().started(processes) as pool:
        futures = {pool.submit(judge, *task): task for task in tasks}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                name, n, seed = futures[future]
                record((name, n, seed), future.result())
                progress.say(f"{name}, {n} rows, draw {seed}: {done} of {len(tasks)}")
        except BaseException:
            for future, task in futures.items():
                if task not in result and future.done() and future.exception() is None:
                    record(task, future.result())
            for process in set(active_children()) - others:  # a draw may take hours
                process.terminate()
            raise
    return result


def origin(judge: Callable[[str, int, int], Result]) -> Result:
    """JSON form of what figures depend on beside the task: versions, the judge, and its data.

    A judge that reads files lists them as its attribute ``files``.
    """
    digest = hashlib.sha256()
    for path in getattr(judge, "files", ()):
        digest.update(path.read_bytes())
    name = getattr(judge, "__qualname__", type(judge).__qualname__)
    return {
        "versions": describe_machine()["versions"],
        "judge": f"{judge.__module__}.{name}",
        "data": digest.hexdigest(),
    }


def _ended(
    aside: Path, source: Result, tasks: Set[Task], progress: ProgressLines
) -> dict[Task, Result]:
    """Tasks that an earlier run of this origin has ended; its file, or a new one, names it first.

    A file of another origin is replaced.
    """
    ended: list[Any] = []
    if aside.exists():
        every = aside.read_text().splitlines(keepends=True)
        # The last line may have been cut.
        ended = [json.loads(line) for line in every if line.endswith("\n")]
    if ended and ended[0] != source:
        progress.say(
            f"{aside.name} is of other versions of packages, another judge or other data: its "
            "draws are made again"
        )
        ended = []
    lines = ended or [source]
    aside.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {tuple(task): value for task, value in lines[1:] if tuple(task) in tasks}
    if result:
        progress.say(f"continuing with {len(result)} of {len(tasks)} draws that have ended")
    return result


def _judge(name: str, n: int, seed: int) -> Result:
    from benchmarks.laws import judge, judge_tuned

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
    result = []
    for cell in cells:
        errors = {name: figures["error"] for name, figures in cell["models"].items()}
        best = min(errors, key=lambda name: float(errors[name]["mean"]))
        default, least = (np.array(errors[name]["values"]) for name in (DEFAULT, best))
        excess = mean_and_error([float(e) for e in default - 1.1 * least])
        result.append(
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
    return result


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
    caption = (
        f"By criterion (43), means over {result['settings']['seeds']} draws; the default is "
        f"{result['settings']['default']}. Within: at most 1.1 times the best, but for two "
        "standard errors. The truth's choice among the kernels that were tried: the geometric mean "
        f"of the ratios is {_over_truth(result['verdicts']):.2f}. Traditional: tuned by (41). CRPS "
        "with six columns of noise in x over that without."
    )
    yield grid("The default law", head, rows, caption, text_columns=2)
    names = list(result["verdicts"][0]["never_negative"])
    shares = [
        (name, *(f"{100 * v['never_negative'][name]:.0f} %" for v in result["verdicts"]))
        for name in names
    ]
    at = [f"{v['scenario']}, {v['rows']:,}" for v in result["verdicts"]]
    yield grid("Draws without a negative probability", ("model", *at), shares, "")


def _cell(figure: str, result: Result) -> str:
    """Mean and standard error, short enough for a line of a hundred characters."""
    mean = short(result["mean"], 2)
    return mean if figure == "mass" else f"{mean} ± {short(result['std_error'], 1)}"


def short(value: float, digits: int) -> str:
    """A number in few characters."""
    if abs(value) >= 0.01:
        return f"{value:.{digits + 1}g}" if digits > 1 else f"{value:.1g}"
    return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+00", "")


STUDY = Study(
    "study",
    StudyOptions,
    _judge,
    _verdicts,
    study_picture,
    study_tables,
    page=study_page,
    settings=lambda: {"default": DEFAULT},
)
