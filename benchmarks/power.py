"""The study of power: how often the tests reject, with and without dependence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study import Study, StudyOptions
from cme_dask import kernels
from cme_dask.cli.tables import grid
from cme_dask.estimators.hypotheses import FINER, RIDGE_FOLDS, TOLERANCE, folds_of_width
from cme_dask.learning.problems import EMBEDDING_REGS as REGS
from cme_dask.models.plots import BLUE, PALETTE, picture
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.independence import (
    compare_by_signs,
    compare_by_spectrum,
    flip_signs,
    residual_inflation,
    residual_ridges,
    residual_terms,
)
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments

Array = Any
Result = dict[str, Any]

EFFECTS = (0.0, 2.0, 4.0)
"""Sizes of the effect, times the square root of the number of rows; 0: the null hypothesis."""

TOLERANCES = {"moments": TOLERANCE, "all pairs": 1e-10}
"""Trace errors of the bases; with the last one the statistic is that of all pairs of rows."""

SCENARIOS = {
    "independence": ("chi2", "bootstrap", "all pairs"),
    "two-sample": ("chi2", "bootstrap", "all pairs"),
    "conditional": ("bootstrap", "all pairs"),
}
"""The tests, and how their p-values are computed."""

LEVEL = 0.05
TABLES = 100
"""Tables of a draw, of whose tests the share that rejects counts."""

PART = 4
"""Powers and the statistic of all pairs are compared on every fourth table."""

RESAMPLES = 999
"""Random signs of the bootstrap: its level is exact for any number of them."""

KERNEL = kernels.Gaussian(0.8)


@dataclass(frozen=True)
class PowerOptions(StudyOptions):
    """What to study."""

    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    rows: tuple[int, ...] = (200, 1000, 2000)
    known = tuple(SCENARIOS)


def judge(name: str, n: int, seed: int) -> dict[str, Result]:
    """The share of the tables of one draw that each method rejects, by effect."""
    rejected: dict[str, dict[str, list[bool]]] = {
        method: {f"{effect:g}": [] for effect in EFFECTS} for method in SCENARIOS[name]
    }
    for table in range(TABLES):
        rng = np.random.default_rng([seed, table, n])
        x, noise = rng.normal(size=(2, n, 1))
        z = rng.normal(size=(n, 1))
        for effect in EFFECTS if table % PART == 0 else EFFECTS[:1]:
            rows = _rows(name, x, noise, z, effect / np.sqrt(n))
            for method, pvalue in pvalues(*rows, all_pairs=table % PART == 0).items():
                rejected[method][f"{effect:g}"].append(pvalue < LEVEL)
    return {
        method: {effect: float(np.mean(each)) for effect, each in effects.items()}
        for method, effects in rejected.items()
    }


def _rows(
    name: str, x: Array, noise: Array, z: Array, strength: float
) -> tuple[list[Array], list[Array]]:
    """The variables to choose pivots from, and the rows of each sample.

    Of y = strength sin(2 x) + noise, or of halves of x that are shifted by 2 strength; given z, of
    sin(2 z) and half of this noise.
    """
    if name == "conditional":
        common = np.sin(2.0 * z)
        given = (common + x / 2.0, common + (noise + strength * np.sin(2.0 * x)) / 2.0, z)
        return list(given), [given]
    if name == "independence":
        variables = (x, strength * np.sin(2.0 * x) + noise)
        return list(variables), [variables]
    half = len(x) // 2
    second = x[half:] + 2.0 * strength
    return [np.vstack([x[:half], second])], [(x[:half],), (second,)]


def pvalues(
    variables: Sequence[Array], samples: Sequence[tuple[Array, ...]], *, all_pairs: bool
) -> dict[str, float]:
    """P-values of the tests, as the functions compute them, without a scheduler for each table.

    Parameters
    ----------
    variables
        Rows to choose the pivots of each variable from.
    samples
        Rows of x and y, and of z if it is given, or those of x of two samples.
    all_pairs
        Whether the statistic of all pairs of rows is computed as well.
    """
    result = {}
    for name, tol in TOLERANCES.items():
        if name == "all pairs" and not all_pairs:
            continue
        blocks = []
        for variable, rows in zip("xyz", variables, strict=False):
            factor = pivoted_cholesky(KERNEL, rows, FINER * tol if variable == "z" else tol)
            basis = NewtonBasis(KERNEL, rows[factor.pivots], factor.factor)
            blocks.append(FeatureBlock(basis, (f"{variable}0",)))
        reduction = MomentReduction(tuple(blocks), 1)
        if name == "moments" or len(variables) == 3:
            reduction = replace(reduction, n_folds=folds_of_width(reduction.width))
        folds = reduction.n_folds
        sums = [
            strip_moments(reduction, rows, None, fold_of_rows(0, len(rows[0]), folds))
            for rows in samples
        ]
        if len(variables) == 3:
            regs = residual_ridges(sums[0].coarser(RIDGE_FOLDS), REGS)
            inflation = residual_inflation(sums[0], regs)
            terms = residual_terms(sums[0], regs)
            by_signs = flip_signs(terms, RESAMPLES, 0, inflation=inflation)
            result["bootstrap" if name == "moments" else name] = by_signs.pvalue
            continue
        result["chi2" if name == "moments" else name] = compare_by_spectrum(*sums).pvalue
        if name == "moments":
            by_signs = compare_by_signs(*sums, n_resamples=RESAMPLES, seed=0)
            result["bootstrap"] = by_signs.pvalue
    return result


def verdicts(cells: Sequence[Result]) -> list[Result]:
    """Of each cell: whether the levels are as stated, and how much power is lost at most."""
    result = []
    for cell in cells:
        models = cell["models"]
        *methods, _ = models
        levels = {method: models[method]["0"]["mean"] for method in models}
        lost = [
            models["all pairs"][f"{effect:g}"]["mean"] - models[methods[0]][f"{effect:g}"]["mean"]
            for effect in EFFECTS[1:]
        ]
        result.append(
            {
                "scenario": cell["scenario"],
                "rows": cell["rows"],
                "levels": levels,
                "levels_hold": all(0.04 <= levels[method] <= 0.06 for method in methods),
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
        f"Of {result['settings']['seeds'] * TABLES:,} tables, with standard errors; powers and the "
        f"statistic of all pairs of every {PART}th table.",
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
    cells = result["cells"]
    names, sizes = (
        list(dict.fromkeys(cell[key] for cell in cells)) for key in ("scenario", "rows")
    )
    with picture(path, 3.2 * len(sizes), 2.8 * len(names), dpi=130) as figure:
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


STUDY = Study("power", PowerOptions, judge, verdicts, power_picture, power_tables)
