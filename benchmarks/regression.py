"""The study of regression: our laws beside others' on five tables of the UCI repository."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.methods import MethodStudy, counted
from cme_dask.cli.tables import grid
from cme_dask.data.sample import Sample
from cme_dask.display import number, with_error
from cme_dask.errors import DataError
from cme_dask.estimators.comparison import (
    LEVEL,
    ROWS,
    Scores,
    judge,
    listed_split,
    standard_error,
    summarized,
    training_rows,
)
from cme_dask.estimators.peers import METHODS
from cme_dask.models.plots import PALETTE, picture
from cme_dask.passes.sources import open_sample

Result = dict[str, Any]

DATA_SETS = ("concrete", "energy", "power-plant", "wine-quality-red", "yacht")
SPLITS = 20
OURS = "joint"
OTHERS = frozenset(METHODS) - {OURS, "joint-boosting"}
"""Methods that are not ours, beside the best of which ours is judged."""

PUBLISHED = {
    "concrete": (3.06, 3.04),
    "energy": (1.38, 0.60),
    "power-plant": (2.79, 2.79),
    "wine-quality-red": (0.94, 0.91),
    "yacht": (1.18, 0.20),
}
"""Mean log scores on the same splits: of deep ensembles, and of NGBoost (Duan et al., 2020)."""

COVERED = (0.87, 0.93)
"""Where the coverage of the intervals is to be."""

FIGURES = {
    "crps": "CRPS",
    "log_score": "Log score",
    "coverage": f"Coverage of {LEVEL:.0%} intervals",
    "width": f"Width of {LEVEL:.0%} intervals",
    "rmse": "RMSE of the mean",
    "cpu_seconds": "CPU seconds of a fit and its answers",
}


@lru_cache(maxsize=1)
def table(folder: Path) -> Sample:
    """The rows of a data set: its columns and target are those of its index files."""
    try:
        rows = np.loadtxt(folder / "data.txt")
        places = [
            np.loadtxt(folder / f"index_{part}.txt", ndmin=1).astype(int)
            for part in ("features", "target")
        ]
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is no data set of the study: {error}") from error
    return open_sample(*(rows[:, place] for place in places))


@dataclass(frozen=True)
class Judge:
    """Scores of one method on one split, in a process of its own and with one thread."""

    data: Path

    @property
    def files(self) -> list[Path]:
        """The tables that there are, of which it reads some, and their splits."""
        return [path for name in DATA_SETS for path in sorted((self.data / name).glob("*.txt"))]

    def __call__(self, name: str, n: int, split: int) -> Scores:
        """Scores of a data set and method, ``data_set/method``."""
        data_set, method = name.split("/")
        folder = self.data / data_set
        test = np.loadtxt(folder / f"index_test_{split}.txt", ndmin=1).astype(int)
        rest, held_out = listed_split(table(folder), test)
        return judge(METHODS[method], training_rows(rest, ROWS, 1, 0), held_out)


@dataclass(frozen=True)
class RegressionOptions:
    """What to study.

    Attributes
    ----------
    data
        Folder of the tables, a folder each.
    scenarios
        Of ``DATA_SETS``.
    splits
        The first so many of the 20 standard splits.
    methods
        Of ``METHODS``.
    workers
        Processes; default one per core.
    """

    data: Path | None = None
    scenarios: tuple[str, ...] = DATA_SETS
    splits: int = SPLITS
    methods: tuple[str, ...] = tuple(METHODS)
    workers: int | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.scenarios) - set(DATA_SETS))
        if unknown:
            raise DataError(
                f"scenarios must be among {', '.join(DATA_SETS)}, got {', '.join(unknown)}"
            )
        if self.data is None:
            raise DataError("give the folder of the tables by --data")
        for name in self.scenarios:
            last = self.data / name / f"index_test_{self.splits - 1}.txt"
            if not last.is_file():
                raise DataError(
                    f"{last} is missing: --data is the folder of {', '.join(self.scenarios)}, "
                    f"each with {self.splits} splits"
                )

    def cells(self) -> list[tuple[str, int, int]]:
        """Data set, rows and number of splits."""
        assert self.data is not None
        return [(name, table(self.data / name).n_rows, self.splits) for name in self.scenarios]

    def judge(self) -> Callable[[str, int, int], Result]:
        """Of one method on one split."""
        assert self.data is not None
        return Judge(self.data)

    def to_dict(self) -> Result:
        """The settings."""
        return {"splits": self.splits, "methods": list(self.methods)}


def _cell(name: str, rows: int, runs: dict[str, list[Result]]) -> Result:
    """JSON form of a data set: scores of all methods, and how ours compares with the best other."""
    models = summarized(runs)
    return {"scenario": name, "rows": rows, "models": models, "verdict": _verdict(name, models)}


def _verdict(name: str, models: Result) -> Result | None:
    others = OTHERS & set(models)
    if OURS not in models or not others:
        return None
    ours, published = models[OURS], PUBLISHED[name]
    rival = min(others, key=lambda m: float(models[m]["crps"]["mean"]))
    gaps = np.subtract(ours["crps"]["values"], models[rival]["crps"]["values"])
    error = standard_error(gaps)
    excess, coverage = float(gaps.mean()), ours["coverage"]["mean"]
    return {
        "rival": rival,
        "excess": excess,
        "excess_error": error,
        "as_good": excess <= (error or 0.0),
        "log_score_excess": ours["log_score"]["mean"] - published[1],
        "covers": COVERED[0] <= coverage <= COVERED[1],
    }


def regression_tables(result: Result) -> Iterator[Any]:
    """A table for each score, and how ours compares."""
    cells = result["cells"]
    head = ("", *(cell["scenario"] for cell in cells))
    for figure, title in FIGURES.items():
        rows = [
            (method, *(_shown(cell["models"][method].get(figure), figure) for cell in cells))
            for method in cells[0]["models"]
        ]
        rows = [row for row in rows if set(row[1:]) != {"-"}]
        if figure == "log_score":
            for i, name in enumerate(("published, deep ensembles", "published, NGBoost")):
                rows.append((name, *(f"{PUBLISHED[cell['scenario']][i]:.2f}" for cell in cells)))
        splits = counted(result["settings"]["splits"], "standard split")
        caption = f"Means over the first {splits}, ± one standard error over several."
        yield grid(title, head, rows, caption)
        yield ""
    verdicts = [(cell["scenario"], cell["verdict"]) for cell in cells if cell["verdict"]]
    rows = [
        (
            name,
            each["rival"],
            with_error(each["excess"], each["excess_error"]),
            "yes" if each["as_good"] else "no",
            f"{each['log_score_excess']:+.3f}",
            "yes" if each["covers"] else "no",
        )
        for name, each in verdicts
    ]
    yield grid(
        f"{OURS} beside the others",
        ("", "best other by CRPS", "CRPS above it", "as good", "log score above", "covers"),
        rows,
        "As good: above it by at most one standard error of the differences on the same splits. "
        "The log score is compared with the published one of NGBoost. Covers: from "
        f"{COVERED[0]:.0%} to {COVERED[1]:.0%} of the rows.",
        text_columns=2,
    )


def _shown(values: Result | None, figure: str) -> str:
    if values is None:
        return "-"
    if figure == "cpu_seconds":
        return number(values["mean"], 3)
    return with_error(values["mean"], values["std_error"])


def regression_picture(result: Result, path: Path) -> None:
    """Draw the CRPS of each method over ours, and the coverage, by data set.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    cells = result["cells"]
    names = [cell["scenario"] for cell in cells]
    methods = list(cells[0]["models"])
    base = OURS if OURS in methods else methods[0]
    with picture(path, 10.0, 3.8, dpi=130) as figure:
        left, right = figure.subplots(1, 2)
        for i, method in enumerate(methods):
            at = np.arange(len(cells)) + 0.12 * (i - (len(methods) - 1) / 2)
            style = {"color": PALETTE[i % len(PALETTE)], "marker": "o", "ls": "", "ms": 5}
            scores = [cell["models"][method] for cell in cells]
            ratio = [
                np.divide(each["crps"]["values"], cell["models"][base]["crps"]["values"])
                for each, cell in zip(scores, cells, strict=True)
            ]
            errors = [standard_error(r) or 0.0 for r in ratio]
            left.errorbar(at, [r.mean() for r in ratio], errors, label=method, **style)
            right.errorbar(
                at,
                [each["coverage"]["mean"] for each in scores],
                [each["coverage"]["std_error"] or 0.0 for each in scores],
                **style,
            )
        left.axhline(1.0, color="#bbbbbb", lw=0.8, zorder=0)
        left.set(yscale="log", title=f"CRPS over that of {base}")
        right.axhspan(*COVERED, color="#eeeeee", zorder=0)
        right.set(title=f"coverage of {LEVEL:.0%} intervals")
        for ax in (left, right):
            ax.set_xticks(range(len(names)), names, fontsize=8.5)
        figure.legend(loc="outside lower center", ncols=len(methods), frameon=False)


STUDY = MethodStudy("regression", RegressionOptions, _cell, regression_picture, regression_tables)
