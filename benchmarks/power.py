"""The study of power: how often the tests reject, with and without dependence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.run import write_result
from benchmarks.study import StudyOptions, judge_cells
from cme_dask import independence_test, kernels, two_sample_test
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.tables import grid
from cme_dask.models.plots import BLUE, PALETTE, STYLE

Array = Any
Result = dict[str, Any]

EFFECTS = (0.0, 2.0, 4.0)
"""Sizes of the effect, times the square root of the number of rows; 0: the null hypothesis."""

METHODS: dict[str, dict[str, Any]] = {
    "chi2": {},
    "bootstrap": {"method": "bootstrap"},
    "quadratic time": {"tol": 1e-10, "max_rank": 1000},
}
"""Options of the tests; the last one has a basis of all rows, and so the statistic of all pairs."""

LEVEL = 0.05
TABLES = 100
"""Tables of a draw, of whose tests the share that rejects counts."""

KERNEL = kernels.Gaussian(0.8)
SCENARIOS = "independence", "two-sample"
OUTPUTS = ("power.json", "power.png")


@dataclass(frozen=True)
class PowerOptions(StudyOptions):
    """What to study."""

    scenarios: tuple[str, ...] = SCENARIOS
    rows: tuple[int, ...] = (200, 1000, 2000)
    known = SCENARIOS


def run_power(
    options: PowerOptions, out: Path | None, *, overwrite: bool, progress: ProgressLines
) -> Result:
    """Measure levels and powers; write JSON and a picture into ``out``, if any."""
    if out is not None:
        prepare_folder(out, OUTPUTS, overwrite)
    result = judge_cells("power", options, judge, verdicts, progress)
    if out is not None:
        write_result(result, out, OUTPUTS, power_picture, progress)
    return result


def judge(name: str, n: int, seed: int) -> dict[str, Result]:
    """The share of the tables of one draw that each method rejects, by effect."""
    rejected = {method: np.zeros(len(EFFECTS)) for method in METHODS}
    for table in range(TABLES):
        rng = np.random.default_rng([seed, table, n])
        x, noise = rng.normal(size=(2, n, 1))
        for i, effect in enumerate(EFFECTS):
            strength = effect / np.sqrt(n)
            for method, options in METHODS.items():
                pvalue = _pvalue(name, x, noise, strength, options)
                rejected[method][i] += (pvalue < LEVEL) / TABLES
    return {
        method: {f"{effect:g}": float(share) for effect, share in zip(EFFECTS, each, strict=True)}
        for method, each in rejected.items()
    }


def _pvalue(name: str, x: Array, noise: Array, strength: float, options: Result) -> float:
    """Of y = strength sin(2 x) + noise, or of halves of x that are shifted by 2 strength."""
    options = {"scheduler": "synchronous", **options}
    if name == "independence":
        y = strength * np.sin(2.0 * x) + noise
        return independence_test(x, y, kernel_x=KERNEL, kernel_y=KERNEL, **options).pvalue
    half = len(x) // 2
    return two_sample_test(x[:half], x[half:] + 2.0 * strength, kernel=KERNEL, **options).pvalue


def verdicts(cells: Sequence[Result]) -> list[Result]:
    """Of each cell: whether the levels are as stated, and how much power is lost at most."""
    result = []
    for cell in cells:
        models = cell["models"]
        levels = {method: models[method]["0"]["mean"] for method in METHODS}
        lost = [
            models["quadratic time"][f"{effect:g}"]["mean"] - models["chi2"][f"{effect:g}"]["mean"]
            for effect in EFFECTS[1:]
        ]
        result.append(
            {
                "scenario": cell["scenario"],
                "rows": cell["rows"],
                "levels": levels,
                "levels_hold": all(0.04 <= level <= 0.06 for level in levels.values()),
                "lost_power": max(lost),
            }
        )
    return result


def power_tables(result: Result) -> Iterator[Any]:
    """Levels and powers of all methods."""
    rows = [
        (
            cell["scenario"],
            method,
            f"{cell['rows']:,}",
            *(f"{figures['mean']:.3f} ± {figures['std_error']:.3f}" for figures in each.values()),
        )
        for cell in result["cells"]
        for method, each in cell["models"].items()
    ]
    effects = [f"effect {effect:g}" for effect in EFFECTS[1:]]
    yield grid(
        f"Share of tests with p < {LEVEL}",
        ("test", "method", "rows", "level", *effects),
        rows,
        f"Of {result['settings']['seeds'] * TABLES:,} tables, with standard errors.",
        text_columns=2,
    )


def power_picture(result: Result, path: Path) -> None:
    """Draw the share of rejections against the size of the effect.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    cells = result["cells"]
    names, sizes = (
        list(dict.fromkeys(cell[key] for cell in cells)) for key in ("scenario", "rows")
    )
    with rc_context(STYLE):
        figure = Figure(figsize=(3.2 * len(sizes), 2.8 * len(names)), layout="constrained")
        axes = figure.subplots(len(names), len(sizes), squeeze=False, sharex=True, sharey=True)
        for cell in cells:
            ax = axes[names.index(cell["scenario"]), sizes.index(cell["rows"])]
            colors = (BLUE, *PALETTE[1:])
            for color, (method, each) in zip(colors, cell["models"].items(), strict=False):
                means = [figures["mean"] for figures in each.values()]
                ax.plot(EFFECTS, means, "o-", color=color, ms=4, label=method)
            ax.axhline(LEVEL, color="k", lw=0.6, ls=":")
            ax.set(title=f"{cell['scenario']}, {cell['rows']:,} rows", ylim=(0.0, 1.0))
        axes[0, 0].legend(fontsize=8.5)
        figure.supxlabel("size of the effect, times √rows")
        figure.supylabel(f"share of tests with p < {LEVEL}")
        figure.savefig(path, format="png", dpi=130)
