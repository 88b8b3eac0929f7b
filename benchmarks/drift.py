"""The study of drift: how often drift reports see a change, where there is one and where not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.power import LEVEL
from benchmarks.study import Study, StudyOptions
from cme_dask import JointDistribution, drift_report, kernels
from cme_dask.cli.tables import grid
from cme_dask.models.plots import BLUE, PALETTE, picture

Array = Any
Result = dict[str, Any]

CHANGES = {
    "no drift": (0.0, 0.0),
    "shift of x": (0.7, 0.0),
    "far shift of x": (1.5, 0.0),
    "change of y given x": (0.7, 0.4),
}
"""Shift of the first column of x in standard deviations, and slope of y on the second one."""

SCENARIOS = tuple(CHANGES)
QUESTIONS = ("x", "y", "y given x", "columns")
TABLES = 100
"""Tables of a draw, of whose reports the share that sees drift counts."""

_HERE: dict[str, Any] = {"scheduler": "synchronous"}


@dataclass(frozen=True)
class DriftOptions(StudyOptions):
    """What to study."""

    scenarios: tuple[str, ...] = SCENARIOS
    rows: tuple[int, ...] = (400, 2000)
    known = SCENARIOS


def judge(name: str, n: int, seed: int) -> dict[str, Result]:
    """The share of the tables of one draw for which each test has p < 0.05.

    Models are fitted on n rows and asked about 3 n / 4 new ones. Of columns it is the mean share.
    """
    shift, slope = CHANGES[name]
    rejected: dict[str, list[float]] = {question: [] for question in QUESTIONS}
    fit = JointDistribution(
        kernel_x=kernels.Gaussian(1.5),
        kernel_y=kernels.Gaussian(1.0),
        tol=1e-3,
        reg=1e-3,
        residual=False,
        calibration=False,
    )
    for table in range(TABLES):
        rng = np.random.default_rng([seed, table, n])
        fit.fit(*_rows(rng, n), **_HERE)
        report = drift_report(fit, *_rows(rng, 3 * n // 4, shift, slope), **_HERE)
        laws = report.x, report.y, report.y_given_x
        pvalues = [law.pvalue for law in laws if law is not None]
        for question, pvalue in zip(QUESTIONS, pvalues, strict=False):
            rejected[question].append(float(pvalue < LEVEL))
        each = [column.pvalue < LEVEL for column in report.columns]
        rejected["columns"].append(float(np.mean(each)))
    return {name: {"rejected": float(np.mean(shares))} for name, shares in rejected.items()}


def _rows(
    rng: np.random.Generator, n: int, shift: float = 0.0, slope: float = 0.0
) -> tuple[Array, Array]:
    """Rows of y = sin(2 x0) + slope x1 + noise."""
    x = rng.normal(size=(n, 2))
    x[:, 0] += shift
    return x, np.sin(2.0 * x[:, :1]) + slope * x[:, 1:] + 0.5 * rng.normal(size=(n, 1))


def verdicts(cells: Sequence[Result]) -> list[Result]:
    """Of each cell: how often y given x is said to have changed."""
    return [
        {
            "scenario": cell["scenario"],
            "rows": cell["rows"],
            "y_given_x": cell["models"]["y given x"]["rejected"]["mean"],
        }
        for cell in cells
    ]


def drift_tables(result: Result) -> Iterator[Any]:
    """Shares of all tests."""
    rows = [
        (
            cell["scenario"],
            f"{cell['rows']:,}",
            *(
                f"{each['rejected']['mean']:.3f} ± {each['rejected']['std_error']:.3f}"
                for each in cell["models"].values()
            ),
        )
        for cell in result["cells"]
    ]
    yield grid(
        f"Share of reports with p < {LEVEL}",
        ("new rows", "rows", *QUESTIONS),
        rows,
        f"Of {result['settings']['seeds'] * TABLES:,} tables, with standard errors; of columns the "
        "mean, before p-values are adjusted for their number.",
        text_columns=1,
    )


def drift_picture(result: Result, path: Path) -> None:
    """Draw the shares, a group of bars per scenario.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    cells = result["cells"]
    sizes = list(dict.fromkeys(cell["rows"] for cell in cells))
    with picture(path, 4.2 * len(sizes), 3.2, dpi=130) as figure:
        axes = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
        for ax, size in zip(axes, sizes, strict=True):
            here = [cell for cell in cells if cell["rows"] == size]
            at = np.arange(len(here))
            colors = (BLUE, *PALETTE[1:])
            for i, (color, question) in enumerate(zip(colors, QUESTIONS, strict=False)):
                each = [cell["models"][question]["rejected"]["mean"] for cell in here]
                ax.bar(at + 0.2 * (i - 1.5), each, 0.2, color=color, label=question)
            ax.axhline(LEVEL, color="k", lw=0.6, ls=":")
            names = [cell["scenario"].replace(" of ", "\nof ") for cell in here]
            ax.set_xticks(at, names)
            ax.set(title=f"{size:,} rows", ylim=(0.0, 1.0))
        axes[0].legend(fontsize=8.5)
        axes[0].set_ylabel(f"share of reports with p < {LEVEL}")


STUDY = Study("drift", DriftOptions, judge, verdicts, drift_picture, drift_tables)
