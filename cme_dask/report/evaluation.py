"""How a job's model did on held-out rows, beside gradient boosting: a table and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.defaults import N_FOLDS
from cme_dask.models.drawing import STYLE
from cme_dask.numerics.validation import interval_factor
from cme_dask.report.scores import coverage_lines
from cme_dask.report.tables import facts, grid, number, with_error

Array = Any
Result = dict[str, Any]

MODEL, BOOSTING = "model", "gradient boosting"


def evaluation_tables(result: Result) -> list[Any]:
    """Of ``jobs.evaluate``."""
    lines = [("rows", f"{number(result['rows'])}, held out: {result['held_out']}, 1 pass")]
    if MODEL in result["crps"]:
        lines.append(("CRPS", _text(result["crps"][MODEL])))
    lines += coverage_lines(result["coverage"].get(MODEL))
    boosting = result["boosting"]
    if boosting is not None:
        lines.append(
            (
                BOOSTING,
                f"scikit-learn's defaults, same columns, {number(boosting['rows'])} rows in "
                f"memory, {boosting['seconds']:.3g} s",
            )
        )
    for name, found in result["labels"].items():
        text = f"log loss {_text(found['log_loss'])}, accuracy {_text(found['accuracy'])}"
        lines.append((f"labels of {name}", text))
    rivals = list(result["scores"])
    rows = []
    for name, scores in result["scores"][MODEL].items():
        values = [result["scores"][rival][name]["r2"] for rival in rivals]
        base = scores["variance"]
        row = [
            name,
            "Brier score" if scores["event"] else "squared error",
            _text(scores["mse"]),
            number(base),
            "Brier skill" if scores["event"] else "R^2",
            *map(_text, values),
        ]
        if boosting is not None:
            row.append(_ratio(*(value["value"] for value in values)))
        rows.append(tuple(row))
    head = (
        *("", "error", "of the model", "unconditional", "skill", *rivals),
        *(["ratio"] if boosting is not None else []),
    )
    caption = (
        "Predictions are means and probabilities of the laws. Unconditional: the mean of the "
        "held-out rows for all of them. Standard errors: jackknife over blocks of whole units."
    )
    found = [facts("On held-out rows", lines)]
    if rows:
        found += ["", grid("", head, rows, caption, text_columns=2)]
    for name, bins in result["reliability"].items():
        found += ["", _reliability_table(name, bins, result["scores"][MODEL][name]["event"])]
    return found


def _reliability_table(name: str, bins: list[Result], event: bool) -> Any:
    rows = []
    for one in bins:
        low, high = one["low"], one["high"]
        if one["predicted"] is None:
            continue
        if event:
            borders = f"{low or 0.0:.1f} to {1.0 if high is None else high:.1f}"
        else:
            borders = " ".join(
                text
                for text in (
                    "" if low is None else f"from {number(low, 3)}",
                    "" if high is None else f"to {number(high, 3)}",
                )
                if text
            )
        predicted = f"{one['predicted']:.3f}" if event else number(one["predicted"])
        rows.append((borders, f"{100 * one['share']:.1f} %", predicted, _text(one["seen"])))
    what = f"P({name})" if event else f"mean {name}"
    caption = "What was predicted, and what happened at the held-out rows in the same bin."
    head = ("predicted", "rows", "mean prediction", "frequency" if event else "mean")
    return grid(f"Reliability of {what}", head, rows, caption)


def _ratio(model: float | None, boosting: float | None) -> str:
    known = model is not None and boosting is not None and boosting > 0.0
    return f"{model / boosting:.3f}" if known else "none"  # type: ignore[operator]


def _text(estimate: Result) -> str:
    if estimate["value"] is None:
        return "none"
    return with_error(estimate["value"], estimate["std"])


def half_widths(errors: Sequence[float | None]) -> Array:
    """Half the widths of 95 % intervals from standard errors over blocks of rows; 0 without one.

    By the t quantile, see :func:`cme_dask.numerics.validation.interval_factor`.
    """
    return interval_factor(N_FOLDS) * np.array([error or 0.0 for error in errors])


def evaluation_picture(result: Result, path: Path) -> None:
    """Skills on held-out rows, with 95 % intervals.

    Parameters
    ----------
    result
        The evaluation.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    scores = result["scores"]
    names = list(scores[MODEL])
    at = np.arange(len(names))[::-1]
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 1.7 + 0.6 * len(names)), layout="constrained")
        ax = figure.subplots()
        colours = {MODEL: "#1f5fa8", BOOSTING: "#9aa5b1"}
        height = 0.8 / len(scores)
        for i, (rival, colour) in enumerate((k, c) for k, c in colours.items() if k in scores):
            found = [scores[rival][name]["r2"] for name in names]
            ax.barh(
                at + 0.4 - height * (i + 0.5),
                [v["value"] or 0.0 for v in found],
                height * 0.9,
                xerr=half_widths([v["std"] for v in found]),
                color=colour,
                label=rival,
                error_kw={"capsize": 2.5, "elinewidth": 1.1},
            )
        ax.set_yticks(at, [_label(name, scores[MODEL][name]["event"]) for name in names])
        ax.set_xlabel("share of the variance explained (bars: 95 % intervals)")
        ax.set_title(f"{result['rows']:,} held-out rows: {result['held_out']}")
        ax.grid(axis="y", visible=False)
        figure.legend(loc="outside lower right", ncols=2)
        figure.savefig(path, format="png")


