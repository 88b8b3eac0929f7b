"""The page, the tables and the picture of the study of classes with learned kernels."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.multiclass_methods import DEFAULT, OURS, PEERS, RIVALS, table
from cme_dask.cli.tables import grid
from cme_dask.learning.rademacher import (
    BoundOptions,
    LabelledRows,
    held_out_loss,
    learn_by_bound,
)
from cme_dask.models.plots import BLUE, PALETTE, picture

Array = Any
Result = dict[str, Any]

FIGURES = {
    "accuracy": "Accuracy, %",
    "log_loss": "Log loss",
    "brier": "Brier score",
    "calibration": "Expected calibration error",
    "seconds": "CPU seconds",
}
WINE = (
    *("alcohol", "malic acid", "ash", "alkalinity", "magnesium", "phenols", "flavanoids"),
    *("nonflavanoids", "proanthocyanins", "colour", "hue", "OD280", "proline"),
)
_GRID, _MARGIN = 60, 0.6
_STEPS = 300
_STARTS = {"from an overfitted start": (0.05, 1e-6), "from an underfitted start": (5.0, 1.0)}
"""Length scale, in ranges of the columns, and ridge."""


# What a kernel learns: two columns of iris, and all of wine


LEARNED = "iris", "wine"
"""The tables of these lessons."""


def learned(data: Path) -> Result:
    """Decision regions and entropies of iris, the steps of two starts, length scales of wine."""
    from cme_dask import MulticlassEmbedding

    x, y = table(data, "iris")
    labels, codes = np.unique(y, return_inverse=True)
    x = x[:, :2]
    model = MulticlassEmbedding(random_state=0).fit(x, y, scheduler="synchronous")
    axes = [
        np.linspace(column.min() - _MARGIN, column.max() + _MARGIN, _GRID).tolist()
        for column in x.T
    ]
    at = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2)
    result: Result = {
        "iris": {
            "labels": labels.tolist(),
            "rows": np.column_stack([x, codes]).tolist(),
            "axes": axes,
            "clipped": model.clipped_proba(at).round(3).tolist(),
            "entropy": model.entropy(at, "clipped").round(3).tolist(),
            "expected": model.entropy(at, "expected").round(3).tolist(),
        },
        "steps": _steps(x, codes),
    }
    wine, kinds = table(data, "wine")
    wine = (wine - wine.mean(axis=0)) / wine.std(axis=0)
    scales = MulticlassEmbedding(kernel_x="median", random_state=0)
    scales.fit(wine, kinds, scheduler="synchronous")
    result["scales"] = [
        scale.length_scale for scale in scales.length_scales_ if scale.variable == "x"
    ]
    return result


def _steps(x: Array, codes: Array) -> Result:
    """Objective, complexity and test loss by step of full gradients, as in the paper's figure 1."""
    x = (x - x.min(axis=0)) / np.ptp(x, axis=0)
    order = np.random.default_rng(0).permutation(len(x))
    test, train = (
        LabelledRows(x[rows], codes[rows], np.ones(len(rows)))
        for rows in np.split(order, [len(x) // 5])
    )
    options = BoundOptions(None, 1e-15, 0.0, "adam", 0.1, _STEPS, _STEPS, 5, learn_reg=True)
    result = {}
    for name, (scale, reg) in _STARTS.items():
        from cme_dask.kernels import Gaussian

        steps = learn_by_bound(
            Gaussian(scale),
            reg,
            3,
            lambda epoch, start: iter([(0, train)] if not start else []),
            options,
            held_out=partial(_test_loss, train, test),
        ).history
        seen = np.isfinite(steps[:, 4])
        result[name] = {
            "step": steps[:, 0].tolist(),
            "objective": steps[:, 1].tolist(),
            "complexity": steps[:, 3].tolist(),
            "tested": steps[seen, 0].tolist(),
            "loss": steps[seen, 4].tolist(),
        }
    return result


def _test_loss(train: LabelledRows, test: LabelledRows, kernel: Any, reg: float) -> float:
    return held_out_loss(kernel, reg, train, test, 3)


# Tables


def multiclass_tables(result: Result) -> Iterator[Any]:
    """A table for each figure, and how the default compares."""
    for figure, title in FIGURES.items():
        yield grid(title, *_figure_rows(result, figure), "")
        yield ""
    yield grid("The default beside others", *_verdict_rows(result), "")


def _figure_rows(result: Result, figure: str) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    cells = result["cells"]
    rows = [
        (name, *(_cell(cell["models"][name][figure], figure) for cell in cells))
        for name in (*OURS, *PEERS)
    ]
    if figure == "accuracy":
        for i, name in enumerate(("published, GMCE", "published, GMCE-SGD", "published, CEN")):
            values = (verdict["published"][i] for verdict in result["verdicts"])
            rows.append((name, *(f"{value:.1f}" for value in values)))
    return ("", *(cell["scenario"] for cell in cells)), rows


def _cell(values: Result, figure: str) -> str:
    mean, error = values["mean"], values["std_error"]
    if figure == "accuracy":
        return f"{100.0 * mean:.1f} ± {100.0 * error:.1f}"
    if figure == "seconds":
        return f"{mean:.2g}"
    return f"{mean:.4f} ± {error:.4f}" if mean < 0.1 else f"{mean:.3f} ± {error:.3f}"


def _verdict_rows(result: Result) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    head: tuple[str, ...] = (
        *("", "below GMCE by", "as accurate", "log loss over", "that of"),
        *("calibration error above", "that of", "error of that", "as calibrated"),
    )
    rows: list[tuple[str, ...]] = [
        (
            verdict["scenario"],
            f"{verdict['below']:.2f}",
            _yes(verdict["accurate"]),
            f"{verdict['loss_over_rival']:.3f}",
            verdict["rival"],
            f"{verdict['excess']:.4f}",
            verdict["calibrated"],
            f"{verdict['margin']:.4f}",
            _yes(verdict["as_calibrated"]),
        )
        for verdict in result["verdicts"]
    ]
    return head, rows


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# The page


def multiclass_page(result: Result) -> str:
    """The page of the study in Markdown: every number in it comes from its runs."""
    return "\n".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    settings, machine = result["settings"], result["machine"]
    rows = ", ".join(f"{cell['scenario']} {cell['rows']:,}" for cell in result["cells"])
    verdicts = result["verdicts"]
    models = [model for cell in result["cells"] for model in cell["models"].values()]
    seconds = settings["seeds"] * sum(model["seconds"]["mean"] for model in models)
    yield "# Classes with learned kernels in numbers"
    yield ""
    yield (
        "Table 1 of Hsu, Nock and Ramos (2018): six tables of the UCI repository, "
        f"{settings['seeds']} folds (stratified, seed 0), every model fitted without each of them. "
        "`python3 run study multiclass --data FOLDER --out docs --overwrite` writes this page, its "
        "picture and `multiclass.json`; with `--data-set NAME` it studies that table again and "
        "keeps the others. Beside the tables that are studied, the folder needs `iris.csv` and "
        f"`wine.csv`, for the picture. The fits took {seconds / 60.0:.0f} minutes of CPU time on "
        f"a machine of {machine['cores']} cores ({machine['processor']}), which other work may "
        "have shared; seconds are those of the CPU, of a fit and its predictions. [Classification]"
        "(classification.md) describes the estimators."
    )
    yield ""
    yield f"Rows: {rows}. Figures are means over the folds and their standard errors."
    for figure, title in FIGURES.items():
        yield from _table(title, *_figure_rows(result, figure))
    yield ""
    yield (
        f"`{DEFAULT}` has its default parameters on every table, *isotropic* begins with one "
        "length scale for all columns, the other two are the defaults, too. The parameters of SVC "
        "(C and the length scale of a Gaussian kernel; probabilities by Platt's method) and of "
        "logistic regression (C) are chosen by three folds of at most 1,000 rows. The Gaussian "
        "process learns its kernel, one problem for each label, on at most "
        f"{settings['process_rows']:,} rows over the root of the number of problems. The "
        f"calibration error has {settings['bins']} bins of equal width of the largest "
        "probability, over the rows of all folds; its standard errors are those of the jackknife."
    )
    yield from _table("The default beside others", *_verdict_rows(result))
    yield ""
    accurate, calibrated = (
        sum(verdict[key] for verdict in verdicts) for key in ("accurate", "as_calibrated")
    )
    better = sum(verdict["loss_over_rival"] < 1.0 for verdict in verdicts)
    yield (
        f"The default is as accurate as the paper's Gaussian kernels, to one standard error of our "
        f"mean, on {accurate} of {len(verdicts)} tables, and as the best one of its methods on "
        f"{sum(verdict['accurate_as_best'] for verdict in verdicts)}. Its log loss is below that "
        f"of the best one of {', '.join(RIVALS)} on {better}, and its calibration error is the "
        f"lowest, or higher by at most one standard error of the difference, on {calibrated}."
    )
    yield ""
    yield "## What is learned"
    yield ""
    yield "![Iris: regions, entropies and steps; length scales of wine](multiclass.png)"
    yield ""
    yield (
        "Above: the default on two columns of iris, its clipped probabilities (6) as colours, "
        "their entropy (33) and the expected information (37), which falls to 0 where there are no "
        "rows since the embedding does. Below: the objective (12) and its complexity r by steps "
        "on all rows, from a kernel that is too narrow and from one that is too wide, with the "
        "loss on a fifth of the rows that the steps have not seen; and the length scales that are "
        "learned for wine from the median heuristic. The objective bounds nothing at parameters "
        "learned with it."
    )
    yield ""


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from ("", f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
    for row in rows:
        yield f"| {' | '.join(row)} |"


# The picture


def multiclass_picture(result: Result, path: Path) -> None:
    """Draw the decision regions and entropies of iris, the steps, and the length scales of wine.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    lessons = result["learned"]
    with picture(path, 11.0, 6.6, dpi=130) as figure:
        above, below = figure.subplots(2, 3)
        _regions(above, lessons["iris"])
        _paths(below[:2], lessons["steps"])
        scales = np.array(lessons["scales"])
        order = np.argsort(scales)[::-1]
        below[2].barh([WINE[i] for i in order], scales[order], color=BLUE)
        below[2].set(xscale="log", title="wine: length scales (std)")
        below[2].xaxis.set_minor_formatter("")


def _regions(axes: Sequence[Any], iris: Result) -> None:
    horizontal, vertical = iris["axes"]
    extent = (horizontal[0], horizontal[-1], vertical[0], vertical[-1])
    shape = (len(vertical), len(horizontal))
    rows = np.array(iris["rows"])
    images = (
        ("probabilities (6)", np.array(iris["clipped"]).reshape(*shape, 3), None),
        ("entropy (33)", np.array(iris["entropy"]).reshape(shape), "viridis"),
        ("expected information (37)", np.array(iris["expected"]).reshape(shape), "viridis"),
    )
    for ax, (title, values, colours) in zip(axes, images, strict=True):
        image = ax.imshow(values, origin="lower", extent=extent, aspect="auto", cmap=colours)
        if colours:
            ax.figure.colorbar(image, ax=ax)
        for code, label in enumerate(iris["labels"]):
            here = rows[:, 2] == code
            ax.scatter(
                *rows[here, :2].T,
                s=12,
                c=[("#b00000", "#006000", "#0000b0")[code]],
                edgecolors="white",
                linewidths=0.4,
                label=label,
            )
        ax.set(title=f"iris: {title}", xlabel="sepal length", ylabel="sepal width")
    axes[0].legend(fontsize=7.5, frameon=True)


def _paths(axes: Sequence[Any], steps: Result) -> None:
    for ax, (name, path) in zip(axes, steps.items(), strict=True):
        colours = (BLUE, *PALETTE[1:])
        ax.plot(path["step"], path["objective"], color=colours[0], label="objective (12)")
        ax.plot(path["step"], path["complexity"], color=colours[1], label="complexity r")
        ax.plot(path["tested"], path["loss"], "o-", ms=2.5, color=colours[2], label="test loss")
        ax.set(title=f"iris: {name}", xlabel="step", yscale="log")
        ax.legend(fontsize=7.5)
