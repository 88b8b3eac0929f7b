"""The page of a study in Markdown: every number in it comes from one run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cme_dask.bench.scenarios import SCENARIOS

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
    asked = [] if set(scenarios) == set(SCENARIOS) else [f"--scenario {s}" for s in scenarios]
    asked += [f"--rows {n}" for n in sorted(sizes)]
    command = " ".join(["cme-dask study", *asked, f"--seeds {seeds}"])
    yield "# The study of laws in numbers"
    yield ""
    yield (
        f"This page, its picture and `study.json` beside it are the output of one run, `{command} "
        f"--out docs --overwrite`, which took {result['seconds'] / 60:.0f} minutes on "
        f"{machine['cores']} cores ({machine['processor']}). The tables show means over {seeds} "
        "draws and their standard errors. The row **default** is `JointDistribution().fit(x, y)`: "
        "learned kernels, averaged models, and laws of residuals where held-out scores prefer "
        "them; the other models get kernels from a grid. [Laws](laws.md) describes the scenarios "
        "and the measures, and says which constraint to choose."
    )
    yield ""
    yield "![Mean squared error of conditional probabilities by scenario and rows](study.png)"
    for n in sizes:
        row = [cell for cell in cells if cell["rows"] == n]
        for title, text in _TABLES.items():
            yield from _table(f"{title}, {n:,} rows", row, text)
    yield from _verdict_table(result["verdicts"])


def _error(figures: Result) -> str:
    found = figures["error"]
    return f"{_plain(_SCALE * found['mean'], 3)} ± {_plain(_SCALE * found['std_error'], 2)}"


def _with_error(figure: str) -> Callable[[Result], str]:
    def text(figures: Result) -> str:
        found = figures[figure]
        return f"{found['mean']:.3f} ± {found['std_error']:.3f}"

    return text


def _least(figures: Result) -> str:
    return f"{min(figures['minimum']['values']):.1e}"


_TABLES: Mapping[str, Callable[[Result], str]] = {
    "Error (43) times 10^4": _error,
    "CRPS": _with_error("crps"),
    "Held-out joint loss": _with_error("loss"),
    "Least probability in any draw": _least,
}


def _table(title: str, cells: Sequence[Result], text: Callable[[Result], str]) -> Iterator[str]:
    """A row for each model, a column for each scenario."""
    names = list(cells[0]["models"])
    names.sort(key=lambda name: name not in _LABELS)  # the default first
    yield ""
    yield f"## {title}"
    yield ""
    yield "| | " + " | ".join(cell["scenario"] for cell in cells) + " |"
    yield "|---" * (1 + len(cells)) + "|"
    for name in names:
        found = (text(cell["models"][name]) for cell in cells)
        yield f"| {_LABELS.get(name, name)} | " + " | ".join(found) + " |"


def _verdict_table(verdicts: Sequence[Result]) -> Iterator[str]:
    yield ""
    yield "## The default beside the other models"
    yield ""
    yield (
        "Ratios of errors (43). *Within*: the default has at most 1.1 times the error of the best "
        "model, or the difference is below two standard errors of paired draws. *Truth's choice*: "
        "the kernels that the truth would have chosen among those the search tried, without the "
        "step for residuals. *Noise*: the CRPS with six columns of noise added to x, over that "
        "without them. *Location*: the share of draws in which the default used laws of residuals."
    )
    yield ""
    head = ["rows", "best model", "default / best", "within", "default / truth's choice"]
    head += ["default / traditional, (41)", "noise", "location"]
    yield "| | " + " | ".join(head) + " |"
    yield "|---" * (1 + len(head)) + "|"
    for verdict in verdicts:
        row = (
            str(verdict["scenario"]),
            f"{verdict['rows']:,}",
            _LABELS.get(verdict["best"], str(verdict["best"])),
            f"{verdict['default_over_best']:.2f}",
            "yes" if verdict["within"] else "no",
            f"{verdict['default_over_truth']:.2f}",
            f"{verdict['default_over_traditional']:.2f}",
            f"{verdict['noisy_over_plain']:.3f}",
            f"{100 * verdict['location']:.0f} %",
        )
        yield "| " + " | ".join(row) + " |"
    yield ""
    over = [verdict["default_over_truth"] for verdict in verdicts]
    yield f"On average the default has {np.mean(over):.2f} times the error of the truth's choice."
    yield ""


def _plain(value: float, digits: int) -> str:
    """A number with so many significant digits, without an exponent."""
    if value == 0.0:
        return "0"
    places = max(0, digits - 1 - int(np.floor(np.log10(abs(value)))))
    return f"{value:.{places}f}"