def reliability_picture(result: Result, path: Path) -> None:
    """What happened at held-out rows against what was predicted, a panel for each function.

    Parameters
    ----------
    result
        Of a job, with its evaluation.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    evaluation, units = result["evaluation"], result["units"]
    names = list(evaluation["reliability"])
    columns = min(len(names), 2)
    lines = -(-len(names) // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(5.0 * columns, 4.4 * lines), layout="constrained")
        axes = list(np.ravel(figure.subplots(lines, columns, squeeze=False)))
        for ax, name in zip(axes, names, strict=False):
            bins = [b for b in evaluation["reliability"][name] if b["seen"]["value"] is not None]
            event = evaluation["scores"][MODEL][name]["event"]
            predicted = np.array([b["predicted"] for b in bins])
            seen = np.array([b["seen"]["value"] for b in bins])
            errors = half_widths([b["seen"]["std"] for b in bins])
            # Of a rare event the upper bins are empty: the axes end above the highest one.
            largest = max(predicted.max(), (seen + errors).max())
            top = min(np.ceil(10.0 * largest) / 10.0, 1.0) if event else 1.05 * largest
            ends = (0.0, top)
            low = min(ends[0], predicted.min(), seen.min())
            ax.plot((low, ends[1]), (low, ends[1]), color="#777777", lw=1.0, ls="--")
            ax.errorbar(
                predicted, seen, yerr=errors, fmt="o-", color="#1f5fa8", capsize=2.5, ms=5, lw=1.2
            )
            for x, y, b in zip(predicted, seen, bins, strict=True):
                ax.annotate(
                    f"{100 * b['share']:.0f} %" if b["share"] >= 0.005 else "< 1 %",
                    (x, y),
                    xytext=(7, -11),
                    textcoords="offset points",
                    fontsize=8,
                    color="#555555",
                )
            if event:
                ax.set(xlim=(-0.02 * top, 1.02 * top), ylim=(-0.02 * top, 1.02 * top))
            what = "probability" if event else "mean"
            ax.set(xlabel=f"{what} predicted", ylabel="frequency seen" if event else "mean seen")
            unit = units.get(name)
            ax.set_title(f"P({name} | x)" if event else f"{name} [{unit}]" if unit else name)
        for ax in axes[len(names) :]:
            ax.set_visible(False)
        figure.suptitle(
            f"{evaluation['rows']:,} held-out rows in bins of what was predicted\n"
            "(their share; bars: 95 % intervals)",
            x=0.01,
            ha="left",
        )
        figure.savefig(path, format="png")


def _label(name: str, event: bool) -> str:
    return f"P({name} | x)" if event else f"mean {name}"
