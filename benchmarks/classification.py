"""The study of classification: figure 5 of the joint paper, and its picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study import Study, StudyOptions, mean_and_error, short
from cme_dask.cli.tables import grid
from cme_dask.config import SCENARIOS
from cme_dask.models.plots import picture

# The picture of the study of classification: two figures by the number of rows


Result = dict[str, Any]

_LINES = {
    "self-tuned": ("#222222", "*", "-"),
    "constrained": ("#1f5fa8", "o", "-"),
    "constrained, labels only": ("#1f5fa8", "o", ":"),
    "coupling": ("#c8552b", "D", "-"),
    "certified": ("#7a5195", "^", "-"),
    "unconstrained": ("#3a8f5c", "s", "--"),
    "traditional": ("#777777", "v", "--"),
    "kernel logistic": ("#d18f00", "P", "-"),
    "truth": ("#222222", "", ":"),
}
_TITLES = {
    "deviation": "distance from the true probability",
    "perfect": "distance from perfect classification",
}


def classification_picture(result: Result, path: Path) -> None:
    """Draw mean |P - truth| and mean 1 - P(label), with 5 % to 95 % of the draws of some methods.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    scenarios = list(dict.fromkeys(cell["scenario"] for cell in result["cells"]))
    with picture(path, 8.4, 2.9 * len(scenarios) + 0.8, dpi=130) as figure:
        axes = figure.subplots(len(scenarios), 2, squeeze=False, sharex=True)
        for row, name in zip(axes, scenarios, strict=True):
            cells = [cell for cell in result["cells"] if cell["scenario"] == name]
            for ax, measure in zip(row, _TITLES, strict=True):
                _panel(ax, cells, measure)
                ax.set_title(f"{name}: {_TITLES[measure]}")
        for ax in axes[-1]:
            ax.set_xlabel("training rows")
        handles, labels = axes[0, 1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
        figure.suptitle(
            "Probabilities of a label: mean absolute deviations, "
            f"{result['settings']['seeds']} draws (bands: 5 % to 95 % of them)",
            x=0.01,
            ha="left",
            fontsize=10.5,
        )


def _panel(ax: Any, cells: list[Result], measure: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    sizes = [cell["rows"] for cell in cells]
    for model, (colour, marker, line) in _LINES.items():
        if model == "truth" and measure == "deviation":
            continue
        result = [cell["models"][model][measure] for cell in cells]
        means = [each["mean"] for each in result]
        ax.plot(
            sizes,
            means,
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=4,
            linewidth=1.2,
            label=model,
        )
        if model in ("self-tuned", "kernel logistic"):
            low, high = np.quantile([each["values"] for each in result], [0.05, 0.95], axis=1)
            ax.fill_between(sizes, low, high, color=colour, alpha=0.12, linewidth=0)
    ax.set(xscale="log", yscale="log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.5, 7.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
    ax.minorticks_off()


# The study of classification: figure 5 of the joint paper, many draws, means and errors


FIGURES = {
    "deviation": "|P - truth|",
    "perfect": "1 - P(label)",
    "loss": "-log P",
    "wrong": "wrong",
    "outside": "outside [0, 1]",
}
LAWS, TRUTH = ("self-tuned", "constrained"), "truth"
JUDGED = ("deviation", "perfect", "loss", "wrong")


@dataclass(frozen=True)
class ClassificationOptions(StudyOptions):
    """What to study; the validation samples are as large as the training samples."""

    scenarios: tuple[str, ...] = ("medium", "strong")
    rows: tuple[int, ...] = (100, 200, 500, 1000)
    known = tuple(SCENARIOS)


def _judge(name: str, n: int, seed: int) -> Result:
    from benchmarks.classifiers import judge

    return judge(name, n, seed)


def _verdicts(cells: Sequence[Result]) -> list[Result]:
    return [_verdict(cell) for cell in cells]


def _verdict(cell: Result) -> Result:
    """Per figure the best method, and whether our laws are as good.

    One is tied if what it has more is at most two standard errors, of differences paired by draws.
    """
    models = {name: each for name, each in cell["models"].items() if name != TRUTH}
    verdict: Result = {"scenario": cell["scenario"], "rows": cell["rows"]}
    for figure in JUDGED:
        means = {name: float(each[figure]["mean"]) for name, each in models.items()}
        best = min(means, key=lambda name: means[name])
        verdict[figure] = {"best": best, "over_best": {}, "tied": {}}
        for law in LAWS:
            ours, least = (np.array(models[m][figure]["values"]) for m in (law, best))
            excess = mean_and_error((ours - least).tolist())
            verdict[figure]["over_best"][law] = means[law] / means[best]
            verdict[figure]["tied"][law] = excess["mean"] <= 2.0 * excess["std_error"]
    return verdict


def classification_tables(result: Result) -> Iterator[Any]:
    """A table for each scenario and size, and the verdicts."""
    for cell in result["cells"]:
        rows = [
            (name, *(_cell(figures[figure]) for figure in FIGURES))
            for name, figures in cell["models"].items()
        ]
        title = f"{cell['scenario']}, {cell['rows']:,} rows"
        yield grid(title, ("method", *FIGURES.values()), rows, "")
        yield ""
    yield grid(
        "Our laws beside the best method",
        ("", "", "best", *(f"{law} / best" for law in LAWS)),
        list(_verdict_rows(result["verdicts"])),
        f"Means over {result['settings']['seeds']} draws. In brackets: more than the best by more "
        "than two standard errors. |P - truth|: distance from the true probability. 1 - "
        "P(label): the paper's distance from perfect classification, which the truth does not "
        "minimise: it rewards overconfidence.",
        text_columns=3,
    )


def _verdict_rows(verdicts: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    for verdict in verdicts:
        for figure in JUDGED:
            result = verdict[figure]
            ratios = [
                f"{ratio:.3f}" if result["tied"][law] else f"({ratio:.3f})"
                for law, ratio in result["over_best"].items()
            ]
            yield (
                f"{verdict['scenario']}, {verdict['rows']:,}" if figure == JUDGED[0] else "",
                FIGURES[figure],
                result["best"],
                *ratios,
            )


def _cell(figure: Result) -> str:
    return f"{short(figure['mean'], 2)} ± {short(figure['std_error'], 1)}"


STUDY = Study(
    "classification",
    ClassificationOptions,
    _judge,
    _verdicts,
    classification_picture,
    classification_tables,
)
